// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Raw packets: rules of flows, work queues and tables of them, and queue pairs that receive by a table.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::size_of;
use core::ptr;

use ferrite_abi::{
    Plain, QueuePairRecord, UverbsHashRequest, UverbsQpResponse, UverbsWqRequest, HASH_IPV4,
    HASH_IPV6, HASH_TCP_IPV4, HASH_TCP_IPV6, HASH_UDP_IPV4, HASH_UDP_IPV6, REDIRECTION_KEY_SIZE,
};

use crate::context::Context;
use crate::cq::Cq;
use crate::heap;
use crate::object::{self, or_null};
use crate::post::each;
use crate::private::*;
use crate::qp::Qp;
use crate::qp_layout::{QpLayout, Requests};
use crate::ring::QueueBuffer;
use crate::sys::*;

pub(crate) unsafe extern "C" fn create_flow(
    qp: *mut ibv_qp,
    attr: *mut ibv_flow_attr,
) -> *mut ibv_flow {
    or_null(heap::boxed(ibv_flow::default()).and_then(|flow| {
        object::make(flow, |flow| {
            // SAFETY: the consumer passes a live queue pair, and attributes with as many specifications
            // behind them as they say; `make` passes a rule that nobody else has.
            unsafe { ibv_cmd_create_flow(qp, flow, attr, ptr::null_mut(), 0) }
        })
    }))
}

pub(crate) unsafe extern "C" fn destroy_flow(flow: *mut ibv_flow) -> c_int {
    // SAFETY: libibverbs passes a rule from `create_flow`, which its consumer does not use any more.
    unsafe { object::destroy(flow, || ibv_cmd_destroy_flow(flow), |_| {}) }
}

/// A work queue: to the device, and to whoever looks for what a completion is about, a queue pair that
/// sends nothing.
#[repr(C)]
struct WorkQueue {
    verbs: UnsafeCell<ibv_wq>,
    queue: Box<Qp>,
}

impl WorkQueue {
    /// # Safety
    ///
    /// `wq` is a live work queue of this provider.
    unsafe fn of<'a>(wq: *mut ibv_wq) -> &'a WorkQueue {
        // SAFETY: by the caller it came from `create_wq`, where the `ibv_wq` is at the start of a
        // `WorkQueue`; after that it is shared only.
        unsafe { &*wq.cast::<WorkQueue>() }
    }

    /// One that the kernel does not know of yet, and what to tell the kernel of it.
    ///
    /// # Safety
    ///
    /// `attr.pd` is a live domain of this provider, and lives as long as the queue.
    unsafe fn prepare(
        context: &Context,
        attr: &ibv_wq_init_attr,
    ) -> Result<(Box<Self>, UverbsWqRequest), c_int> {
        if attr.max_wr == 0 {
            return Err(libc::EINVAL);
        }
        let wanted = ibv_qp_cap {
            max_recv_wr: attr.max_wr,
            max_recv_sge: attr.max_sge,
            ..Default::default()
        };
        let layout = QpLayout::new(&wanted, &context.limits, Requests::Connected)?;
        // SAFETY: the domain is live and stays so, by the caller.
        let memory = unsafe { QueueBuffer::new::<QueuePairRecord>(attr.pd, layout.rings()) }?;
        let queue = Qp::boxed(layout, context.doorbells, memory)?;
        let ring = &queue.layout.receive.ring;
        let request = UverbsWqRequest {
            buffer: queue.memory.address(),
            length: queue.memory.length(),
            rq_offset: ring.offset as u32,
            record_offset: queue.memory.record_offset(),
            rq_log_entries: ring.log_entries(),
            rq_log_stride: ring.log_stride(),
            reserved: [0; 3],
        };
        let wq = heap::boxed(Self {
            verbs: UnsafeCell::new(ibv_wq::default()),
            queue,
        })?;
        Ok((wq, request))
    }

    /// The state, as far as this process knows.
    fn state(&self) -> ibv_wq_state {
        // SAFETY: the field is initialised. libibverbs writes it in `ibv_modify_wq`, which a consumer does
        // not run against its own posting; against others the read is volatile, of an aligned word.
        unsafe { ptr::read_volatile(&raw const (*self.verbs.get()).state) }
    }

    /// Its completion queue.
    ///
    /// # Safety
    ///
    /// It was made, so that libibverbs has filled its completion queue in.
    unsafe fn completion_queue(&self) -> &Cq {
        // SAFETY: it names a completion queue of this provider, which the kernel does not let go while a
        // work queue uses it.
        unsafe { Cq::of((*self.verbs.get()).cq) }
    }
}

pub(crate) unsafe extern "C" fn create_wq(
    context: *mut ibv_context,
    attr: *mut ibv_wq_init_attr,
) -> *mut ibv_wq {
    // SAFETY: the consumer passes an open context and its attributes.
    or_null(unsafe { create(context, &mut *attr) })
}

/// Makes a work queue; `attr` says afterwards what it can take.
///
/// # Safety
///
/// `context` is open, and `attr` what its user asked for, with live objects.
unsafe fn create(
    context: *mut ibv_context,
    attr: &mut ibv_wq_init_attr,
) -> Result<*mut WorkQueue, c_int> {
    let flags = attr.comp_mask & IBV_WQ_INIT_ATTR_FLAGS != 0 && attr.create_flags != 0;
    let unknown = attr.comp_mask & !IBV_WQ_INIT_ATTR_FLAGS != 0;
    if attr.wq_type != IBV_WQT_RQ || flags || unknown {
        return Err(libc::EOPNOTSUPP);
    }
    if attr.pd.is_null() || attr.cq.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the context is open, by the caller.
    let provider = unsafe { Context::of(context) };
    let asked = *attr;
    let mut make = || {
        *attr = asked;
        // SAFETY: the domain is live, by the caller, and its consumer keeps it as long as what is made
        // with it.
        let (wq, private) = unsafe { WorkQueue::prepare(provider, attr) }?;
        let mut request = ExtendedRequest::<ib_uverbs_ex_create_wq, _>::with(private);
        let mut response = Response::<ib_uverbs_ex_create_wq_resp, Nothing>::default();
        let wq = object::make(wq, |wq| {
            // SAFETY: `make` passes the box from above, which nobody else has; context and attributes
            // are as the verb wants them, by the caller; request and response have the layout that the
            // command has in libibverbs (`private`).
            unsafe {
                let verbs = (*wq).verbs.get();
                command!(
                    ibv_cmd_create_wq(context, ptr::from_mut(attr), verbs),
                    request,
                    response
                )
            }
        })?;
        // SAFETY: libibverbs has filled the number in, and nobody else has the queue yet.
        unsafe {
            let verbs = (*wq).verbs.get();
            (*verbs).state = IBV_WQS_RESET;
            (*verbs).post_recv = Some(post_wq_recv);
            (*wq).queue.qpn = (*verbs).wq_num;
            Ok((wq, (*verbs).wq_num))
        }
    };
    let wq = object::make_entered_as(
        &provider.queue_pairs,
        [asked.cq, ptr::null_mut()],
        &mut make,
        &|wq| {
            // SAFETY: `make` gave it, and it is not in the table: nobody has it.
            unsafe { object::destroy(wq, || ibv_cmd_destroy_wq((*wq).verbs.get()), |_| {}) };
        },
        // SAFETY: `make` gave it, and nobody else has it yet.
        |wq| unsafe { &raw mut *(*wq).queue },
    )?;
    // SAFETY: the queue was made a moment ago and nobody can have destroyed it.
    let capacity = unsafe { (*wq).queue.layout.capacity };
    (attr.max_wr, attr.max_sge) = (capacity.max_recv_wr, capacity.max_recv_sge);
    Ok(wq)
}

pub(crate) unsafe extern "C" fn modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int {
    let mut request = ExtendedRequest::<ib_uverbs_ex_modify_wq, Nothing>::default();
    // SAFETY: the consumer passes a live queue and its attributes; the request has the layout that the
    // command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_modify_wq(wq, attr), request) };
    if result != 0 {
        return result;
    }
    // SAFETY: the consumer passes a live queue and its attributes.
    let (this, attr) = unsafe { (WorkQueue::of(wq), &*attr) };
    if attr.attr_mask & IBV_WQ_ATTR_STATE != 0 && attr.wq_state == IBV_WQS_RESET {
        // The device writes no more entries of it.
        // SAFETY: the consumer has it, so that it was made.
        unsafe { this.completion_queue() }.forget(&this.queue);
        this.queue.reset_queues();
    }
    0
}

pub(crate) unsafe extern "C" fn destroy_wq(wq: *mut ibv_wq) -> c_int {
    // SAFETY: libibverbs passes a live queue, whose context is open.
    let table = unsafe { &Context::of((*wq).context).queue_pairs };
    // No lock is held: this waits until all events of the queue are acknowledged.
    // SAFETY: the queue is live, as above.
    let ask = || unsafe { ibv_cmd_destroy_wq(wq) };
    let leave = |this: &WorkQueue| {
        // SAFETY: the queue was made, as the consumer has it.
        unsafe { this.completion_queue() }.leave(&this.queue);
        table.remove(this.queue.qpn, &*this.queue);
    };
    // SAFETY: it came from `create`. Completions and the table were all that led to it: the kernel refuses
    // while a table has it.
    unsafe { object::destroy(wq.cast::<WorkQueue>(), ask, leave) }
}

unsafe extern "C" fn post_wq_recv(
    wq: *mut ibv_wq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the consumer passes a live queue.
    let this = unsafe { WorkQueue::of(wq) };
    let mut queue = this.queue.receive.lock();
    let before = queue.producer;
    if this.state() == IBV_WQS_RESET {
        // SAFETY: the consumer passes a place for the work request that failed.
        unsafe { *bad = wr };
        return libc::EINVAL;
    }
    let write = |request: &ibv_recv_wr| this.queue.write_receive(&mut queue, request);
    // SAFETY: the consumer passes work requests of which each names a live next one or null, and a place
    // for the one that failed.
    let result = unsafe { each(wr, bad, |request| request.next, write) };
    if queue.producer != before {
        this.queue.publish_receive(&queue);
    }
    result
}

pub(crate) unsafe extern "C" fn create_rwq_ind_table(
    context: *mut ibv_context,
    attr: *mut ibv_rwq_ind_table_init_attr,
) -> *mut ibv_rwq_ind_table {
    let mut response = ib_uverbs_ex_create_rwq_ind_table_resp::default();
    or_null(heap::boxed(ibv_rwq_ind_table::default()).and_then(|table| {
        object::make(table, |table| {
            // SAFETY: the consumer passes an open context, and attributes with as many live queues as they
            // say; `make` passes a table that nobody else has; the response is ours.
            unsafe {
                ibv_cmd_create_rwq_ind_table(
                    context,
                    attr,
                    table,
                    &mut response,
                    size_of::<ib_uverbs_ex_create_rwq_ind_table_resp>(),
                )
            }
        })
    }))
}

pub(crate) unsafe extern "C" fn destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int {
    // SAFETY: libibverbs passes a table from `create_rwq_ind_table`, which its consumer does not use any
    // more.
    unsafe { object::destroy(table, || ibv_cmd_destroy_rwq_ind_table(table), |_| {}) }
}

/// What the hash is to be of: addresses are taken both or not at all, and so are ports, which go with
/// addresses.
fn hash_types(fields: u64) -> Result<u32, c_int> {
    let both = |source: u32, destination: u32| {
        let (source, destination) = (u64::from(source), u64::from(destination));
        match fields & (source | destination) {
            0 => Ok(false),
            found if found == source | destination => Ok(true),
            _ => Err(libc::EOPNOTSUPP),
        }
    };
    let ipv4 = both(IBV_RX_HASH_SRC_IPV4, IBV_RX_HASH_DST_IPV4)?;
    let ipv6 = both(IBV_RX_HASH_SRC_IPV6, IBV_RX_HASH_DST_IPV6)?;
    let tcp = both(IBV_RX_HASH_SRC_PORT_TCP, IBV_RX_HASH_DST_PORT_TCP)?;
    let udp = both(IBV_RX_HASH_SRC_PORT_UDP, IBV_RX_HASH_DST_PORT_UDP)?;
    let known = IBV_RX_HASH_SRC_IPV4
        | IBV_RX_HASH_DST_IPV4
        | IBV_RX_HASH_SRC_IPV6
        | IBV_RX_HASH_DST_IPV6
        | IBV_RX_HASH_SRC_PORT_TCP
        | IBV_RX_HASH_DST_PORT_TCP
        | IBV_RX_HASH_SRC_PORT_UDP
        | IBV_RX_HASH_DST_PORT_UDP;
    if fields & !u64::from(known) != 0 || !(ipv4 || ipv6) {
        return Err(libc::EOPNOTSUPP);
    }
    let types = [
        (ipv4, HASH_IPV4),
        (ipv4 && tcp, HASH_TCP_IPV4),
        (ipv4 && udp, HASH_UDP_IPV4),
        (ipv6, HASH_IPV6),
        (ipv6 && tcp, HASH_TCP_IPV6),
        (ipv6 && udp, HASH_UDP_IPV6),
    ];
    let types = types.iter().filter(|(wanted, _)| *wanted);
    Ok(types.fold(0, |types, (_, of)| types | u32::from(*of)))
}

/// How a queue pair is to hash that receives by a table.
///
/// # Safety
///
/// The key is as long as the attributes say.
unsafe fn hash_request(conf: &ibv_rx_hash_conf) -> Result<UverbsHashRequest, c_int> {
    if u32::from(conf.rx_hash_function) != IBV_RX_HASH_FUNC_TOEPLITZ {
        return Err(libc::EOPNOTSUPP);
    }
    if usize::from(conf.rx_hash_key_len) != REDIRECTION_KEY_SIZE || conf.rx_hash_key.is_null() {
        return Err(libc::EINVAL);
    }
    Ok(UverbsHashRequest {
        types: hash_types(conf.rx_hash_fields_mask)?,
        reserved: 0,
        // SAFETY: the key is that long, by the caller and as was checked.
        key: unsafe { ptr::read(conf.rx_hash_key.cast()) },
    })
}

/// Makes a queue pair that receives by a table, and sends nothing.
///
/// # Safety
///
/// `context` is open, and `attr` what its user asked for, with live objects.
pub(crate) unsafe fn create_spread(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
) -> Result<*mut Qp, c_int> {
    let wanted = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH;
    if attr.comp_mask != wanted || attr.qp_type != IBV_QPT_RAW_PACKET || attr.cap.max_send_wr != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if attr.pd.is_null() || attr.rwq_ind_tbl.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: the consumer's key is as long as it says.
    let private = unsafe { hash_request(&attr.rx_hash_conf) }?;
    // SAFETY: the context is open, by the caller.
    let provider = unsafe { Context::of(context) };
    let none = ibv_qp_cap::default();
    let mut layout = QpLayout::new(&none, &provider.limits, Requests::Connected)?;
    layout.capacity = none;
    let memory = QueueBuffer::of_no_domain::<QueuePairRecord>(layout.rings())?;
    let mut qp = Qp::boxed(layout, provider.doorbells, memory)?;
    qp.receives = false;
    let mut request = ExtendedRequest::<ib_uverbs_ex_create_qp, _>::with(private);
    let mut response = Response::<ib_uverbs_ex_create_qp_resp, _>::with(UverbsQpResponse::zeroed());
    let qp = object::make(qp, |qp| {
        // SAFETY: `make` passes the box from above, which nobody else has; context and attributes are as
        // the verb wants them, by the caller; request and response have the layout that the command has in
        // libibverbs (`private`).
        unsafe {
            let verbs = (*qp).verbs.get();
            command!(
                ibv_cmd_create_qp_ex2(context, verbs, ptr::from_mut(attr)),
                request,
                response
            )
        }
    })?;
    // SAFETY: libibverbs has filled the number in, and nobody else has `qp` yet.
    unsafe { (*qp).qpn = (*(*qp).verbs.get()).qp_ex.qp_base.qp_num };
    attr.cap = none;
    Ok(qp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cap, rc, sge, Page};
    use ferrite_abi::{ReceiveHeader, Sge};

    #[test]
    fn a_hash_is_of_addresses_and_ports_that_go_together() {
        let v4 = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4;
        let v6 = IBV_RX_HASH_SRC_IPV6 | IBV_RX_HASH_DST_IPV6;
        let tcp = IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP;
        let udp = IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP;
        for (fields, types) in [
            (v4, Ok(HASH_IPV4)),
            (v6, Ok(HASH_IPV6)),
            (v4 | tcp, Ok(HASH_IPV4 | HASH_TCP_IPV4)),
            (v6 | udp, Ok(HASH_IPV6 | HASH_UDP_IPV6)),
            (
                v4 | v6 | udp,
                Ok(HASH_IPV4 | HASH_UDP_IPV4 | HASH_IPV6 | HASH_UDP_IPV6),
            ),
            (0, Err(libc::EOPNOTSUPP)),
            (tcp, Err(libc::EOPNOTSUPP)),
            (IBV_RX_HASH_SRC_IPV4, Err(libc::EOPNOTSUPP)),
            (v4 | IBV_RX_HASH_DST_PORT_TCP, Err(libc::EOPNOTSUPP)),
            (v4 | (1 << 8), Err(libc::EOPNOTSUPP)),
        ] {
            let found = hash_types(fields.into());
            assert_eq!(found, types.map(u32::from), "{fields:#x}");
        }
    }

    #[test]
    fn a_key_has_its_one_length() {
        let mut key: Vec<u8> = (0..40).collect();
        let mut conf = ibv_rx_hash_conf {
            rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ as u8,
            rx_hash_key_len: 40,
            rx_hash_key: key.as_mut_ptr(),
            rx_hash_fields_mask: u64::from(IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4),
        };
        // SAFETY: the key is as long as is said, here and below, or not read.
        let request = unsafe { hash_request(&conf) }.unwrap();
        assert_eq!(request.key.to_vec(), key);
        conf.rx_hash_key_len = 39;
        // SAFETY: as above.
        assert_eq!(unsafe { hash_request(&conf) }, Err(libc::EINVAL));
        conf.rx_hash_function = 2;
        // SAFETY: as above.
        assert_eq!(unsafe { hash_request(&conf) }, Err(libc::EOPNOTSUPP));
    }

    #[test]
    fn receives_are_posted_to_a_work_queue_that_is_not_reset() {
        let mut page = Page::new();
        let wq = WorkQueue {
            verbs: UnsafeCell::new(ibv_wq::default()),
            queue: rc(&cap(1, 4, 1, 2, 0), page.doorbells()),
        };
        let raw = ptr::from_ref(&wq).cast_mut().cast::<ibv_wq>();
        let mut entries = [sge(7)];
        let mut request = ibv_recv_wr {
            wr_id: 99,
            sg_list: entries.as_mut_ptr(),
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives, and the list has one request, whose entry is there.
        let mut post = || unsafe { post_wq_recv(raw, &mut request, &mut bad) };
        assert_eq!(post(), libc::EINVAL);
        // SAFETY: nobody else has the queue.
        unsafe { (*wq.verbs.get()).state = IBV_WQS_RDY };
        assert_eq!(post(), 0);
        let layout = &wq.queue.layout.receive.ring;
        let at = wq.queue.memory.at(layout.offset);
        // SAFETY: the receive queue is that long.
        let bytes = unsafe { core::slice::from_raw_parts(at, layout.stride as usize) };
        assert_eq!(ReceiveHeader::from_prefix(bytes).unwrap().sge_count, 1);
        let written = Sge::from_prefix(&bytes[16..]).unwrap();
        assert_eq!(written.address, entries[0].addr);
        assert_eq!(wq.queue.receive_done(0), 99);
    }
}
