// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What attackers share: seeds, random numbers that are nasty, and frames that are forged.

use ferrite_abi::{Buffer, Layout};
use ferrite_engine::roce::icrc;
use ferrite_engine::testing::{MEMORY_BASE, MEMORY_SIZE};
use std::time::SystemTime;

/// The seeds to try: `known` ones, which every run repeats, and so many fresh ones. Each is printed
/// when its turn comes, so that a failure can be repeated.
///
/// `FERRITE_SEED=n` is that one alone, `FERRITE_SEEDS=n` so many fresh ones.
pub fn seeds(known: &[u64], fresh: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        Some(text.parse::<u64>().expect("a number"))
    };
    let list: Vec<u64> = match (number("FERRITE_SEED"), number("FERRITE_SEEDS")) {
        (Some(seed), _) => vec![seed],
        (None, count) => {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let base = now.map_or(0, |since| since.as_micros() as u64);
            let fresh = (0..count.unwrap_or(fresh)).map(|n| base.wrapping_add(n));
            known.iter().copied().chain(fresh).collect()
        }
    };
    list.into_iter()
        .inspect(|seed| println!("FERRITE_SEED={seed}"))
}

/// Whether the seeds are enough to see everything happen: all the known ones.
pub fn all_seeds() -> bool {
    std::env::var_os("FERRITE_SEED").is_none()
}

/// Random numbers by seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        // Xorshift; the seed is never zero.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    /// A number at an edge, or any.
    pub fn nasty(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => self.below(64),
            3 => 1 << self.below(64),
            4 => (1u64 << self.below(64)).wrapping_sub(1),
            5 => MEMORY_BASE + self.below(MEMORY_SIZE as u64 + 4096),
            _ => self.next(),
        }
    }

    /// A small number mostly.
    pub fn number(&mut self) -> u32 {
        if self.one_in(12) {
            self.nasty() as u32
        } else {
            self.below(9) as u32
        }
    }

    /// A logarithm that is possible mostly.
    pub fn log(&mut self, likely: u8) -> u8 {
        if self.one_in(8) {
            self.nasty() as u8
        } else {
            likely
        }
    }

    pub fn address(&mut self) -> u64 {
        if self.one_in(12) {
            self.nasty()
        } else {
            MEMORY_BASE + self.below(MEMORY_SIZE as u64 / 4096) * 4096
        }
    }

    pub fn buffer(&mut self) -> Buffer {
        let mut buffer = Buffer::contiguous(self.address(), 1 << self.below(17));
        if self.one_in(3) {
            buffer.order = self.below(4) as u8;
        }
        if self.one_in(16) {
            buffer.length = self.nasty();
        }
        if self.one_in(16) {
            buffer.fbo = self.nasty() as u32;
        }
        if self.one_in(16) {
            buffer.page_shift = self.nasty() as u8;
        }
        buffer
    }
}

/// Zeroes the reserved fields of a structure, not those of structures in it.
pub fn clear_reserved<L: Layout>(value: &mut L) {
    let ends = L::FIELDS.iter().skip(1).map(|field| field.offset);
    let ends = ends.chain([size_of::<L>()]);
    for (field, end) in L::FIELDS.iter().zip(ends) {
        if field.name.starts_with("reserved") {
            value.as_bytes_mut()[field.offset..end].fill(0);
        }
    }
}

/// Changes a frame and makes its checksums right again.
pub fn forge(random: &mut Random, frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    const BTH: usize = 14 + 20 + 8;
    if frame.len() < BTH + 16 {
        // No packet of a queue pair's.
        let at = random.below(frame.len() as u64) as usize;
        frame[at] = random.nasty() as u8;
        return frame;
    }
    if random.one_in(4) {
        frame.truncate(BTH + 16 + random.below(64) as usize);
    }
    if random.one_in(6) {
        frame.resize(frame.len() + random.below(5000) as usize, 0x5a);
    }
    for _ in 0..random.below(4) {
        match random.below(6) {
            0 => {
                // Of any service.
                let bits = random.pick(&[0u8, 0, 0x20, 0x60, 0xa0]);
                frame[BTH] = bits | random.below(32) as u8;
            }
            1 => frame[BTH + 1] = random.next() as u8 & 0xf0,
            // A queue pair near the old one.
            2 => {
                let near = random.below(16) as u8;
                frame[BTH + 7] = frame[BTH + 7].wrapping_sub(8).wrapping_add(near);
            }
            // Sequence numbers near the old one, or anywhere.
            3 => frame[BTH + 11] = frame[BTH + 11].wrapping_add(random.below(5) as u8),
            4 => frame[BTH + 9 + random.below(3) as usize] = random.next() as u8,
            _ => {
                let at = BTH + random.below((frame.len() - BTH) as u64) as usize;
                frame[at] = random.nasty() as u8;
            }
        }
    }
    let total = frame.len();
    if total < BTH + 16 {
        return frame;
    }
    seal(&mut frame);
    frame
}

/// Writes length fields and checksums of an IPv4 frame anew; the last four bytes are the check.
pub fn seal(frame: &mut [u8]) {
    let total = frame.len();
    let ip = (total - 14) as u16;
    frame[16..18].copy_from_slice(&ip.to_be_bytes());
    frame[24..26].fill(0);
    let mut sum: u32 = frame[14..34]
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    frame[24..26].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    frame[38..40].copy_from_slice(&(ip - 20).to_be_bytes());
    let crc = icrc(&frame[14..total - 4]).unwrap_or(0);
    frame[total - 4..].copy_from_slice(&crc.to_le_bytes());
}
