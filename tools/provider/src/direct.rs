// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What programs may call beyond the verbs: `include/infiniband/ferritedv.h`.

use core::ffi::c_int;

use ferrite_abi::{
    UVERBS_CQ_MOVE, UVERBS_CQ_MOVE_HANDLE, UVERBS_CQ_MOVE_VECTOR, UVERBS_CQ_QUERY,
    UVERBS_CQ_QUERY_HANDLE, UVERBS_CQ_QUERY_VECTOR, UVERBS_VECTOR_MODIFY,
    UVERBS_VECTOR_MODIFY_PRIORITY, UVERBS_VECTOR_MODIFY_VECTOR, UVERBS_VECTOR_QUERY,
    UVERBS_VECTOR_QUERY_PRIORITY, UVERBS_VECTOR_QUERY_VECTOR,
};

use crate::device;
use crate::ioctl::{self, Command};
use crate::sys::*;

/// Has the kernel carry out a command; an errno value, or 0.
///
/// # Safety
///
/// `context` is an open context of any provider, and what the attributes point to is valid.
unsafe fn execute<const N: usize>(context: *mut ibv_context, command: &mut Command<N>) -> c_int {
    // SAFETY: by the caller.
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
unsafe fn is_ours(context: *mut ibv_context) -> bool {
    // SAFETY: by the caller; an open context has a device.
    unsafe { device::is_ours((*context).device) }
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
    // SAFETY: by the caller.
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
            }
        });
        assert_eq!(vector, 7);
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
    }
}
