// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers of users as this process sees them.
//!
//! In a user namespace only some users have one. All others are shown with the
//! same, and it cannot be told who of them is meant.

use std::fs;
use std::sync::OnceLock;

/// Every user has a number if there are so many.
const ALL: u64 = u32::MAX as u64;
/// The number of those who have none, unless the kernel was told otherwise.
const OVERFLOW: u32 = 65534;

/// A user, unless the number may be anybody's.
pub fn known(uid: u32) -> Option<u32> {
    static ANYBODY: OnceLock<Option<u32>> = OnceLock::new();
    let anybody = ANYBODY.get_or_init(|| {
        // Who cannot read it cannot tell.
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
        let overflow = overflow.and_then(|text| text.trim().parse().ok());
        (!has_all(&map)).then_some(overflow.unwrap_or(OVERFLOW))
    });
    Some(uid).filter(|_| Some(uid) != *anybody)
}

/// Whether a namespace with this map has numbers for all users.
fn has_all(map: &str) -> bool {
    let count = |line: &str| line.split_ascii_whitespace().nth(2)?.parse::<u32>().ok();
    let counts = map.lines().filter_map(count).map(u64::from);
    counts.sum::<u64>() >= ALL
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_all_users_or_some() {
        assert!(has_all("         0          0 4294967295\n"));
        assert!(has_all("0 1 2147483648\n2147483648 0 2147483647\n"));
        for some in [
            "",
            "0 1000 1\n",
            "0 100000 65536\n",
            "0 0 4294967294",
            "0 0 x",
        ] {
            assert!(!has_all(some), "{some:?}");
        }
    }
}
