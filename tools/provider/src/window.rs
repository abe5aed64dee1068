// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Memory windows: made by the kernel, bound and unbound through a send queue.

use core::ffi::c_int;

use ferrite_abi::{BindPart, SendOpcode, Tag, ACCESS_ONE_TOUCH, FEATURE_ONE_TOUCH};

use crate::direct::FERRITEDV_ACCESS_ONE_TOUCH;
use crate::heap;
use crate::object::{self, or_null};
use crate::private::*;
use crate::qp::Qp;
use crate::sys::*;
use crate::wqe::{Data, Part, Work};

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    let mut request = Request::<ib_uverbs_alloc_mw, Nothing>::default();
    let mut response = Response::<ib_uverbs_alloc_mw_resp, Nothing>::default();
    or_null(heap::boxed(ibv_mw::default()).and_then(|mw| {
        object::make(mw, |mw| {
            // SAFETY: the consumer passes a live domain, `make` a window that nobody else has; request
            // and response have the layout that the command has in libibverbs (`private`).
            unsafe { command!(ibv_cmd_alloc_mw(pd, kind, mw), request, response) }
        })
    }))
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: libibverbs passes a window from `alloc_mw`, which its consumer does not use any more.
    unsafe { object::destroy(mw, || ibv_cmd_dealloc_mw(mw), |_| {}) }
}

/// The part of a bind; `rkey` is the window's key when it was carried out. Whether and when that
/// will be nobody knows yet, so that the window's structure is left alone: a program that binds
/// windows of type 2 chooses their keys and knows which is in force.
///
/// # Safety
///
/// `mw` is a live window, and `info` names a live region or none.
pub(crate) unsafe fn bind_part(
    mw: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
    features: u64,
) -> Result<Part, c_int> {
    // SAFETY: the window is live, and so is the region, if there is one, by the caller.
    let (present, region) =
        unsafe { ((*mw).rkey, info.mr.as_ref().map_or(0, |region| region.lkey)) };
    // The numbers of the rights are those of the verbs, but only of these.
    let rights = IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED;
    // A window is for peers: the right to write locally means nothing for it.
    let known = rights | IBV_ACCESS_LOCAL_WRITE | FERRITEDV_ACCESS_ONE_TOUCH;
    if info.mw_access_flags & !known != 0
        || Tag(present).index() != Tag(rkey).index()
        || (info.length != 0 && info.mr.is_null())
    {
        return Err(libc::EINVAL);
    }
    let one_touch = one_touch(info.mw_access_flags, features)?;
    Ok(Part::Bind(BindPart {
        window: present,
        new_window: rkey,
        region,
        access: info.mw_access_flags & rights | one_touch,
        address: info.addr,
        length: info.length,
        reserved: [0; 2],
    }))
}

/// What the device calls [`FERRITEDV_ACCESS_ONE_TOUCH`], where it is asked for.
pub(crate) fn one_touch(access: u32, features: u64) -> Result<u32, c_int> {
    match access & FERRITEDV_ACCESS_ONE_TOUCH {
        0 => Ok(0),
        _ if features & FEATURE_ONE_TOUCH == 0 => Err(libc::EOPNOTSUPP),
        _ => Ok(ACCESS_ONE_TOUCH),
    }
}

/// Binds a window of type 1, whose next key is the provider's to choose.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the consumer passes a live queue pair and its attributes.
    let (qp, bind) = unsafe { (Qp::of(qp), &*bind) };
    let mut queue = qp.send.lock();
    // Others may bind the window too, by this queue pair alone: whoever has the lock has its key.
    // SAFETY: the consumer passes a live window.
    let tag = Tag(unsafe { (*mw).rkey });
    let rkey = Tag::new(tag.index(), tag.instance().wrapping_add(1)).0;
    // SAFETY: the consumer passes a live window, and names a live region or none.
    let part = match unsafe { bind_part(mw, rkey, &bind.bind_info, qp.features) } {
        Ok(part) => part,
        Err(errno) => return errno,
    };
    let work = Work {
        wr_id: bind.wr_id,
        opcode: SendOpcode::Bind,
        flags: bind.send_flags,
        srqn: 0,
        part,
    };
    if !qp.may_send() {
        return libc::EINVAL;
    }
    if let Err(errno) = qp.write_send(&mut queue, &work, &Data::Sges(&[])) {
        return errno;
    }
    qp.publish_send(&queue);
    // The verb returns the new key with the window, before the bind is carried out.
    // SAFETY: the window is live, as above.
    unsafe { (*mw).rkey = rkey };
    0
}
