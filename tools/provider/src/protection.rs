// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Protection domains and memory regions: the kernel's work; here only the structures.

use core::ffi::{c_int, c_void};
use core::ptr;

use ferrite_abi::{Plain, UverbsPdResponse};

use crate::fail;
use crate::private::*;
use crate::sys::*;

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut request = Request::<ib_uverbs_alloc_pd, Nothing>::default();
    let mut response = Response {
        core: ib_uverbs_alloc_pd_resp::default(),
        private: UverbsPdResponse::zeroed(),
    };
    let pd = Box::into_raw(Box::<ibv_pd>::default());
    // SAFETY: request and response are laid out as libibverbs expects and the sizes are theirs.
    let result = unsafe {
        ibv_cmd_alloc_pd(
            context,
            pd,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        // SAFETY: `pd` is the box from above; nobody else got it.
        drop(unsafe { Box::from_raw(pd) });
        return fail(result);
    }
    pd
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: libibverbs passes a domain of ours.
    let result = unsafe { ibv_cmd_dealloc_pd(pd) };
    if result == 0 {
        // SAFETY: it came from `alloc_pd` and is gone for the kernel too.
        drop(unsafe { Box::from_raw(pd) });
    }
    result
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut ibv_mr {
    let mut request = Request::<ib_uverbs_reg_mr, Nothing>::default();
    let mut response = Response::<ib_uverbs_reg_mr_resp, Nothing>::default();
    let mr = Box::into_raw(Box::new(verbs_mr {
        ibv_mr: ibv_mr::default(),
        mr_type: 0,
        access: 0,
    }));
    // SAFETY: request and response are laid out as libibverbs expects and the sizes are theirs.
    let result = unsafe {
        ibv_cmd_reg_mr(
            pd,
            address,
            length,
            hca_va,
            access,
            mr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        // SAFETY: `mr` is the box from above; nobody else got it.
        drop(unsafe { Box::from_raw(mr) });
        return fail(result);
    }
    mr.cast()
}

pub(crate) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let mut request = Request::<ib_uverbs_rereg_mr, Nothing>::default();
    let mut response = Response::<ib_uverbs_rereg_mr_resp, Nothing>::default();
    // SAFETY: request and response are laid out as libibverbs expects and the sizes are theirs.
    unsafe {
        ibv_cmd_rereg_mr(
            mr,
            flags as u32,
            address,
            length,
            address as u64,
            access,
            pd,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    }
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: libibverbs passes a region of ours.
    let result = unsafe { ibv_cmd_dereg_mr(mr) };
    if result == 0 {
        // SAFETY: it came from `reg_mr` and is gone for the kernel too.
        drop(unsafe { Box::from_raw(mr) });
    }
    result
}
