// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The GID table: the addresses this device sends from and answers to.

use ferrite_abi::{CommandStatus, SetGid, VLAN_NONE};

/// Entries of the table.
pub const MAX_GIDS: u16 = 128;

/// An entry of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// The address: IPv6, or IPv4 as `::ffff:a.b.c.d`.
    pub gid: [u8; 16],
    /// VLAN identifier, if tagged.
    pub vlan: Option<u16>,
    /// Source MAC address.
    pub mac: [u8; 6],
}

impl Gid {
    /// The VLAN it is in, 0 for none.
    pub fn vlan_id(&self) -> u16 {
        self.vlan.unwrap_or(0)
    }

    /// The IPv4 address, where it is one.
    pub fn ipv4(&self) -> Option<[u8; 4]> {
        ipv4_of(&self.gid)
    }
}

/// The IPv4 address in a GID, where it holds one.
pub fn ipv4_of(gid: &[u8; 16]) -> Option<[u8; 4]> {
    let (prefix, address) = gid.split_at(12);
    if prefix[..10].iter().all(|&byte| byte == 0) && prefix[10..] == [0xff, 0xff] {
        address.try_into().ok()
    } else {
        None
    }
}

/// The GID that holds an IPv4 address.
pub fn gid_of_ipv4(address: [u8; 4]) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&address);
    gid
}

/// The table.
#[derive(Debug, Default)]
pub struct GidTable {
    entries: Vec<Option<Gid>>,
}

impl GidTable {
    /// Carries out the command.
    pub(crate) fn set(&mut self, command: &SetGid) -> Result<(), CommandStatus> {
        if command.index >= MAX_GIDS {
            return Err(CommandStatus::BadNumber);
        }
        let vlan = match command.vlan {
            VLAN_NONE => None,
            id if id < 4096 => Some(id),
            _ => return Err(CommandStatus::BadParameter),
        };
        let index = usize::from(command.index);
        if self.entries.len() <= index {
            self.entries.resize(index + 1, None);
        }
        self.entries[index] = (command.gid != [0; 16]).then_some(Gid {
            gid: command.gid,
            vlan,
            mac: command.mac,
        });
        Ok(())
    }

    /// The entry at `index`.
    pub fn get(&self, index: u16) -> Option<&Gid> {
        self.entries.get(usize::from(index))?.as_ref()
    }

    /// The entries that are set.
    pub fn iter(&self) -> impl Iterator<Item = &Gid> {
        self.entries.iter().flatten()
    }

    /// True when `gid` is one of this device's addresses in VLAN `vlan`, 0 for none.
    pub fn contains(&self, gid: &[u8; 16], vlan: u16) -> bool {
        self.entries
            .iter()
            .flatten()
            .any(|entry| entry.gid == *gid && entry.vlan_id() == vlan)
    }

    /// True when this device has an address in VLAN `vlan`, 0 for none.
    pub fn reaches(&self, vlan: u16) -> bool {
        self.entries
            .iter()
            .flatten()
            .any(|entry| entry.vlan_id() == vlan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(index: u16, gid: [u8; 16], vlan: u16) -> SetGid {
        SetGid {
            gid,
            index,
            vlan,
            mac: [2, 0, 0, 0, 0, 1],
            port: 0,
            reserved: [0; 5],
        }
    }

    #[test]
    fn entries_are_set_found_and_cleared() {
        let mut table = GidTable::default();
        let gid = gid_of_ipv4([10, 0, 0, 1]);
        assert_eq!(table.set(&command(3, gid, VLAN_NONE)), Ok(()));
        assert_eq!(table.get(3).unwrap().ipv4(), Some([10, 0, 0, 1]));
        assert!(table.contains(&gid, 0));
        assert!(!table.contains(&gid, 5));
        assert!(table.reaches(0));
        assert!(table.get(2).is_none());
        assert_eq!(table.set(&command(3, [0; 16], VLAN_NONE)), Ok(()));
        assert!(table.get(3).is_none());
        assert!(!table.contains(&gid, 0));
        assert!(!table.reaches(0));
    }

    #[test]
    fn one_address_may_be_in_several_vlans() {
        let mut table = GidTable::default();
        let gid = gid_of_ipv4([10, 0, 0, 1]);
        for (index, vlan) in [(0, VLAN_NONE), (1, 5), (2, 4094)] {
            assert_eq!(table.set(&command(index, gid, vlan)), Ok(()));
        }
        for (vlan, there) in [(0, true), (5, true), (6, false), (4094, true)] {
            assert_eq!(table.contains(&gid, vlan), there);
            assert_eq!(table.reaches(vlan), there);
        }
    }

    #[test]
    fn an_index_or_vlan_out_of_range_is_refused() {
        let mut table = GidTable::default();
        assert_eq!(
            table.set(&command(MAX_GIDS, [1; 16], VLAN_NONE)),
            Err(CommandStatus::BadNumber)
        );
        assert_eq!(
            table.set(&command(0, [1; 16], 4096)),
            Err(CommandStatus::BadParameter)
        );
    }
}
