// SPDX-License-Identifier: GPL-2.0

//! Registration and message in one work request, and registrations that fail.

use super::pair::{
    all_access, check, expect, good, patience, pattern, register, remote, Pair, BUFFER, DEPTH,
};
use crate::extension::{register_send, ONE_TOUCH_ACCESS};
use crate::rdma::ulp::{Buffer, LocalMemory, Mr, Op, Remote, Ticket};
use crate::rdma::{ibdev_info, Access, QpState, WcOpcode, WcStatus};
use kernel::prelude::*;
use kernel::sync::Arc;

/// A message that tells the peer where a region is, as a protocol would.
const OFFER: usize = 16;

/// Writes where a region is to the start of a buffer.
fn write_offer(buffer: &Buffer, mr: &Mr) {
    let (address, key) = (mr.iova().to_le_bytes(), mr.rkey().to_le_bytes());
    buffer.fill(|index| match index {
        0..8 => address[index],
        8..12 => key[index - 8],
        _ => 0,
    });
}

/// What such a message says.
fn read_offer(buffer: &Buffer) -> Remote {
    let byte = |index| buffer.byte(index).unwrap_or(0);
    Remote {
        addr: u64::from_le_bytes(core::array::from_fn(byte)),
        rkey: u32::from_le_bytes(core::array::from_fn(|index| byte(8 + index))),
    }
}

/// One work request registers memory and offers it; the peer reads or writes it, and ends the offer
/// with its answer.
pub(super) fn an_offer_is_one_request_and_ends_with_the_answer(pair: &Pair) -> Result {
    const LENGTH: usize = 2 * 4096;
    let mr = pair.near_region(2)?;
    let mut old = None;
    for round in 0..3 {
        mr.buffer().fill(pattern(round + 50));
        write_offer(&pair.source, &mr);
        let offer = pair.far.recv(&pair.sink, 0..OFFER)?;
        let answer = pair.near.recv(&pair.source, BUFFER / 2..BUFFER / 2 + 4)?;
        let offered = pair.near.send(
            register_send(&mr, all_access(), None),
            LocalMemory::Buffer(&pair.source, 0..OFFER),
        )?;
        let outcome = good(offer.wait(patience())?)?;
        check(outcome.byte_len as usize == OFFER && outcome.invalidated.is_none())?;
        let there = read_offer(&pair.sink);
        check(there.rkey == mr.rkey() && Some(there.rkey) != old)?;
        // The peer takes it at its word, complete or not.
        let far = |op, range| pair.far.send(op, LocalMemory::Buffer(&pair.sink, range));
        let read = far(Op::RdmaRead(there), 4096..4096 + LENGTH)?;
        // What follows a read does not wait for its answer, which an invalidation would cut off.
        good(read.wait(patience())?)?;
        let [wrote, answered] = [
            far(Op::RdmaWrite(there), 0..OFFER)?,
            far(Op::SendWithInvalidate(there.rkey), 0..4)?,
        ];
        // The registration and its message are one request, and complete as a message.
        for (ticket, opcode) in [
            (offered, WcOpcode::Send),
            (wrote, WcOpcode::RdmaWrite),
            (answered, WcOpcode::Send),
        ] {
            let outcome = good(ticket.wait(patience())?)?;
            check(outcome.opcode == Some(opcode))?;
        }
        let moved = pattern(round + 50);
        let moved = |index: usize| moved(index - 4096);
        check(
            pair.sink
                .first_difference(4096..4096 + LENGTH, moved)
                .is_none(),
        )?;
        let said = |index| pair.sink.byte(index).unwrap_or(0);
        check(mr.buffer().first_difference(0..OFFER, said).is_none())?;
        let outcome = good(answer.wait(patience())?)?;
        check(outcome.invalidated == Some(there.rkey) && outcome.byte_len == 4)?;
        old = Some(there.rkey);
        mr.renew_key();
    }
    // What was offered before is not there any more.
    let stale = Remote {
        addr: mr.iova(),
        rkey: old.ok_or(EIO)?,
    };
    let late = LocalMemory::Buffer(&pair.sink, 0..16);
    let late = pair.far.send(Op::RdmaRead(stale), late)?;
    expect(late.wait(patience())?, WcStatus::RemoteAccess)?;
    Ok(())
}

/// The message of one may invalidate something at the peer, as any other.
pub(super) fn an_offer_may_answer_an_offer(pair: &Pair) -> Result {
    let exposed = pair.expose(all_access())?;
    let mr = pair.near_region(1)?;
    let recv = pair.far.recv(&pair.sink, 0..OFFER)?;
    write_offer(&pair.source, &mr);
    let offered = pair.near.send(
        register_send(&mr, all_access(), Some(exposed.rkey())),
        LocalMemory::Buffer(&pair.source, 0..OFFER),
    )?;
    good(offered.wait(patience())?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.invalidated == Some(exposed.rkey()))?;
    check(read_offer(&pair.sink).rkey == mr.rkey())?;
    expect(
        pair.run(Op::RdmaWrite(remote(&exposed, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

/// Why a registration fails.
#[derive(Clone, Copy, Debug)]
enum Cause {
    /// No region has such a key.
    NoSuchKey,
    /// The key is in use.
    AlreadyValid,
    /// The region of that key has room for fewer pages.
    NoRoom,
}

const CAUSES: [Cause; 3] = [Cause::NoSuchKey, Cause::AlreadyValid, Cause::NoRoom];

/// Pages of the region that cannot be registered.
const PAGES: usize = 8;

/// Posts a registration of `mr`, which is not registered, that fails. Those that make it fail are to be
/// kept until it has.
fn post_failing<'q>(
    pair: &'q Pair,
    cause: Cause,
    mr: &Arc<Mr>,
) -> Result<(Ticket<'q>, Option<Arc<Mr>>)> {
    let op = Op::reg_mr(mr, all_access());
    post_failing_op(pair, cause, mr, op, LocalMemory::None)
}

/// The same, by `op`, which registers `mr`.
fn post_failing_op<'q>(
    pair: &'q Pair,
    cause: Cause,
    mr: &Arc<Mr>,
    op: Op<'_>,
    memory: LocalMemory<'_>,
) -> Result<(Ticket<'q>, Option<Arc<Mr>>)> {
    let near = &pair.near;
    match cause {
        Cause::NoSuchKey => {
            let key = pair.near_region(1)?.rkey();
            // SAFETY: The region of that key is gone, and nobody else makes one in this domain. This is
            // called on devices with `REGISTER_DRAINS`, which refuse a key that no region of the domain
            // has.
            let ticket = unsafe { near.register_under(key, op, memory)? };
            Ok((ticket, None))
        }
        Cause::AlreadyValid => {
            register(near, mr, all_access())?;
            Ok((near.send(op, memory)?, None))
        }
        Cause::NoRoom => {
            let small = pair.near_region(PAGES - 1)?;
            // SAFETY: This is called on devices with `REGISTER_DRAINS`, which refuse more pages than
            // the region of that key has room for.
            let ticket = unsafe { near.register_under(small.rkey(), op, memory)? };
            Ok((ticket, Some(small)))
        }
    }
}

/// What the near side does to show that it works: registers a region and has the far side write to it.
fn registers_and_is_written_to(pair: &Pair, mr: &Arc<Mr>, seed: usize) -> Result {
    register(&pair.near, mr, all_access())?;
    pair.sink.fill(pattern(seed));
    let memory = LocalMemory::Buffer(&pair.sink, 0..4096);
    let wrote = pair.far.send(Op::RdmaWrite(remote(mr, 0)), memory)?;
    good(wrote.wait(patience())?)?;
    check(
        mr.buffer()
            .first_difference(0..4096, pattern(seed))
            .is_none(),
    )
}

/// A failed registration stops the send queue and nothing else; the consumer mends what was wrong and
/// goes on, on the same connection.
pub(super) fn a_failed_registration_drains_and_is_tried_again(pair: &Pair) -> Result {
    let exposed = pair.expose(all_access())?;
    let served = pair.near_region(1)?;
    register(&pair.near, &served, all_access())?;
    for (seed, cause) in CAUSES.into_iter().enumerate() {
        let mr = pair.near_region(PAGES)?;
        pair.source.fill(pattern(seed + 60));
        pair.sink.fill(|_| 0);
        let before = LocalMemory::Buffer(&pair.source, 0..BUFFER);
        let before = pair.near.send(Op::RdmaWrite(remote(&exposed, 0)), before)?;
        let (failing, _kept) = post_failing(pair, cause, &mr)?;
        let behind = [
            pair.near.send(
                Op::RdmaWrite(remote(&exposed, 0)),
                LocalMemory::Region(&mr, 0..4096),
            )?,
            pair.near
                .send(Op::LocalInvalidate(mr.rkey()), LocalMemory::None)?,
        ];
        // What was before is done, what failed says so, the rest is not done.
        good(before.wait(patience())?)?;
        let failed = expect(failing.wait(patience())?, WcStatus::LocalProtection)?;
        for ticket in behind {
            expect(ticket.wait(patience())?, WcStatus::WorkRequestFlushed)?;
        }
        let byte = pattern(seed + 60);
        check(pair.sink.first_difference(0..BUFFER, &byte).is_none())?;
        let state = pair.near.state()?;
        check(state == QpState::Sqd)?;
        ibdev_info!(
            pair.lease,
            "rust_rdma_loop: drained by {cause:?}: {:?} {}, then {state:?}\n",
            failed.status,
            failed.vendor_err
        );
        // Nor is what is posted now.
        let late = pair.near.send(Op::Send, LocalMemory::None)?;
        expect(late.wait(patience())?, WcStatus::WorkRequestFlushed)?;
        // The peer is served all along: receives, and reads and writes of what is there.
        let recv = pair.near.recv(&pair.source, 0..64)?;
        let far = |op, range| {
            pair.far
                .send(op, LocalMemory::Buffer(&pair.sink, range))?
                .wait(patience())
        };
        good(far(Op::Send, 0..64)?)?;
        good(recv.wait(patience())?)?;
        served.buffer().fill(pattern(seed + 75));
        good(far(Op::RdmaRead(remote(&served, 0)), 4096..4096 + 100)?)?;
        let read = pattern(seed + 75);
        let read = |index: usize| read(index - 4096);
        check(pair.sink.first_difference(4096..4096 + 100, read).is_none())?;
        good(far(Op::RdmaWrite(remote(&served, 100)), 4096..4096 + 100)?)?;
        let wrote = pattern(seed + 75);
        let wrote = |index: usize| wrote(index - 100);
        check(served.buffer().first_difference(100..200, wrote).is_none())?;
        check(pair.near.state()? == QpState::Sqd)?;
        pair.near.resume()?;
        check(pair.near.state()? == QpState::Rts)?;
        if matches!(cause, Cause::AlreadyValid) {
            let mended = pair
                .near
                .send(Op::LocalInvalidate(mr.rkey()), LocalMemory::None)?;
            good(mended.wait(patience())?)?;
            mr.renew_key();
        }
        registers_and_is_written_to(pair, &mr, seed + 70)?;
        ibdev_info!(pair.lease, "rust_rdma_loop: mended after {cause:?}\n");
    }
    Ok(())
}

/// A registration that fails sends nothing, whatever the cause, and is tried again as a whole.
pub(super) fn an_offer_that_fails_is_not_sent(pair: &Pair) -> Result {
    for cause in CAUSES {
        let mr = pair.near_region(PAGES)?;
        let recv = pair.far.recv(&pair.sink, 0..OFFER)?;
        let offer = register_send(&mr, all_access(), None);
        let memory = || LocalMemory::Buffer(&pair.source, 0..OFFER);
        let old = mr.rkey();
        write_offer(&pair.source, &mr);
        let (failing, _kept) = post_failing_op(pair, cause, &mr, offer, memory())?;
        let failed = expect(failing.wait(patience())?, WcStatus::LocalProtection)?;
        let state = pair.near.state()?;
        check(state == QpState::Sqd)?;
        ibdev_info!(
            pair.lease,
            "rust_rdma_loop: not offered by {cause:?}: {:?} {}, then {state:?}\n",
            failed.status,
            failed.vendor_err
        );
        pair.near.resume()?;
        if matches!(cause, Cause::AlreadyValid) {
            let mended = pair
                .near
                .send(Op::LocalInvalidate(old), LocalMemory::None)?;
            good(mended.wait(patience())?)?;
        }
        mr.renew_key();
        write_offer(&pair.source, &mr);
        good(pair.near.send(offer, memory())?.wait(patience())?)?;
        good(recv.wait(patience())?)?;
        // Of the first there was nothing to receive.
        let there = read_offer(&pair.sink);
        check(there.rkey == mr.rkey() && there.rkey != old)?;
    }
    Ok(())
}

/// A region that the device did not make after it was given out is registered by nobody, and ends as any other;
/// those that it made are registered.
pub(super) fn a_region_that_was_not_made_is_not_registered(pair: &Pair) -> Result {
    let pages = usize::from(*crate::module_parameters::failing_pages.value());
    let mr = pair.near_region(pages)?;
    let registered = pair
        .near
        .send(Op::reg_mr(&mr, all_access()), LocalMemory::None)?;
    let failed = expect(registered.wait(patience())?, WcStatus::LocalProtection)?;
    ibdev_info!(
        pair.lease,
        "rust_rdma_loop: not made: {:?} {}\n",
        failed.status,
        failed.vendor_err
    );
    check(pair.near.state()? == QpState::Sqd)?;
    pair.near.resume()?;
    drop(mr);
    registers_and_is_written_to(pair, &pair.near_region(pages + 1)?, 110)
}

/// The device fails while a send queue stands still: whoever asks it to is told when. What waits comes
/// back, and so does what is posted then; nothing can be mended any more.
pub(super) fn a_device_may_fail_while_a_queue_stands_still(pair: &Pair) -> Result {
    let mr = pair.near_region(PAGES)?;
    let waiting = [
        pair.near.recv(&pair.source, 0..64)?,
        pair.far.recv(&pair.sink, 0..64)?,
    ];
    let (failing, _kept) = post_failing(pair, Cause::NoSuchKey, &mr)?;
    expect(failing.wait(patience())?, WcStatus::LocalProtection)?;
    check(pair.near.state()? == QpState::Sqd)?;
    ibdev_info!(
        pair.lease,
        "rust_rdma_loop: stands still until the device fails\n"
    );
    for ticket in waiting {
        expect(ticket.wait(patience())?, WcStatus::WorkRequestFlushed)?;
    }
    check(pair.near.resume().is_err())?;
    for qp in [&pair.near, &pair.far] {
        let late = qp.send(Op::Send, LocalMemory::None)?;
        expect(late.wait(patience())?, WcStatus::WorkRequestFlushed)?;
        let late = qp.recv(&pair.sink, 0..64)?;
        expect(late.wait(patience())?, WcStatus::WorkRequestFlushed)?;
    }
    Ok(())
}

/// Of a list of requests of which one is refused those before it are carried out, and what the others
/// would have used is there for others.
pub(super) fn a_refusal_in_the_middle_of_a_list_leaves_nothing_behind(pair: &Pair) -> Result {
    let exposed = pair.expose(all_access())?;
    let mr = pair.near_region(1)?;
    let write = |offset: usize| {
        let memory = LocalMemory::Buffer(&pair.source, offset..offset + 64);
        (Op::RdmaWrite(remote(&exposed, offset)), memory)
    };
    pair.source.fill(pattern(95));
    pair.sink.fill(|_| 0);
    // Of each of these one is posted, for which nobody has a ticket.
    let lists = DEPTH as usize / 2;
    for index in 0..lists {
        let refused = pair.near.send_all([
            write(index * 64),
            // No device of this kind registers pages on demand so.
            (Op::reg_mr(&mr, Access::ON_DEMAND), LocalMemory::None),
            write(BUFFER / 2 + index * 64),
        ]);
        check(refused.is_err())?;
    }
    // The others count for nothing: there is room for all that is left.
    let mut tickets = KVec::new();
    for _ in 0..DEPTH {
        tickets.push(pair.near.recv(&pair.source, 0..64)?, GFP_KERNEL)?;
    }
    let mut sent = KVec::new();
    for index in 0..DEPTH as usize - lists {
        let (op, memory) = write(BUFFER / 4 + index * 64);
        sent.push(pair.near.send(op, memory)?, GFP_KERNEL)?;
    }
    for ticket in sent {
        good(ticket.wait(patience())?)?;
    }
    let end = lists * 64;
    check(pair.sink.first_difference(0..end, pattern(95)).is_none())?;
    check(
        pair.sink
            .first_difference(BUFFER / 2..BUFFER, |_| 0)
            .is_none(),
    )?;
    for _ in 0..DEPTH {
        let memory = LocalMemory::Buffer(&pair.sink, 0..64);
        good(pair.far.send(Op::Send, memory)?.wait(patience())?)?;
    }
    for ticket in tickets {
        good(ticket.wait(patience())?)?;
    }
    Ok(())
}

/// Without that mode, the connection ends: both queues are flushed.
fn a_failed_registration_ends_the_connection(pair: &Pair, cause: Cause) -> Result {
    let mr = pair.near_region(PAGES)?;
    let recv = pair.near.recv(&pair.source, 0..64)?;
    let (failing, _kept) = post_failing(pair, cause, &mr)?;
    let behind = pair.near.send(Op::Send, LocalMemory::None)?;
    let failed = expect(failing.wait(patience())?, WcStatus::LocalProtection)?;
    expect(behind.wait(patience())?, WcStatus::WorkRequestFlushed)?;
    expect(recv.wait(patience())?, WcStatus::WorkRequestFlushed)?;
    let state = pair.near.state()?;
    check(state == QpState::Err && pair.near.resume().is_err())?;
    ibdev_info!(
        pair.lease,
        "rust_rdma_loop: ended by {cause:?}: {:?} {}, then {state:?}\n",
        failed.status,
        failed.vendor_err
    );
    Ok(())
}

pub(super) fn no_such_key_ends_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::NoSuchKey)
}

pub(super) fn a_key_in_use_ends_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::AlreadyValid)
}

pub(super) fn too_many_pages_end_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::NoRoom)
}

/// A region for one message is there for one, and refused to the next.
pub(super) fn a_region_may_be_for_one_message(pair: &Pair) -> Result {
    let mr = pair.expose(all_access() | ONE_TOUCH_ACCESS)?;
    pair.source.fill(pattern(90));
    pair.sink.fill(|_| 0);
    good(pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..100_003)?)?;
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    check(
        pair.sink
            .first_difference(0..100_003, pattern(90))
            .is_none(),
    )?;
    check(pair.sink.first_difference(100_003..BUFFER, |_| 0).is_none())
}
