// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interrupts as eventfds: MSI-X and MSI vectors, and the pin.
//!
//! The monitor emulates the MSI-X table and its masks; the device writes to a
//! vector's eventfd. While the monitor rebuilds its vectors some have none for
//! a moment: what is raised then is delivered as soon as they have one, as the
//! pending bits of a real table would.
//!
//! The pin is a level, of which an eventfd can only tell that it rose. So the
//! pin masks itself when it has told of its level, as vfio has it, and tells
//! again when it is unmasked, by a request or by another eventfd, and is still
//! asserted.

use crate::vfio_user::{Kind, PinChange, VectorChange};
use ferrite_abi::fold_message;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::Serialize;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// The most vectors that MSI has.
const MAX_MSI: u16 = 32;

/// The ways in which a function offers to interrupt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Entries of the MSI-X table, none without MSI-X.
    pub msix: u16,
    /// MSI vectors, a power of two; none without MSI.
    pub msi: u16,
    /// There is an interrupt pin.
    pub pin: bool,
}

impl Kinds {
    /// All of them, with so many vectors where there can be.
    pub fn all(vectors: u16) -> Self {
        Self {
            msix: vectors,
            // Of so many the next power of two below: no more than were asked for.
            msi: vectors
                .min(MAX_MSI)
                .checked_ilog2()
                .map_or(0, |log| 1 << log),
            pin: true,
        }
    }
}

/// How the guest wants to be interrupted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Not at all.
    #[default]
    None,
    /// By the pin.
    #[serde(rename = "intx")]
    Pin,
    /// By so many MSI vectors.
    Msi(u16),
    /// By the entries of the MSI-X table.
    MsiX,
}

#[derive(Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    pending: bool,
    raised: u64,
}

impl Vector {
    fn raise(&mut self) {
        self.raised += 1;
        match &self.eventfd {
            Some(eventfd) => signal(eventfd),
            None => self.pending = true,
        }
    }

    fn assign(&mut self, fd: OwnedFd) {
        if std::mem::take(&mut self.pending) {
            signal(&fd);
        }
        self.eventfd = Some(fd);
    }
}

#[derive(Default)]
struct Pin {
    /// Any pin bit is set.
    bits: bool,
    masked: bool,
    eventfd: Option<OwnedFd>,
    /// What the monitor unmasks by.
    unmask: Option<Arc<OwnedFd>>,
    raised: u64,
}

/// All interrupts of a device.
pub struct Interrupts {
    kinds: Kinds,
    msix: Vec<Vector>,
    msi: Vec<Vector>,
    pin: Pin,
    mode: Mode,
    enabled: bool,
    /// Counts what [`Pin::unmask`] has been.
    generation: u64,
}

impl Interrupts {
    /// Interrupts of these kinds, without eventfds.
    pub fn new(kinds: Kinds) -> Self {
        let vectors = |count| (0..count).map(|_| Vector::default()).collect();
        Self {
            kinds,
            msix: vectors(kinds.msix),
            msi: vectors(kinds.msi),
            pin: Pin::default(),
            mode: Mode::default(),
            enabled: false,
            generation: 0,
        }
    }

    /// The kinds there are.
    pub fn kinds(&self) -> Kinds {
        self.kinds
    }

    /// How the guest wants to be interrupted.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Raises a message, and with it the pin. An interrupt is a memory write, so
    /// bus mastering must be on.
    pub fn raise(&mut self, message: u16) {
        self.set_pin(true);
        let vectors = match self.mode {
            _ if !self.enabled => return,
            Mode::MsiX => &mut self.msix[..],
            Mode::Msi(enabled) => self.msi.split_at_mut(enabled.into()).0,
            Mode::Pin | Mode::None => return,
        };
        if let Some(vector) = fold_message(message, vectors.len() as u16) {
            vectors[usize::from(vector)].raise();
        }
    }

    /// Follows the Bus Master bit and the power state, and the mode. Returns
    /// whether messages are raised from now on that were lost before, or were
    /// raised in another way.
    pub fn follow(&mut self, bus_master: bool, mode: Mode) -> bool {
        let before = (self.enabled, self.mode);
        (self.enabled, self.mode) = (bus_master, mode);
        let changed = before != (bus_master, mode);
        if changed {
            // What waits for an eventfd is of another mode.
            self.forget_pending();
        }
        self.settle_pin();
        changed && bus_master && matches!(mode, Mode::Msi(_) | Mode::MsiX)
    }

    /// Whether any pin bit is set.
    pub fn set_pin(&mut self, bits: bool) {
        self.pin.bits = bits;
        self.settle_pin();
    }

    /// Tells of the level of the pin, unless that was done.
    fn settle_pin(&mut self) {
        let asserted = self.pin.bits && self.mode == Mode::Pin && self.enabled;
        let pin = &mut self.pin;
        if let (true, false, Some(eventfd)) = (asserted, pin.masked, &pin.eventfd) {
            pin.masked = true;
            pin.raised += 1;
            signal(eventfd);
        }
    }

    /// The guest has seen the interrupt of the pin, or the monitor takes others
    /// again.
    pub fn unmask_pin(&mut self) {
        self.pin.masked = false;
        self.settle_pin();
    }

    /// What the monitor unmasks the pin by, if that has changed since
    /// `generation`.
    pub fn unmask_event(&self, generation: &mut u64) -> Option<Option<Arc<OwnedFd>>> {
        let changed = *generation != self.generation;
        *generation = self.generation;
        changed.then(|| self.pin.unmask.clone())
    }

    /// Does what the monitor asks of vectors, whose descriptors are [prepared](prepare_vectors); the pin is one.
    pub fn change(&mut self, kind: Kind, change: VectorChange) {
        let vectors = match kind {
            Kind::Pin => {
                self.change_pin(change);
                return;
            }
            Kind::Msi => &mut self.msi,
            Kind::MsiX => &mut self.msix,
        };
        match change {
            VectorChange::Assign { start, fds } => {
                for (vector, fd) in vectors.iter_mut().skip(start).zip(fds) {
                    vector.assign(fd);
                }
            }
            VectorChange::Remove { start, count } => {
                for vector in vectors.iter_mut().skip(start).take(count) {
                    vector.eventfd = None;
                }
            }
            VectorChange::RemoveAll => {
                for vector in vectors {
                    vector.eventfd = None;
                }
            }
            VectorChange::Raise { start, count } => {
                for vector in vectors.iter().skip(start).take(count) {
                    vector.eventfd.iter().for_each(signal);
                }
            }
        }
    }

    fn change_pin(&mut self, change: VectorChange) {
        match change {
            VectorChange::Assign { fds, .. } => {
                // Who gives one has told nobody of the level yet.
                self.pin.eventfd = fds.into_iter().next_back();
                self.unmask_pin();
            }
            VectorChange::Remove { count: 0, .. } => {}
            VectorChange::Remove { .. } | VectorChange::RemoveAll => {
                self.pin.eventfd = None;
                self.set_unmask(None);
            }
            VectorChange::Raise { .. } => self.pin.eventfd.iter().for_each(signal),
        }
    }

    /// Does what the monitor asks of the mask of the pin; a descriptor is [prepared](prepare_pin).
    pub fn mask_pin(&mut self, change: PinChange) {
        match change {
            PinChange::Mask => self.pin.masked = true,
            PinChange::Unmask => self.unmask_pin(),
            PinChange::UnmaskBy(fd) => self.set_unmask(fd),
        }
    }

    fn set_unmask(&mut self, fd: Option<OwnedFd>) {
        self.generation += 1;
        self.pin.unmask = fd.map(Arc::new);
    }

    /// Forgets what is pending. Eventfds stay: the monitor does not hand them
    /// over again after a reset.
    pub fn reset(&mut self) {
        self.forget_pending();
        self.set_pin(false);
    }

    /// Lets go of all eventfds: the monitor that has given them is gone.
    pub fn release(&mut self) {
        for vector in self.msix.iter_mut().chain(&mut self.msi) {
            vector.eventfd = None;
        }
        self.pin.eventfd = None;
        self.pin.masked = false;
        self.set_unmask(None);
        self.reset();
    }

    fn forget_pending(&mut self) {
        for vector in self.msix.iter_mut().chain(&mut self.msi) {
            vector.pending = false;
        }
    }

    /// How often each was raised.
    pub fn counters(&self) -> Counters {
        let raised = |vectors: &[Vector]| vectors.iter().map(|vector| vector.raised).collect();
        let mut counters = Counters {
            mode: self.mode,
            total: 0,
            vectors: raised(&self.msix),
            msi: raised(&self.msi),
            intx: self.pin.raised,
        };
        let messages = counters.vectors.iter().chain(&counters.msi);
        counters.total = messages.sum::<u64>() + counters.intx;
        counters
    }
}

/// How often interrupts were raised, and how they are.
#[derive(Debug, Serialize)]
pub struct Counters {
    /// How the guest wants to be interrupted.
    pub mode: Mode,
    /// Of all kinds.
    pub total: u64,
    /// By each entry of the MSI-X table.
    pub vectors: Vec<u64>,
    /// By each MSI vector.
    pub msi: Vec<u64>,
    /// By the pin: how often the monitor was told of its level.
    pub intx: u64,
}

/// Refuses descriptors that are no eventfds. Before anything is locked that others wait for: a file of another kind
/// takes as long to be closed as whoever made it likes.
pub fn prepare_vectors(change: &VectorChange) -> io::Result<()> {
    match change {
        VectorChange::Assign { fds, .. } => fds.iter().try_for_each(prepare),
        VectorChange::Remove { .. } | VectorChange::RemoveAll | VectorChange::Raise { .. } => {
            Ok(())
        }
    }
}

/// The same of what is asked of the mask of the pin.
pub fn prepare_pin(change: &PinChange) -> io::Result<()> {
    match change {
        PinChange::UnmaskBy(fd) => fd.iter().try_for_each(prepare),
        PinChange::Mask | PinChange::Unmask => Ok(()),
    }
}

/// Refuses what is no eventfd, and has no write wait.
///
/// The monitor shares the open file and could let writes wait again, and fill the counter. That stops its own guest's
/// device, as it can by ending, and of a process with several functions the thread that looks after the port: a monitor
/// is trusted that far (SECURITY.md).
fn prepare(fd: &OwnedFd) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    // Where it cannot be told the monitor is believed.
    if let Ok(name) = std::fs::read_link(link) {
        if !name.to_string_lossy().starts_with("anon_inode:[eventfd") {
            return Err(Errno::INVAL.into());
        }
    }
    let flags = rustix::fs::fcntl_getfl(fd)?;
    if !flags.contains(OFlags::NONBLOCK) {
        rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    }
    Ok(())
}

fn signal(eventfd: &OwnedFd) {
    // It fails only if the counter is full, and then the reader is told anyway.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{eventfd, EventfdFlags};

    impl Interrupts {
        /// As the monitor asks it.
        fn asked(&mut self, kind: Kind, change: VectorChange) -> io::Result<()> {
            prepare_vectors(&change)?;
            self.change(kind, change);
            Ok(())
        }
    }

    fn pair() -> (OwnedFd, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let clone = fd.try_clone().unwrap();
        (fd, clone)
    }

    fn fired(fd: &OwnedFd) -> u64 {
        let mut value = [0; 8];
        match rustix::io::read(fd, &mut value) {
            Ok(8) => u64::from_ne_bytes(value),
            _ => 0,
        }
    }

    fn enabled(count: u16) -> Interrupts {
        let mut interrupts = Interrupts::new(Kinds::all(count));
        interrupts.follow(true, Mode::MsiX);
        interrupts
    }

    fn assign(interrupts: &mut Interrupts, kind: Kind, count: usize) -> Vec<OwnedFd> {
        let (own, fds) = (0..count).map(|_| pair()).unzip();
        let change = VectorChange::Assign { start: 0, fds };
        interrupts.asked(kind, change).unwrap();
        own
    }

    #[test]
    fn messages_fold_onto_the_vectors_that_the_guest_enabled() {
        let mut interrupts = Interrupts::new(Kinds::all(8));
        let msi = assign(&mut interrupts, Kind::Msi, 8);
        let msix = assign(&mut interrupts, Kind::MsiX, 8);
        for enabled in [1, 2, 4, 8] {
            interrupts.follow(true, Mode::Msi(enabled));
            for message in 0..32 {
                interrupts.raise(message);
                for (index, fd) in msi.iter().enumerate() {
                    let its = usize::from(message % enabled) == index;
                    assert_eq!(fired(fd), u64::from(its));
                }
            }
        }
        interrupts.follow(true, Mode::MsiX);
        interrupts.raise(8 + 3);
        assert_eq!(fired(&msix[3]), 1);
        assert!(msi.iter().all(|fd| fired(fd) == 0));
        for mode in [Mode::None, Mode::Pin] {
            interrupts.follow(true, mode);
            interrupts.raise(3);
            assert!(msix.iter().chain(&msi).all(|fd| fired(fd) == 0));
        }
    }

    #[test]
    fn the_pin_tells_once_and_again_when_it_is_unmasked_and_still_asserted() {
        let mut interrupts = Interrupts::new(Kinds::all(1));
        interrupts.follow(true, Mode::Pin);
        let fd = assign(&mut interrupts, Kind::Pin, 1).remove(0);
        interrupts.raise(0);
        interrupts.raise(0);
        assert_eq!(fired(&fd), 1);
        for _ in 0..3 {
            interrupts.unmask_pin();
            assert_eq!(fired(&fd), 1);
        }
        interrupts.set_pin(false);
        interrupts.unmask_pin();
        assert_eq!(fired(&fd), 0);
        interrupts.mask_pin(PinChange::Mask);
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        interrupts.mask_pin(PinChange::Unmask);
        assert_eq!(fired(&fd), 1);
        assert_eq!(interrupts.counters().intx, 5);
    }

    #[test]
    fn whatever_kept_the_pin_low_it_rises_when_that_ends() {
        let mut interrupts = Interrupts::new(Kinds::all(1));
        interrupts.follow(true, Mode::Pin);
        interrupts.raise(0);
        let fd = assign(&mut interrupts, Kind::Pin, 1).remove(0);
        assert_eq!(fired(&fd), 1, "an eventfd");
        for (bus_master, mode) in [(false, Mode::Pin), (true, Mode::None), (true, Mode::MsiX)] {
            interrupts.follow(bus_master, mode);
            interrupts.unmask_pin();
            assert_eq!(fired(&fd), 0);
            interrupts.follow(true, Mode::Pin);
            assert_eq!(fired(&fd), 1, "{mode:?}");
        }
        let fd = assign(&mut interrupts, Kind::Pin, 1).remove(0);
        assert_eq!(fired(&fd), 1, "another eventfd");
        // Who removes none keeps it.
        for (count, stays) in [(0, 1), (1, 0)] {
            let change = VectorChange::Remove { start: 0, count };
            interrupts.asked(Kind::Pin, change).unwrap();
            interrupts.unmask_pin();
            assert_eq!(fired(&fd), stays);
        }
    }

    #[test]
    fn what_unmasks_the_pin_is_told_of_once() {
        let mut interrupts = Interrupts::new(Kinds::all(1));
        let mut generation = 0;
        assert!(interrupts.unmask_event(&mut generation).is_none());
        let (_own, fd) = pair();
        let change = PinChange::UnmaskBy(Some(fd));
        prepare_pin(&change).unwrap();
        interrupts.mask_pin(change);
        assert!(interrupts.unmask_event(&mut generation).unwrap().is_some());
        assert!(interrupts.unmask_event(&mut generation).is_none());
        let file = std::fs::File::open("/dev/null").unwrap();
        let change = PinChange::UnmaskBy(Some(file.into()));
        assert!(prepare_pin(&change).is_err());
        interrupts
            .asked(Kind::Pin, VectorChange::RemoveAll)
            .unwrap();
        assert!(interrupts.unmask_event(&mut generation).unwrap().is_none());
    }

    #[test]
    fn a_change_of_mode_says_whether_messages_are_to_be_raised_again() {
        let mut interrupts = Interrupts::new(Kinds::all(4));
        assert!(!interrupts.follow(true, Mode::Pin));
        assert!(interrupts.follow(true, Mode::Msi(1)));
        assert!(interrupts.follow(true, Mode::Msi(4)));
        assert!(!interrupts.follow(true, Mode::Msi(4)));
        // Changed while it may not interrupt: raised again when it may.
        assert!(!interrupts.follow(false, Mode::Msi(4)));
        assert!(!interrupts.follow(false, Mode::MsiX));
        assert!(interrupts.follow(true, Mode::MsiX));
        assert!(!interrupts.follow(true, Mode::MsiX));
        // What waited for an eventfd is raised again by who knows of it.
        interrupts.raise(0);
        assert!(!interrupts.follow(true, Mode::None));
        let fds = assign(&mut interrupts, Kind::MsiX, 1);
        assert_eq!(fired(&fds[0]), 0);
    }

    #[test]
    fn a_vector_fires_its_own_eventfd_also_after_a_reset() {
        let mut interrupts = enabled(3);
        let ((a, a_end), (b, b_end)) = (pair(), pair());
        interrupts
            .asked(
                Kind::MsiX,
                VectorChange::Assign {
                    start: 1,
                    fds: vec![a_end, b_end],
                },
            )
            .unwrap();
        interrupts.raise(2);
        assert_eq!((fired(&a), fired(&b)), (0, 1));
        interrupts.reset();
        interrupts.raise(1);
        assert_eq!((fired(&a), fired(&b)), (1, 0));
        assert_eq!(interrupts.counters().vectors, [0, 1, 1]);
    }

    #[test]
    fn an_interrupt_waits_for_its_eventfd() {
        let mut interrupts = enabled(1);
        interrupts.raise(0);
        let (fd, end) = pair();
        interrupts
            .asked(
                Kind::MsiX,
                VectorChange::Assign {
                    start: 0,
                    fds: vec![end],
                },
            )
            .unwrap();
        assert_eq!(fired(&fd), 1);
        interrupts
            .asked(Kind::MsiX, VectorChange::RemoveAll)
            .unwrap();
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        interrupts.reset();
        let (fd, end) = pair();
        interrupts
            .asked(
                Kind::MsiX,
                VectorChange::Assign {
                    start: 0,
                    fds: vec![end],
                },
            )
            .unwrap();
        assert_eq!(fired(&fd), 0);
    }

    #[test]
    fn without_bus_mastering_nothing_is_raised() {
        let mut interrupts = Interrupts::new(Kinds::all(1));
        interrupts.follow(false, Mode::MsiX);
        let (fd, end) = pair();
        interrupts
            .asked(
                Kind::MsiX,
                VectorChange::Assign {
                    start: 0,
                    fds: vec![end],
                },
            )
            .unwrap();
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        // The monitor's own test does not depend on it.
        interrupts
            .asked(Kind::MsiX, VectorChange::Raise { start: 0, count: 1 })
            .unwrap();
        assert_eq!(fired(&fd), 1);
    }

    #[test]
    fn a_full_eventfd_that_blocks_does_not_stop_the_device() {
        let mut interrupts = enabled(1);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        interrupts
            .asked(
                Kind::MsiX,
                VectorChange::Assign {
                    start: 0,
                    fds: vec![fd],
                },
            )
            .unwrap();
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            interrupts.raise(0);
            done.send(()).unwrap();
        });
        let patience = std::time::Duration::from_secs(120);
        finished.recv_timeout(patience).expect("it waits");
    }

    #[test]
    fn only_eventfds_are_taken() {
        let mut interrupts = enabled(2);
        let (good, end) = pair();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![end, file.into()];
        assert!(interrupts
            .asked(Kind::MsiX, VectorChange::Assign { start: 0, fds })
            .is_err());
        interrupts.raise(0);
        assert_eq!(fired(&good), 0);
    }
}
