// SPDX-License-Identifier: GPL-2.0

//! Tests of socket buffers, headers and addresses.

use super::*;

#[kunit_tests(rust_net_frames)]
mod suite {
    use super::*;

    #[test]
    fn a_buffer_has_what_was_put_into_it_and_no_more() -> Result {
        let mut skb = empty(64)?;
        assert_eq!(skb.len(), 0);
        assert!(skb.tailroom() >= 64);
        let (head, tail) = (skb.headroom(), skb.tailroom());
        skb.reserve(16)?;
        assert_eq!((skb.headroom(), skb.tailroom()), (head + 16, tail - 16));
        skb.append_slice(&[1, 2, 3])?;
        assert_eq!(
            skb.append(4, |room| {
                room.fill(9);
                room.len()
            })?,
            4
        );
        assert_eq!(skb.linear(), &[1, 2, 3, 9, 9, 9, 9]);
        // Where there are bytes nothing is reserved, and not more than there is.
        assert_eq!(skb.reserve(1), Err(EINVAL));
        assert_eq!(empty(64)?.reserve(1 << 20), Err(EINVAL));
        assert_eq!(skb.append(skb.tailroom() + 1, |_| ()), Err(ENOSPC));
        let rest = skb.tailroom();
        skb.append(rest, |room| room.fill(0))?;
        assert_eq!(skb.append(1, |_| ()), Err(ENOSPC));
        let mut copy = [0; 4];
        skb.copy_to(1, &mut copy)?;
        assert_eq!(copy, [2, 3, 9, 9]);
        assert_eq!(skb.copy_to(skb.len() - 3, &mut copy), Err(EFAULT));
        assert_eq!(skb.copy_to(usize::MAX, &mut copy), Err(EFAULT));
        skb.copy_to(skb.len() - 4, &mut copy)?;
        Ok(())
    }

    #[test]
    fn bytes_that_have_two_owners_are_not_written() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[1])?;
        let clone = skb.try_clone()?;
        assert_eq!(skb.append_slice(&[2]), Err(EBUSY));
        assert_eq!(clone.linear(), &[1]);
        drop(clone);
        skb.append_slice(&[2])?;
        assert_eq!(skb.linear(), &[1, 2]);
        Ok(())
    }

    #[test]
    fn a_queue_gives_back_what_it_got_in_order() -> Result {
        let queue = KBox::pin_init(SkbQueue::new(), GFP_KERNEL)?;
        assert!(queue.is_empty() && queue.pop().is_none());
        for number in 0..3u8 {
            let mut skb = empty(16)?;
            skb.append_slice(&[number])?;
            queue.push(skb);
        }
        assert_eq!(queue.len(), 3);
        assert_eq!(queue.pop().map(|skb| skb.linear()[0]), Some(0));
        assert_eq!(queue.pop().map(|skb| skb.linear()[0]), Some(1));
        // What is left goes with it.
        Ok(())
    }

    #[test]
    fn a_checksum_that_is_to_be_computed_is() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[0; 20])?;
        assert_eq!(skb.checksum(), Checksum::None);
        skb.set_checked();
        assert_eq!(skb.checksum(), Checksum::Unnecessary);
        // SAFETY: The buffer is ours; both are within its bytes.
        let asked = unsafe { bindings::skb_partial_csum_set(skb.as_raw(), 10, 2) };
        assert!(asked);
        assert_eq!(skb.checksum(), Checksum::Partial);
        skb.set_checked();
        assert_eq!(skb.checksum(), Checksum::Partial);
        let whole = skb.into_frames()?.next().ok_or(EINVAL)?;
        assert_eq!(whole.checksum(), Checksum::None);
        // The sum of nothing.
        assert_eq!(whole.linear()[12..14], [0xff, 0xff]);
        Ok(())
    }

    #[test]
    fn a_tag_beside_a_frame_is_put_inside() -> Result {
        let mut skb = empty(200)?;
        skb.reserve(32)?;
        fill(&mut skb, OWN, 4)?;
        // SAFETY: The buffer is ours.
        unsafe {
            bindings::skb_set_protocol(skb.as_raw(), PROTOCOL.to_be());
            bindings::skb_reset_mac_header(skb.as_raw());
            bindings::__vlan_hwaccel_put_tag(skb.as_raw(), PROTOCOL_VLAN.to_be(), VLAN);
        }
        let mut frames = skb.into_frames()?;
        let whole = frames.next().ok_or(EINVAL)?;
        assert!(frames.next().is_none());
        assert_eq!(whole.len(), 100 + VLAN_TAG);
        assert_eq!(
            whole.ethernet_header().map(|header| header.protocol),
            Some(PROTOCOL_VLAN)
        );
        assert_eq!(whole.linear()[14..18], [0, VLAN as u8, 0x88, 0xb5]);
        Ok(())
    }

    #[test]
    fn addresses_are_told_apart() {
        assert!(OWN.is_valid() && !OWN.is_group());
        assert!(GROUP.is_group() && !GROUP.is_valid());
        assert!(MacAddress::BROADCAST.is_group());
        assert!(!MacAddress([0; 6]).is_valid());
        let random = MacAddress::random();
        assert!(random.is_valid() && random.is_locally_administered());
        assert!(!MacAddress([0x00, 0x16, 0x3e, 0, 0, 1]).is_locally_administered());
    }

    #[test]
    fn nothing_is_appended_to_a_frame_in_pieces() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[1; 20])?;
        // SAFETY: A page is ours, and passes to the buffer, which is ours alone.
        unsafe {
            let page = bindings::alloc_pages(bindings::GFP_KERNEL | bindings::__GFP_ZERO, 0);
            assert!(!page.is_null());
            bindings::skb_add_rx_frag(skb.as_raw(), 0, page, 0, 100, 4096);
        }
        assert_eq!(skb.len(), 120);
        assert_eq!(skb.append(1, |_| ()), Err(ENOSPC));
        assert_eq!(skb.append(0, |_| ()), Err(ENOSPC));
        assert_eq!(skb.append_slice(&[]), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn frames_of_ip_behind_tags_of_customers_are_cut() {
        let (ip, ipv6, arp) = (0x0800, 0x86dd, 0x0806);
        for inner in [ip, ipv6] {
            assert!(is_ip_behind_tag(None, inner, inner));
            assert!(is_ip_behind_tag(None, PROTOCOL_VLAN, inner));
            assert!(is_ip_behind_tag(Some(PROTOCOL_VLAN), inner, inner));
            assert!(!is_ip_behind_tag(None, PROTOCOL_SERVICE_VLAN, inner));
            assert!(!is_ip_behind_tag(Some(PROTOCOL_SERVICE_VLAN), inner, inner));
        }
        assert!(!is_ip_behind_tag(None, PROTOCOL_VLAN, arp));
        assert!(!is_ip_behind_tag(None, arp, arp));
    }

    #[test]
    fn what_a_device_found_out_about_a_frame_goes_with_it() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[0; 40])?;
        assert_eq!((skb.vlan(), skb.segment_size()), (None, None));
        assert_eq!((skb.segments(), skb.fragments()), (1, 0));
        skb.set_vlan(0x6005);
        assert_eq!(skb.vlan(), Some(0x6005));
        assert_eq!(skb.checksum_to_finish(), None);
        // SAFETY: The buffer is ours; both are within its bytes.
        assert!(unsafe { bindings::skb_partial_csum_set(skb.as_raw(), 14, 16) });
        assert_eq!(skb.checksum_to_finish(), Some((14, 16)));
        Ok(())
    }
}
