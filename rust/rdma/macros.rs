// SPDX-License-Identifier: GPL-2.0

//! Typed views of C enumerations and flag words.

/// An enumeration with the values of a C one.
macro_rules! c_enum {
    (
        $(#[$meta:meta])*
        pub enum $name:ident {
            $($(#[$doc:meta])* $variant:ident = $value:ident,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum $name {
            $($(#[$doc])* $variant = $crate::bindings::$value as u32,)*
        }

        impl $name {
            /// The value of that number, if there is one.
            pub const fn from_raw(raw: u32) -> Option<Self> {
                $(
                    if raw == $crate::bindings::$value as u32 {
                        return Some(Self::$variant);
                    }
                )*
                None
            }

            /// The number of the value.
            pub const fn as_raw(self) -> u32 {
                self as u32
            }
        }
    };
}

/// A set of flags.
macro_rules! flags {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($repr:ty) {
            $($(#[$doc:meta])* $flag:ident = $value:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name($repr);

        impl $name {
            $(
                $(#[$doc])*
                pub const $flag: Self = Self($value);
            )*

            /// The flags of a raw word.
            pub const fn from_raw(raw: $repr) -> Self {
                Self(raw)
            }

            /// The raw word.
            pub const fn as_raw(self) -> $repr {
                self.0
            }

            /// Whether all of `other` are set.
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Whether any of `other` is set.
            pub const fn intersects(self, other: Self) -> bool {
                self.0 & other.0 != 0
            }

            /// Those that are not among `other`.
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }
        }

        impl core::ops::BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }
    };
}

/// A set of flags with the values of a C enumeration.
macro_rules! c_flags {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($repr:ty) {
            $($(#[$doc:meta])* $flag:ident = $value:ident,)*
        }
    ) => {
        flags! {
            $(#[$meta])*
            pub struct $name($repr) {
                $($(#[$doc])* $flag = $crate::bindings::$value as $repr,)*
            }
        }
    };
}
