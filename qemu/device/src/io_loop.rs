// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The I/O thread: frames between the wire, the engine and the VM's own
//! interface, the engine's timers, and the sockets for counters and control.
//!
//! It sleeps until there is something to do.

use crate::control::{self, After};
use crate::device::Device;
use ferrite_fabric::framing::{Reader, Writer};
use ferrite_fabric::socket::Listener;
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Bytes that wait for the VM's own interface at most.
const VM_QUEUE: usize = 4 * 1024 * 1024;
/// How often a lost uplink is tried again.
const RECONNECT: Duration = Duration::from_millis(100);
/// Reads from one link before the others have their turn.
const READS_PER_TURN: usize = 4;
/// A control request is never longer.
const LINE_LIMIT: usize = 64 * 1024;
/// Control connections at a time.
const CLIENT_LIMIT: usize = 64;
/// Socket buffer asked for, so that a burst passes in few system calls.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;

/// One end of a link.
struct Link {
    stream: UnixStream,
    reader: Reader,
}

impl Link {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        // A smaller buffer only costs system calls.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SOCKET_BUFFER);
        Ok(Self {
            stream,
            reader: Reader::new(),
        })
    }

    /// Reads what is there and calls `batch` for it; `false` if the link is gone.
    fn receive(&mut self, name: &str, mut batch: impl FnMut(&mut Reader) -> bool) -> bool {
        for _ in 0..READS_PER_TURN {
            match self.reader.fill(&mut self.stream) {
                Ok(0) => return false,
                Ok(_) => {
                    if !batch(&mut self.reader) {
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

/// A connection to the control socket.
struct Client {
    stream: UnixStream,
    pending: Vec<u8>,
}

/// The sockets of the I/O thread.
pub struct IoLoop<'a> {
    device: &'a Device,
    uplink_path: Option<PathBuf>,
    uplink: Option<Link>,
    uplink_retry: Option<Instant>,
    net: Option<Listener>,
    vm: Option<Link>,
    vm_queue: Writer,
    counters: Option<Listener>,
    control: Option<Listener>,
    clients: Vec<Client>,
}

/// Which sockets have something.
#[derive(Default)]
struct Ready {
    signal: bool,
    woken: bool,
    uplink: bool,
    net: bool,
    vm: bool,
    counters: bool,
    control: bool,
    clients: Vec<usize>,
}

impl<'a> IoLoop<'a> {
    /// The loop for `device` with its listening sockets.
    pub fn new(
        device: &'a Device,
        uplink: Option<PathBuf>,
        net: Option<Listener>,
        counters: Option<Listener>,
        control: Option<Listener>,
    ) -> io::Result<Self> {
        for listener in [&net, &counters, &control].into_iter().flatten() {
            listener.get().set_nonblocking(true)?;
        }
        Ok(Self {
            device,
            uplink_path: uplink,
            uplink: None,
            uplink_retry: None,
            net,
            vm: None,
            vm_queue: Writer::new(VM_QUEUE),
            counters,
            control,
            clients: Vec::new(),
        })
    }

    /// Connects the uplink for the first time; an error names the socket.
    pub fn connect_uplink(&mut self) -> io::Result<()> {
        let Some(path) = &self.uplink_path else {
            return Ok(());
        };
        let connect = || {
            let stream = UnixStream::connect(path)?;
            let writing = stream.try_clone()?;
            Ok((Link::new(stream)?, writing))
        };
        let (link, writing) = connect().map_err(|error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("--uplink {}: {error}", path.display()),
            )
        })?;
        self.uplink = Some(link);
        self.uplink_retry = None;
        self.device.lock().set_uplink(Some(writing));
        Ok(())
    }

    /// Runs until the device ends or a byte arrives on `signals`.
    pub fn run(&mut self, signals: &UnixStream) -> Result<(), String> {
        loop {
            if let Some(result) = self.device.finished() {
                return result;
            }
            let ready = self
                .wait(signals)
                .map_err(|error| format!("cannot wait for events: {error}"))?;
            if ready.signal {
                return Ok(());
            }
            if ready.woken {
                self.device.clear_wake();
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
            self.device.lock().pump();
            self.flush_vm();
            self.retry_uplink();
            if ready.counters {
                self.send_counters();
            }
            self.serve_control(&ready);
        }
    }

    fn wait(&mut self, signals: &UnixStream) -> io::Result<Ready> {
        let (timeout, blocked) = {
            let mut core = self.device.lock();
            let due = core.io_sleeps();
            let now = core.now();
            let timer = due.map(|due| Duration::from_nanos(due.saturating_sub(now)));
            let retry = self
                .uplink_retry
                .map(|at| at.saturating_duration_since(Instant::now()));
            (timer.into_iter().chain(retry).min(), core.uplink_blocked())
        };
        let mut fds = vec![
            PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.device.wake_fd(), PollFlags::IN),
        ];
        let mut add = |fd, out| {
            let mut interest = PollFlags::IN;
            interest.set(PollFlags::OUT, out);
            fds.push(PollFd::from_borrowed_fd(fd, interest));
            Some(fds.len() - 1)
        };
        let uplink = self
            .uplink
            .as_ref()
            .and_then(|link| add(link.stream.as_fd(), blocked));
        let vm = self
            .vm
            .as_ref()
            .and_then(|link| add(link.stream.as_fd(), !self.vm_queue.is_empty()));
        let net = self
            .net
            .as_ref()
            .and_then(|listener| add(listener.get().as_fd(), false));
        let counters = self
            .counters
            .as_ref()
            .and_then(|listener| add(listener.get().as_fd(), false));
        let control = self
            .control
            .as_ref()
            .and_then(|listener| add(listener.get().as_fd(), false));
        let clients: Vec<Option<usize>> = self
            .clients
            .iter()
            .map(|client| add(client.stream.as_fd(), false))
            .collect();
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
        let is_ready = |index: Option<usize>| {
            index
                .and_then(|index| fds.get(index))
                .is_some_and(|fd| fd.revents().intersects(readable))
        };
        Ok(Ready {
            signal: is_ready(Some(0)),
            woken: is_ready(Some(1)),
            uplink: is_ready(uplink),
            net: is_ready(net),
            vm: is_ready(vm),
            counters: is_ready(counters),
            control: is_ready(control),
            clients: clients
                .into_iter()
                .enumerate()
                .filter(|(_, index)| is_ready(*index))
                .map(|(client, _)| client)
                .collect(),
        })
    }

    fn read_uplink(&mut self) {
        let Some(link) = &mut self.uplink else {
            return;
        };
        let (device, vm_queue, vm) = (self.device, &mut self.vm_queue, self.vm.is_some());
        let alive = link.receive("uplink", |reader| {
            let mut core = device.lock();
            loop {
                match reader.next_frame() {
                    Ok(Some(frame)) => {
                        if core.frame_from_uplink(frame) {
                            let taken = vm && vm_queue.push(frame);
                            core.vm_counters().sent(frame.len(), taken);
                        }
                    }
                    Ok(None) => break,
                    Err(error) => {
                        log::warn!("uplink: {error}");
                        return false;
                    }
                }
            }
            core.pump();
            true
        });
        if !alive {
            log::warn!("the uplink is gone; trying to connect again");
            self.uplink = None;
            self.uplink_retry = Some(Instant::now());
            self.device.lock().set_uplink(None);
        }
    }

    fn retry_uplink(&mut self) {
        if self.uplink_retry.is_some_and(|at| at <= Instant::now()) {
            match self.connect_uplink() {
                Ok(()) => log::info!("the uplink is back"),
                Err(_) => self.uplink_retry = Some(Instant::now() + RECONNECT),
            }
        }
    }

    fn accept_vm(&mut self) {
        let Some(listener) = &self.net else {
            return;
        };
        if let Ok((stream, _)) = listener.get().accept() {
            // A new connection takes the place of the old: the monitor has
            // only one interface here.
            match Link::new(stream) {
                Ok(link) => {
                    self.vm = Some(link);
                    self.vm_queue.clear();
                    self.device.lock().vm_counters().connects += 1;
                }
                Err(error) => log::warn!("the VM's interface cannot be connected: {error}"),
            }
        }
    }

    fn read_vm(&mut self) {
        let Some(link) = &mut self.vm else {
            return;
        };
        let device = self.device;
        let alive = link.receive("the VM's interface", |reader| {
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
            self.drop_vm();
        }
    }

    fn flush_vm(&mut self) {
        if let Some(link) = &mut self.vm {
            if !self.vm_queue.is_empty() && self.vm_queue.flush(&mut link.stream).is_err() {
                self.drop_vm();
            }
        }
    }

    fn drop_vm(&mut self) {
        log::info!("the VM's interface is disconnected");
        self.vm = None;
        self.vm_queue.clear();
    }

    fn send_counters(&mut self) {
        let Some(listener) = &self.counters else {
            return;
        };
        while let Ok((mut stream, _)) = listener.get().accept() {
            let report = format!("{}\n", self.device.lock().report());
            // The document fits into a socket's buffer, so that this does not
            // wait for the reader; one that went away does not matter.
            let _ = stream
                .set_nonblocking(true)
                .and_then(|()| stream.write_all(report.as_bytes()));
        }
    }

    fn serve_control(&mut self, ready: &Ready) {
        for index in ready.clients.iter().rev() {
            if let Some(client) = self.clients.get_mut(*index) {
                if !serve(client, self.device) {
                    self.clients.swap_remove(*index);
                }
            }
        }
        if let (true, Some(listener)) = (ready.control, &self.control) {
            while let Ok((stream, _)) = listener.get().accept() {
                if self.clients.len() < CLIENT_LIMIT && stream.set_nonblocking(true).is_ok() {
                    self.clients.push(Client {
                        stream,
                        pending: Vec::new(),
                    });
                }
            }
        }
    }
}

/// Answers what a control connection asks; `false` when it is done.
fn serve(client: &mut Client, device: &Device) -> bool {
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
        let (answer, after) = {
            let mut core = device.lock();
            let answer = control::handle(&line, &mut core);
            core.pump();
            answer
        };
        let sent = client.stream.write_all(format!("{answer}\n").as_bytes());
        if after == After::Die {
            log::warn!("ends as asked on the control socket");
            std::process::exit(0);
        }
        if sent.is_err() {
            return false;
        }
    }
    open
}
