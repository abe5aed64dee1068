// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! The Ferrite provider: what libibverbs loads to drive a Ferrite device from user space.
//!
//! Control operations (creating, changing, destroying) go through the kernel. Posting work,
//! polling completions and arming completion queues touch only memory shared with the device and,
//! where the device asks for it, the doorbell page of the context.
//!
//! | module | what it answers |
//! |---|---|
//! | [`sys`] | the public verbs and uverbs structures, from the installed headers |
//! | [`private`] | the part of libibverbs that only providers see (private ABI 34) |
//! | [`device`] | which devices are ours, and how libibverbs learns of it |
//! | [`context`] | what a process gets when it opens a device |
//! | [`protection`], [`window`] | protection domains, memory regions and windows |
//! | [`direct`], [`list`], [`shared`] | what programs may call beyond the verbs |
//! | [`device_memory`] | memory of the device itself |
//! | [`ah`] | address handles |
//! | [`ioctl`] | commands that libibverbs has no function for |
//! | [`heap`] | memory of the process, which may come to an end |
//! | [`memory`] | buffers shared with the device, the doorbell page, the lock |
//! | [`table`] | finding a queue by its number |
//! | [`cq`], [`cq_ex`] | completion queues, and their extended way of polling |
//! | [`clock`] | what the device's time is by the wall clock |
//! | [`qp`], [`srq`] | queue pairs and shared receive queues |
//! | [`post`], [`post_ex`] | posting work, and the extended way of it |

pub mod ah;
pub mod clock;
pub mod context;
pub mod cq;
pub mod cq_ex;
pub mod device;
pub mod device_memory;
pub mod direct;
mod heap;
mod ioctl;
pub mod list;
pub mod memory;
pub mod post;
pub mod post_ex;
pub mod private;
pub mod protection;
pub mod qp;
pub mod shared;
pub mod srq;
pub mod sys;
pub mod table;
pub mod window;

/// Sets `errno` and gives the null pointer that goes with it.
fn fail<T>(errno: core::ffi::c_int) -> *mut T {
    // SAFETY: the location of the calling thread's `errno` is always valid.
    unsafe { *libc::__errno_location() = errno };
    core::ptr::null_mut()
}

#[cfg(test)]
mod testing {
    /// Numbers by chance below a limit, the same each time: xorshift, from a seed that is not zero.
    pub(crate) fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
        let mut random = seed;
        move |limit| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % limit
        }
    }

    /// What tests show to several threads: libibverbs gives programs pointers, which know no
    /// thread.
    pub(crate) struct Shared<'a, T>(pub(crate) &'a T);

    impl<T> Clone for Shared<'_, T> {
        fn clone(&self) -> Self {
            *self
        }
    }

    impl<T> Copy for Shared<'_, T> {}

    // SAFETY: `Qp` and `Cq` are made to be used by threads at the same time; what is the consumer's
    // to order in them, the tests order.
    unsafe impl<T> Send for Shared<'_, T> {}

    impl<T> core::ops::Deref for Shared<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0
        }
    }
}
