// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several functions of one device process: each has a host of its own, and what one of them does
//! concerns no other.

#[path = "../../fabric/tests/common/mod.rs"]
#[allow(dead_code, reason = "the tests of others need more of it")]
mod common;

use common::{until, DEADLINE};
use ferrite_abi::*;
use ferrite_conformance::host::{region_of, Host, OWN_GID, OWN_GID6, PEER_GID, PEER_GID6};
use ferrite_conformance::memory::Memory;
use ferrite_conformance::outcome::watch;
use ferrite_conformance::rings::{Cq, Qp, Region};
use ferrite_conformance::transport::Device;
use ferrite_conformance::wire::{interface, Link, Wire};
use ferrite_conformance::work::Work;
use ferrite_fabric::descriptors;
use ferrite_fabric::framing::{Reader, Writer};
use ferrite_fabric::ring;
use ferrite_fabric::shortcut::Message;
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::offset_of;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// A process with several functions.
struct Process {
    child: Child,
    directory: PathBuf,
}

fn mac(function: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0xfe, 0, 1 + function]
}

const STRANGER: [u8; 6] = [2, 0, 0, 0, 0, 9];
const ALL: [u8; 6] = [0xff; 6];

impl Process {
    /// Starts one with functions of these keys beside their sockets and addresses.
    fn start(name: &str, functions: &[&str], uplink: Option<&str>) -> Self {
        let directory = Self::directory(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-device"));
        for (number, keys) in functions.iter().enumerate() {
            let path = |kind: &str| {
                directory
                    .join(format!("{kind}{number}"))
                    .display()
                    .to_string()
            };
            let [socket, net] = [path("socket"), path("net")];
            let mac = Mac(mac(number as u8));
            let function = format!("socket={socket},net={net},mac={mac}{keys}");
            command.arg("--function").arg(function);
        }
        for name in ["counters", "control"] {
            command.arg(format!("--{name}")).arg(directory.join(name));
        }
        if let Some(uplink) = uplink {
            command.arg("--uplink").arg(directory.join(uplink));
        }
        let last = format!("socket{}", functions.len() - 1);
        Self::spawn(command, directory, &last)
    }

    /// Starts one with a function alone, that of this number.
    fn start_alone(directory: PathBuf, number: usize, uplink: &str) -> Self {
        let path = |kind: &str| directory.join(format!("{kind}{number}"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-device"));
        command.arg("--mac").arg(Mac(mac(number as u8)).to_string());
        for kind in ["socket", "net"] {
            command.arg(format!("--{kind}")).arg(path(kind));
        }
        command.arg("--counters").arg(path("counters"));
        command.arg("--uplink").arg(directory.join(uplink));
        Self::spawn(command, directory.clone(), &format!("socket{number}"))
    }

    fn spawn(mut command: Command, directory: PathBuf, last: &str) -> Self {
        let child = command
            .args(["--log", "off"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Self { child, directory };
        until(|| process.path(last).exists());
        process
    }

    fn directory(name: &str) -> PathBuf {
        let name = format!("ferrite-functions-{}-{name}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        let _ = std::fs::create_dir_all(&directory);
        directory
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn device(&self, function: usize) -> Device {
        Device::connect(&self.path(&format!("socket{function}"))).unwrap()
    }

    fn net(&self, function: usize) -> Link {
        let link = interface(&self.path(&format!("net{function}"))).unwrap();
        until(|| self.counters()["functions"][function]["vm"]["connects"] == 1);
        link
    }

    fn connect(&self, name: &str) -> UnixStream {
        let mut stream = None;
        until(|| {
            stream = UnixStream::connect(self.path(name)).ok();
            stream.is_some()
        });
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    fn counters(&self) -> Value {
        self.counters_by("counters")
    }

    fn counters_by(&self, socket: &str) -> Value {
        let mut text = String::new();
        self.connect(socket).read_to_string(&mut text).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    fn count(&self, function: usize, of: &str, what: &str) -> u64 {
        self.counters()["functions"][function][of][what]
            .as_u64()
            .unwrap()
    }

    fn control(&self, request: &str) -> Value {
        let mut stream = self.connect("control");
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        until(|| {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Two functions.
enum Two {
    /// Of one process.
    Inside(Process),
    /// Each of a process of its own, with memory that both share past the switch, which is the test.
    ByShortcut(
        [Process; 2],
        #[allow(dead_code, reason = "they stay open")] [UnixStream; 2],
    ),
}

impl Two {
    fn inside(name: &str) -> Self {
        Self::Inside(Process::start(name, &["", ""], None))
    }

    fn by_shortcut(name: &str) -> Self {
        let directory = Process::directory(name);
        let listener = UnixListener::bind(directory.join("wire")).unwrap();
        let memory = ring::create().unwrap();
        let mut ends = wake::pair().unwrap().into_iter();
        let both = [0, 1].map(|number| {
            let process = Process::start_alone(directory.clone(), number, "wire");
            let (mut wire, _) = listener.accept().unwrap();
            wire.set_read_timeout(Some(DEADLINE)).unwrap();
            let mut reader = Reader::new();
            let hello = Message::Hello { any_source: false };
            assert_eq!(said(&mut wire, &mut reader).1, hello);
            let peer = Mac(mac(1 - number as u8));
            let grant = Message::Grant {
                shortcut: 7,
                side: number as u8,
                peer,
            };
            let fds = [memory.try_clone().unwrap(), ends.next().unwrap()];
            let bytes = as_sent(grant);
            assert_eq!(descriptors::send(&wire, &bytes, &fds).unwrap(), bytes.len());
            assert_eq!(said(&mut wire, &mut reader).1, Message::Ready(7));
            wire.write_all(&as_sent(Message::Open(7))).unwrap();
            (process, wire)
        });
        let [(a, to_a), (b, to_b)] = both;
        Self::ByShortcut([a, b], [to_a, to_b])
    }

    fn device(&self, function: usize) -> Device {
        match self {
            Self::Inside(process) => process.device(function),
            Self::ByShortcut(both, _) => both[function].device(function),
        }
    }

    fn count(&self, function: usize, of: &str, what: &str) -> u64 {
        match self {
            Self::Inside(process) => process.count(function, of, what),
            Self::ByShortcut(both, _) => {
                let counters = both[function].counters_by(&format!("counters{function}"));
                counters[of][what].as_u64().unwrap()
            }
        }
    }
}

/// The next message of a device to the switch, and who says it.
fn said(wire: &mut UnixStream, reader: &mut Reader) -> (Mac, Message) {
    loop {
        if reader.take_mark().is_some() {
            if let Some(frame) = reader.next_frame().unwrap() {
                return Message::parse(frame).unwrap();
            }
        }
        assert!(reader.fill(wire).unwrap() > 0);
    }
}

/// A message of the switch, as it is sent.
fn as_sent(message: Message) -> Vec<u8> {
    let mut writer = Writer::new(1 << 16);
    assert!(writer.push(&message.to_frame(Mac(STRANGER))));
    let mut bytes = Vec::new();
    assert!(writer.flush(&mut bytes).unwrap());
    bytes
}

/// A queue pair of a host, with what it needs.
struct End {
    qp: Qp,
    cq: Cq,
    region: Region,
}

/// A host that runs, with the addresses that this function has among the others.
fn host(device: &mut Device, function: usize) -> Host<'_> {
    let mut host = Host::new(device, None, None).unwrap();
    host.start().unwrap();
    for (index, gid) in [(0, gids(function)[0]), (1, gids(function)[1])] {
        host.set_gid(index, gid, VLAN_NONE).unwrap();
    }
    host
}

fn gids(function: usize) -> [[u8; 16]; 2] {
    [[OWN_GID, OWN_GID6], [PEER_GID, PEER_GID6]][function]
}

fn end(host: &mut Host<'_>) -> End {
    let cq = host.create_cq().unwrap();
    let qp = host.create_qp(Service::Rc, &cq).unwrap();
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
    let region = host.region(access, 2 << 20).unwrap();
    End { qp, cq, region }
}

/// Connects an end of a host to one of another function's.
fn join(host: &mut Host<'_>, end: &End, function: usize, peer: &End) {
    join_with(host, end, function, peer, 10);
}

fn join_with(host: &mut Host<'_>, end: &End, function: usize, peer: &End, log_mtu: u8) {
    let (mac, gid) = (mac(function as u8), gids(function)[0]);
    let to_peer = host.to_device(mac, gid, peer.qp.qpn, log_mtu);
    host.bring(Service::Rc, &end.qp, QueuePairStateCode::Rts, &to_peer)
        .unwrap();
}

/// Two hosts that are connected.
fn connected(a: &mut Host<'_>, b: &mut Host<'_>) -> (End, End) {
    let (of_a, of_b) = (end(a), end(b));
    join(a, &of_a, 1, &of_b);
    join(b, &of_b, 0, &of_a);
    (of_a, of_b)
}

/// Bytes of no pattern, by `seed`.
fn noise(seed: u32, length: u32) -> Vec<u8> {
    let mut random = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        random as u8
    };
    (0..length).map(|_| next()).collect()
}

/// What the functions have copied: bytes that each has read of its host's memory into frames, and bytes that
/// it got from where the other had them, or had put them.
fn copied(two: &Two) -> [(u64, u64); 2] {
    [0, 1].map(|function| {
        let read = two.count(function, "dma", "read_bytes");
        (read, two.count(function, "dma", "direct_bytes"))
    })
}

/// Writes `length` bytes of this value into the region of the other, which is returned.
fn write(from: &mut Host<'_>, own: &mut End, to: &Host<'_>, other: &End, value: u8, length: u32) {
    let data = vec![value; length as usize];
    from.memory.write(own.region.dma, &data);
    let sge = own.region.sge(0, length);
    let work = Work::remote(
        SendOpcode::Write,
        &[sge],
        other.region.address,
        other.region.tag,
    );
    from.post_for(&mut own.qp, &mut own.cq, &work, CompletionStatus::Success)
        .unwrap();
    assert_eq!(to.memory.bytes(other.region.dma, length.into()), data);
}

fn frame(to: [u8; 6], from: [u8; 6], vlan: Option<u16>) -> Vec<u8> {
    let mut frame = [to, from].concat();
    if let Some(vlan) = vlan {
        frame.extend([0x81, 0]);
        frame.extend(vlan.to_be_bytes());
    }
    frame.extend([0x08, 0x06]);
    frame.resize(60, 0x5a);
    frame
}

fn silent(link: &mut Link) {
    watch("a frame that is for others", || link.look()).unwrap();
}

#[test]
fn two_functions_write_to_each_other_inside() {
    let process = Process::start("write", &["", ",qps=100"], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    assert_eq!((a.mac, b.mac), (mac(0), mac(1)));
    for (number, host) in [(0, &mut a), (1, &mut b)] {
        let function = Function(host.device.register32(REG_FUNCTION).unwrap());
        assert_eq!(function.number(), number);
        assert!(
            host.device.status().unwrap().link_up(),
            "they have each other"
        );
    }
    // The numbers of one are none of the other's.
    let ends = |caps: &DeviceCaps| (caps.qp_first, caps.qp_first + caps.qp_count);
    assert_eq!(b.caps.qp_count, 100);
    assert!(ends(&a.caps).1 <= ends(&b.caps).0);
    assert!(a.caps.tag_first + a.caps.tag_count <= b.caps.tag_first);
    let cq = b.create_cq().unwrap();
    let mut foreign = b.qp_command(Service::Rc, &cq);
    foreign.qpn = a.caps.qp_first;
    b.refuse(&foreign, CommandStatus::BadNumber).unwrap();

    let (mut of_a, mut of_b) = connected(&mut a, &mut b);
    for value in 1..20 {
        write(&mut a, &mut of_a, &b, &of_b, value, 64 << 10);
        write(
            &mut b,
            &mut of_b,
            &a,
            &of_a,
            value + 100,
            1 + u32::from(value),
        );
    }
    // Much more at once than there is room for on the way, both ways.
    const LONG: u32 = 2 << 20;
    a.memory.fill(of_a.region.dma, LONG.into(), 0xa5);
    b.memory.fill(of_b.region.dma, LONG.into(), 0xa5);
    let region = |end: &End| (end.region.address, end.region.tag);
    let (to_a, to_b) = (region(&of_a), region(&of_b));
    let mut all = Vec::new();
    for _ in 0..6 {
        for (host, own, (address, tag)) in [(&mut a, &mut of_a, to_b), (&mut b, &mut of_b, to_a)] {
            let sge = own.region.sge(0, LONG);
            let work = Work::remote(SendOpcode::Write, &[sge], address, tag);
            host.post(&mut own.qp, &work).unwrap();
        }
    }
    for (host, own) in [(&mut a, &mut of_a), (&mut b, &mut of_b)] {
        for _ in 0..6 {
            all.push(host.completion(&mut own.cq).unwrap().status);
        }
    }
    assert_eq!(all, [CompletionStatus::Success as u8; 12]);
    assert!(process.count(0, "inside", "tx_bytes") > 19 * (64 << 10) + 6 * u64::from(LONG));
    assert!(process.count(1, "inside", "rx_frames") >= process.count(0, "inside", "tx_frames"));
    for function in [0, 1] {
        assert_eq!(process.count(function, "inside", "tx_drops"), 0);
        assert_eq!(process.count(function, "uplink", "tx_frames"), 0);
    }
}

/// Sizes around those of packets and of what is lent at once.
const SIZES: [u32; 16] = [
    1,
    7,
    2047,
    2048,
    2049,
    4095,
    4096,
    4097,
    10_000,
    65_535,
    65_536,
    65_537,
    200_001,
    1 << 20,
    (1 << 20) + 3,
    (2 << 20) - 8,
];
/// Entries that a receive has here at most.
const RECEIVE_ENTRIES: u64 = 3;
/// Of a message that is lent, the bytes behind the last whole piece may be too few for it.
const REST: u64 = 2048;

#[test]
fn data_goes_from_memory_to_memory_and_is_right() {
    data_is_right(&Two::inside("direct"));
}

#[test]
fn data_goes_by_a_shortcut_in_no_frames_and_is_right() {
    data_is_right(&Two::by_shortcut("trains"));
}

fn data_is_right(two: &Two) {
    let (mut device_a, mut device_b) = (two.device(0), two.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    for (round, log_mtu) in [(0, 8), (1, 10), (2, 12)] {
        let (mut of_a, mut of_b) = (end(&mut a), end(&mut b));
        join_with(&mut a, &of_a, 1, &of_b, log_mtu);
        join_with(&mut b, &of_b, 0, &of_a, log_mtu);
        // So each has heard of the other.
        write(&mut a, &mut of_a, &b, &of_b, 1, 8);
        write(&mut b, &mut of_b, &a, &of_a, 2, 8);
        for (seed, length) in (round * 100..).zip(SIZES) {
            let data = noise(seed, length);
            let whole = |counts: (u64, u64), before: (u64, u64)| {
                let got = counts.1 - before.1;
                let least = if u64::from(length) < REST {
                    0
                } else {
                    u64::from(length) - REST
                };
                (least..=u64::from(length)).contains(&got)
            };
            // At another alignment each time, of one to four entries, to another alignment.
            let shift = u64::from(seed % 5);
            let list = |end: &End, parts: u64| -> Vec<Sge> {
                let end_of = |part: u64| u64::from(length) * part / parts;
                (0..parts)
                    .filter(|part| end_of(*part) < end_of(part + 1))
                    .map(|part| {
                        let (from, to) = (end_of(part), end_of(part + 1));
                        end.region.sge(shift + from, (to - from) as u32)
                    })
                    .collect()
            };
            let parts = u64::from(seed % 4 + 1);
            let there = of_b.region.address + 8 - shift;
            let dma = of_b.region.dma + 8 - shift;
            // A write, a send, and a read.
            a.memory.write(of_a.region.dma + shift, &data);
            let before = copied(two);
            let work = Work::remote(
                SendOpcode::Write,
                &list(&of_a, parts),
                there,
                of_b.region.tag,
            );
            let wanted = CompletionStatus::Success;
            a.post_for(&mut of_a.qp, &mut of_a.cq, &work, wanted)
                .unwrap();
            assert_eq!(
                b.memory.bytes(dma, length.into()),
                data,
                "write of {length}"
            );
            let after = copied(two);
            assert!(whole(after[1], before[1]), "{length}: {before:?} {after:?}");

            b.memory.fill(of_b.region.dma, of_b.region.length, 0x5a);
            let places = list(&of_b, parts.min(RECEIVE_ENTRIES));
            let receive = b.post_receive(&mut of_b.qp, &places).unwrap();
            let before = copied(two);
            let work = Work::send(&list(&of_a, parts));
            a.post_for(&mut of_a.qp, &mut of_a.cq, &work, wanted)
                .unwrap();
            let got = b
                .completes(&mut of_b.cq, (of_b.qp.qpn, receive), wanted)
                .unwrap();
            assert_eq!(got.byte_count, length);
            let received = b.memory.bytes(of_b.region.dma + shift, length.into());
            assert_eq!(received, data, "send of {length}");
            let after = copied(two);
            assert!(whole(after[1], before[1]), "{length}: {before:?} {after:?}");

            b.memory.write(dma, &data);
            a.memory.fill(of_a.region.dma, of_a.region.length, 0x5a);
            let work = Work::remote(
                SendOpcode::Read,
                &list(&of_a, parts),
                there,
                of_b.region.tag,
            );
            let before = copied(two);
            a.post_for(&mut of_a.qp, &mut of_a.cq, &work, wanted)
                .unwrap();
            let read = a.memory.bytes(of_a.region.dma + shift, length.into());
            assert_eq!(read, data, "read of {length}");
            let after = copied(two);
            assert!(whole(after[0], before[0]), "{length}: {before:?} {after:?}");
            // Nothing behind it was touched.
            let behind = of_a.region.dma + shift + u64::from(length);
            assert_eq!(a.memory.bytes(behind, 1), [0x5a]);
        }
        // Those who have lent it have not copied it, too: what they read are queues and records.
        let total: u64 = SIZES.iter().map(|size| u64::from(*size)).sum();
        let counts = copied(two);
        let rounds = u64::from(round) + 1;
        assert!(counts[0].0 < rounds * total / 10, "{counts:?} of {total}");
        assert!(counts[1].0 < rounds * total / 10, "{counts:?} of {total}");
        for (host, end) in [(&mut a, &of_a), (&mut b, &of_b)] {
            host.destroy(CommandOpcode::DestroyQueuePair, end.qp.qpn)
                .unwrap();
        }
        let both = |of, what| [0, 1].map(|function| two.count(function, of, what));
        assert_eq!(both("engine", "retransmissions"), [0, 0]);
        if let Two::ByShortcut(..) = two {
            assert_eq!(both("shortcuts", "tx_drops"), [0, 0]);
            // Nothing of it went by the switch.
            assert_eq!(both("uplink", "rx_frames"), [0, 0]);
        }
    }
}

/// Milliseconds for which a tag of the second function is pending, and so a write to it waits.
const HELD: u64 = 700;
/// What is in the sender's memory when it is no longer the peer's business.
const SECRET: u8 = 0xee;

/// A write of the first function waits at the second one while something becomes of the memory that it comes
/// from, and of all that is around. Gives what the second one has in the place then.
fn while_a_write_waits(
    name: &str,
    change: impl FnOnce(&mut Host<'_>, &mut End, usize),
    wanted: Option<CompletionStatus>,
) -> Vec<u8> {
    const LENGTH: u32 = 48 << 10;
    const FURTHER: u64 = 0x1_0000_0000;
    let process = Process::start(name, &["", ""], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    let (mut of_a, of_b) = connected(&mut a, &mut b);
    write(&mut a, &mut of_a, &b, &of_b, 1, 8);
    // Its memory can be taken away alone.
    let number = a.map(FURTHER, 1 << 20).unwrap();
    a.further(number).fill(FURTHER, LENGTH.into(), 0x11);
    let mut command = a.region_command(ACCESS_LOCAL_WRITE, 8);
    command.buffer = Buffer::contiguous(FURTHER, LENGTH.into());
    a.execute(&command).unwrap();
    of_a.region = region_of(&command);
    // The place of the write is under a tag that comes late.
    let rule = format!(r#"{{"cmd":"misbehave","function":1,"hold_tags":{HELD}}}"#);
    assert_eq!(process.control(&rule)["ok"], true);
    let command = b.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, LENGTH.into());
    let place = region_of(&command);
    let entry = b.entry(CommandOpcode::RegisterRegion, &command);
    b.write_command(&entry);
    b.ring_control().unwrap();
    let sge = of_a.region.sge(0, LENGTH);
    let work = Work::remote(SendOpcode::Write, &[sge], place.address, place.tag);
    a.post(&mut of_a.qp, &work).unwrap();
    until(|| process.count(1, "engine", "pending_waits") == 1);
    let begun = std::time::Instant::now();
    change(&mut a, &mut of_a, number);
    assert!(
        begun.elapsed().as_millis() < u128::from(HELD),
        "it waits for none"
    );
    b.untouched(place.dma, LENGTH.into()).unwrap();
    b.answer(entry.cookie).unwrap();
    if let Some(wanted) = wanted {
        let status = a.completion(&mut of_a.cq).unwrap().status;
        assert_eq!(status, wanted as u8);
    } else {
        // The second function has looked at the write when it has dropped it.
        until(|| process.count(1, "engine", "rx_dropped") > 0);
    }
    b.nop().unwrap();
    assert!(process.counters()["functions"][1]["dma"]["errors"] == 0);
    b.memory.bytes(place.dma, LENGTH.into())
}

#[test]
fn bytes_are_those_that_are_there_when_they_are_taken() {
    let changed = |a: &mut Host<'_>, of_a: &mut End, number: usize| {
        let memory = a.further(number);
        memory.fill(of_a.region.dma, of_a.region.length, 0x22);
    };
    let got = while_a_write_waits("changed", changed, Some(CompletionStatus::Success));
    assert!(got.iter().all(|byte| *byte == 0x22));
}

#[test]
fn what_was_let_go_of_is_read_by_nobody() {
    fn hide(a: &Host<'_>, of_a: &End, number: usize) {
        let memory = a.further(number);
        memory.fill(of_a.region.dma, of_a.region.length, SECRET);
    }
    type Change = fn(&mut Host<'_>, &mut End, usize);
    let changes: [(&str, Change, Option<CompletionStatus>); 6] = [
        (
            "released",
            |a, of_a, number| {
                a.destroy(CommandOpcode::ReleaseTag, of_a.region.tag)
                    .unwrap();
                hide(a, of_a, number);
            },
            Some(CompletionStatus::LocalProtection),
        ),
        (
            "destroyed",
            |a, of_a, number| {
                a.destroy(CommandOpcode::DestroyQueuePair, of_a.qp.qpn)
                    .unwrap();
                hide(a, of_a, number);
            },
            None,
        ),
        (
            "flushed",
            |a, of_a, number| {
                a.move_qp(of_a.qp.qpn, QueuePairStateCode::Error).unwrap();
                let status = a.completion(&mut of_a.cq).unwrap().status;
                assert_eq!(status, CompletionStatus::Flushed as u8);
                hide(a, of_a, number);
            },
            None,
        ),
        (
            "reset",
            |a, of_a, number| {
                a.device.control_reset().unwrap();
                hide(a, of_a, number);
            },
            None,
        ),
        (
            "function-reset",
            |a, of_a, number| {
                a.device.function_level_reset().unwrap();
                hide(a, of_a, number);
            },
            None,
        ),
        (
            "unmapped",
            |a, _, number| a.unmap(number).unwrap(),
            Some(CompletionStatus::LocalProtection),
        ),
    ];
    for (name, change, wanted) in changes {
        let got = while_a_write_waits(name, change, wanted);
        assert!(got.iter().all(|byte| *byte == 0), "{name}");
    }
}

#[test]
fn nothing_is_placed_where_the_function_was_reset() {
    const LENGTH: u32 = 2 << 20;
    let resets: [fn(&mut Host<'_>); 3] = [
        |b| b.device.control_reset().unwrap(),
        |b| b.device.function_level_reset().unwrap(),
        |b| b.device.reset().unwrap(),
    ];
    for (number, reset) in resets.into_iter().enumerate() {
        let process = Process::start(&format!("placed{number}"), &["", ""], None);
        let (mut device_a, mut device_b) = (process.device(0), process.device(1));
        let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
        let (mut of_a, of_b) = connected(&mut a, &mut b);
        write(&mut a, &mut of_a, &b, &of_b, 1, 8);
        a.memory.fill(of_a.region.dma, LENGTH.into(), SECRET);
        let sge = of_a.region.sge(0, LENGTH);
        let place = (of_b.region.address, of_b.region.tag);
        let work = Work::remote(SendOpcode::Write, &[sge], place.0, place.1);
        for _ in 0..30 {
            a.post(&mut of_a.qp, &work).unwrap();
        }
        // As soon as any of it is there: all of it takes some milliseconds.
        let begun = std::time::Instant::now();
        while b.memory.bytes(of_b.region.dma, 1) != [SECRET] {
            assert!(begun.elapsed() < DEADLINE, "nothing was written");
            std::thread::yield_now();
        }
        reset(&mut b);
        b.memory.fill(of_b.region.dma, LENGTH.into(), 0x33);
        // What was on its way is taken by now, and what comes again.
        let frames = process.count(0, "inside", "tx_frames");
        until(|| process.count(1, "inside", "rx_frames") >= frames);
        let retransmissions = process.count(0, "engine", "retransmissions");
        until(|| process.count(0, "engine", "retransmissions") > retransmissions);
        let got = b.memory.bytes(of_b.region.dma, LENGTH.into());
        assert!(got.iter().all(|byte| *byte == 0x33));
        a.nop().unwrap();
        a.move_qp(of_a.qp.qpn, QueuePairStateCode::Reset).unwrap();
    }
}

#[test]
fn a_release_waits_for_a_copy_and_no_copy_begins_after_it() {
    let process = Process::start("release", &["", ""], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    let (mut own, mut other) = (end(&mut a), end(&mut b));
    let length = own.region.length as u32;
    let mut ended = [0; 2];
    for round in 0..60u8 {
        let value = round + 1;
        for (host, end) in [(&mut a, &mut own), (&mut b, &mut other)] {
            let fresh = host.create_qp(Service::Rc, &end.cq).unwrap();
            let old = std::mem::replace(&mut end.qp, fresh).qpn;
            host.destroy(CommandOpcode::DestroyQueuePair, old).unwrap();
        }
        join_with(&mut a, &own, 1, &other, 12);
        join_with(&mut b, &other, 0, &own, 12);
        a.memory.fill(own.region.dma, own.region.length, value);
        let access = ACCESS_LOCAL_WRITE;
        let mut command = a.region_command(access, 1);
        command.buffer = Buffer::contiguous(own.region.dma, own.region.length);
        a.execute(&command).unwrap();
        let source = region_of(&command);
        let place = (other.region.address, other.region.tag);
        // The first one is heard of, so that the others are lent.
        let sge = source.sge(0, 8);
        let work = Work::remote(SendOpcode::Write, &[sge], place.0, place.1);
        a.post_for(&mut own.qp, &mut own.cq, &work, CompletionStatus::Success)
            .unwrap();
        for _ in 0..4 {
            let sge = source.sge(0, length);
            let work = Work::remote(SendOpcode::Write, &[sge], place.0, place.1);
            a.post(&mut own.qp, &work).unwrap();
        }
        // At another time each round.
        std::thread::sleep(std::time::Duration::from_micros(u64::from(round) * 20));
        a.destroy(CommandOpcode::ReleaseTag, source.tag).unwrap();
        a.memory.fill(own.region.dma, own.region.length, SECRET);
        for _ in 0..4 {
            let status = a.completion(&mut own.cq).unwrap().status;
            ended[usize::from(status != CompletionStatus::Success as u8)] += 1;
        }
        let got = b.memory.bytes(other.region.dma, other.region.length);
        assert!(!got.contains(&SECRET), "round {round}");
    }
    assert!(ended[1] > 0, "no release was in the middle: {ended:?}");
}

#[test]
fn a_turn_ends_when_what_was_lent_was_read() {
    let process = Process::start("turn", &["", ""], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    let (of_a, mut of_b) = connected(&mut a, &mut b);
    let turn = a.control_record() - offset_of!(ControlRecord, producer) as u64
        + offset_of!(ControlRecord, turn) as u64;
    for length in (1..20).map(|times| times * (16 << 10)) {
        let sge = of_b.region.sge(0, length);
        let place = (of_a.region.address, of_a.region.tag);
        let work = Work::remote(SendOpcode::Read, &[sge], place.0, place.1);
        let success = CompletionStatus::Success;
        b.post_for(&mut of_b.qp, &mut of_b.cq, &work, success)
            .unwrap();
        // Nobody says anything to the first one any more.
        until(|| a.memory.load32(turn) % 2 == 0);
    }
    assert_ne!(a.memory.load32(turn), 0, "no turn was shown");
    assert!(copied(&Two::Inside(process))[1].1 > 0, "nothing was lent");
}

#[test]
fn frames_go_where_the_table_says() {
    let name = "table";
    let mut wire = Wire::listen(&Process::directory(name).join("wire")).unwrap();
    let keys = ["", "", ",any-source-mac", ",vlans=7"];
    let process = Process::start(name, &keys, Some("wire"));
    let mut nets: Vec<Link> = (0..4).map(|function| process.net(function)).collect();
    let mut expect = |nets: &mut Vec<Link>, frame: &[u8], from: Option<usize>, to: &[usize]| {
        match from {
            Some(function) => nets[function].send(frame).unwrap(),
            None => wire.send(frame).unwrap(),
        }
        for function in to {
            assert_eq!(nets[*function].receive("a frame").unwrap(), frame);
        }
        for function in (0..4).filter(|function| !to.contains(function)) {
            silent(&mut nets[function]);
        }
    };
    let broadcast = frame(ALL, mac(0), None);
    expect(&mut nets, &broadcast, Some(0), &[1, 2]);
    let to_one = frame(mac(1), mac(0), None);
    expect(&mut nets, &to_one, Some(0), &[1]);
    let to_stranger = frame(STRANGER, mac(1), None);
    expect(&mut nets, &to_stranger, Some(1), &[2]);
    let in_vlan = frame(ALL, mac(3), Some(7));
    expect(&mut nets, &in_vlan, Some(3), &[0, 1, 2]);
    let by_bridge = frame(ALL, STRANGER, None);
    expect(&mut nets, &by_bridge, Some(2), &[0, 1]);
    // Nobody is another, nor in a VLAN that is not its.
    expect(&mut nets, &frame(ALL, mac(1), None), Some(0), &[]);
    expect(&mut nets, &frame(ALL, STRANGER, None), Some(1), &[]);
    expect(&mut nets, &frame(ALL, mac(0), None), Some(2), &[]);
    expect(&mut nets, &frame(ALL, mac(3), None), Some(3), &[]);
    // By the wire.
    expect(&mut nets, &frame(ALL, STRANGER, None), None, &[0, 1, 2]);
    expect(
        &mut nets,
        &frame(ALL, STRANGER, Some(7)),
        None,
        &[0, 1, 2, 3],
    );
    expect(&mut nets, &frame(mac(1), STRANGER, None), None, &[1]);
    expect(&mut nets, &frame(mac(3), STRANGER, None), None, &[]);
    expect(&mut nets, &frame(STRANGER, [2; 6], None), None, &[2]);
    expect(&mut nets, &frame(ALL, mac(1), None), None, &[]);
    // Of all that the wire has got what is for others, and nothing else.
    for sent in [&broadcast, &to_stranger, &in_vlan, &by_bridge] {
        assert_eq!(&wire.link().unwrap().receive("a frame").unwrap(), sent);
    }
    silent(wire.link().unwrap());
    for (function, drops) in [(0, 1), (1, 1), (2, 1), (3, 0)] {
        assert_eq!(process.count(function, "uplink", "source_drops"), drops);
    }
    assert_eq!(process.count(3, "uplink", "vlan_drops"), 1);
    assert_eq!(process.counters()["uplink"]["source_drops"], 1);
}

#[test]
fn the_switch_is_told_of_each_address_and_grants_no_shortcut() {
    let name = "switch";
    let listener = UnixListener::bind(Process::directory(name).join("wire")).unwrap();
    let _process = Process::start(name, &["", ",any-source-mac"], Some("wire"));
    let (mut wire, _) = listener.accept().unwrap();
    wire.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut reader = Reader::new();
    for (number, any_source) in [(0, false), (1, true)] {
        let address = Message::Address { any_source };
        assert_eq!(said(&mut wire, &mut reader), (Mac(mac(number)), address));
    }
    // One that knows no better.
    let grant = Message::Grant {
        shortcut: 7,
        side: 0,
        peer: Mac(STRANGER),
    };
    for (message, answer) in [
        (grant, Message::Released(7)),
        (Message::Revoke(7), Message::Released(7)),
        (Message::Close(7), Message::Closed(7)),
    ] {
        wire.write_all(&as_sent(message)).unwrap();
        assert_eq!(said(&mut wire, &mut reader).1, answer);
    }
}

#[test]
fn one_that_is_reset_or_goes_disturbs_no_other() {
    let mut process = Process::start("life", &["", ""], None);
    let mut device_a = process.device(0);
    let mut a = host(&mut device_a, 0);
    // Something of its own goes on all the time.
    let cq = a.create_cq().unwrap();
    let (mut own, mut other) = a.pair(Service::Rc, &cq).unwrap();
    let mut cq = cq;
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    let region = a.region(access, 4096).unwrap();
    let mut works = |a: &mut Host<'_>| {
        let receive = a.post_receive(&mut other, &[region.sge(0, 64)]).unwrap();
        let send = a
            .post(&mut own, &Work::send(&[region.sge(64, 64)]))
            .unwrap();
        let mut left = vec![(own.qpn, send), (other.qpn, receive)];
        while !left.is_empty() {
            let entry = a.completion(&mut cq).unwrap();
            assert_eq!(entry.status, CompletionStatus::Success as u8);
            left.retain(|end| *end != (entry.qpn, entry.index));
        }
    };
    works(&mut a);
    let resets: [fn(&mut Host<'_>); 3] = [
        |b| b.device.control_reset().unwrap(),
        |b| b.device.function_level_reset().unwrap(),
        |b| b.device.reset().unwrap(),
    ];
    // Then a fatal error, and a host that goes without a word.
    for round in 0..5 {
        let mut device_b = process.device(1);
        let mut b = host(&mut device_b, 1);
        let (mut of_a, of_b) = connected(&mut a, &mut b);
        write(&mut a, &mut of_a, &b, &of_b, round as u8 + 1, 4096);
        match round {
            3 => {
                // It fails, and the other does not.
                let answer = process.control(r#"{"cmd":"fatal","function":1}"#);
                assert_eq!(answer["ok"], true);
                b.device.wait_state(DeviceState::Fatal).unwrap();
            }
            _ => {
                if let Some(reset) = resets.get(round) {
                    reset(&mut b);
                }
            }
        }
        works(&mut a);
        // What is sent to it now is lost, and that is all.
        let sge = of_a.region.sge(0, 64);
        let work = Work::remote(
            SendOpcode::Write,
            &[sge],
            of_b.region.address,
            of_b.region.tag,
        );
        drop(b);
        drop(device_b);
        a.post(&mut of_a.qp, &work).unwrap();
        works(&mut a);
        assert_eq!(
            a.device.status().unwrap().state(),
            Some(DeviceState::Running)
        );
        assert!(process.child.try_wait().unwrap().is_none());
        a.move_qp(of_a.qp.qpn, QueuePairStateCode::Reset).unwrap();
        // Nothing of the host that was there is left.
        until(|| process.counters()["functions"][1]["guest_memory_bytes"] == 0);
    }
    drop(a);
    drop(device_a);
    assert!(
        process.end().success(),
        "both had a host, and both are gone"
    );
    let left = std::fs::read_dir(&process.directory).unwrap();
    let left: Vec<_> = left.flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_link_is_that_of_all() {
    let process = Process::start("link", &["", ",personality=combined"], None);
    let (mut a, mut b) = (process.device(0), process.device(1));
    for up in [true, false, true] {
        let answer = process.control(&format!(r#"{{"cmd":"link","up":{up}}}"#));
        assert_eq!(answer["ok"], true);
        assert_eq!(a.status().unwrap().link_up(), up);
        assert_eq!(b.status().unwrap().link_up(), up);
        assert_eq!(process.counters()["link_up"], up);
    }
    for bad in [
        r#"{"cmd":"fatal"}"#,
        r#"{"cmd":"fatal","function":2}"#,
        r#"{"cmd":"fatal","function":"a"}"#,
        r#"{"cmd":"link","up":true,"function":0}"#,
        "{",
    ] {
        assert_eq!(process.control(bad)["ok"], false, "{bad}");
    }
    let one = process.control(r#"{"cmd":"counters","function":1}"#);
    assert!(one["interface"].is_object() && one["functions"].is_null());
}

#[test]
fn a_hostile_guest_reaches_nothing_of_another() {
    let process = Process::start("hostile", &["", ""], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let (mut a, mut b) = (host(&mut device_a, 0), host(&mut device_b, 1));
    // Tags that are not there, of another instance, and of places that are not the region's.
    for (tag, offset) in [(1 << 8, 0), (1, 0), (0, 2 << 20), (0, 0u64.wrapping_sub(1))] {
        let (mut of_a, of_b) = connected(&mut a, &mut b);
        let address = of_b.region.address.wrapping_add(offset);
        let sge = of_a.region.sge(0, 64);
        for opcode in [SendOpcode::Write, SendOpcode::Read] {
            let work = Work::remote(opcode, &[sge], address, of_b.region.tag ^ tag);
            let before = b.memory.bytes(of_b.region.dma, of_b.region.length);
            a.memory.write(of_a.region.dma, &[0x66; 64]);
            let wanted = CompletionStatus::RemoteAccess;
            if opcode == SendOpcode::Write {
                a.post_for(&mut of_a.qp, &mut of_a.cq, &work, wanted)
                    .unwrap();
            } else {
                let wanted = CompletionStatus::Flushed;
                a.post_for(&mut of_a.qp, &mut of_a.cq, &work, wanted)
                    .unwrap();
            }
            assert_eq!(b.memory.bytes(of_b.region.dma, of_b.region.length), before);
            assert_eq!(a.memory.bytes(of_a.region.dma, 64), [0x66; 64]);
        }
    }
    // An address of its own that is another's: none of its packets gets there.
    let (mut of_a, of_b) = connected(&mut a, &mut b);
    a.execute(&SetGid {
        gid: gids(0)[0],
        index: 0,
        vlan: VLAN_NONE,
        mac: mac(1),
        ..SetGid::zeroed()
    })
    .unwrap();
    a.move_qp(of_a.qp.qpn, QueuePairStateCode::Reset).unwrap();
    join(&mut a, &of_a, 1, &of_b);
    let sge = of_a.region.sge(0, 64);
    let work = Work::remote(
        SendOpcode::Write,
        &[sge],
        of_b.region.address,
        of_b.region.tag,
    );
    a.memory.write(of_a.region.dma, &[0x77; 64]);
    a.post(&mut of_a.qp, &work).unwrap();
    until(|| process.count(0, "uplink", "source_drops") > 0);
    b.untouched(of_b.region.dma, 64).unwrap();
    // The other is as it was.
    assert_eq!(
        b.device.status().unwrap().state(),
        Some(DeviceState::Running)
    );
    b.nop().unwrap();
}

#[test]
fn memory_that_may_shrink_is_taken_of_nobody() {
    let process = Process::start("shrink", &["", ""], None);
    let (mut device_a, mut device_b) = (process.device(0), process.device(1));
    let mut b = host(&mut device_b, 1);
    // Behind its end an access would be a signal to the process, which is the other's, too.
    let memory = Memory::that_may_shrink(0, 1 << 20).unwrap();
    assert!(device_a.map(&memory).is_err());
    b.nop().unwrap();
    // Who has the right kind may come.
    drop(device_a);
    let mut device_a = process.device(0);
    host(&mut device_a, 0).nop().unwrap();
    b.nop().unwrap();
}

#[test]
fn who_comes_next_reads_nothing_of_what_was_counted() {
    let process = Process::start("counted", &["", ""], None);
    let mut device_a = process.device(0);
    let mut a = host(&mut device_a, 0);
    let mut seen = Vec::new();
    for _ in 0..2 {
        let mut device_b = process.device(1);
        let mut b = host(&mut device_b, 1);
        let first = b.counters().unwrap();
        let (mut of_a, of_b) = connected(&mut a, &mut b);
        write(&mut a, &mut of_a, &b, &of_b, 7, 64);
        assert_ne!(b.counters().unwrap(), first, "it counts");
        seen.push(first);
        a.move_qp(of_a.qp.qpn, QueuePairStateCode::Reset).unwrap();
        drop(b);
        drop(device_b);
        until(|| process.counters()["functions"][1]["guest_memory_bytes"] == 0);
    }
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn a_flood_to_one_that_does_not_read_is_dropped_and_holds_up_no_other() {
    let process = Process::start("flood", &["", "", ""], None);
    let mut nets: Vec<Link> = (0..3).map(|function| process.net(function)).collect();
    // Nobody reads there.
    let mut jumbo = frame(mac(1), mac(0), None);
    jumbo.resize(9000, 0);
    until(|| {
        for _ in 0..100 {
            nets[0].send(&jumbo).unwrap();
        }
        let drops = process.count(1, "vm", "tx_drops") + process.count(0, "inside", "tx_drops");
        drops > 0
    });
    let ping = frame(mac(2), mac(0), None);
    nets[0].send(&ping).unwrap();
    assert_eq!(nets[2].receive("a frame").unwrap(), ping);
    let heap = |process: &Process| process.counters()["heap_bytes"].as_u64().unwrap();
    assert!(heap(&process) < 64 << 20);
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let directory = Process::directory("options");
    let socket = |name: &str| format!("socket={}", directory.join(name).display());
    let (a, b) = (socket("a"), socket("b"));
    let one = format!("{a},mac=52:54:00:fe:00:01");
    for options in [
        vec!["--function", &a],
        vec![
            "--function",
            &one,
            "--function",
            &format!("{b},mac=52:54:00:fe:00:01"),
        ],
        vec!["--function", &one, "--socket", "c"],
        vec!["--function", &one, "--mac", "52:54:00:fe:00:03"],
        vec!["--function", &format!("{one},qps=16385")],
        vec![],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite-device"))
            .args(&options)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{options:?}");
        assert!(!output.stderr.is_empty(), "{options:?}");
    }
    let _ = std::fs::remove_dir_all(directory);
}
