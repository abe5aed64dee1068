// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The provider of `samples/rust_rdma_soft`, as small as one can be: all that it is asked for it hands to the kernel.
//!
//! Posting and polling, which other providers do without the kernel, are functions of libibverbs here
//! (`ibv_cmd_post_send`, `ibv_cmd_poll_cq`), which the core answers with the driver's operations for kernel users.
//! What a verb has no function for is not in the table, and libibverbs answers that it is not supported.

use core::ffi::{c_int, c_void};
use core::mem::{offset_of, size_of, size_of_val};
use core::ptr;

// What of libibverbs only providers see: the same as Ferrite's.
#[path = "../../provider/src/private.rs"]
pub mod private;
#[path = "../../provider/src/sys.rs"]
pub mod sys;

use private::*;
use sys::*;

/// `ABI_VERSION` of the driver.
const ABI_VERSION: u32 = 1;

static MATCH_TABLE: [verbs_match_ent; 2] = [
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        key: verbs_match_key {
            // A device that is on no bus is known by its name only, which is to be one that nobody gives to another.
            modalias: c"rdma_device:Nrust_soft*".as_ptr(),
        },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_MODALIAS,
    },
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        key: verbs_match_key { driver_id: 0 },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_SENTINEL,
    },
];

static DEVICE_OPS: verbs_device_ops = verbs_device_ops {
    name: c"soft".as_ptr(),
    match_min_abi_version: ABI_VERSION,
    match_max_abi_version: ABI_VERSION,
    match_table: MATCH_TABLE.as_ptr(),
    static_providers: ptr::null(),
    match_device: None,
    alloc_context: Some(alloc_context),
    import_context: None,
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
};

const OPS: verbs_context_ops = verbs_context_ops {
    alloc_pd: Some(alloc_pd),
    create_cq: Some(create_cq),
    create_qp: Some(create_qp),
    create_qp_ex: Some(create_qp_ex),
    dealloc_pd: Some(dealloc_pd),
    dereg_mr: Some(dereg_mr),
    destroy_cq: Some(destroy_cq),
    destroy_qp: Some(destroy_qp),
    free_context: Some(free_context),
    modify_qp: Some(modify_qp),
    poll_cq: Some(ibv_cmd_poll_cq),
    post_recv: Some(post_recv),
    post_send: Some(post_send),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    query_qp: Some(query_qp),
    reg_mr: Some(reg_mr),
    req_notify_cq: Some(ibv_cmd_req_notify_cq),
    ..verbs_context_ops::NONE
};

// Of `private`, what Ferrite's provider does not use.
extern "C" {
    fn ibv_cmd_create_cq(
        context: *mut ibv_context,
        cqe: c_int,
        channel: *mut ibv_comp_channel,
        comp_vector: c_int,
        cq: *mut ibv_cq,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    fn ibv_cmd_create_qp(
        pd: *mut ibv_pd,
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_init_attr,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    fn ibv_cmd_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int;
    fn ibv_cmd_post_recv(
        qp: *mut ibv_qp,
        wr: *mut ibv_recv_wr,
        bad_wr: *mut *mut ibv_recv_wr,
    ) -> c_int;
    fn ibv_cmd_post_send(
        qp: *mut ibv_qp,
        wr: *mut ibv_send_wr,
        bad_wr: *mut *mut ibv_send_wr,
    ) -> c_int;
    fn ibv_cmd_req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int;
}

/// Sets `errno` and gives the null pointer that goes with it.
fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: the location of the calling thread's `errno` is always valid.
    unsafe { *libc::__errno_location() = errno };
    ptr::null_mut()
}

/// Memory for an object of libibverbs, of which `ask` has the kernel make its side; it answers with an errno value. Null
/// where that failed.
fn make<T>(ask: impl FnOnce(*mut T) -> c_int) -> *mut T {
    // SAFETY: `calloc` has no preconditions.
    let object: *mut T = unsafe { libc::calloc(1, size_of::<T>()) }.cast();
    if object.is_null() {
        return fail(libc::ENOMEM);
    }
    match ask(object) {
        0 => object,
        errno => {
            // SAFETY: it was allocated above, and libibverbs keeps no pointer to what was not made.
            unsafe { libc::free(object.cast()) };
            fail(errno)
        }
    }
}

/// Frees an object that [`make`] made, where the kernel has ended its side with `result` 0.
///
/// # Safety
///
/// `object` came from [`make`], and nobody uses it where `result` is 0.
unsafe fn end<T>(object: *mut T, result: c_int) -> c_int {
    if result == 0 {
        // SAFETY: it is an allocation of `make`'s that nobody uses, by the caller.
        unsafe { libc::free(object.cast()) };
    }
    result
}

unsafe extern "C" fn alloc_device(_sysfs: *mut verbs_sysfs_dev) -> *mut verbs_device {
    make(|_| 0)
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: libibverbs gives back what `alloc_device` allocated, once.
    unsafe { end(device, 0) };
}

unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut verbs_context {
    let (size, driver) = (size_of::<verbs_context>(), RDMA_DRIVER_UNKNOWN);
    let none = ptr::null_mut();
    // SAFETY: the arguments are libibverbs' own; the context is all that is allocated.
    let context = unsafe { _verbs_init_and_alloc_context(device, cmd_fd, size, none, driver) };
    let context: *mut verbs_context = context.cast();
    if context.is_null() {
        return ptr::null_mut();
    }
    let mut request = Request::<ib_uverbs_get_context, Nothing>::default();
    let mut response = Response::<ib_uverbs_get_context_resp, Nothing>::default();
    // SAFETY: the context was initialised above; request and response have the layout that the command has in
    // libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_get_context(context), request, response) };
    // SAFETY: the context was initialised above, and nobody else has it.
    unsafe {
        if result != 0 {
            free_context(&raw mut (*context).context);
            return fail(result);
        }
        verbs_set_ops(context, &OPS);
    }
    context
}

unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: every context of this provider is in a `verbs_context`, which libibverbs allocated for `alloc_context`
    // with `calloc`, and closes once.
    unsafe {
        let context: *mut verbs_context =
            context.byte_sub(offset_of!(verbs_context, context)).cast();
        verbs_uninit_context(context);
        libc::free(context.cast());
    }
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let mut response = ib_uverbs_ex_query_device_resp::default();
    let mut size = size_of_val(&response);
    // SAFETY: the arguments are those libibverbs gave; the response is ours.
    unsafe { ibv_cmd_query_device_any(context, input, attr, attr_size, &mut response, &mut size) }
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    let mut request = Request::<ib_uverbs_query_port, Nothing>::default();
    // SAFETY: libibverbs passes an open context and room for the answer; the request has the layout that the command
    // has in libibverbs (`private`).
    unsafe { command!(ibv_cmd_query_port(context, port, attr), request) }
}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut request = Request::<ib_uverbs_alloc_pd, Nothing>::default();
    let mut response = Response::<ib_uverbs_alloc_pd_resp, Nothing>::default();
    make(|pd| {
        // SAFETY: libibverbs passes an open context; request and response have the layout that the command has in
        // libibverbs (`private`).
        unsafe { command!(ibv_cmd_alloc_pd(context, pd), request, response) }
    })
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the program gives up a domain of `alloc_pd`.
    unsafe { end(pd, ibv_cmd_dealloc_pd(pd)) }
}

unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    let mut request = Request::<ib_uverbs_reg_mr, Nothing>::default();
    let mut response = Response::<ib_uverbs_reg_mr_resp, Nothing>::default();
    make(|mr: *mut verbs_mr| {
        // SAFETY: the domain is the program's; request and response have the layout that the command has in
        // libibverbs (`private`).
        unsafe {
            command!(
                ibv_cmd_reg_mr(pd, addr, length, iova, access, mr),
                request,
                response
            )
        }
    })
    .cast()
}

unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: the program gives up a region of `reg_mr`.
    unsafe { end(mr, ibv_cmd_dereg_mr(mr)) }
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    entries: c_int,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let mut request = Request::<ib_uverbs_create_cq, Nothing>::default();
    let mut response = Response::<ib_uverbs_create_cq_resp, Nothing>::default();
    make(|cq: *mut verbs_cq| {
        // SAFETY: context and channel are the program's; request and response have the layout that the command has in
        // libibverbs (`private`).
        unsafe {
            command!(
                ibv_cmd_create_cq(context, entries, channel, vector, cq.cast()),
                request,
                response
            )
        }
    })
    .cast()
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: the program gives up a queue of `create_cq`.
    unsafe { end(cq, ibv_cmd_destroy_cq(cq)) }
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let mut request = Request::<ib_uverbs_create_qp, Nothing>::default();
    let mut response = Response::<ib_uverbs_create_qp_resp, Nothing>::default();
    make(|qp: *mut verbs_qp| {
        // SAFETY: domain and attributes are the program's; request and response have the layout that the command has
        // in libibverbs (`private`).
        unsafe { command!(ibv_cmd_create_qp(pd, qp.cast(), attr), request, response) }
    })
    .cast()
}

unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes the program's structure.
    let (mask, flags) = unsafe { ((*attr).comp_mask, (*attr).create_flags) };
    let known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS;
    if mask & !known != 0 || (mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && flags != 0) {
        return fail(libc::EOPNOTSUPP);
    }
    let mut request = Request::<ib_uverbs_create_qp, Nothing>::default();
    let mut response = Response::<ib_uverbs_create_qp_resp, Nothing>::default();
    make(|qp: *mut verbs_qp| {
        // SAFETY: context and attributes are the program's; request and response have the layout that the command has
        // in libibverbs (`private`).
        unsafe {
            // There are none, so that it is the command without them.
            (*attr).comp_mask = mask & IBV_QP_INIT_ATTR_PD;
            let result = command!(ibv_cmd_create_qp_ex(context, qp, attr), request, response);
            (*attr).comp_mask = mask;
            result
        }
    })
    .cast()
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    let mut request = Request::<ib_uverbs_modify_qp, Nothing>::default();
    // SAFETY: queue pair and attributes are the program's; the request has the layout that the command has in
    // libibverbs (`private`).
    unsafe { command!(ibv_cmd_modify_qp(qp, attr, mask), request) }
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let mut request = Request::<ib_uverbs_query_qp, Nothing>::default();
    // SAFETY: queue pair and attributes are the program's; the request has the layout that the command has in
    // libibverbs (`private`).
    unsafe { command!(ibv_cmd_query_qp(qp, attr, mask, init_attr), request) }
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the program gives up a queue pair of `create_qp`.
    unsafe { end(qp, ibv_cmd_destroy_qp(qp)) }
}

/// Posts a list, a request at a time: the kernel's commands have a list as well, but of no more than 256 KiB. `bad` is
/// set to the one that was not taken, with what is behind it.
///
/// # Safety
///
/// `first` is null or a list that `next` leads through, and `bad` may be written to.
unsafe fn post_each<T: Copy>(
    first: *mut T,
    bad: *mut *mut T,
    next: impl Fn(&mut T) -> &mut *mut T,
    post: impl Fn(*mut T, *mut *mut T) -> c_int,
) -> c_int {
    let mut request = first;
    // SAFETY: it is null or a request of the list, by the caller.
    while let Some(mut alone) = unsafe { request.as_ref() }.copied() {
        let behind = core::mem::replace(next(&mut alone), ptr::null_mut());
        let result = post(&mut alone, &mut ptr::null_mut());
        if result != 0 {
            // SAFETY: the caller vouches for it.
            unsafe { *bad = request };
            return result;
        }
        request = behind;
    }
    0
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: queue pair and list are the program's, as is `bad`.
    unsafe {
        let post = |wr, bad| ibv_cmd_post_send(qp, wr, bad);
        post_each(first, bad, |wr| &mut wr.next, post)
    }
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: queue pair and list are the program's, as is `bad`.
    unsafe {
        let post = |wr, bad| ibv_cmd_post_recv(qp, wr, bad);
        post_each(first, bad, |wr| &mut wr.next, post)
    }
}

extern "C" fn register() {
    // SAFETY: `DEVICE_OPS` is complete and lives as long as the library, which libibverbs never unloads.
    unsafe { verbs_register_driver_34(&DEVICE_OPS) };
}

/// Runs [`register`] when the library is loaded.
#[used]
#[link_section = ".init_array"]
static REGISTER: extern "C" fn() = register;
