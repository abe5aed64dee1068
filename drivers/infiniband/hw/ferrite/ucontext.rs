// SPDX-License-Identifier: GPL-2.0

//! User contexts: each has a doorbell page of its own.

use crate::{
    abi,
    abi::{
        ClockReading,
        UverbsContextRequest,
        UverbsContextResponse, //
    },
    caps,
    device::Ferrite,
    dma_types::Nothing,
    doorbell_pages::DoorbellPage,
    kernel_ext::errno,
    mr::UserState,
    named::Names,
    rdma::{
        kind,
        Caching,
        ClockQuery,
        ContextResponse,
        Device,
        New,
        Ucontext,
        Udata, //
    },
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex, //
    },
};

// The numbers that providers use are those of the abstractions.
const _: () = {
    use crate::bindings as raw;
    assert!(raw::RDMA_CONTEXT_ATTR_RESPONSE == abi::UVERBS_CONTEXT_QUERY_RESPONSE);
    assert!(raw::RDMA_CONTEXT_ATTR_CLOCK == abi::UVERBS_CONTEXT_QUERY_CLOCK);
    assert!(raw::RDMA_CONTEXT_ATTR_CLOCK_NOW == abi::UVERBS_CONTEXT_QUERY_CLOCK_NOW);
    assert!(raw::RDMA_METHOD_PD_QUERY == abi::UVERBS_PD_QUERY);
    assert!(raw::RDMA_PD_QUERY_ATTR_HANDLE == abi::UVERBS_PD_QUERY_HANDLE);
    assert!(raw::RDMA_DM_ATTR_OFFSET == abi::UVERBS_DM_ALLOC_OFFSET);
    assert!(raw::RDMA_METHOD_DM_QUERY == abi::UVERBS_DM_QUERY);
    assert!(raw::RDMA_DM_QUERY_ATTR_HANDLE == abi::UVERBS_DM_QUERY_HANDLE);
    assert!(raw::RDMA_DM_QUERY_ATTR_OFFSET == abi::UVERBS_DM_QUERY_OFFSET);
    assert!(raw::RDMA_DM_QUERY_ATTR_LENGTH == abi::UVERBS_DM_QUERY_LENGTH);
};

/// The driver's data of a user context.
pub(crate) struct FerriteUcontext {
    page: DoorbellPage,
    /// Offset to map the doorbell page by.
    mapping: Atomic<u64>,
    /// Its regions of pinned memory, by tag.
    pub(crate) regions: Arc<Names<Mutex<UserState>>>,
}

impl FerriteUcontext {
    /// The doorbell page of its queues.
    pub(crate) fn doorbell_page(&self) -> u32 {
        self.page.number()
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
        let offset = page.offset();
        let ctx = new.init(Ok::<_, Error>(Self {
            page,
            mapping: Atomic::new(0),
            regions: Names::new()?,
        }))?;
        let mapping = ctx.map_bar(abi::BAR_DOORBELLS, offset, PAGE_SIZE, Caching::Uncached)?;
        ctx.mapping.store(mapping, Relaxed);
        udata.respond(&Self::response(ctx))?;
        Ok(ctx)
    }

    /// What a process has to know of its context.
    fn response(ctx: &Ucontext<Ferrite>) -> UverbsContextResponse {
        let dev = ctx.device();
        UverbsContextResponse {
            doorbell_offset: ctx.mapping.load(Relaxed),
            // A page of the host, at the start of which the doorbells are.
            doorbell_size: PAGE_SIZE as u32,
            max_sge: dev.caps.max_sge.into(),
            max_inline: dev.caps.max_inline,
            sq_max_log_blocks: dev.caps.sq_max_log_blocks,
            rq_max_log_entries: dev.caps.rq_max_log_entries,
            cq_max_log_entries: dev.caps.cq_max_log_entries,
            clock_bits: dev.caps.clock_bits,
            features: dev.identity.features & dev.caps.features,
            clock_khz: dev.caps.clock_khz,
            // No more than that, as the capabilities are within bounds.
            max_message: u32::try_from(dev.caps.max_message).unwrap_or(abi::MAX_MESSAGE),
            reserved: [0; 3],
        }
    }

    /// Tells a process that shares the context what its maker was told: both use one doorbell page.
    /// Tells the device's time to those who ask for it.
    pub(crate) fn query(ctx: &Ucontext<Ferrite>, response: &ContextResponse<'_>) -> Result {
        response.respond(&Self::response(ctx))?;
        let dev = ctx.device();
        for way in [ClockQuery::Patient, ClockQuery::Now] {
            if !response.wants_clock(way) {
                continue;
            }
            if dev.caps.clock_khz == 0 {
                return Err(errno::eopnotsupp());
            }
            let reading: ClockReading = match way {
                ClockQuery::Patient => dev.hw.query(&Nothing)?,
                ClockQuery::Now => dev.hw.query_now(&Nothing)?,
            };
            response.respond_clock(way, reading.ticks & caps::clock_mask(&dev.caps))?;
        }
        Ok(())
    }
}
