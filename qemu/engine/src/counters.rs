// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the engine counts.

use ferrite_abi::COUNTER_NAMES;
use serde::Serialize;

/// Counters since the engine was made; a reset of the device leaves them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// RoCE packets sent, loopback included.
    pub tx_packets: u64,
    /// Bytes of their frames.
    pub tx_bytes: u64,
    /// RoCE packets received that were addressed to this device.
    pub rx_packets: u64,
    /// Bytes of their frames.
    pub rx_bytes: u64,
    /// Packets dropped for a wrong invariant CRC.
    pub rx_icrc_errors: u64,
    /// Packets dropped for any other reason.
    pub rx_dropped: u64,
    /// Requests received again.
    pub duplicate_requests: u64,
    /// Packets received ahead of their sequence.
    pub out_of_sequence: u64,
    /// Packets sent again.
    pub retransmissions: u64,
    /// Local ACK timeouts.
    pub ack_timeouts: u64,
    /// Receiver-not-ready NAKs sent.
    pub rnr_naks_sent: u64,
    /// Receiver-not-ready NAKs received.
    pub rnr_naks_received: u64,
    /// Other NAKs sent.
    pub naks_sent: u64,
    /// Other NAKs received.
    pub naks_received: u64,
    /// Accesses the translation and protection table refused.
    pub access_errors: u64,
    /// Completion queue entries written.
    pub completions: u64,
    /// Registrations by work request that were carried out.
    pub sq_registrations: u64,
    /// Work requests, and requests of peers, that used a tag whose registration by work request had
    /// not completed yet.
    pub early_uses: u64,
    /// Work requests, and requests of peers, that had to wait for a pending tag.
    pub pending_waits: u64,
    /// Tags that a peer's message has ended.
    pub peer_invalidations: u64,
    /// Register reads.
    pub register_reads: u64,
    /// Register writes.
    pub register_writes: u64,
    /// Send doorbells.
    pub send_doorbells: u64,
    /// Receive doorbells.
    pub receive_doorbells: u64,
    /// Completion queue doorbells.
    pub completion_doorbells: u64,
    /// Doorbells of channels.
    pub channel_doorbells: u64,
    /// Event queue doorbells.
    pub event_doorbells: u64,
    /// Control queue doorbells.
    pub control_doorbells: u64,
    /// Doorbells ignored: no such queue, a foreign page, an impossible index or a wrong size.
    pub bad_doorbells: u64,
    /// Commands executed.
    pub commands: u64,
    /// Commands that did not end with `Ok`.
    pub failed_commands: u64,
    /// Event queue entries written.
    pub events: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Resets.
    pub resets: u64,
}

/// Declares the counters that queue pairs have of their own: names of [`COUNTER_NAMES`].
macro_rules! of_queue_pairs {
    ($($name:ident,)*) => {
        /// What a queue pair counts since it was made, as [`Counters`] does for all of them together. They
        /// are its own, and plain numbers: nothing is shared with others on the way of a packet.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct QpCounters {
            $(pub $name: u64,)*
        }

        impl QpCounters {
            /// Those that there are, for `DeviceCaps::qp_counters`.
            pub const COUNTED: u64 = $(1 << place(stringify!($name)))|*;

            /// Adds them to those of others, in the order of [`COUNTER_NAMES`].
            pub fn add_to(&self, sums: &mut [u64; COUNTER_NAMES.len()]) {
                $({
                    const PLACE: usize = place(stringify!($name));
                    sums[PLACE] = sums[PLACE].wrapping_add(self.$name);
                })*
            }
        }
    };
}

of_queue_pairs! {
    tx_packets,
    tx_bytes,
    rx_packets,
    rx_bytes,
    duplicate_requests,
    out_of_sequence,
    retransmissions,
    ack_timeouts,
    rnr_naks_sent,
    rnr_naks_received,
    naks_sent,
    naks_received,
    access_errors,
    completions,
}

/// Where a name stands among [`COUNTER_NAMES`].
const fn place(name: &str) -> usize {
    let mut at = 0;
    while !is_same(COUNTER_NAMES[at].as_bytes(), name.as_bytes()) {
        at += 1;
    }
    at
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Counts something for the device and for the queue pair that it is about.
macro_rules! count {
    ($core:expr, $qp:expr, $name:ident) => {
        crate::counters::count!($core, $qp, $name, 1)
    };
    ($core:expr, $qp:expr, $name:ident, $times:expr) => {{
        $core.counters.$name += $times;
        $qp.counters.$name += $times;
    }};
}
pub(crate) use count;

impl Counters {
    /// The counters in the order of [`COUNTER_NAMES`].
    pub fn named(&self) -> [u64; COUNTER_NAMES.len()] {
        [
            self.tx_packets,
            self.tx_bytes,
            self.rx_packets,
            self.rx_bytes,
            self.rx_icrc_errors,
            self.rx_dropped,
            self.duplicate_requests,
            self.out_of_sequence,
            self.retransmissions,
            self.ack_timeouts,
            self.rnr_naks_sent,
            self.rnr_naks_received,
            self.naks_sent,
            self.naks_received,
            self.access_errors,
            self.completions,
            self.sq_registrations,
            self.early_uses,
            self.pending_waits,
        ]
    }
}
