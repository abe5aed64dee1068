// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The receive queue of a queue pair that has its own.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use ferrite_abi::{queue_doorbell, DOORBELL_RECEIVE};

use crate::qp::Qp;
use crate::ring::RECEIVE;
use crate::sys::*;
use crate::wqe::sge_list;

/// The host's side of a receive queue.
pub(crate) struct ReceiveQueue {
    /// Entries written, free-running.
    pub(crate) producer: u32,
    /// Entries that were known to be done when there was last no room without asking: the word that says
    /// it is written by who polls, and would come from that processor each time.
    finished: u32,
}

impl ReceiveQueue {
    pub(crate) fn new() -> Self {
        Self::beginning_at(0)
    }

    /// An empty queue whose next entry has this index.
    pub(crate) fn beginning_at(index: u32) -> Self {
        Self {
            producer: index,
            finished: index,
        }
    }
}

impl Qp {
    /// Whether a receive may be posted now.
    #[inline]
    fn has_receive_room(&self, queue: &mut ReceiveQueue) -> bool {
        self.has_receive_room_after(queue.finished, queue.producer)
            || self.has_more_receive_room(queue)
    }

    /// As [`Qp::has_receive_room`], where what was known to be done is not enough.
    #[cold]
    fn has_more_receive_room(&self, queue: &mut ReceiveQueue) -> bool {
        queue.finished = self.receive_finished.load(Ordering::Acquire);
        self.has_receive_room_after(queue.finished, queue.producer)
    }

    /// Whether there is room when those `finished` of those `posted` are done. What a device says of
    /// more than was posted makes no room.
    #[inline]
    fn has_receive_room_after(&self, finished: u32, posted: u32) -> bool {
        posted.wrapping_sub(finished) < self.layout.receive.ring.entries
    }

    /// Remembers the receive at `index`.
    #[inline]
    pub(crate) fn receive_posted(&self, index: u32, wr_id: u64) {
        self.receive_slots[self.layout.receive.ring.slot(index)].store(wr_id, Ordering::Relaxed);
    }

    /// The receive at `index` is done, and with it all before it.
    #[inline]
    pub(crate) fn receive_done(&self, index: u32) -> u64 {
        let slot = self.layout.receive.ring.slot(index);
        let wr_id = self.receive_slots[slot].load(Ordering::Relaxed);
        self.receive_finished
            .store(index.wrapping_add(1), Ordering::Release);
        wr_id
    }

    /// Writes a receive behind those written before, without showing it to the device.
    #[inline]
    pub(crate) fn write_receive(
        &self,
        queue: &mut ReceiveQueue,
        wr: &ibv_recv_wr,
    ) -> Result<(), c_int> {
        // SAFETY: `ibv_post_recv` demands of its caller that the list has so many entries.
        let sges = unsafe { sge_list(wr.sg_list, wr.num_sge) }?;
        if sges.len() > self.layout.receive.max_sge as usize {
            return Err(libc::EINVAL);
        }
        if !self.has_receive_room(queue) {
            return Err(libc::ENOMEM);
        }
        // SAFETY: the memory was made for this layout (`Qp::boxed`); the device is done with the entry,
        // as the check of the room has found; the count was checked.
        unsafe {
            self.layout
                .receive
                .write(&self.memory, queue.producer, 0, sges);
        }
        self.receive_posted(queue.producer, wr.wr_id);
        queue.producer = queue.producer.wrapping_add(1);
        Ok(())
    }

    /// Shows all written receives to the device.
    #[inline]
    pub(crate) fn publish_receive(&self, queue: &ReceiveQueue) {
        self.memory.publish(&RECEIVE, queue.producer, || {
            self.doorbells
                .ring(DOORBELL_RECEIVE, queue_doorbell(self.qpn));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cap, post_receive, rc, sge, Page};
    use core::ptr;
    use ferrite_abi::{Plain, ReceiveHeader, Sge};

    #[test]
    fn a_full_queue_refuses_and_a_completion_makes_room() {
        let mut page = Page::new();
        let qp = rc(&cap(1, 4, 1, 1, 0), page.doorbells());
        let entries = qp.layout.receive.ring.entries;
        let start = u32::MAX - 5;
        qp.begin_at(start);
        let mut request = ibv_recv_wr::default();
        let mut post = || post_receive(&qp, &mut request);
        for _ in 0..entries {
            assert_eq!(post(), 0);
        }
        assert_eq!(post(), libc::ENOMEM);
        // The third is done, and with it the two before.
        for round in 0..8u32 {
            qp.receive_done(start.wrapping_add(3 * round + 2));
            for _ in 0..3 {
                assert_eq!(post(), 0);
            }
            assert_eq!(post(), libc::ENOMEM);
        }
        // One that was never posted.
        let beyond = qp.receive.lock().producer.wrapping_add(100);
        qp.receive_done(beyond);
        assert_eq!(post(), libc::ENOMEM);
    }

    #[test]
    fn a_receive_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let qp = rc(&cap(1, 2, 1, 3, 0), page.doorbells());
        let ring = |at: usize| qp.memory.at(qp.layout.receive.ring.offset + at);
        let stride = qp.layout.receive.ring.stride as usize;
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
}
