// SPDX-License-Identifier: GPL-2.0

//! What a link has counted, by name.

use crate::protocol::{Counters, Violation, VIOLATIONS};
#[cfg(not(split_no_tests))]
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};

macro_rules! traffic {
    ($( $(#[$doc:meta])* $name:ident, )*) => {
        /// What the link counts itself.
        pub(super) struct Traffic {
            $( $(#[$doc])* pub(super) $name: Counter, )*
        }

        impl Traffic {
            pub(super) fn new() -> Self {
                Self { $( $name: Counter(Atomic::new(0)), )* }
            }

            fn values(&self) -> [u64; TRAFFIC.len()] {
                [$( self.$name.0.load(Relaxed), )*]
            }
        }

        const TRAFFIC: &[&str] = &[$( stringify!($name), )*];
    };
}

/// A number that only grows.
pub(super) struct Counter(Atomic<u64>);

impl Counter {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}

traffic! {
    /// Connections that came up.
    connected,
    /// Attempts to connect that failed.
    connect_failed,
    /// Connections that ended: by the peer, or with the wire.
    disconnected,
    /// Connections that this side ended because of what the peer did.
    reset,
    /// Connections that ended since the device went.
    device_removed,
    /// Messages that were posted on the data channel.
    rdma_sends,
    /// Writes that were posted.
    rdma_writes,
    /// Reads that were posted.
    rdma_reads,
    /// Messages that were posted on the control channel.
    control_sent,
    /// Messages that were received on the control channel.
    control_received,
    /// Messages and immediate data that were received on the data channel.
    data_received,
    /// Registrations and invalidations that were posted.
    registrations,
    /// Pools that were made since the peer asked for more.
    pools_added,
    /// Batches of frames.
    batches,
    /// Frames that were not sent because all memory to send from is under way, or none is large enough.
    dropped_no_room,
    /// Frames that were not sent because they could not be copied or posted.
    dropped_error,
    /// Frames that were received and are larger than any may be.
    received_too_large,
    /// Requests that failed with the connection.
    failed_requests,
}

/// A number of an endpoint.
type Of = fn(&Counters) -> u64;

/// Of [`Counters`], besides violations.
const FRAMES: &[(&str, Of)] = &[
    ("sent_by_message", |it| it.sent_by_message),
    ("sent_by_write", |it| it.sent_by_write),
    ("sent_by_read", |it| it.sent_by_read),
    ("told_by_immediate", |it| it.told_by_immediate),
    ("told_by_indicate", |it| it.told_by_indicate),
    ("received", |it| it.received),
    ("elements_announced", |it| it.elements_announced),
    ("elements_flushed", |it| it.elements_flushed),
    ("elements_forfeited", |it| it.elements_forfeited),
    ("dropped_no_element", |it| it.dropped_no_element),
    ("dropped_too_large", |it| it.dropped_too_large),
    ("dropped_closed", |it| it.dropped_closed),
    ("lost", |it| it.lost),
    ("late", |it| it.late),
    ("repeated", |it| it.repeated),
    ("early", |it| it.early),
    ("resent", |it| it.resent),
];

const COUNT: usize = FRAMES.len() + TRAFFIC.len() + VIOLATIONS;

/// What was counted.
#[derive(Clone, Copy)]
pub struct Statistics {
    values: [u64; COUNT],
}

impl Statistics {
    /// How many numbers there are.
    pub const COUNT: usize = COUNT;

    /// Nothing.
    pub const ZERO: Self = Self { values: [0; COUNT] };

    pub(super) fn new(counters: &Counters, traffic: &Traffic) -> Self {
        let frames = FRAMES.iter().map(|(_, value)| value(counters));
        let all = Iterator::chain(frames, traffic.values());
        let all = Iterator::chain(all, counters.violations);
        let mut this = Self::ZERO;
        for (to, value) in this.values.iter_mut().zip(all) {
            *to = value;
        }
        this
    }

    /// The names of all numbers, in their order. Those of what peers did wrong begin with `peer_`.
    pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
        let frames = FRAMES.iter().map(|(name, _)| ("", *name));
        let all = Iterator::chain(frames, TRAFFIC.iter().map(|name| ("", *name)));
        let violations = Violation::ALL.iter().map(|(_, name, _)| ("peer_", *name));
        Iterator::chain(all, violations)
    }

    /// All numbers.
    pub fn values(&self) -> &[u64] {
        &self.values
    }

    /// The number of this name, without what is before it.
    pub fn get(&self, name: &str) -> Option<u64> {
        let at = Self::names().position(|(_, other)| other == name)?;
        self.values.get(at).copied()
    }

    /// Counts what somebody did wrong who is not a peer yet.
    pub(super) fn count(&mut self, violation: Violation) {
        self.values[FRAMES.len() + TRAFFIC.len() + violation as usize] += 1;
    }

    /// Adds those of another link.
    pub fn add(&mut self, other: &Self) {
        for (to, value) in self.values.iter_mut().zip(other.values) {
            *to += value;
        }
    }
}

#[cfg(not(split_no_tests))]
#[kunit_tests(rust_rdma_split_statistics)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_a_name_of_its_own_that_fits_ethtool() {
        assert_eq!(Statistics::names().count(), Statistics::COUNT);
        for (at, (prefix, name)) in Statistics::names().enumerate() {
            // ETH_GSTRING_LEN, with the zero at the end.
            assert!(prefix.len() + name.len() < 32);
            assert!(Statistics::names()
                .skip(at + 1)
                .all(|other| other.1 != name));
        }
    }

    #[test]
    fn numbers_are_where_their_names_are() {
        let mut counters = Counters {
            received: 7,
            resent: 9,
            ..Counters::default()
        };
        counters.violations[Violation::Silent as usize] = 11;
        let traffic = Traffic::new();
        traffic.connected.add();
        traffic.failed_requests.add();
        traffic.failed_requests.add();
        let mut all = Statistics::new(&counters, &traffic);
        all.add(&all.clone());
        all.count(Violation::Truncated);
        assert_eq!(all.get("truncated"), Some(1));
        assert_eq!(all.get("received"), Some(14));
        assert_eq!(all.get("resent"), Some(18));
        assert_eq!(all.get("silent"), Some(22));
        assert_eq!(all.get("connected"), Some(2));
        assert_eq!(all.get("failed_requests"), Some(4));
        assert_eq!(all.get("nothing"), None);
    }
}
