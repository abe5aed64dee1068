// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Registers, doorbells, queue entries, commands and the uverbs ABI: each layout and each
//! constant is written here and nowhere else.
//!
//! All multi-byte fields are little-endian. Fields that hold network addresses (MAC, GID) are
//! byte arrays in network order. Reserved fields are written as zero, and a command or work request
//! in which one is not is refused ([`Reserved`]); so what they mean later is told from what never
//! meant anything.

#[cfg(not(target_endian = "little"))]
compile_error!("the Ferrite interface is little-endian and is used without conversion");

/// A layout shared with the device: any bit pattern is a valid value and there is no padding.
///
/// # Safety
///
/// Implementors are `repr(C)`, contain only integers and arrays of integers or of other `Plain`
/// types, and have no padding bytes. [`layout!`] is the only place that implements it for
/// structures, and asserts the last two.
pub unsafe trait Plain: Copy + Sized + 'static {
    /// The all-zero value.
    fn zeroed() -> Self {
        // SAFETY: any bit pattern is valid for a `Plain` type, all zeroes included.
        unsafe { core::mem::zeroed() }
    }

    /// The bytes of this value, as the device sees them.
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: `self` is valid for reads of its size, and without padding every byte is
        // initialised.
        unsafe {
            core::slice::from_raw_parts(
                core::ptr::from_ref(self).cast::<u8>(),
                core::mem::size_of::<Self>(),
            )
        }
    }

    /// The bytes of this value, to be filled by a reader.
    fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_bytes`; any bytes written leave a valid value behind.
        unsafe {
            core::slice::from_raw_parts_mut(
                core::ptr::from_mut(self).cast::<u8>(),
                core::mem::size_of::<Self>(),
            )
        }
    }

    /// Reads a value from the front of `bytes`; `None` when they are too few.
    fn from_prefix(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..core::mem::size_of::<Self>())?;
        let mut value = Self::zeroed();
        value.as_bytes_mut().copy_from_slice(bytes);
        Some(value)
    }
}

// SAFETY: integers have no padding and accept every bit pattern.
unsafe impl Plain for u32 {}
// SAFETY: integers have no padding and accept every bit pattern.
unsafe impl Plain for u64 {}

/// What has reserved fields, or may have: they are zero in all that either side writes.
pub trait Reserved {
    /// Whether all of it is zero.
    fn is_zero(&self) -> bool;

    /// Whether every reserved field of it is zero.
    fn reserved_is_zero(&self) -> bool;
}

macro_rules! without_reserved {
    ($($ty:ty),*) => {$(
        impl Reserved for $ty {
            fn is_zero(&self) -> bool {
                *self == 0
            }

            fn reserved_is_zero(&self) -> bool {
                true
            }
        }
    )*};
}

without_reserved!(u8, u16, u32, u64);

impl<T: Reserved, const N: usize> Reserved for [T; N] {
    fn is_zero(&self) -> bool {
        self.iter().all(Reserved::is_zero)
    }

    fn reserved_is_zero(&self) -> bool {
        self.iter().all(Reserved::reserved_is_zero)
    }
}

/// Whether a field of this name is a reserved one.
const fn is_reserved(name: &str) -> bool {
    let (name, start) = (name.as_bytes(), b"reserved");
    let mut at = 0;
    while at < start.len() {
        if at == name.len() || name[at] != start[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// One field of a layout, for generators of headers in other languages.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The field's name.
    pub name: &'static str,
    /// The Rust type, as written.
    pub ty: &'static str,
    /// Offset from the start of the layout, in bytes.
    pub offset: usize,
}

/// A layout that can describe itself.
pub trait Layout: Plain {
    /// The name of the structure.
    const NAME: &'static str;
    /// Its fields in order of offset.
    const FIELDS: &'static [Field];
}

/// Defines a `repr(C)` structure of a stated size with every field at a stated offset.
///
/// The build fails where the compiler's layout differs from the stated one or has padding.
macro_rules! layout {
    ($(
        $(#[$meta:meta])*
        pub struct $name:ident: $size:literal {
            $( $(#[$fmeta:meta])* $offset:literal => $field:ident: $ty:ty, )*
        }
    )*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$fmeta])* pub $field: $ty, )*
        }

        const _: () = {
            assert!(core::mem::size_of::<$name>() == $size);
            assert!(0 $( + core::mem::size_of::<$ty>() )* == $size, "padding");
            $( assert!(core::mem::offset_of!($name, $field) == $offset); )*
        };

        // SAFETY: the structure is `repr(C)`, made of integers, arrays and `Plain` types only, and
        // the assertions above show that it has no padding.
        unsafe impl super::Plain for $name {}

        impl super::Reserved for $name {
            fn is_zero(&self) -> bool {
                $( super::Reserved::is_zero(&self.$field) && )* true
            }

            fn reserved_is_zero(&self) -> bool {
                $( (if const { super::is_reserved(stringify!($field)) } {
                    super::Reserved::is_zero(&self.$field)
                } else {
                    super::Reserved::reserved_is_zero(&self.$field)
                }) && )* true
            }
        }

        impl super::Layout for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [super::Field] = &[
                $( super::Field { name: stringify!($field), ty: stringify!($ty), offset: $offset }, )*
            ];
        }
    )*};
}

/// Defines a set of numbers as an enum that is converted from its number only by a check.
macro_rules! numbers {
    ($(
        $(#[$meta:meta])*
        pub enum $name:ident: $repr:ident {
            $( $(#[$vmeta:meta])* $variant:ident = $value:literal, )*
        }
    )*) => {$(
        $(#[$meta])*
        #[repr($repr)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name {
            $( $(#[$vmeta])* $variant = $value, )*
        }

        impl $name {
            /// The value with this number, if there is one.
            pub const fn from_number(number: $repr) -> Option<Self> {
                match number {
                    $( $value => Some(Self::$variant), )*
                    _ => None,
                }
            }

            /// The number that stands for this value.
            pub const fn number(self) -> $repr {
                self as $repr
            }
        }
    )*};
}

mod buffer;
mod command;
mod completion;
mod doorbell;
mod ethernet;
mod event;
mod memory;
mod pci;
mod raw;
mod registers;
mod uverbs;
mod work;

pub use buffer::*;
pub use command::*;
pub use completion::*;
pub use doorbell::*;
pub use ethernet::*;
pub use event::*;
pub use memory::*;
pub use pci::*;
pub use raw::*;
pub use registers::*;
pub use uverbs::*;
pub use work::*;
