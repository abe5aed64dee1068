// SPDX-License-Identifier: GPL-2.0

//! KUnit tests of what needs no device.

mod objects;
mod port;
mod work;

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
