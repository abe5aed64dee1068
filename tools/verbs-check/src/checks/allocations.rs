// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs while the kernel's allocations fail: the first one, then the second, and so on until an
//! operation comes through without having met a fault. Whatever fails leaves nothing behind, and
//! what was made can be destroyed.
//!
//! Needs a kernel with fault injection, as the lab's test kernels are. Which allocations count
//! (slab, pages, those of one module alone) is said in `/sys/kernel/debug/fail*` beforehand.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::rc::Rc;
use std::time::SystemTime;

use crate::direct;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{check, not_null, Buffer, BufferKind, Context, Errno, Options};

/// No operation allocates so often.
const ENDLESS: u32 = 20_000;
/// What the driver keeps of a command that it does not wait for: a ticket, and a place for why it failed. It can
/// do without them: then it waits.
const FOR_A_POST: u32 = 2;

const LENGTH: usize = 1 << 20;
const RIGHTS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND;

/// The allocation of this thread that shall fail.
struct Fault(File);

impl Fault {
    fn new() -> Check<Self> {
        let path = "/proc/thread-self/fail-nth";
        let file = File::options().read(true).write(true).open(path);
        match file {
            Ok(file) => Ok(Self(file)),
            Err(error) => Err(Outcome::Skipped(format!("{path}: {error}"))),
        }
    }

    fn set(&self, number: u32) -> Check {
        let text = number.to_string();
        match self.0.write_all_at(text.as_bytes(), 0) {
            Ok(()) => Ok(()),
            Err(error) => Err(format!("fail-nth: {error}").into()),
        }
    }

    /// Runs something whose `number`th allocation fails; also tells whether it had so many.
    fn during<T>(&self, number: u32, action: impl FnOnce() -> T) -> Check<(T, bool)> {
        let (result, left) = self.left_of(number, action)?;
        Ok((result, left == 0))
    }

    /// Runs something, and counts its allocations, none of which fails.
    fn count<T>(&self, action: impl FnOnce() -> T) -> Check<(T, u32)> {
        let (result, left) = self.left_of(ENDLESS, action)?;
        match left {
            0 => Err("there is no end of allocations".into()),
            left => Ok((result, ENDLESS - left)),
        }
    }

    fn left_of<T>(&self, number: u32, action: impl FnOnce() -> T) -> Check<(T, u32)> {
        self.set(number)?;
        let result = action();
        let mut text = [0; 16];
        let read = self.0.read_at(&mut text, 0);
        self.set(0)?;
        let length = read.map_err(|error| format!("fail-nth: {error}"))?;
        let text = String::from_utf8_lossy(&text[..length]);
        let left = text.trim().parse();
        Ok((result, left.map_err(|_| format!("fail-nth: {text:?}"))?))
    }
}

/// Something that was made; gives the result of destroying it.
type Made = Box<dyn FnMut() -> i32>;

type Make = fn(&Ground) -> Result<Made, Errno>;

/// What operations are done with.
struct Ground {
    options: Options,
    context: Rc<Context>,
    buffer: Rc<Buffer>,
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    cq: *mut ibv_cq,
}

const OPERATIONS: &[(&str, Make)] = &[
    ("a context is opened", open),
    ("a domain is allocated", domain),
    ("a region is registered", region),
    ("a region on demand is registered", paged_region),
    ("a region moves to other memory", moved_region),
    ("a region shares the memory of another", shared_region),
    ("a window is allocated", window),
    ("a completion channel is made", channel),
    ("a completion queue is made", queue),
    ("a completion queue changes its size", resized_queue),
    ("a shared receive queue is made", shared_queue),
    ("a reliable queue pair is made", reliable),
    ("an unreliable queue pair is made", unreliable),
    ("a datagram queue pair is made", datagram),
    ("a queue pair is connected", connected),
    ("an address handle is made", address),
    ("a multicast group is joined", member),
    ("device memory is allocated and registered", device_memory),
    ("the device is queried", queried),
];

/// With `sample`, about so many allocations of each operation fail, and not all of them.
pub fn run(options: &Options, sample: Option<u32>, report: &mut Report) {
    let fault = match Fault::new() {
        Ok(fault) => fault,
        Err(error) => return report.enter("allocations that fail", Err(error)),
    };
    for (name, make) in OPERATIONS {
        let result =
            Ground::new(options).and_then(|ground| fail_each(&fault, &ground, *make, sample));
        let name = match &result {
            Ok(seen) => format!(
                "allocations: {name} ({} to make, {} of {} refused; {} to destroy)",
                seen.making, seen.refused, seen.failed, seen.destroying
            ),
            Err(_) => format!("allocations: {name}"),
        };
        report.enter(&name, result.map(|_| ()));
    }
}

/// What was seen of an operation.
struct Seen {
    /// How many allocations there are.
    making: u32,
    destroying: u32,
    /// How many of the former failed, and how often the operation was refused for it.
    failed: u32,
    refused: u32,
}

/// Which of `count` allocations fail.
fn chosen(count: u32, sample: Option<u32>) -> Box<dyn Iterator<Item = u32>> {
    match sample {
        // The count is not always the same: to the end, wherever that is.
        None => Box::new(1..),
        Some(sample) => {
            let stride = count.div_ceil(sample.max(1)).max(1);
            // Runs do not all try the same ones, nor any run always the same of each few.
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let mut number = now.map_or(0, |since| since.subsec_nanos());
            let first = (1..=count).step_by(stride as usize);
            Box::new(first.map(move |first| {
                number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (first + (number >> 16) % stride).min(count)
            }))
        }
    }
}

/// Makes something with each of these allocations failing, one at a time, until it has not so many. Gives how many
/// failed, and how often it was refused for that.
fn fail_these(
    fault: &Fault,
    ground: &Ground,
    make: Make,
    numbers: Box<dyn Iterator<Item = u32>>,
) -> Check<(u32, u32)> {
    let (mut failed, mut refused) = (0, 0);
    for number in numbers {
        let said = |outcome| at(number, outcome);
        let (result, hit) = fault.during(number, || make(ground))?;
        match result {
            Ok(mut made) => destroyed(made()).map_err(said)?,
            Err(errno) if !hit => return Err(said(format!("no fault, but {errno}").into())),
            Err(Errno(errno)) if is_refusal(errno) => refused += 1,
            Err(errno) => return Err(said(format!("no memory, but {errno}").into())),
        }
        failed += u32::from(hit);
        if !hit {
            break;
        }
        if number == ENDLESS {
            return Err("there is no end of allocations".into());
        }
    }
    Ok((failed, refused))
}

/// Makes something again and again, each time with another allocation that fails; then destroys it
/// likewise.
fn fail_each(fault: &Fault, ground: &Ground, make: Make, sample: Option<u32>) -> Check<Seen> {
    // Once without: what is missing on this device is no finding, and libraries set themselves up.
    let mut whole = well(make(ground))?;
    destroyed(whole())?;
    let (whole, making) = fault.count(|| make(ground))?;
    let (result, destroying) = fault.count(&mut *well(whole)?)?;
    destroyed(result)?;
    let (mut failed, mut refused) = fail_these(fault, ground, make, chosen(making, sample))?;
    if refused == 0 && sample.is_some() {
        // All of the sample may have been some that can be done without.
        (failed, refused) = fail_these(fault, ground, make, Box::new(1..=making))?;
    }
    for number in chosen(destroying, sample) {
        let said = |outcome| at(number, outcome);
        let mut made = well(make(ground)).map_err(said)?;
        let (result, hit) = fault.during(number, &mut *made)?;
        // The kernel's way to the driver needs memory too; the object is then still there.
        match (result, hit) {
            (0, _) => {}
            (_, true) => destroyed(made()).map_err(said)?,
            (errno, false) => destroyed(errno).map_err(said)?,
        }
        if !hit {
            break;
        }
        if number == ENDLESS {
            return Err("there is no end of allocations while destroying".into());
        }
    }
    if failed > FOR_A_POST && refused == 0 {
        return Err(format!("{failed} allocations failed, and none was needed").into());
    }
    Ok(Seen {
        making,
        destroying,
        failed,
        refused,
    })
}

fn at(number: u32, outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Failed(reason) => Outcome::Failed(format!("with allocation {number}: {reason}")),
        skipped => skipped,
    }
}

fn well<T>(result: Result<T, Errno>) -> Check<T> {
    match result {
        Ok(made) => Ok(made),
        Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS)) => Err(Outcome::Skipped("not offered".into())),
        Err(errno) => Err(format!("{errno}").into()),
    }
}

fn destroyed(result: i32) -> Check {
    match result {
        0 => Ok(()),
        errno => Err(format!("not destroyed: {}", Errno(errno)).into()),
    }
}

/// What a destroy that may not fail said, as an errno value.
fn code(result: i32) -> i32 {
    check(result).map_or_else(|errno| errno.0, |()| 0)
}

/// Whether this is how a verb may say that there was no memory for it: `EAGAIN` where the kernel cannot map a page
/// of the device, `ENOBUFS` and `ENFILE` where it has no place for a neighbour that was not known, or no file for
/// the socket by which that is asked for.
fn is_refusal(errno: i32) -> bool {
    matches!(
        errno,
        libc::ENOMEM | libc::EAGAIN | libc::ENOBUFS | libc::ENFILE
    )
}

impl Ground {
    fn new(options: &Options) -> Check<Self> {
        let context = Context::open(options)?;
        let buffer = Buffer::new(LENGTH, BufferKind::Plain)
            .map_err(|errno| format!("no memory: {errno}"))?;
        // SAFETY: the context is open, and the buffer lives as long as the region.
        let (pd, mr, cq) = unsafe {
            let pd = well(not_null(ibv_alloc_pd(context.raw())))?;
            let address = buffer.address() as *mut _;
            let mr = well(not_null(ibv_reg_mr(pd, address, LENGTH, RIGHTS as i32)))?;
            let (none, nothing) = (ptr::null_mut(), ptr::null_mut());
            let cq = ibv_create_cq(context.raw(), 64, nothing, none, 0);
            (pd, mr, well(not_null(cq))?)
        };
        Ok(Self {
            options: options.clone(),
            context,
            buffer,
            pd,
            mr,
            cq,
        })
    }

    fn queue_pair(&self, kind: u32) -> Result<*mut ibv_qp, Errno> {
        let mut attr = ibv_qp_init_attr {
            send_cq: self.cq,
            recv_cq: self.cq,
            cap: ibv_qp_cap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            qp_type: kind,
            ..Default::default()
        };
        // SAFETY: domain and queue live, and the attributes are complete.
        not_null(unsafe { ibv_create_qp(self.pd, &mut attr) })
    }

    /// Runs `with` on a new queue pair, which goes if that fails.
    fn made_with(
        &self,
        kind: u32,
        with: impl FnOnce(*mut ibv_qp) -> Result<(), Errno>,
    ) -> Result<*mut ibv_qp, Errno> {
        let qp = self.queue_pair(kind)?;
        match with(qp) {
            Ok(()) => Ok(qp),
            Err(errno) => {
                // SAFETY: the queue pair lives, and is not used afterwards.
                let result = unsafe { ibv_destroy_qp(qp) };
                if result != 0 {
                    crate::report::complaint(format!("ibv_destroy_qp: {}", Errno(result.abs())));
                }
                Err(errno)
            }
        }
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        // SAFETY: what was made of these is gone, and they are not used afterwards.
        let results = unsafe {
            [
                ibv_destroy_cq(self.cq),
                ibv_dereg_mr(self.mr),
                ibv_dealloc_pd(self.pd),
            ]
        };
        if results != [0; 3] {
            crate::report::complaint(format!("the ground is still in use: {results:?}"));
        }
    }
}

fn open(ground: &Ground) -> Result<Made, Errno> {
    // The error is a sentence; which one does not matter here.
    let context = Context::open(&ground.options).map_err(|_| Errno(libc::ENOMEM))?;
    let mut context = Some(context);
    Ok(Box::new(move || {
        drop(context.take());
        0
    }))
}

fn domain(ground: &Ground) -> Result<Made, Errno> {
    // SAFETY: the context is open.
    let pd = not_null(unsafe { ibv_alloc_pd(ground.context.raw()) })?;
    // SAFETY: the domain lives until this succeeds.
    Ok(Box::new(move || code(unsafe { ibv_dealloc_pd(pd) })))
}

fn registered(mr: *mut ibv_mr) -> Result<Made, Errno> {
    let mr = not_null(mr)?;
    // SAFETY: the region lives until this succeeds.
    Ok(Box::new(move || code(unsafe { ibv_dereg_mr(mr) })))
}

fn region(ground: &Ground) -> Result<Made, Errno> {
    let address = ground.buffer.address() as *mut _;
    // SAFETY: domain and memory live.
    registered(unsafe { ibv_reg_mr(ground.pd, address, LENGTH, RIGHTS as i32) })
}

fn paged_region(ground: &Ground) -> Result<Made, Errno> {
    let address = ground.buffer.address() as *mut _;
    let access = RIGHTS & !IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND;
    // SAFETY: domain and memory live.
    registered(unsafe { ibv_reg_mr(ground.pd, address, LENGTH, access as i32) })
}

fn moved_region(ground: &Ground) -> Result<Made, Errno> {
    let address = ground.buffer.address() as *mut _;
    // SAFETY: domain and memory live.
    let mr = not_null(unsafe { ibv_reg_mr(ground.pd, address, LENGTH / 2, RIGHTS as i32) })?;
    // SAFETY: the region lives, and all of the buffer is mapped.
    let result = unsafe {
        let change = IBV_REREG_MR_CHANGE_TRANSLATION as i32;
        ibv_rereg_mr(mr, change, ptr::null_mut(), address, LENGTH, 0)
    };
    // It has codes of its own, and says in errno what the kernel said.
    let moved = check(match result {
        IBV_REREG_MR_ERR_CMD => -1,
        other => other,
    });
    if let Err(errno) = moved {
        // SAFETY: the region lives, and is not used afterwards.
        let result = code(unsafe { ibv_dereg_mr(mr) });
        if result != 0 {
            crate::report::complaint(format!("ibv_dereg_mr: {}", Errno(result)));
        }
        return Err(errno);
    }
    registered(mr)
}

fn shared_region(ground: &Ground) -> Result<Made, Errno> {
    // SAFETY: domain and region live.
    registered(unsafe { direct::reg_shared_mr(ground.pd, ground.mr, RIGHTS) }?)
}

fn window(ground: &Ground) -> Result<Made, Errno> {
    // SAFETY: the context is open.
    let ops = unsafe { &(*ground.context.raw()).ops };
    let (Some(alloc), Some(free)) = (ops.alloc_mw, ops.dealloc_mw) else {
        return Err(Errno(libc::ENOSYS));
    };
    // SAFETY: the domain lives.
    let mw = not_null(unsafe { alloc(ground.pd, IBV_MW_TYPE_2) })?;
    // SAFETY: the window lives until this succeeds.
    Ok(Box::new(move || code(unsafe { free(mw) })))
}

fn channel(ground: &Ground) -> Result<Made, Errno> {
    // SAFETY: the context is open.
    let channel = not_null(unsafe { ibv_create_comp_channel(ground.context.raw()) })?;
    Ok(Box::new(move || {
        // SAFETY: the channel lives until this succeeds.
        code(unsafe { ibv_destroy_comp_channel(channel) })
    }))
}

fn new_queue(ground: &Ground) -> Result<*mut ibv_cq, Errno> {
    let (none, nothing) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: the context is open.
    not_null(unsafe { ibv_create_cq(ground.context.raw(), 500, nothing, none, 0) })
}

fn queue(ground: &Ground) -> Result<Made, Errno> {
    let cq = new_queue(ground)?;
    // SAFETY: the queue lives until this succeeds.
    Ok(Box::new(move || code(unsafe { ibv_destroy_cq(cq) })))
}

fn resized_queue(ground: &Ground) -> Result<Made, Errno> {
    let cq = new_queue(ground)?;
    // SAFETY: the queue lives.
    let resized = check(unsafe { ibv_resize_cq(cq, 2000) });
    // SAFETY: the queue lives until this succeeds.
    let destroy = move || code(unsafe { ibv_destroy_cq(cq) });
    match resized {
        Ok(()) => Ok(Box::new(destroy)),
        Err(errno) => {
            let result = destroy();
            if result != 0 {
                crate::report::complaint(format!("ibv_destroy_cq: {}", Errno(result)));
            }
            Err(errno)
        }
    }
}

fn shared_queue(ground: &Ground) -> Result<Made, Errno> {
    let mut attr = ibv_srq_init_attr {
        attr: ibv_srq_attr {
            max_wr: 200,
            max_sge: 2,
            srq_limit: 0,
        },
        ..Default::default()
    };
    // SAFETY: the domain lives, and the attributes are complete.
    let srq = not_null(unsafe { ibv_create_srq(ground.pd, &mut attr) })?;
    // SAFETY: the queue lives until this succeeds.
    Ok(Box::new(move || code(unsafe { ibv_destroy_srq(srq) })))
}

fn destroyable(qp: *mut ibv_qp) -> Made {
    // SAFETY: the queue pair lives until this succeeds.
    Box::new(move || code(unsafe { ibv_destroy_qp(qp) }))
}

fn reliable(ground: &Ground) -> Result<Made, Errno> {
    Ok(destroyable(ground.queue_pair(IBV_QPT_RC)?))
}

fn unreliable(ground: &Ground) -> Result<Made, Errno> {
    Ok(destroyable(ground.queue_pair(IBV_QPT_UC)?))
}

fn datagram(ground: &Ground) -> Result<Made, Errno> {
    Ok(destroyable(ground.queue_pair(IBV_QPT_UD)?))
}

fn modify(qp: *mut ibv_qp, mut attr: ibv_qp_attr, mask: u32) -> Result<(), Errno> {
    // SAFETY: the queue pair lives.
    check(unsafe { ibv_modify_qp(qp, &mut attr, mask as i32) })
}

/// A queue pair that is connected to itself.
fn connected(ground: &Ground) -> Result<Made, Errno> {
    let qp = ground.made_with(IBV_QPT_RC, |qp| {
        let init = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: ground.context.port,
            qp_access_flags: RIGHTS & !IBV_ACCESS_MW_BIND,
            ..Default::default()
        };
        modify(
            qp,
            init,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        )?;
        let ready = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: IBV_MTU_1024,
            // SAFETY: the queue pair lives.
            dest_qp_num: unsafe { (*qp).qp_num },
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ah_attr: ground.context.own_path(),
            ..Default::default()
        };
        modify(
            qp,
            ready,
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        )?;
        let sending = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..Default::default()
        };
        modify(
            qp,
            sending,
            IBV_QP_STATE
                | IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC,
        )
    })?;
    Ok(destroyable(qp))
}

fn address(ground: &Ground) -> Result<Made, Errno> {
    let mut path = ground.context.own_path();
    // SAFETY: the domain lives, and the attributes are complete.
    let ah = not_null(unsafe { ibv_create_ah(ground.pd, &mut path) })?;
    // SAFETY: the handle lives until this succeeds.
    Ok(Box::new(move || code(unsafe { ibv_destroy_ah(ah) })))
}

fn member(ground: &Ground) -> Result<Made, Errno> {
    // A group of IPv4, 239.1.2.3.
    let mut group = ibv_gid::default();
    // SAFETY: all members of the union are plain bytes.
    unsafe {
        group.raw[10..12].copy_from_slice(&[0xff; 2]);
        group.raw[12..].copy_from_slice(&[239, 1, 2, 3]);
    }
    let qp = ground.made_with(IBV_QPT_UD, |qp| {
        let init = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: ground.context.port,
            qkey: 0x1234,
            ..Default::default()
        };
        modify(
            qp,
            init,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
        )?;
        // SAFETY: the queue pair lives.
        check(unsafe { ibv_attach_mcast(qp, &group, 0) })
    })?;
    let mut joined = true;
    Ok(Box::new(move || {
        if joined {
            // SAFETY: the queue pair lives.
            let left = code(unsafe { ibv_detach_mcast(qp, &group, 0) });
            if left != 0 {
                return left;
            }
            joined = false;
        }
        // SAFETY: the queue pair lives until this succeeds.
        code(unsafe { ibv_destroy_qp(qp) })
    }))
}

fn device_memory(ground: &Ground) -> Result<Made, Errno> {
    // SAFETY: the structure lives as long as the context.
    let verbs = unsafe { &*ground.context.extended() };
    let (Some(alloc), Some(register), Some(free)) =
        (verbs.alloc_dm, verbs.reg_dm_mr, verbs.free_dm)
    else {
        return Err(Errno(libc::ENOSYS));
    };
    let mut attr = ibv_alloc_dm_attr {
        length: 8192,
        ..Default::default()
    };
    // SAFETY: the context is open, and the attributes are complete.
    let dm = not_null(unsafe { alloc(ground.context.raw(), &mut attr) })?;
    let access = RIGHTS & !IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED;
    // SAFETY: domain and device memory live.
    let mr = not_null(unsafe { register(ground.pd, dm, 0, 8192, access) });
    // SAFETY: the device memory lives until this succeeds.
    let free_it = move || code(unsafe { free(dm) });
    let mr = match mr {
        Ok(mr) => mr,
        Err(errno) => {
            let result = free_it();
            if result != 0 {
                crate::report::complaint(format!("ibv_free_dm: {}", Errno(result)));
            }
            return Err(errno);
        }
    };
    let mut registered = true;
    Ok(Box::new(move || {
        if registered {
            // SAFETY: the region lives until this succeeds.
            let gone = code(unsafe { ibv_dereg_mr(mr) });
            if gone != 0 {
                return gone;
            }
            registered = false;
        }
        free_it()
    }))
}

fn queried(ground: &Ground) -> Result<Made, Errno> {
    ground.context.device_attr()?;
    ground.context.port_attr()?;
    Ok(Box::new(|| 0))
}
