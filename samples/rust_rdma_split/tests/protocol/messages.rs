// SPDX-License-Identifier: GPL-2.0

//! Layouts, to bytes and from bytes.

use ferrite_split::*;

#[test]
fn immediate_data_say_all_that_fits_them() {
    for (pool, element, size, bits) in [
        (7, 5, 256, 0x0705_0100),
        (0, 0, 1, 1),
        (255, 255, 65_535, 0xffff_ffff),
        (1, 2, 65_536, 0x0102_0000),
    ] {
        let immediate = Immediate {
            pool,
            element,
            size,
        };
        assert_eq!(immediate.encode(), Some(bits));
        assert_eq!(Immediate::decode(bits), immediate);
    }
    for (pool, element, size) in [(256, 0, 1), (0, 256, 1), (0, 0, 65_537), (0, 0, 0)] {
        assert_eq!(
            Immediate {
                pool,
                element,
                size
            }
            .encode(),
            None
        );
    }
}

/// The two messages whose layout the source gives.
#[test]
fn flush_messages_are_as_the_source_has_them() {
    let mut request = vec![0, 4, 0, 1, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
    request.extend([0, 0, 0, 9, 0x80, 0, 0, 3]);
    let (context, message) = Message::parse(&request).unwrap();
    assert_eq!(context.number(), 0x1112_1314_1516_1718);
    let Message::FlushRequest(pools) = message else {
        panic!("a flush request");
    };
    let pools: Vec<u32> = pools.iter().map(|it| it.pool).collect();
    assert_eq!(pools, [9, REFERENCE_YOURS | 3]);
    let reply = [0, 5, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8];
    assert_eq!(Message::parse(&reply).unwrap().1, Message::FlushReply);
}

#[test]
fn joins_agree_or_are_refused() {
    let host = Join {
        magic: JOIN_MAGIC,
        version: VERSION,
        channel: Channel::Control.number(),
        role: Role::Host.number(),
        service: Service::Acknowledged.number(),
        variant: Variant::Push.number(),
        reserved: 0,
        session: 5,
        peer_session: 0,
        key: 0x0123_4567_89ab_cdef,
    };
    let unit = Join {
        role: Role::Unit.number(),
        session: 6,
        ..host
    };
    let check = |own: Join, theirs: Join| {
        // Private data are padded.
        let mut bytes = [0; 56];
        theirs.encode(&mut bytes).unwrap();
        Join::check(&own, &bytes)
    };
    assert_eq!(check(unit, host), Ok(host));
    let answer = Join {
        peer_session: 5,
        ..unit
    };
    assert_eq!(check(host, answer), Ok(answer));
    let wrong = [
        (Join { magic: 1, ..host }, Violation::BadJoin),
        (Join { version: 2, ..host }, Violation::BadVersion),
        (Join { channel: 1, ..host }, Violation::BadJoin),
        (Join { role: 2, ..host }, Violation::BadJoin),
        (Join { role: 3, ..host }, Violation::BadJoin),
        (Join { service: 2, ..host }, Violation::BadJoin),
        (Join { variant: 2, ..host }, Violation::BadJoin),
        (
            Join {
                reserved: 1,
                ..host
            },
            Violation::BadJoin,
        ),
        (Join { session: 0, ..host }, Violation::BadJoin),
        (Join { key: 0, ..host }, Violation::BadKey),
        (
            Join {
                key: host.key ^ (1 << 63),
                ..host
            },
            Violation::BadKey,
        ),
        (
            Join {
                peer_session: 7,
                ..host
            },
            Violation::OtherSession,
        ),
    ];
    for (join, violation) in wrong {
        assert_eq!(check(unit, join), Err(violation));
    }
    assert_eq!(Join::check(&unit, &[0; 27]), Err(Violation::BadJoin));
    // The data channel belongs to a control channel.
    let data = |join: Join, peer_session| Join {
        channel: Channel::Data.number(),
        peer_session,
        ..join
    };
    assert!(check(data(unit, 5), data(host, 6)).is_ok());
    assert_eq!(
        check(data(unit, 5), data(host, 0)),
        Err(Violation::OtherSession)
    );
    assert_eq!(
        check(data(unit, 4), data(host, 6)),
        Err(Violation::OtherSession)
    );
    assert_eq!(
        check(data(unit, 0), data(host, 6)),
        Err(Violation::OtherSession)
    );
}
