// SPDX-License-Identifier: GPL-2.0

//! Commands as verbs give them: how long each may take and who answers for it, objects that are made by one and taken
//! down by another, and what becomes of a device that does not do what it is told.
//!
//! This is the last hop of a verb: a command is put in the ring of the control queue pair ([`Cqp::run`]), and its answer
//! waited for, or not.
//!
//! [`Cqp::run`]: crate::cqp::Cqp::run

use crate::{
    abi::{
        Command,
        CommandEntry,
        CommandOpcode,
        InvalidatePages,
        Plain, //
    },
    cqp::{
        object,
        outcome_to_result,
        Answer,
        Manner,
        Patience,
        Released, //
    },
    dma_types::Reply,
    hardware::{
        Cause,
        Hardware, //
    },
    kernel_ext::user,
    requests::{
        Class,
        Outcome,
        Posted,
        PostedFor, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
};

/// A device that may fail.
pub(crate) trait Failure {
    /// Whether it has.
    fn is_dead(&self) -> bool;
    /// Gives it up. May be called from any context.
    fn give_up(&self, cause: Cause);
    /// Makes sure that one that failed leaves host memory alone, if there is a way. Sleeps.
    fn ensure_stopped(&self);
}

/// What who gave a command is told of how it ended. Where the device failed it is stopped first: what the command named
/// is freed after this. Sleeps.
fn ended<T>(device: &impl Failure, result: Result<T>) -> Result<T> {
    match result {
        Err(error) if error == ETIMEDOUT => {
            device.give_up(Cause::Silent);
            device.ensure_stopped();
            Err(EIO)
        }
        Err(error) if device.is_dead() => {
            device.ensure_stopped();
            Err(error)
        }
        result => result,
    }
}

impl Hardware {
    fn check<T>(self: &Arc<Self>, opcode: CommandOpcode, result: Result<T>) -> Result<T> {
        match &result {
            Err(error) if *error == ETIMEDOUT => {
                dev_err!(self.pdev, "no answer to command {:?}\n", opcode);
            }
            Err(error) if !self.is_dead() => {
                dev_dbg!(self.pdev, "command {:?} failed: {:?}\n", opcode, error);
            }
            _ => {}
        }
        ended(self, result)
    }

    /// Runs a command in that manner, which has parameters and no reply. Sleeps.
    pub(crate) fn run<P: Plain>(
        self: &Arc<Self>,
        manner: Manner,
        opcode: CommandOpcode,
        payload: &P,
    ) -> Result {
        let entry = CommandEntry::new(opcode, 0, (0, 0), payload);
        let result = self.cqp.run(self, manner, entry, 0, &mut []);
        self.check(opcode, result)
    }

    /// Runs a command that has to be done. Sleeps.
    pub(crate) fn execute<C: Command>(self: &Arc<Self>, command: &C) -> Result {
        self.execute_as(C::OPCODE, command)
    }

    /// Runs such a command whose payload more than one opcode takes. Sleeps.
    pub(crate) fn execute_as<P: Plain>(
        self: &Arc<Self>,
        opcode: CommandOpcode,
        payload: &P,
    ) -> Result {
        let manner = Manner::of_current(Class::Short, Patience::Endless);
        self.run(manner, opcode, payload)
    }

    /// Runs such a command on behalf of `user`, in whose turn it is. Sleeps.
    pub(crate) fn execute_for<C: Command>(self: &Arc<Self>, user: u64, command: &C) -> Result {
        let manner = Manner {
            class: Class::Short,
            patience: Patience::Endless,
            user,
        };
        self.run(manner, C::OPCODE, command)
    }

    /// Runs such a command about one object. Sleeps.
    pub(crate) fn execute_on(self: &Arc<Self>, opcode: CommandOpcode, number: u32) -> Result {
        self.execute_as(opcode, &object(number))
    }

    /// Runs such a command that takes the device its time. Sleeps.
    pub(crate) fn execute_long<C: Command>(self: &Arc<Self>, command: &C) -> Result {
        let manner = Manner::of_current(Class::Long, Patience::Endless);
        self.run(manner, C::OPCODE, command)
    }

    /// Runs a command that makes something of the caller's, who does not need it when he is killed
    /// (`EINTR`). Sleeps.
    pub(crate) fn make<C: Command>(self: &Arc<Self>, command: &C) -> Result {
        let manner = Manner::of_current(Class::Short, Patience::UntilKilled);
        self.run(manner, C::OPCODE, command)
    }

    /// Runs such a command that takes the device its time. Sleeps.
    pub(crate) fn make_long<C: Command>(self: &Arc<Self>, command: &C) -> Result {
        let manner = Manner::of_current(Class::Long, Patience::UntilKilled);
        self.run(manner, C::OPCODE, command)
    }

    /// Gives the device a command that makes something with a tag of that `number`, and returns as soon as the
    /// device has it; none where it was waited for. `EINTR` as [`Self::make`]. Sleeps.
    fn post<C: Command>(
        self: &Arc<Self>,
        command: &C,
        number: u32,
    ) -> Result<Option<MakingCommand>> {
        let manner = Manner::of_current(Class::Short, Patience::UntilKilled);
        let opcode = C::OPCODE;
        let about = (PostedFor::Making, number);
        let result = self.cqp.post(self, manner, opcode, command, about);
        let posted = self.check(opcode, result)?;
        Ok(posted.map(|posted| MakingCommand { opcode, posted }))
    }

    /// Has the device let go of a tag that nothing can be in the way of, and returns when it uses that no
    /// more. Sleeps.
    fn release(self: &Arc<Self>, opcode: CommandOpcode, number: u32) -> Result<Released> {
        if !self.cqp.has_turns() {
            return self.execute_on(opcode, number).map(|()| Released::Answered);
        }
        let manner = Manner::of_current(Class::Short, Patience::Endless);
        let result = self.cqp.release(self, manner, opcode, number);
        self.check(opcode, result)
    }

    /// Waits for the answer to a command that was posted. Sleeps.
    fn settle(self: &Arc<Self>, making: &MakingCommand) -> Making {
        let ended = self.cqp.settle(self, &making.posted);
        // A device that does not answer is given up here.
        let _ = self.check(making.opcode, ended.and_then(outcome_to_result));
        Making::new(Some(ended.unwrap_or(Outcome::Lost)))
    }

    /// How far what a command makes that was posted is, if that is known.
    fn look_at(self: &Arc<Self>, making: &MakingCommand) -> Making {
        Making::new(self.cqp.look_at(self, &making.posted))
    }

    /// Runs a query. `EINTR` if the caller is killed before it is its turn. Sleeps.
    pub(crate) fn query<R: Answer>(self: &Arc<Self>, request: &R::Request) -> Result<R> {
        self.query_start(request, core::mem::size_of::<R>())
    }

    /// Runs a query for the first `length` bytes of an answer, the rest of which is zero. Sleeps.
    pub(crate) fn query_start<R: Answer>(
        self: &Arc<Self>,
        request: &R::Request,
        length: usize,
    ) -> Result<R> {
        self.query_with(Patience::UntilKilled, request, length)
    }

    /// Runs a query, but `EAGAIN` where it would have to wait until the device takes it, or for others
    /// that take their time. Sleeps.
    pub(crate) fn query_now<R: Answer>(self: &Arc<Self>, request: &R::Request) -> Result<R> {
        self.query_start_now(request, core::mem::size_of::<R>())
    }

    /// The same for the first `length` bytes of an answer, the rest of which is zero. Sleeps.
    pub(crate) fn query_start_now<R: Answer>(
        self: &Arc<Self>,
        request: &R::Request,
        length: usize,
    ) -> Result<R> {
        self.query_with(Patience::None, request, length)
    }

    /// Runs a query whose answer is wanted by others, too, when who runs it is killed. Sleeps.
    pub(crate) fn query_for_others<R: Answer>(self: &Arc<Self>, request: &R::Request) -> Result<R> {
        self.query_with(Patience::Endless, request, core::mem::size_of::<R>())
    }

    fn query_with<R: Answer>(
        self: &Arc<Self>,
        patience: Patience,
        request: &R::Request,
        length: usize,
    ) -> Result<R> {
        const { assert!(core::mem::size_of::<R>() <= Reply::SIZE) }
        let length = length.min(core::mem::size_of::<R>());
        let entry = CommandEntry::new(R::QUERY, 0, (0, length as u32), request);
        let mut value = R::zeroed();
        let manner = Manner::of_current(Class::Short, patience);
        let answer = &mut value.as_bytes_mut()[..length];
        let result = self.cqp.run(self, manner, entry, R::LEAST, answer);
        self.check(R::QUERY, result)?;
        Ok(value)
    }

    /// Makes the device use pages no more that memory management takes back, and that were taken out of
    /// the tables of a region: ahead of what others ask for. Sleeps, but allocates nothing.
    pub(crate) fn take_pages_back(self: &Arc<Self>, command: &InvalidatePages) {
        self.invalidate(Class::Reclaim, user::accountable_or_kernel(), command);
    }

    /// Makes the device use pages no more that were taken out of the tables of a region, on behalf of
    /// `user`. Sleeps, but allocates nothing.
    pub(crate) fn forget_pages(self: &Arc<Self>, user: u64, command: &InvalidatePages) {
        self.invalidate(Class::Short, user, command);
    }

    fn invalidate(self: &Arc<Self>, class: Class, user: u64, command: &InvalidatePages) {
        let manner = Manner {
            class,
            patience: Patience::Endless,
            user,
        };
        match self.run(manner, InvalidatePages::OPCODE, command) {
            Ok(()) => {}
            // The region ended meanwhile, and the device has let go of all of it.
            Err(error) if error == ENOENT => {}
            Err(error) => {
                if !self.is_dead() {
                    dev_err!(self.pdev, "pages stay in use: {:?}\n", error);
                    self.give_up(Cause::Disagreement);
                }
                Failure::ensure_stopped(self);
            }
        }
    }
}

/// A command that makes an object and was posted.
struct MakingCommand {
    opcode: CommandOpcode,
    posted: Posted,
}

/// How far the making of an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Making {
    /// The device was told, and has not answered yet.
    Pending,
    /// It is there.
    Made,
    /// The device did not make it, and said why.
    Failed(Error),
    /// The device failed before it answered, and nobody knows.
    Lost,
}

impl Making {
    /// By how the command that makes it ended, if it did.
    fn new(outcome: Option<Outcome>) -> Self {
        match outcome {
            None => Self::Pending,
            Some(Outcome::Lost) => Self::Lost,
            Some(outcome @ Outcome::Answered { .. }) => match outcome_to_result(outcome) {
                Ok(()) => Self::Made,
                Err(error) => Self::Failed(error),
            },
        }
    }
}

/// Whether a device that refuses to make something with a tag for this reason, though the driver has just taken the
/// tag, has something there of which the driver does not know.
pub(crate) fn is_disagreement(error: Error) -> bool {
    error == EEXIST
}

/// What the answer to the command that takes an object down means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parting {
    /// The device has let go of it.
    Gone,
    /// Something uses it.
    Busy,
    /// That is no answer which there could be.
    Disagreement,
}

impl Parting {
    /// By that answer, for an object that is so far made as `making` says and that something `may_be`
    /// using.
    fn new(ended: Result, making: Making, may_be: impl FnOnce() -> bool) -> Self {
        match (ended, making) {
            // It was another's that the device let go of.
            (_, Making::Failed(error)) if is_disagreement(error) => Self::Disagreement,
            // It answers in order, and so gave no answer to what was before.
            (_, Making::Lost) => Self::Disagreement,
            (Ok(()), _) => Self::Gone,
            // There never was any.
            (Err(error), Making::Failed(_)) if error == ENOENT => Self::Gone,
            (Err(error), _) if error == EBUSY && may_be() => Self::Busy,
            (Err(_), _) => Self::Disagreement,
        }
    }
}

/// Does what follows from how the command ended that takes an object down: `EBUSY` where that is still there. `disagrees`
/// is called where the device gives an answer that there could not be.
fn part(
    device: &impl Failure,
    ended: Result,
    making: Making,
    may_be: impl FnOnce() -> bool,
    disagrees: impl FnOnce(),
) -> Result {
    // Of a device that failed no other answer counts than that it has let go.
    if !device.is_dead() || (ended.is_ok() && making == Making::Made) {
        match Parting::new(ended, making, may_be) {
            Parting::Gone => return Ok(()),
            Parting::Busy => return Err(EBUSY),
            Parting::Disagreement => {
                // What the device would touch afterwards is anyone's guess.
                disagrees();
                device.give_up(Cause::Disagreement);
            }
        }
    }
    device.ensure_stopped();
    Ok(())
}

/// Something that was made in the device by a command, and is taken down by another.
///
/// Dropping it takes it down at the latest; afterwards the device does not touch what belongs to
/// it. A device that failed was reset, which has the same effect.
pub(crate) struct DeviceObject {
    hw: Arc<Hardware>,
    destroy: CommandOpcode,
    number: u32,
    gone: Atomic<u32>,
    /// The command that makes it, if that was posted.
    making: Option<MakingCommand>,
}

impl DeviceObject {
    /// Makes an object with number `number` by `create`; `destroy` takes it down.
    pub(crate) fn create<C: Command>(
        hw: &Arc<Hardware>,
        create: &C,
        destroy: CommandOpcode,
        number: u32,
    ) -> Result<Self> {
        hw.make(create)?;
        Ok(Self::new(hw, destroy, number, None))
    }

    /// The same for what is not the caller's own, who may be killed: it is made all the same. Sleeps.
    pub(crate) fn create_for_others<C: Command>(
        hw: &Arc<Hardware>,
        create: &C,
        destroy: CommandOpcode,
        number: u32,
    ) -> Result<Self> {
        hw.execute(create)?;
        Ok(Self::new(hw, destroy, number, None))
    }

    /// The same for what has a tag of that number, but does not wait for the device to make it: this is for
    /// who agreed with it on [`FEATURE_PENDING_TAGS`], so that what uses the tag waits. Where many were
    /// posted and not answered it waits all the same.
    ///
    /// What `create` names has to stay until this is dropped, whatever becomes of it.
    ///
    /// [`FEATURE_PENDING_TAGS`]: crate::abi::FEATURE_PENDING_TAGS
    pub(crate) fn post<C: Command>(
        hw: &Arc<Hardware>,
        create: &C,
        destroy: CommandOpcode,
        number: u32,
    ) -> Result<Self> {
        let making = hw.post(create, number)?;
        Ok(Self::new(hw, destroy, number, making))
    }

    fn new(
        hw: &Arc<Hardware>,
        destroy: CommandOpcode,
        number: u32,
        making: Option<MakingCommand>,
    ) -> Self {
        Self {
            hw: hw.clone(),
            destroy,
            number,
            gone: Atomic::new(0),
            making,
        }
    }

    /// How far its making is, as far as that is known.
    pub(crate) fn making(&self) -> Making {
        match &self.making {
            Some(making) => self.hw.look_at(making),
            None => Making::Made,
        }
    }

    /// Waits until it is made, or is known not to be. Sleeps.
    pub(crate) fn settle(&self) -> Making {
        match &self.making {
            Some(making) => self.hw.settle(making),
            None => Making::Made,
        }
    }

    /// Notes that it was made by a command that was waited for, though the one that was posted failed.
    pub(crate) fn note_made(&self) {
        if let Some(making) = &self.making {
            self.hw.cqp.forget(&making.posted);
        }
    }

    /// Takes the object down. Sleeps.
    ///
    /// This always succeeds: a device that will not let go of what nobody uses is given up.
    pub(crate) fn destroy(&self) {
        // Nothing is in the way.
        let _ = self.destroy_unless_busy(|| false);
    }

    /// Takes the object down; `EBUSY` where the device says that something still uses it, and that
    /// `may_be` so, which is asked after the device said it. Sleeps.
    pub(crate) fn destroy_unless_busy(&self, may_be: impl Fn() -> bool) -> Result {
        if self.gone.xchg(1, kernel::sync::atomic::Full) != 0 {
            return Ok(());
        }
        let ended = self.hw.execute_on(self.destroy, self.number);
        self.part(ended, may_be)
    }

    /// Releases a tag that nothing can be in the way of. Where the device shows its turns this does not wait
    /// for it. Sleeps.
    ///
    /// This always succeeds, as [`Self::destroy`].
    pub(crate) fn release(&self) {
        if self.gone.xchg(1, kernel::sync::atomic::Full) != 0 {
            return;
        }
        let ended = match self.hw.release(self.destroy, self.number) {
            // It does what is about one tag in order: should it still have to make it, it will.
            Ok(Released::Unanswered) => return,
            ended => ended.map(|_| ()),
        };
        let _ = self.part(ended, || false);
    }

    /// Does what follows from how the command ended that takes the object down.
    fn part(&self, ended: Result, may_be: impl Fn() -> bool) -> Result {
        // The device does what is about one object in order, so that this takes no time, unless it lost
        // the command that was posted: then it is given up here.
        let making = self.settle();
        part(&self.hw, ended, making, may_be, || {
            dev_err!(
                self.hw.pdev,
                "{:?} of {:#x} failed: {:?}\n",
                self.destroy,
                self.number,
                ended
            );
        })
        .inspect_err(|_| self.gone.store(0, Relaxed))
    }
}

impl Drop for DeviceObject {
    fn drop(&mut self) {
        self.destroy();
        if let Some(making) = &self.making {
            self.hw.cqp.forget(&making.posted);
        }
    }
}

#[kunit_tests(ferrite_commands)]
mod tests {
    use super::*;
    use crate::abi::CommandStatus;
    use core::cell::Cell;

    #[test]
    fn what_was_never_made_need_not_be_found() {
        let parting = |ended, making| Parting::new(ended, making, || false);
        let failed = Making::Failed(ENOMEM);
        for making in [Making::Made, failed, Making::Pending] {
            assert_eq!(parting(Ok(()), making), Parting::Gone);
            assert_eq!(parting(Err(EINVAL), making), Parting::Disagreement);
        }
        assert_eq!(parting(Err(ENOENT), failed), Parting::Gone);
        for making in [Making::Made, Making::Pending] {
            assert_eq!(parting(Err(ENOENT), making), Parting::Disagreement);
        }
    }

    #[test]
    fn only_what_may_be_in_use_is_busy() {
        for making in [Making::Made, Making::Failed(EINVAL)] {
            let parting = |may_be: bool| Parting::new(Err(EBUSY), making, || may_be);
            assert_eq!(parting(true), Parting::Busy);
            assert_eq!(parting(false), Parting::Disagreement);
        }
        // It is not asked where the device says otherwise.
        let parting = Parting::new(Ok(()), Making::Made, || unreachable!());
        assert_eq!(parting, Parting::Gone);
    }

    #[test]
    fn what_the_driver_did_not_make_is_never_taken_for_its_own() {
        for making in [Making::Failed(EEXIST), Making::Lost] {
            for ended in [Ok(()), Err(ENOENT), Err(EBUSY)] {
                let parting = Parting::new(ended, making, || true);
                assert_eq!(parting, Parting::Disagreement);
            }
        }
        assert!(is_disagreement(EEXIST));
        // Of these the device has nothing, or no room for it.
        for error in [EINVAL, ENOMEM, EFAULT, ENOENT, EBUSY, EIO] {
            assert!(!is_disagreement(error));
        }
    }

    #[test]
    fn an_object_is_made_when_the_device_says_so() {
        let answered = |status: CommandStatus| {
            Making::new(Some(Outcome::Answered {
                status: status.number().into(),
                result: 0,
            }))
        };
        assert_eq!(Making::new(None), Making::Pending);
        assert_eq!(answered(CommandStatus::Ok), Making::Made);
        assert_eq!(answered(CommandStatus::NoResource), Making::Failed(ENOMEM));
        assert_eq!(answered(CommandStatus::Exists), Making::Failed(EEXIST));
        // What the device failed to say is no failure that it told of.
        assert_eq!(Making::new(Some(Outcome::Lost)), Making::Lost);
    }

    /// A device, and what was done to it.
    #[derive(Default)]
    struct Device {
        cause: Cell<Option<Cause>>,
        stopped: Cell<bool>,
    }

    impl Failure for Device {
        fn is_dead(&self) -> bool {
            self.cause.get().is_some()
        }

        fn give_up(&self, cause: Cause) {
            self.cause.set(Some(cause));
        }

        fn ensure_stopped(&self) {
            // One that works is not.
            assert!(self.is_dead());
            self.stopped.set(true);
        }
    }

    impl Device {
        fn dead() -> Self {
            let device = Self::default();
            device.give_up(Cause::Gone);
            device
        }
    }

    #[test]
    fn a_device_that_does_not_answer_is_stopped_before_what_the_command_named_is_freed() {
        let device = Device::default();
        assert_eq!(ended::<()>(&device, Err(ETIMEDOUT)), Err(EIO));
        assert_eq!(device.cause.get(), Some(Cause::Silent));
        assert!(device.stopped.get());
        // Who finds it dead sees to that as well.
        let device = Device::dead();
        assert_eq!(ended::<()>(&device, Err(EIO)), Err(EIO));
        assert_eq!(device.cause.get(), Some(Cause::Gone));
        assert!(device.stopped.get());
    }

    #[test]
    fn a_device_that_answers_works() {
        let device = Device::default();
        assert_eq!(ended(&device, Ok(1)), Ok(1));
        for error in [EINVAL, EBUSY, ENOENT, EINTR, EAGAIN] {
            assert_eq!(ended::<()>(&device, Err(error)), Err(error));
        }
        assert_eq!(device.cause.get(), None);
        assert!(!device.stopped.get());
    }

    #[test]
    fn taking_an_object_down_always_succeeds_unless_it_is_in_use() {
        let told = Cell::new(false);
        let part = |device: &Device, ended, making, may_be: bool| {
            told.set(false);
            super::part(device, ended, making, || may_be, || told.set(true))
        };
        let device = Device::default();
        assert_eq!(part(&device, Ok(()), Making::Made, false), Ok(()));
        assert_eq!(part(&device, Err(EBUSY), Making::Made, true), Err(EBUSY));
        assert!(!device.is_dead() && !told.get());
        // A device that will not let go is given up, and stopped.
        assert_eq!(part(&device, Err(EBUSY), Making::Made, false), Ok(()));
        assert_eq!(device.cause.get(), Some(Cause::Disagreement));
        assert!(device.stopped.get() && told.get());
        // Of one that failed before no other answer counts than that it has let go.
        for (ended, stopped) in [(Ok(()), false), (Err(EIO), true), (Err(EBUSY), true)] {
            let device = Device::dead();
            assert_eq!(part(&device, ended, Making::Made, true), Ok(()));
            assert_eq!(device.stopped.get(), stopped);
            assert!(!told.get());
        }
        let device = Device::dead();
        assert_eq!(part(&device, Ok(()), Making::Lost, false), Ok(()));
        assert!(device.stopped.get());
    }
}
