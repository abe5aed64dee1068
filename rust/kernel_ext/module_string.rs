// SPDX-License-Identifier: GPL-2.0

//! Module parameters that are text (for `rust/kernel/module_param.rs`).

use crate::bindings;
use core::cell::UnsafeCell;
use kernel::prelude::*;

/// Bytes of the longest text, with the one that ends it.
pub const ROOM: usize = 64;

/// The text of a module parameter. Only [`module_string`] makes one.
///
/// # Invariants
///
/// The bytes are written before the module is initialised, and not afterwards; the last one is zero.
pub struct ModuleString(UnsafeCell<[u8; ROOM]>);

// SAFETY: By the type invariant nobody writes once there is somebody who reads.
unsafe impl Sync for ModuleString {}

impl ModuleString {
    /// # Safety
    ///
    /// The result must be given to the loader of modules only, by a parameter that is in no file.
    #[doc(hidden)]
    pub const unsafe fn new() -> Self {
        // INVARIANT: The loader writes before it initialises the module, no more than there is room for, and ends it
        // with a zero.
        Self(UnsafeCell::new([0; ROOM]))
    }

    /// Where the loader writes it.
    #[doc(hidden)]
    pub const fn as_ptr(&self) -> *mut c_char {
        self.0.get().cast()
    }

    /// What was given; empty if nothing was.
    pub fn get(&self) -> &CStr {
        // SAFETY: By the type invariant nobody writes.
        let bytes = unsafe { &*self.0.get() };
        CStr::from_bytes_until_nul(bytes).unwrap_or(c"")
    }
}

/// What the loader has to know of it.
#[doc(hidden)]
#[repr(transparent)]
pub struct Room(pub bindings::kparam_string);

// SAFETY: The loader alone uses it.
unsafe impl Sync for Room {}

/// The bytes of a text, for a section of a module.
#[doc(hidden)]
pub const fn bytes<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let mut at = 0;
    while at < N {
        bytes[at] = text.as_bytes()[at];
        at += 1;
    }
    bytes
}

/// Declares a module parameter that is text of less than 64 bytes, of a module that is not built in; longer ones
/// are refused by the loader. It is not in sysfs.
///
/// ```ignore
/// module_string!(server, "Address of the I/O unit");
/// ```
#[macro_export]
macro_rules! module_string {
    ($name:ident, $words:literal) => {
        #[allow(non_upper_case_globals)]
        static $name: $crate::kernel_ext::module_string::ModuleString = {
            // SAFETY: It is given to the parameter below only, which has no file.
            unsafe { $crate::kernel_ext::module_string::ModuleString::new() }
        };

        const _: () = {
            use $crate::kernel_ext::module_string::{bytes, Room, ROOM};

            static ROOM_OF: Room = Room($crate::bindings::kparam_string {
                maxlen: ROOM as u32,
                string: $name.as_ptr(),
            });

            #[link_section = "__param"]
            #[used]
            static PARAMETER: kernel::module_param::KernelParam =
                kernel::module_param::KernelParam::new($crate::bindings::kernel_param {
                    name: concat!(stringify!($name), "\0").as_ptr().cast(),
                    mod_: THIS_MODULE.as_ptr(),
                    ops: core::ptr::addr_of!($crate::bindings::param_ops_string),
                    perm: 0,
                    level: -1,
                    flags: 0,
                    __bindgen_anon_1: $crate::bindings::kernel_param__bindgen_ty_1 {
                        str_: core::ptr::addr_of!(ROOM_OF.0),
                    },
                });

            const KIND: &str = concat!("parmtype=", stringify!($name), ":string\0");
            #[link_section = ".modinfo"]
            #[used]
            static KIND_OF: [u8; KIND.len()] = bytes(KIND);

            const WORDS: &str = concat!("parm=", stringify!($name), ":", $words, "\0");
            #[link_section = ".modinfo"]
            #[used]
            static WORDS_OF: [u8; WORDS.len()] = bytes(WORDS);
        };
    };
}
