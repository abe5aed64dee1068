// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance test as a program.

use clap::Parser;
use ferrite_conformance::process::Target;
use ferrite_conformance::{checks, requirements, run};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Checks a Ferrite device against each numbered requirement of its specification.
///
/// The device is one that listens at a socket, or is started here:
///
///   ferrite-conformance --run 'ferrite-device --log error'
///   ferrite-conformance --device SOCKET --wire SOCKET --interface SOCKET
///
/// Each check begins with a reset of the device. It succeeds if no requirement is
/// broken and none is without a check or a reason why there is none.
#[derive(Parser)]
#[command(version, name = "ferrite-conformance", verbatim_doc_comment)]
struct Options {
    /// The vfio-user socket of a device
    #[arg(long, value_name = "SOCKET", required_unless_present_any = ["run", "list"], conflicts_with = "run")]
    device: Option<PathBuf>,
    /// Where this program listens for the Ethernet link of that device: frames, each
    /// behind its length in four bytes, big-endian. Without it no packet can be seen
    #[arg(long, value_name = "SOCKET", requires = "device")]
    wire: Option<PathBuf>,
    /// The socket of the host's own interface at that device, of the same form
    #[arg(long, value_name = "SOCKET", requires = "device")]
    interface: Option<PathBuf>,
    /// A command that starts the device, words between spaces; `--socket`, `--uplink`
    /// and `--net` are added to it
    #[arg(long, value_name = "COMMAND")]
    run: Option<String>,
    /// A chapter or a number: DEV-3, DEV-3-7
    #[arg(long, value_name = "NUMBER")]
    filter: Option<String>,
    /// Only say what is required, and what is checked of it
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match with(Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ferrite-conformance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn with(options: Options) -> std::io::Result<bool> {
    let mut out = std::io::stdout();
    let filter = options.filter.as_deref();
    let target = match (options.list, options.run, options.device) {
        (true, ..) => {
            list(filter, &mut out)?;
            return Ok(true);
        }
        (_, Some(command), _) => {
            Target::Started(command.split_whitespace().map(OsString::from).collect())
        }
        (_, None, device) => Target::There {
            // The parser has seen to that.
            device: device.unwrap_or_default(),
            wire: options.wire,
            interface: options.interface,
        },
    };
    Ok(run::run(&target, filter, &mut out)?.is_good())
}

fn list(filter: Option<&str>, out: &mut dyn Write) -> std::io::Result<()> {
    let reasons = checks::unchecked();
    for requirement in requirements::all() {
        let id = requirement.id;
        if !run::is_asked_for(id, filter) {
            continue;
        }
        let state = match reasons.get(&id) {
            _ if checks::all().iter().any(|check| check.id() == id) => "checked",
            Some(reason) => reason,
            None => "FORGOTTEN",
        };
        writeln!(out, "{id} {state}\n    {}", requirement.text)?;
    }
    Ok(())
}
