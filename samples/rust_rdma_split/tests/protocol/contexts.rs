// SPDX-License-Identifier: GPL-2.0

//! Contexts: of each message, and of each pool.

use crate::exchange::{furnish, operation};
use crate::world::{options, World};
use ferrite_split::*;
use std::collections::{BTreeMap, BTreeSet};

/// What both ends say of all there is to say: pools, frames of all sizes, questions, and the end of pools.
fn talk(service: Service, variant: Variant) -> World {
    let mut world = World::new(options(Role::Host, service, variant), 1);
    furnish(&mut world);
    world.settle();
    for who in 0..2 {
        for length in [60, 200, 250, 1500, 69_000] {
            let _ = world.send(who, length);
        }
        // Larger than any element: the other is asked for one.
        assert!(world.send(who, 70_001).is_err());
    }
    world.settle();
    for number in 0..11 {
        for (who, (operation, data)) in [
            (0, operation(number)),
            (1, (Operation::LinkChanged, vec![0; 12])),
        ] {
            let end = &mut world.ends[who];
            end.endpoint.request(operation, &data).unwrap();
            end.asked = Some(operation);
        }
        world.settle();
    }
    for who in 0..2 {
        world.ends[who].endpoint.close();
        world.collect(who);
    }
    world.settle();
    assert!(world.ends.iter().all(|end| end.endpoint.is_closed()));
    world
}

/// Sessions of the first connection, by end.
const SESSIONS: [u32; 2] = [2, 3];

/// What answers a message, if anything does.
fn answer(service: Service, function: u16, bytes: &[u8]) -> Option<(u16, u16)> {
    let is = |it: Function| it.number() == function;
    // The operation is the first thing behind the header of a request, and of the answer.
    let operation = || u16::from_be_bytes(bytes[Header::SIZE..][..2].try_into().unwrap());
    match service {
        _ if is(Function::BufferPoolFlushRequest) => {
            Some((Function::BufferPoolFlushReply.number(), 0))
        }
        _ if is(Function::CfgUtilRequest) => Some((Function::CfgUtilReply.number(), operation())),
        Service::Acknowledged => None,
        Service::Unacknowledged => Some((
            Function::CfgUtilReply.number(),
            Operation::Received.number(),
        )),
    }
}

/// The transaction context of a message is its sender's session and the message's number; that of an answer is the one of
/// what it answers, and each question has one answer.
#[test]
fn each_message_has_its_context_and_each_answer_that_of_its_request() {
    for (service, variant, functions) in [
        (Service::Acknowledged, Variant::Push, 9),
        (Service::Acknowledged, Variant::Pull, 9),
        // Nothing is told of by `BufferRDMAIndicate` there.
        (Service::Unacknowledged, Variant::Push, 8),
    ] {
        let world = talk(service, variant);
        let mut seen = BTreeMap::new();
        // By who asked.
        let mut open: [BTreeMap<u64, (u16, u16)>; 2] = Default::default();
        for (channel, said) in world.said.iter().enumerate() {
            let mut numbers = [0; 2];
            let mut before = BTreeSet::new();
            for (who, bytes) in said {
                // Where it may be lost a message is sent again, as it is.
                if service == Service::Unacknowledged && !before.insert((who, bytes)) {
                    continue;
                }
                let header = Header::decode(bytes).unwrap();
                let context = Context::from_number(header.context);
                *seen.entry(header.function).or_insert(0) += 1;
                let replies = [Function::BufferPoolFlushReply, Function::CfgUtilReply];
                if replies.map(Function::number).contains(&header.function) {
                    let operation = match header.function {
                        it if it == Function::CfgUtilReply.number() => {
                            Reply::decode(&bytes[Header::SIZE..]).unwrap().operation
                        }
                        _ => 0,
                    };
                    let expected = open[1 - who].remove(&header.context);
                    assert_eq!(expected, Some((header.function, operation)));
                    continue;
                }
                numbers[*who] += 1;
                let session = SESSIONS[*who];
                let sequence = numbers[*who];
                assert_eq!(context, Context { session, sequence });
                if channel == 0 {
                    if let Some(answer) = answer(service, header.function, bytes) {
                        assert_eq!(open[*who].insert(header.context, answer), None);
                    }
                }
            }
        }
        assert_eq!(open, [BTreeMap::new(), BTreeMap::new()], "not answered");
        assert_eq!(seen.len(), functions, "{seen:?}");
    }
}

/// The context that an owner gives its pool is in the message that announces it, and the owner gets it back: with each
/// frame in an element of the pool (see `World::take_arrival`), and when the pool is given up (`World::collect`).
#[test]
fn the_context_of_a_pool_comes_back_to_its_owner() {
    for (service, variant) in [
        (Service::Acknowledged, Variant::Push),
        (Service::Acknowledged, Variant::Pull),
        (Service::Unacknowledged, Variant::Push),
    ] {
        let mut world = World::new(options(Role::Host, service, variant), 1);
        furnish(&mut world);
        let own = [0, 1].map(|who| -> BTreeMap<u32, u64> {
            let pools = world.ends[who].pools.values();
            pools.map(|pool| (pool.index, pool.context)).collect()
        });
        world.settle();
        let mut told: [BTreeMap<u32, u64>; 2] = Default::default();
        for (who, bytes) in &world.said[0] {
            if let (_, Message::Pools(entries)) = Message::parse(bytes).unwrap() {
                told[*who].extend(entries.iter().map(|entry| (entry.pool, entry.context)));
            }
        }
        assert_eq!(told, own);
        for who in 0..2 {
            let lengths: &[u32] = match service {
                Service::Acknowledged => &[60, 250, 1500],
                // Who is asked for more is told how many were sent, which may overtake them.
                Service::Unacknowledged => &[60],
            };
            for &length in lengths {
                world.send(who, length).unwrap();
            }
        }
        world.settle();
        assert!(world.ends.iter().all(|end| !end.seen.is_empty()));
        for (who, own) in own.iter().enumerate() {
            for index in own.keys() {
                world.ends[who].endpoint.withdraw(*index).unwrap();
            }
            world.settle();
            world.collect(who);
            assert!(world.ends[who].pools.is_empty());
        }
    }
}
