// SPDX-License-Identifier: GPL-2.0

//! Frames where a device finds them: those that it sends, and pages for those that it receives.
//!
//! Memory is mapped while the driver of the device is bound. What is mapped when it is not any more stays what it is for
//! ever: nobody can say who uses it.
//!
//! C header: [`include/linux/dma-mapping.h`](srctree/include/linux/dma-mapping.h)

use super::{DropReason, Skb};
use crate::bindings;
use core::mem::ManuallyDrop;
use core::ptr::{self, NonNull};
use kernel::device;
use kernel::devres::Devres;
use kernel::page::PAGE_SIZE;
use kernel::prelude::*;

/// A driver is bound as long as this can be had.
struct Bound;

/// A device that memory is mapped for.
struct Mapper {
    /// Counted by `bound`, which is of the same device.
    dev: NonNull<bindings::device>,
    bound: Devres<Bound>,
}

// SAFETY: The pointer is used with the functions of DMA only, which any task may call, and the device is counted by
// `bound`, which is `Send`.
unsafe impl Send for Mapper {}
// SAFETY: The pointer is used with the functions of DMA only, which may be called by any number of tasks at once.
unsafe impl Sync for Mapper {}

impl Mapper {
    fn new(dev: &device::Device<device::Bound>) -> Result<Self> {
        Ok(Self {
            // `device::Device` is a transparent wrapper of `struct device`.
            dev: NonNull::from(dev).cast(),
            bound: Devres::new(dev, Bound)?,
        })
    }

    /// Calls `f` with the device, if its driver is bound, which it then stays until `f` returns.
    #[inline]
    fn with<R>(&self, f: impl FnOnce(*mut bindings::device) -> R) -> Option<R> {
        self.bound.try_access_with(|_| f(self.dev.as_ptr()))
    }
}

/// A piece of a frame, as its device finds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Where it is on the bus.
    pub address: u64,
    /// How many bytes.
    pub length: u32,
}

/// Most pieces of a frame.
pub const MOST_PIECES: usize = 18;

/// A frame that is mapped, or none.
struct Sent {
    skb: Option<Skb>,
    pieces: [Piece; MOST_PIECES],
    count: u8,
}

/// Frames that a device sends: places for one each, where it is mapped.
///
/// # Invariants
///
/// Where a place has a frame its first `count` pieces are mapped for reading by the device, the first one by
/// `dma_map_single` and the others by `dma_map_page`.
pub struct SentFrames {
    mapper: Mapper,
    places: KVVec<Sent>,
}

impl SentFrames {
    /// So many places that are empty. Sleeps.
    pub fn new(dev: &device::Device<device::Bound>, places: usize) -> Result<Self> {
        let mut made = KVVec::with_capacity(places, GFP_KERNEL)?;
        for _ in 0..places {
            let empty = Sent {
                skb: None,
                pieces: [Piece::default(); MOST_PIECES],
                count: 0,
            };
            made.push(empty, GFP_KERNEL)?;
        }
        Ok(Self {
            mapper: Mapper::new(dev)?,
            places: made,
        })
    }

    /// Maps a frame in at most `most` pieces, of which there are no more than [`MOST_PIECES`], in a place that is empty;
    /// gives the frame back where it cannot be. One of more pieces is put in one first, which may fail for want of
    /// memory. May be called from any context but interrupts.
    pub fn put(&mut self, place: usize, mut skb: Skb, most: usize) -> Result<&[Piece], Skb> {
        let most = most.min(MOST_PIECES);
        let Some(sent) = self.places.get_mut(place).filter(|sent| sent.skb.is_none()) else {
            return Err(skb);
        };
        if most == 0 || ((skb.fragments() >= most || skb.has_list()) && skb.linearise().is_err()) {
            return Err(skb);
        }
        let mapped = self.mapper.with(|dev| map(dev, &skb, &mut sent.pieces));
        match mapped.flatten() {
            Some(count) => {
                // INVARIANT: Mapped just now.
                sent.count = count;
                sent.skb = Some(skb);
                Ok(&sent.pieces[..usize::from(count)])
            }
            None => Err(skb),
        }
    }

    /// Leaves all frames where they are, for ever: nobody can say whether the device reads them. Who waits for them, and
    /// what they hold on to, is let go. May be called from any context but interrupts.
    pub fn abandon(mut self) {
        for skb in self
            .places
            .iter_mut()
            .filter_map(|place| place.skb.as_mut())
        {
            skb.let_go();
        }
        let _ = ManuallyDrop::new(self);
    }

    /// Takes the frame out of a place, if there is one. The device has let go of it.
    pub fn take(&mut self, place: usize) -> Option<Skb> {
        let sent = self.places.get_mut(place)?;
        let skb = sent.skb.take()?;
        let pieces = &sent.pieces[..usize::from(sent.count)];
        // SAFETY: By the type invariant these are mapped so. The place is empty now.
        let unmapped = self.mapper.with(|dev| unsafe { unmap(dev, pieces) });
        if unmapped.is_none() {
            // Its memory stays where the device may find it.
            let mut skb = skb;
            skb.let_go();
            let _ = ManuallyDrop::new(skb);
            return None;
        }
        Some(skb)
    }
}

impl Drop for SentFrames {
    fn drop(&mut self) {
        for place in 0..self.places.len() {
            if let Some(skb) = self.take(place) {
                // Nobody has said that it was sent.
                skb.discard(DropReason::NotReady);
            }
        }
    }
}

/// Maps all of a frame, which has fewer fragments than there is room for pieces; nothing where it cannot be.
fn map(dev: *mut bindings::device, skb: &Skb, pieces: &mut [Piece; MOST_PIECES]) -> Option<u8> {
    let linear = skb.linear();
    if linear.is_empty() {
        // What an Ethernet frame begins with is in one piece.
        return None;
    }
    let direction = bindings::dma_data_direction_DMA_TO_DEVICE;
    let start = linear.as_ptr().cast_mut().cast();
    // SAFETY: The device is bound, as the caller has it from `Mapper::with`. The bytes are the kernel's own memory, are
    // not written by the device, and stay until they are unmapped, as the frame does.
    let address = unsafe { bindings::dma_map_single(dev, start, linear.len(), direction) };
    // SAFETY: The device is valid, and the address is what mapping gave.
    if unsafe { bindings::dma_mapping_error(dev, address) } != 0 {
        return None;
    }
    pieces[0] = Piece {
        address,
        length: linear.len() as u32,
    };
    let mut count = 1;
    for fragment in 0..skb.fragments() {
        let room = pieces.get_mut(count);
        // SAFETY: The buffer is valid, and has that fragment; the device is bound, as the caller has it from
        // `Mapper::with`.
        let (address, length) = unsafe {
            let fragment = fragment as c_uint;
            (
                bindings::skb_frag_dma_map_at(dev, skb.as_raw(), fragment),
                bindings::skb_frag_size_at(skb.as_raw(), fragment),
            )
        };
        // SAFETY: The device is valid, and the address is what mapping gave.
        let failed = unsafe { bindings::dma_mapping_error(dev, address) } != 0;
        match room {
            Some(piece) if !failed => *piece = Piece { address, length },
            _ => {
                // SAFETY: These were mapped above, the first one as a single and the others as pages.
                unsafe { unmap(dev, &pieces[..count]) };
                return None;
            }
        }
        count += 1;
    }
    Some(count as u8)
}

/// # Safety
///
/// `dev` must be bound, and `pieces` be those of a frame that were mapped for it, the first one by `dma_map_single` and
/// the others by `dma_map_page`; they are not any more after this.
unsafe fn unmap(dev: *mut bindings::device, pieces: &[Piece]) {
    let direction = bindings::dma_data_direction_DMA_TO_DEVICE;
    for (number, piece) in pieces.iter().enumerate() {
        let length = piece.length as usize;
        // SAFETY: The caller vouches for device and mapping.
        unsafe {
            if number == 0 {
                bindings::dma_unmap_single(dev, piece.address, length, direction);
            } else {
                bindings::dma_unmap_page(dev, piece.address, length, direction);
            }
        }
    }
}

/// A page that the device may write.
struct Posted {
    page: NonNull<bindings::page>,
    address: u64,
}

/// Pages that a device receives in: places for one each.
///
/// # Invariants
///
/// Each page that is there is ours alone, and mapped for writing by the device, as a whole.
pub struct ReceivePages {
    mapper: Mapper,
    places: KVVec<Option<Posted>>,
}

// SAFETY: Pages belong to no task.
unsafe impl Send for ReceivePages {}
// SAFETY: What is offered by shared reference looks at nothing but addresses.
unsafe impl Sync for ReceivePages {}

impl ReceivePages {
    /// Bytes of a page.
    pub const LENGTH: usize = PAGE_SIZE;

    /// So many places that are empty. Sleeps.
    pub fn new(dev: &device::Device<device::Bound>, places: usize) -> Result<Self> {
        let mut made = KVVec::with_capacity(places, GFP_KERNEL)?;
        for _ in 0..places {
            made.push(None, GFP_KERNEL)?;
        }
        Ok(Self {
            mapper: Mapper::new(dev)?,
            places: made,
        })
    }

    /// Sees to it that a place has a page; gives where that is on the bus. `ENOMEM` where there is none to be had now.
    /// May be called from any context.
    pub fn fill(&mut self, place: usize) -> Result<u64> {
        self.fill_with(place, bindings::GFP_ATOMIC | bindings::__GFP_NOWARN)
    }

    /// The same for who can wait for memory. Sleeps.
    pub fn fill_patiently(&mut self, place: usize) -> Result<u64> {
        self.fill_with(place, bindings::GFP_KERNEL | bindings::__GFP_NOWARN)
    }

    fn fill_with(&mut self, place: usize, flags: bindings::gfp_t) -> Result<u64> {
        let posted = self.places.get_mut(place).ok_or(EINVAL)?;
        if let Some(posted) = posted {
            return Ok(posted.address);
        }
        // SAFETY: Pages may be had with these flags wherever the caller is.
        let page = unsafe { bindings::alloc_pages(flags, 0) };
        let page = NonNull::new(page).ok_or(ENOMEM)?;
        let direction = bindings::dma_data_direction_DMA_FROM_DEVICE;
        let mapped = self.mapper.with(|dev| {
            // SAFETY: The device is bound. The page is ours, and stays until it is unmapped.
            let address =
                unsafe { bindings::dma_map_page(dev, page.as_ptr(), 0, PAGE_SIZE, direction) };
            // SAFETY: The device is valid, and the address is what mapping gave.
            let failed = unsafe { bindings::dma_mapping_error(dev, address) } != 0;
            (!failed).then_some(address)
        });
        let Some(address) = mapped.flatten() else {
            // SAFETY: It is ours, and known to nobody.
            unsafe { bindings::__free_pages(page.as_ptr(), 0) };
            return Err(ENOMEM);
        };
        // INVARIANT: Had and mapped just now.
        *posted = Some(Posted { page, address });
        Ok(address)
    }

    /// Appends the first `length` bytes of the page in a place to a frame, by a copy: the page stays. `EINVAL` where there
    /// is none, or where it is shorter; as [`Skb::append`] else.
    pub fn copy(&mut self, place: usize, length: usize, skb: &mut Skb) -> Result {
        let posted = self.places.get(place).and_then(Option::as_ref);
        let posted = posted.filter(|_| length <= PAGE_SIZE).ok_or(EINVAL)?;
        let direction = bindings::dma_data_direction_DMA_FROM_DEVICE;
        let copied = self.mapper.with(|dev| {
            // SAFETY: By the type invariant the page is mapped so, for this device, which is bound.
            unsafe {
                bindings::dma_sync_single_for_cpu(dev, posted.address, length, direction);
            }
            let result = skb.append(length, |room| {
                // SAFETY: By the type invariant the page is ours, so that it has an address and `PAGE_SIZE` bytes; `room`
                // has as many as are copied, elsewhere. Should the device write meanwhile, which it is not to, it is not
                // known what is copied: no reference to the page is made, and any bytes are a frame.
                unsafe {
                    let from = bindings::page_address(posted.page.as_ptr()).cast::<u8>();
                    ptr::copy_nonoverlapping(from, room.as_mut_ptr(), length);
                }
            });
            // SAFETY: By the type invariant the page is mapped so, for this device, which is bound.
            unsafe {
                bindings::dma_sync_single_for_device(dev, posted.address, length, direction);
            }
            result
        });
        copied.ok_or(ENODEV)?
    }

    /// Makes bytes `from..to` of the page in a place the end of a frame, which gets the page. `EINVAL` where there is none,
    /// or where it is shorter, `ENOSPC` where the frame has as many pieces as it can have, `EBUSY` where others have the same
    /// bytes.
    pub fn attach(&mut self, place: usize, from: usize, to: usize, skb: &mut Skb) -> Result {
        let slot = self.places.get_mut(place).ok_or(EINVAL)?;
        if from > to || to > PAGE_SIZE || slot.is_none() {
            return Err(EINVAL);
        }
        if skb.is_cloned() {
            // The list of its pieces is theirs, too.
            return Err(EBUSY);
        }
        let fragments = skb.fragments();
        if fragments >= Skb::MOST_FRAGMENTS {
            return Err(ENOSPC);
        }
        let Some(posted) = slot.take() else {
            return Err(EINVAL);
        };
        let direction = bindings::dma_data_direction_DMA_FROM_DEVICE;
        let unmapped = self.mapper.with(|dev| {
            // SAFETY: By the type invariant it is mapped so, for this device, which is bound; it is taken out.
            unsafe { bindings::dma_unmap_page(dev, posted.address, PAGE_SIZE, direction) }
        });
        // Where that is not so the page is left where the device may find it.
        unmapped.ok_or(ENODEV)?;
        // SAFETY: The buffer is ours alone, and there is room for one fragment more. The page passes to it.
        unsafe {
            bindings::skb_add_rx_frag(
                skb.as_raw(),
                fragments as c_int,
                posted.page.as_ptr(),
                from as c_int,
                (to - from) as c_int,
                PAGE_SIZE as c_uint,
            );
        }
        Ok(())
    }

    /// Copies the start of the page in a place, which has at least as many bytes as `to`. The device has let go of it.
    pub fn peek(&self, place: usize, to: &mut [u8]) -> Result {
        let posted = self.places.get(place).and_then(Option::as_ref);
        let posted = posted.filter(|_| to.len() <= PAGE_SIZE).ok_or(EINVAL)?;
        let direction = bindings::dma_data_direction_DMA_FROM_DEVICE;
        let copied = self.mapper.with(|dev| {
            // SAFETY: By the type invariant the page is mapped so, for this device, which is bound. It has that many
            // bytes, and no reference to them is made.
            unsafe {
                bindings::dma_sync_single_for_cpu(dev, posted.address, to.len(), direction);
                let from = bindings::page_address(posted.page.as_ptr()).cast::<u8>();
                ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
            }
        });
        copied.ok_or(ENODEV)
    }
}

impl Drop for ReceivePages {
    fn drop(&mut self) {
        let direction = bindings::dma_data_direction_DMA_FROM_DEVICE;
        for place in &mut self.places {
            let Some(posted) = place.take() else {
                continue;
            };
            // SAFETY: By the type invariant it is mapped so, for this device, which is bound; it is taken out.
            let unmapped = self.mapper.with(|dev| unsafe {
                bindings::dma_unmap_page(dev, posted.address, PAGE_SIZE, direction);
            });
            if unmapped.is_some() {
                // SAFETY: By the type invariant it is ours alone, and nobody knows it any more.
                unsafe { bindings::__free_pages(posted.page.as_ptr(), 0) };
            }
        }
    }
}
