// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where everything comes from: sysfs, the driver's debugfs files, `/proc/irq`, and the `rdma`
//! program for what the RDMA core knows.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{anyhow, bail, Context, Result};
use serde_json::Value;

use crate::table::{self, Rows};

/// What the driver says of what the device has not.
const EOPNOTSUPP: i32 = 95;

/// Name of the kernel's driver.
const DRIVER: &str = "ferrite";

/// The machine that is looked at.
pub struct Machine {
    root: PathBuf,
}

impl Machine {
    /// The one this runs on; or what `root` holds in the same places, for tests.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    fn class(&self) -> PathBuf {
        self.root.join("sys/class/infiniband")
    }

    /// The Ferrite devices, sorted by name.
    pub fn devices(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let mut others = Vec::new();
        for entry in fs::read_dir(self.class()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let driver = fs::canonicalize(entry.path().join("device/driver"));
            if driver.is_ok_and(|path| path.file_name().is_some_and(|last| last == DRIVER)) {
                found.push(name);
            } else {
                others.push(name);
            }
        }
        if found.is_empty() {
            let what = if others.is_empty() {
                "there is no RDMA device in this machine".to_owned()
            } else {
                format!("no RDMA device here is a Ferrite: {}", others.join(", "))
            };
            bail!("{what}; is the module loaded (lsmod | grep ferrite) and the adapter there (lspci)?");
        }
        found.sort();
        Ok(found)
    }

    /// The device to look at: the one that was named, or the only one.
    pub fn device(&self, wanted: Option<&str>) -> Result<Device<'_>> {
        let devices = self.devices()?;
        let name = match wanted {
            Some(name) if devices.iter().any(|have| have == name) => name.to_owned(),
            Some(name) => bail!(
                "there is no Ferrite device '{name}'; there is: {}",
                devices.join(", ")
            ),
            None => devices[0].clone(),
        };
        Ok(Device {
            machine: self,
            name,
        })
    }
}

/// One device.
pub struct Device<'m> {
    machine: &'m Machine,
    /// Its name, such as `ferrite0`.
    pub name: String,
}

impl Device<'_> {
    fn path(&self) -> PathBuf {
        self.machine.class().join(&self.name)
    }

    /// A file of the device in sysfs, without the newline.
    pub fn attribute(&self, file: &str) -> Result<String> {
        let path = self.path().join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("{}", path.display()))?;
        Ok(text.trim().to_owned())
    }

    /// Its PCI address.
    pub fn pci_address(&self) -> Option<String> {
        let path = fs::canonicalize(self.path().join("device")).ok()?;
        Some(path.file_name()?.to_string_lossy().into_owned())
    }

    /// The network interface that the port is paired with.
    pub fn interface(&self) -> Option<String> {
        let text = self.attribute("ports/1/gid_attrs/ndevs/0").ok()?;
        (!text.is_empty()).then_some(text)
    }

    /// The hardware counters of the port.
    pub fn counters(&self) -> Result<BTreeMap<String, u64>> {
        let dir = self.path().join("ports/1/hw_counters");
        let mut counters = BTreeMap::new();
        let entries = fs::read_dir(&dir).with_context(|| format!("{}", dir.display()))?;
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // How long the core may hold values back; not a counter.
            if name == "lifespan" {
                continue;
            }
            let text = fs::read_to_string(entry.path())
                .with_context(|| format!("{}", entry.path().display()))?;
            let value = text
                .trim()
                .parse()
                .with_context(|| format!("counter {name} is '{}'", text.trim()))?;
            counters.insert(name, value);
        }
        if counters.is_empty() {
            bail!("{} has no hardware counters", self.name);
        }
        Ok(counters)
    }

    /// A table of the driver in debugfs.
    pub fn table(&self, file: &str) -> Result<Rows> {
        let path = self.debug_file(file);
        match fs::read_to_string(&path) {
            Ok(text) => table::parse(&text).with_context(|| format!("{}", path.display())),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => bail!(
                "{} may only be read by root; run this as root, or ask for 'device' and 'counters' alone",
                path.display()
            ),
            Err(error) => Err(self.debug_error(&path, error)),
        }
    }

    /// Writes a line to a file of the driver in debugfs, to `what` it does.
    fn tell(&self, file: &str, line: &str, what: &str) -> Result<std::io::Result<()>> {
        let path = self.debug_file(file);
        match fs::OpenOptions::new().write(true).open(&path) {
            // In one piece, as the driver reads it.
            Ok(mut file) => Ok(file.write_all(format!("{line}\n").as_bytes())),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => bail!(
                "only root may {what}, and only where the kernel lets debugfs be written to (a locked-down one \
                 does not)"
            ),
            Err(error) => Err(self.debug_error(&path, error)),
        }
    }

    /// Has the driver move a completion queue to a handler, `none` or `local`.
    pub fn move_cq(&self, cqn: u32, handler: &str) -> Result<()> {
        let line = format!("{cqn} {handler}");
        match self.tell("cq_move", &line, "move completion queues of others")? {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("{} has no completion queue {cqn} (any more)", self.name)
            }
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                bail!("{} has no handler {handler}", self.name)
            }
            other => other.with_context(|| format!("moving completion queue {cqn}")),
        }
    }

    /// Has the driver spread handlers over processors.
    pub fn balance(&self) -> Result<()> {
        self.tell("balance", "1", "steer interrupts")?
            .context("spreading handlers over processors")
    }

    /// Has the driver set the priority of a handler.
    pub fn set_priority(&self, handler: u32, priority: &str) -> Result<()> {
        let what = "set priorities by this";
        match self.tell("handler_priority", &format!("{handler} {priority}"), what)? {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("{} has no handler {handler}", self.name)
            }
            Err(error) if error.raw_os_error() == Some(EOPNOTSUPP) => {
                bail!("{} has no priorities", self.name)
            }
            other => other.with_context(|| format!("the priority of handler {handler}")),
        }
    }

    fn debug_file(&self, file: &str) -> PathBuf {
        let debug = self.machine.root.join("sys/kernel/debug");
        debug.join(&self.name).join(file)
    }

    /// Why a file of the driver cannot be opened.
    fn debug_error(&self, path: &Path, error: std::io::Error) -> anyhow::Error {
        let debug = self.machine.root.join("sys/kernel/debug");
        if error.kind() != ErrorKind::NotFound {
            return anyhow::Error::new(error).context(format!("{}", path.display()));
        }
        if is_empty(&debug) {
            return anyhow!(
                "debugfs is not mounted; as root: mount -t debugfs debugfs {}",
                debug.display()
            );
        }
        anyhow!(
            "{} is not there: the kernel's debugfs is off, or the driver is another version",
            path.display()
        )
    }

    /// The processors that take an interrupt.
    pub fn processors(&self, irq: u64) -> Option<String> {
        let dir = self.machine.root.join("proc/irq").join(irq.to_string());
        // Where it arrives; older kernels only tell where it may arrive.
        ["effective_affinity_list", "smp_affinity_list"]
            .iter()
            .filter_map(|file| fs::read_to_string(dir.join(file)).ok())
            .map(|text| text.trim().to_owned())
            .find(|text| !text.is_empty())
    }

    /// What the RDMA core lists of a kind (`qp`, `cq`, `mr`), empty where there is no `rdma`
    /// program: it tells which process an object belongs to.
    pub fn resources(&self, kind: &str) -> Vec<Value> {
        if self.machine.root != Path::new("/") {
            return Vec::new();
        }
        let output = Command::new("rdma")
            .args(["-dd", "-j", "resource", "show", kind])
            .output();
        let output = match output {
            Ok(output) if output.status.success() => output,
            _ => return Vec::new(),
        };
        resources_from(&output.stdout, &self.name)
    }
}

/// The entries of one device in what `rdma -j resource show` prints.
fn resources_from(json: &[u8], device: &str) -> Vec<Value> {
    match serde_json::from_slice(json) {
        Ok(Value::Array(entries)) => entries
            .into_iter()
            .filter(|entry| entry["ifname"] == device)
            .collect(),
        _ => Vec::new(),
    }
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none())
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A machine made of files, removed when dropped.
    pub struct Files(pub PathBuf);

    impl Files {
        pub fn new(name: &str) -> Self {
            let dir =
                std::env::temp_dir().join(format!("ferritectl-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&dir);
            fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        pub fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        pub fn device(&self, name: &str, driver: &str) {
            let pci = self.0.join("sys/devices/pci0/0000:01:00.0");
            let drivers = self.0.join("sys/bus/pci/drivers").join(driver);
            fs::create_dir_all(&pci).unwrap();
            fs::create_dir_all(&drivers).unwrap();
            let _ = symlink(&drivers, pci.join("driver"));
            let dir = self.0.join("sys/class/infiniband").join(name);
            fs::create_dir_all(&dir).unwrap();
            symlink(&pci, dir.join("device")).unwrap();
        }
    }

    impl Drop for Files {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn error<T>(result: Result<T>) -> String {
        result.err().map(|e| format!("{e:#}")).unwrap_or_default()
    }

    #[test]
    fn a_machine_without_devices_is_told_so() {
        let files = Files::new("none");
        assert!(error(Machine::new(&files.0).devices()).contains("no RDMA device in this machine"));
    }

    #[test]
    fn devices_of_other_drivers_do_not_count() {
        let files = Files::new("other");
        files.device("mlx5_0", "mlx5_core");
        let text = error(Machine::new(&files.0).device(None));
        assert!(text.contains("mlx5_0"), "{text}");
    }

    #[test]
    fn a_device_is_found_by_name_or_alone() {
        let files = Files::new("named");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        assert_eq!(machine.device(None).unwrap().name, "ferrite0");
        assert_eq!(machine.device(Some("ferrite0")).unwrap().name, "ferrite0");
        assert!(error(machine.device(Some("ferrite7"))).contains("there is: ferrite0"));
        let device = machine.device(None).unwrap();
        assert_eq!(device.pci_address().as_deref(), Some("0000:01:00.0"));
    }

    #[test]
    fn a_move_is_written_in_one_line_to_a_file_that_is_there() {
        let files = Files::new("move");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        assert!(error(device.move_cq(3, "1")).contains("not mounted"));
        files.write("sys/kernel/debug/ferrite0/cqs", "");
        assert!(error(device.move_cq(3, "1")).contains("another version"));
        files.write("sys/kernel/debug/ferrite0/cq_move", "");
        device.move_cq(3, "none").unwrap();
        let path = files.0.join("sys/kernel/debug/ferrite0/cq_move");
        assert_eq!(fs::read_to_string(path).unwrap(), "3 none\n");
    }

    #[test]
    fn balance_is_asked_for_in_a_file_that_is_there() {
        let files = Files::new("balance");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        files.write("sys/kernel/debug/ferrite0/cqs", "");
        assert!(error(device.balance()).contains("another version"));
        files.write("sys/kernel/debug/ferrite0/balance", "");
        device.balance().unwrap();
        let path = files.0.join("sys/kernel/debug/ferrite0/balance");
        assert_eq!(fs::read_to_string(path).unwrap(), "1\n");
    }

    #[test]
    fn a_priority_is_written_in_one_line_to_a_file_that_is_there() {
        let files = Files::new("priority");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        assert!(error(device.set_priority(1, "bulk")).contains("not mounted"));
        files.write("sys/kernel/debug/ferrite0/handler_priority", "");
        device.set_priority(1, "low-latency").unwrap();
        let path = files.0.join("sys/kernel/debug/ferrite0/handler_priority");
        assert_eq!(fs::read_to_string(path).unwrap(), "1 low-latency\n");
    }

    #[test]
    fn a_missing_debugfs_and_an_old_driver_are_different_errors() {
        let files = Files::new("debug");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        assert!(error(device.table("eqs")).contains("not mounted"));
        files.write("sys/kernel/debug/other/file", "");
        assert!(error(device.table("eqs")).contains("another version"));
        files.write("sys/kernel/debug/ferrite0/eqs", "eqn irq\n0 24\n");
        assert_eq!(device.table("eqs").unwrap().len(), 1);
    }

    #[test]
    fn counters_are_read_and_the_lifespan_is_not_one() {
        let files = Files::new("counters");
        files.device("ferrite0", DRIVER);
        let machine = Machine::new(&files.0);
        let device = machine.device(None).unwrap();
        assert!(device.counters().is_err());
        files.write(
            "sys/class/infiniband/ferrite0/ports/1/hw_counters/tx_packets",
            "12\n",
        );
        files.write(
            "sys/class/infiniband/ferrite0/ports/1/hw_counters/lifespan",
            "10\n",
        );
        let counters = device.counters().unwrap();
        assert_eq!(
            counters.into_iter().collect::<Vec<_>>(),
            [("tx_packets".to_owned(), 12)]
        );
        files.write(
            "sys/class/infiniband/ferrite0/ports/1/hw_counters/bad",
            "x\n",
        );
        assert!(error(device.counters()).contains("counter bad"));
    }

    #[test]
    fn resources_of_other_devices_are_left_out() {
        let json = br#"[{"ifname":"ferrite0","lqpn":2,"pid":7},{"ifname":"rxe0","lqpn":2}]"#;
        let found = resources_from(json, "ferrite0");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0]["pid"], 7);
        assert!(resources_from(b"no JSON", "ferrite0").is_empty());
    }
}
