// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Frames from the wire, and of a neighbour: a peer says what it likes to queue pairs that expect one, and
//! have asked it for something.

use crate::machine::{Machine, EXTENDED, PSN, SHARED_EXTENDED, TO_PEER, UNRELIABLE, VICTIMS};
use crate::machine::{DATAGRAM, OWN};
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::roce::{icrc, psn_add, Bth};
use ferrite_engine::testing::{passing, Inside, SendWork};
use ferrite_fabric::ring::MAX_TRAIN;

/// Frames of one input.
const STEPS: usize = 64;
/// The longest data of one.
const MOST_DATA: usize = 4200;

/// The headers behind the first, by what the input says, and data.
fn rest(machine: &Machine, input: &mut Input<'_>) -> Vec<u8> {
    let parts = input.u8();
    let mut rest = Vec::new();
    if parts & 1 != 0 {
        // Of an extended connection.
        rest.extend(input.pick(&[SHARED_EXTENDED, 1, 0xff_ffff]).to_be_bytes());
    }
    if parts & 2 != 0 {
        // Of a datagram.
        rest.extend(input.pick(&[7, 0x8001_0000, 0u32]).to_be_bytes());
        rest.extend(u32::from(input.u8()).to_be_bytes());
    }
    if parts & 4 != 0 {
        // Of a remote access.
        rest.extend(machine.address(input).to_be_bytes());
        rest.extend(machine.key(input).to_be_bytes());
        rest.extend((input.number() as u32).to_be_bytes());
    }
    if parts & 8 != 0 {
        // Of an atomic.
        rest.extend((machine.address(input) & !7).to_be_bytes());
        rest.extend(machine.key(input).to_be_bytes());
        rest.extend(input.number().to_be_bytes());
        rest.extend(input.number().to_be_bytes());
    }
    if parts & 16 != 0 {
        // Of an acknowledgement.
        let syndrome = input.u8();
        let msn = input.u8();
        rest.extend([syndrome, 0, 0, msn]);
    }
    if parts & 32 != 0 {
        // Immediate data, or a key to invalidate.
        rest.extend(machine.key(input).to_be_bytes());
    }
    if parts & 64 != 0 {
        rest.extend(vec![0x5a; input.number() as usize % MOST_DATA]);
    }
    if parts & 128 != 0 {
        let count = usize::from(input.u8());
        rest.extend(input.bytes(count));
    }
    rest
}

fn frame(machine: &Machine, input: &mut Input<'_>) -> Vec<u8> {
    let to = input.pick(&[
        TO_PEER, VICTIMS, EXTENDED, UNRELIABLE, DATAGRAM, OWN[0], 0, 1, 0xff_ffff,
    ]);
    let opcode = input.u8();
    let flags = input.u8();
    let ahead = input.u8();
    let psn = match flags & 3 {
        0 | 1 => psn_add(PSN, ahead.into()),
        2 => psn_add(PSN, 0x100_0000 - u32::from(ahead)),
        _ => input.u32() & 0xff_ffff,
    };
    let rest = rest(machine, input);
    let pad = match flags & 12 {
        0 => (flags >> 4) & 3,
        _ => (rest.len().wrapping_neg() & 3) as u8,
    };
    let bth = Bth {
        opcode,
        solicited: flags & 0x40 != 0,
        migrated: true,
        pad,
        version: 0,
        pkey: 0xffff,
        qpn: to,
        ack_request: flags & 0x80 == 0,
        psn,
    };
    let mut frame = machine.packet(&bth, &rest);
    // Almost right, with checks that are.
    for _ in 0..input.u8() % 4 {
        let at = 14 + usize::from(input.u8()) % (frame.len() - 14);
        frame[at] ^= input.u8();
        let end = frame.len() - 4;
        if let Some(crc) = icrc(&frame[14..end]) {
            frame[end..].copy_from_slice(&crc.to_le_bytes());
        }
    }
    frame
}

fn step(machine: &mut Machine, input: &mut Input<'_>) {
    match input.u8() & 15 {
        0..=8 => {
            let frame = frame(machine, input);
            machine.node.receive(&frame);
        }
        9 => {
            let length = usize::from(input.u8());
            let bytes = input.bytes(length).to_vec();
            machine.node.receive(&bytes);
        }
        10 => {
            let mut frame = frame(machine, input);
            let cut = input.u8();
            if cut & 0x80 != 0 {
                // Packets in a row of a neighbour that shares memory, which that has checked.
                let length = 1 + input.number() as usize % MAX_TRAIN;
                let inside = Inside {
                    frame,
                    loan: Some(passing(8 + cut % 5, vec![0x5a; length])),
                };
                machine.node.receive_inside(&inside);
            } else {
                // Whole, but cut off.
                frame.truncate(cut.into());
                machine.node.receive(&frame);
            }
        }
        11 => {
            // Somebody here waits for an answer.
            let (qpn, region) = match input.u8() & 1 {
                0 => (TO_PEER, &machine.own),
                _ => (VICTIMS, &machine.inbox),
            };
            let length = input.number() as u32 % 5000;
            let opcode = input.pick(&[SendOpcode::Read, SendOpcode::Write, SendOpcode::FetchAdd]);
            let length = match opcode {
                SendOpcode::FetchAdd => 8,
                _ => length,
            };
            let work = SendWork::new(opcode, &[region.sge(0, length)]).remote(0, 1);
            machine.node.post_send(qpn, &work);
        }
        12 => {
            let (qpn, region) = match input.u8() & 3 {
                0 => (VICTIMS, &machine.inbox),
                1 => (UNRELIABLE, &machine.own),
                2 => (DATAGRAM, &machine.own),
                _ => (TO_PEER, &machine.own),
            };
            let sge = region.sge(0, input.number() as u32 % 6000);
            machine.node.post_recv(qpn, &[sge]);
        }
        13 => {
            let sge = machine.own.sge(0, input.number() as u32 % 6000);
            machine.node.post_srq(SHARED_EXTENDED, &[sge]);
        }
        14 => machine.node.now += input.little() * 100_000,
        _ => {
            let qpn = input.pick(&[TO_PEER, VICTIMS, EXTENDED, UNRELIABLE]);
            machine.restart(qpn);
        }
    }
}

/// The target.
pub fn frames(data: &[u8]) {
    let mut machine = Machine::new(data);
    let mut input = Input::new(data);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        step(&mut machine, &mut input);
        machine.poll();
        machine.serve();
    }
    machine.node.now += 1_000_000_000;
    machine.poll();
    machine.check();
}
