// SPDX-License-Identifier: GPL-2.0

//! Memory windows (MW). They are bound and unbound by work requests of processes, and have an rkey only.

use crate::{
    abi,
    abi::TagKind,
    commands::DeviceObject,
    device::Ferrite,
    kernel_ext::errno,
    rdma::{
        kind,
        Mw,
        MwOps,
        New,
        Pd,
        Udata, //
    },
    tpt::{
        self,
        TakenTag, //
    },
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full, //
        },
        Mutex, //
    },
};

/// The driver's data of a memory window.
///
/// The fields are dropped in order: the device is told to let go of the tag before it can be used again.
pub(crate) struct FerriteMw {
    object: DeviceObject,
    tag: TakenTag,
}

/// The memory windows of a protection domain, any of which may be bound to a region of it.
#[pin_data]
pub(crate) struct Windows {
    /// Held while the device is told of one, and while it is told of the end of a region because there is none.
    #[pin]
    telling: Mutex<()>,
    /// Windows that the device may know.
    now: Atomic<u32>,
    /// Windows that it was ever told of, free-running.
    made: Atomic<u32>,
}

/// What [`Windows`] there were at some time.
#[derive(Clone, Copy)]
pub(crate) struct WindowsSeen {
    now: u32,
    made: u32,
}

impl Windows {
    /// None yet.
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            telling <- new_mutex!((), "ferrite_windows"),
            now: Atomic::new(0),
            made: Atomic::new(0),
        })
    }

    /// Calls `tell`, which gives the device a command, if there is no window that the device could know before
    /// that command; returns whether it did. The device does what is on tags in the order of the commands. Sleeps.
    pub(crate) fn if_none(&self, tell: impl FnOnce()) -> bool {
        let _telling = self.telling.lock();
        let is_none = self.now.load(Acquire) == 0;
        if is_none {
            tell();
        }
        is_none
    }

    /// The device is about to be told of one.
    fn add(&self) {
        self.made.fetch_add(1, Full);
        self.now.fetch_add(1, Full);
    }

    /// The device has let go of one.
    fn remove(&self) {
        self.now.fetch_sub(1, Full);
    }

    /// What there is now.
    pub(crate) fn look(&self) -> WindowsSeen {
        // In this order: a window that is made in between is counted at least once.
        let made = self.made.load(Acquire);
        let now = self.now.load(Acquire);
        WindowsSeen { now, made }
    }

    /// Whether there was a window at any time since `seen`.
    pub(crate) fn any_since(&self, seen: WindowsSeen) -> bool {
        seen.now != 0 || self.made.load(Acquire) != seen.made
    }
}

impl FerriteMw {
    fn create_counted<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mw, Ferrite>,
        kind: TagKind,
    ) -> Result<&'a Mw<Ferrite>> {
        let allocated = tpt::allocate(pd, kind, 0)?;
        new.set_rkey(allocated.tag.get().0);
        new.init(Ok::<_, Error>(Self {
            object: allocated.object,
            tag: allocated.tag,
        }))
    }
}

impl MwOps for Ferrite {
    type Mw = FerriteMw;

    /// Makes a window that is bound to nothing.
    fn alloc_mw<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mw, Self>,
        type2: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mw<Self>> {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        let dev = pd.device();
        if !dev.has(abi::FEATURE_WINDOWS) {
            return Err(errno::eopnotsupp());
        }
        let kind = if type2 {
            TagKind::Window2B
        } else {
            TagKind::Window1
        };
        let _telling = pd.windows.telling.lock();
        // Before the device knows it: a process guesses the key, and binds it at once.
        pd.windows.add();
        let made = FerriteMw::create_counted(pd, new, kind);
        if made.is_err() {
            pd.windows.remove();
        }
        made
    }

    /// Ends a window: afterwards its keys are refused.
    fn dealloc_mw(mw: &Mw<Self>) -> Result {
        mw.object.release();
        mw.pd().windows.remove();
        // Each bind gave it another instance.
        mw.tag.note_farthest();
        Ok(())
    }
}

#[kunit_tests(ferrite_mw)]
mod tests {
    use super::*;
    use core::cell::Cell;
    use pin_init::stack_pin_init;

    #[test]
    fn a_window_that_came_and_went_meanwhile_counts() {
        stack_pin_init!(let windows = Windows::new());
        let none = windows.look();
        assert!(!windows.any_since(none));
        windows.add();
        assert!(windows.any_since(none));
        let one = windows.look();
        windows.remove();
        assert!(windows.any_since(none));
        assert!(windows.any_since(one));
        // By now there is none, and none comes.
        assert!(!windows.any_since(windows.look()));
    }

    #[test]
    fn a_region_ends_at_once_where_there_is_no_window() {
        stack_pin_init!(let windows = Windows::new());
        let told = Cell::new(0);
        let tell = || told.set(told.get() + 1);
        assert!(windows.if_none(tell));
        windows.add();
        assert!(!windows.if_none(tell));
        windows.remove();
        assert!(windows.if_none(tell));
        assert_eq!(told.get(), 2);
    }
}
