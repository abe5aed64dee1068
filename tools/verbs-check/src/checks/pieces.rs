// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lists on connections that are not reliable (UC) or extended (XRC), and pieces in memory of the device
//! and in memory whose pages come and go, in one process; and a device that goes while a queue pair
//! stands still after a registration that failed. All else of lists is in `lists`.

use std::ptr;
use std::time::{Duration, Instant};

use super::objects::{
    each_on_its_own, in_state, made, modify, refused, to_init, to_rtr, to_rts, to_state, well,
    work, Body, DeviceMemory, Pair, Rig, PATIENCE, RIGHTS,
};
use super::refusal::{next_key, vendor, wrong};
use crate::bench::status_name;
use crate::direct::{self, ListWork, DRAINS, LISTS, WC_REGISTER_LIST};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Change, Entry, Errno, Options};

pub fn run(options: &Options, report: &mut Report) {
    let checks: &[(&str, Body)] = &[
        ("on a connection that is not reliable", unreliable),
        ("that fail on such a connection", unreliable_fails),
        ("on an extended connection", extended),
        ("that fail on an extended connection", extended_fails),
        ("of memory of the device", device_memory),
        ("of pages that come and go, on UC", on_demand),
    ];
    each_on_its_own(options, report, "pieces: lists ", checks);
}

/// Rights of lists: of RIGHTS, those of windows are not for them.
const LIST_RIGHTS: u32 = RIGHTS & !IBV_ACCESS_MW_BIND;

/// Where lists begin.
const ADDRESS: u64 = 0x6000_0000_0ff3;

fn no_lists(errno: Errno, what: &str) -> Outcome {
    match errno.0 {
        libc::EOPNOTSUPP => Outcome::Skipped("there are no lists".into()),
        _ => Outcome::Failed(format!("{what}: {errno}")),
    }
}

/// A queue pair of `FERRITEDV_QP_*` flags.
fn qp(rig: &Rig, kind: u32, cq: *mut ibv_cq, flags: u32) -> Check<*mut ibv_qp> {
    let mut attr = ibv_qp_init_attr_ex {
        send_cq: cq,
        recv_cq: if kind == IBV_QPT_XRC_SEND {
            ptr::null_mut()
        } else {
            cq
        },
        cap: ibv_qp_cap {
            max_send_wr: 32,
            max_recv_wr: if kind == IBV_QPT_XRC_SEND { 0 } else { 16 },
            max_send_sge: 8,
            max_recv_sge: u32::from(kind != IBV_QPT_XRC_SEND),
            max_inline_data: 0,
        },
        qp_type: kind,
        sq_sig_all: 1,
        comp_mask: IBV_QP_INIT_ATTR_PD,
        pd: rig.pd,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and all objects live.
    unsafe { direct::create_qp(rig.raw(), &mut attr, flags) }
        .map_err(|errno| no_lists(errno, "ferritedv_create_qp"))
}

/// A list: its structure, and the key that it is to have.
struct List {
    mr: *mut ibv_mr,
    key: u32,
    pieces: Vec<Entry>,
}

impl List {
    fn new(rig: &Rig, pieces: Vec<Entry>) -> Check<Self> {
        // SAFETY: the domain lives.
        let mr = unsafe { direct::alloc_list(rig.pd, 8) }
            .map_err(|errno| no_lists(errno, "ferritedv_alloc_list"))?;
        // SAFETY: it was made just now.
        let key = next_key(unsafe { (*mr).rkey });
        Ok(Self { mr, key, pieces })
    }

    fn work(&self) -> ListWork {
        ListWork {
            wr_id: 31,
            flags: IBV_SEND_SIGNALED,
            key: self.key,
            access: LIST_RIGHTS,
            address: ADDRESS,
            pieces: self.pieces.clone(),
            ..ListWork::default()
        }
    }

    /// What posting says.
    fn post(&self, qp: *mut ibv_qp, work: &ListWork) -> i32 {
        // SAFETY: queue pair and key live.
        match unsafe { direct::post_list(qp, false, self.mr, work) } {
            Ok(()) => 0,
            Err(errno) => errno.0,
        }
    }

    fn register(&self, rig: &Rig, qp: *mut ibv_qp, cq: *mut ibv_cq) -> Check {
        well(self.post(qp, &self.work()), "ferritedv_post_register_list")?;
        let wc = rig.ends(cq, IBV_WC_SUCCESS, "the registration")?;
        expect!((wc.wr_id, wc.opcode), (31, WC_REGISTER_LIST), "completion");
        Ok(())
    }
}

/// Two pieces of the buffer's second half: the first ends where no page does.
fn two_pieces(rig: &Rig) -> Vec<Entry> {
    let base = rig.buffer.address();
    vec![
        (base + 40_000, 1001, rig.lkey()),
        (base + 50_000, 3000, rig.lkey()),
    ]
}

/// Bytes of those, and where they are.
const WHOLE: u32 = 4001;
const PLACES: [(usize, usize); 2] = [(40_000, 1001), (50_000, 3000)];

fn pattern(seed: u8) -> Vec<u8> {
    (0..WHOLE as usize)
        .map(|at| (at as u8).wrapping_mul(7) ^ seed)
        .collect()
}

/// The pieces have this, and what is beside them was not touched.
fn lies(rig: &Rig, bytes: &[u8]) -> Check {
    let all = rig.get(32_768, 32_768)?;
    let mut expected = vec![0xa5; 32_768];
    let mut from = 0;
    for (offset, length) in PLACES {
        expected[offset - 32_768..][..length].copy_from_slice(&bytes[from..from + length]);
        from += length;
    }
    expect!(
        all.iter().zip(&expected).position(|(a, b)| a != b),
        None,
        "first wrong byte"
    );
    Ok(())
}

/// The same, of what comes without an answer: some time later.
fn lies_soon(rig: &Rig, bytes: &[u8]) -> Check {
    let deadline = Instant::now() + PATIENCE;
    while lies(rig, bytes).is_err() && Instant::now() < deadline {}
    lies(rig, bytes)
}

/// Takes a connection that is not reliable to RTS.
fn connect_uc(rig: &Rig, qp: *mut ibv_qp, peer: *mut ibv_qp) -> Check {
    to_init(rig, qp)?;
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: IBV_MTU_1024,
        // SAFETY: the queue pair lives.
        dest_qp_num: unsafe { (*peer).qp_num },
        rq_psn: 7,
        ah_attr: rig.context.own_path(),
        ..Default::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    well(modify(qp, attr, mask), "to RTR")?;
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        sq_psn: 7,
        ..Default::default()
    };
    well(modify(qp, attr, IBV_QP_STATE | IBV_QP_SQ_PSN), "to RTS")
}

fn uc_pair(rig: &Rig, flags: u32) -> Check<Pair> {
    let cq = rig.cq(128)?;
    let a = qp(rig, IBV_QPT_UC, cq, flags)?;
    let b = qp(rig, IBV_QPT_UC, cq, flags)?;
    connect_uc(rig, a, b)?;
    connect_uc(rig, b, a)?;
    Ok(Pair { a, b, cq })
}

fn unreliable(rig: &Rig) -> Check {
    let pair = uc_pair(rig, LISTS)?;
    let mut list = List::new(rig, two_pieces(rig))?;
    let base = rig.buffer.address();
    for round in 0..3 {
        list.register(rig, pair.b, pair.cq)?;
        // The peer writes to it.
        let bytes = pattern(round);
        rig.set(0, &bytes)?;
        rig.set(32_768, &[0xa5; 32_768])?;
        rig.write_to(pair.a, WHOLE, ADDRESS, list.key)?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "the peer's write")?;
        lies_soon(rig, &bytes)?;
        // It is sent from here, in the order of its pieces, and before it is complete.
        let next = List {
            key: next_key(list.key),
            mr: list.mr,
            pieces: list.pieces.clone(),
        };
        rig.set(0, &[0; WHOLE as usize])?;
        let mut end = work(IBV_WR_LOCAL_INV);
        end.__bindgen_anon_1.invalidate_rkey = list.key;
        rig.send(pair.b, end, (0, 0, 0))?;
        well(next.post(pair.b, &next.work()), "a registration")?;
        let mut write = work(IBV_WR_RDMA_WRITE);
        write.wr.rdma.remote_addr = base;
        write.wr.rdma.rkey = rig.rkey();
        rig.send(pair.b, write, (ADDRESS, WHOLE, next.key))?;
        for opcode in [IBV_WC_LOCAL_INV, WC_REGISTER_LIST, IBV_WC_RDMA_WRITE] {
            let wc = rig.ends(pair.cq, IBV_WC_SUCCESS, "what was posted together")?;
            expect!(wc.opcode, opcode, "order of completions");
        }
        let deadline = Instant::now() + PATIENCE;
        while rig.get(0, WHOLE as usize)? != bytes && Instant::now() < deadline {}
        expect!(rig.get(0, WHOLE as usize)? == bytes, true, "what was sent");
        let mut end = work(IBV_WR_LOCAL_INV);
        end.__bindgen_anon_1.invalidate_rkey = next.key;
        rig.send(pair.b, end, (0, 0, 0))?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "the end of it")?;
        list.key = next_key(next.key);
    }
    // It does not exist with a message.
    let mut with_message = list.work();
    with_message.message = Some((vec![(base, 16, rig.lkey())], 0));
    let result = list.post(pair.b, &with_message);
    expect!(result, libc::EINVAL, "a list with a message");
    // A peer's write to what is not registered moves nothing, and says nothing either.
    rig.set(32_768, &[0xa5; 32_768])?;
    rig.write_to(pair.a, WHOLE, ADDRESS, list.key)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write to nothing")?;
    rig.write_to(pair.a, 8, base + 33_000, rig.rkey())?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write to the region")?;
    let deadline = Instant::now() + PATIENCE;
    let start = rig.get(0, 8)?;
    while rig.get(33_000, 8)? != start && Instant::now() < deadline {}
    rig.set(33_000, &[0xa5; 8])?;
    lies(rig, &[0xa5; WHOLE as usize])
}

/// A registration that fails: status and number of it.
fn fails(rig: &Rig, qp: *mut ibv_qp, cq: *mut ibv_cq) -> Check {
    let mut pieces = two_pieces(rig);
    pieces[1].2 = wrong(pieces[1].2);
    let list = List::new(rig, pieces)?;
    well(list.post(qp, &list.work()), "ferritedv_post_register_list")?;
    let wc = rig.wait(cq)?;
    expect!(
        (status_name(wc.status), wc.vendor_err),
        (status_name(IBV_WC_LOC_PROT_ERR), vendor::PIECE_REFUSED),
        "the failed registration"
    );
    Ok(())
}

/// It stops the send queue in its own way, and goes on when it is told to.
fn unreliable_fails(rig: &Rig) -> Check {
    for (flags, state) in [(LISTS, IBV_QPS_SQE), (LISTS | DRAINS, IBV_QPS_SQD)] {
        let pair = uc_pair(rig, flags)?;
        for _ in 0..3 {
            fails(rig, pair.b, pair.cq)?;
            in_state(pair.b, state)?;
            rig.write(pair.b, 64)?;
            rig.ends(pair.cq, IBV_WC_WR_FLUSH_ERR, "what is posted later")?;
            // Receives go on.
            rig.recv(pair.b, 3)?;
            let wr = work(IBV_WR_SEND);
            rig.send(pair.a, wr, (rig.buffer.address(), 64, rig.lkey()))?;
            for _ in 0..2 {
                rig.ends(pair.cq, IBV_WC_SUCCESS, "a message meanwhile")?;
            }
            to_state(pair.b, IBV_QPS_RTS)?;
            let list = List::new(rig, two_pieces(rig))?;
            list.register(rig, pair.b, pair.cq)?;
            let bytes = pattern(3);
            rig.set(0, &bytes)?;
            rig.set(32_768, &[0xa5; 32_768])?;
            rig.write_to(pair.a, WHOLE, ADDRESS, list.key)?;
            rig.ends(pair.cq, IBV_WC_SUCCESS, "the peer's write")?;
            lies_soon(rig, &bytes)?;
        }
    }
    Ok(())
}

/// An extended connection: where it begins and ends, and the shared receive queue there.
struct Extended {
    initiator: *mut ibv_qp,
    cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    srqn: u32,
}

fn extended_pair(rig: &Rig, flags: u32) -> Check<Extended> {
    let verbs = rig.extended();
    let (Some(open), Some(create_srq), Some(srq_number), Some(create_qp)) = (
        verbs.open_xrcd,
        verbs.create_srq_ex,
        verbs.get_srq_num,
        verbs.create_qp_ex,
    ) else {
        return Err(Outcome::Skipped(
            "extended connections are not offered".into(),
        ));
    };
    let mut attr = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        fd: -1,
        oflags: libc::O_CREAT,
    };
    // SAFETY: the context is open and the attributes complete.
    let xrcd = made(unsafe { open(rig.raw(), &mut attr) }, "ibv_open_xrcd")?;
    let cq = rig.cq(128)?;
    let mut attr = ibv_srq_init_attr_ex {
        attr: ibv_srq_attr {
            max_wr: 16,
            max_sge: 1,
            srq_limit: 0,
        },
        comp_mask: IBV_SRQ_INIT_ATTR_TYPE
            | IBV_SRQ_INIT_ATTR_PD
            | IBV_SRQ_INIT_ATTR_XRCD
            | IBV_SRQ_INIT_ATTR_CQ,
        srq_type: IBV_SRQT_XRC,
        pd: rig.pd,
        xrcd,
        cq,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and all objects live.
    let srq = unsafe { create_srq(rig.raw(), &mut attr) };
    let srq = made(srq, "ibv_create_srq_ex")?;
    let mut srqn = 0;
    // SAFETY: the queue lives, and there is room for its number.
    well(unsafe { srq_number(srq, &mut srqn) }, "ibv_get_srq_num")?;
    let mut attr = ibv_qp_init_attr_ex {
        qp_type: IBV_QPT_XRC_RECV,
        comp_mask: IBV_QP_INIT_ATTR_XRCD,
        xrcd,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and the domain lives.
    let target = unsafe { create_qp(rig.raw(), &mut attr) };
    let target = made(target, "ibv_create_qp_ex of a target")?;
    let initiator = qp(rig, IBV_QPT_XRC_SEND, cq, flags)?;
    to_init(rig, target)?;
    to_rtr(rig, target, initiator)?;
    to_init(rig, initiator)?;
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTR,
        path_mtu: IBV_MTU_1024,
        // SAFETY: the queue pair lives.
        dest_qp_num: unsafe { (*target).qp_num },
        rq_psn: 7,
        ah_attr: rig.context.own_path(),
        ..Default::default()
    };
    let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    well(modify(initiator, attr, mask), "to RTR")?;
    to_rts(initiator)?;
    Ok(Extended {
        initiator,
        cq,
        srq,
        srqn,
    })
}

fn extended(rig: &Rig) -> Check {
    let connection = extended_pair(rig, LISTS)?;
    let (qp, cq) = (connection.initiator, connection.cq);
    let mut list = List::new(rig, two_pieces(rig))?;
    // Peers reach it by any connection of the domain.
    let pair = rig.pair()?;
    for round in 0..3 {
        let bytes = pattern(round);
        list.register(rig, qp, cq)?;
        rig.set(0, &bytes)?;
        rig.set(32_768, &[0xa5; 32_768])?;
        rig.write_to(pair.a, WHOLE, ADDRESS, list.key)?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "a peer's write")?;
        lies(rig, &bytes)?;
        // And what is here is read into it, and written from it.
        rig.set(32_768, &[0xa5; 32_768])?;
        let mut read = work(IBV_WR_RDMA_READ);
        read.wr.rdma.remote_addr = rig.buffer.address();
        read.wr.rdma.rkey = rig.rkey();
        read.qp_type.xrc.remote_srqn = connection.srqn;
        rig.send(qp, read, (ADDRESS, WHOLE, list.key))?;
        rig.ends(cq, IBV_WC_SUCCESS, "a read")?;
        lies(rig, &bytes)?;
        rig.set(0, &[0; WHOLE as usize])?;
        let mut write = read;
        write.opcode = IBV_WR_RDMA_WRITE;
        rig.send(qp, write, (ADDRESS, WHOLE, list.key))?;
        rig.ends(cq, IBV_WC_SUCCESS, "a write")?;
        expect!(
            rig.get(0, WHOLE as usize)? == bytes,
            true,
            "what was written"
        );
        // Registered anew with a message to the shared receive queue, sent from the list itself.
        let mut end = work(IBV_WR_LOCAL_INV);
        end.__bindgen_anon_1.invalidate_rkey = list.key;
        rig.send(qp, end, (0, 0, 0))?;
        rig.ends(cq, IBV_WC_SUCCESS, "the end of it")?;
        list.key = next_key(list.key);
        let post = rig.recv_shared(connection.srq, 70);
        post.map_err(|errno| format!("ibv_post_srq_recv: {}", Errno(errno)))?;
        let mut told = list.work();
        told.message = Some((vec![(ADDRESS + 990, 50, list.key)], 0));
        told.remote_srqn = connection.srqn;
        well(
            list.post(qp, &told),
            "ferritedv_post_register_list_and_send",
        )?;
        let (mut sent, mut received) = (false, false);
        while !(sent && received) {
            let wc = rig.ends(cq, IBV_WC_SUCCESS, "the message")?;
            match wc.opcode {
                IBV_WC_SEND if !sent => sent = true,
                IBV_WC_RECV if !received => {
                    expect!((wc.wr_id, wc.byte_len), (70, 50), "the receive");
                    received = true;
                }
                other => return Err(format!("opcode {other}").into()),
            }
        }
        expect!(
            rig.get(32_768, 50)? == bytes[990..1040],
            true,
            "the message"
        );
        let mut end = work(IBV_WR_LOCAL_INV);
        end.__bindgen_anon_1.invalidate_rkey = list.key;
        rig.send(qp, end, (0, 0, 0))?;
        rig.ends(cq, IBV_WC_SUCCESS, "the end of it")?;
        list.key = next_key(list.key);
    }
    rig.write_to(pair.a, 64, ADDRESS, list.key)?;
    refused(rig, &pair, "a write to what has ended")
}

fn extended_fails(rig: &Rig) -> Check {
    let connection = extended_pair(rig, LISTS | DRAINS)?;
    let (qp, cq) = (connection.initiator, connection.cq);
    fails(rig, qp, cq)?;
    in_state(qp, IBV_QPS_SQD)?;
    to_state(qp, IBV_QPS_RTS)?;
    List::new(rig, two_pieces(rig))?.register(rig, qp, cq)?;
    let connection = extended_pair(rig, LISTS)?;
    fails(rig, connection.initiator, connection.cq)?;
    in_state(connection.initiator, IBV_QPS_ERR)
}

fn device_memory(rig: &Rig) -> Check {
    const LENGTH: usize = DeviceMemory::LENGTH;
    let memory = DeviceMemory::new(rig)?;
    let mr = memory.register()?;
    // SAFETY: the region lives.
    let lkey = unsafe { (*mr).lkey };
    let base = rig.buffer.address();
    // In turns: of the device, of the host, of the device over the end of a page.
    let list = List::new(
        rig,
        vec![
            (4, 1004, lkey),
            (base + 40_000, 2000, rig.lkey()),
            (4000, 996, lkey),
        ],
    )?;
    const ALL: usize = 4000;
    let cq = rig.cq(64)?;
    let owner = qp(rig, IBV_QPT_RC, cq, LISTS)?;
    let peer = qp(rig, IBV_QPT_RC, cq, 0)?;
    for (qp, peer) in [(owner, peer), (peer, owner)] {
        to_init(rig, qp)?;
        to_rtr(rig, qp, peer)?;
    }
    for qp in [owner, peer] {
        to_rts(qp)?;
    }
    list.register(rig, owner, cq)?;
    memory.set(0, &[0xa5; LENGTH])?;
    rig.set(32_768, &[0xa5; 16_384])?;
    let bytes: Vec<u8> = (0..ALL).map(|at| (at as u8).wrapping_mul(11)).collect();
    rig.set(0, &bytes)?;
    rig.write_to(peer, ALL as u32, ADDRESS, list.key)?;
    rig.ends(cq, IBV_WC_SUCCESS, "a write over all pieces")?;
    let mut expected = vec![0xa5; LENGTH];
    expected[4..1008].copy_from_slice(&bytes[..1004]);
    expected[4000..4996].copy_from_slice(&bytes[3004..]);
    let found = memory.get(0, LENGTH)?;
    expect!(found == expected, true, "memory of the device");
    let mut expected = vec![0xa5; 16_384];
    expected[40_000 - 32_768..][..2000].copy_from_slice(&bytes[1004..3004]);
    expect!(rig.get(32_768, 16_384)? == expected, true, "memory here");
    rig.set(0, &[0; ALL])?;
    let mut read = work(IBV_WR_RDMA_READ);
    read.wr.rdma.remote_addr = ADDRESS;
    read.wr.rdma.rkey = list.key;
    rig.send(peer, read, (base, ALL as u32, rig.lkey()))?;
    rig.ends(cq, IBV_WC_SUCCESS, "a read over all pieces")?;
    expect!(rig.get(0, ALL)? == bytes, true, "what was read");
    // Sent from it.
    rig.recv(peer, 5)?;
    rig.send(owner, work(IBV_WR_SEND), (ADDRESS, ALL as u32, list.key))?;
    for _ in 0..2 {
        rig.ends(cq, IBV_WC_SUCCESS, "a message of all pieces")?;
    }
    expect!(rig.get(32_768, ALL)? == bytes, true, "what was received");
    // A piece past the end of it is refused, and the list ends with the region.
    let over = List::new(rig, vec![(8000, 193, lkey)])?;
    let spare = qp(rig, IBV_QPT_RC, cq, LISTS)?;
    to_init(rig, spare)?;
    to_rtr(rig, spare, peer)?;
    to_rts(spare)?;
    well(
        over.post(spare, &over.work()),
        "ferritedv_post_register_list",
    )?;
    let wc = rig.wait(cq)?;
    expect!(
        (status_name(wc.status), wc.vendor_err),
        (status_name(IBV_WC_LOC_PROT_ERR), vendor::PIECE_REFUSED),
        "a piece past the end"
    );
    // SAFETY: the region lives and is not used afterwards.
    well(unsafe { ibv_dereg_mr(mr) }, "ibv_dereg_mr")?;
    // A part that does not reach the memory of the device.
    rig.write_to(peer, 16, ADDRESS + 1500, list.key)?;
    rig.ends(cq, IBV_WC_REM_ACCESS_ERR, "a write after its region ended")?;
    memory.free()
}

/// On a connection that does not send again: what comes to a page that is not there may be lost, and the
/// next is not.
fn on_demand(rig: &Rig) -> Check {
    let Some((buffer, mr)) = rig.on_demand()? else {
        return Err(Outcome::Skipped("there are no regions on demand".into()));
    };
    let pair = uc_pair(rig, LISTS)?;
    // SAFETY: the region lives.
    let lkey = unsafe { (*mr).lkey };
    let list = List::new(
        rig,
        vec![
            (rig.buffer.address() + 40_000, 100, rig.lkey()),
            (buffer.address() + 8000, 400, lkey),
        ],
    )?;
    list.register(rig, pair.b, pair.cq)?;
    let mut bytes = vec![0; 400];
    for round in 1..=3u8 {
        buffer
            .change(Change::Discard, 0, 16_384)
            .map_err(|errno| format!("madvise: {errno}"))?;
        rig.set(0, &[round; 500])?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            rig.write_to(pair.a, 500, ADDRESS, list.key)?;
            rig.ends(pair.cq, IBV_WC_SUCCESS, "a write")?;
            std::thread::sleep(Duration::from_millis(5));
            let read = buffer.read(8000, &mut bytes);
            read.map_err(|errno| errno.to_string())?;
            if bytes == [round; 400] {
                break;
            }
            if Instant::now() > deadline {
                return Err("nothing arrives".into());
            }
        }
        expect!(
            rig.get(40_000, 100)? == [round; 100],
            true,
            "the pinned piece"
        );
        // From there, pages that are not there are waited for.
        buffer
            .change(Change::Discard, 0, 16_384)
            .map_err(|errno| format!("madvise: {errno}"))?;
        rig.set(0, &[0xff; 500])?;
        let mut write = work(IBV_WR_RDMA_WRITE);
        write.wr.rdma.remote_addr = rig.buffer.address();
        write.wr.rdma.rkey = rig.rkey();
        rig.send(pair.b, write, (ADDRESS, 500, list.key))?;
        rig.ends(pair.cq, IBV_WC_SUCCESS, "a write from the list")?;
        let mut expected = vec![round; 100];
        expected.extend([0; 400]);
        let deadline = Instant::now() + PATIENCE;
        while rig.get(0, 500)? != expected && Instant::now() < deadline {}
        expect!(rig.get(0, 500)? == expected, true, "what was written");
    }
    Ok(())
}

/// A program whose send queue stands still after a registration that failed when the device goes: tells
/// when it may, and that everything ended as it must.
pub fn stopped(options: &Options) -> Check {
    let rig = Rig::new(options)?;
    let cq = rig.cq(64)?;
    let (a, b) = (
        qp(&rig, IBV_QPT_RC, cq, LISTS | DRAINS)?,
        qp(&rig, IBV_QPT_RC, cq, LISTS)?,
    );
    for (qp, peer) in [(a, b), (b, a)] {
        to_init(&rig, qp)?;
        to_rtr(&rig, qp, peer)?;
    }
    for qp in [a, b] {
        to_rts(qp)?;
    }
    let list = List::new(&rig, two_pieces(&rig))?;
    list.register(&rig, a, cq)?;
    rig.recv(a, 60)?;
    fails(&rig, a, cq)?;
    in_state(a, IBV_QPS_SQD)?;
    println!("ready for the device to go");
    let deadline = Instant::now() + PATIENCE;
    loop {
        match rig.context.async_event(Duration::from_millis(10)) {
            Ok(Some((IBV_EVENT_DEVICE_FATAL, _))) => break,
            Ok(_) if Instant::now() > deadline => {
                return Err("IBV_EVENT_DEVICE_FATAL does not come".into());
            }
            // The queue has drained.
            Ok(_) => {}
            Err(errno) => return Err(format!("no event but {errno}").into()),
        }
    }
    // It cannot be mended any more: that is told, in time.
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        ..Default::default()
    };
    expect!(modify(a, attr, IBV_QP_STATE) != 0, true, "it is told");
    // Posts and completions may fail, but not hang or crash.
    let _ = rig.write(a, 64);
    let _ = list.post(a, &list.work());
    let _ = rig.poll(cq)?;
    // SAFETY: the objects live, and are not used afterwards.
    let destroyed = unsafe {
        [
            ibv_destroy_qp(a),
            ibv_destroy_qp(b),
            ibv_destroy_cq(cq),
            ibv_dereg_mr(list.mr),
            ibv_dereg_mr(rig.mr),
        ]
    };
    expect!(
        destroyed.iter().all(|result| *result == 0),
        true,
        "{destroyed:?}"
    );
    println!("done");
    Ok(())
}
