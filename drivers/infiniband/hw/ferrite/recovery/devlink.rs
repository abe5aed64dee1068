// SPDX-License-Identifier: GPL-2.0

//! What devlink shows of the function, and what may be set by it.

use super::{
    dump,
    plan::Phase,
    Recovery, //
};
use crate::{
    hardware::Cause,
    kernel_ext::{
        devlink::{
            HealthReporter,
            Info,
            Information,
            Object,
            Occasion,
            Parameter,
            Refusal, //
        },
        memory, //
    },
    vector_map, //
};
use kernel::{
    prelude::*,
    str::CString,
    sync::{
        Arc,
        ArcBorrow, //
    }, //
};

/// What devlink shows, beyond what it counts itself.
#[derive(Clone, Copy)]
pub(super) struct Counts {
    pub(super) lives: u32,
    pub(super) attempts: u32,
    pub(super) cause: Option<Cause>,
    /// Whether an attempt is under way.
    pub(super) trying: bool,
    /// Why the last attempt failed, unless it did not.
    pub(super) error: Option<Error>,
    /// Whether the PCI core gave the bus up.
    pub(super) bus_gone: bool,
}

/// What devlink shows of what a device is.
#[derive(Clone, Copy)]
pub(super) struct Versions {
    /// Of the interface: major, minor.
    pub(super) interface: (u16, u16),
    /// Of the model: major, minor, patch.
    pub(super) firmware: (u16, u8, u8),
}

/// A serial number of PCI Express as people write it: pairs of digits, the first of them that of who made it.
fn serial_number(number: u64) -> Result<CString> {
    let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
    CString::try_from_fmt(fmt!(
        "{a:02x}-{b:02x}-{c:02x}-{d:02x}-{e:02x}-{f:02x}-{g:02x}-{h:02x}"
    ))
}

impl Parameter for Recovery {
    const NAME_OF_PARAMETER: &'static CStr = c"vector_map";

    fn default_value() -> &'static CStr {
        vector_map::DEFAULT.name()
    }

    fn get(&self) -> &'static CStr {
        self.spreading.lock().of_life().name()
    }

    fn set(this: ArcBorrow<'_, Self>, value: &CStr) -> Result<(), Refusal> {
        let this = Arc::<Self>::from(this);
        this.spreading.lock().set(value.to_bytes())?;
        // Where nobody waits for the answer, it goes on with what was set.
        this.ask().map(|_| ())
    }
}

impl Information for Recovery {
    fn inform(&self, info: &mut Info<'_>) -> Result {
        if let Some(number) = self.serial_number {
            info.serial_number(&serial_number(number.get())?)?;
        }
        let versions = *self.versions.lock();
        let Some(versions) = versions else {
            return Ok(());
        };
        let (major, minor, patch) = versions.firmware;
        let firmware = CString::try_from_fmt(fmt!("{major}.{minor}.{patch}"))?;
        info.running_version(Info::FIRMWARE, &firmware)?;
        let (major, minor) = versions.interface;
        let interface = CString::try_from_fmt(fmt!("{major}.{minor}"))?;
        info.running_version(Info::INTERFACE, &interface)
    }
}

impl HealthReporter for Recovery {
    const NAME: &'static CStr = c"fatal";

    fn recover(this: ArcBorrow<'_, Self>) -> Result<(), Refusal> {
        let this = Arc::<Self>::from(this);
        let life = this.ask()?;
        // devlink does so by itself, when it gets the answer.
        this.exchange.lock().counts(life);
        Ok(())
    }

    fn diagnose(&self, diagnosis: &mut Object<'_>) {
        self.say_state(diagnosis);
    }

    fn dump(&self, occasion: Occasion, dump: &mut Object<'_>) -> Result {
        let cause = self.counts.lock().cause;
        if occasion == Occasion::Failure && cause.is_some_and(Cause::is_wanted) {
            // devlink keeps one only: it is for the next failure.
            return Err(EAGAIN);
        }
        // Recovery waits for what devlink says of a failure, and a disk behind the device for recovery.
        memory::without_io(|| self.say_all(occasion, dump))
    }
}

impl Recovery {
    /// Says all that there is to know. Sleeps, but waits for no device.
    fn say_all(&self, occasion: Occasion, dump: &mut Object<'_>) -> Result {
        dump.text(
            c"dumped",
            match occasion {
                Occasion::Failure => c"as the device failed",
                Occasion::Demand => c"as somebody asked",
            },
        );
        self.say_state(dump);
        let hw = self.shown.lock().clone();
        dump.flag(c"device", hw.is_some());
        if let Some(hw) = hw {
            dump::say_hardware(&hw, dump)?;
        }
        dump::say_log(&self.log, dump)
    }

    /// Says what becomes of the device.
    fn say_state(&self, diagnosis: &mut Object<'_>) {
        let (phase, attempts) = {
            let plan = self.plan.lock();
            (plan.phase, plan.attempts)
        };
        // Not with the lock held: what is said takes memory.
        let counts = *self.counts.lock();
        diagnosis.text(
            c"state",
            match phase {
                _ if counts.bus_gone => c"failed",
                _ if counts.trying => c"being tried",
                Phase::Working => c"working",
                Phase::Reported | Phase::Waiting { .. } => c"coming back",
                Phase::Stays => c"failed",
            },
        );
        diagnosis.number(c"attempts in a row", attempts as u32);
        diagnosis.number(c"attempts", counts.attempts);
        diagnosis.number(c"lives", counts.lives);
        if let Some(error) = counts.error {
            diagnosis.number(
                c"error of the last attempt",
                error.to_errno().unsigned_abs(),
            );
        }
        if let Some(cause) = counts.cause {
            dump::say_cause(cause, diagnosis);
        }
    }
}

#[kunit_tests(ferrite_recovery_devlink)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_is_written_as_that_of_other_devices() -> Result {
        let text = serial_number(0x5254_00ff_fe12_3456)?;
        assert_eq!(text.to_bytes(), b"52-54-00-ff-fe-12-34-56");
        Ok(())
    }
}
