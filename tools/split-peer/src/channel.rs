// SPDX-License-Identifier: GPL-2.0
//! One connection, made with the connection manager, and what is sent and received on it.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::ptr;
use std::time::{Duration, Instant};

use crate::sys::*;

/// For whatever is not to take for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// Receives that are posted, and bytes of each.
const RECEIVES: usize = 64;
const ROOM: usize = 1024;
/// Where what is sent is, behind the receives; the rest is what a peer may write to.
const OUT: usize = RECEIVES * ROOM;
const OUT_ROOM: usize = 16 * 1024;
/// Where the memory begins that a peer may write to.
pub const LENT: usize = OUT + OUT_ROOM;
/// Bytes of that.
pub const LENT_ROOM: usize = 64 * 1024;

fn last_error(what: &str) -> String {
    format!("{what}: {}", std::io::Error::last_os_error())
}

fn done(what: &str, result: i32) -> Result<(), String> {
    match result {
        0 => Ok(()),
        _ => Err(last_error(what)),
    }
}

/// An identifier of the connection manager, which waits for each of its events.
pub struct Id(*mut rdma_cm_id);

impl Id {
    fn new() -> Result<Self, String> {
        let mut id = ptr::null_mut();
        // SAFETY: `id` is a place for the identifier; without a channel it gets one of its own.
        let made = unsafe {
            rdma_create_id(
                ptr::null_mut(),
                &mut id,
                ptr::null_mut(),
                RDMA_PS_TCP as rdma_port_space,
            )
        };
        done("rdma_create_id", made)?;
        Ok(Self(id))
    }

    /// The private data of its last event.
    fn said(&self) -> Vec<u8> {
        // SAFETY: the identifier is there, and its last event, if there is one, until the next call that waits; the data
        // are as long as it says.
        unsafe {
            let event = (*self.0).event;
            if event.is_null() {
                return Vec::new();
            }
            let conn = (*event).param.conn;
            if conn.private_data.is_null() {
                return Vec::new();
            }
            let length = usize::from(conn.private_data_len);
            std::slice::from_raw_parts(conn.private_data.cast::<u8>(), length).to_vec()
        }
    }

    /// The next event, unless there is none for `time`.
    fn event(&self, time: Duration) -> Result<Option<u32>, String> {
        // SAFETY: the identifier has a channel of its own.
        let channel = unsafe { (*self.0).channel };
        // SAFETY: the channel is there as long as the identifier.
        let fd = unsafe { (*channel).fd };
        let mut wait = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: `wait` is one descriptor.
        if unsafe { libc::poll(&mut wait, 1, time.as_millis() as i32) } <= 0 {
            return Ok(None);
        }
        let mut event = ptr::null_mut();
        // SAFETY: `event` is a place for one.
        done("rdma_get_cm_event", unsafe {
            rdma_get_cm_event(channel, &mut event)
        })?;
        // SAFETY: the event is there until it is acknowledged, which is done once.
        let kind = unsafe {
            let kind = (*event).event;
            rdma_ack_cm_event(event);
            kind
        };
        Ok(Some(kind))
    }
}

impl Id {
    /// Says how to get to a GID, from the one that this port has for IPv4.
    fn set_path(&self, to: [u8; 16]) -> Result<(), String> {
        let from = (0..16).find_map(|index| {
            let mut gid = ibv_gid::default();
            // SAFETY: the identifier has a device, and `gid` is a place for one.
            let asked = unsafe { ibv_query_gid((*self.0).verbs, 1, index, &mut gid) };
            // SAFETY: all views of the union are plain data.
            let raw = unsafe { gid.raw };
            let is_v4 = Ipv6Addr::from(raw).to_ipv4_mapped().is_some();
            (asked == 0 && is_v4).then_some(gid)
        });
        let mut data = ibv_path_data {
            flags: IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL,
            ..Default::default()
        };
        let path = &mut data.path;
        path.dgid = ibv_gid { raw: to };
        path.sgid = from.ok_or("no GID of IPv4")?;
        path.pkey = ANY_PKEY.to_be();
        path.reversible_numpath = 0x80;
        // Exactly 1024 bytes, exactly 10 Gbit/s, exactly a quarter of a second.
        (path.mtu, path.rate, path.packetlifetime) = (0x80 | 3, 0x80 | 3, 0x80 | 16);
        let length = std::mem::size_of_val(&data);
        // SAFETY: `data` is what this option has, of that length.
        done("rdma_set_option", unsafe {
            rdma_set_option(
                self.0,
                RDMA_OPTION_IB as i32,
                RDMA_OPTION_IB_PATH as i32,
                (&raw mut data).cast(),
                length,
            )
        })?;
        // It is as if the kernel had found that way.
        match self.event(PATIENCE)? {
            Some(RDMA_CM_EVENT_ROUTE_RESOLVED) => Ok(()),
            other => Err(format!("no way of one's own, but {other:?}")),
        }
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: the identifier is not used any more, nor is its queue pair.
        unsafe {
            if !(*self.0).qp.is_null() {
                rdma_destroy_qp(self.0);
            }
            rdma_destroy_id(self.0);
        }
    }
}

fn address(ip: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(ip).to_be(),
        },
        sin_zero: [0; 8],
    }
}

/// An address by GID, `struct sockaddr_ib` of the kernel.
#[repr(C)]
struct AddressByGid {
    family: u16,
    pkey: u16,
    flow: u32,
    gid: [u8; 16],
    service: u64,
    service_mask: u64,
    scope: u64,
}

const AF_IB: u16 = 27;
/// The services by GID that are ports of TCP by IP address (`RDMA_IB_IP_PS_TCP`).
const PORTS_BY_GID: u64 = 0x0106_0000;
/// All partitions.
const ANY_PKEY: u16 = 0xffff;

/// How somebody who connects by GID goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgery {
    /// He says the GID, and nothing else.
    Gid,
    /// He has the identifier remember a link before.
    Link,
    /// And he says how to get there, in place of the kernel.
    Path,
}

/// What the connection manager writes before the private data of who connects by IP address: version, address family, port,
/// and both addresses (`struct cma_hdr` of the kernel). Who connects by GID writes it himself.
pub fn header(from: Ipv4Addr, port: u16, to: Ipv4Addr) -> Vec<u8> {
    let mut header = vec![0, 4 << 4];
    header.extend(port.to_be_bytes());
    for ip in [from, to] {
        header.extend([0; 12]);
        header.extend(ip.octets());
    }
    header
}

fn parameters(private_data: &[u8]) -> rdma_conn_param {
    rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u8,
        responder_resources: 1,
        initiator_depth: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        ..Default::default()
    }
}

/// Waits for those who connect.
pub struct Listener(Id);

impl Listener {
    pub fn new(port: u16) -> Result<Self, String> {
        let id = Id::new()?;
        let mut at = address(Ipv4Addr::UNSPECIFIED, port);
        // SAFETY: the address is one, and the identifier is new.
        unsafe {
            done(
                "rdma_bind_addr",
                rdma_bind_addr(id.0, (&raw mut at).cast::<sockaddr>()),
            )?;
            done("rdma_listen", rdma_listen(id.0, 4))?;
        }
        Ok(Self(id))
    }

    /// The next who comes, with what he says.
    pub fn next(&self) -> Result<Guest, String> {
        let mut id = ptr::null_mut();
        // SAFETY: the identifier listens, and `id` is a place for one.
        done("rdma_get_request", unsafe {
            rdma_get_request(self.0 .0, &mut id)
        })?;
        let id = Id(id);
        let said = id.said();
        Ok(Guest { id, said })
    }
}

/// Somebody who wants to be connected.
pub struct Guest {
    id: Id,
    /// His private data.
    pub said: Vec<u8>,
}

impl Guest {
    /// Connects him.
    pub fn accept(self, private_data: &[u8]) -> Result<Channel, String> {
        let channel = Channel::new(self.id)?;
        let mut param = parameters(private_data);
        // SAFETY: the queue pair is made, and the parameters with their data outlive the call.
        done("rdma_accept", unsafe {
            rdma_accept(channel.id.0, &mut param)
        })?;
        Ok(channel)
    }
}

/// What has become of a request.
#[derive(Debug)]
pub enum Done {
    /// It was sent.
    Sent,
    /// These bytes were received.
    Received(Vec<u8>),
    /// Immediate data were.
    Immediate,
    /// It failed.
    Failed,
}

/// One connection.
pub struct Channel {
    // First: its queue pair uses all that follows.
    id: Id,
    memory: *mut ibv_mr,
    bytes: Box<[u8]>,
    /// The private data of the peer.
    pub said: Vec<u8>,
}

impl Channel {
    fn new(id: Id) -> Result<Self, String> {
        let mut attr = ibv_qp_init_attr {
            cap: ibv_qp_cap {
                max_send_wr: 64,
                max_recv_wr: RECEIVES as u32,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 1,
            ..Default::default()
        };
        // SAFETY: the identifier has a device; it gets a domain and completion queues of its own.
        done("rdma_create_qp", unsafe {
            rdma_create_qp(id.0, ptr::null_mut(), &mut attr)
        })?;
        let mut bytes = vec![0; LENT + LENT_ROOM].into_boxed_slice();
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: the bytes stay where they are until the region is gone, which is before they are.
        let memory = unsafe {
            ibv_reg_mr(
                (*id.0).pd,
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                access as i32,
            )
        };
        if memory.is_null() {
            return Err(last_error("ibv_reg_mr"));
        }
        let channel = Self {
            id,
            memory,
            bytes,
            said: Vec::new(),
        };
        for slot in 0..RECEIVES {
            channel.receive(slot)?;
        }
        Ok(channel)
    }

    /// Connects to somebody.
    pub fn connect(to: Ipv4Addr, port: u16, private_data: &[u8]) -> Result<Self, String> {
        let id = Id::new()?;
        let mut at = address(to, port);
        // SAFETY: the address is one, and the identifier is new.
        unsafe {
            done(
                "rdma_resolve_addr",
                rdma_resolve_addr(
                    id.0,
                    ptr::null_mut(),
                    (&raw mut at).cast::<sockaddr>(),
                    2000,
                ),
            )?;
            done("rdma_resolve_route", rdma_resolve_route(id.0, 2000))?;
        }
        let mut channel = Self::new(id)?;
        let mut param = parameters(private_data);
        // SAFETY: the queue pair is made, and the parameters with their data outlive the call.
        done("rdma_connect", unsafe {
            rdma_connect(channel.id.0, &mut param)
        })?;
        channel.said = channel.id.said();
        Ok(channel)
    }

    /// Connects to somebody by GID, over the interface of that name; all private data are the caller's.
    pub fn forge(
        to: Ipv4Addr,
        port: u16,
        interface: &std::ffi::CStr,
        forgery: Forgery,
        private_data: &[u8],
    ) -> Result<Self, String> {
        let id = Id::new()?;
        if forgery != Forgery::Gid {
            let mut at = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr {
                    s6_addr: Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x0bad).octets(),
                },
                // SAFETY: the name is a string.
                sin6_scope_id: unsafe { libc::if_nametoindex(interface.as_ptr()) },
            };
            // Nobody has that address here, so that it fails; the link is remembered.
            // SAFETY: the address is one, and the identifier is new.
            unsafe { rdma_bind_addr(id.0, (&raw mut at).cast::<sockaddr>()) };
        }
        let gid = to.to_ipv6_mapped().octets();
        let mut at = AddressByGid {
            family: AF_IB,
            pkey: ANY_PKEY.to_be(),
            flow: 0,
            gid,
            service: (PORTS_BY_GID | u64::from(port)).to_be(),
            service_mask: u64::MAX,
            scope: 0,
        };
        // SAFETY: the address is one of its family, and the identifier is not bound.
        done("rdma_resolve_addr", unsafe {
            rdma_resolve_addr(
                id.0,
                ptr::null_mut(),
                (&raw mut at).cast::<sockaddr>(),
                2000,
            )
        })?;
        if forgery == Forgery::Path {
            id.set_path(gid)?;
        } else {
            // SAFETY: the identifier has a device.
            done("rdma_resolve_route", unsafe {
                rdma_resolve_route(id.0, 2000)
            })?;
        }
        let channel = Self::new(id)?;
        let mut param = parameters(private_data);
        // SAFETY: the queue pair is made, and the parameters with their data outlive the call.
        done("rdma_connect", unsafe {
            rdma_connect(channel.id.0, &mut param)
        })?;
        Ok(channel)
    }

    /// Where a byte of its memory is, for a peer, with the key.
    pub fn place(&self, offset: usize) -> (u64, u32) {
        // SAFETY: the region is there.
        let key = unsafe { (*self.memory).rkey };
        (self.bytes.as_ptr() as u64 + offset as u64, key)
    }

    fn piece(&self, offset: usize, length: usize) -> ibv_sge {
        ibv_sge {
            addr: self.bytes.as_ptr() as u64 + offset as u64,
            length: length as u32,
            // SAFETY: the region is there.
            lkey: unsafe { (*self.memory).lkey },
        }
    }

    fn receive(&self, slot: usize) -> Result<(), String> {
        let mut piece = self.piece(slot * ROOM, ROOM);
        let mut work = ibv_recv_wr {
            wr_id: slot as u64,
            sg_list: &mut piece,
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and the request with its one piece are there.
        let posted = unsafe {
            let qp = (*self.id.0).qp;
            (*(*qp).context).ops.post_recv.ok_or("no post_recv")?(qp, &mut work, &mut bad)
        };
        match posted {
            0 => Ok(()),
            _ => Err(last_error("ibv_post_recv")),
        }
    }

    fn post(&mut self, bytes: &[u8], mut work: ibv_send_wr) -> Result<(), String> {
        self.bytes
            .get_mut(OUT..OUT + bytes.len())
            .filter(|_| bytes.len() <= OUT_ROOM)
            .ok_or("too much to send")?
            .copy_from_slice(bytes);
        let mut piece = self.piece(OUT, bytes.len());
        work.wr_id = u64::MAX;
        work.sg_list = &mut piece;
        work.num_sge = 1;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and the request with its one piece are there.
        let posted = unsafe {
            let qp = (*self.id.0).qp;
            (*(*qp).context).ops.post_send.ok_or("no post_send")?(qp, &mut work, &mut bad)
        };
        match posted {
            0 => Ok(()),
            _ => Err(last_error("ibv_post_send")),
        }
    }

    /// Sends a message.
    pub fn send(&mut self, bytes: &[u8]) -> Result<Done, String> {
        let work = ibv_send_wr {
            opcode: IBV_WR_SEND,
            ..Default::default()
        };
        self.post(bytes, work)?;
        self.sent()
    }

    /// Writes to memory of the peer, with immediate data or without.
    pub fn write(
        &mut self,
        address: u64,
        key: u32,
        bytes: &[u8],
        immediate: Option<u32>,
    ) -> Result<Done, String> {
        let mut work = ibv_send_wr {
            opcode: match immediate {
                Some(_) => IBV_WR_RDMA_WRITE_WITH_IMM,
                None => IBV_WR_RDMA_WRITE,
            },
            ..Default::default()
        };
        work.__bindgen_anon_1.imm_data = immediate.unwrap_or(0).to_be();
        work.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: address,
            rkey: key,
        };
        self.post(bytes, work)?;
        self.sent()
    }

    /// Waits until what was posted is done.
    fn sent(&mut self) -> Result<Done, String> {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            // SAFETY: the identifier has its queues.
            let cq = unsafe { (*self.id.0).send_cq };
            match Self::poll(cq)? {
                Some(wc) if wc.status == IBV_WC_SUCCESS => return Ok(Done::Sent),
                Some(_) => return Ok(Done::Failed),
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        Err("a request that does not end".into())
    }

    fn poll(cq: *mut ibv_cq) -> Result<Option<ibv_wc>, String> {
        let mut wc = ibv_wc::default();
        // SAFETY: the queue is there, and there is room for one.
        let count = unsafe { (*(*cq).context).ops.poll_cq.ok_or("no poll_cq")?(cq, 1, &mut wc) };
        match count {
            0 => Ok(None),
            1 => Ok(Some(wc)),
            _ => Err("ibv_poll_cq".into()),
        }
    }

    /// What has arrived, if something has within `time`.
    pub fn next(&mut self, time: Duration) -> Result<Option<Done>, String> {
        let until = Instant::now() + time;
        loop {
            // SAFETY: the identifier has its queues.
            let cq = unsafe { (*self.id.0).recv_cq };
            if let Some(wc) = Self::poll(cq)? {
                if wc.status != IBV_WC_SUCCESS {
                    return Ok(Some(Done::Failed));
                }
                let slot = wc.wr_id as usize;
                let is_message = wc.opcode == IBV_WC_RECV;
                let from = slot * ROOM;
                let bytes = self.bytes[from..from + wc.byte_len.min(ROOM as u32) as usize].to_vec();
                self.receive(slot)?;
                return Ok(Some(match is_message {
                    true => Done::Received(bytes),
                    false => Done::Immediate,
                }));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the peer ends the connection within `time`.
    pub fn is_ended(&self, time: Duration) -> Result<bool, String> {
        let until = Instant::now() + time;
        while let Some(left) = until.checked_duration_since(Instant::now()) {
            match self.id.event(left)? {
                Some(RDMA_CM_EVENT_DISCONNECTED) => return Ok(true),
                Some(_) => {}
                None => break,
            }
        }
        Ok(false)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // The identifier's end tells the peer; `rdma_disconnect` would wait for an event that one which was refused never has.
        // SAFETY: with the queue pair goes whoever uses the region; it is not used after this.
        unsafe {
            rdma_destroy_qp(self.id.0);
            ibv_dereg_mr(self.memory);
        }
    }
}
