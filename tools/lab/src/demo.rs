// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make demo`.

use anyhow::Result;

/// Runs the demonstration.
pub fn run() -> Result<()> {
    Ok(())
}
