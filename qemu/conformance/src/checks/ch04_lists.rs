// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory: registrations that send, and lists.

use super::checks;
use super::fixture::*;
use crate::host::{Host, PD};
use crate::memory::PAGE;
use crate::outcome::Outcome;
use crate::rings::Region;
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CompletionStatus::{
    LocalProtection, LocalQueuePairOperation, RemoteAccess, Success, WindowBind,
};
use ferrite_abi::*;

checks! {
    "DEV-4-92" => registers_and_sends,
    "DEV-4-93" => refused_and_nothing_sent,
    "DEV-4-94" => send_fails_afterwards,
    "DEV-4-95" => pieces_one_after_another,
    "DEV-4-96" => listed_in_order,
    "DEV-4-97" => |h| {
        h.start_needing(FEATURE_LISTS)?;
        let (list, _) = pieces(h)?;
        ends(h, &list.work(SendOpcode::RegisterList), LocalQueuePairOperation)
    },
    "DEV-4-98" => refused_lists,
    "DEV-4-99" => |h| refused_piece(h, |piece| piece.length = 0),
    "DEV-4-100" => kinds_of_pieces,
    "DEV-4-101" => checks_of_pieces,
    "DEV-4-102" => rights_of_pieces,
    "DEV-4-103" => used_like_a_region,
    "DEV-4-104" => lost_pieces,
    "DEV-4-105" => |h| {
        let (_, _, regions) = registered(h, ALL)?;
        h.destroy(Op::ReleaseTag, regions[0].tag)
    },
    "DEV-4-106" => after_a_loss,
    "DEV-4-107" => invalidated_lists,
    "DEV-4-108" => bound_to_a_list,
    "DEV-4-109" => atomic_over_a_border,
    "DEV-4-110" => fault_through_a_list,
    "DEV-4-111" => touched_lists,
}

const ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;

/// A pair that may register lists, and a list that is not registered.
fn listing(host: &mut Host) -> Outcome<(Pair, List, [Region; 2])> {
    host.start_needing(FEATURE_LISTS)?;
    let (list, regions) = pieces(host)?;
    Ok((Pair::flagged(host, QP_FLAG_LISTS)?, list, regions))
}

/// Two regions of a page, and a list of the end of the one and the beginning of the other.
fn pieces(host: &mut Host) -> Outcome<(List, [Region; 2])> {
    let (a, b) = (host.region(ALL, PAGE)?, host.region(ALL, PAGE)?);
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            access: ALL,
            address: LIST_ADDRESS,
            ..ListPart::zeroed()
        },
        pieces: vec![a.sge(PAGE - 52, 52), b.sge(0, 76)],
    };
    Ok((list, [a, b]))
}

/// The same, registered by the answering side with these rights.
fn registered(host: &mut Host, access: u32) -> Outcome<(Pair, List, [Region; 2])> {
    let (mut pair, mut list, regions) = listing(host)?;
    list.part.access = access;
    register(host, &mut pair, &list)?;
    Ok((pair, list, regions))
}

/// The answering side registers a list.
fn register(host: &mut Host, pair: &mut Pair, list: &List) -> Outcome {
    let index = host.post(&mut pair.b, &list.work(SendOpcode::RegisterList))?;
    host.completes(&mut pair.cq, (pair.b.qpn, index), Success)?;
    Ok(())
}

/// A registration of pages that sends so many bytes of a region.
fn sending(host: &mut Host, from: &Region) -> Outcome<(Work, Region)> {
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE);
    Ok((and_send(work, &[from.sge(0, 8)]), region))
}

/// A pair that may register pages and lists.
fn registering(host: &mut Host) -> Outcome<Pair> {
    host.start_needing(FEATURE_REGISTER_SEND | FEATURE_LISTS)?;
    Pair::flagged(host, QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS)
}

fn registers_and_sends(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, ACCESS_LOCAL_WRITE);
    host.memory.fill(region.dma, 64, 0x77);
    host.post_receive(&mut pair.b, &[sink.sge(0, 64)])?;
    pair.ends(host, &and_send(work, &[region.sge(0, 64)]), Success)?;
    let received = pair.received(host)?;
    ensure_eq!(received.byte_count, 64, "the bytes received");
    ensure!(host.memory.bytes(sink.dma, 64) == [0x77; 64], "the data");
    // And of a list.
    let (list, regions) = pieces(host)?;
    host.memory.fill(regions[1].dma, 76, 0x78);
    host.post_receive(&mut pair.b, &[sink.sge(0, 64)])?;
    let data = list.region().sge(52, 64);
    let work = and_send(list.work(SendOpcode::RegisterList), &[data]);
    pair.ends(host, &work, Success)?;
    pair.received(host)?;
    ensure!(host.memory.bytes(sink.dma, 64) == [0x78; 64], "the data");
    Ok(())
}

fn refused_and_nothing_sent(host: &mut Host) -> Outcome {
    for list in [false, true] {
        let mut pair = registering(host)?;
        let source = host.region(0, PAGE)?;
        let mut work = if list {
            let (list, _) = pieces(host)?;
            and_send(list.work(SendOpcode::RegisterList), &[source.sge(0, 8)])
        } else {
            sending(host, &source)?.0
        };
        // A tag that is not there.
        let tag = host.fresh_tag();
        work.part[0..4].copy_from_slice(&tag.to_le_bytes());
        host.post_receive(&mut pair.b, &[])?;
        pair.ends(host, &work, LocalProtection)?;
        ensure!(pair.of_b.is_empty(), "something was received");
        host.no_completion(&mut pair.cq)?;
        host.device.control_reset()?;
    }
    Ok(())
}

fn send_fails_afterwards(host: &mut Host) -> Outcome {
    let mut pair = registering(host)?;
    let mut source = host.region(0, PAGE)?;
    source.tag ^= 1;
    let (work, region) = sending(host, &source)?;
    pair.ends(host, &work, LocalProtection)?;
    // From what it registered can be sent.
    send_ends(host, region.sge(0, 8), Success)
}

fn pieces_one_after_another(host: &mut Host) -> Outcome {
    for access in [ALL, ALL | ACCESS_ZERO_BASED] {
        let (mut pair, list, regions) = registered(host, access)?;
        let base = if access == ALL { LIST_ADDRESS } else { 0 };
        let source = host.region(0, PAGE)?;
        let data: Vec<u8> = (1..=128).collect();
        host.memory.write(source.dma, &data);
        let sges = [source.sge(0, 128)];
        let work = Work::remote(SendOpcode::Write, &sges, base, list.part.tag);
        pair.ends(host, &work, Success)?;
        let [a, b] = regions.map(|region| host.memory.bytes(region.dma, PAGE));
        let at = PAGE as usize - 52;
        ensure!(a[at..] == data[..52], "the bytes of the first piece");
        ensure!(b[..76] == data[52..], "the bytes of the second piece");
        let around = a[..at].iter().chain(&b[76..]).all(|byte| *byte == 0);
        ensure!(around, "bytes around the pieces were touched");
        let last = write8(base + 121, list.part.tag);
        pair.ends(host, &last, RemoteAccess)?;
        host.device.control_reset()?;
    }
    Ok(())
}

fn listed_in_order(host: &mut Host) -> Outcome {
    let (mut pair, list, _) = listing(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut pair.b, &[sink.sge(0, 128)])?;
    // Both are there before the device is told.
    let work = list.work(SendOpcode::RegisterList).flags(0);
    pair.a.write_send(&host.memory, &work.encode());
    pair.ends(host, &Work::send(&[list.region().sge(0, 128)]), Success)
}

/// A list that was changed is refused, and its tag stays free for a right one.
fn refused_list(host: &mut Host, spoil: impl Fn(&mut Host, &mut List) -> Outcome) -> Outcome {
    let (mut pair, right, _) = listing(host)?;
    let mut list = right.clone();
    spoil(host, &mut list)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), LocalProtection)?;
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    pair.ends(host, &right.work(SendOpcode::RegisterList), Success)?;
    host.device.control_reset()
}

fn refused_lists(host: &mut Host) -> Outcome {
    refused_list(host, |host, list| {
        list.part.tag = host.fresh_tag();
        Ok(())
    })?;
    refused_list(host, |host, list| {
        list.part.tag = allocate(host, TagKind::Region)?;
        Ok(())
    })?;
    refused_list(host, |host, list| {
        let command = AllocateTag {
            pd: PD + 1,
            ..allocation(host, TagKind::List)
        };
        list.part.tag = command.tag;
        host.execute(&command)
    })?;
    refused_list(host, |_, list| {
        let piece = list.pieces[0];
        list.pieces = vec![piece; 5];
        Ok(())
    })?;
    refused_list(host, |_, list| {
        list.part.address = u64::MAX - 100;
        Ok(())
    })?;
    for access in [ACCESS_WINDOW_BIND, 1 << 20] {
        refused_list(host, |_, list| {
            list.part.access |= access;
            Ok(())
        })?;
    }
    // One that is valid already.
    let (mut pair, list, _) = listing(host)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), Success)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), LocalProtection)
}

/// A list with this change of its second piece is refused.
fn refused_piece(host: &mut Host, spoil: impl Fn(&mut Sge)) -> Outcome {
    refused_list(host, |_, list| {
        spoil(&mut list.pieces[1]);
        Ok(())
    })
}

fn kinds_of_pieces(host: &mut Host) -> Outcome {
    refused_list(host, |host, list| {
        let (mut pair, other, _) = {
            let (other, regions) = pieces(host)?;
            (Pair::flagged(host, QP_FLAG_LISTS)?, other, regions)
        };
        pair.ends(host, &other.work(SendOpcode::RegisterList), Success)?;
        list.pieces[1] = other.region().sge(0, 8);
        Ok(())
    })?;
    // Tag 0, though the queue pair may use it.
    host.start_needing(FEATURE_LISTS)?;
    let (mut list, regions) = pieces(host)?;
    list.pieces[1] = Sge {
        address: regions[1].dma,
        length: 8,
        lkey: TAG_ALL_MEMORY,
    };
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS | QP_FLAG_PRIVILEGED)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), LocalProtection)
}

fn checks_of_pieces(host: &mut Host) -> Outcome {
    refused_list(host, |host, list| {
        list.pieces[1].lkey = host.fresh_tag();
        Ok(())
    })?;
    refused_list(host, |host, list| {
        let mut command = host.region_command(ALL, PAGE);
        command.pd = PD + 1;
        host.execute(&command)?;
        (list.pieces[1].address, list.pieces[1].lkey) = (command.address, command.tag);
        Ok(())
    })?;
    refused_piece(host, |piece| piece.lkey ^= 1)?;
    refused_piece(host, |piece| piece.length = PAGE as u32 + 1)?;
    refused_piece(host, |piece| piece.address -= 1)?;
    refused_piece(host, |piece| piece.address = u64::MAX - 3)
}

fn rights_of_pieces(host: &mut Host) -> Outcome {
    for (has, wanted) in [
        (ACCESS_REMOTE_READ, ACCESS_LOCAL_WRITE),
        (
            ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE,
            ACCESS_REMOTE_WRITE,
        ),
        (ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ),
        (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE),
    ] {
        refused_list(host, |host, list| {
            list.pieces[1] = host.region(has, PAGE)?.sge(0, 8);
            list.part.access = wanted;
            Ok(())
        })?;
    }
    // Less may be given.
    let (mut pair, mut list, _) = listing(host)?;
    list.part.access = 0;
    pair.ends(host, &list.work(SendOpcode::RegisterList), Success)
}

/// Makes a use wrong.
type Spoil = fn(&mut Region);

fn used_like_a_region(host: &mut Host) -> Outcome {
    let uses: [(Spoil, CompletionStatus); 5] = [
        (|_| (), Success),
        (|r| r.tag ^= 1, RemoteAccess),
        (|r| r.address -= 1, RemoteAccess),
        (|r| r.address += 121, RemoteAccess),
        (|r| r.address = u64::MAX - 3, RemoteAccess),
    ];
    for (spoil, status) in uses {
        let (mut pair, list, _) = registered(host, ALL)?;
        let mut region = list.region();
        spoil(&mut region);
        pair.ends(host, &write8(region.address, region.tag), status)?;
        // The same locally.
        let status = match status {
            Success => Success,
            _ => LocalProtection,
        };
        send_ends(host, region.sge(0, 8), status)?;
        host.device.control_reset()?;
    }
    // Its own rights, though the pieces have more.
    let (mut pair, list, _) = registered(host, ACCESS_REMOTE_READ)?;
    pair.ends(host, &write8(LIST_ADDRESS, list.part.tag), RemoteAccess)
}

fn lost_pieces(host: &mut Host) -> Outcome {
    for again in [false, true] {
        let (mut pair, list, regions) = registered(host, ALL)?;
        let write = write8(LIST_ADDRESS, list.part.tag);
        pair.ends(host, &write, Success)?;
        // The use is of the other piece.
        host.destroy(Op::ReleaseTag, regions[1].tag)?;
        if again {
            let mut command = host.region_command(ALL, PAGE);
            (command.tag, command.address) = (regions[1].tag, regions[1].address);
            command.buffer = Buffer::contiguous(regions[1].dma, PAGE);
            host.execute(&command)?;
        }
        pair.ends(host, &write, RemoteAccess)?;
        host.device.control_reset()?;
    }
    Ok(())
}

fn after_a_loss(host: &mut Host) -> Outcome {
    for invalidate in [false, true] {
        let (mut pair, mut list, regions) = listing(host)?;
        pair.ends(host, &list.work(SendOpcode::RegisterList), Success)?;
        host.destroy(Op::ReleaseTag, regions[1].tag)?;
        if invalidate {
            let work = Work::invalidate(SendOpcode::LocalInvalidate, list.part.tag);
            pair.ends(host, &work, Success)?;
        }
        list.pieces.truncate(1);
        pair.ends(host, &list.work(SendOpcode::RegisterList), Success)?;
        send_ends(host, list.region().sge(0, 52), Success)?;
        host.device.control_reset()?;
    }
    Ok(())
}

fn invalidated_lists(host: &mut Host) -> Outcome {
    let (mut pair, list, _) = listing(host)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), Success)?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, list.part.tag);
    ends(host, &invalidate, LocalQueuePairOperation)?;
    pair.ends(host, &invalidate, Success)?;
    send_ends(host, list.region().sge(0, 8), LocalProtection)?;
    // By the peer.
    register(host, &mut pair, &list)?;
    host.post_receive(&mut pair.b, &[])?;
    let invalidate = Work::invalidate(SendOpcode::SendInvalidate, list.part.tag);
    pair.ends(host, &invalidate, Success)?;
    let received = pair.received(host)?;
    ensure_eq!(received.tag, list.part.tag, "the tag that was invalidated");
    pair.ends(host, &write8(LIST_ADDRESS, list.part.tag), RemoteAccess)?;
    host.destroy(Op::ReleaseTag, list.part.tag ^ 0x3c)
}

fn bound_to_a_list(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_LISTS | FEATURE_WINDOWS)?;
    let (list, _) = pieces(host)?;
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), Success)?;
    let window = allocate(host, TagKind::Window1)?;
    let bind = bind(window, &list.region(), ACCESS_REMOTE_READ);
    pair.ends(host, &bind_work(&bind), WindowBind)
}

fn atomic_over_a_border(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_LISTS | FEATURE_ATOMICS)?;
    let access = ALL | ACCESS_REMOTE_ATOMIC;
    let (a, b) = (host.region(access, PAGE)?, host.region(access, PAGE)?);
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            access,
            address: LIST_ADDRESS,
            ..ListPart::zeroed()
        },
        pieces: vec![a.sge(0, 12), b.sge(0, 12)],
    };
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    register(host, &mut pair, &list)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    pair.ends(host, &add8(&sink, LIST_ADDRESS, list.part.tag), Success)?;
    let over = add8(&sink, LIST_ADDRESS + 8, list.part.tag);
    pair.ends(host, &over, RemoteAccess)?;
    ensure!(host.memory.bytes(a.dma + 8, 8) == [0; 8], "it was changed");
    host.untouched(b.dma, PAGE)
}

fn fault_through_a_list(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_LISTS | FEATURE_ON_DEMAND)?;
    let paged = OnDemand::new(host, ALL, 2)?;
    let region = host.region(ALL, PAGE)?;
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            access: ALL,
            address: LIST_ADDRESS,
            ..ListPart::zeroed()
        },
        pieces: vec![region.sge(0, 4), paged.region.sge(PAGE, 4)],
    };
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    register(host, &mut pair, &list)?;
    let index = host.post(&mut pair.a, &write8(LIST_ADDRESS, list.part.tag))?;
    let fault = one_fault(host)?;
    ensure_eq!(fault.tag, paged.region.tag, "the tag of the fault");
    ensure_eq!(fault.offset, PAGE, "the offset of the fault");
    host.untouched(region.dma, PAGE)?;
    paged.set(host, 1, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
    resolve(host, &fault, false)?;
    let entry = pair.of_a(host, index)?;
    ensure_eq!(entry.status, Success.number(), "the status of the write");
    ensure!(
        host.memory.bytes(region.dma, 4) == [0x5a; 4],
        "the data in the first piece"
    );
    Ok(())
}

fn touched_lists(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_LISTS | FEATURE_ONE_TOUCH)?;
    host.device.control_reset()?;
    let (mut pair, list, regions) = registered(host, ALL | ACCESS_ONE_TOUCH)?;
    let write = write8(LIST_ADDRESS, list.part.tag);
    pair.ends(host, &write, Success)?;
    ends(host, &write, RemoteAccess)?;
    // Its pieces are there still; one that takes one touch is touched through a list.
    let [a, b] = &regions;
    ends(host, &write8(a.address, a.tag), Success)?;
    let mut command = host.region_command(ALL | ACCESS_ONE_TOUCH, PAGE);
    (command.tag, command.address, command.flags) = (b.tag, b.address, REGION_REPLACE);
    host.execute(&command)?;
    let list = List {
        part: ListPart {
            tag: list.part.tag + 1,
            access: ALL,
            ..list.part
        },
        pieces: list.pieces,
    };
    register(host, &mut pair, &list)?;
    let write = |offset| write8(LIST_ADDRESS + offset, list.part.tag);
    ends(host, &write(0), Success)?;
    ends(host, &write(0), Success)?;
    ends(host, &write(52), Success)?;
    ends(host, &write8(b.address, b.tag), RemoteAccess)?;
    ends(host, &write(0), RemoteAccess)
}
