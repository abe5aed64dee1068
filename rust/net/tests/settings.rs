// SPDX-License-Identifier: GPL-2.0

//! Tests of what is set and asked of a device: addresses, features and ethtool.

use super::*;

#[kunit_tests(rust_net_settings)]
mod suite {
    use super::*;

    #[test]
    fn what_somebody_wants_is_wanted_until_he_does_not() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet2", &seen)?;
        bring_up(&dev)?;
        let attachment = Attachment::new(c"kunitnet2", Taker::new())?;
        let handle = attachment.handle();
        let group = handle.want(Want::Multicast(GROUP))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 1));
        let again = handle.want(Want::Multicast(GROUP))?;
        drop(group);
        let other = handle.want(Want::Unicast(OTHER))?;
        assert!(becomes(|| seen.unicast.load(Acquire) == 1));
        // An address has one who wants it, and that of the interface is its own.
        for taken in [OTHER, OWN] {
            assert_eq!(handle.want(Want::Unicast(taken)).err(), Some(EEXIST));
        }
        // Still, for one has asked twice.
        assert_eq!(seen.groups.load(Acquire), 1);
        drop(other);
        assert!(becomes(|| seen.unicast.load(Acquire) == 0));
        let all = handle.want(Want::Promiscuous)?;
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 1));
        drop(all);
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 0));
        // Several at once.
        let mut several = KVec::new();
        for want in [Want::Unicast(OTHER), Want::Promiscuous, Want::Vlan(VLAN)] {
            several.push(handle.want(want)?, GFP_KERNEL)?;
        }
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 1));
        assert_eq!(seen.vlans.load(Relaxed), 1);
        Wanted::give_up(several);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 0));
        assert!(becomes(|| seen.unicast.load(Acquire) == 0));
        let vlan = handle.want(Want::Vlan(VLAN))?;
        assert_eq!(seen.vlans.load(Relaxed), 1);
        // What is left is taken back with the attachment.
        drop(attachment);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(becomes(|| seen.groups.load(Acquire) == 0));
        assert_eq!(handle.want(Want::Vlan(VLAN)).err(), Some(ENODEV));
        drop((vlan, again));
        assert_eq!(seen.vlans.load(Relaxed), 0);
        Ok(())
    }

    #[test]
    fn address_and_mtu_change_if_the_driver_agrees() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet4", &seen)?;
        let attachment = Attachment::new(c"kunitnet4", Taker::new())?;
        let unlucky = MacAddress([2, 0, 0, 0, 0, 13]);
        Rtnl::with(|rtnl| {
            assert!(!dev.has_random_mac(rtnl));
            assert_eq!(dev.change_mac(rtnl, unlucky), Err(EPERM));
            assert_eq!(dev.mac(), OWN);
            assert!(dev.change_mac(rtnl, GROUP).is_err());
            dev.change_mac(rtnl, OTHER)?;
            assert_eq!(dev.mac(), OTHER);
            assert_eq!(dev.request_mtu(rtnl, 1313), Err(EPERM));
            assert_eq!(dev.mtu(), 1500);
            dev.request_mtu(rtnl, 9000)?;
            assert!(dev.request_mtu(rtnl, 9001).is_err());
            dev.set_max_mtu(rtnl, 2000);
            assert!(dev.request_mtu(rtnl, 8999).is_err());
            dev.request_mtu(rtnl, 1999)?;
            assert_eq!(dev.mtu(), 1999);
            Ok::<(), Error>(())
        })?;
        assert!(attachment.upper().has_seen(InterfaceEvent::ChangeMac));
        assert!(attachment.upper().has_seen(InterfaceEvent::ChangeMtu));
        Ok(())
    }

    #[test]
    fn a_key_may_be_longer_than_what_the_core_has() -> Result {
        let mut key = KVec::from_elem(0u8, 600, GFP_KERNEL)?;
        fill_rss_key(&mut key);
        assert_eq!(key[..256], key[256..512]);
        assert_eq!(key[..88], key[512..]);
        assert!(key.iter().any(|byte| *byte != 0));
        fill_rss_key(&mut []);
        Ok(())
    }

    #[test]
    fn how_many_there_are_counts_as_it_was_said_first() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet16", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let raw = dev.as_raw();
            let size = table.get_rxfh_indir_size.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, and the device is registered.
            let first = unsafe { size(raw) };
            assert_eq!(first, 2);
            // SAFETY: RTNL is held, and the device is registered.
            assert_eq!(unsafe { size(raw) }, first);
            let mut entries = [0xaau32; 16];
            let mut key = [0xaau8; 41];
            let mut param: bindings::ethtool_rxfh_param = pin_init::zeroed();
            param.indir = entries.as_mut_ptr();
            param.key = key.as_mut_ptr();
            // SAFETY: RTNL is held, the device is registered, and there is room for more entries and bytes than it has.
            assert_eq!(unsafe { table.get_rxfh.ok_or(EINVAL)?(raw, &mut param) }, 0);
            assert_eq!(entries[..3], [5, 5, 0xaa]);
            assert_eq!(key[39..], [6, 0xaa]);
            Ok(())
        })
    }

    #[test]
    fn offloads_are_on_that_a_device_was_made_with() -> Result {
        let seen = seen()?;
        let own = Offloads::SCATTER_GATHER.with(Offloads::RX_CHECKSUM);
        let config = Config {
            offloads: own,
            tx_queues: 4,
            rx_queues: 4,
            ..config(c"kunitnet8")
        };
        let dev = Unregistered::new(&config, queues()?, Echo::new(&seen, 8))?.register()?;
        assert!(dev.offloads().has(own));
        assert!(!dev.offloads().has(Offloads::TCP_SEGMENTATION));
        assert!(!dev.offloads().has(own.with(Offloads::RX_HASH)));
        // So are queues, of which some can be left out.
        assert_eq!(dev.tx_queues(), 4);
        Rtnl::with(|rtnl| {
            assert_eq!(dev.set_queues(rtnl, 0), Err(EINVAL));
            assert_eq!(dev.set_queues(rtnl, 5), Err(EINVAL));
            dev.set_queues(rtnl, 3)
        })?;
        assert_eq!(dev.tx_queues(), 3);
        // Without a parent that it is registered for there is none.
        assert!(dev.parent().is_none());
        Ok(())
    }

    #[test]
    fn ethtool_is_told_as_many_names_as_values() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet5", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let raw = dev.as_raw();
            let set = bindings::ethtool_stringset_ETH_SS_STATS;
            let count = table.get_sset_count.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, and the device is registered.
            let counts = unsafe { (count(raw, set as c_int), count(raw, set as c_int + 1)) };
            assert_eq!(counts.0, 3);
            assert!(counts.1 < 0);
            let mut names = [[0xaau8; 32]; 4];
            // SAFETY: RTNL is held, the device is registered, and there is room for one name more than it has.
            unsafe { table.get_strings.ok_or(EINVAL)?(raw, set, names.as_mut_ptr().cast()) };
            assert_eq!(&names[0][..6], b"first\0");
            assert_eq!(&names[1][..7], b"second\0");
            assert_eq!(&names[2], b"a_name_that_is_much_longer_than\0");
            assert_eq!(names[3], [0xaa; 32]);
            let mut head: bindings::ethtool_stats = Default::default();
            head.n_stats = 3;
            let mut values = [0xaau64; 4];
            let get = table.get_ethtool_stats.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, the device is registered, and there is room for one value more than `head` says.
            unsafe { get(raw, &mut head, values.as_mut_ptr()) };
            assert_eq!(values, [1, 2, 3, 0xaa]);
            // Not where there is other room.
            head.n_stats = 2;
            let mut few = [0xaau64; 3];
            // SAFETY: RTNL is held, the device is registered, and there is room for one value more than `head` says.
            unsafe { get(raw, &mut head, few.as_mut_ptr()) };
            assert_eq!(few, [0xaa; 3]);
            let mut info: bindings::ethtool_drvinfo = pin_init::zeroed();
            // SAFETY: RTNL is held, the device is registered, and the structure valid.
            unsafe { table.get_drvinfo.ok_or(EINVAL)?(raw, &mut info) };
            assert_eq!(&info.driver[..10], b"net_kunit\0");
            assert_eq!(&info.fw_version[..3], b"17\0");
            Ok(())
        })
    }

    #[test]
    fn a_threshold_is_tuned_by_its_name_only() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet6", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let mut tunable: bindings::ethtool_tunable = Default::default();
            tunable.id = bindings::tunable_id_ETHTOOL_TX_COPYBREAK;
            tunable.type_id = bindings::tunable_type_id_ETHTOOL_TUNABLE_U32;
            tunable.len = 4;
            let (set, get) = (
                table.set_tunable.ok_or(EINVAL)?,
                table.get_tunable.ok_or(EINVAL)?,
            );
            let value = 321u32;
            let mut back = 0u32;
            let to = core::ptr::from_ref(&value).cast();
            let from = core::ptr::from_mut(&mut back).cast();
            // SAFETY: RTNL is held, the device is registered, and the value has the four bytes that `tunable` says.
            assert_eq!(unsafe { set(dev.as_raw(), &tunable, to) }, 0);
            // SAFETY: RTNL is held, the device is registered, and there is room for the four bytes that `tunable` says.
            assert_eq!(unsafe { get(dev.as_raw(), &tunable, from) }, 0);
            tunable.len = 8;
            // SAFETY: RTNL is held, and the device is registered; what has another length is refused before anything is written.
            assert!(unsafe { get(dev.as_raw(), &tunable, from) } < 0);
            assert_eq!(back, 321);
            Ok(())
        })
    }
}
