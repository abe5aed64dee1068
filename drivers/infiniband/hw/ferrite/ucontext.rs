// SPDX-License-Identifier: GPL-2.0

//! User contexts: each has a doorbell page of its own.

use crate::{
    abi,
    abi::{
        UverbsContextRequest,
        UverbsContextResponse, //
    },
    device::Ferrite,
    numbers::Number,
    rdma::{
        kind,
        Caching,
        Device,
        New,
        Ucontext,
        Udata, //
    },
};
use kernel::prelude::*;

/// The driver's data of a user context.
pub(crate) struct FerriteUcontext {
    page: Number,
}

impl FerriteUcontext {
    /// The doorbell page of its queues.
    pub(crate) fn doorbell_page(&self) -> u32 {
        self.page.get()
    }

    /// Makes a context for a provider that speaks our version.
    pub(crate) fn create<'a>(
        dev: &Device<Ferrite>,
        new: New<'a, kind::Ucontext, Ferrite>,
        udata: &Udata<'_, Ferrite>,
    ) -> Result<&'a Ucontext<Ferrite>> {
        let request: UverbsContextRequest =
            udata.read(core::mem::size_of::<UverbsContextRequest>())?;
        if request.abi_version != abi::UVERBS_ABI_VERSION || request.reserved != 0 {
            return Err(EINVAL);
        }
        let page = dev.doorbell_pages.take()?;
        let size = abi::DOORBELL_PAGE_SIZE;
        let offset = u64::from(page.get()) * size as u64;
        let ctx = new.init(Ok::<_, Error>(Self { page }))?;
        let doorbell_offset = ctx.map_bar(abi::BAR_DOORBELLS, offset, size, Caching::Uncached)?;
        udata.respond(&UverbsContextResponse {
            doorbell_offset,
            doorbell_size: size as u32,
            max_sge: dev.caps.max_sge.into(),
            max_inline: dev.caps.max_inline,
            sq_max_log_blocks: dev.caps.sq_max_log_blocks,
            rq_max_log_entries: dev.caps.rq_max_log_entries,
            cq_max_log_entries: dev.caps.cq_max_log_entries,
            reserved0: 0,
            features: dev.identity.features & dev.caps.features,
            clock_khz: dev.caps.clock_khz,
            reserved1: 0,
            reserved2: [0; 3],
        })?;
        Ok(ctx)
    }
}
