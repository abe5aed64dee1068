// SPDX-License-Identifier: GPL-2.0

//! Which frames a host wants.

use crate::net::{EthernetHeader, MacAddress, VlanTag, PROTOCOL_VLAN};
use crate::protocol::{FILTER_ALL_MULTICAST, FILTER_PROMISCUOUS};
use kernel::prelude::*;

/// Groups of a host, at most.
const MOST_GROUPS: usize = 128;
/// VLANs of a host, at most: the interface has room for so many, and hosts share it.
const MOST_VLANS: u32 = 64;
/// Numbers of VLANs are below this.
const VLANS: usize = 4096;

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

    /// Whether a host may send a frame that is not trusted: as nobody else, and to its own VLANs.
    pub(super) fn may_send(&self, header: &EthernetHeader, tag: Option<VlanTag>) -> bool {
        // Behind a priority without a VLAN there may be another tag, which is the one that counts for who gets it.
        let hides = tag.is_some_and(|tag| tag.vlan == 0);
        header.source == self.mac && !hides && self.is_in(tag)
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

#[kunit_tests(rust_rdma_split_filter)]
mod tests {
    use super::*;
    use crate::net::PROTOCOL_SERVICE_VLAN;

    fn tag(vlan: u16) -> Option<VlanTag> {
        Some(VlanTag::new(PROTOCOL_VLAN, vlan))
    }

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
        assert!(filter.may_send(&from(OWN), None));
        assert!(!filter.may_send(&from(OWN), tag(0)));
        assert!(!filter.may_send(&from(OWN), tag(0xe000)));
        for other in [OTHER, GROUP, MacAddress([0; 6]), MacAddress::BROADCAST] {
            assert!(!filter.may_send(&from(other), None));
        }
        assert!(!filter.may_send(&from(OWN), tag(7)));
        filter.set_vlan(7, true);
        assert!(filter.may_send(&from(OWN), tag(7)));
        assert!(!filter.may_send(&from(OTHER), tag(7)));
        assert!(!filter.may_send(&from(OWN), tag(8)));
        let service = Some(VlanTag::new(PROTOCOL_SERVICE_VLAN, 7));
        assert!(!filter.may_send(&from(OWN), service));
        // Whoever it is from, after it has changed its address it is another.
        filter.mac = OTHER;
        assert!(!filter.may_send(&from(OWN), None) && filter.may_send(&from(OTHER), None));
        Ok(())
    }
}
