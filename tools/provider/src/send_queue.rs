// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The send queue of a queue pair: how far it is, what it remembers, and writing to it.

use core::ffi::c_int;
use core::mem::{offset_of, size_of, MaybeUninit};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferrite_abi::{
    blocks_for, opcode_part, send_doorbell, AtomicPart, Plain, RemotePart, SendHeader, SendOpcode,
    SendPart, Sge, BLOCK_SIZE, DOORBELL_SEND, FEATURE_ATOMICS, MAX_BLOCKS, MAX_PIECES, SEND_FENCE,
    SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
};

use crate::qp::Qp;
use crate::ring::{self, Cursor};
use crate::sys::*;
use crate::wqe::{completion_opcode, Data, Part, Work};

/// The host's side of a send queue.
pub(crate) struct SendQueue {
    /// What is written; its blocks are the producer index.
    pub(crate) posted: SendCount,
    /// What of it was known to be done when there was last no room without asking: the word that says
    /// it is written by who polls, and would come from that processor each time.
    finished: SendCount,
    /// The extended interface's unfinished work.
    pub(crate) session: crate::post_ex::Session,
    /// The pieces of the list that it registers, if it registers one: as many as the part says.
    pub(crate) pieces: [ibv_sge; MAX_PIECES],
}

impl SendQueue {
    pub(crate) fn new() -> Self {
        Self {
            posted: SendCount::default(),
            finished: SendCount::default(),
            session: crate::post_ex::Session::new(),
            pieces: [ibv_sge::default(); MAX_PIECES],
        }
    }
}

/// Written when a work request is posted, read when its completion is polled.
///
/// The two are ordered by the device, which completes nothing that was not published to it, so
/// relaxed accesses do.
#[derive(Default)]
pub(crate) struct SendSlot {
    wr_id: AtomicU64,
    /// What of the queue was posted up to and with this one, as a [`SendCount`].
    posted: AtomicU64,
    opcode: AtomicU32,
}

/// What the compiler is to know of an operation that is written without a detour.
struct Usual {
    opcode: SendOpcode,
    part: UsualPart,
    /// It has immediate data.
    immediate: bool,
    /// It sends what its list names, which may therefore stand in the work request.
    sends: bool,
    /// Bytes before its data.
    before: u8,
    /// What its completion is told as.
    completion: ibv_wc_opcode,
    /// What the device must be able to do.
    feature: u64,
}

enum UsualPart {
    Send,
    Remote,
    FetchAdd,
    CompareSwap,
}

const SEND: u8 = SendOpcode::Send.number();
const SEND_IMMEDIATE: u8 = SendOpcode::SendImmediate.number();
const WRITE: u8 = SendOpcode::Write.number();
const WRITE_IMMEDIATE: u8 = SendOpcode::WriteImmediate.number();
const READ: u8 = SendOpcode::Read.number();
const COMPARE_SWAP: u8 = SendOpcode::CompareSwap.number();
const FETCH_ADD: u8 = SendOpcode::FetchAdd.number();

impl Usual {
    const fn new(number: u8) -> Self {
        let (opcode, part) = match number {
            SEND => (SendOpcode::Send, UsualPart::Send),
            SEND_IMMEDIATE => (SendOpcode::SendImmediate, UsualPart::Send),
            WRITE => (SendOpcode::Write, UsualPart::Remote),
            WRITE_IMMEDIATE => (SendOpcode::WriteImmediate, UsualPart::Remote),
            READ => (SendOpcode::Read, UsualPart::Remote),
            COMPARE_SWAP => (SendOpcode::CompareSwap, UsualPart::CompareSwap),
            FETCH_ADD => (SendOpcode::FetchAdd, UsualPart::FetchAdd),
            _ => panic!("it is not usual"),
        };
        let atomic = matches!(part, UsualPart::FetchAdd | UsualPart::CompareSwap);
        Self {
            opcode,
            immediate: matches!(
                opcode,
                SendOpcode::SendImmediate | SendOpcode::WriteImmediate
            ),
            sends: !atomic && !matches!(opcode, SendOpcode::Read),
            before: (size_of::<SendHeader>() + opcode_part(opcode, false)) as u8,
            completion: completion_opcode(opcode),
            feature: if atomic { FEATURE_ATOMICS } else { 0 },
            part,
        }
    }
}

// The first word of a header is put together of its fields, and the second is that of the SRQ.
const _: () = assert!(
    cfg!(target_endian = "little")
        && offset_of!(SendHeader, opcode) == 0
        && offset_of!(SendHeader, reserved_channel) == 8
        && offset_of!(SendHeader, srqn) == 12
);

/// What a device is told for `ibv_send_flags`, of which these are the four lowest.
static FLAGS: [u16; 16] = {
    let mut flags = [0; 16];
    let mut asked = 0;
    while asked < 16 {
        flags[asked as usize] = device_flags(asked);
        asked += 1;
    }
    flags
};

/// What a device is told for `ibv_send_flags`.
const fn device_flags(asked: u32) -> u16 {
    let mut flags = 0;
    if asked & IBV_SEND_SIGNALED != 0 {
        flags |= SEND_SIGNALED;
    }
    if asked & IBV_SEND_SOLICITED != 0 {
        flags |= SEND_SOLICITED;
    }
    if asked & IBV_SEND_FENCE != 0 {
        flags |= SEND_FENCE;
    }
    if asked & IBV_SEND_INLINE != 0 {
        flags |= SEND_INLINE;
    }
    flags
}

/// Copies what is short as a rule, without a call.
///
/// # Safety
///
/// `length` bytes may be read at `from` and written at `to`, and are apart.
#[inline(always)]
unsafe fn copy_few(from: *const u8, to: *mut u8, length: usize) {
    /// A piece of so many bytes, at any address.
    ///
    /// # Safety
    ///
    /// As for [`copy_few`], of `size_of::<T>()` bytes.
    #[inline(always)]
    unsafe fn piece<T>(from: *const u8, to: *mut u8) {
        // SAFETY: by the caller.
        unsafe {
            to.cast::<T>()
                .write_unaligned(from.cast::<T>().read_unaligned())
        };
    }
    /// Beyond this a call is worth it.
    const FEW: usize = 256;
    // SAFETY: every piece is in the range: a last one that is shorter than a piece is copied as the piece
    // that ends with it, some of which was copied before.
    unsafe {
        match length {
            16..=FEW => {
                let mut at = 0;
                while at + 16 < length {
                    piece::<[u64; 2]>(from.add(at), to.add(at));
                    at += 16;
                }
                piece::<[u64; 2]>(from.add(length - 16), to.add(length - 16));
            }
            8..16 => {
                piece::<u64>(from, to);
                piece::<u64>(from.add(length - 8), to.add(length - 8));
            }
            4..8 => {
                piece::<u32>(from, to);
                piece::<u32>(from.add(length - 4), to.add(length - 4));
            }
            1..4 => {
                piece::<u8>(from, to);
                piece::<u8>(from.add(length / 2), to.add(length / 2));
                piece::<u8>(from.add(length - 1), to.add(length - 1));
            }
            _ => ptr::copy_nonoverlapping(from, to, length),
        }
    }
}

/// How far a send queue is. A queue is full when it has as many work requests as were promised, or
/// when the next one does not fit in the blocks that are left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendCount {
    /// Work requests, free-running.
    pub(crate) requests: u32,
    /// Their blocks, free-running.
    pub(crate) blocks: u32,
}

impl SendCount {
    /// The count after a work request of that many blocks.
    pub(crate) fn after(self, blocks: u32) -> Self {
        Self {
            requests: self.requests.wrapping_add(1),
            blocks: self.blocks.wrapping_add(blocks),
        }
    }

    pub(crate) fn to_word(self) -> u64 {
        (u64::from(self.requests) << 32) | u64::from(self.blocks)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self {
            requests: (word >> 32) as u32,
            blocks: word as u32,
        }
    }
}

impl Qp {
    /// Posting to the send queue is refused before RTS.
    pub(crate) fn may_send(&self) -> bool {
        !matches!(self.state(), IBV_QPS_RESET | IBV_QPS_INIT | IBV_QPS_RTR)
    }

    /// Whether a work request of that many blocks may be posted now.
    #[inline]
    pub(crate) fn has_send_room(&self, queue: &mut SendQueue, blocks: u32) -> bool {
        self.has_room_after(queue.finished, queue.posted, blocks)
            || self.has_more_room(queue, blocks)
    }

    /// As [`Qp::has_send_room`], where what was known to be done is not enough.
    #[cold]
    fn has_more_room(&self, queue: &mut SendQueue, blocks: u32) -> bool {
        queue.finished = SendCount::from_word(self.send_finished.load(Ordering::Acquire));
        self.has_room_after(queue.finished, queue.posted, blocks)
    }

    /// Why a work request is refused that there is no room for: a queue that has none ever is no full one.
    #[cold]
    fn no_send_room(&self) -> c_int {
        match self.layout.capacity.max_send_wr {
            0 => libc::EINVAL,
            _ => libc::ENOMEM,
        }
    }

    /// Whether there is room when those `finished` of those `posted` are done.
    #[inline]
    fn has_room_after(&self, finished: SendCount, posted: SendCount, blocks: u32) -> bool {
        let requests = posted.requests.wrapping_sub(finished.requests);
        let used = posted.blocks.wrapping_sub(finished.blocks);
        requests < self.layout.capacity.max_send_wr
            && u64::from(used) + u64::from(blocks) <= u64::from(self.layout.send.entries)
    }

    /// Remembers the work request that starts at that block of the ring; `posted` counts it.
    #[inline]
    pub(crate) fn send_posted(
        &self,
        block: usize,
        posted: SendCount,
        wr_id: u64,
        opcode: ibv_wc_opcode,
    ) {
        let slot = &self.send_slots[block];
        slot.wr_id.store(wr_id, Ordering::Relaxed);
        slot.posted.store(posted.to_word(), Ordering::Relaxed);
        slot.opcode.store(opcode, Ordering::Relaxed);
    }

    /// The work request that started at block `index` is done, and with it all before it.
    #[inline]
    pub(crate) fn send_done(&self, index: u32) -> (u64, ibv_wc_opcode) {
        let slot = &self.send_slots[self.layout.send.slot(index)];
        let result = (
            slot.wr_id.load(Ordering::Relaxed),
            slot.opcode.load(Ordering::Relaxed),
        );
        // Release: the slot is read before a post may use it again.
        self.send_finished
            .store(slot.posted.load(Ordering::Relaxed), Ordering::Release);
        result
    }

    /// Writes a work request behind those written before, without showing it to the device.
    #[inline]
    pub(crate) fn write_send(
        &self,
        queue: &mut SendQueue,
        work: &Work,
        data: &Data<'_>,
    ) -> Result<(), c_int> {
        let capacity = &self.layout.capacity;
        let total: u64 = match data {
            // Before any is looked at: of a count that is wrong, few may be there.
            Data::Sges(sges) if sges.len() > capacity.max_send_sge as usize => {
                return Err(libc::EINVAL);
            }
            Data::Pieces(pieces, message)
                if pieces.len().saturating_add(message.len()) > capacity.max_send_sge as usize =>
            {
                return Err(libc::EINVAL);
            }
            // Pieces are not sent: a list may be longer than a message.
            Data::Sges(sges) | Data::Copy(sges) | Data::Pieces(_, sges) => {
                sges.iter().map(|sge| u64::from(sge.length)).sum()
            }
            Data::CopyBuffers(buffers) => buffers.iter().fold(0, |sum: u64, buffer| {
                sum.saturating_add(buffer.length as u64)
            }),
            Data::Eight(bytes) => bytes.len() as u64,
        };
        let mut flags = 0;
        let (payload, sge_count, inline_length) = match data {
            Data::Sges(sges) => {
                if total > u64::from(self.max_message) {
                    return Err(libc::EINVAL);
                }
                (size_of_val(*sges), sges.len() as u8, 0)
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
        flags |= device_flags(work.flags & !IBV_SEND_INLINE) | self.signal_all;
        let blocks = blocks_for(work.opcode, self.ud, payload) as u32;
        if !self.has_send_room(queue, blocks) {
            return Err(self.no_send_room());
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

        let first = self.layout.send.slot(queue.posted.blocks) as u32;
        let mut scratch = MaybeUninit::<[u64; MAX_BLOCKS * BLOCK_SIZE / 8]>::uninit();
        let wraps = first + blocks > self.layout.send.entries;
        let target = if wraps {
            scratch.as_mut_ptr().cast::<u8>()
        } else {
            self.send_block(first)
        };
        let mut cursor = Cursor(target);
        // SAFETY: header, part and payload take no more than `blocks` blocks: `blocks_for` has counted
        // them. The ring has that many from `first` on where they do not wrap, and the device is done
        // with them, as `has_send_room` has found; else they go to the scratch, which has `MAX_BLOCKS`,
        // the most for a payload within the capacity (checked above). What an inline work request
        // names may be read: `ibv_post_send` demands it of its caller.
        unsafe {
            cursor.put(header.as_bytes());
            cursor.put(work.part.as_bytes());
            if let Part::ListSend(_, send) = &work.part {
                cursor.put(send.as_bytes());
            }
            match data {
                Data::Sges(sges) => cursor.put_from(sges.as_ptr().cast(), payload),
                Data::Copy(sges) => {
                    for sge in *sges {
                        cursor.put_from(sge.addr as *const u8, sge.length as usize);
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
                let slot = self.layout.send.slot(first + block) as u32;
                // SAFETY: `block` is less than `blocks`, which the scratch has, and `slot` less than
                // the ring's entries. Bytes past the payload were never written: they are copied as
                // `MaybeUninit`, and the device looks at none of them.
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
        queue.posted = queue.posted.after(blocks);
        self.send_posted(
            first as usize,
            queue.posted,
            work.wr_id,
            completion_opcode(work.opcode),
        );
        Ok(())
    }

    /// Writes a work request of the plain interface behind those written before, as [`Qp::write_send`],
    /// if it is one of the usual: of an operation in [`Usual`] with one scatter/gather entry, that does
    /// not wrap. `false` if it is not.
    ///
    /// # Safety
    ///
    /// `wr` is as the verbs demand for its opcode.
    #[inline(always)]
    pub(crate) unsafe fn write_usual(
        &self,
        queue: &mut SendQueue,
        wr: &ibv_send_wr,
    ) -> Result<bool, c_int> {
        if wr.num_sge != 1 || self.ud {
            return Ok(false);
        }
        // SAFETY: the list has one entry, and otherwise by the caller.
        unsafe {
            match wr.opcode {
                IBV_WR_RDMA_WRITE => self.write_one::<WRITE>(queue, wr),
                IBV_WR_RDMA_WRITE_WITH_IMM => self.write_one::<WRITE_IMMEDIATE>(queue, wr),
                IBV_WR_SEND => self.write_one::<SEND>(queue, wr),
                IBV_WR_SEND_WITH_IMM => self.write_one::<SEND_IMMEDIATE>(queue, wr),
                IBV_WR_RDMA_READ => self.write_one::<READ>(queue, wr),
                IBV_WR_ATOMIC_CMP_AND_SWP => self.write_one::<COMPARE_SWAP>(queue, wr),
                IBV_WR_ATOMIC_FETCH_AND_ADD => self.write_one::<FETCH_ADD>(queue, wr),
                _ => Ok(false),
            }
        }
    }

    /// As [`Qp::write_usual`], of an operation that the compiler knows: what it is makes no branch.
    ///
    /// # Safety
    ///
    /// As for [`Qp::write_usual`], and the list has one entry.
    #[inline(always)]
    unsafe fn write_one<const OPCODE: u8>(
        &self,
        queue: &mut SendQueue,
        wr: &ibv_send_wr,
    ) -> Result<bool, c_int> {
        let usual = const { &Usual::new(OPCODE) };
        if self.features & usual.feature != usual.feature {
            return Ok(false);
        }
        // SAFETY: the list has one entry, by the caller.
        let sge = unsafe { *wr.sg_list };
        let length = sge.length;
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        let blocks = if inline {
            if length > self.layout.capacity.max_inline_data || !usual.sends {
                return Err(libc::EINVAL);
            }
            (u32::from(usual.before) + length + BLOCK_SIZE as u32 - 1) >> BLOCK_SIZE.ilog2()
        } else {
            if length > self.max_message {
                return Err(libc::EINVAL);
            }
            const { assert!(blocks_for(Usual::new(OPCODE).opcode, false, size_of::<Sge>()) == 1) };
            1
        };
        let posted = queue.posted;
        let first = self.layout.send.slot(posted.blocks) as u32;
        if first + blocks > self.layout.send.entries {
            return Ok(false);
        }
        if !self.has_send_room(queue, blocks) {
            return Err(self.no_send_room());
        }
        let flags = FLAGS[(wr.send_flags & 15) as usize] | self.signal_all;
        let (sge_count, inline_length) = if inline { (0, length) } else { (1, 0) };
        let header = [
            u64::from(OPCODE)
                | (u64::from(blocks) << (8 * offset_of!(SendHeader, blocks)))
                | (sge_count << (8 * offset_of!(SendHeader, sge_count)))
                | (u64::from(flags) << (8 * offset_of!(SendHeader, flags)))
                | (u64::from(inline_length) << (8 * offset_of!(SendHeader, inline_length))),
            if self.xrc {
                // SAFETY: the union has no other member, and that is an integer.
                u64::from(unsafe { wr.qp_type.xrc.remote_srqn }) << 32
            } else {
                0
            },
        ];
        let target = self.send_block(first);
        // SAFETY: the members of the unions that are read are structures of integers, for which any bytes
        // are valid; which of them counts is by the opcode. The ring has `blocks` blocks from `first` on,
        // as was checked, and the device is done with them (`has_send_room`); they have room for header,
        // part and payload (`Usual::before`), and blocks are aligned for all of these. What an inline work
        // request names may be read: the verbs demand it of the caller.
        unsafe {
            target.cast::<[u64; 2]>().write(header);
            let part = target.add(size_of::<SendHeader>());
            let immediate = match usual.immediate {
                true => u64::from(wr.__bindgen_anon_1.imm_data),
                false => 0,
            };
            match usual.part {
                UsualPart::Send => part.cast::<SendPart>().write(SendPart {
                    immediate,
                    ..SendPart::zeroed()
                }),
                UsualPart::Remote => part.cast::<RemotePart>().write(RemotePart {
                    address: wr.wr.rdma.remote_addr,
                    rkey: wr.wr.rdma.rkey,
                    immediate,
                    ..RemotePart::zeroed()
                }),
                UsualPart::FetchAdd => part.cast::<AtomicPart>().write(AtomicPart {
                    address: wr.wr.atomic.remote_addr,
                    rkey: wr.wr.atomic.rkey,
                    operand: wr.wr.atomic.compare_add,
                    ..AtomicPart::zeroed()
                }),
                UsualPart::CompareSwap => part.cast::<AtomicPart>().write(AtomicPart {
                    address: wr.wr.atomic.remote_addr,
                    rkey: wr.wr.atomic.rkey,
                    operand: wr.wr.atomic.swap,
                    compare: wr.wr.atomic.compare_add,
                    ..AtomicPart::zeroed()
                }),
            }
            let data = target.add(usual.before.into());
            if inline {
                copy_few(sge.addr as *const u8, data, length as usize);
            } else {
                data.cast::<ibv_sge>().write(sge);
            }
        }
        queue.posted = posted.after(blocks);
        self.send_posted(first as usize, queue.posted, wr.wr_id, usual.completion);
        Ok(true)
    }

    #[inline]
    pub(crate) fn send_block(&self, block: u32) -> *mut u8 {
        debug_assert!(block < self.layout.send.entries);
        self.memory.at(block as usize * BLOCK_SIZE)
    }

    /// Shows all written work requests to the device.
    #[inline]
    pub(crate) fn publish_send(&self, queue: &SendQueue) {
        let producer = queue.posted.blocks;
        self.memory.publish(&ring::SEND, producer, || {
            self.doorbells
                .ring(DOORBELL_SEND, send_doorbell(self.qpn, producer));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp_layout::{QpLayout, Requests};
    use crate::testing::{
        self, cap, fetch, fill, finish_all, payload, rc, send, sge, taken, wr, Binding, Page,
        OPERATIONS,
    };

    impl Qp {
        /// Whether a work request that starts at block `index` was the last of those `posted`.
        pub(crate) fn was_posted(&self, index: u32, posted: SendCount) -> bool {
            let slot = &self.send_slots[self.layout.send.slot(index)];
            slot.posted.load(Ordering::Relaxed) == posted.to_word()
        }
    }

    #[test]
    fn work_requests_wrap_around_the_end_of_the_ring() {
        let mut page = Page::new();
        let qp = rc(&cap(3, 1, 6, 1, 0), page.doorbells());
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
    fn few_bytes_are_copied_and_no_others() {
        let from: Vec<u8> = (0..=255).cycle().take(600).collect();
        for length in 0..300 {
            let mut to = vec![0xee; 600];
            // SAFETY: both are longer.
            unsafe { copy_few(from[3..].as_ptr(), to[5..].as_mut_ptr(), length) };
            assert_eq!(to[5..5 + length], from[3..3 + length]);
            let untouched = |byte: &u8| *byte == 0xee;
            assert!(to[..5].iter().all(untouched) && to[5 + length..].iter().all(untouched));
        }
    }

    /// What is written without a detour, where it does not wrap.
    const USUAL: [ibv_wr_opcode; 7] = [
        IBV_WR_SEND,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_WRITE,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
    ];

    /// Of queue pairs that take two blocks of inline data and more.
    const INLINE: ibv_qp_cap = ibv_qp_cap {
        max_send_wr: 8,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 100,
    };

    /// The most inline data that these take in fact.
    fn inline_room() -> u32 {
        let layout = QpLayout::new(&INLINE, &testing::limits(), Requests::Connected);
        layout.unwrap().capacity.max_inline_data
    }

    /// What there is of a work request that was written, or refused.
    #[derive(Debug, PartialEq)]
    struct Wrote {
        result: Result<(), c_int>,
        posted: SendCount,
        bytes: Vec<u8>,
        told: (u64, ibv_wc_opcode),
    }

    /// Writes a work request of one entry to a queue that begins at block `start`; if it may be `short`,
    /// says whether it was.
    fn write_as(
        qp: &Qp,
        short: bool,
        start: u32,
        opcode: ibv_wr_opcode,
        flags: u32,
        data: &[u8],
    ) -> (bool, Wrote) {
        qp.begin_at(start);
        testing::spoil(qp);
        let mut entries = [ibv_sge {
            addr: data.as_ptr() as u64,
            length: data.len() as u32,
            lkey: 7,
        }];
        let mut wr = wr(opcode, &mut entries, flags);
        wr.wr.atomic.compare_add = 5;
        wr.wr.atomic.swap = 6;
        wr.qp_type.xrc.remote_srqn = 0x77;
        let mut binding = Binding::new();
        binding.put_into(&mut wr);
        let mut queue = qp.send.lock();
        // SAFETY: the work request is complete, and its data as long as it says.
        let (was_short, result) = unsafe {
            match short.then(|| qp.write_usual(&mut queue, &wr)) {
                Some(Ok(true)) => (true, Ok(())),
                Some(Err(errno)) => (false, Err(errno)),
                _ => (false, qp.write_any(&mut queue, &wr)),
            }
        };
        let posted = queue.posted;
        drop(queue);
        let bytes = match result {
            Ok(()) => fetch(qp, start),
            Err(_) => Vec::new(),
        };
        let told = qp.send_done(start);
        let wrote = Wrote {
            result,
            posted,
            bytes,
            told,
        };
        (was_short, wrote)
    }

    /// What the usual ones are written as, and what all others are, are the same bytes.
    #[test]
    fn the_short_way_and_the_long_way_write_the_same() {
        let mut page = Page::new();
        // As long as what is refused, and no longer.
        let data: Vec<u8> = (0..=inline_room()).map(|n| n as u8).collect();
        for xrc in [false, true] {
            for opcode in OPERATIONS {
                for flags in 0..16 {
                    for (signal_all, length) in
                        [(0, 0), (SEND_SIGNALED, 70), (0, inline_room() + 1)]
                    {
                        let written = [false, true].map(|short| {
                            let mut qp = rc(&INLINE, page.doorbells());
                            (qp.xrc, qp.signal_all) = (xrc, signal_all);
                            write_as(&qp, short, 0, opcode, flags, &data[..length as usize])
                        });
                        let what = format!("{opcode} xrc {xrc} {flags:#x} {length}");
                        assert_eq!(written[0].1, written[1].1, "{what}");
                        // Nothing is the same by being the long way both times.
                        let refused = written[1].1.result.is_err();
                        assert!(written[1].0 == USUAL.contains(&opcode) || refused, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_wraps_and_what_does_not_are_written_the_same_from_every_start() {
        let mut page = Page::new();
        let data: Vec<u8> = (0..70).collect();
        let entries = rc(&INLINE, page.doorbells()).layout.send.entries;
        for opcode in [IBV_WR_SEND, IBV_WR_RDMA_WRITE_WITH_IMM] {
            for start in 0..2 * entries {
                let written = [false, true].map(|short| {
                    let qp = rc(&INLINE, page.doorbells());
                    write_as(&qp, short, start, opcode, IBV_SEND_INLINE, &data)
                });
                assert_eq!(written[0].1, written[1].1, "{opcode} from {start}");
                assert_eq!(written[0].1.bytes.len(), 2 * BLOCK_SIZE);
                // Of two blocks the second is not behind the first.
                let wraps = start % entries == entries - 1;
                assert_eq!(written[1].0, !wraps, "{opcode} from {start}");
            }
        }
    }

    /// A queue pair without a send queue has no room because it has none: to wait for some is in vain.
    #[test]
    fn where_there_is_no_send_queue_nothing_is_taken_ever() {
        let mut page = Page::new();
        let mut qp = rc(&cap(1, 1, 1, 1, 0), page.doorbells());
        qp.layout.capacity = ibv_qp_cap::default();
        for flags in [0, IBV_SEND_INLINE] {
            for mut entries in [vec![], vec![sge(0)], vec![sge(1)], vec![sge(1); 2]] {
                for opcode in OPERATIONS {
                    let mut wr = wr(opcode, &mut entries, flags);
                    let mut binding = Binding::new();
                    binding.put_into(&mut wr);
                    assert_eq!(send(&qp, &mut wr), libc::EINVAL, "{opcode} {entries:?}");
                }
            }
        }
    }

    #[test]
    fn a_full_queue_refuses_and_a_completion_makes_room() {
        let mut page = Page::new();
        let qp = rc(&cap(5, 1, 4, 1, 0), page.doorbells());
        let room = qp.layout.capacity.max_send_wr;
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
    fn the_ring_is_never_overrun_whatever_is_posted() {
        let mut page = Page::new();
        for wr_count in [1, 2, 3, 8, 37] {
            for sge_count in [1, 2, 3, 6, 7, 16] {
                for inline in [0, 33, 97] {
                    let wanted = cap(wr_count, 1, sge_count, 1, inline);
                    let qp = rc(&wanted, page.doorbells());
                    let given = qp.layout.capacity;
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

    #[test]
    fn the_extended_interface_does_not_overrun_the_ring_either() {
        let mut page = Page::new();
        for sge_count in [1, 2, 3] {
            let mut qp = rc(&cap(8, 1, sge_count, 1, 0), page.doorbells());
            let ex = testing::ex(&mut qp);
            let given = qp.layout.capacity;
            let entries = vec![sge(1); given.max_send_sge as usize];
            let mut binding = Binding::new();
            let info = binding.info();
            let value = [0u8; 8];
            // SAFETY: the operations were filled in by `ex` and are called in their order.
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
}
