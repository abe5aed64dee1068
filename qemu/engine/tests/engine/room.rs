// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Ways that take no more for a while: who waits for which, in what order they go on, and what
//! becomes of those who wait for a neighbour that never reads again.

use crate::wire::{drain, statuses, ALL, PD};
use ferrite_abi::QueuePairStateCode as State;
use ferrite_abi::*;
use ferrite_engine::memory::{Room, Way, ENOUGH_ROOM, FRAME_OVERHEAD};
use ferrite_engine::roce::{Frame, Medium};
use ferrite_engine::testing::{Node, Peer, QpOptions, Region, SendWork};
use std::collections::{HashMap, VecDeque};

/// What a ring between two devices takes.
const RING: usize = 1 << 20;
/// Nanoseconds that a neighbour takes for a frame.
const FRAME_TIME: u64 = 750;
/// Frames that it takes at a time.
const FRAMES: usize = 64;
const MESSAGE: u32 = 1 << 20;
/// The first number of the queue pairs on both sides.
const FIRST: u32 = 0x10;

/// One device and a ring to a neighbour, which reads it slowly.
struct Ring {
    from: Node,
    to: Node,
    source: Region,
    target: Region,
    queue: VecDeque<Vec<u8>>,
}

fn create(node: &mut Node, qpn: u32) {
    node.create_qp(QpOptions {
        qpn,
        pd: PD,
        log_blocks: 3,
        log_entries: 1,
        ..QpOptions::default()
    });
}

fn peer(node: &Node, qpn: u32) -> Peer {
    Peer {
        log_mtu: 12,
        timeout: 14,
        retry_count: 3,
        ..node.as_peer(qpn)
    }
}

/// A frame from a ring.
fn from_memory(node: &mut Node, frame: &[u8]) {
    let (now, host) = (node.now, &mut node.host);
    node.engine.receive_frame(frame, Medium::Memory, now, host);
}

impl Ring {
    fn new(qps: u32) -> Self {
        let (mut from, mut to) = (Node::new(1), Node::new(2));
        for qpn in FIRST..FIRST + qps {
            create(&mut from, qpn);
            create(&mut to, qpn);
            let (forth, back) = (peer(&to, qpn), peer(&from, qpn));
            from.connect(qpn, &forth);
            to.connect(qpn, &back);
        }
        let source = from.register(0x101, PD, ALL, MESSAGE.into());
        let target = to.register(0x201, PD, ALL, MESSAGE.into());
        let mut ring = Self {
            from,
            to,
            source,
            target,
            queue: VecDeque::new(),
        };
        ring.measure();
        ring
    }

    /// Tells the device how much room there is.
    fn measure(&mut self) {
        self.queue.append(&mut self.from.host.sent);
        let used: usize = self
            .queue
            .iter()
            .map(|frame| frame.len() + FRAME_OVERHEAD)
            .sum();
        let room = Room::Bytes(RING - used);
        self.from
            .host
            .ways
            .insert(self.to.mac, (Way::Memory(1), room));
    }

    fn write(&mut self, qpn: u32, length: u32) {
        let work = SendWork::new(SendOpcode::Write, &[self.source.sge(0, length)])
            .remote(self.target.address, self.target.tag)
            .flags(SEND_SIGNALED);
        self.from.post_send(qpn, &work);
    }

    /// The device has a turn, then the neighbour reads some frames and answers. Returns whose
    /// frames they were.
    fn turn(&mut self) -> Vec<u32> {
        self.from.engine.poll(self.from.now, &mut self.from.host);
        self.measure();
        let count = self.queue.len().min(FRAMES);
        let mut numbers = Vec::new();
        for frame in self.queue.drain(..count) {
            numbers.push(Frame::parse(&frame).unwrap().destination_qpn());
            from_memory(&mut self.to, &frame);
        }
        self.to.settle();
        for frame in std::mem::take(&mut self.to.host.sent) {
            self.from.receive(&frame);
        }
        self.measure();
        self.from.engine.room_again();
        self.from.now += FRAME_TIME * count.max(1) as u64;
        self.to.now = self.from.now;
        numbers
    }
}

#[test]
fn hundreds_of_streams_overrun_no_queue_and_all_get_on() {
    const QPS: u32 = 240;
    let mut ring = Ring::new(QPS);
    for qpn in FIRST..FIRST + QPS {
        ring.write(qpn, MESSAGE);
    }
    let mut packets: HashMap<u32, u32> = HashMap::new();
    let (mut complete, mut total) = (0, 0);
    let mut most_in_a_turn = 0;
    for _ in 0..100_000 {
        let sent = ring.from.engine.counters().tx_packets;
        // A frame for which there is no room would be a panic of the test's host.
        for qpn in ring.turn() {
            *packets.entry(qpn).or_default() += 1;
            total += 1;
        }
        let sent = ring.from.engine.counters().tx_packets - sent;
        most_in_a_turn = most_in_a_turn.max(sent);
        if (QPS * 128..QPS * 128 + FRAMES as u32).contains(&total) {
            // Half of everything is there: half of each.
            let least = packets.values().min().unwrap();
            let most = packets.values().max().unwrap();
            assert_eq!(packets.len(), QPS as usize);
            assert!(most - least <= 24, "{least} to {most} packets");
        }
        complete += drain(&mut ring.from)
            .iter()
            .inspect(|entry| assert_eq!(entry.status, CompletionStatus::Success.number()))
            .count();
        if complete == QPS as usize {
            break;
        }
    }
    assert_eq!(complete, QPS as usize);
    let counters = ring.from.engine.counters();
    assert_eq!((counters.ack_timeouts, counters.retransmissions), (0, 0));
    assert!(most_in_a_turn <= 600, "{most_in_a_turn} packets in a turn");
    assert_eq!(ring.from.engine.waiting_for_room(), 0);
}

/// The completion queue and the queue pair of small writes.
const SMALL_CQ: u32 = 2;
const SMALL: u32 = FIRST - 1;

/// The longest that small writes take whose completion queue is of that priority, while so many streams send all that
/// they may. In nanoseconds.
fn latency_under_load(priority: EventPriority, streams: u32) -> u64 {
    const EQ: u16 = 3;
    let mut ring = Ring::new(streams);
    ring.from.create_eq(EQ, 3);
    ring.from.execute(&ModifyEventQueue {
        eqn: EQ,
        message: 3,
        priority: priority.number(),
        ..ModifyEventQueue::zeroed()
    });
    ring.from.create_cq(SMALL_CQ, EQ, 4);
    ring.from.create_qp(QpOptions {
        qpn: SMALL,
        cqn: SMALL_CQ,
        pd: PD,
        ..QpOptions::default()
    });
    create(&mut ring.to, SMALL);
    let (forth, back) = (peer(&ring.to, SMALL), peer(&ring.from, SMALL));
    ring.from.connect(SMALL, &forth);
    ring.to.connect(SMALL, &back);
    for qpn in FIRST..FIRST + streams {
        // One more is always there when one is done.
        ring.write(qpn, MESSAGE);
        ring.write(qpn, MESSAGE);
    }
    // What streams had done has begun anew by the next turn.
    let turn = |ring: &mut Ring| {
        let numbers = ring.turn();
        assert!(numbers.iter().any(|qpn| *qpn != SMALL), "there is no load");
        for done in drain(&mut ring.from) {
            assert_eq!(done.status, CompletionStatus::Success.number());
            ring.write(done.qpn, MESSAGE);
        }
    };
    // Each stream has had its turn.
    for _ in 0..streams.max(64) {
        turn(&mut ring);
    }
    let mut longest = 0;
    for _ in 0..8 {
        let posted = ring.from.now;
        ring.write(SMALL, 64);
        let done = loop {
            turn(&mut ring);
            if let Some(done) = ring.from.poll_cq(SMALL_CQ) {
                break done;
            }
        };
        assert_eq!(done.status, CompletionStatus::Success.number());
        longest = longest.max(ring.from.now - posted);
    }
    longest
}

#[test]
fn a_write_of_low_latency_does_not_wait_for_the_streams_of_others() {
    let bulk = latency_under_load(EventPriority::Bulk, 240);
    let low_latency = latency_under_load(EventPriority::LowLatency, 240);
    // Both wait for what is in the ring; the one besides for a turn of each stream.
    let in_ring = FRAME_TIME * (RING / 4096) as u64;
    println!("{bulk} ns as bulk, {low_latency} ns as low latency, {in_ring} ns for the ring");
    assert!(low_latency < 2 * in_ring, "{low_latency} ns");
    assert!(bulk > 4 * low_latency, "{bulk} and {low_latency} ns");
}

#[test]
fn a_write_waits_for_a_turn_of_each_stream_of_others_at_the_most() {
    // Packets of a turn: fewer, the more streams there are.
    for (streams, burst) in [(1, 64), (2, 64), (16, 15), (240, 8)] {
        let took = latency_under_load(EventPriority::Bulk, streams);
        let in_ring = (RING / 4096) as u64;
        let most = in_ring + u64::from(streams * burst);
        let packets = took / FRAME_TIME;
        println!("{streams} streams: {packets} packets, {most} at the most");
        assert!(packets <= most, "{packets} packets of {streams} streams");
    }
}

/// A device with a full way to one neighbour and one with room to another.
fn with_a_full_neighbour() -> (Ring, Node) {
    let mut ring = Ring::new(3);
    let mut other = Node::new(3);
    for qpn in FIRST + 3..FIRST + 6 {
        create(&mut ring.from, qpn);
        create(&mut other, qpn);
        let (forth, back) = (peer(&other, qpn), peer(&ring.from, qpn));
        ring.from.connect(qpn, &forth);
        other.connect(qpn, &back);
    }
    let full = (Way::Memory(1), Room::Bytes(0));
    ring.from.host.ways.insert(ring.to.mac, full);
    (ring, other)
}

#[test]
fn a_full_neighbour_holds_up_nobody_else() {
    let (mut ring, mut other) = with_a_full_neighbour();
    let target = other.register(0x201, PD, ALL, MESSAGE.into());
    for qpn in FIRST..FIRST + 6 {
        ring.write(qpn, 64 << 10);
    }
    assert_eq!(target.address, ring.target.address);
    for _ in 0..100 {
        ring.from.settle();
        for frame in std::mem::take(&mut ring.from.host.sent) {
            assert_eq!(frame[..6], other.mac, "there is no room");
            other.receive(&frame);
        }
        other.settle();
        for frame in std::mem::take(&mut other.host.sent) {
            ring.from.receive(&frame);
        }
    }
    let done: Vec<u32> = drain(&mut ring.from).iter().map(|done| done.qpn).collect();
    assert_eq!(done, [FIRST + 3, FIRST + 4, FIRST + 5]);
    assert_eq!(ring.from.engine.waiting_for_room(), 3);
    // The device does not turn round and round for it.
    let next = ring.from.engine.next_timeout();
    assert!(next.is_none_or(|at| at > ring.from.now), "{next:?}");
    // It reads after all: they go on in the order in which they came.
    ring.measure();
    ring.from.engine.room_again();
    let mut order = Vec::new();
    for _ in 0..10 {
        order.extend(ring.turn());
    }
    order.dedup();
    assert_eq!(order[..3], [FIRST, FIRST + 1, FIRST + 2]);
    assert_eq!(
        statuses(&drain(&mut ring.from)),
        [CompletionStatus::Success; 3]
    );
    assert_eq!(ring.from.engine.counters().retransmissions, 0);
}

#[test]
fn who_is_told_of_enough_room_does_not_wait_to_be_told_of_more() {
    /// Bytes of a connection that are on their way at most.
    const UNDER_WAY: usize = 512 << 10;
    // From what is enough to what is enough for all that is sent in a turn.
    for more in (0..RING - ENOUGH_ROOM).step_by(16 << 10) {
        let mut ring = Ring::new(1);
        ring.write(FIRST, MESSAGE);
        loop {
            // The neighbour takes at once what is there, and says nothing but what it was asked for.
            let room = (Way::Memory(1), Room::Bytes(ENOUGH_ROOM + more));
            ring.from.host.ways.insert(ring.to.mac, room);
            if std::mem::take(&mut ring.from.host.wants_room) {
                ring.from.engine.room_again();
            }
            let now = ring.from.now;
            if ring.from.engine.next_timeout().is_none_or(|at| at > now) {
                break;
            }
            ring.from.engine.poll(now, &mut ring.from.host);
        }
        assert_eq!(ring.from.engine.waiting_for_room(), 0, "{more}");
        assert_eq!(ring.from.host.sent.len(), UNDER_WAY >> 12, "{more}");
    }
}

#[test]
fn acknowledgements_leave_though_others_wait_with_their_data() {
    let mut ring = Ring::new(2);
    // The neighbour writes on one connection while this side's data wait on both.
    ring.write(FIRST, MESSAGE);
    ring.write(FIRST + 1, MESSAGE);
    let reserve = ferrite_engine::core::ANSWER_RESERVE;
    let way = (Way::Memory(1), Room::Bytes(reserve));
    ring.from.host.ways.insert(ring.to.mac, way);
    ring.from.settle();
    assert!(ring.from.host.sent.is_empty());
    let work = SendWork::new(SendOpcode::Write, &[ring.target.sge(0, 4096)])
        .remote(ring.source.address, ring.source.tag)
        .flags(SEND_SIGNALED);
    ring.to.post_send(FIRST, &work);
    ring.to.settle();
    for frame in std::mem::take(&mut ring.to.host.sent) {
        ring.from.receive(&frame);
    }
    ring.from.settle();
    assert_eq!(ring.from.host.sent.len(), 1);
    for frame in std::mem::take(&mut ring.from.host.sent) {
        from_memory(&mut ring.to, &frame);
    }
    assert_eq!(statuses(&drain(&mut ring.to)), [CompletionStatus::Success]);
    assert_eq!(ring.from.engine.waiting_for_room(), 2);
}

#[test]
fn who_waits_for_a_dead_neighbour_gives_up_in_time() {
    let mut ring = Ring::new(2);
    // The one has something under way, the other nothing.
    ring.write(FIRST, MESSAGE);
    ring.from.settle();
    assert!(ring.from.host.sent.len() > 64);
    ring.write(FIRST + 1, MESSAGE);
    let full = (Way::Memory(1), Room::Stuck);
    ring.from.host.ways.insert(ring.to.mac, full);
    ring.from.engine.room_again();
    let start = ring.from.now;
    for _ in 0..100 {
        ring.from.settle();
        match ring.from.engine.next_timeout() {
            Some(at) => ring.from.now = at,
            None => break,
        }
    }
    // Timeout 14 is 67 ms, and there are three retries, after one, two and four of them.
    let failed = statuses(&drain(&mut ring.from));
    assert_eq!(failed, [CompletionStatus::RetryExceeded]);
    assert!((700..800).contains(&((ring.from.now - start) / 1_000_000)));
    assert_eq!(ring.from.qp_state(FIRST), State::Error);
    // Who has sent nothing has nothing to give up on, and can be stopped.
    assert_eq!(ring.from.qp_state(FIRST + 1), State::Rts);
    assert_eq!(ring.from.engine.waiting_for_room(), 1);
    let destroy = CommandOpcode::DestroyQueuePair;
    assert_eq!(
        ring.from.object_command(destroy, FIRST + 1),
        CommandStatus::Ok
    );
    assert_eq!(ring.from.engine.waiting_for_room(), 0);
}

#[test]
fn datagrams_wait_for_room_and_are_lost_where_there_is_none_for_ever() {
    let (mut ring, other) = with_a_full_neighbour();
    let node = &mut ring.from;
    node.create_qp(QpOptions {
        qpn: 2,
        pd: PD,
        service: Service::Ud,
        ..QpOptions::default()
    });
    node.start_datagrams(2, 7);
    for to in [ring.to.as_peer(9), other.as_peer(9)] {
        let work = SendWork::new(SendOpcode::Send, &[ring.source.sge(0, 100)])
            .datagram(&to.datagram(7))
            .flags(SEND_SIGNALED);
        node.post_send(2, &work);
    }
    node.settle();
    assert_eq!(drain(node), []);
    assert_eq!(node.engine.waiting_for_room(), 1);
    // A connection waits on, a datagram does not.
    let work = SendWork::new(SendOpcode::Write, &[ring.source.sge(0, 100)])
        .remote(ring.target.address, ring.target.tag);
    node.post_send(FIRST, &work);
    let stuck = (Way::Memory(1), Room::Stuck);
    node.host.ways.insert(ring.to.mac, stuck);
    node.engine.room_again();
    node.settle();
    assert_eq!(statuses(&drain(node)), [CompletionStatus::Success; 2]);
    assert_eq!(node.engine.waiting_for_room(), 1);
    let to: Vec<_> = node.host.sent.iter().map(|frame| &frame[..6]).collect();
    assert_eq!(to, [&ring.to.mac[..], &other.mac[..]]);
}

#[test]
fn a_way_that_gets_stuck_under_many_takes_no_long_turn() {
    const BASE: u32 = 1000;
    const QPS: u32 = 1000;
    let (mut ring, _) = with_a_full_neighbour();
    let node = &mut ring.from;
    let to = ring.to.as_peer(9);
    let work =
        SendWork::new(SendOpcode::Send, &[ring.source.sge(0, 100)]).datagram(&to.datagram(7));
    for qpn in BASE..BASE + QPS {
        node.create_qp(QpOptions {
            qpn,
            pd: PD,
            log_blocks: 2,
            log_entries: 1,
            service: Service::Ud,
            ..QpOptions::default()
        });
        node.start_datagrams(qpn, 7);
        node.post_send(qpn, &work);
    }
    node.settle();
    assert_eq!(node.engine.waiting_for_room(), QPS as usize);
    let stuck = (Way::Memory(1), Room::Stuck);
    node.host.ways.insert(ring.to.mac, stuck);
    node.engine.room_again();
    let mut most = 0;
    for _ in 0..QPS {
        let before = node.host.sent.len();
        node.engine.poll(node.now, &mut node.host);
        most = most.max(node.host.sent.len() - before);
    }
    assert_eq!(node.host.sent.len(), QPS as usize);
    assert!(most < QPS as usize / 3, "{most} in one turn");
}

#[test]
fn a_device_that_streams_to_itself_loses_nothing() {
    const QPS: u32 = 64;
    let mut node = Node::new(1);
    for qpn in FIRST..FIRST + QPS {
        create(&mut node, qpn);
        let to_itself = peer(&node, qpn ^ 1);
        node.connect(qpn, &to_itself);
    }
    let region = node.register(0x101, PD, ALL, MESSAGE.into());
    let work = SendWork::new(SendOpcode::Write, &[region.sge(0, MESSAGE)])
        .remote(region.address, region.tag)
        .flags(SEND_SIGNALED);
    for qpn in FIRST..FIRST + QPS {
        node.post_send(qpn, &work);
    }
    let mut complete = 0;
    for _ in 0..100_000 {
        node.engine.poll(node.now, &mut node.host);
        node.now += 1000;
        complete += drain(&mut node).len();
        if complete == QPS as usize {
            break;
        }
    }
    assert_eq!(complete, QPS as usize);
    assert_eq!(node.engine.counters().retransmissions, 0);
}
