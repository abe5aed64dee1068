// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The send queue of a queue pair: how far it is, what it remembers, and writing to it.

use core::ffi::c_int;
use core::mem::{size_of, MaybeUninit};
use core::ptr;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ferrite_abi::{
    blocks_for, send_doorbell, Plain, SendHeader, SendOpcode, Sge, BLOCK_SIZE, DOORBELL_SEND,
    MAX_BLOCKS, MAX_PIECES, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
};

use crate::qp::Qp;
use crate::ring::{Cursor, SEND};
use crate::sys::*;
use crate::wqe::{completion_opcode, Data, Part, Work};

/// The host's side of a send queue.
pub(crate) struct SendQueue {
    /// What is written; its blocks are the producer index.
    pub(crate) posted: SendCount,
    /// The extended interface's unfinished work.
    pub(crate) session: crate::post_ex::Session,
    /// The pieces of the list that it registers, if it registers one: as many as the part says.
    pub(crate) pieces: [ibv_sge; MAX_PIECES],
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

    /// Whether a work request of that many blocks may be posted after those `posted` until now.
    #[inline]
    pub(crate) fn has_send_room(&self, posted: SendCount, blocks: u32) -> bool {
        let finished = SendCount::from_word(self.send_finished.load(Ordering::Acquire));
        let requests = posted.requests.wrapping_sub(finished.requests);
        let used = posted.blocks.wrapping_sub(finished.blocks);
        requests < self.layout.capacity.max_send_wr
            && u64::from(used) + u64::from(blocks) <= u64::from(self.layout.send.entries)
    }

    /// Remembers the work request that starts at block `index`; `posted` counts it.
    #[inline]
    pub(crate) fn send_posted(
        &self,
        index: u32,
        posted: SendCount,
        wr_id: u64,
        opcode: ibv_wc_opcode,
    ) {
        let slot = &self.send_slots[self.layout.send.slot(index)];
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
        if self.signal_all || work.flags & IBV_SEND_SIGNALED != 0 {
            flags |= SEND_SIGNALED;
        }
        if work.flags & IBV_SEND_SOLICITED != 0 {
            flags |= SEND_SOLICITED;
        }
        if work.flags & IBV_SEND_FENCE != 0 {
            flags |= SEND_FENCE;
        }
        let blocks = blocks_for(work.opcode, self.ud, payload) as u32;
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

    #[inline]
    pub(crate) fn send_block(&self, block: u32) -> *mut u8 {
        debug_assert!(block < self.layout.send.entries);
        self.memory.at(block as usize * BLOCK_SIZE)
    }

    /// Shows all written work requests to the device.
    #[inline]
    pub(crate) fn publish_send(&self, queue: &SendQueue) {
        let producer = queue.posted.blocks;
        self.memory.publish(&SEND, producer, || {
            self.doorbells
                .ring(DOORBELL_SEND, send_doorbell(self.qpn, producer));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{
        self, cap, fill, finish_all, payload, rc, send, sge, taken, wr, Binding, Page, OPERATIONS,
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
