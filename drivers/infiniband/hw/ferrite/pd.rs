// SPDX-License-Identifier: GPL-2.0

//! Protection domains (PD): numbers, of which the device knows no more.

use crate::{
    abi,
    device::Ferrite,
    mr::UserState,
    mw::Windows,
    named::Names,
    numbers::Number,
    rdma::{
        kind,
        Device,
        Handle,
        Method,
        New,
        Pd,
        PdOps,
        Ucontext,
        Udata, //
    },
    shares::Holder, //
};
use kernel::{
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    },
};

/// The driver's data of a protection domain.
#[pin_data]
pub(crate) struct FerritePd {
    number: Number,
    #[pin]
    pub(crate) windows: Windows,
    /// The regions of the user context that it is of, if it is of one.
    pub(crate) regions: Option<Arc<Names<Mutex<UserState>>>>,
}

impl FerritePd {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }

    /// Whose what is made in it now is.
    pub(crate) fn holder(&self) -> Holder {
        Holder::of(self.regions.is_some())
    }
}

impl PdOps for Ferrite {
    type Pd = FerritePd;

    fn alloc_pd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Pd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Pd<Self>> {
        let number = dev.pds.take(Holder::of(udata.is_some()))?;
        let response = abi::UverbsPdResponse {
            pdn: number.get(),
            reserved: 0,
        };
        let regions = udata
            .and_then(Udata::context)
            .map(|context| context.regions.clone());
        let pd = new.init(try_pin_init!(FerritePd {
            number,
            windows <- Windows::new(),
            regions,
        }? Error))?;
        if let Some(udata) = udata {
            udata.expect_empty()?;
            udata.respond(&response)?;
        }
        Ok(pd)
    }

    fn dealloc_pd(_pd: &Pd<Self>) -> Result {
        Ok(())
    }
}

/// A process that shares the context of another finds out whether there is a protection domain: its
/// handle is looked up before, and that is all there is to it.
pub(crate) struct QueryPd;

impl Method<Ferrite> for QueryPd {
    type Kind = kind::Pd;
    const ID: u32 = abi::UVERBS_PD_QUERY;
    type Attributes<'a> = (Handle<'a, kind::Pd, Ferrite, { abi::UVERBS_PD_QUERY_HANDLE }>,);

    fn call(_: &Ucontext<Ferrite>, _: Self::Attributes<'_>) -> Result {
        Ok(())
    }
}
