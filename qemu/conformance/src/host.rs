// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A host with its driver: brings the device up, gives commands, posts and polls.

use crate::memory::{Memory, BASE, PAGE, SIZE};
use crate::outcome::{failed, not_here, wait_for, watch, Outcome};
use crate::rings::{receive_entry, Cq, EventRing, Qp, Region, Srq};
use crate::transport::Device;
use crate::wire::{Link, Neighbour, Wire};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::*;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::mem::offset_of;

/// Doorbell page of what checks make.
pub const USER_PAGE: u32 = 1;
/// Protection domain of what checks make.
pub const PD: u32 = 7;
/// The device's own IPv4 address, entry 0 of the GID table.
pub const OWN_GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
/// The device's own IPv6 address, entry 1 of the GID table.
pub const OWN_GID6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// The neighbour's IPv4 address.
pub const PEER_GID: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 2];
/// The neighbour's IPv6 address.
pub const PEER_GID6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
/// The neighbour's MAC address.
pub const PEER_MAC: [u8; 6] = [0x02, 0, 0, 0, 0, 2];
/// The neighbour's queue pair.
pub const PEER_QPN: u32 = 0x77;
/// The first PSN that the device sends to a neighbour.
pub const SEND_PSN: u32 = 0x100;
/// The first PSN that the device expects of a neighbour.
pub const RECEIVE_PSN: u32 = 0x200;
/// Queue key of datagram queue pairs.
pub const QKEY: u32 = 0x1234_5678;

/// Base-2 logarithm of the entries of the control ring.
pub const CONTROL_LOG_ENTRIES: u8 = 5;
/// And of an event queue.
pub const EVENT_LOG_ENTRIES: u8 = 6;

/// What is written before the device is enabled.
#[derive(Clone, Copy, Debug)]
pub struct Boot {
    /// `REG_DRIVER_VERSION`.
    pub version: u32,
    /// `REG_DRIVER_FEATURES`.
    pub features: u64,
    /// `REG_BOOT`.
    pub address: u64,
    /// What stands there.
    pub block: BootBlock,
}

/// How a queue pair is connected.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Queue pair of the peer.
    pub qpn: u32,
    /// The way to the peer.
    pub address_vector: AddressVector,
    /// First sequence number to send.
    pub send_psn: u32,
    /// First sequence number to expect.
    pub receive_psn: u32,
    /// Base-2 logarithm of the path MTU.
    pub log_mtu: u8,
    /// Local ACK timeout.
    pub timeout: u8,
    /// Retries.
    pub retry_count: u8,
    /// Retries while the receiver is not ready.
    pub rnr_retry: u8,
    /// Reads and atomics in flight, each way.
    pub depth: u8,
    /// What the peer may do.
    pub access: u32,
}

/// A host and its device.
pub struct Host<'a> {
    /// The device.
    pub device: &'a mut Device,
    /// The memory that the device is given.
    pub memory: Memory,
    /// What the device said that it can do, once it runs.
    pub caps: DeviceCaps,
    /// The features that were agreed on.
    pub features: u64,
    /// The interface of the device's own is to be used, where it has one; else the host has another.
    pub ethernet: bool,
    /// The device's MAC address.
    pub mac: [u8; 6],
    /// The event queues there are.
    pub queues: BTreeMap<u16, EventRing>,
    wire: Option<&'a mut Wire>,
    interface: Option<&'a mut Link>,
    further: Vec<Memory>,
    stash: Vec<(u16, EventEntry)>,
    control_ring: u64,
    /// Commands given.
    pub commands: u32,
    reply: u64,
    made: u32,
}

impl<'a> Host<'a> {
    /// A host whose device has just been reset, with memory that the device can reach.
    pub fn new(
        device: &'a mut Device,
        wire: Option<&'a mut Wire>,
        interface: Option<&'a mut Link>,
    ) -> Outcome<Self> {
        device.reset()?;
        let mac = device.register64(REG_MAC)?.to_le_bytes();
        let memory = Memory::new(BASE, SIZE)?;
        device.map(&memory)?;
        device.set_bus_master(true)?;
        let mut host = Self {
            device,
            memory,
            caps: DeviceCaps::zeroed(),
            features: 0,
            ethernet: false,
            mac: [mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]],
            queues: BTreeMap::new(),
            wire,
            interface,
            further: Vec::new(),
            stash: Vec::new(),
            control_ring: 0,
            commands: 0,
            reply: 0,
            made: 0,
        };
        if let Some(wire) = &mut host.wire {
            wire.link()?;
            wait_for("the link to be up", || {
                Ok(host.device.status()?.link_up().then_some(()))
            })?;
            wire.drain()?;
        }
        if let Some(interface) = &mut host.interface {
            while interface.look()?.is_some() {}
        }
        Ok(host)
    }

    /// Takes everything back.
    pub fn finish(self) -> Outcome {
        self.device.reset()?;
        self.device.unmap(&self.memory)?;
        for memory in &self.further {
            self.device.unmap(memory)?;
        }
        Ok(())
    }

    /// More memory for the device, which can be taken away from it alone.
    pub fn map(&mut self, base: u64, size: u64) -> Outcome<usize> {
        let memory = Memory::new(base, size)?;
        self.device.map(&memory)?;
        self.further.push(memory);
        Ok(self.further.len() - 1)
    }

    /// Memory that was mapped.
    pub fn further(&self, number: usize) -> &Memory {
        &self.further[number]
    }

    /// Takes memory away from the device.
    pub fn unmap(&mut self, number: usize) -> Outcome {
        let memory = self.further.remove(number);
        self.device.unmap(&memory)
    }

    /// The device's Ethernet link.
    pub fn wire(&mut self) -> Outcome<&mut Wire> {
        match &mut self.wire {
            Some(wire) => Ok(wire),
            None => not_here("the device's Ethernet link is not connected to this program"),
        }
    }

    /// The host's own Ethernet interface.
    pub fn interface(&mut self) -> Outcome<&mut Link> {
        match &mut self.interface {
            Some(interface) => Ok(interface),
            None => not_here("the host's interface is not connected to this program"),
        }
    }

    // Bringing the device up.

    /// All that has to be right for a start.
    pub fn boot(&mut self) -> Outcome<Boot> {
        let mut block = BootBlock::zeroed();
        block.cqp_log_entries = CONTROL_LOG_ENTRIES;
        block.eq0_log_entries = EVENT_LOG_ENTRIES;
        block.cqp_ring = self.memory.allocate(
            control_record_offset(CONTROL_LOG_ENTRIES) + size_of::<ControlRecord>() as u64,
        );
        block.eq0_ring = self
            .memory
            .allocate((size_of::<EventEntry>() as u64) << EVENT_LOG_ENTRIES);
        Ok(Boot {
            version: (u32::from(ABI_MAJOR) << 16) | u32::from(ABI_MINOR),
            features: self.offered()?,
            address: self.memory.allocate(size_of::<BootBlock>() as u64),
            block,
        })
    }

    /// The features that are asked for.
    fn offered(&mut self) -> Outcome<u64> {
        let offered = self.device.register64(REG_FEATURES)?;
        let own = FEATURE_ETHERNET | FEATURE_REDIRECTION;
        Ok(if self.ethernet {
            offered
        } else {
            offered & !own
        })
    }

    /// Tells the device all of it and enables it; says what it became.
    pub fn enable(&mut self, boot: &Boot) -> Outcome<Status> {
        if boot.address >= BASE && boot.address < BASE + SIZE {
            self.memory.put(boot.address, &boot.block);
        }
        self.device
            .set_register32(REG_DRIVER_VERSION, boot.version)?;
        self.device
            .set_register64(REG_DRIVER_FEATURES, boot.features)?;
        self.device.set_register64(REG_BOOT, boot.address)?;
        self.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
        self.control_ring = boot.block.cqp_ring;
        self.features = boot.features;
        self.commands = 0;
        self.stash.clear();
        self.queues.clear();
        let control = EventRing {
            ring: boot.block.eq0_ring,
            log_entries: boot.block.eq0_log_entries,
            message: boot.block.eq0_message,
            read: 0,
        };
        self.queues.insert(EQ_CONTROL, control);
        self.device.status()
    }

    /// Enables the device with something wrong: it must be refused for this reason.
    pub fn enable_fails(&mut self, boot: &Boot, code: FatalCode) -> Outcome {
        let status = self.enable(boot)?;
        let found = (status.state(), status.fatal());
        ensure_eq!(found, (Some(DeviceState::Fatal), Some(code)), "the status");
        self.device.control_reset()
    }

    /// Starts the device with these features, and no object but event queue 0.
    pub fn start_bare(&mut self, features: u64) -> Outcome {
        let mut boot = self.boot()?;
        boot.features &= features;
        let status = self.enable(&boot)?;
        ensure_eq!(
            status.state(),
            Some(DeviceState::Running),
            "the state ({status:x?})"
        );
        if self.reply == 0 {
            self.reply = self.memory.allocate(PAGE);
        }
        self.caps = self.query(CommandOpcode::QueryDevice, None)?;
        Ok(())
    }

    /// Starts the device with these features, event queues and addresses.
    pub fn start_with(&mut self, features: u64) -> Outcome {
        self.start_bare(features)?;
        for eqn in [EQ_ASYNC, EQ_FIRST_HANDLER] {
            self.create_eq(eqn, eqn)?;
        }
        for (index, gid) in [(0, OWN_GID), (1, OWN_GID6)] {
            self.set_gid(index, gid, VLAN_NONE)?;
        }
        Ok(())
    }

    /// Starts the device with all that it offers, event queues and addresses.
    pub fn start(&mut self) -> Outcome {
        self.start_with(u64::MAX)
    }

    /// The same, for what needs a feature.
    pub fn start_needing(&mut self, feature: u64) -> Outcome {
        self.needs(feature)?;
        self.start()
    }

    /// Whatever else is there, the check needs this feature.
    pub fn needs(&mut self, feature: u64) -> Outcome {
        if self.device.register64(REG_FEATURES)? & feature != feature {
            return not_here(format!("the device does not offer feature {feature:#x}"));
        }
        Ok(())
    }

    /// The same, for what needs a feature and is to be seen without another one.
    pub fn start_needing_without(&mut self, feature: u64, other: u64) -> Outcome {
        self.needs(feature)?;
        self.start_with(!other)
    }

    /// The device is in `Fatal` for this reason.
    pub fn is_fatal(&mut self, code: FatalCode) -> Outcome {
        wait_for(&format!("the fatal state by {code:?}"), || {
            let status = self.device.status()?;
            Ok((status.state() == Some(DeviceState::Fatal)).then_some(status))
        })
        .and_then(|status| {
            ensure_eq!(status.fatal(), Some(code), "the fatal code");
            Ok(())
        })
    }

    /// The device still runs, and answers.
    pub fn is_alive(&mut self) -> Outcome {
        let status = self.device.status()?;
        ensure_eq!(
            status.state(),
            Some(DeviceState::Running),
            "the state ({status:x?})"
        );
        self.nop()
    }

    // Commands.

    /// An entry for a command without a reply.
    pub fn entry<P: Plain>(&mut self, opcode: CommandOpcode, payload: &P) -> CommandEntry {
        self.made += 1;
        CommandEntry::new(opcode, self.made, (0, 0), payload)
    }

    /// An entry for a command without a structure.
    pub fn bare_entry(&mut self, opcode: CommandOpcode) -> CommandEntry {
        let mut entry = self.entry(opcode, &0u32);
        entry.request_length = 0;
        entry
    }

    /// An entry for a query, with a reply of `length` bytes.
    pub fn query_entry(
        &mut self,
        opcode: CommandOpcode,
        number: Option<u32>,
        length: u32,
    ) -> CommandEntry {
        let mut entry = match number {
            Some(number) => self.entry(
                opcode,
                &ObjectNumber {
                    number,
                    reserved: 0,
                },
            ),
            None => self.bare_entry(opcode),
        };
        (entry.reply, entry.reply_length) = (self.reply, length);
        entry
    }

    /// Where replies are written.
    pub fn reply(&self) -> u64 {
        self.reply
    }

    /// Writes an entry to the control ring; the device is not told.
    pub fn write_command(&mut self, entry: &CommandEntry) {
        let slot = self.commands & ((1 << CONTROL_LOG_ENTRIES) - 1);
        let at = self.control_ring + u64::from(slot) * size_of::<CommandEntry>() as u64;
        self.memory.put(at, entry);
        self.commands = self.commands.wrapping_add(1);
    }

    /// Where the index of the control record is.
    pub fn control_record(&self) -> u64 {
        let record = self.control_ring + control_record_offset(CONTROL_LOG_ENTRIES);
        record + offset_of!(ControlRecord, producer) as u64
    }

    /// Stores how many commands were written in the control record.
    pub fn store_commands(&mut self) {
        self.memory.store32(self.control_record(), self.commands);
    }

    /// Tells the device of the commands written.
    pub fn ring_control(&mut self) -> Outcome {
        if self.features & FEATURE_PENDING_TAGS != 0 {
            self.store_commands();
        }
        self.memory.barrier();
        self.device
            .doorbell(0, DOORBELL_CONTROL, self.commands.into())
    }

    /// Waits for the answer to a command.
    pub fn answer(&mut self, cookie: u32) -> Outcome<EventEntry> {
        let is_it = |e: &EventEntry| e.code == EventCode::CommandDone.number() && e.id == cookie;
        if let Some(at) = self.stash.iter().position(|(eqn, e)| *eqn == 0 && is_it(e)) {
            return Ok(self.stash.remove(at).1);
        }
        wait_for("the answer to a command", || {
            while let Some(event) = self.take_event(EQ_CONTROL)? {
                if is_it(&event) {
                    return Ok(Some(event));
                }
                self.stash.push((EQ_CONTROL, event));
            }
            Ok(None)
        })
    }

    /// Gives a command; returns its status and what its answer says besides.
    pub fn submit(&mut self, entry: &CommandEntry) -> Outcome<(CommandStatus, u64)> {
        self.write_command(entry);
        self.ring_control()?;
        let answer = self.answer(entry.cookie)?;
        match u8::try_from(answer.param0)
            .ok()
            .and_then(CommandStatus::from_number)
        {
            Some(status) => Ok((status, answer.param1)),
            None => failed(format!("a command status of {:#x}", answer.param0)),
        }
    }

    /// Gives a command, which must end so.
    pub fn submit_for(&mut self, entry: &CommandEntry, status: CommandStatus) -> Outcome {
        let found = self.submit(entry)?.0;
        let opcode = CommandOpcode::from_number(entry.opcode);
        ensure_eq!(found, status, "the status of {opcode:?} ({})", entry.opcode);
        Ok(())
    }

    /// Gives a command, which must succeed.
    pub fn execute<C: Command>(&mut self, command: &C) -> Outcome {
        self.refuse(command, CommandStatus::Ok)
    }

    /// Gives a command, which must end with this status.
    pub fn refuse<C: Command>(&mut self, command: &C, status: CommandStatus) -> Outcome {
        let entry = self.entry(C::OPCODE, command);
        self.submit_for(&entry, status)
    }

    /// Gives a command about an object, which must end with this status.
    pub fn object(&mut self, opcode: CommandOpcode, number: u32, status: CommandStatus) -> Outcome {
        let entry = self.entry(
            opcode,
            &ObjectNumber {
                number,
                reserved: 0,
            },
        );
        self.submit_for(&entry, status)
    }

    /// Gives a command about an object, which must succeed.
    pub fn destroy(&mut self, opcode: CommandOpcode, number: u32) -> Outcome {
        self.object(opcode, number, CommandStatus::Ok)
    }

    /// Asks for something, about an object or the device.
    pub fn query<R: Plain>(&mut self, opcode: CommandOpcode, number: Option<u32>) -> Outcome<R> {
        let entry = self.query_entry(opcode, number, size_of::<R>() as u32);
        self.submit_for(&entry, CommandStatus::Ok)?;
        Ok(self.memory.get(self.reply))
    }

    /// Does nothing, after all commands before.
    pub fn nop(&mut self) -> Outcome {
        let entry = self.bare_entry(CommandOpcode::Nop);
        self.submit_for(&entry, CommandStatus::Ok)
    }

    /// The device's counters.
    pub fn counters(&mut self) -> Outcome<Vec<u64>> {
        let entry = self.entry(CommandOpcode::QueryCounters, &QueryCounters::zeroed());
        self.read_counters(entry)
    }

    /// The counters of queue pairs, added up.
    pub fn qp_counters(&mut self, command: &QueryQueuePairCounters) -> Outcome<Vec<u64>> {
        let entry = self.entry(CommandOpcode::QueryQueuePairCounters, command);
        self.read_counters(entry)
    }

    fn read_counters(&mut self, mut entry: CommandEntry) -> Outcome<Vec<u64>> {
        let length = 8 * self.caps.counters;
        (entry.reply, entry.reply_length) = (self.reply, length);
        self.submit_for(&entry, CommandStatus::Ok)?;
        let bytes = self.memory.bytes(self.reply, length.into());
        let word = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        Ok(bytes.chunks(8).map(word).collect())
    }

    /// One of them.
    pub fn counter(&mut self, name: &str) -> Outcome<u64> {
        let counters = self.counters()?;
        let at = COUNTER_NAMES.iter().position(|other| *other == name);
        match at.and_then(|at| counters.get(at)) {
            Some(value) => Ok(*value),
            None => failed(format!("there is no counter {name}")),
        }
    }

    // Events.

    /// Takes the next event of a queue, if there is one, and tells the device.
    pub fn take_event(&mut self, eqn: u16) -> Outcome<Option<EventEntry>> {
        let Some(ring) = self.queues.get_mut(&eqn) else {
            return failed(format!(
                "a check looks at event queue {eqn}, which it has not made"
            ));
        };
        let Some(event) = ring.take(&self.memory) else {
            return Ok(None);
        };
        let read = ring.read;
        self.tell_read(eqn, read)?;
        Ok(Some(event))
    }

    /// Tells the device what was read of an event queue.
    pub fn tell_read(&mut self, eqn: u16, read_index: u32) -> Outcome {
        self.event_doorbell(EventDoorbell {
            eqn,
            read_index,
            relative: false,
            valid: true,
            arm: false,
            quiet: false,
            disarm: false,
        })
    }

    /// Arms an event queue with what was read of it.
    pub fn arm_eq(&mut self, eqn: u16) -> Outcome {
        let read_index = self.queues.get(&eqn).map_or(0, |ring| ring.read);
        self.event_doorbell(EventDoorbell {
            eqn,
            read_index,
            relative: false,
            valid: true,
            arm: true,
            quiet: false,
            disarm: false,
        })
    }

    /// Rings the doorbell of event queues.
    pub fn event_doorbell(&mut self, doorbell: EventDoorbell) -> Outcome {
        self.device
            .doorbell(0, DOORBELL_EVENT_QUEUE, doorbell.encode())
    }

    /// The next event of a queue that is no answer to a command, if there is one.
    pub fn look_for_event(&mut self, eqn: u16) -> Outcome<Option<EventEntry>> {
        if let Some(at) = self.stash.iter().position(|(other, _)| *other == eqn) {
            return Ok(Some(self.stash.remove(at).1));
        }
        self.take_event(eqn)
    }

    /// The next event of a queue, which must be this one.
    pub fn event(&mut self, eqn: u16, code: EventCode, id: u32) -> Outcome<EventEntry> {
        let event = wait_for(&format!("the event {code:?} of {id:#x}"), || {
            self.look_for_event(eqn)
        })?;
        let found = (EventCode::from_number(event.code), event.id);
        ensure_eq!(found, (Some(code), id), "the event ({event:x?})");
        Ok(event)
    }

    /// No event comes on a queue.
    pub fn no_event(&mut self, eqn: u16) -> Outcome {
        watch(&format!("an event on queue {eqn}"), || {
            self.look_for_event(eqn)
        })
    }

    /// How often the interrupt of an event queue was raised.
    pub fn interrupts(&self, eqn: u16) -> u64 {
        let message = self.queues.get(&eqn).map_or(0, |ring| ring.message);
        self.device.interrupts(message)
    }

    /// The interrupt of an event queue comes.
    pub fn interrupt(&mut self, eqn: u16) -> Outcome {
        wait_for(&format!("the interrupt of event queue {eqn}"), || {
            Ok((self.interrupts(eqn) > 0).then_some(()))
        })
    }

    /// The interrupt of an event queue does not come.
    pub fn no_interrupt(&mut self, eqn: u16) -> Outcome {
        watch(&format!("an interrupt of event queue {eqn}"), || {
            Ok((self.interrupts(eqn) > 0).then_some(()))
        })
    }

    // Objects.

    /// A command that makes an event queue.
    pub fn eq_command(&mut self, eqn: u16, message: u16) -> CreateEventQueue {
        let length = (size_of::<EventEntry>() as u64) << EVENT_LOG_ENTRIES;
        CreateEventQueue {
            eqn,
            message,
            log_entries: EVENT_LOG_ENTRIES,
            overflow: 0,
            priority: 0,
            reserved: 0,
            ring: Buffer::contiguous(self.memory.allocate(length), length),
        }
    }

    /// Makes an event queue.
    pub fn create_eq(&mut self, eqn: u16, message: u16) -> Outcome {
        let message = message % self.device.own_messages().max(1);
        let command = self.eq_command(eqn, message);
        self.execute(&command)?;
        self.add_eq(&command);
        Ok(())
    }

    /// Remembers an event queue that was made.
    pub fn add_eq(&mut self, command: &CreateEventQueue) {
        let ring = EventRing {
            ring: command.ring.root + u64::from(command.ring.fbo),
            log_entries: command.log_entries,
            message: command.message,
            read: 0,
        };
        self.queues.insert(command.eqn, ring);
    }

    /// Sets an entry of the GID table.
    pub fn set_gid(&mut self, index: u16, gid: [u8; 16], vlan: u16) -> Outcome {
        let mac = self.mac;
        self.execute(&SetGid {
            gid,
            index,
            vlan,
            mac,
            ..SetGid::zeroed()
        })
    }

    /// A number that no other object of the host has, counted from 0.
    fn fresh(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    /// A command that makes a completion queue of `1 << log_entries` entries.
    pub fn cq_command(&mut self, log_entries: u8) -> CreateCompletionQueue {
        let ring = (size_of::<CompletionEntry>() as u64) << log_entries;
        let length = ring + size_of::<CompletionRecord>() as u64;
        let number = self.fresh();
        CreateCompletionQueue {
            cqn: self.caps.cq_first + number % self.caps.cq_count.max(1),
            eqn: EQ_FIRST_HANDLER,
            log_entries,
            doorbell_page: USER_PAGE,
            record_offset: ring as u32,
            buffer: Buffer::contiguous(self.memory.allocate(length), length),
            ..CreateCompletionQueue::zeroed()
        }
    }

    /// Makes a completion queue of 64 entries.
    pub fn create_cq(&mut self) -> Outcome<Cq> {
        let command = self.cq_command(6);
        self.execute(&command)?;
        Ok(Cq::new(&command))
    }

    /// A command that makes a queue pair: 64 blocks, 16 receives of up to 3 entries each.
    pub fn qp_command(&mut self, service: Service, cq: &Cq) -> CreateQueuePair {
        const LOG_BLOCKS: u8 = 6;
        const LOG_ENTRIES: u8 = 4;
        const LOG_STRIDE: u8 = 6;
        let send = (BLOCK_SIZE as u64) << LOG_BLOCKS;
        let receive = 1u64 << (LOG_ENTRIES + LOG_STRIDE);
        let length = send + receive + size_of::<QueuePairRecord>() as u64;
        let number = self.fresh() % self.caps.qp_count.max(1);
        CreateQueuePair {
            qpn: if service == Service::Gsi {
                1
            } else {
                self.caps.qp_first + number
            },
            pd: PD,
            send_cqn: cq.cqn,
            receive_cqn: cq.cqn,
            service: service.number(),
            transport: Transport::RoceV2.number(),
            sq_log_blocks: LOG_BLOCKS,
            rq_log_entries: LOG_ENTRIES,
            rq_log_stride: LOG_STRIDE,
            doorbell_page: USER_PAGE,
            buffer: Buffer::contiguous(self.memory.allocate(length), length),
            sq_offset: 0,
            rq_offset: send as u32,
            record_offset: (send + receive) as u32,
            ..CreateQueuePair::zeroed()
        }
    }

    /// Makes a queue pair.
    pub fn create_qp(&mut self, service: Service, cq: &Cq) -> Outcome<Qp> {
        let command = self.qp_command(service, cq);
        self.make_qp(&command)
    }

    /// Makes a queue pair by this command.
    pub fn make_qp(&mut self, command: &CreateQueuePair) -> Outcome<Qp> {
        self.execute(command)?;
        Ok(Qp::new(command))
    }

    /// A command that makes a shared receive queue of 16 entries.
    pub fn srq_command(&mut self) -> CreateSrq {
        let (log_entries, log_stride) = (4, 6);
        let ring = 1u64 << (log_entries + log_stride);
        let length = ring + size_of::<SrqRecord>() as u64;
        let number = self.fresh() % self.caps.srq_count.max(1);
        CreateSrq {
            srqn: self.caps.srq_first + number,
            pd: PD,
            log_entries,
            log_stride,
            doorbell_page: USER_PAGE,
            buffer: Buffer::contiguous(self.memory.allocate(length), length),
            ring_offset: 0,
            record_offset: ring as u32,
            ..CreateSrq::zeroed()
        }
    }

    /// Makes a shared receive queue.
    pub fn create_srq(&mut self) -> Outcome<Srq> {
        let command = self.srq_command();
        self.execute(&command)?;
        Ok(Srq::new(&command))
    }

    /// A tag that no other entry has.
    pub fn fresh_tag(&mut self) -> u32 {
        let number = self.fresh() % self.caps.tag_count.max(1);
        Tag::new(self.caps.tag_first + number, 0x11).0
    }

    /// A command that registers `length` bytes of new memory.
    pub fn region_command(&mut self, access: u32, length: u64) -> RegisterRegion {
        let dma = self.memory.allocate(length.max(1));
        RegisterRegion {
            tag: self.fresh_tag(),
            pd: PD,
            access,
            flags: 0,
            address: 0x7000_0000_0000 + dma,
            buffer: Buffer::contiguous(dma, length),
        }
    }

    /// Registers `length` bytes of new memory.
    pub fn region(&mut self, access: u32, length: u64) -> Outcome<Region> {
        let command = self.region_command(access, length);
        self.execute(&command)?;
        Ok(region_of(&command))
    }

    // Queue pairs.

    /// A connection to a neighbour on the wire.
    pub fn to_neighbour(&self) -> Connection {
        Connection {
            qpn: PEER_QPN,
            address_vector: AddressVector {
                mac: PEER_MAC,
                gid: PEER_GID,
                vlan: VLAN_NONE,
                hop_limit: 64,
                ..AddressVector::zeroed()
            },
            send_psn: SEND_PSN,
            receive_psn: RECEIVE_PSN,
            log_mtu: 10,
            timeout: 18,
            retry_count: 7,
            rnr_retry: 7,
            depth: 4.min(self.caps.max_ord).min(self.caps.max_ird),
            access: ACCESS_REMOTE,
        }
    }

    /// A connection to a queue pair of another device of Ferrite's, whose host makes the same.
    pub fn to_device(&self, mac: [u8; 6], gid: [u8; 16], qpn: u32, log_mtu: u8) -> Connection {
        let neighbour = self.to_neighbour();
        Connection {
            qpn,
            address_vector: AddressVector {
                mac,
                gid,
                ..neighbour.address_vector
            },
            // The circle of sequence numbers begins anew on the way.
            send_psn: 0xff_fff0,
            receive_psn: 0xff_fff0,
            log_mtu,
            ..neighbour
        }
    }

    /// A connection to a queue pair of the same device.
    pub fn to_self(&self, qpn: u32) -> Connection {
        let neighbour = self.to_neighbour();
        Connection {
            qpn,
            address_vector: AddressVector {
                mac: self.mac,
                gid: OWN_GID,
                ..neighbour.address_vector
            },
            send_psn: 0x300,
            receive_psn: 0x300,
            ..neighbour
        }
    }

    /// The command that leads to a state, with the attributes that are needed for that.
    pub fn modify(
        service: Service,
        qpn: u32,
        to: QueuePairStateCode,
        connection: &Connection,
    ) -> ModifyQueuePair {
        let datagram = matches!(service, Service::Ud | Service::Gsi);
        let reliable = matches!(service, Service::Rc | Service::XrcIni | Service::XrcTgt);
        let mask = match to {
            QueuePairStateCode::Init if datagram => MODIFY_PKEY | MODIFY_QKEY,
            QueuePairStateCode::Init => MODIFY_PKEY | MODIFY_ACCESS,
            QueuePairStateCode::Rtr if datagram => 0,
            QueuePairStateCode::Rtr => {
                let connected =
                    MODIFY_ADDRESS_VECTOR | MODIFY_MTU | MODIFY_DESTINATION | MODIFY_RECEIVE_PSN;
                let responder = MODIFY_IRD | MODIFY_MIN_RNR_TIMER;
                connected | if reliable { responder } else { 0 }
            }
            QueuePairStateCode::Rts => {
                let requester = MODIFY_TIMEOUT | MODIFY_RETRY | MODIFY_RNR_RETRY | MODIFY_ORD;
                MODIFY_SEND_PSN | if reliable { requester } else { 0 }
            }
            _ => 0,
        };
        let mut command = ModifyQueuePair {
            qpn,
            mask: mask | MODIFY_STATE,
            state: to.number(),
            ..ModifyQueuePair::zeroed()
        };
        let has = |bit: u32| mask & bit != 0;
        if has(MODIFY_QKEY) {
            command.qkey = QKEY;
        }
        if has(MODIFY_ACCESS) {
            command.access = connection.access;
        }
        if has(MODIFY_ADDRESS_VECTOR) {
            command.address_vector = connection.address_vector;
            command.log_mtu = connection.log_mtu;
            command.destination_qpn = connection.qpn;
            command.receive_psn = connection.receive_psn;
        }
        if has(MODIFY_IRD) {
            command.ird = connection.depth;
            command.min_rnr_timer = 1;
        }
        if has(MODIFY_SEND_PSN) {
            command.send_psn = connection.send_psn;
        }
        if has(MODIFY_TIMEOUT) {
            command.timeout = connection.timeout;
            command.retry_count = connection.retry_count;
            command.rnr_retry = connection.rnr_retry;
            command.ord = connection.depth;
        }
        command
    }

    /// Takes a queue pair up to a state, from `Reset`.
    pub fn bring(
        &mut self,
        service: Service,
        qp: &Qp,
        to: QueuePairStateCode,
        connection: &Connection,
    ) -> Outcome {
        use QueuePairStateCode::{Init, Rtr, Rts};
        for state in [Init, Rtr, Rts] {
            if state > to {
                break;
            }
            self.execute(&Self::modify(service, qp.qpn, state, connection))?;
        }
        Ok(())
    }

    /// Takes a queue pair to a state, without any attribute.
    pub fn move_qp(&mut self, qpn: u32, to: QueuePairStateCode) -> Outcome {
        self.execute(&ModifyQueuePair {
            qpn,
            mask: MODIFY_STATE,
            state: to.number(),
            ..ModifyQueuePair::zeroed()
        })
    }

    /// Two queue pairs of this service that are connected to each other through the device.
    pub fn pair(&mut self, service: Service, cq: &Cq) -> Outcome<(Qp, Qp)> {
        let a = self.create_qp(service, cq)?;
        let b = self.create_qp(service, cq)?;
        self.join(service, &a, &b)?;
        Ok((a, b))
    }

    /// Connects two queue pairs of the device.
    pub fn join(&mut self, service: Service, a: &Qp, b: &Qp) -> Outcome {
        let (to_a, to_b) = (self.to_self(a.qpn), self.to_self(b.qpn));
        self.bring(service, a, QueuePairStateCode::Rts, &to_b)?;
        self.bring(service, b, QueuePairStateCode::Rts, &to_a)
    }

    /// A queue pair that is connected to a neighbour on the wire.
    pub fn wired(&mut self, service: Service, cq: &Cq) -> Outcome<(Qp, Neighbour)> {
        let connection = self.to_neighbour();
        self.wired_by(service, cq, &connection)
    }

    /// The same, connected like this.
    pub fn wired_by(
        &mut self,
        service: Service,
        cq: &Cq,
        connection: &Connection,
    ) -> Outcome<(Qp, Neighbour)> {
        self.wire()?;
        let qp = self.create_qp(service, cq)?;
        self.bring(service, &qp, QueuePairStateCode::Rts, connection)?;
        let neighbour = self.neighbour(&qp);
        Ok((qp, neighbour))
    }

    /// The neighbour that a queue pair is connected to.
    pub fn neighbour(&self, qp: &Qp) -> Neighbour {
        Neighbour {
            mac: PEER_MAC,
            gid: PEER_GID,
            qpn: PEER_QPN,
            device_mac: self.mac,
            device_gid: OWN_GID,
            device_qpn: qp.qpn,
        }
    }

    /// The state of a queue pair.
    pub fn state(&mut self, qpn: u32) -> Outcome<QueuePairStateCode> {
        let state: QueuePairState = self.query(CommandOpcode::QueryQueuePair, Some(qpn))?;
        match QueuePairStateCode::from_number(state.attributes.state) {
            Some(state) => Ok(state),
            None => failed("a state of a queue pair that does not exist"),
        }
    }

    /// A queue pair comes to a state.
    pub fn comes_to(&mut self, qpn: u32, state: QueuePairStateCode) -> Outcome {
        wait_for(&format!("the queue pair in {state:?}"), || {
            Ok((self.state(qpn)? == state).then_some(()))
        })
    }

    // Posting and polling.

    /// Posts a work request; returns its index.
    pub fn post(&mut self, qp: &mut Qp, work: &Work) -> Outcome<u32> {
        let first = qp.write_send(&self.memory, &work.encode());
        self.tell_send(qp)?;
        Ok(first)
    }

    /// Tells the device of work requests.
    pub fn tell_send(&mut self, qp: &Qp) -> Outcome {
        let producer = offset_of!(QueuePairRecord, send_producer) as u64;
        self.memory.store32(qp.record + producer, qp.send_producer);
        self.memory.barrier();
        let wake = offset_of!(QueuePairRecord, send_wake) as u64;
        if self.memory.load32(qp.record + wake) != 0 {
            let word = send_doorbell(qp.qpn, qp.send_producer);
            self.device.doorbell(qp.page, DOORBELL_SEND, word)?;
        }
        Ok(())
    }

    /// Posts a receive; returns its index.
    pub fn post_receive(&mut self, qp: &mut Qp, sges: &[Sge]) -> Outcome<u32> {
        self.post_receive_bytes(qp, &receive_entry(0, sges))
    }

    /// Posts a receive of these bytes.
    pub fn post_receive_bytes(&mut self, qp: &mut Qp, entry: &[u8]) -> Outcome<u32> {
        let first = qp.write_receive(&self.memory, entry);
        let producer = offset_of!(QueuePairRecord, receive_producer) as u64;
        self.memory
            .store32(qp.record + producer, qp.receive_producer);
        self.memory.barrier();
        let wake = offset_of!(QueuePairRecord, receive_wake) as u64;
        if self.memory.load32(qp.record + wake) != 0 {
            self.device
                .doorbell(qp.page, DOORBELL_RECEIVE, queue_doorbell(qp.qpn))?;
        }
        Ok(first)
    }

    /// The next completion.
    pub fn completion(&mut self, cq: &mut Cq) -> Outcome<CompletionEntry> {
        wait_for("a completion", || Ok(cq.take(&self.memory)))
    }

    /// The next completion, which must be that of this work request.
    pub fn completes(
        &mut self,
        cq: &mut Cq,
        (qpn, index): (u32, u32),
        status: CompletionStatus,
    ) -> Outcome<CompletionEntry> {
        let entry = self.completion(cq)?;
        let found = (
            entry.qpn,
            entry.index,
            CompletionStatus::from_number(entry.status),
        );
        ensure_eq!(
            found,
            (qpn, index, Some(status)),
            "the completion ({entry:x?})"
        );
        Ok(entry)
    }

    /// No completion comes.
    pub fn no_completion(&mut self, cq: &mut Cq) -> Outcome {
        watch("a completion", || Ok(cq.take(&self.memory)))
    }

    /// Posts a work request, which must end like this and, if badly, leave its queue pair in error.
    pub fn post_for(
        &mut self,
        qp: &mut Qp,
        cq: &mut Cq,
        work: &Work,
        status: CompletionStatus,
    ) -> Outcome<CompletionEntry> {
        let index = self.post(qp, work)?;
        self.completes(cq, (qp.qpn, index), status)
    }

    /// Arms a completion queue for what comes behind what was consumed.
    pub fn arm_cq(&mut self, cq: &Cq, sequence: u8, solicited: bool) -> Outcome {
        let doorbell = CompletionDoorbell {
            cqn: cq.cqn,
            seen: cq.consumer,
            sequence,
            solicited,
        };
        self.device
            .doorbell(cq.page, DOORBELL_COMPLETION, doorbell.encode())
    }

    /// Makes sure that nothing of a stretch of memory changes while the device is watched.
    pub fn untouched(&mut self, address: u64, length: u64) -> Outcome {
        let before = self.memory.bytes(address, length);
        let memory = &self.memory;
        watch("memory that changed", || {
            Ok((memory.bytes(address, length) != before).then_some(()))
        })
    }

    /// A found value is one of those allowed.
    pub fn ensure_one_of<T: PartialEq + Debug>(found: &T, allowed: &[T], what: &str) -> Outcome {
        ensure!(
            allowed.contains(found),
            "{what}: {found:?}, not one of {allowed:?}"
        );
        Ok(())
    }
}

/// What a command registers.
pub fn region_of(command: &RegisterRegion) -> Region {
    Region {
        tag: command.tag,
        address: command.address,
        dma: command.buffer.root + u64::from(command.buffer.fbo),
        length: command.buffer.length,
    }
}
