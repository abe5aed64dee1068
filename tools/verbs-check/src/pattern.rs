// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bytes that tell where they belong: every message has a seed, every byte of it a position.

/// Eight bytes of the pattern.
fn word(seed: u64, index: u64) -> [u8; 8] {
    let mut x = seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(index.wrapping_mul(0xd1b5_4a32_d192_ed03));
    x ^= x >> 29;
    x.wrapping_mul(0xbf58_476d_1ce4_e5b9).to_le_bytes()
}

/// The bytes of message `seed` from position `start` on.
pub fn fill(bytes: &mut [u8], seed: u64, start: u64) {
    let mut at = 0;
    while at < bytes.len() {
        let position = start + at as u64;
        let word = word(seed, position / 8);
        let skip = (position % 8) as usize;
        let count = (8 - skip).min(bytes.len() - at);
        bytes[at..at + count].copy_from_slice(&word[skip..skip + count]);
        at += count;
    }
}

/// The first of `bytes` that is not as [`fill`] would have it.
pub fn mismatch(bytes: &[u8], seed: u64, start: u64) -> Option<usize> {
    let mut expected = [0u8; 4096];
    for (number, chunk) in bytes.chunks(expected.len()).enumerate() {
        let offset = number * expected.len();
        let expected = &mut expected[..chunk.len()];
        fill(expected, seed, start + offset as u64);
        if chunk != expected {
            let at = chunk.iter().zip(expected.iter()).position(|(a, b)| a != b);
            return Some(offset + at.unwrap_or(0));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_the_same_as_that_part_of_the_whole() {
        let mut whole = vec![0; 10_000];
        fill(&mut whole, 7, 0);
        for (start, length) in [(0, 1), (1, 7), (3, 4100), (4095, 5000), (9_999, 1)] {
            let mut piece = vec![0; length];
            fill(&mut piece, 7, start as u64);
            assert_eq!(piece, whole[start..start + length]);
            assert_eq!(mismatch(&piece, 7, start as u64), None);
        }
    }

    #[test]
    fn another_seed_another_position_or_a_changed_byte_is_seen() {
        let mut bytes = vec![0; 9000];
        fill(&mut bytes, 1, 0);
        assert!(mismatch(&bytes, 2, 0).is_some());
        assert!(mismatch(&bytes, 1, 8).is_some());
        for at in [0, 5, 4096, 8999] {
            bytes[at] ^= 0x10;
            assert_eq!(mismatch(&bytes, 1, 0), Some(at));
            bytes[at] ^= 0x10;
        }
    }
}
