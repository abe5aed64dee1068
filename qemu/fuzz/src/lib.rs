// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What a guest, a process in it, a peer on the wire, a neighbour's process and whoever reaches a
//! control socket can say, as functions of bytes.
//!
//! Each [target](TARGETS) makes a device (or a switch, or a ring), does what the bytes say, and
//! looks whether it stands. A panic is a finding; so is one that a target makes itself where
//! something has changed, or has left, that should not have. Any bytes are an input, the same
//! bytes do the same (but for `functions`, where two machines and their devices run at once), and
//! what is short does little.
//!
//! The targets are run by libFuzzer, which looks for inputs that reach new code (`make fuzz`;
//! `libfuzzer/` has the programs, which `cargo fuzz` takes too), and by the tests of this crate:
//! these repeat the inputs in `corpus/` and change them by seed ([`driver`]).

mod channels;
mod control;
pub mod driver;
mod frames;
mod functions;
mod guard;
mod guest;
mod input;
mod lists;
mod machine;
mod raw;
mod requests;
mod secret;
mod shortcuts;
mod vfio;

pub use ferrite_engine::testing::steps;
pub use input::Input;

use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A target: does what the bytes say.
pub type Target = fn(&[u8]);

/// All targets.
pub const TARGETS: [(&str, Target); 11] = [
    ("registers", guest::registers),
    ("commands", guest::commands),
    ("requests", requests::requests),
    ("lists", lists::lists),
    ("frames", frames::frames),
    ("channels", channels::channels),
    ("raw", raw::raw),
    ("vfio", vfio::vfio),
    ("functions", functions::functions),
    ("shortcuts", shortcuts::shortcuts),
    ("control", control::control),
];

/// The target of this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS
        .iter()
        .find(|(other, _)| *other == name)
        .map(|(_, target)| *target)
}

/// How often [`fuzz`] says how far it is.
const SAY: Duration = Duration::from_secs(1);

/// Runs the target of this name, as a program of libFuzzer does. Once a second it says what `make fuzz` reads: how many
/// steps engines have done so far.
pub fn fuzz(name: &str, input: &[u8]) {
    static SAID: Mutex<Option<Instant>> = Mutex::new(None);
    let Some(target) = target(name) else {
        return;
    };
    target(input);
    let mut said = SAID.lock().expect("nothing panics with it");
    if said.is_none_or(|said| said.elapsed() >= SAY) {
        *said = Some(Instant::now());
        eprintln!("stat::engine_steps: {}", steps());
    }
}
