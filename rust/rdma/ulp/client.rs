// SPDX-License-Identifier: GPL-2.0

//! Who is told of each device.

use crate::bindings;
use crate::rdma::consumer::{Landlord, Lease};
use core::marker::PhantomData;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;
use kernel::types::Opaque;

/// A user of RDMA devices.
pub trait Client: 'static {
    /// The client's name.
    const NAME: &'static CStr;

    /// A device is there. May sleep; the device stays until this returns and the last clone of the lease is gone.
    ///
    /// The core does not say which client it calls, so there is no `self`.
    fn add(lease: &Lease) -> Result;
}

/// A client that the core knows, until this is dropped.
///
/// # Invariants
///
/// `client` is registered.
#[pin_data(PinnedDrop)]
pub struct Registration<T: Client> {
    #[pin]
    client: Opaque<bindings::ib_client>,
    _p: PhantomData<T>,
}

// SAFETY: `ib_unregister_client` may be called by any task.
unsafe impl<T: Client> Send for Registration<T> {}

// SAFETY: A reference to a registration leads to nothing.
unsafe impl<T: Client> Sync for Registration<T> {}

impl<T: Client> Registration<T> {
    /// Registers a client. It is called with all devices there are before this returns.
    pub fn new() -> impl PinInit<Self, Error> {
        // INVARIANT: Registered here.
        try_pin_init!(Self {
            client <- Opaque::try_ffi_init(|client: *mut bindings::ib_client| {
                let described = bindings::ib_client {
                    name: T::NAME.as_char_ptr(),
                    add: Some(Self::add),
                    ..pin_init::zeroed()
                };
                // SAFETY: `client` is memory for a client that nobody else knows yet.
                unsafe { client.write(described) };
                // SAFETY: It was described just now, and is pinned until `drop` unregisters it.
                to_result(unsafe { bindings::ib_register_client(client) })
            }),
            _p: PhantomData,
        })
    }

    /// # Safety
    ///
    /// To be called by the core as `add` of a client, with a device that is registered until this returns.
    unsafe extern "C" fn add(device: *mut bindings::ib_device) -> c_int {
        from_result(|| {
            // SAFETY: The caller vouches that the device stays registered until this returns, before which the value
            // is dropped.
            let landlord = unsafe { Landlord::new(device, T::NAME)? };
            T::add(&landlord.lease())?;
            Ok(0)
        })
    }
}

#[pinned_drop]
impl<T: Client> PinnedDrop for Registration<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant the client is registered; no callback of it runs when this
        // returns.
        unsafe { bindings::ib_unregister_client(self.client.get()) }
    }
}
