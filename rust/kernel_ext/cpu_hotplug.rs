// SPDX-License-Identifier: GPL-2.0

//! Following processors that come online and go offline (for `rust/kernel/cpu/hotplug.rs`).
//!
//! C header: [`include/linux/cpuhotplug.h`](srctree/include/linux/cpuhotplug.h)

use crate::bindings;
use core::marker::{PhantomData, PhantomPinned};
use kernel::container_of;
use kernel::device::{Bound, Device};
use kernel::devres::Devres;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use kernel::sync::Arc;
use kernel::types::Opaque;

/// Who wants to know of processors that come and go.
///
/// Both run in the course of hotplug, which waits for them: they may sleep, but not wait for who waits for
/// hotplug.
pub trait Follower: Send + Sync + 'static {
    /// Processor `cpu` has come online. It may have been so before.
    fn came(this: &Arc<Self>, cpu: u32);

    /// Processor `cpu` is about to go offline: it counts as online still. It may stay.
    fn goes(this: &Arc<Self>, cpu: u32);
}

/// A place among the states of hotplug for all followers of one kind: there are few, so that each module
/// has one, as a static.
pub struct State<F: Follower> {
    /// Zero where it is not registered: that state is another's.
    number: Atomic<bindings::cpuhp_state>,
    _followers: PhantomData<fn(F)>,
}

impl<F: Follower> Default for State<F> {
    fn default() -> Self {
        Self::new()
    }
}

impl<F: Follower> State<F> {
    /// One that is not registered.
    pub const fn new() -> Self {
        Self {
            number: Atomic::new(0),
            _followers: PhantomData,
        }
    }

    /// Registers it, before anybody [follows](Following::start). Sleeps.
    ///
    /// # Safety
    ///
    /// It is not registered, and nobody else registers it at the same time. It is
    /// [unregistered](Self::unregister) before the module goes.
    pub unsafe fn register(&'static self, name: &'static CStr) -> Result {
        type One = unsafe extern "C" fn(c_uint) -> c_int;
        type Multi = unsafe extern "C" fn(c_uint, *mut bindings::hlist_node) -> c_int;
        // SAFETY: A pointer to a function as well; hotplug takes those of a state with instances back for
        // what they are before it calls them (`cpuhp_invoke_callback`).
        let single = |multi: Multi| unsafe { core::mem::transmute::<Multi, One>(multi) };
        // SAFETY: Both functions are for a state with instances, as this one is, which are of `Following<F>`
        // only. The name is static, and the caller vouches that the functions are there until the state is removed.
        let number = unsafe {
            bindings::__cpuhp_setup_state(
                bindings::cpuhp_state_CPUHP_AP_ONLINE_DYN,
                name.as_char_ptr(),
                false,
                Some(single(Following::<F>::came_callback)),
                Some(single(Following::<F>::goes_callback)),
                true,
            )
        };
        to_result(number.min(0))?;
        self.number.store(number, Relaxed);
        Ok(())
    }

    /// Its number among the states; `ENODEV` where it is not registered.
    fn number(&self) -> Result<bindings::cpuhp_state> {
        match self.number.load(Relaxed) {
            0 => Err(ENODEV),
            number => Ok(number),
        }
    }

    /// Takes the registration back, if there is one. Sleeps.
    ///
    /// # Safety
    ///
    /// Nobody follows any more, or will.
    pub unsafe fn unregister(&'static self) {
        if let Ok(number) = self.number() {
            self.number.store(0, Relaxed);
            // SAFETY: It was registered, and the caller vouches that it has no instance.
            unsafe { bindings::__cpuhp_remove_state(number, false) }
        }
    }
}

/// Somebody who follows processors until this is dropped. Only in a [`Devres`], so that nobody follows for a device
/// that is unbound.
///
/// # Invariants
///
/// `node` is an instance of state `number`.
#[pin_data(PinnedDrop)]
pub struct Following<F: Follower> {
    #[pin]
    node: Opaque<bindings::hlist_node>,
    number: bindings::cpuhp_state,
    follower: Arc<F>,
    #[pin]
    _pin: PhantomPinned,
}

// SAFETY: The node is hotplug's, which takes its own locks; the follower is `Send` and `Sync`.
unsafe impl<F: Follower> Send for Following<F> {}
// SAFETY: A shared reference reaches the number, which does not change, and the follower, which is `Sync`. The node
// is read and written by hotplug alone, under its own locks.
unsafe impl<F: Follower> Sync for Following<F> {}

impl<F: Follower> Following<F> {
    /// Has `follower` told from now on of what comes and goes, on behalf of `dev`; not of what is there. `ENODEV`
    /// where `state` is not registered. Sleeps.
    pub fn start(
        dev: &Device<Bound>,
        state: &'static State<F>,
        follower: Arc<F>,
    ) -> Result<Devres<Self>> {
        Devres::new(dev, Self::new(state, follower))
    }

    fn new(state: &'static State<F>, follower: Arc<F>) -> impl PinInit<Self, Error> {
        try_pin_init!(&this in Self {
            node: Opaque::zeroed(),
            number: state.number()?,
            follower,
            _pin: PhantomPinned,
            _: {
                // INVARIANT: It is an instance from here on.
                // SAFETY: All fields of `this` were initialised before this initialiser runs. It is pinned, and
                // taken out when it is dropped; the callbacks of the state are for this type.
                to_result(unsafe {
                    bindings::__cpuhp_state_add_instance(
                        (*this.as_ptr()).number,
                        (*this.as_ptr()).node.get(),
                        false,
                    )
                })?;
            },
        })
    }

    /// # Safety
    ///
    /// `node` must be that of a `Following<F>` that is an instance for `'a`.
    unsafe fn follower<'a>(node: *mut bindings::hlist_node) -> &'a Arc<F> {
        let node: *mut Opaque<bindings::hlist_node> = node.cast();
        // SAFETY: The caller vouches for what it is part of.
        unsafe { &(*container_of!(node, Self, node)).follower }
    }

    /// # Safety
    ///
    /// Only for hotplug, with an instance of a state that [`State::register`] made.
    unsafe extern "C" fn came_callback(cpu: c_uint, node: *mut bindings::hlist_node) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not taken out while hotplug is under way.
        F::came(unsafe { Self::follower(node) }, cpu);
        0
    }

    /// # Safety
    ///
    /// As for [`Self::came_callback`].
    unsafe extern "C" fn goes_callback(cpu: c_uint, node: *mut bindings::hlist_node) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not taken out while hotplug is under way.
        F::goes(unsafe { Self::follower(node) }, cpu);
        0
    }
}

#[pinned_drop]
impl<F: Follower> PinnedDrop for Following<F> {
    fn drop(self: Pin<&mut Self>) {
        // SAFETY: By the type invariant it is an instance of that state. Nobody is told afterwards.
        unsafe { bindings::__cpuhp_state_remove_instance(self.number, self.node.get(), false) };
    }
}
