// SPDX-License-Identifier: GPL-2.0

//! Who the current process works for (for `rust/kernel/cred.rs`).

use crate::bindings;
use core::ptr::NonNull;
use kernel::ffi::c_int;

/// Who answers for the current process, as a number: its user, or, within user namespaces, who made
/// the outermost one. Making namespaces gives nobody a second account. Those that root made are for
/// others, and each answers for itself; so does a subordinate identifier that root gave to a user, in
/// a namespace that was made for him by a helper of root's or by a program that is set-uid to it.
pub fn accountable() -> u64 {
    // SAFETY: The current task has credentials, which nobody but itself changes.
    let (mut namespace, user) = unsafe {
        let task = bindings::get_current();
        (bindings::current_user_ns(), (*(*task).cred).uid)
    };
    let mut outermost = None;
    // SAFETY: Credentials keep their namespace, and a namespace its parent; owner, parent and number do
    // not change.
    while let Some(parent) = NonNull::new(unsafe { (*namespace).parent }) {
        outermost = Some(namespace);
        namespace = parent.as_ptr();
    }
    let user = match outermost {
        // SAFETY: The credentials that the walk began with keep this namespace, as one that is a parent of their
        // own or that itself; its owner and number do not change.
        Some(outermost) => unsafe {
            if (*outermost).owner.val == ROOT {
                // By a number beyond those of users.
                return 1 << 32 | u64::from((*outermost).ns.inum);
            }
            (*outermost).owner
        },
        None => user,
    };
    // SAFETY: The namespace without a parent is the initial one, a static of the kernel.
    unsafe { bindings::from_kuid(namespace, user) }.into()
}

/// `GLOBAL_ROOT_UID`.
const ROOT: bindings::uid_t = 0;

/// Stands for the kernel itself where [`accountable`] stands for a user; no user has this number.
pub const KERNEL: u64 = u64::MAX;

/// Who answers for the current task: [`accountable`], or [`KERNEL`] for a thread of the kernel.
pub fn accountable_or_kernel() -> u64 {
    // SAFETY: The current task is there; the flag does not change.
    if unsafe { (*bindings::get_current()).flags } & bindings::PF_KTHREAD != 0 {
        KERNEL
    } else {
        accountable()
    }
}

/// Whether the current process may use resources beyond what others may.
pub fn may_exceed_limits() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable(bindings::CAP_SYS_RESOURCE as c_int) }
}

/// The same, where nothing is asked for yet: it leaves no traces.
pub fn may_exceed_limits_noaudit() -> bool {
    let namespace = &raw mut bindings::init_user_ns;
    // SAFETY: The function only looks at the credentials of the current task, and compares namespaces; the
    // initial one is a static of the kernel.
    unsafe { bindings::ns_capable_noaudit(namespace, bindings::CAP_SYS_RESOURCE as c_int) }
}

/// Whether the current process may set up what all users of a network device share: not who is root in a
/// user namespace only.
pub fn may_administer_network() -> bool {
    // SAFETY: The function only looks at the credentials of the current task.
    unsafe { bindings::capable(bindings::CAP_NET_ADMIN as c_int) }
}

/// The same, where nothing is asked for that needs it: it leaves no traces.
pub fn may_administer_network_noaudit() -> bool {
    let namespace = &raw mut bindings::init_user_ns;
    // SAFETY: The function only looks at the credentials of the current task, and compares namespaces; the
    // initial one is a static of the kernel.
    unsafe { bindings::ns_capable_noaudit(namespace, bindings::CAP_NET_ADMIN as c_int) }
}

/// Whether the current task was killed: what it does for itself is not worth going on with.
pub fn is_dying() -> bool {
    // SAFETY: The function only looks at the signals of the current task.
    unsafe { bindings::fatal_signal_pending(bindings::get_current()) != 0 }
}
