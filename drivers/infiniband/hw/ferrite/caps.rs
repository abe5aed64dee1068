// SPDX-License-Identifier: GPL-2.0

//! What a device says it can do, within what the interface has room for: nothing that is reckoned
//! with it later can overflow, whatever the device said.

use crate::abi::{
    self,
    DeviceCaps,
    Transport, //
};
use core::ops::{
    Range,
    RangeInclusive, //
};
use kernel::prelude::*;

/// GIDs that are made use of: `sysfs` has some files of each.
const MOST_GIDS: u16 = 1024;
/// The core counts most things with sign.
const MOST_OBJECTS: u32 = i32::MAX as u32;
/// Rules of flows: there is a table for all of them.
const MOST_FLOWS: u32 = 1 << 16;
/// Pages of a region that is registered by work request: there is a table for all of them.
const MOST_FAST_REGISTER_PAGES: u32 = 1 << 16;

/// What follows the last number of a queue.
const QUEUES_END: u32 = abi::QUEUE_NUMBER_MASK + 1;
/// What follows the last index of a tag, which has 24 bits.
const TAGS_END: u32 = 1 << 24;
/// The first number of a queue pair that is nobody's: 0 and 1 are those of management.
const FIRST_QPN: u32 = 2;
/// What follows the last: the highest number stands for a multicast group.
const QPNS_END: u32 = QUEUES_END - 1;

/// Base-2 logarithms of the smallest and largest MTU.
const LOG_MTU: (u8, u8) = (8, 12);

/// The page sizes that a buffer can have at all.
const PAGE_SIZES: u64 = (2 << abi::PAGE_SHIFT_MAX) - (1 << abi::PAGE_SHIFT_MIN);

/// Bits of a DMA address that any device can put on the bus, and that there are: more than the least
/// are used when it said so.
pub(crate) const DMA_BITS: RangeInclusive<u8> = 32..=64;

/// Bits of a clock.
const CLOCK_BITS: RangeInclusive<u8> = 32..=64;

/// The most that a device may say that a command takes, in milliseconds.
pub(crate) const MOST_COMMAND: u32 = 120_000;
/// An answer is waited for so many times as long as the device says: a slow (emulated, overloaded)
/// machine is not a dead device.
const COMMAND_PATIENCE: u32 = 3;
/// But no less than that, in milliseconds, and no longer than the most that it may say, or so much
/// longer than it does say: memory management waits for some.
const LEAST_COMMAND_TIMEOUT: u32 = 30_000;

/// How long the answer to a command is waited for, in milliseconds.
pub(crate) fn command_timeout(caps: &DeviceCaps) -> u32 {
    let timeout = COMMAND_PATIENCE.saturating_mul(caps.command_timeout);
    let least = caps.command_timeout.saturating_add(LEAST_COMMAND_TIMEOUT);
    timeout
        .clamp(LEAST_COMMAND_TIMEOUT, MOST_COMMAND)
        .max(timeout.min(least))
}

/// Numbers from `first` on, `count` of them, if all are in `room`.
fn numbers(first: u32, count: u32, room: Range<u32>) -> Option<Range<u32>> {
    let end = first.checked_add(count)?;
    (room.start <= first && end <= room.end).then_some(first..end)
}

/// The numbers of queue pairs that can be given out.
pub(crate) fn qpns(caps: &DeviceCaps) -> Range<u32> {
    caps.qp_first..caps.qp_first + caps.qp_count
}

/// The numbers of completion queues.
pub(crate) fn cqns(caps: &DeviceCaps) -> Range<u32> {
    caps.cq_first..caps.cq_first + caps.cq_count
}

/// The numbers of shared receive queues.
pub(crate) fn srqns(caps: &DeviceCaps) -> Range<u32> {
    caps.srq_first..caps.srq_first + caps.srq_count
}

/// The indices of tags.
pub(crate) fn tags(caps: &DeviceCaps) -> Range<u32> {
    caps.tag_first..caps.tag_first + caps.tag_count
}

/// The bits of the device's clock, as a mask.
pub(crate) fn clock_mask(caps: &DeviceCaps) -> u64 {
    match caps.clock_bits {
        0 => 0,
        bits => u64::MAX >> (64 - u32::from(bits.min(64))),
    }
}

/// Why what a device says cannot be, if it cannot: whatever else it says is not to be relied on. More
/// than this driver knows what to do with is no reason.
fn check(said: &DeviceCaps, offered: u64) -> Result<(), &'static str> {
    if said.features != offered {
        return Err("features are not those that the registers say");
    }
    if said.page_sizes & !PAGE_SIZES != 0 {
        return Err("memory has pages of sizes that there are not");
    }
    if said.max_sge == 0 || said.max_message == 0 {
        return Err("work requests have no data, or messages no length");
    }
    if !(LOG_MTU.0..=LOG_MTU.1).contains(&said.max_log_mtu) {
        return Err("the longest packet has none of the lengths that there are");
    }
    let bits = if said.clock_khz == 0 {
        0..=0
    } else {
        CLOCK_BITS
    };
    if !bits.contains(&said.clock_bits) {
        return Err("the bits of the clock make no sense");
    }
    if !DMA_BITS.contains(&said.dma_bits) {
        return Err("DMA addresses have fewer than 32 bits, or more than 64");
    }
    if said.eq_max_log_entries < abi::EQ_MIN_LOG_ENTRIES {
        return Err("event queues have no room");
    }
    if said.handlers > u32::from(said.max_eq.saturating_sub(abi::EQ_FIRST_HANDLER)) {
        return Err("there are more handlers than event queues for them");
    }
    if said.command_timeout == 0 || said.command_timeout > MOST_COMMAND {
        return Err("commands take no time, or too long");
    }
    Ok(())
}

/// What is used of the Ethernet part of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EthernetCaps {
    /// Most channels.
    pub(crate) channels: u16,
    /// Largest MTU.
    pub(crate) max_mtu: u16,
    /// Base-2 logarithms of the most blocks of a transmit ring and entries of a receive ring.
    pub(crate) transmit_max_log_blocks: u8,
    pub(crate) receive_max_log_entries: u8,
    /// Most pieces of a transmit request, and bytes.
    pub(crate) max_transmit_pieces: u8,
    pub(crate) max_transmit_bytes: u32,
    /// Counters, of those that there are names for.
    pub(crate) counters: usize,
    multicast: u32,
    /// Base-2 logarithm of the entries of the redirection table, where there is one.
    table_log_entries: Option<u8>,
}

impl EthernetCaps {
    /// Those of a device with so many channels, that MTU, and rings of those sizes, for tests.
    #[cfg(CONFIG_KUNIT = "y")]
    pub(crate) fn of(channels: u16, max_mtu: u16, rings: (u8, u8)) -> Self {
        Self {
            channels,
            max_mtu,
            transmit_max_log_blocks: rings.0,
            receive_max_log_entries: rings.1,
            max_transmit_pieces: 18,
            max_transmit_bytes: 65536,
            counters: 0,
            multicast: 16,
            table_log_entries: Some(4),
        }
    }

    /// Entries of the redirection table, none where there is none.
    pub(crate) fn table_entries(&self) -> usize {
        self.table_log_entries.map_or(0, |log| 1 << log)
    }

    /// Addresses that the filter of groups has room for.
    pub(crate) fn multicast_addresses(&self) -> usize {
        (self.multicast as usize).min(abi::MULTICAST_ADDRESSES)
    }
}

/// Base-2 logarithms of the sizes of rings of channels that any device has.
const LEAST_RING: u8 = 4;
/// MTU that any device has.
const LEAST_MTU: u16 = 1500;
/// Base-2 logarithm of the most entries of the redirection table: the command to set them has no more.
const MOST_TABLE_LOG_ENTRIES: u8 = 12;
/// Header and tag of a frame.
const FRAME_HEADER: u32 = 18;

/// What is used of the Ethernet part of a device with which these `features` were agreed on, if they have one; or why it
/// cannot be used.
pub(crate) fn ethernet(
    caps: &DeviceCaps,
    features: u64,
) -> Result<Option<EthernetCaps>, &'static str> {
    if features & abi::FEATURE_ETHERNET == 0 {
        return Ok(None);
    }
    if caps.max_channels == 0 || caps.max_channels > abi::MAX_CHANNELS {
        return Err("there are no channels, or too many");
    }
    if caps.max_mtu < LEAST_MTU {
        return Err("frames are shorter than those of Ethernet");
    }
    let transmit = LEAST_RING..=abi::TRANSMIT_MAX_LOG_BLOCKS;
    let receive = LEAST_RING..=abi::RECEIVE_MAX_LOG_ENTRIES;
    if !transmit.contains(&caps.transmit_max_log_blocks)
        || !receive.contains(&caps.receive_max_log_entries)
    {
        return Err("rings of channels have none of the sizes that there are");
    }
    let pieces = 1..=abi::TRANSMIT_MAX_PIECES as u8;
    if !pieces.contains(&caps.max_transmit_pieces)
        || caps.max_transmit_bytes < u32::from(caps.max_mtu) + FRAME_HEADER
    {
        return Err("frames to be sent have no pieces, too many, or too few bytes");
    }
    let has_table = features & abi::FEATURE_REDIRECTION != 0;
    if has_table && caps.redirection_log_entries > MOST_TABLE_LOG_ENTRIES {
        return Err("the redirection table has too many entries");
    }
    Ok(Some(EthernetCaps {
        channels: caps.max_channels,
        max_mtu: caps.max_mtu,
        transmit_max_log_blocks: caps.transmit_max_log_blocks,
        receive_max_log_entries: caps.receive_max_log_entries,
        max_transmit_pieces: caps.max_transmit_pieces,
        max_transmit_bytes: caps.max_transmit_bytes,
        counters: (caps.channel_counters as usize).min(abi::CHANNEL_COUNTER_NAMES.len()),
        multicast: caps.max_multicast_addresses,
        table_log_entries: has_table.then_some(caps.redirection_log_entries),
    }))
}

/// What is used of a device that offers features `offered` in its registers; or why a driver
/// can do nothing with it.
///
/// The ends of the ranges of numbers fit in 24 bits, and one.
pub(crate) fn bounded(said: &DeviceCaps, offered: u64) -> Result<DeviceCaps, &'static str> {
    let caps = within(said, offered)?;
    if caps.qp_count == 0 || caps.cq_count == 0 || caps.tag_count == 0 {
        return Err("there are no queue pairs, completion queues or tags");
    }
    if caps.max_gid == 0 {
        return Err("there is a port without addresses");
    }
    if caps.transports & (1 << Transport::RoceV2.number()) == 0 {
        return Err("there is no transport that the driver knows");
    }
    Ok(caps)
}

/// The same of one that has no RDMA.
pub(crate) fn bounded_network(said: &DeviceCaps, offered: u64) -> Result<DeviceCaps, &'static str> {
    let caps = within(said, offered)?;
    match ethernet(&caps, caps.features)? {
        Some(_) => Ok(caps),
        None => Err("there is neither RDMA nor Ethernet"),
    }
}

/// What is used of any device that can be used.
fn within(said: &DeviceCaps, offered: u64) -> Result<DeviceCaps, &'static str> {
    check(said, offered)?;
    let qpns = numbers(said.qp_first, said.qp_count, FIRST_QPN..QUEUES_END)
        .ok_or("numbers of queue pairs make no sense")?;
    numbers(said.cq_first, said.cq_count, 0..QUEUES_END)
        .ok_or("numbers of completion queues make no sense")?;
    numbers(said.srq_first, said.srq_count, 0..QUEUES_END)
        .ok_or("numbers of shared receive queues make no sense")?;
    // Index 0 is that of the tag of all memory.
    numbers(said.tag_first, said.tag_count, 1..TAGS_END).ok_or("indices of tags make no sense")?;
    // What there is none of is not offered.
    let missing = [
        (said.srq_count, abi::FEATURE_SRQ),
        (said.max_fast_register_pages, abi::FEATURE_FAST_REGISTER),
        (said.max_multicast, abi::FEATURE_MULTICAST),
        (said.max_xrcd.saturating_sub(1), abi::FEATURE_XRC),
        (said.max_flows, abi::FEATURE_RAW_PACKETS),
        (said.max_receive_tables.into(), abi::FEATURE_RECEIVE_TABLES),
    ];
    let missing = missing.iter().filter(|(count, _)| *count == 0);
    let missing = missing.fold(0, |features, (_, feature)| features | feature);
    let caps = DeviceCaps {
        qp_count: qpns.end.min(QPNS_END).saturating_sub(qpns.start),
        max_xrcd: said.max_xrcd.min(abi::QUEUE_NUMBER_MASK),
        max_gid: said.max_gid.min(MOST_GIDS),
        sq_max_log_blocks: said.sq_max_log_blocks.min(abi::SQ_MAX_LOG_BLOCKS),
        rq_max_log_entries: said.rq_max_log_entries.min(abi::RQ_MAX_LOG_ENTRIES),
        cq_max_log_entries: said.cq_max_log_entries.min(abi::CQ_MAX_LOG_ENTRIES),
        eq_max_log_entries: said.eq_max_log_entries.min(abi::EQ_MAX_LOG_ENTRIES),
        max_sge: said.max_sge.min(abi::MAX_SGE as u8),
        max_inline: said.max_inline.min(abi::MAX_INLINE as u32),
        max_message: said.max_message.min(abi::MAX_MESSAGE.into()),
        features: abi::complete_features(said.features & !missing),
        max_multicast: said.max_multicast.min(MOST_OBJECTS),
        max_fast_register_pages: said.max_fast_register_pages.min(MOST_FAST_REGISTER_PAGES),
        max_flows: said.max_flows.min(MOST_FLOWS),
        receive_table_log_entries: said
            .receive_table_log_entries
            .min(abi::RECEIVE_TABLE_ENTRIES.ilog2() as u8),
        counters: said.counters.min(abi::COUNTER_NAMES.len() as u32),
        ..*said
    };
    if caps.ports == 0 {
        return Err("there is no port");
    }
    // The memory of processes comes in such pages, or in multiples of them.
    if caps.page_sizes & (1 << abi::PAGE_SHIFT_MIN) == 0 {
        return Err("memory cannot be told of in pages of 4 KiB");
    }
    if caps.handlers == 0 || caps.max_eq <= abi::EQ_FIRST_HANDLER {
        return Err("there is no event queue for completions");
    }
    Ok(caps)
}

#[kunit_tests(ferrite_caps)]
mod tests {
    use super::*;
    use crate::abi::Plain;

    /// The least that a device can be used with.
    fn usable() -> DeviceCaps {
        DeviceCaps {
            qp_first: 2,
            qp_count: 1,
            cq_count: 1,
            tag_first: 1,
            tag_count: 1,
            max_eq: 3,
            handlers: 1,
            max_gid: 1,
            ports: 1,
            transports: 1 << 1,
            dma_bits: 32,
            page_sizes: 1 << abi::PAGE_SHIFT_MIN,
            max_sge: 1,
            max_message: 1,
            max_log_mtu: 8,
            eq_max_log_entries: abi::EQ_MIN_LOG_ENTRIES,
            command_timeout: 1,
            ..DeviceCaps::zeroed()
        }
    }

    /// What becomes of the least with a change.
    fn changed(change: impl FnOnce(&mut DeviceCaps)) -> Option<DeviceCaps> {
        let mut caps = usable();
        change(&mut caps);
        bounded(&caps, caps.features).ok()
    }

    #[test]
    fn what_a_device_says_is_taken_within_bounds() -> Result {
        let mut wild = DeviceCaps::zeroed();
        wild.as_bytes_mut().fill(0xff);
        // Numbers that make no sense are not brought to any.
        assert!(bounded(&wild, u64::MAX).is_err());
        let end = 1 << 24;
        let wild = DeviceCaps {
            qp_first: 2,
            qp_count: end - 2,
            cq_first: 0,
            cq_count: end,
            srq_first: 7,
            srq_count: end - 7,
            tag_first: 1,
            tag_count: end - 1,
            page_sizes: 0x7fff_f000,
            max_log_mtu: 12,
            clock_bits: 64,
            dma_bits: 64,
            max_eq: u16::MAX,
            handlers: u32::from(u16::MAX) - 2,
            command_timeout: 120_000,
            ..wild
        };
        let caps = bounded(&wild, u64::MAX).map_err(|_| EINVAL)?;
        assert_eq!(caps.sq_max_log_blocks, abi::SQ_MAX_LOG_BLOCKS);
        assert_eq!(caps.rq_max_log_entries, abi::RQ_MAX_LOG_ENTRIES);
        assert_eq!(caps.cq_max_log_entries, abi::CQ_MAX_LOG_ENTRIES);
        assert_eq!(caps.max_sge as usize, abi::MAX_SGE);
        assert_eq!(caps.max_inline as usize, abi::MAX_INLINE);
        assert_eq!(caps.eq_max_log_entries, abi::EQ_MAX_LOG_ENTRIES);
        assert_eq!(caps.max_message, abi::MAX_MESSAGE.into());
        assert_eq!(caps.max_gid, MOST_GIDS);
        assert_eq!(caps.max_fast_register_pages, 1 << 16);
        assert_eq!(caps.counters as usize, abi::COUNTER_NAMES.len());
        assert_eq!(caps.max_xrcd, 0xff_ffff);
        assert_eq!(caps.max_flows, MOST_FLOWS);
        let most = abi::RECEIVE_TABLE_ENTRIES;
        assert_eq!(1 << caps.receive_table_log_entries, most);
        assert_eq!(
            (cqns(&caps), srqns(&caps), tags(&caps)),
            (0..end, 7..end, 1..end)
        );
        // The last one is no queue pair.
        assert_eq!(qpns(&caps), 2..0xff_ffff);
        // What is within bounds is taken as it is.
        assert!(bounded(&caps, caps.features) == Ok(caps));
        Ok(())
    }

    #[test]
    fn a_device_that_nothing_can_be_done_with_is_refused() {
        assert!(changed(|_| {}).is_some());
        let refused: [fn(&mut DeviceCaps); 12] = [
            |caps| caps.qp_count = 0,
            |caps| caps.cq_count = 0,
            |caps| caps.tag_count = 0,
            |caps| caps.ports = 0,
            |caps| caps.max_gid = 0,
            |caps| caps.transports = 0,
            |caps| caps.transports = !(1 << 1),
            |caps| caps.page_sizes = 1 << 21,
            |caps| caps.handlers = 0,
            |caps| caps.max_eq = 2,
            |caps| {
                // All that there is stands for a multicast group.
                caps.qp_first = 0xff_ffff;
                caps.qp_count = 1;
            },
            |caps| caps.as_bytes_mut().fill(0),
        ];
        for change in refused {
            assert!(changed(change).is_none());
        }
    }

    #[test]
    fn what_a_device_says_of_ethernet_is_taken_within_bounds() {
        let both = abi::FEATURE_ETHERNET | abi::FEATURE_REDIRECTION;
        let with = |change: fn(&mut DeviceCaps)| {
            let mut caps = DeviceCaps {
                features: both,
                max_channels: 4,
                max_mtu: 9000,
                transmit_max_log_blocks: 12,
                receive_max_log_entries: 12,
                max_transmit_pieces: 18,
                redirection_log_entries: 8,
                max_transmit_bytes: 65536,
                channel_counters: 100,
                max_multicast_addresses: 100,
                ..usable()
            };
            change(&mut caps);
            caps
        };
        let good = ethernet(&with(|_| {}), both);
        assert!(
            good.is_ok_and(|caps| caps.is_some_and(|caps| caps.channels == 4
                && caps.table_entries() == 256
                && caps.multicast_addresses() == abi::MULTICAST_ADDRESSES
                && caps.counters == abi::CHANNEL_COUNTER_NAMES.len()))
        );
        // A table only where there is redirection, and nothing without the feature.
        let without = ethernet(&with(|_| {}), abi::FEATURE_ETHERNET);
        assert!(without.is_ok_and(|caps| caps.is_some_and(|caps| caps.table_entries() == 0)));
        assert_eq!(ethernet(&usable(), 0), Ok(None));
        let refused: [fn(&mut DeviceCaps); 12] = [
            |caps| caps.max_channels = 0,
            |caps| caps.max_channels = 513,
            |caps| caps.max_mtu = 1499,
            |caps| caps.transmit_max_log_blocks = 3,
            |caps| caps.transmit_max_log_blocks = 16,
            |caps| caps.receive_max_log_entries = 3,
            |caps| caps.receive_max_log_entries = 16,
            |caps| caps.max_transmit_pieces = 0,
            |caps| caps.max_transmit_pieces = 19,
            |caps| caps.max_transmit_bytes = 9017,
            |caps| caps.redirection_log_entries = 13,
            |caps| caps.redirection_log_entries = 255,
        ];
        for change in refused {
            assert!(ethernet(&with(change), both).is_err());
        }
        // A function without RDMA has nothing of it.
        let network = |features| DeviceCaps {
            qp_count: 0,
            cq_count: 0,
            tag_count: 0,
            max_gid: 0,
            transports: 0,
            features,
            ..with(|_| {})
        };
        assert!(bounded_network(&network(both), both).is_ok());
        assert!(bounded(&network(both), both).is_err());
        assert!(bounded_network(&network(0), 0).is_err());
    }

    #[test]
    fn a_device_that_says_what_cannot_be_is_refused() {
        let refused: [fn(&mut DeviceCaps); 20] = [
            |caps| caps.page_sizes |= 1 << 11,
            |caps| caps.page_sizes |= 1 << 31,
            |caps| caps.page_sizes |= 1 << 63,
            |caps| caps.max_sge = 0,
            |caps| caps.max_message = 0,
            |caps| caps.max_log_mtu = 0,
            |caps| caps.max_log_mtu = 7,
            |caps| caps.max_log_mtu = 13,
            |caps| caps.eq_max_log_entries = abi::EQ_MIN_LOG_ENTRIES - 1,
            |caps| caps.handlers = 2,
            |caps| caps.handlers = u32::MAX,
            |caps| caps.command_timeout = 0,
            |caps| caps.command_timeout = 120_001,
            |caps| caps.dma_bits = 31,
            |caps| caps.dma_bits = 65,
            |caps| caps.clock_bits = 64,
            |caps| caps.clock_khz = 1000,
            |caps| (caps.clock_khz, caps.clock_bits) = (1000, 1),
            |caps| (caps.clock_khz, caps.clock_bits) = (1000, 31),
            |caps| (caps.clock_khz, caps.clock_bits) = (1000, 65),
        ];
        for change in refused {
            assert!(changed(change).is_none());
        }
        // What the registers offer and what this says are one thing.
        let caps = usable();
        assert!(bounded(&caps, abi::FEATURE_SRQ).is_err());
        let more = changed(|caps| caps.handlers = 5);
        assert!(more.is_none());
        let more = changed(|caps| (caps.max_eq, caps.handlers) = (7, 5));
        assert!(more.is_some_and(|caps| caps.handlers == 5));
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let end = 1u32 << 24;
        // Queue pairs 0 and 1 are those of management.
        for (first, count) in [
            (0, 10),
            (1, 10),
            (0, 1),
            (2, end - 1),
            (end, 1),
            (end - 1, 2),
            (u32::MAX, 1),
            (u32::MAX, 2),
            (2, u32::MAX),
        ] {
            let set = |caps: &mut DeviceCaps| (caps.qp_first, caps.qp_count) = (first, count);
            assert!(changed(set).is_none());
        }
        for (first, count) in [
            (0, end + 1),
            (1, end),
            (end, 1),
            (u32::MAX, 2),
            (2, u32::MAX),
        ] {
            let set = |caps: &mut DeviceCaps| (caps.cq_first, caps.cq_count) = (first, count);
            assert!(changed(set).is_none());
            let set = |caps: &mut DeviceCaps| (caps.srq_first, caps.srq_count) = (first, count);
            assert!(changed(set).is_none());
            let set = |caps: &mut DeviceCaps| (caps.tag_first, caps.tag_count) = (first, count);
            assert!(changed(set).is_none());
        }
        // The tag of all memory.
        assert!(changed(|caps| caps.tag_first = 0).is_none());
        let caps = changed(|caps| {
            (caps.qp_first, caps.qp_count) = (16, 100);
            (caps.cq_first, caps.cq_count) = (end - 1, 1);
            (caps.srq_first, caps.srq_count) = (1, 5);
            (caps.tag_first, caps.tag_count) = (1000, end - 1000);
        });
        assert!(caps.is_some_and(|caps| qpns(&caps) == (16..116)
            && cqns(&caps) == (end - 1..end)
            && srqns(&caps) == (1..6)
            && tags(&caps) == (1000..end)));
    }

    #[test]
    fn what_there_is_none_of_is_not_offered() {
        let all = |caps: &mut DeviceCaps| {
            caps.features = u64::MAX;
            caps.srq_count = 1;
            caps.max_fast_register_pages = 1;
            caps.max_multicast = 1;
            caps.max_xrcd = 2;
            caps.max_flows = 1;
            caps.max_receive_tables = 1;
        };
        assert!(changed(all).is_some_and(|caps| caps.features == u64::MAX));
        let without = |take: fn(&mut DeviceCaps)| {
            let caps = changed(|caps| {
                all(caps);
                take(caps);
            });
            caps.map(|caps| !caps.features)
        };
        // Nor what needs it.
        assert_eq!(
            without(|caps| caps.srq_count = 0),
            Some(abi::FEATURE_SRQ | abi::FEATURE_XRC | abi::FEATURE_RESIZE_SRQ)
        );
        assert_eq!(
            without(|caps| caps.features &= !abi::FEATURE_UD),
            Some(abi::FEATURE_UD | abi::FEATURE_MULTICAST)
        );
        assert_eq!(
            without(|caps| caps.max_fast_register_pages = 0),
            Some(abi::FEATURE_FAST_REGISTER | abi::FEATURE_REGISTER_SEND)
        );
        assert_eq!(
            without(|caps| caps.max_multicast = 0),
            Some(abi::FEATURE_MULTICAST)
        );
        assert_eq!(without(|caps| caps.max_xrcd = 1), Some(abi::FEATURE_XRC));
        assert_eq!(
            without(|caps| caps.max_flows = 0),
            Some(abi::FEATURE_RAW_PACKETS | abi::FEATURE_RECEIVE_TABLES)
        );
        assert_eq!(
            without(|caps| caps.max_receive_tables = 0),
            Some(abi::FEATURE_RECEIVE_TABLES)
        );
    }

    #[test]
    fn a_clock_has_as_many_bits_as_the_device_says() {
        let clock = |khz, bits| {
            let caps = changed(|caps| {
                caps.clock_khz = khz;
                caps.clock_bits = bits;
            });
            caps.map(|caps| (caps.clock_khz, clock_mask(&caps)))
        };
        assert_eq!(clock(1000, 64), Some((1000, u64::MAX)));
        assert_eq!(clock(1000, 48), Some((1000, (1 << 48) - 1)));
        assert_eq!(clock(1000, 32), Some((1000, 0xffff_ffff)));
        assert_eq!(clock(0, 0), Some((0, 0)));
    }

    #[test]
    fn a_command_is_waited_for_several_times_as_long_as_the_device_says() {
        let timeout = |said| {
            let caps = changed(|caps| caps.command_timeout = said);
            caps.map(|caps| command_timeout(&caps))
        };
        for (said, taken) in [
            (1, 30_000),
            (10_000, 30_000),
            (20_000, 60_000),
            (60_000, 120_000),
            (100_000, 130_000),
            (120_000, 150_000),
        ] {
            assert_eq!(timeout(said), Some(taken));
        }
    }
}
