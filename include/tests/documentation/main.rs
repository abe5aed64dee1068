// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The specification in `Documentation/device` says what the sources of the interface say.
//!
//! What is generated of it is written anew by
//! `FERRITE_UPDATE=1 cargo test -p ferrite-abi --test documentation`.

mod coverage;
mod examples;
mod glossary;
mod layouts;
mod promises;
mod requirements;
mod sources;
mod travels;
