// SPDX-License-Identifier: GPL-2.0

//! The device behind the interface: it comes, is mended, and goes.

use super::{
    repairs::Repairs,
    Behind,
    Interface, //
};
use crate::{
    caps::EthernetCaps,
    commands::Failure,
    hardware::Hardware,
    net::{
        netdev_info,
        netdev_warn,
        Device,
        Hold,
        Rtnl, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::Relaxed,
        Arc, //
    },
};

impl Device<Interface> {
    /// Has what users have set fit the device that is behind it now, which may be another than they were set of, and
    /// attaches it. Where it cannot be opened it stays detached.
    fn fit_and_attach(&self, rtnl: &Rtnl) -> Result {
        let behind = self.behind(rtnl)?;
        let caps = behind.caps;
        let (channels, less) = {
            let mut settings = self.settings.lock();
            let most = behind.channels().min(self.napis().len() as u16);
            let channels = settings.channels.min(most).max(1);
            (channels, settings.fit(&caps, channels, self.mtu()))
        };
        if less.sizes {
            netdev_warn!(
                self,
                "the device can do less than the one before, MTU or rings are smaller\n"
            );
        }
        if less.table {
            self.table_is_lost(rtnl);
        }
        if self.tx_queues() != channels {
            self.set_queues(rtnl, channels)?;
        }
        if self.most_to_segment.load(Relaxed) != caps.max_transmit_bytes {
            self.most_to_segment.store(caps.max_transmit_bytes, Relaxed);
            self.set_most_to_segment(rtnl, caps.max_transmit_bytes);
        }
        self.set_max_mtu(rtnl, caps.max_mtu.into());
        self.attach(rtnl)?;
        self.fit_mtu(rtnl, &caps);
        Ok(())
    }

    /// Has its MTU be one that the device behind it has, which was told so by `open`: now everybody else is. Who uses the
    /// interface may not want that, which is said, and asked for again when it is mended the next time.
    fn fit_mtu(&self, rtnl: &Rtnl, caps: &EthernetCaps) {
        let most = caps.max_mtu.into();
        if self.mtu() <= most {
            return;
        }
        if let Err(error) = self.request_mtu(rtnl, most) {
            netdev_warn!(
                self,
                "MTU {} is more than the {} of the device, and stays: {:?}\n",
                self.mtu(),
                most,
                error
            );
        }
    }

    /// Opens it again where that has failed, after what was changed is as it was. Where that fails, too, it is tried later.
    pub(super) fn reopen_or_repair(&self, rtnl: &Rtnl) {
        if self.reopen(rtnl).is_err() {
            Repairs::restart_soon(self);
        }
    }

    /// Has its channels made anew; made, where that has failed before.
    pub(super) fn mend(&self, rtnl: &Rtnl) -> Result {
        // One that failed is not mended so.
        let behind = self.working(rtnl)?;
        if !self.is_present() {
            return self.fit_and_attach(rtnl);
        }
        self.restart(rtnl, || ())?;
        self.reopen(rtnl)?;
        self.fit_mtu(rtnl, &behind.caps);
        Ok(())
    }

    /// Whether there is a device behind it that works.
    pub(super) fn is_served(&self, _rtnl: &Rtnl) -> bool {
        self.hardware().is_some_and(|hw| !hw.is_dead())
    }
}

/// An interface that has a device behind it, until this is dropped. Sleeps then, and takes RTNL.
pub(crate) struct Attachment {
    dev: Hold<Interface>,
    hw: Arc<Hardware>,
}

impl Attachment {
    /// Puts a device behind an interface, and opens it where it is up. Sleeps, and takes RTNL.
    pub(crate) fn new(dev: Hold<Interface>, behind: Behind) -> Result<Self> {
        let (hw, max_mtu) = (behind.hw.clone(), behind.caps.max_mtu);
        *dev.behind.lock() = Some(behind);
        let this = Self { dev, hw };
        let dev = &this.dev;
        *this.hw.interface.lock() = Some(dev.hold());
        let attached = Rtnl::with(|rtnl| dev.fit_and_attach(rtnl));
        if let Err(error) = attached {
            if this.hw.is_dead() {
                return Err(error);
            }
            // What else the function is good for does not wait for it.
            netdev_warn!(dev, "is not opened yet: {:?}\n", error);
            Repairs::restart_soon(dev);
        }
        // Events of the link find it by now.
        this.hw.tell_carrier();
        netdev_info!(dev, "{} channels, MTU to {}\n", dev.napis().len(), max_mtu);
        Ok(this)
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let told = self.hw.interface.lock().take();
        drop(told);
        self.dev.set_carrier(false);
        if self.hw.is_dead() {
            // Before RTNL is held: what is taken down is freed when the device is stopped, which takes its time.
            Failure::ensure_stopped(&self.hw);
        }
        let behind = Rtnl::with(|rtnl| {
            self.dev.detach(rtnl);
            // With RTNL held, by which repairs know whether they are wanted.
            self.dev.behind.lock().take()
        });
        Repairs::stand_down(&self.dev);
        drop(behind);
    }
}
