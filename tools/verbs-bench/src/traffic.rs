// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The messages of a measurement, from both ends.
//!
//! A stream of messages ends with a message of one byte, which the other end answers with one of
//! one byte. Both are behind everything else, so that the time of a stream includes the arrival
//! of its last message, also on devices whose completions only say that a message has left.
//!
//! Some devices have nothing that holds a sender back while no receive is posted. So the receiver
//! says now and then, with a message of two bytes, that it has posted new ones.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::endpoint::{Done, Outcome, Session, Wait, Work, PATIENCE};
use crate::sys::*;

/// Receives of a connection.
pub const RECV_DEPTH: u32 = 512;

/// Messages that a sender may be ahead of what the receiver has said.
fn window(session: &Session) -> u64 {
    session.recv_depth() * 3 / 4
}

/// Messages that one word of the receiver stands for.
fn grant(session: &Session) -> u64 {
    session.recv_depth() / 8
}

/// Kinds of `wr_id`, in its upper half.
const CONTROL: u64 = 1 << 63;

/// What a message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Send and receive.
    Send,
    /// RDMA write.
    Write,
    /// RDMA read.
    Read,
}

impl Kind {
    /// From its name.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "send" => Self::Send,
            "write" => Self::Write,
            "read" => Self::Read,
            _ => return None,
        })
    }

    fn opcode(self) -> u32 {
        match self {
            Self::Send => IBV_WR_SEND,
            Self::Write => IBV_WR_RDMA_WRITE,
            Self::Read => IBV_WR_RDMA_READ,
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
        })
    }
}

/// A stream.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// What its messages do.
    pub kind: Kind,
    /// Bytes of each.
    pub size: u32,
    /// How many, over all connections.
    pub count: u64,
    /// Messages under way on a connection.
    pub depth: u64,
    /// Messages under way on all of them together.
    pub width: u64,
    /// One of so many wants a completion.
    pub signal: u64,
    /// How both ends wait.
    pub wait: Wait,
    /// New messages only when all are done, rather than whenever there is room.
    pub batches: bool,
}

#[derive(Clone, Copy, Default)]
struct Lane {
    in_flight: u64,
    unsignalled: u64,
    ahead: u64,
    /// In [`Lanes::ready`].
    ready: bool,
}

/// The connections of a stream, and which of them has its turn.
///
/// Nothing here looks at all of them: what a message costs in this program is to be the same
/// however many connections there are, or it could not be seen whether it is in the driver.
struct Lanes {
    lanes: Vec<Lane>,
    /// Those that have room for a message, in turn.
    ready: VecDeque<u32>,
    /// Messages under way on all of them.
    in_flight: u64,
    depth: u64,
    /// Messages that a lane may be ahead of what the receiver has said.
    window: u64,
}

impl Lanes {
    fn new(count: usize, depth: u64, window: u64) -> Self {
        Self {
            lanes: vec![
                Lane {
                    ready: true,
                    ..Lane::default()
                };
                count
            ],
            ready: (0..count as u32).collect(),
            in_flight: 0,
            depth,
            window,
        }
    }

    /// The next lane with room; it comes back by [`Lanes::posted`].
    fn next(&mut self) -> Option<usize> {
        let index = self.ready.pop_front()? as usize;
        self.lanes[index].ready = false;
        Some(index)
    }

    /// A message went out on a lane; `covers` messages will be done by its completion, if it has
    /// one.
    fn posted(&mut self, index: usize, signalled: bool, covers: u64) {
        let lane = &mut self.lanes[index];
        lane.unsignalled = if signalled { 0 } else { covers };
        lane.in_flight += 1;
        lane.ahead += 1;
        self.in_flight += 1;
        self.look(index);
    }

    /// Messages of a lane are done.
    fn done(&mut self, index: usize, messages: u64) {
        self.lanes[index].in_flight -= messages;
        self.in_flight -= messages;
        self.look(index);
    }

    /// All that was before a lane's last message is done.
    fn ended(&mut self, index: usize) {
        self.done(index, self.lanes[index].in_flight);
    }

    /// The receiver of a lane has room for more.
    fn granted(&mut self, index: usize, messages: u64) {
        let lane = &mut self.lanes[index];
        lane.ahead = lane.ahead.saturating_sub(messages);
        self.look(index);
    }

    fn look(&mut self, index: usize) {
        let lane = &mut self.lanes[index];
        if !lane.ready && lane.in_flight < self.depth && lane.ahead < self.window {
            lane.ready = true;
            self.ready.push_back(index as u32);
        }
    }
}

fn control(session: &mut Session, index: usize, size: u32) -> Outcome {
    session.post(
        index,
        &Work {
            opcode: IBV_WR_SEND,
            size,
            signalled: true,
            wr_id: CONTROL | index as u64,
            remote: (0, 0),
        },
    )
}

/// Sends a stream; gives the time from the first post to the other end's last word.
pub fn send_stream(
    session: &mut Session,
    stream: &Stream,
    remote: (u64, u32),
) -> Outcome<Duration> {
    let connections = session.len();
    let grant = grant(session);
    let window = match stream.kind {
        Kind::Send => window(session),
        // Nothing at the other end is used up.
        _ => u64::MAX,
    };
    let mut lanes = Lanes::new(connections, stream.depth, window);
    let (mut posted, mut answered, mut controls) = (0, 0, 0_usize);
    let mut ended = false;
    let start = Instant::now();
    let mut idle_polls = 0_u32;
    while answered < connections || controls > 0 {
        let room = !stream.batches || lanes.in_flight == 0;
        while room && posted < stream.count && lanes.in_flight < stream.width {
            let Some(index) = lanes.next() else { break };
            let covers = lanes.lanes[index].unsignalled + 1;
            let signalled = covers >= stream.signal;
            session.post(
                index,
                &Work {
                    opcode: stream.kind.opcode(),
                    size: stream.size,
                    signalled,
                    wr_id: (covers << 32) | index as u64,
                    remote,
                },
            )?;
            lanes.posted(index, signalled, covers);
            posted += 1;
        }
        if posted == stream.count && !ended {
            for index in 0..connections {
                control(session, index, 1)?;
            }
            controls += connections;
            ended = true;
        }
        let mut each = |session: &mut Session, done: Done| {
            let index = (done.wr_id & 0xffff_ffff) as usize;
            if done.receive {
                session.post_recv(index)?;
                if done.length == 1 {
                    answered += 1;
                } else {
                    lanes.granted(index, grant);
                }
            } else if done.wr_id & CONTROL != 0 {
                controls -= 1;
                lanes.ended(index);
            } else {
                lanes.done(index, done.wr_id >> 32);
            }
            Ok(())
        };
        if session.poll(&mut each)? > 0 {
            idle_polls = 0;
        } else {
            session.pause(stream.wait, &mut each)?;
            too_long(&mut idle_polls, start, stream.count)?;
        }
    }
    Ok(start.elapsed())
}

/// Writes between regions in turn, each with its own keys. Where they are not waited for by
/// polling they go in batches.
pub fn write_between(
    session: &mut Session,
    count: u64,
    size: u32,
    (address, keys): (u64, &[u32]),
    wait: Wait,
) -> Outcome<Duration> {
    const SIGNAL: u64 = 16;
    let (depth, batches) = match wait {
        Wait::Spin => (64, false),
        _ => (256, true),
    };
    let start = Instant::now();
    let (mut posted, mut completed) = (0, 0);
    let mut idle_polls = 0;
    let count = count.next_multiple_of(SIGNAL);
    // So that neighbours in time are none in the table.
    let stride = 7919;
    while completed < count {
        let room = !batches || posted == completed;
        while room && posted < count && posted - completed < depth {
            let number = (posted * stride % keys.len() as u64) as usize;
            session.post_between(
                number,
                &Work {
                    opcode: IBV_WR_RDMA_WRITE,
                    size,
                    signalled: (posted + 1) % SIGNAL == 0,
                    wr_id: 0,
                    remote: (address, keys[number]),
                },
            )?;
            posted += 1;
        }
        let mut each = |_: &mut Session, _| {
            completed += SIGNAL;
            Ok(())
        };
        if session.poll(&mut each)? == 0 {
            session.pause(wait, &mut each)?;
            too_long(&mut idle_polls, start, count)?;
        }
    }
    Ok(start.elapsed())
}

/// Writes from all over the memory of [`Session::make_span`], which has so many bytes, to the same places of
/// the other end's, one after the other and round again; it ends when all are complete, and so arrived.
pub fn write_span(
    session: &mut Session,
    count: u64,
    size: u32,
    (length, remote): (u64, (u64, u32)),
) -> Outcome<Duration> {
    const SIGNAL: u64 = 4;
    const DEPTH: u64 = 16;
    let places = (length / u64::from(size)).max(1);
    let count = count.next_multiple_of(SIGNAL);
    let start = Instant::now();
    let (mut posted, mut completed) = (0, 0);
    let mut idle_polls = 0;
    while completed < count {
        while posted < count && posted - completed < DEPTH {
            let work = Work {
                opcode: IBV_WR_RDMA_WRITE,
                size,
                signalled: (posted + 1) % SIGNAL == 0,
                wr_id: 0,
                remote,
            };
            session.post_span(posted % places * u64::from(size), &work)?;
            posted += 1;
        }
        let mut each = |_: &mut Session, _| {
            completed += SIGNAL;
            Ok(())
        };
        if session.poll(&mut each)? == 0 {
            session.pause(Wait::Spin, &mut each)?;
            too_long(&mut idle_polls, start, count)?;
        } else {
            idle_polls = 0;
        }
    }
    Ok(start.elapsed())
}

/// What is complete of each connection within the time that counts: not the first messages, in which the
/// connections get going, and no more than are wanted.
struct Shares {
    counts: Vec<u64>,
    /// Messages that do not count any more.
    skip: u64,
    /// Messages that are still to count.
    left: u64,
}

/// What a message was to [`Shares`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// One among others.
    Usual,
    /// The last that does not count.
    Begins,
    /// The last that does, or one behind it.
    Over,
}

impl Shares {
    fn new(connections: usize, skip: u64, wanted: u64) -> Self {
        Self {
            counts: vec![0; connections],
            skip,
            left: wanted,
        }
    }

    fn done(&mut self, index: usize) -> Share {
        if self.skip > 0 {
            self.skip -= 1;
            return match self.skip {
                0 => Share::Begins,
                _ => Share::Usual,
            };
        }
        if self.left > 0 {
            self.counts[index] += 1;
            self.left -= 1;
        }
        match self.left {
            0 => Share::Over,
            _ => Share::Usual,
        }
    }
}

/// Writes on all connections side by side: each has as many under way as fit all the time, and posts the next as
/// one is complete, so that what it gets through is what the device gives it. Gives how many of each were complete
/// when `each` were on average, and the time that this took.
pub fn write_side_by_side(
    session: &mut Session,
    each: u64,
    size: u32,
    remote: (u64, u32),
) -> Outcome<(Vec<u64>, Duration)> {
    const DEPTH: u64 = 4;
    let connections = session.len();
    let all = connections as u64;
    let mut shares = Shares::new(connections, 2 * DEPTH * all, each * all);
    let work = |index: usize| Work {
        opcode: IBV_WR_RDMA_WRITE,
        size,
        signalled: true,
        wr_id: index as u64,
        remote,
    };
    for _ in 0..DEPTH {
        for index in 0..connections {
            session.post(index, &work(index))?;
        }
    }
    let mut under_way = DEPTH * all;
    let mut start = Instant::now();
    let mut time = None;
    let mut idle_polls = 0;
    while under_way > 0 {
        let mut take = |session: &mut Session, done: Done| {
            let index = (done.wr_id & 0xffff_ffff) as usize;
            match shares.done(index) {
                Share::Over => {
                    time.get_or_insert_with(|| start.elapsed());
                    under_way -= 1;
                    return Ok(());
                }
                Share::Begins => start = Instant::now(),
                Share::Usual => {}
            }
            session.post(index, &work(index))
        };
        if session.poll(&mut take)? == 0 {
            session.pause(Wait::Spin, &mut take)?;
            too_long(&mut idle_polls, start, each * all)?;
        } else {
            idle_polls = 0;
        }
    }
    Ok((shares.counts, time.ok_or("nothing was sent")?))
}

/// Writes whose completions come by events, each handler's in a thread of its own, on the processor
/// that has the handler's number.
pub fn write_by_events(
    session: &mut Session,
    count: u64,
    size: u32,
    remote: (u64, u32),
) -> Outcome<Duration> {
    let handlers = session.handled();
    let each = count / handlers.len().max(1) as u64;
    let work = Work {
        opcode: IBV_WR_RDMA_WRITE,
        size,
        signalled: true,
        wr_id: 0,
        remote,
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, mut handler) in handlers.into_iter().enumerate() {
            threads.push(scope.spawn(move || {
                run_on(number)?;
                handler.one_by_one(each, &work)
            }));
        }
        threads.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err("a thread is gone".into()))
        })
    })?;
    Ok(start.elapsed())
}

/// Writes of which `under_way` are always under way, each with a completion; whoever waits sleeps
/// until there is an event. Gives the time of all, and appends that of each, from its post until its
/// completion was taken.
pub fn write_under_load(
    session: &mut Session,
    (count, under_way): (u64, u64),
    size: u32,
    remote: (u64, u32),
    times: &mut Vec<Duration>,
) -> Outcome<Duration> {
    let connections = session.len() as u64;
    let start = Instant::now();
    let mut posts = vec![start; under_way as usize];
    let mut free: Vec<u64> = (0..under_way).collect();
    let (mut posted, mut completed) = (0, 0);
    let mut idle_polls = 0;
    while completed < count {
        while posted < count {
            let Some(slot) = free.pop() else { break };
            posts[slot as usize] = Instant::now();
            session.post(
                // A slot is always of the same connection, so that none has more than its share.
                (slot % connections) as usize,
                &Work {
                    opcode: IBV_WR_RDMA_WRITE,
                    size,
                    signalled: true,
                    wr_id: slot,
                    remote,
                },
            )?;
            posted += 1;
        }
        let mut each = |_: &mut Session, done: Done| {
            times.push(posts[done.wr_id as usize].elapsed());
            free.push(done.wr_id);
            completed += 1;
            Ok(())
        };
        if session.poll(&mut each)? == 0 {
            session.pause(Wait::Event, &mut each)?;
            too_long(&mut idle_polls, start, count)?;
        }
    }
    Ok(start.elapsed())
}

/// The time that half of them do not exceed, and that 99 of 100 do not.
pub fn middle_and_late(times: &mut [Duration]) -> Option<(Duration, Duration)> {
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len().saturating_sub(1) * percent / 100);
    Some((*at(50)?, *at(99)?))
}

/// Keeps the calling thread on one processor.
pub fn run_on(processor: usize) -> Outcome {
    // SAFETY: an empty set of processors is all zeros; the number is checked against its size.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if processor >= libc::CPU_SETSIZE as usize {
            return Err(format!("no processor {processor}"));
        }
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    match result {
        0 => Ok(()),
        _ => Err(format!(
            "processor {processor}: {}",
            std::io::Error::last_os_error()
        )),
    }
}

/// Fails when nothing has come for long. The clock is looked at now and then only: in a guest
/// that takes a while.
fn too_long(idle_polls: &mut u32, start: Instant, count: u64) -> Outcome {
    *idle_polls += 1;
    if *idle_polls % (1 << 20) == 0 && start.elapsed() > 2 * PATIENCE {
        return Err(format!("a run of {count} messages does not end"));
    }
    Ok(())
}

/// The other end of a stream.
pub fn receive_stream(session: &mut Session, wait: Wait) -> Outcome<u64> {
    let lanes = session.len();
    let grant = grant(session);
    let mut since = vec![0; lanes];
    let (mut ends, mut controls, mut received) = (0, 0_u64, 0);
    let start = Instant::now();
    let mut idle_polls = 0;
    while ends < lanes || controls > 0 {
        let mut each = |session: &mut Session, done: Done| {
            let index = (done.wr_id & 0xffff_ffff) as usize;
            if !done.receive {
                controls -= 1;
                return Ok(());
            }
            session.post_recv(index)?;
            if done.length == 1 {
                ends += 1;
                controls += 1;
                return control(session, index, 1);
            }
            received += 1;
            since[index] += 1;
            if since[index] == grant {
                since[index] = 0;
                controls += 1;
                control(session, index, 2)?;
            }
            Ok(())
        };
        if session.poll(&mut each)? > 0 {
            idle_polls = 0;
        } else {
            session.pause(wait, &mut each)?;
            too_long(&mut idle_polls, start, received)?;
        }
    }
    Ok(received)
}

/// Round trips of sends or writes, or reads, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Pings {
    /// What a message does.
    pub kind: Kind,
    /// Bytes of each.
    pub size: u32,
    /// How many.
    pub count: u64,
    /// How both ends wait.
    pub wait: Wait,
}

/// One send of so many wants a completion; some of these must fit into the smallest send queue.
const SIGNAL_PINGS: u64 = 4;
/// So many completions may be outstanding before they are waited for.
const OUTSTANDING_PINGS: u64 = 2;

/// What has come over one connection.
#[derive(Default)]
struct Seen {
    received: u64,
    completed: u64,
}

impl Seen {
    /// Takes what is there, or waits a little.
    #[inline]
    fn step(&mut self, session: &mut Session, wait: Wait) -> Outcome {
        let mut each = |session: &mut Session, done: Done| {
            if done.receive {
                self.received += 1;
                session.post_recv((done.wr_id & 0xffff_ffff) as usize)
            } else {
                self.completed += 1;
                Ok(())
            }
        };
        if session.poll(&mut each)? == 0 {
            session.pause(wait, &mut each)?;
        }
        Ok(())
    }
}

/// One end of round trips: `first` starts, and it alone does anything for reads. Gives the number
/// and the time of each of about eight parts.
pub fn ping(
    session: &mut Session,
    pings: &Pings,
    remote: (u64, u32),
    first: bool,
) -> Outcome<Vec<(u64, Duration)>> {
    if pings.kind == Kind::Read && !first {
        return Ok(Vec::new());
    }
    let size = pings.size as usize;
    // A write raises no event where it arrives.
    let looking = match pings.wait {
        Wait::Event => Wait::Yield,
        wait => wait,
    };
    let mut seen = Seen::default();
    let mut signalled = 0;
    let mut parts = Vec::new();
    let part = (pings.count / 8).max(1);
    let mut part_start = Instant::now();
    for number in 0..pings.count {
        let mark = (number % 250 + 1) as u8;
        for sending in [first, !first] {
            let mut idle_polls = 0;
            if sending {
                let signal = pings.kind == Kind::Read || number % SIGNAL_PINGS == 0;
                if pings.kind == Kind::Write {
                    session.set_outgoing(size, mark);
                }
                session.post(
                    0,
                    &Work {
                        opcode: pings.kind.opcode(),
                        size: pings.size,
                        signalled: signal,
                        wr_id: 0,
                        remote,
                    },
                )?;
                signalled += u64::from(signal);
                let outstanding = match pings.kind {
                    Kind::Read => 0,
                    _ => OUTSTANDING_PINGS,
                };
                while signalled - seen.completed > outstanding {
                    seen.step(session, pings.wait)?;
                    too_long(&mut idle_polls, part_start, pings.count)?;
                }
                continue;
            }
            loop {
                match pings.kind {
                    Kind::Send if seen.received <= number => seen.step(session, pings.wait)?,
                    Kind::Write if session.incoming(size) != mark => {
                        session.pause(looking, &mut |_, _| Ok(()))?;
                    }
                    _ => break,
                }
                too_long(&mut idle_polls, part_start, pings.count)?;
            }
        }
        if (number + 1) % part == 0 {
            parts.push((part, part_start.elapsed()));
            part_start = Instant::now();
        }
    }
    // Nothing may be left for the next measurement.
    while seen.completed < signalled {
        seen.step(session, Wait::Yield)?;
    }
    Ok(parts)
}

/// Round trips between two connections of one session, which are connected to each other: one thread posts on one,
/// sees the message arrive, posts on the other, and sees that arrive. So a single processor does for both ends, and
/// nothing is switched. Gives the number and the time of each of about eight parts.
pub fn ping_alone(
    session: &mut Session,
    pings: &Pings,
    ends: [usize; 2],
) -> Outcome<Vec<(u64, Duration)>> {
    let size = pings.size as usize;
    let remote = session.buffer();
    let mut seen = Seen::default();
    let (mut hops, mut signalled) = (0, 0);
    let mut parts = Vec::new();
    let part = (pings.count / 8).max(1);
    let mut part_start = Instant::now();
    for number in 0..pings.count {
        for end in ends {
            let mut idle_polls = 0;
            let mark = (hops % 250 + 1) as u8;
            let signal = number % SIGNAL_PINGS == 0;
            if pings.kind == Kind::Write {
                session.set_outgoing(size, mark);
            }
            session.post(
                end,
                &Work {
                    opcode: pings.kind.opcode(),
                    size: pings.size,
                    signalled: signal,
                    wr_id: 0,
                    remote,
                },
            )?;
            hops += 1;
            signalled += u64::from(signal);
            loop {
                match pings.kind {
                    Kind::Write if session.incoming(size) != mark => std::hint::spin_loop(),
                    Kind::Send if seen.received < hops => seen.step(session, Wait::Spin)?,
                    _ => break,
                }
                too_long(&mut idle_polls, part_start, pings.count)?;
            }
            // Both ends have their own queue, so there may be twice as many.
            while signalled - seen.completed > 2 * OUTSTANDING_PINGS {
                seen.step(session, Wait::Spin)?;
                too_long(&mut idle_polls, part_start, pings.count)?;
            }
        }
        if (number + 1) % part == 0 {
            parts.push((part, part_start.elapsed()));
            part_start = Instant::now();
        }
    }
    while seen.completed < signalled {
        seen.step(session, Wait::Spin)?;
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Posts until no lane has room; gives the lanes in order.
    fn fill(lanes: &mut Lanes) -> Vec<usize> {
        let mut order = Vec::new();
        while let Some(index) = lanes.next() {
            lanes.posted(index, true, 1);
            order.push(index);
        }
        order
    }

    #[test]
    fn lanes_have_their_turn_until_each_is_full() {
        let mut lanes = Lanes::new(3, 2, u64::MAX);
        assert_eq!(fill(&mut lanes), [0, 1, 2, 0, 1, 2]);
        assert_eq!(lanes.in_flight, 6);
        lanes.done(1, 1);
        lanes.done(1, 1);
        assert_eq!(fill(&mut lanes), [1, 1]);
        lanes.ended(2);
        assert_eq!((lanes.in_flight, fill(&mut lanes)), (4, vec![2, 2]));
    }

    #[test]
    fn a_lane_that_is_too_far_ahead_waits_for_its_receiver() {
        let mut lanes = Lanes::new(2, 8, 2);
        assert_eq!(fill(&mut lanes), [0, 1, 0, 1]);
        lanes.done(0, 2);
        assert!(fill(&mut lanes).is_empty());
        lanes.granted(0, 1);
        lanes.granted(0, 5);
        assert_eq!(fill(&mut lanes), [0, 0]);
    }

    #[test]
    fn a_completion_stands_for_all_since_the_last() {
        let mut lanes = Lanes::new(1, 4, u64::MAX);
        for covers in 1..=4 {
            let index = lanes.next().expect("room");
            assert_eq!(lanes.lanes[index].unsignalled + 1, covers);
            lanes.posted(index, covers == 4, covers);
        }
        assert!(lanes.next().is_none());
        lanes.done(0, 4);
        assert_eq!((lanes.in_flight, lanes.next()), (0, Some(0)));
    }

    #[test]
    fn shares_are_of_the_time_in_which_all_are_going() {
        let mut shares = Shares::new(3, 2, 4);
        let said: Vec<Share> = [0, 0, 1, 1, 2, 1, 0].map(|index| shares.done(index)).into();
        let expected = [
            Share::Usual,
            Share::Begins,
            Share::Usual,
            Share::Usual,
            Share::Usual,
            Share::Over,
            Share::Over,
        ];
        assert_eq!(said, expected);
        // Neither the first two nor the last count.
        assert_eq!(shares.counts, [0, 3, 1]);
    }

    #[test]
    fn half_of_the_times_and_nearly_all_of_them() {
        let mut times: Vec<Duration> = (0..=200).rev().map(Duration::from_micros).collect();
        let expected = (Duration::from_micros(100), Duration::from_micros(198));
        assert_eq!(middle_and_late(&mut times), Some(expected));
        assert_eq!(middle_and_late(&mut []), None);
        let one = Duration::from_micros(7);
        assert_eq!(middle_and_late(&mut [one]), Some((one, one)));
    }
}
