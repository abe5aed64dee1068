// SPDX-License-Identifier: GPL-2.0

//! What `ethtool` shows and changes of the interface.

use super::{
    counters::ChannelCounters,
    Interface,
    LEAST_RECEIVE_LOG_ENTRIES,
    LEAST_TRANSMIT_LOG_BLOCKS, //
};
use crate::{
    abi::{
        self,
        QueryChannelCounters,
        CHANNEL_COUNTER_NAMES, //
    },
    dma_types::DeviceChannelCounters,
    net::{
        netdev_warn,
        ChannelsOps,
        CoalesceOps,
        Coalescing,
        Device,
        DriverInfo,
        EthtoolOps,
        LinkSettings,
        RingOps,
        RingSizes,
        RssOps,
        Rtnl,
        StatisticsNames, //
    },
    port,
};
use kernel::{
    prelude::*,
    str::CString, //
};

/// Mbit/s that the link is said to have. It has no speed of its own.
const SPEED: u32 = 100_000;

impl Device<Interface> {
    /// What the device has counted of the interface, in the order of [`CHANNEL_COUNTER_NAMES`]; where the device has no
    /// time `EAGAIN`, as anybody may ask, and RTNL is held meanwhile. Sleeps.
    fn device_counters(&self, rtnl: &Rtnl) -> Result<DeviceChannelCounters> {
        let behind = self.working(rtnl)?;
        let request = QueryChannelCounters {
            channel: abi::CHANNEL_NONE,
            port: port::DEVICE_PORT,
            reserved: [0; 5],
        };
        let length = behind.caps.counters * size_of::<u64>();
        behind.hw.query_start_now(&request, length)
    }
}

impl EthtoolOps for Interface {
    const NAME: &'static str = "ferrite";

    fn driver_info(dev: &Device<Self>, rtnl: &Rtnl) -> DriverInfo {
        let version = dev.behind(rtnl).ok().map(|behind| {
            let (major, minor, patch) = behind.identity.firmware;
            [major, minor.into(), patch.into()]
        });
        DriverInfo {
            version,
            ..DriverInfo::default()
        }
    }

    fn ethtool_count(dev: &Device<Self>, _rtnl: &Rtnl) -> usize {
        CHANNEL_COUNTER_NAMES.len() + dev.napis().len() * ChannelCounters::NAMES.len()
    }

    fn ethtool_names(dev: &Device<Self>, _rtnl: &Rtnl, names: &mut StatisticsNames<'_>) {
        for name in CHANNEL_COUNTER_NAMES {
            names.push(&["device_", name]);
        }
        for number in 0..dev.napis().len() {
            let channel = CString::try_from_fmt(fmt!("channel{number}_")).ok();
            let channel = channel.as_ref().and_then(|text| text.to_str().ok());
            for name in ChannelCounters::NAMES {
                names.push(&[channel.unwrap_or(""), name]);
            }
        }
    }

    fn ethtool_statistics(dev: &Device<Self>, rtnl: &Rtnl, values: &mut [u64]) {
        let Some((of_device, rest)) = values.split_at_mut_checked(CHANNEL_COUNTER_NAMES.len())
        else {
            return;
        };
        let mut last = dev.counted.lock();
        if let Ok(counted) = dev.device_counters(rtnl) {
            *last = counted.0;
        }
        // Else as it was heard of last.
        of_device.copy_from_slice(&*last);
        drop(last);
        let channels = rest.chunks_exact_mut(ChannelCounters::NAMES.len());
        for (values, napi) in channels.zip(dev.napis()) {
            values.copy_from_slice(&napi.queue().counters.values());
        }
    }

    fn link_settings(dev: &Device<Self>, _rtnl: &Rtnl) -> Result<LinkSettings> {
        Ok(LinkSettings {
            speed: dev.has_carrier().then_some(SPEED),
            full_duplex: dev.has_carrier(),
        })
    }
}

/// The ring that somebody gets who asks for so many entries.
fn log_entries(asked: u32, least: u8, most: u8) -> Result<u8> {
    let log = asked.checked_next_power_of_two().ok_or(EINVAL)?;
    let log = log.trailing_zeros() as u8;
    if log > most {
        return Err(EINVAL);
    }
    Ok(log.max(least))
}

impl RingOps for Interface {
    fn ring_sizes(dev: &Device<Self>, rtnl: &Rtnl) -> (RingSizes, RingSizes) {
        let settings = dev.settings.lock();
        let now = RingSizes {
            rx: 1 << settings.receive_log_entries,
            tx: 1 << settings.transmit_log_blocks,
        };
        drop(settings);
        let most = dev.behind(rtnl).map_or(now, |behind| RingSizes {
            rx: 1 << behind.caps.receive_max_log_entries,
            tx: 1 << behind.caps.transmit_max_log_blocks,
        });
        (now, most)
    }

    fn set_ring_sizes(dev: &Device<Self>, rtnl: &Rtnl, sizes: RingSizes) -> Result {
        let caps = dev.behind(rtnl)?.caps;
        let transmit = log_entries(
            sizes.tx,
            LEAST_TRANSMIT_LOG_BLOCKS,
            caps.transmit_max_log_blocks,
        )?;
        let receive = log_entries(
            sizes.rx,
            LEAST_RECEIVE_LOG_ENTRIES,
            caps.receive_max_log_entries,
        )?;
        let set = |transmit, receive| {
            let mut settings = dev.settings.lock();
            let before = (settings.transmit_log_blocks, settings.receive_log_entries);
            settings.transmit_log_blocks = transmit;
            settings.receive_log_entries = receive;
            before
        };
        let before = set(transmit, receive);
        if before == (transmit, receive) {
            return Ok(());
        }
        dev.restart(rtnl, || ()).inspect_err(|_| {
            // There may be no memory for such rings, and there was for the others.
            set(before.0, before.1);
            dev.reopen_or_repair(rtnl);
        })
    }
}

impl CoalesceOps for Interface {
    fn coalescing(dev: &Device<Self>, rtnl: &Rtnl) -> Result<Coalescing> {
        let (microseconds, count) = dev.behind(rtnl)?.handlers.moderation(0)?;
        Ok(Coalescing {
            microseconds: microseconds.into(),
            frames: count.into(),
        })
    }

    fn set_coalescing(dev: &Device<Self>, rtnl: &Rtnl, coalescing: Coalescing) -> Result {
        let microseconds = u16::try_from(coalescing.microseconds).map_err(|_| EINVAL)?;
        let count = u16::try_from(coalescing.frames).map_err(|_| EINVAL)?;
        let behind = dev.working(rtnl)?;
        behind.moderate(behind.channels(), microseconds, count)?;
        dev.settings.lock().coalescing = Some((microseconds, count));
        Ok(())
    }
}

impl ChannelsOps for Interface {
    fn most_channels(dev: &Device<Self>, rtnl: &Rtnl) -> u16 {
        let there = dev.napis().len() as u16;
        dev.behind(rtnl)
            .map_or(there, |behind| behind.channels().min(there))
    }

    fn set_channels(dev: &Device<Self>, rtnl: &Rtnl, channels: u16) -> Result {
        let before = dev.tx_queues();
        if channels == before {
            return Ok(());
        }
        let set = |channels| {
            let spread = |channels| dev.settings.lock().redirection.set_channels(channels);
            let there = dev.tx_queues();
            spread(channels)?;
            dev.set_queues(rtnl, channels).inspect_err(|_| {
                // As many as there are the table can name.
                let _ = spread(there);
            })?;
            dev.settings.lock().channels = channels;
            Ok(())
        };
        match dev.restart(rtnl, || set(channels)) {
            Ok(set) => set,
            Err(error) => {
                // There may be no memory for more of them.
                if let Err(back) = set(before) {
                    netdev_warn!(dev, "has no {} channels again: {:?}\n", before, back);
                }
                dev.reopen_or_repair(rtnl);
                Err(error)
            }
        }
    }
}

impl RssOps for Interface {
    const KEY: usize = abi::REDIRECTION_KEY_SIZE;

    fn rss_entries(dev: &Device<Self>, _rtnl: &Rtnl) -> usize {
        dev.settings.lock().redirection.entries()
    }

    fn rss(dev: &Device<Self>, _rtnl: &Rtnl, table: Option<&mut [u32]>, key: Option<&mut [u8]>) {
        let settings = dev.settings.lock();
        if let Some(table) = table {
            for (to, from) in table.iter_mut().zip(settings.redirection.table()) {
                *to = (*from).into();
            }
        }
        if let Some(key) = key {
            for (to, from) in key.iter_mut().zip(settings.redirection.key()) {
                *to = *from;
            }
        }
    }

    fn set_rss(
        dev: &Device<Self>,
        rtnl: &Rtnl,
        table: Option<&[u32]>,
        key: Option<&[u8]>,
    ) -> Result {
        let behind = dev.working(rtnl)?;
        let mut settings = dev.settings.lock();
        let before = settings.redirection.try_clone()?;
        settings.redirection.set(table, key, dev.tx_queues())?;
        let Some(channels) = dev.open_channels() else {
            // It is told when the interface is brought up.
            return Ok(());
        };
        let told = dev.tell_redirection(&behind, &settings, channels);
        if told.is_err() {
            // It may have taken part of it.
            settings.redirection = before;
            let _ = dev.tell_redirection(&behind, &settings, channels);
        }
        told
    }
}

#[kunit_tests(ferrite_net_ethtool)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_the_next_power_of_two_within_what_there_is() {
        for (asked, got) in [
            (0, Ok(5)),
            (1, Ok(5)),
            (32, Ok(5)),
            (33, Ok(6)),
            (4096, Ok(12)),
            (4097, Err(EINVAL)),
            (u32::MAX, Err(EINVAL)),
        ] {
            assert_eq!(log_entries(asked, 5, 12), got);
        }
    }
}
