// SPDX-License-Identifier: GPL-2.0

//! Socket buffers: frames on their way.
//!
//! C header: [`include/linux/skbuff.h`](srctree/include/linux/skbuff.h)

use crate::bindings;
use crate::net::{Device, Driver, EthernetHeader, PROTOCOL_VLAN};
use core::mem::ManuallyDrop;
use core::ptr::{self, NonNull};
use kernel::error::{from_err_ptr, to_result};
use kernel::prelude::*;
use kernel::types::Opaque;

/// A socket buffer with one owner.
///
/// Dropping it counts as the frame being dropped ([`Skb::consume`] does not).
///
/// # Invariants
///
/// The pointer is a valid `sk_buff` of which this value owns a count. Nobody else touches the buffer for as long as it does,
/// whoever has a count, too. It is in no list.
pub struct Skb(NonNull<bindings::sk_buff>);

// SAFETY: A socket buffer belongs to no task.
unsafe impl Send for Skb {}
// SAFETY: What is offered by shared reference only reads, and nobody writes, for want of another owner.
unsafe impl Sync for Skb {}

/// Why a frame was dropped, for those who trace it (`skb:kfree_skb`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum DropReason {
    /// For a reason that has no name.
    NotSpecified = bindings::skb_drop_reason_SKB_DROP_REASON_NOT_SPECIFIED,
    /// There is no memory.
    NoMemory = bindings::skb_drop_reason_SKB_DROP_REASON_NOMEM,
    /// It is larger than what it is to go through.
    TooLarge = bindings::skb_drop_reason_SKB_DROP_REASON_PKT_TOO_BIG,
    /// Its headers make no sense.
    BadHeader = bindings::skb_drop_reason_SKB_DROP_REASON_DEV_HDR,
    /// The device cannot take it.
    NotReady = bindings::skb_drop_reason_SKB_DROP_REASON_DEV_READY,
    /// A ring or queue is full.
    QueueFull = bindings::skb_drop_reason_SKB_DROP_REASON_FULL_RING,
    /// A checksum of it could not be computed.
    Checksum = bindings::skb_drop_reason_SKB_DROP_REASON_SKB_CSUM,
    /// It could not be cut into segments.
    Segmentation = bindings::skb_drop_reason_SKB_DROP_REASON_SKB_GSO_SEG,
}

/// What is known of the checksums in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Nothing: they are to be checked.
    None,
    /// They were checked.
    Unnecessary,
    /// The sum of the whole frame was computed by who received it.
    Complete,
    /// One is to be computed before the frame leaves the machine.
    Partial,
}

impl Skb {
    /// Notes when it was sent, for those who want to know: by a driver, before its device can see it.
    pub fn tx_timestamp(&mut self) {
        // SAFETY: The buffer is ours, and nobody else looks at it while it may be cloned.
        unsafe { bindings::skb_tx_timestamp(self.as_raw()) };
    }

    /// A socket buffer for a frame that `dev` has received, empty, with room for `len` bytes, aligned for the
    /// headers of protocols. May be called from any context.
    pub fn for_device<D: Driver>(dev: &Device<D>, len: usize) -> Result<Self> {
        // SAFETY: The reference keeps the device.
        unsafe { Self::for_raw_device(dev.as_raw(), len) }
    }

    /// # Safety
    ///
    /// `dev` must be null or valid. The result knows it, but does not use it without another being set.
    pub(super) unsafe fn for_raw_device(
        dev: *mut bindings::net_device,
        len: usize,
    ) -> Result<Self> {
        // `NET_IP_ALIGN`: what follows the 14 bytes of an Ethernet header is aligned, wherever that is worth it.
        let align = bindings::NET_IP_ALIGN as usize;
        let room = len.checked_add(align).ok_or(EINVAL)?;
        let room = u32::try_from(room).map_err(|_| EINVAL)?;
        // SAFETY: The caller vouches for the device.
        let raw = unsafe { bindings::__netdev_alloc_skb(dev, room, bindings::GFP_ATOMIC) };
        // INVARIANT: Made just now.
        let mut skb = Self(NonNull::new(raw).ok_or(ENOMEM)?);
        skb.reserve(align)?;
        Ok(skb)
    }

    /// # Safety
    ///
    /// `raw` must be a valid socket buffer, in no list, whose only count passes to the result.
    pub(super) unsafe fn from_raw(raw: *mut bindings::sk_buff) -> Option<Self> {
        // INVARIANT: The caller passes its count on.
        NonNull::new(raw).map(Self)
    }

    /// Gives the count away.
    pub(super) fn into_raw(self) -> *mut bindings::sk_buff {
        ManuallyDrop::new(self).0.as_ptr()
    }

    pub(super) fn as_raw(&self) -> *mut bindings::sk_buff {
        self.0.as_ptr()
    }

    /// Bytes of the frame, wherever they are.
    #[expect(clippy::len_without_is_empty)]
    #[inline]
    pub fn len(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_length(self.as_raw()) as usize }
    }

    /// Bytes that are in one piece, from the start.
    #[inline]
    fn linear_len(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_headlen(self.as_raw()) as usize }
    }

    /// Room before the first byte.
    pub fn headroom(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_headroom(self.as_raw()) as usize }
    }

    /// Room behind the last byte; none where the frame is in several pieces.
    pub fn tailroom(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_tailroom(self.as_raw()) as usize }
    }

    /// Whether others have the same bytes, which then nobody may write.
    pub(super) fn is_cloned(&self) -> bool {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_cloned(self.as_raw()) != 0 }
    }

    /// The first bytes of the frame, as many as are in one piece.
    pub fn linear(&self) -> &[u8] {
        let len = self.linear_len();
        // SAFETY: By the type invariant the buffer is valid: so many bytes are at `data`. They are written by
        // `&mut self` only, as clones do not write.
        unsafe { core::slice::from_raw_parts(bindings::skb_data(self.as_raw()), len) }
    }

    /// Makes room before the first byte of a buffer that is empty.
    pub fn reserve(&mut self, len: usize) -> Result {
        if self.len() != 0 || self.is_cloned() || len > self.tailroom() {
            return Err(EINVAL);
        }
        // SAFETY: The buffer is valid and empty, and there is that much room.
        unsafe { bindings::skb_reserve(self.as_raw(), len as c_int) };
        Ok(())
    }

    /// Appends `len` bytes, which `fill` writes; what it leaves is what was in that memory before. `ENOSPC` where
    /// there is no such room, `EBUSY` where others have the same bytes.
    pub fn append<R>(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        if self.is_cloned() {
            return Err(EBUSY);
        }
        // Behind a frame in several pieces there is none, not even for nothing.
        if self.linear_len() != self.len() || len > self.tailroom() {
            return Err(ENOSPC);
        }
        // SAFETY: The buffer is valid, in one piece, and there is that much room.
        let room = unsafe { bindings::skb_put(self.as_raw(), len as c_uint) };
        // SAFETY: `skb_put` returns the start of `len` bytes. The memory is the kernel's allocator's: the compiler
        // knows nothing of what is in it, and any value will do. Nobody else has the buffer.
        Ok(fill(unsafe {
            core::slice::from_raw_parts_mut(room.cast(), len)
        }))
    }

    /// Appends bytes.
    pub fn append_slice(&mut self, bytes: &[u8]) -> Result {
        self.append(bytes.len(), |room| room.copy_from_slice(bytes))
    }

    /// Copies `to.len()` bytes of the frame from `offset` on, wherever they are. `EFAULT` where it has fewer.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result {
        if to.len() > self.len() || offset > self.len() - to.len() {
            return Err(EFAULT);
        }
        // SAFETY: The buffer is valid and has those bytes; `to` has room for them. Both fit in an `int`, as the
        // length of a buffer does.
        to_result(unsafe {
            bindings::skb_copy_bits(
                self.as_raw(),
                offset as c_int,
                to.as_mut_ptr().cast(),
                to.len() as c_int,
            )
        })
    }

    /// The Ethernet header at the start of the frame; `None` where that is too short.
    pub fn ethernet_header(&self) -> Option<EthernetHeader> {
        let mut bytes = [0; EthernetHeader::SIZE];
        self.copy_to(0, &mut bytes).ok()?;
        Some(EthernetHeader::from_bytes(&bytes))
    }

    /// The queue of the device that it is to be sent by.
    pub fn queue(&self) -> u16 {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_get_queue_mapping(self.as_raw()) }
    }

    /// What is known of its checksums.
    pub fn checksum(&self) -> Checksum {
        // SAFETY: By the type invariant the buffer is valid.
        match u32::from(unsafe { bindings::skb_ip_summed(self.as_raw()) }) {
            bindings::CHECKSUM_UNNECESSARY => Checksum::Unnecessary,
            bindings::CHECKSUM_COMPLETE => Checksum::Complete,
            bindings::CHECKSUM_PARTIAL => Checksum::Partial,
            _ => Checksum::None,
        }
    }

    /// The device has checked the checksums of a frame that it received. No effect on one that is to be sent and
    /// has one to be computed.
    pub fn set_checked(&mut self) {
        if self.checksum() != Checksum::Partial {
            // SAFETY: By the type invariant the buffer is valid and ours.
            unsafe {
                bindings::skb_set_ip_summed(self.as_raw(), bindings::CHECKSUM_UNNECESSARY as u8)
            };
        }
    }

    /// Most fragments behind what is in one piece.
    pub const MOST_FRAGMENTS: usize = bindings::MAX_SKB_FRAGS as usize;

    /// Fragments that it has.
    pub fn fragments(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_nr_frags(self.as_raw()) as usize }
    }

    /// Whether part of it is in other buffers.
    pub fn has_list(&self) -> bool {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe { bindings::skb_has_frag_list(self.as_raw()) }
    }

    /// Puts all of it in one piece. `ENOMEM` where there is none for that, `EBUSY` where somebody else has a count, whose
    /// data would move.
    pub fn linearise(&mut self) -> Result {
        // SAFETY: By the type invariant the buffer is valid.
        if unsafe { bindings::skb_shared(self.as_raw()) } {
            return Err(EBUSY);
        }
        // SAFETY: By the type invariant the buffer is valid and ours.
        to_result(unsafe { bindings::skb_linearize(self.as_raw()) })
    }

    /// Where a checksum is to be computed: from which byte of the frame on, and where it is stored, from there on.
    /// Nothing where none is.
    pub fn checksum_to_finish(&self) -> Option<(u16, u16)> {
        if self.checksum() != Checksum::Partial {
            return None;
        }
        // SAFETY: By the type invariant the buffer is valid, and of a checksum that is to be computed it has the place.
        let (start, offset) = unsafe {
            (
                bindings::skb_checksum_start_offset(self.as_raw()),
                bindings::skb_csum_offset(self.as_raw()),
            )
        };
        Some((u16::try_from(start).ok()?, offset))
    }

    /// Bytes of data in each of the frames that it is to be cut into; nothing where it is one frame.
    pub fn segment_size(&self) -> Option<u16> {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe {
            bindings::skb_is_gso(self.as_raw()).then(|| bindings::skb_gso_size(self.as_raw()))
        }
    }

    /// Frames that it becomes on the wire.
    pub fn segments(&self) -> usize {
        // SAFETY: By the type invariant the buffer is valid.
        usize::from(unsafe { bindings::skb_gso_segs(self.as_raw()) }).max(1)
    }

    /// The tag that is beside it, 802.1Q's, with all its bits.
    pub fn vlan(&self) -> Option<u16> {
        // SAFETY: By the type invariant the buffer is valid.
        unsafe {
            let present = bindings::skb_vlan_tag_present(self.as_raw())
                && u16::from_be(bindings::skb_vlan_proto(self.as_raw())) == PROTOCOL_VLAN;
            present.then(|| bindings::skb_vlan_tag_get(self.as_raw()))
        }
    }

    /// Puts an 802.1Q tag beside it, which the device has taken out.
    pub fn set_vlan(&mut self, bits: u16) {
        // SAFETY: By the type invariant the buffer is valid and ours.
        unsafe { bindings::__vlan_hwaccel_put_tag(self.as_raw(), PROTOCOL_VLAN.to_be(), bits) };
    }

    /// The device has computed a hash over its addresses, and over its ports where `ports` says so.
    pub fn set_hash(&mut self, hash: u32, ports: bool) {
        let kind = if ports {
            bindings::pkt_hash_types_PKT_HASH_TYPE_L4
        } else {
            bindings::pkt_hash_types_PKT_HASH_TYPE_L3
        };
        // SAFETY: By the type invariant the buffer is valid and ours.
        unsafe { bindings::skb_set_hash(self.as_raw(), hash, kind) };
    }

    /// It was received by that queue of its device.
    pub fn set_received_by(&mut self, queue: u16) {
        // SAFETY: By the type invariant the buffer is valid and ours.
        unsafe { bindings::skb_record_rx_queue(self.as_raw(), queue) };
    }

    /// Computes the checksum that is to be computed before the frame leaves the machine, if there is one.
    pub fn complete_checksum(&mut self) -> Result {
        if self.checksum() != Checksum::Partial {
            return Ok(());
        }
        // SAFETY: By the type invariant the buffer is valid and ours.
        to_result(unsafe { bindings::skb_checksum_help(self.as_raw()) })
    }

    /// Another owner of the same bytes, which neither can write any more.
    ///
    /// The buffer notes that it has a clone: hence by who owns it alone.
    pub fn try_clone(&mut self) -> Result<Self> {
        // SAFETY: By the type invariant the buffer is valid, and nobody else looks at it now.
        let raw = unsafe { bindings::skb_clone(self.as_raw(), bindings::GFP_ATOMIC) };
        // INVARIANT: Made just now.
        NonNull::new(raw).map(Self).ok_or(ENOMEM)
    }

    /// The frames that this is: what was merged when it was received, or is to be cut when it is sent, is cut;
    /// a VLAN tag that is beside it is put inside, checksums are computed. The bytes of each are those that a wire
    /// would see. May be called from any context but interrupts.
    pub fn into_frames(self) -> Result<Frames> {
        let mut skb = self;
        // SAFETY: By the type invariant the buffer is valid.
        if unsafe { bindings::skb_vlan_tag_present(skb.as_raw()) } {
            if skb.linear_len() < EthernetHeader::SIZE {
                skb.discard(DropReason::BadHeader);
                return Err(EINVAL);
            }
            // SAFETY: The count passes to the function, which passes that of its result to us, or frees it. The
            // frame begins with an Ethernet header.
            skb = unsafe { Self::from_raw(bindings::__vlan_hwaccel_push_inside(skb.into_raw())) }
                .ok_or(ENOMEM)?;
        }
        // SAFETY: By the type invariant the buffer is valid.
        if !unsafe { bindings::skb_is_gso(skb.as_raw()) } {
            if let Err(error) = skb.complete_checksum() {
                skb.discard(DropReason::Checksum);
                return Err(error);
            }
            // INVARIANT: A list of one, which is ours.
            return Ok(Frames {
                next: skb.into_raw(),
            });
        }
        // Pieces are welcome: the bytes are copied anyway.
        let features = 1u64 << bindings::NETIF_F_SG_BIT;
        // SAFETY: The buffer is valid and ours, and its first byte is that of its Ethernet header. The function
        // checks all headers behind it: openvswitch gives it frames of others as well.
        let list = unsafe { bindings::__skb_gso_segment(skb.as_raw(), features, false) };
        let list = match from_err_ptr(list) {
            Ok(list) => list,
            Err(error) => {
                skb.discard(DropReason::Segmentation);
                return Err(error);
            }
        };
        if list.is_null() {
            // Nothing to be cut.
            return Ok(Frames {
                next: skb.into_raw(),
            });
        }
        skb.consume();
        // INVARIANT: The list of segments is ours.
        Ok(Frames { next: list })
    }

    /// Lets go of all that it holds on to: of its sender, who may wait for room, or to be told that his pages are his again
    /// (zero copy), its connection and its route. For one that is never freed, and keeps its pages. By who owns it alone,
    /// anywhere but in interrupts.
    pub(super) fn let_go(&mut self) {
        // SAFETY: By the type invariant the buffer is valid and ours; each of these can be done to any buffer, once or more.
        unsafe {
            bindings::skb_let_go_of_pages(self.as_raw());
            bindings::skb_orphan(self.as_raw());
            bindings::nf_reset_ct(self.as_raw());
            bindings::skb_dst_drop(self.as_raw());
        }
    }

    /// Frees the buffer of a frame that got where it should.
    pub fn consume(self) {
        // `consume_skb` is a function only where there are tracepoints.
        // SAFETY: By the type invariant we own a count, which passes to the function. A buffer may be freed
        // without a socket.
        unsafe {
            bindings::sk_skb_reason_drop(
                ptr::null_mut(),
                self.into_raw(),
                bindings::skb_drop_reason_SKB_CONSUMED,
            );
        }
    }

    /// Drops the frame, for a reason.
    pub fn discard(self, reason: DropReason) {
        // SAFETY: By the type invariant we own a count, which passes to the function. A buffer may be dropped
        // without a socket.
        unsafe {
            bindings::sk_skb_reason_drop(ptr::null_mut(), self.into_raw(), reason as u32);
        }
    }
}

impl Drop for Skb {
    fn drop(&mut self) {
        // SAFETY: By the type invariant we own a count, which passes to the function; a buffer may be dropped
        // without a socket.
        unsafe {
            let reason = DropReason::NotSpecified as u32;
            bindings::sk_skb_reason_drop(ptr::null_mut(), self.as_raw(), reason);
        }
    }
}

/// Frames that were one, see [`Skb::into_frames`].
///
/// # Invariants
///
/// `next` is null or the first of a list of socket buffers that is linked by `next`, and of which each has one
/// count, which is ours.
pub struct Frames {
    next: *mut bindings::sk_buff,
}

// SAFETY: Socket buffers belong to no task.
unsafe impl Send for Frames {}

impl Iterator for Frames {
    type Item = Skb;

    fn next(&mut self) -> Option<Skb> {
        let first = NonNull::new(self.next)?;
        // SAFETY: By the type invariant the buffer is valid, and the first of a list.
        unsafe {
            self.next = bindings::skb_next(first.as_ptr());
            bindings::skb_mark_not_on_list(first.as_ptr());
        }
        // INVARIANT: By the type invariant of the list it has one count; it is in no list any more.
        Some(Skb(first))
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        self.for_each(drop);
    }
}

/// A queue of socket buffers, for those who take them later. May be used from any context.
///
/// # Invariants
///
/// `inner` is an initialised `sk_buff_head`; each buffer in it has one count, which is the queue's.
#[pin_data(PinnedDrop)]
pub struct SkbQueue {
    #[pin]
    inner: Opaque<bindings::sk_buff_head>,
}

// SAFETY: Socket buffers belong to no task, and neither does the lock of the queue.
unsafe impl Send for SkbQueue {}
// SAFETY: The functions that are used take the lock of the queue, or read one word.
unsafe impl Sync for SkbQueue {}

impl SkbQueue {
    /// Returns an initialiser for a queue that is empty.
    pub fn new() -> impl PinInit<Self> {
        // INVARIANT: The queue is initialised here.
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::sk_buff_head| {
                // SAFETY: `slot` points to memory for a queue.
                unsafe { bindings::skb_queue_head_init(slot) };
            }),
        })
    }

    /// How many there are, now.
    pub fn len(&self) -> usize {
        // SAFETY: By the type invariant the queue is initialised.
        unsafe { bindings::skb_queue_len_lockless(self.inner.get()) as usize }
    }

    /// Whether there is none, now.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds one at the end.
    pub fn push(&self, skb: Skb) {
        // INVARIANT: The count passes to the queue.
        // SAFETY: By the type invariants the queue is initialised, and the buffer valid and in no list.
        unsafe { bindings::skb_queue_tail(self.inner.get(), skb.into_raw()) }
    }

    /// Takes the first one.
    pub fn pop(&self) -> Option<Skb> {
        // SAFETY: By the type invariant the queue is initialised, and the count of what is taken out passes to us.
        unsafe { Skb::from_raw(bindings::skb_dequeue(self.inner.get())) }
    }

    /// Drops all, for a reason.
    pub fn clear(&self, reason: DropReason) {
        while let Some(skb) = self.pop() {
            skb.discard(reason);
        }
    }
}

#[pinned_drop]
impl PinnedDrop for SkbQueue {
    fn drop(self: Pin<&mut Self>) {
        self.clear(DropReason::NotReady);
    }
}
