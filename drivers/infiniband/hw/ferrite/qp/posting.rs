// SPDX-License-Identifier: GPL-2.0

//! The rings of a queue pair that the kernel posts to: what goes into them, and what comes out.

use super::{
    layout::RingLayout,
    FerriteQp, //
};
use crate::{
    abi,
    abi::{
        CompletionEntry,
        QueuePairRecord,
        BLOCK_SIZE, //
    },
    device::Ferrite,
    kernel_ext::{
        barrier::{
            dma_wmb,
            mb, //
        },
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
    },
    lent::Lent,
    port::PORT,
    queue::{
        QueueMemory, //
        QueuePlace,
    },
    rdma::{
        Device,
        Qp,
        QpState,
        QpType,
        RecvList,
        SendList,
        SendWr,
        Wc,
        WcOpcode,
        WcStatus, //
    },
    ring::KernelBlocks,
    srq::FerriteSrq,
    wqe,
    wqe::SendTerms,
};
use kernel::prelude::*;

/// Words of the record, each with its block: what the driver writes and what it reads.
const SEND_PRODUCER: (usize, usize) = (0, 0);
const RECEIVE_PRODUCER: (usize, usize) = (0, 1);
const SEND_WAKE: (usize, usize) = (1, 0);
const RECEIVE_WAKE: (usize, usize) = (1, 1);
const _: () = {
    assert!(core::mem::offset_of!(QueuePairRecord, send_producer) == 0);
    assert!(core::mem::offset_of!(QueuePairRecord, receive_producer) == 4);
    assert!(core::mem::offset_of!(QueuePairRecord, send_wake) == BLOCK_SIZE);
    assert!(core::mem::offset_of!(QueuePairRecord, receive_wake) == BLOCK_SIZE + 4);
};

/// A ring that work requests go into and completions come out for.
///
/// Indices are free-running; what is between `consumer` and `producer` is the device's.
struct WorkRing<S> {
    slots: KVVec<S>,
    producer: u32,
    consumer: u32,
}

impl<S: Copy + Default> WorkRing<S> {
    fn new(entries: usize) -> Result<Self> {
        let mut slots = KVVec::with_capacity(entries, GFP_KERNEL)?;
        for _ in 0..entries {
            slots.push(S::default(), GFP_KERNEL)?;
        }
        Ok(Self {
            slots,
            producer: 0,
            consumer: 0,
        })
    }

    fn mask(&self) -> u32 {
        self.slots.len() as u32 - 1
    }

    fn used(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer)
    }

    fn has_room(&self, entries: usize) -> bool {
        entries <= self.slots.len().saturating_sub(self.used() as usize)
    }

    /// Where free-running `index` is in the ring.
    fn at(&self, index: u32) -> usize {
        (index & self.mask()) as usize
    }

    /// Enters a request that takes so many entries. The first has its slot; in the others nothing
    /// begins, which is what the default says.
    fn push(&mut self, slot: S, entries: usize) {
        for n in 0..entries as u32 {
            let at = self.at(self.producer.wrapping_add(n));
            if let Some(place) = self.slots.get_mut(at) {
                *place = if n == 0 { slot } else { S::default() };
            }
        }
        self.producer = self.producer.wrapping_add(entries as u32);
    }

    /// The slot at `index`, if that is the device's.
    fn outstanding(&self, index: u32) -> Option<S> {
        if index.wrapping_sub(self.consumer) >= self.used() {
            return None;
        }
        self.slots.get(self.at(index)).copied()
    }

    /// Everything before `index` is done.
    fn consume_to(&mut self, index: u32) {
        self.consumer = index;
    }

    fn reset(&mut self) {
        self.producer = 0;
        self.consumer = 0;
    }
}

/// A send work request that the device has.
#[derive(Clone, Copy)]
struct SendSlot {
    wr_id: u64,
    /// Zero where no request begins.
    blocks: u8,
    opcode: WcOpcode,
}

impl Default for SendSlot {
    fn default() -> Self {
        Self {
            wr_id: 0,
            blocks: 0,
            opcode: WcOpcode::Send,
        }
    }
}

impl WorkRing<SendSlot> {
    /// The request that begins at `index` is done, and with it all before; `None` where the device
    /// has no request that begins there, whatever it says.
    fn complete(&mut self, index: u32) -> Option<SendSlot> {
        let slot = self.outstanding(index).filter(|slot| slot.blocks != 0)?;
        self.consume_to(index.wrapping_add(slot.blocks.into()));
        Some(slot)
    }
}

/// The rings of a queue pair that the kernel posts to.
#[pin_data]
pub(super) struct KernelRings {
    /// Both rings, written by the driver, and the record, of which each side writes one half.
    memory: Lent<KernelBlocks>,
    layout: RingLayout,
    terms: SendTerms,
    #[pin]
    sq: IrqSpinLock<WorkRing<SendSlot>>,
    /// Ids of the receives that the device has.
    #[pin]
    rq: IrqSpinLock<WorkRing<u64>>,
}

impl KernelRings {
    /// Rings of that layout, for sends on those terms.
    pub(super) fn new(
        dev: &Device<Ferrite>,
        layout: RingLayout,
        terms: SendTerms,
    ) -> Result<(QueueMemory<Self>, QueuePlace)> {
        let (memory, place) = QueueMemory::<Self>::of_kernel(dev, layout.blocks(), |memory| {
            try_pin_init!(Self {
                memory,
                sq <- new_irq_spinlock!(WorkRing::new(1 << layout.sq_log_blocks)?, "ferrite_sq"),
                rq <- new_irq_spinlock!(WorkRing::new(1 << layout.rq_log_entries)?, "ferrite_rq"),
                layout,
                terms,
            }? Error)
        })?;
        if let Some(rings) = memory.kernel() {
            rings.set_record(SEND_WAKE, 1)?;
        }
        Ok((memory, place))
    }

    fn set_record(&self, (block, word): (usize, usize), value: u32) -> Result {
        let block = self.layout.record_offset as usize / BLOCK_SIZE + block;
        self.memory.set_word(block, word, value)
    }

    fn record(&self, (block, word): (usize, usize)) -> Result<u32> {
        let block = self.layout.record_offset as usize / BLOCK_SIZE + block;
        self.memory.word(block, word)
    }

    /// Hands work requests up to `producer` to the device; returns whether it must be woken.
    ///
    /// The device sets the wake word, then looks at the index once more: with the barrier here
    /// one of the two sees the other's write.
    fn publish(&self, index: (usize, usize), producer: u32, wake: (usize, usize)) -> Result<bool> {
        dma_wmb();
        self.set_record(index, producer)?;
        mb();
        Ok(self.record(wake)? != 0)
    }

    /// Forgets all work requests: the queue pair is in state RESET. The device has seen to its half
    /// of the record.
    pub(super) fn reset(&self) -> Result {
        let mut sq = self.sq.lock();
        let mut rq = self.rq.lock();
        sq.reset();
        rq.reset();
        self.set_record(SEND_PRODUCER, 0)?;
        self.set_record(RECEIVE_PRODUCER, 0)
    }
}

impl FerriteQp {
    /// Send blocks and receives that the device has, where the kernel posts them.
    pub(crate) fn outstanding(&self) -> Option<(u32, u32)> {
        let rings = self.rings().ok()?;
        let (sends, receives) = (rings.sq.lock().used(), rings.rq.lock().used());
        Some((sends, receives))
    }

    /// The rings that the kernel posts to; `EINVAL` where it does not.
    pub(super) fn rings(&self) -> Result<&KernelRings> {
        self.memory.kernel().ok_or(EINVAL)
    }

    /// Posts send work requests.
    pub(super) fn post_send(qp: &Qp<Ferrite>, list: &mut SendList<'_, Ferrite>) -> Result {
        let rings = qp.rings()?;
        if matches!(qp.state(), QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(EINVAL);
        }
        let hw = &qp.device().hw;
        if hw.refuses_management() && qp.qp_type() == Some(QpType::Gsi) {
            return Err(EIO);
        }
        let mut sq = rings.sq.lock();
        let before = sq.producer;
        let mut result = Ok(());
        while let Some(wr) = list.next() {
            result = Self::put_send(rings, &mut sq, &wr);
            if result.is_err() {
                break;
            }
        }
        if sq.producer != before && rings.publish(SEND_PRODUCER, sq.producer, SEND_WAKE)? {
            hw.doorbells.send(qp.number(), sq.producer);
        }
        drop(sq);
        if hw.is_stopped() {
            // Nothing else will tell the consumer that there are flushed requests to poll.
            if let Some(cq) = qp.send_cq() {
                cq.complete();
            }
        }
        result
    }

    fn put_send(
        rings: &KernelRings,
        sq: &mut WorkRing<SendSlot>,
        wr: &SendWr<'_, Ferrite>,
    ) -> Result {
        let (request, opcode) = wqe::build_send(wr, &rings.terms)?;
        let blocks = request.blocks();
        if !sq.has_room(blocks) {
            return Err(ENOMEM);
        }
        let start = sq.producer;
        let offset = rings.layout.sq_offset as usize / BLOCK_SIZE;
        request.write(|index, block| {
            let at = sq.at(start.wrapping_add(index as u32));
            rings.memory.put(offset + at, block)
        })?;
        let slot = SendSlot {
            wr_id: wr.wr_id(),
            blocks: blocks as u8,
            opcode,
        };
        sq.push(slot, blocks);
        Ok(())
    }

    /// Posts receive work requests.
    pub(super) fn post_receive(qp: &Qp<Ferrite>, list: &mut RecvList<'_>) -> Result {
        let rings = qp.rings()?;
        if qp.state() == QpState::Reset || qp.srq().is_some() {
            return Err(EINVAL);
        }
        let hw = &qp.device().hw;
        let stride = 1usize << (rings.layout.rq_log_stride - BLOCK_SIZE.trailing_zeros() as u8);
        let most = (stride * BLOCK_SIZE - core::mem::size_of::<abi::ReceiveHeader>())
            / core::mem::size_of::<abi::Sge>();
        let offset = rings.layout.rq_offset as usize / BLOCK_SIZE;
        let mut rq = rings.rq.lock();
        let before = rq.producer;
        let mut result = Ok(());
        while let Some(wr) = list.next() {
            if wr.sges().len() > most {
                result = Err(EINVAL);
                break;
            }
            if !rq.has_room(1) {
                result = Err(ENOMEM);
                break;
            }
            let entry = offset + rq.at(rq.producer) * stride;
            let sges = wr.sges().iter().map(wqe::device_sge);
            result = wqe::write_receive(0, sges, |index, block| {
                rings.memory.put(entry + index, block)
            });
            if result.is_err() {
                break;
            }
            rq.push(wr.wr_id(), 1);
        }
        if rq.producer != before && rings.publish(RECEIVE_PRODUCER, rq.producer, RECEIVE_WAKE)? {
            hw.doorbells.receive(qp.number());
        }
        drop(rq);
        if hw.is_stopped() {
            if let Some(cq) = qp.recv_cq() {
                cq.complete();
            }
        }
        result
    }

    /// What a consumer is told of a completion; `None` where it belongs to nothing it posted.
    pub(crate) fn completion<'a>(
        qp: &'a Qp<Ferrite>,
        entry: &CompletionEntry,
    ) -> Option<Wc<'a, Ferrite>> {
        let rings = qp.rings().ok()?;
        let received = entry.flags & abi::COMPLETION_RECEIVE != 0;
        let (wr_id, fallback) = if received && entry.flags & abi::COMPLETION_SRQ != 0 {
            (
                FerriteSrq::complete(qp.srq()?, entry.index)?,
                WcOpcode::Recv,
            )
        } else if received {
            let mut rq = rings.rq.lock();
            let wr_id = rq.outstanding(entry.index)?;
            rq.consume_to(entry.index.wrapping_add(1));
            (wr_id, WcOpcode::Recv)
        } else {
            let slot = rings.sq.lock().complete(entry.index)?;
            (slot.wr_id, slot.opcode)
        };
        let mut wc = Wc::new(
            qp,
            wr_id,
            WcOpcode::from_raw(entry.opcode.into()).unwrap_or(fallback),
        );
        wc.status = WcStatus::from_raw(entry.status.into()).unwrap_or(WcStatus::General);
        wc.byte_len = entry.byte_count;
        wc.vendor_err = entry.vendor_syndrome;
        if entry.flags & abi::COMPLETION_IMMEDIATE != 0 {
            // Four bytes in the lower half.
            wc.imm_data = Some(u32::from_be(entry.immediate as u32));
        } else if entry.flags & abi::COMPLETION_INVALIDATED != 0 {
            wc.invalidated = Some(entry.tag);
        }
        if entry.flags & abi::COMPLETION_GRH != 0 {
            let origin = Origin::of(entry);
            wc.grh = true;
            wc.src_qp = origin.qpn;
            wc.pkey_index = entry.pkey_index;
            wc.sl = origin.priority;
            wc.smac = Some(origin.mac);
            wc.vlan = origin.vlan;
            wc.ipv4 = Some(origin.ipv4);
            wc.port = PORT;
        }
        Some(wc)
    }

    /// The oldest work request that a failed device will never complete on completion queue
    /// `cqn`.
    pub(crate) fn flush_one(qp: &Qp<Ferrite>, cqn: u32) -> Option<Wc<'_, Ferrite>> {
        let rings = qp.rings().ok()?;
        let mut found = None;
        if qp.send_cq().is_some_and(|cq| cq.number() == cqn) {
            let mut sq = rings.sq.lock();
            let oldest = sq.consumer;
            if let Some(slot) = sq.complete(oldest) {
                found = Some((slot.wr_id, slot.opcode));
            }
        }
        if found.is_none() && qp.recv_cq().is_some_and(|cq| cq.number() == cqn) {
            let mut rq = rings.rq.lock();
            let oldest = rq.consumer;
            if let Some(wr_id) = rq.outstanding(oldest) {
                rq.consume_to(oldest.wrapping_add(1));
                found = Some((wr_id, WcOpcode::Recv));
            }
        }
        let (wr_id, opcode) = found?;
        let mut wc = Wc::new(qp, wr_id, opcode);
        wc.status = WcStatus::WorkRequestFlushed;
        Some(wc)
    }

    /// Whether there is something for [`Self::flush_one`].
    pub(crate) fn has_to_flush(qp: &Qp<Ferrite>, cqn: u32) -> bool {
        let Some((sends, receives)) = qp.outstanding() else {
            return false;
        };
        sends > 0 && qp.send_cq().is_some_and(|cq| cq.number() == cqn)
            || receives > 0 && qp.recv_cq().is_some_and(|cq| cq.number() == cqn)
    }
}

/// Where a datagram came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Origin {
    qpn: u32,
    mac: [u8; 6],
    vlan: Option<u16>,
    priority: u8,
    ipv4: bool,
}

impl Origin {
    fn of(entry: &CompletionEntry) -> Self {
        let tag = (entry.vlan != abi::VLAN_NONE).then_some(entry.vlan);
        Self {
            qpn: entry.source_qpn & abi::QUEUE_NUMBER_MASK,
            mac: entry.source_mac,
            // A tag with identifier 0 says only the priority.
            vlan: tag.map(|tag| tag & 0xfff).filter(|vlan| *vlan != 0),
            priority: tag.map_or(0, |tag| (tag >> 13) as u8),
            ipv4: entry.flags & abi::COMPLETION_IPV6 == 0,
        }
    }
}

#[kunit_tests(ferrite_qp_posting)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    #[test]
    fn a_datagram_tells_where_it_came_from() {
        let entry = CompletionEntry {
            source_qpn: 0x1234,
            source_mac: [2, 0, 0, 0, 0, 7],
            vlan: abi::VLAN_NONE,
            flags: abi::COMPLETION_RECEIVE | abi::COMPLETION_GRH,
            ..CompletionEntry::zeroed()
        };
        let expected = Origin {
            qpn: 0x1234,
            mac: [2, 0, 0, 0, 0, 7],
            vlan: None,
            priority: 0,
            ipv4: true,
        };
        assert_eq!(Origin::of(&entry), expected);
        let tagged = CompletionEntry {
            vlan: 5 << 13 | 42,
            flags: entry.flags | abi::COMPLETION_IPV6,
            ..entry
        };
        let expected = Origin {
            vlan: Some(42),
            priority: 5,
            ipv4: false,
            ..expected
        };
        assert_eq!(Origin::of(&tagged), expected);
        let priority_only = CompletionEntry {
            vlan: 5 << 13,
            ..entry
        };
        let origin = Origin::of(&priority_only);
        assert_eq!((origin.vlan, origin.priority), (None, 5));
    }

    #[test]
    fn only_posted_requests_complete_and_only_once() -> Result {
        let mut ring = WorkRing::<u64>::new(4)?;
        for id in 10..14 {
            assert!(ring.has_room(1));
            ring.push(id, 1);
        }
        assert!(!ring.has_room(1));
        assert_eq!(ring.outstanding(4), None);
        assert_eq!(ring.outstanding(1), Some(11));
        ring.consume_to(2);
        assert_eq!(ring.outstanding(1), None);
        assert!(ring.has_room(2) && !ring.has_room(3));
        ring.push(14, 1);
        assert_eq!(ring.outstanding(4), Some(14));
        Ok(())
    }

    fn request(wr_id: u64, blocks: u8) -> SendSlot {
        SendSlot {
            wr_id,
            blocks,
            opcode: WcOpcode::Send,
        }
    }

    #[test]
    fn a_send_completes_where_it_begins_and_nowhere_else() -> Result {
        let mut ring = WorkRing::<SendSlot>::new(8)?;
        // A round of long requests leaves its traces in the slots.
        ring.push(request(1, 5), 5);
        assert!(ring.complete(0).is_some_and(|slot| slot.wr_id == 1));
        ring.push(request(2, 3), 3);
        ring.push(request(3, 4), 4);
        assert!(ring.has_room(1) && !ring.has_room(2));
        // A device that completes the middle of a request, or what it was never given.
        for index in [6, 7, 9, 10, 11, 12, 0, u32::MAX] {
            assert!(ring.complete(index).is_none());
        }
        assert_eq!(ring.used(), 7);
        assert!(ring.complete(8).is_some_and(|slot| slot.wr_id == 3));
        assert!(ring.complete(5).is_none());
        assert!(ring.has_room(8) && !ring.has_room(9));
        Ok(())
    }

    #[test]
    fn what_is_flushed_after_a_failed_registration_completes_and_makes_room() -> Result {
        let mut ring = WorkRing::<SendSlot>::new(8)?;
        // One that succeeds and does not say so, the registration that fails, and two behind it.
        for (id, blocks) in [(1, 2), (2, 1), (3, 2), (4, 3)] {
            ring.push(request(id, blocks), blocks.into());
        }
        assert!(!ring.has_room(1));
        for (index, id) in [(2, 2), (3, 3), (5, 4)] {
            assert!(ring.complete(index).is_some_and(|slot| slot.wr_id == id));
            assert!(ring.complete(index).is_none());
        }
        // All of it can be posted again, and goes on where the device is.
        assert_eq!((ring.used(), ring.producer), (0, 8));
        ring.push(request(2, 1), 1);
        assert!(ring.complete(8).is_some_and(|slot| slot.wr_id == 2));
        Ok(())
    }

    #[test]
    fn indices_run_past_the_end_of_their_numbers() -> Result {
        let mut ring = WorkRing::<SendSlot>::new(8)?;
        ring.producer = u32::MAX - 20;
        ring.consumer = ring.producer;
        for id in 0..20u64 {
            let start = ring.producer;
            ring.push(request(id, 3), 3);
            ring.push(request(id + 100, 4), 4);
            assert!(ring.has_room(1) && !ring.has_room(2));
            assert!(ring.complete(start).is_some_and(|slot| slot.wr_id == id));
            assert!(ring.has_room(4) && !ring.has_room(5));
            let second = start.wrapping_add(3);
            assert!(ring
                .complete(second)
                .is_some_and(|slot| slot.wr_id == id + 100));
            assert_eq!(ring.used(), 0);
        }
        assert!(ring.producer < 200);
        Ok(())
    }
}
