// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Devices with other numbers and other doorbell pages than usual, and each with its own: driver and
//! provider go by what the device says of itself, and each side by what its peer says.

use std::ops::Range;
use std::time::Duration;

use anyhow::{ensure, Context, Result};

use super::basics::{connection_manager, verbs_check};
use super::limits::{hold_contexts, no_more};
use super::{nothing_left, notification, VmTest};
use crate::cluster::{Cluster, Options};
use crate::traffic::{client_server, pingpong};

/// On machines that were made with [`options`].
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "queue pairs, shared receive queues and keys have the numbers of their device",
        each_has_its_own,
    ),
    VmTest::new("every operation delivers every byte", |c| {
        verbs_check(c, "data")
    }),
    VmTest::new("the extended posting and polling calls", |c| {
        verbs_check(c, "extended")
    }),
    VmTest::new("completion events, none lost", |c| verbs_check(c, "events")),
    VmTest::new(
        "connections made by rdma_cm: rping and ucmatose",
        connection_manager,
    ),
    VmTest::new(
        "there are as many contexts as doorbell pages, and each of them works",
        every_page,
    ),
];

/// What is not usual about a device.
struct Device {
    qps: Range<u32>,
    cq_first: u32,
    srqs: Range<u32>,
    tags: Range<u32>,
    doorbell_pages: u32,
    /// Base-2 logarithm of the bytes from one doorbell page to the next.
    doorbell_stride: u8,
}

/// Those of the two machines: one from the middle of the numbers, one up to their end, but for the
/// queue pair number that stands for a multicast group's.
const DEVICES: [Device; 2] = [
    Device {
        qps: 0x10_0000..0x10_4000,
        cq_first: 0x20_0000,
        srqs: 0x30_0000..0x30_2000,
        tags: 0x40_0000..0x40_4000,
        doorbell_pages: 9,
        doorbell_stride: 14,
    },
    Device {
        qps: 0xff_bfff..0xff_ffff,
        cq_first: 0xff_c000,
        srqs: 0xff_e000..0x100_0000,
        tags: 0xf0_0000..0x100_0000,
        doorbell_pages: 5,
        doorbell_stride: 16,
    },
];

impl Device {
    fn args(&self) -> Vec<String> {
        [
            ("--qp-first", self.qps.start),
            ("--cq-first", self.cq_first),
            ("--srq-first", self.srqs.start),
            ("--tag-first", self.tags.start),
            ("--tags", self.tags.end - self.tags.start),
            ("--doorbell-pages", self.doorbell_pages),
            ("--doorbell-stride", self.doorbell_stride.into()),
        ]
        .into_iter()
        .flat_map(|(option, value)| [option.to_owned(), value.to_string()])
        .collect()
    }
}

/// The machines that these tests need. The second has one vector for all of its event queues.
pub fn options(usual: Options) -> Options {
    let [one, two] = DEVICES.map(|device| device.args());
    Options {
        cpus: 2,
        own_device_args: vec![one, [two, notification::vectors(1, 8)].concat()],
        ..usual
    }
}

const TIME: Duration = Duration::from_secs(90);

/// What a program says is the `name` of one end, "local" or "remote", of its connection.
fn said(text: &str, end: &str, name: &str) -> Result<u32> {
    text.lines()
        .filter(|line| line.trim_start().starts_with(end))
        .find_map(|line| {
            let (_, rest) = line.split_once(&format!(" {name} "))?;
            let word = rest.split_whitespace().next()?.trim_end_matches(',');
            u32::from_str_radix(word.trim_start_matches("0x"), 16).ok()
        })
        .with_context(|| format!("no {name} of the {end} end in:\n{text}"))
}

fn each_has_its_own(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let run = |server: &str, client: &str| {
        client_server(
            (one, &format!("exec {server} -d $dev -p $port")),
            (two, &format!("exec {client} -d $dev -p $port $peer")),
            18518,
            TIME,
        )
        .map(|(out, _)| out)
        .with_context(|| client.to_owned())
    };
    // The client is in the second machine.
    let ends = || ["remote", "local"].into_iter().zip(&DEVICES);

    let program = "ibv_rc_pingpong -g $gid -s 4096 -n 50 -c";
    let out = run(program, program)?;
    for (end, device) in ends() {
        let number = said(&out, end, "QPN")?;
        ensure!(device.qps.contains(&number), "{end}: {number:#x}\n{out}");
    }

    let program = "ibv_xsrq_pingpong -g $gid -s 4096 -n 50";
    let out = run(&format!("{program} -c 1"), program)?;
    for (end, device) in ends() {
        let number = said(&out, end, "SRQN")?;
        ensure!(device.srqs.contains(&number), "{end}: {number:#x}\n{out}");
        for name in ["RECV", "SEND"] {
            let number = said(&out, end, name)?;
            ensure!(device.qps.contains(&number), "{end}: {number:#x}\n{out}");
        }
    }

    let program = "ib_write_bw -x $gid -s 4096 -n 50 -F";
    let out = run(program, program)?;
    for (end, device) in ends() {
        // An index with the byte of its instance.
        let index = said(&out, end, "RKey")? >> 8;
        ensure!(device.tags.contains(&index), "{end}: {index:#x}\n{out}");
    }
    Ok(())
}

/// Most of the pages are taken; programs that use the others, posting and waiting for events, are
/// heard by the device.
fn every_page(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let mut held = Vec::new();
    let checked = (|| -> Result<()> {
        for (vm, device) in [one, two].into_iter().zip(&DEVICES) {
            let contexts = device.doorbell_pages - 1;
            let user = "setpriv --reuid 1000 --regid 1000 --clear-groups";
            let (program, count) = hold_contexts(vm, user)?;
            held.push(program);
            // A quarter is left to others.
            ensure!(
                count == contexts - contexts / 4,
                "{}: a user has {count} of {contexts} contexts",
                vm.name()
            );
        }
        pingpong(one, two, 4096, 50, true)?;
        for (vm, device) in [one, two].into_iter().zip(&DEVICES) {
            let contexts = device.doorbell_pages - 1;
            let (program, count) = hold_contexts(vm, "nice")?;
            held.push(program);
            ensure!(
                count == contexts / 4,
                "{}: {count} of {contexts} contexts were left",
                vm.name()
            );
            no_more(vm, "nice")?;
        }
        Ok(())
    })();
    let ended: Vec<_> = held
        .into_iter()
        .map(|program| program.end_with(libc::SIGKILL))
        .collect();
    checked?;
    for end in ended {
        end?;
    }
    for vm in [one, two] {
        nothing_left(vm)?;
    }
    super::still_works(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_what_programs_say() {
        let pingpong =
            "  local address:  LID 0x0000, QPN 0x100010, PSN 0x1, GID ::ffff:10.77.0.2\n  \
                        remote address: LID 0x0000, QPN 0xffbfff, PSN 0x2, GID ::ffff:10.77.0.1\n";
        assert_eq!(said(pingpong, "local", "QPN").unwrap(), 0x10_0010);
        assert_eq!(said(pingpong, "remote", "QPN").unwrap(), 0xff_bfff);
        assert!(said(pingpong, "remote", "SRQN").is_err());
        let xrc = "   local: LID 0000, QPN RECV 000012 SEND 000013, PSN 1, SRQN 300000, GID ::\n";
        assert_eq!(said(xrc, "local", "SRQN").unwrap(), 0x30_0000);
        assert_eq!(said(xrc, "local", "SEND").unwrap(), 0x13);
        let perftest = " local address: LID 0000 QPN 0x0011 PSN 0x3c RKey 0x40000102 VAddr 0x7f0\n";
        assert_eq!(said(perftest, "local", "RKey").unwrap(), 0x4000_0102);
    }

    #[test]
    fn each_device_gets_its_own_options() {
        let made = options(Options::pair("", Vec::new()));
        let [one, two] = &made.own_device_args[..] else {
            panic!("{made:?}");
        };
        assert_eq!(one[..2], ["--qp-first", "1048576"]);
        assert_eq!(two[..2], ["--qp-first", "16760831"]);
        assert_eq!(one[12..], ["--doorbell-stride", "14"]);
        assert_eq!(two[12..14], ["--doorbell-stride", "16"]);
        assert_eq!(two[14..], notification::vectors(1, 8));
    }
}
