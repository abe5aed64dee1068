// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The Ferrite device process: the engine behind vfio-user
fn main() {}
