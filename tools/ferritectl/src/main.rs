// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `ferritectl`: looks into a Ferrite device from inside the machine that has it.

mod snapshot;
mod source;
mod table;
mod top;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use serde_json::{Map, Value};

use snapshot::Section;
use source::{Device, Machine};

/// Shows what a Ferrite RDMA device is and does, from inside the machine that has it.
///
/// Reads sysfs and the driver's debugfs files (root is needed for those), and asks the `rdma`
/// program, where there is one, which process an object belongs to. Only `cq move`,
/// `handler priority` and `balance` change something.
#[derive(Parser)]
#[command(name = "ferritectl", version, max_term_width = 100)]
struct Arguments {
    /// The device, where there is more than one
    #[arg(short, long, global = true, value_name = "NAME")]
    device: Option<String>,
    /// Print JSON: one object for `show`, one a line for `top`, a list for `list`
    #[arg(short, long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Action,
}

#[derive(Subcommand)]
enum Action {
    /// The Ferrite devices of this machine
    List,
    /// A device's event queues, handlers, completion queues, queue pairs, protection table,
    /// counters and version, once
    ///
    /// Without sections, all of them. `device` and `counters` can be read by anyone; the others
    /// need root. Counters of single queue pairs are shown by `rdma statistic qp`, what the device
    /// has of a queue by `rdma -r resource show`.
    Show {
        /// What to show
        #[arg(value_enum)]
        sections: Vec<Section>,
    },
    /// Completion queues, of processes and of the kernel; for root
    Cq {
        #[command(subcommand)]
        command: CqAction,
    },
    /// Completion handlers; for root
    Handler {
        #[command(subcommand)]
        command: HandlerAction,
    },
    /// Spreads handlers over the processors that are online, whatever was steered elsewhere; for root
    ///
    /// The interrupt of each handler is steered to its own processor, or where that is offline to one that
    /// has few; completion queues that follow a processor go to the handler there. Nothing is lost.
    Balance,
    /// What changes, per second: counters, events and interrupts by queue; until q or Ctrl-C
    Top {
        /// Seconds from one look to the next
        #[arg(short, long, default_value_t = 1.0, value_parser = interval)]
        interval: f64,
        /// End after so many looks
        #[arg(short = 'n', long)]
        count: Option<u64>,
    },
}

#[derive(Subcommand)]
enum CqAction {
    /// The completion queues with the handler that each is at, as `show cqs`
    List,
    /// Moves a completion queue that is in use to another handler
    ///
    /// Without a handler nobody is woken for its completions: what only polls goes on, everything
    /// else waits until the queue has a handler again, and misses nothing.
    Move {
        /// The number of the queue, as `cq list` shows it
        cqn: u32,
        /// A handler's number, as `show handlers` has them, `none`, or `local` for that of the
        /// processor this runs on
        #[arg(value_parser = handler)]
        handler: String,
    },
}

#[derive(Subcommand)]
enum HandlerAction {
    /// The handlers with their priorities, as `show handlers`
    List,
    /// Says whether a handler comes before others
    ///
    /// One of low latency is served before bulk ones by the device and by the driver. Put the few
    /// completion queues there that somebody waits for (`cq move`): processes cannot do so by
    /// themselves without CAP_NET_ADMIN. It stays so until it is said otherwise, or the driver lets go
    /// of the device or recovers it.
    Priority {
        /// The number of the handler, as `handler list` shows it
        handler: u32,
        /// Which
        #[arg(value_enum)]
        priority: Priority,
    },
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Priority {
    /// After those of low latency
    Bulk,
    /// Before the others
    LowLatency,
}

impl Priority {
    /// As the driver calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Bulk => "bulk",
            Self::LowLatency => "low-latency",
        }
    }
}

/// What a completion queue can be moved to.
fn handler(text: &str) -> std::result::Result<String, String> {
    if text == "none" || text == "local" || text.parse::<u32>().is_ok() {
        Ok(text.to_owned())
    } else {
        Err("the number of a handler, 'none' or 'local' is needed".to_owned())
    }
}

/// Seconds between a tenth and an hour.
fn interval(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds from 0.1 to 3600 are needed".to_owned()),
    }
}

fn print(text: &str) {
    // Whoever read the output may have gone (`ferritectl show | head`).
    let _ = std::io::stdout().write_all(text.as_bytes());
}

fn as_text(found: &Map<String, Value>, sections: &[Section]) -> String {
    let mut out = String::new();
    for section in sections {
        if let Some(value) = found.get(section.name()) {
            out += &format!("{}\n{}\n", section.name(), section.text(value));
        }
    }
    out
}

fn show(device: &Device<'_>, sections: &[Section], json: bool) -> Result<bool> {
    let sections = if sections.is_empty() {
        &Section::ALL
    } else {
        sections
    };
    let (found, errors) = snapshot::read(device, sections);
    if json {
        print(&format!("{:#}\n", Value::Object(found)));
    } else {
        print(&as_text(&found, sections));
    }
    for error in &errors {
        eprintln!("ferritectl: {error:#}");
    }
    Ok(errors.is_empty())
}

fn run(arguments: &Arguments) -> Result<bool> {
    let machine = Machine::new("/");
    if let Action::List = arguments.command {
        let devices = machine.devices()?;
        if arguments.json {
            print(&format!("{}\n", Value::from(devices)));
        } else {
            print(&(devices.join("\n") + "\n"));
        }
        return Ok(true);
    }
    let device = machine.device(arguments.device.as_deref())?;
    match &arguments.command {
        Action::List => Ok(true),
        Action::Show { sections } => show(&device, sections, arguments.json),
        Action::Cq {
            command: CqAction::List,
        } => show(&device, &[Section::Cqs], arguments.json),
        Action::Cq {
            command: CqAction::Move { cqn, handler },
        } => {
            device.move_cq(*cqn, handler)?;
            Ok(true)
        }
        Action::Balance => {
            device.balance()?;
            Ok(true)
        }
        Action::Handler {
            command: HandlerAction::List,
        } => show(&device, &[Section::Handlers], arguments.json),
        Action::Handler {
            command: HandlerAction::Priority { handler, priority },
        } => {
            device.set_priority(*handler, priority.name())?;
            Ok(true)
        }
        Action::Top { interval, count } => {
            let interval = Duration::from_secs_f64(*interval);
            top::run(&device, interval, *count, arguments.json)?;
            Ok(true)
        }
    }
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ferritectl: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn intervals_that_make_no_sense_are_refused() {
        assert!(interval("1").is_ok());
        for bad in ["0", "-1", "nan", "x", "1e9"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_queue_is_moved_to_a_handler_or_a_word() {
        for good in ["0", "17", "none", "local"] {
            assert_eq!(handler(good).as_deref(), Ok(good));
        }
        for bad in ["", "-1", "None", "1 2", "4294967296"] {
            assert!(handler(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn priorities_have_the_names_of_the_driver() {
        use clap::ValueEnum;
        for priority in Priority::value_variants() {
            let value = priority.to_possible_value().unwrap();
            assert_eq!(value.get_name(), priority.name());
        }
    }

    #[test]
    fn sections_have_the_names_of_the_command_line() {
        use clap::ValueEnum;
        for section in Section::ALL {
            let value = section.to_possible_value().unwrap();
            assert_eq!(value.get_name(), section.name());
        }
    }
}
