// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fabric process: unix sockets around the switch.

use clap::Parser;
use ferrite_fabric::closer;
use ferrite_fabric::connection::{overflow_user, Connection, Owner};
use ferrite_fabric::console;
use ferrite_fabric::control::Request;
use ferrite_fabric::descriptors::allow_descriptors;
use ferrite_fabric::fault::{is_roce, Faults, Scope};
use ferrite_fabric::framing::{Reader, STARVED};
use ferrite_fabric::outbox::{Outbox, Unread};
use ferrite_fabric::pcap::Pcap;
use ferrite_fabric::ring;
use ferrite_fabric::shortcut::{
    is_message, Action, Broker, Message, ShortcutId, GRANT_FDS, MAX_UNANSWERED,
};
use ferrite_fabric::socket::Listener;
use ferrite_fabric::switch::{share, Debts, Mac, Output, PortId, PortReport, Switch};
use ferrite_fabric::wake;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use serde::Serialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bytes that wait for a slow port before its frames are dropped, at most.
const PORT_QUEUE: usize = 16 * 1024 * 1024;
/// Connections that become ports before the ports have their turn, and those
/// that do not: they cost little.
const ACCEPTS_PER_TURN: usize = 256;
const REFUSALS_PER_TURN: usize = 1024;
/// Connections that are not closed yet, and beyond which none is accepted.
const MAX_CLOSING: usize = 64;
/// The least time between two lines about connections that were refused.
const REFUSALS_TOLD: Duration = Duration::from_secs(10);
/// One of so many ports is kept for who runs the fabric.
const KEPT_PORTS: usize = 16;
/// A control request is never longer.
const LINE_LIMIT: usize = 64 * 1024;
/// Socket buffer asked for, so that a burst passes in few system calls.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// Reads from one port before the others have their turn.
const READS_PER_TURN: usize = 4;
/// What is forwarded for one user before the others have their turn, in bytes of
/// all copies, each with what it costs whatever its length. The ports of who runs
/// the fabric have as much each.
const WORK_PER_TURN: u64 = 2 * 1024 * 1024;
/// The same for all other users together, since somebody may have many numbers,
/// and for all that was held back. One frame to all ports is more than a turn of
/// one among many: then those have their turn that are next, and the others later.
const WORK_OF_OTHERS: u64 = 8 * 1024 * 1024;
const WORK_PER_COPY: u64 = 64;
/// What a try to make a shortcut counts for.
const WORK_PER_GRANT: u64 = 64 * 1024;
/// Work after which what came of it is written, before there is more.
const WORK_PER_FLUSH: u64 = 4 * 1024 * 1024;
/// Grants that are sent and not read, of all: the kernel counts their descriptors
/// for the user who runs the fabric, and gives no process of that user any more
/// than so many. Half of these are for that user alone.
const MAX_UNREAD: usize = 256;
/// Of these, those of each other user and of each of its ports. Who reads them has
/// the next at once. Few are needed, since nothing makes others read theirs: one
/// port that hangs leaves its user some, and many users leave some to others.
const MAX_UNREAD_PER_USER: usize = 4;
const MAX_UNREAD_PER_PORT: usize = 1;
/// How long a grant may lie unread in a port's socket, in nanoseconds.
const UNREAD: u64 = 10_000_000_000;
/// Descriptors for everything but ports and shortcuts: control connections, and
/// connections that are not closed yet.
const OTHER_FDS: usize = 128;
/// How long connections wait when there are no descriptors for them.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Control connections at a time.
const CLIENT_LIMIT: usize = 64;
/// Who the switch is where it speaks itself.
const OWN_ADDRESS: Mac = Mac([0x02, 0xfe, 0, 0, 0, 0]);

/// Tells the operator something. Each kind of line has a limit of its own, so
/// that nobody can suppress one with another.
macro_rules! notice {
    ($($text:tt)*) => {{
        static NOTICES: console::Notices = console::Notices::new();
        NOTICES.tell("ferrite-fabric", format_args!($($text)*));
    }};
}

/// A learning Ethernet switch over unix stream sockets, with faults and capture.
///
/// Every connection to --listen is a port. Frames go behind their length, four
/// bytes big-endian, as QEMU's `-netdev stream` writes them, so that
/// ferrite-device (--uplink) and plain VMs attach alike:
/// `-netdev stream,id=n0,addr.type=unix,addr.path=SOCK,server=off`.
#[derive(Parser)]
#[command(version, name = "ferrite-fabric")]
struct Options {
    /// Unix socket on which ports connect
    #[arg(long, value_name = "SOCKET")]
    listen: PathBuf,
    /// Unix socket for control: JSON lines such as {"cmd":"stats"}
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Capture what is forwarded, after the faults, into this file
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Seed of all faults: the same seed gives the same faults
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Probability from 0 to 1 that a frame is lost
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    loss: f64,
    /// Delay of every frame in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0.0)]
    delay: f64,
    /// Probability that a frame is overtaken by up to four later ones
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    reorder: f64,
    /// Probability that a frame arrives twice
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    duplicate: f64,
    /// Probability that one bit of a frame is flipped
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    corrupt: f64,
    /// Bits per second that each port may send; 0 is unlimited
    #[arg(long, value_name = "BITS", default_value_t = 0)]
    rate: u64,
    /// Apply the faults to RoCEv2 frames only and spare ARP, TCP and the rest
    #[arg(long)]
    roce_only: bool,
    /// Let no frame pass the switch by: without it, devices on this host that
    /// send RoCEv2 frames to each other share memory for that while there is no
    /// capture, fault or partition
    #[arg(long)]
    no_shortcuts: bool,
    /// Let every port send from every Ethernet address: without it the address
    /// of a device is its own, and it sends from no other unless it was started
    /// with the same option
    #[arg(long)]
    any_source_mac: bool,
    /// Ports at most
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_ports: usize,
    /// Ports at most of each user other than the one who runs the fabric
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_ports_per_user: usize,
    /// Frames that wait for ports that do not read, of all ports together, in
    /// MiB: the more wait, the fewer may wait for each. As many again may be
    /// held back by --delay and --rate
    #[arg(long, value_name = "MIB", default_value_t = 256)]
    queue_memory: usize,
}

struct Port {
    stream: Connection,
    reader: Reader,
    outbox: Outbox,
    /// Whether it is a device's, once that is known.
    device: Option<bool>,
    /// What went past the switch, by shortcuts that are gone.
    past: Traffic,
    /// Its turn ended before all was read from it.
    more: bool,
    gone: bool,
}

impl Port {
    fn user(&self) -> Option<u32> {
        self.stream.user()
    }
}

/// A port that is gone, and has not read all grants that it was sent: their
/// descriptors are under way until it does, or lets go of its end.
struct Left {
    stream: Connection,
    user: Option<u32>,
    unread: Unread,
}

impl Left {
    /// What is left of a port; `None` if that is nothing.
    fn new(port: Port) -> Option<Self> {
        let user = port.user();
        let mut left = Self {
            stream: port.stream,
            user,
            unread: port.outbox.into_unread(),
        };
        // It is told at once all the same.
        let _ = left.stream.stream().shutdown(Shutdown::Both);
        left.is_there().then_some(left)
    }

    /// Whether it still has grants to read. Without an answer it has.
    fn is_there(&mut self) -> bool {
        let _ = self.unread.look(self.stream.stream());
        self.unread.grants() > 0
    }
}

/// What a port exchanged with others past the switch, as the devices say.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Traffic {
    rx_frames: u64,
    rx_bytes: u64,
    tx_frames: u64,
    tx_bytes: u64,
}

impl Traffic {
    /// Adds a shortcut: frames and bytes from the port, and to it.
    fn add(&mut self, from: (u64, u64), to: (u64, u64)) {
        self.rx_frames = self.rx_frames.wrapping_add(from.0);
        self.rx_bytes = self.rx_bytes.wrapping_add(from.1);
        self.tx_frames = self.tx_frames.wrapping_add(to.0);
        self.tx_bytes = self.tx_bytes.wrapping_add(to.1);
    }
}

/// The rings of a shortcut and the ports at its ends.
struct Rings {
    memory: OwnedFd,
    ends: [PortId; 2],
}

/// Everything that frames leave through.
#[derive(Default)]
struct Ports {
    ports: BTreeMap<PortId, Port>,
    /// Never more than there may be grants unread.
    left: Vec<Left>,
    /// Bytes that wait for all ports together, and how many may.
    queued: usize,
    queue_memory: usize,
    /// What all forwarding has cost; see [`WORK_PER_TURN`].
    work: u64,
    /// How much of it there was when something was written.
    flushed_at: u64,
    pcap: Option<Pcap<BufWriter<File>>>,
    broker: Broker,
    rings: BTreeMap<ShortcutId, Rings>,
    /// Descriptors that shortcuts may take.
    shortcut_fds: usize,
    /// Grants that may be unread; see [`MAX_UNREAD`].
    max_unread: usize,
    no_shortcuts: bool,
    own_uid: u32,
}

/// What it costs to take, to forward or to send a frame.
fn cost(frame: &[u8]) -> u64 {
    WORK_PER_COPY + frame.len() as u64
}

impl Output for Ports {
    fn send(&mut self, port: PortId, frame: &[u8]) -> bool {
        self.work += cost(frame);
        let limit = share(self.queue_memory, self.queued);
        let Some(port) = self.ports.get_mut(&port) else {
            return false;
        };
        let before = port.outbox.len();
        let taken = port.outbox.push_within(frame, limit);
        self.queued += port.outbox.len() - before;
        taken
    }

    fn work(&self) -> u64 {
        self.work
    }

    fn share(&self, turns: usize) -> u64 {
        let turns = u64::try_from(turns).unwrap_or(u64::MAX).max(1);
        WORK_PER_TURN.min(WORK_OF_OTHERS / turns).max(1)
    }

    fn most(&self) -> u64 {
        WORK_OF_OTHERS
    }

    fn capture(&mut self, frame: &[u8]) {
        // Also for one that goes nowhere.
        self.work += cost(frame);
        if let Some(pcap) = &mut self.pcap {
            let time = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |time| time.as_nanos() as u64);
            if let Err(error) = pcap.record(time, frame) {
                notice!("the capture ends: {error}");
                self.pcap = None;
            }
        }
    }
}

impl Ports {
    /// Makes a connection a port.
    fn attach(&mut self, stream: Connection, switch: &mut Switch) -> PortId {
        // A smaller buffer only costs system calls.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SOCKET_BUFFER);
        let id = switch.attach();
        let user = stream.user();
        self.broker.attach(id, user);
        if let Some(user) = user {
            switch.set_user(id, user);
        }
        let port = Port {
            stream,
            reader: Reader::new(),
            outbox: Outbox::new(PORT_QUEUE),
            device: None,
            past: Traffic::default(),
            more: false,
            gone: false,
        };
        self.ports.insert(id, port);
        id
    }

    fn capture_to(&mut self, path: &Path) -> Result<(), String> {
        let named =
            |error: io::Error| format!("{}: cannot write the capture: {error}", path.display());
        let file = File::create(path).map_err(named)?;
        let mut pcap = Pcap::new(BufWriter::with_capacity(1 << 18, file)).map_err(named)?;
        // The file is readable from the first moment.
        pcap.flush().map_err(named)?;
        self.pcap = Some(pcap);
        Ok(())
    }

    /// Lets frames pass the switch by only while nobody would miss them there.
    /// Whether there was something to do.
    fn follow(&mut self, switch: &mut Switch, now: u64) -> bool {
        let plain = switch.is_plain() && self.pcap.is_none() && !self.no_shortcuts;
        self.broker.allow(plain, now);
        if switch.take_moved() {
            self.broker.moved(|address| switch.port_of(address), now);
        }
        self.act(now)
    }

    /// Does what the broker wants; `false` if that was nothing.
    fn act(&mut self, now: u64) -> bool {
        let actions = self.broker.actions();
        let any = !actions.is_empty();
        for action in actions {
            match action {
                Action::Grant(id) => {
                    self.work += WORK_PER_GRANT;
                    if !self.may_grant(id) {
                        self.broker.refused(id, now);
                    } else if let Err(error) = self.grant(id) {
                        notice!("no shortcut for two ports: {error}");
                        self.broker.failed(id, now);
                    }
                }
                Action::Tell(port, message) => {
                    if let Some(port) = self.ports.get_mut(&port) {
                        let before = port.outbox.len();
                        let frame = message.to_frame(OWN_ADDRESS);
                        let taken = match message {
                            Message::Revoke(id) => port.outbox.push_urgent(&frame, id),
                            Message::Close(id) => port.outbox.push_request(&frame, id),
                            _ => port.outbox.push_message(&frame),
                        };
                        port.gone |= !taken;
                        self.queued += port.outbox.len() - before;
                    }
                }
                Action::CutOff(id) => {
                    // Many of its shortcuts may say so.
                    if let Some(port) = self.ports.get_mut(&id).filter(|port| !port.gone) {
                        notice!("port {id} is cut off: no answer");
                        port.gone = true;
                    }
                }
                Action::Forget(id) => {
                    if let Some(rings) = self.rings.remove(&id) {
                        let traffic = ring::traffic(&rings.memory).unwrap_or_default();
                        for (side, end) in rings.ends.iter().enumerate() {
                            if let Some(port) = self.ports.get_mut(end) {
                                port.past.add(traffic[side], traffic[1 - side]);
                            }
                        }
                    }
                }
            }
        }
        any
    }

    /// Whether the ends of a shortcut have read enough of the grants that they
    /// and others of their users got, those included that are left where a port
    /// was.
    fn may_grant(&self, id: ShortcutId) -> bool {
        let Some(ends) = self.broker.ends(id) else {
            return false;
        };
        let own = Some(self.own_uid);
        let mut of_users: BTreeMap<Option<u32>, usize> = BTreeMap::new();
        for port in self.ports.values() {
            *of_users.entry(port.user()).or_default() += port.outbox.unread_grants();
        }
        for left in &self.left {
            *of_users.entry(left.user).or_default() += left.unread.grants();
        }
        // With the two that it would be.
        for (end, _) in &ends {
            let Some(port) = self.ports.get(end) else {
                return false;
            };
            let most = match port.user() {
                user if user == own => MAX_UNANSWERED,
                _ => MAX_UNREAD_PER_PORT,
            };
            if port.outbox.unread_grants() >= most {
                return false;
            }
            *of_users.entry(port.user()).or_default() += 1;
        }
        let all: usize = of_users.values().sum();
        let others = all - of_users.get(&own).copied().unwrap_or(0);
        let is_full = |(end, _): &(PortId, Mac)| {
            let user = self.ports.get(end).and_then(Port::user);
            let unread = of_users.get(&user).copied().unwrap_or(0);
            let most = match user {
                Some(_) => MAX_UNREAD_PER_USER,
                // These may be anybody's, and are no more together than half of
                // those of others.
                None => self.max_unread / 4,
            };
            user != own && (unread > most || others > self.max_unread / 2)
        };
        all <= self.max_unread && !ends.iter().any(is_full)
    }

    /// Makes the rings of a shortcut and hands them to both ends.
    fn grant(&mut self, id: ShortcutId) -> io::Result<()> {
        let ends = self.broker.ends(id).ok_or(io::ErrorKind::NotFound)?;
        let unsent: usize = self.ports.values().map(|port| port.outbox.grants()).sum();
        let taken = self.rings.len() + GRANT_FDS * unsent;
        if taken + 1 + 2 * GRANT_FDS > self.shortcut_fds {
            return Err(io::Error::other("too many descriptors (RLIMIT_NOFILE)"));
        }
        let memory = ring::create()?;
        // Each gets its end alone: nobody else has that open file.
        let [a, b] = wake::pair()?;
        let descriptors = [[memory.try_clone()?, a], [memory.try_clone()?, b]];
        for (side, fds) in descriptors.into_iter().enumerate() {
            if let Some(port) = self.ports.get_mut(&ends[side].0) {
                let message = Message::Grant {
                    shortcut: id,
                    side: side as u8,
                    peer: ends[1 - side].1,
                };
                let before = port.outbox.len();
                port.outbox
                    .push_grant(&message.to_frame(OWN_ADDRESS), id, fds);
                self.queued += port.outbox.len() - before;
            }
        }
        let ends = ends.map(|(port, _)| port);
        self.rings.insert(id, Rings { memory, ends });
        Ok(())
    }

    /// Writes what waits for the ports, as far as they take it.
    fn flush(&mut self, now: u64) {
        self.flushed_at = self.work;
        for (id, port) in &mut self.ports {
            if port.gone {
                continue;
            }
            // Without an answer it counts for unread.
            let _ = port.outbox.look(port.stream.stream());
            let unread = port.outbox.unread_since();
            if unread.is_some_and(|since| now.saturating_sub(since) >= UNREAD) {
                notice!("port {id} is cut off: it does not read its grants");
                port.gone = true;
                continue;
            }
            if port.outbox.is_empty() {
                continue;
            }
            let before = port.outbox.len();
            let mut lost = Vec::new();
            if let Err(error) = port.outbox.flush(port.stream.stream(), now, &mut lost) {
                if error.kind() != io::ErrorKind::BrokenPipe {
                    notice!("port {id}: {error}");
                }
                port.gone = true;
            }
            self.queued -= before - port.outbox.len();
            for shortcut in lost {
                self.broker.not_granted(shortcut, *id, now);
            }
        }
    }

    /// The time of those begins who have been asked for something.
    fn told(&mut self, now: u64) {
        let ports = &self.ports;
        self.broker.told(now, |port, shortcut| {
            let outbox = &ports.get(&port)?.outbox;
            outbox.has_request(shortcut).then(|| outbox.position())
        });
    }

    /// When the next port is given up that does not read its grants.
    fn next_timeout(&self) -> Option<u64> {
        let unread = self.ports.values().map(|port| port.outbox.unread_since());
        unread.flatten().min().map(|since| since + UNREAD)
    }

    /// Removes the ports that are gone; `false` if none is.
    fn remove_gone(&mut self, switch: &mut Switch, now: u64) -> bool {
        let gone = self.ports.iter().filter(|(_, port)| port.gone);
        let gone: Vec<PortId> = gone.map(|(id, _)| *id).collect();
        for id in &gone {
            if let Some(port) = self.ports.remove(id) {
                switch.detach(*id, now);
                self.broker.detach(*id, now);
                self.queued -= port.outbox.len();
                let user = port.user();
                match Left::new(port) {
                    Some(left) => self.left.push(left),
                    None => vacate(switch, user),
                }
            }
        }
        !gone.is_empty()
    }

    /// Forgets those that have read their grants, or are really gone. Until then
    /// they have their places themselves.
    fn look_left(&mut self, switch: &mut Switch) {
        self.left.retain_mut(|left| {
            let is_there = left.is_there();
            if !is_there {
                vacate(switch, left.user);
            }
            is_there
        });
    }

    /// Ends a turn: all that came of it is written before anybody waits.
    fn settle(&mut self, switch: &mut Switch, now: u64) {
        loop {
            self.look_left(switch);
            self.flush(now);
            let gone = self.remove_gone(switch, now);
            // Who is told something may be gone for it in turn.
            if !self.follow(switch, now) && !gone {
                break;
            }
        }
    }

    /// Whose each port is, those that are left included: they have a descriptor.
    fn users(&self) -> impl Iterator<Item = Option<u32>> + '_ {
        let left = self.left.iter().map(|left| left.user);
        self.ports.values().map(Port::user).chain(left)
    }

    /// Ports of each user; those of whom nobody knows whose are one user's.
    fn owned(&self) -> BTreeMap<Option<u32>, usize> {
        let mut owned = BTreeMap::new();
        for user in self.users() {
            *owned.entry(user).or_default() += 1;
        }
        owned
    }

    /// What each port exchanged with others past the switch.
    fn past(&self) -> BTreeMap<PortId, Traffic> {
        let mut past: BTreeMap<PortId, Traffic> = self
            .ports
            .iter()
            .map(|(id, port)| (*id, port.past))
            .collect();
        for rings in self.rings.values() {
            let now = ring::traffic(&rings.memory).unwrap_or_default();
            for (side, end) in rings.ends.iter().enumerate() {
                if let Some(traffic) = past.get_mut(end) {
                    traffic.add(now[side], now[1 - side]);
                }
            }
        }
        past
    }

    fn flush_capture(&mut self) {
        if let Some(pcap) = &mut self.pcap {
            if let Err(error) = pcap.flush() {
                notice!("the capture ends: {error}");
                self.pcap = None;
            }
        }
    }
}

/// Nothing is left of a port of a user, if that is known.
fn vacate(switch: &mut Switch, user: Option<u32>) {
    if let Some(user) = user {
        switch.vacate(user);
    }
}

struct ControlClient {
    stream: Connection,
    pending: Vec<u8>,
    /// The answer to its last request, which is given when that is in force.
    answer: Option<String>,
    /// What is left of answers that are given: it does not take them at once.
    output: Vec<u8>,
    /// It asks for nothing more.
    end: bool,
    gone: bool,
}

impl ControlClient {
    fn new(stream: Connection) -> Self {
        Self {
            stream,
            pending: Vec::new(),
            answer: None,
            output: Vec::new(),
            end: false,
            gone: false,
        }
    }

    /// Writes what it takes; `true` when nothing is left.
    fn write(&mut self) -> bool {
        while !self.output.is_empty() && !self.gone {
            match self.stream.write(&self.output) {
                Ok(count) if count > 0 => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                _ => self.gone = true,
            }
        }
        self.output.is_empty() && !self.gone
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::line(format_args!("ferrite-fabric: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let faults = Faults {
        loss: options.loss,
        duplicate: options.duplicate,
        corrupt: options.corrupt,
        reorder: options.reorder,
        delay: options.delay,
        rate: options.rate,
        only: if options.roce_only {
            Scope::Roce
        } else {
            Scope::All
        },
    };
    faults.check()?;
    let mut ports = Ports {
        no_shortcuts: options.no_shortcuts,
        queue_memory: options.queue_memory.saturating_mul(1024 * 1024),
        own_uid: rustix::process::getuid().as_raw(),
        ..Ports::default()
    };
    if let Some(path) = &options.pcap {
        ports.capture_to(path)?;
    }
    // A port takes one, and a shortcut another.
    let descriptors = allow_descriptors();
    // The others are for ports, whatever becomes of shortcuts.
    ports.shortcut_fds = descriptors / 4;
    // Half of what the kernel lets this user have under way.
    ports.max_unread = MAX_UNREAD.min(descriptors / (2 * GRANT_FDS));
    ports.broker.limit(ports.own_uid, ports.shortcut_fds / 4);
    let bind = |path: &PathBuf| Listener::bind(path)?.without_descriptors();
    let control = options.control.as_ref().map(bind).transpose()?;
    let listener = bind(&options.listen)?;
    // Signals arrive as bytes, so that one poll waits for everything and the
    // capture and socket files are left in order.
    let (signals, signal_end) = UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, signal_end.try_clone()?)?;
    }
    let mut switch = Switch::new(options.seed, faults);
    switch.limit_memory(ports.queue_memory);
    switch.set_owner(ports.own_uid);
    if options.any_source_mac {
        switch.allow_any_source();
    }
    if let Some(uid) = overflow_user() {
        notice!(
            "users who have no number in this user namespace all have {uid} here: nobody can \
             tell whose a port of theirs is, and an address is not kept for them"
        );
    }
    let mut clients: Vec<ControlClient> = Vec::new();
    let mut crowd = Crowd::default();
    let mut turns = Turns::default();
    let mut door = Door::new(options, ports.own_uid, descriptors);
    switch.limit_ports(door.max_ports);
    if door.max_ports < options.max_ports {
        notice!(
            "no more than {} ports: there are {descriptors} descriptors (RLIMIT_NOFILE)",
            door.max_ports
        );
    }
    // Until when nobody can connect, since there are no descriptors left.
    let mut full_until: Option<Instant> = None;
    let mut control_full_until: Option<Instant> = None;
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;

    loop {
        let due = [
            switch.next_timeout(),
            switch.next_expiry(),
            ports.broker.next_timeout(),
            ports.next_timeout(),
        ];
        // What has come by this time is read before anybody is given up.
        let turn = now();
        for until in [&mut full_until, &mut control_full_until] {
            *until = until.filter(|until| *until > Instant::now());
        }
        let more = ports.ports.values().any(|port| port.more);
        let starved = ports.ports.values().any(|port| port.outbox.is_starved());
        let timeout = due
            .into_iter()
            .flatten()
            .min()
            .map(|due| Duration::from_nanos(due.saturating_sub(now())))
            .into_iter()
            .chain(
                [full_until, control_full_until]
                    .into_iter()
                    .flatten()
                    .map(|until| until.saturating_duration_since(Instant::now())),
            )
            .chain(more.then_some(Duration::ZERO))
            .chain(starved.then_some(STARVED))
            .min();
        if timeout.is_none_or(|timeout| !timeout.is_zero()) {
            ports.flush_capture();
        }
        let ready = wait(
            &signals,
            &listener,
            control.as_ref(),
            &ports,
            &clients,
            [full_until.is_none(), control_full_until.is_none()],
            timeout,
        )?;
        if ready.signal {
            return Ok(());
        }
        let mut queue = match full_until {
            Some(_) => Queue::Stuck,
            None => Queue::Empty,
        };
        if ready.listener {
            let mut taken = Taken::new(&mut ports, &mut switch);
            queue = accept(&listener, MAX_CLOSING, |stream| {
                if stream.is_over() || !door.admits(&stream, &mut taken) {
                    return false;
                }
                ports.attach(stream, &mut switch);
                true
            });
            if queue == Queue::Stuck {
                full_until = Some(Instant::now() + ACCEPT_AGAIN);
            }
        }
        if let (true, Some(control)) = (ready.control, &control) {
            // Whoever fills the ports does not keep the operator out.
            let queue = accept(control, 2 * MAX_CLOSING, |stream| {
                let room = clients.len() < CLIENT_LIMIT;
                if room {
                    clients.push(ControlClient::new(stream));
                }
                room
            });
            if queue == Queue::Stuck {
                control_full_until = Some(Instant::now() + ACCEPT_AGAIN);
            }
        }
        turns.take(&ready.readable, &mut switch, &mut ports, &now);
        crowd.look(queue, now(), &mut switch);
        switch.expire(now());
        switch.poll(now(), &mut ports);
        turns.give_up(turn, &mut switch, &mut ports, now());
        ports.follow(&mut switch, now());
        for (index, hung_up) in ready.clients {
            if let Some(client) = clients.get_mut(index) {
                listen(client);
                serve(client, &mut switch, &mut ports, now());
                client.gone |= hung_up;
            }
        }
        // Last, since there may be no other event after what they wait for.
        loop {
            ports.settle(&mut switch, now());
            let settled = ports.broker.settled();
            let due = |client: &&mut ControlClient| {
                settled && client.answer.is_some() && client.output.is_empty() && !client.gone
            };
            let Some(client) = clients.iter_mut().find(due) else {
                break;
            };
            serve(client, &mut switch, &mut ports, now());
        }
        ports.told(now());
        clients.retain(|client| !client.gone);
    }
}

/// What woke the loop.
#[derive(Default)]
struct Ready {
    signal: bool,
    listener: bool,
    control: bool,
    readable: Vec<PortId>,
    /// Some control connections, and whether nobody is at the other end any more.
    clients: Vec<(usize, bool)>,
}

fn wait(
    signals: &UnixStream,
    listener: &Listener,
    control: Option<&Listener>,
    ports: &Ports,
    clients: &[ControlClient],
    accepting: [bool; 2],
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let interest = |flag: PollFlags, wanted: bool| {
        if wanted {
            flag
        } else {
            PollFlags::empty()
        }
    };
    let [connections, controls] = accepting.map(|wanted| interest(PollFlags::IN, wanted));
    let mut fds = vec![
        PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(listener.get().as_fd(), connections),
    ];
    if let Some(control) = control {
        fds.push(PollFd::from_borrowed_fd(control.get().as_fd(), controls));
    }
    let first_client = fds.len();
    for client in clients {
        let interest = interest(PollFlags::IN, !client.end)
            | interest(PollFlags::OUT, !client.output.is_empty());
        fds.push(PollFd::from_borrowed_fd(client.stream.as_fd(), interest));
    }
    let first_port = fds.len();
    for port in ports.ports.values() {
        let waits = !port.outbox.is_empty() && !port.outbox.is_starved();
        let interest = PollFlags::IN | interest(PollFlags::OUT, waits);
        fds.push(PollFd::from_borrowed_fd(port.stream.as_fd(), interest));
    }
    let timeout = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
        Err(error) => return Err(error.into()),
    }
    let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
    let is_ready = |fd: &PollFd<'_>| fd.revents().intersects(readable);
    Ok(Ready {
        signal: is_ready(&fds[0]),
        listener: is_ready(&fds[1]),
        control: control.is_some() && is_ready(&fds[2]),
        clients: (first_client..first_port)
            .filter(|index| !fds[*index].revents().is_empty())
            .map(|index| {
                let closed = PollFlags::HUP | PollFlags::ERR;
                let hung_up = fds[index].revents().intersects(closed);
                (index - first_client, hung_up)
            })
            .collect(),
        readable: ports
            .ports
            .iter()
            .zip(&fds[first_port..])
            .filter(|((_, port), fd)| port.more || is_ready(fd))
            .map(|((id, _), _)| *id)
            .collect(),
    })
}

/// Who waits to be accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    /// Nobody does.
    Empty,
    /// Some do until the next turn.
    More,
    /// Some do for a while: there are no descriptors for them, say.
    Stuck,
}

/// Accepts some connections, each of which `takes` has some use for or drops;
/// the others are stuck if `closing` are not closed yet. Whoever connects must
/// not end the switch for all.
fn accept(listener: &Listener, closing: usize, mut takes: impl FnMut(Connection) -> bool) -> Queue {
    let (mut taken, mut dropped) = (0, 0);
    while taken < ACCEPTS_PER_TURN && dropped < REFUSALS_PER_TURN {
        if closer::pending() >= closing {
            return Queue::Stuck;
        }
        match listener.accept() {
            Ok(connection) => {
                if takes(connection) {
                    taken += 1;
                } else {
                    dropped += 1;
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => return Queue::Empty,
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => dropped += 1,
                _ => return Queue::Stuck,
            },
        }
    }
    Queue::More
}

/// Since when there have been some who waited to be accepted, and how.
#[derive(Default)]
struct Crowd(Option<(u64, Queue)>);

impl Crowd {
    /// The time does not count in which who owns an address could not connect
    /// for it: others would only have to fill the queue.
    fn look(&mut self, queue: Queue, now: u64, switch: &mut Switch) {
        if let Some((since, queue)) = self.0 {
            switch.keep_longer(now - since, queue == Queue::More);
        }
        self.0 = (queue != Queue::Empty).then_some((now, queue));
    }
}

/// Ports that are there, by users, and those that are left for some.
struct Taken {
    owned: BTreeMap<Option<u32>, usize>,
    places: BTreeMap<u32, usize>,
}

impl Taken {
    fn new(ports: &mut Ports, switch: &mut Switch) -> Self {
        // Who has let go of such a port may have another.
        ports.look_left(switch);
        Self {
            owned: ports.owned(),
            places: switch.places(),
        }
    }
}

/// Who may have a port.
struct Door {
    max_ports: usize,
    max_ports_per_user: usize,
    own_uid: u32,
    /// Refusals since the last line about them, and when that was.
    refused: u64,
    told: Option<Instant>,
}

impl Door {
    fn new(options: &Options, own_uid: u32, descriptors: usize) -> Self {
        // A port that is admitted finds a descriptor, and so does the operator.
        let others = OTHER_FDS.min(descriptors / 4) + descriptors / 4;
        Self {
            max_ports: options.max_ports.min(descriptors - others),
            max_ports_per_user: options.max_ports_per_user,
            own_uid,
            refused: 0,
            told: None,
        }
    }

    /// Whether one more port may be there beside those that users own, and those
    /// that are left for others to come back to, for who has connected. Of what
    /// nobody has who runs the fabric may have all, who could end it as well.
    fn admits(&mut self, stream: &Connection, taken: &mut Taken) -> bool {
        let (user, own) = (stream.user(), Some(self.own_uid));
        let of = |user: Option<u32>| taken.owned.get(&user).copied().unwrap_or(0);
        let all: usize = taken.owned.values().sum();
        let (mut places, mut of_others) = (0, 0);
        for (of, count) in &taken.places {
            if Some(*of) != user {
                places += count;
                of_others += if Some(*of) == own { 0 } else { *count };
            }
        }
        let others = all - of(own) + of_others;
        let kept = self.max_ports / KEPT_PORTS;
        let crowded = user != own && of(user) >= self.max_ports_per_user;
        let is_kept = user != own && others >= self.max_ports - kept;
        if !crowded && !is_kept && all + places < self.max_ports {
            *taken.owned.entry(user).or_default() += 1;
            if let Some(places) = user.and_then(|user| taken.places.get_mut(&user)) {
                *places = places.saturating_sub(1);
            }
            return true;
        }
        self.refused += 1;
        if self.told.is_none_or(|told| told.elapsed() >= REFUSALS_TOLD) {
            let limit = if crowded {
                format!(
                    "{} has {} ports (--max-ports-per-user)",
                    Said(stream.owner()),
                    self.max_ports_per_user
                )
            } else if is_kept {
                format!(
                    "others have {others} ports, {of_others} of which they are to come back \
                     to, and {kept} are kept (--max-ports)"
                )
            } else {
                format!(
                    "there are {all} ports, and {places} that others are to come back to \
                     (--max-ports)"
                )
            };
            let count = std::mem::take(&mut self.refused);
            notice!("{count} connections refused: {limit}");
            self.told = Some(Instant::now());
        }
        false
    }
}

/// Somebody's owner, in words.
struct Said(Option<Owner>);

impl Said {
    fn user(&self) -> Option<u32> {
        self.0.and_then(|owner| owner.user())
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.user() {
            Some(uid) => write!(f, "user {uid}")?,
            None => write!(f, "somebody")?,
        }
        match self.0.and_then(|owner| owner.pid) {
            Some(pid) => write!(f, " (process {pid})"),
            None => Ok(()),
        }
    }
}

/// Who is read from, and how much, before the others have their turn.
#[derive(Default)]
struct Turns {
    /// The port of each user that was last read from.
    last: BTreeMap<Option<u32>, PortId>,
    /// Who is next, where not all had their turn.
    next: Option<Option<u32>>,
    /// What users have had beyond their turns, and ports of who runs the fabric.
    debts: Debts<Option<u32>>,
    own_debts: Debts<PortId>,
}

impl Turns {
    /// Reads from ports, as much of all ports of a user as of one: else a user
    /// with many would leave little to others. The more users, the less of each.
    /// Who runs the fabric leaves others what they need or does not, by other
    /// means too.
    fn take(
        &mut self,
        readable: &[PortId],
        switch: &mut Switch,
        ports: &mut Ports,
        now: &impl Fn() -> u64,
    ) {
        let mut users: BTreeMap<Option<u32>, Vec<PortId>> = BTreeMap::new();
        for id in readable {
            if let Some(port) = ports.ports.get(id) {
                users.entry(port.user()).or_default().push(*id);
            }
        }
        self.last.retain(|user, _| users.contains_key(user));
        let share = ports.share(users.len());
        let own = users.remove(&Some(ports.own_uid));
        let own: Vec<(PortId, u64)> = own
            .into_iter()
            .flatten()
            .map(|id| (id, self.own_debts.left(&id, WORK_PER_TURN)))
            .collect();
        self.own_debts.pass(WORK_PER_TURN);
        for (id, left) in own {
            let over = read_ports([id], left, switch, ports, now).1;
            self.own_debts.add(id, over);
        }
        let mut users: Vec<_> = users
            .into_iter()
            .map(|(user, of_user)| (user, of_user, self.debts.left(&user, share)))
            .collect();
        self.debts.pass(share);
        if let Some(next) = self.next.take() {
            let first = users.partition_point(|(user, ..)| *user < next);
            users.rotate_left(first);
        }
        let start = ports.work;
        for (user, mut of_user, mut left) in users {
            if ports.work - start >= WORK_OF_OTHERS && left > 0 {
                self.next.get_or_insert(user);
                left = 0;
            }
            // They are in the order of their numbers.
            if let Some(last) = self.last.get(&user) {
                let first = of_user.partition_point(|id| id <= last);
                of_user.rotate_left(first);
            }
            let (last, over) = read_ports(of_user, left, switch, ports, now);
            if let Some(last) = last {
                self.last.insert(user, last);
            }
            self.debts.add(user, over);
        }
    }

    /// Gives up ports that had not answered by the time `turn`, and only those: the
    /// answers of others may lie unread because others had their turns. After some
    /// time they are looked for, at the expense of whose they are and of as many
    /// ports as make up a turn; who is next then waits for the next.
    fn give_up(&mut self, turn: u64, switch: &mut Switch, ports: &mut Ports, now: u64) {
        let mut searched = BTreeSet::new();
        let start = ports.work;
        for id in ports.broker.late(turn) {
            let Some(port) = ports.ports.get(&id).filter(|port| port.more) else {
                continue;
            };
            if ports.work - start >= WORK_OF_OTHERS {
                break;
            }
            let (user, before) = (port.user(), ports.work);
            search(id, switch, ports, now);
            let work = ports.work - before;
            if user == Some(ports.own_uid) {
                self.own_debts.add(id, work);
            } else {
                self.debts.add(user, work);
            }
            searched.insert(id);
        }
        let all = &ports.ports;
        ports.broker.poll(turn, |id| {
            let more = all.get(&id).is_some_and(|port| port.more);
            more && !searched.contains(&id)
        });
    }
}

/// Looks for messages in all that has come from a port by now. The frames before
/// them are lost: to forward them may take many turns.
fn search(id: PortId, switch: &mut Switch, ports: &mut Ports, now: u64) {
    let Some(mut port) = ports.ports.remove(&id) else {
        return;
    };
    // Without an answer there is nothing.
    let mut unread = rustix::io::ioctl_fionread(port.stream.stream()).unwrap_or(0);
    let mut lost = 0u64;
    let result = loop {
        match take_messages(id, &mut port, switch, ports, now) {
            Ok(count) => lost += count,
            Err(reason) => break Err(reason),
        }
        if unread == 0 {
            break Ok(());
        }
        match port.reader.fill(&mut port.stream) {
            Ok(count) if count > 0 => unread = unread.saturating_sub(count as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Whatever it is, the next turn finds it.
            _ => break Ok(()),
        }
    };
    match result {
        Ok(()) => notice!("port {id}: {lost} frames lost to come to its answer"),
        Err(reason) => {
            notice!("port {id} is cut off: {reason}");
            port.gone = true;
        }
    }
    ports.ports.insert(id, port);
    ports.act(now);
}

/// Takes all frames that are read from a port, and heeds the messages among them.
/// Returns how many others there were.
fn take_messages(
    id: PortId,
    port: &mut Port,
    switch: &mut Switch,
    ports: &mut Ports,
    now: u64,
) -> Result<u64, String> {
    let mut lost = 0;
    loop {
        let Some(frame) = port
            .reader
            .next_frame()
            .map_err(|error| error.to_string())?
        else {
            return Ok(lost);
        };
        ports.work += cost(frame);
        if is_message(frame) {
            let message = Message::parse(frame);
            heed(id, port, message, switch, ports, now)?;
        } else {
            lost += 1;
        }
    }
}

/// Reads from ports that have a turn together, with so much left of it. Returns
/// the last that was read from, and what was done beyond that.
fn read_ports(
    ids: impl IntoIterator<Item = PortId>,
    left: u64,
    switch: &mut Switch,
    ports: &mut Ports,
    now: &impl Fn() -> u64,
) -> (Option<PortId>, u64) {
    let until = ports.work + left;
    let mut last = None;
    for id in ids {
        if ports.work < until {
            read_port(id, until, switch, ports, now());
            last = Some(id);
        } else if let Some(port) = ports.ports.get_mut(&id) {
            port.more = true;
        }
        if ports.work - ports.flushed_at >= WORK_PER_FLUSH {
            ports.flush(now());
        }
    }
    (last, ports.work.saturating_sub(until))
}

fn read_port(id: PortId, until: u64, switch: &mut Switch, ports: &mut Ports, now: u64) {
    // The port is out of the map while its frames are forwarded: a frame never
    // goes back to the port that it came from.
    let Some(mut port) = ports.ports.remove(&id) else {
        return;
    };
    let mut reads = 0;
    port.more = loop {
        match take_frames(id, &mut port, until, switch, ports, now) {
            Ok(true) => {}
            Ok(false) => break true,
            Err(reason) => {
                notice!("port {id} is cut off: {reason}");
                port.gone = true;
                break false;
            }
        }
        if reads == READS_PER_TURN {
            break true;
        }
        reads += 1;
        match port.reader.fill(&mut port.stream) {
            Ok(0) => {
                port.gone = true;
                break false;
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break false,
            Err(error) => {
                if error.kind() != io::ErrorKind::ConnectionReset {
                    notice!("port {id}: {error}");
                }
                port.gone = true;
                break false;
            }
        }
    };
    ports.ports.insert(id, port);
    // Behind the frames that were just forwarded.
    ports.act(now);
}

/// Forwards the frames that are read from a port, until the work for all has
/// come to `until`: `false` if there are more then. An error is for what no
/// port of good faith does.
fn take_frames(
    id: PortId,
    port: &mut Port,
    until: u64,
    switch: &mut Switch,
    ports: &mut Ports,
    now: u64,
) -> Result<bool, String> {
    if port.device.is_none() {
        port.device = port.reader.take_mark();
        if port.device.is_none() {
            return Ok(true);
        }
    }
    while ports.work < until {
        let Some(frame) = port
            .reader
            .next_frame()
            .map_err(|error| error.to_string())?
        else {
            return Ok(true);
        };
        ports.work += cost(frame);
        if is_message(frame) {
            let message = Message::parse(frame);
            heed(id, port, message, switch, ports, now)?;
            continue;
        }
        switch.receive(id, frame, now, ports);
        if ports.broker.is_interested(id) && is_roce(frame) {
            let destination = frame.first_chunk().map(|mac| Mac(*mac));
            if let Some(destination) = destination {
                if let Some(to) = switch.port_of(&destination) {
                    let behind = |address: &Mac| switch.port_of(address);
                    ports.broker.seen(id, to, destination, behind, now);
                }
            }
        }
    }
    Ok(false)
}

/// A message came from a port; `None` if it made no sense.
fn heed(
    id: PortId,
    port: &Port,
    message: Option<(Mac, Message)>,
    switch: &mut Switch,
    ports: &mut Ports,
    now: u64,
) -> Result<(), String> {
    let Some((source, message)) = message else {
        return Ok(());
    };
    let device = port.device == Some(true);
    match message {
        Message::Hello { any_source } if device => {
            claim(id, port, source, any_source, switch, ports, Switch::claim);
        }
        Message::Address { any_source } if device => {
            let also = Switch::claim_also;
            claim(id, port, source, any_source, switch, ports, also);
        }
        Message::Ready(shortcut) | Message::Released(shortcut) | Message::Closed(shortcut)
            if port.outbox.has_grant(shortcut) =>
        {
            return Err("it answers what it has not read".into());
        }
        _ => {}
    }
    ports.broker.message(id, source, message, device, now);
    Ok(())
}

/// The device behind a port says which address it has.
fn claim(
    id: PortId,
    port: &Port,
    address: Mac,
    any_source: bool,
    switch: &mut Switch,
    ports: &Ports,
    say: fn(&mut Switch, PortId, Mac, bool) -> bool,
) {
    if !say(switch, id, address, any_source) {
        return;
    }
    let Some(holder) = switch.holder(&address).filter(|holder| *holder != id) else {
        return;
    };
    let has = ports
        .ports
        .get(&holder)
        .and_then(|port| port.stream.owner());
    let (wants, has) = (Said(port.stream.owner()), Said(has));
    // Those that a user makes up with its own ports are of another kind.
    static NOTICES: [console::Notices; 2] = [const { console::Notices::new() }; 2];
    let one = wants.user().is_some() && wants.user() == has.user();
    NOTICES[usize::from(one)].tell(
        "ferrite-fabric",
        format_args!(
            "port {id} of {wants} says that it has {address}, which port {holder} of {has} had \
             first: it gets no frames until that is gone"
        ),
    );
}

/// Reads requests from a control connection.
fn listen(client: &mut ControlClient) {
    let mut chunk = [0; 4096];
    loop {
        match client.stream.read(&mut chunk) {
            Ok(0) => {
                client.end = true;
                break;
            }
            Ok(count) => client.pending.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(_) => {
                client.gone = true;
                return;
            }
        }
        if client.pending.len() > LINE_LIMIT {
            client.gone = true;
            return;
        }
    }
}

/// Answers the requests of a control connection, each when it is in force.
fn serve(client: &mut ControlClient, switch: &mut Switch, ports: &mut Ports, now: u64) {
    loop {
        // The next when this has been taken.
        if !client.write() {
            return;
        }
        if client.answer.is_some() {
            if !ports.broker.settled() {
                return;
            }
            client.output = client.answer.take().unwrap_or_default().into_bytes();
            continue;
        }
        let Some(end) = client.pending.iter().position(|byte| *byte == b'\n') else {
            break;
        };
        let line: Vec<u8> = client.pending.drain(..=end).collect();
        if line.trim_ascii().is_empty() {
            continue;
        }
        let answer = serde_json::from_slice::<Request>(&line)
            .map_err(|error| format!("bad request: {error}"))
            .and_then(|request| handle(request, switch, ports))
            .unwrap_or_else(|error| json!({"ok": false, "error": error}));
        client.answer = Some(format!("{answer}\n"));
        ports.follow(switch, now);
    }
    client.gone |= client.end;
}

fn handle(
    request: Request,
    switch: &mut Switch,
    ports: &mut Ports,
) -> Result<serde_json::Value, String> {
    match request {
        Request::Faults(change) => {
            let faults = change.apply(switch.faults())?;
            switch.set_faults(faults);
            Ok(json!({"ok": true, "faults": faults}))
        }
        Request::Partition { a, b } => {
            switch.partition(a, b);
            Ok(json!({"ok": true}))
        }
        Request::Heal { a, b } => {
            switch.heal(a.as_ref(), b.as_ref());
            Ok(json!({"ok": true}))
        }
        Request::Pcap { file } => {
            ports.flush_capture();
            ports.capture_to(&file)?;
            Ok(json!({"ok": true}))
        }
        Request::PcapStop => {
            ports.flush_capture();
            ports.pcap = None;
            Ok(json!({"ok": true}))
        }
        Request::Shortcuts { on } => {
            ports.no_shortcuts = !on;
            Ok(json!({"ok": true}))
        }
        Request::Stats => {
            let past = ports.past();
            let report = |port: PortReport| {
                let id = port.port;
                let mut report = serde_json::to_value(port).unwrap_or_default();
                report["shortcuts"] = json!(past.get(&id).copied().unwrap_or_default());
                let owner = ports.ports.get(&id).and_then(|port| port.stream.owner());
                report["uid"] = json!(owner.and_then(|owner| owner.user()));
                report["pid"] = json!(owner.and_then(|owner| owner.pid));
                report
            };
            Ok(json!({
                "ok": true,
                "faults": switch.faults(),
                "ports": switch.report().into_iter().map(report).collect::<Vec<_>>(),
                "shortcuts": {
                    "allowed": ports.broker.allowed(),
                    "in_use": ports.broker.shortcuts().count(),
                },
            }))
        }
    }
}

#[cfg(test)]
#[path = "../tests/users/mod.rs"]
mod users;

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_fabric::descriptors;
    use ferrite_fabric::framing::Writer;
    use ferrite_fabric::socket::connect;

    #[test]
    fn those_who_only_come_and_go_make_nobody_wait_long() {
        let path = std::env::temp_dir().join(format!("ferrite-{}-crowd", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = Listener::bind(&path).unwrap();
        let listener = listener.without_descriptors().unwrap();
        let turns = 3;
        for _ in 0..turns * REFUSALS_PER_TURN {
            if connect(&path).is_err() {
                eprintln!("skipped: the queue is short (net.core.somaxconn)");
                return;
            }
        }
        let mut stay: Vec<OwnedFd> = vec![connect(&path).unwrap()];
        let mut taken = Vec::new();
        let turn = |taken: &mut Vec<Connection>| {
            accept(&listener, usize::MAX, |stream| {
                let over = stream.is_over();
                if !over {
                    taken.push(stream);
                }
                !over
            })
        };
        for _ in 0..turns {
            assert_eq!(turn(&mut taken), Queue::More);
        }
        assert_eq!(turn(&mut taken), Queue::Empty);
        assert_eq!(taken.len(), 1);
        // Of those that stay there are fewer in a turn.
        stay.extend((0..ACCEPTS_PER_TURN).map(|_| connect(&path).unwrap()));
        assert_eq!(turn(&mut taken), Queue::More);
        assert_eq!(turn(&mut taken), Queue::Empty);
        assert_eq!(taken.len(), stay.len());
        assert_eq!(accept(&listener, 0, |_| true), Queue::Stuck);
    }

    const OWNER: u32 = 30_000;

    /// A switch with so many ports of its owner that are silent, and one port each
    /// of some users, all of which send frames that go to all ports.
    struct Flooded {
        switch: Switch,
        ports: Ports,
        turns: Turns,
        users: Vec<(PortId, UnixStream)>,
        _silent: Vec<UnixStream>,
    }

    impl Flooded {
        const FRAME: usize = 16_000;

        /// `None` if other users are left out.
        fn new(silent: usize, users: std::ops::Range<u32>) -> Option<Self> {
            if !users::are_needed() {
                return None;
            }
            let mut switch = Switch::new(1, Faults::default());
            let mut ports = Ports {
                queue_memory: 64 << 20,
                own_uid: OWNER,
                ..Ports::default()
            };
            let mut attach = |user| {
                let (stream, end) = users::as_user(user, || UnixStream::pair().unwrap());
                end.set_nonblocking(true).unwrap();
                let stream = Connection::new(stream).unwrap();
                assert_eq!(stream.user(), Some(user));
                (ports.attach(stream, &mut switch), end)
            };
            let silent = (0..silent).map(|_| attach(OWNER).1).collect();
            let users = users.map(&mut attach).collect();
            Some(Self {
                switch,
                ports,
                turns: Turns::default(),
                users,
                _silent: silent,
            })
        }

        /// What a frame is that goes to all.
        fn work_per_frame(&self) -> u64 {
            let copies = self.ports.ports.len() as u64 - 1;
            (copies + 2) * (Self::FRAME as u64 + WORK_PER_COPY)
        }

        /// Lets the users send, and the switch read. Returns what it did.
        fn turn(&mut self) -> u64 {
            let mut frame = vec![0; Self::FRAME];
            frame[..6].fill(0xff);
            for (id, stream) in &self.users {
                frame[6..12].copy_from_slice(&[0x52, 0x54, 0, 0, 0, *id as u8]);
                let mut writer = Writer::new(1 << 20);
                for _ in 0..4 {
                    writer.push(&frame);
                }
                let mut bytes = Vec::new();
                writer.flush(&mut bytes).unwrap();
                // It is all read, and there is room.
                if descriptors::unread(stream).unwrap() == 0 {
                    (&mut &*stream).write_all(&bytes).unwrap();
                }
            }
            let before = self.ports.work;
            let ready: Vec<PortId> = self.users.iter().map(|(id, _)| *id).collect();
            let (switch, ports) = (&mut self.switch, &mut self.ports);
            self.turns.take(&ready, switch, ports, &|| 0);
            self.ports.work - before
        }

        /// Frames that came from each of the users.
        fn received(&self) -> Vec<u64> {
            let report = self.switch.report();
            let of = |id| report.iter().find(|port| port.port == id);
            let ids = self.users.iter().map(|(id, _)| *id);
            ids.map(|id| of(id).unwrap().counters.rx_frames).collect()
        }
    }

    #[test]
    fn what_a_user_has_beyond_its_turn_is_taken_off_the_next() {
        for user in [20_000, OWNER] {
            let Some(mut flooded) = Flooded::new(60, user..user + 1) else {
                return;
            };
            let frame = flooded.work_per_frame();
            assert!(frame < WORK_PER_TURN && WORK_PER_TURN % frame != 0);
            let turns = 20;
            let work: u64 = (0..turns).map(|_| flooded.turn()).sum();
            let most = turns * WORK_PER_TURN;
            assert!((most - frame..most + frame).contains(&work), "{work}");
        }
    }

    #[test]
    fn many_users_have_no_more_than_all_may_have_in_a_turn() {
        let users = 40;
        let Some(mut flooded) = Flooded::new(30, 20_000..20_000 + users) else {
            return;
        };
        let frame = flooded.work_per_frame();
        let (per_turn, users) = (WORK_OF_OTHERS.div_ceil(frame), u64::from(users));
        assert!(4 * per_turn < users);
        for turn in 1..=users.div_ceil(per_turn) {
            let work = flooded.turn();
            assert!(work < WORK_OF_OTHERS + frame, "{work}");
            // Each has its turn, and nobody a second before.
            let received = flooded.received();
            assert_eq!(
                received.iter().sum::<u64>(),
                users.min(turn * per_turn),
                "{received:?}"
            );
            assert!(received.iter().all(|count| *count <= 1), "{received:?}");
        }
    }

    #[test]
    fn an_answer_behind_frames_that_had_no_turn_is_in_time() {
        for answers in [true, false] {
            let mut switch = Switch::new(1, Faults::default());
            let mut ports = Ports {
                own_uid: OWNER,
                ..Ports::default()
            };
            let mut turns = Turns::default();
            let [own, peer] = [1, 2].map(|number| Mac([0x52, 0x54, 0, 0, 0, number]));
            let [(a, mut stream), (b, _other)] = [own, peer].map(|address| {
                let (stream, end) = UnixStream::pair().unwrap();
                let id = ports.attach(Connection::new(stream).unwrap(), &mut switch);
                let hello = Message::Hello { any_source: false };
                switch.claim(id, address, false);
                ports.broker.message(id, address, hello, true, 0);
                ports.ports.get_mut(&id).unwrap().device = Some(true);
                (id, end)
            });
            ports.broker.allow(true, 0);
            for _ in 0..4 {
                let behind = |address: &Mac| switch.port_of(address);
                ports.broker.seen(a, b, peer, behind, 0);
            }
            let [Action::Grant(id)] = ports.broker.actions()[..] else {
                panic!("no shortcut");
            };
            // The other leaves. This one answers at once, or sends frames alone, and
            // its user has no turn.
            ports.ports.get_mut(&b).unwrap().gone = true;
            ports.settle(&mut switch, 0);
            ports.told(0);
            let mut writer = Writer::new(1 << 20);
            for _ in 0..8 {
                let mut frame = vec![0; Flooded::FRAME];
                frame[6..12].copy_from_slice(&own.0);
                writer.push(&frame);
            }
            if answers {
                writer.push(&Message::Released(id).to_frame(own));
            }
            assert!(writer.flush(&mut stream).unwrap());
            let user = ports.ports[&a].user();
            turns.debts.add(user, u64::MAX / 2);
            for second in 0..20 {
                let now = second * SECOND;
                turns.take(&[a], &mut switch, &mut ports, &|| now);
                turns.give_up(now, &mut switch, &mut ports, now);
                ports.settle(&mut switch, now);
                // It is asked for the rest by then, and answers no more.
                let cut_off = !ports.ports.contains_key(&a);
                assert_eq!(cut_off, !answers && second >= 10, "after {second} s");
            }
            assert_eq!(ports.broker.shortcuts().count(), usize::from(answers));
        }
    }

    const SECOND: u64 = 1_000_000_000;

    /// A fabric of [`OWNER`], and who is let in.
    struct Hall {
        switch: Switch,
        ports: Ports,
        door: Door,
    }

    impl Hall {
        /// `None` if other users are left out.
        fn new(max_ports: usize) -> Option<Self> {
            if !users::are_needed() {
                return None;
            }
            let ports = Ports {
                queue_memory: 64 << 20,
                shortcut_fds: 256,
                max_unread: MAX_UNREAD,
                own_uid: OWNER,
                ..Ports::default()
            };
            let door = Door {
                max_ports,
                max_ports_per_user: max_ports,
                own_uid: OWNER,
                refused: 0,
                told: None,
            };
            let mut switch = Switch::new(1, Faults::default());
            switch.set_owner(OWNER);
            Some(Self {
                switch,
                ports,
                door,
            })
        }

        /// A user connects. Returns the port, and the other end of it.
        fn come(&mut self, user: u32) -> Option<(PortId, UnixStream)> {
            let (stream, end) = users::as_user(user, || UnixStream::pair().unwrap());
            let stream = Connection::new(stream).unwrap();
            let mut taken = Taken::new(&mut self.ports, &mut self.switch);
            let may = self.door.admits(&stream, &mut taken);
            may.then(|| (self.ports.attach(stream, &mut self.switch), end))
        }

        /// Some ports of a user, all of which are let in.
        fn some(&mut self, user: u32, count: usize) -> Vec<(PortId, UnixStream)> {
            (0..count).map(|_| self.come(user).unwrap()).collect()
        }

        /// The device behind a port says which address it has.
        fn claim(&mut self, port: PortId, address: Mac) {
            let hello = Message::Hello { any_source: false };
            assert!(self.switch.claim(port, address, false));
            self.ports.broker.message(port, address, hello, true, 0);
        }

        /// A port hangs up, or is cut off.
        fn remove(&mut self, port: PortId) {
            self.ports.ports.get_mut(&port).unwrap().gone = true;
            self.ports.settle(&mut self.switch, 0);
        }
    }

    #[test]
    fn where_the_owner_has_many_ports_a_place_is_kept_all_the_same() {
        const HOSTILE: u32 = 20_001;
        let address = Mac([0x52, 0x54, 0, 0, 0, 1]);
        for user in [20_000, OWNER] {
            let Some(mut hall) = Hall::new(32) else {
                return;
            };
            let _own = hall.some(OWNER, 20);
            let (port, end) = hall.come(user).unwrap();
            hall.claim(port, address);
            let hostile = hall.some(HOSTILE, 11);
            hall.claim(hostile[0].0, address);
            // All ports are taken, of which others have few. One leaves.
            drop(end);
            hall.remove(port);
            assert!(hall.come(HOSTILE).is_none());
            if user != OWNER {
                assert!(hall.come(OWNER).is_none());
            }
            let (port, _end) = hall.come(user).expect("there is a place for it");
            hall.claim(port, address);
            assert_eq!(hall.switch.holder(&address), Some(port));
            assert!(hall.come(HOSTILE).is_none());
        }
    }

    #[test]
    fn who_comes_and_goes_without_a_word_has_its_place_all_the_same() {
        const HOSTILE: u32 = 20_001;
        let address = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let Some(mut hall) = Hall::new(16) else {
            return;
        };
        let (port, _end) = hall.come(20_000).unwrap();
        hall.claim(port, address);
        // Others have 15 at most, and all of them.
        let _hostile = hall.some(HOSTILE, 14);
        hall.remove(port);
        for _ in 0..3 {
            let (port, _end) = hall.come(20_000).expect("there is a place for it");
            assert!(hall.come(HOSTILE).is_none());
            hall.remove(port);
            assert!(hall.come(HOSTILE).is_none());
        }
        let (port, _end) = hall.come(20_000).expect("there is a place for it");
        hall.claim(port, address);
        assert_eq!(hall.switch.holder(&address), Some(port));
    }

    #[test]
    fn a_port_that_has_grants_to_read_has_its_own_place_and_no_other() {
        const HOSTILE: u32 = 20_001;
        let Some(mut hall) = Hall::new(16) else {
            return;
        };
        let two = hall.some(20_000, 2);
        let addresses = [1, 2].map(|number| Mac([0x52, 0x54, 0, 0, 0, number]));
        let [a, b] = [0, 1].map(|index: usize| two[index].0);
        hall.claim(a, addresses[0]);
        hall.claim(b, addresses[1]);
        hall.ports.settle(&mut hall.switch, 0);
        for _ in 0..4 {
            let behind = |address: &Mac| hall.switch.port_of(address);
            hall.ports.broker.seen(a, b, addresses[1], behind, 0);
        }
        hall.ports.settle(&mut hall.switch, 0);
        // It is cut off with a grant that it has not read.
        hall.remove(a);
        assert_eq!(hall.ports.left.len(), 1);
        // Of 16 others may have 15.
        let _hostile = hall.some(HOSTILE, 13);
        assert!(hall.come(HOSTILE).is_none());
        // It lets go of it, and has a place to come back to.
        drop(two);
        assert!(hall.come(HOSTILE).is_none());
        assert!(hall.ports.left.is_empty());
        let (port, _end) = hall.come(20_000).expect("there is a place for it");
        hall.claim(port, addresses[0]);
        assert_eq!(hall.switch.holder(&addresses[0]), Some(port));
    }

    /// A switch in which two have wanted an address, of whom the first has left,
    /// and the second.
    fn kept(address: Mac) -> (Switch, PortId) {
        let mut switch = Switch::new(1, Faults::default());
        let [owner, other] = [1000, 1001].map(|user| {
            let port = switch.attach();
            switch.set_user(port, user);
            assert!(switch.claim(port, address, false));
            port
        });
        switch.detach(owner, 0);
        (switch, other)
    }

    #[test]
    fn an_address_is_kept_while_nobody_can_connect() {
        let address = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let (mut switch, other) = kept(address);
        let mut crowd = Crowd::default();
        crowd.look(Queue::Stuck, 0, &mut switch);
        for second in 1..=120 {
            crowd.look(Queue::Stuck, second * SECOND, &mut switch);
            switch.expire(second * SECOND);
            assert_eq!(switch.holder(&address), None, "after {second} s");
        }
        // Those who waited have a minute to be served.
        for second in 121..180 {
            crowd.look(Queue::More, second * SECOND, &mut switch);
            switch.expire(second * SECOND);
            assert_eq!(switch.holder(&address), None, "after {second} s");
        }
        crowd.look(Queue::More, 182 * SECOND, &mut switch);
        switch.expire(182 * SECOND);
        assert_eq!(switch.holder(&address), Some(other));
    }

    #[test]
    fn an_address_is_kept_while_its_user_cannot_connect() {
        let address = Mac([0x52, 0x54, 0, 0, 0, 1]);
        let (mut switch, other) = kept(address);
        let mut crowd = Crowd::default();
        crowd.look(Queue::Empty, 0, &mut switch);
        for second in 1..=20 {
            let queue = [Queue::More, Queue::Stuck][second as usize % 2];
            crowd.look(queue, second * SECOND, &mut switch);
            switch.expire(second * SECOND);
            assert_eq!(switch.holder(&address), None, "after {second} s");
        }
        // One second had passed before, and four are left.
        crowd.look(Queue::Empty, 21 * SECOND, &mut switch);
        switch.expire(25 * SECOND - 1);
        assert_eq!(switch.holder(&address), None);
        crowd.look(Queue::Empty, 25 * SECOND, &mut switch);
        switch.expire(25 * SECOND);
        assert_eq!(switch.holder(&address), Some(other));
    }
}
