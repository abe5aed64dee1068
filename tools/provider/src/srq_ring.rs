// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The ring of a shared receive queue, and what is under the queue's lock.
//!
//! Entries are taken by the device in the order of the ring, but complete in any order; so each
//! carries a number that its completion returns.

use core::ffi::c_int;

use ferrite_abi::{SrqRecord, UverbsContextResponse, UverbsSrqRequest};

use crate::heap;
use crate::ring::{QueueBuffer, ReceiveRing, SHARED_RECEIVE};
use crate::sys::*;
use crate::wqe::sge_list;

/// A ring of receives with its memory.
pub(crate) struct SrqRing {
    pub(crate) receives: ReceiveRing,
    memory: QueueBuffer,
}

impl SrqRing {
    /// A ring that has at least what is `wanted`.
    ///
    /// # Safety
    ///
    /// As for [`crate::protection::Pd::buffer`].
    pub(crate) unsafe fn new(
        wanted: &ibv_srq_attr,
        limits: &UverbsContextResponse,
        pd: *mut ibv_pd,
    ) -> Result<Self, c_int> {
        if wanted.max_wr == 0 {
            return Err(libc::EINVAL);
        }
        let receives = ReceiveRing::new(0, wanted.max_wr, wanted.max_sge, limits)?;
        Ok(Self {
            receives,
            // SAFETY: the domain is as `Pd::buffer` wants it, by the caller.
            memory: unsafe { QueueBuffer::new::<SrqRecord>(pd, receives.ring.end()) }?,
        })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.receives.ring.entries
    }

    /// What to tell the kernel of it.
    pub(crate) fn request(&self) -> UverbsSrqRequest {
        let ring = &self.receives.ring;
        UverbsSrqRequest {
            buffer: self.memory.address(),
            length: self.memory.length(),
            ring_offset: ring.offset as u32,
            record_offset: self.memory.record_offset(),
            log_entries: ring.log_entries(),
            log_stride: ring.log_stride(),
            reserved: [0; 3],
        }
    }

    /// Its producer index, before the device looks at it.
    pub(crate) fn begin_at(&self, producer: u32) {
        self.memory.begin_at(&SHARED_RECEIVE, producer);
    }
}

/// What is changed under the lock of a shared receive queue.
pub(crate) struct SrqState {
    pub(crate) ring: SrqRing,
    /// Entries written, free-running.
    pub(crate) producer: u32,
    /// Numbers that no entry has. With those that one has they are as many as the ring has places.
    /// Has room for all numbers.
    free: Vec<u32>,
    /// By number.
    receives: Vec<Receive>,
    /// Numbers out of use, since the ring was longer once. Has room for all numbers.
    retired: Vec<u32>,
}

/// What is remembered of an entry.
#[derive(Clone, Copy, Default)]
struct Receive {
    /// What the consumer called it.
    wr_id: u64,
    /// It is not known to be done.
    outstanding: bool,
}

impl SrqState {
    pub(crate) fn new(ring: SrqRing) -> Result<Self, c_int> {
        let entries = ring.entries();
        Ok(Self {
            ring,
            producer: 0,
            free: heap::vector(entries as usize, |n| entries - 1 - n as u32)?,
            receives: heap::vector(entries as usize, |_| Receive::default())?,
            retired: Vec::new(),
        })
    }

    /// Receives posted and not known to be done.
    pub(crate) fn outstanding(&self) -> usize {
        self.ring.entries() as usize - self.free.len()
    }

    /// Makes room for what [`SrqState::move_to`] needs.
    pub(crate) fn prepare_to_move(&mut self, ring: &SrqRing) -> Result<(), c_int> {
        let numbers = self.receives.len().max(ring.entries() as usize);
        let receives = numbers - self.receives.len();
        heap::reserve(&mut self.receives, receives)?;
        let free = numbers - self.free.len();
        heap::reserve(&mut self.free, free)?;
        let retired = numbers - self.retired.len();
        heap::reserve(&mut self.retired, retired)
    }

    /// Goes over to another ring, which has room for what is outstanding; gives the old one.
    /// [`SrqState::prepare_to_move`] went before.
    pub(crate) fn move_to(&mut self, ring: SrqRing) -> SrqRing {
        let numbers = ring.entries() as usize - self.outstanding();
        while self.free.len() > numbers {
            self.retired.extend(self.free.pop());
        }
        while self.free.len() < numbers {
            let number = self.retired.pop().unwrap_or_else(|| {
                self.receives.push(Receive::default());
                self.receives.len() as u32 - 1
            });
            self.free.push(number);
        }
        core::mem::replace(&mut self.ring, ring)
    }

    /// The entry with this number is done: what its consumer called it. The number is free again.
    pub(crate) fn done(&mut self, id: u32) -> u64 {
        match self.receives.get_mut(id as usize) {
            Some(receive) if receive.outstanding => {
                receive.outstanding = false;
                let wr_id = receive.wr_id;
                self.free.push(id);
                wr_id
            }
            // Only a broken device says a number that it does not have.
            _ => 0,
        }
    }

    /// Writes an entry. One has a number only if another of those before it was completed, and
    /// then there is a free place in the ring, which is as long as there are numbers: all entries
    /// that the device has not taken have one.
    pub(crate) fn write(&mut self, wr: &ibv_recv_wr) -> Result<(), c_int> {
        // SAFETY: `ibv_post_srq_recv` demands of its caller that the list has so many entries.
        let sges = unsafe { sge_list(wr.sg_list, wr.num_sge) }?;
        let receives = self.ring.receives;
        if sges.len() > receives.max_sge as usize {
            return Err(libc::EINVAL);
        }
        let id = self.free.pop().ok_or(libc::ENOMEM)?;
        self.receives[id as usize] = Receive {
            wr_id: wr.wr_id,
            outstanding: true,
        };
        // SAFETY: `SrqRing::new` made the memory for this ring; a number was free, so that the device
        // has taken what was in this place; the count was checked.
        unsafe { receives.write(&self.ring.memory, self.producer, id, sges) };
        self.producer = self.producer.wrapping_add(1);
        Ok(())
    }

    /// Shows all entries to the device; if it sleeps, has `ring` wake it.
    #[inline]
    pub(crate) fn publish(&self, ring: impl FnOnce()) {
        self.ring
            .memory
            .publish(&SHARED_RECEIVE, self.producer, ring);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::limits;
    use core::mem::offset_of;
    use core::ptr;
    use core::sync::atomic::Ordering;
    use ferrite_abi::{Plain, ReceiveHeader};

    fn attr(max_wr: u32, max_sge: u32) -> ibv_srq_attr {
        ibv_srq_attr {
            max_wr,
            max_sge,
            srq_limit: 0,
        }
    }

    fn sized(max_wr: u32, max_sge: u32) -> Result<SrqRing, c_int> {
        // SAFETY: no domain is one of the two things that it takes.
        unsafe { SrqRing::new(&attr(max_wr, max_sge), &limits(), ptr::null_mut()) }
    }

    impl SrqRing {
        /// As a device does that wants to be rung.
        pub(crate) fn sleep(&self) {
            self.memory.begin_asleep(&SHARED_RECEIVE);
        }
    }

    fn ring(entries: u32) -> SrqRing {
        sized(entries, 1).unwrap()
    }

    fn state(entries: u32) -> SrqState {
        SrqState::new(ring(entries)).unwrap()
    }

    fn post(state: &mut SrqState, wr_id: u64) -> Result<(), c_int> {
        state.write(&ibv_recv_wr {
            wr_id,
            ..Default::default()
        })
    }

    /// The header in the ring of the entry with this index.
    fn header(state: &SrqState, index: u32) -> ReceiveHeader {
        let ring = &state.ring.receives.ring;
        let entry = state
            .ring
            .memory
            .at(ring.slot(index) * ring.stride as usize);
        // SAFETY: the entry is inside the ring and aligned.
        unsafe { ptr::read(entry.cast::<ReceiveHeader>()) }
    }

    #[test]
    fn numbers_return_in_any_order() {
        let mut srq = state(3);
        // What an entry does not use is zero, whatever stood there before.
        // SAFETY: the ring is that long.
        unsafe { ptr::write_bytes(srq.ring.memory.at(0), 0xff, srq.ring.receives.ring.end()) };
        let id = |srq: &SrqState, index| {
            let header = header(srq, index);
            let expected = ReceiveHeader {
                id: header.id,
                ..ReceiveHeader::zeroed()
            };
            assert_eq!(header, expected);
            header.id
        };
        for wr_id in 0..4 {
            assert_eq!(post(&mut srq, wr_id), Ok(()));
        }
        assert_eq!(post(&mut srq, 9), Err(libc::ENOMEM));
        // The device has taken all; the third is done first.
        let ids: Vec<u32> = (0..4).map(|index| id(&srq, index)).collect();
        assert_eq!(srq.done(ids[2]), 2);
        assert_eq!(post(&mut srq, 4), Ok(()));
        assert_eq!(id(&srq, 4), ids[2]);
        assert_eq!(post(&mut srq, 9), Err(libc::ENOMEM));
        assert_eq!(srq.done(ids[0]), 0);
        assert_eq!(srq.done(ids[2]), 4);
        assert_eq!((post(&mut srq, 5), post(&mut srq, 6)), (Ok(()), Ok(())));
        assert_eq!(srq.done(1 << 20), 0, "a number that was never given");
    }

    #[test]
    fn a_device_that_completes_a_receive_twice_does_no_harm() {
        let mut srq = state(4);
        for _ in 0..4 {
            assert_eq!(post(&mut srq, 7), Ok(()));
        }
        assert_eq!((srq.done(2), srq.done(2), srq.done(2)), (7, 0, 0));
        assert_eq!(post(&mut srq, 7), Ok(()));
        assert_eq!(post(&mut srq, 7), Err(libc::ENOMEM));
    }

    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut srq = state(4);
        srq.producer = u32::MAX - 5;
        for wr_id in 0..40u64 {
            let index = srq.producer;
            assert_eq!(post(&mut srq, wr_id), Ok(()));
            assert_eq!(srq.producer, index.wrapping_add(1));
            let id = header(&srq, index).id;
            srq.publish(|| panic!("the device is awake"));
            let shown = srq.ring.memory.record(offset_of!(SrqRecord, producer));
            assert_eq!(shown.load(Ordering::Relaxed), srq.producer);
            assert_eq!(srq.done(id), wr_id);
        }
    }

    #[test]
    fn without_memory_no_queue_is_made_and_none_is_changed() {
        let failures = heap::tests::with_little_memory(|| SrqState::new(sized(8, 1)?));
        assert_eq!(failures, 2);
        let mut state = state(8);
        let mut larger = Some(ring(64));
        let failures = heap::tests::with_little_memory(|| {
            state.prepare_to_move(larger.as_ref().ok_or(libc::EIO)?)
        });
        assert_eq!(failures, 2);
        assert_eq!((state.free.len(), state.receives.len()), (8, 8));
        // What was made room for is enough.
        assert_eq!(
            heap::tests::with_little_memory(|| {
                larger
                    .take()
                    .map(|larger| drop(state.move_to(larger)))
                    .ok_or(libc::EIO)
            }),
            0
        );
        assert_eq!(state.free.len(), 64);
    }

    #[test]
    fn numbers_stay_different_however_the_ring_changes() {
        let mut queue = state(8);
        let mut held: Vec<u32> = (0..3).filter_map(|_| queue.free.pop()).collect();
        for entries in [4, 16, 4, 64, 32] {
            let ring = ring(entries);
            queue.prepare_to_move(&ring).unwrap();
            drop(queue.move_to(ring));
            assert_eq!(queue.outstanding(), held.len());
            // Take all there are, give some back.
            while let Some(number) = queue.free.pop() {
                assert!(!held.contains(&number));
                assert!((number as usize) < queue.receives.len());
                held.push(number);
            }
            assert_eq!(held.len(), entries as usize);
            queue.free.extend(held.drain(1..entries as usize - 2));
            assert_eq!(queue.outstanding(), 3);
        }
    }

    #[test]
    fn sizes_are_met_or_refused() {
        for (wr, sge) in [(1, 0), (5, 1), (100, 3), (1 << 15, 16)] {
            let ring = sized(wr, sge).unwrap();
            assert!(ring.entries() >= wr && ring.receives.max_sge >= sge);
        }
        for (wr, sge) in [(0, 1), ((1 << 15) + 1, 1), (u32::MAX, 1), (1, 17)] {
            assert_eq!(sized(wr, sge).err(), Some(libc::EINVAL));
        }
    }
}
