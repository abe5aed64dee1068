// SPDX-License-Identifier: GPL-2.0

//! Addresses and headers of Ethernet.

use crate::bindings;
use kernel::fmt;

/// The address of an Ethernet interface, or of a group of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// All interfaces.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// A random one that is locally administered.
    pub fn random() -> Self {
        let mut bytes = [0; 6];
        // SAFETY: There is room for the six bytes of an address.
        unsafe { bindings::eth_random_addr(bytes.as_mut_ptr()) };
        Self(bytes)
    }

    /// Whether it is that of a group: multicast, or broadcast.
    #[inline]
    pub const fn is_group(&self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether it is not of those that makers of interfaces give away.
    #[inline]
    pub const fn is_locally_administered(&self) -> bool {
        self.0[0] & 2 != 0
    }

    /// Whether it can be the address of an interface: not that of a group, and not all zeroes.
    #[inline]
    pub const fn is_valid(&self) -> bool {
        let zero = matches!(self.0, [0, 0, 0, 0, 0, 0]);
        !self.is_group() && !zero
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// What a frame begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EthernetHeader {
    /// Who it is for.
    pub destination: MacAddress,
    /// Whom it is from.
    pub source: MacAddress,
    /// `ETH_P_*` of what is in it, or its length where that is below 1536.
    pub protocol: u16,
}

impl EthernetHeader {
    /// Bytes of it.
    pub const SIZE: usize = 14;

    /// As it is in a frame.
    pub const fn from_bytes(bytes: &[u8; Self::SIZE]) -> Self {
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, p0, p1] = *bytes;
        Self {
            destination: MacAddress([d0, d1, d2, d3, d4, d5]),
            source: MacAddress([s0, s1, s2, s3, s4, s5]),
            protocol: u16::from_be_bytes([p0, p1]),
        }
    }
}

/// `ETH_P_8021Q`: what follows is the tag of a VLAN.
pub const PROTOCOL_VLAN: u16 = bindings::ETH_P_8021Q as u16;

/// What the tag of a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VlanTag {
    /// The kind of it: [`PROTOCOL_VLAN`], or [`PROTOCOL_SERVICE_VLAN`].
    pub protocol: u16,
    /// The VLAN.
    pub vlan: u16,
}

impl VlanTag {
    /// The tag of this kind with these 16 bits, of which the lower twelve are the VLAN. Above them is the priority.
    pub const fn new(protocol: u16, bits: u16) -> Self {
        Self {
            protocol,
            vlan: bits & 0xfff,
        }
    }
}

/// `ETH_P_8021AD`: what follows is the tag of a provider, around those of its customers.
pub const PROTOCOL_SERVICE_VLAN: u16 = bindings::ETH_P_8021AD as u16;

/// Bytes of the tag of a VLAN, which comes between the header of a frame and what is in it.
pub const VLAN_TAG: usize = 4;
