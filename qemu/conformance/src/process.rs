// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device to be checked: one that is there, or one that is started for the purpose.

use crate::outcome::{failed, wait_for, Outcome};
use crate::transport::Device;
use crate::wire::{interface, Link, Wire};
use rustix::process::{kill_process, Pid, Signal};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU32, Ordering};

/// Which device is checked.
#[derive(Clone, Debug)]
pub enum Target {
    /// One that listens at a socket.
    There {
        /// Its vfio-user socket.
        device: PathBuf,
        /// Where its Ethernet link is to connect.
        wire: Option<PathBuf>,
        /// The socket of the host's own interface.
        interface: Option<PathBuf>,
    },
    /// One that this program starts, and starts again when a check was the end of it; by a command
    /// to which sockets are added: `--socket`, `--uplink`, `--net`.
    Started(Vec<OsString>),
}

/// A device with all that it is connected to.
pub struct Subject {
    /// Over vfio-user.
    pub device: Device,
    /// Its Ethernet link.
    pub wire: Option<Wire>,
    /// The host's own interface.
    pub interface: Option<Link>,
    process: Option<Process>,
}

impl Subject {
    /// Connects to the device, or starts it.
    pub fn new(target: &Target) -> Outcome<Self> {
        match target {
            Target::There {
                device,
                wire,
                interface: other,
            } => Ok(Self {
                wire: wire.as_deref().map(Wire::listen).transpose()?,
                device: Device::connect(device)?,
                interface: other.as_deref().map(interface).transpose()?,
                process: None,
            }),
            Target::Started(command) => {
                let directory = Directory::new()?;
                let path = |name: &str| directory.0.join(name);
                let wire = Wire::listen(&path("wire"))?;
                let process = Process::start(command, directory)?;
                Ok(Self {
                    wire: Some(wire),
                    device: Device::connect(&process.path("socket"))?,
                    interface: Some(interface(&process.path("net"))?),
                    process: Some(process),
                })
            }
        }
    }

    /// The process, if it is this program's.
    pub fn pid(&self) -> Option<Pid> {
        self.process
            .as_ref()
            .map(|process| Pid::from_child(&process.child))
    }
}

/// Ends a device that does not answer.
pub fn end(pid: Pid) {
    let _ = kill_process(pid, Signal::KILL);
}

/// A folder for sockets.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Outcome<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ferrite-conformance-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

struct Process {
    child: Child,
    directory: Directory,
}

impl Process {
    fn start(command: &[OsString], directory: Directory) -> Outcome<Self> {
        let [program, options @ ..] = command else {
            return failed("there is no command to start the device by");
        };
        let socket = |name: &str| directory.0.join(name);
        let child = Command::new(program)
            .args(options)
            .arg("--socket")
            .arg(socket("socket"))
            .arg("--uplink")
            .arg(socket("wire"))
            .arg("--net")
            .arg(socket("net"))
            .spawn()?;
        let mut process = Self { child, directory };
        wait_for("the device's socket", || {
            if let Some(status) = process.child.try_wait()? {
                return failed(format!("the device ended at once: {status}"));
            }
            Ok(process.path("socket").exists().then_some(()))
        })?;
        Ok(process)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.0.join(Path::new(name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
