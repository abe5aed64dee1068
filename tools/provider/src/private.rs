// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The interface between libibverbs and its providers, private ABI 34 (rdma-core 36 to 56).
//!
//! No development package carries its headers, so what this provider uses is declared here;
//! structures that libibverbs reads or writes have their sizes and offsets asserted. The symbol
//! `verbs_register_driver_34` carries the number, so that another version of libibverbs refuses to
//! load this library rather than to misunderstand it. Releases 34 and 35 have the same number, but
//! other structures: [`OLDEST`] keeps them from loading it.
#![allow(missing_docs, non_camel_case_types)]

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

use crate::sys::*;

/// The operations of a context ([`verbs_context_ops`]) are what they are since release 36, whose
/// public interface has this function for the first time (symbol version `IBVERBS_1.14`): with an
/// older libibverbs the library has an undefined symbol and is not loaded.
#[used]
static OLDEST: unsafe extern "C" fn(*mut ibv_qp, ibv_wr_opcode, u32) -> c_int =
    ibv_query_qp_data_in_order;

/// An operation that this provider leaves to libibverbs' default, which is to refuse it.
pub type Unused = Option<unsafe extern "C" fn()>;

/// `verbs_match_ent::kind`: the end of the table.
pub const VERBS_MATCH_SENTINEL: u8 = 0;
/// `verbs_match_ent::kind`: PCI vendor and device.
pub const VERBS_MATCH_PCI: u8 = 1;
/// `verbs_match_ent::kind`: what the kernel finds modules by, or `rdma_device:N` and the device's name.
pub const VERBS_MATCH_MODALIAS: u8 = 2;
/// The driver number of drivers that have none in the kernel's list.
pub const RDMA_DRIVER_UNKNOWN: u32 = 0;
/// `verbs_qp::comp_mask`: `qp_ex` is filled in.
pub const VERBS_QP_EX: u32 = 1 << 1;

/// What a device is found by that is not by PCI vendor and device.
#[repr(C)]
pub union verbs_match_key {
    pub modalias: *const c_char,
    pub driver_id: u64,
}

/// One device that a provider answers for.
#[repr(C)]
pub struct verbs_match_ent {
    pub driver_data: *mut c_void,
    pub key: verbs_match_key,
    pub vendor: u16,
    pub device: u16,
    pub kind: u8,
}

/// A device found in sysfs; never looked into.
#[repr(C)]
pub struct verbs_sysfs_dev {
    _opaque: [u8; 0],
}

/// What a provider registers.
#[repr(C)]
pub struct verbs_device_ops {
    pub name: *const c_char,
    pub match_min_abi_version: u32,
    pub match_max_abi_version: u32,
    pub match_table: *const verbs_match_ent,
    pub static_providers: *const *const verbs_device_ops,
    pub match_device: Unused,
    pub alloc_context:
        Option<unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut verbs_context>,
    pub import_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut verbs_context>,
    pub alloc_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> *mut verbs_device>,
    pub uninit_device: Option<unsafe extern "C" fn(*mut verbs_device)>,
}

// SAFETY: the structure is only ever read once it is made, by libibverbs too.
unsafe impl Sync for verbs_device_ops {}
// SAFETY: as for `verbs_device_ops`.
unsafe impl Sync for verbs_match_ent {}

/// A device of a provider.
#[repr(C)]
pub struct verbs_device {
    pub device: ibv_device,
    pub ops: *const verbs_device_ops,
    pub refcount: c_int,
    pub entry: [*mut c_void; 2],
    pub sysfs: *mut verbs_sysfs_dev,
    pub core_support: u64,
}

/// A memory region.
#[repr(C)]
pub struct verbs_mr {
    pub ibv_mr: ibv_mr,
    pub mr_type: c_int,
    pub access: c_int,
}

/// A queue pair; `qp_ex` starts with the `ibv_qp`.
#[repr(C)]
pub struct verbs_qp {
    pub qp_ex: ibv_qp_ex,
    pub comp_mask: u32,
    pub xrcd: *mut c_void,
}

/// A shared receive queue.
#[repr(C)]
pub struct verbs_srq {
    pub srq: ibv_srq,
    pub srq_type: ibv_srq_type,
    pub xrcd: *mut c_void,
    pub cq: *mut ibv_cq,
    pub srq_num: u32,
}

/// An XRC domain.
#[repr(C)]
pub struct verbs_xrcd {
    pub xrcd: ibv_xrcd,
    pub comp_mask: u32,
    pub handle: u32,
}

/// Memory of the device.
#[repr(C)]
pub struct verbs_dm {
    pub dm: ibv_dm,
    pub handle: u32,
}

/// A completion queue; `cq_ex` starts with the `ibv_cq`.
#[repr(C)]
pub struct verbs_cq {
    pub cq_ex: ibv_cq_ex,
}

/// All operations of a context, in the order of their names.
#[repr(C)]
pub struct verbs_context_ops {
    pub advise_mr: Option<
        unsafe extern "C" fn(
            *mut ibv_pd,
            ib_uverbs_advise_mr_advice,
            u32,
            *mut ibv_sge,
            u32,
        ) -> c_int,
    >,
    pub alloc_dm:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm>,
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw>,
    pub alloc_null_mr: Unused,
    pub alloc_parent_domain: Option<
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd,
    >,
    pub alloc_pd: Option<unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd>,
    pub alloc_td:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
    pub async_event: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_async_event)>,
    pub attach_counters_point_flow: Unused,
    pub attach_mcast: Option<unsafe extern "C" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int>,
    pub bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int>,
    pub close_xrcd: Option<unsafe extern "C" fn(*mut ibv_xrcd) -> c_int>,
    pub cq_event: Option<unsafe extern "C" fn(*mut ibv_cq)>,
    pub create_ah: Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah>,
    pub create_counters: Unused,
    pub create_cq: Option<
        unsafe extern "C" fn(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int) -> *mut ibv_cq,
    >,
    pub create_cq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    pub create_flow: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow>,
    pub create_flow_action_esp: Unused,
    pub create_qp: Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp>,
    pub create_qp_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    pub create_rwq_ind_table: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *mut ibv_rwq_ind_table_init_attr,
        ) -> *mut ibv_rwq_ind_table,
    >,
    pub create_srq:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq>,
    pub create_srq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq>,
    pub create_wq:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq>,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    pub dealloc_pd: Option<unsafe extern "C" fn(*mut ibv_pd) -> c_int>,
    pub dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
    pub dereg_mr: Option<unsafe extern "C" fn(*mut verbs_mr) -> c_int>,
    pub destroy_ah: Option<unsafe extern "C" fn(*mut ibv_ah) -> c_int>,
    pub destroy_counters: Unused,
    pub destroy_cq: Option<unsafe extern "C" fn(*mut ibv_cq) -> c_int>,
    pub destroy_flow: Option<unsafe extern "C" fn(*mut ibv_flow) -> c_int>,
    pub destroy_flow_action: Unused,
    pub destroy_qp: Option<unsafe extern "C" fn(*mut ibv_qp) -> c_int>,
    pub destroy_rwq_ind_table: Option<unsafe extern "C" fn(*mut ibv_rwq_ind_table) -> c_int>,
    pub destroy_srq: Option<unsafe extern "C" fn(*mut ibv_srq) -> c_int>,
    pub destroy_wq: Option<unsafe extern "C" fn(*mut ibv_wq) -> c_int>,
    pub detach_mcast: Option<unsafe extern "C" fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int>,
    pub free_context: Option<unsafe extern "C" fn(*mut ibv_context)>,
    pub free_dm: Option<unsafe extern "C" fn(*mut ibv_dm) -> c_int>,
    pub get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
    pub import_dm: Option<unsafe extern "C" fn(*mut ibv_context, u32) -> *mut ibv_dm>,
    pub import_mr: Option<unsafe extern "C" fn(*mut ibv_pd, u32) -> *mut ibv_mr>,
    pub import_pd: Option<unsafe extern "C" fn(*mut ibv_context, u32) -> *mut ibv_pd>,
    pub modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
    pub modify_flow_action_esp: Unused,
    pub modify_qp: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int>,
    pub modify_qp_rate_limit: Unused,
    pub modify_srq: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int>,
    pub modify_wq: Option<unsafe extern "C" fn(*mut ibv_wq, *mut ibv_wq_attr) -> c_int>,
    pub open_qp:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp>,
    pub open_xrcd:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd>,
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    pub post_srq_ops: Unused,
    pub post_srq_recv: Option<
        unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    >,
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex,
            usize,
        ) -> c_int,
    >,
    pub query_ece: Unused,
    pub query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int>,
    pub query_qp: Option<
        unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int,
    >,
    pub query_qp_data_in_order: Unused,
    pub query_rt_values:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int>,
    pub query_srq: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int>,
    pub read_counters: Unused,
    pub reg_dm_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr>,
    pub reg_dmabuf_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr>,
    pub reg_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr>,
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    pub rereg_mr: Option<
        unsafe extern "C" fn(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int,
    >,
    pub resize_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    pub set_ece: Unused,
    pub unimport_dm: Option<unsafe extern "C" fn(*mut ibv_dm)>,
    pub unimport_mr: Option<unsafe extern "C" fn(*mut ibv_mr)>,
    pub unimport_pd: Option<unsafe extern "C" fn(*mut ibv_pd)>,
}

impl verbs_context_ops {
    /// No operation at all.
    pub const NONE: Self = {
        // SAFETY: every field is an optional function pointer, for which zero is `None`.
        unsafe { core::mem::zeroed() }
    };
}

const _: () = {
    assert!(size_of::<verbs_match_ent>() == 24);
    assert!(offset_of!(verbs_match_ent, vendor) == 16);
    assert!(offset_of!(verbs_match_ent, kind) == 20);
    assert!(size_of::<verbs_device_ops>() == 72);
    assert!(offset_of!(verbs_device_ops, alloc_context) == 40);
    assert!(offset_of!(verbs_device_ops, import_context) == 48);
    assert!(offset_of!(verbs_device_ops, alloc_device) == 56);
    assert!(size_of::<verbs_device>() == 712);
    assert!(offset_of!(verbs_device, ops) == 664);
    assert!(offset_of!(verbs_device, sysfs) == 696);
    assert!(offset_of!(verbs_device, core_support) == 704);
    assert!(size_of::<verbs_mr>() == 56);
    assert!(offset_of!(verbs_mr, mr_type) == 48);
    assert!(size_of::<verbs_qp>() == 376);
    assert!(offset_of!(verbs_qp, comp_mask) == 360);
    assert!(size_of::<verbs_cq>() == 288);
    assert!(size_of::<verbs_srq>() == 160);
    assert!(offset_of!(verbs_srq, srq_num) == 152);
    assert!(size_of::<verbs_xrcd>() == 16);
    assert!(offset_of!(verbs_xrcd, handle) == 12);
    assert!(size_of::<verbs_dm>() == 40);
    assert!(offset_of!(verbs_dm, handle) == 32);
    assert!(size_of::<verbs_context>() == 648);
    // The position of an operation is what gives it its meaning: all those in use are checked.
    assert!(size_of::<verbs_context_ops>() == 76 * 8);
    {
        assert!(offset_of!(verbs_context_ops, alloc_dm) == 8);
        assert!(offset_of!(verbs_context_ops, alloc_mw) == 16);
        assert!(offset_of!(verbs_context_ops, alloc_parent_domain) == 32);
        assert!(offset_of!(verbs_context_ops, alloc_pd) == 40);
        assert!(offset_of!(verbs_context_ops, alloc_td) == 48);
        assert!(offset_of!(verbs_context_ops, async_event) == 56);
        assert!(offset_of!(verbs_context_ops, attach_mcast) == 72);
        assert!(offset_of!(verbs_context_ops, bind_mw) == 80);
        assert!(offset_of!(verbs_context_ops, close_xrcd) == 88);
        assert!(offset_of!(verbs_context_ops, cq_event) == 96);
        assert!(offset_of!(verbs_context_ops, create_ah) == 104);
        assert!(offset_of!(verbs_context_ops, create_cq) == 120);
        assert!(offset_of!(verbs_context_ops, create_cq_ex) == 128);
        assert!(offset_of!(verbs_context_ops, create_flow) == 136);
        assert!(offset_of!(verbs_context_ops, create_qp) == 152);
        assert!(offset_of!(verbs_context_ops, create_qp_ex) == 160);
        assert!(offset_of!(verbs_context_ops, create_rwq_ind_table) == 168);
        assert!(offset_of!(verbs_context_ops, create_srq) == 176);
        assert!(offset_of!(verbs_context_ops, create_srq_ex) == 184);
        assert!(offset_of!(verbs_context_ops, create_wq) == 192);
        assert!(offset_of!(verbs_context_ops, dealloc_mw) == 200);
        assert!(offset_of!(verbs_context_ops, dealloc_pd) == 208);
        assert!(offset_of!(verbs_context_ops, dealloc_td) == 216);
        assert!(offset_of!(verbs_context_ops, dereg_mr) == 224);
        assert!(offset_of!(verbs_context_ops, destroy_ah) == 232);
        assert!(offset_of!(verbs_context_ops, destroy_cq) == 248);
        assert!(offset_of!(verbs_context_ops, destroy_flow) == 256);
        assert!(offset_of!(verbs_context_ops, destroy_qp) == 272);
        assert!(offset_of!(verbs_context_ops, destroy_rwq_ind_table) == 280);
        assert!(offset_of!(verbs_context_ops, destroy_srq) == 288);
        assert!(offset_of!(verbs_context_ops, destroy_wq) == 296);
        assert!(offset_of!(verbs_context_ops, detach_mcast) == 304);
        assert!(offset_of!(verbs_context_ops, free_context) == 312);
        assert!(offset_of!(verbs_context_ops, free_dm) == 320);
        assert!(offset_of!(verbs_context_ops, get_srq_num) == 328);
        assert!(offset_of!(verbs_context_ops, import_dm) == 336);
        assert!(offset_of!(verbs_context_ops, import_mr) == 344);
        assert!(offset_of!(verbs_context_ops, import_pd) == 352);
        assert!(offset_of!(verbs_context_ops, modify_cq) == 360);
        assert!(offset_of!(verbs_context_ops, modify_qp) == 376);
        assert!(offset_of!(verbs_context_ops, modify_srq) == 392);
        assert!(offset_of!(verbs_context_ops, modify_wq) == 400);
        assert!(offset_of!(verbs_context_ops, open_qp) == 408);
        assert!(offset_of!(verbs_context_ops, open_xrcd) == 416);
        assert!(offset_of!(verbs_context_ops, poll_cq) == 424);
        assert!(offset_of!(verbs_context_ops, post_recv) == 432);
        assert!(offset_of!(verbs_context_ops, post_send) == 440);
        assert!(offset_of!(verbs_context_ops, post_srq_recv) == 456);
        assert!(offset_of!(verbs_context_ops, query_device_ex) == 464);
        assert!(offset_of!(verbs_context_ops, query_port) == 480);
        assert!(offset_of!(verbs_context_ops, query_qp) == 488);
        assert!(offset_of!(verbs_context_ops, query_rt_values) == 504);
        assert!(offset_of!(verbs_context_ops, query_srq) == 512);
        assert!(offset_of!(verbs_context_ops, reg_dm_mr) == 528);
        assert!(offset_of!(verbs_context_ops, reg_dmabuf_mr) == 536);
        assert!(offset_of!(verbs_context_ops, reg_mr) == 544);
        assert!(offset_of!(verbs_context_ops, req_notify_cq) == 552);
        assert!(offset_of!(verbs_context_ops, rereg_mr) == 560);
        assert!(offset_of!(verbs_context_ops, resize_cq) == 568);
        assert!(offset_of!(verbs_context_ops, unimport_dm) == 584);
        assert!(offset_of!(verbs_context_ops, unimport_mr) == 592);
        assert!(offset_of!(verbs_context_ops, unimport_pd) == 600);
    }
};

/// A command of the `write` interface: header, the core's structure, the private request.
#[repr(C)]
#[derive(Default)]
pub struct Request<Core, Private> {
    pub header: ib_uverbs_cmd_hdr,
    pub core: Core,
    pub private: Private,
}

/// An extended command of the `write` interface.
#[repr(C)]
#[derive(Default)]
pub struct ExtendedRequest<Core, Private> {
    pub header: ib_uverbs_cmd_hdr,
    pub extended_header: ib_uverbs_ex_cmd_hdr,
    pub core: Core,
    pub private: Private,
}

/// A response: the core's structure, the private response.
#[repr(C)]
#[derive(Default)]
pub struct Response<Core, Private> {
    pub core: Core,
    pub private: Private,
}

/// No private part.
pub type Nothing = [u32; 0];

impl<Core: Default, Private> Request<Core, Private> {
    /// The command with this private part; libibverbs fills in the rest.
    pub fn with(private: Private) -> Self {
        Self {
            header: ib_uverbs_cmd_hdr::default(),
            core: Core::default(),
            private,
        }
    }
}

impl<Core: Default, Private> ExtendedRequest<Core, Private> {
    /// As [`Request::with`].
    pub fn with(private: Private) -> Self {
        Self {
            header: ib_uverbs_cmd_hdr::default(),
            extended_header: ib_uverbs_ex_cmd_hdr::default(),
            core: Core::default(),
            private,
        }
    }
}

impl<Core: Default, Private> Response<Core, Private> {
    /// Room for a response with this private part.
    pub fn with(private: Private) -> Self {
        Self {
            core: Core::default(),
            private,
        }
    }
}

/// Calls a function of libibverbs that sends a command to the kernel. Behind its own arguments it takes
/// the command with its size and, where there is one, room for the response with its size; then what may
/// follow.
macro_rules! command {
    (
        $function:ident($($argument:expr),* $(,)?),
        $request:expr $(, $response:expr)? $(,)? $(; $last:expr)?
    ) => {
        $function(
            $($argument,)*
            core::ptr::from_mut(&mut $request).cast(),
            size_of_val(&$request),
            $(
                core::ptr::from_mut(&mut $response).cast(),
                size_of_val(&$response),
            )?
            $($last)?
        )
    };
}
pub(crate) use command;

const _: () = {
    // Where libibverbs looks for the private part: the size of its own structures.
    assert!(offset_of!(Request<ib_uverbs_get_context, Nothing>, private) == 16);
    assert!(offset_of!(Request<ib_uverbs_alloc_pd, Nothing>, private) == 16);
    assert!(offset_of!(Request<ib_uverbs_reg_mr, Nothing>, private) == 48);
    assert!(offset_of!(Request<ib_uverbs_create_cq, Nothing>, private) == 40);
    assert!(offset_of!(ExtendedRequest<ib_uverbs_ex_create_cq, Nothing>, private) == 56);
    assert!(offset_of!(Request<ib_uverbs_resize_cq, Nothing>, private) == 24);
    assert!(offset_of!(Request<ib_uverbs_create_qp, Nothing>, private) == 64);
    assert!(offset_of!(Request<ib_uverbs_create_srq, Nothing>, private) == 40);
    assert!(offset_of!(Response<ib_uverbs_create_srq_resp, Nothing>, private) == 16);
    assert!(offset_of!(Request<ib_uverbs_modify_srq, Nothing>, private) == 24);
    assert!(offset_of!(Request<ib_uverbs_create_xsrq, Nothing>, private) == 56);
    assert!(offset_of!(Request<ib_uverbs_open_xrcd, Nothing>, private) == 24);
    assert!(offset_of!(Request<ib_uverbs_open_qp, Nothing>, private) == 40);
    assert!(offset_of!(Response<ib_uverbs_get_context_resp, Nothing>, private) == 8);
    assert!(offset_of!(Response<ib_uverbs_alloc_pd_resp, Nothing>, private) == 4);
    assert!(offset_of!(Response<ib_uverbs_create_cq_resp, Nothing>, private) == 8);
    assert!(offset_of!(Response<ib_uverbs_ex_create_cq_resp, Nothing>, private) == 16);
    assert!(offset_of!(Response<ib_uverbs_resize_cq_resp, Nothing>, private) == 8);
    assert!(offset_of!(Response<ib_uverbs_create_qp_resp, Nothing>, private) == 32);
    assert!(offset_of!(ExtendedRequest<ib_uverbs_ex_create_qp, Nothing>, private) == 88);
    assert!(offset_of!(Response<ib_uverbs_ex_create_qp_resp, Nothing>, private) == 40);
    assert!(offset_of!(ExtendedRequest<ib_uverbs_ex_create_wq, Nothing>, private) == 64);
    assert!(offset_of!(Response<ib_uverbs_ex_create_wq_resp, Nothing>, private) == 24);
    assert!(offset_of!(ExtendedRequest<ib_uverbs_ex_modify_wq, Nothing>, private) == 48);
};

// Pointers to commands and responses are untyped here: each comes with its size and is made of the
// generic structures above.
extern "C" {
    pub fn verbs_register_driver_34(ops: *const verbs_device_ops);
    pub fn _verbs_init_and_alloc_context(
        device: *mut ibv_device,
        cmd_fd: c_int,
        alloc_size: usize,
        context_offset: *mut verbs_context,
        driver_id: u32,
    ) -> *mut c_void;
    pub fn verbs_uninit_context(context: *mut verbs_context);
    pub fn verbs_set_ops(context: *mut verbs_context, ops: *const verbs_context_ops);
    pub fn ibv_cmd_get_context(
        context: *mut verbs_context,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_query_device_any(
        context: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex,
        attr_size: usize,
        resp: *mut ib_uverbs_ex_query_device_resp,
        resp_size: *mut usize,
    ) -> c_int;
    pub fn ibv_cmd_query_port(
        context: *mut ibv_context,
        port: u8,
        attr: *mut ibv_port_attr,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_alloc_pd(
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_dealloc_pd(pd: *mut ibv_pd) -> c_int;
    pub fn ibv_cmd_reg_mr(
        pd: *mut ibv_pd,
        addr: *mut c_void,
        length: usize,
        hca_va: u64,
        access: c_int,
        mr: *mut verbs_mr,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_rereg_mr(
        mr: *mut verbs_mr,
        flags: u32,
        addr: *mut c_void,
        length: usize,
        hca_va: u64,
        access: c_int,
        pd: *mut ibv_pd,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_reg_dmabuf_mr(
        pd: *mut ibv_pd,
        offset: u64,
        length: usize,
        iova: u64,
        fd: c_int,
        access: c_int,
        mr: *mut verbs_mr,
        link: *mut c_void,
    ) -> c_int;
    pub fn ibv_cmd_query_mr(pd: *mut ibv_pd, mr: *mut verbs_mr, handle: u32) -> c_int;
    pub fn ibv_cmd_advise_mr(
        pd: *mut ibv_pd,
        advice: ib_uverbs_advise_mr_advice,
        flags: u32,
        sg_list: *mut ibv_sge,
        num_sge: u32,
    ) -> c_int;
    pub fn ibv_cmd_dereg_mr(mr: *mut verbs_mr) -> c_int;
    pub fn ibv_cmd_create_cq_ex(
        context: *mut ibv_context,
        attr: *const ibv_cq_init_attr_ex,
        cq: *mut verbs_cq,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
        cmd_flags: u32,
    ) -> c_int;
    pub fn ibv_cmd_resize_cq(
        cq: *mut ibv_cq,
        cqe: c_int,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_cq(cq: *mut ibv_cq) -> c_int;
    pub fn ibv_cmd_create_qp_ex(
        context: *mut ibv_context,
        qp: *mut verbs_qp,
        attr: *mut ibv_qp_init_attr_ex,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_create_qp_ex2(
        context: *mut ibv_context,
        qp: *mut verbs_qp,
        attr: *mut ibv_qp_init_attr_ex,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_create_flow(
        qp: *mut ibv_qp,
        flow: *mut ibv_flow,
        attr: *mut ibv_flow_attr,
        ucmd: *mut c_void,
        ucmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_flow(flow: *mut ibv_flow) -> c_int;
    pub fn ibv_cmd_create_wq(
        context: *mut ibv_context,
        attr: *mut ibv_wq_init_attr,
        wq: *mut ibv_wq,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_modify_wq(
        wq: *mut ibv_wq,
        attr: *mut ibv_wq_attr,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_wq(wq: *mut ibv_wq) -> c_int;
    pub fn ibv_cmd_create_rwq_ind_table(
        context: *mut ibv_context,
        attr: *mut ibv_rwq_ind_table_init_attr,
        table: *mut ibv_rwq_ind_table,
        resp: *mut ib_uverbs_ex_create_rwq_ind_table_resp,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int;
    pub fn ibv_cmd_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: c_int,
        init_attr: *mut ibv_qp_init_attr,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_modify_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        attr_mask: c_int,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_qp(qp: *mut ibv_qp) -> c_int;
    pub fn ibv_cmd_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub fn ibv_cmd_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    pub fn ibv_cmd_modify_cq(
        cq: *mut ibv_cq,
        attr: *mut ibv_modify_cq_attr,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_alloc_mw(
        pd: *mut ibv_pd,
        kind: ibv_mw_type,
        mw: *mut ibv_mw,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_dealloc_mw(mw: *mut ibv_mw) -> c_int;
    pub fn ibv_cmd_create_srq(
        pd: *mut ibv_pd,
        srq: *mut ibv_srq,
        attr: *mut ibv_srq_init_attr,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_modify_srq(
        srq: *mut ibv_srq,
        attr: *mut ibv_srq_attr,
        mask: c_int,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_query_srq(
        srq: *mut ibv_srq,
        attr: *mut ibv_srq_attr,
        cmd: *mut c_void,
        cmd_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_destroy_srq(srq: *mut ibv_srq) -> c_int;
    pub fn ibv_cmd_create_srq_ex(
        context: *mut ibv_context,
        srq: *mut verbs_srq,
        attr: *mut ibv_srq_init_attr_ex,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_open_xrcd(
        context: *mut ibv_context,
        xrcd: *mut verbs_xrcd,
        xrcd_size: c_int,
        attr: *mut ibv_xrcd_init_attr,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_close_xrcd(xrcd: *mut verbs_xrcd) -> c_int;
    pub fn ibv_cmd_open_qp(
        context: *mut ibv_context,
        qp: *mut verbs_qp,
        qp_size: c_int,
        attr: *mut ibv_qp_open_attr,
        cmd: *mut c_void,
        cmd_size: usize,
        resp: *mut c_void,
        resp_size: usize,
    ) -> c_int;
    pub fn ibv_cmd_free_dm(dm: *mut verbs_dm) -> c_int;
    pub fn ibv_cmd_reg_dm_mr(
        pd: *mut ibv_pd,
        dm: *mut verbs_dm,
        offset: u64,
        length: usize,
        access: c_uint,
        mr: *mut verbs_mr,
        link: *mut c_void,
    ) -> c_int;
    // Exported for all, but declared only in the private header.
    pub fn ibv_dontfork_range(base: *mut c_void, size: usize) -> c_int;
    pub fn ibv_dofork_range(base: *mut c_void, size: usize) -> c_int;
}
