// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! What the tests of several modules use: queue pairs that no kernel knows of, and a look at their
//! rings with the eyes of a device.

use core::ffi::c_int;
use core::mem::size_of;
use core::ptr;

use ferrite_abi::{
    opcode_part, AtomicPart, DatagramPart, ListPart, Plain, RemotePart, Reserved, SendHeader,
    SendOpcode, SendPart, UverbsContextResponse, BLOCK_SIZE, MAX_BLOCKS, MAX_PIECES, SEND_FENCE,
    SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
};

use crate::memory::Doorbells;
use crate::post::{post_recv, post_send};
use crate::qp::Qp;
use crate::sys::*;
use crate::wqe::Part;

/// Numbers by chance below a limit, the same each time: xorshift, from a seed that is not zero.
pub(crate) fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut random = seed;
    move |limit| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    }
}

/// What tests show to several threads: libibverbs gives programs pointers, which know no
/// thread.
pub(crate) struct Shared<'a, T>(pub(crate) &'a T);

impl<T> Clone for Shared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<'_, T> {}

// SAFETY: `Qp` and `Cq` are made to be used by threads at the same time; what is the consumer's
// to order in them, the tests order.
unsafe impl<T> Send for Shared<'_, T> {}

impl<T> core::ops::Deref for Shared<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

/// A page that stands for the doorbells.
pub(crate) struct Page(Vec<u64>);

impl Page {
    pub(crate) fn new() -> Self {
        Self(vec![0; ferrite_abi::DOORBELL_PAGE_SIZE / 8])
    }

    pub(crate) fn doorbells(&mut self) -> Doorbells {
        // SAFETY: the tests keep the page longer than the queues that ring in it.
        unsafe { Doorbells::new(self.0.as_mut_ptr().cast()) }
    }

    /// What a doorbell was last rung with.
    pub(crate) fn read(&self, offset: usize) -> u64 {
        let word = self.0.as_ptr().wrapping_add(offset / 8);
        // SAFETY: doorbells are in the page (`Doorbells::ring` has that checked in tests).
        unsafe { ptr::read_volatile(word) }
    }

    /// As [`Page::read`], and forgets it.
    pub(crate) fn take(&self, offset: usize) -> u64 {
        let value = self.read(offset);
        let word = self.0.as_ptr().wrapping_add(offset / 8).cast_mut();
        // SAFETY: as in `read`; only this thread uses the page.
        unsafe { ptr::write_volatile(word, 0) };
        value
    }
}

pub(crate) use crate::qp::tests::{ex, rc, registering, ud};

/// The limits of the device model.
pub(crate) fn limits() -> UverbsContextResponse {
    UverbsContextResponse {
        max_sge: ferrite_abi::MAX_SGE as u32,
        max_inline: ferrite_abi::MAX_INLINE as u32,
        sq_max_log_blocks: ferrite_abi::SQ_MAX_LOG_BLOCKS,
        rq_max_log_entries: ferrite_abi::RQ_MAX_LOG_ENTRIES,
        max_message: ferrite_abi::MAX_MESSAGE,
        ..UverbsContextResponse::zeroed()
    }
}

/// Capacities, in the order of their names in `ibv_qp_cap`.
pub(crate) fn cap(
    send_wr: u32,
    recv_wr: u32,
    send_sge: u32,
    recv_sge: u32,
    inline: u32,
) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: send_wr,
        max_recv_wr: recv_wr,
        max_send_sge: send_sge,
        max_recv_sge: recv_sge,
        max_inline_data: inline,
    }
}

/// The bytes of a work request, as the device fetches them from the ring.
pub(crate) fn fetch(qp: &Qp, index: u32) -> Vec<u8> {
    let block = |index: u32| {
        let at = qp.send_block(qp.layout.send.slot(index) as u32);
        // SAFETY: the block is inside the ring.
        unsafe { core::slice::from_raw_parts(at, BLOCK_SIZE) }.to_vec()
    };
    let header = SendHeader::from_prefix(&block(index)).unwrap();
    (0..u32::from(header.blocks))
        .flat_map(|n| block(index.wrapping_add(n)))
        .collect()
}

/// What a device does that takes no work request in which anything stands where nothing
/// belongs; gives the header, and the part as such.
pub(crate) fn taken(qp: &Qp, index: u32) -> (SendHeader, Part) {
    let bytes = fetch(qp, index);
    let header = SendHeader::from_prefix(&bytes).unwrap();
    assert!(header.reserved_is_zero(), "{header:?}");
    let known = SEND_SIGNALED | SEND_SOLICITED | SEND_FENCE | SEND_INLINE;
    assert_eq!(header.flags & !known, 0);
    assert!(header.flags & SEND_INLINE != 0 || header.inline_length == 0);
    assert!(header.flags & SEND_INLINE == 0 || header.sge_count == 0);
    assert!(qp.xrc || header.srqn == 0, "{header:?}");
    let opcode = SendOpcode::from_number(header.opcode).unwrap();
    let bytes = &bytes[size_of::<SendHeader>()..];
    let immediate = |part: u64| match opcode {
        SendOpcode::SendImmediate | SendOpcode::WriteImmediate => {
            assert_eq!(part >> 32, 0, "{opcode:?}");
        }
        _ => assert_eq!(part, 0, "{opcode:?}"),
    };
    fn of<T: Plain + Reserved>(bytes: &[u8]) -> T {
        let part = T::from_prefix(bytes).unwrap();
        assert!(part.reserved_is_zero());
        part
    }
    let part = match opcode {
        SendOpcode::Send | SendOpcode::SendImmediate if qp.ud => {
            let part: DatagramPart = of(bytes);
            immediate(part.immediate);
            Part::Datagram(part)
        }
        SendOpcode::Send
        | SendOpcode::SendImmediate
        | SendOpcode::SendInvalidate
        | SendOpcode::LocalInvalidate => {
            let part: SendPart = of(bytes);
            immediate(part.immediate);
            let invalidates = [SendOpcode::SendInvalidate, SendOpcode::LocalInvalidate];
            assert!(invalidates.contains(&opcode) || part.tag == 0);
            Part::Send(part)
        }
        SendOpcode::Write
        | SendOpcode::WriteImmediate
        | SendOpcode::Read
        | SendOpcode::AtomicWrite => {
            let part: RemotePart = of(bytes);
            immediate(part.immediate);
            Part::Remote(part)
        }
        SendOpcode::CompareSwap => Part::Atomic(of(bytes)),
        SendOpcode::FetchAdd => {
            let part: AtomicPart = of(bytes);
            assert_eq!(part.compare, 0);
            Part::Atomic(part)
        }
        SendOpcode::Bind => Part::Bind(of(bytes)),
        SendOpcode::Flush => Part::Flush(of(bytes)),
        SendOpcode::RegisterList => {
            let part: ListPart = of(bytes);
            assert_eq!(part.pieces, header.sge_count);
            Part::List(part)
        }
        SendOpcode::RegisterListSend => {
            let (part, send): (ListPart, SendPart) =
                (of(bytes), of(&bytes[size_of::<ListPart>()..]));
            assert!(part.pieces <= header.sge_count);
            assert_eq!(send.immediate, 0);
            Part::ListSend(part, send)
        }
        SendOpcode::FastRegister | SendOpcode::RegisterSend => {
            panic!("user space does not name pages")
        }
    };
    let list = [SendOpcode::RegisterList, SendOpcode::RegisterListSend];
    if list.contains(&opcode) {
        let (Part::List(part) | Part::ListSend(part, _)) = part else {
            unreachable!()
        };
        assert!((1..=MAX_PIECES).contains(&part.pieces.into()), "{part:?}");
        assert_eq!(header.flags & SEND_INLINE, 0);
    }
    if matches!(
        opcode,
        SendOpcode::LocalInvalidate | SendOpcode::Bind | SendOpcode::RegisterList
    ) {
        assert_eq!(header.srqn, 0);
    }
    (header, part)
}

/// The scatter/gather entries or inline data of a work request, and what is behind them.
pub(crate) fn payload(qp: &Qp, index: u32) -> Vec<u8> {
    let bytes = fetch(qp, index);
    let header = SendHeader::from_prefix(&bytes).unwrap();
    let opcode = SendOpcode::from_number(header.opcode).unwrap();
    bytes[size_of::<SendHeader>() + opcode_part(opcode, qp.ud)..].to_vec()
}

/// Leaves nothing but ones in a send queue.
pub(crate) fn spoil(qp: &Qp) {
    let length = qp.layout.send.entries as usize * BLOCK_SIZE;
    // SAFETY: the send queue is at the start of the buffer.
    unsafe { ptr::write_bytes(qp.memory.at(0), 0xff, length) };
}

pub(crate) fn wr(opcode: ibv_wr_opcode, entries: &mut [ibv_sge], flags: u32) -> ibv_send_wr {
    let mut wr = ibv_send_wr {
        wr_id: 42,
        sg_list: entries.as_mut_ptr(),
        num_sge: entries.len() as i32,
        opcode,
        send_flags: flags,
        ..Default::default()
    };
    wr.__bindgen_anon_1.imm_data = 0x0102_0304;
    wr.wr.rdma.remote_addr = 0x1122_3344_5566_7788;
    wr.wr.rdma.rkey = 0x99aa_bbcc;
    wr
}

pub(crate) fn send(qp: &Qp, wr: &mut ibv_send_wr) -> c_int {
    let mut bad = ptr::null_mut();
    // SAFETY: the queue pair lives, and the work request is complete.
    let result = unsafe { post_send(ptr::from_ref(qp).cast_mut().cast(), wr, &mut bad) };
    assert_eq!(result != 0, bad == ptr::from_mut(wr));
    result
}

pub(crate) fn sge(length: u32) -> ibv_sge {
    ibv_sge {
        addr: 0x7000_0000 + u64::from(length),
        length,
        lkey: length ^ 0xff,
    }
}

/// A window, and a work request that binds it to a region under its next key.
pub(crate) struct Binding {
    pub(crate) mw: Box<ibv_mw>,
    mr: Box<ibv_mr>,
}

impl Binding {
    pub(crate) fn new() -> Self {
        Self {
            mw: Box::new(ibv_mw {
                rkey: 0x0005_0010,
                type_: IBV_MW_TYPE_2,
                ..Default::default()
            }),
            mr: Box::new(ibv_mr {
                lkey: 0x0007_0001,
                ..Default::default()
            }),
        }
    }

    pub(crate) fn info(&mut self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: &raw mut *self.mr,
            addr: 0x1000,
            length: 100,
            mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
        }
    }

    /// Makes `wr` the bind.
    pub(crate) fn put_into(&mut self, wr: &mut ibv_send_wr) {
        let info = self.info();
        // SAFETY: all members of the union are plain.
        unsafe {
            let bind = &mut wr.__bindgen_anon_2.bind_mw;
            bind.mw = &raw mut *self.mw;
            bind.rkey = 0x0005_0011;
            bind.bind_info = info;
        }
    }
}

/// What the plain interface can post, those without data last.
pub(crate) const OPERATIONS: [ibv_wr_opcode; 10] = [
    IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM,
    IBV_WR_SEND_WITH_INV,
    IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM,
    IBV_WR_RDMA_READ,
    IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD,
    IBV_WR_LOCAL_INV,
    IBV_WR_BIND_MW,
];

/// Posts until the queue is full; every work request is found in the ring as it was written,
/// and where it was promised to fit, it did.
pub(crate) fn fill(qp: &Qp, mut next: impl FnMut() -> Option<u32>) -> u32 {
    let before = qp.send.lock().posted;
    let mut starts = Vec::new();
    loop {
        let start = qp.send.lock().posted.blocks;
        match next() {
            Some(_) => starts.push(start),
            None => break,
        }
    }
    let posted = qp.send.lock().posted;
    let blocks = posted.blocks.wrapping_sub(before.blocks);
    assert!(
        blocks <= qp.layout.send.entries,
        "{blocks} blocks in a ring of {}",
        qp.layout.send.entries
    );
    // None lies over another: they are one after the other, as their headers say.
    for pair in starts.windows(2) {
        let blocks = taken(qp, pair[0]).0.blocks;
        assert_eq!(pair[1], pair[0].wrapping_add(blocks.into()));
    }
    starts.len() as u32
}

/// Has the last posted work request, and with it all, complete.
pub(crate) fn finish_all(qp: &Qp) {
    let posted = qp.send.lock().posted;
    let last = (1..=MAX_BLOCKS as u32)
        .map(|back| posted.blocks.wrapping_sub(back))
        .find(|&start| {
            let length = fetch(qp, start).len() / BLOCK_SIZE;
            qp.was_posted(start, posted) && length as u32 == posted.blocks.wrapping_sub(start)
        });
    qp.send_done(last.unwrap());
    assert!(qp.has_send_room(&mut qp.send.lock(), qp.layout.send.entries));
}

pub(crate) fn post_receive(qp: &Qp, wr: &mut ibv_recv_wr) -> c_int {
    let mut bad = ptr::null_mut();
    // SAFETY: the queue pair lives, and the work request is complete.
    let result = unsafe { post_recv(ptr::from_ref(qp).cast_mut().cast(), wr, &mut bad) };
    assert_eq!(result != 0, bad == ptr::from_mut(wr));
    result
}
