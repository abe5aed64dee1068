// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unix sockets on which descriptors travel beside bytes, or must not.
//!
//! Descriptors arrive with the first of the bytes they were sent with. A
//! receiver takes them from its queue when it reads the message that speaks of
//! them. Which is whose is known by their order alone: where one is lost, the
//! connection is of no use any more.

use crate::shortcut::{GRANT_FDS, MAX_SHORTCUTS};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// Descriptors that one write carries at most.
const AT_ONCE: usize = 4;
/// Descriptors that are kept until somebody takes them: those of all shortcuts
/// that a port may have, whose messages may be far behind.
const KEPT: usize = MAX_SHORTCUTS * GRANT_FDS;

/// `SO_PASSRIGHTS` of Linux 6.16, not yet in the libraries.
const SO_PASSRIGHTS: libc::c_int = 83;

/// The reading side, where descriptors are expected.
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

/// Sends bytes with descriptors, which go with the first of them.
pub fn send(stream: &UnixStream, bytes: &[u8], fds: &[impl AsFd]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(AT_ONCE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let slices = [IoSlice::new(bytes)];
    let count = rustix::net::sendmsg(stream, &slices, &mut control, SendFlags::NOSIGNAL)?;
    Ok(count)
}

/// Copies what can be read, and leaves it there; an error if it comes with
/// descriptors. Never waits.
pub fn peek(stream: impl AsFd, buffer: &mut [u8]) -> io::Result<usize> {
    // The kernel takes descriptors out again for which there is no room, and
    // says so; those in the socket stay what they are.
    let message = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(buffer)],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a descriptor that nobody asked for",
        ));
    }
    Ok(message.bytes)
}

/// The memory that what was sent by this socket takes until it is received: no
/// less than there are bytes.
pub fn unread(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes an integer to where the pointer says, and that
    // is `bytes`, which outlives the call.
    let result = unsafe {
        libc::ioctl(
            socket.as_fd().as_raw_fd(),
            libc::TIOCOUTQ,
            std::ptr::from_mut(&mut bytes),
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(bytes).unwrap_or(0))
}

/// Has the kernel refuse descriptors that are sent to this socket, or to those
/// that are accepted on it; `false` if it cannot (before Linux 6.16).
pub fn refuse(socket: impl AsFd) -> bool {
    let off: libc::c_int = 0;
    // SAFETY: the pointer and the length are those of `off`, which is read
    // before the call returns.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            std::ptr::from_ref(&off).cast(),
            size_of_val(&off) as libc::socklen_t,
        )
    };
    result == 0
}

/// Whether the kernel has refused descriptors for this socket since it was connected.
pub fn are_refused(socket: impl AsFd) -> bool {
    let mut taken: libc::c_int = 1;
    let mut length = size_of_val(&taken) as libc::socklen_t;
    // SAFETY: the pointers are to `taken` and to its length, both of which
    // outlive the call; the kernel writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            std::ptr::from_mut(&mut taken).cast(),
            &mut length,
        )
    };
    result == 0 && taken == 0
}

/// Has the kernel give this process as many descriptors as it may have, and says how many.
pub fn allow_descriptors() -> usize {
    use rustix::process::{getrlimit, setrlimit, Resource};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Who gets no more has those that there are.
    let _ = setrlimit(Resource::Nofile, limit);
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| {
        usize::try_from(limit).unwrap_or(usize::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn descriptors_arrive_in_order_with_the_bytes_they_belong_to() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = || rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let sets = [vec![file(), file(), file()], vec![file()]];
        for (index, fds) in sets.iter().enumerate() {
            for fd in fds {
                rustix::fs::ftruncate(fd, index as u64 + 1).unwrap();
            }
        }
        assert_eq!(send(&a, b"one", &sets[0]).unwrap(), 3);
        assert_eq!(send(&a, b"two", &sets[1]).unwrap(), 3);
        (&a).write_all(b"end").unwrap();
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
    fn send_many(stream: &UnixStream, count: usize) {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fds = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(&[0])];
        rustix::net::sendmsg(stream, &bytes, &mut control, SendFlags::empty()).unwrap();
    }

    #[test]
    fn what_is_refused_cannot_be_sent() {
        let directory = std::env::temp_dir();
        let path = directory.join(format!("ferrite-{}-refuse", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let can = refuse(&listener);
        let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut parts = version
            .split(['.', '-'])
            .map(|part| part.parse::<u32>().unwrap_or(0));
        assert_eq!(can, (parts.next(), parts.next()) >= (Some(6), Some(16)));
        let stream = UnixStream::connect(&path).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // Also before it is accepted.
        let sent = send(&stream, b"x", &[file]);
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(are_refused(&accepted), can);
        assert!(!are_refused(&stream));
        if can {
            assert_eq!(sent.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        } else {
            assert!(peek(&accepted, &mut [0; 8]).is_err());
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn none_is_lost_without_an_error() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut received = VecDeque::new();
        send_many(&a, AT_ONCE);
        // The buffer is rounded up, and may have room for some more than it is made for.
        send_many(&a, 4 * AT_ONCE);
        let mut read = || Receiver::new(&b, &mut received).read(&mut [0; 64]);
        assert_eq!(read().unwrap(), 1);
        assert!(read().is_err(), "the kernel dropped one");
        assert!(received.is_empty());
        let (a, b) = UnixStream::pair().unwrap();
        for _ in 0..KEPT {
            send_many(&a, 1);
            let read = Receiver::new(&b, &mut received).read(&mut [0; 64]);
            assert_eq!(read.unwrap(), 1);
        }
        assert_eq!(received.len(), KEPT);
        send_many(&a, 1);
        assert!(Receiver::new(&b, &mut received).read(&mut [0; 64]).is_err());
    }
}
