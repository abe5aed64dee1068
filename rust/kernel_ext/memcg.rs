// SPDX-License-Identifier: GPL-2.0

//! Memory control groups (for `rust/kernel/memcontrol.rs`).

use crate::bindings;
use kernel::prelude::*;

/// The memory control group of a process, to charge to it what other tasks allocate for it.
///
/// # Invariants
///
/// The pointer is null, where there are no groups, or a `struct mem_cgroup` of which this value owns
/// a count.
pub struct MemoryGroup(*mut c_void);

// SAFETY: A group belongs to no task; its count is atomic.
unsafe impl Send for MemoryGroup {}
// SAFETY: A count of a group only keeps it; charging it is atomic.
unsafe impl Sync for MemoryGroup {}

impl MemoryGroup {
    /// The group of the current process.
    pub fn of_current() -> Self {
        // INVARIANT: The helper takes a count for us.
        // SAFETY: The function may be called by any task, also by one without a memory map.
        Self(unsafe { bindings::memcg_get_current() })
    }

    /// Charges what `f` allocates with `__GFP_ACCOUNT` to the group. Process context.
    pub fn charge<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: The group is valid by the type invariant, for longer than this call.
        let before = unsafe { bindings::memcg_enter(self.0) };
        let result = f();
        // SAFETY: What was active before was set by a caller of ours, who keeps it until it is set
        // back.
        unsafe { bindings::memcg_enter(before) };
        result
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the value owns a count, which is given back here and
        // nowhere else.
        unsafe { bindings::memcg_put(self.0) }
    }
}
