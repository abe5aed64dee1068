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
/// program, where there is one, which process an object belongs to. Changes nothing.
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
    /// need root.
    Show {
        /// What to show
        #[arg(value_enum)]
        sections: Vec<Section>,
    },
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
    fn sections_have_the_names_of_the_command_line() {
        use clap::ValueEnum;
        for section in Section::ALL {
            let value = section.to_possible_value().unwrap();
            assert_eq!(value.get_name(), section.name());
        }
    }
}
