// SPDX-License-Identifier: GPL-2.0

//! What a peer may do wrong, and what is counted.

macro_rules! violations {
    ($( $(#[doc = $words:literal])* $variant:ident, $name:literal; )*) => {
        /// What a peer did wrong. The connection is reset, and nothing else comes of it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Violation {
            $( $(#[doc = $words])* $variant, )*
        }

        impl Violation {
            /// All there are, with the names of their counters and what they are.
            pub const ALL: &'static [(Self, &'static str, &'static str)] = &[
                $( (Self::$variant, $name, concat!($($words),*)), )*
            ];

            /// The name of its counter.
            pub fn name(self) -> &'static str {
                match self {
                    $( Self::$variant => $name, )*
                }
            }
        }
    };
}

violations! {
    /// A message is shorter than it says.
    Truncated, "truncated";
    /// A message is longer than it says, or than any may be.
    TooLong, "too_long";
    /// A function that there is not.
    BadFunction, "bad_function";
    /// Another version than the one agreed on.
    BadVersion, "bad_version";
    /// Another session: a message of an earlier connection, too late.
    OtherSession, "other_session";
    /// A message that was there before.
    Replayed, "replayed";
    /// A message before which one is missing.
    Skipped, "skipped";
    /// A message that does not belong on its channel.
    WrongChannel, "wrong_channel";
    /// A message with entries that has none.
    NoEntries, "no_entries";
    /// A reserved field is not zero.
    Reserved, "reserved";
    /// A pool was announced that is there already.
    PoolTwice, "pool_twice";
    /// More pools than there is room for.
    TooManyPools, "too_many_pools";
    /// A pool without elements, with too many or too large ones, or that does not fit its addresses.
    PoolShape, "pool_shape";
    /// A kind of pool that there is not, or not on this connection.
    PoolKind, "pool_kind";
    /// A pool that is not there.
    NoSuchPool, "no_such_pool";
    /// A pool that cannot be used like this.
    PoolMisused, "pool_misused";
    /// An element beyond the end of its pool.
    ElementBeyond, "element_beyond";
    /// An element was filled that is not the peer's to fill: it was already, or was not given back yet.
    ElementTaken, "element_taken";
    /// An element was given back that was not filled.
    ElementIdle, "element_idle";
    /// A frame without bytes.
    FrameEmpty, "frame_empty";
    /// A frame larger than its element.
    FrameBeyond, "frame_beyond";
    /// A frame of another size than its indication says.
    FrameTorn, "frame_torn";
    /// More messages were sent than there are buffers for them.
    CreditExceeded, "credit_exceeded";
    /// A request before the one before it was answered.
    RequestTwice, "request_twice";
    /// A reply that nobody asked for.
    NoSuchRequest, "no_such_request";
    /// A pool was said to be given up with frames in it.
    FlushedEarly, "flushed_early";
    /// An operation that there is not, or that its sender may not ask for.
    BadOperation, "bad_operation";
    /// A status that there is not.
    BadStatus, "bad_status";
    /// Data of an operation that make no sense.
    BadData, "bad_data";
    /// The private data of a connection make no sense, or want something else.
    BadJoin, "bad_join";
    /// No answer in time, nothing at all from a host, or nothing given back of what frames went to.
    Silent, "silent";
    /// A connection of somebody who does not know the key, or knows another.
    BadKey, "bad_key";
    /// A connection more than one address may have at a time, or sooner after others than it may.
    Crowded, "crowded";
}

/// How many kinds of violations there are.
pub const VIOLATIONS: usize = Violation::ALL.len();

/// What an endpoint counts; connections come and go, the counters stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Violations of the peer, in the order of [`Violation`].
    pub violations: [u64; VIOLATIONS],
    /// Frames that were sent in messages.
    pub sent_by_message: u64,
    /// Frames that were written to the peer's memory.
    pub sent_by_write: u64,
    /// Frames that the peer was told to read.
    pub sent_by_read: u64,
    /// Frames of which 32 bits of immediate data told.
    pub told_by_immediate: u64,
    /// Frames of which a separate message told.
    pub told_by_indicate: u64,
    /// Frames received.
    pub received: u64,
    /// Elements of pools that either side has announced to the other.
    pub elements_announced: u64,
    /// Of these, elements of pools that both sides have given up by a flush, all of them idle.
    pub elements_flushed: u64,
    /// The others: elements of pools that were there when their connection ended.
    pub elements_forfeited: u64,
    /// Frames that were not sent because the peer has no free element for them.
    pub dropped_no_element: u64,
    /// Frames that were not sent because no element of the peer is large enough.
    pub dropped_too_large: u64,
    /// Frames that were not sent because nobody is connected.
    pub dropped_closed: u64,
    /// Unacknowledged service: frames of the peer that the wire has lost.
    pub lost: u64,
    /// Unacknowledged service: frames that came after they were taken for lost.
    pub late: u64,
    /// Unacknowledged service: control messages that were there before.
    pub repeated: u64,
    /// Unacknowledged service: control messages before which one was missing.
    pub early: u64,
    /// Unacknowledged service: control messages that were sent again.
    pub resent: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            violations: [0; VIOLATIONS],
            sent_by_message: 0,
            sent_by_write: 0,
            sent_by_read: 0,
            told_by_immediate: 0,
            told_by_indicate: 0,
            received: 0,
            elements_announced: 0,
            elements_flushed: 0,
            elements_forfeited: 0,
            dropped_no_element: 0,
            dropped_too_large: 0,
            dropped_closed: 0,
            lost: 0,
            late: 0,
            repeated: 0,
            early: 0,
            resent: 0,
        }
    }
}

impl Counters {
    /// How often a peer did this.
    pub fn of(&self, violation: Violation) -> u64 {
        self.violations[violation as usize]
    }
}
