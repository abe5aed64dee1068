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
        // SAFETY: the event is not acknowledged yet.
        unsafe { (*self.0).event }
    }

    fn id(&self) -> *mut rdma_cm_id {
        // SAFETY: as above.
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

/// What is in the session but not in a connection.
pub struct Shared {
    verbs: *mut ibv_context,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
    mr: *mut ibv_mr,
    base: *mut u8,
    cq_events: u32,
}

/// Two halves of memory: messages go out of the first and come into the second.
fn map_buffer() -> Outcome<*mut u8> {
    // SAFETY: a fresh mapping touches no memory in use.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            2 * HALF,
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
            channel: ptr::null_mut(),
            cq: ptr::null_mut(),
            mr: ptr::null_mut(),
            base: ptr::null_mut(),
            cq_events: 0,
        };
        // SAFETY: the context belongs to an identifier that outlives this; each object is made
        // from live ones, and `drop` takes back what was made.
        unsafe {
            shared.pd = not_null("ibv_alloc_pd", ibv_alloc_pd(verbs))?;
            shared.channel = not_null("ibv_create_comp_channel", ibv_create_comp_channel(verbs))?;
            shared.cq = not_null(
                "ibv_create_cq",
                ibv_create_cq(
                    verbs,
                    entries.clamp(16, 65_536) as i32,
                    ptr::null_mut(),
                    shared.channel,
                    0,
                ),
            )?;
            shared.base = map_buffer()?;
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
            if !self.cq.is_null() {
                ibv_ack_cq_events(self.cq, self.cq_events);
                ibv_destroy_cq(self.cq);
            }
            if !self.channel.is_null() {
                ibv_destroy_comp_channel(self.channel);
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

/// One end of some connections.
pub struct Session {
    connections: Vec<Connection>,
    regions: Vec<*mut ibv_mr>,
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

    /// Makes queue pairs beside the first connection's, of the same device; gives their numbers.
    /// They are connected by [`Session::connect_clones`], without rdma_cm, which takes a fraction
    /// of the time.
    pub fn make_clones(&mut self, count: usize) -> Outcome<Vec<u32>> {
        let mut numbers = Vec::with_capacity(count);
        for _ in 0..count {
            let shared = self.shared();
            let mut attributes = qp_attributes(shared, &self.shape);
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
        let connection = &self.connections[index];
        let shared = self.shared();
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
            if !read && work.size <= connection.inline {
                wr.send_flags |= IBV_SEND_INLINE;
            }
            wr.wr.rdma.remote_addr = work.remote.0 + if read { 0 } else { HALF as u64 };
            wr.wr.rdma.rkey = work.remote.1;
            let mut bad = ptr::null_mut();
            match (*(*connection.qp).context).ops.post_send {
                Some(post) => check("ibv_post_send", post(connection.qp, &mut wr, &mut bad)),
                None => Err("no post_send".into()),
            }
        }
    }

    /// Takes completions that are there; any that failed is an error.
    #[inline]
    pub fn poll(&mut self, each: &mut impl FnMut(&mut Self, Done) -> Outcome) -> Outcome<usize> {
        let mut entries: [MaybeUninit<ibv_wc>; 32] = [const { MaybeUninit::uninit() }; 32];
        let cq = self.shared().cq;
        // SAFETY: the queue is live and there is room for as many entries as is said.
        let count = unsafe {
            match (*(*cq).context).ops.poll_cq {
                Some(poll) => poll(cq, entries.len() as i32, entries.as_mut_ptr().cast()),
                None => return Err("no poll_cq".into()),
            }
        };
        let count = usize::try_from(count).map_err(|_| "ibv_poll_cq failed".to_string())?;
        for entry in entries.iter().take(count) {
            // SAFETY: the first `count` entries were written.
            let entry = unsafe { entry.assume_init_ref() };
            if entry.status != IBV_WC_SUCCESS {
                return Err(format!(
                    "completion with status {} (vendor {:#x})",
                    entry.status, entry.vendor_err
                ));
            }
            let done = Done {
                wr_id: entry.wr_id,
                receive: entry.opcode & IBV_WC_RECV != 0,
                length: entry.byte_len,
            };
            each(self, done)?;
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
                let (cq, channel) = (self.shared().cq, self.shared().channel);
                // SAFETY: the queue is live.
                check("ibv_req_notify_cq", unsafe {
                    match (*(*cq).context).ops.req_notify_cq {
                        Some(notify) => notify(cq, 0),
                        None => libc::ENOSYS,
                    }
                })?;
                if self.poll(each)? > 0 {
                    return Ok(());
                }
                // SAFETY: the channel is live.
                if !readable(unsafe { (*channel).fd }, PATIENCE) {
                    return Err("no completion event came in time".into());
                }
                let (mut which, mut context) = (ptr::null_mut(), ptr::null_mut());
                // SAFETY: the channel is live; the event is acknowledged in `drop` of the queue.
                check("ibv_get_cq_event", unsafe {
                    ibv_get_cq_event(channel, &mut which, &mut context)
                })?;
                if let Some(shared) = &mut self.shared {
                    shared.cq_events += 1;
                }
            }
        }
        Ok(())
    }

    /// Sets the byte that [`Session::incoming`] looks at.
    pub fn clear_incoming(&mut self, size: usize) {
        // SAFETY: sizes are at most a half of the buffer.
        unsafe { self.shared().base.add(HALF + size - 1).write_volatile(0) };
    }

    /// The last byte of a message of a size, where it comes in.
    #[inline]
    pub fn incoming(&self, size: usize) -> u8 {
        // SAFETY: as above. The device writes there, hence volatile.
        unsafe { self.shared().base.add(HALF + size - 1).read_volatile() }
    }

    /// Sets the last byte of a message of a size that goes out.
    #[inline]
    pub fn set_outgoing(&mut self, size: usize, value: u8) {
        // SAFETY: as above.
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
    let mut attributes = qp_attributes(shared, shape);
    // SAFETY: the identifier is live, all objects belong to its context.
    check("rdma_create_qp", unsafe {
        rdma_create_qp(connection.id, shared.pd, &mut attributes)
    })?;
    // SAFETY: the call above has set it.
    connection.qp = unsafe { (*connection.id).qp };
    connection.inline = attributes.cap.max_inline_data.min(INLINE);
    Ok(())
}

fn qp_attributes(shared: &Shared, shape: &Shape) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        send_cq: shared.cq,
        recv_cq: shared.cq,
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
