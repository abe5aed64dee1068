// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a check ends.

use std::fmt;
use std::time::{Duration, Instant};

/// How long a device may take for what it has to do.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// How long a device is watched for what it must not do.
pub const WATCH: Duration = Duration::from_millis(25);

/// Why a check did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The device does not keep the requirement.
    Failed(String),
    /// The requirement is about something that this device, or the way it is connected, does not
    /// have.
    NotHere(String),
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) | Self::NotHere(why) => f.write_str(why),
        }
    }
}

/// What a check and its parts return.
pub type Outcome<T = ()> = Result<T, Stop>;

/// The device failed the check.
pub fn failed<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::Failed(why.into()))
}

/// There is nothing to be checked.
pub fn not_here<T>(why: impl Into<String>) -> Outcome<T> {
    Err(Stop::NotHere(why.into()))
}

impl From<vfio_user::Error> for Stop {
    fn from(error: vfio_user::Error) -> Self {
        Self::Failed(format!("vfio-user: {error}"))
    }
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<rustix::io::Errno> for Stop {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Fails the check unless something holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($why:tt)+) => {
        if !$condition {
            return $crate::outcome::failed(format!($($why)+));
        }
    };
}

/// Fails the check unless two values are the same; says which they were.
#[macro_export]
macro_rules! ensure_eq {
    ($found:expr, $expected:expr, $($what:tt)+) => {
        match (&$found, &$expected) {
            (found, expected) => {
                if found != expected {
                    let what = format!($($what)+);
                    return $crate::outcome::failed(
                        format!("{what}: {found:x?}, not {expected:x?}"));
                }
            }
        }
    };
}

/// Looks until `look` finds something.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Outcome<Option<T>>) -> Outcome<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if Instant::now() > end {
            return failed(format!("{what} did not come within {PATIENCE:?}"));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Looks for [`WATCH`] that `look` finds nothing.
pub fn watch<T: fmt::Debug>(what: &str, mut look: impl FnMut() -> Outcome<Option<T>>) -> Outcome {
    let end = Instant::now() + WATCH;
    loop {
        if let Some(found) = look()? {
            return failed(format!("{what}: {found:x?}"));
        }
        if Instant::now() > end {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(500));
    }
}
