// SPDX-License-Identifier: GPL-2.0

//! Tests of the ring: what is drained, armed and moved, whatever the device does meanwhile.

use super::ring::EventSlots;
use super::*;
use crate::abi::EventCode;
use core::cell::RefCell;

#[kunit_tests(ferrite_eq)]
mod suite {
    use super::*;

    struct Memory(RefCell<KVec<EventEntry>>);

    impl Ring<&Memory> {
        fn of(memory: &Memory) -> Ring<&Memory> {
            let log_entries = memory.0.borrow().len().trailing_zeros() as u8;
            Ring {
                slots: memory,
                log_entries,
            }
        }
    }

    impl Memory {
        fn new(entries: usize) -> Result<Self> {
            let mut memory = KVec::with_capacity(entries, GFP_KERNEL)?;
            for _ in 0..entries {
                memory.push(EventEntry::zeroed(), GFP_KERNEL)?;
            }
            Ok(Self(RefCell::new(memory)))
        }

        fn put(&self, slot: usize, id: u32) {
            self.0.borrow_mut()[slot] = EventEntry {
                code: EventCode::Completion.number(),
                id,
                ..EventEntry::zeroed()
            };
        }
    }

    impl EventSlots for &Memory {
        fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
            let mut memory = self.0.borrow_mut();
            let entry = memory.get_mut(slot).ok_or(EINVAL)?;
            let taken = *entry;
            entry.code = 0;
            Ok((taken.code != 0).then_some(taken))
        }

        fn is_written(&self, slot: usize) -> Result<bool> {
            Ok(self.0.borrow().get(slot).ok_or(EINVAL)?.code != 0)
        }
    }

    #[test]
    fn a_zero_code_is_an_empty_entry() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        assert_eq!(consumer.drain(|_| {}), 0);
        memory.put(1, 7);
        // Entry 0 is still empty: nothing after it counts.
        assert_eq!(consumer.drain(|_| {}), 0);
        memory.put(0, 6);
        let mut ids = KVec::new();
        assert_eq!(
            consumer.drain(|entry| {
                let _ = ids.push(entry.id, GFP_KERNEL);
            }),
            2
        );
        assert_eq!(ids.as_slice(), [6u32, 7].as_slice());
        Ok(())
    }

    #[test]
    fn consumed_entries_are_cleared_for_the_next_round() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for round in 0..5u32 {
            for slot in 0..16usize {
                memory.put(slot, round);
                assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, round)), 1);
            }
            // The ring has wrapped: old entries must not be seen again.
            assert_eq!(consumer.drain(|_| {}), 0);
        }
        assert_eq!(consumer.rearm(3, false).read_index, 80);
        Ok(())
    }

    #[test]
    fn the_ring_is_drained_before_it_is_armed() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        memory.put(0, 1);
        // Another event arrives while the first is handled; it belongs to this interrupt.
        let consumed = consumer.drain(|entry| {
            if entry.id == 1 {
                memory.put(1, 2);
            }
        });
        assert_eq!(consumed, 2);
        let doorbell = consumer.rearm(2, false);
        assert_eq!(doorbell.read_index, 2);
        assert!(doorbell.arm && doorbell.valid && !doorbell.relative && !doorbell.quiet);
        assert!(consumer.rearm(2, true).quiet);
        Ok(())
    }

    #[test]
    fn what_is_seen_of_a_queue_is_how_far_the_driver_is() -> Result {
        let memory = Memory::new(16)?;
        let larger = Memory::new(32)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        let mut expected = consumer.look();
        assert_eq!(
            (expected.log_entries, expected.index, expected.told),
            (4, 0, 0)
        );
        assert!(!expected.armed && !expected.unread && !expected.moving);
        consumer.rearm(1, false);
        expected.armed = true;
        assert_eq!(consumer.look(), expected);
        memory.put(0, 7);
        expected.unread = true;
        assert_eq!(consumer.look(), expected);
        // To look takes nothing.
        assert_eq!(consumer.drain(|_| {}), 1);
        expected.unread = false;
        (expected.armed, expected.index) = (false, 1);
        assert_eq!(consumer.look(), expected);
        consumer.rearm(1, true);
        (expected.armed, expected.told) = (true, 1);
        assert_eq!(consumer.look(), expected);
        assert!(consumer.offer(Ring::of(&larger)).is_ok());
        expected.moving = true;
        assert_eq!(consumer.look(), expected);
        Ok(())
    }

    #[test]
    fn a_poller_tells_how_far_it_is_now_and_then_and_never_arms() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        let mut told = KVec::new();
        for round in 0..20u32 {
            memory.put(round as usize % 16, round);
            assert_eq!(consumer.drain(|_| {}), 1);
            if let Some(doorbell) = consumer.note_polled(0) {
                assert!(doorbell.valid && !doorbell.arm);
                told.push(doorbell.read_index, GFP_KERNEL)?;
            }
            assert!(consumer.polled);
        }
        assert_eq!(told.as_slice(), [8u32, 16].as_slice());
        // Arming tells too.
        assert_eq!(consumer.rearm(0, true).read_index, 20);
        assert!(!consumer.polled);
        for index in 20..28u32 {
            memory.put(index as usize % 16, 1);
            consumer.drain(|_| {});
            assert_eq!(consumer.note_polled(0).is_some(), index == 27);
        }
        Ok(())
    }

    #[test]
    fn a_flood_is_left_after_the_budget() -> Result {
        let memory = Memory::new(16)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for slot in 0..16 {
            memory.put(slot, 0);
        }
        let mut slot = 0;
        let consumed = consumer.drain(|_| {
            memory.put(slot % 16, 0);
            slot += 1;
        });
        assert_eq!(consumed, BUDGET);
        Ok(())
    }

    #[test]
    fn a_full_ring_takes_an_interrupt_per_budget_and_one_doorbell_each() -> Result {
        let log_entries = 12;
        let entries = 1u32 << log_entries;
        let memory = Memory::new(entries as usize)?;
        let mut consumer = Consumer::new(Ring::of(&memory));
        for slot in 0..entries {
            memory.put(slot as usize, slot);
        }
        let (mut next, mut interrupts) = (0, 0);
        // As the device does: an armed queue with unread entries interrupts at once.
        let mut told = 0;
        while told != entries {
            interrupts += 1;
            let consumed = consumer.drain(|entry| {
                assert_eq!(entry.id, next);
                next += 1;
            });
            assert!((1..=BUDGET).contains(&consumed));
            let doorbell = consumer.rearm(2, false);
            assert!(doorbell.arm && doorbell.valid);
            told = doorbell.read_index;
        }
        assert_eq!(interrupts, entries.div_ceil(BUDGET));
        Ok(())
    }

    /// A device that writes entries with their index as number, first to one ring, and from some index
    /// on to another.
    struct Writer<'a> {
        rings: [&'a Memory; 2],
        switched: Option<u32>,
        index: u32,
    }

    impl Writer<'_> {
        fn ring(&self) -> &Memory {
            self.rings[usize::from(self.switched.is_some())]
        }

        /// Writes as long as there is room, with `read` entries read.
        fn write(&mut self, count: u32, read: u32) -> u32 {
            for written in 0..count {
                let entries = self.ring().0.borrow().len();
                if self.index.wrapping_sub(read) as usize == entries {
                    return written;
                }
                let slot = self.index as usize & (entries - 1);
                assert_eq!(self.ring().0.borrow()[slot].code, 0);
                self.ring().put(slot, self.index);
                self.index = self.index.wrapping_add(1);
            }
            count
        }
    }

    #[test]
    fn a_queue_that_grows_is_read_in_order_and_to_the_end() -> Result {
        // However many entries are unread when it is offered another ring, when the device takes it
        // and when it says so; at all places of a round, and where the index wraps; whether somebody
        // reads before the answer or not.
        let counts = [
            (0, 0, 0),
            (0, 1, 0),
            (0, 0, 3),
            (16, 0, 0),
            (16, 0, 20),
            (3, 13, 30),
            (7, 2, 32),
        ];
        for start in [0u32, 5, 15, u32::MAX - 3] {
            for (before, until_taken, until_answered) in counts {
                grow(start, before, until_taken, until_answered, false)?;
                grow(start, before, until_taken, until_answered, true)?;
            }
        }
        Ok(())
    }

    fn grow(
        start: u32,
        before: u32,
        until_taken: u32,
        until_answered: u32,
        read_early: bool,
    ) -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut device = Writer {
            rings: [&old, &new],
            switched: None,
            index: start,
        };
        let mut consumer = Consumer::new(Ring::of(&old));
        consumer.index = start;
        let mut next = start;
        let mut read = |consumer: &mut Consumer<&Memory>| {
            consumer.drain(|entry| {
                assert_eq!(entry.id, next);
                next = next.wrapping_add(1);
            });
            next
        };
        device.write(before, start);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        device.write(until_taken, start);
        device.switched = Some(device.index);
        device.write(until_answered, start);
        if read_early {
            assert_eq!(read(&mut consumer), device.index);
        }
        let mut settled = consumer.settle(true);
        if matches!(settled, Settled::Unread) {
            assert!(!read_early);
            read(&mut consumer);
            settled = consumer.settle(true);
        }
        let Settled::Over(ring) = settled else {
            return Err(EINVAL);
        };
        assert_eq!((ring.log_entries, consumer.ring.log_entries), (4, 5));
        // All of the old one was read, and the device is told.
        let told = consumer.tell(7);
        assert!(told.valid && !told.arm && !told.disarm && told.eqn == 7);
        assert_eq!(told.read_index, consumer.index);
        assert!(old.0.borrow().iter().all(|entry| entry.code == 0));
        assert_eq!(read(&mut consumer), device.index);
        // It goes on in the new one only.
        let index = device.index;
        assert_eq!(device.write(100, index), 32);
        assert_eq!(read(&mut consumer), index.wrapping_add(32));
        assert!(matches!(consumer.settle(true), Settled::Nothing));
        Ok(())
    }

    /// Rings of a device that goes on between the consumer's look at the one and at the other.
    #[derive(Clone, Copy)]
    struct Racing<'a, 'b> {
        memory: &'a Memory,
        /// What the device does before it is looked whether there is something in a slot.
        meanwhile: Option<&'a RefCell<Writer<'b>>>,
    }

    impl EventSlots for Racing<'_, '_> {
        fn take(&self, slot: usize) -> Result<Option<EventEntry>> {
            self.memory.take(slot)
        }

        fn is_written(&self, slot: usize) -> Result<bool> {
            if let Some(device) = self.meanwhile {
                let mut device = device.borrow_mut();
                if device.switched.is_none() {
                    // All that finds room in the old ring, then all that does in the new one, whose
                    // slots are free whatever is unread in the old one.
                    let start = device.index;
                    device.write(5, start);
                    let switched = device.index;
                    device.switched = Some(switched);
                    assert_eq!(device.write(100, switched), 16);
                }
            }
            self.memory.is_written(slot)
        }
    }

    #[test]
    fn a_device_that_switches_between_two_looks_loses_nothing() -> Result {
        for start in [0u32, 5, 13, u32::MAX - 7] {
            let (old, new) = (Memory::new(16)?, Memory::new(16)?);
            let device = RefCell::new(Writer {
                rings: [&old, &new],
                switched: None,
                index: start,
            });
            let ring = |memory, meanwhile| Ring {
                slots: Racing { memory, meanwhile },
                log_entries: 4,
            };
            let mut consumer = Consumer::new(ring(&old, None));
            consumer.index = start;
            assert!(consumer.offer(ring(&new, Some(&device))).is_ok());
            let mut next = start;
            assert_eq!(
                consumer.drain(|entry| {
                    assert_eq!(entry.id, next);
                    next = next.wrapping_add(1);
                }),
                21
            );
            assert_eq!(next, device.borrow().index);
            // The old one was left, and is the consumer's until the command is answered.
            assert!(consumer.left.is_some() && consumer.next.is_none());
            assert!(matches!(consumer.settle(true), Settled::Over(_)));
        }
        Ok(())
    }

    #[test]
    fn an_old_ring_is_kept_until_the_command_is_answered() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut consumer = Consumer::new(Ring::of(&old));
        old.put(0, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        // All of it is consumed, and the device may still write there.
        assert_eq!(consumer.drain(|_| {}), 1);
        assert_eq!(consumer.drain(|_| {}), 0);
        assert!(consumer.left.is_none() && consumer.next.is_some());
        old.put(1, 1);
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 1)), 1);
        // An entry in the new one, before the answer: kept still.
        new.put(2, 2);
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 2)), 1);
        assert!(consumer.left.is_some());
        match consumer.settle(true) {
            Settled::Over(ring) => assert_eq!(ring.log_entries, 4),
            _ => return Err(EINVAL),
        }
        Ok(())
    }

    #[test]
    fn an_old_ring_is_kept_until_it_was_read() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut device = Writer {
            rings: [&old, &new],
            switched: None,
            index: 0,
        };
        let mut consumer = Consumer::new(Ring::of(&old));
        device.write(16, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        // Not two at a time.
        assert!(consumer.offer(Ring::of(&new)).is_err());
        device.switched = Some(16);
        device.write(4, 0);
        assert!(matches!(consumer.settle(true), Settled::Unread));
        let mut next = 0;
        let consumed = consumer.drain(|entry| {
            assert_eq!(entry.id, next);
            next += 1;
        });
        assert_eq!(consumed, 20);
        assert!(consumer.offer(Ring::of(&new)).is_err());
        assert!(matches!(consumer.settle(true), Settled::Over(_)));
        let larger = Memory::new(64)?;
        assert!(consumer.offer(Ring::of(&larger)).is_ok());
        Ok(())
    }

    #[test]
    fn a_device_that_does_not_switch_keeps_its_ring() -> Result {
        let (old, new) = (Memory::new(16)?, Memory::new(32)?);
        let mut consumer = Consumer::new(Ring::of(&old));
        old.put(0, 0);
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        match consumer.settle(false) {
            Settled::Over(ring) => assert_eq!(ring.log_entries, 5),
            _ => return Err(EINVAL),
        }
        assert_eq!(consumer.drain(|entry| assert_eq!(entry.id, 0)), 1);
        assert_eq!(consumer.ring.log_entries, 4);
        // One that says so, and has written to the new one nonetheless.
        assert!(consumer.offer(Ring::of(&new)).is_ok());
        new.put(1, 1);
        assert_eq!(consumer.drain(|_| {}), 1);
        assert!(matches!(consumer.settle(false), Settled::Contradicted));
        // Neither ring is given back while the device works.
        assert!(consumer.left.is_some());
        Ok(())
    }
}
