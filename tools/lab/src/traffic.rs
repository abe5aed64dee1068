// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Client and server programs in two guests.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};

use crate::protocol::Outcome;
use crate::vm::Vm;

/// Where a server of `ibv_rc_pingpong` listens.
const PINGPONG_PORT: u16 = 18515;

/// Shell text that sets `dev` to the RDMA device and `gid` to the index of its RoCEv2 entry for
/// the IPv4 address. It runs no other program: in an emulator that is what takes time.
pub const DEVICE_AND_GID: &str = r#"
dev=(/sys/class/infiniband/*); dev=${dev##*/}
gid=
p=/sys/class/infiniband/$dev/ports/1
for ((n = 0; n < 256; n++)); do
    { read -r t <$p/gid_attrs/types/$n; } 2>/dev/null || continue
    read -r g <$p/gids/$n || continue
    case "$t $g" in "RoCE v2 0000:0000:0000:0000:0000:ffff:"*) gid=$n; break;; esac
done
[ -n "$gid" ] || { echo "no RoCEv2 GID for the IPv4 address"; exit 1; }
"#;

/// Waits until `ibv_rc_pingpong` has a queue pair that is connected. Not any: the connection manager has one from the
/// beginning.
pub fn wait_connected(vm: &Vm) -> Result<()> {
    vm.wait_for(
        "rdma resource show qp | grep 'state RTS' | grep -q ibv_rc_pingpong",
        Duration::from_secs(60),
    )
    .context("no queue pair is connected")
}

/// Waits until something listens on a TCP port.
pub fn wait_listening(vm: &Vm, port: u16) -> Result<()> {
    vm.wait_for(
        // Local address and port, peer, the state of those that listen. No other program is run.
        &format!(
            "for table in /proc/net/tcp /proc/net/tcp6; do
                 while read -r _ at _ state _; do
                     case $at/$state in *:{port:04X}/0A) exit 0;; esac
                 done <$table
             done; exit 1"
        ),
        Duration::from_secs(90),
    )
    .with_context(|| format!("no server on port {port}"))
}

/// Runs a server script in one guest and, once it listens, a client script in the other; both
/// must succeed. Gives both outputs, the client's first.
///
/// `$dev`, `$gid` and `$port` are set in both, `$peer` in the client.
pub fn client_server(
    server: (&Vm, &str),
    client: (&Vm, &str),
    port: u16,
    timeout: Duration,
) -> Result<(String, String)> {
    let (asked, served) = outcomes(server, client, port, timeout)?;
    if !asked.ok() || !served.ok() {
        bail!(failure(server, client, &asked, &served));
    }
    Ok((asked.out, served.out))
}

/// What a machine shows of RDMA programs that get no further: where their threads are, their queue pairs as the kernel
/// and the device know them, and what was counted, twice with a second between.
const WHERE_IT_HANGS: &str = r#"
for at in /proc/[0-9]*; do
    case $(ls -l $at/fd 2>/dev/null) in *infiniband*)
        echo "${at##*/} $(<$at/comm): $(grep State $at/status)"
        cat $at/task/*/stack 2>/dev/null
    esac
done
cd /sys/class/infiniband
for dev in *; do
    echo "$dev"
    rdma -d resource show qp link $dev/1
    rdma -r resource show qp link $dev/1
    cat /sys/kernel/debug/$dev/{qps,cqs,eqs} 2>/dev/null
    grep -H . $dev/ports/1/hw_counters/* | grep -v ':0$'
    sleep 1
    echo 'a second later'
    grep -H . $dev/ports/1/hw_counters/* | grep -v ':0$'
done
true"#;

/// Runs both scripts of [`client_server`]; says how they ended, the client's end first.
///
/// A program that is killed for its time has taken its queue pair along. So what hangs is looked at a little before,
/// and is in what the server said.
fn outcomes(
    server: (&Vm, &str),
    client: (&Vm, &str),
    port: u16,
    timeout: Duration,
) -> Result<(Outcome, Outcome)> {
    let (server_vm, server_script) = server;
    let (client_vm, client_script) = client;
    let serving = server_vm.spawn(
        &format!("{DEVICE_AND_GID} port={port}; {server_script}"),
        timeout,
    )?;
    if let Err(error) = wait_listening(server_vm, port) {
        if let Some(early) = serving.ended() {
            bail!(
                "{}: the server ended early (exit code {}): {server_script}\n{}{}",
                server_vm.name(),
                early.code,
                early.out,
                early.err
            );
        }
        let _ = serving.signal(libc::SIGKILL);
        return Err(error);
    }
    let asking = client_vm.spawn(
        &format!(
            "{DEVICE_AND_GID} port={port} peer={}; {client_script}",
            server_vm.ip()
        ),
        timeout,
    )?;
    let mut seen = String::new();
    let asked = match asking.ended_until(Instant::now() + client_vm.at_most(timeout) * 7 / 8)? {
        Some(asked) => asked,
        None => {
            for vm in [client_vm, server_vm] {
                let shown = match vm.run(WHERE_IT_HANGS, Duration::from_secs(30)) {
                    Ok(outcome) => outcome.out + &outcome.err,
                    Err(error) => format!("{error:#}"),
                };
                let _ = write!(seen, "--- {}, while nothing goes on:\n{shown}", vm.name());
            }
            asking.wait()?
        }
    };
    if !asked.ok() {
        // The server may wait for a client that is gone.
        let _ = serving.signal(libc::SIGTERM);
    }
    let mut served = serving.wait()?;
    served.err.push_str(&seen);
    Ok((asked, served))
}

/// What both scripts said, of which one failed.
fn failure(
    (server, server_script): (&Vm, &str),
    (client, client_script): (&Vm, &str),
    asked: &Outcome,
    served: &Outcome,
) -> String {
    let end = |role: &str, vm: &Vm, script: &str, outcome: &Outcome| {
        let how = if outcome.timed_out {
            "timed out".to_owned()
        } else {
            format!("exit code {}", outcome.code)
        };
        let (out, err) = (&outcome.out, &outcome.err);
        format!("{role} in {}: {how}: {script}\n{out}{err}", vm.name())
    };
    end("client", client, client_script, asked) + &end("--- server", server, server_script, served)
}

/// The result of one `ibv_rc_pingpong`.
#[derive(Debug, Clone, Copy)]
pub struct Pingpong {
    /// Microseconds for one message there and back.
    pub usec_per_iteration: f64,
}

/// The scripts of `ibv_rc_pingpong` with received data checked, the server's first.
fn pingpong_scripts(size: usize, iterations: usize, events: bool) -> [String; 2] {
    let flags = format!(
        "-d $dev -g $gid -p $port -s {size} -n {iterations} -c{}",
        if events { " -e" } else { "" }
    );
    ["", " $peer"].map(|peer| format!("exec ibv_rc_pingpong {flags}{peer}"))
}

/// Runs `ibv_rc_pingpong` with received data checked.
pub fn pingpong(
    server: &Vm,
    client: &Vm,
    size: usize,
    iterations: usize,
    events: bool,
) -> Result<Pingpong> {
    let [serve, ask] = pingpong_scripts(size, iterations, events);
    let time = Duration::from_secs(120);
    let (out, _) = client_server((server, &serve), (client, &ask), PINGPONG_PORT, time)?;
    result(&out)
}

/// Runs `ibv_rc_pingpong` with received data checked over a wire that loses frames, not for longer
/// than `time`.
///
/// Each side ends as soon as all its messages are there and acknowledged, and what comes for it
/// later finds no queue pair: the side whose last acknowledgement was lost asks for it in vain. The
/// other one's word is enough, since it had acknowledgements of all that it sent.
pub fn pingpong_over_loss(
    server: &Vm,
    client: &Vm,
    size: usize,
    iterations: usize,
    time: Duration,
) -> Result<()> {
    let [serve, ask] = pingpong_scripts(size, iterations, false);
    let (server, client) = ((server, serve.as_str()), (client, ask.as_str()));
    let (asked, served) = outcomes(server, client, PINGPONG_PORT, time)?;
    let in_vain = |outcome: &Outcome| outcome.err.contains("transport retry counter exceeded");
    match (asked.ok(), served.ok()) {
        (true, true) => {
            result(&served.out)?;
            result(&asked.out)?;
        }
        (true, false) if in_vain(&served) => {
            result(&asked.out)?;
        }
        (false, true) if in_vain(&asked) => {
            result(&served.out)?;
        }
        _ => bail!(failure(server, client, &asked, &served)),
    }
    Ok(())
}

/// What `ibv_rc_pingpong` says at its end.
fn result(out: &str) -> Result<Pingpong> {
    // "1000 iters in 0.05 seconds = 51.20 usec/iter"
    let line = out
        .lines()
        .find(|line| line.contains("usec/iter"))
        .with_context(|| format!("no result in:\n{out}"))?;
    if out.contains("invalid data") {
        bail!("wrong data received:\n{out}");
    }
    let usec = line
        .rsplit("= ")
        .next()
        .and_then(|text| text.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("cannot read: {line}"))?;
    Ok(Pingpong {
        usec_per_iteration: usec,
    })
}

/// Numbers from the result line of a perftest program.
#[derive(Debug, Clone)]
pub struct Perftest {
    /// The columns after the size.
    pub columns: Vec<f64>,
}

/// The last line of numbers in perftest's output.
pub fn perftest_line(out: &str) -> Option<Vec<f64>> {
    out.lines().rev().find_map(|line| {
        let numbers: Vec<f64> = line
            .split_whitespace()
            .map(|word| word.parse().ok())
            .collect::<Option<_>>()?;
        (numbers.len() >= 4).then_some(numbers)
    })
}

/// Runs a perftest program.
pub fn perftest(
    server: &Vm,
    client: &Vm,
    program: &str,
    size: usize,
    iterations: usize,
    more: &str,
) -> Result<Perftest> {
    let port = 18516;
    let flags = format!("-d $dev -x $gid -p $port -s {size} -n {iterations} -F {more}");
    let (out, _) = client_server(
        (server, &format!("exec {program} {flags}")),
        (client, &format!("exec {program} {flags} $peer")),
        port,
        Duration::from_secs(180),
    )?;
    let columns = perftest_line(&out).with_context(|| format!("no result in:\n{out}"))?;
    Ok(Perftest { columns })
}

impl Perftest {
    /// Average bandwidth in MiB/s, for the `_bw` programs.
    pub fn average_bandwidth(&self) -> f64 {
        // size, iterations, peak, average, message rate
        self.columns.get(3).copied().unwrap_or_default()
    }

    /// Typical latency in microseconds, for the `_lat` programs.
    pub fn typical_latency(&self) -> f64 {
        // size, iterations, min, max, typical, average, deviation, 99%, 99.9%
        self.columns.get(4).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::perftest_line;

    #[test]
    fn the_result_line_is_the_last_one_of_numbers() {
        let out = " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]\n \
            65536      1000             48.10              47.95              0.000767\n\
            ---------------------------------------------------------------------------------------\n";
        assert_eq!(
            perftest_line(out).and_then(|c| c.get(3).copied()),
            Some(47.95)
        );
        assert_eq!(perftest_line("nothing\n"), None);
    }
}
