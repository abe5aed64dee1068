// SPDX-License-Identifier: GPL-2.0

//! The table of operations the core calls, and what is between it and [`Driver`].
//!
//! Every function here is only called by the core, through the table of a `Device<D>`, whose data
//! is dropped, by `dealloc_driver`, when all operations have ended. The objects that it passes are
//! of that device, so that they were created by the functions here, as `Object`s of `D`. The core
//! counts who uses an object, and does not destroy it before that is nobody.

use super::udata::expect_none;
use super::*;
use crate::bindings;
use crate::kernel_ext::errno;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr;
use kernel::error::from_result;
use kernel::prelude::*;

/// The operations of a driver.
pub(super) struct Table<D: Driver>(PhantomData<D>);

/// `Some` of a function if the driver has the operation.
macro_rules! op_if {
    ($has:expr, $function:expr) => {
        if $has {
            Some($function)
        } else {
            None
        }
    };
}

impl<D: Driver> Table<D> {
    /// The table.
    pub(super) const OPS: bindings::ib_device_ops = {
        let mut ops: bindings::ib_device_ops = pin_init::zeroed();
        ops.driver_id = D::DRIVER_ID;
        ops.uverbs_abi_ver = D::ABI_VERSION;

        ops.query_device = Some(Self::query_device);
        ops.query_port = Some(Self::query_port);
        ops.get_port_immutable = Some(Self::get_port_immutable);
        ops.get_link_layer = Some(Self::get_link_layer);
        ops.query_pkey = op_if!(D::HAS_QUERY_PKEY, Self::query_pkey);
        ops.query_gid = op_if!(D::HAS_QUERY_GID, Self::query_gid);
        ops.add_gid = op_if!(D::HAS_ADD_GID, Self::add_gid);
        ops.del_gid = op_if!(D::HAS_DEL_GID, Self::del_gid);
        ops.get_dev_fw_str = op_if!(D::HAS_FIRMWARE_VERSION, Self::get_dev_fw_str);
        ops.alloc_hw_port_stats = op_if!(D::HAS_READ_COUNTERS, Self::alloc_hw_port_stats);
        ops.get_hw_stats = op_if!(D::HAS_READ_COUNTERS, Self::get_hw_stats);
        ops.fill_res_qp_entry = op_if!(D::HAS_DESCRIBE_QP, Self::fill_res_qp);
        ops.fill_res_cq_entry = op_if!(D::HAS_DESCRIBE_CQ, Self::fill_res_cq);
        ops.fill_res_mr_entry = op_if!(D::HAS_DESCRIBE_MR, Self::fill_res_mr);
        ops.fill_res_srq_entry = op_if!(D::HAS_DESCRIBE_SRQ, Self::fill_res_srq);
        ops.enable_driver = Some(Self::enable_driver);
        ops.dealloc_driver = Some(device::dealloc_driver::<D>);

        ops.alloc_ucontext = op_if!(D::HAS_ALLOC_UCONTEXT, Self::alloc_ucontext);
        ops.query_ucontext = op_if!(D::HAS_QUERY_UCONTEXT, Self::query_ucontext);
        ops.dealloc_ucontext = op_if!(D::HAS_ALLOC_UCONTEXT, Self::dealloc_ucontext);
        ops.mmap = op_if!(D::HAS_ALLOC_UCONTEXT, user::mmap);
        ops.mmap_free = op_if!(D::HAS_ALLOC_UCONTEXT, user::free_range);
        ops.disassociate_ucontext = op_if!(D::HAS_ALLOC_UCONTEXT, Self::disassociate_ucontext);

        ops.alloc_pd = Some(Self::alloc_pd);
        ops.dealloc_pd = Some(Self::dealloc_pd);

        ops.create_cq = Some(Self::create_cq);
        ops.create_user_cq = op_if!(D::HAS_CREATE_USER_CQ, Self::create_user_cq);
        ops.pre_destroy_cq = Some(Self::pre_destroy_cq);
        ops.destroy_cq = Some(Self::destroy_cq);
        ops.post_destroy_cq = Some(Self::post_destroy_cq);
        ops.poll_cq = Some(Self::poll_cq);
        ops.req_notify_cq = Some(Self::req_notify_cq);
        ops.modify_cq = op_if!(D::HAS_MODIFY_CQ, Self::modify_cq);

        ops.resize_user_cq = op_if!(D::HAS_RESIZE_USER_CQ, Self::resize_user_cq);

        ops.create_qp = Some(Self::create_qp);
        ops.modify_qp = Some(Self::modify_qp);
        ops.query_qp = op_if!(D::HAS_QUERY_QP, Self::query_qp);
        ops.destroy_qp = Some(Self::destroy_qp);
        ops.post_send = Some(Self::post_send);
        ops.post_recv = Some(Self::post_recv);
        ops.drain_sq = op_if!(D::HAS_DRAIN_SQ, Self::drain_sq);
        ops.drain_rq = op_if!(D::HAS_DRAIN_RQ, Self::drain_rq);

        ops.attach_mcast = op_if!(D::HAS_ATTACH_MCAST, Self::attach_mcast);
        ops.detach_mcast = op_if!(D::HAS_DETACH_MCAST, Self::detach_mcast);

        ops.get_dma_mr = Some(Self::get_dma_mr);
        ops.reg_user_mr = Some(Self::reg_user_mr);
        ops.reg_user_mr_dmabuf = op_if!(D::HAS_REG_USER_MR_DMABUF, Self::reg_user_mr_dmabuf);
        ops.dereg_mr = Some(Self::dereg_mr);
        ops.alloc_mr = op_if!(D::HAS_ALLOC_MR, Self::alloc_mr);
        ops.advise_mr = op_if!(D::HAS_ADVISE_MR, Self::advise_mr);
        ops.fill_stat_mr_entry = op_if!(D::HAS_COUNT_MR, Self::fill_stat_mr);
        ops.rereg_user_mr = op_if!(D::HAS_REREG_USER_MR, Self::rereg_user_mr);
        ops.map_mr_sg = op_if!(D::HAS_PUSH_MR_PAGE, Self::map_mr_sg);
        ops.alloc_mw = op_if!(D::HAS_ALLOC_MW, Self::alloc_mw);
        ops.dealloc_mw = op_if!(D::HAS_DEALLOC_MW, Self::dealloc_mw);

        ops.alloc_dm = op_if!(D::HAS_ALLOC_DM, Self::alloc_dm);
        ops.dealloc_dm = op_if!(D::HAS_DEALLOC_DM, Self::dealloc_dm);
        ops.reg_dm_mr = op_if!(D::HAS_REG_DM_MR, Self::reg_dm_mr);

        ops.create_ah = op_if!(D::HAS_CREATE_AH, Self::create_ah);
        ops.create_user_ah = op_if!(D::HAS_CREATE_AH, Self::create_ah);
        ops.destroy_ah = op_if!(D::HAS_DESTROY_AH, Self::destroy_ah);

        ops.create_srq = op_if!(D::HAS_CREATE_SRQ, Self::create_srq);
        ops.modify_srq = op_if!(D::HAS_MODIFY_SRQ_LIMIT, Self::modify_srq);
        ops.query_srq = op_if!(D::HAS_QUERY_SRQ, Self::query_srq);
        ops.destroy_srq = op_if!(D::HAS_DESTROY_SRQ, Self::destroy_srq);
        ops.post_srq_recv = op_if!(D::HAS_POST_SRQ_RECV, Self::post_srq_recv);

        ops.alloc_xrcd = op_if!(D::HAS_ALLOC_XRCD, Self::alloc_xrcd);
        ops.dealloc_xrcd = op_if!(D::HAS_DEALLOC_XRCD, Self::dealloc_xrcd);

        ops.size_ib_ucontext = Object::<kind::Ucontext, D>::SIZE;
        ops.size_ib_pd = Object::<kind::Pd, D>::SIZE;
        ops.size_ib_cq = Object::<kind::Cq, D>::SIZE;
        ops.size_ib_qp = Object::<kind::Qp, D>::SIZE;
        ops.size_ib_ah = Object::<kind::Ah, D>::SIZE;
        ops.size_ib_srq = Object::<kind::Srq, D>::SIZE;
        ops.size_ib_mw = Object::<kind::Mw, D>::SIZE;
        ops.size_ib_xrcd = Object::<kind::Xrcd, D>::SIZE;
        ops
    };

    /// Lets the driver create an object in memory of the core.
    ///
    /// # Safety
    ///
    /// As for [`Object::prepare`].
    pub(super) unsafe fn create<K: Kind<D>>(
        raw: *mut K::Raw,
        create: impl for<'a> FnOnce(New<'a, K, D>) -> Result<&'a Object<K, D>>,
    ) -> Result {
        // SAFETY: The caller vouches for zeroed memory of the size of an `Object<K, D>`.
        let new = unsafe { Object::<K, D>::prepare(raw) };
        let result = match create(new) {
            // A driver could only return another object by keeping one from before.
            Ok(object) if ptr::eq(object.as_raw(), raw) => Ok(()),
            Ok(_) => Err(EINVAL),
            Err(err) => Err(err),
        };
        if result.is_err() {
            // SAFETY: Prepared above; the driver failed, so that nobody will use it.
            unsafe { Object::<K, D>::finish(raw) };
        }
        result
    }

    /// As [`Table::create`], with the user's part of the request.
    ///
    /// # Safety
    ///
    /// As for [`Object::prepare`] and [`Udata::from_raw`].
    unsafe fn create_with<K: Kind<D>>(
        raw: *mut K::Raw,
        udata: *mut bindings::ib_udata,
        create: impl for<'a> FnOnce(New<'a, K, D>, Option<&Udata<'_, D>>) -> Result<&'a Object<K, D>>,
    ) -> Result {
        // SAFETY: The caller vouches that it is null or of a command that lasts until this returns.
        let udata = unsafe { Udata::<D>::from_raw(udata) };
        // SAFETY: The caller vouches for zeroed memory of the size of an `Object<K, D>`.
        unsafe { Self::create::<K>(raw, |new| create(new, udata.as_ref())) }?;
        // The response buffer was zeroed by the driver's response, or has to be now. Failing here
        // would leak the object, and an unwritable buffer is the process's own loss.
        if let Some(udata) = udata {
            let _ = udata.finish();
        }
        Ok(())
    }

    /// Lets the driver create a region, which the driver's side allocates.
    ///
    /// # Safety
    ///
    /// `pd` must be a protection domain of `D`; for `udata` see [`Udata::from_raw`].
    unsafe fn create_mr(
        pd: *mut bindings::ib_pd,
        udata: *mut bindings::ib_udata,
        create: impl for<'a> FnOnce(
            &Pd<D>,
            New<'a, kind::Mr, D>,
            Option<&Udata<'_, D>>,
        ) -> Result<&'a Mr<D>>,
    ) -> *mut bindings::ib_mr {
        let result = (|| {
            let mr = KBox::<Mr<D>>::new_uninit(GFP_KERNEL)?;
            let mr = KBox::into_raw(mr);
            let raw = mr.cast::<bindings::ib_mr>();
            // SAFETY: The memory is ours; the core's part of it is valid when zeroed, and the
            // device and protection domain are what the core will set them to.
            let result = unsafe {
                ptr::write_bytes(mr, 0, 1);
                (*raw).device = (*pd).device;
                (*raw).pd = pd;
                let pd = Object::<kind::Pd, D>::from_raw(pd);
                Self::create_with::<kind::Mr>(raw, udata, |new, udata| create(pd, new, udata))
            };
            if let Err(err) = result {
                // SAFETY: It came from `into_raw` above, and `create_with` has dropped what was
                // initialised in it.
                drop(unsafe { KBox::from_raw(mr) });
                return Err(err);
            }
            Ok(raw)
        })();
        match result {
            Ok(raw) => raw,
            Err(err) => err.to_errno() as isize as *mut bindings::ib_mr,
        }
    }

    // ---- The device and its ports ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
    /// writes.
    unsafe extern "C" fn query_device(
        dev: *mut bindings::ib_device,
        attr: *mut bindings::ib_device_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. `attr` is the caller's, who waits.
            // `udata` is null or that of the command, which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::query_device(Device::from_raw(dev))?.fill(&mut *attr);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
    /// writes.
    unsafe extern "C" fn query_port(
        dev: *mut bindings::ib_device,
        port: u32,
        attr: *mut bindings::ib_port_attr,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. `attr` is the caller's, who has cleared
            // it and waits.
            unsafe { D::query_port(Device::from_raw(dev), port)?.fill(&mut *attr) };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `immutable` must be valid for
    /// writes.
    unsafe extern "C" fn get_port_immutable(
        dev: *mut bindings::ib_device,
        port: u32,
        immutable: *mut bindings::ib_port_immutable,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. `immutable` is part of the core's data of
            // the port, which nobody else reads before this returns.
            let (values, raw) = unsafe {
                (
                    D::port_immutable(Device::from_raw(dev), port)?,
                    &mut *immutable,
                )
            };
            raw.pkey_tbl_len = values.pkey_tbl_len as c_int;
            raw.gid_tbl_len = values.gid_tbl_len as c_int;
            raw.core_cap_flags = values.core_cap_flags;
            raw.max_mad_size = values.max_mad_size;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn get_link_layer(
        dev: *mut bindings::ib_device,
        port: u32,
    ) -> bindings::rdma_link_layer {
        // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in `dealloc_driver`,
        // after the last operation.
        unsafe { D::link_layer(Device::from_raw(dev), port) }.as_raw()
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `pkey` must be valid for
    /// writes.
    unsafe extern "C" fn query_pkey(
        dev: *mut bindings::ib_device,
        port: u32,
        index: u16,
        pkey: *mut u16,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. `pkey` is the caller's, who waits.
            unsafe { *pkey = D::query_pkey(Device::from_raw(dev), port, index)? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `gid` must be valid for writes.
    unsafe extern "C" fn query_gid(
        dev: *mut bindings::ib_device,
        port: u32,
        index: c_int,
        gid: *mut bindings::ib_gid,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. `gid` is the caller's, who waits; a GID
            // is sixteen bytes in any view.
            unsafe {
                let value = D::query_gid(Device::from_raw(dev), port, index as u32)?;
                gid.cast::<[u8; 16]>().write_unaligned(value.0);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with an entry that it is adding.
    unsafe extern "C" fn add_gid(
        attr: *const bindings::ib_gid_attr,
        _context: *mut *mut c_void,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core holds the lock of the GID table: the entry is its own, and constant
            // until this returns, with a count of its interface. Its device has this table, so it is
            // a `Device<D>`.
            unsafe {
                let dev = Device::<D>::from_raw((*attr).device);
                // Who adds it may have asked which interface is the port's before that changed.
                if !dev.takes_gids_of((*attr).ndev) {
                    return Err(ENODEV);
                }
                D::add_gid(dev, GidAttr::from_raw(attr))?;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with an entry that `add_gid` was
    /// called with.
    unsafe extern "C" fn del_gid(
        attr: *const bindings::ib_gid_attr,
        _context: *mut *mut c_void,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core holds the lock of the GID table and a count of the entry, which is
            // constant until this returns. Its device has this table, so it is a `Device<D>`.
            unsafe { D::del_gid(Device::from_raw((*attr).device), GidAttr::from_raw(attr))? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `text` must have room for
    /// `IB_FW_VERSION_NAME_MAX` bytes.
    unsafe extern "C" fn get_dev_fw_str(dev: *mut bindings::ib_device, text: *mut c_char) {
        // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in `dealloc_driver`,
        // after the last operation. The helper writes `IB_FW_VERSION_NAME_MAX` bytes at the most,
        // which is what the core gives.
        unsafe {
            let (major, minor, patch) = D::firmware_version(Device::from_raw(dev));
            bindings::rdma_format_version(text, major, minor, patch);
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn alloc_hw_port_stats(
        dev: *mut bindings::ib_device,
        _port: u32,
    ) -> *mut bindings::rdma_hw_stats {
        // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in `dealloc_driver`,
        // after the last operation.
        unsafe { Device::<D>::from_raw(dev) }
            .counters()
            .alloc_stats()
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with what `alloc_hw_port_stats`
    /// returned.
    unsafe extern "C" fn get_hw_stats(
        dev: *mut bindings::ib_device,
        stats: *mut bindings::rdma_hw_stats,
        port: u32,
        _index: c_int,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dev` has this table, so it is a `Device<D>`; its data goes in
            // `dealloc_driver`, after the last operation. Nobody else uses the values until this
            // returns: the core holds the lock of `stats`, or has just made them and shows them to
            // nobody yet.
            let (dev, values) = unsafe { (Device::from_raw(dev), counters::values(stats)) };
            let read = D::read_counters(dev, port, values);
            // SAFETY: The core keeps `stats` until this returns, and writes the time only after
            // that, with the lock held or before anybody else has it.
            let is_first = unsafe { (*stats).timestamp } == 0;
            if read.is_err() && is_first {
                // The core reads them once while it registers the device, and leaks them if that
                // fails. They are zero until somebody asks.
                values.fill(0);
            } else {
                read?;
            }
            Ok(values.len() as c_int)
        })
    }

    /// Lets the driver describe an object that is listed. The core keeps its memory meanwhile, but
    /// the driver may be destroying it.
    ///
    /// # Safety
    ///
    /// As for [`Object::try_ref`] and [`Details::write`].
    unsafe fn describe<K: Kind<D>>(
        msg: *mut bindings::sk_buff,
        raw: *mut K::Raw,
        describe: fn(&Object<K, D>, &mut Details<'_>) -> Result,
    ) -> c_int {
        // SAFETY: The caller vouches that the object was created and that its memory stays.
        let Some(object) = (unsafe { Object::<K, D>::try_ref(raw) }) else {
            return 0;
        };
        from_result(|| {
            // SAFETY: The caller vouches that the core is filling the message.
            unsafe { Details::write(msg, |details| describe(&object, details)) }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a resource that it holds a
    /// count of, while it fills `msg`.
    unsafe extern "C" fn fill_res_qp(
        msg: *mut bindings::sk_buff,
        qp: *mut bindings::ib_qp,
    ) -> c_int {
        // SAFETY: The core holds a count of the resource, so that the memory of `qp` stays; it is
        // listed only after it was made. `msg` is the message that the core is filling.
        unsafe { Self::describe::<kind::Qp>(msg, qp, D::describe_qp) }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a resource that it holds a
    /// count of, while it fills `msg`.
    unsafe extern "C" fn fill_res_cq(
        msg: *mut bindings::sk_buff,
        cq: *mut bindings::ib_cq,
    ) -> c_int {
        // SAFETY: The core holds a count of the resource, so that the memory of `cq` stays; it is
        // listed only after it was made. `msg` is the message that the core is filling.
        unsafe { Self::describe::<kind::Cq>(msg, cq, D::describe_cq) }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a resource that it holds a
    /// count of, while it fills `msg`.
    unsafe extern "C" fn fill_res_mr(
        msg: *mut bindings::sk_buff,
        mr: *mut bindings::ib_mr,
    ) -> c_int {
        // SAFETY: The core holds a count of the resource, so that the memory of `mr` stays; it is
        // listed only after it was made. `msg` is the message that the core is filling.
        unsafe { Self::describe::<kind::Mr>(msg, mr, D::describe_mr) }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a resource that it holds a
    /// count of, while it fills `msg`.
    unsafe extern "C" fn fill_stat_mr(
        msg: *mut bindings::sk_buff,
        mr: *mut bindings::ib_mr,
    ) -> c_int {
        // SAFETY: The core holds a count of the resource, so that the memory of `mr` stays; it is
        // listed only after the region was made.
        let Some(mr) = (unsafe { Object::<kind::Mr, D>::try_ref(mr) }) else {
            return 0;
        };
        from_result(|| {
            // SAFETY: `msg` is the message that the core is filling, and this thread's alone.
            unsafe { Counts::write(msg, |counts| D::count_mr(&mr, counts)) }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a resource that it holds a
    /// count of, while it fills `msg`.
    unsafe extern "C" fn fill_res_srq(
        msg: *mut bindings::sk_buff,
        srq: *mut bindings::ib_srq,
    ) -> c_int {
        // SAFETY: The core holds a count of the resource, so that the memory of `srq` stays; it is
        // listed only after it was made. `msg` is the message that the core is filling.
        unsafe { Self::describe::<kind::Srq>(msg, srq, D::describe_srq) }
    }

    /// Called when the device is registered, and each time it has come to another network
    /// namespace.
    ///
    /// # Safety
    ///
    /// `dev` must be a `Device<D>` that is being enabled.
    unsafe extern "C" fn enable_driver(dev: *mut bindings::ib_device) -> c_int {
        // SAFETY: The device has this table, so it is a `Device<D>`, and the core enables it after
        // `Unregistered::new` has initialised it.
        let dev = unsafe { Device::<D>::from_raw(dev) };
        if dev.beside().is_some() {
            dev.follow_namespace();
        }
        0
    }

    // ---- User contexts ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a context that it has just
    /// allocated.
    unsafe extern "C" fn alloc_ucontext(
        ctx: *mut bindings::ib_ucontext,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `ctx` for this, zeroed and of `size_ib_ucontext` bytes,
            // set its device, and shows it to nobody before this returns. Its device is a
            // `Device<D>`, having this table. `udata` is null or that of the command, which lasts
            // until this returns. Where this fails nobody can have mapped a range, and the core only
            // frees the context.
            unsafe {
                let dev = Device::from_raw((*ctx).device);
                let result = Self::create_with::<kind::Ucontext>(ctx, udata, |new, udata| {
                    D::alloc_ucontext(dev, new, udata.ok_or(EINVAL)?)
                });
                if result.is_err() {
                    user::remove_ranges(ctx);
                    bindings::rdma_forget_task(ctx);
                }
                result?;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with the attributes of a query.
    unsafe extern "C" fn query_ucontext(
        ctx: *mut bindings::ib_ucontext,
        attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `ctx` was made by `alloc_ucontext`, and the core destroys it only when no
            // other call for it is under way. `attrs` are those of the query, which lasts until
            // this returns.
            unsafe {
                let response = ContextResponse::new(attrs);
                D::query_ucontext(Object::from_raw(ctx), &response)?;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dealloc_ucontext(ctx: *mut bindings::ib_ucontext) {
        // SAFETY: `ctx` was made by `alloc_ucontext`; all its objects are gone, and
        // the core frees it without another call.
        unsafe {
            D::dealloc_ucontext(Object::from_raw(ctx));
            user::remove_ranges(ctx);
            Object::<kind::Ucontext, D>::finish(ctx);
        }
    }

    /// Being there tells the core that mappings may be revoked, which it does by itself.
    ///
    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn disassociate_ucontext(_ctx: *mut bindings::ib_ucontext) {}

    // ---- Protection domains ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a domain that it has just
    /// allocated.
    unsafe extern "C" fn alloc_pd(
        pd: *mut bindings::ib_pd,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `pd` for this, zeroed and of `size_ib_pd` bytes, set its
            // device, and shows it to nobody before this returns. The device is a `Device<D>`,
            // having this table. `udata` is null or that of the command, which lasts until this
            // returns.
            unsafe {
                let dev = Device::from_raw((*pd).device);
                Self::create_with::<kind::Pd>(pd, udata, |new, udata| D::alloc_pd(dev, new, udata))
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dealloc_pd(
        pd: *mut bindings::ib_pd,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `pd` was made by `alloc_pd`, has no users left, and is freed by the core
            // without another call when this succeeds. `udata` is null or that of the command,
            // which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::dealloc_pd(Object::from_raw(pd))?;
                Object::<kind::Pd, D>::finish(pd);
            }
            Ok(0)
        })
    }

    // ---- Completion queues ----

    /// # Safety
    ///
    /// `attr` must be valid for reads.
    unsafe fn cq_init_attr(attr: *const bindings::ib_cq_init_attr) -> CqInitAttr {
        // SAFETY: The caller vouches that the attributes can be read.
        unsafe {
            CqInitAttr {
                entries: (*attr).cqe,
                comp_vector: (*attr).comp_vector,
                flags: (*attr).flags,
            }
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a queue that it has just
    /// allocated; `attr` must be valid for reads.
    unsafe extern "C" fn create_cq(
        cq: *mut bindings::ib_cq,
        attr: *const bindings::ib_cq_init_attr,
        _attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `cq` for this, zeroed and of `size_ib_cq` bytes, set its
            // device, and shows it to nobody before this returns. The device is a `Device<D>`,
            // having this table. `attr` is the caller's, who waits.
            unsafe {
                let dev = Device::from_raw((*cq).device);
                let attr = Self::cq_init_attr(attr);
                Self::create::<kind::Cq>(cq, |new| D::create_cq(dev, new, &attr))
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a queue that it has just
    /// allocated, with the attributes of the command; `attr` must be valid for reads.
    unsafe extern "C" fn create_user_cq(
        cq: *mut bindings::ib_cq,
        attr: *const bindings::ib_cq_init_attr,
        attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `cq` for this, zeroed and of `size_ib_cq` bytes, set its
            // device, and shows it to nobody before this returns. The device is a `Device<D>`,
            // having this table. `attr` is the caller's, who waits; `attrs` are those of the
            // command, which lasts until this returns.
            unsafe {
                let dev = Device::from_raw((*cq).device);
                let attr = Self::cq_init_attr(attr);
                let udata = bindings::rdma_driver_udata(attrs);
                Self::create_with::<kind::Cq>(cq, udata, |new, udata| {
                    D::create_user_cq(dev, new, &attr, udata.ok_or(EINVAL)?)
                })
            }?;
            Ok(0)
        })
    }

    /// Makes sure that the consumer's handler does not run any more, and will not: the core takes
    /// away what the handler needs next.
    ///
    /// # Safety
    ///
    /// `cq` must be a completion queue that `D` made and that nobody uses any more.
    unsafe fn silence_cq(cq: *mut bindings::ib_cq) -> Result {
        // SAFETY: `D` made the queue, and it is ended only after this.
        D::destroy_cq(unsafe { Object::from_raw(cq) })?;
        // SAFETY: `D` made the queue, and it is ended only after this. Only events take references,
        // which the driver found by its tables; the queue is in none of them any more.
        unsafe { Object::<kind::Cq, D>::quiesce(cq) };
        Ok(())
    }

    /// # Safety
    ///
    /// To be called by the core for a completion queue of the kernel, before it cancels the work
    /// that the handler of the queue starts.
    unsafe extern "C" fn pre_destroy_cq(cq: *mut bindings::ib_cq) -> c_int {
        from_result(|| {
            // SAFETY: The core ends a queue only when its user count is zero.
            unsafe { Self::silence_cq(cq)? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core for a completion queue of the kernel, after `pre_destroy_cq`.
    unsafe extern "C" fn post_destroy_cq(cq: *mut bindings::ib_cq) {
        // SAFETY: The driver made the queue; the core frees it next, and does not use it.
        unsafe { Object::<kind::Cq, D>::finish(cq) };
    }

    /// # Safety
    ///
    /// To be called by the core for a completion queue that `D` made: one of a process, or of a
    /// kernel user that has a handler of its own.
    unsafe extern "C" fn destroy_cq(
        cq: *mut bindings::ib_cq,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core ends a queue only when its user count is zero, and frees it after
            // this. `udata` is null or that of the request.
            unsafe {
                expect_none::<D>(udata)?;
                Self::silence_cq(cq)?;
                Object::<kind::Cq, D>::finish(cq);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `wc` must have room for
    /// `entries` completions.
    unsafe extern "C" fn poll_cq(
        cq: *mut bindings::ib_cq,
        entries: c_int,
        wc: *mut bindings::ib_wc,
    ) -> c_int {
        // SAFETY: `cq` was made by `create_cq`, and the core destroys it only when no other call
        // for it is under way. The consumer gives room for `entries` completions at `wc`, and
        // waits.
        let (cq, mut completions) = unsafe {
            (
                Object::from_raw(cq),
                Completions::new(wc, entries.max(0) as usize),
            )
        };
        match D::poll_cq(cq, &mut completions) {
            // What was taken off the queue has to be told even if the next one failed.
            Err(err) if completions.is_empty() => err.to_errno(),
            _ => completions.len() as c_int,
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn req_notify_cq(
        cq: *mut bindings::ib_cq,
        flags: bindings::ib_cq_notify_flags,
    ) -> c_int {
        from_result(|| {
            let notify = Notify::from_raw(flags);
            // SAFETY: `cq` was made by `create_cq`, and the core destroys it only when no other
            // call for it is under way.
            let missed = unsafe { D::req_notify_cq(Object::from_raw(cq), notify)? };
            Ok(c_int::from(missed && notify.report_missed))
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn modify_cq(cq: *mut bindings::ib_cq, count: u16, period: u16) -> c_int {
        from_result(|| {
            // SAFETY: `cq` was made by `create_cq`, and the core destroys it only when no other
            // call for it is under way.
            unsafe { D::modify_cq(Object::from_raw(cq), count, period)? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with the user's part of the
    /// command.
    unsafe extern "C" fn resize_user_cq(
        cq: *mut bindings::ib_cq,
        entries: c_uint,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `udata` is null or that of the command, which lasts until this returns.
            let udata = unsafe { Udata::<D>::from_raw(udata) }.ok_or(EINVAL)?;
            // SAFETY: `cq` was made by `create_user_cq`, and the command holds its object for
            // reading: nobody ends it before this returns.
            unsafe { D::resize_user_cq(Object::from_raw(cq), entries, &udata)? };
            let _ = udata.finish();
            Ok(0)
        })
    }

    // ---- Queue pairs ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a queue pair that it has
    /// just allocated; `attr` must be valid for reads and writes.
    unsafe extern "C" fn create_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_init_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `qp` for this, zeroed and of `size_ib_qp` bytes, set its
            // device, and shows it to nobody before this returns. The device is a `Device<D>`,
            // having this table. `attr` is the caller's, who waits. `udata` is null or that of the
            // command, which lasts until this returns.
            unsafe {
                let dev = Device::from_raw((*qp).device);
                let mut attr = QpInitAttr::new(&mut *attr, qp);
                Self::create_with::<kind::Qp>(qp, udata, |new, udata| {
                    D::create_qp(dev, new, &mut attr, udata)
                })
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
    unsafe extern "C" fn modify_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        mask: c_int,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other
            // call for it is under way. `attr` is the caller's, who waits. `udata` is null or that
            // of the command, which lasts until this returns.
            let (qp, attr, udata) = unsafe {
                (
                    Object::from_raw(qp),
                    QpAttr::new(&*attr, mask as u32),
                    Udata::<D>::from_raw(udata),
                )
            };
            D::modify_qp(qp, &attr, udata.as_ref())?;
            if let Some(udata) = udata {
                udata.finish()?;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` and `init_attr` must be
    /// valid for writes.
    unsafe extern "C" fn query_qp(
        qp: *mut bindings::ib_qp,
        attr: *mut bindings::ib_qp_attr,
        _mask: c_int,
        init_attr: *mut bindings::ib_qp_init_attr,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other
            // call for it is under way. What is copied was set when it was made. `attr` and
            // `init_attr` are the caller's, who waits.
            unsafe {
                (*init_attr).qp_type = (*qp).qp_type;
                (*init_attr).send_cq = (*qp).send_cq;
                (*init_attr).recv_cq = (*qp).recv_cq;
                (*init_attr).srq = (*qp).srq;
                (*init_attr).qp_context = (*qp).qp_context;
                let mut query = QpQuery::new(&mut *attr, &mut *init_attr);
                D::query_qp(Object::from_raw(qp), &mut query)?;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn destroy_qp(
        qp: *mut bindings::ib_qp,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `qp` was made by `create_qp`, has no users left, and is freed by the core
            // without another call when this succeeds. `udata` is null or that of the command,
            // which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::destroy_qp(Object::from_raw(qp))?;
                Object::<kind::Qp, D>::finish(qp);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with a list of requests;
    /// `bad_wr` must be valid for writes.
    unsafe extern "C" fn post_send(
        qp: *mut bindings::ib_qp,
        wr: *const bindings::ib_send_wr,
        bad_wr: *mut *const bindings::ib_send_wr,
    ) -> c_int {
        // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other call
        // for it is under way. The consumer keeps the list, and what it points to, until this
        // returns; requests of a datagram queue pair are `ib_ud_wr`.
        let (qp, mut list) = unsafe { (Object::from_raw(qp), SendList::new(qp, wr)) };
        match D::post_send(qp, &mut list) {
            Ok(()) => 0,
            Err(err) => {
                // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_send`.
                unsafe { *bad_wr = list.current() };
                err.to_errno()
            }
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with a list of requests;
    /// `bad_wr` must be valid for writes.
    unsafe extern "C" fn post_recv(
        qp: *mut bindings::ib_qp,
        wr: *const bindings::ib_recv_wr,
        bad_wr: *mut *const bindings::ib_recv_wr,
    ) -> c_int {
        // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other call
        // for it is under way. The consumer keeps the list until this returns.
        let (qp, mut list) = unsafe { (Object::from_raw(qp), RecvList::new(wr)) };
        match D::post_recv(qp, &mut list) {
            Ok(()) => 0,
            Err(err) => {
                // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_recv`.
                unsafe { *bad_wr = list.current() };
                err.to_errno()
            }
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn drain_sq(qp: *mut bindings::ib_qp) {
        // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other call
        // for it is under way.
        D::drain_sq(unsafe { Object::from_raw(qp) })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn drain_rq(qp: *mut bindings::ib_qp) {
        // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other call
        // for it is under way.
        D::drain_rq(unsafe { Object::from_raw(qp) })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `gid` must be valid for reads.
    unsafe extern "C" fn attach_mcast(
        qp: *mut bindings::ib_qp,
        gid: *mut bindings::ib_gid,
        _lid: u16,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other
            // call for it is under way. `gid` is the caller's, who waits.
            unsafe { D::attach_mcast(Object::from_raw(qp), Gid::from_raw(gid))? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `gid` must be valid for reads.
    unsafe extern "C" fn detach_mcast(
        qp: *mut bindings::ib_qp,
        gid: *mut bindings::ib_gid,
        _lid: u16,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `qp` was made by `create_qp`, and the core destroys it only when no other
            // call for it is under way. `gid` is the caller's, who waits.
            unsafe { D::detach_mcast(Object::from_raw(qp), Gid::from_raw(gid))? };
            Ok(0)
        })
    }

    // ---- Memory ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn get_dma_mr(
        pd: *mut bindings::ib_pd,
        access: c_int,
    ) -> *mut bindings::ib_mr {
        let access = Access::from_raw(access as u32);
        // SAFETY: `pd` was made by `alloc_pd`, and the core destroys it only when no other call for
        // it is under way. There is no command, and no `udata`.
        unsafe {
            Self::create_mr(pd, ptr::null_mut(), |pd, new, _| {
                D::get_dma_mr(pd, new, access)
            })
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with the user's part of the
    /// command.
    unsafe extern "C" fn reg_user_mr(
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
            let err = crate::kernel_ext::errno::eopnotsupp();
            return err.to_errno() as isize as *mut bindings::ib_mr;
        }
        let region = UserRegion {
            start,
            length,
            iova: virt_addr,
            access: Access::from_raw(access as u32),
        };
        // SAFETY: `pd` was made by `alloc_pd`, and the core destroys it only when no other call for
        // it is under way. `udata` is null or that of the command, which lasts until this returns.
        unsafe {
            Self::create_mr(pd, udata, |pd, new, udata| {
                D::reg_user_mr(pd, new, &region, udata)
            })
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn reg_user_mr_dmabuf(
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
            let err = crate::kernel_ext::errno::eopnotsupp();
            return err.to_errno() as isize as *mut bindings::ib_mr;
        }
        let region = DmabufRegion {
            fd,
            offset,
            length,
            iova: virt_addr,
            access: Access::from_raw(access as u32),
        };
        // SAFETY: `pd` was made by `alloc_pd`, and the core destroys it only when no other call for
        // it is under way. A null `udata` is none.
        unsafe {
            Self::create_mr(pd, ptr::null_mut(), |pd, mut new, _| {
                new.set_range(region.iova, region.length);
                D::reg_user_mr_dmabuf(pd, new, &region)
            })
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dereg_mr(
        mr: *mut bindings::ib_mr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `mr` was made by `create_mr`, has no users left, and the core does not touch
            // it any more when this succeeds. Who ends a region holds its object for writing, or is
            // its only owner in the kernel: it is not moved to another domain meanwhile. `mr->pd`, a
            // domain of `D`, is there until this has succeeded: the core counts the region as its
            // user, or it is the domain's own one (`__internal_mr`), which `ib_dealloc_pd_user` ends
            // before it has the domain freed.
            // `udata` is null or that of the command, which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::dereg_mr(Object::from_raw(mr), Object::from_raw((*mr).pd))?;
                Object::<kind::Mr, D>::finish(mr);
            }
            // SAFETY: The memory came from `create_mr`, and nothing in it is initialised any more.
            drop(unsafe { KBox::from_raw(mr.cast::<MaybeUninit<Mr<D>>>()) });
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn alloc_mr(
        pd: *mut bindings::ib_pd,
        mr_type: bindings::ib_mr_type,
        max_num_sg: u32,
    ) -> *mut bindings::ib_mr {
        if mr_type != bindings::ib_mr_type_IB_MR_TYPE_MEM_REG {
            let err = crate::kernel_ext::errno::eopnotsupp();
            return err.to_errno() as isize as *mut bindings::ib_mr;
        }
        // SAFETY: `pd` was made by `alloc_pd`, and the core destroys it only when no other call for
        // it is under way. A null `udata` is none.
        unsafe {
            Self::create_mr(pd, ptr::null_mut(), |pd, new, _| {
                D::alloc_mr(pd, new, max_num_sg)
            })
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `sg` must be a list of
    /// `sg_nents` mapped entries, and `sg_offset` null or valid for reads and writes.
    unsafe extern "C" fn map_mr_sg(
        mr: *mut bindings::ib_mr,
        sg: *mut bindings::scatterlist,
        sg_nents: c_int,
        sg_offset: *mut c_uint,
    ) -> c_int {
        // SAFETY: `mr` was made by `create_mr`, and its consumer maps it by one task at a time. The
        // list and the offset are the consumer's, who waits; `set_page` is called for this region
        // only, before `ib_sg_to_pages` returns.
        unsafe {
            D::begin_mr_map(Object::from_raw(mr));
            bindings::ib_sg_to_pages(mr, sg, sg_nents, sg_offset, Some(Self::set_page))
        }
    }

    /// # Safety
    ///
    /// To be called by `ib_sg_to_pages` for the region that [`Self::map_mr_sg`] gave it.
    unsafe extern "C" fn set_page(mr: *mut bindings::ib_mr, addr: u64) -> c_int {
        from_result(|| {
            // SAFETY: `mr` is the region that `map_mr_sg` was called for, which has not returned.
            unsafe { D::push_mr_page(Object::from_raw(mr), addr)? };
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `ranges` must be `count`
    /// entries.
    unsafe extern "C" fn advise_mr(
        pd: *mut bindings::ib_pd,
        advice: bindings::ib_uverbs_advise_mr_advice,
        flags: u32,
        ranges: *mut bindings::ib_sge,
        count: u32,
        _attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        let flush = bindings::ib_uverbs_advise_mr_flag_IB_UVERBS_ADVISE_MR_FLAG_FLUSH;
        from_result(|| {
            let advice = Advice::from_raw(advice).ok_or(errno::eopnotsupp())?;
            let mut advised = KVVec::with_capacity(count as usize, GFP_KERNEL_ACCOUNT)?;
            for index in 0..count as usize {
                // SAFETY: The caller vouches for `count` entries, and `index` is less.
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
            // SAFETY: `pd` was made by `alloc_pd`, and the core destroys it only when no other call
            // for it is under way.
            let pd = unsafe { Object::from_raw(pd) };
            D::advise_mr(pd, advice, flags & flush != 0, &advised)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with the user's part of the
    /// command; `pd` must be a domain of `D`, the new one or the region's.
    unsafe extern "C" fn rereg_user_mr(
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
                return Err(crate::kernel_ext::errno::eopnotsupp());
            }
            // SAFETY: `mr` was made by `create_mr` and `pd` by `alloc_pd`. The command holds the
            // object of the region for writing, and that of a new domain; the one that the region is
            // in counts it as a user. So neither ends before this returns. `udata` is null or that
            // of the command, which lasts until this returns.
            let (mr, pd, udata) = unsafe {
                (
                    Object::from_raw(mr),
                    Object::from_raw(pd),
                    Udata::<D>::from_raw(udata),
                )
            };
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
            Err(err) => err.to_errno() as isize as *mut bindings::ib_mr,
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a window that it has just
    /// allocated.
    unsafe extern "C" fn alloc_mw(
        mw: *mut bindings::ib_mw,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `mw` for this, zeroed and of `size_ib_mw` bytes, set its
            // device, and shows it to nobody before this returns. It has set domain and type, too;
            // the domain was made by `alloc_pd`, and the command holds it. `udata` is null or that
            // of the command, which lasts until this returns.
            unsafe {
                let pd = Object::from_raw((*mw).pd);
                let type2 = (*mw).type_ == bindings::ib_mw_type_IB_MW_TYPE_2;
                Self::create_with::<kind::Mw>(mw, udata, |new, udata| {
                    D::alloc_mw(pd, new, type2, udata)
                })
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dealloc_mw(mw: *mut bindings::ib_mw) -> c_int {
        from_result(|| {
            // SAFETY: `mw` was made by `alloc_mw`, has no users left, and is freed by the core
            // without another call when this succeeds.
            unsafe {
                D::dealloc_mw(Object::from_raw(mw))?;
                Object::<kind::Mw, D>::finish(mw);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with the attributes of the
    /// command; `attr` must be valid for reads.
    unsafe extern "C" fn alloc_dm(
        dev: *mut bindings::ib_device,
        context: *mut bindings::ib_ucontext,
        attr: *mut bindings::ib_dm_alloc_attr,
        attrs: *mut bindings::uverbs_attr_bundle,
    ) -> *mut bindings::ib_dm {
        let result = (|| {
            let dm = KBox::<Dm<D>>::new_uninit(GFP_KERNEL)?;
            let dm = KBox::into_raw(dm);
            let raw = dm.cast::<bindings::rdma_dm>();
            // SAFETY: The memory is ours; the core's part of it is valid when zeroed, and the
            // device is what the core will set it to: a `Device<D>`, having this table. `context`
            // was made by `alloc_ucontext` and is held by the command, whose `attrs` and `attr`
            // these are.
            let result = unsafe {
                ptr::write_bytes(dm, 0, 1);
                (*raw).dm.device = dev;
                (*raw).length = (*attr).length;
                let dev = Device::from_raw(dev);
                let context = Object::from_raw(context);
                let response = DmResponse::new(attrs, raw);
                let attr = DmAllocAttr {
                    length: (*attr).length,
                    log_alignment: (*attr).alignment,
                };
                Self::create::<kind::Dm>(raw, |new| {
                    D::alloc_dm(dev, context, new, &attr, &response)
                })
            };
            if let Err(err) = result {
                // SAFETY: It came from `into_raw` above, and `create` has dropped what was
                // initialised in it.
                drop(unsafe { KBox::from_raw(dm) });
                return Err(err);
            }
            Ok(raw)
        })();
        match result {
            // The core's structure is first in it.
            Ok(raw) => raw.cast(),
            Err(err) => err.to_errno() as isize as *mut bindings::ib_dm,
        }
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dealloc_dm(
        dm: *mut bindings::ib_dm,
        _attrs: *mut bindings::uverbs_attr_bundle,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `dm` was made by `alloc_dm`, which returned the first member of an `rdma_dm`;
            // it has no users left, and the core does not touch it any more when this succeeds.
            unsafe {
                D::dealloc_dm(Object::from_raw(dm.cast()))?;
                Object::<kind::Dm, D>::finish(dm.cast());
            }
            // SAFETY: The memory came from `alloc_dm`, and nothing in it is initialised any more.
            drop(unsafe { KBox::from_raw(dm.cast::<MaybeUninit<Dm<D>>>()) });
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
    unsafe extern "C" fn reg_dm_mr(
        pd: *mut bindings::ib_pd,
        dm: *mut bindings::ib_dm,
        attr: *mut bindings::ib_dm_mr_attr,
        _attrs: *mut bindings::uverbs_attr_bundle,
    ) -> *mut bindings::ib_mr {
        // SAFETY: `pd` was made by `alloc_pd` and `dm` by `alloc_dm`, which returned the first
        // member of an `rdma_dm`; the command holds the objects of both. `attr` is a local of the
        // caller.
        unsafe {
            let dm = Object::from_raw(dm.cast());
            let region = DmRegion {
                offset: (*attr).offset,
                length: (*attr).length,
                access: Access::from_raw((*attr).access_flags),
            };
            Self::create_mr(pd, ptr::null_mut(), |pd, new, _| {
                D::reg_dm_mr(pd, new, dm, &region)
            })
        }
    }

    // ---- Address handles ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a handle that it has just
    /// allocated; `attr` must be valid for reads.
    unsafe extern "C" fn create_ah(
        ah: *mut bindings::ib_ah,
        attr: *mut bindings::rdma_ah_init_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `ah` for this, zeroed and of `size_ib_ah` bytes, set its
            // device, and shows it to nobody before this returns. It has set the domain, too, which
            // was made by `alloc_pd` and outlives its handles. `attr` is the caller's, who holds
            // the GID in it and waits. `udata` is null or that of the command, which lasts until
            // this returns.
            unsafe {
                let pd = Object::from_raw((*ah).pd);
                let sleepable =
                    (*attr).flags & bindings::rdma_create_ah_flags_RDMA_CREATE_AH_SLEEPABLE != 0;
                let attr = AhAttr::from_raw((*attr).ah_attr);
                Self::create_with::<kind::Ah>(ah, udata, |new, udata| {
                    D::create_ah(pd, new, attr, sleepable, udata)
                })
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn destroy_ah(ah: *mut bindings::ib_ah, flags: u32) -> c_int {
        from_result(|| {
            let sleepable = flags & bindings::rdma_destroy_ah_flags_RDMA_DESTROY_AH_SLEEPABLE != 0;
            // SAFETY: `ah` was made by `create_ah`, has no users left, and is freed by the core
            // without another call when this succeeds.
            unsafe {
                D::destroy_ah(Object::from_raw(ah), sleepable)?;
                Object::<kind::Ah, D>::finish(ah);
            }
            Ok(0)
        })
    }

    // ---- Shared receive queues ----

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a queue that it has just
    /// allocated; `attr` must be valid for reads and writes.
    unsafe extern "C" fn create_srq(
        srq: *mut bindings::ib_srq,
        attr: *mut bindings::ib_srq_init_attr,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `srq` for this, zeroed and of `size_ib_srq` bytes, set its
            // device, and shows it to nobody before this returns. It has set type, domain and, for
            // XRC, what else the queue belongs to, which it keeps for as long as the queue. `attr`
            // is the caller's, who waits. `udata` is null or that of the command, which lasts until
            // this returns.
            unsafe {
                let extended = match (*attr).srq_type {
                    bindings::ib_srq_type_IB_SRQT_BASIC => None,
                    bindings::ib_srq_type_IB_SRQT_XRC if D::HAS_ALLOC_XRCD => {
                        Some(ExtendedSrq::from_raw(srq).ok_or(EINVAL)?)
                    }
                    _ => return Err(crate::kernel_ext::errno::eopnotsupp()),
                };
                let pd = Object::from_raw((*srq).pd);
                let raw = &mut (*attr).attr;
                let mut values = SrqAttr {
                    max_wr: raw.max_wr,
                    max_sge: raw.max_sge,
                    limit: raw.srq_limit,
                };
                Self::create_with::<kind::Srq>(srq, udata, |new, udata| {
                    D::create_srq(pd, new, &mut values, extended.as_ref(), udata)
                })?;
                raw.max_wr = values.max_wr;
                raw.max_sge = values.max_sge;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` for a domain that it has just
    /// allocated.
    unsafe extern "C" fn alloc_xrcd(
        xrcd: *mut bindings::ib_xrcd,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: The core allocated `xrcd` for this, zeroed and of `size_ib_xrcd` bytes, set
            // its device, and shows it to nobody before this returns. The device is a `Device<D>`,
            // having this table. `udata` is null or that of the command, which lasts until this
            // returns.
            unsafe {
                let dev = Device::from_raw((*xrcd).device);
                Self::create_with::<kind::Xrcd>(xrcd, udata, |new, udata| {
                    D::alloc_xrcd(dev, new, udata)
                })
            }?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn dealloc_xrcd(
        xrcd: *mut bindings::ib_xrcd,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `xrcd` was made by `alloc_xrcd`, has no users left, and is freed by the core
            // without another call when this succeeds. `udata` is null or that of the command,
            // which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::dealloc_xrcd(Object::from_raw(xrcd))?;
                Object::<kind::Xrcd, D>::finish(xrcd);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for reads.
    unsafe extern "C" fn modify_srq(
        srq: *mut bindings::ib_srq,
        attr: *mut bindings::ib_srq_attr,
        mask: bindings::ib_srq_attr_mask,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `srq` was made by `create_srq`, and the core destroys it only when no other
            // call for it is under way. `attr` is the caller's, who waits. `udata` is null or that
            // of the command, which lasts until this returns.
            unsafe {
                if mask & bindings::ib_srq_attr_mask_IB_SRQ_MAX_WR == 0 {
                    expect_none::<D>(udata)?;
                } else if D::HAS_RESIZE_SRQ {
                    let udata = Udata::<D>::from_raw(udata);
                    D::resize_srq(Object::from_raw(srq), (*attr).max_wr, udata.as_ref())?;
                    if let Some(udata) = udata {
                        let _ = udata.finish();
                    }
                } else {
                    return Err(crate::kernel_ext::errno::eopnotsupp());
                }
                if mask & bindings::ib_srq_attr_mask_IB_SRQ_LIMIT != 0 {
                    D::modify_srq_limit(Object::from_raw(srq), (*attr).srq_limit)?;
                }
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`; `attr` must be valid for
    /// writes.
    unsafe extern "C" fn query_srq(
        srq: *mut bindings::ib_srq,
        attr: *mut bindings::ib_srq_attr,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `srq` was made by `create_srq`, and the core destroys it only when no other
            // call for it is under way. `attr` is the caller's, who waits.
            unsafe {
                let values = D::query_srq(Object::from_raw(srq))?;
                (*attr).max_wr = values.max_wr;
                (*attr).max_sge = values.max_sge;
                (*attr).srq_limit = values.limit;
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>`.
    unsafe extern "C" fn destroy_srq(
        srq: *mut bindings::ib_srq,
        udata: *mut bindings::ib_udata,
    ) -> c_int {
        from_result(|| {
            // SAFETY: `srq` was made by `create_srq`, has no users left, and is freed by the core
            // without another call when this succeeds. `udata` is null or that of the command,
            // which lasts until this returns.
            unsafe {
                expect_none::<D>(udata)?;
                D::destroy_srq(Object::from_raw(srq))?;
                Object::<kind::Srq, D>::finish(srq);
            }
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// To be called by the core through the table of a `Device<D>` with a list of requests;
    /// `bad_wr` must be valid for writes.
    unsafe extern "C" fn post_srq_recv(
        srq: *mut bindings::ib_srq,
        wr: *const bindings::ib_recv_wr,
        bad_wr: *mut *const bindings::ib_recv_wr,
    ) -> c_int {
        // SAFETY: `srq` was made by `create_srq`, and the core destroys it only when no other call
        // for it is under way. The consumer keeps the list until this returns.
        let (srq, mut list) = unsafe { (Object::from_raw(srq), RecvList::new(wr)) };
        match D::post_srq_recv(srq, &mut list) {
            Ok(()) => 0,
            Err(err) => {
                // SAFETY: `bad_wr` is the consumer's, or a local of `ib_post_srq_recv`.
                unsafe { *bad_wr = list.current() };
                err.to_errno()
            }
        }
    }
}
