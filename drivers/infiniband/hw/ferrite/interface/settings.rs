// SPDX-License-Identifier: GPL-2.0

//! What users set of the interface, and what the device is told of it.

use super::{
    redirection::Redirection,
    Interface, //
};
use crate::{
    abi,
    abi::{
        Plain,
        SetInterface,
        SetMulticastFilter, //
    },
    caps::EthernetCaps,
    net::{
        Device,
        MacAddress,
        MacOps,
        MtuOps,
        OffloadOps,
        Offloads,
        Rtnl,
        RxMode,
        RxModeOps, //
    },
    port,
};
use kernel::prelude::*;

/// What users have set.
pub(super) struct Settings {
    pub(super) mac: MacAddress,
    pub(super) mtu: u16,
    pub(super) promiscuous: bool,
    pub(super) all_multicast: bool,
    pub(super) groups: KVec<MacAddress>,
    pub(super) strip_vlan: bool,
    pub(super) transmit_log_blocks: u8,
    pub(super) receive_log_entries: u8,
    /// Channels that there are to be, where the device is good for so many.
    pub(super) channels: u16,
    /// Microseconds that interrupts are put off, and frames that are too many for that; what the device begins with where
    /// nobody has said.
    pub(super) coalescing: Option<(u16, u16)>,
    pub(super) redirection: Redirection,
}

/// What a device does not have as users have set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Less {
    /// The MTU or a ring is smaller.
    pub(super) sizes: bool,
    /// The table that was chosen is not there any more.
    pub(super) table: bool,
}

impl Settings {
    /// Has them be what a device can do with these `caps` and so many `channels`; what has become less.
    /// `mtu` is what the interface has, which may be more than a device before had.
    pub(super) fn fit(&mut self, caps: &EthernetCaps, channels: u16, mtu: u32) -> Less {
        let sizes = |settings: &Self| {
            [
                settings.mtu,
                settings.transmit_log_blocks.into(),
                settings.receive_log_entries.into(),
            ]
        };
        let before = sizes(self);
        self.mtu = u16::try_from(mtu).unwrap_or(u16::MAX).min(caps.max_mtu);
        self.transmit_log_blocks = self.transmit_log_blocks.min(caps.transmit_max_log_blocks);
        self.receive_log_entries = self.receive_log_entries.min(caps.receive_max_log_entries);
        let chosen = self.redirection.set_channels(channels);
        if chosen.is_err() {
            // It names channels that there are not.
            self.redirection.forget_choice(channels);
        }
        let mut now = sizes(self).into_iter().zip(before);
        Less {
            sizes: now.any(|(now, before)| now < before),
            table: chosen.is_err(),
        }
    }

    /// What the interface receives, up or down. `groups` is what the filter of the device has room for.
    pub(super) fn interface(&self, up: bool, groups: usize) -> SetInterface {
        let flags = [
            (up, abi::INTERFACE_UP),
            (true, abi::INTERFACE_BROADCAST),
            (self.promiscuous, abi::INTERFACE_PROMISCUOUS),
            (
                self.all_multicast || self.groups.len() > groups,
                abi::INTERFACE_ALL_MULTICAST,
            ),
            (self.strip_vlan, abi::INTERFACE_STRIP_VLAN),
        ];
        SetInterface {
            port: port::DEVICE_PORT,
            flags: flags
                .iter()
                .filter(|(set, _)| *set)
                .fold(0, |flags, (_, flag)| flags | flag),
            mtu: self.mtu,
            mac: self.mac.0,
            default_channel: if up { 0 } else { abi::CHANNEL_NONE },
            ..SetInterface::zeroed()
        }
    }

    /// The groups that it receives, as far as there is room for them.
    pub(super) fn filter(&self, groups: usize) -> SetMulticastFilter {
        let mut command = SetMulticastFilter {
            port: port::DEVICE_PORT,
            ..SetMulticastFilter::zeroed()
        };
        if self.groups.len() <= groups {
            for (to, from) in command.addresses.iter_mut().zip(&self.groups) {
                *to = from.0;
                command.count += 1;
            }
        }
        command
    }
}

impl MacOps for Interface {
    fn set_mac(dev: &Device<Self>, rtnl: &Rtnl, mac: MacAddress) -> Result {
        // Also where it is down: the device may not send from others.
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.mac, mac),
            |settings, before| settings.mac = before,
        )
    }
}

impl MtuOps for Interface {
    fn change_mtu(dev: &Device<Self>, rtnl: &Rtnl, mtu: u32) -> Result {
        let mtu = u16::try_from(mtu).map_err(|_| EINVAL)?;
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.mtu, mtu),
            |settings, before| settings.mtu = before,
        )
    }
}

impl OffloadOps for Interface {
    fn set_offloads(dev: &Device<Self>, rtnl: &Rtnl, wanted: Offloads) -> Result {
        let strip = wanted.has(Offloads::VLAN_STRIP);
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.strip_vlan, strip),
            |settings, before| settings.strip_vlan = before,
        )
    }
}

impl RxModeOps for Interface {
    fn set_rx_mode(dev: &Device<Self>, rtnl: &Rtnl, mode: &RxMode<'_>) -> Result {
        let mut groups = KVec::new();
        // One more than any filter has room for is as good as all.
        for group in mode.multicast().take(abi::MULTICAST_ADDRESSES + 1) {
            groups.push(group, GFP_KERNEL)?;
        }
        let mut settings = dev.settings.lock();
        settings.groups = groups;
        settings.all_multicast = mode.all_multicast;
        // The device knows one address.
        settings.promiscuous = mode.promiscuous || mode.unicast().next().is_some();
        if dev.open_channels().is_none() {
            return Ok(());
        }
        let behind = dev.working(rtnl)?;
        let room = behind.caps.multicast_addresses();
        let filter = || behind.hw.execute(&settings.filter(room));
        let interface = || dev.tell(&behind, &settings, true);
        // None that is wanted is refused between the two.
        if settings.groups.len() > room {
            interface().and_then(|()| filter())
        } else {
            filter().and_then(|()| interface())
        }
    }
}

#[kunit_tests(ferrite_net_settings)]
mod tests {
    use super::*;

    const NOTHING: Less = Less {
        sizes: false,
        table: false,
    };

    fn settings() -> Result<Settings> {
        Ok(Settings {
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            promiscuous: false,
            all_multicast: false,
            groups: KVec::new(),
            strip_vlan: true,
            transmit_log_blocks: 9,
            receive_log_entries: 8,
            channels: 4,
            coalescing: None,
            redirection: Redirection::new(16, 4)?,
        })
    }

    #[test]
    fn the_device_is_told_what_users_have_set() -> Result {
        let mut settings = settings()?;
        let up = settings.interface(true, 4);
        assert_eq!(
            up.flags,
            abi::INTERFACE_UP | abi::INTERFACE_BROADCAST | abi::INTERFACE_STRIP_VLAN
        );
        assert_eq!(
            (up.mtu, up.mac, up.default_channel),
            (1500, [2, 0, 0, 0, 0, 1], 0)
        );
        let down = settings.interface(false, 4);
        assert_eq!(down.flags & abi::INTERFACE_UP, 0);
        assert_eq!(down.default_channel, abi::CHANNEL_NONE);
        settings.strip_vlan = false;
        settings.promiscuous = true;
        settings.all_multicast = true;
        assert_eq!(
            settings.interface(true, 4).flags,
            abi::INTERFACE_UP
                | abi::INTERFACE_BROADCAST
                | abi::INTERFACE_PROMISCUOUS
                | abi::INTERFACE_ALL_MULTICAST
        );
        Ok(())
    }

    fn caps() -> EthernetCaps {
        EthernetCaps::of(4, 9000, (12, 12))
    }

    #[test]
    fn what_users_have_set_fits_a_device_that_can_do_less() -> Result {
        let mut settings = settings()?;
        settings.mtu = 9000;
        settings.transmit_log_blocks = 12;
        settings.receive_log_entries = 12;
        // One that can do as much changes nothing.
        assert_eq!(settings.fit(&caps(), 4, 9000), NOTHING);
        assert_eq!(settings.mtu, 9000);
        assert_eq!(
            settings.fit(&EthernetCaps::of(4, 1500, (4, 5)), 4, 9000),
            Less {
                sizes: true,
                table: false
            }
        );
        assert_eq!(
            (
                settings.mtu,
                settings.transmit_log_blocks,
                settings.receive_log_entries
            ),
            (1500, 4, 5)
        );
        // Who uses the interface had it keep its MTU, which is that of the next device that has it again.
        assert_eq!(settings.fit(&caps(), 4, 9000), NOTHING);
        assert_eq!(settings.mtu, 9000);
        settings.mtu = 1500;
        // A table in turn is dealt out anew, which nobody need be told; one that was chosen is lost.
        assert_eq!(settings.fit(&caps(), 2, 1500), NOTHING);
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel < 2));
        settings.redirection.set(Some(&[1; 16]), None, 2)?;
        assert_eq!(settings.fit(&caps(), 3, 1500), NOTHING);
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel == 1));
        assert_eq!(
            settings.fit(&caps(), 1, 1500),
            Less {
                sizes: false,
                table: true
            }
        );
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel == 0));
        assert_eq!(settings.fit(&caps(), 1, 1500), NOTHING);
        Ok(())
    }

    #[test]
    fn more_groups_than_the_filter_has_room_for_are_all_groups() -> Result {
        let mut settings = settings()?;
        for number in 0..4 {
            settings
                .groups
                .push(MacAddress([1, 0, 0x5e, 0, 0, number]), GFP_KERNEL)?;
        }
        let filter = settings.filter(4);
        assert_eq!(filter.count, 4);
        assert_eq!(filter.addresses[3], [1, 0, 0x5e, 0, 0, 3]);
        assert_eq!(filter.addresses[4], [0; 6]);
        assert_eq!(
            settings.interface(true, 4).flags & abi::INTERFACE_ALL_MULTICAST,
            0
        );
        assert_eq!(settings.filter(3).count, 0);
        assert!(settings.interface(true, 3).flags & abi::INTERFACE_ALL_MULTICAST != 0);
        Ok(())
    }
}
