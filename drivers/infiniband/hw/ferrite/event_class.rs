// SPDX-License-Identifier: GPL-2.0

//! Events that are about no queue, by class: errors of memory, management, and channels that are not
//! there. They are counted, and those that somebody should know of are printed.

use crate::abi::{
    EventCode,
    EventEntry,
    Management,
    MEMORY_ERRORS_UNTOLD, //
};
use kernel::{
    fmt,
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
};

/// What such an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventClass {
    /// The device's own memory.
    InternalMemory,
    /// Host memory that the device read.
    ExternalMemory,
    /// What somebody did to the device from outside.
    Management,
    /// A channel of the network interface.
    Channel,
}

impl EventClass {
    /// All classes, each with its name.
    pub(crate) const ALL: [(Self, &'static CStr); 4] = [
        (Self::InternalMemory, c"internal_memory"),
        (Self::ExternalMemory, c"external_memory"),
        (Self::Management, c"management"),
        (Self::Channel, c"channel"),
    ];

    /// The class of an event, unless it is about a queue or about the device as a whole.
    pub(crate) fn of(code: EventCode) -> Option<Self> {
        Some(match code {
            EventCode::MemoryErrorInternal => Self::InternalMemory,
            EventCode::MemoryErrorExternal => Self::ExternalMemory,
            EventCode::ManagementAction => Self::Management,
            EventCode::ChannelPackets
            | EventCode::ChannelDescriptors
            | EventCode::ChannelPoolLow
            | EventCode::ChannelBadBuffers => Self::Channel,
            _ => return None,
        })
    }
}

/// How many events of each class there were.
pub(crate) struct EventCounts([Atomic<u64>; EventClass::ALL.len()]);

impl EventCounts {
    /// None so far.
    pub(crate) const fn new() -> Self {
        Self([const { Atomic::new(0) }; EventClass::ALL.len()])
    }

    /// So many more. May be called in interrupt context.
    pub(crate) fn count(&self, class: EventClass, number: u64) {
        self.0[class as usize].fetch_add(number, Relaxed);
    }

    /// How many there were.
    pub(crate) fn get(&self, class: EventClass) -> u64 {
        self.0[class as usize].load(Relaxed)
    }
}

/// What is printed of an event, if it is one to know of.
pub(crate) struct Description<'a>(pub(crate) EventClass, pub(crate) &'a EventEntry);

impl Description<'_> {
    /// Whether there is anything to print.
    pub(crate) fn is_printed(&self) -> bool {
        self.0 != EventClass::Channel
    }

    /// How many there were before it that the device had no room to tell of.
    fn untold(&self) -> u64 {
        match self.0 {
            EventClass::InternalMemory | EventClass::ExternalMemory => {
                self.1.param1 >> MEMORY_ERRORS_UNTOLD
            }
            EventClass::Management | EventClass::Channel => 0,
        }
    }

    /// How many it stands for.
    pub(crate) fn number(&self) -> u64 {
        1 + self.untold()
    }

    /// Whether what the device's memory held was given up. Of others that are not told it is not known.
    fn is_given_up(&self) -> bool {
        self.1.param1 & ((1 << MEMORY_ERRORS_UNTOLD) - 1) != 0
    }

    /// Whether something was lost.
    pub(crate) fn is_error(&self) -> bool {
        match self.0 {
            EventClass::InternalMemory => self.is_given_up(),
            EventClass::ExternalMemory => true,
            EventClass::Management | EventClass::Channel => false,
        }
    }
}

impl fmt::Display for Description<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(class, event) = self;
        match class {
            EventClass::InternalMemory => write!(
                f,
                "memory of the device failed at {:#x}: {}",
                event.param0,
                if self.is_given_up() {
                    "given up"
                } else {
                    "corrected"
                }
            ),
            EventClass::ExternalMemory => {
                write!(
                    f,
                    "host memory is poisoned: DMA address {:#x}",
                    event.param0
                )
            }
            EventClass::Management => match Management::from_number(event.id) {
                Some(action) => write!(f, "changed by its management: {:?}", action),
                None => write!(f, "changed by its management: {:#x}", event.id),
            },
            EventClass::Channel => write!(f, "channel {}", event.id),
        }?;
        match self.untold() {
            0 => Ok(()),
            untold => write!(f, " ({} before it are not told)", untold),
        }
    }
}

#[kunit_tests(ferrite_event_class)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    #[test]
    fn events_are_counted_by_class_and_by_no_other() {
        let codes = [
            (EventCode::MemoryErrorInternal, EventClass::InternalMemory),
            (EventCode::MemoryErrorExternal, EventClass::ExternalMemory),
            (EventCode::ManagementAction, EventClass::Management),
            (EventCode::ChannelPackets, EventClass::Channel),
            (EventCode::ChannelDescriptors, EventClass::Channel),
            (EventCode::ChannelPoolLow, EventClass::Channel),
            (EventCode::ChannelBadBuffers, EventClass::Channel),
        ];
        let counts = EventCounts::new();
        for (code, class) in codes {
            assert_eq!(EventClass::of(code), Some(class));
            counts.count(class, 1);
        }
        for ((class, _), expected) in EventClass::ALL.into_iter().zip([1, 1, 1, 4]) {
            assert_eq!(counts.get(class), expected);
        }
        for code in [
            EventCode::Completion,
            EventCode::CommandDone,
            EventCode::LinkChange,
            EventCode::DeviceFatal,
            EventCode::EventQueueOverflow,
        ] {
            assert_eq!(EventClass::of(code), None);
        }
    }

    #[test]
    fn what_was_lost_is_an_error_and_a_channel_is_not_printed() {
        let event = |param1| EventEntry {
            param1,
            ..EventEntry::zeroed()
        };
        let (corrected, lost) = (event(0), event(1));
        assert!(!Description(EventClass::InternalMemory, &corrected).is_error());
        assert!(Description(EventClass::InternalMemory, &lost).is_error());
        assert!(Description(EventClass::ExternalMemory, &corrected).is_error());
        assert!(!Description(EventClass::Management, &lost).is_error());
        assert!(Description(EventClass::Management, &lost).is_printed());
        assert!(!Description(EventClass::Channel, &lost).is_printed());
    }

    #[test]
    fn an_event_stands_for_those_that_are_not_told_and_says_nothing_else_of_them() {
        let event = |param1| EventEntry {
            param1,
            ..EventEntry::zeroed()
        };
        let untold = 7 << MEMORY_ERRORS_UNTOLD;
        for (class, number) in [
            (EventClass::InternalMemory, 8),
            (EventClass::ExternalMemory, 8),
            (EventClass::Management, 1),
            (EventClass::Channel, 1),
        ] {
            assert_eq!(Description(class, &event(untold)).number(), number);
            assert_eq!(Description(class, &event(1)).number(), 1);
        }
        // This one was corrected.
        assert!(!Description(EventClass::InternalMemory, &event(untold)).is_error());
        assert!(Description(EventClass::InternalMemory, &event(untold | 1)).is_error());
        assert_eq!(
            Description(EventClass::InternalMemory, &event(u64::MAX)).number(),
            1 << 32
        );
    }
}
