// SPDX-License-Identifier: GPL-2.0

//! Tests of how devices are opened, stopped, taken away and brought back.

use super::*;

#[kunit_tests(rust_net_lifecycle)]
mod suite {
    use super::*;

    #[test]
    fn a_device_that_is_not_registered_is_freed_with_its_data() -> Result {
        let seen = seen()?;
        drop(Unregistered::new(
            &config(c"kunitnet%d"),
            queues()?,
            Echo::new(&seen, 8),
        )?);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        // Also where its name is taken.
        let first = register(c"kunitnet7", &seen)?;
        assert_eq!(register(c"kunitnet7", &seen).err(), Some(EEXIST));
        assert_eq!(seen.dropped.load(Relaxed), 2);
        drop(first);
        assert_eq!(seen.dropped.load(Relaxed), 3);
        assert!(Arc::into_unique_or_drop(seen).is_some());
        Ok(())
    }

    #[test]
    fn a_device_that_cannot_be_is_refused() -> Result {
        let seen = seen()?;
        // The core has room for fifteen bytes.
        assert_eq!(
            Unregistered::new(&config(c"kunitnet90123456"), queues()?, Echo::new(&seen, 8)).err(),
            Some(EINVAL)
        );
        let mut none = config(c"kunitnet%d");
        none.tx_queues = 0;
        assert_eq!(
            Unregistered::new(&none, queues()?, Echo::new(&seen, 8)).err(),
            Some(EINVAL)
        );
        Ok(())
    }

    #[test]
    fn a_device_without_hardware_is_stopped_and_comes_back_as_it_was() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet7", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        // One that is down stays so.
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            dev.attach(rtnl)
        })?;
        assert_eq!(counts(), (0, 0));
        bring_up(&dev)?;
        assert_eq!(counts(), (1, 0));
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            assert_eq!(counts(), (1, 1));
            // Once only.
            dev.detach(rtnl);
            assert_eq!(counts(), (1, 1));
            dev.attach(rtnl)?;
            assert_eq!(counts(), (2, 1));
            // A change is made while it is stopped.
            let during = dev.restart(rtnl, counts)?;
            assert_eq!((during, counts()), ((2, 2), (3, 2)));
            Ok::<(), Error>(())
        })?;
        Rtnl::with(|rtnl| dev.detach(rtnl));
        // It may go meanwhile.
        drop(dev);
        assert_eq!(counts(), (3, 3));
        Ok(())
    }

    #[test]
    fn a_device_that_comes_back_is_told_what_was_wanted_meanwhile() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet12", &seen)?;
        let attachment = Attachment::new(c"kunitnet12", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        Rtnl::with(|rtnl| dev.detach(rtnl));
        let group = handle.want(Want::Multicast(GROUP))?;
        let all = handle.want(Want::Promiscuous)?;
        // A device that is not there is told nothing.
        fsleep(Delta::from_millis(20));
        assert_eq!(seen.groups.load(Acquire), 0);
        Rtnl::with(|rtnl| dev.attach(rtnl))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 1));
        assert_eq!(seen.promiscuous.load(Acquire), 1);
        // And what is not wanted any more.
        Rtnl::with(|rtnl| dev.detach(rtnl));
        drop((group, all));
        Rtnl::with(|rtnl| dev.attach(rtnl))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 0));
        assert_eq!(seen.promiscuous.load(Acquire), 0);
        Ok(())
    }

    #[test]
    fn a_device_that_cannot_be_opened_stays_as_it_is_until_it_can() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet13", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        bring_up(&dev)?;
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            seen.broken.store(1, Relaxed);
            assert_eq!(dev.attach(rtnl), Err(ENOMEM));
            assert!(!dev.is_present());
            // Not before it is attached.
            dev.reopen(rtnl)?;
            seen.broken.store(0, Relaxed);
            dev.reopen(rtnl)?;
            assert_eq!(counts(), (1, 1));
            dev.attach(rtnl)?;
            assert!(dev.is_present());
            assert_eq!(counts(), (2, 1));
            // One that is there is opened again, too.
            seen.broken.store(1, Relaxed);
            assert_eq!(dev.restart(rtnl, || ()), Err(ENOMEM));
            seen.broken.store(0, Relaxed);
            dev.restart(rtnl, || ())?;
            assert_eq!(counts(), (2, 2));
            dev.reopen(rtnl)?;
            assert_eq!(counts(), (3, 2));
            Ok::<(), Error>(())
        })
    }

    #[test]
    fn a_device_is_opened_and_stopped_once_whatever_its_driver_does_meanwhile() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet14", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        seen.strange.store(1, Relaxed);
        bring_up(&dev)?;
        assert_eq!(counts(), (1, 0));
        drop(dev);
        assert_eq!(counts(), (1, 1));
        Ok(())
    }

    /// Somebody who does something for a while, beside the test.
    #[pin_data]
    struct Beside {
        #[pin]
        held: Mutex<Option<Hold<Echo>>>,
        #[pin]
        handle: Mutex<Option<Handle<Taker>>>,
        sent: Atomic<u32>,
        done: Atomic<u32>,
        #[pin]
        work: Work<Beside>,
    }

    impl_has_work! {
        impl HasWork<Self> for Beside { self.work }
    }

    impl WorkItem for Beside {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            if let Some(hold) = this.held.lock().take() {
                fsleep(Delta::from_millis(20));
                // The data are there.
                assert_eq!(hold.seen.dropped.load(Relaxed), 0);
                this.done.store(1, Release);
                drop(hold);
            }
            let handle = this.handle.lock().take();
            if let Some(handle) = handle {
                // Sends until there is nothing to send by.
                while let Ok(skb) = frame(&handle, 2) {
                    match handle.send(skb) {
                        Err(ENODEV) => break,
                        Ok(()) => {
                            this.sent.fetch_add(1, Relaxed);
                        }
                        Err(_) => {}
                    }
                    handle.upper().taken.clear(DropReason::NotSpecified);
                    if this.sent.load(Relaxed) % 64 == 0 {
                        fsleep(Delta::from_millis(1));
                    }
                }
                this.done.store(1, Release);
            }
        }
    }

    fn beside() -> Result<Arc<Beside>> {
        Arc::pin_init(
            try_pin_init!(Beside {
                held <- new_mutex!(None),
                handle <- new_mutex!(None),
                sent: Atomic::new(0),
                done: Atomic::new(0),
                work <- new_work!("rust_net_test"),
            }),
            GFP_KERNEL,
        )
    }

    #[test]
    fn a_device_goes_after_all_who_hold_it() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet8", &seen)?;
        let beside = beside()?;
        *beside.held.lock() = Some(dev.hold().clone());
        assert!(queue.enqueue(beside.clone()).is_ok());
        drop(dev);
        assert_eq!(beside.done.load(Acquire), 1);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn a_device_goes_while_it_sends_and_receives() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet9", &seen)?;
        bring_up(&dev)?;
        let attachment = Attachment::new(c"kunitnet9", Taker::new())?;
        let vlan = attachment.handle().want(Want::Vlan(VLAN))?;
        let beside = beside()?;
        *beside.handle.lock() = Some(attachment.handle());
        assert!(queue.enqueue(beside.clone()).is_ok());
        assert!(becomes(|| beside.sent.load(Relaxed) > 500));
        drop(dev);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(attachment.upper().has_seen(InterfaceEvent::Gone));
        queue.flush();
        assert_eq!(beside.done.load(Acquire), 1);
        assert!(Rtnl::with(|rtnl| attachment.handle().state(rtnl)).is_none());
        drop(vlan);
        Ok(())
    }

    #[test]
    fn an_attachment_ends_while_frames_arrive() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet10", &seen)?;
        bring_up(&dev)?;
        for _ in 0..5 {
            let attachment = Attachment::new(c"kunitnet10", Taker::new())?;
            let beside = beside()?;
            *beside.handle.lock() = Some(attachment.handle());
            assert!(queue.enqueue(beside.clone()).is_ok());
            assert!(becomes(|| beside.sent.load(Relaxed) > 100));
            drop(attachment);
            queue.flush();
            assert_eq!(beside.done.load(Acquire), 1);
        }
        drop(dev);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        Ok(())
    }
}
