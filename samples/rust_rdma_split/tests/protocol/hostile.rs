// SPDX-License-Identifier: GPL-2.0

//! Peers that do what they should not.

use crate::config;
use crate::world::{options, tables, Tables};
use ferrite_split::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;

const OWN: u32 = 2;
const PEER: u32 = 3;
const YOURS: u32 = REFERENCE_YOURS;

/// An endpoint, and what its peer has said so far.
struct Victim {
    endpoint: Endpoint<Tables>,
    sequence: u32,
    data_sequence: u32,
    /// Messages whose buffers are not posted again.
    messages: Vec<Handle>,
}

fn offer(index: u32, kind: PoolKind, elements: u32, element_size: u32) -> PoolOffer {
    let is_send = kind == PoolKind::Send;
    PoolOffer {
        index,
        kind,
        elements,
        element_size,
        address: if is_send { 0 } else { 0x10_0000 },
        key: if is_send { 0 } else { 17 },
        context: 0,
    }
}

/// A pool of the peer, in bytes.
fn pool(index: u32, kind: u16, elements: u32, size: u32) -> Vec<u8> {
    let is_send = kind == PoolKind::Send.number();
    bytes(&PoolEntry {
        pool: index,
        kind,
        reserved: 0,
        elements,
        element_size: size,
        address: if is_send { 0 } else { 0x20_0000 },
        key: if is_send { 0 } else { 18 },
        reserved2: 0,
        context: 0,
    })
}

fn bytes<T: Layout>(layout: &T) -> Vec<u8> {
    let mut bytes = vec![0; T::SIZE];
    layout.encode(&mut bytes).unwrap();
    bytes
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

/// Words, as they are in a body.
fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

impl Victim {
    /// Pools 1 (four elements of 100 bytes) and 2 (two messages of 64) of its own, and 5 and 6 of the peer.
    fn new(options: Options) -> Self {
        let mut victim = Self {
            endpoint: Endpoint::new(options, tables()),
            sequence: 0,
            data_sequence: 0,
            messages: Vec::new(),
        };
        victim.connect(OWN, PEER);
        let kind = match options.variant {
            Variant::Push => PoolKind::Write,
            Variant::Pull => PoolKind::Read,
        };
        let mut pools = vec![pool(6, PoolKind::Send.number(), 2, 64)];
        if options.service == Service::Acknowledged {
            victim.endpoint.announce(offer(1, kind, 4, 100)).unwrap();
            pools.push(pool(5, kind.number(), 4, 100));
        }
        let own = offer(2, PoolKind::Send, 2, 64);
        victim.endpoint.announce(own).unwrap();
        victim.poll();
        let mut body = words(&[pools.len() as u32]);
        body.extend(pools.concat());
        assert_eq!(victim.control(1, &body), Ok(()));
        victim
    }

    fn connect(&mut self, session: u32, peer_session: u32) {
        self.endpoint.start(session, peer_session);
        (self.sequence, self.data_sequence) = (0, 0);
    }

    /// Has all be said that is to be said; gives the last.
    fn poll(&mut self) -> Vec<u8> {
        let mut bytes = [0; CONTROL_MAX];
        let mut last = Vec::new();
        while let Some(outgoing) = self.endpoint.poll_control(&mut bytes) {
            last = bytes[..outgoing.length].to_vec();
            self.endpoint.control_done(outgoing.token);
        }
        last
    }

    /// A control message with the right number.
    fn control(&mut self, function: u16, body: &[u8]) -> Result<(), Violation> {
        self.sequence += 1;
        let message = message(function, PEER, self.sequence, body);
        self.raw(&message)
    }

    fn raw(&mut self, message: &[u8]) -> Result<(), Violation> {
        self.endpoint.receive_control(message).map(drop)
    }

    /// A frame in a message.
    fn data(&mut self, pool: u32, size: u32) -> Result<(), Violation> {
        self.data_sequence = self.data_sequence.wrapping_add(1);
        let mut body = words(&[pool, size]);
        body.resize(8 + size as usize, 0);
        let message = message(6, PEER, self.data_sequence, &body);
        let delivery = self.endpoint.receive_data(&message)?;
        self.messages.extend(delivery.map(|it| it.handle));
        Ok(())
    }

    fn immediate(&mut self, pool: u32, element: u32, size: u32) -> Result<(), Violation> {
        let bits = Immediate {
            pool,
            element,
            size,
        };
        let bits = bits.encode().unwrap();
        self.endpoint.receive_immediate(bits, size).map(drop)
    }

    /// A request that tells of an MTU.
    fn link_changed(&mut self, mtu: u32) -> Result<(), Violation> {
        let operation = u32::from(Operation::LinkChanged.number());
        self.control(8, &words(&[operation << 16, 12, LINK_UP, 0, mtu]))
    }

    /// The answer to what it is made to ask.
    fn answer(&mut self, operation: Operation, data: &[u8]) -> Result<(), Violation> {
        self.endpoint.request(operation, &[]).unwrap();
        let asked = self.poll();
        let sequence = u32::from_be_bytes(asked[8..12].try_into().unwrap());
        let header = words(&[u32::from(operation.number()) << 16, data.len() as u32]);
        self.raw(&message(9, OWN, sequence, &[&header, data].concat()))
    }
}

type Attack = fn(&mut Victim) -> Result<(), Violation>;

/// What a peer may do wrong, and what it is called.
const ATTACKS: &[(Violation, Attack)] = &[
    (Violation::Truncated, |it| it.raw(&[0, 1, 0, 1, 0])),
    (Violation::Truncated, |it| {
        it.control(3, &words(&[2, 5, 0, 1]))
    }),
    (Violation::Truncated, |it| {
        it.control(3, &words(&[u32::MAX, 5, 0, 1]))
    }),
    (Violation::Truncated, |it| it.control(2, &words(&[1, 2]))),
    (Violation::Truncated, |it| it.control(4, &[0, 0, 0, 1, 0])),
    (Violation::TooLong, |it| {
        it.control(2, &words(&[1, 2, 3, 4]))
    }),
    (Violation::TooLong, |it| it.control(4, &words(&[5; 100]))),
    (Violation::TooLong, |it| {
        it.control(3, &words(&[1, 5, 0, 1, 0]))
    }),
    (Violation::BadFunction, |it| it.control(0, &[])),
    (Violation::BadFunction, |it| it.control(10, &[])),
    (Violation::BadVersion, |it| {
        let mut bytes = message(2, PEER, it.sequence + 1, &words(&[1, 2, 3]));
        bytes[3] = 2;
        it.raw(&bytes)
    }),
    (Violation::OtherSession, |it| {
        it.raw(&message(2, PEER - 2, 2, &words(&[1, 2, 3])))
    }),
    (Violation::OtherSession, |it| {
        it.raw(&message(5, OWN - 2, 1, &[]))
    }),
    (Violation::OtherSession, |it| {
        let bytes = message(6, PEER - 2, 1, &[words(&[YOURS | 2, 1]), vec![0]].concat());
        it.endpoint.receive_data(&bytes).map(drop)
    }),
    (Violation::Replayed, |it| {
        it.raw(&message(2, PEER, it.sequence, &words(&[1, 2, 3])))
    }),
    (Violation::Replayed, |it| {
        it.data(YOURS | 2, 10)?;
        it.data_sequence -= 1;
        it.data(YOURS | 2, 10)
    }),
    (Violation::Skipped, |it| {
        it.raw(&message(2, PEER, it.sequence + 2, &words(&[1, 2, 3])))
    }),
    (Violation::Skipped, |it| {
        it.data_sequence += 1;
        it.data(YOURS | 2, 10)
    }),
    (Violation::WrongChannel, |it| {
        it.control(6, &[words(&[YOURS | 2, 1]), vec![0]].concat())
    }),
    (Violation::WrongChannel, |it| {
        let bytes = message(2, PEER, 1, &words(&[1, 2, 3]));
        it.endpoint.receive_data(&bytes).map(drop)
    }),
    (Violation::NoEntries, |it| it.control(3, &words(&[0]))),
    (Violation::NoEntries, |it| it.control(4, &[])),
    (Violation::Reserved, |it| {
        let mut body = [words(&[1]), pool(9, 1, 4, 100)].concat();
        body[4 + 7] = 1;
        it.control(1, &body)
    }),
    (Violation::Reserved, |it| {
        it.control(8, &words(&[(4 << 16) | 1, 0]))
    }),
    (Violation::PoolTwice, |it| {
        it.control(1, &[words(&[1]), pool(5, 1, 4, 100)].concat())
    }),
    (Violation::PoolTwice, |it| {
        it.control(1, &[words(&[1]), pool(9, 2, 4, 100)].concat())
    }),
    (Violation::PoolTwice, |it| {
        it.control(
            1,
            &[words(&[2]), pool(9, 1, 4, 100), pool(9, 1, 4, 100)].concat(),
        )
    }),
    (Violation::TooManyPools, |it| {
        for index in 0..MAX_POOLS as u32 {
            it.control(1, &[words(&[1]), pool(100 + index, 1, 4, 100)].concat())?;
        }
        Ok(())
    }),
    (Violation::PoolShape, |it| {
        it.control(1, &[words(&[1]), pool(9, 1, 0, 100)].concat())
    }),
    (Violation::PoolShape, |it| {
        it.control(1, &[words(&[1]), pool(9, 1, 4, 0)].concat())
    }),
    (Violation::PoolShape, |it| {
        it.control(1, &[words(&[1]), pool(9, 1, 301, 1)].concat())
    }),
    (Violation::PoolShape, |it| {
        it.control(1, &[words(&[1]), pool(YOURS, 1, 4, 1)].concat())
    }),
    (Violation::PoolShape, |it| {
        // Its last byte has no address.
        let mut entry = pool(9, 1, 4, 100);
        entry[16..24].copy_from_slice(&(u64::MAX - 398).to_be_bytes());
        it.control(1, &[words(&[1]), entry].concat())
    }),
    (Violation::PoolShape, |it| {
        it.control(4, &words(&[6]))?;
        it.poll();
        // Messages have no key.
        let mut entry = pool(9, 2, 4, 100);
        entry[27] = 1;
        it.control(1, &[words(&[1]), entry].concat())
    }),
    (Violation::PoolKind, |it| {
        it.control(1, &[words(&[1]), pool(9, 9, 4, 100)].concat())
    }),
    // To be read, where frames are pushed.
    (Violation::PoolKind, |it| {
        it.control(1, &[words(&[1]), pool(9, 3, 4, 100)].concat())
    }),
    (Violation::NoSuchPool, |it| {
        it.control(3, &words(&[1, 77, 0, 1]))
    }),
    (Violation::NoSuchPool, |it| {
        it.control(3, &words(&[1, YOURS | 5, 0, 1]))
    }),
    (Violation::NoSuchPool, |it| it.control(4, &words(&[77]))),
    (Violation::NoSuchPool, |it| {
        it.control(7, &words(&[1, YOURS | 77, 0, 1]))
    }),
    (Violation::NoSuchPool, |it| it.immediate(77, 0, 1)),
    (Violation::NoSuchPool, |it| it.data(YOURS | 77, 1)),
    // A pool that is not announced yet.
    (Violation::NoSuchPool, |it| {
        it.endpoint
            .announce(offer(8, PoolKind::Write, 4, 100))
            .unwrap();
        it.immediate(8, 0, 1)
    }),
    // A pool that was given up.
    (Violation::NoSuchPool, |it| {
        it.control(4, &words(&[YOURS | 1]))?;
        it.poll();
        it.immediate(1, 0, 1)
    }),
    (Violation::PoolMisused, |it| {
        it.control(3, &words(&[1, YOURS | 1, 0, 1]))
    }),
    (Violation::PoolMisused, |it| {
        it.control(7, &words(&[1, 5, 0, 1]))
    }),
    (Violation::PoolMisused, |it| {
        it.control(7, &words(&[1, YOURS | 2, 0, 1]))
    }),
    (Violation::PoolMisused, |it| {
        it.control(4, &words(&[YOURS | 1, YOURS | 1]))
    }),
    (Violation::PoolMisused, |it| it.data(YOURS | 1, 1)),
    (Violation::PoolMisused, |it| it.data(6, 1)),
    (Violation::PoolMisused, |it| it.immediate(2, 0, 1)),
    (Violation::ElementBeyond, |it| it.immediate(1, 4, 1)),
    (Violation::ElementBeyond, |it| {
        it.control(7, &words(&[1, YOURS | 1, u32::MAX, 1]))
    }),
    (Violation::ElementBeyond, |it| {
        it.control(3, &words(&[1, 5, 4, 1]))
    }),
    (Violation::ElementBeyond, |it| {
        it.control(3, &words(&[1, 5, 3, u32::MAX]))
    }),
    (Violation::ElementBeyond, |it| {
        it.control(3, &words(&[1, 5, 0, 0]))
    }),
    (Violation::ElementTaken, |it| {
        it.immediate(1, 0, 1)?;
        it.immediate(1, 0, 1)
    }),
    // Taken out, and the peer was not told.
    (Violation::ElementTaken, |it| {
        it.immediate(1, 0, 1)?;
        let arrival = it.endpoint.next_arrival().unwrap();
        it.endpoint.release(arrival.handle).unwrap();
        it.control(7, &words(&[1, YOURS | 1, 0, 1]))
    }),
    (Violation::ElementIdle, |it| {
        it.control(3, &words(&[1, 5, 0, 1]))
    }),
    (Violation::ElementIdle, |it| {
        it.control(3, &words(&[1, 6, 0, 1]))
    }),
    (Violation::ElementIdle, |it| {
        it.endpoint.send(10).unwrap();
        it.control(3, &words(&[1, 6, 1, 1]))
    }),
    // Filled, and the peer was not told.
    (Violation::ElementIdle, |it| {
        let options = Options {
            separate_indication: true,
            ..options(Role::Host, Service::Acknowledged, Variant::Push)
        };
        *it = Victim::new(options);
        it.endpoint.set_threshold(0);
        it.endpoint.send(10).unwrap();
        it.control(3, &words(&[1, 5, 0, 1]))
    }),
    (Violation::FrameEmpty, |it| {
        it.control(7, &words(&[1, YOURS | 1, 0, 0]))
    }),
    (Violation::FrameEmpty, |it| it.data(YOURS | 2, 0)),
    (Violation::FrameBeyond, |it| it.immediate(1, 0, 101)),
    (Violation::FrameBeyond, |it| {
        it.control(7, &words(&[1, YOURS | 1, 0, u32::MAX]))
    }),
    (Violation::FrameBeyond, |it| it.data(YOURS | 2, 65)),
    (Violation::FrameTorn, |it| {
        it.endpoint.receive_immediate(0x0100_0064, 99).map(drop)
    }),
    (Violation::CreditExceeded, |it| {
        for _ in 0..3 {
            it.data(YOURS | 2, 10)?;
        }
        Ok(())
    }),
    (Violation::RequestTwice, |it| {
        let body = [words(&[12 << 16, 12]), vec![0; 12]].concat();
        it.control(8, &body)?;
        it.control(8, &body)
    }),
    (Violation::RequestTwice, |it| {
        it.immediate(1, 0, 1)?;
        it.control(4, &words(&[YOURS | 1]))?;
        it.poll();
        it.control(4, &words(&[5]))
    }),
    (Violation::NoSuchRequest, |it| {
        it.raw(&message(5, OWN, 1, &[]))
    }),
    (Violation::NoSuchRequest, |it| {
        it.raw(&message(9, OWN, 1, &words(&[13 << 16, 0])))
    }),
    (Violation::NoSuchRequest, |it| {
        it.endpoint.request(Operation::GetMtu, &[]).unwrap();
        let asked = it.poll();
        let sequence = u32::from_be_bytes(asked[8..12].try_into().unwrap());
        it.raw(&message(
            9,
            OWN,
            sequence,
            &[words(&[1 << 16, 8]), vec![2; 6], vec![0; 2]].concat(),
        ))
    }),
    // An MTU that nobody has, with which its receiver is not to reckon.
    (Violation::BadData, |it| it.link_changed(u32::MAX)),
    (Violation::BadData, |it| it.link_changed(MTU_MAX + 1)),
    (Violation::BadData, |it| {
        it.answer(Operation::GetLink, &words(&[0, 0, u32::MAX]))
    }),
    (Violation::BadData, |it| {
        it.answer(Operation::GetMtu, &words(&[u32::MAX]))
    }),
    (Violation::BadData, |it| {
        it.answer(Operation::GetMtu, &words(&[0]))
    }),
    (Violation::BadData, |it| {
        *it = Victim::new(options(Role::Unit, Service::Acknowledged, Variant::Push));
        it.control(8, &[words(&[6 << 16, 4]), words(&[u32::MAX])].concat())
    }),
    (Violation::FlushedEarly, |it| {
        it.immediate(1, 0, 1)?;
        it.endpoint.withdraw(1).unwrap();
        let asked = it.poll();
        let sequence = u32::from_be_bytes(asked[8..12].try_into().unwrap());
        it.raw(&message(5, OWN, sequence, &[]))
    }),
    (Violation::BadOperation, |it| {
        it.control(8, &words(&[99 << 16, 0]))
    }),
    (Violation::BadOperation, |it| {
        it.control(8, &words(&[13 << 16, 0]))
    }),
    // An I/O unit does not ask a host for its address.
    (Violation::BadOperation, |it| {
        it.control(8, &words(&[1 << 16, 0]))
    }),
    (Violation::BadStatus, |it| {
        it.raw(&message(9, OWN, 1, &words(&[(1 << 16) | 9, 0])))
    }),
    (Violation::BadData, |it| {
        it.control(8, &[words(&[12 << 16, 11]), vec![0; 11]].concat())
    }),
    (Violation::BadData, |it| {
        it.control(8, &[words(&[12 << 16, 12]), vec![1; 12]].concat())
    }),
];

#[test]
fn what_is_wrong_is_refused_and_counted_and_a_new_connection_works() {
    let options = options(Role::Host, Service::Acknowledged, Variant::Push);
    let mut seen = BTreeSet::new();
    for (number, &(violation, attack)) in ATTACKS.iter().enumerate() {
        let mut victim = Victim::new(options);
        assert_eq!(attack(&mut victim), Err(violation), "attack {number}");
        seen.insert(violation);
        let endpoint = &mut victim.endpoint;
        assert_eq!(endpoint.failed(), Some(violation));
        assert_eq!(endpoint.counters().of(violation), 1);
        assert_eq!(endpoint.counters().violations.iter().sum::<u64>(), 1);
        // Nothing more comes of that connection.
        assert_eq!(endpoint.receive_immediate(0x0103_0001, 1), Err(violation));
        assert_eq!(endpoint.receive_control(&[]), Err(violation));
        assert_eq!(endpoint.receive_data(&[]), Err(violation));
        assert_eq!(endpoint.send(10), Err(Unsent::Closed));
        assert_eq!(endpoint.poll_control(&mut [0; CONTROL_MAX]), None);
        assert_eq!(endpoint.counters().violations.iter().sum::<u64>(), 1);
        // Another one is as good as the first.
        while let Some(arrival) = endpoint.next_arrival() {
            endpoint.release(arrival.handle).unwrap();
        }
        victim.connect(OWN, PEER);
        victim.poll();
        let pools = [words(&[1]), pool(5, 1, 4, 100)].concat();
        assert_eq!(victim.control(1, &pools), Ok(()), "attack {number}");
        victim.endpoint.set_threshold(0);
        assert!(victim.endpoint.send(100).is_ok());
    }
    // These have their own tests: of the private data, of a peer that stops, and of who comes to an I/O unit.
    seen.extend([
        Violation::BadJoin,
        Violation::Silent,
        Violation::BadKey,
        Violation::Crowded,
    ]);
    let all: BTreeSet<Violation> = Violation::ALL.iter().map(|it| it.0).collect();
    assert_eq!(seen, all);
    let names: BTreeSet<&str> = Violation::ALL.iter().map(|it| it.1).collect();
    assert_eq!(names.len(), VIOLATIONS);
}

#[test]
fn an_mtu_is_taken_up_to_the_largest() {
    let options = options(Role::Host, Service::Acknowledged, Variant::Push);
    assert_eq!(Victim::new(options).link_changed(MTU_MAX), Ok(()));
    for (operation, data) in [
        (Operation::GetMtu, words(&[MTU_MAX])),
        (Operation::GetLink, words(&[LINK_UP, 0, MTU_MAX])),
        // Of an interface that is gone.
        (Operation::GetLink, words(&[0, 0, 0])),
    ] {
        assert_eq!(Victim::new(options).answer(operation, &data), Ok(()));
    }
}

/// On the unacknowledged service what comes twice is no offence: what it does not do is count.
#[test]
fn a_lossy_service_repeats_its_answers_and_nothing_else() {
    let mut victim = Victim::new(options(Role::Host, Service::Unacknowledged, Variant::Push));
    let get = message(2, PEER, 2, &words(&[1, 60, 0]));
    let wanted = Event::Wanted {
        elements: 1,
        element_size: 60,
    };
    assert_eq!(victim.endpoint.receive_control(&get), Ok(wanted));
    let confirmed = victim.poll();
    assert_eq!(victim.endpoint.receive_control(&get), Ok(Event::Nothing));
    assert_eq!(victim.poll(), confirmed);
    assert_eq!(victim.endpoint.counters().repeated, 1);
    let ahead = message(2, PEER, 4, &words(&[1, 60, 0]));
    assert_eq!(victim.endpoint.receive_control(&ahead), Ok(Event::Nothing));
    assert_eq!(victim.poll(), []);
    assert_eq!(victim.endpoint.counters().early, 1);
    // A request is answered twice, and asked once.
    let body = [words(&[12 << 16, 12]), vec![0; 12]].concat();
    let request = message(8, PEER, 3, &body);
    let asked = Event::Request(Operation::LinkChanged, &[0; 12]);
    assert_eq!(victim.endpoint.receive_control(&request), Ok(asked));
    assert_eq!(
        victim.endpoint.receive_control(&request),
        Ok(Event::Nothing)
    );
    assert_eq!(victim.poll(), []);
    victim.endpoint.reply(Status::Done, &[]).unwrap();
    let answer = victim.poll();
    assert_eq!(
        victim.endpoint.receive_control(&request),
        Ok(Event::Nothing)
    );
    assert_eq!(victim.poll(), answer);
    // So is a flush.
    let flush = message(4, PEER, 4, &words(&[6]));
    assert_eq!(victim.endpoint.receive_control(&flush), Ok(Event::Flush));
    let answer = victim.poll();
    assert_eq!(victim.endpoint.receive_control(&flush), Ok(Event::Nothing));
    assert_eq!(victim.poll(), answer);
    // An index that was there is not used again.
    let again = [words(&[1]), pool(6, 2, 2, 64)].concat();
    let again = message(1, PEER, 5, &again);
    assert_eq!(
        victim.endpoint.receive_control(&again),
        Err(Violation::PoolTwice)
    );
    // More is not lost than was lent.
    let mut victim = Victim::new(options(Role::Host, Service::Unacknowledged, Variant::Push));
    let get = message(2, PEER, 2, &words(&[0, 0, 3]));
    assert_eq!(
        victim.endpoint.receive_control(&get),
        Err(Violation::CreditExceeded)
    );
}

/// Numbers that mean something to somebody, or nothing to anybody.
fn word() -> impl Strategy<Value = u32> {
    let some = vec![
        0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 40, 64, 100, 255, 256, 300,
    ];
    prop_oneof![
        4 => proptest::sample::select(some.clone()),
        3 => proptest::sample::select(some).prop_map(|word| word | YOURS),
        1 => (1..14u32).prop_map(|operation| operation << 16),
        1 => any::<u32>(),
    ]
}

#[derive(Clone, Debug)]
enum Doing {
    Control(u16, i8, Vec<u32>),
    Data(i8, u32, u16),
    Immediate(u32, Option<u32>),
    Noise(bool, Vec<u8>),
    Send(u32),
    Poll,
    Take,
    Withdraw(u32),
    Renounce(u32),
    Tick(u64),
}

fn doing() -> impl Strategy<Value = Doing> {
    let off = || prop_oneof![8 => Just(0i8), 1 => -2..3i8];
    let pools = || proptest::sample::select(vec![1u32, 2, 5, 6, 7]);
    prop_oneof![
        8 => (1..10u16, off(), vec(word(), 0..24)).prop_map(|(a, b, c)| Doing::Control(a, b, c)),
        3 => (off(), word(), 0..80u16).prop_map(|(a, b, c)| Doing::Data(a, b, c)),
        4 => (word(), proptest::option::of(0..110u32)).prop_map(|(a, b)| Doing::Immediate(a, b)),
        1 => (any::<bool>(), vec(any::<u8>(), 0..300)).prop_map(|(a, b)| Doing::Noise(a, b)),
        3 => (0..130u32).prop_map(Doing::Send),
        4 => Just(Doing::Poll),
        4 => Just(Doing::Take),
        1 => pools().prop_map(Doing::Withdraw),
        1 => pools().prop_map(Doing::Renounce),
        1 => (0..20u64).prop_map(Doing::Tick),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: config().cases * 16, ..config() })]

    #[test]
    fn nothing_that_a_peer_says_does_harm(
        doings in vec(doing(), 0..60), lossy: bool, pull: bool, separate: bool,
    ) {
        let service = if lossy { Service::Unacknowledged } else { Service::Acknowledged };
        let variant = if pull { Variant::Pull } else { Variant::Push };
        let options = Options {
            separate_indication: separate,
            ..options(Role::Host, service, variant)
        };
        let mut victim = Victim::new(options);
        let mut now = 0;
        let mut refused = 0;
        let mut handles = Vec::new();
        for doing in doings {
            let mut written = None;
            let result = match doing {
                Doing::Control(function, off, mut words_) => {
                    // Mostly as many entries as are said.
                    let entry = match function { 1 => 10, 3 | 7 => 3, _ => 0 };
                    if entry != 0 && off == 0 {
                        words_.truncate(words_.len() / entry * entry);
                        words_.insert(0, (words_.len() / entry) as u32);
                    }
                    let (session, sequence) = match function {
                        5 | 9 => (OWN, victim.sequence),
                        _ => (PEER, victim.sequence.wrapping_add(1)),
                    };
                    let sequence = sequence.wrapping_add_signed(off.into());
                    let bytes = message(function, session, sequence, &words(&words_));
                    let result = victim.raw(&bytes);
                    victim.sequence += u32::from(result.is_ok() && session == PEER && off == 0);
                    result
                }
                Doing::Data(off, reference, size) => {
                    let sequence = victim.data_sequence.wrapping_add(1);
                    victim.data_sequence = sequence.wrapping_add_signed(off.into()).wrapping_sub(1);
                    victim.data(reference, size.into())
                }
                Doing::Immediate(bits, length) => {
                    let length = length.unwrap_or(Immediate::decode(bits).size);
                    victim.endpoint.receive_immediate(bits, length).map(drop)
                }
                Doing::Noise(is_data, bytes) => {
                    let result = match is_data {
                        true => victim.endpoint.receive_data(&bytes).map(drop),
                        false => victim.raw(&bytes),
                    };
                    prop_assert_eq!(result.is_err(), true);
                    result
                }
                Doing::Send(length) => {
                    if let Ok(Transfer::Write { immediate: None, handle, .. }
                        | Transfer::Fill { handle, .. }) = victim.endpoint.send(length)
                    {
                        written = Some(handle);
                    }
                    Ok(())
                }
                Doing::Poll => {
                    let _ = victim.endpoint.reply(Status::Failed, &[]);
                    victim.poll();
                    while victim.endpoint.next_freed().is_some() {}
                    Ok(())
                }
                Doing::Take => {
                    handles.append(&mut victim.messages);
                    handles.extend(victim.endpoint.next_arrival().map(|it| it.handle));
                    if handles.len() > 2 {
                        prop_assert_eq!(victim.endpoint.release(handles.remove(0)), Ok(()));
                    }
                    Ok(())
                }
                Doing::Withdraw(index) => {
                    let _ = victim.endpoint.withdraw(index);
                    Ok(())
                }
                Doing::Renounce(index) => {
                    let _ = victim.endpoint.renounce(index);
                    Ok(())
                }
                Doing::Tick(by) => {
                    now += by;
                    victim.endpoint.tick(now)
                }
            };
            if let Some(handle) = written {
                prop_assert_eq!(victim.endpoint.written(handle), Ok(()));
            }
            if result.is_err() {
                refused += 1;
                prop_assert!(!victim.endpoint.is_running());
                let sum: u64 = victim.endpoint.counters().violations.iter().sum();
                prop_assert_eq!(sum, refused);
                victim.connect(OWN, PEER);
            }
        }
        let sum: u64 = victim.endpoint.counters().violations.iter().sum();
        prop_assert_eq!(sum, refused);
        // What it owns is still all there: it is given back once nobody uses it.
        victim.endpoint.stop();
        handles.append(&mut victim.messages);
        for handle in handles {
            prop_assert_eq!(victim.endpoint.release(handle), Ok(()));
        }
        while let Some(arrival) = victim.endpoint.next_arrival() {
            prop_assert_eq!(victim.endpoint.release(arrival.handle), Ok(()));
        }
        victim.endpoint.close();
        while victim.endpoint.next_freed().is_some() {}
        prop_assert!(victim.endpoint.is_closed());
    }
}
