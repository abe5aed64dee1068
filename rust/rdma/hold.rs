// SPDX-License-Identifier: GPL-2.0

//! What a device waits for before it is freed: values that refer to it, which are no objects of the core, and which
//! anybody may keep for as long as he likes.

use crate::kernel_ext::completion::Completion;
use kernel::prelude::*;
use kernel::sync::{Arc, Refcount};

/// How many there are of a device, beside its own.
#[pin_data]
pub(super) struct Holds {
    count: Refcount,
    /// Signalled by the last one.
    #[pin]
    released: Completion,
}

impl Holds {
    /// With that of the device.
    pub(super) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            count: Refcount::new(1),
            released <- Completion::new(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Takes one.
    pub(super) fn hold(self: &Arc<Self>) -> Hold {
        self.count.inc();
        Hold(self.clone())
    }

    /// Gives that of the device back, which no others are taken of from now on, and waits for them. Sleeps.
    pub(super) fn end(&self) {
        self.put();
        self.released.wait();
    }

    fn put(&self) {
        if self.count.dec_and_test() {
            self.released.complete();
        }
    }
}

/// Something by which a device is kept from being freed. Who forgets it has the device kept for ever: who removes it
/// waits.
pub(super) struct Hold(Arc<Holds>);

impl Clone for Hold {
    fn clone(&self) -> Self {
        self.0.hold()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.put();
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_hold)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_freed_after_the_last_value_that_refers_to_it() -> Result {
        let holds = Holds::new()?;
        let first = holds.hold();
        let second = first.clone();
        holds.put();
        assert!(!holds.released.is_done());
        drop(first);
        assert!(!holds.released.is_done());
        drop(second);
        assert!(holds.released.is_done());
        // Nobody waits where there is none.
        Holds::new()?.end();
        Ok(())
    }

    #[test]
    fn what_is_forgotten_keeps_the_device() -> Result {
        let holds = Holds::new()?;
        let forgotten = core::mem::ManuallyDrop::new(holds.hold());
        holds.put();
        assert!(!holds.released.is_done());
        // No leak for the kernel's detector to find.
        drop(core::mem::ManuallyDrop::into_inner(forgotten));
        assert!(holds.released.is_done());
        Ok(())
    }
}
