// SPDX-License-Identifier: GPL-2.0

//! Rings and regions of all sizes, and domains.

use super::pair::{
    all_access, check, expect, good, pattern, register, remote, usual_cq, with_pair, Pair, BUFFER,
    DEPTH, LIMITS,
};
use super::transfers::{many_requests_complete, sends_arrive};
use super::USUAL;
use crate::extension::register_send;
use crate::rdma::ulp::{Buffer, Cq, Lease, LocalMemory, Mr, Op, Pd, PollContext, QpLimits, Ticket};
use crate::rdma::WcStatus;
use kernel::prelude::*;

/// Deep enough for rings of many pages.
const LARGE_DEPTH: u32 = 1024;

/// Eight megabytes of completions: twice what the page allocator has in one piece.
const LARGE_CQ: u32 = 1 << 17;

/// Pages whose addresses just fill a page, one more, and so many that another one is half full or full.
pub(super) const MANY_PAGES: [usize; 4] = [512, 513, 600, 1024];

/// Rings that are larger than any piece of memory that can be had, and are gone through twice.
pub(super) fn rings_may_be_large(lease: &Lease) -> Result {
    let pd = Pd::new(lease)?;
    let cq = Cq::new(lease, LARGE_CQ, PollContext::WorkQueue)?;
    let limits = QpLimits {
        sends: LARGE_DEPTH,
        recvs: LARGE_DEPTH,
    };
    let pair = Pair::new(lease, &pd, &cq, limits, USUAL)?;
    // Each time eight times the usual depth.
    for _ in 0..2 * LARGE_DEPTH / DEPTH / 8 {
        many_requests_complete(&pair)?;
    }
    Ok(())
}

/// Writes the source to `offset` of a region of the far side, and looks for it there.
fn write_is_found(pair: &Pair, mr: &Mr, offset: usize, length: usize, seed: usize) -> Result {
    let byte = pattern(seed);
    pair.source.fill(&byte);
    good(pair.run(Op::RdmaWrite(remote(mr, offset)), 0..length)?)?;
    let moved = |index| byte(index - offset);
    check(
        mr.buffer()
            .first_difference(offset..offset + length, moved)
            .is_none(),
    )
}

/// A region of more pages than one table lists.
fn region_of_pages(pair: &Pair, pages: usize) -> Result {
    let length = pages * kernel::page::PAGE_SIZE;
    let mr = Mr::new(&pair.pd, Buffer::new(&pair.lease, length)?)?;
    register(&pair.far, &mr, all_access())?;
    // The last goes from the first page of addresses to the second, where there is one.
    let middle = MANY_PAGES[0] * kernel::page::PAGE_SIZE - BUFFER / 2;
    let offsets = [
        0,
        length / 3 + 5,
        length - BUFFER,
        middle.min(length - BUFFER),
    ];
    for (seed, offset) in offsets.into_iter().enumerate() {
        write_is_found(pair, &mr, offset, BUFFER, seed + pages)?;
    }
    // And out of it again.
    let [.., last] = offsets;
    let byte = pattern(offsets.len() - 1 + pages);
    pair.source.fill(|_| 0);
    good(pair.run(Op::RdmaRead(remote(&mr, last)), 0..BUFFER)?)?;
    check(pair.source.first_difference(0..BUFFER, byte).is_none())?;
    // This ends the connection.
    expect(
        pair.run(Op::RdmaWrite(remote(&mr, length - 8)), 0..16)?,
        WcStatus::RemoteAccess,
    )?;
    Ok(())
}

pub(super) fn regions_may_have_many_pages(lease: &Lease) -> Result {
    MANY_PAGES
        .into_iter()
        .try_for_each(|pages| with_pair(lease, USUAL, |pair| region_of_pages(pair, pages)))
}

/// A region may have room for more pages than one table lists, and be of few, of as many or of more.
pub(super) fn regions_may_have_room_for_more_pages(lease: &Lease) -> Result {
    with_pair(lease, USUAL, |pair| {
        let room = MANY_PAGES[3] as u32;
        for pages in [1, 3, MANY_PAGES[0], MANY_PAGES[1]] {
            let length = pages * kernel::page::PAGE_SIZE;
            let part = length.min(BUFFER);
            let mr = Mr::with_room(&pair.pd, Buffer::new(&pair.lease, length)?, room)?;
            register(&pair.far, &mr, all_access())?;
            for offset in [0, length - part] {
                write_is_found(pair, &mr, offset, part, pages + offset)?;
            }
        }
        Ok(())
    })
}

/// Regions in pages of every size that the device has, however little of one they are.
pub(super) fn regions_may_have_large_pages(lease: &Lease) -> Result {
    let device = lease.device();
    with_pair(lease, USUAL, |pair| {
        let sizes = (12..=30)
            .map(|shift| 1u32 << shift)
            .filter(|size| device.page_sizes() & u64::from(*size) != 0);
        for (seed, size) in sizes.enumerate() {
            let mr = Mr::with_page_size(&pair.pd, pair.sink.clone(), size)?;
            register(&pair.far, &mr, all_access())?;
            write_is_found(pair, &mr, 0, BUFFER, seed + 100)?;
        }
        Ok(())
    })
}

/// A queue pair takes no region of another domain: the device would end the connection.
pub(super) fn regions_of_other_domains_are_not_posted(lease: &Lease) -> Result {
    let (pd, other) = (Pd::new(lease)?, Pd::new(lease)?);
    let cq = usual_cq(lease)?;
    let pair = Pair::new(lease, &pd, &cq, LIMITS, USUAL)?;
    let mr = Mr::new(&other, pair.sink.clone())?;
    let refused = |posted: Result<Ticket<'_>>| check(posted.err() == Some(EINVAL));
    refused(
        pair.near
            .send(Op::reg_mr(&mr, all_access()), LocalMemory::None),
    )?;
    refused(pair.near.send(Op::Send, LocalMemory::Region(&mr, 0..16)))?;
    // Nor what it was not made for.
    let own = pair.near_region(1)?;
    let offer = register_send(&own, all_access(), None);
    refused(pair.near.send(offer, LocalMemory::None))?;
    // Nothing came of it.
    sends_arrive(&pair)
}
