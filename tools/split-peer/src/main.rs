// SPDX-License-Identifier: GPL-2.0
//! A peer of the split driver that does what it should not: a host that connects to an I/O unit, or an I/O unit that a host
//! connects to. For each thing that is wrong it makes a connection anew, does it, and sees whether the other ends it.

mod attacks;
mod channel;
mod sys;

use std::net::Ipv4Addr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ferrite_split::*;

use crate::attacks::{Attack, WrongAnswer, ANSWERS, ATTACKS, JOINS};
use crate::channel::{header, Channel, Done, Forgery, Guest, Listener, LENT};

const HELP: &str = "\
A peer of the split driver that does what it should not.

split-peer host ADDRESS [COUNTER ...]  as a host, to the I/O unit there
split-peer unit [COUNTER ...]          as an I/O unit, to the host that connects
split-peer silent ADDRESS              as a host that says nothing any more, until the I/O unit has enough of it
split-peer crowd ADDRESS               as more hosts than may come from one address, again and again, until it is ended;
                                       it says `full COUNT` when the I/O unit has refused one with so many there

split-peer forge ADDRESS OWN HOW       as any process, by GID (AF_IB), with what the kernel writes for others written by itself:
                                       that it comes from OWN and a port of the system's. HOW is gid, link or path

SPLIT_KEY is what the I/O unit wants its hosts to know; without it this is somebody who does not.

For each attack a line: `ok COUNTER NAME (TIME)`, where COUNTER is what the other side counts it as, or `not ok ...`.
Where counters are named, only what is counted as one of them is done.
";

/// The session of this side.
const SESSION: u32 = 0x0bad_0001;
/// What a peer says that lacks elements of 600 bytes.
const WISH: [u32; 3] = [1, 600, 0];
/// How long the other may take.
const TIME: Duration = Duration::from_secs(20);

/// One end of a pair of channels.
pub struct Peer {
    control: Channel,
    data: Channel,
    /// The other's session.
    theirs: u32,
    sequence: u32,
    data_sequence: u32,
    /// The other's pools.
    pools: Vec<PoolEntry>,
    /// What was said that nobody has listened for yet.
    heard: Vec<Header>,
}

fn bytes<T: Layout>(layout: &T) -> Vec<u8> {
    let mut bytes = vec![0; T::SIZE];
    // The room is as large as it is.
    let _ = layout.encode(&mut bytes);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn message(function: u16, session: u32, sequence: u32, body: &[u8]) -> Vec<u8> {
    let context = Context { session, sequence };
    let mut message = bytes(&Header {
        function,
        version: VERSION,
        context: context.number(),
    });
    message.extend(body);
    message
}

/// What this side says of a channel.
fn join(role: Role, channel: ferrite_split::Channel, peer_session: u32) -> Join {
    Join {
        magic: JOIN_MAGIC,
        version: VERSION,
        channel: channel.number(),
        role: role.number(),
        service: Service::Acknowledged.number(),
        variant: Variant::Push.number(),
        reserved: 0,
        session: SESSION,
        peer_session,
        key: key(),
    }
}

/// What the I/O unit wants its hosts to know, or 0 for who does not know.
fn key() -> u64 {
    let text = std::env::var("SPLIT_KEY").unwrap_or_default();
    text.parse().unwrap_or(0)
}

impl Peer {
    /// Connects to an I/O unit.
    fn connect(unit: Ipv4Addr) -> Result<Self, String> {
        let greeting = join(Role::Host, ferrite_split::Channel::Control, 0);
        let control = Channel::connect(unit, DEFAULT_PORT, &bytes(&greeting))?;
        let theirs = Join::decode(&control.said).ok_or("no answer of an I/O unit")?;
        let greeting = join(Role::Host, ferrite_split::Channel::Data, theirs.session);
        let data = Channel::connect(unit, DEFAULT_PORT, &bytes(&greeting))?;
        Self::new(control, data, theirs.session, 0)
    }

    /// Lets a host connect; `is_early` is one who wants more pools before there is a data channel.
    fn accept(listener: &Listener, is_early: bool) -> Result<Self, String> {
        let (guest, theirs) = next_host(listener)?;
        let answer = join(Role::Unit, ferrite_split::Channel::Control, theirs.session);
        let mut control = guest.accept(&bytes(&answer))?;
        let guest = listener.next()?;
        let mut sequence = 0;
        if is_early {
            sequence += 1;
            let function = Function::BufferRecvPoolGet.number();
            control.send(&message(function, SESSION, sequence, &words(&WISH)))?;
        }
        let answer = join(Role::Unit, ferrite_split::Channel::Data, theirs.session);
        let data = guest.accept(&bytes(&answer))?;
        Self::new(control, data, theirs.session, sequence)
    }

    fn new(control: Channel, data: Channel, theirs: u32, sequence: u32) -> Result<Self, String> {
        let mut peer = Self {
            control,
            data,
            theirs,
            sequence,
            data_sequence: 0,
            pools: Vec::new(),
            heard: Vec::new(),
        };
        // Pools of both kinds.
        while peer.pool(PoolKind::Write).is_err() || peer.pool(PoolKind::Send).is_err() {
            peer.listen()?;
        }
        let own = [
            peer.entry(5, PoolKind::Write.number(), 4, 100),
            peer.entry(6, PoolKind::Send.number(), 2, 64),
        ];
        let mut body = words(&[own.len() as u32]);
        own.iter().for_each(|entry| body.extend(bytes(entry)));
        peer.control(Function::BufferRecvPool, &body)?;
        Ok(peer)
    }

    /// Waits for a control message, and takes pools from it.
    fn listen(&mut self) -> Result<(), String> {
        let Some(Done::Received(said)) = self.control.next(TIME)? else {
            return Err("nothing is said".into());
        };
        let header = Header::decode(&said).ok_or("a short message")?;
        if header.function == Function::BufferRecvPool.number() {
            let entries = said[Header::SIZE + EntryCount::SIZE..].chunks(PoolEntry::SIZE);
            self.pools.extend(entries.filter_map(PoolEntry::decode));
        }
        self.heard.push(header);
        Ok(())
    }

    /// Waits for a message of this function, and gives its number.
    fn listen_for(&mut self, function: Function) -> Result<u32, String> {
        let is_it = |header: &Header| header.function == function.number();
        loop {
            if let Some(at) = self.heard.iter().position(is_it) {
                let header = self.heard.swap_remove(at);
                return Ok(Context::from_number(header.context).sequence);
            }
            self.listen()?;
        }
    }

    /// The smallest pool of the other of this kind.
    fn pool(&self, kind: PoolKind) -> Result<PoolEntry, String> {
        let of_kind = self.pools.iter().filter(|pool| pool.kind == kind.number());
        of_kind
            .min_by_key(|pool| pool.element_size)
            .copied()
            .ok_or(format!("no pool of kind {kind:?}"))
    }

    /// A pool of this side, which has as much memory.
    fn entry(&self, index: u32, kind: u16, elements: u32, element_size: u32) -> PoolEntry {
        let (address, key) = match kind == PoolKind::Send.number() {
            true => (0, 0),
            false => self.data.place(LENT),
        };
        PoolEntry {
            pool: index,
            kind,
            reserved: 0,
            elements,
            element_size,
            address,
            key,
            reserved2: 0,
            context: 0,
        }
    }

    /// Announces one pool.
    fn announce(&mut self, entry: &PoolEntry) -> Result<(), String> {
        let body = [words(&[1]), bytes(entry)].concat();
        self.control(Function::BufferRecvPool, &body)
    }

    /// A control message with the right number.
    fn control(&mut self, function: Function, body: &[u8]) -> Result<(), String> {
        self.number(function.number(), body)
    }

    fn number(&mut self, function: u16, body: &[u8]) -> Result<(), String> {
        self.sequence += 1;
        self.raw(&message(function, SESSION, self.sequence, body))
    }

    fn raw(&mut self, message: &[u8]) -> Result<(), String> {
        self.control.send(message).map(drop)
    }

    /// A frame in a message, with the right number.
    fn frame(&mut self, pool: u32, size: u32) -> Result<(), String> {
        self.data_sequence += 1;
        let mut body = words(&[pool, size]);
        body.resize(body.len() + size as usize, 0);
        let message = message(
            Function::SendData.number(),
            SESSION,
            self.data_sequence,
            &body,
        );
        self.data.send(&message).map(drop)
    }

    /// A write of `size` bytes to the beginning of the other's pool, with immediate data.
    fn write(&mut self, size: usize, immediate: Immediate) -> Result<(), String> {
        let pool = self.pool(PoolKind::Write)?;
        let bits = immediate.encode().ok_or("no immediate data")?;
        self.data
            .write(pool.address, pool.key, &vec![0xee; size], Some(bits))
            .map(drop)
    }
}

/// A host that connects, and what it says.
fn next_host(listener: &Listener) -> Result<(Guest, Join), String> {
    loop {
        let guest = listener.next()?;
        let Some(theirs) = Join::decode(&guest.said) else {
            continue;
        };
        // The other channel of one that is gone is refused.
        if theirs.channel == ferrite_split::Channel::Control.number() {
            return Ok((guest, theirs));
        }
    }
}

/// Answers a host as no I/O unit of its does; the host has to end that.
fn answer_wrongly(listener: &Listener, wrong: &WrongAnswer) -> Result<(), String> {
    let (guest, theirs) = next_host(listener)?;
    let mut answer = join(Role::Unit, ferrite_split::Channel::Control, theirs.session);
    (wrong.change)(&mut answer);
    let control = guest.accept(&bytes(&answer))?;
    match control.is_ended(TIME)? {
        true => Ok(()),
        false => Err("the connection is still there".into()),
    }
}

/// Does one attack on a connection of its own; the other has to end that.
fn attack(
    attack: &Attack,
    connect: impl Fn(&Attack) -> Result<Peer, String>,
) -> Result<(), String> {
    let mut peer = connect(attack)?;
    (attack.run)(&mut peer)?;
    match peer.control.is_ended(TIME)? && peer.data.is_ended(TIME)? {
        true => Ok(()),
        false => Err("the connection is still there".into()),
    }
}

/// Takes all places of an I/O unit that it can get, and keeps them taken, until it is ended.
fn crowd(unit: Ipv4Addr) -> Result<bool, String> {
    let mut there = Vec::new();
    let mut is_said = false;
    loop {
        match Peer::connect(unit) {
            Ok(peer) => there.push(peer),
            Err(_) => {
                if !is_said {
                    println!("full {}", there.len());
                    is_said = true;
                }
                // One that was given up has left its place to the next.
                let mut kept = Vec::new();
                for peer in there {
                    if !peer.control.is_ended(Duration::from_millis(1))? {
                        kept.push(peer);
                    }
                }
                there = kept;
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Whether what is counted as `counter` is to be done: all is where none is named.
fn is_wanted(counter: &str, named: &[&str]) -> bool {
    named.is_empty() || named.contains(&counter)
}

fn run_all(role: Role, named: &[&str], connect: impl Fn(&Attack) -> Result<Peer, String>) -> bool {
    let mut is_well = true;
    let of_role = ATTACKS.iter().filter(|one| one.is_by(role));
    for one in of_role.filter(|one| is_wanted(one.counter, named)) {
        is_well &= say(one.counter, one.name, || attack(one, &connect));
    }
    is_well
}

fn say(counter: &str, name: &str, test: impl FnOnce() -> Result<(), String>) -> bool {
    let began = Instant::now();
    let result = test();
    let took = began.elapsed().as_millis();
    match &result {
        Ok(()) => println!("ok {counter} {name} ({took} ms)"),
        Err(why) => println!("not ok {counter} {name} ({took} ms): {why}"),
    }
    result.is_ok()
}

fn dispatch() -> Result<bool, String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let address = |word: &str| {
        word.parse::<Ipv4Addr>()
            .map_err(|_| "no address".to_owned())
    };
    match words[..] {
        ["host", unit, ref named @ ..] => {
            let unit = address(unit)?;
            let mut is_well = run_all(Role::Host, named, |_| Peer::connect(unit));
            for one in JOINS.iter().filter(|one| is_wanted(one.counter, named)) {
                is_well &= say(one.counter, one.name, || (one.run)(unit));
            }
            Ok(is_well)
        }
        ["unit", ref named @ ..] => {
            let listener = Listener::new(DEFAULT_PORT)?;
            let mut is_well = true;
            for one in ANSWERS.iter().filter(|one| is_wanted(one.counter, named)) {
                is_well &= say(one.counter, one.name, || answer_wrongly(&listener, one));
            }
            let accept = |one: &Attack| Peer::accept(&listener, one.is_early);
            Ok(run_all(Role::Unit, named, accept) && is_well)
        }
        ["silent", unit] => {
            let peer = Peer::connect(address(unit)?)?;
            println!("connected");
            let is_ended = peer.control.is_ended(3 * TIME)?;
            println!("{}", if is_ended { "given up" } else { "still there" });
            Ok(is_ended)
        }
        ["crowd", unit] => crowd(address(unit)?),
        ["forge", unit, own, how] => {
            let forgery = match how {
                "gid" => Forgery::Gid,
                "link" => Forgery::Link,
                "path" => Forgery::Path,
                _ => return Err("no such way".into()),
            };
            let unit = address(unit)?;
            let said = [
                header(address(own)?, 850, unit),
                bytes(&join(Role::Host, ferrite_split::Channel::Control, 0)),
            ]
            .concat();
            Channel::forge(unit, DEFAULT_PORT, c"eth0", forgery, &said)?;
            println!("connected");
            Ok(true)
        }
        _ => {
            print!("{HELP}");
            Ok(words == ["--help"])
        }
    }
}

fn main() -> ExitCode {
    match dispatch() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("split-peer: {message}");
            ExitCode::from(2)
        }
    }
}
