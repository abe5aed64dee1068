// SPDX-License-Identifier: GPL-2.0

//! Memory windows. They are bound and unbound by work requests of processes.

use crate::{
    abi,
    abi::{
        AllocateTag,
        CommandOpcode,
        Tag,
        TagKind, //
    },
    device::Ferrite,
    hardware::DeviceObject,
    kernel_ext::errno,
    rdma::{
        kind,
        Mw,
        New,
        Pd, //
    },
    tpt::TakenTag,
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed, //
};

/// The driver's data of a memory window.
///
/// The fields are dropped in order: the device lets go of the tag before it can be used again.
pub(crate) struct FerriteMw {
    object: DeviceObject,
    tag: TakenTag,
}

impl FerriteMw {
    /// Makes a window that is bound to nothing.
    pub(crate) fn create<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mw, Ferrite>,
        type2: bool,
    ) -> Result<&'a Mw<Ferrite>> {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_WINDOWS) {
            return Err(errno::eopnotsupp());
        }
        let taken = dev.tags.take()?;
        let tag = taken.get().0;
        let kind = if type2 {
            TagKind::Window2
        } else {
            TagKind::Window1
        };
        let object = DeviceObject::create(
            &dev.hw,
            &AllocateTag {
                tag,
                pd: pd.number(),
                kind: kind.number(),
                reserved: [0; 3],
                max_pages: 0,
            },
            CommandOpcode::ReleaseTag,
            tag,
        )?;
        new.set_rkey(tag);
        let mw = new.init(Ok::<_, Error>(Self { object, tag: taken }))?;
        pd.windows.fetch_add(1, Relaxed);
        Ok(mw)
    }

    /// Ends a window: afterwards its keys are refused.
    pub(crate) fn destroy(mw: &Mw<Ferrite>) {
        mw.object.destroy();
        mw.pd().windows.fetch_sub(1, Relaxed);
        // Each bind gave it another instance, of which the kernel does not know: the farthest one
        // is the one that stays refused longest.
        let first = mw.tag.get();
        mw.tag
            .note_latest(Tag::new(first.index(), first.instance().wrapping_add(128)));
    }
}
