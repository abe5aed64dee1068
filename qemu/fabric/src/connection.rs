// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Connections of processes that are not trusted: nothing that such a process
//! sends makes a call here wait.

use crate::closer;
use crate::descriptors;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

/// Who connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owner {
    /// The number of the user here; see [`Owner::user`].
    pub uid: u32,
    /// The process, if it has a number here: it has none where it is not in
    /// this process' PID namespace.
    pub pid: Option<i32>,
}

impl Owner {
    /// The user, if it is known who that is: all those without a number here
    /// have the same.
    pub fn user(&self) -> Option<u32> {
        (Some(self.uid) != overflow_user()).then_some(self.uid)
    }
}

/// The number that users have here who have none in this user namespace; `None`
/// if all have one.
pub fn overflow_user() -> Option<u32> {
    static NUMBER: OnceLock<Option<u32>> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        // Without an answer there may be such users.
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        if covers_all(&map) {
            return None;
        }
        let number = fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
        let number = number.and_then(|number| number.trim().parse().ok());
        Some(number.unwrap_or(DEFAULT_OVERFLOW))
    })
}

/// What the kernel takes for the number of the others unless it is told.
const DEFAULT_OVERFLOW: u32 = 65534;

/// Whether all numbers of users are in the map of a user namespace: lines of the
/// first here, the first outside, and how many.
fn covers_all(map: &str) -> bool {
    let count = |line: &str| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok();
    // The last number is no user's.
    map.lines().filter_map(count).sum::<u64>() >= u64::from(u32::MAX)
}

/// Who connected to the other end of a socket. The bindings at hand take for
/// granted that every process has a number.
pub fn owner(socket: impl AsFd) -> Option<Owner> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the pointers are to `peer` and to its length, both of which
    // outlive the call; the kernel writes no more than that.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            std::ptr::from_mut(&mut peer).cast(),
            &mut length,
        )
    };
    (result == 0 && length as usize == size_of_val(&peer)).then_some(Owner {
        uid: peer.uid,
        pid: (peer.pid > 0).then_some(peer.pid),
    })
}

/// A connection on which bytes come, but no descriptors.
///
/// A descriptor that is received is closed here, and what that means has been
/// chosen by the sender (see [`closer`]). The kernel does it even for those that
/// nobody asked for, in the middle of a read. So reads fail before they
/// take one, and the socket, with what is in it, is closed elsewhere.
#[derive(Debug)]
pub struct Connection {
    /// Taken in `drop` alone.
    stream: ManuallyDrop<UnixStream>,
    /// The kernel lets nobody send descriptors.
    refused: bool,
    owner: Option<Owner>,
}

impl Connection {
    /// A connection that was just accepted.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        // A byte out of band would hide from a peek what came with it.
        rustix::net::sockopt::set_socket_oobinline(&stream, true)?;
        let connection = Self {
            refused: descriptors::are_refused(&stream),
            owner: owner(&stream),
            stream: ManuallyDrop::new(stream),
        };
        connection.stream.set_nonblocking(true)?;
        Ok(connection)
    }

    /// The process that connected, if it is known.
    pub fn owner(&self) -> Option<Owner> {
        self.owner
    }

    /// The user who connected, if it is known who that is.
    pub fn user(&self) -> Option<u32> {
        self.owner.and_then(|owner| owner.user())
    }

    /// Whether the other side has left again, and nothing came from it.
    pub fn is_over(&self) -> bool {
        matches!(descriptors::peek(self, &mut [0]), Ok(0))
    }

    /// The socket, for everything but reading.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }
}

impl Read for Connection {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut stream = self.stream();
        if self.refused {
            return stream.read(buffer);
        }
        let count = descriptors::peek(stream, buffer)?;
        // More may be there by now, and with a descriptor.
        stream.read(&mut buffer[..count])
    }
}

impl Write for Connection {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream().as_fd()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: the value is being dropped, so that nobody uses the field after this.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        // Otherwise there are no descriptors in it.
        if !self.refused {
            // The other side is told at once, whenever it is closed.
            let _ = stream.shutdown(Shutdown::Both);
            // Nothing more comes then, and where nothing is there is no descriptor.
            if !matches!(descriptors::peek(&stream, &mut [0]), Ok(0)) {
                closer::close(stream.into());
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::time::{Duration, Instant};

    /// What a close may wait for without that anybody notices: much less than that of [`lingering`], and much more than
    /// a machine that is busy makes anybody wait.
    pub(crate) const NOTICED: Duration = Duration::from_secs(8);

    /// A socket whose last close takes many seconds, and who does not read from it.
    pub(crate) fn lingering() -> (OwnedFd, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (silent, _) = listener.accept().unwrap();
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(12))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        (socket.into(), silent)
    }

    /// The other side is told at once: of the end, or, if the rest is closed by
    /// now, of what it sent and nobody read.
    pub(crate) fn assert_told(mut stream: &UnixStream) {
        match stream.read(&mut [0; 1]) {
            Ok(count) => assert_eq!(count, 0),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
        }
    }

    fn send_lingering(stream: &UnixStream) -> TcpStream {
        let (socket, silent) = lingering();
        assert_eq!(descriptors::send(stream, b"x", &[socket]).unwrap(), 1);
        silent
    }

    #[test]
    fn such_a_socket_does_make_a_close_wait() {
        let (socket, _silent) = lingering();
        let start = Instant::now();
        drop(socket);
        assert!(start.elapsed() >= NOTICED);
    }

    #[test]
    fn a_descriptor_makes_nobody_wait() {
        // Behind bytes that are good, in the first of them, and never read at all.
        for good in [3, 0] {
            let (a, b) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(b).unwrap();
            assert!(!connection.refused);
            (&a).write_all(&vec![1; good]).unwrap();
            let start = Instant::now();
            let _silent = send_lingering(&a);
            let error = connection.read(&mut [0; 64]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            drop(connection);
            let (a, b) = UnixStream::pair().unwrap();
            let connection = Connection::new(b).unwrap();
            let _silent = send_lingering(&a);
            drop(connection);
            assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
            assert_told(&a);
        }
    }

    #[test]
    fn one_in_which_nothing_lies_waits_for_no_other() {
        // Nobody closes anything for some seconds.
        let stuck: Vec<TcpStream> = (0..closer::MAX_THREADS)
            .map(|_| {
                let (a, b) = UnixStream::pair().unwrap();
                let connection = Connection::new(b).unwrap();
                let silent = send_lingering(&a);
                drop(connection);
                silent
            })
            .collect();
        let before = closer::pending();
        for number in 0..200 {
            let (a, b) = UnixStream::pair().unwrap();
            let connection = Connection::new(b).unwrap();
            assert!(!connection.is_over());
            if number % 2 == 0 {
                drop(a);
                assert!(connection.is_over());
                drop(connection);
            } else {
                drop(connection);
                assert_told(&a);
            }
        }
        // Other tests leave a few.
        assert!(closer::pending() < before + 100);
        drop(stuck);
    }

    #[test]
    fn a_user_without_a_number_here_is_not_known() {
        assert!(covers_all("         0          0 4294967295\n"));
        assert!(covers_all("0 5 10\n10 0 5\n15 15 4294967280\n"));
        for map in ["", "0 0 1\n", "0 1000 1\n1 100000 65536\n", "what is this"] {
            assert!(!covers_all(map), "{map}");
        }
    }

    #[test]
    fn a_byte_out_of_band_is_one_as_all_others() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
        let (a, b) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(b).unwrap();
        rustix::net::send(&a, b"x", SendFlags::OOB).unwrap();
        let mut buffer = [0; 64];
        assert_eq!(connection.read(&mut buffer).unwrap(), 1);
        assert_eq!(buffer[0], b'x');
        // Nor does it bring a descriptor past the peek.
        let (socket, _silent) = lingering();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [socket.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let byte = [io::IoSlice::new(b"x")];
        rustix::net::sendmsg(&a, &byte, &mut control, SendFlags::OOB).unwrap();
        drop(socket);
        (&a).write_all(b"behind it").unwrap();
        let start = Instant::now();
        let error = connection.read(&mut buffer).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        drop(connection);
        assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
    }

    #[test]
    fn bytes_come_as_they_were_sent() {
        for refuse in [false, true] {
            let (mut a, b) = UnixStream::pair().unwrap();
            let can = refuse && descriptors::refuse(&b);
            let mut connection = Connection::new(b).unwrap();
            assert_eq!(connection.refused, can);
            let mut received = Vec::new();
            for piece in [&b"one"[..], b"two", b"three"] {
                a.write_all(piece).unwrap();
                let mut buffer = [0; 4];
                while let Ok(count) = connection.read(&mut buffer) {
                    received.extend_from_slice(&buffer[..count]);
                }
            }
            assert_eq!(received, b"onetwothree");
            drop(a);
            assert_eq!(connection.read(&mut [0; 4]).unwrap(), 0);
            assert!(connection.owner().is_some());
        }
    }
}
