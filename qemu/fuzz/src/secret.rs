// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Bytes that nobody can know: they depend on all of the input.

/// What secret memory is full of, again and again.
#[derive(Clone, Copy, Debug)]
pub struct Secret([u8; PERIOD]);

const PERIOD: usize = 16;
/// So many bytes of it in a row are no accident.
const RUN: usize = 8;

impl Secret {
    /// That of an input.
    pub fn of(input: &[u8]) -> Self {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        let mut bytes = [0; PERIOD];
        for &byte in input {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        for byte in &mut bytes {
            hash = (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            *byte = (hash >> 56) as u8;
        }
        Self(bytes)
    }

    /// So many bytes of it.
    pub fn fill(&self, length: usize) -> Vec<u8> {
        self.0.iter().copied().cycle().take(length).collect()
    }

    /// Whether these bytes are as [`Secret::fill`] made them.
    pub fn is_whole(&self, bytes: &[u8]) -> bool {
        bytes
            .chunks(PERIOD)
            .all(|piece| *piece == self.0[..piece.len()])
    }

    /// Whether some of it is in these bytes.
    pub fn is_in(&self, bytes: &[u8]) -> bool {
        let doubled = [self.0, self.0].concat();
        // Most bytes are none of it: nearly all windows are passed by with one look.
        let mut first = [false; 256];
        for byte in self.0 {
            first[usize::from(byte)] = true;
        }
        bytes.windows(RUN).any(|window| {
            first[usize::from(window[0])] && (0..PERIOD).any(|at| doubled[at..at + RUN] == *window)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_found_and_nothing_else() {
        let secret = Secret::of(b"any");
        let memory = secret.fill(100);
        assert!(secret.is_whole(&memory));
        for start in 0..40 {
            let mut frame = vec![0; 30];
            frame.extend(&memory[start..start + RUN]);
            assert!(secret.is_in(&frame));
            frame.pop();
            assert!(!secret.is_in(&frame));
        }
        let mut changed = memory.clone();
        changed[63] ^= 1;
        assert!(!secret.is_whole(&changed));
        assert!(!Secret::of(b"other").is_in(&memory));
    }
}
