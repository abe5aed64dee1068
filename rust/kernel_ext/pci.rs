// SPDX-License-Identifier: GPL-2.0

//! What a driver does to a PCI function outside the callbacks of the PCI core, and resets, by the driver and
//! by others (for `rust/kernel/pci.rs`).

use crate::bindings;
use core::{cell::Cell, marker::PhantomData, ptr};
use kernel::{
    device,
    dma::DmaMask,
    driver::{
        DriverLayout,
        RegistrationOps, //
    },
    error::to_result,
    pci,
    prelude::*,
    types::Opaque, //
};

/// Bytes of a word of config space.
const DWORD: u32 = 4;

/// The raw pointer of a PCI device.
fn as_raw(pdev: &pci::Device) -> *mut bindings::pci_dev {
    // `pci::Device` is a transparent wrapper of `struct pci_dev`.
    ptr::from_ref(pdev).cast_mut().cast()
}

/// Takes the right to start transactions on the bus from a function: it must neither read nor write
/// memory any more, nor interrupt.
pub fn clear_master(pdev: &pci::Device) {
    // SAFETY: A reference to a device keeps it valid; config space of one that is gone takes
    // writes and does nothing.
    unsafe { bindings::pci_clear_master(as_raw(pdev)) }
}

/// Gives a function the right to start transactions on the bus.
pub fn set_master(pdev: &pci::Device<device::Bound>) {
    // SAFETY: A reference to a device keeps it valid.
    unsafe { bindings::pci_set_master(as_raw(pdev)) }
}

/// Sets which addresses a function can reach, for all of DMA.
///
/// # Safety
///
/// Nobody allocates or maps memory for the function meanwhile.
pub unsafe fn set_dma_mask(pdev: &pci::Device<device::Bound>, mask: DmaMask) -> Result {
    // SAFETY: A reference to a device keeps it valid; the caller vouches for the rest.
    to_result(unsafe {
        bindings::dma_set_mask_and_coherent(&raw mut (*as_raw(pdev)).dev, mask.value())
    })
}

/// A function that is bound to its driver, for who is not called by the PCI core: work items, and callbacks
/// of other subsystems.
///
/// # Safety
///
/// The function is bound for as long as the reference is used, and nothing that is managed for it is released:
/// dropping the driver's `pci::Driver::Data`, which the driver core does before that, or the end of `probe`
/// where there is none yet, waits for the caller.
pub unsafe fn assume_bound(pdev: &pci::Device) -> &pci::Device<device::Bound> {
    // SAFETY: `pci::Device` is a transparent wrapper, whatever its context; the caller vouches for this one.
    unsafe { &*ptr::from_ref(pdev).cast::<pci::Device<device::Bound>>() }
}

/// The config space of a function, locked until this is dropped: processes do not reach it, and
/// nobody else resets the function, as the PCI core takes the same lock for that.
///
/// Not for the callbacks of [`ResetHandlers`]: who calls those has it.
///
/// # Invariants
///
/// The lock of `pdev` is held, and is this value's to give back. If `saved`, the config space was saved
/// under it.
pub struct ConfigLock<'a> {
    pdev: &'a pci::Device,
    saved: Cell<bool>,
}

impl<'a> ConfigLock<'a> {
    /// Takes the lock, unless somebody else has it.
    ///
    /// There is no way to wait for it: who resets a function has it for seconds, and may need
    /// memory that somebody who waits in the course of taking memory back would have to give.
    pub fn try_new(pdev: &'a pci::Device) -> Option<Self> {
        // SAFETY: A reference to a device keeps it valid.
        let taken = unsafe { bindings::pci_cfg_access_trylock(as_raw(pdev)) };
        // INVARIANT: Taken just now, and nothing is saved. Nothing is made where it was not: that would
        // give back what somebody else has.
        taken.then(|| Self {
            pdev,
            saved: Cell::new(false),
        })
    }

    /// Resets the function by itself (FLR), and waits until it answers again. `ENOTTY` where it cannot
    /// be reset this way. Its [`ResetHandlers`] are not called. Sleeps.
    ///
    /// Its BARs can be reached afterwards, but it has neither the bus nor messages to interrupt by. The rest
    /// of its config space becomes what it was before when the lock is dropped, the bus master bit included:
    /// that takes the lock of the function's interrupts, under which others allocate, and is not
    /// for those whom memory management waits for.
    pub fn reset_function(&self) -> Result {
        let pdev = as_raw(self.pdev);
        // SAFETY: A reference to a device keeps it valid.
        if !unsafe { bindings::pci_device_is_present(pdev) } {
            // There is nothing to save.
            return Err(ENODEV);
        }
        // What an earlier reset has saved is saved anew.
        self.saved.set(false);
        // SAFETY: `pdev` is that of a `pci::Device`, to which `self` has a reference: the device is valid. Its
        // config space is locked by this value (type invariant), so that nobody else saves or restores it.
        to_result(unsafe { bindings::pci_save_state(pdev) })?;
        // SAFETY: A reference to a device keeps it valid. Config space was saved just now, and by the type
        // invariant nobody else saves it meanwhile.
        let command =
            unsafe { (*pdev).saved_config_space[(bindings::PCI_COMMAND / DWORD) as usize] };
        if command == u32::MAX {
            // The function answers no more, and this is nothing to restore.
            return Err(ENODEV);
        }
        // INVARIANT: It was saved just now.
        self.saved.set(true);
        // SAFETY: A reference to a device keeps it valid. By the type invariant nobody else resets it
        // meanwhile.
        to_result(unsafe { bindings::pcie_reset_flr(pdev, false) })?;
        self.restore_bars()
    }

    /// Makes the function answer at the addresses that it had when its config space was saved.
    fn restore_bars(&self) -> Result {
        let write = |offset: u32, mask: u32| {
            let pdev = as_raw(self.pdev);
            // SAFETY: A reference to a device keeps it valid. By the type invariant nobody else saves its
            // config space meanwhile.
            let saved = unsafe { (*pdev).saved_config_space[(offset / DWORD) as usize] };
            // SAFETY: A reference to a device keeps it valid.
            let code =
                unsafe { bindings::pci_write_config_dword(pdev, offset as i32, saved & mask) };
            // Errors of the bus are positive.
            if code == 0 {
                Ok(())
            } else {
                Err(EIO)
            }
        };
        for bar in 0..bindings::PCI_STD_NUM_BARS {
            write(bindings::PCI_BASE_ADDRESS_0 + bar * DWORD, u32::MAX)?;
        }
        // The other half is the status, of which what is written as one is cleared.
        let command = u32::from(u16::MAX);
        write(
            bindings::PCI_COMMAND,
            command & !bindings::PCI_COMMAND_MASTER,
        )
    }
}

impl Drop for ConfigLock<'_> {
    fn drop(&mut self) {
        let pdev = as_raw(self.pdev);
        if self.saved.get() {
            // SAFETY: By the type invariant its config space was saved, and nobody else restores it
            // meanwhile.
            unsafe { bindings::pci_restore_state(pdev) };
        }
        // SAFETY: By the type invariant the lock is ours to give back.
        unsafe { bindings::pci_cfg_access_unlock(pdev) }
    }
}

/// A driver that is told when somebody else resets a function that is bound to it: who writes to
/// `reset` in sysfs, or resets the bus above. Register it by [`Adapter`].
///
/// Both callbacks run with the device lock held, so that neither `probe` nor `unbind` runs at the
/// same time. They may sleep.
pub trait ResetHandlers: pci::Driver {
    /// The function is about to be reset. It may still be reached, unless the bus above a bridge is
    /// reset: that bridge was closed before. From when this returns until [`Self::reset_done`] it
    /// cannot be.
    fn reset_prepare<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
    );

    /// The function was reset, or the attempt failed. Its config space is what it was before.
    fn reset_done<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
    );
}

/// What a driver does once for all functions.
pub trait Loading {
    /// The driver is about to be registered.
    ///
    /// # Safety
    ///
    /// It is not registered, and was not loaded, or was unloaded since. Where this succeeds [`Self::unload`] is
    /// called before the module goes.
    unsafe fn load() -> Result;

    /// It was unregistered, or could not be registered.
    ///
    /// # Safety
    ///
    /// It was loaded, and no function is bound to it, or will be.
    unsafe fn unload();
}

/// A [`pci::Adapter`] for a driver with [`ResetHandlers`] and [`Loading`], for [`kernel::module_driver`].
pub struct Adapter<T: ResetHandlers + Loading>(PhantomData<T>);

// SAFETY: The driver is registered by `pci::Adapter`, with that layout: `struct pci_driver`, in which
// it says where the `struct device_driver` is; its `probe` stores a `T::Data`.
unsafe impl<T: ResetHandlers + Loading> DriverLayout for Adapter<T> {
    type DriverType = bindings::pci_driver;
    type DriverData<'bound> = T::Data<'bound>;
    const DEVICE_DRIVER_OFFSET: usize = <pci::Adapter<T> as DriverLayout>::DEVICE_DRIVER_OFFSET;
}

// SAFETY: `register` succeeds only if that of `pci::Adapter` did, and `unregister` is that of
// `pci::Adapter`.
unsafe impl<T: ResetHandlers + Loading> RegistrationOps for Adapter<T> {
    unsafe fn register(
        pdrv: &Opaque<Self::DriverType>,
        name: &'static CStr,
        module: &'static ThisModule,
    ) -> Result {
        // SAFETY: The driver is not registered yet, so that nobody else reads it. The handlers are
        // static, and `pci::Adapter` does not touch the field.
        unsafe { (*pdrv.get()).err_handler = &Self::HANDLERS };
        // SAFETY: The caller registers the driver, which is not registered then. It unregisters it before the
        // module goes, and where it cannot be registered it is unloaded here.
        unsafe { T::load()? };
        // SAFETY: The caller keeps `pdrv` pinned and valid until `unregister`.
        let registered = unsafe { pci::Adapter::<T>::register(pdrv, name, module) };
        registered.inspect_err(|_| {
            // SAFETY: It was loaded above, and a driver that is not registered has no function.
            unsafe { T::unload() }
        })
    }

    unsafe fn unregister(pdrv: &Opaque<Self::DriverType>) {
        // SAFETY: The caller has registered `pdrv`, which was done by `pci::Adapter`.
        unsafe { pci::Adapter::<T>::unregister(pdrv) }
        // SAFETY: `register` loaded it, and the driver core has unbound all functions.
        unsafe { T::unload() }
    }
}

impl<T: ResetHandlers + Loading> Adapter<T> {
    const HANDLERS: bindings::pci_error_handlers = bindings::pci_error_handlers {
        reset_prepare: Some(Self::reset_prepare_callback),
        reset_done: Some(Self::reset_done_callback),
        // Not by any of these: Xen's PCI frontend calls them without the device lock, which is what
        // keeps a driver's data.
        error_detected: None,
        mmio_enabled: None,
        slot_reset: None,
        resume: None,
        cor_error_detected: None,
    };

    /// # Safety
    ///
    /// Only for the PCI core: `pdev` must be valid, locked, and `pci_dev::driver` the driver that was
    /// registered with [`Self::HANDLERS`].
    unsafe extern "C" fn reset_prepare_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: The caller vouches for the same.
        unsafe { Self::tell(pdev, T::reset_prepare) }
    }

    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe extern "C" fn reset_done_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: The caller vouches for the same.
        unsafe { Self::tell(pdev, T::reset_done) }
    }

    /// Calls `callback` with a device and its driver's data, unless there is none yet.
    ///
    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe fn tell(
        pdev: *mut bindings::pci_dev,
        callback: for<'bound> fn(&'bound pci::Device<device::Core<'_>>, Pin<&T::Data<'bound>>),
    ) {
        // SAFETY: The caller vouches for a valid device.
        let data = unsafe { bindings::dev_get_drvdata(&raw const (*pdev).dev) };
        if data.is_null() {
            // A driver that resets its function with the device lock held while it probes.
            return;
        }
        // SAFETY: The caller vouches for a valid device, and for its lock, with which it is in the
        // core context.
        let pdev = unsafe { &*pdev.cast::<pci::Device<device::CoreInternal<'_>>>() };
        // SAFETY: `pci_dev::driver` is ours, so that what is not null was stored by the `probe` of
        // `pci::Adapter<T>`: a `T::Data`. It goes after `remove`, when `pci_dev::driver` was cleared.
        // All of that is done under the device lock, which the caller holds until this has returned:
        // the data stays, and no other thread has borrowed it.
        let data = unsafe { pdev.as_ref().drvdata_borrow::<T::Data<'_>>() };
        callback(pdev, data);
    }
}
