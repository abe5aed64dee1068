// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device binary, seen by a vfio-user client and from its sockets.

#[path = "../../fabric/tests/common/mod.rs"]
mod common;
#[path = "../../fabric/tests/namespaces/mod.rs"]
mod namespaces;
#[path = "../../fabric/tests/users/mod.rs"]
mod users;

use common::{stop, until, DEADLINE};
use ferrite_abi as abi;
use ferrite_conformance::transport::{
    self, CONFIG, INTX, MSI, MSIX, SET_EVENTFD, SET_NONE, UNMASK_EVENTFD, UNMASK_NONE,
};
use ferrite_device::guest_memory::Passing;
use ferrite_engine::memory::ENOUGH_ROOM;
use ferrite_engine::testing::{Node, Peer, QpOptions, Region, SendWork};
use ferrite_engine::{Loan, Medium};
use ferrite_fabric::connection::owner;
use ferrite_fabric::descriptors;
use ferrite_fabric::framing::{Reader, Writer, MAX_FRAME};
use ferrite_fabric::ring::{self, Consumer, Producer, Record};
use ferrite_fabric::shortcut::{is_message, Message, ShortcutId};
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake;
use rustix::fs::MemfdFlags;
use rustix::process::{kill_process, prlimit, Pid, Resource, Rlimit, Signal};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vfio_user::Client;

const MAC: [u8; 6] = [0x52, 0x54, 0, 0xfe, 0, 1];
const NEIGHBOUR: Mac = Mac([2; 6]);

struct Process {
    child: Child,
    directory: PathBuf,
}

impl Process {
    fn directory(name: &str) -> PathBuf {
        let directory =
            std::env::temp_dir().join(format!("ferrite-device-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    fn start(name: &str, options: &[&str]) -> Self {
        Self::start_in(Self::directory(name), options)
    }

    fn start_in(directory: PathBuf, options: &[&str]) -> Self {
        let command = Command::new(env!("CARGO_BIN_EXE_ferrite-device"));
        Self::start_by(command, directory, options)
    }

    /// Starts it by a command that lacks its options alone.
    fn start_by(mut command: Command, directory: PathBuf, options: &[&str]) -> Self {
        for name in ["socket", "counters", "control", "net"] {
            command.arg(format!("--{name}")).arg(directory.join(name));
        }
        let child = command
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Self { child, directory };
        until(|| process.path("socket").exists());
        process
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn client(&self) -> Client {
        // The file is there a moment before somebody listens.
        let mut client = None;
        until(|| {
            client = Client::new(&self.path("socket")).ok();
            client.is_some()
        });
        client.unwrap()
    }

    fn counters(&self) -> Value {
        let mut text = String::new();
        connect(&self.path("counters"))
            .read_to_string(&mut text)
            .unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn control(&self, request: &str) -> Value {
        let mut stream = connect(&self.path("control"));
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// How the process ends, and what it said.
    fn end(&mut self) -> (ExitStatus, String) {
        let mut status = None;
        until(|| {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            stderr.read_to_string(&mut text).unwrap();
        }
        (status.unwrap(), text)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn connect(path: &Path) -> UnixStream {
    // The file is there a moment before somebody listens.
    let mut stream = None;
    until(|| {
        stream = UnixStream::connect(path).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

fn read<const N: usize>(client: &mut Client, region: u32, offset: u64) -> [u8; N] {
    transport::read(client, region, offset).unwrap()
}

fn read32(client: &mut Client, region: u32, offset: u64) -> u32 {
    u32::from_le_bytes(read(client, region, offset))
}

fn register(client: &mut Client, offset: usize) -> u32 {
    read32(client, abi::BAR_REGISTERS, offset as u64)
}

fn set_bus_master(client: &mut Client) {
    client.region_write(CONFIG, 4, &6u16.to_le_bytes()).unwrap();
}

fn set_msix(client: &mut Client, on: bool) {
    let control = capability(client, 0x11) + 2;
    let value: u16 = if on { 1 << 15 } else { 0 };
    client
        .region_write(CONFIG, control, &value.to_le_bytes())
        .unwrap();
}

fn event() -> OwnedFd {
    transport::event().unwrap()
}

fn fired(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

fn memfd(size: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, size).unwrap();
    fd
}

/// Offset of the capability with this number.
fn capability(client: &mut Client, id: u8) -> u64 {
    let found = transport::find_capability(client, id).unwrap();
    found.unwrap_or_else(|| panic!("there is no capability {id:#x}"))
}

#[test]
fn identity_regions_and_interrupts_are_announced() {
    let process = Process::start("identity", &["--vectors", "17"]);
    let mut client = process.client();
    assert_eq!(
        read32(&mut client, CONFIG, 0),
        (u32::from(abi::PCI_DEVICE_ID) << 16) | u32::from(abi::PCI_VENDOR_ID)
    );
    for (bar, size) in [
        (abi::BAR_REGISTERS, abi::BAR_REGISTERS_SIZE),
        (abi::BAR_DOORBELLS, 8 << 20),
        (abi::BAR_MSIX, abi::BAR_MSIX_SIZE),
        (CONFIG, 4096),
        (1, 0),
    ] {
        let region = client.region(bar).unwrap();
        assert_eq!(region.size, size as u64, "region {bar}");
        // Not to be mapped, or writes would not be posted.
        assert!(region.file_offset.is_none());
        assert_eq!(region.flags & 4, 0);
    }
    for (kind, count) in [(INTX, 1), (MSI, 16), (MSIX, 17)] {
        assert_eq!(client.get_irq_info(kind).unwrap().count, count);
    }
    assert_eq!(read(&mut client, CONFIG, 0x3d), [1]);
    let msix = capability(&mut client, 0x11);
    assert_eq!((read32(&mut client, CONFIG, msix) >> 16) & 0x7ff, 16);
    capability(&mut client, 0x01);
    capability(&mut client, 0x10);
    let msi = capability(&mut client, 0x05);
    assert_eq!((read32(&mut client, CONFIG, msi) >> 17) & 7, 4);
    assert_eq!(register(&mut client, abi::REG_MAGIC), abi::MAGIC);
    assert_eq!(register(&mut client, abi::REG_MESSAGES), 17);
    let mac = read::<8>(&mut client, abi::BAR_REGISTERS, abi::REG_MAC as u64);
    assert_eq!(mac[..6], MAC);
    let counters = process.counters();
    assert_eq!(counters["mmio"]["registers"]["reads"], 3);
    assert_eq!(counters["mmio"]["registers"]["writes"], 0);
}

#[test]
fn numbers_and_places_are_those_of_the_options() {
    for (pages, stride, bar) in [
        (1024, 12, 8 << 20),
        (64, 14, 2 << 20),
        (1024, 16, 128 << 20),
    ] {
        let options = [
            format!("--doorbell-pages={pages}"),
            format!("--doorbell-stride={stride}"),
            "--qp-first=4660".into(),
            "--cq-first=77".into(),
            "--srq-first=5".into(),
            "--tag-first=20480".into(),
            "--tags=4097".into(),
        ];
        let process = Process::start("places", &options.each_ref().map(|option| &**option));
        let mut client = process.client();
        assert_eq!(client.region(abi::BAR_DOORBELLS).unwrap().size, bar);
        // The same as the bus says.
        let at = 0x10 + 4 * u64::from(abi::BAR_DOORBELLS);
        client.region_write(CONFIG, at, &[0xff; 8]).unwrap();
        let value = u64::from_le_bytes(read(&mut client, CONFIG, at));
        assert_eq!(!(value & !0xf) + 1, bar);
        assert_eq!(register(&mut client, abi::REG_DOORBELL_PAGES), pages);
        assert_eq!(register(&mut client, abi::REG_DOORBELL_STRIDE), stride);
        let wide = |client: &mut Client, offset: usize| {
            u64::from_le_bytes(read(client, abi::BAR_REGISTERS, offset as u64))
        };
        assert_eq!(wide(&mut client, abi::REG_DOORBELL_OFFSET), 0);
        let memory = wide(&mut client, abi::REG_DEVICE_MEMORY_OFFSET);
        let size = wide(&mut client, abi::REG_DEVICE_MEMORY_SIZE);
        assert_eq!((memory, size), (u64::from(pages) << stride, 1 << 20));
        let word = 0x1122_3344_5566_7788u64.to_le_bytes();
        let last = memory + size - 8;
        client
            .region_write(abi::BAR_DOORBELLS, last, &word)
            .unwrap();
        assert_eq!(read::<8>(&mut client, abi::BAR_DOORBELLS, last), word);
        let mut driver = Driver::start(&mut client, true);
        driver.prepare_cq(&mut client, 78, pages - 1);
        let caps: abi::DeviceCaps = driver.query(&mut client, abi::CommandOpcode::QueryDevice);
        assert_eq!((caps.qp_first, caps.qp_count), (4660, 16384));
        assert_eq!((caps.cq_first, caps.cq_count), (77, 16384));
        assert_eq!((caps.srq_first, caps.srq_count), (5, 8192));
        assert_eq!((caps.tag_first, caps.tag_count), (20480, 4097));
        // It answers to the page it was made with, wherever that is.
        let arm = abi::CompletionDoorbell {
            cqn: 78,
            seen: 0,
            sequence: 0,
            solicited: false,
        };
        for (page, bad) in [(pages - 1, 0), (pages - 2, 1)] {
            let at = (u64::from(page) << stride) + abi::DOORBELL_COMPLETION as u64;
            client
                .region_write(abi::BAR_DOORBELLS, at, &arm.encode().to_le_bytes())
                .unwrap();
            // What was posted has been dealt with when a read is answered.
            register(&mut client, abi::REG_STATUS);
            assert_eq!(process.counters()["engine"]["bad_doorbells"], bad);
        }
        assert_eq!(process.counters()["mmio"]["cq_doorbell"]["writes"], 2);
    }
}

#[test]
fn the_process_ends_with_its_client_and_takes_its_sockets_along() {
    let mut process = Process::start("hangup", &[]);
    drop(process.client());
    let (status, text) = process.end();
    assert!(status.success(), "{text}");
    let left = std::fs::read_dir(&process.directory).unwrap();
    let left: Vec<_> = left.map(|file| file.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn who_connects_and_goes_without_a_word_leaves_the_device_to_its_monitor() {
    let mut process = Process::start("visitors", &[]);
    let socket = process.path("socket");
    for _ in 0..20 {
        drop(connect(&socket));
    }
    // Also one who asks because the lock is gone.
    std::fs::remove_file(process.path("socket.lock")).unwrap();
    let error = ferrite_fabric::socket::Listener::bind(&socket).err();
    assert_eq!(error.unwrap().kind(), std::io::ErrorKind::AddrInUse);
    register(&mut process.client(), abi::REG_STATUS);
    let (status, text) = process.end();
    assert!(status.success(), "{text}");
}

#[test]
fn who_connects_and_says_nothing_reads_the_end_of_a_device_that_goes() {
    let mut process = Process::start("silent", &[]);
    drop(connect(&process.path("socket")));
    let mut silent = connect(&process.path("socket"));
    kill_process(Pid::from_child(&process.child), Signal::TERM).unwrap();
    process.end();
    assert_eq!(silent.read(&mut [0]).expect("the end"), 0);
}

#[test]
fn an_eventfd_fires_and_survives_a_function_reset() {
    let process = Process::start("msix", &[]);
    let mut client = process.client();
    let (a, b) = (event(), event());
    client
        .set_irqs(MSIX, SET_EVENTFD, 3, 2, &[a.as_raw_fd(), b.as_raw_fd()])
        .unwrap();
    client.set_irqs(MSIX, SET_NONE, 4, 1, &[]).unwrap();
    assert!(fired(&b));
    assert!(!fired(&a));
    set_bus_master(&mut client);
    assert_eq!(process.counters()["bus_master"], true);
    let pcie = capability(&mut client, 0x10);
    client
        .region_write(CONFIG, pcie + 8, &0x8000u16.to_le_bytes())
        .unwrap();
    assert_eq!(read::<2>(&mut client, CONFIG, 4), [0, 0]);
    let counters = process.counters();
    assert_eq!(counters["resets"]["function"], 1);
    assert_eq!(counters["bus_master"], false);
    client.set_irqs(MSIX, SET_NONE, 3, 1, &[]).unwrap();
    assert!(fired(&a));
    client.reset().unwrap();
    assert_eq!(process.counters()["resets"]["device"], 1);
}

/// Control ring and event queue 0 in guest memory, and the commands to start.
struct Driver {
    memory: OwnedFd,
    interrupt: OwnedFd,
    /// Commands so far.
    commands: u32,
}

impl Driver {
    const BASE: u64 = 0x4000_0000;
    const BOOT: u64 = 0;
    const RING: u64 = 0x1000;
    const EVENTS: u64 = 0x2000;
    const SIZE: u64 = 0x10_0000;

    fn start(client: &mut Client, bus_master: bool) -> Self {
        Self::start_with(client, bus_master, Some(5))
    }

    /// With an MSI-X vector for event queue 0, or none.
    fn start_with(client: &mut Client, bus_master: bool, vector: Option<u32>) -> Self {
        use abi::Plain;
        let memory = memfd(Self::SIZE);
        client
            .dma_map(0, Self::BASE, Self::SIZE, memory.as_raw_fd())
            .unwrap();
        let interrupt = event();
        if let Some(vector) = vector {
            client
                .set_irqs(MSIX, SET_EVENTFD, vector, 1, &[interrupt.as_raw_fd()])
                .unwrap();
            set_msix(client, true);
        }
        if bus_master {
            set_bus_master(client);
        }
        let mut boot = abi::BootBlock::zeroed();
        boot.cqp_ring = Self::BASE + Self::RING;
        boot.eq0_ring = Self::BASE + Self::EVENTS;
        boot.cqp_log_entries = 4;
        boot.eq0_log_entries = 6;
        boot.eq0_message = 5;
        rustix::io::pwrite(&memory, boot.as_bytes(), Self::BOOT).unwrap();
        let mut write = |offset: usize, bytes: &[u8]| {
            client
                .region_write(abi::BAR_REGISTERS, offset as u64, bytes)
                .unwrap();
        };
        let version = (u32::from(abi::ABI_MAJOR) << 16) | u32::from(abi::ABI_MINOR);
        write(abi::REG_DRIVER_VERSION, &version.to_le_bytes());
        write(abi::REG_DRIVER_FEATURES, &0u64.to_le_bytes());
        write(abi::REG_BOOT, &(Self::BASE + Self::BOOT).to_le_bytes());
        write(abi::REG_CONTROL, &abi::CONTROL_ENABLE.to_le_bytes());
        Self {
            memory,
            interrupt,
            commands: 0,
        }
    }
}

fn status(client: &mut Client) -> abi::Status {
    abi::Status(register(client, abi::REG_STATUS))
}

#[test]
fn a_driver_starts_the_device_and_a_command_raises_its_vector() {
    let process = Process::start("driver", &[]);
    let mut client = process.client();
    let driver = Driver::start(&mut client, true);
    assert_eq!(status(&mut client).state(), Some(abi::DeviceState::Running));
    let arm = abi::EventDoorbell {
        eqn: 0,
        read_index: 0,
        relative: false,
        valid: true,
        arm: true,
        quiet: false,
        disarm: false,
    };
    let mut doorbell = |offset: usize, value: u64| {
        client
            .region_write(abi::BAR_DOORBELLS, offset as u64, &value.to_le_bytes())
            .unwrap();
    };
    doorbell(abi::DOORBELL_EVENT_QUEUE, arm.encode());
    // An entry of zeroes is no known command; it is answered all the same.
    doorbell(abi::DOORBELL_CONTROL, 1);
    until(|| fired(&driver.interrupt));
    let mut entry = [0; 8];
    rustix::io::pread(&driver.memory, &mut entry, Driver::EVENTS).unwrap();
    assert_ne!(entry, [0; 8], "no event was written");
    let counters = process.counters();
    assert_eq!(counters["interrupts"]["vectors"][5], 1);
    assert_eq!(counters["mmio"]["eq_doorbell"]["writes"], 1);
    assert_eq!(counters["mmio"]["cqp_doorbell"]["writes"], 1);
    assert!(counters["dma"]["read_bytes"].as_u64().unwrap() >= 64);
    assert!(counters["dma"]["write_bytes"].as_u64().unwrap() > 0);
    // A reset by register leads back to the beginning.
    client
        .region_write(
            abi::BAR_REGISTERS,
            abi::REG_CONTROL as u64,
            &abi::CONTROL_RESET.to_le_bytes(),
        )
        .unwrap();
    assert_eq!(status(&mut client).state(), Some(abi::DeviceState::Ready));
}

impl Driver {
    /// Gives a command that raises the interrupt of event queue 0, and does not look at it.
    fn provoke(&mut self, client: &mut Client) {
        let arm = abi::EventDoorbell {
            eqn: 0,
            read_index: self.commands,
            relative: false,
            valid: true,
            arm: true,
            quiet: false,
            disarm: false,
        };
        Self::doorbell(client, 0, abi::DOORBELL_EVENT_QUEUE, arm.encode());
        self.commands += 1;
        Self::doorbell(client, 0, abi::DOORBELL_CONTROL, self.commands.into());
        let at = u64::from(self.commands - 1) * size_of::<abi::EventEntry>() as u64;
        until(|| self.get::<abi::EventEntry>(Self::EVENTS + at).code != 0);
        // Whoever wrote that has raised the interrupt, too, when a read is answered.
        register(client, abi::REG_STATUS);
    }

    /// Rings for event queue 0, and nothing more.
    fn let_go(client: &mut Client) {
        let neither = abi::EventDoorbell {
            eqn: 0,
            read_index: 0,
            relative: false,
            valid: false,
            arm: false,
            quiet: false,
            disarm: false,
        };
        Self::doorbell(client, 0, abi::DOORBELL_EVENT_QUEUE, neither.encode());
    }
}

#[test]
fn what_is_done_to_the_device_from_outside_is_told_on_event_queue_0() {
    use abi::{EventCode, Management};
    let process = Process::start("classes", &[]);
    let mut client = process.client();
    let driver = Driver::start(&mut client, true);
    let memory = |place: &str| format!(r#"{{"cmd":"memory-error","where":{place}}}"#);
    let channel = |event: &str| format!(r#"{{"cmd":"channel","event":"{event}","channel":3}}"#);
    let (cable, faults) = (Management::Cable.number(), Management::Faults.number());
    let managed = EventCode::ManagementAction;
    let told = [
        (
            memory(r#""internal","address":7,"contained":true"#),
            Some((EventCode::MemoryErrorInternal, 0, 7, 0)),
        ),
        (
            memory(r#""internal","address":8"#),
            Some((EventCode::MemoryErrorInternal, 0, 8, 1)),
        ),
        (
            memory(r#""external","address":4096"#),
            Some((EventCode::MemoryErrorExternal, 0, 4096, 0)),
        ),
        (
            channel("packets"),
            Some((EventCode::ChannelPackets, 3, 0, 0)),
        ),
        (
            channel("descriptors"),
            Some((EventCode::ChannelDescriptors, 3, 0, 0)),
        ),
        (
            channel("pool-low"),
            Some((EventCode::ChannelPoolLow, 3, 0, 0)),
        ),
        (
            channel("bad-buffers"),
            Some((EventCode::ChannelBadBuffers, 3, 0, 0)),
        ),
        // The cable: only where that is news.
        (r#"{"cmd":"link","up":true}"#.into(), None),
        (
            r#"{"cmd":"link","up":false}"#.into(),
            Some((managed, cable, 0, 0)),
        ),
        (r#"{"cmd":"link","up":false}"#.into(), None),
        (
            r#"{"cmd":"link","up":true}"#.into(),
            Some((managed, cable, 1, 0)),
        ),
        // Faults, too.
        (r#"{"cmd":"misbehave"}"#.into(), None),
        (
            r#"{"cmd":"misbehave","lose_flushes":true}"#.into(),
            Some((managed, faults, 1, 0)),
        ),
        (r#"{"cmd":"misbehave","lose_flushes":true}"#.into(), None),
        (
            r#"{"cmd":"misbehave","lose_flushes":true,"seed":1}"#.into(),
            Some((managed, faults, 1, 0)),
        ),
        (
            r#"{"cmd":"misbehave","hold":5.0}"#.into(),
            Some((managed, faults, 0, 0)),
        ),
        (r#"{"cmd":"misbehave","hold":6.0}"#.into(), None),
        // Before they begin, and when they have ended.
        (
            r#"{"cmd":"misbehave","events":{"drop":1.0}}"#.into(),
            Some((managed, faults, 1, 0)),
        ),
        (
            r#"{"cmd":"misbehave"}"#.into(),
            Some((managed, faults, 0, 0)),
        ),
    ];
    let mut index = 0;
    for (request, event) in told {
        assert_eq!(process.control(&request)["ok"], true, "{request}");
        let entry = |index: u64| -> abi::EventEntry {
            driver.get(Driver::EVENTS + index * size_of::<abi::EventEntry>() as u64)
        };
        if let Some((code, id, param0, param1)) = event {
            let found = entry(index);
            let found = (found.code, found.id, found.param0, found.param1);
            assert_eq!(found, (code.number(), id, param0, param1), "{request}");
            index += 1;
        }
        assert_eq!(entry(index).code, 0, "{request}");
    }
}

#[test]
fn the_pin_holds_its_level_until_a_doorbell_and_is_unmasked_by_request_or_eventfd() {
    let process = Process::start("pin", &["--interrupts", "intx"]);
    let mut client = process.client();
    for kind in [MSI, MSIX] {
        assert_eq!(client.get_irq_info(kind).unwrap().count, 0);
    }
    let (pin, unmask) = (event(), event());
    let give = |client: &mut Client, flags, fd: &OwnedFd| {
        client
            .set_irqs(INTX, flags, 0, 1, &[fd.as_raw_fd()])
            .unwrap();
    };
    give(&mut client, SET_EVENTFD, &pin);
    let mut driver = Driver::start_with(&mut client, true, None);
    driver.provoke(&mut client);
    assert!(fired(&pin));
    assert_eq!(process.counters()["interrupts"]["mode"], "intx");
    // It has told of it, and masks itself.
    driver.provoke(&mut client);
    assert!(!fired(&pin));
    for _ in 0..3 {
        client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[]).unwrap();
        assert!(fired(&pin), "it holds");
    }
    // As KVM does at the end of an interrupt.
    give(&mut client, UNMASK_EVENTFD, &unmask);
    for _ in 0..3 {
        rustix::io::write(&unmask, &1u64.to_ne_bytes()).unwrap();
        until(|| fired(&pin));
    }
    Driver::let_go(&mut client);
    let total = |process: &Process| process.counters()["interrupts"]["intx"].as_u64().unwrap();
    assert_eq!(total(&process), 7);
    client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[]).unwrap();
    assert!(!fired(&pin), "it was let go");
    // The next one is told of, and one that nobody could be told of meanwhile.
    driver.provoke(&mut client);
    assert!(fired(&pin));
    client.set_irqs(INTX, SET_NONE, 0, 0, &[]).unwrap();
    let pin = event();
    give(&mut client, SET_EVENTFD, &pin);
    assert!(fired(&pin));
    assert_eq!(total(&process), 9);
}

#[test]
fn a_device_that_failed_lets_go_of_the_pin_at_a_doorbell() {
    let process = Process::start("failed-pin", &["--interrupts", "intx"]);
    let mut client = process.client();
    let pin = event();
    client
        .set_irqs(INTX, SET_EVENTFD, 0, 1, &[pin.as_raw_fd()])
        .unwrap();
    let _driver = Driver::start_with(&mut client, true, None);
    assert_eq!(process.control(r#"{"cmd":"fatal"}"#)["ok"], true);
    assert!(fired(&pin));
    client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[]).unwrap();
    assert!(fired(&pin));
    Driver::let_go(&mut client);
    client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[]).unwrap();
    assert!(!fired(&pin));
}

#[test]
fn no_interrupt_is_lost_whichever_way_the_mode_changes() {
    let process = Process::start("modes", &["--vectors", "8"]);
    let mut client = process.client();
    let mut driver = Driver::start_with(&mut client, true, None);
    let msi = capability(&mut client, 0x05) + 2;
    let control = |client: &mut Client, at: u64, value: u16| {
        client
            .region_write(CONFIG, at, &value.to_le_bytes())
            .unwrap();
    };
    // Each mode: the kind of interrupts, and how it is enabled and disabled.
    type Step<'a> = (u32, u32, Box<dyn Fn(&mut Client, bool) + 'a>);
    let steps: [Step<'_>; 4] = [
        (INTX, 0, Box::new(|_, _| {})),
        (
            MSI,
            1,
            Box::new(|client, on| control(client, msi, if on { 0x21 } else { 0 })),
        ),
        (MSIX, 5, Box::new(set_msix)),
        (
            MSI,
            0,
            Box::new(|client, on| control(client, msi, u16::from(on))),
        ),
    ];
    for eventfd_first in [false, true] {
        for (kind, vector, enable) in steps.iter().cycle().take(9) {
            let fd = event();
            let give = |client: &mut Client| {
                client
                    .set_irqs(*kind, SET_EVENTFD, *vector, 1, &[fd.as_raw_fd()])
                    .unwrap();
            };
            // What was raised in the mode before and got no doorbell comes in this one.
            if eventfd_first {
                give(&mut client);
                enable(&mut client, true);
            } else {
                enable(&mut client, true);
                give(&mut client);
            }
            let before = driver.commands > 0;
            assert_eq!(fired(&fd), before, "kind {kind}");
            Driver::let_go(&mut client);
            client.set_irqs(INTX, UNMASK_NONE, 0, 1, &[]).unwrap();
            driver.provoke(&mut client);
            assert!(fired(&fd), "kind {kind}");
            enable(&mut client, false);
            client.set_irqs(*kind, SET_NONE, 0, 0, &[]).unwrap();
        }
    }
}

#[test]
fn memory_is_not_touched_without_bus_mastering() {
    let process = Process::start("bus-master", &[]);
    let mut client = process.client();
    Driver::start(&mut client, false);
    let status = status(&mut client);
    assert_eq!(status.state(), Some(abi::DeviceState::Fatal));
    assert_eq!(status.fatal(), Some(abi::FatalCode::BadBootBlock));
    let counters = process.counters();
    assert_eq!(counters["dma"]["read_bytes"], 0);
    assert!(counters["dma"]["errors"].as_u64().unwrap() > 0);
}

#[test]
fn memory_that_was_unmapped_is_not_touched() {
    let process = Process::start("unmap", &[]);
    let mut client = process.client();
    let memory = memfd(4096);
    client.dma_map(0, 0x1000, 4096, memory.as_raw_fd()).unwrap();
    assert_eq!(process.counters()["guest_memory_bytes"], 4096);
    client.dma_unmap(0x1000, 4096).unwrap();
    assert_eq!(process.counters()["guest_memory_bytes"], 0);
}

/// Sends a vfio-user request as the bytes it is made of; returns the reply's flags.
fn request(stream: &mut UnixStream, command: u16, body: &[u32], fd: Option<&OwnedFd>) -> u32 {
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&7u16.to_ne_bytes());
    bytes.extend_from_slice(&command.to_ne_bytes());
    bytes.extend_from_slice(&(16 + 4 * body.len() as u32).to_ne_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend(body.iter().flat_map(|word| word.to_ne_bytes()));
    let sent = match fd {
        Some(fd) => descriptors::send(stream, &bytes, &[fd]),
        None => stream.write(&bytes),
    };
    assert_eq!(sent.unwrap(), bytes.len());
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let [.., a, b, c, d, _, _, _, _, _, _, _, _] = header;
    let mut rest = vec![0; u32::from_ne_bytes([a, b, c, d]) as usize - header.len()];
    stream.read_exact(&mut rest).unwrap();
    u32::from_ne_bytes([header[8], header[9], header[10], header[11]])
}

#[test]
fn all_memory_is_unmapped_by_the_kernels_flag() {
    use vfio_bindings::bindings::vfio::{
        VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL,
    };
    const DMA_MAP: u16 = 2;
    const DMA_UNMAP: u16 = 3;
    const REPLY: u32 = 1;
    let process = Process::start("unmap-all", &[]);
    let mut stream = connect(&process.path("socket"));
    let both = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
    for address in [0x1000, 0x8000] {
        let body = [32, both, 0, 0, address, 0, 0x1000, 0];
        let flags = request(&mut stream, DMA_MAP, &body, Some(&memfd(0x1000)));
        assert_eq!(flags, REPLY);
    }
    assert_eq!(process.counters()["guest_memory_bytes"], 0x2000);
    let all = [24, VFIO_DMA_UNMAP_FLAG_ALL, 0, 0, 0, 0];
    assert_eq!(request(&mut stream, DMA_UNMAP, &all, None), REPLY);
    assert_eq!(process.counters()["guest_memory_bytes"], 0);
}

#[test]
fn descriptors_that_the_kernel_drops_are_noticed() {
    let mut process = Process::start("no-numbers", &[]);
    let mut client = process.client();
    // There is no number for one more in the process.
    let limit = Rlimit {
        current: Some(3),
        maximum: Some(3),
    };
    let pid = Pid::from_child(&process.child);
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let memory = memfd(0x20_0000);
    assert!(client.dma_map(0, 0, 0x20_0000, memory.as_raw_fd()).is_err());
    let (status, text) = process.end();
    assert!(!status.success());
    // And not taken for a request without one.
    assert!(text.contains("descriptors"), "{text}");
}

#[test]
fn a_fatal_error_can_be_asked_for() {
    let process = Process::start("fatal", &[]);
    let mut client = process.client();
    Driver::start(&mut client, true);
    assert_eq!(process.control(r#"{"cmd":"fatal"}"#)["ok"], true);
    let status = status(&mut client);
    assert_eq!(status.fatal(), Some(abi::FatalCode::Injected));
    assert_eq!(process.control("nonsense")["ok"], false);
}

#[test]
fn misbehaviour_can_be_asked_for_at_the_start_and_later() {
    let rules = r#"{"seed":7,"hold":50,"answers":{"delay":1},"reset":"slow"}"#;
    let process = Process::start("misbehave", &["--misbehave", rules]);
    let mut client = process.client();
    let driver = Driver::start(&mut client, true);
    let answer = |at: u64| {
        let mut code = [0; 4];
        rustix::io::pread(&driver.memory, &mut code, Driver::EVENTS + at * 32).unwrap();
        u32::from_le_bytes(code) != 0
    };
    let ring = |client: &mut Client, producer: u64| {
        client
            .region_write(
                abi::BAR_DOORBELLS,
                abi::DOORBELL_CONTROL as u64,
                &producer.to_le_bytes(),
            )
            .unwrap();
    };
    ring(&mut client, 1);
    // Late by itself, without any further request.
    until(|| answer(0));
    let report = &process.counters()["misbehaviour"];
    assert_eq!(report["rules"]["seed"], 7);
    assert_eq!(report["done"]["delayed"], 1);
    let reset = |client: &mut Client| {
        let reset = abi::CONTROL_RESET.to_le_bytes();
        client
            .region_write(abi::BAR_REGISTERS, abi::REG_CONTROL as u64, &reset)
            .unwrap();
    };
    reset(&mut client);
    let resetting = Some(abi::DeviceState::Resetting);
    assert_eq!(status(&mut client).state(), resetting);
    until(|| status(&mut client).state() == Some(abi::DeviceState::Ready));
    let refused = process.control(r#"{"cmd":"misbehave","answers":{"drop":2}}"#);
    assert_eq!(refused["ok"], false);
    let never = r#"{"cmd":"misbehave","reset":"never","ignore_function_reset":true}"#;
    assert_eq!(process.control(never)["ok"], true);
    drop(driver);
    client.dma_unmap(Driver::BASE, Driver::SIZE).unwrap();
    let _driver = Driver::start(&mut client, true);
    reset(&mut client);
    let pcie = capability(&mut client, 0x10);
    client
        .region_write(CONFIG, pcie + 8, &0x8000u16.to_le_bytes())
        .unwrap();
    assert_eq!(status(&mut client).state(), Some(abi::DeviceState::Running));
    assert_eq!(process.counters()["misbehaviour"]["done"]["resets"], 2);
    assert_eq!(process.control(r#"{"cmd":"misbehave"}"#)["ok"], true);
    assert!(process.counters()["misbehaviour"].is_null());
    reset(&mut client);
    assert_eq!(status(&mut client).state(), Some(abi::DeviceState::Ready));
}

#[test]
fn the_process_dies_when_asked() {
    let mut process = Process::start("die", &[]);
    let _client = process.client();
    process.control(r#"{"cmd":"die"}"#);
    process.end();
}

/// QEMU ends on an assertion when it reads a connection reset instead of the end.
#[test]
fn a_device_that_goes_hangs_up_in_order_however_it_does() {
    // `None`: as asked on its control socket.
    for signal in [
        None,
        Some(Signal::TERM),
        Some(Signal::KILL),
        Some(Signal::ABORT),
    ] {
        let mut process = Process::start("hangup", &[]);
        // The file is there a moment before somebody listens.
        let mut monitor = None;
        until(|| {
            monitor = UnixStream::connect(process.path("socket")).ok();
            monitor.is_some()
        });
        let mut monitor = monitor.unwrap();
        // Requests for the device's description until the device is stuck with its answers and the
        // rest of the requests lies unread.
        let mut request = [0u8; 32];
        request[2..4].copy_from_slice(&4u16.to_le_bytes());
        request[4..8].copy_from_slice(&32u32.to_le_bytes());
        request[16..20].copy_from_slice(&16u32.to_le_bytes());
        monitor
            .set_write_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        while monitor.write_all(&request).is_ok() {}
        // Somebody waits behind it whom the device cannot get rid of soon.
        let stranger = connect(&process.path("socket"));
        let (socket, _silent) = lingering();
        descriptors::send(&stranger, &[0; 64], &[&socket]).unwrap();
        drop(socket);
        match signal {
            None => drop(process.control(r#"{"cmd":"die"}"#)),
            Some(signal) => {
                // A service manager tells what is left, too, and perhaps before that has seen it.
                for keeper in children(process.child.id()) {
                    kill_process(Pid::from_raw(keeper).unwrap(), Signal::TERM).unwrap();
                }
                kill_process(Pid::from_child(&process.child), signal).unwrap();
            }
        }
        process.end();
        monitor.set_read_timeout(Some(DEADLINE)).unwrap();
        let answers = std::io::copy(&mut monitor, &mut std::io::sink());
        assert!(answers.expect("the end of the connection") > 0);
    }
}

#[test]
fn who_was_not_accepted_reads_the_end_too() {
    for signal in [Signal::TERM, Signal::KILL] {
        let mut process = Process::start("waiting", &[]);
        let _client = process.client();
        let mut second = connect(&process.path("socket"));
        second.write_all(&[0; 64]).unwrap();
        kill_process(Pid::from_child(&process.child), signal).unwrap();
        process.end();
        assert_eq!(second.read(&mut [0; 1]).expect("the end"), 0);
    }
}

/// The processes that one has started.
fn children(pid: u32) -> Vec<i32> {
    let list = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    list.split_whitespace()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

/// Whether a process has not ended.
fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_device_that_was_killed_is_started_again_on_the_same_socket() {
    let directory = Process::directory("again");
    for _ in 0..20 {
        let mut process = Process::start_in(directory.clone(), &[]);
        let _client = process.client();
        kill_process(Pid::from_child(&process.child), Signal::KILL).unwrap();
        process.end();
        // The sockets stay.
        std::mem::forget(process);
    }
    let _ = std::fs::remove_dir_all(directory);
}

#[test]
fn a_device_is_started_again_while_the_keeper_of_the_last_still_has_its_socket() {
    let directory = Process::directory("kept");
    let mut first = Process::start_in(directory.clone(), &[]);
    let _client = first.client();
    let [keeper] = children(first.child.id())[..] else {
        panic!("one keeper");
    };
    let keeper = Pid::from_raw(keeper).unwrap();
    kill_process(keeper, Signal::STOP).unwrap();
    kill_process(Pid::from_child(&first.child), Signal::KILL).unwrap();
    first.end();
    let socket = directory.join("socket");
    let made = || std::fs::metadata(&socket).and_then(|file| file.modified());
    let left = made().unwrap();
    let second = Process::start_in(directory.clone(), &[]);
    until(|| made().is_ok_and(|made| made != left));
    let mut monitor = second.client();
    kill_process(keeper, Signal::CONT).unwrap();
    until(|| !is_alive(keeper.as_raw_nonzero().get()));
    // It has hung up where it was, and nowhere else.
    register(&mut monitor, abi::REG_STATUS);
    drop(second);
    std::mem::forget(first);
}

/// Connects to `path` as soon as a process listens there; `None` if it ends before.
fn reached(path: &Path, process: &mut Child) -> Option<UnixStream> {
    let mut reached = None;
    until(|| {
        let stream = UnixStream::connect(path).ok();
        reached = stream.filter(|stream| {
            let listens = owner(stream).and_then(|owner| owner.pid);
            listens == Some(process.id() as i32)
        });
        reached.is_some() || process.try_wait().unwrap().is_some()
    });
    reached
}

#[test]
fn who_starts_while_another_is_about_to_go_starts_or_is_told_that_it_is_there() {
    let directory = Process::directory("going");
    let path = directory.join("socket");
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_ferrite-device"))
            .arg("--socket")
            .arg(&path)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut device = start();
    let mut _monitor = reached(&path, &mut device).expect("it starts");
    for _ in 0..30 {
        kill_process(Pid::from_child(&device), Signal::TERM).unwrap();
        let (next, monitor) = loop {
            let mut next = start();
            if let Some(monitor) = reached(&path, &mut next) {
                break (next, monitor);
            }
            let said = next.wait_with_output().unwrap().stderr;
            let said = String::from_utf8(said).unwrap();
            assert!(said.contains("another process"), "{said}");
        };
        device.wait().unwrap();
        (device, _monitor) = (next, monitor);
    }
    device.kill().unwrap();
    device.wait().unwrap();
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn one_that_is_started_on_the_sockets_of_another_disturbs_nobody() {
    let mut wired = Wired::start("twice", &[]);
    let mut client = wired.process.client();
    let mut vm = wired.vm();
    let sockets = ["socket", "net", "counters", "control"];
    // Each by itself, and all as they were the first time.
    let again = sockets.map(|name| vec![name]);
    for names in again.into_iter().chain([sockets.to_vec()]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-device"));
        if !names.contains(&"socket") {
            command.arg("--socket").arg(wired.process.path("other"));
        }
        for name in &names {
            command
                .arg(format!("--{name}"))
                .arg(wired.process.path(name));
        }
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("another process"), "{names:?}: {said}");
        send(&mut vm, &frame([2; 6], 1));
        assert_eq!(wired.receive(), frame([2; 6], 1), "{names:?}");
    }
    assert_eq!(wired.process.counters()["vm"]["connects"], 1);
    register(&mut client, abi::REG_STATUS);
}

#[test]
fn a_keeper_stays_no_longer_than_its_device_and_the_device_goes_on_without_it() {
    let mut process = Process::start("keeper", &[]);
    let client = process.client();
    let [keeper] = children(process.child.id())[..] else {
        panic!("one keeper");
    };
    assert!(is_alive(keeper));
    drop(client);
    assert!(process.end().0.success());
    until(|| !is_alive(keeper));

    let mut process = Process::start("keeperless", &[]);
    let [keeper] = children(process.child.id())[..] else {
        panic!("one keeper");
    };
    kill_process(Pid::from_raw(keeper).unwrap(), Signal::KILL).unwrap();
    let mut client = process.client();
    register(&mut client, abi::REG_STATUS);
    drop(client);
    assert!(process.end().0.success());
}

/// Hundredths of a second that a process has computed.
fn computed(process: &Process) -> u64 {
    let path = format!("/proc/{}/stat", process.child.id());
    let stat = std::fs::read_to_string(path).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = fields.split(' ').collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn who_cannot_be_accepted_keeps_the_device_from_nothing() {
    use rustix::process::{prlimit, Resource, Rlimit};
    let process = Process::start("no-numbers", &[]);
    let _client = process.client();
    process.counters();
    let few = Rlimit {
        current: Some(30),
        maximum: Some(30),
    };
    prlimit(Some(Pid::from_child(&process.child)), Resource::Nofile, few).unwrap();
    let mut waiting: Vec<UnixStream> = Vec::new();
    for _ in 0..40 {
        waiting.push(connect(&process.path("control")));
    }
    // The first are served, and the others wait.
    writeln!(waiting[0], r#"{{"cmd":"counters"}}"#).unwrap();
    assert_eq!(waiting[0].read(&mut [0; 1]).unwrap(), 1);
    // Once it has come so far: that may take a while.
    until(|| {
        let before = computed(&process);
        std::thread::sleep(Duration::from_secs(1));
        computed(&process) - before < 30
    });
    drop(waiting);
    process.control(r#"{"cmd":"counters"}"#);
}

#[test]
fn a_fabric_that_refuses_the_device_is_not_asked_all_the_time() {
    let directory = Process::directory("refused");
    let uplink = directory.join("uplink");
    let fabric = UnixListener::bind(&uplink).unwrap();
    // Nobody reads its lines.
    let options = ["--uplink", uplink.to_str().unwrap(), "--log", "error"];
    let process = Process::start_in(directory, &options);
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < Duration::from_millis(1500) {
        drop(fabric.accept().unwrap());
        count += 1;
    }
    assert!(count <= 6, "{count} connections");
    // One that lets it in has it.
    let _wire = greeted(&fabric, false);
    until(|| process.counters()["link_up"] == true);
}

fn frame(to: [u8; 6], fill: u8) -> Vec<u8> {
    let mut frame = vec![fill; 90];
    frame[..6].copy_from_slice(&to);
    // From the device's own, or from a neighbour to it.
    frame[6..12].copy_from_slice(if to == MAC { &[2; 6] } else { &MAC });
    frame
}

fn send(stream: &mut UnixStream, frame: &[u8]) {
    let mut writer = Writer::new(1 << 20);
    assert!(writer.push(frame));
    assert!(writer.flush(stream).unwrap());
}

/// Reads once.
fn fill(stream: &mut UnixStream, reader: &mut Reader) {
    match reader.fill(stream) {
        Ok(count) => assert!(count > 0, "the device hung up"),
        // A child of another test has ended.
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
        Err(error) => panic!("{error}"),
    }
}

/// The next frame that is no message to the switch.
fn receive(stream: &mut UnixStream) -> Vec<u8> {
    let mut reader = Reader::new();
    loop {
        while let Some(frame) = reader.next_frame().unwrap() {
            if !is_message(frame) {
                return frame.to_vec();
            }
        }
        fill(stream, &mut reader);
    }
}

/// A user who is nobody else.
const NOBODY: u32 = 65534;

/// [`NOBODY`] listens where somebody else has.
fn take_place(path: &Path) -> UnixListener {
    use std::os::unix::fs::PermissionsExt;
    let anybody = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(path.parent().unwrap(), anybody.clone()).unwrap();
    std::fs::remove_file(path).unwrap();
    let other = users::as_user(NOBODY, || UnixListener::bind(path).unwrap());
    std::fs::set_permissions(path, anybody).unwrap();
    other
}

/// A device tries to connect some times, and goes away without a word.
fn assert_refused(fabric: &UnixListener) {
    for _ in 0..3 {
        let (mut wire, _) = fabric.accept().unwrap();
        wire.set_read_timeout(Some(DEADLINE)).unwrap();
        assert_eq!(wire.read(&mut [0; 1]).unwrap(), 0, "it says who it is");
    }
}

#[test]
fn an_uplink_is_not_taken_from_another_user() {
    if !users::are_needed() {
        return;
    }
    let mut wired = Wired::start("other-user", &[]);
    let path = wired.process.path("uplink");
    // The fabric goes, and somebody takes its place.
    let other = take_place(&path);
    drop(wired.wire);
    assert_refused(&other);
    assert_eq!(wired.process.counters()["link_up"], false);
    // The fabric comes back.
    std::fs::remove_file(&path).unwrap();
    let fabric = UnixListener::bind(&path).unwrap();
    let _wire = greeted(&fabric, false);
    until(|| wired.process.counters()["link_up"] == true);
    wired.process.control(r#"{"cmd":"die"}"#);
    let (_, said) = wired.process.end();
    assert_eq!(
        said.matches(&format!("the socket is user {NOBODY}'s"))
            .count(),
        1,
        "{said}"
    );
}

#[test]
fn an_uplink_that_was_busy_is_not_taken_from_another_user() {
    if !users::are_needed() {
        return;
    }
    let directory = Process::directory("busy-user");
    let uplink = directory.join("uplink");
    let (fabric, waiting) = busy_fabric(&uplink);
    let process = Process::start_in(directory, &["--uplink", uplink.to_str().unwrap()]);
    // Before it has let the device in, the fabric goes.
    let other = take_place(&uplink);
    drop((fabric, waiting));
    assert_refused(&other);
    // It comes back.
    std::fs::remove_file(&uplink).unwrap();
    let fabric = UnixListener::bind(&uplink).unwrap();
    let _wire = greeted(&fabric, false);
    until(|| process.counters()["link_up"] == true);
}

#[test]
fn a_user_without_a_number_is_not_taken_for_another() {
    // In a namespace where nobody has one.
    if !namespaces::are_needed(&["--user"]) {
        return;
    }
    let directory = Process::directory("no-number");
    let uplink = directory.join("uplink");
    let fabric = UnixListener::bind(&uplink).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--user", env!("CARGO_BIN_EXE_ferrite-device")]);
    let options = ["--uplink", uplink.to_str().unwrap()];
    let mut process = Process::start_by(command, directory, &options);
    // Who is there at the start is who is meant.
    let (wire, _) = greeted(&fabric, false);
    let other = take_place(&uplink);
    drop((wire, fabric));
    assert_refused(&other);
    process.control(r#"{"cmd":"die"}"#);
    let (_, said) = process.end();
    assert!(said.contains("is not connected again"), "{said}");
    assert!(said.contains("nobody knows whose"), "{said}");
}

#[test]
fn a_neighbour_does_not_fill_the_log() {
    let mut wired = Wired::start("log", &[]);
    for id in 0..300 {
        // Nothing that could be a ring.
        wired.grant_by(id, NEIGHBOUR, [event(), event()]);
        assert_eq!(wired.message(), Message::Released(id));
    }
    // What has another reason is told all the same. It cannot connect again.
    drop((wired.fabric, wired.wire));
    until(|| wired.process.counters()["link_up"] == false);
    wired.process.control(r#"{"cmd":"die"}"#);
    let (_, said) = wired.process.end();
    let lines = said.matches("cannot be used").count();
    assert!((1..60).contains(&lines), "{lines} lines");
    assert!(said.contains("the uplink is gone"), "{said}");
}

/// A device and the fabric that it is connected to, which is the test.
struct Wired {
    process: Process,
    fabric: UnixListener,
    wire: UnixStream,
    reader: Reader,
}

impl Wired {
    fn start(name: &str, options: &[&str]) -> Self {
        let directory = Process::directory(name);
        let uplink = directory.join("uplink");
        let fabric = UnixListener::bind(&uplink).unwrap();
        let mut all = vec!["--uplink", uplink.to_str().unwrap()];
        all.extend(options);
        let process = Process::start_in(directory, &all);
        let (wire, reader) = greeted(&fabric, options.contains(&"--any-source-mac"));
        Self {
            process,
            fabric,
            wire,
            reader,
        }
    }

    /// The VM's own interface.
    fn vm(&self) -> UnixStream {
        let before = self.process.counters()["vm"]["connects"].as_u64().unwrap();
        let vm = connect(&self.process.path("net"));
        until(|| self.process.counters()["vm"]["connects"] == before + 1);
        vm
    }

    /// Tells the device something.
    fn tell(&mut self, message: Message) {
        send(&mut self.wire, &message.to_frame(NEIGHBOUR));
    }

    /// Grants the device a shortcut to an address by these descriptors.
    fn grant_by(&mut self, shortcut: ShortcutId, peer: Mac, fds: [OwnedFd; 2]) {
        let grant = Message::Grant {
            shortcut,
            side: 1,
            peer,
        };
        let mut writer = Writer::new(1 << 16);
        writer.push_always(&grant.to_frame(NEIGHBOUR));
        let mut bytes = Vec::new();
        writer.flush(&mut bytes).unwrap();
        assert_eq!(descriptors::send(&self.wire, &bytes, &fds).unwrap(), 64);
    }

    /// Grants the device a shortcut to an address; returns the other side of it.
    fn grant(&mut self, shortcut: ShortcutId, peer: Mac) -> Ring {
        let memory = ring::create().unwrap();
        let [end, of_device] = wake::pair().unwrap();
        self.grant_by(shortcut, peer, [memory.try_clone().unwrap(), of_device]);
        let (producer, consumer) = ring::attach(&memory, 0).unwrap();
        Ring {
            memory,
            producer,
            consumer,
            end,
        }
    }

    /// The next frame from the device.
    fn frame(&mut self) -> Vec<u8> {
        loop {
            if let Some(frame) = self.reader.next_frame().unwrap() {
                return frame.to_vec();
            }
            fill(&mut self.wire, &mut self.reader);
        }
    }

    /// The next frame that is no message to the switch.
    fn receive(&mut self) -> Vec<u8> {
        loop {
            let frame = self.frame();
            if !is_message(&frame) {
                return frame;
            }
        }
    }

    /// The next message to the switch.
    fn message(&mut self) -> Message {
        loop {
            if let Some((_, message)) = Message::parse(&self.frame()) {
                return message;
            }
        }
    }
}

/// Accepts a device, which says what it is.
fn greeted(fabric: &UnixListener, any_source: bool) -> (UnixStream, Reader) {
    let (mut wire, _) = fabric.accept().unwrap();
    wire.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut reader = Reader::new();
    fill(&mut wire, &mut reader);
    assert_eq!(reader.take_mark(), Some(true));
    let hello = reader.next_frame().unwrap().unwrap();
    let expected = (Mac(MAC), Message::Hello { any_source });
    assert_eq!(Message::parse(hello), Some(expected));
    (wire, reader)
}

/// The side of a shortcut that is not the device's.
struct Ring {
    memory: OwnedFd,
    producer: Producer,
    consumer: Consumer,
    end: OwnedFd,
}

impl Ring {
    fn push(&mut self, frame: &[u8]) {
        assert!(self.producer.push(frame).unwrap());
        if self.producer.must_wake() {
            wake::signal(&self.end);
        }
    }
}

#[test]
fn ethernet_passes_both_ways_and_the_uplink_comes_back() {
    let mut wired = Wired::start("ethernet", &[]);
    let mut client = wired.process.client();
    let mut vm = wired.vm();
    assert!(status(&mut client).link_up());

    send(&mut vm, &frame([2; 6], 1));
    assert_eq!(wired.receive(), frame([2; 6], 1));
    send(&mut wired.wire, &frame(MAC, 2));
    assert_eq!(receive(&mut vm), frame(MAC, 2));

    let Wired {
        process,
        fabric,
        wire,
        ..
    } = wired;
    drop(fabric);
    drop(wire);
    until(|| process.counters()["link_up"] == false);
    assert!(!status(&mut client).link_up());
    let uplink = process.path("uplink");
    std::fs::remove_file(&uplink).unwrap();
    let fabric = UnixListener::bind(&uplink).unwrap();
    let (mut wire, _) = greeted(&fabric, false);
    until(|| process.counters()["link_up"] == true);
    send(&mut wire, &frame(MAC, 3));
    assert_eq!(receive(&mut vm), frame(MAC, 3));

    process.control(r#"{"cmd":"link","up":false}"#);
    assert!(!status(&mut client).link_up());
    process.control(r#"{"cmd":"link","up":true}"#);
    assert!(status(&mut client).link_up());
    let counters = process.counters();
    assert_eq!(counters["uplink"]["rx_frames"], 2);
    assert_eq!(counters["vm"]["tx_frames"], 2);
}

/// A fabric where others wait already, as many as may.
fn busy_fabric(path: &Path) -> (UnixListener, Vec<OwnedFd>) {
    let fabric = UnixListener::bind(path).unwrap();
    rustix::net::listen(&fabric, 1).unwrap();
    let mut waiting = Vec::new();
    loop {
        match ferrite_fabric::socket::connect(path) {
            Ok(other) => waiting.push(other),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                return (fabric, waiting);
            }
        }
    }
}

#[test]
fn a_device_has_its_turn_where_others_connect_all_the_time() {
    /// Others that connect, and those that the fabric lets in until the device must be.
    const OTHERS: usize = 16;
    const TURNS: usize = 2000;
    let directory = Process::directory("crowd");
    let uplink = directory.join("uplink");
    let (fabric, waiting) = busy_fabric(&uplink);
    let over = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        for _ in 0..OTHERS {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let _ = UnixStream::connect(&uplink);
                }
            });
        }
        let process = Process::start_in(directory, &["--uplink", uplink.to_str().unwrap()]);
        drop(waiting);
        // The fabric lets somebody in now and then, and the device among them.
        let found = (0..TURNS).position(|_| {
            std::thread::sleep(Duration::from_millis(3));
            let (mut wire, _) = fabric.accept().unwrap();
            wire.set_read_timeout(Some(DEADLINE)).unwrap();
            wire.read(&mut [0; 1]).is_ok_and(|count| count == 1)
        });
        over.store(true, Ordering::SeqCst);
        // Nobody waits any more.
        drop((fabric, process));
        found
    });
    assert!(found.is_some(), "it never had its turn");
}

#[test]
fn a_fabric_that_accepts_nobody_holds_up_nothing() {
    let directory = Process::directory("backlog");
    let uplink = directory.join("uplink");
    let (fabric, waiting) = busy_fabric(&uplink);
    let process = Process::start_in(directory, &["--uplink", uplink.to_str().unwrap()]);
    let mut client = process.client();
    Driver::start(&mut client, true);
    assert_eq!(process.counters()["link_up"], false);
    // It has its turn.
    for _ in &waiting {
        fabric.accept().unwrap();
    }
    let _wire = greeted(&fabric, false);
    until(|| process.counters()["uplink"]["connects"] == 1);
}

#[test]
fn a_pulled_cable_leaves_the_stream_in_step() {
    let mut wired = Wired::start("cable", &[]);
    let _client = wired.process.client();
    let mut vm = wired.vm();
    // The fabric does not read.
    let mut big = frame([2; 6], 1);
    big.resize(9000, 1);
    let sent = 3000;
    for _ in 0..sent {
        send(&mut vm, &big);
    }
    until(|| wired.process.counters()["vm"]["rx_frames"] == sent);
    // It reads what there is: the device fills the room in large pieces, which end inside of frames.
    let waiting = |wired: &Wired| rustix::io::ioctl_fionread(&wired.wire).unwrap();
    let pid = stop(&wired.process.child);
    let mut arrived = 0;
    while waiting(&wired) > 0 {
        assert_eq!(wired.frame(), big);
        arrived += 1;
    }
    kill_process(pid, Signal::CONT).unwrap();
    until(|| waiting(&wired) > 0);
    // A message of the device waits behind them.
    wired.grant_by(3, NEIGHBOUR, [event(), event()]);
    send(&mut wired.wire, &frame(MAC, 2));
    assert_eq!(receive(&mut vm), frame(MAC, 2));
    wired.process.control(r#"{"cmd":"link","up":false}"#);
    wired.process.control(r#"{"cmd":"link","up":true}"#);
    send(&mut vm, &frame([2; 6], 5));
    let mut released = false;
    loop {
        let received = wired.frame();
        if is_message(&received) {
            let expected = (Mac(MAC), Message::Released(3));
            assert_eq!(Message::parse(&received), Some(expected));
            released = true;
        } else if received == frame([2; 6], 5) {
            break;
        } else {
            assert_eq!(received, big);
            arrived += 1;
        }
    }
    assert!(
        released,
        "what device and switch say to each other is not lost"
    );
    assert!(arrived < sent, "a pulled cable loses frames");
}

#[test]
fn frames_come_by_a_shortcut_in_order_with_those_by_the_switch() {
    let mut wired = Wired::start("shortcut", &[]);
    let _client = wired.process.client();
    let mut vm = wired.vm();
    // One that cannot work is refused, and nothing else happens.
    wired.grant_by(5, NEIGHBOUR, [event(), event()]);
    assert_eq!(wired.message(), Message::Released(5));
    wired.grant_by(5, NEIGHBOUR, [ring::create().unwrap(), event()]);
    assert_eq!(wired.message(), Message::Released(5));
    let mut ring = wired.grant(5, NEIGHBOUR);
    assert_eq!(wired.message(), Message::Ready(5));
    // Not read before it is opened: the switch may have earlier frames.
    ring.push(&frame(MAC, 2));
    send(&mut wired.wire, &frame(MAC, 1));
    assert_eq!(receive(&mut vm), frame(MAC, 1));
    wired.tell(Message::Open(5));
    assert_eq!(receive(&mut vm), frame(MAC, 2));
    // From its sleep it is woken.
    for number in 3..10 {
        let mut asleep = false;
        assert!(ring.producer.push(&frame(MAC, number)).unwrap());
        until(|| {
            asleep |= ring.producer.must_wake();
            let received = &wired.process.counters()["shortcuts"]["rx_frames"];
            asleep || *received == u64::from(number) - 1
        });
        if asleep {
            wake::signal(&ring.end);
        }
        assert_eq!(receive(&mut vm), frame(MAC, number));
    }
    // What is in the ring comes before what is sent by the switch later.
    assert!(ring.producer.push(&frame(MAC, 20)).unwrap());
    send(&mut wired.wire, &frame(MAC, 21));
    let mut vm_reader = Reader::new();
    let mut both = Vec::new();
    while both.len() < 2 {
        while let Some(frame) = vm_reader.next_frame().unwrap() {
            both.push(frame.to_vec());
        }
        if both.len() < 2 {
            fill(&mut vm, &mut vm_reader);
        }
    }
    assert_eq!(both, [frame(MAC, 20), frame(MAC, 21)]);
    let counters = wired.process.counters();
    assert_eq!(counters["shortcuts"]["in_use"], 1);
    assert_eq!(counters["shortcuts"]["rx_frames"], 9);
    // The switch takes it back.
    wired.tell(Message::Revoke(5));
    assert_eq!(wired.message(), Message::Released(5));
    assert!(ring.producer.push(&frame(MAC, 30)).unwrap());
    wired.tell(Message::Close(5));
    assert_eq!(wired.message(), Message::Closed(5));
    assert_eq!(receive(&mut vm), frame(MAC, 30));
    assert_eq!(wired.process.counters()["shortcuts"]["in_use"], 0);
    // A guest cannot speak to the switch.
    send(&mut vm, &Message::Closed(9).to_frame(Mac(MAC)));
    send(&mut vm, &frame([2; 6], 40));
    assert_eq!(wired.frame(), frame([2; 6], 40));
}

#[test]
fn a_ring_that_makes_no_sense_is_given_up() {
    let mut wired = Wired::start("broken", &[]);
    let _client = wired.process.client();
    let ring = wired.grant(6, NEIGHBOUR);
    // The index of the ring that the device reads: no multiple of anything.
    rustix::io::pwrite(&ring.memory, &0x1234_5677u32.to_ne_bytes(), 0).unwrap();
    wired.tell(Message::Open(6));
    assert_eq!(wired.message(), Message::Ready(6));
    assert_eq!(wired.message(), Message::Released(6));
    assert_eq!(wired.process.counters()["shortcuts"]["in_use"], 0);
}

#[test]
fn a_guest_sends_from_the_devices_address_alone() {
    for any_source in [false, true] {
        let mut wired = if any_source {
            Wired::start("any-source", &["--any-source-mac"])
        } else {
            Wired::start("own-source", &[])
        };
        let mut vm = wired.vm();
        let mut forged = frame([2; 6], 1);
        forged[6..12].copy_from_slice(&[0x52, 0x54, 0, 0xfe, 0, 9]);
        send(&mut vm, &forged);
        send(&mut vm, &frame([2; 6], 2));
        let first = if any_source { forged } else { frame([2; 6], 2) };
        assert_eq!(wired.receive(), first);
        let drops = &wired.process.counters()["vm"]["source_drops"];
        assert_eq!(*drops, u64::from(!any_source));
    }
}

#[test]
fn what_device_and_switch_say_to_each_other_passes_neither_way() {
    let mut wired = Wired::start("switch-messages", &[]);
    let mut vm = wired.vm();
    // As if the guest were the device; then as if the switch meant the guest.
    let said = Message::Hello { any_source: true }.to_frame(Mac(MAC));
    send(&mut vm, &said);
    send(&mut vm, &frame([2; 6], 1));
    loop {
        let sent = wired.frame();
        assert_ne!(sent, said);
        if sent == frame([2; 6], 1) {
            break;
        }
    }
    wired.tell(Message::Hello { any_source: false });
    send(&mut wired.wire, &frame(MAC, 2));
    assert_eq!(receive(&mut vm), frame(MAC, 2));
}

#[test]
fn a_ring_brings_frames_of_its_owner_alone() {
    for forge_source in [true, false] {
        let name = if forge_source { "forged" } else { "astray" };
        let mut wired = Wired::start(name, &[]);
        let _client = wired.process.client();
        let mut ring = wired.grant(4, NEIGHBOUR);
        let mut forged = frame(MAC, 1);
        forged[if forge_source { 11 } else { 5 }] ^= 1;
        ring.push(&forged);
        wired.tell(Message::Open(4));
        assert_eq!(wired.message(), Message::Ready(4));
        assert_eq!(wired.message(), Message::Released(4));
        assert_eq!(wired.process.counters()["shortcuts"]["rx_frames"], 0);
    }
}

#[test]
fn a_neighbour_that_takes_no_signals_does_not_stop_the_device() {
    let mut wired = Wired::start("deaf", &[]);
    let _client = wired.process.client();
    let memory = ring::create().unwrap();
    let (mut producer, _consumer) = ring::attach(&memory, 0).unwrap();
    let [end, of_device] = wake::pair().unwrap();
    // Whatever can be done to the files that are shared.
    for file in [&end, &of_device] {
        rustix::fs::fcntl_setfl(file, rustix::fs::OFlags::empty()).unwrap();
    }
    wired.grant_by(8, NEIGHBOUR, [memory.try_clone().unwrap(), of_device]);
    wired.tell(Message::Open(8));
    assert_eq!(wired.message(), Message::Ready(8));
    /// Where the writer of the first ring says that it waits for room.
    const WAITING: u64 = 192;
    // Each frame asks for a signal that room is there, which nobody takes:
    // more of them than any buffer holds.
    for number in 1..=2000 {
        rustix::io::pwrite(&memory, &1u32.to_ne_bytes(), WAITING).unwrap();
        assert!(producer.push(&frame(MAC, 1)).unwrap());
        producer.must_wake();
        wake::signal(&end);
        until(|| wired.process.counters()["shortcuts"]["rx_frames"] == number);
    }
}

/// A neighbour with an engine of its own, that sends nothing but answers.
struct Neighbour {
    node: Node,
    memory: Region,
    start: Instant,
}

/// The device's queue pair that is connected to a neighbour.
struct Connected {
    qpn: u32,
    producer: u32,
}

/// Bytes of one write to a neighbour.
const WRITE: u32 = 64 * 1024;
/// Writes that are posted to a queue pair at once: more than it may have unanswered.
const WRITES: u32 = 64;
/// Queue pairs to a neighbour that together fill every buffer on the way.
const MANY: u32 = 4;

impl Neighbour {
    fn new(number: u8) -> Self {
        let mut node = Node::new(number);
        let access = abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_WRITE;
        let memory = node.register(0x100, 1, access, WRITE.into());
        Self {
            node,
            memory,
            start: Instant::now(),
        }
    }

    fn mac(&self) -> Mac {
        Mac(self.node.mac)
    }

    fn receive(&mut self, frame: &[u8], medium: Medium) {
        self.node.now = self.start.elapsed().as_nanos() as u64;
        let (now, host) = (self.node.now, &mut self.node.host);
        self.node.engine.receive_frame(frame, medium, now, host);
    }

    fn receive_lent(&mut self, head: &[u8], loan: &Arc<Loan>) {
        self.node.now = self.start.elapsed().as_nanos() as u64;
        let (now, host) = (self.node.now, &mut self.node.host);
        self.node.engine.receive_lent(head, loan, now, host);
    }

    /// What it has to answer.
    fn answers(&mut self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.node.now = self.start.elapsed().as_nanos() as u64;
        self.node.settle();
        self.node.host.sent.drain(..)
    }

    /// Takes what is in the ring and answers it.
    fn serve_ring(&mut self, ring: &mut Ring) {
        let mut buffer = vec![0; MAX_FRAME];
        ring.consumer.look().unwrap();
        while let Some(record) = ring.consumer.next(&mut buffer).unwrap() {
            let head = &buffer[..record.copied()];
            match record {
                Record::Frame(_) => self.receive(head, Medium::Memory),
                Record::Train(_, log_mtu, payload) => {
                    let length = payload.len();
                    let loan = Loan::passing(log_mtu, &Arc::new(Passing(payload)), length);
                    self.receive_lent(head, &Arc::new(loan));
                }
            }
        }
        if ring.consumer.release() {
            wake::signal(&ring.end);
        }
        for answer in self.answers() {
            ring.push(&answer);
        }
    }

    /// Takes what is there at the fabric and answers it.
    fn serve_wire(&mut self, wired: &mut Wired) {
        wired.wire.set_nonblocking(true).unwrap();
        while let Ok(count) = wired.reader.fill(&mut wired.wire) {
            assert!(count > 0, "the device hung up");
            while let Some(frame) = wired.reader.next_frame().unwrap() {
                if !is_message(frame) {
                    self.receive(frame, Medium::Wire);
                }
            }
        }
        wired.wire.set_nonblocking(false).unwrap();
        for answer in self.answers() {
            send(&mut wired.wire, &answer);
        }
    }
}

impl Driver {
    const REPLY: u64 = 0x3000;
    const HANDLER_EVENTS: u64 = 0x4000;
    /// A completion queue, with its record behind it.
    const COMPLETIONS: u64 = 0x8000;
    const LOG_COMPLETIONS: u8 = 9;
    /// Send and receive queue and record of each queue pair.
    const QUEUES: u64 = 0x2_0000;
    const QUEUE: u64 = 0x8000;
    const LOG_BLOCKS: u8 = 8;
    /// What is written to neighbours.
    const DATA: u64 = 0x8_0000;
    const DATA_TAG: u32 = 0x100;
    const GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 99];

    fn put<P: abi::Plain>(&self, offset: u64, value: &P) {
        rustix::io::pwrite(&self.memory, value.as_bytes(), offset).unwrap();
    }

    fn get<P: abi::Plain>(&self, offset: u64) -> P {
        let mut value = P::zeroed();
        let count = rustix::io::pread(&self.memory, value.as_bytes_mut(), offset).unwrap();
        assert_eq!(count, size_of::<P>());
        value
    }

    fn doorbell(client: &mut Client, page: u32, offset: usize, word: u64) {
        let at = u64::from(page) * abi::DOORBELL_PAGE_SIZE as u64 + offset as u64;
        client
            .region_write(abi::BAR_DOORBELLS, at, &word.to_le_bytes())
            .unwrap();
    }

    /// Executes a command; it must succeed.
    fn execute<P: abi::Command>(&mut self, client: &mut Client, payload: &P) {
        let entry = abi::CommandEntry::new(P::OPCODE, self.commands, (0, 0), payload);
        self.give(client, &entry);
    }

    /// Executes a query; it must succeed.
    fn query<R: abi::Plain>(&mut self, client: &mut Client, opcode: abi::CommandOpcode) -> R {
        let reply = (Self::BASE + Self::REPLY, size_of::<R>() as u32);
        let entry = abi::CommandEntry::new(opcode, self.commands, reply, &0u64);
        let done = self.give(client, &entry);
        assert_eq!(done.param1, size_of::<R>() as u64);
        self.get(Self::REPLY)
    }

    fn give(&mut self, client: &mut Client, entry: &abi::CommandEntry) -> abi::EventEntry {
        let index = self.commands;
        self.commands += 1;
        let slot = u64::from(index % 16) * size_of::<abi::CommandEntry>() as u64;
        self.put(Self::RING + slot, entry);
        Self::doorbell(client, 0, abi::DOORBELL_CONTROL, u64::from(self.commands));
        let at = Self::EVENTS + u64::from(index) * size_of::<abi::EventEntry>() as u64;
        until(|| self.get::<abi::EventEntry>(at).code != 0);
        let event: abi::EventEntry = self.get(at);
        assert_eq!(
            event.param0 as u8,
            abi::CommandStatus::Ok as u8,
            "command {index}"
        );
        event
    }

    /// Makes what queue pairs need: an address, a completion queue, a region.
    fn prepare(&mut self, client: &mut Client) {
        let ring = (size_of::<abi::EventEntry>() as u64) << 6;
        self.execute(
            client,
            &abi::CreateEventQueue {
                eqn: abi::EQ_FIRST_HANDLER,
                message: 6,
                log_entries: 6,
                overflow: 0,
                priority: 0,
                reserved: 0,
                ring: abi::Buffer::contiguous(Self::BASE + Self::HANDLER_EVENTS, ring),
            },
        );
        self.execute(
            client,
            &abi::SetGid {
                gid: Self::GID,
                index: 0,
                vlan: abi::VLAN_NONE,
                mac: MAC,
                port: 0,
                reserved: [0; 5],
            },
        );
        self.prepare_cq(client, 1, 1);
        self.execute(
            client,
            &abi::RegisterRegion {
                tag: Self::DATA_TAG,
                pd: 1,
                access: 0,
                flags: 0,
                address: 0,
                buffer: abi::Buffer::contiguous(Self::BASE + Self::DATA, WRITE.into()),
            },
        );
    }

    /// Makes a completion queue that is armed from a doorbell page.
    fn prepare_cq(&mut self, client: &mut Client, cqn: u32, doorbell_page: u32) {
        let ring = (size_of::<abi::CompletionEntry>() as u64) << Self::LOG_COMPLETIONS;
        let length = ring + size_of::<abi::CompletionRecord>() as u64;
        self.execute(
            client,
            &abi::CreateCompletionQueue {
                cqn,
                eqn: if cqn == 1 {
                    abi::EQ_FIRST_HANDLER
                } else {
                    abi::EQ_NONE
                },
                log_entries: Self::LOG_COMPLETIONS,
                reserved0: 0,
                doorbell_page,
                record_offset: ring as u32,
                buffer: abi::Buffer::contiguous(Self::BASE + Self::COMPLETIONS, length),
                processor: 0,
                reserved1: [0; 3],
            },
        );
    }

    /// Connects queue pair `qpn` to one of the same number at a neighbour.
    fn connect(&mut self, client: &mut Client, qpn: u32, neighbour: &mut Neighbour) -> Connected {
        use abi::Plain;
        let send_size = (abi::BLOCK_SIZE as u64) << Self::LOG_BLOCKS;
        let receive_size = 1u64 << abi::RQ_MAX_LOG_STRIDE;
        let length = send_size + receive_size + size_of::<abi::QueuePairRecord>() as u64;
        assert!(length <= Self::QUEUE);
        self.execute(
            client,
            &abi::CreateQueuePair {
                qpn,
                pd: 1,
                send_cqn: 1,
                receive_cqn: 1,
                service: abi::Service::Rc as u8,
                transport: abi::Transport::RoceV2 as u8,
                flags: 0,
                sq_log_blocks: Self::LOG_BLOCKS,
                rq_log_entries: 0,
                rq_log_stride: abi::RQ_MAX_LOG_STRIDE,
                port: 0,
                srqn: 0,
                doorbell_page: 1,
                buffer: abi::Buffer::contiguous(Self::BASE + Self::queue(qpn), length),
                sq_offset: 0,
                rq_offset: send_size as u32,
                record_offset: (send_size + receive_size) as u32,
                xrcd: 0,
                reserved: [0; 3],
            },
        );
        // It does not give up its neighbour as long as this test goes.
        let peer = Peer {
            timeout: 24,
            ..neighbour.node.as_peer(qpn)
        };
        let modify = |state: abi::QueuePairStateCode, mask| abi::ModifyQueuePair {
            qpn,
            mask: abi::MODIFY_STATE | mask,
            state: state as u8,
            log_mtu: peer.log_mtu,
            destination_qpn: peer.qpn,
            receive_psn: peer.receive_psn,
            send_psn: peer.send_psn,
            ird: peer.depth,
            ord: peer.depth,
            min_rnr_timer: 1,
            timeout: peer.timeout,
            retry_count: peer.retry_count,
            rnr_retry: peer.rnr_retry,
            address_vector: peer.address_vector(),
            ..abi::ModifyQueuePair::zeroed()
        };
        let init = abi::MODIFY_PKEY | abi::MODIFY_ACCESS;
        let receive = abi::MODIFY_ADDRESS_VECTOR
            | abi::MODIFY_MTU
            | abi::MODIFY_DESTINATION
            | abi::MODIFY_RECEIVE_PSN
            | abi::MODIFY_IRD
            | abi::MODIFY_MIN_RNR_TIMER;
        let send = abi::MODIFY_SEND_PSN
            | abi::MODIFY_TIMEOUT
            | abi::MODIFY_RETRY
            | abi::MODIFY_RNR_RETRY
            | abi::MODIFY_ORD;
        for (state, mask) in [
            (abi::QueuePairStateCode::Init, init),
            (abi::QueuePairStateCode::Rtr, receive),
            (abi::QueuePairStateCode::Rts, send),
        ] {
            self.execute(client, &modify(state, mask));
        }
        let own = Peer {
            mac: MAC,
            gid: Self::GID,
            ..peer
        };
        neighbour.node.create_qp(QpOptions {
            qpn,
            ..QpOptions::default()
        });
        neighbour.node.connect(qpn, &own);
        Connected { qpn, producer: 0 }
    }

    /// Where the queues of a queue pair are.
    fn queue(qpn: u32) -> u64 {
        Self::QUEUES + u64::from(qpn) * Self::QUEUE
    }

    /// Posts writes to a neighbour.
    fn write(&self, client: &mut Client, to: &mut Connected, neighbour: &Neighbour) {
        let data = abi::Sge {
            address: 0,
            length: WRITE,
            lkey: Self::DATA_TAG,
        };
        let work = SendWork::new(abi::SendOpcode::Write, &[data])
            .remote(neighbour.memory.address, neighbour.memory.tag);
        let blocks = work.encode();
        assert_eq!(blocks.len(), abi::BLOCK_SIZE);
        for _ in 0..WRITES {
            let slot = u64::from(to.producer % (1 << Self::LOG_BLOCKS));
            let at = Self::queue(to.qpn) + slot * abi::BLOCK_SIZE as u64;
            rustix::io::pwrite(&self.memory, &blocks, at).unwrap();
            to.producer += 1;
        }
        let record = (abi::BLOCK_SIZE as u64) << Self::LOG_BLOCKS;
        let record = record + (1 << abi::RQ_MAX_LOG_STRIDE);
        self.put(Self::queue(to.qpn) + record, &to.producer);
        let word = abi::send_doorbell(to.qpn, to.producer);
        Self::doorbell(client, 1, abi::DOORBELL_SEND, word);
    }

    /// Completions of a queue pair so far; none is an error.
    fn completed(&self, of: &Connected) -> u32 {
        let mut count = 0;
        for index in 0..1 << Self::LOG_COMPLETIONS {
            let size = size_of::<abi::CompletionEntry>() as u64;
            let at = Self::COMPLETIONS + u64::from(index) * size;
            let entry: abi::CompletionEntry = self.get(at);
            let phase = abi::phase_of(index, Self::LOG_COMPLETIONS);
            if entry.phase & abi::COMPLETION_PHASE != phase {
                break;
            }
            assert_eq!(entry.status, abi::CompletionStatus::Success as u8);
            count += u32::from(entry.qpn == of.qpn);
        }
        count
    }
}

/// A device with connections to two neighbours: many to the first, one to the other.
struct Streams {
    wired: Wired,
    client: Client,
    driver: Driver,
    first: Neighbour,
    to_first: Vec<Connected>,
    other: Neighbour,
    to_other: Connected,
}

impl Streams {
    fn start(name: &str) -> Self {
        let wired = Wired::start(name, &["--qp-first", "2"]);
        let mut client = wired.process.client();
        let mut driver = Driver::start(&mut client, true);
        driver.prepare(&mut client);
        let (mut first, mut other) = (Neighbour::new(1), Neighbour::new(2));
        let to_first = (2..2 + MANY)
            .map(|qpn| driver.connect(&mut client, qpn, &mut first))
            .collect();
        let to_other = driver.connect(&mut client, 2 + MANY, &mut other);
        Self {
            wired,
            client,
            driver,
            first,
            to_first,
            other,
            to_other,
        }
    }

    /// A shortcut by which frames go from now on.
    fn shortcut(&mut self, id: ShortcutId, peer: Mac) -> Ring {
        let ring = self.wired.grant(id, peer);
        self.wired.tell(Message::Open(id));
        assert_eq!(self.wired.message(), Message::Ready(id));
        ring
    }

    /// Sends to the first as much as can be under way, and more.
    fn fill_up(&mut self) {
        for to in &mut self.to_first {
            self.driver.write(&mut self.client, to, &self.first);
        }
    }

    /// Streams to the other, which takes everything: without waiting for the first.
    fn stream_to_other(&mut self, ring: &mut Ring) {
        for round in 1..=3 {
            let (driver, to) = (&self.driver, &mut self.to_other);
            driver.write(&mut self.client, to, &self.other);
            until(|| {
                self.other.serve_ring(ring);
                driver.completed(to) == round * WRITES
            });
        }
        assert_eq!(self.first_completed(), 0);
    }

    fn first_completed(&self) -> u32 {
        let completed = |to| self.driver.completed(to);
        self.to_first.iter().map(completed).sum()
    }

    fn counter(&self, group: &str, name: &str) -> u64 {
        self.wired.process.counters()[group][name].as_u64().unwrap()
    }
}

#[test]
fn a_neighbour_that_stops_reading_holds_up_no_other() {
    let mut streams = Streams::start("stuck-neighbour");
    let (first, other) = (streams.first.mac(), streams.other.mac());
    let mut ring_of_first = streams.shortcut(1, first);
    let mut ring_of_other = streams.shortcut(2, other);
    streams.fill_up();
    // So little room is none for the engine.
    let full = (ring::DATA - ENOUGH_ROOM) as u64;
    until(|| streams.counter("shortcuts", "tx_bytes") > full);
    streams.stream_to_other(&mut ring_of_other);
    // It reads after all, and has lost nothing.
    until(|| {
        streams.first.serve_ring(&mut ring_of_first);
        streams.first_completed() == MANY * WRITES
    });
    assert_eq!(streams.counter("shortcuts", "tx_drops"), 0);
    assert_eq!(streams.counter("engine", "retransmissions"), 0);
}

#[test]
fn a_fabric_that_hangs_holds_up_no_neighbour() {
    let mut streams = Streams::start("stuck-fabric");
    let other = streams.other.mac();
    let mut ring = streams.shortcut(1, other);
    // Nobody reads at the fabric from here on: what the VM's own interface sends fills the socket
    // and the queue in front of it.
    let mut vm = streams.wired.vm();
    let mut big = frame([2; 6], 1);
    big.resize(9000, 1);
    for _ in 0..2000 {
        send(&mut vm, &big);
    }
    until(|| streams.counter("vm", "rx_frames") == 2000);
    streams.fill_up();
    streams.stream_to_other(&mut ring);
    // It goes on, and nothing is lost or out of step.
    until(|| {
        streams.first.serve_wire(&mut streams.wired);
        streams.first_completed() == MANY * WRITES
    });
    assert_eq!(streams.counter("uplink", "tx_drops"), 0);
    assert_eq!(streams.counter("engine", "retransmissions"), 0);
}

/// For how long what may not wait for a close may take, on a machine that is busy.
const NO_CLOSE: Duration = Duration::from_secs(30);

/// A socket whose last close takes longer than that, and the end that does not read.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (silent, _) = listener.accept().unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(2 * NO_CLOSE)).unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, silent)
}

#[test]
fn a_descriptor_that_takes_long_to_close_does_not_keep_a_device_that_goes() {
    let mut process = Process::start("linger-end", &[]);
    let _client = process.client();
    // It is not accepted.
    let second = connect(&process.path("socket"));
    let (socket, _silent) = lingering();
    descriptors::send(&second, &[0; 64], &[&socket]).unwrap();
    drop(socket);
    let start = Instant::now();
    let pid = Pid::from_child(&process.child);
    kill_process(pid, Signal::TERM).unwrap();
    process.end();
    assert!(start.elapsed() < NO_CLOSE, "it waited for a close");
}

#[test]
fn a_descriptor_that_takes_long_to_close_does_not_stop_the_device() {
    let process = Process::start("linger", &[]);
    let _client = process.client();
    let start = Instant::now();
    let mut keep = Vec::new();
    for name in ["net", "control", "counters"] {
        let (socket, silent) = lingering();
        keep.push(silent);
        // The last is in the device's hands when it goes on.
        let pid = stop(&process.child);
        let bad = UnixStream::connect(process.path(name)).unwrap();
        if let Err(error) = descriptors::send(&bad, &[0], &[&socket]) {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            rustix::net::sockopt::set_socket_linger(&socket, None).unwrap();
        }
        drop(socket);
        kill_process(pid, Signal::CONT).unwrap();
        process.counters();
        drop(bad);
        process.counters();
    }
    assert!(start.elapsed() < NO_CLOSE, "it waited for a close");
}

#[test]
fn an_idle_device_uses_no_processor_time() {
    let process = Process::start("idle", &[]);
    let mut client = process.client();
    Driver::start(&mut client, true);
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.child.id())).unwrap();
        let fields: Vec<u64> = stat
            .rsplit(')')
            .next()
            .unwrap()
            .split_ascii_whitespace()
            .skip(11)
            .take(2)
            .map(|field| field.parse().unwrap())
            .collect();
        fields[0] + fields[1]
    };
    // Once it has begun: that may take a while.
    until(|| {
        let before = ticks();
        std::thread::sleep(Duration::from_millis(500));
        ticks() - before <= 2
    });
}

#[test]
fn bad_options_and_sockets_are_named() {
    let run = |options: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite-device"))
            .args(options)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{options:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&[]).contains("--socket"));
    assert!(run(&["--socket", "/nonexistent/x"]).contains("/nonexistent/x"));
    assert!(run(&["--socket", "x", "--mac", "nonsense"]).contains("nonsense"));
    assert!(run(&["--socket", "x", "--mac", "01:00:00:00:00:00"]).contains("address"));
    assert!(run(&["--socket", "x", "--vectors", "0"]).contains("--vectors"));
    assert!(run(&["--socket", "x", "--vectors", "513"]).contains("--vectors"));
    let few = ["--socket", "x", "--vectors", "9", "--messages", "8"];
    assert!(run(&few).contains("--messages"));
    for kinds in ["msi,pin", ""] {
        assert!(run(&["--socket", "x", "--interrupts", kinds]).contains("--interrupts"));
    }
    for (option, values) in [
        ("--qp-first", ["1", "16760832"]),
        ("--cq-first", ["-1", "16760833"]),
        ("--srq-first", ["-1", "16769025"]),
        ("--tag-first", ["0", "15728641"]),
        ("--tags", ["0", "1048577"]),
        ("--doorbell-pages", ["1", "16385"]),
        ("--doorbell-stride", ["11", "17"]),
    ] {
        for value in values {
            let argument = format!("{option}={value}");
            assert!(
                run(&["--socket", "x", &argument]).contains(option),
                "{argument}"
            );
        }
    }
    // More than a guest can map.
    for (pages, stride) in [("16384", "14"), ("4096", "16")] {
        let options = ["--doorbell-pages", pages, "--doorbell-stride", stride];
        let said = run(&[&["--socket", "/nonexistent/x"], &options[..]].concat());
        assert!(said.contains("--doorbell-stride"), "{said}");
    }
    for (pages, stride) in [("16384", "13"), ("4080", "16")] {
        let options = ["--doorbell-pages", pages, "--doorbell-stride", stride];
        let said = run(&[&["--socket", "/nonexistent/x"], &options[..]].concat());
        assert!(said.contains("/nonexistent/x"), "{said}");
    }
    assert!(run(&["--socket", "x", "--log", "loud"]).contains("warn"));
    assert!(run(&["--socket", "x", "--uplink", "/nonexistent/up"]).contains("/nonexistent/up"));
    let process = Process::start("taken", &[]);
    let socket = process.path("socket");
    for _ in 0..2 {
        assert!(run(&["--socket", socket.to_str().unwrap()]).contains("another process"));
    }
    // Who was asked is still there for his monitor.
    register(&mut process.client(), abi::REG_STATUS);
}

#[test]
fn memory_that_is_not_shared_is_told() {
    // Without a file.
    let mut process = Process::start("no-file", &[]);
    let mut stream = connect(&process.path("socket"));
    let mut message = Vec::new();
    message.extend_from_slice(&1u16.to_ne_bytes());
    message.extend_from_slice(&2u16.to_ne_bytes());
    message.extend_from_slice(&48u32.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&32u32.to_ne_bytes());
    message.extend_from_slice(&3u32.to_ne_bytes());
    message.extend_from_slice(&0u64.to_ne_bytes());
    message.extend_from_slice(&0u64.to_ne_bytes());
    message.extend_from_slice(&(512u64 << 20).to_ne_bytes());
    stream.write_all(&message).unwrap();
    let (status, text) = process.end();
    assert!(!status.success());
    assert!(text.contains("share=on"), "{text}");

    // With a file of which this process has a private copy.
    let mut process = Process::start("private", &[]);
    let mut client = process.client();
    let memory = memfd(4096);
    // SAFETY: a new mapping that is not accessed.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::PRIVATE,
            &memory,
            0,
        )
    }
    .unwrap();
    let _ = client.dma_map(0, 0, 4096, memory.as_raw_fd());
    let (status, text) = process.end();
    assert!(!status.success());
    assert!(text.contains("share=on"), "{text}");
    // SAFETY: the mapping made above, to which nothing refers.
    unsafe { rustix::mm::munmap(base, 4096) }.unwrap();
}
