// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A learning Ethernet switch with faults and capture
fn main() {}
