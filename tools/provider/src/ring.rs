// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Rings: the memory that a completion queue, a queue pair or a shared receive queue has in common
//! with the device.
//!
//! A queue has one buffer: its rings one after the other, and behind them, on a block of its own, its
//! doorbell record. Getting it, showing entries to the device and giving it back are the same for
//! all three kinds of queue, and written here.

use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr::{self, NonNull};
use core::sync::atomic::{fence, AtomicU32, Ordering};

use ferrite_abi::{
    QueuePairRecord, ReceiveHeader, Sge, SrqRecord, UverbsContextResponse, BLOCK_SIZE,
    RQ_MIN_LOG_STRIDE,
};

use crate::memory::Buffer;
use crate::protection::Pd;
use crate::sys::{ibv_pd, ibv_sge};

/// Where a ring lies in its queue's buffer: entries of one size, as many as a power of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    /// Bytes from the start of the buffer.
    pub(crate) offset: usize,
    /// A power of two.
    pub(crate) entries: u32,
    /// Bytes from one entry to the next, a power of two.
    pub(crate) stride: u32,
}

impl Ring {
    /// A ring of at least `wanted` entries, where a device has up to `1 << max_log_entries`.
    pub(crate) fn new(
        offset: usize,
        wanted: usize,
        stride: usize,
        max_log_entries: u8,
    ) -> Result<Self, c_int> {
        let entries = wanted
            .checked_next_power_of_two()
            .filter(|&entries| entries <= 1 << max_log_entries)
            .ok_or(libc::EINVAL)?;
        Ok(Self {
            offset,
            entries: entries as u32,
            stride: stride as u32,
        })
    }

    /// The first byte behind it.
    pub(crate) fn end(&self) -> usize {
        self.offset + self.entries as usize * self.stride as usize
    }

    /// Which of the entries has this free-running index.
    #[inline]
    pub(crate) fn slot(&self, index: u32) -> usize {
        (index & (self.entries - 1)) as usize
    }

    /// `entries`, as the driver is told.
    pub(crate) fn log_entries(&self) -> u8 {
        self.entries.trailing_zeros() as u8
    }

    /// `stride`, as the driver is told.
    pub(crate) fn log_stride(&self) -> u8 {
        self.stride.trailing_zeros() as u8
    }
}

/// A ring of receives: of a receive queue, or of a shared one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceiveRing {
    pub(crate) ring: Ring,
    /// Scatter/gather entries that a receive has room for.
    pub(crate) max_sge: u32,
}

impl ReceiveRing {
    /// A ring of at least `max_wr` receives of at least `max_sge` scatter/gather entries each.
    pub(crate) fn new(
        offset: usize,
        max_wr: u32,
        max_sge: u32,
        limits: &UverbsContextResponse,
    ) -> Result<Self, c_int> {
        if max_sge > limits.max_sge {
            return Err(libc::EINVAL);
        }
        let stride = (size_of::<ReceiveHeader>() + max_sge as usize * size_of::<Sge>())
            .next_power_of_two()
            .max(1 << RQ_MIN_LOG_STRIDE);
        let room = (stride - size_of::<ReceiveHeader>()) / size_of::<Sge>();
        Ok(Self {
            ring: Ring::new(
                offset,
                max_wr as usize,
                stride,
                limits.rq_max_log_entries.min(24),
            )?,
            max_sge: (room as u32).min(limits.max_sge),
        })
    }

    /// Writes the receive with free-running index `index`, whose completion in a shared receive
    /// queue returns `id`.
    ///
    /// # Safety
    ///
    /// `memory` was made for this ring; the device has taken the entry that was there before; there
    /// are no more than `max_sge` scatter/gather entries.
    #[inline]
    pub(crate) unsafe fn write(&self, memory: &QueueBuffer, index: u32, id: u32, sges: &[ibv_sge]) {
        debug_assert!(sges.len() <= self.max_sge as usize);
        let header = ReceiveHeader {
            sge_count: sges.len() as u32,
            id,
            reserved: [0; 2],
        };
        let entry = memory.at(self.ring.offset + self.ring.slot(index) * self.ring.stride as usize);
        // SAFETY: by the caller the entry is in the ring that `memory` was made for, and this side's
        // to write. It is `stride` bytes long, of which header and `max_sge` scatter/gather entries
        // take no more (`new`).
        unsafe {
            entry.cast::<ReceiveHeader>().write(header);
            let place = entry.add(size_of::<ReceiveHeader>()).cast::<ibv_sge>();
            match sges {
                // One is the most usual count by far.
                [sge] => place.write(*sge),
                sges => ptr::copy_nonoverlapping(sges.as_ptr(), place, sges.len()),
            }
        }
    }
}

/// Writes bytes one after the other.
pub(crate) struct Cursor(pub(crate) *mut u8);

impl Cursor {
    /// # Safety
    ///
    /// There is room for `bytes` at the cursor.
    #[inline]
    pub(crate) unsafe fn put(&mut self, bytes: &[u8]) {
        // SAFETY: the room is the caller's promise; a slice may be read for its length.
        unsafe { self.put_from(bytes.as_ptr(), bytes.len()) };
    }

    /// # Safety
    ///
    /// There is room for `length` bytes at the cursor, and they may be read at `from`, which is not
    /// in that room.
    #[inline]
    pub(crate) unsafe fn put_from(&mut self, from: *const u8, length: usize) {
        // SAFETY: both ranges and that they are apart are the caller's promise.
        unsafe {
            ptr::copy_nonoverlapping(from, self.0, length);
            self.0 = self.0.add(length);
        }
    }
}

/// The two words of a record by which a queue shows its entries: where they are in the record.
pub(crate) struct Words {
    /// The producer index, which this side writes.
    producer: usize,
    /// Not zero while the device sleeps, and has to be rung.
    wake: usize,
}

/// Of a send queue.
pub(crate) const SEND: Words = Words {
    producer: offset_of!(QueuePairRecord, send_producer),
    wake: offset_of!(QueuePairRecord, send_wake),
};

/// Of a receive queue.
pub(crate) const RECEIVE: Words = Words {
    producer: offset_of!(QueuePairRecord, receive_producer),
    wake: offset_of!(QueuePairRecord, receive_wake),
};

/// Of a shared receive queue.
pub(crate) const SHARED_RECEIVE: Words = Words {
    producer: offset_of!(SrqRecord, producer),
    wake: offset_of!(SrqRecord, wake),
};

/// The memory that a queue shares with the device: its rings, and behind them its record.
pub(crate) struct QueueBuffer {
    buffer: Buffer,
    record_offset: usize,
    /// At `record_offset` of the buffer.
    record: NonNull<[AtomicU32; RECORD_WORDS]>,
}

/// Words that there is room for in every record, those of the longest: so a word that is named by a
/// constant takes no check.
const RECORD_WORDS: usize = size_of::<QueuePairRecord>() / 4;

// SAFETY: it is as good as `buffer`, which `record` is in.
unsafe impl Send for QueueBuffer {}
// SAFETY: what `record` gives are atomics.
unsafe impl Sync for QueueBuffer {}

impl QueueBuffer {
    /// Memory for rings of so many bytes and a `Record`, from where the domain gets it.
    ///
    /// # Safety
    ///
    /// As for [`Pd::buffer`].
    pub(crate) unsafe fn new<Record>(pd: *mut ibv_pd, rings: usize) -> Result<Self, c_int> {
        const { assert!(size_of::<Record>() <= RECORD_WORDS * 4) };
        let record_offset = rings.next_multiple_of(BLOCK_SIZE);
        // SAFETY: what is asked for here is asked for in the same words by `Pd::buffer`.
        let buffer = unsafe { Pd::buffer(pd, record_offset + RECORD_WORDS * 4) }?;
        // SAFETY: the buffer is longer than `record_offset`.
        let record = unsafe { NonNull::new_unchecked(buffer.base().add(record_offset)) };
        Ok(Self {
            buffer,
            record_offset,
            record: record.cast(),
        })
    }

    /// As [`QueueBuffer::new`], of no domain.
    pub(crate) fn of_no_domain<Record>(rings: usize) -> Result<Self, c_int> {
        // SAFETY: no domain is one of the two things that `Pd::buffer` takes.
        unsafe { Self::new::<Record>(ptr::null_mut(), rings) }
    }

    /// The byte at `offset` of the rings.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.record_offset);
        self.buffer.base().wrapping_add(offset)
    }

    /// A word of the record, which the device reads or writes at any time.
    #[inline]
    pub(crate) fn record(&self, field: usize) -> &AtomicU32 {
        // SAFETY: the buffer was made so long that all of them are in it, and is mapped as long as
        // `self`; a page and blocks before it leave it aligned. This process accesses them as atomics
        // throughout.
        let words = unsafe { self.record.as_ref() };
        &words[field / 4]
    }

    /// Sets the producer index of a ring that the device does not look at.
    pub(crate) fn begin_at(&self, words: &Words, producer: u32) {
        self.record(words.producer)
            .store(producer, Ordering::Release);
    }

    /// The device will sleep until it is rung for the first time.
    pub(crate) fn begin_asleep(&self, words: &Words) {
        self.record(words.wake).store(1, Ordering::Relaxed);
    }

    /// Shows the device all entries before `producer`; if it sleeps, has `ring` wake it.
    #[inline]
    pub(crate) fn publish(&self, words: &Words, producer: u32, ring: impl FnOnce()) {
        // Release: the entries are written before the index.
        self.record(words.producer)
            .store(producer, Ordering::Release);
        // The index is written before the wake word is read; the device does it the other way
        // round, so that one of the two sees the other's write.
        fence(Ordering::SeqCst);
        if self.record(words.wake).load(Ordering::Relaxed) != 0 {
            ring();
        }
    }

    /// Where the driver finds it.
    pub(crate) fn address(&self) -> u64 {
        self.buffer.address()
    }

    /// How long it is, as the driver is told.
    pub(crate) fn length(&self) -> u64 {
        self.buffer.length() as u64
    }

    /// Where its record is, as the driver is told.
    pub(crate) fn record_offset(&self) -> u32 {
        self.record_offset as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_abi::Plain;

    fn limits() -> UverbsContextResponse {
        UverbsContextResponse {
            max_sge: 16,
            rq_max_log_entries: 15,
            ..UverbsContextResponse::zeroed()
        }
    }

    #[test]
    fn receives_have_room_for_what_was_asked() {
        for (wr, sge) in [(1, 0), (5, 1), (100, 3), (1 << 15, 16)] {
            let receives = ReceiveRing::new(64, wr, sge, &limits()).unwrap();
            assert!(receives.ring.entries >= wr && receives.max_sge >= sge);
            assert!(16 + 16 * receives.max_sge <= receives.ring.stride);
            let bytes = receives.ring.entries * receives.ring.stride;
            assert_eq!(receives.ring.end(), 64 + bytes as usize);
        }
        for (wr, sge) in [((1 << 15) + 1, 1), (u32::MAX, 1), (1, 17)] {
            let refused = ReceiveRing::new(0, wr, sge, &limits()).err();
            assert_eq!(refused, Some(libc::EINVAL));
        }
    }

    #[test]
    fn the_record_has_a_block_of_its_own() {
        for rings in [1, 64, 65, 4096] {
            let memory = QueueBuffer::of_no_domain::<SrqRecord>(rings).unwrap();
            let record = memory.record_offset();
            assert_eq!(record % 64, 0);
            assert!((rings..rings + 64).contains(&(record as usize)));
            assert!(u64::from(record) + size_of::<SrqRecord>() as u64 <= memory.length());
        }
    }

    #[test]
    fn only_a_device_that_sleeps_is_rung() {
        let memory = QueueBuffer::of_no_domain::<SrqRecord>(64).unwrap();
        let rung = |producer| {
            let mut rung = false;
            memory.publish(&SHARED_RECEIVE, producer, || rung = true);
            let shown = memory.record(SHARED_RECEIVE.producer);
            assert_eq!(shown.load(Ordering::Relaxed), producer);
            rung
        };
        assert!(!rung(1));
        memory.begin_asleep(&SHARED_RECEIVE);
        assert!(rung(u32::MAX));
        memory.begin_at(&SHARED_RECEIVE, 7);
        assert!(rung(8));
    }
}
