// SPDX-License-Identifier: GPL-2.0

//! Abstractions of the networking core, for drivers of Ethernet devices and for those who have to do with the
//! interfaces of others (for `rust/kernel/net/`).
//!
//! - A driver implements [`Driver`], and the traits of what its device can do besides, for the type of its
//!   per-device data; makes an [`Unregistered`] device, with a [`Napi`] for each of its queues, and registers it.
//! - Frames are [`Skb`]s, which have one owner.
//! - Who wants the frames of another interface of the machine [attaches](Attachment) to it.
//!
//! C headers: [`include/linux/netdevice.h`](srctree/include/linux/netdevice.h),
//! [`include/linux/etherdevice.h`](srctree/include/linux/etherdevice.h).

mod attachment;
mod device;
mod dma;
mod ethernet;
mod ethtool;
mod napi;
mod ops;
mod print;
mod skb;
#[cfg(all(CONFIG_KUNIT, not(net_no_tests)))]
mod tests;

pub use crate::kernel_ext::rtnl::Rtnl;
pub use attachment::*;
pub use device::*;
pub use dma::*;
pub use ethernet::*;
pub use ethtool::*;
pub use napi::*;
pub use ops::*;
pub use print::*;
pub use skb::*;
