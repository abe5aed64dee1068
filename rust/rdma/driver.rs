// SPDX-License-Identifier: GPL-2.0

//! What a driver of an RDMA device implements.

use super::*;
use kernel::build_error;
use kernel::error::VTABLE_DEFAULT_ERROR;
use kernel::prelude::*;

/// A driver of an RDMA device; the type itself is the driver's data of one device.
///
/// Operations that create an object get a [`New`], initialise it with [`New::init`] and return what
/// that gave them. If they fail after initialising, the data is dropped. The operation that
/// destroys an object has to drop every [`ObjectRef`] the driver keeps; afterwards the data is
/// dropped.
///
/// The operations without a default are what the core demands of a device that kernel users may
/// use. An operation with a default that is not overridden is absent from the device's table.
///
/// Requests of user processes carry [`Udata`]; it is `None` for requests of the kernel. An
/// operation that gets one has to call [`Udata::read`] or [`Udata::expect_empty`]. Response bytes
/// that it does not write are zeroed for it.
#[vtable]
pub trait Driver: Sized + Send + Sync + 'static {
    /// Pattern of the device's name, with one `%d`.
    const NAME: &'static CStr;
    /// The driver's number in the user ABI; zero leaves finding the provider to the PCI id.
    const DRIVER_ID: u32 = 0;
    /// Version of the user ABI.
    const ABI_VERSION: u32;
    /// Methods that the driver adds to what processes may do with verbs objects.
    const METHODS: &'static [MethodDef<Self>] = &[];

    /// Driver's data of a user context.
    type Ucontext: Send + Sync;
    /// Driver's data of a protection domain.
    type Pd: Send + Sync;
    /// Driver's data of a completion queue.
    type Cq: Send + Sync;
    /// Driver's data of a queue pair.
    type Qp: Send + Sync;
    /// Driver's data of a memory region.
    type Mr: Send + Sync;
    /// Driver's data of an address handle.
    type Ah: Send + Sync;
    /// Driver's data of a shared receive queue.
    type Srq: Send + Sync;
    /// Driver's data of a memory window.
    type Mw: Send + Sync;
    /// Driver's data of a domain of extended reliable connections.
    type Xrcd: Send + Sync;
    /// Driver's data of a piece of device memory.
    type Dm: Send + Sync;

    // ---- The device and its ports ----

    /// What the device is and can do.
    fn query_device(dev: &Device<Self>) -> Result<DeviceAttr>;

    /// The state of a port.
    fn query_port(dev: &Device<Self>, port: u32) -> Result<PortAttr>;

    /// What never changes about a port. Called once, while registering.
    fn port_immutable(dev: &Device<Self>, port: u32) -> Result<PortImmutable>;

    /// What kind of link a port has; Ethernet unless overridden.
    fn link_layer(_dev: &Device<Self>, _port: u32) -> LinkLayer {
        LinkLayer::Ethernet
    }

    /// An entry of the partition key table.
    fn query_pkey(_dev: &Device<Self>, _port: u32, _index: u16) -> Result<u16> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// An entry of the GID table of a port that is not RoCE.
    fn query_gid(_dev: &Device<Self>, _port: u32, _index: u32) -> Result<Gid> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A GID came into the table of a RoCE port. May sleep.
    fn add_gid(_dev: &Device<Self>, _attr: &GidAttr) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A GID left the table of a RoCE port. May sleep.
    fn del_gid(_dev: &Device<Self>, _attr: &GidAttr) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Version of the firmware: major, minor, patch.
    fn firmware_version(_dev: &Device<Self>) -> (u16, u16, u16) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Reads the counters of a port, in the order of their names. May sleep.
    fn read_counters(_dev: &Device<Self>, _port: u32, _values: &mut [u64]) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a queue pair to whoever lists them. May be called while it is destroyed.
    fn describe_qp(_qp: &Qp<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a completion queue, likewise.
    fn describe_cq(_cq: &Cq<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a memory region, likewise.
    fn describe_mr(_mr: &Mr<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells counters of a memory region, likewise.
    fn count_mr(_mr: &Mr<Self>, _counts: &mut Counts<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells details of a shared receive queue, likewise.
    fn describe_srq(_srq: &Srq<Self>, _details: &mut Details<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Something happened to the network interface that the device is paired with. Under RTNL.
    fn netdev_event(_dev: &Device<Self>, _netdev: &Netdev, _event: NetdevEvent) {}

    /// Where the driver's interrupt handlers raise events of the device as a whole.
    fn event_sink(_dev: &Device<Self>) -> Option<&EventSink<Self>> {
        None
    }

    /// Something happened that was raised in the event sink: the bits are the driver's own. What
    /// happened before the device was registered comes as soon as it is. Atomic context.
    fn device_events(_dev: &Device<Self>, _events: u32) {}

    // ---- User contexts ----

    /// A process opened the device.
    fn alloc_ucontext<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::Ucontext, Self>,
        _udata: &Udata<'_, Self>,
    ) -> Result<&'a Ucontext<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A process asks about its context: one that was given the context of another for what the
    /// other was told when it opened the device, any for the time of the device.
    fn query_ucontext(_ctx: &Ucontext<Self>, _response: &ContextResponse<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A process closed the device. Its mappings are removed before the data is dropped.
    fn dealloc_ucontext(_ctx: &Ucontext<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    // ---- Protection domains ----

    /// Makes a protection domain.
    fn alloc_pd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>>;

    /// Ends a protection domain.
    fn dealloc_pd(pd: &Pd<Self>) -> Result;

    // ---- Completion queues ----

    /// Makes a completion queue for the kernel.
    fn create_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
    ) -> Result<&'a Cq<Self>>;

    /// Makes a completion queue for a process.
    fn create_user_cq<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::Cq, Self>,
        _attr: &CqInitAttr,
        _udata: &Udata<'_, Self>,
    ) -> Result<&'a Cq<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a completion queue, that of a kernel user without fail: takes it out of every table
    /// that events find it by, the device's and the driver's.
    ///
    /// The data stays until the core has stopped polling the queue: [`Driver::poll_cq`] and
    /// [`Driver::req_notify_cq`] may still be called.
    fn destroy_cq(cq: &Cq<Self>) -> Result;

    /// Takes completions off a queue of the kernel. Atomic context.
    fn poll_cq(cq: &Cq<Self>, completions: &mut Completions<'_>) -> Result;

    /// Asks for an event at the next completion. Returns whether there are completions already,
    /// if that was asked for. Atomic context.
    fn req_notify_cq(cq: &Cq<Self>, notify: Notify) -> Result<bool>;

    /// Sets the moderation of a completion queue: events after `count` completions or `period`
    /// microseconds.
    fn modify_cq(_cq: &Cq<Self>, _count: u16, _period: u16) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Gives a completion queue of a process another buffer, and tells by [`Cq::set_entries`] how
    /// many entries it has. The process may do that several times at once.
    fn resize_user_cq(_cq: &Cq<Self>, _entries: u32, _udata: &Udata<'_, Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    // ---- Queue pairs ----

    /// Makes a queue pair. `attr` may be written: capabilities are what was granted.
    fn create_qp<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Qp, Self>,
        attr: &mut QpInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Qp<Self>>;

    /// Changes state and attributes of a queue pair.
    fn modify_qp(qp: &Qp<Self>, attr: &QpAttr<'_>, udata: Option<&Udata<'_, Self>>) -> Result;

    /// Tells state and attributes of a queue pair.
    fn query_qp(_qp: &Qp<Self>, _attr: &mut QpQuery<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a queue pair.
    fn destroy_qp(qp: &Qp<Self>) -> Result;

    /// Posts work requests on the send queue of the kernel. On failure the request that
    /// [`SendList::next`] returned last is reported as the bad one. Atomic context.
    fn post_send(qp: &Qp<Self>, list: &mut SendList<'_, Self>) -> Result;

    /// Posts work requests on the receive queue of the kernel, as for `post_send`.
    fn post_recv(qp: &Qp<Self>, list: &mut RecvList<'_>) -> Result;

    /// Waits until all send work requests of a queue pair in error are completed.
    fn drain_sq(_qp: &Qp<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Waits until all receive work requests of a queue pair in error are completed.
    fn drain_rq(_qp: &Qp<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Lets a datagram queue pair receive what is sent to a multicast group.
    fn attach_mcast(_qp: &Qp<Self>, _gid: Gid) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Undoes `attach_mcast`.
    fn detach_mcast(_qp: &Qp<Self>, _gid: Gid) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    // ---- Memory ----

    /// Makes a region of all memory, by DMA address, for the kernel.
    fn get_dma_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        access: Access,
    ) -> Result<&'a Mr<Self>>;

    /// Registers memory of a process.
    fn reg_user_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &UserRegion,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>>;

    /// Registers part of a DMA buffer.
    fn reg_user_mr_dmabuf<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _region: &DmabufRegion,
    ) -> Result<&'a Mr<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a region, which is in domain `pd`.
    fn dereg_mr(mr: &Mr<Self>, pd: &Pd<Self>) -> Result;

    /// Makes a region of up to `pages` pages that is registered by work request.
    fn alloc_mr<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _pages: u32,
    ) -> Result<&'a Mr<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// The kernel starts to map a scatter list: forget the pages of a region made by `alloc_mr`.
    fn begin_mr_map(_mr: &Mr<Self>) {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Adds a page, by DMA address, to the pages of a region made by `alloc_mr`. Failing ends the
    /// mapping with the pages there are.
    fn push_mr_page(_mr: &Mr<Self>, _addr: u64) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Changes a region of a process in place: what is `Some` changes.
    ///
    /// Failing leaves the region as it was. The core sets address, length and protection domain
    /// of the region itself.
    fn rereg_user_mr(
        _mr: &Mr<Self>,
        _change: &RegionChange<'_, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// A process says that it is going to use parts of on-demand regions. With `wait` the call
    /// returns when they are ready.
    fn advise_mr(_pd: &Pd<Self>, _advice: Advice, _wait: bool, _ranges: &[AdvisedRange]) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Makes a memory window.
    fn alloc_mw<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mw, Self>,
        _type2: bool,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mw<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a memory window.
    fn dealloc_mw(_mw: &Mw<Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Allocates memory of the device for a process.
    fn alloc_dm<'a>(
        _dev: &Device<Self>,
        _context: &Ucontext<Self>,
        _new: New<'a, kind::Dm, Self>,
        _attr: &DmAllocAttr,
        _response: &DmResponse<'_>,
    ) -> Result<&'a Dm<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Frees memory of the device.
    fn dealloc_dm(_dm: &Dm<Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Registers memory of the device.
    fn reg_dm_mr<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Mr, Self>,
        _dm: &Dm<Self>,
        _region: &DmRegion,
    ) -> Result<&'a Mr<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    // ---- Address handles ----

    /// Makes an address handle. May be in atomic context unless `sleepable`.
    fn create_ah<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Ah, Self>,
        _attr: &AhAttr,
        _sleepable: bool,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Ah<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends an address handle. May be in atomic context unless `sleepable`.
    fn destroy_ah(_ah: &Ah<Self>, _sleepable: bool) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    // ---- Shared receive queues ----

    /// Makes a shared receive queue. `attr` may be written: capabilities are what was granted.
    ///
    /// One with `extended` is for extended reliable connections; its number has to be told by
    /// [`New::set_extended_number`].
    fn create_srq<'a>(
        _pd: &Pd<Self>,
        _new: New<'a, kind::Srq, Self>,
        _attr: &mut SrqAttr,
        _extended: Option<&ExtendedSrq<'_, Self>>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Makes a domain of extended reliable connections.
    fn alloc_xrcd<'a>(
        _dev: &Device<Self>,
        _new: New<'a, kind::Xrcd, Self>,
        _udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Xrcd<Self>> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a domain of extended reliable connections.
    fn dealloc_xrcd(_xrcd: &Xrcd<Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Sets the limit of a shared receive queue: an event is raised when fewer are left.
    fn modify_srq_limit(_srq: &Srq<Self>, _limit: u32) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Makes a shared receive queue hold at least `max_wr` requests, and those that it has.
    fn resize_srq(_srq: &Srq<Self>, _max_wr: u32, _udata: Option<&Udata<'_, Self>>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Tells the attributes of a shared receive queue.
    fn query_srq(_srq: &Srq<Self>) -> Result<SrqAttr> {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Ends a shared receive queue.
    fn destroy_srq(_srq: &Srq<Self>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }

    /// Posts work requests on a shared receive queue of the kernel. Atomic context.
    fn post_srq_recv(_srq: &Srq<Self>, _list: &mut RecvList<'_>) -> Result {
        build_error!(VTABLE_DEFAULT_ERROR)
    }
}
