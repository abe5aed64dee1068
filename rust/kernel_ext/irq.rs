// SPDX-License-Identifier: GPL-2.0

//! All interrupt vectors of a PCI function, each with its own handler and processor (for
//! `rust/kernel/pci/irq.rs`).
//!
//! The `kernel` crate has `pci::Device::alloc_irq_vectors` and `irq::Registration`, of which this takes the rules:
//! what is allocated belongs to the bound device ([`Devres`]), and a handler is an [`irq::Handler`]. What this adds is
//! what a driver with many vectors lacks there: a vector other than the first and the last, the kind that was
//! allocated, vectors that go before the device is unbound, names that are not static, and affinity. An `IrqVector` and
//! an `IrqRequest` cannot be made outside of that crate, so that handlers are requested here.

use super::errno;
use super::pci::{Config, ConfigLock};
use crate::bindings;
use core::marker::PhantomPinned;
use core::ptr;
use kernel::container_of;
use kernel::cpu::CpuId;
use kernel::cpumask::Cpumask;
use kernel::device::Bound;
use kernel::devres::Devres;
use kernel::error::to_result;
use kernel::irq;
use kernel::prelude::*;
use kernel::str::CString;
use kernel::sync::aref::ARef;
use kernel::sync::Arc;
use kernel::types::Opaque;
use kernel::{device, pci};

/// A way in which a PCI function interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// MSI-X vectors.
    MsiX,
    /// MSI vectors.
    Msi,
    /// The interrupt pin: a level, on a line that others may share.
    Intx,
}

impl Kind {
    /// All of them, the best first.
    const BEST_FIRST: [Self; 3] = [Self::MsiX, Self::Msi, Self::Intx];

    fn flag(self) -> c_uint {
        let flag = match self {
            Self::MsiX => bindings::PCI_IRQ_MSIX,
            Self::Msi => bindings::PCI_IRQ_MSI,
            Self::Intx => bindings::PCI_IRQ_INTX,
        };
        flag as c_uint
    }

    /// Lets a function assert its pin, or not, where this is what it interrupts by.
    fn enable_pin<Ctx: device::DeviceContext>(self, config: &Config<'_, Ctx>, enable: bool) {
        if self == Self::Intx {
            config.enable_pin(enable);
        }
    }

    /// What people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::MsiX => "MSI-X",
            Self::Msi => "MSI",
            Self::Intx => "INTx",
        }
    }
}

/// Interrupt vectors that a PCI function has, given back when dropped.
///
/// # Invariants
///
/// The vectors of `dev` were allocated, of this kind, and nothing else frees them. There is a pin without that.
struct Allocation {
    dev: ARef<pci::Device>,
    kind: Kind,
}

impl Allocation {
    /// Allocates up to `max` vectors of one kind, and gives how many there are; an error where the function or the host
    /// does not have it, `EBUSY` where there are vectors already.
    fn new(dev: &pci::Device<Bound>, kind: Kind, max: u32) -> Result<(Self, u32)> {
        let raw = as_raw(dev);
        let dev: &pci::Device = dev;
        let config = ConfigLock::new(dev);
        // SAFETY: A reference to a device keeps it valid. Its driver alone changes this, with config space locked
        // as far as it does so here.
        let taken = unsafe {
            bindings::pci_dev::msi_enabled_raw(raw) | bindings::pci_dev::msix_enabled_raw(raw)
        };
        if taken != 0 {
            // To be freed by who has them, and by nobody else.
            return Err(EBUSY);
        }
        // SAFETY: A reference to a device keeps it valid, and this one says that it is bound to its driver, for which
        // this is done. It has no messages, as was found out above.
        let count = unsafe { bindings::pci_alloc_irq_vectors(raw, 1, max.max(1), kind.flag()) };
        to_result(count.min(0))?;
        // Not before somebody handles it: it would be held, and the line is not ours alone.
        kind.enable_pin(&config, false);
        // INVARIANT: The call above allocated vectors of this kind.
        let this = Self {
            dev: dev.into(),
            kind,
        };
        Ok((this, count as u32))
    }

    /// The Linux interrupt number of vector `index`.
    fn irq(&self, index: u32) -> Result<u32> {
        // SAFETY: A counted reference keeps the device valid. Its vectors are there by the type invariant; the function
        // checks `index`.
        let irq = unsafe { bindings::pci_irq_vector(as_raw(&self.dev), index) };
        to_result(irq.min(0))?;
        Ok(irq as u32)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let _config = ConfigLock::new(&self.dev);
        if self.kind == Kind::Intx {
            // There is nothing to free, and the messages that there may be by now are another's.
            return;
        }
        // SAFETY: By the type invariant the vectors are ours to free. None has a handler: each `IrqHandler` keeps the
        // `Vectors` that this is of, and where all of them are released as the device is unbound, a handler, which
        // is managed since later, goes before this.
        unsafe { bindings::pci_free_irq_vectors(as_raw(&self.dev)) }
    }
}

/// The interrupt vectors of a PCI function, given back when dropped, and at the latest when the function is unbound
/// from its driver: nothing here does anything any more then. The pin is one vector.
///
/// They are made, given handlers and given back with config space locked: who resets the function restores what it
/// had of them, and the kernel leaves it to drivers not to change that meanwhile. So nothing of this is to be done by
/// who has that lock, or by who may be waited for with it. Sleeps.
///
/// # Invariants
///
/// `irqs` are the interrupt numbers of the vectors of `allocation`, for as long as that can be accessed.
pub struct Vectors {
    allocation: Devres<Allocation>,
    kind: Kind,
    irqs: KVec<u32>,
}

impl Vectors {
    /// Allocates up to `max` vectors of the best kind that the function and the host have: MSI-X,
    /// MSI, or the pin; with `pin_first` the pin before the others.
    pub fn new(dev: &pci::Device<Bound>, max: u32, pin_first: bool) -> Result<Self> {
        let mut last = ENODEV;
        let pin = pin_first.then_some(Kind::Intx);
        for kind in Iterator::chain(pin.into_iter(), Kind::BEST_FIRST) {
            match Self::of_kind(dev, kind, max) {
                Ok(vectors) => return Ok(vectors),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The same of one kind; an error where the function or the host does not have it.
    fn of_kind(dev: &pci::Device<Bound>, kind: Kind, max: u32) -> Result<Self> {
        let (allocation, count) = Allocation::new(dev, kind, max)?;
        let mut irqs = KVec::with_capacity(count as usize, GFP_KERNEL)?;
        for index in 0..count {
            // A pin that firmware says is connected to nothing (`IRQ_NOTCONNECTED`) is given all the same.
            let irq = allocation.irq(index).map_err(|_| errno::enotconn())?;
            irqs.push(irq, GFP_KERNEL)?;
        }
        // INVARIANT: The numbers were asked for just now, and stay until the vectors are freed.
        Ok(Self {
            allocation: Devres::new(dev.as_ref(), allocation)?,
            kind,
            irqs,
        })
    }

    /// The kind that they are.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Keeps the function from asserting its pin, where that is what it interrupts by, until a handler is installed
    /// anew. What it has to tell stays. Does nothing while somebody has config space locked, who may restore what
    /// this would change: it is up to him then. May be called from any context.
    pub fn disable_pin(&self) {
        self.allocation.try_access_with(|allocation| {
            if let Some(config) = ConfigLock::try_new(&allocation.dev) {
                self.kind.enable_pin(&config, false);
            }
        });
    }

    /// How many vectors there are.
    pub fn len(&self) -> u32 {
        self.irqs.len() as u32
    }

    /// Whether there is no vector.
    pub fn is_empty(&self) -> bool {
        self.irqs.is_empty()
    }

    /// The Linux interrupt number of vector `index`.
    pub fn irq(&self, index: u32) -> Result<u32> {
        self.irqs.get(index as usize).copied().ok_or(EINVAL)
    }

    /// Steers vector `index` to processor `cpu`, which has to be online, and tells user space that it belongs
    /// there, until the [`IrqHandler`] on it goes. It arrives there after the next interrupt at the latest.
    pub fn steer(&self, index: u32, cpu: u32) -> Result {
        let irq = self.irq(index)?;
        if !super::cpu::is_online(cpu) {
            return Err(EINVAL);
        }
        // SAFETY: The processor is one that there is, whose mask is a static of the kernel.
        let mask = unsafe { bindings::cpumask_of(cpu) };
        let steered = self.allocation.try_access_with(|_| {
            // `irq_set_affinity_and_hint` does not tell whether the first worked.
            // SAFETY: By the type invariant the number is that of a vector, which is not freed while the allocation is
            // accessed. The mask is static. The function takes no lock that sleeps.
            to_result(unsafe { bindings::irq_set_affinity(irq, mask) })?;
            // SAFETY: The vector is still accessed. The mask is static, as what is kept of it until the hint is cleared
            // has to be. The function takes no lock that sleeps.
            to_result(unsafe { bindings::irq_update_affinity_hint(irq, mask) })
        });
        steered.ok_or(ENODEV)?
    }

    /// Whether vector `index` arrives at processor `cpu`, as things are: anybody with the right may
    /// steer it elsewhere at any time (`/proc/irq`).
    pub fn arrives_at(&self, index: u32, cpu: CpuId) -> Result<bool> {
        let irq = self.irq(index)?;
        let arrives = self.allocation.try_access_with(|_| {
            // SAFETY: By the type invariant the number is that of a vector, which is not freed while the allocation is
            // accessed, nor is what describes it.
            let mask = unsafe { bindings::irq_get_effective_affinity_mask(irq) };
            if mask.is_null() {
                return false;
            }
            // SAFETY: A mask that is there is part of what describes the vector, and valid for as long. It may change
            // while it is read, which changes single bits. `cpu` is less than the number of possible processors.
            unsafe { bindings::cpumask_test_cpu(cpu.as_u32() as i32, mask.cast_mut()) }
        });
        arrives.ok_or(ENODEV)
    }
}

/// The raw pointer of a PCI device.
///
/// `pci::Device` is a transparent wrapper of `struct pci_dev`.
fn as_raw<Ctx: device::DeviceContext>(dev: &pci::Device<Ctx>) -> *mut bindings::pci_dev {
    ptr::from_ref(dev).cast_mut().cast()
}

/// What runs when an interrupt arrives, and for [`Kind::Intx`] also when somebody else on the line interrupts; and
/// what runs when it is steered.
pub trait Handler: irq::Handler + Send {
    /// The interrupt was steered to processors of `mask`, by anybody: it arrives at one of them after the next
    /// one at the latest. Not for [`Kind::Intx`], whose line may be others' as well. Sleeps.
    fn steered(&self, _mask: &Cpumask) {}
}

/// An installed interrupt handler, removed when dropped. Only in a [`Devres`], so that it is removed at the latest when
/// the device is unbound, and before its vector is given back.
///
/// # Invariants
///
/// A handler with `self` as its cookie is installed on `irq`, and unless that is a pin's, `notify` is told where
/// it is steered. From when it is installed until it is removed nothing here changes but `notify`. The device is
/// bound while it is installed.
#[pin_data(PinnedDrop)]
pub struct IrqHandler<T: Handler> {
    dev: ARef<pci::Device>,
    /// Not given back before.
    vectors: Arc<Vectors>,
    irq: u32,
    /// What `/proc/interrupts` shows.
    name: CString,
    #[pin]
    notify: Opaque<bindings::irq_affinity_notify>,
    #[pin]
    handler: T,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: `notify` is the interrupt core's, which takes its own locks; the handler, the device, the vectors and the
// name are `Send`.
unsafe impl<T: Handler> Send for IrqHandler<T> {}
// SAFETY: A shared reference reaches the device, the vectors, the name and the handler, which are `Sync`, and `irq`,
// which does not change while there is one. `notify` is read and written by the interrupt core alone, under its own
// locks.
unsafe impl<T: Handler> Sync for IrqHandler<T> {}

impl<T: Handler> IrqHandler<T> {
    /// Installs `handler` on vector `index` of `dev`. `name` is what `/proc/interrupts` shows. `ENXIO` where the vectors
    /// are not there any more, `EINVAL` where they are another device's.
    pub fn install(
        dev: &pci::Device<Bound>,
        vectors: &Arc<Vectors>,
        index: u32,
        name: CString,
        handler: impl PinInit<T, Error>,
    ) -> Result<Devres<Self>> {
        let of_vectors: &device::Device = vectors.allocation.device();
        let device: &device::Device<Bound> = dev.as_ref();
        if !ptr::addr_eq(of_vectors, device) {
            return Err(EINVAL);
        }
        // They are not given back meanwhile: the caller has a reference, and the device stays bound.
        vectors.allocation.try_access_with(|_| ()).ok_or(ENXIO)?;
        let this = Self::new(dev, vectors, vectors.irq(index)?, name, handler);
        Devres::new(device, this)
    }

    /// On the vector with this interrupt number.
    fn new<'a>(
        dev: &'a pci::Device<Bound>,
        vectors: &'a Arc<Vectors>,
        number: u32,
        name: CString,
        handler: impl PinInit<T, Error> + 'a,
    ) -> impl PinInit<Self, Error> + 'a {
        try_pin_init!(&this in Self {
            dev: ARef::from(&**dev),
            vectors: vectors.clone(),
            irq: number,
            name,
            notify: Opaque::new(bindings::irq_affinity_notify {
                notify: Some(Self::notify_callback),
                release: Some(Self::release_callback),
                ..Default::default()
            }),
            handler <- handler,
            _pin: PhantomPinned,
            _: {
                let flags = match vectors.kind {
                    Kind::Intx => bindings::IRQF_SHARED,
                    Kind::Msi | Kind::MsiX => 0,
                };
                // SAFETY: `name` was initialised before this initialiser runs, and is not written any more.
                let name = unsafe { (*this.as_ptr()).name.as_char_ptr() };
                let config = ConfigLock::new(dev);
                // INVARIANT: The handler is installed from here on, on a device that is bound. Where that fails the
                // fields are dropped, but not what they are part of.
                // SAFETY:
                // - `number` is that of a vector of `dev`, as `install` has found out, which is not freed before the
                //   `vectors` kept here are.
                // - All fields of the cookie were initialised before this initialiser runs, and none but `notify` is
                //   written any more. It is pinned, and dropping it removes the handler first.
                // - The name is part of the cookie, and does not move with it.
                to_result(unsafe {
                    bindings::request_irq(
                        number,
                        Some(Self::thunk),
                        flags as c_ulong,
                        name,
                        this.as_ptr().cast(),
                    )
                })?;
                vectors.kind.enable_pin(&config, true);
                drop(config);
                if vectors.kind != Kind::Intx {
                    // SAFETY: `notify` was initialised before this initialiser runs; this makes no reference to it.
                    let notify = unsafe { (*this.as_ptr()).notify.get() };
                    // It is refused for interrupts that cannot be masked, which this is not.
                    // SAFETY: The interrupt is ours alone, as it is no pin; `notify` is pinned and has its functions,
                    // and is taken back before the handler is removed.
                    let _ = unsafe { bindings::irq_set_affinity_notifier(number, notify) };
                }
            },
        })
    }

    /// # Safety
    ///
    /// Only for the interrupt core: `notify` must be that of an installed `IrqHandler<T>`, and `mask` valid.
    unsafe extern "C" fn notify_callback(
        notify: *mut bindings::irq_affinity_notify,
        mask: *const bindings::cpumask_t,
    ) {
        let notify: *mut Opaque<bindings::irq_affinity_notify> = notify.cast();
        // SAFETY: The caller vouches for what it is part of; dropping that takes the notification back, which waits
        // until this has returned (`cancel_work_sync`).
        let this = unsafe { &*container_of!(notify, Self, notify) };
        // SAFETY: The caller vouches for the mask, which is a copy of its own (`irq_affinity_notify`).
        this.handler.steered(unsafe { Cpumask::from_raw(mask) });
    }

    /// Does nothing: who takes the notification back knows by himself when it is over.
    extern "C" fn release_callback(_kref: *mut bindings::kref) {}

    /// # Safety
    ///
    /// `cookie` must be an `IrqHandler<T>` that is installed.
    unsafe extern "C" fn thunk(_irq: c_int, cookie: *mut c_void) -> c_uint {
        // SAFETY: The caller vouches that the cookie is an installed `IrqHandler<T>`; dropping one
        // waits in `free_irq` until this has returned.
        let this = unsafe { &*cookie.cast::<Self>() };
        let dev: &device::Device = this.dev.as_ref();
        // SAFETY: By the type invariant the device is bound while the handler is installed, which it is.
        this.handler.handle(unsafe { dev.as_bound() }) as c_uint
    }
}

#[pinned_drop]
impl<T: Handler> PinnedDrop for IrqHandler<T> {
    fn drop(self: Pin<&mut Self>) {
        let cookie = ptr::from_ref(&*self).cast_mut().cast();
        if self.vectors.kind != Kind::Intx {
            // SAFETY: By the type invariants the interrupt is ours, and the notification to take back. This
            // waits for one that runs, so that none does afterwards.
            unsafe { bindings::irq_set_affinity_notifier(self.irq, ptr::null_mut()) };
        }
        // Not before that, which waits for the driver's own code.
        let config = ConfigLock::new(&self.dev);
        // Before the handler goes: whoever shares the line could not make the level fall.
        self.vectors.kind.enable_pin(&config, false);
        // SAFETY: By the type invariant a handler is installed on the interrupt, which so is in use. The hint that
        // it has, if any, is ours.
        unsafe { bindings::irq_update_affinity_hint(self.irq, ptr::null()) };
        // SAFETY: By the type invariant a handler with this cookie is installed.
        unsafe { bindings::free_irq(self.irq, cookie) };
    }
}
