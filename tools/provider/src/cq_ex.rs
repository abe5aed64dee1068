// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The extended way of polling: the consumer walks over completions and asks for what it needs.
//!
//! From a successful `start_poll` to `end_poll` the queue's lock is held by the polling thread.

use core::ffi::{c_int, c_uint};
use ferrite_abi::{CompletionEntry, VLAN_NONE};

use crate::completion::{service_level, Completion};
use crate::context::Context;
use crate::cq::{create, Cq};
use crate::fail;
use crate::protection::Pd;
use crate::sys::*;

const TIMESTAMPS: u64 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP as u64
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK as u64;
const SUPPORTED: u64 = IBV_WC_STANDARD_FLAGS as u64 | TIMESTAMPS | IBV_WC_EX_WITH_CVLAN as u64;

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: libibverbs passes an open context and the consumer's attributes.
    let (limits, mut attr) = unsafe { (&Context::of(context).limits, *attr) };
    let mut supported = SUPPORTED;
    if limits.clock_khz == 0 {
        supported &= !TIMESTAMPS;
    }
    let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
        attr.flags
    } else {
        0
    };
    // Ignoring an overrun is not offered.
    if attr.wc_flags & !supported != 0
        || attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
        || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
    {
        return fail(libc::EOPNOTSUPP);
    }
    let wanted = attr.wc_flags;
    // Every completion carries its time; the kernel need not be asked for it.
    attr.wc_flags = 0;
    attr.comp_mask &= IBV_CQ_INIT_ATTR_MASK_PD;
    // SAFETY: the consumer passes a live domain where it says so.
    if attr.comp_mask != 0 && !unsafe { Pd::is_parent(attr.parent_domain) } {
        return fail(libc::EINVAL);
    }
    if wanted & u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) != 0 {
        // From here on the two clocks are compared from time to time, and there is always a result.
        // SAFETY: the context is open, as above.
        if let Err(errno) = unsafe { Context::of(context).clock.compare(context) } {
            return fail(errno);
        }
    }
    // SAFETY: by libibverbs, as above.
    let cq = match unsafe { create(context, &attr) } {
        Ok(cq) => cq,
        Err(errno) => return fail(errno),
    };
    if flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
        // SAFETY: `cq` was just made and is not shared yet.
        unsafe { (*cq).state.promise_one_thread() };
    }
    // SAFETY: `cq` was just made and is not shared yet.
    let verbs = unsafe { &mut (*(*cq).verbs()).cq_ex };
    verbs.start_poll = Some(start_poll);
    verbs.next_poll = Some(next_poll);
    verbs.end_poll = Some(end_poll);
    verbs.read_opcode = Some(read_opcode);
    verbs.read_vendor_err = Some(read_vendor_err);
    verbs.read_wc_flags = Some(read_wc_flags);
    let with = |flag: ibv_create_cq_wc_flags| wanted & u64::from(flag) != 0;
    if with(IBV_WC_EX_WITH_BYTE_LEN) {
        verbs.read_byte_len = Some(read_byte_len);
    }
    if with(IBV_WC_EX_WITH_IMM) {
        verbs.read_imm_data = Some(read_imm_data);
    }
    if with(IBV_WC_EX_WITH_QP_NUM) {
        verbs.read_qp_num = Some(read_qp_num);
    }
    if with(IBV_WC_EX_WITH_SRC_QP) {
        verbs.read_src_qp = Some(read_src_qp);
    }
    if with(IBV_WC_EX_WITH_SLID) {
        verbs.read_slid = Some(read_slid);
    }
    if with(IBV_WC_EX_WITH_SL) {
        verbs.read_sl = Some(read_sl);
    }
    if with(IBV_WC_EX_WITH_DLID_PATH_BITS) {
        verbs.read_dlid_path_bits = Some(read_dlid_path_bits);
    }
    if with(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) {
        verbs.read_completion_ts = Some(read_completion_ts);
    }
    if with(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) {
        verbs.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    }
    if with(IBV_WC_EX_WITH_CVLAN) {
        verbs.read_cvlan = Some(read_cvlan);
    }
    verbs
}

pub(crate) unsafe extern "C" fn start_poll(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: the consumer passes its attributes.
    if unsafe { (*attr).comp_mask } != 0 {
        return libc::EINVAL;
    }
    // SAFETY: the consumer passes a live queue.
    let this = unsafe { Cq::of(cq.cast()) };
    // SAFETY: the queue is live; the field was set when it was made (`create_cq_ex`).
    if unsafe { (*cq).read_completion_wallclock_ns }.is_some() {
        // SAFETY: the context of a live queue is open, and the clock is in it.
        unsafe {
            let context = (*cq).context;
            Context::of(context).clock.keep_up(context);
        }
    }
    let mut state = this.state.lock();
    let before = state.consumer;
    match state.next(this.tables(), this.home()) {
        Some((entry, finished)) => {
            state.current = Completion::new(&entry, finished);
            // SAFETY: `cq` is live, and the polling thread is the only user of these fields.
            unsafe { show(cq, &state.current) };
            // `end_poll` unlocks.
            this.begin_session(state);
            0
        }
        None => {
            // Entries of unknown queue pairs may have been passed over.
            if state.consumer != before {
                state.publish();
            }
            libc::ENOENT
        }
    }
}

pub(crate) unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let this = unsafe { Cq::of(cq.cast()) };
    // SAFETY: between `start_poll` and `end_poll` this thread holds the lock.
    let state = unsafe { this.state.held_mut() };
    match state.next(this.tables(), this.home()) {
        Some((entry, finished)) => {
            state.current = Completion::new(&entry, finished);
            this.session_has_taken(state.consumer);
            // SAFETY: `cq` is live, and the thread that holds the lock is the only user of these fields.
            unsafe { show(cq, &state.current) };
            0
        }
        None => libc::ENOENT,
    }
}

pub(crate) unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the consumer passes a live queue.
    let this = unsafe { Cq::of(cq.cast()) };
    // SAFETY: a successful `start_poll` left the lock held, and the reference ends here.
    unsafe {
        this.state.held_mut().publish();
        this.end_session();
    }
}

/// Fills in the two fields that the consumer reads directly.
///
/// # Safety
///
/// `cq` is live and only the calling thread uses it.
unsafe fn show(cq: *mut ibv_cq_ex, completion: &Completion) {
    // SAFETY: the queue is live and no other thread uses it, by the caller.
    unsafe {
        (*cq).wr_id = completion.finished.wr_id;
        (*cq).status = u32::from(completion.entry.status);
    }
}

/// What `read` finds in the completion that is looked at, which it may keep nothing of.
///
/// # Safety
///
/// As for the readers below: called between `start_poll` and `end_poll`, by the polling thread.
unsafe fn current<R>(cq: *mut ibv_cq_ex, read: impl FnOnce(&Completion) -> R) -> R {
    // SAFETY: the queue is live; the calling thread holds its lock since `start_poll`, by the caller, and
    // the reference ends with this call.
    read(unsafe { &Cq::of(cq.cast()).state.held_mut().current })
}

/// As [`current`], only the device's part.
///
/// # Safety
///
/// As for [`current`].
unsafe fn entry<R>(cq: *mut ibv_cq_ex, read: impl FnOnce(&CompletionEntry) -> R) -> R {
    // SAFETY: the calling thread holds the lock since `start_poll`, by the caller.
    unsafe { current(cq, |completion| read(&completion.entry)) }
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { current(cq, |completion| completion.finished.opcode) }
}

unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> c_uint {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { current(cq, Completion::wc_flags) }
}

unsafe extern "C" fn read_vendor_err(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| entry.vendor_syndrome) }
}

unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| entry.byte_count) }
}

/// The immediate data in wire order, or the invalidated rkey.
unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> __be32 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { current(cq, Completion::imm_data) }
}

unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| entry.qpn) }
}

unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| entry.source_qpn) }
}

unsafe extern "C" fn read_slid(_cq: *mut ibv_cq_ex) -> u32 {
    0
}

unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| service_level(entry.flags)) }
}

unsafe extern "C" fn read_dlid_path_bits(_cq: *mut ibv_cq_ex) -> u8 {
    0
}

unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    unsafe { entry(cq, |entry| entry.timestamp) & Cq::of(cq.cast()).clock_mask }
}

unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`; the
    // context of a live queue is open.
    unsafe {
        let clock = &Context::of((*cq).context).clock;
        clock.wall_time(read_completion_ts(cq))
    }
}

unsafe extern "C" fn read_cvlan(cq: *mut ibv_cq_ex) -> u16 {
    // SAFETY: `ibv_wc_read_*` is for the polling thread, between `start_poll` and `end_poll`.
    match unsafe { entry(cq, |entry| entry.vlan) } {
        VLAN_NONE => 0,
        vlan => vlan,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cq::poll_cq;
    use crate::cq::tests::alone;
    use crate::table::{Inserted, NumberTable};
    use crate::testing::{self, Page};
    use ferrite_abi::{
        CompletionOpcode, CompletionStatus, Plain, COMPLETION_GRH, COMPLETION_IMMEDIATE,
        COMPLETION_INVALIDATED, COMPLETION_RECEIVE, COMPLETION_SOLICITED,
    };

    /// What each of the two ways of polling tells: immediate data or tag, and the flags.
    fn both_ways(flags: u16) -> (u32, u32) {
        let mut page = Page::new();
        let (table, srqs) = (NumberTable::new().unwrap(), NumberTable::new().unwrap());
        let cq = alone(4, page.doorbells(), &table, &srqs);
        let mut qp = testing::rc(&testing::cap(1, 4, 1, 1, 0), page.doorbells());
        let qpn = qp.qpn;
        assert_eq!(
            table.insert(qpn, &raw mut *qp, cq.homes()),
            Ok(Inserted::Yes)
        );
        let entry = CompletionEntry {
            qpn,
            byte_count: 100,
            tag: 0x8765_4321,
            immediate: 0x1122_3344_0102_0304,
            timestamp: 0xfedc_ba98_7654_3210,
            source_qpn: 0x456,
            vlan: 5,
            vendor_syndrome: 0x0bad_f00d,
            flags: COMPLETION_RECEIVE | flags,
            opcode: CompletionOpcode::Receive.number(),
            status: CompletionStatus::RemoteOperation.number(),
            ..CompletionEntry::zeroed()
        };
        for index in 0..2 {
            cq.complete(index, entry);
        }
        let raw: *mut ibv_cq = core::ptr::from_ref(&*cq).cast_mut().cast();
        let mut wc = ibv_wc::default();
        // SAFETY: the queue lives, and the calls are in their order; of the union all members are
        // plain.
        unsafe {
            assert_eq!(poll_cq(raw, 1, &mut wc), 1);
            let plain = (wc.__bindgen_anon_1.imm_data, wc.wc_flags);
            assert_eq!(wc.__bindgen_anon_1.invalidated_rkey, plain.0);
            assert_eq!((wc.vendor_err, wc.byte_len), (0x0bad_f00d, 100));
            assert_eq!((wc.status, wc.opcode), (IBV_WC_REM_OP_ERR, IBV_WC_RECV));
            assert_eq!((wc.qp_num, wc.src_qp), (qpn, 0x456));

            let raw = raw.cast();
            let mut attr = ibv_poll_cq_attr::default();
            assert_eq!(start_poll(raw, &mut attr), 0);
            assert_eq!((read_imm_data(raw), read_wc_flags(raw)), plain);
            // Of a clock with 48 bits.
            assert_eq!(read_completion_ts(raw), 0xba98_7654_3210);
            assert_eq!(
                (read_vendor_err(raw), read_byte_len(raw)),
                (0x0bad_f00d, 100)
            );
            assert_eq!((read_cvlan(raw), read_src_qp(raw)), (5, 0x456));
            end_poll(raw);
            plain
        }
    }

    /// They have places of their own in an entry and share one in the verbs; a flag tells which.
    #[test]
    fn immediate_data_and_tag_are_told_apart() {
        assert_eq!(both_ways(0), (0, 0));
        assert_eq!(both_ways(COMPLETION_SOLICITED), (0, 0));
        assert_eq!(
            both_ways(COMPLETION_IMMEDIATE | COMPLETION_GRH),
            (0x0102_0304, IBV_WC_WITH_IMM | IBV_WC_GRH)
        );
        assert_eq!(
            both_ways(COMPLETION_INVALIDATED),
            (0x8765_4321, IBV_WC_WITH_INV)
        );
        assert_eq!(
            both_ways(COMPLETION_IMMEDIATE | COMPLETION_INVALIDATED),
            (0x0102_0304, IBV_WC_WITH_IMM)
        );
    }
}
