// SPDX-License-Identifier: GPL-2.0

//! Tests of sending and receiving, by queues and by who is attached.

use super::*;

#[kunit_tests(rust_net_traffic)]
mod suite {
    use super::*;

    #[test]
    fn what_is_sent_is_received_by_who_is_attached() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet0", &seen)?;
        let attachment = Attachment::new(c"kunitnet0", Taker::new())?;
        let handle = attachment.handle();
        // Not up.
        assert!(handle.send(frame(&handle, 2)?).is_err());
        bring_up(&dev)?;
        assert_eq!(seen.opened.load(Relaxed), 1);
        assert!(dev.is_running() && dev.has_carrier());
        let up = Rtnl::with(|rtnl| handle.state(rtnl)).ok_or(ENODEV)?;
        assert_eq!((up.mac, up.mtu, up.is_up), (OWN, 1500, true));
        assert_eq!(up.link.speed, Some(40_000));
        for number in 0..10 {
            handle.send(frame(&handle, number)?)?;
        }
        let taker = attachment.upper();
        assert!(becomes(|| taker.taken.len() == 5));
        assert!(becomes(|| taker.passed.load(Relaxed) == 5));
        for number in [0, 2, 4, 6, 8] {
            let whole = taker.taken.pop().ok_or(EINVAL)?;
            assert_eq!(whole.len(), 100);
            let header = whole.ethernet_header().ok_or(EINVAL)?;
            assert_eq!((header.destination, header.source), (OWN, OTHER));
            assert!(whole.linear()[14..].iter().all(|byte| *byte == number));
        }
        let counted = handle.statistics().ok_or(ENODEV)?;
        assert!(counted.tx_packets >= 10);
        assert_eq!(counted.multicast, 3);
        assert!(taker.has_seen(InterfaceEvent::Up));
        // Too short for a header.
        let mut short = handle.allocate(10)?;
        short.append_slice(&[0; 10])?;
        assert_eq!(handle.send(short), Err(EINVAL));
        drop(attachment);
        // It has nothing to send by.
        assert_eq!(handle.send(empty_frame()?), Err(ENODEV));
        drop(dev);
        assert_eq!(seen.stopped.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn what_waits_for_room_is_sent_when_a_device_was_restarted() -> Result {
        let seen = seen()?;
        // One that never has room, until it is opened anew.
        let dev = Unregistered::new(&config(c"kunitnet11"), queues()?, Echo::new(&seen, 0))?;
        let dev = dev.register()?;
        let attachment = Attachment::new(c"kunitnet11", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        handle.send(frame(&handle, 2)?)?;
        assert_eq!(seen.sent.load(Relaxed), 0);
        seen.roomy.store(1, Relaxed);
        // It was refused, and waits. No other frame is sent that could take it with it.
        Rtnl::with(|rtnl| dev.restart(rtnl, || ()))?;
        assert!(becomes(|| seen.sent.load(Relaxed) >= 1));
        Ok(())
    }

    #[test]
    fn a_queue_that_is_woken_while_a_device_is_stopped_sends_nothing() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet12", &seen)?;
        let attachment = Attachment::new(c"kunitnet12", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        let sent = seen.sent.load(Relaxed);
        let during = Rtnl::with(|rtnl| {
            dev.restart(rtnl, || {
                dev.set_carrier(true);
                dev.wake_queue(0);
                handle.send(frame(&handle, 2)?)?;
                Ok::<_, Error>(seen.sent.load(Relaxed))
            })
        })??;
        assert_eq!(during, sent);
        // It waits, and is sent when it was started again.
        assert!(becomes(|| seen.sent.load(Relaxed) > sent));
        assert!(becomes(|| attachment.upper().taken.len() == 1));
        Ok(())
    }

    fn empty_frame() -> Result<Skb> {
        let mut skb = empty(100)?;
        fill(&mut skb, OWN, 2)?;
        Ok(skb)
    }

    #[test]
    fn frames_beside_napi_are_received_too() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet1", &seen)?;
        let attachment = Attachment::new(c"kunitnet1", Taker::new())?;
        bring_up(&dev)?;
        let mut skb = Skb::for_device(&dev, 100)?;
        fill(&mut skb, OWN, 2)?;
        assert!(dev.receive(skb));
        assert!(becomes(|| attachment.upper().taken.len() == 1));
        // Not without a header.
        let mut short = Skb::for_device(&dev, 100)?;
        short.append_slice(&[0; 13])?;
        assert!(!dev.receive(short));
        Ok(())
    }

    #[test]
    fn one_is_attached_at_a_time() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet3", &seen)?;
        let first = Attachment::new(c"kunitnet3", Taker::new())?;
        assert_eq!(
            Attachment::new(c"kunitnet3", Taker::new()).err(),
            Some(EBUSY)
        );
        assert_eq!(
            Attachment::new(c"kunitnone", Taker::new()).err(),
            Some(ENODEV)
        );
        assert_eq!(Attachment::new(c"lo", Taker::new()).err(), Some(EINVAL));
        drop(first);
        drop(Attachment::new(c"kunitnet3", Taker::new())?);
        drop(dev);
        Ok(())
    }

    #[test]
    fn who_polls_for_room_only_receives_nothing() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet15", &seen)?;
        let attachment = Attachment::new(c"kunitnet15", Taker::new())?;
        let napi = dev.napis().first().ok_or(ENODEV)?;
        without_bottom_halves(|| {
            // SAFETY: The device is down: nobody polls the queue.
            let context = unsafe { PollContext::new(napi, 0) };
            assert_eq!(context.buffer(64).err(), Some(EPERM));
            let mut skb = Skb::for_device(&dev, 100)?;
            fill(&mut skb, OWN, 2)?;
            context.receive(skb);
            context.sent(empty_frame()?);
            Ok::<(), Error>(())
        })?;
        fsleep(Delta::from_millis(20));
        assert_eq!(attachment.upper().taken.len(), 0);
        Ok(())
    }
}
