// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What one process can see of a device by itself: both ends of each connection are here, on one
//! port. Windows, changed regions, device memory, DMA buffers, shared receive queues, atomics of
//! several queue pairs, queues that change their size or are emptied in every state, imports, and
//! a device that goes away.
//!
//! Objects are not destroyed one by one: closing the context must do.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::time::{Duration, Instant};

use super::refusal::must_fail;
use crate::bench::{status_name, At};
use crate::direct;
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Buffer, BufferKind, Change, Context, Errno, Options};
use std::rc::Rc;

/// What makes a check.
pub(super) type Body = fn(&Rig) -> Check;

const CHECKS: &[(&str, Body)] = &[
    ("queries tell what was set", queries),
    (
        "a domain that the mask does not name is not looked at",
        unnamed_domain,
    ),
    ("a window of type 1 opens and closes", window1),
    ("a window of type 2 is invalidated at both ends", window2),
    ("a region changes memory, rights and domain", rereg),
    (
        "device memory is copied to, read and written",
        device_memory,
    ),
    ("a DMA buffer is written and read", dmabuf),
    ("two queue pairs add to one counter", concurrent_atomics),
    ("atomic writes and flushes", placement),
    ("a completion queue changes its size under load", resize_cq),
    (
        "completions tell the device's time, and that of the wall clock",
        timestamps,
    ),
    (
        "a shared receive queue: limit event, size under load",
        shared,
    ),
    ("queues are emptied in every state", states),
    (
        "hundreds of queue pairs fail at once, each is told, and others work",
        failing_together,
    ),
    ("a datagram is no longer than the port takes", datagrams),
    ("what another context made can be imported", imports),
    (
        "an allocator that the program brings may use verbs itself",
        own_allocator,
    ),
];

/// All rights but those of datagrams.
pub(super) const RIGHTS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND;
pub(super) const LENGTH: usize = 1 << 16;
/// Queues that are made, and hardly used.
const SMALL: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 16,
    max_recv_wr: 16,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 0,
};
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
const QKEY: u32 = 0x1234;

pub fn run(options: &Options, report: &mut Report) {
    each_on_its_own(options, report, "objects: ", CHECKS);
}

/// Makes each check on a rig of its own; their names begin with `prefix`.
pub(super) fn each_on_its_own(
    options: &Options,
    report: &mut Report,
    prefix: &str,
    checks: &[(&str, Body)],
) {
    for (name, body) in checks {
        let result = Rig::new(options).and_then(|rig| body(&rig));
        report.enter(&format!("{prefix}{name}"), result);
    }
}

/// A program that is in the middle of things when the device goes: tells when it may, and that
/// everything ended as it must.
pub fn removal(options: &Options) -> Check {
    let rig = Rig::new(options)?;
    let pair = rig.pair()?;
    let lazy = rig.on_demand()?;
    // Memory that the device knows of until it is stopped, and that is taken from it once it has failed.
    let known = rig.on_demand()?;
    if let Some((buffer, mr)) = &known {
        // SAFETY: the region lives.
        rig.write_to(pair.a, 64, buffer.address(), unsafe { (**mr).rkey })?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "a write to memory on demand")?;
    }
    println!("ready for the device to go");
    let deadline = Instant::now() + PATIENCE;
    // Work goes on until the event tells that it cannot.
    let fatal = loop {
        // Posts and completions may fail from now on, but not hang or crash.
        let _ = rig.write(pair.a, 64);
        if let Some((buffer, mr)) = &lazy {
            // Each of these waits for a page, so that the device is likely to go meanwhile.
            buffer
                .change(Change::Discard, 0, LENGTH)
                .map_err(|errno| format!("madvise: {errno}"))?;
            // SAFETY: the region lives.
            let _ = rig.write_to(pair.a, 64, buffer.address(), unsafe { (**mr).rkey });
        }
        let _ = rig.poll(pair.cq);
        match rig.context.async_event(Duration::from_millis(1)) {
            Ok(Some((IBV_EVENT_DEVICE_FATAL, _))) => break true,
            Ok(Some(_)) => {}
            Ok(None) if Instant::now() > deadline => break false,
            Ok(None) => {}
            Err(errno) => return Err(format!("no event but {errno}").into()),
        }
    };
    expect!(fatal, true, "IBV_EVENT_DEVICE_FATAL came");
    if let Some((buffer, _)) = &known {
        buffer
            .change(Change::Discard, 0, LENGTH)
            .map_err(|errno| format!("madvise: {errno}"))?;
    }
    // From some moment on, the kernel refuses everything.
    let deadline = Instant::now() + PATIENCE;
    loop {
        match rig.context.device_attr().err().map(|errno| errno.0) {
            Some(libc::EIO) => break,
            Some(other) => return Err(format!("ibv_query_device: {}", Errno(other)).into()),
            None if Instant::now() > deadline => {
                return Err("ibv_query_device still works".into());
            }
            None => {}
        }
    }
    // SAFETY: the context is open, and null is a channel.
    let cq = unsafe { ibv_create_cq(rig.raw(), 4, ptr::null_mut(), ptr::null_mut(), 0) };
    not_made(cq, libc::EIO, "ibv_create_cq")?;
    // What exists can be used, to no avail, and destroyed.
    let _ = rig.write(pair.a, 64);
    let _ = rig.poll(pair.cq);
    // SAFETY: the objects live, and are not used afterwards.
    let destroyed = unsafe {
        (
            ibv_destroy_qp(pair.a),
            ibv_destroy_qp(pair.b),
            ibv_destroy_cq(pair.cq),
            [lazy, known]
                .iter()
                .flatten()
                .fold(ibv_dereg_mr(rig.mr), |sum, (_, mr)| sum | ibv_dereg_mr(*mr)),
            ibv_dealloc_pd(rig.pd),
        )
    };
    expect!(destroyed, (0, 0, 0, 0, 0), "results of destroying");
    println!("done");
    Ok(())
}

pub(super) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

pub(super) fn made<T>(pointer: *mut T, what: &str) -> Check<*mut T> {
    match (pointer.is_null(), errno()) {
        (false, _) => Ok(pointer),
        (true, libc::EOPNOTSUPP | libc::ENOSYS) => {
            Err(Outcome::Skipped(format!("{what} is not offered")))
        }
        (true, errno) => Err(format!("{what}: {}", Errno(errno)).into()),
    }
}

/// The call that was to make something must have failed with this errno.
pub(super) fn not_made<T>(pointer: *mut T, errno: i32, what: &str) -> Check {
    let why = self::errno();
    if !pointer.is_null() {
        return Err(format!("{what}: was allowed").into());
    }
    expect!(why, errno, "errno of {what}");
    Ok(())
}

pub(super) fn well(result: i32, what: &str) -> Check {
    match result {
        0 => Ok(()),
        libc::EOPNOTSUPP | libc::ENOSYS => Err(Outcome::Skipped(format!("{what} is not offered"))),
        -1 => Err(format!("{what}: {}", Errno(errno())).into()),
        other => Err(format!("{what}: {}", Errno(other)).into()),
    }
}

/// A context, a domain and a region.
pub(super) struct Rig {
    pub(super) context: Rc<Context>,
    pub(super) pd: *mut ibv_pd,
    pub(super) mr: *mut ibv_mr,
    pub(super) buffer: Rc<Buffer>,
}

/// Two connected queue pairs and the queue where both complete.
pub(super) struct Pair {
    pub(super) a: *mut ibv_qp,
    pub(super) b: *mut ibv_qp,
    pub(super) cq: *mut ibv_cq,
}

/// How a queue pair is made.
#[derive(Clone, Copy)]
pub(super) struct Made {
    pub(super) kind: u32,
    pub(super) srq: *mut ibv_srq,
    pub(super) cq: *mut ibv_cq,
    pub(super) operations: u32,
}

impl Rig {
    pub(super) fn new(options: &Options) -> Check<Self> {
        let context = Context::open(options)?;
        let buffer = Buffer::new(LENGTH, BufferKind::Plain)
            .map_err(|errno| format!("no memory: {errno}"))?;
        // SAFETY: the context is open; the buffer lives as long as the rig.
        let (pd, mr) = unsafe {
            let pd = made(ibv_alloc_pd(context.raw()), "ibv_alloc_pd")?;
            let address = buffer.address() as *mut _;
            let mr = ibv_reg_mr(pd, address, LENGTH, RIGHTS as i32);
            (pd, made(mr, "ibv_reg_mr")?)
        };
        Ok(Self {
            context,
            pd,
            mr,
            buffer,
        })
    }

    /// Memory and a region whose pages come and go, where the device has such.
    pub(super) fn on_demand(&self) -> Check<Option<(Rc<Buffer>, *mut ibv_mr)>> {
        let buffer = Buffer::new(LENGTH, BufferKind::Plain)
            .map_err(|errno| format!("no memory: {errno}"))?;
        let address = buffer.address() as *mut _;
        let access = RIGHTS & !IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND;
        // SAFETY: the domain lives, and the memory as long as the caller uses the region.
        let mr = unsafe { ibv_reg_mr(self.pd, address, LENGTH, access as i32) };
        if mr.is_null() && errno() == libc::EOPNOTSUPP {
            return Ok(None);
        }
        Ok(Some((buffer, made(mr, "ibv_reg_mr on demand")?)))
    }

    pub(super) fn raw(&self) -> *mut ibv_context {
        self.context.raw()
    }

    pub(super) fn extended(&self) -> &verbs_context {
        // SAFETY: the structure lives as long as the context.
        unsafe { &*self.context.extended() }
    }

    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { (*self.mr).lkey }
    }

    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { (*self.mr).rkey }
    }

    pub(super) fn cq(&self, entries: i32) -> Check<*mut ibv_cq> {
        // SAFETY: the context is open; there is no channel.
        let cq = unsafe { ibv_create_cq(self.raw(), entries, ptr::null_mut(), ptr::null_mut(), 0) };
        made(cq, "ibv_create_cq")
    }

    pub(super) fn qp(&self, how: Made) -> Check<*mut ibv_qp> {
        let mut attr = ibv_qp_init_attr_ex {
            send_cq: how.cq,
            recv_cq: how.cq,
            srq: how.srq,
            cap: ibv_qp_cap {
                max_send_wr: 128,
                max_recv_wr: 64,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            qp_type: how.kind,
            sq_sig_all: 1,
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: self.pd,
            ..Default::default()
        };
        if how.operations != 0 {
            attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            attr.send_ops_flags = how.operations.into();
        }
        let create = self
            .extended()
            .create_qp_ex
            .ok_or("no ibv_create_qp_ex at all")?;
        // SAFETY: the attributes are complete, and all objects live.
        made(unsafe { create(self.raw(), &mut attr) }, "ibv_create_qp_ex")
    }

    /// What is said to attributes of a queue pair that name no domain.
    fn without_domain(&self, cq: *mut ibv_cq) -> Check<i32> {
        let mut attr = ibv_qp_init_attr_ex {
            send_cq: cq,
            recv_cq: cq,
            cap: SMALL,
            qp_type: IBV_QPT_RC,
            // Whoever follows it crashes.
            pd: ptr::dangling_mut(),
            ..Default::default()
        };
        let create = self
            .extended()
            .create_qp_ex
            .ok_or("no ibv_create_qp_ex at all")?;
        // SAFETY: the attributes are complete: without its bit in the mask `pd` means nothing.
        let qp = unsafe { create(self.raw(), &mut attr) };
        Ok(if qp.is_null() { errno() } else { 0 })
    }

    pub(super) fn pair(&self) -> Check<Pair> {
        let cq = self.cq(512)?;
        self.pair_of(Made {
            kind: IBV_QPT_RC,
            srq: ptr::null_mut(),
            cq,
            operations: 0,
        })
    }

    /// Two connected queue pairs; the shared receive queue is only the second's.
    pub(super) fn pair_of(&self, how: Made) -> Check<Pair> {
        let a = self.qp(Made {
            srq: ptr::null_mut(),
            ..how
        })?;
        let b = self.qp(how)?;
        for (qp, peer) in [(a, b), (b, a)] {
            to_init(self, qp)?;
            to_rtr(self, qp, peer)?;
        }
        for qp in [a, b] {
            to_rts(qp)?;
        }
        Ok(Pair { a, b, cq: how.cq })
    }

    pub(super) fn send(&self, qp: *mut ibv_qp, wr: ibv_send_wr, entry: (u64, u32, u32)) -> Check {
        well(self.post_send(qp, wr, entry), "ibv_post_send")
    }

    /// What `ibv_post_send` says.
    pub(super) fn post_send(
        &self,
        qp: *mut ibv_qp,
        mut wr: ibv_send_wr,
        entry: (u64, u32, u32),
    ) -> i32 {
        let mut sge = ibv_sge {
            addr: entry.0,
            length: entry.1,
            lkey: entry.2,
        };
        if entry.1 != 0 {
            wr.sg_list = &mut sge;
            wr.num_sge = 1;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, the work request and its list are complete.
        unsafe {
            match (*self.raw()).ops.post_send {
                Some(post) => post(qp, &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        }
    }

    /// From the start of the buffer to its second half.
    pub(super) fn write(&self, qp: *mut ibv_qp, length: u32) -> Check {
        self.write_to(qp, length, self.buffer.address() + 32768, self.rkey())
    }

    pub(super) fn write_to(&self, qp: *mut ibv_qp, length: u32, address: u64, rkey: u32) -> Check {
        let mut wr = work(IBV_WR_RDMA_WRITE);
        wr.wr.rdma.remote_addr = address;
        wr.wr.rdma.rkey = rkey;
        self.send(qp, wr, (self.buffer.address(), length, self.lkey()))
    }

    /// Has a receive into the second half of the buffer posted.
    pub(super) fn with_receive(
        &self,
        wr_id: u64,
        post: impl FnOnce(&ibv_context_ops, &mut ibv_recv_wr, &mut *mut ibv_recv_wr) -> i32,
    ) -> i32 {
        let mut sge = ibv_sge {
            addr: self.buffer.address() + 32768,
            length: 16384,
            lkey: self.lkey(),
        };
        let mut wr = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        // SAFETY: as in `send`.
        let ops = unsafe { &(*self.raw()).ops };
        post(ops, &mut wr, &mut ptr::null_mut())
    }

    pub(super) fn recv(&self, qp: *mut ibv_qp, wr_id: u64) -> Check {
        well(self.post_recv(qp, wr_id), "ibv_post_recv")
    }

    /// What `ibv_post_recv` says.
    pub(super) fn post_recv(&self, qp: *mut ibv_qp, wr_id: u64) -> i32 {
        self.with_receive(wr_id, |ops, wr, bad| match ops.post_recv {
            // SAFETY: the queue pair lives, the work request and its list are complete.
            Some(post) => unsafe { post(qp, wr, bad) },
            None => libc::ENOSYS,
        })
    }

    pub(super) fn recv_shared(&self, srq: *mut ibv_srq, wr_id: u64) -> Result<(), i32> {
        let result = self.with_receive(wr_id, |ops, wr, bad| match ops.post_srq_recv {
            // SAFETY: as in `send`.
            Some(post) => unsafe { post(srq, wr, bad) },
            None => libc::ENOSYS,
        });
        match result {
            0 => Ok(()),
            errno => Err(errno),
        }
    }

    /// A completion, if there is one.
    pub(super) fn poll(&self, cq: *mut ibv_cq) -> Check<Option<ibv_wc>> {
        // SAFETY: zero is a valid value of all fields.
        let mut wc: ibv_wc = unsafe { std::mem::zeroed() };
        // SAFETY: the queue lives; there is room for one completion.
        let count = unsafe {
            match (*self.raw()).ops.poll_cq {
                Some(poll) => poll(cq, 1, &mut wc),
                None => -1,
            }
        };
        match count {
            0 => Ok(None),
            1 => Ok(Some(wc)),
            other => Err(format!("ibv_poll_cq: {other}").into()),
        }
    }

    /// Waits for a completion.
    pub(super) fn wait(&self, cq: *mut ibv_cq) -> Check<ibv_wc> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(wc) = self.poll(cq)? {
                return Ok(wc);
            }
            if Instant::now() > deadline {
                return Err("no completion".into());
            }
        }
    }

    /// Waits for a completion with this status.
    pub(super) fn ends(&self, cq: *mut ibv_cq, status: u32, what: &str) -> Check<ibv_wc> {
        let wc = self.wait(cq)?;
        expect!(status_name(wc.status), status_name(status), "{what}");
        Ok(wc)
    }

    pub(super) fn set(&self, offset: usize, bytes: &[u8]) -> Check {
        self.buffer
            .write(offset, bytes)
            .map_err(|errno| errno.to_string().into())
    }

    pub(super) fn get(&self, offset: usize, length: usize) -> Check<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.buffer
            .read(offset, &mut bytes)
            .map_err(|errno| errno.to_string())?;
        Ok(bytes)
    }
}

pub(super) fn work(opcode: u32) -> ibv_send_wr {
    ibv_send_wr {
        opcode,
        send_flags: IBV_SEND_SIGNALED,
        ..Default::default()
    }
}

pub(super) fn modify(qp: *mut ibv_qp, mut attr: ibv_qp_attr, mask: u32) -> i32 {
    // SAFETY: the queue pair lives.
    unsafe { ibv_modify_qp(qp, &mut attr, mask as i32) }
}

pub(super) fn to_init(rig: &Rig, qp: *mut ibv_qp) -> Check {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_INIT,
        port_num: rig.context.port,
        qp_access_flags: RIGHTS & !IBV_ACCESS_MW_BIND | IBV_ACCESS_FLUSH_GLOBAL,
        qkey: QKEY,
        ..Default::default()
    };
    // SAFETY: the queue pair lives.
    let last = match unsafe { (*qp).qp_type } {
        IBV_QPT_UD => IBV_QP_QKEY,
        _ => IBV_QP_ACCESS_FLAGS,
    };
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | last;
    well(modify(qp, attr, mask), "to INIT")
}

pub(super) fn to_rtr(rig: &Rig, qp: *mut ibv_qp, peer: *mut ibv_qp) -> Check {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: IBV_MTU_1024,
        // SAFETY: the queue pair lives.
        dest_qp_num: unsafe { (*peer).qp_num },
        rq_psn: 7,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        ah_attr: rig.context.own_path(),
        ..Default::default()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    well(modify(qp, attr, mask), "to RTR")
}

pub(super) fn to_rts(qp: *mut ibv_qp) -> Check {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: 7,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 4,
        ..Default::default()
    };
    let mask = IBV_QP_STATE
        | IBV_QP_SQ_PSN
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_MAX_QP_RD_ATOMIC;
    well(modify(qp, attr, mask), "to RTS")
}

pub(super) fn to_state(qp: *mut ibv_qp, state: u32) -> Check {
    let attr = ibv_qp_attr {
        qp_state: state,
        ..Default::default()
    };
    well(modify(qp, attr, IBV_QP_STATE), "to a state")
}

pub(super) fn query(qp: *mut ibv_qp) -> Check<(ibv_qp_attr, ibv_qp_init_attr)> {
    let mut attr = ibv_qp_attr::default();
    let mut init = ibv_qp_init_attr::default();
    // SAFETY: the queue pair lives, and there is room for the answers.
    let result = unsafe { ibv_query_qp(qp, &mut attr, 0x1f_ffff, &mut init) };
    well(result, "ibv_query_qp")?;
    Ok((attr, init))
}

/// Waits until a queue pair is in a state.
pub(super) fn in_state(qp: *mut ibv_qp, state: u32) -> Check {
    let deadline = Instant::now() + PATIENCE;
    while query(qp)?.0.qp_state != state && Instant::now() < deadline {}
    expect!(query(qp)?.0.qp_state, state, "the state");
    Ok(())
}

fn unnamed_domain(rig: &Rig) -> Check {
    let said = rig.without_domain(rig.cq(16)?)?;
    expect!(said, libc::EINVAL, "ibv_create_qp_ex without a domain");
    Ok(())
}

fn queries(rig: &Rig) -> Check {
    let pair = rig.pair()?;
    let (attr, init) = query(pair.a)?;
    expect!(attr.qp_state, IBV_QPS_RTS, "state");
    expect!(attr.path_mtu, IBV_MTU_1024, "path MTU");
    // SAFETY: the queue pair lives.
    expect!(attr.dest_qp_num, unsafe { (*pair.b).qp_num }, "peer");
    expect!(
        (attr.timeout, attr.retry_cnt, attr.rnr_retry),
        (14, 7, 7),
        "retries"
    );
    expect!(
        (attr.max_rd_atomic, attr.max_dest_rd_atomic),
        (4, 4),
        "reads"
    );
    expect!(attr.min_rnr_timer, 1, "RNR timer");
    expect!(
        attr.qp_access_flags & RIGHTS,
        RIGHTS & !IBV_ACCESS_MW_BIND,
        "rights"
    );
    // SAFETY: all members of the union are plain bytes.
    let (asked, told) = unsafe { (rig.context.gid.raw, attr.ah_attr.grh.dgid.raw) };
    expect!(told, asked, "GID of the path");
    expect!(init.cap.max_send_wr >= 128, true, "room for sends");
    expect!(init.cap.max_recv_wr >= 64, true, "room for receives");
    expect!((attr.sq_psn, attr.rq_psn), (7, 7), "sequence numbers");
    for _ in 0..3 {
        rig.write(pair.a, 2000)?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "a write")?;
    }
    // Two packets each.
    expect!(query(pair.a)?.0.sq_psn, 13, "sequence number after writes");
    expect!(query(pair.b)?.0.rq_psn, 13, "expected number after writes");
    to_state(pair.a, IBV_QPS_ERR)?;
    expect!(query(pair.a)?.0.qp_state, IBV_QPS_ERR, "state in error");
    Ok(())
}

/// The peer refuses; afterwards the queue pair is of no use.
pub(super) fn refused(rig: &Rig, pair: &Pair, what: &str) -> Check {
    rig.ends(pair.cq, IBV_WC_REM_ACCESS_ERR, what)?;
    Ok(())
}

pub(super) fn window(rig: &Rig, kind: u32) -> Check<*mut ibv_mw> {
    // SAFETY: the domain lives.
    let mw = unsafe {
        match (*rig.raw()).ops.alloc_mw {
            Some(alloc) => alloc(rig.pd, kind),
            None => ptr::null_mut(),
        }
    };
    made(mw, "ibv_alloc_mw")
}

fn bind1(rig: &Rig, pair: &Pair, mw: *mut ibv_mw, offset: u64, length: u64) -> Check {
    let place = ibv_mw_bind_info {
        mr: rig.mr,
        addr: rig.buffer.address() + offset,
        length,
        mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
    };
    bind1_to(rig, pair, mw, place)
}

/// Binds a window of type 1 through the second of the queue pairs, and waits for that.
pub(super) fn bind1_to(
    rig: &Rig,
    pair: &Pair,
    mw: *mut ibv_mw,
    bind_info: ibv_mw_bind_info,
) -> Check {
    let mut bind = ibv_mw_bind {
        wr_id: 5,
        send_flags: IBV_SEND_SIGNALED,
        bind_info,
    };
    // SAFETY: all objects live.
    let result = unsafe {
        match (*rig.raw()).ops.bind_mw {
            Some(call) => call(pair.b, mw, &mut bind),
            None => libc::ENOSYS,
        }
    };
    well(result, "ibv_bind_mw")?;
    let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "the bind")?;
    expect!((wc.opcode, wc.wr_id), (IBV_WC_BIND_MW, 5), "completion");
    Ok(())
}

pub(super) fn close_window(rig: &Rig, mw: *mut ibv_mw) -> Check {
    // SAFETY: the window lives and is not used afterwards.
    let result = unsafe {
        match (*rig.raw()).ops.dealloc_mw {
            Some(dealloc) => dealloc(mw),
            None => libc::ENOSYS,
        }
    };
    well(result, "ibv_dealloc_mw")
}

fn window1(rig: &Rig) -> Check {
    let mw = window(rig, IBV_MW_TYPE_1)?;
    let base = rig.buffer.address();
    // SAFETY: the window lives.
    let key = || unsafe { (*mw).rkey };
    let pair = rig.pair()?;
    bind1(rig, &pair, mw, 32768, 4096)?;
    let first = key();
    rig.set(0, &[7; 100])?;
    rig.write_to(pair.a, 100, base + 32768 + 3996, first)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write into the window")?;
    expect!(
        rig.get(32768 + 3996, 100)?,
        vec![7; 100],
        "what was written"
    );
    rig.write_to(pair.a, 100, base + 32768 + 3997, first)?;
    refused(rig, &pair, "a write past the window")?;
    // Bound to another place the old key is no good any more.
    let pair = rig.pair()?;
    bind1(rig, &pair, mw, 40960, 4096)?;
    expect!(key() != first, true, "another key");
    rig.write_to(pair.a, 100, base + 32768, first)?;
    refused(rig, &pair, "a write with the old key")?;
    // And unbound none is.
    let pair = rig.pair()?;
    let second = key();
    bind1(rig, &pair, mw, 0, 0)?;
    rig.write_to(pair.a, 100, base + 40960, second)?;
    refused(rig, &pair, "a write into no window")?;
    close_window(rig, mw)
}

pub(super) fn bind2(rig: &Rig, pair: &Pair, mw: *mut ibv_mw, rkey: u32) -> Check {
    let mut wr = work(IBV_WR_BIND_MW);
    wr.__bindgen_anon_2.bind_mw.mw = mw;
    wr.__bindgen_anon_2.bind_mw.rkey = rkey;
    wr.__bindgen_anon_2.bind_mw.bind_info = ibv_mw_bind_info {
        mr: rig.mr,
        addr: rig.buffer.address() + 32768,
        length: 4096,
        mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
    };
    rig.send(pair.b, wr, (0, 0, 0))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "the bind")?;
    Ok(())
}

/// The key of the next binding of a window: only its instance changes, the last byte.
fn next_key(rkey: u32) -> u32 {
    (rkey & !0xff) | u32::from((rkey as u8).wrapping_add(1))
}

fn window2(rig: &Rig) -> Check {
    let base = rig.buffer.address() + 32768;
    // Invalidated by its owner, then by the peer.
    for by_peer in [false, true] {
        let mw = window(rig, IBV_MW_TYPE_2)?;
        let pair = rig.pair()?;
        // SAFETY: the window lives.
        let key = unsafe { next_key((*mw).rkey) };
        bind2(rig, &pair, mw, key)?;
        rig.write_to(pair.a, 100, base, key)?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "a write into the window")?;
        if by_peer {
            rig.recv(pair.b, 9)?;
            let mut wr = work(IBV_WR_SEND_WITH_INV);
            wr.__bindgen_anon_1.invalidate_rkey = key;
            rig.send(pair.a, wr, (rig.buffer.address(), 10, rig.lkey()))?;
            let mut received = false;
            for _ in 0..2 {
                let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "send with invalidate")?;
                if wc.opcode == IBV_WC_RECV {
                    received = true;
                    expect!(wc.wc_flags & IBV_WC_WITH_INV, IBV_WC_WITH_INV, "flag");
                    // SAFETY: the flag says which member counts.
                    let told = unsafe { wc.__bindgen_anon_1.invalidated_rkey };
                    expect!(told, key, "the key told");
                }
            }
            expect!(received, true, "the receive completed");
        } else {
            let mut wr = work(IBV_WR_LOCAL_INV);
            wr.__bindgen_anon_1.invalidate_rkey = key;
            rig.send(pair.b, wr, (0, 0, 0))?;
            rig.ends(pair.cq, IBV_WC_SUCCESS, "local invalidate")?;
        }
        rig.write_to(pair.a, 100, base, key)?;
        refused(rig, &pair, "a write into a window that is closed")?;
    }
    // A window of this type is the queue pair's it was bound through.
    let mw = window(rig, IBV_MW_TYPE_2)?;
    let (pair, other) = (rig.pair()?, rig.pair()?);
    // SAFETY: the window lives.
    let key = unsafe { next_key((*mw).rkey) };
    bind2(rig, &pair, mw, key)?;
    rig.write_to(other.a, 100, base, key)?;
    refused(rig, &other, "a write through another queue pair")
}

fn rereg(rig: &Rig) -> Check {
    let other = Buffer::new(LENGTH, BufferKind::Plain).map_err(|errno| errno.to_string())?;
    let region = |address: u64| {
        // SAFETY: the memory lives as long as the rig.
        let mr = unsafe { ibv_reg_mr(rig.pd, address as *mut _, 8192, RIGHTS as i32) };
        made(mr, "ibv_reg_mr")
    };
    let change = |mr, flags: u32, pd, address: u64, access: u32| {
        // SAFETY: all objects and the memory live.
        let result =
            unsafe { ibv_rereg_mr(mr, flags as i32, pd, address as *mut _, 8192, access as i32) };
        well(result, "ibv_rereg_mr")
    };
    // SAFETY: the region lives.
    let key = |mr: *mut ibv_mr| unsafe { (*mr).rkey };
    let target = rig.buffer.address() + 32768;
    rig.set(0, &[9; 64])?;
    let pair = rig.pair()?;
    let null = ptr::null_mut();

    let mr = region(target)?;
    change(
        mr,
        IBV_REREG_MR_CHANGE_TRANSLATION,
        null,
        other.address(),
        0,
    )?;
    rig.write_to(pair.a, 64, other.address() + 8128, key(mr))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write to the new memory")?;
    let mut got = [0; 64];
    other
        .read(8128, &mut got)
        .map_err(|errno| errno.to_string())?;
    expect!(got, [9; 64], "what was written to the new memory");
    expect!(rig.get(32768 + 8128, 64)?, vec![0; 64], "the old memory");
    rig.write_to(pair.a, 64, target, key(mr))?;
    refused(rig, &pair, "a write to the old memory")?;

    let pair = rig.pair()?;
    let mr = region(target)?;
    let less = RIGHTS & !IBV_ACCESS_REMOTE_WRITE;
    change(mr, IBV_REREG_MR_CHANGE_ACCESS, null, 0, less)?;
    rig.write_to(pair.a, 64, target, key(mr))?;
    refused(rig, &pair, "a write to a region that lost the right")?;
    let pair = rig.pair()?;
    change(mr, IBV_REREG_MR_CHANGE_ACCESS, null, 0, RIGHTS)?;
    rig.write_to(pair.a, 64, target, key(mr))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write with the right back")?;

    // SAFETY: the context is open.
    let pd = made(unsafe { ibv_alloc_pd(rig.raw()) }, "ibv_alloc_pd")?;
    change(mr, IBV_REREG_MR_CHANGE_PD, pd, 0, 0)?;
    rig.write_to(pair.a, 64, target, key(mr))?;
    refused(rig, &pair, "a write to a region of another domain")?;

    let pair = rig.pair()?;
    let all = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    change(mr, all, rig.pd, other.address() + 8192, RIGHTS)?;
    rig.write_to(pair.a, 64, other.address() + 8192, key(mr))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write after all was changed")?;
    rig.write_to(pair.a, 64, other.address() + 16384, key(mr))?;
    refused(rig, &pair, "a write past the new memory")?;
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")?;

    // A region whose pages come and go stays what it is.
    let Some((_buffer, mr)) = rig.on_demand()? else {
        return Ok(());
    };
    for (flags, access) in [
        (IBV_REREG_MR_CHANGE_TRANSLATION, 0),
        (IBV_REREG_MR_CHANGE_PD, 0),
        (IBV_REREG_MR_CHANGE_ACCESS, RIGHTS as i32),
    ] {
        let address = other.address() as *mut _;
        // SAFETY: all objects and the memory live.
        let result = unsafe { ibv_rereg_mr(mr, flags as i32, rig.pd, address, 8192, access) };
        let why = errno();
        expect!(
            (result, why),
            (IBV_REREG_MR_ERR_CMD, libc::EOPNOTSUPP),
            "ibv_rereg_mr of memory on demand, flags {flags}"
        );
    }
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")
}

/// Memory of the device, of [`DeviceMemory::LENGTH`] bytes.
pub(super) struct DeviceMemory<'r> {
    rig: &'r Rig,
    dm: *mut ibv_dm,
    free: unsafe extern "C" fn(*mut ibv_dm) -> libc::c_int,
}

impl<'r> DeviceMemory<'r> {
    pub(super) const LENGTH: usize = 8192;

    /// Skips a check where there is none.
    pub(super) fn new(rig: &'r Rig) -> Check<Self> {
        let verbs = rig.extended();
        let (Some(alloc), Some(free)) = (verbs.alloc_dm, verbs.free_dm) else {
            return Err(Outcome::Skipped("device memory is not offered".into()));
        };
        let mut attr = ibv_alloc_dm_attr {
            length: Self::LENGTH,
            log_align_req: 0,
            comp_mask: 0,
        };
        // SAFETY: the context is open and the attributes complete.
        let dm = made(unsafe { alloc(rig.raw(), &mut attr) }, "ibv_alloc_dm")?;
        Ok(Self { rig, dm, free })
    }

    /// Registers all of it, from address zero on, with every right that memory of the device can have.
    pub(super) fn register(&self) -> Check<*mut ibv_mr> {
        let access = RIGHTS & !IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED;
        let register = self.rig.extended().reg_dm_mr;
        let register = register.ok_or("device memory cannot be registered")?;
        // SAFETY: domain and memory live: whoever has this has not freed it.
        let mr = unsafe { register(self.rig.pd, self.dm, 0, Self::LENGTH, access) };
        made(mr, "ibv_reg_dm_mr")
    }

    /// Has the processor write some of it.
    pub(super) fn set(&self, at: u64, bytes: &[u8]) -> Check {
        // SAFETY: the memory lives, and the bytes are as many as said.
        let copied = unsafe {
            (*self.dm).memcpy_to_dm.map_or(libc::ENOSYS, |copy| {
                copy(self.dm, at, bytes.as_ptr().cast(), bytes.len())
            })
        };
        well(copied, "ibv_memcpy_to_dm")
    }

    /// Has the processor read some of it.
    pub(super) fn get(&self, at: u64, length: usize) -> Check<Vec<u8>> {
        let mut bytes = vec![0; length];
        // SAFETY: the memory lives, and there is room for as many bytes as said.
        let copied = unsafe {
            (*self.dm).memcpy_from_dm.map_or(libc::ENOSYS, |copy| {
                copy(bytes.as_mut_ptr().cast(), self.dm, at, length)
            })
        };
        well(copied, "ibv_memcpy_from_dm")?;
        Ok(bytes)
    }

    /// Gives it back, which has no region any more.
    pub(super) fn free(self) -> Check {
        // SAFETY: the memory lives, and nobody has it afterwards.
        well(unsafe { (self.free)(self.dm) }, "ibv_free_dm")
    }
}

fn device_memory(rig: &Rig) -> Check {
    let memory = DeviceMemory::new(rig)?;
    let mr = memory.register()?;
    memory.set(4096, &[0x5a; 256])?;
    let pair = rig.pair()?;
    // SAFETY: the region lives.
    let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
    let mut read = work(IBV_WR_RDMA_READ);
    read.wr.rdma.remote_addr = 4096;
    read.wr.rdma.rkey = rkey;
    rig.send(pair.a, read, (rig.buffer.address() + 1000, 256, rig.lkey()))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a read of device memory")?;
    expect!(rig.get(1000, 256)?, vec![0x5a; 256], "what was read");
    // From device memory to device memory, and out of it by the processor.
    let mut write = work(IBV_WR_RDMA_WRITE);
    write.wr.rdma.remote_addr = 64;
    write.wr.rdma.rkey = rkey;
    rig.send(pair.a, write, (4096, 256, lkey))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write from and to device memory")?;
    expect!(memory.get(64, 256)?, vec![0x5a; 256], "what was written");
    rig.write_to(pair.a, 64, 8192 - 63, rkey)?;
    refused(rig, &pair, "a write past device memory")?;
    if shares(rig)? {
        // SAFETY: domain and region live.
        let shared = unsafe { direct::reg_shared_mr(rig.pd, mr, IBV_ACCESS_REMOTE_READ) };
        must_fail(shared, libc::EINVAL, "a share of device memory")?;
    }
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")?;
    memory.free()
}

/// The argument of the request that makes a DMA buffer of a memory file.
#[repr(C)]
struct UdmabufCreate {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// `_IOW('u', 0x42, struct udmabuf_create)`.
const UDMABUF_CREATE: libc::c_ulong =
    (1 << 30) | (24 << 16) | ((b'u' as libc::c_ulong) << 8) | 0x42;

fn dmabuf(rig: &Rig) -> Check {
    const SIZE: usize = 32768;
    // SAFETY: the calls get what they expect; the descriptors stay open until the program ends.
    let (fd, memory) = unsafe {
        let device = libc::open(c"/dev/udmabuf".as_ptr(), libc::O_RDWR);
        if device < 0 {
            return Err(Outcome::Skipped("there is no /dev/udmabuf".into()));
        }
        let file = libc::memfd_create(c"verbs-check".as_ptr(), libc::MFD_ALLOW_SEALING);
        libc::ftruncate(file, SIZE as i64);
        libc::fcntl(file, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK);
        let mut create = UdmabufCreate {
            memfd: file as u32,
            flags: 0,
            offset: 0,
            size: SIZE as u64,
        };
        let fd = libc::ioctl(device, UDMABUF_CREATE, &raw mut create);
        if fd < 0 {
            return Err(format!("UDMABUF_CREATE: {}", Errno(errno())).into());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let memory = libc::mmap(ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, file, 0);
        (fd, memory.cast::<u8>())
    };
    let iova = 0x7000_0000_0000_u64;
    let access = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ) as i32;
    // SAFETY: the domain lives.
    let register = |offset, length| unsafe {
        ibv_reg_dmabuf_mr(rig.pd, offset, length, iova + offset, fd, access)
    };
    let mr = made(register(4096, 16384), "ibv_reg_dmabuf_mr")?;
    // SAFETY: the region lives.
    let rkey = unsafe { (*mr).rkey };
    let pair = rig.pair()?;
    rig.set(0, &[0xcd; 10000])?;
    rig.write_to(pair.a, 10000, iova + 4096 + 6384, rkey)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write to a DMA buffer")?;
    // SAFETY: the mapping has these bytes, which nobody changes now.
    let bytes = unsafe { std::slice::from_raw_parts(memory, SIZE) };
    let at = 4096 + 6384;
    let right = bytes[at..at + 10000].iter().all(|&byte| byte == 0xcd)
        && bytes[..at].iter().all(|&byte| byte == 0)
        && bytes[at + 10000..].iter().all(|&byte| byte == 0);
    expect!(
        right,
        true,
        "the buffer holds what was written, and nothing else"
    );
    let mut read = work(IBV_WR_RDMA_READ);
    read.wr.rdma.remote_addr = iova + at as u64 - 10;
    read.wr.rdma.rkey = rkey;
    rig.send(pair.a, read, (rig.buffer.address() + 20000, 20, rig.lkey()))?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a read of a DMA buffer")?;
    let mut expected = vec![0; 10];
    expected.extend([0xcd; 10]);
    expect!(rig.get(20000, 20)?, expected, "what was read");
    rig.write_to(pair.a, 64, iova + 4096 + 16384 - 63, rkey)?;
    refused(rig, &pair, "a write past the region")?;
    // More than the buffer has, and no buffer at all.
    let beyond = register(4096, SIZE);
    not_made(beyond, libc::EINVAL, "a region past the buffer")?;
    // SAFETY: the domain lives.
    let wrong = unsafe { ibv_reg_dmabuf_mr(rig.pd, 0, 4096, iova, 0, access) };
    not_made(wrong, libc::EINVAL, "a region of a file that is no buffer")?;
    let shared = shares(rig)?.then(|| {
        // SAFETY: domain and region live.
        unsafe { direct::reg_shared_mr(rig.pd, mr, access as u32) }
    });
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")?;
    if let Some(shared) = shared {
        let shared = shared.at("a share of a DMA buffer")?;
        let pair = rig.pair()?;
        rig.set(0, &[0xab; 100])?;
        // SAFETY: the region lives.
        let rkey = unsafe { (*shared).rkey };
        rig.write_to(pair.a, 100, iova + 4096, rkey)?;
        rig.ends(
            pair.cq,
            IBV_WC_SUCCESS,
            "a write by a share of a DMA buffer",
        )?;
        // SAFETY: the mapping has these bytes, which nobody changes now.
        let bytes = unsafe { std::slice::from_raw_parts(memory.add(4096), 100) };
        expect!(bytes, [0xab; 100], "what was written by the share");
        // SAFETY: the region lives and is not used afterwards.
        well(unsafe { ibv_dereg_mr(shared) }, "ibv_dereg_mr")?;
    }
    Ok(())
}

/// Whether regions can share memory here.
pub(super) fn shares(rig: &Rig) -> Check<bool> {
    // SAFETY: domain and region live, and the share is not used.
    unsafe {
        match direct::reg_shared_mr(rig.pd, rig.mr, 0) {
            Ok(shared) => well(ibv_dereg_mr(shared), "ibv_dereg_mr").map(|()| true),
            Err(Errno(libc::EOPNOTSUPP)) => Ok(false),
            Err(errno) => Err(format!("a share of a region: {errno}").into()),
        }
    }
}

fn concurrent_atomics(rig: &Rig) -> Check {
    const ROUNDS: u64 = 200;
    let pairs = [rig.pair()?, rig.pair()?];
    let counter = rig.buffer.address() + 40000;
    rig.set(40000, &0u64.to_ne_bytes())?;
    let mut seen = Vec::new();
    let mut posted = [0u64; 2];
    let mut done = [0u64; 2];
    while done != [ROUNDS; 2] {
        for (which, pair) in pairs.iter().enumerate() {
            // Both have several under way always.
            while posted[which] < ROUNDS && posted[which] - done[which] < 8 {
                let slot = which as u64 * 2048 + (posted[which] % 8) * 8;
                let mut wr = work(IBV_WR_ATOMIC_FETCH_AND_ADD);
                wr.wr_id = slot;
                wr.wr.atomic.remote_addr = counter;
                wr.wr.atomic.rkey = rig.rkey();
                wr.wr.atomic.compare_add = 1;
                rig.send(pair.a, wr, (rig.buffer.address() + slot, 8, rig.lkey()))?;
                posted[which] += 1;
            }
            let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "an addition")?;
            let value = rig.get(wc.wr_id as usize, 8)?;
            seen.push(u64::from_ne_bytes(value.try_into().unwrap_or_default()));
            done[which] += 1;
        }
    }
    seen.sort_unstable();
    let each_once = seen.iter().copied().eq(0..2 * ROUNDS);
    expect!(each_once, true, "every value was fetched once");
    let value = rig.get(40000, 8)?;
    expect!(value, (2 * ROUNDS).to_ne_bytes().to_vec(), "the sum");
    Ok(())
}

fn placement(rig: &Rig) -> Check {
    let cq = rig.cq(16)?;
    let flushable = (RIGHTS | IBV_ACCESS_FLUSH_GLOBAL) as i32;
    let address = rig.buffer.address() + 32768;
    // SAFETY: the memory lives as long as the rig.
    let mr = unsafe { ibv_reg_mr(rig.pd, address as *mut _, 4096, flushable) };
    let mr = made(mr, "ibv_reg_mr to be flushed")?;
    // SAFETY: the region lives.
    let rkey = unsafe { (*mr).rkey };
    let how = Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq,
        operations: IBV_QP_EX_WITH_ATOMIC_WRITE | IBV_QP_EX_WITH_FLUSH,
    };
    let post = |pair: &Pair, store: Option<u64>, key: u32, placement: u32| -> Check {
        let qp: *mut ibv_qp_ex = pair.a.cast();
        // SAFETY: the queue pair was made with these operations, which are called in the order the
        // verbs demand.
        let result = unsafe {
            let calls = ptr::read(qp);
            let (Some(start), Some(write), Some(flush), Some(complete)) = (
                calls.wr_start,
                calls.wr_atomic_write,
                calls.wr_flush,
                calls.wr_complete,
            ) else {
                return Err("the calls are not there".into());
            };
            start(qp);
            (*qp).wr_flags = IBV_SEND_SIGNALED;
            match store {
                Some(value) => write(qp, key, address + 8, value.to_ne_bytes().as_ptr().cast()),
                None => flush(
                    qp,
                    key,
                    address,
                    4096,
                    placement as u8,
                    IBV_FLUSH_RANGE as u8,
                ),
            }
            complete(qp)
        };
        well(result, "ibv_wr_complete")
    };
    let pair = rig.pair_of(how)?;
    for value in [1u64, u64::MAX, 0x0102_0304_0506_0708] {
        post(&pair, Some(value), rkey, 0)?;
        let wc = rig.ends(cq, IBV_WC_SUCCESS, "an atomic write")?;
        expect!(wc.opcode, IBV_WC_ATOMIC_WRITE, "its opcode");
        post(&pair, None, rkey, IBV_FLUSH_GLOBAL)?;
        let wc = rig.ends(cq, IBV_WC_SUCCESS, "a flush")?;
        expect!(wc.opcode, IBV_WC_FLUSH, "its opcode");
        expect!(
            rig.get(32776, 8)?,
            value.to_ne_bytes().to_vec(),
            "the value"
        );
    }
    // The other region cannot be flushed, and none for persistence.
    for (key, placement) in [(rig.rkey(), IBV_FLUSH_GLOBAL), (rkey, IBV_FLUSH_PERSISTENT)] {
        let pair = rig.pair_of(how)?;
        post(&pair, None, key, placement)?;
        refused(rig, &pair, "a flush without the right")?;
    }
    // SAFETY: the memory lives as long as the rig.
    let persistent = unsafe {
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_FLUSH_PERSISTENT;
        ibv_reg_mr(rig.pd, address as *mut _, 4096, access as i32)
    };
    not_made(persistent, libc::EOPNOTSUPP, "a region for persistence")
}

/// The time of the wall clock, in nanoseconds.
fn wall_clock() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_nanos() as u64)
}

/// The time of the device's clock, in ticks.
fn raw_clock(rig: &Rig) -> Check<u64> {
    let query = rig
        .extended()
        .query_rt_values
        .ok_or("no ibv_query_rt_values_ex at all")?;
    let mut values = ibv_values_ex {
        comp_mask: IBV_VALUES_MASK_RAW_CLOCK,
        ..Default::default()
    };
    // SAFETY: the context is open and there is room for the answer.
    let result = unsafe { query(rig.raw(), &mut values) };
    well(result, "ibv_query_rt_values_ex")?;
    expect!(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK, "values given");
    expect!(values.raw_clock.tv_sec, 0, "seconds of the raw clock");
    Ok(values.raw_clock.tv_nsec as u64)
}

/// What was done between two readings of a clock is stamped with a time between them. Who compares the clocks may lose
/// the processor meanwhile, and not know better for a while: then it is looked at anew.
fn timestamps(rig: &Rig) -> Check {
    for _ in 0..4 {
        match stamps_lie_between(rig) {
            Err(Outcome::Failed(why)) if why.contains("give or take") => {
                println!("# once more: {why}");
            }
            result => return result,
        }
    }
    stamps_lie_between(rig)
}

fn stamps_lie_between(rig: &Rig) -> Check {
    let query = rig
        .extended()
        .query_device_ex
        .ok_or("no ibv_query_device_ex at all")?;
    // SAFETY: zero is a valid value of all fields; the context is open, and there is room for the
    // answer.
    let attr = unsafe {
        let mut attr: ibv_device_attr_ex = std::mem::zeroed();
        let result = query(rig.raw(), ptr::null(), &mut attr, size_of_val(&attr));
        well(result, "ibv_query_device_ex")?;
        attr
    };
    if attr.completion_timestamp_mask == 0 {
        return Err(Outcome::Skipped("there are no timestamps".into()));
    }
    let khz = attr.hca_core_clock;
    expect!(khz > 0, true, "the clock has a frequency");
    let mut init = ibv_cq_init_attr_ex {
        cqe: 16,
        wc_flags: u64::from(
            IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
        ),
        ..Default::default()
    };
    let create = rig
        .extended()
        .create_cq_ex
        .ok_or("no ibv_create_cq_ex at all")?;
    // SAFETY: the context is open and the attributes are complete.
    let cq = unsafe { create(rig.raw(), &mut init) };
    let cq = made(cq, "ibv_create_cq_ex with times")?;
    let pair = rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq: cq.cast(),
        operations: 0,
    })?;
    // SAFETY: the queue lives, and has what it was made with.
    let operations = unsafe { &*cq };
    let (Some(start), Some(end), Some(ticks), Some(wall)) = (
        operations.start_poll,
        operations.end_poll,
        operations.read_completion_ts,
        operations.read_completion_wallclock_ns,
    ) else {
        return Err("operations that were asked for are not there".into());
    };
    // Clocks are compared by asking the device for its time, and no better than that takes.
    let before = wall_clock();
    for _ in 0..5 {
        raw_clock(rig)?;
    }
    let leeway = wall_clock() - before;
    let began = Instant::now();
    let (first_raw, mut last_raw, mut rounds) = (raw_clock(rig)?, 0, 0);
    // The device reads its clock when it is asked, and may be long in answering.
    let first_known = began.elapsed();
    let (mut last_asked, mut last_known) = (first_known, first_known);
    // Longer than the two clocks are taken to agree without being compared.
    while began.elapsed() < Duration::from_millis(2500) {
        let (raw_before, wall_before) = (raw_clock(rig)?, wall_clock());
        expect!(raw_before >= last_raw, true, "the clock goes on");
        rig.write(pair.a, 64)?;
        let deadline = Instant::now() + PATIENCE;
        // SAFETY: the queue lives; its operations are called in the order the verbs demand.
        let (raw, time) = unsafe {
            let mut attr = ibv_poll_cq_attr::default();
            loop {
                match start(cq, &mut attr) {
                    0 => break,
                    libc::ENOENT if Instant::now() < deadline => {}
                    other => return Err(format!("ibv_start_poll: {}", Errno(other)).into()),
                }
            }
            let times = (ticks(cq), wall(cq));
            end(cq);
            times
        };
        last_asked = began.elapsed();
        let (raw_after, wall_after) = (raw_clock(rig)?, wall_clock());
        last_known = began.elapsed();
        expect!(
            (raw_before..=raw_after).contains(&raw),
            true,
            "{raw} between {raw_before} and {raw_after}"
        );
        expect!(
            (wall_before - leeway..=wall_after + leeway).contains(&time),
            true,
            "{time} between {wall_before} and {wall_after}, give or take {leeway}"
        );
        last_raw = raw_after;
        rounds += 1;
    }
    expect!(rounds > 0, true, "a round was done");
    // Kilohertz by milliseconds; the processor's clock may be slewed.
    let ticks_of = |time: Duration| time.as_millis() as u64 * khz;
    let least = ticks_of(last_asked - first_known) / 10 * 9;
    let most = ticks_of(last_known) / 10 * 11;
    let counted = last_raw - first_raw;
    expect!(
        (least..=most).contains(&counted),
        true,
        "{counted} ticks where {least} to {most} were due"
    );
    Ok(())
}

fn resize_cq(rig: &Rig) -> Check {
    let pair = rig.pair()?;
    let (mut posted, mut done) = (0u64, 0u64);
    for round in 0..40 {
        while posted - done < 100 {
            let mut wr = work(IBV_WR_RDMA_WRITE);
            wr.wr_id = posted;
            wr.wr.rdma.remote_addr = rig.buffer.address() + 32768;
            wr.wr.rdma.rkey = rig.rkey();
            rig.send(pair.a, wr, (rig.buffer.address(), 3000, rig.lkey()))?;
            posted += 1;
        }
        // SAFETY: the queue lives.
        let result = unsafe { ibv_resize_cq(pair.cq, if round % 2 == 0 { 2000 } else { 200 }) };
        well(result, "ibv_resize_cq")?;
        for _ in 0..60 {
            let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "a write")?;
            expect!(wc.wr_id, done, "order of completions");
            done += 1;
        }
    }
    while done < posted {
        let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "a write")?;
        expect!(wc.wr_id, done, "order of completions");
        done += 1;
    }
    Ok(())
}

fn shared(rig: &Rig) -> Check {
    let mut attr = ibv_srq_init_attr {
        srq_context: ptr::null_mut(),
        attr: ibv_srq_attr {
            max_wr: 16,
            max_sge: 1,
            srq_limit: 0,
        },
    };
    // SAFETY: the domain lives and the attributes are complete.
    let srq = unsafe { ibv_create_srq(rig.pd, &mut attr) };
    let srq = made(srq, "ibv_create_srq")?;
    let change = |max_wr, srq_limit, mask: u32| {
        let mut attr = ibv_srq_attr {
            max_wr,
            max_sge: 0,
            srq_limit,
        };
        // SAFETY: the queue lives.
        unsafe { ibv_modify_srq(srq, &mut attr, mask as i32) }
    };
    let told = || {
        let mut attr = ibv_srq_attr::default();
        // SAFETY: the queue lives, and there is room for the answer.
        well(unsafe { ibv_query_srq(srq, &mut attr) }, "ibv_query_srq")?;
        Ok::<_, Outcome>(attr)
    };
    let pair = rig.pair_of(Made {
        kind: IBV_QPT_RC,
        srq,
        cq: rig.cq(512)?,
        operations: 0,
    })?;
    let (mut posted, mut received, mut waiting) = (0u64, 0u64, 0u64);
    let mut room = u64::from(told()?.max_wr);
    for (round, max_wr) in [64, 4, 256, 1, 32, 8].into_iter().enumerate() {
        while waiting < room {
            rig.recv_shared(srq, posted)
                .map_err(|errno| format!("ibv_post_srq_recv: {}", Errno(errno)))?;
            posted += 1;
            waiting += 1;
        }
        expect!(
            rig.recv_shared(srq, 0),
            Err(libc::ENOMEM),
            "a post too many"
        );
        // A limit that is reached by the sends below, once.
        well(change(0, waiting as u32, IBV_SRQ_LIMIT), "limit")?;
        expect!(u64::from(told()?.srq_limit), waiting, "limit told");
        // So many that the rest fits in the new size; they are on their way while it changes.
        let messages = waiting.saturating_sub(max_wr).max(1);
        let mut sent = 0;
        let mut done = 0;
        while done < messages {
            while sent < messages && sent - done < 50 {
                let wr = work(IBV_WR_SEND);
                rig.send(pair.a, wr, (rig.buffer.address(), 5000, rig.lkey()))?;
                sent += 1;
            }
            let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "a message")?;
            if wc.opcode == IBV_WC_RECV {
                expect!(wc.wr_id, received, "order of receives");
                received += 1;
                done += 1;
                if done == messages.div_ceil(2) && waiting <= max_wr {
                    well(change(max_wr as u32, 0, IBV_SRQ_MAX_WR), "ibv_modify_srq")?;
                }
            }
        }
        waiting -= messages;
        well(change(max_wr as u32, 0, IBV_SRQ_MAX_WR), "ibv_modify_srq")?;
        room = u64::from(told()?.max_wr);
        expect!(room >= max_wr, true, "the size told");
        if waiting > 1 {
            let result = change(1, 0, IBV_SRQ_MAX_WR);
            expect!(result, libc::EINVAL, "a size that does not hold what waits");
        }
        let event = rig.context.async_event(PATIENCE);
        let event = event.map_err(|errno| errno.to_string())?;
        let code = event.map(|(code, _)| code);
        expect!(code, Some(IBV_EVENT_SRQ_LIMIT_REACHED), "event {round}");
        expect!(told()?.srq_limit, 0, "the limit afterwards");
        // The sends complete too, some after their receives.
        let deadline = Instant::now() + PATIENCE;
        while query(pair.a)?.0.sq_psn != query(pair.b)?.0.rq_psn && Instant::now() < deadline {}
        while rig.poll(pair.cq)?.is_some() {}
    }
    Ok(())
}

/// Posts two sends and two receives, then puts the queue pair in error: all come back in order.
fn flushed(rig: &Rig, qp: *mut ibv_qp, cq: *mut ibv_cq, sends: bool, name: &str) -> Check {
    for wr_id in [1, 2] {
        rig.recv(qp, wr_id)?;
        if sends {
            let mut wr = work(IBV_WR_SEND);
            wr.wr_id = 10 + wr_id;
            rig.send(qp, wr, (rig.buffer.address(), 64, rig.lkey()))?;
        }
    }
    to_state(qp, IBV_QPS_ERR)?;
    let (mut received, mut sent) = (Vec::new(), Vec::new());
    for _ in 0..if sends { 4 } else { 2 } {
        let wc = rig.ends(cq, IBV_WC_WR_FLUSH_ERR, name)?;
        if wc.wr_id > 10 {
            sent.push(wc.wr_id);
        } else {
            received.push(wc.wr_id);
        }
    }
    expect!(received, vec![1, 2], "order of receives");
    expect!(sent.is_empty() || sent == [11, 12], true, "order of sends");
    // And what is posted in error comes back at once.
    rig.recv(qp, 3)?;
    let wc = rig.ends(cq, IBV_WC_WR_FLUSH_ERR, "a receive posted in error")?;
    expect!(wc.wr_id, 3, "its name");
    rig.send(
        qp,
        work(IBV_WR_SEND),
        (rig.buffer.address(), 64, rig.lkey()),
    )?;
    rig.ends(cq, IBV_WC_WR_FLUSH_ERR, "a send posted in error")?;
    // After RESET nothing is left.
    to_state(qp, IBV_QPS_RESET)?;
    expect!(rig.poll(cq)?.is_none(), true, "the queue is empty");
    Ok(())
}

fn states(rig: &Rig) -> Check {
    let made_so = |cq| Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq,
        operations: 0,
    };
    let send = |qp| {
        let entry = (rig.buffer.address(), 64, rig.lkey());
        rig.post_send(qp, work(IBV_WR_SEND), entry)
    };
    // RESET: nothing may be posted.
    let cq = rig.cq(64)?;
    let (qp, peer) = (rig.qp(made_so(cq))?, rig.qp(made_so(cq))?);
    expect!(send(qp), libc::EINVAL, "a send in RESET");
    expect!(rig.post_recv(qp, 1), libc::EINVAL, "a receive in RESET");
    // INIT and RTR: receives only.
    to_init(rig, qp)?;
    expect!(send(qp), libc::EINVAL, "a send in INIT");
    flushed(rig, qp, cq, false, "a receive in INIT")?;
    to_init(rig, qp)?;
    to_rtr(rig, qp, peer)?;
    expect!(send(qp), libc::EINVAL, "a send in RTR");
    flushed(rig, qp, cq, false, "a receive in RTR")?;
    // RTS; the peer does not answer, so that nothing can have been sent well.
    to_init(rig, qp)?;
    to_rtr(rig, qp, peer)?;
    to_rts(qp)?;
    flushed(rig, qp, cq, true, "work in RTS")?;
    // SQD: what is posted waits, and goes on afterwards.
    let pair = rig.pair()?;
    to_state(pair.a, IBV_QPS_SQD)?;
    let deadline = Instant::now() + PATIENCE;
    while query(pair.a)?.0.sq_draining != 0 && Instant::now() < deadline {}
    rig.write(pair.a, 100)?;
    std::thread::sleep(Duration::from_millis(50));
    expect!(rig.poll(pair.cq)?.is_none(), true, "nothing is sent in SQD");
    to_state(pair.a, IBV_QPS_RTS)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "the write that waited")?;
    to_state(pair.a, IBV_QPS_SQD)?;
    flushed(rig, pair.a, pair.cq, true, "work in SQD")?;
    // SQE: a datagram queue pair whose send failed receives on, and sends again when told to.
    let cq = rig.cq(64)?;
    let qp = rig.qp(Made {
        kind: IBV_QPT_UD,
        ..made_so(cq)
    })?;
    to_init(rig, qp)?;
    start_datagrams(qp)?;
    let ah = handle(rig)?;
    rig.recv(qp, 1)?;
    datagram(rig, qp, ah, 64, 0xdead_be00)?;
    rig.ends(cq, IBV_WC_LOC_PROT_ERR, "a datagram from nowhere")?;
    expect!(query(qp)?.0.qp_state, IBV_QPS_SQE, "state");
    datagram(rig, qp, ah, 64, rig.lkey())?;
    rig.ends(cq, IBV_WC_WR_FLUSH_ERR, "a datagram in SQE")?;
    to_state(qp, IBV_QPS_RTS)?;
    datagram(rig, qp, ah, 64, rig.lkey())?;
    for _ in 0..2 {
        rig.ends(cq, IBV_WC_SUCCESS, "a datagram after SQE")?;
    }
    flushed_datagrams(rig, qp, cq)
}

/// More than a short event queue holds.
const FAILING: usize = 400;

fn failing_together(rig: &Rig) -> Check {
    let how = Made {
        kind: IBV_QPT_RC,
        srq: ptr::null_mut(),
        cq: rig.cq(2 * FAILING as i32)?,
        operations: 0,
    };
    let pairs: Vec<Pair> = (0..FAILING)
        .map(|_| rig.pair_of(how))
        .collect::<Check<_>>()?;
    // A key that nobody has.
    for pair in &pairs {
        rig.write_to(pair.a, 64, rig.buffer.address(), !rig.rkey())?;
    }
    for _ in &pairs {
        rig.ends(how.cq, IBV_WC_REM_ACCESS_ERR, "a write by a bad key")?;
    }
    // SAFETY: the queue pairs live.
    let number = |qp: *mut ibv_qp| unsafe { (*qp).qp_num };
    let mut untold: BTreeSet<u32> = pairs.iter().map(|pair| number(pair.b)).collect();
    let targets = untold.clone();
    while !untold.is_empty() {
        match rig.context.async_event(PATIENCE) {
            // Of a device that doubles its events, some come twice.
            Ok(Some((IBV_EVENT_QP_ACCESS_ERR, qpn))) if targets.contains(&qpn) => {
                untold.remove(&qpn);
            }
            Ok(Some((kind, qpn))) => {
                return Err(format!("event {kind} of queue pair {qpn}").into());
            }
            Ok(None) => return Err(format!("{} were not told", untold.len()).into()),
            Err(errno) => return Err(format!("ibv_get_async_event: {errno}").into()),
        }
    }
    let good = rig.pair()?;
    rig.write(good.a, 64)?;
    rig.ends(good.cq, IBV_WC_SUCCESS, "a write afterwards")?;
    Ok(())
}

pub fn failures(options: &Options, report: &mut Report, count: usize) {
    let result = Rig::new(options).and_then(|rig| all_fail(&rig, count));
    report.enter(
        &format!("failures: {count} queue pairs that fail at once raise one event each"),
        result,
    );
}

/// Queue pairs whose completion queue is too small for all of them: when it overflows it is dead, and whoever
/// completes there fails.
fn all_fail(rig: &Rig, count: usize) -> Check {
    let cq = rig.cq(16)?;
    let ah = handle(rig)?;
    let mut untold = BTreeMap::new();
    for _ in 0..count {
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ibv_qp_cap {
                max_send_wr: 2,
                max_recv_wr: 1,
                ..SMALL
            },
            qp_type: IBV_QPT_UD,
            sq_sig_all: 1,
            ..Default::default()
        };
        // SAFETY: the domain and the queue live.
        let qp = made(unsafe { ibv_create_qp(rig.pd, &mut attr) }, "ibv_create_qp")?;
        to_init(rig, qp)?;
        start_datagrams(qp)?;
        // SAFETY: the queue pair lives.
        untold.insert(unsafe { (*qp).qp_num }, qp);
    }
    println!("{count} queue pairs are about to fail");
    let all: Vec<*mut ibv_qp> = untold.values().copied().collect();
    // The first have room for one completion, but none for two.
    for _ in 0..2 {
        for qp in &all {
            datagram(rig, *qp, ah, 8, rig.lkey())?;
        }
    }
    let mut dead = 0;
    while !untold.is_empty() {
        match rig.context.async_event(PATIENCE) {
            Ok(Some((IBV_EVENT_QP_FATAL, qpn))) if untold.remove(&qpn).is_some() => {}
            Ok(Some((IBV_EVENT_CQ_ERR, _))) => dead += 1,
            Ok(Some((kind, qpn))) => return Err(format!("event {kind} of {qpn}").into()),
            Ok(None) => return Err(format!("{} were not told", untold.len()).into()),
            Err(errno) => return Err(format!("ibv_get_async_event: {errno}").into()),
        }
    }
    expect!(dead, 1, "events of the completion queue");
    let more = rig.context.async_event(Duration::ZERO);
    expect!(more.map_err(|errno| errno.to_string())?, None, "one more");
    for qp in all {
        // SAFETY: it is not used any more.
        well(unsafe { ibv_destroy_qp(qp) }, "ibv_destroy_qp")?;
    }
    let good = rig.pair()?;
    rig.write(good.a, 64)?;
    rig.ends(good.cq, IBV_WC_SUCCESS, "a write afterwards")?;
    Ok(())
}

fn flushed_datagrams(rig: &Rig, qp: *mut ibv_qp, cq: *mut ibv_cq) -> Check {
    rig.recv(qp, 4)?;
    to_state(qp, IBV_QPS_ERR)?;
    let wc = rig.ends(cq, IBV_WC_WR_FLUSH_ERR, "a receive of a datagram")?;
    expect!(wc.wr_id, 4, "its name");
    Ok(())
}

fn start_datagrams(qp: *mut ibv_qp) -> Check {
    to_state(qp, IBV_QPS_RTR)?;
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        ..Default::default()
    };
    well(modify(qp, attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS")
}

fn handle(rig: &Rig) -> Check<*mut ibv_ah> {
    let mut path = rig.context.own_path();
    // SAFETY: the domain lives.
    made(unsafe { ibv_create_ah(rig.pd, &mut path) }, "ibv_create_ah")
}

fn datagram(rig: &Rig, qp: *mut ibv_qp, ah: *mut ibv_ah, length: u32, lkey: u32) -> Check {
    let mut wr = work(IBV_WR_SEND);
    wr.wr.ud.ah = ah;
    // SAFETY: the queue pair lives.
    wr.wr.ud.remote_qpn = unsafe { (*qp).qp_num };
    wr.wr.ud.remote_qkey = QKEY;
    rig.send(qp, wr, (rig.buffer.address(), length, lkey))
}

fn datagrams(rig: &Rig) -> Check {
    let port = rig.context.port_attr().map_err(|errno| errno.to_string())?;
    let most = 128u32 << port.active_mtu;
    let cq = rig.cq(64)?;
    let qp = rig.qp(Made {
        kind: IBV_QPT_UD,
        srq: ptr::null_mut(),
        cq,
        operations: 0,
    })?;
    to_init(rig, qp)?;
    start_datagrams(qp)?;
    let ah = handle(rig)?;
    rig.recv(qp, 1)?;
    datagram(rig, qp, ah, most, rig.lkey())?;
    for _ in 0..2 {
        let wc = rig.ends(cq, IBV_WC_SUCCESS, "the longest datagram")?;
        if wc.opcode == IBV_WC_RECV {
            expect!(wc.byte_len, most + 40, "what arrived");
        }
    }
    rig.recv(qp, 2)?;
    datagram(rig, qp, ah, most + 1, rig.lkey())?;
    rig.ends(cq, IBV_WC_LOC_LEN_ERR, "a datagram a byte longer")?;
    Ok(())
}

/// What the allocator of [`own_allocator`] knows and has seen.
struct Allocating<'r> {
    rig: &'r Rig,
    /// The queue whose memory is asked for or given back, or null.
    cq: Cell<*mut ibv_cq>,
    taken: Cell<u32>,
    given_back: Cell<u32>,
    trouble: Cell<u32>,
}

impl Allocating<'_> {
    /// Makes and ends something, and looks into the queue: whoever calls the allocator must not hold
    /// what that needs.
    fn use_verbs(&self) {
        let mut fine = self.rig.cq(4).is_ok_and(|cq| {
            // SAFETY: the queue was made just now.
            unsafe { ibv_destroy_cq(cq) == 0 }
        });
        let cq = self.cq.get();
        if !cq.is_null() {
            fine &= self.rig.poll(cq).is_ok_and(|wc| wc.is_none());
        }
        self.trouble.set(self.trouble.get() + u32::from(!fine));
    }
}

unsafe extern "C" fn allocate(
    _pd: *mut ibv_pd,
    context: *mut core::ffi::c_void,
    size: usize,
    alignment: usize,
    _kind: u64,
) -> *mut core::ffi::c_void {
    // SAFETY: the provider passes on what the domain was made with.
    let allocating = unsafe { &*context.cast::<Allocating<'_>>() };
    allocating.use_verbs();
    allocating.taken.set(allocating.taken.get() + 1);
    let mut memory = ptr::null_mut();
    // SAFETY: `memory` is a live local.
    match unsafe { libc::posix_memalign(&mut memory, alignment.max(4096), size) } {
        0 => memory,
        _ => ptr::null_mut(),
    }
}

unsafe extern "C" fn give_back(
    _pd: *mut ibv_pd,
    context: *mut core::ffi::c_void,
    memory: *mut core::ffi::c_void,
    _kind: u64,
) {
    // SAFETY: the provider passes on what the domain was made with.
    let allocating = unsafe { &*context.cast::<Allocating<'_>>() };
    allocating.use_verbs();
    allocating.given_back.set(allocating.given_back.get() + 1);
    // SAFETY: it comes from `allocate`, and nobody uses it any more.
    unsafe { libc::free(memory) };
}

fn own_allocator(rig: &Rig) -> Check {
    let make = rig
        .extended()
        .alloc_parent_domain
        .ok_or(Outcome::Skipped("there are no parent domains".into()))?;
    let allocating = Allocating {
        rig,
        cq: Cell::new(ptr::null_mut()),
        taken: Cell::new(0),
        given_back: Cell::new(0),
        trouble: Cell::new(0),
    };
    let mut attr = ibv_parent_domain_init_attr {
        pd: rig.pd,
        comp_mask: IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        alloc: Some(allocate),
        free: Some(give_back),
        pd_context: ptr::from_ref(&allocating).cast_mut().cast(),
        ..Default::default()
    };
    // SAFETY: the context is open, the domain lives, and what the allocator is given lives longer than
    // all that is made of it.
    unsafe {
        let pd = made(make(rig.raw(), &mut attr), "ibv_alloc_parent_domain")?;
        let cq = rig.cq(16)?;
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: SMALL,
            qp_type: IBV_QPT_RC,
            ..Default::default()
        };
        let qp = made(ibv_create_qp(pd, &mut attr), "ibv_create_qp")?;
        well(ibv_destroy_qp(qp), "ibv_destroy_qp")?;
        let mut attr = ibv_srq_init_attr {
            attr: ibv_srq_attr {
                max_wr: 16,
                max_sge: 1,
                srq_limit: 0,
            },
            ..Default::default()
        };
        let srq = made(ibv_create_srq(pd, &mut attr), "ibv_create_srq")?;
        well(ibv_destroy_srq(srq), "ibv_destroy_srq")?;
        let mut attr = ibv_cq_init_attr_ex {
            cqe: 16,
            comp_mask: IBV_CQ_INIT_ATTR_MASK_PD,
            parent_domain: pd,
            ..Default::default()
        };
        let create = rig
            .extended()
            .create_cq_ex
            .ok_or("no ibv_create_cq_ex at all")?;
        let cq = made(create(rig.raw(), &mut attr), "ibv_create_cq_ex")?.cast();
        allocating.cq.set(cq);
        well(ibv_resize_cq(cq, 64), "ibv_resize_cq")?;
        allocating.cq.set(ptr::null_mut());
        well(ibv_destroy_cq(cq), "ibv_destroy_cq")?;
        well(ibv_dealloc_pd(pd), "ibv_dealloc_pd")?;
    }
    expect!(
        allocating.trouble.get(),
        0,
        "verbs that failed in the allocator"
    );
    // The ring of a queue pair, that of a shared receive queue, two of a completion queue.
    expect!(allocating.taken.get(), 4, "how often it was asked");
    expect!(
        allocating.given_back.get(),
        allocating.taken.get(),
        "what was given back"
    );
    Ok(())
}

fn imports(rig: &Rig) -> Check {
    // SAFETY: the context is open; a descriptor of our own goes to the import.
    let (context, own) = unsafe {
        let fd = libc::dup((*rig.raw()).cmd_fd);
        (ibv_import_device(fd), (*rig.pd).handle)
    };
    let context = made(context, "ibv_import_device")?;
    // SAFETY: the context is open; handles that are none are refused.
    unsafe {
        let pd = made(ibv_import_pd(context, own), "ibv_import_pd")?;
        let mr = made(ibv_import_mr(pd, (*rig.mr).handle), "ibv_import_mr")?;
        expect!((*mr).lkey, rig.lkey(), "lkey of the imported region");
        expect!((*mr).rkey, rig.rkey(), "rkey of the imported region");
        if shares(rig)? {
            // What the maker knows of its place the importer asks the kernel for.
            let shared = direct::reg_shared_mr(pd, mr, IBV_ACCESS_REMOTE_READ);
            let shared = shared.at("a share of an imported region")?;
            expect!((*shared).length, (*mr).length, "length of the share");
            well(ibv_dereg_mr(shared), "ibv_dereg_mr")?;
            // Another context does not have it by the same name.
            let shared = direct::reg_shared_mr(rig.pd, mr, IBV_ACCESS_REMOTE_READ);
            must_fail(
                shared,
                libc::EINVAL,
                "a share of a region of another context",
            )?;
        }
        let none = ibv_import_pd(context, 99_999);
        not_made(none, libc::ENOENT, "an import of no domain")?;
        let none = ibv_import_mr(pd, 99_999);
        not_made(none, libc::ENOENT, "an import of no region")?;
        let none = ibv_import_dm(context, 99_999);
        not_made(none, libc::ENOENT, "an import of no memory")?;
        let cq = ibv_create_cq(context, 16, ptr::null_mut(), ptr::null_mut(), 0);
        made(cq, "ibv_create_cq through the import")?;
        well(ibv_destroy_cq(cq), "ibv_destroy_cq")?;
        ibv_unimport_mr(mr);
        ibv_unimport_pd(pd);
        well(ibv_close_device(context), "ibv_close_device")?;
    }
    // What was imported is as good as before.
    let pair = rig.pair()?;
    rig.write(pair.a, 100)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write after the import")?;
    Ok(())
}
