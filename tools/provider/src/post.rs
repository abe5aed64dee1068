// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Posting work requests: memory writes, a fence, and a doorbell only if the device sleeps.

use core::ffi::c_int;
use core::mem::{offset_of, size_of, MaybeUninit};
use core::ptr;
use core::sync::atomic::{fence, Ordering};

use ferrite_abi::{
    queue_doorbell, send_doorbell, AtomicPart, BindPart, DatagramPart, FlushPart, Plain,
    QueuePairRecord, ReceiveHeader, RemotePart, SendHeader, SendOpcode, SendPart, Sge, BLOCK_SIZE,
    DOORBELL_RECEIVE, DOORBELL_SEND, FEATURE_ATOMICS, FEATURE_SEND_QUEUE_REGISTRATION,
    FEATURE_WINDOWS, MAX_BLOCKS, MAX_MESSAGE, SEND_FENCE, SEND_INLINE, SEND_SIGNALED,
    SEND_SOLICITED,
};

use crate::ah::Ah;
use crate::qp::Qp;
use crate::sys::*;
use crate::window::bind_part;

// Scatter/gather entries are copied as they are.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(offset_of!(Sge, address) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

/// The host's side of a send queue.
pub(crate) struct SendQueue {
    /// Blocks written, free-running.
    pub(crate) producer: u32,
    /// Work requests written, free-running.
    pub(crate) posted: u32,
    /// The extended interface's unfinished work.
    pub(crate) session: crate::post_ex::Session,
}

/// The host's side of a receive queue.
pub(crate) struct ReceiveQueue {
    /// Entries written, free-running.
    producer: u32,
}

impl SendQueue {
    pub(crate) fn new() -> Self {
        Self {
            producer: 0,
            posted: 0,
            session: crate::post_ex::Session::new(),
        }
    }
}

impl ReceiveQueue {
    pub(crate) fn new() -> Self {
        Self { producer: 0 }
    }
}

/// A work request but for its data.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) wr_id: u64,
    pub(crate) opcode: SendOpcode,
    /// `ibv_send_flags`.
    pub(crate) flags: u32,
    /// Immediate data or tag to invalidate, as the header wants it.
    pub(crate) immediate: u32,
    /// Extended connections: the shared receive queue at the peer.
    pub(crate) srqn: u32,
    pub(crate) part: Part,
}

/// What follows the header.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Send,
    Remote { address: u64, rkey: u32 },
    Atomic(AtomicPart),
    Datagram(DatagramPart),
    Bind(BindPart),
    Flush(FlushPart),
}

/// The data of a work request.
pub(crate) enum Data<'a> {
    /// The device fetches or fills them.
    Entries(&'a [ibv_sge]),
    /// They are copied now, from entries whose keys do not count.
    Copy(&'a [ibv_sge]),
    /// They are copied now.
    CopyBuffers(&'a [ibv_data_buf]),
    /// These, which every work request has room for.
    Eight([u8; 8]),
}

impl Part {
    fn bytes(&self, srqn: u32) -> PartBytes {
        match *self {
            Part::Send => PartBytes::Send(SendPart {
                srqn,
                ..SendPart::zeroed()
            }),
            Part::Remote { address, rkey } => PartBytes::Remote(RemotePart {
                address,
                rkey,
                srqn,
            }),
            Part::Atomic(part) => PartBytes::Atomic(AtomicPart { srqn, ..part }),
            Part::Datagram(part) => PartBytes::Datagram(part),
            Part::Bind(part) => PartBytes::Bind(part),
            Part::Flush(part) => PartBytes::Flush(part),
        }
    }
}

enum PartBytes {
    Send(SendPart),
    Remote(RemotePart),
    Atomic(AtomicPart),
    Datagram(DatagramPart),
    Bind(BindPart),
    Flush(FlushPart),
}

impl PartBytes {
    fn as_bytes(&self) -> &[u8] {
        match self {
            PartBytes::Send(part) => part.as_bytes(),
            PartBytes::Remote(part) => part.as_bytes(),
            PartBytes::Atomic(part) => part.as_bytes(),
            PartBytes::Datagram(part) => part.as_bytes(),
            PartBytes::Bind(part) => part.as_bytes(),
            PartBytes::Flush(part) => part.as_bytes(),
        }
    }
}

/// How the completion names an operation.
fn completion_opcode(opcode: SendOpcode) -> ibv_wc_opcode {
    match opcode {
        SendOpcode::Send | SendOpcode::SendImmediate | SendOpcode::SendInvalidate => IBV_WC_SEND,
        SendOpcode::Write | SendOpcode::WriteImmediate => IBV_WC_RDMA_WRITE,
        SendOpcode::Read => IBV_WC_RDMA_READ,
        SendOpcode::CompareSwap => IBV_WC_COMP_SWAP,
        SendOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        SendOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
        SendOpcode::Bind => IBV_WC_BIND_MW,
        SendOpcode::AtomicWrite => IBV_WC_ATOMIC_WRITE,
        SendOpcode::Flush => IBV_WC_FLUSH,
        // User space does not register through the queue.
        SendOpcode::Register => IBV_WC_DRIVER1,
    }
}

/// Writes bytes one after the other.
pub(crate) struct Cursor(pub(crate) *mut u8);

impl Cursor {
    /// # Safety
    ///
    /// There is room for `bytes` at the cursor.
    pub(crate) unsafe fn put(&mut self, bytes: &[u8]) {
        // SAFETY: by the caller; the queue is never a consumer's memory.
        unsafe { self.put_from(bytes.as_ptr(), bytes.len()) };
    }

    /// # Safety
    ///
    /// There is room for `length` bytes at the cursor, and they may be read at `from`.
    pub(crate) unsafe fn put_from(&mut self, from: *const u8, length: usize) {
        // SAFETY: by the caller.
        unsafe {
            ptr::copy_nonoverlapping(from, self.0, length);
            self.0 = self.0.add(length);
        }
    }
}

impl Qp {
    /// Posting to the send queue is refused before RTS.
    pub(crate) fn may_send(&self) -> bool {
        !matches!(self.state(), IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR)
    }

    /// Writes a work request behind those written before, without showing it to the device.
    #[inline]
    pub(crate) fn write_send(
        &self,
        queue: &mut SendQueue,
        work: &Work,
        data: &Data<'_>,
    ) -> Result<(), c_int> {
        let capacity = &self.geometry.capacity;
        if self.send_room(queue.posted) == 0 {
            return Err(libc::ENOMEM);
        }
        let total: u64 = match data {
            Data::Entries(entries) | Data::Copy(entries) => {
                entries.iter().map(|entry| u64::from(entry.length)).sum()
            }
            Data::CopyBuffers(buffers) => buffers.iter().fold(0, |sum: u64, buffer| {
                sum.saturating_add(buffer.length as u64)
            }),
            Data::Eight(bytes) => bytes.len() as u64,
        };
        let mut flags = 0;
        let (payload, sge_count, inline_length) = match data {
            Data::Entries(entries) => {
                if entries.len() > capacity.max_send_sge as usize || total > u64::from(MAX_MESSAGE)
                {
                    return Err(libc::EINVAL);
                }
                (size_of_val(*entries), entries.len() as u8, 0)
            }
            Data::Copy(_) | Data::CopyBuffers(_) => {
                if total > u64::from(capacity.max_inline_data)
                    || matches!(
                        work.opcode,
                        SendOpcode::Read | SendOpcode::CompareSwap | SendOpcode::FetchAdd
                    )
                {
                    return Err(libc::EINVAL);
                }
                flags |= SEND_INLINE;
                (total as usize, 0, total as u32)
            }
            // No more than a scatter/gather entry, for which there is room always.
            Data::Eight(bytes) => {
                flags |= SEND_INLINE;
                (bytes.len(), 0, bytes.len() as u32)
            }
        };
        if self.signal_all || work.flags & IBV_SEND_SIGNALED != 0 {
            flags |= SEND_SIGNALED;
        }
        if work.flags & IBV_SEND_SOLICITED != 0 {
            flags |= SEND_SOLICITED;
        }
        if work.flags & IBV_SEND_FENCE != 0 {
            flags |= SEND_FENCE;
        }
        let blocks = ferrite_abi::blocks_for(work.opcode, self.datagram, payload) as u32;
        let header = SendHeader {
            opcode: work.opcode.number(),
            flags,
            blocks: blocks as u8,
            sge_count,
            immediate: work.immediate,
            length: inline_length,
            reserved: 0,
        };

        let first = queue.producer & (self.geometry.sq_blocks - 1);
        let mut scratch = MaybeUninit::<[u64; MAX_BLOCKS * BLOCK_SIZE / 8]>::uninit();
        let wraps = first + blocks > self.geometry.sq_blocks;
        let target = if wraps {
            scratch.as_mut_ptr().cast::<u8>()
        } else {
            self.send_block(first)
        };
        let mut cursor = Cursor(target);
        // SAFETY: header, part and payload take no more than `blocks` blocks, which is at most
        // `MAX_BLOCKS` for payloads within the capacity and so fits in the scratch; else the ring
        // has that many from `first` on. The room check above shows that the device is done with
        // them. What an inline work request names is readable by the consumer's word.
        unsafe {
            cursor.put(header.as_bytes());
            cursor.put(work.part.bytes(work.srqn).as_bytes());
            match data {
                Data::Entries(entries) => cursor.put_from(entries.as_ptr().cast(), payload),
                Data::Copy(entries) => {
                    for entry in *entries {
                        cursor.put_from(entry.addr as *const u8, entry.length as usize);
                    }
                }
                Data::CopyBuffers(buffers) => {
                    for buffer in *buffers {
                        cursor.put_from(buffer.addr.cast(), buffer.length);
                    }
                }
                Data::Eight(bytes) => cursor.put(bytes),
            }
        }
        if wraps {
            for block in 0..blocks {
                let slot = (first + block) & (self.geometry.sq_blocks - 1);
                // SAFETY: both blocks are inside their arrays. Bytes past the payload are copied
                // as whatever they are; nobody reads them.
                unsafe {
                    ptr::copy_nonoverlapping(
                        scratch
                            .as_ptr()
                            .cast::<MaybeUninit<u8>>()
                            .add(block as usize * BLOCK_SIZE),
                        self.send_block(slot).cast::<MaybeUninit<u8>>(),
                        BLOCK_SIZE,
                    );
                }
            }
        }
        let posted = queue.posted.wrapping_add(1);
        self.send_posted(
            queue.producer,
            posted,
            work.wr_id,
            completion_opcode(work.opcode),
        );
        queue.posted = posted;
        queue.producer = queue.producer.wrapping_add(blocks);
        Ok(())
    }

    fn send_block(&self, block: u32) -> *mut u8 {
        debug_assert!(block < self.geometry.sq_blocks);
        // SAFETY: the send queue is at the start of the buffer.
        unsafe { self.buffer.base().add(block as usize * BLOCK_SIZE) }
    }

    /// Shows all written work requests to the device.
    #[inline]
    pub(crate) fn publish_send(&self, queue: &SendQueue) {
        // Release: the blocks are written before the index.
        self.record(offset_of!(QueuePairRecord, send_producer))
            .store(queue.producer, Ordering::Release);
        // The index is written before the wake word is read; the device does it the other way
        // round, so that one of the two sees the other's write.
        fence(Ordering::SeqCst);
        if self
            .record(offset_of!(QueuePairRecord, send_wake))
            .load(Ordering::Relaxed)
            != 0
        {
            self.doorbells
                .ring(DOORBELL_SEND, send_doorbell(self.qpn, queue.producer));
        }
    }

    /// Takes a work request of the plain interface apart.
    ///
    /// # Safety
    ///
    /// `wr` is as the verbs demand for its opcode.
    unsafe fn work(&self, wr: &ibv_send_wr) -> Result<Work, c_int> {
        if self.datagram {
            // SAFETY: by the caller.
            return unsafe { self.datagram_work(wr) };
        }
        // SAFETY: the unions' members are plain integers; which of them counts is by the opcode,
        // and any bytes are valid for them.
        let (immediate, rdma, atomic) =
            unsafe { (wr.__bindgen_anon_1.imm_data, wr.wr.rdma, wr.wr.atomic) };
        let remote = Part::Remote {
            address: rdma.remote_addr,
            rkey: rdma.rkey,
        };
        let (opcode, part) = match wr.opcode {
            IBV_WR_SEND => (SendOpcode::Send, Part::Send),
            IBV_WR_SEND_WITH_IMM => (SendOpcode::SendImmediate, Part::Send),
            IBV_WR_RDMA_WRITE => (SendOpcode::Write, remote),
            IBV_WR_RDMA_WRITE_WITH_IMM => (SendOpcode::WriteImmediate, remote),
            IBV_WR_RDMA_READ => (SendOpcode::Read, remote),
            IBV_WR_ATOMIC_CMP_AND_SWP if self.has(FEATURE_ATOMICS) => (
                SendOpcode::CompareSwap,
                Part::Atomic(AtomicPart {
                    address: atomic.remote_addr,
                    rkey: atomic.rkey,
                    srqn: 0,
                    operand: atomic.swap,
                    compare: atomic.compare_add,
                }),
            ),
            IBV_WR_ATOMIC_FETCH_AND_ADD if self.has(FEATURE_ATOMICS) => (
                SendOpcode::FetchAdd,
                Part::Atomic(AtomicPart {
                    address: atomic.remote_addr,
                    rkey: atomic.rkey,
                    srqn: 0,
                    operand: atomic.compare_add,
                    compare: 0,
                }),
            ),
            IBV_WR_SEND_WITH_INV if self.has(FEATURE_SEND_QUEUE_REGISTRATION) => {
                (SendOpcode::SendInvalidate, Part::Send)
            }
            IBV_WR_LOCAL_INV if self.has(FEATURE_SEND_QUEUE_REGISTRATION) => {
                (SendOpcode::LocalInvalidate, Part::Send)
            }
            IBV_WR_BIND_MW if self.has(FEATURE_WINDOWS) => {
                // SAFETY: by the caller, the work request names a live window and region.
                let part = unsafe {
                    let bind = &wr.__bindgen_anon_2.bind_mw;
                    if bind.mw.is_null() || (*bind.mw).type_ != IBV_MW_TYPE_2 {
                        return Err(libc::EINVAL);
                    }
                    bind_part(bind.mw, bind.rkey, &bind.bind_info)?
                };
                (SendOpcode::Bind, part)
            }
            _ => return Err(libc::EINVAL),
        };
        let immediate = match opcode {
            SendOpcode::SendImmediate
            | SendOpcode::WriteImmediate
            | SendOpcode::SendInvalidate
            | SendOpcode::LocalInvalidate => immediate,
            _ => 0,
        };
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            immediate,
            srqn: if self.extended {
                // SAFETY: as above.
                unsafe { wr.qp_type.xrc.remote_srqn }
            } else {
                0
            },
            part,
        })
    }

    /// As [`Qp::work`], for a datagram.
    ///
    /// # Safety
    ///
    /// `wr` names a live address handle.
    unsafe fn datagram_work(&self, wr: &ibv_send_wr) -> Result<Work, c_int> {
        let opcode = match wr.opcode {
            IBV_WR_SEND => SendOpcode::Send,
            IBV_WR_SEND_WITH_IMM => SendOpcode::SendImmediate,
            _ => return Err(libc::EINVAL),
        };
        // SAFETY: as in `work`.
        let (immediate, datagram) = unsafe { (wr.__bindgen_anon_1.imm_data, wr.wr.ud) };
        if datagram.ah.is_null() {
            return Err(libc::EINVAL);
        }
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            immediate: if opcode == SendOpcode::Send {
                0
            } else {
                immediate
            },
            srqn: 0,
            part: Part::Datagram(DatagramPart {
                // SAFETY: by the caller.
                path: unsafe { Ah::path(datagram.ah) },
                qpn: datagram.remote_qpn,
                qkey: datagram.remote_qkey,
            }),
        })
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    fn write_receive(&self, queue: &mut ReceiveQueue, wr: &ibv_recv_wr) -> Result<(), c_int> {
        // SAFETY: by the consumer, the list has that many entries.
        let entries = unsafe { list(wr.sg_list, wr.num_sge) }?;
        if entries.len() > self.geometry.capacity.max_recv_sge as usize {
            return Err(libc::EINVAL);
        }
        if self.receive_room(queue.producer) == 0 {
            return Err(libc::ENOMEM);
        }
        let slot = (queue.producer & (self.geometry.rq_entries - 1)) as usize;
        let header = ReceiveHeader {
            sge_count: entries.len() as u32,
            id: 0,
            reserved: [0; 2],
        };
        // SAFETY: the entry is inside the receive queue, it has room for the header and
        // `max_recv_sge` entries, and the room check shows that the device is done with it.
        unsafe {
            let mut cursor = Cursor(
                self.buffer
                    .base()
                    .add(self.geometry.rq_offset + slot * self.geometry.rq_stride as usize),
            );
            cursor.put(header.as_bytes());
            cursor.put_from(entries.as_ptr().cast(), size_of_val(entries));
        }
        self.receive_posted(queue.producer, wr.wr_id);
        queue.producer = queue.producer.wrapping_add(1);
        Ok(())
    }

    fn publish_receive(&self, queue: &ReceiveQueue) {
        // As in `publish_send`.
        self.record(offset_of!(QueuePairRecord, receive_producer))
            .store(queue.producer, Ordering::Release);
        fence(Ordering::SeqCst);
        if self
            .record(offset_of!(QueuePairRecord, receive_wake))
            .load(Ordering::Relaxed)
            != 0
        {
            self.doorbells
                .ring(DOORBELL_RECEIVE, queue_doorbell(self.qpn));
        }
    }
}

/// The consumer's list of entries.
///
/// # Safety
///
/// `entries` points to `count` entries that live as long as the result is used.
pub(crate) unsafe fn list<'a>(
    entries: *const ibv_sge,
    count: c_int,
) -> Result<&'a [ibv_sge], c_int> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: by the caller.
        Ok(count) => Ok(unsafe { core::slice::from_raw_parts(entries, count) }),
        Err(_) => Err(libc::EINVAL),
    }
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut result = 0;
    let mut queue = qp.send.lock();
    let before = queue.producer;
    if !qp.may_send() {
        // SAFETY: the consumer passes a place for the work request that failed.
        unsafe { *bad = wr };
        return libc::EINVAL;
    }
    // SAFETY: the consumer passes a list of work requests that ends with null.
    while let Some(request) = unsafe { wr.as_ref() } {
        // SAFETY: by the consumer, the lists of a work request are as it says.
        let written = unsafe {
            qp.work(request).and_then(|work| {
                let entries = list(request.sg_list, request.num_sge)?;
                let data = if request.send_flags & IBV_SEND_INLINE != 0 {
                    Data::Copy(entries)
                } else {
                    Data::Entries(entries)
                };
                qp.write_send(&mut queue, &work, &data)
            })
        };
        if let (Ok(()), IBV_WR_BIND_MW) = (&written, request.opcode) {
            // SAFETY: the bind was taken, so that it names a live window, whose key is now this.
            unsafe {
                let bind = &request.__bindgen_anon_2.bind_mw;
                (*bind.mw).rkey = bind.rkey;
            }
        }
        if let Err(errno) = written {
            // SAFETY: as above.
            unsafe { *bad = wr };
            result = errno;
            break;
        }
        wr = request.next;
    }
    if queue.producer != before {
        qp.publish_send(&queue);
    }
    result
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut result = 0;
    let mut queue = qp.receive.lock();
    let before = queue.producer;
    if qp.state() == IBV_QPS_RESET || !qp.receives {
        // SAFETY: the consumer passes a place for the work request that failed.
        unsafe { *bad = wr };
        return libc::EINVAL;
    }
    // SAFETY: the consumer passes a list of work requests that ends with null.
    while let Some(request) = unsafe { wr.as_ref() } {
        if let Err(errno) = qp.write_receive(&mut queue, request) {
            // SAFETY: as above.
            unsafe { *bad = wr };
            result = errno;
            break;
        }
        wr = request.next;
    }
    if queue.producer != before {
        qp.publish_receive(&queue);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Doorbells;
    use crate::qp::tests::{alone, cap, extended};

    /// A page that stands for the doorbells.
    struct Page(Vec<u64>);

    impl Page {
        fn new() -> Self {
            Self(vec![0; ferrite_abi::DOORBELL_PAGE_SIZE / 8])
        }

        fn doorbells(&mut self) -> Doorbells {
            // SAFETY: the tests keep the page longer than the queue pair.
            unsafe { Doorbells::new(self.0.as_mut_ptr().cast()) }
        }

        fn take(&self, offset: usize) -> u64 {
            let word = self.0.as_ptr().wrapping_add(offset / 8).cast_mut();
            // SAFETY: the word is inside the page, which only this thread uses.
            unsafe {
                let value = ptr::read_volatile(word);
                ptr::write_volatile(word, 0);
                value
            }
        }
    }

    /// The bytes of a work request, as the device fetches them from the ring.
    fn fetch(qp: &Qp, index: u32) -> Vec<u8> {
        let block = |index: u32| {
            let at = qp.send_block(index & (qp.geometry.sq_blocks - 1));
            // SAFETY: the block is inside the ring.
            unsafe { core::slice::from_raw_parts(at, BLOCK_SIZE) }.to_vec()
        };
        let blocks = u32::from(block(index)[2]);
        (0..blocks).flat_map(|n| block(index + n)).collect()
    }

    fn wr(opcode: ibv_wr_opcode, entries: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
        let mut wr = ibv_send_wr {
            wr_id: 42,
            sg_list: entries.as_mut_ptr(),
            num_sge: entries.len() as i32,
            opcode,
            send_flags: flags,
            ..Default::default()
        };
        wr.__bindgen_anon_1.imm_data = 0x0102_0304;
        wr.wr.rdma.remote_addr = 0x1122_3344_5566_7788;
        wr.wr.rdma.rkey = 0x99aa_bbcc;
        wr
    }

    fn send(qp: &Qp, wr: &mut ibv_send_wr) -> c_int {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the work request is complete.
        let result = unsafe { post_send(ptr::from_ref(qp).cast_mut().cast(), wr, &mut bad) };
        assert_eq!(result != 0, bad == ptr::from_mut(wr));
        result
    }

    fn sge(length: u32) -> ibv_sge {
        ibv_sge {
            addr: 0x7000_0000 + u64::from(length),
            length,
            lkey: length ^ 0xff,
        }
    }

    #[test]
    fn a_write_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let qp = alone(&cap(4, 1, 3, 1, 0), page.doorbells());
        let mut entries = [sge(5), sge(6), sge(7)];
        let mut wr = wr(
            IBV_WR_RDMA_WRITE_WITH_IMM,
            &mut entries,
            IBV_SEND_SIGNALED | IBV_SEND_SOLICITED,
        );
        assert_eq!(send(&qp, &mut wr), 0);
        let bytes = fetch(&qp, 0);
        let header = SendHeader::from_prefix(&bytes).unwrap();
        assert_eq!(header.opcode, SendOpcode::WriteImmediate.number());
        assert_eq!(header.flags, SEND_SIGNALED | SEND_SOLICITED);
        assert_eq!((header.blocks, header.sge_count), (2, 3));
        assert_eq!((header.immediate, header.length), (0x0102_0304, 0));
        let part = RemotePart::from_prefix(&bytes[16..]).unwrap();
        assert_eq!(part.address, 0x1122_3344_5566_7788);
        assert_eq!(part.rkey, 0x99aa_bbcc);
        for (number, entry) in entries.iter().enumerate() {
            let found = Sge::from_prefix(&bytes[32 + 16 * number..]).unwrap();
            assert_eq!(found.address, entry.addr);
            assert_eq!((found.length, found.lkey), (entry.length, entry.lkey));
        }
        assert_eq!(qp.send_done(0), (42, IBV_WC_RDMA_WRITE));
    }

    #[test]
    fn the_doorbell_is_rung_only_while_the_device_sleeps() {
        let mut page = Page::new();
        let qp = alone(&cap(8, 8, 1, 1, 0), page.doorbells());
        let mut entries = [sge(5)];
        let mut wr = wr(IBV_WR_SEND, &mut entries, 0);
        let wake = qp.record(offset_of!(QueuePairRecord, send_wake));
        let producer = qp.record(offset_of!(QueuePairRecord, send_producer));
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 1));
        wake.store(0, Ordering::Relaxed);
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), 0);
        assert_eq!(producer.load(Ordering::Relaxed), 2);
        wake.store(1, Ordering::Relaxed);
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 3));

        let mut receive = ibv_recv_wr {
            wr_id: 9,
            next: ptr::null_mut(),
            sg_list: entries.as_mut_ptr(),
            num_sge: 1,
        };
        let mut post = || {
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair lives, and the work request is complete.
            unsafe {
                post_recv(
                    ptr::from_ref(&*qp).cast_mut().cast(),
                    &mut receive,
                    &mut bad,
                )
            }
        };
        assert_eq!(post(), 0);
        assert_eq!(page.take(DOORBELL_RECEIVE), 0);
        qp.record(offset_of!(QueuePairRecord, receive_wake))
            .store(1, Ordering::Relaxed);
        assert_eq!(post(), 0);
        assert_eq!(page.take(DOORBELL_RECEIVE), queue_doorbell(0x123));
        assert_eq!(qp.receive_done(1), 9);
    }

    #[test]
    fn work_requests_wrap_around_the_end_of_the_ring() {
        let mut page = Page::new();
        let qp = alone(&cap(3, 1, 6, 1, 0), page.doorbells());
        let mut index = 0;
        for round in 0..50u32 {
            let count = 1 + (round * 5) % 6;
            let mut entries: Vec<ibv_sge> = (0..count).map(|n| sge(100 * round + n)).collect();
            let mut wr = wr(IBV_WR_RDMA_READ, &mut entries, 0);
            wr.wr_id = u64::from(round);
            assert_eq!(send(&qp, &mut wr), 0);
            let bytes = fetch(&qp, index);
            let blocks = u32::from(bytes[2]);
            assert_eq!(blocks, (32 + 16 * count).div_ceil(64));
            for (number, entry) in entries.iter().enumerate() {
                let found = Sge::from_prefix(&bytes[32 + 16 * number..]).unwrap();
                assert_eq!((found.address, found.length), (entry.addr, entry.length));
            }
            assert_eq!(qp.send_done(index), (u64::from(round), IBV_WC_RDMA_READ));
            index += blocks;
        }
    }

    #[test]
    fn a_full_queue_refuses_and_a_completion_makes_room() {
        let mut page = Page::new();
        let qp = alone(&cap(5, 1, 4, 1, 0), page.doorbells());
        let room = qp.geometry.capacity.max_send_wr;
        let mut entries = [sge(1)];
        let mut wr = wr(IBV_WR_SEND, &mut entries, 0);
        for _ in 0..room {
            assert_eq!(send(&qp, &mut wr), 0);
        }
        assert_eq!(send(&qp, &mut wr), libc::ENOMEM);
        // The third is done, and with it the two before, which had no completion.
        qp.send_done(2);
        for _ in 0..3 {
            assert_eq!(send(&qp, &mut wr), 0);
        }
        assert_eq!(send(&qp, &mut wr), libc::ENOMEM);
    }

    #[test]
    fn what_cannot_be_done_is_refused_and_leaves_no_trace() {
        let mut page = Page::new();
        let qp = alone(&cap(5, 1, 1, 1, 32), page.doorbells());
        let most = qp.geometry.capacity;
        let mut many = vec![sge(1); most.max_send_sge as usize + 1];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut many, 0)), libc::EINVAL);
        let mut long = [sge(MAX_MESSAGE), sge(1)];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long, 0)), libc::EINVAL);
        let mut inline = [sge(most.max_inline_data + 1)];
        let mut request = wr(IBV_WR_SEND, &mut inline, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        let mut read = [sge(1)];
        let mut request = wr(IBV_WR_RDMA_READ, &mut read, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        assert_eq!(send(&qp, &mut wr(77, &mut read, 0)), libc::EINVAL);
        assert_eq!(qp.send.lock().producer, 0);
        assert_eq!(page.take(DOORBELL_SEND), 0);
        // The longest message itself is fine.
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long[..1], 0)), 0);
    }

    #[test]
    fn inline_data_are_copied_at_once() {
        let mut page = Page::new();
        let qp = alone(&cap(5, 1, 2, 1, 100), page.doorbells());
        let data: Vec<u8> = (0..70).collect();
        let mut entries = [
            ibv_sge {
                addr: data.as_ptr() as u64,
                length: 3,
                lkey: 0,
            },
            ibv_sge {
                addr: data[3..].as_ptr() as u64,
                length: 67,
                lkey: 0,
            },
        ];
        assert_eq!(
            send(&qp, &mut wr(IBV_WR_SEND, &mut entries, IBV_SEND_INLINE)),
            0
        );
        let bytes = fetch(&qp, 0);
        let header = SendHeader::from_prefix(&bytes).unwrap();
        assert_eq!(header.flags, SEND_INLINE);
        assert_eq!((header.blocks, header.sge_count, header.length), (2, 0, 70));
        assert_eq!(bytes[32..102], data);
    }

    #[test]
    fn the_extended_interface_shows_all_or_nothing() {
        let mut page = Page::new();
        let mut qp = alone(&cap(4, 1, 1, 1, 0), page.doorbells());
        let ex = extended(&mut qp);
        // SAFETY: the operations were filled in by `extended` and are called in their order.
        unsafe {
            let operations = ptr::read(ex);
            let (start, complete) = (
                operations.wr_start.unwrap(),
                operations.wr_complete.unwrap(),
            );
            let (write, set) = (
                operations.wr_rdma_write.unwrap(),
                operations.wr_set_sge.unwrap(),
            );
            start(ex);
            for wr_id in 0..2 {
                (*ex).wr_id = wr_id;
                (*ex).wr_flags = IBV_SEND_SIGNALED;
                write(ex, 7, 8);
                set(ex, 1, 2, 3);
            }
            assert_eq!(page.take(DOORBELL_SEND), 0);
            assert_eq!(complete(ex), 0);
            assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 2));
            assert_eq!(qp.send_done(1), (1, IBV_WC_RDMA_WRITE));

            start(ex);
            write(ex, 7, 8);
            set(ex, 1, 2, 3);
            operations.wr_abort.unwrap()(ex);
            start(ex);
            write(ex, 7, 8);
            set(ex, 1, 2, 3);
            write(ex, 7, 8);
            // No data for the second one.
            assert_eq!(complete(ex), libc::EINVAL);
            assert_eq!(page.take(DOORBELL_SEND), 0);
            assert_eq!(qp.send.lock().producer, 2);
        }
    }
}
