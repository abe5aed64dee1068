// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fabric binary, seen from its sockets.

mod common;
mod namespaces;
mod users;

use common::{stop, until, DEADLINE};
use ferrite_fabric::descriptors::{self, Receiver};
use ferrite_fabric::framing::{Reader, Writer};
use ferrite_fabric::ring::{self, Consumer, Producer, Record};
use ferrite_fabric::shortcut::{is_message, Message, ShortcutId};
use ferrite_fabric::switch::Mac;
use rustix::process::{kill_process, Signal};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

struct Fabric {
    child: Child,
    directory: PathBuf,
}

/// A user who is nobody else.
const NOBODY: u32 = 65534;

impl Fabric {
    fn start(name: &str, options: &[&str]) -> Self {
        let fabric = Self::start_as(name, "exec \"$@\"", false, options);
        drop(fabric.connect());
        fabric.wait_for_ports(0);
        fabric
    }

    /// Starts it by a shell script, and by another user if this one can be others:
    /// root may do things that others may not.
    fn start_as(name: &str, script: &str, by_nobody: bool, options: &[&str]) -> Self {
        let directory =
            std::env::temp_dir().join(format!("ferrite-fabric-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let binary = Path::new(env!("CARGO_BIN_EXE_ferrite-fabric"));
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]);
        if by_nobody && users::are_there() {
            // Where the build lies may be closed to others.
            let copy = directory.join("fabric");
            std::fs::copy(binary, &copy).unwrap();
            std::os::unix::fs::chown(&directory, Some(NOBODY), None).unwrap();
            command.arg(copy).uid(NOBODY);
        } else {
            command.arg(binary);
        }
        let child = command
            .arg("--listen")
            .arg(directory.join("listen"))
            .arg("--control")
            .arg(directory.join("control"))
            .args(options)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, directory }
    }

    /// Ends it, and returns what it said.
    fn end(mut self) -> String {
        self.child.kill().unwrap();
        let mut text = String::new();
        let mut stderr = self.child.stderr.take().unwrap();
        stderr.read_to_string(&mut text).unwrap();
        text
    }

    fn stats(&self) -> Value {
        self.control(r#"{"cmd":"stats"}"#)
    }

    fn connect(&self) -> UnixStream {
        connect(&self.directory.join("listen"))
    }

    fn control(&self, request: &str) -> Value {
        let mut stream = connect(&self.directory.join("control"));
        writeln!(stream, "{request}").unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn wait_for_ports(&self, count: usize) {
        until(|| {
            self.control(r#"{"cmd":"stats"}"#)["ports"]
                .as_array()
                .unwrap()
                .len()
                == count
        });
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn connect(path: &Path) -> UnixStream {
    let mut stream = None;
    until(|| {
        stream = UnixStream::connect(path).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream
}

fn frame(to: u8, from: u8, fill: u8) -> Vec<u8> {
    let mut frame = vec![fill; 100];
    frame[..6].copy_from_slice(&[0x52, 0x54, 0, 0, 0, to]);
    frame[6..12].copy_from_slice(&[0x52, 0x54, 0, 0, 0, from]);
    frame
}

fn send(stream: &mut UnixStream, frame: &[u8]) {
    let mut writer = Writer::new(1 << 20);
    assert!(writer.push(frame));
    assert!(writer.flush(stream).unwrap());
}

fn receive(stream: &mut UnixStream, reader: &mut Reader) -> Vec<u8> {
    loop {
        if let Some(frame) = reader.next_frame().unwrap() {
            return frame.to_vec();
        }
        match reader.fill(stream) {
            Ok(count) => assert!(count > 0, "the fabric hung up"),
            // A child of another test has ended.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn frames_cross_and_are_captured() {
    let capture = std::env::temp_dir().join(format!("ferrite-{}.pcap", std::process::id()));
    let fabric = Fabric::start("cross", &["--pcap", capture.to_str().unwrap()]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    fabric.wait_for_ports(2);
    let mut reader = Reader::new();
    send(&mut a, &frame(2, 1, 7));
    assert_eq!(receive(&mut b, &mut reader), frame(2, 1, 7));
    until(|| std::fs::read(&capture).unwrap().len() == 24 + 16 + 100);
    std::fs::remove_file(&capture).unwrap();
    // A port that leaves is forgotten and the rest go on.
    drop(a);
    fabric.wait_for_ports(1);
}

#[test]
fn one_that_is_started_on_the_sockets_of_another_has_no_port_there() {
    let fabric = Fabric::start("twice", &[]);
    let _port = fabric.connect();
    fabric.wait_for_ports(1);
    for name in ["listen", "control"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-fabric"));
        if name != "listen" {
            command.arg("--listen").arg(fabric.directory.join("other"));
        }
        let taken = fabric.directory.join(name);
        command.arg(format!("--{name}")).arg(taken);
        let mut second = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut ports = 0;
        until(|| {
            ports = ports.max(fabric.stats()["ports"].as_array().unwrap().len());
            second.try_wait().unwrap().is_some()
        });
        let said = second.wait_with_output().unwrap().stderr;
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains("another process"), "{name}: {said}");
        assert_eq!(ports, 1, "{name}");
    }
}

#[test]
fn a_bad_length_cuts_off_that_port_only() {
    let fabric = Fabric::start("bad-length", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b, mut bad) = (fabric.connect(), fabric.connect(), fabric.connect());
    fabric.wait_for_ports(3);
    bad.write_all(&u32::MAX.to_be_bytes()).unwrap();
    assert_eq!(bad.read(&mut [0; 16]).unwrap_or(0), 0);
    let mut reader = Reader::new();
    send(&mut a, &frame(2, 1, 1));
    assert_eq!(receive(&mut b, &mut reader), frame(2, 1, 1));
}

#[test]
fn faults_change_at_run_time_and_partitions_heal() {
    let fabric = Fabric::start("faults", &["--loss", "1"]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    fabric.wait_for_ports(2);
    send(&mut a, &frame(2, 1, 1));
    until(|| fabric.control(r#"{"cmd":"stats"}"#)["ports"][0]["faults"]["lost"] == 1);
    let answer = fabric.control(r#"{"cmd":"faults","loss":0}"#);
    assert_eq!(answer["ok"], true);
    assert_eq!(fabric.control(r#"{"cmd":"faults","loss":7}"#)["ok"], false);
    assert_eq!(fabric.control("nonsense")["ok"], false);
    fabric.control(r#"{"cmd":"partition","a":"52:54:00:00:00:01"}"#);
    send(&mut a, &frame(2, 1, 2));
    until(|| fabric.control(r#"{"cmd":"stats"}"#)["ports"][1]["partition_drops"] == 1);
    fabric.control(r#"{"cmd":"heal"}"#);
    send(&mut a, &frame(2, 1, 3));
    assert_eq!(receive(&mut b, &mut Reader::new()), frame(2, 1, 3));
}

#[test]
fn a_port_that_does_not_read_loses_frames_and_stops_nobody() {
    let fabric = Fabric::start("slow", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b, _deaf) = (fabric.connect(), fabric.connect(), fabric.connect());
    fabric.wait_for_ports(3);
    let mut reader = Reader::new();
    let mut big = frame(9, 1, 0);
    big.resize(16 * 1024, 0);
    for _ in 0..2000 {
        // Flooded to both: the one that reads must get every frame.
        send(&mut a, &big);
        assert_eq!(receive(&mut b, &mut reader).len(), big.len());
    }
    let stats = fabric.control(r#"{"cmd":"stats"}"#);
    assert!(stats["ports"][2]["queue_drops"].as_u64().unwrap() > 0);
    assert_eq!(stats["ports"][1]["queue_drops"], 0);
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
fn a_descriptor_that_takes_long_to_close_stops_nobody() {
    let fabric = Fabric::start("linger", &[]);
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    fabric.wait_for_ports(2);
    let mut reader = Reader::new();
    let mut keep = Vec::new();
    let start = Instant::now();
    for number in 0..4u8 {
        // By a port, and by a control connection; with and without something in front.
        let name = if number % 2 == 0 { "listen" } else { "control" };
        let mut bad = connect(&fabric.directory.join(name));
        if number < 2 {
            bad.write_all(&[0]).unwrap();
        }
        let (socket, silent) = lingering();
        // The last is in the fabric's hands when it goes on.
        let pid = stop(&fabric.child);
        if let Err(error) = descriptors::send(&bad, &[0, 0, 60], &[&socket]) {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied);
            rustix::net::sockopt::set_socket_linger(&socket, None).unwrap();
        }
        drop(socket);
        kill_process(pid, Signal::CONT).unwrap();
        keep.push(silent);
        send(&mut a, &frame(2, 1, number));
        while receive(&mut b, &mut reader) != frame(2, 1, number) {}
        drop(bad);
        fabric.wait_for_ports(2);
    }
    assert!(start.elapsed() < NO_CLOSE, "it waited for a close");
}

#[test]
fn too_many_connections_end_nothing() {
    let script = "ulimit -n 40; exec \"$@\"";
    let mut fabric = Fabric::start_as("few", script, false, &[]);
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    fabric.wait_for_ports(2);
    let mut reader = Reader::new();
    let many: Vec<UnixStream> = (0..60).map(|_| fabric.connect()).collect();
    for _ in 0..100 {
        send(&mut a, &frame(2, 1, 2));
        while receive(&mut b, &mut reader) != frame(2, 1, 2) {}
    }
    assert!(fabric.child.try_wait().unwrap().is_none());
    drop(many);
    fabric.wait_for_ports(2);
}

/// Whether the fabric has hung up.
fn is_refused(stream: &mut UnixStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let refused = matches!(stream.read(&mut [0; 1]), Ok(0));
    stream.set_nonblocking(false).unwrap();
    refused
}

#[test]
fn there_are_no_more_ports_than_allowed() {
    let fabric = Fabric::start("max-ports", &["--max-ports", "3"]);
    let mut ports: Vec<UnixStream> = (0..5).map(|_| fabric.connect()).collect();
    until(|| {
        ports
            .iter_mut()
            .filter_map(|port| is_refused(port).then_some(()))
            .count()
            == 2
    });
    fabric.wait_for_ports(3);
    assert!(!ports[..3].iter_mut().any(is_refused));
    // Who leaves makes room.
    ports.remove(0);
    fabric.wait_for_ports(2);
    let mut late = fabric.connect();
    fabric.wait_for_ports(3);
    assert!(!is_refused(&mut late));
    let said = fabric.end();
    assert!(said.contains("--max-ports"), "{said}");
}

#[test]
fn another_user_has_no_more_ports_than_allowed() {
    let options = ["--max-ports-per-user", "2", "--max-ports", "4"];
    let fabric = Fabric::start_as("per-user", "exec \"$@\"", true, &options);
    let mut ports: Vec<UnixStream> = (0..5).map(|_| fabric.connect()).collect();
    // Who runs the fabric may have all.
    let refused = if users::are_there() { 3 } else { 1 };
    until(|| {
        ports
            .iter_mut()
            .filter_map(|port| is_refused(port).then_some(()))
            .count()
            == refused
    });
    fabric.wait_for_ports(5 - refused);
    let own = rustix::process::getuid().as_raw();
    assert_eq!(fabric.stats()["ports"][0]["uid"], own);
    assert_eq!(fabric.stats()["ports"][0]["pid"], std::process::id());
    let said = fabric.end();
    assert!(said.contains("--max-ports"), "{said}");
}

#[test]
fn ports_that_do_not_read_share_memory_that_is_bounded() {
    let resident = |fabric: &Fabric| {
        let path = format!("/proc/{}/status", fabric.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line.unwrap().split_ascii_whitespace().nth(1).unwrap();
        kib.parse::<u64>().unwrap() / 1024
    };
    let fabric = Fabric::start("memory", &["--queue-memory", "16"]);
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    let _silent: Vec<UnixStream> = (0..40).map(|_| fabric.connect()).collect();
    fabric.wait_for_ports(42);
    let mut reader = Reader::new();
    let before = resident(&fabric);
    let mut big = frame(9, 1, 0);
    big.resize(16 * 1024, 0);
    for _ in 0..600 {
        // Flooded to all. What is for one that reads is still there for it.
        send(&mut a, &big);
        assert_eq!(receive(&mut b, &mut reader).len(), big.len());
    }
    let more = resident(&fabric) - before;
    // A quarter more than is queued, and what each may have in any case.
    assert!(more < 16 + 4 + 42 / 2, "{more} MiB");
    let stats = fabric.stats();
    assert_eq!(stats["ports"][1]["queue_drops"], 0);
    assert!(stats["ports"][41]["queue_drops"].as_u64().unwrap() > 0);
}

/// Descriptors that the user who runs [`Fabric::start_as`] has under way, until
/// the sockets are dropped.
fn under_way(count: usize) -> (UnixStream, UnixStream) {
    let send = move || {
        let pair = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        for _ in 0..count {
            descriptors::send(&pair.0, &[0], &[&file]).unwrap();
        }
        pair
    };
    match users::are_there() {
        true => users::as_user(NOBODY, send),
        false => send(),
    }
}

#[test]
fn descriptors_that_nobody_reads_cut_off_no_honest_port() {
    // So many may a user have under way who is not root.
    let script = "ulimit -n 70; exec \"$@\"";
    let fabric = Fabric::start_as("under-way", script, true, &[]);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    fabric.wait_for_ports(2);
    until(|| {
        let stats = fabric.stats();
        let own = |port: usize| stats["ports"][port]["own_address"].is_string();
        own(0) && own(1)
    });
    let unread = under_way(100);
    // There can be no shortcut, and the frames go on by the switch.
    for number in 0..50 {
        a.send(&roce(2, 1));
        while b.receive() != roce(2, 1) {}
        b.send(&frame(1, 2, number));
        while a.receive() != frame(1, 2, number) {}
    }
    assert!(a.fds.is_empty() && b.fds.is_empty());
    until(|| shortcuts_in_use(&fabric) == 0);
    fabric.wait_for_ports(2);
    // Somebody reads them: the next try succeeds.
    drop(unread);
    until(|| {
        a.send(&roce(2, 1));
        shortcuts_in_use(&fabric) == 1
    });
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(b.granted(a.mac).0, id);
}

#[test]
fn a_second_device_with_the_same_address_is_told_of() {
    let fabric = Fabric::start("second", &[]);
    let _a = Capable::new(&fabric, 1, true);
    until(|| fabric.stats()["ports"][0]["own_address"].is_string());
    let _b = Capable::new(&fabric, 1, true);
    until(|| fabric.stats()["ports"][1]["source_drops"] == 1);
    assert!(fabric.stats()["ports"][1]["own_address"].is_null());
    assert_eq!(
        fabric.stats()["ports"][1]["wanted_address"],
        "52:54:00:00:00:01"
    );
    assert!(fabric.stats()["ports"][0]["wanted_address"].is_null());
    let said = fabric.end();
    assert!(said.contains("52:54:00:00:00:01, which port "), "{said}");
}

#[test]
fn who_answers_without_reading_takes_no_descriptors() {
    let script = "ulimit -n 64; exec \"$@\"";
    let fabric = Fabric::start_as("unread", script, false, &[]);
    let mut bad = Capable::new(&fabric, 1, true);
    let mut filler = fabric.connect();
    fabric.wait_for_ports(2);
    until(|| fabric.stats()["ports"][0]["own_address"].is_string());
    // Its socket is full, and its queue too.
    fill_queue(&fabric, &mut filler);
    let open = || {
        let path = format!("/proc/{}/fd", fabric.child.id());
        std::fs::read_dir(path).unwrap().count()
    };
    let before = open();
    for id in 0..20 {
        let mut other = Capable::new(&fabric, 2, true);
        until(|| {
            other.send(&roce(1, 2));
            let stats = fabric.stats();
            stats["shortcuts"]["in_use"] != 0 || stats["ports"].as_array().unwrap().len() == 2
        });
        drop(other);
        let ports = || fabric.stats()["ports"].as_array().unwrap().len();
        until(|| ports() < 3);
        // Its part in the shortcut is over for the switch, which it has not read of.
        for message in [Message::Released(id), Message::Closed(id)] {
            let mut writer = Writer::new(1 << 16);
            writer.push_always(&message.to_frame(bad.mac));
            // It may have been cut off.
            let _ = writer.flush(&mut bad.stream);
        }
        until(|| shortcuts_in_use(&fabric) == 0 || ports() == 1);
        if ports() == 1 {
            // Cut off.
            break;
        }
    }
    until(|| open() <= before);
    assert_eq!(shortcuts_in_use(&fabric), 0);
}

#[test]
fn nobody_suppresses_the_line_about_an_address() {
    let fabric = Fabric::start("suppress", &[]);
    let _a = Capable::new(&fabric, 1, true);
    until(|| fabric.stats()["ports"][0]["own_address"].is_string());
    for _ in 0..200 {
        let mut bad = fabric.connect();
        bad.write_all(&u32::MAX.to_be_bytes()).unwrap();
    }
    fabric.wait_for_ports(1);
    let _b = Capable::new(&fabric, 1, true);
    until(|| fabric.stats()["ports"][1]["source_drops"] == 1);
    let said = fabric.end();
    assert!(said.contains("which port "), "{said}");
}

/// Fills the queue of port 0, whose address ends in 1, by frames from another.
fn fill_queue(fabric: &Fabric, filler: &mut UnixStream) {
    let mut big = frame(1, 9, 0);
    big.resize(16 * 1024, 0);
    until(|| {
        for _ in 0..100 {
            send(filler, &big);
        }
        fabric.stats()["ports"][0]["queue_drops"].as_u64().unwrap() > 0
    });
}

#[test]
fn who_reads_slowly_is_asked_in_time_and_keeps_its_address() {
    let fabric = Fabric::start("slow-reader", &[]);
    let mut victim = Capable::new(&fabric, 1, true);
    let mut peer = Capable::new(&fabric, 2, true);
    let mut filler = fabric.connect();
    fabric.wait_for_ports(3);
    until(|| fabric.stats()["ports"][1]["own_address"].is_string());
    for _ in 0..4 {
        victim.send(&roce(2, 1));
    }
    let (id, _, _) = victim.granted(peer.mac);
    peer.granted(victim.mac);
    for port in [&mut victim, &mut peer] {
        port.say(Message::Ready(id));
    }
    fill_queue(&fabric, &mut filler);
    drop(peer);
    // Two MiB every 400 ms: more than the time for an answer, for what waits.
    let (start, mut bytes) = (Instant::now(), 0);
    loop {
        let frame = victim.receive();
        bytes += frame.len();
        if bytes > 2 << 20 {
            bytes = 0;
            std::thread::sleep(Duration::from_millis(400));
        }
        match Message::parse(&frame).filter(|_| is_message(&frame)) {
            Some((_, Message::Revoke(_))) => victim.say(Message::Released(id)),
            Some((_, Message::Close(_))) => break,
            _ => {}
        }
    }
    assert!(start.elapsed() > Duration::from_secs(3));
    victim.say(Message::Closed(id));
    until(|| shortcuts_in_use(&fabric) == 0);
    assert_eq!(
        fabric.stats()["ports"][0]["own_address"],
        "52:54:00:00:00:01"
    );
}

#[test]
fn grants_that_nobody_reads_are_few_and_not_for_long() {
    let fabric = Fabric::start("grants", &[]);
    let mut bad = Capable::new(&fabric, 1, true);
    fabric.wait_for_ports(1);
    until(|| fabric.stats()["ports"][0]["own_address"].is_string());
    for id in 0..20 {
        let mut other = Capable::new(&fabric, 2, true);
        for _ in 0..8 {
            other.send(&roce(1, 2));
        }
        until(|| fabric.stats()["ports"][1]["rx_frames"] == 9);
        // It answers what it has looked at, at most.
        for message in [
            Message::Ready(id),
            Message::Released(id),
            Message::Closed(id),
        ] {
            bad.say(message);
        }
        drop(other);
        bad.say(Message::Released(id));
        until(|| fabric.stats()["ports"].as_array().unwrap().len() == 1);
        bad.say(Message::Closed(id));
        until(|| shortcuts_in_use(&fabric) == 0);
    }
    // Then it is cut off, and takes them along.
    fabric.wait_for_ports(0);
    bad.stream.set_nonblocking(true).unwrap();
    let (mut buffer, mut fds) = (vec![0; 1 << 16], VecDeque::new());
    let mut receiver = Receiver::new(&bad.stream, &mut fds);
    while receiver.read(&mut buffer).is_ok_and(|count| count > 0) {}
    assert!((1..=8).contains(&fds.len()), "{} descriptors", fds.len());
}

#[test]
fn grants_that_nobody_reads_stay_few_when_ports_hang_up() {
    let fabric = Fabric::start_as("hang-up", "exec \"$@\"", true, &[]);
    let mut all = Vec::new();
    for _ in 0..50 {
        let mut ports: Vec<Capable> = (1..=5)
            .map(|number| Capable::new(&fabric, number, true))
            .collect();
        until(|| {
            let stats = fabric.stats();
            let ports = stats["ports"].as_array().unwrap();
            ports.len() == 5 && ports.iter().all(|port| port["own_address"].is_string())
        });
        for from in 1..=5u8 {
            for to in (1..=5).filter(|to| *to != from) {
                for _ in 0..4 {
                    ports[usize::from(from) - 1].send(&roce(to, from));
                }
            }
        }
        until(|| {
            let stats = fabric.stats();
            let mut ports = stats["ports"].as_array().unwrap().iter();
            ports.all(|port| port["rx_frames"] == 1 + 4 * 4)
        });
        // It keeps its ends, and what lies in them.
        for port in &ports {
            port.stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        fabric.wait_for_ports(0);
        all.append(&mut ports);
    }
    let mut count = 0;
    for port in &mut all {
        port.stream.set_nonblocking(true).unwrap();
        let mut receiver = Receiver::new(&port.stream, &mut port.fds);
        while receiver
            .read(&mut [0; 1 << 12])
            .is_ok_and(|count| count > 0)
        {}
        count += port.fds.len();
    }
    // Two for each grant; who runs the fabric has as many as there are.
    let most = if users::are_there() { 8 } else { 512 };
    assert!((8..=most).contains(&count), "{count} descriptors");
    // They are read, and there may be others.
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    fabric.wait_for_ports(2);
    until(|| {
        a.send(&roce(2, 1));
        shortcuts_in_use(&fabric) == 1
    });
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(b.granted(a.mac).0, id);
}

/// Does something as another user, who may connect to the fabric.
fn as_user<T: Send>(fabric: &Fabric, uid: u32, work: impl FnOnce(&Path) -> T + Send) -> T {
    let listen = fabric.directory.join("listen");
    until(|| listen.exists());
    let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&listen, all).unwrap();
    users::as_user(uid, || work(&listen))
}

/// Two ports of [`NOBODY`].
fn two_of_nobody(fabric: &Fabric) -> [UnixStream; 2] {
    as_user(fabric, NOBODY, |listen| [connect(listen), connect(listen)])
}

/// As many of the shortest frames as fit into a socket, which go to all ports.
fn flood() -> Vec<u8> {
    let mut small = frame(0xdd, 3, 0);
    small.truncate(18);
    let (mut bytes, mut writer) = (Vec::new(), Writer::new(60 << 10));
    while writer.push(&small) {}
    assert!(writer.flush(&mut bytes).unwrap());
    bytes
}

/// How many of them go to 200 ports for so much work, in MiB.
fn flooded(work: usize) -> usize {
    work * 1024 * 1024 / (200 * (18 + 64))
}

/// Frames that `b` receives before the last of `count` from `a`, which are sent
/// while the fabric rests, behind what is in `bad`.
fn received_before(
    fabric: &Fabric,
    bad: &mut [UnixStream],
    [mut a, mut b]: [UnixStream; 2],
    count: usize,
) -> usize {
    let bytes = flood();
    let mut writer = Writer::new(1 << 20);
    for _ in 1..count {
        writer.push_always(&frame(2, 1, 6));
    }
    writer.push_always(&frame(2, 1, 7));
    let pid = stop(&fabric.child);
    for bad in bad {
        bad.write_all(&bytes).unwrap();
    }
    assert!(writer.flush(&mut a).unwrap());
    kill_process(pid, Signal::CONT).unwrap();
    let mut reader = Reader::new();
    let mut before = 0;
    loop {
        let received = receive(&mut b, &mut reader);
        if received == frame(2, 1, 7) {
            return before;
        }
        before += usize::from(received.len() == 18);
    }
}

#[test]
fn the_ports_of_one_user_share_a_turn() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("turns", "exec \"$@\"", true, &[]);
    let _silent: Vec<UnixStream> = (0..200).map(|_| fabric.connect()).collect();
    let mut bad: Vec<UnixStream> = (0..20).map(|_| fabric.connect()).collect();
    fabric.wait_for_ports(220);
    let pair = two_of_nobody(&fabric);
    fabric.wait_for_ports(222);
    let before = received_before(&fabric, &mut bad, pair, 1);
    // Two MiB of copies of all of them together, each with what it costs. The fabric stops some time
    // after it is told to, and may have had turns before; of each port it would be twenty times that.
    let turn = flooded(2);
    assert!(before <= 4 * turn, "{before} frames, {turn} in a turn");
}

#[test]
fn the_ports_of_one_user_share_a_turn_where_frames_are_delayed() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("delayed", "exec \"$@\"", true, &["--delay", "1"]);
    let _silent: Vec<UnixStream> = (0..200).map(|_| fabric.connect()).collect();
    let mut bad: Vec<UnixStream> = (0..20).map(|_| fabric.connect()).collect();
    fabric.wait_for_ports(220);
    let pair = two_of_nobody(&fabric);
    fabric.wait_for_ports(222);
    let count = 300;
    let before = received_before(&fabric, &mut bad, pair, count);
    // One for each, and what had a turn before the first of them was due. By ports it would be twenty
    // for each.
    let turn = flooded(2);
    assert!(before <= count + 8 * turn, "{before} for {count}");
}

#[test]
fn who_has_many_users_has_one_turn_for_them() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("many-users", "exec \"$@\"", true, &[]);
    let _silent: Vec<UnixStream> = (0..200).map(|_| fabric.connect()).collect();
    let mut bad: Vec<UnixStream> = (0..40)
        .map(|number| as_user(&fabric, 20_000 + number, connect))
        .collect();
    fabric.wait_for_ports(240);
    // Its turn is after theirs.
    let pair = two_of_nobody(&fabric);
    fabric.wait_for_ports(242);
    let before = received_before(&fabric, &mut bad, pair, 1);
    // Eight MiB in a turn; of each it would be eighty.
    let turn = flooded(8);
    assert!(before <= 3 * turn, "{before} frames, {turn} in a turn");
}

/// Eight ports of one of some users, beside those of the users before it, with
/// grants of which they read none.
fn ports_of_user(fabric: &Fabric, user: u8) -> Vec<Capable> {
    let streams = as_user(fabric, 20_000 + u32::from(user), |listen| {
        (0..8).map(|_| connect(listen)).collect::<Vec<_>>()
    });
    let first = 8 * user;
    let mut ports: Vec<Capable> = (first + 1..)
        .zip(streams)
        .map(|(number, stream)| Capable::over(stream, number, true))
        .collect();
    let known = |stats: &Value| {
        let ports = stats["ports"].as_array().unwrap().iter();
        let known = ports.filter(|port| port["own_address"].is_string());
        known.count() == usize::from(first) + 8
    };
    until(|| known(&fabric.stats()));
    for (from, port) in (first + 1..).zip(&mut ports) {
        for to in (first + 1..=first + 8).filter(|to| *to != from) {
            for _ in 0..4 {
                port.send(&roce(to, from));
            }
        }
    }
    until(|| {
        let stats = fabric.stats();
        let mut ports = stats["ports"].as_array().unwrap().iter();
        ports.all(|port| port["rx_frames"] == 1 + 7 * 4)
    });
    ports
}

#[test]
fn a_few_users_leave_grants_for_others() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("few-users", "exec \"$@\"", true, &[]);
    let mut silent = Vec::new();
    for user in 0..12 {
        silent.append(&mut ports_of_user(&fabric, user));
        // Four grants each, of which two are for a shortcut.
        assert_eq!(shortcuts_in_use(&fabric), 2 * (1 + u64::from(user)));
    }
    let [mut a, mut b] = two_of(&fabric, 21_000, 201);
    until(|| {
        a.send(&roce(202, 201));
        shortcuts_in_use(&fabric) == 25
    });
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(b.granted(a.mac).0, id);
}

/// Two devices of a user, with this number and the next, when the fabric knows them.
fn two_of(fabric: &Fabric, user: u32, number: u8) -> [Capable; 2] {
    let [a, b] = as_user(fabric, user, |listen| [connect(listen), connect(listen)]);
    let two = [
        Capable::over(a, number, true),
        Capable::over(b, number + 1, true),
    ];
    until(|| {
        let stats = fabric.stats();
        let has = |port: &Capable| {
            let mut ports = stats["ports"].as_array().unwrap().iter();
            ports.any(|of| of["own_address"] == port.mac.to_string().as_str())
        };
        two.iter().all(has)
    });
    two
}

/// They have a shortcut, and leave without having read their grants: those lie in
/// the sockets, which are kept.
fn leave_grants(fabric: &Fabric, [mut a, b]: [Capable; 2]) -> [Capable; 2] {
    until(|| {
        a.send(&roce(b.mac.0[5], a.mac.0[5]));
        shortcuts_in_use(fabric) == 1
    });
    for port in [&a, &b] {
        port.stream.shutdown(std::net::Shutdown::Write).unwrap();
    }
    fabric.wait_for_ports(0);
    [a, b]
}

#[test]
fn who_leaves_grants_behind_has_few() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("behind", "exec \"$@\"", true, &[]);
    // One that hangs does not keep its user's others from having theirs.
    let mut left = Vec::new();
    for _ in 0..2 {
        left.push(leave_grants(&fabric, two_of(&fabric, 20_000, 1)));
    }
    let [mut c, mut d] = two_of(&fabric, 20_000, 1);
    let sent = 40;
    for _ in 0..sent {
        c.send(&roce(2, 1));
    }
    until(|| fabric.stats()["ports"][0]["rx_frames"] == 1 + sent);
    assert_eq!(shortcuts_in_use(&fabric), 0);
    drop(left);
    until(|| {
        c.send(&roce(2, 1));
        shortcuts_in_use(&fabric) == 1
    });
    let (id, _, _) = c.granted(d.mac);
    assert_eq!(d.granted(c.mac).0, id);
}

#[test]
fn others_leave_grants_for_who_runs_the_fabric() {
    if !users::are_needed() {
        return;
    }
    // With so many descriptors there are 64 unread in all.
    let script = "ulimit -n 256; exec \"$@\"";
    let fabric = Fabric::start_as("many-grants", script, true, &[]);
    let mut others = Vec::new();
    for user in 0..12u8 {
        others.append(&mut ports_of_user(&fabric, user));
    }
    // They have all that others may have, and read nothing.
    let before = shortcuts_in_use(&fabric);
    assert_eq!(before, 16);
    let [mut a, mut b] = two_of(&fabric, NOBODY, 201);
    until(|| {
        a.send(&roce(202, 201));
        shortcuts_in_use(&fabric) == before + 1
    });
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(b.granted(a.mac).0, id);
}

#[test]
fn who_connects_all_the_time_keeps_nobody_out() {
    if !users::are_needed() {
        return;
    }
    let fabric = Fabric::start_as("crowd", "exec \"$@\"", true, &[]);
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (fabric, end) = (&fabric, &end);
            scope.spawn(move || {
                as_user(fabric, 20_000, |listen| {
                    while !end.load(Ordering::Relaxed) {
                        // Some say nothing, and some are ports for a moment.
                        if let Ok(mut stream) = UnixStream::connect(listen) {
                            let _ = stream.write(&[0; 2][..number % 2]);
                        }
                    }
                });
            });
        }
        for number in 1..=5 {
            let port = Capable::new(&fabric, number, true);
            let address = port.mac.to_string();
            until(|| {
                let stats = fabric.stats();
                let mut ports = stats["ports"].as_array().unwrap().iter();
                ports.any(|port| port["own_address"] == address.as_str())
            });
        }
        end.store(true, Ordering::Relaxed);
    });
}

/// A fabric in namespaces of its own; `None` if tests that need root are left out.
fn unshared(name: &str, namespaces: &[&str]) -> Option<Fabric> {
    if !namespaces::are_needed(namespaces) {
        return None;
    }
    let script = format!("exec unshare {} \"$@\"", namespaces.join(" "));
    Some(Fabric::start_as(name, &script, false, &[]))
}

/// One in a user namespace in which only root has a number.
fn among_unknown_users(name: &str) -> Option<Fabric> {
    unshared(name, &["--user", "--map-root-user"])
}

#[test]
fn users_without_a_number_here_are_not_known() {
    let Some(fabric) = among_unknown_users("overflow") else {
        return;
    };
    let _own = fabric.connect();
    fabric.wait_for_ports(1);
    let _other = as_user(&fabric, 20_000, connect);
    fabric.wait_for_ports(2);
    let stats = fabric.stats();
    assert_eq!(stats["ports"][0]["uid"], 0);
    assert_eq!(stats["ports"][1]["uid"], Value::Null);
    assert_eq!(stats["ports"][1]["pid"], std::process::id());
    let said = fabric.end();
    assert!(said.contains("in this user namespace"), "{said}");
}

#[test]
fn grants_that_somebody_leaves_are_not_those_of_all_unknown_users() {
    let Some(fabric) = among_unknown_users("unknown") else {
        return;
    };
    let mut left = Vec::new();
    // One after another: nothing says that these are one user's, or two.
    for user in 20_000..20_008 {
        left.push(leave_grants(&fabric, two_of(&fabric, user, 1)));
    }
}

#[test]
fn who_fills_the_ports_does_not_lock_out_the_operator() {
    let script = "ulimit -n 64; exec \"$@\"";
    let fabric = Fabric::start_as("locked-out", script, false, &[]);
    let mut many: Vec<UnixStream> = (0..80).map(|_| fabric.connect()).collect();
    until(|| {
        many.iter_mut()
            .filter_map(|port| is_refused(port).then_some(()))
            .count()
            == 48
    });
    fabric.wait_for_ports(32);
    let said = fabric.end();
    assert!(said.contains("no more than 32 ports"), "{said}");
}

/// Says who it is many times, and says it for somebody else.
fn shout(fabric: &Fabric) -> Capable {
    let mut liar = Capable::new(fabric, 1, true);
    let hello = Message::Hello { any_source: false }.to_frame(liar.mac);
    let mut writer = Writer::new(1 << 20);
    for _ in 0..10_000 {
        writer.push_always(&hello);
    }
    assert!(writer.flush(&mut liar.stream).unwrap());
    liar.send(&frame(0xee, 7, 0));
    liar
}

#[test]
fn nobody_has_to_read_what_the_fabric_says() {
    let fabric = Fabric::start("unread-lines", &[]);
    let _a = Capable::new(&fabric, 1, true);
    until(|| fabric.stats()["ports"][0]["own_address"].is_string());
    let _liars: Vec<Capable> = (0..40).map(|_| shout(&fabric)).collect();
    fabric.wait_for_ports(41);
    // All that they said has been read.
    until(|| {
        let stats = fabric.stats();
        let ports = stats["ports"].as_array().unwrap();
        ports
            .iter()
            .filter(|port| port["source_drops"] == 2)
            .count()
            == 40
    });
    let said = fabric.end();
    assert!(said.contains("52:54:00:00:00:01, which port "), "{said}");
    let lines = said.lines().count();
    assert!(lines < 60, "{lines} lines");
}

#[test]
fn a_full_disk_behind_standard_error_ends_nothing() {
    let script = "exec \"$@\" 2>/dev/full";
    let mut fabric = Fabric::start_as("full-disk", script, false, &[]);
    let mut bad = fabric.connect();
    fabric.wait_for_ports(1);
    bad.write_all(&u32::MAX.to_be_bytes()).unwrap();
    fabric.wait_for_ports(0);
    assert!(fabric.child.try_wait().unwrap().is_none());
}

#[test]
fn a_process_without_a_number_here_has_a_user() {
    let Some(fabric) = unshared("pid", &["--pid", "--fork", "--kill-child"]) else {
        return;
    };
    let _port = fabric.connect();
    fabric.wait_for_ports(1);
    let stats = fabric.stats();
    let own = rustix::process::getuid().as_raw();
    assert_eq!(stats["ports"][0]["uid"], own);
    assert_eq!(stats["ports"][0]["pid"], Value::Null);
}

#[test]
fn a_flood_of_small_frames_leaves_others_their_turn() {
    let fabric = Fabric::start("flood", &[]);
    let _silent: Vec<UnixStream> = (0..200).map(|_| fabric.connect()).collect();
    let mut bad = fabric.connect();
    fabric.wait_for_ports(201);
    // Behind it in the order of ports.
    let (mut a, mut b) = (fabric.connect(), fabric.connect());
    fabric.wait_for_ports(203);
    // To nobody that is known, and so to all.
    let mut small = frame(0xdd, 3, 0);
    small.truncate(18);
    let pid = stop(&fabric.child);
    bad.set_nonblocking(true).unwrap();
    let (mut bytes, mut writer) = (Vec::new(), Writer::new(100 << 10));
    while writer.push(&small) {}
    assert!(writer.flush(&mut bytes).unwrap());
    let sent = bad.write(&bytes).unwrap() / (4 + small.len());
    send(&mut a, &frame(2, 1, 7));
    kill_process(pid, Signal::CONT).unwrap();
    let mut reader = Reader::new();
    let mut before = 0;
    while receive(&mut b, &mut reader) != frame(2, 1, 7) {
        before += 1;
    }
    // Two MiB of copies, each with what it costs.
    assert!(before <= 2 * 1024 * 1024 / (200 * (18 + 64)), "{before}");
    assert!(sent > 2 * before, "{sent}");
}

#[test]
fn answers_wait_for_who_reads_them_slowly() {
    let fabric = Fabric::start("slow-client", &[]);
    let _ports: Vec<UnixStream> = (0..20).map(|_| fabric.connect()).collect();
    fabric.wait_for_ports(20);
    let mut client = connect(&fabric.directory.join("control"));
    let count = 500;
    let requests = "{\"cmd\":\"stats\"}\n".repeat(count);
    client.write_all(requests.as_bytes()).unwrap();
    // It asks for nothing more, and is answered all the same.
    client.shutdown(std::net::Shutdown::Write).unwrap();
    // The fabric has seen them when it has answered another.
    fabric.stats();
    let answers = BufReader::new(client).lines();
    let good = answers.filter(|line| {
        let answer: Value = serde_json::from_str(line.as_ref().unwrap()).unwrap();
        answer["ports"].as_array().unwrap().len() == 20
    });
    assert_eq!(good.count(), count);
}

#[test]
fn others_leave_ports_for_who_runs_the_fabric() {
    if !users::are_needed() {
        return;
    }
    let options = ["--max-ports", "32", "--max-ports-per-user", "100"];
    let fabric = Fabric::start_as("kept", "exec \"$@\"", true, &options);
    let mut others: Vec<UnixStream> = (0..40).map(|_| fabric.connect()).collect();
    until(|| {
        let refused = others.iter_mut().map(is_refused);
        refused.filter(|refused| *refused).count() == 10
    });
    fabric.wait_for_ports(30);
    let mut own = two_of_nobody(&fabric);
    fabric.wait_for_ports(32);
    assert!(!own.iter_mut().any(is_refused));
}

#[test]
fn who_fills_the_ports_does_not_get_the_address_of_one_that_comes_back() {
    if !users::are_needed() {
        return;
    }
    let options = ["--max-ports", "16", "--max-ports-per-user", "100"];
    let fabric = Fabric::start_as("come-back", "exec \"$@\"", true, &options);
    let come = || Capable::over(as_user(&fabric, 20_000, connect), 1, true);
    let of_first = |name: &str| fabric.stats()["ports"][0][name].clone();
    let first = come();
    until(|| of_first("own_address").is_string());
    // Another has all other ports, and wants the address.
    let _wants = Capable::new(&fabric, 1, true);
    let _others: Vec<UnixStream> = (0..13).map(|_| fabric.connect()).collect();
    fabric.wait_for_ports(15);
    drop(first);
    fabric.wait_for_ports(14);
    let mut more = fabric.connect();
    until(|| is_refused(&mut more));
    let mut first = come();
    until(|| {
        let stats = fabric.stats();
        let ports = stats["ports"].as_array().unwrap();
        let mut own = ports.iter().filter(|port| port["uid"] == 20_000);
        own.any(|port| port["own_address"] == first.mac.to_string().as_str())
    });
    assert!(!is_refused(&mut first.stream));
    let said = fabric.end();
    assert!(
        said.contains("1 of which they are to come back to"),
        "{said}"
    );
}

#[test]
fn bad_options_are_named() {
    let run = |options: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_ferrite-fabric"))
            .args(options)
            .stdout(Stdio::null())
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&["--listen", "/tmp/x", "--loss", "3"]).contains("loss"));
    assert!(run(&["--listen", "/nonexistent/x"]).contains("/nonexistent/x"));
    assert!(run(&[]).contains("--listen"));
    let fabric = Fabric::start("taken", &[]);
    let listen = fabric.directory.join("listen");
    assert!(run(&["--listen", listen.to_str().unwrap()]).contains("another process"));
}

/// A port that can use shortcuts.
struct Capable {
    stream: UnixStream,
    reader: Reader,
    fds: VecDeque<OwnedFd>,
    mac: Mac,
}

impl Capable {
    fn new(fabric: &Fabric, number: u8, device: bool) -> Self {
        Self::over(fabric.connect(), number, device)
    }

    fn over(stream: UnixStream, number: u8, device: bool) -> Self {
        let mac = Mac([0x52, 0x54, 0, 0, 0, number]);
        let mut port = Self {
            stream,
            reader: Reader::new(),
            fds: VecDeque::new(),
            mac,
        };
        let mut writer = Writer::new(1 << 16);
        if device {
            writer.push_mark();
        }
        writer.push_always(&Message::Hello { any_source: false }.to_frame(mac));
        assert!(writer.flush(&mut port.stream).unwrap());
        // The switch learns where it is.
        port.send(&frame(0xee, number, 0));
        port
    }

    fn send(&mut self, frame: &[u8]) {
        send(&mut self.stream, frame);
    }

    fn say(&mut self, message: Message) {
        let frame = message.to_frame(self.mac);
        self.send(&frame);
    }

    fn receive(&mut self) -> Vec<u8> {
        loop {
            if let Some(frame) = self.reader.next_frame().unwrap() {
                return frame.to_vec();
            }
            let mut receiver = Receiver::new(&self.stream, &mut self.fds);
            match self.reader.fill(&mut receiver) {
                Ok(count) => assert!(count > 0, "the fabric hung up"),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn message(&mut self) -> Message {
        loop {
            let frame = self.receive();
            if is_message(&frame) {
                return Message::parse(&frame).unwrap().1;
            }
        }
    }

    /// Its ends of the rings that it is given now.
    fn granted(&mut self, other: Mac) -> (ShortcutId, Producer, Consumer) {
        match self.message() {
            Message::Grant {
                shortcut,
                side,
                peer,
            } => {
                assert_eq!(peer, other);
                assert_eq!(self.fds.len(), 2);
                let (producer, consumer) = ring::attach(&self.fds[0], side.into()).unwrap();
                self.fds.clear();
                (shortcut, producer, consumer)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn roce(to: u8, from: u8) -> Vec<u8> {
    let mut frame = frame(to, from, 0);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14] = 0x45;
    frame[23] = 17;
    frame[36..38].copy_from_slice(&4791u16.to_be_bytes());
    frame
}

fn shortcuts_in_use(fabric: &Fabric) -> u64 {
    let stats = fabric.control(r#"{"cmd":"stats"}"#);
    stats["shortcuts"]["in_use"].as_u64().unwrap()
}

#[test]
fn devices_share_memory_until_somebody_wants_to_see_the_frames() {
    let fabric = Fabric::start("shortcut", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    fabric.wait_for_ports(2);
    until(|| {
        let stats = fabric.control(r#"{"cmd":"stats"}"#);
        let known = |port: usize| stats["ports"][port]["addresses"] != Value::Array(vec![]);
        known(0) && known(1)
    });
    for _ in 0..4 {
        a.send(&roce(2, 1));
    }
    let (id, mut producer, _from_b) = a.granted(b.mac);
    let (same, _to_a, mut consumer) = b.granted(a.mac);
    assert_eq!(id, same);
    a.say(Message::Ready(id));
    assert_eq!(b.message(), Message::Open(id));
    assert!(producer.push(&roce(2, 1)).unwrap());
    producer.must_wake();
    consumer.look().unwrap();
    let record = consumer.next(&mut vec![0; 1 << 16]).unwrap();
    assert!(matches!(record, Some(Record::Frame(100))), "{record:?}");
    let stats = fabric.control(r#"{"cmd":"stats"}"#);
    assert_eq!(stats["ports"][0]["shortcuts"]["rx_frames"], 1);
    assert_eq!(stats["ports"][1]["shortcuts"]["tx_bytes"], 100);
    assert_eq!(stats["shortcuts"]["in_use"], 1);

    // A capture is not confirmed before both have let go of it.
    let capture = fabric.directory.join("x.pcap");
    let request = format!(r#"{{"cmd":"pcap","file":"{}"}}"#, capture.display());
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| fabric.control(&request));
        assert_eq!(a.message(), Message::Revoke(id));
        assert_eq!(b.message(), Message::Revoke(id));
        a.say(Message::Released(id));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!answer.is_finished());
        b.say(Message::Released(id));
        for port in [&mut a, &mut b] {
            assert_eq!(port.message(), Message::Close(id));
            assert!(!answer.is_finished());
            port.say(Message::Closed(id));
        }
        assert_eq!(answer.join().unwrap()["ok"], true);
    });
    let stats = fabric.control(r#"{"cmd":"stats"}"#);
    assert_eq!(stats["ports"][1]["shortcuts"]["tx_frames"], 1);
    assert_eq!(stats["shortcuts"]["allowed"], false);
    for _ in 0..40 {
        a.send(&roce(2, 1));
        assert_eq!(b.receive(), roce(2, 1));
    }
    assert_eq!(shortcuts_in_use(&fabric), 0);
    // All 40 are in the capture. Afterwards there is a shortcut again.
    fabric.control(r#"{"cmd":"pcap-stop"}"#);
    let record = 16 + 100;
    assert_eq!(std::fs::read(&capture).unwrap().len(), 24 + 40 * record);
    for _ in 0..4 {
        a.send(&roce(2, 1));
    }
    let (again, _, _) = a.granted(b.mac);
    assert_ne!(again, id);
    b.granted(a.mac);
    // One that leaves gives the other its frames back.
    drop(b);
    assert_eq!(a.message(), Message::Revoke(again));
    a.say(Message::Released(again));
    assert_eq!(a.message(), Message::Close(again));
    a.say(Message::Closed(again));
    until(|| shortcuts_in_use(&fabric) == 0);
}

#[test]
fn a_guest_cannot_take_the_address_of_a_device() {
    let fabric = Fabric::start("thief", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    let mut thief = fabric.connect();
    // A device that calls itself by the address of another.
    let mut liar = Capable::new(&fabric, 1, true);
    fabric.wait_for_ports(4);
    until(|| {
        let stats = fabric.control(r#"{"cmd":"stats"}"#);
        let own = |port: usize| stats["ports"][port]["own_address"].is_string();
        own(0) && own(1)
    });
    for _ in 0..4 {
        a.send(&roce(2, 1));
    }
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(b.granted(a.mac).0, id);
    for _ in 0..20 {
        send(&mut thief, &frame(2, 1, 66));
        liar.send(&roce(2, 1));
    }
    until(|| {
        let stats = fabric.control(r#"{"cmd":"stats"}"#);
        let drops = |port: usize| stats["ports"][port]["source_drops"].as_u64().unwrap();
        drops(2) == 20 && drops(3) == 21
    });
    // The shortcut is there, and the victim's frames come to the victim.
    assert_eq!(shortcuts_in_use(&fabric), 1);
    b.send(&frame(1, 2, 9));
    loop {
        let received = a.receive();
        assert!(!is_message(&received), "{:?}", Message::parse(&received));
        if received == frame(1, 2, 9) {
            break;
        }
    }
    // When the device has left, another may have its address.
    drop(a);
    until(|| fabric.control(r#"{"cmd":"stats"}"#)["ports"][2]["own_address"].is_string());
}

#[test]
fn port_security_can_be_left_out() {
    let fabric = Fabric::start("any-source", &["--any-source-mac"]);
    fabric.wait_for_ports(0);
    let (_a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    let mut other = fabric.connect();
    fabric.wait_for_ports(3);
    send(&mut other, &frame(2, 1, 5));
    while b.receive() != frame(2, 1, 5) {}
}

#[test]
fn who_does_not_let_go_is_cut_off() {
    let fabric = Fabric::start("deaf", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    // A guest behind a plain port may say what it likes.
    let mut guest = Capable::new(&fabric, 3, false);
    fabric.wait_for_ports(3);
    for _ in 0..40 {
        guest.send(&roce(1, 3));
        guest.send(&roce(2, 3));
    }
    until(|| fabric.control(r#"{"cmd":"stats"}"#)["ports"][2]["rx_frames"] == 81);
    for _ in 0..8 {
        b.send(&roce(1, 2));
    }
    let (id, _, _) = a.granted(b.mac);
    assert_eq!(shortcuts_in_use(&fabric), 1);
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| fabric.control(r#"{"cmd":"faults","loss":0.5}"#));
        assert_eq!(a.message(), Message::Revoke(id));
        a.say(Message::Released(id));
        assert_eq!(a.message(), Message::Close(id));
        a.say(Message::Closed(id));
        assert_eq!(answer.join().unwrap()["ok"], true);
    });
    fabric.wait_for_ports(2);
}

#[test]
fn a_request_is_answered_although_both_ends_are_cut_off() {
    let fabric = Fabric::start("both-deaf", &[]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    fabric.wait_for_ports(2);
    b.send(&frame(1, 2, 9));
    while a.receive() != frame(1, 2, 9) {}
    for _ in 0..4 {
        a.send(&roce(2, 1));
    }
    a.granted(b.mac);
    let answer = fabric.control(r#"{"cmd":"partition","a":0}"#);
    assert_eq!(answer["ok"], true);
    fabric.wait_for_ports(0);
}

#[test]
fn shortcuts_can_be_forbidden() {
    let fabric = Fabric::start("forbidden", &["--no-shortcuts"]);
    fabric.wait_for_ports(0);
    let (mut a, mut b) = (
        Capable::new(&fabric, 1, true),
        Capable::new(&fabric, 2, true),
    );
    fabric.wait_for_ports(2);
    // Both are known when this has come and gone.
    b.send(&frame(1, 2, 9));
    while a.receive() != frame(1, 2, 9) {}
    for _ in 0..40 {
        a.send(&roce(2, 1));
        while b.receive() != roce(2, 1) {}
    }
    assert_eq!(shortcuts_in_use(&fabric), 0);
    fabric.control(r#"{"cmd":"shortcuts","on":true}"#);
    for _ in 0..4 {
        a.send(&roce(2, 1));
    }
    a.granted(b.mac);
}
