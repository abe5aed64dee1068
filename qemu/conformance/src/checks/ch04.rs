// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory: buffers, tags, the translation and protection table.

use super::checks;
use super::fixture::*;
use crate::host::{region_of, Host, PD, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{wait_for, Outcome};
use crate::packet::{aeth, rc, reth, syndrome, Packet, UNRELIABLE};
use crate::rings::Region;
use crate::wire::Neighbour;
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{BadParameter, Busy, NotFound};
use ferrite_abi::CompletionStatus::{
    Flushed, LocalAccess, LocalProtection, LocalQueuePairOperation, RemoteAccess,
    RemoteInvalidRequest, RemoteOperation, Success, WindowBind,
};
use ferrite_abi::*;

checks! {
    "DEV-4-1" => |h| reaches(h, AttOrder::Direct),
    "DEV-4-2" => |h| reaches(h, AttOrder::First),
    "DEV-4-3" => |h| reaches(h, AttOrder::Second),
    "DEV-4-4" => |h| descriptions(h, |b| [11, 31, 255].map(|page_shift| Buffer { page_shift, ..b }).to_vec()),
    "DEV-4-5" => |h| descriptions(h, |b| [4096, u32::MAX].map(|fbo| Buffer { fbo, ..b }).to_vec()),
    "DEV-4-6" => |h| descriptions(h, |b| [3, 255].map(|order| Buffer { order, ..b }).to_vec()),
    "DEV-4-7" => |h| descriptions(h, |b| vec![
        Buffer { order: 1, length: 512 * PAGE + 1, ..b },
        Buffer { order: 1, length: 512 * PAGE, fbo: 1, ..b },
        Buffer { order: 0, length: u64::MAX, fbo: 1, ..b },
    ]),
    "DEV-4-8" => |h| descriptions(h, |b| vec![Buffer { root: u64::MAX - PAGE + 1, length: PAGE + 1, ..b }]),
    "DEV-4-9" => bytes_around_a_buffer,
    "DEV-4-10" => tables_are_not_written,
    "DEV-4-11" => empty_region,
    "DEV-4-12" => |h| {
        h.start()?;
        let mut command = h.region_command(0, PAGE);
        command.tag = 0x55;
        h.refuse(&command, CommandStatus::BadNumber)
    },
    "DEV-4-13" => all_memory,
    "DEV-4-14" => all_memory_for_a_peer,
    "DEV-4-15" => |h| local(h, LocalProtection, |r| r.tag += 0x100),
    "DEV-4-16" => window_as_lkey,
    "DEV-4-17" => another_domain,
    "DEV-4-18" => |h| local(h, LocalProtection, |r| r.tag ^= 1),
    "DEV-4-19" => |h| {
        local(h, LocalProtection, |r| r.address -= 1)?;
        h.device.control_reset()?;
        local(h, LocalProtection, |r| r.address += PAGE - 63)?;
        h.device.control_reset()?;
        local(h, LocalProtection, |r| r.address = u64::MAX - 10)
    },
    "DEV-4-20" => write_right,
    "DEV-4-21" => bind_rights,
    "DEV-4-22" => all_memory_does_not_wrap,
    "DEV-4-23" => all_memory_for_others,
    "DEV-4-24" => entries_of_length_zero,
    "DEV-4-25" => unused_receive_entries,
    "DEV-4-26" => nothing_is_placed,
    "DEV-4-27" => checked_before_the_first_packet,
    "DEV-4-28" => checked_again_as_data_arrive,
    "DEV-4-29" => error_after_a_failure,
    "DEV-4-30" => |h| remote_by_connection(h, ACCESS_REMOTE_READ),
    "DEV-4-31" => atomic_alignment,
    "DEV-4-32" => |h| remote(h, RemoteAccess, |r| r.tag += 0x100),
    "DEV-4-33" => remote_kinds,
    "DEV-4-34" => remote_domain,
    "DEV-4-35" => |h| remote(h, RemoteAccess, |r| r.tag ^= 1),
    "DEV-4-36" => |h| {
        remote(h, RemoteAccess, |r| r.address += PAGE - 7)?;
        h.device.control_reset()?;
        remote(h, RemoteAccess, |r| r.address -= 1)?;
        h.device.control_reset()?;
        remote(h, RemoteAccess, |r| r.address = u64::MAX - 3)
    },
    "DEV-4-37" => remote_rights,
    "DEV-4-38" => whole_length_at_first,
    "DEV-4-39" => looked_at_again,
    "DEV-4-40" => remote_length_zero,
    "DEV-4-41" => events_of_naks,
    "DEV-4-42" => unreliable_drops,
    "DEV-4-43" => refused_packets_write_nothing,
    "DEV-4-44" => memory_that_is_not_there,
    "DEV-4-45" => memory_behind_a_window,
    "DEV-4-46" => device_memory,
    "DEV-4-47" => on_demand_levels_,
    "DEV-4-48" => entries_are_not_kept,
    "DEV-4-49" => invalidated_pages,
    "DEV-4-50" => what_a_fault_says,
    "DEV-4-51" => one_event_for_faults,
    "DEV-4-52" => one_fault_of_each_side,
    "DEV-4-53" => |h| fault_of_requester(h, SendOpcode::Write),
    "DEV-4-54" => |h| fault_of_requester(h, SendOpcode::Read),
    "DEV-4-55" => fault_of_an_answer,
    "DEV-4-56" => fault_of_responder,
    "DEV-4-57" => fault_of_a_long_read,
    "DEV-4-58" => fault_of_receive,
    "DEV-4-59" => fault_of_a_datagram,
    "DEV-4-60" => timer_of_faults,
    "DEV-4-61" => registered_in_order,
    "DEV-4-62" => |h| registration(h, 0, LocalQueuePairOperation, |_| ()),
    "DEV-4-63" => refused_registrations,
    "DEV-4-64" => local_invalidation,
    "DEV-4-65" => refused_invalidations,
    "DEV-4-66" => invalidation_without_flag,
    "DEV-4-67" => invalidation_waits,
    "DEV-4-68" => peers_invalidation,
    "DEV-4-69" => refused_peers_invalidation,
    "DEV-4-70" => bound_in_order,
    "DEV-4-71" => bound_through,
    "DEV-4-72" => bound_again,
    "DEV-4-73" => window_of_a_queue_pair,
    "DEV-4-74" => unbound,
    "DEV-4-75" => window_of_a_destroyed_queue_pair,
    "DEV-4-76" => |h| binds(h, WindowBind, |part, region| {
        (part.window, part.new_window) = (region.tag, region.tag + 1);
    }),
    "DEV-4-77" => |h| {
        binds(h, WindowBind, |part, _| part.new_window += 0x100)?;
        h.device.control_reset()?;
        binds(h, Success, |part, _| part.window ^= 0x44)
    },
    "DEV-4-78" => |h| {
        binds(h, WindowBind, |part, _| part.region ^= 1)?;
        h.device.control_reset()?;
        binds(h, WindowBind, |part, _| part.length += 1)
    },
    "DEV-4-79" => |h| binds(h, WindowBind, |part, _| part.access |= ACCESS_LOCAL_WRITE),
    "DEV-4-80" => window_addresses,
    "DEV-4-81" => region_of_windows,
    "DEV-4-82" => |h| {
        h.start_needing(FEATURE_WINDOWS)?;
        let window = allocate(h, TagKind::Window1)?;
        h.destroy(Op::ReleaseTag, window ^ 0x3c)
    },
    "DEV-4-83" => write_to_a_window_that_goes,
    "DEV-4-84" => first_packets_do_not_touch,
    "DEV-4-85" => |h| touches(h, 0, Success),
    "DEV-4-87" => |h| touches(h, ACCESS_ONE_TOUCH, RemoteAccess),
    "DEV-4-89" => dropped_packet_does_not_touch,
    "DEV-4-90" => used_up_entries,
    "DEV-4-91" => shared_tables,
    "DEV-4-121" => touched_through_a_window,
    "DEV-4-122" => windows_only,
}

/// A peer writes all over a region that lies in scattered pages; the bytes are where they should be.
fn reaches(host: &mut Host, order: AttOrder) -> Outcome {
    host.start()?;
    let scattered = [5, 2, 7, 1u64];
    let base = host.memory.allocate(8 * PAGE);
    let page = |n: usize| match order {
        AttOrder::Direct => base + n as u64 * PAGE,
        _ => base + scattered[n] * PAGE,
    };
    let leaf = host.memory.allocate(PAGE);
    for n in 0..4 {
        host.memory.store64(leaf + 8 * n as u64, page(n));
    }
    let root = match order {
        AttOrder::Direct => base,
        AttOrder::First => leaf,
        AttOrder::Second => {
            let root = host.memory.allocate(PAGE);
            host.memory.store64(root, leaf);
            root
        }
    };
    let (fbo, length) = (100, 3 * PAGE + 50);
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, length);
    command.buffer = Buffer {
        root,
        length,
        fbo,
        page_shift: 12,
        order: order.number(),
        reserved: 0,
    };
    host.execute(&command)?;
    let source = host.region(0, length)?;
    let data: Vec<u8> = (0..length).map(|n| (n % 251) as u8 + 1).collect();
    host.memory.write(source.dma, &data);
    let sges = [source.sge(0, length as u32)];
    let work = Work::remote(SendOpcode::Write, &sges, command.address, command.tag);
    ends(host, &work, Success)?;
    for (n, byte) in data.iter().enumerate() {
        let offset = n as u64 + u64::from(fbo);
        let at = page((offset / PAGE) as usize) + offset % PAGE;
        let found = host.memory.bytes(at, 1)[0];
        ensure_eq!(found, *byte, "byte {n} at {at:#x}");
    }
    Ok(())
}

/// Descriptions of a buffer that a command must refuse.
fn descriptions(host: &mut Host, of: fn(Buffer) -> Vec<Buffer>) -> Outcome {
    host.start()?;
    let right = host.region_command(0, PAGE);
    for buffer in of(right.buffer) {
        host.refuse(&RegisterRegion { buffer, ..right }, BadParameter)?;
    }
    host.execute(&right)
}

fn bytes_around_a_buffer(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
    let page = command.buffer.root;
    command.buffer = Buffer::contiguous(page + 1000, 8);
    host.execute(&command)?;
    host.memory.fill(page, PAGE, 0x11);
    ends(host, &write8(command.address, command.tag), Success)?;
    let found = host.memory.bytes(page, PAGE);
    ensure!(found[1000..1008] == [0x5a; 8], "the bytes of the region");
    let around = found[..1000]
        .iter()
        .chain(&found[1008..])
        .all(|b| *b == 0x11);
    ensure!(around, "bytes around the region were touched");
    Ok(())
}

fn tables_are_not_written(host: &mut Host) -> Outcome {
    host.start()?;
    let table = host.memory.allocate(PAGE);
    let pages = host.memory.allocate(4 * PAGE);
    for n in 0..4 {
        host.memory.store64(table + 8 * n, pages + n * PAGE);
    }
    let before = host.memory.bytes(table, PAGE);
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 4 * PAGE);
    (command.buffer.root, command.buffer.order) = (table, 1);
    host.execute(&command)?;
    ends(host, &write8(command.address + PAGE, command.tag), Success)?;
    host.destroy(Op::ReleaseTag, command.tag)?;
    ensure!(
        host.memory.bytes(table, PAGE) == before,
        "the table was written"
    );
    Ok(())
}

fn empty_region(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.region_command(0, PAGE);
    (command.buffer.length, command.buffer.root) = (0, NOWHERE);
    host.execute(&command)
}

/// A pair that may use tag 0.
fn privileged(host: &mut Host) -> Outcome<Pair> {
    Pair::flagged(host, QP_FLAG_PRIVILEGED)
}

fn all_memory(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = privileged(host)?;
    let (from, to) = (host.memory.allocate(PAGE), host.memory.allocate(PAGE));
    host.memory.fill(from, 64, 0x77);
    let sge = |address| Sge {
        address,
        length: 64,
        lkey: TAG_ALL_MEMORY,
    };
    host.post_receive(&mut pair.b, &[sge(to)])?;
    pair.ends(host, &Work::send(&[sge(from)]), Success)?;
    ensure!(host.memory.bytes(to, 64) == [0x77; 64], "the message");
    Ok(())
}

fn all_memory_for_a_peer(host: &mut Host) -> Outcome {
    host.start()?;
    let at = host.memory.allocate(PAGE);
    privileged(host)?.ends(host, &write8(at, TAG_ALL_MEMORY), RemoteAccess)?;
    ensure_eq!(host.memory.load64(at), 0, "the memory");
    Ok(())
}

/// A send of 64 bytes from a region that `spoil` describes wrongly.
fn local(host: &mut Host, status: CompletionStatus, spoil: fn(&mut Region)) -> Outcome {
    host.start()?;
    let mut region = host.region(0, PAGE)?;
    send_ends(host, region.sge(0, 64), Success)?;
    spoil(&mut region);
    send_ends(host, region.sge(0, 64), status)
}

fn window_as_lkey(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let (mut pair, part, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_READ)?;
    let sge = Sge {
        lkey: part.new_window,
        ..region.sge(0, 64)
    };
    pair.ends(host, &Work::send(&[sge]), LocalProtection)
}

fn another_domain(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.region_command(0, PAGE);
    command.pd = PD + 1;
    host.execute(&command)?;
    send_ends(host, region_of(&command).sge(0, 64), LocalProtection)
}

fn write_right(host: &mut Host) -> Outcome {
    host.start()?;
    let remote = host.region(ACCESS_REMOTE_READ, PAGE)?;
    let local = host.region(0, PAGE)?;
    ends(
        host,
        &read8(&local, remote.address, remote.tag),
        LocalProtection,
    )?;
    let mut pair = Pair::new(host)?;
    host.post_receive(&mut pair.b, &[local.sge(0, 64)])?;
    pair.ends(host, &Work::send(&[remote.sge(0, 64)]), RemoteOperation)?;
    let receive = pair.received(host)?;
    ensure_eq!(receive.status, LocalProtection.number(), "the receive");
    Ok(())
}

fn bind_rights(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    for (access, right) in [
        (ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ),
        (ACCESS_WINDOW_BIND, ACCESS_REMOTE_WRITE),
    ] {
        let region = host.region(access, PAGE)?;
        let window = allocate(host, TagKind::Window1)?;
        ends(host, &bind_work(&bind(window, &region, right)), WindowBind)?;
    }
    Ok(())
}

fn all_memory_does_not_wrap(host: &mut Host) -> Outcome {
    host.start()?;
    let sge = Sge {
        address: u64::MAX - 10,
        length: 64,
        lkey: TAG_ALL_MEMORY,
    };
    privileged(host)?.ends(host, &Work::send(&[sge]), LocalProtection)
}

fn all_memory_for_others(host: &mut Host) -> Outcome {
    host.start()?;
    let sge = Sge {
        address: host.memory.allocate(PAGE),
        length: 64,
        lkey: TAG_ALL_MEMORY,
    };
    send_ends(host, sge, LocalProtection)
}

fn entries_of_length_zero(host: &mut Host) -> Outcome {
    host.start()?;
    let sge = Sge {
        address: NOWHERE,
        length: 0,
        lkey: 0xdead_be00,
    };
    send_ends(host, sge, Success)
}

fn unused_receive_entries(host: &mut Host) -> Outcome {
    host.start()?;
    let source = host.region(0, PAGE)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let nonsense = Sge {
        address: NOWHERE,
        length: 64,
        lkey: 0xdead_be00,
    };
    let mut pair = Pair::new(host)?;
    // The message ends in an entry that goes past its region, in front of one that is nonsense.
    host.post_receive(&mut pair.b, &[region.sge(PAGE - 64, 4096), nonsense])?;
    pair.ends(host, &Work::send(&[source.sge(0, 64)]), Success)?;
    ensure_eq!(pair.received(host)?.status, 0, "the receive");
    // A write with immediate data uses none.
    host.post_receive(&mut pair.b, &[nonsense])?;
    let work = Work::remote(SendOpcode::WriteImmediate, &[], 0, 0);
    pair.ends(host, &work, Success)?;
    ensure_eq!(
        pair.received(host)?.status,
        0,
        "the receive of immediate data"
    );
    Ok(())
}

fn nothing_is_placed(host: &mut Host) -> Outcome {
    host.start()?;
    let source = host.region(0, PAGE)?;
    host.memory.fill(source.dma, PAGE, 0x33);
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut pair = Pair::new(host)?;
    // One packet to two entries, of which the second is bad.
    let bad = Sge {
        lkey: region.tag ^ 1,
        ..region.sge(64, 64)
    };
    host.post_receive(&mut pair.b, &[region.sge(0, 64), bad])?;
    pair.ends(host, &Work::send(&[source.sge(0, 128)]), RemoteOperation)?;
    let found = host.memory.bytes(region.dma, PAGE);
    ensure!(
        found.iter().all(|byte| *byte == 0),
        "part of the packet was placed"
    );
    Ok(())
}

fn checked_before_the_first_packet(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut qp, _) = host.wired(Service::Rc, &cq)?;
    let region = host.region(0, 4 * PAGE)?;
    let bad = Sge {
        lkey: region.tag ^ 1,
        ..region.sge(0, 64)
    };
    let work = Work::send(&[region.sge(0, 4 * PAGE as u32), bad]);
    host.post_for(&mut qp, &mut cq, &work, LocalProtection)?;
    host.wire()?.silence()
}

fn checked_again_as_data_arrive(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let index = host.post(&mut qp, &read8(&region, 0x1000, 0x77))?;
    let request = host.wire()?.packet()?;
    host.destroy(Op::ReleaseTag, region.tag)?;
    let body = [aeth(syndrome::ACK, 1), vec![0xff; 8]].concat();
    let answer = neighbour.packet(rc::READ_RESPONSE_ONLY, request.psn, body);
    host.wire()?.send(&answer.encode())?;
    host.completes(&mut cq, (qp.qpn, index), LocalAccess)?;
    ensure_eq!(host.memory.load64(region.dma), 0, "the memory");
    // A receive whose tag is gone.
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut qp, &[region.sge(0, 64)])?;
    host.destroy(Op::ReleaseTag, region.tag)?;
    let packet = neighbour.packet(rc::SEND_ONLY, RECEIVE_PSN, vec![1; 64]);
    host.wire()?.send(&packet.encode())?;
    host.completes(&mut cq, (qp.qpn, 0), LocalProtection)?;
    let answer = host.wire()?.packet()?;
    ensure_eq!(
        answer.aeth().0,
        syndrome::NAK_REMOTE_OPERATION,
        "what the sender is told"
    );
    Ok(())
}

fn error_after_a_failure(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(0, PAGE)?;
    let bad = Sge {
        lkey: region.tag ^ 1,
        ..region.sge(0, 64)
    };
    let mut pair = Pair::new(host)?;
    pair.ends(host, &Work::send(&[bad]), LocalProtection)?;
    host.comes_to(pair.a.qpn, QueuePairStateCode::Error)?;
    if host.features & FEATURE_UC != 0 {
        let mut pair = Pair::by(host, Service::Uc, |_, _| (), |_| ())?;
        pair.ends(host, &Work::send(&[bad]), LocalProtection)?;
        host.comes_to(pair.a.qpn, QueuePairStateCode::Sqe)?;
    }
    Ok(())
}

/// A peer that is given one right on the queue pair, and all on the region, has that one.
fn remote_by_connection(host: &mut Host, given: u32) -> Outcome {
    host.start()?;
    let region = host.region(
        ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE,
        PAGE,
    )?;
    let local = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let pair = |host: &mut Host| Pair::by(host, Service::Rc, |_, _| (), |c| c.access = given);
    pair(host)?.ends(host, &read8(&local, region.address, region.tag), Success)?;
    pair(host)?.ends(host, &write8(region.address, region.tag), RemoteAccess)
}

fn atomic_alignment(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ATOMICS)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_ATOMIC, PAGE)?;
    ends(
        host,
        &add8(&region, region.address + 8, region.tag),
        Success,
    )?;
    ends(
        host,
        &add8(&region, region.address + 4, region.tag),
        RemoteInvalidRequest,
    )
}

/// A peer's write of eight bytes to a region that `spoil` describes wrongly.
fn remote(host: &mut Host, status: CompletionStatus, spoil: fn(&mut Region)) -> Outcome {
    host.start()?;
    let mut region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    ends(host, &write8(region.address, region.tag), Success)?;
    spoil(&mut region);
    ends(host, &write8(region.address, region.tag), status)
}

fn remote_kinds(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    ends(host, &write8(region.address, region.tag), RemoteAccess)?;
    if host.features & FEATURE_WINDOWS != 0 {
        let window = allocate(host, TagKind::Window1)?;
        ends(host, &write8(region.address, window), RemoteAccess)?;
    }
    Ok(())
}

/// What is let in on another queue pair is refused there, unless it is a window.
fn windows_only(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS | FEATURE_WINDOWS_ONLY)?;
    let rights = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | ACCESS_WINDOW_BIND;
    let local = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let region = host.region(rights, PAGE)?;
    ends(host, &write8(region.address, region.tag), Success)?;
    for kind in [TagKind::Window1, TagKind::Window2B] {
        let window = allocate(host, kind)?;
        let mut pair = Pair::flagged(host, QP_FLAG_WINDOWS_ONLY)?;
        let part = bind(window, &region, ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ);
        let index = host.post(&mut pair.b, &bind_work(&part))?;
        host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
        pair.ends(host, &write8(region.address, part.new_window), Success)?;
        let read = read8(&local, region.address, part.new_window);
        pair.ends(host, &read, Success)?;
        // Of no length, and of nobody's memory.
        let nothing = Work::remote(SendOpcode::Write, &[], NOWHERE, region.tag);
        pair.ends(host, &nothing, Success)?;
        pair.ends(host, &write8(region.address, region.tag), RemoteAccess)?;
    }
    let mut pair = Pair::flagged(host, QP_FLAG_WINDOWS_ONLY)?;
    let read = read8(&local, region.address, region.tag);
    pair.ends(host, &read, RemoteAccess)?;
    if host.features & FEATURE_LISTS != 0 {
        let (mut pair, tag) = listed(host, &region, QP_FLAG_LISTS)?;
        pair.ends(host, &write8(region.address, tag), Success)?;
        let (mut pair, tag) = listed(host, &region, QP_FLAG_LISTS | QP_FLAG_WINDOWS_ONLY)?;
        pair.ends(host, &write8(region.address, tag), RemoteAccess)?;
    }
    Ok(())
}

/// A pair, at one end of which all of a region was registered as a list, under the same addresses.
fn listed(host: &mut Host, region: &Region, flags: u16) -> Outcome<(Pair, u32)> {
    let mut pair = Pair::flagged(host, flags)?;
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
            address: region.address,
            ..ListPart::zeroed()
        },
        pieces: vec![region.sge(0, PAGE as u32)],
    };
    let index = host.post(&mut pair.b, &list.work(SendOpcode::RegisterList))?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    Ok((pair, list.part.tag))
}

fn remote_domain(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
    command.pd = PD + 1;
    host.execute(&command)?;
    ends(host, &write8(command.address, command.tag), RemoteAccess)
}

fn remote_rights(host: &mut Host) -> Outcome {
    host.start()?;
    let local = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let writable = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    let readable = host.region(ACCESS_REMOTE_READ, PAGE)?;
    ends(host, &write8(writable.address, writable.tag), Success)?;
    ends(host, &write8(readable.address, readable.tag), RemoteAccess)?;
    ends(
        host,
        &read8(&local, readable.address, readable.tag),
        Success,
    )?;
    ends(
        host,
        &read8(&local, writable.address, writable.tag),
        RemoteAccess,
    )?;
    if host.features & FEATURE_ATOMICS != 0 {
        ends(
            host,
            &add8(&local, writable.address, writable.tag),
            RemoteAccess,
        )?;
    }
    Ok(())
}

/// A queue pair of a neighbour, and a region that the neighbour may write, of four pages.
fn written_by_neighbour(host: &mut Host) -> Outcome<(crate::wire::Neighbour, Region)> {
    host.start()?;
    let cq = host.create_cq()?;
    let (_, neighbour) = host.wired(Service::Rc, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 4 * PAGE)?;
    Ok((neighbour, region))
}

/// What is answered to a packet.
fn answer(host: &mut Host, packet: &Packet) -> Outcome<Packet> {
    host.wire()?.send(&packet.encode())?;
    host.wire()?.packet()
}

fn whole_length_at_first(host: &mut Host) -> Outcome {
    let (neighbour, region) = written_by_neighbour(host)?;
    // The first packet fits, the whole does not.
    let body = [
        reth(region.address, region.tag, 5 * PAGE as u32),
        vec![1; 1024],
    ]
    .concat();
    let packet = neighbour.packet(rc::WRITE_FIRST, RECEIVE_PSN, body);
    let found = answer(host, &packet)?.aeth().0;
    ensure_eq!(
        found,
        syndrome::NAK_REMOTE_ACCESS,
        "the answer to the first packet"
    );
    ensure_eq!(host.memory.load64(region.dma), 0, "the memory");
    Ok(())
}

/// Releases a tag between the two packets of a write by it, the second of which is refused.
fn released_within_a_write(
    host: &mut Host,
    neighbour: &Neighbour,
    address: u64,
    tag: u32,
) -> Outcome {
    let body = [reth(address, tag, 2048), vec![1; 1024]].concat();
    let first = neighbour.packet(rc::WRITE_FIRST, RECEIVE_PSN, body);
    ensure_eq!(
        answer(host, &first)?.aeth().0,
        syndrome::ACK,
        "the first packet"
    );
    host.destroy(Op::ReleaseTag, tag)?;
    let last = neighbour.packet(rc::WRITE_LAST, RECEIVE_PSN + 1, vec![1; 1024]);
    let found = answer(host, &last)?.aeth().0;
    ensure_eq!(
        found,
        syndrome::NAK_REMOTE_ACCESS,
        "the packet after the release"
    );
    Ok(())
}

fn looked_at_again(host: &mut Host) -> Outcome {
    let (neighbour, region) = written_by_neighbour(host)?;
    released_within_a_write(host, &neighbour, region.address, region.tag)?;
    ensure_eq!(host.memory.load64(region.dma + 1024), 0, "the memory");
    Ok(())
}

fn remote_length_zero(host: &mut Host) -> Outcome {
    host.start()?;
    let work = Work::remote(SendOpcode::Write, &[], NOWHERE, 0xdead_be00);
    ends(host, &work, Success)?;
    let mut pair = Pair::by(
        host,
        Service::Rc,
        |_, _| (),
        |c| c.access = ACCESS_REMOTE_READ,
    )?;
    pair.ends(host, &work, RemoteAccess)
}

fn events_of_naks(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    pair.ends(host, &write8(NOWHERE, 0xdead_be00), RemoteAccess)?;
    host.event(EQ_ASYNC, EventCode::QueuePairAccessError, pair.b.qpn)?;
    host.comes_to(pair.b.qpn, QueuePairStateCode::Error)?;
    let source = host.region(0, PAGE)?;
    let mut pair = Pair::new(host)?;
    host.post_receive(&mut pair.b, &[])?;
    pair.ends(
        host,
        &Work::send(&[source.sge(0, 64)]),
        RemoteInvalidRequest,
    )?;
    host.comes_to(pair.b.qpn, QueuePairStateCode::Error)
}

fn unreliable_drops(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UC)?;
    let cq = host.create_cq()?;
    let (qp, neighbour) = host.wired(Service::Uc, &cq)?;
    let body = [reth(NOWHERE, 0xdead_be00, 8), vec![1; 8]].concat();
    let packet = neighbour.packet(rc::WRITE_ONLY + UNRELIABLE, RECEIVE_PSN, body);
    host.wire()?.send(&packet.encode())?;
    host.wire()?.silence()?;
    host.no_event(EQ_ASYNC)?;
    ensure_eq!(host.state(qp.qpn)?, QueuePairStateCode::Rts, "the state");
    Ok(())
}

fn refused_packets_write_nothing(host: &mut Host) -> Outcome {
    let (neighbour, region) = written_by_neighbour(host)?;
    let body = [
        reth(region.address + 4 * PAGE - 8, region.tag, 16),
        vec![1; 16],
    ]
    .concat();
    let packet = neighbour.packet(rc::WRITE_ONLY, RECEIVE_PSN, body);
    let found = answer(host, &packet)?.aeth().0;
    ensure_eq!(found, syndrome::NAK_REMOTE_ACCESS, "the answer");
    let end = host.memory.load64(region.dma + 4 * PAGE - 8);
    ensure_eq!(end, 0, "the end of the region");
    Ok(())
}

fn memory_that_is_not_there(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
    let table = host.memory.allocate(PAGE);
    host.memory.store64(table, NOWHERE);
    (command.buffer.root, command.buffer.order) = (table, 1);
    host.execute(&command)?;
    ends(host, &write8(command.address, command.tag), RemoteAccess)
}

/// A pair whose sending side has bound a window to a region, with the right to both sides.
fn bound(host: &mut Host, kind: TagKind, access: u32) -> Outcome<(Pair, BindPart, Region)> {
    let rights = ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND;
    let region = host.region(rights, PAGE)?;
    let window = allocate(host, kind)?;
    let mut pair = Pair::new(host)?;
    let part = bind(window, &region, access);
    // The window is for the peer of the queue pair that binds it.
    let index = host.post(&mut pair.b, &bind_work(&part))?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    Ok((pair, part, region))
}

fn memory_behind_a_window(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let (mut pair, part, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_WRITE)?;
    pair.ends(host, &write8(region.address + 8, part.new_window), Success)?;
    let found = host.memory.bytes(region.dma + 8, 8);
    ensure_eq!(found, [0x5a; 8], "the bytes of the region");
    host.object(Op::ReleaseTag, region.tag, Busy)
}

fn device_memory(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_DEVICE_MEMORY)?;
    let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
    (command.flags, command.buffer) = (REGION_DEVICE_MEMORY, Buffer::contiguous(256, 64));
    host.execute(&command)?;
    ends(host, &write8(command.address + 8, command.tag), Success)?;
    let at = host.device.register64(REG_DEVICE_MEMORY_OFFSET)? + 256 + 8;
    let found = host.device.read::<8>(BAR_DOORBELLS, at)?;
    ensure_eq!(found, [0x5a; 8], "what was written to device memory");
    ends(
        host,
        &write8(command.address + 60, command.tag),
        RemoteAccess,
    )
}

fn on_demand_levels_(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let table = host.memory.allocate(PAGE);
    for (pages, levels) in [
        (1, 1),
        (512, 1),
        (513, 2),
        (1 << 18, 2),
        (1 << 27, 3),
        (1 << 36, 4),
    ] {
        for order in 0..=5 {
            let mut command = host.region_command(0, PAGE);
            command.flags = REGION_ON_DEMAND;
            command.buffer = Buffer {
                root: table,
                length: pages * PAGE,
                order,
                page_shift: 12,
                ..Buffer::zeroed()
            };
            command.address = 0;
            let right = order == levels;
            let status = if right {
                CommandStatus::Ok
            } else {
                BadParameter
            };
            host.refuse(&command, status)?;
        }
    }
    Ok(())
}

fn entries_are_not_kept(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 2)?;
    let mut pair = Pair::new(host)?;
    let index = host.post(
        &mut pair.a,
        &write8(memory.region.address, memory.region.tag),
    )?;
    let fault = one_fault(host)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    resolve(host, &fault, false)?;
    ensure_eq!(pair.of_a(host, index)?.status, 0, "the write");
    // One that was never asked for, set without a word.
    memory.set(host, 1, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    let work = write8(memory.region.address + PAGE, memory.region.tag);
    pair.ends(host, &work, Success)
}

fn invalidated_pages(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    let mut pair = Pair::new(host)?;
    let work = write8(memory.region.address, memory.region.tag);
    pair.ends(host, &work, Success)?;
    memory.take_back(host, 0)?;
    host.memory.store64(memory.pages, 0);
    host.post(&mut pair.a, &work)?;
    one_fault(host)?;
    ensure_eq!(
        host.memory.load64(memory.pages),
        0,
        "the page that was taken away"
    );
    Ok(())
}

fn what_a_fault_says(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 2)?;
    let mut pair = Pair::new(host)?;
    let work = write8(memory.region.address + PAGE + 24, memory.region.tag);
    host.post(&mut pair.a, &work)?;
    let fault = one_fault(host)?;
    ensure_eq!(fault.tag, memory.region.tag, "the tag");
    ensure_eq!(fault.offset, PAGE + 24, "the first byte needed");
    ensure_eq!(fault.flags, FAULT_WRITE, "whether it is to be written");
    ensure!(fault.length >= 1, "no bytes are wanted");
    // A page that is there and may not be written is none.
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
    memory.set(host, 0, ON_DEMAND_PRESENT);
    let mut pair = Pair::new(host)?;
    host.post(
        &mut pair.a,
        &write8(memory.region.address, memory.region.tag),
    )?;
    let other = one_fault(host)?;
    ensure_eq!(
        other.tag,
        memory.region.tag,
        "the tag of a write to a page for reading"
    );
    ensure!(other.token != fault.token, "two faults of one name");
    Ok(())
}

fn one_event_for_faults(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, 0, 4)?;
    let mut pairs = Vec::new();
    for page in 0..3 {
        let mut pair = Pair::new(host)?;
        host.post(
            &mut pair.a,
            &Work::send(&[memory.region.sge(page * PAGE, 8)]),
        )?;
        pairs.push(pair);
    }
    host.event(EQ_ASYNC, EventCode::PageFaults, 0)?;
    host.no_event(EQ_ASYNC)?;
    let faults = take_faults(host)?;
    ensure_eq!(faults.len(), 3, "the faults to take");
    let mut pair = Pair::new(host)?;
    host.post(&mut pair.a, &Work::send(&[memory.region.sge(3 * PAGE, 8)]))?;
    host.event(EQ_ASYNC, EventCode::PageFaults, 0)?;
    Ok(())
}

/// A work request whose own memory is not there: it goes on when it is, and fails when it cannot be
/// had.
fn fault_of_requester(host: &mut Host, opcode: SendOpcode) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let remote = host.region(
        ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE,
        PAGE,
    )?;
    for failed in [false, true] {
        let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE, 1)?;
        let mut pair = Pair::new(host)?;
        let sges = [memory.region.sge(0, 8)];
        let work = Work::remote(opcode, &sges, remote.address, remote.tag);
        let index = host.post(&mut pair.a, &work)?;
        let fault = one_fault(host)?;
        host.no_completion(&mut pair.cq)?;
        if !failed {
            memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
        }
        resolve(host, &fault, failed)?;
        let status = if failed { LocalProtection } else { Success };
        host.completes(&mut pair.cq, (pair.a.qpn, index), status)?;
    }
    Ok(())
}

fn fault_of_responder(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    for failed in [false, true] {
        let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
        let cq = host.create_cq()?;
        let (_, neighbour) = host.wired(Service::Rc, &cq)?;
        let request = [
            reth(memory.region.address, memory.region.tag, 8),
            vec![9; 8],
        ]
        .concat();
        let packet = neighbour.packet(rc::WRITE_ONLY, RECEIVE_PSN, request);
        let found = answer(host, &packet)?;
        ensure_eq!(
            found.aeth().0 & 0xe0,
            syndrome::RNR,
            "the answer to a write"
        );
        ensure_eq!(found.psn, RECEIVE_PSN, "the packet that it names");
        let fault = one_fault(host)?;
        if !failed {
            memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
        }
        resolve(host, &fault, failed)?;
        let expected = if failed {
            syndrome::NAK_REMOTE_ACCESS
        } else {
            syndrome::ACK
        };
        let found = answer(host, &packet)?.aeth().0;
        ensure_eq!(found, expected, "the answer to the write once more");
    }
    Ok(())
}

fn fault_of_receive(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE, 1)?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    host.post_receive(&mut qp, &[memory.region.sge(0, 64)])?;
    let packet = neighbour.packet(rc::SEND_ONLY, RECEIVE_PSN, vec![1; 64]);
    let found = answer(host, &packet)?;
    ensure_eq!(found.aeth().0 & 0xe0, syndrome::RNR, "the answer to a send");
    let fault = one_fault(host)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    resolve(host, &fault, false)?;
    ensure_eq!(answer(host, &packet)?.aeth().0, syndrome::ACK, "once more");
    host.completes(&mut cq, (qp.qpn, 0), Success)?;
    Ok(())
}

fn timer_of_faults(host: &mut Host) -> Outcome {
    /// 2.56 ms.
    const CODE: u8 = 16;
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
    let cq = host.create_cq()?;
    let (_, neighbour) = host.wired(Service::Rc, &cq)?;
    let request = [
        reth(memory.region.address, memory.region.tag, 8),
        vec![9; 8],
    ]
    .concat();
    let packet = neighbour.packet(rc::WRITE_ONLY, RECEIVE_PSN, request);
    let timer = answer(host, &packet)?.aeth().0 & 0x1f;
    // Code 0 is the longest of all.
    ensure!(
        timer == 0 || timer >= CODE,
        "timer code {timer}, less than 2.56 ms"
    );
    Ok(())
}

/// A pair that may register.
fn registering(host: &mut Host) -> Outcome<Pair> {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    Pair::flagged(host, QP_FLAG_FAST_REGISTER)
}

fn registered_in_order(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE);
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut pair.b, &[sink.sge(0, 64)])?;
    // Both are there before the device is told.
    pair.a.write_send(&host.memory, &work.flags(0).encode());
    pair.ends(host, &Work::send(&[region.sge(0, 64)]), Success)
}

/// A registration on a queue pair with these flags, of a part that was changed.
fn registration(
    host: &mut Host,
    flags: u16,
    status: CompletionStatus,
    spoil: impl Fn(&mut FastRegisterPart),
) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let mut pair = Pair::flagged(host, flags)?;
    let tag = allocate(host, TagKind::Region)?;
    let (mut work, _) = fast_register(host, tag, ACCESS_LOCAL_WRITE);
    let part = FastRegisterPart::from_prefix(&work.part);
    let mut part = part.unwrap_or_else(FastRegisterPart::zeroed);
    spoil(&mut part);
    work.part = part.as_bytes().to_vec();
    pair.ends(host, &work, status)
}

fn refused_registrations(host: &mut Host) -> Outcome {
    let spoiled: [fn(&mut FastRegisterPart); 5] = [
        |part| part.tag += 0x1000,
        |part| part.access = 1 << 20,
        |part| part.buffer.length = 5 * PAGE,
        |part| part.buffer.page_shift = 3,
        |part| part.buffer.fbo = 5000,
    ];
    for spoil in spoiled {
        registration(host, QP_FLAG_FAST_REGISTER, LocalProtection, spoil)?;
        host.device.control_reset()?;
    }
    // One that is valid already, and one of another domain.
    let mut pair = registering(host)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, _) = fast_register(host, tag, 0);
    pair.ends(host, &work, Success)?;
    pair.ends(host, &work, LocalProtection)?;
    let mut command = allocation(host, TagKind::Region);
    command.pd = PD + 1;
    host.execute(&command)?;
    let (work, _) = fast_register(host, command.tag, 0);
    let mut pair = Pair::flagged(host, QP_FLAG_FAST_REGISTER)?;
    pair.ends(host, &work, LocalProtection)
}

fn local_invalidation(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE);
    pair.ends(host, &work, Success)?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, tag);
    pair.ends(host, &invalidate, Success)?;
    pair.ends(host, &Work::send(&[region.sge(0, 8)]), LocalProtection)
}

fn refused_invalidations(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let region = host.region(0, PAGE)?;
    let by_command = Work::invalidate(SendOpcode::LocalInvalidate, region.tag);
    pair.ends(host, &by_command, LocalProtection)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, _) = fast_register(host, tag, 0);
    let mut pair = Pair::flagged(host, QP_FLAG_FAST_REGISTER)?;
    pair.ends(host, &work, Success)?;
    let old = Work::invalidate(SendOpcode::LocalInvalidate, tag ^ 1);
    pair.ends(host, &old, LocalProtection)
}

fn invalidation_without_flag(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, _) = fast_register(host, tag, 0);
    pair.ends(host, &work, Success)?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, tag);
    ends(host, &invalidate, LocalQueuePairOperation)
}

fn invalidation_waits(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let mut cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.flags = QP_FLAG_FAST_REGISTER;
    host.wire()?;
    let mut qp = host.make_qp(&command)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, 0);
    host.post_for(&mut qp, &mut cq, &work, Success)?;
    let send = host.post(&mut qp, &Work::send(&[region.sge(0, 8)]))?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, tag);
    let invalidation = host.post(&mut qp, &invalidate)?;
    let request = host.wire()?.packet()?;
    host.no_completion(&mut cq)?;
    let neighbour = host.neighbour(&qp);
    let ack = neighbour.packet(rc::ACKNOWLEDGE, request.psn, aeth(syndrome::ACK, 1));
    host.wire()?.send(&ack.encode())?;
    host.completes(&mut cq, (qp.qpn, send), Success)?;
    host.completes(&mut cq, (qp.qpn, invalidation), Success)?;
    Ok(())
}

/// A region that the answering side registered for its peer.
fn registered_for_peer(host: &mut Host, pair: &mut Pair) -> Outcome<Region> {
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE);
    let index = host.post(&mut pair.b, &work)?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    Ok(region)
}

fn peers_invalidation(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let region = registered_for_peer(host, &mut pair)?;
    pair.ends(host, &write8(region.address, region.tag), Success)?;
    host.post_receive(&mut pair.b, &[])?;
    let invalidate = Work::invalidate(SendOpcode::SendInvalidate, region.tag);
    pair.ends(host, &invalidate, Success)?;
    let receive = pair.received(host)?;
    ensure!(
        receive.flags & COMPLETION_INVALIDATED != 0,
        "COMPLETION_INVALIDATED"
    );
    ensure_eq!(receive.tag, region.tag, "the tag that was invalidated");
    pair.ends(host, &write8(region.address, region.tag), RemoteAccess)
}

fn refused_peers_invalidation(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    host.post_receive(&mut pair.b, &[])?;
    let invalidate = Work::invalidate(SendOpcode::SendInvalidate, region.tag);
    pair.ends(host, &invalidate, RemoteAccess)
}

fn bound_in_order(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let (mut pair, part, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_WRITE)?;
    pair.ends(host, &write8(region.address, part.new_window), Success)
}

fn bound_through(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    // Type 1 through any queue pair of its domain.
    let (_, part, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_WRITE)?;
    let mut other = Pair::new(host)?;
    let again = bind(part.new_window, &region, ACCESS_REMOTE_WRITE);
    other.ends(host, &bind_work(&again), Success)?;
    // Type 2B belongs to the queue pair that bound it.
    let (mut pair, part, region) = bound(host, TagKind::Window2B, ACCESS_REMOTE_WRITE)?;
    pair.ends(host, &write8(region.address, part.new_window), Success)
}

fn bound_again(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    for (kind, status) in [(TagKind::Window1, Success), (TagKind::Window2B, WindowBind)] {
        let (mut pair, part, region) = bound(host, kind, ACCESS_REMOTE_WRITE)?;
        let again = bind(part.new_window, &region, ACCESS_REMOTE_WRITE);
        let index = host.post(&mut pair.b, &bind_work(&again))?;
        host.completes(&mut pair.cq, (pair.b.qpn, index), status)?;
    }
    Ok(())
}

fn window_of_a_queue_pair(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    for (kind, status) in [
        (TagKind::Window1, Success),
        (TagKind::Window2B, RemoteAccess),
    ] {
        let (_, part, region) = bound(host, kind, ACCESS_REMOTE_WRITE)?;
        ends(host, &write8(region.address, part.new_window), status)?;
    }
    Ok(())
}

fn unbound(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let (mut pair, part, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_WRITE)?;
    let end = BindPart {
        length: 0,
        ..bind(part.new_window, &region, 0)
    };
    let index = host.post(&mut pair.b, &bind_work(&end))?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    pair.ends(host, &write8(region.address, end.new_window), RemoteAccess)?;
    // Type 2B by an invalidation; a bind of length zero is refused.
    let (mut pair, part, region) = bound(host, TagKind::Window2B, ACCESS_REMOTE_WRITE)?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, part.new_window);
    let index = host.post(&mut pair.b, &invalidate)?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    pair.ends(host, &write8(region.address, part.new_window), RemoteAccess)?;
    let (mut pair, _, region) = bound(host, TagKind::Window2B, ACCESS_REMOTE_WRITE)?;
    let window = allocate(host, TagKind::Window2B)?;
    let end = BindPart {
        length: 0,
        ..bind(window, &region, 0)
    };
    pair.ends(host, &bind_work(&end), WindowBind)
}

fn window_of_a_destroyed_queue_pair(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    for reset in [false, true] {
        let (pair, _, region) = bound(host, TagKind::Window2B, ACCESS_REMOTE_WRITE)?;
        host.object(Op::ReleaseTag, region.tag, Busy)?;
        if reset {
            host.move_qp(pair.b.qpn, QueuePairStateCode::Reset)?;
        } else {
            host.destroy(Op::DestroyQueuePair, pair.b.qpn)?;
        }
        // No window is bound to it any more.
        host.destroy(Op::ReleaseTag, region.tag)?;
    }
    Ok(())
}

/// A bind that was changed; a window that was not bound is as it was.
fn binds(
    host: &mut Host,
    status: CompletionStatus,
    spoil: impl Fn(&mut BindPart, &Region),
) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND, PAGE)?;
    let window = allocate(host, TagKind::Window1)?;
    let mut part = bind(window, &region, ACCESS_REMOTE_WRITE);
    spoil(&mut part, &region);
    ends(host, &bind_work(&part), status)?;
    let released = if status == Success {
        Busy
    } else {
        CommandStatus::Ok
    };
    host.object(Op::ReleaseTag, region.tag, released)
}

fn window_addresses(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let access = ACCESS_REMOTE_WRITE | ACCESS_ZERO_BASED;
    let (mut pair, part, region) = bound(host, TagKind::Window1, access)?;
    pair.ends(host, &write8(16, part.new_window), Success)?;
    let found = host.memory.bytes(region.dma + 16, 8);
    ensure_eq!(found, [0x5a; 8], "the bytes of the region");
    pair.ends(host, &write8(region.address, part.new_window), RemoteAccess)
}

fn region_of_windows(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS | FEATURE_FAST_REGISTER)?;
    let (_, _, region) = bound(host, TagKind::Window1, ACCESS_REMOTE_WRITE)?;
    host.object(Op::ReleaseTag, region.tag, Busy)?;
    let mut pair = Pair::flagged(host, QP_FLAG_FAST_REGISTER)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND);
    pair.ends(host, &work, Success)?;
    let window = allocate(host, TagKind::Window1)?;
    pair.ends(
        host,
        &bind_work(&bind(window, &region, ACCESS_REMOTE_READ)),
        Success,
    )?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, tag);
    pair.ends(host, &invalidate, LocalProtection)
}

fn write_to_a_window_that_goes(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND, PAGE)?;
    let window = allocate(host, TagKind::Window1)?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let part = bind(window, &region, ACCESS_REMOTE_WRITE);
    host.post_for(&mut qp, &mut cq, &bind_work(&part), Success)?;
    released_within_a_write(host, &neighbour, region.address, part.new_window)
}

/// A region for one message, as far as `access` says so.
fn touchable(host: &mut Host, access: u32) -> Outcome<RegisterRegion> {
    host.start_needing(FEATURE_ONE_TOUCH)?;
    let access = access | ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
    let command = host.region_command(access, 4 * PAGE);
    host.execute(&command)?;
    Ok(command)
}

fn first_packets_do_not_touch(host: &mut Host) -> Outcome {
    let region = touchable(host, ACCESS_ONE_TOUCH)?;
    let source = host.region(0, 4 * PAGE)?;
    let sges = [source.sge(0, 4 * PAGE as u32)];
    // Many packets, of which only the last ends the entry.
    let work = Work::remote(SendOpcode::Write, &sges, region.address, region.tag);
    ends(host, &work, Success)?;
    ends(host, &work, RemoteAccess)
}

/// Two writes to a region: the first is well, the second ends so.
fn touches(host: &mut Host, access: u32, second: CompletionStatus) -> Outcome {
    let region = touchable(host, access)?;
    ends(host, &write8(region.address, region.tag), Success)?;
    ends(host, &write8(region.address, region.tag), second)
}

fn used_up_entries(host: &mut Host) -> Outcome {
    let mut region = touchable(host, ACCESS_ONE_TOUCH)?;
    ends(host, &write8(region.address, region.tag), Success)?;
    region.flags = REGION_REPLACE;
    host.execute(&region)?;
    ends(host, &write8(region.address, region.tag), Success)?;
    host.destroy(Op::ReleaseTag, region.tag)?;
    host.object(Op::ReleaseTag, region.tag, NotFound)
}

fn touched_through_a_window(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS | FEATURE_ONE_TOUCH)?;
    let rights = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_WINDOW_BIND;
    for once in [0, ACCESS_ONE_TOUCH] {
        let region = host.region(rights | once, PAGE)?;
        let window = allocate(host, TagKind::Window1)?;
        let part = bind(window, &region, ACCESS_REMOTE_WRITE);
        ends(host, &bind_work(&part), Success)?;
        ends(host, &write8(region.address, part.new_window), Success)?;
        // Neither is of use any more, where the region takes one touch.
        let second = if once == 0 { Success } else { RemoteAccess };
        for tag in [part.new_window, region.tag] {
            ends(host, &write8(region.address, tag), second)?;
        }
        // It is bound to it still.
        host.object(Op::ReleaseTag, region.tag, Busy)?;
        host.destroy(Op::ReleaseTag, part.new_window)?;
        host.destroy(Op::ReleaseTag, region.tag)?;
    }
    Ok(())
}

fn shared_tables(host: &mut Host) -> Outcome {
    host.start()?;
    let first = host.region_command(0, PAGE);
    host.execute(&first)?;
    let second = RegisterRegion {
        tag: host.fresh_tag(),
        ..first
    };
    host.execute(&second)?;
    for command in [first, second] {
        send_ends(host, region_of(&command).sge(0, 64), Success)?;
    }
    let mut pair = Pair::new(host)?;
    host.destroy(Op::ReleaseTag, first.tag)?;
    let index = host.post(&mut pair.a, &Work::send(&[region_of(&second).sge(0, 8)]))?;
    host.move_qp(pair.a.qpn, QueuePairStateCode::Error)?;
    let status = wait_for("the send to end", || Ok(pair.cq.take(&host.memory)))?.status;
    ensure_eq!(
        status,
        Flushed.number(),
        "a send that nobody takes, at {index}"
    );
    Ok(())
}

fn one_fault_of_each_side(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, 0, 4)?;
    let mut pair = Pair::new(host)?;
    for page in 0..4 {
        let sge = memory.region.sge(page * PAGE, 8);
        host.post(&mut pair.a, &Work::send(&[sge]))?;
    }
    one_fault(host)?;
    host.no_event(EQ_ASYNC)?;
    ensure_eq!(take_faults(host)?.len(), 0, "further faults");
    Ok(())
}

fn fault_of_an_answer(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE, 1)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    let mut wired = Wired::by(host, Service::Rc, |c| c.retry_count = 0)?;
    let request = wired.request(host, &read8(&memory.region, 0, 0x77))?;
    memory.take_back(host, 0)?;
    let body = [aeth(syndrome::ACK, 1), vec![7; 8]].concat();
    wired.send(host, rc::READ_RESPONSE_ONLY, request.psn, body.clone())?;
    let fault = one_fault(host)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    resolve(host, &fault, false)?;
    // It is asked for again, though there is no retry.
    let again = host.wire()?.packet()?;
    let found = (again.opcode, again.psn);
    ensure_eq!(
        found,
        (rc::READ_REQUEST, request.psn),
        "what is asked for again"
    );
    wired.send(host, rc::READ_RESPONSE_ONLY, again.psn, body)?;
    wired.completes(host, 0, Success)?;
    ensure_eq!(host.memory.bytes(memory.pages, 8), [7; 8], "what was read");
    Ok(())
}

fn fault_of_a_long_read(host: &mut Host) -> Outcome {
    const PAGES: u64 = 400;
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ, PAGES)?;
    for page in 0..PAGES {
        if page != PAGES - 10 {
            memory.set(host, page, ON_DEMAND_PRESENT);
        }
    }
    let local = host.region(ACCESS_LOCAL_WRITE, PAGES * PAGE)?;
    let before = host.counter("rnr_naks_sent")?;
    let mut pair = Pair::new(host)?;
    let sges = [local.sge(0, (PAGES * PAGE) as u32)];
    let region = memory.region;
    let work = Work::remote(SendOpcode::Read, &sges, region.address, region.tag);
    let index = host.post(&mut pair.a, &work)?;
    let fault = one_fault(host)?;
    host.no_completion(&mut pair.cq)?;
    memory.set(host, PAGES - 10, ON_DEMAND_PRESENT);
    resolve(host, &fault, false)?;
    ensure_eq!(pair.of_a(host, index)?.status, 0, "the status");
    let after = host.counter("rnr_naks_sent")?;
    ensure!(after >= before, "a counter went back");
    Ok(())
}

fn fault_of_a_datagram(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND | FEATURE_UD)?;
    let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE, 1)?;
    let mut cq = host.create_cq()?;
    let (mut qp, _) = datagrams(host, &cq)?;
    let neighbour = host.neighbour(&qp);
    for message in 0..3u8 {
        let at = u64::from(message) * 256;
        host.post_receive(&mut qp, &[memory.region.sge(at, 256)])?;
        let header = crate::packet::deth(crate::host::QKEY, neighbour.qpn);
        let body = [header, vec![message + 1; 8]].concat();
        let packet = neighbour.packet(crate::packet::UD_SEND, RECEIVE_PSN, body);
        host.wire()?.send(&packet.encode())?;
    }
    let fault = one_fault(host)?;
    host.no_completion(&mut cq)?;
    memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    resolve(host, &fault, false)?;
    for message in 0..3u8 {
        host.completes(&mut cq, (qp.qpn, message.into()), Success)?;
        let at = memory.pages + u64::from(message) * 256 + 40;
        ensure_eq!(
            host.memory.bytes(at, 8),
            [message + 1; 8],
            "message {message}"
        );
    }
    Ok(())
}

fn dropped_packet_does_not_touch(host: &mut Host) -> Outcome {
    let region = touchable(host, ACCESS_ONE_TOUCH)?;
    let wired = Wired::new(host)?;
    let body = [reth(region.address, region.tag, 8), vec![1; 8]].concat();
    let answer = wired.ask(host, rc::WRITE_ONLY, RECEIVE_PSN + 9, body.clone())?;
    is_answer(&answer, syndrome::NAK_SEQUENCE)?;
    let answer = wired.ask(host, rc::WRITE_ONLY, RECEIVE_PSN, body)?;
    is_answer(&answer, syndrome::ACK)
}
