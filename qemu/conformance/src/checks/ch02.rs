// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reset, version handshake, features.

use super::checks;
use super::fixture::and_send;
use crate::host::{region_of, Host};
use crate::memory::{NOWHERE, PAGE, SIZE};
use crate::outcome::{not_here, wait_for, Outcome};
use crate::packet::{atomic_eth, rc, reth, syndrome};
use crate::rings::Qp;
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::*;
use std::time::{Duration, Instant};

checks! {
    "DEV-2-1" => magic,
    "DEV-2-2" => version,
    "DEV-2-3" => status,
    "DEV-2-4" => features,
    "DEV-2-5" => mac,
    "DEV-2-6" => function,
    "DEV-2-7" => reset_timeout,
    "DEV-2-8" => every_reset_leads_to_ready,
    "DEV-2-9" => nothing_of_before_is_shown,
    "DEV-2-10" => resetting_takes_nothing,
    "DEV-2-11" => ready_is_quiet,
    "DEV-2-12" => doorbells_outside_running,
    "DEV-2-13" => objects_are_gone,
    "DEV-2-14" => driver_registers_are_zero,
    "DEV-2-15" => nothing_is_flushed,
    "DEV-2-16" => message_is_forgotten,
    "DEV-2-17" => memory_is_left_alone,
    "DEV-2-18" => no_interrupt_after_reset,
    "DEV-2-19" => device_memory_is_zero,
    "DEV-2-20" => counters_and_clock_go_on,
    "DEV-2-21" => msix_table_is_left_alone,
    "DEV-2-22" => other_control_bits,
    "DEV-2-23" => doorbell_before_reset,
    "DEV-2-24" => enable_outside_ready,
    "DEV-2-25" => another_major_version,
    "DEV-2-26" => features_not_offered,
    "DEV-2-27" => features_without_those_they_need,
    "DEV-2-28" => boot_block_not_aligned,
    "DEV-2-29" => boot_block_not_there,
    "DEV-2-30" => control_ring_sizes,
    "DEV-2-31" => event_queue_sizes,
    "DEV-2-32" => message_of_event_queue_0,
    "DEV-2-33" => reserved_of_the_boot_block,
    "DEV-2-34" => rings_not_aligned,
    "DEV-2-35" => rings_not_there,
    "DEV-2-36" => refused_start_does_nothing,
    "DEV-2-37" => started_with_empty_rings,
    "DEV-2-38" => offers_no_feature_without_another,
    "DEV-2-39" => commands_without_their_feature,
    "DEV-2-40" => work_without_its_feature,
    "DEV-2-41" => requests_without_their_feature,
    "DEV-2-42" => rights_without_their_feature,
    "DEV-2-43" => rights_of_a_queue_pair,
    "DEV-2-44" => features_are_repeated,
}

/// Features that need another, and which.
const NEEDS: [(u64, u64); 7] = [
    (FEATURE_XRC, FEATURE_SRQ),
    (FEATURE_MULTICAST, FEATURE_UD),
    (FEATURE_RESIZE_SRQ, FEATURE_SRQ),
    (FEATURE_REGISTER_SEND, FEATURE_FAST_REGISTER),
    (FEATURE_TURNS, FEATURE_PENDING_TAGS),
    (FEATURE_REDIRECTION, FEATURE_ETHERNET),
    (FEATURE_RECEIVE_TABLES, FEATURE_RAW_PACKETS),
];

/// The features that there are.
const FEATURES: [u64; 31] = [
    FEATURE_SRQ,
    FEATURE_ATOMICS,
    FEATURE_WINDOWS,
    FEATURE_FAST_REGISTER,
    FEATURE_UC,
    FEATURE_UD,
    FEATURE_RESIZE_CQ,
    FEATURE_XRC,
    FEATURE_DEVICE_MEMORY,
    FEATURE_MULTICAST,
    FEATURE_ONE_TOUCH,
    FEATURE_ATOMIC_WRITE,
    FEATURE_FLUSH,
    FEATURE_RESIZE_SRQ,
    FEATURE_PORT_MTU,
    FEATURE_ON_DEMAND,
    FEATURE_QUIET_COMMANDS,
    FEATURE_VECTOR_MAP,
    FEATURE_SWITCH_EQ,
    FEATURE_EQ_CONTROL,
    FEATURE_REGISTER_SEND,
    FEATURE_LISTS,
    FEATURE_PENDING_TAGS,
    FEATURE_TURNS,
    FEATURE_QP_COUNTERS,
    FEATURE_CONTEXTS,
    FEATURE_WINDOWS_ONLY,
    FEATURE_ETHERNET,
    FEATURE_REDIRECTION,
    FEATURE_RAW_PACKETS,
    FEATURE_RECEIVE_TABLES,
];

fn magic(host: &mut Host) -> Outcome {
    ensure_eq!(
        host.device.register32(REG_MAGIC)?,
        MAGIC,
        "the magic number"
    );
    Ok(())
}

fn version(host: &mut Host) -> Outcome {
    let version = host.device.register32(REG_ABI_VERSION)?;
    ensure_eq!(version >> 16, u32::from(ABI_MAJOR), "the major version");
    Ok(())
}

fn status(host: &mut Host) -> Outcome {
    let rest = |status: Status| status.0 & !0x1_00ff;
    let status = host.device.status()?;
    ensure_eq!(
        (status.state(), rest(status)),
        (Some(DeviceState::Ready), 0),
        "{status:x?}"
    );
    host.start()?;
    let status = host.device.status()?;
    ensure_eq!(
        (status.state(), rest(status)),
        (Some(DeviceState::Running), 0),
        "{status:x?}"
    );
    host.device.control_reset()?;
    let mut boot = host.boot()?;
    boot.address |= 1;
    let status = host.enable(&boot)?;
    let expected = (u32::from(FatalCode::BadBootBlock.number()) << 8) | 3;
    ensure_eq!(
        status.0 & !(1 << 16),
        expected,
        "the status of a fatal device"
    );
    Ok(())
}

fn features(host: &mut Host) -> Outcome {
    let before = host.device.register64(REG_FEATURES)?;
    let known = FEATURES.iter().fold(0, |all, feature| all | feature);
    ensure_eq!(before & !known, 0, "features that are not assigned");
    host.start()?;
    ensure_eq!(
        host.device.register64(REG_FEATURES)?,
        before,
        "the features when running"
    );
    host.device.control_reset()?;
    ensure_eq!(
        host.device.register64(REG_FEATURES)?,
        before,
        "the features after a reset"
    );
    Ok(())
}

fn mac(host: &mut Host) -> Outcome {
    let mac = host.device.register64(REG_MAC)?;
    ensure_eq!(mac >> 48, 0, "the upper 16 bits");
    ensure!(
        mac != 0 && mac & 1 == 0,
        "{mac:#x} is no address of an interface"
    );
    host.start()?;
    ensure_eq!(
        host.device.register64(REG_MAC)?,
        mac,
        "the address when running"
    );
    Ok(())
}

fn function(host: &mut Host) -> Outcome {
    let function = Function(host.device.register32(REG_FUNCTION)?);
    ensure!(
        function.models() & (FUNCTION_RDMA | FUNCTION_ETHERNET) != 0,
        "neither part: {function:x?}"
    );
    ensure_eq!(function.0 >> 25, 0, "bits 31:25");
    Ok(())
}

fn reset_timeout(host: &mut Host) -> Outcome {
    let timeout = host.device.register32(REG_RESET_TIMEOUT)?;
    ensure!(timeout > 0, "the reset timeout is 0");
    Ok(())
}

/// Waits for `Ready` as long as the device says that a reset may take, and sees nothing but
/// `Resetting` before it.
fn becomes_ready(host: &mut Host, timeout: u32) -> Outcome {
    let end = Instant::now() + Duration::from_millis(timeout.into());
    loop {
        match host.device.status()?.state() {
            Some(DeviceState::Ready) => return Ok(()),
            Some(DeviceState::Resetting) => {}
            other => ensure!(false, "the state {other:?} after a reset"),
        }
        ensure!(Instant::now() < end, "not ready after {timeout} ms");
    }
}

fn every_reset_leads_to_ready(host: &mut Host) -> Outcome {
    let timeout = host.device.register32(REG_RESET_TIMEOUT)?;
    for way in 0..3 {
        host.device.set_bus_master(true)?;
        host.start()?;
        match way {
            0 => host.device.set_register32(REG_CONTROL, CONTROL_RESET)?,
            1 => host.device.function_level_reset()?,
            _ => host.device.reset()?,
        }
        becomes_ready(host, timeout)?;
    }
    Ok(())
}

fn nothing_of_before_is_shown(host: &mut Host) -> Outcome {
    let timeout = host.device.register32(REG_RESET_TIMEOUT)?;
    host.start()?;
    host.device.set_register32(REG_CONTROL, CONTROL_RESET)?;
    becomes_ready(host, timeout)?;
    // From the fatal state too.
    let mut boot = host.boot()?;
    boot.address |= 1;
    host.enable(&boot)?;
    host.is_fatal(FatalCode::BadBootBlock)?;
    host.device.set_register32(REG_CONTROL, CONTROL_RESET)?;
    becomes_ready(host, timeout)
}

fn resetting_takes_nothing(host: &mut Host) -> Outcome {
    host.start()?;
    host.device.set_register32(REG_CONTROL, CONTROL_RESET)?;
    if host.device.status()?.state() != Some(DeviceState::Resetting) {
        return not_here("the device is reset before it answers");
    }
    host.device.set_register32(REG_CONTROL, CONTROL_RESET)?;
    host.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
    host.device.wait_state(DeviceState::Ready)
}

fn ready_is_quiet(host: &mut Host) -> Outcome {
    host.start()?;
    host.device.control_reset()?;
    host.ring_control()?;
    let (base, size) = (host.memory.base(), SIZE);
    host.untouched(base, size)?;
    for message in 0..host.device.own_messages() {
        host.device.interrupts(message);
    }
    host.no_interrupt(EQ_CONTROL)
}

fn doorbells_outside_running(host: &mut Host) -> Outcome {
    let ready = Some(DeviceState::Ready);
    // A producer index that would be fatal, were it taken.
    host.device.doorbell(0, DOORBELL_CONTROL, 5000)?;
    ensure_eq!(host.device.status()?.state(), ready, "the state");
    host.start()?;
    host.is_alive()
}

fn objects_are_gone(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.cq_command(6);
    host.execute(&cq)?;
    let queue = crate::rings::Cq::new(&cq);
    let qp = host.qp_command(Service::Rc, &queue);
    host.execute(&qp)?;
    let region = host.region_command(0, PAGE);
    host.execute(&region)?;
    let srq = host.srq_command();
    let has_srq = host.features & FEATURE_SRQ != 0;
    if has_srq {
        host.execute(&srq)?;
    }
    host.device.control_reset()?;
    // Each can be made again, and in the meantime is not there.
    host.start_bare(u64::MAX)?;
    let not_found = CommandStatus::NotFound;
    host.object(CommandOpcode::DestroyQueuePair, qp.qpn, not_found)?;
    host.object(CommandOpcode::DestroyCompletionQueue, cq.cqn, not_found)?;
    host.object(CommandOpcode::ReleaseTag, region.tag, not_found)?;
    host.object(CommandOpcode::DestroyEventQueue, EQ_ASYNC.into(), not_found)?;
    if has_srq {
        host.object(CommandOpcode::DestroySrq, srq.srqn, not_found)?;
    }
    for eqn in [EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.create_eq(eqn, eqn)?;
    }
    host.execute(&cq)?;
    host.execute(&qp)?;
    // Nor is an address in the table.
    let connection = host.to_neighbour();
    let made = Qp::new(&qp);
    host.bring(Service::Rc, &made, QueuePairStateCode::Init, &connection)?;
    let path = Host::modify(Service::Rc, qp.qpn, QueuePairStateCode::Rtr, &connection);
    host.refuse(&path, not_found)
}

fn driver_registers_are_zero(host: &mut Host) -> Outcome {
    host.start()?;
    host.device.control_reset()?;
    // The version is checked first: 0 is right only while the major version is. Then the address.
    host.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
    let code = host.device.status()?.fatal();
    let expected = if ABI_MAJOR == 0 {
        FatalCode::BadBootBlock
    } else {
        FatalCode::BadHandshake
    };
    ensure_eq!(code, Some(expected), "a start without values");
    host.device.control_reset()?;
    // Features that were agreed on before are not any more.
    let boot = host.boot()?;
    host.memory.put(boot.address, &boot.block);
    host.device
        .set_register32(REG_DRIVER_VERSION, boot.version)?;
    host.device.set_register64(REG_BOOT, boot.address)?;
    let bare = crate::host::Boot {
        features: 0,
        ..boot
    };
    host.device.set_register32(REG_CONTROL, CONTROL_RESET)?;
    host.device.wait_state(DeviceState::Ready)?;
    let status = host.enable(&bare)?;
    ensure_eq!(status.state(), Some(DeviceState::Running), "the state");
    let entry = host.entry(CommandOpcode::SetPort, &SetPort::zeroed());
    host.submit_for(&entry, CommandStatus::Unsupported)
}

fn nothing_is_flushed(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    host.post_receive(&mut a, &[])?;
    host.device.control_reset()?;
    host.no_completion(&mut cq)?;
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        let event = host
            .queues
            .get(&eqn)
            .and_then(|ring| ring.peek(&host.memory));
        ensure_eq!(event, None, "an event on queue {eqn}");
    }
    Ok(())
}

/// A device that is busy sending to itself.
fn busy(host: &mut Host) -> Outcome<Qp> {
    host.start()?;
    let cq = host.create_cq()?;
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    let remote = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1 << 20)?;
    let local = host.region(0, 1 << 20)?;
    host.memory.fill(local.dma, local.length, 0x5a);
    for _ in 0..16 {
        let sges = [local.sge(0, local.length as u32)];
        let work = Work::remote(SendOpcode::Write, &sges, remote.address, remote.tag);
        host.post(&mut a, &work.flags(0))?;
    }
    Ok(a)
}

fn memory_is_left_alone(host: &mut Host) -> Outcome {
    busy(host)?;
    host.device.control_reset()?;
    let (base, size) = (host.memory.base(), SIZE);
    // What was there is changed, so that writing it once more is seen.
    let used = host.memory.allocate(0) - base;
    host.memory.fill(base, used, 0xa5);
    host.untouched(base, size)
}

fn no_interrupt_after_reset(host: &mut Host) -> Outcome {
    busy(host)?;
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.arm_eq(eqn)?;
    }
    host.device.control_reset()?;
    for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
        host.interrupts(eqn);
        host.no_interrupt(eqn)?;
    }
    Ok(())
}

fn device_memory_is_zero(host: &mut Host) -> Outcome {
    let offset = host.device.register64(REG_DEVICE_MEMORY_OFFSET)?;
    let size = host.device.register64(REG_DEVICE_MEMORY_SIZE)?;
    if size == 0 {
        return not_here("the device has no memory");
    }
    for at in [offset, offset + size - 8] {
        host.device.write(BAR_DOORBELLS, at, &[0xff; 8])?;
    }
    host.device.control_reset()?;
    for at in [offset, offset + size - 8] {
        let bytes = host.device.read::<8>(BAR_DOORBELLS, at)?;
        ensure_eq!(bytes, [0; 8], "device memory after a reset");
    }
    Ok(())
}

fn counters_and_clock_go_on(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut a, mut b) = host.pair(Service::Rc, &cq)?;
    host.post_receive(&mut b, &[])?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    host.completion(&mut cq)?;
    let counters = host.counters()?;
    let clock = |host: &mut Host| -> Outcome<u64> {
        if host.caps.clock_khz == 0 {
            return Ok(0);
        }
        Ok(host
            .query::<ClockReading>(CommandOpcode::QueryClock, None)?
            .ticks)
    };
    let time = clock(host)?;
    host.device.control_reset()?;
    host.start()?;
    let after = host.counters()?;
    for (at, (before, after)) in counters.iter().zip(&after).enumerate() {
        ensure!(
            after >= before,
            "counter {at} went back from {before} to {after}"
        );
    }
    let completions = host.counter("completions")?;
    ensure!(completions >= 2, "the completions were forgotten");
    let later = clock(host)?;
    ensure!(later >= time, "the clock went back from {time} to {later}");
    Ok(())
}

fn msix_table_is_left_alone(host: &mut Host) -> Outcome {
    // Over vfio-user the table is the client's: the device keeps whom it tells of each vector.
    host.start()?;
    host.device.control_reset()?;
    host.start()?;
    for eqn in [EQ_CONTROL, EQ_ASYNC] {
        host.interrupts(eqn);
        host.arm_eq(eqn)?;
    }
    host.nop()?;
    host.interrupt(EQ_CONTROL)?;
    let pair = super::fixture::Pair::new(host)?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Sqd)?;
    host.interrupt(EQ_ASYNC)
}

fn message_is_forgotten(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut qp, &[region.sge(0, PAGE as u32)])?;
    let first = neighbour.packet(rc::SEND_FIRST, crate::host::RECEIVE_PSN, vec![1; 1024]);
    host.wire()?.send(&first.encode())?;
    host.wire()?.packet()?;
    host.device.control_reset()?;
    host.memory.fill(region.dma, PAGE, 0);
    let last = neighbour.packet(rc::SEND_LAST, crate::host::RECEIVE_PSN + 1, vec![1; 8]);
    host.wire()?.send(&last.encode())?;
    host.untouched(region.dma, PAGE)?;
    host.no_completion(&mut cq)
}

fn other_control_bits(host: &mut Host) -> Outcome {
    host.start()?;
    host.device.set_register32(REG_CONTROL, u32::MAX)?;
    host.device.wait_state(DeviceState::Ready)?;
    // With all that a start needs, too.
    let boot = host.boot()?;
    host.memory.put(boot.address, &boot.block);
    host.device
        .set_register32(REG_DRIVER_VERSION, boot.version)?;
    host.device.set_register64(REG_BOOT, boot.address)?;
    host.device
        .set_register32(REG_CONTROL, CONTROL_RESET | CONTROL_ENABLE)?;
    host.device.wait_state(DeviceState::Ready)
}

fn doorbell_before_reset(host: &mut Host) -> Outcome {
    host.start()?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    host.device.control_reset()?;
    host.start()?;
    host.no_event(EQ_CONTROL)?;
    host.is_alive()
}

fn enable_outside_ready(host: &mut Host) -> Outcome {
    host.start()?;
    host.device.set_register64(REG_BOOT, NOWHERE)?;
    host.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
    host.is_alive()?;
    host.device.control_reset()?;
    let mut boot = host.boot()?;
    boot.address |= 1;
    host.enable(&boot)?;
    boot.address &= !1;
    host.enable(&boot)?;
    host.is_fatal(FatalCode::BadBootBlock)
}

fn another_major_version(host: &mut Host) -> Outcome {
    let mut boot = host.boot()?;
    boot.version = u32::from(ABI_MAJOR + 1) << 16;
    host.enable_fails(&boot, FatalCode::BadHandshake)?;
    boot.version = (u32::from(ABI_MAJOR) << 16) | 0xffff;
    let status = host.enable(&boot)?;
    ensure_eq!(
        status.state(),
        Some(DeviceState::Running),
        "with another minor version"
    );
    Ok(())
}

fn features_not_offered(host: &mut Host) -> Outcome {
    host.ethernet = true;
    let mut boot = host.boot()?;
    let offered = boot.features;
    for bit in 0..64 {
        if offered & (1 << bit) == 0 {
            boot.features = 1 << bit;
            host.enable_fails(&boot, FatalCode::BadHandshake)?;
        }
    }
    Ok(())
}

fn features_without_those_they_need(host: &mut Host) -> Outcome {
    host.ethernet = true;
    let mut boot = host.boot()?;
    let offered = boot.features;
    for (feature, needed) in NEEDS {
        if offered & feature != 0 {
            boot.features = offered & !needed;
            host.enable_fails(&boot, FatalCode::BadHandshake)?;
        }
    }
    Ok(())
}

/// A start is refused for its boot block, as `spoil` has left it.
fn bad_boot(host: &mut Host, spoil: impl FnOnce(&mut crate::host::Boot)) -> Outcome {
    let mut boot = host.boot()?;
    spoil(&mut boot);
    host.enable_fails(&boot, FatalCode::BadBootBlock)
}

fn boot_block_not_aligned(host: &mut Host) -> Outcome {
    for offset in [1, 8, 32] {
        bad_boot(host, |boot| boot.address += offset)?;
    }
    Ok(())
}

fn boot_block_not_there(host: &mut Host) -> Outcome {
    bad_boot(host, |boot| boot.address = NOWHERE)?;
    bad_boot(host, |boot| boot.address = !63)
}

fn control_ring_sizes(host: &mut Host) -> Outcome {
    for log in [0, CQP_MAX_LOG_ENTRIES + 1, u8::MAX] {
        bad_boot(host, |boot| boot.block.cqp_log_entries = log)?;
    }
    Ok(())
}

fn event_queue_sizes(host: &mut Host) -> Outcome {
    for log in [0, EQ_MIN_LOG_ENTRIES - 1, EQ_MAX_LOG_ENTRIES + 1, u8::MAX] {
        bad_boot(host, |boot| boot.block.eq0_log_entries = log)?;
    }
    Ok(())
}

fn message_of_event_queue_0(host: &mut Host) -> Outcome {
    let messages = host.device.register32(REG_MESSAGES)? as u16;
    for message in [messages, u16::MAX] {
        bad_boot(host, |boot| boot.block.eq0_message = message)?;
    }
    Ok(())
}

fn reserved_of_the_boot_block(host: &mut Host) -> Outcome {
    bad_boot(host, |boot| boot.block.reserved0 = 1)?;
    bad_boot(host, |boot| boot.block.reserved1[4] = 1 << 63)
}

fn rings_not_aligned(host: &mut Host) -> Outcome {
    for offset in [1, 8, 32] {
        bad_boot(host, |boot| boot.block.cqp_ring += offset)?;
        bad_boot(host, |boot| boot.block.eq0_ring += offset)?;
    }
    Ok(())
}

fn rings_not_there(host: &mut Host) -> Outcome {
    bad_boot(host, |boot| boot.block.cqp_ring = NOWHERE)?;
    bad_boot(host, |boot| boot.block.eq0_ring = NOWHERE)?;
    // Both ends are there, but not the middle.
    let base = 0x1000_0000;
    host.map(base, PAGE)?;
    host.map(base + 2 * PAGE, PAGE)?;
    bad_boot(host, |boot| {
        boot.block.eq0_ring = base;
        boot.block.eq0_log_entries = 8;
    })?;
    bad_boot(host, |boot| {
        boot.block.cqp_ring = base;
        boot.block.cqp_log_entries = 5;
    })?;
    // The end alone is not.
    bad_boot(host, |boot| {
        boot.block.cqp_ring = base;
        boot.block.cqp_log_entries = 6;
    })
}

fn refused_start_does_nothing(host: &mut Host) -> Outcome {
    let mut boot = host.boot()?;
    boot.block.cqp_ring |= 1;
    let (base, size) = (host.memory.base(), SIZE);
    host.memory.put(boot.address, &boot.block);
    let before = host.memory.bytes(base, size);
    host.enable(&boot)?;
    host.no_interrupt(EQ_CONTROL)?;
    ensure!(
        host.memory.bytes(base, size) == before,
        "memory was written"
    );
    Ok(())
}

fn started_with_empty_rings(host: &mut Host) -> Outcome {
    let boot = host.boot()?;
    let status = host.enable(&boot)?;
    ensure_eq!(status.state(), Some(DeviceState::Running), "the state");
    host.interrupts(EQ_CONTROL);
    // The command at index 0 is the next; event queue 0 is unarmed, index 0 next.
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    let ring = host.queues[&EQ_CONTROL].clone();
    let event = wait_for("the answer at index 0", || Ok(ring.peek(&host.memory)))?;
    ensure_eq!(event.id, entry.cookie, "the cookie");
    host.no_interrupt(EQ_CONTROL)
}

fn offers_no_feature_without_another(host: &mut Host) -> Outcome {
    let offered = host.device.register64(REG_FEATURES)?;
    for (feature, needed) in NEEDS {
        let alone = offered & feature != 0 && offered & needed == 0;
        ensure!(!alone, "feature {feature:#x} without {needed:#x}");
    }
    Ok(())
}

fn commands_without_their_feature(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    let cq = host.create_cq()?;
    let no = CommandStatus::Unsupported;
    let srq = host.srq_command();
    host.refuse(&srq, no)?;
    for service in [Service::Uc, Service::Ud, Service::Gsi, Service::XrcIni] {
        let command = host.qp_command(service, &cq);
        host.refuse(&command, no)?;
    }
    for flags in [
        QP_FLAG_SRQ,
        QP_FLAG_FAST_REGISTER,
        QP_FLAG_FAST_REGISTER_DRAINS,
        QP_FLAG_LISTS,
        QP_FLAG_WINDOWS_ONLY,
    ] {
        let mut command = host.qp_command(Service::Rc, &cq);
        command.flags = flags;
        host.refuse(&command, no)?;
    }
    for kind in [
        TagKind::Region,
        TagKind::Window1,
        TagKind::Window2B,
        TagKind::List,
    ] {
        let command = AllocateTag {
            tag: host.fresh_tag(),
            pd: crate::host::PD,
            kind: kind.number(),
            reserved: [0; 3],
            max_pages: u32::from(matches!(kind, TagKind::Region | TagKind::List)),
        };
        host.refuse(&command, no)?;
    }
    for flags in [REGION_DEVICE_MEMORY, REGION_ON_DEMAND] {
        let mut command = host.region_command(0, PAGE);
        (command.flags, command.buffer.order) = (flags, u8::from(flags == REGION_ON_DEMAND));
        if flags == REGION_DEVICE_MEMORY {
            command.buffer = Buffer::contiguous(0, 64);
        }
        host.refuse(&command, no)?;
    }
    let member = MulticastMember {
        gid: [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9],
        ..MulticastMember::zeroed()
    };
    for opcode in [
        CommandOpcode::AttachMulticast,
        CommandOpcode::DetachMulticast,
    ] {
        let entry = host.entry(opcode, &member);
        host.submit_for(&entry, no)?;
    }
    host.refuse(
        &SetPort {
            log_mtu: 10,
            ..SetPort::zeroed()
        },
        no,
    )?;
    host.refuse(&ResolveFault::zeroed(), no)?;
    host.refuse(&InvalidatePages::zeroed(), no)?;
    let entry = host.query_entry(CommandOpcode::TakeFaults, None, 256);
    host.submit_for(&entry, no)?;
    let region = host.region(0, PAGE)?;
    for (opcode, number) in [
        (CommandOpcode::QueryCompletionQueue, cq.cqn),
        (CommandOpcode::QueryTag, region.tag),
    ] {
        let entry = host.query_entry(opcode, Some(number), 64);
        host.submit_for(&entry, no)?;
    }
    let qp = host.create_qp(Service::Rc, &cq)?;
    let mut counted = QueryQueuePairCounters::zeroed();
    (counted.count, counted.qpns[0]) = (1, qp.qpn);
    let mut entry = host.entry(CommandOpcode::QueryQueuePairCounters, &counted);
    (entry.reply, entry.reply_length) = (host.reply(), 256);
    host.submit_for(&entry, no)?;
    let command = ResizeCompletionQueue {
        cqn: cq.cqn,
        log_entries: 6,
        record_offset: 4096,
        buffer: Buffer::contiguous(host.memory.allocate(2 * PAGE), 2 * PAGE),
        ..ResizeCompletionQueue::zeroed()
    };
    host.refuse(&command, no)
}

/// A pair of a device that agreed on these features, with memory that a peer may do everything to.
fn pair_with(host: &mut Host, features: u64) -> Outcome<(crate::rings::Cq, Qp, Qp)> {
    host.start_with(features)?;
    let cq = host.create_cq()?;
    let (a, b) = host.pair(Service::Rc, &cq)?;
    Ok((cq, a, b))
}

fn work_without_its_feature(host: &mut Host) -> Outcome {
    let atomic = Work::with_part(SendOpcode::FetchAdd, &AtomicPart::zeroed(), &[]);
    let flush = FlushPart {
        placement: FLUSH_GLOBAL,
        ..FlushPart::zeroed()
    };
    let list = ListPart {
        pieces: 1,
        ..ListPart::zeroed()
    };
    let works = [
        (true, atomic),
        (false, Work::with_part(SendOpcode::Flush, &flush, &[])),
        (
            false,
            Work::remote(SendOpcode::AtomicWrite, &[], 0, 0).inline(&[0; 8]),
        ),
        (
            false,
            Work::with_part(SendOpcode::Bind, &BindPart::zeroed(), &[]),
        ),
        (
            false,
            Work::with_part(SendOpcode::FastRegister, &FastRegisterPart::zeroed(), &[]),
        ),
        (
            false,
            and_send(
                Work::with_part(SendOpcode::FastRegister, &FastRegisterPart::zeroed(), &[]),
                &[],
            ),
        ),
        (true, Work::with_part(SendOpcode::RegisterList, &list, &[])),
        (
            true,
            and_send(Work::with_part(SendOpcode::RegisterList, &list, &[]), &[]),
        ),
        (false, Work::invalidate(SendOpcode::LocalInvalidate, 0x100)),
        (false, Work::invalidate(SendOpcode::SendInvalidate, 0x100)),
    ];
    for (with_entry, mut work) in works {
        host.device.control_reset()?;
        let (mut cq, mut a, _b) = pair_with(host, 0)?;
        if with_entry {
            let local = host.region(ACCESS_LOCAL_WRITE, 8)?;
            work.sges = vec![local.sge(0, 8)];
        }
        host.post_for(
            &mut a,
            &mut cq,
            &work,
            CompletionStatus::LocalQueuePairOperation,
        )?;
    }
    Ok(())
}

fn requests_without_their_feature(host: &mut Host) -> Outcome {
    let requests = [
        (rc::FETCH_ADD, atomic_eth(0, 0, 1, 0)),
        (rc::COMPARE_SWAP, atomic_eth(0, 0, 1, 0)),
        (rc::ATOMIC_WRITE, [reth(0, 0, 8), vec![0; 8]].concat()),
        (rc::FLUSH, [vec![0, 0, 0, 1], reth(0, 0, 0)].concat()),
        (rc::SEND_ONLY_INVALIDATE, vec![0; 4]),
    ];
    for (opcode, body) in requests {
        host.device.control_reset()?;
        host.start_with(0)?;
        let cq = host.create_cq()?;
        let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
        host.post_receive(&mut qp, &[])?;
        let packet = neighbour.packet(opcode, crate::host::RECEIVE_PSN, body);
        host.wire()?.send(&packet.encode())?;
        let answer = host.wire()?.packet()?;
        ensure_eq!(
            answer.opcode,
            rc::ACKNOWLEDGE,
            "the answer to opcode {opcode:#x}"
        );
        ensure_eq!(
            answer.aeth().0,
            syndrome::NAK_INVALID_REQUEST,
            "of opcode {opcode:#x}"
        );
    }
    Ok(())
}

fn rights_without_their_feature(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    for access in [ACCESS_REMOTE_ATOMIC, ACCESS_ONE_TOUCH, ACCESS_FLUSH_GLOBAL] {
        let command = host.region_command(access | ACCESS_LOCAL_WRITE, PAGE);
        host.refuse(&command, CommandStatus::Unsupported)?;
    }
    Ok(())
}

fn rights_of_a_queue_pair(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    let mut connection = host.to_neighbour();
    connection.access = ACCESS_ALL;
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    // It gives nothing.
    let command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
    host.execute(&command)?;
    let region = region_of(&command);
    let neighbour = host.neighbour(&qp);
    let request = atomic_eth(region.address, region.tag, 1, 0);
    let packet = neighbour.packet(rc::FETCH_ADD, crate::host::RECEIVE_PSN, request);
    host.wire()?.send(&packet.encode())?;
    let answer = host.wire()?.packet()?;
    ensure_eq!(
        answer.aeth().0,
        syndrome::NAK_INVALID_REQUEST,
        "the answer to an atomic"
    );
    ensure_eq!(
        host.memory.load64(region.dma),
        0,
        "what it should have changed"
    );
    Ok(())
}

fn features_are_repeated(host: &mut Host) -> Outcome {
    host.start()?;
    let offered = host.device.register64(REG_FEATURES)?;
    ensure_eq!(host.caps.features, offered, "DeviceCaps::features");
    Ok(())
}
