// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The order in which a responder carries requests out (IBTA volume 1, 9.5 and table 79): sends,
//! writes and atomics as they come, reads where they stand or later, but never behind a fence.
//!
//! The oracle is a sequential model. Random programs on a few words that everybody writes to run
//! over a bad wire; after every single frame the responder's memory and its receives must be those
//! of the model after some number of steps, and that number only grows.

use crate::config;
use crate::wire::*;
use ferrite_abi::*;
use ferrite_engine::testing::{Region, SendWork};
use proptest::prelude::*;

const RIGHTS: u32 = ALL | ACCESS_FLUSH_GLOBAL;

/// Bytes of the longest read. The words are at its end, where it comes to last.
const LONG: u64 = 40_000;
/// Words that are written to.
const WORDS: usize = 4;
const FIRST_WORD: u64 = LONG - 8 * WORDS as u64;
/// Most steps of a program.
const STEPS: usize = 24;
/// Where the small operands and results of each step are, at the requester, behind the data of
/// long reads.
const SLOT: u64 = 64;
/// Bytes of each send, and of the receive it is placed in.
const MESSAGE: usize = 24;

type Words = [u64; WORDS];

/// What one work request does.
#[derive(Clone, Debug)]
enum Action {
    Read {
        words: std::ops::Range<usize>,
    },
    LongRead,
    FetchAdd {
        word: usize,
        operand: u64,
    },
    CompareSwap {
        word: usize,
        hits: bool,
        new: u64,
    },
    Write {
        words: std::ops::Range<usize>,
        value: u64,
        immediate: bool,
    },
    Send {
        invents: u64,
    },
    AtomicWrite {
        word: usize,
        value: u64,
    },
    Flush,
}

#[derive(Clone, Debug)]
struct Step {
    action: Action,
    fence: bool,
}

fn some_words() -> impl Strategy<Value = std::ops::Range<usize>> {
    (0..WORDS, 1..=WORDS).prop_map(|(first, count)| first..(first + count).min(WORDS))
}

fn step() -> impl Strategy<Value = Step> {
    let action = prop_oneof![
        2 => some_words().prop_map(|words| Action::Read { words }),
        1 => Just(Action::LongRead),
        3 => (0..WORDS, 1..1000u64)
            .prop_map(|(word, operand)| Action::FetchAdd { word, operand }),
        3 => (0..WORDS, any::<bool>(), any::<u64>())
            .prop_map(|(word, hits, new)| Action::CompareSwap { word, hits, new }),
        3 => (some_words(), any::<u64>(), any::<bool>())
            .prop_map(|(words, value, immediate)| Action::Write { words, value, immediate }),
        2 => any::<u64>().prop_map(|invents| Action::Send { invents }),
        2 => (0..WORDS, any::<u64>())
            .prop_map(|(word, value)| Action::AtomicWrite { word, value }),
        1 => Just(Action::Flush),
    ];
    (action, prop::bool::weighted(0.1)).prop_map(|(action, fence)| Step { action, fence })
}

/// A program and what it has to do: the words after each number of steps, what each atomic
/// fetches, the receives that are complete.
struct Model {
    steps: Vec<Step>,
    history: Vec<Words>,
    fetched: Vec<Option<u64>>,
    /// Receives complete after each number of steps.
    received: Vec<usize>,
}

/// The bytes of a send.
fn message(invents: u64) -> Vec<u8> {
    pattern(invents, MESSAGE)
}

impl Model {
    fn of(steps: Vec<Step>) -> Self {
        let mut words = [0u64; WORDS];
        let mut receives = 0;
        let mut model = Self {
            history: vec![words],
            fetched: Vec::new(),
            received: vec![0],
            steps: Vec::new(),
        };
        for step in &steps {
            let mut fetched = None;
            match step.action {
                Action::Read { .. } | Action::LongRead | Action::Flush => {}
                Action::FetchAdd { word, operand } => {
                    fetched = Some(words[word]);
                    words[word] = words[word].wrapping_add(operand);
                }
                Action::CompareSwap { word, hits, new } => {
                    fetched = Some(words[word]);
                    if hits {
                        words[word] = new;
                    }
                }
                Action::Write {
                    words: ref which,
                    value,
                    immediate,
                } => {
                    words[which.clone()].fill(value);
                    receives += usize::from(immediate);
                }
                Action::Send { .. } => receives += 1,
                Action::AtomicWrite { word, value } => words[word] = value,
            }
            model.fetched.push(fetched);
            model.history.push(words);
            model.received.push(receives);
        }
        model.steps = steps;
        model
    }

    fn receives(&self) -> usize {
        self.received[self.steps.len()]
    }

    /// Values that word `word` may have for the read that is step `at`: what it holds when all
    /// before it is done, or anything until the next fence.
    fn readable(&self, at: usize, word: usize) -> Vec<u64> {
        let fence = self.steps[at + 1..]
            .iter()
            .position(|step| step.fence)
            .map_or(self.steps.len(), |ahead| at + 1 + ahead);
        self.history[at..=fence]
            .iter()
            .map(|words| words[word])
            .collect()
    }

    /// The work request of step `at`.
    fn work(&self, pair: &mut Pair, at: usize, a: &Region, b: &Region) -> SendWork {
        let slot = LONG + at as u64 * SLOT;
        let address = |word: usize| b.address + FIRST_WORD + 8 * word as u64;
        let atomic = |opcode, word, operand, compare| {
            SendWork::new(opcode, &[a.sge(slot, 8)]).part(&AtomicPart {
                address: address(word),
                rkey: b.tag,
                operand,
                compare,
                ..AtomicPart::zeroed()
            })
        };
        let step = &self.steps[at];
        let work = match step.action {
            Action::Read { ref words } => {
                let length = 8 * words.len() as u32;
                SendWork::new(SendOpcode::Read, &[a.sge(slot, length)])
                    .remote(address(words.start), b.tag)
            }
            Action::LongRead => {
                // Only the words are looked at: every long read may go to the same place but them.
                let start = a.sge(0, FIRST_WORD as u32);
                let words = a.sge(slot, 8 * WORDS as u32);
                SendWork::new(SendOpcode::Read, &[start, words]).remote(b.address, b.tag)
            }
            Action::FetchAdd { word, operand } => atomic(SendOpcode::FetchAdd, word, operand, 0),
            Action::CompareSwap { word, hits, new } => {
                let held = self.history[at][word];
                let compare = if hits { held } else { !held };
                atomic(SendOpcode::CompareSwap, word, new, compare)
            }
            Action::Write {
                ref words,
                value,
                immediate,
            } => {
                let data = value.to_le_bytes().repeat(words.len());
                pair.a.fill(a, slot, &data);
                let opcode = if immediate {
                    SendOpcode::WriteImmediate
                } else {
                    SendOpcode::Write
                };
                SendWork::new(opcode, &[a.sge(slot, data.len() as u32)])
                    .remote(address(words.start), b.tag)
                    .immediate(at as u32)
            }
            Action::Send { invents } => {
                pair.a.fill(a, slot, &message(invents));
                SendWork::new(SendOpcode::SendImmediate, &[a.sge(slot, MESSAGE as u32)])
                    .immediate(at as u32)
            }
            Action::AtomicWrite { word, value } => SendWork::new(SendOpcode::AtomicWrite, &[])
                .remote(address(word), b.tag)
                .inline(&value.to_le_bytes()),
            Action::Flush => SendWork::new(SendOpcode::Flush, &[]).part(&FlushPart {
                address: address(0),
                rkey: b.tag,
                length: 8 * WORDS as u32,
                placement: FLUSH_GLOBAL,
                selectivity: FLUSH_RANGE,
                reserved: 0,
            }),
        };
        let fence = if step.fence { SEND_FENCE } else { 0 };
        work.flags(SEND_SIGNALED | fence)
    }
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
        .collect()
}

/// A program under way.
struct Run {
    model: Model,
    pair: Pair,
    a: Region,
    b: Region,
    inbox: Region,
    /// Steps that the responder has carried out, at least.
    done: usize,
    posted_receives: usize,
    received: Vec<CompletionEntry>,
}

impl Run {
    fn start(steps: Vec<Step>, setup: Setup) -> Self {
        let model = Model::of(steps);
        let mut pair = Pair::new(setup);
        pair.b.execute(&ModifyQueuePair {
            qpn: QPN_B,
            mask: MODIFY_STATE | MODIFY_ACCESS,
            state: QueuePairStateCode::Rts.number(),
            access: ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL,
            ..ModifyQueuePair::zeroed()
        });
        let a = pair
            .a
            .register(0x101, PD, RIGHTS, LONG + STEPS as u64 * SLOT);
        let b = pair.b.register(0x201, PD, RIGHTS, LONG);
        let inbox = pair.b.register(0x301, PD, RIGHTS, (STEPS * MESSAGE) as u64);
        for at in 0..model.steps.len() {
            let work = model.work(&mut pair, at, &a, &b);
            pair.a.post_send(QPN_A, &work);
        }
        Self {
            model,
            pair,
            a,
            b,
            inbox,
            done: 0,
            posted_receives: 0,
            received: Vec::new(),
        }
    }

    fn post_receive(&mut self) {
        if self.posted_receives < self.model.receives() {
            let at = (self.posted_receives * MESSAGE) as u64;
            let sge = self.inbox.sge(at, MESSAGE as u32);
            self.pair.b.post_recv(QPN_B, &[sge]);
            self.posted_receives += 1;
        }
    }

    /// Compares what the responder has done with the model.
    fn check_responder(&mut self) {
        self.received.extend(self.pair.completions_b());
        let bytes = self.pair.b.contents(&self.b, FIRST_WORD, 8 * WORDS);
        let words = words_of(&bytes);
        let model = &self.model;
        let done = (self.done..=model.steps.len())
            .find(|&n| words == model.history[n] && self.received.len() == model.received[n]);
        self.done = done.unwrap_or_else(|| {
            panic!(
                "{words:x?} with {} receives is no state after step {}: {:x?}",
                self.received.len(),
                self.done,
                &model.history[self.done..]
            )
        });
    }

    /// Carries frames until all is done; what is left of the receives is posted as time passes.
    fn finish(&mut self, mut fate: impl FnMut(Way, Vec<u8>) -> Vec<Vec<u8>>) {
        for _ in 0..100_000 {
            self.pair.poll();
            let mut moved = false;
            for frame in std::mem::take(&mut self.pair.a.host.sent) {
                moved = true;
                for frame in fate(Way::AToB, frame) {
                    self.pair.b.receive(&frame);
                    self.check_responder();
                }
            }
            for frame in std::mem::take(&mut self.pair.b.host.sent) {
                moved = true;
                for frame in fate(Way::BToA, frame) {
                    self.pair.a.receive(&frame);
                }
            }
            if !moved {
                if !self.pair.pass_time() {
                    return;
                }
                self.post_receive();
            }
        }
        panic!("no end in sight");
    }

    /// Everything was done once and has the results of the model.
    fn verify(&mut self) {
        let model = &self.model;
        let count = model.steps.len();
        let sent = self.pair.completions_a();
        assert_eq!(statuses(&sent), vec![CompletionStatus::Success; count]);
        assert!(sent.windows(2).all(|pair| pair[0].index < pair[1].index));
        let bytes = self.pair.b.contents(&self.b, FIRST_WORD, 8 * WORDS);
        assert_eq!(words_of(&bytes), model.history[count]);
        assert_eq!(self.received.len(), model.receives());
        let mut received = self.received.iter().enumerate();
        for (at, step) in model.steps.iter().enumerate() {
            let slot = LONG + at as u64 * SLOT;
            if let Some(fetched) = model.fetched[at] {
                let got = words_of(&self.pair.a.contents(&self.a, slot, 8));
                assert_eq!(got, [fetched], "fetched by step {at}");
            }
            let words = match &step.action {
                Action::Read { words } => words.clone(),
                Action::LongRead => 0..WORDS,
                _ => 0..0,
            };
            let got = self.pair.a.contents(&self.a, slot, 8 * words.len());
            for (word, got) in words.zip(words_of(&got)) {
                let may = model.readable(at, word);
                assert!(
                    may.contains(&got),
                    "step {at} read {got:x}, not of {may:x?}"
                );
            }
            let opcode = match step.action {
                Action::Write {
                    immediate: true, ..
                } => CompletionOpcode::ReceiveWrite,
                Action::Send { .. } => CompletionOpcode::Receive,
                _ => continue,
            };
            let (n, entry) = received.next().expect("a receive");
            assert_eq!(entry.status, 0);
            assert_eq!(
                (entry.opcode, entry.immediate),
                (opcode.number(), at as u64)
            );
            if let Action::Send { invents } = step.action {
                let got = self
                    .pair
                    .b
                    .contents(&self.inbox, (n * MESSAGE) as u64, MESSAGE);
                assert_eq!(got, message(invents));
            }
        }
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn requests_take_effect_in_the_order_of_the_model(
        steps in prop::collection::vec(step(), 1..STEPS),
        log_mtu in 8u8..=12,
        psn_a in 0u32..0x100_0000,
        depth in prop_oneof![Just(1u8), Just(2), Just(16)],
        drop in 0u64..8,
        duplicate in 0u64..25,
        delay in 0u64..25,
        ready in any::<bool>(),
        seed: u64,
    ) {
        let mut run = Run::start(steps, Setup { log_mtu, psn_a, depth, ..Setup::default() });
        while ready && run.posted_receives < run.model.receives() {
            run.post_receive();
        }
        let mut wire = BadWire::new(seed, Faults { drop, duplicate, corrupt: 0, delay });
        run.finish(|way, frame| wire.fate(way, frame));
        run.verify();
    }
}

fn steps(actions: impl IntoIterator<Item = Action>) -> Vec<Step> {
    let step = |action| Step {
        action,
        fence: false,
    };
    actions.into_iter().map(step).collect()
}

#[test]
fn an_atomic_behind_a_long_read_comes_before_a_later_write_and_send() {
    let mut run = Run::start(
        steps([
            Action::LongRead,
            Action::FetchAdd {
                word: 0,
                operand: 100,
            },
            Action::AtomicWrite {
                word: 1,
                value: 200,
            },
            Action::CompareSwap {
                word: 2,
                hits: true,
                new: 300,
            },
            Action::Flush,
            Action::Write {
                words: 0..3,
                value: 7,
                immediate: false,
            },
            Action::Send { invents: 1 },
        ]),
        Setup::default(),
    );
    run.post_receive();
    run.finish(|_, frame| vec![frame]);
    run.verify();
}

#[test]
fn a_read_does_not_see_what_is_fenced_off_behind_it() {
    let mut steps = steps([
        Action::LongRead,
        Action::FetchAdd {
            word: 3,
            operand: 1,
        },
        Action::Write {
            words: 0..4,
            value: 5,
            immediate: false,
        },
    ]);
    steps[1].fence = true;
    let mut run = Run::start(
        steps,
        Setup {
            log_mtu: 8,
            ..Setup::default()
        },
    );
    run.finish(|_, frame| vec![frame]);
    run.verify();
}
