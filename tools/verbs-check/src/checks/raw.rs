// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Raw packets, as far as one process sees them by itself: who may have queue pairs, work queues, tables of them and rules of
//! flows, what is refused of them, and what becomes of them when the interface goes whose packets they are.

use std::ptr;
use std::time::{Duration, Instant};

use ferrite_abi::{Plain, UverbsWqRequest};

use super::objects::{each_on_its_own, errno, made, modify, well, Rig, PATIENCE};
use super::private::{ends, still_good};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{Buffer, BufferKind, Errno, Options};

pub fn run(options: &Options, report: &mut Report) {
    each_on_its_own(
        options,
        report,
        "raw: ",
        &[
            (
                "a work queue by ioctl, with a completion queue and without",
                by_ioctl,
            ),
            ("nothing of them without CAP_NET_RAW", without_capability),
            (
                "nothing of them in another network namespace than the interface's",
                elsewhere,
            ),
            ("states of a work queue", states),
            ("rules that are for more than they say", rules),
        ],
    );
}

const SMALL: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 8,
    max_recv_wr: 8,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 0,
};

fn not_offered(what: &str) -> Outcome {
    Outcome::Skipped(format!("{what} are not offered"))
}

/// An errno value where nothing was made.
fn or_errno<T>(pointer: *mut T) -> Result<*mut T, i32> {
    match pointer.is_null() {
        false => Ok(pointer),
        true => Err(errno()),
    }
}

fn queue_pair(rig: &Rig, cq: *mut ibv_cq) -> Result<*mut ibv_qp, i32> {
    let mut attr = ibv_qp_init_attr {
        send_cq: cq,
        recv_cq: cq,
        cap: SMALL,
        qp_type: IBV_QPT_RAW_PACKET,
        ..Default::default()
    };
    // SAFETY: the attributes are complete, and all objects live.
    or_errno(unsafe { ibv_create_qp(rig.pd, &mut attr) })
}

fn work_queue(rig: &Rig, cq: *mut ibv_cq) -> Result<*mut ibv_wq, i32> {
    let mut attr = ibv_wq_init_attr {
        wq_type: IBV_WQT_RQ,
        max_wr: 8,
        max_sge: 1,
        pd: rig.pd,
        cq,
        ..Default::default()
    };
    let create = rig.extended().create_wq.ok_or(libc::EOPNOTSUPP)?;
    // SAFETY: the attributes are complete, and all objects live.
    or_errno(unsafe { create(rig.raw(), &mut attr) })
}

fn end_work_queue(rig: &Rig, wq: *mut ibv_wq) -> Check {
    let destroy = rig
        .extended()
        .destroy_wq
        .ok_or(not_offered("work queues"))?;
    // SAFETY: it lives, and is not used afterwards.
    well(unsafe { destroy(wq) }, "ibv_destroy_wq")
}

fn table(rig: &Rig, wq: *mut ibv_wq) -> Result<*mut ibv_rwq_ind_table, i32> {
    let mut queues = [wq; 2];
    let mut attr = ibv_rwq_ind_table_init_attr {
        log_ind_tbl_size: 1,
        ind_tbl: queues.as_mut_ptr(),
        comp_mask: 0,
    };
    let create = rig.extended().create_rwq_ind_table;
    // SAFETY: the attributes are complete: there are two queues, which live.
    or_errno(unsafe { create.ok_or(libc::EOPNOTSUPP)?(rig.raw(), &mut attr) })
}

fn end_table(rig: &Rig, table: *mut ibv_rwq_ind_table) -> Check {
    let destroy = rig.extended().destroy_rwq_ind_table;
    // SAFETY: it lives, and is not used afterwards.
    let ended = unsafe { destroy.ok_or(not_offered("tables"))?(table) };
    well(ended, "ibv_destroy_rwq_ind_table")
}

/// Attributes of a rule with one specification behind them.
#[repr(C)]
struct With<T> {
    attr: ibv_flow_attr,
    spec: T,
}

/// Makes a rule of that type with as many specifications as there are of `spec`: one, or none where it is empty.
fn rule<T>(rig: &Rig, qp: *mut ibv_qp, kind: u32, spec: T) -> Result<*mut ibv_flow, i32> {
    let mut with = With {
        attr: ibv_flow_attr {
            type_: kind,
            size: size_of::<With<T>>() as u16,
            num_of_specs: u8::from(size_of::<T>() != 0),
            port: 1,
            ..Default::default()
        },
        spec,
    };
    let create = rig.extended().ibv_create_flow.ok_or(libc::EOPNOTSUPP)?;
    // SAFETY: the queue pair lives, and the specifications are behind the attributes, whose size says so.
    or_errno(unsafe { create(qp, ptr::from_mut(&mut with).cast()) })
}

fn end_rule(rig: &Rig, flow: *mut ibv_flow) -> Check {
    let destroy = rig
        .extended()
        .ibv_destroy_flow
        .ok_or(not_offered("rules"))?;
    // SAFETY: it lives, and is not used afterwards.
    well(unsafe { destroy(flow) }, "ibv_destroy_flow")
}

/// Frames to one address that nobody has.
fn ethernet() -> ibv_flow_spec_eth {
    let mut spec = ibv_flow_spec_eth {
        type_: IBV_FLOW_SPEC_ETH,
        size: size_of::<ibv_flow_spec_eth>() as u16,
        ..Default::default()
    };
    spec.val.dst_mac = [2, 0, 0, 0xfe, 0xfe, 0xfe];
    spec.mask.dst_mac = [0xff; 6];
    spec
}

/// An attribute of a request by `ioctl` (`struct ib_uverbs_attr`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    id: u16,
    length: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

/// A request by `ioctl` (`struct ib_uverbs_ioctl_hdr` and what is behind it).
#[repr(C)]
struct Call<const N: usize> {
    length: u16,
    object: u16,
    method: u16,
    count: u16,
    reserved1: u64,
    driver: u32,
    reserved2: u32,
    attributes: [Attribute; N],
}

/// `UVERBS_OBJECT_WQ`.
const WQ: u16 = 12;
/// First number of what drivers add.
const OF_DRIVER: u16 = 1 << 12;

fn attribute(id: u16, length: usize, data: u64) -> Attribute {
    const MANDATORY: u16 = 1;
    Attribute {
        id,
        length: length as u16,
        flags: MANDATORY,
        reserved: 0,
        data,
    }
}

/// Says a request about work queues to the kernel; returns the handle that its first attribute is then.
fn call<const N: usize>(rig: &Rig, method: u16, attributes: [Attribute; N]) -> Result<u32, i32> {
    const IOCTL: libc::c_ulong = (3 << 30) | (24 << 16) | (0x1b << 8) | 1;
    let mut call = Call {
        length: size_of::<Call<N>>() as u16,
        object: WQ,
        method,
        count: N as u16,
        reserved1: 0,
        driver: 0,
        reserved2: 0,
        attributes,
    };
    // SAFETY: the request is laid out as the kernel expects; what its attributes point to lives in the caller.
    match unsafe { libc::ioctl((*rig.raw()).cmd_fd, IOCTL, &mut call) } {
        0 => Ok(call.attributes[0].data as u32),
        _ => Err(errno()),
    }
}

/// Makes a work queue by `ioctl` (`UVERBS_METHOD_WQ_CREATE`), and ends it again.
fn made_by_ioctl(rig: &Rig, buffer: &Buffer, cq: Option<*mut ibv_cq>) -> Result<(), i32> {
    let private = UverbsWqRequest {
        buffer: buffer.address(),
        length: 8192,
        rq_offset: 0,
        record_offset: 4096,
        rq_log_entries: 6,
        rq_log_stride: 6,
        reserved: [0; 3],
    };
    let mut answers = [0u32; 4];
    let mut place = |at: usize| ptr::from_mut(&mut answers[at]) as u64;
    let (max_wr, max_sge, number, events) = (place(0), place(1), place(2), place(3));
    // SAFETY: the domain lives.
    let pd = unsafe { (*rig.pd).handle };
    let private_at = private.as_bytes().as_ptr() as u64;
    let common = [
        attribute(0, 0, 0),
        attribute(1, 0, pd.into()),
        // user_handle, type, most of work requests and of entries, flags
        attribute(3, 8, 0),
        attribute(4, 8, 0),
        attribute(6, 4, 64),
        attribute(7, 4, 1),
        attribute(8, 4, 0),
        attribute(9, 4, max_wr),
        attribute(10, 4, max_sge),
        // Optional, but without it the kernel takes back what it made.
        attribute(11, 4, number),
        attribute(OF_DRIVER, size_of::<UverbsWqRequest>(), private_at),
    ];
    let handle = match cq {
        None => call(rig, 0, common)?,
        Some(cq) => {
            // SAFETY: it lives.
            let cq = attribute(2, 0, unsafe { (*cq).handle }.into());
            let [a, b, c, d, e, f, g, h, i, j, k] = common;
            call(rig, 0, [a, b, c, d, e, f, g, h, i, j, k, cq])?
        }
    };
    let ended = [attribute(0, 0, handle.into()), attribute(1, 4, events)];
    call(rig, 1, ended).map(|_| ())
}

fn by_ioctl(rig: &Rig) -> Check {
    let cq = rig.cq(64)?;
    let buffer = Buffer::new(8192, BufferKind::Plain).map_err(|errno| errno.to_string())?;
    if made_by_ioctl(rig, &buffer, Some(cq)) == Err(libc::EOPNOTSUPP) {
        return Err(not_offered("work queues"));
    }
    ends(rig, "a work queue", 0, || {
        made_by_ioctl(rig, &buffer, Some(cq))
    })?;
    // The kernel takes a request that names none, and leaves it to the driver.
    ends(rig, "one without a completion queue", libc::EINVAL, || {
        made_by_ioctl(rig, &buffer, None)
    })?;
    still_good(rig)
}

/// What there is of raw packets, and what is tried with it.
struct All<'r> {
    rig: &'r Rig,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    wq: *mut ibv_wq,
    buffer: std::rc::Rc<Buffer>,
}

impl<'r> All<'r> {
    fn new(rig: &'r Rig) -> Check<Self> {
        let cq = rig.cq(64)?;
        let skipped = |what: &str, error: i32| match error {
            libc::EOPNOTSUPP => not_offered(what),
            _ => Outcome::Failed(format!("{what}: {}", Errno(error))),
        };
        let buffer = Buffer::new(8192, BufferKind::Plain).map_err(|errno| errno.to_string())?;
        Ok(Self {
            rig,
            cq,
            qp: queue_pair(rig, cq).map_err(|error| skipped("raw packets", error))?,
            wq: work_queue(rig, cq).map_err(|error| skipped("work queues", error))?,
            buffer,
        })
    }

    /// Tries to make one of each, and ends it again: what was said to each.
    fn try_all(&self) -> Check<Vec<(&'static str, i32)>> {
        let rig = self.rig;
        let qp = queue_pair(rig, self.cq);
        let wq = work_queue(rig, self.cq);
        let table = table(rig, self.wq);
        let rule = rule(rig, self.qp, IBV_FLOW_ATTR_NORMAL, ethernet());
        let by_ioctl = made_by_ioctl(rig, &self.buffer, Some(self.cq));
        let said = vec![
            ("a queue pair", qp.err().unwrap_or(0)),
            ("a work queue", wq.err().unwrap_or(0)),
            ("a table", table.err().unwrap_or(0)),
            ("a rule", rule.err().unwrap_or(0)),
            ("a work queue by ioctl", by_ioctl.err().unwrap_or(0)),
        ];
        if let Ok(rule) = rule {
            end_rule(rig, rule)?;
        }
        if let Ok(table) = table {
            end_table(rig, table)?;
        }
        if let Ok(wq) = wq {
            end_work_queue(rig, wq)?;
        }
        if let Ok(qp) = qp {
            // SAFETY: it lives, and is not used afterwards.
            well(unsafe { ibv_destroy_qp(qp) }, "ibv_destroy_qp")?;
        }
        Ok(said)
    }

    /// All of them have to be said the same to.
    fn all_are(&self, expected: i32, when: &str) -> Check {
        for (what, said) in self.try_all()? {
            expect!(
                Errno(said).to_string(),
                Errno(expected).to_string(),
                "{what} {when}"
            );
        }
        Ok(())
    }

    fn end(self) -> Check {
        end_work_queue(self.rig, self.wq)?;
        // SAFETY: both live, and are not used afterwards.
        unsafe {
            well(ibv_destroy_qp(self.qp), "ibv_destroy_qp")?;
            well(ibv_destroy_cq(self.cq), "ibv_destroy_cq")
        }
    }
}

/// Whether this thread may have raw packets from now on, as far as its permitted capabilities go.
fn set_capability(may: bool) -> Check {
    const VERSION: u32 = 0x2008_0522;
    const CAP_NET_RAW: u32 = 13;
    let header = [VERSION, 0];
    // Effective, permitted and inheritable ones, twice 32.
    let mut sets = [0u32; 6];
    // SAFETY: both are as large as that version of the call has them.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) };
    well(got as i32, "capget")?;
    match may {
        true => sets[0] |= 1 << CAP_NET_RAW,
        false => sets[0] &= !(1 << CAP_NET_RAW),
    }
    // SAFETY: as above.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) };
    well(set as i32, "capset")
}

fn without_capability(rig: &Rig) -> Check {
    let all = All::new(rig)?;
    all.all_are(0, "with the capability")?;
    set_capability(false)?;
    let without = all.all_are(libc::EPERM, "without the capability");
    set_capability(true)?;
    without?;
    all.all_are(0, "with the capability again")?;
    all.end()?;
    still_good(rig)
}

fn elsewhere(rig: &Rig) -> Check {
    let all = All::new(rig)?;
    // SAFETY: the path is a C string.
    let here = unsafe { libc::open(c"/proc/thread-self/ns/net".as_ptr(), libc::O_RDONLY) };
    if here < 0 {
        return Err(format!("the namespace: {}", Errno(errno())).into());
    }
    // SAFETY: the thread gets a namespace of its own, which concerns no memory; it goes back below.
    well(unsafe { libc::unshare(libc::CLONE_NEWNET) }, "unshare")?;
    let there = all.all_are(libc::EPERM, "in another namespace");
    // SAFETY: the file was opened above, and is not used afterwards.
    let back = unsafe {
        let back = libc::setns(here, libc::CLONE_NEWNET);
        libc::close(here);
        back
    };
    well(back, "setns")?;
    there?;
    all.all_are(0, "back again")?;
    all.end()?;
    still_good(rig)
}

/// Brings a work queue to a state, as one that is in `from` where that is said: an errno value, or zero.
fn bring(rig: &Rig, wq: *mut ibv_wq, from: Option<u32>, to: u32) -> Check<i32> {
    let mut attr = ibv_wq_attr {
        attr_mask: IBV_WQ_ATTR_STATE,
        wq_state: to,
        ..Default::default()
    };
    if let Some(from) = from {
        attr.attr_mask |= IBV_WQ_ATTR_CURR_STATE;
        attr.curr_wq_state = from;
    }
    let modify = rig.extended().modify_wq.ok_or(not_offered("work queues"))?;
    // SAFETY: the queue lives, and the attributes are complete.
    Ok(unsafe { modify(wq, &mut attr) })
}

fn states(rig: &Rig) -> Check {
    let all = All::new(rig)?;
    let (reset, ready, error) = (IBV_WQS_RESET, IBV_WQS_RDY, IBV_WQS_ERR);
    for (from, to, expected) in [
        (None, reset, 0),
        (None, error, libc::EINVAL),
        (Some(ready), ready, libc::EINVAL),
        (Some(error), reset, libc::EINVAL),
        (Some(reset), ready, 0),
        (Some(reset), ready, libc::EINVAL),
        (None, ready, 0),
        // It may have failed by itself.
        (Some(error), ready, libc::EINVAL),
        (Some(error), reset, 0),
        (None, ready, 0),
        (Some(error), error, 0),
        (Some(ready), error, libc::EINVAL),
        (None, ready, libc::EINVAL),
        (None, error, 0),
        (None, reset, 0),
    ] {
        let said = bring(rig, all.wq, from, to)?;
        expect!(said, expected, "from {from:?} to {to}");
    }
    all.end()?;
    still_good(rig)
}

fn rules(rig: &Rig) -> Check {
    let all = All::new(rig)?;
    let said = |kind, spec: Option<u8>| -> Check<i32> {
        let made = match spec {
            None => rule(rig, all.qp, kind, ()),
            Some(flags) => {
                let mut spec = ibv_flow_spec_ipv4_ext {
                    type_: IBV_FLOW_SPEC_IPV4_EXT,
                    size: size_of::<ibv_flow_spec_ipv4_ext>() as u16,
                    ..Default::default()
                };
                // An address that nobody has.
                spec.val.dst_ip = u32::from_be_bytes([192, 0, 2, 1]).to_be();
                spec.mask.dst_ip = u32::MAX;
                spec.mask.flags = flags;
                rule(rig, all.qp, kind, spec)
            }
        };
        if let Ok(rule) = made {
            end_rule(rig, rule)?;
        }
        Ok(made.err().unwrap_or(0))
    };
    let normal = IBV_FLOW_ATTR_NORMAL;
    for flags in [0, 2, 4, 6] {
        expect!(said(normal, Some(flags))?, 0, "flags {flags:#x}");
    }
    for flags in [1, 8, 0x42, 0xff] {
        expect!(
            said(normal, Some(flags))?,
            libc::EOPNOTSUPP,
            "flags {flags:#x}"
        );
    }
    for kind in [IBV_FLOW_ATTR_ALL_DEFAULT, IBV_FLOW_ATTR_MC_DEFAULT] {
        expect!(said(kind, None)?, 0, "default {kind}");
        expect!(
            said(kind, Some(0))?,
            libc::EINVAL,
            "default {kind} of an address"
        );
    }
    all.end()?;
    still_good(rig)
}

fn to_raw_state(qp: *mut ibv_qp, state: u32) -> i32 {
    let attr = ibv_qp_attr {
        qp_state: state,
        port_num: 1,
        ..Default::default()
    };
    let port = match state {
        IBV_QPS_INIT => IBV_QP_PORT,
        _ => 0,
    };
    modify(qp, attr, IBV_QP_STATE | port)
}

/// A program that has raw packets, until the interface goes whose packets these are: tells when it may, and that everything
/// ended as it must.
pub fn lost(options: &Options) -> Check {
    let rig = Rig::new(options)?;
    let all = All::new(&rig)?;
    let rule = rule(&rig, all.qp, IBV_FLOW_ATTR_NORMAL, ethernet());
    let rule = made(rule.unwrap_or(ptr::null_mut()), "ibv_create_flow")?;
    expect!(bring(&rig, all.wq, None, IBV_WQS_RDY)?, 0, "the work queue");
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        well(to_raw_state(all.qp, state), "ibv_modify_qp")?;
    }
    println!("ready for the interface to go");
    let deadline = Instant::now() + PATIENCE;
    // SAFETY: the queue pair lives.
    let number = unsafe { (*all.qp).qp_num };
    while Instant::now() < deadline {
        let event = rig.context.async_event(Duration::from_millis(100));
        if event.map_err(|errno| errno.to_string())? == Some((IBV_EVENT_QP_FATAL, number)) {
            break;
        }
    }
    expect!(Instant::now() < deadline, true, "IBV_EVENT_QP_FATAL came");
    all.all_are(libc::ENODEV, "without the interface")?;
    // It has its end before it, and nothing else.
    for (state, expected) in [
        (IBV_QPS_ERR, 0),
        (IBV_QPS_RESET, 0),
        (IBV_QPS_INIT, libc::ENODEV),
    ] {
        expect!(to_raw_state(all.qp, state), expected, "state {state}");
    }
    expect!(
        bring(&rig, all.wq, None, IBV_WQS_RESET)?,
        0,
        "the work queue"
    );
    end_rule(&rig, rule)?;
    all.end()?;
    println!("done");
    Ok(())
}
