// SPDX-License-Identifier: GPL-2.0

//! Connections between queue pairs, by IP address: the RDMA connection manager.
//!
//! An [`Id`] is one end of a connection: it finds a device and a way to an address, connects, and takes its queue pair
//! ([`Id::create_qp`]) through its states. A [`Listener`] has a [`Request`] for each peer that wants to connect, out of
//! which another [`Id`] is made. What happens is told to a [`Handler`].
//!
//! An identifier that is bound to a device keeps that registered: what is made on the device has a [`Lease`] of it
//! ([`Id::lease`]), and dropping the identifier waits for all of these. When the device is to be removed the handler is
//! told ([`Event::DeviceRemoval`]), and the device waits until the identifier is dropped.
//!
//! An identifier may be dropped by its own handler: the core then ends it when the handler returns, as it would by the
//! value that a handler in C returns. All leases have to go without the handler's help in that case. From a handler no
//! other identifier may be called, and a listener not be dropped by its own: that waits for itself, for ever.
//!
//! This is a folder of its own, apart from [`rdma`](crate::rdma), so that only who connects needs `rdma_cm.ko`.
//!
//! C header: [`include/rdma/rdma_cm.h`](srctree/include/rdma/rdma_cm.h).

mod address;
mod id;
mod listener;
mod parameters;
mod qp;

pub use self::id::Id;
pub use self::listener::{Listener, Request};
pub use self::parameters::{Parameters, REQUEST_DATA_MAX};
pub use self::qp::{Connected, QpOwner};
use crate::bindings;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::Arc;

/// Something that has happened to an identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The address is found, and the identifier is bound to a device: [`Id::lease`], [`Id::resolve_route`].
    AddrResolved,
    /// A way to it is found: [`Id::connect`].
    RouteResolved,
    /// The connection is there. With what the peer has accepted it with, where this side asked for it.
    Established(&'a [u8]),
    /// The peer does not want to, for a reason (`enum ib_cm_rej_reason`), and with what it says.
    Rejected(i32, &'a [u8]),
    /// Address, route or peer are not found, or connecting failed otherwise.
    Failed(Error),
    /// The connection is over.
    Disconnected,
    /// The device goes, and waits until the identifier is dropped.
    DeviceRemoval,
    /// The address has moved to another device.
    AddrChange,
    /// The queue pair's number may be used again.
    TimewaitExit,
    /// Something else.
    Other(u32),
}

/// Who is told what happens to an identifier.
pub trait Handler: Send + Sync + 'static {
    /// Something has happened. Called one at a time for each identifier, and may sleep.
    fn event(&self, event: Event<'_>);
}

/// Who is told that a peer would like to connect.
pub trait Acceptor: Send + Sync + 'static {
    /// A peer wants to connect; a request that is dropped is refused. May sleep. Called at the same time for several
    /// devices.
    fn request(self: &Arc<Self>, request: Request<'_>);

    /// The listener's device goes, if it was bound to the address of one.
    fn device_removal(&self) {}
}

/// What an event brings, if anything.
///
/// # Safety
///
/// `event` has to be one of a connection, in the call of the core's that tells of it, which `'a` is.
unsafe fn private_data<'a>(event: &'a bindings::rdma_cm_event) -> &'a [u8] {
    // SAFETY: The caller vouches for an event of a connection; where there is no data the length is zero.
    let param = unsafe { event.param.conn.as_ref() };
    let data = param.private_data.cast::<u8>();
    if data.is_null() {
        return &[];
    }
    // SAFETY: The caller vouches for the event, whose data the core has for as long as the call.
    unsafe { core::slice::from_raw_parts(data, param.private_data_len.into()) }
}

/// # Safety
///
/// As for [`private_data`].
unsafe fn view(event: &bindings::rdma_cm_event) -> Event<'_> {
    use bindings as b;

    let failed = || Event::Failed(to_result(event.status).err().unwrap_or(EIO));
    // SAFETY: The caller vouches for the event.
    let data = || unsafe { private_data(event) };
    match event.event {
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_RESOLVED => Event::AddrResolved,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_RESOLVED => Event::RouteResolved,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_ROUTE_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_CONNECT_ERROR
        | b::rdma_cm_event_type_RDMA_CM_EVENT_UNREACHABLE => failed(),
        b::rdma_cm_event_type_RDMA_CM_EVENT_REJECTED => Event::Rejected(event.status, data()),
        b::rdma_cm_event_type_RDMA_CM_EVENT_ESTABLISHED => Event::Established(data()),
        b::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED => Event::Disconnected,
        b::rdma_cm_event_type_RDMA_CM_EVENT_DEVICE_REMOVAL => Event::DeviceRemoval,
        b::rdma_cm_event_type_RDMA_CM_EVENT_ADDR_CHANGE => Event::AddrChange,
        b::rdma_cm_event_type_RDMA_CM_EVENT_TIMEWAIT_EXIT => Event::TimewaitExit,
        other => Event::Other(other),
    }
}

#[cfg(not(rdma_cm_no_tests))]
#[kunit_tests(rust_rdma_cm)]
mod tests {
    use super::*;
    use crate::kernel_ext::completion::Completion;
    use crate::rdma::QpType;
    use core::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
    use kernel::new_mutex;
    use kernel::sync::atomic::{Acquire, Atomic, Release};
    use kernel::sync::Mutex;
    use kernel::time::msecs_to_jiffies;

    const CLIENT: &CStr = c"kunit_rdma_cm";

    #[pin_data]
    struct Told {
        failed: Atomic<bool>,
        #[pin]
        done: Completion,
    }

    impl Handler for Told {
        fn event(&self, event: Event<'_>) {
            if matches!(event, Event::Failed(_)) {
                self.failed.store(true, Release);
                self.done.complete();
            }
        }
    }

    fn told() -> Result<Arc<Told>> {
        let init = pin_init!(Told {
            failed: Atomic::new(false),
            done <- Completion::new(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// An address that is for documentation only, which no device leads to.
    const NOWHERE: SocketAddr =
        SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 1), 4791));

    #[test]
    fn an_identifier_without_a_device_lends_none_and_does_nothing() -> Result {
        let told = told()?;
        let id = Id::new(CLIENT, QpType::Rc, told.clone())?;
        assert_eq!(id.lease().err(), Some(ENODEV));
        let parameters = Parameters {
            private_data: &[],
            responder_resources: 0,
            initiator_depth: 0,
        };
        assert_eq!(id.accept(&parameters).err(), Some(ENODEV));
        assert!(id.connect(&parameters).is_err());
        assert!(id.resolve_route(10).is_err());
        assert!(id.disconnect().is_err());
        assert!(id.reject(&[]).is_err());
        drop(id);
        // Handler and all are given back.
        assert!(Arc::into_unique_or_drop(told).is_some());
        Ok(())
    }

    #[test]
    fn who_finds_nobody_is_told() -> Result {
        let told = told()?;
        let id = Id::new(CLIENT, QpType::Rc, told.clone())?;
        if id.resolve_addr(&NOWHERE, 100).is_ok() {
            assert!(told.done.wait_timeout(msecs_to_jiffies(10_000)));
            assert!(told.failed.load(Acquire));
        }
        assert_eq!(id.lease().err(), Some(ENODEV));
        Ok(())
    }

    /// A handler that drops its own identifier.
    #[pin_data]
    struct Dropping {
        #[pin]
        id: Mutex<Option<Id<Dropping>>>,
        #[pin]
        done: Completion,
    }

    impl Handler for Dropping {
        fn event(&self, _event: Event<'_>) {
            let id = self.id.lock().take();
            drop(id);
            self.done.complete();
        }
    }

    /// The core's view of that: it is told to destroy the identifier, once, and what belongs to it is gone.
    #[test]
    fn a_handler_may_drop_its_own_identifier() -> Result {
        let init = try_pin_init!(Dropping {
            id <- new_mutex!(None),
            done <- Completion::new(),
        }? Error);
        let dropping = Arc::pin_init(init, GFP_KERNEL)?;
        let id = Id::new(CLIENT, QpType::Rc, dropping.clone())?;
        let raw = id.raw.as_ptr();
        *dropping.id.lock() = Some(id);
        let mut event: bindings::rdma_cm_event = pin_init::zeroed();
        event.event = bindings::rdma_cm_event_type_RDMA_CM_EVENT_DISCONNECTED;
        // SAFETY: As the core does, for an identifier of that type that exists.
        let returned = unsafe { Id::<Dropping>::dispatch(raw, &mut event) };
        assert_ne!(returned, 0);
        assert!(dropping.done.try_wait());
        // SAFETY: The handler has left it to the core, which we are here.
        unsafe { bindings::rdma_destroy_id(raw) };
        assert!(Arc::into_unique_or_drop(dropping).is_some());
        Ok(())
    }

    struct Nobody;

    impl Acceptor for Nobody {
        fn request(self: &Arc<Self>, request: Request<'_>) {
            request.refuse(b"no");
        }
    }

    #[test]
    fn a_port_has_one_listener_of_each_family() -> Result {
        let acceptor = Arc::new(Nobody, GFP_KERNEL)?;
        let any = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 47_910));
        let first = Listener::new(CLIENT, &any, 1, acceptor.clone())?;
        assert!(Listener::new(CLIENT, &any, 1, acceptor.clone()).is_err());
        drop(first);
        drop(Listener::new(CLIENT, &any, 1, acceptor.clone())?);
        assert!(Arc::into_unique_or_drop(acceptor).is_some());
        Ok(())
    }
}
