// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Address handles: a path to a peer, resolved once and written into every datagram.
//!
//! The kernel has no part in it: the device takes the path from the work request and the source
//! address from its own table.

use core::ffi::c_int;

use ferrite_abi::{Path, Plain, VLAN_NONE};

use crate::fail;
use crate::sys::*;

/// An address handle.
#[repr(C)]
pub struct Ah {
    verbs: ibv_ah,
    path: Path,
}

impl Ah {
    /// The path of a handle.
    ///
    /// # Safety
    ///
    /// `ah` is a live handle of this provider.
    pub(crate) unsafe fn path(ah: *mut ibv_ah) -> Path {
        // SAFETY: the `ibv_ah` is at the start of an `Ah`.
        unsafe { (*ah.cast::<Ah>()).path }
    }
}

/// What is sent to a multicast group goes to a MAC address made of the group's.
fn multicast_mac(gid: &[u8; 16]) -> Option<[u8; 6]> {
    let ipv4 = gid[..10] == [0; 10] && gid[10..12] == [0xff; 2];
    if ipv4 && gid[12] & 0xf0 == 0xe0 {
        Some([0x01, 0x00, 0x5e, gid[13] & 0x7f, gid[14], gid[15]])
    } else if gid[0] == 0xff {
        Some([0x33, 0x33, gid[12], gid[13], gid[14], gid[15]])
    } else {
        None
    }
}

pub(crate) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the consumer passes a live domain and its attributes.
    let (context, given) = unsafe { ((*pd).context, *attr) };
    if given.is_global == 0 {
        // There is nothing but global addresses on Ethernet.
        return fail(libc::EINVAL);
    }
    // SAFETY: all members of the union are plain bytes.
    let gid = unsafe { given.grh.dgid.raw };
    let mut path = Path {
        vlan: VLAN_NONE,
        gid,
        source_gid_index: u16::from(given.grh.sgid_index),
        hop_limit: if given.grh.hop_limit == 0 {
            64
        } else {
            given.grh.hop_limit
        },
        traffic_class: given.grh.traffic_class,
        flow_label: given.grh.flow_label,
        ..Path::zeroed()
    };
    match multicast_mac(&gid) {
        Some(mac) => path.mac = mac,
        None => {
            let mut vlan = VLAN_NONE;
            // SAFETY: the context is open, the attributes are the consumer's, and there is room
            // for MAC address and VLAN.
            let result = unsafe {
                ibv_resolve_eth_l2_from_gid(context, attr, path.mac.as_mut_ptr(), &mut vlan)
            };
            if result != 0 {
                return fail(result.abs());
            }
            if vlan < 0x1000 {
                path.vlan = vlan | (u16::from(given.sl & 7) << 13);
            }
        }
    }
    let ah = Box::new(Ah {
        verbs: ibv_ah {
            context,
            pd,
            handle: 0,
        },
        path,
    });
    Box::into_raw(ah).cast()
}

pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: it came from `create_ah`, and its consumer is done with it. Work requests hold a
    // copy of the path.
    drop(unsafe { Box::from_raw(ah.cast::<Ah>()) });
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multicast_groups_have_their_mac_addresses() {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 239, 200, 1, 2]);
        assert_eq!(multicast_mac(&gid), Some([1, 0, 0x5e, 72, 1, 2]));
        gid[12] = 10;
        assert_eq!(multicast_mac(&gid), None);
        gid[0] = 0xff;
        gid[10..12].copy_from_slice(&[0; 2]);
        assert_eq!(multicast_mac(&gid), Some([0x33, 0x33, 10, 200, 1, 2]));
    }
}
