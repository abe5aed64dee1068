// SPDX-License-Identifier: GPL-2.0

//! User contexts: each has a doorbell page of its own.

use crate::{
    abi,
    abi::{
        ClockReading,
        UverbsContextRequest,
        UverbsContextResponse, //
    },
    bindings, caps,
    cq::{
        MoveCq,
        QueryCq, //
    },
    device::Ferrite,
    dm::{
        DmPages,
        QueryDm, //
    },
    dma_types::Nothing,
    doorbell_pages::DoorbellPage,
    kernel_ext::{
        errno,
        io::bar_range, //
    },
    mr::UserState,
    named::Names,
    pd::QueryPd,
    priority::{
        ModifyVector,
        QueryVector, //
    },
    rdma::{
        kind,
        Caching,
        Device,
        IoRange,
        MethodDef,
        New,
        Out,
        OutStruct,
        QueryContextOps,
        Ucontext,
        Udata,
        UserOps, //
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

/// What a process may ask about its context: what its maker was told, and the time of the device's
/// clock, however long that takes or only where the device can be asked at once.
pub(crate) type QueryAttributes<'a> = (
    OutStruct<'a, UverbsContextResponse, { abi::UVERBS_CONTEXT_QUERY_RESPONSE }>,
    Option<Out<'a, u64, { abi::UVERBS_CONTEXT_QUERY_CLOCK }>>,
    Option<Out<'a, u64, { abi::UVERBS_CONTEXT_QUERY_CLOCK_NOW }>>,
);

// The numbers of what a driver adds begin there. The header for processes has them as they are.
static_assert!(abi::UVERBS_CONTEXT_QUERY_RESPONSE == 1 << bindings::UVERBS_ID_NS_SHIFT);

/// What a process may have of the doorbell BAR.
pub(crate) enum Part<'a> {
    /// The doorbells of its queues.
    Doorbells(&'a DoorbellPage),
    /// Memory of the device.
    Memory(&'a DmPages),
}

impl Part<'_> {
    /// Where it is, to be mapped by a process: whole pages.
    pub(crate) fn range<'a>(&self, dev: &'a Device<Ferrite>) -> Result<IoRange<'a, Ferrite>> {
        let (offset, length) = match self {
            Self::Doorbells(page) => (page.offset(), PAGE_SIZE),
            Self::Memory(pages) => (pages.bar_offset(), pages.length()),
        };
        let address = bar_range(dev.parent().try_into()?, abi::BAR_DOORBELLS, offset, length)?;
        // SAFETY: The range is inside a BAR of the device, which is memory. It is a page of doorbells that is for
        // processes, or memory that lies apart from all doorbells; neither does anything to those who use other
        // pages.
        unsafe { IoRange::new(dev, address, length) }
    }
}

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
}

#[vtable]
impl UserOps for Ferrite {
    type Ucontext = FerriteUcontext;
    const METHODS: &'static [MethodDef<Self>] = &[
        MethodDef::new::<MoveCq>(),
        MethodDef::new::<QueryCq>(),
        MethodDef::new::<ModifyVector>(),
        MethodDef::new::<QueryVector>(),
        MethodDef::new::<QueryPd>(),
        MethodDef::new::<QueryDm>(),
    ];

    /// Makes a context for a provider that speaks our version.
    fn alloc_ucontext<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Ucontext, Self>,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Ucontext<Self>> {
        let request: UverbsContextRequest =
            udata.read(core::mem::size_of::<UverbsContextRequest>())?;
        if request.abi_version != abi::UVERBS_ABI_VERSION || request.reserved != 0 {
            return Err(EINVAL);
        }
        let page = dev.doorbell_pages.take()?;
        let ctx = new.init(Ok::<_, Error>(FerriteUcontext {
            page,
            mapping: Atomic::new(0),
            regions: Names::new()?,
        }))?;
        let range = Part::Doorbells(&ctx.page).range(dev)?;
        let mapping = ctx.map_range(range, Caching::Uncached)?;
        ctx.mapping.store(mapping, Relaxed);
        udata.respond(&FerriteUcontext::response(ctx))?;
        Ok(ctx)
    }
}

impl QueryContextOps for Ferrite {
    type QueryAttributes<'a> = QueryAttributes<'a>;

    /// Tells a process that shares the context what its maker was told: both use one doorbell page.
    /// Tells the device's time to those who ask for it.
    fn query_ucontext(
        ctx: &Ucontext<Self>,
        (response, clock, clock_now): Self::QueryAttributes<'_>,
    ) -> Result {
        response.write(&FerriteUcontext::response(ctx))?;
        let dev = ctx.device();
        if clock.is_none() && clock_now.is_none() {
            return Ok(());
        }
        if dev.caps.clock_khz == 0 {
            return Err(errno::eopnotsupp());
        }
        let ticks = |reading: ClockReading| reading.ticks & caps::clock_mask(&dev.caps);
        if let Some(clock) = clock {
            clock.write(&ticks(dev.hw.query(&Nothing)?))?;
        }
        if let Some(clock) = clock_now {
            clock.write(&ticks(dev.hw.query_now(&Nothing)?))?;
        }
        Ok(())
    }
}
