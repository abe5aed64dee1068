// SPDX-License-Identifier: GPL-2.0

//! Tests that need no hardware: a device of software that receives whatever it sends.

mod frames;
mod lifecycle;
mod settings;
mod traffic;

use super::*;
use crate::bindings;
use crate::kernel_ext::workqueue::OwnedQueue;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::{new_mutex, Arc, Mutex};
use kernel::time::delay::fsleep;
use kernel::time::Delta;
use kernel::workqueue::{impl_has_work, new_work, Work, WorkItem};

/// Counters that outlive a device.
struct Seen {
    opened: Atomic<u32>,
    stopped: Atomic<u32>,
    sent: Atomic<u32>,
    vlans: Atomic<u32>,
    groups: Atomic<u32>,
    unicast: Atomic<u32>,
    promiscuous: Atomic<u32>,
    copybreak: Atomic<u32>,
    /// Whether it has room for any number of frames.
    roomy: Atomic<u32>,
    dropped: Atomic<u32>,
    /// How often it was asked how many numbers, and entries, there are.
    asked: Atomic<u32>,
    /// Whether it cannot be opened.
    broken: Atomic<u32>,
    /// Whether it opens and restarts itself where it is opened and stopped.
    strange: Atomic<u32>,
}

/// The device: its queue has the frames that were sent, until it is polled.
#[pin_data(PinnedDrop)]
struct Echo {
    seen: Arc<Seen>,
    #[pin]
    on_their_way: SkbQueue,
    /// How many frames it takes before it has no room.
    room: usize,
}

#[pinned_drop]
impl PinnedDrop for Echo {
    fn drop(self: Pin<&mut Self>) {
        self.seen.dropped.fetch_add(1, Relaxed);
    }
}

impl Echo {
    fn new(seen: &Arc<Seen>, room: usize) -> impl PinInit<Self> {
        let seen = seen.clone();
        pin_init!(Self {
            seen,
            on_their_way <- SkbQueue::new(),
            room,
        })
    }
}

impl Driver for Echo {
    const OPS: Ops<Self> = Ops::new()
        .with_napi()
        .with_statistics()
        .with_mac()
        .with_mtu()
        .with_rx_mode()
        .with_vlans()
        .with_ethtool()
        .with_rss();
    type Queue = u32;

    fn open(dev: &Device<Self>, rtnl: &Rtnl) -> Result {
        if dev.seen.broken.load(Relaxed) != 0 {
            return Err(ENOMEM);
        }
        dev.seen.opened.fetch_add(1, Relaxed);
        if dev.seen.strange.load(Relaxed) != 0 {
            assert_eq!(dev.restart(rtnl, || 1), Ok(1));
            let _ = dev.reopen(rtnl);
            let _ = dev.attach(rtnl);
        }
        dev.set_carrier(true);
        Ok(())
    }

    fn stop(dev: &Device<Self>, rtnl: &Rtnl) {
        dev.set_carrier(false);
        dev.on_their_way.clear(DropReason::NotReady);
        dev.seen.stopped.fetch_add(1, Relaxed);
        if dev.seen.strange.xchg(0, Relaxed) != 0 {
            let _ = dev.restart(rtnl, || ());
            dev.detach(rtnl);
        }
    }

    fn start_xmit(dev: &Device<Self>, skb: Skb) -> Xmit {
        if dev.on_their_way.len() >= dev.room && dev.seen.roomy.load(Relaxed) == 0 {
            dev.stop_queue(skb.queue());
            return Xmit::Busy(skb);
        }
        dev.seen.sent.fetch_add(1, Relaxed);
        dev.on_their_way.push(skb);
        dev.napis()[0].schedule();
        Xmit::Taken
    }
}

impl NapiOps for Echo {
    fn poll(context: &PollContext<'_, Self>, budget: u32) -> u32 {
        assert_eq!(*context.napi().queue(), 7);
        let mut done = 0;
        while done < budget {
            let Some(mut skb) = context.device().on_their_way.pop() else {
                break;
            };
            skb.set_checked();
            context.receive(skb);
            done += 1;
        }
        context.device().wake_queue(0);
        done
    }
}

impl StatisticsOps for Echo {
    fn statistics(dev: &Device<Self>) -> Statistics {
        Statistics {
            tx_packets: dev.seen.sent.load(Relaxed).into(),
            multicast: 3,
            ..Statistics::default()
        }
    }
}

impl MacOps for Echo {
    fn set_mac(_dev: &Device<Self>, _rtnl: &Rtnl, mac: MacAddress) -> Result {
        if mac.0[5] == 13 {
            Err(EPERM)
        } else {
            Ok(())
        }
    }
}

impl MtuOps for Echo {
    fn change_mtu(_dev: &Device<Self>, _rtnl: &Rtnl, mtu: u32) -> Result {
        if mtu == 1313 {
            Err(EPERM)
        } else {
            Ok(())
        }
    }
}

impl RxModeOps for Echo {
    fn set_rx_mode(dev: &Device<Self>, _rtnl: &Rtnl, mode: &RxMode<'_>) -> Result {
        let groups = mode.multicast().filter(|mac| *mac == GROUP).count();
        dev.seen.groups.store(groups as u32, Release);
        let others = mode.unicast().filter(|mac| *mac == OTHER).count();
        dev.seen.unicast.store(others as u32, Release);
        dev.seen.promiscuous.store(mode.promiscuous.into(), Release);
        Ok(())
    }
}

impl VlanOps for Echo {
    fn add_vlan(dev: &Device<Self>, _rtnl: &Rtnl, vlan: u16) -> Result {
        if vlan == VLAN {
            dev.seen.vlans.fetch_add(1, Relaxed);
        }
        Ok(())
    }

    fn remove_vlan(dev: &Device<Self>, _rtnl: &Rtnl, vlan: u16) {
        if vlan == VLAN {
            dev.seen.vlans.fetch_sub(1, Relaxed);
        }
    }
}

impl EthtoolOps for Echo {
    const NAME: &'static str = "net_kunit";

    fn ethtool_count(dev: &Device<Self>, _rtnl: &Rtnl) -> usize {
        // One more each time.
        3 + dev.seen.asked.fetch_add(1, Relaxed) as usize
    }

    fn ethtool_names(_dev: &Device<Self>, _rtnl: &Rtnl, names: &mut StatisticsNames<'_>) {
        names.push(&["first"]);
        names.push(&["sec", "ond"]);
        names.push(&["a_name_that_is_much_longer", "_than_there_is_room_for"]);
        names.push(&["one too many"]);
    }

    fn driver_info(_dev: &Device<Self>, _rtnl: &Rtnl) -> DriverInfo {
        DriverInfo {
            firmware: "17",
            version: None,
            bus: "nowhere",
        }
    }

    fn ethtool_statistics(_dev: &Device<Self>, _rtnl: &Rtnl, values: &mut [u64]) {
        values.copy_from_slice(&[1, 2, 3]);
    }

    fn link_settings(_dev: &Device<Self>, _rtnl: &Rtnl) -> Result<LinkSettings> {
        Ok(LinkSettings {
            speed: Some(40_000),
            full_duplex: true,
        })
    }

    fn tx_copybreak(dev: &Device<Self>, _rtnl: &Rtnl) -> Result<u32> {
        Ok(dev.seen.copybreak.load(Relaxed))
    }

    fn set_tx_copybreak(dev: &Device<Self>, _rtnl: &Rtnl, bytes: u32) -> Result {
        dev.seen.copybreak.store(bytes, Relaxed);
        Ok(())
    }
}

impl RssOps for Echo {
    const KEY: usize = 40;

    fn rss_entries(dev: &Device<Self>, _rtnl: &Rtnl) -> usize {
        2 + 2 * dev.seen.asked.fetch_add(1, Relaxed) as usize
    }

    fn rss(_dev: &Device<Self>, _rtnl: &Rtnl, table: Option<&mut [u32]>, key: Option<&mut [u8]>) {
        if let Some(table) = table {
            table.fill(5);
        }
        if let Some(key) = key {
            key.fill(6);
        }
    }

    fn set_rss(
        _dev: &Device<Self>,
        _rtnl: &Rtnl,
        _table: Option<&[u32]>,
        _key: Option<&[u8]>,
    ) -> Result {
        Ok(())
    }
}

const OWN: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
const OTHER: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
const GROUP: MacAddress = MacAddress([0x33, 0x33, 0, 0x12, 0x34, 0x56]);
const VLAN: u16 = 42;
/// For local experiments (IEEE 802): no protocol takes it.
const PROTOCOL: u16 = 0x88b5;

fn config(name: &CStr) -> Config<'_> {
    Config {
        name,
        mac: Some(OWN),
        mtu: 1500,
        max_mtu: 9000,
        tx_queues: 1,
        rx_queues: 1,
        offloads: Offloads::NONE,
        most_to_segment: 0,
        parent: None,
    }
}

fn queues() -> Result<KVec<u32>> {
    let mut queues = KVec::new();
    queues.push(7, GFP_KERNEL)?;
    Ok(queues)
}

fn register(name: &CStr, seen: &Arc<Seen>) -> Result<Registration<Echo>> {
    Unregistered::new(&config(name), queues()?, Echo::new(seen, 8))?.register()
}

fn seen() -> Result<Arc<Seen>> {
    let seen = Seen {
        opened: Atomic::new(0),
        stopped: Atomic::new(0),
        sent: Atomic::new(0),
        vlans: Atomic::new(0),
        groups: Atomic::new(0),
        unicast: Atomic::new(0),
        promiscuous: Atomic::new(0),
        copybreak: Atomic::new(0),
        roomy: Atomic::new(0),
        dropped: Atomic::new(0),
        asked: Atomic::new(0),
        broken: Atomic::new(0),
        strange: Atomic::new(0),
    };
    Ok(Arc::new(seen, GFP_KERNEL)?)
}

/// What a user does by `ip link set up`.
fn bring_up(dev: &Device<Echo>) -> Result {
    Rtnl::with(|_| {
        // SAFETY: The reference keeps the device, and RTNL is held.
        to_result(unsafe { bindings::dev_open(dev.as_raw(), core::ptr::null_mut()) })
    })
}

/// The frame with number `number` for `destination`.
fn fill(skb: &mut Skb, destination: MacAddress, number: u8) -> Result {
    skb.append_slice(&destination.0)?;
    skb.append_slice(&OTHER.0)?;
    skb.append_slice(&PROTOCOL.to_be_bytes())?;
    skb.append(86, |bytes| bytes.fill(number))
}

fn frame(handle: &Handle<Taker>, number: u8) -> Result<Skb> {
    let mut skb = handle.allocate(100)?;
    fill(&mut skb, OWN, number)?;
    Ok(skb)
}

/// Waits for something to become so.
fn becomes(mut so: impl FnMut() -> bool) -> bool {
    for _ in 0..5000 {
        if so() {
            return true;
        }
        fsleep(Delta::from_millis(1));
    }
    false
}

/// Who takes frames: those with an even number, and counts the others, which pass.
#[pin_data]
struct Taker {
    #[pin]
    taken: SkbQueue,
    passed: Atomic<u32>,
    #[pin]
    events: Mutex<KVec<InterfaceEvent>>,
}

impl Taker {
    fn new() -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            taken <- SkbQueue::new(),
            passed: Atomic::new(0),
            events <- new_mutex!(KVec::new()),
        })
    }

    fn has_seen(&self, event: InterfaceEvent) -> bool {
        self.events.lock().contains(&event)
    }
}

impl Upper for Taker {
    fn received(&self, mut frame: Received) -> Verdict {
        let header = frame.header();
        if header.protocol != PROTOCOL || header.source != OTHER {
            return Verdict::Pass(frame);
        }
        let Ok(frames) = frame.try_clone().and_then(Received::into_frames) else {
            return Verdict::Taken;
        };
        for whole in frames {
            let mut number = [0];
            if whole.copy_to(EthernetHeader::SIZE, &mut number).is_err() || number[0] % 2 == 1 {
                self.passed.fetch_add(1, Relaxed);
                return Verdict::Pass(frame);
            }
            self.taken.push(whole);
        }
        Verdict::Taken
    }

    fn event(&self, _rtnl: &Rtnl, event: InterfaceEvent, state: Option<InterfaceState>) {
        assert_eq!(state.is_none(), event == InterfaceEvent::Gone);
        let _ = self.events.lock().push(event, GFP_KERNEL);
    }
}

/// A frame with nothing in it, of no device.
fn empty(len: usize) -> Result<Skb> {
    // SAFETY: A frame of no device names none that could go before it.
    unsafe { Skb::for_raw_device(core::ptr::null_mut(), len) }
}
