// SPDX-License-Identifier: GPL-2.0

//! Faults of on-demand regions, which the device has for pages that are not there, and advices of processes to bring
//! pages in: who deals with them, and how many of each user at once.

use crate::{
    abi,
    abi::{
        PageFault,
        PageFaults,
        ResolveFault, //
    },
    device::Ferrite,
    dma_types::Nothing,
    hardware::Hardware,
    kernel_ext::{
        errno,
        memory,
        user,
        workqueue::OwnedQueue, //
    },
    rdma::{
        Advice,
        AdvisedRange,
        Mr,
        MrRef,
        OdpOps,
        Pd, //
    },
};
use core::mem;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNodeReservation, //
    },
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc,
        Mutex,
        UniqueArc, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        RawWorkItem,
        Work,
        WorkItem, //
    },
};

/// Faults of a user that are dealt with at once, at the most; further ones of his wait for those. A
/// small part of what a workqueue does at once: a page may take as long as its owner likes.
const MOST_FAULTS: usize = 32;
/// Faults of a user that wait, at the most, whatever number of queue pairs the device says it has.
const MOST_PARKED: usize = 1 << 16;
/// Advices of a user that are followed later, at the most; who gives more of them follows them
/// himself.
const MOST_ADVICES: u32 = 64;

/// A fault that is being dealt with. It keeps the region.
#[pin_data]
struct FaultWork {
    mr: MrRef<Ferrite>,
    fault: PageFault,
    /// Whose faults it counts among.
    user: u64,
    #[pin]
    work: Work<FaultWork>,
}

impl_has_work! {
    impl HasWork<Self> for FaultWork { self.work }
}

impl WorkItem for FaultWork {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        deal_with(&this.mr, &this.fault, this.user);
        let (pager, user) = (this.mr.device().pager.clone(), this.user);
        // The next one takes memory, for which whoever ends this one's region is not to wait.
        drop(this);
        pager.finish(user, user);
    }
}

fn deal_with(mr: &MrRef<Ferrite>, fault: &PageFault, user: u64) {
    let dev = mr.device();
    let failed = match mr.on_demand() {
        Some(region) => region.handle(dev, fault).is_err(),
        None => true,
    };
    resolve(&dev.hw, user, fault, failed);
}

/// Answers a fault in the turn of `user`: whose fault it is where a worker of his does it, and the kernel
/// where the pager does, which is not to wait for what one user asks for.
fn resolve(hw: &Arc<Hardware>, user: u64, fault: &PageFault, failed: bool) {
    let command = ResolveFault {
        token: fault.token,
        failed: failed.into(),
        reserved: 0,
    };
    // The queue pair may be gone meanwhile, or the device: then nobody waits.
    let _ = hw.execute_for(user, &command);
}

/// The faults of a user.
struct Backlog {
    under_way: usize,
    /// Those that wait, the oldest at `first`. They hold no region: one that ends does not wait for
    /// them.
    parked: KVVec<PageFault>,
    first: usize,
}

impl Backlog {
    const fn new() -> Self {
        Self {
            under_way: 0,
            parked: KVVec::new(),
            first: 0,
        }
    }

    /// Parks a fault. Where there is no room it takes that of `room`; where that is no more, it does not, and says for how many
    /// there should be.
    fn park(&mut self, fault: &PageFault, room: &mut KVVec<PageFault>) -> Result<(), Lacking> {
        // Room that was used comes first, when it is half of all.
        if self.first > 0 && self.first >= self.parked.len() / 2 {
            self.parked.copy_within(self.first.., 0);
            self.parked.truncate(self.parked.len() - self.first);
            self.first = 0;
        }
        let lacking = Lacking::Parked((2 * self.parked.len()).max(MOST_FAULTS));
        if self.parked.len() == self.parked.capacity() {
            if !room.is_empty() || room.capacity() <= self.parked.len() {
                return Err(lacking);
            }
            for old in self.parked.iter().skip(self.first) {
                // There is room for more.
                let _ = room.push_within_capacity(*old);
            }
            self.first = 0;
            mem::swap(&mut self.parked, room);
        }
        self.parked
            .push_within_capacity(*fault)
            .map_err(|_| lacking)
    }

    fn parked(&self) -> usize {
        self.parked.len() - self.first
    }

    fn unpark(&mut self) -> Option<PageFault> {
        let fault = *self.parked.get(self.first)?;
        self.first += 1;
        Some(fault)
    }
}

/// What is to become of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    /// It is dealt with now.
    Now,
    /// It waits for others of the same user.
    Later,
    /// Its user has more than all his queue pairs can have.
    Never,
}

/// Memory to note faults and advices with, which is allocated without the lock that all users share: who ends one has to
/// take that, and a process that is to end, for want of memory even, waits for him.
#[derive(Default)]
struct Room {
    backlog: Option<RBTreeNodeReservation<u64, Backlog>>,
    parked: KVVec<PageFault>,
}

/// What of it was not there: memory for another user, or to park so many faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lacking {
    Backlog,
    Parked(usize),
}

impl Room {
    fn provide(&mut self, lacking: Lacking) -> Result {
        match lacking {
            Lacking::Backlog => self.backlog = Some(RBTreeNodeReservation::new(GFP_KERNEL)?),
            Lacking::Parked(count) => self.parked = KVVec::with_capacity(count, GFP_KERNEL)?,
        }
        Ok(())
    }
}

/// The faults that were taken from the device, by user: who does not give his pages keeps up his own
/// faults, and nobody else's.
struct Backlogs {
    users: RBTree<u64, Backlog>,
    /// How many a user may have waiting: those of queue pairs that are gone count as well.
    most_parked: usize,
}

impl Backlogs {
    fn new(most_parked: usize) -> Self {
        Self {
            users: RBTree::new(),
            most_parked,
        }
    }

    /// A fault of a region of `user` was taken. Nothing of it was noted where memory is lacking.
    fn admit(
        &mut self,
        user: u64,
        fault: &PageFault,
        room: &mut Room,
    ) -> Result<Admission, Lacking> {
        let Some(backlog) = self.users.get_mut(&user) else {
            let node = room.backlog.take().ok_or(Lacking::Backlog)?;
            let mut backlog = Backlog::new();
            backlog.under_way = 1;
            self.users.insert(node.into_node(user, backlog));
            return Ok(Admission::Now);
        };
        if backlog.under_way < MOST_FAULTS {
            backlog.under_way += 1;
            return Ok(Admission::Now);
        }
        if backlog.parked() >= self.most_parked {
            return Ok(Admission::Never);
        }
        backlog.park(fault, &mut room.parked)?;
        Ok(Admission::Later)
    }

    /// One of `user` was dealt with. Returns the one that takes its place.
    fn finish(&mut self, user: u64) -> Option<PageFault> {
        let backlog = self.users.get_mut(&user)?;
        let next = backlog.unpark();
        if next.is_none() {
            backlog.under_way -= 1;
            if backlog.under_way == 0 {
                self.users.remove(&user);
            }
        }
        next
    }
}

/// Takes faults by `take` until there are none, or `closed` says that nobody waits for them, and
/// calls `start` for each.
fn take_all(
    closed: impl Fn() -> bool,
    mut take: impl FnMut() -> Result<PageFaults>,
    mut start: impl FnMut(&PageFault),
) -> Result {
    while !closed() {
        let taken = take()?;
        let count = (taken.count as usize).min(taken.faults.len());
        for fault in taken.faults.iter().take(count) {
            start(fault);
        }
        if count < taken.faults.len() {
            break;
        }
    }
    Ok(())
}

/// How many faults of a user may wait where the device has so many queue pairs: one as requester and
/// one as responder each, within reason.
fn most_parked(queue_pairs: u32) -> usize {
    (2 * queue_pairs as usize).min(MOST_PARKED)
}

/// The advices that are to be followed later, by user.
struct Advices {
    users: RBTree<u64, u32>,
}

impl Advices {
    fn new() -> Self {
        Self {
            users: RBTree::new(),
        }
    }

    /// Whether one more of `user` may be followed later: then it counts until [`Advices::finish`]. `node` is for a user of
    /// whom there is none yet.
    fn admit(&mut self, user: u64, node: RBTreeNodeReservation<u64, u32>) -> bool {
        match self.users.get_mut(&user) {
            Some(count) if *count >= MOST_ADVICES => false,
            Some(count) => {
                *count += 1;
                true
            }
            None => {
                self.users.insert(node.into_node(user, 1));
                true
            }
        }
    }

    /// One of `user` was followed.
    fn finish(&mut self, user: u64) {
        if let Some(count) = self.users.get_mut(&user) {
            *count -= 1;
            if *count == 0 {
                self.users.remove(&user);
            }
        }
    }
}

/// Where paging is done. Pages may take as long as their owners like, so that those who wait for
/// them keep up nobody who does not: neither the pager, without which no fault is taken, nor the
/// other kind of them.
///
/// Dropped in this order: the pager has faults dealt with.
pub(crate) struct PagingQueues {
    /// Of the [`Pager`].
    pager: OwnedQueue,
    faults: OwnedQueue,
    advices: OwnedQueue,
}

impl PagingQueues {
    pub(crate) fn new() -> Result<Self> {
        Self::with_workers(OwnedQueue::MOST_ACTIVE)
    }

    fn with_workers(most: u32) -> Result<Self> {
        Ok(Self {
            pager: OwnedQueue::ordered(c"ferrite_pager")?,
            faults: OwnedQueue::for_faults(c"ferrite_faults", most)?,
            advices: OwnedQueue::for_faults(c"ferrite_advices", most)?,
        })
    }

    /// Runs the [`Pager`], one at a time.
    pub(crate) fn take<W, const ID: u64>(&self, pager: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.pager.enqueue(pager)
    }

    /// Runs what deals with a fault.
    fn deal_with<W, const ID: u64>(&self, fault: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.faults.enqueue(fault)
    }

    /// Runs what follows an advice.
    fn follow<W, const ID: u64>(&self, advice: W) -> W::EnqueueOutput
    where
        W: RawWorkItem<ID> + Send + 'static,
    {
        self.advices.enqueue(advice)
    }
}

/// Where the region of a fault is found, while it is there.
fn index_of(fault: &PageFault) -> usize {
    abi::Tag(fault.tag).index() as usize
}

/// The key and the user of a region, if it is of on-demand memory.
fn key_and_user(mr: &Mr<Ferrite>) -> Option<(u32, u64)> {
    mr.on_demand().map(|region| (mr.lkey(), region.user()))
}

/// Whose fault it is, where a region with this key and user is found at its index: nobody's, if that
/// is another region than the one that the device meant.
fn owner_of(fault: &PageFault, found: Option<(u32, u64)>) -> Option<u64> {
    found
        .filter(|(key, _)| *key == fault.tag)
        .map(|(_, user)| user)
}

/// Takes faults from the device and has them dealt with, each by a worker of its own.
#[pin_data]
pub(crate) struct Pager {
    hw: Arc<Hardware>,
    /// Nobody waits for a page any more.
    closed: Atomic<u32>,
    /// Locked while faults are counted, not while they are dealt with.
    #[pin]
    backlogs: Mutex<Backlogs>,
    /// Locked while advices are counted, not while they are followed.
    #[pin]
    advices: Mutex<Advices>,
    #[pin]
    work: Work<Pager>,
}

impl_has_work! {
    impl HasWork<Self> for Pager { self.work }
}

impl Pager {
    /// For a device with so many queue pairs.
    pub(crate) fn new(hw: &Arc<Hardware>, queue_pairs: u32) -> Result<Arc<Self>> {
        let pager = Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                closed: Atomic::new(0),
                backlogs <- new_mutex!(Backlogs::new(most_parked(queue_pairs)), "ferrite_backlogs"),
                advices <- new_mutex!(Advices::new(), "ferrite_advices"),
                work <- new_work!("ferrite_pager"),
            }),
            GFP_KERNEL,
        )?;
        memory::taken_in_reclaim(|| {
            drop(pager.backlogs.lock());
            drop(pager.advices.lock());
        });
        Ok(pager)
    }

    /// Takes no more faults: a device that never runs out of them is not waited for.
    pub(crate) fn close(&self) {
        self.closed.store(1, Relaxed);
    }

    /// Has a fault dealt with, now or when others of the same user were.
    fn start(&self, fault: &PageFault) {
        let user = self
            .hw
            .regions
            .with(index_of(fault), |mr| owner_of(fault, key_and_user(mr)));
        let Some(user) = user.flatten() else {
            resolve(&self.hw, user::KERNEL, fault, true);
            return;
        };
        let mut room = Room::default();
        let admission = loop {
            let admission = self.backlogs.lock().admit(user, fault, &mut room);
            match admission.map_err(|lacking| room.provide(lacking)) {
                Err(Ok(())) => {}
                Ok(admission) => break Ok(admission),
                Err(Err(error)) => break Err(error),
            }
        };
        match admission {
            Ok(Admission::Now) => {
                if !self.begin(user::KERNEL, user, fault) {
                    self.finish(user::KERNEL, user);
                }
            }
            Ok(Admission::Later) => {}
            // Without memory to note it there is none for the page.
            Ok(Admission::Never) | Err(_) => resolve(&self.hw, user::KERNEL, fault, true),
        }
    }

    /// Has a fault that counts among those of `user` dealt with by a worker, or answers it in the turn
    /// of `caller`. Returns false where there is nothing to wait for.
    fn begin(&self, caller: u64, user: u64, fault: &PageFault) -> bool {
        // Before there is a region that somebody may want to end.
        let room = UniqueArc::<FaultWork>::new_uninit(GFP_KERNEL);
        // It may have waited, and the region be gone: its index is another's then.
        let mr = self.hw.regions.get(index_of(fault));
        let mr = mr.filter(|mr| owner_of(fault, key_and_user(mr)) == Some(user));
        let Some(mr) = mr else {
            resolve(&self.hw, caller, fault, true);
            return false;
        };
        let kept = mr.clone();
        let work = room.map_err(Error::from).and_then(|room| {
            room.pin_init_with(pin_init!(FaultWork {
                mr: kept,
                fault: *fault,
                user,
                work <- new_work!("ferrite_fault"),
            }))
            .map_err(|never| match never {})
        });
        match work {
            Ok(work) => {
                // A work item that was made just now is not queued yet.
                drop(mr.device().paging.deal_with(Arc::from(work)));
                true
            }
            Err(_) => {
                // Dealt with here the page might keep up everybody.
                resolve(&self.hw, caller, fault, true);
                false
            }
        }
    }

    /// A fault that counted among those of `user` was dealt with: the next one begins, as by
    /// [`Pager::begin`].
    fn finish(&self, caller: u64, user: u64) {
        loop {
            let next = self.backlogs.lock().finish(user);
            match next {
                Some(fault) if self.begin(caller, user, &fault) => return,
                Some(_) => {}
                None => return,
            }
        }
    }
}

impl WorkItem for Pager {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let taken = take_all(
            || this.closed.load(Relaxed) != 0,
            || this.hw.query(&Nothing),
            |fault| this.start(fault),
        );
        if let Err(error) = taken {
            if !this.hw.is_dead() {
                // It may have faults left, and says so only once.
                dev_err!(this.hw.pdev, "faults cannot be taken: {:?}\n", error);
                this.hw.fail();
            }
        }
    }
}

/// Leave to follow an advice later.
struct Later {
    pager: Arc<Pager>,
    user: u64,
}

impl Later {
    /// For the current process; `None` where there are too many of its user already.
    fn new(pager: &Arc<Pager>) -> Option<Self> {
        let user = user::accountable();
        // Without memory to note it he follows it himself.
        let node = RBTreeNodeReservation::new(GFP_KERNEL_ACCOUNT).ok()?;
        let admitted = pager.advices.lock().admit(user, node);
        admitted.then(|| Self {
            pager: pager.clone(),
            user,
        })
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        self.pager.advices.lock().finish(self.user);
    }
}

/// An advice that is followed later. It keeps the regions.
#[pin_data]
struct PrefetchWork {
    advice: Advice,
    _leave: Later,
    ranges: KVVec<(MrRef<Ferrite>, AdvisedRange)>,
    #[pin]
    work: Work<PrefetchWork>,
}

impl_has_work! {
    impl HasWork<Self> for PrefetchWork { self.work }
}

impl WorkItem for PrefetchWork {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        for (mr, range) in &this.ranges {
            if let Some(region) = mr.on_demand() {
                // What does not come now comes with its fault.
                let _ = region.prefetch(mr.device(), range, this.advice);
            }
        }
    }
}

impl OdpOps for Ferrite {
    /// Follows an advice of a process.
    fn advise_mr(pd: &Pd<Self>, advice: Advice, wait: bool, ranges: &[AdvisedRange]) -> Result {
        let dev = pd.device();
        if !dev.has(abi::FEATURE_ON_DEMAND) {
            return Err(errno::eopnotsupp());
        }
        let mut found = KVVec::with_capacity(ranges.len(), GFP_KERNEL_ACCOUNT)?;
        for range in ranges {
            let index = abi::Tag(range.lkey).index() as usize;
            let mr = dev.hw.regions.get(index).ok_or(EINVAL)?;
            let region = mr.on_demand().ok_or(EINVAL)?;
            if mr.lkey() != range.lkey || region.pd != pd.number() {
                return Err(EINVAL);
            }
            if advice == Advice::PrefetchWrite && !region.writable {
                return Err(EPERM);
            }
            found.push((mr, *range), GFP_KERNEL_ACCOUNT)?;
        }
        let leave = if wait { None } else { Later::new(&dev.pager) };
        let Some(leave) = leave else {
            for (mr, range) in &found {
                let region = mr.on_demand().ok_or(EINVAL)?;
                region.prefetch(dev, range, advice)?;
            }
            return Ok(());
        };
        let work = Arc::pin_init(
            pin_init!(PrefetchWork {
                advice,
                _leave: leave,
                ranges: found,
                work <- new_work!("ferrite_prefetch"),
            }),
            GFP_KERNEL_ACCOUNT,
        )?;
        // A work item that was made just now is not queued yet.
        drop(dev.paging.follow(work));
        Ok(())
    }
}

#[kunit_tests(ferrite_odp_faults)]
mod tests {
    use super::*;
    use crate::{
        abi::Plain,
        kernel_ext::completion::Completion, //
    };
    use kernel::time::msecs_to_jiffies;

    fn fault(token: u32) -> PageFault {
        PageFault {
            token: token.into(),
            ..PageFault::zeroed()
        }
    }

    /// Has a fault admitted, as the pager does.
    fn admit(backlogs: &mut Backlogs, user: u64, token: u32) -> Result<Admission> {
        let mut room = Room::default();
        loop {
            match backlogs.admit(user, &fault(token), &mut room) {
                Ok(admission) => return Ok(admission),
                Err(lacking) => room.provide(lacking)?,
            }
        }
    }

    #[test]
    fn no_memory_is_allocated_where_faults_are_noted() -> Result {
        let mut backlogs = Backlogs::new(1000);
        let mut room = Room::default();
        for _ in 0..2 {
            let refused = backlogs.admit(1, &fault(0), &mut room);
            assert_eq!(refused, Err(Lacking::Backlog));
        }
        assert!(backlogs.users.is_empty());
        for _ in 0..MOST_FAULTS {
            assert_eq!(admit(&mut backlogs, 1, 0)?, Admission::Now);
        }
        // Room is asked for when there is none, and for twice as much each time.
        let mut asked = KVec::new();
        for token in 0..200 {
            while let Err(lacking) = backlogs.admit(1, &fault(token), &mut room) {
                asked.push(lacking, GFP_KERNEL)?;
                room.provide(lacking)?;
            }
        }
        assert_eq!(asked.first(), Some(&Lacking::Parked(MOST_FAULTS)));
        assert!(asked.len() <= 4);
        for token in 0..200 {
            let next = backlogs.finish(1).ok_or(ENOENT)?;
            assert_eq!(next.token, fault(token).token);
        }
        Ok(())
    }

    #[test]
    fn a_user_who_gives_no_pages_keeps_up_only_himself() -> Result {
        let most = 3 * MOST_FAULTS;
        let mut backlogs = Backlogs::new(most);
        // One whose pages never come has as many faults as he can have.
        for _ in 0..MOST_FAULTS {
            assert_eq!(admit(&mut backlogs, 1, 0)?, Admission::Now);
        }
        for number in 0..most {
            assert_eq!(admit(&mut backlogs, 1, number as u32)?, Admission::Later);
        }
        // What is more is from queue pairs that are gone, or made up.
        assert_eq!(admit(&mut backlogs, 1, 0)?, Admission::Never);
        // That is nothing to another.
        assert_eq!(admit(&mut backlogs, 2, 7)?, Admission::Now);
        assert!(backlogs.finish(2).is_none());
        // When they come each makes room for the next, in order.
        for number in 0..most {
            let next = backlogs.finish(1).ok_or(ENOENT)?;
            assert_eq!(next.token, fault(number as u32).token);
        }
        for _ in 0..MOST_FAULTS {
            assert!(backlogs.finish(1).is_none());
        }
        assert!(backlogs.users.is_empty());
        Ok(())
    }

    #[test]
    fn a_fault_is_of_the_region_that_the_device_meant_and_no_later_one() {
        let of = |index, instance| PageFault {
            tag: abi::Tag::new(index, instance).0,
            ..PageFault::zeroed()
        };
        let (first, second) = (of(7, 1), of(7, 2));
        assert_eq!(index_of(&first), index_of(&second));
        // While the first is registered, and when the second has its index.
        assert_eq!(owner_of(&first, Some((first.tag, 1000))), Some(1000));
        assert_eq!(owner_of(&first, Some((second.tag, 1001))), None);
        assert_eq!(owner_of(&second, Some((second.tag, 1001))), Some(1001));
        // One that is not of on-demand memory.
        assert_eq!(owner_of(&first, None), None);
    }

    #[test]
    fn what_the_device_says_does_not_size_what_waits() {
        assert_eq!(most_parked(100), 200);
        assert_eq!(most_parked((1 << 24) - 1), MOST_PARKED);
        assert_eq!(most_parked(u32::MAX), MOST_PARKED);
    }

    #[test]
    fn advices_of_a_user_keep_up_nobody_elses() -> Result {
        let node = || RBTreeNodeReservation::new(GFP_KERNEL);
        let mut advices = Advices::new();
        for _ in 0..MOST_ADVICES {
            assert!(advices.admit(1, node()?));
        }
        assert!(!advices.admit(1, node()?));
        assert!(advices.admit(2, node()?));
        advices.finish(1);
        assert!(advices.admit(1, node()?));
        assert!(!advices.admit(1, node()?));
        advices.finish(2);
        for _ in 0..MOST_ADVICES {
            advices.finish(1);
        }
        assert!(advices.users.is_empty());
        Ok(())
    }

    /// Work that says that it began, and waits for leave to end.
    #[pin_data]
    struct Step {
        #[pin]
        begun: Completion,
        #[pin]
        leave: Completion,
        #[pin]
        work: Work<Step>,
    }

    impl_has_work! {
        impl HasWork<Self> for Step { self.work }
    }

    impl Step {
        fn new() -> Result<Arc<Self>> {
            let step = pin_init!(Self {
                begun <- Completion::new(),
                leave <- Completion::new(),
                work <- new_work!("ferrite_step"),
            });
            Arc::pin_init(step, GFP_KERNEL)
        }

        /// Whether it begins, on however slow a machine.
        fn begins(&self) -> bool {
            self.begun.wait_timeout(msecs_to_jiffies(30_000))
        }

        /// Whether it is kept up for now.
        fn is_kept_up(&self) -> bool {
            !self.begun.wait_timeout(msecs_to_jiffies(500))
        }
    }

    impl WorkItem for Step {
        type Pointer = Arc<Self>;

        fn run(this: Arc<Self>) {
            this.begun.complete_all();
            this.leave.wait();
        }
    }

    #[test]
    fn pages_that_never_come_keep_up_no_other_kind_of_paging() -> Result {
        // As many as there can be at once, of which none ends.
        let queues = PagingQueues::with_workers(2)?;
        // All are made before the first is queued: the queues wait for what was queued, and that
        // for leave.
        let faults = [Step::new()?, Step::new()?, Step::new()?];
        let (taken, followed) = (Step::new()?, Step::new()?);
        for step in &faults {
            drop(queues.deal_with(step.clone()));
        }
        let full = [faults[0].begins(), faults[1].begins()];
        let kept_up = faults[2].is_kept_up();
        drop(queues.take(taken.clone()));
        drop(queues.follow(followed.clone()));
        let begun = [taken.begins(), followed.begins()];
        for step in [&faults[0], &faults[1], &faults[2], &taken, &followed] {
            step.leave.complete_all();
        }
        assert_eq!(full, [true; 2]);
        assert!(kept_up);
        assert_eq!(begun, [true; 2]);
        Ok(())
    }

    #[test]
    fn parked_faults_stay_in_order_while_others_come() -> Result {
        let mut backlog = Backlog::new();
        let mut room = KVVec::new();
        let mut expected = 0;
        for number in 0..1_000u32 {
            while let Err(lacking) = backlog.park(&fault(number), &mut room) {
                let Lacking::Parked(count) = lacking else {
                    return Err(EINVAL);
                };
                room = KVVec::with_capacity(count, GFP_KERNEL)?;
            }
            if number % 3 != 0 {
                let next = backlog.unpark().ok_or(ENOENT)?;
                assert_eq!(next.token, fault(expected).token);
                expected += 1;
            }
        }
        assert_eq!(backlog.parked(), 1_000 - expected as usize);
        // Room is used again.
        assert!(backlog.parked.len() <= 2 * backlog.parked() + 2);
        Ok(())
    }

    #[test]
    fn faults_are_taken_until_there_are_none_or_it_fails() {
        let batch = PageFaults::zeroed().faults.len() as u32;
        let with = |count| PageFaults {
            count,
            ..PageFaults::zeroed()
        };
        let run = |answers: &[Result<u32>]| {
            let (mut taken, mut started) = (0, 0);
            let result = take_all(
                || false,
                || {
                    taken += 1;
                    answers[taken - 1].map(with)
                },
                |_| started += 1,
            );
            (result, taken, started)
        };
        assert_eq!(run(&[Ok(batch), Ok(2)]), (Ok(()), 2, batch + 2));
        // What the device says is not believed.
        assert_eq!(run(&[Ok(batch + 1), Ok(0)]), (Ok(()), 2, batch));
        assert_eq!(run(&[Ok(batch), Err(EINVAL)]), (Err(EINVAL), 2, batch));
    }
}
