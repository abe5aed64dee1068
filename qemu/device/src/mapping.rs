// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which packets are of which function: the table of chapter 22 of the specification, and the only
//! place where that is decided.
//!
//! It is made when the process starts and never changes, so it needs no lock.

use ferrite_fabric::shortcut::is_message;
use ferrite_fabric::switch::Mac;
use serde::Serialize;

/// Functions of one adapter at most.
pub const MAX_FUNCTIONS: usize = 16;

/// VLAN identifiers: 12 bits, of which 0 stands for no VLAN.
const VLANS: usize = 1 << 12;
/// The Ethernet types of tags: of customers and of providers.
const TAGS: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// A set of VLANs.
#[derive(Clone, PartialEq, Eq)]
pub struct Vlans(Box<[u64; VLANS / 64]>);

impl Vlans {
    /// All of them, and frames without a tag.
    pub fn all() -> Self {
        Self(Box::new([u64::MAX; VLANS / 64]))
    }

    /// These alone; 0 is for frames without a tag.
    pub fn only(vlans: impl IntoIterator<Item = u16>) -> Self {
        let mut set = Self(Box::new([0; VLANS / 64]));
        for vlan in vlans {
            let vlan = usize::from(vlan) % VLANS;
            set.0[vlan / 64] |= 1 << (vlan % 64);
        }
        set
    }

    fn has(&self, vlan: u16) -> bool {
        let vlan = usize::from(vlan) % VLANS;
        self.0[vlan / 64] & (1 << (vlan % 64)) != 0
    }
}

impl std::fmt::Debug for Vlans {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count: u32 = self.0.iter().map(|word| word.count_ones()).sum();
        write!(f, "{count} VLANs")
    }
}

/// A row: what the packets of one function look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its address.
    pub mac: Mac,
    /// It may send from other addresses than this, and gets what is for addresses that nobody here
    /// has: there may be a bridge behind it.
    pub any_source: bool,
    /// The VLANs that it may use, both ways.
    pub vlans: Vlans,
}

/// Where a packet goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Bit by bit.
    functions: u16,
    /// It leaves by the uplink.
    pub wire: bool,
}

impl Targets {
    /// The functions that get it.
    pub fn functions(self) -> impl Iterator<Item = usize> {
        (0..MAX_FUNCTIONS).filter(move |function| self.functions & (1 << function) != 0)
    }
}

/// Why a packet goes nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Refusal {
    /// It comes from an address that is not its sender's.
    Source,
    /// It is in a VLAN that its sender has nothing to do with.
    Vlan,
    /// It is what adapters and switches say to each other, and no guest's to say; or it is no
    /// frame at all.
    Kind,
}

/// The table.
#[derive(Debug)]
pub struct Mapping {
    rows: Vec<Row>,
}

/// What of a frame the table is asked for.
struct Fields {
    destination: Mac,
    source: Mac,
    vlan: u16,
}

impl Fields {
    fn of(frame: &[u8]) -> Option<Self> {
        let (mut at, mut vlan) = (12, 0);
        // A tag with identifier 0 is there for its priority alone: who takes it off finds what is behind it.
        while vlan == 0
            && TAGS
                .iter()
                .any(|tag| frame.get(at..at + 2) == Some(&tag[..]))
        {
            let Some(&[high, low]) = frame.get(at + 2..at + 4) else {
                break;
            };
            vlan = u16::from_be_bytes([high, low]) & 0xfff;
            at += 4;
        }
        Some(Self {
            destination: Mac(*frame.first_chunk()?),
            source: Mac(*frame.get(6..)?.first_chunk()?),
            vlan,
        })
    }
}

impl Mapping {
    /// The table with these rows, of which there is one at least; or what is wrong with them.
    pub fn new(rows: Vec<Row>) -> Result<Self, String> {
        if rows.is_empty() || rows.len() > MAX_FUNCTIONS {
            return Err(format!("an adapter has 1 to {MAX_FUNCTIONS} functions"));
        }
        for (number, row) in rows.iter().enumerate() {
            if rows[..number].iter().any(|other| other.mac == row.mac) {
                return Err(format!("two functions have the address {}", row.mac));
            }
        }
        Ok(Self { rows })
    }

    /// All rows, by the number of the function.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Whether there is one function alone, behind which the port is as a cable is.
    pub fn is_alone(&self) -> bool {
        self.rows.len() == 1
    }

    /// The other function that has this address.
    #[inline]
    pub fn other(&self, function: usize, address: &[u8; 6]) -> Option<usize> {
        let found = self.rows.iter().position(|row| row.mac.0 == *address);
        found.filter(|other| *other != function)
    }

    /// The host side: where a frame goes that a function sends.
    pub fn from_function(&self, function: usize, frame: &[u8]) -> Result<Targets, Refusal> {
        let fields = Fields::of(frame).ok_or(Refusal::Kind)?;
        let row = self.rows.get(function).ok_or(Refusal::Kind)?;
        if is_message(frame) {
            return Err(Refusal::Kind);
        }
        let others = self.other(function, &fields.source.0).is_some();
        if fields.source != row.mac && (!row.any_source || others) {
            return Err(Refusal::Source);
        }
        if !row.vlans.has(fields.vlan) {
            return Err(Refusal::Vlan);
        }
        Ok(self.targets(&fields, Some(function)))
    }

    /// The wire side: where a frame goes that came by the uplink.
    pub fn from_wire(&self, frame: &[u8]) -> Result<Targets, Refusal> {
        let fields = Fields::of(frame).ok_or(Refusal::Kind)?;
        let mut rows = self.rows.iter();
        // Of one that may show up elsewhere it may be true.
        if rows.any(|row| row.mac == fields.source && !row.any_source) {
            return Err(Refusal::Source);
        }
        Ok(self.targets(&fields, None))
    }

    fn targets(&self, fields: &Fields, from: Option<usize>) -> Targets {
        let group = fields.destination.is_group();
        let known = self
            .rows
            .iter()
            .position(|row| row.mac == fields.destination);
        let mut functions = 0;
        for (number, row) in self.rows.iter().enumerate() {
            let wanted = group || known.map_or(row.any_source, |known| known == number);
            if wanted && Some(number) != from && row.vlans.has(fields.vlan) {
                functions |= 1 << number;
            }
        }
        Targets {
            functions,
            wire: from.is_some() && known.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(number: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0xfe, 0, number])
    }

    fn row(number: u8) -> Row {
        Row {
            mac: mac(number),
            any_source: false,
            vlans: Vlans::all(),
        }
    }

    /// Functions 0 to 3: an ordinary one, one of VLAN 7 alone, one of frames without a tag, and one
    /// with a bridge behind it.
    fn table() -> Mapping {
        let rows = vec![
            row(0),
            Row {
                vlans: Vlans::only([7]),
                ..row(1)
            },
            Row {
                vlans: Vlans::only([0]),
                ..row(2)
            },
            Row {
                any_source: true,
                ..row(3)
            },
        ];
        Mapping::new(rows).unwrap()
    }

    fn frame(to: Mac, from: Mac, vlan: Option<u16>) -> Vec<u8> {
        let mut frame = [to.0, from.0].concat();
        if let Some(vlan) = vlan {
            frame.extend([0x81, 0]);
            // The priority is no part of it.
            frame.extend((0xe000 | vlan).to_be_bytes());
        }
        frame.extend([8, 0]);
        frame.resize(60, 0);
        frame
    }

    const ALL: Mac = Mac([0xff; 6]);
    const STRANGER: Mac = Mac([2, 0, 0, 0, 0, 9]);

    fn sent(function: usize, frame: &[u8]) -> Result<(Vec<usize>, bool), Refusal> {
        let targets = table().from_function(function, frame)?;
        Ok((targets.functions().collect(), targets.wire))
    }

    fn came(frame: &[u8]) -> Result<Vec<usize>, Refusal> {
        let targets = table().from_wire(frame)?;
        assert!(!targets.wire, "back to where it came from");
        Ok(targets.functions().collect())
    }

    #[test]
    fn what_a_function_sends_goes_where_the_table_says() {
        let send = |from: u8, to, vlan| sent(from.into(), &frame(to, mac(from), vlan));
        assert_eq!(send(0, mac(3), None), Ok((vec![3], false)));
        assert_eq!(send(0, ALL, None), Ok((vec![2, 3], true)));
        assert_eq!(send(0, ALL, Some(7)), Ok((vec![1, 3], true)));
        assert_eq!(send(3, ALL, Some(0)), Ok((vec![0, 2], true)));
        // To one that is not in that VLAN, and to itself.
        assert_eq!(send(0, mac(1), None), Ok((vec![], false)));
        assert_eq!(send(0, mac(0), None), Ok((vec![], false)));
        assert_eq!(send(0, STRANGER, None), Ok((vec![3], true)));
        assert_eq!(send(3, STRANGER, None), Ok((vec![], true)));
    }

    #[test]
    fn nobody_sends_as_another_or_in_a_vlan_that_is_not_its() {
        let send = |from: usize, source, vlan| sent(from, &frame(ALL, source, vlan));
        for source in [mac(1), STRANGER, ALL] {
            assert_eq!(send(0, source, None), Err(Refusal::Source));
        }
        // One with a bridge may, but not as another function.
        assert!(send(3, STRANGER, None).is_ok());
        assert_eq!(send(3, mac(0), None), Err(Refusal::Source));
        assert_eq!(send(1, mac(1), None), Err(Refusal::Vlan));
        assert_eq!(send(2, mac(2), Some(7)), Err(Refusal::Vlan));
        assert_eq!(sent(0, &[0; 11]), Err(Refusal::Kind));
        let message = ferrite_fabric::shortcut::Message::Revoke(1).to_frame(mac(0));
        assert_eq!(sent(0, &message), Err(Refusal::Kind));
    }

    #[test]
    fn a_tag_of_priority_hides_no_vlan() {
        let tagged = |tags: &[u16]| {
            let mut frame = frame(ALL, mac(2), None);
            for (place, tag) in tags.iter().enumerate() {
                let tag = [0x81, 0, (tag >> 8) as u8, *tag as u8];
                frame.splice(12 + 4 * place..12 + 4 * place, tag);
            }
            frame
        };
        assert_eq!(sent(2, &tagged(&[0xe000])), Ok((vec![0, 3], true)));
        for tags in [&[7][..], &[0, 7], &[0xe000, 0, 7]] {
            assert_eq!(sent(2, &tagged(tags)), Err(Refusal::Vlan), "{tags:x?}");
        }
        assert_eq!(came(&tagged(&[0, 7])), Err(Refusal::Source));
        let mut cut = tagged(&[0]);
        cut.truncate(14);
        assert_eq!(sent(2, &cut), Ok((vec![0, 3], true)));
    }

    #[test]
    fn what_comes_by_the_wire_goes_where_the_table_says() {
        let come = |to, vlan| came(&frame(to, STRANGER, vlan));
        assert_eq!(come(mac(0), None), Ok(vec![0]));
        assert_eq!(come(mac(1), None), Ok(vec![]));
        assert_eq!(come(mac(1), Some(7)), Ok(vec![1]));
        assert_eq!(come(ALL, None), Ok(vec![0, 2, 3]));
        assert_eq!(come(ALL, Some(7)), Ok(vec![0, 1, 3]));
        assert_eq!(come(STRANGER, None), Ok(vec![3]));
        assert_eq!(came(&frame(ALL, mac(1), Some(7))), Err(Refusal::Source));
        assert!(came(&frame(ALL, mac(3), None)).is_ok());
        assert_eq!(came(&[0; 3]), Err(Refusal::Kind));
    }

    #[test]
    fn no_two_functions_have_one_address() {
        assert!(Mapping::new(vec![row(1), row(2), row(1)]).is_err());
        assert!(Mapping::new(vec![]).is_err());
        let many = |count: u8| Mapping::new((0..count).map(row).collect());
        assert!(many(MAX_FUNCTIONS as u8).is_ok());
        assert!(many(MAX_FUNCTIONS as u8 + 1).is_err());
    }
}
