// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs that others wrote for verbs: they must not notice that the device is new.

use std::time::Duration;

use anyhow::{bail, Context, Result};

use super::{once_it_listens, tried_until_heard, VmTest};
use crate::cluster::Cluster;
use crate::traffic::{client_server, wait_listening};
use crate::vm::Vm;

/// On the unmodified Debian kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new("perftest over every transport", |cluster| {
        runs_perftest(cluster, PERFTEST)
    }),
    VmTest::new("perftest over connections of rdma_cm", perftest_connected),
    VmTest::new(
        "perftest over raw packets: raw_ethernet_bw and raw_ethernet_lat",
        raw_ethernet,
    ),
    VmTest::new(
        "the rest of rdma-core's programs: udaddy, mckey, cmtime, rstream, riostream, XRC pingpong",
        other_examples,
    ),
    VmTest::new("qperf over connections of rdma_cm", qperf),
    VmTest::new(
        "UCX finds the device; ucx_perftest over rc_verbs and ud_verbs",
        ucx,
    ),
    VmTest::new("libfabric: fi_pingpong over verbs", libfabric),
    VmTest::new(
        "Open MPI over UCX: a ring, a sum and a bandwidth test",
        open_mpi,
    ),
    VmTest::new("rdma-core's own tests (pyverbs)", crate::pyverbs::on_all),
];

/// The same, of which there are many.
pub const LONG: &[VmTest] = &[VmTest::new(
    "the rest of perftest: each program with events, with several queue pairs, and the like",
    |cluster| runs_perftest(cluster, MORE_PERFTEST),
)];

const TIME: Duration = Duration::from_secs(60);

/// What perftest has beyond the few programs that other tests run: each transport, and each operation.
const PERFTEST: &[&str] = &[
    "ib_send_bw -s 16384 -c UC",
    "ib_send_bw -s 4096 -c XRC",
    // Receives that are longer than the messages, and reach past the end of their region.
    "ib_send_bw -s 64 -c XRC",
    "ib_send_bw -s 4096 -r 64 --use-srq -q 2",
    "ib_send_lat -s 64 -c UD -e",
    "ib_send_lat -s 64 -c XRC",
    "ib_write_bw -s 16384 -c UC",
    "ib_write_bw -s 4096 -b",
    "ib_write_bw -s 4096 --write_with_imm",
    "ib_read_bw -s 4096 -q 4",
    "ib_read_bw -s 4096 -c XRC",
    "ib_atomic_bw -A FETCH_AND_ADD -c XRC",
    "ib_atomic_bw -A CMP_AND_SWAP",
    "ib_atomic_lat -e",
];

/// And all that is left of it.
const MORE_PERFTEST: &[&str] = &[
    "ib_send_bw -s 4096 -q 4",
    "ib_send_bw -s 4096 -e",
    "ib_send_bw -s 2048 -c UD",
    "ib_send_lat -s 64 -e",
    "ib_send_lat -s 64 -c UC",
    "ib_send_lat -s 64 -c UD",
    "ib_write_bw -s 4096 -c XRC",
    "ib_write_lat -s 64 -c UC",
    "ib_read_bw -s 4096 -e",
    "ib_read_lat -s 64",
    "ib_read_lat -s 64 -e",
    "ib_atomic_bw -A FETCH_AND_ADD",
    "ib_atomic_bw -e",
    "ib_atomic_lat",
];

fn runs_perftest(cluster: &Cluster, programs: &[&str]) -> Result<()> {
    let (one, two) = cluster.two()?;
    for program in programs {
        let command = format!("exec {program} -d $dev -x $gid -p $port -n 50 -F");
        client_server(
            (one, &command),
            (two, &format!("{command} $peer")),
            18516,
            TIME,
        )
        .with_context(|| (*program).to_owned())?;
    }
    Ok(())
}

/// Where a server's words go.
const SERVER: &str = "/run/server";

/// A client that is repeated until its server, which has no TCP socket to wait for, has heard it.
pub(super) fn until_heard(server: (&Vm, &str), client: (&Vm, &str)) -> Result<()> {
    let (server_vm, server_script) = server;
    let (client_vm, client_script) = client;
    let prelude = crate::traffic::DEVICE_AND_GID;
    // What the last one said is not what this one says.
    server_vm.sh(&format!("rm -f {SERVER}"))?;
    // Each line as it is said.
    let serving = server_vm.spawn(
        &format!(
            "{prelude} me={}; exec stdbuf -oL {server_script} >{SERVER} 2>&1",
            server_vm.ip()
        ),
        TIME,
    )?;
    // Who waits for datagrams to a group listens to nothing else. Its peer waits three seconds before it sends, and
    // does not learn that nobody was there.
    let serving = if server_script.starts_with("mckey") {
        server_vm
            .wait_for(&format!("grep -qs joined {SERVER}"), TIME)
            .context("the member does not join")?;
        serving
    } else {
        once_it_listens(server_vm, serving)?
    };
    let outcome = client_vm.run(
        &format!(
            "{prelude} me={} peer={}; {}",
            client_vm.ip(),
            server_vm.ip(),
            tried_until_heard(client_vm, client_script)
        ),
        TIME,
    )?;
    if !outcome.ok() {
        serving.signal(libc::SIGTERM)?;
    }
    let served = serving.wait()?;
    if !outcome.ok() || !served.ok() {
        bail!(
            "{client_script}\n{}{}--- server ({}):\n{}{}",
            outcome.out,
            outcome.err,
            served.code,
            served.err,
            server_vm.sh(&format!("cat {SERVER}"))?
        );
    }
    Ok(())
}

fn perftest_connected(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for program in [
        "ib_send_lat -s 64",
        "ib_write_bw -s 4096",
        "ib_read_bw -s 4096",
        "ib_atomic_lat",
    ] {
        let command = format!("{program} -R -d $dev -x $gid -p 18517 -n 50 -F");
        let run = || until_heard((one, &command), (two, &format!("{command} $peer")));
        unless_it_is_early(cluster, run).context(program)?;
    }
    Ok(())
}

/// Messages of [`raw_ethernet`], in which nobody sends again what was lost.
const RAW_MESSAGES: usize = 500;

/// Frames that programs make themselves, by raw packet queue pairs and rules for what they receive.
fn raw_ethernet(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let address = |vm: &Vm| {
        let address = vm.sh("cat /sys/class/net/eth0/address")?;
        anyhow::Ok(address.trim().to_owned())
    };
    let (server, client) = (address(one)?, address(two)?);
    // With a size, a program of bandwidth has room for less than so many frames under way.
    for program in [
        "raw_ethernet_lat -s 64",
        "raw_ethernet_lat -s 1024",
        "raw_ethernet_bw -s 64 -t 64 -r 512",
        "raw_ethernet_bw -s 1024 -t 64 -r 512",
    ] {
        let command = |own: &str, peer: &str| {
            format!("exec {program} -d $dev -B {own} -E {peer} -n {RAW_MESSAGES} -F")
        };
        let prelude = crate::traffic::DEVICE_AND_GID;
        let serving = format!("{prelude} {} --server", command(&server, &client));
        let serving = one.spawn(&serving, TIME)?;
        // It has no socket. Its rule is there when its queue pair receives, and the first frame finds it; then it posts
        // receives, and does nothing but look for what came: it has done that for long when it has had a tenth of a second
        // of its processor, whatever else that does.
        one.wait_for(
            "state=$(rdma resource show qp | grep RAW_PACKET); [[ $state == *RT[RS]* ]] || exit
             pid=${state##*pid }; read -ra stat </proc/${pid%% *}/stat; used=${stat[13]}
             while read -ra stat </proc/${pid%% *}/stat && [ ${stat[13]} -lt $((used + 10)) ]; do
                 read -rt 0.05 -u $never; done; :",
            TIME,
        )?;
        let asking = format!("{prelude} {} --client", command(&client, &server));
        let asked = two.run(&asking, TIME)?;
        if !asked.ok() {
            serving.signal(libc::SIGTERM)?;
        }
        let served = serving.wait()?;
        if !asked.ok() || !served.ok() {
            bail!("{program}: client {asked:?}\n--- server {served:?}");
        }
        for said in [&asked.out, &served.out] {
            let line = crate::traffic::perftest_line(said);
            line.with_context(|| format!("{program}: no result in:\n{said}"))?;
        }
    }
    Ok(())
}

/// How often a program is run whose client connects before its server listens.
const EARLY: usize = 10;

/// perftest with `-R` connects twice: to agree on what is to be done, and to do it. Nothing makes its client wait
/// until the server listens for the second time; one that comes early is rejected, tries again and crashes in
/// `rdma_resolve_addr`, while the server waits for it. Then both are run anew.
fn unless_it_is_early(cluster: &Cluster, run: impl Fn() -> Result<()>) -> Result<()> {
    for _ in 1..EARLY {
        let Err(error) = run() else {
            return Ok(());
        };
        // How the kernel says 8 in the second connection; that of the first one reads otherwise.
        if !format!("{error:#}").contains("RDMA_CM_EVENT_REJECTED; error: 8") {
            return Err(error);
        }
        let findings = cluster.new_findings();
        if let Some(other) = findings
            .iter()
            .find(|text| !text.contains("in librdmacm.so") && !text.contains("segfault"))
        {
            bail!("the kernel reported:\n{other}");
        }
        println!("          perftest's client was early: run anew");
    }
    run()
}

fn other_examples(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let command = "ibv_xsrq_pingpong -d $dev -g $gid -p $port -s 4096 -n 50";
    client_server(
        (one, &format!("exec {command} -c 1")),
        (two, &format!("exec {command} $peer")),
        18518,
        TIME,
    )
    .context("ibv_xsrq_pingpong")?;
    for (server, client) in [
        ("udaddy", "udaddy -s $peer"),
        (
            "mckey -m 239.77.0.1 -b $me -C 5",
            "mckey -s -m 239.77.0.1 -b $me -C 5",
        ),
        ("cmtime -b $me -c 20", "cmtime -s $peer -c 20"),
        (
            "rstream -b $me -S 65536 -I 5 -C 5 -T v",
            "rstream -s $peer -S 65536 -I 5 -C 5 -T v",
        ),
        (
            "riostream -b $me -S 65536 -I 5 -C 5 -T v",
            "riostream -s $peer -S 65536 -I 5 -C 5 -T v",
        ),
    ] {
        until_heard((one, server), (two, client)).context(client)?;
    }
    Ok(())
}

/// Without rdma_cm, qperf leaves out the global routing header, which RoCE cannot do without on
/// any device; that is all of its tests of unreliable connections and datagrams. With it, the
/// processes that Debian's qperf 0.4.11 forks to serve a test crash at their end, on any device:
/// they destroy the queue pair of the identifier that listens, which has none (mended in qperf's
/// sources by commit 83bc16e). Their results have been sent by then. That version's server tells its
/// port before it listens, too (mended by commit 118a571): a client that is faster is rejected, and
/// tries again. It waits no longer than five seconds for its server unless it is told to.
fn qperf(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let tests = "rc_bw rc_lat rc_bi_bw rc_rdma_write_bw rc_rdma_write_lat rc_rdma_read_bw \
                 rc_rdma_read_lat rc_fetch_add_mr ver_rc_compare_swap ver_rc_fetch_add";
    let (out, _) = client_server(
        (one, "exec qperf -lp $port"),
        (
            two,
            &format!(
                "for test in {tests}; do
                   for i in $(seq {EARLY}); do
                     out=$(qperf $peer -lp $port --timeout 60 -cm 1 -t 1 -m 4096 $test 2>&1); rc=$?; echo \"$out\"
                     case \"$out\" in *'Event rejected'*) ;; *) break;; esac
                   done
                   [ $rc = 0 ] || break
                 done
                 qperf $peer -lp $port quit; exit $rc"
            ),
        ),
        19765,
        TIME,
    )?;
    for test in tests.split_whitespace() {
        if !out.contains(&format!("{test}:")) {
            bail!("no result of {test} in:\n{out}");
        }
    }
    Ok(())
}

fn ucx(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let text = one.sh("ucx_info -d")?;
    for transport in ["rc_verbs", "ud_verbs"] {
        let found = text.split("# ").collect::<Vec<_>>().windows(2).any(|pair| {
            pair[0].contains(&format!("Transport: {transport}")) && pair[1].contains("ferrite0:1")
        });
        if !found {
            bail!("UCX does not offer {transport} on the device:\n{text}");
        }
    }
    for (transport, test) in [
        // Connections are made over datagrams.
        ("rc_verbs,ud_verbs:aux", "tag_lat"),
        ("rc_verbs,ud_verbs:aux", "tag_bw"),
        ("rc_verbs,ud_verbs:aux", "ucp_get"),
        ("rc_verbs,ud_verbs:aux", "ucp_fadd"),
        ("ud_verbs", "tag_lat"),
        ("ud_verbs", "tag_bw"),
    ] {
        let environment = format!("UCX_TLS={transport} UCX_NET_DEVICES=$dev:1");
        // Atomic operations of UCX have 8 bytes.
        let size = if test == "ucp_fadd" { 8 } else { 16384 };
        client_server(
            (one, &format!("{environment} exec ucx_perftest -P 0 -p $port")),
            (
                two,
                &format!(
                    "{environment} exec ucx_perftest -P 0 $peer -p $port -t {test} -s {size} -n 100 -w 5"
                ),
            ),
            13337,
            TIME,
        )
        .with_context(|| format!("{transport}, {test}"))?;
    }
    Ok(())
}

fn libfabric(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    for (provider, endpoint) in [
        ("verbs", "msg"),
        ("verbs;ofi_rxm", "rdm"),
        ("verbs;ofi_rxd", "rdm"),
    ] {
        let command = format!("exec fi_pingpong -p '{provider}' -e {endpoint} -I 20 -S 65536 -c");
        let (out, _) = client_server(
            (one, &format!("{command} -B $port")),
            (two, &format!("{command} -P $port $peer")),
            47592,
            TIME,
        )
        .with_context(|| format!("{provider} {endpoint}"))?;
        if !out.contains("64k") {
            bail!("no result of fi_pingpong in:\n{out}");
        }
    }
    Ok(())
}

fn open_mpi(cluster: &Cluster) -> Result<()> {
    let (one, two) = cluster.two()?;
    let remote = "/ferrite/tests/clients/remote-shell";
    let shell = two.spawn(&format!("exec {remote} --serve"), TIME)?;
    wait_listening(two, 7515)?;
    // UCX measures how fast the processor's counter goes; beside a busy machine it takes seconds for minutes, in which
    // a peer was not heard of.
    let outcome = one.run(
        &format!(
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            exec mpirun --prtemca plm_ssh_agent {remote} --host {},{} -n 2 --mca pml ucx \
                -x UCX_TLS=rc_verbs,ud_verbs:aux,self -x UCX_UD_TIMEOUT=60m -x UCX_NET_DEVICES=ferrite0:1 \
                /ferrite/tests/clients/mpi-ring",
            one.name(),
            two.name()
        ),
        TIME,
    );
    shell.signal(libc::SIGTERM)?;
    shell.wait()?;
    let outcome = outcome?;
    if !outcome.ok() || !outcome.out.contains("ring ok: 2 ranks") {
        bail!("{}{}", outcome.out, outcome.err);
    }
    Ok(())
}
