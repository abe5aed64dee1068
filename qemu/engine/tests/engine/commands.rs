// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What all commands have in common: lengths, reserved fields, replies (chapter 3).

use crate::ethernet;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, MEMORY_BASE};
use ferrite_engine::HostMemory;
use CommandStatus::{BadNumber, BadParameter, HostMemory as NoMemory, NotFound, Ok as Done};

/// A structure of a command, with all that can be asked of it.
struct Sample {
    opcode: CommandOpcode,
    bytes: Vec<u8>,
    /// Offsets of the bytes of its reserved fields.
    reserved: Vec<usize>,
}

/// Offsets of the bytes of reserved fields in a structure, those of structures in it included.
fn reserved_bytes(fields: &[Field], size: usize, start: usize) -> Vec<usize> {
    let ends = fields.iter().skip(1).map(|field| field.offset);
    let mut found = Vec::new();
    for (field, end) in fields.iter().zip(ends.chain([size])) {
        let at = start + field.offset;
        if field.name.starts_with("reserved") {
            found.extend(at..start + end);
            continue;
        }
        let inner = match field.ty {
            "Buffer" | "super::Buffer" => Buffer::FIELDS,
            "AddressVector" => AddressVector::FIELDS,
            "FlowFields" => FlowFields::FIELDS,
            _ => continue,
        };
        found.extend(reserved_bytes(inner, end - field.offset, at));
    }
    found
}

fn sample<L: Layout>(opcode: CommandOpcode, value: L) -> Sample {
    Sample {
        opcode,
        bytes: value.as_bytes().to_vec(),
        reserved: reserved_bytes(L::FIELDS, size_of::<L>(), 0),
    }
}

/// A node, and a structure of every command that has one. Each is well-formed: what is wrong with
/// it, if anything, is that the object is there or is not.
fn samples() -> (Node, Vec<Sample>) {
    use CommandOpcode as O;
    let mut node = ethernet::combined();
    node.set_address();
    node.create_cq(1, EQ_FIRST_HANDLER, 8);
    node.create_qp(QpOptions::default());
    node.create_srq(3, 4, None);
    let channel = ethernet::command(&mut node, 7, EQ_FIRST_HANDLER);
    node.execute(&channel);
    let mut redirected = SetRedirectionTable::zeroed();
    redirected.count = 1;
    redirected.entries[0] = RedirectionEntry {
        channel: CHANNEL_NONE,
        eqn: EQ_NONE,
        ..RedirectionEntry::zeroed()
    };
    let region = node.register(Tag::new(5, 1).0, 1, ACCESS_LOCAL_WRITE, 4096);
    let object = |opcode| {
        let object = ObjectNumber {
            number: 77,
            reserved: 0,
        };
        sample(opcode, object)
    };
    let tag = |opcode| {
        let object = ObjectNumber {
            number: Tag::new(77, 1).0,
            reserved: 0,
        };
        sample(opcode, object)
    };
    let ring = Buffer::contiguous(node.allocate(4096), 4096);
    let cq = node.cq_template(1, EQ_FIRST_HANDLER, 4);
    let srq = node.srq_template(3, 4);
    let member = MulticastMember {
        gid: [0xff; 16],
        qpn: 77,
        reserved: 0,
    };
    let mut no_such_queue = SetVectorMap::zeroed().entries;
    no_such_queue[0].eqn = 77;
    let samples = vec![
        sample(
            O::CreateEventQueue,
            CreateEventQueue {
                eqn: EQ_ASYNC,
                message: 0,
                log_entries: 4,
                overflow: 0,
                priority: 0,
                reserved: 0,
                ring,
            },
        ),
        object(O::DestroyEventQueue),
        sample(
            O::SwitchEventQueue,
            SwitchEventQueue {
                eqn: 77,
                log_entries: 4,
                ring,
                ..SwitchEventQueue::zeroed()
            },
        ),
        sample(
            O::SetVectorMap,
            SetVectorMap {
                count: 1,
                entries: no_such_queue,
                ..SetVectorMap::zeroed()
            },
        ),
        sample(
            O::QueryVectorMap,
            QueryVectorMap {
                count: 1,
                ..QueryVectorMap::zeroed()
            },
        ),
        sample(
            O::ModifyEventQueue,
            ModifyEventQueue {
                eqn: 77,
                ..ModifyEventQueue::zeroed()
            },
        ),
        sample(O::CreateCompletionQueue, cq),
        sample(
            O::ModifyCompletionQueue,
            ModifyCompletionQueue {
                cqn: 77,
                eqn: EQ_NONE,
                ..ModifyCompletionQueue::zeroed()
            },
        ),
        sample(
            O::ResizeCompletionQueue,
            ResizeCompletionQueue {
                cqn: 77,
                log_entries: 4,
                record_offset: cq.record_offset,
                buffer: cq.buffer,
                ..ResizeCompletionQueue::zeroed()
            },
        ),
        object(O::QueryCompletionQueue),
        object(O::DestroyCompletionQueue),
        sample(O::CreateQueuePair, node.qp_template(QpOptions::default())),
        sample(
            O::ModifyQueuePair,
            ModifyQueuePair {
                qpn: 77,
                ..ModifyQueuePair::zeroed()
            },
        ),
        object(O::QueryQueuePair),
        sample(
            O::QueryQueuePairCounters,
            QueryQueuePairCounters {
                count: 1,
                qpns: {
                    let mut qpns = [0; COUNTED_QUEUE_PAIRS];
                    qpns[0] = 77;
                    qpns
                },
                ..QueryQueuePairCounters::zeroed()
            },
        ),
        object(O::DestroyQueuePair),
        sample(
            O::RegisterRegion,
            RegisterRegion {
                tag: region.tag,
                pd: 1,
                access: 0,
                flags: 0,
                address: 0,
                buffer: ring,
            },
        ),
        sample(
            O::AllocateTag,
            AllocateTag {
                tag: region.tag,
                pd: 1,
                kind: TagKind::Region.number(),
                reserved: [0; 3],
                max_pages: 1,
            },
        ),
        tag(O::QueryTag),
        tag(O::ReleaseTag),
        sample(
            O::SetGid,
            SetGid {
                gid: node.gid,
                index: 0,
                vlan: VLAN_NONE,
                mac: node.mac,
                port: 0,
                reserved: [0; 5],
            },
        ),
        sample(O::CreateSrq, srq),
        sample(O::ModifySrq, ModifySrq { srqn: 77, limit: 1 }),
        object(O::QuerySrq),
        object(O::DestroySrq),
        sample(
            O::ResizeSrq,
            ResizeSrq {
                srqn: 77,
                log_entries: 4,
                record_offset: srq.record_offset,
                buffer: srq.buffer,
                ..ResizeSrq::zeroed()
            },
        ),
        sample(O::QueryCounters, QueryCounters::zeroed()),
        sample(O::AttachMulticast, member),
        sample(O::DetachMulticast, member),
        sample(
            O::SetPort,
            SetPort {
                log_mtu: 12,
                port: 0,
                reserved: [0; 6],
            },
        ),
        sample(O::ResolveFault, ResolveFault::zeroed()),
        sample(
            O::InvalidatePages,
            InvalidatePages {
                tag: Tag::new(77, 1).0,
                ..InvalidatePages::zeroed()
            },
        ),
        sample(O::SetRedirection, SetRedirection::zeroed()),
        sample(O::SetRedirectionTable, redirected),
        sample(O::CreateChannel, channel),
        sample(
            O::ModifyChannel,
            ModifyChannel {
                channel: 77,
                eqn: EQ_NONE,
                ..ModifyChannel::zeroed()
            },
        ),
        object(O::DestroyChannel),
        sample(O::SetInterface, ethernet::interface(&node, 0)),
        sample(O::SetMulticastFilter, SetMulticastFilter::zeroed()),
        sample(
            O::QueryChannelCounters,
            QueryChannelCounters {
                channel: CHANNEL_NONE,
                ..QueryChannelCounters::zeroed()
            },
        ),
        sample(O::CreateFlow, CreateFlow::zeroed()),
        object(O::DestroyFlow),
        sample(O::CreateReceiveTable, CreateReceiveTable::zeroed()),
        object(O::DestroyReceiveTable),
    ];
    (node, samples)
}

/// Commands that have no structure of their own.
const PLAIN: [CommandOpcode; 4] = [
    CommandOpcode::Nop,
    CommandOpcode::QueryDevice,
    CommandOpcode::QueryClock,
    CommandOpcode::TakeFaults,
];

fn is_query(opcode: CommandOpcode) -> bool {
    use CommandOpcode as O;
    matches!(
        opcode,
        O::QueryDevice
            | O::QueryClock
            | O::QueryQueuePair
            | O::QuerySrq
            | O::QueryCounters
            | O::TakeFaults
            | O::QueryVectorMap
            | O::QueryCompletionQueue
            | O::QueryTag
            | O::QueryQueuePairCounters
            | O::QueryChannelCounters
    )
}

/// A place for replies: the last page of memory is never handed out.
const REPLY: u64 = MEMORY_BASE + ferrite_engine::testing::MEMORY_SIZE as u64 - 4096;
/// A place for structures that are not in the entry.
const REQUEST: u64 = REPLY - 2 * 4096;

fn entry(opcode: CommandOpcode, request: &[u8]) -> CommandEntry {
    let mut entry = CommandEntry::zeroed();
    entry.opcode = opcode.number();
    entry.request_length = request.len() as u32;
    let held = request.len().min(COMMAND_PAYLOAD);
    entry.payload[..held].copy_from_slice(&request[..held]);
    if is_query(opcode) {
        (entry.reply, entry.reply_length) = (REPLY, 4096);
    }
    entry
}

fn indirect(node: &Node, opcode: CommandOpcode, request: &[u8]) -> CommandEntry {
    node.host.memory.write(REQUEST, request).unwrap();
    CommandEntry {
        flags: COMMAND_INDIRECT,
        request: REQUEST,
        payload: [0; COMMAND_PAYLOAD],
        ..entry(opcode, request)
    }
}

fn status(node: &mut Node, entry: &CommandEntry) -> CommandStatus {
    let done = node.command_done(entry);
    CommandStatus::from_number(done.param0 as u8).expect("a status")
}

#[test]
fn there_is_a_sample_of_every_command() {
    let (_, samples) = samples();
    for number in 0..100 {
        if let Some(opcode) = CommandOpcode::from_number(number) {
            let known = samples.iter().any(|sample| sample.opcode == opcode);
            assert!(known != PLAIN.contains(&opcode), "{opcode:?}");
        }
    }
    // All structures but these have something reserved.
    for sample in samples {
        let all_used = matches!(sample.opcode, CommandOpcode::ModifySrq);
        assert_eq!(sample.reserved.is_empty(), all_used, "{:?}", sample.opcode);
    }
}

#[test]
fn reserved_fields_that_are_not_zero_are_refused_in_every_command() {
    let (mut node, samples) = samples();
    for sample in &samples {
        let good = status(&mut node, &entry(sample.opcode, &sample.bytes));
        assert_ne!(good, BadParameter, "{:?}", sample.opcode);
        for &at in &sample.reserved {
            let mut bytes = sample.bytes.clone();
            bytes[at] = 0x80;
            for entry in [
                entry(sample.opcode, &bytes),
                indirect(&node, sample.opcode, &bytes),
            ] {
                let status = status(&mut node, &entry);
                assert_eq!(status, BadParameter, "{:?}, byte {at}", sample.opcode);
            }
        }
    }
}

#[test]
fn a_structure_is_as_long_as_the_device_knows_it_or_ends_in_zeroes() {
    let (mut node, samples) = samples();
    let plain = PLAIN.map(|opcode| Sample {
        opcode,
        bytes: Vec::new(),
        reserved: Vec::new(),
    });
    for sample in samples.iter().chain(&plain) {
        let (opcode, size) = (sample.opcode, sample.bytes.len());
        let good = status(&mut node, &entry(opcode, &sample.bytes));
        assert_ne!(good, BadParameter, "{opcode:?}");
        let from_memory = indirect(&node, opcode, &sample.bytes);
        assert_eq!(status(&mut node, &from_memory), good, "{opcode:?}");
        // Short by a byte, though the byte is there and zero.
        if size > 0 {
            let mut short = entry(opcode, &sample.bytes);
            short.request_length -= 1;
            short.payload[size - 1] = 0;
            assert_eq!(status(&mut node, &short), BadParameter, "{opcode:?}");
        }
        // What a later driver adds and does not use, and what it uses.
        for length in [size + 1, size + 8, COMMAND_PAYLOAD, 4096] {
            let mut longer = sample.bytes.clone();
            longer.resize(length, 0);
            let commands = |node: &Node, bytes: &[u8]| {
                let direct = (length <= COMMAND_PAYLOAD).then(|| entry(opcode, bytes));
                [direct, Some(indirect(node, opcode, bytes))]
            };
            for entry in commands(&node, &longer).into_iter().flatten() {
                let status = status(&mut node, &entry);
                assert_eq!(status, good, "{opcode:?}, {length} bytes");
            }
            longer[length - 1] = 1;
            for entry in commands(&node, &longer).into_iter().flatten() {
                let status = status(&mut node, &entry);
                assert_eq!(status, BadParameter, "{opcode:?}, {length} bytes");
            }
        }
        // Behind it there is nothing.
        let mut more = entry(opcode, &sample.bytes);
        more.payload[COMMAND_PAYLOAD - 1] = 1;
        assert_eq!(status(&mut node, &more), BadParameter, "{opcode:?}");
    }
}

#[test]
fn a_structure_that_is_not_in_the_entry_is_read_from_memory() {
    let mut node = Node::new(1);
    let command = node.cq_template(5, EQ_FIRST_HANDLER, 4);
    let good = indirect(
        &node,
        CommandOpcode::CreateCompletionQueue,
        command.as_bytes(),
    );
    let beyond = MEMORY_BASE + ferrite_engine::testing::MEMORY_SIZE as u64;
    type E = CommandEntry;
    let mut stained = good;
    stained.payload[0] = 1;
    let mut direct = entry(CommandOpcode::CreateCompletionQueue, command.as_bytes());
    direct.request = REQUEST;
    for (refused, entry) in [
        (BadParameter, E { request: 0, ..good }),
        (
            BadParameter,
            E {
                request: REQUEST + 8,
                ..good
            },
        ),
        (
            BadParameter,
            E {
                request_length: COMMAND_MAX_REQUEST + 1,
                ..good
            },
        ),
        (
            BadParameter,
            E {
                request_length: u32::MAX,
                ..good
            },
        ),
        (BadParameter, stained),
        (BadParameter, direct),
        (
            NoMemory,
            E {
                request: beyond,
                ..good
            },
        ),
        (
            NoMemory,
            E {
                request: u64::MAX - 63,
                ..good
            },
        ),
        // Its end is not there.
        (
            NoMemory,
            E {
                request: beyond - 64,
                request_length: 128,
                ..good
            },
        ),
    ] {
        assert_eq!(status(&mut node, &entry), refused, "{entry:x?}");
    }
    assert_eq!(status(&mut node, &good), Done);
    let object = CommandOpcode::DestroyCompletionQueue;
    assert_eq!(node.object_command(object, 5), Done);
}

#[test]
fn flags_that_are_not_known_are_refused() {
    let mut node = Node::new(1);
    for bit in 1..16 {
        let nop = CommandEntry {
            flags: 1 << bit,
            ..entry(CommandOpcode::Nop, &[])
        };
        assert_eq!(status(&mut node, &nop), BadParameter, "bit {bit}");
    }
}

#[test]
fn a_reply_is_written_as_far_as_there_is_room_and_its_length_told() {
    let mut node = Node::new(1);
    node.create_qp(QpOptions::default());
    node.create_srq(3, 4, None);
    node.register(0x101, 1, ACCESS_LOCAL_WRITE, 4096);
    let mut counted = QueryQueuePairCounters::zeroed();
    (counted.count, counted.qpns[0]) = (1, 2);
    let object = |number| {
        ObjectNumber {
            number,
            reserved: 0,
        }
        .as_bytes()
        .to_vec()
    };
    for (opcode, request, size) in [
        (CommandOpcode::QueryDevice, vec![], size_of::<DeviceCaps>()),
        (CommandOpcode::QueryClock, vec![], size_of::<ClockReading>()),
        (
            CommandOpcode::QueryQueuePair,
            object(2),
            size_of::<QueuePairState>(),
        ),
        (CommandOpcode::QuerySrq, object(3), size_of::<SrqState>()),
        (
            CommandOpcode::QueryCounters,
            object(0),
            8 * COUNTER_NAMES.len(),
        ),
        (CommandOpcode::TakeFaults, vec![], size_of::<PageFaults>()),
        (
            CommandOpcode::QueryCompletionQueue,
            object(1),
            size_of::<CompletionQueueState>(),
        ),
        (
            CommandOpcode::QueryTag,
            object(0x101),
            size_of::<TagState>(),
        ),
        (
            CommandOpcode::QueryQueuePairCounters,
            counted.as_bytes().to_vec(),
            8 * COUNTER_NAMES.len(),
        ),
    ] {
        let query = entry(opcode, &request);
        for length in [1, 8, size - 1, size, size + 1, 4096] {
            let untouched = vec![0xaa; 4096];
            node.host.memory.write(REPLY, &untouched).unwrap();
            let done = node.command_done(&CommandEntry {
                reply_length: length as u32,
                ..query
            });
            assert_eq!((done.param0, done.param1), (0, size as u64), "{opcode:?}");
            let mut got = vec![0; 4096];
            node.host.memory.read(REPLY, &mut got).unwrap();
            let written = length.min(size);
            assert!(
                got[written..] == untouched[written..],
                "{opcode:?}, {length}"
            );
            // None of these begins with these bytes.
            assert!(
                got[..written] != untouched[..written],
                "{opcode:?}, {length}"
            );
        }
        for (reply, reply_length) in [(REPLY, 0), (0, 4096), (REPLY + 8, 64)] {
            let refused = CommandEntry {
                reply,
                reply_length,
                ..query
            };
            let done = node.command_done(&refused);
            let expected = (u64::from(BadParameter.number()), 0);
            assert_eq!((done.param0, done.param1), expected, "{opcode:?}");
        }
    }
}

#[test]
fn a_command_without_a_reply_names_no_place_for_one() {
    let (mut node, samples) = samples();
    for sample in samples.iter().filter(|sample| !is_query(sample.opcode)) {
        for (reply, reply_length) in [(REPLY, 0), (0, 64), (REPLY, 64)] {
            let entry = CommandEntry {
                reply,
                reply_length,
                ..entry(sample.opcode, &sample.bytes)
            };
            let status = status(&mut node, &entry);
            assert_eq!(status, BadParameter, "{:?}", sample.opcode);
        }
        assert_eq!(
            node.command_done(&entry(sample.opcode, &sample.bytes))
                .param1,
            0
        );
    }
}

#[test]
fn there_is_one_port_and_its_number_is_0() {
    let (mut node, samples) = samples();
    let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
    assert_eq!(caps.ports, 1);
    let ports = [
        (CommandOpcode::SetGid, std::mem::offset_of!(SetGid, port)),
        (CommandOpcode::SetPort, std::mem::offset_of!(SetPort, port)),
        (
            CommandOpcode::QueryCounters,
            std::mem::offset_of!(QueryCounters, port),
        ),
        (
            CommandOpcode::CreateQueuePair,
            std::mem::offset_of!(CreateQueuePair, port),
        ),
        (
            CommandOpcode::CreateChannel,
            std::mem::offset_of!(CreateChannel, port),
        ),
        (
            CommandOpcode::SetInterface,
            std::mem::offset_of!(SetInterface, port),
        ),
    ];
    for (opcode, at) in ports {
        let sample = samples.iter().find(|sample| sample.opcode == opcode);
        let mut bytes = sample.expect("a sample").bytes.clone();
        for port in [1, 255] {
            bytes[at] = port;
            assert_eq!(status(&mut node, &entry(opcode, &bytes)), BadNumber);
        }
    }
    // That of a path counts with the path.
    node.to_init(2);
    let peer = node.as_peer(2);
    let mut modify = ModifyQueuePair {
        qpn: 2,
        mask: MODIFY_STATE
            | MODIFY_ADDRESS_VECTOR
            | MODIFY_MTU
            | MODIFY_DESTINATION
            | MODIFY_RECEIVE_PSN
            | MODIFY_IRD
            | MODIFY_MIN_RNR_TIMER,
        state: QueuePairStateCode::Rtr.number(),
        log_mtu: 10,
        address_vector: peer.address_vector(),
        ..ModifyQueuePair::zeroed()
    };
    modify.address_vector.port = 1;
    assert_eq!(
        node.command(CommandOpcode::ModifyQueuePair, &modify),
        BadNumber
    );
    modify.address_vector.port = 0;
    node.execute(&modify);
}

#[test]
fn the_capabilities_tell_what_a_driver_must_know() {
    for (messages, handlers) in [(8, 6), (3, 1), (2, 1), (1, 1), (512, 510)] {
        let mut node = Node::power_on_with(1, |config| config.messages = messages);
        node.boot();
        let caps: DeviceCaps = node.query(CommandOpcode::QueryDevice, 0).unwrap();
        assert_eq!(caps.handlers, handlers, "{messages} messages");
        assert_eq!(caps.counters as usize, COUNTER_NAMES.len());
        assert_eq!((caps.clock_khz, caps.clock_bits), (1_000_000, 64));
        assert_eq!(caps.dma_bits, 64);
        assert_eq!(caps.transports, 1 << Transport::RoceV2.number());
        assert_eq!((caps.max_ord, caps.max_ird), (16, 16));
        assert_eq!(caps.command_timeout, 10_000);
        assert!(caps.reserved_is_zero());
        // As many pages as it says, and no more.
        let allocate = |max_pages| AllocateTag {
            tag: Tag::new(9, 1).0,
            pd: 1,
            kind: TagKind::Region.number(),
            reserved: [0; 3],
            max_pages,
        };
        let opcode = CommandOpcode::AllocateTag;
        let most = caps.max_fast_register_pages;
        assert_eq!(node.command(opcode, &allocate(most + 1)), BadParameter);
        assert_eq!(node.command(opcode, &allocate(most)), Done);
        assert_eq!(node.object_command(CommandOpcode::ReleaseTag, 0x901), Done);
        assert_eq!(
            node.object_command(CommandOpcode::ReleaseTag, 0x901),
            NotFound
        );
    }
}
