// SPDX-License-Identifier: GPL-2.0

//! Random numbers (for `rust/kernel/random.rs`).

use crate::bindings;

/// A random number that nobody can predict.
pub fn get_u32() -> u32 {
    let mut bytes = [0u8; size_of::<u32>()];
    // SAFETY: The pointer and the length are those of `bytes`, which nobody else has.
    unsafe { bindings::get_random_bytes(bytes.as_mut_ptr().cast(), bytes.len()) };
    u32::from_ne_bytes(bytes)
}
