// SPDX-License-Identifier: GPL-2.0

//! What the device says of a command: its status, and structures that it writes.

use crate::{
    abi,
    abi::{
        CommandOpcode,
        CommandStatus,
        ObjectNumber,
        Plain, //
    },
    dma_types::{
        Counters,
        DeviceChannelCounters,
        Nothing,
        QpCounters, //
    },
    kernel_ext::errno,
    requests::{
        Answered,
        Outcome,
        PostedFor,
        Request,
        Requests, //
    }, //
};
use kernel::prelude::*;

/// What stands for all that is no [`CommandStatus`].
const NO_STATUS: u32 = 1 << u8::BITS;

/// The status in the event of a finished command.
pub(super) fn status_of(param: u64) -> u32 {
    u8::try_from(param).map_or(NO_STATUS, u32::from)
}

/// What a device answers to a query; each query has an answer of its own.
pub(crate) trait Answer: Plain {
    /// What asks for it.
    const QUERY: CommandOpcode;
    /// Bytes of it in the first version of the interface, which every device writes. What a later
    /// one added is zero from those that do not know of it.
    const LEAST: usize;
    /// What that needs to know.
    type Request: Plain;
}

macro_rules! answers {
    ($($query:ident($request:ty) -> $answer:ty: $least:literal,)*) => {$(
        impl Answer for $answer {
            const QUERY: CommandOpcode = CommandOpcode::$query;
            const LEAST: usize = {
                assert!($least <= core::mem::size_of::<Self>());
                $least
            };
            type Request = $request;
        }
    )*};
}

answers! {
    QueryDevice(Nothing) -> abi::DeviceCaps: 256,
    QueryQueuePair(ObjectNumber) -> abi::QueuePairState: 192,
    QuerySrq(ObjectNumber) -> abi::SrqState: 64,
    QueryCompletionQueue(ObjectNumber) -> abi::CompletionQueueState: 64,
    QueryTag(ObjectNumber) -> abi::TagState: 64,
    QueryQueuePairCounters(abi::QueryQueuePairCounters) -> QpCounters: 152,
    // As many as the device said that it has, all of which are asked for.
    QueryCounters(abi::QueryCounters) -> Counters: 128,
    QueryChannelCounters(abi::QueryChannelCounters) -> DeviceChannelCounters: 96,
    QueryClock(Nothing) -> abi::ClockReading: 64,
    TakeFaults(Nothing) -> abi::PageFaults: 256,
}

/// Names an object to a command.
pub(crate) fn object(number: u32) -> ObjectNumber {
    ObjectNumber {
        number,
        reserved: 0,
    }
}

/// How many of the `wanted` bytes of an answer are there, of which the device says that it has
/// `written`; none where those are missing that there are of every device, the `least`. It may have
/// more than was asked for.
pub(super) fn answered(written: u64, wanted: usize, least: usize) -> Option<usize> {
    let there = usize::try_from(written).map_or(wanted, |written| written.min(wanted));
    (there >= least.min(wanted)).then_some(there)
}

/// What became of a request that is done, and its reply, as far as the device wrote it. `too_short` is told how
/// many bytes that are, where it is too little.
pub(super) fn take_answer(
    requests: &Requests,
    request: &Request,
    least: usize,
    answer: &mut [u8],
    too_short: impl FnOnce(u64),
) -> Result {
    let outcome = requests.outcome(&request.ticket);
    outcome_to_result(outcome)?;
    let Outcome::Answered { result, .. } = outcome else {
        return Err(EIO);
    };
    let Some(there) = answered(result, answer.len(), least) else {
        too_short(result);
        return Err(EIO);
    };
    if there != 0 {
        requests.reply(request, &mut answer[..there]);
    }
    Ok(())
}

/// Which object a command was about that was posted and failed, and why, by what was answered.
pub(super) fn failed_post(answered: Answered, status: u32) -> Option<(PostedFor, u32, Error)> {
    match answered {
        Answered::Request => None,
        Answered::Posted { what, number } => {
            let error = status_to_result(status).err()?;
            Some((what, number, error))
        }
    }
}

/// What a caller sees of how a command ended.
pub(crate) fn outcome_to_result(outcome: Outcome) -> Result {
    match outcome {
        Outcome::Answered { status, .. } => status_to_result(status),
        Outcome::Lost => Err(EIO),
    }
}

/// What a caller sees of a command's status.
fn status_to_result(status: u32) -> Result {
    let known = u8::try_from(status).ok();
    let Some(status) = known.and_then(CommandStatus::from_number) else {
        return Err(EIO);
    };
    Err(match status {
        CommandStatus::Ok => return Ok(()),
        CommandStatus::BadOpcode | CommandStatus::Unsupported => errno::eopnotsupp(),
        CommandStatus::BadParameter | CommandStatus::BadNumber | CommandStatus::BadState => EINVAL,
        CommandStatus::Exists => EEXIST,
        CommandStatus::NotFound => ENOENT,
        CommandStatus::Busy => EBUSY,
        CommandStatus::NoResource => ENOMEM,
        CommandStatus::HostMemory => EFAULT,
    })
}

#[kunit_tests(ferrite_cqp_answer)]
mod tests {
    use super::*;
    use crate::{
        abi::CommandEntry,
        requests::{
            stage::Stage,
            Class, //
        }, //
    };
    use core::cell::Cell;

    #[test]
    fn what_a_device_did_not_write_of_a_reply_is_not_taken() -> Result {
        let mut stage = Stage::new()?;
        let who = stage.ask(1, Class::Short)?;
        stage.memory.reply.set(0xff);
        assert!(stage.answer_some(0..1, 16));
        let mut answer = [0; 128];
        let request = stage.request(who);
        take_answer(
            &stage.requests,
            request,
            16,
            &mut answer,
            |_| unreachable!(),
        )?;
        assert!(answer[..16].iter().all(|byte| *byte == 0xff));
        assert!(answer[16..].iter().all(|byte| *byte == 0));
        let told = Cell::new(None);
        let too_short = |written| told.set(Some(written));
        let request = stage.request(who);
        let less = take_answer(&stage.requests, request, 17, &mut answer, too_short);
        assert_eq!((less, told.get()), (Err(EIO), Some(16)));
        Ok(())
    }

    #[test]
    fn what_was_posted_and_failed_is_told_and_nothing_else() {
        let number = 0x1234;
        let told = |answered, status: CommandStatus| failed_post(answered, status.number().into());
        for what in [PostedFor::Making, PostedFor::Release] {
            let posted = Answered::Posted { what, number };
            assert_eq!(told(posted, CommandStatus::Ok), None);
            let resource = told(posted, CommandStatus::NoResource);
            assert_eq!(resource, Some((what, number, ENOMEM)));
            assert_eq!(failed_post(posted, NO_STATUS), Some((what, number, EIO)));
        }
        // Who waits finds out himself.
        assert_eq!(told(Answered::Request, CommandStatus::NoResource), None);
        // One that the device never answered failed as well.
        assert_eq!(outcome_to_result(Outcome::Lost), Err(EIO));
    }

    #[test]
    fn an_answer_is_taken_as_far_as_the_device_says_that_it_wrote_it() {
        assert_eq!(answered(256, 256, 256), Some(256));
        // A later device may know more.
        assert_eq!(answered(512, 256, 256), Some(256));
        assert_eq!(answered(u64::MAX, 256, 256), Some(256));
        // An earlier one less, but no less than there was at first.
        assert_eq!(answered(256, 320, 256), Some(256));
        assert_eq!(answered(300, 320, 256), Some(300));
        for (written, wanted, least) in [(255, 256, 256), (255, 320, 256), (0, 8, 8), (15, 16, 128)]
        {
            assert_eq!(answered(written, wanted, least), None);
        }
        // Only the start was asked for.
        assert_eq!(answered(128, 16, 128), Some(16));
        assert_eq!(answered(16, 16, 128), Some(16));
    }

    #[test]
    fn commands_say_how_long_their_structures_are() {
        let entry = CommandEntry::new(CommandOpcode::QueryDevice, 7, (0x1000, 256), &Nothing);
        assert_eq!((entry.request_length, entry.reply_length), (0, 256));
        assert_eq!((entry.flags, entry.request, entry.reply), (0, 0, 0x1000));
        assert!(entry.payload.iter().all(|byte| *byte == 0));
        let entry = CommandEntry::new(CommandOpcode::DestroyQueuePair, 7, (0, 0), &object(9));
        assert_eq!((entry.request_length, entry.reply_length), (8, 0));
        assert_eq!(entry.payload[..8], [9, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn only_status_ok_is_success() {
        let result = |param| status_to_result(status_of(param));
        assert_eq!(result(CommandStatus::Ok.number().into()), Ok(()));
        for status in 1..=0x3ff {
            assert!(result(status).is_err());
        }
        assert_eq!(result(CommandStatus::Busy.number().into()), Err(EBUSY));
        // What is no status at all is none that means something.
        for param in [0x100, 0x1_0000_0000, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            assert_eq!(result(param), Err(EIO));
        }
    }
}
