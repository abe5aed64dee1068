// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters of queue pairs, and what the device has of objects, by the kernel's own tools.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use ferrite_abi::{
    CompletionQueueState, Plain, QueuePairState, QueuePairStateCode, Service, SrqState, TagKind,
    TagState,
};
use serde_json::Value;

use super::VmTest;
use crate::cluster::Cluster;
use crate::process::wait_until;
use crate::traffic::{wait_listening, DEVICE_AND_GID};
use crate::vm::{Running, Vm};

/// On the checked kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "rdma statistic counts what bound queue pairs do, by hand and by a rule, and forgets nothing",
        bound,
    ),
    VmTest::new(
        "rdma resource dumps what the device has of each object, to administrators alone",
        dumped,
    ),
];

const LINK: &str = "ferrite0/1";
const TIME: Duration = Duration::from_secs(120);
/// How long what comes soon may take.
const SOON: Duration = Duration::from_secs(10);

/// Runs `rdma` for JSON.
fn rdma(vm: &Vm, arguments: &str) -> Result<Vec<Value>> {
    let text = vm.sh(&format!("rdma -j {arguments}"))?;
    // Where there is nothing to list it may print nothing at all.
    let text = if text.trim().is_empty() { "[]" } else { &text };
    serde_json::from_str(text).with_context(|| format!("rdma -j {arguments}: {text}"))
}

/// A program that waits for messages and answers each with one; more of them than it gets, so that it stays.
struct Server<'a> {
    vm: &'a Vm,
    running: Running<'a>,
    port: u16,
    qpn: u64,
}

impl<'a> Server<'a> {
    fn start(vm: &'a Vm, port: u16, known: &[u64]) -> Result<Self> {
        let script = format!(
            "{DEVICE_AND_GID} exec ibv_rc_pingpong -d $dev -g $gid -p {port} -s 1000 -m 1024 -n 100000"
        );
        let running = vm.spawn(&script, TIME)?;
        wait_listening(vm, port)?;
        // It has made its queue pair before it listens.
        let listed = rdma(vm, "resource show qp")?;
        let qpn = listed
            .iter()
            .filter(|qp| qp["comm"] == "ibv_rc_pingpong")
            .filter_map(|qp| qp["lqpn"].as_u64())
            .find(|qpn| !known.contains(qpn))
            .with_context(|| format!("no queue pair of its own: {listed:?}"))?;
        Ok(Self {
            vm,
            running,
            port,
            qpn,
        })
    }

    /// Has `client` send it so many messages, and get as many answers.
    fn talk(&self, client: &Vm, messages: u64) -> Result<()> {
        let (port, ip) = (self.port, self.vm.ip());
        let script = format!(
            "{DEVICE_AND_GID}
            ibv_rc_pingpong -d $dev -g $gid -p {port} -s 1000 -m 1024 -n {messages} {ip}"
        );
        client.sh_in(&script, TIME).map(|_| ())
    }

    /// Ends it, in the middle of everything.
    fn kill(self) -> Result<()> {
        self.running.end_with(libc::SIGKILL).map(|_| ())
    }
}

/// What the port has counted.
fn of_port(vm: &Vm, name: &str) -> Result<u64> {
    let shown = rdma(vm, &format!("statistic show link {LINK}"))?;
    let value = shown.first().map(|port| &port[name]);
    let value = value.and_then(Value::as_u64);
    let value = value.with_context(|| format!("no {name} in {shown:?}"))?;
    // The other way to read it.
    let path = format!("/sys/class/infiniband/ferrite0/ports/1/hw_counters/{name}");
    let file: u64 = vm.sh(&format!("cat {path}"))?.trim().parse()?;
    ensure!(file >= value, "{path} has {file}, rdma {value}");
    Ok(value)
}

/// The port has so many completions, soon: the last message is acknowledged when its sender has ended.
fn wait_port(vm: &Vm, completions: u64) -> Result<()> {
    let mut last = 0;
    let deadline = Instant::now() + SOON;
    let reached = wait_until(deadline, || {
        last = of_port(vm, "completions")?;
        Ok(last >= completions)
    })?;
    ensure!(
        reached && last == completions,
        "the port has {last} completions, not {completions}"
    );
    Ok(())
}

/// The counters that queue pairs are bound to.
fn counters(vm: &Vm) -> Result<Vec<Value>> {
    rdma(vm, &format!("statistic qp show link {LINK}"))
}

/// The only one.
fn counter(vm: &Vm) -> Result<Value> {
    let shown = counters(vm)?;
    match &shown[..] {
        [one] => Ok(one.clone()),
        _ => bail!("there should be one counter: {shown:?}"),
    }
}

/// The queue pairs of a counter.
fn members(counter: &Value) -> Vec<u64> {
    let listed = counter["lqpn"].as_array().into_iter().flatten();
    let mut members: Vec<_> = listed.filter_map(Value::as_u64).collect();
    members.sort_unstable();
    members
}

/// A counter has these members, who had so many completions.
fn check(counter: &Value, expected: &[u64], completions: u64) -> Result<()> {
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    ensure!(
        members(counter) == expected && counter["completions"].as_u64() == Some(completions),
        "expected {completions} completions of queue pairs {expected:?}: {counter}"
    );
    // Only what queue pairs have is shown.
    ensure!(
        counter.get("rx_dropped").is_none() && counter.get("rx_packets").is_some(),
        "wrong counters: {counter}"
    );
    Ok(())
}

/// The only counter has these members, and has counted so many completions, soon.
fn wait_counted(vm: &Vm, members: &[u64], completions: u64) -> Result<()> {
    let mut last = Ok(());
    let deadline = Instant::now() + SOON;
    let reached = wait_until(deadline, || {
        last = counter(vm).and_then(|counter| check(&counter, members, completions));
        Ok(last.is_ok())
    })?;
    match reached {
        true => Ok(()),
        false => last,
    }
}

fn bound(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    by_hand(one, two).context("by hand")?;
    by_rule(two, one).context("by a rule")
}

/// Each message is sent and answered: two completions at each end.
fn by_hand(one: &Vm, two: &Vm) -> Result<()> {
    let first = Server::start(one, 18541, &[])?;
    let second = Server::start(one, 18542, &[first.qpn])?;
    let (a, b) = (first.qpn, second.qpn);
    let before = of_port(one, "completions")?;
    let packets = of_port(two, "tx_packets")?;
    let bytes = of_port(two, "tx_bytes")?;

    // What is not bound counts for the port, and nowhere else.
    second.talk(two, 100)?;
    ensure!(counters(one)?.is_empty(), "a counter that nobody made");
    wait_port(one, before + 200)?;
    let unbound = of_port(two, "tx_packets")? - packets;
    let unbound_bytes = of_port(two, "tx_bytes")? - bytes;

    one.sh(&format!("rdma statistic qp bind link {LINK} lqpn {a}"))?;
    let fresh = counter(one)?;
    check(&fresh, &[a], 0)?;
    ensure!(fresh["rx_bytes"].as_u64() == Some(0), "{fresh}");
    let number = fresh["cntn"].as_u64().context("no number")?;
    ensure!(number != 0, "{fresh}");
    first.talk(two, 500)?;
    wait_counted(one, &[a], 1000)?;
    let counted = counter(one)?;
    // All that the other machine has sent meanwhile has come here.
    let sent = of_port(two, "tx_packets")? - packets - unbound;
    let sent_bytes = of_port(two, "tx_bytes")? - bytes - unbound_bytes;
    ensure!(
        counted["rx_packets"].as_u64() == Some(sent)
            && counted["rx_bytes"].as_u64() == Some(sent_bytes),
        "{sent} packets of {sent_bytes} bytes were sent to it: {counted}"
    );
    // The port has all of it, once.
    wait_port(one, before + 1200)?;

    // Another comes to the same counter: what it did before is not counted.
    one.sh(&format!(
        "rdma statistic qp bind link {LINK} lqpn {b} cntn {number}"
    ))?;
    wait_counted(one, &[a, b], 1000)?;
    second.kill()?;
    // It ended while it was bound.
    wait_counted(one, &[a], 1000)?;

    one.sh(&format!(
        "rdma statistic qp unbind link {LINK} cntn {number} lqpn {a}"
    ))?;
    let left = counters(one)?;
    ensure!(left.is_empty(), "after the last one has left: {left:?}");
    wait_port(one, before + 1200)?;
    // It may be bound again, to a counter of its own.
    one.sh(&format!("rdma statistic qp bind link {LINK} lqpn {a}"))?;
    wait_counted(one, &[a], 0)?;
    first.kill()?;
    let left = counters(one)?;
    ensure!(left.is_empty(), "after the last one has ended: {left:?}");
    wait_port(one, before + 1200)?;
    Ok(())
}

fn by_rule(one: &Vm, two: &Vm) -> Result<()> {
    let before = of_port(one, "completions")?;
    one.sh(&format!("rdma statistic qp set link {LINK} auto type on"))?;
    let outcome = (|| -> Result<()> {
        let first = Server::start(one, 18543, &[])?;
        let second = Server::start(one, 18544, &[first.qpn])?;
        let (a, b) = (first.qpn, second.qpn);
        wait_counted(one, &[a, b], 0)?;
        let shown = counter(one)?;
        ensure!(shown["qp-type"] == "RC", "no type: {shown}");
        first.talk(two, 200)?;
        second.talk(two, 100)?;
        wait_counted(one, &[a, b], 600)?;
        // What one of them counted stays when it ends.
        first.kill()?;
        wait_counted(one, &[b], 600)?;
        wait_port(one, before + 600)?;
        second.kill()?;
        let left = counters(one)?;
        ensure!(left.is_empty(), "after the last one has ended: {left:?}");
        wait_port(one, before + 600)?;
        Ok(())
    })();
    let off = one.sh(&format!("rdma statistic qp set link {LINK} auto off"));
    outcome?;
    off?;
    let third = Server::start(one, 18545, &[])?;
    let shown = counters(one)?;
    third.kill()?;
    ensure!(shown.is_empty(), "bound without a rule: {shown:?}");
    Ok(())
}

/// What the device has of all objects of a kind.
fn dump<S: Plain>(vm: &Vm, kind: &str) -> Result<Vec<S>> {
    let listed = rdma(vm, &format!("-r resource show {kind}"))?;
    let states = listed.iter().map(|entry| {
        let bytes = entry["data"].as_array().into_iter().flatten();
        let bytes: Option<Vec<u8>> = bytes
            .map(|byte| byte.as_u64().and_then(|byte| u8::try_from(byte).ok()))
            .collect();
        bytes
            .filter(|bytes| bytes.len() == size_of::<S>())
            .and_then(|bytes| S::from_prefix(&bytes))
            .with_context(|| format!("no dump of a {kind}: {entry}"))
    });
    let mut states = states.collect::<Result<Vec<S>>>()?;
    if kind == "qp" {
        // The tool asks for those of the device, and then for those of its port, which are the same.
        ensure!(states.len() % 2 == 0, "{} dumps", states.len());
        states.truncate(states.len() / 2);
    }
    Ok(states)
}

/// The entry among `listed` whose `name` is that number, in whatever form.
fn entry<'a>(listed: &'a [Value], name: &str, number: u64) -> Result<&'a Value> {
    let is_it = |entry: &&Value| match &entry[name] {
        Value::String(hex) => u64::from_str_radix(hex.trim_start_matches("0x"), 16) == Ok(number),
        value => value.as_u64() == Some(number),
    };
    let found = listed.iter().find(is_it);
    found.with_context(|| format!("no {name} {number:#x} among {listed:?}"))
}

fn dumped(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let server = Server::start(one, 18546, &[])?;
    server.talk(two, 50)?;
    let looked = look(one, server.qpn);
    server.kill()?;
    looked?;
    // And with a shared receive queue.
    let script = format!("{DEVICE_AND_GID} exec ibv_srq_pingpong -d $dev -g $gid -p 18547 -q 3");
    let server = one.spawn(&script, TIME)?;
    wait_listening(one, 18547)?;
    let looked = (|| -> Result<()> {
        let queues: Vec<SrqState> = dump(one, "srq")?;
        let queue = queues.iter().find(|queue| queue.users == 3);
        let queue = queue.with_context(|| format!("no queue with three users: {queues:?}"))?;
        let listed = rdma(one, "-dd resource show srq")?;
        ensure!(listed.len() == queues.len(), "{listed:?}, {queues:?}");
        entry(&listed, "drv_srqn", queue.srqn.into())?;
        let pairs: Vec<QueuePairState> = dump(one, "qp")?;
        let users = pairs.iter().filter(|pair| pair.srqn == queue.srqn);
        ensure!(users.count() == 3, "its queue pairs: {pairs:?}");
        Ok(())
    })();
    server.end_with(libc::SIGKILL)?;
    looked
}

/// What the device has agrees with what the kernel has.
fn look(vm: &Vm, qpn: u64) -> Result<()> {
    let pairs: Vec<QueuePairState> = dump(vm, "qp")?;
    let listed = rdma(vm, "-dd resource show qp")?;
    ensure!(listed.len() == pairs.len(), "{listed:?}, {pairs:?}");
    let pair = pairs
        .iter()
        .find(|pair| u64::from(pair.attributes.qpn) == qpn);
    let pair = pair.with_context(|| format!("no queue pair {qpn}: {pairs:?}"))?;
    let shown = entry(&listed, "lqpn", qpn)?;
    ensure!(
        pair.attributes.state == QueuePairStateCode::Rts.number()
            && pair.service == Service::Rc.number()
            && shown["state"] == "RTS",
        "{pair:?}, {shown}"
    );
    ensure!(
        shown["rqpn"].as_u64() == Some(pair.attributes.destination_qpn.into())
            && shown["drv_send_blocks"].as_u64() == Some(1 << pair.sq_log_blocks),
        "{pair:?}, {shown}"
    );
    // Of the numbers by which one takes part in a connection the listing, which everybody may see, tells none.
    for number in ["rq-psn", "sq-psn"] {
        ensure!(
            shown[number].as_u64() == Some(0) && pair.send_psn != 0 && pair.receive_psn != 0,
            "{pair:?}, {shown}"
        );
    }
    // 50 messages were received, and answered; all is done.
    ensure!(
        pair.receive_retired == 50 && pair.send_retired == pair.send_producer,
        "{pair:?}"
    );

    let queues: Vec<CompletionQueueState> = dump(vm, "cq")?;
    let listed = rdma(vm, "-dd resource show cq")?;
    ensure!(listed.len() == queues.len(), "{listed:?}, {queues:?}");
    let queue = queues.iter().find(|queue| queue.cqn == pair.send_cqn);
    let queue = queue.with_context(|| format!("no queue {}: {queues:?}", pair.send_cqn))?;
    ensure!(queue.producer == 100 && queue.users == 2, "{queue:?}");
    entry(&listed, "drv_cqn", queue.cqn.into())?;

    let tags: Vec<TagState> = dump(vm, "mr")?;
    let listed = rdma(vm, "-dd resource show mr")?;
    let tag = tags.iter().find(|tag| tag.pd == pair.pd);
    let tag = tag.with_context(|| format!("no region of domain {}: {tags:?}", pair.pd))?;
    let shown = entry(&listed, "lkey", tag.tag.into())?;
    ensure!(
        tag.valid == 1
            && tag.kind == TagKind::Region.number()
            && shown["mrlen"].as_u64() == Some(tag.length),
        "{tag:?}, {shown}"
    );

    // Nobody else is shown any of it.
    let outcome = vm.run(
        "setpriv --reuid 65534 --regid 65534 --clear-groups rdma -r resource show qp",
        TIME,
    )?;
    ensure!(
        !outcome.ok() && !outcome.out.contains("data"),
        "to a stranger: {outcome:?}"
    );
    Ok(())
}
