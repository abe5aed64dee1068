// SPDX-License-Identifier: GPL-2.0

//! Two queue pairs that are connected to each other, and what their tests have in common.

use crate::rdma::ulp::{
    Buffer, Cq, Lease, LocalMemory, Mr, Op, Outcome, Pd, Peer, PollContext, Qp, QpLimits, Remote,
};
use crate::rdma::{Access, Extension, WcStatus};
use core::ops::Range;
use kernel::prelude::*;
use kernel::sync::Arc;
use kernel::time::{msecs_to_jiffies, Jiffies};

pub(super) const PORT: u32 = 1;

pub(super) const BUFFER: usize = 256 * 1024;

pub(super) const DEPTH: u32 = 32;

/// Long enough for a machine that emulates everything.
pub(super) fn patience() -> Jiffies {
    msecs_to_jiffies(30_000)
}

/// A byte that depends on where and in which test it is.
pub(super) fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| (index.wrapping_mul(31) ^ (index >> 8) ^ seed.wrapping_mul(97)) as u8
}

/// All that a peer may do.
pub(super) fn all_access() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC
}

pub(super) fn check(condition: bool) -> Result {
    if condition {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// A request that succeeded.
pub(super) fn good(outcome: Outcome) -> Result<Outcome> {
    expect(outcome, WcStatus::Success)
}

/// A request that ended as it should.
pub(super) fn expect(outcome: Outcome, status: WcStatus) -> Result<Outcome> {
    if outcome.status != status {
        pr_err!("{:?} instead of {:?}\n", outcome, status);
        return Err(EIO);
    }
    Ok(outcome)
}

/// Two connected queue pairs with a buffer each.
pub(super) struct Pair {
    pub(super) near: Qp,
    pub(super) far: Qp,
    pub(super) source: Arc<Buffer>,
    pub(super) sink: Arc<Buffer>,
    pub(super) lease: Lease,
    pub(super) pd: Arc<Pd>,
}

impl Pair {
    pub(super) fn new(
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
    pub(super) fn expose(&self, access: Access) -> Result<Arc<Mr>> {
        let mr = Mr::new(&self.pd, self.sink.clone())?;
        register(&self.far, &mr, access)?;
        Ok(mr)
    }

    /// Does a request of the near side with `range` of the source.
    pub(super) fn run(&self, op: Op<'_>, range: Range<usize>) -> Result<Outcome> {
        self.near
            .send(op, LocalMemory::Buffer(&self.source, range))?
            .wait(patience())
    }

    /// A region of the near side that is not registered yet, with memory of its own.
    pub(super) fn near_region(&self, pages: usize) -> Result<Arc<Mr>> {
        let buffer = Buffer::new(&self.lease, pages * kernel::page::PAGE_SIZE)?;
        Mr::new(&self.pd, buffer)
    }
}

/// Registers a region, and waits until it is.
pub(super) fn register(qp: &Qp, mr: &Arc<Mr>, access: Access) -> Result {
    let registered = qp.send(Op::reg_mr(mr, access), LocalMemory::None)?;
    good(registered.wait(patience())?)?;
    Ok(())
}

/// The sink from `offset` on, as the near side has to name it.
pub(super) fn remote(mr: &Mr, offset: usize) -> Remote {
    Remote {
        addr: mr.iova() + offset as u64,
        rkey: mr.rkey(),
    }
}

/// Completions of two queue pairs of the usual depth, and what drains them.
pub(super) fn usual_cq(lease: &Lease) -> Result<Arc<Cq>> {
    Cq::new(lease, 4 * DEPTH + 4, PollContext::WorkQueue)
}

/// The usual depth.
pub(super) const LIMITS: QpLimits = QpLimits {
    sends: DEPTH,
    recvs: DEPTH,
};

/// Runs a test on queue pairs of its own, since some end in error.
pub(super) fn with_pair(
    lease: &Lease,
    extensions: &'static [Extension],
    test: impl FnOnce(&Pair) -> Result,
) -> Result {
    let pd = Pd::new(lease)?;
    let cq = usual_cq(lease)?;
    let pair = Pair::new(lease, &pd, &cq, LIMITS, extensions)?;
    test(&pair)
}
