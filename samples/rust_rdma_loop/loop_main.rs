// SPDX-License-Identifier: GPL-2.0

//! A kernel user of RDMA devices: two queue pairs of one port, connected to each other.
//!
//! On loading it takes every device with an active RoCE port through sends, RDMA writes and reads,
//! atomics, fast registration and invalidation, and the errors that go with them, looks at each
//! byte and completion, and logs
//!
//! ```text
//! rust_rdma_loop: N passed, M failed
//! ```
//!
//! Loading fails if there was nothing to test with or anything failed. What a device need not have
//! (Ferrite's `extension.rs`) is skipped where it has not: registration and message in one work
//! request, failed registrations that drain the send queue, regions for one message.

use core::ops::Range;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::time::{msecs_to_jiffies, Jiffies};

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../drivers/infiniband/hw/ferrite/extension.rs"]
pub mod extension;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/rdma/mod.rs"]
pub mod rdma;

use extension::{register_send, ONE_TOUCH, ONE_TOUCH_ACCESS, REGISTER_DRAINS, REGISTER_SEND};
use rdma::ulp::{
    self, Buffer, Client, Cq, Lease, LocalMemory, Mr, Op, Outcome, Pd, Peer, PollContext, Qp,
    QpLimits, Remote, Ticket,
};
use rdma::{Access, Extension, QpState, WcOpcode, WcStatus};

static PASSED: Atomic<u32> = Atomic::new(0);
static FAILED: Atomic<u32> = Atomic::new(0);

const PORT: u32 = 1;
const BUFFER: usize = 256 * 1024;
const DEPTH: u32 = 32;
/// Deep enough for rings of many pages.
const LARGE_DEPTH: u32 = 1024;
/// Eight megabytes of completions: twice what the page allocator has in one piece.
const LARGE_CQ: u32 = 1 << 17;
/// Pages whose addresses just fill a page, one more, and so many that another one is half full or full.
const MANY_PAGES: [usize; 4] = [512, 513, 600, 1024];
const LENGTHS: [usize; 8] = [0, 1, 255, 1024, 4096, 4097, 100_003, BUFFER];

/// Long enough for a machine that emulates everything.
fn patience() -> Jiffies {
    msecs_to_jiffies(30_000)
}

/// A byte that depends on where and in which test it is.
fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| (index.wrapping_mul(31) ^ (index >> 8) ^ seed.wrapping_mul(97)) as u8
}

/// All that a peer may do.
fn all_access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

fn check(condition: bool) -> Result {
    if condition {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// A request that succeeded.
fn good(outcome: Outcome) -> Result<Outcome> {
    expect(outcome, WcStatus::Success)
}

/// A request that ended as it should.
fn expect(outcome: Outcome, status: WcStatus) -> Result<Outcome> {
    if outcome.status != status {
        pr_err!("{:?} instead of {:?}\n", outcome, status);
        return Err(EIO);
    }
    Ok(outcome)
}

/// Two connected queue pairs with a buffer each.
struct Pair {
    near: Qp,
    far: Qp,
    source: Arc<Buffer>,
    sink: Arc<Buffer>,
    lease: Lease,
    pd: Arc<Pd>,
}

impl Pair {
    fn new(
        lease: &Lease,
        pd: &Arc<Pd>,
        cq: &Arc<Cq>,
        limits: QpLimits,
        extensions: &'static [Extension],
    ) -> Result<Self> {
        let pair = Self {
            near: Qp::with_extensions(pd, cq, limits, extensions)?,
            far: Qp::with_extensions(pd, cq, limits, extensions)?,
            source: Buffer::new(lease, BUFFER)?,
            sink: Buffer::new(lease, BUFFER)?,
            lease: lease.clone(),
            pd: pd.clone(),
        };
        let device = lease.device();
        let (sgid_index, gid, mac) = device.roce_v2_gid(PORT)?;
        let mtu = device.port(PORT)?.active_mtu;
        let peer = |qp: &Qp| Peer {
            qp_num: qp.number(),
            gid,
            mac,
            port: PORT,
            sgid_index,
            mtu,
        };
        pair.near.connect(&peer(&pair.far), all_access())?;
        pair.far.connect(&peer(&pair.near), all_access())?;
        Ok(pair)
    }

    /// Registers the sink, so that the near side can reach it.
    fn expose(&self, access: Access) -> Result<Arc<Mr>> {
        let mr = Mr::new(&self.pd, self.sink.clone())?;
        register(&self.far, &mr, access)?;
        Ok(mr)
    }

    /// Does a request of the near side with `range` of the source.
    fn run(&self, op: Op<'_>, range: Range<usize>) -> Result<Outcome> {
        self.near
            .send(op, LocalMemory::Buffer(&self.source, range))?
            .wait(patience())
    }

    /// A region of the near side that is not registered yet, with memory of its own.
    fn near_region(&self, pages: usize) -> Result<Arc<Mr>> {
        let buffer = Buffer::new(&self.lease, pages * kernel::page::PAGE_SIZE)?;
        Mr::new(&self.pd, buffer)
    }
}

/// Registers a region, and waits until it is.
fn register(qp: &Qp, mr: &Arc<Mr>, access: Access) -> Result {
    let registered = qp.send(Op::reg_mr(mr, access), LocalMemory::None)?;
    good(registered.wait(patience())?)?;
    Ok(())
}

/// The sink from `offset` on, as the near side has to name it.
fn remote(mr: &Mr, offset: usize) -> Remote {
    Remote {
        addr: mr.iova() + offset as u64,
        rkey: mr.rkey(),
    }
}

fn sends_arrive(pair: &Pair) -> Result {
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

fn immediate_data_arrives(pair: &Pair) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..64)?;
    good(pair.run(Op::SendWithImm(0x1234_5678), 0..64)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(0x1234_5678))
}

fn sends_and_receives_have_room_of_their_own(pair: &Pair) -> Result {
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

fn many_requests_complete(pair: &Pair) -> Result {
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

fn writes_land_where_they_should(pair: &Pair) -> Result {
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

fn writes_with_immediate_consume_a_receive(pair: &Pair) -> Result {
    let mr = pair.expose(all_access())?;
    pair.source.fill(pattern(9));
    pair.sink.fill(|_| 0);
    let recv = pair.far.recv(&pair.sink, 0..0)?;
    good(pair.run(Op::RdmaWriteWithImm(remote(&mr, 0), 77), 0..5000)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(77) && outcome.byte_len == 5000)?;
    check(pair.sink.first_difference(0..5000, pattern(9)).is_none())
}

fn reads_fetch_the_peers_memory(pair: &Pair) -> Result {
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

fn atomics_are_done_once_and_return_what_was_there(pair: &Pair) -> Result {
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

fn send_with_invalidate_ends_the_peers_region(pair: &Pair) -> Result {
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

fn a_region_may_be_registered_again_under_another_key(pair: &Pair) -> Result {
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

fn what_is_not_allowed_is_refused(pair: &Pair) -> Result {
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

fn beyond_the_region_is_refused(pair: &Pair) -> Result {
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

fn a_message_longer_than_the_receive_fails_at_both_ends(pair: &Pair) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..100)?;
    expect(pair.run(Op::Send, 0..101)?, WcStatus::RemoteInvalidRequest)?;
    expect(recv.wait(patience())?, WcStatus::LocalLength)?;
    Ok(())
}

/// The key of a region that is registered may be used before the registration is complete: by what
/// is posted after it, and by the peer that is told of it.
fn a_region_is_used_before_its_registration_is_complete(pair: &Pair) -> Result {
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
fn an_offer_is_one_request_and_ends_with_the_answer(pair: &Pair) -> Result {
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
fn an_offer_may_answer_an_offer(pair: &Pair) -> Result {
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
fn a_failed_registration_drains_and_is_tried_again(pair: &Pair) -> Result {
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
        pr_info!(
            "drained by {cause:?}: {:?} {}, then {state:?}\n",
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
        pr_info!("mended after {cause:?}\n");
    }
    Ok(())
}

/// A registration that fails sends nothing, whatever the cause, and is tried again as a whole.
fn an_offer_that_fails_is_not_sent(pair: &Pair) -> Result {
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
        pr_info!(
            "not offered by {cause:?}: {:?} {}, then {state:?}\n",
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
fn a_region_that_was_not_made_is_not_registered(pair: &Pair) -> Result {
    let pages = usize::from(*module_parameters::failing_pages.value());
    let mr = pair.near_region(pages)?;
    let registered = pair
        .near
        .send(Op::reg_mr(&mr, all_access()), LocalMemory::None)?;
    let failed = expect(registered.wait(patience())?, WcStatus::LocalProtection)?;
    pr_info!("not made: {:?} {}\n", failed.status, failed.vendor_err);
    check(pair.near.state()? == QpState::Sqd)?;
    pair.near.resume()?;
    drop(mr);
    registers_and_is_written_to(pair, &pair.near_region(pages + 1)?, 110)
}

/// The device fails while a send queue stands still: whoever asks it to is told when. What waits comes
/// back, and so does what is posted then; nothing can be mended any more.
fn a_device_may_fail_while_a_queue_stands_still(pair: &Pair) -> Result {
    let mr = pair.near_region(PAGES)?;
    let waiting = [
        pair.near.recv(&pair.source, 0..64)?,
        pair.far.recv(&pair.sink, 0..64)?,
    ];
    let (failing, _kept) = post_failing(pair, Cause::NoSuchKey, &mr)?;
    expect(failing.wait(patience())?, WcStatus::LocalProtection)?;
    check(pair.near.state()? == QpState::Sqd)?;
    pr_info!("stands still until the device fails\n");
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
fn a_refusal_in_the_middle_of_a_list_leaves_nothing_behind(pair: &Pair) -> Result {
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
    pr_info!(
        "ended by {cause:?}: {:?} {}, then {state:?}\n",
        failed.status,
        failed.vendor_err
    );
    Ok(())
}

fn no_such_key_ends_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::NoSuchKey)
}

fn a_key_in_use_ends_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::AlreadyValid)
}

fn too_many_pages_end_the_connection(pair: &Pair) -> Result {
    a_failed_registration_ends_the_connection(pair, Cause::NoRoom)
}

/// A region for one message is there for one, and refused to the next.
fn a_region_may_be_for_one_message(pair: &Pair) -> Result {
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

/// A test on a connected pair.
struct Test {
    name: &'static str,
    run: fn(&Pair) -> Result,
    /// What the device has to have for it.
    needs: &'static [Extension],
    /// What the queue pairs are made with.
    extensions: &'static [Extension],
}

macro_rules! tests {
    ($needs:expr, $extensions:expr; $($test:ident),* $(,)?) => {
        [$(Test {
            name: stringify!($test),
            run: $test,
            needs: $needs,
            extensions: $extensions,
        }),*]
    };
}

/// Of devices and queue pairs that need be nothing special.
const USUAL: &[Extension] = &[];

/// What every device has to do.
const TESTS: [Test; 14] = tests![
    USUAL, USUAL;
    sends_arrive,
    immediate_data_arrives,
    many_requests_complete,
    writes_land_where_they_should,
    writes_with_immediate_consume_a_receive,
    reads_fetch_the_peers_memory,
    atomics_are_done_once_and_return_what_was_there,
    send_with_invalidate_ends_the_peers_region,
    a_region_may_be_registered_again_under_another_key,
    what_is_not_allowed_is_refused,
    beyond_the_region_is_refused,
    a_message_longer_than_the_receive_fails_at_both_ends,
    a_region_is_used_before_its_registration_is_complete,
    sends_and_receives_have_room_of_their_own,
];

/// Registration and message in one.
const OFFERS: [Test; 2] = tests![
    &[REGISTER_SEND], &[REGISTER_SEND];
    an_offer_is_one_request_and_ends_with_the_answer,
    an_offer_may_answer_an_offer,
];

/// Failed registrations that leave the connection.
const DRAINING: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_failed_registration_drains_and_is_tried_again,
];

/// The same on a device that somebody has fail meanwhile: only for who asks for it.
const FAILING: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_device_may_fail_while_a_queue_stands_still,
];

/// The same on a device that somebody has fail some allocations of regions.
const NOT_MADE: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_region_that_was_not_made_is_not_registered,
];

/// Registrations that are refused and failed ones that end it, on a device that says which fail.
const ENDING: [Test; 4] = tests![
    &[REGISTER_DRAINS], USUAL;
    a_refusal_in_the_middle_of_a_list_leaves_nothing_behind,
    no_such_key_ends_the_connection,
    a_key_in_use_ends_the_connection,
    too_many_pages_end_the_connection,
];

/// Registrations with a message that fail.
const DRAINED_OFFERS: [Test; 1] = tests![
    &[REGISTER_SEND, REGISTER_DRAINS],
    &[REGISTER_SEND, REGISTER_DRAINS];
    an_offer_that_fails_is_not_sent,
];

/// Regions for one message.
const TOUCHED_ONCE: [Test; 1] = tests![
    &[ONE_TOUCH], &[ONE_TOUCH];
    a_region_may_be_for_one_message,
];

/// Completions of two queue pairs of the usual depth, and what drains them.
fn usual_cq(lease: &Lease) -> Result<Arc<Cq>> {
    Cq::new(lease, 4 * DEPTH + 4, PollContext::WorkQueue)
}

/// The usual depth.
const LIMITS: QpLimits = QpLimits {
    sends: DEPTH,
    recvs: DEPTH,
};

/// Runs a test on queue pairs of its own, since some end in error.
fn with_pair(
    lease: &Lease,
    extensions: &'static [Extension],
    test: impl FnOnce(&Pair) -> Result,
) -> Result {
    let pd = Pd::new(lease)?;
    let cq = usual_cq(lease)?;
    let pair = Pair::new(lease, &pd, &cq, LIMITS, extensions)?;
    test(&pair)
}

/// Rings that are larger than any piece of memory that can be had, and are gone through twice.
fn rings_may_be_large(lease: &Lease) -> Result {
    let pd = Pd::new(lease)?;
    let cq = Cq::new(lease, LARGE_CQ, PollContext::WorkQueue)?;
    let limits = QpLimits {
        sends: LARGE_DEPTH,
        recvs: LARGE_DEPTH,
    };
    let pair = Pair::new(lease, &pd, &cq, limits, USUAL)?;
    // Each time eight times the usual depth.
    for _ in 0..2 * LARGE_DEPTH / DEPTH / 8 {
        many_requests_complete(&pair)?;
    }
    Ok(())
}

/// Writes the source to `offset` of a region of the far side, and looks for it there.
fn write_is_found(pair: &Pair, mr: &Mr, offset: usize, length: usize, seed: usize) -> Result {
    let byte = pattern(seed);
    pair.source.fill(&byte);
    good(pair.run(Op::RdmaWrite(remote(mr, offset)), 0..length)?)?;
    let moved = |index| byte(index - offset);
    check(
        mr.buffer()
            .first_difference(offset..offset + length, moved)
            .is_none(),
    )
}

/// A region of more pages than one table lists.
fn region_of_pages(pair: &Pair, pages: usize) -> Result {
    let length = pages * kernel::page::PAGE_SIZE;
    let mr = Mr::new(&pair.pd, Buffer::new(&pair.lease, length)?)?;
    register(&pair.far, &mr, all_access())?;
    // The last goes from the first page of addresses to the second, where there is one.
    let middle = MANY_PAGES[0] * kernel::page::PAGE_SIZE - BUFFER / 2;
    let offsets = [
        0,
        length / 3 + 5,
        length - BUFFER,
        middle.min(length - BUFFER),
    ];
    for (seed, offset) in offsets.into_iter().enumerate() {
        write_is_found(pair, &mr, offset, BUFFER, seed + pages)?;
    }
    // And out of it again.
    let [.., last] = offsets;
    let byte = pattern(offsets.len() - 1 + pages);
    pair.source.fill(|_| 0);
    good(pair.run(Op::RdmaRead(remote(&mr, last)), 0..BUFFER)?)?;
    check(pair.source.first_difference(0..BUFFER, byte).is_none())?;
    // This ends the connection.
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, length - 8)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

fn regions_may_have_many_pages(lease: &Lease) -> Result {
    MANY_PAGES
        .into_iter()
        .try_for_each(|pages| with_pair(lease, USUAL, |pair| region_of_pages(pair, pages)))
}

/// A region may have room for more pages than one table lists, and be of few, of as many or of more.
fn regions_may_have_room_for_more_pages(lease: &Lease) -> Result {
    with_pair(lease, USUAL, |pair| {
        let room = MANY_PAGES[3] as u32;
        for pages in [1, 3, MANY_PAGES[0], MANY_PAGES[1]] {
            let length = pages * kernel::page::PAGE_SIZE;
            let part = length.min(BUFFER);
            let mr = Mr::with_room(&pair.pd, Buffer::new(&pair.lease, length)?, room)?;
            register(&pair.far, &mr, all_access())?;
            for offset in [0, length - part] {
                write_is_found(pair, &mr, offset, part, pages + offset)?;
            }
        }
        Ok(())
    })
}

/// Regions in pages of every size that the device has, however little of one they are.
fn regions_may_have_large_pages(lease: &Lease) -> Result {
    let device = lease.device();
    with_pair(lease, USUAL, |pair| {
        let sizes = (12..=30)
            .map(|shift| 1u32 << shift)
            .filter(|size| device.page_sizes() & u64::from(*size) != 0);
        for (seed, size) in sizes.enumerate() {
            let mr = Mr::with_page_size(&pair.pd, pair.sink.clone(), size)?;
            register(&pair.far, &mr, all_access())?;
            write_is_found(pair, &mr, 0, BUFFER, seed + 100)?;
        }
        Ok(())
    })
}

/// A queue pair takes no region of another domain: the device would end the connection.
fn regions_of_other_domains_are_not_posted(lease: &Lease) -> Result {
    let (pd, other) = (Pd::new(lease)?, Pd::new(lease)?);
    let cq = usual_cq(lease)?;
    let pair = Pair::new(lease, &pd, &cq, LIMITS, USUAL)?;
    let mr = Mr::new(&other, pair.sink.clone())?;
    let refused = |posted: Result<Ticket<'_>>| check(posted.err() == Some(EINVAL));
    refused(
        pair.near
            .send(Op::reg_mr(&mr, all_access()), LocalMemory::None),
    )?;
    refused(pair.near.send(Op::Send, LocalMemory::Region(&mr, 0..16)))?;
    // Nor what it was not made for.
    let own = pair.near_region(1)?;
    let offer = register_send(&own, all_access(), None);
    refused(pair.near.send(offer, LocalMemory::None))?;
    // Nothing came of it.
    sends_arrive(&pair)
}

/// The tests as a client of the RDMA core.
struct Loop;

impl Client for Loop {
    const NAME: &'static CStr = c"rust_rdma_loop";

    fn add(lease: &Lease) -> Result {
        let device = lease.device();
        let name = device.name();
        let name: &CStr = &name;
        if !device.port(PORT)?.active || device.roce_v2_gid(PORT).is_err() {
            pr_info!("{name}: no active RoCE port, left out\n");
            return Err(ENODEV);
        }
        let say = |test: &str, result: Result| match result {
            Ok(()) => {
                PASSED.fetch_add(1, Relaxed);
                pr_info!("{name}: ok {test}\n");
            }
            Err(err) => {
                FAILED.fetch_add(1, Relaxed);
                pr_err!("{name}: not ok {test}: {err:?}\n");
            }
        };
        let asked_for = [
            (*module_parameters::device_fails.value() != 0, &FAILING),
            (*module_parameters::failing_pages.value() != 0, &NOT_MADE),
        ];
        if let Some((_, tests)) = asked_for.into_iter().find(|(asked, _)| *asked) {
            for test in tests {
                say(test.name, with_pair(lease, test.extensions, test.run));
            }
            return Ok(());
        }
        let groups: [&[Test]; 6] = [
            &TESTS,
            &OFFERS,
            &DRAINING,
            &ENDING,
            &DRAINED_OFFERS,
            &TOUCHED_ONCE,
        ];
        for test in groups.into_iter().flatten() {
            if test.needs.iter().all(|needed| device.has(needed)) {
                say(test.name, with_pair(lease, test.extensions, test.run));
            } else {
                pr_info!("{name}: skipped {}\n", test.name);
            }
        }
        say("rings_may_be_large", rings_may_be_large(lease));
        say(
            "regions_may_have_large_pages",
            regions_may_have_large_pages(lease),
        );
        say(
            "regions_of_other_domains_are_not_posted",
            regions_of_other_domains_are_not_posted(lease),
        );
        type Pages = fn(&Lease) -> Result;
        let tests: [(&str, Pages); 2] = [
            ("regions_may_have_many_pages", regions_may_have_many_pages),
            (
                "regions_may_have_room_for_more_pages",
                regions_may_have_room_for_more_pages,
            ),
        ];
        for (test, body) in tests {
            if device.max_registered_pages() as usize >= MANY_PAGES[3] {
                say(test, body(lease));
            } else {
                // Other devices need not have as many.
                pr_info!("{name}: skipped {test}\n");
            }
        }
        Ok(())
    }
}

struct LoopModule {
    _client: Pin<KBox<ulp::Registration<Loop>>>,
}

impl kernel::Module for LoopModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let client = KBox::pin_init(ulp::Registration::new(), GFP_KERNEL)?;
        let (passed, failed) = (PASSED.load(Relaxed), FAILED.load(Relaxed));
        pr_info!("{passed} passed, {failed} failed\n");
        if failed != 0 {
            return Err(EIO);
        }
        if passed == 0 {
            return Err(ENODEV);
        }
        Ok(Self { _client: client })
    }
}

module! {
    type: LoopModule,
    name: "rust_rdma_loop",
    authors: ["Ferrite contributors"],
    description: "Kernel queue pairs of one port, connected to each other",
    license: "GPL",
    params: {
        device_fails: u8 {
            default: 0,
            description: "Not 0: wait, with a queue that stands still, for somebody to have the device fail, and do nothing else",
        },
        failing_pages: u16 {
            default: 0,
            description: "Not 0: see what becomes of a region with room for so many pages, which the device does not make, and do nothing else",
        },
    },
}
