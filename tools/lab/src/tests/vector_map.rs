// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vector map: which event queue and which vector serve completions in each of its layouts, and what becomes
//! of who uses the device when another one is set.

use std::collections::BTreeSet;

use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;

use super::allocations::{fail_next_life, fail_no_more};
use super::driver::{bind_anew, ended_well, leave_failed, program_in_the_middle};
use super::driver::{PATIENCE, REPORTERS};
use super::moderation::set_adaptive;
use super::moving::{queue_of, Endless};
use super::recovery::{fatal, lives, recover_again, wait_back, wait_left_alone};
use super::vectors::{self, Taken, TAKEN};
use super::{nothing_left, still_works, wait_active, VmTest};
use crate::cluster::Cluster;
use crate::vm::Vm;

/// On machines of which the first has as many vectors as any layout is good for. They are left as they were.
pub const LAYOUTS: &[VmTest] = &[
    VmTest::new(
        "in some layouts, each kind among them, events come to the queue and by the vector that it says",
        |cluster| layouts_serve(cluster, |layout| SOME.contains(&layout)),
    ),
    VmTest::new(
        "moderation of an event queue adapts by whichever of its vectors it interrupts",
        moderated,
    ),
];

/// On the same, of a minute and more.
pub const ALL_LAYOUTS: &[VmTest] = &[VmTest::new(
    "in each layout events come to the queue and by the vector that it says",
    |cluster| layouts_serve(cluster, |_| true),
)];

/// On any.
pub const CHANGES: &[VmTest] = &[
    VmTest::new("a layout that there is none of is refused", refused),
    VmTest::new(
        "another layout under a program: it is told, and the device comes back with that",
        |cluster| changed_in_use(cluster, &["one/intx", DEFAULT]),
    ),
    VmTest::new(
        "a layout stays when the device fails, and brings one back that stayed failed",
        after_failures,
    ),
    VmTest::new(
        "a layout with which the device does not start is taken back, and who waits is told",
        |cluster| does_not_start(cluster, true),
    ),
];

/// The same, where a device begins anew more often than others have the time for.
pub const MORE_CHANGES: &[VmTest] = &[
    VmTest::new(
        "layouts of each kind, one after the other under a program: it is told, each time",
        |cluster| changed_in_use(cluster, &["one/cpu", "function-cpu/function", "one/intx", DEFAULT]),
    ),
    VmTest::new(
        "a layout with which the device does not start is taken back, though nobody waits; later it is taken",
        |cluster| {
            does_not_start(cluster, false)?;
            // It is none of the layout's fault.
            let (one, _) = cluster.two()?;
            set(one, "one/cpu")?;
            still_works(cluster)?;
            bind_anew(one)
        },
    ),
];

/// On machines with few vectors.
pub const FEW: &[VmTest] = &[VmTest::new(
    "layouts work with fewer vectors than they are good for",
    few_vectors,
)];

const DEFAULT: &str = "cpu/cpu";

/// How often it is looked what happens until that is what should: a message of the connection manager may come between,
/// and a machine that is busy may have nothing happen for a while.
const LOOKS: usize = 20;

/// The layouts: how many event queues and vectors of completions there are on so many processors; no vectors is
/// the pin.
const ALL: [(&str, Count, Option<Count>); 18] = [
    ("one/intx", one, None),
    ("cpu/intx", each, None),
    ("function/intx", two, None),
    ("function-cpu/intx", two_each, None),
    ("one/one", one, Some(one)),
    ("one/cpu", one, Some(each)),
    ("cpu/one", each, Some(one)),
    (DEFAULT, each, Some(each)),
    ("cpu/several", each, Some(two_each)),
    ("several/several", two_each, Some(two_each)),
    ("several/cpu", two_each, Some(each)),
    ("function/one", two, Some(one)),
    ("function/cpu", two, Some(each)),
    ("function/function", two, Some(two)),
    ("function-cpu/one", two_each, Some(one)),
    ("function-cpu/cpu", two_each, Some(each)),
    ("function-cpu/function", two_each, Some(two)),
    ("function-cpu/function-cpu", two_each, Some(two_each)),
];

/// Of these, those that are tried where there is no time for all: each number of event queues and each of vectors
/// is among them.
pub(super) const SOME: [&str; 6] = [
    "function/intx",
    "cpu/one",
    "one/cpu",
    "several/several",
    "function/function",
    "function-cpu/function-cpu",
];

type Count = fn(usize) -> usize;

fn one(_: usize) -> usize {
    1
}

fn two(_: usize) -> usize {
    2
}

fn each(processors: usize) -> usize {
    processors
}

fn two_each(processors: usize) -> usize {
    2 * processors
}

/// The command that sets a layout.
pub(super) fn setting(layout: &str) -> String {
    format!(
        "{REPORTERS}; for r in $reporters; do
             devlink dev param set $r name vector_map value {layout} cmode runtime || exit
         done"
    )
}

/// Sets a layout, and waits until the device can be used.
pub fn set(vm: &Vm, layout: &str) -> Result<()> {
    set_on(&[vm], layout)
}

/// The same of several machines, at a time.
fn set_on(vms: &[&Vm], layout: &str) -> Result<()> {
    let running: Vec<_> = vms
        .iter()
        .map(|vm| vm.spawn(&setting(layout), PATIENCE))
        .collect::<Result<_>>()?;
    for running in running {
        running
            .success()
            .with_context(|| format!("{layout} cannot be set"))?;
    }
    for vm in vms {
        ensure!(get(vm)? == layout, "{} was set to {layout}", get(vm)?);
        wait_active(vm)?;
    }
    Ok(())
}

/// The layout that is set.
pub(super) fn get(vm: &Vm) -> Result<String> {
    let text = vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do devlink -j dev param show $r name vector_map; done"
    ))?;
    let shown: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
    let of_device = shown["param"]
        .as_object()
        .and_then(|devices| devices.values().next());
    let value = of_device.and_then(|params| params[0]["values"][0]["value"].as_str());
    Ok(value.with_context(|| text.clone())?.to_owned())
}

/// An entry of the table that the driver has told the device of.
#[derive(Debug)]
struct Entry {
    handler: usize,
    eqn: usize,
    vector: usize,
}

fn table(vm: &Vm) -> Result<Vec<Entry>> {
    let text = vm.sh("tail -n +2 /sys/kernel/debug/ferrite0/vector_map")?;
    text.lines()
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_part, handler, eqn, vector, _irq, _mapped] = words[..] else {
                bail!("no entry: {line}");
            };
            Ok(Entry {
                handler: handler.parse()?,
                eqn: eqn.parse()?,
                vector: vector.parse()?,
            })
        })
        .collect()
}

/// Shell text that says the mode of interrupts, how often each vector was taken by each processor, then the
/// events of each event queue. Each file is read as a whole first: `read` seeks back to where a line ended, and what
/// is there then has numbers that have grown.
fn states() -> String {
    format!(
        r#"{{ read -r _; read -r mode _; }} <<<"$(</sys/kernel/debug/ferrite0/interrupts)"; echo $mode
         {TAKEN}
         while read -r eqn _ _ _ _ events _; do
             [ $eqn = eqn ] || echo $events
         done <<<"$(</sys/kernel/debug/ferrite0/eqs)""#
    )
}

/// Reads what [`states`] said.
fn state(text: &str) -> Result<(&str, Taken, Vec<u64>)> {
    let mut lines = text.lines();
    let mode = lines.next().context("no mode")?;
    let vectors = vectors::read(&mut lines)?;
    let events = lines.map(|count| Ok(count.parse()?));
    Ok((mode, vectors, events.collect::<Result<_>>()?))
}

/// What happened in a while: event queues of completions that had events, and vectors with the processors that
/// took them; but for those of commands and asynchronous events.
type Happened = (BTreeSet<usize>, BTreeSet<(usize, usize)>);

fn look(vm: &Vm) -> Result<Happened> {
    let text = vm.sh(&vectors::twice(&states()))?;
    let (before, after) = vectors::halves(&text)?;
    let (_, vectors, events) = state(before)?;
    let (mode, vectors_after, events_after) = state(after)?;
    let first = if mode == "INTx" { 0 } else { 2 };
    let taken = vectors.iter().zip(&vectors_after).enumerate().skip(first);
    let taken = taken.flat_map(|(vector, (before, after))| {
        let counts = before.iter().zip(after).enumerate();
        let taken = counts.filter(|(_, (before, after))| after > before);
        taken.map(move |(cpu, _)| (vector, cpu)).collect::<Vec<_>>()
    });
    let written = events.iter().zip(&events_after).enumerate().skip(2);
    let written = written.filter(|(_, (before, after))| after > before);
    Ok((written.map(|(eqn, _)| eqn).collect(), taken.collect()))
}

/// The queue of a program that waits for sends and receives is served as the table says of `handler`.
fn serves(vm: &Vm, table: &[Entry], handler: usize, pin: bool) -> Result<()> {
    let cqn = queue_of(vm, "ibv_rc_pingpong")?["cqn"].clone();
    vm.sh(&format!("ferritectl cq move {cqn} {handler}"))?;
    let cpus: usize = vm.sh("nproc")?.trim().parse()?;
    let entries = || table.iter().filter(|entry| entry.handler == handler);
    let queues: BTreeSet<usize> = entries().map(|entry| entry.eqn).collect();
    // Each vector is at home on a processor, in turn; the pin is not.
    let home = |vector| (vector, (vector - 2) % cpus);
    let vectors: BTreeSet<_> = if pin {
        BTreeSet::new()
    } else {
        entries().map(|entry| home(entry.vector)).collect()
    };
    let mut seen = Vec::new();
    for _ in 0..LOOKS {
        let (found_queues, found_vectors) = look(vm)?;
        let as_said = if pin {
            !found_vectors.is_empty() && found_vectors.iter().all(|(vector, _)| *vector == 0)
        } else {
            found_vectors == vectors
        };
        if found_queues == queues && as_said {
            return Ok(());
        }
        seen.push((found_queues, found_vectors));
    }
    bail!("handler {handler}: {queues:?} by {vectors:?} expected, seen {seen:?}; {table:?}")
}

/// The numbers of the handlers that `ferritectl show handlers` has.
fn rows_of_handlers(shown: &Value) -> Result<Vec<usize>> {
    let rows = shown["handlers"].as_array();
    let rows = rows
        .with_context(|| format!("no handlers: {shown}"))?
        .iter();
    rows.map(|row| {
        let number = row["handler"].as_u64().context("no number")?;
        Ok(number as usize)
    })
    .collect()
}

fn layout_serves(cluster: &Cluster, layout: &(&str, Count, Option<Count>)) -> Result<()> {
    let (one, two) = cluster.two()?;
    let (name, queues, vectors) = layout;
    set(one, name)?;
    let processors: usize = one.sh("nproc")?.trim().parse()?;
    let text = one.sh(&states())?;
    let (mode, ..) = state(&text)?;
    let pin = vectors.is_none();
    ensure!((mode == "INTx") == pin, "{mode}");
    let table = table(one)?;
    let of = |what: fn(&Entry) -> usize| table.iter().map(what).collect::<BTreeSet<_>>().len();
    ensure!(of(|entry| entry.eqn) == queues(processors), "{table:?}");
    let expected = vectors.map_or(1, |vectors| vectors(processors));
    ensure!(of(|entry| entry.vector) == expected, "{table:?}");
    let last = table.iter().map(|entry| entry.handler).max();
    // Who numbers them takes the numbers from there.
    let shown: Value = serde_json::from_str(&one.sh("ferritectl --json show handlers")?)?;
    let shown: Vec<_> = rows_of_handlers(&shown)?;
    ensure!(
        shown.iter().copied().eq(0..=last.context("no entry")?),
        "handlers {shown:?} are shown of {table:?}"
    );
    let running = Endless::start_by(one, "", two)?;
    let served = serves(one, &table, 0, pin)
        .and_then(|()| serves(one, &table, last.context("no entry")?, pin));
    running.end()?;
    served?;
    nothing_left(one)
}

fn layouts_serve(cluster: &Cluster, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let (one, _) = cluster.two()?;
    let mut served = Ok(());
    for layout in ALL.iter().filter(|(name, ..)| wanted(name)) {
        served = layout_serves(cluster, layout).with_context(|| layout.0);
        if served.is_err() {
            break;
        }
    }
    set(one, DEFAULT)?;
    served?;
    still_works(cluster)
}

fn few_vectors(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let all = ALL.iter().map(|(layout, ..)| *layout);
    for layout in all.filter(|layout| cluster.thorough() || SOME.contains(layout)) {
        set_on(&[one, two], layout)?;
        crate::traffic::pingpong(one, two, 4096, 100, true).with_context(|| layout)?;
    }
    set_on(&[one, two], DEFAULT)?;
    for vm in [one, two] {
        nothing_left(vm)?;
    }
    still_works(cluster)
}

/// For how many microseconds the event queue of completions in layout `one/cpu` puts its interrupts off.
const MODERATION: &str = "moderation() { awk '
    NR == 1 { for (i = 1; i <= NF; i++) if ($i == \"moderation_us\") column = i }
    $1 == 2 { print $column }' /sys/kernel/debug/ferrite0/eqs; }";

fn moderated(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    set(one, "one/cpu")?;
    set_adaptive(one, true)?;
    let running = Endless::start_by(one, "", two)?;
    let adapted: Result<()> = (|| {
        // Not by the vector that the queue has itself, which is the first one.
        let cqn = queue_of(one, "ibv_rc_pingpong")?["cqn"].clone();
        one.sh(&format!("ferritectl cq move {cqn} 3"))?;
        // Each answer is waited for, so that more of it is found to be worse and is taken back: at some moment it
        // is there.
        let any = "for n in {1..50}; do [ $(moderation) -gt 0 ] && exit; done; exit 1";
        one.wait_for(&format!("{MODERATION}; {any}"), PATIENCE)
            .context("it does not adapt")?;
        set_adaptive(one, false)?;
        one.wait_for(&format!("{MODERATION}; [ $(moderation) = 0 ]"), PATIENCE)
            .context("it is put off for ever")
    })();
    running.end()?;
    set(one, DEFAULT)?;
    adapted?;
    nothing_left(one)
}

fn refused(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    ensure!(get(one)? == DEFAULT, "{} at first", get(one)?);
    let before = lives(one)?;
    for wrong in [
        "cpu",
        "cpu/",
        "one/two",
        "CPU/CPU",
        "intx/one",
        "\"\"",
        "function-cpu/function-cpu/function",
    ] {
        let outcome = one.run(&setting(wrong), PATIENCE)?;
        ensure!(!outcome.ok(), "{wrong} was taken: {outcome:?}");
        if wrong.len() > 2 && wrong.len() < 32 {
            ensure!(outcome.err.contains("no such layout"), "{outcome:?}");
        }
    }
    // What it is already is nothing new.
    set(one, DEFAULT)?;
    ensure!(get(one)? == DEFAULT, "{}", get(one)?);
    ensure!(lives(one)? == before, "it began anew");
    still_works(cluster)
}

/// How often devlink says that the device was recovered.
fn recoveries(vm: &Vm) -> Result<String> {
    let shown = vm.sh(&format!(
        "{REPORTERS}; for r in $reporters; do devlink -j health show $r reporter fatal; done"
    ))?;
    ensure!(shown.contains("\"healthy\""), "{shown}");
    let shown: Value = serde_json::from_str(&shown)?;
    Ok(shown.to_string())
}

/// Sets these layouts, one after the other, each under a program.
fn changed_in_use(cluster: &Cluster, layouts: &[&str]) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let health = recoveries(one)?;
    for (round, layout) in (1..).zip(layouts) {
        let before = lives(one)?;
        let program = program_in_the_middle(one)?;
        set(one, layout)?;
        ended_well(one, program).with_context(|| format!("round {round}"))?;
        ensure!(lives(one)? == before + 1, "{} lives", lives(one)?);
        nothing_left(one)?;
        still_works(cluster)?;
    }
    // It did not fail.
    ensure!(recoveries(one)? == health, "{}", recoveries(one)?);
    Ok(())
}

fn after_failures(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    set(one, "function/cpu")?;
    let before = lives(one)?;
    let entries = format!("{:?}", table(one)?);
    fatal(cluster)?;
    wait_back(one, before)?;
    ensure!(get(one)? == "function/cpu", "{}", get(one)?);
    ensure!(format!("{:?}", table(one)?) == entries, "{:?}", table(one)?);
    still_works(cluster)?;
    leave_failed(one)?;
    one.sh("dmesg -C")?;
    fatal(cluster)?;
    wait_left_alone(one)?;
    set(one, "one/cpu")?;
    ensure!(lives(one)? == before + 2, "{} lives", lives(one)?);
    still_works(cluster)?;
    recover_again(one)?;
    // As a device is at first.
    bind_anew(one)?;
    ensure!(get(one)? == DEFAULT, "{}", get(one)?);
    still_works(cluster)
}

/// The device does not start with a layout, for want of memory; `waits` says whether who set it is still there then.
fn does_not_start(cluster: &Cluster, waits: bool) -> Result<()> {
    let (one, _) = cluster.two()?;
    bind_anew(one)?;
    let before = lives(one)?;
    let program = program_in_the_middle(one)?;
    fail_next_life(one)?;
    // Users are given a second to let go, in which who set it is ended: no time to start programs.
    let end = if waits {
        ""
    } else {
        "while read -r line <&$log; do
             [[ $line != *'device begins anew'* ]] || break
         done
         kill $setting $listener"
    };
    let said = one.sh_in(
        &format!(
            "{REPORTERS}; dmesg -C
             exec {{log}}< <(exec dmesg -w)
             listener=$!
             devlink dev param set $reporters name vector_map value one/cpu cmode runtime 2>&1 &
             setting=$!
             {end}
             wait $setting; echo $?
             kill $listener 2>/dev/null || true"
        ),
        PATIENCE,
    )?;
    let expected = if waits {
        "does not start with it"
    } else {
        // Ended by SIGTERM.
        "143"
    };
    ensure!(said.contains(expected), "{said}");
    // The first attempt fails, and the next one is with what it was before.
    wait_back(one, before)?;
    fail_no_more(one)?;
    ended_well(one, program)?;
    ensure!(get(one)? == DEFAULT, "{}", get(one)?);
    ensure!(lives(one)? == before + 1, "{} lives", lives(one)?);
    nothing_left(one)?;
    still_works(cluster)
}
