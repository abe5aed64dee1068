// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the device counts outside of the engine.

use ferrite_abi as abi;
use ferrite_engine::Config;
use serde::Serialize;

/// Register accesses by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MmioCounters {
    /// BAR 0.
    pub registers: Accesses,
    /// Send queue doorbells.
    pub sq_doorbell: Accesses,
    /// Receive queue doorbells.
    pub rq_doorbell: Accesses,
    /// Completion queue doorbells.
    pub cq_doorbell: Accesses,
    /// Shared receive queue doorbells.
    pub srq_doorbell: Accesses,
    /// Doorbells of channels.
    pub channel_doorbell: Accesses,
    /// Event queue doorbells.
    pub eq_doorbell: Accesses,
    /// Control queue doorbells.
    pub cqp_doorbell: Accesses,
    /// The part of BAR 2 behind the doorbell pages.
    pub device_memory: Accesses,
    /// Everything else but configuration space.
    pub other: Accesses,
}

/// Reads and writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Accesses {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

impl MmioCounters {
    /// The counters of the class that an access to a device made so belongs to.
    pub fn class(&mut self, bar: u32, offset: u64, config: &Config) -> &mut Accesses {
        match bar {
            abi::BAR_REGISTERS => &mut self.registers,
            abi::BAR_DOORBELLS if offset >= config.device_memory_offset() => {
                &mut self.device_memory
            }
            abi::BAR_DOORBELLS => match offset as usize & ((1 << config.doorbell_log_stride) - 1) {
                abi::DOORBELL_SEND => &mut self.sq_doorbell,
                abi::DOORBELL_RECEIVE => &mut self.rq_doorbell,
                abi::DOORBELL_COMPLETION => &mut self.cq_doorbell,
                abi::DOORBELL_SRQ => &mut self.srq_doorbell,
                abi::DOORBELL_CHANNEL => &mut self.channel_doorbell,
                abi::DOORBELL_EVENT_QUEUE => &mut self.eq_doorbell,
                abi::DOORBELL_CONTROL => &mut self.cqp_doorbell,
                _ => &mut self.other,
            },
            _ => &mut self.other,
        }
    }
}

/// Frames over one link, seen from the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounters {
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames that could not be sent: no peer, or its queue was full.
    pub tx_drops: u64,
    /// Frames of the guest that were not sent since they came from an address
    /// that is not the device's.
    pub source_drops: u64,
    /// Frames of the guest in a VLAN that is not its function's.
    pub vlan_drops: u64,
    /// Times the link came up.
    pub connects: u64,
}

impl LinkCounters {
    /// Counts a frame that was to be sent.
    pub fn sent(&mut self, length: usize, taken: bool) {
        if taken {
            self.tx_frames += 1;
            self.tx_bytes += length as u64;
        } else {
            self.tx_drops += 1;
        }
    }

    /// Counts a frame received.
    pub fn received(&mut self, length: usize) {
        self.rx_frames += 1;
        self.rx_bytes += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_belongs_to_its_class_in_every_page() {
        for stride in [12, 14, 16] {
            let config = Config {
                doorbell_log_stride: stride,
                ..Config::new([2; 6], 1)
            };
            let page = 1 << stride;
            let mut counters = MmioCounters::default();
            counters.class(2, 0, &config).writes += 1;
            counters.class(2, 5 * page, &config).writes += 1;
            counters.class(2, 5 * page + 0x10, &config).writes += 1;
            counters.class(2, 0x800, &config).writes += 1;
            counters.class(2, 0x808, &config).writes += 1;
            counters.class(2, 0x20, &config).writes += 1;
            counters.class(2, 0x28, &config).writes += 1;
            counters
                .class(2, config.device_memory_offset(), &config)
                .writes += 1;
            counters.class(0, 8, &config).reads += 1;
            counters.class(4, 0, &config).reads += 1;
            assert_eq!(counters.sq_doorbell.writes, 2);
            assert_eq!(counters.cq_doorbell.writes, 1);
            assert_eq!(counters.eq_doorbell.writes, 1);
            assert_eq!(counters.cqp_doorbell.writes, 1);
            assert_eq!(counters.channel_doorbell.writes, 1);
            assert_eq!(
                counters.other,
                Accesses {
                    reads: 1,
                    writes: 1
                }
            );
            assert_eq!(counters.registers.reads, 1);
            assert_eq!(counters.device_memory.writes, 1);
        }
    }
}
