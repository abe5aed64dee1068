// SPDX-License-Identifier: GPL-2.0

//! What a side of a connection says when it connects.

use crate::bindings;
use kernel::prelude::*;

/// The most bytes of private data that a request has room for.
pub const REQUEST_DATA_MAX: usize = 56;

/// What both sides of a connection can say about it.
#[derive(Clone, Copy, Debug)]
pub struct Parameters<'a> {
    /// For the peer. The core adds zeros.
    pub private_data: &'a [u8],
    /// RDMA reads of the peer that may be under way.
    pub responder_resources: u8,
    /// RDMA reads of this side that may be under way.
    pub initiator_depth: u8,
}

/// Numbers of RDMA reads that a peer has asked for, as they are for this side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reads {
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
}

impl Parameters<'_> {
    /// The same, with no more reads than a peer can have under way that has asked for so many.
    pub(super) fn within(&self, offered: Option<Reads>) -> Self {
        let Some(offered) = offered else {
            return *self;
        };
        Self {
            responder_resources: self.responder_resources.min(offered.responder_resources),
            initiator_depth: self.initiator_depth.min(offered.initiator_depth),
            ..*self
        }
    }

    /// With up to 7 retries of what is not acknowledged, and as many as it takes where the peer has no receive posted.
    pub(super) fn raw(&self) -> Result<bindings::rdma_conn_param> {
        let mut raw: bindings::rdma_conn_param = pin_init::zeroed();
        raw.private_data = self.private_data.as_ptr().cast();
        raw.private_data_len = u8::try_from(self.private_data.len()).map_err(|_| EINVAL)?;
        raw.responder_resources = self.responder_resources;
        raw.initiator_depth = self.initiator_depth;
        raw.flow_control = 1;
        raw.retry_count = 7;
        raw.rnr_retry_count = 7;
        Ok(raw)
    }
}

#[cfg(not(rdma_cm_no_tests))]
#[kunit_tests(rust_rdma_cm_parameters)]
mod tests {
    use super::*;

    #[test]
    fn no_more_reads_are_accepted_than_were_asked_for() {
        let own = Parameters {
            private_data: b"x",
            responder_resources: 8,
            initiator_depth: 8,
        };
        let numbers = |offered| {
            let within = own.within(offered);
            (within.responder_resources, within.initiator_depth)
        };
        assert_eq!(numbers(None), (8, 8));
        for (responder_resources, initiator_depth) in [(1, 16), (16, 1), (0, 0)] {
            let offered = Reads {
                responder_resources,
                initiator_depth,
            };
            let expected = (responder_resources.min(8), initiator_depth.min(8));
            assert_eq!(numbers(Some(offered)), expected);
        }
    }
}
