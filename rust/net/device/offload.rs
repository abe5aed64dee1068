// SPDX-License-Identifier: GPL-2.0

//! What a device does for who sends and receives: checksums, segments, tags and hashes.

use super::{Device, Driver};
use crate::bindings;
use crate::net::{Ops, Rtnl, PROTOCOL_SERVICE_VLAN};
use kernel::error::from_result;
use kernel::prelude::*;

/// A device whose [offloads](Offloads) do not only concern frames of the driver's: some are set in the device.
pub trait OffloadOps: Driver {
    /// Others are wanted, of those that it has. May sleep.
    fn set_offloads(dev: &Device<Self>, rtnl: &Rtnl, wanted: Offloads) -> Result;
}

/// A device that cuts frames into segments, but not every one.
pub trait SegmentOps: Driver {
    /// Whether it can cut this one, which is of IP, behind tags of 802.1Q at most; else that is done before. In softirqs, or
    /// with bottom halves disabled.
    fn can_segment(dev: &Device<Self>, frame: &ToSegment) -> bool;
}

/// A frame that is to be cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToSegment {
    /// Bytes of data in each.
    pub size: u16,
    /// Bytes of all of it.
    pub length: usize,
    /// Bytes of the header of IP, with options and extensions.
    pub ip_header: usize,
    /// Whether that is of version 6.
    pub is_ipv6: bool,
}

/// What a device does for who sends and receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads(pub(super) u64);

impl Offloads {
    /// Nothing.
    pub const NONE: Self = Self(0);
    /// Frames that are to be sent may be in several pieces.
    pub const SCATTER_GATHER: Self = Self(1 << bindings::NETIF_F_SG_BIT);
    /// It computes a checksum, wherever that is in a frame.
    pub const CHECKSUM: Self = Self(1 << bindings::NETIF_F_HW_CSUM_BIT);
    /// It cuts streams of TCP into segments, over both versions of IP. Needs the two above.
    pub const TCP_SEGMENTATION: Self =
        Self(1 << bindings::NETIF_F_TSO_BIT | 1 << bindings::NETIF_F_TSO6_BIT);
    /// It inserts tags of VLANs.
    pub const VLAN_INSERT: Self = Self(1 << bindings::NETIF_F_HW_VLAN_CTAG_TX_BIT);
    /// It takes tags of VLANs out.
    pub const VLAN_STRIP: Self = Self(1 << bindings::NETIF_F_HW_VLAN_CTAG_RX_BIT);
    /// It checks checksums of what it receives.
    pub const RX_CHECKSUM: Self = Self(1 << bindings::NETIF_F_RXCSUM_BIT);
    /// It computes a hash over the addresses and ports of what it receives.
    pub const RX_HASH: Self = Self(1 << bindings::NETIF_F_RXHASH_BIT);

    /// Those of frames that have a tag as well.
    pub(super) const OF_VLANS: Self = Self::SCATTER_GATHER
        .with(Self::CHECKSUM)
        .with(Self::TCP_SEGMENTATION);

    /// These and others.
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// Whether all of those are among these.
    pub const fn has(self, those: Self) -> bool {
        self.0 & those.0 == those.0
    }
}

impl<D: Driver> Device<D> {
    /// Its offloads that are on.
    #[inline]
    pub fn offloads(&self) -> Offloads {
        // SAFETY: The reference keeps the device.
        Offloads(unsafe { bindings::netdev_features(self.as_raw()) })
    }

    /// From now on frames that it cuts into segments have at most so many bytes.
    pub fn set_most_to_segment(&self, _rtnl: &Rtnl, bytes: u32) {
        // SAFETY: The reference keeps the device; RTNL is what changes of the field are made under.
        unsafe { bindings::netif_set_tso_max_size(self.as_raw(), bytes) }
    }
}

impl<D: OffloadOps> Ops<D> {
    /// Has the driver told of offloads that are turned on or off.
    pub const fn with_offloads(mut self) -> Self {
        self.netdev.ndo_set_features = Some(set_features::<D>);
        self
    }
}

impl<D: SegmentOps> Ops<D> {
    /// Has the driver asked which frames the device can cut; without, it is given all that are not too long.
    pub const fn with_segments(mut self) -> Self {
        self.netdev.ndo_features_check = Some(features_check::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with RTNL held.
unsafe extern "C" fn set_features<D: OffloadOps>(
    dev: *mut bindings::net_device,
    features: bindings::netdev_features_t,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| D::set_offloads(device, &rtnl, Offloads(features)).map(|()| 0))
}

/// Whether a frame is of IP, behind tags of 802.1Q at most, that has a tag of protocol `beside` it, `outer` behind its
/// addresses, and `inner` behind all tags that are there.
pub(in crate::net) fn is_ip_behind_tag(beside: Option<u16>, outer: u16, inner: u16) -> bool {
    beside != Some(PROTOCOL_SERVICE_VLAN)
        && outer != PROTOCOL_SERVICE_VLAN
        && matches!(u32::from(inner), bindings::ETH_P_IP | bindings::ETH_P_IPV6)
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with a buffer that is to be sent by it.
unsafe extern "C" fn features_check<D: SegmentOps>(
    skb: *mut bindings::sk_buff,
    dev: *mut bindings::net_device,
    features: bindings::netdev_features_t,
) -> bindings::netdev_features_t {
    // SAFETY: The caller vouches for both.
    let (device, features) = unsafe {
        (
            Device::<D>::from_raw(dev),
            bindings::vlan_features_check(skb, features),
        )
    };
    // SAFETY: The caller vouches for the buffer.
    if !unsafe { bindings::skb_is_gso(skb) } {
        return features;
    }
    // Else it was joined by another device that has looked at the checksums: nothing says where those of the parts belong.
    // SAFETY: The caller vouches for the buffer.
    let has_places = unsafe { bindings::skb_ip_summed(skb) } == bindings::CHECKSUM_PARTIAL as u8;
    // SAFETY: The caller vouches for the buffer, which as one that is to be cut has headers.
    let frame = unsafe {
        let ip = bindings::skb_network_offset(skb);
        ToSegment {
            size: bindings::skb_gso_size(skb),
            length: bindings::skb_length(skb) as usize,
            ip_header: (bindings::skb_transport_offset(skb) - ip).max(0) as usize,
            is_ipv6: bindings::skb_gso_type(skb) & bindings::SKB_GSO_TCPV6 as u32 != 0,
        }
    };
    // SAFETY: The caller vouches for the buffer.
    let (beside, outer, inner) = unsafe {
        (
            bindings::skb_vlan_tag_present(skb)
                .then(|| u16::from_be(bindings::skb_vlan_proto(skb))),
            u16::from_be(bindings::skb_protocol_field(skb)),
            u16::from_be(bindings::vlan_get_protocol(skb)),
        )
    };
    if has_places && is_ip_behind_tag(beside, outer, inner) && D::can_segment(device, &frame) {
        features
    } else {
        // SAFETY: The function gives a constant.
        features & !unsafe { bindings::netif_f_gso_mask() }
    }
}
