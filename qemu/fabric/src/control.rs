// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What can be asked of a running fabric: one JSON object a line, answered by
//! one JSON object a line.

use crate::fault::{Faults, Scope};

use crate::switch::Side;
use serde::Deserialize;
use std::path::PathBuf;

/// A request on the control socket.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// `{"cmd":"faults","loss":0.01}`: sets the faults that are named and
    /// leaves the others; `"reset":true` clears them first.
    Faults(FaultChange),
    /// `{"cmd":"partition","a":0,"b":"52:54:00:fe:00:02"}`: cuts two sides
    /// apart, or `a` from everyone.
    Partition {
        /// One side.
        a: Side,
        /// The other; everyone if absent.
        #[serde(default)]
        b: Option<Side>,
    },
    /// `{"cmd":"heal"}`: takes back partitions, all or those named.
    Heal {
        /// One side; all partitions if absent.
        #[serde(default)]
        a: Option<Side>,
        /// The other side.
        #[serde(default)]
        b: Option<Side>,
    },
    /// `{"cmd":"pcap","file":"x.pcap"}`: begins a capture, ending one under way.
    Pcap {
        /// The capture's file, overwritten.
        file: PathBuf,
    },
    /// `{"cmd":"pcap-stop"}`: ends the capture.
    PcapStop,
    /// `{"cmd":"shortcuts","on":false}`: all frames pass the switch, or may
    /// pass it by where nothing is to be seen or done there.
    Shortcuts {
        /// Shortcuts are allowed.
        on: bool,
    },
    /// `{"cmd":"stats"}`: ports, addresses, counters and faults.
    Stats,
}

/// Faults to set; what is absent stays as it is.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultChange {
    /// Clears all faults first.
    pub reset: bool,
    /// See [`Faults::loss`].
    pub loss: Option<f64>,
    /// See [`Faults::duplicate`].
    pub duplicate: Option<f64>,
    /// See [`Faults::corrupt`].
    pub corrupt: Option<f64>,
    /// See [`Faults::reorder`].
    pub reorder: Option<f64>,
    /// See [`Faults::delay`].
    pub delay: Option<f64>,
    /// See [`Faults::rate`].
    pub rate: Option<u64>,
    /// See [`Faults::only`].
    pub only: Option<Scope>,
}

impl FaultChange {
    /// The faults after this change, checked.
    pub fn apply(&self, old: Faults) -> Result<Faults, String> {
        let old = if self.reset { Faults::default() } else { old };
        let new = Faults {
            loss: self.loss.unwrap_or(old.loss),
            duplicate: self.duplicate.unwrap_or(old.duplicate),
            corrupt: self.corrupt.unwrap_or(old.corrupt),
            reorder: self.reorder.unwrap_or(old.reorder),
            delay: self.delay.unwrap_or(old.delay),
            rate: self.rate.unwrap_or(old.rate),
            only: self.only.unwrap_or(old.only),
        };
        new.check().map(|()| new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_parse() {
        assert_eq!(
            serde_json::from_str::<Request>(r#"{"cmd":"partition","a":0,"b":"52:54:00:fe:00:02"}"#)
                .unwrap(),
            Request::Partition {
                a: Side::Port(0),
                b: Some(Side::Mac("52:54:00:fe:00:02".into()))
            }
        );
        assert_eq!(
            serde_json::from_str::<Request>(r#"{"cmd":"heal"}"#).unwrap(),
            Request::Heal { a: None, b: None }
        );
        assert_eq!(
            serde_json::from_str::<Request>(r#"{"cmd":"pcap-stop"}"#).unwrap(),
            Request::PcapStop
        );
        assert!(serde_json::from_str::<Request>(r#"{"cmd":"explode"}"#).is_err());
        assert!(serde_json::from_str::<Request>(r#"{"cmd":"faults","los":1}"#).is_err());
    }

    #[test]
    fn a_change_leaves_what_it_does_not_name() {
        let Request::Faults(change) =
            serde_json::from_str(r#"{"cmd":"faults","loss":0.25,"only":"roce"}"#).unwrap()
        else {
            panic!("not a change of faults");
        };
        let old = Faults {
            delay: 3.0,
            ..Faults::default()
        };
        let new = change.apply(old).unwrap();
        assert_eq!((new.loss, new.delay, new.only), (0.25, 3.0, Scope::Roce));
        let reset = FaultChange {
            reset: true,
            ..FaultChange::default()
        };
        assert_eq!(reset.apply(new), Ok(Faults::default()));
        let bad = FaultChange {
            loss: Some(2.0),
            ..FaultChange::default()
        };
        assert!(bad.apply(old).is_err());
    }
}
