// SPDX-License-Identifier: GPL-2.0

//! What a driver does to a PCI function outside the callbacks of the PCI core, and resets, by the driver and
//! by others, and errors of the bus (for `rust/kernel/pci.rs`).

use super::cpu_hotplug;
use crate::bindings;
use core::{
    cell::Cell,
    marker::PhantomData,
    num::NonZero,
    ops::Deref,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    container_of,
    device,
    device::DeviceContext,
    dma::DmaMask,
    driver::{
        DriverLayout,
        RegistrationOps, //
    },
    error::to_result,
    ffi::c_int,
    io::poll::read_poll_timeout,
    pci,
    prelude::*,
    sync::aref::ARef,
    time::Delta,
    types::Opaque, //
};

/// Bytes of a word of config space.
const DWORD: u32 = 4;

/// The registers of a function that are its BARs.
const NUM_BARS: usize = bindings::PCI_STD_NUM_BARS as usize;

/// Which word of config space the first of them is, and which one the command register is in.
const FIRST_BAR: usize = (bindings::PCI_BASE_ADDRESS_0 / DWORD) as usize;
const COMMAND: usize = (bindings::PCI_COMMAND / DWORD) as usize;

/// The word that says who has built the adapter: the only one that may be all ones.
const SUBSYSTEM: usize = (bindings::PCI_SUBSYSTEM_VENDOR_ID / DWORD) as usize;

/// How often a function that was reset is asked whether it is there.
const READY_POLL: Delta = Delta::from_millis(10);

/// The raw pointer of a PCI device.
fn as_raw<Ctx: DeviceContext>(pdev: &pci::Device<Ctx>) -> *mut bindings::pci_dev {
    // `pci::Device` is a transparent wrapper of `struct pci_dev`.
    ptr::from_ref(pdev).cast_mut().cast()
}

/// Sets which addresses a function can reach, for all of DMA.
///
/// # Safety
///
/// Nobody allocates or maps memory for the function meanwhile.
pub unsafe fn set_dma_mask(pdev: &pci::Device<device::Bound>, mask: DmaMask) -> Result {
    // SAFETY: A reference to a device keeps it valid. The caller vouches that nobody allocates or maps memory for it
    // meanwhile, which would read the masks.
    to_result(unsafe {
        bindings::dma_set_mask_and_coherent(&raw mut (*as_raw(pdev)).dev, mask.value())
    })
}

/// Enables a function to decode its memory, at the addresses that are its own also where it has lost them without a driver
/// to restore them. Sleeps.
pub fn enable_device_mem(pdev: &pci::Device<device::Core<'_>>) -> Result {
    // Before it decodes memory: what has lost its BARs would do so at the addresses of others.
    ConfigLock::new(pdev).restore_lost()?;
    pdev.enable_device_mem()?;
    let config = ConfigLock::new(pdev);
    // It may have been without power until now.
    config.restore_lost()?;
    // Where it was enabled before, the PCI core only counts.
    config.decode_memory()
}

/// The number that a function has among all that there are, if it has one (Device Serial Number). It is read from
/// config space.
pub fn serial_number(pdev: &pci::Device<device::Bound>) -> Option<NonZero<u64>> {
    // SAFETY: A reference to a device keeps it valid.
    NonZero::new(unsafe { bindings::pci_get_dsn(as_raw(pdev)) })
}

/// Another function of the slot that a function is in, or any of its bus where functions have numbers of eight bits
/// (ARI), if there is one.
pub fn beside<Ctx: DeviceContext>(
    pdev: &pci::Device<Ctx>,
    function: u8,
) -> Option<ARef<pci::Device>> {
    let own = as_raw(pdev);
    // SAFETY: A reference to a device keeps it valid, and with it its bus; its place does not change.
    let (bus, devfn) = unsafe { ((*own).bus, (*own).devfn) };
    // SAFETY: The device, which is valid, keeps its bus.
    let ari = unsafe { bindings::pci_ari_enabled(bus) };
    let devfn = place_beside(devfn, function, ari)?;
    // Not `pci_get_slot`: error recovery takes RTNL with `pci_bus_sem` held.
    // SAFETY: The device, which is valid, keeps its bus, whose number does not change.
    let (domain, number) = unsafe { (bindings::pci_domain_nr(bus), (*bus).number) };
    // SAFETY: The function takes numbers, and a count of the device that it finds.
    let found = unsafe { bindings::pci_get_domain_bus_and_slot(domain, number.into(), devfn) };
    let found = NonNull::new(found)?;
    // SAFETY: The count of a valid device is ours; `pci::Device` is a transparent wrapper, which counts in the same way.
    Some(unsafe { ARef::from_raw(found.cast()) })
}

/// Slot and function of that function beside the one at `devfn`, if there can be one.
fn place_beside(devfn: u32, function: u8, ari: bool) -> Option<u32> {
    match function {
        _ if ari => Some(function.into()),
        // `PCI_DEVFN(PCI_SLOT(devfn), function)`.
        0..8 => Some((devfn & 0xf8) | u32::from(function)),
        _ => None,
    }
}

/// The config space of a function, which is locked for as long as there is a reference to this.
///
/// What is changed here is part of a register with other bits, and read and written in two accesses. So does who
/// resets the function, who also writes to it what it had before: neither is done while the other is, nor do processes
/// reach it meanwhile. Power management does not take the lock: it saves and restores config space while the machine
/// goes to sleep and wakes up, and it is the driver that is not to be here then ([`SleepHandlers`]). Where it is all the
/// same, what is in config space may be the one's or the other's; memory is in no danger, as what is saved has its place
/// for as long as the device is there.
///
/// # Invariants
///
/// The lock of `pdev` is held.
pub struct Config<'a, Ctx: DeviceContext = device::Normal> {
    pdev: &'a pci::Device<Ctx>,
}

impl<Ctx: DeviceContext> Config<'_, Ctx> {
    /// Takes the right to start transactions on the bus from the function: it must neither read nor write
    /// memory any more, nor interrupt.
    pub fn clear_master(&self) {
        // SAFETY: A reference to a device keeps it valid; config space of one that is gone takes
        // writes and does nothing.
        unsafe { bindings::pci_clear_master(as_raw(self.pdev)) }
    }

    /// The command register. `ENODEV` where the function does not answer.
    fn command(&self) -> Result<u32> {
        let pdev = as_raw(self.pdev);
        // SAFETY: A reference to a device keeps it valid.
        if !unsafe { bindings::pci_device_is_present(pdev) } {
            return Err(ENODEV);
        }
        let mut command = u16::MAX;
        // SAFETY: A reference to a device keeps it valid, and the value is a local.
        unsafe {
            bindings::pci_read_config_word(pdev, bindings::PCI_COMMAND as i32, &raw mut command)
        };
        // It may have gone just now.
        if command == u16::MAX {
            Err(ENODEV)
        } else {
            Ok(command.into())
        }
    }

    /// Whether the function answers, and decodes memory: `ENODEV` where not.
    fn is_reachable(&self) -> Result {
        if self.command()? & bindings::PCI_COMMAND_MEMORY == 0 {
            Err(ENODEV)
        } else {
            Ok(())
        }
    }

    /// Writes the command register.
    fn set_command(&self, command: u32) -> Result {
        // SAFETY: A reference to a device keeps it valid.
        let code = unsafe {
            bindings::pci_write_config_word(
                as_raw(self.pdev),
                bindings::PCI_COMMAND as i32,
                command as u16,
            )
        };
        written(code)
    }

    /// Waits until the function answers, for up to `timeout`: after a reset of the bus it may ask for time, and the PCI
    /// core waits for one function of a bus only. `ENODEV` where it does not answer, at once where it was taken out. Sleeps.
    pub fn wait_until_ready(&self, timeout: Delta) -> Result {
        let answers = || {
            // SAFETY: A reference to a device keeps it valid. Who takes a function out writes this without a lock.
            let state = unsafe { ptr::read_volatile(&raw const (*as_raw(self.pdev)).error_state) };
            if state == bindings::pci_channel_io_perm_failure {
                return Err(ENODEV);
            }
            Ok(self.command().is_ok())
        };
        read_poll_timeout(answers, |answers| *answers, READY_POLL, timeout)
            .map(|_| ())
            .map_err(|_| ENODEV)
    }

    /// Where its BARs are.
    fn bars(&self) -> Bars {
        let mut bars = Bars::default();
        for (bar, address) in (0..).zip(&mut bars) {
            let offset = bindings::PCI_BASE_ADDRESS_0 + bar * DWORD;
            // SAFETY: A reference to a device keeps it valid, and the value is a local.
            unsafe {
                bindings::pci_read_config_dword(
                    as_raw(self.pdev),
                    offset as i32,
                    ptr::from_mut(address),
                )
            };
        }
        bars
    }

    /// Where its BARs are to be: at what the PCI core has given it.
    fn places(&self) -> Places {
        let pdev = as_raw(self.pdev);
        let mut places = Places::default();
        // SAFETY: A reference to a device keeps it valid. The bit is set before anybody else knows the device.
        if unsafe { bindings::pci_dev::is_virtfn_raw(pdev) } != 0 {
            // Where those are is said by the function that they are of.
            return places;
        }
        for bar in 0..NUM_BARS {
            // SAFETY: A reference to a device keeps it valid, and its resources are part of it.
            let resource = unsafe { &raw mut (*pdev).resource[bar] };
            // SAFETY: A reference to a device keeps it valid, and with it its resources. The PCI core moves none of a function
            // that has a driver, or gets one.
            let (flags, parent) = unsafe { ((*resource).flags as u32, (*resource).parent) };
            // As `pci_std_update_resource` has it; and what nobody has claimed is not the function's.
            let fixed = bindings::IORESOURCE_UNSET | bindings::IORESOURCE_PCI_FIXED;
            if flags == 0 || flags & fixed != 0 || parent.is_null() {
                continue;
            }
            let mut region = bindings::pci_bus_region::default();
            // SAFETY: The device, which is valid, keeps its bus, and has the resource; the region is a local.
            unsafe {
                bindings::pcibios_resource_to_bus((*pdev).bus, &raw mut region, resource);
            }
            let mask = match flags & bindings::IORESOURCE_IO {
                0 => bindings::PCI_BASE_ADDRESS_MEM_MASK as u32,
                _ => bindings::PCI_BASE_ADDRESS_IO_MASK as u32,
            };
            let address = region.start as u32 & mask;
            places[bar] = Some(Place { address, mask });
            if flags & bindings::IORESOURCE_MEM_64 != 0 {
                if let Some(upper) = places.get_mut(bar + 1) {
                    *upper = Some(Place {
                        address: (region.start >> 32) as u32,
                        mask: u32::MAX,
                    });
                }
            }
        }
        places
    }

    /// Restores what `pci_dev` has saved, the bus master bit excepted.
    fn restore(&self) {
        let pdev = as_raw(self.pdev);
        // SAFETY: A reference to a device keeps it valid. Config space is locked (type invariant), so that nobody resets the
        // function and saves anything there.
        unsafe { (*pdev).saved_config_space[COMMAND] &= !bindings::PCI_COMMAND_MASTER };
        // SAFETY: A reference to a device keeps it valid, and what it restores is part of it. Config space is locked (type
        // invariant): nobody else does so for a reset.
        unsafe { bindings::pci_restore_state(pdev) };
        // For the PCI core, which notes who is one.
        self.clear_master();
    }

    /// Gives a function what config space it had when `saved` was kept, the bus master bit excepted, where
    /// it was reset by others who have not given it that, or gave it something else: the PCI core, where it recovers
    /// from an error of the bus, and who resets a function in the middle of that. `ENODEV` where it does not answer,
    /// `EINVAL` where `saved` is another's.
    pub fn give_back(&self, saved: &SavedState) -> Result {
        let pdev = as_raw(self.pdev);
        if as_raw(&*saved.pdev) != pdev {
            return Err(EINVAL);
        }
        let command = self.command()?;
        if command & bindings::PCI_COMMAND_MEMORY != 0 && self.bars() == saved.bars {
            return Ok(());
        }
        // SAFETY: A reference to a device keeps it valid, and by its type invariant `saved` is such a state, of this device,
        // which is copied. Config space is locked (type invariant): nobody else does so for a reset.
        to_result(unsafe { bindings::pci_load_saved_state(pdev, saved.state.as_ptr()) })?;
        self.restore();
        self.is_reachable()?;
        if self.bars() == saved.bars {
            Ok(())
        } else {
            Err(EIO)
        }
    }

    /// Lets the function assert its pin, or not. What it has to tell stays: it asserts the pin for it as soon as
    /// it may. Does not sleep.
    pub fn enable_pin(&self, enable: bool) {
        // SAFETY: A reference to a device keeps it valid; config space of one that is gone takes
        // writes and does nothing.
        unsafe { bindings::pci_intx(as_raw(self.pdev), enable.into()) }
    }
}

impl Config<'_, device::Bound> {
    /// Gives the function the right to start transactions on the bus.
    pub fn set_master(&self) {
        // SAFETY: A reference to a device keeps it valid.
        unsafe { bindings::pci_set_master(as_raw(self.pdev)) }
    }
}

/// What BARs are at, as config space has it.
type Bars = [u32; NUM_BARS];

/// Config space, as `pci_dev` saves it.
type Words = [u32; 16];

/// What the register of a BAR has to say of where that is.
#[derive(Clone, Copy)]
struct Place {
    address: u32,
    mask: u32,
}

/// The same of each of them; none where the PCI core has given it no place.
type Places = [Option<Place>; NUM_BARS];

/// Whether BARs are where they are to be.
fn are_at(bars: &Bars, places: &Places) -> bool {
    bars.iter()
        .zip(places)
        .all(|(bar, place)| place.is_none_or(|place| bar & place.mask == place.address))
}

/// The BARs of those words.
fn bars_of(words: &Words) -> Bars {
    let mut bars = Bars::default();
    bars.copy_from_slice(&words[FIRST_BAR..][..NUM_BARS]);
    bars
}

/// What became of a write to config space. Errors of the bus are positive.
fn written(code: c_int) -> Result {
    if code == 0 {
        Ok(())
    } else {
        Err(EIO)
    }
}

/// A copy of a function's config space ([`ConfigLock::keep`]).
///
/// # Invariants
///
/// `state` was made of `pdev` by `pci_store_saved_state`, and is this value's to free.
pub struct SavedState {
    pdev: ARef<pci::Device>,
    state: NonNull<bindings::pci_saved_state>,
    bars: Bars,
}

// SAFETY: It is memory that is read and freed, from anywhere.
unsafe impl Send for SavedState {}
// SAFETY: Whoever has a reference only reads.
unsafe impl Sync for SavedState {}

impl Drop for SavedState {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the state, which was allocated by `kzalloc`, is this value's to free.
        unsafe { bindings::kfree(self.state.as_ptr().cast()) }
    }
}

/// The config space of a function, locked until this is dropped: processes do not reach it, and
/// nobody else resets the function, as the PCI core takes the same lock for that. See [`Config`] for who does not.
///
/// Not for the callbacks of [`ResetHandlers`]: who calls those has it.
///
/// # Invariants
///
/// The lock is this value's to give back. If `saved`, the config space was saved under it.
pub struct ConfigLock<'a, Ctx: DeviceContext = device::Normal> {
    config: Config<'a, Ctx>,
    saved: Cell<bool>,
}

impl<'a, Ctx: DeviceContext> ConfigLock<'a, Ctx> {
    /// Takes the lock. Sleeps, for as long as somebody else has it: who resets a function has it for seconds.
    ///
    /// Not for those whom he may wait for: who takes memory back, or has the lock already.
    pub fn new(pdev: &'a pci::Device<Ctx>) -> Self {
        // SAFETY: A reference to a device keeps it valid.
        unsafe { bindings::pci_cfg_access_lock(as_raw(pdev)) };
        // INVARIANT: Taken just now, and nothing is saved.
        Self {
            config: Config { pdev },
            saved: Cell::new(false),
        }
    }

    /// Takes the lock, unless somebody else has it. May be called from any context.
    pub fn try_new(pdev: &'a pci::Device<Ctx>) -> Option<Self> {
        // SAFETY: A reference to a device keeps it valid.
        let taken = unsafe { bindings::pci_cfg_access_trylock(as_raw(pdev)) };
        // INVARIANT: Taken just now, and nothing is saved. Nothing is made where it was not: that would
        // give back what somebody else has.
        taken.then(|| Self {
            config: Config { pdev },
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
        let pdev = as_raw(self.config.pdev);
        // What an earlier reset has saved is saved anew.
        self.saved.set(false);
        self.save()?;
        // INVARIANT: It was saved just now.
        self.saved.set(true);
        // SAFETY: A reference to a device keeps it valid. By the type invariant nobody else resets it
        // meanwhile.
        to_result(unsafe { bindings::pcie_reset_flr(pdev, false) })?;
        self.restore_bars()
    }

    /// Gives a function without a driver back what it lost since the PCI core found it, where its BARs are not where they are
    /// to be: it was reset by who recovered from an error of the bus, or was without power. Where that has been saved since
    /// in place of what there was before (a reset, or sleep, without a driver), it is given its BARs only. It
    /// may decode memory then or not. What does not answer yet is left as it is.
    fn restore_lost(&self) -> Result {
        let Ok(command) = self.config.command() else {
            return Ok(());
        };
        let places = self.config.places();
        if are_at(&self.config.bars(), &places) {
            return Ok(());
        }
        let pdev = as_raw(self.config.pdev);
        // It is not to answer at addresses of others meanwhile.
        let decodes = bindings::PCI_COMMAND_MEMORY | bindings::PCI_COMMAND_IO;
        self.config
            .set_command(command & !(decodes | bindings::PCI_COMMAND_MASTER))?;
        // SAFETY: A reference to a device keeps it valid. Its config space is locked by this value (type invariant), so that
        // nobody resets the function and saves anything there.
        let saved: Words = unsafe { (*pdev).saved_config_space };
        if are_at(&bars_of(&saved), &places) {
            self.config.restore();
        } else {
            for (bar, place) in (0..).zip(&places) {
                let Some(place) = place else {
                    continue;
                };
                let offset = bindings::PCI_BASE_ADDRESS_0 + bar * DWORD;
                // SAFETY: A reference to a device keeps it valid.
                let code =
                    unsafe { bindings::pci_write_config_dword(pdev, offset as i32, place.address) };
                written(code)?;
            }
        }
        if are_at(&self.config.bars(), &places) {
            Ok(())
        } else {
            Err(EIO)
        }
    }

    /// Sees to it that a function which is enabled decodes memory. `ENODEV` where it does not answer.
    fn decode_memory(&self) -> Result {
        let command = self.config.command()?;
        if command & bindings::PCI_COMMAND_MEMORY != 0 {
            return Ok(());
        }
        self.config
            .set_command(command | bindings::PCI_COMMAND_MEMORY)
    }

    /// Keeps a copy of config space as it is now, for [`Config::give_back`]. `ENODEV` as for [`Self::save`].
    pub fn keep(&self) -> Result<SavedState> {
        let words = self.save()?;
        let pdev = as_raw(self.config.pdev);
        // SAFETY: A reference to a device keeps it valid; a context is a marker, and each device is one without.
        let counted: &pci::Device = unsafe { &*pdev.cast() };
        // SAFETY: `pdev` is that of a `pci::Device`, to which `self` has a reference: the device is valid, and what is
        // copied is part of it. Its config space is locked by this value (type invariant): nobody saves it for a reset.
        let state = unsafe { bindings::pci_store_saved_state(pdev) };
        // INVARIANT: It was made of this device just now, and is nobody else's.
        Ok(SavedState {
            pdev: ARef::from(counted),
            state: NonNull::new(state).ok_or(ENOMEM)?,
            bars: bars_of(&words),
        })
    }

    /// Saves config space as it is now, for who restores it soon. `ENODEV` where the function does not answer, or did not in
    /// the middle of that, or was reset by others who have not restored it yet: it decodes no memory then. Gives what was
    /// saved.
    fn save(&self) -> Result<Words> {
        let pdev = as_raw(self.config.pdev);
        // What was saved before stays.
        self.config.is_reachable()?;
        // SAFETY: `pdev` is that of a `pci::Device`, to which `self` has a reference: the device is valid, and what is saved
        // has its place there. Its config space is locked by this value (type invariant): nobody else does so for a reset.
        to_result(unsafe { bindings::pci_save_state(pdev) })?;
        // SAFETY: A reference to a device keeps it valid, and what is saved has its place there.
        let words: Words = unsafe { (*pdev).saved_config_space };
        let lost = |(number, word): (usize, &u32)| *word == u32::MAX && number != SUBSYSTEM;
        if words.iter().enumerate().any(lost) {
            return Err(ENODEV);
        }
        // One that went and came back was reset by that.
        self.config.is_reachable()?;
        Ok(words)
    }

    /// Makes the function answer at the addresses that it had when its config space was saved.
    fn restore_bars(&self) -> Result {
        let write = |offset: u32, mask: u32| {
            let pdev = as_raw(self.config.pdev);
            // SAFETY: A reference to a device keeps it valid. By the type invariant nobody resets it and saves its config
            // space meanwhile.
            let saved = unsafe { (*pdev).saved_config_space[(offset / DWORD) as usize] };
            // SAFETY: A reference to a device keeps it valid.
            written(unsafe { bindings::pci_write_config_dword(pdev, offset as i32, saved & mask) })
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

impl<'a, Ctx: DeviceContext> Deref for ConfigLock<'a, Ctx> {
    type Target = Config<'a, Ctx>;

    fn deref(&self) -> &Self::Target {
        &self.config
    }
}

impl<Ctx: DeviceContext> Drop for ConfigLock<'_, Ctx> {
    fn drop(&mut self) {
        let pdev = as_raw(self.config.pdev);
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
/// same time, and with config space locked. They may sleep.
pub trait ResetHandlers: pci::Driver {
    /// The function is about to be reset. It may still be reached, unless the bus above a bridge is
    /// reset: that bridge was closed before. From when this returns until [`Self::reset_done`] it
    /// cannot be.
    fn reset_prepare<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        config: &Config<'_>,
    );

    /// The function was reset, or the attempt failed. Its config space is what it was before, unless it could not be
    /// reached then.
    fn reset_done<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        config: &Config<'_>,
    );
}

/// What an error left of the way to a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// It can be reached. Transactions were lost.
    Normal,
    /// It is not to be reached before [`ErrorHandlers::slot_reset`]: neither it nor its config space answers.
    Frozen,
    /// The PCI core does nothing more about it.
    PermFailure,
}

impl Channel {
    fn from_raw(state: bindings::pci_channel_state_t) -> Self {
        match state {
            bindings::pci_channel_io_normal => Self::Normal,
            bindings::pci_channel_io_frozen => Self::Frozen,
            // Nothing is to be expected of a state that is not known.
            _ => Self::PermFailure,
        }
    }
}

/// A driver that is told of errors of the bus (AER, DPC, EEH), which the PCI core recovers from by a reset. Register it
/// by [`Adapter`].
///
/// All callbacks run with the device lock held, so that neither `probe` nor `unbind` runs at the same time; between them
/// either may. They may sleep. Config space is not locked, and may be locked by them: they are not registered where that or
/// the device lock is otherwise, which is on s390 (it has locked config space) and in a PV guest of Xen (it has locked
/// nothing).
pub trait ErrorHandlers: pci::Driver {
    /// There was an error. Where the channel is frozen the bus is reset next, and [`Self::slot_reset`] called; else that
    /// is done only if another driver needs it, and [`Self::resume`] comes next. The PCI core has all of its buses locked
    /// meanwhile (`pci_bus_sem`): what takes long is to be left to somebody else. Where the PCI core gives up, as for a
    /// function beside this one that has no driver, this is called again with [`Channel::PermFailure`]; the bus may have
    /// been reset by then, and the function be there all the same.
    fn error_detected<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
        channel: Channel,
    );

    /// The bus was reset. The function can be reached, at the latest when it was waited for
    /// ([`Config::wait_until_ready`]), and has to be given its config space, see [`Config::give_back`]. Where it does not
    /// work this fails, and the function is given up.
    fn slot_reset<'bound>(
        dev: &'bound pci::Device<device::Core<'_>>,
        this: Pin<&Self::Data<'bound>>,
    ) -> Result;

    /// The PCI core is done with it, whether it has reset the bus or not: work goes on.
    fn resume<'bound>(dev: &'bound pci::Device<device::Core<'_>>, this: Pin<&Self::Data<'bound>>);
}

/// A driver that is told when the machine sleeps. Register it by [`Adapter`].
///
/// Both callbacks run with the device lock held, so that neither `probe` nor `unbind` runs at the same time. They may
/// sleep. Processes are frozen; what the driver queues is not.
pub trait SleepHandlers: pci::Driver {
    /// The machine is about to sleep, to be switched off with its memory saved, or to be what was saved. The function
    /// can still be reached. The kernel that it is given to next may not know this one's memory: it is to touch none.
    fn suspend<'bound>(dev: &'bound pci::Device<device::Core<'_>>, this: Pin<&Self::Data<'bound>>);

    /// It was not, or is awake, and everything else is, too: devices can be made again. Config space is what it was
    /// before; of the rest of the function nothing may be. Also called where [`Self::suspend`] was not.
    fn complete<'bound>(dev: &'bound pci::Device<device::Core<'_>>, this: Pin<&Self::Data<'bound>>);
}

/// A driver that is told when the machine is about to end, or to start another kernel. Register it by [`Adapter`].
///
/// The callback runs with the device lock held, so that neither `probe` nor `unbind` runs at the same time. It may sleep.
/// What the driver queues is still done.
pub trait ShutdownHandler: pci::Driver {
    /// The function is not used by this kernel any more, and memory that it knows may be another one's: it is to touch
    /// none. Resets by others may still follow, and `unbind`.
    fn shutdown<'bound>(dev: &'bound pci::Device<device::Core<'_>>, this: Pin<&Self::Data<'bound>>);
}

/// A driver whose functions follow processors that come and go.
///
/// # Safety
///
/// `state` always gives the same, which is that of no other driver, and which nobody else registers or unregisters.
pub unsafe trait FollowsProcessors {
    /// Who follows them.
    type Follower: cpu_hotplug::Follower;

    /// What the state is called.
    const STATE: &'static CStr;

    /// The state of hotplug that all functions have in common. It is registered for as long as the driver is, where it
    /// can be: hotplug has few.
    fn state() -> &'static cpu_hotplug::State<Self::Follower>;
}

/// All that a driver is told of which is registered by an [`Adapter`].
pub trait Handlers:
    ResetHandlers + ErrorHandlers + SleepHandlers + ShutdownHandler + FollowsProcessors
{
}

impl<T: ResetHandlers + ErrorHandlers + SleepHandlers + ShutdownHandler + FollowsProcessors>
    Handlers for T
{
}

/// A [`pci::Adapter`] for a driver with [`Handlers`], for [`kernel::module_driver`].
pub struct Adapter<T: Handlers>(PhantomData<T>);

// SAFETY: The driver is registered by `pci::Adapter`, with that layout: `struct pci_driver`, in which
// it says where the `struct device_driver` is; its `probe` stores a `T::Data`.
unsafe impl<T: Handlers> DriverLayout for Adapter<T> {
    type DriverType = bindings::pci_driver;
    type DriverData<'bound> = T::Data<'bound>;
    const DEVICE_DRIVER_OFFSET: usize = <pci::Adapter<T> as DriverLayout>::DEVICE_DRIVER_OFFSET;
}

// SAFETY: `register` succeeds only if that of `pci::Adapter` did, and `unregister` is that of
// `pci::Adapter`.
unsafe impl<T: Handlers> RegistrationOps for Adapter<T> {
    unsafe fn register(
        pdrv: &Opaque<Self::DriverType>,
        name: &'static CStr,
        module: &'static ThisModule,
    ) -> Result {
        // SAFETY: The driver is not registered yet, so that nobody else reads it. The handlers are
        // static, and `pci::Adapter` does not touch the fields.
        unsafe {
            (*pdrv.get()).err_handler = Self::handlers();
            (*pdrv.get()).driver.pm = &Self::POWER;
            (*pdrv.get()).shutdown = Some(Self::shutdown_callback);
        }
        // SAFETY: The caller registers the driver, which is not registered then, and nor is its state, which is no other's.
        // It unregisters it before the module goes, and where it cannot be registered the state is unregistered here.
        if let Err(error) = unsafe { T::state().register(T::STATE) } {
            // Where an interrupt arrives is a matter of speed only. There is no device yet.
            pr_warn!("processors are not followed: {:?}\n", error);
        }
        // SAFETY: The caller keeps `pdrv` pinned and valid until `unregister`.
        let registered = unsafe { pci::Adapter::<T>::register(pdrv, name, module) };
        registered.inspect_err(|_| {
            // SAFETY: Who follows does so for a function, in a `Devres`, and a driver that is not registered has none.
            unsafe { T::state().unregister() }
        })
    }

    unsafe fn unregister(pdrv: &Opaque<Self::DriverType>) {
        // SAFETY: The caller has registered `pdrv`, which was done by `pci::Adapter`.
        unsafe { pci::Adapter::<T>::unregister(pdrv) }
        // SAFETY: Who follows does so for a function, in a `Devres`, and the driver core has unbound all functions.
        unsafe { T::state().unregister() }
    }
}

impl<T: Handlers> Adapter<T> {
    /// The handlers for this machine.
    fn handlers() -> &'static bindings::pci_error_handlers {
        // SAFETY: What kind of machine this is can always be asked.
        let frontend = unsafe { bindings::xen_pv_domain() && !bindings::xen_initial_domain() };
        if frontend || cfg!(CONFIG_S390) {
            &Self::RESET_HANDLERS
        } else {
            &Self::HANDLERS
        }
    }

    /// Without those for errors. Of a PV guest of Xen: its PCI frontend, which domain 0 does not have, calls those without
    /// the device lock, which is what keeps a driver's data. And of s390, which calls them at times with config space
    /// locked (`zpci_event_io_failure`), for which they would wait.
    const RESET_HANDLERS: bindings::pci_error_handlers = bindings::pci_error_handlers {
        reset_prepare: Some(Self::reset_prepare_callback),
        reset_done: Some(Self::reset_done_callback),
        error_detected: None,
        mmio_enabled: None,
        slot_reset: None,
        resume: None,
        cor_error_detected: None,
    };

    const HANDLERS: bindings::pci_error_handlers = bindings::pci_error_handlers {
        error_detected: Some(Self::error_detected_callback),
        slot_reset: Some(Self::slot_reset_callback),
        resume: Some(Self::resume_callback),
        ..Self::RESET_HANDLERS
    };

    const POWER: bindings::dev_pm_ops = bindings::dev_pm_ops {
        suspend: Some(Self::suspend_callback),
        freeze: Some(Self::suspend_callback),
        poweroff: Some(Self::suspend_callback),
        complete: Some(Self::complete_callback),
        ..pin_init::zeroed()
    };

    /// # Safety
    ///
    /// Only for the PCI core: `dev` must be that of a valid `struct pci_dev`, locked, and its driver the one that was
    /// registered with [`Self::POWER`].
    unsafe extern "C" fn suspend_callback(dev: *mut bindings::device) -> c_int {
        // SAFETY: The PCI core calls this with the device of a function, locked, of the driver that has these
        // operations.
        unsafe { Self::tell(container_of!(dev, bindings::pci_dev, dev), T::suspend) };
        0
    }

    /// # Safety
    ///
    /// As for [`Self::suspend_callback`].
    unsafe extern "C" fn complete_callback(dev: *mut bindings::device) {
        // SAFETY: The PCI core calls this with the device of a function, locked, of the driver that has these
        // operations.
        unsafe { Self::tell(container_of!(dev, bindings::pci_dev, dev), T::complete) };
    }

    /// # Safety
    ///
    /// Only for the PCI core: `pdev` must be valid, locked, and `pci_dev::driver` the driver that was
    /// registered with this.
    unsafe extern "C" fn shutdown_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: The driver core locks a device before it shuts it down, and the PCI core calls this for a valid function
        // whose driver has it.
        unsafe { Self::tell(pdev, T::shutdown) };
    }

    /// # Safety
    ///
    /// Only for the PCI core: `pdev` must be valid, locked, and `pci_dev::driver` the driver that was
    /// registered with [`Self::HANDLERS`] or [`Self::RESET_HANDLERS`].
    unsafe extern "C" fn reset_prepare_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: The PCI core calls this with a valid function, locked, of the driver that has these handlers.
        unsafe {
            Self::tell(pdev, |dev, this| {
                // INVARIANT: The PCI core has config space locked until after `reset_done`, but for
                // `pci_reset_function_locked`, which is for a driver's own function and has no safe wrapper.
                T::reset_prepare(dev, this, &Config { pdev: dev });
            });
        }
    }

    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe extern "C" fn reset_done_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: The PCI core calls this with a valid function, locked, of the driver that has these handlers.
        unsafe {
            Self::tell(pdev, |dev, this| {
                // INVARIANT: As for `reset_prepare`.
                T::reset_done(dev, this, &Config { pdev: dev });
            });
        }
    }

    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe extern "C" fn error_detected_callback(
        pdev: *mut bindings::pci_dev,
        state: bindings::pci_channel_state_t,
    ) -> bindings::pci_ers_result_t {
        let channel = Channel::from_raw(state);
        // SAFETY: But for Xen's frontend, whose guests have other handlers, all that call this do so with a valid
        // function, locked, of the driver that has these handlers.
        unsafe { Self::tell(pdev, |dev, this| T::error_detected(dev, this, channel)) };
        match channel {
            // The driver knows how to reset its function, and those beside it need not be for this one.
            Channel::Normal => bindings::pci_ers_result_PCI_ERS_RESULT_CAN_RECOVER,
            Channel::Frozen => bindings::pci_ers_result_PCI_ERS_RESULT_NEED_RESET,
            Channel::PermFailure => bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT,
        }
    }

    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe extern "C" fn slot_reset_callback(
        pdev: *mut bindings::pci_dev,
    ) -> bindings::pci_ers_result_t {
        // SAFETY: As for `error_detected_callback`.
        match unsafe { Self::tell(pdev, T::slot_reset) } {
            Some(Err(_)) => bindings::pci_ers_result_PCI_ERS_RESULT_DISCONNECT,
            Some(Ok(())) | None => bindings::pci_ers_result_PCI_ERS_RESULT_RECOVERED,
        }
    }

    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe extern "C" fn resume_callback(pdev: *mut bindings::pci_dev) {
        // SAFETY: As for `error_detected_callback`.
        unsafe { Self::tell(pdev, T::resume) };
    }

    /// Calls `callback` with a device and its driver's data, unless there is none yet.
    ///
    /// # Safety
    ///
    /// As for [`Self::reset_prepare_callback`].
    unsafe fn tell<R>(
        pdev: *mut bindings::pci_dev,
        callback: impl for<'bound> FnOnce(
            &'bound pci::Device<device::Core<'_>>,
            Pin<&T::Data<'bound>>,
        ) -> R,
    ) -> Option<R> {
        // SAFETY: The caller vouches for a valid device.
        let data = unsafe { bindings::dev_get_drvdata(&raw const (*pdev).dev) };
        if data.is_null() {
            // A driver that resets its function with the device lock held while it probes.
            return None;
        }
        // SAFETY: The caller vouches for a valid device, and for its lock, with which it is in the
        // core context.
        let pdev = unsafe { &*pdev.cast::<pci::Device<device::CoreInternal<'_>>>() };
        // SAFETY: `pci_dev::driver` is ours, so that what is not null was stored by the `probe` of
        // `pci::Adapter<T>`: a `T::Data`. It goes after `remove`, when `pci_dev::driver` was cleared.
        // All of that is done under the device lock, which the caller holds until this has returned:
        // the data stays, and no other thread has borrowed it.
        let data = unsafe { pdev.as_ref().drvdata_borrow::<T::Data<'_>>() };
        Some(callback(pdev, data))
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_pci)]
mod tests {
    use super::{
        super::{
            irq::{
                Handler,
                IrqHandler,
                Kind,
                Vectors, //
            },
            workqueue::OwnedQueue,
        },
        *,
    };
    use core::mem::MaybeUninit;
    use kernel::{
        alloc::flags::__GFP_ZERO,
        impl_has_work, irq,
        irq::IrqReturn,
        new_work,
        str::CString,
        sync::{
            atomic::{
                Atomic,
                Relaxed, //
            },
            Arc,
        },
        time::{
            delay::fsleep,
            Instant,
            Monotonic, //
        },
        workqueue::{
            Work,
            WorkItem, //
        },
    };

    /// The words of config space that a function on no bus has.
    const WORDS: usize = 16;

    /// Where its BARs are to be: one of 64 bits, and one of 32.
    const ADDRESS: u64 = 0x12_3456_7000;
    const ADDRESS_32: u32 = 0xfebd_2000;

    /// What its BARs read there.
    const BARS: Bars = [0x3456_7004, 0x12, ADDRESS_32, 0, 0, 0];

    /// And after a reset: that the first is of 64 bits cannot be written.
    const NOWHERE: Bars = [0x4, 0, 0, 0, 0, 0];

    /// What a function on no bus has for config space.
    struct Registers {
        words: [Cell<u32>; WORDS],
        /// Writes to the command register while config space was not locked.
        stray_writes: Cell<u32>,
        /// How often it had the right to the bus after a write.
        master_writes: Cell<u32>,
        /// For so many reads of its vendor it asks for time.
        unready: Cell<u32>,
        /// How often it was read.
        reads: Cell<u32>,
        /// From that read on it does not answer; and that one it does not answer, but others.
        goes_at: Cell<u32>,
        loses: Cell<u32>,
        pdev: *mut bindings::pci_dev,
    }

    impl Registers {
        fn command(&self) -> u16 {
            self.words[COMMAND].get() as u16
        }

        fn set_command(&self, command: u32) {
            self.words[COMMAND].set(command);
        }

        fn bars(&self) -> Bars {
            core::array::from_fn(|bar| self.words[FIRST_BAR + bar].get())
        }

        fn set_bars(&self, bars: Bars) {
            for (bar, value) in bars.into_iter().enumerate() {
                self.words[FIRST_BAR + bar].set(value);
            }
        }

        /// What a reset of the bus does to it.
        fn reset(&self) {
            self.set_command(0);
            self.set_bars(NOWHERE);
        }

        fn read(&self, offset: usize, size: usize) -> u32 {
            let number = self.reads.get() + 1;
            self.reads.set(number);
            let ones = u32::MAX >> (32 - 8 * size);
            if number >= self.goes_at.get() || number == self.loses.get() {
                return ones;
            }
            let unready = self.unready.get();
            if offset == bindings::PCI_VENDOR_ID as usize && unready != 0 {
                self.unready.set(unready - 1);
                return 0xffff_0001;
            }
            let word = self
                .words
                .get(offset / 4)
                .map_or(0, |word| word.get() >> (offset % 4 * 8));
            word & ones
        }

        fn write(&self, offset: usize, size: usize, value: u32) {
            let Some(word) = self.words.get(offset / 4) else {
                return;
            };
            let shift = offset % 4 * 8;
            let mask = (u32::MAX >> (32 - 8 * size)) << shift;
            // What can be written of it.
            let writable = match offset / 4 {
                COMMAND => u16::MAX.into(),
                bar if (FIRST_BAR..FIRST_BAR + NUM_BARS).contains(&bar) => {
                    [0xffff_f000, u32::MAX, 0xffff_f000, 0, 0, 0][bar - FIRST_BAR]
                }
                _ => 0,
            } & mask;
            word.set((word.get() & !writable) | (value << shift & writable));
            if offset / 4 != COMMAND {
                return;
            }
            if word.get() & bindings::PCI_COMMAND_MASTER != 0 {
                self.master_writes.set(self.master_writes.get() + 1);
            }
            // SAFETY: The function is there for as long as its registers are.
            if unsafe { bindings::pci_dev::block_cfg_access_raw(self.pdev) } == 0 {
                self.stray_writes.set(self.stray_writes.get() + 1);
            }
        }
    }

    /// A function with a pin that is connected to nothing, on a bus of its own.
    struct Function {
        registers: KBox<Registers>,
        _ops: KBox<bindings::pci_ops>,
        _bus: KBox<MaybeUninit<bindings::pci_bus>>,
        _bridge: KBox<MaybeUninit<bindings::pci_host_bridge>>,
        pdev: KBox<MaybeUninit<bindings::pci_dev>>,
    }

    impl Function {
        fn new() -> Result<Self> {
            let zeroed = GFP_KERNEL | __GFP_ZERO;
            let mut pdev = KBox::<bindings::pci_dev>::new_uninit(zeroed)?;
            let mut bus = KBox::<bindings::pci_bus>::new_uninit(zeroed)?;
            let mut bridge = KBox::<bindings::pci_host_bridge>::new_uninit(zeroed)?;
            let mut registers = KBox::new(
                Registers {
                    words: [const { Cell::new(0) }; WORDS],
                    stray_writes: Cell::new(0),
                    master_writes: Cell::new(0),
                    unready: Cell::new(0),
                    reads: Cell::new(0),
                    goes_at: Cell::new(u32::MAX),
                    loses: Cell::new(0),
                    pdev: pdev.as_mut_ptr(),
                },
                GFP_KERNEL,
            )?;
            // Of somebody, so that it is there; 1 would be said by one that is not ready yet.
            registers.words[0].set(2);
            registers.set_command(bindings::PCI_COMMAND_MEMORY);
            registers.set_bars(BARS);
            let mut ops = KBox::new(
                bindings::pci_ops {
                    read: Some(Self::read),
                    write: Some(Self::write),
                    ..pin_init::zeroed()
                },
                GFP_KERNEL,
            )?;
            // SAFETY: It is zeroed memory of that type, which is a valid value of it, and nobody else's.
            let raw_bus = unsafe { &mut *bus.as_mut_ptr() };
            raw_bus.ops = &raw mut *ops;
            raw_bus.sysdata = (&raw mut *registers).cast();
            // SAFETY: It is zeroed memory of that type, which is a valid value of it, and nobody else's.
            let raw_bridge = unsafe { &mut *bridge.as_mut_ptr() };
            // Addresses of the bus are those of the processor.
            raw_bridge.windows.next = &raw mut raw_bridge.windows;
            raw_bridge.windows.prev = raw_bridge.windows.next;
            raw_bus.bridge = &raw mut raw_bridge.dev;
            // SAFETY: It is zeroed memory of that type, which is a valid value of it, and nobody else's.
            let raw_pdev = unsafe { &mut *pdev.as_mut_ptr() };
            raw_pdev.bus = &raw mut *raw_bus;
            raw_pdev.irq = 1;
            raw_pdev.error_state = bindings::pci_channel_io_normal;
            let parent = &raw mut raw_pdev.resource[NUM_BARS];
            let memory = bindings::IORESOURCE_MEM;
            for (bar, start, flags) in [
                (0, ADDRESS, memory | bindings::IORESOURCE_MEM_64),
                (2, ADDRESS_32.into(), memory),
            ] {
                let resource = &mut raw_pdev.resource[bar];
                resource.start = start;
                resource.end = start + 0xfff;
                resource.flags = flags as usize;
                resource.parent = parent;
            }
            raw_pdev.dev.release = Some(Self::release);
            // SAFETY: It is zeroed memory, and nobody else's. It is kept until after its last use, and does not move.
            unsafe { bindings::device_initialize(&raw mut raw_pdev.dev) };
            Ok(Self {
                registers,
                _ops: ops,
                _bus: bus,
                _bridge: bridge,
                pdev,
            })
        }

        fn as_raw(&self) -> *mut bindings::pci_dev {
            self.pdev.as_ptr().cast_mut()
        }

        fn device(&self) -> &pci::Device<device::Bound> {
            // SAFETY: A transparent wrapper of what was initialised when this was made, as far as anything here
            // makes use of it. It has no driver, but nothing else either that ends before it is dropped.
            unsafe { &*self.as_raw().cast() }
        }

        fn as_generic(&self) -> *mut bindings::device {
            // SAFETY: The function is valid; this makes no reference.
            unsafe { &raw mut (*self.as_raw()).dev }
        }

        /// Calls `f`, and releases what is managed for the function since, as when it is unbound.
        fn bound<T>(&self, f: impl FnOnce() -> T) -> T {
            // SAFETY: The device was initialised when this was made.
            let group = unsafe {
                bindings::devres_open_group(
                    self.as_generic(),
                    ptr::null_mut(),
                    bindings::GFP_KERNEL,
                )
            };
            assert!(!group.is_null());
            let result = f();
            // SAFETY: The group was opened above. Nothing here makes use of what is released: that is in a `Devres`.
            unsafe { bindings::devres_release_group(self.as_generic(), group) };
            result
        }

        fn is_pin_disabled(&self) -> bool {
            u32::from(self.registers.command()) & bindings::PCI_COMMAND_INTX_DISABLE != 0
        }

        /// # Safety
        ///
        /// `bus` must be that of a `Function`.
        unsafe fn registers<'a>(bus: *mut bindings::pci_bus) -> &'a Registers {
            // SAFETY: The caller vouches for a bus of a `Function`, which has its registers there.
            unsafe { &*(*bus).sysdata.cast() }
        }

        /// # Safety
        ///
        /// `bus` must be that of a `Function`, and `value` valid.
        unsafe extern "C" fn read(
            bus: *mut bindings::pci_bus,
            _devfn: c_uint,
            offset: c_int,
            size: c_int,
            value: *mut u32,
        ) -> c_int {
            // SAFETY: The caller vouches for a bus of a `Function`.
            let registers = unsafe { Self::registers(bus) };
            let read = registers.read(offset as usize, size as usize);
            // SAFETY: The caller vouches that a value can be written there.
            unsafe { value.write(read) };
            0
        }

        /// # Safety
        ///
        /// `bus` must be that of a `Function`.
        unsafe extern "C" fn write(
            bus: *mut bindings::pci_bus,
            _devfn: c_uint,
            offset: c_int,
            size: c_int,
            value: u32,
        ) -> c_int {
            // SAFETY: The caller vouches for a bus of a `Function`.
            let registers = unsafe { Self::registers(bus) };
            registers.write(offset as usize, size as usize, value);
            0
        }

        /// Does nothing: who made it frees it.
        extern "C" fn release(_dev: *mut bindings::device) {}
    }

    impl Drop for Function {
        fn drop(&mut self) {
            // SAFETY: It was initialised when this was made, and nobody else has a reference any more.
            unsafe { bindings::put_device(&raw mut (*self.as_raw()).dev) }
        }
    }

    /// Somebody who has config space locked for a while.
    #[pin_data]
    struct Resetter {
        pdev: *mut bindings::pci_dev,
        done: Atomic<u32>,
        #[pin]
        work: Work<Resetter>,
    }

    // SAFETY: The function is there for as long as this is used, and may be locked by any task.
    unsafe impl Send for Resetter {}
    // SAFETY: `pdev` is only read, and `done` is atomic.
    unsafe impl Sync for Resetter {}

    impl_has_work! {
        impl HasWork<Self> for Resetter { self.work }
    }

    impl WorkItem for Resetter {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            fsleep(Delta::from_millis(20));
            this.done.store(1, Relaxed);
            // SAFETY: `meanwhile` waits for this, with the function. It has locked it for this.
            unsafe { bindings::pci_cfg_access_unlock(this.pdev) }
        }
    }

    /// Does something while somebody else resets the function. Gives whether that was over when it was done.
    fn meanwhile<T>(function: &Function, what: impl FnOnce() -> T) -> Result<(T, bool)> {
        let queue = OwnedQueue::for_long_work(c"rust_pci")?;
        let resetter = Arc::pin_init(
            pin_init!(Resetter {
                pdev: function.as_raw(),
                done: Atomic::new(0),
                work <- new_work!("rust_pci"),
            }),
            GFP_KERNEL,
        )?;
        // SAFETY: The function is valid. The lock is given back by the work item, which is waited for.
        assert!(unsafe { bindings::pci_cfg_access_trylock(function.as_raw()) });
        assert!(queue.enqueue(resetter.clone()).is_ok());
        let result = what();
        let done = resetter.done.load(Relaxed) != 0;
        queue.flush();
        Ok((result, done))
    }

    #[test]
    fn a_function_beside_another_is_in_its_slot_but_with_ari() {
        assert_eq!(place_beside(0x1b, 0, false), Some(0x18));
        assert_eq!(place_beside(0x1b, 7, false), Some(0x1f));
        assert_eq!(place_beside(0x1b, 8, false), None);
        assert_eq!(place_beside(0x1b, 8, true), Some(8));
        assert_eq!(place_beside(0x1b, u8::MAX, true), Some(0xff));
    }

    #[test]
    fn who_locks_config_space_waits_for_who_has_it() -> Result {
        let function = Function::new()?;
        let (_config, waited) = meanwhile(&function, || ConfigLock::new(function.device()))?;
        assert!(waited);
        assert!(ConfigLock::try_new(function.device()).is_none());
        Ok(())
    }

    const MEMORY: u16 = bindings::PCI_COMMAND_MEMORY as u16;

    const MEMORY_AND_BUS: u16 = MEMORY | bindings::PCI_COMMAND_MASTER as u16;

    /// As it reads where it cannot be reached.
    fn gone(function: &Function) {
        let registers = &function.registers;
        registers.words.iter().for_each(|word| word.set(u32::MAX));
    }

    /// Saves config space as the PCI core does, whatever is there.
    fn save_anyhow(function: &Function) -> Result {
        // SAFETY: The function is valid, and nobody else makes use of it.
        to_result(unsafe { bindings::pci_save_state(function.as_raw()) })
    }

    #[test]
    fn what_a_function_has_lost_is_given_back_but_for_the_bus() -> Result {
        let function = Function::new()?;
        let registers = &function.registers;
        registers.set_command(MEMORY_AND_BUS.into());
        let config = ConfigLock::new(function.device());
        let saved = config.keep()?;
        // Nothing was lost.
        assert_eq!(config.give_back(&saved), Ok(()));
        assert_eq!(registers.command(), MEMORY_AND_BUS);
        // As a reset of the bus leaves it, also where somebody else has saved that.
        registers.reset();
        assert!(config.keep().is_err());
        save_anyhow(&function)?;
        assert_eq!(config.give_back(&saved), Ok(()));
        assert_eq!((registers.command(), registers.bars()), (MEMORY, BARS));
        // As where somebody has given it something else.
        registers.set_command(MEMORY_AND_BUS.into());
        registers.set_bars(NOWHERE);
        assert_eq!(config.give_back(&saved), Ok(()));
        assert_eq!((registers.command(), registers.bars()), (MEMORY, BARS));
        // It has not had the bus in between.
        assert_eq!(registers.master_writes.get(), 0);
        gone(&function);
        assert!(config.keep().is_err());
        assert_eq!(config.give_back(&saved), Err(ENODEV));
        assert_eq!(registers.command(), u16::MAX);
        drop(config);
        assert_eq!(registers.stray_writes.get(), 0);
        Ok(())
    }

    #[test]
    fn what_another_function_had_is_not_given_to_this_one() -> Result {
        let function = Function::new()?;
        let another = Function::new()?;
        let saved = ConfigLock::new(another.device()).keep()?;
        let config = ConfigLock::new(function.device());
        function.registers.reset();
        assert_eq!(config.give_back(&saved), Err(EINVAL));
        assert_eq!(function.registers.command(), 0);
        Ok(())
    }

    #[test]
    fn a_function_that_goes_while_it_is_saved_has_not_been_saved() -> Result {
        let function = Function::new()?;
        let registers = &function.registers;
        let config = ConfigLock::new(function.device());
        assert_eq!(config.keep()?.bars, BARS);
        let reads = registers.reads.get();
        for number in 1..=reads {
            registers.reads.set(0);
            registers.goes_at.set(number);
            assert_eq!(config.keep().map(|_| ()), Err(ENODEV));
        }
        registers.goes_at.set(u32::MAX);
        // Nor has one that is there again by the end. Two reads find it there before.
        for word in 0..WORDS {
            registers.reads.set(0);
            registers.loses.set(2 + word as u32 + 1);
            assert_eq!(config.keep().is_err(), word != SUBSYSTEM);
        }
        Ok(())
    }

    #[test]
    fn a_function_that_asks_for_time_is_given_some() -> Result {
        let function = Function::new()?;
        let config = ConfigLock::new(function.device());
        let long = Delta::from_secs(10);
        assert_eq!(config.wait_until_ready(Delta::from_millis(0)), Ok(()));
        let saved = config.keep()?;
        function.registers.unready.set(3);
        assert_eq!(config.give_back(&saved), Err(ENODEV));
        assert_eq!(config.wait_until_ready(long), Ok(()));
        assert_eq!(function.registers.unready.get(), 0);
        gone(&function);
        let short = Delta::from_millis(30);
        assert_eq!(config.wait_until_ready(short), Err(ENODEV));
        // Nobody waits for what was taken out.
        // SAFETY: The function is valid, and nobody else makes use of it.
        unsafe { (*function.as_raw()).error_state = bindings::pci_channel_io_perm_failure };
        let began = Instant::<Monotonic>::now();
        assert_eq!(config.wait_until_ready(long), Err(ENODEV));
        assert!(began.elapsed() < long);
        Ok(())
    }

    /// A function without a driver which was reset has its BARs again, and not the bus, whether it decoded `memory` by then
    /// or not.
    fn is_restored(function: &Function, memory: bool) {
        let registers = &function.registers;
        registers.reset();
        if memory {
            // As it is enabled, with BARs that are nowhere.
            registers.set_command(MEMORY_AND_BUS.into());
        }
        let config = ConfigLock::new(function.device());
        assert_eq!(config.restore_lost(), Ok(()));
        assert_eq!(registers.bars(), BARS);
        assert_eq!(config.decode_memory(), Ok(()));
        assert_eq!(registers.command(), MEMORY);
        // And it is left alone when it has what it needs.
        registers.set_command(MEMORY_AND_BUS.into());
        assert_eq!(config.restore_lost(), Ok(()));
        assert_eq!(config.decode_memory(), Ok(()));
        assert_eq!(registers.command(), MEMORY_AND_BUS);
        assert_eq!(registers.master_writes.get(), 0);
    }

    #[test]
    fn a_function_that_was_reset_without_a_driver_has_what_was_saved() -> Result {
        for memory in [false, true] {
            let function = Function::new()?;
            let registers = &function.registers;
            // What only saved config space has.
            registers.set_command(u32::from(MEMORY_AND_BUS) | bindings::PCI_COMMAND_PARITY);
            save_anyhow(&function)?;
            registers.reset();
            let config = ConfigLock::new(function.device());
            assert_eq!(config.restore_lost(), Ok(()));
            let parity = bindings::PCI_COMMAND_PARITY as u16;
            assert_eq!(registers.command(), MEMORY | parity);
            drop(config);
            registers.set_command(MEMORY.into());
            save_anyhow(&function)?;
            is_restored(&function, memory);
        }
        Ok(())
    }

    #[test]
    fn a_function_that_was_saved_after_it_was_reset_has_its_bars_all_the_same() -> Result {
        for memory in [false, true] {
            let function = Function::new()?;
            function.registers.reset();
            save_anyhow(&function)?;
            is_restored(&function, memory);
        }
        Ok(())
    }

    #[test]
    fn a_function_that_does_not_answer_yet_is_left_as_it_is() -> Result {
        let function = Function::new()?;
        gone(&function);
        let config = ConfigLock::new(function.device());
        assert_eq!(config.restore_lost(), Ok(()));
        assert_eq!(config.decode_memory(), Err(ENODEV));
        assert_eq!(function.registers.command(), u16::MAX);
        Ok(())
    }

    #[test]
    fn bars_that_the_core_has_given_no_place_are_left_as_they_are() -> Result {
        let function = Function::new()?;
        // SAFETY: The function is valid, and nobody else makes use of it.
        let resource = unsafe { &mut (*function.as_raw()).resource[2] };
        let flags = resource.flags;
        let unclaimed = core::mem::replace(&mut resource.parent, ptr::null_mut());
        let config = ConfigLock::new(function.device());
        let elsewhere = [BARS[0], BARS[1], 0x1000, 0, 0, 0];
        function.registers.set_bars(elsewhere);
        assert_eq!(config.restore_lost(), Ok(()));
        resource.parent = unclaimed;
        resource.flags = flags | bindings::IORESOURCE_UNSET as usize;
        assert_eq!(config.restore_lost(), Ok(()));
        assert_eq!(function.registers.bars(), elsewhere);
        resource.flags = flags;
        assert_eq!(config.restore_lost(), Ok(()));
        assert_eq!(function.registers.bars(), BARS);
        Ok(())
    }

    #[test]
    fn a_state_that_is_not_known_is_the_end_of_a_channel() {
        for (state, channel) in [
            (bindings::pci_channel_io_normal, Channel::Normal),
            (bindings::pci_channel_io_frozen, Channel::Frozen),
            (bindings::pci_channel_io_perm_failure, Channel::PermFailure),
            (0, Channel::PermFailure),
            (77, Channel::PermFailure),
        ] {
            assert_eq!(Channel::from_raw(state), channel);
        }
    }

    #[test]
    fn vectors_are_made_and_given_back_when_nobody_resets_the_function() -> Result {
        let function = Function::new()?;
        let (vectors, waited) = meanwhile(&function, || Vectors::new(function.device(), 1, true))?;
        let vectors = vectors?;
        assert!(waited);
        assert_eq!(vectors.kind(), Kind::Intx);
        assert!(function.is_pin_disabled());
        assert_eq!(function.registers.stray_writes.get(), 0);
        let ((), waited) = meanwhile(&function, || drop(vectors))?;
        assert!(waited);
        assert_eq!(function.registers.stray_writes.get(), 0);
        // And nobody has it now.
        assert!(ConfigLock::try_new(function.device()).is_some());
        Ok(())
    }

    #[test]
    fn vectors_that_are_kept_do_nothing_when_the_function_was_unbound() -> Result {
        let function = Function::new()?;
        let vectors = function.bound(|| Vectors::new(function.device(), 1, true))?;
        ConfigLock::new(function.device()).enable_pin(true);
        vectors.disable_pin();
        assert!(!function.is_pin_disabled());
        assert_eq!(vectors.steer(0, 0), Err(ENODEV));
        let current = kernel::cpu::CpuId::current();
        assert_eq!(vectors.arrives_at(0, current), Err(ENODEV));
        let vectors = Arc::new(vectors, GFP_KERNEL)?;
        let ended = Arc::new(Atomic::new(0), GFP_KERNEL)?;
        let handler = Ok(Idle(ended.clone()));
        let name = CString::try_from_fmt(fmt!("rust_pci"))?;
        let late = IrqHandler::install(function.device(), &vectors, 0, name, handler);
        assert!(late.is_err());
        assert_eq!(ended.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn vectors_of_others_are_neither_taken_nor_freed() -> Result {
        let function = Function::new()?;
        let pin = Vectors::new(function.device(), 1, true)?;
        // SAFETY: The function is valid, and nobody else makes use of it.
        let set = |enabled| unsafe {
            bindings::pci_dev::set_msix_enabled_raw(function.as_raw(), enabled);
        };
        set(1);
        let another = Vectors::new(function.device(), 1, true).map(|_| ());
        // Were they freed, this would not end well: there are none.
        drop(pin);
        set(0);
        assert_eq!(another, Err(EBUSY));
        Ok(())
    }

    /// A handler that says when it goes.
    struct Idle(Arc<Atomic<u32>>);

    impl irq::Handler for Idle {
        fn handle(&self, _dev: &device::Device<device::Bound>) -> IrqReturn {
            IrqReturn::None
        }
    }

    impl Handler for Idle {}

    impl Drop for Idle {
        fn drop(&mut self) {
            self.0.store(1, Relaxed);
        }
    }

    #[test]
    fn a_handler_that_nobody_removes_is_removed_when_the_function_is_unbound() -> Result {
        let function = Function::new()?;
        let ended = Arc::new(Atomic::new(0), GFP_KERNEL)?;
        let kept = function.bound(|| -> Result<_> {
            let vectors = Arc::new(Vectors::new(function.device(), 1, true)?, GFP_KERNEL)?;
            let name = CString::try_from_fmt(fmt!("rust_pci"))?;
            let handler = Ok(Idle(ended.clone()));
            let handler = IrqHandler::install(function.device(), &vectors, 0, name, handler)?;
            assert!(!function.is_pin_disabled());
            assert_eq!(ended.load(Relaxed), 0);
            Ok((vectors, handler))
        })?;
        assert_eq!(ended.load(Relaxed), 1);
        assert!(function.is_pin_disabled());
        // Which does nothing any more.
        drop(kept);
        assert_eq!(function.registers.stray_writes.get(), 0);
        Ok(())
    }

    #[test]
    fn a_pin_is_disabled_in_an_interrupt_unless_the_function_is_being_reset() -> Result {
        let function = Function::new()?;
        let vectors = Vectors::new(function.device(), 1, true)?;
        ConfigLock::new(function.device()).enable_pin(true);
        let before = function.registers.command();
        assert!(!function.is_pin_disabled());
        {
            let _resetter = ConfigLock::new(function.device());
            vectors.disable_pin();
            assert_eq!(function.registers.command(), before);
        }
        vectors.disable_pin();
        assert!(function.is_pin_disabled());
        assert_eq!(function.registers.stray_writes.get(), 0);
        assert!(ConfigLock::try_new(function.device()).is_some());
        Ok(())
    }
}
