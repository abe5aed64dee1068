// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A guest that has lost its mind: registers, doorbells, records and commands. All of its memory
//! is its own, so that nothing of it is secret to it; the process stands, comes to rest and stays
//! within bounds, and the host is asked for nothing outside of memory that would be given.

use crate::machine::{Machine, ATTACKERS, EXTENDED, SHARED, SHARED_EXTENDED, VICTIMS};
use crate::requests;
use crate::Input;
use ferrite_abi::*;
use ferrite_engine::testing::{CQP_LOG_ENTRIES, MEMORY_BASE, MEMORY_SIZE};
use ferrite_engine::HostMemory;

const STEPS: usize = 64;
/// Frames of one poll beyond which the device works without end.
const MOST_FRAMES: usize = 20_000;

/// The device does what it can.
fn poll(machine: &mut Machine) {
    for _ in 0..8 {
        let node = &mut machine.node;
        node.engine.poll(node.now, &mut node.host);
        assert!(node.host.sent.len() < MOST_FRAMES, "frames without end");
        node.host.sent.clear();
        node.host.raised.clear();
    }
}

/// A word somewhere in memory that the device reads or writes.
fn place(machine: &Machine, input: &mut Input<'_>) -> u64 {
    let node = &machine.node;
    let range = match input.u8() % 12 {
        0 => node.event_ring(EQ_CONTROL),
        1 => node.event_ring(EQ_ASYNC),
        2 => node.completion_ring(1),
        3 => node.control_record()..node.control_record() + 64,
        4 => node.srq_buffer(SHARED),
        5 => node.srq_buffer(SHARED_EXTENDED),
        6 => node.qp_buffer(VICTIMS),
        7 => node.control_record() - control_record_offset(CQP_LOG_ENTRIES)..node.control_record(),
        other => node.qp_buffer(ATTACKERS[usize::from(other) - 7]),
    };
    let words = (range.end - range.start) / 8;
    range.end - (1 + input.number() % words) * 8
}

/// Registers, doorbells and records.
pub fn registers(data: &[u8]) {
    let mut machine = Machine::new(data);
    machine.honest = false;
    let mut input = Input::new(data);
    let one_in = input.u8();
    if one_in != 0 {
        machine.disturb(one_in, input.u8().into());
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let choice = input.u8();
        match choice & 7 {
            0 => {
                let offset = input.number() as usize;
                let size = input.pick(&[4, 8, 1, 2]);
                let value = input.number();
                machine.node.write_register(offset, size, value);
            }
            1 => {
                let offset = input.number();
                let size = input.pick(&[4, 8, 1, 2]);
                let bar = u32::from(input.u8() % 6);
                machine.node.engine.mmio_read(bar, offset, size);
            }
            2 | 3 => {
                let offset = input.pick(&[
                    DOORBELL_SEND,
                    DOORBELL_RECEIVE,
                    DOORBELL_COMPLETION,
                    DOORBELL_SRQ,
                    DOORBELL_EVENT_QUEUE,
                    DOORBELL_CONTROL,
                    DOORBELL_CHANNEL,
                ]);
                let page = u32::from(choice >> 6);
                let word = input.number() | (input.number() << 32);
                machine.node.doorbell(page, offset, word);
            }
            4 => {
                let at = place(&machine, &mut input);
                let value = input.number();
                machine.node.host.memory.put(at, &value);
            }
            5 => {
                // Device memory, and what is around it.
                let node = &mut machine.node;
                let size = input.pick(&[8, 4, 2, 1]);
                let offset = node.read_register(REG_DEVICE_MEMORY_OFFSET, 8);
                let offset = offset.wrapping_add(input.number());
                let value = input.u64();
                node.engine.mmio_write(
                    BAR_DOORBELLS,
                    offset,
                    size,
                    value,
                    node.now,
                    &mut node.host,
                );
            }
            6 => {
                if machine.node.engine.is_running() {
                    requests::step(&mut machine, &mut input);
                } else {
                    // From the start.
                    let node = &mut machine.node;
                    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
                    let version = (u64::from(ABI_MAJOR) << 16) | u64::from(ABI_MINOR);
                    node.write_register(REG_DRIVER_VERSION, 4, version);
                    let boot = node.reply();
                    let mut block = BootBlock::zeroed();
                    let bytes = input.bytes(size_of::<BootBlock>());
                    block.as_bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                    if choice & 8 == 0 {
                        block = BootBlock {
                            cqp_ring: MEMORY_BASE + 0x70_0000,
                            eq0_ring: MEMORY_BASE + 0x71_0000,
                            cqp_log_entries: 4,
                            eq0_log_entries: 5,
                            ..BootBlock::zeroed()
                        };
                    }
                    node.host.memory.put(boot, &block);
                    node.write_register(REG_BOOT, 8, boot);
                    node.write_register(REG_CONTROL, 4, u64::from(CONTROL_ENABLE));
                }
            }
            _ => machine.node.now += input.little() * 10_000,
        }
        poll(&mut machine);
    }
}

/// A structure of a command that is right.
fn template(machine: &mut Machine, input: &mut Input<'_>) -> (u16, Vec<u8>) {
    let node = &mut machine.node;
    let number = u32::from(input.u8() % 16);
    // There is no end of commands, but of memory: these are in the same place.
    let buffer = Buffer::contiguous(MEMORY_BASE + 0x60_0000 + u64::from(number) * 0x8000, 0x8000);
    fn raw<P: Command>(command: P) -> (u16, Vec<u8>) {
        (P::OPCODE as u16, command.as_bytes().to_vec())
    }
    match input.u8() % 16 {
        0 => raw(CreateEventQueue {
            eqn: number as u16,
            message: 1,
            log_entries: 5,
            overflow: 0,
            priority: 0,
            reserved: 0,
            ring: buffer,
        }),
        1 => raw(CreateCompletionQueue {
            cqn: number,
            eqn: EQ_FIRST_HANDLER,
            log_entries: 5,
            reserved0: 0,
            doorbell_page: 1,
            record_offset: 4096,
            buffer,
            processor: 0,
            reserved1: [0; 3],
        }),
        2 => raw(CreateQueuePair {
            qpn: number,
            pd: 1,
            send_cqn: 1,
            receive_cqn: 1,
            service: input.u8() % 12,
            transport: Transport::RoceV2.number(),
            flags: u16::from(input.u8()),
            sq_log_blocks: 4,
            rq_log_entries: 4,
            rq_log_stride: 6,
            port: 0,
            srqn: 0,
            doorbell_page: 1,
            buffer,
            sq_offset: 0,
            rq_offset: 4096,
            record_offset: 8192,
            xrcd: 0,
            reserved: [0; 3],
        }),
        3 => {
            let mut modify = ModifyQueuePair::zeroed();
            modify.qpn = input.pick(&[number, ATTACKERS[0], ATTACKERS[1], EXTENDED]);
            modify.mask = MODIFY_STATE | input.number() as u32;
            modify.state = input.u8() % 8;
            modify.address_vector.vlan = VLAN_NONE;
            raw(modify)
        }
        4 => raw(RegisterRegion {
            tag: Tag::new(number, 1).0,
            pd: 1,
            access: u32::from(input.u8()),
            flags: u32::from(input.u8() & 7),
            address: input.number(),
            buffer,
        }),
        5 => raw(AllocateTag {
            tag: Tag::new(number, 0).0,
            pd: 1,
            kind: input.u8() % 7,
            reserved: [0; 3],
            max_pages: input.number() as u32,
        }),
        6 => raw(CreateSrq {
            srqn: number,
            pd: 1,
            log_entries: 4,
            log_stride: 6,
            flags: u16::from(input.u8() & 3),
            doorbell_page: 1,
            buffer,
            ring_offset: 0,
            record_offset: 4096,
            xrcd: 0,
            cqn: 0,
        }),
        7 => raw(ModifySrq {
            srqn: number,
            limit: input.number() as u32,
        }),
        8 => raw(SwitchEventQueue {
            eqn: number as u16,
            log_entries: 5,
            ring: buffer,
            ..SwitchEventQueue::zeroed()
        }),
        9 => raw(ResizeCompletionQueue {
            cqn: number,
            log_entries: input.u8() & 15,
            reserved: [0; 3],
            record_offset: 0x4000,
            reserved1: 0,
            buffer,
        }),
        10 => raw(SetGid {
            gid: node.gid,
            index: input.u8().into(),
            vlan: VLAN_NONE,
            mac: node.mac,
            port: 0,
            reserved: [0; 5],
        }),
        _ => {
            // Of all the others, by number: an object, or any bytes.
            let opcode = u16::from(input.u8() % 100);
            let length = usize::from(input.u8());
            let mut bytes = u64::from(number).to_le_bytes().to_vec();
            bytes.extend(input.bytes(length));
            bytes.truncate(224);
            (opcode, bytes)
        }
    }
}

/// Commands.
pub fn commands(data: &[u8]) {
    let mut machine = Machine::new(data);
    machine.honest = false;
    let mut input = Input::new(data);
    let one_in = input.u8();
    if one_in != 0 {
        machine.disturb(one_in, input.u8().into());
    }
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let choice = input.u8();
        match choice & 7 {
            0..=4 => {
                let (opcode, mut payload) = template(&mut machine, &mut input);
                if choice & 0x18 == 0x18 {
                    let at = usize::from(input.u8()) % payload.len();
                    payload[at] ^= input.u8();
                }
                let mut entry = CommandEntry::zeroed();
                entry.opcode = opcode;
                entry.cookie = 7;
                entry.request_length = payload.len() as u32;
                if choice & 0x60 == 0x60 {
                    entry.flags = u16::from(input.u8());
                    entry.reply_length = input.number() as u32;
                    entry.reply = MEMORY_BASE + input.little() * 64;
                    entry.request = MEMORY_BASE + MEMORY_SIZE as u64 - 0x4000;
                    let memory = &machine.node.host.memory;
                    memory.write(entry.request, &payload).expect("test memory");
                } else if choice & 0x80 != 0 {
                    entry.reply = machine.node.reply();
                    entry.reply_length = 4096;
                }
                entry.payload[..payload.len()].copy_from_slice(&payload);
                machine.node.put_command(&entry);
                machine.node.ring_control();
            }
            5 => {
                if machine.node.engine.is_running() {
                    requests_step(&mut machine, &mut input);
                }
            }
            6 => {
                // The driver has seen what was said.
                for eqn in [EQ_CONTROL, EQ_ASYNC, EQ_FIRST_HANDLER] {
                    let word = EventDoorbell {
                        eqn,
                        read_index: input.number() as u32,
                        relative: true,
                        valid: true,
                        arm: true,
                        quiet: false,
                        disarm: false,
                    };
                    machine
                        .node
                        .doorbell(0, DOORBELL_EVENT_QUEUE, word.encode());
                }
            }
            _ => machine.node.now += input.little() * 10_000,
        }
        poll(&mut machine);
    }
}

/// A work request of a process whose queues the driver may have taken away.
fn requests_step(machine: &mut Machine, input: &mut Input<'_>) {
    let qpn = input.pick(&ATTACKERS);
    let blocks = requests::work(machine, input, qpn).encode();
    machine.node.write_blocks(qpn, &blocks);
    machine.node.publish_send(qpn);
}
