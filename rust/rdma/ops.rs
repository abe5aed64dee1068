// SPDX-License-Identifier: GPL-2.0

//! The table of operations that the core calls.
//!
//! What is between an operation of the core and the driver stands in the file of the object that it
//! is about, and so does the function that puts it into the table.

use super::event::Attach;
use super::netdev::PortPairing;
use super::{CqOps, Driver, MethodDef, MrOps, PdOps, QpOps};
use crate::bindings;

/// The operations that a driver offers: those that the core demands ([`Ops::new`]), and with each
/// `with_...` those of one of the optional traits.
///
/// ```ignore
/// const OPS: Ops<Self> = Ops::new().with_user().with_srq();
/// ```
///
/// What is not offered is absent from the core's `struct ib_device_ops`, as it would be from that of
/// a driver in C.
pub struct Ops<D: Driver> {
    pub(super) raw: bindings::ib_device_ops,
    /// Methods that the driver adds to the `ioctl` interface.
    pub(super) methods: &'static [MethodDef<D>],
    /// Attributes that it adds to methods of the core.
    pub(super) additions: [Option<&'static bindings::uverbs_object_def>; ADDITIONS],
    /// Set where the driver has an [`super::EventSink`]: attaches it.
    pub(super) events: Option<Attach<D>>,
    /// Set where ports share their links with network interfaces.
    pub(super) pairing: Option<PortPairing<D>>,
    /// Commands of processes, as bits, that the core answers besides those that it does for all devices.
    pub(super) commands: u64,
}

/// Where attributes are in [`Ops::additions`] that belong to the query of a context.
pub(super) const QUERY_CONTEXT: usize = 0;
/// The same of the allocation of device memory.
pub(super) const ALLOC_DM: usize = 1;
/// To how many methods of the core attributes can be added.
const ADDITIONS: usize = 2;

impl<D: Driver> Ops<D> {
    /// The operations without which the core lets no kernel user have a device
    /// (`ib_device_check_mandatory()`), and what there is of optional ones in the same traits.
    #[allow(clippy::new_without_default)]
    pub const fn new() -> Self
    where
        D: PdOps + CqOps + QpOps + MrOps,
    {
        Self {
            raw: pin_init::zeroed(),
            methods: &[],
            additions: [None; ADDITIONS],
            events: None,
            pairing: None,
            commands: 0,
        }
        .with_device()
        .with_ports()
        .with_pds()
        .with_cqs()
        .with_qps()
        .with_mrs()
    }

    /// Those of `D`.
    pub(super) const fn of() -> &'static Self {
        const { &D::OPS }
    }
}

/// `Some` of a function if the driver has the operation.
macro_rules! op_if {
    ($has:expr, $function:expr) => {
        if $has {
            Some($function)
        } else {
            None
        }
    };
}
pub(super) use op_if;
