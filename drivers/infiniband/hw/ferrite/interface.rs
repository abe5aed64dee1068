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

mod counters;
mod ethtool;
mod memory;
mod receive;
mod redirection;
mod repairs;
mod transmit;

use crate::{
    abi,
    abi::{
        CommandOpcode,
        Plain,
        SetInterface,
        SetMulticastFilter,
        CHANNEL_COUNTER_NAMES, //
    },
    bars::Identity,
    caps::EthernetCaps,
    commands::DeviceObject,
    handler::Handlers,
    hardware::Hardware,
    kernel_ext::{
        barrier::mb,
        ratelimit::RateLimit,
        spinlock::{
            new_irq_spinlock,
            IrqSpinLock, //
        },
        workqueue::OwnedQueue,
    },
    net::{
        netdev_info,
        netdev_warn,
        without_bottom_halves,
        Config,
        Device,
        Driver,
        DropReason,
        Hold,
        MacAddress,
        MacOps,
        MtuOps,
        Napi,
        NapiOps,
        OffloadOps,
        Offloads,
        Ops,
        PollContext,
        Registration,
        Rtnl,
        RxMode,
        RxModeOps,
        SegmentOps,
        Skb,
        Statistics,
        StatisticsOps,
        TimeoutOps,
        ToSegment,
        Unregistered,
        Xmit, //
    },
    port,
};
use counters::ChannelCounters;
use kernel::{
    device,
    devres::Devres,
    new_mutex, new_spinlock,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex,
        SpinLock, //
    },
};
use memory::{
    ChannelMemory,
    Layout, //
};
use receive::{
    Arrived,
    Receiver, //
};
use redirection::Redirection;
use repairs::Repairs;
use transmit::{
    Refused,
    Transmitter,
    MOST_BLOCKS, //
};

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
/// Frames that were sent and are given back at a time.
const RECLAIMED: usize = 16;
/// How often that is done in one poll.
const RECLAIMS: usize = 64;

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

/// What users have set.
struct Settings {
    mac: MacAddress,
    mtu: u16,
    promiscuous: bool,
    all_multicast: bool,
    groups: KVec<MacAddress>,
    strip_vlan: bool,
    transmit_log_blocks: u8,
    receive_log_entries: u8,
    /// Channels that there are to be, where the device is good for so many.
    channels: u16,
    /// Microseconds that interrupts are put off, and frames that are too many for that; what the device begins with where
    /// nobody has said.
    coalescing: Option<(u16, u16)>,
    redirection: Redirection,
}

impl Settings {
    /// Has them be what a device can do with these `caps` and so many `channels`; whether they are less than they were.
    fn fit(&mut self, caps: &EthernetCaps, channels: u16) -> bool {
        let sizes = |settings: &Self| {
            (
                settings.mtu,
                settings.transmit_log_blocks,
                settings.receive_log_entries,
            )
        };
        let before = sizes(self);
        self.mtu = self.mtu.min(caps.max_mtu);
        self.transmit_log_blocks = self.transmit_log_blocks.min(caps.transmit_max_log_blocks);
        self.receive_log_entries = self.receive_log_entries.min(caps.receive_max_log_entries);
        let chosen = self.redirection.set_channels(channels);
        if chosen.is_err() {
            // It names channels that there are not.
            self.redirection.forget_choice(channels);
        }
        before != sizes(self) || chosen.is_err()
    }

    /// What the interface receives, up or down. `groups` is what the filter of the device has room for.
    fn interface(&self, up: bool, groups: usize) -> SetInterface {
        let flags = [
            (up, abi::INTERFACE_UP),
            (true, abi::INTERFACE_BROADCAST),
            (self.promiscuous, abi::INTERFACE_PROMISCUOUS),
            (
                self.all_multicast || self.groups.len() > groups,
                abi::INTERFACE_ALL_MULTICAST,
            ),
            (self.strip_vlan, abi::INTERFACE_STRIP_VLAN),
        ];
        SetInterface {
            port: port::DEVICE_PORT,
            flags: flags
                .iter()
                .filter(|(set, _)| *set)
                .fold(0, |flags, (_, flag)| flags | flag),
            mtu: self.mtu,
            mac: self.mac.0,
            default_channel: if up { 0 } else { abi::CHANNEL_NONE },
            ..SetInterface::zeroed()
        }
    }

    /// The groups that it receives, as far as there is room for them.
    fn filter(&self, groups: usize) -> SetMulticastFilter {
        let mut command = SetMulticastFilter {
            port: port::DEVICE_PORT,
            ..SetMulticastFilter::zeroed()
        };
        if self.groups.len() <= groups {
            for (to, from) in command.addresses.iter_mut().zip(&self.groups) {
                *to = from.0;
                command.count += 1;
            }
        }
        command
    }
}

/// A queue of the interface, whether it is open or not.
#[pin_data]
pub(crate) struct Queue {
    number: u16,
    #[pin]
    receiver: SpinLock<Option<Receiver>>,
    #[pin]
    transmitter: IrqSpinLock<Option<Transmitter>>,
    counters: ChannelCounters,
}

impl Queue {
    fn new(number: u16) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            number,
            receiver <- new_spinlock!(None, "ferrite_receiver"),
            transmitter <- new_irq_spinlock!(None, "ferrite_transmitter"),
            counters: ChannelCounters::new(),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Gives it others than it had, or none; those are dropped. NAPI does not run. Sleeps.
    fn put(&self, transmitter: Option<Transmitter>, receiver: Option<Receiver>) {
        let transmitter = core::mem::replace(&mut *self.transmitter.lock(), transmitter);
        let receiver = self.with_receiver(|ours| core::mem::replace(ours, receiver));
        // Without the locks, as that may sleep.
        drop((transmitter, receiver));
    }

    /// Calls `f` with what receives, by a task.
    fn with_receiver<R>(&self, f: impl FnOnce(&mut Option<Receiver>) -> R) -> R {
        without_bottom_halves(|| f(&mut self.receiver.lock()))
    }
}

/// Who is told of events of a channel.
pub(crate) struct ChannelListener {
    dev: Hold<Interface>,
    number: u16,
}

impl ChannelListener {
    fn napi(&self) -> Option<&Napi<Interface>> {
        self.dev.napis().get(usize::from(self.number))
    }

    /// Something came or was sent. Runs in the interrupt.
    #[inline]
    pub(crate) fn schedule(&self) {
        if let Some(napi) = self.napi() {
            napi.schedule();
        }
    }

    /// The device refuses something that was posted, as `what` says: `BAD_BUFFERS_*`. Runs in the interrupt.
    #[cold]
    pub(crate) fn refused(&self, index: u64, what: u64) {
        let transmit = what & abi::BAD_BUFFERS_TRANSMIT != 0;
        if let Some(napi) = self.napi().filter(|_| transmit) {
            napi.queue().counters.tx_errors.add(1);
        }
        let stopped = what & abi::BAD_BUFFERS_STOPPED != 0;
        if self.dev.prints.allows(c"ferrite channels") {
            netdev_warn!(
                self.dev,
                "channel {}: the device refuses what was {} at {}{}\n",
                self.number,
                if transmit {
                    "sent"
                } else {
                    "posted to receive"
                },
                index,
                if stopped { ", and takes no more" } else { "" }
            );
        }
        if stopped {
            Repairs::restart_soon(&self.dev);
        }
    }
}

/// Channels that the device has. Dropped in order: nobody is told of their events any more, and then they go.
struct Opened {
    listed: Listed,
    objects: KVec<DeviceObject>,
    /// Whether the device was told that the interface is up.
    channels: u16,
}

/// Channels in the table by which events find them.
struct Listed {
    hw: Arc<Hardware>,
    numbers: KVec<u16>,
}

impl Listed {
    fn add(&mut self, dev: &Device<Interface>, number: u16) -> Result {
        let listener = ChannelListener {
            dev: dev.hold(),
            number,
        };
        self.numbers.reserve(1, GFP_KERNEL)?;
        let listener = Arc::new(listener, GFP_KERNEL)?;
        self.hw.channels.insert(number.into(), listener)?;
        self.numbers.push(number, GFP_KERNEL)?;
        Ok(())
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        for number in &self.numbers {
            drop(self.hw.channels.remove(usize::from(*number)));
        }
    }
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
            most_to_segment: Atomic::new(caps.max_transmit_bytes),
            counted <- new_mutex!([0; CHANNEL_COUNTER_NAMES.len()], "ferrite_net_counted"),
        })
    }

    /// The device behind it, `ENODEV` where there is none. It does not go while RTNL is held.
    fn behind(&self, _rtnl: &Rtnl) -> Result<Behind> {
        self.behind.lock().clone().ok_or(ENODEV)
    }

    /// The same for who does not hold RTNL, and so does not keep what is behind from going.
    fn hardware(&self) -> Option<Arc<Hardware>> {
        let behind = self.behind.lock();
        behind.as_ref().map(|behind| behind.hw.clone())
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
        let behind = self.behind(rtnl)?;
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

impl Device<Interface> {
    /// Makes the channels, and has the device receive. Where it fails [`Self::close`] undoes what was done.
    fn make_channels(&self, behind: &Behind) -> Result {
        let parent = self.parent().ok_or(ENODEV)?;
        let Behind { hw, handlers, .. } = behind;
        let mut settings = self.settings.lock();
        let layout = Layout {
            transmit_log_blocks: settings.transmit_log_blocks,
            receive_log_entries: settings.receive_log_entries,
        };
        let channels = self.tx_queues().min(behind.channels());
        let mut open = self.open.lock();
        let opened = open.insert(Opened {
            listed: Listed {
                hw: hw.clone(),
                numbers: KVec::new(),
            },
            objects: KVec::with_capacity(channels.into(), GFP_KERNEL)?,
            channels,
        });
        for (number, napi) in (0..channels).zip(self.napis()) {
            let queue = napi.queue();
            let memory = ChannelMemory::new(parent, hw, layout)?;
            let pieces = behind.caps.max_transmit_pieces.into();
            let transmitter = Transmitter::new(parent, hw, &memory, number, pieces)?;
            let mut receiver = Receiver::new(parent, hw, &memory, number)?;
            // While nobody else has it, and memory can be waited for.
            receiver.fill();
            if receiver.is_low() {
                return Err(ENOMEM);
            }
            // Before the device knows the memory, which so is there until the device has let go of it.
            queue.put(Some(transmitter), Some(receiver));
            // Who changes a setting may be killed, and the interface is not his.
            let object = DeviceObject::create_for_others(
                hw,
                &memory.create_command(number, handlers.main_queue(number)),
                CommandOpcode::DestroyChannel,
                number.into(),
            )?;
            opened.objects.push(object, GFP_KERNEL)?;
            opened.listed.add(self, number)?;
        }
        if let Some((microseconds, frames)) = settings.coalescing {
            if let Err(error) = behind.moderate(channels, microseconds, frames) {
                if hw.is_dead() {
                    return Err(error);
                }
                // It receives and sends all the same.
                netdev_warn!(
                    self,
                    "interrupts are not put off for {} us, or {} frames: {:?}\n",
                    microseconds,
                    frames,
                    error
                );
                settings.coalescing = None;
            }
        }
        self.tell_redirection(behind, &settings, channels)?;
        hw.execute(&settings.filter(behind.caps.multicast_addresses()))?;
        self.tell(behind, &settings, true)
    }

    /// Takes the channels down: the device lets go of them, or was stopped, and then their memory goes. Sleeps.
    fn close(&self) {
        let opened = self.open.lock().take();
        drop(opened);
        for napi in self.napis() {
            napi.queue().put(None, None);
        }
    }

    /// Has what receives looked after that has too few buffers, after a while.
    #[cold]
    fn retry_refill(&self) {
        Repairs::refill_later(self);
    }

    /// Has what users have set fit the device that is behind it now, which may be another than they were set of, and
    /// attaches it. Where it cannot be opened it stays detached.
    fn fit_and_attach(&self, rtnl: &Rtnl) -> Result {
        let behind = self.behind(rtnl)?;
        let caps = behind.caps;
        let (channels, less) = {
            let mut settings = self.settings.lock();
            let most = behind.channels().min(self.napis().len() as u16);
            let channels = settings.channels.min(most).max(1);
            (channels, settings.fit(&caps, channels))
        };
        if less {
            netdev_warn!(
                self,
                "the device can do less than the one before, MTU, rings or the table are smaller\n"
            );
        }
        if self.tx_queues() != channels {
            self.set_queues(rtnl, channels)?;
        }
        if self.most_to_segment.load(Relaxed) != caps.max_transmit_bytes {
            self.most_to_segment.store(caps.max_transmit_bytes, Relaxed);
            self.set_most_to_segment(rtnl, caps.max_transmit_bytes);
        }
        self.set_max_mtu(rtnl, caps.max_mtu.into());
        self.attach(rtnl)?;
        self.fit_mtu(rtnl, &caps);
        Ok(())
    }

    /// Has its MTU be one that the device behind it has, which was told so by `open`: now everybody else is. Who uses the
    /// interface may not want that, which is said, and asked for again when it is mended the next time.
    fn fit_mtu(&self, rtnl: &Rtnl, caps: &EthernetCaps) {
        let most = caps.max_mtu.into();
        if self.mtu() <= most {
            return;
        }
        if let Err(error) = self.request_mtu(rtnl, most) {
            netdev_warn!(
                self,
                "MTU {} is more than the {} of the device, and stays: {:?}\n",
                self.mtu(),
                most,
                error
            );
        }
    }

    /// Opens it again where that has failed, after what was changed is as it was. Where that fails, too, it is tried later.
    fn reopen_or_repair(&self, rtnl: &Rtnl) {
        if self.reopen(rtnl).is_err() {
            Repairs::restart_soon(self);
        }
    }

    /// Has its channels made anew; made, where that has failed before.
    fn mend(&self, rtnl: &Rtnl) -> Result {
        if !self.is_present() {
            return self.fit_and_attach(rtnl);
        }
        self.restart(rtnl, || ())?;
        self.reopen(rtnl)?;
        self.fit_mtu(rtnl, &self.behind(rtnl)?.caps);
        Ok(())
    }

    /// Whether there is a device behind it that works.
    fn is_served(&self, _rtnl: &Rtnl) -> bool {
        self.hardware().is_some_and(|hw| !hw.is_dead())
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
        let behind = dev.behind(rtnl)?;
        if behind.hw.is_dead() {
            return Err(ENODEV);
        }
        dev.make_channels(&behind).inspect_err(|error| {
            dev.close();
            netdev_warn!(dev, "channels cannot be made: {:?}\n", error);
        })
    }

    fn stop(dev: &Device<Self>, rtnl: &Rtnl) {
        if let Ok(behind) = dev.behind(rtnl) {
            let settings = dev.settings.lock();
            // One that does not answer is stopped, and receives nothing.
            let _ = dev.tell(&behind, &settings, false);
        }
        dev.close();
    }

    fn start_xmit(dev: &Device<Self>, mut skb: Skb) -> Xmit {
        let number = skb.queue();
        let Some(napi) = dev.napis().get(usize::from(number)) else {
            skb.discard(DropReason::NotReady);
            return Xmit::Taken;
        };
        let queue = napi.queue();
        let (packets, bytes) = (skb.segments(), skb.len());
        skb.tx_timestamp();
        let mut guard = queue.transmitter.lock();
        let Some(transmitter) = &mut *guard else {
            drop(guard);
            queue.counters.tx_dropped.add(1);
            skb.discard(DropReason::NotReady);
            return Xmit::Taken;
        };
        let posted = transmitter.post(skb);
        let mut stopped = false;
        if !transmitter.has_room() {
            // Whoever makes room has the lock, and looks afterwards.
            dev.stop_queue(number);
            queue.counters.tx_stopped.add(1);
            stopped = true;
        }
        if stopped || posted.is_err() || !dev.has_more_to_send() {
            transmitter.publish();
        }
        drop(guard);
        match posted {
            Ok(()) => {
                queue.counters.tx_packets.add(packets);
                queue.counters.tx_bytes.add(bytes);
                Xmit::Taken
            }
            Err(Refused::Full(skb)) => Xmit::Busy(skb),
            Err(Refused::Bad(skb, reason)) => {
                queue.counters.tx_dropped.add(1);
                skb.discard(reason);
                Xmit::Taken
            }
        }
    }
}

/// Gives back frames that were sent; whether there may be more.
fn reclaim(context: &PollContext<'_, Interface>) -> bool {
    let queue = context.napi().queue();
    for _ in 0..RECLAIMS {
        let mut frames = [const { None }; RECLAIMED];
        let (taken, has_room, impossible) = match &mut *queue.transmitter.lock() {
            Some(transmitter) => {
                let taken = transmitter.reclaim(&mut frames);
                (taken, transmitter.has_much_room(), transmitter.impossible())
            }
            None => return false,
        };
        if let Some(impossible) = impossible {
            // Without the lock: who prints may do so by this interface.
            impossible.tell();
        }
        for skb in frames.into_iter().flatten() {
            context.sent(skb);
        }
        if has_room {
            context.device().wake_queue(queue.number);
        }
        if taken < RECLAIMED {
            return false;
        }
    }
    true
}

/// Takes up to `budget` frames that have come; returns how many.
fn receive(context: &PollContext<'_, Interface>, budget: u32) -> u32 {
    let dev = context.device();
    let queue = context.napi().queue();
    let counters = &queue.counters;
    let mut guard = queue.receiver.lock();
    let Some(receiver) = &mut *guard else {
        return 0;
    };
    let offloads = dev.offloads();
    let mut done = 0;
    while done < budget {
        let Some(Arrived { entry, skb }) = receiver.take(|length| context.buffer(length)) else {
            break;
        };
        done += 1;
        let Ok(mut skb) = skb else {
            counters.rx_dropped.add(1);
            continue;
        };
        counters.rx_packets.add(1);
        counters.rx_bytes.add(skb.len());
        if skb.linear().first().is_some_and(|byte| byte & 1 != 0) {
            counters.rx_multicast.add(1);
        }
        let checked = entry.flags & abi::RECEIVED_CHECKSUM != 0;
        if checked && offloads.has(Offloads::RX_CHECKSUM) {
            skb.set_checked();
        }
        if entry.flags & abi::RECEIVED_VLAN != 0 {
            skb.set_vlan(entry.vlan);
        }
        let kind = u16::from(entry.hash_type);
        if kind != 0 && offloads.has(Offloads::RX_HASH) {
            skb.set_hash(entry.hash, kind & redirection::WITH_PORTS != 0);
        }
        skb.set_received_by(queue.number);
        context.receive(skb);
    }
    if !receiver.refill() {
        counters.rx_no_memory.add(1);
        // Where the device has too few buffers for the next frame there will be no event.
        dev.retry_refill();
    }
    done
}

impl NapiOps for Interface {
    fn poll(context: &PollContext<'_, Self>, budget: u32) -> u32 {
        context.napi().queue().counters.polls.add(1);
        let more = reclaim(context);
        if budget == 0 {
            // Somebody waits for room, and may not receive here.
            return 0;
        }
        let done = receive(context, budget);
        if more {
            budget
        } else {
            done
        }
    }

    fn polled(napi: &Napi<Self>) {
        let queue = napi.queue();
        let mut again = false;
        if let Some(receiver) = &mut *queue.receiver.lock() {
            receiver.arm();
            // The arming before the look at what came meanwhile: the device looks at it after it has written an entry.
            mb();
            again |= receiver.has_arrived();
        }
        let mut impossible = None;
        if let Some(transmitter) = &mut *queue.transmitter.lock() {
            again |= transmitter.arm();
            impossible = transmitter.impossible();
        }
        if let Some(impossible) = impossible {
            impossible.tell();
        }
        if again {
            napi.schedule();
        }
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

impl MacOps for Interface {
    fn set_mac(dev: &Device<Self>, rtnl: &Rtnl, mac: MacAddress) -> Result {
        // Also where it is down: the device may not send from others.
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.mac, mac),
            |settings, before| settings.mac = before,
        )
    }
}

impl MtuOps for Interface {
    fn change_mtu(dev: &Device<Self>, rtnl: &Rtnl, mtu: u32) -> Result {
        let mtu = u16::try_from(mtu).map_err(|_| EINVAL)?;
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.mtu, mtu),
            |settings, before| settings.mtu = before,
        )
    }
}

impl OffloadOps for Interface {
    fn set_offloads(dev: &Device<Self>, rtnl: &Rtnl, wanted: Offloads) -> Result {
        let strip = wanted.has(Offloads::VLAN_STRIP);
        dev.change(
            rtnl,
            |settings| core::mem::replace(&mut settings.strip_vlan, strip),
            |settings, before| settings.strip_vlan = before,
        )
    }
}

impl SegmentOps for Interface {
    fn can_segment(dev: &Device<Self>, frame: &ToSegment) -> bool {
        /// Bytes of a header of IPv6 without extensions.
        const IPV6_HEADER: usize = 40;
        frame.size >= abi::TRANSMIT_MIN_SEGMENT
            && frame.length <= dev.most_to_segment.load(Relaxed) as usize
            && (!frame.is_ipv6 || frame.ip_header == IPV6_HEADER)
    }
}

impl TimeoutOps for Interface {
    fn tx_timeout(dev: &Device<Self>, queue: u16) {
        if let Some(napi) = dev.napis().get(usize::from(queue)) {
            napi.queue().counters.tx_timeouts.add(1);
        }
        if dev.prints.allows(c"ferrite timeouts") {
            netdev_warn!(dev, "channel {} sends nothing\n", queue);
        }
        Repairs::restart_soon(dev);
    }
}

impl RxModeOps for Interface {
    fn set_rx_mode(dev: &Device<Self>, rtnl: &Rtnl, mode: &RxMode<'_>) -> Result {
        let mut groups = KVec::new();
        // One more than any filter has room for is as good as all.
        for group in mode.multicast().take(abi::MULTICAST_ADDRESSES + 1) {
            groups.push(group, GFP_KERNEL)?;
        }
        let mut settings = dev.settings.lock();
        settings.groups = groups;
        settings.all_multicast = mode.all_multicast;
        // The device knows one address.
        settings.promiscuous = mode.promiscuous || mode.unicast().next().is_some();
        if dev.open_channels().is_none() {
            return Ok(());
        }
        let behind = dev.behind(rtnl)?;
        behind
            .hw
            .execute(&settings.filter(behind.caps.multicast_addresses()))?;
        dev.tell(&behind, &settings, true)
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

/// An interface that has a device behind it, until this is dropped. Sleeps then, and takes RTNL.
pub(crate) struct Attachment {
    dev: Hold<Interface>,
    hw: Arc<Hardware>,
}

impl Attachment {
    /// Puts a device behind an interface, and opens it where it is up. Sleeps, and takes RTNL.
    pub(crate) fn new(dev: Hold<Interface>, behind: Behind) -> Result<Self> {
        let (hw, max_mtu) = (behind.hw.clone(), behind.caps.max_mtu);
        *dev.behind.lock() = Some(behind);
        let this = Self { dev, hw };
        let dev = &this.dev;
        *this.hw.interface.lock() = Some(dev.hold());
        let attached = Rtnl::with(|rtnl| dev.fit_and_attach(rtnl));
        if let Err(error) = attached {
            if this.hw.is_dead() {
                return Err(error);
            }
            // What else the function is good for does not wait for it.
            netdev_warn!(dev, "is not opened yet: {:?}\n", error);
            Repairs::restart_soon(dev);
        }
        // Events of the link find it by now.
        this.hw.tell_carrier();
        netdev_info!(dev, "{} channels, MTU to {}\n", dev.napis().len(), max_mtu);
        Ok(this)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let told = self.hw.interface.lock().take();
        drop(told);
        self.dev.set_carrier(false);
        let behind = Rtnl::with(|rtnl| {
            self.dev.detach(rtnl);
            // With RTNL held, by which repairs know whether they are wanted.
            self.dev.behind.lock().take()
        });
        Repairs::stand_down(&self.dev);
        drop(behind);
    }
}

#[kunit_tests(ferrite_interface)]
mod tests {
    use super::*;

    fn settings() -> Result<Settings> {
        Ok(Settings {
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            promiscuous: false,
            all_multicast: false,
            groups: KVec::new(),
            strip_vlan: true,
            transmit_log_blocks: 9,
            receive_log_entries: 8,
            channels: 4,
            coalescing: None,
            redirection: Redirection::new(16, 4)?,
        })
    }

    #[test]
    fn the_device_is_told_what_users_have_set() -> Result {
        let mut settings = settings()?;
        let up = settings.interface(true, 4);
        assert_eq!(
            up.flags,
            abi::INTERFACE_UP | abi::INTERFACE_BROADCAST | abi::INTERFACE_STRIP_VLAN
        );
        assert_eq!(
            (up.mtu, up.mac, up.default_channel),
            (1500, [2, 0, 0, 0, 0, 1], 0)
        );
        let down = settings.interface(false, 4);
        assert_eq!(down.flags & abi::INTERFACE_UP, 0);
        assert_eq!(down.default_channel, abi::CHANNEL_NONE);
        settings.strip_vlan = false;
        settings.promiscuous = true;
        settings.all_multicast = true;
        assert_eq!(
            settings.interface(true, 4).flags,
            abi::INTERFACE_UP
                | abi::INTERFACE_BROADCAST
                | abi::INTERFACE_PROMISCUOUS
                | abi::INTERFACE_ALL_MULTICAST
        );
        Ok(())
    }

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

    fn caps() -> EthernetCaps {
        EthernetCaps::of(4, 9000, (12, 12))
    }

    #[test]
    fn what_users_have_set_fits_a_device_that_can_do_less() -> Result {
        let mut settings = settings()?;
        settings.mtu = 9000;
        settings.transmit_log_blocks = 12;
        settings.receive_log_entries = 12;
        // One that can do as much changes nothing.
        assert!(!settings.fit(&caps(), 4));
        assert_eq!(settings.mtu, 9000);
        assert!(settings.fit(&EthernetCaps::of(4, 1500, (4, 5)), 4));
        assert_eq!(
            (
                settings.mtu,
                settings.transmit_log_blocks,
                settings.receive_log_entries
            ),
            (1500, 4, 5)
        );
        // A table in turn is dealt out anew, which nobody need be told; one that was chosen is lost.
        assert!(!settings.fit(&caps(), 2));
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel < 2));
        settings.redirection.set(Some(&[1; 16]), None, 2)?;
        assert!(!settings.fit(&caps(), 3));
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel == 1));
        assert!(settings.fit(&caps(), 1));
        assert!(settings
            .redirection
            .table()
            .iter()
            .all(|channel| *channel == 0));
        assert!(!settings.fit(&caps(), 1));
        Ok(())
    }

    #[test]
    fn more_groups_than_the_filter_has_room_for_are_all_groups() -> Result {
        let mut settings = settings()?;
        for number in 0..4 {
            settings
                .groups
                .push(MacAddress([1, 0, 0x5e, 0, 0, number]), GFP_KERNEL)?;
        }
        let filter = settings.filter(4);
        assert_eq!(filter.count, 4);
        assert_eq!(filter.addresses[3], [1, 0, 0x5e, 0, 0, 3]);
        assert_eq!(filter.addresses[4], [0; 6]);
        assert_eq!(
            settings.interface(true, 4).flags & abi::INTERFACE_ALL_MULTICAST,
            0
        );
        assert_eq!(settings.filter(3).count, 0);
        assert!(settings.interface(true, 3).flags & abi::INTERFACE_ALL_MULTICAST != 0);
        Ok(())
    }
}
