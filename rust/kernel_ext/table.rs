// SPDX-License-Identifier: GPL-2.0

//! A table from number to object that may be used in interrupt handlers (what an irq-safe
//! `rust/kernel/xarray.rs` would offer).

use super::spinlock::{spin_lock_irq_disable, spin_unlock_irq_enable};
use crate::bindings;
use core::marker::PhantomData;
use core::ptr;
use kernel::error::to_result;
use kernel::prelude::*;
use kernel::sync::LockClassKey;
use kernel::types::{ForeignOwnable, Opaque};

/// A sparse table of `T`, locked with interrupts off.
///
/// # Invariants
///
/// `xa` is initialised; every entry came from `T::into_foreign`.
#[pin_data(PinnedDrop)]
pub struct IrqXArray<T: ForeignOwnable> {
    #[pin]
    xa: Opaque<bindings::xarray>,
    _p: PhantomData<T>,
}

// SAFETY: The entries are the table's own, and `T: Send`.
unsafe impl<T: ForeignOwnable + Send> Send for IrqXArray<T> {}
// SAFETY: Entries come, go and are handed out under the table's lock, by `T: Send + Sync` means;
// what only looks for indices holds the RCU read lock, as the array allows.
unsafe impl<T: ForeignOwnable + Send + Sync> Sync for IrqXArray<T> {}

/// Initialiser of an [`IrqXArray`] whose lock has a class of its own.
#[macro_export]
macro_rules! new_irq_xarray {
    ($($name:literal)?) => {
        $crate::kernel_ext::table::IrqXArray::new(
            kernel::optional_name!($($name)?),
            kernel::static_lock_class!(),
        )
    };
}
pub use new_irq_xarray;

impl<T: ForeignOwnable> IrqXArray<T> {
    /// Returns an initialiser for an empty table; [`new_irq_xarray`] says the class of its lock.
    ///
    /// `xa_init_flags` has one class for all arrays that are made in Rust, some of which are locked with interrupts on.
    pub fn new(name: &'static CStr, key: Pin<&'static LockClassKey>) -> impl PinInit<Self> {
        // INVARIANT: The array is initialised and empty.
        pin_init!(Self {
            xa <- Opaque::ffi_init(move |xa: *mut bindings::xarray| {
                // Those who make objects decide how many there are, and answer for the nodes.
                // SAFETY: The function gives a constant.
                let accounted = unsafe { bindings::xa_flags_account() };
                let flags = bindings::xa_lock_type_XA_LOCK_IRQ | accounted;
                // SAFETY: `xa` is memory for a `struct xarray` that nobody else knows.
                unsafe { bindings::xa_init_flags(xa, flags) };
                // SAFETY: The lock is part of the array, and nobody has taken it; name and key are static.
                unsafe {
                    let lock = &raw mut (*xa).xa_lock;
                    bindings::__spin_lock_init(lock, name.as_char_ptr(), key.as_ptr());
                }
            }),
            _p: PhantomData,
        })
    }

    /// The lock of the array, `xa_lock`.
    fn lock(&self) -> *mut bindings::spinlock_t {
        // SAFETY: By the type invariant there is an array, of which this is a part; this makes no reference to it.
        unsafe { &raw mut (*self.xa.get()).xa_lock }
    }

    /// Puts `value` at `index`, which must be free (`EBUSY` else). May sleep.
    pub fn insert(&self, index: usize, value: T) -> Result {
        let entry = value.into_foreign();
        let gfp = bindings::GFP_KERNEL;
        // SAFETY: The array is initialised; `entry` is a pointer aligned enough to be stored.
        let ret = unsafe { bindings::xa_insert_irq(self.xa.get(), index, entry, gfp) };
        if ret != 0 {
            // SAFETY: `entry` came from `into_foreign` above and was not stored.
            drop(unsafe { T::from_foreign(entry) });
        }
        to_result(ret)
    }

    /// Keeps room for a value at `index`, which must be free (`EBUSY` else), so that putting it there later cannot
    /// fail. May sleep.
    pub fn reserve(&self, index: usize) -> Result<Reserved<'_, T>> {
        let gfp = bindings::GFP_KERNEL;
        // SAFETY: The array is initialised; no entry stands for one that is reserved.
        let ret = unsafe { bindings::xa_insert_irq(self.xa.get(), index, ptr::null_mut(), gfp) };
        to_result(ret)?;
        Ok(Reserved { table: self, index })
    }

    /// Takes the value at `index` out.
    pub fn remove(&self, index: usize) -> Option<T> {
        // SAFETY: By the type invariant the array is initialised, and its lock with it.
        unsafe { spin_lock_irq_disable(self.lock()) };
        // SAFETY: By the type invariant the array is initialised; its lock was taken above.
        let entry = unsafe { bindings::__xa_erase(self.xa.get(), index) };
        // SAFETY: The lock was taken above, by this task.
        unsafe { spin_unlock_irq_enable(self.lock()) };
        // SAFETY: By the type invariant an entry came from `into_foreign`; it is out of the array
        // now.
        unsafe { T::try_from_foreign(entry) }
    }

    /// Calls `f` with the value at `index`, under the lock and with interrupts off.
    ///
    /// The lock is one for the whole table. It is what keeps the value: RCU would keep the array only, and what `T`
    /// stands for is freed when its owner likes, not after a grace period.
    pub fn with<R>(&self, index: usize, f: impl FnOnce(T::Borrowed<'_>) -> R) -> Option<R> {
        // SAFETY: By the type invariant the array is initialised, and its lock with it.
        unsafe { spin_lock_irq_disable(self.lock()) };
        // SAFETY: By the type invariant the array is initialised; its lock was taken above.
        let entry = unsafe { bindings::xa_load(self.xa.get(), index) };
        let result = if entry.is_null() {
            None
        } else {
            // SAFETY: The entry came from `into_foreign` and stays in the table while locked.
            Some(f(unsafe { T::borrow(entry) }))
        };
        // SAFETY: The lock was taken above, by this task.
        unsafe { spin_unlock_irq_enable(self.lock()) };
        result
    }

    /// The first index at or after `start` that is in use.
    pub fn next_index(&self, start: usize) -> Option<usize> {
        let mut index = start;
        // SAFETY: By the type invariant the array is initialised, and `xa_find` takes the RCU read
        // lock; `index` is a local.
        let entry = unsafe {
            bindings::xa_find(
                self.xa.get(),
                ptr::addr_of_mut!(index),
                usize::MAX,
                bindings::XA_PRESENT,
            )
        };
        (!entry.is_null()).then_some(index)
    }

    /// Calls `f` for each entry in turn. Entries that come or go meanwhile may or may not be seen.
    pub fn for_each(&self, mut f: impl FnMut(usize, T::Borrowed<'_>)) {
        let mut next = self.next_index(0);
        while let Some(index) = next {
            self.with(index, |value| f(index, value));
            next = index
                .checked_add(1)
                .and_then(|start| self.next_index(start));
        }
    }

    /// Whether nothing is in the table.
    pub fn is_empty(&self) -> bool {
        self.next_index(0).is_none()
    }
}

impl<T: ForeignOwnable> IrqXArray<T>
where
    for<'a> T::Borrowed<'a>: TryInto<T>,
{
    /// A reference of one's own to the value at `index`.
    pub fn get(&self, index: usize) -> Option<T> {
        self.with(index, |value| value.try_into().ok())?
    }
}

/// Room for a value in a table, which is given back when this is dropped. Until it is filled there is nothing.
pub struct Reserved<'a, T: ForeignOwnable> {
    table: &'a IrqXArray<T>,
    index: usize,
}

impl<T: ForeignOwnable> Reserved<'_, T> {
    /// Puts `value` there.
    pub fn fill(self, value: T) {
        let table = self.table;
        let entry = value.into_foreign();
        // SAFETY: By the table's invariant the array is initialised, and its lock with it.
        unsafe { spin_lock_irq_disable(table.lock()) };
        // SAFETY: The array is initialised, and its lock was taken above; `entry` is a pointer aligned enough to be
        // stored. Nothing is allocated, as the node is there for what is reserved.
        let before = unsafe { bindings::__xa_store(table.xa.get(), self.index, entry, 0) };
        // SAFETY: The lock was taken above, by this task.
        unsafe { spin_unlock_irq_enable(table.lock()) };
        debug_assert!(before.is_null());
        // Else the value would be taken out.
        core::mem::forget(self);
    }
}

impl<T: ForeignOwnable> Drop for Reserved<'_, T> {
    fn drop(&mut self) {
        // There is no value: it was not filled.
        let _ = self.table.remove(self.index);
    }
}

#[pinned_drop]
impl<T: ForeignOwnable> PinnedDrop for IrqXArray<T> {
    fn drop(self: Pin<&mut Self>) {
        while let Some(index) = self.next_index(0) {
            drop(self.remove(index));
        }
        // SAFETY: By the type invariant the array is initialised. Nobody has a reference to a table
        // that is dropped, and it is empty by now.
        unsafe { bindings::xa_destroy(self.xa.get()) };
    }
}
