// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks of an RDMA device through the verbs, between two machines or in loopback.

mod agent;
mod bench;
mod checks;
mod direct;
mod pattern;
mod report;
mod sys;
mod verbs;

use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::agent::Side;
use crate::bench::Bench;
use crate::report::{Outcome, Report};
use crate::verbs::Options;

const HELP: &str = "\
Checks of an RDMA device through the verbs.

verbs-check list                      names of the cases
verbs-check serve [options]           the other end: serve until killed
verbs-check run CASE|all [options]    run a case, or all
verbs-check run stress [options]      traffic until killed, or for --seconds
verbs-check run flood --go FILE       events of many objects at once, after FILE-1 and FILE-2 were made
verbs-check run objects [options]     what one process sees by itself; no other end
verbs-check run threads [options]     many threads of one process on the same objects
verbs-check run move [options]        move completion queues while they are in use
verbs-check run priority [options]    who may have handlers of low latency
verbs-check run turns --go FILE       how many events of one vector come before that of another, after each
                                      of FILE-1 to FILE-ROUNDS was made
verbs-check run failures [options]    many queue pairs that fail at once
verbs-check run allocations [options] make and destroy things while the kernel has no memory
verbs-check run private [options]     what may be said to the driver without its provider
verbs-check run raw [options]         who may have raw packets, work queues and rules of flows
verbs-check run raw-lost [options]    have raw packets while their interface goes
verbs-check run uverbs [options]      requests to the kernel by seed, right, almost right and any
verbs-check run killed [options]      processes that are killed with queue pairs and regions
verbs-check run by-hand [options]     work requests that no provider writes
verbs-check run pieces [options]      lists on other services than RC, and of memory of the device
verbs-check run dereg [options]       take memory back while it is in use
verbs-check run removal [options]     be in the middle of things while the device goes
verbs-check run stopped [options]     stand still after a failed registration while the device goes

  --peer HOST      where `serve` runs
  --loopback       both ends in this process, on one port
  --port N         TCP port between the two (default 18600)
  --device NAME    RDMA device (default: the first)
  --gid-index N    GID (default: the first RoCEv2 one with an IPv4 address)
  --mtu N          path MTU in bytes (default: the smaller active one)
  --ack-timeout N  code of the time within which a peer acknowledges (default: 16)
  --seconds N      how long `stress` runs
  --sample N       how many of an operation's allocations fail in `allocations` (default: all)
  --count N        how many queue pairs fail in `failures` (default: 1000), and are of each process in `killed`
                   (default: 100); how many calls `uverbs` makes (default: 20000)
  --seed N         which calls (default: a fresh one, which is printed)
  --rounds N       how often `turns` counts (default: 1), how many processes `killed` has (default: 10)
  --vectors A,B    those of `turns` at the other end: of many queues, and of one (default: 0,1)
  --moves N        how often `move` moves a queue that is in use (default: 2000)

A line for every check: `ok NAME`, `not ok NAME: why` or `skip NAME: why`; at the end
`N passed, N failed`. The exit code is 0 if nothing failed.
";

#[derive(Default)]
struct Arguments {
    words: Vec<String>,
    peer: Option<String>,
    loopback: bool,
    port: Option<u16>,
    mtu: Option<u32>,
    seconds: Option<u64>,
    go: Option<String>,
    sample: Option<u32>,
    moves: Option<u32>,
    rounds: Option<u32>,
    count: Option<usize>,
    seed: Option<u64>,
    vectors: Option<(u32, u32)>,
    options: Options,
}

fn parse() -> Result<Arguments, String> {
    let mut arguments = Arguments::default();
    let mut given = std::env::args().skip(1);
    while let Some(word) = given.next() {
        let mut value = || given.next().ok_or(format!("{word} wants a value"));
        fn number<T: std::str::FromStr>(word: &str, value: String) -> Result<T, String> {
            value
                .parse()
                .map_err(|_| format!("{word}: {value} is not a number that fits"))
        }
        match word.as_str() {
            "--peer" => arguments.peer = Some(value()?),
            "--loopback" => arguments.loopback = true,
            "--port" => arguments.port = Some(number(&word, value()?)?),
            "--mtu" => arguments.mtu = Some(number(&word, value()?)?),
            "--ack-timeout" => {
                bench::ACK_TIMEOUT.store(number(&word, value()?)?, Ordering::Relaxed);
            }
            "--seconds" => arguments.seconds = Some(number(&word, value()?)?),
            "--go" => arguments.go = Some(value()?),
            "--sample" => arguments.sample = Some(number(&word, value()?)?),
            "--moves" => arguments.moves = Some(number(&word, value()?)?),
            "--count" => arguments.count = Some(number(&word, value()?)?),
            "--seed" => arguments.seed = Some(number(&word, value()?)?),
            "--rounds" => arguments.rounds = Some(number(&word, value()?)?),
            "--vectors" => {
                let both = value()?;
                let (one, other) = both.split_once(',').ok_or("--vectors wants two")?;
                arguments.vectors =
                    Some((number(&word, one.into())?, number(&word, other.into())?));
            }
            "--device" => arguments.options.device = Some(value()?),
            "--gid-index" => arguments.options.gid_index = Some(number(&word, value()?)?),
            "--help" | "-h" => arguments.words = vec!["help".into()],
            option if option.starts_with('-') => return Err(format!("no such option: {option}")),
            _ => arguments.words.push(word),
        }
    }
    Ok(arguments)
}

fn main() -> ExitCode {
    match parse().and_then(|arguments| dispatch(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("verbs-check: {message}");
            ExitCode::from(2)
        }
    }
}

fn dispatch(arguments: &Arguments) -> Result<bool, String> {
    let words: Vec<&str> = arguments.words.iter().map(String::as_str).collect();
    match words[..] {
        ["list"] => {
            for case in checks::CASES {
                println!("{}", case.name);
            }
            Ok(true)
        }
        ["serve"] => serve(arguments),
        // The other process of checks that need one.
        ["hold"] => agent::hold(&arguments.options, arguments.count).map(|()| true),
        ["run", "stress"] => stress(arguments),
        ["run", "flood"] => flood(arguments),
        ["run", "failures"] => {
            let mut report = Report::default();
            let count = arguments.count.unwrap_or(1000);
            checks::objects::failures(&arguments.options, &mut report, count);
            Ok(report.finish())
        }
        ["run", "turns"] => turns(arguments),
        ["run", "priority"] => {
            let mut report = Report::default();
            checks::priority::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "objects"] => {
            let mut report = Report::default();
            checks::objects::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "threads"] => {
            let mut report = Report::default();
            checks::threads::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "move"] => {
            let mut report = Report::default();
            checks::moving::run(
                &arguments.options,
                &mut report,
                arguments.moves.unwrap_or(2000),
            );
            Ok(report.finish())
        }
        ["run", "allocations"] => {
            let mut report = Report::default();
            checks::allocations::run(&arguments.options, arguments.sample, &mut report);
            Ok(report.finish())
        }
        ["run", "private"] => {
            let mut report = Report::default();
            checks::private::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "raw"] => {
            let mut report = Report::default();
            checks::raw::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "raw-lost"] => match checks::raw::lost(&arguments.options) {
            Ok(()) => Ok(true),
            Err(Outcome::Failed(reason) | Outcome::Skipped(reason)) => Err(reason),
        },
        ["run", "killed"] => {
            let mut report = Report::default();
            let times = arguments.rounds.unwrap_or(10);
            let count = arguments.count.unwrap_or(100);
            checks::killed::run(&arguments.options, &mut report, times, count);
            Ok(report.finish())
        }
        ["run", "uverbs"] => {
            let mut report = Report::default();
            let fresh = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |since| since.as_micros() as u64);
            let seed = arguments.seed.unwrap_or(fresh);
            let count = arguments.count.unwrap_or(20_000) as u64;
            checks::uverbs::run(&arguments.options, &mut report, seed, count);
            Ok(report.finish())
        }
        ["run", "by-hand"] => {
            let mut report = Report::default();
            checks::by_hand::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "pieces"] => {
            let mut report = Report::default();
            checks::pieces::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "dereg"] => {
            let mut report = Report::default();
            checks::dereg::run(&arguments.options, &mut report);
            Ok(report.finish())
        }
        ["run", "stopped"] => match checks::pieces::stopped(&arguments.options) {
            Ok(()) => Ok(true),
            Err(Outcome::Failed(reason) | Outcome::Skipped(reason)) => Err(reason),
        },
        ["run", "removal"] => match checks::objects::removal(&arguments.options) {
            Ok(()) => Ok(true),
            Err(Outcome::Failed(reason) | Outcome::Skipped(reason)) => Err(reason),
        },
        ["run", name] => run(arguments, name),
        ["help"] => {
            print!("{HELP}");
            Ok(true)
        }
        _ => Err(format!("what shall be done?\n\n{HELP}")),
    }
}

fn port(arguments: &Arguments) -> u16 {
    arguments.port.unwrap_or(18_600)
}

/// Serves one commanding program after the other.
fn serve(arguments: &Arguments) -> Result<bool, String> {
    let port = port(arguments);
    let listener =
        TcpListener::bind(("0.0.0.0", port)).map_err(|error| format!("port {port}: {error}"))?;
    println!("listening on port {port}");
    loop {
        let (stream, from) = listener.accept().map_err(|error| error.to_string())?;
        if let Err(message) = agent::serve(stream, &arguments.options) {
            eprintln!("verbs-check: serving {from}: {message}");
        }
        for complaint in report::complaints() {
            eprintln!("verbs-check: serving {from}: {complaint}");
        }
    }
}

fn bench(arguments: &Arguments) -> Result<Bench, String> {
    let here = Side::local(&arguments.options, "here")?;
    let there = match (&arguments.peer, arguments.loopback) {
        (None, true) => Side::local(&arguments.options, "there")?,
        (Some(peer), false) => Side::remote(connect(peer, port(arguments))?, "there"),
        _ => return Err("either --peer HOST or --loopback is needed".into()),
    };
    let mtu = match arguments.mtu {
        None => None,
        Some(bytes @ (256 | 512 | 1024 | 2048 | 4096)) => Some(bytes.ilog2() - 7),
        Some(bytes) => return Err(format!("{bytes} is no MTU: 256, 512, 1024, 2048 or 4096")),
    };
    Bench::new(here, there, mtu)
}

/// Connects to the other end, which may be about to start.
fn connect(peer: &str, port: u16) -> Result<TcpStream, String> {
    let deadline = Instant::now() + bench::PATIENCE;
    loop {
        match TcpStream::connect((peer, port)) {
            Ok(stream) => {
                stream
                    .set_nodelay(true)
                    .map_err(|error| error.to_string())?;
                // Longer than anything that is waited for at the other end.
                stream
                    .set_read_timeout(Some(2 * bench::PATIENCE))
                    .map_err(|error| error.to_string())?;
                return Ok(stream);
            }
            Err(error) if Instant::now() > deadline => {
                return Err(format!("{peer} port {port}: {error}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn run(arguments: &Arguments, name: &str) -> Result<bool, String> {
    let cases: Vec<_> = checks::CASES
        .iter()
        .filter(|case| name == "all" || case.name == name)
        .collect();
    if cases.is_empty() {
        return Err(format!("no such case: {name}; see `verbs-check list`"));
    }
    let mut bench = bench(arguments)?;
    let mut report = Report::default();
    for case in cases {
        (case.run)(&mut bench, &mut report);
    }
    Ok(report.finish())
}

fn flood(arguments: &Arguments) -> Result<bool, String> {
    let go = arguments.go.as_deref().ok_or("flood wants --go FILE")?;
    let mut bench = bench(arguments)?;
    let mut report = Report::default();
    checks::flood::run(&mut bench, &mut report, go);
    Ok(report.finish())
}

fn turns(arguments: &Arguments) -> Result<bool, String> {
    let go = arguments.go.as_deref().ok_or("turns wants --go FILE")?;
    let mut bench = bench(arguments)?;
    let mut report = Report::default();
    let rounds = arguments.rounds.unwrap_or(1);
    let vectors = arguments.vectors.unwrap_or((0, 1));
    checks::priority::turns(&mut bench, &mut report, go, rounds, vectors);
    Ok(report.finish())
}

fn stress(arguments: &Arguments) -> Result<bool, String> {
    let mut bench = bench(arguments)?;
    let mut report = Report::default();
    let time = arguments.seconds.map(Duration::from_secs);
    let result = checks::stress(&mut bench, time).map(|messages| println!("{messages} messages"));
    report.enter("stress: writes and reads over several queue pairs", result);
    Ok(report.finish())
}
