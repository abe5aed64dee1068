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
//! | [`ring`] | the rings and the record that a queue has in such a buffer |
//! | [`object`] | making, entering and destroying what the kernel makes, and its unwinding |
//! | [`table`] | finding a queue by its number |
//! | [`cq`], [`cq_ex`] | completion queues, and their extended way of polling |
//! | [`cq_ring`], [`completion`] | the entries of one, and what a completion tells |
//! | [`clock`] | what the device's time is by the wall clock |
//! | [`qp`], [`srq`], [`xrc`] | queue pairs, shared receive queues (SRQ), and those of XRC |
//! | [`qp_layout`] | what a queue pair takes, and how large that makes it |
//! | [`send_queue`], [`receive_queue`], [`srq_ring`] | how far a queue is, and what it remembers |
//! | [`wqe`] | a work request as the device sees it |
//! | [`post`], [`post_ex`] | posting work, and the extended way of it |

pub mod ah;
pub mod clock;
mod completion;
pub mod context;
pub mod cq;
pub mod cq_ex;
mod cq_ring;
pub mod device;
pub mod device_memory;
pub mod direct;
mod heap;
mod ioctl;
pub mod list;
pub mod memory;
mod object;
pub mod post;
pub mod post_ex;
pub mod private;
pub mod protection;
pub mod qp;
mod qp_layout;
mod raw;
mod receive_queue;
mod ring;
mod send_queue;
pub mod shared;
pub mod srq;
mod srq_ring;
pub mod sys;
pub mod table;
pub mod window;
mod wqe;
mod xrc;

/// Sets `errno` and gives the null pointer that goes with it.
fn fail<T>(errno: core::ffi::c_int) -> *mut T {
    // SAFETY: the location of the calling thread's `errno` is always valid.
    unsafe { *libc::__errno_location() = errno };
    core::ptr::null_mut()
}

#[cfg(test)]
mod cost;
#[cfg(test)]
mod testing;
