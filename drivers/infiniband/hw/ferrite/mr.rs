// SPDX-License-Identifier: GPL-2.0

//! Memory regions, and the memory of processes that rings and regions lie in.

use crate::{
    abi,
    abi::{
        AllocateTag,
        AttOrder,
        Buffer,
        FastRegisterPart,
        RegisterRegion,
        Tag,
        TagKind,
        UverbsMrRequest,
        ATT_TABLE_ENTRIES, //
    },
    commands::{
        DeviceObject,
        Making, //
    },
    device::Ferrite,
    dm::DmPages,
    extension,
    kernel_ext::{
        errno,
        random, //
    },
    lent::{
        Leak,
        Lent, //
    },
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
        FrwrOps,
        Mr,
        MrOps,
        New,
        Pd,
        RegWr,
        RegionChange,
        Udata,
        Umem,
        UserRegion, //
    },
    tpt::{
        self,
        Att,
        TakenTag, //
    },
};
use core::mem;
use kernel::{
    dma::Coherent,
    new_mutex,
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

/// Memory of a process, pinned and described for the device.
pub(crate) struct PinnedMemory(Lent<Described>);

/// Pinned memory with the tables that describe it.
struct Described {
    att: Att,
    umem: Umem,
    /// Tells it from others, to who looks: zero until somebody does.
    number: Atomic<u64>,
}

impl Leak for Described {
    fn leak(self) {
        // Who removes the device does not wait for memory that is never given back.
        self.umem.leak();
        mem::forget(self.att);
    }
}

/// How many bits of a number those keep who read it in JSON.
const NUMBER_BITS: u32 = 53;

/// A number that no other memory has, out of random words. It is drawn, so that it says nothing of how many others
/// there are: of 53 bits two of a million are the same in one of twenty thousand cases. It is not zero.
fn drawn_number(words: [u32; 2]) -> u64 {
    let [low, high] = words.map(u64::from);
    ((high << 32 | low) >> (u64::BITS - NUMBER_BITS)).max(1)
}

/// The number that is `noted`, which is `drawn` by who looks first, and is the same for all who look.
fn number_once(noted: &Atomic<u64>, draw: impl FnOnce() -> u64) -> u64 {
    match noted.load(Relaxed) {
        0 => {
            let drawn = draw();
            noted
                .cmpxchg(0, drawn, Relaxed)
                .map_or_else(|earlier| earlier, |_| drawn)
        }
        number => number,
    }
}

impl PinnedMemory {
    /// Pins `length` bytes from `address` on, which the device knows as `iova`.
    pub(crate) fn pin(
        dev: &Device<Ferrite>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Self> {
        let umem = Umem::get(dev, address, usize::try_from(length)?, access)?;
        Self::describe(dev, umem, length, iova)
    }

    /// Pins part of a DMA buffer. It is pinned, not mapped as its exporter likes: the device has no
    /// way to let go of a region for a while when the exporter wants to move it.
    fn pin_dmabuf(dev: &Device<Ferrite>, region: &DmabufRegion) -> Result<Self> {
        if region.length > dev.caps.max_region {
            return Err(EINVAL);
        }
        let bytes = usize::try_from(region.length)?;
        let umem = Umem::get_dmabuf_pinned(dev, region.fd, region.offset, bytes, region.access)?;
        Self::describe(dev, umem, region.length, region.iova)
    }

    /// Describes pinned memory for the device, which knows it as `iova`.
    fn describe(dev: &Device<Ferrite>, mut umem: Umem, length: u64, iova: u64) -> Result<Self> {
        let page_size = umem
            .best_page_size(dev.caps.page_sizes, iova)
            .ok_or(EINVAL)?;
        let fbo = (iova & (page_size as u64 - 1)) as u32;
        let shift = page_size.trailing_zeros() as u8;
        let describe = |pages: &[u64]| Att::new(dev.parent(), pages, shift, fbo, length);
        let att = match umem.num_blocks(page_size) {
            // Which takes no list.
            1 => describe(umem.blocks(page_size).next().as_slice())?,
            count => {
                let mut pages = KVVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
                for page in umem.blocks(page_size) {
                    pages.push(page, GFP_KERNEL_ACCOUNT)?;
                }
                describe(&pages)?
            }
        };
        let described = Described {
            att,
            umem,
            number: Atomic::new(0),
        };
        Ok(Self(Lent::new(&dev.hw.reach, described)))
    }

    /// Pins the rings of a queue, which the device writes.
    pub(crate) fn pin_rings(dev: &Device<Ferrite>, address: u64, length: u64) -> Result<Self> {
        Self::pin(dev, address, length, address, Access::LOCAL_WRITE)
    }

    /// Checks that the memory can be used with other rights.
    fn check_access(&self, access: Access) -> Result {
        self.0.umem.check_access(access)
    }

    /// What to tell the device.
    pub(crate) fn buffer(&self) -> Buffer {
        self.0.att.buffer()
    }

    /// What tells it from other memory. It says nothing about where that is.
    fn number(&self) -> u64 {
        number_once(&self.0.number, || {
            drawn_number([random::get_u32(), random::get_u32()])
        })
    }
}

/// Pins what a region is to be of.
fn pin_region(dev: &Device<Ferrite>, region: &UserRegion) -> Result<PinnedMemory> {
    if region.length > dev.caps.max_region {
        return Err(EINVAL);
    }
    PinnedMemory::pin(dev, region.start, region.length, region.iova, region.access)
}

/// The rights of a region that the device knows, out of what a consumer asked for.
fn device_access(access: Access, features: u64) -> Result<u32> {
    if access.contains(Access::ON_DEMAND) {
        return Err(errno::eopnotsupp());
    }
    region_rights(access, features)
}

/// The same, whether or not pages come and go.
fn region_rights(access: Access, features: u64) -> Result<u32> {
    let given = effective(access, features);
    // Flushes are refused as the core does, which does not see all registrations. Atomics are not: the
    // core lets their right pass whatever the device can do, and programs that register memory for any
    // use ask for it. That there are none is for the attributes of the device to say.
    if access.without(given).intersects(FLUSHES) {
        return Err(errno::eopnotsupp());
    }
    Ok(device_rights(given))
}

/// The same of a registration by work request, which may be for one message only.
fn registered_access(access: Access, features: u64) -> Result<u32> {
    let rights = device_access(access, features)?;
    if !access.contains(extension::ONE_TOUCH_ACCESS) {
        return Ok(rights);
    }
    if features & abi::FEATURE_ONE_TOUCH == 0 {
        return Err(errno::eopnotsupp());
    }
    Ok(rights | abi::ACCESS_ONE_TOUCH)
}

/// Rights to flush.
const FLUSHES: Access =
    Access::from_raw(Access::FLUSH_GLOBAL.as_raw() | Access::FLUSH_PERSISTENT.as_raw());

/// Rights without those to do what a device with such features cannot, and would refuse.
pub(crate) fn effective(access: Access, features: u64) -> Access {
    let mut absent = Access::FLUSH_PERSISTENT;
    if features & abi::FEATURE_ATOMICS == 0 {
        absent = absent | Access::REMOTE_ATOMIC;
    }
    if features & abi::FEATURE_FLUSH == 0 {
        absent = absent | Access::FLUSH_GLOBAL;
    }
    access.without(absent)
}

/// Rights as the device says them.
pub(crate) fn device_rights(access: Access) -> u32 {
    let rights = [
        (Access::LOCAL_WRITE, abi::ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, abi::ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, abi::ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, abi::ACCESS_REMOTE_ATOMIC),
        (Access::MW_BIND, abi::ACCESS_WINDOW_BIND),
        (Access::ZERO_BASED, abi::ACCESS_ZERO_BASED),
        (Access::FLUSH_GLOBAL, abi::ACCESS_FLUSH_GLOBAL),
    ];
    rights
        .iter()
        .filter(|(asked, _)| access.contains(*asked))
        .fold(0, |rights, (_, right)| rights | right)
}

/// The pages of a region that is registered by work request (FRWR).
struct FrwrPages {
    tables: Lent<FrwrTables>,
    used: Atomic<u32>,
}

/// Room for the addresses of those pages.
struct FrwrTables {
    /// All but the last are full tables.
    leaves: KVec<Coherent<[u64]>>,
    /// The addresses of those, where there are several.
    root: Option<Coherent<[u64]>>,
    /// How many pages there is room for.
    pages: u32,
}

impl Leak for FrwrTables {
    fn leak(self) {
        mem::forget(self);
    }
}

/// The lengths of the tables that `pages` pages take.
fn leaf_lengths(pages: u32) -> impl Iterator<Item = usize> {
    let pages = pages as usize;
    (0..pages)
        .step_by(ATT_TABLE_ENTRIES)
        .map(move |first| ATT_TABLE_ENTRIES.min(pages - first))
}

/// In which of those tables the page at `index` is, and where in it; none beyond the last page.
fn place_in_leaves(index: u32, pages: u32) -> Option<(usize, usize)> {
    let at = index as usize;
    (index < pages).then_some((at / ATT_TABLE_ENTRIES, at % ATT_TABLE_ENTRIES))
}

impl FrwrTables {
    /// Room for `pages` pages, at least one.
    fn new(dev: &Device<Ferrite>, pages: u32) -> Result<Self> {
        let parent = dev.parent();
        let mut leaves = KVec::new();
        for entries in leaf_lengths(pages) {
            leaves.push(
                Coherent::zeroed_slice(parent, entries, GFP_KERNEL)?,
                GFP_KERNEL,
            )?;
        }
        let root = if leaves.len() > 1 {
            let root: Coherent<[u64]> = Coherent::zeroed_slice(parent, leaves.len(), GFP_KERNEL)?;
            for (index, leaf) in leaves.iter().enumerate() {
                kernel::dma_write!(root, [try: index], leaf.dma_handle());
            }
            Some(root)
        } else {
            None
        };
        Ok(Self {
            leaves,
            root,
            pages,
        })
    }

    /// Sets the address of a page; `ENOMEM` where there is no room for it.
    fn set(&self, index: u32, address: u64) -> Result {
        let (leaf, at) = place_in_leaves(index, self.pages).ok_or(ENOMEM)?;
        let leaf = self.leaves.get(leaf).ok_or(ENOMEM)?;
        kernel::dma_write!(leaf, [try: at], address);
        Ok(())
    }

    /// How the first `pages` of them are told to the device: the order, and the address of the table.
    fn start(&self, pages: u64) -> Result<(AttOrder, u64)> {
        let order = list_order(pages).ok_or(EINVAL)?;
        let table = match order {
            AttOrder::Second => self.root.as_ref(),
            _ => self.leaves.first(),
        };
        Ok((order, table.ok_or(EINVAL)?.dma_handle()))
    }
}

/// The order of a list of `pages` pages, which are in tables however few there are.
fn list_order(pages: u64) -> Option<AttOrder> {
    match Buffer::order_for(pages)? {
        AttOrder::Direct => Some(AttOrder::First),
        order => Some(order),
    }
}

/// A region of a process as it was registered last.
#[derive(Clone)]
pub(crate) struct UserState {
    /// Other regions may be of it too.
    memory: Arc<PinnedMemory>,
    pd: u32,
    access: Access,
    /// Address of the first byte, as work requests say it.
    iova: u64,
}

impl UserState {
    /// One more region of the same memory, with rights and in a domain of its own. It is to be at the same address, of
    /// the same length: so the core shows it.
    fn share(&self, pd: u32, region: &UserRegion) -> Result<Self> {
        if (region.iova, region.length) != (self.iova, self.memory.buffer().length) {
            return Err(EINVAL);
        }
        self.memory.check_access(region.access)?;
        Ok(Self {
            memory: self.memory.clone(),
            pd,
            access: region.access,
            iova: self.iova,
        })
    }

    fn command(&self, tag: u32, flags: u32, features: u64) -> Result<RegisterRegion> {
        let access = device_access(self.access, features)?;
        let buffer = self.memory.buffer();
        Ok(RegisterRegion {
            tag,
            pd: self.pd,
            access,
            flags,
            address: device_address(access, self.iova, buffer.length)?,
            buffer,
        })
    }
}

/// The address of the first byte of a region with these rights, as the device is told. The last one has to have an
/// address as well: the device would refuse that, perhaps only after the key was given out.
fn device_address(access: u32, iova: u64, length: u64) -> Result<u64> {
    let address = if access & abi::ACCESS_ZERO_BASED != 0 {
        0
    } else {
        iova
    };
    address.checked_add(length).ok_or(EINVAL)?;
    Ok(address)
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

/// What a process wants made when it registers memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// A region of its memory.
    Region,
    /// A key for lists of so many pieces of regions at the most.
    List(u32),
    /// A region of the memory that the region with this key is of.
    Shared(u32),
}

impl Wanted {
    /// What the private part of a request says. A process without one, or a provider of before, wants a
    /// region.
    fn new(request: &UverbsMrRequest, region: &UserRegion, features: u64) -> Result<Self> {
        // Of the others one field is used by each kind.
        let is_shared = request.kind == abi::UVERBS_MR_SHARED;
        let zeroes = (
            request.reserved,
            if is_shared {
                request.max_pieces
            } else {
                request.key
            },
        );
        if zeroes != (0, 0) {
            return Err(EINVAL);
        }
        match request.kind {
            0 if request.max_pieces == 0 => Ok(Self::Region),
            0 => Err(EINVAL),
            abi::UVERBS_MR_LIST if features & abi::FEATURE_LISTS == 0 => Err(errno::eopnotsupp()),
            abi::UVERBS_MR_LIST => {
                // It has neither memory nor rights before it is registered.
                let memory = (region.start, region.length, region.iova);
                let is_empty = memory == (0, 0, 0) && region.access == Access::default();
                let pieces = 1..=abi::MAX_PIECES as u32;
                if is_empty && pieces.contains(&request.max_pieces) {
                    Ok(Self::List(request.max_pieces))
                } else {
                    Err(EINVAL)
                }
            }
            abi::UVERBS_MR_SHARED => Ok(Self::Shared(request.key)),
            _ => Err(errno::eopnotsupp()),
        }
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
        let object = tpt::make(dev, &command, tag)?;
        let named = match &pd.regions {
            Some(regions) => Some(regions.add(tag.0, state.clone())?),
            None => None,
        };
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
        let object = tpt::make(
            dev,
            &RegisterRegion {
                tag: tag.0,
                pd: pd.number(),
                access,
                flags: abi::REGION_ON_DEMAND,
                address: device_address(access, region.iova, buffer.length)?,
                buffer,
            },
            tag,
        )?;
        new.set_keys(tag.0, tag.0);
        let mr = new.init(Ok::<_, Error>(Self {
            object: Some(object),
            memory: RegionMemory::OnDemand(memory),
            tag: Some(taken),
        }))?;
        // Last: from now on its faults are dealt with.
        let found = mr.get_ref().ok_or(ENODEV)?;
        dev.hw.regions.insert(tag.index() as usize, found)?;
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

    /// Makes a key under which lists of up to `pieces` pieces of other regions are registered by work
    /// request. Nothing is pinned for it.
    fn allocate_list<'a>(
        pd: &Pd<Ferrite>,
        new: New<'a, kind::Mr, Ferrite>,
        pieces: u32,
    ) -> Result<&'a Mr<Ferrite>> {
        let memory = RegionMemory::List { most: pieces };
        Self::allocate_tag(pd, new, TagKind::List, pieces, memory)
    }

    /// Reserves a tag for what is registered by work request.
    fn allocate_tag<'a>(
        pd: &Pd<Ferrite>,
        mut new: New<'a, kind::Mr, Ferrite>,
        kind: TagKind,
        most: u32,
        memory: RegionMemory,
    ) -> Result<&'a Mr<Ferrite>> {
        let dev = pd.device();
        let taken = dev.tags.take(pd.holder())?;
        let tag = taken.get();
        let object = tpt::make(
            dev,
            &AllocateTag {
                tag: tag.0,
                pd: pd.number(),
                kind: kind.number(),
                reserved: [0; 3],
                max_pages: most,
            },
            tag,
        )?;
        new.set_keys(tag.0, tag.0);
        new.init(Ok::<_, Error>(Self {
            object: Some(object),
            memory,
            tag: Some(taken),
        }))
    }

    /// The work request that registers the listed pages.
    pub(crate) fn register_part(registration: &RegWr<'_, Ferrite>) -> Result<FastRegisterPart> {
        let &RegWr { mr, key, access } = registration;
        let RegionMemory::Frwr(list) = &mr.memory else {
            return Err(EINVAL);
        };
        let page_size = u64::from(mr.page_size());
        if !page_size.is_power_of_two() || mr.device().caps.page_sizes & page_size == 0 {
            return Err(EINVAL);
        }
        let pages = list.used.load(Relaxed).into();
        let (order, root) = list.tables.start(pages)?;
        let buffer = Buffer {
            root,
            length: mr.length(),
            fbo: (mr.iova() & (page_size - 1)) as u32,
            page_shift: page_size.trailing_zeros() as u8,
            order: order.number(),
            reserved: 0,
        };
        if buffer.pages() != Some(pages) {
            return Err(EINVAL);
        }
        Ok(FastRegisterPart {
            tag: key,
            access: registered_access(access, mr.device().features())?,
            address: mr.iova(),
            buffer,
            reserved: 0,
        })
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
        if let (RegionMemory::OnDemand(_), Some(tag)) = (&mr.memory, &mr.tag) {
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

impl FrwrOps for Ferrite {
    /// Makes a region of up to `pages` pages that is registered by work request.
    fn alloc_mr<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Mr, Self>,
        pages: u32,
    ) -> Result<&'a Mr<Self>> {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_FAST_REGISTER) {
            return Err(errno::eopnotsupp());
        }
        if pages == 0 || pages > dev.caps.max_fast_register_pages {
            return Err(EINVAL);
        }
        let list = FrwrPages {
            tables: Lent::new(&dev.hw.reach, FrwrTables::new(dev, pages)?),
            used: Atomic::new(0),
        };
        FerriteMr::allocate_tag(pd, new, TagKind::Region, pages, RegionMemory::Frwr(list))
    }

    /// Forgets the pages that were listed.
    fn begin_mr_map(mr: &Mr<Self>) {
        if let RegionMemory::Frwr(list) = &mr.memory {
            list.used.store(0, Relaxed);
        }
    }

    /// Adds the page at `addr` to the list; `ENOMEM` when it is full.
    fn push_mr_page(mr: &Mr<Self>, addr: u64) -> Result {
        let RegionMemory::Frwr(list) = &mr.memory else {
            return Err(EINVAL);
        };
        let index = list.used.load(Relaxed);
        list.tables.set(index, addr)?;
        list.used.store(index + 1, Relaxed);
        Ok(())
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

/// The page size of a buffer, and how many addresses of pages the device was told of.
fn shape(buffer: &Buffer) -> Option<(u32, u32)> {
    let page_size = 1u32.checked_shl(buffer.page_shift.into())?;
    let entries = match AttOrder::from_number(buffer.order)? {
        AttOrder::Direct => 1,
        AttOrder::First | AttOrder::Second => u32::try_from(buffer.pages()?).ok()?,
    };
    Some((page_size, entries))
}

#[kunit_tests(ferrite_mr)]
mod tests {
    use super::*;

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
    fn a_list_of_pages_is_in_one_table_or_in_tables_of_a_table() {
        let entries = ATT_TABLE_ENTRIES as u64;
        for pages in [0, 1, 2, entries] {
            assert_eq!(list_order(pages), Some(AttOrder::First));
        }
        for pages in [entries + 1, 1 << 16] {
            assert_eq!(list_order(pages), Some(AttOrder::Second));
        }
    }

    #[test]
    fn each_page_of_a_list_has_a_place_and_those_beyond_it_none() {
        let entries = ATT_TABLE_ENTRIES as u32;
        for pages in [
            1,
            2,
            entries - 1,
            entries,
            entries + 1,
            600,
            2 * entries,
            1 << 16,
        ] {
            let mut next = 0;
            for (leaf, length) in leaf_lengths(pages).enumerate() {
                assert!((1..=ATT_TABLE_ENTRIES).contains(&length));
                for at in 0..length {
                    assert_eq!(place_in_leaves(next, pages), Some((leaf, at)));
                    next += 1;
                }
            }
            assert_eq!(next, pages);
            for beyond in [pages, pages + 1, pages.next_multiple_of(entries), u32::MAX] {
                assert_eq!(place_in_leaves(beyond, pages), None);
            }
        }
    }

    #[test]
    fn pages_are_told_of_one_by_one_unless_they_follow_each_other() {
        let buffer = |pages: u64, page_shift: u8, order: AttOrder| Buffer {
            root: 0x10_0000,
            length: pages << page_shift,
            fbo: 0,
            page_shift,
            order: order.number(),
            reserved: 0,
        };
        for (shift, size) in [(12, 4096), (21, 1 << 21), (30, 1 << 30)] {
            let direct = buffer(3, shift, AttOrder::Direct);
            assert_eq!(shape(&direct), Some((size, 1)));
            let listed = buffer(3, shift, AttOrder::First);
            assert_eq!(shape(&listed), Some((size, 3)));
        }
        let large = buffer(1 << 20, 12, AttOrder::Second);
        assert_eq!(shape(&large), Some((4096, 1 << 20)));
        // The first byte may be anywhere in the first page.
        let late = Buffer {
            fbo: 4095,
            ..buffer(3, 12, AttOrder::First)
        };
        assert_eq!(shape(&late), Some((4096, 4)));
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
    fn the_number_of_memory_has_all_the_bits_that_readers_keep() {
        assert_eq!(drawn_number([u32::MAX; 2]), (1 << 53) - 1);
        // Both words count.
        assert_eq!(drawn_number([1 << 11, 0]), 1);
        assert_eq!(drawn_number([0, 1]), 1 << 21);
        assert_eq!(drawn_number([0, 1 << 31]), 1 << 52);
        let numbers = [(); 2].map(|_| drawn_number([random::get_u32(), random::get_u32()]));
        assert!(numbers[0] != numbers[1]);
    }

    #[test]
    fn the_number_of_memory_is_drawn_once_by_who_looks_first() {
        let noted = Atomic::new(0u64);
        assert_eq!(number_once(&noted, || 7), 7);
        assert_eq!(number_once(&noted, || 8), 7);
        // Another one looks at the same time, and was first.
        let noted = Atomic::new(0u64);
        let late = number_once(&noted, || {
            noted.store(5, Relaxed);
            6
        });
        assert_eq!((late, noted.load(Relaxed)), (5, 5));
        // What is drawn stands for no number that was not.
        assert_eq!(drawn_number([0, 0]), 1);
    }

    #[test]
    fn only_what_may_have_windows_or_is_waited_for_waits_for_its_end() {
        let list = RegionMemory::List { most: 4 };
        assert!(!list.takes_windows() && !list.is_waited_for());
        assert!(!RegionMemory::All.takes_windows() && !RegionMemory::All.is_waited_for());
    }

    #[test]
    fn the_last_byte_of_a_region_has_an_address() {
        assert_eq!(device_address(0, 0x1000, 0x1000), Ok(0x1000));
        let last = u64::MAX - 0xfff;
        assert_eq!(device_address(0, last, 0xfff), Ok(last));
        assert_eq!(device_address(0, last, 0x1000), Err(EINVAL));
        assert_eq!(device_address(0, u64::MAX, 1), Err(EINVAL));
        // Nothing has an address, whichever.
        for address in [0, 0x1000, u64::MAX] {
            assert_eq!(device_address(0, address, 0), Ok(address));
        }
        // Addresses that count from zero are whatever they were asked to be.
        assert_eq!(device_address(abi::ACCESS_ZERO_BASED, last, 0x1000), Ok(0));
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
