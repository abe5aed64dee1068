// SPDX-License-Identifier: GPL-2.0

//! Frames on their way between the core and the channels.

use super::{
    receive::Arrived,
    redirection,
    repairs::Repairs,
    transmit::Refused,
    Interface, //
};
use crate::{
    abi,
    kernel_ext::barrier::mb,
    net::{
        netdev_warn,
        Device,
        DropReason,
        Napi,
        NapiOps,
        Offloads,
        PollContext,
        SegmentOps,
        Skb,
        TimeoutOps,
        ToSegment,
        Xmit, //
    },
};
use kernel::sync::atomic::Relaxed;

/// Frames that were sent and are given back at a time.
const RECLAIMED: usize = 16;
/// How often that is done in one poll.
const RECLAIMS: usize = 64;

/// Gives a frame to the device, or drops it.
pub(super) fn send(dev: &Device<Interface>, mut skb: Skb) -> Xmit {
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

impl Device<Interface> {
    /// Has what receives looked after that has too few buffers, after a while.
    #[cold]
    fn retry_refill(&self) {
        Repairs::refill_later(self);
    }
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
