// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fabric binary, seen from its sockets.

use ferrite_fabric::framing::{Reader, Writer};
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);

struct Fabric {
    child: Child,
    directory: PathBuf,
}

impl Fabric {
    fn start(name: &str, options: &[&str]) -> Self {
        let directory =
            std::env::temp_dir().join(format!("ferrite-fabric-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_ferrite-fabric"))
            .arg("--listen")
            .arg(directory.join("listen"))
            .arg("--control")
            .arg(directory.join("control"))
            .args(options)
            .spawn()
            .unwrap();
        let fabric = Self { child, directory };
        drop(fabric.connect());
        fabric
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

fn until(mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "the condition never came true");
        std::thread::sleep(Duration::from_millis(5));
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
