// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Workspace, virtual machines and tests
fn main() {}
