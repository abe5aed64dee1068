// SPDX-License-Identifier: GPL-2.0

//! Domains of extended reliable connections (XRC). Their shared receive queues are made as others are.

use crate::{
    abi,
    device::Ferrite,
    kernel_ext::errno,
    numbers::Number,
    rdma::{
        kind,
        Device,
        New,
        Pd,
        Srq,
        SrqAttr,
        Udata,
        XrcOps,
        XrcSrq,
        Xrcd, //
    },
    shares::Holder,
    srq::FerriteSrq,
};
use kernel::prelude::*;

/// The driver's data of a domain of extended reliable connections (XRC).
pub(crate) struct FerriteXrcd {
    number: Number,
}

impl FerriteXrcd {
    /// Its number in the device.
    pub(crate) fn number(&self) -> u32 {
        self.number.get()
    }
}

impl XrcOps for Ferrite {
    type Xrcd = FerriteXrcd;

    fn alloc_xrcd<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Xrcd, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Xrcd<Self>> {
        if !dev.has(abi::FEATURE_XRC) {
            return Err(errno::eopnotsupp());
        }
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        let number = dev.xrcds.take(Holder::of(udata.is_some()))?;
        new.init(Ok::<_, Error>(FerriteXrcd { number }))
    }

    fn dealloc_xrcd(_xrcd: &Xrcd<Self>) -> Result {
        Ok(())
    }

    fn create_xrc_srq<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Srq, Self>,
        attr: &mut SrqAttr,
        xrc: &XrcSrq<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Srq<Self>> {
        FerriteSrq::create(pd, new, attr, Some(xrc), udata)
    }
}
