// SPDX-License-Identifier: GPL-2.0

//! KUnit tests of what needs no device.

use super::*;
use crate::bindings;
use crate::kernel_ext::completion::Completion;
use crate::kernel_ext::errno::eopnotsupp;
use core::ptr::NonNull;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::{Arc, Refcount, SpinLock};
use kernel::time::msecs_to_jiffies;
use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

/// How many [`Tracked`] there are.
static LIVE: Atomic<i32> = Atomic::new(0);

/// Driver data that counts itself.
struct Tracked(u32);

impl Tracked {
    fn new(value: u32) -> Self {
        LIVE.fetch_add(1, Relaxed);
        Self(value)
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        LIVE.fetch_add(-1, Relaxed);
    }
}

/// A driver with what the core demands, and an opcode of its own.
struct Minimal;

/// See [`Minimal`].
const OWN_OPCODE: u32 = bindings::ib_wr_opcode_IB_WR_RESERVED1 + 3;

/// An extension that devices of some driver have.
fn own_extension(bit: u32, numbers: DriverNumbers) -> Extension {
    // SAFETY: Nobody posts anything.
    unsafe { Extension::new(1 << bit, numbers) }
}

#[vtable]
impl Driver for Minimal {
    const NAME: &'static CStr = c"minimal%d";
    const ABI_VERSION: u32 = 1;
    const OPS: Ops<Self> = Ops::new();

    fn query_device(_dev: &Device<Self>) -> Result<DeviceAttr> {
        Ok(DeviceAttr::default())
    }

    fn query_port(_dev: &Device<Self>, _port: u32) -> Result<PortAttr> {
        Ok(PortAttr::ethernet(
            &EthernetPort::default(),
            Mtu::Bytes4096,
            16,
        ))
    }

    fn port_immutable(_dev: &Device<Self>, _port: u32) -> Result<PortImmutable> {
        Ok(PortImmutable::roce_v2(16))
    }
}

impl PdOps for Minimal {
    type Pd = Tracked;

    fn alloc_pd<'a>(
        _dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>> {
        new.init(Tracked::new(7))
    }

    fn dealloc_pd(_pd: &Pd<Self>) -> Result {
        Ok(())
    }
}

#[vtable]
impl CqOps for Minimal {
    type Cq = ();

    fn create_cq<'a>(
        _dev: &Device<Self>,
        mut new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>> {
        new.set_entries(attr.entries);
        new.init(())
    }

    fn destroy_cq(_cq: &Cq<Self>) -> Result {
        Ok(())
    }

    fn poll_cq(_cq: &Cq<Self>, _completions: &mut Completions<'_>) -> Result {
        Ok(())
    }

    fn req_notify_cq(_cq: &Cq<Self>, notify: Notify) -> Result<bool> {
        Ok(notify.report_missed)
    }
}

#[vtable]
impl QpOps for Minimal {
    type Qp = ();

    fn create_qp<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::Qp, Self>,
        _attr: &mut QpInitAttr<'_, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Qp<Self>> {
        Err(ENOMEM)
    }

    fn modify_qp(_qp: &Qp<Self>, _attr: &QpAttr<'_>, _udata: Option<&Udata<'_, Self>>) -> Result {
        Err(EINVAL)
    }

    fn destroy_qp(_qp: &Qp<Self>) -> Result {
        Ok(())
    }

    fn post_send(_qp: &Qp<Self>, _list: &mut SendList<'_, Self>) -> Result {
        Err(EINVAL)
    }

    fn post_recv(_qp: &Qp<Self>, _list: &mut RecvList<'_>) -> Result {
        Err(EINVAL)
    }
}

#[vtable]
impl MrOps for Minimal {
    type Mr = ();

    const REG_MR_OPCODES: &'static [u32] = &[OWN_OPCODE];

    fn get_dma_mr<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _access: Access,
    ) -> Result<&'a Mr<Self>> {
        Err(EINVAL)
    }

    fn reg_user_mr<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _region: &UserRegion,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>> {
        Err(EINVAL)
    }

    fn dereg_mr(_mr: &Mr<Self>, _pd: &Pd<Self>) -> Result {
        Ok(())
    }
}

// What `Minimal` could offer besides, and does not.

impl AhOps for Minimal {
    type Ah = ();

    fn create_ah<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Ah, Self>,
        _attr: &AhAttr,
        _sleepable: bool,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Ah<Self>> {
        Err(ENOMEM)
    }

    fn destroy_ah(_ah: &Ah<Self>, _sleepable: bool) -> Result {
        Ok(())
    }
}

#[vtable]
impl SrqOps for Minimal {
    type Srq = ();

    fn create_srq<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Srq, Self>,
        _attr: &mut SrqAttr,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        Err(ENOMEM)
    }

    fn query_srq(_srq: &Srq<Self>) -> Result<SrqAttr> {
        Ok(SrqAttr::default())
    }

    fn destroy_srq(_srq: &Srq<Self>) -> Result {
        Ok(())
    }

    fn post_srq_recv(_srq: &Srq<Self>, _list: &mut RecvList<'_>) -> Result {
        Err(EINVAL)
    }
}

impl CounterOps for Minimal {
    fn read_counters(_dev: &Device<Self>, _port: u32, _values: &mut [u64]) -> Result {
        Err(EINVAL)
    }
}

impl QpCounterOps for Minimal {
    type Counter = Tracked;

    fn counts(_dev: &Device<Self>, place: usize) -> bool {
        place == 0
    }

    fn create_counter<'a>(mut new: New<'a, kind::Counter, Self>) -> Result<&'a QpCounter<Self>> {
        new.set_number(3);
        new.init(Tracked::new(70))
    }

    fn bind_counter(_counter: &QpCounter<Self>, qp: &Qp<Self>) -> Result {
        match qp.number() {
            0 => Err(EBUSY),
            _ => Ok(()),
        }
    }

    fn unbind_counter(_counter: &QpCounter<Self>, _qp: &Qp<Self>) {}

    fn read_counter(counter: &QpCounter<Self>, values: &mut [u64]) -> Result {
        values.fill(counter.0.into());
        Ok(())
    }
}

impl WqOps for Minimal {
    type Wq = ();
    type RwqTable = ();

    fn create_wq<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Wq, Self>,
        _attr: &mut WqInitAttr<'_, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Wq<Self>> {
        Err(EINVAL)
    }

    fn modify_wq(_wq: &Wq<Self>, from: Option<WqState>, to: Option<WqState>) -> Result {
        match (from, to) {
            (None, Some(_)) => Ok(()),
            _ => Err(EBUSY),
        }
    }

    fn destroy_wq(_wq: &Wq<Self>) -> Result {
        Ok(())
    }

    fn create_rwq_table<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::RwqTable, Self>,
        _entries: &RwqEntries<'_, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a RwqTable<Self>> {
        Err(EINVAL)
    }

    fn destroy_rwq_table(_table: &RwqTable<Self>) -> Result {
        Ok(())
    }
}

/// Zeroed memory for an object, as the core allocates it.
struct Memory<K: Kind<Minimal>>(KBox<core::mem::MaybeUninit<Object<K, Minimal>>>);

impl<K: Kind<Minimal>> Memory<K> {
    fn new() -> Result<Self> {
        let mut memory = KBox::new_uninit(GFP_KERNEL)?;
        // SAFETY: The memory is valid for writes.
        unsafe { core::ptr::write_bytes(memory.as_mut_ptr(), 0, 1) };
        Ok(Self(memory))
    }

    fn raw(&mut self) -> *mut K::Raw {
        self.0.as_mut_ptr().cast()
    }
}

/// An event of a completion queue that takes a while to handle.
#[pin_data]
struct SlowEvent {
    #[pin]
    cq: SpinLock<Option<CqRef<Minimal>>>,
    #[pin]
    started: Completion,
    #[pin]
    never: Completion,
    handled: Atomic<u32>,
    #[pin]
    work: Work<SlowEvent>,
}

impl_has_work! {
    impl HasWork<Self> for SlowEvent { self.work }
}

impl WorkItem for SlowEvent {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let cq = this.cq.lock().take();
        this.started.complete();
        this.never.wait_timeout(msecs_to_jiffies(100));
        this.handled.store(1, Relaxed);
        drop(cq);
    }
}

/// How often [`count_call`] was called.
static CALLS: Atomic<i32> = Atomic::new(0);

/// A completion handler.
///
/// # Safety
///
/// None; it is `unsafe` because handlers are.
unsafe extern "C" fn count_call(_cq: *mut bindings::ib_cq, _context: *mut c_void) {
    CALLS.fetch_add(1, Relaxed);
}

/// A handler of events, which counts them where its context says.
///
/// # Safety
///
/// `context` must be an `Atomic<i32>`.
unsafe extern "C" fn count_event(_event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: The caller vouches for it.
    unsafe { &*context.cast::<Atomic<i32>>() }.fetch_add(1, Relaxed);
}

#[kunit_tests(rust_rdma)]
mod suite {
    use super::wq::named_cq;
    use super::*;
    use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
    use crate::kernel_ext::table::{new_irq_xarray, IrqXArray};
    use crate::kernel_ext::workqueue::OwnedQueue;
    use kernel::new_spinlock;

    #[test]
    fn mandatory_operations_are_in_the_table_and_absent_ones_are_not() {
        let ops = &Ops::<Minimal>::of().raw;
        assert!(ops.query_device.is_some());
        assert!(ops.query_port.is_some());
        assert!(ops.alloc_pd.is_some() && ops.dealloc_pd.is_some());
        assert!(ops.create_qp.is_some() && ops.modify_qp.is_some() && ops.destroy_qp.is_some());
        assert!(ops.post_send.is_some() && ops.post_recv.is_some());
        assert!(ops.create_cq.is_some() && ops.destroy_cq.is_some());
        assert!(ops.pre_destroy_cq.is_some() && ops.post_destroy_cq.is_some());
        assert!(ops.poll_cq.is_some() && ops.req_notify_cq.is_some());
        assert!(ops.get_dma_mr.is_some() && ops.reg_user_mr.is_some() && ops.dereg_mr.is_some());
        assert!(ops.get_port_immutable.is_some());
        assert!(ops.alloc_ucontext.is_none() && ops.mmap.is_none());
        assert!(ops.create_user_cq.is_none() && ops.modify_cq.is_none());
        assert!(ops.query_qp.is_none() && ops.drain_sq.is_none());
        assert!(ops.alloc_mr.is_none() && ops.map_mr_sg.is_none() && ops.alloc_mw.is_none());
        assert!(ops.create_ah.is_none() && ops.create_srq.is_none() && ops.add_gid.is_none());
        assert!(ops.size_ib_pd > core::mem::size_of::<bindings::ib_pd>());
    }

    #[test]
    fn what_is_implemented_is_offered_only_where_the_driver_says_so() {
        let without = &Ops::<Minimal>::of().raw;
        assert!(without.create_srq.is_none() && without.destroy_srq.is_none());
        assert!(without.post_srq_recv.is_none() && without.query_srq.is_none());
        assert!(without.create_ah.is_none() && without.destroy_ah.is_none());
        assert_eq!(without.size_ib_srq, 0);

        let srq = &const { Ops::<Minimal>::new().with_srq() }.raw;
        assert!(srq.create_srq.is_some() && srq.destroy_srq.is_some());
        assert!(srq.post_srq_recv.is_some() && srq.query_srq.is_some());
        assert!(srq.size_ib_srq > core::mem::size_of::<bindings::ib_srq>());
        // Not overridden in it.
        assert!(srq.modify_srq.is_none() && srq.fill_res_srq_entry.is_none());
        // Of another trait.
        assert!(srq.create_ah.is_none() && srq.alloc_xrcd.is_none());
        assert!(srq.alloc_pd.is_some());

        let ah = &const { Ops::<Minimal>::new().with_ah() }.raw;
        assert!(ah.create_ah.is_some() && ah.create_user_ah.is_some());
        assert!(ah.destroy_ah.is_some() && ah.create_srq.is_none());
    }

    #[test]
    fn driver_data_lives_from_create_to_destroy() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        let raw = memory.raw();
        let alloc = Ops::<Minimal>::of().raw.alloc_pd.ok_or(EINVAL)?;
        let dealloc = Ops::<Minimal>::of().raw.dealloc_pd.ok_or(EINVAL)?;
        // SAFETY: The memory is as the core's; the operation does not look at the device.
        assert_eq!(unsafe { alloc(raw, core::ptr::null_mut()) }, 0);
        assert_eq!(LIVE.load(Relaxed), before + 1);
        // SAFETY: `alloc` has initialised it, and it is not ended before `dealloc` below.
        let pd = unsafe { Object::<kind::Pd, Minimal>::from_raw(raw) };
        assert_eq!(pd.0, 7);
        // SAFETY: `alloc` has initialised it, nobody else has it, and it is not used afterwards.
        assert_eq!(unsafe { dealloc(raw, core::ptr::null_mut()) }, 0);
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn a_set_of_counters_lives_from_its_first_queue_pair_on_until_the_core_ends_it() -> Result {
        let before = LIVE.load(Relaxed);
        let ops = &const { Ops::<Minimal>::new().with_qp_counters() }.raw;
        assert!(ops.counter_init.is_some() && ops.counter_alloc_stats.is_some());
        assert!(ops.size_rdma_counter > core::mem::size_of::<bindings::rdma_counter>());
        let bind = ops.counter_bind_qp.ok_or(EINVAL)?;
        let unbind = ops.counter_unbind_qp.ok_or(EINVAL)?;
        let update = ops.counter_update_stats.ok_or(EINVAL)?;
        let dealloc = ops.counter_dealloc.ok_or(EINVAL)?;
        let (mut refused, mut memory) = (
            Memory::<kind::Counter>::new()?,
            Memory::<kind::Counter>::new()?,
        );
        let mut qps = [Memory::<kind::Qp>::new()?, Memory::<kind::Qp>::new()?];
        let [one, other] = qps.each_mut().map(Memory::raw);
        for qp in [one, other] {
            // SAFETY: The memory is as the core's, and nobody else's.
            unsafe { Object::<kind::Qp, Minimal>::prepare(qp) }.init(())?;
        }
        let (none, counter) = (refused.raw(), memory.raw());
        // SAFETY: Both are initialised here, and nobody else has them.
        let set_of = |qp: *mut bindings::ib_qp| unsafe { (*qp).counter };

        // The driver refuses queue pair 0: the core frees the set without another word.
        // SAFETY: The memory is as the core's; `one` was initialised above.
        assert_eq!(unsafe { bind(none, one, 1) }, EBUSY.to_errno());
        assert_eq!(LIVE.load(Relaxed), before);
        assert!(set_of(one).is_null());

        for (qp, number) in [(one, 5), (other, 6)] {
            // SAFETY: `prepare` has initialised it, and nobody else has it: no driver keeps it, no core lists it.
            unsafe { (*qp).qp_num = number };
            // SAFETY: The memory is as the core's: a set that was zeroed or bound before, and a queue pair that was
            // initialised. The driver makes the set with the first of them.
            assert_eq!(unsafe { bind(counter, qp, 1) }, 0);
            assert_eq!(set_of(qp), counter);
            assert_eq!(LIVE.load(Relaxed), before + 1);
        }
        // SAFETY: `bind` has made it, and nobody else writes to it.
        assert_eq!(unsafe { (*counter).id }, 3);

        let names = counters::Descriptions::new(&["some", "others"])?;
        let stats = names.alloc_stats();
        assert!(!stats.is_null());
        // SAFETY: Nobody else has the set.
        unsafe { (*counter).stats = stats };
        // SAFETY: `bind` has made the set, to which queue pairs are bound.
        assert_eq!(unsafe { update(counter) }, 0);
        // SAFETY: The values are freed below.
        assert_eq!(unsafe { counters::values(stats) }, [70, 70]);
        // SAFETY: `alloc_stats` has allocated the values, which nobody uses any more.
        unsafe { bindings::rdma_free_hw_stats_struct(stats) };

        for qp in [one, other] {
            // SAFETY: It is bound.
            assert_eq!(unsafe { unbind(qp, 1) }, 0);
            assert!(set_of(qp).is_null());
            // What it counted is asked for once more.
            assert_eq!(LIVE.load(Relaxed), before + 1);
        }
        // SAFETY: `bind` has made it; it is not used afterwards.
        assert_eq!(unsafe { dealloc(counter) }, 0);
        assert_eq!(LIVE.load(Relaxed), before);
        for qp in [one, other] {
            // SAFETY: It was prepared above, and is not used afterwards.
            unsafe { Object::<kind::Qp, Minimal>::finish(qp) };
        }
        Ok(())
    }

    #[test]
    fn data_initialised_by_a_failing_operation_is_dropped() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let result = unsafe {
            Object::<kind::Pd, Minimal>::create(memory.raw(), |new| {
                new.init(Tracked::new(1))?;
                Err(EBUSY)
            })
        };
        assert_eq!(result, Err(EBUSY));
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn a_work_queue_needs_a_completion_queue_that_was_named() {
        let mut cq: bindings::ib_cq = pin_init::zeroed();
        let there = &raw mut cq;
        assert_eq!(named_cq(there).map(|cq| cq.as_ptr()), Ok(there));
        // What the core has of an attribute that is not there, and of one whose object is not.
        for error in [ENOENT, EINVAL, EBUSY] {
            assert_eq!(named_cq(error.to_ptr()).err(), Some(EINVAL));
        }
        assert_eq!(named_cq(core::ptr::null_mut()).err(), Some(EINVAL));
    }

    #[test]
    fn a_work_queue_has_no_events_before_the_core_has_finished_it() -> Result {
        let told = Atomic::<i32>::new(0);
        let mut memory = Memory::<kind::Wq>::new()?;
        let raw = memory.raw();
        // SAFETY: The memory is as the core's, and outlives what is in it.
        let wq = unsafe { Object::<kind::Wq, Minimal>::prepare(raw) }.init(())?;
        // SAFETY: Nobody else has it.
        unsafe {
            (*raw).event_handler = Some(count_event);
            (*raw).wq_context = (&raw const told).cast_mut().cast();
        }
        wq.report_fatal();
        assert_eq!(told.load(Relaxed), 0);
        let modify = const { Ops::<Minimal>::new().with_wqs() }.raw.modify_wq;
        let modify = modify.ok_or(EINVAL)?;
        let (state, current) = (
            bindings::ib_wq_attr_mask_IB_WQ_STATE,
            bindings::ib_wq_attr_mask_IB_WQ_CUR_STATE,
        );
        let mut attr: bindings::ib_wq_attr = pin_init::zeroed();
        attr.wq_state = bindings::ib_wq_state_IB_WQS_RDY;
        // What the core takes the state for counts only where the process said so.
        for (mask, expected) in [
            (state, 0),
            (state | current, EBUSY.to_errno()),
            (current, EBUSY.to_errno()),
        ] {
            // SAFETY: The queue is there, and the attributes are a local; there is no part of a driver's.
            let said = unsafe { modify(raw, &mut attr, mask, core::ptr::null_mut()) };
            assert_eq!(said, expected);
        }
        wq.report_fatal();
        assert_eq!(told.load(Relaxed), 1);
        // SAFETY: It was prepared above, and is not used afterwards.
        unsafe { Object::<kind::Wq, Minimal>::finish(raw) };
        Ok(())
    }

    #[test]
    fn a_specification_that_is_not_known_is_never_left_out() {
        const ETHERNET: usize = size_of::<bindings::ib_flow_spec_eth>();
        let ethernet = |size: usize| {
            let mut bytes = [0; 2 * ETHERNET];
            let kind = bindings::ib_flow_spec_type_IB_FLOW_SPEC_ETH;
            bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            bytes[4..6].copy_from_slice(&(size as u16).to_ne_bytes());
            bytes
        };
        // How many there are, and how many of them are known.
        let found = |bytes: &[u8]| {
            let known = |spec: &FlowSpec| matches!(spec, FlowSpec::Ethernet(_));
            (
                FlowSpecs(bytes).count(),
                FlowSpecs(bytes).filter(known).count(),
            )
        };
        let good = ethernet(ETHERNET);
        assert_eq!(found(&[]), (0, 0));
        assert_eq!(found(&good[..ETHERNET]), (1, 1));
        // Zeroes are one of no size.
        assert_eq!(found(&good), (2, 1));
        // Less than it begins with, less than it says, a piece behind it.
        for length in [1, 5, 6, ETHERNET - 1, ETHERNET + 1, ETHERNET + 7] {
            let (all, known) = found(&good[..length]);
            assert_eq!(all, known + 1);
        }
        // It says that it is shorter than those of its type, longer, or nothing.
        for size in [0, 4, 5, 6, ETHERNET - 4, ETHERNET + 4, 2 * ETHERNET, 0xffff] {
            let bytes = ethernet(size);
            assert_eq!(found(&bytes).1, 0);
            assert!(found(&bytes[..ETHERNET]).0 > 0);
        }
        let mut other = good;
        other[0] ^= 0x80;
        assert_eq!(found(&other[..ETHERNET]), (1, 0));
    }

    #[test]
    fn an_object_returned_for_another_is_refused() -> Result {
        let before = LIVE.load(Relaxed);
        let (mut one, mut other) = (Memory::<kind::Pd>::new()?, Memory::<kind::Pd>::new()?);
        // SAFETY: `one` is as the core allocates it: zeroed, of the size of the object, and nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(one.raw()) };
        let first = new.init(Tracked::new(1))?;
        // SAFETY: `other` is as the core allocates it: zeroed, of the size of the object, and nobody else's.
        let result = unsafe { Object::<kind::Pd, Minimal>::create(other.raw(), |_new| Ok(first)) };
        assert_eq!(result, Err(EINVAL));
        // SAFETY: It was prepared above, and `first` is not used afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(one.raw()) };
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn table_holds_counted_references() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(memory.raw()) };
        let pd = new.init(Tracked::new(3))?;
        let table: Pin<KBox<IrqXArray<PdRef<Minimal>>>> =
            KBox::pin_init(new_irq_xarray!("rust_rdma_table"), GFP_KERNEL)?;
        assert!(table.is_empty());
        table.insert(5, pd.get_ref().ok_or(EINVAL)?)?;
        let second = pd.get_ref().ok_or(EINVAL)?;
        assert_eq!(table.insert(5, second), Err(EBUSY));
        assert!(table.get(4).is_none());
        assert_eq!(table.get(5).map(|pd| pd.0), Some(3));
        let mut seen = 0;
        table.for_each(|index, pd| {
            assert_eq!((index, pd.0), (5, 3));
            seen += 1;
        });
        assert_eq!(seen, 1);
        assert!(table.remove(5).is_some());
        assert!(table.remove(5).is_none());
        // The references are gone, else this would wait for ever.
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(memory.raw()) };
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn the_core_cancels_work_of_a_completion_queue_only_when_no_event_is_handled() -> Result {
        let mut memory = Memory::<kind::Cq>::new()?;
        let raw = memory.raw();
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let cq = unsafe { Object::<kind::Cq, Minimal>::prepare(raw) }.init(())?;
        let event = Arc::pin_init(
            pin_init!(SlowEvent {
                cq <- new_spinlock!(cq.get_ref()),
                started <- Completion::new(),
                never <- Completion::new(),
                handled: Atomic::new(0),
                work <- new_work!("SlowEvent"),
            }),
            GFP_KERNEL,
        )?;
        let queue = OwnedQueue::unbound(c"slow_event")?;
        drop(queue.enqueue(event.clone()));
        event.started.wait();
        let ops = &Ops::<Minimal>::of().raw;
        let (before, after) = (ops.pre_destroy_cq, ops.post_destroy_cq);
        // SAFETY: The queue was made above, and is no longer used but by the event.
        assert_eq!(unsafe { before.ok_or(EINVAL)?(raw) }, 0);
        assert_eq!(event.handled.load(Relaxed), 1);
        // It lives on: the core polls it a last time.
        drop(cq.get_ref().ok_or(EINVAL)?);
        // SAFETY: `pre_destroy_cq` was called above, and the queue is not used afterwards.
        unsafe { after.ok_or(EINVAL)?(raw) };
        Ok(())
    }

    #[test]
    fn an_object_that_gave_up_its_own_count_gives_no_other() {
        let refs = Refcount::new(1);
        assert!(object::inc_not_zero(&refs));
        assert!(!refs.dec_and_test());
        assert!(refs.dec_and_test());
        assert!(!object::inc_not_zero(&refs));
        // As after `quiesce`.
        refs.set(1);
        assert!(object::inc_not_zero(&refs));
    }

    #[test]
    fn a_handler_is_called_when_what_it_needs_is_there() -> Result {
        for set_before in [true, false] {
            let mut memory = Memory::<kind::Cq>::new()?;
            let raw = memory.raw();
            let set = || {
                // SAFETY: The memory is as the core's, and nobody else looks at it.
                unsafe { (*raw).comp_handler = Some(count_call) };
            };
            if set_before {
                set();
            }
            // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
            // nobody else's.
            let new = unsafe { Object::<kind::Cq, Minimal>::prepare(raw) };
            new.open_where_ready();
            let cq = new.init(())?;
            // As `__ib_alloc_cq`, for which what the handler needs comes even later.
            set();
            let before = CALLS.load(Relaxed);
            cq.complete();
            assert_eq!(CALLS.load(Relaxed) - before, i32::from(set_before));
            // Now somebody uses it, who is told what was kept.
            cq.open();
            assert_eq!(CALLS.load(Relaxed) - before, 1);
            // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
            // afterwards.
            unsafe { Object::<kind::Cq, Minimal>::finish(raw) };
        }
        Ok(())
    }

    #[test]
    fn a_queue_that_is_polled_directly_is_never_completed() -> Result {
        let mut memory = Memory::<kind::Cq>::new()?;
        let raw = memory.raw();
        // SAFETY: The memory is as the core's, and nobody else looks at it.
        let cq = unsafe {
            (*raw).comp_handler = Some(count_call);
            (*raw).poll_ctx = bindings::ib_poll_context_IB_POLL_DIRECT;
            Object::<kind::Cq, Minimal>::prepare(raw).init(())?
        };
        cq.open();
        let before = CALLS.load(Relaxed);
        cq.complete();
        assert_eq!(CALLS.load(Relaxed), before);
        // SAFETY: Nobody else looks at the queue.
        unsafe { (*raw).poll_ctx = bindings::ib_poll_context_IB_POLL_WORKQUEUE };
        cq.complete();
        assert_eq!(CALLS.load(Relaxed), before + 1);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Cq, Minimal>::finish(raw) };
        Ok(())
    }

    #[test]
    fn what_happens_before_a_device_is_registered_is_told_when_it_is() {
        let mut mailbox = event::Mailbox::Before(0);
        assert!(mailbox.raise(1).is_none());
        assert!(mailbox.raise(4).is_none());
        assert!(mailbox.raise(1).is_none());
        assert_eq!(mailbox.attach(7), Ok(5));
        assert_eq!(mailbox.raise(2), Some(&7));
        // It leads to one at a time.
        assert_eq!(mailbox.attach(8), Err(EBUSY));
        assert_eq!(mailbox.raise(2), Some(&7));
        mailbox = event::Mailbox::After;
        assert!(mailbox.raise(2).is_none());
        // Told once.
        assert_eq!(mailbox.attach(8), Ok(0));
        assert_eq!(mailbox.raise(2), Some(&8));
    }

    #[test]
    fn table_drops_what_is_left_in_it() -> Result {
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(memory.raw()) };
        let pd = new.init(Tracked::new(3))?;
        let table: Pin<KBox<IrqXArray<PdRef<Minimal>>>> =
            KBox::pin_init(new_irq_xarray!("rust_rdma_table"), GFP_KERNEL)?;
        for index in [0, 1, 1 << 20, u32::MAX as usize] {
            table.insert(index, pd.get_ref().ok_or(EINVAL)?)?;
        }
        drop(table);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(memory.raw()) };
        Ok(())
    }

    #[test]
    fn a_port_is_paired_with_its_own_interface_only() {
        for event in [NetdevEvent::Register, NetdevEvent::Up] {
            assert_eq!(Pairing::after(event, true, None), Pairing::Pair);
            assert_eq!(Pairing::after(event, false, None), Pairing::Keep);
        }
        assert_eq!(
            Pairing::after(NetdevEvent::Change, true, None),
            Pairing::Keep
        );
    }

    #[test]
    fn a_pairing_is_neither_replaced_nor_ended_by_another_interface() {
        for event in [
            NetdevEvent::Register,
            NetdevEvent::Up,
            NetdevEvent::Down,
            NetdevEvent::Unregister,
            NetdevEvent::ChangeAddr,
        ] {
            for own in [false, true] {
                assert_eq!(Pairing::after(event, own, Some(false)), Pairing::Keep);
            }
        }
    }

    #[test]
    fn a_pairing_ends_when_its_interface_goes() {
        // By then it may have been renamed, moved or stacked upon: that does not count.
        for own in [false, true] {
            assert_eq!(
                Pairing::after(NetdevEvent::Unregister, own, Some(true)),
                Pairing::Part
            );
            assert_eq!(
                Pairing::after(NetdevEvent::Down, own, Some(true)),
                Pairing::Keep
            );
        }
    }

    #[test]
    fn a_port_that_was_unpaired_before_it_had_gids_is_remembered() {
        let after = |changes: &[Pairing]| {
            let missed = |known, change: &Pairing| gids::missed(known, *change == Pairing::Part);
            changes.iter().fold(gids::NONE, missed)
        };
        assert_eq!(after(&[]), gids::NONE);
        assert_eq!(after(&[Pairing::Pair]), gids::MISSED);
        assert_eq!(after(&[Pairing::Part]), gids::MISSED_PART);
        // Those of the first time are not those of the second.
        assert_eq!(after(&[Pairing::Part, Pairing::Pair]), gids::MISSED_PART);
        let thrice = [Pairing::Pair, Pairing::Part, Pairing::Pair];
        assert_eq!(after(&thrice), gids::MISSED_PART);
    }

    #[test]
    fn mtu_follows_the_interface() {
        assert_eq!(Mtu::from_netdev(1500), Some(Mtu::Bytes1024));
        assert_eq!(Mtu::from_netdev(9000), Some(Mtu::Bytes4096));
        assert_eq!(Mtu::from_netdev(0), None);
        assert_eq!(Mtu::Bytes4096.bytes(), 4096);
        let mut port = EthernetPort {
            up: true,
            mtu: 9000,
            ..EthernetPort::default()
        };
        assert_eq!(
            PortAttr::ethernet(&port, Mtu::Bytes2048, 1).active_mtu,
            Mtu::Bytes2048
        );
        port.mtu = 1500;
        assert_eq!(
            PortAttr::ethernet(&port, Mtu::Bytes4096, 1).active_mtu,
            Mtu::Bytes1024
        );
    }

    #[test]
    fn notify_tells_solicited_from_next() {
        let next = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP;
        let solicited = bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
        let missed = bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        assert!(!Notify::from_raw(next).solicited);
        assert!(Notify::from_raw(solicited).solicited);
        assert!(!Notify::from_raw(solicited).report_missed);
        assert!(Notify::from_raw(next | missed).report_missed);
    }

    #[test]
    fn attributes_are_only_those_in_the_mask() {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        raw.qp_state = QpState::Init.as_raw();
        raw.qkey = 9;
        raw.port_num = 1;
        let mask = bindings::ib_qp_attr_mask_IB_QP_STATE
            | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
            | bindings::ib_qp_attr_mask_IB_QP_PORT
            | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS;
        let attr = QpAttr::new(&raw, mask);
        assert_eq!(attr.state(), Some(QpState::Init));
        assert_eq!(attr.port(), Some(1));
        assert_eq!(attr.qkey(), None);
        assert!(attr.address().is_none());
        assert!(attr.transition_is_ok(QpState::Reset, QpState::Init, QpType::Rc));
        assert!(!attr.transition_is_ok(QpState::Reset, QpState::Rts, QpType::Rc));
        let mut values = QpValues {
            qkey: 5,
            ..QpValues::default()
        };
        values.merge(&attr);
        assert_eq!((values.qkey, values.port), (5, 1));
    }

    #[test]
    fn send_list_yields_typed_requests_and_remembers_the_last() -> Result {
        let mut write: bindings::ib_rdma_wr = pin_init::zeroed();
        write.wr.opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
        write.remote_addr = 0x1000;
        write.rkey = 0x77;
        let mut send: bindings::ib_send_wr = pin_init::zeroed();
        send.opcode = bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV;
        // SAFETY: All views of the union are plain data.
        unsafe { *send.ex.invalidate_rkey.as_mut() = 0x55 };
        send.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        send.next = &mut write.wr;
        let mut qp = Memory::<kind::Qp>::new()?;
        // SAFETY: The list and what it points to are locals that outlive it.
        let mut list = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) };
        assert!(core::ptr::eq(list.current(), &send));
        let first = list.next().ok_or(EINVAL)?;
        assert!(first.flags().contains(SendFlags::SIGNALED));
        assert!(matches!(first.op()?, SendOp::SendWithInvalidate(0x55)));
        assert!(first.ud().is_none());
        assert!(core::ptr::eq(list.current(), &send));
        let second = list.next().ok_or(EINVAL)?;
        assert!(matches!(
            second.op()?,
            SendOp::RdmaWrite(Remote {
                addr: 0x1000,
                rkey: 0x77
            })
        ));
        assert!(core::ptr::eq(list.current(), &write.wr));
        assert!(list.next().is_none());
        Ok(())
    }

    /// Posts a registration with that opcode, of a region as `change` leaves it, to a queue pair of a
    /// type.
    fn posted_registration<R>(
        opcode: u32,
        qp_type: QpType,
        change: impl FnOnce(&mut bindings::ib_reg_wr, *mut bindings::ib_mr),
        look: impl FnOnce(Result<PostedOp<'_, Minimal>>) -> R,
    ) -> Result<R> {
        let (mut qp, mut mr) = (Memory::<kind::Qp>::new()?, Memory::<kind::Mr>::new()?);
        let (device, pd) = (NonNull::dangling().as_ptr(), NonNull::dangling().as_ptr());
        // SAFETY: The memory is as the core's, all zeroes, and nobody else looks at it.
        let (core_qp, core_mr) = unsafe { (&mut *qp.raw(), &mut *mr.raw()) };
        core_qp.qp_type = qp_type.as_raw();
        (core_qp.device, core_qp.pd) = (device, pd);
        (core_mr.device, core_mr.pd) = (device, pd);
        // SAFETY: The memory is as the core's, of the size of the object, and nobody else looks at it.
        unsafe { Object::<kind::Mr, Minimal>::prepare(mr.raw()) }.init(())?;
        let mut wr: bindings::ib_reg_wr = pin_init::zeroed();
        wr.wr.opcode = opcode;
        wr.mr = mr.raw();
        wr.key = 0x1234;
        wr.access = Access::REMOTE_READ.as_raw() as c_int;
        change(&mut wr, mr.raw());
        // SAFETY: The list and what it points to are locals that outlive it.
        let mut list = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &wr.wr) };
        let seen = look(list.next().ok_or(EINVAL)?.op());
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Mr, Minimal>::finish(mr.raw()) };
        Ok(seen)
    }

    #[test]
    fn registrations_are_told_apart_with_all_they_say() -> Result {
        let register = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let alone = posted_registration(
            register,
            QpType::Rc,
            |_, _| {},
            |op| {
                let Ok(SendOp::RegMr(RegWr { key, access, .. })) = op else {
                    return false;
                };
                key == 0x1234 && access == Access::REMOTE_READ
            },
        )?;
        assert!(alone);
        for said in [0, 0x77] {
            let of_driver = posted_registration(
                OWN_OPCODE,
                QpType::Rc,
                // SAFETY: All views of the union are plain data.
                |wr, _| unsafe { *wr.wr.ex.invalidate_rkey.as_mut() = said },
                |op| {
                    let Ok(SendOp::Driver {
                        opcode,
                        registration: RegWr { key, access, .. },
                        ex,
                    }) = op
                    else {
                        return false;
                    };
                    (opcode, key, access, ex) == (OWN_OPCODE, 0x1234, Access::REMOTE_READ, said)
                },
            )?;
            assert!(of_driver);
        }
        // What it did not say that it knows may be of another form.
        let unknown = |op: Result<PostedOp<'_, Minimal>>| op.err() == Some(eopnotsupp());
        assert!(posted_registration(
            OWN_OPCODE + 1,
            QpType::Rc,
            |_, _| {},
            unknown
        )?);
        Ok(())
    }

    #[test]
    fn a_region_is_registered_in_its_own_domain_and_device_only() -> Result {
        /// Elsewhere.
        fn other<T>() -> *mut T {
            NonNull::<T>::dangling().as_ptr().wrapping_add(1)
        }
        type Change = fn(&mut bindings::ib_reg_wr, *mut bindings::ib_mr);
        let changes: [Change; 3] = [
            |wr, _| wr.mr = core::ptr::null_mut(),
            // SAFETY: The region is the test's own.
            |_, mr| unsafe { (*mr).pd = other() },
            // SAFETY: The region is the test's own.
            |_, mr| unsafe { (*mr).device = other() },
        ];
        let refused =
            |op: Result<PostedOp<'_, Minimal>>| matches!(op, Err(error) if error == EINVAL);
        for opcode in [bindings::ib_wr_opcode_IB_WR_REG_MR, OWN_OPCODE] {
            for change in changes {
                assert!(posted_registration(opcode, QpType::Rc, change, refused)?);
            }
            // A datagram's request has something else in that place.
            assert!(posted_registration(opcode, QpType::Ud, |_, _| {}, refused)?);
        }
        Ok(())
    }

    #[test]
    fn what_the_core_does_not_know_of_a_device_is_told_besides_what_it_does() -> Result {
        let attr = DeviceAttr {
            local_dma_lkey: true,
            driver_caps: 5 << 40,
            ..DeviceAttr::default()
        };
        let mut raw: bindings::ib_device_attr = pin_init::zeroed();
        attr.fill(&mut raw)?;
        let lkey = u64::from(bindings::ib_kernel_cap_flags_IBK_LOCAL_DMA_LKEY);
        assert_eq!(raw.kernel_cap_flags, lkey | 5 << 40);
        DeviceAttr::default().fill(&mut raw)?;
        assert_eq!(raw.kernel_cap_flags, 0);
        // Of the core's own nothing is said by that, and nothing is left out without a word.
        let attr = DeviceAttr {
            driver_caps: 5 << 40 | 6,
            ..attr
        };
        assert_eq!(attr.fill(&mut raw), Err(EINVAL));
        Ok(())
    }

    #[test]
    fn a_port_is_told_as_its_driver_describes_it() {
        let told = |attr: PortAttr| {
            let mut raw: bindings::ib_port_attr = pin_init::zeroed();
            attr.fill(&mut raw);
            (raw.max_vl_num, raw.ip_gids())
        };
        let roce = PortAttr::ethernet(&EthernetPort::default(), Mtu::Bytes4096, 16);
        assert_eq!(told(roce), (1, 1));
        let infiniband = PortAttr {
            max_vl_num: 4,
            ip_gids: false,
            ..roce
        };
        assert_eq!(told(infiniband), (4, 0));
    }

    #[test]
    fn a_path_is_told_as_that_of_the_link_that_it_is_on() {
        let told = |path: Path| {
            let mut raw: bindings::rdma_ah_attr = pin_init::zeroed();
            path.fill(&mut raw);
            // SAFETY: It is a local, which does not change any more.
            let seen = unsafe { AhAttr::from_raw(&raw) }.path();
            assert_eq!(seen, path);
            (raw.type_, u32::from(raw.ah_flags))
        };
        let grh = bindings::ib_ah_flags_IB_AH_GRH;
        let roce = Path {
            dmac: [2, 0, 0, 0, 0, 1],
            hop_limit: 64,
            ..Path::default()
        };
        let type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_ROCE;
        assert_eq!(told(roce), (type_, grh));
        let local = Path {
            dlid: Some(7),
            ..Path::default()
        };
        let type_ = bindings::rdma_ah_attr_type_RDMA_AH_ATTR_TYPE_IB;
        assert_eq!(told(local), (type_, 0));
        let beyond = Path {
            dgid: Gid([1; 16]),
            ..local
        };
        assert_eq!(told(beyond), (type_, grh));
    }

    #[test]
    fn what_only_some_devices_have_is_asked_of_these_alone() {
        let [flag, other_flag] = [1 << 26, 1 << 31].map(QpCreateFlags::from_raw);
        let right = Access::from_raw(1 << 31);
        let one = own_extension(40, DriverNumbers::NONE.with_create_flags(flag));
        let other = own_extension(42, DriverNumbers::NONE.with_create_flags(other_flag));
        let with_right = own_extension(41, DriverNumbers::NONE.with_access(right));
        // A number that is told to a device whose own it is not means something else there.
        let asked = |extensions: &[Extension], caps| Extension::flags_for(extensions, caps);
        assert_eq!(asked(&[], 0), Ok(QpCreateFlags::default()));
        assert_eq!(asked(&[one], 1 << 40), Ok(flag));
        assert_eq!(asked(&[one, other], 5 << 40), Ok(flag | other_flag));
        assert_eq!(asked(&[with_right], 1 << 41), Ok(QpCreateFlags::default()));
        for caps in [0, 1 << 41, 1 << 42, !(1 << 40)] {
            assert_eq!(asked(&[one], caps), Err(eopnotsupp()));
            assert_eq!(asked(&[other, one], caps), Err(eopnotsupp()));
        }
        // Nor is a right.
        let usual = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let with = [one, with_right];
        assert_eq!(Extension::check_access(&[], usual), Ok(()));
        assert_eq!(Extension::check_access(&with, usual | right), Ok(()));
        for extensions in [&[][..], &[one, other]] {
            let refused = Extension::check_access(extensions, usual | right);
            assert_eq!(refused, Err(eopnotsupp()));
        }
    }

    #[test]
    fn inline_data_is_copied_in_order_and_bounded() -> Result {
        let (one, two) = ([1u8, 2, 3], [4u8, 5]);
        let mut sges: [bindings::ib_sge; 2] = pin_init::zeroed();
        sges[0].addr = one.as_ptr() as u64;
        sges[0].length = 3;
        sges[1].addr = two.as_ptr() as u64;
        sges[1].length = 2;
        let mut send: bindings::ib_send_wr = pin_init::zeroed();
        send.sg_list = sges.as_mut_ptr();
        send.num_sge = 2;
        let mut qp = Memory::<kind::Qp>::new()?;
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        assert!(wr.ok_or(EINVAL)?.copy_inline(&mut [0; 8]).is_err());
        send.send_flags = bindings::ib_send_flags_IB_SEND_INLINE;
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        let wr = wr.ok_or(EINVAL)?;
        assert_eq!(wr.length(), 5);
        let mut data = [0; 5];
        assert_eq!(wr.copy_inline(&mut data)?, 5);
        assert_eq!(data, [1, 2, 3, 4, 5]);
        assert!(wr.copy_inline(&mut [0; 4]).is_err());
        // A process's addresses are none of the kernel's.
        // SAFETY: The memory is as the core's, and nobody else looks at it.
        unsafe { (*qp.raw()).uobject = NonNull::dangling().as_ptr() };
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        let mut data = [0; 5];
        assert!(wr.ok_or(EINVAL)?.copy_inline(&mut data).is_err());
        assert_eq!(data, [0; 5]);
        Ok(())
    }

    #[test]
    fn completions_of_a_process_need_no_queue_pair() -> Result {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        let mut memory = Memory::<kind::Qp>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let mut new = unsafe { Object::<kind::Qp, Minimal>::prepare(memory.raw()) };
        new.set_number(0x123456);
        let qp = new.init(())?;
        // SAFETY: `wc` is a local with room for one, which outlives the list.
        let mut completions = unsafe { Completions::new(&mut wc, 1, true) };
        assert!(completions.push(&Wc::new(qp, 1, WcOpcode::Recv)));
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Qp, Minimal>::finish(memory.raw()) };
        drop(memory);
        // As `copy_wc_to_user` does.
        // SAFETY: The number is within `wc`, as the completion says.
        let number = unsafe { core::ptr::addr_of!((*wc.qp).qp_num).read() };
        assert_eq!((number, wc.wc_flags), (0x123456, 0));
        Ok(())
    }

    #[test]
    fn who_lists_queue_pairs_is_told_nothing_to_take_part_with() {
        let values = QpValues {
            qkey: 1,
            rq_psn: 2,
            sq_psn: 3,
            dest_qp_num: 4,
            ..QpValues::default()
        };
        let told = |mask| {
            let mut attr: bindings::ib_qp_attr = pin_init::zeroed();
            let mut init: bindings::ib_qp_init_attr = pin_init::zeroed();
            let mut query = QpQuery::new(&mut attr, &mut init, mask);
            let is_listing = query.is_listing();
            query.fill(&values);
            assert_eq!(attr.dest_qp_num, 4);
            (is_listing, attr.qkey, attr.rq_psn, attr.sq_psn)
        };
        let (qkey, rq_psn, sq_psn) = (
            bindings::ib_qp_attr_mask_IB_QP_QKEY,
            bindings::ib_qp_attr_mask_IB_QP_RQ_PSN,
            bindings::ib_qp_attr_mask_IB_QP_SQ_PSN,
        );
        assert_eq!(told(0), (true, 0, 0, 0));
        assert_eq!(told(qkey), (false, 1, 0, 0));
        assert_eq!(told(rq_psn), (false, 0, 2, 0));
        assert_eq!(told(sq_psn), (false, 0, 0, 3));
        assert_eq!(told(u32::MAX), (false, 1, 2, 3));
    }

    #[test]
    fn completions_stop_at_the_consumers_room() -> Result {
        let mut memory = Memory::<kind::Qp>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Qp, Minimal>::prepare(memory.raw()) };
        let qp = new.init(())?;
        let mut wcs: [bindings::ib_wc; 2] = pin_init::zeroed();
        // SAFETY: `wcs` is a local with room for two, which outlives the list.
        let mut completions = unsafe { Completions::new(wcs.as_mut_ptr(), 2, false) };
        let mut wc = Wc::new(qp, 0xabc, WcOpcode::Recv);
        wc.imm_data = Some(0x0102_0304);
        assert!(completions.push(&wc));
        wc.imm_data = None;
        wc.status = WcStatus::RemoteAccess;
        assert!(completions.push(&wc));
        assert!(completions.is_full());
        assert!(!completions.push(&wc));
        assert_eq!(completions.len(), 2);
        // SAFETY: All views of the unions are plain data.
        unsafe {
            assert_eq!(*wcs[0].__bindgen_anon_1.wr_id.as_ref(), 0xabc);
            assert_eq!(*wcs[0].ex.imm_data.as_ref(), 0x0102_0304_u32.to_be());
        }
        assert_eq!(wcs[0].wc_flags as u32, bindings::ib_wc_flags_IB_WC_WITH_IMM);
        assert_eq!(wcs[1].status, bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR);
        assert_eq!(wcs[1].wc_flags, 0);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Qp, Minimal>::finish(memory.raw()) };
        Ok(())
    }

    #[test]
    fn gids_know_ipv4() {
        let mut gid = Gid::default();
        assert!(!gid.is_ipv4());
        gid.0[10..].copy_from_slice(&[0xff, 0xff, 10, 77, 0, 1]);
        assert!(gid.is_ipv4());
        gid.0[0] = 0xfe;
        assert!(!gid.is_ipv4());
    }

    #[test]
    fn completion_times_out_and_is_reusable() -> Result {
        let completion = KBox::pin_init(Completion::new(), GFP_KERNEL)?;
        assert!(!completion.wait_timeout(1));
        completion.complete();
        assert!(completion.wait_timeout(1));
        assert!(!completion.try_wait());
        completion.complete_all();
        assert!(completion.try_wait() && completion.try_wait());
        completion.reinit();
        assert!(!completion.try_wait());
        Ok(())
    }

    #[test]
    fn irq_spinlock_excludes_and_releases() -> Result {
        let lock: Arc<IrqSpinLock<u32>> =
            Arc::pin_init(new_irq_spinlock!(1, "rust_rdma_test"), GFP_KERNEL)?;
        {
            let mut guard = lock.lock();
            *guard += 1;
            assert!(lock.try_lock().is_none());
        }
        assert_eq!(lock.try_lock().map(|guard| *guard), Some(2));
        Ok(())
    }

    #[test]
    fn a_name_that_the_core_takes_for_a_pattern_is_none() {
        for (name, plain) in [
            (c"minimal0", true),
            (c"roce p0", true),
            (c"", false),
            (c"minimal%d", false),
            (c"%s%s%n", false),
        ] {
            assert_eq!(super::super::device::is_plain(name), plain);
        }
    }
}
