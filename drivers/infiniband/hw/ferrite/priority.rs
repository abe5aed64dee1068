// SPDX-License-Identifier: GPL-2.0

//! The priority of completion handlers: who may say which of them come before others.
//!
//! A handler is all users' of the device, and what one gains the others lose. So it is for those who set up
//! networks (`CAP_NET_ADMIN`, as for moderation by `rdma dev set` and for devlink) to make one a handler
//! of low latency, by the verbs or by debugfs, and to put completion queues of processes there; who is root
//! in a container only is not among them. Without the right a process can neither mark a handler, nor
//! move a queue to one that is marked, nor make one there: it gets the next bulk handler instead, as
//! most say a vector without a thought.
//!
//! Who has the right gets such a handler only by its number: a queue that was made without a wish, or that is
//! to be where its consumer is, goes to bulk ones, whose ever it is. So a handler that is marked has no queues
//! but those that somebody put there, and those of the kernel that the RDMA core did.
//!
//! Each queue knows whether it may be there (`binding.rs`), and when a handler is marked those that may not
//! leave it: else everybody would have the right who was there first. As long as all handlers are alike nobody
//! comes before others, and everybody may be anywhere.

use crate::{
    abi,
    abi::EventPriority,
    device::Ferrite,
    kernel_ext::user,
    rdma::{
        In,
        Method,
        OfDevice,
        Out,
        Ucontext, //
    },
};
use kernel::prelude::*;

/// What a priority is called.
pub(crate) fn name(priority: EventPriority) -> &'static str {
    match priority {
        EventPriority::Bulk => "bulk",
        EventPriority::LowLatency => "low-latency",
    }
}

/// The handler and the priority that a line names: `handler low-latency` or `handler bulk`.
pub(crate) fn parse(line: &str) -> Result<(u32, EventPriority)> {
    let mut words = line.split_ascii_whitespace();
    match (words.next(), words.next(), words.next()) {
        (Some(handler), Some(word), None) => {
            let handler = handler.parse().map_err(|_| EINVAL)?;
            let priority = [EventPriority::Bulk, EventPriority::LowLatency]
                .into_iter()
                .find(|priority| name(*priority) == word);
            Ok((handler, priority.ok_or(EINVAL)?))
        }
        _ => Err(EINVAL),
    }
}

/// A priority as a process tells it.
fn from_raw(raw: u32) -> Result<EventPriority> {
    let number = u8::try_from(raw).map_err(|_| EINVAL)?;
    EventPriority::from_number(number).ok_or(EINVAL)
}

/// A process sets the priority of a handler.
pub(crate) struct ModifyVector;

impl Method<Ferrite> for ModifyVector {
    type Kind = OfDevice;
    const ID: u32 = abi::UVERBS_VECTOR_MODIFY;
    type Attributes<'a> = (
        In<u32, { abi::UVERBS_VECTOR_MODIFY_VECTOR }>,
        In<u32, { abi::UVERBS_VECTOR_MODIFY_PRIORITY }>,
    );

    fn call(context: &Ucontext<Ferrite>, (vector, priority): Self::Attributes<'_>) -> Result {
        if !user::may_administer_network() {
            return Err(EPERM);
        }
        let handlers = &context.device().handlers;
        handlers.set_priority(*vector, from_raw(*priority)?)
    }
}

/// A process asks for the priority of a handler.
pub(crate) struct QueryVector;

impl Method<Ferrite> for QueryVector {
    type Kind = OfDevice;
    const ID: u32 = abi::UVERBS_VECTOR_QUERY;
    type Attributes<'a> = (
        In<u32, { abi::UVERBS_VECTOR_QUERY_VECTOR }>,
        Out<'a, u32, { abi::UVERBS_VECTOR_QUERY_PRIORITY }>,
    );

    fn call(context: &Ucontext<Ferrite>, (vector, priority): Self::Attributes<'_>) -> Result {
        let found = context.device().handlers.priority(*vector)?;
        priority.write(&found.number().into())
    }
}

#[kunit_tests(ferrite_priority)]
mod tests {
    use super::*;

    #[test]
    fn a_priority_is_set_by_a_line_and_by_nothing_else() {
        let low = Ok((3, EventPriority::LowLatency));
        assert_eq!(parse("3 low-latency\n"), low);
        assert_eq!(parse("  3\tlow-latency"), low);
        assert_eq!(parse("2 bulk"), Ok((2, EventPriority::Bulk)));
        for line in [
            "",
            "3",
            "low-latency",
            "3 fast",
            "-1 bulk",
            "4294967296 bulk",
            "3 bulk 4",
        ] {
            assert_eq!(parse(line), Err(EINVAL));
        }
    }

    #[test]
    fn a_process_names_a_priority_by_its_number() {
        assert_eq!(from_raw(0), Ok(EventPriority::Bulk));
        assert_eq!(from_raw(1), Ok(EventPriority::LowLatency));
        for raw in [2, 255, 256, 257, u32::MAX] {
            assert_eq!(from_raw(raw), Err(EINVAL));
        }
    }
}
