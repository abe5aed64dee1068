// SPDX-License-Identifier: GPL-2.0

//! All interrupt vectors of a PCI function, each with its own handler and processor (for
//! `rust/kernel/pci/irq.rs`).

use super::errno;
use super::pci::{Config, ConfigLock};
use crate::bindings;
use core::marker::PhantomPinned;
use core::ptr;
use kernel::container_of;
use kernel::cpu::CpuId;
use kernel::cpumask::Cpumask;
use kernel::error::to_result;
use kernel::irq::IrqReturn;
use kernel::prelude::*;
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

/// The interrupt vectors of a PCI function, given back when dropped. The pin is one vector.
///
/// They are made, given handlers and given back with config space locked: who resets the function restores what it
/// had of them, and the kernel leaves it to drivers not to change that meanwhile. So nothing of this is to be done by
/// who has that lock, or by who may be waited for with it. Sleeps.
///
/// # Invariants
///
/// `dev` has `count` vectors of `kind` allocated, and nothing else frees them.
pub struct Vectors {
    dev: ARef<pci::Device>,
    kind: Kind,
    count: u32,
}

impl Vectors {
    /// Allocates up to `max` vectors of the best kind that the function and the host have: MSI-X,
    /// MSI, or the pin; with `pin_first` the pin before the others.
    ///
    /// They must be dropped before the function is unbound from its driver: keep them in the
    /// driver's bound data.
    pub fn new(dev: &pci::Device<device::Bound>, max: u32, pin_first: bool) -> Result<Self> {
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
    fn of_kind(dev: &pci::Device<device::Bound>, kind: Kind, max: u32) -> Result<Self> {
        let dev_raw = as_raw(dev);
        let dev: &pci::Device = dev;
        let count = {
            let config = ConfigLock::new(dev);
            // SAFETY: The borrow keeps `dev` bound to its driver, which alone allocates its vectors
            // and has none where another kind was refused.
            let count =
                unsafe { bindings::pci_alloc_irq_vectors(dev_raw, 1, max.max(1), kind.flag()) };
            to_result(count.min(0))?;
            // Not before somebody handles it: it would be held, and the line is not ours alone.
            kind.enable_pin(&config, false);
            count
        };
        // INVARIANT: The call above allocated `count` vectors of this kind.
        let this = Self {
            dev: dev.into(),
            kind,
            count: count as u32,
        };
        // SAFETY: The vectors were allocated above.
        if unsafe { bindings::pci_irq_vector(dev_raw, 0) } < 0 {
            // A pin that firmware says is connected to nothing (`IRQ_NOTCONNECTED`) is given all the same.
            return Err(errno::enotconn());
        }
        Ok(this)
    }

    /// The kind that they are.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Keeps the function from asserting its pin, where that is what it interrupts by, until a handler is installed
    /// anew. What it has to tell stays. Does nothing while somebody has config space locked, who may restore what
    /// this would change: it is up to him then. May be called from any context.
    pub fn disable_pin(&self) {
        if let Some(config) = ConfigLock::try_new(&self.dev) {
            self.kind.enable_pin(&config, false);
        }
    }

    /// How many vectors there are.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether there is no vector.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The Linux interrupt number of vector `index`.
    pub fn irq(&self, index: u32) -> Result<u32> {
        if index >= self.count {
            return Err(EINVAL);
        }
        // SAFETY: By the type invariant the vectors were allocated and are freed only when `self`
        // is dropped; the function checks `index`.
        let irq = unsafe { bindings::pci_irq_vector(as_raw(&self.dev), index) };
        to_result(irq.min(0))?;
        Ok(irq as u32)
    }

    /// Steers vector `index` to processor `cpu`, which has to be online, and tells user space that it belongs
    /// there, until the [`IrqHandler`] on it goes. It arrives there after the next interrupt at the latest.
    pub fn steer(&self, index: u32, cpu: u32) -> Result {
        let irq = self.irq(index)?;
        // SAFETY: The vectors are ours, so that the interrupt stays allocated; the helper checks `cpu`, and the
        // mask it hands on is static.
        to_result(unsafe { bindings::irq_set_affinity_cpu(irq, cpu) })
    }

    /// Whether vector `index` arrives at processor `cpu`, as things are: anybody with the right may
    /// steer it elsewhere at any time (`/proc/irq`).
    pub fn arrives_at(&self, index: u32, cpu: CpuId) -> Result<bool> {
        let irq = self.irq(index)?;
        // SAFETY: The vectors are ours, so that the interrupt stays allocated, and its mask with it.
        let mask = unsafe { bindings::irq_get_effective_affinity_mask(irq) };
        if mask.is_null() {
            return Ok(false);
        }
        // SAFETY: A mask that is there is valid; it may change while it is read, which changes
        // single bits. `cpu` is less than the number of possible processors.
        Ok(unsafe { bindings::cpumask_test_cpu(cpu.as_u32() as i32, mask.cast_mut()) })
    }
}

impl Drop for Vectors {
    fn drop(&mut self) {
        let _config = ConfigLock::new(&self.dev);
        // SAFETY: By the type invariant the vectors are ours to free; handlers hold a reference to
        // `self`, so none is installed any more.
        unsafe { bindings::pci_free_irq_vectors(as_raw(&self.dev)) }
    }
}

/// The raw pointer of a PCI device.
///
/// `pci::Device` is a transparent wrapper of `struct pci_dev`.
fn as_raw<Ctx: device::DeviceContext>(dev: &pci::Device<Ctx>) -> *mut bindings::pci_dev {
    ptr::from_ref(dev).cast_mut().cast()
}

/// What runs when an interrupt arrives.
pub trait Handler: Send + Sync {
    /// Handles the interrupt. Runs in hard interrupt context, and for [`Kind::Intx`] also when
    /// somebody else on the line interrupts.
    fn handle(&self) -> IrqReturn;

    /// The interrupt was steered to processors of `mask`, by anybody: it arrives at one of them after the next
    /// one at the latest. Not for [`Kind::Intx`], whose line may be others' as well. Sleeps.
    fn steered(&self, _mask: &Cpumask) {}
}

/// An installed interrupt handler, removed when dropped.
///
/// # Invariants
///
/// A handler with `self` as its cookie is installed on `irq`, and unless that is a pin's, `notify` is told where
/// it is steered. From when it is installed until it is removed nothing here changes but `notify`.
#[pin_data(PinnedDrop)]
pub struct IrqHandler<T: Handler + 'static> {
    vectors: Arc<Vectors>,
    irq: u32,
    #[pin]
    notify: Opaque<bindings::irq_affinity_notify>,
    #[pin]
    handler: T,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: `notify` is the interrupt core's, which takes its own locks; the handler is `Send` and `Sync`, and so is
// the rest.
unsafe impl<T: Handler + 'static> Send for IrqHandler<T> {}
// SAFETY: A shared reference reaches the vectors and the handler, which are `Sync`, and `irq`, which does not change
// while there is one. `notify` is read and written by the interrupt core alone, under its own locks.
unsafe impl<T: Handler + 'static> Sync for IrqHandler<T> {}

impl<T: Handler + 'static> IrqHandler<T> {
    /// Installs `handler` on vector `index`. `name` is what `/proc/interrupts` shows.
    pub fn new<'a>(
        vectors: Arc<Vectors>,
        index: u32,
        name: &'static CStr,
        handler: impl PinInit<T, Error> + 'a,
    ) -> impl PinInit<Self, Error> + 'a {
        let irq = vectors.irq(index);
        try_pin_init!(&this in Self {
            vectors,
            irq: irq?,
            notify: Opaque::new(bindings::irq_affinity_notify {
                notify: Some(Self::notify_callback),
                release: Some(Self::release_callback),
                ..Default::default()
            }),
            handler <- handler,
            _pin: PhantomPinned,
            _: {
                // SAFETY: All fields of `this` were initialised before this initialiser runs, and none is
                // written any more.
                let (vectors, irq) = unsafe { (&(*this.as_ptr()).vectors, (*this.as_ptr()).irq) };
                let flags = match vectors.kind {
                    Kind::Intx => bindings::IRQF_SHARED,
                    Kind::Msi | Kind::MsiX => 0,
                };
                let config = ConfigLock::new(&vectors.dev);
                // INVARIANT: The handler is installed from here on. Where that fails the fields are dropped, but
                // not what they are part of.
                // SAFETY:
                // - `irq` is a vector of a device of ours.
                // - The cookie is pinned and complete; dropping it removes the handler first.
                // - `name` is static.
                to_result(unsafe {
                    bindings::request_irq(
                        irq,
                        Some(Self::thunk),
                        flags as c_ulong,
                        name.as_char_ptr(),
                        this.as_ptr().cast(),
                    )
                })?;
                vectors.kind.enable_pin(&config, true);
                drop(config);
                if vectors.kind != Kind::Intx {
                    // It is refused for interrupts that cannot be masked, which this is not.
                    // SAFETY: The interrupt is ours alone, as it is no pin; `notify` is pinned and complete, and
                    // taken back before the handler is removed.
                    let _ = unsafe {
                        bindings::irq_set_affinity_notifier(irq, (*this.as_ptr()).notify.get())
                    };
                }
            },
        })
    }

    /// The handler's own data.
    pub fn handler(&self) -> &T {
        &self.handler
    }

    /// The Linux interrupt number.
    pub fn irq(&self) -> u32 {
        self.irq
    }

    /// Waits until no instance of the handler is running any more. Sleeps.
    pub fn synchronize(&self) {
        // SAFETY: By the type invariant the handler is installed on `irq`, so that the number is in use.
        unsafe { bindings::synchronize_irq(self.irq) }
    }

    /// # Safety
    ///
    /// Only for the interrupt core: `notify` must be that of an installed `IrqHandler<T>`, and `mask` valid.
    unsafe extern "C" fn notify_callback(
        notify: *mut bindings::irq_affinity_notify,
        mask: *const bindings::cpumask_t,
    ) {
        let notify: *mut Opaque<bindings::irq_affinity_notify> = notify.cast();
        // SAFETY: The caller vouches for what it is part of; dropping that waits until this has returned.
        let this = unsafe { &*container_of!(notify, Self, notify) };
        // SAFETY: The caller vouches for the mask, which is a copy of its own.
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
        this.handler.handle() as c_uint
    }
}

#[pinned_drop]
impl<T: Handler + 'static> PinnedDrop for IrqHandler<T> {
    fn drop(self: Pin<&mut Self>) {
        let cookie = ptr::from_ref(&*self).cast_mut().cast();
        if self.vectors.kind != Kind::Intx {
            // SAFETY: By the type invariants the interrupt is ours, and the notification to take back. This
            // waits for one that runs, so that none does afterwards.
            unsafe { bindings::irq_set_affinity_notifier(self.irq, ptr::null_mut()) };
        }
        // Not before that, which waits for the driver's own code.
        let config = ConfigLock::new(&self.vectors.dev);
        // Before the handler goes: whoever shares the line could not make the level fall.
        self.vectors.kind.enable_pin(&config, false);
        // SAFETY: By the type invariant a handler with this cookie is installed.
        unsafe {
            bindings::irq_clear_affinity_hint(self.irq);
            bindings::free_irq(self.irq, cookie);
        }
    }
}
