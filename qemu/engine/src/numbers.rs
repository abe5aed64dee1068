// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The numbers that a function has for its objects, and tables of objects by number.
//!
//! Several functions may share a wire: what tells their queue pairs and tags apart is that each has
//! a range of its own.

use ferrite_abi::CommandStatus;

/// Numbers of one kind of object: `count` of them from `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// The first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

impl Numbers {
    /// Which of them a number is, if it is one of them.
    pub fn index(self, number: u32) -> Option<usize> {
        let index = number.wrapping_sub(self.first);
        (index < self.count).then_some(index as usize)
    }
}

/// Objects by number. It grows with the highest number in use.
#[derive(Debug)]
pub(crate) struct NumberTable<T> {
    numbers: Numbers,
    slots: Vec<Option<Box<T>>>,
}

impl<T> NumberTable<T> {
    pub(crate) fn new(numbers: Numbers) -> Self {
        Self {
            numbers,
            slots: Vec::new(),
        }
    }

    /// Refuses a number that is not the function's.
    pub(crate) fn check(&self, number: u32) -> Result<(), CommandStatus> {
        match self.numbers.index(number) {
            Some(_) => Ok(()),
            None => Err(CommandStatus::BadNumber),
        }
    }

    /// The same, and one that nothing has.
    pub(crate) fn find(&self, number: u32) -> Result<&T, CommandStatus> {
        self.check(number)?;
        self.get(number).ok_or(CommandStatus::NotFound)
    }

    /// The same.
    pub(crate) fn find_mut(&mut self, number: u32) -> Result<&mut T, CommandStatus> {
        self.check(number)?;
        self.get_mut(number).ok_or(CommandStatus::NotFound)
    }

    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.numbers.index(number)?)?.as_deref()
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let index = self.numbers.index(number)?;
        self.slots.get_mut(index)?.as_deref_mut()
    }

    /// Where an object of this number is, or is to be.
    pub(crate) fn slot(&mut self, number: u32) -> Result<&mut Option<Box<T>>, CommandStatus> {
        let index = self.numbers.index(number).ok_or(CommandStatus::BadNumber)?;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        Ok(&mut self.slots[index])
    }

    pub(crate) fn take(&mut self, number: u32) -> Option<Box<T>> {
        let index = self.numbers.index(number)?;
        self.slots.get_mut(index)?.take()
    }

    pub(crate) fn clear(&mut self) {
        self.slots.clear();
    }

    /// What there is, in the order of the numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().flatten().map(|object| &**object)
    }

    /// Numbers that were ever needed: what the table has memory for.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_its_own_numbers_alone() {
        let (first, count) = (0xff_ff00, 0x100);
        let mut table = NumberTable::new(Numbers { first, count });
        for number in [0, 1, first - 1, first + count, u32::MAX] {
            assert_eq!(table.check(number), Err(CommandStatus::BadNumber));
            assert_eq!(table.find(number), Err(CommandStatus::BadNumber));
            assert_eq!(table.slot(number).err(), Some(CommandStatus::BadNumber));
            assert!(table.get(number).is_none() && table.take(number).is_none());
        }
        assert_eq!(table.find(first), Err(CommandStatus::NotFound));
        *table.slot(first + 3).unwrap() = Some(Box::new(7));
        assert_eq!(table.len(), 4);
        assert_eq!(table.find(first + 3), Ok(&7));
        *table.find_mut(first + 3).unwrap() += 1;
        assert_eq!(table.iter().collect::<Vec<_>>(), [&8]);
        assert_eq!(table.take(first + 3).as_deref(), Some(&8));
        assert!(table.get(first + 3).is_none());
    }
}
