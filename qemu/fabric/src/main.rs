// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fabric process: unix sockets around the switch.

use clap::Parser;
use ferrite_fabric::control::Request;
use ferrite_fabric::fault::{Faults, Scope};
use ferrite_fabric::framing::{Reader, Writer};
use ferrite_fabric::pcap::Pcap;
use ferrite_fabric::socket::Listener;
use ferrite_fabric::switch::{Output, PortId, Switch};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Bytes that wait for a slow port before its frames are dropped.
const PORT_QUEUE: usize = 16 * 1024 * 1024;
/// A control request is never longer.
const LINE_LIMIT: usize = 64 * 1024;
/// Socket buffer asked for, so that a burst passes in few system calls.
const SOCKET_BUFFER: usize = 4 * 1024 * 1024;
/// Reads from one port before the others have their turn.
const READS_PER_TURN: usize = 4;

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
}

struct Port {
    stream: UnixStream,
    reader: Reader,
    writer: Writer,
    gone: bool,
}

/// Everything that frames leave through.
#[derive(Default)]
struct Ports {
    ports: BTreeMap<PortId, Port>,
    pcap: Option<Pcap<BufWriter<File>>>,
}

impl Output for Ports {
    fn send(&mut self, port: PortId, frame: &[u8]) -> bool {
        self.ports
            .get_mut(&port)
            .is_some_and(|port| port.writer.push(frame))
    }

    fn capture(&mut self, frame: &[u8]) {
        if let Some(pcap) = &mut self.pcap {
            let time = SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |time| time.as_nanos() as u64);
            if let Err(error) = pcap.record(time, frame) {
                eprintln!("ferrite-fabric: the capture ends: {error}");
                self.pcap = None;
            }
        }
    }
}

impl Ports {
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

    fn flush_capture(&mut self) {
        if let Some(pcap) = &mut self.pcap {
            if let Err(error) = pcap.flush() {
                eprintln!("ferrite-fabric: the capture ends: {error}");
                self.pcap = None;
            }
        }
    }
}

struct ControlClient {
    stream: UnixStream,
    pending: Vec<u8>,
    gone: bool,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferrite-fabric: {error}");
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
    let mut ports = Ports::default();
    if let Some(path) = &options.pcap {
        ports.capture_to(path)?;
    }
    let control = options.control.as_deref().map(Listener::bind).transpose()?;
    let listener = Listener::bind(&options.listen)?;
    for listener in control.iter().chain([&listener]) {
        listener.get().set_nonblocking(true)?;
    }
    // Signals arrive as bytes, so that one poll waits for everything and the
    // capture and socket files are left in order.
    let (signals, signal_end) = UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::low_level::pipe::register(signal, signal_end.try_clone()?)?;
    }
    let mut switch = Switch::new(options.seed, faults);
    let mut clients: Vec<ControlClient> = Vec::new();
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;

    loop {
        let timeout = switch
            .next_timeout()
            .map(|due| Duration::from_nanos(due.saturating_sub(now())));
        if timeout.is_none_or(|timeout| !timeout.is_zero()) {
            ports.flush_capture();
        }
        let ready = wait(
            &signals,
            &listener,
            control.as_ref(),
            &ports,
            &clients,
            timeout,
        )?;
        if ready.signal {
            return Ok(());
        }
        if ready.listener {
            accept(&listener, |stream| {
                // A smaller buffer only costs system calls.
                let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SOCKET_BUFFER);
                let id = switch.attach();
                let port = Port {
                    stream,
                    reader: Reader::new(),
                    writer: Writer::new(PORT_QUEUE),
                    gone: false,
                };
                ports.ports.insert(id, port);
            })?;
        }
        if let (true, Some(control)) = (ready.control, &control) {
            accept(control, |stream| {
                clients.push(ControlClient {
                    stream,
                    pending: Vec::new(),
                    gone: false,
                });
            })?;
        }
        for id in ready.readable {
            read_port(id, &mut switch, &mut ports, now());
        }
        switch.poll(now(), &mut ports);
        for index in ready.clients {
            if let Some(client) = clients.get_mut(index) {
                serve(client, &mut switch, &mut ports);
            }
        }
        clients.retain(|client| !client.gone);
        for (id, port) in &mut ports.ports {
            if !port.gone && !port.writer.is_empty() {
                if let Err(error) = port.writer.flush(&mut port.stream) {
                    if error.kind() != io::ErrorKind::BrokenPipe {
                        eprintln!("ferrite-fabric: port {id}: {error}");
                    }
                    port.gone = true;
                }
            }
        }
        ports.ports.retain(|id, port| {
            if port.gone {
                switch.detach(*id);
            }
            !port.gone
        });
    }
}

/// What woke the loop.
#[derive(Default)]
struct Ready {
    signal: bool,
    listener: bool,
    control: bool,
    readable: Vec<PortId>,
    clients: Vec<usize>,
}

fn wait(
    signals: &UnixStream,
    listener: &Listener,
    control: Option<&Listener>,
    ports: &Ports,
    clients: &[ControlClient],
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let mut fds = vec![
        PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN),
        PollFd::from_borrowed_fd(listener.get().as_fd(), PollFlags::IN),
    ];
    if let Some(control) = control {
        fds.push(PollFd::from_borrowed_fd(
            control.get().as_fd(),
            PollFlags::IN,
        ));
    }
    let first_client = fds.len();
    for client in clients {
        fds.push(PollFd::from_borrowed_fd(
            client.stream.as_fd(),
            PollFlags::IN,
        ));
    }
    let first_port = fds.len();
    for port in ports.ports.values() {
        let mut interest = PollFlags::IN;
        if !port.writer.is_empty() {
            interest |= PollFlags::OUT;
        }
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
            .filter(|index| is_ready(&fds[*index]))
            .map(|index| index - first_client)
            .collect(),
        readable: ports
            .ports
            .keys()
            .zip(&fds[first_port..])
            .filter(|(_, fd)| is_ready(fd))
            .map(|(id, _)| *id)
            .collect(),
    })
}

fn accept(listener: &Listener, mut each: impl FnMut(UnixStream)) -> io::Result<()> {
    loop {
        match listener.get().accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(true)?;
                each(stream);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionAborted
                ) =>
            {
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
}

fn read_port(id: PortId, switch: &mut Switch, ports: &mut Ports, now: u64) {
    // The port is out of the map while its frames are forwarded: a frame never
    // goes back to the port that it came from.
    let Some(mut port) = ports.ports.remove(&id) else {
        return;
    };
    'turn: for _ in 0..READS_PER_TURN {
        match port.reader.fill(&mut port.stream) {
            Ok(0) => {
                port.gone = true;
                break;
            }
            Ok(_) => loop {
                match port.reader.next_frame() {
                    Ok(Some(frame)) => switch.receive(id, frame, now, ports),
                    Ok(None) => break,
                    Err(error) => {
                        eprintln!("ferrite-fabric: port {id} is cut off: {error}");
                        port.gone = true;
                        break 'turn;
                    }
                }
            },
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => {
                if error.kind() != io::ErrorKind::ConnectionReset {
                    eprintln!("ferrite-fabric: port {id}: {error}");
                }
                port.gone = true;
                break;
            }
        }
    }
    ports.ports.insert(id, port);
}

/// Reads requests from a control connection and answers each.
fn serve(client: &mut ControlClient, switch: &mut Switch, ports: &mut Ports) {
    let mut chunk = [0; 4096];
    loop {
        match client.stream.read(&mut chunk) {
            Ok(0) => {
                client.gone = true;
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
    while let Some(end) = client.pending.iter().position(|byte| *byte == b'\n') {
        let line: Vec<u8> = client.pending.drain(..=end).collect();
        if line.trim_ascii().is_empty() {
            continue;
        }
        let answer = serde_json::from_slice::<Request>(&line)
            .map_err(|error| format!("bad request: {error}"))
            .and_then(|request| handle(request, switch, ports))
            .unwrap_or_else(|error| json!({"ok": false, "error": error}));
        let mut text = answer.to_string();
        text.push('\n');
        // Answers are far smaller than a socket's buffer: a client that does
        // not read them loses its connection rather than stopping the switch.
        if client.stream.write_all(text.as_bytes()).is_err() {
            client.gone = true;
            return;
        }
    }
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
        Request::Stats => Ok(json!({
            "ok": true,
            "faults": switch.faults(),
            "ports": switch.report(),
        })),
    }
}
