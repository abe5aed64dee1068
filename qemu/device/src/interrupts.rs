// SPDX-License-Identifier: Apache-2.0 OR MIT
//! MSI-X vectors as eventfds.
//!
//! The monitor emulates the MSI-X table and its masks; the device writes to a
//! vector's eventfd. While the monitor rebuilds its vectors some have none for
//! a moment: what is raised then is delivered as soon as they have one, as the
//! pending bits of a real table would.

use crate::vfio_user::VectorChange;
use std::os::fd::OwnedFd;

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
    pub fn change(&mut self, change: VectorChange) {
        match change {
            VectorChange::Assign { start, fds } => {
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
        interrupts.change(VectorChange::Assign {
            start: 1,
            fds: vec![a_end, b_end],
        });
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
        interrupts.change(VectorChange::Assign {
            start: 0,
            fds: vec![end],
        });
        assert_eq!(fired(&fd), 1);
        interrupts.change(VectorChange::RemoveAll);
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        interrupts.reset();
        let (fd, end) = pair();
        interrupts.change(VectorChange::Assign {
            start: 0,
            fds: vec![end],
        });
        assert_eq!(fired(&fd), 0);
    }

    #[test]
    fn without_bus_mastering_nothing_is_raised() {
        let mut interrupts = Interrupts::new(1);
        let (fd, end) = pair();
        interrupts.change(VectorChange::Assign {
            start: 0,
            fds: vec![end],
        });
        interrupts.raise(0);
        assert_eq!(fired(&fd), 0);
        // The monitor's own test does not depend on it.
        interrupts.change(VectorChange::Raise { start: 0, count: 1 });
        assert_eq!(fired(&fd), 1);
    }
}
