// SPDX-License-Identifier: GPL-2.0

//! How received frames are spread over channels: a hash of addresses and ports chooses an entry of a table.

use crate::{
    abi,
    abi::{
        Plain,
        RedirectionEntry,
        SetRedirection,
        SetRedirectionTable,
        CHANNEL_NONE,
        EQ_NONE,
        REDIRECTION_ENTRIES,
        REDIRECTION_KEY_SIZE, //
    },
    net,
    port, //
};
use kernel::prelude::*;

/// The types that have ports.
pub(super) const WITH_PORTS: u16 =
    abi::HASH_TCP_IPV4 | abi::HASH_TCP_IPV6 | abi::HASH_UDP_IPV4 | abi::HASH_UDP_IPV6;

/// The table and the key.
pub(super) struct Redirection {
    /// The channel of each entry; none where the device has no table.
    table: KVec<u16>,
    key: [u8; REDIRECTION_KEY_SIZE],
    /// Whether a user has set the table: then it stays where the number of channels changes.
    chosen: bool,
}

impl Redirection {
    /// A table of so many entries, a power of two or none, with all `channels` in turn.
    pub(super) fn new(entries: usize, channels: u16) -> Result<Self> {
        let mut table = KVec::with_capacity(entries, GFP_KERNEL)?;
        for _ in 0..entries {
            table.push(0, GFP_KERNEL)?;
        }
        let mut this = Self {
            table,
            key: [0; REDIRECTION_KEY_SIZE],
            chosen: false,
        };
        net::fill_rss_key(&mut this.key);
        this.deal_out(channels);
        Ok(this)
    }

    fn deal_out(&mut self, channels: u16) {
        for (number, channel) in self.table.iter_mut().enumerate() {
            *channel = (number % usize::from(channels.max(1))) as u16;
        }
    }

    pub(super) fn entries(&self) -> usize {
        self.table.len()
    }

    pub(super) fn table(&self) -> &[u16] {
        &self.table
    }

    pub(super) fn key(&self) -> &[u8; REDIRECTION_KEY_SIZE] {
        &self.key
    }

    /// There are so many channels from now on. `EINVAL` where a user has named one that there would not be.
    pub(super) fn set_channels(&mut self, channels: u16) -> Result {
        if !self.chosen {
            self.deal_out(channels);
            return Ok(());
        }
        match self.table.iter().all(|channel| *channel < channels) {
            true => Ok(()),
            false => Err(EINVAL),
        }
    }

    /// There are so many channels, and nothing that a user has chosen.
    pub(super) fn forget_choice(&mut self, channels: u16) {
        self.chosen = false;
        self.deal_out(channels);
    }

    /// The same once more, to go back to. `ENOMEM` where there is no memory for it.
    pub(super) fn try_clone(&self) -> Result<Self> {
        let mut table = KVec::with_capacity(self.table.len(), GFP_KERNEL)?;
        table.extend_from_slice(&self.table, GFP_KERNEL)?;
        Ok(Self {
            table,
            key: self.key,
            chosen: self.chosen,
        })
    }

    /// Sets what a user says, all of it or nothing, of which all numbers are those of the `channels` that there are.
    pub(super) fn set(
        &mut self,
        table: Option<&[u32]>,
        key: Option<&[u8]>,
        channels: u16,
    ) -> Result {
        if key.is_some_and(|key| key.len() != self.key.len())
            || table.is_some_and(|table| table.len() != self.table.len())
        {
            return Err(EINVAL);
        }
        if let Some(key) = key {
            self.key.copy_from_slice(key);
        }
        if let Some(table) = table {
            for (to, from) in self.table.iter_mut().zip(table) {
                *to = *from as u16;
            }
            // All in turn is what there is without a choice; the core has it set where a choice is taken back.
            let channels = usize::from(channels.max(1));
            let mut entries = self.table.iter().enumerate();
            self.chosen =
                entries.any(|(number, channel)| usize::from(*channel) != number % channels);
        }
        Ok(())
    }

    /// The command that sets the entries of `table` from `first` on, as many as fit, for the `channels` that there are.
    fn table_command(table: &[u16], first: usize, channels: u16) -> SetRedirectionTable {
        let mut command = SetRedirectionTable {
            port: port::DEVICE_PORT,
            first: first as u16,
            ..SetRedirectionTable::zeroed()
        };
        let rest = table.get(first..).unwrap_or(&[]);
        for (entry, channel) in command.entries.iter_mut().zip(rest) {
            command.count += 1;
            *entry = RedirectionEntry {
                // One that is not open has no number.
                channel: if *channel < channels {
                    *channel
                } else {
                    CHANNEL_NONE
                },
                eqn: EQ_NONE,
                processor: 0,
                reserved: 0,
            };
        }
        command
    }

    /// Gives the commands that tell a device with `channels` and a table of so many `entries` all of it that the device
    /// has room for: the table first, by which nothing goes before the last one says so.
    pub(super) fn tell(
        &self,
        channels: u16,
        entries: usize,
        mut table: impl FnMut(&SetRedirectionTable) -> Result,
        redirection: impl FnOnce(&SetRedirection) -> Result,
    ) -> Result {
        // Both are powers of two, or none: of a hash the device looks at fewer bits where it has fewer entries.
        let told = &self.table[..self.table.len().min(entries)];
        if told.is_empty() {
            return Ok(());
        }
        for first in (0..told.len()).step_by(REDIRECTION_ENTRIES) {
            table(&Self::table_command(told, first, channels))?;
        }
        redirection(&SetRedirection {
            port: port::DEVICE_PORT,
            // Of everything that the device knows.
            types: abi::ALL_HASHES,
            mask: (told.len() - 1) as u16,
            key: self.key,
            ..SetRedirection::zeroed()
        })
    }
}

#[kunit_tests(ferrite_redirection)]
mod tests {
    use super::*;

    fn told(redirection: &Redirection, channels: u16) -> Result<(KVec<u16>, u16)> {
        told_of(redirection, channels, redirection.entries())
    }

    fn told_of(redirection: &Redirection, channels: u16, room: usize) -> Result<(KVec<u16>, u16)> {
        let mut entries = KVec::new();
        let mut mask = 0;
        redirection.tell(
            channels,
            room,
            |command| {
                assert_eq!(usize::from(command.first), entries.len());
                let (count, all) = (usize::from(command.count), command.entries);
                assert!(count > 0 && count <= REDIRECTION_ENTRIES);
                for entry in &all[..count] {
                    assert_eq!(entry.eqn, EQ_NONE);
                    entries.push(entry.channel, GFP_KERNEL)?;
                }
                // What is behind those that count is zero.
                assert!(all[count..]
                    .iter()
                    .all(|entry| entry.as_bytes().iter().all(|byte| *byte == 0)));
                Ok(())
            },
            |command| {
                assert_eq!(command.types, abi::ALL_HASHES);
                assert_eq!(command.key, *redirection.key());
                mask = command.mask;
                Ok(())
            },
        )?;
        Ok((entries, mask))
    }

    #[test]
    fn a_table_is_told_entry_by_entry_with_all_channels_in_turn() -> Result {
        for entries in [16, 32, 256] {
            let redirection = Redirection::new(entries, 3)?;
            let (told, mask) = told(&redirection, 3)?;
            assert_eq!(told.len(), entries);
            assert_eq!(usize::from(mask), entries - 1);
            for (number, channel) in told.iter().enumerate() {
                assert_eq!(usize::from(*channel), number % 3);
            }
        }
        // A device without a table is told nothing.
        let none = Redirection::new(0, 3)?;
        none.tell(3, 16, |_| Err(EINVAL), |_| Err(EINVAL))?;
        let redirection = Redirection::new(16, 3)?;
        redirection.tell(3, 0, |_| Err(EINVAL), |_| Err(EINVAL))?;
        // One with a smaller table than it was made for, or with a larger one, is told what there is in both.
        for (room, expected) in [(4, 4), (16, 16), (64, 16)] {
            let (told, mask) = told_of(&redirection, 3, room)?;
            assert_eq!((told.len(), usize::from(mask)), (expected, expected - 1));
        }
        Ok(())
    }

    #[test]
    fn what_a_user_has_chosen_stays_and_names_what_there_is() -> Result {
        let mut redirection = Redirection::new(16, 4)?;
        assert_eq!(redirection.set_channels(2), Ok(()));
        assert!(told(&redirection, 2)?.0.iter().all(|channel| *channel < 2));
        redirection.set(Some(&[1; 16]), Some(&[7; 40]), 2)?;
        assert_eq!(redirection.set_channels(4), Ok(()));
        assert!(redirection.table().iter().all(|channel| *channel == 1));
        assert_eq!(redirection.key(), &[7; 40]);
        assert_eq!(redirection.set_channels(1), Err(EINVAL));
        // Where there are fewer after all nothing is told that there is not.
        let (fewer, _) = told(&redirection, 1)?;
        assert!(fewer.iter().all(|channel| *channel == CHANNEL_NONE));
        // A choice that is taken back.
        let mut in_turn = [0; 16];
        for (number, channel) in in_turn.iter_mut().enumerate() {
            *channel = number as u32 % 4;
        }
        redirection.set(Some(&in_turn), None, 4)?;
        assert_eq!(redirection.set_channels(1), Ok(()));
        assert!(redirection.table().iter().all(|channel| *channel == 0));
        // Of the wrong length, nothing.
        assert_eq!(redirection.set(Some(&[1; 15]), None, 4), Err(EINVAL));
        assert_eq!(redirection.set(None, Some(&[1; 39]), 4), Err(EINVAL));
        // Nor one of both.
        let before = redirection.try_clone()?;
        assert_eq!(
            redirection.set(Some(&[1; 15]), Some(&[1; 40]), 4),
            Err(EINVAL)
        );
        assert_eq!(redirection.key(), before.key());
        assert_eq!(redirection.table(), before.table());
        Ok(())
    }
}
