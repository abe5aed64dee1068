// SPDX-License-Identifier: GPL-2.0

//! The driver: what the core asks of a device, trait by trait.

use crate::bindings;
use crate::engine::{fail, Engine, NOBODY};
use crate::kernel_ext::errno::eopnotsupp;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::kernel_ext::workqueue::OwnedQueue;
use crate::memory::{Local, Mapping, Pages, MAX_SGE};
use crate::queue::{Cqe, Op, Recv, Ring, Send, Sweep};
use crate::rdma::{
    kind, Access, Completions, Cq, CqInitAttr, CqOps, Device, DeviceAttr, DeviceCaps, Driver,
    FrwrOps, GidAttr, GidOps, Mr, MrOps, Mtu, Netdev, NetdevEvent, NetdevOps, New, Notify, Ops, Pd,
    PdOps, PortAttr, PortImmutable, Qp, QpAttr, QpCap, QpInitAttr, QpOps, QpQuery, QpState, QpType,
    QpValues, RecvList, RegWr, Rtnl, SendFlags, SendList, SendOp, Ucontext, Udata, UserOps,
    UserRegion, Wc, WcStatus,
};
use kernel::page::PAGE_SIZE;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::{new_mutex, Arc, Mutex};

/// Entries of the GID table.
const GIDS: u32 = 16;
/// Entries of a send or receive queue, at the most.
const MAX_WR: u32 = 1 << 14;
/// Entries of a completion queue, at the most.
const MAX_CQE: u32 = 1 << 18;
/// Pages of a region, at the most.
pub(crate) const MAX_PAGES: u32 = 1 << 11;
/// Whose device it is. Nobody's: one that is locally administered, as that of the node's GUID.
pub(crate) const OUI: u32 = 0x020000;
/// Objects of a kind that are told to be possible. Of queue pairs and regions, which have numbers, there are no more.
pub(crate) const MANY: u32 = 1 << 16;
/// Of those, how many processes leave to users in the kernel.
pub(crate) const OF_KERNEL: u32 = MANY / 8;

/// The driver's data of the device.
pub(crate) struct Soft {
    // Dropped first, which waits for the engine.
    queue: OwnedQueue,
    pub(crate) engine: Arc<Engine>,
    /// How many domains there have been. Nobody makes so many that there would be the same number again.
    pds: Atomic<u64>,
    /// How many regions there have been.
    regions: Atomic<u64>,
}

impl Soft {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            queue: OwnedQueue::ordered(c"rust_rdma_soft")?,
            engine: Engine::new()?,
            pds: Atomic::new(0),
            regions: Atomic::new(0),
        })
    }

    /// Has the engine look at what was posted. May be called in atomic context.
    fn kick(&self) {
        // Where it is queued already, it has yet to look.
        drop(self.queue.enqueue(self.engine.clone()));
    }
}

#[vtable]
impl Driver for Soft {
    const NAME: &'static CStr = c"rust_soft%d";
    const ABI_VERSION: u32 = 1;
    const OPS: Ops<Self> = Ops::new()
        .with_user()
        .with_posting_by_core()
        .with_gids()
        .with_netdev()
        .with_frwr();

    fn query_device(_dev: &Device<Self>) -> Result<DeviceAttr> {
        Ok(DeviceAttr {
            max_mr_size: u64::from(MAX_PAGES) * kernel::page::PAGE_SIZE as u64,
            page_size_cap: kernel::page::PAGE_SIZE as u64,
            vendor_id: OUI,
            vendor_part_id: 1,
            max_qp: MANY,
            max_qp_wr: MAX_WR,
            caps: DeviceCaps::MEM_MGT_EXTENSIONS,
            local_dma_lkey: true,
            max_send_sge: MAX_SGE as u32,
            max_recv_sge: MAX_SGE as u32,
            max_sge_rd: MAX_SGE as u32,
            max_cq: MANY,
            max_cqe: MAX_CQE,
            max_mr: MANY,
            max_pd: MANY,
            max_qp_rd_atom: 16,
            max_qp_init_rd_atom: 16,
            max_res_rd_atom: 16 * MANY,
            atomic_hca: true,
            max_fast_reg_page_list_len: MAX_PAGES,
            max_pkeys: 1,
            ..DeviceAttr::default()
        })
    }

    fn query_port(dev: &Device<Self>, port: u32) -> Result<PortAttr> {
        let attr = PortAttr::ethernet(&dev.ethernet_port(port), Mtu::Bytes4096, GIDS);
        Ok(PortAttr {
            cap_flags: 0,
            ..attr
        })
    }

    fn port_immutable(_dev: &Device<Self>, _port: u32) -> Result<PortImmutable> {
        Ok(PortImmutable {
            // Without datagrams there is no communication manager.
            core_cap_flags: bindings::RDMA_CORE_CAP_PROT_ROCE_UDP_ENCAP
                | bindings::RDMA_CORE_CAP_ETH_AH,
            max_mad_size: 0,
            ..PortImmutable::roce_v2(GIDS)
        })
    }

    fn query_pkey(_dev: &Device<Self>, _port: u32, _index: u16) -> Result<u16> {
        Ok(0xffff)
    }
}

// The core keeps the table; nothing leaves this device that would need the addresses.
impl GidOps for Soft {
    fn add_gid(_dev: &Device<Self>, _attr: &GidAttr) -> Result {
        Ok(())
    }

    fn del_gid(_dev: &Device<Self>, _attr: &GidAttr) -> Result {
        Ok(())
    }
}

impl NetdevOps for Soft {
    fn shares_link(_dev: &Device<Self>, _rtnl: &Rtnl, _port: u32, netdev: &Netdev) -> bool {
        netdev.is_hardware()
    }

    fn netdev_event(dev: &Device<Self>, port: u32, netdev: &Netdev, event: NetdevEvent) {
        if matches!(
            event,
            NetdevEvent::Up | NetdevEvent::Down | NetdevEvent::Change
        ) {
            dev.report_port(port, netdev.is_up());
        }
    }
}

// Processes have nothing of the device in their memory: the core posts and polls for them.
#[vtable]
impl UserOps for Soft {
    type Ucontext = ();

    fn alloc_ucontext<'a>(
        _dev: &Device<Self>,
        new: New<'a, kind::Ucontext, Self>,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Ucontext<Self>> {
        udata.expect_empty()?;
        new.init(())
    }
}

/// Checks that the provider, which has nothing to say to this driver, said nothing.
fn expect_nothing(udata: Option<&Udata<'_, Soft>>) -> Result {
    udata.map_or(Ok(()), Udata::expect_empty)
}

/// Data of a protection domain.
pub(crate) struct SoftPd {
    pub(crate) number: u64,
}

impl PdOps for Soft {
    type Pd = SoftPd;

    fn alloc_pd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>> {
        expect_nothing(udata)?;
        let number = dev.pds.fetch_add(1, Relaxed);
        new.init(SoftPd { number })
    }

    fn dealloc_pd(_pd: &Pd<Self>) -> Result {
        Ok(())
    }
}

/// Data of a completion queue.
#[pin_data]
pub(crate) struct SoftCq {
    #[pin]
    pub(crate) state: IrqSpinLock<CqState>,
}

pub(crate) struct CqState {
    ring: Ring<Cqe>,
    /// Set where the consumer waits: whether for solicited completions only.
    armed: Option<bool>,
    /// Whether a completion was lost.
    overrun: bool,
}

impl CqState {
    fn new(ring: Ring<Cqe>) -> Self {
        Self {
            ring,
            armed: None,
            overrun: false,
        }
    }

    /// A completion was lost; returns whether the consumer is to be told: once. Those of a process wait, in memory of
    /// the kernel's, until it asks for them.
    fn overruns(&mut self) -> bool {
        !core::mem::replace(&mut self.overrun, true)
    }

    /// The consumer waits. Where it waits for any completion already, it goes on to.
    fn arm(&mut self, solicited: bool) {
        self.armed = Some(solicited && self.armed != Some(false));
    }

    /// A completion was added; returns whether the consumer is to be told.
    fn wakes(&mut self, solicited: bool) -> bool {
        let wakes = self.armed.is_some_and(|only| solicited || !only);
        if wakes {
            self.armed = None;
        }
        wakes
    }
}

/// Puts a completion into a queue, and wakes who waits for it.
pub(crate) fn add_completion(cq: &Cq<Soft>, cqe: Cqe, solicited: bool) {
    let solicited = solicited || cqe.status != WcStatus::Success;
    let mut state = cq.state.lock();
    if let Err(lost) = state.ring.push(cqe) {
        let first = state.overruns();
        drop(state);
        // There is no room: the consumer posted more than it said. Not all listen to events of completion
        // queues (those of `ib_alloc_cq` do not); what comes next of its queue pair says so.
        fail(&lost.qp);
        if first {
            cq.report_error();
        }
        return;
    }
    let wakes = state.wakes(solicited);
    // The handler may poll.
    drop(state);
    if wakes {
        cq.complete();
    }
}

#[vtable]
impl CqOps for Soft {
    type Cq = SoftCq;

    fn create_cq<'a>(
        _dev: &Device<Self>,
        mut new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>> {
        if attr.entries == 0 || attr.entries > MAX_CQE || attr.flags != 0 {
            return Err(EINVAL);
        }
        let ring = Ring::new(attr.entries as usize)?;
        new.set_entries(attr.entries);
        new.init(pin_init!(SoftCq {
            state <- new_irq_spinlock!(CqState::new(ring), "rust_rdma_soft::cq"),
        }))
    }

    fn destroy_cq(_cq: &Cq<Self>) -> Result {
        // It is in no table: queue pairs lead to it, and there is none any more.
        Ok(())
    }

    fn poll_cq(cq: &Cq<Self>, completions: &mut Completions<'_>) -> Result {
        let mut state = cq.state.lock();
        while !completions.is_full() {
            let Some(cqe) = state.ring.pop() else { break };
            completions.push(&Wc {
                status: cqe.status,
                byte_len: cqe.byte_len,
                imm_data: cqe.imm,
                invalidated: cqe.invalidated,
                ..Wc::new(&*cqe.qp, cqe.wr_id, cqe.opcode)
            });
        }
        Ok(())
    }

    fn req_notify_cq(cq: &Cq<Self>, notify: Notify) -> Result<bool> {
        let mut state = cq.state.lock();
        state.arm(notify.solicited);
        Ok(!state.ring.is_empty())
    }
}

/// Data of a queue pair.
#[pin_data]
pub(crate) struct SoftQp {
    /// The number of its protection domain.
    pub(crate) pd: u64,
    /// Its attributes.
    #[pin]
    pub(crate) values: Mutex<QpValues>,
    #[pin]
    pub(crate) queues: IrqSpinLock<Queues>,
}

pub(crate) struct Queues {
    /// As in the attributes, for those who may not sleep.
    pub(crate) state: QpState,
    pub(crate) sends: Ring<Send>,
    pub(crate) recvs: Ring<Recv>,
}

/// Completions that are looked at with interrupts off.
const PURGED_AT_ONCE: usize = 64;

/// Takes completions of a queue pair out of its completion queues. The engine adds none meanwhile.
fn purge(qp: &Qp<Soft>) {
    for cq in [qp.send_cq(), qp.recv_cq()].into_iter().flatten() {
        let number = qp.number();
        let mut sweep = Sweep::default();
        let mut some = || {
            let mut state = cq.state.lock();
            let others = |cqe: &Cqe| cqe.qp.number() != number;
            state.ring.sweep(&mut sweep, PURGED_AT_ONCE, others)
        };
        while !some() {}
    }
}

#[vtable]
impl QpOps for Soft {
    type Qp = SoftQp;

    fn create_qp<'a>(
        dev: &Device<Self>,
        mut new: New<'a, kind::Qp, Self>,
        attr: &mut QpInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Qp<Self>> {
        expect_nothing(udata)?;
        if attr.qp_type() != Some(QpType::Rc) || attr.create_flags().as_raw() != 0 {
            return Err(eopnotsupp());
        }
        let cap = attr.cap();
        let (wrs, sges) = (
            cap.max_send_wr.max(cap.max_recv_wr),
            cap.max_send_sge.max(cap.max_recv_sge),
        );
        if wrs > MAX_WR || sges as usize > MAX_SGE || cap.max_inline_data != 0 {
            return Err(EINVAL);
        }
        let cap = QpCap {
            max_send_sge: MAX_SGE as u32,
            max_recv_sge: MAX_SGE as u32,
            ..cap
        };
        attr.set_cap(&cap);
        let values = QpValues {
            cap,
            signal_all: attr.signal_all(),
            port: 1,
            ..QpValues::default()
        };
        let queues = Queues {
            state: QpState::Reset,
            sends: Ring::new(cap.max_send_wr as usize)?,
            recvs: Ring::new(cap.max_recv_wr as usize)?,
        };
        let pd = attr.pd().ok_or(EINVAL)?.number;
        let mut objects = dev.engine.objects.lock();
        let number = objects.qps.reserve(udata.is_some())?;
        new.set_number(number);
        let qp = new.init(pin_init!(SoftQp {
            pd,
            values <- new_mutex!(values, "rust_rdma_soft::qp"),
            queues <- new_irq_spinlock!(queues, "rust_rdma_soft::queues"),
        }))?;
        objects.qps.set(number, qp.get_ref());
        Ok(qp)
    }

    fn modify_qp(qp: &Qp<Self>, attr: &QpAttr<'_>, udata: Option<&Udata<'_, Self>>) -> Result {
        expect_nothing(udata)?;
        // Nothing is done meanwhile.
        let _objects = qp.device().engine.objects.lock();
        let mut values = qp.values.lock();
        let next = attr.state().unwrap_or(values.state);
        if !attr.transition_is_ok(values.state, next, QpType::Rc) {
            return Err(EINVAL);
        }
        values.merge(attr);
        values.state = next;
        let mut queues = qp.queues.lock();
        queues.state = next;
        if next == QpState::Reset {
            queues.sends.clear();
            queues.recvs.clear();
            drop(queues);
            purge(qp);
        }
        qp.device().kick();
        Ok(())
    }

    fn query_qp(qp: &Qp<Self>, attr: &mut QpQuery<'_>) -> Result {
        attr.fill(&qp.values.lock());
        Ok(())
    }

    fn destroy_qp(qp: &Qp<Self>) -> Result {
        let mut objects = qp.device().engine.objects.lock();
        objects.qps.set(qp.number(), None);
        // Its number may be another's next, who must not find somebody connected with it. Who is left learns of it when
        // it sends, as over a wire: what it has received is still to be polled, and receives that it has posted are no
        // errors.
        if let Some(peer) = objects.connected_with(qp) {
            peer.values.lock().dest_qp_num = NOBODY;
        }
        // Of those that it is counted by, the completions are left.
        purge(qp);
        drop(objects);
        // Whoever waits for it waits no more.
        qp.device().kick();
        Ok(())
    }

    fn post_send(qp: &Qp<Self>, list: &mut SendList<'_, Self>) -> Result {
        let posted = (|| {
            while let Some(wr) = list.next() {
                if wr.flags().contains(SendFlags::INLINE) {
                    return Err(EINVAL);
                }
                let op = match wr.op()? {
                    SendOp::Send => Op::Send {
                        imm: None,
                        invalidate: None,
                    },
                    SendOp::SendWithImm(imm) => Op::Send {
                        imm: Some(imm),
                        invalidate: None,
                    },
                    SendOp::SendWithInvalidate(key) => Op::Send {
                        imm: None,
                        invalidate: Some(key),
                    },
                    SendOp::RdmaWrite(remote) => Op::Write { remote, imm: None },
                    SendOp::RdmaWriteWithImm(remote, imm) => Op::Write {
                        remote,
                        imm: Some(imm),
                    },
                    SendOp::RdmaRead(remote) => Op::Read(remote),
                    SendOp::CompareSwap {
                        remote,
                        compare,
                        swap,
                    } => Op::CompareSwap {
                        remote,
                        compare,
                        swap,
                    },
                    SendOp::FetchAdd { remote, add } => Op::FetchAdd { remote, add },
                    SendOp::LocalInvalidate(key) => Op::Invalidate(key),
                    SendOp::RegMr(RegWr { mr, key, access }) => Op::Register {
                        serial: mr.serial,
                        key,
                        mapping: Mapping {
                            iova: mr.iova(),
                            length: mr.length(),
                            access,
                        },
                    },
                    SendOp::Driver { .. } => return Err(eopnotsupp()),
                };
                let send = Send {
                    wr_id: wr.wr_id(),
                    flags: wr.flags(),
                    op,
                    local: Local::new(qp, wr.sges())?,
                };
                let mut queues = qp.queues.lock();
                if !matches!(queues.state, QpState::Rts | QpState::Sqd | QpState::Err) {
                    return Err(EINVAL);
                }
                queues.sends.push(send).map_err(|_| ENOMEM)?;
            }
            Ok(())
        })();
        // Also what was posted before one that cannot be.
        qp.device().kick();
        posted
    }

    fn post_recv(qp: &Qp<Self>, list: &mut RecvList<'_>) -> Result {
        let posted = (|| {
            while let Some(wr) = list.next() {
                let recv = Recv {
                    wr_id: wr.wr_id(),
                    local: Local::new(qp, wr.sges())?,
                };
                let mut queues = qp.queues.lock();
                if queues.state == QpState::Reset {
                    return Err(EINVAL);
                }
                queues.recvs.push(recv).map_err(|_| ENOMEM)?;
            }
            Ok(())
        })();
        qp.device().kick();
        posted
    }
}

/// Data of a memory region.
#[pin_data]
pub(crate) struct SoftMr {
    /// Its place in the table, which its keys begin with.
    pub(crate) number: u32,
    /// Which of all regions that there have been it is: a place is another one's later.
    pub(crate) serial: u64,
    /// The number of its protection domain.
    pub(crate) pd: u64,
    #[pin]
    pub(crate) pages: IrqSpinLock<Pages>,
}

/// Enters a region into the table, under a key of its own.
fn enter_region<'a>(
    pd: &Pd<Soft>,
    mut new: New<'a, kind::Mr, Soft>,
    pages: Pages,
    of_process: bool,
) -> Result<&'a Mr<Soft>> {
    let serial = pd.device().regions.fetch_add(1, Relaxed);
    let mut objects = pd.device().engine.objects.lock();
    let number = objects.mrs.reserve(of_process)?;
    // The last byte is another one than that of who had the number before, mostly: there are 256.
    let key = number << 8 | u32::from(serial as u8);
    let pages = pages.with_key(key);
    new.set_keys(key, key);
    let mr = new.init(pin_init!(SoftMr {
        number,
        serial,
        pd: pd.number,
        pages <- new_irq_spinlock!(pages, "rust_rdma_soft::mr"),
    }))?;
    objects.mrs.set(number, mr.get_ref());
    Ok(mr)
}

#[vtable]
impl MrOps for Soft {
    type Mr = SoftMr;

    fn get_dma_mr<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _access: Access,
    ) -> Result<&'a Mr<Self>> {
        // Asked for only where peers shall have all memory: there is a key for local use.
        Err(eopnotsupp())
    }

    fn reg_user_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &UserRegion,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>> {
        expect_nothing(udata)?;
        // Not while others wait for the table.
        let pages = Pages::of_process(pd.device(), region)?;
        enter_region(pd, new, pages, true)
    }

    fn dereg_mr(mr: &Mr<Self>, _pd: &Pd<Self>) -> Result {
        mr.device().engine.objects.lock().mrs.set(mr.number, None);
        Ok(())
    }
}

impl FrwrOps for Soft {
    fn alloc_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        pages: u32,
    ) -> Result<&'a Mr<Self>> {
        if pages > MAX_PAGES {
            return Err(EINVAL);
        }
        // The last byte of the key is the consumer's from now on.
        enter_region(pd, new, Pages::new(pages as usize)?, false)
    }

    fn begin_mr_map(mr: &Mr<Self>) {
        mr.pages.lock().clear();
    }

    fn push_mr_page(mr: &Mr<Self>, addr: u64) -> Result {
        // The core leaves it to the driver which sizes of pages there are.
        if mr.page_size() as usize != PAGE_SIZE {
            return Err(EINVAL);
        }
        // SAFETY: DMA addresses of the device are those of the kernel (`virtual_dma`). Consumers leave pages that they
        // have mapped until the work requests that name the region are complete, and map them to be written where
        // they register them so, as they must for any device.
        unsafe { mr.pages.lock().push(addr) }
    }
}

#[kunit_tests(rust_rdma_soft_driver)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_any_completion_goes_on_to() -> Result {
        let mut state = CqState::new(Ring::new(1)?);
        assert!(!state.wakes(true));
        state.arm(true);
        assert!(!state.wakes(false));
        // From now on any wakes, also after asking for less.
        state.arm(false);
        state.arm(true);
        assert!(state.wakes(false));
        // Once.
        assert!(!state.wakes(true));
        state.arm(true);
        assert!(!state.wakes(false) && state.wakes(true));
        Ok(())
    }

    #[test]
    fn consumers_are_told_once_of_what_was_lost() -> Result {
        let mut state = CqState::new(Ring::new(1)?);
        assert!(state.overruns() && !state.overruns());
        Ok(())
    }
}
