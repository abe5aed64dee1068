// SPDX-License-Identifier: GPL-2.0

//! Sends, RDMA writes and reads, atomics, and what is refused.

use super::pair::{
    all_access, check, expect, good, patience, pattern, register, remote, Pair, BUFFER, DEPTH,
};
use crate::rdma::ulp::{Buffer, LocalMemory, Op};
use crate::rdma::{Access, WcOpcode, WcStatus};
use kernel::prelude::*;

const LENGTHS: [usize; 8] = [0, 1, 255, 1024, 4096, 4097, 100_003, BUFFER];

pub(super) fn sends_arrive(pair: &Pair) -> Result {
    for length in LENGTHS {
        pair.source.fill(pattern(length));
        pair.sink.fill(|_| 0);
        let recv = pair.far.recv(&pair.sink, 0..BUFFER)?;
        good(pair.run(Op::Send, 0..length)?)?;
        let outcome = good(recv.wait(patience())?)?;
        check(outcome.byte_len as usize == length && outcome.imm_data.is_none())?;
        check(
            pair.sink
                .first_difference(0..length, pattern(length))
                .is_none(),
        )?;
        check(pair.sink.first_difference(length..BUFFER, |_| 0).is_none())?;
    }
    Ok(())
}

pub(super) fn immediate_data_arrives(pair: &Pair) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..64)?;
    good(pair.run(Op::SendWithImm(0x1234_5678), 0..64)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(0x1234_5678))
}

pub(super) fn sends_and_receives_have_room_of_their_own(pair: &Pair) -> Result {
    // The peer has nothing to receive them with, so that they stay until the connection ends.
    let send = || {
        pair.near
            .send(Op::Send, LocalMemory::Buffer(&pair.source, 0..8))
    };
    for _ in 0..DEPTH {
        send()?;
    }
    check(send().err() == Some(EBUSY))?;
    let recv = || pair.near.recv(&pair.source, 64..128);
    for _ in 0..DEPTH {
        recv()?;
    }
    check(recv().err() == Some(EBUSY))
}

pub(super) fn many_requests_complete(pair: &Pair) -> Result {
    pair.source.fill(pattern(5));
    pair.sink.fill(|_| 0);
    let piece = |index: usize| index * 64..index * 64 + 64;
    for _ in 0..8 {
        let mut tickets = KVec::new();
        for index in 0..DEPTH as usize {
            tickets.push(pair.far.recv(&pair.sink, piece(index))?, GFP_KERNEL)?;
        }
        for index in 0..DEPTH as usize {
            let memory = LocalMemory::Buffer(&pair.source, piece(index));
            tickets.push(pair.near.send(Op::Send, memory)?, GFP_KERNEL)?;
        }
        for ticket in tickets {
            good(ticket.wait(patience())?)?;
        }
    }
    let end = DEPTH as usize * 64;
    check(pair.sink.first_difference(0..end, pattern(5)).is_none())
}

pub(super) fn writes_land_where_they_should(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    for length in LENGTHS {
        let offset = (BUFFER - length).min(4093);
        pair.source.fill(pattern(length + 1));
        pair.sink.fill(|_| 0);
        good(pair.run(Op::RdmaWrite(remote(&mr, offset)), 0..length)?)?;
        let moved = pattern(length + 1);
        let moved = |index: usize| moved(index - offset);
        check(pair.sink.first_difference(0..offset, |_| 0).is_none())?;
        check(
            pair.sink
                .first_difference(offset..offset + length, moved)
                .is_none(),
        )?;
        check(
            pair.sink
                .first_difference(offset + length..BUFFER, |_| 0)
                .is_none(),
        )?;
    }
    Ok(())
}

pub(super) fn writes_with_immediate_consume_a_receive(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    pair.source.fill(pattern(9));
    pair.sink.fill(|_| 0);
    let recv = pair.far.recv(&pair.sink, 0..0)?;
    good(pair.run(Op::RdmaWriteWithImm(remote(&mr, 0), 77), 0..5000)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(77) && outcome.byte_len == 5000)?;
    check(pair.sink.first_difference(0..5000, pattern(9)).is_none())
}

pub(super) fn reads_fetch_the_peers_memory(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    for length in LENGTHS {
        pair.sink.fill(pattern(length + 2));
        pair.source.fill(|_| 0);
        good(pair.run(Op::RdmaRead(remote(&mr, 0)), 0..length)?)?;
        check(
            pair.source
                .first_difference(0..length, pattern(length + 2))
                .is_none(),
        )?;
        check(
            pair.source
                .first_difference(length..BUFFER, |_| 0)
                .is_none(),
        )?;
    }
    Ok(())
}

/// The eight bytes at the start of a buffer.
fn word(buffer: &Buffer) -> u64 {
    let mut bytes = [0; 8];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = buffer.byte(index).unwrap_or(0);
    }
    u64::from_ne_bytes(bytes)
}

pub(super) fn atomics_are_done_once_and_return_what_was_there(pair: &Pair) -> Result {
    if !pair.lease.device().has_atomics() {
        return Ok(());
    }
    let mr = pair.expose(all_access())?;
    pair.sink.fill(|_| 0);
    for round in 0..10 {
        good(pair.run(
            Op::FetchAdd {
                remote: remote(&mr, 0),
                add: 3,
            },
            0..8,
        )?)?;
        check(word(&pair.source) == round * 3)?;
    }
    good(pair.run(
        Op::CompareSwap {
            remote: remote(&mr, 0),
            compare: 1,
            swap: 99,
        },
        0..8,
    )?)?;
    check(word(&pair.source) == 30 && word(&pair.sink) == 30)?;
    good(pair.run(
        Op::CompareSwap {
            remote: remote(&mr, 0),
            compare: 30,
            swap: 99,
        },
        0..8,
    )?)?;
    check(word(&pair.source) == 30 && word(&pair.sink) == 99)
}

pub(super) fn send_with_invalidate_ends_the_peers_region(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    let recv = pair.far.recv(&pair.sink, 0..16)?;
    good(pair.run(Op::SendWithInvalidate(mr.rkey()), 0..16)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.invalidated == Some(mr.rkey()))?;
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

pub(super) fn a_region_may_be_registered_again_under_another_key(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    for _ in 0..4 {
        let old = mr.rkey();
        let far = &pair.far;
        let invalidated = far.send(Op::LocalInvalidate(old), LocalMemory::None)?;
        good(invalidated.wait(patience())?)?;
        mr.renew_key();
        check(mr.rkey() != old)?;
        register(far, &mr, all_access())?;
        good(pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..4096)?)?;
    }
    let mut stale = remote(&mr, 0);
    stale.rkey = (stale.rkey & !0xff) | (stale.rkey.wrapping_sub(1) & 0xff);
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::RdmaWrite(stale), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

pub(super) fn what_is_not_allowed_is_refused(pair: &Pair) -> Result {
    let mr = pair.expose(Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    good(pair.run(Op::RdmaRead(remote(&mr, 0)), 0..16)?)?;
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

pub(super) fn beyond_the_region_is_refused(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, BUFFER - 8)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    // The queue pair is in error: what comes after is not done.
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..16)?,
        WcStatus::WorkRequestFlushed,
    )?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

pub(super) fn a_message_longer_than_the_receive_fails_at_both_ends(pair: &Pair) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..100)?;
    expect(pair.run(Op::Send, 0..101)?, WcStatus::RemoteInvalidRequest)?;
    expect(recv.wait(patience())?, WcStatus::LocalLength)?;
    Ok(())
}

/// The key of a region that is registered may be used before the registration is complete: by what
/// is posted after it, and by the peer that is told of it.
pub(super) fn a_region_is_used_before_its_registration_is_complete(pair: &Pair) -> Result {
    const LENGTH: usize = 3 * 4096 + 17;
    let exposed = pair.expose(all_access())?;
    for seed in 0..4 {
        let mr = pair.near_region(4)?;
        mr.buffer().fill(pattern(seed + 40));
        pair.sink.fill(|_| 0);
        // The read has the device wait for its peer, and with it the completion of the registration,
        // but not what comes after.
        let begun = pair.near.send_all([
            (
                Op::RdmaRead(remote(&exposed, BUFFER / 2)),
                LocalMemory::Buffer(&pair.source, 0..BUFFER / 2),
            ),
            (Op::reg_mr(&mr, Access::LOCAL_WRITE), LocalMemory::None),
            (
                Op::RdmaWrite(remote(&exposed, 5)),
                LocalMemory::Region(&mr, 0..LENGTH),
            ),
        ])?;
        let opcodes = [WcOpcode::RdmaRead, WcOpcode::RegMr, WcOpcode::RdmaWrite];
        for (ticket, opcode) in begun.into_iter().zip(opcodes) {
            let outcome = good(ticket.wait(patience())?)?;
            check(outcome.opcode == Some(opcode))?;
        }
        let moved = pattern(seed + 40);
        let moved = |index: usize| moved(index - 5);
        check(pair.sink.first_difference(5..5 + LENGTH, moved).is_none())?;
        check(
            pair.sink
                .first_difference(5 + LENGTH..BUFFER, |_| 0)
                .is_none(),
        )?;
    }
    Ok(())
}
