// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The control queue: commands of the driver.
//!
//! Commands are taken in order. Each is finished before the next is taken, which is one of the
//! orders the specification allows. What is done in one turn is bounded, however many there are and
//! whatever they ask for: the rest is done in the turns that follow, between the work of others.

use crate::core::{Core, MAX_LOG_MTU, PORTS};
use crate::eq::{event, MAX_EQ};
use crate::gid::MAX_GIDS;
use crate::memory::Host;
use crate::{cq, multicast, qp, srq, tpt, Engine};
use ferrite_abi::*;
use std::mem::{offset_of, size_of};

/// Work that commands may make in one turn.
const TURN_WORK: u32 = 2048;
/// What a command costs at least.
const COMMAND_WORK: u32 = 64;

/// A command that takes more than one turn.
#[derive(Debug)]
pub(crate) struct Unfinished {
    cookie: u32,
    rest: Rest,
}

/// What is left of a command to do.
#[derive(Debug)]
enum Rest {
    ResizeCompletionQueue(cq::Resize),
    ResizeSrq(srq::Resize),
    ModifyQueuePair(qp::Modification),
}

/// The most milliseconds that a command takes. What one does in a turn is bounded; the longest ones
/// flush or move a ring, some turns long.
const COMMAND_TIMEOUT: u32 = 10_000;
/// Bits of the clock that completions are stamped with, and its ticks in a millisecond.
const CLOCK_BITS: u8 = u64::BITS as u8;
const CLOCK_KHZ: u32 = 1_000_000;
/// Bits of a DMA address.
const DMA_BITS: u8 = u64::BITS as u8;

/// Whether a command fills a reply.
fn has_reply(opcode: CommandOpcode) -> bool {
    matches!(
        opcode,
        CommandOpcode::QueryDevice
            | CommandOpcode::QueryClock
            | CommandOpcode::QueryQueuePair
            | CommandOpcode::QuerySrq
            | CommandOpcode::QueryCounters
            | CommandOpcode::TakeFaults
            | CommandOpcode::QueryVectorMap
    )
}

/// Checks what all commands have in common, and finds the command's own structure: in the entry, or
/// in host memory, from where it is copied to `indirect`.
fn request<'a>(
    entry: &'a CommandEntry,
    opcode: CommandOpcode,
    indirect: &'a mut Vec<u8>,
    host: &dyn Host,
) -> Result<&'a [u8], CommandStatus> {
    let reply_is_good = if has_reply(opcode) {
        entry.reply != 0 && entry.reply % 64 == 0 && entry.reply_length != 0
    } else {
        entry.reply == 0 && entry.reply_length == 0
    };
    let is_indirect = entry.flags & COMMAND_INDIRECT != 0;
    let length = entry.request_length as usize;
    let held = if is_indirect { 0 } else { length };
    let rest = entry.payload.get(held..);
    if entry.flags & !COMMAND_INDIRECT != 0
        || !reply_is_good
        || !rest.is_some_and(|rest| rest.iter().all(|&byte| byte == 0))
    {
        return Err(CommandStatus::BadParameter);
    }
    if !is_indirect {
        if entry.request != 0 {
            return Err(CommandStatus::BadParameter);
        }
        return Ok(&entry.payload[..length]);
    }
    if entry.request == 0 || entry.request % 64 != 0 || entry.request_length > COMMAND_MAX_REQUEST {
        return Err(CommandStatus::BadParameter);
    }
    indirect.resize(length, 0);
    host.read(entry.request, indirect)
        .map_err(|_| CommandStatus::HostMemory)?;
    Ok(indirect)
}

/// The structure of a command. What follows what the device knows of it, from a driver that knows
/// more, is zero as long as that does not use it; and so is all that is reserved.
fn parse<P: Plain + Reserved>(request: &[u8]) -> Result<P, CommandStatus> {
    let value = P::from_prefix(request).ok_or(CommandStatus::BadParameter)?;
    if !value.reserved_is_zero() {
        return Err(CommandStatus::BadParameter);
    }
    without_structure(&request[size_of::<P>()..])?;
    Ok(value)
}

/// Checks the structure of a command that has none.
fn without_structure(request: &[u8]) -> Result<(), CommandStatus> {
    if request.iter().any(|&byte| byte != 0) {
        return Err(CommandStatus::BadParameter);
    }
    Ok(())
}

fn object_number(request: &[u8]) -> Result<u32, CommandStatus> {
    parse::<ObjectNumber>(request).map(|object| object.number)
}

fn check_port(port: u8) -> Result<(), CommandStatus> {
    if port >= PORTS {
        return Err(CommandStatus::BadNumber);
    }
    Ok(())
}

/// Writes the reply of a query, as much of it as there is room for; returns the bytes of all of it.
fn reply<P: Plain>(
    core: &mut Core,
    entry: &CommandEntry,
    value: &P,
    host: &dyn Host,
) -> Result<u64, CommandStatus> {
    reply_bytes(core, entry, value.as_bytes(), host)
}

fn reply_bytes(
    core: &mut Core,
    entry: &CommandEntry,
    bytes: &[u8],
    host: &dyn Host,
) -> Result<u64, CommandStatus> {
    let room = bytes.len().min(entry.reply_length as usize);
    let written = match &mut core.misbehaviour {
        None => host.write(entry.reply, &bytes[..room]),
        Some(misbehaving) => {
            let mut bytes = bytes.to_vec();
            misbehaving.spoil_reply(&mut bytes);
            host.write(entry.reply, &bytes[..room])
        }
    };
    written.map_err(|_| CommandStatus::HostMemory)?;
    Ok(bytes.len() as u64)
}

/// Refuses what the driver did not say it would use.
fn offered(core: &Core, feature: u64) -> Result<(), CommandStatus> {
    if core.features & feature != feature {
        return Err(CommandStatus::Unsupported);
    }
    Ok(())
}

/// What the device can do.
fn caps(core: &Core) -> DeviceCaps {
    let mut page_sizes = 0;
    for shift in PAGE_SHIFT_MIN..=PAGE_SHIFT_MAX {
        page_sizes |= 1 << shift;
    }
    let config = &core.config;
    DeviceCaps {
        qp_first: config.qps.first,
        qp_count: config.qps.count,
        cq_first: config.cqs.first,
        cq_count: config.cqs.count,
        srq_first: config.srqs.first,
        srq_count: config.srqs.count,
        tag_first: config.tags.first,
        tag_count: config.tags.count,
        max_eq: MAX_EQ,
        max_gid: MAX_GIDS,
        max_ord: qp::MAX_READ,
        max_ird: qp::MAX_READ,
        max_log_mtu: MAX_LOG_MTU,
        sq_max_log_blocks: SQ_MAX_LOG_BLOCKS,
        rq_max_log_entries: RQ_MAX_LOG_ENTRIES,
        cq_max_log_entries: CQ_MAX_LOG_ENTRIES,
        eq_max_log_entries: EQ_MAX_LOG_ENTRIES,
        max_sge: MAX_SGE as u8,
        max_inline: MAX_INLINE as u32,
        max_message: u64::from(MAX_MESSAGE),
        max_region: tpt::MAX_REGION,
        page_sizes,
        features: config.offered_features(),
        guid: config.guid,
        clock_khz: CLOCK_KHZ,
        clock_bits: CLOCK_BITS,
        dma_bits: DMA_BITS,
        ports: PORTS,
        transports: 1 << Transport::RoceV2.number(),
        max_xrcd: srq::MAX_XRCD,
        max_multicast: multicast::MAX_MULTICAST as u32,
        max_fast_register_pages: tpt::MAX_FAST_PAGES,
        command_timeout: COMMAND_TIMEOUT,
        counters: COUNTER_NAMES.len() as u32,
        // Those that need not share a message, but one at least.
        handlers: u32::from(config.messages.min(MAX_EQ))
            .saturating_sub(EQ_FIRST_HANDLER.into())
            .max(1),
        reserved: [0; 17],
    }
}

impl Engine {
    /// The driver has posted commands up to `producer`.
    pub(crate) fn control_doorbell(&mut self, producer: u32, host: &mut dyn Host) {
        let Some(ring) = self.control else {
            return;
        };
        if producer.wrapping_sub(ring.consumer) > 1 << ring.log_entries {
            self.core.fail(FatalCode::BadCommandIndex, host);
            return;
        }
        self.control = Some(crate::ControlRing { producer, ..ring });
        self.run_commands(host);
    }

    /// Whether there are commands that were not finished.
    pub(crate) fn has_commands(&self) -> bool {
        self.unfinished.is_some()
            || self
                .control
                .is_some_and(|ring| ring.consumer != ring.producer)
    }

    /// Carries out commands for a turn.
    pub(crate) fn run_commands(&mut self, host: &mut dyn Host) {
        let start = self.core.work;
        let mut commands = 0;
        while self.core.is_running() {
            let work = self.core.work.wrapping_sub(start) as u32;
            let Some(left) = TURN_WORK
                .checked_sub(work.saturating_add(commands * COMMAND_WORK))
                .filter(|&left| left > 0)
            else {
                return;
            };
            if let Some(Unfinished { cookie, mut rest }) = self.unfinished.take() {
                let (core, qps) = (&mut self.core, &mut self.qps);
                let result = match &mut rest {
                    Rest::ResizeCompletionQueue(resize) => core.resize_some(resize, left, host),
                    Rest::ResizeSrq(resize) => core.resize_srq_some(resize, left, host),
                    Rest::ModifyQueuePair(modification) => {
                        qp::modify_some(core, qps, modification, left, host)
                    }
                };
                match result {
                    Some(result) => self.finish_command(cookie, result.map(|()| 0), host),
                    None => self.unfinished = Some(Unfinished { cookie, rest }),
                }
                continue;
            }
            let Some(ring) = self.control.filter(|ring| ring.consumer != ring.producer) else {
                return;
            };
            let mut consumer = ring.consumer;
            commands += 1;
            let slot = u64::from(consumer & ((1 << ring.log_entries) - 1));
            let mut entry = CommandEntry::zeroed();
            // Cannot wrap: the whole ring was checked at the start.
            let address = ring.address + slot * size_of::<CommandEntry>() as u64;
            if host.read(address, entry.as_bytes_mut()).is_err() {
                self.core.fail(FatalCode::HostMemory, host);
                return;
            }
            consumer = consumer.wrapping_add(1);
            self.control = Some(crate::ControlRing { consumer, ..ring });
            let result = self.execute(&entry, host);
            if self.unfinished.is_none() {
                self.finish_command(entry.cookie, result, host);
            }
        }
    }

    fn finish_command(
        &mut self,
        cookie: u32,
        result: Result<u64, CommandStatus>,
        host: &mut dyn Host,
    ) {
        let (status, reply_bytes) = match result {
            Ok(bytes) => (CommandStatus::Ok, bytes),
            Err(status) => (status, 0),
        };
        self.core.counters.commands += 1;
        if status != CommandStatus::Ok {
            self.core.counters.failed_commands += 1;
        }
        let done = event(
            EventCode::CommandDone,
            cookie,
            u64::from(status.number()),
            reply_bytes,
        );
        self.core
            .post_event(self.core.route(EventCode::CommandDone), done, host);
    }

    /// Carries out a command; returns the bytes of its reply.
    fn execute(&mut self, entry: &CommandEntry, host: &mut dyn Host) -> Result<u64, CommandStatus> {
        let core = &mut self.core;
        let now = core.now;
        let cookie = entry.cookie;
        let unfinished = |rest| Some(Unfinished { cookie, rest });
        let opcode = CommandOpcode::from_number(entry.opcode).ok_or(CommandStatus::BadOpcode)?;
        let mut indirect = Vec::new();
        let request = request(entry, opcode, &mut indirect, host)?;
        let done = match opcode {
            CommandOpcode::Nop => without_structure(request),
            CommandOpcode::QueryDevice => {
                without_structure(request)?;
                let caps = caps(core);
                return reply(core, entry, &caps, host);
            }
            CommandOpcode::QueryClock => {
                without_structure(request)?;
                let reading = ClockReading {
                    ticks: now,
                    reserved: [0; 7],
                };
                return reply(core, entry, &reading, host);
            }
            CommandOpcode::CreateEventQueue => core.create_eq(&parse(request)?),
            CommandOpcode::DestroyEventQueue => core.destroy_eq(object_number(request)?, host),
            CommandOpcode::ModifyEventQueue => core.modify_eq(&parse(request)?, now, host),
            CommandOpcode::SwitchEventQueue => {
                offered(core, FEATURE_SWITCH_EQ)?;
                core.switch_eq(&parse(request)?, now, host)
            }
            CommandOpcode::SetVectorMap => {
                offered(core, FEATURE_VECTOR_MAP)?;
                core.set_vector_map(&parse(request)?)
            }
            CommandOpcode::QueryVectorMap => {
                offered(core, FEATURE_VECTOR_MAP)?;
                let entries = core.query_vector_map(&parse(request)?)?;
                let bytes: Vec<u8> = entries.iter().flat_map(Plain::as_bytes).copied().collect();
                return reply_bytes(core, entry, &bytes, host);
            }
            CommandOpcode::CreateCompletionQueue => core.create_cq(&parse(request)?, host),
            CommandOpcode::ModifyCompletionQueue => core.modify_cq(&parse(request)?, host),
            CommandOpcode::ResizeCompletionQueue => {
                offered(core, FEATURE_RESIZE_CQ)?;
                let resize = core.begin_resize(&parse(request)?, host)?;
                self.unfinished = unfinished(Rest::ResizeCompletionQueue(resize));
                Ok(())
            }
            CommandOpcode::DestroyCompletionQueue => core.destroy_cq(object_number(request)?),
            CommandOpcode::CreateQueuePair => {
                qp::create(core, &mut self.qps, &parse(request)?, host)
            }
            CommandOpcode::ModifyQueuePair => {
                let modification = qp::Modification::new(parse(request)?);
                self.unfinished = unfinished(Rest::ModifyQueuePair(modification));
                Ok(())
            }
            CommandOpcode::QueryQueuePair => {
                let state = qp::query(&self.qps, object_number(request)?)?;
                return reply(core, entry, &state, host);
            }
            CommandOpcode::DestroyQueuePair => {
                qp::destroy(core, &mut self.qps, object_number(request)?, host)
            }
            CommandOpcode::RegisterRegion => {
                let command: RegisterRegion = parse(request)?;
                offered(core, tpt::access_features(command.access))?;
                if command.flags & REGION_DEVICE_MEMORY != 0 {
                    offered(core, FEATURE_DEVICE_MEMORY)?;
                }
                if command.flags & REGION_ON_DEMAND != 0 {
                    offered(core, FEATURE_ON_DEMAND)?;
                }
                core.tpt.register(&command)
            }
            CommandOpcode::AllocateTag => {
                let command: AllocateTag = parse(request)?;
                let needed = match TagKind::from_number(command.kind) {
                    Some(TagKind::Region) => FEATURE_FAST_REGISTER,
                    Some(TagKind::List) => FEATURE_LISTS,
                    _ => FEATURE_WINDOWS,
                };
                offered(core, needed)?;
                core.tpt.allocate(&command)
            }
            CommandOpcode::ReleaseTag => core.tpt.release(Tag(object_number(request)?)),
            CommandOpcode::SetGid => {
                let command: SetGid = parse(request)?;
                check_port(command.port)?;
                core.gids.set(&command)
            }
            CommandOpcode::CreateSrq => {
                offered(core, FEATURE_SRQ)?;
                core.create_srq(&parse(request)?, host)
            }
            CommandOpcode::ModifySrq => {
                offered(core, FEATURE_SRQ)?;
                core.modify_srq(&parse(request)?, host)
            }
            CommandOpcode::ResizeSrq => {
                offered(core, FEATURE_SRQ | FEATURE_RESIZE_SRQ)?;
                let resize = core.begin_srq_resize(&parse(request)?, host)?;
                self.unfinished = unfinished(Rest::ResizeSrq(resize));
                Ok(())
            }
            CommandOpcode::QuerySrq => {
                offered(core, FEATURE_SRQ)?;
                let state = core.query_srq(object_number(request)?, host)?;
                return reply(core, entry, &state, host);
            }
            CommandOpcode::DestroySrq => {
                offered(core, FEATURE_SRQ)?;
                core.destroy_srq(object_number(request)?)
            }
            CommandOpcode::SetPort => {
                offered(core, FEATURE_PORT_MTU)?;
                let command: SetPort = parse(request)?;
                check_port(command.port)?;
                if !(8..=MAX_LOG_MTU).contains(&command.log_mtu) {
                    return Err(CommandStatus::BadParameter);
                }
                core.log_mtu = command.log_mtu;
                Ok(())
            }
            CommandOpcode::AttachMulticast => {
                offered(core, FEATURE_MULTICAST)?;
                core.groups.attach(&self.qps, &parse(request)?)
            }
            CommandOpcode::DetachMulticast => {
                offered(core, FEATURE_MULTICAST)?;
                core.groups.detach(&self.qps, &parse(request)?)
            }
            CommandOpcode::TakeFaults => {
                offered(core, FEATURE_ON_DEMAND)?;
                without_structure(request)?;
                // A fault that cannot be told of is not taken.
                let room = faults_in(entry.reply_length);
                let faults = core.paging.raised(room);
                let bytes = reply(core, entry, &faults, host)?;
                core.paging.take(&faults, room);
                return Ok(bytes);
            }
            CommandOpcode::ResolveFault => {
                offered(core, FEATURE_ON_DEMAND)?;
                let (qpn, side) = core.paging.resolve(&parse(request)?)?;
                if let Some(qp) = self.qps.get_mut(qpn) {
                    crate::transport::page_resolved(core, qp, side, host);
                }
                Ok(())
            }
            CommandOpcode::InvalidatePages => {
                offered(core, FEATURE_ON_DEMAND)?;
                core.tpt.invalidate_pages(&parse(request)?)
            }
            CommandOpcode::QueryCounters => {
                let command: QueryCounters = parse(request)?;
                check_port(command.port)?;
                let mut bytes = [0; COUNTER_NAMES.len() * 8];
                for (bytes, value) in bytes.chunks_exact_mut(8).zip(core.counters.named()) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                return reply_bytes(core, entry, &bytes, host);
            }
        };
        done.map(|()| 0)
    }
}

/// Whole faults that a reply of `length` bytes has room for.
fn faults_in(length: u32) -> usize {
    (length as usize).saturating_sub(offset_of!(PageFaults, faults)) / size_of::<PageFault>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Node, QpOptions, SendWork};

    const LOG_ENTRIES: u8 = 13;
    const RESIZES: u32 = 30;
    /// Of a shared receive queue with the largest entries.
    const SHARED_LOG_ENTRIES: u8 = 12;

    /// A completion queue full of unread entries, and commands that move it to and fro.
    fn slow_commands(node: &mut Node) -> Vec<CommandEntry> {
        node.create_cq(2, EQ_FIRST_HANDLER, LOG_ENTRIES);
        for _ in 0..1 << LOG_ENTRIES {
            let (core, host) = (&mut node.engine.core, &mut node.host);
            core.write_completion(2, CompletionEntry::zeroed(), false, host)
                .unwrap();
        }
        let places = [0, 1].map(|_| node.cq_template(2, EQ_FIRST_HANDLER, LOG_ENTRIES));
        let resize = |n| {
            let place = places[n as usize % 2];
            let command = ResizeCompletionQueue {
                cqn: 2,
                log_entries: LOG_ENTRIES,
                reserved: [0; 3],
                record_offset: place.record_offset,
                reserved1: 0,
                buffer: place.buffer,
            };
            CommandEntry::new(CommandOpcode::ResizeCompletionQueue, 0, (0, 0), &command)
        };
        (0..RESIZES).map(resize).collect()
    }

    #[test]
    fn slow_commands_are_done_in_pieces_between_the_work_of_others() {
        let mut node = Node::new(1);
        for (qpn, peer) in [(2, 3), (3, 2)] {
            node.create_qp(QpOptions {
                qpn,
                ..QpOptions::default()
            });
            let peer = node.as_peer(peer);
            node.connect(qpn, &peer);
        }
        let region = node.register(0x101, 1, ACCESS_LOCAL_WRITE | ACCESS_REMOTE, 4096);
        let write = SendWork::new(SendOpcode::Write, &[region.sge(0, 64)])
            .remote(region.address, region.tag)
            .flags(SEND_SIGNALED);
        node.post_send(2, &write);
        let commands = slow_commands(&mut node);
        let before = node.engine.counters().commands;
        for entry in &commands {
            node.put_command(entry);
        }
        let (mut turns, mut writes, mut work) = (0, 0, node.engine.core.work);
        node.ring_control();
        while node.engine.has_commands() {
            let done = node.engine.core.work - work;
            assert!(done <= u64::from(TURN_WORK), "{done} entries in a turn");
            work = node.engine.core.work;
            node.now += 1000;
            node.engine.poll(node.now, &mut node.host);
            turns += 1;
            if let Some(completion) = node.poll_cq(1) {
                assert_eq!(completion.status, CompletionStatus::Success.number());
                node.post_send(2, &write);
                writes += 1;
            }
        }
        assert_eq!(node.engine.counters().commands - before, RESIZES.into());
        assert_eq!(node.engine.counters().failed_commands, 0);
        assert!(turns >= (RESIZES << LOG_ENTRIES) / TURN_WORK, "{turns}");
        assert!(writes > turns / 4, "{writes} writes in {turns} turns");
    }

    #[test]
    fn a_reset_ends_a_command_that_is_under_way() {
        let mut node = Node::new(1);
        let commands = slow_commands(&mut node);
        for entry in &commands {
            node.put_command(entry);
        }
        node.ring_control();
        assert!(node.engine.has_commands());
        node.write_register(REG_CONTROL, 4, u64::from(CONTROL_RESET));
        assert!(!node.engine.has_commands());
        assert_eq!(node.engine.next_timeout(), None);
        node.boot();
        assert_eq!(
            node.object_command(CommandOpcode::DestroyCompletionQueue, 2),
            CommandStatus::NotFound
        );
    }

    #[test]
    fn commands_that_were_not_copied_yet_can_be_taken_back() {
        let mut node = Node::new(1);
        let commands = slow_commands(&mut node);
        for entry in &commands {
            node.put_command(entry);
        }
        let before = node.engine.counters().commands;
        node.ring_control();
        let copied = node.engine.control.unwrap().consumer;
        node.doorbell(0, DOORBELL_CONTROL, u64::from(copied));
        while node.engine.has_commands() {
            node.engine.poll(node.now, &mut node.host);
        }
        let done = node.engine.counters().commands - before;
        assert!((1..u64::from(RESIZES)).contains(&done), "{done}");
        assert_eq!(node.status().state(), Some(DeviceState::Running));
        // What was copied stays given.
        node.doorbell(0, DOORBELL_CONTROL, u64::from(copied - 1));
        assert_eq!(node.status().fatal(), Some(FatalCode::BadCommandIndex));
    }

    /// A shared receive queue that is full, though the device has not looked, and the command that
    /// moves it.
    fn full_shared_queue(node: &mut Node) -> (CommandEntry, u64) {
        const SRQN: u32 = 4;
        node.create_srq(SRQN, SHARED_LOG_ENTRIES, None);
        let place = node.srq_template(SRQN, SHARED_LOG_ENTRIES);
        let old = node.srq_buffer(SRQN).start;
        for index in 0..1u64 << SHARED_LOG_ENTRIES {
            let header = ReceiveHeader {
                id: index as u32,
                ..ReceiveHeader::zeroed()
            };
            let at = index << RQ_MAX_LOG_STRIDE;
            node.host.memory.put(old + at, &header);
        }
        let posted = 1u32 << SHARED_LOG_ENTRIES;
        for ring in [old, place.buffer.root] {
            let record = ring + u64::from(place.record_offset);
            node.host.memory.put(record, &posted);
        }
        let resize = ResizeSrq {
            srqn: SRQN,
            log_entries: SHARED_LOG_ENTRIES,
            reserved: [0; 3],
            ring_offset: place.ring_offset,
            record_offset: place.record_offset,
            buffer: place.buffer,
        };
        let entry = CommandEntry::new(CommandOpcode::ResizeSrq, 0, (0, 0), &resize);
        (entry, place.buffer.root)
    }

    #[test]
    fn a_shared_queue_is_moved_in_pieces_while_entries_are_taken() {
        let mut node = Node::new(1);
        let (resize, other) = full_shared_queue(&mut node);
        let record = other + (1 << SHARED_LOG_ENTRIES << RQ_MAX_LOG_STRIDE);
        let wake = record + offset_of!(SrqRecord, wake) as u64;
        node.host.memory.put(wake, &1u32);
        node.put_command(&resize);
        let (mut turns, mut taken, mut work) = (0u32, 0u32, node.engine.core.work);
        node.ring_control();
        while node.engine.has_commands() {
            let done = node.engine.core.work - work;
            assert!(done <= u64::from(TURN_WORK), "{done} entries in a turn");
            work = node.engine.core.work;
            // One that was moved, or one that was not.
            let mut request = crate::ReceiveRequest::default();
            let (core, host) = (&mut node.engine.core, &mut node.host);
            assert!(core.take_shared(4, &mut request, host).unwrap());
            assert_eq!(request.id, taken);
            taken += 1;
            node.engine.poll(node.now, &mut node.host);
            turns += 1;
        }
        assert!(
            turns >= (1 << SHARED_LOG_ENTRIES) / TURN_WORK,
            "{turns} turns"
        );
        assert_eq!(node.engine.counters().failed_commands, 0);
        // All others are in the new ring, and the old one is not looked at.
        let old = node.srq_buffer(4);
        node.host.memory.take_away(old);
        while taken < 1 << SHARED_LOG_ENTRIES {
            let mut request = crate::ReceiveRequest::default();
            let (core, host) = (&mut node.engine.core, &mut node.host);
            assert!(core.take_shared(4, &mut request, host).unwrap());
            assert_eq!(request.id, taken);
            taken += 1;
        }
        assert_eq!(node.host.memory.get::<u32>(wake), 0);
    }

    #[test]
    fn a_shared_queue_that_is_posted_to_or_fails_while_it_is_moved_stays_where_it_is() {
        // Posted to; spoiled, and found so at the end, or by who takes an entry before that.
        for (fails, found) in [(false, false), (true, false), (true, true)] {
            let mut node = Node::new(1);
            let (resize, _) = full_shared_queue(&mut node);
            node.put_command(&resize);
            node.ring_control();
            assert!(node.engine.has_commands());
            let old = node.srq_buffer(4);
            let record = old.end - size_of::<SrqRecord>() as u64;
            let posted = if fails {
                u32::MAX
            } else {
                (1 << SHARED_LOG_ENTRIES) + 1
            };
            // Room for one more.
            let take = |node: &mut Node| {
                let mut request = crate::ReceiveRequest::default();
                let (core, host) = (&mut node.engine.core, &mut node.host);
                core.take_shared(4, &mut request, host)
            };
            assert_eq!(take(&mut node), Ok(true));
            node.host.memory.put(record, &posted);
            if found {
                // What was known of before can still be taken.
                while take(&mut node) == Ok(true) {}
                assert!(take(&mut node).is_err());
            }
            while node.engine.has_commands() {
                node.engine.poll(node.now, &mut node.host);
            }
            assert_eq!(node.engine.counters().failed_commands, 1);
            let done = node.events(EQ_CONTROL).pop().unwrap();
            let status = if found {
                CommandStatus::BadState
            } else {
                CommandStatus::BadParameter
            };
            assert_eq!(done.param0, status.number().into());
            if !fails {
                for _ in 0..1 << SHARED_LOG_ENTRIES {
                    assert_eq!(take(&mut node), Ok(true));
                }
                assert_eq!(take(&mut node), Ok(false));
            }
        }
    }

    #[test]
    fn a_long_queue_is_flushed_in_pieces_and_whole() {
        const POSTED: u32 = 6000;
        let mut node = Node::new(1);
        node.create_cq(2, EQ_FIRST_HANDLER, LOG_ENTRIES);
        node.create_qp(QpOptions {
            cqn: 2,
            log_blocks: LOG_ENTRIES,
            log_entries: 1,
            ..QpOptions::default()
        });
        let peer = node.as_peer(77);
        node.connect(2, &peer);
        // Not told of yet, so that none is taken up.
        let send = SendWork::new(SendOpcode::Send, &[]).encode();
        for _ in 0..POSTED {
            node.write_blocks(2, &send);
        }
        let record = node.qp_record(2);
        node.host.memory.put(record, &POSTED);
        let mut work = node.engine.core.work;
        assert_eq!(
            node.set_state(2, QueuePairStateCode::Error),
            CommandStatus::Ok
        );
        let mut flushed = 0;
        loop {
            let done = node.engine.core.work - work;
            assert!(done <= u64::from(TURN_WORK), "{done} entries in a turn");
            work = node.engine.core.work;
            while let Some(completion) = node.poll_cq(2) {
                assert_eq!(completion.status, CompletionStatus::Flushed.number());
                assert_eq!(completion.index, flushed);
                flushed += 1;
            }
            if node.engine.next_timeout().is_none_or(|at| at > node.now) {
                break;
            }
            node.engine.poll(node.now, &mut node.host);
        }
        assert_eq!(flushed, POSTED);
    }

    #[test]
    fn queue_pairs_that_give_up_at_once_are_flushed_in_turns() {
        const QPS: u32 = 16;
        const POSTED: u32 = 1500;
        let mut node = Node::new(1);
        node.create_cq(2, EQ_FIRST_HANDLER, 15);
        let send = SendWork::new(SendOpcode::Send, &[]).encode();
        for qpn in 2..2 + QPS {
            node.create_qp(QpOptions {
                qpn,
                cqn: 2,
                log_blocks: 11,
                log_entries: 1,
                ..QpOptions::default()
            });
            let mut peer = node.as_peer(77);
            (peer.timeout, peer.retry_count) = (14, 0);
            node.connect(qpn, &peer);
            for _ in 0..POSTED {
                node.write_blocks(qpn, &send);
            }
            node.publish_send(qpn);
        }
        node.settle();
        node.now += 1_000_000_000;
        let (mut work, mut flushed) = (node.engine.core.work, 0);
        while node.engine.next_timeout().is_some_and(|at| at <= node.now) {
            node.engine.poll(node.now, &mut node.host);
            let done = node.engine.core.work - work;
            assert!(done <= 3 * u64::from(TURN_WORK), "{done} entries in a turn");
            work = node.engine.core.work;
            while node.poll_cq(2).is_some() {
                flushed += 1;
            }
        }
        assert_eq!(flushed, QPS * POSTED);
    }
}
