// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Reads an input from its start to its end.

/// The rest of an input. Behind its end there are zeroes.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    /// All of it.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// So many bytes, or those that are left.
    pub fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.rest.split_at(count.min(self.rest.len()));
        self.rest = rest;
        bytes
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// A number by one byte mostly: a small one, one at an edge, or any.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=199 => small.into(),
            power @ 200..=231 => 1 << (power - 200),
            almost @ 232..=247 => (1 << (4 * (almost - 232) + 3)) - 1,
            248..=250 => self.u16().into(),
            251 | 252 => self.u32().into(),
            253 | 254 => self.u64(),
            255 => u64::MAX,
        }
    }

    /// A number that is not so large that reckoning with it would be a mistake of the target's.
    pub fn little(&mut self) -> u64 {
        self.number() & 0xffff_ffff
    }

    /// One of these.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.u8()) % from.len()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn behind_the_end_there_are_zeroes() {
        let mut input = Input::new(&[1, 2, 3]);
        assert_eq!((input.u16(), input.u32(), input.u64()), (0x201, 3, 0));
        assert!(input.is_empty());
        assert!(input.bytes(5).is_empty());
    }

    #[test]
    fn every_first_byte_is_a_number() {
        for first in 0..=255 {
            Input::new(&[first, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).number();
        }
        assert_eq!(Input::new(&[7]).number(), 7);
        assert_eq!(Input::new(&[231]).number(), 1 << 31);
        assert_eq!(Input::new(&[247]).number(), (1 << 63) - 1);
    }
}
