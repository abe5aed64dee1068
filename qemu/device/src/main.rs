// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device process.

use clap::Parser;
use ferrite_abi::MAX_VECTORS;
use ferrite_device::device::{Device, Frontend};
use ferrite_device::heap;
use ferrite_device::io_loop::IoLoop;
use ferrite_device::logger;
use ferrite_device::vfio_user::Connection;
use ferrite_engine::Misbehaviour;
use ferrite_fabric::connection::owner;
use ferrite_fabric::console;
use ferrite_fabric::socket::Listener;
use ferrite_fabric::switch::Mac;
use rustix::process::Pid;
use std::os::unix::net::UnixStream;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

/// A Ferrite RNIC for a QEMU virtual machine, over vfio-user.
///
/// Start it before QEMU; it ends when QEMU does. QEMU needs memory that can be
/// shared, a PCIe port, and the device by its socket:
///
///   -machine q35,memory-backend=mem
///   -object memory-backend-memfd,id=mem,size=1G,share=on
///   -device pcie-root-port,id=rp0,bus=pcie.0,chassis=1
///   -device '{"driver":"vfio-user-pci","bus":"rp0","x-msg-timeout":60000,
///             "socket":{"type":"unix","path":"SOCKET"}}'
///
/// The VM's Ethernet interface passes through the device:
///
///   -netdev stream,id=n0,addr.type=unix,addr.path=NET,server=off
///   -device virtio-net-pci,netdev=n0,mac=MAC,host_mtu=9000
#[derive(Parser)]
#[command(version, name = "ferrite-device", verbatim_doc_comment)]
struct Options {
    /// Unix socket on which QEMU's vfio-user-pci connects; made last, so that
    /// everything is ready when it is there
    #[arg(long, value_name = "SOCKET")]
    socket: PathBuf,
    /// Unix socket on which QEMU's `-netdev stream` connects; without it the VM
    /// has no Ethernet interface through this device
    #[arg(long, value_name = "SOCKET")]
    net: Option<PathBuf>,
    /// Unix socket of the ferrite-fabric to connect to; it must be there at the
    /// start and is connected again if it goes away. Without it the link is down
    #[arg(long, value_name = "SOCKET")]
    uplink: Option<PathBuf>,
    /// Ethernet address; the same as the VM's interface has, by which the
    /// driver finds it
    #[arg(long, value_name = "ADDRESS", default_value = "52:54:00:fe:00:01", value_parser = unicast)]
    mac: Mac,
    /// Unix socket that gives whoever connects all counters as one JSON document
    #[arg(long, value_name = "SOCKET")]
    counters: Option<PathBuf>,
    /// Unix socket for control: JSON lines {"cmd":"counters"}, {"cmd":"fatal"},
    /// {"cmd":"link","up":false}, {"cmd":"misbehave",...}, {"cmd":"die"}
    #[arg(long, value_name = "SOCKET")]
    control: Option<PathBuf>,
    /// Do not keep to the specification, to see what the driver does: JSON as in the control
    /// request, e.g. {"seed":7,"answers":{"delay":0.5},"nonsense":{"replies":0.1}}
    #[arg(long, value_name = "JSON", value_parser = misbehaviour)]
    misbehave: Option<Misbehaviour>,
    /// MSI-X vectors
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=MAX_VECTORS as i64))]
    vectors: u16,
    /// Let the guest send from other Ethernet addresses than the device's, as
    /// bridges, macvlans and bonds in it do. Without it such frames are dropped,
    /// and no other port of the fabric can send from the device's address
    #[arg(long)]
    any_source_mac: bool,
    /// What to write to standard error
    #[arg(long, value_name = "LEVEL", default_value = "warn", value_parser = LEVELS)]
    log: String,
}

/// Log levels, least first.
const LEVELS: [&str; 5] = ["off", "error", "warn", "info", "debug"];

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
    let text = |error: std::io::Error| error.to_string();
    let listen = |path: Option<PathBuf>| {
        path.as_deref()
            .map(|path| Listener::bind(path)?.without_descriptors())
            .transpose()
            .map_err(text)
    };
    let device = Arc::new(Device::new(options.mac.0, options.vectors.into()).map_err(text)?);
    if let Some(rules) = options.misbehave {
        device.lock().misbehave(rules)?;
    }
    if options.any_source_mac {
        device.lock().allow_any_source();
    }
    let net = listen(options.net)?;
    let counters = listen(options.counters)?;
    let control = listen(options.control)?;
    let mut io_loop = IoLoop::new(&device, options.uplink, net, counters, control).map_err(text)?;
    io_loop.connect_uplink().map_err(text)?;
    // Signals arrive as bytes, so that the socket files are always removed.
    let (signals, signal_end) = UnixStream::pair().map_err(text)?;
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_end
            .try_clone()
            .and_then(|end| signal_hook::low_level::pipe::register(signal, end))
            .map_err(text)?;
    }
    let listener = Listener::bind(&options.socket).map_err(text)?;
    let accepting = listener.get().try_clone().map_err(text)?;
    device.listen(listener.get().try_clone().map_err(text)?);
    let served = Arc::clone(&device);
    thread::Builder::new()
        .name("vfio-user".into())
        .spawn(move || {
            // Without an answer the guest would hang until QEMU's patience ends.
            let result = catch_unwind(AssertUnwindSafe(|| serve(&accepting, &served)))
                .unwrap_or_else(|_| Err("internal error; the device is gone for the guest".into()));
            served.finish(result);
        })
        .map_err(text)?;
    let result = io_loop.run(&signals);
    device.hang_up();
    result
}

/// Serves one virtual machine monitor until it goes away.
fn serve(listener: &std::os::unix::net::UnixListener, device: &Device) -> Result<(), String> {
    let (stream, _) = listener.accept().map_err(|error| {
        device.attach(None);
        format!("--socket: cannot accept a connection: {error}")
    })?;
    let peer = owner(&stream)
        .and_then(|owner| owner.pid)
        .and_then(Pid::from_raw);
    match stream.try_clone() {
        Ok(monitor) => device.attach(Some(monitor)),
        Err(error) => {
            device.attach(None);
            return Err(format!("--socket: {error}"));
        }
    }
    let mut frontend = Frontend::new(device, peer);
    Connection::new(stream)
        .serve(&mut frontend)
        .map_err(|error| format!("the connection to QEMU: {error}"))
}
