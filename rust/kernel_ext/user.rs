// SPDX-License-Identifier: GPL-2.0

//! Who the current process works for (for `rust/kernel/cred.rs`).

use crate::bindings;

/// Who answers for the current process, as a number: its user, or, within user namespaces, who made
/// the outermost one. Making namespaces gives nobody a second account. Those that root made are for
/// others, and each answers for itself; so does a subordinate identifier that root gave to a user, in
/// a namespace that was made for him by a helper of root's or by a program that is set-uid to it.
pub fn accountable() -> u64 {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::current_accountable_user() }
}

/// Stands for the kernel itself where [`accountable`] stands for a user; no user has this number.
pub const KERNEL: u64 = u64::MAX;

/// Who answers for the current task: [`accountable`], or [`KERNEL`] for a thread of the kernel.
pub fn accountable_or_kernel() -> u64 {
    // SAFETY: The function only looks at a flag of the current task.
    if unsafe { bindings::current_is_kthread() } {
        KERNEL
    } else {
        accountable()
    }
}

/// Whether the current process may use resources beyond what others may.
pub fn may_exceed_limits() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable_sys_resource() }
}

/// The same, where nothing is asked for yet: it leaves no traces.
pub fn may_exceed_limits_noaudit() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable_sys_resource_noaudit() }
}

/// Whether the current process may set up what all users of a network device share: not who is root in a
/// user namespace only.
pub fn may_administer_network() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable_net_admin() }
}

/// The same, where nothing is asked for that needs it: it leaves no traces.
pub fn may_administer_network_noaudit() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable_net_admin_noaudit() }
}

/// Whether the current task was killed: what it does for itself is not worth going on with.
pub fn is_dying() -> bool {
    // SAFETY: The function only looks at the signals of the current task.
    unsafe { bindings::current_is_dying() }
}
