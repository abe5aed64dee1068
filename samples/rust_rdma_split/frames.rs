// SPDX-License-Identifier: GPL-2.0

//! What host and I/O unit have in common: frames between the network and a link.

use crate::link::{Frame, Gather};
use crate::net::{EthernetHeader, Skb, VLAN_TAG};
use kernel::prelude::*;

/// What an MTU does not count: the header of a frame, and the tag of a VLAN.
pub const OVERHEAD: u32 = (EthernetHeader::SIZE + VLAN_TAG) as u32;

/// The smallest MTU (`ETH_MIN_MTU`).
pub const MIN_MTU: u32 = 68;

/// The largest MTU.
pub const MAX_MTU: u32 = 9000;

impl Gather for Skb {
    fn len(&self) -> usize {
        Skb::len(self)
    }

    fn copy_to(&self, to: &mut [u8]) -> Result {
        Skb::copy_to(self, 0, to)
    }
}

/// Copies a frame that has arrived to a socket buffer that is empty: from then on nobody changes it.
pub fn copy_frame(frame: &Frame<'_>, mut skb: Skb) -> Result<Skb> {
    skb.append(frame.len(), |room| frame.copy_to(room))??;
    Ok(skb)
}
