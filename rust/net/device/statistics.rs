// SPDX-License-Identifier: GPL-2.0

//! What a driver has counted of a device.

use super::{Device, Driver};
use crate::bindings;
use crate::net::Ops;

/// A driver that counts.
pub trait StatisticsOps: Driver {
    /// What was counted so far. Must not sleep.
    fn statistics(dev: &Device<Self>) -> Statistics;
}

/// What is counted of an interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Frames received.
    pub rx_packets: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Bad frames received.
    pub rx_errors: u64,
    /// Frames that could not be sent.
    pub tx_errors: u64,
    /// Frames received for which there was no room.
    pub rx_dropped: u64,
    /// Frames to be sent for which there was no room.
    pub tx_dropped: u64,
    /// Multicast frames received.
    pub multicast: u64,
}

impl Statistics {
    pub(in crate::net) fn from_raw(raw: &bindings::rtnl_link_stats64) -> Self {
        Self {
            rx_packets: raw.rx_packets,
            tx_packets: raw.tx_packets,
            rx_bytes: raw.rx_bytes,
            tx_bytes: raw.tx_bytes,
            rx_errors: raw.rx_errors,
            tx_errors: raw.tx_errors,
            rx_dropped: raw.rx_dropped,
            tx_dropped: raw.tx_dropped,
            multicast: raw.multicast,
        }
    }

    fn write_to(&self, raw: &mut bindings::rtnl_link_stats64) {
        raw.rx_packets = self.rx_packets;
        raw.tx_packets = self.tx_packets;
        raw.rx_bytes = self.rx_bytes;
        raw.tx_bytes = self.tx_bytes;
        raw.rx_errors = self.rx_errors;
        raw.tx_errors = self.tx_errors;
        raw.rx_dropped = self.rx_dropped;
        raw.tx_dropped = self.tx_dropped;
        raw.multicast = self.multicast;
    }
}

impl<D: StatisticsOps> Ops<D> {
    /// Has the driver asked for what it has counted.
    pub const fn with_statistics(mut self) -> Self {
        self.netdev.ndo_get_stats64 = Some(get_stats64::<D>);
        self
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with statistics to be filled in.
unsafe extern "C" fn get_stats64<D: StatisticsOps>(
    dev: *mut bindings::net_device,
    storage: *mut bindings::rtnl_link_stats64,
) {
    // SAFETY: The caller vouches for both.
    let (device, storage) = unsafe { (Device::<D>::from_raw(dev), &mut *storage) };
    D::statistics(device).write_to(storage);
}
