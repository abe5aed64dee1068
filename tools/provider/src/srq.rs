// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Shared receive queues: making, changing, destroying, posting.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr;

use ferrite_abi::{
    queue_doorbell, Plain, UverbsSrqRequest, UverbsSrqResponse, DOORBELL_SRQ, FEATURE_RESIZE_SRQ,
    FEATURE_SRQ,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::fail;
use crate::heap;
use crate::memory::{Doorbells, SpinLock};
use crate::object::{self, or_null};
use crate::post::each;
use crate::private::*;
use crate::srq_ring::{SrqRing, SrqState};
use crate::sys::*;
use crate::xrc;

/// A shared receive queue.
#[repr(C)]
pub struct Srq {
    pub(crate) verbs: UnsafeCell<verbs_srq>,
    pub(crate) srqn: u32,
    doorbells: Doorbells,
    state: SpinLock<SrqState>,
}

impl Srq {
    /// # Safety
    ///
    /// `srq` is a live shared receive queue of this provider.
    pub(crate) unsafe fn of<'a>(srq: *mut ibv_srq) -> &'a Srq {
        // SAFETY: by the caller it came from `create_srq` or `create_srq_ex`, where the `ibv_srq` is at
        // the start of a `Srq`; after that it is shared only.
        unsafe { &*srq.cast::<Srq>() }
    }

    fn boxed(ring: SrqRing, doorbells: Doorbells) -> Result<Box<Self>, c_int> {
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
            state: SpinLock::new(SrqState::new(ring)?),
        })
    }

    /// The entry with this number is done: what its consumer called it.
    pub(crate) fn done(&self, id: u32) -> u64 {
        self.state.lock().done(id)
    }

    /// Tells a consumer what the queue can take.
    pub(crate) fn tell_capacity(&self, attr: &mut ibv_srq_attr) {
        let receives = self.state.lock().ring.receives;
        attr.max_wr = receives.ring.entries;
        attr.max_sge = receives.max_sge;
    }
}

/// A queue that the kernel does not know of yet, and what to tell the kernel of it.
///
/// # Safety
///
/// `pd` is a live domain of this provider, and lives as long as the queue.
pub(crate) unsafe fn prepare(
    pd: *mut ibv_pd,
    attr: &ibv_srq_attr,
    feature: u64,
) -> Result<(Box<Srq>, UverbsSrqRequest), c_int> {
    // SAFETY: the domain is live, by the caller; its context is open.
    let context = unsafe { Context::of((*pd).context) };
    if context.limits.features & feature == 0 {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: the domain is live and stays so, by the caller.
    let ring = unsafe { SrqRing::new(attr, &context.limits, pd) }?;
    let request = ring.request();
    Ok((Srq::boxed(ring, context.doorbells)?, request))
}

pub(crate) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: the consumer passes a live domain and its attributes.
    or_null(unsafe { create(pd, &mut *attr) })
}

/// Makes a queue; `attr.attr` becomes what it can take.
///
/// # Safety
///
/// `pd` is a live domain, and `attr` what its user asked for.
unsafe fn create(pd: *mut ibv_pd, attr: &mut ibv_srq_init_attr) -> Result<*mut Srq, c_int> {
    // SAFETY: the domain is live, by the caller, and its consumer keeps it as long as what is made with
    // it.
    let (srq, private) = unsafe { prepare(pd, &attr.attr, FEATURE_SRQ) }?;
    let mut request = Request::<ib_uverbs_create_srq, _>::with(private);
    let mut response = Response::<ib_uverbs_create_srq_resp, _>::with(UverbsSrqResponse::zeroed());
    let srq = object::make(srq, |srq| {
        // SAFETY: `make` passes the box from above, which nobody else has; the domain is live, by the
        // caller; request and response have the layout that the command has in libibverbs (`private`).
        unsafe {
            let verbs = (*srq).verbs.get().cast();
            command!(
                ibv_cmd_create_srq(pd, verbs, ptr::from_mut(attr)),
                request,
                response
            )
        }
    })?;
    // SAFETY: `make` gave it, and nobody else has it yet.
    unsafe {
        (*srq).srqn = response.private.srqn;
        (*srq).tell_capacity(&mut attr.attr);
    }
    Ok(srq)
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
    or_null(match kind {
        IBV_SRQT_BASIC => {
            let mut plain = ibv_srq_init_attr {
                srq_context: attr.srq_context,
                attr: attr.attr,
            };
            // SAFETY: the consumer passes a live domain.
            let srq = unsafe { create(attr.pd, &mut plain) };
            attr.attr = plain.attr;
            srq
        }
        // SAFETY: libibverbs passes an open context, and the consumer live objects.
        IBV_SRQT_XRC => unsafe { xrc::create_srq(context, attr) },
        _ => Err(libc::EOPNOTSUPP),
    })
}

pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: the consumer passes a live queue and room for the answer.
    unsafe { *number = Srq::of(srq).srqn };
    0
}

pub(crate) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    if mask as u32 & IBV_SRQ_MAX_WR != 0 {
        // SAFETY: the consumer passes a live queue and its attributes.
        return unsafe { resize_srq(srq, attr, mask) };
    }
    let mut request = Request::<ib_uverbs_modify_srq, Nothing>::default();
    // SAFETY: the consumer passes a live queue and its attributes; the request has the layout that the
    // command has in libibverbs (`private`).
    unsafe { command!(ibv_cmd_modify_srq(srq, attr, mask), request) }
}

/// Gives a queue another ring. The lock is held while the device moves, so that nobody posts to the
/// one it leaves; not while memory is got and given back, which may be the program's own matter.
///
/// # Safety
///
/// `srq` is live, and `attr` its consumer's.
unsafe fn resize_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: the queue is live, by the caller, and its context open; the attributes are there.
    let (this, context, wanted) =
        unsafe { (Srq::of(srq), Context::of((*srq).context), (*attr).max_wr) };
    if context.limits.features & FEATURE_RESIZE_SRQ == 0 {
        return libc::EOPNOTSUPP;
    }
    let wanted = ibv_srq_attr {
        max_wr: wanted,
        // The same in every ring of a queue.
        max_sge: this.state.lock().ring.receives.max_sge,
        srq_limit: 0,
    };
    // SAFETY: the domain of a live queue is live, and the consumer keeps it as long as the queue.
    let ring = match unsafe { SrqRing::new(&wanted, &context.limits, (*srq).pd) } {
        Ok(ring) => ring,
        Err(errno) => return errno,
    };
    let mut state = this.state.lock();
    if state.outstanding() > ring.entries() as usize {
        return libc::EINVAL;
    }
    if let Err(errno) = state.prepare_to_move(&ring) {
        return errno;
    }
    ring.begin_at(state.producer);
    let mut request = Request::<ib_uverbs_modify_srq, _>::with(ring.request());
    // SAFETY: the queue is live and the attributes are its consumer's, by the caller; the request has
    // the layout that the command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_modify_srq(srq, attr, mask), request) };
    // The one that is not in use any more.
    let left = if result == 0 {
        // The device has copied what it had not taken and left the old ring.
        state.move_to(ring)
    } else {
        ring
    };
    drop(state);
    drop(left);
    result
}

pub(crate) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    let mut request = Request::<ib_uverbs_query_srq, Nothing>::default();
    // SAFETY: the consumer passes a live queue and room for the answer; the request has the layout that
    // the command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_query_srq(srq, attr), request) };
    if result == 0 {
        // SAFETY: the consumer passes a live queue and room for the answer.
        unsafe { Srq::of(srq).tell_capacity(&mut *attr) };
    }
    result
}

pub(crate) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: libibverbs passes a live queue of ours, whose context is open.
    let table = unsafe { &Context::of((*srq).context).xrc_srqs };
    // No lock is held: this waits until all events of the queue are acknowledged.
    // SAFETY: the queue is live, as above.
    let ask = || unsafe { ibv_cmd_destroy_srq(srq) };
    let leave = |this: &Srq| {
        // SAFETY: libibverbs sets the fields once, when the queue is made; the completion queue of an
        // XRC SRQ is of this provider, and its consumer destroys it after the SRQ.
        let cq = unsafe {
            let verbs = this.verbs.get();
            ((*verbs).srq_type == IBV_SRQT_XRC).then(|| Cq::of((*verbs).cq))
        };
        if let Some(cq) = cq {
            // The table has it as long as there is an entry to find it for.
            cq.leave_xrc_srq(this);
            table.remove(this.srqn, this);
        }
    };
    // SAFETY: it came from `create` or `xrc::create_srq`. Completions and the table were all that led to
    // it: the kernel refuses while a queue pair uses it.
    unsafe { object::destroy(srq.cast::<Srq>(), ask, leave) }
}

pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let srq = unsafe { Srq::of(srq) };
    let mut state = srq.state.lock();
    let before = state.producer;
    // SAFETY: the consumer passes work requests of which each names a live next one or null, and a place
    // for the one that failed.
    let result = unsafe {
        each(
            wr,
            bad,
            |request| request.next,
            |request| state.write(request),
        )
    };
    if state.producer != before {
        state.publish(|| srq.doorbells.ring(DOORBELL_SRQ, queue_doorbell(srq.srqn)));
    }
    result
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::testing::{limits, Page};

    pub(crate) fn srq(entries: u32, page: &mut Page) -> Result<Box<Srq>, c_int> {
        let wanted = ibv_srq_attr {
            max_wr: entries,
            max_sge: 1,
            srq_limit: 0,
        };
        // SAFETY: no domain is one of the two things that it takes.
        let ring = unsafe { SrqRing::new(&wanted, &limits(), ptr::null_mut()) }?;
        let mut srq = Srq::boxed(ring, page.doorbells())?;
        srq.srqn = 0x55;
        Ok(srq)
    }

    /// Posts receives up to a bad one; tells the result and how many were posted.
    fn post(srq: &Srq, counts: &[c_int]) -> (c_int, usize) {
        let mut list: Vec<ibv_recv_wr> = counts
            .iter()
            .map(|&num_sge| ibv_recv_wr {
                num_sge,
                ..Default::default()
            })
            .collect();
        let mut next = ptr::null_mut();
        for wr in list.iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives, and the list ends; it has no scatter/gather entries.
        let result = unsafe { post_srq_recv(ptr::from_ref(srq).cast_mut().cast(), next, &mut bad) };
        let posted = list.iter().position(|wr| ptr::eq(wr, bad));
        (result, posted.unwrap_or(list.len()))
    }

    #[test]
    fn receives_are_posted_up_to_the_bad_one_and_shown() {
        let mut page = Page::new();
        let srq = srq(4, &mut page).unwrap();
        assert_eq!(post(&srq, &[0, 0]), (0, 2));
        assert_eq!(page.take(DOORBELL_SRQ), 0, "the device is awake");
        srq.state.lock().ring.sleep();
        assert_eq!(post(&srq, &[-1]), (libc::EINVAL, 0));
        assert_eq!(page.take(DOORBELL_SRQ), 0, "nothing was posted");
        assert_eq!(post(&srq, &[0, -1, 0]), (libc::EINVAL, 1));
        assert_eq!(page.take(DOORBELL_SRQ), queue_doorbell(0x55));
        assert_eq!(post(&srq, &[0, 0]), (libc::ENOMEM, 1));
    }

    #[test]
    fn without_memory_no_queue_is_made() {
        let mut page = Page::new();
        let failures = heap::tests::with_little_memory(|| srq(8, &mut page));
        assert_eq!(failures, 3);
    }
}
