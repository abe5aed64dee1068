// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Multicast groups: which datagram queue pairs get what is sent to a group.

use crate::qp::QueuePairs;
use crate::roce::ipv4_of_gid;
use ferrite_abi::{CommandStatus, MulticastMember, Service};
use std::collections::HashMap;

/// Groups, and queue pairs in one.
pub const MAX_MULTICAST: usize = 256;

/// The queue pair number that multicast packets are addressed to.
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// Whether a GID is the address of a group.
pub fn is_multicast(gid: &[u8; 16]) -> bool {
    match ipv4_of_gid(gid) {
        Some([first, ..]) => first & 0xf0 == 0xe0,
        None => gid[0] == 0xff,
    }
}

/// All groups that have members.
#[derive(Debug, Default)]
pub struct Groups {
    members: HashMap<[u8; 16], Vec<u32>>,
}

impl Groups {
    /// True when there is no group.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The members of a group, in the order they joined.
    pub fn members(&self, gid: &[u8; 16]) -> &[u32] {
        self.members.get(gid).map_or(&[], Vec::as_slice)
    }

    /// Carries out `AttachMulticast`.
    pub(crate) fn attach(
        &mut self,
        qps: &QueuePairs,
        command: &MulticastMember,
    ) -> Result<(), CommandStatus> {
        if !is_multicast(&command.gid) {
            return Err(CommandStatus::BadParameter);
        }
        let qp = qps.find(command.qpn)?;
        if qp.service != Service::Ud {
            return Err(CommandStatus::BadParameter);
        }
        let members = self.members(&command.gid);
        if members.contains(&command.qpn) {
            return Err(CommandStatus::Exists);
        }
        if members.len() >= MAX_MULTICAST
            || (members.is_empty() && self.members.len() >= MAX_MULTICAST)
        {
            return Err(CommandStatus::NoResource);
        }
        self.members
            .entry(command.gid)
            .or_default()
            .push(command.qpn);
        Ok(())
    }

    /// Carries out `DetachMulticast`.
    pub(crate) fn detach(
        &mut self,
        qps: &QueuePairs,
        command: &MulticastMember,
    ) -> Result<(), CommandStatus> {
        qps.check(command.qpn)?;
        let members = self
            .members
            .get_mut(&command.gid)
            .ok_or(CommandStatus::NotFound)?;
        let at = members
            .iter()
            .position(|&qpn| qpn == command.qpn)
            .ok_or(CommandStatus::NotFound)?;
        members.remove(at);
        if members.is_empty() {
            self.members.remove(&command.gid);
        }
        Ok(())
    }

    /// Takes a queue pair out of all groups. Returns how many members were looked at.
    pub(crate) fn forget(&mut self, qpn: u32) -> usize {
        let mut looked_at = 0;
        self.members.retain(|_, members| {
            looked_at += members.len();
            members.retain(|&member| member != qpn);
            !members.is_empty()
        });
        looked_at
    }
}
