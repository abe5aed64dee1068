// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Memory of the device's own, in its doorbell BAR behind the doorbell pages.
//!
//! The host reaches it by loads and stores, work requests and peers through regions registered
//! with `REGION_DEVICE_MEMORY`.

use crate::att::AttError;
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

/// Its bytes.
pub const DEVICE_MEMORY_SIZE: usize = 1 << 20;

/// The memory: zeroed when made.
pub struct DeviceMemory {
    /// Written through a shared borrow, as host memory is. No borrow outlives a method.
    bytes: RefCell<Box<[u8]>>,
}

impl Default for DeviceMemory {
    fn default() -> Self {
        Self {
            bytes: RefCell::new(vec![0; DEVICE_MEMORY_SIZE].into_boxed_slice()),
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").finish_non_exhaustive()
    }
}

/// The range as indices, when it is all inside.
fn range(offset: u64, length: usize) -> Result<Range<usize>, AttError> {
    let start = usize::try_from(offset).map_err(|_| AttError::OutOfRange)?;
    match start.checked_add(length) {
        Some(end) if end <= DEVICE_MEMORY_SIZE => Ok(start..end),
        _ => Err(AttError::OutOfRange),
    }
}

impl DeviceMemory {
    /// Copies from the memory. Nothing is copied when the range is not all inside.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), AttError> {
        let range = range(offset, bytes.len())?;
        bytes.copy_from_slice(&self.bytes.borrow()[range]);
        Ok(())
    }

    /// Copies to the memory. Nothing is copied when the range is not all inside.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AttError> {
        let range = range(offset, bytes.len())?;
        self.bytes.borrow_mut()[range].copy_from_slice(bytes);
        Ok(())
    }

    /// Changes eight aligned bytes; returns what they were.
    pub fn update(&self, offset: u64, change: impl FnOnce(u64) -> u64) -> Result<u64, AttError> {
        if offset % 8 != 0 {
            return Err(AttError::OutOfRange);
        }
        let mut word = [0; 8];
        self.read(offset, &mut word)?;
        let old = u64::from_le_bytes(word);
        self.write(offset, &change(old).to_le_bytes())?;
        Ok(old)
    }

    /// A load of the host, of 1 to 8 bytes; zero when it is not all inside.
    pub(crate) fn load(&self, offset: u64, size: usize) -> u64 {
        let mut word = [0; 8];
        // What cannot be read stays zero.
        if let Some(bytes) = word.get_mut(..size) {
            let _ = self.read(offset, bytes);
        }
        u64::from_le_bytes(word)
    }

    /// A store of the host, of 1 to 8 bytes; false when it is not all inside.
    pub(crate) fn store(&self, offset: u64, size: usize, value: u64) -> bool {
        value
            .to_le_bytes()
            .get(..size)
            .is_some_and(|bytes| self.write(offset, bytes).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = DEVICE_MEMORY_SIZE as u64;

    #[test]
    fn loads_and_stores_of_every_size_stay_inside() {
        let memory = DeviceMemory::default();
        for size in 1..=8usize {
            let mask = u64::MAX >> (64 - 8 * size);
            for offset in [0, 3, 4093, SIZE - size as u64] {
                assert!(memory.store(offset, size, 0x8877_6655_4433_2211));
                assert_eq!(memory.load(offset, size), 0x8877_6655_4433_2211 & mask);
            }
            // Nothing is written, not even the part that is inside.
            let last = memory.load(SIZE - 1, 1);
            assert!(!memory.store(SIZE - size as u64 + 1, size, 0));
            assert_eq!(memory.load(SIZE - 1, 1), last);
            assert_eq!(memory.load(SIZE - size as u64 + 1, size), 0);
        }
        assert!(!memory.store(u64::MAX, 8, 1));
        assert!(!memory.store(0, 9, 1));
        assert_eq!(memory.load(u64::MAX - 3, 8), 0);
        assert_eq!(memory.load(0, 9), 0);
    }

    #[test]
    fn words_are_changed_at_aligned_places_only() {
        let memory = DeviceMemory::default();
        assert_eq!(memory.update(SIZE - 8, |old| old + 5), Ok(0));
        assert_eq!(memory.update(SIZE - 8, |old| old + 1), Ok(5));
        assert_eq!(memory.load(SIZE - 8, 8), 6);
        for offset in [4, SIZE - 4, SIZE, u64::MAX - 7] {
            assert_eq!(memory.update(offset, |_| 1), Err(AttError::OutOfRange));
        }
    }
}
