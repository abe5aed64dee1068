// SPDX-License-Identifier: GPL-2.0

//! Connecting, configuration, time and the end: all that sleeps.
//!
//! ```text
//! host                                                     I/O unit
//! resolve the address, then the route
//! connect: Join, its session           -- control -->      accept: Join, both sessions
//! start the endpoint
//! the same again: Join, both sessions  --  data   -->      start the endpoint, accept: Join
//! register and announce pools          <------------>      register and announce pools
//! ```
//!
//! Each side starts its endpoint before the other can have anything to say to it, and posts its receives before it connects.

mod connect;
mod end;
mod equip;
mod pace;

pub(super) use self::connect::{join, new_session, Events, News};
use self::pace::Backoff;
pub(super) use self::pace::Pace;
use super::flow::{Fault, Question};
use super::{Owner, Shared, CONFIG_MAX, PATIENCE};
use crate::protocol::{self, Role, Service, Status};
use crate::rdma::consumer::{Chunk, Cq, Depth, Pd};
use crate::rdma_cm::Id;
use core::net::SocketAddr;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::time::msecs_to_jiffies;

/// Milliseconds after which both channels have to be up.
const CONNECT: u64 = 15_000;

/// What is made on the device for one connection, besides what is in [`Live`](super::flow::Live).
struct Gear {
    /// Receives of the data channel, until its queue pair is there.
    inbox: KVec<Chunk>,
    depth: Depth,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
}

/// Where connecting is.
pub(super) struct Steps<O: Owner> {
    /// Whom a host connects to.
    peer: Option<SocketAddr>,
    gear: Option<Gear>,
    data: Option<Id<Events<O>>>,
    control: Option<Id<Events<O>>>,
    backoff: Backoff,
    pace: Pace,
    /// When a host connects.
    begin_at: u64,
    /// When the connection has to be up.
    deadline: Option<u64>,
    /// Since when it is.
    up_at: Option<u64>,
    /// Why the last attempt failed.
    failure: Option<Fault>,
    /// When the end was begun.
    closing: Option<u64>,
}

/// What a step has to do.
struct Tasks<O: Owner> {
    news: KVec<News>,
    control: Option<Id<Events<O>>>,
    data: Option<Id<Events<O>>>,
    question: Option<Question>,
    /// The peer lacks elements of so many bytes.
    wanted: Option<u32>,
}

/// A failure to connect, in that step.
fn failed(step: &'static str) -> impl FnOnce(Error) -> Fault {
    move |error| Fault::Failed(step, error)
}

/// Puts an identifier where there is none. One that is there is not replaced: dropping it waits for its queue pair,
/// which this task has to end first.
fn fill<T>(place: &mut Option<T>, id: T) -> core::result::Result<(), Fault> {
    if place.is_some() {
        return Err(Fault::Peer);
    }
    *place = Some(id);
    Ok(())
}

impl<O: Owner> Steps<O> {
    pub(super) fn new(peer: Option<SocketAddr>) -> Self {
        Self {
            peer,
            gear: None,
            data: None,
            control: None,
            backoff: Backoff::new(),
            pace: Pace::QUESTIONS,
            begin_at: 0,
            deadline: None,
            up_at: None,
            failure: None,
            closing: None,
        }
    }

    fn id(&self, channel: protocol::Channel) -> Result<&Id<Events<O>>> {
        match channel {
            protocol::Channel::Control => self.control.as_ref(),
            protocol::Channel::Data => self.data.as_ref(),
        }
        .ok_or(EINVAL)
    }
}

impl<O: Owner> Shared<O> {
    /// Does what there is to do. The work item: one at a time.
    pub(super) fn step(self: &Arc<Self>) {
        let mut steps = self.steps.lock();
        if self.state.lock().is_over {
            return;
        }
        let now = self.now();
        let tasks = self.tasks(&mut steps, now);

        let mut result = Ok(());
        if let Some(id) = tasks.control {
            result = fill(&mut steps.control, id).and_then(|()| {
                steps.deadline = Some(now + CONNECT);
                self.accept_control(&mut steps)
                    .map_err(failed("accepting a host"))
            });
        }
        for news in tasks.news {
            result = result.and_then(|()| self.happened(&mut steps, news));
        }
        if let Some(id) = tasks.data {
            result = result.and_then(|()| {
                fill(&mut steps.data, id)?;
                self.accept_data(&mut steps)
                    .map_err(failed("accepting the frames of a host"))
            });
        }
        if let (Some(question), Ok(())) = (tasks.question, result) {
            self.answer(&question);
        }
        if let (Some(size), Ok(())) = (tasks.wanted, result) {
            // Where there is no memory for it the peer makes do with what it has.
            let _ = self.add_pool(&steps, size);
        }
        if steps.deadline.is_some_and(|deadline| now >= deadline) {
            result = result.and(Err(Fault::Failed("connecting", ETIMEDOUT)));
        }

        let (fault, is_ending) = {
            let state = self.state.lock();
            (result.err().or(state.fault), state.is_ending)
        };
        if let Some(fault) = fault {
            self.connection_failed(&mut steps, fault, now);
        }
        // An I/O unit waits for its host to come again, by another link.
        let is_gone = self.role == Role::Unit && fault.is_some();
        if (is_ending && self.close(&mut steps, now)) || is_gone {
            self.end_connection(&mut steps, None);
            drop(steps);
            self.end();
            return;
        }
        if self.role == Role::Host && !is_ending && steps.control.is_none() && now >= steps.begin_at
        {
            let begun = self.begin(&mut steps, now);
            if let Err(fault) = begun.map_err(failed("looking for the I/O unit")) {
                self.connection_failed(&mut steps, fault, now);
            }
        }
        let delay = self.pause(&steps, now);
        drop(steps);
        // Where it is to run again already, that is sooner.
        let _ = self
            .queues
            .steps
            .enqueue_delayed::<_, 0>(self.clone(), msecs_to_jiffies(delay));
    }

    /// Ends a connection, or an attempt at one; a host waits before the next. The log says why there is none: once, as it
    /// may stay so for days.
    fn connection_failed(self: &Arc<Self>, steps: &mut Steps<O>, fault: Fault, now: u64) {
        if let Fault::Failed(step, error) = fault {
            if steps.failure.replace(fault) != Some(fault)
                && self
                    .queues
                    .said
                    .allows(c"rust_rdma_split: attempts that failed")
            {
                pr_warn!("{}: {:?}\n", step, error);
            }
        }
        if let Some(since) = steps.up_at.take() {
            steps.backoff.was_up(now.saturating_sub(since));
        }
        self.end_connection(steps, Some(fault));
        steps.begin_at = now + steps.backoff.next();
    }

    /// How long until the next step if nothing happens, in milliseconds.
    fn pause(&self, steps: &Steps<O>, now: u64) -> u32 {
        let pause = match self.options.service {
            _ if steps.control.is_none() => steps.begin_at.saturating_sub(now).max(1),
            _ if steps.closing.is_some() => 20,
            Service::Unacknowledged => super::RETRY / 4,
            Service::Acknowledged => PATIENCE / 20,
        };
        let pause = match self.state.lock().question {
            Some(_) => pause.min(steps.pace.wait(now).max(1)),
            None => pause,
        };
        pause as u32
    }

    /// Lets time pass, and takes what there is to do.
    fn tasks(&self, steps: &mut Steps<O>, now: u64) -> Tasks<O> {
        // Memory for what comes next; where there is none it stays empty, and the connection ends.
        let news = KVec::with_capacity(8, GFP_KERNEL).unwrap_or_default();
        let mut guard = self.state.lock();
        let state = &mut *guard;
        if state.endpoint.tick(now).is_err() {
            state.fail(Fault::Peer);
        }
        state.pump(&self.traffic);
        // The peer asks no other before this one is answered.
        let question = match steps.pace.wait(now) {
            0 => state.question.take(),
            _ => None,
        };
        if question.is_some() {
            steps.pace.answered(now);
        }
        let mut tasks = Tasks {
            news,
            control: state.incoming_control.take(),
            data: state.incoming_data.take(),
            question,
            wanted: state.wanted.take(),
        };
        let count = tasks.news.capacity().min(state.news.len());
        for news in &state.news[..count] {
            let _ = tasks.news.push_within_capacity(*news);
        }
        if count == state.news.len() {
            state.news.clear();
        } else {
            state.fail(Fault::Failed("connecting", ENOMEM));
        }
        tasks
    }

    /// Answers what the peer asks.
    fn answer(&self, question: &Question) {
        let owner = self.state.lock().owner.clone();
        let mut answer = [0; CONFIG_MAX];
        let data = &question.data[..question.length];
        let result = match &owner {
            Some(owner) => owner.request(question.operation, data, &mut answer),
            None => Err(Status::Failed),
        };
        let (status, length) = match result {
            Ok(length) => (Status::Done, length.min(CONFIG_MAX)),
            Err(status) => (status, 0),
        };
        let mut state = self.state.lock();
        // Where the connection has ended since, nobody waits for it. Where the answer makes no sense, there is one that
        // does.
        if state.endpoint.reply(status, &answer[..length]).is_err() {
            let _ = state.endpoint.reply(Status::Failed, &[]);
        }
        state.pump(&self.traffic);
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_steps)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_that_is_there_is_not_replaced() {
        let mut place = None;
        assert_eq!(fill(&mut place, 1), Ok(()));
        assert_eq!(fill(&mut place, 2), Err(Fault::Peer));
        assert_eq!(place, Some(1));
    }
}
