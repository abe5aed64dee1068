// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the guest's memory is really shared with this process.
//!
//! A monitor that was told `share=off` hands over the right file and keeps
//! private copies of its pages: nothing fails, and the device and the guest
//! see different bytes. The monitor's own list of mappings tells.

use std::fs;
use std::os::fd::AsFd;

/// What the user has to change.
pub const ADVICE: &str = "the VM's memory is not shared with the device; start QEMU with \
     -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine ...,memory-backend=mem";

/// The same where other VMs have the device process, too.
pub const SEAL_ADVICE: &str =
    "the VM's memory may shrink under the device, which would end it for \
     other VMs, too: only files that are sealed against that are taken, as those of QEMU's \
     memory-backend-memfd are";

/// Whether the file of `fd` is memory that cannot become less, and not that of a file system that need not
/// answer: what is mapped of it is there whenever it is accessed, as long as the host has memory for it and the
/// process may have more (`Documentation/device/14-limits.md`).
pub fn is_sealed(fd: impl AsFd) -> bool {
    // Files of other kinds have no seals, and those of huge pages may lack pages at any time.
    let seals = rustix::fs::fcntl_get_seals(&fd);
    let huge = rustix::fs::fstatfs(&fd).is_ok_and(|of| of.f_type as u64 == HUGETLBFS_MAGIC);
    !huge && seals.is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK))
}

/// `linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// True if process `pid` maps the file of `fd`, and only privately. False if
/// it cannot be told.
pub fn is_private(pid: rustix::process::Pid, fd: impl AsFd) -> bool {
    let Ok(stat) = rustix::fs::fstat(fd) else {
        return false;
    };
    let Ok(maps) = fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero())) else {
        return false;
    };
    let device = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    only_private(&maps, device, stat.st_ino)
}

fn only_private(maps: &str, device: (u32, u32), inode: u64) -> bool {
    let mut private = false;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (Some(rights), Some(_), Some(on), Some(number)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let Some((major, minor)) = on.split_once(':') else {
            continue;
        };
        let on = (
            u32::from_str_radix(major, 16),
            u32::from_str_radix(minor, 16),
        );
        if on != (Ok(device.0), Ok(device.1)) || number.parse() != Ok(inode) {
            continue;
        }
        if rights.ends_with('s') {
            return false;
        }
        private = true;
    }
    private
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0020000000 rw-p 00000000 00:01 77   /memfd:mem (deleted)
7f1000000000-7f1020000000 rw-s 00000000 00:01 78   /memfd:mem (deleted)
7f2000000000-7f2020000000 rw-p 00000000 00:00 0
";

    #[test]
    fn only_a_private_mapping_of_that_file_counts() {
        assert!(only_private(MAPS, (0, 1), 77));
        assert!(!only_private(MAPS, (0, 1), 78));
        assert!(!only_private(MAPS, (0, 1), 79));
        assert!(!only_private(MAPS, (0, 2), 77));
        assert!(!only_private("", (0, 1), 77));
        assert!(!only_private("garbage\n-\n", (0, 1), 77));
    }

    #[test]
    fn what_may_shrink_is_not_sealed() {
        use rustix::fs::{fcntl_add_seals, memfd_create, MemfdFlags, SealFlags};
        let may = memfd_create("may", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(!is_sealed(&may));
        fcntl_add_seals(&may, SealFlags::GROW).unwrap();
        assert!(!is_sealed(&may));
        fcntl_add_seals(&may, SealFlags::SHRINK).unwrap();
        assert!(is_sealed(&may));
        assert!(!is_sealed(std::fs::File::open("/proc/self/exe").unwrap()));
    }

    #[test]
    fn this_process_shares_what_it_maps_shared() {
        use rustix::mm::{mmap, munmap, MapFlags, ProtFlags};
        let own = rustix::process::getpid();
        for (flags, expected) in [(MapFlags::SHARED, false), (MapFlags::PRIVATE, true)] {
            let fd = rustix::fs::memfd_create("share", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, 4096).unwrap();
            assert!(!is_private(own, &fd));
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping, unmapped below and never accessed.
            let base = unsafe { mmap(std::ptr::null_mut(), 4096, protection, flags, &fd, 0) };
            let base = base.unwrap();
            assert_eq!(is_private(own, &fd), expected);
            // SAFETY: the mapping just made; nothing refers to it.
            unsafe { munmap(base, 4096) }.unwrap();
        }
    }
}
