// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections made by rdma_cm, which every kind of device can do, and what goes over them.

use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::ptr;
use std::time::{Duration, Instant};

use crate::sys::*;

/// How long anything may take that is expected to happen.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of the largest message, and of each half of a session's buffer.
pub const HALF: usize = 8 << 20;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Rights of all regions.
const ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

/// Bytes up to which messages are copied into the work request.
pub const INLINE: u32 = 64;

/// What failed, in words.
pub type Outcome<T = ()> = Result<T, String>;

fn errno(what: &str) -> String {
    format!("{what}: {}", std::io::Error::last_os_error())
}

fn check(what: &str, result: i32) -> Outcome {
    match result {
        0 => Ok(()),
        -1 => Err(errno(what)),
        code => Err(format!(
            "{what}: {}",
            std::io::Error::from_raw_os_error(code.abs())
        )),
    }
}

fn not_null<T>(what: &str, pointer: *mut T) -> Outcome<*mut T> {
    if pointer.is_null() {
        Err(errno(what))
    } else {
        Ok(pointer)
    }
}

fn readable(fd: i32, timeout: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one `pollfd` is passed.
    unsafe { libc::poll(&mut poll, 1, timeout.as_millis() as i32) > 0 }
}

/// Where events of connections arrive.
pub struct Events(*mut rdma_event_channel);

/// An event that is acknowledged when dropped.
struct Event(*mut rdma_cm_event);

impl Event {
    fn kind(&self) -> u32 {
        // SAFETY: the event is not acknowledged before it is dropped.
        unsafe { (*self.0).event }
    }

    fn id(&self) -> *mut rdma_cm_id {
        // SAFETY: the event is not acknowledged before it is dropped.
        unsafe { (*self.0).id }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: acknowledged once, here.
        unsafe { rdma_ack_cm_event(self.0) };
    }
}

impl Events {
    /// Opens one.
    pub fn new() -> Outcome<Self> {
        // SAFETY: no arguments.
        let raw = unsafe { rdma_create_event_channel() };
        Ok(Self(not_null("rdma_create_event_channel", raw)?))
    }

    /// The next event.
    fn next(&self) -> Outcome<Event> {
        // SAFETY: the channel is open.
        if !readable(unsafe { (*self.0).fd }, PATIENCE) {
            return Err("no connection event came in time".into());
        }
        let mut event = ptr::null_mut();
        // SAFETY: the channel is open and there is a place for the event.
        check("rdma_get_cm_event", unsafe {
            rdma_get_cm_event(self.0, &mut event)
        })?;
        Ok(Event(event))
    }

    /// The next event, which must be of a kind; late news of old connections are passed over.
    fn expect(&self, kind: u32) -> Outcome<*mut rdma_cm_id> {
        loop {
            let event = self.next()?;
            if event.kind() == kind {
                return Ok(event.id());
            }
            match event.kind() {
                RDMA_CM_EVENT_DISCONNECTED | RDMA_CM_EVENT_TIMEWAIT_EXIT => {}
                other => {
                    // SAFETY: the event is not acknowledged yet.
                    let status = unsafe { (*event.0).status };
                    return Err(format!(
                        "connection event {other} (status {status}) instead of {kind}"
                    ));
                }
            }
        }
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: all identifiers of the channel are gone.
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

fn address(ip: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(ip.octets()),
        },
        sin_zero: [0; 8],
    }
}

/// A listening identifier.
pub struct Listener {
    id: *mut rdma_cm_id,
    events: Events,
}

impl Listener {
    /// Listens.
    pub fn new(ip: Ipv4Addr, port: u16) -> Outcome<Self> {
        let events = Events::new()?;
        let mut id = ptr::null_mut();
        let mut to = address(ip, port);
        // SAFETY: the channel is open, the address lives through the call, and the identifier is
        // destroyed with the listener.
        unsafe {
            check(
                "rdma_create_id",
                rdma_create_id(events.0, &mut id, ptr::null_mut(), RDMA_PS_TCP),
            )?;
            check("rdma_bind_addr", rdma_bind_addr(id, (&raw mut to).cast()))?;
            check("rdma_listen", rdma_listen(id, 64))?;
        }
        Ok(Self { id, events })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // SAFETY: the identifier is ours.
        unsafe { rdma_destroy_id(self.id) };
    }
}

/// What a session is made of.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Connections.
    pub qps: usize,
    /// Send work requests of each.
    pub send_depth: u32,
    /// Receive work requests of each.
    pub recv_depth: u32,
}

/// How to wait while nothing is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Poll again at once.
    Spin,
    /// Let other threads run, then poll again.
    Yield,
    /// Sleep for some milliseconds.
    Nap(u64),
    /// Sleep until the completion queue raises an event.
    Event,
}

impl Wait {
    /// From its name.
    pub fn parse(text: &str) -> Outcome<Self> {
        Ok(match text {
            "spin" => Self::Spin,
            "yield" => Self::Yield,
            "event" => Self::Event,
            nap => match nap.strip_prefix("nap").and_then(|ms| ms.parse().ok()) {
                Some(ms) => Self::Nap(ms),
                None => return Err(format!("no such way to wait: {text}")),
            },
        })
    }
}

impl std::fmt::Display for Wait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Spin => write!(f, "spin"),
            Self::Yield => write!(f, "yield"),
            Self::Event => write!(f, "event"),
            Self::Nap(ms) => write!(f, "nap{ms}"),
        }
    }
}

/// A completion queue, and the channel that its events come by.
pub struct Queue {
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    /// Events that are not acknowledged.
    events: u32,
}

impl Queue {
    /// Makes one on a completion vector.
    fn new(verbs: *mut ibv_context, entries: usize, vector: i32) -> Outcome<Self> {
        let mut queue = Self {
            channel: ptr::null_mut(),
            cq: ptr::null_mut(),
            events: 0,
        };
        // SAFETY: the context belongs to an identifier that outlives this; `drop` takes back what
        // was made.
        unsafe {
            queue.channel = not_null("ibv_create_comp_channel", ibv_create_comp_channel(verbs))?;
            queue.cq = not_null(
                "ibv_create_cq",
                ibv_create_cq(
                    verbs,
                    entries.clamp(16, 65_536) as i32,
                    ptr::null_mut(),
                    queue.channel,
                    vector,
                ),
            )?;
        }
        Ok(queue)
    }

    /// Takes completions that are there; any that failed is an error.
    #[inline]
    pub fn poll<'w>(
        &self,
        entries: &'w mut Entries,
    ) -> Outcome<impl ExactSizeIterator<Item = Outcome<Done>> + 'w> {
        // SAFETY: the queue is live and there is room for as many entries as is said.
        let count = unsafe {
            match (*(*self.cq).context).ops.poll_cq {
                Some(poll) => poll(self.cq, entries.len() as i32, entries.as_mut_ptr().cast()),
                None => return Err("no poll_cq".into()),
            }
        };
        let count = usize::try_from(count).map_err(|_| "ibv_poll_cq failed".to_string())?;
        Ok(entries[..count].iter().map(|entry| {
            // SAFETY: the first `count` entries were written.
            let entry = unsafe { entry.assume_init_ref() };
            if entry.status != IBV_WC_SUCCESS {
                return Err(format!(
                    "completion with status {} (vendor {:#x})",
                    entry.status, entry.vendor_err
                ));
            }
            Ok(Done {
                wr_id: entry.wr_id,
                receive: entry.opcode & IBV_WC_RECV != 0,
                length: entry.byte_len,
            })
        }))
    }

    /// Asks for an event of the next completion.
    #[inline]
    pub fn arm(&self) -> Outcome {
        // SAFETY: the queue is live.
        check("ibv_req_notify_cq", unsafe {
            match (*(*self.cq).context).ops.req_notify_cq {
                Some(notify) => notify(self.cq, 0),
                None => libc::ENOSYS,
            }
        })
    }

    /// Has the device put off an event until there are `count` completions, or for so long.
    fn moderate(&self, (count, microseconds): (u16, u16)) -> Outcome {
        let mut attributes = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq {
                cq_count: count,
                cq_period: microseconds,
            },
        };
        // SAFETY: the queue is live and the attributes live through the call. Its context is the last
        // field of a `verbs_context`, as all are that libibverbs opens.
        check("ibv_modify_cq", unsafe {
            let context = (*self.cq).context;
            let extended = context.byte_sub(std::mem::offset_of!(verbs_context, context));
            match (*extended.cast::<verbs_context>()).modify_cq {
                Some(modify) => modify(self.cq, &mut attributes),
                None => libc::EOPNOTSUPP,
            }
        })
    }

    /// Sleeps until there is an event.
    pub fn wait(&mut self) -> Outcome {
        // SAFETY: the channel is live.
        if !readable(unsafe { (*self.channel).fd }, PATIENCE) {
            return Err("no completion event came in time".into());
        }
        let (mut which, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live; the event is acknowledged in `drop`.
        check("ibv_get_cq_event", unsafe {
            ibv_get_cq_event(self.channel, &mut which, &mut context)
        })?;
        self.events += 1;
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: what is not null was made and is not used any more; connections are gone.
        unsafe {
            if !self.cq.is_null() {
                ibv_ack_cq_events(self.cq, self.events);
                ibv_destroy_cq(self.cq);
            }
            if !self.channel.is_null() {
                ibv_destroy_comp_channel(self.channel);
            }
        }
    }
}

/// Room for completions.
pub type Entries = [MaybeUninit<ibv_wc>; 32];

/// Room for completions, of which there are none yet.
pub const fn no_entries() -> Entries {
    [const { MaybeUninit::uninit() }; 32]
}

/// What is in the session but not in a connection.
pub struct Shared {
    verbs: *mut ibv_context,
    pd: *mut ibv_pd,
    queue: Queue,
    mr: *mut ibv_mr,
    base: *mut u8,
}

/// Memory of its own, all of it there.
fn map_memory(length: usize) -> Outcome<*mut u8> {
    // SAFETY: a fresh mapping touches no memory in use.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(errno("mmap"));
    }
    Ok(base.cast())
}

impl Shared {
    fn new(verbs: *mut ibv_context, shape: &Shape) -> Outcome<Self> {
        let entries = shape.qps * (shape.send_depth + shape.recv_depth) as usize;
        let mut shared = Self {
            verbs,
            pd: ptr::null_mut(),
            queue: Queue::new(verbs, entries, 0)?,
            mr: ptr::null_mut(),
            base: ptr::null_mut(),
        };
        // SAFETY: the context belongs to an identifier that outlives this; each object is made
        // from live ones, and `drop` takes back what was made.
        unsafe {
            shared.pd = not_null("ibv_alloc_pd", ibv_alloc_pd(verbs))?;
            // Two halves: messages go out of the first and come into the second.
            shared.base = map_memory(2 * HALF)?;
            shared.mr = not_null("ibv_reg_mr", shared.register(2 * HALF))?;
        }
        Ok(shared)
    }

    fn register(&self, length: usize) -> *mut ibv_mr {
        // SAFETY: the domain is live and the range mapped; lengths are at most the buffer's.
        unsafe { ibv_reg_mr(self.pd, self.base.cast(), length, ACCESS as i32) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: what is not null was made and is not used any more; connections are gone.
        unsafe {
            if !self.mr.is_null() {
                ibv_dereg_mr(self.mr);
            }
            if !self.pd.is_null() {
                ibv_dealloc_pd(self.pd);
            }
            if !self.base.is_null() {
                libc::munmap(self.base.cast(), 2 * HALF);
            }
        }
    }
}

/// Memory beside the buffer, for messages to and from all over it.
struct Span {
    base: *mut u8,
    length: usize,
    mr: *mut ibv_mr,
}

impl Drop for Span {
    fn drop(&mut self) {
        // SAFETY: both were made with it, and no message is under way.
        unsafe {
            if !self.mr.is_null() {
                ibv_dereg_mr(self.mr);
            }
            libc::munmap(self.base.cast(), self.length);
        }
    }
}

struct Connection {
    /// Null for one that was not made by rdma_cm.
    id: *mut rdma_cm_id,
    qp: *mut ibv_qp,
    inline: u32,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: both are ours; where there is an identifier, the queue pair was made on it.
        unsafe {
            if self.id.is_null() {
                ibv_destroy_qp(self.qp);
                return;
            }
            if !self.qp.is_null() {
                rdma_destroy_qp(self.id);
            }
            rdma_destroy_id(self.id);
        }
    }
}

impl Connection {
    /// Posts one send work request.
    #[inline]
    fn post(&self, shared: &Shared, work: &Work) -> Outcome {
        let read = work.opcode == IBV_WR_RDMA_READ;
        // What is read lands where messages come in.
        let half = if read { HALF as u64 } else { 0 };
        // SAFETY: the queue pair is live, and the list lives through the call.
        unsafe {
            let mut entry = ibv_sge {
                addr: shared.base as u64 + half,
                length: work.size,
                lkey: (*shared.mr).lkey,
            };
            let mut wr = ibv_send_wr {
                wr_id: work.wr_id,
                sg_list: &mut entry,
                num_sge: 1,
                opcode: work.opcode,
                ..Default::default()
            };
            if work.signalled {
                wr.send_flags |= IBV_SEND_SIGNALED;
            }
            if !read && work.size <= self.inline {
                wr.send_flags |= IBV_SEND_INLINE;
            }
            wr.wr.rdma.remote_addr = work.remote.0 + if read { 0 } else { HALF as u64 };
            wr.wr.rdma.rkey = work.remote.1;
            let mut bad = ptr::null_mut();
            match (*(*self.qp).context).ops.post_send {
                Some(post) => check("ibv_post_send", post(self.qp, &mut wr, &mut bad)),
                None => Err("no post_send".into()),
            }
        }
    }
}

/// A handler's completion queue and the connections that complete there, for a thread of its own.
pub struct Handled<'s> {
    queue: &'s mut Queue,
    connections: Vec<&'s Connection>,
    shared: &'s Shared,
}

// SAFETY: the functions of libibverbs may be called by any thread. A queue and its connections are
// lent to one thread only; of what is shared, threads only read the region's key and address, which
// do not change while it is lent.
unsafe impl Send for Handled<'_> {}

impl Handled<'_> {
    /// Sends a message on one connection after the other, each when the last one's completion has
    /// come by an event: so many completions, so many events.
    pub fn one_by_one(&mut self, count: u64, work: &Work) -> Outcome {
        let mut entries = no_entries();
        for connection in self.connections.iter().cycle().take(count as usize) {
            self.queue.arm()?;
            connection.post(self.shared, work)?;
            self.queue.wait()?;
            let mut found = self.queue.poll(&mut entries)?;
            match (found.next().transpose()?, found.len()) {
                (Some(_), 0) => {}
                (first, more) => {
                    let seen = usize::from(first.is_some()) + more;
                    return Err(format!("{seen} completions after an event, not one"));
                }
            }
        }
        Ok(())
    }
}

/// One end of some connections.
pub struct Session {
    connections: Vec<Connection>,
    regions: Vec<*mut ibv_mr>,
    span: Option<Span>,
    /// Completion queues of clones; where there are none, these have the shared one.
    handlers: Vec<Queue>,
    shared: Option<Shared>,
    shape: Shape,
    /// Own channel; a server's connections have the listener's.
    events: Option<Events>,
}

/// One completion.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// What was given when it was posted.
    pub wr_id: u64,
    /// A receive.
    pub receive: bool,
    /// Bytes received.
    pub length: u32,
}

/// What is posted.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// `ibv_wr_opcode`.
    pub opcode: u32,
    /// Bytes.
    pub size: u32,
    /// Wants a completion.
    pub signalled: bool,
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The other end's buffer.
    pub remote: (u64, u32),
}

impl Session {
    /// Nothing yet.
    pub fn empty(shape: Shape) -> Self {
        Self {
            connections: Vec::new(),
            regions: Vec::new(),
            span: None,
            handlers: Vec::new(),
            shared: None,
            shape,
            events: None,
        }
    }

    /// Connects so many times.
    pub fn connect(ip: Ipv4Addr, port: u16, count: usize, shape: Shape) -> Outcome<Self> {
        let mut session = Self::empty(shape);
        for _ in 0..count {
            session.connect_one(ip, port)?;
        }
        Ok(session)
    }

    /// Connects once more.
    pub fn connect_one(&mut self, ip: Ipv4Addr, port: u16) -> Outcome {
        if self.events.is_none() {
            self.events = Some(Events::new()?);
        }
        let Some(events) = &self.events else {
            return Err("no channel".into());
        };
        let mut id = ptr::null_mut();
        let mut to = address(ip, port);
        // SAFETY: the channel is open and outlives the identifier.
        check("rdma_create_id", unsafe {
            rdma_create_id(events.0, &mut id, ptr::null_mut(), RDMA_PS_TCP)
        })?;
        let mut connection = Connection {
            id,
            qp: ptr::null_mut(),
            inline: 0,
        };
        // SAFETY: the identifier is live, the address lives through the call.
        check("rdma_resolve_addr", unsafe {
            rdma_resolve_addr(id, ptr::null_mut(), (&raw mut to).cast(), 10_000)
        })?;
        events.expect(RDMA_CM_EVENT_ADDR_RESOLVED)?;
        // SAFETY: the identifier is live.
        check("rdma_resolve_route", unsafe {
            rdma_resolve_route(id, 10_000)
        })?;
        events.expect(RDMA_CM_EVENT_ROUTE_RESOLVED)?;
        make_qp(&mut connection, &mut self.shared, &self.shape)?;
        let mut parameters = parameters(16, 16);
        // SAFETY: the identifier has a queue pair; the parameters live through the call.
        check("rdma_connect", unsafe { rdma_connect(id, &mut parameters) })?;
        events.expect(RDMA_CM_EVENT_ESTABLISHED)?;
        self.connections.push(connection);
        self.fill_receives(self.connections.len() - 1)
    }

    /// Accepts one connection.
    pub fn accept_one(&mut self, listener: &Listener) -> Outcome {
        let (id, depths) = loop {
            let event = listener.events.next()?;
            if event.kind() == RDMA_CM_EVENT_CONNECT_REQUEST {
                // SAFETY: a request has the parameters of a connection.
                let asked = unsafe { (*event.0).param.conn };
                break (
                    event.id(),
                    (asked.responder_resources, asked.initiator_depth),
                );
            }
        };
        let mut connection = Connection {
            id,
            qp: ptr::null_mut(),
            inline: 0,
        };
        make_qp(&mut connection, &mut self.shared, &self.shape)?;
        self.connections.push(connection);
        // Before the other end can send anything.
        self.fill_receives(self.connections.len() - 1)?;
        let mut parameters = parameters(depths.0.min(16), depths.1.min(16));
        // SAFETY: the identifier has a queue pair; the parameters live through the call.
        check("rdma_accept", unsafe { rdma_accept(id, &mut parameters) })?;
        listener.events.expect(RDMA_CM_EVENT_ESTABLISHED)?;
        Ok(())
    }

    fn fill_receives(&mut self, index: usize) -> Outcome {
        for _ in 0..self.shape.recv_depth {
            self.post_recv(index)?;
        }
        Ok(())
    }

    /// Makes completion queues that the clones are spread over, each on a completion vector of its
    /// own or all on the first one.
    pub fn make_handlers(&mut self, count: usize, one_vector: bool) -> Outcome {
        let verbs = self.shared().verbs;
        // SAFETY: the context is open.
        let vectors = usize::try_from(unsafe { (*verbs).num_comp_vectors }).unwrap_or(0);
        if !one_vector && count > vectors {
            return Err(format!("the device has {vectors} completion vectors"));
        }
        let of_each = self.shape.qps.div_ceil(count.max(1));
        let entries = of_each * (self.shape.send_depth + self.shape.recv_depth) as usize;
        for vector in 0..count {
            let vector = if one_vector { 0 } else { vector as i32 };
            self.handlers.push(Queue::new(verbs, entries, vector)?);
        }
        Ok(())
    }

    /// What each handler needs to work by itself: its queue and the clones that complete there.
    pub fn handled(&mut self) -> Vec<Handled<'_>> {
        let Some(shared) = &self.shared else {
            return Vec::new();
        };
        let count = self.handlers.len();
        // The first is rdma_cm's, and has the shared queue.
        let clones = self.connections.get(1..).unwrap_or_default();
        self.handlers
            .iter_mut()
            .enumerate()
            .map(|(number, queue)| Handled {
                queue,
                connections: clones.iter().skip(number).step_by(count).collect(),
                shared,
            })
            .collect()
    }

    /// Makes queue pairs beside the first connection's, of the same device; gives their numbers.
    /// They are connected by [`Session::connect_clones`], without rdma_cm, which takes a fraction
    /// of the time.
    pub fn make_clones(&mut self, count: usize) -> Outcome<Vec<u32>> {
        let mut numbers = Vec::with_capacity(count);
        for number in 0..count {
            let shared = self.shared();
            let cq = match self.handlers.len() {
                0 => shared.queue.cq,
                handlers => self.handlers[number % handlers].cq,
            };
            let mut attributes = qp_attributes(cq, &self.shape);
            // SAFETY: all objects are live and of one context.
            let qp = not_null("ibv_create_qp", unsafe {
                ibv_create_qp(shared.pd, &mut attributes)
            })?;
            // SAFETY: just made.
            numbers.push(unsafe { (*qp).qp_num });
            self.connections.push(Connection {
                id: ptr::null_mut(),
                qp,
                inline: attributes.cap.max_inline_data.min(INLINE),
            });
        }
        Ok(numbers)
    }

    /// Connects the queue pairs that [`Session::make_clones`] has made to those of the other end,
    /// in order, over the path of the first connection.
    pub fn connect_clones(&mut self, peers: &[u32]) -> Outcome {
        let mut model = ibv_qp_attr::default();
        let mut unused = ibv_qp_init_attr::default();
        let asked = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_PORT | IBV_QP_TIMEOUT;
        let first = self.connections.first().ok_or("no connection to copy")?.qp;
        // SAFETY: the queue pair is live and there is room for the answers.
        check("ibv_query_qp", unsafe {
            ibv_query_qp(first, &mut model, asked as i32, &mut unused)
        })?;
        let clones = self.connections.len() - peers.len();
        for (index, peer) in peers.iter().enumerate() {
            let qp = self.connections[clones + index].qp;
            let modify = |mut attributes: ibv_qp_attr, mask: u32| {
                // SAFETY: the queue pair is live.
                check("ibv_modify_qp", unsafe {
                    ibv_modify_qp(qp, &mut attributes, (mask | IBV_QP_STATE) as i32)
                })
            };
            modify(
                ibv_qp_attr {
                    qp_state: IBV_QPS_INIT,
                    port_num: 1,
                    qp_access_flags: IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
                    ..Default::default()
                },
                IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            )?;
            modify(
                ibv_qp_attr {
                    qp_state: IBV_QPS_RTR,
                    path_mtu: model.path_mtu,
                    dest_qp_num: *peer,
                    ah_attr: model.ah_attr,
                    max_dest_rd_atomic: 4,
                    min_rnr_timer: 12,
                    ..Default::default()
                },
                IBV_QP_AV
                    | IBV_QP_PATH_MTU
                    | IBV_QP_DEST_QPN
                    | IBV_QP_RQ_PSN
                    | IBV_QP_MAX_DEST_RD_ATOMIC
                    | IBV_QP_MIN_RNR_TIMER,
            )?;
            modify(
                ibv_qp_attr {
                    qp_state: IBV_QPS_RTS,
                    timeout: 18,
                    retry_cnt: 7,
                    rnr_retry: 7,
                    max_rd_atomic: 4,
                    ..Default::default()
                },
                IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            )?;
            self.fill_receives(clones + index)?;
        }
        Ok(())
    }

    /// Registers regions of one page each, all over the same few pages, which messages then use
    /// in turn; gives their remote keys.
    pub fn make_regions(&mut self, count: usize) -> Outcome<Vec<u32>> {
        let mut keys = Vec::with_capacity(count);
        for index in 0..count {
            let shared = self.shared();
            let page = index % (HALF / PAGE);
            // SAFETY: the page is inside the buffer.
            let mr = not_null("ibv_reg_mr", unsafe {
                ibv_reg_mr(
                    shared.pd,
                    shared.base.add(HALF + page * PAGE).cast(),
                    PAGE,
                    ACCESS as i32,
                )
            })?;
            // SAFETY: the region was just made.
            keys.push(unsafe { (*mr).rkey });
            self.regions.push(mr);
        }
        Ok(keys)
    }

    /// Takes back all regions of [`Session::make_regions`].
    pub fn drop_regions(&mut self) {
        for mr in self.regions.drain(..) {
            // SAFETY: made by `make_regions`, taken back once.
            unsafe { ibv_dereg_mr(mr) };
        }
    }

    /// Has memory of so many bytes beside the buffer; gives its address and remote key.
    pub fn make_span(&mut self, length: usize) -> Outcome<(u64, u32)> {
        self.span = None;
        let base = map_memory(length)?;
        let mut span = Span {
            base,
            length,
            mr: ptr::null_mut(),
        };
        let pd = self.shared().pd;
        // SAFETY: the domain is live and the range mapped.
        let mr = unsafe { ibv_reg_mr(pd, base.cast(), length, ACCESS as i32) };
        span.mr = not_null("ibv_reg_mr", mr)?;
        self.span = Some(span);
        // SAFETY: the region was just made.
        Ok((base as u64, unsafe { (*mr).rkey }))
    }

    /// Posts one write from byte `at` of that memory, which has room for it, to the same of the other
    /// end's.
    #[inline]
    pub fn post_span(&mut self, at: u64, work: &Work) -> Outcome {
        let span = self.span.as_ref().ok_or("there is no span")?;
        let qp = self.connections[0].qp;
        // SAFETY: the queue pair is live, and the list lives through the call.
        unsafe {
            let mut entry = ibv_sge {
                addr: span.base as u64 + at,
                length: work.size,
                lkey: (*span.mr).lkey,
            };
            let mut wr = ibv_send_wr {
                wr_id: work.wr_id,
                sg_list: &mut entry,
                num_sge: 1,
                opcode: work.opcode,
                ..Default::default()
            };
            if work.signalled {
                wr.send_flags |= IBV_SEND_SIGNALED;
            }
            wr.wr.rdma.remote_addr = work.remote.0 + at;
            wr.wr.rdma.rkey = work.remote.1;
            let mut bad = ptr::null_mut();
            match (*(*qp).context).ops.post_send {
                Some(post) => check("ibv_post_send", post(qp, &mut wr, &mut bad)),
                None => Err("no post_send".into()),
            }
        }
    }

    /// Posts one write of up to a page out of one's region and into the other's.
    #[inline]
    pub fn post_between(&mut self, number: usize, work: &Work) -> Outcome {
        let page = number % (HALF / PAGE);
        let shared = self.shared();
        let qp = self.connections[0].qp;
        // SAFETY: the queue pair is live, and the list lives through the call.
        unsafe {
            let mut entry = ibv_sge {
                addr: shared.base as u64 + (HALF + page * PAGE) as u64,
                length: work.size,
                lkey: (*self.regions[number % self.regions.len()]).lkey,
            };
            let mut wr = ibv_send_wr {
                wr_id: work.wr_id,
                sg_list: &mut entry,
                num_sge: 1,
                opcode: work.opcode,
                ..Default::default()
            };
            if work.signalled {
                wr.send_flags |= IBV_SEND_SIGNALED;
            }
            wr.wr.rdma.remote_addr = work.remote.0 + (HALF + page * PAGE) as u64;
            wr.wr.rdma.rkey = work.remote.1;
            let mut bad = ptr::null_mut();
            match (*(*qp).context).ops.post_send {
                Some(post) => check("ibv_post_send", post(qp, &mut wr, &mut bad)),
                None => Err("no post_send".into()),
            }
        }
    }

    /// Makes completion queues that nothing uses, and forgets them: the end of the program takes
    /// them back.
    pub fn make_cqs(&mut self, count: usize) -> Outcome {
        for _ in 0..count {
            // SAFETY: the context is open.
            let cq = unsafe {
                ibv_create_cq(self.shared().verbs, 16, ptr::null_mut(), ptr::null_mut(), 0)
            };
            not_null("ibv_create_cq", cq)?;
        }
        Ok(())
    }

    /// Ends all connections.
    pub fn close(&mut self) {
        for connection in &self.connections {
            if !connection.id.is_null() {
                // SAFETY: the identifier is live. The other end may have been first.
                unsafe { rdma_disconnect(connection.id) };
            }
        }
        self.connections.clear();
        self.drop_regions();
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Receives that each connection has posted.
    pub fn recv_depth(&self) -> u64 {
        u64::from(self.shape.recv_depth)
    }

    /// Send work requests that each connection has room for.
    pub fn send_depth(&self) -> u32 {
        self.shape.send_depth
    }

    fn shared(&self) -> &Shared {
        match &self.shared {
            Some(shared) => shared,
            None => unreachable!("a connection makes it"),
        }
    }

    /// Address and key of the buffer.
    pub fn buffer(&self) -> (u64, u32) {
        let shared = self.shared();
        // SAFETY: the region is registered.
        (shared.base as u64, unsafe { (*shared.mr).rkey })
    }

    /// Name of the device.
    pub fn device(&self) -> String {
        // SAFETY: the context is open, its device has a name.
        let name =
            unsafe { std::ffi::CStr::from_ptr(ibv_get_device_name((*self.shared().verbs).device)) };
        name.to_string_lossy().into_owned()
    }

    /// Posts one receive; any message fits.
    pub fn post_recv(&mut self, index: usize) -> Outcome {
        let shared = self.shared();
        // SAFETY: the queue pair is live, and the list lives through the call.
        unsafe {
            let mut entry = ibv_sge {
                addr: shared.base as u64 + HALF as u64,
                length: HALF as u32,
                lkey: (*shared.mr).lkey,
            };
            let mut wr = ibv_recv_wr {
                wr_id: index as u64,
                next: ptr::null_mut(),
                sg_list: &mut entry,
                num_sge: 1,
            };
            let mut bad = ptr::null_mut();
            let qp = self.connections[index].qp;
            match (*(*qp).context).ops.post_recv {
                Some(post) => check("ibv_post_recv", post(qp, &mut wr, &mut bad)),
                None => Err("no post_recv".into()),
            }
        }
    }

    /// Posts one send work request.
    #[inline]
    pub fn post(&mut self, index: usize, work: &Work) -> Outcome {
        self.connections[index].post(self.shared(), work)
    }

    /// Takes completions that are there; any that failed is an error.
    #[inline]
    pub fn poll(&mut self, each: &mut impl FnMut(&mut Self, Done) -> Outcome) -> Outcome<usize> {
        let mut entries = no_entries();
        let found = self.shared().queue.poll(&mut entries)?;
        let count = found.len();
        for done in found {
            each(self, done?)?;
        }
        Ok(count)
    }

    /// Waits a little, because nothing was there. An event must not be missed, so queues are
    /// looked at once more after asking for it.
    pub fn pause(
        &mut self,
        wait: Wait,
        each: &mut impl FnMut(&mut Self, Done) -> Outcome,
    ) -> Outcome {
        match wait {
            Wait::Spin => std::hint::spin_loop(),
            // SAFETY: no arguments.
            Wait::Yield => unsafe {
                libc::sched_yield();
            },
            Wait::Nap(ms) => std::thread::sleep(Duration::from_millis(ms)),
            Wait::Event => {
                self.shared().queue.arm()?;
                if self.poll(each)? > 0 {
                    return Ok(());
                }
                if let Some(shared) = &mut self.shared {
                    shared.queue.wait()?;
                }
            }
        }
        Ok(())
    }

    /// Moderates the completion queue of connections that were not given another one: so many
    /// completions, or so many microseconds.
    pub fn moderate(&self, moderation: (u16, u16)) -> Outcome {
        self.shared().queue.moderate(moderation)
    }

    /// Sets the byte that [`Session::incoming`] looks at.
    pub fn clear_incoming(&mut self, size: usize) {
        // SAFETY: sizes are at most a half of the buffer.
        unsafe { self.shared().base.add(HALF + size - 1).write_volatile(0) };
    }

    /// The last byte of a message of a size, where it comes in.
    #[inline]
    pub fn incoming(&self, size: usize) -> u8 {
        // SAFETY: sizes are at most a half of the buffer. The device writes there, hence volatile.
        unsafe { self.shared().base.add(HALF + size - 1).read_volatile() }
    }

    /// Sets the last byte of a message of a size that goes out.
    #[inline]
    pub fn set_outgoing(&mut self, size: usize, value: u8) {
        // SAFETY: sizes are at most a half of the buffer.
        unsafe { self.shared().base.add(size - 1).write_volatile(value) };
    }

    /// Registers and deregisters a part of the buffer.
    pub fn registrations(&mut self, length: usize, count: u64) -> Outcome<Duration> {
        let start = Instant::now();
        for _ in 0..count {
            let mr = not_null("ibv_reg_mr", self.shared().register(length))?;
            // SAFETY: the region was just made.
            check("ibv_dereg_mr", unsafe { ibv_dereg_mr(mr) })?;
        }
        Ok(start.elapsed())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
        self.handlers.clear();
        self.span = None;
        // Before the identifiers' channel.
        self.shared = None;
    }
}

fn parameters(responder: u8, initiator: u8) -> rdma_conn_param {
    rdma_conn_param {
        responder_resources: responder,
        initiator_depth: initiator,
        retry_count: 7,
        rnr_retry_count: 7,
        ..Default::default()
    }
}

fn make_qp(connection: &mut Connection, shared: &mut Option<Shared>, shape: &Shape) -> Outcome {
    // SAFETY: an identifier with a resolved address, or of a request, has a context.
    let verbs = not_null("the identifier's context", unsafe {
        (*connection.id).verbs
    })?;
    if shared.is_none() {
        *shared = Some(Shared::new(verbs, shape)?);
    }
    let Some(shared) = shared else {
        return Err("no shared objects".into());
    };
    let mut attributes = qp_attributes(shared.queue.cq, shape);
    // SAFETY: the identifier is live, all objects belong to its context.
    check("rdma_create_qp", unsafe {
        rdma_create_qp(connection.id, shared.pd, &mut attributes)
    })?;
    // SAFETY: the call above has set it.
    connection.qp = unsafe { (*connection.id).qp };
    connection.inline = attributes.cap.max_inline_data.min(INLINE);
    Ok(())
}

fn qp_attributes(cq: *mut ibv_cq, shape: &Shape) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        send_cq: cq,
        recv_cq: cq,
        cap: ibv_qp_cap {
            max_send_wr: shape.send_depth,
            max_recv_wr: shape.recv_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE,
        },
        qp_type: IBV_QPT_RC,
        ..Default::default()
    }
}
