// SPDX-License-Identifier: GPL-2.0

//! Memory control groups (for `rust/kernel/memcontrol.rs`).

use crate::bindings;

/// The memory control group of a process, to charge to it what other tasks allocate for it.
///
/// # Invariants
///
/// The pointer is null, where there are no groups, or a `struct mem_cgroup` of which this value owns
/// a count.
pub struct MemoryGroup(*mut bindings::mem_cgroup);

// SAFETY: A group belongs to no task; its count is atomic.
unsafe impl Send for MemoryGroup {}
// SAFETY: A count of a group only keeps it; charging it is atomic.
unsafe impl Sync for MemoryGroup {}

impl MemoryGroup {
    /// The group of the current process.
    pub fn of_current() -> Self {
        // INVARIANT: The helper takes a count for us.
        // SAFETY: The current task keeps its memory map, if it has one; it need not.
        Self(unsafe { bindings::get_mem_cgroup_from_mm((*bindings::get_current()).mm) })
    }

    /// Charges what `f` allocates with `__GFP_ACCOUNT` to the group. Process context.
    pub fn charge<R>(&self, f: impl FnOnce() -> R) -> R {
        // SAFETY: The group is valid by the type invariant, for longer than this call.
        let before = unsafe { bindings::set_active_memcg(self.0) };
        let result = f();
        // SAFETY: What was active before was set by a caller of ours, who keeps it until it is set
        // back.
        unsafe { bindings::set_active_memcg(before) };
        result
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the value owns a count, which is given back here and
        // nowhere else.
        unsafe { bindings::mem_cgroup_put(self.0) }
    }
}
