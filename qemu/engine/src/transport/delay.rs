// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The specification's encodings of time.

/// The longest wait that is lengthened, in nanoseconds.
const LONG_WAIT: u64 = 500_000_000;

/// How long a requester waits for an answer: 4.096 us times two to the `code`; `None` for ever.
///
/// After so many `timeouts` in a row it waits longer, up to four times that (IBTA volume 1, 9.7.6.1.3, allows
/// as much): the peer may be a program on a busy machine, and what is sent again makes it no faster. A wait that
/// is long anyway stays what it is, so that peers that are gone are noticed.
pub(crate) fn ack_timeout(code: u8, timeouts: u8) -> Option<u64> {
    let once: u64 = match code & 0x1f {
        0 => return None,
        code => 4096 << code,
    };
    let longer = once << timeouts.min(2);
    Some(longer.min(LONG_WAIT).max(once))
}

/// Receiver-not-ready delays in units of 10 us (IBTA volume 1, table 46).
const RNR_DELAY: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How long a requester waits after a receiver-not-ready NAK with this timer code, in nanoseconds.
pub(crate) const fn rnr_delay(code: u8) -> u64 {
    RNR_DELAY[(code & 0x1f) as usize] as u64 * 10_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_give_the_times_of_the_tables() {
        assert_eq!(ack_timeout(0, 0), None);
        assert_eq!(ack_timeout(0, 7), None);
        assert_eq!(ack_timeout(1, 0), Some(8_192));
        assert_eq!(ack_timeout(14, 0), Some(67_108_864));
        assert_eq!(ack_timeout(31, 0), Some(4096 << 31));
        assert_eq!(rnr_delay(0), 655_360_000);
        assert_eq!(rnr_delay(1), 10_000);
        assert_eq!(rnr_delay(12), 640_000);
        assert_eq!(rnr_delay(31), 491_520_000);
    }

    #[test]
    fn waits_grow_with_timeouts_up_to_four_times_unless_they_are_long() {
        let waits = |code| [0, 1, 2, 7].map(|timeouts| ack_timeout(code, timeouts).unwrap());
        let t = 67_108_864;
        assert_eq!(waits(14), [t, 2 * t, 4 * t, 4 * t]);
        let t = 268_435_456;
        assert_eq!(waits(16), [t, LONG_WAIT, LONG_WAIT, LONG_WAIT]);
        assert_eq!(waits(17), [536_870_912; 4]);
    }
}
