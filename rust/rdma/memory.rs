// SPDX-License-Identifier: GPL-2.0

//! Memory regions: of processes, of DMA buffers, registered by work request, on demand.

use super::ops::op_if;
use super::restrack::{fill_counts, fill_entry};
use super::{
    kind, Advice, AdvisedRange, Counts, Details, New, Object, ObjectRef, Ops, Pd, PdOps, Udata,
};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use core::mem::MaybeUninit;
use core::ptr;
use kernel::build_error;
use kernel::error::{from_result, VTABLE_DEFAULT_ERROR};
use kernel::prelude::*;

/// A memory region.
pub type Mr<D> = Object<kind::Mr, D>;
/// A counted reference to a memory region.
pub type MrRef<D> = ObjectRef<kind::Mr, D>;

/// Memory regions, which every device has.
#[vtable]
pub trait MrOps: PdOps {
    /// Driver's data of a memory region.
    type Mr: Send + Sync;

    /// Opcodes of the driver's own (`IB_WR_RESERVED1` and on) that kernel users post as an `ib_reg_wr`, as
    /// they do `IB_WR_REG_MR`: [`SendOp::Driver`](super::SendOp::Driver).
    const REG_MR_OPCODES: &'static [u32] = &[];

    /// Makes a region of all memory, by DMA address, for the kernel.
    fn get_dma_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        access: Access,
    ) -> Result<&'a Mr<Self>>;

    /// Registers memory of a process.
    fn reg_user_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &UserRegion,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>>;

    /// Registers part of a DMA buffer.
    fn reg_user_mr_dmabuf<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _region: &DmabufRegion,
    ) -> Result<&'a Mr<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Changes a region of a process in place: what is `Some` changes.
    ///
    /// Failing leaves the region as it was. The core sets address, length and protection domain
    /// of the region itself.
    fn rereg_user_mr(
        _mr: &Mr<Self>,
        _change: &RegionChange<'_, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a region, which is in domain `pd`.
    fn dereg_mr(mr: &Mr<Self>, pd: &Pd<Self>) -> Result;

    /// Tells details of a memory region to whoever lists them. May be called while it is destroyed.
    fn describe_mr(_mr: &Mr<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells counters of a memory region, likewise.
    fn count_mr(_mr: &Mr<Self>, _counts: &mut Counts<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}

impl<D: MrOps> Ops<D> {
    pub(super) const fn with_mrs(mut self) -> Self {
        const { check_opcodes(D::REG_MR_OPCODES) };
        self.raw.get_dma_mr = Some(get_dma_mr::<D>);
        self.raw.reg_user_mr = Some(reg_user_mr::<D>);
        self.raw.reg_user_mr_dmabuf = op_if!(D::HAS_REG_USER_MR_DMABUF, reg_user_mr_dmabuf::<D>);
        self.raw.rereg_user_mr = op_if!(D::HAS_REREG_USER_MR, rereg_user_mr::<D>);
        self.raw.dereg_mr = Some(dereg_mr::<D>);
        self.raw.fill_res_mr_entry = op_if!(D::HAS_DESCRIBE_MR, fill_res_mr::<D>);
        self.raw.fill_stat_mr_entry = op_if!(D::HAS_COUNT_MR, fill_stat_mr::<D>);
        self
    }
}

/// Opcodes of the core are requests of the core's form.
const fn check_opcodes(opcodes: &[u32]) {
    let mut index = 0;
    while index < opcodes.len() {
        assert!(opcodes[index] >= bindings::ib_wr_opcode_IB_WR_RESERVED1);
        assert!(opcodes[index] <= bindings::ib_wr_opcode_IB_WR_RESERVED10);
        index += 1;
    }
}

/// Lets the driver create a region, which the driver's side allocates.
///
/// # Safety
///
/// `pd` must be a protection domain of `D`; for `udata` see [`Udata::from_raw`].
pub(super) unsafe fn create_mr<D: MrOps>(
    pd: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
    create: impl for<'a> FnOnce(
        &Pd<D>,
        New<'a, kind::Mr, D>,
        Option<&Udata<'_, D>>,
    ) -> Result<&'a Mr<D>>,
) -> Result<*mut bindings::ib_mr> {
    let mr = KBox::into_raw(KBox::<Mr<D>>::new_uninit(GFP_KERNEL_ACCOUNT)?);
    let raw = mr.cast::<bindings::ib_mr>();
    // SAFETY: The memory was allocated just now, for an `Mr<D>`.
    unsafe { ptr::write_bytes(mr, 0, 1) };
    // SAFETY: The memory is ours, and of the core's part all zeroes are a value. Device and domain are
    // what the core will set them to; the caller vouches for `pd`, whose device does not change.
    unsafe {
        (*raw).device = (*pd).device;
        (*raw).pd = pd;
    }
    // SAFETY: The caller vouches that it is a domain of `D`, which stays until this returns.
    let pd = unsafe { Object::from_raw(pd) };
    // SAFETY: All of the memory but what was written of the core's part is zero, and nobody else has
    // it. The caller vouches for `udata`.
    let created = unsafe { Mr::create_with(raw, udata, |new, udata| create(pd, new, udata)) };
    if created.is_err() {
        // SAFETY: It came from `into_raw` above, and `create_with` has dropped what was
        // initialised in it.
        drop(unsafe { KBox::from_raw(mr) });
    }
    created.map(|()| raw)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn get_dma_mr<D: MrOps>(
    pd: *mut bindings::ib_pd,
    access: c_int,
) -> *mut bindings::ib_mr {
    let access = Access::from_raw(access as u32);
    // SAFETY: `__ib_alloc_pd` calls this, for the domain that `alloc_pd` has made for it just before.
    // A null `udata` is none.
    let mr = unsafe {
        create_mr(pd, ptr::null_mut(), |pd, new, _| {
            D::get_dma_mr(pd, new, access)
        })
    };
    mr.unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the user's part of the
/// command.
unsafe extern "C" fn reg_user_mr<D: MrOps>(
    pd: *mut bindings::ib_pd,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    if !dmah.is_null() {
        // DMA handles need an operation of their own to be made.
        return eopnotsupp().to_ptr();
    }
    let region = UserRegion {
        start,
        length,
        iova: virt_addr,
        access: Access::from_raw(access as u32),
    };
    // SAFETY: `alloc_pd` made the domain. The uverbs command holds its object until this returns, and a
    // caller of `ib_reg_user_mr` has it. `udata` is null or that of the command, which waits.
    let mr = unsafe {
        create_mr(pd, udata, |pd, new, udata| {
            D::reg_user_mr(pd, new, &region, udata)
        })
    };
    mr.unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn reg_user_mr_dmabuf<D: MrOps>(
    pd: *mut bindings::ib_pd,
    offset: u64,
    length: u64,
    virt_addr: u64,
    fd: c_int,
    access: c_int,
    dmah: *mut bindings::ib_dmah,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> *mut bindings::ib_mr {
    if !dmah.is_null() {
        return eopnotsupp().to_ptr();
    }
    let region = DmabufRegion {
        fd,
        offset,
        length,
        iova: virt_addr,
        access: Access::from_raw(access as u32),
    };
    // SAFETY: `alloc_pd` made the domain, and the uverbs method (`UVERBS_METHOD_REG_DMABUF_MR`,
    // `UVERBS_METHOD_REG_MR`) holds its object until this returns. A null `udata` is none.
    let mr = unsafe {
        create_mr(pd, ptr::null_mut(), |pd, mut new, _| {
            new.set_range(region.iova, region.length);
            D::reg_user_mr_dmabuf(pd, new, &region)
        })
    };
    mr.unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` with the user's part of the
/// command; `pd` must be a domain of `D`, the new one or the region's.
unsafe extern "C" fn rereg_user_mr<D: MrOps>(
    mr: *mut bindings::ib_mr,
    flags: c_int,
    start: u64,
    length: u64,
    virt_addr: u64,
    access: c_int,
    pd: *mut bindings::ib_pd,
    udata: *mut bindings::ib_udata,
) -> *mut bindings::ib_mr {
    let flags = flags as u32;
    let has = |flag: bindings::ib_mr_rereg_flags| flags & flag != 0;
    let access = Access::from_raw(access as u32);
    let result = (|| {
        if flags & !bindings::ib_mr_rereg_flags_IB_MR_REREG_SUPPORTED != 0 {
            return Err(eopnotsupp());
        }
        // SAFETY: `create_mr` made the region, and `ib_uverbs_rereg_mr` holds its object for writing:
        // nobody ends it before this returns.
        let mr = unsafe { Object::from_raw(mr) };
        // SAFETY: `alloc_pd` made the domain. Of a new one `ib_uverbs_rereg_mr` holds the object; the
        // one that the region is in counts it as a user.
        let pd = unsafe { Object::from_raw(pd) };
        // SAFETY: `udata` is that of the uverbs command, which waits for this.
        let udata = unsafe { Udata::<D>::from_raw(udata) };
        let change = RegionChange {
            memory: has(bindings::ib_mr_rereg_flags_IB_MR_REREG_TRANS).then_some(UserRegion {
                start,
                length,
                iova: virt_addr,
                access,
            }),
            pd: has(bindings::ib_mr_rereg_flags_IB_MR_REREG_PD).then_some(pd),
            access: has(bindings::ib_mr_rereg_flags_IB_MR_REREG_ACCESS).then_some(access),
        };
        D::rereg_user_mr(mr, &change, udata.as_ref())?;
        if let Some(udata) = udata {
            let _ = udata.finish();
        }
        Ok(())
    })();
    match result {
        // Null: the region is still the same object.
        Ok(()) => ptr::null_mut(),
        Err(err) => err.to_ptr(),
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn dereg_mr<D: MrOps>(
    mr: *mut bindings::ib_mr,
    _udata: *mut bindings::ib_udata,
) -> c_int {
    from_result(|| {
        // SAFETY: Who ends a region holds its object for writing, or is its only owner in the kernel: it
        // is not moved to another domain meanwhile. Its domain, which `alloc_pd` made, is there until
        // this has succeeded: it counts the region as its user, or the region is its own one
        // (`__internal_mr`), which `ib_dealloc_pd_user` ends before it has the domain freed.
        let pd = unsafe { Object::from_raw((*mr).pd) };
        // SAFETY: `create_mr` made the region. `ib_dereg_mr_user` does not touch it any more where this
        // succeeds, nor does `ib_dealloc_pd_user`; else it is as before.
        unsafe { Mr::destroy(mr, |mr| D::dereg_mr(mr, pd)) }?;
        // SAFETY: The memory came from `create_mr`, and nothing in it is initialised any more.
        drop(unsafe { KBox::from_raw(mr.cast::<MaybeUninit<Mr<D>>>()) });
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_res_mr<D: MrOps>(
    msg: *mut bindings::sk_buff,
    mr: *mut bindings::ib_mr,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which
    // `rdma_restrack_del` waits before `dereg_mr` is called; it is listed by `rdma_restrack_add`, after
    // `D` made it. `msg` is the message that `nldev` is filling.
    unsafe { fill_entry::<kind::Mr, D>(msg, mr, D::describe_mr) }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>` for a resource that it holds a
/// count of, while it fills `msg`.
unsafe extern "C" fn fill_stat_mr<D: MrOps>(
    msg: *mut bindings::sk_buff,
    mr: *mut bindings::ib_mr,
) -> c_int {
    // SAFETY: `nldev` has a count of the resource, by `rdma_restrack_get`, for which
    // `rdma_restrack_del` waits before `dereg_mr` is called; it is listed by `rdma_restrack_add`, after
    // `D` made it. `msg` is the message that `nldev` is filling.
    unsafe { fill_counts::<kind::Mr, D>(msg, mr, D::count_mr) }
}

/// Regions that kernel users register by work request (FRWR).
pub trait FrwrOps: MrOps {
    /// Makes a region of up to `pages` pages that is registered by work request.
    fn alloc_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        pages: u32,
    ) -> Result<&'a Mr<Self>>;

    /// The kernel starts to map a scatter list: forget the pages of a region made by `alloc_mr`.
    fn begin_mr_map(mr: &Mr<Self>);

    /// Adds a page, by DMA address, to the pages of a region made by `alloc_mr`. Failing ends the
    /// mapping with the pages there are.
    fn push_mr_page(mr: &Mr<Self>, addr: u64) -> Result;
}

impl<D: FrwrOps> Ops<D> {
    /// Offers regions that are registered by work request.
    pub const fn with_frwr(mut self) -> Self {
        self.raw.alloc_mr = Some(alloc_mr::<D>);
        self.raw.map_mr_sg = Some(map_mr_sg::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`.
unsafe extern "C" fn alloc_mr<D: FrwrOps>(
    pd: *mut bindings::ib_pd,
    mr_type: bindings::ib_mr_type,
    max_num_sg: u32,
) -> *mut bindings::ib_mr {
    if mr_type != bindings::ib_mr_type_IB_MR_TYPE_MEM_REG {
        return eopnotsupp().to_ptr();
    }
    // SAFETY: `alloc_pd` made the domain, and the caller of `ib_alloc_mr` has it. A null `udata` is
    // none.
    let mr = unsafe {
        create_mr(pd, ptr::null_mut(), |pd, new, _| {
            D::alloc_mr(pd, new, max_num_sg)
        })
    };
    mr.unwrap_or_else(Error::to_ptr)
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `sg` must be a list of
/// `sg_nents` mapped entries, and `sg_offset` null or valid for reads and writes.
unsafe extern "C" fn map_mr_sg<D: FrwrOps>(
    mr: *mut bindings::ib_mr,
    sg: *mut bindings::scatterlist,
    sg_nents: c_int,
    sg_offset: *mut c_uint,
) -> c_int {
    // SAFETY: `create_mr` made the region, and the caller of `ib_map_mr_sg` has it.
    D::begin_mr_map(unsafe { Object::from_raw(mr) });
    // SAFETY: List and offset are those of the caller of `ib_map_mr_sg`, who waits and maps a region by
    // one task at a time. `set_page` is called for this region only, before the function returns.
    unsafe { bindings::ib_sg_to_pages(mr, sg, sg_nents, sg_offset, Some(set_page::<D>)) }
}

/// # Safety
///
/// To be called by `ib_sg_to_pages` for the region that [`map_mr_sg`] gave it.
unsafe extern "C" fn set_page<D: FrwrOps>(mr: *mut bindings::ib_mr, addr: u64) -> c_int {
    from_result(|| {
        // SAFETY: `mr` is the region that `map_mr_sg` was called for, which has not returned.
        D::push_mr_page(unsafe { Object::from_raw(mr) }, addr)?;
        Ok(0)
    })
}

/// Regions whose pages need not be there (ODP); [`super::OdpRoot`] has the rest.
pub trait OdpOps: MrOps {
    /// A process says that it is going to use parts of on-demand regions. With `wait` the call
    /// returns when they are ready.
    fn advise_mr(pd: &Pd<Self>, advice: Advice, wait: bool, ranges: &[AdvisedRange]) -> Result;
}

impl<D: OdpOps> Ops<D> {
    /// Takes advice about on-demand regions.
    pub const fn with_odp(mut self) -> Self {
        self.raw.advise_mr = Some(advise_mr::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core through the table of a `Device<D>`; `ranges` must be `count`
/// entries.
unsafe extern "C" fn advise_mr<D: OdpOps>(
    pd: *mut bindings::ib_pd,
    advice: bindings::ib_uverbs_advise_mr_advice,
    flags: u32,
    ranges: *mut bindings::ib_sge,
    count: u32,
    _attrs: *mut bindings::uverbs_attr_bundle,
) -> c_int {
    let flush = bindings::ib_uverbs_advise_mr_flag_IB_UVERBS_ADVISE_MR_FLAG_FLUSH;
    from_result(|| {
        let advice = Advice::from_raw(advice).ok_or(eopnotsupp())?;
        let mut advised = KVVec::with_capacity(count as usize, GFP_KERNEL_ACCOUNT)?;
        for index in 0..count as usize {
            // SAFETY: The uverbs method (`UVERBS_METHOD_ADVISE_MR`), or the caller of `ib_advise_mr`, gives
            // `count` entries and keeps them until this returns; `index` is less.
            let range = unsafe { &*ranges.add(index) };
            advised.push(
                AdvisedRange {
                    address: range.addr,
                    length: range.length,
                    lkey: range.lkey,
                },
                GFP_KERNEL_ACCOUNT,
            )?;
        }
        // SAFETY: `alloc_pd` made the domain. The uverbs method holds its object until this returns, and
        // a caller of `ib_advise_mr` has it.
        let pd = unsafe { Object::from_raw(pd) };
        D::advise_mr(pd, advice, flags & flush != 0, &advised)?;
        Ok(0)
    })
}

c_flags! {
    /// What may be done to memory.
    pub struct Access(u32) {
        /// Local writes.
        LOCAL_WRITE = ib_access_flags_IB_ACCESS_LOCAL_WRITE,
        /// Remote writes.
        REMOTE_WRITE = ib_access_flags_IB_ACCESS_REMOTE_WRITE,
        /// Remote reads.
        REMOTE_READ = ib_access_flags_IB_ACCESS_REMOTE_READ,
        /// Remote atomics.
        REMOTE_ATOMIC = ib_access_flags_IB_ACCESS_REMOTE_ATOMIC,
        /// Binding of memory windows.
        MW_BIND = ib_access_flags_IB_ACCESS_MW_BIND,
        /// Addresses count from zero.
        ZERO_BASED = ib_access_flags_IB_ZERO_BASED,
        /// Making remote writes visible to all.
        FLUSH_GLOBAL = ib_access_flags_IB_ACCESS_FLUSH_GLOBAL,
        /// Making remote writes outlive the machine's power.
        FLUSH_PERSISTENT = ib_access_flags_IB_ACCESS_FLUSH_PERSISTENT,
        /// Pages need not be there.
        ON_DEMAND = ib_access_flags_IB_ACCESS_ON_DEMAND,
        /// Pages are huge.
        HUGETLB = ib_access_flags_IB_ACCESS_HUGETLB,
        /// Writes need not be in order.
        RELAXED_ORDERING = ib_access_flags_IB_ACCESS_RELAXED_ORDERING,
        /// All that the core has names for, or keeps for such.
        OF_CORE = ib_access_flags_IB_ACCESS_SUPPORTED,
    }
}

/// Memory of a process to be registered.
#[derive(Clone, Copy, Debug)]
pub struct UserRegion {
    /// Where it starts in the process.
    pub start: u64,
    /// How many bytes it is.
    pub length: u64,
    /// The address its first byte is to have in work requests.
    pub iova: u64,
    /// What may be done to it.
    pub access: Access,
}

/// Part of a DMA buffer to be registered.
#[derive(Clone, Copy, Debug)]
pub struct DmabufRegion {
    /// The buffer's file descriptor in the process.
    pub fd: i32,
    /// Where it starts in the buffer.
    pub offset: u64,
    /// How many bytes it is.
    pub length: u64,
    /// The address its first byte is to have in work requests.
    pub iova: u64,
    /// What may be done to it.
    pub access: Access,
}

/// What is to be changed of a region.
pub struct RegionChange<'a, D: MrOps> {
    /// Other memory: start, length and address, as in [`UserRegion`]. Its rights are those below,
    /// or what they were.
    pub memory: Option<UserRegion>,
    /// Another protection domain.
    pub pd: Option<&'a Pd<D>>,
    /// Other rights.
    pub access: Option<Access>,
}

impl<D: MrOps> New<'_, kind::Mr, D> {
    /// Tells the core the region's keys.
    pub fn set_keys(&mut self, lkey: u32, rkey: u32) {
        // SAFETY: The core is creating the region and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe {
            (*self.as_raw()).lkey = lkey;
            (*self.as_raw()).rkey = rkey;
        }
    }

    /// Tells the core which addresses the region has. It knows those of a process's memory without being
    /// told, but not those of a DMA buffer.
    pub(crate) fn set_range(&mut self, iova: u64, length: u64) {
        // SAFETY: The core is creating the region and shows it to nobody before the operation
        // returns, and only `New` leads to it.
        unsafe {
            (*self.as_raw()).iova = iova;
            (*self.as_raw()).length = length;
        }
    }
}

impl<D: MrOps> Object<kind::Mr, D> {
    // Which domain it is in is not to be asked: a process moves it to another one at any time, and
    // may end the one before.

    /// Its local key now. Kernel users of fast registration change the last byte.
    pub fn lkey(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).lkey).read_volatile() }
    }

    /// Its remote key now.
    pub fn rkey(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).rkey).read_volatile() }
    }

    /// The address of its first byte, as the kernel mapped it last.
    pub fn iova(&self) -> u64 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).iova).read_volatile() }
    }

    /// Its bytes, as the kernel mapped it last.
    pub fn length(&self) -> u64 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).length).read_volatile() }
    }

    /// Its page size, as the kernel mapped it last.
    pub fn page_size(&self) -> u32 {
        // SAFETY: `&self` is a region that is not freed; the core or a registration may change the
        // field meanwhile, hence the volatile read.
        unsafe { ptr::addr_of!((*self.as_raw()).page_size).read_volatile() }
    }
}
