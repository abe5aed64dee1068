// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What channels and the interface count.

use ferrite_abi::CHANNEL_COUNTER_NAMES;
use serde::Serialize;

/// Declares the counters, in the order of [`CHANNEL_COUNTER_NAMES`].
macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// Counters of a channel since it was made, or of the interface since the engine was.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct ChannelCounters {
            $($(#[$meta])* pub $name: u64,)*
        }

        impl ChannelCounters {
            #[cfg(test)]
            const NAMES: [&'static str; CHANNEL_COUNTER_NAMES.len()] = [$(stringify!($name)),*];

            /// All of them, in order.
            pub fn named(&self) -> [u64; CHANNEL_COUNTER_NAMES.len()] {
                [$(self.$name),*]
            }
        }
    };
}

counters! {
    /// Transmit requests taken up.
    tx_requests,
    /// Frames sent.
    tx_frames,
    /// Bytes of them.
    tx_bytes,
    /// Requests that make no sense, and of which nothing was sent.
    tx_errors,
    /// Frames received.
    rx_frames,
    /// Bytes of them.
    rx_bytes,
    /// Those of them that were to a group or to everybody.
    rx_multicast,
    /// Frames lost for want of a buffer.
    rx_no_buffer,
    /// Frames lost for a buffer that may not be posted.
    rx_bad_buffers,
    /// Frames for a channel that is not there, or has stopped.
    rx_no_channel,
    /// Frames that nobody here wants.
    rx_filtered,
    /// Frames too short or too long.
    rx_length_errors,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_in_the_order_of_their_names() {
        assert_eq!(ChannelCounters::NAMES, CHANNEL_COUNTER_NAMES);
    }
}
