// SPDX-License-Identifier: GPL-2.0

//! How full the tables of a device's numbers are: how many of each kind are taken, and how many there are.

use crate::{
    device::Ferrite,
    dm::DeviceMemoryPool,
    doorbell_pages::DoorbellPages,
    numbers::Numbers,
    tpt::Tags, //
};
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// The tables of a device. They are known as long as somebody looks at them, and have nothing of the device.
#[derive(Clone)]
pub(crate) struct Tables {
    tags: Arc<Tags>,
    memory: Arc<DeviceMemoryPool>,
    doorbell_pages: Arc<DoorbellPages>,
    numbers: [(&'static CStr, Arc<Numbers>); 5],
}

impl Tables {
    /// Those of a device.
    pub(crate) fn of(ferrite: &Ferrite) -> Self {
        Self {
            tags: ferrite.tags.clone(),
            memory: ferrite.memory.clone(),
            doorbell_pages: ferrite.doorbell_pages.clone(),
            numbers: [
                (c"protection_domains", ferrite.pds.clone()),
                (c"completion_queues", ferrite.cqns.clone()),
                (c"queue_pairs", ferrite.qpns.clone()),
                (c"shared_receive_queues", ferrite.srqns.clone()),
                (c"xrc_domains", ferrite.xrcds.clone()),
            ],
        }
    }

    /// Calls `each` with the name of each table, how many of its numbers are taken, and how many there are. Sleeps,
    /// but waits for no device.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&'static CStr, u32, u32)) {
        for (name, (used, entries)) in [
            (c"tpt", self.tags.occupancy()),
            (c"device_memory_pages", self.memory.occupancy()),
            (c"doorbell_pages", self.doorbell_pages.occupancy()),
        ] {
            each(name, used, entries);
        }
        for (name, numbers) in &self.numbers {
            let (used, entries) = numbers.occupancy();
            each(name, used, entries);
        }
    }
}
