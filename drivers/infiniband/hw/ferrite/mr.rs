// SPDX-License-Identifier: GPL-2.0

//! Memory regions, and the memory of processes that rings and regions lie in.

mod frwr;
mod pinned;
mod request;
mod rights;

use self::{
    frwr::FrwrPages,
    pinned::shape,
    request::{
        device_address,
        Wanted, //
    },
    rights::{
        device_access,
        region_rights, //
    }, //
};
pub(crate) use self::{
    pinned::PinnedMemory,
    request::UserState,
    rights::{
        device_rights,
        effective, //
    }, //
};
use crate::{
    abi,
    abi::{
        Buffer,
        RegisterRegion,
        Tag,
        TagKind, //
    },
    commands::{
        DeviceObject,
        Making, //
    },
    device::Ferrite,
    dm::DmPages,
    extension,
    kernel_ext::errno,
    named::Named,
    odp::OnDemand,
    rdma::{
        kind,
        Access,
        Counts,
        Details,
        Device,
        Dm,
        DmRegion,
        DmabufRegion,
        Mr,
        MrOps,
        New,
        Pd,
        RegionChange,
        Udata,
        UserRegion, //
    },
    tpt,
    tpt::TakenTag, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// Pins what a region is to be of.
fn pin_region(dev: &Device<Ferrite>, region: &UserRegion) -> Result<PinnedMemory> {
    if region.length > dev.caps.max_region {
        return Err(EINVAL);
    }
    PinnedMemory::pin(dev, region.start, region.length, region.iova, region.access)
}

/// Where the memory of a region is.
enum RegionMemory {
    /// All of host memory, by DMA address.
    All,
    /// Pinned memory of a process.
    User {
        state: Arc<Mutex<UserState>>,
        /// So that others of the same memory can be made.
        _named: Option<Named<Mutex<UserState>>>,
    },
    /// Whatever the last registration by work request (FRWR) said.
    Frwr(FrwrPages),
    /// Memory of a process whose pages come and go.
    OnDemand(OnDemand),
    /// Memory of the device.
    Device {
        _pages: Arc<DmPages>,
        access: Access,
    },
    /// Pieces of other regions of a process, whichever the last registration by work request said. The
    /// device knows what they are, and looks at them each time.
    List { most: u32 },
}

impl RegionMemory {
    /// Whether windows may be bound to the region. The device refuses that for one without the right to it,
    /// and to take the right from one that has windows.
    fn takes_windows(&self) -> bool {
        match self {
            Self::User { state, .. } => state.lock().access.contains(Access::MW_BIND),
            Self::Device { access, .. } => access.contains(Access::MW_BIND),
            Self::OnDemand(_) => true,
            // Those of the kernel are in its own domains, where nobody makes windows; none is bound to a list.
            Self::All | Self::Frwr(_) | Self::List { .. } => false,
        }
    }

    /// Whether somebody may stand still for the region, whom only the device can tell that it has ended.
    fn is_waited_for(&self) -> bool {
        matches!(self, Self::OnDemand(_))
    }
}

/// The driver's data of a memory region.
///
/// The fields are dropped in order: the device uses the tag no more, then the memory is given back,
/// then the tag.
pub(crate) struct FerriteMr {
    object: Option<DeviceObject>,
    memory: RegionMemory,
    tag: Option<TakenTag>,
}

impl FerriteMr {
    /// Registers the pinned memory of another region of the same user context, as another region that goes on when that
    /// one ends: pages and tables are given back with the last.
    fn register_shared<'a>(
        pd: &Pd<Ferrite>,
        new: New<'a, kind::Mr, Ferrite>,
        region: &UserRegion,
        key: u32,
    ) -> Result<&'a Mr<Ferrite>> {
        device_access(region.access, pd.device().features())?;
        let other = pd.regions.as_ref().and_then(|regions| regions.get(key));
        let other = other.ok_or(EINVAL)?;
        let state = other.lock().share(pd.number(), region)?;
        Self::register_state(pd, new, state)
    }

    fn register_memory<'a>(
        pd: &Pd<Ferrite>,
        new: New<'a, kind::Mr, Ferrite>,
        region: &UserRegion,
    ) -> Result<&'a Mr<Ferrite>> {
        if region.access.contains(Access::ON_DEMAND) {
            return Self::register_on_demand(pd, new, region);
        }
        // Before anything is pinned.
        device_access(region.access, pd.device().features())?;
        let state = UserState {
            memory: Arc::new(pin_region(pd.device(), region)?, GFP_KERNEL_ACCOUNT)?,
            pd: pd.number(),
            access: region.access,
            iova: region.iova,
        };
        Self::register_state(pd, new, state)
    }

    /// Makes a region of what was pinned.
    fn register_state<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mr, Ferrite>,
        state: UserState,
    ) -> Result<&'a Mr<Ferrite>> {
        let dev = pd.device();
        let taken = dev.tags.take(pd.holder())?;
        let tag = taken.get();
        let command = state.command(tag.0, 0, dev.features())?;
        // First, so that it goes last where something fails: the device is told of the memory below.
        let state = Arc::pin_init(new_mutex!(state, "ferrite_mr"), GFP_KERNEL_ACCOUNT)?;
        let named = match &pd.regions {
            Some(regions) => Some(regions.add(tag.0, state.clone())?),
            None => None,
        };
        // Nothing fails from here on. A window may be bound to the region as soon as the device knows it, by who
        // guesses the key, and then it could not be ended any more.
        let object = tpt::make(dev, &command, tag)?;
        new.set_keys(tag.0, tag.0);
        new.init(Ok::<_, Error>(Self {
            object: Some(object),
            memory: RegionMemory::User {
                state,
                _named: named,
            },
            tag: Some(taken),
        }))
    }

    /// Registers memory of a process without pinning it.
    fn register_on_demand<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mr, Ferrite>,
        region: &UserRegion,
    ) -> Result<&'a Mr<Ferrite>> {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_ON_DEMAND) {
            return Err(errno::eopnotsupp());
        }
        let access = region_rights(region.access, dev.features())?;
        let taken = dev.tags.take(pd.holder())?;
        let tag = taken.get();
        let memory = OnDemand::new(dev, pd.number(), tag.0, region)?;
        let buffer = memory.buffer()?;
        let command = RegisterRegion {
            tag: tag.0,
            pd: pd.number(),
            access,
            flags: abi::REGION_ON_DEMAND,
            address: device_address(access, region.iova, buffer.length)?,
            buffer,
        };
        let room = dev.hw.regions.reserve(tag.index() as usize)?;
        // Nothing fails from here on, as in `register_state`.
        let object = tpt::make(dev, &command, tag)?;
        new.set_keys(tag.0, tag.0);
        let mr = new.init(Ok::<_, Error>(Self {
            object: Some(object),
            memory: RegionMemory::OnDemand(memory),
            tag: Some(taken),
        }))?;
        // Last: from now on its faults are dealt with.
        room.fill(mr.get_ref().ok_or(ENODEV)?);
        Ok(mr)
    }

    /// The on-demand memory of the region, if it is of such.
    pub(crate) fn on_demand(&self) -> Option<&OnDemand> {
        match &self.memory {
            RegionMemory::OnDemand(memory) => Some(memory),
            _ => None,
        }
    }

    /// Registers memory of the device.
    pub(crate) fn register_device_memory<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mr, Ferrite>,
        dm: &Dm<Ferrite>,
        region: &DmRegion,
    ) -> Result<&'a Mr<Ferrite>> {
        let dev = pd.device();
        let access = device_access(region.access, dev.features())?;
        let dm_pages = dm.dm_pages().clone();
        let taken = dev.tags.take(pd.holder())?;
        let tag = taken.get();
        let object = tpt::make(
            dev,
            &RegisterRegion {
                tag: tag.0,
                pd: pd.number(),
                access,
                flags: abi::REGION_DEVICE_MEMORY,
                // The core only lets regions be whose addresses count from zero.
                address: 0,
                buffer: Buffer::contiguous(dm_pages.offset() + region.offset, region.length),
            },
            tag,
        )?;
        new.set_keys(tag.0, tag.0);
        new.init(Ok::<_, Error>(Self {
            object: Some(object),
            memory: RegionMemory::Device {
                _pages: dm_pages,
                access: region.access,
            },
            tag: Some(taken),
        }))
    }

    /// Reserves a tag for what is registered by work request.
    fn allocate_tag<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mr, Ferrite>,
        kind: TagKind,
        most: u32,
        memory: RegionMemory,
    ) -> Result<&'a Mr<Ferrite>> {
        let allocated = tpt::allocate(pd, kind, most)?;
        let tag = allocated.tag.get();
        new.set_keys(tag.0, tag.0);
        new.init(Ok::<_, Error>(Self {
            object: Some(allocated.object),
            memory,
            tag: Some(allocated.tag),
        }))
    }
}

#[vtable]
impl MrOps for Ferrite {
    type Mr = FerriteMr;

    const REG_MR_OPCODES: &'static [u32] = &[extension::REGISTER_SEND_OPCODE];

    /// The region of all memory. It has no remote key: peers are not let in that way.
    fn get_dma_mr<'a>(
        pd: &Pd<Self>,
        mut new: New<'a, kind::Mr, Self>,
        access: Access,
    ) -> Result<&'a Mr<Self>> {
        if device_access(access, pd.device().features())? & abi::ACCESS_REMOTE != 0 {
            return Err(errno::eopnotsupp());
        }
        new.set_keys(abi::TAG_ALL_MEMORY, abi::TAG_ALL_MEMORY);
        new.init(Ok::<_, Error>(FerriteMr {
            object: None,
            memory: RegionMemory::All,
            tag: None,
        }))
    }

    /// Registers memory of a process, or makes a key for it.
    fn reg_user_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &UserRegion,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Mr<Self>> {
        let wanted = match udata {
            Some(udata) => Wanted::new(&udata.read(0)?, region, pd.device().features())?,
            None => Wanted::Region,
        };
        match wanted {
            Wanted::Region => FerriteMr::register_memory(pd, new, region),
            Wanted::List(pieces) => FerriteMr::allocate_list(pd, new, pieces),
            Wanted::Shared(key) => FerriteMr::register_shared(pd, new, region, key),
        }
    }

    /// Registers part of a DMA buffer.
    fn reg_user_mr_dmabuf<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        region: &DmabufRegion,
    ) -> Result<&'a Mr<Self>> {
        device_access(region.access, pd.device().features())?;
        let state = UserState {
            memory: Arc::new(
                PinnedMemory::pin_dmabuf(pd.device(), region)?,
                GFP_KERNEL_ACCOUNT,
            )?,
            pd: pd.number(),
            access: region.access,
            iova: region.iova,
        };
        FerriteMr::register_state(pd, new, state)
    }

    /// Registers a region of a process anew, under the same tag.
    fn rereg_user_mr(
        mr: &Mr<Self>,
        change: &RegionChange<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        let dev = mr.device();
        let (RegionMemory::User { state, .. }, Some(tag), Some(object)) =
            (&mr.memory, &mr.tag, &mr.object)
        else {
            // Memory whose pages come and go, or of the device, stays what it is; a list is changed by
            // work requests.
            return Err(errno::eopnotsupp());
        };
        let tag = tag.get().0;
        // Of what it is now. Nobody else changes it before this returns, as the core holds the region for
        // writing; it is not locked meanwhile, as a process may keep the memory back that is pinned here.
        let before = state.lock().clone();
        let access = change.access.unwrap_or(before.access);
        let rights = device_access(access, dev.features())?;
        let memory = match &change.memory {
            Some(region) => {
                let memory = pin_region(dev, &UserRegion { access, ..*region })?;
                Some(Arc::new(memory, GFP_KERNEL_ACCOUNT)?)
            }
            None => {
                before.memory.check_access(access)?;
                None
            }
        };
        // What is there to replace is known when the device has answered.
        let flags = replacing(object.settle());
        // The command describes what will be; the state follows when the device agreed.
        let mut command = before.command(tag, flags, dev.features())?;
        command.access = rights;
        command.pd = change.pd.map_or(before.pd, |pd| pd.number());
        let iova = change.memory.map_or(before.iova, |region| region.iova);
        if let Some(memory) = &memory {
            command.buffer = memory.buffer();
        }
        command.address = device_address(rights, iova, command.buffer.length)?;
        dev.hw.execute(&command)?;
        object.note_made();
        let after = UserState {
            memory: memory.unwrap_or_else(|| before.memory.clone()),
            pd: command.pd,
            access,
            iova,
        };
        let replaced = core::mem::replace(&mut *state.lock(), after);
        // Memory is given back when the lock is not held any more.
        drop(replaced);
        Ok(())
    }

    /// Ends a region: afterwards its keys are refused. `EBUSY` while windows are bound to it.
    fn dereg_mr(mr: &Mr<Self>, pd: &Pd<Self>) -> Result {
        if let Some(object) = &mr.object {
            let windows = &pd.windows;
            let is_released = match &mr.memory {
                memory if memory.is_waited_for() => false,
                memory if memory.takes_windows() => windows.if_none(|| object.release()),
                _ => {
                    object.release();
                    true
                }
            };
            if !is_released {
                // A window may be made and bound while the command is on its way.
                let seen = windows.look();
                object.destroy_unless_busy(|| windows.any_since(seen))?;
            }
        }
        if let (RegionMemory::OnDemand(memory), Some(tag)) = (&mr.memory, &mr.tag) {
            memory.end();
            // Whoever deals with a fault now has a reference of its own, and is waited for.
            drop(mr.device().hw.regions.remove(tag.get().index() as usize));
        }
        match (&mr.memory, &mr.tag) {
            // Work requests gave it others.
            (RegionMemory::List { .. }, Some(tag)) => tag.note_farthest(),
            (_, Some(tag)) => tag.note_latest(Tag(mr.lkey())),
            (_, None) => {}
        }
        Ok(())
    }

    /// Tells details of a region to whoever lists them: nothing of its key, which the core shows to administrators
    /// alone. With its index only 256 keys would be left to try.
    fn describe_mr(mr: &Mr<Self>, details: &mut Details<'_>) -> Result {
        if let Some(making) = mr.object.as_ref().map(DeviceObject::making) {
            let (word, errno) = registration(making);
            if let Some(word) = word {
                details.text(c"registration", word)?;
            }
            if let Some(errno) = errno {
                details.number(c"registration_errno", errno)?;
            }
        }
        match &mr.memory {
            RegionMemory::User { state, .. } => {
                let memory = state.lock().memory.clone();
                if let Some((page_size, entries)) = shape(&memory.buffer()) {
                    details.number(c"page_size", page_size)?;
                    details.number(c"translations", entries)?;
                }
                // The same of all regions that have one table of pages.
                details.large_number(c"table", memory.number())
            }
            RegionMemory::List { most } => details.number(c"max_pieces", *most),
            RegionMemory::All
            | RegionMemory::Frwr(_)
            | RegionMemory::OnDemand(_)
            | RegionMemory::Device { .. } => Ok(()),
        }
    }

    fn count_mr(mr: &Mr<Self>, counts: &mut Counts<'_>) -> Result {
        let Some(region) = mr.on_demand() else {
            return Ok(());
        };
        let (faults, invalidations, prefetches) = region.counts();
        counts.counter(c"page_faults", faults)?;
        counts.counter(c"page_invalidations", invalidations)?;
        counts.counter(c"page_prefetch", prefetches)
    }
}

/// How a region that a registration has got so far with is changed: one that the device did not make is made then.
fn replacing(making: Making) -> u32 {
    match making {
        Making::Failed(_) => 0,
        Making::Made | Making::Pending | Making::Lost => abi::REGION_REPLACE,
    }
}

/// What there is to tell about the registration of a region, and the number of its error: nothing where all is well.
fn registration(making: Making) -> (Option<&'static CStr>, Option<u32>) {
    match making {
        Making::Made => (None, None),
        Making::Pending => (Some(c"pending"), None),
        Making::Failed(error) => (Some(c"failed"), Some(error.to_errno().unsigned_abs())),
        // The device may well have made it, before it failed.
        Making::Lost => (Some(c"unanswered"), None),
    }
}

#[kunit_tests(ferrite_mr)]
mod tests {
    use super::rights::registered_access;
    use super::*;
    use crate::abi::UverbsMrRequest;

    const ALL_FEATURES: u64 = u64::MAX;

    #[test]
    fn each_right_is_translated() {
        let told = |access| device_access(access, ALL_FEATURES);
        assert_eq!(told(Access::LOCAL_WRITE), Ok(abi::ACCESS_LOCAL_WRITE));
        assert_eq!(
            told(Access::REMOTE_READ | Access::REMOTE_ATOMIC),
            Ok(abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_ATOMIC)
        );
        assert_eq!(told(Access::FLUSH_GLOBAL), Ok(abi::ACCESS_FLUSH_GLOBAL));
        assert_eq!(told(Access::default()), Ok(0));
    }

    #[test]
    fn a_process_gets_a_region_or_a_key_for_lists_and_nothing_in_between() {
        const FEATURES: u64 = abi::FEATURE_LISTS;
        let region = UserRegion {
            start: 0x1000,
            length: 4096,
            iova: 0x1000,
            access: Access::LOCAL_WRITE,
        };
        let nothing = UserRegion {
            start: 0,
            length: 0,
            iova: 0,
            access: Access::default(),
        };
        let request = |kind, max_pieces| UverbsMrRequest {
            kind,
            max_pieces,
            key: 0,
            reserved: 0,
        };
        let (none, list) = (request(0, 0), request(abi::UVERBS_MR_LIST, 4));
        // What a provider of before sends is a region, on any device and of any memory.
        for memory in [&region, &nothing] {
            for features in [0, ALL_FEATURES] {
                assert_eq!(Wanted::new(&none, memory, features), Ok(Wanted::Region));
            }
        }
        for pieces in 1..=abi::MAX_PIECES as u32 {
            let wanted = Wanted::new(&request(1, pieces), &nothing, FEATURES);
            assert_eq!(wanted, Ok(Wanted::List(pieces)));
        }
        let refused = Err(errno::eopnotsupp());
        assert_eq!(Wanted::new(&list, &nothing, !FEATURES), refused);
        assert_eq!(Wanted::new(&request(3, 4), &nothing, FEATURES), refused);
        let over = abi::MAX_PIECES as u32 + 1;
        for bad in [
            request(0, 1),
            request(1, 0),
            request(1, over),
            request(1, u32::MAX),
            UverbsMrRequest {
                reserved: 1,
                ..list
            },
            UverbsMrRequest {
                reserved: 1 << 31,
                ..none
            },
            // These name no other region.
            UverbsMrRequest { key: 1, ..list },
            UverbsMrRequest { key: 1, ..none },
        ] {
            assert_eq!(Wanted::new(&bad, &nothing, FEATURES), Err(EINVAL));
        }
        // A key has no memory and no rights of its own.
        let memories = [
            region,
            UserRegion {
                start: 0x1000,
                ..nothing
            },
            UserRegion {
                length: 1,
                ..nothing
            },
            UserRegion {
                iova: 0x1000,
                ..nothing
            },
            UserRegion {
                access: Access::REMOTE_READ,
                ..nothing
            },
        ];
        for memory in &memories {
            assert_eq!(Wanted::new(&list, memory, FEATURES), Err(EINVAL));
        }
    }

    #[test]
    fn a_region_of_the_memory_of_another_is_asked_for_by_its_key() {
        let region = UserRegion {
            start: 0x1000,
            length: 4096,
            iova: 0x1000,
            access: Access::REMOTE_READ,
        };
        let request = UverbsMrRequest {
            kind: abi::UVERBS_MR_SHARED,
            max_pieces: 0,
            key: 0x1234_5678,
            reserved: 0,
        };
        // Any device can do that.
        for features in [0, ALL_FEATURES] {
            let wanted = Wanted::new(&request, &region, features);
            assert_eq!(wanted, Ok(Wanted::Shared(0x1234_5678)));
        }
        for bad in [
            UverbsMrRequest {
                max_pieces: 1,
                ..request
            },
            UverbsMrRequest {
                reserved: 1,
                ..request
            },
        ] {
            assert_eq!(Wanted::new(&bad, &region, ALL_FEATURES), Err(EINVAL));
        }
    }

    #[test]
    fn one_message_only_is_for_registrations_by_work_request() {
        let asked = Access::REMOTE_WRITE | Access::LOCAL_WRITE | extension::ONE_TOUCH_ACCESS;
        let rights = abi::ACCESS_REMOTE_WRITE | abi::ACCESS_LOCAL_WRITE;
        assert_eq!(
            registered_access(asked, ALL_FEATURES),
            Ok(rights | abi::ACCESS_ONE_TOUCH)
        );
        let without = ALL_FEATURES & !abi::FEATURE_ONE_TOUCH;
        assert_eq!(registered_access(asked, without), Err(errno::eopnotsupp()));
        let usual = asked.without(extension::ONE_TOUCH_ACCESS);
        assert_eq!(registered_access(usual, without), Ok(rights));
    }

    #[test]
    fn a_region_whose_registration_failed_is_made_when_it_is_changed() {
        assert_eq!(replacing(Making::Made), abi::REGION_REPLACE);
        assert_eq!(replacing(Making::Failed(ENOMEM)), 0);
    }

    #[test]
    fn only_what_is_not_well_is_told_of_a_registration() {
        assert_eq!(registration(Making::Made), (None, None));
        assert!(registration(Making::Pending) == (Some(c"pending"), None));
        assert!(registration(Making::Failed(ENOMEM)) == (Some(c"failed"), Some(12)));
        assert!(registration(Making::Lost) == (Some(c"unanswered"), None));
    }

    #[test]
    fn only_what_may_have_windows_or_is_waited_for_waits_for_its_end() {
        let list = RegionMemory::List { most: 4 };
        assert!(!list.takes_windows() && !list.is_waited_for());
        assert!(!RegionMemory::All.takes_windows() && !RegionMemory::All.is_waited_for());
    }

    #[test]
    fn hints_are_ignored_and_paging_is_refused() {
        assert_eq!(device_access(Access::RELAXED_ORDERING, ALL_FEATURES), Ok(0));
        assert!(device_access(Access::ON_DEMAND, ALL_FEATURES).is_err());
        assert_eq!(region_rights(Access::ON_DEMAND, ALL_FEATURES), Ok(0));
    }

    #[test]
    fn a_device_without_atomics_is_not_asked_for_their_right() {
        let asked = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let rest = abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_READ;
        let without = ALL_FEATURES & !abi::FEATURE_ATOMICS;
        for rights in [device_access, region_rights] {
            assert_eq!(rights(asked, without), Ok(rest));
            let with = Ok(rest | abi::ACCESS_REMOTE_ATOMIC);
            assert_eq!(rights(asked, abi::FEATURE_ATOMICS), with);
        }
    }

    #[test]
    fn no_region_is_made_for_flushes_that_the_device_does_not_have() {
        let without = ALL_FEATURES & !abi::FEATURE_FLUSH;
        for rights in [device_access, region_rights] {
            let refused = Err(errno::eopnotsupp());
            assert_eq!(rights(Access::FLUSH_GLOBAL, without), refused);
            // No device has these.
            assert_eq!(rights(Access::FLUSH_PERSISTENT, ALL_FEATURES), refused);
        }
    }
}
