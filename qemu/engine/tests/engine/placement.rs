// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Atomic writes and flushes between two engines (annex A19 of the IBTA's volume 1).

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::roce::{Feth, Frame, Opcode, Packet, Reth};
use ferrite_engine::testing::{Access, Region, SendWork};

const RIGHTS: u32 = ALL | ACCESS_FLUSH_GLOBAL;

/// Two connected queue pairs, both of which let the peer flush, and a region each.
fn bench() -> (Pair, Region, Region) {
    let mut pair = Pair::new(Setup::default());
    allow(&mut pair, ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL);
    let a = pair.a.register(0x101, PD, RIGHTS, 300_000);
    let b = pair.b.register(0x201, PD, RIGHTS, 300_000);
    (pair, a, b)
}

/// What the queue pair of `b` lets its peer do.
fn allow(pair: &mut Pair, access: u32) {
    pair.b.execute(&ModifyQueuePair {
        qpn: QPN_B,
        mask: MODIFY_STATE | MODIFY_ACCESS,
        state: QueuePairStateCode::Rts.number(),
        access,
        ..ModifyQueuePair::zeroed()
    });
}

fn store(value: u64, address: u64, rkey: u32) -> SendWork {
    SendWork::new(SendOpcode::AtomicWrite, &[])
        .remote(address, rkey)
        .inline(&value.to_le_bytes())
}

fn flush(part: FlushPart) -> SendWork {
    SendWork::new(SendOpcode::Flush, &[]).part(&part)
}

fn of_range(region: &Region, offset: u64, length: u32) -> FlushPart {
    FlushPart {
        address: region.address.wrapping_add(offset),
        rkey: region.tag,
        length,
        placement: FLUSH_GLOBAL,
        selectivity: FLUSH_RANGE,
        reserved: 0,
    }
}

fn word(bytes: Vec<u8>) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

#[test]
fn an_atomic_write_stores_eight_bytes_inline_or_not() {
    let (mut pair, a, b) = bench();
    pair.b.fill(&b, 0, &[0xee; 32]);
    pair.a
        .post_send(QPN_A, &store(0x0807_0605_0403_0201, b.address + 8, b.tag));
    pair.exchange();
    let sent = pair.completions_a();
    assert_eq!(statuses(&sent), [CompletionStatus::Success]);
    assert_eq!(sent[0].opcode, CompletionOpcode::AtomicWrite.number());
    assert_eq!(
        pair.b.contents(&b, 7, 10),
        [0xee, 1, 2, 3, 4, 5, 6, 7, 8, 0xee]
    );
    assert_eq!(pair.completions_b(), []);

    pair.a.fill(&a, 3, &77u64.to_le_bytes());
    let parts = [a.sge(3, 5), a.sge(8, 3)];
    let work = SendWork::new(SendOpcode::AtomicWrite, &parts).remote(b.address + 8, b.tag);
    pair.a.post_send(QPN_A, &work);
    pair.exchange();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    assert_eq!(word(pair.b.contents(&b, 8, 8)), 77);
    // What was sent from is as it was.
    assert_eq!(word(pair.a.contents(&a, 3, 8)), 77);
}

#[test]
fn the_packets_are_those_of_the_specification() {
    let (mut pair, _, b) = bench();
    pair.a.post_send(QPN_A, &store(5, b.address, b.tag));
    pair.a.post_send(QPN_A, &flush(of_range(&b, 16, 100)));
    let mut seen = Vec::new();
    pair.exchange_with(|way, frame| {
        let parsed = Frame::parse(&frame).expect("a frame");
        let packet = Packet::parse(parsed.transport).expect("a packet");
        seen.push((
            way,
            packet.bth.opcode,
            packet.feth,
            packet.reth,
            packet.payload.bytes().unwrap().to_vec(),
        ));
        vec![frame]
    });
    let reth = |offset, length| Reth {
        address: b.address + offset,
        rkey: b.tag,
        length,
    };
    let feth = Feth {
        placement: 1,
        selectivity: 0,
    };
    assert_eq!(
        seen,
        [
            (
                Way::AToB,
                Opcode::RC_ATOMIC_WRITE,
                None,
                Some(reth(0, 8)),
                5u64.to_le_bytes().to_vec()
            ),
            (
                Way::AToB,
                Opcode::RC_FLUSH,
                Some(feth),
                Some(reth(16, 100)),
                vec![]
            ),
            (Way::BToA, Opcode::RC_READ_RESPONSE_ONLY, None, None, vec![]),
            (Way::BToA, Opcode::RC_READ_RESPONSE_ONLY, None, None, vec![]),
        ]
    );
    assert_eq!((Opcode::RC_FLUSH, Opcode::RC_ATOMIC_WRITE), (0x1c, 0x1d));
}

#[test]
fn a_flush_of_a_range_or_of_a_region_completes_after_what_was_written() {
    let (mut pair, a, b) = bench();
    let data = pattern(1, 5000);
    pair.a.fill(&a, 0, &data);
    for selectivity in [FLUSH_RANGE, FLUSH_REGION] {
        pair.b.fill(&b, 0, &vec![0; 5000]);
        let write = SendWork::new(SendOpcode::Write, &[a.sge(0, 5000)]).remote(b.address, b.tag);
        pair.a.post_send(QPN_A, &write.flags(0));
        let part = match selectivity {
            FLUSH_RANGE => of_range(&b, 0, 5000),
            // Address and length say nothing then.
            _ => FlushPart {
                address: u64::MAX,
                length: MAX_MESSAGE,
                selectivity,
                ..of_range(&b, 0, 0)
            },
        };
        pair.a.post_send(QPN_A, &flush(part));
        pair.exchange();
        let sent = pair.completions_a();
        assert_eq!(statuses(&sent), [CompletionStatus::Success]);
        assert_eq!(sent[0].opcode, CompletionOpcode::Flush.number());
        assert_eq!(pair.b.contents(&b, 0, 5000), data);
    }
}

#[test]
fn a_flush_is_answered_behind_a_full_barrier() {
    let (mut pair, _, b) = bench();
    pair.run();
    pair.b.host.accesses.replace(Some(Vec::new()));
    pair.a.post_send(QPN_A, &flush(of_range(&b, 0, 4096)));
    pair.exchange();
    let accesses = pair.b.host.accesses.replace(None).unwrap_or_default();
    assert_eq!(statuses(&pair.completions_a()), [CompletionStatus::Success]);
    // All others are behind a word by which the device shows that it has a turn, or sleeps.
    let own = |next: &[Access]| matches!(next, [Access::Load(_), Access::Fence]);
    assert!(accesses.windows(2).any(own), "{accesses:?}");
}

/// Fails, as the requester sees it and as the responder tells its consumer.
fn refused(work: &SendWork, access: u32, region: u32) -> (CompletionStatus, Vec<EventCode>) {
    let (mut pair, _, _) = bench();
    allow(&mut pair, access);
    pair.b.register(0x301, PD, region, 4096);
    pair.b.register(0x401, PD + 1, RIGHTS, 4096);
    pair.b.events(1);
    pair.a.post_send(QPN_A, work);
    pair.run();
    let status = statuses(&pair.completions_a())[0];
    let codes = pair.b.event_codes(1);
    let codes = codes
        .into_iter()
        .filter(|(_, number)| *number == QPN_B)
        .map(|(code, _)| code)
        .collect();
    (status, codes)
}

#[test]
fn what_the_peer_may_not_do_is_refused() {
    // The regions of `refused` lie where those of its bench do.
    let at = {
        let (mut pair, _, _) = bench();
        pair.b.register(0x301, PD, RIGHTS, 4096)
    };
    let all = ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL;
    let denied = (
        CompletionStatus::RemoteAccess,
        vec![EventCode::QueuePairAccessError],
    );
    let invalid = (
        CompletionStatus::RemoteInvalidRequest,
        vec![EventCode::QueuePairRequestError],
    );
    let good = of_range(&at, 0, 4096);
    let persistent = |placement| FlushPart { placement, ..good };
    let keyed = |rkey| FlushPart { rkey, ..good };
    let whole = |rkey| FlushPart {
        rkey,
        selectivity: FLUSH_REGION,
        ..good
    };
    for (name, part, access, region) in [
        ("queue pair", good, ACCESS_REMOTE, RIGHTS),
        ("region", good, all, ALL),
        ("whole region", whole(at.tag), all, ALL),
        ("persistence", persistent(FLUSH_PERSISTENT), all, RIGHTS),
        (
            "both",
            persistent(FLUSH_PERSISTENT | FLUSH_GLOBAL),
            all,
            RIGHTS,
        ),
        (
            "length",
            FlushPart {
                length: 4097,
                ..good
            },
            all,
            RIGHTS,
        ),
        ("address", of_range(&at, u64::MAX, 1), all, RIGHTS),
        ("instance", keyed(0x302), all, RIGHTS),
        ("no entry", keyed(0x9901), all, RIGHTS),
        ("no entry at all", whole(0x9901), all, RIGHTS),
        ("domain", whole(0x401), all, RIGHTS),
        ("all memory", whole(TAG_ALL_MEMORY), all, RIGHTS),
        (
            "no bytes",
            FlushPart {
                length: 0,
                ..keyed(0x9901)
            },
            all,
            RIGHTS,
        ),
    ] {
        assert_eq!(refused(&flush(part), access, region), denied, "{name}");
    }
    let write = |address| store(1, address, at.tag);
    for (name, work, access, region, outcome) in [
        (
            "queue pair",
            write(at.address),
            all & !ACCESS_REMOTE_WRITE,
            RIGHTS,
            &denied,
        ),
        (
            "region",
            write(at.address),
            all,
            RIGHTS & !ACCESS_REMOTE_WRITE,
            &denied,
        ),
        ("beyond", write(at.address + 4096), all, RIGHTS, &denied),
        ("alignment", write(at.address + 4), all, RIGHTS, &invalid),
    ] {
        assert_eq!(&refused(&work, access, region), outcome, "{name}");
    }
}

#[test]
fn a_request_that_makes_no_sense_is_not_sent() {
    let (pair, a, b) = bench();
    drop(pair);
    let good = of_range(&b, 0, 8);
    let to = |work: SendWork| work.remote(b.address, b.tag);
    for (name, work) in [
        (
            "no placement",
            flush(FlushPart {
                placement: 0,
                ..good
            }),
        ),
        (
            "placement",
            flush(FlushPart {
                placement: 4,
                ..good
            }),
        ),
        (
            "wide placement",
            flush(FlushPart {
                placement: 0x101,
                ..good
            }),
        ),
        (
            "selectivity",
            flush(FlushPart {
                selectivity: 2,
                ..good
            }),
        ),
        (
            "length",
            flush(FlushPart {
                length: MAX_MESSAGE + 1,
                ..good
            }),
        ),
        (
            "entries",
            SendWork {
                sges: vec![a.sge(0, 8)],
                ..flush(good)
            },
        ),
        ("inline", flush(good).inline(&[1])),
        (
            "four bytes",
            to(SendWork::new(SendOpcode::AtomicWrite, &[a.sge(0, 4)])),
        ),
        ("no bytes", to(SendWork::new(SendOpcode::AtomicWrite, &[]))),
        (
            "nine bytes",
            to(SendWork::new(SendOpcode::AtomicWrite, &[]).inline(&[0; 9])),
        ),
    ] {
        let (mut pair, _, _) = bench();
        pair.a.post_send(QPN_A, &work);
        pair.run_with(|way, frame| {
            assert_eq!(way, Way::BToA, "{name} was sent");
            vec![frame]
        });
        let got = statuses(&pair.completions_a());
        assert_eq!(got, [CompletionStatus::LocalQueuePairOperation], "{name}");
    }
}

#[test]
fn a_malformed_packet_is_refused_and_stores_nothing() {
    // An atomic write of another length than eight bytes, which no engine sends.
    for (announced, payload) in [(8, 4), (4, 4), (8, 0), (16, 8), (0, 8), (8, 12)] {
        let (mut pair, _, b) = bench();
        pair.b.fill(&b, 0, &[0xee; 32]);
        pair.a.post_send(QPN_A, &store(1, b.address, b.tag));
        pair.run_with(|way, frame| match way {
            Way::AToB => vec![other_length(&frame, announced, payload)],
            Way::BToA => vec![frame],
        });
        assert_eq!(
            statuses(&pair.completions_a()),
            [CompletionStatus::RemoteInvalidRequest],
            "{announced} announced, {payload} there"
        );
        assert_eq!(pair.b.contents(&b, 0, 32), [0xee; 32]);
    }
}

/// The frame of an atomic write with another length and as many bytes of data.
fn other_length(frame: &[u8], announced: u32, payload: usize) -> Vec<u8> {
    use ferrite_engine::roce::{icrc, BTH_LEN, ICRC_LEN, RETH_LEN};
    const HEADERS: usize = 14 + 20 + 8;
    let headers = HEADERS + BTH_LEN + RETH_LEN;
    let mut bytes = frame[..headers].to_vec();
    bytes[headers - 4..].copy_from_slice(&announced.to_be_bytes());
    bytes.resize(headers + payload, 1);
    let total = (bytes.len() + ICRC_LEN - 14) as u16;
    bytes[16..18].copy_from_slice(&total.to_be_bytes());
    bytes[14 + 20 + 4..14 + 20 + 6].copy_from_slice(&(total - 20).to_be_bytes());
    // The checksum of the network header, anew.
    bytes[24..26].fill(0);
    let sum: u32 = bytes[14..34]
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    let check = icrc(&bytes[14..]).expect("a network header");
    bytes.extend(check.to_le_bytes());
    bytes
}

#[test]
fn over_a_bad_wire_each_is_done_once_and_in_order() {
    for loss in [3, 5, 7] {
        let (mut pair, a, b) = bench();
        let at = b.address + 64;
        let mut count = 0;
        for round in 1..=30u64 {
            pair.a.post_send(QPN_A, &store(round, at, b.tag));
            pair.a.post_send(QPN_A, &flush(of_range(&b, 64, 8)));
            // Sees the store before it, whatever was sent again.
            let read = SendWork::new(SendOpcode::Read, &[a.sge(round * 8, 8)]).remote(at, b.tag);
            pair.a.post_send(QPN_A, &read);
            let add = SendWork::new(SendOpcode::FetchAdd, &[a.sge(4096 + round * 8, 8)]);
            pair.a.post_send(
                QPN_A,
                &add.part(&AtomicPart {
                    address: at,
                    rkey: b.tag,
                    operand: 1000,
                    ..AtomicPart::zeroed()
                }),
            );
            pair.run_with(|_, frame| {
                count += 1;
                if count % loss == 0 {
                    Vec::new()
                } else {
                    vec![frame.clone(), frame]
                }
            });
            assert_eq!(
                statuses(&pair.completions_a()),
                [CompletionStatus::Success; 4]
            );
            assert_eq!(word(pair.a.contents(&a, 4096 + round * 8, 8)), round);
            assert_eq!(word(pair.b.contents(&b, 64, 8)), round + 1000);
        }
    }
}
