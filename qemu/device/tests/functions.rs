// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Several functions of one device process: each has a host of its own, and what one of them does
//! concerns no other.

#[path = "../../fabric/tests/common/mod.rs"]
#[allow(dead_code, reason = "the tests of others need more of it")]
mod common;

use common::{until, DEADLINE};
use ferrite_abi::*;
use ferrite_conformance::host::{Connection, Host, OWN_GID, OWN_GID6, PEER_GID, PEER_GID6};
use ferrite_conformance::memory::Memory;
use ferrite_conformance::outcome::watch;
use ferrite_conformance::rings::{Cq, Qp, Region};
use ferrite_conformance::transport::Device;
use ferrite_conformance::wire::{interface, Link, Wire};
use ferrite_conformance::work::Work;
use ferrite_fabric::framing::{Reader, Writer};
use ferrite_fabric::shortcut::Message;
use ferrite_fabric::switch::Mac;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
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
        let child = command
            .args(["--log", "off"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let process = Self { child, directory };
        let last = format!("socket{}", functions.len() - 1);
        until(|| process.path(&last).exists());
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
        let mut text = String::new();
        self.connect("counters").read_to_string(&mut text).unwrap();
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
    let to_peer = host.to_neighbour();
    let to_peer = Connection {
        qpn: peer.qp.qpn,
        address_vector: AddressVector {
            mac: mac(function as u8),
            gid: gids(function)[0],
            ..to_peer.address_vector
        },
        send_psn: 0x300,
        receive_psn: 0x300,
        ..to_peer
    };
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
    let said = |wire: &mut UnixStream, reader: &mut Reader| loop {
        if reader.take_mark().is_some() {
            if let Some(frame) = reader.next_frame().unwrap() {
                return Message::parse(frame).unwrap();
            }
        }
        assert!(reader.fill(wire).unwrap() > 0);
    };
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
        let mut writer = Writer::new(1 << 16);
        assert!(writer.push(&message.to_frame(Mac(STRANGER))));
        assert!(writer.flush(&mut wire).unwrap());
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
