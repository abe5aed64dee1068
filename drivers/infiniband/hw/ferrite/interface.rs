// SPDX-License-Identifier: GPL-2.0

//! The network interface of a function that has one (chapter 20 of the specification).
//!
//! An interface is there for as long as the driver is bound; a device is behind it from one reset to the next
//! ([`Attachment`]). What users have set of it, addresses and routes included, so outlives a device that fails and begins
//! anew. Meanwhile it has no carrier.
//!
//! A channel is one queue of the interface, with one NAPI, and tells of itself by the event queue of one completion
//! handler: its vector and its processor. Channels are made when the interface is brought up, and destroyed when it is
//! brought down, detached, or changed in a way that its queues must not see. What the device writes is believed only as far
//! as it makes sense ([`transmit`], [`receive`]).
//!
//! Locks, the first one first: RTNL, which all is changed under that users can change; `behind`, `settings` and `open`; the
//! receive side of a channel, which NAPI polls; the transmit side.

mod attachment;
mod channels;
mod counters;
mod ethtool;
mod memory;
mod receive;
mod redirection;
mod repairs;
mod settings;
mod traffic;
mod transmit;

pub(crate) use attachment::Attachment;
pub(crate) use channels::ChannelListener;

use crate::{
    abi::CHANNEL_COUNTER_NAMES,
    bars::Identity,
    caps::EthernetCaps,
    handler::Handlers,
    hardware::Hardware,
    kernel_ext::{
        ratelimit::RateLimit,
        workqueue::OwnedQueue, //
    },
    net::{
        netdev_warn,
        Config,
        Device,
        Driver,
        MacAddress,
        Offloads,
        Ops,
        Registration,
        Rtnl,
        Skb,
        Statistics,
        StatisticsOps,
        Unregistered,
        Xmit, //
    },
};
use channels::{
    Opened,
    Queue, //
};
use kernel::{
    device,
    devres::Devres,
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};
use redirection::Redirection;
use repairs::Repairs;
use settings::Settings;
use transmit::MOST_BLOCKS;

/// The MTU that an interface begins with, if the device has it.
const MTU: u16 = 1500;
/// Base-2 logarithms of the blocks of a transmit ring and of the entries of a receive ring to begin with.
const TRANSMIT_LOG_BLOCKS: u8 = 9;
const RECEIVE_LOG_ENTRIES: u8 = 9;
/// And of the fewest: a ring has room for some of the longest requests.
const LEAST_TRANSMIT_LOG_BLOCKS: u8 = 4;
const LEAST_RECEIVE_LOG_ENTRIES: u8 = 4;
const _: () = assert!(1 << LEAST_TRANSMIT_LOG_BLOCKS >= 3 * MOST_BLOCKS);

/// The most channels that are made use of.
const MOST_CHANNELS: u32 = 64;

/// What the device does for who sends and receives.
const OFFLOADS: Offloads = Offloads::SCATTER_GATHER
    .with(Offloads::CHECKSUM)
    .with(Offloads::TCP_SEGMENTATION)
    .with(Offloads::VLAN_INSERT)
    .with(Offloads::VLAN_STRIP)
    .with(Offloads::RX_CHECKSUM);

/// The device behind an interface.
#[derive(Clone)]
pub(crate) struct Behind {
    pub(crate) hw: Arc<Hardware>,
    pub(crate) handlers: Arc<Handlers>,
    pub(crate) caps: EthernetCaps,
    pub(crate) identity: Identity,
}

impl Behind {
    /// How many channels it is good for: one for each completion handler.
    fn channels(&self) -> u16 {
        let most = self.handlers.count().min(MOST_CHANNELS) as u16;
        most.min(self.caps.channels)
    }

    /// Has interrupts of so many channels put off for so long, and no longer than until there are so many frames; where the
    /// device refuses that of one, those of all are put off as they were. Sleeps.
    fn moderate(&self, channels: u16, microseconds: u16, frames: u16) -> Result {
        let handlers = &self.handlers;
        change_all_or_none(
            channels,
            |handler| {
                let before = handlers.moderation(handler)?;
                handlers.set_moderation(handler, microseconds, frames)?;
                Ok(before)
            },
            |handler, (microseconds, frames)| {
                // One that took the others takes what it had, or does nothing any more.
                let _ = handlers.set_moderation(handler, microseconds, frames);
            },
        )
    }
}

/// Changes all of `count`, by `change`, which gives what was before; where that fails what was before is put `back`.
fn change_all_or_none<T: Copy>(
    count: u16,
    mut change: impl FnMut(u16) -> Result<T>,
    mut back: impl FnMut(u16, T),
) -> Result {
    let mut before = [None; MOST_CHANNELS as usize];
    for number in 0..count {
        let place = before.get_mut(usize::from(number)).ok_or(EINVAL)?;
        match change(number) {
            Ok(was) => *place = Some(was),
            Err(error) => {
                for (number, was) in (0..number).zip(before.iter().flatten()) {
                    back(number, *was);
                }
                return Err(error);
            }
        }
    }
    Ok(())
}

/// The driver's data of an interface.
#[pin_data]
pub(crate) struct Interface {
    /// Before what is done on it.
    work: OwnedQueue,
    repairs: Arc<Repairs>,
    #[pin]
    behind: Mutex<Option<Behind>>,
    #[pin]
    settings: Mutex<Settings>,
    /// What the device knows while the interface is up.
    #[pin]
    open: Mutex<Option<Opened>>,
    /// Of what is printed as often as the device likes.
    #[pin]
    prints: RateLimit,
    /// Whether it is to have channels and they could not be made.
    lacks_channels: Atomic<bool>,
    /// Bytes of the longest frame that the device cuts into segments. Changed with RTNL held.
    most_to_segment: Atomic<u32>,
    /// What the device had counted when it was asked last.
    #[pin]
    counted: Mutex<[u64; CHANNEL_COUNTER_NAMES.len()]>,
}

impl Interface {
    fn new(behind: Behind) -> impl PinInit<Self, Error> {
        let caps = behind.caps;
        let channels = behind.channels();
        let mac = behind.identity.mac;
        try_pin_init!(Self {
            work: OwnedQueue::for_long_work(c"ferrite_net")?,
            repairs: Repairs::new()?,
            settings <- {
                let settings = Settings {
                    mac: MacAddress(mac),
                    mtu: MTU.min(caps.max_mtu),
                    promiscuous: false,
                    all_multicast: false,
                    groups: KVec::new(),
                    strip_vlan: true,
                    transmit_log_blocks: TRANSMIT_LOG_BLOCKS.min(caps.transmit_max_log_blocks),
                    receive_log_entries: RECEIVE_LOG_ENTRIES.min(caps.receive_max_log_entries),
                    channels,
                    coalescing: None,
                    redirection: Redirection::new(caps.table_entries(), channels)?,
                };
                new_mutex!(settings, "ferrite_net_settings")
            },
            behind <- new_mutex!(Some(behind), "ferrite_net_behind"),
            open <- new_mutex!(None, "ferrite_net_open"),
            prints <- RateLimit::new(),
            lacks_channels: Atomic::new(false),
            most_to_segment: Atomic::new(caps.max_transmit_bytes),
            counted <- new_mutex!([0; CHANNEL_COUNTER_NAMES.len()], "ferrite_net_counted"),
        })
    }

    /// The device behind it, `ENODEV` where there is none. It does not go while RTNL is held.
    fn behind(&self, _rtnl: &Rtnl) -> Result<Behind> {
        self.behind.lock().clone().ok_or(ENODEV)
    }

    /// The same for who gives it commands: `ENODEV` for one that failed, which who gives it one would wait for to be
    /// stopped, and everybody for RTNL.
    fn working(&self, rtnl: &Rtnl) -> Result<Behind> {
        let behind = self.behind(rtnl)?;
        if behind.hw.is_dead() {
            Err(ENODEV)
        } else {
            Ok(behind)
        }
    }

    /// The one behind it for who does not hold RTNL, and so does not keep what is behind from going.
    fn hardware(&self) -> Option<Arc<Hardware>> {
        let behind = self.behind.lock();
        behind.as_ref().map(|behind| behind.hw.clone())
    }

    /// Whether it may have a carrier, as far as that is not the device's to say: what is sent without channels is lost.
    pub(crate) fn may_have_carrier(&self) -> bool {
        !self.lacks_channels.load(Relaxed)
    }

    /// How many channels there are while it is up.
    fn open_channels(&self) -> Option<u16> {
        self.open.lock().as_ref().map(|opened| opened.channels)
    }

    /// Tells the device what the interface receives. Sleeps.
    fn tell(&self, behind: &Behind, settings: &Settings, up: bool) -> Result {
        let groups = behind.caps.multicast_addresses();
        behind.hw.execute(&settings.interface(up, groups))
    }

    /// Tells the device of a change, by `change` of what it was told before, which stays where the device refuses it.
    /// Sleeps.
    fn change<R>(
        &self,
        rtnl: &Rtnl,
        change: impl FnOnce(&mut Settings) -> R,
        back: impl FnOnce(&mut Settings, R),
    ) -> Result {
        let behind = self.working(rtnl)?;
        let up = self.open_channels().is_some();
        let mut settings = self.settings.lock();
        let before = change(&mut settings);
        let told = self.tell(&behind, &settings, up);
        if told.is_err() {
            back(&mut settings, before);
        }
        told
    }

    /// Tells the device how frames are spread. Sleeps.
    fn tell_redirection(&self, behind: &Behind, settings: &Settings, channels: u16) -> Result {
        settings.redirection.tell(
            channels,
            behind.caps.table_entries(),
            |table| behind.hw.execute(table),
            |redirection| behind.hw.execute(redirection),
        )
    }
}

impl StatisticsOps for Interface {
    fn statistics(dev: &Device<Self>) -> Statistics {
        let mut all = Statistics::default();
        for napi in dev.napis() {
            let counters = &napi.queue().counters;
            all.rx_packets += counters.rx_packets.get();
            all.rx_bytes += counters.rx_bytes.get();
            all.multicast += counters.rx_multicast.get();
            all.rx_dropped += counters.rx_dropped.get();
            all.tx_packets += counters.tx_packets.get();
            all.tx_bytes += counters.tx_bytes.get();
            all.tx_dropped += counters.tx_dropped.get();
            all.tx_errors += counters.tx_errors.get();
        }
        all
    }
}

impl Driver for Interface {
    const OPS: Ops<Self> = Ops::new()
        .with_napi()
        .with_statistics()
        .with_mac()
        .with_mtu()
        .with_rx_mode()
        .with_offloads()
        .with_segments()
        .with_timeout()
        .with_ethtool()
        .with_rings()
        .with_coalescing()
        .with_channels()
        .with_rss();
    type Queue = Pin<KBox<Queue>>;

    fn open(dev: &Device<Self>, rtnl: &Rtnl) -> Result {
        let behind = dev.working(rtnl)?;
        let made = dev.make_channels(&behind).inspect_err(|error| {
            dev.close();
            netdev_warn!(dev, "channels cannot be made: {:?}\n", error);
        });
        dev.lacks_channels.store(made.is_err(), Relaxed);
        behind.hw.tell_carrier();
        made
    }

    fn stop(dev: &Device<Self>, rtnl: &Rtnl) {
        if let Ok(behind) = dev.working(rtnl) {
            let settings = dev.settings.lock();
            // One that does not answer is stopped, and receives nothing.
            let _ = dev.tell(&behind, &settings, false);
        }
        dev.close();
    }

    fn start_xmit(dev: &Device<Self>, skb: Skb) -> Xmit {
        traffic::send(dev, skb)
    }
}

/// Makes the interface of a function, with a device behind it.
pub(crate) fn register(
    parent: &device::Device<device::Bound>,
    behind: &Behind,
) -> Result<Devres<Registration<Interface>>> {
    let channels = behind.channels().max(1);
    let mut queues = KVec::with_capacity(channels.into(), GFP_KERNEL)?;
    for number in 0..channels {
        queues.push(Queue::new(number)?, GFP_KERNEL)?;
    }
    let offloads = match behind.caps.table_entries() {
        0 => OFFLOADS,
        _ => OFFLOADS.with(Offloads::RX_HASH),
    };
    let config = Config {
        name: c"eth%d",
        mac: Some(MacAddress(behind.identity.mac)),
        mtu: MTU.min(behind.caps.max_mtu).into(),
        max_mtu: behind.caps.max_mtu.into(),
        tx_queues: channels,
        rx_queues: channels,
        offloads,
        most_to_segment: behind.caps.max_transmit_bytes,
        parent: Some(parent),
    };
    let made = Unregistered::new(&config, queues, Interface::new(behind.clone()))?;
    made.register_managed(parent)
}

#[kunit_tests(ferrite_interface)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_changed_of_all_is_changed_of_none() {
        let put = |numbers: &mut [u16; 4], refused: u16| {
            let numbers = core::cell::RefCell::new(numbers);
            change_all_or_none(
                4,
                |number| {
                    if number == refused {
                        return Err(EIO);
                    }
                    Ok(core::mem::replace(
                        &mut numbers.borrow_mut()[usize::from(number)],
                        9,
                    ))
                },
                |number, before| numbers.borrow_mut()[usize::from(number)] = before,
            )
        };
        let mut numbers = [1, 2, 3, 4];
        for refused in 0..4 {
            assert_eq!(put(&mut numbers, refused), Err(EIO));
            assert_eq!(numbers, [1, 2, 3, 4]);
        }
        assert_eq!(put(&mut numbers, 4), Ok(()));
        assert_eq!(numbers, [9; 4]);
    }
}
