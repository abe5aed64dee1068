// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! Both rings and the record lie in one buffer: of the process for its own queue pairs, coherent
//! memory for those of the kernel. Only the latter are posted to here.

use crate::{
    abi,
    abi::{
        AtomicPart,
        Buffer,
        CommandOpcode,
        CompletionEntry,
        CreateQueuePair,
        ModifyQueuePair,
        MulticastMember,
        Plain,
        QueuePairRecord,
        QueuePairState,
        SendOpcode,
        Service,
        Transport,
        UverbsQpRequest,
        UverbsQpResponse,
        BLOCK_SIZE, //
    },
    ah,
    ah::FerriteAh,
    bars::Doorbells,
    bindings,
    cq::FerriteCq,
    cqp::object,
    device::Ferrite,
    dma_types::Block,
    hardware::DeviceObject,
    kernel_ext::{
        barrier::{
            dma_wmb,
            mb, //
        },
        errno,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
    },
    lent::Lent,
    mr::{
        device_rights,
        effective,
        FerriteMr,
        UserMemory, //
    },
    numbers::Number,
    port::{
        DEVICE_PORT,
        PORT, //
    },
    qp_event::QpEvents,
    rdma::{
        kind,
        Access,
        Cq,
        Device,
        Gid,
        Mtu,
        New,
        Qp,
        QpAttr,
        QpCap,
        QpCreateFlags,
        QpEvent,
        QpInitAttr,
        QpQuery,
        QpState,
        QpType,
        QpValues,
        RecvList,
        SendFlags,
        SendList,
        SendOp,
        SendWr,
        Udata,
        Wc,
        WcOpcode,
        WcStatus, //
    },
    ring::RingMemory,
    srq::FerriteSrq,
    wqe,
    wqe::SendWqe,
};
use kernel::{
    dma::Coherent,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Full,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};

/// Completion queue of a queue that is not there.
const NO_CQ: u32 = u32::MAX;

/// Blocks of a record.
const RECORD_BLOCKS: usize = core::mem::size_of::<QueuePairRecord>() / BLOCK_SIZE;
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

/// What kinds of work requests a send queue has to have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendUse {
    /// Those of connected queue pairs.
    Connected,
    /// The same, and registrations with a message.
    Registering,
    /// Datagrams.
    Datagrams,
}

/// What a queue pair is to be able to do besides, and not all of its service are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Abilities {
    /// A failed registration drains its send queue.
    drains: bool,
    /// Registrations come with messages.
    register_send: bool,
    /// Lists of pieces of regions are registered.
    lists: bool,
}

impl Abilities {
    /// What the kernel asks of a queue pair on a device with such features.
    fn of_kernel(flags: QpCreateFlags, service: Service, features: u64) -> Result<Self> {
        const KNOWN: QpCreateFlags = QpCreateFlags::from_raw(
            QpCreateFlags::REGISTER_DRAINS.as_raw() | QpCreateFlags::REGISTER_SEND.as_raw(),
        );
        let asked = Self {
            drains: flags.contains(QpCreateFlags::REGISTER_DRAINS),
            register_send: flags.contains(QpCreateFlags::REGISTER_SEND),
            lists: false,
        };
        let mut needed = 0;
        if asked.drains {
            needed |= abi::FEATURE_FAST_REGISTER;
        }
        if asked.register_send {
            needed |= abi::FEATURE_REGISTER_SEND;
        }
        if flags.without(KNOWN) != QpCreateFlags::default() || features & needed != needed {
            return Err(errno::eopnotsupp());
        }
        asked.checked(service)
    }

    /// What a process asks: registrations that name memory by key only.
    fn of_process(flags: u8, service: Service, features: u64) -> Result<Self> {
        const KNOWN: u8 = abi::UVERBS_QP_LISTS | abi::UVERBS_QP_REGISTER_DRAINS;
        if flags & !KNOWN != 0 {
            return Err(EINVAL);
        }
        if flags != 0 && features & abi::FEATURE_LISTS == 0 {
            return Err(errno::eopnotsupp());
        }
        let asked = Self {
            drains: flags & abi::UVERBS_QP_REGISTER_DRAINS != 0,
            register_send: false,
            lists: flags & abi::UVERBS_QP_LISTS != 0,
        };
        asked.checked(service)
    }

    /// Checks that the service has what is asked for.
    fn checked(self, service: Service) -> Result<Self> {
        let possible = match service {
            Service::Rc | Service::XrcIni => true,
            // Its messages invalidate nothing, and are not sent with a registration.
            Service::Uc => !self.register_send,
            Service::Gsi | Service::Ud | Service::XrcTgt => self == Self::default(),
        };
        if possible {
            Ok(self)
        } else {
            Err(EINVAL)
        }
    }

    /// How the device is told.
    fn flags(self) -> u16 {
        let mut flags = 0;
        if self.drains {
            flags |= abi::QP_FLAG_FAST_REGISTER_DRAINS;
        }
        if self.lists {
            flags |= abi::QP_FLAG_LISTS;
        }
        flags
    }

    /// What its send queue has to have room for, where the kernel posts to it.
    fn requests(self, service: Service) -> SendUse {
        match service {
            Service::Ud | Service::Gsi => SendUse::Datagrams,
            _ if self.register_send => SendUse::Registering,
            _ => SendUse::Connected,
        }
    }
}

/// Where the parts of a queue pair's buffer are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingLayout {
    sq_offset: u32,
    rq_offset: u32,
    record_offset: u32,
    sq_log_blocks: u8,
    rq_log_entries: u8,
    rq_log_stride: u8,
}

impl RingLayout {
    fn sq_bytes(&self) -> u64 {
        (BLOCK_SIZE as u64) << self.sq_log_blocks
    }

    fn rq_bytes(&self) -> u64 {
        1 << (self.rq_log_entries + self.rq_log_stride)
    }

    /// The layout of a queue pair that nobody posts to: a record.
    const RECORD_ONLY: Self = Self {
        sq_offset: 0,
        rq_offset: 0,
        record_offset: 0,
        sq_log_blocks: 0,
        rq_log_entries: 0,
        rq_log_stride: abi::RQ_MIN_LOG_STRIDE,
    };

    /// The layout for a queue pair of the kernel that can hold `cap` of such requests. Receive entries
    /// are whole blocks.
    pub(crate) fn for_kernel(cap: &QpCap, requests: SendUse) -> Self {
        let (sges, inline) = (cap.max_send_sge as usize, cap.max_inline_data as usize);
        let per_request = match requests {
            SendUse::Connected => abi::blocks_per_request(false, sges, inline),
            SendUse::Registering => abi::blocks_per_registering_request(sges, inline),
            SendUse::Datagrams => abi::blocks_per_request(true, sges, inline),
        } as u32;
        let blocks = (cap.max_send_wr.max(1) * per_request).next_power_of_two();
        let entries = cap.max_recv_wr.max(1).next_power_of_two();
        let stride = core::mem::size_of::<abi::ReceiveHeader>()
            + cap.max_recv_sge as usize * core::mem::size_of::<abi::Sge>();
        let stride = stride.next_power_of_two().max(BLOCK_SIZE);
        let mut layout = Self {
            sq_offset: 0,
            rq_offset: 0,
            record_offset: 0,
            sq_log_blocks: blocks.trailing_zeros() as u8,
            rq_log_entries: entries.trailing_zeros() as u8,
            rq_log_stride: stride.trailing_zeros() as u8,
        };
        layout.rq_offset = layout.sq_bytes() as u32;
        layout.record_offset = layout.rq_offset + layout.rq_bytes() as u32;
        layout
    }

    /// The layout that a process says its buffer has, if it makes sense.
    ///
    /// What it says about a receive queue that is not there does not count.
    pub(crate) fn from_request(
        request: &UverbsQpRequest,
        caps: &abi::DeviceCaps,
        receives: bool,
    ) -> Result<Self> {
        let mut layout = Self {
            sq_offset: request.sq_offset,
            rq_offset: request.rq_offset,
            record_offset: request.record_offset,
            sq_log_blocks: request.sq_log_blocks,
            rq_log_entries: request.rq_log_entries,
            rq_log_stride: request.rq_log_stride,
        };
        if !receives {
            layout.rq_offset = layout.record_offset;
            layout.rq_log_entries = 0;
            layout.rq_log_stride = abi::RQ_MIN_LOG_STRIDE;
        }
        if layout.sq_log_blocks > caps.sq_max_log_blocks
            || layout.rq_log_entries > caps.rq_max_log_entries
            || !(abi::RQ_MIN_LOG_STRIDE..=abi::RQ_MAX_LOG_STRIDE).contains(&layout.rq_log_stride)
            || request.reserved != 0
        {
            return Err(EINVAL);
        }
        let aligned = |offset: u64| offset % BLOCK_SIZE as u64 == 0;
        let fits = |offset: u32, bytes: u64| {
            aligned(offset.into()) && u64::from(offset) + bytes <= request.length
        };
        let record = core::mem::size_of::<QueuePairRecord>() as u64;
        if !aligned(request.buffer)
            || !fits(layout.sq_offset, layout.sq_bytes())
            || !fits(layout.rq_offset, layout.rq_bytes())
            || !fits(layout.record_offset, record)
        {
            return Err(EINVAL);
        }
        Ok(layout)
    }

    /// Blocks of the whole buffer, where the record is last.
    fn blocks(&self) -> usize {
        self.record_offset as usize / BLOCK_SIZE + RECORD_BLOCKS
    }
}

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
    id: u64,
    /// Zero where no request begins.
    blocks: u8,
    opcode: WcOpcode,
}

impl Default for SendSlot {
    fn default() -> Self {
        Self {
            id: 0,
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
struct KernelRings {
    /// Both rings, written by the driver, and the record, of which each side writes one half.
    memory: Lent<RingMemory>,
    layout: RingLayout,
    signal_all: bool,
    /// Whether it was made for registrations with messages.
    register_send: bool,
    #[pin]
    sq: IrqSpinLock<WorkRing<SendSlot>>,
    /// Ids of the receives that the device has.
    #[pin]
    rq: IrqSpinLock<WorkRing<u64>>,
}

impl KernelRings {
    fn new(
        dev: &Device<Ferrite>,
        layout: RingLayout,
        signal_all: bool,
        register_send: bool,
    ) -> Result<Pin<KBox<Self>>> {
        let rings = KBox::pin_init(
            try_pin_init!(Self {
                memory: Lent::new(
                    &dev.hw.reach,
                    RingMemory::new(dev.parent(), layout.blocks())?
                ),
                sq <- new_irq_spinlock!(WorkRing::new(1 << layout.sq_log_blocks)?, "ferrite_sq"),
                rq <- new_irq_spinlock!(WorkRing::new(1 << layout.rq_log_entries)?, "ferrite_rq"),
                layout,
                signal_all,
                register_send,
            }? Error),
            GFP_KERNEL,
        )?;
        rings.set_record(SEND_WAKE, 1)?;
        Ok(rings)
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
    fn reset(&self) -> Result {
        let mut sq = self.sq.lock();
        let mut rq = self.rq.lock();
        sq.reset();
        rq.reset();
        self.set_record(SEND_PRODUCER, 0)?;
        self.set_record(RECEIVE_PRODUCER, 0)
    }
}

/// Where rings and record are.
enum Memory {
    User {
        _memory: UserMemory,
    },
    Kernel(Pin<KBox<KernelRings>>),
    /// Of a queue pair that nobody posts to. It may outlive the process that made it.
    Record {
        _memory: Lent<Coherent<[Block]>>,
    },
}

/// The driver's data of a queue pair.
///
/// The fields are dropped in order: the device lets go of the queue pair before its memory goes,
/// and the number is free last.
#[pin_data]
pub(crate) struct FerriteQp {
    object: DeviceObject,
    memory: Memory,
    number: Number,
    layout: RingLayout,
    /// The state that the consumer brought the queue pair to; the device may have gone on to the
    /// error state.
    state: Atomic<u32>,
    events: Arc<QpEvents>,
    /// The consumer was told of the last receive off a shared queue, since state RESET.
    last_receive: Atomic<u32>,
    #[pin]
    values: Mutex<QpValues>,
    /// The multicast groups it is in, each as often as it was let in.
    #[pin]
    groups: Mutex<KVec<Gid>>,
}

impl FerriteQp {
    /// Number in the device.
    pub(crate) fn qpn(&self) -> u32 {
        self.number.get()
    }

    /// The state that the consumer brought it to.
    pub(crate) fn state(&self) -> QpState {
        QpState::from_raw(self.state.load(Relaxed)).unwrap_or(QpState::Err)
    }

    /// Base-2 logarithms of send blocks and receive entries.
    pub(crate) fn ring_sizes(&self) -> (u8, u8) {
        (self.layout.sq_log_blocks, self.layout.rq_log_entries)
    }

    /// Send blocks and receives that the device has, where the kernel posts them.
    pub(crate) fn outstanding(&self) -> Option<(u32, u32)> {
        let rings = self.rings().ok()?;
        let (sends, receives) = (rings.sq.lock().used(), rings.rq.lock().used());
        Some((sends, receives))
    }

    /// Has the consumer told that something happened. May be called from any context, and cannot
    /// fail; what happens more than once before the consumer is told counts once.
    pub(crate) fn raise(qp: &Qp<Ferrite>, event: QpEvent) {
        let hw = &qp.device().hw;
        // A device that failed may have said it, and it is said in its place: once is enough. While
        // the device works, one that came late, after state RESET, must not stand for the next.
        if event == QpEvent::LastWqeReached && qp.last_receive.xchg(1, Full) != 0 && hw.is_dead() {
            return;
        }
        qp.events.raise(&hw.events, qp, event);
    }

    /// The device failed, and takes no more receives: a consumer in the kernel that shares them
    /// among queue pairs is told, as the device would have done. May be called from any context.
    pub(crate) fn stopped(qp: &Qp<Ferrite>) {
        if !qp.is_user() && qp.srq().is_some() {
            Self::raise(qp, QpEvent::LastWqeReached);
        }
    }

    fn rings(&self) -> Result<&KernelRings> {
        match &self.memory {
            Memory::Kernel(rings) => Ok(rings),
            Memory::User { .. } | Memory::Record { .. } => Err(EINVAL),
        }
    }

    fn service(dev: &Device<Ferrite>, qp_type: Option<QpType>) -> Result<Service> {
        match qp_type {
            Some(QpType::Rc) => Ok(Service::Rc),
            Some(QpType::Uc) if dev.has(abi::FEATURE_UC) => Ok(Service::Uc),
            Some(QpType::Ud) if dev.has(abi::FEATURE_UD) => Ok(Service::Ud),
            Some(QpType::Gsi) if dev.has(abi::FEATURE_UD) => Ok(Service::Gsi),
            Some(QpType::XrcInitiator) if dev.has(abi::FEATURE_XRC) => Ok(Service::XrcIni),
            Some(QpType::XrcTarget) if dev.has(abi::FEATURE_XRC) => Ok(Service::XrcTgt),
            _ => Err(errno::eopnotsupp()),
        }
    }

    /// Makes a queue pair.
    pub(crate) fn create<'a>(
        dev: &Device<Ferrite>,
        mut new: New<'a, kind::Qp, Ferrite>,
        attr: &mut QpInitAttr<'_, Ferrite>,
        udata: Option<&Udata<'_, Ferrite>>,
    ) -> Result<&'a Qp<Ferrite>> {
        let service = Self::service(dev, attr.qp_type())?;
        if attr.srq().is_some() && !dev.has(abi::FEATURE_SRQ) {
            return Err(errno::eopnotsupp());
        }
        let request: Option<UverbsQpRequest> = match udata {
            // A target has no queues to say anything about.
            Some(udata) if service == Service::XrcTgt => Some(udata.read(0)?),
            Some(udata) => Some(udata.read(core::mem::size_of::<UverbsQpRequest>())?),
            None => None,
        };
        let features = dev.features();
        let abilities = match &request {
            // The core takes other flags of processes, none of which the device has.
            Some(_) if attr.create_flags() != QpCreateFlags::default() => {
                return Err(errno::eopnotsupp());
            }
            Some(request) => Abilities::of_process(request.flags, service, features)?,
            None => Abilities::of_kernel(attr.create_flags(), service, features)?,
        };
        let roles = Roles::new(service, attr)?;
        let mut cap = checked_cap(dev, &attr.cap())?;
        if !roles.receives {
            cap.max_recv_wr = 0;
            cap.max_recv_sge = 0;
        }
        let number = match service {
            Service::Gsi => dev.gsi.take()?,
            _ => dev.qpns.take()?,
        };
        let qpn = number.get();

        let (memory, buffer, layout, doorbell_page, flags): (_, Buffer, _, _, _) = match &request {
            _ if service == Service::XrcTgt => {
                let layout = RingLayout::RECORD_ONLY;
                let memory: Coherent<[Block]> =
                    Coherent::zeroed_slice(dev.parent(), layout.blocks(), GFP_KERNEL)?;
                let memory = Lent::new(&dev.hw.reach, memory);
                let buffer = Buffer::contiguous(memory.dma_handle(), memory.size() as u64);
                let page = Doorbells::KERNEL_PAGE;
                (Memory::Record { _memory: memory }, buffer, layout, page, 0)
            }
            Some(request) => {
                let layout = RingLayout::from_request(request, &dev.caps, roles.receives)?;
                let context = udata.and_then(|udata| udata.context());
                let page = context.ok_or(EINVAL)?.doorbell_page();
                let memory = UserMemory::pin_rings(dev, request.buffer, request.length)?;
                let buffer = memory.buffer();
                (Memory::User { _memory: memory }, buffer, layout, page, 0)
            }
            None => {
                let requests = abilities.requests(service);
                let layout = RingLayout::for_kernel(&cap, requests);
                if layout.sq_log_blocks > dev.caps.sq_max_log_blocks
                    || layout.rq_log_entries > dev.caps.rq_max_log_entries
                {
                    return Err(EINVAL);
                }
                let rings =
                    KernelRings::new(dev, layout, attr.signal_all(), abilities.register_send)?;
                let buffer = rings.memory.buffer();
                let mut flags = abi::QP_FLAG_PRIVILEGED;
                if requests != SendUse::Datagrams && dev.has(abi::FEATURE_FAST_REGISTER) {
                    flags |= abi::QP_FLAG_FAST_REGISTER;
                }
                let page = Doorbells::KERNEL_PAGE;
                (Memory::Kernel(rings), buffer, layout, page, flags)
            }
        };
        let object = DeviceObject::create(
            &dev.hw,
            &CreateQueuePair {
                qpn,
                pd: roles.pd,
                send_cqn: roles.send_cq.map_or(NO_CQ, |cq| cq.number()),
                receive_cqn: roles.recv_cq.map_or(NO_CQ, |cq| cq.number()),
                service: service.number(),
                transport: Transport::RoceV2.number(),
                flags: flags | roles.flags | abilities.flags(),
                sq_log_blocks: layout.sq_log_blocks,
                rq_log_entries: layout.rq_log_entries,
                rq_log_stride: layout.rq_log_stride,
                port: DEVICE_PORT,
                srqn: roles.srqn,
                doorbell_page,
                buffer,
                sq_offset: layout.sq_offset,
                rq_offset: layout.rq_offset,
                record_offset: layout.record_offset,
                xrcd: roles.xrcd,
                reserved: [0; 3],
            },
            CommandOpcode::DestroyQueuePair,
            qpn,
        )?;
        let values = QpValues {
            cap,
            signal_all: attr.signal_all(),
            ..QpValues::default()
        };
        new.set_number(qpn);
        attr.set_cap(&cap);
        let qp = new.init(try_pin_init!(Self {
            object,
            memory,
            number,
            layout,
            state: Atomic::new(QpState::Reset.as_raw()),
            events: QpEvents::new()?,
            last_receive: Atomic::new(0),
            values <- new_mutex!(values, "ferrite_qp"),
            groups <- new_mutex!(KVec::new(), "ferrite_qp_groups"),
        }? Error))?;
        let cqs = || [roles.send_cq, roles.recv_cq].into_iter().flatten();
        let known = cqs()
            .try_for_each(|cq| FerriteCq::attach(cq, qp))
            .and_then(|()| dev.hw.qps.insert(qpn as usize, qp.get_ref()))
            .and_then(|()| match udata {
                Some(udata) => udata.respond(&UverbsQpResponse { qpn, reserved: 0 }),
                None => Ok(()),
            });
        if let Err(error) = known {
            dev.hw.qps.remove(qpn as usize);
            cqs().for_each(|cq| FerriteCq::detach(cq, qpn));
            return Err(error);
        }
        Ok(qp)
    }

    /// Ends a queue pair: afterwards the device touches neither its queues nor its buffers.
    pub(crate) fn destroy(qp: &Qp<Ferrite>) {
        qp.object.destroy();
        let qpn = qp.qpn();
        qp.device().hw.qps.remove(qpn as usize);
        Self::forget_completions(qp);
        for cq in [qp.send_cq(), qp.recv_cq()].into_iter().flatten() {
            FerriteCq::detach(cq, qpn);
        }
    }

    /// Drops the completions that nobody has polled: the next queue pair of this number must not
    /// see them, nor must this one if it is used again. Receives of a shared queue are given back.
    fn forget_completions(qp: &Qp<Ferrite>) {
        let qpn = qp.qpn();
        if let Some(cq) = qp.send_cq() {
            FerriteCq::purge(cq, qpn, |entry| Self::give_back_shared(qp, entry));
        }
        if let Some(cq) = qp.recv_cq() {
            FerriteCq::purge(cq, qpn, |entry| Self::give_back_shared(qp, entry));
        }
    }

    /// Gives a receive of a shared queue back whose completion nobody will see.
    fn give_back_shared(qp: &Qp<Ferrite>, entry: &CompletionEntry) {
        if let Some(srq) = qp.srq() {
            if entry.flags & abi::COMPLETION_SRQ != 0 {
                FerriteSrq::complete(srq, entry.index);
            }
        }
    }

    /// Changes state and attributes.
    pub(crate) fn modify(qp: &Qp<Ferrite>, attr: &QpAttr<'_>) -> Result {
        let dev = qp.device();
        let features = dev.features();
        let mut command = translate(attr, &dev.caps, features)?;
        if command.mask & abi::MODIFY_ADDRESS_VECTOR != 0 {
            // Before the lock: the device may take its time.
            dev.gids
                .settle(command.address_vector.source_gid_index, true)?;
        }
        let mut values = qp.values.lock();
        let current = attr.current_state().unwrap_or(values.state);
        let next = attr.state().unwrap_or(current);
        let qp_type = qp.qp_type().ok_or(EINVAL)?;
        if !attr.transition_is_ok(current, next, qp_type) {
            return Err(EINVAL);
        }
        command.qpn = qp.qpn();
        complete_extended(&mut command, qp_type, current, next);
        let told_later = tell_rights_once(
            &mut command,
            peer_rights(values.access, features),
            qp_type,
            (current, next),
        );
        if command.mask != 0 && (!told_later || dev.hw.is_dead()) {
            // What a send queue that had stopped still holds is flushed before it goes on.
            let flushes = next == QpState::Rts && current != QpState::Rtr;
            let done = if flushes {
                dev.hw.execute_long(&command)
            } else {
                dev.hw.execute(&command)
            };
            match done {
                // A failed device has stopped all its queue pairs: that much can be said.
                Err(_) if dev.hw.is_dead() && next == QpState::Err => Self::stopped(qp),
                Err(_) if dev.hw.is_dead() && next == QpState::Reset => {}
                result => result?,
            }
        }
        values.merge(attr);
        values.access = effective(values.access, features);
        if told_later {
            // The device was not asked, and may have found an error meanwhile: the state is what it is.
            return Ok(());
        }
        values.state = next;
        qp.state.store(next.as_raw(), Relaxed);
        if next == QpState::Reset {
            qp.last_receive.store(0, Relaxed);
            if let Memory::Kernel(rings) = &qp.memory {
                Self::forget_completions(qp);
                rings.reset()?;
            }
        }
        Ok(())
    }

    /// Tells state and attributes.
    pub(crate) fn query(qp: &Qp<Ferrite>, attr: &mut QpQuery<'_>) -> Result {
        let dev = qp.device();
        let mut values = qp.values.lock();
        let reply: QueuePairState = dev.hw.query(&object(qp.qpn()))?;
        let mut answer = *values;
        let state = QpState::from_raw(reply.attributes.state.into()).ok_or(EIO)?;
        answer.state = state;
        answer.sq_psn = reply.send_psn;
        answer.rq_psn = reply.receive_psn;
        answer.sq_draining = reply.draining != 0;
        values.state = state;
        qp.state.store(state.as_raw(), Relaxed);
        attr.fill(&answer);
        Ok(())
    }

    /// Lets a datagram queue pair into a multicast group.
    pub(crate) fn join(qp: &Qp<Ferrite>, gid: Gid) -> Result {
        let dev = qp.device();
        if !dev.has(abi::FEATURE_MULTICAST) {
            return Err(errno::eopnotsupp());
        }
        let mut groups = qp.groups.lock();
        let member = groups.contains(&gid);
        groups.push(gid, GFP_KERNEL_ACCOUNT)?;
        if !member {
            let told = Self::tell_membership(qp, CommandOpcode::AttachMulticast, gid);
            if told.is_err() {
                groups.pop();
            }
            told?;
        }
        Ok(())
    }

    /// Lets a queue pair out of a multicast group. If it was in it, this always succeeds: the core
    /// would never let go of the queue pair otherwise.
    pub(crate) fn leave(qp: &Qp<Ferrite>, gid: Gid) -> Result {
        let mut groups = qp.groups.lock();
        let place = groups.iter().position(|group| *group == gid);
        groups.remove(place.ok_or(EINVAL)?).map_err(|_| EINVAL)?;
        if groups.contains(&gid) {
            return Ok(());
        }
        let hw = &qp.device().hw;
        if let Err(error) = Self::tell_membership(qp, CommandOpcode::DetachMulticast, gid) {
            if !hw.is_dead() {
                dev_err!(hw.pdev, "a member cannot leave its group: {:?}\n", error);
                hw.fail();
            }
        }
        Ok(())
    }

    fn tell_membership(qp: &Qp<Ferrite>, opcode: CommandOpcode, gid: Gid) -> Result {
        let member = MulticastMember {
            gid: gid.0,
            qpn: qp.qpn(),
            reserved: 0,
        };
        qp.device().hw.execute_as(opcode, &member)
    }

    /// Posts send work requests.
    pub(crate) fn post_send(qp: &Qp<Ferrite>, list: &mut SendList<'_, Ferrite>) -> Result {
        let rings = qp.rings()?;
        if matches!(qp.state(), QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(EINVAL);
        }
        let hw = &qp.device().hw;
        let features = qp.device().features();
        let mut sq = rings.sq.lock();
        let before = sq.producer;
        let mut result = Ok(());
        while let Some(wr) = list.next() {
            result = Self::put_send(rings, &mut sq, &wr, features);
            if result.is_err() {
                break;
            }
        }
        if sq.producer != before && rings.publish(SEND_PRODUCER, sq.producer, SEND_WAKE)? {
            hw.doorbells.send(qp.qpn(), sq.producer);
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
        features: u64,
    ) -> Result {
        let (request, opcode) = build_send(wr, rings, features)?;
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
            id: wr.id(),
            blocks: blocks as u8,
            opcode,
        };
        sq.push(slot, blocks);
        Ok(())
    }

    /// Posts receive work requests.
    pub(crate) fn post_receive(qp: &Qp<Ferrite>, list: &mut RecvList<'_>) -> Result {
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
            rq.push(wr.id(), 1);
        }
        if rq.producer != before && rings.publish(RECEIVE_PRODUCER, rq.producer, RECEIVE_WAKE)? {
            hw.doorbells.receive(qp.qpn());
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
        let (id, fallback) = if received && entry.flags & abi::COMPLETION_SRQ != 0 {
            (
                FerriteSrq::complete(qp.srq()?, entry.index)?,
                WcOpcode::Recv,
            )
        } else if received {
            let mut rq = rings.rq.lock();
            let id = rq.outstanding(entry.index)?;
            rq.consume_to(entry.index.wrapping_add(1));
            (id, WcOpcode::Recv)
        } else {
            let slot = rings.sq.lock().complete(entry.index)?;
            (slot.id, slot.opcode)
        };
        let mut wc = Wc::new(
            qp,
            id,
            WcOpcode::from_raw(entry.opcode.into()).unwrap_or(fallback),
        );
        wc.status = WcStatus::from_raw(entry.status.into()).unwrap_or(WcStatus::General);
        wc.byte_len = entry.byte_count;
        wc.vendor_err = entry.vendor_syndrome;
        if entry.flags & abi::COMPLETION_IMMEDIATE != 0 {
            // Four bytes in the lower half.
            wc.imm_data = Some(entry.immediate as u32);
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
                found = Some((slot.id, slot.opcode));
            }
        }
        if found.is_none() && qp.recv_cq().is_some_and(|cq| cq.number() == cqn) {
            let mut rq = rings.rq.lock();
            let oldest = rq.consumer;
            if let Some(id) = rq.outstanding(oldest) {
                rq.consume_to(oldest.wrapping_add(1));
                found = Some((id, WcOpcode::Recv));
            }
        }
        let (id, opcode) = found?;
        let mut wc = Wc::new(qp, id, opcode);
        wc.status = WcStatus::WorkRequestFlushed;
        Some(wc)
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

/// Checks what is asked of a queue pair; returns what it gets.
fn checked_cap(dev: &Device<Ferrite>, asked: &QpCap) -> Result<QpCap> {
    let caps = &dev.caps;
    if asked.max_send_wr > 1 << caps.sq_max_log_blocks
        || asked.max_recv_wr > 1 << caps.rq_max_log_entries
        || asked.max_send_sge > caps.max_sge.into()
        || asked.max_recv_sge > caps.max_sge.into()
        || asked.max_inline_data > caps.max_inline
    {
        return Err(EINVAL);
    }
    Ok(*asked)
}

/// The device's form of a send work request, and how its completion is called.
fn build_send(
    wr: &SendWr<'_, Ferrite>,
    rings: &KernelRings,
    features: u64,
) -> Result<(SendWqe, WcOpcode)> {
    let asked = wr.flags();
    let mut flags = 0;
    if rings.signal_all || asked.contains(SendFlags::SIGNALED) {
        flags |= abi::SEND_SIGNALED;
    }
    if asked.contains(SendFlags::SOLICITED) {
        flags |= abi::SEND_SOLICITED;
    }
    if asked.contains(SendFlags::FENCE) {
        flags |= abi::SEND_FENCE;
    }
    if let Some(to) = wr.datagram() {
        let (opcode, immediate) = match wr.op()? {
            SendOp::Send => (SendOpcode::Send, 0),
            SendOp::SendWithImm(immediate) => (SendOpcode::SendImmediate, immediate),
            _ => return Err(EINVAL),
        };
        let part = FerriteAh::part(&to, immediate)?;
        let mut request = SendWqe::datagram(opcode, flags, &part);
        add_data(&mut request, wr)?;
        return Ok((request, WcOpcode::Send));
    }
    let op = wr.op()?;
    if !is_agreed_on(&op, features) {
        return Err(EINVAL);
    }
    let (mut request, opcode) = match op {
        SendOp::Send => (SendWqe::send(SendOpcode::Send, flags, 0), WcOpcode::Send),
        SendOp::SendWithImm(immediate) => (
            SendWqe::send(SendOpcode::SendImmediate, flags, immediate),
            WcOpcode::Send,
        ),
        SendOp::SendWithInvalidate(tag) => (
            SendWqe::invalidate(SendOpcode::SendInvalidate, flags, tag),
            WcOpcode::Send,
        ),
        SendOp::RdmaWrite(to) => (
            SendWqe::remote(SendOpcode::Write, flags, 0, to.addr, to.rkey),
            WcOpcode::RdmaWrite,
        ),
        SendOp::RdmaWriteWithImm(to, immediate) => (
            SendWqe::remote(
                SendOpcode::WriteImmediate,
                flags,
                immediate,
                to.addr,
                to.rkey,
            ),
            WcOpcode::RdmaWrite,
        ),
        SendOp::RdmaRead(from) => (
            SendWqe::remote(SendOpcode::Read, flags, 0, from.addr, from.rkey),
            WcOpcode::RdmaRead,
        ),
        SendOp::CompareSwap {
            remote,
            compare,
            swap,
        } => {
            let part = AtomicPart {
                address: remote.addr,
                rkey: remote.rkey,
                reserved: 0,
                operand: swap,
                compare,
            };
            (
                SendWqe::atomic(SendOpcode::CompareSwap, flags, &part),
                WcOpcode::CompareSwap,
            )
        }
        SendOp::FetchAdd { remote, add } => {
            let part = AtomicPart {
                address: remote.addr,
                rkey: remote.rkey,
                reserved: 0,
                operand: add,
                compare: 0,
            };
            (
                SendWqe::atomic(SendOpcode::FetchAdd, flags, &part),
                WcOpcode::FetchAdd,
            )
        }
        SendOp::LocalInvalidate(tag) => {
            let request = SendWqe::invalidate(SendOpcode::LocalInvalidate, flags, tag);
            return Ok((request, WcOpcode::LocalInvalidate));
        }
        SendOp::RegMr { mr, key, access } => {
            let part = FerriteMr::register_part(mr, key, access)?;
            return Ok((SendWqe::register(flags, &part), WcOpcode::RegMr));
        }
        SendOp::RegisterSend { .. } if !rings.register_send => return Err(EINVAL),
        SendOp::RegisterSend {
            mr,
            key,
            access,
            invalidate,
        } => {
            let part = FerriteMr::register_part(mr, key, access)?;
            let request = SendWqe::register_send(flags, &part, invalidate);
            (request, WcOpcode::Send)
        }
    };
    add_data(&mut request, wr)?;
    Ok((request, opcode))
}

/// Whether the device has what an operation needs. One that it does not know would end the queue pair.
fn is_agreed_on(op: &SendOp<'_, Ferrite>, features: u64) -> bool {
    // Any of these will do.
    let needed = match op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => abi::FEATURE_ATOMICS,
        // The peer may have a list.
        SendOp::SendWithInvalidate(_) => {
            abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS | abi::FEATURE_LISTS
        }
        // The kernel has none, nor queue pairs that are made for them.
        SendOp::LocalInvalidate(_) => abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS,
        SendOp::RegisterSend { .. } => abi::FEATURE_REGISTER_SEND,
        // Without the feature there are no regions to register.
        SendOp::RegMr { .. } => return true,
        SendOp::Send
        | SendOp::SendWithImm(_)
        | SendOp::RdmaWrite(_)
        | SendOp::RdmaWriteWithImm(..)
        | SendOp::RdmaRead(_) => return true,
    };
    features & needed != 0
}

/// Adds the data of a work request, or where they are.
fn add_data(request: &mut SendWqe, wr: &SendWr<'_, Ferrite>) -> Result {
    if wr.flags().contains(SendFlags::INLINE) {
        return request.set_inline(|room| wr.copy_inline(room));
    }
    for sge in wr.sges() {
        request.push_sge(&wqe::device_sge(sge))?;
    }
    Ok(())
}

/// What a new queue pair belongs to, by service: targets of extended connections have neither
/// protection domain nor completion queues, initiators no receive queue.
struct Roles<'a> {
    pd: u32,
    send_cq: Option<&'a Cq<Ferrite>>,
    recv_cq: Option<&'a Cq<Ferrite>>,
    srqn: u32,
    xrcd: u32,
    flags: u16,
    /// Whether it has a receive queue of its own.
    receives: bool,
}

impl<'a> Roles<'a> {
    fn new(service: Service, attr: &QpInitAttr<'a, Ferrite>) -> Result<Self> {
        let mut roles = Self {
            pd: 0,
            send_cq: None,
            recv_cq: None,
            srqn: 0,
            xrcd: 0,
            flags: 0,
            receives: false,
        };
        if service == Service::XrcTgt {
            roles.xrcd = attr.xrcd().ok_or(EINVAL)?.number();
            return Ok(roles);
        }
        roles.pd = attr.pd().ok_or(EINVAL)?.number();
        roles.send_cq = Some(attr.send_cq().ok_or(EINVAL)?);
        if service == Service::XrcIni {
            return Ok(roles);
        }
        roles.recv_cq = Some(attr.recv_cq().ok_or(EINVAL)?);
        roles.receives = attr.srq().is_none();
        if let Some(srq) = attr.srq() {
            roles.srqn = srq.number();
            roles.flags = abi::QP_FLAG_SRQ;
        }
        Ok(roles)
    }
}

/// The device's form of a change of attributes. The number is left to the caller.
fn translate(attr: &QpAttr<'_>, caps: &abi::DeviceCaps, features: u64) -> Result<ModifyQueuePair> {
    /// What the device has no notion of.
    const REFUSED: u32 = bindings::ib_qp_attr_mask_IB_QP_ALT_PATH
        | bindings::ib_qp_attr_mask_IB_QP_CAP
        | bindings::ib_qp_attr_mask_IB_QP_RATE_LIMIT;
    if attr.mask() & REFUSED != 0 {
        return Err(errno::eopnotsupp());
    }
    let mut command = ModifyQueuePair::zeroed();
    let mask = &mut command.mask;
    /// Takes over an attribute that was given, if `$ok` says that its value is possible.
    macro_rules! take {
        ($value:expr => $field:ident, $bit:ident, $ok:expr) => {
            if let Some(value) = $value {
                #[allow(clippy::redundant_closure_call)]
                if !$ok(value) {
                    return Err(EINVAL);
                }
                command.$field = value;
                *mask |= abi::$bit;
            }
        };
    }
    let psn = |psn: u32| psn & 0xff_ffff;
    take!(attr.state().map(|state| state.as_raw() as u8) => state, MODIFY_STATE, |_| true);
    take!(
        attr.current_state().map(|state| state.as_raw() as u8) => current_state,
        MODIFY_CURRENT_STATE,
        |_| true
    );
    take!(attr.pkey_index() => pkey_index, MODIFY_PKEY, |index| index == 0);
    take!(attr.qkey() => qkey, MODIFY_QKEY, |_| true);
    take!(attr.path_mtu().map(log_mtu) => log_mtu, MODIFY_MTU, |mtu| mtu <= caps.max_log_mtu);
    take!(attr.timeout() => timeout, MODIFY_TIMEOUT, |timeout| timeout < 32);
    take!(attr.retry_count() => retry_count, MODIFY_RETRY, |count| count < 8);
    take!(attr.rnr_retry() => rnr_retry, MODIFY_RNR_RETRY, |count| count < 8);
    take!(attr.min_rnr_timer() => min_rnr_timer, MODIFY_MIN_RNR_TIMER, |timer| timer < 32);
    take!(attr.rq_psn().map(psn) => receive_psn, MODIFY_RECEIVE_PSN, |_| true);
    take!(attr.sq_psn().map(psn) => send_psn, MODIFY_SEND_PSN, |_| true);
    take!(attr.max_rd_atomic() => ord, MODIFY_ORD, |reads| reads <= caps.max_ord);
    take!(attr.max_dest_rd_atomic() => ird, MODIFY_IRD, |reads| reads <= caps.max_ird);
    take!(
        attr.dest_qp_num() => destination_qpn,
        MODIFY_DESTINATION,
        |qpn| qpn <= abi::QUEUE_NUMBER_MASK
    );
    if let Some(access) = attr.access() {
        // What the device cannot do is left out, not refused: the connection manager gives a queue pair
        // every right there is.
        command.access = peer_rights(access, features);
        *mask |= abi::MODIFY_ACCESS;
    }
    if let Some(address) = attr.address() {
        command.address_vector = ah::address_vector(address)?;
        *mask |= abi::MODIFY_ADDRESS_VECTOR;
    }
    if attr.port().is_some_and(|port| port != PORT) {
        return Err(EINVAL);
    }
    Ok(command)
}

/// The rights that a peer has by a queue pair, as the device says them.
fn peer_rights(access: Access, features: u64) -> u32 {
    device_rights(effective(access, features)) & (abi::ACCESS_REMOTE | abi::ACCESS_FLUSH_GLOBAL)
}

/// Rights of peers do not count before packets are taken. The connection manager changes them between state INIT and
/// RTR each time (`cma_modify_qp_rtr`): returns whether that is all there is to a change, so that the device need not
/// be told now. It is told with the next change, to which the `rights` in force are added that way.
fn tell_rights_once(
    command: &mut ModifyQueuePair,
    rights: u32,
    qp_type: QpType,
    change: (QpState, QpState),
) -> bool {
    /// There is one partition, and the state is the same.
    const SAYS_NOTHING: u32 = abi::MODIFY_STATE | abi::MODIFY_PKEY;
    // Those of datagrams have none, and other changes with side effects.
    let connected = !matches!(qp_type, QpType::Ud | QpType::Gsi);
    match change {
        _ if !connected => false,
        (QpState::Init, QpState::Init) => command.mask & !(SAYS_NOTHING | abi::MODIFY_ACCESS) == 0,
        (QpState::Init, QpState::Rtr) => {
            if command.mask & abi::MODIFY_ACCESS == 0 {
                command.access = rights;
                command.mask |= abi::MODIFY_ACCESS;
            }
            false
        }
        _ => false,
    }
}

/// Adds what the device wants of a transition of a reliable connection, and the verbs do not ask of
/// one half of an extended one, which has no use for it.
fn complete_extended(
    command: &mut ModifyQueuePair,
    qp_type: QpType,
    current: QpState,
    next: QpState,
) {
    command.mask |= match (qp_type, current, next) {
        // An initiator does not answer.
        (QpType::XrcInitiator, QpState::Init, QpState::Rtr) => {
            abi::MODIFY_IRD | abi::MODIFY_MIN_RNR_TIMER
        }
        // A target does not ask.
        (QpType::XrcTarget, QpState::Rtr, QpState::Rts) => {
            abi::MODIFY_ORD | abi::MODIFY_RETRY | abi::MODIFY_RNR_RETRY
        }
        _ => 0,
    };
}

/// Base-2 logarithm of an MTU's bytes.
fn log_mtu(mtu: Mtu) -> u8 {
    mtu.bytes().trailing_zeros() as u8
}

#[kunit_tests(ferrite_qp)]
mod tests {
    use super::*;
    use crate::rdma::Remote;

    fn attr(
        mask: bindings::ib_qp_attr_mask,
        change: impl FnOnce(&mut bindings::ib_qp_attr),
    ) -> Result<ModifyQueuePair> {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        change(&mut raw);
        translate(&QpAttr::new(&raw, mask as u32), &caps(), u64::MAX)
    }

    fn caps() -> abi::DeviceCaps {
        abi::DeviceCaps {
            max_ord: 16,
            max_ird: 32,
            max_log_mtu: 12,
            ..abi::DeviceCaps::zeroed()
        }
    }

    #[test]
    fn rights_that_the_device_does_not_have_are_left_out() -> Result {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        let asked = Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
        raw.qp_access_flags = asked.as_raw() as c_int;
        let mask = bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS as u32;
        let (read, atomic) = (abi::ACCESS_REMOTE_READ, abi::ACCESS_REMOTE_ATOMIC);
        for (features, access) in [
            (0, read),
            (abi::FEATURE_ATOMICS, read | atomic),
            (abi::FEATURE_FLUSH, read | abi::ACCESS_FLUSH_GLOBAL),
        ] {
            let command = translate(&QpAttr::new(&raw, mask), &caps(), features)?;
            assert_eq!(command.access, access);
            assert_eq!(command.mask, abi::MODIFY_ACCESS);
        }
        Ok(())
    }

    #[test]
    fn operations_that_the_device_does_not_have_are_not_posted() {
        let remote = Remote { addr: 0, rkey: 0 };
        let (compare, swap, add) = (0, 0, 0);
        let atomics = [
            SendOp::CompareSwap {
                remote,
                compare,
                swap,
            },
            SendOp::FetchAdd { remote, add },
        ];
        for op in &atomics {
            assert!(is_agreed_on(op, abi::FEATURE_ATOMICS));
            assert!(!is_agreed_on(op, !abi::FEATURE_ATOMICS));
        }
        let own = abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS;
        for (op, features) in [
            (SendOp::SendWithInvalidate(1), own | abi::FEATURE_LISTS),
            (SendOp::LocalInvalidate(1), own),
        ] {
            for bit in 0..u64::BITS {
                let feature = 1 << bit;
                assert_eq!(is_agreed_on(&op, feature), features & feature != 0);
            }
            assert!(!is_agreed_on(&op, !features));
        }
        for op in [SendOp::Send, SendOp::RdmaRead(remote)] {
            assert!(is_agreed_on(&op, 0));
        }
    }

    #[test]
    fn only_what_was_given_is_passed_on() -> Result {
        let command = attr(bindings::ib_qp_attr_mask_IB_QP_TIMEOUT, |raw| {
            raw.timeout = 14;
            raw.retry_cnt = 7;
        })?;
        assert_eq!(command.mask, abi::MODIFY_TIMEOUT);
        assert_eq!(command.timeout, 14);
        assert_eq!(command.retry_count, 0);
        Ok(())
    }

    #[test]
    fn states_and_mtu_keep_their_meaning() -> Result {
        let command = attr(
            bindings::ib_qp_attr_mask_IB_QP_STATE | bindings::ib_qp_attr_mask_IB_QP_PATH_MTU,
            |raw| {
                raw.qp_state = bindings::ib_qp_state_IB_QPS_RTR;
                raw.path_mtu = bindings::ib_mtu_IB_MTU_1024;
            },
        )?;
        assert_eq!(command.state, abi::QueuePairStateCode::Rtr.number());
        assert_eq!(command.log_mtu, 10);
        assert_eq!(command.mask, abi::MODIFY_STATE | abi::MODIFY_MTU);
        Ok(())
    }

    #[test]
    fn halves_of_extended_connections_get_what_the_verbs_do_not_give() {
        let mut command = ModifyQueuePair::zeroed();
        let (init, rtr, rts) = (QpState::Init, QpState::Rtr, QpState::Rts);
        complete_extended(&mut command, QpType::Rc, rtr, rts);
        complete_extended(&mut command, QpType::XrcInitiator, rtr, rts);
        complete_extended(&mut command, QpType::XrcTarget, init, rtr);
        assert_eq!(command.mask, 0);
        complete_extended(&mut command, QpType::XrcInitiator, init, rtr);
        assert_eq!(command.mask, abi::MODIFY_IRD | abi::MODIFY_MIN_RNR_TIMER);
        command.mask = 0;
        complete_extended(&mut command, QpType::XrcTarget, rtr, rts);
        assert_eq!(
            command.mask,
            abi::MODIFY_ORD | abi::MODIFY_RETRY | abi::MODIFY_RNR_RETRY
        );
    }

    #[test]
    fn rights_that_change_before_they_count_are_told_once() {
        let (init, rtr, rts) = (QpState::Init, QpState::Rtr, QpState::Rts);
        let change = |mask: u32, qp_type, change| {
            let mut command = ModifyQueuePair::zeroed();
            command.mask = mask;
            command.access = abi::ACCESS_REMOTE_WRITE;
            let later = tell_rights_once(&mut command, abi::ACCESS_REMOTE_READ, qp_type, change);
            (later, command.mask, command.access)
        };
        let (state, access) = (abi::MODIFY_STATE, abi::MODIFY_ACCESS);
        let (read, write) = (abi::ACCESS_REMOTE_READ, abi::ACCESS_REMOTE_WRITE);
        for mask in [state | abi::MODIFY_PKEY | access, access] {
            let later = change(mask, QpType::Rc, (init, init));
            assert_eq!(later, (true, mask, write));
        }
        // What was not told is told then, unless there are others.
        let told = change(state, QpType::Uc, (init, rtr));
        assert_eq!(told, (false, state | access, read));
        let told = change(state | access, QpType::Rc, (init, rtr));
        assert_eq!(told, (false, state | access, write));
        // All else is told at once: also that the consumer thinks it is in a state.
        for (mask, qp_type, states) in [
            (state | abi::MODIFY_CURRENT_STATE, QpType::Rc, (init, init)),
            (state | abi::MODIFY_QKEY, QpType::Ud, (init, init)),
            (state | abi::MODIFY_PKEY, QpType::Ud, (init, init)),
            (state, QpType::Ud, (init, rtr)),
            (state | access, QpType::Rc, (rts, rts)),
            (state | access, QpType::Rc, (QpState::Reset, init)),
            (state, QpType::Rc, (rtr, rts)),
        ] {
            assert_eq!(change(mask, qp_type, states), (false, mask, write));
        }
    }

    #[test]
    fn a_peer_gets_remote_rights_only() -> Result {
        let command = attr(bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS, |raw| {
            raw.qp_access_flags = (bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
                | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ)
                as _;
        })?;
        assert_eq!(command.access, abi::ACCESS_REMOTE_READ);
        Ok(())
    }

    #[test]
    fn what_the_device_cannot_do_is_refused() {
        let too_many = attr(bindings::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC, |raw| {
            raw.max_rd_atomic = 17;
        });
        assert!(too_many.is_err());
        // As responder it may do more than as requester.
        let serve = |reads| {
            attr(bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC, |raw| {
                raw.max_dest_rd_atomic = reads
            })
        };
        assert!(serve(32).is_ok_and(|command| command.ird == 32));
        assert!(serve(33).is_err());
        let other_port = attr(bindings::ib_qp_attr_mask_IB_QP_PORT, |raw| raw.port_num = 2);
        assert!(other_port.is_err());
        let migration = attr(bindings::ib_qp_attr_mask_IB_QP_ALT_PATH, |_| {});
        assert!(migration.is_err());
        let partition = attr(bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX, |raw| {
            raw.pkey_index = 1;
        });
        assert!(partition.is_err());
    }

    #[test]
    fn the_kernel_layout_holds_what_was_asked_for() {
        let layout = RingLayout::for_kernel(
            &QpCap {
                max_send_wr: 100,
                max_recv_wr: 33,
                max_send_sge: 3,
                max_recv_sge: 2,
                max_inline_data: 0,
            },
            SendUse::Connected,
        );
        // Three entries take a second block.
        assert_eq!(layout.sq_log_blocks, 8);
        assert_eq!(layout.rq_log_entries, 6);
        assert_eq!(layout.rq_log_stride, 6);
        assert_eq!(layout.rq_offset, 256 * 64);
        assert_eq!(layout.record_offset, 256 * 64 + 64 * 64);
        assert_eq!(layout.blocks(), 256 + 64 + 2);
    }

    #[test]
    fn a_send_queue_has_room_for_the_largest_of_what_it_was_made_for() {
        for (requests, opcode) in [
            (SendUse::Connected, SendOpcode::FetchAdd),
            (SendUse::Registering, SendOpcode::RegisterSend),
            (SendUse::Datagrams, SendOpcode::Send),
        ] {
            for sges in [0, 1, 3, abi::MAX_SGE as u32] {
                let cap = QpCap {
                    max_send_wr: 100,
                    max_send_sge: sges,
                    ..QpCap::default()
                };
                let layout = RingLayout::for_kernel(&cap, requests);
                let entries = sges as usize * core::mem::size_of::<abi::Sge>();
                let datagram = requests == SendUse::Datagrams;
                let blocks = 100 * abi::blocks_for(opcode, datagram, entries);
                assert!(blocks <= 1 << layout.sq_log_blocks);
            }
        }
        // Who does not ask for registrations with messages has no room for them, and no larger rings.
        let cap = QpCap {
            max_send_wr: 64,
            max_send_sge: 1,
            ..QpCap::default()
        };
        let blocks = |requests| RingLayout::for_kernel(&cap, requests).sq_log_blocks;
        assert_eq!(blocks(SendUse::Connected), 6);
        assert_eq!(blocks(SendUse::Registering), 7);
    }

    #[test]
    fn the_kernel_gets_what_it_asks_for_where_service_and_device_have_it() -> Result {
        let (drains, sends) = (QpCreateFlags::REGISTER_DRAINS, QpCreateFlags::REGISTER_SEND);
        let all = abi::FEATURE_FAST_REGISTER | abi::FEATURE_REGISTER_SEND;
        let none = QpCreateFlags::default();
        for service in [Service::Rc, Service::XrcIni] {
            let asked = Abilities::of_kernel(drains | sends, service, all)?;
            assert_eq!(asked.flags(), abi::QP_FLAG_FAST_REGISTER_DRAINS);
            assert_eq!(asked.requests(service), SendUse::Registering);
        }
        let asked = Abilities::of_kernel(none, Service::Rc, all);
        assert_eq!(asked, Ok(Abilities::default()));
        assert!(Abilities::of_kernel(drains, Service::Uc, all).is_ok());
        let refused = |flags, service, features| {
            Abilities::of_kernel(flags, service, features)
                .err()
                .map(|error| error.to_errno())
        };
        let unknown = Some(errno::eopnotsupp().to_errno());
        let impossible = Some(EINVAL.to_errno());
        assert_eq!(refused(sends, Service::Uc, all), impossible);
        for service in [Service::Ud, Service::Gsi, Service::XrcTgt] {
            assert_eq!(refused(none, service, all), None);
            assert_eq!(refused(drains, service, all), impossible);
            assert_eq!(refused(sends, service, all), impossible);
        }
        let older = abi::FEATURE_FAST_REGISTER;
        assert_eq!(refused(drains, Service::Rc, older), None);
        assert_eq!(refused(sends, Service::Rc, older), unknown);
        assert_eq!(refused(drains, Service::Rc, 0), unknown);
        // Flags of the core, and those of other drivers.
        for flag in (0..32).map(|bit| QpCreateFlags::from_raw(1 << bit)) {
            if !(drains | sends).contains(flag) {
                assert_eq!(refused(flag, Service::Rc, u64::MAX), unknown);
                assert_eq!(refused(flag | drains, Service::Rc, u64::MAX), unknown);
            }
        }
        Ok(())
    }

    #[test]
    fn a_process_gets_lists_and_never_what_names_memory_by_address() {
        let (lists, drains) = (abi::UVERBS_QP_LISTS, abi::UVERBS_QP_REGISTER_DRAINS);
        let features = abi::FEATURE_LISTS;
        for service in [Service::Rc, Service::Uc, Service::XrcIni] {
            for flags in 0..=u8::MAX {
                let Ok(asked) = Abilities::of_process(flags, service, u64::MAX) else {
                    assert!(flags & !(lists | drains) != 0);
                    continue;
                };
                let device = abi::QP_FLAG_LISTS | abi::QP_FLAG_FAST_REGISTER_DRAINS;
                assert_eq!(asked.flags() & !device, 0);
                assert_eq!(
                    (asked.flags() & abi::QP_FLAG_LISTS != 0),
                    (flags & lists != 0)
                );
                let stops = abi::QP_FLAG_FAST_REGISTER_DRAINS;
                assert_eq!((asked.flags() & stops != 0), (flags & drains != 0));
                assert!(!asked.register_send);
            }
        }
        let refused = |flags, service, features| {
            Abilities::of_process(flags, service, features)
                .err()
                .map(|error| error.to_errno())
        };
        let unknown = Some(errno::eopnotsupp().to_errno());
        let impossible = Some(EINVAL.to_errno());
        for flags in [lists, drains, lists | drains] {
            assert_eq!(refused(flags, Service::Rc, features), None);
            assert_eq!(refused(flags, Service::Rc, !features), unknown);
            for service in [Service::Ud, Service::XrcTgt] {
                assert_eq!(refused(flags, service, features), impossible);
                assert_eq!(refused(0, service, features), None);
            }
        }
        // A provider of before writes zero.
        assert_eq!(refused(0, Service::Rc, 0), None);
        assert_eq!(refused(1 << 7, Service::Rc, 0), impossible);
    }

    #[test]
    fn a_queue_that_is_shared_or_absent_is_not_looked_for() {
        let caps = abi::DeviceCaps {
            sq_max_log_blocks: 17,
            rq_max_log_entries: 15,
            ..abi::DeviceCaps::zeroed()
        };
        let request = UverbsQpRequest {
            buffer: 0x10000,
            length: 4096 + 128,
            record_offset: 4096,
            sq_log_blocks: 6,
            ..UverbsQpRequest::zeroed()
        };
        assert!(RingLayout::from_request(&request, &caps, true).is_err());
        assert!(RingLayout::from_request(&request, &caps, false).is_ok());
    }

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
    fn a_process_cannot_place_a_ring_outside_its_buffer() {
        let caps = abi::DeviceCaps {
            sq_max_log_blocks: 17,
            rq_max_log_entries: 15,
            ..abi::DeviceCaps::zeroed()
        };
        let good = UverbsQpRequest {
            buffer: 0x10000,
            length: 4096 + 2048 + 128,
            sq_offset: 0,
            rq_offset: 4096,
            record_offset: 4096 + 2048,
            sq_log_blocks: 6,
            rq_log_entries: 6,
            rq_log_stride: 5,
            ..UverbsQpRequest::zeroed()
        };
        assert!(RingLayout::from_request(&good, &caps, true).is_ok());
        let bad = [
            UverbsQpRequest {
                length: good.length - 1,
                ..good
            },
            UverbsQpRequest {
                rq_offset: u32::MAX - 63,
                ..good
            },
            UverbsQpRequest {
                sq_offset: 32,
                ..good
            },
            UverbsQpRequest {
                sq_log_blocks: 18,
                ..good
            },
            UverbsQpRequest {
                rq_log_stride: 4,
                ..good
            },
            UverbsQpRequest {
                rq_log_stride: 200,
                ..good
            },
            UverbsQpRequest {
                record_offset: good.record_offset + 64,
                ..good
            },
        ];
        for request in bad {
            assert!(RingLayout::from_request(&request, &caps, true).is_err());
        }
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

    fn request(id: u64, blocks: u8) -> SendSlot {
        SendSlot {
            id,
            blocks,
            opcode: WcOpcode::Send,
        }
    }

    #[test]
    fn a_send_completes_where_it_begins_and_nowhere_else() -> Result {
        let mut ring = WorkRing::<SendSlot>::new(8)?;
        // A round of long requests leaves its traces in the slots.
        ring.push(request(1, 5), 5);
        assert!(ring.complete(0).is_some_and(|slot| slot.id == 1));
        ring.push(request(2, 3), 3);
        ring.push(request(3, 4), 4);
        assert!(ring.has_room(1) && !ring.has_room(2));
        // A device that completes the middle of a request, or what it was never given.
        for index in [6, 7, 9, 10, 11, 12, 0, u32::MAX] {
            assert!(ring.complete(index).is_none());
        }
        assert_eq!(ring.used(), 7);
        assert!(ring.complete(8).is_some_and(|slot| slot.id == 3));
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
            assert!(ring.complete(index).is_some_and(|slot| slot.id == id));
            assert!(ring.complete(index).is_none());
        }
        // All of it can be posted again, and goes on where the device is.
        assert_eq!((ring.used(), ring.producer), (0, 8));
        ring.push(request(2, 1), 1);
        assert!(ring.complete(8).is_some_and(|slot| slot.id == 2));
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
            assert!(ring.complete(start).is_some_and(|slot| slot.id == id));
            assert!(ring.has_room(4) && !ring.has_room(5));
            let second = start.wrapping_add(3);
            assert!(ring
                .complete(second)
                .is_some_and(|slot| slot.id == id + 100));
            assert_eq!(ring.used(), 0);
        }
        assert!(ring.producer < 200);
        Ok(())
    }
}
