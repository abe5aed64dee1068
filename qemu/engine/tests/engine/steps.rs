// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Counts instructions, by having the processor trap after each of them.
//!
//! Counters of the processor are not to be had in most virtual machines, and a clock says little on a
//! machine that does other work. Steps are the same every time.

use std::arch::asm;
use std::cell::Cell;
use std::ffi::c_int;
use std::{io, mem, ptr};

thread_local! {
    /// Steps of this thread. A number without a destructor: the handler may look at it at any time.
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

extern "C" fn step(_signal: c_int) {
    STEPS.set(STEPS.get() + 1);
}

/// The instructions that this thread executes for `part`.
pub fn count(part: impl FnOnce()) -> u64 {
    // SAFETY: an empty action is all zeros. The handler does nothing but count, and nothing else in
    // these tests uses the signal.
    let result = unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = step as extern "C" fn(c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGTRAP, &action, ptr::null_mut())
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    let before = STEPS.get();
    // SAFETY: the trap flag changes nothing but that each instruction ends in the handler. The flags
    // are restored from the stack, where there is room without `nostack`.
    unsafe { asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq") };
    part();
    // SAFETY: as above; this takes the flag back.
    unsafe { asm!("pushfq", "and qword ptr [rsp], ~0x100", "popfq") };
    STEPS.get() - before
}
