// SPDX-License-Identifier: GPL-2.0

//! How layouts are written down: each field with its offset, in network byte order.

/// What a field of a layout may be.
pub trait Field: Copy {
    /// Bytes of it.
    const SIZE: usize;

    /// Writes it to the front of `bytes`, which are at least as many.
    fn put(self, bytes: &mut [u8]);

    /// Reads it from the front of `bytes`, which are at least as many.
    fn get(bytes: &[u8]) -> Self;

    /// Whether all of it is zero.
    fn is_zero(self) -> bool;
}

macro_rules! integer_fields {
    ($($ty:ty),*) => {$(
        impl Field for $ty {
            const SIZE: usize = core::mem::size_of::<$ty>();

            fn put(self, bytes: &mut [u8]) {
                bytes[..Self::SIZE].copy_from_slice(&self.to_be_bytes());
            }

            fn get(bytes: &[u8]) -> Self {
                let mut own = [0; core::mem::size_of::<$ty>()];
                own.copy_from_slice(&bytes[..Self::SIZE]);
                Self::from_be_bytes(own)
            }

            fn is_zero(self) -> bool {
                self == 0
            }
        }
    )*};
}

integer_fields!(u8, u16, u32, u64);

impl<const N: usize> Field for [u8; N] {
    const SIZE: usize = N;

    fn put(self, bytes: &mut [u8]) {
        bytes[..N].copy_from_slice(&self);
    }

    fn get(bytes: &[u8]) -> Self {
        let mut own = [0; N];
        own.copy_from_slice(&bytes[..N]);
        own
    }

    fn is_zero(self) -> bool {
        self == [0; N]
    }
}

/// One field of a layout, for those who write tables of them.
#[derive(Clone, Copy, Debug)]
pub struct FieldInfo {
    /// The field's name.
    pub name: &'static str,
    /// The Rust type, as written.
    pub ty: &'static str,
    /// Offset from the start of the layout, in bytes.
    pub offset: usize,
    /// What it is for.
    pub words: &'static str,
}

/// Something of a fixed size that is sent, which can describe itself.
pub trait Layout: Copy + 'static {
    /// The name of the structure.
    const NAME: &'static str;
    /// What it is for.
    const WORDS: &'static str;
    /// Bytes of it.
    const SIZE: usize;
    /// Its fields, in order of offset.
    const FIELDS: &'static [FieldInfo];

    /// Writes it to the front of `bytes`; `None` where those are too few.
    fn encode(&self, bytes: &mut [u8]) -> Option<()>;

    /// Reads it from the front of `bytes`; `None` where those are too few.
    fn decode(bytes: &[u8]) -> Option<Self>;

    /// Whether every reserved field of it is zero.
    fn reserved_is_zero(&self) -> bool;
}

/// Whether a field of this name is a reserved one.
pub(super) const fn is_reserved(name: &str) -> bool {
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

/// Defines structures of a stated size with every field at a stated offset; the build fails where
/// the fields before one have another size than its offset, or all of them another than the whole.
macro_rules! layout {
    ($(
        $(#[doc = $words:literal])*
        pub struct $name:ident: $size:literal {
            $( $(#[doc = $fwords:literal])* $offset:literal => $field:ident: $ty:ty, )*
        }
    )*) => {$(
        $(#[doc = $words])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[doc = $fwords])* pub $field: $ty, )*
        }

        const _: () = {
            let at = 0;
            $(
                assert!(at == $offset, "a field is not where it is said to be");
                let at = at + <$ty as Field>::SIZE;
            )*
            assert!(at == $size, "the size is not what it is said to be");
        };

        impl Layout for $name {
            const NAME: &'static str = stringify!($name);
            const WORDS: &'static str = concat!($($words),*);
            const SIZE: usize = $size;
            const FIELDS: &'static [FieldInfo] = &[
                $( FieldInfo {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    offset: $offset,
                    words: concat!($($fwords),*),
                }, )*
            ];

            fn encode(&self, bytes: &mut [u8]) -> Option<()> {
                let bytes = bytes.get_mut(..$size)?;
                $( self.$field.put(&mut bytes[$offset..]); )*
                Some(())
            }

            fn decode(bytes: &[u8]) -> Option<Self> {
                let bytes = bytes.get(..$size)?;
                Some(Self { $( $field: <$ty as Field>::get(&bytes[$offset..]), )* })
            }

            fn reserved_is_zero(&self) -> bool {
                $( (!const { is_reserved(stringify!($field)) } || self.$field.is_zero()) && )* true
            }
        }
    )*};
}

/// Defines sets of numbers as enums that are converted from their number only by a check.
macro_rules! numbers {
    ($(
        $(#[doc = $words:literal])*
        pub enum $name:ident: $repr:ident {
            $( $(#[doc = $vwords:literal])* $variant:ident = $value:literal, )*
        }
    )*) => {$(
        $(#[doc = $words])*
        #[repr($repr)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $( $(#[doc = $vwords])* $variant = $value, )*
        }

        impl $name {
            /// What it is for.
            pub const WORDS: &'static str = concat!($($words),*);
            /// All there are, with their names and what they are for.
            pub const ALL: &'static [(Self, &'static str, &'static str)] = &[
                $( (Self::$variant, stringify!($variant), concat!($($vwords),*)), )*
            ];

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
