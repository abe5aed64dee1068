// SPDX-License-Identifier: GPL-2.0

//! The steps from an address to two channels that are up.

use super::equip::qp_type;
use super::{failed, fill, Steps, CONNECT};
use crate::kernel_ext::errno::econnrefused;
use crate::kernel_ext::random;
use crate::link::flow::Fault;
use crate::link::{Link, Options, Owner, Shared, CLIENT};
use crate::protocol::{self, Join, Layout, Role, Variant, JOIN_MAGIC, VERSION};
use crate::rdma::consumer::Lease;
use crate::rdma_cm::{Event, Handler, Id, Parameters};
use kernel::prelude::*;
use kernel::sync::Arc;

/// Milliseconds for each step of connecting.
const RESOLVE: usize = 2_000;

/// 4.096 microseconds times two to this: a quarter of a second without an acknowledgement, then it is sent again.
pub(super) const ACK_TIMEOUT: u8 = 16;

/// The code of 0.64 milliseconds (InfiniBand specification, "Encoding for RNR NAK timer field"): no receive is ever missing
/// by the protocol; should one be, it is not for long. What the connection manager takes else is 655.
pub(super) const MIN_RNR_TIMER: u8 = 12;

/// RDMA reads that are under way.
const READS: u8 = 8;

/// What the connection manager says.
#[derive(Clone, Copy)]
pub(in crate::link) enum News {
    Address(protocol::Channel),
    Route(protocol::Channel),
    Established(protocol::Channel, [u8; Join::SIZE]),
    Over(Fault),
}

/// Who is told by the connection manager.
pub(in crate::link) struct Events<O: Owner> {
    pub(in crate::link) shared: Arc<Shared<O>>,
    pub(in crate::link) channel: protocol::Channel,
    pub(in crate::link) epoch: u32,
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

/// A session of this side: any number but 0.
pub(in crate::link) fn new_session() -> u32 {
    random::get_u32().max(1)
}

/// What somebody says about a channel.
pub(in crate::link) fn join(
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
    pub(in crate::link) fn join(&self, channel: protocol::Channel, sessions: (u32, u32)) -> Join {
        join(self.role, &self.options, channel, sessions)
    }

    /// A host begins to connect.
    pub(super) fn begin(self: &Arc<Self>, steps: &mut Steps<O>, now: u64) -> Result {
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
    pub(super) fn happened(
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
    pub(super) fn accept_control(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
        let control = protocol::Channel::Control;
        self.equip(steps)?;
        let join = self.greeting(control)?;
        let id = steps.id(control)?;
        id.accept(&self.parameters(&id.lease()?, &join))
    }

    /// And now the data channel.
    pub(super) fn accept_data(self: &Arc<Self>, steps: &mut Steps<O>) -> Result {
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
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_steps_connect)]
mod tests {
    use super::*;

    #[test]
    fn private_data_that_are_too_short_are_no_join() {
        assert_eq!(join_bytes(&[1; Join::SIZE - 1]), [0; Join::SIZE]);
        assert_eq!(join_bytes(&[1; Join::SIZE + 1]), [1; Join::SIZE]);
        for _ in 0..100 {
            assert_ne!(new_session(), 0);
        }
    }
}
