// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Objects that the kernel makes for a structure of this process: made, entered under their number,
//! destroyed, and unwound in one way.

use core::ffi::c_int;

use crate::fail;
use crate::table::{Homes, Inserted, NumberTable};

/// Has `ask` make the kernel's side of `object`, which libibverbs fills in; it answers with an errno
/// value. Of what fails nothing is left.
pub(crate) fn make<T>(object: Box<T>, ask: impl FnOnce(*mut T) -> c_int) -> Result<*mut T, c_int> {
    let object = Box::into_raw(object);
    match ask(object) {
        0 => Ok(object),
        errno => {
            // SAFETY: it is the box from above. libibverbs keeps no pointer to an object whose
            // command has failed.
            drop(unsafe { Box::from_raw(object) });
            Err(errno)
        }
    }
}

/// Makes a queue and enters it under its number in `table`, for the completion queues that its
/// completions come to. `make` gives one that the kernel has made,
/// with its number; `destroy` undoes that.
///
/// Where the number is taken, another thread has just destroyed the queue that had it and still looks
/// for completions of it. It may wait long for a completion queue, for this very thread even; so
/// another queue is made, whose number is not the same as long as the first one is there.
pub(crate) fn make_entered<T>(
    table: &NumberTable<T>,
    homes: Homes,
    make: &mut dyn FnMut() -> Result<(*mut T, u32), c_int>,
    destroy: &dyn Fn(*mut T),
) -> Result<*mut T, c_int> {
    make_entered_as(table, homes, make, destroy, |queue| queue)
}

/// The same of a queue that has in it what is entered: `entry` gives that.
pub(crate) fn make_entered_as<Q, T>(
    table: &NumberTable<T>,
    homes: Homes,
    make: &mut dyn FnMut() -> Result<(*mut Q, u32), c_int>,
    destroy: &dyn Fn(*mut Q),
    entry: fn(*mut Q) -> *mut T,
) -> Result<*mut Q, c_int> {
    let (queue, number) = make()?;
    let instead = match table.insert(number, entry(queue), homes) {
        Ok(Inserted::Yes) => return Ok(queue),
        Ok(Inserted::Taken) => make_entered_as(table, homes, make, destroy, entry),
        Err(errno) => Err(errno),
    };
    destroy(queue);
    instead
}

/// Has `ask` destroy the kernel's side of an object. If it does, `leave` takes the object from where
/// this process still finds it, and it is freed.
///
/// # Safety
///
/// `object` came from [`make`], and after `leave` nobody has it.
pub(crate) unsafe fn destroy<T>(
    object: *mut T,
    ask: impl FnOnce() -> c_int,
    leave: impl FnOnce(&T),
) -> c_int {
    let result = ask();
    if result == 0 {
        // SAFETY: it lives until the end of this function, as it came from `make`.
        leave(unsafe { &*object });
        // SAFETY: `make` got it from a box; kernel and device have let go of it (`ask`), and so has
        // the process (`leave`), by the caller's promise.
        drop(unsafe { Box::from_raw(object) });
    }
    result
}

/// What a verb returns that gives an object: null, with the reason in `errno`, where there is none.
pub(crate) fn or_null<T, Verbs>(object: Result<*mut T, c_int>) -> *mut Verbs {
    match object {
        Ok(object) => object.cast(),
        Err(errno) => fail(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::{Cell, RefCell};
    use std::rc::Rc;

    #[test]
    fn what_the_kernel_refuses_is_freed() {
        let alive = Rc::new(());
        let refused = make(Box::new(alive.clone()), |_| libc::EPERM);
        assert_eq!(refused, Err(libc::EPERM));
        assert_eq!(Rc::strong_count(&alive), 1);
        let made = make(Box::new(alive.clone()), |_| 0).unwrap();
        assert_eq!(Rc::strong_count(&alive), 2);
        // SAFETY: it was made just now, and nobody else has it.
        unsafe {
            let left = || panic!("it is still the kernel's");
            assert_eq!(destroy(made, || libc::EBUSY, |_| left()), libc::EBUSY);
            assert_eq!(Rc::strong_count(&alive), 2);
            let found = Cell::new(0);
            let leave = |object: &Rc<()>| found.set(Rc::strong_count(object));
            assert_eq!(destroy(made, || 0, leave), 0);
            assert_eq!(found.get(), 2, "it is freed last");
        }
        assert_eq!(Rc::strong_count(&alive), 1);
    }

    /// Numbers come as the kernel gives them; those of `taken` are in the table already.
    fn entered(taken: &[u32], numbers: &[u32]) -> (Result<u32, c_int>, Vec<u32>) {
        let table = NumberTable::<u32>::new().unwrap();
        let home = core::ptr::without_provenance_mut(64);
        let homes = [home, core::ptr::null_mut()];
        let mut old = 0;
        for &number in taken {
            assert_eq!(table.insert(number, &raw mut old, homes), Ok(Inserted::Yes));
        }
        let mut numbers = numbers.iter();
        let destroyed = RefCell::new(Vec::new());
        let queue = make_entered(
            &table,
            homes,
            &mut || match numbers.next() {
                Some(&number) => Ok((Box::into_raw(Box::new(number)), number)),
                None => Err(libc::ENOSPC),
            },
            &|queue| {
                // SAFETY: it is a box from above, and not in the table.
                let number = *unsafe { Box::from_raw(queue) };
                destroyed.borrow_mut().push(number);
            },
        );
        let made = queue.map(|queue| {
            // SAFETY: it is a box from above that was not destroyed, and the table goes now.
            let number = *unsafe { Box::from_raw(queue) };
            assert_eq!(table.get(number, home), queue.cast_const());
            number
        });
        (made, destroyed.into_inner())
    }

    #[test]
    fn a_queue_whose_number_is_taken_goes_after_another_was_made() {
        assert_eq!(entered(&[], &[5]), (Ok(5), vec![]));
        assert_eq!(entered(&[5, 6], &[5, 6, 7]), (Ok(7), vec![6, 5]));
    }

    #[test]
    fn a_queue_that_cannot_be_entered_is_destroyed() {
        assert_eq!(entered(&[], &[1 << 24]), (Err(libc::EPROTO), vec![1 << 24]));
        assert_eq!(entered(&[5], &[5]), (Err(libc::ENOSPC), vec![5]));
        assert_eq!(entered(&[], &[]), (Err(libc::ENOSPC), vec![]));
    }
}
