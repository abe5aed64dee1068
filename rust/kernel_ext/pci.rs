// SPDX-License-Identifier: GPL-2.0

//! Stopping a PCI function (for `rust/kernel/pci.rs`).

use crate::bindings;
use core::ptr;
use kernel::error::to_result;
use kernel::pci;

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

/// Resets a function by itself (FLR), and waits until it answers again. Its config space is
/// afterwards what it was before, the bus master bit included. `ENOTTY` where the function cannot
/// be reset this way. Sleeps.
pub fn reset_function(pdev: &pci::Device) -> kernel::error::Result {
    let pdev = as_raw(pdev);
    // SAFETY: A reference to a device keeps it valid. The lock keeps processes from its config space
    // between saving and restoring it, and is given back below.
    to_result(unsafe {
        bindings::pci_cfg_access_lock(pdev);
        let mut ret = bindings::pci_save_state(pdev);
        if ret == 0 {
            ret = bindings::pcie_reset_flr(pdev, false);
            bindings::pci_restore_state(pdev);
        }
        bindings::pci_cfg_access_unlock(pdev);
        ret
    })
}
