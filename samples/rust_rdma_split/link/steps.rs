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

use super::flow::{Channel, Fault, Live, OwnPool, Question, State};
use super::stock::{chunks, Stock};
use super::{
    Frame, Link, Options, Owner, Place, Shape, Shared, CLIENT, CONFIG_MAX, MORE_POOLS, PATIENCE,
};
use crate::kernel_ext::errno::{econnrefused, eopnotsupp};
use crate::kernel_ext::{random, rcu};
use crate::protocol::{
    self, Join, Layout, PoolKind, PoolOffer, Role, Service, Status, Variant, CONTROL_DEPTH,
    CONTROL_MAX, DATA_HEADER, JOIN_MAGIC, MAX_POOLS, VERSION,
};
use crate::rdma::consumer::{Buffer, Chunk, Cq, Depth, Keep, Lease, Pd, PollContext, Region};
use crate::rdma::QpType;
use crate::rdma_cm::{Event, Handler, Id, Parameters};
use core::net::SocketAddr;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::time::msecs_to_jiffies;

/// Control messages of this side that may be under way.
const CONTROL_SENDS: usize = 8;
/// Milliseconds for each step of connecting.
const RESOLVE: usize = 2_000;
/// Milliseconds after which both channels have to be up.
const CONNECT: u64 = 15_000;
/// Milliseconds for all pools to be given up at the end of an orderly connection.
const CLOSE: u64 = 2_000;
/// 4.096 microseconds times two to this: a quarter of a second without an acknowledgement, then it is sent again.
const ACK_TIMEOUT: u8 = 16;
/// The code of 0.64 milliseconds (InfiniBand specification, "Encoding for RNR NAK timer field"): no receive is ever missing
/// by the protocol; should one be, it is not for long. What the connection manager takes else is 655.
const MIN_RNR_TIMER: u8 = 12;
/// RDMA reads that are under way.
const READS: u8 = 8;

/// What the connection manager says.
#[derive(Clone, Copy)]
pub(super) enum News {
    Address(protocol::Channel),
    Route(protocol::Channel),
    Established(protocol::Channel, [u8; Join::SIZE]),
    Over(Fault),
}

/// Who is told by the connection manager.
pub(super) struct Events<O: Owner> {
    pub(super) shared: Arc<Shared<O>>,
    pub(super) channel: protocol::Channel,
    pub(super) epoch: u32,
}

/// The part of private data that is a `Join`, if they are long enough.
fn join_bytes(data: &[u8]) -> [u8; Join::SIZE] {
    let mut bytes = [0; Join::SIZE];
    if let Some(data) = data.get(..Join::SIZE) {
        bytes.copy_from_slice(data);
    }
    bytes
}

impl<O: Owner> Handler for Events<O> {
    fn event(&self, event: Event<'_>) {
        let news = match event {
            Event::AddrResolved => News::Address(self.channel),
            Event::RouteResolved => News::Route(self.channel),
            Event::Established(data) => News::Established(self.channel, join_bytes(data)),
            Event::Rejected(..) => News::Over(Fault::Failed("connecting", econnrefused())),
            Event::Failed(error) => News::Over(Fault::Failed("connecting", error)),
            Event::Disconnected => News::Over(Fault::Lost),
            Event::DeviceRemoval => News::Over(Fault::Removed),
            Event::AddrChange | Event::TimewaitExit | Event::Other(_) => return,
        };
        {
            let mut state = self.shared.state.lock();
            // Those of an identifier that is being dropped anyway are no news.
            if state.epoch != self.epoch {
                return;
            }
            if let News::Over(fault) = news {
                state.fail(fault);
            } else if state.news.push_within_capacity(news).is_err() {
                // More than it ever says.
                state.fail(Fault::Failed("connecting", ENOSPC));
            }
        }
        self.shared.wake();
    }
}

/// How long to wait before connecting again.
#[derive(Clone, Copy)]
pub(super) struct Backoff(u64);

impl Backoff {
    const SHORTEST: u64 = 100;
    const LONGEST: u64 = 5_000;
    /// Milliseconds of a connection that was good for something.
    const STEADY: u64 = 5_000;
    /// What a peer is waited for at most, and in the end at least, that accepts and ends it at once.
    const FLAPPING: u64 = 500;

    const fn new() -> Self {
        Self(Self::SHORTEST)
    }

    /// Milliseconds, of which there are twice as many the next time.
    fn next(&mut self) -> u64 {
        let now = self.0;
        self.0 = (now * 2).min(Self::LONGEST);
        now
    }

    /// A connection has ended that was up for so many milliseconds.
    fn was_up(&mut self, time: u64) {
        if time >= Self::STEADY {
            *self = Self::new();
        } else {
            self.0 = self.0.min(Self::FLAPPING);
        }
    }
}

/// How often peers are answered: some at once, then one after the other with a pause. What they ask may take RTNL, which
/// all of the machine wants.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    at_once: u64,
    /// Milliseconds for each.
    pause: u64,
    /// When all that was answered would be through if each had got its pause.
    through: u64,
}

impl Pace {
    /// For questions of a peer. At once: all that a host tells when it comes.
    const QUESTIONS: Self = Self::new(256, 20);
    /// For hosts that come. At once: all there are, where an I/O unit has been away.
    pub(super) const HOSTS: Self = Self::new(64, 200);
    /// For those of them from one address: half of what there is at once, then less than half.
    pub(super) const HOSTS_OF_ONE: Self = Self::new(32, 500);

    const fn new(at_once: u64, pause: u64) -> Self {
        Self {
            at_once,
            pause,
            through: 0,
        }
    }

    /// Milliseconds after which nothing is left to remember, whatever was answered before.
    pub(super) const fn memory(&self) -> u64 {
        self.at_once * self.pause
    }

    /// How many are answered within so many milliseconds, at the most.
    pub(super) const fn most_within(&self, time: u64) -> u64 {
        self.at_once + time / self.pause + 1
    }

    /// Whether it is as if nothing had been answered yet.
    pub(super) fn is_rested(&self, now: u64) -> bool {
        self.through <= now
    }

    /// Milliseconds until the next one may be answered.
    pub(super) fn wait(&self, now: u64) -> u64 {
        self.through
            .saturating_sub(now + (self.at_once - 1) * self.pause)
    }

    /// One is answered.
    pub(super) fn answered(&mut self, now: u64) {
        self.through = self.through.max(now) + self.pause;
    }
}

/// What is made on the device for one connection, besides what is in [`Live`].
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

/// The queue pairs of a service.
fn qp_type(service: Service) -> QpType {
    match service {
        Service::Acknowledged => QpType::Rc,
        Service::Unacknowledged => QpType::Uc,
    }
}

/// What a peer is told of a pool that has no address yet.
fn offer(index: u32, kind: PoolKind, elements: u32, element_size: u32) -> PoolOffer {
    PoolOffer {
        index,
        kind,
        elements,
        element_size,
        address: 0,
        key: 0,
        context: u64::from(index),
    }
}

/// A session of this side: any number but 0.
pub(super) fn new_session() -> u32 {
    random::get_u32().max(1)
}

/// What somebody says about a channel.
pub(super) fn join(
    role: Role,
    options: &Options,
    channel: protocol::Channel,
    sessions: (u32, u32),
) -> Join {
    Join {
        magic: JOIN_MAGIC,
        version: VERSION,
        channel: channel.number(),
        role: role.number(),
        service: options.service.number(),
        variant: options.variant.number(),
        reserved: 0,
        session: sessions.0,
        peer_session: sessions.1,
        key: options.key,
    }
}

impl<O: Owner> Shared<O> {
    /// What this side says about a channel.
    pub(super) fn join(&self, channel: protocol::Channel, sessions: (u32, u32)) -> Join {
        join(self.role, &self.options, channel, sessions)
    }

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

    /// A host begins to connect.
    fn begin(self: &Arc<Self>, steps: &mut Steps<O>, now: u64) -> Result {
        {
            let mut state = self.state.lock();
            state.sessions = (new_session(), 0);
        }
        steps.deadline = Some(now + CONNECT);
        steps.control = Some(self.resolve(steps, protocol::Channel::Control)?);
        Ok(())
    }

    fn resolve(
        self: &Arc<Self>,
        steps: &Steps<O>,
        channel: protocol::Channel,
    ) -> Result<Id<Events<O>>> {
        let handler = Events {
            shared: self.clone(),
            channel,
            epoch: self.state.lock().epoch,
        };
        let handler = Arc::new(handler, GFP_KERNEL)?;
        let id = Id::new(CLIENT, qp_type(self.options.service), handler)?;
        let peer = steps.peer.as_ref().ok_or(EINVAL)?;
        id.resolve_addr(peer, RESOLVE)?;
        Ok(id)
    }

    /// The connection manager says something.
    fn happened(
        self: &Arc<Self>,
        steps: &mut Steps<O>,
        news: News,
    ) -> core::result::Result<(), Fault> {
        match news {
            News::Address(channel) => steps
                .id(channel)
                .and_then(|id| id.resolve_route(RESOLVE))
                .map_err(failed("looking for a way to the I/O unit")),
            News::Route(protocol::Channel::Control) => self
                .connect_control(steps)
                .map_err(failed("making what a connection needs")),
            News::Route(protocol::Channel::Data) => self
                .connect_data(steps)
                .map_err(failed("making what frames need")),
            // An I/O unit has nothing to learn by that.
            News::Established(..) if self.role == Role::Unit => Ok(()),
            News::Established(channel, bytes) => self.established(steps, channel, &bytes),
            News::Over(fault) => Err(fault),
        }
    }

    fn parameters<'a>(&self, lease: &Lease, private_data: &'a [u8]) -> Parameters<'a> {
        let reads = match self.options.variant {
            Variant::Push => 1,
            Variant::Pull => READS,
        };
        let reads = reads.min(lease.device().max_reads());
        Parameters {
            private_data,
            responder_resources: reads,
            initiator_depth: reads,
        }
    }

    /// The private data of this side for a channel.
    fn greeting(&self, channel: protocol::Channel) -> Result<[u8; Join::SIZE]> {
        let mut join = [0; Join::SIZE];
        let sessions = self.state.lock().sessions;
        let own = self.join(channel, sessions);
        own.encode(&mut join).ok_or(EINVAL)?;
        Ok(join)
    }

    fn connect_control(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let control = protocol::Channel::Control;
        self.equip(steps)?;
        let join = self.greeting(control)?;
        let id = steps.id(control)?;
        id.connect(&self.parameters(&id.lease()?, &join))
    }

    fn connect_data(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let data = protocol::Channel::Data;
        self.make_data_channel(steps)?;
        let join = self.greeting(data)?;
        let id = steps.id(data)?;
        id.connect(&self.parameters(&id.lease()?, &join))
    }

    /// A channel of a host is connected, with what the I/O unit says about it.
    fn established(
        self: &Arc<Self>,
        steps: &mut Steps<O>,
        channel: protocol::Channel,
        bytes: &[u8],
    ) -> core::result::Result<(), Fault> {
        {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            let own = self.join(channel, state.sessions);
            let theirs = match Join::check(&own, bytes) {
                // It has seen this side's session.
                Ok(theirs) if theirs.peer_session == own.session => theirs,
                Ok(_) => {
                    state.endpoint.count_refused(protocol::Violation::BadJoin);
                    return Err(Fault::Peer);
                }
                Err(violation) => {
                    state.endpoint.count_refused(violation);
                    return Err(Fault::Peer);
                }
            };
            state.sessions.1 = theirs.session;
            if channel == protocol::Channel::Control {
                let (session, peer_session) = state.sessions;
                state.endpoint.start(session, peer_session);
            }
        }
        if channel == protocol::Channel::Control {
            let id = self
                .resolve(steps, protocol::Channel::Data)
                .map_err(failed("looking for the I/O unit"))?;
            return fill(&mut steps.data, id);
        }
        self.up(steps);
        Ok(())
    }

    /// An I/O unit has a host that wants a control channel.
    fn accept_control(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let control = protocol::Channel::Control;
        self.equip(steps)?;
        let join = self.greeting(control)?;
        let id = steps.id(control)?;
        id.accept(&self.parameters(&id.lease()?, &join))
    }

    /// And now the data channel.
    fn accept_data(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let data = protocol::Channel::Data;
        self.make_data_channel(steps)?;
        let parent = self.parent.as_ref().ok_or(EINVAL)?;
        let owner = parent.joined(Link(self.clone()))?;
        {
            let mut state = self.state.lock();
            state.owner = Some(owner);
            let sessions = state.sessions;
            state.endpoint.start(sessions.0, sessions.1);
        }
        let join = self.greeting(data)?;
        let id = steps.id(data)?;
        id.accept(&self.parameters(&id.lease()?, &join))?;
        self.up(steps);
        Ok(())
    }

    fn up(self: &Arc<Self>, steps: &mut Steps<O>) {
        steps.deadline = None;
        steps.up_at = Some(self.now());
        steps.failure = None;
        self.traffic.connected.add();
        let owner = {
            let mut state = self.state.lock();
            state.go_up(&self.traffic);
            state.owner.clone()
        };
        if let Some(owner) = owner {
            owner.changed(true);
        }
    }

    /// Makes all for a connection on the device of the control channel, with the control channel's queue pair.
    fn equip(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let options = &self.options;
        let id = steps.id(protocol::Channel::Control)?;
        if id.is_iwarp() {
            if self
                .queues
                .said
                .allows(c"rust_rdma_split: devices that cannot be used")
            {
                pr_err!(
                    "iWARP has no writes with immediate data, and there a write that is complete need not have arrived: \
                     RoCE or InfiniBand is needed\n"
                );
            }
            return Err(eopnotsupp());
        }
        if options.service == Service::Acknowledged {
            id.set_ack_timeout(ACK_TIMEOUT)?;
            id.set_min_rnr_timer(MIN_RNR_TIMER)?;
        }
        let lease = id.lease()?;
        let pd = Pd::new(&lease)?;

        // With room for those of pools that are added later.
        let mut keeps = KVec::with_capacity(64, GFP_KERNEL)?;
        let count = CONTROL_DEPTH + CONTROL_SENDS;
        let mut control_rooms = chunks(&lease, count, CONTROL_MAX, &mut keeps)?;
        let message = options.message_shape();
        // Where all frames are in messages, there is memory for as many to be sent as to be received.
        let shapes = match options.shapes() {
            [] => &[message],
            shapes => shapes,
        };
        let rooms = Stock::new(&lease, shapes, DATA_HEADER, &mut keeps)?;
        let reads = match options.variant {
            Variant::Pull if !options.shapes().is_empty() => {
                let elements = if options.largest > 4096 { 8 } else { 32 };
                let size = options.largest;
                Stock::new(&lease, &[Shape { elements, size }], 0, &mut keeps)?
            }
            _ => Stock::empty(),
        };
        let pools = Self::pools(options, &pd)?;
        let is_written = |pool: &&OwnPool| pool.offer.kind == PoolKind::Write;
        let written: u32 = pools
            .iter()
            .filter(is_written)
            .map(|pool| pool.offer.elements)
            .sum();
        // One for each message and each immediate.
        let recvs = message.elements + written;
        let size = message.size as usize + DATA_HEADER;
        let inbox = chunks(&lease, recvs as usize, size, &mut keeps)?;

        let depth = Depth {
            sends: (rooms.count() + reads.count()) as u32 + State::<O>::OTHER_REQUESTS,
            recvs: recvs + options.most_more(),
        };
        let control_depth = Depth {
            sends: CONTROL_SENDS as u32,
            recvs: CONTROL_DEPTH as u32,
        };
        let entries = depth.sends + depth.recvs + control_depth.sends + control_depth.recvs + 4;
        let cq = Cq::new(&lease, entries, PollContext::SoftIrq)?;
        let epoch = self.state.lock().epoch;
        let channel = Channel {
            shared: self.clone(),
            epoch,
        };
        let channel = Arc::new(channel, GFP_KERNEL)?;
        let control = id.create_qp(&pd, &cq, control_depth, &channel)?;
        for _ in 0..CONTROL_DEPTH {
            let chunk = control_rooms.pop().ok_or(EINVAL)?;
            let posted = control.recv(chunk, super::flow::Tag::ControlIn);
            posted.map_err(|unposted| unposted.error)?;
        }
        let live = Live {
            data: None,
            control,
            control_rooms,
            rooms,
            reads,
            pools,
            retired: KVec::with_capacity(MAX_POOLS, GFP_KERNEL)?,
            added: 0,
            keeps,
        };
        steps.gear = Some(Gear {
            inbox,
            depth,
            cq,
            pd,
        });
        let before = self.state.lock().live.replace(live);
        drop(before);
        Ok(())
    }

    /// The pools of this side: of messages, and of other frames.
    fn pools(options: &Options, pd: &Arc<Pd>) -> Result<KVec<OwnPool>> {
        let mut pools = KVec::with_capacity(MAX_POOLS, GFP_KERNEL)?;
        let message = options.message_shape();
        let messages = OwnPool {
            offer: offer(0, PoolKind::Send, message.elements, message.size),
            region: None,
            fills: KVec::new(),
        };
        pools.push(messages, GFP_KERNEL)?;
        for shape in options.shapes().iter().filter(|shape| shape.elements != 0) {
            let pool = Self::pool(options.kind(), pd, shape, pools.len() as u32)?;
            pools.push(pool, GFP_KERNEL)?;
        }
        Ok(pools)
    }

    /// A pool with memory, of a kind that needs some.
    fn pool(kind: PoolKind, pd: &Arc<Pd>, shape: &Shape, index: u32) -> Result<OwnPool> {
        let size = shape.size as usize;
        let buffer = Buffer::new(pd.lease(), size * shape.elements as usize)?;
        let mut fills = KVec::new();
        let region = match kind {
            PoolKind::Read => {
                let (region, chunks) = Region::readable(pd, buffer, size)?;
                fills.reserve(chunks.len(), GFP_KERNEL)?;
                for chunk in chunks {
                    fills.push(Some(chunk), GFP_KERNEL)?;
                }
                region
            }
            _ => Region::writable(pd, buffer)?,
        };
        Ok(OwnPool {
            offer: offer(index, kind, shape.elements, shape.size),
            region: Some(region),
            fills,
        })
    }

    /// Gives the peer one more pool, since it lacks elements of `size` bytes. It is announced when it is registered.
    fn add_pool(&self, steps: &Steps<O>, size: u32) -> Result {
        let options = &self.options;
        let gear = steps.gear.as_ref().ok_or(EINVAL)?;
        let shape = options.more(size).ok_or(EINVAL)?;
        let added = match &self.state.lock().live {
            Some(live) if live.added < MORE_POOLS => live.added,
            _ => return Ok(()),
        };
        // Behind those that were there at first, whether they are still there or not.
        let index = 1 + options.shapes().len() + added;
        let pool = Self::pool(options.kind(), &gear.pd, &shape, index as u32)?;
        let mut keeps = KVec::new();
        let room = options.message_shape().size as usize + DATA_HEADER;
        let inbox = chunks(gear.pd.lease(), shape.elements as usize, room, &mut keeps)?;
        let mut state = self.state.lock();
        if !state.is_up {
            return Ok(());
        }
        // Who ends a connection has `steps`, as this task does: it is the same one.
        let Some(live) = &mut state.live else {
            return Ok(());
        };
        let (Some(data), Some(region)) = (&live.data, &pool.region) else {
            return Err(EINVAL);
        };
        // All that may fail for want of memory is done with room that there is.
        if live.keeps.capacity() - live.keeps.len() < keeps.len() {
            return Err(ENOMEM);
        }
        for keep in keeps {
            let _ = live.keeps.push_within_capacity(keep);
        }
        let mut posted = Ok(());
        for chunk in inbox {
            posted = posted.and_then(|()| {
                let posted = data.recv(chunk, super::flow::Tag::DataIn);
                posted.map_err(|unposted| unposted.error)
            });
        }
        let posted = posted.and_then(|()| {
            let registered = data.register(region, super::flow::Tag::Register(index as u32));
            registered.map_err(|unposted| unposted.error)
        });
        // There is room for all of them.
        let _ = live.pools.push_within_capacity(pool);
        live.added += 1;
        if posted.is_err() {
            // A queue pair that takes nothing any more.
            state.fail(Fault::Lost);
        }
        drop(state);
        self.traffic.registrations.add();
        self.traffic.pools_added.add();
        posted
    }

    /// Makes the queue pair of the data channel, with its receives posted.
    fn make_data_channel(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let mut gear = steps.gear.take().ok_or(EINVAL)?;
        let inbox = core::mem::take(&mut gear.inbox);
        let gear = steps.gear.insert(gear);
        let id = steps.data.as_ref().ok_or(EINVAL)?;
        if self.options.service == Service::Acknowledged {
            id.set_ack_timeout(ACK_TIMEOUT)?;
            id.set_min_rnr_timer(MIN_RNR_TIMER)?;
        }
        let channel = Channel {
            shared: self.clone(),
            epoch: self.state.lock().epoch,
        };
        let channel = Arc::new(channel, GFP_KERNEL)?;
        // Fails if it is of another device than the control channel.
        let data = id.create_qp(&gear.pd, &gear.cq, gear.depth, &channel)?;
        for chunk in inbox {
            let posted = data.recv(chunk, super::flow::Tag::DataIn);
            posted.map_err(|unposted| unposted.error)?;
        }
        let mut guard = self.state.lock();
        let before = match &mut guard.live {
            Some(live) => live.data.replace(data),
            None => Some(data),
        };
        drop(guard);
        drop(before);
        Ok(())
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

    /// Ends the connection, whatever it was: when this returns nothing of it is left.
    fn end_connection(self: &Arc<Self>, steps: &mut Steps<O>, fault: Option<Fault>) {
        let (live, was_up, owner, incoming) = {
            let mut guard = self.state.lock();
            let state = &mut *guard;
            state.epoch = state.epoch.wrapping_add(1);
            state.endpoint.stop();
            state.news.clear();
            state.fault = None;
            state.question = None;
            state.reply = None;
            state.wanted = None;
            state.has_data = false;
            (
                state.live.take(),
                core::mem::take(&mut state.is_up),
                state.owner.clone(),
                (state.incoming_control.take(), state.incoming_data.take()),
            )
        };
        // Who waits for an answer gets none.
        self.answered.complete();
        let counter = match fault {
            Some(Fault::Removed) => Some(&self.traffic.device_removed),
            Some(Fault::Peer) => Some(&self.traffic.reset),
            Some(_) if was_up => Some(&self.traffic.disconnected),
            Some(_) => Some(&self.traffic.connect_failed),
            None => None,
        };
        if let Some(counter) = counter {
            counter.add();
        }
        for id in [&steps.data, &steps.control].into_iter().flatten() {
            // The peer is told, if there is one.
            let _ = id.disconnect();
        }
        if let Some(live) = live {
            let Live {
                data,
                control,
                pools,
                rooms,
                reads,
                control_rooms,
                retired,
                added: _,
                keeps,
            } = live;
            // Drained: no handler of this connection runs when they are gone.
            drop(data);
            drop(control);
            // Of one that could not be drained what is not complete goes with its completion queue: here, while the
            // memory has others who keep it, and not with a late completion in a soft interrupt.
            steps.gear = None;
            // Who sends copies a frame to a chunk that he has taken, without the lock. He gives it up once he finds that
            // the connection is over: in a soft interrupt, where no memory of a device can be freed. So all others
            // stay until then.
            rcu::synchronize();
            self.take_leftovers(&pools, owner.as_deref());
            drop((pools, rooms, reads, control_rooms, retired));
            drop::<KVec<Keep>>(keeps);
        }
        steps.gear = None;
        steps.data = None;
        steps.control = None;
        steps.deadline = None;
        drop(incoming);
        if let (true, Some(owner)) = (was_up, owner) {
            owner.changed(false);
        }
    }

    /// What has arrived and nobody has taken is delivered; then the pools are gone.
    fn take_leftovers(&self, pools: &[OwnPool], owner: Option<&O>) {
        loop {
            let arrival = self.state.lock().endpoint.next_arrival();
            let Some(arrival) = arrival else {
                break;
            };
            let is_it = |pool: &&OwnPool| pool.offer.index == arrival.pool.index;
            let region = pools
                .iter()
                .find(is_it)
                .and_then(|pool| pool.region.as_ref());
            if let (Some(region), Some(owner)) = (region, owner) {
                owner.frame(Frame {
                    place: Place::Shared(region, arrival.offset() as usize),
                    length: arrival.length as usize,
                });
            }
            let _ = self.state.lock().endpoint.release(arrival.handle);
        }
        let mut state = self.state.lock();
        for pool in pools {
            let _ = state.endpoint.withdraw(pool.offer.index);
        }
        while state.endpoint.next_freed().is_some() {}
    }

    /// Goes on with the end of an orderly connection; whether that is done.
    fn close(&self, steps: &mut Steps<O>, now: u64) -> bool {
        let mut state = self.state.lock();
        if !state.is_up {
            return true;
        }
        let began = match steps.closing {
            Some(began) => began,
            None => {
                state.endpoint.close();
                *steps.closing.insert(now)
            }
        };
        state.pump(&self.traffic);
        state.endpoint.is_closed() || now.saturating_sub(began) >= CLOSE
    }

    /// The link is over, for good.
    fn end(self: &Arc<Self>) {
        // No work of it is queued from now on.
        self.state.lock().is_over = true;
        // What is queued already still has the owner.
        self.queues.bottom.flush();
        let owner = self.state.lock().owner.take();
        if let Some(parent) = &self.parent {
            parent.parted(self, owner);
        } else {
            drop(owner);
        }
        self.over.complete_all();
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_steps)]
mod tests {
    use super::*;

    #[test]
    fn who_fails_to_connect_waits_longer_each_time_up_to_a_limit() {
        let mut backoff = Backoff::new();
        let mut before = 0;
        for _ in 0..20 {
            let now = backoff.next();
            assert!(now > before || now == Backoff::LONGEST);
            assert!(now <= Backoff::LONGEST);
            before = now;
        }
        assert_eq!(before, Backoff::LONGEST);
        // A peer that accepts and ends it at once is not met without end.
        for _ in 0..20 {
            backoff.was_up(Backoff::STEADY - 1);
            assert_eq!(backoff.next(), Backoff::FLAPPING);
        }
        backoff.was_up(Backoff::STEADY);
        assert_eq!(backoff.next(), Backoff::SHORTEST);
    }

    #[test]
    fn who_asks_without_end_is_answered_with_a_pause_for_each() {
        for new in [Pace::QUESTIONS, Pace::HOSTS, Pace::HOSTS_OF_ONE] {
            let mut pace = new;
            assert!(pace.is_rested(1000));
            let Pace { at_once, pause, .. } = new;
            for _ in 0..at_once {
                assert_eq!(pace.wait(1000), 0);
                pace.answered(1000);
            }
            assert_eq!(pace.wait(1000), pause);
            assert_eq!(pace.wait(1000 + pause), 0);
            pace.answered(1000 + pause);
            assert_eq!(pace.wait(1000 + pause), pause);
            // Who has been silent may ask as much as at first.
            assert!(!pace.is_rested(1000 + pause));
            assert!(pace.is_rested(1000 + pause + new.memory()));
            let later = 1000 + 10 * at_once * pause;
            for _ in 0..at_once {
                assert_eq!(pace.wait(later), 0);
                pace.answered(later);
            }
            assert!(pace.wait(later) != 0);
        }
    }

    #[test]
    fn a_channel_that_is_there_is_not_replaced() {
        let mut place = None;
        assert_eq!(fill(&mut place, 1), Ok(()));
        assert_eq!(fill(&mut place, 2), Err(Fault::Peer));
        assert_eq!(place, Some(1));
    }

    #[test]
    fn private_data_that_are_too_short_are_no_join() {
        assert_eq!(join_bytes(&[1; Join::SIZE - 1]), [0; Join::SIZE]);
        assert_eq!(join_bytes(&[1; Join::SIZE + 1]), [1; Join::SIZE]);
        for _ in 0..100 {
            assert_ne!(new_session(), 0);
        }
    }
}
