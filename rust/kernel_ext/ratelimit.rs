// SPDX-License-Identifier: GPL-2.0

//! How often something may be said (for `rust/kernel/print.rs`).

use crate::bindings;
use kernel::prelude::*;
use kernel::types::Opaque;

/// A [`struct ratelimit_state`]: lets ten through in five seconds, as `printk_ratelimited` does.
///
/// For what others can make happen as often as they like: printing takes long, and fills the log.
///
/// # Invariants
///
/// `inner` is an initialised `struct ratelimit_state`.
///
/// [`struct ratelimit_state`]: srctree/include/linux/ratelimit_types.h
#[pin_data]
pub struct RateLimit {
    #[pin]
    inner: Opaque<bindings::ratelimit_state>,
}

// SAFETY: A `struct ratelimit_state` is not bound to the task that made it.
unsafe impl Send for RateLimit {}
// SAFETY: Nothing but `___ratelimit` touches the state, which may be called at once: it tries the
// state's lock, and where another holds that uses the atomics in it only.
unsafe impl Sync for RateLimit {}

impl RateLimit {
    /// How many are let through in an interval.
    pub const BURST: u32 = bindings::DEFAULT_RATELIMIT_BURST;

    /// Returns an initialiser for a limit of which nothing is used up.
    pub fn new() -> impl PinInit<Self> {
        // INVARIANT: The state is initialised here.
        pin_init!(Self {
            inner <- Opaque::ffi_init(|slot: *mut bindings::ratelimit_state| {
                // SAFETY: `slot` is memory for a `struct ratelimit_state` that nobody else knows.
                unsafe { bindings::ratelimit_default_init(slot) };
            }),
        })
    }

    /// Whether `what` may be said now. What may not is counted, and the number is printed with the
    /// next that may. May be called from any context.
    pub fn allows(&self, what: &'static CStr) -> bool {
        // SAFETY: The state is initialised by the type invariant, and `what` is a C string that
        // lives for ever.
        unsafe { bindings::___ratelimit(self.inner.get(), what.as_char_ptr()) != 0 }
    }
}

#[cfg(not(rdma_no_tests))]
#[kernel::prelude::kunit_tests(rust_ratelimit)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut() -> Result {
        let limit = KBox::pin_init(RateLimit::new(), GFP_KERNEL)?;
        let allowed = (0..10_000).filter(|_| limit.allows(c"a flood")).count();
        // The machine may be slow, and an interval or two go by.
        assert!((1..=10 * RateLimit::BURST as usize).contains(&allowed));
        Ok(())
    }
}
