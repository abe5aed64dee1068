// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What is on the wire: RoCEv2 that others understand, and service over a bad wire.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

use super::{still_works, VmTest};
use crate::cluster::Cluster;
use crate::step::output;
use crate::traffic::{client_server, perftest, pingpong, pingpong_over_loss};
use crate::vm::Vm;

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "packets of every kind are RoCEv2 to tshark, every invariant CRC right",
        every_packet,
    ),
    VmTest::new(
        "data arrive over loss, duplication, reordering and corruption",
        bad_wire,
    ),
];

/// The lab checked against somebody else's RoCEv2: Linux's rxe on VMs without the device.
pub const REFERENCE: &[VmTest] = &[VmTest::new(
    "rxe's frames pass the same wire and the same checks",
    reference,
)];

/// The device in one VM, Linux's rxe in the other.
pub const INTEROPERATION: &[VmTest] = &[
    VmTest::new(
        "pingpong of every kind between Ferrite and rxe, both ways",
        pingpongs_with_rxe,
    ),
    VmTest::new(
        "perftest between Ferrite and rxe, both ways: send, write, read, atomics",
        perftest_with_rxe,
    ),
    VmTest::new(
        "every operation delivers every byte between Ferrite and rxe, both ways",
        data_with_rxe,
    ),
    VmTest::new(
        "atomic writes, windows and IPv6 between Ferrite and rxe, both ways",
        operations_with_rxe,
    ),
    VmTest::new(
        "connections of rdma_cm between Ferrite and rxe, both ways",
        connections_with_rxe,
    ),
    VmTest::new(
        "Ferrite and rxe over a wire that loses one frame in a hundred",
        loss_with_rxe,
    ),
];

const ROCE_PORT: u16 = 4791;

/// Has all frames captured that pass while `run` runs; returns the file.
pub(super) fn captured(cluster: &Cluster, run: impl FnOnce() -> Result<()>) -> Result<Vec<u8>> {
    cluster.fabric_command(&json!({"cmd": "pcap", "file": cluster.pcap()}))?;
    let result = run();
    cluster.fabric_command(&json!({"cmd": "pcap-stop"}))?;
    result?;
    fs::read(cluster.pcap()).context("no capture")
}

/// The frames of a pcap file.
pub(super) fn frames(file: &[u8]) -> Result<Vec<&[u8]>> {
    let magic = file.get(..4).context("the capture is empty")?;
    // Microsecond or nanosecond stamps, in this machine's byte order.
    if ![0xa1b2_c3d4u32, 0xa1b2_3c4d]
        .iter()
        .any(|m| m.to_le_bytes() == magic)
    {
        bail!("not a capture file: {magic:x?}");
    }
    let mut rest = &file[24..];
    let mut frames = Vec::new();
    while rest.len() >= 16 {
        let length = u32::from_le_bytes([rest[8], rest[9], rest[10], rest[11]]) as usize;
        let Some(frame) = rest.get(16..16 + length) else {
            break;
        };
        frames.push(frame);
        rest = &rest[16 + length..];
    }
    Ok(frames)
}

/// CRC-32 as in Ethernet, bit by bit: slow, short, and nobody else's code.
fn crc32(bytes: impl Iterator<Item = u8>) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

/// Whether a frame is RoCEv2 over IPv4 or IPv6, and if so whether its invariant CRC is right
/// (IBTA annex 17, A17.3.3).
fn invariant_crc(frame: &[u8]) -> Option<bool> {
    let kind = frame.get(12..14)?;
    let packet = &frame[14..];
    // Fields that routers may change count as ones.
    let mut masked = packet.to_vec();
    let (udp, end) = match kind {
        [0x08, 0x00] => {
            let header = usize::from(packet.first()? & 0xf) * 4;
            let total = usize::from(u16::from_be_bytes([*packet.get(2)?, *packet.get(3)?]));
            if *packet.get(9)? != 17 {
                return None;
            }
            for at in [1, 8, 10, 11] {
                masked[at] = 0xff;
            }
            (header, total)
        }
        [0x86, 0xdd] => {
            let total = 40 + usize::from(u16::from_be_bytes([*packet.get(4)?, *packet.get(5)?]));
            if *packet.get(6)? != 17 {
                return None;
            }
            masked[0] |= 0x0f;
            for at in [1, 2, 3, 7] {
                masked[at] = 0xff;
            }
            (40, total)
        }
        _ => return None,
    };
    let port = u16::from_be_bytes([*packet.get(udp + 2)?, *packet.get(udp + 3)?]);
    if port != ROCE_PORT {
        return None;
    }
    let bth = udp + 8;
    if end > packet.len() || end < bth + 16 {
        return Some(false);
    }
    masked[udp + 6] = 0xff;
    masked[udp + 7] = 0xff;
    masked[bth + 4] = 0xff;
    let body = masked[..end - 4].iter().copied();
    let crc = crc32(std::iter::repeat_n(0xff, 8).chain(body));
    Some(crc.to_le_bytes() == packet[end - 4..end])
}

const LOAD_RXE: &str = "set -e; modprobe rdma_rxe; modprobe -q ib_uverbs || true
    rdma link add rxe0 type rxe netdev eth0";

fn reference(cluster: &Cluster) -> Result<()> {
    for vm in &cluster.vms {
        vm.sh(LOAD_RXE)?;
        super::wait_active(vm)?;
    }
    capture(cluster)
}

/// Both machines, each as the server once. The first call loads the drivers.
fn both_ways(cluster: &Cluster, each: impl Fn(&Vm, &Vm) -> Result<()>) -> Result<()> {
    let (ferrite, rxe) = cluster.two()?;
    for (vm, load) in [(ferrite, crate::shell::LOAD_DRIVER), (rxe, LOAD_RXE)] {
        if vm
            .sh("ls /sys/class/infiniband 2>/dev/null || true")?
            .trim()
            .is_empty()
        {
            vm.sh(load)?;
        }
        super::wait_active(vm)?;
    }
    for (server, client) in [(ferrite, rxe), (rxe, ferrite)] {
        each(server, client).with_context(|| format!("server in {}", server.name()))?;
    }
    Ok(())
}

fn pingpongs_with_rxe(cluster: &Cluster) -> Result<()> {
    both_ways(cluster, |server, client| {
        // Who polls takes the processor that rxe works on. Under a sanitiser it is then too slow for the
        // program, which waits for 67 ms a try, and so it is for many packets at a time.
        let slow = server.patience() > 1;
        let (events, largest) = if slow { (true, 9000) } else { (false, 65536) };
        for (size, iterations) in [(1, 20), (4096, 50), (largest, 20)] {
            unless_rxe_is_slow(|| pingpong(server, client, size, iterations, events))
                .with_context(|| format!("size {size}"))?;
        }
        for (program, flags) in [
            ("ibv_uc_pingpong", "-s 4096 -n 50 -c"),
            ("ibv_ud_pingpong", "-s 1024 -n 50 -c"),
            ("ibv_srq_pingpong", "-s 4096 -n 50 -q 4 -c"),
        ] {
            let command = format!("exec {program} -d $dev -g $gid -p $port {flags}");
            unless_rxe_is_slow(|| {
                client_server(
                    (server, &command),
                    (client, &format!("{command} $peer")),
                    18518,
                    Duration::from_secs(60),
                )
            })
            .with_context(|| format!("{program} {flags}"))?;
        }
        Ok(())
    })
}

/// These programs give a packet up after half a second. That is how long rxe may wait for its turn on a processor where
/// the machine is busy: then they are run anew, some times, and it is said.
fn unless_rxe_is_slow<T>(run: impl Fn() -> Result<T>) -> Result<T> {
    for attempt in 1..ATTEMPTS {
        match run() {
            Err(error) if format!("{error:#}").contains("transport retry counter exceeded") => {
                println!("  note    rxe was slow, attempt {attempt}; once more");
            }
            result => return result,
        }
    }
    run()
}

/// perftest asks for as many reads under way as the peer's device has, which may be more than its
/// own has: they are told a number that both have.
const WITH_RXE: &[(&str, &str)] = &[
    ("ib_send_bw", "-s 65536"),
    ("ib_write_bw", "-s 65536"),
    ("ib_read_bw", "-s 65536 -o 16"),
    ("ib_atomic_bw", "-A FETCH_AND_ADD -o 16"),
    ("ib_atomic_bw", "-A CMP_AND_SWAP -o 16"),
];

fn perftest_programs(
    server: &Vm,
    client: &Vm,
    programs: &[(&str, &str)],
    time: Duration,
) -> Result<()> {
    for (program, flags) in programs {
        let command = format!(
            "exec {program} {flags} -d $dev -x $gid -p $port -n 30 -u {} -F",
            // Half a second.
            client.ack_timeout() + 1
        );
        client_server(
            (server, &command),
            (client, &format!("{command} $peer")),
            18516,
            time,
        )
        .with_context(|| format!("{program} {flags}"))?;
    }
    Ok(())
}

fn perftest_with_rxe(cluster: &Cluster) -> Result<()> {
    both_ways(cluster, |server, client| {
        perftest_programs(server, client, WITH_RXE, Duration::from_secs(90))
    })
}

fn data_with_rxe(cluster: &Cluster) -> Result<()> {
    both_ways(cluster, |server, client| {
        super::basics::verbs_check_between(server, client, "data")
    })
}

/// Runs `tests/clients/operations`.
fn operations(server: &Vm, client: &Vm, services: &str) -> Result<()> {
    let program = "/ferrite/tests/clients/operations";
    let (out, _) = client_server(
        (server, &format!("exec {program} serve $port")),
        (
            client,
            &format!("exec {program} run $peer $port {services}"),
        ),
        18519,
        Duration::from_secs(90),
    )?;
    println!(
        "          {}",
        out.lines().last().context("no output of operations")?
    );
    Ok(())
}

/// Linux's rxe has no extended connections. Its flushes (as of Linux 7.2) reach nobody else: their
/// invariant CRC counts the transport headers twice, once as headers and once as the data that a
/// flush does not have, and it expects the same of others. So they are left out. And it tells
/// programs of an invalidation with the kernel's flag, which to them is another one.
fn operations_with_rxe(cluster: &Cluster) -> Result<()> {
    both_ways(cluster, |server, client| {
        operations(server, client, "--rxe rc rc6 uc ud")
    })
}

fn connections_with_rxe(cluster: &Cluster) -> Result<()> {
    both_ways(cluster, |server, client| {
        for (serving, asking) in [
            ("rping -s -a 0.0.0.0 -C 20 -V", "rping -c -C 20 -V -a"),
            ("ucmatose -c 3", "ucmatose -c 3 -s"),
            ("udaddy -c 3", "udaddy -c 3 -s"),
        ] {
            super::basics::connect(server, serving, client, asking)?;
        }
        Ok(())
    })
}

/// Frames that all ports of the fabric lost.
fn lost(stats: &Value) -> u64 {
    counted(stats, "lost")
}

/// Frames of all ports of the fabric that have met such a fault.
pub(super) fn counted(stats: &Value, fault: &str) -> u64 {
    match stats {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match value.as_u64() {
                Some(number) if name == fault => number,
                _ => counted(value, fault),
            })
            .sum(),
        Value::Array(entries) => entries.iter().map(|entry| counted(entry, fault)).sum(),
        _ => 0,
    }
}

/// How long one may take over a wire that loses frames.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often a program with which rxe falls silent is run.
const ATTEMPTS: usize = 4;

/// Whether the last request that `source` sent over IPv4 is the beginning of a message or in the
/// middle of it.
fn ends_in_mid_message(frames: &[&[u8]], source: [u8; 4]) -> bool {
    // First and middle packets of sends and of writes, on reliable connections.
    const UNFINISHED: [u8; 4] = [0, 1, 6, 7];
    const REQUESTS: std::ops::RangeInclusive<u8> = 0..=11;
    let last = frames.iter().rev().find_map(|frame| {
        let bth = 14 + usize::from(frame.get(14)? & 0xf) * 4 + 8;
        let of_source = frame.get(26..30)? == source && invariant_crc(frame)?;
        let opcode = *frame.get(bth)?;
        (of_source && REQUESTS.contains(&opcode)).then_some(opcode)
    });
    last.is_some_and(|opcode| UNFINISHED.contains(&opcode))
}

/// Linux's rxe (as of 7.2) sends nothing any more, now and then, after an acknowledgement came while it
/// sent a message again: it stops in the middle of one. So what does not end, with a wire that shows
/// this, is tried again, some times, and is said.
fn unless_rxe_falls_silent(
    cluster: &Cluster,
    what: &str,
    run: impl Fn() -> Result<()>,
) -> Result<()> {
    let (_, rxe) = cluster.two()?;
    let address: std::net::Ipv4Addr = rxe.ip().parse()?;
    for attempt in 1..ATTEMPTS {
        cluster.fabric_command(&json!({"cmd": "pcap", "file": cluster.pcap()}))?;
        let result = run();
        cluster.fabric_command(&json!({"cmd": "pcap-stop"}))?;
        match result {
            Err(error) if format!("{error:#}").contains("timed out") => {
                let file = fs::read(cluster.pcap()).context("no capture")?;
                if !ends_in_mid_message(&frames(&file)?, address.octets()) {
                    return Err(error.context("rxe did not stop in the middle of a message"));
                }
                println!("  note    {what}: rxe fell silent, attempt {attempt}; once more");
            }
            result => return result,
        }
    }
    run()
}

/// The same with a program that says no more than that it was ended, and whose messages have one packet each.
fn unless_rxe_falls_silent_to<T>(what: &str, run: impl Fn() -> Result<T>) -> Result<T> {
    for attempt in 1..ATTEMPTS {
        match run() {
            // Of `timeout`.
            Err(error) if format!("{error:#}").contains("code: 124") => {
                println!("  note    {what}: rxe fell silent, attempt {attempt}; once more");
            }
            result => return result,
        }
    }
    run()
}

fn loss_with_rxe(cluster: &Cluster) -> Result<()> {
    let faults = json!({"cmd": "faults", "only": "roce", "loss": 0.01});
    cluster.fabric_command(&faults)?;
    let result = both_ways(cluster, |server, client| {
        for (size, iterations) in [(1024, 100), (16384, 20)] {
            let what = format!("pingpong, size {size}");
            unless_rxe_falls_silent(cluster, &what, || {
                pingpong_over_loss(server, client, size, iterations, PATIENCE)
            })
            .with_context(|| what.clone())?;
        }
        for program in &WITH_RXE[..3] {
            unless_rxe_falls_silent(cluster, program.0, || {
                perftest_programs(server, client, std::slice::from_ref(program), PATIENCE)
            })?;
        }
        let (serving, asking) = ("rping -s -a 0.0.0.0 -C 20 -V", "rping -c -C 20 -V -a");
        let served = unless_rxe_falls_silent_to(asking, || {
            super::basics::ask(server, serving, client, asking)
        })?;
        // Linux repeats no request to disconnect of a program that is gone: where the first one is
        // lost, the server waits for ever.
        served.signal(libc::SIGTERM)?;
        let served = served.wait()?;
        if served.timed_out || served.crashed() {
            bail!("{serving}: {served:?}");
        }
        Ok(())
    });
    let lost = lost(&cluster.fabric_command(&json!({"cmd": "stats"}))?);
    cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
    result?;
    // The wire was as bad as was asked for.
    if lost == 0 {
        bail!("no frame was lost");
    }
    Ok(())
}

fn capture(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let file = captured(cluster, || {
        pingpong(one, two, 9000, 20, false)?;
        perftest(one, two, "ib_write_bw", 8192, 20, "")?;
        perftest(one, two, "ib_read_bw", 8192, 20, "")?;
        Ok(())
    })?;
    // Send first/last, write first/last, read request, read response first/last, acknowledge.
    check_capture(cluster, &file, &[0, 2, 6, 8, 12, 13, 15, 17])
}

/// Everything that the device can send, by the upper three bits of the opcode: reliable
/// connections, unreliable connections, datagrams, extended reliable connections. It has no
/// congestion notifications.
const EVERY_OPCODE: [(u32, &[u32]); 4] = [
    (
        0x00,
        &[
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 23, 28,
            29,
        ],
    ),
    (0x20, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
    (0x60, &[4, 5]),
    (
        0xa0,
        &[
            0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22, 23,
        ],
    ),
];

fn every_packet(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let file = captured(cluster, || {
        operations(one, two, "rc rc6 uc ud xrc xrc-invalidate")?;
        // Management datagrams.
        super::basics::connect(one, "rping -s -a 0.0.0.0 -C 3", two, "rping -c -C 3 -a")
    })?;
    let wanted: Vec<u32> = EVERY_OPCODE
        .iter()
        .flat_map(|(service, operations)| {
            operations.iter().map(move |operation| service | operation)
        })
        .collect();
    check_capture(cluster, &file, &wanted)
}

/// The frames of the capture that was made last must be right to the checks here and to tshark, and have
/// packets with all of the opcodes.
fn check_capture(cluster: &Cluster, file: &[u8], opcodes: &[u32]) -> Result<()> {
    let (mut good, mut bad) = (0, 0);
    for frame in frames(file)? {
        match invariant_crc(frame) {
            Some(true) => good += 1,
            Some(false) => bad += 1,
            None => {}
        }
    }
    if bad > 0 || good < 100 {
        bail!("{good} RoCEv2 frames with a right invariant CRC, {bad} with a wrong one");
    }
    let mut tshark = Command::new("tshark");
    tshark.arg("-r").arg(cluster.pcap()).args([
        "-o",
        "ip.check_checksum:TRUE",
        "-o",
        "udp.check_checksum:TRUE",
        // RoCEv2 has none, as RFC 6936 allows; the invariant CRC covers more.
        "-o",
        "udp.ignore_ipv6_zero_checksum:TRUE",
        "-Y",
        "infiniband",
        "-T",
        "fields",
        "-e",
        "infiniband.bth.opcode",
        "-e",
        "_ws.malformed",
        "-e",
        "_ws.expert.message",
    ]);
    let text = output(&mut tshark)?;
    let mut seen = std::collections::BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split('\t');
        let opcode: u32 = fields
            .next()
            .unwrap_or_default()
            .parse()
            .unwrap_or(u32::MAX);
        if fields.any(|complaint| !complaint.is_empty()) {
            bail!("tshark complains of a packet: {line}");
        }
        *seen.entry(opcode).or_insert(0) += 1;
    }
    let total: usize = seen.values().sum();
    if total != good {
        bail!("tshark sees {total} RoCEv2 packets, the capture has {good}");
    }
    let missing: Vec<&u32> = opcodes
        .iter()
        .filter(|opcode| !seen.contains_key(opcode))
        .collect();
    if !missing.is_empty() {
        bail!("no packet with the opcodes {missing:?}: {seen:?}");
    }
    println!("          {total} packets of {} kinds", seen.len());
    Ok(())
}

fn bad_wire(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    cluster.fabric_command(&json!({
        "cmd": "faults", "only": "roce",
        "loss": 0.01, "duplicate": 0.02, "reorder": 0.02, "corrupt": 0.01,
    }))?;
    let result = || -> Result<()> {
        for (size, iterations) in [(1024, 200), (65536, 20), (1 << 20, 3)] {
            pingpong_over_loss(one, two, size, iterations, 6 * PATIENCE)
                .with_context(|| format!("size {size} over the bad wire"))?;
        }
        perftest(one, two, "ib_write_bw", 65536, 30, "")?;
        perftest(one, two, "ib_read_bw", 65536, 30, "")?;
        let stats = cluster.fabric_command(&json!({"cmd": "stats"}))?;
        if lost(&stats) == 0 {
            bail!("nothing was lost: {stats}");
        }
        Ok(())
    }();
    cluster.fabric_command(&json!({"cmd": "faults", "reset": true}))?;
    result?;
    still_works(cluster)
}

#[cfg(test)]
mod tests {
    use super::{crc32, ends_in_mid_message, invariant_crc};

    /// A packet of a reliable connection.
    fn packet(source: [u8; 4], opcode: u8) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00]);
        // IPv4 to the total length, then up to the protocol, then both addresses.
        frame.extend([0x45, 0, 0, 44, 0, 0, 0, 0, 64, 17, 0, 0]);
        frame.extend(source);
        frame.extend([10, 0, 0, 9]);
        frame.extend([0xc0, 0, 0x12, 0xb7, 0, 24, 0, 0]);
        frame.push(opcode);
        frame.extend([0; 11]);
        let mut masked = frame[14..].to_vec();
        for at in [1, 8, 10, 11, 26, 27, 32] {
            masked[at] = 0xff;
        }
        let crc = crc32(std::iter::repeat_n(0xff, 8).chain(masked));
        frame.extend(crc.to_le_bytes());
        frame
    }

    #[test]
    fn a_sender_that_stops_in_mid_message_is_told_from_one_that_is_done() {
        let (one, other) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        assert_eq!(invariant_crc(&packet(one, 0)), Some(true));
        let ends = |opcodes: &[([u8; 4], u8)]| {
            let packets: Vec<_> = opcodes.iter().map(|(s, o)| packet(*s, *o)).collect();
            let frames: Vec<&[u8]> = packets.iter().map(Vec::as_slice).collect();
            ends_in_mid_message(&frames, one)
        };
        assert!(ends(&[(one, 0), (one, 1), (other, 17)]));
        // Its acknowledgement of a request of the other's is no request.
        assert!(ends(&[(one, 0), (other, 4), (one, 17)]));
        assert!(!ends(&[(one, 0), (one, 1), (one, 2), (other, 0)]));
        assert!(!ends(&[(one, 4)]));
        assert!(!ends(&[]));
    }

    #[test]
    fn the_check_value_of_crc32_comes_out() {
        assert_eq!(crc32(b"123456789".iter().copied()), 0xcbf4_3926);
    }

    #[test]
    fn other_traffic_is_not_taken_for_rocev2() {
        let mut arp = vec![0u8; 60];
        arp[12..14].copy_from_slice(&[0x08, 0x06]);
        assert_eq!(invariant_crc(&arp), None);
        let mut tcp = vec![0u8; 60];
        tcp[12..14].copy_from_slice(&[0x08, 0x00]);
        tcp[14] = 0x45;
        tcp[23] = 6;
        assert_eq!(invariant_crc(&tcp), None);
    }
}
