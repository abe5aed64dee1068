// SPDX-License-Identifier: GPL-2.0

//! User contexts and what they map.

use super::method::Addition;
use super::ops::op_if;
use super::{
    kind, ops, Attributes, Cq, CqInitAttr, CqOps, Device, MethodDef, New, Object, ObjectRef,
    OfDevice, Ops, PdOps, Udata,
};
use crate::bindings;
use core::ptr;
use kernel::build_error;
use kernel::error::{from_result, to_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;

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

    /// A process closed the device. Its mappings are removed before the data is dropped.
    fn dealloc_ucontext(_ctx: &Ucontext<Self>) {}
}

/// Completion queues that processes poll themselves. Without this the core polls those of processes for them, with
/// [`CqOps::poll_cq`], and has them made by [`CqOps::create_cq`].
#[vtable]
pub trait UserCqOps: UserOps {
    /// Makes one.
    fn create_user_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Cq<Self>>;

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
        self.raw.dealloc_ucontext = Some(dealloc_ucontext::<D>);
        self.raw.mmap = Some(mmap);
        self.raw.mmap_free = Some(free_range);
        self.raw.disassociate_ucontext = Some(disassociate_ucontext);
        self.raw.size_ib_ucontext = Ucontext::<D>::SIZE;
        self
    }

    /// Has the core post and poll for processes, which have nothing of the device in their memory, with the operations
    /// for kernel users ([`super::QpOps::post_send`], [`super::CqOps::poll_cq`]). The core refuses these commands for
    /// devices that do not say so (`uverbs_cmd_mask`).
    pub const fn with_posting_by_core(mut self) -> Self {
        self.commands |= 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SEND
            | 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_RECV
            | 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POST_SRQ_RECV
            | 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_POLL_CQ
            | 1 << bindings::ib_uverbs_write_cmds_IB_USER_VERBS_CMD_REQ_NOTIFY_CQ;
        self
    }
}

impl<D: UserCqOps> Ops<D> {
    /// Lets processes poll their completion queues themselves.
    pub const fn with_user_cqs(mut self) -> Self {
        self.raw.create_user_cq = Some(create_user_cq::<D>);
        self.raw.resize_user_cq = op_if!(D::HAS_RESIZE_USER_CQ, resize_user_cq::<D>);
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
unsafe extern "C" fn create_user_cq<D: UserCqOps>(
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
                new.open_where_ready();
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
unsafe extern "C" fn resize_user_cq<D: UserCqOps>(
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

/// Contexts that processes ask about: one that was given the context of another, for what the other
/// was told when it opened the device.
pub trait QueryContextOps: UserOps {
    /// Attributes that the driver adds to those of the core (`UVERBS_ATTR_QUERY_CONTEXT_*`), which the core
    /// answers itself.
    type QueryAttributes<'a>: Attributes<'a, Self>;

    /// A process asks about its context.
    fn query_ucontext(ctx: &Ucontext<Self>, attributes: Self::QueryAttributes<'_>) -> Result;
}

impl<D: QueryContextOps> Ops<D> {
    /// Answers processes that ask about their context.
    pub const fn with_context_query(mut self) -> Self {
        self.raw.query_ucontext = Some(query_ucontext::<D>);
        self.additions[ops::QUERY_CONTEXT] = Addition::<
            D,
            OfDevice,
            D::QueryAttributes<'static>,
            { bindings::uverbs_methods_device_UVERBS_METHOD_QUERY_CONTEXT },
        >::OBJECT;
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the attributes of a query.
unsafe extern "C" fn query_ucontext<D: QueryContextOps>(
    ctx: *mut bindings::ib_ucontext,
    attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    from_result(|| {
        // SAFETY: `attrs` are those of the uverbs method (`UVERBS_METHOD_QUERY_CONTEXT`), which the core has
        // checked against what `with_context_query` adds to its own, and keeps until this returns.
        let attributes = unsafe { <D::QueryAttributes<'_> as Attributes<'_, D>>::get(attrs)? };
        // SAFETY: `alloc_ucontext` made the context, and the method got it from its file, which keeps it.
        D::query_ucontext(unsafe { Object::from_raw(ctx) }, attributes)?;
        Ok(0)
    })
}

/// How a processor accesses a mapped page of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Each access goes to the device as it is.
    Uncached,
    /// Writes may be joined.
    WriteCombining,
}

/// Memory of a device that processes may be given, in whole pages.
///
/// # Invariants
///
/// It is memory of `dev`, by the address that processors use, until that goes; neither it nor its pages are
/// anything else's.
pub struct IoRange<'a, D: UserOps> {
    dev: &'a Device<D>,
    address: u64,
    length: usize,
}

impl<'a, D: UserOps> IoRange<'a, D> {
    /// `length` bytes from `address` on; `EINVAL` where these are not whole pages, or none.
    ///
    /// # Safety
    ///
    /// They must be memory of `dev` for as long as that is registered, and whatever processes do there must be
    /// harmless to others.
    pub unsafe fn new(dev: &'a Device<D>, address: u64, length: usize) -> Result<Self> {
        let within = (kernel::page::PAGE_SIZE - 1) as u64;
        if length == 0 || (length as u64 | address) & within != 0 {
            return Err(EINVAL);
        }
        // INVARIANT: The caller vouches for the device's memory, which is whole pages.
        Ok(Self {
            dev,
            address,
            length,
        })
    }
}

/// An entry of a context's table of what can be mapped.
#[repr(C)]
struct RangeEntry {
    entry: bindings::rdma_user_mmap_entry,
    address: u64,
    write_combine: bool,
    /// What has to live for as long as the range can be reached.
    keep: Option<KBox<dyn Send>>,
}

impl<D: UserOps> Object<kind::Ucontext, D> {
    /// Lets the process map a range of its device (`EINVAL` for another's). Returns the offset to map it by.
    ///
    /// Two processes may see each other's accesses only if they are given the same page. Mappings
    /// are revoked when the context goes.
    pub fn map_range(&self, range: IoRange<'_, D>, caching: Caching) -> Result<u64> {
        self.insert_range(range, caching, None)
    }

    /// As [`Self::map_range`]; `keep` is dropped when the range can neither be mapped any more nor is
    /// mapped.
    pub fn map_range_keeping<T: Send + 'static>(
        &self,
        range: IoRange<'_, D>,
        caching: Caching,
        keep: KBox<T>,
    ) -> Result<u64> {
        let keep = KBox::into_raw(keep);
        // SAFETY: The pointer came from `into_raw` just now.
        let keep: KBox<dyn Send> = unsafe { KBox::from_raw(keep as *mut dyn Send) };
        self.insert_range(range, caching, Some(keep))
    }

    /// Ends a range: it cannot be mapped any more. Mappings that exist stay.
    pub fn unmap_range(&self, offset: u64) {
        let page = offset as usize / kernel::page::PAGE_SIZE;
        // SAFETY: `&self` is a context that is not freed; the function takes the lock of its
        // entries.
        let entry = unsafe { bindings::rdma_user_mmap_entry_get_pgoff(self.as_raw(), page) };
        if entry.is_null() {
            return;
        }
        // SAFETY: `rdma_user_mmap_entry_get_pgoff` has taken a count of the entry, and finds none that was
        // removed before.
        unsafe { bindings::rdma_user_mmap_entry_remove(entry) };
        // SAFETY: The count was taken above, and the entry is not used afterwards.
        unsafe { bindings::rdma_user_mmap_entry_put(entry) };
    }

    fn insert_range(
        &self,
        range: IoRange<'_, D>,
        caching: Caching,
        keep: Option<KBox<dyn Send>>,
    ) -> Result<u64> {
        // The context goes before its device, and another device may go before the context.
        if !ptr::eq(range.dev, self.device()) {
            return Err(EINVAL);
        }
        let entry = KBox::new(
            RangeEntry {
                entry: pin_init::zeroed(),
                address: range.address,
                write_combine: caching == Caching::WriteCombining,
                keep,
            },
            GFP_KERNEL_ACCOUNT,
        )?;
        let entry = KBox::into_raw(entry).cast::<bindings::rdma_user_mmap_entry>();
        // SAFETY: `&self` is a context that is not freed. The entry is the first member of what was
        // allocated above; `free_range` frees it, when the core has no more use for it.
        let ret =
            unsafe { bindings::rdma_user_mmap_entry_insert(self.as_raw(), entry, range.length) };
        if ret != 0 {
            // SAFETY: The entry was not taken, so that the memory is still ours.
            drop(unsafe { KBox::from_raw(entry.cast::<RangeEntry>()) });
            to_result(ret)?;
        }
        // SAFETY: The entry was inserted above, and is not removed before the context goes: its
        // offset is not told to anybody yet.
        Ok(unsafe { bindings::rdma_user_mmap_get_offset(entry) })
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
    // SAFETY: `ib_uverbs_mmap` calls this with the context of the file, which it keeps meanwhile, and
    // with the VMA that is being mapped.
    let entry = unsafe { bindings::rdma_user_mmap_entry_get(ctx, vma) };
    if entry.is_null() {
        return EINVAL.to_errno();
    }
    // SAFETY: All entries are in `RangeEntry`s, which `insert_range` made; a count of this one is put
    // below.
    let range = unsafe { &*entry.cast::<RangeEntry>() };
    // SAFETY: Context and VMA are those that this was called for, and the entry is that of the VMA's offset;
    // the range is memory of the context's device, as `insert_range` has found out, which is registered.
    let ret = unsafe {
        bindings::rdma_user_mmap_pages(ctx, vma, range.address, range.write_combine, entry)
    };
    // SAFETY: `rdma_user_mmap_entry_get` has taken the count, and the entry is not used afterwards.
    unsafe { bindings::rdma_user_mmap_entry_put(entry) };
    ret
}

/// Frees an entry that is neither in its context nor mapped any more.
///
/// # Safety
///
/// To be called by the core as `mmap_free`.
unsafe extern "C" fn free_range(entry: *mut bindings::rdma_user_mmap_entry) {
    // SAFETY: All entries are in `RangeEntry`s that `insert_range` gave away, and the core calls this when the
    // last count of this one is gone.
    drop(unsafe { KBox::from_raw(entry.cast::<RangeEntry>()) });
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
        // SAFETY: The entry is in the context, so it is valid; nobody else removes it, as the context is
        // about to go.
        let (end, removed) = unsafe {
            (
                (*entry).start_pgoff + (*entry).npages,
                (*entry).driver_removed,
            )
        };
        index = end;
        // One that was removed before waits for its mappings to go: removing it twice would drop its
        // count twice.
        if !removed {
            // SAFETY: The entry is in the context, and was not removed.
            unsafe { bindings::rdma_user_mmap_entry_remove(entry) };
        }
    }
}
