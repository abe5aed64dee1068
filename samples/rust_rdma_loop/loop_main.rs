// SPDX-License-Identifier: GPL-2.0

//! A kernel user of RDMA devices: two queue pairs of one port, connected to each other.
//!
//! On loading it takes every device with an active RoCE port through sends, RDMA writes and reads,
//! atomics, fast registration and invalidation, and the errors that go with them, looks at each
//! byte and completion, and logs
//!
//! ```text
//! ferrite_sample: N passed, M failed
//! ```
//!
//! Loading fails if there was nothing to test with or anything failed.

use core::ops::Range;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::time::{msecs_to_jiffies, Jiffies};

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/rdma/mod.rs"]
pub mod rdma;

use rdma::ulp::{
    self, Buffer, Client, Cq, Device, Mr, Op, Outcome, Pd, Peer, Qp, QpLimits, Remote,
};
use rdma::{Access, WcStatus};

static PASSED: Atomic<u32> = Atomic::new(0);
static FAILED: Atomic<u32> = Atomic::new(0);

const PORT: u32 = 1;
const BUFFER: usize = 256 * 1024;
const DEPTH: u32 = 32;
/// Deep enough for rings of many pages.
const LARGE_DEPTH: u32 = 1024;
/// Eight megabytes of completions: twice what the page allocator has in one piece.
const LARGE_CQ: u32 = 1 << 17;
/// More pages than fit in a page of addresses.
const MANY_PAGES: usize = 600;
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
        pr_err!("ferrite_sample: {:?} instead of {:?}\n", outcome, status);
        return Err(EIO);
    }
    Ok(outcome)
}

/// Two connected queue pairs with a buffer each.
struct Pair<'p> {
    near: Qp<'p>,
    far: Qp<'p>,
    source: Arc<Buffer<'p>>,
    sink: Arc<Buffer<'p>>,
    pd: &'p Pd<'p>,
    atomics: bool,
}

impl<'p> Pair<'p> {
    fn new(
        device: &'p Device<'p>,
        pd: &'p Pd<'p>,
        cq: &'p Cq<'p>,
        limits: QpLimits,
    ) -> Result<Self> {
        let pair = Self {
            near: Qp::new(pd, cq, limits)?,
            far: Qp::new(pd, cq, limits)?,
            source: Buffer::new(device, BUFFER)?,
            sink: Buffer::new(device, BUFFER)?,
            pd,
            atomics: device.has_atomics(),
        };
        let (sgid_index, gid, mac) = device.roce_v2_gid(PORT)?;
        let mtu = device.port(PORT)?.active_mtu;
        let peer = |qp: &Qp<'_>| Peer {
            qp_num: qp.number(),
            gid,
            mac,
            sgid_index,
            mtu,
        };
        pair.near.connect(&peer(&pair.far), all_access())?;
        pair.far.connect(&peer(&pair.near), all_access())?;
        Ok(pair)
    }

    /// Registers the sink, so that the near side can reach it.
    fn expose(&self, access: Access) -> Result<Mr<'p>> {
        let mr = Mr::new(self.pd, self.sink.clone())?;
        good(
            self.far
                .send(Op::Register(&mr, access), None)?
                .wait(patience())?,
        )?;
        Ok(mr)
    }

    /// Does a request of the near side with `range` of the source.
    fn run(&self, op: Op<'_>, range: Range<usize>) -> Result<Outcome> {
        self.near
            .send(op, Some((&self.source, range)))?
            .wait(patience())
    }
}

/// The sink from `offset` on, as the near side has to name it.
fn remote(mr: &Mr<'_>, offset: usize) -> Remote {
    Remote {
        addr: mr.iova() + offset as u64,
        rkey: mr.rkey(),
    }
}

fn sends_arrive(pair: &Pair<'_>) -> Result {
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

fn immediate_data_arrives(pair: &Pair<'_>) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..64)?;
    good(pair.run(Op::SendWithImm(0x1234_5678), 0..64)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(0x1234_5678))
}

fn many_requests_complete(pair: &Pair<'_>) -> Result {
    pair.source.fill(pattern(5));
    pair.sink.fill(|_| 0);
    let piece = |index: usize| index * 64..index * 64 + 64;
    for _ in 0..8 {
        let mut tickets = KVec::new();
        for index in 0..DEPTH as usize {
            tickets.push(pair.far.recv(&pair.sink, piece(index))?, GFP_KERNEL)?;
        }
        for index in 0..DEPTH as usize {
            let memory = Some((&pair.source, piece(index)));
            tickets.push(pair.near.send(Op::Send, memory)?, GFP_KERNEL)?;
        }
        for ticket in tickets {
            good(ticket.wait(patience())?)?;
        }
    }
    let end = DEPTH as usize * 64;
    check(pair.sink.first_difference(0..end, pattern(5)).is_none())
}

fn writes_land_where_they_should(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(all_access())?;
    for length in LENGTHS {
        let offset = (BUFFER - length).min(4093);
        pair.source.fill(pattern(length + 1));
        pair.sink.fill(|_| 0);
        good(pair.run(Op::Write(remote(&mr, offset)), 0..length)?)?;
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

fn writes_with_immediate_consume_a_receive(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(all_access())?;
    pair.source.fill(pattern(9));
    pair.sink.fill(|_| 0);
    let recv = pair.far.recv(&pair.sink, 0..0)?;
    good(pair.run(Op::WriteWithImm(remote(&mr, 0), 77), 0..5000)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.imm_data == Some(77) && outcome.byte_len == 5000)?;
    check(pair.sink.first_difference(0..5000, pattern(9)).is_none())
}

fn reads_fetch_the_peers_memory(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(all_access())?;
    for length in LENGTHS {
        pair.sink.fill(pattern(length + 2));
        pair.source.fill(|_| 0);
        good(pair.run(Op::Read(remote(&mr, 0)), 0..length)?)?;
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
fn word(buffer: &Buffer<'_>) -> u64 {
    let mut bytes = [0; 8];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = buffer.byte(index).unwrap_or(0);
    }
    u64::from_ne_bytes(bytes)
}

fn atomics_are_done_once_and_return_what_was_there(pair: &Pair<'_>) -> Result {
    if !pair.atomics {
        return Ok(());
    }
    let mr = pair.expose(all_access())?;
    pair.sink.fill(|_| 0);
    for round in 0..10 {
        good(pair.run(Op::FetchAdd(remote(&mr, 0), 3), 0..8)?)?;
        check(word(&pair.source) == round * 3)?;
    }
    good(pair.run(Op::CompareSwap(remote(&mr, 0), 1, 99), 0..8)?)?;
    check(word(&pair.source) == 30 && word(&pair.sink) == 30)?;
    good(pair.run(Op::CompareSwap(remote(&mr, 0), 30, 99), 0..8)?)?;
    check(word(&pair.source) == 30 && word(&pair.sink) == 99)
}

fn send_with_invalidate_ends_the_peers_region(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(all_access())?;
    let recv = pair.far.recv(&pair.sink, 0..16)?;
    good(pair.run(Op::SendWithInvalidate(mr.rkey()), 0..16)?)?;
    let outcome = good(recv.wait(patience())?)?;
    check(outcome.invalidated == Some(mr.rkey()))?;
    expect(
        pair.run(Op::Write(remote(&mr, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

fn a_region_may_be_registered_again_under_another_key(pair: &Pair<'_>) -> Result {
    let mut mr = pair.expose(all_access())?;
    for _ in 0..4 {
        let old = mr.rkey();
        let far = &pair.far;
        good(far.send(Op::Invalidate(old), None)?.wait(patience())?)?;
        mr.renew_key();
        check(mr.rkey() != old)?;
        good(
            far.send(Op::Register(&mr, all_access()), None)?
                .wait(patience())?,
        )?;
        good(pair.run(Op::Write(remote(&mr, 0)), 0..4096)?)?;
    }
    let mut stale = remote(&mr, 0);
    stale.rkey = (stale.rkey & !0xff) | (stale.rkey.wrapping_sub(1) & 0xff);
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    expect(pair.run(Op::Write(stale), 0..16)?, WcStatus::RemoteAccess)?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

fn what_is_not_allowed_is_refused(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(Access::LOCAL_WRITE | Access::REMOTE_READ)?;
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    good(pair.run(Op::Read(remote(&mr, 0)), 0..16)?)?;
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::Write(remote(&mr, 0)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

fn beyond_the_region_is_refused(pair: &Pair<'_>) -> Result {
    let mr = pair.expose(all_access())?;
    pair.sink.fill(|_| 0);
    pair.source.fill(|_| 1);
    expect(
        pair.run(Op::Write(remote(&mr, BUFFER - 8)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    // The queue pair is in error: what comes after is not done.
    expect(
        pair.run(Op::Write(remote(&mr, 0)), 0..16)?,
        WcStatus::WorkRequestFlushed,
    )?;
    check(pair.sink.first_difference(0..BUFFER, |_| 0).is_none())
}

fn a_message_longer_than_the_receive_fails_at_both_ends(pair: &Pair<'_>) -> Result {
    let recv = pair.far.recv(&pair.sink, 0..100)?;
    expect(pair.run(Op::Send, 0..101)?, WcStatus::RemoteInvalidRequest)?;
    expect(recv.wait(patience())?, WcStatus::LocalLength)?;
    Ok(())
}

/// A test on a connected pair, with its name.
type Test = (&'static str, fn(&Pair<'_>) -> Result);

macro_rules! tests {
    ($($test:ident),* $(,)?) => { [$((stringify!($test), $test)),*] };
}

const TESTS: [Test; 12] = tests![
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
];

/// Runs one test on queue pairs of its own, since some end in error.
fn run<'p>(device: &'p Device<'p>, test: fn(&Pair<'_>) -> Result) -> Result {
    let pd = Pd::new(device)?;
    let cq = Cq::new(device, 4 * DEPTH + 4, 0)?;
    let limits = QpLimits {
        sends: DEPTH,
        recvs: DEPTH,
    };
    let pair = Pair::new(device, &pd, &cq, limits)?;
    test(&pair)
}

/// Rings that are larger than any piece of memory that can be had, and are gone through twice.
fn rings_may_be_large<'p>(device: &'p Device<'p>) -> Result {
    let pd = Pd::new(device)?;
    let cq = Cq::new(device, LARGE_CQ, 0)?;
    let limits = QpLimits {
        sends: LARGE_DEPTH,
        recvs: LARGE_DEPTH,
    };
    let pair = Pair::new(device, &pd, &cq, limits)?;
    // Each time eight times the usual depth.
    for _ in 0..2 * LARGE_DEPTH / DEPTH / 8 {
        many_requests_complete(&pair)?;
    }
    Ok(())
}

/// A region of more pages than one table lists.
fn regions_may_have_many_pages<'p>(device: &'p Device<'p>) -> Result {
    let pd = Pd::new(device)?;
    let cq = Cq::new(device, 4 * DEPTH + 4, 0)?;
    let limits = QpLimits {
        sends: DEPTH,
        recvs: DEPTH,
    };
    let pair = Pair::new(device, &pd, &cq, limits)?;
    let length = MANY_PAGES * kernel::page::PAGE_SIZE;
    let sink = Buffer::new(device, length)?;
    let mr = Mr::new(&pd, sink.clone())?;
    let registered = pair.far.send(Op::Register(&mr, all_access()), None)?;
    good(registered.wait(patience())?)?;
    for (seed, offset) in [0, length / 2, length - BUFFER].into_iter().enumerate() {
        let byte = pattern(seed);
        pair.source.fill(&byte);
        good(pair.run(Op::Write(remote(&mr, offset)), 0..BUFFER)?)?;
        let range = offset..offset + BUFFER;
        check(
            sink.first_difference(range, |index| byte(index - offset))
                .is_none(),
        )?;
    }
    expect(
        pair.run(Op::Write(remote(&mr, length - 8)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

/// The tests as a client of the RDMA core.
struct Loop;

impl Client for Loop {
    const NAME: &'static CStr = c"rust_rdma_loop";

    fn add(device: &Device<'_>) -> Result {
        let name = device.name();
        let name: &CStr = &name;
        if !device.port(PORT)?.active || device.roce_v2_gid(PORT).is_err() {
            pr_info!("ferrite_sample: {name}: no active RoCE port, left out\n");
            return Err(ENODEV);
        }
        let say = |test: &str, result: Result| match result {
            Ok(()) => {
                PASSED.fetch_add(1, Relaxed);
                pr_info!("ferrite_sample: {name}: ok {test}\n");
            }
            Err(err) => {
                FAILED.fetch_add(1, Relaxed);
                pr_err!("ferrite_sample: {name}: not ok {test}: {err:?}\n");
            }
        };
        for (test, function) in TESTS {
            say(test, run(device, function));
        }
        say("rings_may_be_large", rings_may_be_large(device));
        let test = "regions_may_have_many_pages";
        if device.max_registered_pages() as usize >= MANY_PAGES {
            say(test, regions_may_have_many_pages(device));
        } else {
            // Other devices need not have as many.
            pr_info!("ferrite_sample: {name}: skipped {test}\n");
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
        pr_info!("ferrite_sample: {passed} passed, {failed} failed\n");
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
}
