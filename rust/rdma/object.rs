// SPDX-License-Identifier: GPL-2.0

//! Verbs objects: the RDMA core's structure and the driver's data in one allocation.
//!
//! The core allocates most objects itself, from a size that the driver announces, and calls the
//! driver to create and destroy what is behind them. [`Object`] is that allocation: the core's part
//! first, then the driver's data, which the driver initialises in place through [`New`].
//!
//! Events from the device may arrive at any time, while the core destroys the object they are
//! about. [`ObjectRef`] is a counted reference for them: destroying an object ends by waiting until
//! the last one is gone.

use super::cq::Gate;
use super::wq::Finished;
use super::{
    AhOps, CqOps, Device, DmOps, Driver, FlowOps, MrOps, MwOps, PdOps, QpCounterOps, QpOps, SrqOps,
    Udata, UserOps, WqOps, XrcOps,
};
use crate::bindings;
use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Relaxed};
use kernel::sync::Refcount;
use kernel::types::{ForeignOwnable, Opaque};

/// The kinds of verbs objects, as type parameters of [`Object`].
pub mod kind {
    /// A user context.
    pub enum Ucontext {}
    /// A protection domain.
    pub enum Pd {}
    /// A completion queue.
    pub enum Cq {}
    /// A queue pair.
    pub enum Qp {}
    /// A memory region.
    pub enum Mr {}
    /// An address handle.
    pub enum Ah {}
    /// A shared receive queue.
    pub enum Srq {}
    /// A memory window.
    pub enum Mw {}
    /// An XRC domain.
    pub enum Xrcd {}
    /// A piece of a device's memory.
    pub enum Dm {}
    /// A rule of flows.
    pub enum Flow {}
    /// A work queue.
    pub enum Wq {}
    /// A table of work queues.
    pub enum RwqTable {}
    /// A set of counters that queue pairs are bound to.
    pub enum Counter {}
}

/// What the core's and the driver's part of a kind of object are.
///
/// # Safety
///
/// `device` must return the device of the object.
pub unsafe trait Kind<D: Driver> {
    /// The core's structure.
    type Raw;
    /// The driver's data.
    type Data: Send + Sync;
    /// What the abstractions themselves have to know of an object.
    type Own: Default + Send + Sync;

    /// The device of an object.
    ///
    /// # Safety
    ///
    /// `raw` must be valid for reads.
    unsafe fn device(raw: *const Self::Raw) -> *mut bindings::ib_device;
}

macro_rules! kinds {
    ($($ops:ident::$kind:ident is $raw:ident with $own:ty;)*) => {$(
        // SAFETY: `device` returns the field of that name. The core sets it before it calls the
        // operation that creates the object; for regions `create_mr` does, for device memory
        // `create_dm`, for rules `create_flow`, for work queues `create_wq`.
        unsafe impl<D: $ops> Kind<D> for kind::$kind {
            type Raw = bindings::$raw;
            type Data = D::$kind;
            type Own = $own;

            unsafe fn device(raw: *const Self::Raw) -> *mut bindings::ib_device {
                // SAFETY: The caller vouches that it can be read.
                unsafe { (*raw).device }
            }
        }
    )*};
}

kinds! {
    UserOps::Ucontext is ib_ucontext with ();
    PdOps::Pd is ib_pd with ();
    CqOps::Cq is ib_cq with Gate;
    QpOps::Qp is ib_qp with ();
    MrOps::Mr is ib_mr with ();
    AhOps::Ah is ib_ah with ();
    SrqOps::Srq is ib_srq with ();
    MwOps::Mw is ib_mw with ();
    XrcOps::Xrcd is ib_xrcd with ();
    DmOps::Dm is ib_dm with ();
    FlowOps::Flow is ib_flow with ();
    WqOps::Wq is ib_wq with Finished;
    WqOps::RwqTable is ib_rwq_ind_table with ();
    QpCounterOps::Counter is rdma_counter with ();
}

/// A verbs object of kind `K` of a device driven by `D`.
///
/// It dereferences to the driver's data.
///
/// # Invariants
///
/// A reference to an `Object` only exists where `data` is initialised, or inside [`New`].
#[repr(C)]
pub struct Object<K: Kind<D>, D: Driver> {
    raw: Opaque<K::Raw>,
    refs: Refcount,
    released: Opaque<bindings::completion>,
    initialised: UnsafeCell<bool>,
    own: K::Own,
    data: UnsafeCell<MaybeUninit<K::Data>>,
}

// SAFETY: The core's part is used from any task, and the driver's data is `Send` and `Sync`.
unsafe impl<K: Kind<D>, D: Driver> Send for Object<K, D> {}
// SAFETY: The core's part is used from any task, and the driver's data is `Send` and `Sync`.
unsafe impl<K: Kind<D>, D: Driver> Sync for Object<K, D> {}

impl<K: Kind<D>, D: Driver> Object<K, D> {
    /// The bytes to announce to the core.
    ///
    /// The core casts its structure to ours, so it has to be first, and allocates with `kzalloc`,
    /// which aligns to that of `u64` at least.
    pub(super) const SIZE: usize = {
        assert!(core::mem::offset_of!(Self, raw) == 0);
        assert!(align_of::<Self>() <= align_of::<u64>());
        // Nobody drops it.
        assert!(!core::mem::needs_drop::<K::Own>());
        size_of::<Self>()
    };

    /// # Safety
    ///
    /// `raw` must be the first member of an object of this type that is initialised and stays so
    /// for `'a`.
    pub(super) unsafe fn from_raw<'a>(raw: *mut K::Raw) -> &'a Self {
        // SAFETY: The caller vouches for an object of this type that is initialised for `'a`; the
        // core's part is first in it.
        unsafe { &*raw.cast::<Self>() }
    }

    /// # Safety
    ///
    /// `raw` must be null or as for [`Self::from_raw`].
    pub(super) unsafe fn from_nullable<'a>(raw: *mut K::Raw) -> Option<&'a Self> {
        // SAFETY: The caller vouches for what is not null.
        (!raw.is_null()).then(|| unsafe { Self::from_raw(raw) })
    }

    /// The core's structure.
    pub(super) fn as_raw(&self) -> *mut K::Raw {
        self.raw.get()
    }

    /// What the abstractions know of it.
    pub(super) fn own(&self) -> &K::Own {
        &self.own
    }

    /// Prepares fresh zeroed memory for the driver to initialise.
    ///
    /// # Safety
    ///
    /// `raw` must be the first member of a zeroed allocation of [`Self::SIZE`] bytes in which only
    /// the core's part may have been written; it must stay valid for `'a`.
    pub(super) unsafe fn prepare<'a>(raw: *mut K::Raw) -> New<'a, K, D> {
        let this = raw.cast::<Self>();
        // SAFETY: The caller vouches for memory of the right size that nobody else uses yet.
        unsafe { ptr::addr_of_mut!((*this).refs).write(Refcount::new(1)) };
        // SAFETY: The caller vouches for memory of the right size that nobody else uses yet.
        unsafe { ptr::addr_of_mut!((*this).own).write(K::Own::default()) };
        // SAFETY: The caller vouches for memory of the right size that nobody else uses yet and that stays.
        unsafe { bindings::init_completion(Opaque::cast_into(ptr::addr_of!((*this).released))) };
        // SAFETY: The caller vouches that the memory stays for `'a`. All fields except `data`,
        // which is `MaybeUninit`, are initialised.
        New(unsafe { &*this })
    }

    /// Lets the driver create an object in memory of the core.
    ///
    /// # Safety
    ///
    /// As for [`Self::prepare`]; nobody else may have the object before this returns.
    pub(super) unsafe fn create(
        raw: *mut K::Raw,
        create: impl for<'a> FnOnce(New<'a, K, D>) -> Result<&'a Self>,
    ) -> Result {
        // SAFETY: The caller vouches for zeroed memory of the size of an `Object<K, D>`.
        let new = unsafe { Self::prepare(raw) };
        let result = match create(new) {
            // A driver could only return another object by keeping one from before.
            Ok(object) if ptr::eq(object.as_raw(), raw) => Ok(()),
            Ok(_) => Err(EINVAL),
            Err(err) => Err(err),
        };
        if result.is_err() {
            // SAFETY: Prepared above; the driver failed, so that nobody will use it.
            unsafe { Self::finish(raw) };
        }
        result
    }

    /// As [`Self::create`], with the user's part of the request.
    ///
    /// # Safety
    ///
    /// As for [`Self::create`] and [`Udata::from_raw`].
    pub(super) unsafe fn create_with(
        raw: *mut K::Raw,
        udata: *mut bindings::ib_udata,
        create: impl for<'a> FnOnce(New<'a, K, D>, Option<&Udata<'_, D>>) -> Result<&'a Self>,
    ) -> Result {
        // SAFETY: The caller vouches that it is null or of a command that lasts until this returns.
        let udata = unsafe { Udata::<D>::from_raw(udata) };
        // SAFETY: The caller vouches for zeroed memory of the size of an `Object<K, D>`.
        unsafe { Self::create(raw, |new| create(new, udata.as_ref())) }?;
        // The response buffer was zeroed by the driver's response, or has to be now. Failing here
        // would leak the object, and an unwritable buffer is the process's own loss.
        if let Some(udata) = udata {
            let _ = udata.finish();
        }
        Ok(())
    }

    /// Lets the driver end an object, and ends its data where the driver did.
    ///
    /// # Safety
    ///
    /// The driver must have created the object. Where this succeeds the object must not be used
    /// afterwards, and there must be no reference to it other than [`ObjectRef`]s.
    pub(super) unsafe fn destroy(
        raw: *mut K::Raw,
        destroy: impl FnOnce(&Self) -> Result,
    ) -> Result {
        // SAFETY: The caller vouches that the driver created the object, and nobody else ends it.
        destroy(unsafe { Self::from_raw(raw) })?;
        // SAFETY: What the driver created was prepared. The caller vouches that nobody uses the object
        // afterwards, and that all references to it are counted.
        unsafe { Self::finish(raw) };
        Ok(())
    }

    /// Ends the life of the driver's data: waits for the last [`ObjectRef`], then drops it.
    ///
    /// Does nothing if the driver never initialised it.
    ///
    /// # Safety
    ///
    /// `raw` must have been passed to [`Self::prepare`]; the object must not be used afterwards
    /// and there must be no reference to it other than `ObjectRef`s.
    pub(super) unsafe fn finish(raw: *mut K::Raw) {
        let this = raw.cast::<Self>();
        // SAFETY: The caller vouches that the object was prepared, so that the flag is initialised;
        // nobody writes it any more.
        if !unsafe { *(*this).initialised.get() } {
            return;
        }
        // SAFETY: The object was prepared, and the flag says that its data is initialised.
        let object = unsafe { &*this };
        object.put();
        // Address handles end in atomic context: only wait where there is something to wait for.
        // SAFETY: `prepare` has initialised the completion.
        if !unsafe { bindings::try_wait_for_completion(object.released.get()) } {
            // SAFETY: `prepare` has initialised the completion.
            unsafe { bindings::wait_for_completion(object.released.get()) };
        }
        // SAFETY: The flag says that the data is initialised, and the completion that the last
        // count is gone.
        unsafe { ptr::drop_in_place((*this).data.get().cast::<K::Data>()) };
    }

    /// Waits until the last [`ObjectRef`] is gone; the object lives on. Sleeps.
    ///
    /// # Safety
    ///
    /// `raw` must have been passed to [`Self::prepare`] and the driver must have created the
    /// object. Nobody may end the object until this returns. [`Self::get_ref`] and [`Self::try_ref`]
    /// find nothing meanwhile.
    pub(super) unsafe fn quiesce(raw: *mut K::Raw) {
        // SAFETY: The driver created the object, so that everything in it is initialised; nobody
        // ends it meanwhile.
        let this = unsafe { &*raw.cast::<Self>() };
        this.put();
        // SAFETY: `prepare` initialised the completion. Whoever drops the last count signals it.
        unsafe { bindings::wait_for_completion(this.released.get()) };
        // SAFETY: The completion was waited for, and nobody signals it again before the count is set anew.
        unsafe { bindings::reinit_completion(this.released.get()) };
        this.refs.set(1);
    }

    fn put(&self) {
        if self.refs.dec_and_test() {
            // SAFETY: The completion was initialised by `prepare`.
            unsafe { bindings::complete_all(self.released.get()) }
        }
    }

    /// A counted reference to an object that may be about to end; `None` if it has ended.
    ///
    /// # Safety
    ///
    /// `raw` must have been passed to [`Self::prepare`], the driver must have created the object,
    /// and its memory must be valid during the call and for as long as the object lives.
    pub(super) unsafe fn try_ref(raw: *mut K::Raw) -> Option<ObjectRef<K, D>> {
        // SAFETY: The caller vouches that the memory stays during the call; `prepare` has initialised
        // the counter, which stays when the data goes.
        let counted = inc_not_zero(unsafe { &(*raw.cast::<Self>()).refs });
        // INVARIANT: The count was taken just now.
        counted.then_some(ObjectRef(NonNull::new(raw.cast())?))
    }

    /// The device that the object belongs to.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: The core's part is valid; the device outlives its objects and is of type
        // `Device<D>` because only its operations create objects of this type.
        unsafe { Device::from_raw(K::device(self.raw.get())) }
    }

    /// A counted reference; `None` while the object ends, when those that exist are waited for.
    ///
    /// Destroying the object waits for it: the driver has to drop it (take it out of its tables)
    /// in the object's `destroy` operation at the latest.
    pub fn get_ref(&self) -> Option<ObjectRef<K, D>> {
        // INVARIANT: The count was taken just now.
        inc_not_zero(&self.refs).then_some(ObjectRef(NonNull::from(self)))
    }
}

/// Counts one more (`refcount_inc_not_zero`, which the kernel crate does not have), but after the last one was
/// dropped.
pub(super) fn inc_not_zero(refs: &Refcount) -> bool {
    let count = refs.as_atomic();
    let mut seen = count.load(Relaxed);
    while seen > 0 {
        let Some(more) = seen.checked_add(1) else {
            // There are too many: it stays as it is from now on, as the kernel's does.
            refs.inc();
            return true;
        };
        match count.cmpxchg(seen, more, Acquire) {
            Ok(_) => return true,
            Err(other) => seen = other,
        }
    }
    false
}

impl<K: Kind<D>, D: Driver> Deref for Object<K, D> {
    type Target = K::Data;

    fn deref(&self) -> &K::Data {
        // SAFETY: By the type invariant the data is initialised; it is never borrowed mutably.
        unsafe { &*self.data.get().cast::<K::Data>() }
    }
}

/// An object whose data the driver has yet to initialise.
pub struct New<'a, K: Kind<D>, D: Driver>(&'a Object<K, D>);

impl<'a, K: Kind<D>, D: Driver> New<'a, K, D> {
    /// Initialises the driver's data.
    ///
    /// If the operation fails after this, the data is dropped again.
    pub fn init<E>(self, init: impl PinInit<K::Data, E>) -> Result<&'a Object<K, D>>
    where
        Error: From<E>,
    {
        let slot = self.0.data.get().cast::<K::Data>();
        // SAFETY: The slot is valid for writes, pinned by the allocation, and not initialised
        // before, since `self` is consumed.
        unsafe { init.__pinned_init(slot) }?;
        // SAFETY: Nobody else looks at the flag before the operation returns.
        unsafe { *self.0.initialised.get() = true };
        // INVARIANT: The data is initialised.
        Ok(self.0)
    }

    /// The device that the object will belong to.
    pub fn device(&self) -> &'a Device<D> {
        self.0.device()
    }

    pub(super) fn as_raw(&self) -> *mut K::Raw {
        self.0.as_raw()
    }

    pub(super) fn own(&self) -> &K::Own {
        self.0.own()
    }
}

/// A counted reference to an [`Object`].
///
/// # Invariants
///
/// The object is valid, and the reference owns one of its counts.
pub struct ObjectRef<K: Kind<D>, D: Driver>(NonNull<Object<K, D>>);

// SAFETY: An object is `Sync`, and its last count may be dropped by any task: who waits for that is
// told by a completion.
unsafe impl<K: Kind<D>, D: Driver> Send for ObjectRef<K, D> {}
// SAFETY: A reference to an `ObjectRef` leads to a `&Object`, which is `Sync`, and to new counts,
// which are atomic.
unsafe impl<K: Kind<D>, D: Driver> Sync for ObjectRef<K, D> {}

impl<K: Kind<D>, D: Driver> Deref for ObjectRef<K, D> {
    type Target = Object<K, D>;

    fn deref(&self) -> &Object<K, D> {
        // SAFETY: By the type invariant we own a count, for which `finish` waits.
        unsafe { self.0.as_ref() }
    }
}

impl<K: Kind<D>, D: Driver> Clone for ObjectRef<K, D> {
    fn clone(&self) -> Self {
        self.refs.inc();
        // INVARIANT: The count was taken just now; it was not zero, as `self` owns one.
        Self(self.0)
    }
}

impl<K: Kind<D>, D: Driver> TryFrom<&Object<K, D>> for ObjectRef<K, D> {
    type Error = Error;

    /// `ENODEV` while the object ends.
    fn try_from(object: &Object<K, D>) -> Result<Self> {
        object.get_ref().ok_or(ENODEV)
    }
}

impl<K: Kind<D>, D: Driver> Drop for ObjectRef<K, D> {
    fn drop(&mut self) {
        self.put();
    }
}

// SAFETY: `into_foreign` returns the pointer of the object, which is aligned to that of `u64`.
unsafe impl<K: Kind<D> + 'static, D: Driver> ForeignOwnable for ObjectRef<K, D> {
    const FOREIGN_ALIGN: usize = align_of::<u64>();

    type Borrowed<'a> = &'a Object<K, D>;
    type BorrowedMut<'a> = &'a Object<K, D>;

    fn into_foreign(self) -> *mut c_void {
        let this = core::mem::ManuallyDrop::new(self);
        this.0.as_ptr().cast()
    }

    unsafe fn from_foreign(ptr: *mut c_void) -> Self {
        // INVARIANT: The count passes from `into_foreign`.
        // SAFETY: The pointer came from `into_foreign` and is not null.
        Self(unsafe { NonNull::new_unchecked(ptr.cast()) })
    }

    unsafe fn borrow<'a>(ptr: *mut c_void) -> &'a Object<K, D> {
        // SAFETY: The pointer came from `into_foreign`, and the count it stands for outlives `'a`.
        unsafe { &*ptr.cast() }
    }

    unsafe fn borrow_mut<'a>(ptr: *mut c_void) -> &'a Object<K, D> {
        // SAFETY: The pointer came from `into_foreign`, and the count it stands for outlives `'a`.
        unsafe { &*ptr.cast() }
    }
}
