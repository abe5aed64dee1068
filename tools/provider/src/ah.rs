// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Address handles: a path to a peer, resolved once and written into every datagram.
//!
//! The kernel has no part in it: the device takes the path from the work request and the source
//! address from its own table.

use core::ffi::c_int;

use ferrite_abi::{AddressVector, Plain, VLAN_NONE};

use crate::fail;
use crate::heap;
use crate::object::or_null;
use crate::sys::*;

/// An address handle.
#[repr(C)]
pub struct Ah {
    verbs: ibv_ah,
    address_vector: AddressVector,
}

impl Ah {
    /// The address vector of a handle.
    ///
    /// # Safety
    ///
    /// `ah` is a live handle of this provider.
    pub(crate) unsafe fn address_vector(ah: *mut ibv_ah) -> AddressVector {
        // SAFETY: the handle is live, by the caller; `create_ah` made it, with the `ibv_ah` at the start of
        // an `Ah`.
        unsafe { (*ah.cast::<Ah>()).address_vector }
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

/// The identifier in what the kernel tells of an interface under `/proc/net/vlan`.
fn vlan_identifier(text: &[u8]) -> Option<u16> {
    const NAME: &[u8] = b"VID: ";
    let at = text.windows(NAME.len()).position(|part| part == NAME)?;
    let digits = &text[at + NAME.len()..];
    let end = digits
        .iter()
        .position(|digit| !digit.is_ascii_digit())
        .unwrap_or(digits.len());
    core::str::from_utf8(&digits[..end])
        .ok()?
        .parse()
        .ok()
        .filter(|&vlan| vlan < 0x1000)
}

/// The VLAN of an interface, if it is one.
fn vlan_of(interface: u32) -> Option<u16> {
    const DIRECTORY: &[u8] = b"/proc/net/vlan/";
    let mut path = [0u8; DIRECTORY.len() + libc::IF_NAMESIZE];
    path[..DIRECTORY.len()].copy_from_slice(DIRECTORY);
    let mut text = [0u8; 512];
    // SAFETY: after the directory there is room for the name of an interface, which ends with a
    // zero; the file is closed again, and no more is read than there is room for.
    let length = unsafe {
        let name = path.as_mut_ptr().add(DIRECTORY.len());
        if libc::if_indextoname(interface, name.cast()).is_null() {
            return None;
        }
        let file = libc::open(path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            // There is one for each VLAN.
            return None;
        }
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        length
    };
    vlan_identifier(text.get(..usize::try_from(length).ok()?)?)
}

/// The VLAN that the interface of a source GID is in.
///
/// # Safety
///
/// `context` is open.
unsafe fn source_vlan(
    context: *mut ibv_context,
    port: u8,
    index: u8,
) -> Result<Option<u16>, c_int> {
    let mut entry = ibv_gid_entry::default();
    // SAFETY: by the caller; `entry` has the size that is said.
    let result = unsafe {
        _ibv_query_gid_ex(
            context,
            port.into(),
            index.into(),
            &mut entry,
            0,
            size_of_val(&entry),
        )
    };
    match result {
        0 if entry.ndev_ifindex == 0 => Ok(None),
        0 => Ok(vlan_of(entry.ndev_ifindex)),
        errno => Err(errno),
    }
}

/// What a function of libibverbs means that returns a negative number: that of an error, or -1 with
/// it in `errno`.
fn resolve_error(result: c_int) -> c_int {
    match result {
        -1 => std::io::Error::last_os_error()
            .raw_os_error()
            .filter(|&errno| errno != 0)
            .unwrap_or(libc::EINVAL),
        result => result.saturating_abs(),
    }
}

/// What the attributes alone say; MAC address and VLAN are yet to be found.
fn address_vector(attr: &ibv_ah_attr) -> Result<AddressVector, c_int> {
    // Ports are counted from 1 in the verbs, and there is nothing but global addresses on Ethernet.
    let (Some(port), true) = (attr.port_num.checked_sub(1), attr.is_global != 0) else {
        return Err(libc::EINVAL);
    };
    Ok(AddressVector {
        vlan: VLAN_NONE,
        // SAFETY: all members of the union are plain bytes.
        gid: unsafe { attr.grh.dgid.raw },
        source_gid_index: u16::from(attr.grh.sgid_index),
        hop_limit: if attr.grh.hop_limit == 0 {
            64
        } else {
            attr.grh.hop_limit
        },
        traffic_class: attr.grh.traffic_class,
        // It has 20 bits; what a program leaves in the others means nothing.
        flow_label: attr.grh.flow_label & 0xf_ffff,
        port,
        ..AddressVector::zeroed()
    })
}

pub(crate) unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the consumer passes a live domain and its attributes.
    let (context, given) = unsafe { ((*pd).context, *attr) };
    let mut address_vector = match address_vector(&given) {
        Ok(address_vector) => address_vector,
        Err(errno) => return fail(errno),
    };
    let vlan = match multicast_mac(&address_vector.gid) {
        Some(mac) => {
            address_vector.mac = mac;
            // SAFETY: the context is open.
            match unsafe { source_vlan(context, given.port_num, given.grh.sgid_index) } {
                Ok(vlan) => vlan,
                Err(errno) => return fail(errno),
            }
        }
        None => {
            let mut vlan = VLAN_NONE;
            // SAFETY: the context is open, the attributes are the consumer's, and there is room
            // for MAC address and VLAN.
            let result = unsafe {
                ibv_resolve_eth_l2_from_gid(
                    context,
                    attr,
                    address_vector.mac.as_mut_ptr(),
                    &mut vlan,
                )
            };
            if result != 0 {
                return fail(resolve_error(result));
            }
            (vlan < 0x1000).then_some(vlan)
        }
    };
    if let Some(vlan) = vlan {
        address_vector.vlan = vlan | (u16::from(given.sl & 7) << 13);
    }
    let ah = heap::boxed(Ah {
        verbs: ibv_ah {
            context,
            pd,
            handle: 0,
        },
        address_vector,
    });
    or_null(ah.map(Box::into_raw))
}

pub(crate) unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: it came from `create_ah`, and its consumer is done with it. Work requests hold a
    // copy of the address vector.
    drop(unsafe { Box::from_raw(ah.cast::<Ah>()) });
    0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A handle that no kernel was asked about.
    pub(crate) fn alone(address_vector: AddressVector) -> Box<Ah> {
        Box::new(Ah {
            verbs: ibv_ah::default(),
            address_vector,
        })
    }

    #[test]
    fn an_address_vector_says_what_the_attributes_say_and_no_more() {
        let mut attr = ibv_ah_attr {
            is_global: 1,
            port_num: 1,
            // Means something on InfiniBand only.
            dlid: 0xffff,
            src_path_bits: 0xff,
            static_rate: 0xff,
            ..Default::default()
        };
        attr.grh.dgid.raw = core::array::from_fn(|n| n as u8);
        attr.grh.flow_label = 0xfff1_2345;
        attr.grh.sgid_index = 3;
        attr.grh.traffic_class = 0x62;
        let found = address_vector(&attr).unwrap();
        let expected = AddressVector {
            vlan: VLAN_NONE,
            gid: core::array::from_fn(|n| n as u8),
            source_gid_index: 3,
            hop_limit: 64,
            traffic_class: 0x62,
            flow_label: 0x1_2345,
            ..AddressVector::zeroed()
        };
        assert_eq!(found, expected);
        (attr.port_num, attr.grh.hop_limit) = (2, 1);
        let found = address_vector(&attr).unwrap();
        assert_eq!((found.port, found.hop_limit), (1, 1));
        for (port_num, is_global) in [(0, 1), (1, 0)] {
            (attr.port_num, attr.is_global) = (port_num, is_global);
            assert_eq!(address_vector(&attr), Err(libc::EINVAL));
        }
    }

    #[test]
    fn the_kernel_tells_the_identifier_of_a_vlan() {
        let text = b"eth0.7  VID: 7\t REORDER_HDR: 1  dev->priv_flags: 1021\n";
        assert_eq!(vlan_identifier(text), Some(7));
        assert_eq!(vlan_identifier(b"a  VID: 4094"), Some(4094));
        for text in [
            &b"VID: 4096"[..],
            b"VID: ",
            b"VID: x",
            b"no word of it",
            b"",
        ] {
            assert_eq!(vlan_identifier(text), None);
        }
        // The loopback interface is none.
        assert_eq!(vlan_of(1), None);
        assert_eq!(vlan_of(u32::MAX), None);
    }

    #[test]
    fn no_error_of_libibverbs_becomes_another() {
        assert_eq!(resolve_error(-libc::EHOSTUNREACH), libc::EHOSTUNREACH);
        for errno in [libc::ENODEV, libc::ENOMEM] {
            // SAFETY: the location of the calling thread's `errno` is always valid.
            unsafe { *libc::__errno_location() = errno };
            assert_eq!(resolve_error(-1), errno);
        }
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = 0 };
        assert_eq!(resolve_error(-1), libc::EINVAL);
    }

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
