// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Taking a device from its driver and giving it back, and a program that has it in use meanwhile.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::wait_active;
use crate::vm::{Running, Vm};

/// How long the driver may take to let go of a device: two resets that do not end, each waited for twice
/// as long as the device says, and the rest.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Takes all devices from the driver, if it has any, and notes which for [`BIND`].
const UNBIND: &str = "cd /sys/bus/pci/drivers/ferrite
    bound=$(ls -d *:*:*.* 2>/dev/null); [ -z \"$bound\" ] || echo $bound >/run/functions
    for f in $bound; do echo $f >unbind || exit; done";

/// Gives the driver what it does not have of that, and configures an interface that comes with it.
pub const BIND: &str = "cd /sys/bus/pci/drivers/ferrite
    for f in $(cat /run/functions); do [ -e $f ] || echo $f >bind || exit; done
    [ ! -e /run/interface ] || . /run/interface";

/// Sets `reporters` to the devlink instances of what the driver has.
pub const REPORTERS: &str =
    "reporters=; for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do reporters+=\" pci/${f##*/}\"; done";

/// Has a device that fails stay failed, until the driver is bound to it again.
pub fn leave_failed(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do
             devlink health set $r reporter fatal auto_recover false || exit
         done"
    ))?;
    Ok(())
}

/// Takes the device of a machine from its driver, if that has it.
pub fn unbind(vm: &Vm) -> Result<()> {
    vm.sh_in(UNBIND, PATIENCE)
        .context("the driver does not let go of the device")?;
    Ok(())
}

/// Gives it back, and waits until it can be used.
pub fn bind(vm: &Vm) -> Result<()> {
    vm.sh_in(BIND, PATIENCE)?;
    wait_active(vm)
}

/// Takes the device from the driver and gives it back: what the driver counts begins anew.
pub fn bind_anew(vm: &Vm) -> Result<()> {
    unbind(vm)?;
    bind(vm)
}

/// Starts a program with memory, queues and work under way, which waits for the device to go.
pub fn program_in_the_middle(vm: &Vm) -> Result<Running<'_>> {
    // What the last one said is not what this one says.
    vm.sh("rm -f /run/removal")?;
    let program = vm.spawn(
        "exec verbs-check run removal >/run/removal 2>&1",
        2 * PATIENCE,
    )?;
    vm.wait_for("grep -qs ready /run/removal", PATIENCE)?;
    Ok(program)
}

/// The program of [`program_in_the_middle`] was told that the device went, and let go of all.
pub fn ended_well(vm: &Vm, program: Running<'_>) -> Result<()> {
    let outcome = program.wait()?;
    let said = vm.sh("cat /run/removal")?;
    ensure!(
        outcome.ok() && said.contains("done"),
        "the program did not end well: {outcome:?}\n{said}"
    );
    Ok(())
}
