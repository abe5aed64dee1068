// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Limits, numbers and versions: chapters 14 to 16.

use super::checks;
use super::fixture::*;
use crate::host::Host;
use crate::outcome::Outcome;
use crate::rings::Cq;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CompletionStatus::{RetryExceeded, Success};
use ferrite_abi::*;
use std::time::{Duration, Instant};

checks! {
    "DEV-14-1" => limits_are_taken,
    "DEV-14-2" => timers_are_not_early,
    "DEV-15-1" => numbers_not_assigned,
    "DEV-16-1" => other_versions,
    "DEV-16-2" => older_drivers,
}

fn limits_are_taken(host: &mut Host) -> Outcome {
    host.start()?;
    let caps = host.caps;
    // The last of each range, and what is largest of what fits in the memory of this host.
    let mut queue = host.cq_command(caps.cq_max_log_entries.min(14));
    queue.cqn = caps.cq_first + caps.cq_count - 1;
    host.execute(&queue)?;
    let cq = Cq::new(&queue);
    for qpn in [caps.qp_first, caps.qp_first + caps.qp_count - 1] {
        let mut command = host.qp_command(Service::Rc, &cq);
        command.qpn = qpn;
        let (send, receive) = (64u64 << 12, 1u64 << (6 + 10));
        (command.sq_log_blocks, command.rq_log_entries) = (12, 10);
        (command.rq_offset, command.record_offset) = (send as u32, (send + receive) as u32);
        let length = send + receive + 128;
        command.buffer = Buffer::contiguous(host.memory.allocate(length), length);
        host.execute(&command)?;
    }
    for index in [caps.tag_first, caps.tag_first + caps.tag_count - 1] {
        let mut command = host.region_command(0, 4096);
        command.tag = Tag::new(index, 255).0;
        host.execute(&command)?;
    }
    let mut events = host.eq_command(caps.max_eq - 1, 0);
    events.log_entries = EQ_MIN_LOG_ENTRIES;
    host.execute(&events)?;
    host.set_gid(caps.max_gid - 1, crate::host::PEER_GID6, 4095)?;
    let mut pair = Pair::new(host)?;
    let data = host.region(0, 4096)?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 4096)?;
    let sges = vec![data.sge(0, 16); caps.max_sge.into()];
    let work = crate::work::Work::remote(SendOpcode::Write, &sges, sink.address, sink.tag);
    pair.ends(host, &work, Success)
}

fn timers_are_not_early(host: &mut Host) -> Outcome {
    host.start()?;
    // 4.096 us << 12 is 16.8 ms; it is waited for once, and then given up.
    let mut wired = Wired::by(host, Service::Rc, |c| (c.timeout, c.retry_count) = (12, 0))?;
    let start = Instant::now();
    wired.request(host, &empty_write())?;
    wired.completes(host, 0, RetryExceeded)?;
    let least = Duration::from_nanos(4096 << 12);
    ensure!(
        start.elapsed() >= least,
        "it gave up after {:?}, before {least:?}",
        start.elapsed()
    );
    Ok(())
}

fn numbers_not_assigned(host: &mut Host) -> Outcome {
    host.start()?;
    for opcode in 0..64 {
        let known = CommandOpcode::from_number(opcode).is_some();
        if !known {
            let mut entry = host.bare_entry(Op::Nop);
            entry.opcode = opcode;
            host.submit_for(&entry, CommandStatus::BadOpcode)?;
        }
    }
    let cq = host.create_cq()?;
    for service in 0..=255 {
        if Service::from_number(service).is_none() {
            let mut command = host.qp_command(Service::Rc, &cq);
            command.service = service;
            host.refuse(&command, CommandStatus::BadParameter)?;
        }
    }
    for transport in [0, 2, 3, 255] {
        let mut command = host.qp_command(Service::Rc, &cq);
        command.transport = transport;
        host.refuse(&command, CommandStatus::Unsupported)?;
    }
    Ok(())
}

fn other_versions(host: &mut Host) -> Outcome {
    for minor in [0, 1, 0xffff] {
        let mut boot = host.boot()?;
        boot.version = (u32::from(ABI_MAJOR) << 16) | minor;
        let status = host.enable(&boot)?;
        ensure_eq!(
            status.state(),
            Some(DeviceState::Running),
            "with minor version {minor}"
        );
        host.device.control_reset()?;
    }
    for major in [ABI_MAJOR.wrapping_sub(1), ABI_MAJOR + 1] {
        let mut boot = host.boot()?;
        boot.version = u32::from(major) << 16;
        host.enable_fails(&boot, FatalCode::BadHandshake)?;
    }
    Ok(())
}

fn older_drivers(host: &mut Host) -> Outcome {
    let mut boot = host.boot()?;
    // The first there was, which knows of no feature.
    (boot.version, boot.features) = (u32::from(ABI_MAJOR) << 16, 0);
    let status = host.enable(&boot)?;
    ensure_eq!(status.state(), Some(DeviceState::Running), "the state");
    host.device.control_reset()?;
    host.start_with(0)?;
    let mut pair = Pair::new(host)?;
    pair.ends(host, &empty_write(), Success)
}
