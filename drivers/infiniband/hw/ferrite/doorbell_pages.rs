// SPDX-License-Identifier: GPL-2.0

//! Doorbell pages: one for each user context.
//!
//! They are not shared: through its page a process arms and wakes what is its own (chapter 10 of
//! the device specification), and arming another's completion queue could cost that an event. So
//! there are no more contexts than pages, and no user may have so many that none are left for
//! others.

use crate::{
    doorbell_bar::UserPages,
    kernel_ext::{
        errno,
        user, //
    },
    numbers::NumberPool,
    shares::within_share, //
};
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::RBTree,
    sync::{
        Arc,
        Mutex, //
    },
};

/// Which pages are in use, and how many by whom.
struct Shares {
    pool: NumberPool,
    users: RBTree<u64, u32>,
}

impl Shares {
    fn new(pages: u32) -> Self {
        Self {
            pool: NumberPool::new(0, pages),
            users: RBTree::new(),
        }
    }

    /// Takes a page for a user: `EDQUOT` beyond his share, where he is `bound` by it, `ENOSPC` where
    /// all are in use.
    fn take(&mut self, user: u64, bound: bool) -> Result<u32> {
        let own = self.users.get(&user).copied().unwrap_or(0);
        let (used, total) = self.pool.occupancy();
        if bound && used < total && !within_share(own.into(), 1, (used - own).into(), total.into())
        {
            return Err(errno::edquot());
        }
        let page = self.pool.take()?;
        match self.users.get_mut(&user) {
            Some(own) => *own += 1,
            None => {
                if let Err(error) = self.users.try_create_and_insert(user, 1, GFP_KERNEL) {
                    self.pool.give_back(page);
                    return Err(error);
                }
            }
        }
        Ok(page)
    }

    fn give_back(&mut self, user: u64, page: u32) {
        self.pool.give_back(page);
        if let Some(own) = self.users.get_mut(&user) {
            *own -= 1;
            if *own == 0 {
                self.users.remove(&user);
            }
        }
    }
}

/// The doorbell pages of a device that are for processes.
#[pin_data]
pub(crate) struct DoorbellPages {
    layout: UserPages,
    /// By index in `layout`.
    #[pin]
    shares: Mutex<Shares>,
}

impl DoorbellPages {
    /// None of them is in use yet.
    pub(crate) fn new(layout: UserPages) -> Result<Arc<Self>> {
        let pages = pin_init!(Self {
            shares <- new_mutex!(Shares::new(layout.count()), "ferrite_doorbell_pages"),
            layout,
        });
        Arc::pin_init(pages, GFP_KERNEL)
    }

    /// How many pages are in use, and how many there are. Sleeps.
    pub(crate) fn occupancy(&self) -> (u32, u32) {
        self.shares.lock().pool.occupancy()
    }

    /// Takes a page for the current process until the result is dropped. Sleeps.
    pub(crate) fn take(self: &Arc<Self>) -> Result<DoorbellPage> {
        let user = user::accountable();
        let mut shares = self.shares.lock();
        // Only where it matters, as being asked for a capability leaves traces.
        let index = match shares.take(user, true) {
            Err(error) if error == errno::edquot() && user::may_exceed_limits() => {
                shares.take(user, false)?
            }
            taken => taken?,
        };
        Ok(DoorbellPage {
            index,
            user,
            pages: self.clone(),
        })
    }
}

/// A doorbell page that is in use; given back when dropped, which sleeps.
pub(crate) struct DoorbellPage {
    index: u32,
    user: u64,
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
        self.pages.shares.lock().give_back(self.user, self.index);
    }
}

#[kunit_tests(ferrite_doorbell_pages)]
mod tests {
    use super::*;
    use crate::doorbell_bar::{
        DoorbellBar,
        Said, //
    };

    /// Takes all that a user gets.
    fn take_all(shares: &mut Shares, user: u64, bound: bool) -> u32 {
        let mut pages = 0;
        while shares.take(user, bound).is_ok() {
            pages += 1;
        }
        pages
    }

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

    #[test]
    fn no_user_leaves_nothing_for_others() {
        let mut shares = Shares::new(1023);
        let mut left = 1023;
        for user in 0..4 {
            let taken = take_all(&mut shares, user, true);
            assert_eq!(taken, left - left / 4);
            assert!(taken < left);
            left -= taken;
        }
        // The administrator gets the rest.
        assert_eq!(take_all(&mut shares, 0, false), left);
        assert_eq!(shares.take(7, false), Err(ENOSPC));
    }

    #[test]
    fn beyond_the_share_it_is_the_quota_that_is_said_to_be_exceeded() -> Result {
        let mut shares = Shares::new(8);
        assert_eq!(take_all(&mut shares, 5, true), 6);
        assert_eq!(shares.take(5, true), Err(errno::edquot()));
        shares.take(6, true)?;
        Ok(())
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() -> Result {
        let mut shares = Shares::new(8);
        for _ in 0..100 {
            let page = shares.take(5, true)?;
            shares.give_back(5, page);
        }
        let mut pages = KVec::new();
        while let Ok(page) = shares.take(5, true) {
            pages.push(page, GFP_KERNEL)?;
        }
        assert_eq!(pages.len(), 6);
        assert_eq!(shares.pool.occupancy(), (6, 8));
        for page in pages {
            shares.give_back(5, page);
        }
        assert!(shares.users.get(&5).is_none());
        assert_eq!(take_all(&mut shares, 6, true), 6);
        Ok(())
    }

    #[test]
    fn a_single_page_is_for_anybody() {
        let mut shares = Shares::new(1);
        assert_eq!(take_all(&mut shares, 5, true), 1);
        assert_eq!(shares.take(6, true), Err(ENOSPC));
    }
}
