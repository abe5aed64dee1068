// SPDX-License-Identifier: GPL-2.0

//! Both state machines against each other.

use crate::config;
use crate::world::{options, World, SMALLEST};
use ferrite_split::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Pools of several sizes at both ends; some so that 32 bits do not suffice.
pub fn furnish(world: &mut World) {
    let kind = match world.options.variant {
        Variant::Push => PoolKind::Write,
        Variant::Pull => PoolKind::Read,
    };
    for who in 0..2 {
        world.announce(who, 3, 4, 200, PoolKind::Send);
        if world.options.service == Service::Acknowledged {
            world.announce(who, 0, 5, 256, kind);
            world.announce(who, 7, 3, 1600, kind);
            world.announce(who, 255, 257, 300, kind);
            world.announce(who, 256, 2, 1600, kind);
            world.announce(who, 1 << 20, 2, 70_000, kind);
        }
    }
}

pub fn operation(number: u64) -> (Operation, Vec<u8>) {
    let address = |first| vec![first, 0, 0, 0, 0, 1, 0, 0];
    match number {
        0 => (Operation::GetMac, vec![]),
        1 => (Operation::SetMac, address(2)),
        2 => (Operation::GetStatistics, vec![]),
        3 => (Operation::GetLink, vec![]),
        4 => (Operation::GetMtu, vec![]),
        5 => (Operation::SetMtu, vec![0, 0, 5, 220]),
        6 => (Operation::AddVlan, vec![0, 5, 0, 0]),
        7 => (Operation::RemoveVlan, vec![0, 5, 0, 0]),
        8 => (Operation::AddMulticast, address(1)),
        9 => (Operation::RemoveMulticast, address(1)),
        _ => (Operation::SetFilter, vec![0, 0, 0, 3]),
    }
}

/// Does what `script` says, then lets all come to rest.
fn run(world: &mut World, script: &[(u8, u32)], may_restart: bool, may_flush: bool) {
    let mut restarts = 0;
    for &(what, parameter) in script {
        let who = (parameter & 1) as usize;
        let parameter = parameter >> 1;
        match what {
            0..40 => {
                let lengths = [
                    SMALLEST, 60, 128, 129, 200, 201, 256, 300, 1500, 65_536, 69_000,
                ];
                let length = lengths[parameter as usize % lengths.len()];
                let _ = world.send(who, length);
            }
            40..44 => world.tick(u64::from(parameter % 12)),
            44..48 if world.ends[who].asked.is_none() => {
                let (operation, data) = match who {
                    0 => operation(u64::from(parameter % 11)),
                    _ => (Operation::LinkChanged, vec![0; 12]),
                };
                world.ends[who].endpoint.request(operation, &data).unwrap();
                world.ends[who].asked = Some(operation);
            }
            48..50 if may_flush => {
                world.is_shaken = true;
                let owner = match parameter / 8 % 2 {
                    0 => who,
                    _ => 1 - who,
                };
                let pools: Vec<u32> = world.ends[owner].pools.keys().copied().collect();
                if pools.is_empty() {
                    continue;
                }
                let index = pools[parameter as usize % pools.len()];
                let _ = match parameter / 8 % 2 {
                    0 => world.ends[who].endpoint.withdraw(index),
                    _ => world.ends[who].endpoint.renounce(index),
                };
                world.collect(who);
            }
            50..52 if may_flush => furnish(world),
            52 if may_restart && parameter % 4 == 0 => {
                world.restart();
                restarts += 1;
            }
            _ => {
                for _ in 0..1 + parameter / 16 % 4 {
                    world.step(who, parameter);
                }
            }
        }
    }
    world.loss = 0;
    world.settle();
    for who in 0..2 {
        let end = &world.ends[who];
        assert_eq!(end.asked, None, "an answer is missing");
        let counters = end.endpoint.counters();
        let peer = world.ends[1 - who].endpoint.counters();
        assert_eq!(counters.violations.iter().sum::<u64>(), 0);
        if restarts == 0 {
            assert_eq!(end.under_way.len() as u64, peer.lost, "frames are lost");
            assert_eq!(peer.received + peer.lost, end.sent);
        }
        let by_all = counters.sent_by_message + counters.sent_by_write + counters.sent_by_read;
        assert_eq!(by_all, end.sent);
        if world.options.service == Service::Acknowledged {
            assert_eq!((peer.lost, counters.resent, counters.repeated), (0, 0, 0));
        }
    }
}

/// All elements are where they were at first: as many frames can be sent at once as there are elements.
fn is_whole(world: &mut World) {
    furnish(world);
    world.settle();
    for who in 0..2 {
        // Large ones first, which fit only large elements.
        let sizes = match world.options.service {
            Service::Acknowledged => vec![(70_000, 2), (1600, 5), (300, 257), (256, 5), (200, 4)],
            Service::Unacknowledged => vec![(200, 4)],
        };
        for (length, count) in sizes {
            for _ in 0..count {
                assert_eq!(world.send(who, length), Ok(()), "{length}");
            }
            assert_eq!(world.send(who, length), Err(Unsent::NoElement));
        }
    }
    world.settle();
    assert!(world
        .ends
        .iter()
        .all(|end| end.under_way.is_empty() || end.sent > 0));
}

/// An orderly end: each pool is given back.
fn close(world: &mut World) {
    for who in 0..2 {
        world.ends[who].endpoint.close();
        world.collect(who);
        assert_eq!(world.send(who, SMALLEST), Err(Unsent::Closed));
    }
    world.settle();
    for end in &world.ends {
        assert!(end.endpoint.is_closed());
        assert!(end.pools.is_empty());
    }
    buffers_add_up(world);
}

/// Each element that was announced was flushed, or went with a connection; where no connection was lost, both ends have
/// counted the same.
fn buffers_add_up(world: &World) {
    let [host, unit] = [0, 1].map(|who| {
        let counters = world.ends[who].endpoint.counters();
        let ended = (counters.elements_flushed, counters.elements_forfeited);
        assert_eq!(counters.elements_announced, ended.0 + ended.1);
        assert!(ended.0 > 0);
        ended
    });
    if world.restarts() == 0 {
        assert_eq!((host, host.1), (unit, 0));
    }
}

fn script() -> impl Strategy<Value = Vec<(u8, u32)>> {
    vec((any::<u8>(), any::<u32>()), 0..400)
}

fn push_or_pull() -> impl Strategy<Value = Variant> {
    prop_oneof![Just(Variant::Push), Just(Variant::Pull)]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn no_frame_is_lost_twice_there_or_torn(
        script in script(), variant in push_or_pull(), separate: bool, threshold in 0..300u32,
        may_flush: bool, seed: u64,
    ) {
        let options = Options {
            separate_indication: separate,
            threshold,
            ..options(Role::Host, Service::Acknowledged, variant)
        };
        let mut world = World::new(options, seed);
        furnish(&mut world);
        run(&mut world, &script, false, may_flush);
        is_whole(&mut world);
        close(&mut world);
    }

    #[test]
    fn nothing_leaks_over_new_connections(
        script in script(), variant in push_or_pull(), separate: bool, seed: u64,
    ) {
        let options = Options {
            separate_indication: separate,
            ..options(Role::Host, Service::Acknowledged, variant)
        };
        let mut world = World::new(options, seed);
        world.is_shaken = true;
        furnish(&mut world);
        run(&mut world, &script, true, true);
        is_whole(&mut world);
        close(&mut world);
    }

    #[test]
    fn what_a_lossy_channel_loses_is_counted_and_nothing_else_is_lost(
        script in script(), loss in 0..160u8, may_restart: bool, may_flush: bool, seed: u64,
    ) {
        let options = options(Role::Host, Service::Unacknowledged, Variant::Push);
        let mut world = World::new(options, seed);
        world.loss = loss;
        world.is_shaken = true;
        furnish(&mut world);
        run(&mut world, &script, may_restart, may_flush);
        is_whole(&mut world);
        close(&mut world);
    }
}

pub fn furnished(options: Options) -> World {
    let mut world = World::new(options, 1);
    furnish(&mut world);
    world.settle();
    world
}

#[test]
fn frames_travel_as_the_threshold_says() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let by = |world: &World| {
        let counters = world.ends[0].endpoint.counters();
        (counters.sent_by_message, counters.sent_by_write)
    };
    world.send(0, 128).unwrap();
    assert_eq!(by(&world), (1, 0));
    world.send(0, 129).unwrap();
    assert_eq!(by(&world), (1, 1));
    world.ends[0].endpoint.set_threshold(129);
    world.send(0, 129).unwrap();
    assert_eq!(by(&world), (2, 1));
    // Where there is no more room for messages, elements serve as well, and the other way.
    for _ in 0..3 {
        world.send(0, 10).unwrap();
    }
    assert_eq!(by(&world), (4, 2));
    world.settle();
    assert!(world.ends[0].under_way.is_empty());
}

#[test]
fn what_32_bits_cannot_say_is_told_by_a_message() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let told = |world: &World| {
        let counters = world.ends[0].endpoint.counters();
        (counters.told_by_immediate, counters.told_by_indicate)
    };
    world.send(0, 1500).unwrap();
    world.settle();
    assert_eq!(told(&world), (1, 0));
    // A frame that is too large, in a pool whose index is.
    world.send(0, 69_000).unwrap();
    world.settle();
    assert_eq!(told(&world), (1, 1));
    // The pool of 257 elements: the last is beyond 8 bits.
    for _ in 0..257 {
        world.send(0, 290).unwrap();
    }
    world.settle();
    assert_eq!(told(&world), (257, 2));
    assert!(world.ends[0].under_way.is_empty());
}

#[test]
fn dropped_frames_are_counted_and_more_is_asked_for() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    assert_eq!(
        world.ends[0].endpoint.can_send(70_001),
        Err(Unsent::TooLarge)
    );
    assert_eq!(world.send(0, 70_001), Err(Unsent::TooLarge));
    assert_eq!(world.send(0, 0), Err(Unsent::Empty));
    for _ in 0..2 {
        world.send(0, 65_000).unwrap();
    }
    assert_eq!(
        world.ends[0].endpoint.can_send(65_000),
        Err(Unsent::NoElement)
    );
    assert_eq!(world.send(0, 65_000), Err(Unsent::NoElement));
    let counters = *world.ends[0].endpoint.counters();
    assert_eq!(
        (counters.dropped_no_element, counters.dropped_too_large),
        (1, 1)
    );
    // It is the first one that is asked for.
    let mut bytes = [0; CONTROL_MAX];
    let length = world.ends[0]
        .endpoint
        .poll_control(&mut bytes)
        .unwrap()
        .length;
    let event = world.ends[1].endpoint.receive_control(&bytes[..length]);
    assert_eq!(
        event,
        Ok(Event::Wanted {
            elements: 1,
            element_size: 70_001
        })
    );
    world.ends[0].endpoint.control_done(Token::OneWay);
    world.settle();
    assert_eq!(world.ends[0].endpoint.can_send(65_000), Ok(()));
    world.ends[0].endpoint.stop();
    assert_eq!(world.send(0, 60), Err(Unsent::Closed));
    assert_eq!(world.ends[0].endpoint.counters().dropped_closed, 1);
}

#[test]
fn who_waits_asks_once_until_something_is_given() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    for _ in 0..2 {
        world.send(0, 65_000).unwrap();
    }
    let host = &mut world.ends[0].endpoint;
    let mut bytes = [0; CONTROL_MAX];
    let mut ask = |host: &mut Endpoint<_>| {
        assert_eq!(host.can_send(65_000), Err(Unsent::NoElement));
        host.want(65_000);
        let outgoing = host.poll_control(&mut bytes)?;
        host.control_done(outgoing.token);
        Some(bytes[..outgoing.length].to_vec())
    };
    let asked = ask(host).unwrap();
    assert_eq!(ask(host), None);
    // Nothing was dropped: the frame is still somebody's.
    assert_eq!(host.counters().dropped_no_element, 0);
    let event = world.ends[1].endpoint.receive_control(&asked);
    assert_eq!(
        event,
        Ok(Event::Wanted {
            elements: 1,
            element_size: 65_000
        })
    );
}

#[test]
fn what_could_not_be_posted_was_not_sent() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let endpoint = &mut world.ends[0].endpoint;
    let before = *endpoint.counters();
    for length in [60, 250, 1500, 69_000] {
        let transfer = endpoint.send(length).unwrap();
        endpoint.unsend(transfer).unwrap();
        assert_eq!(endpoint.unsend(transfer), Err(Misuse::NotHeld), "{length}");
    }
    assert_eq!(*endpoint.counters(), before);
    is_whole(&mut world);
}

#[test]
fn a_caller_gives_back_only_what_it_holds() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let Ok(Transfer::Write {
        immediate, handle, ..
    }) = world.ends[0].endpoint.send(1500)
    else {
        panic!("a frame that is written");
    };
    assert_eq!(world.ends[0].endpoint.release(handle), Err(Misuse::NotHeld));
    let endpoint = &mut world.ends[1].endpoint;
    endpoint
        .receive_immediate(immediate.unwrap(), 1500)
        .unwrap();
    let arrival = endpoint.next_arrival().unwrap();
    assert_eq!(endpoint.written(arrival.handle), Err(Misuse::NotHeld));
    endpoint.release(arrival.handle).unwrap();
    assert_eq!(endpoint.release(arrival.handle), Err(Misuse::NotHeld));
    assert_eq!(endpoint.reply(Status::Done, &[]), Err(Misuse::Busy));
    assert_eq!(endpoint.withdraw(99), Err(Misuse::NoPool));
    assert_eq!(endpoint.renounce(99), Err(Misuse::NoPool));
    let bad = [
        (Operation::GetMac, &[][..]),
        (Operation::LinkChanged, &[0; 11][..]),
    ];
    for (operation, data) in bad {
        assert_eq!(endpoint.request(operation, data), Err(Misuse::BadRequest));
    }
    endpoint.request(Operation::LinkChanged, &[0; 12]).unwrap();
    assert_eq!(
        endpoint.request(Operation::LinkChanged, &[0; 12]),
        Err(Misuse::Busy)
    );
}

#[test]
fn a_connection_that_was_lost_takes_no_frame_that_has_arrived() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let Ok(Transfer::Write { immediate, .. }) = world.ends[0].endpoint.send(1500) else {
        panic!("a frame that is written");
    };
    let endpoint = &mut world.ends[1].endpoint;
    endpoint
        .receive_immediate(immediate.unwrap(), 1500)
        .unwrap();
    world.restart();
    // Its pool is announced only when it is taken out.
    let mut pools = 0;
    let mut bytes = [0; CONTROL_MAX];
    let endpoint = &mut world.ends[1].endpoint;
    let announced = |endpoint: &mut Endpoint<_>, bytes: &mut _| {
        let length = endpoint.poll_control(bytes).map(|it: Outgoing| it.length)?;
        endpoint.control_done(Token::OneWay);
        match Message::parse(&bytes[..length]).unwrap().1 {
            Message::Pools(entries) => Some(entries.iter().count()),
            _ => None,
        }
    };
    while let Some(more) = announced(endpoint, &mut bytes) {
        pools += more;
    }
    assert_eq!(pools, 5);
    let arrival = endpoint.next_arrival().unwrap();
    assert_eq!(arrival.length, 1500);
    endpoint.release(arrival.handle).unwrap();
    assert_eq!(announced(endpoint, &mut bytes), Some(1));
}

#[test]
fn buffers_that_are_flushed_are_told_from_those_that_go_with_a_connection() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let counted = |world: &World, who: usize| {
        let counters = world.ends[who].endpoint.counters();
        (
            counters.elements_announced,
            counters.elements_flushed,
            counters.elements_forfeited,
        )
    };
    // Of each side.
    let all: u64 = world.ends[0]
        .pools
        .values()
        .map(|pool| u64::from(pool.elements))
        .sum();
    let both = 2 * all;
    // By the owner, and by the other.
    world.ends[0].endpoint.withdraw(7).unwrap();
    world.ends[1].endpoint.renounce(0).unwrap();
    world.settle();
    for who in 0..2 {
        world.collect(who);
        assert_eq!(counted(&world, who), (both, 3 + 5, 0));
    }
    world.restart();
    for who in 0..2 {
        assert_eq!(counted(&world, who), (both, 8, both - 8));
    }
    world.settle();
    close(&mut world);
    for who in 0..2 {
        let again = both - 8;
        assert_eq!(counted(&world, who), (both + again, 8 + again, again));
    }
}

#[test]
fn a_peer_that_stops_is_given_up() {
    for service in [Service::Acknowledged, Service::Unacknowledged] {
        let mut world = furnished(options(Role::Host, service, Variant::Push));
        let endpoint = &mut world.ends[0].endpoint;
        endpoint.request(Operation::GetMac, &[]).unwrap();
        let mut bytes = [0; CONTROL_MAX];
        endpoint.poll_control(&mut bytes).unwrap();
        let now = world.now;
        assert_eq!(endpoint.tick(now + world.options.patience - 1), Ok(()));
        assert_eq!(
            endpoint.tick(now + world.options.patience),
            Err(Violation::Silent)
        );
        assert_eq!(endpoint.counters().of(Violation::Silent), 1);
        assert!(!endpoint.is_running());
    }
}

#[test]
fn a_host_that_says_nothing_is_given_up_by_its_unit() {
    for service in [Service::Acknowledged, Service::Unacknowledged] {
        let mut world = furnished(options(Role::Host, service, Variant::Push));
        let (now, patience) = (world.now, world.options.patience);
        let [host, unit] = &mut world.ends;
        let (host, unit) = (&mut host.endpoint, &mut unit.endpoint);
        unit.tick(now).unwrap();
        host.tick(now).unwrap();
        // Whatever it says will do.
        host.request(Operation::GetStatistics, &[]).unwrap();
        let mut bytes = [0; CONTROL_MAX];
        let outgoing = host.poll_control(&mut bytes).unwrap();
        unit.tick(now + patience).unwrap();
        unit.receive_control(&bytes[..outgoing.length]).unwrap();
        assert_eq!(unit.tick(now + 4 * patience - 1), Ok(()));
        assert_eq!(unit.tick(now + 4 * patience), Err(Violation::Silent));
        assert_eq!(unit.counters().of(Violation::Silent), 1);
        // An I/O unit need not say anything.
        world.restart();
        let host = &mut world.ends[0].endpoint;
        assert_eq!(host.tick(now + 20 * patience), Ok(()));
        // A connection begins with the time there is, not with that of the one before.
        let unit = &mut world.ends[1].endpoint;
        assert_eq!(unit.tick(now + 7 * patience - 1), Ok(()));
        assert_eq!(unit.tick(now + 7 * patience), Err(Violation::Silent));
    }
}

#[test]
fn an_io_unit_that_gives_nothing_back_is_given_up() {
    for variant in [Variant::Push, Variant::Pull] {
        for length in [60, 1500] {
            let mut world = furnished(options(Role::Host, Service::Acknowledged, variant));
            let patience = world.options.patience;
            let [host, unit] = &mut world.ends;
            let (host, unit) = (&mut host.endpoint, &mut unit.endpoint);
            // Who has sent nothing waits for nothing.
            let now = world.now + patience * 3 / 2;
            host.tick(now).unwrap();
            unit.send(length).unwrap();
            unit.tick(now).unwrap();
            host.send(length).unwrap();
            // What others of that pool are sent later does not make it younger.
            host.tick(now + patience - 1).unwrap();
            host.send(length).unwrap();
            assert_eq!(host.tick(now + patience), Err(Violation::Silent));
            assert_eq!(host.counters().of(Violation::Silent), 1);
            // That a host gives nothing back harms none but itself.
            unit.tick(now + patience).unwrap();
        }
    }
}

#[test]
fn an_io_unit_that_gives_something_back_has_time_again() {
    let mut world = furnished(options(Role::Host, Service::Acknowledged, Variant::Push));
    let (now, patience) = (world.now, world.options.patience);
    let [host, unit] = &mut world.ends;
    let (host, unit) = (&mut host.endpoint, &mut unit.endpoint);
    host.tick(now).unwrap();
    let mut immediates = Vec::new();
    for _ in 0..2 {
        let Ok(Transfer::Write { immediate, .. }) = host.send(1500) else {
            panic!("a frame that is written");
        };
        immediates.push(immediate.unwrap());
    }
    unit.receive_immediate(immediates[0], 1500).unwrap();
    let arrival = unit.next_arrival().unwrap();
    unit.release(arrival.handle).unwrap();
    let mut bytes = [0; CONTROL_MAX];
    let outgoing = unit.poll_control(&mut bytes).unwrap();
    host.tick(now + patience - 1).unwrap();
    host.receive_control(&bytes[..outgoing.length]).unwrap();
    host.tick(now + 2 * patience - 2).unwrap();
    assert_eq!(host.tick(now + 2 * patience - 1), Err(Violation::Silent));
}
