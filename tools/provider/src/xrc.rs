// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! XRC, the extended reliable connection: its domains, its shared receive queues, and the target of
//! another process.

use core::ffi::c_int;
use core::mem::size_of;
use core::ptr;

use ferrite_abi::{Plain, QueuePairRecord, UverbsSrqResponse, FEATURE_XRC};

use crate::context::Context;
use crate::heap;
use crate::object::{self, or_null};
use crate::private::*;
use crate::qp::Qp;
use crate::qp_layout::{QpLayout, Requests};
use crate::ring::QueueBuffer;
use crate::srq::{prepare, Srq};
use crate::sys::*;

pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    let mut request = Request::<ib_uverbs_open_xrcd, Nothing>::default();
    let mut response = Response::<ib_uverbs_open_xrcd_resp, Nothing>::default();
    let xrcd = heap::boxed(verbs_xrcd {
        xrcd: ibv_xrcd::default(),
        comp_mask: 0,
        handle: 0,
    });
    or_null(xrcd.and_then(|xrcd| {
        object::make(xrcd, |xrcd| {
            let size = size_of::<verbs_xrcd>() as c_int;
            // SAFETY: libibverbs passes an open context and the consumer's attributes, `make` a domain
            // of that size that nobody else has; request and response have the layout that the command
            // has in libibverbs (`private`).
            unsafe {
                command!(
                    ibv_cmd_open_xrcd(context, xrcd, size, attr),
                    request,
                    response
                )
            }
        })
    }))
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let xrcd = xrcd.cast::<verbs_xrcd>();
    // SAFETY: libibverbs passes a domain from `open_xrcd`, whose `ibv_xrcd` comes first. What was made
    // in it is gone: the kernel refuses before.
    unsafe { object::destroy(xrcd, || ibv_cmd_close_xrcd(xrcd), |_| {}) }
}

/// Makes an SRQ of an XRC domain.
///
/// # Safety
///
/// `context` is open, `attr` what its user asked for, with a live domain.
pub(crate) unsafe fn create_srq(
    context: *mut ibv_context,
    attr: &mut ibv_srq_init_attr_ex,
) -> Result<*mut Srq, c_int> {
    // SAFETY: the context is open, by the caller.
    let table = unsafe { &Context::of(context).xrc_srqs };
    let asked = *attr;
    let mut make = || {
        // SAFETY: the domain is live, by the caller.
        let (srq, private) = unsafe { prepare(asked.pd, &asked.attr, FEATURE_XRC) }?;
        let mut request = Request::<ib_uverbs_create_xsrq, _>::with(private);
        let mut response =
            Response::<ib_uverbs_create_srq_resp, _>::with(UverbsSrqResponse::zeroed());
        *attr = asked;
        let srq = object::make(srq, |srq| {
            // SAFETY: `make` passes the box from above, which nobody else has; context and attributes
            // are as the verb wants them, by the caller; request and response have the layout that the
            // command has in libibverbs (`private`).
            unsafe {
                let verbs = (*srq).verbs.get();
                command!(
                    ibv_cmd_create_srq_ex(context, verbs, ptr::from_mut(attr)),
                    request,
                    response
                )
            }
        })?;
        // SAFETY: `make` gave it, and nobody else has it yet.
        unsafe { (*srq).srqn = response.private.srqn };
        Ok((srq, response.private.srqn))
    };
    let srq = object::make_entered(table, [asked.cq, ptr::null_mut()], &mut make, &|srq| {
        // SAFETY: `make` gave it, and it is not in the table: nobody has it.
        unsafe { object::destroy(srq, || ibv_cmd_destroy_srq(srq.cast()), |_| {}) };
    })?;
    // SAFETY: the SRQ was made a moment ago and nobody can have destroyed it.
    unsafe { (*srq).tell_capacity(&mut attr.attr) };
    Ok(srq)
}

/// Another process's XRC TGT, to change or destroy.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes an open context, and the consumer its attributes.
    or_null(unsafe { open_target(context, attr) })
}

/// # Safety
///
/// `context` is open, and `attr` the consumer's.
unsafe fn open_target(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> Result<*mut Qp, c_int> {
    // SAFETY: the context is open, by the caller.
    let provider = unsafe { Context::of(context) };
    let none = ibv_qp_cap::default();
    let mut layout = QpLayout::new(&none, &provider.limits, Requests::Connected)?;
    layout.capacity = none;
    let memory = QueueBuffer::of_no_domain::<QueuePairRecord>(layout.rings())?;
    let mut qp = Qp::boxed(layout, provider.doorbells, memory)?;
    qp.receives = false;
    let mut request = Request::<ib_uverbs_open_qp, Nothing>::default();
    let mut response = Response::<ib_uverbs_create_qp_resp, Nothing>::default();
    let qp = object::make(qp, |qp| {
        // SAFETY: `make` passes the box from above, which nobody else has, with a `verbs_qp` of that
        // size; context and attributes are as the verb wants them, by the caller; request and response
        // have the layout that the command has in libibverbs (`private`).
        unsafe {
            let (verbs, size) = ((*qp).verbs.get(), size_of::<verbs_qp>() as c_int);
            command!(
                ibv_cmd_open_qp(context, verbs, size, attr),
                request,
                response
            )
        }
    })?;
    // SAFETY: libibverbs has filled the number in, and nobody else has `qp` yet.
    unsafe { (*qp).qpn = (*(*qp).verbs.get()).qp_ex.qp_base.qp_num };
    Ok(qp)
}
