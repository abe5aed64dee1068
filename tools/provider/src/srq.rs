// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Shared receive queues.
//!
//! Entries are taken by the device in the order of the ring, but complete in any order; so each
//! carries a number that its completion returns.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::{offset_of, size_of};
use core::ptr;
use core::sync::atomic::{fence, Ordering};

use ferrite_abi::{
    queue_doorbell, Plain, ReceiveHeader, Sge, SrqRecord, UverbsContextResponse, UverbsSrqRequest,
    UverbsSrqResponse, BLOCK_SIZE, DOORBELL_SRQ, FEATURE_RESIZE_SRQ, FEATURE_SRQ, FEATURE_XRC,
    RQ_MIN_LOG_STRIDE,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::fail;
use crate::heap;
use crate::memory::{Buffer, Doorbells, SpinLock};
use crate::post::{list, Cursor};
use crate::private::*;
use crate::protection::Pd;
use crate::sys::*;
use crate::table::Inserted;

/// A shared receive queue.
#[repr(C)]
pub struct Srq {
    verbs: UnsafeCell<verbs_srq>,
    srqn: u32,
    doorbells: Doorbells,
    state: SpinLock<State>,
}

#[derive(Clone, Copy)]
struct Geometry {
    entries: u32,
    stride: usize,
    max_sge: u32,
    record_offset: usize,
}

struct State {
    geometry: Geometry,
    buffer: Buffer,
    /// Entries written, free-running.
    producer: u32,
    /// Numbers that no entry has. With those that one has they are as many as the ring has places.
    /// Has room for all numbers.
    free: Vec<u32>,
    /// By number.
    receives: Vec<Receive>,
    /// Numbers out of use, since the ring was longer once. Has room for all numbers.
    retired: Vec<u32>,
}

/// What is remembered of an entry.
#[derive(Clone, Copy, Default)]
struct Receive {
    /// What the consumer called it.
    wr_id: u64,
    /// It is not known to be done.
    outstanding: bool,
}

impl State {
    fn new(geometry: Geometry, buffer: Buffer) -> Result<Self, c_int> {
        let entries = geometry.entries;
        Ok(Self {
            geometry,
            buffer,
            producer: 0,
            free: heap::vector(entries as usize, |n| entries - 1 - n as u32)?,
            receives: heap::vector(entries as usize, |_| Receive::default())?,
            retired: Vec::new(),
        })
    }

    /// Receives posted and not known to be done.
    fn outstanding(&self) -> usize {
        self.geometry.entries as usize - self.free.len()
    }

    /// Makes room for what [`State::move_to`] needs.
    fn prepare_to_move(&mut self, geometry: &Geometry) -> Result<(), c_int> {
        let numbers = self.receives.len().max(geometry.entries as usize);
        let receives = numbers - self.receives.len();
        heap::reserve(&mut self.receives, receives)?;
        let free = numbers - self.free.len();
        heap::reserve(&mut self.free, free)?;
        let retired = numbers - self.retired.len();
        heap::reserve(&mut self.retired, retired)
    }

    /// Goes over to another ring, which has room for what is outstanding; gives the old one.
    /// [`State::prepare_to_move`] went before.
    fn move_to(&mut self, geometry: Geometry, buffer: Buffer) -> Buffer {
        let numbers = geometry.entries as usize - self.outstanding();
        while self.free.len() > numbers {
            self.retired.extend(self.free.pop());
        }
        while self.free.len() < numbers {
            let number = self.retired.pop().unwrap_or_else(|| {
                self.receives.push(Receive::default());
                self.receives.len() as u32 - 1
            });
            self.free.push(number);
        }
        self.geometry = geometry;
        core::mem::replace(&mut self.buffer, buffer)
    }
}

impl Geometry {
    fn new(wanted: &ibv_srq_attr, limits: &UverbsContextResponse) -> Result<Self, c_int> {
        if wanted.max_wr == 0 || wanted.max_sge > limits.max_sge {
            return Err(libc::EINVAL);
        }
        let entries = wanted
            .max_wr
            .checked_next_power_of_two()
            .filter(|&entries| entries <= 1 << limits.rq_max_log_entries.min(24))
            .ok_or(libc::EINVAL)?;
        let stride = (size_of::<ReceiveHeader>() + wanted.max_sge as usize * size_of::<Sge>())
            .next_power_of_two()
            .max(1 << RQ_MIN_LOG_STRIDE);
        let room = (stride - size_of::<ReceiveHeader>()) / size_of::<Sge>();
        Ok(Self {
            entries,
            stride,
            max_sge: (room as u32).min(limits.max_sge),
            record_offset: (entries as usize * stride).next_multiple_of(BLOCK_SIZE),
        })
    }

    fn length(&self) -> usize {
        self.record_offset + size_of::<SrqRecord>()
    }

    /// What to tell the kernel of a ring in `buffer`.
    fn request(&self, buffer: &Buffer) -> UverbsSrqRequest {
        UverbsSrqRequest {
            buffer: buffer.address(),
            length: buffer.length() as u64,
            ring_offset: 0,
            record_offset: self.record_offset as u32,
            log_entries: self.entries.trailing_zeros() as u8,
            log_stride: self.stride.trailing_zeros() as u8,
            reserved: [0; 3],
        }
    }
}

impl Srq {
    /// # Safety
    ///
    /// `srq` is a live shared receive queue of this provider.
    pub(crate) unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Srq {
        // SAFETY: the `ibv_srq` is at the start of a `Srq`.
        unsafe { &*srq.cast::<Srq>() }
    }

    fn boxed(geometry: Geometry, doorbells: Doorbells, buffer: Buffer) -> Result<Box<Self>, c_int> {
        heap::boxed(Self {
            verbs: UnsafeCell::new(verbs_srq {
                srq: ibv_srq::default(),
                srq_type: IBV_SRQT_BASIC,
                xrcd: ptr::null_mut(),
                cq: ptr::null_mut(),
                srq_num: 0,
            }),
            srqn: 0,
            doorbells,
            state: SpinLock::new(State::new(geometry, buffer)?),
        })
    }

    /// The entry with this number is done: what its consumer called it. The number is free again.
    pub(crate) fn done(&self, id: u32) -> u64 {
        let mut state = self.state.lock();
        match state.receives.get_mut(id as usize) {
            Some(receive) if receive.outstanding => {
                receive.outstanding = false;
                let wr_id = receive.wr_id;
                state.free.push(id);
                wr_id
            }
            // Only a broken device says a number that it does not have.
            _ => 0,
        }
    }

    /// Writes an entry. One has a number only if another of those before it was completed, and
    /// then there is a free place in the ring, which is as long as there are numbers: all entries
    /// that the device has not taken have one.
    fn write(&self, state: &mut State, wr: &ibv_recv_wr) -> Result<(), c_int> {
        // SAFETY: by the consumer, the list has that many entries.
        let entries = unsafe { list(wr.sg_list, wr.num_sge) }?;
        let geometry = state.geometry;
        if entries.len() > geometry.max_sge as usize {
            return Err(libc::EINVAL);
        }
        let id = state.free.pop().ok_or(libc::ENOMEM)?;
        state.receives[id as usize] = Receive {
            wr_id: wr.wr_id,
            outstanding: true,
        };
        let slot = (state.producer & (geometry.entries - 1)) as usize;
        let header = ReceiveHeader {
            sge_count: entries.len() as u32,
            id,
            reserved: [0; 2],
        };
        // SAFETY: the entry is inside the ring, has room for the header and `max_sge` entries, and
        // the device has taken what was there.
        unsafe {
            let mut cursor = Cursor(state.buffer.base().add(slot * geometry.stride));
            cursor.put(header.as_bytes());
            cursor.put_from(entries.as_ptr().cast(), size_of_val(entries));
        }
        state.producer = state.producer.wrapping_add(1);
        Ok(())
    }

    /// Shows all entries to the device.
    fn publish(&self, state: &State) {
        let word = |field: usize| state.buffer.word(state.geometry.record_offset + field);
        // As for a send queue: entries, index, fence, wake word.
        word(offset_of!(SrqRecord, producer)).store(state.producer, Ordering::Release);
        fence(Ordering::SeqCst);
        if word(offset_of!(SrqRecord, wake)).load(Ordering::Relaxed) != 0 {
            self.doorbells.ring(DOORBELL_SRQ, queue_doorbell(self.srqn));
        }
    }
}

/// A queue that the kernel does not know of yet, and what to tell the kernel of it.
///
/// # Safety
///
/// `pd` is a live domain of this provider.
unsafe fn prepare(
    pd: *mut ibv_pd,
    attr: &ibv_srq_attr,
    feature: u64,
) -> Result<(Box<Srq>, UverbsSrqRequest), c_int> {
    // SAFETY: by the caller; the context of a live domain is open.
    let context = unsafe { Context::of((*pd).context) };
    if context.limits.features & feature == 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let geometry = Geometry::new(attr, &context.limits)?;
    // SAFETY: by the caller.
    let buffer = unsafe { Pd::buffer(pd, geometry.length()) }?;
    let request = geometry.request(&buffer);
    let srq = Srq::boxed(geometry, context.doorbells, buffer)?;
    Ok((srq, request))
}

pub(crate) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: the consumer passes its attributes.
    let attr = unsafe { &mut *attr };
    // SAFETY: the consumer passes a live domain.
    let (mut srq, private) = match unsafe { prepare(pd, &attr.attr, FEATURE_SRQ) } {
        Ok(prepared) => prepared,
        Err(errno) => return fail(errno),
    };
    let mut request = Request {
        header: ib_uverbs_cmd_hdr::default(),
        core: ib_uverbs_create_srq::default(),
        private,
    };
    let mut response = Response {
        core: ib_uverbs_create_srq_resp::default(),
        private: UverbsSrqResponse::zeroed(),
    };
    // SAFETY: request and response are laid out as libibverbs expects, the sizes are theirs, and
    // `srq` is not shared yet.
    let result = unsafe {
        ibv_cmd_create_srq(
            pd,
            srq.verbs.get().cast(),
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        return fail(result);
    }
    srq.srqn = response.private.srqn;
    let geometry = srq.state.lock().geometry;
    attr.attr.max_wr = geometry.entries;
    attr.attr.max_sge = geometry.max_sge;
    Box::into_raw(srq).cast()
}

pub(crate) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: the consumer passes its attributes.
    let attr = unsafe { &mut *attr };
    let kind = if attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 {
        attr.srq_type
    } else {
        IBV_SRQT_BASIC
    };
    if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 || attr.pd.is_null() {
        return fail(libc::EINVAL);
    }
    match kind {
        IBV_SRQT_BASIC => {
            let mut plain = ibv_srq_init_attr {
                srq_context: attr.srq_context,
                attr: attr.attr,
            };
            // SAFETY: the consumer passes a live domain.
            let srq = unsafe { create_srq(attr.pd, &mut plain) };
            attr.attr = plain.attr;
            srq
        }
        // SAFETY: the consumer passes an open context, and live objects.
        IBV_SRQT_XRC => unsafe { create_extended(context, attr) },
        _ => fail(libc::EOPNOTSUPP),
    }
}

/// Makes the queue of extended connections.
///
/// # Safety
///
/// `context` is open, `attr` what its user asked for, with a live domain.
unsafe fn create_extended(
    context: *mut ibv_context,
    attr: &mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: by the caller.
    let prepared = unsafe { prepare(attr.pd, &attr.attr, FEATURE_XRC) };
    let (srq, private) = match prepared {
        Ok(prepared) => prepared,
        Err(errno) => return fail(errno),
    };
    let mut request = Request {
        header: ib_uverbs_cmd_hdr::default(),
        core: ib_uverbs_create_xsrq::default(),
        private,
    };
    let mut response = Response {
        core: ib_uverbs_create_srq_resp::default(),
        private: UverbsSrqResponse::zeroed(),
    };
    // SAFETY: by the caller.
    let table = unsafe { &*Context::of(context).extended_srqs };
    let asked = *attr;
    let srq = Box::into_raw(srq);
    // SAFETY: request and response are laid out as libibverbs expects, the sizes are theirs, and
    // `srq` is not shared yet.
    let result = unsafe {
        ibv_cmd_create_srq_ex(
            context,
            (*srq).verbs.get(),
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        // SAFETY: `srq` is the box from above; the kernel did not take it.
        drop(unsafe { Box::from_raw(srq) });
        return fail(result);
    }
    let srqn = response.private.srqn;
    // SAFETY: nobody else has `srq` yet.
    unsafe { (*srq).srqn = srqn };
    let instead = match table.insert(srqn, srq) {
        Ok(Inserted::Yes) => {
            // SAFETY: the queue was made a moment ago and nobody can have destroyed it.
            let geometry = unsafe { (*srq).state.lock().geometry };
            attr.attr.max_wr = geometry.entries;
            attr.attr.max_sge = geometry.max_sge;
            return srq.cast();
        }
        // Another thread is about to forget the old queue of this number: see `qp::create`.
        Ok(Inserted::Taken) => {
            *attr = asked;
            // SAFETY: by the caller.
            unsafe { create_extended(context, attr) }
        }
        Err(errno) => fail(errno),
    };
    // SAFETY: the queue was made a moment ago and nobody has it. The number of an error stays in
    // `errno`.
    unsafe {
        let errno = *libc::__errno_location();
        ibv_cmd_destroy_srq(srq.cast());
        drop(Box::from_raw(srq));
        *libc::__errno_location() = errno;
    }
    instead
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the consumer passes a live queue and room for the answer.
    unsafe { *number = Srq::of(srq).srqn };
    0
}

pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    let mut request = Request::<ib_uverbs_open_xrcd, Nothing>::default();
    let mut response = Response::<ib_uverbs_open_xrcd_resp, Nothing>::default();
    let xrcd = match heap::boxed(verbs_xrcd {
        xrcd: ibv_xrcd::default(),
        comp_mask: 0,
        handle: 0,
    }) {
        Ok(xrcd) => Box::into_raw(xrcd),
        Err(errno) => return fail(errno),
    };
    // SAFETY: request and response are laid out as libibverbs expects and the sizes are theirs.
    let result = unsafe {
        ibv_cmd_open_xrcd(
            context,
            xrcd,
            size_of::<verbs_xrcd>() as c_int,
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
            ptr::from_mut(&mut response).cast(),
            size_of_val(&response),
        )
    };
    if result != 0 {
        // SAFETY: `xrcd` is the box from above; nobody else got it.
        drop(unsafe { Box::from_raw(xrcd) });
        return fail(result);
    }
    xrcd.cast()
}

pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let xrcd = xrcd.cast::<verbs_xrcd>();
    // SAFETY: libibverbs passes a domain of ours.
    let result = unsafe { ibv_cmd_close_xrcd(xrcd) };
    if result == 0 {
        // SAFETY: it came from `open_xrcd` and is gone for the kernel too.
        drop(unsafe { Box::from_raw(xrcd) });
    }
    result
}

pub(crate) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    if mask as u32 & IBV_SRQ_MAX_WR != 0 {
        // SAFETY: libibverbs passes a live queue, the consumer its attributes.
        return unsafe { resize_srq(srq, attr, mask) };
    }
    let mut request = Request::<ib_uverbs_modify_srq, Nothing>::default();
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    unsafe {
        ibv_cmd_modify_srq(
            srq,
            attr,
            mask,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    }
}

/// Gives a queue another ring. The lock is held while the device moves, so that nobody posts to the
/// one it leaves; not while memory is got and given back, which may be the program's own matter.
///
/// # Safety
///
/// `srq` is live.
unsafe fn resize_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: by the caller; the context of a live queue is open.
    let (this, context, wanted) =
        unsafe { (Srq::of(srq), Context::of((*srq).context), (*attr).max_wr) };
    if context.limits.features & FEATURE_RESIZE_SRQ == 0 {
        return libc::EOPNOTSUPP;
    }
    let wanted = ibv_srq_attr {
        max_wr: wanted,
        // The same in every ring of a queue.
        max_sge: this.state.lock().geometry.max_sge,
        srq_limit: 0,
    };
    let geometry = match Geometry::new(&wanted, &context.limits) {
        Ok(geometry) => geometry,
        Err(errno) => return errno,
    };
    // SAFETY: the domain of a live queue is live.
    let buffer = match unsafe { Pd::buffer((*srq).pd, geometry.length()) } {
        Ok(buffer) => buffer,
        Err(errno) => return errno,
    };
    let mut state = this.state.lock();
    if state.outstanding() > geometry.entries as usize {
        return libc::EINVAL;
    }
    if let Err(errno) = state.prepare_to_move(&geometry) {
        return errno;
    }
    let producer = geometry.record_offset + offset_of!(SrqRecord, producer);
    buffer
        .word(producer)
        .store(state.producer, Ordering::Release);
    let mut request = Request {
        header: ib_uverbs_cmd_hdr::default(),
        core: ib_uverbs_modify_srq::default(),
        private: geometry.request(&buffer),
    };
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    let result = unsafe {
        ibv_cmd_modify_srq(
            srq,
            attr,
            mask,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    };
    // The one that is not in use any more.
    let left = if result == 0 {
        // The device has copied what it had not taken and left the old ring.
        state.move_to(geometry, buffer)
    } else {
        buffer
    };
    drop(state);
    drop(left);
    result
}

pub(crate) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let mut request = Request::<ib_uverbs_query_srq, Nothing>::default();
    // SAFETY: the request is laid out as libibverbs expects and the size is its own.
    let result = unsafe {
        ibv_cmd_query_srq(
            srq,
            attr,
            ptr::from_mut(&mut request).cast(),
            size_of_val(&request),
        )
    };
    if result == 0 {
        // SAFETY: the consumer passes a live queue and room for the answer.
        unsafe {
            let geometry = Srq::of(srq).state.lock().geometry;
            (*attr).max_wr = geometry.entries;
            (*attr).max_sge = geometry.max_sge;
        }
    }
    result
}

pub(crate) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, whose context is open.
    let (this, table) = unsafe { (Srq::of(srq), &*Context::of((*srq).context).extended_srqs) };
    // No lock is held: this waits until all events of the queue are acknowledged.
    // SAFETY: as above.
    let result = unsafe { ibv_cmd_destroy_srq(srq) };
    if result != 0 {
        return result;
    }
    // SAFETY: the fields are set once, when the queue is made; a completion queue cannot be
    // destroyed while a shared receive queue uses it.
    let cq = unsafe {
        let verbs = this.verbs.get();
        ((*verbs).srq_type == IBV_SRQT_XRC).then(|| Cq::of((*verbs).cq))
    };
    if let Some(cq) = cq {
        // The table has it as long as there is an entry to find it for.
        cq.forget_shared(this.srqn);
        table.remove(this.srqn, this);
    }
    // SAFETY: it came from this module; kernel, device and table have let go of it.
    drop(unsafe { Box::from_raw(srq.cast::<Srq>()) });
    0
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let srq = unsafe { Srq::of(srq) };
    let mut result = 0;
    let mut state = srq.state.lock();
    let before = state.producer;
    // SAFETY: the consumer passes a list of work requests that ends with null.
    while let Some(request) = unsafe { wr.as_ref() } {
        if let Err(errno) = srq.write(&mut state, request) {
            // SAFETY: the consumer passes a place for the work request that failed.
            unsafe { *bad = wr };
            result = errno;
            break;
        }
        wr = request.next;
    }
    if state.producer != before {
        srq.publish(&state);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> UverbsContextResponse {
        UverbsContextResponse {
            max_sge: 16,
            rq_max_log_entries: 15,
            ..UverbsContextResponse::zeroed()
        }
    }

    fn attr(max_wr: u32, max_sge: u32) -> ibv_srq_attr {
        ibv_srq_attr {
            max_wr,
            max_sge,
            srq_limit: 0,
        }
    }

    #[test]
    fn numbers_return_in_any_order() {
        let mut page = vec![0u64; 512];
        // SAFETY: the page outlives the queue.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let geometry = Geometry::new(&attr(3, 1), &limits()).unwrap();
        let buffer = Buffer::new(geometry.length()).unwrap();
        let srq = Srq::boxed(geometry, doorbells, buffer).unwrap();
        let post = |wr_id| {
            let request = ibv_recv_wr {
                wr_id,
                ..Default::default()
            };
            srq.write(&mut srq.state.lock(), &request)
        };
        // What an entry does not use is zero, whatever stood there before.
        // SAFETY: the ring is at the start of the buffer, and the record comes after it.
        unsafe { ptr::write_bytes(srq.state.lock().buffer.base(), 0xff, geometry.record_offset) };
        let id = |index: u32| {
            let state = srq.state.lock();
            let slot = (index & 3) as usize * state.geometry.stride;
            // SAFETY: the slot is inside the ring and aligned.
            let header =
                unsafe { ptr::read(state.buffer.base().add(slot).cast::<ReceiveHeader>()) };
            let expected = ReceiveHeader {
                id: header.id,
                ..ReceiveHeader::zeroed()
            };
            assert_eq!(header, expected);
            header.id
        };
        for wr_id in 0..4 {
            assert_eq!(post(wr_id), Ok(()));
        }
        assert_eq!(post(9), Err(libc::ENOMEM));
        // The device has taken all; the third is done first.
        let ids: Vec<u32> = (0..4).map(id).collect();
        assert_eq!(srq.done(ids[2]), 2);
        assert_eq!(post(4), Ok(()));
        assert_eq!(id(4), ids[2]);
        assert_eq!(post(9), Err(libc::ENOMEM));
        assert_eq!(srq.done(ids[0]), 0);
        assert_eq!(srq.done(id(4)), 4);
        assert_eq!((post(5), post(6)), (Ok(()), Ok(())));
        assert_eq!(srq.done(1 << 20), 0, "a number that was never given");
    }

    #[test]
    fn a_device_that_completes_a_receive_twice_does_no_harm() {
        let mut page = vec![0u64; 512];
        // SAFETY: the page outlives the queue.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let geometry = Geometry::new(&attr(4, 1), &limits()).unwrap();
        let buffer = Buffer::new(geometry.length()).unwrap();
        let srq = Srq::boxed(geometry, doorbells, buffer).unwrap();
        let request = ibv_recv_wr {
            wr_id: 7,
            ..Default::default()
        };
        for _ in 0..4 {
            assert_eq!(srq.write(&mut srq.state.lock(), &request), Ok(()));
        }
        assert_eq!((srq.done(2), srq.done(2), srq.done(2)), (7, 0, 0));
        assert_eq!(srq.write(&mut srq.state.lock(), &request), Ok(()));
        assert_eq!(
            srq.write(&mut srq.state.lock(), &request),
            Err(libc::ENOMEM)
        );
    }

    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut page = vec![0u64; 512];
        // SAFETY: the page outlives the queue.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let geometry = Geometry::new(&attr(4, 1), &limits()).unwrap();
        let buffer = Buffer::new(geometry.length()).unwrap();
        let srq = Srq::boxed(geometry, doorbells, buffer).unwrap();
        srq.state.lock().producer = u32::MAX - 5;
        for wr_id in 0..40u64 {
            let request = ibv_recv_wr {
                wr_id,
                ..Default::default()
            };
            let index = srq.state.lock().producer;
            assert_eq!(srq.write(&mut srq.state.lock(), &request), Ok(()));
            let state = srq.state.lock();
            assert_eq!(state.producer, index.wrapping_add(1));
            let slot = (index & 3) as usize * state.geometry.stride;
            let id = state.buffer.word(slot + 4).load(Ordering::Relaxed);
            srq.publish(&state);
            let record = state.geometry.record_offset;
            let producer = record + offset_of!(SrqRecord, producer);
            let shown = state.buffer.word(producer).load(Ordering::Relaxed);
            assert_eq!(shown, state.producer);
            drop(state);
            assert_eq!(srq.done(id), wr_id);
        }
    }

    #[test]
    fn without_memory_no_queue_is_made_and_none_is_changed() {
        let geometry = |entries| Geometry::new(&attr(entries, 1), &limits()).unwrap();
        let mut page = vec![0u64; 512];
        // SAFETY: the page outlives the queues.
        let doorbells = unsafe { Doorbells::new(page.as_mut_ptr().cast()) };
        let failures = heap::tests::with_little_memory(|| {
            let geometry = geometry(8);
            Srq::boxed(geometry, doorbells, Buffer::new(geometry.length())?)
        });
        assert_eq!(failures, 3);
        let mut state =
            State::new(geometry(8), Buffer::new(geometry(8).length()).unwrap()).unwrap();
        let failures = heap::tests::with_little_memory(|| state.prepare_to_move(&geometry(64)));
        assert_eq!(failures, 2);
        assert_eq!((state.free.len(), state.receives.len()), (8, 8));
        // What was made room for is enough.
        let larger = Buffer::new(geometry(64).length()).unwrap();
        heap::tests::with_little_memory(|| state.prepare_to_move(&geometry(64)));
        let mut larger = Some(larger);
        assert_eq!(
            heap::tests::with_little_memory(|| {
                larger
                    .take()
                    .map(|larger| drop(state.move_to(geometry(64), larger)))
                    .ok_or(libc::EIO)
            }),
            0
        );
        assert_eq!(state.free.len(), 64);
    }

    #[test]
    fn numbers_stay_different_however_the_ring_changes() {
        let state = |entries| {
            let geometry = Geometry::new(&attr(entries, 1), &limits()).unwrap();
            (geometry, Buffer::new(geometry.length()).unwrap())
        };
        let (geometry, buffer) = state(8);
        let mut queue = State::new(geometry, buffer).unwrap();
        let mut held: Vec<u32> = (0..3).filter_map(|_| queue.free.pop()).collect();
        for entries in [4, 16, 4, 64, 32] {
            let (geometry, buffer) = state(entries);
            queue.prepare_to_move(&geometry).unwrap();
            drop(queue.move_to(geometry, buffer));
            assert_eq!(queue.outstanding(), held.len());
            // Take all there are, give some back.
            while let Some(number) = queue.free.pop() {
                assert!(!held.contains(&number));
                assert!((number as usize) < queue.receives.len());
                held.push(number);
            }
            assert_eq!(held.len(), entries as usize);
            queue.free.extend(held.drain(1..entries as usize - 2));
            assert_eq!(queue.outstanding(), 3);
        }
    }

    #[test]
    fn sizes_are_met_or_refused() {
        for (wr, sge) in [(1, 0), (5, 1), (100, 3), (1 << 15, 16)] {
            let geometry = Geometry::new(&attr(wr, sge), &limits()).unwrap();
            assert!(geometry.entries >= wr && geometry.max_sge >= sge);
            assert!(16 + 16 * geometry.max_sge as usize <= geometry.stride);
        }
        for (wr, sge) in [(0, 1), ((1 << 15) + 1, 1), (u32::MAX, 1), (1, 17)] {
            let refused = Geometry::new(&attr(wr, sge), &limits()).err();
            assert_eq!(refused, Some(libc::EINVAL));
        }
    }
}
