// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What programs may call beyond the verbs: `include/infiniband/ferritedv.h`.

use core::ffi::c_int;

use ferrite_abi::{
    FEATURE_LISTS, FEATURE_WINDOWS_ONLY, UVERBS_CQ_MOVE, UVERBS_CQ_MOVE_HANDLE,
    UVERBS_CQ_MOVE_VECTOR, UVERBS_CQ_QUERY, UVERBS_CQ_QUERY_HANDLE, UVERBS_CQ_QUERY_VECTOR,
    UVERBS_QP_LISTS, UVERBS_QP_REGISTER_DRAINS, UVERBS_QP_WINDOWS_ONLY, UVERBS_VECTOR_MODIFY,
    UVERBS_VECTOR_MODIFY_PRIORITY, UVERBS_VECTOR_MODIFY_VECTOR, UVERBS_VECTOR_QUERY,
    UVERBS_VECTOR_QUERY_PRIORITY, UVERBS_VECTOR_QUERY_VECTOR,
};

use crate::context::Context;
use crate::device;
use crate::fail;
use crate::ioctl::{self, Command};
use crate::qp;
use crate::sys::*;

/// Among the rights of a window or a list: it is gone when the first message that writes to it is
/// complete. No right of the verbs or of the kernel has this number, and none can: it is above those
/// that a device may ignore.
pub const FERRITEDV_ACCESS_ONE_TOUCH: u32 = 1 << 30;
/// Lists can be registered on the queue pair.
pub const FERRITEDV_QP_LISTS: u32 = 1 << 0;
/// A registration that fails drains the send queue.
pub const FERRITEDV_QP_REGISTER_DRAINS: u32 = 1 << 1;
/// The peer reaches memory through windows only.
pub const FERRITEDV_QP_WINDOWS_ONLY: u32 = 1 << 2;

/// Has the kernel carry out a command; an errno value, or 0.
///
/// # Safety
///
/// `context` is an open context of any provider, and what the attributes point to is valid.
unsafe fn execute<const N: usize>(context: *mut ibv_context, command: &mut Command<N>) -> c_int {
    // SAFETY: the context is open, and what the attributes point to is valid, by the caller.
    errno_of(unsafe { command.execute((*context).cmd_fd) })
}

/// What a program is told of a command.
fn errno_of(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        // What the kernel says to a method that it does not know.
        Err(libc::EPROTONOSUPPORT) => libc::EOPNOTSUPP,
        Err(errno) => errno,
    }
}

/// Whether a context is of this provider.
///
/// # Safety
///
/// `context` is an open context of any provider.
pub(crate) unsafe fn is_ours(context: *mut ibv_context) -> bool {
    // SAFETY: by the caller; an open context has a device.
    unsafe { device::is_ours((*context).device) }
}

/// What a queue pair is to be able to do beyond the verbs: `struct ferritedv_qp_init_attr`.
#[repr(C)]
pub struct QpInitAttr {
    /// Zero.
    pub comp_mask: u64,
    /// `FERRITEDV_QP_*`.
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// Makes a queue pair.
///
/// # Safety
///
/// `context` is an open context of any provider; the others are as for `ibv_create_qp_ex`, and a
/// `struct ferritedv_qp_init_attr`.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    more: *const QpInitAttr,
) -> *mut ibv_qp {
    // SAFETY: the context is open, by the caller; where it is ours, it is a `Context`. Attributes are as
    // the header demands.
    unsafe {
        if !is_ours(context) {
            return fail(libc::EOPNOTSUPP);
        }
        let features = Context::of(context).limits.features;
        match qp_flags(&*more, (*attr).qp_type, features) {
            Ok(flags) => qp::create_with(context, attr, flags),
            Err(errno) => fail(errno),
        }
    }
}

/// What the driver calls what a queue pair is to be able to do.
fn qp_flags(more: &QpInitAttr, qp_type: ibv_qp_type, features: u64) -> Result<u8, c_int> {
    // All that is registered through the send queues of programs is lists.
    let each = [
        (FERRITEDV_QP_LISTS, UVERBS_QP_LISTS, FEATURE_LISTS),
        (
            FERRITEDV_QP_REGISTER_DRAINS,
            UVERBS_QP_REGISTER_DRAINS,
            FEATURE_LISTS,
        ),
        (
            FERRITEDV_QP_WINDOWS_ONLY,
            UVERBS_QP_WINDOWS_ONLY,
            FEATURE_WINDOWS_ONLY,
        ),
    ];
    let known = each.iter().fold(0, |known, (flag, ..)| known | flag);
    if more.comp_mask != 0 || more.reserved != 0 || more.flags & !known != 0 {
        return Err(libc::EINVAL);
    }
    let mut flags = 0;
    for (_, flag, feature) in each.iter().filter(|(flag, ..)| more.flags & flag != 0) {
        if features & feature == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        flags |= flag;
    }
    let possible = match qp_type {
        IBV_QPT_RC | IBV_QPT_UC => true,
        // Its peer asks for nothing.
        IBV_QPT_XRC_SEND => flags & UVERBS_QP_WINDOWS_ONLY == 0,
        _ => flags == 0,
    };
    if !possible {
        return Err(libc::EINVAL);
    }
    Ok(flags)
}

/// Moves a completion queue to a completion vector, or to none.
///
/// # Safety
///
/// `cq` is a live completion queue of any provider.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_modify_cq_vector(cq: *mut ibv_cq, vector: u32) -> c_int {
    // SAFETY: by the caller; a live queue has an open context.
    unsafe {
        if !is_ours((*cq).context) {
            return libc::EOPNOTSUPP;
        }
        let mut command = Command::new(
            UVERBS_OBJECT_CQ,
            UVERBS_CQ_MOVE,
            [
                ioctl::handle(UVERBS_CQ_MOVE_HANDLE, (*cq).handle),
                ioctl::number(UVERBS_CQ_MOVE_VECTOR, size_of_val(&vector), vector.into()),
            ],
        );
        execute((*cq).context, &mut command)
    }
}

/// Tells the completion vector of a completion queue.
///
/// # Safety
///
/// `cq` is a live completion queue of any provider, and `vector` a place for a number.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_query_cq_vector(cq: *mut ibv_cq, vector: *mut u32) -> c_int {
    let mut found = 0u32;
    // SAFETY: by the caller; a live queue has an open context, and `found` outlives the command.
    unsafe {
        if !is_ours((*cq).context) {
            return libc::EOPNOTSUPP;
        }
        let mut command = Command::new(
            UVERBS_OBJECT_CQ,
            UVERBS_CQ_QUERY,
            [
                ioctl::handle(UVERBS_CQ_QUERY_HANDLE, (*cq).handle),
                ioctl::answer(UVERBS_CQ_QUERY_VECTOR, &mut found),
            ],
        );
        let errno = execute((*cq).context, &mut command);
        if errno == 0 {
            *vector = found;
        }
        errno
    }
}

/// Sets the priority of the handler of a completion vector.
///
/// # Safety
///
/// `context` is an open context of any provider.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_modify_vector_priority(
    context: *mut ibv_context,
    vector: u32,
    priority: u32,
) -> c_int {
    // SAFETY: the context is open, by the caller; the command has no attribute that points anywhere.
    unsafe {
        if !is_ours(context) {
            return libc::EOPNOTSUPP;
        }
        let mut command = Command::new(
            UVERBS_OBJECT_DEVICE,
            UVERBS_VECTOR_MODIFY,
            [
                ioctl::number(
                    UVERBS_VECTOR_MODIFY_VECTOR,
                    size_of_val(&vector),
                    vector.into(),
                ),
                ioctl::number(
                    UVERBS_VECTOR_MODIFY_PRIORITY,
                    size_of_val(&priority),
                    priority.into(),
                ),
            ],
        );
        execute(context, &mut command)
    }
}

/// Tells the priority of the handler of a completion vector.
///
/// # Safety
///
/// `context` is an open context of any provider, and `priority` a place for a number.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_query_vector_priority(
    context: *mut ibv_context,
    vector: u32,
    priority: *mut u32,
) -> c_int {
    let mut found = 0u32;
    // SAFETY: by the caller; `found` outlives the command.
    unsafe {
        if !is_ours(context) {
            return libc::EOPNOTSUPP;
        }
        let mut command = Command::new(
            UVERBS_OBJECT_DEVICE,
            UVERBS_VECTOR_QUERY,
            [
                ioctl::number(
                    UVERBS_VECTOR_QUERY_VECTOR,
                    size_of_val(&vector),
                    vector.into(),
                ),
                ioctl::answer(UVERBS_VECTOR_QUERY_PRIORITY, &mut found),
            ],
        );
        let errno = execute(context, &mut command);
        if errno == 0 {
            *priority = found;
        }
        errno
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    /// A completion queue of a device with the operations of `ops`, as libibverbs lays them out.
    fn with_queue(ops: *const crate::private::verbs_device_ops, check: impl FnOnce(*mut ibv_cq)) {
        // SAFETY: the structures are plain numbers and pointers, for which zero is valid.
        let (mut device, mut context, mut cq): (crate::private::verbs_device, ibv_context, ibv_cq) = unsafe {
            (
                core::mem::zeroed(),
                core::mem::zeroed(),
                core::mem::zeroed(),
            )
        };
        device.ops = ops;
        context.device = ptr::from_mut(&mut device).cast();
        context.cmd_fd = -1;
        cq.context = &mut context;
        check(&mut cq);
    }

    #[test]
    fn queues_of_other_providers_are_refused_before_the_kernel_is_asked() {
        let mut vector = 7;
        with_queue(ptr::null(), |cq| {
            // SAFETY: the queue, its context and its device live.
            unsafe {
                assert_eq!(ferritedv_modify_cq_vector(cq, 0), libc::EOPNOTSUPP);
                assert_eq!(ferritedv_query_cq_vector(cq, &mut vector), libc::EOPNOTSUPP);
                let context = (*cq).context;
                let modified = ferritedv_modify_vector_priority(context, 0, 1);
                let queried = ferritedv_query_vector_priority(context, 0, &mut vector);
                assert_eq!((modified, queried), (libc::EOPNOTSUPP, libc::EOPNOTSUPP));
                let mut attr = ibv_qp_init_attr_ex::default();
                let more = core::mem::zeroed();
                assert!(ferritedv_create_qp(context, &mut attr, &more).is_null());
                assert_eq!(*libc::__errno_location(), libc::EOPNOTSUPP);
            }
        });
        assert_eq!(vector, 7);
    }

    #[test]
    fn what_a_queue_pair_can_do_beyond_the_verbs_is_asked_for_in_the_drivers_words() {
        let asked = |flags| QpInitAttr {
            comp_mask: 0,
            flags,
            reserved: 0,
        };
        let of = |flags, qp_type, features| qp_flags(&asked(flags), qp_type, features);
        let (lists, drains) = (FERRITEDV_QP_LISTS, FERRITEDV_QP_REGISTER_DRAINS);
        let both = UVERBS_QP_LISTS | UVERBS_QP_REGISTER_DRAINS;
        for qp_type in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_XRC_SEND] {
            assert_eq!(of(lists, qp_type, FEATURE_LISTS), Ok(UVERBS_QP_LISTS));
            assert_eq!(of(lists | drains, qp_type, FEATURE_LISTS), Ok(both));
            let only = of(drains, qp_type, FEATURE_LISTS);
            assert_eq!(only, Ok(UVERBS_QP_REGISTER_DRAINS));
        }
        for qp_type in [IBV_QPT_UD, IBV_QPT_XRC_RECV] {
            assert_eq!(of(lists, qp_type, FEATURE_LISTS), Err(libc::EINVAL));
            assert_eq!(of(0, qp_type, FEATURE_LISTS), Ok(0));
        }
        for flags in [lists, drains] {
            let without = of(flags, IBV_QPT_RC, !FEATURE_LISTS);
            assert_eq!(without, Err(libc::EOPNOTSUPP));
        }
        assert_eq!(of(0, IBV_QPT_RC, 0), Ok(0));
        assert_eq!(of(1 << 3, IBV_QPT_RC, !0), Err(libc::EINVAL));
        let windows = FERRITEDV_QP_WINDOWS_ONLY;
        for qp_type in [IBV_QPT_RC, IBV_QPT_UC] {
            let only = of(windows, qp_type, FEATURE_WINDOWS_ONLY);
            assert_eq!(only, Ok(UVERBS_QP_WINDOWS_ONLY));
            assert_eq!(
                of(windows | lists | drains, qp_type, !0),
                Ok(both | UVERBS_QP_WINDOWS_ONLY)
            );
            assert_eq!(of(windows, qp_type, FEATURE_LISTS), Err(libc::EOPNOTSUPP));
        }
        for qp_type in [IBV_QPT_XRC_SEND, IBV_QPT_UD, IBV_QPT_XRC_RECV] {
            assert_eq!(of(windows, qp_type, !0), Err(libc::EINVAL));
        }
        for later in [
            QpInitAttr {
                comp_mask: 1,
                ..asked(lists)
            },
            QpInitAttr {
                reserved: 1,
                ..asked(lists)
            },
        ] {
            let result = qp_flags(&later, IBV_QPT_RC, FEATURE_LISTS);
            assert_eq!(result, Err(libc::EINVAL));
        }
    }

    #[test]
    fn what_the_kernel_says_is_passed_on() {
        let mut vector = 7;
        with_queue(device::ops(), |cq| {
            // SAFETY: the queue, its context and its device live; there is no command file.
            unsafe {
                assert_eq!(ferritedv_modify_cq_vector(cq, 0), libc::EBADF);
                assert_eq!(ferritedv_query_cq_vector(cq, &mut vector), libc::EBADF);
                let context = (*cq).context;
                let modified = ferritedv_modify_vector_priority(context, 0, 1);
                let queried = ferritedv_query_vector_priority(context, 0, &mut vector);
                assert_eq!((modified, queried), (libc::EBADF, libc::EBADF));
            }
        });
        assert_eq!(vector, 7);
    }

    #[test]
    fn a_kernel_that_does_not_know_the_command_does_not_support_it() {
        assert_eq!(errno_of(Ok(())), 0);
        assert_eq!(errno_of(Err(libc::EPROTONOSUPPORT)), libc::EOPNOTSUPP);
        assert_eq!(errno_of(Err(libc::EINVAL)), libc::EINVAL);
    }

    #[test]
    fn the_header_has_the_numbers_of_the_interface() {
        let header = include_str!("../include/infiniband/ferritedv.h");
        for (name, value) in [
            ("FERRITEDV_NO_VECTOR", ferrite_abi::UVERBS_CQ_VECTOR_NONE),
            (
                "FERRITEDV_LOCAL_VECTOR",
                ferrite_abi::UVERBS_CQ_VECTOR_LOCAL,
            ),
        ] {
            let line = format!("#define {name} {value:#x}U\n");
            assert!(header.contains(&line), "{line}");
        }
        for (name, value) in [
            ("FERRITEDV_BULK", ferrite_abi::EventPriority::Bulk),
            (
                "FERRITEDV_LOW_LATENCY",
                ferrite_abi::EventPriority::LowLatency,
            ),
        ] {
            let line = format!("#define {name} {}U\n", value.number());
            assert!(header.contains(&line), "{line}");
        }
        for (name, value) in [
            ("FERRITEDV_ACCESS_ONE_TOUCH", FERRITEDV_ACCESS_ONE_TOUCH),
            ("FERRITEDV_QP_LISTS", FERRITEDV_QP_LISTS),
            ("FERRITEDV_QP_REGISTER_DRAINS", FERRITEDV_QP_REGISTER_DRAINS),
            ("FERRITEDV_QP_WINDOWS_ONLY", FERRITEDV_QP_WINDOWS_ONLY),
        ] {
            let line = format!("#define {name} (1U << {})\n", value.trailing_zeros());
            assert!(header.contains(&line), "{line}");
        }
        let line = format!("#define FERRITEDV_MAX_PIECES {}\n", ferrite_abi::MAX_PIECES);
        assert!(header.contains(&line), "{line}");
    }
}
