// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The adapter: all functions behind one port, and what concerns all of them.

use crate::control::{self, After, Request};
use crate::function::Function;
use crate::interrupts::Kinds;
use crate::mapping::Mapping;
use crate::port::Port;
use ferrite_engine::Config;
use serde_json::{json, Value};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Whether a function has a virtual machine.
#[derive(Clone, Copy, Debug, Default)]
struct Visit {
    is_here: bool,
    was_here: bool,
}

/// An adapter.
pub struct Adapter {
    port: Arc<Port>,
    functions: Vec<Arc<Function>>,
    visits: Mutex<Vec<Visit>>,
    start: Instant,
}

impl Adapter {
    /// An adapter with these functions, for which there are as many rows in the table.
    pub fn new(
        mapping: Mapping,
        functions: Vec<Config>,
        kinds: Kinds,
        has_uplink: bool,
    ) -> io::Result<Self> {
        if mapping.rows().len() != functions.len() {
            return Err(io::Error::other("the table is of other functions"));
        }
        // One that is alone is as it always was: without an uplink its link is down.
        let has_uplink = has_uplink || mapping.is_alone();
        let port = Arc::new(Port::new(mapping, has_uplink)?);
        let visits = Mutex::new(vec![Visit::default(); functions.len()]);
        let functions = functions
            .into_iter()
            .enumerate()
            .map(|(number, config)| {
                let port = Arc::clone(&port);
                Arc::new(Function::behind(port, number, config, kinds))
            })
            .collect();
        Ok(Self {
            port,
            functions,
            visits,
            start: Instant::now(),
        })
    }

    /// The port of all of them.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The functions, in the order of their numbers.
    pub fn functions(&self) -> &[Arc<Function>] {
        &self.functions
    }

    /// The function, if there is only one.
    pub fn alone(&self) -> Option<&Function> {
        match &self.functions[..] {
            [function] => Some(function),
            _ => None,
        }
    }

    /// The uplink is connected (with the socket to write to) or gone.
    pub fn set_uplink(&self, stream: Option<UnixStream>) {
        let connected = stream.is_some();
        self.port.set_uplink(stream);
        for function in &self.functions {
            let mut core = function.lock();
            core.uplink_changed(connected);
            core.pump();
            drop(core);
            // Its timers may be others now.
            function.wake();
        }
    }

    /// Pulls the cable, or plugs it in.
    pub fn set_cable(&self, plugged: bool) {
        if !self.port.set_cable(plugged) {
            return;
        }
        for function in &self.functions {
            let mut core = function.lock();
            core.cable_changed(plugged);
            core.pump();
            drop(core);
            function.wake();
        }
    }

    /// A virtual machine has connected to a function.
    pub fn came(&self, number: usize) {
        self.visit(number, true);
    }

    /// It is gone again; whether that was the last, so that there is nothing more to do: each
    /// function had its own, and all are gone.
    pub fn left(&self, number: usize) -> bool {
        self.visit(number, false)
    }

    fn visit(&self, number: usize, is_here: bool) -> bool {
        let visits = self.visits.lock();
        let mut visits = visits.unwrap_or_else(PoisonError::into_inner);
        if let Some(visit) = visits.get_mut(number) {
            visit.is_here = is_here;
            visit.was_here = true;
        }
        let over = |visit: &Visit| visit.was_here && !visit.is_here;
        visits.iter().all(over)
    }

    /// Leaves all virtual machine monitors; see [`Function::hang_up`].
    pub fn hang_up(&self) {
        thread::scope(|scope| {
            for function in &self.functions {
                let leave = || function.hang_up();
                if thread::Builder::new().spawn_scoped(scope, leave).is_err() {
                    function.hang_up();
                }
            }
        });
    }

    /// All counters as one document: of a function that is alone its own.
    pub fn report(&self) -> Value {
        if let Some(function) = self.alone() {
            return function.lock().report();
        }
        let functions: Vec<Value> = self
            .functions
            .iter()
            .map(|function| function.lock().report())
            .collect();
        json!({
            "ok": true,
            "uptime_ns": self.start.elapsed().as_nanos() as u64,
            "link_up": self.port.is_up(),
            "heap_bytes": crate::heap::in_use(),
            "uplink": self.port.counters(),
            "functions": functions,
        })
    }

    /// Answers a line of the control socket. Where there are several functions, it names one by its
    /// number (`"function":1`), unless it is about what is the port's.
    pub fn handle(&self, line: &[u8]) -> (Value, After) {
        if let Some(function) = self.alone() {
            return handle(line, function);
        }
        let refused = |error: &str| (json!({"ok": false, "error": error}), After::GoOn);
        let mut value: Value = match serde_json::from_slice(line) {
            Ok(value) => value,
            Err(error) => return refused(&format!("bad request: {error}")),
        };
        let named = value.as_object_mut().and_then(|map| map.remove("function"));
        let number = match named.map(|number| number.as_u64()) {
            None => None,
            Some(number) => {
                let number = number.and_then(|number| usize::try_from(number).ok());
                match number.and_then(|number| self.functions.get(number)) {
                    Some(function) => Some(function),
                    None => return refused("there is no such function"),
                }
            }
        };
        if let Some(function) = number {
            if value["cmd"] == "link" {
                return refused("the link is the port's: do not name a function");
            }
            return handle(value.to_string().as_bytes(), function);
        }
        match serde_json::from_value(value) {
            Ok(Request::Counters) => (self.report(), After::GoOn),
            Ok(Request::Link { up }) => {
                self.set_cable(up);
                (json!({"ok": true}), After::GoOn)
            }
            Ok(Request::Die) => (json!({"ok": true}), After::Die),
            Ok(_) => refused("which function? name it: \"function\":0"),
            Err(error) => refused(&format!("bad request: {error}")),
        }
    }
}

fn handle(line: &[u8], function: &Function) -> (Value, After) {
    let mut core = function.lock();
    let answer = control::handle(line, &mut core);
    core.pump();
    drop(core);
    // Its timers may be others now.
    function.wake();
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Row, Vlans};
    use ferrite_fabric::framing::{Reader, Writer};
    use ferrite_fabric::switch::Mac;

    fn mac(function: u8) -> [u8; 6] {
        [0x52, 0x54, 0, 0xfe, 0, function]
    }

    fn adapter(functions: u8) -> Adapter {
        let row = |function| Row {
            mac: Mac(mac(function)),
            any_source: false,
            vlans: Vlans::all(),
        };
        let mapping = Mapping::new((0..functions).map(row).collect()).unwrap();
        let configs = (0..functions).map(|function| Config::new(mac(function), 1));
        Adapter::new(mapping, configs.collect(), Kinds::all(1), false).unwrap()
    }

    fn frame(to: [u8; 6], from: [u8; 6]) -> Vec<u8> {
        let mut frame = [to, from].concat();
        frame.resize(60, 0x5a);
        frame
    }

    fn received(adapter: &Adapter, function: usize) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut to_vm = |frame: &[u8]| {
            frames.push(frame.to_vec());
            true
        };
        adapter.functions()[function]
            .read_shortcuts(&mut to_vm)
            .pump();
        frames
    }

    #[test]
    fn a_function_whose_lock_is_held_holds_up_no_other() {
        let adapter = adapter(3);
        let held = adapter.functions()[0].lock();
        let all = frame([0xff; 6], mac(1));
        let one = frame(mac(2), mac(1));
        {
            let mut core = adapter.functions()[1].lock();
            core.frame_from_vm(&all);
            core.frame_from_vm(&one);
            core.pump();
        }
        assert_eq!(received(&adapter, 2), [all.clone(), one]);
        // Nor what comes by the wire, though it is for that one first.
        let stranger = [2, 0, 0, 0, 0, 9];
        let mut writer = Writer::new(1 << 20);
        for to in [mac(0), mac(2)] {
            assert!(writer.push(&frame(to, stranger)));
        }
        let mut bytes = Vec::new();
        writer.flush(&mut bytes).unwrap();
        let mut reader = Reader::new();
        reader.fill(&mut &bytes[..]).unwrap();
        adapter.port().deliver(&mut reader).unwrap();
        assert_eq!(received(&adapter, 2), [frame(mac(2), stranger)]);
        drop(held);
        // It has lost nothing by that.
        let late = received(&adapter, 0);
        assert_eq!(late.len(), 2);
        assert!(late.contains(&all) && late.contains(&frame(mac(0), stranger)));
    }

    #[test]
    fn it_is_over_when_each_had_its_machine_and_all_are_gone() {
        let adapter = adapter(2);
        adapter.came(0);
        assert!(!adapter.left(0), "the other is still to come");
        adapter.came(1);
        adapter.came(0);
        assert!(!adapter.left(1));
        assert!(adapter.left(0));
    }
}
