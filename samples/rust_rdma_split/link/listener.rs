// SPDX-License-Identifier: GPL-2.0

//! The I/O unit's side: waiting for hosts.

use super::arrivals::{Arrivals, Full};
use super::steps::{join, new_session, Events};
use super::{Link, Options, Owner, Queues, Shared, Statistics, CLIENT};
use crate::protocol::{Channel, Join, Layout, Role, Service, Variant, Violation, JOIN_MAGIC};
use crate::rdma::QpType;
use crate::rdma_cm::{self, Acceptor, Request};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use kernel::alloc::AllocError;
use kernel::fmt;
use kernel::new_mutex;
use kernel::prelude::*;
use kernel::sync::{Arc, Mutex};
use kernel::time::{Instant, Monotonic};

/// Links at a time that are not up yet, or not any more. Each costs memory, and may stay so for seconds.
const MOST_UNFINISHED: usize = 16;

/// What the limit of the log knows refusals as.
const REFUSED: &CStr = c"rust_rdma_split: hosts that were refused";

/// Why somebody does not become a host.
enum Refusal {
    /// What he does is counted.
    Wrong(Violation),
    /// It cannot be done.
    Failed(Error),
}

impl From<Violation> for Refusal {
    fn from(violation: Violation) -> Self {
        Self::Wrong(violation)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<AllocError> for Refusal {
    fn from(error: AllocError) -> Self {
        Self::Failed(error.into())
    }
}

/// Who makes owners for the hosts that come.
pub trait Factory: Send + Sync + 'static {
    /// What a host gets.
    type Owner: Owner;

    /// A host has come. It may keep the link. May sleep.
    fn joined(&self, link: Link<Self::Owner>) -> Result<Arc<Self::Owner>>;

    /// It is gone; nothing more comes from it. May sleep.
    fn parted(&self, owner: Arc<Self::Owner>);
}

/// Who a link of an I/O unit belongs to.
pub(crate) trait Parent<O: Owner>: Send + Sync {
    /// A host has come.
    fn joined(&self, link: Link<O>) -> Result<Arc<O>>;

    /// It is gone.
    fn parted(&self, link: &Arc<Shared<O>>, owner: Option<Arc<O>>);
}

/// Waits for hosts, each of which gets a [`Link`]. Dropping it ends all of them in an orderly way, which may sleep for some
/// seconds and waits for [`Owner::request`].
pub struct Listener<F: Factory> {
    listening: KVec<rdma_cm::Listener<Door<F>>>,
    door: Arc<Door<F>>,
}

/// What the connection manager calls.
#[pin_data]
struct Door<F: Factory> {
    options: Options,
    factory: Arc<F>,
    queues: Arc<Queues>,
    began: Instant<Monotonic>,
    #[pin]
    links: Mutex<Links<F::Owner>>,
}

/// A link to a host, and the address that the host has come from.
struct Place<O: Owner> {
    link: Arc<Shared<O>>,
    from: IpAddr,
}

struct Links<O: Owner> {
    all: KVec<Place<O>>,
    /// What was counted by those that are gone.
    past: Statistics,
    /// How often hosts come.
    arrivals: Arrivals,
    /// No more are wanted.
    is_closed: bool,
}

impl<O: Owner> Links<O> {
    fn new() -> Result<Self> {
        Ok(Self {
            all: KVec::new(),
            past: Statistics::ZERO,
            arrivals: Arrivals::new()?,
            is_closed: false,
        })
    }

    /// Whether there is a place for one more, who comes now (milliseconds) from that address.
    fn admit(&mut self, from: IpAddr, options: &Options, now: u64) -> Result<(), Full> {
        let is_unfinished = |place: &&Place<O>| !place.link.state.lock().is_up;
        let unfinished = self.all.iter().filter(is_unfinished).count();
        if self.is_closed || self.all.len() >= options.hosts || unfinished >= MOST_UNFINISHED {
            return Err(Full::ForAll);
        }
        let own = self.all.iter().filter(|place| place.from == from).count();
        if own >= options.hosts_of_one {
            return Err(Full::ForOne);
        }
        self.arrivals.admit(from, now)
    }
}

impl<F: Factory> Listener<F> {
    /// Waits for hosts at all addresses of this machine, on all RDMA devices there are and will be.
    pub fn new(port: u16, options: Options, factory: Arc<F>) -> Result<Self> {
        let links = Links::new()?;
        let init = try_pin_init!(Door {
            options,
            factory,
            queues: Queues::new()?,
            began: Instant::now(),
            links <- new_mutex!(links, "rust_rdma_split_links"),
        }? Error);
        let door = Arc::pin_init(init, GFP_KERNEL)?;
        let listen =
            |address: SocketAddr| rdma_cm::Listener::new(CLIENT, &address, 16, door.clone());
        let mut listening = KVec::with_capacity(2, GFP_KERNEL)?;
        listening.push(listen((Ipv4Addr::UNSPECIFIED, port).into())?, GFP_KERNEL)?;
        // Where there is IPv6.
        if let Ok(other) = listen((Ipv6Addr::UNSPECIFIED, port).into()) {
            listening.push(other, GFP_KERNEL)?;
        }
        Ok(Self { listening, door })
    }

    /// What all links have counted, also those that are gone: for who wants to see it as a text.
    pub fn totals(&self) -> Totals<F> {
        Totals(self.door.clone())
    }
}

/// What all links of a listener have counted. As a text: a line for each number.
pub struct Totals<F: Factory>(Arc<Door<F>>);

impl<F: Factory> fmt::Debug for Totals<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links = self.0.links.lock();
        let mut sum = links.past;
        for place in &links.all {
            sum.add(&place.link.statistics());
        }
        drop(links);
        for ((prefix, name), value) in Statistics::names().zip(sum.values()) {
            f.write_fmt(fmt!("{}{} {}\n", prefix, name, value))?;
        }
        Ok(())
    }
}

impl<F: Factory> Drop for Listener<F> {
    fn drop(&mut self) {
        self.door.links.lock().is_closed = true;
        // Nobody comes any more, when these are gone.
        self.listening.clear();
        // All at once, as each may take its time.
        for Place { link, .. } in &self.door.links.lock().all {
            link.state.lock().is_ending = true;
            link.wake();
        }
        loop {
            let links = self.door.links.lock();
            let Some(link) = links.all.first().map(|place| place.link.clone()) else {
                break;
            };
            drop(links);
            link.finish();
        }
        self.door.queues.flush();
    }
}

impl<F: Factory> Door<F> {
    /// What a request says, if it is one that could be answered.
    fn read(&self, request: &Request<'_>) -> Option<(Join, Options)> {
        let theirs = Join::decode(request.private_data())?;
        let service = Service::from_number(theirs.service)?;
        let variant = Variant::from_number(theirs.variant)?;
        let is_type = match service {
            Service::Acknowledged => request.qp_type() == Some(QpType::Rc),
            Service::Unacknowledged => request.qp_type() == Some(QpType::Uc),
        };
        let options = Options {
            service,
            variant,
            ..self.options
        };
        (is_type && theirs.magic == JOIN_MAGIC).then_some((theirs, options))
    }

    /// A host wants a link.
    fn control(
        self: &Arc<Self>,
        request: Request<'_>,
        from: IpAddr,
        theirs: &Join,
        options: Options,
    ) -> Result<(), Refusal> {
        let sessions = (new_session(), theirs.session);
        let own = join(Role::Unit, &options, Channel::Control, sessions);
        Join::check(&own, request.private_data())?;
        let now = self.began.elapsed().as_millis().max(0) as u64;
        let mut links = self.links.lock();
        // Before anything is made for it.
        links
            .admit(from, &self.options, now)
            .map_err(|full| match full {
                Full::ForOne => Refusal::Wrong(Violation::Crowded),
                Full::ForAll => Refusal::Failed(EBUSY),
            })?;
        let parent: Arc<dyn Parent<F::Owner>> = self.clone();
        let queues = self.queues.clone();
        let shared = Shared::new(Role::Unit, options, None, Some(parent), queues)?;
        let place = Place {
            link: shared.clone(),
            from,
        };
        links.all.push(place, GFP_KERNEL)?;
        let handler = Events {
            shared: shared.clone(),
            channel: Channel::Control,
            epoch: 0,
        };
        let id = Arc::new(handler, GFP_KERNEL)
            .map_err(Error::from)
            .and_then(|handler| request.into_id(handler));
        match id {
            Ok(id) => {
                let mut state = shared.state.lock();
                state.sessions = sessions;
                state.incoming_control = Some(id);
            }
            Err(error) => {
                let _ = links.all.pop();
                return Err(error.into());
            }
        }
        shared.wake();
        Ok(())
    }

    /// The host of a link wants its other channel.
    fn data(&self, request: Request<'_>, from: IpAddr, theirs: &Join) -> Result<(), Refusal> {
        // Before it is looked for: who does not know the key is not told either which sessions there are.
        if theirs.key != self.options.key {
            return Err(Violation::BadKey.into());
        }
        let links = self.links.lock();
        let is_it = |place: &&Place<F::Owner>| {
            let state = place.link.state.lock();
            let sessions = (theirs.peer_session, theirs.session);
            place.from == from && state.sessions == sessions && !state.is_over
        };
        let found = links.all.iter().find(is_it);
        let Some(shared) = found.map(|place| place.link.clone()) else {
            return Err(Violation::OtherSession.into());
        };
        drop(links);
        let (epoch, own) = {
            let state = shared.state.lock();
            // Once, and after the control channel was accepted.
            if state.has_data || state.live.is_none() {
                return Err(EBUSY.into());
            }
            (state.epoch, shared.join(Channel::Data, state.sessions))
        };
        Join::check(&own, request.private_data())?;
        let handler = Events {
            shared: shared.clone(),
            channel: Channel::Data,
            epoch,
        };
        let id = request.into_id(Arc::new(handler, GFP_KERNEL)?)?;
        let mut state = shared.state.lock();
        let is_wanted = state.epoch == epoch && !state.has_data;
        if is_wanted {
            state.has_data = true;
            state.incoming_data = Some(id);
            drop(state);
            shared.wake();
        } else {
            drop(state);
            // By the handler of its own, so that the core refuses.
            drop(id);
        }
        Ok(())
    }

    /// Somebody wants something. Where it fails the request is dropped, and so refused.
    fn take(self: &Arc<Self>, request: Request<'_>) -> Result<(), Refusal> {
        // Who has no IP address is nobody that could be counted, or told from others.
        let peer = request.peer().ok_or(Violation::BadJoin)?;
        let from = peer.ip().to_canonical();
        let (theirs, options) = self.read(&request).ok_or(Violation::BadJoin)?;
        match Channel::from_number(theirs.channel) {
            Some(Channel::Control) => self.control(request, from, &theirs, options),
            Some(Channel::Data) => self.data(request, from, &theirs),
            None => Err(Violation::BadJoin.into()),
        }
    }
}

impl<F: Factory> Acceptor for Door<F> {
    fn request(self: &Arc<Self>, request: Request<'_>) {
        let Err(refusal) = self.take(request) else {
            return;
        };
        if let Refusal::Wrong(violation) = refusal {
            self.links.lock().past.count(violation);
        }
        if !self.queues.said.allows(REFUSED) {
            return;
        }
        match refusal {
            Refusal::Wrong(violation) => {
                pr_warn!("a host was refused: {}\n", violation.name())
            }
            Refusal::Failed(error) => pr_warn!("a host was refused: {:?}\n", error),
        }
    }
}

impl<F: Factory> Parent<F::Owner> for Door<F> {
    fn joined(&self, link: Link<F::Owner>) -> Result<Arc<F::Owner>> {
        self.factory.joined(link)
    }

    fn parted(&self, link: &Arc<Shared<F::Owner>>, owner: Option<Arc<F::Owner>>) {
        if let Some(owner) = owner {
            self.factory.parted(owner);
        }
        let mut links = self.links.lock();
        links.past.add(&link.statistics());
        let is_it = |place: &Place<F::Owner>| Arc::ptr_eq(&place.link, link);
        let at = links.all.iter().position(is_it);
        let place = at.and_then(|at| links.all.remove(at).ok());
        drop(links);
        drop(place);
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_listener)]
mod tests {
    use super::*;
    use crate::link::{Frame, CONFIG_MAX};
    use crate::protocol::{Operation, Status};

    struct Nobody;

    impl Owner for Nobody {
        fn frame(&self, _frame: Frame<'_>) {}
        fn frames_end(&self) {}
        fn writable(&self) {}
        fn changed(&self, _is_up: bool) {}

        fn request(
            &self,
            _operation: Operation,
            _data: &[u8],
            _answer: &mut [u8; CONFIG_MAX],
        ) -> Result<usize, Status> {
            Err(Status::NotSupported)
        }
    }

    fn options() -> Options {
        Options::new(Service::Acknowledged, Variant::Push, 1518)
    }

    /// An address of a host.
    fn host(number: usize) -> IpAddr {
        Ipv4Addr::from(0x0a00_0000 + number as u32).into()
    }

    /// One more link, to a host of that address.
    fn push(links: &mut Links<Nobody>, from: IpAddr, queues: &Arc<Queues>) -> Result {
        let link = Shared::new(Role::Unit, options(), None, None, queues.clone())?;
        links.all.push(Place { link, from }, GFP_KERNEL)?;
        Ok(())
    }

    #[test]
    fn hosts_come_one_after_the_other_after_the_first() -> Result {
        let mut links = Links::<Nobody>::new()?;
        let options = options();
        let mut next = (0..).map(host);
        let mut admit = |now| links.admit(next.next().unwrap_or(host(0)), &options, now);
        for _ in 0..64 {
            assert_eq!(admit(1000), Ok(()));
        }
        for now in [1000, 1199] {
            assert_eq!(admit(now), Err(Full::ForAll));
        }
        assert_eq!(admit(1200), Ok(()));
        assert_eq!(admit(1200), Err(Full::ForAll));
        links.is_closed = true;
        assert_eq!(links.admit(host(0), &options, 100_000), Err(Full::ForAll));
        Ok(())
    }

    #[test]
    fn so_many_links_are_begun_and_no_more() -> Result {
        let queues = Queues::new()?;
        let mut links = Links::new()?;
        let mut options = options();
        for number in 0..MOST_UNFINISHED {
            assert_eq!(links.admit(host(number), &options, 0), Ok(()));
            push(&mut links, host(number), &queues)?;
        }
        let other = host(MOST_UNFINISHED);
        assert_eq!(links.admit(other, &options, 0), Err(Full::ForAll));
        // Those that are up are counted with all.
        links.all[0].link.state.lock().is_up = true;
        assert_eq!(links.admit(other, &options, 0), Ok(()));
        options.hosts = MOST_UNFINISHED;
        assert_eq!(links.admit(other, &options, 0), Err(Full::ForAll));
        Ok(())
    }

    #[test]
    fn one_address_has_its_own_places_and_no_more() -> Result {
        let queues = Queues::new()?;
        let mut links = Links::new()?;
        let options = options();
        let (one, other) = (host(1), host(2));
        for _ in 0..options.hosts_of_one {
            assert_eq!(links.admit(one, &options, 0), Ok(()));
            push(&mut links, one, &queues)?;
        }
        // Whether they are up or not.
        for is_up in [false, true] {
            for place in &links.all {
                place.link.state.lock().is_up = is_up;
            }
            assert_eq!(links.admit(one, &options, 0), Err(Full::ForOne));
            assert_eq!(links.admit(other, &options, 0), Ok(()));
        }
        drop(links.all.pop());
        assert_eq!(links.admit(one, &options, 0), Ok(()));
        Ok(())
    }
}
