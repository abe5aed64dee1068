// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Raw packets (chapter 21): a work request is a whole Ethernet frame, and a receive takes one that a
//! rule of flows is for.

use super::requester::Failure;
use super::unreliable::{gathered, receive_into, scatter, Sent};
use super::{count_received, keep, waits_in_line, Left};
use crate::core::{Core, ReceiveCompletion, Waited, MAX_LOG_MTU};
use crate::memory::{Host, Room, Way};
use crate::network::headers::{Headers, ADDRESSES, ETHERNET, TAG};
use crate::paging::Place;
use crate::qp::{self, QueuePair, QueuePairs};
use crate::queue::{ReceiveRequest, SendRequest};
use crate::roce::Medium;
use ferrite_abi::{CompletionStatus, COMPLETION_CHECKSUM, RAW_MAX_MTU};
use std::ops::RangeInclusive;

/// Bytes of the longest frame.
pub(super) const MAX_FRAME: usize = ETHERNET + TAG + RAW_MAX_MTU as usize;

/// Bytes of frames that may be sent, before it is known whether they have a tag.
pub(super) fn lengths(core: &Core) -> RangeInclusive<usize> {
    ETHERNET..=ETHERNET + TAG + core.raw_mtu()
}

/// Sends the frame of a work request.
pub(super) fn send(
    core: &mut Core,
    qp: &mut QueuePair,
    request: &SendRequest,
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Result<Sent, Failure> {
    let mut frame = std::mem::take(&mut core.transport.frame);
    frame.clear();
    frame.resize(request.length as usize, 0);
    let done = core.gather(&*host, qp.domain(), request, 0, &mut frame);
    let sent = match gathered(core, qp, done, host) {
        Ok(Some(left)) => Ok(left),
        Ok(None) => transmit(core, qp, &frame, turn, host),
        Err(failure) => Err(failure),
    };
    core.transport.frame = frame;
    sent
}

fn transmit(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &[u8],
    turn: Option<Way>,
    host: &mut dyn Host,
) -> Result<Sent, Failure> {
    let tag = if Headers::parse(frame).vlan.is_some() {
        TAG
    } else {
        0
    };
    if frame.len() > ETHERNET + tag + core.raw_mtu() {
        return Err(CompletionStatus::LocalLength.into());
    }
    let is_own = frame.starts_with(&core.config.mac);
    let is_group = frame.first().is_some_and(|byte| byte & 1 != 0);
    // What the device sends to itself does not come to the wire; a group is on both sides.
    let takers = if is_own || is_group {
        core.flows.takers(frame).len()
    } else {
        0
    };
    let comes_back = is_own || takers > 0;
    // Where nobody waits there is room for a packet of any length that a queue pair of another service
    // sends: who asked for more would not be told of less, and ask for ever.
    let most = frame.len().min(1 << MAX_LOG_MTU);
    for (way, goes) in [(Way::Loopback, comes_back), (Way::Wire, !is_own)] {
        if goes
            && core.allowance(way, most, 1, turn, host).data == 0
            && core.room_on(way, host) != Room::Stuck
        {
            return Ok(Sent::Later(way));
        }
    }
    core.counters.tx_packets += 1;
    core.counters.tx_bytes += frame.len() as u64;
    qp.counters.tx_packets += 1;
    qp.counters.tx_bytes += frame.len() as u64;
    if comes_back {
        let cost = core.cost_of_coming_back(frame, takers);
        core.loopback.push(frame, cost, Medium::Wire);
    }
    if !is_own && core.link_up {
        host.transmit_ordinary(frame);
    }
    Ok(Sent::All)
}

/// Gives a frame to the queue pairs that it is for by the rules; false where there are none.
pub(crate) fn receive(
    core: &mut Core,
    qps: &mut QueuePairs,
    frame: &[u8],
    host: &mut dyn Host,
) -> bool {
    let takers = core.flows.takers(frame);
    if takers.is_empty() {
        return false;
    }
    core.counters.rx_packets += 1;
    core.counters.rx_bytes += frame.len() as u64;
    core.work += takers.len() as u64;
    for qpn in takers {
        let Some(qp) = qps.get_mut(qpn) else {
            continue;
        };
        count_received(qp, frame);
        let delivered = if waits_in_line(core, qp) {
            Err(Left::Waits(Place::Last(None)))
        } else {
            deliver(core, qp, frame, host)
        };
        keep(core, qp, frame, None, delivered);
    }
    true
}

/// A frame for `qp`.
pub(super) fn deliver(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &[u8],
    host: &mut dyn Host,
) -> Result<(), Left> {
    if !qp.may_receive() || !(ADDRESSES..=MAX_FRAME).contains(&frame.len()) {
        return Err(Left::Dropped);
    }
    receive_into(core, qp, host, |core, qp, receive, host| {
        place(core, qp, frame, receive, host)
    })
}

/// Places a frame in a receive that was taken for it, and completes that.
fn place(
    core: &mut Core,
    qp: &mut QueuePair,
    frame: &[u8],
    (receive, waited): (&ReceiveRequest, Waited),
    host: &mut dyn Host,
) -> Result<(), Left> {
    let mut completion = ReceiveCompletion::failed(receive, CompletionStatus::LocalLength, 0);
    if frame.len() as u64 <= receive.capacity {
        let place = Place::Last(None);
        scatter(core, qp, &[frame], (receive, waited), place, host)?;
        completion.status = CompletionStatus::Success;
        completion.byte_count = frame.len() as u32;
        if Headers::parse(frame).checksums_good(frame) {
            completion.flags |= COMPLETION_CHECKSUM;
        }
    }
    if core.complete_receive(qp, &completion, host).is_err() {
        qp::fail(core, qp, host);
        return Err(Left::Dropped);
    }
    Ok(())
}
