// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Instructions that do nothing, except for the plugin of `tools/count-plugin`, which counts what
//! is executed between them.

use std::arch::asm;

/// Counting starts.
#[inline(never)]
pub fn begin() {
    // SAFETY: a long `nop`.
    unsafe { asm!(".byte 0x0f, 0x1f, 0x80, 0x46, 0x52, 0x42, 0x31") };
}

/// Counting ends.
#[inline(never)]
pub fn end() {
    // SAFETY: a long `nop`.
    unsafe { asm!(".byte 0x0f, 0x1f, 0x80, 0x46, 0x52, 0x42, 0x32") };
}
