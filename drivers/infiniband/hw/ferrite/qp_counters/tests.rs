// SPDX-License-Identifier: GPL-2.0

//! Tests of counters, with a device whose counts are known.

use super::set::{
    FRESH,
    MOST_IN_VAIN, //
};
use super::*;
use crate::abi::Plain;
use core::cell::{
    Cell,
    RefCell, //
};

#[kunit_tests(ferrite_qp_counters)]
mod suite {
    use super::*;

    /// So many of each.
    fn each(value: u64) -> Values {
        [value; abi::COUNTER_NAMES.len()]
    }

    /// Sets of a device whose queue pairs have counted ten for each of their numbers, and `more`.
    struct Device {
        registry: Arc<Registry>,
        more: Cell<u64>,
        /// How many queue pairs were asked for each time.
        asked: RefCell<KVec<usize>>,
    }

    impl Device {
        /// With a set of each of these numbers.
        fn new(sets: &[u32]) -> Result<Self> {
            let registry = Registry::new()?;
            for number in sets {
                registry.create(*number)?;
            }
            Ok(Self {
                registry,
                more: Cell::new(0),
                asked: RefCell::new(KVec::new()),
            })
        }

        fn ask(&self, qpns: &[u32]) -> Result<Values> {
            // Whoever waits for the device, nobody else does for him.
            let state = self.registry.state.try_lock();
            assert!(state.is_some(), "others are kept waiting");
            drop(state);
            self.asked.borrow_mut().push(qpns.len(), GFP_KERNEL)?;
            let counted = |qpn: &u32| u64::from(*qpn) * 10 + self.more.get();
            Ok(each(qpns.iter().map(counted).sum()))
        }

        fn bind(&self, set: u32, qpn: u32) -> Result {
            self.registry.bind(set, qpn, |qpns| self.ask(qpns))
        }

        fn unbind(&self, set: u32, qpn: u32) {
            self.registry.unbind(set, qpn, |qpns| self.ask(qpns));
        }

        /// Reads a set anew; `meanwhile` is called each time that the device is asked for some.
        fn read_while(&self, set: u32, mut meanwhile: impl FnMut(&[u32])) -> Result<Values> {
            self.registry.with_set(set, |set| set.read = None)?;
            self.registry.read(set, Reader::OfSet, &mut |qpns| {
                let counted = self.ask(qpns);
                meanwhile(qpns);
                counted
            })
        }

        fn read(&self, set: u32) -> Result<Values> {
            self.read_while(set, |_| ())
        }

        /// Reads all of them anew.
        fn read_all_while(&self, mut meanwhile: impl FnMut(&[u32])) -> Values {
            for set in self.registry.state.lock().sets.values_mut() {
                set.read = None;
            }
            self.registry.read_all(&mut |qpns| {
                let counted = self.ask(qpns);
                meanwhile(qpns);
                counted
            })
        }
    }

    #[test]
    fn a_set_has_what_its_members_count_from_when_they_are_bound() -> Result {
        let device = Device::new(&[1])?;
        assert_eq!(device.read(1)?, NOTHING);
        device.bind(1, 5)?;
        assert_eq!(device.read(1)?, NOTHING);
        device.more.set(8);
        assert_eq!(device.read(1)?, each(8));
        device.bind(1, 7)?;
        device.more.set(10);
        assert_eq!(device.read(1)?, each(10 + 2));
        Ok(())
    }

    #[test]
    fn a_queue_pair_is_a_member_of_one_set() -> Result {
        let device = Device::new(&[1, 2])?;
        device.bind(2, 5)?;
        for set in [1, 2] {
            assert_eq!(device.bind(set, 5), Err(EBUSY));
        }
        device.unbind(2, 5);
        device.bind(1, 5)?;
        assert_eq!(device.bind(3, 6), Err(ENOENT));
        Ok(())
    }

    #[test]
    fn what_a_member_counted_stays_when_it_leaves() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.bind(1, 7)?;
        device.more.set(3);
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(6));
        // One that is no member changes nothing.
        device.more.set(1000);
        device.unbind(1, 5);
        device.more.set(3);
        assert_eq!(device.read(1)?, each(6));
        // Of one that the device says no more of, nothing stays.
        device.registry.unbind(1, 7, |_| Err(EIO));
        assert_eq!(device.read(1)?, each(3));
        // And it may come again.
        device.bind(1, 5)?;
        assert_eq!(device.read(1)?, each(3));
        device.more.set(4);
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(4));
        Ok(())
    }

    #[test]
    fn counters_that_wrap_count_on() -> Result {
        let device = Device::new(&[1])?;
        device.more.set(u64::MAX - 59);
        device.bind(1, 5)?;
        device.more.set(0);
        assert_eq!(device.read(1)?, each(60));
        device.unbind(1, 5);
        assert_eq!(device.read(1)?, each(60));
        Ok(())
    }

    #[test]
    fn a_query_names_no_more_queue_pairs_than_it_has_room_for() -> Result {
        const MEMBERS: u32 = 2 * abi::COUNTED_QUEUE_PAIRS as u32 + 1;
        let device = Device::new(&[1])?;
        for qpn in 2..2 + MEMBERS {
            device.bind(1, qpn)?;
        }
        device.more.set(7);
        device.asked.borrow_mut().clear();
        let counted = device.read_while(1, |qpns| {
            let command = query(qpns);
            let named = &command.qpns[..command.count as usize];
            assert_eq!(named, qpns);
            assert!(command.qpns[named.len()..].iter().all(|qpn| *qpn == 0));
        })?;
        assert_eq!(&device.asked.borrow()[..], [54, 54, 1]);
        assert_eq!(counted, each(7 * u64::from(MEMBERS)));
        Ok(())
    }

    #[test]
    fn who_comes_or_goes_while_a_set_is_read_is_counted_once() -> Result {
        const MEMBERS: u32 = 3 * abi::COUNTED_QUEUE_PAIRS as u32;
        let device = Device::new(&[1])?;
        for qpn in 2..2 + MEMBERS {
            device.bind(1, qpn * 2)?;
        }
        device.more.set(1);
        // While the second part is asked for: of the first, of this one and of the last.
        let leaving = [10, 150, 300];
        let mut round = 0;
        let counted = device.read_while(1, |qpns| {
            round += 1;
            if round == 2 {
                assert!(qpns.contains(&leaving[1]));
                for qpn in leaving {
                    device.unbind(1, qpn);
                }
                for qpn in [11, 151, 301] {
                    assert_eq!(device.bind(1, qpn), Ok(()));
                }
            }
        })?;
        assert_eq!(counted, each(u64::from(MEMBERS)));
        // What has changed meanwhile is not what is told to the next one, who would not read it again.
        assert!(device.registry.with_set(1, |set| set.read.is_none())?);
        device.more.set(2);
        let left = leaving.len() as u64;
        let stayed = u64::from(MEMBERS) - left;
        // Those that left have one each, those that came have it since.
        assert_eq!(device.read(1)?, each(left + 2 * stayed + left));
        Ok(())
    }

    #[test]
    fn who_reads_does_not_ask_for_ever_while_members_come_and_go() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.more.set(3);
        assert_eq!(device.read(1)?, each(3));
        device.more.set(4);
        let mut rounds = 0;
        // One that is asked for leaves each time, and comes again.
        let seen = device.read_all_while(|qpns| {
            rounds += 1;
            assert!(rounds <= 100);
            assert_eq!(qpns, [5]);
            device.unbind(1, 5);
            assert_eq!(device.bind(1, 5), Ok(()));
        });
        // As it was heard of last.
        assert_eq!((seen, rounds), (each(3), MOST_IN_VAIN));
        assert_eq!(device.read_all_while(|_| ()), each(4));
        Ok(())
    }

    #[test]
    fn a_set_that_ends_while_all_are_read_is_counted_once() -> Result {
        for ends in [1, 2, 3] {
            let device = Device::new(&[1, 2, 3])?;
            for set in [1, 2, 3] {
                device.bind(set, 10 * set)?;
            }
            device.more.set(100);
            let counted = device.read_all_while(|qpns| {
                if qpns == [20] {
                    device.unbind(ends, 10 * ends);
                    device.registry.end(ends);
                }
            });
            assert_eq!(counted, each(300));
            assert_eq!(device.read_all_while(|_| ()), each(300));
        }
        Ok(())
    }

    #[test]
    fn what_one_set_cannot_say_is_no_reason_to_say_nothing_of_the_port() -> Result {
        let device = Device::new(&[1, 2])?;
        device.bind(1, 5)?;
        device.bind(2, 6)?;
        device.more.set(10);
        assert_eq!(device.read_all_while(|_| ()), each(20));
        device.more.set(11);
        for set in device.registry.state.lock().sets.values_mut() {
            set.read = None;
        }
        let counted = device.registry.read_all(&mut |qpns| match qpns {
            [5] => Err(EIO),
            _ => device.ask(qpns),
        });
        assert_eq!(counted, each(21));
        Ok(())
    }

    #[test]
    fn a_set_is_read_once_for_all_that_ask_at_the_same_time() -> Result {
        let device = Device::new(&[1])?;
        device.bind(1, 5)?;
        device.more.set(1);
        device.read(1)?;
        device.asked.borrow_mut().clear();
        let ask = &mut |qpns: &[u32]| device.ask(qpns);
        for reader in [Reader::OfSet, Reader::OfPort, Reader::OfSet] {
            device.registry.read(1, reader, ask)?;
        }
        // More than once only where so much time has passed.
        let read = device.registry.with_set(1, |set| set.read)?;
        assert!(device.asked.borrow().len() < 3 || read.is_some_and(|read| read.elapsed() > FRESH));
        // A device that does not answer is no reason to forget; but the error is told, and who comes next asks again.
        for _ in 0..2 {
            device.registry.with_set(1, |set| set.read = None)?;
            let refused = device.registry.read(1, Reader::OfSet, &mut |_| Err(EIO));
            assert_eq!(refused.err(), Some(EIO));
        }
        assert_eq!(device.registry.with_set(1, |set| set.seen)?, each(1));
        // Who comes while another of his kind reads it has what was seen last.
        device.more.set(2);
        let read = device.read_while(1, |_| {
            let meanwhile = device.registry.read(1, Reader::OfSet, &mut |_| Err(EIO));
            assert_eq!(meanwhile, Ok(each(1)));
        })?;
        assert_eq!(read, each(2));
        Ok(())
    }

    #[test]
    fn what_sets_have_counted_is_left_to_the_core_which_adds_it() {
        let mut port = each(100);
        take_away(&mut port, &each(30));
        assert_eq!(port, each(70));
        // Packets to groups.
        take_away(&mut port, &each(71));
        assert_eq!(port, NOTHING);
    }

    #[test]
    fn only_counters_that_the_device_has_for_queue_pairs_are_shown() {
        let caps = abi::DeviceCaps {
            counters: 3,
            qp_counters: 0b1101,
            ..abi::DeviceCaps::zeroed()
        };
        assert!(counts(&caps, 0) && counts(&caps, 2));
        for place in [1, 3, 64, usize::MAX] {
            assert!(!counts(&caps, place));
        }
    }
}
