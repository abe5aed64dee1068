// SPDX-License-Identifier: GPL-2.0

//! Dynamic interrupt moderation, `lib/dim` (for `rust/kernel/dim.rs`).

use crate::bindings;
use core::marker::PhantomPinned;
use core::mem::offset_of;
use core::ptr;
use kernel::prelude::*;
use kernel::sync::atomic::{Acquire, Atomic, Release};
use kernel::types::Opaque;

/// How many profiles [`NetDim`] chooses from.
pub const PROFILES: usize = bindings::NET_DIM_PARAMS_NUM_PROFILES as usize;

/// What moderation is applied to.
pub trait Moderated: Send + Sync {
    /// Applies profile `profile`, less than [`PROFILES`]: 0 has the least moderation, the last one
    /// the most. Runs in a work item, never twice at once. Sleeps.
    fn apply(&self, profile: usize);
}

/// Moderation of one source of interrupts by `net_dim`: as much of it as makes interrupts fewer without
/// making the traffic less.
///
/// It begins with profile 0, which is taken for applied.
///
/// # Invariants
///
/// `dim` is initialised, and its work is that of [`Self::run`]. Whoever has set `busy` alone uses what
/// of it the work does not.
#[pin_data(PinnedDrop)]
pub struct NetDim<T: Moderated> {
    #[pin]
    dim: Opaque<bindings::dim>,
    busy: Atomic<u32>,
    target: T,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: The work belongs to no task, and `T: Send`.
unsafe impl<T: Moderated> Send for NetDim<T> {}
// SAFETY: `busy` keeps users of `dim` apart, and its work is queued by at most one of them at a time;
// `T: Sync`.
unsafe impl<T: Moderated> Sync for NetDim<T> {}

impl<T: Moderated> NetDim<T> {
    /// Returns an initialiser for the moderation of `target`.
    pub fn new(target: T) -> impl PinInit<Self> {
        // INVARIANT: All is zero, which is profile 0 and the beginning of a measurement, but for the work.
        pin_init!(Self {
            dim <- Opaque::ffi_init(|dim: *mut bindings::dim| {
                // SAFETY: `dim` is memory for a `struct dim` that nobody else knows.
                unsafe { dim.write(pin_init::zeroed()) };
                // SAFETY: It was written just now, and nobody else knows it. Name and class are static.
                unsafe {
                    bindings::init_work_with_key(
                        &raw mut (*dim).work,
                        Some(Self::run),
                        false,
                        c"rust_dim".as_char_ptr(),
                        kernel::static_lock_class!().as_ptr(),
                    )
                };
            }),
            busy: Atomic::new(0),
            target,
            _pin: PhantomPinned,
        })
    }

    /// What moderation is applied to.
    pub fn target(&self) -> &T {
        &self.target
    }

    /// Calls `f` with the state, unless somebody else has it.
    fn with_state(&self, f: impl FnOnce(*mut bindings::dim)) {
        if self.busy.cmpxchg(0, 1, Acquire).is_err() {
            return;
        }
        f(self.dim.get());
        self.busy.store(0, Release);
    }

    /// Takes a sample of `counts`: how many interrupts and how much traffic there was by now, both free-running.
    /// May be called in interrupt context. One that comes while another is taken is left out, and counts are
    /// asked for only then, so that no sample is older than the one before.
    pub fn sample(&self, counts: impl FnOnce() -> (u16, u64)) {
        self.with_state(|dim| {
            let (interrupts, traffic) = counts();
            let mut sample: bindings::dim_sample = pin_init::zeroed();
            // SAFETY: `sample` is a local.
            unsafe { bindings::dim_update_sample(interrupts, traffic, traffic, &mut sample) };
            // SAFETY: By the type invariant `dim` is initialised, and nobody else takes a sample, as `busy` was free.
            unsafe { bindings::net_dim(dim, &sample) };
        });
    }

    /// Goes back to profile 0, where it is at another one. May be called in interrupt context.
    pub fn rest(&self) {
        self.with_state(|dim| {
            let applying = bindings::dim_state_DIM_APPLY_NEW_PROFILE as u8;
            // SAFETY: By the type invariant `dim` is initialised; this makes no reference to it.
            let (profile, state) = unsafe { (&raw mut (*dim).profile_ix, &raw mut (*dim).state) };
            // SAFETY: Only who has set `busy` writes the profile.
            if unsafe { profile.read() } == 0 {
                return;
            }
            // SAFETY: The field is initialised. The work writes it at the same time, a byte, of which an old or a new
            // value is found.
            if unsafe { state.read_volatile() } == applying {
                return;
            }
            // SAFETY: Nobody else decides about the profile, as `busy` was free. The work reads it once it was queued,
            // which it is in no other state than the one that was looked for.
            unsafe { profile.write(0) };
            // SAFETY: By the type invariant `dim` is initialised. The function writes what decisions are made by, which
            // only who has set `busy` reads and writes.
            unsafe { bindings::dim_park_on_top(dim) };
            // SAFETY: The work writes the field when it has run, and is not queued.
            unsafe { state.write_volatile(applying) };
            // SAFETY: By the type invariant the work is initialised, and whoever drops it cancels it first. The queue is
            // the kernel's, and there for good.
            unsafe {
                bindings::queue_work_on(
                    bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int,
                    bindings::system_percpu_wq,
                    &raw mut (*dim).work,
                )
            };
        });
    }

    /// # Safety
    ///
    /// `work` must be that of the state of a `NetDim<T>`.
    unsafe extern "C" fn run(work: *mut bindings::work_struct) {
        // SAFETY: The caller vouches that `work` is in a `struct dim`.
        let dim = unsafe { work.byte_sub(offset_of!(bindings::dim, work)) };
        // SAFETY: The caller vouches that this is in a `NetDim<T>`.
        let this = unsafe { dim.byte_sub(offset_of!(Self, dim)) }.cast::<Self>();
        // SAFETY: It is valid, as it waits for the work before it goes (`net_dim_work_cancel`).
        let this = unsafe { &*this };
        let dim = this.dim.get();
        // SAFETY: By the type invariant `dim` is initialised. Its profile stays as it is while the state
        // says that it is being applied.
        let profile = unsafe { (*dim).profile_ix };
        this.target.apply(usize::from(profile).min(PROFILES - 1));
        // SAFETY: By the type invariant `dim` is initialised; others only read the state meanwhile.
        unsafe {
            ptr::addr_of_mut!((*dim).state)
                .write_volatile(bindings::dim_state_DIM_START_MEASURE as u8)
        };
    }
}

#[pinned_drop]
impl<T: Moderated> PinnedDrop for NetDim<T> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant `dim` and its work are initialised. Nobody has a reference to
        // what is dropped, so that the work is not queued again.
        unsafe { bindings::net_dim_work_cancel(self.dim.get()) }
    }
}
