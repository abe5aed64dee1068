// SPDX-License-Identifier: GPL-2.0

//! Kernel users of RDMA devices that stay with them.
//!
//! A [`Consumer`] is told of each device, makes of it what it likes, and keeps that until the device goes
//! or the consumer does. What it makes holds a [`Lease`] of the device, and there is no other way to make
//! it: the device does not go before the last lease has.
//!
//! What there is to be made: protection domains ([`Pd`]), completion queues ([`Cq`]), memory ([`Buffer`], cut into
//! [`Chunk`]s), regions of it that a peer may use ([`Region`]) and queue pairs ([`Qp`]). Each keeps what it needs, by
//! leases and references; what is under way is owned by the queue pair, with all the memory that it uses, and comes
//! back to whoever posted it when it is complete. So the order in which they are dropped is not an obligation, and
//! who forgets one of them ([`core::mem::forget`]) loses memory, and a device that cannot be removed, but nothing
//! is freed that a device may still use.
//!
//! For users that are done with a device before they return there is [`ulp`](super::ulp).
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h).

mod cq;
mod memory;
mod qp;
pub(super) mod request;

pub use cq::*;
pub use memory::*;
pub use qp::*;

use super::print::{print, Level};
use super::ulp::Device;
use crate::bindings;
use crate::ibdev_err;
use crate::kernel_ext::completion::Completion;
use core::marker::PhantomData;
use core::ptr::NonNull;
use kernel::error::{from_err_ptr, from_result, to_result};
use kernel::fmt;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Relaxed, Release};
use kernel::sync::{Arc, Refcount};
use kernel::types::Opaque;

/// A user of RDMA devices that stays with them. [`impl_stored`] gives it what it has to have besides.
pub trait Consumer: Stored + 'static {
    /// The consumer's name.
    const NAME: &'static CStr;

    /// What it has for each device.
    type Data: Send + Sync + 'static;

    /// A device is there. May sleep.
    ///
    /// A device for which this fails is not the consumer's: it waits here until nobody has a lease of it.
    fn add(lease: Lease) -> Result<Arc<Self::Data>>;

    /// A device goes, or the consumer does. May sleep.
    ///
    /// Whatever holds a lease has to be dropped, here or soon after: the device waits for it.
    fn remove(data: Arc<Self::Data>);
}

/// Memory for what the core has to know of a [`Consumer`].
///
/// The core calls a consumer without saying which one, so that it has to be known by its type: hence a
/// static, see [`Stored`].
pub struct Storage {
    client: Opaque<bindings::ib_client>,
    /// Whether somebody has it.
    taken: Atomic<bool>,
}

// SAFETY: `client` is written by who has set `taken`, before the core knows it; afterwards it is the core's,
// which has locks of its own, until it is unregistered and `taken` is cleared.
unsafe impl Sync for Storage {}

impl Storage {
    /// Memory that nobody uses.
    #[expect(clippy::new_without_default)]
    pub const fn new() -> Self {
        Self {
            client: Opaque::uninit(),
            taken: Atomic::new(false),
        }
    }
}

/// Who has a [`Storage`].
///
/// # Safety
///
/// `storage` always gives the same, and that of no other type.
pub unsafe trait Stored {
    /// What it has.
    fn storage() -> &'static Storage;
}

/// Gives a type a [`Storage`] of its own.
#[allow(unused_macros)]
macro_rules! impl_stored {
    ($consumer:ty) => {
        // SAFETY: The static is this function's, which is this type's.
        unsafe impl $crate::rdma::consumer::Stored for $consumer {
            fn storage() -> &'static $crate::rdma::consumer::Storage {
                static STORAGE: $crate::rdma::consumer::Storage =
                    $crate::rdma::consumer::Storage::new();
                &STORAGE
            }
        }
    };
}
#[allow(unused_imports)]
pub(crate) use impl_stored;

/// A consumer that the core knows, until this is dropped.
///
/// # Invariants
///
/// The storage of `T` is taken by this value, and the client in it is registered, with `add` and `remove` of
/// this type.
pub struct Registration<T: Consumer> {
    _p: PhantomData<T>,
}

impl<T: Consumer> Registration<T> {
    /// Registers a consumer. It is told of all devices there are before this returns. `EBUSY` if it is
    /// registered already.
    pub fn new() -> Result<Self> {
        let storage = T::storage();
        if storage.taken.cmpxchg(false, true, Acquire).is_err() {
            return Err(EBUSY);
        }
        let described = bindings::ib_client {
            name: T::NAME.as_char_ptr(),
            add: Some(Self::add),
            remove: Some(Self::remove),
            ..pin_init::zeroed()
        };
        // SAFETY: The storage was taken just now, so that nobody else uses the memory.
        unsafe { storage.client.get().write(described) };
        // SAFETY: It was described just now, and is static.
        let registered = to_result(unsafe { bindings::ib_register_client(storage.client.get()) });
        if let Err(err) = registered {
            storage.taken.store(false, Release);
            return Err(err);
        }
        // INVARIANT: Taken and registered just now.
        Ok(Self { _p: PhantomData })
    }

    /// # Safety
    ///
    /// To be called by the core as `add` of the client in the storage of `T`, with a device that stays
    /// registered until this fails or `remove` returns.
    unsafe extern "C" fn add(device: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            let room = KBox::<Resident<T>>::new_uninit(GFP_KERNEL)?;
            let tenancy = KBox::pin_init(Tenancy::new(device, T::NAME), GFP_KERNEL)?;
            // INVARIANT: The count began with this one. The tenancy is freed below or by `remove`, both times
            // after it was waited for.
            let lease = Lease {
                tenancy: NonNull::from(&*tenancy),
            };
            match T::add(lease) {
                Ok(data) => {
                    let resident = KBox::into_raw(KBox::write(room, Resident { tenancy, data }));
                    // SAFETY: The caller vouches for device and client; the core calls `remove` with what
                    // is set here, and looks at nothing behind it.
                    unsafe {
                        bindings::ib_set_client_data(
                            device,
                            T::storage().client.get(),
                            resident.cast(),
                        )
                    };
                    Ok(0)
                }
                Err(err) => {
                    tenancy.vacated.wait();
                    Err(err)
                }
            }
        })
    }

    /// # Safety
    ///
    /// To be called by the core as `remove` of the client in the storage of `T`, once for each device for
    /// which `add` succeeded, with what that has set.
    unsafe extern "C" fn remove(_device: *mut bindings::ib_device, data: *mut c_void) {
        // SAFETY: The caller vouches for what `add` has set, which came from `into_raw`.
        let resident = unsafe { KBox::from_raw(data.cast::<Resident<T>>()) };
        let Resident { tenancy, data } = KBox::into_inner(resident);
        T::remove(data);
        tenancy.vacated.wait();
    }
}

impl<T: Consumer> Drop for Registration<T> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the client is registered. All its devices are removed when this
        // returns, and no callback of it runs.
        unsafe { bindings::ib_unregister_client(T::storage().client.get()) };
        T::storage().taken.store(false, Release);
    }
}

/// What a consumer has of a device.
struct Resident<T: Consumer> {
    tenancy: Pin<KBox<Tenancy>>,
    data: Arc<T::Data>,
}

/// A device, for as long as it has leases.
#[pin_data]
struct Tenancy {
    device: *mut bindings::ib_device,
    client: &'static CStr,
    leases: Refcount,
    /// Signalled by the last lease.
    #[pin]
    vacated: Completion,
}

// SAFETY: The device belongs to no task, and neither does the count.
unsafe impl Send for Tenancy {}
// SAFETY: Device and name do not change; count and completion are made to be shared.
unsafe impl Sync for Tenancy {}

impl Tenancy {
    /// With one lease.
    fn new(device: *mut bindings::ib_device, client: &'static CStr) -> impl PinInit<Self> {
        pin_init!(Self {
            device,
            client,
            leases: Refcount::new(1),
            vacated <- Completion::new(),
        })
    }
}

/// Somebody by whom a device stays registered, other than a [`Registration`]: an identifier of a connection that is
/// bound to it, for instance. Dropping it waits until nobody has a lease.
pub struct Landlord {
    tenancy: Pin<KBox<Tenancy>>,
}

impl Landlord {
    /// # Safety
    ///
    /// `device` has to stay registered until this value was dropped.
    pub unsafe fn new(device: *mut bindings::ib_device, client: &'static CStr) -> Result<Self> {
        Ok(Self {
            tenancy: KBox::pin_init(Tenancy::new(device, client), GFP_KERNEL)?,
        })
    }

    /// A lease of the device.
    pub fn lease(&self) -> Lease {
        self.tenancy.leases.inc();
        // INVARIANT: Counted just now, beside the count that is given back by `drop`, which waits for it.
        Lease {
            tenancy: NonNull::from(&*self.tenancy),
        }
    }
}

#[cfg(all(CONFIG_KUNIT, not(rdma_no_tests)))]
impl Landlord {
    /// How many leases there are, with the one that it has itself.
    fn leases(&self) -> i32 {
        self.tenancy.leases.as_atomic().load(Relaxed)
    }

    /// Takes back a lease that was lost.
    fn take_back(&self) {
        // INVARIANT: It was counted, and nobody has it.
        drop(Lease {
            tenancy: NonNull::from(&*self.tenancy),
        });
    }
}

impl Drop for Landlord {
    fn drop(&mut self) {
        // INVARIANT: The count began with this one, and the tenancy is freed after it was waited for.
        drop(Lease {
            tenancy: NonNull::from(&*self.tenancy),
        });
        self.tenancy.vacated.wait();
    }
}

/// A right to use a device. It stays registered while there is one.
///
/// # Invariants
///
/// The tenancy has counted this value, and is not freed before it was waited for.
pub struct Lease {
    tenancy: NonNull<Tenancy>,
}

// SAFETY: A tenancy belongs to no task: its device does not change, its count is atomic.
unsafe impl Send for Lease {}
// SAFETY: What several tasks may do with a tenancy is to read what does not change, and to count, which is atomic.
unsafe impl Sync for Lease {}

impl Lease {
    fn tenancy(&self) -> &Tenancy {
        // SAFETY: By the type invariant the tenancy waits for this lease before it is freed.
        unsafe { self.tenancy.as_ref() }
    }

    /// The core's device, which is registered for as long as there is a lease.
    pub(super) fn raw_device(&self) -> *mut bindings::ib_device {
        self.tenancy().device
    }

    /// Prints a message about the device, see [`ibdev_err`].
    #[cold]
    pub fn printk(&self, level: Level, message: fmt::Arguments<'_>) {
        // SAFETY: The device is registered for as long as there is a lease.
        unsafe { print(self.raw_device(), level, message) };
    }

    /// Who has it.
    pub(super) fn client(&self) -> &'static CStr {
        self.tenancy().client
    }

    /// The device.
    pub fn device(&self) -> Device<'_> {
        let tenancy = self.tenancy();
        // SAFETY: The core calls `add` with a registered device, which stays until that has failed or
        // `remove` returns: both wait for this lease, which is borrowed. So does a landlord, whose device stays
        // until it is dropped.
        unsafe { Device::from_raw(tenancy.device) }
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        let tenancy = self.tenancy();
        tenancy.leases.inc();
        // INVARIANT: Counted just now; since `self` is counted, nobody has been told that there is none.
        Self {
            tenancy: self.tenancy,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let tenancy = self.tenancy();
        if tenancy.leases.dec_and_test() {
            // The last that is done with it: who waits frees it, and takes the completion's lock before.
            tenancy.vacated.complete();
        }
    }
}

/// A consumer's protection domain.
///
/// # Invariants
///
/// `raw` is owned by this value, and of the device of `lease`.
pub struct Pd {
    raw: NonNull<bindings::ib_pd>,
    // After the domain, which is freed by `drop`, before the fields are.
    lease: Lease,
}

// SAFETY: `ib_dealloc_pd` may be called by any task.
unsafe impl Send for Pd {}
// SAFETY: What is read of a domain does not change.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes a protection domain. May sleep, as does its end.
    pub fn new(lease: &Lease) -> Result<Arc<Self>> {
        let tenancy = lease.tenancy();
        let name = tenancy.client.as_char_ptr();
        // SAFETY: The device is registered for as long as there is a lease, which this has; the name is
        // static.
        let raw = from_err_ptr(unsafe { bindings::__ib_alloc_pd(tenancy.device, 0, name) })?;
        // INVARIANT: Made just now.
        let this = Self {
            raw: NonNull::new(raw).ok_or(ENOMEM)?,
            lease: lease.clone(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// The core's domain, which is there for as long as this is.
    pub fn as_raw(&self) -> *mut bindings::ib_pd {
        self.raw.as_ptr()
    }

    /// The lease of its device.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The key for all local memory, by DMA address.
    pub fn local_dma_lkey(&self) -> u32 {
        // SAFETY: By the type invariant the domain is ours; the key does not change.
        unsafe { self.raw.as_ref().local_dma_lkey }
    }
}

/// Whether something uses an object of the core whose users are counted there.
///
/// # Safety
///
/// `usecnt` has to be valid.
unsafe fn is_used(usecnt: *mut bindings::atomic_t) -> bool {
    // SAFETY: The caller vouches for the count, which everybody changes atomically.
    unsafe { Atomic::from_ptr(&raw mut (*usecnt).counter) }.load(Relaxed) != 0
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the domain is ours, and so valid.
        if unsafe { is_used(&raw mut (*self.raw.as_ptr()).usecnt) } {
            // A driver has refused to destroy what was made in it: that lives on, and needs it.
            ibdev_err!(
                self.lease,
                "a protection domain is still used, and stays with its device\n"
            );
            core::mem::forget(self.lease.clone());
            return;
        }
        // SAFETY: By the type invariant the domain is ours; what was made in it has a reference to it, and is gone.
        // Its device is registered, since `lease` is dropped only after this.
        unsafe { bindings::ib_dealloc_pd(self.raw.as_ptr()) }
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_consumer)]
mod tests {
    use super::*;
    use kernel::time::msecs_to_jiffies;

    static LAST: Atomic<i32> = Atomic::new(0);

    /// A consumer that wants no device.
    struct Nobody;

    impl_stored!(Nobody);

    impl Consumer for Nobody {
        const NAME: &'static CStr = c"kunit_nobody";
        type Data = Lease;

        fn add(_lease: Lease) -> Result<Arc<Lease>> {
            Err(ENODEV)
        }

        fn remove(_data: Arc<Lease>) {}
    }

    #[test]
    fn a_domain_that_the_core_keeps_keeps_its_device() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(core::ptr::null_mut(), c"kunit_pd")? };
        let mut core = KBox::init(pin_init::init_zeroed::<bindings::ib_pd>(), GFP_KERNEL)?;
        // As a queue pair leaves it that nobody could destroy.
        core.usecnt.counter = 1;
        let pd = Pd {
            raw: NonNull::from(&mut *core),
            lease: landlord.lease(),
        };
        let leases = landlord.leases();
        drop(pd);
        assert_eq!(landlord.leases(), leases);
        landlord.take_back();
        Ok(())
    }

    #[test]
    fn a_consumer_is_registered_once_at_a_time() -> Result {
        let first = Registration::<Nobody>::new()?;
        assert_eq!(Registration::<Nobody>::new().err(), Some(EBUSY));
        drop(first);
        // And again.
        drop(Registration::<Nobody>::new()?);
        Ok(())
    }

    #[test]
    fn a_device_goes_after_its_last_lease() -> Result {
        let tenancy = KBox::pin_init(
            Tenancy::new(core::ptr::null_mut(), Nobody::NAME),
            GFP_KERNEL,
        )?;
        let first = Lease {
            tenancy: NonNull::from(&*tenancy),
        };
        let second = first.clone();
        drop(first);
        let third = second.clone();
        drop(second);
        assert!(!tenancy.vacated.wait_timeout(msecs_to_jiffies(1)));
        drop(third);
        assert!(tenancy.vacated.try_wait());
        Ok(())
    }

    #[test]
    fn a_landlord_waits_for_its_leases() -> Result {
        // SAFETY: Nobody looks at the device.
        let landlord = unsafe { Landlord::new(core::ptr::null_mut(), Nobody::NAME)? };
        let lease = landlord.lease();
        drop(landlord.lease());
        assert!(!landlord.tenancy.vacated.is_done());
        drop(lease);
        assert!(!landlord.tenancy.vacated.is_done());
        // Would wait for ever otherwise.
        drop(landlord);
        Ok(())
    }

    /// The core's view: a device for which `add` fails is waited for, and one for which it succeeds when it
    /// is removed.
    #[test]
    fn who_is_told_of_a_device_keeps_it_until_it_is_removed() -> Result {
        struct Keeper;

        impl_stored!(Keeper);

        struct Kept {
            _lease: Lease,
        }

        impl Drop for Kept {
            fn drop(&mut self) {
                LAST.store(LAST.load(Acquire) + 1, Release);
            }
        }

        impl Consumer for Keeper {
            const NAME: &'static CStr = c"kunit_keeper";
            type Data = Kept;

            fn add(lease: Lease) -> Result<Arc<Kept>> {
                Ok(Arc::new(Kept { _lease: lease }, GFP_KERNEL)?)
            }

            fn remove(data: Arc<Kept>) {
                assert_eq!(LAST.load(Acquire), 0);
                drop(data);
                assert_eq!(LAST.load(Acquire), 1);
            }
        }

        let tenancy = KBox::pin_init(
            Tenancy::new(core::ptr::null_mut(), Keeper::NAME),
            GFP_KERNEL,
        )?;
        let data = Keeper::add(Lease {
            tenancy: NonNull::from(&*tenancy),
        })?;
        let resident = KBox::new(Resident::<Keeper> { tenancy, data }, GFP_KERNEL)?;
        let data = KBox::into_raw(resident).cast();
        // SAFETY: The data are a `Resident` that was given up for this, which is what `add` sets for a device; of the device
        // `remove` uses nothing.
        unsafe { Registration::<Keeper>::remove(core::ptr::null_mut(), data) };
        assert_eq!(LAST.load(Acquire), 1);
        Ok(())
    }
}
