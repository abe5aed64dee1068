// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.
//!
//! Entries are taken in the order of the ring but complete in any order, so that each carries an
//! identifier of its own: the index of a slot that remembers what was posted (chapter 9).

use crate::{
    abi,
    abi::{
        CommandOpcode,
        CreateSrq,
        ModifySrq,
        ResizeSrq,
        SrqRecord,
        SrqState,
        UverbsSrqRequest,
        UverbsSrqResponse,
        BLOCK_SIZE, //
    },
    commands::DeviceObject,
    cqp::object,
    device::Ferrite,
    kernel_ext::{
        barrier::dma_wmb,
        errno,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
    },
    lent::Lent,
    numbers::Number,
    queue::{
        announce,
        Extent,
        QueueMemory, //
        QueuePlace,
    },
    rdma::{
        kind,
        Details,
        Device,
        New,
        Pd,
        RecvList,
        Srq,
        SrqAttr,
        SrqOps,
        Udata, //
        XrcSrq,
    },
    ring::KernelBlocks,
    shares::Holder,
    wqe,
};
use kernel::{
    prelude::*,
    sync::atomic::{
        Atomic,
        Relaxed, //
    },
};

const RECORD_BLOCKS: usize = core::mem::size_of::<SrqRecord>() / BLOCK_SIZE;
const _: () = assert!(core::mem::offset_of!(SrqRecord, producer) == 0);

/// End of the list of free slots.
const NONE: u32 = u32::MAX;

/// What is remembered of a receive.
#[derive(Clone, Copy)]
struct Slot {
    /// The consumer's name for it.
    id: u64,
    /// Its free-running place in the ring.
    place: u32,
    /// The next free slot, while it is free itself.
    next: u32,
    used: bool,
}

/// The receives of a shared queue.
pub(crate) struct SrqSlots {
    slots: KVVec<Slot>,
    free: u32,
    /// Receives posted, free-running.
    producer: u32,
    /// Receives that the device is known to have taken off the ring, free-running.
    taken: u32,
}

impl SrqSlots {
    fn new(entries: usize) -> Result<Self> {
        let mut slots = KVVec::with_capacity(entries, GFP_KERNEL)?;
        for index in 0..entries {
            let slot = Slot {
                id: 0,
                place: 0,
                next: if index + 1 == entries {
                    NONE
                } else {
                    index as u32 + 1
                },
                used: false,
            };
            slots.push(slot, GFP_KERNEL)?;
        }
        Ok(Self {
            slots,
            free: 0,
            producer: 0,
            taken: 0,
        })
    }

    /// The slot for a new receive and its place in the ring; `None` if there is no room.
    fn peek(&self) -> Option<(u32, usize)> {
        if self.producer.wrapping_sub(self.taken) as usize >= self.slots.len() {
            return None;
        }
        let place = self.producer as usize & (self.slots.len() - 1);
        (self.free != NONE).then_some((self.free, place))
    }

    /// Takes what [`SrqSlots::peek`] returned.
    fn push(&mut self, id: u64) {
        let (free, place) = (self.free, self.producer);
        if let Some(slot) = self.slots.get_mut(free as usize) {
            self.free = slot.next;
            *slot = Slot {
                id,
                place,
                next: NONE,
                used: true,
            };
            self.producer = self.producer.wrapping_add(1);
        }
    }

    /// A receive completed: what the consumer called it. `None` if there is no such one.
    fn complete(&mut self, index: u32) -> Option<u64> {
        let free = self.free;
        let slot = self.slots.get_mut(index as usize)?;
        if !slot.used {
            return None;
        }
        slot.used = false;
        slot.next = free;
        let (id, place) = (slot.id, slot.place);
        self.free = index;
        // All entries up to this one were taken.
        let taken = place.wrapping_add(1);
        if (taken.wrapping_sub(self.taken) as i32) > 0 {
            self.taken = taken;
        }
        Some(id)
    }
}

/// The ring of a queue that the kernel posts to.
#[pin_data]
struct KernelRing {
    /// The ring, then the record.
    memory: Lent<KernelBlocks>,
    /// Blocks of an entry.
    stride: usize,
    /// Blocks of the ring.
    record: usize,
    #[pin]
    slots: IrqSpinLock<SrqSlots>,
}

impl KernelRing {
    fn set_producer(&self, producer: u32) -> Result {
        self.memory.set_word(self.record, 0, producer)
    }
}

/// The driver's data of a shared receive queue.
///
/// The fields are dropped in order: the device lets go of the queue before its memory goes, and
/// the number is free last.
pub(crate) struct FerriteSrq {
    object: DeviceObject,
    memory: QueueMemory<KernelRing>,
    number: Number,
    /// Work requests it holds; changes with a process's memory.
    max_wr: Atomic<u32>,
    max_sge: u32,
}

/// The numbers of a queue's ring.
#[derive(Clone, Copy)]
struct Geometry {
    log_entries: u8,
    log_stride: u8,
    ring_offset: u32,
    record_offset: u32,
}

impl Geometry {
    /// Of a ring for the kernel that holds `attr`: the ring, then the record.
    fn for_kernel(attr: &SrqAttr) -> Self {
        let entries = attr.max_wr.next_power_of_two() as usize;
        let stride = core::mem::size_of::<abi::ReceiveHeader>()
            + attr.max_sge as usize * core::mem::size_of::<abi::Sge>();
        let stride = stride.next_power_of_two().max(BLOCK_SIZE);
        Self {
            log_entries: entries.trailing_zeros() as u8,
            log_stride: stride.trailing_zeros() as u8,
            ring_offset: 0,
            record_offset: (entries * stride) as u32,
        }
    }

    /// What a process says its buffer has, if it makes sense.
    fn of_process(request: &UverbsSrqRequest, max_log_entries: u8) -> Result<(Self, Extent)> {
        if request.log_entries > max_log_entries
            || !(abi::RQ_MIN_LOG_STRIDE..=abi::RQ_MAX_LOG_STRIDE).contains(&request.log_stride)
            || request.reserved != [0; 3]
        {
            return Err(EINVAL);
        }
        let ring = 1u64 << (request.log_entries + request.log_stride);
        let record = core::mem::size_of::<SrqRecord>() as u64;
        let parts = [(request.ring_offset, ring), (request.record_offset, record)];
        let extent = Extent::new(request.buffer, request.length, &parts)?;
        let geometry = Self {
            log_entries: request.log_entries,
            log_stride: request.log_stride,
            ring_offset: request.ring_offset,
            record_offset: request.record_offset,
        };
        Ok((geometry, extent))
    }
}

impl FerriteSrq {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }

    /// Makes a shared receive queue.
    pub(crate) fn create<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Srq, Ferrite>,
        attr: &mut SrqAttr,
        xrc: Option<&XrcSrq<'_, Ferrite>>,
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<&'a Srq<Ferrite>> {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_SRQ) || (xrc.is_some() && !dev.has(abi::FEATURE_XRC)) {
            return Err(errno::eopnotsupp());
        }
        if attr.max_wr == 0
            || attr.max_wr > 1 << dev.caps.rq_max_log_entries
            || attr.max_sge > dev.caps.max_sge.into()
        {
            return Err(EINVAL);
        }
        let (geometry, (memory, place)) = match udata {
            Some(udata) => {
                let (geometry, extent) = checked_request(udata, dev.caps.rq_max_log_entries)?;
                (geometry, QueueMemory::of_process(dev, udata, extent)?)
            }
            None => {
                let geometry = Geometry::for_kernel(attr);
                (geometry, kernel_ring(dev, &geometry)?)
            }
        };
        let number = dev.srqns.take(Holder::of(udata.is_some()))?;
        let srqn = number.get();
        let object = DeviceObject::create(
            &dev.hw,
            &CreateSrq {
                srqn,
                pd: pd.number(),
                log_entries: geometry.log_entries,
                log_stride: geometry.log_stride,
                flags: if xrc.is_some() { abi::SRQ_FLAG_XRC } else { 0 },
                doorbell_page: place.doorbell_page,
                buffer: place.buffer,
                ring_offset: geometry.ring_offset,
                record_offset: geometry.record_offset,
                xrcd: xrc.map_or(0, |xrc| xrc.xrcd.number()),
                cqn: xrc.map_or(0, |xrc| xrc.cq.number()),
            },
            CommandOpcode::DestroySrq,
            srqn,
        )?;
        attr.max_wr = 1 << geometry.log_entries;
        attr.limit = 0;
        if xrc.is_some() {
            new.set_xrc_srq_num(srqn);
        }
        let srq = new.init(Ok::<_, Error>(Self {
            object,
            memory,
            number,
            max_wr: Atomic::new(attr.max_wr),
            max_sge: attr.max_sge,
        }))?;
        let found = srq.get_ref().ok_or(ENODEV)?;
        announce(&dev.hw.srqs, srqn, found, || match udata {
            Some(udata) => udata.respond(&UverbsSrqResponse { srqn, reserved: 0 }),
            None => Ok(()),
        })?;
        Ok(srq)
    }

    /// What the consumer called the receive that the device knows as `index`.
    pub(crate) fn complete(srq: &Srq<Ferrite>, index: u32) -> Option<u64> {
        srq.memory.kernel()?.slots.lock().complete(index)
    }
}

#[vtable]
impl SrqOps for Ferrite {
    type Srq = FerriteSrq;

    fn create_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        FerriteSrq::create(pd, new, attr, None, udata)
    }

    /// Sets the limit below which an event is raised, once.
    fn modify_srq_limit(srq: &Srq<Self>, limit: u32) -> Result {
        srq.device().hw.execute(&ModifySrq {
            srqn: srq.number(),
            limit,
        })
    }

    /// Gives a queue of a process another ring, of entries of the same size. Receives that were
    /// not taken are moved to it by the device; the process does not post meanwhile.
    fn resize_srq(srq: &Srq<Self>, max_wr: u32, udata: Option<&Udata<'_, Self>>) -> Result {
        let dev = srq.device();
        if !dev.has(abi::FEATURE_RESIZE_SRQ) {
            return Err(errno::eopnotsupp());
        }
        let Some(udata) = udata else {
            // The kernel posts in any context, and could not be kept from it while the device
            // moves.
            return Err(errno::eopnotsupp());
        };
        let (geometry, extent) = checked_request(udata, dev.caps.rq_max_log_entries)?;
        if max_wr == 0 || max_wr > 1 << geometry.log_entries {
            return Err(EINVAL);
        }
        srq.memory.resize(dev, extent, |buffer| {
            dev.hw.make_long(&ResizeSrq {
                srqn: srq.number(),
                log_entries: geometry.log_entries,
                reserved: [0; 3],
                ring_offset: geometry.ring_offset,
                record_offset: geometry.record_offset,
                buffer,
            })?;
            srq.max_wr.store(1 << geometry.log_entries, Relaxed);
            Ok(())
        })
    }

    /// Tells the attributes.
    fn query_srq(srq: &Srq<Self>) -> Result<SrqAttr> {
        let dev = srq.device();
        let state: SrqState = dev.hw.query(&object(srq.number()))?;
        Ok(SrqAttr {
            max_wr: srq.max_wr.load(Relaxed),
            max_sge: srq.max_sge,
            limit: state.limit,
        })
    }

    /// Ends a shared receive queue: afterwards the device does not touch its buffers.
    fn destroy_srq(srq: &Srq<Self>) -> Result {
        srq.object.destroy();
        srq.device().hw.srqs.remove(srq.number() as usize);
        Ok(())
    }

    /// Posts receive work requests.
    fn post_srq_recv(srq: &Srq<Self>, list: &mut RecvList<'_>) -> Result {
        let ring = srq.memory.kernel().ok_or(EINVAL)?;
        let mut slots = ring.slots.lock();
        let before = slots.producer;
        let mut result = Ok(());
        while let Some(wr) = list.next() {
            if wr.sges().len() > srq.max_sge as usize {
                result = Err(EINVAL);
                break;
            }
            let Some((index, place)) = slots.peek() else {
                result = Err(ENOMEM);
                break;
            };
            let sges = wr.sges().iter().map(wqe::device_sge);
            result = wqe::write_receive(index, sges, |block, contents| {
                ring.memory.put(place * ring.stride + block, contents)
            });
            if result.is_err() {
                break;
            }
            slots.push(wr.wr_id());
        }
        if slots.producer != before {
            dma_wmb();
            ring.set_producer(slots.producer)?;
        }
        result
    }

    fn describe_srq(srq: &Srq<Self>, details: &mut Details<'_>) -> Result {
        details.number(c"srqn", srq.number())
    }
}

/// A ring for the kernel.
fn kernel_ring(
    dev: &Device<Ferrite>,
    geometry: &Geometry,
) -> Result<(QueueMemory<KernelRing>, QueuePlace)> {
    let record = geometry.record_offset as usize / BLOCK_SIZE;
    let stride = (1 << geometry.log_stride) / BLOCK_SIZE;
    let entries = 1 << geometry.log_entries;
    QueueMemory::<KernelRing>::of_kernel(dev, record + RECORD_BLOCKS, |memory| {
        try_pin_init!(KernelRing {
            memory,
            stride,
            record,
            slots <- new_irq_spinlock!(SrqSlots::new(entries)?, "ferrite_srq"),
        }? Error)
    })
}

/// What a process asks for, if it makes sense.
fn checked_request(udata: &Udata<'_, Ferrite>, max_log_entries: u8) -> Result<(Geometry, Extent)> {
    let request: UverbsSrqRequest = udata.read(core::mem::size_of::<UverbsSrqRequest>())?;
    Geometry::of_process(&request, max_log_entries)
}

#[kunit_tests(ferrite_srq)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    fn request(change: impl FnOnce(&mut UverbsSrqRequest)) -> UverbsSrqRequest {
        let mut request = UverbsSrqRequest::zeroed();
        request.buffer = 0x1_0000;
        request.length = 64 * 64 + 128;
        request.record_offset = 64 * 64;
        request.log_entries = 6;
        request.log_stride = 6;
        change(&mut request);
        request
    }

    #[test]
    fn receives_complete_in_any_order_and_once() -> Result {
        let mut slots = SrqSlots::new(4)?;
        for id in 10..14 {
            assert!(slots.peek().is_some());
            slots.push(id);
        }
        assert!(slots.peek().is_none());
        assert_eq!(slots.complete(2), Some(12));
        assert_eq!(slots.complete(2), None);
        assert_eq!(slots.complete(0), Some(10));
        assert_eq!(slots.complete(7), None);
        Ok(())
    }

    #[test]
    fn a_receive_that_takes_long_holds_its_slot_but_not_the_ring() -> Result {
        let mut slots = SrqSlots::new(4)?;
        for id in 0..4 {
            slots.push(id);
        }
        // The first one stays; the others come and go many times round the ring.
        for id in 1..4 {
            assert_eq!(slots.complete(id), Some(id.into()));
        }
        for round in 0..100 {
            let (index, place) = slots.peek().ok_or(ENOMEM)?;
            assert!(index != 0 && place < 4);
            slots.push(100 + round);
            assert_eq!(slots.complete(index), Some(100 + round));
        }
        assert_eq!(slots.complete(0), Some(0));
        Ok(())
    }

    #[test]
    fn the_ring_is_full_when_its_places_are_not_known_to_be_taken() -> Result {
        let mut slots = SrqSlots::new(2)?;
        slots.push(1);
        slots.push(2);
        assert!(slots.peek().is_none());
        // The second completes first: both places are free, but only its slot.
        assert_eq!(slots.complete(1), Some(2));
        assert_eq!(slots.peek(), Some((1, 0)));
        slots.push(3);
        assert!(slots.peek().is_none());
        Ok(())
    }

    #[test]
    fn the_ring_of_the_kernel_holds_what_was_asked_for() {
        let geometry = Geometry::for_kernel(&SrqAttr {
            max_wr: 33,
            max_sge: 4,
            limit: 0,
        });
        assert_eq!((geometry.log_entries, geometry.log_stride), (6, 7));
        assert_eq!(
            (geometry.ring_offset, geometry.record_offset),
            (0, 64 * 128)
        );
    }

    #[test]
    fn a_process_cannot_place_its_ring_outside_its_buffer() {
        assert!(Geometry::of_process(&request(|_| {}), 15).is_ok());
        assert!(Geometry::of_process(&request(|r| r.length -= 1), 15).is_err());
        assert!(Geometry::of_process(&request(|r| r.ring_offset = 64), 15).is_ok());
        assert!(Geometry::of_process(&request(|r| r.ring_offset = 256), 15).is_err());
        assert!(Geometry::of_process(&request(|r| r.record_offset = 32), 15).is_err());
        assert!(Geometry::of_process(&request(|r| r.log_entries = 16), 15).is_err());
        assert!(Geometry::of_process(&request(|r| r.log_stride = 10), 15).is_err());
        assert!(Geometry::of_process(&request(|r| r.buffer += 8), 15).is_err());
    }
}
