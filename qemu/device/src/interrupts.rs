// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MSI-X vectors as eventfds.
//!
//! The monitor emulates the MSI-X table and its masks; the device writes to a
//! vector's eventfd. While the monitor rebuilds its vectors some have none for
//! a moment: what is raised then is delivered as soon as they have one, as the
//! pending bits of a real table would.

use crate::vfio_user::VectorChange;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

#[derive(Default)]
struct Vector {
    eventfd: Option<OwnedFd>,
    pending: bool,
    raised: u64,
}

/// All vectors of a device.
pub struct Interrupts {
    vectors: Vec<Vector>,
    enabled: bool,
}

impl Interrupts {
    /// `count` vectors without eventfds.
    pub fn new(count: usize) -> Self {
        Self {
            vectors: (0..count).map(|_| Vector::default()).collect(),
            enabled: false,
        }
    }

    /// How many vectors there are.
    pub fn len(&self) -> usize {
        self.vectors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Raises a vector. An interrupt is a memory write, so bus mastering must
    /// be on; a vector that does not exist is ignored.
    pub fn raise(&mut self, vector: usize) {
        if !self.enabled {
            return;
        }
        if let Some(vector) = self.vectors.get_mut(vector) {
            vector.raised += 1;
            match &vector.eventfd {
                Some(eventfd) => signal(eventfd),
                None => vector.pending = true,
            }
        }
    }

    /// Follows the Bus Master bit.
    pub fn set_bus_master(&mut self, on: bool) {
        self.enabled = on;
    }

    /// Does what the monitor asks.
    pub fn change(&mut self, change: VectorChange) -> io::Result<()> {
        match change {
            VectorChange::Assign { start, fds } => {
                for fd in &fds {
                    prepare(fd)?;
                }
                for (vector, fd) in self.vectors.iter_mut().skip(start).zip(fds) {
                    if std::mem::take(&mut vector.pending) {
                        signal(&fd);
                    }
                    vector.eventfd = Some(fd);
                }
            }
            VectorChange::Remove { start, count } => {
                for vector in self.vectors.iter_mut().skip(start).take(count) {
                    vector.eventfd = None;
                }
            }
            VectorChange::RemoveAll => {
                for vector in &mut self.vectors {
                    vector.eventfd = None;
                }
            }
            VectorChange::Raise { start, count } => {
                for vector in self.vectors.iter().skip(start).take(count) {
                    if let Some(eventfd) = &vector.eventfd {
                        signal(eventfd);
                    }
                }
            }
        }
        Ok(())
    }

    /// Forgets what is pending. Eventfds stay: the monitor does not hand them
    /// over again after a reset.
    pub fn reset(&mut self) {
        for vector in &mut self.vectors {
            vector.pending = false;
        }
    }

    /// How often each vector was raised.
    pub fn counters(&self) -> Vec<u64> {
        self.vectors.iter().map(|vector| vector.raised).collect()
    }
}

/// Refuses what is no eventfd, and what a write could wait for.
///
/// The monitor shares the open file and could let writes wait again, and fill
/// the counter. It would only stop its own guest's device, as it can by ending.
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

    fn enabled(count: usize) -> Interrupts {
        let mut interrupts = Interrupts::new(count);
        interrupts.set_bus_master(true);
        interrupts
    }

    #[test]
    fn a_vector_fires_its_own_eventfd_also_after_a_reset() {
        let mut interrupts = enabled(3);
        let ((a, a_end), (b, b_end)) = (pair(), pair());
        interrupts
            .change(VectorChange::Assign {
                start: 1,
                fds: vec![a_end, b_end],
            })
            .unwrap();
        interrupts.raise(2);
        assert_eq!((fired(&a), fired(&b)), (0, 1));
        interrupts.reset();
        interrupts.raise(1);
        interrupts.raise(99);
        assert_eq!((fired(&a), fired(&b)), (1, 0));
        assert_eq!(interrupts.counters(), [0, 1, 1]);
    }

    #[test]
    fn an_interrupt_waits_for_its_eventfd() {
        let mut interrupts = enabled(1);
        interrupts.raise(0);
        let (fd, end) = pair();
        interrupts
            .change(VectorChange::Assign {
                start: 0,
                fds: vec![end],
            })
            .unwrap();
        assert_eq!(fired(&fd), 1);
        interrupts.change(VectorChange::RemoveAll).unwrap();
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        interrupts.reset();
        let (fd, end) = pair();
        interrupts
            .change(VectorChange::Assign {
                start: 0,
                fds: vec![end],
            })
            .unwrap();
        assert_eq!(fired(&fd), 0);
    }

    #[test]
    fn without_bus_mastering_nothing_is_raised() {
        let mut interrupts = Interrupts::new(1);
        let (fd, end) = pair();
        interrupts
            .change(VectorChange::Assign {
                start: 0,
                fds: vec![end],
            })
            .unwrap();
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        // The monitor's own test does not depend on it.
        interrupts
            .change(VectorChange::Raise { start: 0, count: 1 })
            .unwrap();
        assert_eq!(fired(&fd), 1);
    }

    #[test]
    fn a_full_eventfd_that_blocks_does_not_stop_the_device() {
        let mut interrupts = enabled(1);
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        interrupts
            .change(VectorChange::Assign {
                start: 0,
                fds: vec![fd],
            })
            .unwrap();
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            interrupts.raise(0);
            done.send(()).unwrap();
        });
        let patience = std::time::Duration::from_secs(10);
        finished.recv_timeout(patience).expect("it waits");
    }

    #[test]
    fn only_eventfds_are_taken() {
        let mut interrupts = enabled(2);
        let (good, end) = pair();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![end, file.into()];
        assert!(interrupts
            .change(VectorChange::Assign { start: 0, fds })
            .is_err());
        interrupts.raise(0);
        assert_eq!(fired(&good), 0);
    }
}
