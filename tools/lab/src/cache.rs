// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Things that take long to make, kept in folders named after what they are made of.
//!
//! A folder counts only when its stamp is there, and the stamp is written last: an interrupted
//! run leaves a folder without a stamp, which the next run throws away. A lock per kind of
//! thing lets two runs share the cache. (Kernel build folders hold absolute paths, so they are
//! made in place instead of being renamed.)

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::process::FileLock;
use crate::step::{log_path, say};
use crate::CACHE;

const STAMP: &str = ".complete";

/// A short name for what something is made of.
pub fn digest(parts: &[&str]) -> String {
    // FNV-1a, twice with different seeds: names in a private cache need no more.
    let mut hash: [u64; 2] = [0xcbf2_9ce4_8422_2325, 0x6c62_272e_07bb_0142];
    for part in parts {
        for byte in part.as_bytes().iter().chain(&[0]) {
            for half in &mut hash {
                *half = (*half ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
    }
    format!("{:016x}{:04x}", hash[0], hash[1] & 0xffff)
}

/// The folder of the thing called `name` made of `parts`; made with `make` when missing.
///
/// `make` gets an empty folder and a log file.
pub fn artifact(
    name: &str,
    what: &str,
    parts: &[&str],
    make: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<PathBuf> {
    let dir = Path::new(CACHE).join(format!("{name}-{}", digest(parts)));
    let stamp = dir.join(STAMP);
    if stamp.exists() {
        return Ok(dir);
    }
    let _lock = FileLock::take(&Path::new(CACHE).join("lock").join(name))?;
    if stamp.exists() {
        return Ok(dir);
    }
    say(what);
    let start = Instant::now();
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    fs::create_dir_all(&dir)?;
    let log = log_path(name);
    let _ = fs::remove_file(&log);
    make(&dir, &log).with_context(|| format!("{what}: failed"))?;
    // What the stamp vouches for must reach the disk before the stamp does.
    // SAFETY: `sync` takes no arguments and cannot fail.
    unsafe { libc::sync() };
    fs::write(&stamp, "")?;
    println!("      done in {} s", start.elapsed().as_secs());
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::digest;

    #[test]
    fn the_digest_tells_part_boundaries_apart() {
        assert_ne!(digest(&["ab", "c"]), digest(&["a", "bc"]));
        assert_ne!(digest(&["ab"]), digest(&["ab", ""]));
        assert_eq!(digest(&["ab", "c"]), digest(&["ab", "c"]));
    }
}
