// SPDX-License-Identifier: GPL-2.0

//! Tests that need no hardware: a device of software that receives whatever it sends.

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
    // SAFETY: Without a device.
    unsafe { Skb::for_raw_device(core::ptr::null_mut(), len) }
}

#[kunit_tests(rust_net)]
mod net_tests {
    use super::*;

    #[test]
    fn a_buffer_has_what_was_put_into_it_and_no_more() -> Result {
        let mut skb = empty(64)?;
        assert_eq!(skb.len(), 0);
        assert!(skb.tailroom() >= 64);
        let (head, tail) = (skb.headroom(), skb.tailroom());
        skb.reserve(16)?;
        assert_eq!((skb.headroom(), skb.tailroom()), (head + 16, tail - 16));
        skb.append_slice(&[1, 2, 3])?;
        assert_eq!(
            skb.append(4, |room| {
                room.fill(9);
                room.len()
            })?,
            4
        );
        assert_eq!(skb.linear(), &[1, 2, 3, 9, 9, 9, 9]);
        // Where there are bytes nothing is reserved, and not more than there is.
        assert_eq!(skb.reserve(1), Err(EINVAL));
        assert_eq!(empty(64)?.reserve(1 << 20), Err(EINVAL));
        assert_eq!(skb.append(skb.tailroom() + 1, |_| ()), Err(ENOSPC));
        let rest = skb.tailroom();
        skb.append(rest, |room| room.fill(0))?;
        assert_eq!(skb.append(1, |_| ()), Err(ENOSPC));
        let mut copy = [0; 4];
        skb.copy_to(1, &mut copy)?;
        assert_eq!(copy, [2, 3, 9, 9]);
        assert_eq!(skb.copy_to(skb.len() - 3, &mut copy), Err(EFAULT));
        assert_eq!(skb.copy_to(usize::MAX, &mut copy), Err(EFAULT));
        skb.copy_to(skb.len() - 4, &mut copy)?;
        Ok(())
    }

    #[test]
    fn bytes_that_have_two_owners_are_not_written() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[1])?;
        let clone = skb.try_clone()?;
        assert_eq!(skb.append_slice(&[2]), Err(EBUSY));
        assert_eq!(clone.linear(), &[1]);
        drop(clone);
        skb.append_slice(&[2])?;
        assert_eq!(skb.linear(), &[1, 2]);
        Ok(())
    }

    #[test]
    fn a_queue_gives_back_what_it_got_in_order() -> Result {
        let queue = KBox::pin_init(SkbQueue::new(), GFP_KERNEL)?;
        assert!(queue.is_empty() && queue.pop().is_none());
        for number in 0..3u8 {
            let mut skb = empty(16)?;
            skb.append_slice(&[number])?;
            queue.push(skb);
        }
        assert_eq!(queue.len(), 3);
        assert_eq!(queue.pop().map(|skb| skb.linear()[0]), Some(0));
        assert_eq!(queue.pop().map(|skb| skb.linear()[0]), Some(1));
        // What is left goes with it.
        Ok(())
    }

    #[test]
    fn a_checksum_that_is_to_be_computed_is() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[0; 20])?;
        assert_eq!(skb.checksum(), Checksum::None);
        skb.set_checked();
        assert_eq!(skb.checksum(), Checksum::Unnecessary);
        // SAFETY: The buffer is ours; both are within its bytes.
        let asked = unsafe { bindings::skb_partial_csum_set(skb.as_raw(), 10, 2) };
        assert!(asked);
        assert_eq!(skb.checksum(), Checksum::Partial);
        skb.set_checked();
        assert_eq!(skb.checksum(), Checksum::Partial);
        let whole = skb.into_frames()?.next().ok_or(EINVAL)?;
        assert_eq!(whole.checksum(), Checksum::None);
        // The sum of nothing.
        assert_eq!(whole.linear()[12..14], [0xff, 0xff]);
        Ok(())
    }

    #[test]
    fn a_tag_beside_a_frame_is_put_inside() -> Result {
        let mut skb = empty(200)?;
        skb.reserve(32)?;
        fill(&mut skb, OWN, 4)?;
        // SAFETY: The buffer is ours.
        unsafe {
            bindings::skb_set_protocol(skb.as_raw(), PROTOCOL.to_be());
            bindings::skb_reset_mac_header(skb.as_raw());
            bindings::__vlan_hwaccel_put_tag(skb.as_raw(), PROTOCOL_VLAN.to_be(), VLAN);
        }
        let mut frames = skb.into_frames()?;
        let whole = frames.next().ok_or(EINVAL)?;
        assert!(frames.next().is_none());
        assert_eq!(whole.len(), 100 + VLAN_TAG);
        assert_eq!(
            whole.ethernet_header().map(|header| header.protocol),
            Some(PROTOCOL_VLAN)
        );
        assert_eq!(whole.linear()[14..18], [0, VLAN as u8, 0x88, 0xb5]);
        Ok(())
    }

    #[test]
    fn addresses_are_told_apart() {
        assert!(OWN.is_valid() && !OWN.is_group());
        assert!(GROUP.is_group() && !GROUP.is_valid());
        assert!(MacAddress::BROADCAST.is_group());
        assert!(!MacAddress([0; 6]).is_valid());
        let random = MacAddress::random();
        assert!(random.is_valid() && random.is_locally_administered());
        assert!(!MacAddress([0x00, 0x16, 0x3e, 0, 0, 1]).is_locally_administered());
    }

    #[test]
    fn a_device_that_is_not_registered_is_freed_with_its_data() -> Result {
        let seen = seen()?;
        drop(Unregistered::new(
            &config(c"kunitnet%d"),
            queues()?,
            Echo::new(&seen, 8),
        )?);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        // Also where its name is taken.
        let first = register(c"kunitnet7", &seen)?;
        assert_eq!(register(c"kunitnet7", &seen).err(), Some(EEXIST));
        assert_eq!(seen.dropped.load(Relaxed), 2);
        drop(first);
        assert_eq!(seen.dropped.load(Relaxed), 3);
        assert!(Arc::into_unique_or_drop(seen).is_some());
        Ok(())
    }

    #[test]
    fn a_device_that_cannot_be_is_refused() -> Result {
        let seen = seen()?;
        // The core has room for fifteen bytes.
        assert_eq!(
            Unregistered::new(&config(c"kunitnet90123456"), queues()?, Echo::new(&seen, 8)).err(),
            Some(EINVAL)
        );
        let mut none = config(c"kunitnet%d");
        none.tx_queues = 0;
        assert_eq!(
            Unregistered::new(&none, queues()?, Echo::new(&seen, 8)).err(),
            Some(EINVAL)
        );
        Ok(())
    }

    #[test]
    fn what_is_sent_is_received_by_who_is_attached() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet0", &seen)?;
        let attachment = Attachment::new(c"kunitnet0", Taker::new())?;
        let handle = attachment.handle();
        // Not up.
        assert!(handle.send(frame(&handle, 2)?).is_err());
        bring_up(&dev)?;
        assert_eq!(seen.opened.load(Relaxed), 1);
        assert!(dev.is_running() && dev.has_carrier());
        let up = Rtnl::with(|rtnl| handle.state(rtnl)).ok_or(ENODEV)?;
        assert_eq!((up.mac, up.mtu, up.is_up), (OWN, 1500, true));
        assert_eq!(up.link.speed, Some(40_000));
        for number in 0..10 {
            handle.send(frame(&handle, number)?)?;
        }
        let taker = attachment.upper();
        assert!(becomes(|| taker.taken.len() == 5));
        assert!(becomes(|| taker.passed.load(Relaxed) == 5));
        for number in [0, 2, 4, 6, 8] {
            let whole = taker.taken.pop().ok_or(EINVAL)?;
            assert_eq!(whole.len(), 100);
            let header = whole.ethernet_header().ok_or(EINVAL)?;
            assert_eq!((header.destination, header.source), (OWN, OTHER));
            assert!(whole.linear()[14..].iter().all(|byte| *byte == number));
        }
        let counted = handle.statistics().ok_or(ENODEV)?;
        assert!(counted.tx_packets >= 10);
        assert_eq!(counted.multicast, 3);
        assert!(taker.has_seen(InterfaceEvent::Up));
        // Too short for a header.
        let mut short = handle.allocate(10)?;
        short.append_slice(&[0; 10])?;
        assert_eq!(handle.send(short), Err(EINVAL));
        drop(attachment);
        // It has nothing to send by.
        assert_eq!(handle.send(empty_frame()?), Err(ENODEV));
        drop(dev);
        assert_eq!(seen.stopped.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn what_waits_for_room_is_sent_when_a_device_was_restarted() -> Result {
        let seen = seen()?;
        // One that never has room, until it is opened anew.
        let dev = Unregistered::new(&config(c"kunitnet11"), queues()?, Echo::new(&seen, 0))?;
        let dev = dev.register()?;
        let attachment = Attachment::new(c"kunitnet11", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        handle.send(frame(&handle, 2)?)?;
        assert_eq!(seen.sent.load(Relaxed), 0);
        seen.roomy.store(1, Relaxed);
        // It was refused, and waits. No other frame is sent that could take it with it.
        Rtnl::with(|rtnl| dev.restart(rtnl, || ()))?;
        assert!(becomes(|| seen.sent.load(Relaxed) >= 1));
        Ok(())
    }

    #[test]
    fn a_queue_that_is_woken_while_a_device_is_stopped_sends_nothing() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet12", &seen)?;
        let attachment = Attachment::new(c"kunitnet12", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        let sent = seen.sent.load(Relaxed);
        let during = Rtnl::with(|rtnl| {
            dev.restart(rtnl, || {
                dev.set_carrier(true);
                dev.wake_queue(0);
                handle.send(frame(&handle, 2)?)?;
                Ok::<_, Error>(seen.sent.load(Relaxed))
            })
        })??;
        assert_eq!(during, sent);
        // It waits, and is sent when it was started again.
        assert!(becomes(|| seen.sent.load(Relaxed) > sent));
        assert!(becomes(|| attachment.upper().taken.len() == 1));
        Ok(())
    }

    fn empty_frame() -> Result<Skb> {
        let mut skb = empty(100)?;
        fill(&mut skb, OWN, 2)?;
        Ok(skb)
    }

    #[test]
    fn frames_beside_napi_are_received_too() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet1", &seen)?;
        let attachment = Attachment::new(c"kunitnet1", Taker::new())?;
        bring_up(&dev)?;
        let mut skb = Skb::for_device(&dev, 100)?;
        fill(&mut skb, OWN, 2)?;
        assert!(dev.receive(skb));
        assert!(becomes(|| attachment.upper().taken.len() == 1));
        // Not without a header.
        let mut short = Skb::for_device(&dev, 100)?;
        short.append_slice(&[0; 13])?;
        assert!(!dev.receive(short));
        Ok(())
    }

    #[test]
    fn what_somebody_wants_is_wanted_until_he_does_not() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet2", &seen)?;
        bring_up(&dev)?;
        let attachment = Attachment::new(c"kunitnet2", Taker::new())?;
        let handle = attachment.handle();
        let group = handle.want(Want::Multicast(GROUP))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 1));
        let again = handle.want(Want::Multicast(GROUP))?;
        drop(group);
        let other = handle.want(Want::Unicast(OTHER))?;
        assert!(becomes(|| seen.unicast.load(Acquire) == 1));
        // An address has one who wants it, and that of the interface is its own.
        for taken in [OTHER, OWN] {
            assert_eq!(handle.want(Want::Unicast(taken)).err(), Some(EEXIST));
        }
        // Still, for one has asked twice.
        assert_eq!(seen.groups.load(Acquire), 1);
        drop(other);
        assert!(becomes(|| seen.unicast.load(Acquire) == 0));
        let all = handle.want(Want::Promiscuous)?;
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 1));
        drop(all);
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 0));
        // Several at once.
        let mut several = KVec::new();
        for want in [Want::Unicast(OTHER), Want::Promiscuous, Want::Vlan(VLAN)] {
            several.push(handle.want(want)?, GFP_KERNEL)?;
        }
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 1));
        assert_eq!(seen.vlans.load(Relaxed), 1);
        Wanted::give_up(several);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(becomes(|| seen.promiscuous.load(Acquire) == 0));
        assert!(becomes(|| seen.unicast.load(Acquire) == 0));
        let vlan = handle.want(Want::Vlan(VLAN))?;
        assert_eq!(seen.vlans.load(Relaxed), 1);
        // What is left is taken back with the attachment.
        drop(attachment);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(becomes(|| seen.groups.load(Acquire) == 0));
        assert_eq!(handle.want(Want::Vlan(VLAN)).err(), Some(ENODEV));
        drop((vlan, again));
        assert_eq!(seen.vlans.load(Relaxed), 0);
        Ok(())
    }

    #[test]
    fn one_is_attached_at_a_time() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet3", &seen)?;
        let first = Attachment::new(c"kunitnet3", Taker::new())?;
        assert_eq!(
            Attachment::new(c"kunitnet3", Taker::new()).err(),
            Some(EBUSY)
        );
        assert_eq!(
            Attachment::new(c"kunitnone", Taker::new()).err(),
            Some(ENODEV)
        );
        assert_eq!(Attachment::new(c"lo", Taker::new()).err(), Some(EINVAL));
        drop(first);
        drop(Attachment::new(c"kunitnet3", Taker::new())?);
        drop(dev);
        Ok(())
    }

    #[test]
    fn address_and_mtu_change_if_the_driver_agrees() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet4", &seen)?;
        let attachment = Attachment::new(c"kunitnet4", Taker::new())?;
        let unlucky = MacAddress([2, 0, 0, 0, 0, 13]);
        Rtnl::with(|rtnl| {
            assert!(!dev.has_random_mac(rtnl));
            assert_eq!(dev.change_mac(rtnl, unlucky), Err(EPERM));
            assert_eq!(dev.mac(), OWN);
            assert!(dev.change_mac(rtnl, GROUP).is_err());
            dev.change_mac(rtnl, OTHER)?;
            assert_eq!(dev.mac(), OTHER);
            assert_eq!(dev.request_mtu(rtnl, 1313), Err(EPERM));
            assert_eq!(dev.mtu(), 1500);
            dev.request_mtu(rtnl, 9000)?;
            assert!(dev.request_mtu(rtnl, 9001).is_err());
            dev.set_max_mtu(rtnl, 2000);
            assert!(dev.request_mtu(rtnl, 8999).is_err());
            dev.request_mtu(rtnl, 1999)?;
            assert_eq!(dev.mtu(), 1999);
            Ok::<(), Error>(())
        })?;
        assert!(attachment.upper().has_seen(InterfaceEvent::ChangeMac));
        assert!(attachment.upper().has_seen(InterfaceEvent::ChangeMtu));
        Ok(())
    }

    #[test]
    fn a_device_without_hardware_is_stopped_and_comes_back_as_it_was() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet7", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        // One that is down stays so.
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            dev.attach(rtnl)
        })?;
        assert_eq!(counts(), (0, 0));
        bring_up(&dev)?;
        assert_eq!(counts(), (1, 0));
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            assert_eq!(counts(), (1, 1));
            // Once only.
            dev.detach(rtnl);
            assert_eq!(counts(), (1, 1));
            dev.attach(rtnl)?;
            assert_eq!(counts(), (2, 1));
            // A change is made while it is stopped.
            let during = dev.restart(rtnl, counts)?;
            assert_eq!((during, counts()), ((2, 2), (3, 2)));
            Ok::<(), Error>(())
        })?;
        Rtnl::with(|rtnl| dev.detach(rtnl));
        // It may go meanwhile.
        drop(dev);
        assert_eq!(counts(), (3, 3));
        Ok(())
    }

    #[test]
    fn a_device_that_comes_back_is_told_what_was_wanted_meanwhile() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet12", &seen)?;
        let attachment = Attachment::new(c"kunitnet12", Taker::new())?;
        let handle = attachment.handle();
        bring_up(&dev)?;
        Rtnl::with(|rtnl| dev.detach(rtnl));
        let group = handle.want(Want::Multicast(GROUP))?;
        let all = handle.want(Want::Promiscuous)?;
        // A device that is not there is told nothing.
        fsleep(Delta::from_millis(20));
        assert_eq!(seen.groups.load(Acquire), 0);
        Rtnl::with(|rtnl| dev.attach(rtnl))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 1));
        assert_eq!(seen.promiscuous.load(Acquire), 1);
        // And what is not wanted any more.
        Rtnl::with(|rtnl| dev.detach(rtnl));
        drop((group, all));
        Rtnl::with(|rtnl| dev.attach(rtnl))?;
        assert!(becomes(|| seen.groups.load(Acquire) == 0));
        assert_eq!(seen.promiscuous.load(Acquire), 0);
        Ok(())
    }

    #[test]
    fn a_device_that_cannot_be_opened_stays_as_it_is_until_it_can() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet13", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        bring_up(&dev)?;
        Rtnl::with(|rtnl| {
            dev.detach(rtnl);
            seen.broken.store(1, Relaxed);
            assert_eq!(dev.attach(rtnl), Err(ENOMEM));
            assert!(!dev.is_present());
            // Not before it is attached.
            dev.reopen(rtnl)?;
            seen.broken.store(0, Relaxed);
            dev.reopen(rtnl)?;
            assert_eq!(counts(), (1, 1));
            dev.attach(rtnl)?;
            assert!(dev.is_present());
            assert_eq!(counts(), (2, 1));
            // One that is there is opened again, too.
            seen.broken.store(1, Relaxed);
            assert_eq!(dev.restart(rtnl, || ()), Err(ENOMEM));
            seen.broken.store(0, Relaxed);
            dev.restart(rtnl, || ())?;
            assert_eq!(counts(), (2, 2));
            dev.reopen(rtnl)?;
            assert_eq!(counts(), (3, 2));
            Ok::<(), Error>(())
        })
    }

    #[test]
    fn a_device_is_opened_and_stopped_once_whatever_its_driver_does_meanwhile() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet14", &seen)?;
        let counts = || (seen.opened.load(Relaxed), seen.stopped.load(Relaxed));
        seen.strange.store(1, Relaxed);
        bring_up(&dev)?;
        assert_eq!(counts(), (1, 0));
        drop(dev);
        assert_eq!(counts(), (1, 1));
        Ok(())
    }

    #[test]
    fn who_polls_for_room_only_receives_nothing() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet15", &seen)?;
        let attachment = Attachment::new(c"kunitnet15", Taker::new())?;
        let napi = dev.napis().first().ok_or(ENODEV)?;
        without_bottom_halves(|| {
            // SAFETY: The device is down: nobody polls the queue.
            let context = unsafe { PollContext::new(napi, 0) };
            assert_eq!(context.buffer(64).err(), Some(EPERM));
            let mut skb = Skb::for_device(&dev, 100)?;
            fill(&mut skb, OWN, 2)?;
            context.receive(skb);
            context.sent(empty_frame()?);
            Ok::<(), Error>(())
        })?;
        fsleep(Delta::from_millis(20));
        assert_eq!(attachment.upper().taken.len(), 0);
        Ok(())
    }

    #[test]
    fn nothing_is_appended_to_a_frame_in_pieces() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[1; 20])?;
        // SAFETY: A page is ours, and passes to the buffer, which is ours alone.
        unsafe {
            let page = bindings::alloc_pages(bindings::GFP_KERNEL | bindings::__GFP_ZERO, 0);
            assert!(!page.is_null());
            bindings::skb_add_rx_frag(skb.as_raw(), 0, page, 0, 100, 4096);
        }
        assert_eq!(skb.len(), 120);
        assert_eq!(skb.append(1, |_| ()), Err(ENOSPC));
        assert_eq!(skb.append(0, |_| ()), Err(ENOSPC));
        assert_eq!(skb.append_slice(&[]), Err(ENOSPC));
        Ok(())
    }

    #[test]
    fn a_key_may_be_longer_than_what_the_core_has() -> Result {
        let mut key = KVec::from_elem(0u8, 600, GFP_KERNEL)?;
        fill_rss_key(&mut key);
        assert_eq!(key[..256], key[256..512]);
        assert_eq!(key[..88], key[512..]);
        assert!(key.iter().any(|byte| *byte != 0));
        fill_rss_key(&mut []);
        Ok(())
    }

    #[test]
    fn frames_of_ip_behind_tags_of_customers_are_cut() {
        let (ip, ipv6, arp) = (0x0800, 0x86dd, 0x0806);
        for inner in [ip, ipv6] {
            assert!(is_ip_behind_tag(None, inner, inner));
            assert!(is_ip_behind_tag(None, PROTOCOL_VLAN, inner));
            assert!(is_ip_behind_tag(Some(PROTOCOL_VLAN), inner, inner));
            assert!(!is_ip_behind_tag(None, PROTOCOL_SERVICE_VLAN, inner));
            assert!(!is_ip_behind_tag(Some(PROTOCOL_SERVICE_VLAN), inner, inner));
        }
        assert!(!is_ip_behind_tag(None, PROTOCOL_VLAN, arp));
        assert!(!is_ip_behind_tag(None, arp, arp));
    }

    #[test]
    fn how_many_there_are_counts_as_it_was_said_first() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet16", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let raw = dev.as_raw();
            let size = table.get_rxfh_indir_size.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, and the device is registered.
            let first = unsafe { size(raw) };
            assert_eq!(first, 2);
            // SAFETY: RTNL is held, and the device is registered.
            assert_eq!(unsafe { size(raw) }, first);
            let mut entries = [0xaau32; 16];
            let mut key = [0xaau8; 41];
            let mut param: bindings::ethtool_rxfh_param = pin_init::zeroed();
            param.indir = entries.as_mut_ptr();
            param.key = key.as_mut_ptr();
            // SAFETY: RTNL is held, the device is registered, and there is room for more entries and bytes than it has.
            assert_eq!(unsafe { table.get_rxfh.ok_or(EINVAL)?(raw, &mut param) }, 0);
            assert_eq!(entries[..3], [5, 5, 0xaa]);
            assert_eq!(key[39..], [6, 0xaa]);
            Ok(())
        })
    }

    #[test]
    fn offloads_are_on_that_a_device_was_made_with() -> Result {
        let seen = seen()?;
        let own = Offloads::SCATTER_GATHER.with(Offloads::RX_CHECKSUM);
        let config = Config {
            offloads: own,
            tx_queues: 4,
            rx_queues: 4,
            ..config(c"kunitnet8")
        };
        let dev = Unregistered::new(&config, queues()?, Echo::new(&seen, 8))?.register()?;
        assert!(dev.offloads().has(own));
        assert!(!dev.offloads().has(Offloads::TCP_SEGMENTATION));
        assert!(!dev.offloads().has(own.with(Offloads::RX_HASH)));
        // So are queues, of which some can be left out.
        assert_eq!(dev.tx_queues(), 4);
        Rtnl::with(|rtnl| {
            assert_eq!(dev.set_queues(rtnl, 0), Err(EINVAL));
            assert_eq!(dev.set_queues(rtnl, 5), Err(EINVAL));
            dev.set_queues(rtnl, 3)
        })?;
        assert_eq!(dev.tx_queues(), 3);
        // Without a parent that it is registered for there is none.
        assert!(dev.parent().is_none());
        Ok(())
    }

    #[test]
    fn what_a_device_found_out_about_a_frame_goes_with_it() -> Result {
        let mut skb = empty(64)?;
        skb.append_slice(&[0; 40])?;
        assert_eq!((skb.vlan(), skb.segment_size()), (None, None));
        assert_eq!((skb.segments(), skb.fragments()), (1, 0));
        skb.set_vlan(0x6005);
        assert_eq!(skb.vlan(), Some(0x6005));
        assert_eq!(skb.checksum_to_finish(), None);
        // SAFETY: The buffer is ours; both are within its bytes.
        assert!(unsafe { bindings::skb_partial_csum_set(skb.as_raw(), 14, 16) });
        assert_eq!(skb.checksum_to_finish(), Some((14, 16)));
        Ok(())
    }

    #[test]
    fn ethtool_is_told_as_many_names_as_values() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet5", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let raw = dev.as_raw();
            let set = bindings::ethtool_stringset_ETH_SS_STATS;
            let count = table.get_sset_count.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, and the device is registered.
            let counts = unsafe { (count(raw, set as c_int), count(raw, set as c_int + 1)) };
            assert_eq!(counts.0, 3);
            assert!(counts.1 < 0);
            let mut names = [[0xaau8; 32]; 4];
            // SAFETY: RTNL is held, the device is registered, and there is room for one name more than it has.
            unsafe { table.get_strings.ok_or(EINVAL)?(raw, set, names.as_mut_ptr().cast()) };
            assert_eq!(&names[0][..6], b"first\0");
            assert_eq!(&names[1][..7], b"second\0");
            assert_eq!(&names[2], b"a_name_that_is_much_longer_than\0");
            assert_eq!(names[3], [0xaa; 32]);
            let mut head: bindings::ethtool_stats = Default::default();
            head.n_stats = 3;
            let mut values = [0xaau64; 4];
            let get = table.get_ethtool_stats.ok_or(EINVAL)?;
            // SAFETY: RTNL is held, the device is registered, and there is room for one value more than `head` says.
            unsafe { get(raw, &mut head, values.as_mut_ptr()) };
            assert_eq!(values, [1, 2, 3, 0xaa]);
            // Not where there is other room.
            head.n_stats = 2;
            let mut few = [0xaau64; 3];
            // SAFETY: RTNL is held, the device is registered, and there is room for one value more than `head` says.
            unsafe { get(raw, &mut head, few.as_mut_ptr()) };
            assert_eq!(few, [0xaa; 3]);
            let mut info: bindings::ethtool_drvinfo = pin_init::zeroed();
            // SAFETY: RTNL is held, the device is registered, and the structure valid.
            unsafe { table.get_drvinfo.ok_or(EINVAL)?(raw, &mut info) };
            assert_eq!(&info.driver[..10], b"net_kunit\0");
            assert_eq!(&info.fw_version[..3], b"17\0");
            Ok(())
        })
    }

    #[test]
    fn a_threshold_is_tuned_by_its_name_only() -> Result {
        let seen = seen()?;
        let dev = register(c"kunitnet6", &seen)?;
        // As the core calls them.
        Rtnl::with(|_| {
            let table = &Ops::<Echo>::of().ethtool;
            let mut tunable: bindings::ethtool_tunable = Default::default();
            tunable.id = bindings::tunable_id_ETHTOOL_TX_COPYBREAK;
            tunable.type_id = bindings::tunable_type_id_ETHTOOL_TUNABLE_U32;
            tunable.len = 4;
            let (set, get) = (
                table.set_tunable.ok_or(EINVAL)?,
                table.get_tunable.ok_or(EINVAL)?,
            );
            let value = 321u32;
            let mut back = 0u32;
            let to = core::ptr::from_ref(&value).cast();
            let from = core::ptr::from_mut(&mut back).cast();
            // SAFETY: RTNL is held, the device is registered, and the value has the four bytes that `tunable` says.
            assert_eq!(unsafe { set(dev.as_raw(), &tunable, to) }, 0);
            // SAFETY: RTNL is held, the device is registered, and there is room for the four bytes that `tunable` says.
            assert_eq!(unsafe { get(dev.as_raw(), &tunable, from) }, 0);
            tunable.len = 8;
            // SAFETY: RTNL is held, and the device is registered; what has another length is refused before anything is written.
            assert!(unsafe { get(dev.as_raw(), &tunable, from) } < 0);
            assert_eq!(back, 321);
            Ok(())
        })
    }

    /// Somebody who does something for a while, beside the test.
    #[pin_data]
    struct Beside {
        #[pin]
        held: Mutex<Option<Hold<Echo>>>,
        #[pin]
        handle: Mutex<Option<Handle<Taker>>>,
        sent: Atomic<u32>,
        done: Atomic<u32>,
        #[pin]
        work: Work<Beside>,
    }

    impl_has_work! {
        impl HasWork<Self> for Beside { self.work }
    }

    impl WorkItem for Beside {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            if let Some(hold) = this.held.lock().take() {
                fsleep(Delta::from_millis(20));
                // The data are there.
                assert_eq!(hold.seen.dropped.load(Relaxed), 0);
                this.done.store(1, Release);
                drop(hold);
            }
            let handle = this.handle.lock().take();
            if let Some(handle) = handle {
                // Sends until there is nothing to send by.
                while let Ok(skb) = frame(&handle, 2) {
                    match handle.send(skb) {
                        Err(ENODEV) => break,
                        Ok(()) => {
                            this.sent.fetch_add(1, Relaxed);
                        }
                        Err(_) => {}
                    }
                    handle.upper().taken.clear(DropReason::NotSpecified);
                    if this.sent.load(Relaxed) % 64 == 0 {
                        fsleep(Delta::from_millis(1));
                    }
                }
                this.done.store(1, Release);
            }
        }
    }

    fn beside() -> Result<Arc<Beside>> {
        Arc::pin_init(
            try_pin_init!(Beside {
                held <- new_mutex!(None),
                handle <- new_mutex!(None),
                sent: Atomic::new(0),
                done: Atomic::new(0),
                work <- new_work!("rust_net_test"),
            }),
            GFP_KERNEL,
        )
    }

    #[test]
    fn a_device_goes_after_all_who_hold_it() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet8", &seen)?;
        let beside = beside()?;
        *beside.held.lock() = Some(dev.hold().clone());
        assert!(queue.enqueue(beside.clone()).is_ok());
        drop(dev);
        assert_eq!(beside.done.load(Acquire), 1);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        Ok(())
    }

    #[test]
    fn a_device_goes_while_it_sends_and_receives() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet9", &seen)?;
        bring_up(&dev)?;
        let attachment = Attachment::new(c"kunitnet9", Taker::new())?;
        let vlan = attachment.handle().want(Want::Vlan(VLAN))?;
        let beside = beside()?;
        *beside.handle.lock() = Some(attachment.handle());
        assert!(queue.enqueue(beside.clone()).is_ok());
        assert!(becomes(|| beside.sent.load(Relaxed) > 500));
        drop(dev);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        assert_eq!(seen.vlans.load(Relaxed), 0);
        assert!(attachment.upper().has_seen(InterfaceEvent::Gone));
        queue.flush();
        assert_eq!(beside.done.load(Acquire), 1);
        assert!(Rtnl::with(|rtnl| attachment.handle().state(rtnl)).is_none());
        drop(vlan);
        Ok(())
    }

    #[test]
    fn an_attachment_ends_while_frames_arrive() -> Result {
        let seen = seen()?;
        let queue = OwnedQueue::unbound(c"rust_net_test")?;
        let dev = register(c"kunitnet10", &seen)?;
        bring_up(&dev)?;
        for _ in 0..5 {
            let attachment = Attachment::new(c"kunitnet10", Taker::new())?;
            let beside = beside()?;
            *beside.handle.lock() = Some(attachment.handle());
            assert!(queue.enqueue(beside.clone()).is_ok());
            assert!(becomes(|| beside.sent.load(Relaxed) > 100));
            drop(attachment);
            queue.flush();
            assert_eq!(beside.done.load(Acquire), 1);
        }
        drop(dev);
        assert_eq!(seen.dropped.load(Relaxed), 1);
        Ok(())
    }
}
