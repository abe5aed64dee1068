// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Raw packets: a program that sends any frame, rules and receive tables of any kind, queue pairs that come
//! and go, and a wire that brings any frame. The device stands and comes to rest, what it receives it
//! writes where a receive was posted and nowhere else, and what is its own does not leave.

use crate::channels::{frame, MOST_FRAMES, MOST_HEADER};
use crate::guard::{Guards, GUARD};
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, Region, SendWork, Unsteady};
use ferrite_engine::{Personality, ETHERNET_FEATURES, FEATURES};

/// Steps of one input.
const STEPS: usize = 64;
/// The first of them sends, the last two are work queues; one more is of another service.
const QPS: [u32; 5] = [2, 3, 4, 5, 6];
const OTHER: u32 = 9;
/// Bytes that are sent from, and received in: a place for each receive.
const OUT: u64 = 0x4000;
const PLACE: u64 = 0x800;
const PLACES: u64 = 16;

struct Machine {
    node: Node,
    from: Region,
    into: Region,
    /// What each place was given for.
    posted: [bool; PLACES as usize],
    guards: Guards,
}

fn options(qpn: u32) -> QpOptions {
    QpOptions {
        qpn,
        service: if qpn == OTHER {
            Service::Ud
        } else {
            Service::Raw
        },
        flags: if qpn >= QPS[3] && qpn != OTHER {
            QP_FLAG_RECEIVE_ONLY
        } else {
            0
        },
        ..QpOptions::default()
    }
}

impl Machine {
    fn new(combined: bool) -> Self {
        let mut node = Node::power_on_with(1, |config| {
            if combined {
                config.personality = Personality::Combined;
            }
        });
        node.boot_with(if combined {
            FEATURES | ETHERNET_FEATURES
        } else {
            FEATURES
        });
        node.create_eq(EQ_ASYNC, 1);
        node.create_eq(EQ_FIRST_HANDLER, 2);
        node.create_cq(1, EQ_FIRST_HANDLER, 10);
        node.set_address();
        if combined {
            node.execute(&SetInterface {
                flags: INTERFACE_UP | INTERFACE_PROMISCUOUS,
                mtu: RAW_MAX_MTU,
                mac: node.mac,
                default_channel: CHANNEL_NONE,
                ..SetInterface::zeroed()
            });
        }
        let mut guards = Guards::default();
        guards.add(&mut node);
        let from = node.register(Tag::new(5, 1).0, 1, ACCESS_LOCAL_WRITE, OUT);
        guards.add(&mut node);
        let into = node.register(Tag::new(6, 1).0, 1, ACCESS_LOCAL_WRITE, PLACE * PLACES);
        guards.add(&mut node);
        node.fill(&into, 0, &[GUARD; (PLACE * PLACES) as usize]);
        let mut machine = Self {
            node,
            from,
            into,
            posted: [false; PLACES as usize],
            guards,
        };
        for qpn in QPS {
            machine.create_qp(qpn);
        }
        machine.node.create_qp(options(OTHER));
        machine.node.start_datagrams(OTHER, 1);
        machine
    }

    fn create_qp(&mut self, qpn: u32) {
        let command = self.node.qp_template(options(qpn));
        if self.node.command(CommandOpcode::CreateQueuePair, &command) == CommandStatus::Ok {
            self.node
                .object_command(CommandOpcode::DestroyQueuePair, qpn);
            self.node.create_qp(options(qpn));
            use QueuePairStateCode::{Init, Rtr, Rts};
            for state in [Init, Rtr, Rts] {
                self.node.set_state(qpn, state);
            }
        }
    }

    fn poll(&mut self) {
        for _ in 0..8 {
            let node = &mut self.node;
            node.engine.poll(node.now, &mut node.host);
            assert!(node.host.sent.len() < MOST_FRAMES, "frames without end");
            for frame in node.host.sent.drain(..) {
                let most = MOST_HEADER + usize::from(RAW_MAX_MTU);
                assert!((14..=most).contains(&frame.len()), "{} bytes", frame.len());
                assert!(!frame.starts_with(&node.mac), "its own has left");
            }
            node.host.raised.clear();
            node.now += 1_000_000;
        }
        while self.node.poll_cq(1).is_some() {}
    }

    fn flow(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let mut command = CreateFlow {
            flow: input.number() as u32,
            target: match choice & 3 {
                0 => input.number() as u32,
                _ => input.pick(&QPS),
            },
            priority: u16::from(choice >> 6),
            ..CreateFlow::zeroed()
        };
        if choice & 4 != 0 {
            command.flags = FLOW_TO_TABLE;
            command.target = u32::from(input.u8() % 4);
            command.hash_types = u16::from(input.u8() & 0x7f);
            command.key = [input.u8(); REDIRECTION_KEY_SIZE];
        }
        if choice & 8 != 0 {
            command.layers = input.u8();
        }
        if choice & 16 != 0 {
            // So much of a frame as the wire has it.
            let frame = frame(input, self.node.mac);
            let most = frame.len().min(12);
            command.value.as_bytes_mut()[..most].copy_from_slice(&frame[..most]);
            command.mask.as_bytes_mut()[..most].fill(0xff);
        }
        for _ in 0..(choice >> 5) & 1 {
            let at = usize::from(input.u8()) % size_of::<FlowFields>();
            command.mask.as_bytes_mut()[at] = 0xff;
            command.value.as_bytes_mut()[at] = input.u8();
        }
        self.node.command(CommandOpcode::CreateFlow, &command);
    }

    fn table(&mut self, input: &mut Input<'_>) {
        let choice = input.u8();
        let mut command = CreateReceiveTable {
            table: input.number() as u32,
            log_entries: choice & 7,
            ..CreateReceiveTable::zeroed()
        };
        let entries = 1usize << (choice & 7).min(5);
        for entry in command.qpns.iter_mut().take(entries) {
            *entry = input.pick(&QPS);
        }
        if choice & 0xc0 == 0xc0 {
            command.qpns[usize::from(input.u8() % 32)] = input.number() as u32;
        }
        self.node
            .command(CommandOpcode::CreateReceiveTable, &command);
    }

    fn send(&mut self, input: &mut Input<'_>) {
        let mut frame = frame(input, self.node.mac);
        let choice = input.u8();
        if choice & 1 != 0 && frame.len() >= 12 {
            frame[6..12].copy_from_slice(&self.node.mac);
        }
        self.node.fill(&self.from, 0, &frame);
        let length = match choice >> 6 {
            3 => input.little() as u32,
            _ => frame.len() as u32,
        };
        let first = (length / 2).min(u32::from(choice & 0x3f));
        let pieces = [
            self.from.sge(0, first),
            self.from.sge(first.into(), length - first),
        ];
        let work = SendWork::new(SendOpcode::Send, &pieces);
        self.node.post_send(QPS[0], &work);
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.u8() % 16 {
            0 | 1 => self.flow(input),
            2 => {
                let number = input.number() as u32;
                self.node.object_command(CommandOpcode::DestroyFlow, number);
            }
            3 => self.table(input),
            4 => {
                let number = input.number() as u32;
                self.node
                    .object_command(CommandOpcode::DestroyReceiveTable, number);
            }
            5 => {
                let qpn = input.pick(&QPS);
                let destroy = CommandOpcode::DestroyQueuePair;
                // What it has posted is lost with it; the places stay given.
                self.node.object_command(destroy, qpn);
                if input.u8() & 1 == 0 {
                    self.create_qp(qpn);
                }
            }
            6 => {
                use QueuePairStateCode::{Error, Init, Reset, Rtr, Rts, Sqd};
                let qpn = input.pick(&QPS);
                let state = input.pick(&[Reset, Init, Rtr, Rts, Sqd, Error]);
                self.node.set_state(qpn, state);
            }
            7..=9 => {
                let qpn = input.pick(&QPS);
                let place = u64::from(input.u8()) % PLACES;
                let length = (input.number() % (PLACE + 1)) as u32;
                self.posted[place as usize] = true;
                let sge = self.into.sge(place * PLACE, length);
                self.node.post_recv(qpn, &[sge]);
            }
            10..=12 => self.send(input),
            13 | 14 => {
                let frame = frame(input, self.node.mac);
                self.node.receive(&frame);
            }
            _ => self.poll(),
        }
    }
}

/// Frames that are sent and received, rules, tables, queue pairs.
pub fn raw(data: &[u8]) {
    let mut input = Input::new(data);
    let mut machine = Machine::new(input.u8() & 1 != 0);
    let one_in = input.u8();
    if one_in != 0 {
        // What is sent changes while the device reads it.
        let pages = machine.from.pages.iter();
        let ranges = pages.map(|&page| page..page + 0x1000).collect();
        let unsteady = Unsteady::new(ranges, u64::from(one_in).max(2), u64::from(one_in));
        machine.node.host.unsteady.replace(Some(unsteady));
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        machine.step(&mut input);
    }
    machine.poll();
    machine.node.host.unsteady.replace(None);
    let node = &machine.node;
    machine.guards.check(node);
    for (place, _) in machine
        .posted
        .iter()
        .enumerate()
        .filter(|(_, posted)| !**posted)
    {
        let bytes = node.contents(&machine.into, place as u64 * PLACE, PLACE as usize);
        assert!(bytes.iter().all(|&byte| byte == GUARD), "place {place}");
    }
    // Whatever was said, only what it was said of has stopped.
    assert!(node.engine.is_running(), "the device has stopped");
    for flow in 0..256 {
        machine
            .node
            .object_command(CommandOpcode::DestroyFlow, flow);
    }
    for table in 0..64 {
        let destroy = CommandOpcode::DestroyReceiveTable;
        machine.node.object_command(destroy, table);
    }
    for qpn in QPS {
        let destroy = CommandOpcode::DestroyQueuePair;
        let status = machine.node.object_command(destroy, qpn);
        assert!(
            matches!(status, CommandStatus::Ok | CommandStatus::NotFound),
            "{status:?} of queue pair {qpn}"
        );
    }
}
