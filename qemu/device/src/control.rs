// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be asked of a running device: one JSON object a line, answered by
//! one JSON object a line.

use crate::device::Core;
use ferrite_engine::Misbehaviour;
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
    /// `{"cmd":"die"}`: the process ends at once: surprise removal.
    Die,
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
