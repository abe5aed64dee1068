// SPDX-License-Identifier: GPL-2.0

//! The two channels between one host and its I/O unit, around an [`Endpoint`].
//!
//! An [`Endpoint`] says what is to be done; here it is: memory, regions, queue pairs, connections. A [`Host`] connects to an
//! address, again and again; a [`Listener`] waits for hosts, and has a [`Link`] for each. Who owns a link ([`Owner`]) gives
//! it frames and is given some, and knows nothing of RDMA.
//!
//! # Contexts
//!
//! | where | what |
//! |---|---|
//! | soft interrupt, by the completion queue | `flow.rs`: messages and frames in, requests that are complete |
//! | soft interrupt, by a work queue of bottom halves | after a batch of those: what was given back is told to the peer |
//! | process, by a work queue | `steps.rs`: connecting, configuration, time, the end. One at a time for each link. |
//! | process, by the connection manager | its events: noted for the work queue, nothing else |
//! | any, soft interrupts included | [`Link::can_send`], [`Link::send`] |
//!
//! # Locks
//!
//! In this order: `Shared::steps` (a mutex; all that sleeps is done with it), the connection manager's locks, `Door::links`
//! (a mutex), `Shared::state` (a spinlock with interrupts off). [`Owner`] is called with `steps` held, where it may sleep,
//! or with none; never with `state`. Requests are posted with `state` held, so that there are none once `Shared::end_connection`
//! has taken the queue pairs out of it; those are drained after that, without it.
//!
//! `Shared::asking` (a mutex) is taken before all of these by [`Link::ask`], which waits for the peer with it.

mod arrivals;
mod flow;
mod listener;
mod statistics;
mod steps;
mod stock;

pub use listener::{Factory, Listener, Totals};
pub use statistics::Statistics;

use crate::kernel_ext::completion::Completion;
use crate::kernel_ext::errno::{enotconn, eopnotsupp};
use crate::kernel_ext::ratelimit::RateLimit;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::kernel_ext::workqueue::{hasten, OwnedQueue};
use crate::protocol::{
    Element, Endpoint, Operation, PoolKind, Role, Service, Status, Unsent, Variant, MAX_POOLS,
};
use crate::rdma::consumer::Region;
use core::net::SocketAddr;
use flow::State;
use kernel::prelude::*;
use kernel::sync::{Arc, Mutex};
use kernel::time::{msecs_to_jiffies, Instant, Monotonic};
use kernel::workqueue::{DelayedWork, Work, WorkItem};
use kernel::{impl_has_delayed_work, impl_has_work, new_delayed_work, new_mutex, new_work};
use listener::Parent;
use statistics::Traffic;
use steps::Steps;

/// The most data that a request or its answer has.
pub const CONFIG_MAX: usize = 72;

const _: () = {
    let mut at = 0;
    while at < Operation::ALL.len() {
        let (request, reply) = Operation::ALL[at].0.data_sizes();
        assert!(request <= CONFIG_MAX && reply <= CONFIG_MAX);
        at += 1;
    }
};

/// Who is named to those who list what a device has.
const CLIENT: &CStr = c"rust_rdma_split";
/// Links that do something that takes its time at once.
const LINKS_AT_ONCE: u32 = 16;
/// Milliseconds without an answer after which a peer is given up.
const PATIENCE: u64 = 10_000;
/// Milliseconds after which a message is sent again, where it may be lost.
const RETRY: u64 = 40;

/// Who has a link. No function is called with a lock of the link held.
pub trait Owner: Send + Sync + 'static {
    /// A frame has arrived. In a soft interrupt, or where a connection ends in a process.
    fn frame(&self, frame: Frame<'_>);

    /// A batch of frames is over. In a soft interrupt.
    fn frames_end(&self);

    /// Frames can be sent again, after [`Link::can_send`] or [`Link::send`] said that they cannot. In a soft interrupt.
    fn writable(&self);

    /// Both channels are up, or they are gone. May sleep.
    fn changed(&self, is_up: bool);

    /// The peer asks something. The answer's data are written to `answer`, and their length returned. May sleep; the link
    /// does nothing else meanwhile but frames.
    fn request(
        &self,
        operation: Operation,
        data: &[u8],
        answer: &mut [u8; CONFIG_MAX],
    ) -> Result<usize, Status>;
}

/// A frame that has arrived.
pub struct Frame<'a> {
    place: Place<'a>,
    length: usize,
}

enum Place<'a> {
    /// The peer has done with it.
    Own(&'a [u8]),
    /// The peer may write it at any time.
    Shared(&'a Region, usize),
}

impl Frame<'_> {
    /// Its bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether it has none, which none has.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Copies the first bytes of it, as many as `to` has. Copying twice may give other bytes.
    pub fn copy_to(&self, to: &mut [u8]) -> Result {
        if to.len() > self.length {
            return Err(EINVAL);
        }
        match self.place {
            Place::Own(bytes) => to.copy_from_slice(bytes.get(..to.len()).ok_or(EINVAL)?),
            Place::Shared(region, offset) => region.copy_to(offset, to)?,
        }
        Ok(())
    }
}

/// A frame that is to be sent, in however many pieces.
pub trait Gather {
    /// Its bytes.
    fn len(&self) -> usize;

    /// Whether it has none, and so is no frame.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies it to `to`, which has that many.
    fn copy_to(&self, to: &mut [u8]) -> Result;
}

impl Gather for [u8] {
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }

    fn copy_to(&self, to: &mut [u8]) -> Result {
        to.copy_from_slice(self);
        Ok(())
    }
}

/// Elements of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How many; none is no pool.
    pub elements: u32,
    /// Bytes of each.
    pub size: u32,
}

/// Pools for frames that do not travel in messages, at first.
pub const POOLS: usize = 3;
/// Pools that a peer is given besides if it asks for more, on one connection.
const MORE_POOLS: usize = 3;
const _: () = assert!(1 + POOLS + MORE_POOLS <= MAX_POOLS);
/// Bytes of memory in one piece, at the most: more is hard to find on a machine that has run for long.
const PIECE: usize = 1 << 17;

/// What a link is like.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The transport. An I/O unit takes that of its host.
    pub service: Service,
    /// Who moves frames that do not travel in messages. An I/O unit takes that of its host.
    pub variant: Variant,
    /// Tell of each write by a message, also where immediate data suffice.
    pub separate_indication: bool,
    /// Frames of up to so many bytes rather travel in messages.
    pub threshold: u32,
    /// Bytes of the largest frame.
    pub largest: u32,
    /// Messages that the peer may send before it is given anything back, and bytes of the largest frame in one.
    pub messages: Shape,
    /// Pools for frames that do not travel in messages, from small to large.
    pub pools: [Shape; POOLS],
    /// Hosts that an I/O unit has at a time.
    pub hosts: usize,
    /// Of these, hosts from one address: one, and those of its connections that the I/O unit does not know to be lost yet.
    pub hosts_of_one: usize,
    /// What an I/O unit and its hosts know, and nobody else: who says another is refused.
    pub key: u64,
}

impl Options {
    /// The usual ones, for frames of up to `largest` bytes.
    pub fn new(service: Service, variant: Variant, largest: u32) -> Self {
        const ORDINARY: u32 = 2048;
        let shape = |elements, size| Shape { elements, size };
        let pools = match largest {
            ..=ORDINARY => [shape(64, 512), shape(64, ORDINARY), shape(0, 0)],
            _ => [
                shape(64, 512),
                shape(64, ORDINARY),
                shape((PIECE as u32 / largest).max(1), largest),
            ],
        };
        Self {
            service,
            variant,
            separate_indication: false,
            threshold: 256,
            largest,
            messages: shape(128, 512),
            pools,
            hosts: 64,
            hosts_of_one: 4,
            key: 0,
        }
    }

    /// Messages that the peer may send, and bytes of the largest frame in one.
    fn message_shape(&self) -> Shape {
        let size = match self.service {
            Service::Acknowledged => self.messages.size.max(self.threshold).min(self.largest),
            // There is no other way.
            Service::Unacknowledged => self.largest,
        };
        // Half a megabyte is enough.
        let most = (1 << 19) / size.max(1);
        Shape {
            elements: self.messages.elements.min(most).max(1),
            size,
        }
    }

    /// The pools that there are, besides those of messages.
    fn shapes(&self) -> &[Shape] {
        match self.service {
            Service::Acknowledged => &self.pools,
            Service::Unacknowledged => &[],
        }
    }

    /// Of which shape a pool is that a peer asks for which lacks elements of `size` bytes. Where it reads from this side, or
    /// all frames travel in messages, it is not this side that lacks them.
    fn more(&self, size: u32) -> Option<Shape> {
        if self.variant == Variant::Pull {
            return None;
        }
        let shapes = self.shapes().iter().filter(|shape| shape.elements != 0);
        shapes.copied().find(|shape| shape.size >= size)
    }

    /// Elements of all pools that a peer may ask for.
    fn most_more(&self) -> u32 {
        let most = self.shapes().iter().map(|shape| shape.elements).max();
        match self.variant {
            Variant::Push => most.unwrap_or(0) * MORE_POOLS as u32,
            Variant::Pull => 0,
        }
    }

    /// The kind of those.
    fn kind(&self) -> PoolKind {
        match self.variant {
            Variant::Push => PoolKind::Write,
            Variant::Pull => PoolKind::Read,
        }
    }

    fn endpoint(&self, role: Role) -> Result<KBox<Endpoint<KVec<Element>>>> {
        let most = self.pools.iter().map(|shape| shape.elements).max();
        // A peer may have more than this side.
        let capacity = most.unwrap_or(0).max(256) as usize;
        let elements = KVec::from_elem(Element::default(), capacity * 2 * MAX_POOLS, GFP_KERNEL)?;
        let options = crate::protocol::Options {
            role,
            service: self.service,
            variant: self.variant,
            separate_indication: self.separate_indication,
            threshold: self.threshold,
            retry: RETRY,
            patience: PATIENCE,
        };
        Ok(KBox::new(Endpoint::new(options, elements), GFP_KERNEL)?)
    }
}

/// Where links work.
#[pin_data]
pub(crate) struct Queues {
    /// In processes.
    steps: OwnedQueue,
    /// In soft interrupts.
    bottom: OwnedQueue,
    /// What devices and peers make this machine say. Of all links, as a peer may have any number of them.
    #[pin]
    said: RateLimit,
}

impl Queues {
    fn new() -> Result<Arc<Self>> {
        let init = try_pin_init!(Self {
            steps: OwnedQueue::for_long_works(c"rust_rdma_split", LINKS_AT_ONCE)?,
            bottom: OwnedQueue::bottom_halves(c"rust_rdma_split_bh")?,
            said <- RateLimit::new(),
        }? Error);
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Waits for what runs, after the last link is over: no work has a reference to anything then.
    fn flush(&self) {
        self.bottom.flush();
        self.steps.flush();
    }
}

/// A link, with all that belongs to it.
#[pin_data]
pub(crate) struct Shared<O: Owner> {
    role: Role,
    options: Options,
    began: Instant<Monotonic>,
    traffic: Traffic,
    #[pin]
    state: IrqSpinLock<State<O>>,
    #[pin]
    steps: Mutex<Steps<O>>,
    /// Held by who asks the peer something.
    #[pin]
    asking: Mutex<()>,
    /// There is an answer, or will be none.
    #[pin]
    answered: Completion,
    /// It is all over.
    #[pin]
    over: Completion,
    #[pin]
    work: DelayedWork<Shared<O>, 0>,
    #[pin]
    bottom: Work<Shared<O>, 1>,
    /// The listener, of an I/O unit.
    parent: Option<Arc<dyn Parent<O>>>,
    // The last: whoever drops it may destroy them.
    queues: Arc<Queues>,
}

impl_has_delayed_work! {
    impl{O: Owner} HasDelayedWork<Self, 0> for Shared<O> { self.work }
}
impl_has_work! {
    impl{O: Owner} HasWork<Self, 1> for Shared<O> { self.bottom }
}

impl<O: Owner> WorkItem<0> for Shared<O> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.step();
    }
}

impl<O: Owner> WorkItem<1> for Shared<O> {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.batch_end();
    }
}

impl<O: Owner> Shared<O> {
    fn new(
        role: Role,
        options: Options,
        peer: Option<SocketAddr>,
        parent: Option<Arc<dyn Parent<O>>>,
        queues: Arc<Queues>,
    ) -> Result<Arc<Self>> {
        let state = State::new(options.endpoint(role)?)?;
        let steps = Steps::new(peer);
        let init = try_pin_init!(Self {
            role,
            options,
            began: Instant::now(),
            traffic: Traffic::new(),
            state <- new_irq_spinlock!(state, "rust_rdma_split_state"),
            steps <- new_mutex!(steps, "rust_rdma_split_steps"),
            asking <- new_mutex!((), "rust_rdma_split_asking"),
            answered <- Completion::new(),
            over <- Completion::new(),
            work <- new_delayed_work!("rust_rdma_split_steps"),
            bottom <- new_work!("rust_rdma_split_bottom"),
            parent,
            queues,
        }? Error);
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Milliseconds since it began.
    fn now(&self) -> u64 {
        self.began.elapsed().as_millis().max(0) as u64
    }

    /// Has `step` run soon. Any context.
    fn wake(self: &Arc<Self>) {
        let state = self.state.lock();
        // With the lock, so that none is queued once it is over.
        if !state.is_over {
            hasten::<_, 0>(&self.queues.steps, self.clone());
        }
    }

    /// Ends the link in an orderly way; waits until it is over, which takes some seconds at the most.
    fn finish(self: &Arc<Self>) {
        self.state.lock().is_ending = true;
        self.wake();
        self.over.wait();
    }

    fn statistics(&self) -> Statistics {
        let counters = *self.state.lock().endpoint.counters();
        Statistics::new(&counters, &self.traffic)
    }
}

/// A link between a host and its I/O unit.
///
/// There may be several of it; it ends with its [`Host`] or [`Listener`], or for an I/O unit when the host is gone.
pub struct Link<O: Owner>(Arc<Shared<O>>);

impl<O: Owner> Clone for Link<O> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<O: Owner> Link<O> {
    /// Whether both channels are up.
    pub fn is_up(&self) -> bool {
        self.0.state.lock().is_up
    }

    /// Whether a frame of so many bytes can be sent now. Where there is [`Unsent::NoElement`], [`Owner::writable`] is
    /// called when it may be; for any other reason it is not worth waiting.
    pub fn can_send(&self, length: usize) -> Result<(), Unsent> {
        self.0.can_send(length)
    }

    /// Sends a frame, by a copy. What is not sent is counted.
    pub fn send<G: Gather + ?Sized>(&self, frame: &G) -> Result<(), Unsent> {
        self.0.send(frame)
    }

    /// Asks the peer something, and waits for the answer; gives the length of its data. May sleep for seconds: not with a
    /// lock that [`Owner::request`] of the other side takes, if that is on this machine.
    pub fn ask(&self, operation: Operation, data: &[u8], answer: &mut [u8]) -> Result<usize> {
        let shared = &self.0;
        let _turn = shared.asking.lock();
        shared.answered.reinit();
        shared.put_question(operation, data)?;
        // With time for it to be sent again, and for the connection to end without an answer.
        let is_answered = shared
            .answered
            .wait_timeout(msecs_to_jiffies(2 * PATIENCE as u32));
        let reply = shared.state.lock().reply.take();
        let reply = match reply {
            Some(reply) => reply,
            None if is_answered => return Err(enotconn()),
            None => return Err(ETIMEDOUT),
        };
        match reply.status {
            Status::Done => {}
            Status::NotSupported => return Err(eopnotsupp()),
            Status::BadValue => return Err(EINVAL),
            Status::NotPermitted => return Err(EPERM),
            Status::Failed => return Err(EIO),
            Status::NoRoom => return Err(ENOSPC),
        }
        let data = reply.data.get(..reply.length).ok_or(EIO)?;
        answer
            .get_mut(..data.len())
            .ok_or(EINVAL)?
            .copy_from_slice(data);
        Ok(data.len())
    }

    /// Frames of up to so many bytes rather travel in messages, from now on.
    pub fn set_threshold(&self, threshold: u32) {
        self.0.state.lock().endpoint.set_threshold(threshold);
    }

    /// What was counted.
    pub fn statistics(&self) -> Statistics {
        self.0.statistics()
    }
}

/// A host: connects to an I/O unit, and again when that is lost. Dropping it ends the connection in an orderly way, which
/// may sleep for some seconds and waits for [`Owner::request`].
pub struct Host<O: Owner> {
    link: Link<O>,
    queues: Arc<Queues>,
}

impl<O: Owner> Host<O> {
    /// Begins to connect. The owner is made with the link, which it may keep.
    pub fn new(
        address: SocketAddr,
        options: Options,
        owner: impl FnOnce(Link<O>) -> Result<Arc<O>>,
    ) -> Result<Self> {
        let queues = Queues::new()?;
        let shared = Shared::new(Role::Host, options, Some(address), None, queues.clone())?;
        let owner = owner(Link(shared.clone()))?;
        shared.state.lock().owner = Some(owner);
        shared.wake();
        Ok(Self {
            link: Link(shared),
            queues,
        })
    }

    /// The link.
    pub fn link(&self) -> &Link<O> {
        &self.link
    }
}

impl<O: Owner> Drop for Host<O> {
    fn drop(&mut self) {
        self.link.0.finish();
        self.queues.flush();
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_link)]
mod tests {
    use super::*;

    const SERVICES: [Service; 2] = [Service::Acknowledged, Service::Unacknowledged];

    #[test]
    fn frames_of_all_sizes_have_a_place() {
        for largest in [64, 600, 1518, 2048, 2049, 9018, 65_550] {
            for service in SERVICES {
                let options = Options::new(service, Variant::Push, largest);
                let message = options.message_shape();
                let there = options.shapes().iter().filter(|shape| shape.elements != 0);
                let sizes = there.clone().map(|shape| shape.size);
                assert!(sizes.clone().is_sorted());
                let most = sizes.max().unwrap_or(0).max(message.size);
                assert!(most >= largest);
                assert!(message.elements != 0 && message.elements * message.size <= 1 << 19);
                for shape in there {
                    // Which immediate data can tell of, and is found in one piece.
                    assert!(shape.elements <= 256);
                    assert!(shape.elements == 1 || shape.elements * shape.size <= PIECE as u32);
                }
            }
        }
    }

    #[test]
    fn frames_up_to_the_threshold_fit_a_message() {
        let mut options = Options::new(Service::Acknowledged, Variant::Push, 1518);
        for (threshold, size) in [(0, 512), (512, 512), (1000, 1000), (9000, 1518)] {
            options.threshold = threshold;
            assert_eq!(options.message_shape().size, size);
        }
        options.service = Service::Unacknowledged;
        assert_eq!(options.message_shape().size, 1518);
        assert!(options.shapes().is_empty());
    }

    #[test]
    fn who_lacks_elements_gets_those_that_fit() {
        let mut options = Options::new(Service::Acknowledged, Variant::Push, 9018);
        let [small, ordinary, large] = options.pools;
        for (size, shape) in [(1, small), (512, small), (513, ordinary), (9018, large)] {
            assert_eq!(options.more(size), Some(shape));
            assert!(options.most_more() >= shape.elements * MORE_POOLS as u32);
        }
        assert_eq!(options.more(9019), None);
        options.variant = Variant::Pull;
        assert_eq!((options.more(1), options.most_more()), (None, 0));
        options.variant = Variant::Push;
        options.service = Service::Unacknowledged;
        assert_eq!((options.more(1), options.most_more()), (None, 0));
    }

    #[test]
    fn no_more_of_a_frame_is_copied_than_it_has() {
        let frame = Frame {
            place: Place::Own(b"frame"),
            length: 5,
        };
        let mut room = [0; 6];
        assert_eq!(frame.copy_to(&mut room).err(), Some(EINVAL));
        assert!(frame.copy_to(&mut room[..5]).is_ok());
        assert_eq!(&room, b"frame\0");
        assert!(frame.copy_to(&mut room[..2]).is_ok());
    }
}
