// SPDX-License-Identifier: GPL-2.0

//! What a driver tells about its objects to those who list them.

use super::{Driver, Kind, Object};
use crate::bindings;
use core::marker::PhantomData;
use kernel::error::{from_result, to_result};
use kernel::prelude::*;

/// Room for details of an object, in an answer to whoever lists the objects.
///
/// # Invariants
///
/// `msg` is valid and has the nest for details of the driver open.
pub struct Details<'a> {
    msg: *mut bindings::sk_buff,
    _p: PhantomData<&'a mut bindings::sk_buff>,
}

impl Details<'_> {
    /// Lets `describe` write details to `msg`.
    ///
    /// # Safety
    ///
    /// `msg` must be a message that the core is writing an entry to.
    pub(super) unsafe fn write(
        msg: *mut bindings::sk_buff,
        describe: impl FnOnce(&mut Details<'_>) -> Result,
    ) -> Result {
        // SAFETY: The caller vouches that the core is filling the message.
        let nest = unsafe { bindings::rdma_nl_driver_start(msg) };
        if nest.is_null() {
            return Err(EMSGSIZE);
        }
        // INVARIANT: The nest was opened just now.
        let mut details = Details {
            msg,
            _p: PhantomData,
        };
        let result = describe(&mut details);
        // SAFETY: The nest is open, and it is the last one that was opened.
        unsafe {
            match result {
                Ok(()) => bindings::rdma_nl_driver_end(msg, nest),
                Err(_) => bindings::rdma_nl_driver_cancel(msg, nest),
            }
        }
        result
    }

    /// A number.
    pub fn number(&mut self, name: &CStr, value: u32) -> Result {
        // SAFETY: By the type invariant the core is filling the message; the name is copied.
        to_result(unsafe { bindings::rdma_nl_put_driver_u32(self.msg, name.as_char_ptr(), value) })
    }

    /// A number of up to 64 bits.
    pub fn large_number(&mut self, name: &CStr, value: u64) -> Result {
        // SAFETY: By the type invariant the core is filling the message; the name is copied.
        to_result(unsafe { bindings::rdma_nl_put_driver_u64(self.msg, name.as_char_ptr(), value) })
    }

    /// A word.
    pub fn text(&mut self, name: &CStr, value: &CStr) -> Result {
        // SAFETY: By the type invariant the core is filling the message; name and value are copied.
        to_result(unsafe {
            bindings::rdma_nl_put_driver_string(self.msg, name.as_char_ptr(), value.as_char_ptr())
        })
    }
}

/// Room for counters of an object, likewise.
///
/// # Invariants
///
/// `msg` is valid and has the nest for counters open.
pub struct Counts<'a> {
    msg: *mut bindings::sk_buff,
    _p: PhantomData<&'a mut bindings::sk_buff>,
}

impl Counts<'_> {
    /// Lets `count` write counters to `msg`.
    ///
    /// # Safety
    ///
    /// `msg` must be a message that the core is writing an entry to.
    pub(super) unsafe fn write(
        msg: *mut bindings::sk_buff,
        count: impl FnOnce(&mut Counts<'_>) -> Result,
    ) -> Result {
        // SAFETY: The caller vouches that the core is filling the message.
        let nest = unsafe { bindings::rdma_nl_stat_start(msg) };
        if nest.is_null() {
            return Err(EMSGSIZE);
        }
        // INVARIANT: The nest was opened just now.
        let mut counts = Counts {
            msg,
            _p: PhantomData,
        };
        let result = count(&mut counts);
        // SAFETY: The nest is open, and it is the last one that was opened.
        unsafe {
            match result {
                Ok(()) => bindings::rdma_nl_driver_end(msg, nest),
                Err(_) => bindings::rdma_nl_driver_cancel(msg, nest),
            }
        }
        result
    }

    /// A counter.
    pub fn counter(&mut self, name: &CStr, value: u64) -> Result {
        // SAFETY: By the type invariant the core is filling the message; the name is copied.
        to_result(unsafe {
            bindings::rdma_nl_stat_hwcounter_entry(self.msg, name.as_char_ptr(), value)
        })
    }
}

/// Lets the driver describe an object that is listed. The core keeps its memory meanwhile, but the
/// driver may be destroying it.
///
/// # Safety
///
/// As for [`Object::try_ref`] and [`Details::write`].
pub(super) unsafe fn fill_entry<K: Kind<D>, D: Driver>(
    msg: *mut bindings::sk_buff,
    raw: *mut K::Raw,
    describe: fn(&Object<K, D>, &mut Details<'_>) -> Result,
) -> c_int {
    // SAFETY: The caller vouches that the object was created and that its memory stays.
    let Some(object) = (unsafe { Object::<K, D>::try_ref(raw) }) else {
        return 0;
    };
    from_result(|| {
        // SAFETY: The caller vouches that the core is filling the message.
        unsafe { Details::write(msg, |details| describe(&object, details)) }?;
        Ok(0)
    })
}

/// The same for its counters.
///
/// # Safety
///
/// As for [`Object::try_ref`] and [`Counts::write`].
pub(super) unsafe fn fill_counts<K: Kind<D>, D: Driver>(
    msg: *mut bindings::sk_buff,
    raw: *mut K::Raw,
    count: fn(&Object<K, D>, &mut Counts<'_>) -> Result,
) -> c_int {
    // SAFETY: The caller vouches that the object was created and that its memory stays.
    let Some(object) = (unsafe { Object::<K, D>::try_ref(raw) }) else {
        return 0;
    };
    from_result(|| {
        // SAFETY: The caller vouches that the core is filling the message.
        unsafe { Counts::write(msg, |counts| count(&object, counts)) }?;
        Ok(0)
    })
}
