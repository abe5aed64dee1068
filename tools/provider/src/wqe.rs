// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Work requests as the device sees them (WQEs): header, the part of the operation, data.

use core::ffi::c_int;
use core::mem::{offset_of, size_of};

use ferrite_abi::{
    AtomicPart, BindPart, DatagramPart, FlushPart, ListPart, Plain, RemotePart, SendOpcode,
    SendPart, Sge,
};

use crate::ah::Ah;
use crate::sys::*;

// Scatter/gather entries are copied as they are.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(offset_of!(Sge, address) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

/// A work request but for its data.
#[derive(Clone, Copy)]
pub(crate) struct Work {
    pub(crate) wr_id: u64,
    pub(crate) opcode: SendOpcode,
    /// `ibv_send_flags`.
    pub(crate) flags: u32,
    /// XRC: the SRQ at the peer; else zero.
    pub(crate) srqn: u32,
    pub(crate) part: Part,
}

/// What follows the header. Whoever makes one leaves zero what its operation does not use.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Send(SendPart),
    Remote(RemotePart),
    Atomic(AtomicPart),
    Datagram(DatagramPart),
    Bind(BindPart),
    Flush(FlushPart),
    List(ListPart),
    /// A list, and then a message.
    ListSend(ListPart, SendPart),
}

/// The data of a work request.
pub(crate) enum Data<'a> {
    /// The device fetches or fills them.
    Sges(&'a [ibv_sge]),
    /// They are copied now, from entries whose keys do not count.
    Copy(&'a [ibv_sge]),
    /// They are copied now.
    CopyBuffers(&'a [ibv_data_buf]),
    /// These, which every work request has room for.
    Eight([u8; 8]),
    /// Pieces of a list, and behind them what the device fetches for a message.
    Pieces(&'a [ibv_sge], &'a [ibv_sge]),
}

impl Part {
    /// A send, with immediate data (in wire order) or none.
    pub(crate) fn send(immediate: __be32) -> Self {
        Part::Send(SendPart {
            immediate: immediate.into(),
            ..SendPart::zeroed()
        })
    }

    /// An invalidation, here or at the peer.
    pub(crate) fn invalidate(rkey: u32) -> Self {
        Part::Send(SendPart {
            tag: rkey,
            ..SendPart::zeroed()
        })
    }

    /// A read, or a write with immediate data (in wire order) or none.
    pub(crate) fn remote(address: u64, rkey: u32, immediate: __be32) -> Self {
        Part::Remote(RemotePart {
            address,
            rkey,
            immediate: immediate.into(),
            ..RemotePart::zeroed()
        })
    }

    pub(crate) fn compare_swap(address: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        Part::Atomic(AtomicPart {
            address,
            rkey,
            operand: swap,
            compare,
            ..AtomicPart::zeroed()
        })
    }

    pub(crate) fn fetch_add(address: u64, rkey: u32, add: u64) -> Self {
        Part::Atomic(AtomicPart {
            address,
            rkey,
            operand: add,
            ..AtomicPart::zeroed()
        })
    }

    /// A datagram, with immediate data or none, as they stand in a part.
    ///
    /// # Safety
    ///
    /// `ah` is a live handle of this provider.
    pub(crate) unsafe fn datagram(ah: *mut ibv_ah, qpn: u32, qkey: u32, immediate: u64) -> Self {
        Part::Datagram(DatagramPart {
            // SAFETY: the handle is live and of this provider, by the caller.
            address_vector: unsafe { Ah::address_vector(ah) },
            qpn,
            qkey,
            immediate,
            ..DatagramPart::zeroed()
        })
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        match self {
            Part::Send(part) => part.as_bytes(),
            Part::Remote(part) => part.as_bytes(),
            Part::Atomic(part) => part.as_bytes(),
            Part::Datagram(part) => part.as_bytes(),
            Part::Bind(part) => part.as_bytes(),
            Part::Flush(part) => part.as_bytes(),
            // That for the message comes behind it.
            Part::List(part) | Part::ListSend(part, _) => part.as_bytes(),
        }
    }
}

/// How the completion names an operation.
pub(crate) const fn completion_opcode(opcode: SendOpcode) -> ibv_wc_opcode {
    match opcode {
        SendOpcode::Send
        | SendOpcode::SendImmediate
        | SendOpcode::SendInvalidate
        | SendOpcode::RegisterSend
        | SendOpcode::RegisterListSend => IBV_WC_SEND,
        SendOpcode::Write | SendOpcode::WriteImmediate => IBV_WC_RDMA_WRITE,
        SendOpcode::Read => IBV_WC_RDMA_READ,
        SendOpcode::CompareSwap => IBV_WC_COMP_SWAP,
        SendOpcode::FetchAdd => IBV_WC_FETCH_ADD,
        SendOpcode::LocalInvalidate => IBV_WC_LOCAL_INV,
        SendOpcode::Bind => IBV_WC_BIND_MW,
        SendOpcode::AtomicWrite => IBV_WC_ATOMIC_WRITE,
        SendOpcode::Flush => IBV_WC_FLUSH,
        // The verbs have no name for it (`FERRITEDV_WC_REGISTER_LIST`).
        SendOpcode::RegisterList | SendOpcode::FastRegister => IBV_WC_DRIVER1,
    }
}

/// The consumer's scatter/gather list.
///
/// # Safety
///
/// `sges` points to `count` entries that live as long as the result is used.
pub(crate) unsafe fn sge_list<'a>(
    sges: *const ibv_sge,
    count: c_int,
) -> Result<&'a [ibv_sge], c_int> {
    match usize::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: that so many are there, as long as the result, is the caller's promise.
        Ok(count) => Ok(unsafe { core::slice::from_raw_parts(sges, count) }),
        Err(_) => Err(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp::Qp;
    use crate::testing::{
        self, cap, fetch, finish_all, payload, rc, send, sge, spoil, taken, ud, wr, Binding, Page,
        OPERATIONS,
    };
    use core::ptr;
    use ferrite_abi::{
        AddressVector, SendHeader, FLUSH_RANGE, FLUSH_REGION, SEND_INLINE, SEND_SIGNALED,
        SEND_SOLICITED,
    };

    #[test]
    fn a_write_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let qp = rc(&cap(4, 1, 3, 1, 0), page.doorbells());
        let mut entries = [sge(5), sge(6), sge(7)];
        let mut wr = wr(
            IBV_WR_RDMA_WRITE_WITH_IMM,
            &mut entries,
            IBV_SEND_SIGNALED | IBV_SEND_SOLICITED,
        );
        assert_eq!(send(&qp, &mut wr), 0);
        let header = SendHeader {
            opcode: SendOpcode::WriteImmediate.number(),
            blocks: 2,
            sge_count: 3,
            flags: SEND_SIGNALED | SEND_SOLICITED,
            ..SendHeader::zeroed()
        };
        let part = RemotePart {
            address: 0x1122_3344_5566_7788,
            rkey: 0x99aa_bbcc,
            immediate: 0x0102_0304,
            ..RemotePart::zeroed()
        };
        let bytes = fetch(&qp, 0);
        assert_eq!(bytes[..16], *header.as_bytes());
        assert_eq!(bytes[16..48], *part.as_bytes());
        for (number, entry) in entries.iter().enumerate() {
            let found = Sge::from_prefix(&bytes[48 + 16 * number..]).unwrap();
            assert_eq!(found.address, entry.addr);
            assert_eq!((found.length, found.lkey), (entry.length, entry.lkey));
        }
        assert_eq!(qp.send_done(0), (42, IBV_WC_RDMA_WRITE));
    }

    #[test]
    fn inline_data_are_copied_at_once() {
        let mut page = Page::new();
        let qp = rc(&cap(5, 1, 2, 1, 100), page.doorbells());
        let data: Vec<u8> = (0..70).collect();
        let mut entries = [
            ibv_sge {
                addr: data.as_ptr() as u64,
                length: 3,
                lkey: 0,
            },
            ibv_sge {
                addr: data[3..].as_ptr() as u64,
                length: 67,
                lkey: 0,
            },
        ];
        assert_eq!(
            send(&qp, &mut wr(IBV_WR_SEND, &mut entries, IBV_SEND_INLINE)),
            0
        );
        let (header, _) = taken(&qp, 0);
        assert_eq!(header.flags, SEND_INLINE);
        assert_eq!((header.blocks, header.inline_length), (2, 70));
        assert_eq!(payload(&qp, 0)[..70], data);
        // As much as was promised, behind the longest part that it can have before it.
        let most = qp.layout.capacity.max_inline_data as usize;
        let data: Vec<u8> = (0..most).map(|n| n as u8).collect();
        let mut entries = [ibv_sge {
            addr: data.as_ptr() as u64,
            length: most as u32,
            lkey: 0,
        }];
        let mut request = wr(IBV_WR_RDMA_WRITE_WITH_IMM, &mut entries, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), 0);
        let (header, _) = taken(&qp, 2);
        assert_eq!(usize::from(header.inline_length), most);
        assert_eq!(
            payload(&qp, 2)[..],
            data,
            "to the last byte of the last block"
        );
    }

    /// A work request of the verbs is full of what others left in its unions, and a ring of what
    /// was posted before.
    #[test]
    fn what_an_operation_does_not_use_is_zero() {
        let mut page = Page::new();
        for xrc in [false, true] {
            let mut qp = rc(&cap(3, 1, 3, 1, 64), page.doorbells());
            qp.xrc = xrc;
            spoil(&qp);
            let mut binding = Binding::new();
            // Often enough for each to begin at each block.
            for round in 0..16 {
                for opcode in OPERATIONS {
                    let mut entries = vec![sge(1); 1 + round % 3];
                    let mut request = wr(opcode, &mut entries, !IBV_SEND_INLINE);
                    request.wr.atomic.compare_add = u64::MAX;
                    request.wr.atomic.swap = u64::MAX - 1;
                    request.qp_type.xrc.remote_srqn = 0x77;
                    binding.put_into(&mut request);
                    let index = qp.send.lock().posted.blocks;
                    assert_eq!(send(&qp, &mut request), 0);
                    let (header, part) = taken(&qp, index);
                    // SAFETY: all members of the unions are plain.
                    let (rdma, atomic) = unsafe { (request.wr.rdma, request.wr.atomic) };
                    let (address, rkey) = (rdma.remote_addr, rdma.rkey);
                    let expected = match opcode {
                        IBV_WR_SEND => Part::send(0),
                        IBV_WR_SEND_WITH_IMM => Part::send(0x0102_0304),
                        IBV_WR_SEND_WITH_INV | IBV_WR_LOCAL_INV => Part::invalidate(0x0102_0304),
                        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ => Part::remote(address, rkey, 0),
                        IBV_WR_RDMA_WRITE_WITH_IMM => Part::remote(address, rkey, 0x0102_0304),
                        IBV_WR_ATOMIC_CMP_AND_SWP => {
                            Part::compare_swap(address, atomic.rkey, u64::MAX, u64::MAX - 1)
                        }
                        IBV_WR_ATOMIC_FETCH_AND_ADD => {
                            Part::fetch_add(address, atomic.rkey, u64::MAX)
                        }
                        _ => part,
                    };
                    assert_eq!(part.as_bytes(), expected.as_bytes(), "{opcode}");
                    let local = matches!(opcode, IBV_WR_LOCAL_INV | IBV_WR_BIND_MW);
                    let srqn = if xrc && !local { 0x77 } else { 0 };
                    assert_eq!(header.srqn, srqn, "{opcode}");
                    finish_all(&qp);
                }
            }
        }
    }

    #[test]
    fn a_datagram_is_laid_out_as_the_interface_says() {
        let mut page = Page::new();
        let mut qp = ud(&cap(4, 1, 16, 1, 256), page.doorbells());
        spoil(&qp);
        let address_vector = AddressVector {
            mac: [2, 0, 0, 0, 0, 9],
            gid: [7; 16],
            source_gid_index: 1,
            hop_limit: 64,
            ..AddressVector::zeroed()
        };
        let mut ah = crate::ah::tests::alone(address_vector);
        let ah: *mut ibv_ah = (&raw mut *ah).cast();
        let ex = testing::ex(&mut qp);
        let expected = |immediate| DatagramPart {
            address_vector,
            qpn: 0x2345,
            qkey: 0x1111_1111,
            immediate,
            reserved: 0,
        };
        let found = |qp: &Qp, index| match taken(qp, index) {
            (header, Part::Datagram(part)) => (header.blocks, header.srqn, part),
            _ => panic!("no datagram"),
        };
        let data: Vec<u8> = (0..=255).collect();
        for round in 0..12 {
            let mut entries: Vec<ibv_sge> = (0..16).map(sge).collect();
            for (opcode, immediate) in [(IBV_WR_SEND, 0), (IBV_WR_SEND_WITH_IMM, 0x0102_0304)] {
                let mut request = wr(opcode, &mut entries, 0);
                request.wr.ud.ah = ah;
                request.wr.ud.remote_qpn = 0x2345;
                request.wr.ud.remote_qkey = 0x1111_1111;
                request.qp_type.xrc.remote_srqn = 0x77;
                let index = qp.send.lock().posted.blocks;
                assert_eq!(send(&qp, &mut request), 0);
                assert_eq!(found(&qp, index), (6, 0, expected(immediate)));
                let bytes = payload(&qp, index);
                let last = Sge::from_prefix(&bytes[15 * 16..]).unwrap();
                assert_eq!((last.address, last.length), (entries[15].addr, 15));
                finish_all(&qp);

                let index = qp.send.lock().posted.blocks;
                // SAFETY: the operations were filled in by `ex` and are called in their
                // order; the handle lives.
                unsafe {
                    let operations = ptr::read(ex);
                    operations.wr_start.unwrap()(ex);
                    match immediate {
                        0 => operations.wr_send.unwrap()(ex),
                        immediate => operations.wr_send_imm.unwrap()(ex, immediate as u32),
                    }
                    let name = operations.wr_set_ud_addr.unwrap();
                    // The last word counts, and what was said before is kept.
                    name(ex, ah, 1, 2);
                    name(ex, ah, 0x2345, 0x1111_1111);
                    let set = operations.wr_set_inline_data.unwrap();
                    set(ex, data.as_ptr().cast_mut().cast(), data.len());
                    assert_eq!(operations.wr_complete.unwrap()(ex), 0);
                }
                assert_eq!(found(&qp, index), (6, 0, expected(immediate)));
                assert_eq!(payload(&qp, index)[..256], data, "round {round}");
                finish_all(&qp);
            }
        }
    }

    #[test]
    fn a_flush_of_a_region_has_no_place_and_no_length() {
        let mut page = Page::new();
        let mut qp = rc(&cap(4, 1, 1, 1, 0), page.doorbells());
        spoil(&qp);
        let ex = testing::ex(&mut qp);
        let flush = |selectivity: u32, length: usize| -> c_int {
            // SAFETY: the operations were filled in by `ex` and are called in their order.
            unsafe {
                let operations = ptr::read(ex);
                operations.wr_start.unwrap()(ex);
                operations.wr_flush.unwrap()(ex, 5, 0x1000, length, 1, selectivity as u8);
                operations.wr_complete.unwrap()(ex)
            }
        };
        assert_eq!(flush(FLUSH_RANGE, 100), 0);
        let most = 1 << 20;
        // SAFETY: as above; nothing has been begun.
        unsafe { (*ex.cast::<Qp>()).max_message = most };
        assert_eq!(flush(FLUSH_RANGE, most as usize + 1), libc::EINVAL);
        assert_eq!(flush(FLUSH_REGION, usize::MAX), 0);
        for (index, (address, length)) in [(0, (0x1000, 100)), (1, (0, 0))] {
            let (_, Part::Flush(part)) = taken(&qp, index) else {
                panic!("no flush");
            };
            assert_eq!((part.address, part.length, part.rkey), (address, length, 5));
        }
    }
}
