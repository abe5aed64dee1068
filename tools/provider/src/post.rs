// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Posting work requests: memory writes, a fence, and a doorbell only if the device sleeps.

use core::ffi::c_int;

use ferrite_abi::{
    has_entries, SendOpcode, FEATURE_ATOMICS, FEATURE_FAST_REGISTER, FEATURE_LISTS, FEATURE_WINDOWS,
};

use crate::qp::Qp;
use crate::send_queue::SendQueue;
use crate::sys::*;
use crate::window::bind_part;
use crate::wqe::{sge_list, Data, Part, Work};

/// Whoever makes regions or lists by work request, or binds windows, has to be able to invalidate
/// them.
pub(crate) const INVALIDATING: u64 = FEATURE_FAST_REGISTER | FEATURE_WINDOWS | FEATURE_LISTS;

impl Qp {
    /// Takes a work request of the plain interface apart.
    ///
    /// # Safety
    ///
    /// `wr` is as the verbs demand for its opcode.
    unsafe fn work(&self, wr: &ibv_send_wr) -> Result<Work, c_int> {
        if self.ud {
            // SAFETY: what the verbs demand of a datagram is that it names a live address handle.
            return unsafe { self.ud_work(wr) };
        }
        // SAFETY: the members that are read are structures of integers, for which any bytes are valid;
        // which of them counts is by the opcode.
        let (immediate, invalidate_rkey, rdma, atomic) = unsafe {
            let either = wr.__bindgen_anon_1;
            (
                either.imm_data,
                either.invalidate_rkey,
                wr.wr.rdma,
                wr.wr.atomic,
            )
        };
        let remote = |immediate| Part::remote(rdma.remote_addr, rdma.rkey, immediate);
        let (opcode, part) = match wr.opcode {
            IBV_WR_SEND => (SendOpcode::Send, Part::send(0)),
            IBV_WR_SEND_WITH_IMM => (SendOpcode::SendImmediate, Part::send(immediate)),
            IBV_WR_RDMA_WRITE => (SendOpcode::Write, remote(0)),
            IBV_WR_RDMA_WRITE_WITH_IMM => (SendOpcode::WriteImmediate, remote(immediate)),
            IBV_WR_RDMA_READ => (SendOpcode::Read, remote(0)),
            IBV_WR_ATOMIC_CMP_AND_SWP if self.has(FEATURE_ATOMICS) => (
                SendOpcode::CompareSwap,
                Part::compare_swap(
                    atomic.remote_addr,
                    atomic.rkey,
                    atomic.compare_add,
                    atomic.swap,
                ),
            ),
            IBV_WR_ATOMIC_FETCH_AND_ADD if self.has(FEATURE_ATOMICS) => (
                SendOpcode::FetchAdd,
                Part::fetch_add(atomic.remote_addr, atomic.rkey, atomic.compare_add),
            ),
            IBV_WR_SEND_WITH_INV if self.has(INVALIDATING) => (
                SendOpcode::SendInvalidate,
                Part::invalidate(invalidate_rkey),
            ),
            IBV_WR_LOCAL_INV if self.has(INVALIDATING) => (
                SendOpcode::LocalInvalidate,
                Part::invalidate(invalidate_rkey),
            ),
            IBV_WR_BIND_MW if self.has(FEATURE_WINDOWS) => {
                // SAFETY: `wr` is as the verbs demand, by the caller: a bind names a live window, if
                // any, and a live region or none.
                let part = unsafe {
                    let bind = &wr.__bindgen_anon_2.bind_mw;
                    if bind.mw.is_null() || (*bind.mw).type_ != IBV_MW_TYPE_2 {
                        return Err(libc::EINVAL);
                    }
                    bind_part(bind.mw, bind.rkey, &bind.bind_info, self.features)?
                };
                (SendOpcode::Bind, part)
            }
            _ => return Err(libc::EINVAL),
        };
        // What stays here has no peer to name an SRQ at.
        let local = matches!(opcode, SendOpcode::LocalInvalidate | SendOpcode::Bind);
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            srqn: if self.xrc && !local {
                // SAFETY: the union has no other member, and that is an integer.
                unsafe { wr.qp_type.xrc.remote_srqn }
            } else {
                0
            },
            part,
        })
    }

    /// Writes a work request of the plain interface behind those written before.
    ///
    /// # Safety
    ///
    /// `wr` is as the verbs demand for its opcode.
    #[inline(never)]
    pub(crate) unsafe fn write_any(
        &self,
        queue: &mut SendQueue,
        wr: &ibv_send_wr,
    ) -> Result<(), c_int> {
        // SAFETY: `wr` is as the verbs demand, and its list as long as it says, by the caller.
        unsafe {
            let work = self.work(wr)?;
            // Where the operation has no list, what stands there is left over from another.
            let sges = if has_entries(work.opcode) {
                sge_list(wr.sg_list, wr.num_sge)?
            } else {
                &[]
            };
            let data = if wr.send_flags & IBV_SEND_INLINE != 0 && has_entries(work.opcode) {
                Data::Copy(sges)
            } else {
                Data::Sges(sges)
            };
            self.write_send(queue, &work, &data)
        }
    }

    /// As [`Qp::work`], for a datagram.
    ///
    /// # Safety
    ///
    /// `wr` names a live address handle.
    unsafe fn ud_work(&self, wr: &ibv_send_wr) -> Result<Work, c_int> {
        // SAFETY: any bytes are valid for the members that are read: integers, and a pointer that is
        // looked at below.
        let (immediate, ud) = unsafe { (wr.__bindgen_anon_1.imm_data, wr.wr.ud) };
        let (opcode, immediate) = match wr.opcode {
            IBV_WR_SEND => (SendOpcode::Send, 0),
            IBV_WR_SEND_WITH_IMM => (SendOpcode::SendImmediate, immediate),
            _ => return Err(libc::EINVAL),
        };
        if ud.ah.is_null() {
            return Err(libc::EINVAL);
        }
        Ok(Work {
            wr_id: wr.wr_id,
            opcode,
            flags: wr.send_flags,
            srqn: 0,
            // SAFETY: the handle is live, by the caller.
            part: unsafe { Part::datagram(ud.ah, ud.remote_qpn, ud.remote_qkey, immediate.into()) },
        })
    }

    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }
}

pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut queue = qp.send.lock();
    let before = queue.posted;
    if !qp.may_send() {
        // SAFETY: the consumer passes a place for the work request that failed.
        unsafe { *bad = wr };
        return libc::EINVAL;
    }
    let write = |request: &ibv_send_wr| {
        // SAFETY: `ibv_post_send` demands of its caller that a work request is as its opcode wants it,
        // and its list as long as it says.
        unsafe {
            if qp.write_usual(&mut queue, request)? {
                return Ok(());
            }
            qp.write_any(&mut queue, request)
        }
    };
    // SAFETY: the consumer passes work requests of which each names a live next one or null, and a place
    // for the one that failed.
    let result = unsafe { each(wr, bad, |request| request.next, write) };
    if queue.posted != before {
        qp.publish_send(&queue);
    }
    result
}

pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue pair.
    let qp = unsafe { Qp::of(qp) };
    let mut queue = qp.receive.lock();
    let before = queue.producer;
    if qp.state() == IBV_QPS_RESET || !qp.receives {
        // SAFETY: the consumer passes a place for the work request that failed.
        unsafe { *bad = wr };
        return libc::EINVAL;
    }
    let write = |request: &ibv_recv_wr| qp.write_receive(&mut queue, request);
    // SAFETY: the consumer passes work requests of which each names a live next one or null, and a place
    // for the one that failed.
    let result = unsafe { each(wr, bad, |request| request.next, write) };
    if queue.producer != before {
        qp.publish_receive(&queue);
    }
    result
}

/// Writes work requests up to the last, or to the first that is refused: `bad` then names that.
///
/// # Safety
///
/// `wr` is null or a live work request, and so is the next of each; `bad` may be written.
#[inline(always)]
pub(crate) unsafe fn each<Wr>(
    mut wr: *mut Wr,
    bad: *mut *mut Wr,
    next: impl Fn(&Wr) -> *mut Wr,
    mut write: impl FnMut(&Wr) -> Result<(), c_int>,
) -> c_int {
    // SAFETY: it is null or lives, by the caller.
    while let Some(request) = unsafe { wr.as_ref() } {
        if let Err(errno) = write(request) {
            // SAFETY: `bad` may be written, by the caller.
            unsafe { *bad = wr };
            return errno;
        }
        wr = next(request);
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::send_queue::SendCount;
    use crate::testing::{
        self, cap, fetch, post_receive, rc, send, sge, taken, wr, Binding, Page, Shared, OPERATIONS,
    };
    use core::mem::offset_of;
    use core::ptr;
    use core::sync::atomic::Ordering;
    use ferrite_abi::{
        queue_doorbell, send_doorbell, BindPart, Plain, QueuePairRecord, SendHeader, BLOCK_SIZE,
        DOORBELL_RECEIVE, DOORBELL_SEND,
    };

    #[test]
    fn the_doorbell_is_rung_only_while_the_device_sleeps() {
        let mut page = Page::new();
        let qp = rc(&cap(8, 8, 1, 1, 0), page.doorbells());
        let mut entries = [sge(5)];
        let mut wr = wr(IBV_WR_SEND, &mut entries, 0);
        let wake = qp.memory.record(offset_of!(QueuePairRecord, send_wake));
        let producer = qp.memory.record(offset_of!(QueuePairRecord, send_producer));
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 1));
        wake.store(0, Ordering::Relaxed);
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), 0);
        assert_eq!(producer.load(Ordering::Relaxed), 2);
        wake.store(1, Ordering::Relaxed);
        assert_eq!(send(&qp, &mut wr), 0);
        assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 3));

        let mut receive = ibv_recv_wr {
            wr_id: 9,
            next: ptr::null_mut(),
            sg_list: entries.as_mut_ptr(),
            num_sge: 1,
        };
        let mut post = || {
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair lives, and the work request is complete.
            unsafe {
                post_recv(
                    ptr::from_ref(&*qp).cast_mut().cast(),
                    &mut receive,
                    &mut bad,
                )
            }
        };
        assert_eq!(post(), 0);
        assert_eq!(page.take(DOORBELL_RECEIVE), 0);
        qp.memory
            .record(offset_of!(QueuePairRecord, receive_wake))
            .store(1, Ordering::Relaxed);
        assert_eq!(post(), 0);
        assert_eq!(page.take(DOORBELL_RECEIVE), queue_doorbell(0x123));
        assert_eq!(qp.receive_done(1), 9);
    }

    #[test]
    fn what_cannot_be_done_is_refused_and_leaves_no_trace() {
        let mut page = Page::new();
        let mut qp = rc(&cap(5, 1, 1, 1, 32), page.doorbells());
        qp.max_message = 1 << 20;
        let most = qp.layout.capacity;
        let mut many = vec![sge(1); most.max_send_sge as usize + 1];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut many, 0)), libc::EINVAL);
        let mut long = [sge(qp.max_message), sge(1)];
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long, 0)), libc::EINVAL);
        let mut inline = [sge(most.max_inline_data + 1)];
        let mut request = wr(IBV_WR_SEND, &mut inline, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        let mut read = [sge(1)];
        let mut request = wr(IBV_WR_RDMA_READ, &mut read, IBV_SEND_INLINE);
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
        assert_eq!(send(&qp, &mut wr(77, &mut read, 0)), libc::EINVAL);
        assert_eq!(qp.send.lock().posted, SendCount::default());
        assert_eq!(page.take(DOORBELL_SEND), 0);
        // The longest message itself is fine.
        assert_eq!(send(&qp, &mut wr(IBV_WR_SEND, &mut long[..1], 0)), 0);
    }

    #[test]
    fn what_was_registered_or_bound_by_work_request_can_be_invalidated() {
        for (features, refused) in [
            (FEATURE_FAST_REGISTER, false),
            (FEATURE_WINDOWS, false),
            (FEATURE_LISTS, false),
            (
                !(FEATURE_FAST_REGISTER | FEATURE_WINDOWS | FEATURE_LISTS),
                true,
            ),
        ] {
            let mut page = Page::new();
            let mut qp = rc(&cap(5, 1, 1, 1, 0), page.doorbells());
            qp.features = features;
            for opcode in [IBV_WR_LOCAL_INV, IBV_WR_SEND_WITH_INV] {
                let result = send(&qp, &mut wr(opcode, &mut [], 0));
                assert_eq!(result == libc::EINVAL, refused, "{features:#x}");
            }
            let invalidation = u64::from(IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV);
            let offered = crate::post_ex::supported(IBV_QPT_RC, features) & invalidation;
            assert_eq!(offered, if refused { 0 } else { invalidation });
        }
    }

    #[test]
    fn the_extended_interface_shows_all_or_nothing() {
        let mut page = Page::new();
        let mut qp = rc(&cap(4, 1, 1, 1, 0), page.doorbells());
        let ex = testing::ex(&mut qp);
        // SAFETY: the operations were filled in by `ex` and are called in their order.
        unsafe {
            let operations = ptr::read(ex);
            let (start, complete) = (
                operations.wr_start.unwrap(),
                operations.wr_complete.unwrap(),
            );
            let (write, set) = (
                operations.wr_rdma_write.unwrap(),
                operations.wr_set_sge.unwrap(),
            );
            start(ex);
            for wr_id in 0..2 {
                (*ex).wr_id = wr_id;
                (*ex).wr_flags = IBV_SEND_SIGNALED;
                write(ex, 7, 8);
                set(ex, 1, 2, 3);
            }
            assert_eq!(page.take(DOORBELL_SEND), 0);
            assert_eq!(complete(ex), 0);
            assert_eq!(page.take(DOORBELL_SEND), send_doorbell(0x123, 2));
            assert_eq!(qp.send_done(1), (1, IBV_WC_RDMA_WRITE));

            start(ex);
            write(ex, 7, 8);
            set(ex, 1, 2, 3);
            operations.wr_abort.unwrap()(ex);
            start(ex);
            write(ex, 7, 8);
            set(ex, 1, 2, 3);
            write(ex, 7, 8);
            // No data for the second one.
            assert_eq!(complete(ex), libc::EINVAL);
            assert_eq!(page.take(DOORBELL_SEND), 0);
            assert_eq!(qp.send.lock().posted.blocks, 2);
        }
    }

    /// A queue made for one entry has, in fact, one; a work request that has no list is taken with
    /// whatever its fields still hold.
    #[test]
    fn a_list_left_over_where_the_operation_has_none_is_not_looked_at() {
        let mut page = Page::new();
        let qp = rc(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        for opcode in [IBV_WR_BIND_MW, IBV_WR_LOCAL_INV] {
            let before = qp.send.lock().posted.blocks;
            let mut wr = wr(opcode, &mut [], IBV_SEND_INLINE);
            binding.put_into(&mut wr);
            for count in [1, 5, -3] {
                wr.num_sge = count;
                wr.sg_list = ptr::without_provenance_mut(64);
                assert_eq!(send(&qp, &mut wr), 0);
            }
            for n in 0..3 {
                let bytes = fetch(&qp, before + n);
                let header = SendHeader::from_prefix(&bytes).unwrap();
                assert_eq!((header.blocks, header.sge_count, header.flags), (1, 0, 0));
            }
        }
    }

    /// Long and short work requests mixed by chance, completed by chance, past the end of the
    /// 32-bit indices: what lies in the ring is what was posted.
    #[test]
    fn indices_run_past_the_end_of_their_numbers() {
        let mut page = Page::new();
        let qp = rc(&cap(7, 5, 6, 2, 0), page.doorbells());
        qp.begin_at(u32::MAX - 60);
        let mut draw = crate::testing::draws(0x2545_f491_4f6c_dd1d);
        let mut outstanding: std::collections::VecDeque<(u32, u64, u32)> = Default::default();
        for wr_id in 0..400u64 {
            let opcode = OPERATIONS[draw(8) as usize];
            let count = 1 + draw(6) as usize;
            let mut entries = vec![sge(wr_id as u32 + 1); count];
            let mut request = wr(opcode, &mut entries, 0);
            request.wr_id = wr_id;
            let start = qp.send.lock().posted.blocks;
            match send(&qp, &mut request) {
                0 => outstanding.push_back((start, wr_id, count as u32)),
                errno => {
                    assert_eq!(errno, libc::ENOMEM);
                    assert_eq!(outstanding.len(), qp.layout.capacity.max_send_wr as usize);
                    // Some go without a completion of their own.
                    let done = 1 + draw(outstanding.len() as u64) as usize;
                    let mut last = None;
                    for (start, wr_id, count) in outstanding.drain(..done) {
                        let bytes = fetch(&qp, start);
                        let header = SendHeader::from_prefix(&bytes).unwrap();
                        assert_eq!(u32::from(header.sge_count), count);
                        last = Some((start, wr_id));
                    }
                    let (start, wr_id) = last.unwrap();
                    assert_eq!(qp.send_done(start).0, wr_id);
                }
            }
            let shown = qp.memory.record(offset_of!(QueuePairRecord, send_producer));
            assert_eq!(shown.load(Ordering::Relaxed), qp.send.lock().posted.blocks);
        }
        assert!(
            qp.send.lock().posted.blocks < 2000,
            "the indices went round"
        );

        let mut receive = ibv_recv_wr::default();
        for wr_id in 0..100 {
            receive.wr_id = wr_id;
            let index = qp.receive.lock().producer;
            assert_eq!(post_receive(&qp, &mut receive), 0);
            assert_eq!(qp.receive_done(index), wr_id);
        }
        for _ in 0..qp.layout.receive.ring.entries {
            assert_eq!(post_receive(&qp, &mut receive), 0);
        }
        assert_eq!(post_receive(&qp, &mut receive), libc::ENOMEM);
    }

    /// Those before the bad one are posted, it is named, and none after it is looked at.
    #[test]
    fn a_list_is_posted_up_to_its_bad_work_request() {
        let mut page = Page::new();
        for bad_at in 0..4usize {
            let qp = rc(&cap(8, 8, 1, 1, 0), page.doorbells());
            let mut entries = [sge(1)];
            let mut list: Vec<ibv_send_wr> = (0..4)
                .map(|n| {
                    let opcode = if n == bad_at { 77 } else { IBV_WR_SEND };
                    let mut wr = wr(opcode, &mut entries, 0);
                    wr.wr_id = n as u64;
                    wr
                })
                .collect();
            let mut next = ptr::null_mut();
            for wr in list.iter_mut().rev() {
                wr.next = next;
                next = wr;
            }
            let this: *mut ibv_qp = ptr::from_ref(&*qp).cast_mut().cast();
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair lives, and the list ends.
            let result = unsafe { post_send(this, next, &mut bad) };
            assert_eq!(result, libc::EINVAL);
            assert_eq!(bad, &raw mut list[bad_at]);
            assert_eq!(qp.send.lock().posted.blocks, bad_at as u32);
            let rung = page.take(DOORBELL_SEND);
            match bad_at {
                0 => assert_eq!(rung, 0),
                posted => assert_eq!(rung, send_doorbell(0x123, posted as u32)),
            }
            for index in 0..bad_at as u32 {
                assert_eq!(qp.send_done(index).0, u64::from(index));
            }

            let mut list: Vec<ibv_recv_wr> = (0..4)
                .map(|n| ibv_recv_wr {
                    wr_id: n as u64,
                    num_sge: if n == bad_at { -1 } else { 0 },
                    ..Default::default()
                })
                .collect();
            let mut next = ptr::null_mut();
            for wr in list.iter_mut().rev() {
                wr.next = next;
                next = wr;
            }
            let mut bad = ptr::null_mut();
            // SAFETY: as above.
            let result = unsafe { post_recv(this, next, &mut bad) };
            assert_eq!(result, libc::EINVAL);
            assert_eq!(bad, &raw mut list[bad_at]);
            assert_eq!(qp.receive.lock().producer, bad_at as u32);
        }
    }

    /// The program chooses the keys of a window of type 2 and knows when they are in force.
    #[test]
    fn posting_a_bind_leaves_the_window_alone() {
        let mut page = Page::new();
        let mut qp = rc(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        let mut request = wr(IBV_WR_BIND_MW, &mut [], 0);
        binding.put_into(&mut request);
        assert_eq!(send(&qp, &mut request), 0);
        assert_eq!(binding.mw.rkey, 0x0005_0010);
        let ex = testing::ex(&mut qp);
        let info = binding.info();
        for abort in [true, false] {
            // SAFETY: the operations were filled in by `ex` and are called in their order.
            unsafe {
                let operations = ptr::read(ex);
                operations.wr_start.unwrap()(ex);
                operations.wr_bind_mw.unwrap()(ex, &raw mut *binding.mw, 0x0005_0011, &info);
                if abort {
                    operations.wr_abort.unwrap()(ex);
                } else {
                    assert_eq!(operations.wr_complete.unwrap()(ex), 0);
                }
            }
            assert_eq!(binding.mw.rkey, 0x0005_0010);
        }
        let bytes = fetch(&qp, 1);
        let part = BindPart::from_prefix(&bytes[16..]).unwrap();
        assert_eq!((part.window, part.new_window), (0x0005_0010, 0x0005_0011));
    }

    #[test]
    fn a_window_is_of_one_touch_where_the_device_has_that() {
        let mut page = Page::new();
        let mut qp = rc(&cap(8, 1, 1, 1, 0), page.doorbells());
        let mut binding = Binding::new();
        let mut request = wr(IBV_WR_BIND_MW, &mut [], 0);
        binding.put_into(&mut request);
        let asked = IBV_ACCESS_REMOTE_WRITE | crate::direct::FERRITEDV_ACCESS_ONE_TOUCH;
        request.__bindgen_anon_2.bind_mw.bind_info.mw_access_flags = asked;
        assert_eq!(send(&qp, &mut request), 0);
        let Part::Bind(part) = taken(&qp, 0).1 else {
            panic!("no bind");
        };
        let expected = ferrite_abi::ACCESS_REMOTE_WRITE | ferrite_abi::ACCESS_ONE_TOUCH;
        assert_eq!(part.access, expected);
        qp.features = !ferrite_abi::FEATURE_ONE_TOUCH;
        assert_eq!(send(&qp, &mut request), libc::EOPNOTSUPP);
        // The device's own number for it is another right of the verbs, which windows have not.
        let on_demand = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ON_DEMAND;
        assert_eq!(ferrite_abi::ACCESS_ONE_TOUCH, IBV_ACCESS_ON_DEMAND);
        request.__bindgen_anon_2.bind_mw.bind_info.mw_access_flags = on_demand;
        assert_eq!(send(&qp, &mut request), libc::EINVAL);
    }

    /// Threads post to one queue pair while another takes the completions: each work request is
    /// there once, and the order of the ring is that of the completions.
    #[test]
    fn threads_post_to_one_queue_pair() {
        const THREADS: u64 = 4;
        const EACH: u64 = 3000;
        let mut page = Page::new();
        let qp = rc(&cap(16, 1, 3, 1, 0), page.doorbells());
        qp.begin_at(u32::MAX - 1000);
        let mut seen = vec![0u64; THREADS as usize];
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let qp = Shared(&*qp);
                scope.spawn(move || {
                    let qp = qp;
                    for n in 0..EACH {
                        let mut entries = vec![sge(1); 1 + (n % 3) as usize];
                        let mut request = wr(OPERATIONS[(n % 8) as usize], &mut entries, 0);
                        request.wr_id = (thread << 32) | n;
                        loop {
                            match send(&qp, &mut request) {
                                0 => break,
                                libc::ENOMEM => std::thread::yield_now(),
                                errno => panic!("{errno}"),
                            }
                        }
                    }
                });
            }
            let producer = qp.memory.record(offset_of!(QueuePairRecord, send_producer));
            let mut consumer = u32::MAX - 1000;
            for _ in 0..THREADS * EACH {
                while producer.load(Ordering::Acquire) == consumer {
                    std::thread::yield_now();
                }
                let blocks = (fetch(&qp, consumer).len() / BLOCK_SIZE) as u32;
                let (wr_id, _) = qp.send_done(consumer);
                let next = &mut seen[(wr_id >> 32) as usize];
                assert_eq!(wr_id as u32, *next as u32, "in each thread's order");
                *next += 1;
                consumer = consumer.wrapping_add(blocks);
            }
        });
        assert!(seen.iter().all(|&count| count == EACH));
    }
}
