// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures any verbs device between two machines: the same program for every driver.

mod endpoint;
mod marker;
mod sys;
mod traffic;

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::endpoint::{Listener, Outcome, Session, Shape, Wait, PATIENCE};
use crate::traffic::{Kind, Pings, Stream, RECV_DEPTH};

const HELP: &str = "\
Measures any verbs device between two machines.

verbs-bench serve --rdma ADDRESS [--port N]      the other end; serves until killed
verbs-bench run   --rdma ADDRESS --control ADDRESS [options] TEST..
verbs-bench count COMMAND..                      runs a command between the markers of the counting plugin

  --rdma ADDRESS      of the device to measure: own (serve), the other end's (run)
  --control ADDRESS   where the other end is reached by TCP
  --port N            of the control connection (default 18700); rdma_cm has N + 1000
  --qps N             connections (default 1)
  --ms N              how long a measurement takes, about (default 250)
  --wait HOW          while nothing is there: spin, yield, event (default spin)
  --clone             connections beyond the first without rdma_cm (RoCE only)
  --messages N        messages of a count (default 4096)
  --shallow           connections with room for 16 messages each way
  --handlers N        completion queues that the cloned connections are spread over, each on a
                      completion vector of its own; for scale_handlers
  --one-vector        ... all on the first vector
  --span N            MiB of memory beside the buffer (default 1), for write_span
  --moderation N:US   events wait for N completions, or for so many microseconds; for load

Tests; each prints one line of JSON:
  send_bw:BYTES write_bw:BYTES read_bw:BYTES       a stream, as many under way as is useful
  send_lat:BYTES write_lat:BYTES read_lat:BYTES    one after the other, there and back
  send_count:BYTES write_count:BYTES read_count:BYTES
                      batches of messages, each with a completion, between the markers of the
                      counting plugin; both ends sleep while they wait
  reg:BYTES           registrations and deregistrations
  connect:0           connections made and ended
  reg_count:BYTES connect_count:0
                      the same, --messages of them, between the markers
  scale_qps:BYTES     writes over all connections in turn: their time, then two counted spans, of
                      a quarter of --messages and of all of them, in batches of 256
  scale_handlers:BYTES
                      writes whose completions come by events, one after the other in a thread for
                      each handler: their time, then two counted spans as above
  scale_regions:N     the same with 64 B writes out of and into N regions of a page, in turn
  write_span:BYTES    writes through --span MiB of both ends, one place after the other
  fair_write:BYTES    writes on all connections side by side, each with some under way all the time, until
                      --messages of each are complete on average: how many were of each
  loop_send:BYTES loop_write:BYTES
                      one after the other, there and back between two connections of this program, which
                      makes them over the path of the first; for a server of the same machine
  load:N              64 B writes, N of them under way all the time, each with a completion; events
                      are waited for: the time of each, and interrupts of the last run
  memory_qp:N memory_cq:N memory_mr:N
                      memory of this machine that N objects take; there is a counted span of
                      nothing while they are there
";

#[derive(Clone)]
struct Arguments {
    words: Vec<String>,
    rdma: Option<Ipv4Addr>,
    control: Option<String>,
    port: u16,
    qps: usize,
    ms: u64,
    wait: Wait,
    messages: u64,
    clone: bool,
    shallow: bool,
    handlers: usize,
    one_vector: bool,
    moderation: Option<(u16, u16)>,
    span: u64,
}

fn parse() -> Outcome<Arguments> {
    let mut arguments = Arguments {
        words: Vec::new(),
        rdma: None,
        control: None,
        port: 18_700,
        qps: 1,
        ms: 250,
        wait: Wait::Spin,
        messages: 4096,
        clone: false,
        shallow: false,
        handlers: 0,
        one_vector: false,
        moderation: None,
        span: 1,
    };
    let mut given = std::env::args().skip(1);
    while let Some(word) = given.next() {
        let mut value = || given.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--rdma" => arguments.rdma = Some(number(&value()?)?),
            "--control" => arguments.control = Some(value()?),
            "--port" => arguments.port = number(&value()?)?,
            "--qps" => arguments.qps = number(&value()?)?,
            "--ms" => arguments.ms = number(&value()?)?,
            "--clone" => arguments.clone = true,
            "--shallow" => arguments.shallow = true,
            "--handlers" => arguments.handlers = number(&value()?)?,
            "--one-vector" => arguments.one_vector = true,
            "--moderation" => arguments.moderation = Some(moderation(&value()?)?),
            "--span" => arguments.span = number(&value()?)?,
            "--messages" => arguments.messages = number(&value()?)?,
            "--wait" => arguments.wait = Wait::parse(&value()?)?,
            "--help" | "-h" => arguments.words = vec!["help".into()],
            option if option.starts_with('-') => return Err(format!("no such option: {option}")),
            _ => arguments.words.push(word),
        }
    }
    Ok(arguments)
}

/// Completions and microseconds.
fn moderation(text: &str) -> Outcome<(u16, u16)> {
    let (count, microseconds) = text.split_once(':').ok_or("N:US is needed")?;
    Ok((number(count)?, number(microseconds)?))
}

fn number<T: std::str::FromStr>(text: &str) -> Outcome<T> {
    text.parse().map_err(|_| format!("cannot read {text}"))
}

/// Runs a command between the markers: all that the machine does meanwhile is counted.
fn count(mut command: impl Iterator<Item = String>) -> Outcome {
    let program = command.next().ok_or("a command is needed")?;
    marker::begin();
    let status = Command::new(&program).args(command).status();
    marker::end();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{program}: {status}")),
        Err(error) => Err(format!("{program}: {error}")),
    }
}

/// Does what the arguments say.
fn run_arguments() -> Outcome {
    let mut given = std::env::args().skip(1);
    // What follows belongs to the command.
    if given.next().as_deref() == Some("count") {
        return count(given);
    }
    parse().and_then(
        |arguments| match arguments.words.first().map(String::as_str) {
            Some("serve") => serve(&arguments),
            Some("run") => run(&arguments),
            Some("help") => {
                print!("{HELP}");
                Ok(())
            }
            _ => Err(format!("what shall be done?\n\n{HELP}")),
        },
    )
}

fn main() -> ExitCode {
    match run_arguments() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("verbs-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Lines of words over TCP, by which the two ends agree on what comes next.
struct Control {
    reader: BufReader<TcpStream>,
}

impl Control {
    fn new(stream: TcpStream) -> Outcome<Self> {
        let text = |error: std::io::Error| error.to_string();
        stream.set_nodelay(true).map_err(text)?;
        // The other end may have a million regions to make.
        stream.set_read_timeout(Some(20 * PATIENCE)).map_err(text)?;
        Ok(Self {
            reader: BufReader::new(stream),
        })
    }

    fn say(&mut self, line: &str) -> Outcome {
        self.reader
            .get_mut()
            .write_all(format!("{line}\n").as_bytes())
            .map_err(|error| format!("control connection: {error}"))
    }

    /// The next line's words; nothing at the end.
    fn hear(&mut self) -> Outcome<Vec<String>> {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .map_err(|error| format!("control connection: {error}"))?;
        Ok(line.split_whitespace().map(str::to_owned).collect())
    }

    /// A line of a word and numbers.
    fn say_numbers(&mut self, word: &str, numbers: &[u32]) -> Outcome {
        let mut line = word.to_owned();
        for number in numbers {
            // Writing to a string does not fail.
            let _ = std::fmt::Write::write_fmt(&mut line, format_args!(" {number}"));
        }
        self.say(&line)
    }

    /// What [`Control::say_numbers`] has said.
    fn hear_numbers(&mut self, word: &str) -> Outcome<Vec<u32>> {
        let words = self.expect(word)?;
        words[1..].iter().map(|text| number(text)).collect()
    }

    /// The next line, which must start with a word.
    fn expect(&mut self, word: &str) -> Outcome<Vec<String>> {
        let words = self.hear()?;
        if words.first().map(String::as_str) != Some(word) {
            return Err(format!("the other end says: {}", words.join(" ")));
        }
        Ok(words)
    }
}

/// The port of rdma_cm: over iWARP it is one of TCP, and must not be the control connection's.
fn rdma_port(arguments: &Arguments) -> u16 {
    arguments.port.wrapping_add(1000)
}

fn serve(arguments: &Arguments) -> Outcome {
    let ip = arguments.rdma.ok_or("--rdma is needed")?;
    let listener = Listener::new(ip, rdma_port(arguments))?;
    let control = TcpListener::bind(("0.0.0.0", arguments.port)).map_err(|e| e.to_string())?;
    loop {
        let (stream, _) = control.accept().map_err(|error| error.to_string())?;
        let mut control = Control::new(stream)?;
        if let Err(message) = serve_one(&mut control, &listener) {
            eprintln!("verbs-bench: {message}");
            // It may be gone already.
            let _ = control.say(&format!("failed {message}"));
        }
    }
}

fn serve_one(control: &mut Control, listener: &Listener) -> Outcome {
    let mut session: Option<Session> = None;
    let mut remote = (0, 0);
    loop {
        let words = control.hear()?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match (&words[..], &mut session) {
            ([], _) => return Ok(()),
            (["session", managed, send_depth, recv_depth, qps], old) => {
                *old = None;
                let shape = Shape {
                    qps: number(qps)?,
                    send_depth: number(send_depth)?,
                    recv_depth: number(recv_depth)?,
                };
                let mut fresh = Session::empty(shape);
                control.say("accepting")?;
                for _ in 0..number(managed)? {
                    fresh.accept_one(listener)?;
                }
                let words = control.expect("buffer")?;
                remote = buffer(&words)?;
                let (address, rkey) = fresh.buffer();
                control.say(&format!("buffer {address} {rkey}"))?;
                *old = Some(fresh);
            }
            (["clone", count], Some(session)) => {
                let own = session.make_clones(number(count)?)?;
                control.say_numbers("clones", &own)?;
                let peers = control.hear_numbers("clones")?;
                session.connect_clones(&peers)?;
                control.say("connected")?;
            }
            (["regions", count], Some(session)) => {
                session.drop_regions();
                let keys = session.make_regions(number(count)?)?;
                control.say_numbers("keys", &keys)?;
            }
            (["span", length], Some(session)) => {
                let (address, rkey) = session.make_span(number(length)?)?;
                control.say(&format!("span {address} {rkey}"))?;
            }
            (["connect", count], _) => {
                session = None;
                let mut connecting = Session::empty(connect_shape());
                control.say("accepting")?;
                for _ in 0..number::<u64>(count)? + 1 {
                    connecting.accept_one(listener)?;
                    control.expect("next")?;
                    connecting.close();
                }
            }
            (["stream", wait, counting], Some(session)) => {
                let wait = Wait::parse(wait)?;
                control.say("ready")?;
                let counting = *counting == "1";
                let before = interrupts();
                if counting {
                    marker::begin();
                }
                let received = traffic::receive_stream(session, wait)?;
                if counting {
                    marker::end();
                }
                let (interrupts, _) = between(&before, &interrupts());
                control.say(&format!("received {received} {interrupts}"))?;
            }
            (["ping", kind, size, count, wait], Some(session)) => {
                let pings = Pings {
                    kind: Kind::parse(kind).ok_or("no such kind")?,
                    size: number(size)?,
                    count: number(count)?,
                    wait: Wait::parse(wait)?,
                };
                session.clear_incoming(pings.size as usize);
                control.say("ready")?;
                traffic::ping(session, &pings, remote, false)?;
                control.say("done")?;
            }
            _ => return Err(format!("not understood: {}", words.join(" "))),
        }
    }
}

fn buffer(words: &[String]) -> Outcome<(u64, u32)> {
    match words {
        [_, address, rkey] => Ok((number(address)?, number(rkey)?)),
        _ => Err("no buffer was given".into()),
    }
}

/// What a connection is made with that nothing goes over.
fn connect_shape() -> Shape {
    Shape {
        qps: 1,
        send_depth: 16,
        recv_depth: 16,
    }
}

/// What is known of a stream when it is over.
struct Sent {
    seconds: f64,
    interrupts: u64,
    interrupts_there: u64,
}

/// Bytes of memory that are free or easily freed, by the kernel's account.
fn available() -> u64 {
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = table
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// The same when what was freed before has become free.
fn settled() -> u64 {
    // Where this is not allowed the figure is only less exact.
    let _ = std::fs::write("/proc/sys/vm/drop_caches", "3");
    std::thread::sleep(Duration::from_secs(1));
    available()
}

/// Interrupts of devices since this machine has started, by the processor that served them.
fn interrupts() -> Vec<u64> {
    served(&std::fs::read_to_string("/proc/interrupts").unwrap_or_default())
}

/// The same of the kernel's table.
fn served(table: &str) -> Vec<u64> {
    let mut served = Vec::new();
    for line in table.lines().filter(|line| line.contains("MSI")) {
        let numbers = line
            .split_whitespace()
            .skip(1)
            .map_while(|word| word.parse::<u64>().ok());
        for (processor, number) in numbers.enumerate() {
            if processor == served.len() {
                served.push(0);
            }
            served[processor] += number;
        }
    }
    served
}

/// Interrupts between two looks: of all processors, and of the one with most.
fn between(before: &[u64], after: &[u64]) -> (u64, u64) {
    let new = before
        .iter()
        .zip(after)
        .map(|(before, after)| after.saturating_sub(*before));
    (new.clone().sum(), new.max().unwrap_or(0))
}

/// The time of so many round trips, by the median of their parts.
fn by_their_median(parts: &[(u64, Duration)], count: u64) -> f64 {
    let mut each: Vec<f64> = parts
        .iter()
        .map(|(count, time)| time.as_secs_f64() / *count as f64)
        .collect();
    each.sort_by(f64::total_cmp);
    let median = each.get(each.len() / 2).copied().unwrap_or_default();
    median * count as f64
}

struct Client {
    control: Control,
    session: Session,
    remote: (u64, u32),
    arguments: Arguments,
    ip: Ipv4Addr,
    /// Connections that are connected to each other, once there are some.
    ends: Option<[usize; 2]>,
}

/// Messages of the first and shortest run under a load.
const LOAD_START: u64 = 2048;

/// Send work requests of a connection.
const SEND_DEPTH: u32 = 512;

fn run(arguments: &Arguments) -> Outcome {
    let ip = arguments.rdma.ok_or("--rdma is needed")?;
    let host = arguments.control.as_ref().ok_or("--control is needed")?;
    let mut control = Control::new(connect(host, arguments.port)?)?;
    // Many connections share the memory that one would take.
    let share = (arguments.qps as u32 / 8).max(1);
    let mut shape = Shape {
        qps: arguments.qps,
        send_depth: (SEND_DEPTH / share).max(16),
        recv_depth: RECV_DEPTH.min(8192 / arguments.qps.max(1) as u32).max(16),
    };
    if arguments.shallow {
        (shape.send_depth, shape.recv_depth) = (16, 16);
    }
    let managed = if arguments.clone { 1 } else { shape.qps };
    control.say(&format!(
        "session {managed} {} {} {}",
        shape.send_depth, shape.recv_depth, shape.qps
    ))?;
    control.expect("accepting")?;
    let mut session = Session::connect(ip, rdma_port(arguments), managed, shape)?;
    let (address, rkey) = session.buffer();
    control.say(&format!("buffer {address} {rkey}"))?;
    let remote = buffer(&control.expect("buffer")?)?;
    if arguments.handlers > 0 {
        // The first completion vector is no wish: such a queue is at the handler of who makes it.
        traffic::run_on(0)?;
    }
    session.make_handlers(arguments.handlers, arguments.one_vector)?;
    if managed < shape.qps {
        control.say(&format!("clone {}", shape.qps - managed))?;
        let own = session.make_clones(shape.qps - managed)?;
        let peers = control.hear_numbers("clones")?;
        session.connect_clones(&peers)?;
        control.say_numbers("clones", &own)?;
        control.expect("connected")?;
    }
    if let Some(moderation) = arguments.moderation {
        session.moderate(moderation)?;
    }
    eprintln!("device {}", session.device());
    let mut client = Client {
        control,
        session,
        remote,
        arguments: arguments.clone(),
        ip,
        ends: None,
    };
    client.warm_up()?;
    for test in &arguments.words[1..] {
        client.test(test).map_err(|why| format!("{test}: {why}"))?;
    }
    Ok(())
}

/// Connects to the other end, which may be about to start.
fn connect(host: &str, port: u16) -> Outcome<TcpStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect((host, port)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > deadline => {
                return Err(format!("{host} port {port}: {error}"));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

impl Client {
    fn test(&mut self, test: &str) -> Outcome {
        let (name, size) = test.split_once(':').ok_or("NAME:BYTES is needed")?;
        let size: u32 = number(size)?;
        let length = !matches!(name, "connect" | "connect_count" | "scale_regions" | "load")
            && !name.starts_with("memory_");
        if length && !(2..=endpoint::HALF).contains(&(size as usize)) {
            return Err(format!("a size is 2 to {}", endpoint::HALF));
        }
        if (name == "scale_handlers") != (self.arguments.handlers > 0) {
            return Err("--handlers and scale_handlers go together".into());
        }
        let parts = name.split_once('_');
        let kind = parts.and_then(|(kind, _)| Kind::parse(kind));
        let kind = kind.filter(|_| name != "write_span");
        let mut more = String::new();
        // The first run, which shows how many are needed, is short for large messages as well.
        let start = if length && size > 1 << 18 { 1 } else { 4 };
        // Each connection also has an end of its stream, which is to be a small part.
        let start_of_stream = match self.session.len() as u64 {
            1 => start,
            some => start.max(8 * some),
        };
        let (count, seconds) = match (kind, parts.map(|parts| parts.1)) {
            (Some(kind), Some("bw")) => self.bandwidth(start_of_stream, kind, size)?,
            (None, _) if name == "scale_qps" => {
                let start = start.max(8 * self.session.len() as u64);
                let timed = self.bandwidth(start, Kind::Write, size)?;
                let stream = self.counted_stream(Kind::Write, size);
                for count in [stream.count / 4, stream.count] {
                    self.stream(&Stream { count, ..stream }, true)?;
                }
                timed
            }
            (None, _) if name == "scale_handlers" => {
                let remote = self.remote;
                let timed =
                    self.growing(64 * self.arguments.handlers as u64, |client, count| {
                        let session = &mut client.session;
                        Ok(traffic::write_by_events(session, count, size, remote)?.as_secs_f64())
                    })?;
                let messages = self.arguments.messages;
                for count in [messages / 4, messages] {
                    let before = interrupts();
                    marker::begin();
                    traffic::write_by_events(&mut self.session, count, size, remote)?;
                    marker::end();
                    let (all, busiest) = between(&before, &interrupts());
                    more = format!(",\"interrupts\":{all},\"interrupts_busiest\":{busiest}");
                }
                timed
            }
            (None, _) if name == "write_span" => {
                let length = self.arguments.span << 20;
                if u64::from(size) > length {
                    return Err("a message is longer than the span".into());
                }
                self.control.say(&format!("span {length}"))?;
                self.session.make_span(length as usize)?;
                let remote = buffer(&self.control.expect("span")?)?;
                // Each place is used in the first run, which is not looked at. No run is so short that one
                // pause of a busy machine makes it long enough.
                let start = (length / u64::from(size)).max(256);
                self.growing(start, |client, count| {
                    let session = &mut client.session;
                    Ok(traffic::write_span(session, count, size, (length, remote))?.as_secs_f64())
                })?
            }
            (None, _) if name == "fair_write" => {
                let (each, remote) = (self.arguments.messages, self.remote);
                let session = &mut self.session;
                let (counts, time) = traffic::write_side_by_side(session, each, size, remote)?;
                more = format!(",\"each\":{counts:?}");
                (counts.iter().sum(), time.as_secs_f64())
            }
            (None, Some(kind)) if name.starts_with("loop_") => {
                let kind = match Kind::parse(kind) {
                    Some(kind) if kind != Kind::Read => kind,
                    _ => return Err("no such test".into()),
                };
                if self.ends.is_none() {
                    let own = self.session.make_clones(2)?;
                    let peers: Vec<u32> = own.into_iter().rev().collect();
                    self.session.connect_clones(&peers)?;
                    let count = self.session.len();
                    self.ends = Some([count - 2, count - 1]);
                }
                let ends = self.ends.ok_or("no connections")?;
                self.growing(start, |client, count| {
                    let pings = Pings {
                        kind,
                        size,
                        count,
                        wait: Wait::Spin,
                    };
                    let session = &mut client.session;
                    session.clear_incoming(size as usize);
                    Ok(by_their_median(
                        &traffic::ping_alone(session, &pings, ends)?,
                        count,
                    ))
                })?
            }
            (None, _) if name == "load" => {
                let under_way = self.under_load(size)?;
                let remote = self.remote;
                let (mut times, mut all) = (Vec::new(), 0);
                // Long enough for moderation that adapts to have done so in the first run.
                let timed = self.growing(LOAD_START.max(32 * under_way), |client, count| {
                    times = Vec::with_capacity(count as usize);
                    let before = interrupts();
                    let load = (count, under_way);
                    let session = &mut client.session;
                    let time = traffic::write_under_load(session, load, 64, remote, &mut times)?;
                    all = between(&before, &interrupts()).0;
                    Ok(time.as_secs_f64())
                })?;
                let (middle, late) = traffic::middle_and_late(&mut times).ok_or("no times")?;
                more = format!(
                    ",\"interrupts\":{all},\"median_us\":{:.3},\"late_us\":{:.3}",
                    middle.as_secs_f64() * 1e6,
                    late.as_secs_f64() * 1e6
                );
                timed
            }
            (Some(kind), Some("lat")) => {
                self.growing(start, |client, count| client.ping(kind, size, count))?
            }
            (Some(kind), Some("count")) => {
                let stream = self.counted_stream(kind, size);
                // Pages and translations are made by the first, which is not looked at.
                self.stream(
                    &Stream {
                        count: 256,
                        ..stream
                    },
                    false,
                )?;
                let sent = self.stream(&stream, true)?;
                more = format!(
                    ",\"interrupts\":{},\"interrupts_there\":{}",
                    sent.interrupts, sent.interrupts_there
                );
                (stream.count, sent.seconds)
            }
            (None, _) if name == "reg" => self.growing(start, |client, count| {
                Ok(client
                    .session
                    .registrations(size as usize, count)?
                    .as_secs_f64())
            })?,
            (None, _) if name == "reg_count" => {
                let count = self.arguments.messages;
                // The first make what the others find.
                self.session.registrations(size as usize, 16)?;
                let before = interrupts();
                marker::begin();
                let time = self.session.registrations(size as usize, count)?;
                marker::end();
                let (all, _) = between(&before, &interrupts());
                more = format!(",\"interrupts\":{all}");
                (count, time.as_secs_f64())
            }
            (None, _) if name == "connect_count" => {
                let count = self.arguments.messages;
                let before = interrupts();
                let seconds = self.connections(count, true)?;
                let (all, _) = between(&before, &interrupts());
                more = format!(",\"interrupts\":{all}");
                (count, seconds)
            }
            (Some(_), _) => return Err("no such test".into()),
            (None, _) if name == "scale_regions" => {
                let count = size as usize;
                self.control.say(&format!("regions {count}"))?;
                self.session.drop_regions();
                let before = settled();
                let making = Instant::now();
                self.session.make_regions(count)?;
                let made = making.elapsed().as_secs_f64();
                let taken = before.saturating_sub(available());
                more = format!(",\"bytes\":{taken},\"made_seconds\":{made:.6}");
                let keys = self.control.hear_numbers("keys")?;
                let to = (self.remote.0, &keys[..]);
                let timed = self.growing(start, |client, count| {
                    let session = &mut client.session;
                    Ok(traffic::write_between(session, count, 64, to, Wait::Spin)?.as_secs_f64())
                })?;
                let messages = self.arguments.messages;
                for count in [messages / 4, messages] {
                    marker::begin();
                    traffic::write_between(&mut self.session, count, 64, to, Wait::Nap(20))?;
                    marker::end();
                }
                timed
            }
            (None, Some(object)) if name.starts_with("memory_") => {
                let before = settled();
                let start = Instant::now();
                match object {
                    "qp" => drop(self.session.make_clones(size as usize)?),
                    "cq" => self.session.make_cqs(size as usize)?,
                    "mr" => drop(self.session.make_regions(size as usize)?),
                    _ => return Err("no such object".into()),
                }
                let seconds = start.elapsed().as_secs_f64();
                let taken = before.saturating_sub(available());
                more = format!(",\"bytes\":{taken}");
                // Long enough to be noticed from outside.
                marker::begin();
                std::thread::sleep(Duration::from_millis(100));
                marker::end();
                (u64::from(size), seconds)
            }
            (None, _) if name == "connect" => {
                self.growing(start, |client, count| client.connections(count, false))?
            }
            _ => return Err("no such test".into()),
        };
        println!(
            "{{\"test\":\"{name}\",\"size\":{size},\"qps\":{},\"count\":{count},\"seconds\":{seconds:.9}{more}}}",
            self.session.len()
        );
        Ok(())
    }

    /// Messages to keep under way: as many as there is room for on all connections.
    fn under_load(&self, wanted: u32) -> Outcome<u64> {
        let room = u64::from(self.session.send_depth()) * self.session.len() as u64;
        match u64::from(wanted) {
            some if (1..=room).contains(&some) => Ok(some),
            _ => Err(format!("1 to {room} can be under way")),
        }
    }

    /// A stream of messages with as many under way as is useful, until it takes long enough.
    fn bandwidth(&mut self, start: u64, kind: Kind, size: u32) -> Outcome<(u64, f64)> {
        self.growing(start, |client, count| {
            let depth = (16 << 20) / u64::from(size).max(1);
            let most = 128 / (client.session.len() as u64 / 4).max(1);
            let depth = depth.clamp(4, most.max(4));
            let stream = Stream {
                kind,
                size,
                count,
                depth,
                width: u64::MAX,
                signal: (depth / 2).min(16),
                wait: client.arguments.wait,
                batches: false,
            };
            Ok(client.stream(&stream, false)?.seconds)
        })
    }

    /// Batches of messages, each with a completion, during which both ends sleep. A batch is the
    /// same however many connections it is spread over, so that its sleep is.
    fn counted_stream(&self, kind: Kind, size: u32) -> Stream {
        const BATCH: u64 = 256;
        Stream {
            kind,
            size,
            count: self.arguments.messages,
            depth: BATCH.min(u64::from(self.session.send_depth()) / 2),
            width: BATCH,
            signal: 1,
            wait: Wait::Nap(20),
            batches: true,
        }
    }

    /// Repeats a measurement with more and more messages, until it takes long enough.
    fn growing(
        &mut self,
        start: u64,
        mut measure: impl FnMut(&mut Self, u64) -> Outcome<f64>,
    ) -> Outcome<(u64, f64)> {
        let target = self.arguments.ms as f64 / 1000.0;
        let mut count = start;
        let mut first = true;
        loop {
            let seconds = measure(self, count)?;
            // The first run also waits for code to be translated, pages to be mapped and caches
            // to be filled.
            if std::mem::take(&mut first) {
                continue;
            }
            if seconds >= 0.6 * target {
                return Ok((count, seconds));
            }
            let factor = (1.1 * target / seconds.max(1e-6)).clamp(2.0, 16.0);
            count = (count as f64 * factor) as u64;
        }
    }

    /// Messages that are not measured, so that the first measurement is like the others.
    fn warm_up(&mut self) -> Outcome {
        for kind in [Kind::Send, Kind::Write, Kind::Read] {
            self.ping(kind, 64, 32)?;
        }
        Ok(())
    }

    fn stream(&mut self, stream: &Stream, counting: bool) -> Outcome<Sent> {
        // Nothing comes to an end that is written to or read from, so it need not look.
        let passive = stream.kind != Kind::Send && matches!(stream.wait, Wait::Spin | Wait::Yield);
        let wait = if passive { Wait::Event } else { stream.wait };
        self.control
            .say(&format!("stream {wait} {}", u8::from(counting)))?;
        self.control.expect("ready")?;
        let before = interrupts();
        if counting {
            marker::begin();
        }
        let time = traffic::send_stream(&mut self.session, stream, self.remote)?;
        if counting {
            marker::end();
        }
        let (interrupts, _) = between(&before, &interrupts());
        let words = self.control.expect("received")?;
        Ok(Sent {
            seconds: time.as_secs_f64(),
            interrupts,
            interrupts_there: number(words.get(2).map_or("", String::as_str))?,
        })
    }

    /// Seconds for `count` round trips, by the median of their parts.
    fn ping(&mut self, kind: Kind, size: u32, count: u64) -> Outcome<f64> {
        let pings = Pings {
            kind,
            size,
            count,
            wait: self.arguments.wait,
        };
        self.session.clear_incoming(size as usize);
        self.control
            .say(&format!("ping {kind} {size} {count} {}", pings.wait))?;
        self.control.expect("ready")?;
        let parts = traffic::ping(&mut self.session, &pings, self.remote, true)?;
        self.control.expect("done")?;
        Ok(by_their_median(&parts, count))
    }

    /// Connects and disconnects; the queue pair is new each time, everything else is not. The
    /// first makes that, and is not looked at. The others are between the markers if they are `counted`.
    fn connections(&mut self, count: u64, counted: bool) -> Outcome<f64> {
        self.session = Session::empty(connect_shape());
        self.ends = None;
        self.control.say(&format!("connect {count}"))?;
        self.control.expect("accepting")?;
        let mut start = Instant::now();
        for number in 0..=count {
            self.session
                .connect_one(self.ip, rdma_port(&self.arguments))?;
            self.control.say("next")?;
            self.session.close();
            if number == 0 {
                start = Instant::now();
                if counted {
                    marker::begin();
                }
            }
        }
        let time = start.elapsed().as_secs_f64();
        if counted {
            marker::end();
        }
        Ok(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_that_was_held_up_does_not_count() {
        let part = |ms| (10, Duration::from_millis(ms));
        let time = by_their_median(&[part(20), part(900), part(10)], 60);
        assert!((time - 0.12).abs() < 1e-9, "{time}");
        assert_eq!(by_their_median(&[], 60), 0.0);
    }

    #[test]
    fn moderation_is_a_number_of_completions_and_a_time() {
        assert_eq!(moderation("16:64"), Ok((16, 64)));
        for wrong in ["", "16", "16:", ":64", "70000:1", "1:2:3"] {
            assert!(moderation(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn interrupts_belong_to_the_processor_that_served_them() {
        let table = |first: u64, second: u64| {
            format!(
                "           CPU0       CPU1\n  4:   7   9  IO-APIC  4-edge  ttyS0\n \
                 24:   {first}   5  PCI-MSIX-0000:00:02.0  0-edge  ferrite-control@pci:0000:00:02.0\n \
                 25:   1   {second}  PCI-MSIX-0000:00:02.0  1-edge  ferrite-comp0@pci:0000:00:02.0\n\
                 LOC:  99   99  Local timer interrupts\n"
            )
        };
        let (before, after) = (served(&table(3, 10)), served(&table(4, 17)));
        assert_eq!(before, [4, 15]);
        assert_eq!(between(&before, &after), (8, 7));
        assert_eq!(between(&[], &[]), (0, 0));
    }
}
