// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Work requests: a process writes what it likes into its rings and records, and rings its
//! doorbells, while the device reads them.

use crate::machine::{
    Machine, ATTACKERS, DATAGRAM, FRESH, LIST, OWN, QKEY, SHARED, SHARED_EXTENDED, WINDOW,
};
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::testing::SendWork;

/// Steps of one input.
const STEPS: usize = 64;

const OPCODES: [SendOpcode; 18] = [
    SendOpcode::Send,
    SendOpcode::SendImmediate,
    SendOpcode::SendInvalidate,
    SendOpcode::Write,
    SendOpcode::WriteImmediate,
    SendOpcode::Read,
    SendOpcode::CompareSwap,
    SendOpcode::FetchAdd,
    SendOpcode::AtomicWrite,
    SendOpcode::Flush,
    SendOpcode::Bind,
    SendOpcode::LocalInvalidate,
    SendOpcode::FastRegister,
    SendOpcode::RegisterSend,
    SendOpcode::RegisterList,
    SendOpcode::RegisterListSend,
    SendOpcode::Send,
    SendOpcode::Write,
];

/// A work request that is right but for what the input makes of it.
pub fn work(machine: &Machine, input: &mut Input<'_>, qpn: u32) -> SendWork {
    let opcode = input.pick(&OPCODES);
    let count = input.u8() % 5;
    let sges: Vec<Sge> = (0..count).map(|_| machine.sge(input)).collect();
    let pieces = count.saturating_sub(input.u8() % 3);
    let flags = u16::from(input.u8());
    let work = SendWork::new(opcode, &sges)
        .flags(flags | SEND_SIGNALED)
        .immediate(input.number() as u32)
        .invalidate(machine.key(input))
        .srqn(input.number() as u32);
    match opcode {
        SendOpcode::Send | SendOpcode::SendImmediate if qpn == DATAGRAM => {
            let to = Input::pick(input, &ATTACKERS);
            let mut part = machine.node.as_peer(to).datagram(QKEY);
            if input.u8() & 1 != 0 {
                part.address_vector.mac = machine.outside.mac;
                part.address_vector.gid = machine.outside.gid;
            }
            work.datagram(&part)
        }
        SendOpcode::Bind => work.part(&BindPart {
            window: Tag::new(WINDOW, 1).0,
            new_window: Tag::new(WINDOW, input.u8()).0,
            region: machine.key(input),
            access: u32::from(input.u8()),
            address: machine.address(input),
            length: input.number(),
            reserved: [0; 2],
        }),
        SendOpcode::RegisterList | SendOpcode::RegisterListSend => {
            let mut part = ListPart {
                tag: Tag::new(LIST, input.u8() & 3).0,
                access: u32::from(input.u8()),
                address: machine.address(input),
                pieces,
                ..ListPart::zeroed()
            };
            if input.u8() == 255 {
                part.tag = machine.key(input);
            }
            work.part(&part)
        }
        SendOpcode::FastRegister | SendOpcode::RegisterSend => work.part(&FastRegisterPart {
            tag: Tag::new(FRESH, 1).0,
            access: u32::from(input.u8()),
            address: machine.address(input),
            buffer: Buffer::contiguous(machine.address(input) & !4095, input.number()),
            reserved: 0,
        }),
        SendOpcode::CompareSwap | SendOpcode::FetchAdd => work.part(&AtomicPart {
            address: machine.address(input) & !(u64::from(input.u8() & 7) / 2 * 2),
            rkey: machine.key(input),
            operand: input.number(),
            ..AtomicPart::zeroed()
        }),
        SendOpcode::Write
        | SendOpcode::WriteImmediate
        | SendOpcode::Read
        | SendOpcode::AtomicWrite => work.remote(machine.address(input), machine.key(input)),
        SendOpcode::Flush => work.part(&FlushPart {
            address: machine.address(input),
            rkey: machine.key(input),
            length: input.number() as u32,
            placement: u32::from(input.u8() & 3),
            selectivity: u32::from(input.u8() & 1),
            reserved: 0,
        }),
        _ => work,
    }
}

/// Posts something, or changes what is there.
pub fn step(machine: &mut Machine, input: &mut Input<'_>) {
    let choice = input.u8();
    let qpn = ATTACKERS[usize::from(choice >> 4) % ATTACKERS.len()];
    match choice & 15 {
        0..=5 => {
            let blocks = work(machine, input, qpn).encode();
            machine.node.write_blocks(qpn, &blocks);
            machine.node.publish_send(qpn);
        }
        6 => {
            // Almost right.
            let mut blocks = work(machine, input, qpn).encode();
            let at = usize::from(input.u8()) % blocks.len();
            blocks[at] ^= input.u8();
            machine.node.write_blocks(qpn, &blocks);
            machine.node.publish_send(qpn);
        }
        7 => {
            // Not at all.
            let mut block = [0; BLOCK_SIZE];
            let bytes = input.bytes(BLOCK_SIZE);
            block[..bytes.len()].copy_from_slice(bytes);
            machine.node.write_blocks(qpn, &block);
            machine.node.publish_send(qpn);
        }
        8 | 9 if qpn != OWN[1] => {
            let sges = [machine.sge(input), machine.sge(input)];
            machine.node.post_recv(qpn, &sges);
        }
        8..=10 => {
            let sges = [machine.sge(input), machine.sge(input)];
            let srqn = input.pick(&[SHARED, SHARED_EXTENDED]);
            machine.node.post_srq(srqn, &sges);
        }
        11 => {
            // Into its rings, behind the driver's back.
            let range = match input.u8() & 7 {
                6 => machine.node.srq_buffer(SHARED),
                7 => machine.node.srq_buffer(SHARED_EXTENDED),
                _ => machine.node.qp_buffer(qpn),
            };
            // The records are at the end.
            let words = (range.end - range.start) / 8;
            let from_end = 1 + input.number() % words;
            let value = input.number();
            machine
                .node
                .host
                .memory
                .put(range.end - from_end * 8, &value);
        }
        12 => {
            let offset = input.pick(&[
                DOORBELL_SEND,
                DOORBELL_RECEIVE,
                DOORBELL_COMPLETION,
                DOORBELL_SRQ,
                DOORBELL_EVENT_QUEUE,
                DOORBELL_CONTROL,
            ]);
            let word = input.number() | (input.number() << 32);
            // Its page, and no other.
            machine.node.doorbell(1, offset, word);
        }
        13 => {
            machine.poll();
            machine.node.now += input.little() * 1000;
        }
        14 => machine.restart(qpn),
        _ => machine.serve(),
    }
}

/// The target.
pub fn requests(data: &[u8]) {
    let mut machine = Machine::new(data);
    let mut input = Input::new(data);
    let one_in = input.u8();
    if one_in != 0 {
        let seed = input.u8().into();
        machine.disturb(one_in, seed);
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut machine, &mut input);
        machine.poll();
    }
    machine.node.now += 1_000_000_000;
    machine.poll();
    machine.check();
}
