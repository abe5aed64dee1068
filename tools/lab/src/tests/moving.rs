// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Completion queues that are moved to other handlers while they are in use.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::driver::{bind, bind_anew, unbind};
use super::vectors::{self, TAKEN};
use super::{basics, lifecycle, nvme, still_works, VmTest};
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{wait_connected, wait_listening, DEVICE_AND_GID};
use crate::vm::{Running, Vm};

/// With any number of processors and vectors.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "completion queues move under load, and nobody misses an event",
        |c| basics::alone(c, "move"),
    ),
    VmTest::new(
        "what is no queue, no handler and no sense is refused",
        refused,
    ),
];

/// The same with queues of the kernel.
pub const OF_THE_KERNEL: &[VmTest] = &[VmTest::new(
    "completion queues of the kernel move under a disk",
    under_a_disk,
)];

/// Which handler serves, and where: nothing else moves meanwhile.
pub const SERVES: &[VmTest] = &[VmTest::new(
    "the handler that a queue was moved to serves it, on its processor",
    serves,
)];

/// Where the driver lets go of the device.
pub const ENDING: &[VmTest] = &[VmTest::new(
    "the driver lets go of a device whose kernel queues have no handler",
    unbound,
)];

/// Where the device is brought back afterwards.
pub const FAILING: &[VmTest] = &[VmTest::new(
    "a queue of a device that failed is not moved, and its program ends",
    failed,
)];

const TIME: Duration = Duration::from_secs(60);
/// How often it is looked what happens until that is what should.
const LOOKS: usize = 20;
/// The same where a disk waits meanwhile, and gives up after half a minute.
const LOOKS_AT_A_DISK: usize = 5;
const PORT: u16 = 18524;

/// What happened in a while.
#[derive(Debug, Default, PartialEq)]
pub struct Served {
    /// The vectors that were taken, each with the processor.
    vectors: Vec<(usize, usize)>,
    /// The handlers whose event queues had events.
    handlers: Vec<u64>,
}

impl Served {
    /// By one handler.
    pub fn by(handler: u64, vector: usize, cpu: usize) -> Self {
        Self {
            vectors: vec![(vector, cpu)],
            handlers: vec![handler],
        }
    }

    fn look(vm: &Vm) -> Result<Self> {
        let text = vm.sh(&vectors::twice(&format!(
            "{TAKEN} ferritectl show handlers --json"
        )))?;
        let sample = |text: &str| -> Result<_> {
            let mut lines = text.lines();
            let vectors = vectors::read(&mut lines)?;
            let rest: Vec<&str> = lines.collect();
            Ok((vectors, events(&rows(&rest.join("\n"), "handlers")?)?))
        };
        let (before, after) = vectors::halves(&text)?;
        let ((vectors, events), (vectors_after, events_after)) = (sample(before)?, sample(after)?);
        let mut served = Self::default();
        // Vectors 0 and 1 are for commands and asynchronous events.
        for (vector, (before, after)) in vectors.iter().zip(&vectors_after).enumerate().skip(2) {
            for (cpu, (before, after)) in before.iter().zip(after).enumerate() {
                if after > before {
                    served.vectors.push((vector, cpu));
                }
            }
        }
        for (handler, (before, after)) in events.iter().zip(&events_after).enumerate() {
            if after > before {
                served.handlers.push(handler as u64);
            }
        }
        Ok(served)
    }

    /// Looks until this is what happens: now and then a message of the connection manager comes between, and a
    /// machine that is busy may have nothing happen for a while.
    pub fn expect(&self, vm: &Vm, what: &str) -> Result<()> {
        Self::expect_that(vm, LOOKS, |served| served == self)
            .with_context(|| format!("{what}, expected {self:?}"))
    }

    /// Looks, so many times at most, until what happens is right.
    fn expect_that(vm: &Vm, looks: usize, right: impl Fn(&Self) -> bool) -> Result<()> {
        let mut found = Vec::new();
        for _ in 0..looks {
            let served = Self::look(vm)?;
            if right(&served) {
                return Ok(());
            }
            found.push(served);
        }
        bail!("found {found:?}")
    }

    /// Looks until only this handler has events.
    fn only(vm: &Vm, handler: u64) -> Result<()> {
        Self::expect_that(vm, LOOKS, |served| served.handlers == [handler])
            .with_context(|| format!("{}: events, expected of handler {handler}", vm.name()))
    }

    /// Looks until nothing happens in a machine whose disk stands still for as long as that takes.
    fn nothing(vm: &Vm, what: &str) -> Result<()> {
        Self::expect_that(vm, LOOKS_AT_A_DISK, |served| *served == Self::default())
            .with_context(|| what.to_owned())
    }
}

/// How many events each handler has had.
fn events(handlers: &[Value]) -> Result<Vec<u64>> {
    handlers
        .iter()
        .map(|row| row["events"].as_u64().with_context(|| format!("{row}")))
        .collect()
}

/// The rows of a section of what ferritectl says.
fn rows(text: &str, section: &str) -> Result<Vec<Value>> {
    let shown: Value = serde_json::from_str(text).with_context(|| text.to_owned())?;
    let rows = shown[section].as_array().with_context(|| text.to_owned())?;
    Ok(rows.clone())
}

pub fn shown(vm: &Vm, section: &str) -> Result<Vec<Value>> {
    rows(
        &vm.sh(&format!("ferritectl show {section} --json"))?,
        section,
    )
}

/// The completion queue of a program.
pub fn queue_of(vm: &Vm, program: &str) -> Result<Value> {
    let cqs = shown(vm, "cqs")?;
    let found = cqs.iter().find(|row| row["comm"] == program);
    found
        .cloned()
        .with_context(|| format!("no queue of {program}: {cqs:?}"))
}

fn move_to(vm: &Vm, cqn: &Value, handler: &str) -> Result<()> {
    vm.sh(&format!("ferritectl cq move {cqn} {handler}"))?;
    Ok(())
}

/// Two programs that wake each other without end.
pub struct Endless<'v>(Running<'v>, Running<'v>);

impl<'v> Endless<'v> {
    fn start(one: &'v Vm, two: &'v Vm) -> Result<Self> {
        Self::start_by(one, "", two)
    }

    /// The one in the first machine is started by a command.
    pub fn start_by(one: &'v Vm, command: &str, two: &'v Vm) -> Result<Self> {
        let endless = format!("ibv_rc_pingpong -d $dev -g $gid -p {PORT} -s 64 -n 100000000 -e");
        let time = Duration::from_secs(300);
        let server = one.spawn(&format!("{DEVICE_AND_GID} exec {command} {endless}"), time)?;
        wait_listening(one, PORT)?;
        let client = format!("{DEVICE_AND_GID} exec {endless} {}", one.ip());
        let client = two.spawn(&client, time)?;
        wait_connected(one)?;
        Ok(Self(server, client))
    }

    pub fn end(self) -> Result<()> {
        for running in [self.1, self.0] {
            running.end_with(libc::SIGKILL)?;
        }
        Ok(())
    }
}

fn serves(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let running = Endless::start(one, two)?;
    let served = follows(one, cluster.thorough());
    running.end()?;
    served?;
    still_works(cluster)
}

/// Moves the queue to every handler, or where there is no time to the first one and to the last.
fn follows(one: &Vm, every: bool) -> Result<()> {
    let queue = queue_of(one, "ibv_rc_pingpong")?;
    let cqn = &queue["cqn"];
    let handlers = shown(one, "handlers")?;
    let vector = |handler: &Value| handler["eqn"].as_u64().map(|eqn| eqn as usize);
    let vectors = vectors::taken(one)?.len();
    // Where there are fewer vectors, handlers share those after the first two.
    let vector = |handler: &Value| -> Result<usize> {
        let eqn = vector(handler).context("no eqn")?;
        ensure!(vectors > 2, "{vectors} vectors");
        Ok(2 + (eqn - 2) % (vectors - 2))
    };
    let irq = |handler: &Value| handler["irq"].as_u64().context("no irq");
    let cpus: usize = one.sh("nproc")?.trim().parse()?;
    // What is asked for: it is so after the next interrupt.
    let arrives_at = |handler: &Value| -> Result<usize> {
        let irq = irq(handler)?;
        let list = one.sh(&format!("cat /proc/irq/{irq}/smp_affinity_list"))?;
        list.trim().parse().with_context(|| list.clone())
    };
    let ends = [0, handlers.len() - 1];
    let wanted = handlers.iter().enumerate();
    for (_, handler) in wanted.filter(|(at, _)| every || ends.contains(at)) {
        let number = handler["handler"].as_u64().context("no number")?;
        move_to(one, cqn, &number.to_string())?;
        let now = queue_of(one, "ibv_rc_pingpong")?;
        ensure!(
            now["handler"] == handler["handler"],
            "{now} after a move to {number}"
        );
        let home = arrives_at(handler)?;
        let what = format!("at handler {number}");
        Served::by(number, vector(handler)?, home).expect(one, &what)?;
        // Whoever steers the interrupt elsewhere is followed, and so is the queue by name of place.
        let away = (home + 1) % cpus;
        let irq = irq(handler)?;
        one.sh(&format!("echo {away} >/proc/irq/{irq}/smp_affinity_list"))?;
        let steered = (|| {
            let what = format!("at handler {number}, steered to {away}");
            Served::by(number, vector(handler)?, away).expect(one, &what)?;
            let mut all = Vec::new();
            for handler in &handlers {
                all.push(arrives_at(handler)?);
            }
            for cpu in 0..cpus {
                one.sh(&format!("taskset -c {cpu} ferritectl cq move {cqn} local"))?;
                let now = queue_of(one, "ibv_rc_pingpong")?;
                let chosen = now["handler"].as_u64();
                let at = chosen
                    .and_then(|chosen| all.get(chosen as usize))
                    .with_context(|| format!("{now} after a move to the local one"))?;
                ensure!(
                    *at == cpu || !all.contains(&cpu),
                    "local to {cpu} is {now}, which arrives at {at}; all arrive at {all:?}"
                );
            }
            Ok(())
        })();
        one.sh(&format!("echo {home} >/proc/irq/{irq}/smp_affinity_list"))?;
        steered?;
    }
    move_to(one, cqn, "none")?;
    let now = queue_of(one, "ibv_rc_pingpong")?;
    ensure!(now["handler"] == "none", "{now} after a move to none");
    let rdma = one.sh("rdma -dd resource show cq")?;
    ensure!(rdma.contains("drv_vector none"), "rdma shows:\n{rdma}");
    Served::default().expect(one, "without a handler")?;
    move_to(one, cqn, "0")?;
    let first = &handlers[0];
    Served::by(0, vector(first)?, arrives_at(first)?).expect(one, "at a handler again")
}

fn refused(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let running = Endless::start(one, two)?;
    let checked = (|| {
        let queue = queue_of(one, "ibv_rc_pingpong")?;
        let (cqn, before) = (&queue["cqn"], &queue["handler"]);
        let handlers = shown(one, "handlers")?.len();
        for (script, why) in [
            (format!("ferritectl cq move {cqn} {handlers}"), "no handler"),
            (format!("ferritectl cq move {cqn} 4294967293"), "no handler"),
            (format!("ferritectl cq move {cqn} 4294967295"), "no handler"),
            (
                "ferritectl cq move 16777215 0".into(),
                "no completion queue",
            ),
            (
                "ferritectl cq move 4294967295 none".into(),
                "no completion queue",
            ),
            (format!("ferritectl cq move {cqn} nowhere"), "is needed"),
            (
                format!("setpriv --reuid 65534 --clear-groups ferritectl cq move {cqn} none"),
                "only root",
            ),
            (
                "head -c 4096 /dev/zero >/sys/kernel/debug/ferrite0/cq_move".into(),
                "nvalid argument",
            ),
            (
                format!("echo {cqn} 0 0 >/sys/kernel/debug/ferrite0/cq_move"),
                "nvalid argument",
            ),
        ] {
            let outcome = one.run(&script, TIME)?;
            ensure!(
                !outcome.ok() && outcome.err.contains(why),
                "{script}: {outcome:?}"
            );
        }
        let now = queue_of(one, "ibv_rc_pingpong")?;
        ensure!(now["handler"] == *before, "{now}, before {before}");
        Served::expect_that(one, LOOKS, |served| *served != Served::default())
            .context("the pingpong does not go on")
    })();
    running.end()?;
    checked
}

/// The numbers of the completion queues of the kernel.
fn kernel_queues(vm: &Vm) -> Result<Vec<Value>> {
    let mut queues = shown(vm, "cqs")?;
    queues.retain(|row| row["owner"] == "kernel");
    ensure!(queues.len() > 1, "{}: {queues:?}", vm.name());
    Ok(queues)
}

/// Moves all completion queues of the kernel to these handlers, one after the other, by the shell alone:
/// a program for each move would take most of the time.
fn move_all(vm: &Vm, turns: u32, handlers: &str) -> Result<()> {
    let numbers: Vec<_> = kernel_queues(vm)?
        .iter()
        .map(|row| row["cqn"].to_string())
        .collect();
    let numbers = numbers.join(" ");
    vm.sh(&format!(
        "set -e
         for turn in {{1..{turns}}}; do
             for handler in {handlers}; do
                 for cqn in {numbers}; do
                     echo $cqn $handler >/sys/kernel/debug/ferrite0/cq_move
                 done
             done
         done"
    ))?;
    Ok(())
}

/// Moves the queues of the kernel about, so many times, in a machine with a disk that is busy.
fn moved_about(vm: &Vm, turns: u32) -> Result<()> {
    let last = shown(vm, "handlers")?.len() as u64 - 1;
    // Every queue is without a handler for a moment, again and again.
    move_all(vm, turns, &format!("none {{0..{last}}}"))?;
    let queues = kernel_queues(vm)?;
    ensure!(
        queues.iter().all(|row| row["handler"] == last),
        "{}: {queues:?} after moves to {last}",
        vm.name()
    );
    Served::only(vm, last)?;
    move_all(vm, 1, "none")?;
    let stands = Served::nothing(vm, "queues of the kernel without a handler");
    move_all(vm, 1, "0")?;
    stands?;
    Served::only(vm, 0)
}

/// Reads and writes the same again and again, and looks at every byte.
fn busy_disk(vm: &Vm) -> Result<Running<'_>> {
    vm.sh("rm -f /run/stop /run/rounds
         dd if=/dev/urandom of=/run/written bs=1M count=1 status=none
         dd if=/run/written of=/dev/nvme0n1 bs=64k oflag=direct conv=nocreat status=none")?;
    vm.spawn(
        "set -e; n=0
         until [ -e /run/stop ]; do
             dd if=/dev/nvme0n1 of=/run/read bs=64k count=16 iflag=direct status=none
             cmp /run/written /run/read
             dd if=/run/written of=/dev/nvme0n1 bs=16k oflag=direct conv=nocreat status=none
             n=$((n + 1)); echo $n >/run/rounds.new; mv /run/rounds.new /run/rounds
         done; echo rounds $n",
        Duration::from_secs(300),
    )
}

fn connected_disk(one: &Vm, two: &Vm) -> Result<()> {
    nvme::serve(two)?;
    nvme::connect(one, two)?;
    one.wait_for("test -b /dev/nvme0n1", TIME)
}

fn under_a_disk(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    connected_disk(one, two)?;
    one.sh("echo queues of the kernel move >/dev/kmsg")?;
    let moved = (|| {
        let busy = busy_disk(one)?;
        let moving = (|| {
            let turns = if cluster.thorough() { 20 } else { 8 };
            moved_about(one, turns)?;
            moved_about(two, turns)?;
            // It goes on.
            let rounds = || -> Result<u64> {
                let rounds = one.sh("cat /run/rounds 2>/dev/null || echo 0")?;
                Ok(rounds.trim().parse()?)
            };
            let seen = rounds()?;
            let goes_on = wait_until(Instant::now() + one.at_most(TIME), || Ok(rounds()? > seen))?;
            ensure!(goes_on, "the disk stands still");
            Ok(())
        })();
        for vm in [one, two] {
            move_all(vm, 1, "0")?;
        }
        one.sh("touch /run/stop")?;
        let rounds = busy.success();
        moving?;
        let rounds = rounds?;
        ensure!(rounds.contains("rounds"), "{rounds}");
        let said = one.sh("dmesg | tac | sed '/queues of the kernel move/q'")?;
        if let Some(line) = said.lines().find(|line| {
            line.contains("nvme") && ["timeout", "reset"].iter().any(|word| line.contains(word))
        }) {
            bail!("a request was lost: {line}");
        }
        Ok(())
    })();
    let ended = nvme::disconnect(one).and_then(|_| nvme::end(two));
    moved.and(ended)?;
    // The core keeps completion queues for the next disk, where others expect none.
    for vm in [one, two] {
        bind_anew(vm)?;
    }
    still_works(cluster)
}

/// Whoever ends a connection waits for completions. The driver lets go of the device all the same, also
/// while somebody goes on to take handlers away.
fn unbound(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    connected_disk(one, two)?;
    let busy = busy_disk(one)?;
    let numbers: Vec<_> = kernel_queues(one)?
        .iter()
        .map(|row| row["cqn"].to_string())
        .collect();
    one.sh("rm -f /run/mover")?;
    let mover = one.spawn(
        &format!(
            "echo moving >/run/mover
             while for cqn in {}; do echo $cqn none; done >/sys/kernel/debug/ferrite0/cq_move; do :; done
             echo gone >>/run/mover",
            numbers.join(" ")
        ),
        2 * TIME,
    )?;
    one.wait_for("grep -qs moving /run/mover", TIME)?;
    Served::nothing(one, "all queues of the kernel without a handler")?;
    unbind(one)?;
    one.wait_for("grep -q gone /run/mover", TIME)?;
    mover.wait()?;
    one.sh("touch /run/stop")?;
    // The disk went under it.
    let outcome = busy.wait()?;
    ensure!(!outcome.ok(), "the disk was there without the device");
    bind(one)?;
    nvme::disconnect(one)?;
    nvme::end(two)?;
    // As above.
    bind_anew(two)?;
    still_works(cluster)
}

fn failed(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let running = Endless::start(one, two)?;
    let queue = queue_of(one, "ibv_rc_pingpong")?;
    let cqn = &queue["cqn"];
    move_to(one, cqn, "none")?;
    lifecycle::fail_device(cluster)?;
    let refused = (|| {
        for handler in ["0", "none"] {
            let outcome = one.run(&format!("ferritectl cq move {cqn} {handler}"), TIME)?;
            ensure!(!outcome.ok(), "a dead device moved a queue to {handler}");
        }
        let now = queue_of(one, "ibv_rc_pingpong")?;
        ensure!(now["handler"] == "none", "{now} after refusals");
        Ok(())
    })();
    running.end()?;
    bind_anew(one)?;
    refused?;
    still_works(cluster)
}
