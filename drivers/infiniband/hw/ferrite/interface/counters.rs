// SPDX-License-Identifier: GPL-2.0

//! What the interface counts itself, channel by channel. What the device counts is asked for where it is wanted.

use kernel::sync::atomic::{
    Atomic,
    Relaxed, //
};

/// A number that grows.
pub(super) struct Counter(Atomic<u64>);

impl Counter {
    const fn new() -> Self {
        Self(Atomic::new(0))
    }

    #[inline]
    pub(super) fn add(&self, number: usize) {
        self.0.fetch_add(number as u64, Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

macro_rules! counters {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// What is counted of a channel, whether it is open or not.
        pub(super) struct ChannelCounters {
            $( $(#[$doc])* pub(super) $name: Counter, )*
        }

        impl ChannelCounters {
            /// Their names, in order.
            pub(super) const NAMES: &'static [&'static str] = &[$( stringify!($name), )*];

            pub(super) const fn new() -> Self {
                Self { $( $name: Counter::new(), )* }
            }

            /// What was counted, in the order of the names.
            pub(super) fn values(&self) -> [u64; Self::NAMES.len()] {
                [$( self.$name.get(), )*]
            }
        }
    };
}

counters! {
    /// Frames received.
    rx_packets,
    /// Bytes of them.
    rx_bytes,
    /// Those that were to a group.
    rx_multicast,
    /// Frames that came and could not be passed on, for want of memory or of good buffers.
    rx_dropped,
    /// How often there was no memory for buffers.
    rx_no_memory,
    /// Frames given to the device.
    tx_packets,
    /// Bytes of them.
    tx_bytes,
    /// Frames that were not given to it.
    tx_dropped,
    /// Frames that the device refused.
    tx_errors,
    /// How often there was no room for another one.
    tx_stopped,
    /// How often that was so for seconds.
    tx_timeouts,
    /// How often the channel was polled.
    polls,
}
