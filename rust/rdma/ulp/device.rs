// SPDX-License-Identifier: GPL-2.0

//! What a kernel user may know of a device.

use crate::bindings;
use crate::rdma::{DeviceName, Extension, Gid, GidAttr, GidType, Mtu};
use core::marker::PhantomData;
use kernel::error::{from_err_ptr, to_result};
use kernel::prelude::*;

/// A device, as a client sees it.
///
/// # Invariants
///
/// `raw` is registered for `'a`.
pub struct Device<'a> {
    raw: *mut bindings::ib_device,
    _p: PhantomData<&'a ()>,
}

/// The state of a port, as a client sees it.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// Whether it can send and receive.
    pub active: bool,
    /// The largest payload that fits the link.
    pub active_mtu: Mtu,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// The largest message.
    pub max_msg_size: u32,
}

impl<'a> Device<'a> {
    /// # Safety
    ///
    /// `raw` has to be registered for `'a`.
    pub(in crate::rdma) unsafe fn from_raw(raw: *mut bindings::ib_device) -> Self {
        // INVARIANT: The caller vouches for that.
        Self {
            raw,
            _p: PhantomData,
        }
    }

    /// The name.
    pub fn name(&self) -> DeviceName {
        // SAFETY: By the type invariant the device is registered, so that it is not freed.
        unsafe { DeviceName::read(self.raw) }
    }

    /// How many pages a region may have that is registered by work request.
    pub fn max_registered_pages(&self) -> u32 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.max_fast_reg_page_list_len }
    }

    /// The page sizes that a region may have, a bit each.
    pub fn page_sizes(&self) -> u64 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.page_size_cap }
    }

    pub(super) fn kernel_cap_flags(&self) -> u64 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.kernel_cap_flags }
    }

    /// Whether it has something that the core has no name for.
    pub fn has(&self, extension: &Extension) -> bool {
        extension.is_among(self.kernel_cap_flags())
    }

    /// How many RDMA reads a queue pair may have under way, and be asked for at a time.
    pub fn max_reads(&self) -> u8 {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attributes do not change.
        let attrs = unsafe { &(*self.raw).attrs };
        let most = attrs.max_qp_rd_atom.min(attrs.max_qp_init_rd_atom);
        most.clamp(0, u8::MAX.into()) as u8
    }

    /// Whether it has atomic operations.
    pub fn has_atomics(&self) -> bool {
        // SAFETY: By the type invariant the device is registered, so that it is not freed; the
        // attribute does not change.
        unsafe { (*self.raw).attrs.atomic_cap != bindings::ib_atomic_cap_IB_ATOMIC_NONE }
    }

    /// The state of a port.
    pub fn port(&self, port: u32) -> Result<Port> {
        let mut attr: bindings::ib_port_attr = pin_init::zeroed();
        // SAFETY: By the type invariant the device is registered, so that it is not freed; `attr` is a
        // local, and the function checks `port`.
        to_result(unsafe { bindings::ib_query_port(self.raw, port, &mut attr) })?;
        Ok(Port {
            active: attr.state == bindings::ib_port_state_IB_PORT_ACTIVE,
            active_mtu: Mtu::from_raw(attr.active_mtu).ok_or(EINVAL)?,
            gid_tbl_len: attr.gid_tbl_len as u32,
            max_msg_size: attr.max_msg_sz,
        })
    }

    /// The first RoCEv2 GID of a port, with its index and the MAC address it sends from; one of an
    /// IPv4 address if there is.
    pub fn roce_v2_gid(&self, port: u32) -> Result<(u8, Gid, [u8; 6])> {
        let mut found = None;
        for index in 0..self.port(port)?.gid_tbl_len.min(256) {
            // SAFETY: By the type invariant the device is registered, so that it is not freed; the
            // function checks port and index.
            let attr = unsafe { bindings::rdma_get_gid_attr(self.raw, port, index as c_int) };
            let Ok(attr) = from_err_ptr(attr.cast_mut()) else {
                continue;
            };
            // SAFETY: `rdma_get_gid_attr` has counted the entry for us, until it is put below; an entry
            // that is counted does not change.
            let entry = unsafe { GidAttr::from_raw(attr) };
            let (gid, gid_type, l2) = (entry.gid(), entry.gid_type(), entry.l2());
            // SAFETY: `rdma_get_gid_attr` has counted the entry for us, and it is not used any more.
            unsafe { bindings::rdma_put_gid_attr(attr) };
            let Ok((_, mac)) = l2 else {
                continue;
            };
            if gid_type == Some(GidType::RoceV2) && (gid.is_ipv4() || found.is_none()) {
                found = Some((index as u8, gid, mac));
                if gid.is_ipv4() {
                    break;
                }
            }
        }
        found.ok_or(ENOENT)
    }
}
