// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Pages of nobody, between what a device was given: they keep their bytes.

use ferrite_engine::testing::Node;
use ferrite_engine::HostMemory;

pub const GUARD: u8 = 0xa5;
const PAGE: usize = 0x1000;

/// Where they are.
#[derive(Default)]
pub struct Guards(Vec<u64>);

impl Guards {
    /// One more, behind what was allocated before.
    pub fn add(&mut self, node: &mut Node) {
        let at = node.allocate(PAGE as u64);
        let written = node.host.memory.write(at, &[GUARD; PAGE]);
        written.expect("test memory");
        self.0.push(at);
    }

    /// Looks whether they are as they were.
    pub fn check(&self, node: &Node) {
        for &at in &self.0 {
            let mut page = [0; PAGE];
            let read = node.host.memory.read(at, &mut page);
            read.expect("test memory");
            assert!(page.iter().all(|&byte| byte == GUARD), "written at {at:#x}");
        }
    }
}
