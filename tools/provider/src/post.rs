// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Posting work requests: memory writes, a fence, and a doorbell only if the device sleeps.

use core::ffi::c_int;
use core::mem::{offset_of, size_of, MaybeUninit};
use core::ptr;
use core::sync::atomic::{fence, Ordering};

use ferrite_abi::{
    blocks_for, has_entries, queue_doorbell, send_doorbell, AtomicPart, BindPart, DatagramPart,
    FlushPart, ListPart, Plain, QueuePairRecord, ReceiveHeader, RemotePart, SendHeader, SendOpcode,
    SendPart, Sge, BLOCK_SIZE, DOORBELL_RECEIVE, DOORBELL_SEND, FEATURE_ATOMICS,
    FEATURE_FAST_REGISTER, FEATURE_LISTS, FEATURE_WINDOWS, MAX_BLOCKS, MAX_PIECES, SEND_FENCE,
    SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
};

use crate::ah::Ah;
use crate::qp::{Qp, SendCount};
use crate::sys::*;
use crate::window::bind_part;

/// Whoever makes regions or lists by work request, or binds windows, has to be able to invalidate
/// them.
pub(crate) const INVALIDATING: u64 = FEATURE_FAST_REGISTER | FEATURE_WINDOWS | FEATURE_LISTS;

// Scatter/gather entries are copied as they are.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(offset_of!(Sge, address) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

/// The host's side of a send queue.
pub(crate) struct SendQueue {
    /// What is written; its blocks are the producer index.
    pub(crate) posted: SendCount,
    /// The extended interface's unfinished work.
    pub(crate) session: crate::post_ex::Session,
    /// The pieces of the list that it registers, if it registers one: as many as the part says.
    pub(crate) pieces: [ibv_sge; MAX_PIECES],
}

/// The host's side of a receive queue.
pub(crate) struct ReceiveQueue {
    /// Entries written, free-running.
    pub(crate) producer: u32,
}

impl SendQueue {
    pub(crate) fn new() -> Self {
        Self {
            posted: SendCount::default(),
            session: crate::post_ex::Session::new(),
            pieces: [ibv_sge::default(); MAX_PIECES],
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
    /// Extended connections: the shared receive queue at the peer; else zero.
    pub(crate) srqn: u32,
    pub(crate) part: Part,
}

/// What follows the header. Whoever makes one leaves zero what its operation does not use.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Send(SendPart),
    Remote(RemotePart),
    Atomic(AtomicPart),
    Datagram(DatagramPart),
    Bind(BindPart),
    Flush(FlushPart),
    List(ListPart),
    /// A list, and then a message.
    ListSend(ListPart, SendPart),
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
    /// Pieces of a list, and behind them what the device fetches for a message.
    Pieces(&'a [ibv_sge], &'a [ibv_sge]),
}

impl Part {
    /// A send, with immediate data (in wire order) or none.
    pub(crate) fn send(immediate: __be32) -> Self {
        Part::Send(SendPart {
            immediate: immediate.into(),
            ..SendPart::zeroed()
        })
    }

    /// An invalidation, here or at the peer.
    pub(crate) fn invalidate(tag: u32) -> Self {
        Part::Send(SendPart {
            tag,
            ..SendPart::zeroed()
        })
    }

    /// A read, or a write with immediate data (in wire order) or none.
    pub(crate) fn remote(address: u64, rkey: u32, immediate: __be32) -> Self {
        Part::Remote(RemotePart {
            address,
            rkey,
            immediate: immediate.into(),
            ..RemotePart::zeroed()
        })
    }

    pub(crate) fn compare_swap(address: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        Part::Atomic(AtomicPart {
            address,
            rkey,
            operand: swap,
            compare,
            ..AtomicPart::zeroed()
        })
    }

    pub(crate) fn fetch_add(address: u64, rkey: u32, add: u64) -> Self {
        Part::Atomic(AtomicPart {
            address,
            rkey,
            operand: add,
            ..AtomicPart::zeroed()
        })
    }

    /// A datagram, with immediate data or none, as they stand in a part.
    ///
    /// # Safety
    ///
    /// `ah` is a live handle of this provider.
    pub(crate) unsafe fn datagram(ah: *mut ibv_ah, qpn: u32, qkey: u32, immediate: u64) -> Self {
        Part::Datagram(DatagramPart {
            // SAFETY: by the caller.
            address_vector: unsafe { Ah::address_vector(ah) },
            qpn,
            qkey,
            immediate,
            ..DatagramPart::zeroed()
        })
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Part::Send(part) => part.as_bytes(),
            Part::Remote(part) => part.as_bytes(),
            Part::Atomic(part) => part.as_bytes(),
            Part::Datagram(part) => part.as_bytes(),
            Part::Bind(part) => part.as_bytes(),
            Part::Flush(part) => part.as_bytes(),
            // That for the message comes behind it.
            Part::List(part) | Part::ListSend(part, _) => part.as_bytes(),
        }
    }
}

/// How the completion names an operation.
fn completion_opcode(opcode: SendOpcode) -> ibv_wc_opcode {
    match opcode {
        SendOpcode::Send
        | SendOpcode::SendImmediate
        | SendOpcode::SendInvalidate
        | SendOpcode::RegisterSend
        | SendOpcode::RegisterListSend => IBV_WC_SEND,
        SendOpcode::Write | SendOpcode::WriteImmediate => IBV_WC_RDMA_WRITE,
        SendOpcode::Read => IBV_WC_RDMA_READ,
        SendOpcode::CompareSwap => IBV_WC_COMP_SWAP,
        SendOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        SendOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
        SendOpcode::Bind => IBV_WC_BIND_MW,
        SendOpcode::AtomicWrite => IBV_WC_ATOMIC_WRITE,
        SendOpcode::Flush => IBV_WC_FLUSH,
        // The verbs have no name for it (`FERRITEDV_WC_REGISTER_LIST`).
        SendOpcode::RegisterList | SendOpcode::FastRegister => IBV_WC_DRIVER1,
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
        let total: u64 = match data {
            // Before any is looked at: of a count that is wrong, few may be there.
            Data::Entries(entries) if entries.len() > capacity.max_send_sge as usize => {
                return Err(libc::EINVAL);
            }
            Data::Pieces(pieces, message)
                if pieces.len().saturating_add(message.len()) > capacity.max_send_sge as usize =>
            {
                return Err(libc::EINVAL);
            }
            // Pieces are not sent: a list may be longer than a message.
            Data::Entries(entries) | Data::Copy(entries) | Data::Pieces(_, entries) => {
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
                if total > u64::from(self.max_message) {
                    return Err(libc::EINVAL);
                }
                (size_of_val(*entries), entries.len() as u8, 0)
            }
            Data::Pieces(pieces, message) => {
                if total > u64::from(self.max_message) {
                    return Err(libc::EINVAL);
                }
                let count = pieces.len() + message.len();
                (count * size_of::<Sge>(), count as u8, 0)
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
                (total as usize, 0, total as u16)
            }
            // No more than a scatter/gather entry, for which there is room always.
            Data::Eight(bytes) => {
                flags |= SEND_INLINE;
                (bytes.len(), 0, bytes.len() as u16)
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
        let blocks = blocks_for(work.opcode, self.datagram, payload) as u32;
        if !self.has_send_room(queue.posted, blocks) {
            return Err(libc::ENOMEM);
        }
        let header = SendHeader {
            opcode: work.opcode.number(),
            blocks: blocks as u8,
            sge_count,
            flags,
            inline_length,
            srqn: work.srqn,
            ..SendHeader::zeroed()
        };

        let first = queue.posted.blocks & (self.geometry.sq_blocks - 1);
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
            cursor.put(work.part.as_bytes());
            if let Part::ListSend(_, send) = &work.part {
                cursor.put(send.as_bytes());
            }
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
                Data::Pieces(pieces, message) => {
                    cursor.put_from(pieces.as_ptr().cast(), size_of_val(*pieces));
                    cursor.put_from(message.as_ptr().cast(), size_of_val(*message));
                }
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
        let posted = queue.posted.after(blocks);
        self.send_posted(
            queue.posted.blocks,
            posted,
            work.wr_id,
            completion_opcode(work.opcode),
        );
        queue.posted = posted;
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
            .store(queue.posted.blocks, Ordering::Release);
        // The index is written before the wake word is read; the device does it the other way
        // round, so that one of the two sees the other's write.
        fence(Ordering::SeqCst);
        if self
            .record(offset_of!(QueuePairRecord, send_wake))
            .load(Ordering::Relaxed)
            != 0
        {
            self.doorbells
                .ring(DOORBELL_SEND, send_doorbell(self.qpn, queue.posted.blocks));
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
        let (immediate, tag, rdma, atomic) = unsafe {
            let either = wr.__bindgen_anon_1;
            (
                either.imm_data,
                either.invalidate_rkey,
                wr.wr.rdma,
                wr.wr.atomic,
            )
        };
        let remote = |immediate| Part::remote(rdma.remote_addr, rdma.rkey, immediate);
        let (opcode, part) = match wr.opcode {
            IBV_WR_SEND => (SendOpcode::Send, Part::send(0)),
            IBV_WR_SEND_WITH_IMM => (SendOpcode::SendImmediate, Part::send(immediate)),
            IBV_WR_RDMA_WRITE => (SendOpcode::Write, remote(0)),
            IBV_WR_RDMA_WRITE_WITH_IMM => (SendOpcode::WriteImmediate, remote(immediate)),
            IBV_WR_RDMA_READ => (SendOpcode::Read, remote(0)),
            IBV_WR_ATOMIC_CMP_AND_SWP if self.has(FEATURE_ATOMICS) => (
                SendOpcode::CompareSwap,
                Part::compare_swap(
                    atomic.remote_addr,
                    atomic.rkey,
                    atomic.compare_add,
                    atomic.swap,
                ),
            ),
            IBV_WR_ATOMIC_FETCH_AND_ADD if self.has(FEATURE_ATOMICS) => (
                SendOpcode::FetchAdd,
                Part::fetch_add(atomic.remote_addr, atomic.rkey, atomic.compare_add),
            ),
            IBV_WR_SEND_WITH_INV if self.has(INVALIDATING) => {
                (SendOpcode::SendInvalidate, Part::invalidate(tag))
            }
            IBV_WR_LOCAL_INV if self.has(INVALIDATING) => {
                (SendOpcode::LocalInvalidate, Part::invalidate(tag))
            }
            IBV_WR_BIND_MW if self.has(FEATURE_WINDOWS) => {
                // SAFETY: by the caller, the work request names a live window and region.
                let part = unsafe {
                    let bind = &wr.__bindgen_anon_2.bind_mw;
                    if bind.mw.is_null() || (*bind.mw).type_ != IBV_MW_TYPE_2 {
                        return Err(libc::EINVAL);
                    }
                    bind_part(bind.mw, bind.rkey, &bind.bind_info, self.features)?
                };
                (SendOpcode::Bind, part)
            }
            _ => return Err(libc::EINVAL),
        };
        // What stays here has no peer to name a queue at.
        let local = matches!(opcode, SendOpcode::LocalInvalidate | SendOpcode::Bind);
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            srqn: if self.extended && !local {
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
        // SAFETY: as in `work`.
        let (immediate, datagram) = unsafe { (wr.__bindgen_anon_1.imm_data, wr.wr.ud) };
        let (opcode, immediate) = match wr.opcode {
            IBV_WR_SEND => (SendOpcode::Send, 0),
            IBV_WR_SEND_WITH_IMM => (SendOpcode::SendImmediate, immediate),
            _ => return Err(libc::EINVAL),
        };
        if datagram.ah.is_null() {
            return Err(libc::EINVAL);
        }
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            srqn: 0,
            // SAFETY: by the caller.
            part: unsafe {
                Part::datagram(
                    datagram.ah,
                    datagram.remote_qpn,
                    datagram.remote_qkey,
                    immediate.into(),
                )
            },
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
    let before = queue.posted;
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
                // Where the operation has no list, what stands there is left over from another.
                let entries = if has_entries(work.opcode) {
                    list(request.sg_list, request.num_sge)?
                } else {
                    &[]
                };
                let data = if request.send_flags & IBV_SEND_INLINE != 0 && has_entries(work.opcode)
                {
                    Data::Copy(entries)
                } else {
                    Data::Entries(entries)
                };
                qp.write_send(&mut queue, &work, &data)
            })
        };
        if let Err(errno) = written {
            // SAFETY: as above.
            unsafe { *bad = wr };
            result = errno;
            break;
        }
        wr = request.next;
    }
    if queue.posted != before {
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
pub(crate) mod tests {
    use super::*;
    use crate::memory::Doorbells;
    use crate::qp::tests::{alone, cap, datagrams_alone, extended};
    use crate::testing::Shared;
    use ferrite_abi::{opcode_part, AddressVector, Reserved, FLUSH_RANGE, FLUSH_REGION};

    /// A page that stands for the doorbells.
    pub(crate) struct Page(Vec<u64>);

    impl Page {
        pub(crate) fn new() -> Self {
            Self(vec![0; ferrite_abi::DOORBELL_PAGE_SIZE / 8])
        }

        pub(crate) fn doorbells(&mut self) -> Doorbells {
            // SAFETY: the tests keep the page longer than the queue pair.
            unsafe { Doorbells::new(self.0.as_mut_ptr().cast()) }
        }

        pub(crate) fn take(&self, offset: usize) -> u64 {
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
    pub(crate) fn fetch(qp: &Qp, index: u32) -> Vec<u8> {
        let block = |index: u32| {
            let at = qp.send_block(index & (qp.geometry.sq_blocks - 1));
            // SAFETY: the block is inside the ring.
            unsafe { core::slice::from_raw_parts(at, BLOCK_SIZE) }.to_vec()
        };
        let header = SendHeader::from_prefix(&block(index)).unwrap();
        (0..u32::from(header.blocks))
            .flat_map(|n| block(index.wrapping_add(n)))
            .collect()
    }

    /// What a device does that takes no work request in which anything stands where nothing
    /// belongs; gives the header, and the part as such.
    pub(crate) fn taken(qp: &Qp, index: u32) -> (SendHeader, Part) {
        let bytes = fetch(qp, index);
        let header = SendHeader::from_prefix(&bytes).unwrap();
        assert!(header.reserved_is_zero(), "{header:?}");
        let known = SEND_SIGNALED | SEND_SOLICITED | SEND_FENCE | SEND_INLINE;
        assert_eq!(header.flags & !known, 0);
        assert!(header.flags & SEND_INLINE != 0 || header.inline_length == 0);
        assert!(header.flags & SEND_INLINE == 0 || header.sge_count == 0);
        assert!(qp.extended || header.srqn == 0, "{header:?}");
        let opcode = SendOpcode::from_number(header.opcode).unwrap();
        let bytes = &bytes[size_of::<SendHeader>()..];
        let immediate = |part: u64| match opcode {
            SendOpcode::SendImmediate | SendOpcode::WriteImmediate => {
                assert_eq!(part >> 32, 0, "{opcode:?}");
            }
            _ => assert_eq!(part, 0, "{opcode:?}"),
        };
        fn of<T: Plain + Reserved>(bytes: &[u8]) -> T {
            let part = T::from_prefix(bytes).unwrap();
            assert!(part.reserved_is_zero());
            part
        }
        let part = match opcode {
            SendOpcode::Send | SendOpcode::SendImmediate if qp.datagram => {
                let part: DatagramPart = of(bytes);
                immediate(part.immediate);
                Part::Datagram(part)
            }
            SendOpcode::Send
            | SendOpcode::SendImmediate
            | SendOpcode::SendInvalidate
            | SendOpcode::LocalInvalidate => {
                let part: SendPart = of(bytes);
                immediate(part.immediate);
                let invalidates = [SendOpcode::SendInvalidate, SendOpcode::LocalInvalidate];
                assert!(invalidates.contains(&opcode) || part.tag == 0);
                Part::Send(part)
            }
            SendOpcode::Write
            | SendOpcode::WriteImmediate
            | SendOpcode::Read
            | SendOpcode::AtomicWrite => {
                let part: RemotePart = of(bytes);
                immediate(part.immediate);
                Part::Remote(part)
            }
            SendOpcode::CompareSwap => Part::Atomic(of(bytes)),
            SendOpcode::FetchAdd => {
                let part: AtomicPart = of(bytes);
                assert_eq!(part.compare, 0);
                Part::Atomic(part)
            }
            SendOpcode::Bind => Part::Bind(of(bytes)),
            SendOpcode::Flush => Part::Flush(of(bytes)),
            SendOpcode::RegisterList => {
                let part: ListPart = of(bytes);
                assert_eq!(part.pieces, header.sge_count);
                Part::List(part)
            }
            SendOpcode::RegisterListSend => {
                let (part, send): (ListPart, SendPart) =
                    (of(bytes), of(&bytes[size_of::<ListPart>()..]));
                assert!(part.pieces <= header.sge_count);
                assert_eq!(send.immediate, 0);
                Part::ListSend(part, send)
            }
            SendOpcode::FastRegister | SendOpcode::RegisterSend => {
                panic!("user space does not name pages")
            }
        };
        let list = [SendOpcode::RegisterList, SendOpcode::RegisterListSend];
        if list.contains(&opcode) {
            let (Part::List(part) | Part::ListSend(part, _)) = part else {
                unreachable!()
            };
            assert!((1..=MAX_PIECES).contains(&part.pieces.into()), "{part:?}");
            assert_eq!(header.flags & SEND_INLINE, 0);
        }
        if matches!(
            opcode,
            SendOpcode::LocalInvalidate | SendOpcode::Bind | SendOpcode::RegisterList
        ) {
            assert_eq!(header.srqn, 0);
        }
        (header, part)
    }

    /// The scatter/gather entries or inline data of a work request, and what is behind them.
    pub(crate) fn payload(qp: &Qp, index: u32) -> Vec<u8> {
        let bytes = fetch(qp, index);
        let header = SendHeader::from_prefix(&bytes).unwrap();
        let opcode = SendOpcode::from_number(header.opcode).unwrap();
        bytes[size_of::<SendHeader>() + opcode_part(opcode, qp.datagram)..].to_vec()
    }

    /// Leaves nothing but ones in a send queue.
    pub(crate) fn spoil(qp: &Qp) {
        let length = qp.geometry.sq_blocks as usize * BLOCK_SIZE;
        // SAFETY: the send queue is at the start of the buffer.
        unsafe { ptr::write_bytes(qp.buffer.base(), 0xff, length) };
    }

    pub(crate) fn wr(opcode: ibv_wr_opcode, entries: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
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

    pub(crate) fn send(qp: &Qp, wr: &mut ibv_send_wr) -> c_int {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the work request is complete.
        let result = unsafe { post_send(ptr::from_ref(qp).cast_mut().cast(), wr, &mut bad) };
        assert_eq!(result != 0, bad == ptr::from_mut(wr));
        result
    }

    pub(crate) fn sge(length: u32) -> ibv_sge {
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
        let header = SendHeader {
            opcode: SendOpcode::WriteImmediate.number(),
            blocks: 2,
            sge_count: 3,
            flags: SEND_SIGNALED | SEND_SOLICITED,
            ..SendHeader::zeroed()
        };
        let part = RemotePart {
            address: 0x1122_3344_5566_7788,
            rkey: 0x99aa_bbcc,
            immediate: 0x0102_0304,
            ..RemotePart::zeroed()
        };
        let bytes = fetch(&qp, 0);
        assert_eq!(bytes[..16], *header.as_bytes());
        assert_eq!(bytes[16..48], *part.as_bytes());
        for (number, entry) in entries.iter().enumerate() {
            let found = Sge::from_prefix(&bytes[48 + 16 * number..]).unwrap();
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
            let blocks = u32::from(taken(&qp, index).0.blocks);
            assert_eq!(blocks, (48 + 16 * count).div_ceil(64));
            let bytes = payload(&qp, index);
            for (number, entry) in entries.iter().enumerate() {
                let found = Sge::from_prefix(&bytes[16 * number..]).unwrap();
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
        let mut qp = alone(&cap(5, 1, 1, 1, 32), page.doorbells());
        qp.max_message = 1 << 20;
        let most = qp.geometry.capacity;
        let mut many = vec![sge(1); most.max_send_sge as usize + 1];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut many, 0)), libc::EINVAL);
        let mut long = [sge(qp.max_message), sge(1)];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long, 0)), libc::EINVAL);
        let mut inline = [sge(most.max_inline_data + 1)];
        let mut request = wr(IBV_WR_SEND, &mut inline, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        let mut read = [sge(1)];
        let mut request = wr(IBV_WR_RDMA_READ, &mut read, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        assert_eq!(send(&qp, &mut wr(77, &mut read, 0)), libc::EINVAL);
        assert_eq!(qp.send.lock().posted, SendCount::default());
        assert_eq!(page.take(DOORBELL_SEND), 0);
        // The longest message itself is fine.
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long[..1], 0)), 0);
    }

    #[test]
    fn what_was_registered_or_bound_by_work_request_can_be_invalidated() {
        for (features, refused) in [
            (FEATURE_FAST_REGISTER, false),
            (FEATURE_WINDOWS, false),
            (FEATURE_LISTS, false),
            (
                !(FEATURE_FAST_REGISTER | FEATURE_WINDOWS | FEATURE_LISTS),
                true,
            ),
        ] {
            let mut page = Page::new();
            let mut qp = alone(&cap(5, 1, 1, 1, 0), page.doorbells());
            qp.features = features;
            for opcode in [IBV_WR_LOCAL_INV, IBV_WR_SEND_WITH_INV] {
                let result = send(&qp, &mut wr(opcode, &mut [], 0));
                assert_eq!(result == libc::EINVAL, refused, "{features:#x}");
            }
            let invalidation = u64::from(IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV);
            let offered = crate::post_ex::supported(IBV_QPT_RC, features) & invalidation;
            assert_eq!(offered, if refused { 0 } else { invalidation });
        }
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
        let (header, _) = taken(&qp, 0);
        assert_eq!(header.flags, SEND_INLINE);
        assert_eq!((header.blocks, header.inline_length), (2, 70));
        assert_eq!(payload(&qp, 0)[..70], data);
        // As much as was promised, behind the longest part that it can have before it.
        let most = qp.geometry.capacity.max_inline_data as usize;
        let data: Vec<u8> = (0..most).map(|n| n as u8).collect();
        let mut entries = [ibv_sge {
            addr: data.as_ptr() as u64,
            length: most as u32,
            lkey: 0,
        }];
        let mut request = wr(IBV_WR_RDMA_WRITE_WITH_IMM, &mut entries, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), 0);
        let (header, _) = taken(&qp, 2);
        assert_eq!(usize::from(header.inline_length), most);
        assert_eq!(
            payload(&qp, 2)[..],
            data,
            "to the last byte of the last block"
        );
    }

    /// A work request of the verbs is full of what others left in its unions, and a ring of what
    /// was posted before.
    #[test]
    fn what_an_operation_does_not_use_is_zero() {
        let mut page = Page::new();
        for extended in [false, true] {
            let mut qp = alone(&cap(3, 1, 3, 1, 64), page.doorbells());
            qp.extended = extended;
            spoil(&qp);
            let mut binding = Binding::new();
            // Often enough for each to begin at each block.
            for round in 0..16 {
                for opcode in OPERATIONS {
                    let mut entries = vec![sge(1); 1 + round % 3];
                    let mut request = wr(opcode, &mut entries, !IBV_SEND_INLINE);
                    request.wr.atomic.compare_add = u64::MAX;
                    request.wr.atomic.swap = u64::MAX - 1;
                    request.qp_type.xrc.remote_srqn = 0x77;
                    binding.put_into(&mut request);
                    let index = qp.send.lock().posted.blocks;
                    assert_eq!(send(&qp, &mut request), 0);
                    let (header, part) = taken(&qp, index);
                    // SAFETY: all members of the unions are plain.
                    let (rdma, atomic) = unsafe { (request.wr.rdma, request.wr.atomic) };
                    let (address, rkey) = (rdma.remote_addr, rdma.rkey);
                    let expected = match opcode {
                        IBV_WR_SEND => Part::send(0),
                        IBV_WR_SEND_WITH_IMM => Part::send(0x0102_0304),
                        IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => Part::invalidate(0x0102_0304),
                        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ => Part::remote(address, rkey, 0),
                        IBV_WR_RDMA_WRITE_WITH_IMM => Part::remote(address, rkey, 0x0102_0304),
                        IBV_WR_ATOMIC_CMP_AND_SWP => {
                            Part::compare_swap(address, atomic.rkey, u64::MAX, u64::MAX - 1)
                        }
                        IBV_WR_ATOMIC_FETCH_AND_ADD => {
                            Part::fetch_add(address, atomic.rkey, u64::MAX)
                        }
                        _ => part,
                    };
                    assert_eq!(part.as_bytes(), expected.as_bytes(), "{opcode}");
                    let local = matches!(opcode, IBV_WR_LOCAL_INV | IBV_WR_BIND_MW);
                    let srqn = if extended && !local { 0x77 } else { 0 };
                    assert_eq!(header.srqn, srqn, "{opcode}");
                    finish_all(&qp);
                }
            }
        }
    }

    #[test]
    fn a_datagram_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let mut qp = datagrams_alone(&cap(4, 1, 16, 1, 256), page.doorbells());
        spoil(&qp);
        let address_vector = AddressVector {
            mac: [2, 0, 0, 0, 0, 9],
            gid: [7; 16],
            source_gid_index: 1,
            hop_limit: 64,
            ..AddressVector::zeroed()
        };
        let mut ah = crate::ah::tests::alone(address_vector);
        let ah: *mut ibv_ah = (&raw mut *ah).cast();
        let ex = extended(&mut qp);
        let expected = |immediate| DatagramPart {
            address_vector,
            qpn: 0x2345,
            qkey: 0x1111_1111,
            immediate,
            reserved: 0,
        };
        let found = |qp: &Qp, index| match taken(qp, index) {
            (header, Part::Datagram(part)) => (header.blocks, header.srqn, part),
            _ => panic!("no datagram"),
        };
        let data: Vec<u8> = (0..=255).collect();
        for round in 0..12 {
            let mut entries: Vec<ibv_sge> = (0..16).map(sge).collect();
            for (opcode, immediate) in [(IBV_WR_SEND, 0), (IBV_WR_SEND_WITH_IMM, 0x0102_0304)] {
                let mut request = wr(opcode, &mut entries, 0);
                request.wr.ud.ah = ah;
                request.wr.ud.remote_qpn = 0x2345;
                request.wr.ud.remote_qkey = 0x1111_1111;
                request.qp_type.xrc.remote_srqn = 0x77;
                let index = qp.send.lock().posted.blocks;
                assert_eq!(send(&qp, &mut request), 0);
                assert_eq!(found(&qp, index), (6, 0, expected(immediate)));
                let bytes = payload(&qp, index);
                let last = Sge::from_prefix(&bytes[15 * 16..]).unwrap();
                assert_eq!((last.address, last.length), (entries[15].addr, 15));
                finish_all(&qp);

                let index = qp.send.lock().posted.blocks;
                // SAFETY: the operations were filled in by `extended` and are called in their
                // order; the handle lives.
                unsafe {
                    let operations = ptr::read(ex);
                    operations.wr_start.unwrap()(ex);
                    match immediate {
                        0 => operations.wr_send.unwrap()(ex),
                        immediate => operations.wr_send_imm.unwrap()(ex, immediate as u32),
                    }
                    let name = operations.wr_set_ud_addr.unwrap();
                    // The last word counts, and what was said before is kept.
                    name(ex, ah, 1, 2);
                    name(ex, ah, 0x2345, 0x1111_1111);
                    let set = operations.wr_set_inline_data.unwrap();
                    set(ex, data.as_ptr().cast_mut().cast(), data.len());
                    assert_eq!(operations.wr_complete.unwrap()(ex), 0);
                }
                assert_eq!(found(&qp, index), (6, 0, expected(immediate)));
                assert_eq!(payload(&qp, index)[..256], data, "round {round}");
                finish_all(&qp);
            }
        }
    }

    #[test]
    fn a_flush_of_a_region_has_no_place_and_no_length() {
        let mut page = Page::new();
        let mut qp = alone(&cap(4, 1, 1, 1, 0), page.doorbells());
        spoil(&qp);
        let ex = extended(&mut qp);
        let flush = |selectivity: u32, length: usize| -> c_int {
            // SAFETY: the operations were filled in by `extended` and are called in their order.
            unsafe {
                let operations = ptr::read(ex);
                operations.wr_start.unwrap()(ex);
                operations.wr_flush.unwrap()(ex, 5, 0x1000, length, 1, selectivity as u8);
                operations.wr_complete.unwrap()(ex)
            }
        };
        assert_eq!(flush(FLUSH_RANGE, 100), 0);
        let most = 1 << 20;
        // SAFETY: as above; nothing has been begun.
        unsafe { (*ex.cast::<Qp>()).max_message = most };
        assert_eq!(flush(FLUSH_RANGE, most as usize + 1), libc::EINVAL);
        assert_eq!(flush(FLUSH_REGION, usize::MAX), 0);
        for (index, (address, length)) in [(0, (0x1000, 100)), (1, (0, 0))] {
            let (_, Part::Flush(part)) = taken(&qp, index) else {
                panic!("no flush");
            };
            assert_eq!((part.address, part.length, part.rkey), (address, length, 5));
        }
    }

    #[test]
    fn a_receive_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let qp = alone(&cap(1, 2, 1, 3, 0), page.doorbells());
        let ring = |at: usize| qp.buffer.base().wrapping_add(qp.geometry.rq_offset + at);
        let stride = qp.geometry.rq_stride as usize;
        // SAFETY: the receive queue is that long.
        unsafe { ptr::write_bytes(ring(0), 0xff, 2 * stride) };
        for (slot, count) in [(0, 3), (1, 0), (0, 1)] {
            let mut entries: Vec<ibv_sge> = (0..count).map(|n| sge(n + 1)).collect();
            let index = qp.receive.lock().producer;
            let mut request = ibv_recv_wr {
                sg_list: entries.as_mut_ptr(),
                num_sge: count as i32,
                ..Default::default()
            };
            assert_eq!(post_receive(&qp, &mut request), 0);
            // SAFETY: the entry is inside the ring.
            let bytes = unsafe { core::slice::from_raw_parts(ring(slot * stride), stride) };
            let expected = ReceiveHeader {
                sge_count: count,
                ..ReceiveHeader::zeroed()
            };
            assert_eq!(ReceiveHeader::from_prefix(bytes), Some(expected));
            for (number, entry) in entries.iter().enumerate() {
                let found = Sge::from_prefix(&bytes[16 + 16 * number..]).unwrap();
                assert_eq!((found.address, found.lkey), (entry.addr, entry.lkey));
            }
            qp.receive_done(index);
        }
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
            assert_eq!(qp.send.lock().posted.blocks, 2);
        }
    }

    /// A window, and a work request that binds it to a region under its next key.
    struct Binding {
        mw: Box<ibv_mw>,
        mr: Box<ibv_mr>,
    }

    impl Binding {
        fn new() -> Self {
            Self {
                mw: Box::new(ibv_mw {
                    rkey: 0x0005_0010,
                    type_: IBV_MW_TYPE_2,
                    ..Default::default()
                }),
                mr: Box::new(ibv_mr {
                    lkey: 0x0007_0001,
                    ..Default::default()
                }),
            }
        }

        fn info(&mut self) -> ibv_mw_bind_info {
            ibv_mw_bind_info {
                mr: &raw mut *self.mr,
                addr: 0x1000,
                length: 100,
                mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
            }
        }

        /// Makes `wr` the bind.
        fn put_into(&mut self, wr: &mut ibv_send_wr) {
            let info = self.info();
            // SAFETY: all members of the union are plain.
            unsafe {
                let bind = &mut wr.__bindgen_anon_2.bind_mw;
                bind.mw = &raw mut *self.mw;
                bind.rkey = 0x0005_0011;
                bind.bind_info = info;
            }
        }
    }

    const OPERATIONS: [ibv_wr_opcode; 10] = [
        IBV_WR_SEND,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_SEND_WITH_INV,
        IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_LOCAL_INV,
        IBV_WR_BIND_MW,
    ];

    /// Posts until the queue is full; every work request is found in the ring as it was written,
    /// and where it was promised to fit, it did.
    pub(crate) fn fill(qp: &Qp, mut next: impl FnMut() -> Option<u32>) -> u32 {
        let before = qp.send.lock().posted;
        let mut starts = Vec::new();
        loop {
            let start = qp.send.lock().posted.blocks;
            match next() {
                Some(_) => starts.push(start),
                None => break,
            }
        }
        let posted = qp.send.lock().posted;
        let blocks = posted.blocks.wrapping_sub(before.blocks);
        assert!(
            blocks <= qp.geometry.sq_blocks,
            "{blocks} blocks in a ring of {}",
            qp.geometry.sq_blocks
        );
        // None lies over another: they are one after the other, as their headers say.
        for pair in starts.windows(2) {
            let blocks = taken(qp, pair[0]).0.blocks;
            assert_eq!(pair[1], pair[0].wrapping_add(blocks.into()));
        }
        starts.len() as u32
    }

    #[test]
    fn the_ring_is_never_overrun_whatever_is_posted() {
        let mut page = Page::new();
        for wr_count in [1, 2, 3, 8, 37] {
            for sge_count in [1, 2, 3, 6, 7, 16] {
                for inline in [0, 33, 97] {
                    let wanted = cap(wr_count, 1, sge_count, 1, inline);
                    let qp = alone(&wanted, page.doorbells());
                    let given = qp.geometry.capacity;
                    let mut binding = Binding::new();
                    for opcode in OPERATIONS {
                        let most = given.max_send_sge as usize;
                        for count in [0, 1, most / 2, most] {
                            let mut entries = vec![sge(1); count];
                            let mut wr = wr(opcode, &mut entries, 0);
                            binding.put_into(&mut wr);
                            let mut last = 0;
                            let posted = fill(&qp, || {
                                last = qp.send.lock().posted.blocks;
                                match send(&qp, &mut wr) {
                                    0 => Some(last),
                                    errno => {
                                        assert_eq!(errno, libc::ENOMEM, "{opcode}");
                                        None
                                    }
                                }
                            });
                            assert_eq!(posted, given.max_send_wr, "{opcode} with {count}");
                            finish_all(&qp);
                        }
                    }
                }
            }
        }
    }

    /// Has the last posted work request, and with it all, complete.
    pub(crate) fn finish_all(qp: &Qp) {
        let posted = qp.send.lock().posted;
        let last = (1..=MAX_BLOCKS as u32)
            .map(|back| posted.blocks.wrapping_sub(back))
            .find(|&start| {
                let length = fetch(qp, start).len() / BLOCK_SIZE;
                qp.was_posted(start, posted) && length as u32 == posted.blocks.wrapping_sub(start)
            });
        qp.send_done(last.unwrap());
        assert!(qp.has_send_room(posted, qp.geometry.sq_blocks));
    }

    /// A queue made for one entry has, in fact, one; a work request that has no list is taken with
    /// whatever its fields still hold.
    #[test]
    fn a_list_left_over_where_the_operation_has_none_is_not_looked_at() {
        let mut page = Page::new();
        let qp = alone(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        for opcode in [IBV_WR_BIND_MW, IBV_WR_LOCAL_INV] {
            let before = qp.send.lock().posted.blocks;
            let mut wr = wr(opcode, &mut [], IBV_SEND_INLINE);
            binding.put_into(&mut wr);
            for count in [1, 5, -3] {
                wr.num_sge = count;
                wr.sg_list = ptr::without_provenance_mut(64);
                assert_eq!(send(&qp, &mut wr), 0);
            }
            for n in 0..3 {
                let bytes = fetch(&qp, before + n);
                let header = SendHeader::from_prefix(&bytes).unwrap();
                assert_eq!((header.blocks, header.sge_count, header.flags), (1, 0, 0));
            }
        }
    }

    #[test]
    fn the_extended_interface_does_not_overrun_the_ring_either() {
        let mut page = Page::new();
        for sge_count in [1, 2, 3] {
            let mut qp = alone(&cap(8, 1, sge_count, 1, 0), page.doorbells());
            let ex = extended(&mut qp);
            let given = qp.geometry.capacity;
            let entries = vec![sge(1); given.max_send_sge as usize];
            let mut binding = Binding::new();
            let info = binding.info();
            let value = [0u8; 8];
            // SAFETY: the operations were filled in by `extended` and are called in their order.
            let operations = unsafe { ptr::read(ex) };
            let post = |kind: u32| -> c_int {
                // SAFETY: as above; the window and the region live.
                unsafe {
                    operations.wr_start.unwrap()(ex);
                    match kind {
                        0 => operations.wr_send.unwrap()(ex),
                        1 => operations.wr_rdma_read.unwrap()(ex, 1, 2),
                        2 => operations.wr_atomic_fetch_add.unwrap()(ex, 1, 8, 1),
                        3 => operations.wr_atomic_cmp_swp.unwrap()(ex, 1, 8, 1, 2),
                        4 => operations.wr_local_inv.unwrap()(ex, 1),
                        5 => operations.wr_flush.unwrap()(ex, 1, 2, 3, 1, 0),
                        6 => operations.wr_atomic_write.unwrap()(ex, 1, 8, value.as_ptr().cast()),
                        _ => operations.wr_bind_mw.unwrap()(
                            ex,
                            &raw mut *binding.mw,
                            0x0005_0011,
                            &info,
                        ),
                    }
                    if kind < 4 {
                        let set = operations.wr_set_sge_list.unwrap();
                        set(ex, entries.len(), entries.as_ptr());
                    }
                    operations.wr_complete.unwrap()(ex)
                }
            };
            let mut post = post;
            for kind in 0..8 {
                let posted = fill(&qp, || match post(kind) {
                    0 => Some(kind),
                    errno => {
                        assert_eq!(errno, libc::ENOMEM);
                        None
                    }
                });
                assert_eq!(posted, given.max_send_wr, "kind {kind}");
                finish_all(&qp);
            }
        }
    }

    /// Long and short work requests mixed by chance, completed by chance, past the end of the
    /// 32-bit indices: what lies in the ring is what was posted.
    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut page = Page::new();
        let qp = alone(&cap(7, 5, 6, 2, 0), page.doorbells());
        qp.begin_at(u32::MAX - 60);
        let mut draw = crate::testing::draws(0x2545_f491_4f6c_dd1d);
        let mut outstanding: std::collections::VecDeque<(u32, u64, u32)> = Default::default();
        for wr_id in 0..400u64 {
            let opcode = OPERATIONS[draw(8) as usize];
            let count = 1 + draw(6) as usize;
            let mut entries = vec![sge(wr_id as u32 + 1); count];
            let mut request = wr(opcode, &mut entries, 0);
            request.wr_id = wr_id;
            let start = qp.send.lock().posted.blocks;
            match send(&qp, &mut request) {
                0 => outstanding.push_back((start, wr_id, count as u32)),
                errno => {
                    assert_eq!(errno, libc::ENOMEM);
                    assert_eq!(outstanding.len(), qp.geometry.capacity.max_send_wr as usize);
                    // Some go without a completion of their own.
                    let done = 1 + draw(outstanding.len() as u64) as usize;
                    let mut last = None;
                    for (start, wr_id, count) in outstanding.drain(..done) {
                        let bytes = fetch(&qp, start);
                        let header = SendHeader::from_prefix(&bytes).unwrap();
                        assert_eq!(u32::from(header.sge_count), count);
                        last = Some((start, wr_id));
                    }
                    let (start, wr_id) = last.unwrap();
                    assert_eq!(qp.send_done(start).0, wr_id);
                }
            }
            let shown = qp.record(offset_of!(QueuePairRecord, send_producer));
            assert_eq!(shown.load(Ordering::Relaxed), qp.send.lock().posted.blocks);
        }
        assert!(
            qp.send.lock().posted.blocks < 2000,
            "the indices went round"
        );

        let mut receive = ibv_recv_wr::default();
        for wr_id in 0..100 {
            receive.wr_id = wr_id;
            let index = qp.receive.lock().producer;
            assert_eq!(post_receive(&qp, &mut receive), 0);
            assert_eq!(qp.receive_done(index), wr_id);
        }
        for _ in 0..qp.geometry.rq_entries {
            assert_eq!(post_receive(&qp, &mut receive), 0);
        }
        assert_eq!(post_receive(&qp, &mut receive), libc::ENOMEM);
    }

    fn post_receive(qp: &Qp, wr: &mut ibv_recv_wr) -> c_int {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the work request is complete.
        let result = unsafe { post_recv(ptr::from_ref(qp).cast_mut().cast(), wr, &mut bad) };
        assert_eq!(result != 0, bad == ptr::from_mut(wr));
        result
    }

    /// Those before the bad one are posted, it is named, and none after it is looked at.
    #[test]
    fn a_list_is_posted_up_to_its_bad_work_request() {
        let mut page = Page::new();
        for bad_at in 0..4usize {
            let qp = alone(&cap(8, 8, 1, 1, 0), page.doorbells());
            let mut entries = [sge(1)];
            let mut list: Vec<ibv_send_wr> = (0..4)
                .map(|n| {
                    let opcode = if n == bad_at { 77 } else { IBV_WR_SEND };
                    let mut wr = wr(opcode, &mut entries, 0);
                    wr.wr_id = n as u64;
                    wr
                })
                .collect();
            let mut next = ptr::null_mut();
            for wr in list.iter_mut().rev() {
                wr.next = next;
                next = wr;
            }
            let this: *mut ibv_qp = ptr::from_ref(&*qp).cast_mut().cast();
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair lives, and the list ends.
            let result = unsafe { post_send(this, next, &mut bad) };
            assert_eq!(result, libc::EINVAL);
            assert_eq!(bad, &raw mut list[bad_at]);
            assert_eq!(qp.send.lock().posted.blocks, bad_at as u32);
            let rung = page.take(DOORBELL_SEND);
            match bad_at {
                0 => assert_eq!(rung, 0),
                posted => assert_eq!(rung, send_doorbell(0x123, posted as u32)),
            }
            for index in 0..bad_at as u32 {
                assert_eq!(qp.send_done(index).0, u64::from(index));
            }

            let mut list: Vec<ibv_recv_wr> = (0..4)
                .map(|n| ibv_recv_wr {
                    wr_id: n as u64,
                    num_sge: if n == bad_at { -1 } else { 0 },
                    ..Default::default()
                })
                .collect();
            let mut next = ptr::null_mut();
            for wr in list.iter_mut().rev() {
                wr.next = next;
                next = wr;
            }
            let mut bad = ptr::null_mut();
            // SAFETY: as above.
            let result = unsafe { post_recv(this, next, &mut bad) };
            assert_eq!(result, libc::EINVAL);
            assert_eq!(bad, &raw mut list[bad_at]);
            assert_eq!(qp.receive.lock().producer, bad_at as u32);
        }
    }

    /// The program chooses the keys of a window of type 2 and knows when they are in force.
    #[test]
    fn posting_a_bind_leaves_the_window_alone() {
        let mut page = Page::new();
        let mut qp = alone(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        let mut request = wr(IBV_WR_BIND_MW, &mut [], 0);
        binding.put_into(&mut request);
        assert_eq!(send(&qp, &mut request), 0);
        assert_eq!(binding.mw.rkey, 0x0005_0010);
        let ex = extended(&mut qp);
        let info = binding.info();
        for abort in [true, false] {
            // SAFETY: the operations were filled in by `extended` and are called in their order.
            unsafe {
                let operations = ptr::read(ex);
                operations.wr_start.unwrap()(ex);
                operations.wr_bind_mw.unwrap()(ex, &raw mut *binding.mw, 0x0005_0011, &info);
                if abort {
                    operations.wr_abort.unwrap()(ex);
                } else {
                    assert_eq!(operations.wr_complete.unwrap()(ex), 0);
                }
            }
            assert_eq!(binding.mw.rkey, 0x0005_0010);
        }
        let bytes = fetch(&qp, 1);
        let part = BindPart::from_prefix(&bytes[16..]).unwrap();
        assert_eq!((part.window, part.new_window), (0x0005_0010, 0x0005_0011));
    }

    #[test]
    fn a_window_is_of_one_touch_where_the_device_has_that() {
        let mut page = Page::new();
        let mut qp = alone(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        let mut request = wr(IBV_WR_BIND_MW, &mut [], 0);
        binding.put_into(&mut request);
        let asked = IBV_ACCESS_REMOTE_WRITE | crate::direct::FERRITEDV_ACCESS_ONE_TOUCH;
        request.__bindgen_anon_2.bind_mw.bind_info.mw_access_flags = asked;
        assert_eq!(send(&qp, &mut request), 0);
        let Part::Bind(part) = taken(&qp, 0).1 else {
            panic!("no bind");
        };
        let expected = ferrite_abi::ACCESS_REMOTE_WRITE | ferrite_abi::ACCESS_ONE_TOUCH;
        assert_eq!(part.access, expected);
        qp.features = !ferrite_abi::FEATURE_ONE_TOUCH;
        assert_eq!(send(&qp, &mut request), libc::EOPNOTSUPP);
        // The device's own number for it is another right of the verbs, which windows have not.
        let on_demand = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ON_DEMAND;
        assert_eq!(ferrite_abi::ACCESS_ONE_TOUCH, IBV_ACCESS_ON_DEMAND);
        request.__bindgen_anon_2.bind_mw.bind_info.mw_access_flags = on_demand;
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
    }

    /// Threads post to one queue pair while another takes the completions: each work request is
    /// there once, and the order of the ring is that of the completions.
    #[test]
    fn threads_post_to_one_queue_pair() {
        const THREADS: u64 = 4;
        const EACH: u64 = 3000;
        let mut page = Page::new();
        let qp = alone(&cap(16, 1, 3, 1, 0), page.doorbells());
        qp.begin_at(u32::MAX - 1000);
        let mut seen = vec![0u64; THREADS as usize];
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let qp = Shared(&*qp);
                scope.spawn(move || {
                    let qp = qp;
                    for n in 0..EACH {
                        let mut entries = vec![sge(1); 1 + (n % 3) as usize];
                        let mut request = wr(OPERATIONS[(n % 8) as usize], &mut entries, 0);
                        request.wr_id = (thread << 32) | n;
                        loop {
                            match send(&qp, &mut request) {
                                0 => break,
                                libc::ENOMEM => std::thread::yield_now(),
                                errno => panic!("{errno}"),
                            }
                        }
                    }
                });
            }
            let producer = qp.record(offset_of!(QueuePairRecord, send_producer));
            let mut consumer = u32::MAX - 1000;
            for _ in 0..THREADS * EACH {
                while producer.load(Ordering::Acquire) == consumer {
                    std::thread::yield_now();
                }
                let blocks = (fetch(&qp, consumer).len() / BLOCK_SIZE) as u32;
                let (wr_id, _) = qp.send_done(consumer);
                let next = &mut seen[(wr_id >> 32) as usize];
                assert_eq!(wr_id as u32, *next as u32, "in each thread's order");
                *next += 1;
                consumer = consumer.wrapping_add(blocks);
            }
        });
        assert!(seen.iter().all(|&count| count == EACH));
    }
}
