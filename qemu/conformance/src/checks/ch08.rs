// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work requests.

use super::checks;
use super::fixture::*;
use crate::host::{Host, OWN_GID, OWN_GID6, PEER_GID, PEER_GID6, PEER_MAC, QKEY, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{not_here, Outcome};
use crate::packet::{aeth, deth, rc, reth, syndrome, Packet, UD_SEND};
use crate::rings::{receive_entry, Region};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CompletionStatus::{
    BadResponse, Flushed, LocalLength, LocalProtection, LocalQueuePairOperation as Malformed,
    RemoteAccess, RemoteInvalidRequest, RemoteOperation, RetryExceeded, RnrRetryExceeded, Success,
    WindowBind,
};
use ferrite_abi::*;

checks! {
    "DEV-8-1" => signaled,
    "DEV-8-2" => solicited,
    "DEV-8-3" => immediate,
    "DEV-8-4" => tag_to_invalidate,
    "DEV-8-5" => length_of_a_message,
    "DEV-8-6" => inline_data,
    "DEV-8-7" => atomics,
    "DEV-8-8" => atomic_write,
    "DEV-8-9" => complete_when_answered,
    "DEV-8-10" => flushes,
    "DEV-8-11" => persistence,
    "DEV-8-13" => blocks_that_cannot_be_read,
    "DEV-8-14" => |h| malformed(h, |w| w.header.blocks = 7),
    "DEV-8-15" => |h| malformed(h, |w| w.header.blocks = 2),
    "DEV-8-16" => |h| {
        malformed(h, |w| w.header.opcode = 200)?;
        h.device.control_reset()?;
        malformed(h, |w| w.header.opcode = 14)
    },
    "DEV-8-17" => |h| malformed(h, |w| w.header.flags |= 1 << 9),
    "DEV-8-18" => reserved_fields,
    "DEV-8-19" => |h| malformed(h, |w| w.header.srqn = 1),
    "DEV-8-20" => immediates_without_meaning,
    "DEV-8-21" => |h| works(h, Malformed, |_| {
        Work::with_part(SendOpcode::Send, &SendPart { tag: 0x100, ..SendPart::zeroed() }, &[])
    }),
    "DEV-8-62" => tag_of_a_registration_that_sends,
    "DEV-8-63" => completions_of_registrations,
    "DEV-8-64" => |h| {
        h.start_needing(FEATURE_LISTS)?;
        for (opcode, entries, pieces) in [
            (SendOpcode::RegisterList, 2, 1),
            (SendOpcode::RegisterList, 1, 2),
            (SendOpcode::RegisterList, 1, 0),
            (SendOpcode::RegisterListSend, 1, 2),
            (SendOpcode::RegisterListSend, 1, 0),
            (SendOpcode::RegisterListSend, MAX_SGE, 17),
        ] {
            works(h, Malformed, |r| {
                let part = ListPart { pieces, ..ListPart::zeroed() };
                let sges = vec![r.sge(0, 1); entries];
                let work = Work::with_part(SendOpcode::RegisterList, &part, &sges);
                if opcode == SendOpcode::RegisterList { work } else { and_send(work, &[]) }
            })?;
        }
        Ok(())
    },
    "DEV-8-61" => |h| {
        h.start_needing(FEATURE_ATOMICS)?;
        let part = AtomicPart { compare: 1, ..AtomicPart::zeroed() };
        works(h, Malformed, |r| Work::with_part(SendOpcode::FetchAdd, &part, &[r.sge(0, 8)]))
    },
    "DEV-8-22" => |h| {
        works(h, Malformed, |_| Work::remote(SendOpcode::Read, &[], 0, 0).inline(&[0; 8]))?;
        h.device.control_reset()?;
        malformed(h, |w| w.header.inline_length = 8)
    },
    "DEV-8-23" => |h| {
        works(h, Malformed, |r| Work::send(&[r.sge(0, 1); MAX_SGE + 1]))?;
        h.device.control_reset()?;
        works(h, Malformed, |_| {
            let mut work = Work::send(&[]).inline(&[0; 16]);
            work.header.sge_count = 1;
            work
        })
    },
    "DEV-8-24" => |h| works(h, Malformed, |_| Work::send(&[]).inline(&[0; MAX_INLINE + 1])),
    "DEV-8-25" => |h| works(h, Malformed, |r| {
        let mut work = Work::send(&[r.sge(0, 1); 4]);
        work.header.blocks = 1;
        work
    }),
    "DEV-8-26" => atomic_lengths,
    "DEV-8-27" => longest_message,
    "DEV-8-28" => opcodes_of_services,
    "DEV-8-29" => opcodes_agreed_on,
    "DEV-8-30" => flush_fields,
    "DEV-8-31" => no_reads,
    "DEV-8-32" => longest_datagram,
    "DEV-8-33" => access,
    "DEV-8-34" => address_of_a_datagram,
    "DEV-8-35" => error_and_flush,
    "DEV-8-36" => bad_blocks_count_one,
    "DEV-8-37" => end_that_cannot_be_found,
    "DEV-8-38" => |h| told(h, syndrome::NAK_INVALID_REQUEST, RemoteInvalidRequest),
    "DEV-8-39" => |h| told(h, syndrome::NAK_REMOTE_ACCESS, RemoteAccess),
    "DEV-8-40" => |h| told(h, syndrome::NAK_REMOTE_OPERATION, RemoteOperation),
    "DEV-8-41" => silence,
    "DEV-8-42" => not_ready,
    "DEV-8-43" => wrong_response,
    "DEV-8-44" => receive_entries_too_long,
    "DEV-8-45" => reserved_of_receives,
    "DEV-8-46" => when_an_entry_is_taken,
    "DEV-8-47" => buffers_in_order,
    "DEV-8-48" => send_too_long,
    "DEV-8-49" => write_with_immediate,
    "DEV-8-50" => header_of_a_datagram,
    "DEV-8-51" => datagram_too_long,
    "DEV-8-52" => |h| addressed(h, |_| (), |p| {
        ensure_eq!(p.to_mac, PEER_MAC, "the destination");
        Ok(())
    }),
    "DEV-8-53" => |h| addressed(h, |v| v.vlan = 0x6005, |p| {
        ensure_eq!(p.vlan, Some(0x6005), "the tag");
        Ok(())
    }),
    "DEV-8-54" => |h| {
        addressed(h, |_| (), |p| {
            ensure_eq!(p.to, PEER_GID, "the destination");
            Ok(())
        })?;
        h.device.control_reset()?;
        addressed(h, six, |p| {
            ensure_eq!(p.to, PEER_GID6, "the destination");
            Ok(())
        })
    },
    "DEV-8-55" => |h| {
        addressed(h, |_| (), |p| {
            ensure_eq!(p.from, OWN_GID, "the source");
            Ok(())
        })?;
        h.device.control_reset()?;
        addressed(h, six, |p| {
            ensure_eq!(p.from, OWN_GID6, "the source");
            Ok(())
        })
    },
    "DEV-8-56" => |h| {
        for hop_limit in [0, 1, 255] {
            h.device.control_reset()?;
            addressed(h, |v| v.hop_limit = hop_limit, |p| {
                let right = if hop_limit == 0 { 64 } else { hop_limit };
                ensure_eq!(p.hop_limit, right, "the hop limit");
                Ok(())
            })?;
        }
        Ok(())
    },
    "DEV-8-57" => |h| {
        addressed(h, |v| v.traffic_class = 0xb9, |p| {
            ensure_eq!(p.traffic_class, 0xb9, "the TOS");
            Ok(())
        })?;
        h.device.control_reset()?;
        addressed(h, |v| { six(v); v.traffic_class = 0x5a }, |p| {
            ensure_eq!(p.traffic_class, 0x5a, "the traffic class");
            Ok(())
        })
    },
    "DEV-8-58" => |h| addressed(h, |v| { six(v); v.flow_label = 0xa_bcde }, |p| {
        ensure_eq!(p.flow_label, 0xa_bcde, "the flow label");
        Ok(())
    }),
    "DEV-8-59" => |h| {
        addressed(h, |v| v.udp_source_port = 0x1234, |p| {
            ensure_eq!(p.udp_source, 0x1234, "the source port");
            Ok(())
        })?;
        h.device.control_reset()?;
        addressed(h, |v| v.udp_source_port = 0, |p| {
            ensure!(p.udp_source >= 0xc000, "the source port {:#x}", p.udp_source);
            Ok(())
        })
    },
    "DEV-8-60" => |h| addressed(h, |v| v.port = 0, |_| Ok(())),
}

fn signaled(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    host.post(&mut pair.a, &empty_write().flags(0))?;
    let index = host.post(&mut pair.a, &empty_write())?;
    host.completes(&mut pair.cq, (pair.a.qpn, index), Success)?;
    let bad = Work::send(&[nonsense()]).flags(0);
    host.post_for(&mut pair.a, &mut pair.cq, &bad, LocalProtection)?;
    Ok(())
}

/// An entry that names nothing.
fn nonsense() -> Sge {
    Sge {
        address: NOWHERE,
        length: 8,
        lkey: 0xdead_be00,
    }
}

fn solicited(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let works = [
        (Work::send(&[]), true),
        (Work::remote(SendOpcode::WriteImmediate, &[], 0, 0), true),
    ];
    for (work, expected) in works {
        for flags in [0, SEND_SOLICITED] {
            host.post_receive(&mut pair.b, &[])?;
            host.post(&mut pair.a, &work.clone().flags(flags))?;
            let entry = pair.received(host)?;
            let found = entry.flags & COMPLETION_SOLICITED != 0;
            ensure_eq!(found, expected && flags != 0, "COMPLETION_SOLICITED");
        }
    }
    // With others it is ignored.
    pair.ends(
        host,
        &empty_write().flags(SEND_SIGNALED | SEND_SOLICITED),
        Success,
    )
}

fn immediate(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &Work::send_immediate(&[], 0x4433_2211))?;
    ensure_eq!(request.opcode, rc::SEND_ONLY_IMMEDIATE, "the opcode");
    ensure_eq!(request.body, [0x11, 0x22, 0x33, 0x44], "the immediate data");
    let part = RemotePart {
        immediate: 0x4433_2211,
        ..RemotePart::zeroed()
    };
    let work = Work::with_part(SendOpcode::WriteImmediate, &part, &[]);
    let request = wired.request(host, &work)?;
    ensure_eq!(request.opcode, rc::WRITE_ONLY_IMMEDIATE, "the opcode");
    ensure_eq!(
        request.body[16..],
        [0x11, 0x22, 0x33, 0x44],
        "the immediate data"
    );
    Ok(())
}

fn tag_to_invalidate(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let mut wired = Wired::new(host)?;
    let work = Work::invalidate(SendOpcode::SendInvalidate, 0x1234_5678);
    let request = wired.request(host, &work)?;
    ensure_eq!(request.opcode, rc::SEND_ONLY_INVALIDATE, "the opcode");
    ensure_eq!(request.word(0), 0x1234_5678, "the tag");
    Ok(())
}

fn length_of_a_message(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(0, PAGE)?;
    let mut wired = Wired::new(host)?;
    let sges = [region.sge(0, 3), region.sge(9, 0), region.sge(100, 40)];
    let request = wired.request(host, &Work::send(&sges))?;
    ensure_eq!(request.body.len(), 43, "the bytes of three entries");
    let request = wired.request(host, &Work::send(&[]).inline(&[7; 5]))?;
    ensure_eq!(request.body.len(), 5, "the bytes of inline data");
    let request = wired.request(host, &Work::send(&[]))?;
    ensure_eq!(request.body.len(), 0, "the bytes of nothing");
    let request = wired.request(host, &Work::send(&[region.sge(0, 0)]))?;
    ensure_eq!(request.body.len(), 0, "the bytes of an empty entry");
    Ok(())
}

fn inline_data(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let data: Vec<u8> = (0..host.caps.max_inline).map(|n| n as u8 ^ 0x3c).collect();
    let request = wired.request(host, &Work::send(&[]).inline(&data))?;
    ensure!(request.body == data, "the inline data");
    Ok(())
}

fn atomics(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ATOMICS)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_ATOMIC, PAGE)?;
    let at = region.dma + 64;
    host.memory.store64(at, 100);
    let mut pair = Pair::new(host)?;
    pair.ends(
        host,
        &add8(&region, region.address + 64, region.tag),
        Success,
    )?;
    let found = (host.memory.load64(at), host.memory.load64(region.dma));
    ensure_eq!(found, (101, 100), "the sum, and the value before");
    for (compare, after) in [(5, 101), (101, 7)] {
        let part = AtomicPart {
            address: region.address + 64,
            rkey: region.tag,
            operand: 7,
            compare,
            ..AtomicPart::zeroed()
        };
        let work = Work::with_part(SendOpcode::CompareSwap, &part, &[region.sge(0, 8)]);
        let entry = pair.post(host, &work)?;
        ensure_eq!((entry.status, entry.byte_count), (0, 8), "status and bytes");
        let found = (host.memory.load64(at), host.memory.load64(region.dma));
        ensure_eq!(found, (after, 101), "the value, and the one before");
    }
    Ok(())
}

fn atomic_write(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ATOMIC_WRITE)?;
    let region = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
    let write = |address| Work::remote(SendOpcode::AtomicWrite, &[], address, region.tag);
    ends(host, &write(region.address + 8).inline(&bytes), Success)?;
    ensure_eq!(host.memory.bytes(region.dma + 8, 8), bytes, "the bytes");
    ends(
        host,
        &write(region.address + 4).inline(&bytes),
        RemoteInvalidRequest,
    )
}

fn complete_when_answered(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ATOMIC_WRITE | FEATURE_FLUSH)?;
    let flush = FlushPart {
        placement: FLUSH_GLOBAL,
        rkey: 0x77,
        ..FlushPart::zeroed()
    };
    let works = [
        (
            rc::ATOMIC_WRITE,
            Work::remote(SendOpcode::AtomicWrite, &[], 8, 0x77).inline(&[0; 8]),
        ),
        (rc::FLUSH, Work::with_part(SendOpcode::Flush, &flush, &[])),
    ];
    for (opcode, work) in works {
        let mut wired = Wired::new(host)?;
        let request = wired.request(host, &work)?;
        ensure_eq!(request.opcode, opcode, "the request");
        host.no_completion(&mut wired.cq)?;
        let body = aeth(syndrome::ACK, 1);
        wired.send(host, rc::READ_RESPONSE_ONLY, request.psn, body)?;
        wired.completes(host, 0, Success)?;
    }
    Ok(())
}

/// A flush of a region that may be flushed, changed by `change`.
fn flush(
    host: &mut Host,
    status: CompletionStatus,
    change: impl FnOnce(&mut FlushPart),
) -> Outcome {
    let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_FLUSH_GLOBAL;
    let region = host.region(access, PAGE)?;
    let mut part = FlushPart {
        address: region.address,
        rkey: region.tag,
        length: 64,
        placement: FLUSH_GLOBAL,
        selectivity: FLUSH_RANGE,
        reserved: 0,
    };
    change(&mut part);
    let every = ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL;
    let mut pair = Pair::by(host, Service::Rc, |_, _| (), |c| c.access = every)?;
    pair.ends(
        host,
        &Work::with_part(SendOpcode::Flush, &part, &[]),
        status,
    )
}

fn flushes(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FLUSH)?;
    flush(host, Success, |_| ())?;
    flush(host, Success, |part| {
        (part.selectivity, part.address, part.length) = (FLUSH_REGION, NOWHERE, 5);
    })?;
    flush(host, RemoteAccess, |part| part.address += PAGE)
}

fn persistence(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FLUSH)?;
    flush(host, RemoteAccess, |part| part.placement = FLUSH_PERSISTENT)?;
    let part = FlushPart {
        placement: FLUSH_PERSISTENT,
        rkey: 0x77,
        ..FlushPart::zeroed()
    };
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &Work::with_part(SendOpcode::Flush, &part, &[]))?;
    ensure_eq!(
        request.word(0) & 0xf,
        FLUSH_PERSISTENT,
        "the placement that is asked for"
    );
    Ok(())
}

/// A queue pair whose send queue lies in a page that is not there.
fn without_send_ring(host: &mut Host) -> Outcome<Wired> {
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    let table = host.memory.allocate(PAGE);
    let rest = host.memory.allocate(PAGE);
    host.memory.store64(table, NOWHERE);
    host.memory.store64(table + 8, rest);
    (command.buffer.root, command.buffer.order) = (table, 1);
    command.buffer.length = 2 * PAGE;
    (command.rq_offset, command.record_offset) = (PAGE as u32, PAGE as u32 + 1024);
    let mut qp = host.make_qp(&command)?;
    (qp.receive_ring, qp.record) = (rest, rest + 1024);
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let neighbour = host.neighbour(&qp);
    Ok(Wired { cq, qp, neighbour })
}

fn blocks_that_cannot_be_read(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = without_send_ring(host)?;
    wired.qp.send_producer = 1;
    host.tell_send(&wired.qp)?;
    wired.completes(host, 0, Malformed)?;
    Ok(())
}

/// A send without data, spoiled.
fn malformed(host: &mut Host, spoil: impl Fn(&mut Work)) -> Outcome {
    works(host, Malformed, |_| {
        let mut work = Work::send(&[]);
        spoil(&mut work);
        work
    })
}

/// A work request of a new pair, made with a region, which ends so.
fn works(host: &mut Host, status: CompletionStatus, make: impl Fn(&Region) -> Work) -> Outcome {
    if host.device.status()?.state() != Some(DeviceState::Running) {
        host.start()?;
    }
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    ends(host, &make(&region), status)
}

/// A pair that may register lists, and a registration that sends nothing.
fn list_and_send(host: &mut Host) -> Outcome<(Pair, List, Work)> {
    host.start_needing(FEATURE_LISTS)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            address: LIST_ADDRESS,
            ..ListPart::zeroed()
        },
        pieces: vec![region.sge(0, 8)],
    };
    let pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    let work = and_send(list.work(SendOpcode::RegisterList), &[]);
    Ok((pair, list, work))
}

fn tag_of_a_registration_that_sends(host: &mut Host) -> Outcome {
    // With none.
    let (mut pair, list, mut work) = list_and_send(host)?;
    host.post_receive(&mut pair.b, &[])?;
    pair.ends(host, &work, Success)?;
    let received = pair.received(host)?;
    ensure_eq!(received.flags & COMPLETION_INVALIDATED, 0, "the flags");
    // With that of the list itself: both ends are of one device.
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, list.part.tag);
    pair.ends(host, &invalidate, Success)?;
    let at = size_of::<ListPart>() + 8;
    work.part[at..at + 4].copy_from_slice(&list.part.tag.to_le_bytes());
    host.post_receive(&mut pair.b, &[])?;
    pair.ends(host, &work, Success)?;
    let received = pair.received(host)?;
    ensure!(
        received.flags & COMPLETION_INVALIDATED != 0,
        "COMPLETION_INVALIDATED"
    );
    ensure_eq!(received.tag, list.part.tag, "the tag that was invalidated");
    send_ends(host, list.region().sge(0, 8), LocalProtection)
}

fn completions_of_registrations(host: &mut Host) -> Outcome {
    let (mut pair, list, work) = list_and_send(host)?;
    host.post_receive(&mut pair.b, &[])?;
    let entry = pair.post(host, &work)?;
    ensure_eq!(entry.opcode, CompletionOpcode::Send.number(), "the opcode");
    pair.received(host)?;
    host.no_completion(&mut pair.cq)?;
    let invalidate = Work::invalidate(SendOpcode::LocalInvalidate, list.part.tag);
    pair.ends(host, &invalidate, Success)?;
    let entry = pair.post(host, &list.work(SendOpcode::RegisterList))?;
    let opcode = CompletionOpcode::FastRegister.number();
    ensure_eq!(entry.opcode, opcode, "the opcode");
    // That of one that fails, its registration being there already.
    let entry = pair.post(host, &work)?;
    ensure_eq!(entry.status, LocalProtection.number(), "the status");
    ensure_eq!(entry.opcode, CompletionOpcode::Send.number(), "the opcode");
    host.no_completion(&mut pair.cq)
}

fn reserved_fields(host: &mut Host) -> Outcome {
    malformed(host, |work| work.header.reserved = 1)?;
    malformed(host, |work| work.header.reserved_channel = 1)?;
    malformed(host, |work| work.part[12] = 1)?;
    works(host, Malformed, |_| {
        let mut work = empty_write();
        work.part[12] = 1;
        work
    })?;
    works(host, Malformed, |_| {
        let mut work = empty_write();
        work.part[24] = 1;
        work
    })
}

fn immediates_without_meaning(host: &mut Host) -> Outcome {
    malformed(host, |work| work.part[0] = 1)?;
    works(host, Malformed, |_| Work::send_immediate(&[], 1 << 32))?;
    works(host, Malformed, |_| {
        let mut work = empty_write();
        work.part[16] = 1;
        work
    })
}

fn atomic_lengths(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ATOMICS)?;
    for length in [0, 4, 16] {
        works(host, Malformed, |region| {
            let part = AtomicPart::zeroed();
            Work::with_part(SendOpcode::FetchAdd, &part, &[region.sge(0, length)])
        })?;
    }
    if host.features & FEATURE_ATOMIC_WRITE != 0 {
        works(host, Malformed, |_| {
            Work::remote(SendOpcode::AtomicWrite, &[], 0, 0).inline(&[0; 4])
        })?;
    }
    Ok(())
}

fn longest_message(host: &mut Host) -> Outcome {
    works(host, LocalLength, |region| {
        let half = Sge {
            length: 1 << 30,
            ..region.sge(0, 0)
        };
        Work::send(&[half, half, region.sge(0, 1)])
    })
}

fn opcodes_of_services(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UC | FEATURE_UD)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut works = vec![read8(&region, 0, 0)];
    if host.features & FEATURE_ATOMICS != 0 {
        works.push(add8(&region, 0, 0));
    }
    if host.features & FEATURE_FAST_REGISTER != 0 {
        works.push(Work::invalidate(SendOpcode::SendInvalidate, 0x100));
    }
    for work in works {
        let mut pair = Pair::by(host, Service::Uc, |_, _| (), |_| ())?;
        pair.ends(host, &work, Malformed)?;
    }
    let mut cq = host.create_cq()?;
    let (mut qp, _) = datagrams(host, &cq)?;
    host.post_for(&mut qp, &mut cq, &empty_write(), Malformed)?;
    Ok(())
}

fn opcodes_agreed_on(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    ends(host, &add8(&region, 0, 0), Malformed)?;
    let part = BindPart::zeroed();
    ends(
        host,
        &Work::with_part(SendOpcode::Bind, &part, &[]),
        Malformed,
    )
}

fn flush_fields(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FLUSH)?;
    for placement in [0, 4, 1 << 31] {
        flush(host, Malformed, |part| part.placement = placement)?;
    }
    flush(host, Malformed, |part| part.selectivity = 2)?;
    flush(host, Malformed, |part| part.length = MAX_MESSAGE + 1)
}

fn no_reads(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut works = vec![read8(&region, 0, 0)];
    if host.features & FEATURE_ATOMICS != 0 {
        works.push(add8(&region, 0, 0));
    }
    for work in works {
        let mut pair = Pair::by(host, Service::Rc, |_, _| (), |c| c.depth = 0)?;
        pair.ends(host, &work, Malformed)?;
    }
    Ok(())
}

fn longest_datagram(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let data = host.region(0, 4 * PAGE)?;
    let mut cq = host.create_cq()?;
    let (mut qp, part) = datagrams(host, &cq)?;
    let most = 1 << host.caps.max_log_mtu;
    let longest = Work::datagram(&part, &[data.sge(0, most)]);
    host.post_for(&mut qp, &mut cq, &longest, Success)?;
    let longer = Work::datagram(&part, &[data.sge(0, most + 1)]);
    host.post_for(&mut qp, &mut cq, &longer, LocalLength)?;
    Ok(())
}

fn access(host: &mut Host) -> Outcome {
    works(host, LocalProtection, |_| Work::send(&[nonsense()]))?;
    if host.features & FEATURE_WINDOWS != 0 {
        let window = allocate(host, TagKind::Window1)?;
        works(host, WindowBind, |region| {
            bind_work(&bind(window, region, ACCESS_REMOTE_READ))
        })?;
    }
    Ok(())
}

fn address_of_a_datagram(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let spoiled: [fn(&mut AddressVector); 3] = [
        |v| v.source_gid_index = 9,
        |v| v.source_gid_index = 1,
        |v| v.port = 200,
    ];
    for spoil in spoiled {
        let mut cq = host.create_cq()?;
        let (mut qp, mut part) = datagrams(host, &cq)?;
        spoil(&mut part.address_vector);
        host.post_for(&mut qp, &mut cq, &Work::datagram(&part, &[]), Malformed)?;
    }
    Ok(())
}

fn error_and_flush(host: &mut Host) -> Outcome {
    host.start()?;
    let mut services = vec![(Service::Rc, QueuePairStateCode::Error)];
    if host.features & FEATURE_UC != 0 {
        services.push((Service::Uc, QueuePairStateCode::Sqe));
    }
    for (service, state) in services {
        let mut pair = Pair::by(host, service, |_, _| (), |_| ())?;
        let mut bad = Work::send(&[]);
        bad.header.opcode = 99;
        for work in [bad, Work::send(&[]), Work::send(&[])] {
            pair.a.write_send(&host.memory, &work.encode());
        }
        host.tell_send(&pair.a)?;
        for (index, status) in [(0, Malformed), (1, Flushed), (2, Flushed)] {
            host.completes(&mut pair.cq, (pair.a.qpn, index), status)?;
        }
        host.comes_to(pair.a.qpn, state)?;
    }
    Ok(())
}

fn bad_blocks_count_one(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let mut bad = Work::send(&[]);
    bad.header.blocks = 100;
    for work in [bad, empty_write()] {
        pair.a.write_send(&host.memory, &work.encode());
    }
    host.tell_send(&pair.a)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), Malformed)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 1), Flushed)?;
    Ok(())
}

fn end_that_cannot_be_found(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let mut bad = Work::send(&[]);
    bad.header.blocks = 100;
    let first = Work::send(&[nonsense()]);
    for work in [first, bad, empty_write(), empty_write()] {
        pair.a.write_send(&host.memory, &work.encode());
    }
    host.tell_send(&pair.a)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 0), LocalProtection)?;
    host.completes(&mut pair.cq, (pair.a.qpn, 1), Flushed)?;
    host.no_completion(&mut pair.cq)
}

/// What the neighbour answers ends a work request so.
fn told(host: &mut Host, syndrome: u8, status: CompletionStatus) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &empty_write())?;
    wired.acknowledge(host, request.psn, syndrome)?;
    wired.completes(host, 0, status)?;
    host.comes_to(wired.qp.qpn, QueuePairStateCode::Error)
}

fn silence(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::by(host, Service::Rc, |c| (c.timeout, c.retry_count) = (10, 2))?;
    wired.request(host, &empty_write())?;
    for _ in 0..2 {
        host.wire()?.packet()?;
    }
    wired.completes(host, 0, RetryExceeded)?;
    host.wire()?.silence()
}

fn not_ready(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::by(host, Service::Rc, |c| c.rnr_retry = 2)?;
    let mut request = wired.request(host, &Work::send(&[]))?;
    for _ in 0..2 {
        wired.acknowledge(host, request.psn, syndrome::RNR | 1)?;
        request = host.wire()?.packet()?;
    }
    wired.acknowledge(host, request.psn, syndrome::RNR | 1)?;
    wired.completes(host, 0, RnrRetryExceeded)?;
    Ok(())
}

fn wrong_response(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &read8(&region, 0, 0x77))?;
    // Of the wrong length.
    let body = [aeth(syndrome::ACK, 1), vec![0; 12]].concat();
    wired.send(host, rc::READ_RESPONSE_ONLY, request.psn, body)?;
    wired.completes(host, 0, BadResponse)?;
    Ok(())
}

/// A receive of these bytes is malformed; its sender is told remote operational error.
fn bad_receive(host: &mut Host, entry: &[u8]) -> Outcome {
    let mut wired = Wired::new(host)?;
    host.post_receive_bytes(&mut wired.qp, entry)?;
    let answer = wired.ask(host, rc::SEND_ONLY, RECEIVE_PSN, vec![])?;
    is_answer(&answer, syndrome::NAK_REMOTE_OPERATION)?;
    wired.completes(host, 0, Malformed)?;
    Ok(())
}

fn receive_entries_too_long(host: &mut Host) -> Outcome {
    host.start()?;
    for count in [4u32, 17, u32::MAX] {
        // A stride of 64 bytes holds three.
        let mut entry = receive_entry(0, &[]);
        entry[..4].copy_from_slice(&count.to_le_bytes());
        bad_receive(host, &entry)?;
    }
    Ok(())
}

fn reserved_of_receives(host: &mut Host) -> Outcome {
    host.start()?;
    for at in [4, 8, 15] {
        let mut entry = receive_entry(0, &[]);
        entry[at] = 1;
        bad_receive(host, &entry)?;
    }
    Ok(())
}

fn when_an_entry_is_taken(host: &mut Host) -> Outcome {
    host.start()?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    // At the first packet of a send.
    let wired = Wired::new(host)?;
    let answer = wired.ask(host, rc::SEND_FIRST, RECEIVE_PSN, vec![1; 1024])?;
    ensure_eq!(
        answer.aeth().0 & 0xe0,
        syndrome::RNR,
        "a send without an entry"
    );
    // At the last of a write with immediate data.
    let wired = Wired::new(host)?;
    let body = [reth(sink.address, sink.tag, 1032), vec![1; 1024]].concat();
    is_answer(
        &wired.ask(host, rc::WRITE_FIRST, RECEIVE_PSN, body)?,
        syndrome::ACK,
    )?;
    let last = [vec![9; 4], vec![1; 8]].concat();
    let answer = wired.ask(host, 0x09, RECEIVE_PSN + 1, last)?;
    ensure_eq!(
        answer.aeth().0 & 0xe0,
        syndrome::RNR,
        "immediate data without an entry"
    );
    Ok(())
}

fn buffers_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut wired = Wired::new(host)?;
    let sges = [region.sge(200, 3), region.sge(0, 0), region.sge(100, 60)];
    host.post_receive(&mut wired.qp, &sges)?;
    let data: Vec<u8> = (1..=20).collect();
    wired.send(host, rc::SEND_ONLY, RECEIVE_PSN, data.clone())?;
    let entry = wired.completes(host, 0, Success)?;
    ensure_eq!(entry.byte_count, 20, "the bytes");
    ensure_eq!(
        host.memory.bytes(region.dma + 200, 4),
        [1, 2, 3, 0],
        "the first buffer"
    );
    let found = host.memory.bytes(region.dma + 100, 18);
    ensure_eq!(found[..17], data[3..], "the second buffer");
    ensure_eq!(found[17], 0, "what is behind the message");
    Ok(())
}

fn send_too_long(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut wired = Wired::new(host)?;
    host.post_receive(&mut wired.qp, &[region.sge(0, 8)])?;
    let answer = wired.ask(host, rc::SEND_ONLY, RECEIVE_PSN, vec![1; 9])?;
    is_answer(&answer, syndrome::NAK_INVALID_REQUEST)?;
    wired.completes(host, 0, LocalLength)?;
    Ok(())
}

fn write_with_immediate(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    let mut wired = Wired::new(host)?;
    host.post_receive(&mut wired.qp, &[region.sge(0, 64)])?;
    let body = [
        reth(sink.address, sink.tag, 4),
        vec![1, 2, 3, 4],
        vec![5; 4],
    ]
    .concat();
    wired.send(host, rc::WRITE_ONLY_IMMEDIATE, RECEIVE_PSN, body)?;
    let entry = wired.completes(host, 0, Success)?;
    ensure_eq!(
        entry.opcode,
        CompletionOpcode::ReceiveWrite.number(),
        "the opcode"
    );
    ensure_eq!(
        (entry.immediate, entry.byte_count),
        (0x0403_0201, 4),
        "immediate and bytes"
    );
    ensure_eq!(
        host.memory.bytes(region.dma, 64),
        [0; 64],
        "the buffer of the receive"
    );
    ensure_eq!(host.memory.bytes(sink.dma, 4), [5; 4], "what was written");
    Ok(())
}

fn header_of_a_datagram(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut cq = host.create_cq()?;
    let (mut qp, _) = datagrams(host, &cq)?;
    let neighbour = host.neighbour(&qp);
    for six in [false, true] {
        let index = host.post_receive(&mut qp, &[region.sge(0, 256)])?;
        let body = [deth(QKEY, neighbour.qpn), vec![0xab; 16]].concat();
        let mut packet = neighbour.packet(UD_SEND, RECEIVE_PSN, body);
        if six {
            (packet.from, packet.to) = (PEER_GID6, OWN_GID6);
        }
        let frame = packet.encode();
        host.wire()?.send(&frame)?;
        let entry = host.completes(&mut cq, (qp.qpn, index), Success)?;
        ensure_eq!(entry.byte_count, 56, "the bytes");
        ensure!(entry.flags & COMPLETION_GRH != 0, "COMPLETION_GRH");
        ensure_eq!(entry.flags & COMPLETION_IPV6 != 0, six, "COMPLETION_IPV6");
        let mut header = vec![0; if six { 0 } else { 20 }];
        header.extend(&frame[14..14 + if six { 40 } else { 20 }]);
        ensure_eq!(host.memory.bytes(region.dma, 40), header, "the header");
        ensure_eq!(
            host.memory.bytes(region.dma + 40, 16),
            [0xab; 16],
            "the data"
        );
    }
    Ok(())
}

fn datagram_too_long(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    let mut cq = host.create_cq()?;
    let (mut qp, _) = datagrams(host, &cq)?;
    let neighbour = host.neighbour(&qp);
    for (room, status) in [(55, LocalLength), (56, Success)] {
        let index = host.post_receive(&mut qp, &[region.sge(0, room)])?;
        let body = [deth(QKEY, neighbour.qpn), vec![0xab; 16]].concat();
        let packet = neighbour.packet(UD_SEND, RECEIVE_PSN, body);
        host.wire()?.send(&packet.encode())?;
        host.completes(&mut cq, (qp.qpn, index), status)?;
    }
    ensure_eq!(host.state(qp.qpn)?, QueuePairStateCode::Rts, "the state");
    Ok(())
}

/// IPv6 instead of IPv4.
fn six(vector: &mut AddressVector) {
    (vector.gid, vector.source_gid_index) = (PEER_GID6, 1);
}

/// What is sent, by a connection and by a datagram, with an address vector that `change` makes.
fn addressed(
    host: &mut Host,
    change: impl Fn(&mut AddressVector),
    look: impl Fn(&Packet) -> Outcome,
) -> Outcome {
    host.start()?;
    let vlan = {
        let mut vector = AddressVector::zeroed();
        vector.vlan = VLAN_NONE;
        change(&mut vector);
        vector.vlan
    };
    if vlan != VLAN_NONE {
        // Datagrams take the identifier of the source GID.
        host.set_gid(0, OWN_GID, vlan & 0xfff)?;
    }
    let mut wired = Wired::by(host, Service::Rc, |c| change(&mut c.address_vector))?;
    look(&wired.request(host, &empty_write().flags(0))?)?;
    host.destroy(CommandOpcode::DestroyQueuePair, wired.qp.qpn)?;
    host.wire()?.drain()?;
    if host.features & FEATURE_UD == 0 {
        return not_here("the device has no datagrams");
    }
    let cq = host.create_cq()?;
    let (mut qp, mut part) = datagrams(host, &cq)?;
    change(&mut part.address_vector);
    host.post(&mut qp, &Work::datagram(&part, &[]))?;
    look(&host.wire()?.packet()?)
}
