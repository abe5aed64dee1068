// SPDX-License-Identifier: GPL-2.0

//! Addresses of IP, as the connection manager has them.

use crate::bindings;
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use core::ptr;
#[cfg(not(rdma_cm_no_tests))]
use kernel::prelude::*;

/// An address as C has it.
pub(super) enum Address {
    V4(bindings::sockaddr_in),
    V6(bindings::sockaddr_in6),
}

impl Address {
    pub(super) fn new(address: &SocketAddr) -> Self {
        match address {
            SocketAddr::V4(address) => {
                let mut v4: bindings::sockaddr_in = pin_init::zeroed();
                v4.sin_family = bindings::AF_INET as u16;
                v4.sin_port = address.port().to_be();
                v4.sin_addr.s_addr = u32::from(*address.ip()).to_be();
                Self::V4(v4)
            }
            SocketAddr::V6(address) => {
                let mut v6: bindings::sockaddr_in6 = pin_init::zeroed();
                v6.sin6_family = bindings::AF_INET6 as u16;
                v6.sin6_port = address.port().to_be();
                v6.sin6_flowinfo = address.flowinfo().to_be();
                v6.sin6_addr.in6_u.u6_addr8 = address.ip().octets();
                v6.sin6_scope_id = address.scope_id();
                Self::V6(v6)
            }
        }
    }

    /// Reads one; `None` if it is of another family.
    ///
    /// # Safety
    ///
    /// `raw` has to be valid for reads, and begin with an address of the family that it says.
    pub(super) unsafe fn read(
        raw: *const bindings::__kernel_sockaddr_storage,
    ) -> Option<SocketAddr> {
        // SAFETY: All addresses begin with their family, as this does, and the storage has room for any.
        let v4 = unsafe { raw.cast::<bindings::sockaddr_in>().read_unaligned() };
        match u32::from(v4.sin_family) {
            bindings::AF_INET => {
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::from((ip, u16::from_be(v4.sin_port))))
            }
            bindings::AF_INET6 => {
                // SAFETY: It says that it is one of these; the storage has room for it.
                let v6 = unsafe { raw.cast::<bindings::sockaddr_in6>().read_unaligned() };
                // SAFETY: All views of the union are plain data.
                let ip = Ipv6Addr::from(unsafe { v6.sin6_addr.in6_u.u6_addr8 });
                let flow = u32::from_be(v6.sin6_flowinfo);
                let port = u16::from_be(v6.sin6_port);
                Some(SocketAddrV6::new(ip, port, flow, v6.sin6_scope_id).into())
            }
            _ => None,
        }
    }

    pub(super) fn as_ptr(&mut self) -> *mut bindings::sockaddr {
        match self {
            Self::V4(address) => ptr::from_mut(address).cast(),
            Self::V6(address) => ptr::from_mut(address).cast(),
        }
    }
}

#[cfg(not(rdma_cm_no_tests))]
#[kunit_tests(rust_rdma_cm_address)]
mod tests {
    use super::*;
    use core::net::SocketAddrV4;

    #[test]
    fn addresses_are_in_network_byte_order() -> Result {
        let v4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 2, 3), 4791);
        let Address::V4(raw) = Address::new(&v4.into()) else {
            return Err(EINVAL);
        };
        assert_eq!(u32::from(raw.sin_family), bindings::AF_INET);
        assert_eq!(raw.sin_port.to_ne_bytes(), [0x12, 0xb7]);
        assert_eq!(raw.sin_addr.s_addr.to_ne_bytes(), [10, 1, 2, 3]);

        let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x12, 0x3456);
        let v6 = SocketAddrV6::new(ip, 4791, 0, 7);
        let Address::V6(raw) = Address::new(&v6.into()) else {
            return Err(EINVAL);
        };
        assert_eq!(u32::from(raw.sin6_family), bindings::AF_INET6);
        assert_eq!(raw.sin6_port.to_ne_bytes(), [0x12, 0xb7]);
        // SAFETY: All views of the union are plain data.
        let bytes = unsafe { raw.sin6_addr.in6_u.u6_addr8 };
        assert_eq!(bytes, ip.octets());
        assert_eq!(raw.sin6_scope_id, 7);
        Ok(())
    }

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let v4 = SocketAddrV4::new(Ipv4Addr::new(10, 1, 2, 3), 815);
        let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x12, 0x3456);
        let v6 = SocketAddrV6::new(ip, 815, 9, 7);
        for address in [SocketAddr::from(v4), v6.into()] {
            let mut storage: bindings::__kernel_sockaddr_storage = pin_init::zeroed();
            let to = ptr::from_mut(&mut storage);
            // SAFETY: The storage has room for an address of any family, and is of plain data.
            unsafe {
                match Address::new(&address) {
                    Address::V4(raw) => to.cast::<bindings::sockaddr_in>().write_unaligned(raw),
                    Address::V6(raw) => to.cast::<bindings::sockaddr_in6>().write_unaligned(raw),
                }
            }
            // SAFETY: It was written just now.
            assert_eq!(unsafe { Address::read(&storage) }, Some(address));
        }
        let storage: bindings::__kernel_sockaddr_storage = pin_init::zeroed();
        // SAFETY: It says that it is of no family.
        assert_eq!(unsafe { Address::read(&storage) }, None);
    }
}
