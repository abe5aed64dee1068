// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device at one moment: what `show` prints, by section.

use anyhow::Result;
use serde_json::{json, Map, Value};

use crate::source::Device;
use crate::table::{number, render, Rows};

/// A part of what there is to see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Section {
    /// Name, version, addresses, state of the port
    Device,
    /// Event queues: ring, message, events and interrupts so far
    Eqs,
    /// Completion handlers, which completion queues are spread over: the event queue and the processors of
    /// the interrupt that each has for receives
    Handlers,
    /// Completion queues
    Cqs,
    /// Queue pairs
    Qps,
    /// Shared receive queues
    Srqs,
    /// The translation and protection table: how full, and the memory regions in it
    Tpt,
    /// How full the tables of objects are
    Tables,
    /// Hardware counters of the port
    Counters,
}

impl Section {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 9] = [
        Self::Device,
        Self::Eqs,
        Self::Handlers,
        Self::Cqs,
        Self::Qps,
        Self::Srqs,
        Self::Tpt,
        Self::Tables,
        Self::Counters,
    ];

    /// Its name, as on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Eqs => "eqs",
            Self::Handlers => "handlers",
            Self::Cqs => "cqs",
            Self::Qps => "qps",
            Self::Srqs => "srqs",
            Self::Tpt => "tpt",
            Self::Tables => "tables",
            Self::Counters => "counters",
        }
    }

    /// Looks at the device.
    pub fn read(self, device: &Device<'_>) -> Result<Value> {
        Ok(match self {
            Self::Device => identity(device)?,
            Self::Eqs => rows(event_queues(device)?),
            Self::Handlers => rows(handlers(device)?),
            Self::Cqs => rows(owned(
                device.table("cqs")?,
                "cqn",
                &device.resources("cq"),
                // The core's own "cqn" is another number.
                "drv_cqn",
            )),
            Self::Qps => rows(owned(
                device.table("qps")?,
                "qpn",
                &device.resources("qp"),
                "lqpn",
            )),
            Self::Srqs => rows(device.table("srqs")?),
            Self::Tpt => protection_table(device.table("tables")?, device.resources("mr")),
            Self::Tables => rows(device.table("tables")?),
            Self::Counters => json!(device.counters()?),
        })
    }

    /// The columns of a section that is a table.
    fn columns(self) -> &'static [&'static str] {
        match self {
            Self::Eqs => &[
                "eqn",
                "kind",
                "message",
                "irq",
                "cpus",
                "entries",
                "read_index",
                "events",
                "interrupts",
                "cqs",
            ],
            Self::Handlers => &[
                "handler",
                "eqn",
                "irq",
                "cpus",
                "cqs",
                "events",
                "interrupts",
                "priority",
            ],
            Self::Cqs => &[
                "cqn", "owner", "shared", "handler", "eqn", "follows", "entries", "consumed",
                "pid", "comm",
            ],
            Self::Qps => &[
                "qpn",
                "owner",
                "type",
                "state",
                "rqpn",
                "send_cqn",
                "recv_cqn",
                "sq_blocks",
                "rq_entries",
                "pid",
                "comm",
            ],
            Self::Srqs => &["srqn", "owner"],
            Self::Tables => &["table", "used", "entries"],
            Self::Device | Self::Tpt | Self::Counters => &[],
        }
    }

    /// As text for people.
    pub fn text(self, value: &Value) -> String {
        match value {
            Value::Array(_) => render(&objects(value), self.columns()),
            Value::Object(fields) => {
                let width = fields.keys().map(String::len).max().unwrap_or(0);
                let mut out = String::new();
                // Lists after what fits a line.
                let (lists, lines): (Vec<_>, Vec<_>) =
                    fields.iter().partition(|(_, field)| field.is_array());
                for (name, field) in lines.into_iter().chain(lists) {
                    match field {
                        Value::Array(_) => {
                            let columns = ["mrn", "mrlen", "rkey", "lkey", "pdn", "pid", "comm"];
                            out += &format!("  {name}:\n{}", render(&objects(field), &columns));
                        }
                        Value::String(text) => out += &format!("  {name:<width$}  {text}\n"),
                        Value::Null => out += &format!("  {name:<width$}  -\n"),
                        other => out += &format!("  {name:<width$}  {other}\n"),
                    }
                }
                out
            }
            other => format!("  {other}\n"),
        }
    }
}

fn rows(rows: Rows) -> Value {
    Value::Array(rows.into_iter().map(Value::Object).collect())
}

/// The maps in a list of maps.
fn objects(value: &Value) -> Rows {
    let list = value.as_array().into_iter().flatten();
    list.filter_map(|entry| entry.as_object().cloned())
        .collect()
}

fn identity(device: &Device<'_>) -> Result<Value> {
    Ok(json!({
        "name": device.name,
        "version": device.attribute("fw_ver")?,
        "pci": device.pci_address(),
        "node_guid": device.attribute("node_guid")?,
        "interface": device.interface(),
        "port_state": device.attribute("ports/1/state")?,
        "physical_state": device.attribute("ports/1/phys_state")?,
        "rate": device.attribute("ports/1/rate")?,
    }))
}

/// Event queues with what they are for and the processors of their interrupts.
fn event_queues(device: &Device<'_>) -> Result<Rows> {
    let mut queues = device.table("eqs")?;
    for row in &mut queues {
        let kind = match number(row, "eqn") {
            0 => "control",
            1 => "async",
            _ => "completion",
        };
        row.insert("kind".to_owned(), kind.into());
        let cpus = device.processors(number(row, "irq"));
        row.insert("cpus".to_owned(), json!(cpus));
    }
    Ok(queues)
}

/// The row of the vector map by which a handler is known: who waits for an event nearly always waits for
/// receives.
const MAIN_PART: &str = "ReceiveCompletions";

/// The completion handlers, numbered as completion vectors are.
///
/// Which event queues and which interrupt each has is in the vector map: several may share them, and one may have
/// two event queues, of which one of low latency is enough. Without a map each event queue of completions is a
/// handler.
fn handlers(device: &Device<'_>) -> Result<Rows> {
    let queues = event_queues(device)?;
    let Ok(map) = device.table("vector_map") else {
        return Ok(queues_as_handlers(queues));
    };
    let at: Vec<u64> = device
        .table("cqs")?
        .iter()
        .filter_map(|row| row.get("handler").and_then(Value::as_u64))
        .collect();
    let queue = |entry: &Map<String, Value>| {
        let eqn = number(entry, "eqn");
        queues.iter().find(move |row| number(row, "eqn") == eqn)
    };
    let main = map
        .iter()
        .filter(|entry| entry.get("part").is_some_and(|part| part == MAIN_PART));
    let handlers = main.filter_map(|entry| {
        let handler = number(entry, "handler");
        let mut row = queue(entry)?.clone();
        let mut set = |name: &str, value: Value| row.insert(name.to_owned(), value);
        set("handler", handler.into());
        for name in ["message", "irq"] {
            set(name, number(entry, name).into());
        }
        set("cpus", json!(device.processors(number(entry, "irq"))));
        set("cqs", at.iter().filter(|at| **at == handler).count().into());
        let mut parts = map
            .iter()
            .filter(|entry| number(entry, "handler") == handler)
            .filter_map(queue);
        if parts.any(|row| {
            row.get("priority")
                .is_some_and(|word| word == "low-latency")
        }) {
            set("priority", "low-latency".into());
        }
        Some(row)
    });
    Ok(handlers.collect())
}

/// The completion handlers among the event queues, of a driver that has no vector map.
fn queues_as_handlers(queues: Rows) -> Rows {
    let mut handlers: Rows = queues
        .into_iter()
        .filter(|row| row.get("kind").is_some_and(|kind| kind == "completion"))
        .collect();
    for (index, row) in handlers.iter_mut().enumerate() {
        row.insert("handler".to_owned(), index.into());
    }
    handlers
}

/// Adds to each row what the RDMA core knows of the same object.
fn owned(mut rows: Rows, key: &str, known: &[Value], known_key: &str) -> Rows {
    for row in &mut rows {
        let Some(mine) = row.get(key).cloned() else {
            continue;
        };
        let Some(entry) = known.iter().find(|entry| entry[known_key] == mine) else {
            continue;
        };
        for name in ["pid", "comm", "rqpn"] {
            if let Some(value) = entry.get(name) {
                row.insert(name.to_owned(), value.clone());
            }
        }
    }
    rows
}

fn protection_table(tables: Rows, regions: Vec<Value>) -> Value {
    let tpt = tables
        .into_iter()
        .find(|row| row.get("table").is_some_and(|name| name == "tpt"))
        .unwrap_or_default();
    let (used, entries) = (number(&tpt, "used"), number(&tpt, "entries"));
    // What the kernel notes of a region besides: its own bookkeeping.
    let regions: Vec<Value> = regions
        .into_iter()
        .map(|mut region| {
            if let Some(fields) = region.as_object_mut() {
                for name in ["ifindex", "ifname"] {
                    fields.remove(name);
                }
            }
            region
        })
        .collect();
    json!({
        "used": used,
        "entries": entries,
        "used_percent": percent(used, entries),
        "regions": regions,
    })
}

/// Hundredths are enough.
fn percent(used: u64, entries: u64) -> f64 {
    if entries == 0 {
        return 0.0;
    }
    (used as f64 * 10_000.0 / entries as f64).round() / 100.0
}

/// The sections of a device as one JSON object; and what could not be read.
pub fn read(device: &Device<'_>, sections: &[Section]) -> (Map<String, Value>, Vec<anyhow::Error>) {
    let mut found = Map::new();
    let mut errors: Vec<anyhow::Error> = Vec::new();
    for section in sections {
        match section.read(device) {
            Ok(value) => {
                found.insert(section.name().to_owned(), value);
            }
            Err(error) => {
                // One reason may stand behind several sections.
                if !errors.iter().any(|have| same_reason(have, &error)) {
                    errors.push(error);
                }
            }
        }
    }
    (found, errors)
}

fn same_reason(one: &anyhow::Error, other: &anyhow::Error) -> bool {
    let strip = |error: &anyhow::Error| {
        let text = format!("{error:#}");
        text.split_once(' ').map(|(_, rest)| rest.to_owned())
    };
    strip(one) == strip(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::tests::Files;
    use crate::source::Machine;

    fn machine() -> Files {
        let files = Files::new(&format!("snapshot-{:?}", std::thread::current().id()));
        files.device("ferrite0", "ferrite");
        let sys = "sys/class/infiniband/ferrite0";
        files.write(&format!("{sys}/fw_ver"), "1.2.3\n");
        files.write(&format!("{sys}/node_guid"), "5054:00ff:fefe:0001\n");
        files.write(&format!("{sys}/ports/1/state"), "4: ACTIVE\n");
        files.write(&format!("{sys}/ports/1/phys_state"), "5: LinkUp\n");
        files.write(&format!("{sys}/ports/1/rate"), "25 Gb/sec (1X EDR)\n");
        files.write(&format!("{sys}/ports/1/gid_attrs/ndevs/0"), "eth0\n");
        files.write(&format!("{sys}/ports/1/hw_counters/tx_packets"), "5\n");
        files.write(
            "sys/kernel/debug/ferrite0/eqs",
            "eqn message irq entries read_index events interrupts cqs\n\
             0 0 24 256 9 9 9 0\n1 1 25 256 0 0 0 0\n2 2 26 4096 4 4 3 2\n3 3 27 4096 0 0 0 0\n",
        );
        files.write(
            "sys/kernel/debug/ferrite0/cqs",
            "cqn owner shared handler eqn entries consumed follows\n0 kernel yes 0 2 512 7 -\n1 user no none - 64 - 1\n",
        );
        files.write(
            "sys/kernel/debug/ferrite0/qps",
            "qpn owner type state send_cqn recv_cqn sq_blocks rq_entries\n1 kernel Gsi Rts 0 0 256 512\n",
        );
        files.write("sys/kernel/debug/ferrite0/srqs", "srqn owner\n");
        files.write(
            "sys/kernel/debug/ferrite0/tables",
            "table used entries\ntpt 3 4096\nqueue_pairs 0 1022\n",
        );
        files.write("proc/irq/26/effective_affinity_list", "0\n");
        files.write("proc/irq/27/smp_affinity_list", "0-1\n");
        files
    }

    #[test]
    fn every_section_is_read() {
        let files = machine();
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        let (found, errors) = read(&device, &Section::ALL);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(found.len(), Section::ALL.len());
        assert_eq!(found["device"]["version"], "1.2.3");
        assert_eq!(found["device"]["interface"], "eth0");
        assert_eq!(found["eqs"][0]["kind"], "control");
        assert_eq!(found["handlers"].as_array().unwrap().len(), 2);
        assert_eq!(found["handlers"][0]["cpus"], "0");
        assert_eq!(found["handlers"][1]["cpus"], "0-1");
        assert_eq!(found["handlers"][1]["handler"], 1);
        assert_eq!(found["cqs"][0]["handler"], 0);
        assert_eq!(found["cqs"][1]["handler"], "none");
        assert_eq!(found["cqs"][1]["eqn"], Value::Null);
        assert_eq!(found["cqs"][1]["consumed"], Value::Null);
        assert_eq!(found["cqs"][1]["follows"], 1);
        assert_eq!(found["qps"][0]["state"], "Rts");
        assert_eq!(found["tpt"]["used"], 3);
        assert_eq!(found["tpt"]["used_percent"], 0.07);
        assert_eq!(found["counters"]["tx_packets"], 5);
        for section in Section::ALL {
            assert!(!section.text(&found[section.name()]).is_empty());
        }
    }

    #[test]
    fn handlers_are_those_of_the_vector_map_where_there_is_one() {
        let files = machine();
        let eqs = "eqn message irq entries read_index events interrupts cqs priority\n\
                   0 0 24 256 9 9 9 0 bulk\n1 1 25 256 0 0 0 0 bulk\n";
        let cqs = "cqn owner shared handler eqn entries consumed follows\n\
                   0 kernel yes 3 2 512 7 -\n1 user no none - 64 - 1\n2 user no 3 2 64 - -\n";
        files.write("sys/kernel/debug/ferrite0/cqs", cqs);
        let with = |queues: &str, map: &[(&str, u64, u64, u64, u64)]| {
            let rows = map.iter().map(|(part, handler, eqn, message, irq)| {
                format!("{part}Completions {handler} {eqn} {message} {irq} yes\n")
            });
            let map = rows.fold(
                "part handler eqn message irq mapped\n".to_owned(),
                |map, row| map + &row,
            );
            files.write("sys/kernel/debug/ferrite0/eqs", &format!("{eqs}{queues}"));
            files.write("sys/kernel/debug/ferrite0/vector_map", &map);
            let machine = Machine::new(&files.0);
            let device = machine.device(None).unwrap();
            Section::Handlers.read(&device).unwrap()
        };
        // One event queue for four handlers, with an interrupt each.
        let map: Vec<_> = ["Send", "Receive"]
            .into_iter()
            .flat_map(|part| {
                (0..4).map(move |handler| (part, handler, 2, 2 + handler, 26 + handler))
            })
            .collect();
        let found = with("2 2 26 4096 4 4 3 2 bulk\n", &map);
        let of = |name: &str| -> Vec<Value> {
            let rows = found.as_array().unwrap().iter();
            rows.map(|row| row[name].clone()).collect()
        };
        assert_eq!(of("handler"), [0, 1, 2, 3]);
        assert_eq!(of("eqn"), [2, 2, 2, 2]);
        assert_eq!(of("irq"), [26, 27, 28, 29]);
        assert_eq!(
            of("cpus"),
            [json!("0"), json!("0-1"), json!(null), json!(null)]
        );
        assert_eq!(of("cqs"), [0, 0, 0, 2]);
        // Two for each of two handlers: known by that of receives, and of low latency by either.
        let queues = "2 2 26 4096 4 4 3 2 low-latency\n3 3 27 4096 0 0 0 0 bulk\n\
                      4 2 26 4096 7 7 3 2 bulk\n5 3 27 4096 0 0 0 0 bulk\n";
        let map = [
            ("Send", 0, 2, 2, 26),
            ("Send", 1, 3, 3, 27),
            ("Receive", 0, 4, 2, 26),
            ("Receive", 1, 5, 3, 27),
        ];
        let found = with(queues, &map);
        assert_eq!(found.as_array().unwrap().len(), 2);
        assert_eq!(found[0]["eqn"], 4);
        assert_eq!(found[0]["priority"], "low-latency");
        assert_eq!(found[1]["priority"], "bulk");
    }

    #[test]
    fn what_cannot_be_read_does_not_hide_the_rest() {
        let files = machine();
        std::fs::remove_dir_all(files.0.join("sys/kernel/debug")).unwrap();
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        let (found, errors) = read(&device, &Section::ALL);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["counters", "device"]);
        // One reason, said once.
        assert_eq!(errors.len(), 1, "{errors:?}");
    }

    #[test]
    fn processes_are_told_from_what_the_core_knows() {
        let rows = crate::table::parse("qpn owner\n2 user\n3 user\n").unwrap();
        let known = [json!({"lqpn": 3, "pid": 77, "comm": "rping", "rqpn": 9})];
        let rows = owned(rows, "qpn", &known, "lqpn");
        assert!(!rows[0].contains_key("pid"));
        assert_eq!(rows[1]["pid"], 77);
        assert_eq!(rows[1]["rqpn"], 9);
    }

    #[test]
    fn an_empty_table_is_not_a_division_by_zero() {
        assert_eq!(percent(0, 0), 0.0);
        assert_eq!(percent(1, 3), 33.33);
    }
}
