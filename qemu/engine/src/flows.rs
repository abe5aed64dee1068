// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Rules of flows: which frames are for queue pairs of raw packets, and tables that spread them over
//! work queues (chapter 21).

use crate::core::PORTS;
use crate::network::headers::{Headers, Protocol, ADDRESSES};
use crate::qp::QueuePairs;
use ferrite_abi::{
    CommandStatus, CreateFlow, CreateReceiveTable, FlowFields, Plain, Service, ALL_HASHES,
    FEATURE_RECEIVE_TABLES, FLOW_LAYER_IPV4, FLOW_LAYER_IPV6, FLOW_LAYER_TCP, FLOW_LAYER_UDP,
    FLOW_LAYER_VLAN, FLOW_TO_TABLE, RECEIVE_TABLE_ENTRIES, REDIRECTION_KEY_SIZE,
};

/// Rules of a function.
pub const MAX_FLOWS: u32 = 256;
/// Receive tables of a function.
pub const MAX_TABLES: u16 = 64;
/// Base-2 logarithm of the most entries of one.
pub const TABLE_LOG_ENTRIES: u8 = RECEIVE_TABLE_ENTRIES.ilog2() as u8;

const ALL_LAYERS: u8 =
    FLOW_LAYER_VLAN | FLOW_LAYER_IPV4 | FLOW_LAYER_IPV6 | FLOW_LAYER_TCP | FLOW_LAYER_UDP;

/// What rules compare, in words.
type Words = [u64; size_of::<FlowFields>() / 8];

fn words(fields: &FlowFields) -> Words {
    let mut words = [0; size_of::<FlowFields>() / 8];
    for (word, bytes) in words.iter_mut().zip(fields.as_bytes().chunks_exact(8)) {
        *word = bytes
            .iter()
            .fold(0, |word, byte| (word << 8) | u64::from(*byte));
    }
    words
}

/// What there is to be seen of a frame: its layers and fields.
fn look_at(headers: &Headers, frame: &[u8]) -> (u8, FlowFields) {
    let mut layers = 0;
    let mut fields = FlowFields::zeroed();
    let copy = |to: &mut [u8], at: usize| {
        if let Some(bytes) = frame.get(at..at + to.len()) {
            to.copy_from_slice(bytes);
        }
    };
    copy(&mut fields.destination_mac, 0);
    copy(&mut fields.source_mac, 6);
    let mut at = ADDRESSES;
    if let Some(vlan) = headers.vlan {
        layers |= FLOW_LAYER_VLAN;
        fields.vlan = vlan.to_be_bytes();
        at += 4;
    }
    copy(&mut fields.ether_type, at);
    let Some(packet) = &headers.packet else {
        return (layers, fields);
    };
    let start = packet.start;
    let byte = |at: usize| frame.get(start + at).copied().unwrap_or(0);
    if packet.is_v6 {
        layers |= FLOW_LAYER_IPV6;
        copy(&mut fields.source, start + 8);
        copy(&mut fields.destination, start + 24);
        fields.protocol = byte(6);
        fields.traffic_class = (byte(0) << 4) | (byte(1) >> 4);
        fields.hop_limit = byte(7);
        fields.flow_label = [0, byte(1) & 0xf, byte(2), byte(3)];
    } else {
        layers |= FLOW_LAYER_IPV4;
        copy(&mut fields.source[..4], start + 12);
        copy(&mut fields.destination[..4], start + 16);
        fields.protocol = byte(9);
        fields.traffic_class = byte(1);
        fields.hop_limit = byte(8);
        // In the header they are the upper bits, in the other order.
        let flags = byte(6);
        fields.fragment = (((flags >> 6) & 1) << 1) | (((flags >> 5) & 1) << 2);
    }
    if let Some((protocol, ports)) = packet.transport {
        layers |= match protocol {
            Protocol::Tcp => FLOW_LAYER_TCP,
            Protocol::Udp => FLOW_LAYER_UDP,
        };
        copy(&mut fields.source_port, ports);
        copy(&mut fields.destination_port, ports + 2);
    }
    (layers, fields)
}

/// Who gets what a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    QueuePair(u32),
    Table {
        table: u32,
        types: u16,
        key: [u8; REDIRECTION_KEY_SIZE],
    },
}

/// A rule.
#[derive(Clone, Debug)]
struct Flow {
    number: u32,
    priority: u16,
    layers: u8,
    value: Words,
    mask: Words,
    target: Target,
}

impl Flow {
    fn matches(&self, layers: u8, fields: &Words) -> bool {
        layers & self.layers == self.layers
            && (fields.iter().zip(&self.mask).zip(&self.value))
                .all(|((field, mask), value)| field & mask == *value)
    }

    /// Whether it is for the same frames as another.
    fn is_like(&self, other: &Self) -> bool {
        (self.priority, self.layers) == (other.priority, other.layers)
            && (self.value, self.mask) == (other.value, other.mask)
    }
}

/// All rules and tables of a function.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    /// By priority, and then in the order they were made.
    flows: Vec<Flow>,
    tables: Vec<Option<Vec<u32>>>,
}

impl Flows {
    /// True when there is no rule.
    pub(crate) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    fn find(&self, headers: &Headers, frame: &[u8]) -> Option<usize> {
        let (layers, fields) = look_at(headers, frame);
        let fields = words(&fields);
        let mut flows = self.flows.iter();
        flows.position(|flow| flow.matches(layers, &fields))
    }

    /// The queue pairs that get a frame: by the first rule that is for it, and by all that are the
    /// same but for who gets it.
    pub(crate) fn takers(&self, frame: &[u8]) -> Vec<u32> {
        if self.is_empty() {
            return Vec::new();
        }
        let headers = Headers::parse(frame);
        let Some(first) = self.find(&headers, frame) else {
            return Vec::new();
        };
        let flow = &self.flows[first];
        let same = self.flows[first..].iter();
        let same = same.take_while(|other| other.priority == flow.priority);
        let mut takers: Vec<u32> = same
            .filter(|other| other.is_like(flow))
            .filter_map(|other| self.taker(&other.target, &headers, frame))
            .collect();
        takers.sort_unstable();
        takers.dedup();
        takers
    }

    fn taker(&self, target: &Target, headers: &Headers, frame: &[u8]) -> Option<u32> {
        match target {
            Target::QueuePair(qpn) => Some(*qpn),
            Target::Table { table, types, key } => {
                let entries = self.table(*table)?;
                let hash = headers.hash(frame, key, *types);
                let hash = hash.map_or(0, |(hash, _)| hash as usize);
                entries.get(hash & (entries.len() - 1)).copied()
            }
        }
    }

    fn table(&self, table: u32) -> Option<&Vec<u32>> {
        self.tables.get(table as usize)?.as_ref()
    }

    /// Whether a table has a queue pair.
    pub(crate) fn is_in_table(&self, qpn: u32) -> bool {
        self.tables
            .iter()
            .flatten()
            .any(|table| table.contains(&qpn))
    }

    /// A queue pair is gone, and its rules with it.
    pub(crate) fn forget(&mut self, qpn: u32) {
        self.flows
            .retain(|flow| flow.target != Target::QueuePair(qpn));
    }

    /// Carries out `CreateFlow`.
    pub(crate) fn create(
        &mut self,
        qps: &QueuePairs,
        command: &CreateFlow,
        features: u64,
    ) -> Result<(), CommandStatus> {
        if command.flow >= MAX_FLOWS || command.port >= PORTS {
            return Err(CommandStatus::BadNumber);
        }
        let (value, mask) = (words(&command.value), words(&command.mask));
        let to_table = command.flags & FLOW_TO_TABLE != 0;
        if command.flags & !FLOW_TO_TABLE != 0
            || command.layers & !ALL_LAYERS != 0
            || value
                .iter()
                .zip(&mask)
                .any(|(value, mask)| value & !mask != 0)
            || command.hash_types & !ALL_HASHES != 0
            || !to_table && (command.hash_types != 0 || command.key != [0; REDIRECTION_KEY_SIZE])
        {
            return Err(CommandStatus::BadParameter);
        }
        if self.flows.iter().any(|flow| flow.number == command.flow) {
            return Err(CommandStatus::Exists);
        }
        let target = if to_table {
            if features & FEATURE_RECEIVE_TABLES == 0 {
                return Err(CommandStatus::Unsupported);
            }
            self.find_table(command.target)?;
            Target::Table {
                table: command.target,
                types: command.hash_types,
                key: command.key,
            }
        } else {
            check_raw(qps, command.target)?;
            Target::QueuePair(command.target)
        };
        let place = self
            .flows
            .partition_point(|flow| flow.priority <= command.priority);
        let flow = Flow {
            number: command.flow,
            priority: command.priority,
            layers: command.layers,
            value,
            mask,
            target,
        };
        self.flows.insert(place, flow);
        Ok(())
    }

    /// Carries out `DestroyFlow`.
    pub(crate) fn destroy(&mut self, number: u32) -> Result<(), CommandStatus> {
        if number >= MAX_FLOWS {
            return Err(CommandStatus::BadNumber);
        }
        let place = self.flows.iter().position(|flow| flow.number == number);
        self.flows.remove(place.ok_or(CommandStatus::NotFound)?);
        Ok(())
    }

    fn find_table(&self, table: u32) -> Result<&Vec<u32>, CommandStatus> {
        if table >= MAX_TABLES.into() {
            return Err(CommandStatus::BadNumber);
        }
        self.table(table).ok_or(CommandStatus::NotFound)
    }

    /// Carries out `CreateReceiveTable`.
    pub(crate) fn create_table(
        &mut self,
        qps: &QueuePairs,
        command: &CreateReceiveTable,
    ) -> Result<(), CommandStatus> {
        match self.find_table(command.table) {
            Ok(_) => return Err(CommandStatus::Exists),
            Err(CommandStatus::NotFound) => {}
            Err(status) => return Err(status),
        }
        if command.log_entries > TABLE_LOG_ENTRIES {
            return Err(CommandStatus::BadParameter);
        }
        let (entries, rest) = command.qpns.split_at(1 << command.log_entries);
        if rest.iter().any(|&qpn| qpn != 0) {
            return Err(CommandStatus::BadParameter);
        }
        for &qpn in entries {
            check_raw(qps, qpn)?;
        }
        let place = command.table as usize;
        if self.tables.len() <= place {
            self.tables.resize(place + 1, None);
        }
        self.tables[place] = Some(entries.to_vec());
        Ok(())
    }

    /// Carries out `DestroyReceiveTable`.
    pub(crate) fn destroy_table(&mut self, number: u32) -> Result<(), CommandStatus> {
        self.find_table(number)?;
        let names =
            |flow: &Flow| matches!(flow.target, Target::Table { table, .. } if table == number);
        if self.flows.iter().any(names) {
            return Err(CommandStatus::Busy);
        }
        self.tables[number as usize] = None;
        Ok(())
    }
}

/// Refuses what is no queue pair of raw packets.
fn check_raw(qps: &QueuePairs, qpn: u32) -> Result<(), CommandStatus> {
    match qps.find(qpn)?.service {
        Service::Raw => Ok(()),
        _ => Err(CommandStatus::BadParameter),
    }
}
