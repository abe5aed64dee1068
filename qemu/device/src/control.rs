// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be asked of a running device: one JSON object a line, answered by
//! one JSON object a line.

use crate::function::Core;
use ferrite_engine::{ChannelEvent, Misbehaviour};
use serde::Deserialize;
use serde_json::{json, Value};

/// A request on the control socket.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// `{"cmd":"counters"}`: the document that the counters socket gives.
    Counters,
    /// `{"cmd":"fatal"}`: the device stops with a fatal error, as if broken.
    Fatal,
    /// `{"cmd":"link","up":false}`: the cable is pulled, or plugged in again.
    Link {
        /// Plugged in.
        up: bool,
    },
    /// `{"cmd":"misbehave","seed":7,"answers":{"delay":0.5}}`: the device does not keep to its
    /// specification; `{"cmd":"misbehave"}` makes it behave again.
    Misbehave(Misbehaviour),
    /// `{"cmd":"memory-error","where":"internal","address":7,"contained":true}`: the device tells
    /// of an error of its own memory at that place, corrected or not; or with `"external"` of
    /// poisoned host memory at that address.
    MemoryError {
        /// Whose memory.
        r#where: FailedMemory,
        /// The place, or the DMA address.
        address: u64,
        /// What was there was corrected; of the device's own memory.
        #[serde(default)]
        contained: bool,
    },
    /// `{"cmd":"channel","event":"packets","channel":3}`: the device tells of something on a
    /// channel, although it has none, for tests of drivers.
    Channel {
        /// What happened.
        event: Happening,
        /// Where.
        channel: u16,
    },
    /// `{"cmd":"die"}`: the process ends at once: surprise removal.
    Die,
}

/// Whose memory failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailedMemory {
    /// The device's own.
    Internal,
    /// The host's.
    External,
}

/// What happens on a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Happening {
    /// Packets came.
    Packets,
    /// Descriptors were returned.
    Descriptors,
    /// The pool is below its threshold.
    PoolLow,
    /// Buffers were posted that may not be.
    BadBuffers,
}

impl From<Happening> for ChannelEvent {
    fn from(happening: Happening) -> Self {
        match happening {
            Happening::Packets => Self::Packets,
            Happening::Descriptors => Self::Descriptors,
            Happening::PoolLow => Self::PoolLow,
            Happening::BadBuffers => Self::BadBuffers,
        }
    }
}

/// What to do beside sending the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// Nothing.
    GoOn,
    /// End the process without cleaning up.
    Die,
}

/// Answers one line.
pub fn handle(line: &[u8], core: &mut Core) -> (Value, After) {
    match serde_json::from_slice::<Request>(line) {
        Ok(Request::Counters) => (core.report(), After::GoOn),
        Ok(Request::Fatal) => {
            core.inject_fatal();
            (json!({"ok": true}), After::GoOn)
        }
        Ok(Request::Link { up }) => {
            core.set_cable(up);
            (json!({"ok": true}), After::GoOn)
        }
        Ok(Request::Misbehave(rules)) => match core.misbehave(rules) {
            Ok(()) => (json!({"ok": true}), After::GoOn),
            Err(error) => (json!({"ok": false, "error": error}), After::GoOn),
        },
        Ok(Request::MemoryError {
            r#where,
            address,
            contained,
        }) => {
            match r#where {
                FailedMemory::Internal => core.internal_memory_error(address, contained),
                FailedMemory::External => core.external_memory_error(address),
            }
            (json!({"ok": true}), After::GoOn)
        }
        Ok(Request::Channel { event, channel }) => {
            core.channel_event(event.into(), channel);
            (json!({"ok": true}), After::GoOn)
        }
        Ok(Request::Die) => (json!({"ok": true}), After::Die),
        Err(error) => (
            json!({"ok": false, "error": format!("bad request: {error}")}),
            After::GoOn,
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_engine::misbehaviour::Reset;

    #[test]
    fn requests_parse() {
        let parse = |text: &str| serde_json::from_str::<Request>(text).ok();
        assert_eq!(parse(r#"{"cmd":"fatal"}"#), Some(Request::Fatal));
        assert_eq!(
            parse(r#"{"cmd":"link","up":false}"#),
            Some(Request::Link { up: false })
        );
        assert_eq!(parse(r#"{"cmd":"link"}"#), None);
        assert_eq!(
            parse(r#"{"cmd":"memory-error","where":"internal","address":7,"contained":true}"#),
            Some(Request::MemoryError {
                r#where: FailedMemory::Internal,
                address: 7,
                contained: true
            })
        );
        assert_eq!(
            parse(r#"{"cmd":"channel","event":"pool-low","channel":3}"#),
            Some(Request::Channel {
                event: Happening::PoolLow,
                channel: 3
            })
        );
        assert_eq!(
            parse(r#"{"cmd":"channel","event":"packets","channel":65536}"#),
            None
        );
        assert_eq!(parse(r#"{"cmd":"explode"}"#), None);
        assert_eq!(
            parse(r#"{"cmd":"misbehave"}"#),
            Some(Request::Misbehave(Misbehaviour::default()))
        );
        let Some(Request::Misbehave(rules)) = parse(
            r#"{"cmd":"misbehave","seed":7,"answers":{"delay":0.5},"reset":"never",
                "nonsense":{"replies":1}}"#,
        ) else {
            panic!("misbehaviour cannot be asked for");
        };
        assert_eq!((rules.seed, rules.answers.delay), (7, 0.5));
        assert_eq!((rules.reset, rules.nonsense.replies), (Reset::Never, 1.0));
        assert_eq!(parse(r#"{"cmd":"misbehave","answers":{"los":1}}"#), None);
        assert_eq!(parse(r#"{"cmd":"misbehave","seeds":1}"#), None);
    }
}
