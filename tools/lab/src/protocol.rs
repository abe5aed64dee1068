// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What host and guest agent say to each other: one JSON document a line, over a virtio-serial
//! port. Requests carry a number, answers repeat it, and answers come in any order.

use serde::{Deserialize, Serialize};

/// Name of the agent's virtio-serial port.
pub const PORT: &str = "ferrite.agent";

/// Longest output kept of one stream of one command; the rest is dropped and said so.
pub const OUTPUT_LIMIT: usize = 4 << 20;

/// Host to guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Request {
    /// Run a shell script and answer when it has ended.
    Run {
        /// The request's number.
        id: u64,
        /// Text for `bash -c`.
        script: String,
        /// The guest kills the script's process group after this long.
        timeout_ms: u64,
    },
    /// Send a signal to the process group of a running script.
    Signal {
        /// The number of the run it concerns.
        id: u64,
        /// Signal number.
        signal: i32,
    },
}

/// Guest to host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The agent is up; sent once.
    Hello {
        /// `uname -r` of the guest.
        release: String,
    },
    /// A script has ended.
    Done {
        /// The request's number.
        id: u64,
        /// How it went.
        outcome: Outcome,
    },
}

/// How a script ended.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// Exit code; 128 + signal where a signal ended it.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
    /// The guest's own deadline struck.
    pub timed_out: bool,
}

impl Outcome {
    /// Whether the script succeeded.
    pub fn ok(&self) -> bool {
        self.code == 0 && !self.timed_out
    }

    /// Whether it ended by this signal, and not for want of time.
    pub fn ended_by(&self, signal: i32) -> bool {
        self.code == 128 + signal && !self.timed_out
    }

    /// Whether a signal ended it that no test sends.
    pub fn crashed(&self) -> bool {
        // Programs that end with -1 have 255.
        (129..=128 + libc::SIGRTMAX()).contains(&self.code)
            && ![libc::SIGKILL, libc::SIGTERM].contains(&(self.code - 128))
    }
}
