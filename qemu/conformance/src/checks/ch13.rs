// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Ordering: who may write what, and when.

use super::checks;
use super::fixture::*;
use crate::host::{Host, RECEIVE_PSN, SEND_PSN};
use crate::memory::{PAGE, SIZE};
use crate::outcome::Outcome;
use crate::packet::{rc, reth};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CompletionStatus::{Flushed, Success};
use ferrite_abi::*;

checks! {
    "DEV-13-2" => only_where_it_may,
    "DEV-13-3" => commands_before_doorbell,
    "DEV-13-4" => blocks_before_producer,
    "DEV-13-5" => receives_before_producer,
    "DEV-13-6" => data_before_completion,
    "DEV-13-7" => page_before_resolve,
    "DEV-13-8" => consumer_before_overwriting,
    "DEV-13-9" => events_after_read_index,
    "DEV-13-10" => nothing_after_command,
    "DEV-13-11" => data_before_completion,
    "DEV-13-12" => completions_in_order,
    "DEV-13-13" => events_in_order,
    "DEV-13-14" => writes_in_order,
    "DEV-13-15" => destroyed_event_queue,
    "DEV-13-16" => destroyed_completion_queue,
    "DEV-13-17" => resized_completion_queue,
    "DEV-13-18" => nothing_after_command,
    "DEV-13-19" => destroyed_shared_receive_queue,
    "DEV-13-20" => released_tags,
    "DEV-13-21" => no_access_after_invalidation,
    "DEV-13-22" => to_error,
    "DEV-13-23" => to_reset,
    "DEV-13-24" => moved_completion_queue,
    "DEV-13-25" => new_gid,
}

fn only_where_it_may(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let source = host.region(0, PAGE)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.memory.fill(source.dma, PAGE, 0x21);
    host.post_receive(&mut pair.b, &[sink.sge(8, 64)])?;
    let (base, end) = (host.memory.base(), host.memory.allocate(0));
    // A free page with a pattern all around what may be written.
    host.memory.fill(end, SIZE - (end - base), 0x99);
    let before = host.memory.bytes(base, SIZE);
    pair.ends(host, &Work::send(&[source.sge(0, 64)]), Success)?;
    pair.received(host)?;
    let after = host.memory.bytes(base, SIZE);
    // Blocks, the host's half of records and the rest of the region are as the host left them.
    let send_ring = pair.a.send_ring - base;
    let places = [
        (send_ring + 64, send_ring + 4096),
        (
            pair.b.receive_ring - base,
            pair.b.receive_ring - base + 1024,
        ),
        (pair.a.record - base + 4, pair.a.record - base + 64),
        (source.dma - base, source.dma - base + PAGE),
        (sink.dma - base, sink.dma - base + 8),
        (sink.dma - base + 72, sink.dma - base + PAGE),
        (end - base, SIZE),
    ];
    for (from, to) in places {
        let (from, to) = (from as usize, to as usize);
        ensure!(
            before[from..to] == after[from..to],
            "memory at {from:#x} to {to:#x} changed"
        );
    }
    Ok(())
}

fn commands_before_doorbell(host: &mut Host) -> Outcome {
    host.start()?;
    for _ in 0..300 {
        host.nop()?;
    }
    Ok(())
}

fn blocks_before_producer(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    for round in 0..300u64 {
        let work = Work::remote(SendOpcode::Write, &[], sink.address, sink.tag);
        pair.ends(host, &work.inline(&round.to_le_bytes()), Success)?;
        ensure_eq!(host.memory.load64(sink.dma), round, "what was written");
    }
    Ok(())
}

fn receives_before_producer(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    for round in 0..100u64 {
        host.post_receive(&mut pair.b, &[sink.sge(round * 8, 8)])?;
        let work = Work::send(&[]).inline(&(round + 1).to_le_bytes());
        pair.ends(host, &work, Success)?;
        pair.received(host)?;
        let found = host.memory.load64(sink.dma + round * 8);
        ensure_eq!(found, round + 1, "what was received");
    }
    Ok(())
}

fn data_before_completion(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let source = host.region(0, 4 * PAGE)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, 4 * PAGE)?;
    for round in 1..100u8 {
        host.memory.fill(source.dma, 4 * PAGE, round);
        host.post_receive(&mut pair.b, &[sink.sge(0, 4 * PAGE as u32)])?;
        host.post(
            &mut pair.a,
            &Work::send(&[source.sge(0, 4 * PAGE as u32)]).flags(0),
        )?;
        pair.received(host)?;
        let found = host.memory.bytes(sink.dma, 4 * PAGE);
        ensure!(
            found.iter().all(|byte| *byte == round),
            "bytes after their completion"
        );
    }
    Ok(())
}

fn page_before_resolve(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    for _ in 0..20 {
        let memory = OnDemand::new(host, ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1)?;
        let mut pair = Pair::new(host)?;
        let work = write8(memory.region.address, memory.region.tag);
        let index = host.post(&mut pair.a, &work)?;
        let fault = one_fault(host)?;
        memory.set(host, 0, ON_DEMAND_PRESENT | ON_DEMAND_WRITE);
        resolve(host, &fault, false)?;
        host.completes(&mut pair.cq, (pair.a.qpn, index), Success)?;
        host.no_event(EQ_ASYNC)?;
    }
    Ok(())
}

fn consumer_before_overwriting(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(2);
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    for round in 0..25 {
        complete_unread(host, &cq, &mut qp, 4)?;
        for at in 0..4 {
            let entry = host.completion(&mut cq)?;
            ensure_eq!(entry.index, round * 4 + at, "the entry");
        }
    }
    Ok(())
}

fn events_after_read_index(host: &mut Host) -> Outcome {
    host.start()?;
    // Many rounds of the ring, each entry zeroed and told of in turn.
    for _ in 0..400 {
        host.nop()?;
    }
    host.no_event(EQ_CONTROL)
}

fn nothing_after_command(host: &mut Host) -> Outcome {
    host.start()?;
    for _ in 0..10 {
        let mut pair = Pair::new(host)?;
        let source = host.region(0, 1 << 18)?;
        let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, 1 << 18)?;
        let sges = [source.sge(0, 1 << 18)];
        host.memory.fill(source.dma, 1 << 18, 0x77);
        for _ in 0..4 {
            let work = Work::remote(SendOpcode::Write, &sges, sink.address, sink.tag);
            host.post(&mut pair.a, &work)?;
        }
        host.destroy(Op::DestroyQueuePair, pair.b.qpn)?;
        host.destroy(Op::DestroyQueuePair, pair.a.qpn)?;
        while pair.cq.take(&host.memory).is_some() {}
        // Whatever comes from now on is too late.
        host.memory.fill(sink.dma, sink.length, 0);
        host.memory.fill(pair.a.send_ring, 4096 + 1024 + 128, 0xee);
        host.nop()?;
        let found = host.memory.bytes(sink.dma, sink.length);
        ensure!(
            found.iter().all(|byte| *byte == 0),
            "data after DestroyQueuePair"
        );
        let buffer = host.memory.bytes(pair.a.send_ring, 4096 + 1024 + 128);
        ensure!(
            buffer.iter().all(|byte| *byte == 0xee),
            "the buffer of a queue pair"
        );
        ensure!(
            pair.cq.take(&host.memory).is_none(),
            "a completion after DestroyQueuePair"
        );
        host.destroy(Op::ReleaseTag, source.tag)?;
        host.destroy(Op::ReleaseTag, sink.tag)?;
    }
    Ok(())
}

fn completions_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let (mut cq, mut qp) = with_queue(host)?;
    for round in 0..20 {
        for _ in 0..10 {
            host.post(&mut qp, &Work::send(&[]))?;
        }
        for at in 0..10 {
            host.completes(&mut cq, (qp.qpn, round * 10 + at), Flushed)?;
        }
    }
    Ok(())
}

fn events_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let mut expected = Vec::new();
    for _ in 0..20 {
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
        expected.push(entry.cookie);
    }
    host.ring_control()?;
    for cookie in expected {
        host.event(EQ_CONTROL, EventCode::CommandDone, cookie)?;
    }
    Ok(())
}

fn writes_in_order(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let sink = host.region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE)?;
    for round in 1..300u64 {
        for at in [0, 64] {
            let work = Work::remote(SendOpcode::Write, &[], sink.address + at, sink.tag);
            host.post(
                &mut pair.a,
                &work.inline(&round.to_le_bytes()).flags(SEND_INLINE),
            )?;
        }
        crate::outcome::wait_for("the second write", || {
            Ok((host.memory.load64(sink.dma + 64) == round).then_some(()))
        })?;
        ensure_eq!(host.memory.load64(sink.dma), round, "the first write");
    }
    Ok(())
}

fn destroyed_event_queue(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let mut command = host.cq_command(6);
    command.eqn = 3;
    let (mut cq, mut qp) = with_queue_of(host, &command)?;
    host.arm_eq(3)?;
    host.arm_cq(&cq, 0, false)?;
    bind_to(host, cq.cqn, EQ_NONE)?;
    host.destroy(Op::DestroyEventQueue, 3)?;
    complete(host, &mut cq, &mut qp)?;
    host.no_event(3)?;
    host.no_interrupt(3)?;
    host.is_alive()
}

fn bind_to(host: &mut Host, cqn: u32, eqn: u16) -> Outcome {
    host.execute(&ModifyCompletionQueue {
        cqn,
        eqn,
        ..ModifyCompletionQueue::zeroed()
    })
}

fn destroyed_completion_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let (cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    host.destroy(Op::DestroyCompletionQueue, cq.cqn)?;
    host.memory.fill(cq.ring, 64 * 64 + 64, 0xee);
    host.post(&mut qp, &Work::send(&[]))?;
    host.arm_cq(&cq, 0, false)?;
    host.untouched(cq.ring, 64 * 64 + 64)?;
    host.no_event(EQ_FIRST_HANDLER)
}

fn resized_completion_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    let (cq, mut qp) = with_queue(host)?;
    let length = (64 << 7) + 64;
    let command = ResizeCompletionQueue {
        cqn: cq.cqn,
        log_entries: 7,
        record_offset: 64 << 7,
        buffer: Buffer::contiguous(host.memory.allocate(length), length),
        ..ResizeCompletionQueue::zeroed()
    };
    host.execute(&command)?;
    host.memory.fill(cq.ring, 64 * 64 + 64, 0xee);
    let mut new = cq.clone();
    (new.ring, new.log_entries) = (command.buffer.root, 7);
    new.record = command.buffer.root + u64::from(command.record_offset);
    for _ in 0..10 {
        complete(host, &mut new, &mut qp)?;
    }
    let old = host.memory.bytes(cq.ring, 64 * 64 + 64);
    ensure!(
        old.iter().all(|byte| *byte == 0xee),
        "the old buffer was written"
    );
    Ok(())
}

fn destroyed_shared_receive_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let (qp, srq) = shared(host, &cq)?;
    host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    host.destroy(Op::DestroySrq, srq.srqn)?;
    host.memory.fill(srq.ring, 1024 + 128, 0xee);
    host.device
        .doorbell(1, DOORBELL_SRQ, queue_doorbell(srq.srqn))?;
    host.untouched(srq.ring, 1024 + 128)
}

fn released_tags(host: &mut Host) -> Outcome {
    host.start()?;
    for replace in [false, true] {
        let mut command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE, PAGE);
        host.execute(&command)?;
        let old = command.buffer.root;
        let mut wired = Wired::new(host)?;
        let body = [reth(command.address, command.tag, 2048), vec![1; 1024]].concat();
        wired.ask(host, rc::WRITE_FIRST, RECEIVE_PSN, body)?;
        if replace {
            (command.flags, command.tag) = (REGION_REPLACE, command.tag + 1);
            command.buffer = Buffer::contiguous(host.memory.allocate(PAGE), PAGE);
            host.execute(&command)?;
        } else {
            host.destroy(Op::ReleaseTag, command.tag)?;
        }
        host.memory.fill(old, PAGE, 0);
        wired.send(host, rc::WRITE_LAST, RECEIVE_PSN + 1, vec![1; 1024])?;
        host.untouched(old, PAGE)?;
        host.no_completion(&mut wired.cq)?;
        host.wire()?.drain()?;
    }
    Ok(())
}

fn to_error(host: &mut Host) -> Outcome {
    host.start()?;
    let mut wired = Wired::new(host)?;
    for _ in 0..8 {
        host.post(&mut wired.qp, &empty_write())?;
    }
    host.wire()?.packet()?;
    host.move_qp(wired.qp.qpn, QueuePairStateCode::Error)?;
    for index in 0..8 {
        wired.completes(host, index, Flushed)?;
    }
    host.wire()?.drain()?;
    host.wire()?.silence()
}

fn to_reset(host: &mut Host) -> Outcome {
    host.start()?;
    let mut pair = Pair::new(host)?;
    let source = host.region(0, 1 << 18)?;
    let sink = host.region(ACCESS_LOCAL_WRITE, 1 << 18)?;
    host.memory.fill(source.dma, 1 << 18, 0x77);
    host.post_receive(&mut pair.b, &[sink.sge(0, 1 << 18)])?;
    host.post(&mut pair.a, &Work::send(&[source.sge(0, 1 << 18)]))?;
    host.move_qp(pair.b.qpn, QueuePairStateCode::Reset)?;
    host.memory.fill(sink.dma, sink.length, 0);
    host.untouched(sink.dma, sink.length)
}

fn moved_completion_queue(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    bind_to(host, cq.cqn, 3)?;
    complete(host, &mut cq, &mut qp)?;
    host.event(3, EventCode::Completion, cq.cqn)?;
    host.no_event(EQ_FIRST_HANDLER)
}

fn new_gid(host: &mut Host) -> Outcome {
    host.start()?;
    let other = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 7];
    host.set_gid(0, other, VLAN_NONE)?;
    let mut wired = Wired::new(host)?;
    let request = wired.request(host, &empty_write())?;
    ensure_eq!(
        (request.from, request.psn),
        (other, SEND_PSN),
        "source and PSN"
    );
    Ok(())
}
