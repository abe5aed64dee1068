// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a guest gets beside its root file system: an initramfs that finds the disks, and a
//! small disk with everything built from this tree. Both are made anew for each run, in well
//! under a second, so a rebuild never needs a new root file system.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::artifacts::program;
use crate::kernel::{ext4_image, Kernel};
use crate::step::output;
use crate::PROJECT;

/// Modules needed before the root is there, where they are not built in.
const BOOT_MODULES: &[&str] = &["virtio_pci", "virtio_blk", "ext4"];

/// The guest's first steps: load what finds the disks, mount them, hand over to the agent.
const INIT: &str = "#!/bin/busybox sh
export PATH=/bin
busybox mkdir -p /proc /sys /dev /root
busybox mount -t devtmpfs dev /dev
for m in $(busybox cat /modules/order); do busybox insmod /modules/$m || echo insmod $m failed; done
n=0
while [ ! -b /dev/vdc ]; do n=$((n+1)); [ $n -gt 600 ] && echo no disks && busybox poweroff -f; busybox sleep 0.1; done
busybox mount -t ext4 /dev/vda /root
busybox mount -t ext4 -o ro /dev/vdb /root/ferrite
busybox mount -t ext4 -o ro /dev/vdc /root/lib/modules
busybox mount --move /dev /root/dev
exec busybox switch_root /root /ferrite/bin/ferrite-agent
echo the agent did not start
busybox poweroff -f
";

/// Module files to load for `names`, dependencies first, as paths below the modules folder.
fn load_order(dep: &str, names: &[&str]) -> Vec<String> {
    fn stem(path: &str) -> String {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    }
    let mut order: Vec<String> = Vec::new();
    for name in names {
        for line in dep.lines() {
            let Some((path, needs)) = line.split_once(':') else {
                continue;
            };
            if stem(path) != *name {
                continue;
            }
            // depmod lists what is needed nearest first.
            for one in needs.split_whitespace().rev().chain([path]) {
                if !order.iter().any(|have| have == one) {
                    order.push(one.to_owned());
                }
            }
        }
    }
    order
}

/// Writer of the "newc" archive format that the kernel unpacks.
struct Cpio {
    file: File,
    inode: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, data: &[u8]) -> Result<()> {
        self.inode += 1;
        let length = u32::try_from(data.len()).context("file too large for an initramfs")?;
        let name_length = name.len() as u32 + 1;
        let fields = [
            self.inode,
            mode,
            0,
            0,
            1,
            0,
            length,
            0,
            0,
            0,
            0,
            name_length,
            0,
        ];
        let mut out = b"070701".to_vec();
        for field in fields {
            out.extend(format!("{field:08x}").into_bytes());
        }
        out.extend(name.as_bytes());
        out.push(0);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend(data);
        out.resize(out.len().next_multiple_of(4), 0);
        self.file.write_all(&out)?;
        Ok(())
    }
}

/// Makes the initramfs for a kernel.
pub fn initramfs(kernel: &Kernel, path: &Path) -> Result<()> {
    const DIR: u32 = 0o040_755;
    const EXE: u32 = 0o100_755;
    const REG: u32 = 0o100_644;
    let busybox = ["/bin/busybox", "/usr/bin/busybox"]
        .iter()
        .find_map(|p| fs::read(p).ok())
        .context("the root has no busybox")?;
    let mut cpio = Cpio {
        file: File::create(path)?,
        inode: 0,
    };
    for dir in ["bin", "modules"] {
        cpio.add(dir, DIR, &[])?;
    }
    cpio.add("bin/busybox", EXE, &busybox)?;
    let dep = fs::read_to_string(kernel.modules.join("modules.dep")).unwrap_or_default();
    let mut names = Vec::new();
    for (index, module) in load_order(&dep, BOOT_MODULES).iter().enumerate() {
        let file = kernel.modules.join(module);
        let data = if module.ends_with(".xz") {
            let out = Command::new("xz").arg("-dc").arg(&file).output()?;
            if !out.status.success() {
                bail!("cannot unpack {}", file.display());
            }
            out.stdout
        } else if module.ends_with(".ko") {
            fs::read(&file)?
        } else {
            bail!("unknown module format: {module}");
        };
        let name = format!("{index:02}.ko");
        cpio.add(&format!("modules/{name}"), REG, &data)?;
        names.push(name);
    }
    cpio.add("modules/order", REG, (names.join("\n") + "\n").as_bytes())?;
    cpio.add("init", EXE, INIT.as_bytes())?;
    cpio.add("TRAILER!!!", 0, &[])?;
    Ok(())
}

/// Makes the disk that guests mount on /ferrite.
///
/// `modules` are kernel modules built from this tree; missing programs are left out, so that a
/// half-built tree can be looked at.
pub fn disk(modules: &[PathBuf], dir: &Path, image: &Path) -> Result<()> {
    let stage = dir.join("payload");
    for folder in ["bin", "lib", "modules", "tests"] {
        fs::create_dir_all(stage.join(folder))?;
    }
    fs::copy(program("ferrite-agent"), stage.join("bin/ferrite-agent"))?;
    for name in ["verbs-bench", "verbs-check", "split-peer", "ferritectl"] {
        let from = program(name);
        if from.exists() {
            fs::copy(from, stage.join("bin").join(name))?;
        }
    }
    // Ferrite's, and that of the sample of a driver.
    for name in ["ferrite", "soft"] {
        let provider = program(&format!("lib{name}_provider.so"));
        if provider.exists() {
            fs::copy(provider, stage.join(format!("lib/lib{name}-rdmav34.so")))?;
            fs::write(
                stage.join(format!("lib/{name}.driver")),
                format!("driver {name}\n"),
            )?;
        }
    }
    for module in modules {
        if let Some(name) = module.file_name() {
            fs::copy(module, stage.join("modules").join(name))?;
        }
    }
    let tests = Path::new(PROJECT).join("tests");
    if tests.is_dir() {
        output(
            Command::new("cp")
                .arg("-rT")
                .arg(tests)
                .arg(stage.join("tests")),
        )?;
    }
    ext4_image(&stage, image, 0, &dir.join("payload.log"))?;
    fs::remove_dir_all(stage)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::load_order;

    #[test]
    fn modules_load_after_what_they_need() {
        let dep = "kernel/fs/ext4/ext4.ko.xz: kernel/fs/jbd2/jbd2.ko.xz kernel/lib/crc16.ko.xz\n\
                   kernel/drivers/block/virtio_blk.ko.xz: kernel/drivers/virtio/virtio_ring.ko.xz kernel/drivers/virtio/virtio.ko.xz\n";
        assert_eq!(
            load_order(dep, &["virtio_blk", "ext4"]),
            [
                "kernel/drivers/virtio/virtio.ko.xz",
                "kernel/drivers/virtio/virtio_ring.ko.xz",
                "kernel/drivers/block/virtio_blk.ko.xz",
                "kernel/lib/crc16.ko.xz",
                "kernel/fs/jbd2/jbd2.ko.xz",
                "kernel/fs/ext4/ext4.ko.xz",
            ]
        );
    }
}
