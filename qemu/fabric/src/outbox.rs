// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What waits for a port: frames, and grants of shortcuts with their
//! descriptors among them.

use crate::descriptors;
use crate::framing::Writer;
use crate::shortcut::{ShortcutId, GRANT_FDS};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Bytes of messages that wait beyond those of frames: far more than there are
/// for a port that reads what it answers.
const MESSAGES: usize = 64 * 1024;

/// A grant that is not sent yet.
struct Grant {
    /// Where in the stream its frame begins.
    position: u64,
    shortcut: ShortcutId,
    fds: [OwnedFd; GRANT_FDS],
}

/// Frames and grants in the order in which they are to be sent.
pub struct Outbox {
    frames: Writer,
    grants: VecDeque<Grant>,
    limit: usize,
}

impl Outbox {
    /// One that holds at most `limit` bytes of frames.
    pub fn new(limit: usize) -> Self {
        Self {
            frames: Writer::new(limit),
            grants: VecDeque::new(),
            limit,
        }
    }

    /// Appends a frame if then no more than `limit` bytes wait; `false` if it is
    /// lost.
    pub fn push_within(&mut self, frame: &[u8], limit: usize) -> bool {
        self.frames.push_within(frame, limit)
    }

    /// Appends a message, also where there is no room for a frame; `false` if
    /// even so there is none.
    #[must_use]
    pub fn push_message(&mut self, message: &[u8]) -> bool {
        let room = self.len() <= self.limit + MESSAGES;
        if room {
            self.frames.push_always(message);
        }
        room
    }

    /// Whether the grant of a shortcut waits.
    pub fn has_grant(&self, shortcut: ShortcutId) -> bool {
        self.grants.iter().any(|grant| grant.shortcut == shortcut)
    }

    /// Grants that wait.
    pub fn grants(&self) -> usize {
        self.grants.len()
    }

    /// Appends the grant of a shortcut. Who has [many](Outbox::grants) gets none.
    pub fn push_grant(&mut self, message: &[u8], shortcut: ShortcutId, fds: [OwnedFd; GRANT_FDS]) {
        self.grants.push_back(Grant {
            position: self.frames.position() + self.frames.len() as u64,
            shortcut,
            fds,
        });
        self.frames.push_always(message);
    }

    /// Bytes waiting.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Writes as much as `stream` takes.
    ///
    /// The kernel limits how many descriptors a user may have under way, read by
    /// nobody. A grant that meets the limit is left out and put into `lost`: it
    /// is others that do not read, and everything else goes on.
    pub fn flush(&mut self, stream: &UnixStream, lost: &mut Vec<ShortcutId>) -> io::Result<()> {
        loop {
            let Some(grant) = self.grants.front() else {
                return self.frames.flush(&mut &*stream).map(|_| ());
            };
            if !self.frames.flush_up_to(grant.position, &mut &*stream)? {
                return Ok(());
            }
            let mut sink = WithDescriptors(stream, &grant.fds);
            match self.frames.flush_up_to(grant.position + 1, &mut sink) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    lost.push(grant.shortcut);
                    self.frames.skip_frame();
                }
                Err(error) => return Err(error),
            }
            self.grants.pop_front();
        }
    }
}

/// Sends descriptors with what is written.
struct WithDescriptors<'a>(&'a UnixStream, &'a [OwnedFd]);

impl io::Write for WithDescriptors<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        descriptors::send(self.0, bytes, self.1)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptors::Receiver;
    use crate::framing::Reader;
    use crate::shortcut::Message;
    use crate::switch::Mac;

    fn file(size: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, size).unwrap();
        file
    }

    fn grant(outbox: &mut Outbox, shortcut: ShortcutId) {
        let message = Message::Revoke(shortcut).to_frame(Mac([2; 6]));
        let size = shortcut.into();
        outbox.push_grant(&message, shortcut, [file(size), file(size)]);
    }

    #[test]
    fn messages_that_nobody_reads_are_bounded() {
        let mut outbox = Outbox::new(1 << 16);
        while outbox.push_within(&[1; 1000], 1 << 16) {}
        let message = Message::Revoke(1).to_frame(Mac([2; 6]));
        let count = (0..1 << 20).take_while(|_| outbox.push_message(&message));
        assert!((500..2000).contains(&count.count()));
    }

    #[test]
    fn grants_go_in_their_places_with_their_descriptors() {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        b.set_nonblocking(true).unwrap();
        let mut outbox = Outbox::new(1 << 20);
        for number in 1..=20u8 {
            // More than the socket takes at once.
            assert!(outbox.push_within(&[number; 16_000], 1 << 20));
            grant(&mut outbox, number.into());
        }
        let mut reader = Reader::new();
        let mut fds = VecDeque::new();
        let (mut lost, mut expected) = (Vec::new(), 1..=20u8);
        let mut turn = 0;
        while !outbox.is_empty() || turn < 2 {
            turn = if outbox.is_empty() { turn + 1 } else { 0 };
            outbox.flush(&a, &mut lost).unwrap();
            while reader.fill(&mut Receiver::new(&b, &mut fds)).is_ok() {
                while let Some(frame) = reader.next_frame().unwrap() {
                    if let Some((_, message)) = Message::parse(frame) {
                        let Message::Revoke(id) = message else {
                            panic!("{message:?}")
                        };
                        for fd in fds.drain(..GRANT_FDS) {
                            assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, i64::from(id));
                        }
                    } else {
                        assert_eq!(Some(frame[0]), expected.next());
                    }
                }
            }
        }
        assert_eq!((lost, expected.next()), (vec![], None));
        assert!(fds.is_empty());
    }
}
