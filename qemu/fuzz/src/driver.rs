// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Inputs by seed, made of those that are known: for where nothing looks at what code they reach.

use crate::Target;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::time::{Duration, Instant};

/// The longest input.
const MOST: usize = 1024;

/// Random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

/// The input of a seed: one of the corpus, or of nothing, changed a little or much.
pub fn input(seed: u64, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes = match corpus {
        [] => Vec::new(),
        _ => corpus[random.below(corpus.len())].clone(),
    };
    for _ in 0..1 << random.below(6) {
        let at = random.below(bytes.len() + 1);
        match random.below(8) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 if at < bytes.len() => bytes[at] = random.next() as u8,
            3 if at < bytes.len() => {
                let change = [1, 0xff, 16, 0xf0][random.below(4)];
                bytes[at] = bytes[at].wrapping_add(change);
            }
            4 => {
                let end = (at + 1 + random.below(8)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            5 if !corpus.is_empty() => {
                // A piece of another.
                let other = &corpus[random.below(corpus.len())];
                let from = random.below(other.len() + 1);
                let piece = &other[from..(from + random.below(64)).min(other.len())];
                bytes.splice(at..at, piece.iter().copied());
            }
            6 => {
                // A piece of its own, once more.
                let from = random.below(bytes.len() + 1);
                let piece = bytes[from..(from + random.below(32)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let count = 1 + random.below(24);
                let fresh: Vec<u8> = (0..count).map(|_| random.next() as u8).collect();
                bytes.splice(at..at, fresh);
            }
        }
        bytes.truncate(MOST);
    }
    bytes
}

/// Runs a target; what it says when it panics.
pub fn run(target: Target, input: &[u8]) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| target(input))).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        text.unwrap_or_default()
    })
}

/// A seed whose input fails, and what it says.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which.
    pub seed: u64,
    /// The panic.
    pub failure: String,
}

/// Runs a target on the inputs of seed after seed from `first` on until `end`, and of one at least; gives how many.
pub fn try_seeds(
    target: Target,
    corpus: &[Vec<u8>],
    first: u64,
    end: Instant,
) -> Result<u64, Finding> {
    let mut done = 0;
    loop {
        let seed = first.wrapping_add(done);
        run(target, &input(seed, corpus)).map_err(|failure| Finding { seed, failure })?;
        done += 1;
        if Instant::now() >= end {
            return Ok(done);
        }
    }
}

/// A short input that fails as well, as far as it is found within a minute: a target may fail by what it waits for.
pub fn shrink(target: Target, input: &[u8]) -> Vec<u8> {
    let end = Instant::now() + Duration::from_secs(60);
    let mut best = input.to_vec();
    let mut piece = best.len().div_ceil(2).max(1);
    loop {
        let mut at = 0;
        while at < best.len() {
            if Instant::now() > end {
                return best;
            }
            let mut shorter = best.clone();
            shorter.drain(at..(at + piece).min(best.len()));
            if run(target, &shorter).is_err() {
                best = shorter;
            } else {
                at += piece;
            }
        }
        if piece == 1 {
            return best;
        }
        piece = piece.div_ceil(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_differ_by_seed_and_are_the_same_for_one() {
        let corpus = [b"some bytes".to_vec(), b"and others".to_vec()];
        let all: std::collections::HashSet<Vec<u8>> =
            (0..1000).map(|seed| input(seed, &corpus)).collect();
        assert!(all.len() > 900, "{}", all.len());
        assert_eq!(input(7, &corpus), input(7, &corpus));
        assert!(all.iter().all(|input| input.len() <= MOST));
    }

    #[test]
    fn the_seed_of_a_finding_repeats_it() {
        let target: Target = |bytes| assert!(bytes.len() < 40, "a long one");
        let corpus = [b"some bytes".to_vec(), b"and others".to_vec()];
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let later = Instant::now() + Duration::from_secs(60);
        let found = try_seeds(target, &corpus, 1 << 40, later).expect_err("some are longer");
        assert!(found.seed > 1 << 40 && found.failure == "a long one");
        // With no time left it is that one alone.
        let again = try_seeds(target, &corpus, found.seed, Instant::now());
        assert_eq!(again, Err(found));
        std::panic::set_hook(hook);
        assert_eq!(try_seeds(|_| (), &corpus, 7, Instant::now()), Ok(1));
    }

    #[test]
    fn what_does_not_matter_goes() {
        let target: Target = |bytes| assert!(!bytes.contains(&7), "a seven");
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        assert_eq!(shrink(target, &[1, 2, 3, 7, 4, 5]), [7]);
        assert_eq!(run(target, &[7]), Err("a seven".into()));
        std::panic::set_hook(hook);
        assert_eq!(run(target, &[8]), Ok(()));
    }
}
