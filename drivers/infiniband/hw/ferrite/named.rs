// SPDX-License-Identifier: GPL-2.0

//! What a user context has, by the numbers that its processes name it by: what others have cannot be
//! named.

use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        Arc,
        Mutex, //
    },
};

/// What one user context has of something, by number.
#[pin_data]
pub(crate) struct Names<T> {
    #[pin]
    by_number: Mutex<RBTree<u32, Arc<T>>>,
}

impl<T> Names<T> {
    /// Of a user context that has nothing yet.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let names = pin_init!(Self {
            by_number <- new_mutex!(RBTree::new(), "ferrite_names"),
        });
        Arc::pin_init(names, GFP_KERNEL_ACCOUNT)
    }

    /// Has something be found by `number`, which nothing else has, until the result is dropped.
    pub(crate) fn add(self: &Arc<Self>, number: u32, named: Arc<T>) -> Result<Named<T>> {
        let node = RBTreeNode::new(number, named, GFP_KERNEL_ACCOUNT)?;
        let before = self.by_number.lock().insert(node);
        // What was there would not be found any more, and would take the new one with it.
        debug_assert!(before.is_none());
        Ok(Named {
            names: self.clone(),
            number,
        })
    }

    /// What has that number. It stays for as long as the result does, though it may lose its number.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<T>> {
        self.by_number.lock().get(&number).cloned()
    }
}

/// Something that has a number until this is dropped, which sleeps.
pub(crate) struct Named<T> {
    names: Arc<Names<T>>,
    number: u32,
}

impl<T> Drop for Named<T> {
    fn drop(&mut self) {
        let named = self.names.by_number.lock().remove(&self.number);
        // Not while others wait for the names: it may be the last, and take its time.
        drop(named);
    }
}

#[kunit_tests(ferrite_named)]
mod tests {
    use super::*;

    #[test]
    fn what_a_context_has_is_found_by_its_number_until_it_goes() -> Result {
        let names = Names::new()?;
        let one = names.add(7, Arc::new(70, GFP_KERNEL)?)?;
        let two = names.add(u32::MAX, Arc::new(80, GFP_KERNEL)?)?;
        let found = |number| names.get(number).map(|found| *found);
        assert_eq!((found(7), found(u32::MAX)), (Some(70), Some(80)));
        assert_eq!((found(0), found(8)), (None, None));
        drop(one);
        assert_eq!((found(7), found(u32::MAX)), (None, Some(80)));
        drop(two);
        assert_eq!(found(u32::MAX), None);
        Ok(())
    }

    #[test]
    fn what_was_found_outlives_its_number() -> Result {
        let names = Names::new()?;
        let named = names.add(7, Arc::new(70, GFP_KERNEL)?)?;
        let found = names.get(7).ok_or(ENOENT)?;
        drop(named);
        assert!(names.get(7).is_none());
        assert_eq!(*found, 70);
        // A number that was given up is given out again.
        let _again = names.add(7, Arc::new(71, GFP_KERNEL)?)?;
        assert_eq!((names.get(7).map(|found| *found), *found), (Some(71), 70));
        Ok(())
    }

    #[test]
    fn a_context_does_not_find_what_another_has() -> Result {
        let (mine, yours) = (Names::new()?, Names::new()?);
        let _one = mine.add(7, Arc::new(70, GFP_KERNEL)?)?;
        assert!(yours.get(7).is_none());
        // The same number may be of another's too, and goes with that one's only.
        let two = yours.add(7, Arc::new(80, GFP_KERNEL)?)?;
        drop(two);
        assert_eq!(mine.get(7).map(|found| *found), Some(70));
        Ok(())
    }
}
