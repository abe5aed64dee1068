// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Entries that become invalid with the first message that writes to them, over good and bad
//! wires.

use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Region, SendWork};
use CompletionStatus::{LocalProtection, RemoteAccess, Success};

const ONCE: u32 = ALL | ACCESS_ONE_TOUCH;

struct Bench {
    pair: Pair,
    from: Region,
    to: Region,
    data: Vec<u8>,
}

fn bench() -> Bench {
    let mut pair = Pair::new(Setup::default());
    let from = pair.a.register(0x101, PD, ALL, 16 << 10);
    let to = pair.b.register(0x201, PD, ONCE, 16 << 10);
    let data = pattern(1, 16 << 10);
    pair.a.fill(&from, 0, &data);
    Bench {
        pair,
        from,
        to,
        data,
    }
}

impl Bench {
    fn write(&self, offset: u64, length: u32) -> SendWork {
        SendWork::new(SendOpcode::Write, &[self.from.sge(0, length)])
            .remote(self.to.address + offset, self.to.tag)
    }
}

#[test]
fn one_message_of_any_length_is_taken_and_the_next_refused() {
    for length in [1, 1024, 9000] {
        let mut bench = bench();
        let (first, second) = (bench.write(0, length), bench.write(9000, 100));
        bench.pair.a.post_send(QPN_A, &first);
        bench.pair.a.post_send(QPN_A, &second);
        bench.pair.exchange();
        assert_eq!(
            statuses(&bench.pair.completions_a()),
            [Success, RemoteAccess]
        );
        let got = bench.pair.b.contents(&bench.to, 0, length as usize);
        assert_eq!(got, bench.data[..length as usize]);
        let untouched = bench.pair.b.contents(&bench.to, 9000, 100);
        assert_eq!(untouched, [0; 100]);
        assert_eq!(
            bench
                .pair
                .b
                .object_command(CommandOpcode::ReleaseTag, bench.to.tag),
            CommandStatus::Ok
        );
    }
}

#[test]
fn loss_repetition_and_disorder_make_no_second_message() {
    // Each packet in turn is lost, doubled, or held back behind the next, the last ones of the
    // message among them; so are the acknowledgements.
    for victim in 0..14 {
        for kind in 0..3 {
            let mut bench = bench();
            let write = bench.write(0, 9000);
            bench.pair.a.post_send(QPN_A, &write);
            let mut n = 0;
            let mut held: Option<(Way, Vec<u8>)> = None;
            bench.pair.run_with(|way, frame| {
                n += 1;
                let mut out = Vec::new();
                if n == victim + 1 {
                    match kind {
                        0 => {}
                        1 => out.extend([frame.clone(), frame]),
                        _ => held = Some((way, frame)),
                    }
                    return out;
                }
                out.push(frame);
                if held.as_ref().is_some_and(|(held_way, _)| *held_way == way) {
                    out.extend(held.take().map(|(_, frame)| frame));
                }
                out
            });
            let name = format!("packet {victim}, fault {kind}");
            assert_eq!(statuses(&bench.pair.completions_a()), [Success], "{name}");
            let got = bench.pair.b.contents(&bench.to, 0, 9000);
            assert!(got == bench.data[..9000], "{name}");
            // It is over nevertheless.
            let again = bench.write(0, 1);
            bench.pair.a.post_send(QPN_A, &again);
            bench.pair.run();
            assert_eq!(
                statuses(&bench.pair.completions_a()),
                [RemoteAccess],
                "{name}"
            );
        }
    }
}

#[test]
fn reads_by_the_peer_do_not_touch_and_atomics_do() {
    let mut bench = bench();
    let read = SendWork::new(SendOpcode::Read, &[bench.from.sge(0, 5000)])
        .remote(bench.to.address, bench.to.tag);
    for _ in 0..2 {
        bench.pair.a.post_send(QPN_A, &read);
        bench.pair.exchange();
    }
    assert_eq!(statuses(&bench.pair.completions_a()), [Success; 2]);
    let add = SendWork::new(SendOpcode::FetchAdd, &[bench.from.sge(0, 8)]).part(&AtomicPart {
        address: bench.to.address,
        rkey: bench.to.tag,
        reserved: 0,
        operand: 1,
        compare: 0,
    });
    bench.pair.a.post_send(QPN_A, &add);
    bench.pair.a.post_send(QPN_A, &add);
    bench.pair.exchange();
    assert_eq!(
        statuses(&bench.pair.completions_a()),
        [Success, RemoteAccess]
    );
    assert_eq!(bench.pair.b.contents(&bench.to, 0, 1), [1]);
}

#[test]
fn the_answer_to_a_read_touches_where_it_is_placed() {
    let mut pair = Pair::new(Setup::default());
    let sink = pair.a.register(0x101, PD, ONCE, 16 << 10);
    let source = pair.b.register(0x201, PD, ALL, 16 << 10);
    let data = pattern(3, 9000);
    pair.b.fill(&source, 0, &data);
    let read = SendWork::new(SendOpcode::Read, &[sink.sge(0, 4000), sink.sge(5000, 5000)])
        .remote(source.address, source.tag);
    pair.a.post_send(QPN_A, &read);
    let mut n = 0;
    pair.run_with(|_, frame| {
        n += 1;
        if n == 4 {
            vec![]
        } else {
            vec![frame]
        }
    });
    assert_eq!(statuses(&pair.completions_a()), [Success]);
    assert_eq!(pair.a.contents(&sink, 0, 4000), data[..4000]);
    assert_eq!(pair.a.contents(&sink, 5000, 5000), data[4000..]);
    pair.a.post_send(QPN_A, &read);
    pair.run();
    assert_eq!(statuses(&pair.completions_a()), [LocalProtection]);
}

#[test]
fn an_entry_of_a_queue_is_registered_again_after_its_message() {
    let mut bench = bench();
    let page = bench.pair.b.allocate(4096);
    bench.pair.b.execute(&AllocateTag {
        tag: Tag::new(0x30, 0).0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    });
    for instance in 1..4 {
        let tag = Tag::new(0x30, instance);
        let register = SendWork::new(SendOpcode::FastRegister, &[]).part(&FastRegisterPart {
            tag: tag.0,
            access: ONCE,
            address: 0,
            buffer: Buffer::contiguous(page, 4096),
            reserved: 0,
        });
        bench.pair.b.post_send(QPN_B, &register);
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_b()), [Success]);
        let write = SendWork::new(SendOpcode::Write, &[bench.from.sge(0, 4096)]).remote(0, tag.0);
        bench.pair.a.post_send(QPN_A, &write);
        bench.pair.exchange();
        assert_eq!(statuses(&bench.pair.completions_a()), [Success]);
    }
}
