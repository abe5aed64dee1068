// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of verbs behaviour, run inside a guest
fn main() {}
