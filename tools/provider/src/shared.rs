// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Regions that share the memory and the translation of another (`include/infiniband/ferritedv.h`).
//! The driver knows what that one is of; here it is named, and the new one filled in.

use core::ffi::{c_int, c_void};

use ferrite_abi::{Plain, UverbsMrRequest, UVERBS_MR_SHARED};

use crate::direct::is_ours;
use crate::fail;
use crate::ioctl::{self, Command};
use crate::private::*;
use crate::protection::{dereg_mr, register};
use crate::sys::*;

/// `verbs_mr::mr_type` of regions whose memory libibverbs keeps from being copied by `fork`: it counts
/// them by page, and each is taken off by `ibv_dereg_mr`.
const IBV_MR_TYPE_MR: c_int = 0;

/// What the kernel knows of a region that its `ibv_mr` does not say, be it imported or changed since.
struct Place {
    key: u32,
    iova: u64,
    length: u64,
}

/// Asks the kernel for it.
///
/// # Safety
///
/// `mr` is a live region of an open context.
unsafe fn place(mr: *mut ibv_mr) -> Result<Place, c_int> {
    let (mut key, mut rkey, mut length, mut iova) = (0u32, 0u32, 0u64, 0u64);
    // SAFETY: by the caller; the answers outlive the command.
    unsafe {
        Command::new(
            UVERBS_OBJECT_MR,
            UVERBS_METHOD_QUERY_MR,
            [
                ioctl::handle(UVERBS_ATTR_QUERY_MR_HANDLE, (*mr).handle),
                ioctl::answer(UVERBS_ATTR_QUERY_MR_RESP_LKEY, &mut key),
                ioctl::answer(UVERBS_ATTR_QUERY_MR_RESP_RKEY, &mut rkey),
                ioctl::answer(UVERBS_ATTR_QUERY_MR_RESP_LENGTH, &mut length),
                ioctl::answer(UVERBS_ATTR_QUERY_MR_RESP_IOVA, &mut iova),
            ],
        )
        .execute((*(*mr).context).cmd_fd)?;
    }
    Ok(Place { key, iova, length })
}

/// Registers the memory of a region once more, with other rights or in another domain.
///
/// # Safety
///
/// `pd` is a live domain, and `mr` a live region, of any provider.
#[no_mangle]
pub unsafe extern "C" fn ferritedv_reg_shared_mr(
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: by the caller; a live domain has an open context, and a region of a context of ours is a
    // `verbs_mr`.
    unsafe {
        if !is_ours((*pd).context) {
            return fail(libc::EOPNOTSUPP);
        }
        // A key says nothing to other contexts, or something else.
        if (*mr).context != (*pd).context {
            return fail(libc::EINVAL);
        }
        if (*mr.cast::<verbs_mr>()).access & IBV_ACCESS_ON_DEMAND as c_int != 0 {
            return fail(libc::EOPNOTSUPP);
        }
        match share(pd, mr, access) {
            Ok(shared) => shared,
            Err(errno) => fail(errno),
        }
    }
}

/// # Safety
///
/// `pd` is a live domain and `mr` a live region, both of one context of this provider.
unsafe fn share(pd: *mut ibv_pd, mr: *mut ibv_mr, access: c_int) -> Result<*mut ibv_mr, c_int> {
    // SAFETY: domain and region are live, by the caller, and their context open; a region of this
    // provider is a `verbs_mr`, and so is what `register` gives, which nobody else has yet.
    unsafe {
        let place = place(mr)?;
        let request = UverbsMrRequest {
            kind: UVERBS_MR_SHARED,
            key: place.key,
            ..UverbsMrRequest::zeroed()
        };
        // Nothing is pinned: the kernel notes address and length, and wants the places in their pages to
        // be the same.
        let start = place.iova as *mut c_void;
        let shared = register(
            pd,
            start,
            place.length as usize,
            place.iova,
            access,
            request,
        );
        if shared.is_null() {
            return Err(*libc::__errno_location());
        }
        // What `ibv_reg_mr` fills in for its callers.
        (*shared).context = (*pd).context;
        (*shared).pd = pd;
        (*shared).addr = (*mr).addr;
        (*shared).length = (*mr).length;
        let kind = (*mr.cast::<verbs_mr>()).mr_type;
        (*shared.cast::<verbs_mr>()).mr_type = kind;
        // The memory of the other one is kept from being copied until that one goes.
        if kind == IBV_MR_TYPE_MR {
            let result = ibv_dontfork_range((*mr).addr, (*mr).length);
            if result != 0 {
                dereg_mr(shared.cast());
                return Err(result);
            }
        }
        Ok(shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::ptr;

    /// Calls with a domain and a region of one context, of a device with the operations of `ops`; there
    /// is no command file.
    fn with_region(ops: *const verbs_device_ops, check: impl FnOnce(&mut ibv_pd, &mut verbs_mr)) {
        // SAFETY: the structures are plain numbers and pointers, for which zero is valid.
        let (mut device, mut context): (verbs_device, ibv_context) =
            unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
        device.ops = ops;
        context.device = ptr::from_mut(&mut device).cast();
        context.cmd_fd = -1;
        let mut pd = ibv_pd {
            context: &mut context,
            ..Default::default()
        };
        let mut mr = verbs_mr {
            ibv_mr: ibv_mr {
                context: &mut context,
                ..Default::default()
            },
            mr_type: IBV_MR_TYPE_MR,
            access: 0,
        };
        check(&mut pd, &mut mr);
    }

    /// What the errno of a call is that must fail.
    fn refused(pd: &mut ibv_pd, mr: &mut verbs_mr) -> c_int {
        // SAFETY: both live, with their context and their device.
        unsafe {
            let shared = ferritedv_reg_shared_mr(pd, ptr::from_mut(mr).cast(), 0);
            assert!(shared.is_null());
            *libc::__errno_location()
        }
    }

    #[test]
    fn only_regions_of_the_same_context_of_this_provider_are_shared() {
        with_region(ptr::null(), |pd, mr| {
            assert_eq!(refused(pd, mr), libc::EOPNOTSUPP);
        });
        with_region(crate::device::ops(), |pd, mr| {
            // The kernel is asked, and there is none.
            assert_eq!(refused(pd, mr), libc::EBADF);
            with_region(crate::device::ops(), |other, _| {
                assert_eq!(refused(other, mr), libc::EINVAL);
            });
        });
    }

    #[test]
    fn what_is_not_pinned_is_not_shared() {
        with_region(crate::device::ops(), |pd, mr| {
            mr.access = (IBV_ACCESS_ON_DEMAND | IBV_ACCESS_LOCAL_WRITE) as c_int;
            assert_eq!(refused(pd, mr), libc::EOPNOTSUPP);
        });
    }
}
