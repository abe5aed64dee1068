// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device process.

mod functions;

use crate::functions::FunctionOptions;
use clap::builder::RangedI64ValueParser;
use clap::{Parser, ValueEnum};
use ferrite_abi::{DOORBELL_MAX_LOG_STRIDE, MAX_MESSAGES, QUEUE_NUMBER_MASK};
use ferrite_device::adapter::Adapter;
use ferrite_device::function::{Frontend, Function};
use ferrite_device::heap;
use ferrite_device::interrupts::Kinds;
use ferrite_device::io_loop::IoLoop;
use ferrite_device::keeper::{self, Keeper};
use ferrite_device::logger;
use ferrite_device::mapping::{Mapping, Row, Vlans};
use ferrite_device::vfio_user::Connection;
use ferrite_engine::cq::MAX_CQ;
use ferrite_engine::multicast::MULTICAST_QPN;
use ferrite_engine::qp::{GSI_QPN, MAX_QP};
use ferrite_engine::srq::MAX_SRQ;
use ferrite_engine::tpt::MAX_TAGS;
use ferrite_engine::{Config, Misbehaviour, Personality};
use ferrite_fabric::connection::owner;
use ferrite_fabric::console;
use ferrite_fabric::descriptors::allow_descriptors;
use ferrite_fabric::socket::Listener;
use ferrite_fabric::switch::Mac;
use rustix::net::{recv, RecvFlags};
use rustix::process::Pid;
use std::ops::RangeInclusive;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{self, Sender};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

/// A Ferrite RNIC for a QEMU virtual machine, over vfio-user.
///
/// Start it before QEMU; it ends when QEMU does, with several functions when each had a QEMU and
/// all of these have ended. QEMU needs memory that can be
/// shared, a PCIe port, and the device by its socket:
///
///   -machine q35,memory-backend=mem
///   -object memory-backend-memfd,id=mem,size=1G,share=on
///   -device pcie-root-port,id=rp0,bus=pcie.0,chassis=1
///   -device '{"driver":"vfio-user-pci","bus":"rp0","x-msg-timeout":60000,
///             "socket":{"type":"unix","path":"SOCKET"}}'
///
/// With `--personality combined` the device is the VM's Ethernet interface, too.
/// Else that is another one, whose frames pass through the device:
///
///   -netdev stream,id=n0,addr.type=unix,addr.path=NET,server=off
///   -device virtio-net-pci,netdev=n0,mac=MAC,host_mtu=9000
#[derive(Parser)]
#[command(version, name = "ferrite-device", verbatim_doc_comment)]
struct Options {
    /// Unix socket on which QEMU's vfio-user-pci connects; made last, so that
    /// everything is ready when it is there
    #[arg(long, value_name = "SOCKET", required_unless_present = "function")]
    socket: Option<PathBuf>,
    /// One of several functions behind one port, each for a virtual machine of its own; once for
    /// each of them, in place of --socket, --net, --mac, --personality and --any-source-mac:
    /// socket=PATH,mac=ADDRESS[,personality=MODEL][,net=PATH][,any-source-mac][,vlans=N+N...]
    /// [,qps=N][,cqs=N][,srqs=N][,tags=N]. With `vlans` it sends and gets frames of these VLANs
    /// alone (0: without a tag). The numbers are what it has of all that there are; without them
    /// functions have equal shares
    #[arg(long, value_name = "FUNCTION", value_parser = functions::parse, conflicts_with_all = ["socket", "net", "mac", "personality", "any_source_mac"])]
    function: Vec<FunctionOptions>,
    /// Unix socket on which QEMU's `-netdev stream` connects; without it the VM
    /// has no Ethernet interface through this device
    #[arg(long, value_name = "SOCKET")]
    net: Option<PathBuf>,
    /// Unix socket of the ferrite-fabric to connect to; it must be there at the
    /// start and is connected again if it goes away. Without it the link is down
    #[arg(long, value_name = "SOCKET")]
    uplink: Option<PathBuf>,
    /// What the device presents itself as
    #[arg(long, value_name = "MODEL", value_enum, default_value = "rdma")]
    personality: Model,
    /// Ethernet address; the same as the VM's interface has, by which the
    /// driver finds it
    #[arg(long, value_name = "ADDRESS", default_value = "52:54:00:fe:00:01", value_parser = unicast)]
    mac: Mac,
    /// Unix socket that gives whoever connects all counters as one JSON document
    #[arg(long, value_name = "SOCKET")]
    counters: Option<PathBuf>,
    /// Unix socket for control: JSON lines {"cmd":"counters"}, {"cmd":"fatal"},
    /// {"cmd":"link","up":false}, {"cmd":"misbehave",...}, {"cmd":"memory-error",...},
    /// {"cmd":"channel",...}, {"cmd":"die"}
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Do not keep to the specification, to see what the driver does: JSON as in the control
    /// request, e.g. {"seed":7,"answers":{"delay":0.5},"nonsense":{"replies":0.1}}
    #[arg(long, value_name = "JSON", value_parser = misbehaviour)]
    misbehave: Option<Misbehaviour>,
    /// Ways to interrupt that the device offers, of which a driver takes one
    #[arg(long, value_name = "KINDS", value_enum, value_delimiter = ',', default_values_t = [Interrupt::Msix, Interrupt::Msi, Interrupt::Intx])]
    interrupts: Vec<Interrupt>,
    /// MSI-X vectors; MSI has the largest power of two of them, 32 at most
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=MAX_MESSAGES as i64))]
    vectors: u16,
    /// Message numbers that event queues can have, no fewer than there are vectors, onto which
    /// they fold; without it as many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=MAX_MESSAGES as i64))]
    messages: Option<u16>,
    /// First number of a queue pair; there are 16384 from there on, besides number 1
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = first(GSI_QPN + 1..=MULTICAST_QPN - 1, MAX_QP))]
    qp_first: u32,
    /// First number of a completion queue; there are 16384 from there on
    #[arg(long, value_name = "NUMBER", default_value_t = 0, value_parser = first(0..=QUEUE_NUMBER_MASK, MAX_CQ))]
    cq_first: u32,
    /// First number of a shared receive queue; there are 8192 from there on
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = first(0..=QUEUE_NUMBER_MASK, MAX_SRQ))]
    srq_first: u32,
    /// First index of a tag; there is room for 1048576 from there on
    #[arg(long, value_name = "INDEX", default_value_t = 1, value_parser = first(1..=QUEUE_NUMBER_MASK, MAX_TAGS))]
    tag_first: u32,
    /// Tags, and so memory regions and windows together
    #[arg(long, value_name = "N", default_value_t = MAX_TAGS, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_TAGS)))]
    tags: u32,
    /// Doorbell pages: one for the kernel, and one for each process that uses the device. With
    /// the stride they make the BAR, which is 256 MiB at most
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=16384))]
    doorbell_pages: u32,
    /// From one doorbell page to the next, as a power of two in bytes: 12 for 4 KiB, 16 for
    /// 64 KiB. A guest with larger pages than that uses only as many as it has pages there
    #[arg(long, value_name = "LOG2", default_value_t = 12, value_parser = clap::value_parser!(u8).range(12..=DOORBELL_MAX_LOG_STRIDE as i64))]
    doorbell_stride: u8,
    /// Let the guest send from other Ethernet addresses than the device's, as
    /// bridges, macvlans and bonds in it do. Without it such frames are dropped,
    /// and no other port of the fabric can send from the device's address
    #[arg(long)]
    any_source_mac: bool,
    /// What to write to standard error
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = LEVELS)]
    log: String,
}

/// What the function presents itself as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Model {
    /// RDMA alone, beside the VM's Ethernet interface
    Rdma,
    /// RDMA and Ethernet in one function: the VM needs no other card
    Combined,
    /// Ethernet alone
    Network,
}

impl From<Model> for Personality {
    fn from(model: Model) -> Self {
        match model {
            Model::Rdma => Self::Rdma,
            Model::Combined => Self::Combined,
            Model::Network => Self::Network,
        }
    }
}

/// A way to interrupt.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Interrupt {
    /// By the entries of the MSI-X table
    Msix,
    /// By MSI vectors
    Msi,
    /// By the interrupt pin
    Intx,
}

/// The ways to interrupt of a device with these options.
fn kinds(options: &Options) -> Kinds {
    let all = Kinds::all(options.vectors);
    let has = |kind| options.interrupts.contains(&kind);
    Kinds {
        msix: if has(Interrupt::Msix) { all.msix } else { 0 },
        msi: if has(Interrupt::Msi) { all.msi } else { 0 },
        pin: has(Interrupt::Intx),
    }
}

/// The largest doorbell BAR: behind a PCIe port it has to find its place below 4 GiB, since reads
/// of it are not to be prefetched.
const MAX_DOORBELL_BAR: u64 = 256 << 20;

/// Log levels, least first.
const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

/// A first number, so that all `count` lie in a range.
fn first(within: RangeInclusive<u32>, count: u32) -> RangedI64ValueParser<u32> {
    let last = within.end() - (count - 1);
    clap::value_parser!(u32).range(i64::from(*within.start())..=i64::from(last))
}

fn unicast(text: &str) -> Result<Mac, String> {
    let mac: Mac = text.parse()?;
    if mac.0[0] & 1 == 1 || mac.0 == [0; 6] {
        return Err("an interface cannot have this address".into());
    }
    Ok(mac)
}

fn misbehaviour(text: &str) -> Result<Misbehaviour, String> {
    let rules: Misbehaviour = serde_json::from_str(text).map_err(|error| error.to_string())?;
    rules.check().map(|()| rules)
}

fn main() -> ExitCode {
    if std::env::args_os().skip(1).eq([keeper::OPTION]) {
        return match keeper::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let options = Options::parse();
    // The option's parser knows the same names.
    logger::init(options.log.parse().unwrap_or(log::LevelFilter::Warn));
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::line(format_args!("ferrite-device: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<(), String> {
    // Each vector of each function takes one; with fewer there are fewer.
    allow_descriptors();
    let text = |error: std::io::Error| error.to_string();
    let listen = |path: Option<PathBuf>| {
        path.as_deref()
            .map(|path| Listener::bind(path)?.without_descriptors())
            .transpose()
            .map_err(text)
    };
    let kinds = kinds(&options);
    let messages = options.messages.unwrap_or(options.vectors);
    if messages < options.vectors {
        return Err(format!(
            "--messages: {} vectors for {messages} message numbers are too many",
            options.vectors
        ));
    }
    let mut config = Config::new(options.mac.0, messages);
    config.personality = options.personality.into();
    config.any_source = options.any_source_mac;
    config.qps.first = options.qp_first;
    config.cqs.first = options.cq_first;
    config.srqs.first = options.srq_first;
    config.tags.first = options.tag_first;
    config.tags.count = options.tags;
    config.doorbell_pages = options.doorbell_pages;
    config.doorbell_log_stride = options.doorbell_stride;
    if config.doorbell_bar_size() > MAX_DOORBELL_BAR {
        return Err(format!(
            "--doorbell-pages and --doorbell-stride: {} pages of {} bytes and what is behind them \
             do not fit in a BAR of {} MiB",
            options.doorbell_pages,
            1u32 << options.doorbell_stride,
            MAX_DOORBELL_BAR >> 20,
        ));
    }
    let (rows, configs, doors) = if let Some(socket) = options.socket {
        let row = Row {
            mac: options.mac,
            any_source: options.any_source_mac,
            vlans: Vlans::all(),
        };
        (vec![row], vec![config], vec![(socket, options.net)])
    } else {
        let (rows, configs) = functions::split(&config, &options.function)?;
        let doors = options.function.into_iter();
        let doors = doors.map(|function| (function.socket, function.net));
        (rows, configs, doors.collect())
    };
    let mapping = Mapping::new(rows)?;
    let keeper = unless_kept(Keeper::start()).map(Arc::new);
    let has_uplink = options.uplink.is_some();
    let adapter = Adapter::new(mapping, configs, kinds, has_uplink).map_err(text)?;
    let adapter = Arc::new(adapter);
    if let Some(rules) = options.misbehave {
        for function in adapter.functions() {
            function.lock().misbehave(rules)?;
        }
    }
    let mut nets = Vec::new();
    for (_, net) in &doors {
        nets.push(listen(net.clone())?);
    }
    let counters = listen(options.counters)?;
    let control = listen(options.control)?;
    let net = match adapter.alone() {
        Some(_) => nets.pop().flatten(),
        None => None,
    };
    let mut io_loop =
        IoLoop::new(&adapter, options.uplink, net, counters, control).map_err(text)?;
    io_loop.connect_uplink().map_err(text)?;
    // Signals arrive as bytes, so that the socket files are always removed.
    let (signals, signal_end) = UnixStream::pair().map_err(text)?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_end
            .try_clone()
            .and_then(|end| signal_hook::low_level::pipe::register(signal, end))
            .map_err(text)?;
    }
    // Nobody says anything: it ends with the last who has an end of it.
    let (moving, moved) = mpsc::channel();
    for (number, net) in nets.into_iter().enumerate() {
        move_frames(&adapter, number, net, moving.clone()).map_err(text)?;
    }
    drop(moving);
    let mut listeners = Vec::new();
    for (number, (socket, _)) in doors.iter().enumerate() {
        let listener = Listener::bind(socket).map_err(text)?;
        if let Some(keeper) = &keeper {
            unless_kept(keeper.keep_door(listener.get()));
        }
        let accepting = listener.get().try_clone().map_err(text)?;
        let door = listener.get().try_clone().map_err(text)?;
        if let Some(function) = adapter.functions().get(number) {
            function.listen(door);
        }
        listeners.push(listener);
        let (adapter, keeper) = (Arc::clone(&adapter), keeper.clone());
        thread::Builder::new()
            .name("vfio-user".into())
            .spawn(move || serve_all(&accepting, keeper.as_deref(), &adapter, number))
            .map_err(text)?;
    }
    // The threads have theirs: it goes when nobody is served any more.
    drop(keeper);
    // However this ends, the monitor has to read the end of its connection: a reset of it ends some of them.
    let result = catch_unwind(AssertUnwindSafe(|| io_loop.run(&signals)))
        .unwrap_or_else(|_| Err(BROKEN.into()));
    adapter.hang_up();
    // They take their sockets' files along.
    adapter.port().finish(Ok(()));
    adapter.port().wake_functions(u64::MAX);
    let _ = moved.recv_timeout(LEAVE);
    result
}

/// How long the end of the process waits for the threads of functions.
const LEAVE: Duration = Duration::from_secs(1);

/// How long a function of several waits when nobody can be accepted.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// What a guest is left with after a mistake of this program.
const BROKEN: &str = "internal error; the device is gone for the guest";

/// Moves the frames of one function of several in a thread of its own. A mistake there takes that
/// function from its guest, and no other.
fn move_frames(
    adapter: &Arc<Adapter>,
    number: usize,
    net: Option<Listener>,
    moving: Sender<()>,
) -> std::io::Result<()> {
    let adapter = Arc::clone(adapter);
    let run = move || {
        let _moving = moving;
        let Some(function) = adapter.functions().get(number) else {
            return;
        };
        let result = catch_unwind(AssertUnwindSafe(|| {
            IoLoop::of_function(&adapter, function, net)?.run_function()
        }));
        function.hang_up();
        switch_off(function);
        let reason = match result {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => BROKEN.into(),
        };
        log::error!("function {number}: {reason}");
    };
    thread::Builder::new()
        .name(format!("function {number}"))
        .spawn(run)?;
    Ok(())
}

/// Takes a function of several from service: what is left of it neither reaches its guest's memory nor is
/// in a state that others run into, nor keeps what they lend.
fn switch_off(function: &Function) {
    if catch_unwind(AssertUnwindSafe(|| function.lock().power_off())).is_err() {
        log::error!("{BROKEN}");
    }
    function.close_inbox();
}

/// Serves the virtual machine monitor of a function: one, if it is alone, or one after the other.
fn serve_all(door: &UnixListener, keeper: Option<&Keeper>, adapter: &Adapter, number: usize) {
    let Some(function) = adapter.functions().get(number) else {
        return;
    };
    loop {
        // Without an answer the guest would hang until QEMU's patience ends.
        let mut has_come = false;
        let came = || {
            has_come = true;
            adapter.came(number);
        };
        let result = catch_unwind(AssertUnwindSafe(|| serve(door, keeper, function, came)));
        if !has_come && result.is_ok() && adapter.alone().is_none() && !function.is_leaving() {
            // There may be descriptors for one later.
            log::warn!("function {number}: nobody can be accepted for now");
            thread::sleep(ACCEPT_AGAIN);
            function.attach_another();
            continue;
        }
        let broken = result.is_err();
        let result = result.unwrap_or_else(|_| Err(BROKEN.into()));
        let is_last = adapter.left(number);
        if adapter.alone().is_some() {
            adapter.port().finish(result);
            return;
        }
        if let Err(error) = &result {
            log::error!("function {number}: {error}");
        }
        if broken || function.is_leaving() {
            function.hang_up();
            switch_off(function);
        } else {
            function.power_off();
        }
        if is_last {
            adapter.port().finish(Ok(()));
        }
        if broken || function.is_leaving() {
            return;
        }
    }
}

/// Says so where there is no keeper any more, or never was: it is a precaution, and the device works without.
fn unless_kept<T>(result: std::io::Result<T>) -> Option<T> {
    result
        .inspect_err(|error| {
            log::warn!(
                "no keeper ({error}): if this process is killed, QEMU may end with it instead of \
                 losing a device"
            );
        })
        .ok()
}

/// Accepts a virtual machine monitor: the first who connects and says something. Who goes without a word
/// only wanted to know whether somebody listens.
fn accept(listener: &UnixListener, device: &Function) -> std::io::Result<UnixStream> {
    loop {
        let (stream, _) = listener.accept()?;
        // Whoever ends the process while nothing is said hangs up on him.
        device.attach(Some(stream.try_clone()?));
        let said = rustix::io::retry_on_intr(|| recv(&stream, &mut [0; 1], RecvFlags::PEEK));
        if said.is_ok_and(|(_, bytes)| bytes > 0) {
            return Ok(stream);
        }
        device.attach_another();
    }
}

/// Serves one virtual machine monitor until it goes away.
fn serve(
    listener: &UnixListener,
    keeper: Option<&Keeper>,
    device: &Function,
    came: impl FnOnce(),
) -> Result<(), String> {
    let stream = accept(listener, device).map_err(|error| {
        device.attach(None);
        format!("cannot accept a connection: {error}")
    })?;
    let peer = owner(&stream)
        .and_then(|owner| owner.pid)
        .and_then(Pid::from_raw);
    // From the first byte on: what was closed with something unread would be a reset.
    came();
    if let Some(keeper) = keeper {
        unless_kept(keeper.keep(&stream));
    }
    let mut frontend = Frontend::new(device, peer);
    Connection::new(stream)
        .serve(&mut frontend)
        .map_err(|error| format!("the connection to QEMU: {error}"))
}
