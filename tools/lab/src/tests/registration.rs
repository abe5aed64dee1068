// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that is registered by work requests, and how the device is told where it is.

use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde_json::Value;

use super::{nothing_left, VmTest};
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a kernel user registers on its send queue, uses that at once, and mends what failed",
        kernel_user,
    ),
    VmTest::new(
        "huge pages are told to the device as such, not in pieces",
        huge_pages,
    ),
];

const PATIENCE: Duration = Duration::from_secs(120);

/// A counter of the device, as the kernel tells it.
fn counter(vm: &Vm, name: &str) -> Result<u64> {
    let text = vm.sh("rdma -j statistic show link ferrite0/1")?;
    let shown: Value = serde_json::from_str(&text).context("rdma statistic")?;
    let value = shown[0][name].as_u64();
    value.with_context(|| format!("no counter {name} in:\n{text}"))
}

/// What the sample has to have done with a failed registration, by cause: what it says of each. The last
/// number is the device's own (chapter 4), which tells the causes apart.
const FAILED: [(&str, u32); 3] = [("NoSuchKey", 1), ("AlreadyValid", 10), ("NoRoom", 9)];

fn kernel_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let counted = || -> Result<[u64; 2]> {
        Ok([
            counter(one, "sq_registrations")?,
            counter(one, "early_uses")?,
        ])
    };
    let before = counted()?;
    let said = one.sh_in(
        "set -e
         dmesg -C
         insmod /ferrite/modules/rust_rdma_loop.ko
         rmmod rust_rdma_loop
         dmesg",
        PATIENCE,
    )?;
    let after = counted()?;
    for test in [
        "a_region_is_used_before_its_registration_is_complete",
        "an_offer_is_one_request_and_ends_with_the_answer",
        "an_offer_may_answer_an_offer",
        "an_offer_that_fails_is_not_sent",
        "a_failed_registration_drains_and_is_tried_again",
        "no_such_key_ends_the_connection",
        "a_key_in_use_ends_the_connection",
        "too_many_pages_end_the_connection",
        "a_region_may_be_for_one_message",
        "regions_may_have_many_pages",
        "regions_may_have_large_pages",
        "regions_of_other_domains_are_not_posted",
    ] {
        ensure!(
            said.contains(&format!("ferrite_sample: ferrite0: ok {test}")),
            "the sample does not say that {test}:\n{said}"
        );
    }
    for (cause, number) in FAILED {
        for line in [
            format!("drained by {cause}: LocalProtection {number}, then Sqd"),
            format!("mended after {cause}"),
            format!("ended by {cause}: LocalProtection {number}, then Err"),
        ] {
            ensure!(
                said.contains(&line),
                "the sample does not say '{line}':\n{said}"
            );
        }
    }
    // The test of use before completion does it four times; whether others do depends on who is faster.
    let [registered, early] = [after[0] - before[0], after[1] - before[1]];
    ensure!(
        early >= 4,
        "{early} early uses, of {registered} registrations"
    );
    ensure!(registered > early, "{registered} registrations");
    nothing_left(one)
}

/// Registers 8 MiB of huge pages, and prints what the kernel tells of the region.
const REGISTER_HUGE: &str = r#"
set -e
echo 8 >/proc/sys/vm/nr_hugepages
python3 - <<'END'
import ctypes, mmap, subprocess
from pyverbs.device import Context
from pyverbs.enums import IBV_ACCESS_LOCAL_WRITE
from pyverbs.mr import MR
from pyverbs.pd import PD

MAP_HUGETLB, LENGTH = 0x40000, 8 << 20
memory = mmap.mmap(-1, LENGTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
with Context(name="ferrite0") as context, PD(context) as pd:
    with MR(pd, LENGTH, IBV_ACCESS_LOCAL_WRITE, address) as mr:
        shown = ["rdma", "-dd", "-j", "resource", "show", "mr"]
        print(subprocess.run(shown, check=True, capture_output=True, text=True).stdout)
END
echo 0 >/proc/sys/vm/nr_hugepages"#;

fn huge_pages(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let text = one.sh_in(REGISTER_HUGE, PATIENCE)?;
    let shown: Value = serde_json::from_str(&text).context("rdma resource")?;
    let regions = shown.as_array().into_iter().flatten();
    let mut regions = regions.filter(|region| region["mrlen"].as_u64() == Some(8 << 20));
    let region = regions.next().with_context(|| text.clone())?;
    let number = |name: &str| {
        let value = region[name].as_u64();
        value.with_context(|| format!("no {name} in {region}"))
    };
    let (page_size, translations) = (number("drv_page_size")?, number("drv_translations")?);
    // Pages may follow each other in memory, and then there are fewer of them.
    ensure!(
        page_size >= 2 << 20 && translations <= 4,
        "{translations} pages of {page_size} bytes"
    );
    nothing_left(one)
}
