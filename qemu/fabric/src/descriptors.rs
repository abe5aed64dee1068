// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading and writing a unix socket on which descriptors travel beside bytes.
//!
//! Descriptors arrive no later than the first of the bytes they were sent with.
//! So a sender attaches them to whatever it writes next, and a receiver takes
//! them from its queue when it reads the message that speaks of them. Which is
//! whose is known by their order alone: where one is lost, the connection is of
//! no use any more.

use crate::shortcut::{GRANT_FDS, MAX_SHORTCUTS};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Descriptors that one write carries at most.
const AT_ONCE: usize = 4;
/// Descriptors that are kept until somebody takes them: those of all shortcuts
/// that a port may have, whose messages may be far behind.
const KEPT: usize = MAX_SHORTCUTS * GRANT_FDS;

/// The reading side.
pub struct Receiver<'a> {
    stream: &'a UnixStream,
    received: &'a mut VecDeque<OwnedFd>,
}

impl<'a> Receiver<'a> {
    /// Reads from `stream` and puts descriptors into `received`.
    pub fn new(stream: &'a UnixStream, received: &'a mut VecDeque<OwnedFd>) -> Self {
        Self { stream, received }
    }
}

impl Read for Receiver<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::net::recvmsg(
            self.stream,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for ancillary in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = ancillary {
                self.received.extend(fds);
            }
        }
        // The kernel drops those for which there is no room or no number left.
        if message.flags.contains(ReturnFlags::CTRUNC) || self.received.len() > KEPT {
            self.received.clear();
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "more descriptors than can be taken",
            ));
        }
        Ok(message.bytes)
    }
}

/// The writing side.
pub struct Sender<'a> {
    stream: &'a UnixStream,
    /// What is to be sent, a set with each write.
    waiting: &'a mut VecDeque<Vec<OwnedFd>>,
}

impl<'a> Sender<'a> {
    /// Writes to `stream`, and with it what is in `waiting`.
    pub fn new(stream: &'a UnixStream, waiting: &'a mut VecDeque<Vec<OwnedFd>>) -> Self {
        Self { stream, waiting }
    }
}

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(fds) = self.waiting.front() else {
            return self.stream.write(bytes);
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let count = rustix::net::sendmsg(
            self.stream,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?;
        self.waiting.pop_front();
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_arrive_in_order_with_the_bytes_they_belong_to() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = || rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let mut waiting = VecDeque::from([vec![file(), file(), file()], vec![file()]]);
        for (index, fds) in waiting.iter().enumerate() {
            for fd in fds {
                rustix::fs::ftruncate(fd, index as u64 + 1).unwrap();
            }
        }
        let mut sender = Sender::new(&a, &mut waiting);
        for bytes in [b"one", b"two", b"end"] {
            assert_eq!(sender.write(bytes).unwrap(), 3);
        }
        let mut received = VecDeque::new();
        let mut bytes = Vec::new();
        while bytes.len() < 9 {
            let mut buffer = [0; 64];
            let mut receiver = Receiver::new(&b, &mut received);
            let count = receiver.read(&mut buffer).unwrap();
            bytes.extend_from_slice(&buffer[..count]);
            if bytes.len() >= 3 {
                assert!(received.len() >= 3);
            }
        }
        assert_eq!(bytes, b"onetwoend");
        let sizes: Vec<i64> = received
            .iter()
            .map(|fd| rustix::fs::fstat(fd).unwrap().st_size)
            .collect();
        assert_eq!(sizes, [1, 1, 1, 2]);
    }

    /// One byte with `count` descriptors.
    fn send(stream: &UnixStream, count: usize) {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(&[0])];
        rustix::net::sendmsg(stream, &bytes, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn none_is_lost_without_an_error() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut received = VecDeque::new();
        send(&a, AT_ONCE);
        // The buffer is rounded up, and may have room for some more than it is made for.
        send(&a, 4 * AT_ONCE);
        let mut read = || Receiver::new(&b, &mut received).read(&mut [0; 64]);
        assert_eq!(read().unwrap(), 1);
        assert!(read().is_err(), "the kernel dropped one");
        assert!(received.is_empty());
        let (a, b) = UnixStream::pair().unwrap();
        for _ in 0..KEPT {
            send(&a, 1);
            let read = Receiver::new(&b, &mut received).read(&mut [0; 64]);
            assert_eq!(read.unwrap(), 1);
        }
        assert_eq!(received.len(), KEPT);
        send(&a, 1);
        assert!(Receiver::new(&b, &mut received).read(&mut [0; 64]).is_err());
    }
}
