// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A device that failed: the driver resets it, registers it again, and whoever comes then is served.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};

use super::driver::{
    bind, bind_anew, ended_well, leave_failed, program_in_the_middle, unbind, PATIENCE, REPORTERS,
};
use super::misbehaviour::{behave, commands_given, misbehave, none_pinned_since};
use super::misbehaviour::{pinned, reset, wait_for_commands};
use super::{nothing_left, nvme, still_works, vector_map, wait_active, VmTest};
use crate::cluster::{Cluster, Options};
use crate::process::wait_until;
use crate::shell::LOAD_DRIVER;
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::Vm;

/// The driver is loaded when these begin and when they end.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "devlink and the table of interrupts say which device it is",
        what_it_is,
    ),
    VmTest::new(
        "a device that comes back is called what it was called, and the kernel's users are shown it",
        same_name,
    ),
    VmTest::new(
        "a device is not recovered where devlink does not want it",
        not_wanted,
    ),
    VmTest::new(
        "a reset by others under a program: the device comes back",
        comes_back_after_reset,
    ),
    VmTest::new(
        "a reset by others in the middle of an attempt: the device comes back",
        comes_back_after_resets_of_attempts,
    ),
    VmTest::new(
        "a function that lost its BARs without a driver, which was saved in their place, has them again",
        bars_are_found_again,
    ),
    VmTest::new(
        "unbound and unloaded while the device comes back",
        let_go_while_it_comes_back,
    ),
    VmTest::new(
        "a device that stops under a program leaves a dump, with its last events and without its keys",
        dumped_as_it_fails,
    ),
    VmTest::new(
        "a device that does not answer is dumped at once, and says which command it has",
        dumped_while_silent,
    ),
];

/// The same, of some minutes each.
pub const LONG: &[VmTest] = &[
    VmTest::new(
        "a device that fails under its users comes back, ten times in a row",
        comes_back,
    ),
    VmTest::new(
        "a device that fails again at once is left alone in the end, until somebody asks",
        left_alone,
    ),
    VmTest::new(
        "a device that fails while others ask for its recovery can still be recovered",
        asked_meanwhile,
    ),
    VmTest::new("a device that does not answer comes back", silent),
    VmTest::new(
        "a device that falls silent while nobody asks is noticed, and comes back",
        silent_alone,
    ),
    VmTest::new(
        "a device whose name was taken comes back by another",
        name_taken,
    ),
];

/// On the stock kernel: the test kernel handles no errors of the bus.
pub const BUS: &[VmTest] = &[VmTest::new(
    "an error of the bus under a program, fatal or not, and the device comes back",
    comes_back_after_bus_errors,
)];

/// One processor each, and in the first machine a function without a driver behind the same port as the device's.
pub fn beside_another(usual: Options) -> Options {
    let another = [
        "-global",
        "vfio-user-pci.multifunction=on",
        "-device",
        "pci-testdev,bus=rp0,addr=0.1",
    ];
    Options {
        cpus: 1,
        qemu_args: vec![another.map(str::to_owned).to_vec()],
        ..usual
    }
}

/// On the stock kernel: the locks of the kernel's NVMe target are not as lockdep wants them, and the test kernel handles
/// no errors of the bus.
pub const STOCK: &[VmTest] = &[
    VmTest::new(
        "an error of the bus that the kernel gives up for another function, and the device comes back",
        comes_back_after_errors_given_up,
    ),
    VmTest::new(
        "an error of the bus while others reset the function, and while its driver goes: it can be had again",
        comes_back_after_errors_in_between,
    ),
    VmTest::new(
        "an NVMe initiator and a target find a device again that came back",
        nvme_returns,
    ),
    VmTest::new(
        "an NVMe initiator and a target find a device again that has another vector map",
        nvme_finds_another_layout,
    ),
    VmTest::new(
        "a device that waits for a user who does not let go says so, and comes back when he does",
        held_up,
    ),
];

/// The device is gone after them, or what it knows is leaked on purpose.
pub const REMOVAL: &[VmTest] = &[
    VmTest::alone(
        "a device that vanishes while it comes back is left alone",
        vanishes_while_it_comes_back,
    ),
    VmTest::alone(
        "a device whose resets fail, and succeed later, comes back by itself",
        stopped_later,
    ),
    VmTest::alone(
        "a device that cannot be stopped is left alone in the end, until somebody asks",
        unstoppable,
    ),
];

/// What the driver says of how long its users needed, of a device that was taken away: a number follows. That it says
/// so is seen by the test of one who does not let go.
pub(super) const USERS_TOOK: &str = "users took";

/// How often the driver tries, and the longest that takes: `WAITS` of the driver.
const ATTEMPTS: u64 = 5;

/// What the reporter of machine `vm` says.
fn diagnose(vm: &Vm) -> Result<Value> {
    let said = vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do devlink -j health diagnose $r reporter fatal; done"
    ))?;
    serde_json::from_str(&said).with_context(|| format!("devlink said: {said}"))
}

/// What devlink says of the reporter.
fn shown(vm: &Vm) -> Result<String> {
    vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do devlink -j health show $r reporter fatal; done"
    ))
}

/// How long a dump may take: it waits for no device, but the tool is a program that has to start.
const AT_ONCE: Duration = Duration::from_secs(10);

/// What devlink has kept of the reporter of machine `vm`, or asks it for now.
fn dump(vm: &Vm) -> Result<Value> {
    let said = vm.sh_in(
        &format!(
            "{REPORTERS}; for r in $reporters; do
                 devlink -j health dump show $r reporter fatal || exit
             done"
        ),
        AT_ONCE,
    )?;
    serde_json::from_str(&said).with_context(|| format!("devlink said: {said}"))
}

/// Has devlink keep none.
pub(super) fn clear_dump(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do devlink health dump clear $r reporter fatal || exit; done"
    ))?;
    Ok(())
}

/// A dump of machine `vm` as it is now.
fn dump_now(vm: &Vm) -> Result<Value> {
    clear_dump(vm)?;
    dump(vm)
}

/// Since [`clear_dump`] devlink was given none by the driver itself.
pub(super) fn none_dumped(vm: &Vm) -> Result<()> {
    let dump = dump(vm)?;
    ensure!(dump["dumped"] == "as somebody asked", "{dump}");
    Ok(())
}

/// Whatever became of the device of machine `vm`, it is dumped at once.
pub(super) fn is_dumped(vm: &Vm) -> Result<()> {
    let dump = dump_now(vm).context("no dump of the device")?;
    ensure!(!happened(&dump)?.is_empty(), "nothing happened: {dump}");
    Ok(())
}

/// What happened last, as a dump says it.
fn happened(dump: &Value) -> Result<Vec<&str>> {
    let last = dump["last events"].as_array();
    let last = last.with_context(|| format!("no last events in {dump}"))?;
    let what = last.iter().map(|event| event["what"].as_str());
    what.collect::<Option<_>>()
        .with_context(|| format!("an event of which nothing is said: {dump}"))
}

/// All numbers in something.
fn numbers(of: &Value) -> Vec<u64> {
    match of {
        Value::Array(all) => all.iter().flat_map(numbers).collect(),
        Value::Object(all) => all.values().flat_map(numbers).collect(),
        Value::Number(number) => number.as_u64().into_iter().collect(),
        Value::String(text) => text
            .split(|c: char| !c.is_ascii_alphanumeric())
            .filter_map(|word| match word.strip_prefix("0x") {
                Some(word) => u64::from_str_radix(word, 16).ok(),
                None => word.parse().ok(),
            })
            .collect(),
        Value::Null | Value::Bool(_) => Vec::new(),
    }
}

/// The keys of machine `vm`.
fn keys(vm: &Vm) -> Result<Vec<u64>> {
    let said = vm.sh("rdma -dd -j resource show mr")?;
    let listed: Value =
        serde_json::from_str(&said).with_context(|| format!("rdma said: {said}"))?;
    let listed = listed.as_array().context("no list of regions")?;
    let key = |value: &Value| match value {
        Value::String(hex) => u64::from_str_radix(hex.trim_start_matches("0x"), 16).ok(),
        value => value.as_u64(),
    };
    let keys = listed
        .iter()
        .flat_map(|region| ["lkey", "rkey"].map(|name| key(&region[name])));
    Ok(keys.flatten().collect())
}

/// Undoes [`leave_failed`].
pub(super) fn recover_again(vm: &Vm) -> Result<()> {
    vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do
             devlink health set $r reporter fatal auto_recover true || exit
         done"
    ))?;
    Ok(())
}

/// Asks for an attempt.
const RECOVER: &str =
    "for r in $reporters; do devlink health recover $r reporter fatal || exit; done";

/// The same, whatever comes of it.
const RECOVER_ANYHOW: &str =
    "for r in $reporters; do devlink health recover $r reporter fatal 2>/dev/null; done";

fn recover(vm: &Vm) -> Result<()> {
    vm.sh_in(&format!("{REPORTERS}; {RECOVER}"), PATIENCE)?;
    Ok(())
}

fn count(vm: &Vm, what: &str) -> Result<u64> {
    let said = diagnose(vm)?;
    said[what]
        .as_u64()
        .with_context(|| format!("no {what} in {said}"))
}

pub(super) fn lives(vm: &Vm) -> Result<u64> {
    count(vm, "lives")
}

pub(super) fn fatal(cluster: &Cluster) -> Result<()> {
    cluster.device_command(1, &json!({"cmd": "fatal"}))?;
    Ok(())
}

/// Waits until a life has begun after so many, and can be used.
pub(super) fn wait_back(vm: &Vm, before: u64) -> Result<()> {
    wait_back_by_any_name(vm, before)?;
    wait_active(vm)
}

/// Waits until a life has begun after so many.
fn wait_back_by_any_name(vm: &Vm, before: u64) -> Result<()> {
    let back = wait_until(Instant::now() + vm.at_most(PATIENCE), || {
        let said = diagnose(vm)?;
        Ok(said["lives"].as_u64() > Some(before) && said["state"] == "working")
    })?;
    ensure!(
        back,
        "the device does not come back: {}\n{}",
        diagnose(vm)?,
        vm.sh("dmesg | tail -n 20")?
    );
    Ok(())
}

/// Waits until the driver has said that it does nothing more.
pub(super) fn wait_left_alone(vm: &Vm) -> Result<()> {
    vm.wait_for("dmesg | grep -q 'device stays failed'", PATIENCE)
        .context("the driver does not say that it gave up")?;
    ensure!(diagnose(vm)?["state"] == "failed", "{}", diagnose(vm)?);
    ensure!(shown(vm)?.contains("\"error\""), "{}", shown(vm)?);
    Ok(())
}

/// What the device is known by.
fn identity(vm: &Vm) -> Result<String> {
    vm.sh(
        "cd /sys/class/infiniband; for d in *; do
            echo $d $(cat $d/node_guid) $(cat $d/ports/1/gids/* | grep -v ^0000:0000:0000:0000:0000:0000 | sort)
        done",
    )
}

/// A connection of rdma_cm.
fn connects(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = super::once_it_listens(
        one,
        one.spawn("exec rping -s -C 20 -v", Duration::from_secs(60))?,
    )?;
    two.sh_in(
        &format!("rping -c -a {} -C 20 -v", one.ip()),
        Duration::from_secs(60),
    )?;
    server.success()?;
    Ok(())
}

fn comes_back(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    bind_anew(one)?;
    let before = identity(one)?;
    let pages = pinned(one)?;
    let program = "exec ib_write_bw -d $dev -x $gid -p 18520 -s 65536 -D 100 -F";
    one.sh("dmesg -C")?;
    for round in 1..=10 {
        // The driver tries no more than that: who asks has it begin to count anew.
        if round == ATTEMPTS + 1 {
            leave_failed(one)?;
            fatal(cluster)?;
            wait_left_alone(one)?;
            let count = lives(one)?;
            recover(one)?;
            wait_back(one, count)?;
            recover_again(one)?;
        }
        let back_again = || -> Result<()> {
            let count = lives(one)?;
            let time = 2 * PATIENCE;
            // The peer always has writes under way. The program at this end only looks at memory: it has
            // its context open until somebody ends it.
            let server = one.spawn(&format!("{DEVICE_AND_GID} {program}"), time)?;
            wait_listening(one, 18520)?;
            let client = two.spawn(&format!("{DEVICE_AND_GID} {program} {}", one.ip()), time)?;
            super::faults::wait_for_traffic(cluster, 2, &[&server, &client])?;
            // This one is told, and ends what it has after that.
            let holder = program_in_the_middle(one)?;
            fatal(cluster)?;
            ended_well(one, holder)?;
            let peer = client.wait()?;
            ensure!(
                format!("{}{}", peer.out, peer.err).contains("Failed status 12"),
                "the peer did not learn of it: {peer:?}"
            );
            wait_back(one, count)?;
            server.end()?;
            // Addresses come one after the other.
            let same = wait_until(Instant::now() + one.at_most(PATIENCE), || {
                Ok(identity(one)? == before)
            })?;
            ensure!(same, "it was {before}, it is {}", identity(one)?);
            nothing_left(one)?;
            still_works(cluster)
        };
        back_again().with_context(|| format!("round {round}"))?;
    }
    none_pinned_since(one, pages)?;
    ensure!(shown(one)?.contains("\"healthy\""), "{}", shown(one)?);
    connects(cluster)
}

/// The address of a machine's device, widened as its serial number is.
fn serial_number(mac: &str) -> String {
    let bytes: Vec<&str> = mac.split(':').collect();
    let (maker, number) = bytes.split_at(3);
    [maker, &["ff", "fe"], number].concat().join("-")
}

fn what_it_is(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let said = one.sh(&format!("{REPORTERS}; devlink -j dev info $reporters"))?;
    let info: Value =
        serde_json::from_str(&said).with_context(|| format!("devlink said: {said}"))?;
    let info = info["info"].as_object().and_then(|all| all.iter().next());
    let (handle, info) = info.with_context(|| format!("devlink said: {said}"))?;
    ensure!(info["driver"] == "ferrite", "{said}");
    ensure!(
        info["serial_number"] == serial_number(&crate::vm::mac(1)),
        "{said}"
    );
    let running = &info["versions"]["running"];
    let version = one.sh("cat /sys/class/infiniband/ferrite0/fw_ver")?;
    ensure!(running["fw"] == version.trim(), "{said}, not {version}");
    ensure!(running["fw.mgmt.api"].is_string(), "{said}");
    // Of each device its own.
    let (_, function) = handle.split_once('/').context("no handle")?;
    for purpose in ["control", "async", "comp0"] {
        one.sh(&format!(
            "grep -q ' ferrite-{purpose}@pci:{function}$' /proc/interrupts"
        ))
        .with_context(|| format!("no vector for {purpose}"))?;
    }
    Ok(())
}

fn same_name(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    one.sh(
        "dmesg -C; insmod /ferrite/modules/rust_rdma_loop.ko; rdma dev set ferrite0 name other7",
    )?;
    let count = lives(one)?;
    fatal(cluster)?;
    wait_back(one, count)?;
    one.sh("rdma dev show other7")
        .context("it came back by another name")?;
    // The sample tries every device that it is shown.
    one.wait_for(
        "dmesg | grep -q 'other7: rust_rdma_loop: ok' && ! dmesg | grep 'rust_rdma_loop: .*not ok'",
        PATIENCE,
    )
    .context("the kernel's users were not shown it")?;
    one.sh("rmmod rust_rdma_loop")?;
    // By its first name, which others here take for granted.
    bind_anew(one)?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Connects `vm` to the disk of `target`, again whenever the connection is lost.
fn connect_for_good(vm: &Vm, target: &Vm) -> Result<()> {
    nvme::prepare(vm)?;
    vm.sh(&format!(
        "echo transport=rdma,traddr={},trsvcid=4420,nqn=disk,nr_io_queues=1,ctrl_loss_tmo=300,\
             reconnect_delay=1,keep_alive_tmo=5 >/dev/nvme-fabrics",
        target.ip()
    ))?;
    vm.wait_for("test -b /dev/nvme0n1", Duration::from_secs(30))
}

const READ_DISK: &str = "dd if=/dev/nvme0n1 of=/dev/null bs=64k count=16 iflag=direct";

/// A program that registers memory which does not come: nobody answers for its pages.
const HOLDS_UP: &str = "import ctypes, fcntl, mmap, os, struct, sys
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
USERFAULTFD, UFFDIO_API, UFFDIO_REGISTER, MISSING = 323, 0xc018aa3f, 0xc020aa00, 1
fd = ctypes.CDLL(None, use_errno=True).syscall(USERFAULTFD, 0)
fcntl.ioctl(fd, UFFDIO_API, struct.pack('QQQ', 0xaa, 0, 0))
area = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
fcntl.ioctl(fd, UFFDIO_REGISTER, struct.pack('QQQQ', start, 4096, MISSING, 0))
pd = PD(Context(name=sys.argv[1]))
print(os.getpid(), flush=True)
MR(pd, 4096, 1, address=start)";

/// The call of a process that does not end holds recovery up, as with any RDMA driver.
fn held_up(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    one.sh(&format!(
        "rm -f /run/held_up; cat >/run/held_up.py <<'END'\n{HOLDS_UP}\nEND"
    ))?;
    let program = one.spawn(
        "exec python3 /run/held_up.py $(ls /sys/class/infiniband) >/run/held_up",
        2 * PATIENCE,
    )?;
    let said = "users have not let go of the device";
    let checked = (|| -> Result<()> {
        one.wait_for("test -s /run/held_up", PATIENCE)?;
        // It is in the call, and waits.
        one.wait_for(
            "grep -q handle_userfault /proc/$(cat /run/held_up)/stack",
            PATIENCE,
        )?;
        one.sh("dmesg -C")?;
        cluster.device_command(1, &json!({"cmd": "fatal"}))?;
        one.wait_for(&format!("dmesg | grep -q '{said} for 1[0-9] s'"), PATIENCE)?;
        // Again and again.
        one.wait_for(&format!("dmesg | grep -q '{said} for 2[0-9] s'"), PATIENCE)?;
        Ok(())
    })();
    let ended = program.end_with(libc::SIGKILL);
    checked?;
    ended?;
    wait_active(one)?;
    one.sh(&format!("dmesg | grep -q '{USERS_TOOK} .* to let go'"))?;
    still_works(cluster)?;
    nothing_left(one)
}

fn nvme_returns(cluster: &Cluster) -> Result<()> {
    nvme_finds_it_again(cluster, |one, count| {
        fatal(cluster)?;
        wait_back(one, count)
    })
}

fn nvme_finds_another_layout(cluster: &Cluster) -> Result<()> {
    nvme_finds_it_again(cluster, |one, count| {
        vector_map::set(one, "one/cpu")?;
        ensure!(lives(one)? == count + 1, "{} lives", lives(one)?);
        Ok(())
    })
}

/// The device of the first machine begins anew by `renew`, which is given how many lives it had, under an initiator
/// and under a target.
fn nvme_finds_it_again(cluster: &Cluster, renew: impl Fn(&Vm, u64) -> Result<()>) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (initiator, target) in [(one, two), (two, one)] {
        bind_anew(one)?;
        nvme::serve(target)?;
        connect_for_good(initiator, target)?;
        initiator.sh(READ_DISK)?;
        renew(one, lives(one)?)?;
        if target.name() == one.name() {
            nvme::listen_again(target)?;
        }
        initiator
            .sh_in(READ_DISK, Duration::from_secs(120))
            .with_context(|| format!("{} does not find its disk again", initiator.name()))?;
        nvme::disconnect(initiator)?;
        nvme::end(target)?;
    }
    // The core keeps completion queues of NVMe for others as long as there is the device.
    bind_anew(one)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn left_alone(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    one.sh("dmesg -C")?;
    let first = lives(one)?;
    let tried = count(one, "attempts")?;
    for life in 0..ATTEMPTS {
        fatal(cluster)?;
        wait_back(one, first + life)?;
    }
    fatal(cluster)?;
    wait_left_alone(one)?;
    ensure!(lives(one)? == first + ATTEMPTS, "{}", diagnose(one)?);
    ensure!(
        count(one, "attempts")? == tried + ATTEMPTS,
        "{}",
        diagnose(one)?
    );
    // The waits grew.
    let waits = one.sh("dmesg | grep -o 'tried again in [0-9]*' | grep -o '[0-9]*$'")?;
    let waits: Vec<u32> = waits
        .lines()
        .map(|wait| Ok(wait.parse()?))
        .collect::<Result<_>>()?;
    ensure!(
        waits.len() as u64 == ATTEMPTS && waits.is_sorted() && waits[0] < waits[waits.len() - 1],
        "waits of {waits:?} ms"
    );
    recover(one)?;
    wait_back(one, first + ATTEMPTS)?;
    ensure!(shown(one)?.contains("\"healthy\""), "{}", shown(one)?);
    // Who asked has it tried as often as at first.
    fatal(cluster)?;
    wait_back(one, first + ATTEMPTS + 1)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn not_wanted(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    one.sh("dmesg -C")?;
    leave_failed(one)?;
    let count = lives(one)?;
    let program = program_in_the_middle(one)?;
    fatal(cluster)?;
    wait_left_alone(one)?;
    let said = diagnose(one)?;
    ensure!(
        said["fatal code"] == 7 && said["lives"] == count,
        "not the failure that was asked for: {said}"
    );
    // The device is there, as one that failed.
    one.sh("rdma link | grep -q 'state DOWN'")?;
    recover(one)?;
    ended_well(one, program)?;
    wait_back(one, count)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn dumped_as_it_fails(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let program = program_in_the_middle(one)?;
    let keys = keys(one)?;
    ensure!(!keys.is_empty(), "a program without keys");
    let count = lives(one)?;
    fatal(cluster)?;
    ended_well(one, program)?;
    wait_back(one, count)?;
    // Nobody asked for it.
    let first = dump(one)?;
    ensure!(
        first["dumped"] == "as the device failed"
            && first["last failure"] == "the device stopped itself"
            && first["fatal code"] == 7
            && first["lives"] == count
            && first["this life"]["given up"] == true,
        "{first}"
    );
    let last = happened(&first)?;
    let fatal = last
        .iter()
        .position(|what| what.starts_with("event DeviceFatal") && what.ends_with(": Injected"));
    let given_up = last.iter().position(|what| what.starts_with("given up: "));
    ensure!(last.contains(&"life 1 begins"), "{first}");
    ensure!(fatal.is_some() && fatal < given_up, "{first}");
    // What the program had is seen, and how.
    ensure!(
        first["tables"]["queue_pairs"]["used"].as_u64() > Some(0)
            && first["tables"]["tpt"]["used"].as_u64() > Some(0),
        "{first}"
    );
    let ring = &first["control ring"];
    ensure!(
        ring["closed"] == true && ring["given"].as_u64() > Some(0),
        "{first}"
    );
    let queues = first["event queues"]
        .as_array()
        .context("no event queues")?;
    ensure!(
        queues.len() > 2
            && (0..)
                .zip(queues)
                .all(|(number, queue)| queue["number"] == number)
            && queues[0]["events"].as_u64() > Some(0)
            && queues[0]["read index"].as_u64() > Some(0),
        "{first}"
    );
    let handlers = first["interrupts"]["handlers"].as_u64();
    ensure!(handlers == Some(queues.len() as u64 - 2), "{first}");
    let said = numbers(&first);
    for key in keys {
        ensure!(!said.contains(&key), "{key:#x} is a key: {first}");
    }
    // It is kept, for those who may see it.
    ensure!(dump(one)? == first, "not the one that was kept");
    let other = one.run(
        &format!(
            "{REPORTERS}; for r in $reporters; do
                 setpriv --reuid 65534 --clear-groups devlink health dump show $r reporter fatal || exit
             done"
        ),
        AT_ONCE,
    )?;
    ensure!(
        !other.ok() && other.err.contains("not permitted"),
        "{other:?}"
    );
    let now = dump_now(one)?;
    ensure!(
        now["dumped"] == "as somebody asked"
            && now["state"] == "working"
            && now["this life"]["given up"] == false
            && now["control ring"]["closed"] == false,
        "{now}"
    );
    // What was before is not forgotten.
    let last = happened(&now)?;
    let again = format!("life {} begins", count + 1);
    ensure!(
        last.iter()
            .any(|what| what.starts_with("event DeviceFatal"))
            && last.iter().any(|what| *what == again),
        "{now}"
    );
    nothing_left(one)?;
    still_works(cluster)
}

fn dumped_while_silent(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let count = lives(one)?;
    misbehave(cluster, &json!({"answers": {"drop": 1.0}}))?;
    // What it makes first is not answered.
    let program = one.spawn(
        &format!("{DEVICE_AND_GID} exec ibv_rc_pingpong -d $dev -g $gid -p 18522"),
        2 * PATIENCE,
    )?;
    let mut seen = Value::Null;
    let has_one = wait_until(Instant::now() + one.at_most(AT_ONCE), || {
        seen = dump_now(one)?;
        let commands = seen["control ring"]["commands"].as_array();
        Ok(commands.is_some_and(|commands| !commands.is_empty()))
    })?;
    ensure!(has_one, "no command is seen: {seen}");
    let command = &seen["control ring"]["commands"][0];
    ensure!(
        command["answer expected"] == true
            && command["opcode"]
                .as_str()
                .is_some_and(|name| !name.starts_with("0x"))
            && seen["this life"]["given up"] == false
            && seen["state"] == "working",
        "{seen}"
    );
    // It is what it had when it failed.
    let opcode = command["opcode"].clone();
    clear_dump(one)?;
    fatal(cluster)?;
    behave(cluster)?;
    wait_back(one, count)?;
    program.end()?;
    let seen = dump(one)?;
    let command = &seen["control ring"]["commands"][0];
    ensure!(
        seen["dumped"] == "as the device failed"
            && command["answer expected"] == false
            && command["opcode"] == opcode,
        "{seen}"
    );
    clear_dump(one)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn asked_meanwhile(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    // Whoever asks of a device that devlink takes for healthy has nothing done.
    let asking = one.spawn(
        &format!("{REPORTERS}; while [ ! -e /run/asked ]; do {RECOVER_ANYHOW}; done"),
        4 * PATIENCE,
    )?;
    let asked = || -> Result<()> {
        for _ in 0..10 {
            let count = lives(one)?;
            fatal(cluster)?;
            wait_back(one, count)?;
        }
        Ok(())
    }();
    one.sh("touch /run/asked")?;
    asking.wait()?;
    one.sh("rm /run/asked")?;
    asked?;
    // Nobody asks for this one.
    let healthy = || Ok(shown(one)?.contains("\"healthy\""));
    ensure!(
        wait_until(Instant::now() + one.at_most(PATIENCE), healthy)?,
        "{}",
        shown(one)?
    );
    let count = lives(one)?;
    fatal(cluster)?;
    wait_back(one, count)?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Loads the driver anew with these parameters.
pub(super) fn load_with(vm: &Vm, parameters: &str) -> Result<()> {
    vm.sh_in(
        &format!("rmmod ferrite; {LOAD_DRIVER} {parameters}"),
        PATIENCE,
    )?;
    wait_active(vm)
}

fn silent(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    load_with(one, "command_timeout_ms=5000")?;
    let count = lives(one)?;
    one.sh("dmesg -C")?;
    misbehave(cluster, &json!({"answers": {"drop": 1.0}}))?;
    // What it makes first, before it waits for anybody, is not answered.
    let program = one.spawn(
        &format!("{DEVICE_AND_GID} exec ibv_rc_pingpong -d $dev -g $gid -p 18521"),
        2 * PATIENCE,
    )?;
    one.wait_for("dmesg | grep -q 'no answer to command'", PATIENCE)?;
    behave(cluster)?;
    wait_back(one, count)?;
    program.end()?;
    let said = diagnose(one)?;
    ensure!(
        said["last failure"] == "the device did not answer a command",
        "{said}"
    );
    load_with(one, "")?;
    nothing_left(one)?;
    still_works(cluster)
}

fn silent_alone(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    load_with(one, "command_timeout_ms=3000")?;
    let count = lives(one)?;
    one.sh("dmesg -C")?;
    misbehave(cluster, &json!({"answers": {"drop": 1.0}}))?;
    one.wait_for("dmesg | grep -q 'no answer to command Nop'", PATIENCE)?;
    behave(cluster)?;
    wait_back(one, count)?;
    load_with(one, "")?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Has the device of machine 1 fail, and no reset have an effect from then on. Gives how many attempts to begin a life
/// there were.
fn fails_and_goes_on(cluster: &Cluster) -> Result<u64> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let tried = count(one, "attempts")?;
    one.sh("dmesg -C")?;
    misbehave(
        cluster,
        &json!({"reset": "never", "ignore_function_reset": true}),
    )?;
    fatal(cluster)?;
    Ok(tried)
}

fn stopped_later(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let count_before = lives(one)?;
    let program = program_in_the_middle(one)?;
    let tried = fails_and_goes_on(cluster)?;
    ended_well(one, program)?;
    // All was tried when its life ended, and its reset again after that.
    one.wait_for(
        "dmesg | sed '1,/device cannot be stopped/d' | grep -q 'reset failed'",
        2 * PATIENCE,
    )
    .context("nobody tries to stop it again")?;
    // No life has begun, nor was one tried: what the device knows is lost with each.
    ensure!(count(one, "attempts")? == tried, "{}", diagnose(one)?);
    let lost = pinned(one)?;
    behave(cluster)?;
    wait_back(one, count_before)?;
    ensure!(lives(one)? == count_before + 1, "{}", diagnose(one)?);
    let said = one.sh("dmesg")?;
    ensure!(
        said.matches("memory that it was told of is not freed")
            .count()
            == 1,
        "more was lost than at first:\n{said}"
    );
    let dump = dump_now(one)?;
    let happened = happened(&dump)?;
    let after = |what: &str| happened.iter().rposition(|event| *event == what);
    let begins = after(&format!("life {} begins", count_before + 1));
    ensure!(
        after("cannot be stopped").is_some()
            && after("cannot be stopped") < after("stopped")
            && after("stopped") < begins,
        "{dump}"
    );
    still_works(cluster)?;
    none_pinned_since(one, lost)
}

fn unstoppable(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    let tried = fails_and_goes_on(cluster)?;
    // Each attempt to stop it takes as long as a reset may.
    one.wait_for(
        "dmesg | grep -q 'device stays failed (it cannot be stopped)'",
        4 * PATIENCE,
    )?;
    let waits = one.sh("dmesg | grep -c 'device is tried again in'")?;
    ensure!(
        waits.trim() == ATTEMPTS.to_string(),
        "{waits} times planned"
    );
    ensure!(count(one, "attempts")? == tried, "{}", diagnose(one)?);
    ensure!(shown(one)?.contains("\"error\""), "{}", shown(one)?);
    // Who asks has it tried, and that works when the device does.
    behave(cluster)?;
    recover(one)?;
    wait_active(one)?;
    still_works(cluster)
}

fn name_taken(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let count = lives(one)?;
    one.sh("dmesg -C; modprobe rdma_rxe; ip link add taker0 type dummy && ip link set taker0 up")?;
    leave_failed(one)?;
    // So that there is time between its going, which frees the name, and its coming.
    misbehave(
        cluster,
        &json!({"seed": 1, "hold": 400, "answers": {"delay": 1.0}}),
    )?;
    fatal(cluster)?;
    wait_left_alone(one)?;
    let asking = one.spawn(&format!("{REPORTERS}; {RECOVER}"), PATIENCE)?;
    one.sh_in(
        "until rdma link add ferrite0 type rxe netdev taker0 2>/dev/null; do
             [ -z \"$(dmesg | grep 'device works again')\" ] || exit 1
         done",
        PATIENCE,
    )
    .context("the name was not free while the device came back")?;
    behave(cluster)?;
    asking.success()?;
    wait_back_by_any_name(one, count)?;
    one.sh("rdma dev show ferrite1")
        .context("it did not come back by the next name")?;
    one.sh("rdma link delete ferrite0; ip link del taker0")?;
    // By its first name, which others here take for granted.
    bind_anew(one)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn comes_back_after_reset(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let before = pinned(one)?;
    // The driver waits longer each time.
    let rounds = if cluster.thorough() { 3 } else { 1 };
    for _ in 0..rounds {
        let count = lives(one)?;
        let program = program_in_the_middle(one)?;
        reset(one)?;
        ended_well(one, program)?;
        wait_back(one, count)?;
        let said = diagnose(one)?;
        ensure!(
            said["last failure"] == "the function was reset by others",
            "{said}"
        );
    }
    none_pinned_since(one, before)?;
    nothing_left(one)?;
    still_works(cluster)
}

/// Errors of the bus by the names that QEMU has for them, and whether they are fatal: a completion that did not come,
/// which leaves the link as it is, and a data link protocol error, for which the link is reset.
const BUS_ERRORS: [(&str, bool); 2] = [("COMP_TIME", false), ("DLP", true)];

/// Waits until the kernel is done with all errors of the bus that there were: the threads that recover from them wait for
/// the next interrupt.
fn bus_errors_over(vm: &Vm) -> Result<()> {
    vm.wait_for(
        "threads=$(grep -ls aerdrv /proc/[0-9]*/comm); [ -n \"$threads\" ] &&
         for t in $threads; do grep -q ^irq_ ${t%comm}wchan || exit 1; done",
        PATIENCE,
    )
    .context("the kernel is not done with errors of the bus")
}

/// Errors of the bus under a program, one after the other, of which the kernel says in the end that recovery `ended`.
fn bus_errors(cluster: &Cluster, ended: &str) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let before = pinned(one)?;
    for (error, fatal) in BUS_ERRORS {
        let count = lives(one)?;
        one.sh("dmesg -C")?;
        let program = program_in_the_middle(one)?;
        one.bus_error(error)?;
        ended_well(one, program)?;
        wait_back(one, count)?;
        let said = diagnose(one)?;
        ensure!(
            said["last failure"] == "there was an error of the bus",
            "{error}: {said}"
        );
        let said = one.sh("dmesg")?;
        ensure!(
            said.contains(&format!("device recovery {ended}"))
                && said.contains("Port link has been reset (0)") == fatal
                && !said.contains("cannot be stopped"),
            "{error}:\n{said}"
        );
        has_memory_and_bus(one).with_context(|| format!("after {error}"))?;
    }
    none_pinned_since(one, before)?;
    nothing_left(one)?;
    still_works(cluster)
}

fn comes_back_after_bus_errors(cluster: &Cluster) -> Result<()> {
    bus_errors(cluster, "successful")
}

fn comes_back_after_errors_given_up(cluster: &Cluster) -> Result<()> {
    bus_errors(cluster, "failed")
}

fn comes_back_after_errors_in_between(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let count = lives(one)?;
    let resets = one.spawn(
        "for i in $(seq 30); do
             for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do echo 1 >$f/reset; done
             sleep 0.$((RANDOM % 2))$((RANDOM % 10))
         done; true",
        PATIENCE,
    )?;
    for (error, _) in BUS_ERRORS.into_iter().cycle().take(6) {
        one.bus_error(error)?;
        std::thread::sleep(Duration::from_millis(300));
    }
    resets.success()?;
    // It may have been left alone by then.
    one.sh(&format!("{REPORTERS}; {RECOVER_ANYHOW}; true"))?;
    wait_back(one, count)?;
    has_memory_and_bus(one)?;
    for (error, _) in BUS_ERRORS {
        // So that what is said next is of this error.
        bus_errors_over(one)?;
        one.sh("dmesg -C")?;
        one.bus_error(error)?;
        unbind(one)?;
        one.wait_for("dmesg | grep -q 'device recovery'", PATIENCE)?;
        bind(one)?;
        wait_active(one)?;
        has_memory_and_bus(one).with_context(|| format!("after {error}"))?;
    }
    nothing_left(one)?;
    still_works(cluster)
}

/// For how many seconds others reset a function while somebody asks for attempts, at the least: for longer where none
/// was met.
const RESETS: u32 = 6;

/// The bits of the command register of a function that decodes its memory and has the bus.
const MEMORY_AND_BUS: u16 = 0x6;

/// A device at work has both.
fn has_memory_and_bus(vm: &Vm) -> Result<()> {
    let command = vm.sh(
        "for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do od -An -tu2 -j4 -N2 $f/config; done",
    )?;
    let command: u16 = command.trim().parse()?;
    ensure!(
        command & MEMORY_AND_BUS == MEMORY_AND_BUS,
        "the command register is {command:#x}"
    );
    Ok(())
}

/// Others reset the function of machine `vm`, at all moments of attempts that somebody asks for.
pub(super) fn survives_resets_of_attempts(vm: &Vm) -> Result<()> {
    let count = lives(vm)?;
    vm.sh("dmesg -C; rm -f /run/met")?;
    // Whoever asks does not wait for a second before each of them.
    leave_failed(vm)?;
    vm.sh_in(
        &format!(
            "{REPORTERS}
             until [ -e /run/met ]; do {RECOVER_ANYHOW}; done &
             end=$((SECONDS + {RESETS})) last=$((SECONDS + 5 * {RESETS}))
             while [ $SECONDS -lt $end ] ||
                   {{ [ $SECONDS -lt $last ] && ! dmesg | grep -q 'does not come back'; }}; do
                 for f in /sys/bus/pci/drivers/ferrite/*:*:*.*; do echo 1 >$f/reset; done
                 sleep 0.$((RANDOM % 3))$((RANDOM % 10))
             done
             touch /run/met; wait"
        ),
        PATIENCE,
    )?;
    // The last one to ask may have been before the last reset.
    let back = wait_until(Instant::now() + vm.at_most(PATIENCE), || {
        vm.sh(&format!("{REPORTERS}; {RECOVER_ANYHOW}; true"))?;
        let said = diagnose(vm)?;
        Ok(said["lives"].as_u64() > Some(count) && said["state"] == "working")
    })?;
    let said = vm.sh("dmesg")?;
    ensure!(back, "{}\n{said}", diagnose(vm)?);
    recover_again(vm)?;
    wait_active(vm)?;
    let came = said.matches("device works again").count();
    let met = said.matches("device does not come back").count();
    println!("      {met} attempts were reset, {came} were not");
    // An attempt takes some hundredths of a second: that none of them was met is bad luck now and then, and not
    // the device's fault. That nobody tried is.
    ensure!(met + came > 1, "nobody tried:\n{said}");
    for wrong in ["an attempt that was asked for failed", "cannot be stopped"] {
        ensure!(!said.contains(wrong), "{wrong}:\n{said}");
    }
    has_memory_and_bus(vm)?;
    nothing_left(vm)
}

fn comes_back_after_resets_of_attempts(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    survives_resets_of_attempts(one)?;
    still_works(cluster)
}

fn bars_are_found_again(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    unbind(one)?;
    // Who resets it saves what it has, and restores that.
    one.sh("for f in $(cat /run/functions); do
             cd /sys/bus/pci/devices/$f
             for bar in 4 5 6 7 8 9; do
                 printf '\\0\\0\\0\\0' | dd of=config bs=4 seek=$bar conv=notrunc status=none
             done
             echo 1 >reset
             [ $(od -An -tu4 -j16 -N4 config) -lt 16 ] || exit 1
         done")
        .context("the function has not lost its BARs")?;
    bind(one)?;
    has_memory_and_bus(one)?;
    still_works(cluster)
}

/// Has a device fail and waits until it is coming back, `commands` into its start.
fn comes_back_slowly(cluster: &Cluster, commands: u64) -> Result<()> {
    let (one, _) = cluster.two()?;
    // So that there is a moment between one command and the next.
    misbehave(
        cluster,
        &json!({"seed": 1, "hold": 100, "answers": {"delay": 1.0}}),
    )?;
    one.sh("dmesg -C")?;
    let before = commands_given(cluster)?;
    fatal(cluster)?;
    one.wait_for("dmesg | grep -q 'tried again in'", PATIENCE)?;
    wait_for_commands(cluster, before + commands)
}

fn let_go_while_it_comes_back(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let moments: &[u64] = if cluster.thorough() { &[1, 4, 9] } else { &[4] };
    for &commands in moments {
        for unload in [false, true] {
            comes_back_slowly(cluster, commands)?;
            if unload {
                one.sh_in("rmmod ferrite", PATIENCE)?;
                behave(cluster)?;
                one.sh_in(LOAD_DRIVER, PATIENCE)?;
            } else {
                unbind(one)?;
                one.sh("! ls /sys/class/infiniband | grep .")
                    .context("a device came back without a driver")?;
                behave(cluster)?;
                bind(one)?;
            }
            wait_active(one)?;
            nothing_left(one)?;
            still_works(cluster).with_context(|| format!("at command {commands}"))?;
        }
    }
    // And while it waits for its time.
    one.sh("dmesg -C")?;
    fatal(cluster)?;
    one.wait_for("dmesg | grep -q 'tried again in'", PATIENCE)?;
    bind_anew(one)?;
    still_works(cluster)
}

fn vanishes_while_it_comes_back(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    wait_active(one)?;
    let program = program_in_the_middle(one)?;
    comes_back_slowly(cluster, 4)?;
    cluster.remove_device(1)?;
    ended_well(one, program)?;
    wait_left_alone(one)?;
    let tried = count(one, "attempts")?;
    // Who asks is told that it did not work.
    let asked = one.run(&format!("{REPORTERS}; {RECOVER}"), PATIENCE)?;
    ensure!(!asked.ok() && !asked.timed_out, "{asked:?}");
    ensure!(count(one, "attempts")? == tried + 1, "{}", diagnose(one)?);
    one.sh_in("rmmod ferrite", PATIENCE)?;
    Ok(())
}
