// SPDX-License-Identifier: GPL-2.0

//! Tests of devices and ports: what they say of themselves, and the interfaces beside them.

use super::*;
use crate::rdma::device::registration::gids;

#[kunit_tests(rust_rdma_port)]
mod suite {
    use super::*;

    #[test]
    fn what_happens_before_a_device_is_registered_is_told_when_it_is() {
        let mut mailbox = event::Mailbox::Before(0);
        assert!(mailbox.raise(1).is_none());
        assert!(mailbox.raise(4).is_none());
        assert!(mailbox.raise(1).is_none());
        assert_eq!(mailbox.attach(7), Ok(5));
        assert_eq!(mailbox.raise(2), Some(&7));
        // It leads to one at a time.
        assert_eq!(mailbox.attach(8), Err(EBUSY));
        assert_eq!(mailbox.raise(2), Some(&7));
        mailbox = event::Mailbox::After;
        assert!(mailbox.raise(2).is_none());
        // Told once.
        assert_eq!(mailbox.attach(8), Ok(0));
        assert_eq!(mailbox.raise(2), Some(&8));
    }

    #[test]
    fn a_port_is_paired_with_its_own_interface_only() {
        for event in [NetdevEvent::Register, NetdevEvent::Up] {
            assert_eq!(Pairing::after(event, true, None), Pairing::Pair);
            assert_eq!(Pairing::after(event, false, None), Pairing::Keep);
        }
        assert_eq!(
            Pairing::after(NetdevEvent::Change, true, None),
            Pairing::Keep
        );
    }

    #[test]
    fn a_pairing_is_neither_replaced_nor_ended_by_another_interface() {
        for event in [
            NetdevEvent::Register,
            NetdevEvent::Up,
            NetdevEvent::Down,
            NetdevEvent::Unregister,
            NetdevEvent::ChangeAddr,
        ] {
            for own in [false, true] {
                assert_eq!(Pairing::after(event, own, Some(false)), Pairing::Keep);
            }
        }
    }

    #[test]
    fn a_pairing_ends_when_its_interface_goes() {
        // By then it may have been renamed, moved or stacked upon: that does not count.
        for own in [false, true] {
            assert_eq!(
                Pairing::after(NetdevEvent::Unregister, own, Some(true)),
                Pairing::Part
            );
            assert_eq!(
                Pairing::after(NetdevEvent::Down, own, Some(true)),
                Pairing::Keep
            );
        }
    }

    #[test]
    fn a_port_that_was_unpaired_before_it_had_gids_is_remembered() {
        let after = |changes: &[Pairing]| {
            let missed = |known, change: &Pairing| gids::missed(known, *change == Pairing::Part);
            changes.iter().fold(gids::NONE, missed)
        };
        assert_eq!(after(&[]), gids::NONE);
        assert_eq!(after(&[Pairing::Pair]), gids::MISSED);
        assert_eq!(after(&[Pairing::Part]), gids::MISSED_PART);
        // Those of the first time are not those of the second.
        assert_eq!(after(&[Pairing::Part, Pairing::Pair]), gids::MISSED_PART);
        let thrice = [Pairing::Pair, Pairing::Part, Pairing::Pair];
        assert_eq!(after(&thrice), gids::MISSED_PART);
    }

    #[test]
    fn mtu_follows_the_interface() {
        assert_eq!(Mtu::from_netdev(1500), Some(Mtu::Bytes1024));
        assert_eq!(Mtu::from_netdev(9000), Some(Mtu::Bytes4096));
        assert_eq!(Mtu::from_netdev(0), None);
        assert_eq!(Mtu::Bytes4096.bytes(), 4096);
        let mut port = EthernetPort {
            up: true,
            mtu: 9000,
            ..EthernetPort::default()
        };
        assert_eq!(
            PortAttr::ethernet(&port, Mtu::Bytes2048, 1).active_mtu,
            Mtu::Bytes2048
        );
        port.mtu = 1500;
        assert_eq!(
            PortAttr::ethernet(&port, Mtu::Bytes4096, 1).active_mtu,
            Mtu::Bytes1024
        );
    }

    #[test]
    fn what_the_core_does_not_know_of_a_device_is_told_besides_what_it_does() -> Result {
        let attr = DeviceAttr {
            local_dma_lkey: true,
            driver_caps: 5 << 40,
            ..DeviceAttr::default()
        };
        let mut raw: bindings::ib_device_attr = pin_init::zeroed();
        attr.fill(&mut raw)?;
        let lkey = u64::from(bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY);
        assert_eq!(raw.kernel_cap_flags, lkey | 5 << 40);
        DeviceAttr::default().fill(&mut raw)?;
        assert_eq!(raw.kernel_cap_flags, 0);
        // Of the core's own nothing is said by that, and nothing is left out without a word.
        let attr = DeviceAttr {
            driver_caps: 5 << 40 | 6,
            ..attr
        };
        assert_eq!(attr.fill(&mut raw), Err(EINVAL));
        Ok(())
    }

    #[test]
    fn a_port_is_told_as_its_driver_describes_it() {
        let told = |attr: PortAttr| {
            let mut raw: bindings::ib_port_attr = pin_init::zeroed();
            attr.fill(&mut raw);
            (raw.max_vl_num, raw.ip_gids())
        };
        let roce = PortAttr::ethernet(&EthernetPort::default(), Mtu::Bytes4096, 16);
        assert_eq!(told(roce), (1, 1));
        let infiniband = PortAttr {
            max_vl_num: 4,
            ip_gids: false,
            ..roce
        };
        assert_eq!(told(infiniband), (4, 0));
    }

    #[test]
    fn a_path_is_told_as_that_of_the_link_that_it_is_on() {
        let told = |path: Path| {
            let mut raw: bindings::rdma_ah_attr = pin_init::zeroed();
            path.fill(&mut raw);
            // SAFETY: It is a local, which does not change any more.
            let seen = unsafe { AhAttr::from_raw(&raw) }.path();
            assert_eq!(seen, path);
            (raw.type_, u32::from(raw.ah_flags))
        };
        let grh = bindings::ib_ah_flags_IB_AH_GRH;
        let roce = Path {
            dmac: [2, 0, 0, 0, 0, 1],
            hop_limit: 64,
            ..Path::default()
        };
        let type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        assert_eq!(told(roce), (type_, grh));
        let local = Path {
            dlid: Some(7),
            ..Path::default()
        };
        let type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB;
        assert_eq!(told(local), (type_, 0));
        let beyond = Path {
            dgid: Gid([1; 16]),
            ..local
        };
        assert_eq!(told(beyond), (type_, grh));
    }

    #[test]
    fn what_only_some_devices_have_is_asked_of_these_alone() {
        let [flag, other_flag] = [1 << 26, 1 << 31].map(QpCreateFlags::from_raw);
        let right = Access::from_raw(1 << 31);
        let one = own_extension(40, DriverNumbers::NONE.with_create_flags(flag));
        let other = own_extension(42, DriverNumbers::NONE.with_create_flags(other_flag));
        let with_right = own_extension(41, DriverNumbers::NONE.with_access(right));
        // A number that is told to a device whose own it is not means something else there.
        let asked = |extensions: &[Extension], caps| Extension::flags_for(extensions, caps);
        assert_eq!(asked(&[], 0), Ok(QpCreateFlags::default()));
        assert_eq!(asked(&[one], 1 << 40), Ok(flag));
        assert_eq!(asked(&[one, other], 5 << 40), Ok(flag | other_flag));
        assert_eq!(asked(&[with_right], 1 << 41), Ok(QpCreateFlags::default()));
        for caps in [0, 1 << 41, 1 << 42, !(1 << 40)] {
            assert_eq!(asked(&[one], caps), Err(eopnotsupp()));
            assert_eq!(asked(&[other, one], caps), Err(eopnotsupp()));
        }
        // Nor is a right.
        let usual = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let with = [one, with_right];
        assert_eq!(Extension::check_access(&[], usual), Ok(()));
        assert_eq!(Extension::check_access(&with, usual | right), Ok(()));
        for extensions in [&[][..], &[one, other]] {
            let refused = Extension::check_access(extensions, usual | right);
            assert_eq!(refused, Err(eopnotsupp()));
        }
    }

    #[test]
    fn gids_know_ipv4() {
        let mut gid = Gid::default();
        assert!(!gid.is_ipv4());
        gid.0[10..].copy_from_slice(&[0xff, 0xff, 10, 77, 0, 1]);
        assert!(gid.is_ipv4());
        gid.0[0] = 0xfe;
        assert!(!gid.is_ipv4());
    }

    #[test]
    fn a_name_that_the_core_takes_for_a_pattern_is_none() {
        for (name, plain) in [
            (c"minimal0", true),
            (c"roce p0", true),
            (c"", false),
            (c"minimal%d", false),
            (c"%s%s%n", false),
        ] {
            assert_eq!(super::super::device::is_plain(name), plain);
        }
    }
}
