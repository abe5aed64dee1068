// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The control queue: commands of the driver.
//!
//! Commands are taken up, that is copied, in order and as soon as the doorbell is written, or before
//! that when a use of a tag is looked at that one of them may make ([`Core::confirm`]). They are
//! begun in that order too, but one that takes long is carried out in pieces, and does not hold up
//! those behind it that are about other objects; those about the same object wait for it. Commands
//! on tags, which are short and many, are a line of their own. What is done in one turn is bounded,
//! however many there are and whatever they ask for: the rest is done in the turns that follow,
//! between the work of others.

use crate::core::{Core, COMMANDS, MAX_LOG_MTU, PORTS};
use crate::counters::QpCounters;
use crate::eq::{event, MAX_EQ};
use crate::gid::MAX_GIDS;
use crate::memory::Host;
use crate::misbehaviour::Misbehaving;
use crate::{cq, flows, multicast, network, qp, srq, tpt, Engine};
use ferrite_abi::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::{offset_of, size_of};

/// Work that commands may make in one turn.
const TURN_WORK: u32 = 2048;
/// What a command costs at least.
const COMMAND_WORK: u32 = 64;

/// Short commands that come before a piece of a long one.
const SHORT_COMMANDS: u32 = 8;
/// Work of a command that takes long before it is another's turn.
const PIECE: u32 = 512;

/// A command that was taken up.
#[derive(Debug)]
struct Taken {
    /// Its place among all that ever were.
    sequence: u64,
    entry: CommandEntry,
    /// What it is, unless something is wrong with the entry.
    opcode: Result<CommandOpcode, CommandStatus>,
}

/// A command on a tag that was taken up.
#[derive(Debug)]
struct TagCommand {
    taken: Taken,
    /// When it was taken up.
    since: u64,
    /// The table was told of it.
    told: bool,
}

/// A command that was begun, or waits for another on one of its objects.
#[derive(Debug)]
struct Begun {
    cookie: u32,
    objects: Vec<Object>,
    work: Work,
}

#[derive(Debug)]
enum Work {
    /// All of it.
    Whole(Box<Taken>),
    Rest(Rest),
}

/// What is left of a command to do.
#[derive(Debug)]
enum Rest {
    ResizeCompletionQueue(cq::Resize),
    ResizeSrq(srq::Resize),
    ModifyQueuePair(qp::Modification),
    /// The windows of this queue pair are left.
    DestroyQueuePair(u32),
}

/// What a command did.
enum Outcome {
    /// All; so many bytes the reply has.
    Done(u64),
    /// This is left to do.
    Begun(Rest),
}

/// What commands are about: those about the same have their effects in order. (Tags are not here.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Object {
    EventQueue(u16),
    CompletionQueue(u32),
    QueuePair(u32),
    SharedReceiveQueue(u32),
    Gid(u16),
    Channel(u16),
    Interface,
    Flow(u32),
    ReceiveTable(u32),
}

/// Commands that were taken up and are not finished: as many as the ring has entries at most.
#[derive(Debug, Default)]
pub(crate) struct Commands {
    taken: u64,
    /// Those on tags.
    tags: VecDeque<TagCommand>,
    /// Others that were not begun.
    fresh: VecDeque<Taken>,
    /// Others that were, or that wait for one that was.
    begun: BTreeMap<u64, Begun>,
    /// Those of them that can go on, in their turns.
    turns: VecDeque<u64>,
    /// For each object, those of them that are about it, in order.
    lines: BTreeMap<Object, VecDeque<u64>>,
    /// Cookies of those that do nothing but wait for all before them.
    nops: VecDeque<(u64, u32)>,
}

impl Commands {
    fn len(&self) -> usize {
        self.tags.len() + self.fresh.len() + self.begun.len() + self.nops.len()
    }

    /// The sequence number of the oldest that does something.
    fn oldest(&self) -> Option<u64> {
        let tag = self.tags.front().map(|command| command.taken.sequence);
        let fresh = self.fresh.front().map(|taken| taken.sequence);
        let begun = self.begun.first_key_value().map(|(sequence, _)| *sequence);
        [tag, fresh, begun].into_iter().flatten().min()
    }

    /// Puts a command in the line of each of its objects.
    fn stand_in_line(&mut self, sequence: u64, begun: Begun) {
        for object in &begun.objects {
            self.lines.entry(*object).or_default().push_back(sequence);
        }
        self.begun.insert(sequence, begun);
    }

    fn is_first(&self, sequence: u64, objects: &[Object]) -> bool {
        objects.iter().all(|object| {
            let line = self.lines.get(object);
            line.is_none_or(|line| line.front() == Some(&sequence))
        })
    }

    /// A command that stood in line is finished; those right behind it may be first now.
    fn leave_line(&mut self, objects: &[Object]) {
        let mut next = BTreeSet::new();
        for object in objects {
            let Some(line) = self.lines.get_mut(object) else {
                continue;
            };
            // It was the first of each.
            line.pop_front();
            match line.front() {
                Some(&behind) => {
                    next.insert(behind);
                }
                None => {
                    self.lines.remove(object);
                }
            }
        }
        for behind in next {
            if let Some(begun) = self.begun.get(&behind) {
                if self.is_first(behind, &begun.objects) {
                    self.turns.push_back(behind);
                }
            }
        }
    }
}

/// Whether a command is about a tag.
fn is_on_tag(opcode: CommandOpcode) -> bool {
    matches!(
        opcode,
        CommandOpcode::RegisterRegion
            | CommandOpcode::AllocateTag
            | CommandOpcode::ReleaseTag
            | CommandOpcode::InvalidatePages
            | CommandOpcode::QueryTag
    )
}

/// The tag that such a command is about.
fn named_tag(entry: &CommandEntry) -> Option<Tag> {
    // It stands first in each of their structures.
    const _: () = assert!(
        offset_of!(RegisterRegion, tag) == 0
            && offset_of!(AllocateTag, tag) == 0
            && offset_of!(ObjectNumber, number) == 0
            && offset_of!(InvalidatePages, tag) == 0
    );
    u32::from_prefix(structure(entry)).map(Tag)
}

/// The objects that a command names, each once; none where it will be refused.
fn objects(opcode: CommandOpcode, request: &[u8]) -> Vec<Object> {
    use CommandOpcode as O;
    use Object::{
        Channel, CompletionQueue, EventQueue, Flow, Gid, Interface, QueuePair, ReceiveTable,
        SharedReceiveQueue,
    };
    fn named<P: Plain>(request: &[u8], objects: impl FnOnce(&P) -> Vec<Object>) -> Vec<Object> {
        P::from_prefix(request).map_or_else(Vec::new, |command| objects(&command))
    }
    fn number(request: &[u8], object: fn(u32) -> Object) -> Vec<Object> {
        named(request, |command: &ObjectNumber| {
            vec![object(command.number)]
        })
    }
    let mut objects = match opcode {
        O::Nop
        | O::QueryDevice
        | O::QueryClock
        | O::QueryCounters
        | O::QueryVectorMap
        | O::SetPort
        | O::TakeFaults
        | O::ResolveFault
        | O::RegisterRegion
        | O::AllocateTag
        | O::ReleaseTag
        | O::InvalidatePages
        | O::QueryTag => Vec::new(),
        O::CreateEventQueue => named(request, |command: &CreateEventQueue| {
            vec![EventQueue(command.eqn)]
        }),
        O::DestroyEventQueue => number(request, |number| {
            // Others are refused.
            EventQueue(u16::try_from(number).unwrap_or(EQ_NONE))
        }),
        O::ModifyEventQueue => named(request, |command: &ModifyEventQueue| {
            vec![EventQueue(command.eqn)]
        }),
        O::SwitchEventQueue => named(request, |command: &SwitchEventQueue| {
            vec![EventQueue(command.eqn)]
        }),
        O::SetVectorMap => named(request, |command: &SetVectorMap| {
            let entries = command.entries.iter().take(command.count.into());
            entries.map(|entry| EventQueue(entry.eqn)).collect()
        }),
        O::CreateCompletionQueue => named(request, |command: &CreateCompletionQueue| {
            vec![CompletionQueue(command.cqn), EventQueue(command.eqn)]
        }),
        O::ModifyCompletionQueue => named(request, |command: &ModifyCompletionQueue| {
            vec![CompletionQueue(command.cqn), EventQueue(command.eqn)]
        }),
        O::ResizeCompletionQueue => named(request, |command: &ResizeCompletionQueue| {
            vec![CompletionQueue(command.cqn)]
        }),
        O::QueryCompletionQueue | O::DestroyCompletionQueue => number(request, CompletionQueue),
        O::CreateQueuePair => named(request, |command: &CreateQueuePair| {
            let mut objects = vec![
                QueuePair(command.qpn),
                CompletionQueue(command.send_cqn),
                CompletionQueue(command.receive_cqn),
            ];
            if command.flags & QP_FLAG_SRQ != 0 {
                objects.push(SharedReceiveQueue(command.srqn));
            }
            objects
        }),
        O::ModifyQueuePair => named(request, |command: &ModifyQueuePair| {
            let mut objects = vec![QueuePair(command.qpn)];
            if command.mask & MODIFY_ADDRESS_VECTOR != 0 {
                objects.push(Gid(command.address_vector.source_gid_index));
            }
            objects
        }),
        O::QueryQueuePair | O::DestroyQueuePair => number(request, QueuePair),
        O::QueryQueuePairCounters => named(request, |command: &QueryQueuePairCounters| {
            let named = command.qpns.iter().take(command.count as usize);
            named.map(|qpn| QueuePair(*qpn)).collect()
        }),
        O::SetGid => named(request, |command: &SetGid| vec![Gid(command.index)]),
        O::CreateSrq => named(request, |command: &CreateSrq| {
            let mut objects = vec![SharedReceiveQueue(command.srqn)];
            if command.flags & SRQ_FLAG_XRC != 0 {
                objects.push(CompletionQueue(command.cqn));
            }
            objects
        }),
        O::ModifySrq => named(request, |command: &ModifySrq| {
            vec![SharedReceiveQueue(command.srqn)]
        }),
        O::ResizeSrq => named(request, |command: &ResizeSrq| {
            vec![SharedReceiveQueue(command.srqn)]
        }),
        O::QuerySrq | O::DestroySrq => number(request, SharedReceiveQueue),
        O::AttachMulticast | O::DetachMulticast => named(request, |command: &MulticastMember| {
            vec![QueuePair(command.qpn)]
        }),
        O::CreateChannel => named(request, |command: &CreateChannel| {
            vec![Channel(command.channel), EventQueue(command.eqn)]
        }),
        O::ModifyChannel => named(request, |command: &ModifyChannel| {
            vec![Channel(command.channel), EventQueue(command.eqn)]
        }),
        O::DestroyChannel => number(request, |number| {
            // Others are refused.
            Channel(u16::try_from(number).unwrap_or(CHANNEL_NONE))
        }),
        O::SetInterface => named(request, |command: &SetInterface| {
            vec![Interface, Channel(command.default_channel)]
        }),
        O::SetMulticastFilter | O::SetRedirection => vec![Interface],
        O::SetRedirectionTable => named(request, |command: &SetRedirectionTable| {
            let entries = command.entries.iter().take(command.count.into());
            let named = entries.flat_map(|entry| [Channel(entry.channel), EventQueue(entry.eqn)]);
            named.chain([Interface]).collect()
        }),
        O::QueryChannelCounters => named(request, |command: &QueryChannelCounters| {
            vec![Channel(command.channel)]
        }),
        O::CreateFlow => named(request, |command: &CreateFlow| {
            let target = match command.flags & FLOW_TO_TABLE {
                0 => QueuePair(command.target),
                _ => ReceiveTable(command.target),
            };
            vec![Flow(command.flow), target]
        }),
        O::DestroyFlow => number(request, Flow),
        O::CreateReceiveTable => named(request, |command: &CreateReceiveTable| {
            let qpns = command.qpns.iter().copied().filter(|&qpn| qpn != 0);
            let table = [ReceiveTable(command.table)];
            table.into_iter().chain(qpns.map(QueuePair)).collect()
        }),
        O::DestroyReceiveTable => number(request, ReceiveTable),
    };
    // Numbers that stand for none, or for the vector map, are no objects.
    objects.retain(|object| match object {
        EventQueue(eqn) => *eqn < MAX_EQ,
        Channel(channel) => *channel != CHANNEL_NONE,
        _ => true,
    });
    objects.sort_unstable();
    objects.dedup();
    objects
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
            | CommandOpcode::QueryCompletionQueue
            | CommandOpcode::QueryTag
            | CommandOpcode::QueryQueuePairCounters
            | CommandOpcode::QueryChannelCounters
    )
}

/// Whether a command is of no use without the RDMA part.
fn is_of_rdma(opcode: CommandOpcode) -> bool {
    use CommandOpcode as O;
    match opcode {
        O::Nop
        | O::QueryDevice
        | O::QueryClock
        | O::CreateEventQueue
        | O::DestroyEventQueue
        | O::ModifyEventQueue
        | O::SwitchEventQueue
        | O::SetVectorMap
        | O::QueryVectorMap
        | O::QueryCounters
        | O::SetRedirection
        | O::SetRedirectionTable
        | O::CreateChannel
        | O::ModifyChannel
        | O::DestroyChannel
        | O::SetInterface
        | O::SetMulticastFilter
        | O::QueryChannelCounters => false,
        O::CreateCompletionQueue
        | O::ModifyCompletionQueue
        | O::ResizeCompletionQueue
        | O::QueryCompletionQueue
        | O::DestroyCompletionQueue
        | O::CreateQueuePair
        | O::ModifyQueuePair
        | O::QueryQueuePair
        | O::DestroyQueuePair
        | O::QueryQueuePairCounters
        | O::RegisterRegion
        | O::AllocateTag
        | O::ReleaseTag
        | O::QueryTag
        | O::InvalidatePages
        | O::TakeFaults
        | O::ResolveFault
        | O::SetGid
        | O::SetPort
        | O::CreateSrq
        | O::ModifySrq
        | O::ResizeSrq
        | O::QuerySrq
        | O::DestroySrq
        | O::AttachMulticast
        | O::DetachMulticast
        | O::CreateFlow
        | O::DestroyFlow
        | O::CreateReceiveTable
        | O::DestroyReceiveTable => true,
    }
}

/// Checks what all commands have in common, and fetches the command's own structure if that is not in
/// the entry: it is afterwards, and the entry like one that has always had it.
fn complete(entry: &mut CommandEntry, host: &dyn Host) -> Result<CommandOpcode, CommandStatus> {
    let opcode = CommandOpcode::from_number(entry.opcode).ok_or(CommandStatus::BadOpcode)?;
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
        return Ok(opcode);
    }
    if entry.request == 0 || entry.request % 64 != 0 || entry.request_length > COMMAND_MAX_REQUEST {
        return Err(CommandStatus::BadParameter);
    }
    let mut indirect = [0; COMMAND_MAX_REQUEST as usize];
    let indirect = &mut indirect[..length];
    host.read(entry.request, indirect)
        .map_err(|_| CommandStatus::HostMemory)?;
    // No structure that the device knows is longer than the room in the entry.
    let (known, unknown) = indirect.split_at(length.min(COMMAND_PAYLOAD));
    without_structure(unknown)?;
    entry.payload[..known.len()].copy_from_slice(known);
    entry.request_length = known.len() as u32;
    entry.request = 0;
    entry.flags = 0;
    Ok(opcode)
}

/// The structure that a [complete] entry has.
fn structure(entry: &CommandEntry) -> &[u8] {
    let length = entry.request_length as usize;
    entry.payload.get(..length).unwrap_or_default()
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

fn reply_counters<const N: usize>(
    core: &mut Core,
    entry: &CommandEntry,
    counters: [u64; N],
    host: &dyn Host,
) -> Result<u64, CommandStatus> {
    let bytes = counters.map(u64::to_le_bytes);
    reply_bytes(core, entry, bytes.as_flattened(), host)
}

/// Has a registration or allocation fail where the device misbehaves so.
fn not_failing(
    core: &mut Core,
    fails: impl FnOnce(&mut Misbehaving) -> bool,
) -> Result<(), CommandStatus> {
    match core.misbehaviour.as_deref_mut().is_some_and(fails) {
        true => Err(CommandStatus::NoResource),
        false => Ok(()),
    }
}

/// Refuses what the driver did not say it would use.
fn offered(core: &Core, feature: u64) -> Result<(), CommandStatus> {
    if core.features & feature != feature {
        return Err(CommandStatus::Unsupported);
    }
    Ok(())
}

/// What the Ethernet part can do.
fn network_caps(features: u64) -> DeviceCaps {
    DeviceCaps {
        max_channels: network::CHANNELS,
        max_mtu: network::MAX_MTU,
        transmit_max_log_blocks: network::MAX_LOG_BLOCKS,
        receive_max_log_entries: network::MAX_LOG_ENTRIES,
        max_transmit_pieces: TRANSMIT_MAX_PIECES as u8,
        redirection_log_entries: match features & FEATURE_REDIRECTION {
            0 => 0,
            _ => network::TABLE_LOG_ENTRIES,
        },
        max_transmit_bytes: network::MAX_TRANSMIT_BYTES as u32,
        channel_counters: CHANNEL_COUNTER_NAMES.len() as u32,
        max_multicast_addresses: MULTICAST_ADDRESSES as u32,
        ..DeviceCaps::zeroed()
    }
}

/// What the device can do.
fn caps(core: &Core) -> DeviceCaps {
    let mut page_sizes = 0;
    for shift in PAGE_SHIFT_MIN..=PAGE_SHIFT_MAX {
        page_sizes |= 1 << shift;
    }
    let config = &core.config;
    let rdma = u32::from(config.personality.has_rdma());
    let ethernet = config.offered_features() & FEATURE_ETHERNET != 0;
    let of = |feature, count: u32| match config.offered_features() & feature {
        0 => 0,
        _ => count,
    };
    DeviceCaps {
        qp_first: config.qps.first,
        qp_count: config.qps.count * rdma,
        cq_first: config.cqs.first,
        cq_count: config.cqs.count * rdma,
        srq_first: config.srqs.first,
        srq_count: config.srqs.count * rdma,
        tag_first: config.tags.first,
        tag_count: config.tags.count * rdma,
        max_eq: MAX_EQ,
        max_gid: MAX_GIDS * rdma as u16,
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
        transports: (rdma as u8) << Transport::RoceV2.number(),
        max_xrcd: srq::MAX_XRCD * rdma,
        max_multicast: multicast::MAX_MULTICAST as u32 * rdma,
        max_fast_register_pages: tpt::MAX_FAST_PAGES,
        command_timeout: COMMAND_TIMEOUT,
        counters: COUNTER_NAMES.len() as u32,
        // Those that need not share a message, but one at least.
        handlers: u32::from(config.messages.min(MAX_EQ))
            .saturating_sub(EQ_FIRST_HANDLER.into())
            .max(1),
        qp_counters: match config.offered_features() & FEATURE_QP_COUNTERS {
            0 => 0,
            _ => QpCounters::COUNTED,
        },
        max_flows: of(FEATURE_RAW_PACKETS, flows::MAX_FLOWS),
        max_receive_tables: of(FEATURE_RECEIVE_TABLES, flows::MAX_TABLES.into()) as u16,
        receive_table_log_entries: of(FEATURE_RECEIVE_TABLES, flows::TABLE_LOG_ENTRIES.into())
            as u8,
        ..if ethernet {
            network_caps(config.offered_features())
        } else {
            DeviceCaps::zeroed()
        }
    }
}

impl Engine {
    /// The doorbell says that the driver has posted commands up to `producer`.
    pub(crate) fn control_doorbell(&mut self, producer: u32, host: &mut dyn Host) {
        let Some(ring) = &mut self.core.control else {
            return;
        };
        if ring.ring(producer).is_err() {
            self.core.fail(FatalCode::BadCommandIndex, host);
            return;
        }
        self.take_up(host);
        self.run_commands(false, host);
    }

    /// Whether there is something to do for commands now.
    pub(crate) fn has_commands(&self) -> bool {
        !self.commands.fresh.is_empty()
            || !self.commands.turns.is_empty()
            || self.may_take_up()
            || self.next_command().is_some_and(|due| due <= self.core.now)
    }

    /// When the next command on a tag is to be carried out.
    pub(crate) fn next_command(&self) -> Option<u64> {
        let held = self.core.misbehaviour.as_ref();
        let held = held.map_or(0, |misbehaving| misbehaving.holds_tags());
        let next = self.commands.tags.front();
        next.map(|command| command.since.saturating_add(held))
    }

    /// Whether a command can be taken up: no more are unfinished than the ring has entries.
    fn may_take_up(&self) -> bool {
        self.core.control.as_ref().is_some_and(|ring| {
            ring.consumer != ring.producer && self.commands.len() < 1 << ring.log_entries
        })
    }

    /// Takes up the commands that were posted, as far as no more are unfinished than the ring has
    /// entries: a driver that keeps to its bounds has all of them taken up.
    pub(crate) fn take_up(&mut self, host: &mut dyn Host) {
        while self.core.is_running() && self.may_take_up() {
            let Some(ring) = &mut self.core.control else {
                return;
            };
            let slot = u64::from(ring.consumer & ((1 << ring.log_entries) - 1));
            let mut entry = CommandEntry::zeroed();
            // Cannot wrap: the whole ring was checked at the start.
            let address = ring.address + slot * size_of::<CommandEntry>() as u64;
            if host.read(address, entry.as_bytes_mut()).is_err() {
                self.core.fail(FatalCode::HostMemory, host);
                return;
            }
            ring.taken_up();
            let has_rdma = self.core.config.personality.has_rdma();
            let opcode = match complete(&mut entry, host) {
                Ok(opcode) if !has_rdma && is_of_rdma(opcode) => Err(CommandStatus::Unsupported),
                complete => complete,
            };
            let taken = Taken {
                sequence: self.commands.taken,
                entry,
                opcode,
            };
            self.commands.taken += 1;
            match opcode {
                Ok(opcode) if is_on_tag(opcode) => {
                    let told = self.tell_table(opcode, &taken.entry);
                    let since = self.core.now;
                    self.commands
                        .tags
                        .push_back(TagCommand { taken, since, told });
                }
                _ => self.commands.fresh.push_back(taken),
            }
        }
        if self.core.has_taken_up_all() {
            // What they make is known now, and so is what they do not make.
            self.core.paging.wake(COMMANDS);
        }
    }

    /// Tells the table of a command that was taken up; false when that makes no difference to it.
    fn tell_table(&mut self, opcode: CommandOpcode, entry: &CommandEntry) -> bool {
        let core = &mut self.core;
        let Some(tag) = named_tag(entry).filter(|_| core.features & FEATURE_PENDING_TAGS != 0)
        else {
            return false;
        };
        match opcode {
            CommandOpcode::RegisterRegion => core.tpt.take_up_registration(tag, false),
            CommandOpcode::AllocateTag => core.tpt.take_up_registration(tag, true),
            CommandOpcode::ReleaseTag => {
                let leaves = core.tpt.take_up_release(tag);
                if leaves {
                    // Nobody waits for what will not be.
                    core.paging.wake(tag.index());
                }
                leaves
            }
            _ => false,
        }
    }

    /// Carries out commands for a turn. `pieces`: also those that take long, a piece of each; they have
    /// time until the next [`Engine::poll`] where somebody waits for this call.
    pub(crate) fn run_commands(&mut self, pieces: bool, host: &mut dyn Host) {
        let start = self.core.work;
        let mut commands = 0;
        while self.core.is_running() {
            let left = |core: &Core, commands: u32| {
                let work = core.work.wrapping_sub(start) as u32;
                TURN_WORK
                    .checked_sub(work.saturating_add(commands * COMMAND_WORK))
                    .filter(|&left| left > 0)
            };
            let Some(budget) = left(&self.core, commands) else {
                break;
            };
            // The next one, or a piece of one that takes long: in its turn, too, where there are many.
            let mut idle = true;
            let due = self.next_command().is_some_and(|due| due <= self.core.now);
            let (tag, fresh) = (self.commands.tags.front(), self.commands.fresh.front());
            let tag = tag.filter(|_| due).map(|command| command.taken.sequence);
            let fresh = fresh.map(|taken| taken.sequence);
            let tag_first = match (tag, fresh) {
                (Some(tag), Some(fresh)) => tag < fresh,
                (tag, _) => tag.is_some(),
            };
            if tag_first {
                if let Some(command) = self.commands.tags.pop_front() {
                    self.run_tag_command(&command, host);
                }
                (idle, commands) = (false, commands + 1);
            } else if let Some(taken) = self.commands.fresh.pop_front() {
                self.begin(taken, budget.min(PIECE), host);
                (idle, commands) = (false, commands + 1);
            }
            let piece = pieces && (idle || commands % SHORT_COMMANDS == 0);
            if let Some(budget) = left(&self.core, commands).filter(|_| piece) {
                if let Some(sequence) = self.commands.turns.pop_front() {
                    commands += self.go_on(sequence, budget.min(PIECE), host);
                    idle = false;
                }
            }
            self.finish_nops(host);
            self.take_up(host);
            if idle {
                break;
            }
        }
    }

    /// Begins a command that is not about a tag, if none is ahead of it.
    fn begin(&mut self, taken: Taken, budget: u32, host: &mut dyn Host) {
        let (sequence, cookie) = (taken.sequence, taken.entry.cookie);
        let opcode = match taken.opcode {
            Ok(opcode) => opcode,
            Err(status) => return self.finish_command(cookie, Err(status), host),
        };
        let request = structure(&taken.entry);
        if opcode == CommandOpcode::Nop && without_structure(request).is_ok() {
            self.commands.nops.push_back((sequence, cookie));
            return;
        }
        let objects = objects(opcode, request);
        let is_free = |object| !self.commands.lines.contains_key(object);
        if !objects.iter().all(is_free) {
            let work = Work::Whole(Box::new(taken));
            let waiting = Begun {
                cookie,
                objects,
                work,
            };
            self.commands.stand_in_line(sequence, waiting);
            return;
        }
        let mut outcome = self.execute(opcode, &taken.entry, host);
        if let Ok(Outcome::Begun(rest)) = outcome {
            outcome = self.go_on_with(rest, budget, host);
        }
        match outcome {
            Ok(Outcome::Begun(rest)) => {
                let begun = Begun {
                    cookie,
                    objects,
                    work: Work::Rest(rest),
                };
                self.commands.stand_in_line(sequence, begun);
                self.commands.turns.push_back(sequence);
            }
            Ok(Outcome::Done(bytes)) => self.finish_command(cookie, Ok(bytes), host),
            Err(status) => self.finish_command(cookie, Err(status), host),
        }
    }

    /// Does a piece of a command that stands in line and is first in all of its lines. Returns for how
    /// many commands that counts.
    fn go_on(&mut self, sequence: u64, budget: u32, host: &mut dyn Host) -> u32 {
        let Some(Begun {
            cookie,
            objects,
            work,
        }) = self.commands.begun.remove(&sequence)
        else {
            return 0;
        };
        let (outcome, begun) = match work {
            Work::Rest(rest) => (self.go_on_with(rest, budget, host), 0),
            Work::Whole(taken) => {
                let opcode = taken.opcode;
                let outcome = opcode.and_then(|opcode| self.execute(opcode, &taken.entry, host));
                (outcome, 1)
            }
        };
        let result = match outcome {
            Ok(Outcome::Begun(rest)) => {
                let begun = Begun {
                    cookie,
                    objects,
                    work: Work::Rest(rest),
                };
                self.commands.begun.insert(sequence, begun);
                self.commands.turns.push_back(sequence);
                // Even where it did nothing, so that it ends.
                return 1;
            }
            Ok(Outcome::Done(bytes)) => Ok(bytes),
            Err(status) => Err(status),
        };
        self.commands.leave_line(&objects);
        self.finish_command(cookie, result, host);
        begun
    }

    /// Does a piece of what is left of a command.
    fn go_on_with(
        &mut self,
        mut rest: Rest,
        budget: u32,
        host: &mut dyn Host,
    ) -> Result<Outcome, CommandStatus> {
        let (core, qps) = (&mut self.core, &mut self.qps);
        let result = match &mut rest {
            Rest::ResizeCompletionQueue(resize) => core.resize_some(resize, budget, host),
            Rest::ResizeSrq(resize) => core.resize_srq_some(resize, budget, host),
            Rest::ModifyQueuePair(modification) => {
                qp::modify_some(core, qps, modification, budget, host)
            }
            Rest::DestroyQueuePair(qpn) => qp::invalidate_windows(core, *qpn, budget).map(Ok),
        };
        match result {
            Some(result) => result.map(|()| Outcome::Done(0)),
            None => Ok(Outcome::Begun(rest)),
        }
    }

    /// Finishes those that do nothing, when nothing before them is unfinished.
    fn finish_nops(&mut self, host: &mut dyn Host) {
        while let Some(&(sequence, cookie)) = self.commands.nops.front() {
            let oldest = self.commands.oldest();
            if oldest.is_some_and(|oldest| oldest < sequence) || !self.core.is_running() {
                return;
            }
            self.commands.nops.pop_front();
            self.finish_command(cookie, Ok(0), host);
        }
    }

    /// Carries out a command on a tag.
    fn run_tag_command(&mut self, command: &TagCommand, host: &mut dyn Host) {
        let TagCommand { taken, told, .. } = command;
        let Some(tag) = named_tag(&taken.entry) else {
            let status = CommandStatus::BadParameter;
            return self.finish_command(taken.entry.cookie, Err(status), host);
        };
        if let Some(misbehaving) = &mut self.core.misbehaviour {
            misbehaving.held_tag();
        }
        self.core.tpt.enter(tag);
        let opcode = taken.opcode;
        let done = opcode.and_then(|opcode| self.execute_on_tag(opcode, &taken.entry, host));
        let tpt = &mut self.core.tpt;
        if *told {
            match (opcode, done) {
                (Ok(CommandOpcode::RegisterRegion), Err(_)) => {
                    tpt.registration_failed(tag, false);
                }
                (Ok(CommandOpcode::AllocateTag), Err(_)) => tpt.registration_failed(tag, true),
                _ => {}
            }
            tpt.finish(tag);
            self.core.paging.wake(tag.index());
        } else {
            tpt.leave(tag);
        }
        self.finish_command(taken.entry.cookie, done, host);
    }

    /// Carries out a command on a tag; returns the bytes of its reply.
    fn execute_on_tag(
        &mut self,
        opcode: CommandOpcode,
        entry: &CommandEntry,
        host: &dyn Host,
    ) -> Result<u64, CommandStatus> {
        let core = &mut self.core;
        let request = structure(entry);
        let done = match opcode {
            CommandOpcode::RegisterRegion => {
                let command: RegisterRegion = parse(request)?;
                offered(core, tpt::access_features(command.access))?;
                if command.flags & REGION_DEVICE_MEMORY != 0 {
                    offered(core, FEATURE_DEVICE_MEMORY)?;
                }
                if command.flags & REGION_ON_DEMAND != 0 {
                    offered(core, FEATURE_ON_DEMAND)?;
                }
                not_failing(core, |it| it.fails_tag(command.buffer.length))?;
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
                not_failing(core, |it| match needed {
                    FEATURE_WINDOWS => it.fails_window(),
                    _ => it.fails_tag(u64::from(command.max_pages) << PAGE_SHIFT_MIN),
                })?;
                core.tpt.allocate(&command)
            }
            CommandOpcode::InvalidatePages => {
                offered(core, FEATURE_ON_DEMAND)?;
                core.tpt.invalidate_pages(&parse(request)?)
            }
            CommandOpcode::QueryTag => {
                offered(core, FEATURE_CONTEXTS)?;
                let state = core.tpt.query(Tag(object_number(request)?))?;
                return reply(core, entry, &state, host);
            }
            _ => {
                core.tpt.release(Tag(object_number(request)?))?;
                let misbehaviour = core.misbehaviour.as_deref_mut();
                match misbehaviour.is_some_and(|it| it.denies_tag()) {
                    true => Err(CommandStatus::NotFound),
                    false => Ok(()),
                }
            }
        };
        done.map(|()| 0)
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

    /// Carries out a command that is not about a tag, or begins to.
    fn execute(
        &mut self,
        opcode: CommandOpcode,
        entry: &CommandEntry,
        host: &mut dyn Host,
    ) -> Result<Outcome, CommandStatus> {
        let core = &mut self.core;
        let now = core.now;
        let request = structure(entry);
        let done = match opcode {
            // Those that are about tags do not come here.
            CommandOpcode::Nop
            | CommandOpcode::RegisterRegion
            | CommandOpcode::AllocateTag
            | CommandOpcode::ReleaseTag
            | CommandOpcode::InvalidatePages
            | CommandOpcode::QueryTag => without_structure(request),
            CommandOpcode::QueryDevice => {
                without_structure(request)?;
                let caps = caps(core);
                return reply(core, entry, &caps, host).map(Outcome::Done);
            }
            CommandOpcode::QueryClock => {
                without_structure(request)?;
                let reading = ClockReading {
                    ticks: now,
                    reserved: [0; 7],
                };
                return reply(core, entry, &reading, host).map(Outcome::Done);
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
                return reply_bytes(core, entry, &bytes, host).map(Outcome::Done);
            }
            CommandOpcode::CreateCompletionQueue => core.create_cq(&parse(request)?, host),
            CommandOpcode::ModifyCompletionQueue => core.modify_cq(&parse(request)?, host),
            CommandOpcode::ResizeCompletionQueue => {
                offered(core, FEATURE_RESIZE_CQ)?;
                let resize = core.begin_resize(&parse(request)?, host)?;
                return Ok(Outcome::Begun(Rest::ResizeCompletionQueue(resize)));
            }
            CommandOpcode::QueryCompletionQueue => {
                offered(core, FEATURE_CONTEXTS)?;
                let state = core.query_cq(object_number(request)?)?;
                return reply(core, entry, &state, host).map(Outcome::Done);
            }
            CommandOpcode::DestroyCompletionQueue => core.destroy_cq(object_number(request)?),
            CommandOpcode::CreateQueuePair => {
                qp::create(core, &mut self.qps, &parse(request)?, host)
            }
            CommandOpcode::ModifyQueuePair => {
                let modification = qp::Modification::new(parse(request)?);
                return Ok(Outcome::Begun(Rest::ModifyQueuePair(modification)));
            }
            CommandOpcode::QueryQueuePair => {
                let context = core.features & FEATURE_CONTEXTS != 0;
                let state = qp::query(&self.qps, object_number(request)?, context)?;
                return reply(core, entry, &state, host).map(Outcome::Done);
            }
            CommandOpcode::DestroyQueuePair => {
                let qpn = object_number(request)?;
                qp::destroy(core, &mut self.qps, qpn, host)?;
                return Ok(Outcome::Begun(Rest::DestroyQueuePair(qpn)));
            }
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
                return Ok(Outcome::Begun(Rest::ResizeSrq(resize)));
            }
            CommandOpcode::QuerySrq => {
                offered(core, FEATURE_SRQ)?;
                let state = core.query_srq(object_number(request)?, host)?;
                return reply(core, entry, &state, host).map(Outcome::Done);
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
                return Ok(Outcome::Done(bytes));
            }
            CommandOpcode::ResolveFault => {
                offered(core, FEATURE_ON_DEMAND)?;
                let (qpn, side) = core.paging.resolve(&parse(request)?)?;
                if let Some(qp) = self.qps.get_mut(qpn) {
                    crate::transport::page_resolved(core, qp, side);
                }
                Ok(())
            }
            CommandOpcode::QueryCounters => {
                let command: QueryCounters = parse(request)?;
                check_port(command.port)?;
                let counters = core.counters.named();
                return reply_counters(core, entry, counters, host).map(Outcome::Done);
            }
            CommandOpcode::QueryQueuePairCounters => {
                offered(core, FEATURE_QP_COUNTERS)?;
                let sums = qp::query_counters(&self.qps, &parse(request)?)?;
                return reply_counters(core, entry, sums, host).map(Outcome::Done);
            }
            CommandOpcode::CreateChannel => {
                offered(core, FEATURE_ETHERNET)?;
                core.create_channel(&parse(request)?, host)
            }
            CommandOpcode::ModifyChannel => {
                offered(core, FEATURE_ETHERNET)?;
                core.modify_channel(&parse(request)?)
            }
            CommandOpcode::DestroyChannel => {
                offered(core, FEATURE_ETHERNET)?;
                core.destroy_channel(object_number(request)?)
            }
            CommandOpcode::SetInterface => {
                offered(core, FEATURE_ETHERNET)?;
                core.set_interface(&parse(request)?)
            }
            CommandOpcode::SetMulticastFilter => {
                offered(core, FEATURE_ETHERNET)?;
                core.set_multicast_filter(&parse(request)?)
            }
            CommandOpcode::QueryChannelCounters => {
                offered(core, FEATURE_ETHERNET)?;
                let counters = core.query_channel_counters(&parse(request)?)?;
                return reply_counters(core, entry, counters, host).map(Outcome::Done);
            }
            CommandOpcode::SetRedirection => {
                offered(core, FEATURE_REDIRECTION)?;
                core.set_redirection(&parse(request)?)
            }
            CommandOpcode::SetRedirectionTable => {
                offered(core, FEATURE_REDIRECTION)?;
                core.set_redirection_table(&parse(request)?)
            }
            CommandOpcode::CreateFlow => {
                offered(core, FEATURE_RAW_PACKETS)?;
                let features = core.features;
                core.flows.create(&self.qps, &parse(request)?, features)
            }
            CommandOpcode::DestroyFlow => {
                offered(core, FEATURE_RAW_PACKETS)?;
                core.flows.destroy(object_number(request)?)
            }
            CommandOpcode::CreateReceiveTable => {
                offered(core, FEATURE_RECEIVE_TABLES)?;
                core.flows.create_table(&self.qps, &parse(request)?)
            }
            CommandOpcode::DestroyReceiveTable => {
                offered(core, FEATURE_RECEIVE_TABLES)?;
                core.flows.destroy_table(object_number(request)?)
            }
        };
        done.map(|()| Outcome::Done(0))
    }
}

/// Whole faults that a reply of `length` bytes has room for.
fn faults_in(length: u32) -> usize {
    (length as usize).saturating_sub(offset_of!(PageFaults, faults)) / size_of::<PageFault>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Node, QpOptions, Region, SendWork, CQP_LOG_ENTRIES};
    use crate::tpt::{Holder, RemoteAccess};
    use crate::Misbehaviour;

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

    const WINDOWS: u32 = 100_000;

    /// Binds type 2 windows to a queue pair, as its work requests would. Returns the first and the last.
    fn bind_windows(node: &mut Node, region: &Region, holder: Holder) -> [Tag; 2] {
        let windows = [0x1000, 0x1000 + WINDOWS - 1].map(|index| Tag::new(index, 1));
        for index in windows[0].index()..=windows[1].index() {
            let window = Tag::new(index, 1).0;
            let tpt = &mut node.engine.core.tpt;
            tpt.allocate(&AllocateTag {
                tag: window,
                pd: holder.pd,
                kind: TagKind::Window2B.number(),
                reserved: [0; 3],
                max_pages: 0,
            })
            .unwrap();
            let part = BindPart {
                window,
                new_window: window,
                region: region.tag,
                access: ACCESS_REMOTE_READ,
                address: region.address,
                length: 64,
                reserved: [0; 2],
            };
            tpt.bind(&part, holder).unwrap();
        }
        windows
    }

    #[test]
    fn windows_go_with_their_queue_pair_in_pieces_between_the_work_of_others() {
        const QPN: u32 = 4;
        const LONG: u32 = 100;
        const NEXT: u32 = 101;
        const RELEASE: u32 = 102;
        const REGISTER: u32 = 103;
        for destroy in [true, false] {
            let mut node = Node::new(1);
            for (qpn, peer) in [(2, 3), (3, 2), (QPN, 77)] {
                node.create_qp(QpOptions {
                    qpn,
                    ..QpOptions::default()
                });
                let peer = node.as_peer(peer);
                node.connect(qpn, &peer);
            }
            let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE | ACCESS_WINDOW_BIND;
            let region = node.register(0x101, 1, access, 4096);
            let shared = node.register(0x201, 1, access, 4096);
            let holder = Holder {
                pd: 1,
                qpn: QPN,
                windows_only: false,
            };
            let windows = bind_windows(&mut node, &shared, holder);
            let usable = |node: &Node, window: Tag| {
                let tpt = &node.engine.core.tpt;
                let access = RemoteAccess::Read;
                let span = tpt.check_remote(window.0, shared.address, 1, holder, access);
                span.is_ok()
            };
            assert!(windows.iter().all(|&window| usable(&node, window)));
            let write = SendWork::new(SendOpcode::Write, &[region.sge(0, 64)])
                .remote(region.address, region.tag)
                .flags(SEND_SIGNALED);
            node.post_send(2, &write);
            let number = |number| ObjectNumber {
                number,
                reserved: 0,
            };
            let modify = |mask, from: QueuePairStateCode, to: QueuePairStateCode| ModifyQueuePair {
                qpn: QPN,
                mask: mask | MODIFY_STATE | MODIFY_CURRENT_STATE,
                current_state: from.number(),
                state: to.number(),
                ..ModifyQueuePair::zeroed()
            };
            use QueuePairStateCode::{Init, Reset, Rts};
            // The next one is about the same queue pair, or another of its number.
            let [long, next] = if destroy {
                let create = node.qp_template(QpOptions {
                    qpn: QPN,
                    ..QpOptions::default()
                });
                let destroy = CommandOpcode::DestroyQueuePair;
                [
                    CommandEntry::new(destroy, LONG, (0, 0), &number(QPN)),
                    CommandEntry::new(CreateQueuePair::OPCODE, NEXT, (0, 0), &create),
                ]
            } else {
                let init = modify(MODIFY_PKEY | MODIFY_ACCESS, Reset, Init);
                let opcode = CommandOpcode::ModifyQueuePair;
                [
                    CommandEntry::new(opcode, LONG, (0, 0), &modify(0, Rts, Reset)),
                    CommandEntry::new(opcode, NEXT, (0, 0), &init),
                ]
            };
            let tag = RegisterRegion {
                tag: 0x301,
                buffer: Buffer::contiguous(0x1000, 64),
                ..RegisterRegion::zeroed()
            };
            let release = CommandOpcode::ReleaseTag;
            node.answers();
            for entry in [
                long,
                next,
                CommandEntry::new(release, RELEASE, (0, 0), &number(shared.tag)),
                CommandEntry::new(RegisterRegion::OPCODE, REGISTER, (0, 0), &tag),
            ] {
                node.put_command(&entry);
            }
            let (mut turns, mut writes, mut work) = (0, 0, node.engine.core.work);
            let mut answers = Vec::new();
            node.ring_control();
            loop {
                let done = node.engine.core.work - work;
                assert!(done <= u64::from(TURN_WORK), "{done} windows in a turn");
                work = node.engine.core.work;
                answers.extend(node.answers());
                if answers.iter().any(|(cookie, _)| *cookie == LONG) {
                    break;
                }
                // Nobody is left who could use those that are still bound.
                let qp = node.engine.qps.get(QPN);
                assert!(qp.is_none_or(|qp| !qp.may_send() && !qp.may_receive()));
                assert!(usable(&node, windows[1]), "from the first on");
                // Not while somebody else's doorbell is waited for.
                node.ring_control();
                assert_eq!(node.engine.core.work, work);
                node.now += 1000;
                node.engine.poll(node.now, &mut node.host);
                turns += 1;
                if let Some(completion) = node.poll_cq(1) {
                    assert_eq!(completion.status, CompletionStatus::Success.number());
                    node.post_send(2, &write);
                    writes += 1;
                }
            }
            assert!(turns >= WINDOWS / TURN_WORK, "{turns} turns");
            assert!(writes > turns / 4, "{writes} writes in {turns} turns");
            assert!(!windows.iter().any(|&window| usable(&node, window)));
            while node.engine.has_commands() {
                node.engine.poll(node.now, &mut node.host);
            }
            answers.extend(node.answers());
            // Those on tags did not wait, and the region had windows then; the next one did.
            let expected = [
                (RELEASE, CommandStatus::Busy),
                (REGISTER, CommandStatus::Ok),
                (LONG, CommandStatus::Ok),
                (NEXT, CommandStatus::Ok),
            ];
            assert_eq!(answers, expected);
            let state = if destroy { Reset } else { Init };
            assert_eq!(node.qp_state(QPN), state);
            assert_eq!(node.object_command(release, shared.tag), CommandStatus::Ok);
        }
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

    /// A completion queue full of unread entries, and a command that moves it.
    fn slow_command(node: &mut Node, cqn: u32, cookie: u32) -> CommandEntry {
        node.create_cq(cqn, EQ_FIRST_HANDLER, LOG_ENTRIES);
        for _ in 0..1 << LOG_ENTRIES {
            let (core, host) = (&mut node.engine.core, &mut node.host);
            core.write_completion(cqn, CompletionEntry::zeroed(), false, host)
                .unwrap();
        }
        let place = node.cq_template(cqn, EQ_FIRST_HANDLER, LOG_ENTRIES);
        let command = ResizeCompletionQueue {
            cqn,
            log_entries: LOG_ENTRIES,
            reserved: [0; 3],
            record_offset: place.record_offset,
            reserved1: 0,
            buffer: place.buffer,
        };
        CommandEntry::new(
            CommandOpcode::ResizeCompletionQueue,
            cookie,
            (0, 0),
            &command,
        )
    }

    #[test]
    fn short_commands_overtake_long_ones_but_not_on_the_same_object() {
        let mut node = Node::new(1);
        let long = [(2, 100), (3, 101)].map(|(cqn, cookie)| slow_command(&mut node, cqn, cookie));
        let modify = |cqn, cookie| {
            let command = ModifyCompletionQueue {
                cqn,
                eqn: EQ_NONE,
                ..ModifyCompletionQueue::zeroed()
            };
            CommandEntry::new(
                CommandOpcode::ModifyCompletionQueue,
                cookie,
                (0, 0),
                &command,
            )
        };
        let destroy = |cqn, cookie| {
            let number = ObjectNumber {
                number: cqn,
                reserved: 0,
            };
            let opcode = CommandOpcode::DestroyCompletionQueue;
            CommandEntry::new(opcode, cookie, (0, 0), &number)
        };
        let nop = |cookie| CommandEntry::new(CommandOpcode::Nop, cookie, (0, 0), &0u64);
        node.create_cq(9, EQ_FIRST_HANDLER, 2);
        let tag = RegisterRegion {
            tag: 0x101,
            buffer: Buffer::contiguous(0x1000, 64),
            ..RegisterRegion::zeroed()
        };
        node.answers();
        for entry in long {
            node.put_command(&entry);
        }
        // On the same object, one behind the other; and the last of all.
        node.put_command(&modify(2, 102));
        node.put_command(&destroy(2, 103));
        node.put_command(&destroy(2, 104));
        node.put_command(&nop(105));
        // On others.
        node.put_command(&modify(9, 106));
        node.put_command(&CommandEntry::new(
            RegisterRegion::OPCODE,
            107,
            (0, 0),
            &tag,
        ));
        node.put_command(&destroy(9, 108));
        node.put_command(&nop(109));
        let mut both = false;
        let mut answers = Vec::new();
        node.ring_control();
        while node.engine.has_commands() {
            both |= node.engine.commands.turns.len() == 2;
            answers.extend(node.answers());
            node.engine.poll(node.now, &mut node.host);
        }
        answers.extend(node.answers());
        assert!(both, "several are under way at once");
        let place = |cookie: u32| {
            answers
                .iter()
                .position(|(found, _)| *found == cookie)
                .unwrap()
        };
        let status = |cookie: u32| answers[place(cookie)].1;
        assert_eq!(answers.len(), 10, "{answers:?}");
        for cookie in 100..110 {
            let expected = if cookie == 104 {
                CommandStatus::NotFound
            } else {
                CommandStatus::Ok
            };
            assert_eq!(status(cookie), expected, "{cookie}");
        }
        for short in [106, 107, 108] {
            assert!(place(short) < place(100).min(place(101)), "{answers:?}");
        }
        assert!(place(100) < place(102) && place(102) < place(103) && place(103) < place(104));
        assert!(place(106) < place(108));
        for earlier in 100..105 {
            assert!(place(earlier) < place(105), "{answers:?}");
        }
        assert_eq!(place(109), 9);
        assert!(node.engine.commands.lines.is_empty() && node.engine.commands.begun.is_empty());
    }

    #[test]
    fn registrations_of_one_length_and_windows_can_fail_and_no_others_do() {
        let mut node = Node::new(1);
        let rules = Misbehaviour {
            fail_length: 8192,
            ..Misbehaviour::default()
        };
        node.engine.misbehave(rules, node.now, &mut node.host);
        let region = |tag, length| RegisterRegion {
            tag,
            buffer: Buffer::contiguous(0x1000, length),
            ..RegisterRegion::zeroed()
        };
        let list = |tag, max_pages| AllocateTag {
            tag,
            kind: TagKind::Region.number(),
            max_pages,
            ..AllocateTag::zeroed()
        };
        let (fails, is_made) = (CommandStatus::NoResource, CommandStatus::Ok);
        for (tag, length, status) in [(0x101, 8191, is_made), (0x201, 8192, fails)] {
            let done = node.command(CommandOpcode::RegisterRegion, &region(tag, length));
            assert_eq!(done, status);
        }
        for (tag, pages, status) in [(0x301, 1, is_made), (0x401, 2, fails)] {
            let done = node.command(CommandOpcode::AllocateTag, &list(tag, pages));
            assert_eq!(done, status);
        }
        let window = |tag, kind: TagKind| AllocateTag {
            kind: kind.number(),
            ..list(tag, 0)
        };
        let windows = [TagKind::Window1, TagKind::Window2B];
        for (tag, kind) in [0x501, 0x601].into_iter().zip(windows) {
            let done = node.command(CommandOpcode::AllocateTag, &window(tag, kind));
            assert_eq!(done, is_made);
        }
        assert_eq!(node.engine.core.misdeeds().unwrap().1.failed_tags, 2);
        let rules = Misbehaviour {
            fail_windows: true,
            ..rules
        };
        node.engine.misbehave(rules, node.now, &mut node.host);
        for (tag, kind) in [0x701, 0x801].into_iter().zip(windows) {
            let done = node.command(CommandOpcode::AllocateTag, &window(tag, kind));
            assert_eq!(done, fails);
        }
        assert_eq!(node.engine.core.misdeeds().unwrap().1.failed_tags, 2);
        for tag in [0x201, 0x401, 0x701, 0x801] {
            assert_eq!(
                node.engine.core.tpt.stands(tag),
                Err(tpt::TptError::RegistrationFailed)
            );
        }
    }

    #[test]
    fn releases_can_be_denied() {
        let mut node = Node::new(1);
        let tag = Tag::new(1, 1);
        let region = RegisterRegion {
            tag: tag.0,
            buffer: Buffer::contiguous(0x1000, 64),
            ..RegisterRegion::zeroed()
        };
        for (deny_tags, status) in [(true, CommandStatus::NotFound), (false, CommandStatus::Ok)] {
            let rules = Misbehaviour {
                deny_tags,
                ..Misbehaviour::default()
            };
            node.engine.misbehave(rules, node.now, &mut node.host);
            let made = node.command(RegisterRegion::OPCODE, &region);
            assert_eq!(made, CommandStatus::Ok);
            let ended = node.object_command(CommandOpcode::ReleaseTag, tag.0);
            assert_eq!(ended, status);
            let denied = node
                .engine
                .core
                .misdeeds()
                .map_or(0, |(_, done)| done.denied_tags);
            assert_eq!(denied, u64::from(deny_tags));
        }
    }

    #[test]
    fn commands_on_tags_can_be_held_up_and_nothing_else_is() {
        let mut node = Node::new(1);
        node.hold_tags(10.0);
        let tag = RegisterRegion {
            tag: 0x101,
            buffer: Buffer::contiguous(0x1000, 64),
            ..RegisterRegion::zeroed()
        };
        node.answers();
        let held = node.post_command(RegisterRegion::OPCODE, &tag);
        assert!(!node.engine.has_commands());
        assert_eq!(node.engine.next_timeout(), Some(node.now + 10_000_000));
        node.create_cq(9, EQ_FIRST_HANDLER, 2);
        let nop = node.post_command(CommandOpcode::Nop, &0u64);
        node.settle();
        assert!(node.answers().is_empty());
        assert_eq!(node.engine.core.tpt.in_flight(), 1);
        node.now += 10_000_000;
        node.settle();
        let done = [held, nop].map(|cookie| (cookie, CommandStatus::Ok));
        assert_eq!(node.answers(), done);
        assert_eq!(node.engine.core.tpt.in_flight(), 0);
        assert_eq!(node.engine.core.misdeeds().unwrap().1.held_tags, 1);
        // Good behaviour ends it at once.
        let number = ObjectNumber {
            number: 0x101,
            reserved: 0,
        };
        let held = node.post_command(CommandOpcode::ReleaseTag, &number);
        node.hold_tags(0.0);
        node.settle();
        assert_eq!(node.answers(), [(held, CommandStatus::Ok)]);
    }

    #[test]
    fn commands_are_taken_up_with_the_doorbell_as_far_as_the_ring_is_long() {
        const RING: u32 = 1 << CQP_LOG_ENTRIES;
        // With the control record nothing is taken back.
        let without = FEATURE_PENDING_TAGS | FEATURE_TURNS;
        let mut node = Node::with_features(1, crate::FEATURES & !without);
        let commands = slow_commands(&mut node);
        let before = node.engine.counters().commands;
        let first = node.engine.core.control.unwrap().consumer;
        for entry in commands.iter().cycle().take(RING as usize) {
            node.put_command(entry);
        }
        node.ring_control();
        assert_eq!(node.engine.core.control.unwrap().consumer, first + RING);
        assert!(node.engine.commands.len() > 20);
        // The driver has more unfinished than it may have: those are not taken up, and can be taken
        // back.
        for entry in commands.iter().cycle().take(RING as usize) {
            node.put_command(entry);
        }
        node.ring_control();
        let copied = node.engine.core.control.unwrap().consumer;
        assert!(copied < first + 2 * RING, "{copied}");
        assert_eq!(node.engine.commands.len(), RING as usize);
        node.doorbell(0, DOORBELL_CONTROL, u64::from(copied));
        while node.engine.has_commands() {
            assert!(node.engine.commands.len() <= RING as usize);
            node.engine.poll(node.now, &mut node.host);
        }
        let done = node.engine.counters().commands - before;
        assert_eq!(done, u64::from(copied - first));
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
