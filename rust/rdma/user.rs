// SPDX-License-Identifier: GPL-2.0

//! User contexts and what they map.

use super::ops::op_if;
use super::{
    kind, Cq, CqInitAttr, CqOps, Device, MethodDef, New, Object, ObjectRef, Ops, PdOps, Udata,
};
use crate::bindings;
use crate::kernel_ext::io::bar_range;
use core::marker::PhantomData;
use core::ptr;
use kernel::build_error;
use kernel::error::{from_result, to_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;
use kernel::transmute::AsBytes;
use kernel::{device, pci};

/// A process's open handle of a device.
pub type Ucontext<D> = Object<kind::Ucontext, D>;
/// A counted reference to a user context.
pub type UcontextRef<D> = ObjectRef<kind::Ucontext, D>;

/// Processes that use the device.
#[vtable]
pub trait UserOps: PdOps + CqOps {
    /// Driver's data of a user context.
    type Ucontext: Send + Sync;
    /// Methods that the driver adds to what processes may do with verbs objects.
    const METHODS: &'static [MethodDef<Self>] = &[];

    /// A process opened the device.
    fn alloc_ucontext<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Ucontext, Self>,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Ucontext<Self>>;

    /// A process asks about its context: one that was given the context of another for what the
    /// other was told when it opened the device, any for the time of the device.
    fn query_ucontext(_ctx: &Ucontext<Self>, _response: &ContextResponse<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A process closed the device. Its mappings are removed before the data is dropped.
    fn dealloc_ucontext(_ctx: &Ucontext<Self>) {}

    /// Makes a completion queue that a process polls itself. Without this the core polls those of
    /// processes for them, with [`CqOps::poll_cq`], and has them made by [`CqOps::create_cq`].
    fn create_user_cq<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::Cq, Self>,
        _attr: &CqInitAttr,
        _udata: &Udata<'_, Self>,
    ) -> Result<&'a Cq<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Gives a completion queue of a process another buffer, and tells by [`Cq::set_entries`] how
    /// many entries it has. The process may do that several times at once.
    fn resize_user_cq(_cq: &Cq<Self>, _entries: u32, _udata: &Udata<'_, Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

impl<D: UserOps> Ops<D> {
    /// Lets processes use the device.
    pub const fn with_user(mut self) -> Self {
        assert!(MethodDef::are_distinct(D::METHODS));
        self.methods = D::METHODS;
        self.raw.alloc_ucontext = Some(alloc_ucontext::<D>);
        self.raw.query_ucontext = op_if!(D::HAS_QUERY_UCONTEXT, query_ucontext::<D>);
        self.raw.dealloc_ucontext = Some(dealloc_ucontext::<D>);
        self.raw.mmap = Some(mmap);
        self.raw.mmap_free = Some(free_range);
        self.raw.disassociate_ucontext = Some(disassociate_ucontext);
        self.raw.create_user_cq = op_if!(D::HAS_CREATE_USER_CQ, create_user_cq::<D>);
        self.raw.resize_user_cq = op_if!(D::HAS_RESIZE_USER_CQ, resize_user_cq::<D>);
        self.raw.size_ib_ucontext = Ucontext::<D>::SIZE;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a context that it has just
/// allocated.
unsafe extern "C" fn alloc_ucontext<D: UserOps>(
    ctx: *mut bindings::ib_ucontext,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `ib_alloc_ucontext` has set the device, which is a `Device<D>` as it has this table; the
        // command, whose file `ib_init_ucontext` looks at, keeps it from being unregistered.
        let dev = unsafe { Device::from_raw((*ctx).device) };
        // SAFETY: `ib_alloc_ucontext` got `ctx` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_ucontext` bytes.
        // `ib_init_ucontext` shows it to nobody before this returns. `udata` is that of the command,
        // which waits.
        let created = unsafe {
            Ucontext::<D>::create_with(ctx, udata, |new, udata| {
                D::alloc_ucontext(dev, new, udata.ok_or(EINVAL)?)
            })
        };
        if created.is_err() {
            // SAFETY: Nobody has seen the context, so that nobody can have mapped a range. The core only
            // frees it, with `kfree`.
            unsafe { remove_ranges(ctx) };
            // SAFETY: Nobody else has the context, and the core gives back the task that it finds in it
            // only.
            unsafe { bindings::rdma_forget_task(ctx) };
        }
        created?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the attributes of a query.
unsafe extern "C" fn query_ucontext<D: UserOps>(
    ctx: *mut bindings::ib_ucontext,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    from_result(|| {
        // SAFETY: `attrs` are those of the uverbs method (`UVERBS_METHOD_QUERY_CONTEXT`), which waits.
        let response = unsafe { ContextResponse::new(attrs) };
        // SAFETY: `alloc_ucontext` made the context, and the method got it from its file, which keeps it.
        D::query_ucontext(unsafe { Object::from_raw(ctx) }, &response)?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dealloc_ucontext<D: UserOps>(ctx: *mut bindings::ib_ucontext) {
    // SAFETY: `alloc_ucontext` made the context, which is ended below.
    D::dealloc_ucontext(unsafe { Object::from_raw(ctx) });
    // SAFETY: `ufile_destroy_ucontext` calls this when all objects of the context are gone, and the
    // context is not freed yet.
    unsafe { remove_ranges(ctx) };
    // SAFETY: `ufile_destroy_ucontext` calls this as the last thing before it frees the context; commands
    // that use it are kept out by its lock (`hw_destroy_rwsem`).
    unsafe { Ucontext::<D>::finish(ctx) };
}

/// Being there tells the core that mappings may be revoked, which it does by itself.
///
/// # Safety
///
/// None; it is `unsafe` because operations are.
unsafe extern "C" fn disassociate_ucontext(_ctx: *mut bindings::ib_ucontext) {}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a queue that it has just
/// allocated, with the attributes of the command; `attr` must be valid for reads.
unsafe extern "C" fn create_user_cq<D: UserOps>(
    cq: *mut bindings::ib_cq,
    attr: *const bindings::ib_cq_init_attr,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    from_result(|| {
        // SAFETY: `create_cq` of uverbs and its method (`UVERBS_METHOD_CQ_CREATE`) have set the device, which is
        // a `Device<D>` as it has this table; the command keeps it from being unregistered.
        let dev = unsafe { Device::from_raw((*cq).device) };
        // SAFETY: `attr` is a local of who calls.
        let attr = unsafe { CqInitAttr::from_raw(attr) };
        // SAFETY: `attrs` are those of the command, which waits; the driver's part is in them.
        let udata = unsafe { bindings::rdma_driver_udata(attrs) };
        // SAFETY: Who calls got `cq` from `rdma_zalloc_drv_obj`: zeroed, `size_ib_cq` bytes. It shows it to
        // nobody before this returns. `udata` is that of the command, which waits.
        unsafe {
            Cq::create_with(cq, udata, |new, udata| {
                D::create_user_cq(dev, new, &attr, udata.ok_or(EINVAL)?)
            })
        }?;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the user's part of the
/// command.
unsafe extern "C" fn resize_user_cq<D: UserOps>(
    cq: *mut bindings::ib_cq,
    entries: c_uint,
    udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: `udata` is that of `ib_uverbs_resize_cq`, which waits.
        let udata = unsafe { Udata::<D>::from_raw(udata) }.ok_or(EINVAL)?;
        // SAFETY: `D` made the queue, and `ib_uverbs_resize_cq` holds its object for reading: nobody ends it
        // before this returns.
        D::resize_user_cq(unsafe { Object::from_raw(cq) }, entries, &udata)?;
        let _ = udata.finish();
        Ok(0)
    })
}

/// How a process asks for the time of the device's clock.
#[derive(Clone, Copy)]
#[repr(u16)]
pub enum ClockQuery {
    /// However long that takes.
    Patient = bindings::RDMA_CONTEXT_ATTR_CLOCK as u16,
    /// Not (`EAGAIN`) where the device cannot be asked at once.
    Now = bindings::RDMA_CONTEXT_ATTR_CLOCK_NOW as u16,
}

/// Where to answer a process that asks about its context.
pub struct ContextResponse<'a> {
    attrs: *mut bindings::uverbs_attr_bundle,
    _p: PhantomData<&'a ()>,
}

impl ContextResponse<'_> {
    /// # Safety
    ///
    /// `attrs` must be those of a query of a context that is being carried out.
    pub(super) unsafe fn new(attrs: *mut bindings::uverbs_attr_bundle) -> Self {
        Self {
            attrs,
            _p: PhantomData,
        }
    }

    /// Writes the response, cut or padded with zeroes to what the process gave room for.
    pub fn respond<T: AsBytes>(&self, response: &T) -> Result {
        // SAFETY: `new` was given the attributes of a query that outlives `self`; `response` is as
        // many bytes as announced, all initialised.
        to_result(unsafe {
            bindings::uverbs_copy_to_struct_or_zero(
                self.attrs,
                bindings::RDMA_CONTEXT_ATTR_RESPONSE as usize,
                ptr::from_ref(response).cast(),
                size_of::<T>(),
            )
        })
    }

    /// Whether the process wants to know the time of the device's clock in this way.
    pub fn wants_clock(&self, way: ClockQuery) -> bool {
        // SAFETY: `new` was given the attributes of a query that outlives `self`.
        unsafe { bindings::rdma_context_wants_clock(self.attrs, way as u16) }
    }

    /// Tells the time of the device's clock to a process that wants to know it in this way.
    pub fn respond_clock(&self, way: ClockQuery, ticks: u64) -> Result {
        // SAFETY: `new` was given the attributes of a query that outlives `self`.
        to_result(unsafe { bindings::rdma_context_respond_clock(self.attrs, way as u16, ticks) })
    }
}

/// How a processor accesses a mapped page of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Each access goes to the device as it is.
    Uncached,
    /// Writes may be joined.
    WriteCombining,
}

/// A range of a BAR that a process may map.
#[repr(C)]
struct BarRange {
    entry: bindings::rdma_user_mmap_entry,
    address: u64,
    write_combine: bool,
    /// What has to live for as long as the range can be reached.
    keep: Option<KBox<dyn Send>>,
}

impl<D: UserOps> Object<kind::Ucontext, D> {
    /// Lets the process map `length` bytes of a BAR of the device's parent, which has to be a PCI
    /// device; `offset` and `length` have to be multiples of a page. Returns the offset to map them
    /// by.
    ///
    /// Two processes may see each other's accesses only if they are given the same page. Mappings
    /// are revoked when the context goes.
    pub fn map_bar(&self, bar: u32, offset: u64, length: usize, caching: Caching) -> Result<u64> {
        self.insert_range(bar, offset, length, caching, None)
    }

    /// As [`Self::map_bar`]; `keep` is dropped when the range can neither be mapped any more nor is
    /// mapped.
    pub fn map_bar_keeping<T: Send + 'static>(
        &self,
        bar: u32,
        offset: u64,
        length: usize,
        caching: Caching,
        keep: KBox<T>,
    ) -> Result<u64> {
        let keep = KBox::into_raw(keep);
        // SAFETY: The pointer came from `into_raw` just now.
        let keep: KBox<dyn Send> = unsafe { KBox::from_raw(keep as *mut dyn Send) };
        self.insert_range(bar, offset, length, caching, Some(keep))
    }

    /// Ends a range: it cannot be mapped any more. Mappings that exist stay.
    pub fn unmap_bar(&self, offset: u64) {
        let page = offset as usize / kernel::page::PAGE_SIZE;
        // SAFETY: `&self` is a context that is not freed; the function takes the lock of its
        // entries.
        let entry = unsafe { bindings::rdma_user_mmap_entry_get_pgoff(self.as_raw(), page) };
        if !entry.is_null() {
            // SAFETY: The entry is ours until it is put. It was not removed before, else it would
            // not have been found.
            unsafe {
                bindings::rdma_user_mmap_entry_remove(entry);
                bindings::rdma_user_mmap_entry_put(entry);
            }
        }
    }

    fn insert_range(
        &self,
        bar: u32,
        offset: u64,
        length: usize,
        caching: Caching,
        keep: Option<KBox<dyn Send>>,
    ) -> Result<u64> {
        let page_mask = kernel::page::PAGE_SIZE - 1;
        if length == 0 || (length | offset as usize) & page_mask != 0 {
            return Err(EINVAL);
        }
        let parent: &pci::Device<device::Bound> = self.device().parent().try_into()?;
        let address = bar_range(parent, bar, offset, length)?;
        let range = KBox::<BarRange>::new_uninit(GFP_KERNEL)?;
        let range = KBox::into_raw(range).cast::<BarRange>();
        // SAFETY: The memory is ours; a zeroed entry is what the core expects.
        unsafe {
            ptr::write_bytes(range, 0, 1);
            (*range).address = address;
            (*range).write_combine = caching == Caching::WriteCombining;
            ptr::addr_of_mut!((*range).keep).write(keep);
        }
        // SAFETY: `&self` is a context that is not freed; the entry is freed by `free_range`, when
        // the core has no more use for it.
        let ret = unsafe {
            bindings::rdma_user_mmap_entry_insert(
                self.as_raw(),
                ptr::addr_of_mut!((*range).entry),
                length,
            )
        };
        if ret != 0 {
            // SAFETY: The entry was not taken, so that the memory is still ours.
            drop(unsafe { KBox::from_raw(range) });
            to_result(ret)?;
        }
        // SAFETY: The entry was inserted above, and is not removed before the context goes: its
        // offset is not told to anybody yet.
        Ok(unsafe { bindings::rdma_user_mmap_get_offset(ptr::addr_of!((*range).entry)) })
    }
}

/// Maps what the offset of `vma` stands for.
///
/// # Safety
///
/// To be called by the core as `mmap`.
unsafe extern "C" fn mmap(
    ctx: *mut bindings::ib_ucontext,
    vma: *mut bindings::vm_area_struct,
) -> c_int {
    // SAFETY: The core calls this with the context of the file, which it holds, and with the VMA
    // that is being mapped.
    let entry = unsafe { bindings::rdma_user_mmap_entry_get(ctx, vma) };
    if entry.is_null() {
        return EINVAL.to_errno();
    }
    let range = entry.cast::<BarRange>();
    // SAFETY: All entries are `BarRange`s; this one is held until it is put below.
    unsafe {
        let ret =
            bindings::rdma_user_mmap_bar(ctx, vma, (*range).address, (*range).write_combine, entry);
        bindings::rdma_user_mmap_entry_put(entry);
        ret
    }
}

/// Frees an entry that is neither in its context nor mapped any more.
///
/// # Safety
///
/// To be called by the core as `mmap_free`.
unsafe extern "C" fn free_range(entry: *mut bindings::rdma_user_mmap_entry) {
    // SAFETY: All entries are `BarRange`s from `map_bar`, and the core is done with this one.
    drop(unsafe { KBox::from_raw(entry.cast::<BarRange>()) });
}

/// Removes all entries of a context.
///
/// # Safety
///
/// The context must be about to go.
unsafe fn remove_ranges(ctx: *mut bindings::ib_ucontext) {
    let mut index = 0;
    loop {
        // SAFETY: The caller vouches that the context is not freed yet; `index` is a local.
        let entry = unsafe {
            bindings::xa_find(
                ptr::addr_of_mut!((*ctx).mmap_xa),
                &mut index,
                usize::MAX,
                bindings::XA_PRESENT,
            )
        };
        if entry.is_null() {
            break;
        }
        let entry = entry.cast::<bindings::rdma_user_mmap_entry>();
        // SAFETY: The entry is in the context, so it is valid. One that was removed before waits
        // for its mappings to go; removing it twice would drop its count twice.
        unsafe {
            index = (*entry).start_pgoff + (*entry).npages;
            if !(*entry).driver_removed {
                bindings::rdma_user_mmap_entry_remove(entry);
            }
        }
    }
}
