// SPDX-License-Identifier: GPL-2.0

//! Which frames a host wants.

use crate::net::{EthernetHeader, MacAddress, VlanTag, PROTOCOL_SERVICE_VLAN, PROTOCOL_VLAN};
use crate::protocol::{FILTER_ALL_MULTICAST, FILTER_PROMISCUOUS};
use kernel::prelude::*;

/// Groups of a host, at most.
const MOST_GROUPS: usize = 128;
/// VLANs of a host, at most: the interface has room for so many, and hosts share it.
const MOST_VLANS: u32 = 64;
/// Numbers of VLANs are below this.
const VLANS: usize = 4096;

/// What a switch may take for a tag: the two kinds there are, and those of before there was a standard for the second.
const TAG_PROTOCOLS: [u16; 5] = [PROTOCOL_VLAN, PROTOCOL_SERVICE_VLAN, 0x9100, 0x9200, 0x9300];

/// What a host wants.
pub(super) struct Filter {
    pub(super) mac: MacAddress,
    /// `FILTER_*`.
    pub(super) flags: u32,
    groups: KVec<MacAddress>,
    vlans: [u64; VLANS / 64],
}

impl Filter {
    /// Frames for `mac`, and for all.
    pub(super) fn new(mac: MacAddress) -> Result<Self> {
        Ok(Self {
            mac,
            flags: 0,
            // It does not grow: that is done with a lock held.
            groups: KVec::with_capacity(MOST_GROUPS, GFP_KERNEL)?,
            vlans: [0; VLANS / 64],
        })
    }

    /// Whether a frame is wanted. What is for somebody whom the I/O unit knows, another host or the machine itself
    /// (`is_somebodys`), is not for those who want all.
    pub(super) fn wants(
        &self,
        header: &EthernetHeader,
        tag: Option<VlanTag>,
        is_somebodys: bool,
    ) -> bool {
        if !self.is_in(tag) {
            return false;
        }
        if self.flags & FILTER_PROMISCUOUS != 0 {
            return !is_somebodys || header.destination == self.mac;
        }
        let to = header.destination;
        to == self.mac
            || to == MacAddress::BROADCAST
            || to.is_group() && (self.flags & FILTER_ALL_MULTICAST != 0 || self.has_group(to))
    }

    /// Whether a host may send a frame that is not trusted: as nobody else, and to its own VLANs. `protocol` is that of what
    /// is in the frame, behind a tag.
    pub(super) fn may_send(
        &self,
        header: &EthernetHeader,
        tag: Option<VlanTag>,
        protocol: u16,
    ) -> bool {
        // A priority without a VLAN is no network's.
        let is_priority = tag.is_some_and(|tag| tag.vlan == 0);
        // Where the first tag goes another may be the one that counts for who gets it.
        let is_nested = TAG_PROTOCOLS.contains(&protocol);
        header.source == self.mac
            && !is_link_control(header.destination, protocol)
            && !is_priority
            && !is_nested
            && self.is_in(tag)
    }

    /// Whether frames with that tag, or without one, are of a network that the host is part of. There is no way to ask for
    /// those of other kinds than the usual one.
    fn is_in(&self, tag: Option<VlanTag>) -> bool {
        let Some(VlanTag { protocol, vlan }) = tag else {
            return true;
        };
        // Number 0 is a priority without a VLAN.
        protocol == PROTOCOL_VLAN && (vlan == 0 || self.has_vlan(vlan))
    }

    pub(super) fn has_group(&self, group: MacAddress) -> bool {
        self.groups.contains(&group)
    }

    /// Adds a group; `ENOSPC` where there are too many.
    pub(super) fn add_group(&mut self, group: MacAddress) -> Result {
        if self.has_group(group) {
            return Ok(());
        }
        self.groups.push_within_capacity(group).map_err(|_| ENOSPC)
    }

    pub(super) fn remove_group(&mut self, group: MacAddress) {
        self.groups.retain(|other| *other != group);
    }

    pub(super) fn has_vlan(&self, vlan: u16) -> bool {
        let word = self.vlans.get(usize::from(vlan) / 64);
        word.is_some_and(|word| word & (1 << (vlan % 64)) != 0)
    }

    /// Whether it may have one more VLAN, or has it already.
    pub(super) fn has_room_for_vlan(&self, vlan: u16) -> bool {
        self.has_vlan(vlan) || self.sizes().1 < MOST_VLANS
    }

    /// How many groups there are, and how many VLANs.
    pub(super) fn sizes(&self) -> (usize, u32) {
        let vlans = self.vlans.iter().map(|word| word.count_ones()).sum();
        (self.groups.len(), vlans)
    }

    pub(super) fn set_vlan(&mut self, vlan: u16, is_wanted: bool) {
        if let Some(word) = self.vlans.get_mut(usize::from(vlan) / 64) {
            let bit = 1 << (vlan % 64);
            *word = if is_wanted { *word | bit } else { *word & !bit };
        }
    }
}

/// Whether a frame is between neighbours on a link, or for what switches agree on: the neighbour of the LAN is the I/O unit, and
/// not its hosts.
fn is_link_control(destination: MacAddress, protocol: u16) -> bool {
    let to_neighbours = match destination.0 {
        // IEEE 802.1Q, 8.6.3 (spanning tree, PAUSE, LACP, 802.1X, LLDP) and 10.5 (MVRP, MMRP).
        [0x01, 0x80, 0xc2, 0x00, 0x00, last] => matches!(last, 0x00..=0x0f | 0x20..=0x2f),
        // Those of one maker (CDP, VTP, DTP, spanning tree by VLAN), which others have, too.
        [0x01, 0x00, 0x0c, 0xcc, 0xcc, last] => matches!(last, 0xcc | 0xcd),
        _ => false,
    };
    // MAC control, slow protocols, 802.1X, LLDP, to whatever address.
    to_neighbours || matches!(protocol, 0x8808 | 0x8809 | 0x888e | 0x88cc)
}

/// The tag of a frame that has it inside, of which `read` gives what follows the header, and the protocol of what is in the
/// frame. Fails where the tag is cut off: drivers fill up short frames, so that it would be another one on the wire.
pub(super) fn tag_of(
    header: &EthernetHeader,
    read: impl FnOnce(&mut [u8]) -> Result,
) -> Result<(Option<VlanTag>, u16)> {
    let protocol = header.protocol;
    if ![PROTOCOL_VLAN, PROTOCOL_SERVICE_VLAN].contains(&protocol) {
        return Ok((None, protocol));
    }
    let mut behind = [0; 4];
    read(&mut behind)?;
    let [tag, inside] = [[behind[0], behind[1]], [behind[2], behind[3]]].map(u16::from_be_bytes);
    Ok((Some(VlanTag::new(protocol, tag)), inside))
}

#[kunit_tests(rust_rdma_split_filter)]
mod tests {
    use super::*;

    fn tag(vlan: u16) -> Option<VlanTag> {
        Some(VlanTag::new(PROTOCOL_VLAN, vlan))
    }

    /// What is in a frame.
    const INSIDE: u16 = 0x0800;
    const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
    const OTHER: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
    const GROUP: MacAddress = MacAddress([0x33, 0x33, 0, 0, 0, 1]);

    fn to(destination: MacAddress) -> EthernetHeader {
        EthernetHeader {
            destination,
            source: OTHER,
            protocol: 0x0800,
        }
    }

    #[test]
    fn a_tag_that_is_cut_off_is_no_tag_and_not_none() {
        let inside = [0x05, 0x00, 0x08, 0x00];
        for protocol in [PROTOCOL_VLAN, PROTOCOL_SERVICE_VLAN, 0x0800] {
            let header = EthernetHeader {
                protocol,
                ..to(OTHER)
            };
            for length in 0..=inside.len() {
                let found = tag_of(&header, |to| {
                    let from = inside[..length].get(..to.len()).ok_or(EFAULT)?;
                    to.copy_from_slice(from);
                    Ok(())
                });
                let expected = match (protocol, length) {
                    (0x0800, _) => Ok((None, 0x0800)),
                    (_, 4) => Ok((Some(VlanTag::new(protocol, 0x500)), 0x0800)),
                    _ => Err(EFAULT),
                };
                assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn a_host_speaks_to_no_neighbour_on_the_link_and_hides_no_tag() -> Result {
        let mut filter = Filter::new(OWN)?;
        filter.set_vlan(7, true);
        let group = |address| EthernetHeader {
            source: OWN,
            ..to(MacAddress(address))
        };
        for last in 0..=0x30 {
            let standard = group([0x01, 0x80, 0xc2, 0, 0, last]);
            let is_refused = matches!(last, 0..=0x0f | 0x20..=0x2f);
            let other = group([0x01, 0x00, 0x0c, 0xcc, 0xcc, 0xb0 + last]);
            let is_other_refused = matches!(last, 0x1c | 0x1d);
            for tag in [None, tag(7)] {
                assert_eq!(filter.may_send(&standard, tag, INSIDE), !is_refused);
                assert_eq!(filter.may_send(&other, tag, INSIDE), !is_other_refused);
            }
        }
        let header = EthernetHeader {
            source: OWN,
            ..to(OTHER)
        };
        for tag in [None, tag(7)] {
            assert!(filter.may_send(&header, tag, INSIDE));
            let control = [0x8808, 0x8809, 0x888e, 0x88cc];
            for protocol in control {
                assert!(!filter.may_send(&header, tag, protocol));
            }
            for protocol in TAG_PROTOCOLS {
                assert!(!filter.may_send(&header, tag, protocol));
            }
        }
        Ok(())
    }

    #[test]
    fn a_host_gets_what_is_for_it_and_for_all() -> Result {
        let filter = Filter::new(OWN)?;
        assert!(filter.wants(&to(OWN), None, false));
        assert!(filter.wants(&to(MacAddress::BROADCAST), None, false));
        assert!(!filter.wants(&to(OTHER), None, false));
        assert!(!filter.wants(&to(GROUP), None, false));
        Ok(())
    }

    #[test]
    fn a_host_gets_its_groups_while_it_wants_them() -> Result {
        let mut filter = Filter::new(OWN)?;
        filter.add_group(GROUP)?;
        filter.add_group(GROUP)?;
        assert!(filter.wants(&to(GROUP), None, false));
        filter.remove_group(GROUP);
        assert!(!filter.wants(&to(GROUP), None, false));
        filter.flags = FILTER_ALL_MULTICAST;
        assert!(filter.wants(&to(GROUP), None, false));
        assert!(!filter.wants(&to(OTHER), None, false));
        filter.flags = FILTER_PROMISCUOUS;
        assert!(filter.wants(&to(OTHER), None, false));
        // All of its own VLANs.
        assert!(!filter.wants(&to(OTHER), tag(7), false));
        filter.set_vlan(7, true);
        assert!(filter.wants(&to(OTHER), tag(7), false));
        // Whose that is the I/O unit knows.
        assert!(!filter.wants(&to(OTHER), None, true));
        assert!(filter.wants(&to(OWN), None, true));
        Ok(())
    }

    #[test]
    fn there_are_so_many_groups_and_no_more() -> Result {
        let mut filter = Filter::new(OWN)?;
        let group = |number: usize| MacAddress([0x33, 0x33, 0, 0, 1, number as u8]);
        for number in 0..MOST_GROUPS {
            filter.add_group(group(number))?;
        }
        assert_eq!(filter.add_group(GROUP), Err(ENOSPC));
        filter.remove_group(group(3));
        filter.add_group(GROUP)?;
        Ok(())
    }

    #[test]
    fn there_are_so_many_vlans_and_no_more() -> Result {
        let mut filter = Filter::new(OWN)?;
        for vlan in 1..=MOST_VLANS as u16 {
            assert!(filter.has_room_for_vlan(vlan));
            filter.set_vlan(vlan, true);
        }
        assert!(!filter.has_room_for_vlan(4094) && filter.has_room_for_vlan(1));
        filter.set_vlan(7, false);
        assert!(filter.has_room_for_vlan(4094));
        Ok(())
    }

    #[test]
    fn a_host_gets_its_vlans_only() -> Result {
        let mut filter = Filter::new(OWN)?;
        assert!(filter.wants(&to(OWN), tag(0), false));
        assert!(!filter.wants(&to(OWN), tag(4094), false));
        filter.set_vlan(4094, true);
        // The priority is above the number.
        assert!(filter.wants(&to(OWN), tag(0xe000 | 4094), false));
        assert!(filter.wants(&to(OWN), tag(4094), false));
        assert!(!filter.wants(&to(OTHER), tag(4094), false));
        assert!(!filter.wants(&to(OWN), tag(4093), false));
        // The same number of a provider is another network, also for who wants all.
        let service = Some(VlanTag::new(PROTOCOL_SERVICE_VLAN, 4094));
        assert!(!filter.wants(&to(OWN), service, false));
        filter.flags = FILTER_PROMISCUOUS;
        assert!(!filter.wants(&to(OWN), service, false));
        filter.flags = 0;
        filter.set_vlan(4094, false);
        assert!(!filter.wants(&to(OWN), tag(4094), false));
        Ok(())
    }

    #[test]
    fn a_host_sends_as_itself_and_to_its_vlans() -> Result {
        let mut filter = Filter::new(OWN)?;
        let from = |source| EthernetHeader {
            source,
            ..to(MacAddress::BROADCAST)
        };
        assert!(filter.may_send(&from(OWN), None, INSIDE));
        assert!(!filter.may_send(&from(OWN), tag(0), INSIDE));
        assert!(!filter.may_send(&from(OWN), tag(0xe000), INSIDE));
        for other in [OTHER, GROUP, MacAddress([0; 6]), MacAddress::BROADCAST] {
            assert!(!filter.may_send(&from(other), None, INSIDE));
        }
        assert!(!filter.may_send(&from(OWN), tag(7), INSIDE));
        filter.set_vlan(7, true);
        assert!(filter.may_send(&from(OWN), tag(7), INSIDE));
        assert!(!filter.may_send(&from(OTHER), tag(7), INSIDE));
        assert!(!filter.may_send(&from(OWN), tag(8), INSIDE));
        let service = Some(VlanTag::new(PROTOCOL_SERVICE_VLAN, 7));
        assert!(!filter.may_send(&from(OWN), service, INSIDE));
        // Whoever it is from, after it has changed its address it is another.
        filter.mac = OTHER;
        assert!(
            !filter.may_send(&from(OWN), None, INSIDE)
                && filter.may_send(&from(OTHER), None, INSIDE)
        );
        Ok(())
    }
}
