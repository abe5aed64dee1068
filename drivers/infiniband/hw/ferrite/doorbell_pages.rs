// SPDX-License-Identifier: GPL-2.0

//! Doorbell pages: one for each user context.
//!
//! They are not shared: through its page a process arms and wakes what is its own (chapter 10 of
//! the device specification), and arming another's completion queue could cost that an event. So
//! there are no more contexts than pages, and no user may have so many that none are left for
//! others.

use crate::{
    doorbell_bar::UserPages,
    kernel_ext::memory,
    numbers::{
        NumberPool,
        NumberShares, //
    },
    shares::Holder, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// The doorbell pages of a device that are for processes.
#[pin_data]
pub(crate) struct DoorbellPages {
    layout: UserPages,
    /// By index in `layout`.
    #[pin]
    shares: Mutex<NumberShares>,
}

impl DoorbellPages {
    /// None of them is in use yet.
    pub(crate) fn new(layout: UserPages) -> Result<Arc<Self>> {
        let pool = NumberPool::new(0, layout.count())?;
        let pages = pin_init!(Self {
            shares <- new_mutex!(NumberShares::for_users(pool), "ferrite_doorbell_pages"),
            layout,
        });
        let pages = Arc::pin_init(pages, GFP_KERNEL)?;
        memory::taken_in_reclaim(|| drop(pages.shares.lock()));
        Ok(pages)
    }

    /// How many pages are in use, and how many there are. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.shares.lock().occupancy()
    }

    /// Takes a page for the current process until the result is dropped. Sleeps.
    pub(crate) fn take(self: &Arc<Self>) -> Result<DoorbellPage> {
        let holder = Holder::current();
        let index = holder.take_from(&self.shares, |shares, bound, spare| {
            shares.take(holder, bound, spare)
        })?;
        Ok(DoorbellPage {
            index,
            holder,
            pages: self.clone(),
        })
    }
}

/// A doorbell page that is in use; given back when dropped, which sleeps.
pub(crate) struct DoorbellPage {
    index: u32,
    holder: Holder,
    pages: Arc<DoorbellPages>,
}

impl DoorbellPage {
    /// The device's number of it.
    pub(crate) fn number(&self) -> u32 {
        self.pages.layout.number(self.index)
    }

    /// Where it is in the doorbell BAR.
    pub(crate) fn offset(&self) -> u64 {
        self.pages.layout.offset(self.index)
    }
}

impl Drop for DoorbellPage {
    fn drop(&mut self) {
        self.pages.shares.lock().give_back(self.holder, self.index);
    }
}

#[kunit_tests(ferrite_doorbell_pages)]
mod tests {
    use super::*;
    use crate::doorbell_bar::{
        DoorbellBar,
        Said, //
    };

    #[test]
    fn a_page_is_the_devices_one_of_a_page_of_the_host() -> Result {
        let said = Said {
            pages: 64,
            log_stride: 12,
            offset: 1 << 16,
            memory_offset: 0,
            memory_size: 0,
        };
        let bar = DoorbellBar::new(&said, 1 << 20).map_err(|_| EINVAL)?;
        // Of a host with pages of 16 KiB: every fourth of the device's.
        let pages = DoorbellPages::new(bar.user_pages(1 << 14))?;
        let (first, second) = (pages.take()?, pages.take()?);
        assert_eq!((first.number(), first.offset()), (4, (1 << 16) + 4 * 4096));
        assert_eq!(
            (second.number(), second.offset()),
            (8, (1 << 16) + 8 * 4096)
        );
        assert_eq!(pages.occupancy(), (2, 15));
        drop(first);
        assert_eq!(pages.occupancy(), (1, 15));
        Ok(())
    }
}
