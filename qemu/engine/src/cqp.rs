// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The control queue: commands of the driver.
//!
//! Commands are taken in order. Each is finished before the next is taken, which is one of the
//! orders the specification allows. What is done in one turn is bounded, however many there are and
//! whatever they ask for: the rest is done in the turns that follow, between the work of others.

use crate::core::{Core, MAX_LOG_MTU};
use crate::eq::{event, MAX_EQ};
use crate::gid::MAX_GIDS;
use crate::memory::Host;
use crate::{cq, multicast, qp, srq, tpt, Engine, FEATURES};
use ferrite_abi::*;
use std::mem::size_of;

/// Work that commands may make in one turn.
const TURN_WORK: u32 = 2048;
/// What a command costs at least.
const COMMAND_WORK: u32 = 64;

/// A command that takes more than one turn.
#[derive(Debug)]
pub(crate) struct Unfinished {
    cookie: u32,
    resize: cq::Resize,
}

/// The payload of a command, which always fits.
fn payload<P: Plain>(entry: &CommandEntry) -> Result<P, CommandStatus> {
    P::from_prefix(&entry.payload).ok_or(CommandStatus::BadParameter)
}

/// Writes the reply of a query.
fn reply<P: Plain>(
    core: &mut Core,
    entry: &CommandEntry,
    value: &P,
    host: &dyn Host,
) -> Result<(), CommandStatus> {
    reply_bytes(core, entry, value.as_bytes(), host)
}

fn reply_bytes(
    core: &mut Core,
    entry: &CommandEntry,
    bytes: &[u8],
    host: &dyn Host,
) -> Result<(), CommandStatus> {
    if entry.reply == 0 || entry.reply % 64 != 0 {
        return Err(CommandStatus::BadParameter);
    }
    let written = match &mut core.misbehaviour {
        None => host.write(entry.reply, bytes),
        Some(misbehaving) => {
            let mut bytes = bytes.to_vec();
            misbehaving.spoil_reply(&mut bytes);
            host.write(entry.reply, &bytes)
        }
    };
    written.map_err(|_| CommandStatus::HostMemory)
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
    DeviceCaps {
        max_qp: qp::MAX_QP,
        max_cq: cq::MAX_CQ,
        max_srq: srq::MAX_SRQ,
        max_tags: tpt::MAX_TAGS,
        max_eq: MAX_EQ,
        max_gid: MAX_GIDS,
        max_read: qp::MAX_READ,
        max_log_mtu: MAX_LOG_MTU,
        sq_max_log_blocks: SQ_MAX_LOG_BLOCKS,
        rq_max_log_entries: RQ_MAX_LOG_ENTRIES,
        cq_max_log_entries: CQ_MAX_LOG_ENTRIES,
        eq_max_log_entries: EQ_MAX_LOG_ENTRIES,
        max_sge: MAX_SGE as u8,
        reserved0: 0,
        max_inline: MAX_INLINE as u32,
        max_message: u64::from(MAX_MESSAGE),
        max_region: tpt::MAX_REGION,
        page_sizes,
        features: core.config.features & FEATURES,
        guid: core.config.guid,
        doorbell_pages: DOORBELL_PAGES as u32,
        // Time is in nanoseconds.
        clock_khz: 1_000_000,
        device_memory: if core.config.features & FEATURE_DEVICE_MEMORY != 0 {
            DEVICE_MEMORY_SIZE as u64
        } else {
            0
        },
        max_xrcd: srq::MAX_XRCD,
        max_multicast: multicast::MAX_MULTICAST as u32,
        reserved1: [0; 20],
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
            if let Some(Unfinished { cookie, mut resize }) = self.unfinished.take() {
                match self.core.resize_some(&mut resize, left, host) {
                    Some(result) => self.finish_command(cookie, result, host),
                    None => self.unfinished = Some(Unfinished { cookie, resize }),
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
        result: Result<(), CommandStatus>,
        host: &mut dyn Host,
    ) {
        let status = match result {
            Ok(()) => CommandStatus::Ok,
            Err(status) => status,
        };
        self.core.counters.commands += 1;
        if status != CommandStatus::Ok {
            self.core.counters.failed_commands += 1;
        }
        let done = event(
            EventCode::CommandDone,
            cookie,
            u64::from(status.number()),
            0,
        );
        self.core.post_event(EQ_CONTROL, done, host);
    }

    fn execute(&mut self, entry: &CommandEntry, host: &mut dyn Host) -> Result<(), CommandStatus> {
        let core = &mut self.core;
        let now = core.now;
        let opcode = CommandOpcode::from_number(entry.opcode).ok_or(CommandStatus::BadOpcode)?;
        match opcode {
            CommandOpcode::Nop => Ok(()),
            CommandOpcode::QueryDevice => {
                let caps = caps(core);
                reply(core, entry, &caps, host)
            }
            CommandOpcode::QueryClock => {
                let reading = ClockReading {
                    ticks: now,
                    reserved: [0; 7],
                };
                reply(core, entry, &reading, host)
            }
            CommandOpcode::CreateEventQueue => core.create_eq(&payload(entry)?),
            CommandOpcode::DestroyEventQueue => {
                core.eqs.destroy(payload::<ObjectNumber>(entry)?.number)
            }
            CommandOpcode::ModifyEventQueue => core.modify_eq(&payload(entry)?, now, host),
            CommandOpcode::CreateCompletionQueue => core.create_cq(&payload(entry)?, host),
            CommandOpcode::ModifyCompletionQueue => core.modify_cq(&payload(entry)?, host),
            CommandOpcode::ResizeCompletionQueue => {
                if core.features & FEATURE_RESIZE_CQ == 0 {
                    return Err(CommandStatus::Unsupported);
                }
                let resize = core.begin_resize(&payload(entry)?, host)?;
                let cookie = entry.cookie;
                self.unfinished = Some(Unfinished { cookie, resize });
                Ok(())
            }
            CommandOpcode::DestroyCompletionQueue => {
                core.destroy_cq(payload::<ObjectNumber>(entry)?.number)
            }
            CommandOpcode::CreateQueuePair => {
                qp::create(core, &mut self.qps, &payload(entry)?, host)
            }
            CommandOpcode::ModifyQueuePair => {
                qp::modify(core, &mut self.qps, &payload(entry)?, host)
            }
            CommandOpcode::QueryQueuePair => {
                let state = qp::query(&self.qps, payload::<ObjectNumber>(entry)?.number)?;
                reply(core, entry, &state, host)
            }
            CommandOpcode::DestroyQueuePair => {
                let number = payload::<ObjectNumber>(entry)?.number;
                qp::destroy(core, &mut self.qps, number, host)
            }
            CommandOpcode::RegisterRegion => {
                let command: RegisterRegion = payload(entry)?;
                offered(core, tpt::access_features(command.access))?;
                if command.flags & REGION_DEVICE_MEMORY != 0
                    && core.features & FEATURE_DEVICE_MEMORY == 0
                {
                    return Err(CommandStatus::Unsupported);
                }
                if command.flags & REGION_ON_DEMAND != 0 {
                    offered(core, FEATURE_ON_DEMAND)?;
                }
                core.tpt.register(&command)
            }
            CommandOpcode::AllocateTag => {
                let command: AllocateTag = payload(entry)?;
                let needed = if command.kind == TagKind::Region.number() {
                    FEATURE_SEND_QUEUE_REGISTRATION
                } else {
                    FEATURE_WINDOWS
                };
                if core.features & needed == 0 {
                    return Err(CommandStatus::Unsupported);
                }
                core.tpt.allocate(&command)
            }
            CommandOpcode::ReleaseTag => core
                .tpt
                .release(Tag(payload::<ObjectNumber>(entry)?.number)),
            CommandOpcode::SetGid => match core.gids.set(&payload(entry)?) {
                CommandStatus::Ok => Ok(()),
                status => Err(status),
            },
            CommandOpcode::CreateSharedReceive => {
                offered(core, FEATURE_SHARED_RECEIVE)?;
                core.create_srq(&payload(entry)?, host)
            }
            CommandOpcode::ModifySharedReceive => {
                offered(core, FEATURE_SHARED_RECEIVE)?;
                core.modify_srq(&payload(entry)?, host)
            }
            CommandOpcode::ResizeSharedReceive => {
                offered(core, FEATURE_SHARED_RECEIVE | FEATURE_RESIZE_SRQ)?;
                core.resize_srq(&payload(entry)?, host)
            }
            CommandOpcode::QuerySharedReceive => {
                offered(core, FEATURE_SHARED_RECEIVE)?;
                let state = core.query_srq(payload::<ObjectNumber>(entry)?.number, host)?;
                reply(core, entry, &state, host)
            }
            CommandOpcode::DestroySharedReceive => {
                offered(core, FEATURE_SHARED_RECEIVE)?;
                core.destroy_srq(payload::<ObjectNumber>(entry)?.number)
            }
            CommandOpcode::SetPort => {
                offered(core, FEATURE_PORT_MTU)?;
                let command: SetPort = payload(entry)?;
                if !(8..=MAX_LOG_MTU).contains(&command.log_mtu) {
                    return Err(CommandStatus::BadParameter);
                }
                core.log_mtu = command.log_mtu;
                Ok(())
            }
            CommandOpcode::AttachMulticast => {
                offered(core, FEATURE_MULTICAST)?;
                core.groups.attach(&self.qps, &payload(entry)?)
            }
            CommandOpcode::DetachMulticast => {
                offered(core, FEATURE_MULTICAST)?;
                core.groups.detach(&payload(entry)?)
            }
            CommandOpcode::TakeFaults => {
                offered(core, FEATURE_ON_DEMAND)?;
                // The reply first, so that a fault that cannot be told of is not taken.
                reply(core, entry, &PageFaults::zeroed(), host)?;
                let faults = core.paging.take();
                reply(core, entry, &faults, host)
            }
            CommandOpcode::ResolveFault => {
                offered(core, FEATURE_ON_DEMAND)?;
                let (qpn, side) = core.paging.resolve(&payload(entry)?)?;
                if let Some(qp) = self.qps.get_mut(qpn) {
                    crate::transport::page_resolved(core, qp, side, host);
                }
                Ok(())
            }
            CommandOpcode::InvalidatePages => {
                offered(core, FEATURE_ON_DEMAND)?;
                core.tpt.invalidate_pages(&payload(entry)?)
            }
            CommandOpcode::QueryCounters => {
                let mut bytes = [0; COUNTER_NAMES.len() * 8];
                for (bytes, value) in bytes.chunks_exact_mut(8).zip(core.counters.named()) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
                reply_bytes(core, entry, &bytes, host)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Node, QpOptions, SendWork};

    const LOG_ENTRIES: u8 = 13;
    const RESIZES: u32 = 30;

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
            CommandEntry::new(CommandOpcode::ResizeCompletionQueue, 0, 0, &command)
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
