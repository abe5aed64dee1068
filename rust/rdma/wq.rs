// SPDX-License-Identifier: GPL-2.0

//! Work queues, tables of them, and queue pairs that receive by a table (receive side scaling, RSS).

use super::udata::expect_none;
use super::{kind, Cq, Device, New, Object, ObjectRef, Ops, Pd, QpInitAttr, QpOps, Udata};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, from_result};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Release};

/// A work queue: a receive queue without a queue pair.
pub type Wq<D> = Object<kind::Wq, D>;
/// A counted reference to a work queue.
pub type WqRef<D> = ObjectRef<kind::Wq, D>;
/// A table of work queues.
pub type RwqTable<D> = Object<kind::RwqTable, D>;

/// Work queues and tables of them (the core's `rwq_ind_table`, indirection tables), which processes alone have. Who receives
/// raw packets by them needs `CAP_NET_RAW`, as for the queue pairs and rules that these go with: of those the core asks it,
/// of work queues and tables this module does.
pub trait WqOps: QpOps {
    /// Driver's data of a work queue.
    type Wq: Send + Sync;
    /// Driver's data of a table.
    type RwqTable: Send + Sync;

    /// Makes a work queue in state [`WqState::Reset`]. Its number has to be told by [`New::set_wq_number`].
    fn create_wq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Wq, Self>,
        attr: &mut WqInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Wq<Self>>;

    /// Brings a work queue to another state, or to the same; none is asked for where it is to stay in the one that it is in. `from` is
    /// the state in which the process believes it, where it says one: `EINVAL` where it is not.
    ///
    /// Where the device has failed it is brought to [`WqState::Reset`] or [`WqState::Error`] all the same: who ends it does
    /// that before.
    fn modify_wq(wq: &Wq<Self>, from: Option<WqState>, to: Option<WqState>) -> Result;

    /// Ends a work queue, which no table has.
    fn destroy_wq(wq: &Wq<Self>) -> Result;

    /// Makes a table. Its number has to be told by [`New::set_table_number`].
    fn create_rwq_table<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::RwqTable, Self>,
        entries: &RwqEntries<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a RwqTable<Self>>;

    /// Ends a table, by which no queue pair receives.
    fn destroy_rwq_table(table: &RwqTable<Self>) -> Result;
}

impl<D: WqOps> Ops<D> {
    /// Offers work queues and tables of them.
    pub const fn with_wqs(mut self) -> Self {
        self.raw.create_wq = Some(create_wq::<D>);
        self.raw.modify_wq = Some(modify_wq::<D>);
        self.raw.destroy_wq = Some(destroy_wq::<D>);
        self.raw.create_rwq_ind_table = Some(create_table::<D>);
        self.raw.destroy_rwq_ind_table = Some(destroy_table::<D>);
        self.raw.size_ib_rwq_ind_table = RwqTable::<D>::SIZE;
        self
    }
}

c_enum! {
    /// The state of a work queue.
    pub enum WqState {
        /// Empty; nothing is posted.
        Reset = ib_wq_state_IB_WQS_RESET,
        /// It receives.
        Ready = ib_wq_state_IB_WQS_RDY,
        /// Everything is flushed.
        Error = ib_wq_state_IB_WQS_ERR,
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads and writes.
unsafe extern "C" fn create_wq<D: WqOps>(
    pd: *mut bindings::ib_pd,
    attr: *mut bindings::ib_wq_init_attr,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_wq {
    let made = || -> Result<*mut bindings::ib_wq> {
        // SAFETY: `attr` is a local of `ib_uverbs_ex_create_wq`, or of the handler of `UVERBS_METHOD_WQ_CREATE`:
        // the only ones that call this, and both wait.
        let attr = unsafe { &mut *attr };
        // Of the two the method takes requests that name no completion queue.
        let cq = named_cq(attr.cq)?;
        if attr.wq_type != bindings::ib_wq_type_IB_WQT_RQ || attr.create_flags != 0 {
            return Err(eopnotsupp());
        }
        // SAFETY: `alloc_pd` made the domain, which both callers have looked up with success; they hold its object
        // until this returns.
        let pd = unsafe { Pd::<D>::from_raw(pd) };
        may_have_raw_packets(pd.device())?;
        // The command leaves the context out, as the handler does without; the method sets it to the file.
        let (handler, context) = (attr.event_handler, attr.wq_context);
        let mut attr = WqInitAttr::<D> {
            raw: attr,
            // SAFETY: It is none of the values that stand for no completion queue, so that the caller has looked it up:
            // `create_cq` made it. The caller holds its object until this returns, and counts the work queue as a user
            // of it afterwards.
            cq: unsafe { Object::from_raw(cq.as_ptr()) },
        };
        attr.cq().open();
        let wq = KBox::into_raw(KBox::<Wq<D>>::new_uninit(GFP_KERNEL_ACCOUNT)?);
        let raw = wq.cast::<bindings::ib_wq>();
        // SAFETY: The memory was allocated just now, for a `Wq<D>`.
        unsafe { ptr::write_bytes(wq, 0, 1) };
        // SAFETY: The memory is ours, and of the core's part all zeroes are a value. The device is what
        // the core will set it to.
        unsafe { (*raw).device = pd.device().as_raw() };
        // SAFETY: The memory is ours; the core leaves these two to drivers.
        unsafe { ((*raw).event_handler, (*raw).wq_context) = (handler, context) };
        // SAFETY: All of the memory but what was written of the core's part is zero, and nobody else has
        // it. `udata` is `driver_udata` of the request that either caller answers, and waits for this.
        let created = unsafe {
            Wq::create_with(raw, udata, |new, udata| {
                D::create_wq(pd, new, &mut attr, udata)
            })
        };
        if created.is_err() {
            // SAFETY: It came from `into_raw` above, and `create_with` has dropped what was initialised in
            // it.
            drop(unsafe { KBox::from_raw(wq) });
        }
        created.map(|()| raw)
    };
    made().unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
unsafe extern "C" fn modify_wq<D: WqOps>(
    raw: *mut bindings::ib_wq,
    attr: *mut bindings::ib_wq_attr,
    mask: u32,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is null or that of the uverbs command, which waits for this.
        unsafe { expect_none::<D>(udata)? };
        // SAFETY: `attr` is a local of `ib_uverbs_ex_modify_wq`, which waits.
        let attr = unsafe { &*attr };
        if mask & bindings::ib_wq_attr_mask_IB_WQ_FLAGS != 0 {
            return Err(eopnotsupp());
        }
        // In place of a state that the process did not say the core has `ib_wq::state`, for which it has no lock: of two
        // commands at a time it could be that of the wrong one for good. It is not made use of, nor kept.
        let said = |bit, state| match mask & bit {
            0 => Ok(None),
            _ => WqState::from_raw(state).map(Some).ok_or(EINVAL),
        };
        let from = said(
            bindings::ib_wq_attr_mask_IB_WQ_CUR_STATE,
            attr.curr_wq_state,
        )?;
        let to = said(bindings::ib_wq_attr_mask_IB_WQ_STATE, attr.wq_state)?;
        // SAFETY: `create_wq` made the queue, whose object the command holds until this returns.
        let wq = unsafe { Wq::<D>::from_raw(raw) };
        wq.own().set();
        D::modify_wq(wq, from, to)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_wq<D: WqOps>(
    wq: *mut bindings::ib_wq,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_wq` made the queue. `ib_destroy_wq_user`, by which `uverbs_free_wq` ends what either caller
        // of that has made, calls this only for one whose `usecnt` is zero, and does not touch it any more where this succeeds; else it is as before.
        unsafe { Wq::destroy(wq, D::destroy_wq) }?;
        // SAFETY: The memory came from `create_wq`. `destroy` has dropped what the driver had in it; `ib_wq` is plain data.
        drop(unsafe { KBox::from_raw(wq.cast::<MaybeUninit<Wq<D>>>()) });
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a table that it has just allocated;
/// `attr` must be valid for reads, with as many queues as it says.
unsafe extern "C" fn create_table<D: WqOps>(
    table: *mut bindings::ib_rwq_ind_table,
    attr: *mut bindings::ib_rwq_ind_table_init_attr,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_uverbs_ex_create_rwq_ind_table` has set the device, which is a `Device<D>` as it has this
        // table, and which the command keeps registered meanwhile.
        let dev = unsafe { Device::from_raw((*table).device) };
        may_have_raw_packets(dev)?;
        // SAFETY: `attr` is a local of that function, which waits; it has checked the size, and read as many
        // queues, of which it holds the objects.
        let queues =
            unsafe { core::slice::from_raw_parts((*attr).ind_tbl, 1 << (*attr).log_ind_tbl_size) };
        let entries = RwqEntries {
            queues,
            _p: PhantomData,
        };
        // SAFETY: The core got `table` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_rwq_ind_table` bytes. It
        // shows it to nobody before this returns. `udata` is that of the command, which waits.
        unsafe {
            RwqTable::create_with(table, udata, |new, udata| {
                D::create_rwq_table(dev, new, &entries, udata)
            })
        }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn destroy_table<D: WqOps>(table: *mut bindings::ib_rwq_ind_table) -> c_int {
    from_result(|| {
        // SAFETY: `create_table` made the table. `uverbs_free_rwq_ind_tbl` calls this only for one whose
        // `usecnt` is zero, and frees it where this succeeds; else it is as before.
        unsafe { RwqTable::destroy(table, D::destroy_rwq_table) }?;
        Ok(0)
    })
}

/// `EPERM` unless the current process may have raw packets of a device: by the same question as the core's, of queue pairs and
/// rules (`rdma_uattrs_has_raw_cap`).
fn may_have_raw_packets<D: WqOps>(dev: &Device<D>) -> Result {
    match dev.has_raw_cap() {
        true => Ok(()),
        false => Err(EPERM),
    }
}

/// The completion queue that was named for a new work queue; `EINVAL` where none was.
///
/// `UVERBS_METHOD_WQ_CREATE` has it as an optional attribute, and its handler passes on what `uverbs_attr_get_obj` says of one
/// that is not there: an error in place of a pointer.
pub(super) fn named_cq(cq: *mut bindings::ib_cq) -> Result<NonNull<bindings::ib_cq>> {
    let cq = from_err_ptr(cq).map_err(|_| EINVAL)?;
    NonNull::new(cq).ok_or(EINVAL)
}

/// What is asked of a new work queue.
pub struct WqInitAttr<'a, D: WqOps> {
    raw: &'a mut bindings::ib_wq_init_attr,
    cq: &'a Cq<D>,
}

impl<'a, D: WqOps> WqInitAttr<'a, D> {
    /// Where it completes.
    pub fn cq(&self) -> &'a Cq<D> {
        self.cq
    }

    /// Work requests it is to hold.
    pub fn max_wr(&self) -> u32 {
        self.raw.max_wr
    }

    /// Scatter entries of each.
    pub fn max_sge(&self) -> u32 {
        self.raw.max_sge
    }

    /// Tells the consumer how many work requests it does hold.
    pub fn set_max_wr(&mut self, max_wr: u32) {
        self.raw.max_wr = max_wr;
    }
}

/// The work queues of a new table, as many as a power of two; one may be there more than once.
pub struct RwqEntries<'a, D: WqOps> {
    queues: &'a [*mut bindings::ib_wq],
    _p: PhantomData<&'a D>,
}

impl<'a, D: WqOps> RwqEntries<'a, D> {
    /// Each of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a Wq<D>> + 'a {
        self.queues.iter().map(|&wq| {
            // SAFETY: `create_wq` made the queues, whose objects the command holds. The table counts as their
            // user until it is gone.
            unsafe { Object::from_raw(wq) }
        })
    }
}

/// Whether the core has finished making a work queue.
///
/// It sets what it passes events on by (`ib_wq::uobject`) after the driver has made the queue, and lets processes name the queue
/// after that. So it has where a process does. Before that there are no events: in state [`WqState::Reset`], which it is made
/// in, nothing happens to a queue.
pub struct Finished(Atomic<u32>);

impl Default for Finished {
    fn default() -> Self {
        Self(Atomic::new(0))
    }
}

impl Finished {
    /// It has: what it wrote is seen by all who find that.
    fn set(&self) {
        self.0.store(1, Release);
    }

    fn get(&self) -> bool {
        self.0.load(Acquire) != 0
    }
}

impl<D: WqOps> Object<kind::Wq, D> {
    /// Tells the process that the queue failed. May be called in interrupt context.
    pub fn report_fatal(&self) {
        // A device that says so of one that nobody has used yet is wrong.
        if !self.own().get() {
            return;
        }
        let wq = self.as_raw();
        let mut event: bindings::ib_event = pin_init::zeroed();
        // SAFETY: `&self` is a queue that is not freed; its device does not change.
        event.device = unsafe { (*wq).device };
        event.event = bindings::ib_event_type_IB_EVENT_WQ_FATAL;
        // SAFETY: The event is a local, of whose union all views are plain data.
        unsafe { *event.element.wq.as_mut() = wq };
        // SAFETY: `&self` is a queue that is not freed; both were set before the core finished making it.
        let (handler, context) = unsafe { ((*wq).event_handler, (*wq).wq_context) };
        if let Some(handler) = handler {
            // SAFETY: A handler is called with the context that was set with it, and only reads the event. What
            // `ib_uverbs_wq_event_handler` follows was set when the core had finished, and stays until the driver has ended
            // the queue.
            unsafe { handler(&mut event, context) };
        }
    }
}

impl<D: WqOps> New<'_, kind::Wq, D> {
    /// Tells the core the work queue's number.
    pub fn set_wq_number(&mut self, number: u32) {
        // SAFETY: The core is creating the queue and shows it to nobody before the operation returns, and
        // only `New` leads to it.
        unsafe { (*self.as_raw()).wq_num = number }
    }
}

impl<D: WqOps> New<'_, kind::RwqTable, D> {
    /// Tells the core the table's number.
    pub fn set_table_number(&mut self, number: u32) {
        // SAFETY: The core is creating the table and shows it to nobody before the operation returns, and
        // only `New` leads to it.
        unsafe { (*self.as_raw()).ind_tbl_num = number }
    }
}

impl<'a, D: WqOps> QpInitAttr<'a, D> {
    /// The table by which it is to receive.
    pub fn rwq_table(&self) -> Option<&'a RwqTable<D>> {
        // SAFETY: Whoever has the queue pair created holds the table, and the core counts the queue pair
        // as a user of it until it is gone.
        unsafe { Object::from_nullable(self.raw().rwq_ind_tbl) }
    }
}
