// SPDX-License-Identifier: GPL-2.0

//! Shares in what there is only so much of, by user: none may have so much that nothing is left for
//! others.

use kernel::{
    prelude::*,
    rbtree::RBTree, //
};

/// Whether a user with `own` of something may have `more` of it, where others have `others` of
/// `total`: up to three quarters of what others have not taken, and once at least.
pub(crate) fn within_share(own: u64, more: u64, others: u64, total: u64) -> bool {
    let left = total.saturating_sub(others);
    own.saturating_add(more) <= (left - left / 4).max(more.min(left))
}

/// How much of something each user has.
pub(crate) struct Shares {
    total: u64,
    used: u64,
    users: RBTree<u64, u64>,
}

impl Shares {
    pub(crate) fn new(total: u64) -> Self {
        Self {
            total,
            used: 0,
            users: RBTree::new(),
        }
    }

    /// Takes some for a user; `ENOMEM` beyond his share.
    pub(crate) fn take(&mut self, user: u64, more: u64) -> Result {
        let own = self.users.get(&user).copied().unwrap_or(0);
        if !within_share(own, more, self.used - own, self.total) {
            return Err(ENOMEM);
        }
        match self.users.get_mut(&user) {
            Some(own) => *own += more,
            None => {
                self.users.try_create_and_insert(user, more, GFP_KERNEL)?;
            }
        }
        self.used += more;
        Ok(())
    }

    /// Gives back what was taken for a user.
    pub(crate) fn give_back(&mut self, user: u64, less: u64) {
        self.used -= less;
        if let Some(own) = self.users.get_mut(&user) {
            *own -= less;
            if *own == 0 {
                self.users.remove(&user);
            }
        }
    }
}

#[kunit_tests(ferrite_shares)]
mod tests {
    use super::*;

    /// Takes all that a user gets.
    fn take_all(shares: &mut Shares, user: u64, step: u64) -> u64 {
        let mut taken = 0;
        while shares.take(user, step).is_ok() {
            taken += step;
        }
        taken
    }

    #[test]
    fn no_user_takes_all() {
        let mut shares = Shares::new(1 << 20);
        let mut left = 1 << 20;
        for user in 0..4 {
            let taken = take_all(&mut shares, user, 64);
            assert_eq!(taken, (left - left / 4) / 64 * 64);
            left -= taken;
        }
        assert_eq!(shares.used, (1 << 20) - left);
    }

    #[test]
    fn what_is_too_much_at_once_takes_nothing() {
        let mut shares = Shares::new(1 << 20);
        assert_eq!(shares.take(1, (1 << 20) + 1), Err(ENOMEM));
        assert_eq!(shares.take(1, u64::MAX), Err(ENOMEM));
        assert_eq!(shares.used, 0);
        assert!(shares.users.is_empty());
    }

    #[test]
    fn what_is_given_back_can_be_taken_again() {
        let mut shares = Shares::new(1 << 20);
        for _ in 0..3 {
            let taken = take_all(&mut shares, 1, 64);
            assert!(taken > 0);
            for _ in 0..taken / 64 {
                shares.give_back(1, 64);
            }
            assert_eq!(shares.used, 0);
            assert!(shares.users.is_empty());
        }
        assert_eq!(take_all(&mut shares, 2, 64), 3 << 18);
    }
}
