// SPDX-License-Identifier: GPL-2.0

//! Devices that are made, registered, and paired with network interfaces.

use super::{is_plain, Device};
use crate::bindings;
use crate::kernel_ext::workqueue::OwnedQueue;
use crate::rdma::counters::Descriptions;
use crate::rdma::event::Attached;
use crate::rdma::hold::Holds;
use crate::rdma::method::Definitions;
use crate::rdma::netdev::{GidScan, Pairing, PortGids};
use crate::rdma::{Driver, Netdev, NetdevEvent, Ops, Rtnl};
use core::ptr::{self, NonNull};
use kernel::devres::Devres;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::types::Opaque;
use kernel::{device, ThisModule};

c_enum! {
    /// What a device is among those of a fabric, by which the core knows its transport.
    pub enum NodeType {
        /// A channel adapter: InfiniBand, RoCE.
        IbCa = RDMA_NODE_IB_CA,
        /// An adapter of iWARP.
        Rnic = RDMA_NODE_RNIC,
        /// None of those that the core knows.
        Unspecified = RDMA_NODE_UNSPECIFIED,
    }
}

impl Default for NodeType {
    fn default() -> Self {
        Self::IbCa
    }
}

/// What the core has to know about a device before it is registered.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceInfo {
    /// What it is.
    pub node_type: NodeType,
    /// The node's GUID.
    pub node_guid: u64,
    /// How many ports it has.
    pub ports: u32,
    /// How many completion vectors it has.
    pub comp_vectors: u32,
    /// A name for people, of up to 63 bytes.
    pub description: &'static CStr,
    /// The key for all local memory, if the device has one
    /// ([`DeviceAttr::local_dma_lkey`](super::DeviceAttr::local_dma_lkey) says so).
    pub local_dma_lkey: u32,
    /// Whether the device is made of software, for which addresses of the kernel are DMA addresses.
    pub virtual_dma: bool,
    /// Names of the counters that each port has ([`crate::rdma::CounterOps`]).
    pub counter_names: &'static [&'static str],
    /// Whether moderation adapts to the traffic, until an administrator says otherwise
    /// ([`Device::adaptive_moderation`]).
    pub adaptive_moderation: bool,
}

impl DeviceInfo {
    fn fill(&self, raw: &mut bindings::ib_device) {
        raw.node_guid = self.node_guid.to_be();
        raw.node_type = self.node_type.as_raw() as u8;
        raw.phys_port_cnt = self.ports;
        raw.num_comp_vectors = self.comp_vectors as c_int;
        raw.local_dma_lkey = self.local_dma_lkey;
        raw.set_use_cq_dim(self.adaptive_moderation.into());
        // The last byte stays zero.
        let node_desc = &mut raw.node_desc[..63];
        for (to, from) in node_desc.iter_mut().zip(self.description.to_bytes()) {
            *to = *from;
        }
    }
}

/// A device that the core has allocated but does not know yet.
///
/// # Invariants
///
/// The device `dev` is initialised, not registered, and owned by this value; `parent` is its parent.
pub struct Unregistered<'a, D: Driver> {
    dev: NonNull<Device<D>>,
    parent: &'a device::Device<device::Bound>,
}

// SAFETY: Nobody else has a device that is not registered, and `D` is `Send`; a device on a bus may be used by any
// task.
unsafe impl<D: Driver> Send for Unregistered<'_, D> {}

impl<'a, D: Driver> Unregistered<'a, D> {
    /// Allocates a device and initialises the driver's data of it.
    ///
    /// `parent` is the device on the bus, which does the DMA.
    pub fn new<E>(
        parent: &'a device::Device<device::Bound>,
        info: &DeviceInfo,
        data: impl PinInit<D, E>,
    ) -> Result<Self>
    where
        Error: From<E>,
    {
        // SAFETY: The size is that of a `Device<D>`, which begins with a `struct ib_device`, as the
        // function wants.
        let raw = unsafe { bindings::rdma_alloc_device(Device::<D>::SIZE) };
        let dev = NonNull::new(raw.cast::<Device<D>>()).ok_or(ENOMEM)?;
        // INVARIANT: Allocated just now; initialised below, or dropped before anybody sees it.
        let this = Self { dev, parent };
        let definitions = Definitions::new(Ops::<D>::of())?;
        let counters = Descriptions::new(info.counter_names)?;
        let holds = Holds::new()?;
        // SAFETY: The device was allocated just now, so that nobody else has it; the table is static.
        unsafe { bindings::ib_set_device_ops(raw, &Ops::<D>::of().raw) };
        // SAFETY: Nobody else has the device yet.
        let core = unsafe { &mut *raw };
        core.ops.set_uverbs_robust_udata(1);
        if info.counter_names.is_empty() {
            // The core does not register a port with no counters in its list of them.
            core.ops.alloc_hw_port_stats = None;
        }
        if Ops::<D>::of().raw.alloc_ucontext.is_some() {
            core.driver_def = definitions.as_ptr();
        }
        core.uverbs_cmd_mask |= Ops::<D>::of().commands;
        info.fill(core);
        // SAFETY: The device was allocated just now, so that nobody else has it. `device::Device` is a
        // transparent wrapper, and the core counts a parent when it adds the device.
        unsafe { bindings::rdma_device_set_parent(raw, ptr::from_ref(parent).cast_mut().cast()) };
        // SAFETY: The memory is that of a `Device<D>`, all zeroes, of which the core's part is a value, as are
        // the flags, and the other fields need no value: `UnsafeCell<MaybeUninit<_>>`.
        let device = unsafe { dev.as_ref() };
        // SAFETY: Nobody else has the device yet, which stays where it is: the slot is pinned, and not
        // initialised before. Where this fails the flag below is not set, and nobody drops what is there.
        unsafe { data.__pinned_init(device.data.get().cast::<D>()) }?;
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.counters.get()).write(counters) };
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.definitions.get()).write(definitions) };
        // SAFETY: Nobody else has the device yet.
        unsafe { *device.virtual_dma.get() = info.virtual_dma };
        // SAFETY: Nobody else has the device yet.
        unsafe { (*device.holds.get()).write(holds) };
        // SAFETY: Nobody else has the device yet. All four are initialised.
        unsafe { *device.initialised.get() = true };
        Ok(this)
    }

    /// The device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: By the type invariant the device is initialised, and freed only when `self` is
        // dropped.
        unsafe { self.dev.as_ref() }
    }

    /// Makes the device known. From now on the core calls the driver's operations.
    ///
    /// It is called `name`, if that is given and no other device is called so; else by the driver's
    /// pattern.
    ///
    /// It is known until what this returns is dropped, and at the latest until its parent is unbound, whatever became
    /// of that: what the parent was given to manage before goes after it.
    pub fn register(
        self,
        module: &'static ThisModule,
        name: Option<&CStr>,
    ) -> Result<Devres<Registration<D>>> {
        // SAFETY: The device is not registered, so that nobody else reads its operations.
        unsafe { (*self.device().as_raw()).ops.owner = module.as_ptr() };
        Devres::new(self.parent, Registration::new(self, name))
    }
}

impl<D: Driver> Drop for Unregistered<'_, D> {
    fn drop(&mut self) {
        // SAFETY: The device is ours and not registered; this ends in `dealloc_driver`.
        unsafe { bindings::ib_dealloc_device(self.dev.as_ptr().cast()) }
    }
}

/// A device that the core knows, until this is dropped. Only in a [`Devres`] of its parent, so that it is dropped at the
/// latest when that is unbound.
///
/// Dropping it takes every object from consumers and processes, drops the driver's data and frees
/// the device. It sleeps, for as long as consumers take.
///
/// # Invariants
///
/// - `dev` is registered, and its parent bound.
/// - If `D` has [`crate::rdma::NetdevOps`], `notifier` is registered.
#[pin_data(PinnedDrop)]
pub struct Registration<D: Driver> {
    dev: NonNull<Device<D>>,
    #[pin]
    notifier: Opaque<bindings::notifier_block>,
    /// One of [`gids`]; read and written with RTNL held.
    gids: Atomic<u32>,
    gid_scan: Arc<GidScan<D>>,
    /// Where `gid_scan` runs; flushed while `dev` is registered.
    gid_scans: OwnedQueue,
    /// Where events of the device come from, if the driver has [`crate::rdma::EventOps`].
    sink: Option<Attached>,
}

/// What is known of the GID table of a device.
pub(in crate::rdma) mod gids {
    /// There may be none yet: the core makes it while the device is being registered.
    pub(crate) const NONE: u32 = 0;
    /// As `NONE`, and the port was paired since the device began to be registered.
    pub(crate) const MISSED: u32 = 1;
    /// As `MISSED`, and before that it was unpaired: there may be GIDs of that time.
    pub(crate) const MISSED_PART: u32 = 2;
    /// There is one.
    pub(crate) const THERE: u32 = 3;
    /// The device is about to be unregistered: consumers need the GIDs until they have let go.
    pub(crate) const GOING: u32 = 4;

    /// What is known after a pairing that changed before there was a table.
    pub(crate) const fn missed(known: u32, unpaired: bool) -> u32 {
        if unpaired || known == MISSED_PART {
            MISSED_PART
        } else {
            MISSED
        }
    }
}

// SAFETY: The core's functions that drop calls may be called by any task, and `D` is `Send`.
unsafe impl<D: Driver> Send for Registration<D> {}

// SAFETY: A reference only leads to a `&Device<D>`, which is `Sync`.
unsafe impl<D: Driver> Sync for Registration<D> {}

impl<D: Driver> Registration<D> {
    /// To be put in a [`Devres`] of the parent, and nowhere else.
    fn new<'a>(
        unregistered: Unregistered<'a, D>,
        name: Option<&'a CStr>,
    ) -> impl PinInit<Self, Error> + use<'a, D> {
        let dev = unregistered.dev;
        let paired = Ops::<D>::of().pairing.is_some();
        // INVARIANT: Device and notifier are registered by the last initialiser.
        let registered = try_pin_init!(&this in Self {
            dev: unregistered.dev,
            gids: Atomic::new(gids::NONE),
            // SAFETY: `update_gids` queues it, with RTNL held where the device has a GID table.
            // After the notifier is gone nobody does, and dropping the registration flushes the
            // queue then, before it unregisters the device.
            gid_scan: unsafe { GidScan::new(unregistered.dev)? },
            gid_scans: OwnedQueue::ordered(c"rdma_gids")?,
            sink: None,
            // The last, as its callback uses the others.
            notifier <- Opaque::try_ffi_init(move |notifier: *mut bindings::notifier_block| {
                if paired {
                    // SAFETY: `this` is where the registration will stay, and `gids` was initialised before
                    // this initialiser runs.
                    let gids = unsafe { &(*this.as_ptr()).gids };
                    // SAFETY: `notifier` is that of a registration of which all other fields are initialised.
                    // Where the device is not registered it is unregistered below, and else by `drop`.
                    unsafe { Self::follow_netdevs(notifier, unregistered.device(), gids)? };
                }
                // SAFETY: Where this succeeds the registration is the only one that frees the device.
                let registered = unsafe { Self::add_device(&unregistered, name) };
                match registered {
                    Ok(()) => core::mem::forget(unregistered),
                    Err(_) if paired => {
                        // SAFETY: It was registered above. No call of it runs when this returns.
                        unsafe { bindings::unregister_netdevice_notifier(notifier) };
                    }
                    Err(_) => {}
                }
                registered
            }),
        }? Error);
        registered.pin_chain(move |mut this: Pin<&mut Self>| {
            // SAFETY: `Unregistered::new` has initialised the device, and it is registered until
            // the registration is dropped.
            let dev = unsafe { dev.as_ref() };
            if let Some(attach) = Ops::<D>::of().events {
                // SAFETY: The device is registered; dropping the registration drops what this returns before it
                // unregisters the device.
                *this.as_mut().project().sink = Some(unsafe { attach(dev)? });
            }
            if paired {
                Rtnl::with(|rtnl| {
                    let known = this.gids.xchg(gids::THERE, Relaxed);
                    for port in dev.ports() {
                        if known == gids::MISSED_PART {
                            // SAFETY: The device is registered, and the port one of its ports.
                            unsafe { PortGids::assume_there(dev, port) }.clear();
                        }
                        if known != gids::NONE {
                            this.update_gids(rtnl, port);
                        }
                    }
                });
            }
            Ok(())
        })
    }

    /// Registers the notifier that pairs the ports of `dev` with interfaces.
    ///
    /// # Safety
    ///
    /// `notifier` must be memory in a `Registration<D>` of `dev`, of which the other fields are initialised and stay
    /// where they are until it is unregistered; `gids` is one of them.
    unsafe fn follow_netdevs(
        notifier: *mut bindings::notifier_block,
        dev: &Device<D>,
        gids: &Atomic<u32>,
    ) -> Result {
        let described = bindings::notifier_block {
            notifier_call: Some(Self::netdev_event),
            // Before the core, which then asks which interface the port is paired with.
            priority: 1,
            ..pin_init::zeroed()
        };
        // SAFETY: The caller vouches for the memory, which nobody else has yet.
        unsafe { notifier.write(described) };
        // Makes the core's data of the ports: notifier calls, which may come while the device is being
        // registered, must not make it a second time.
        Rtnl::with(|rtnl| {
            dev.ports()
                .try_for_each(|port| dev.set_netdev(rtnl, port, None))
        })?;
        // Reports all interfaces that there are, so that the ports are paired now.
        // SAFETY: It was described just now. The caller vouches for what its callback uses.
        to_result(unsafe { bindings::register_netdevice_notifier(notifier) })?;
        // The core looks for the GIDs of what is paired by now.
        Rtnl::with(|_| gids.store(gids::NONE, Relaxed));
        Ok(())
    }

    /// Registers the device.
    ///
    /// # Safety
    ///
    /// Where this succeeds the device has to be unregistered, which frees it, and `unregistered` not to be dropped.
    unsafe fn add_device(unregistered: &Unregistered<'_, D>, name: Option<&CStr>) -> Result {
        let dev = unregistered.device();
        let name = name.filter(|name| is_plain(name)).unwrap_or(D::NAME);
        // SAFETY: The flag was set when the device was made, and does not change.
        let dma = if unsafe { *dev.virtual_dma.get() } {
            ptr::null_mut()
        } else {
            ptr::from_ref(unregistered.parent).cast_mut().cast()
        };
        let register = |name: &CStr| {
            // SAFETY: By the type invariant of `Unregistered` the device is initialised and not registered, and its
            // parent is bound; the core copies the name.
            unsafe { bindings::ib_register_device(dev.as_raw(), name.as_char_ptr(), dma) }
        };
        let mut ret = register(name);
        // A name that is taken is refused before anything else is done, and before it is noted.
        if ret == ENFILE.to_errno() && dev.name().is_empty() {
            ret = register(D::NAME);
        }
        to_result(ret)
    }

    /// Brings the GIDs of a port in line with a pairing that has changed.
    fn update_gids(&self, _rtnl: &Rtnl, port: u32) {
        let dev = self.device();
        let paired = dev.netdev(port).is_some();
        let known = self.gids.load(Relaxed);
        if known != gids::THERE {
            self.gids.store(gids::missed(known, !paired), Relaxed);
        } else if paired {
            // By a worker, as it takes RTNL. Where it is queued already, it has yet to look.
            drop(self.gid_scans.enqueue(self.gid_scan.clone()));
        } else {
            // The core removes those of an interface that goes, and hears nothing any more of what
            // is stacked on it.
            // SAFETY: The state says that there is one, which is so from when the device was registered; the port
            // is one of its ports.
            unsafe { PortGids::assume_there(dev, port) }.clear();
        }
    }

    /// The device.
    pub fn device(&self) -> &Device<D> {
        // SAFETY: The device is initialised and lives for as long as its registration.
        unsafe { self.dev.as_ref() }
    }

    /// # Safety
    ///
    /// `nb` must be the notifier of a registered `Registration<D>`.
    unsafe extern "C" fn netdev_event(
        nb: *mut bindings::notifier_block,
        event: c_ulong,
        info: *mut c_void,
    ) -> c_int {
        // SAFETY: The caller vouches that the notifier is in a `Registration<D>`, which unregisters
        // it before it goes; `Opaque` is a transparent wrapper.
        let this = unsafe {
            &*nb.byte_sub(core::mem::offset_of!(Self, notifier))
                .cast::<Self>()
        };
        // SAFETY: The networking core passes valid information about an interface.
        let netdev = unsafe { Netdev::from_notifier(info) };
        let event = NetdevEvent::from_raw(event as u32);
        if let (Some(netdev), Some(event)) = (netdev, event) {
            // SAFETY: The networking core holds RTNL while it calls notifiers of interfaces, until
            // this returns.
            let rtnl = unsafe { Rtnl::assume_held() };
            let dev = this.device();
            if this.gids.load(Relaxed) == gids::GOING {
                // Pairing stays, but one that leaves for another namespace does not wait for that. A notifier that is
                // removed is told that all interfaces go, too: so they do for the device.
                if event == NetdevEvent::Unregister {
                    for port in dev.ports() {
                        if dev.netdev(port).is_some_and(|own| own == netdev) {
                            dev.tell_netdev_event(port, &netdev, event);
                        }
                    }
                }
                return 0;
            }
            for port in dev.ports() {
                if dev.follow_netdev(&rtnl, port, &netdev, event) != Pairing::Keep {
                    this.update_gids(&rtnl, port);
                }
            }
        }
        0
    }
}

#[pinned_drop]
impl<D: Driver> PinnedDrop for Registration<D> {
    fn drop(mut self: Pin<&mut Self>) {
        // Before the device goes, to which it leads.
        drop(self.as_mut().project().sink.take());
        if Ops::<D>::of().pairing.is_some() {
            // From now on pairing and GIDs stay as they are: what consumers still send and receive needs
            // them. The core takes both back after its clients are gone. Until then nobody gives up the
            // port's reference to its interface: who removes that waits for the slowest of them.
            Rtnl::with(|_| self.gids.store(gids::GOING, Relaxed));
            // SAFETY: By the type invariant the notifier of a paired port is registered. No call of it runs
            // when this returns.
            unsafe { bindings::unregister_netdevice_notifier(self.notifier.get()) };
        }
        // Nothing is queued any more.
        self.gid_scans.flush();
        // SAFETY: By the type invariant the device is registered. This ends in `dealloc_driver`, and the
        // device is not used afterwards.
        unsafe { bindings::ib_unregister_device(self.dev.as_ptr().cast()) };
    }
}
