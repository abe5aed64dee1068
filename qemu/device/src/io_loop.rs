// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The I/O thread: frames between the wire, the engine and the VM's own
//! interface, the engine's timers, and the sockets for counters and control.
//!
//! It sleeps until there is something to do.

use crate::adapter::Adapter;
use crate::control::After;
use crate::function::Function;
use ferrite_fabric::closer;
use ferrite_fabric::connection::{overflow_user, owner, Connection};
use ferrite_fabric::descriptors::Receiver;
use ferrite_fabric::framing::{Reader, Writer, STARVED};
use ferrite_fabric::shortcut::ShortcutId;
use ferrite_fabric::socket::{connect, Listener};
use ferrite_fabric::wake::End;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::Timespec;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, TryRecvError};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes that wait for the VM's own interface at most.
const VM_QUEUE: usize = 4 * 1024 * 1024;
/// How often a lost uplink is tried again.
const RECONNECT: Duration = Duration::from_millis(100);
/// How long the device stands in line for a switch that has not accepted others
/// yet. Then it looks whether another listens at the path.
const IN_LINE: Duration = Duration::from_secs(10);
/// A connection that lasts no longer was refused, and the next tries come ever
/// later, up to as late as this: each is a link that comes up and goes down.
const REFUSED: Duration = Duration::from_secs(1);
/// How long connections wait when there are no descriptors for them.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Connections that are not closed yet, and beyond which none is accepted.
const MAX_CLOSING: usize = 64;
/// Nanoseconds that a sleep may be longer than asked for.
const TIMER_SLACK: u64 = 1000;
/// Reads from one link before the others have their turn.
const READS_PER_TURN: usize = 4;
/// A control request is never longer.
const LINE_LIMIT: usize = 64 * 1024;
/// Connections that are accepted on a socket before the links have their turn.
const ACCEPTS_PER_TURN: usize = 16;
/// Control connections at a time.
const CLIENT_LIMIT: usize = 64;
/// Socket buffer asked for, so that a burst passes in few system calls.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;

/// What there is to wait for; the number is the event's.
mod token {
    pub const SIGNAL: u64 = 0;
    pub const WAKE: u64 = 1;
    pub const UPLINK: u64 = 2;
    pub const VM: u64 = 3;
    pub const NET: u64 = 4;
    pub const COUNTERS: u64 = 5;
    pub const CONTROL: u64 = 6;
    pub const UNMASK: u64 = 7;
    /// The first of the control connections.
    pub const CLIENT: u64 = 16;
    /// With this bit, the number of a shortcut.
    pub const SHORTCUT: u64 = 1 << 63;
}

/// The connection to the switch, which descriptors come by.
struct Uplink {
    stream: UnixStream,
    /// Descriptors received and not yet spoken of.
    fds: VecDeque<OwnedFd>,
}

impl Read for Uplink {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Receiver::new(&self.stream, &mut self.fds).read(buffer)
    }
}

impl AsFd for Uplink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// One end of a link.
struct Link<S> {
    stream: S,
    reader: Reader,
    /// Waits for room in the socket.
    waits_for_room: bool,
}

impl<S: Read + AsFd> Link<S> {
    fn new(stream: S) -> Self {
        make_room(&stream);
        Self {
            stream,
            reader: Reader::new(),
            waits_for_room: false,
        }
    }

    /// Waits for room in the socket too, or not any more.
    fn wait_for_room(&mut self, epoll: &OwnedFd, token: u64, wait: bool) -> io::Result<()> {
        if self.waits_for_room != wait {
            self.waits_for_room = wait;
            let mut interest = EventFlags::IN;
            interest.set(EventFlags::OUT, wait);
            epoll::modify(epoll, &self.stream, EventData::new_u64(token), interest)?;
        }
        Ok(())
    }

    /// Reads what is there and calls `batch` for it; `false` if the link is gone.
    fn receive(&mut self, name: &str, mut batch: impl FnMut(&mut Reader, &mut S) -> bool) -> bool {
        for _ in 0..READS_PER_TURN {
            match self.reader.fill(&mut self.stream) {
                Ok(0) => return false,
                Ok(_) => {
                    if !batch(&mut self.reader, &mut self.stream) {
                        return false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
                Err(error) => {
                    log::warn!("{name}: {error}");
                    return false;
                }
            }
        }
        true
    }
}

/// Has `epoll` tell of events of `fd` as `token`.
fn watch(epoll: &OwnedFd, fd: impl AsFd, token: u64, interest: EventFlags) -> io::Result<()> {
    Ok(epoll::add(epoll, fd, EventData::new_u64(token), interest)?)
}

/// A connection to the control socket.
struct Client {
    stream: Connection,
    pending: Vec<u8>,
    token: u64,
}

/// The sockets of the I/O thread.
///
/// That is of a function that is alone and its port; or of the port of several functions; or of one
/// of these.
pub struct IoLoop<'a> {
    adapter: &'a Adapter,
    /// The function that is served.
    function: Option<&'a Function>,
    /// Whether the port is.
    is_port: bool,
    uplink_path: Option<PathBuf>,
    uplink: Option<Link<Uplink>>,
    uplink_retry: Option<Instant>,
    /// Where the connection comes from for which a thread stands in line.
    uplink_line: Option<mpsc::Receiver<io::Result<UnixStream>>>,
    /// When it was connected, and how long after that it is tried again.
    uplink_since: Instant,
    uplink_pause: Duration,
    /// Whose the switch was at the start, if that is known, and whether another
    /// has been told of since it was last connected.
    uplink_user: Option<u32>,
    uplink_doubted: bool,
    /// Until when nobody is accepted.
    accept_again: Option<Instant>,
    net: Option<Listener>,
    vm: Option<Link<Connection>>,
    vm_queue: Writer,
    counters: Option<Listener>,
    control: Option<Listener>,
    clients: Vec<Client>,
    next_client: u64,
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
    /// What wakes this thread by shortcuts, and of which time that is.
    shortcuts: Vec<(ShortcutId, Arc<End>)>,
    shortcuts_generation: u64,
    /// What the monitor unmasks the interrupt pin by, and of which time that is.
    unmask: Option<Arc<OwnedFd>>,
    unmask_generation: u64,
}

/// Which sockets have something.
#[derive(Default)]
struct Ready {
    signal: bool,
    uplink: bool,
    net: bool,
    vm: bool,
    counters: bool,
    control: bool,
    unmask: bool,
    /// Some of the control connections, by their tokens.
    clients: Vec<u64>,
}

impl<'a> IoLoop<'a> {
    /// The loop for the port of an adapter, and for its function if that is alone, with its
    /// listening sockets.
    pub fn new(
        adapter: &'a Adapter,
        uplink: Option<PathBuf>,
        net: Option<Listener>,
        counters: Option<Listener>,
        control: Option<Listener>,
    ) -> io::Result<Self> {
        let alone = adapter.alone();
        Self::with(adapter, alone, true, uplink, net, counters, control)
    }

    /// The loop for one function of several, with the socket for its guest's other interface.
    pub fn of_function(
        adapter: &'a Adapter,
        function: &'a Function,
        net: Option<Listener>,
    ) -> io::Result<Self> {
        Self::with(adapter, Some(function), false, None, net, None, None)
    }

    fn with(
        adapter: &'a Adapter,
        function: Option<&'a Function>,
        is_port: bool,
        uplink: Option<PathBuf>,
        net: Option<Listener>,
        counters: Option<Listener>,
        control: Option<Listener>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (listener, token) in [
            (&net, token::NET),
            (&counters, token::COUNTERS),
            (&control, token::CONTROL),
        ] {
            if let Some(listener) = listener {
                watch(&epoll, listener.get(), token, EventFlags::IN)?;
            }
        }
        // Each write is an event of its own; the count need not be read.
        let edges = EventFlags::IN | EventFlags::ET;
        if let Some(function) = function {
            watch(&epoll, function.wake_fd(), token::WAKE, edges)?;
        }
        if is_port {
            watch(&epoll, adapter.port().wake_fd(), token::WAKE, edges)?;
        }
        Ok(Self {
            adapter,
            function,
            is_port,
            uplink_path: uplink,
            uplink: None,
            uplink_retry: None,
            uplink_line: None,
            uplink_since: Instant::now(),
            uplink_pause: Duration::ZERO,
            uplink_user: None,
            uplink_doubted: false,
            accept_again: None,
            net,
            vm: None,
            vm_queue: Writer::new(VM_QUEUE),
            counters,
            control,
            clients: Vec::new(),
            next_client: token::CLIENT,
            epoll,
            events: Vec::with_capacity(16),
            shortcuts: Vec::new(),
            shortcuts_generation: 0,
            unmask: None,
            unmask_generation: 0,
        })
    }

    /// Connects the uplink for the first time; an error names the socket. A
    /// switch that is there but busy is waited for later.
    pub fn connect_uplink(&mut self) -> io::Result<()> {
        let Some(path) = self.uplink_path.clone() else {
            return Ok(());
        };
        let named = |error: io::Error| {
            let text = format!("--uplink {}: {error}", path.display());
            io::Error::new(error.kind(), text)
        };
        // Somebody else may listen there by the time that it has its turn.
        let owner = std::fs::metadata(&path).map_err(named)?.uid();
        match connect(&path) {
            Ok(socket) => {
                self.uplink_user = user_of(&socket);
                self.adopt_uplink(socket.into()).map_err(named)?;
            }
            Err(error) if is_busy(&error) => {
                self.uplink_user = known(owner);
                self.stand_in_line();
            }
            Err(error) => return Err(named(error)),
        }
        if self.uplink_user.is_none() {
            log::warn!(
                "--uplink {}: it is of a user who has no number in this user namespace, \
                 and is not connected again",
                path.display()
            );
        }
        Ok(())
    }

    /// The path may be where others can make a socket too, once the switch is
    /// gone: they would have all that the guest sends.
    fn check_uplink(&self, socket: UnixStream) -> io::Result<UnixStream> {
        let user = user_of(&socket);
        let own = known(rustix::process::getuid().as_raw());
        if user.is_some() && [own, Some(0), self.uplink_user].contains(&user) {
            return Ok(socket);
        }
        let whose = user.map_or("nobody knows whose".into(), |uid| format!("user {uid}'s"));
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("the socket is {whose}, and was not before"),
        ))
    }

    /// The uplink is connected by this socket.
    fn adopt_uplink(&mut self, socket: UnixStream) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let writing = socket.try_clone()?;
        let link = Link::new(Uplink {
            stream: socket,
            fds: VecDeque::new(),
        });
        watch(&self.epoll, &link.stream, token::UPLINK, EventFlags::IN)?;
        self.uplink_doubted = false;
        self.uplink = Some(link);
        self.uplink_retry = None;
        self.uplink_since = Instant::now();
        self.adapter.set_uplink(Some(writing));
        Ok(())
    }

    /// Waits for the switch in a thread: who does has its turn after those that
    /// were there before, while one that only asks now and then finds others
    /// there each time.
    fn stand_in_line(&mut self) {
        self.uplink_retry = Some(Instant::now() + RECONNECT);
        let Some(path) = self.uplink_path.clone() else {
            return;
        };
        let Ok(wake) = self.adapter.port().wake_fd().try_clone_to_owned() else {
            return;
        };
        let (socket, line) = mpsc::channel();
        let wait = move || {
            // The device may be about to end.
            let _ = socket.send(connect_in_turn(&path));
            // Fails only if there are events enough.
            let _ = rustix::io::write(&wake, &1u64.to_ne_bytes());
        };
        let thread = thread::Builder::new().name("uplink".into());
        if thread.spawn(wait).is_ok() {
            self.uplink_retry = None;
            self.uplink_line = Some(line);
        }
    }

    /// Runs until the device ends or a byte arrives on `signals`.
    pub fn run(&mut self, signals: &UnixStream) -> Result<(), String> {
        let text = |error: io::Error| format!("cannot wait for events: {error}");
        watch(&self.epoll, signals, token::SIGNAL, EventFlags::IN).map_err(text)?;
        // The engine's times are shorter than what the kernel adds to a sleep
        // by default. Without it they are late, not wrong.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK));
        loop {
            if let Some(result) = self.adapter.port().finished() {
                return result;
            }
            if !self.turn().map_err(text)? {
                return Ok(());
            }
        }
    }

    /// Runs for one function of several, until the process is to end.
    pub fn run_function(&mut self) -> io::Result<()> {
        // As above.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(TIMER_SLACK));
        while self.adapter.port().finished().is_none() && self.turn()? {}
        Ok(())
    }

    /// Waits and does what there is to do; `false` if the process is told to end.
    fn turn(&mut self) -> io::Result<bool> {
        let ready = self.wait()?;
        if ready.signal {
            return Ok(false);
        }
        if let Some(function) = self.function.filter(|_| ready.unmask) {
            function.unmask_pin();
        }
        if ready.net {
            self.accept_vm();
        }
        if ready.uplink {
            self.read_uplink();
        }
        if ready.vm {
            self.read_vm();
        }
        if let Some(function) = self.function {
            let (vm_queue, vm) = (&mut self.vm_queue, self.vm.is_some());
            let mut to_vm = |frame: &[u8]| vm && vm_queue.push(frame);
            function.read_shortcuts(&mut to_vm).pump();
        }
        let port = self.adapter.port();
        if self.is_port {
            if self.function.is_none() {
                port.flush();
            }
        } else if port.must_wake() {
            port.wake();
        }
        self.flush_vm();
        self.retry_uplink();
        if ready.counters {
            self.send_counters();
        }
        self.serve_control(&ready);
        Ok(true)
    }

    fn wait(&mut self) -> io::Result<Ready> {
        if self.accept_again.is_some_and(|at| at <= Instant::now()) {
            self.accept_again = None;
            self.watch_listeners(EventFlags::IN);
        }
        let mut timer = None;
        if let Some(function) = self.function {
            let mut core = function.lock();
            if let Some(shortcuts) = core.shortcut_events(&mut self.shortcuts_generation) {
                self.watch_shortcuts(shortcuts);
            }
            if let Some(unmask) = core.unmask_event(&mut self.unmask_generation) {
                self.watch_unmask(unmask);
            }
            let due = core.io_sleeps();
            let now = core.now();
            timer = due.map(|due| Duration::from_nanos(due.saturating_sub(now)));
        }
        let retry = self
            .uplink_retry
            .into_iter()
            .chain(self.accept_again)
            .map(|at| at.saturating_duration_since(Instant::now()));
        let port = self.adapter.port();
        // A socket may say that it has room for what it does not take.
        let uplink_starved = self.is_port && port.is_starved();
        let starved = uplink_starved || self.vm_queue.is_starved();
        let starving = starved.then_some(STARVED);
        let blocked = self.is_port && port.sleeps() && !uplink_starved;
        let timeout = timer.into_iter().chain(retry).chain(starving).min();
        if let Some(link) = &mut self.uplink {
            link.wait_for_room(&self.epoll, token::UPLINK, blocked)?;
        }
        if let Some(link) = &mut self.vm {
            let blocked = !self.vm_queue.is_empty() && !self.vm_queue.is_starved();
            link.wait_for_room(&self.epoll, token::VM, blocked)?;
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        self.events.clear();
        let events = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, events, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let mut ready = Ready::default();
        let readable = EventFlags::IN | EventFlags::HUP | EventFlags::ERR;
        for event in &self.events {
            let flags = event.flags;
            if !flags.intersects(readable) {
                continue;
            }
            match event.data.u64() {
                token::SIGNAL => ready.signal = true,
                token::UPLINK => ready.uplink = true,
                token::NET => ready.net = true,
                token::VM => ready.vm = true,
                token::COUNTERS => ready.counters = true,
                token::CONTROL => ready.control = true,
                token::UNMASK => ready.unmask = true,
                shortcut if shortcut & token::SHORTCUT != 0 => {
                    // To be awake is all: the rings are looked into after this.
                    let of =
                        |(id, _): &&(ShortcutId, _)| u64::from(*id) | token::SHORTCUT == shortcut;
                    if let Some((_, end)) = self.shortcuts.iter().find(of) {
                        end.drain();
                    }
                }
                client if client >= token::CLIENT => ready.clients.push(client),
                // To be awake is all.
                _ => {}
            }
        }
        Ok(ready)
    }

    /// Waits for connections, or not.
    fn watch_listeners(&self, interest: EventFlags) {
        for (listener, token) in [
            (&self.net, token::NET),
            (&self.counters, token::COUNTERS),
            (&self.control, token::CONTROL),
        ] {
            if let Some(listener) = listener {
                // It is in the set, and that does not fail then.
                let _ = epoll::modify(
                    &self.epoll,
                    listener.get(),
                    EventData::new_u64(token),
                    interest,
                );
            }
        }
    }

    /// Accepts nobody for some time: who cannot be accepted stays an event.
    fn accept_later(&mut self) {
        self.accept_again = Some(Instant::now() + ACCEPT_AGAIN);
        self.watch_listeners(EventFlags::empty());
    }

    /// Waits for these events of shortcuts and no others.
    fn watch_shortcuts(&mut self, shortcuts: Vec<(ShortcutId, Arc<End>)>) {
        for (_, event) in &self.shortcuts {
            // It is in the set, unless it could not be added.
            let _ = epoll::delete(&self.epoll, event);
        }
        // An edge for each signal, and one when the other is gone.
        let edges = EventFlags::IN | EventFlags::ET;
        for (id, event) in &shortcuts {
            let token = token::SHORTCUT | u64::from(*id);
            if let Err(error) = watch(&self.epoll, event, token, edges) {
                log::warn!("shortcut {id} cannot wake the device: {error}");
            }
        }
        self.shortcuts = shortcuts;
    }

    fn watch_unmask(&mut self, unmask: Option<Arc<OwnedFd>>) {
        if let Some(event) = &self.unmask {
            // It is in the set, unless it could not be added.
            let _ = epoll::delete(&self.epoll, event);
        }
        if let Some(event) = &unmask {
            // An edge for each event; the count need not be read.
            let edges = EventFlags::IN | EventFlags::ET;
            if let Err(error) = watch(&self.epoll, event, token::UNMASK, edges) {
                log::warn!("the interrupt pin cannot be unmasked: {error}");
            }
        }
        self.unmask = unmask;
    }

    fn read_uplink(&mut self) {
        let Some(link) = &mut self.uplink else {
            return;
        };
        let (port, function) = (self.adapter.port(), self.function);
        let (vm_queue, vm) = (&mut self.vm_queue, self.vm.is_some());
        let alive = link.receive("uplink", |reader, uplink| {
            let read = match function {
                Some(function) => {
                    let mut to_vm = |frame: &[u8]| vm && vm_queue.push(frame);
                    function.read_uplink(reader, &mut uplink.fds, &mut to_vm)
                }
                None => {
                    // They are of shortcuts, of which there are none.
                    uplink.fds.clear();
                    port.deliver(reader)
                }
            };
            if let Err(error) = &read {
                log::warn!("uplink: {error}");
            }
            read.is_ok()
        });
        if !alive {
            log::warn!("the uplink is gone; trying to connect again");
            if let Some(link) = self.uplink.take() {
                // The other copy of this socket would keep it in the set.
                let _ = epoll::delete(&self.epoll, &link.stream);
            }
            self.uplink_pause = if self.uplink_since.elapsed() < REFUSED {
                (2 * self.uplink_pause).clamp(RECONNECT, REFUSED)
            } else {
                Duration::ZERO
            };
            self.uplink_retry = Some(self.uplink_since + self.uplink_pause);
            self.adapter.set_uplink(None);
        }
    }

    fn retry_uplink(&mut self) {
        let socket = match (&self.uplink_line, &self.uplink_path) {
            (Some(line), _) => match line.try_recv() {
                Ok(socket) => socket,
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => Err(io::ErrorKind::WouldBlock.into()),
            },
            (None, Some(path)) if self.uplink_retry.is_some_and(|at| at <= Instant::now()) => {
                connect(path).map(UnixStream::from)
            }
            _ => return,
        };
        self.uplink_line = None;
        let adopted = socket
            .and_then(|socket| self.check_uplink(socket))
            .and_then(|socket| self.adopt_uplink(socket));
        match adopted {
            Ok(()) => log::info!("the uplink is back"),
            Err(error) if is_busy(&error) => self.stand_in_line(),
            Err(error) => {
                self.uplink_retry = Some(Instant::now() + RECONNECT);
                if error.kind() == io::ErrorKind::PermissionDenied && !self.uplink_doubted {
                    self.uplink_doubted = true;
                    if let Some(path) = &self.uplink_path {
                        log::warn!("--uplink {}: {error}", path.display());
                    }
                }
            }
        }
    }

    fn accept_vm(&mut self) {
        let Some(listener) = &self.net else {
            return;
        };
        let accepted = accept(listener);
        if accepted.is_err() {
            self.accept_later();
        }
        if let Ok(Some(connection)) = accepted {
            // A new connection takes the place of the old: the monitor has
            // only one interface here.
            let link = Link::new(connection);
            match watch(&self.epoll, &link.stream, token::VM, EventFlags::IN) {
                Ok(()) => {
                    self.drop_vm();
                    self.vm = Some(link);
                    if let Some(function) = self.function {
                        function.lock().vm_counters().connects += 1;
                    }
                }
                Err(error) => log::warn!("the VM's interface cannot be connected: {error}"),
            }
        }
    }

    fn read_vm(&mut self) {
        let (Some(link), Some(device)) = (&mut self.vm, self.function) else {
            return;
        };
        let alive = link.receive("the VM's interface", |reader, _| {
            let mut core = device.lock();
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => core.frame_from_vm(frame),
                    Ok(None) => break,
                    Err(error) => {
                        log::warn!("the VM's interface: {error}");
                        return false;
                    }
                }
            }
            core.pump();
            true
        });
        if !alive {
            log::info!("the VM's interface is disconnected");
            self.drop_vm();
        }
    }

    fn flush_vm(&mut self) {
        if let Some(link) = &mut self.vm {
            if !self.vm_queue.is_empty() && self.vm_queue.flush(&mut link.stream).is_err() {
                log::info!("the VM's interface is disconnected");
                self.drop_vm();
            }
        }
    }

    fn drop_vm(&mut self) {
        if let Some(link) = self.vm.take() {
            // It may be closed later than now.
            let _ = epoll::delete(&self.epoll, &link.stream);
        }
        self.vm_queue.clear();
    }

    fn send_counters(&mut self) {
        let Some(listener) = &self.counters else {
            return;
        };
        // The others have their turn after the links.
        for _ in 0..ACCEPTS_PER_TURN {
            let mut connection = match accept(listener) {
                Ok(Some(connection)) => connection,
                Ok(None) => break,
                Err(Full) => {
                    self.accept_later();
                    break;
                }
            };
            let report = format!("{}\n", self.adapter.report());
            make_room(&connection);
            // The document fits into a socket's buffer; one that went away does
            // not matter.
            let _ = connection.write_all(report.as_bytes());
        }
    }

    fn serve_control(&mut self, ready: &Ready) {
        let (adapter, epoll) = (self.adapter, &self.epoll);
        self.clients.retain_mut(|client| {
            let open = !ready.clients.contains(&client.token) || serve(client, adapter);
            if !open {
                // It may be closed later than now.
                let _ = epoll::delete(epoll, &client.stream);
            }
            open
        });
        if let (true, Some(listener)) = (ready.control, &self.control) {
            for _ in 0..ACCEPTS_PER_TURN {
                let stream = match accept(listener) {
                    Ok(Some(stream)) => stream,
                    Ok(None) => break,
                    Err(Full) => {
                        self.accept_later();
                        break;
                    }
                };
                make_room(&stream);
                let token = self.next_client;
                if self.clients.len() < CLIENT_LIMIT
                    && watch(&self.epoll, &stream, token, EventFlags::IN).is_ok()
                {
                    self.next_client += 1;
                    self.clients.push(Client {
                        stream,
                        pending: Vec::new(),
                        token,
                    });
                }
            }
        }
    }
}

/// Has as much sent at once as may be. A smaller buffer only costs system calls, or the end of a long answer.
fn make_room(socket: impl AsFd) {
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, SOCKET_BUFFER);
}

/// Who listens at the other end of a socket, if that is known.
fn user_of(socket: impl AsFd) -> Option<u32> {
    owner(socket).and_then(|owner| owner.user())
}

/// The user of this number, if it is known who that is.
fn known(uid: u32) -> Option<u32> {
    (Some(uid) != overflow_user()).then_some(uid)
}

/// Whether the switch is there but has not accepted others yet.
fn is_busy(error: &io::Error) -> bool {
    let kinds = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
    kinds.contains(&error.kind())
}

/// Connects when those are accepted that came before, or fails as busy after
/// some time.
fn connect_in_turn(path: &Path) -> io::Result<UnixStream> {
    use rustix::net::sockopt::{set_socket_timeout, Timeout};
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(IN_LINE))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Nobody can be accepted now.
struct Full;

/// Accepts a connection, if there is one.
fn accept(listener: &Listener) -> Result<Option<Connection>, Full> {
    // Each has a descriptor, and the guest needs some too.
    if closer::pending() >= MAX_CLOSING {
        return Err(Full);
    }
    match listener.accept() {
        Ok(connection) => Ok(Some(connection)),
        Err(error) => match error.kind() {
            io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted => Ok(None),
            _ => Err(Full),
        },
    }
}

/// Answers what a control connection asks; `false` when it is done.
fn serve(client: &mut Client, adapter: &Adapter) -> bool {
    let mut chunk = [0; 4096];
    let mut open = true;
    loop {
        match client.stream.read(&mut chunk) {
            Ok(0) => {
                open = false;
                break;
            }
            Ok(count) => client.pending.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(_) => return false,
        }
        if client.pending.len() > LINE_LIMIT {
            return false;
        }
    }
    while let Some(end) = client.pending.iter().position(|byte| *byte == b'\n') {
        let line: Vec<u8> = client.pending.drain(..=end).collect();
        if line.trim_ascii().is_empty() {
            continue;
        }
        let (answer, after) = adapter.handle(&line);
        let sent = client.stream.write_all(format!("{answer}\n").as_bytes());
        if after == After::Die {
            log::warn!("ends as asked on the control socket");
            adapter.hang_up();
            std::process::exit(0);
        }
        if sent.is_err() {
            return false;
        }
    }
    open
}
