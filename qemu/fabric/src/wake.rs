// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two processes that do not trust each other wake each other.
//!
//! Each has one end of a pair of sockets. An end is an open file of its own, so
//! that what the other process does to its end (`O_NONBLOCK`, say) is no matter
//! here; and whether a call may wait is said with each call. An eventfd would be
//! one open file for both: whoever has it can make writes wait, and fill it.

use crate::closer;
use crate::descriptors;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes taken at once. One that keeps to the rules has few under way.
const DRAIN: usize = 4096;

/// The ends for two processes.
pub fn pair() -> io::Result<[OwnedFd; 2]> {
    let (a, b) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    // Before anybody has the other. An older kernel does not know how.
    descriptors::refuse(&a);
    descriptors::refuse(&b);
    Ok([a, b])
}

/// The end of this process.
///
/// The kernel refuses descriptors that are sent to it, where it can. Where it
/// cannot (before Linux 6.16), none is received and the end is closed elsewhere:
/// one that nobody wants would be closed here, and to close it may take long.
#[derive(Debug)]
pub struct End {
    /// Taken in `drop` alone.
    socket: ManuallyDrop<OwnedFd>,
    refused: bool,
}

impl End {
    /// Makes an end that was received ready, and refuses what cannot be one.
    pub fn adopt(socket: OwnedFd) -> io::Result<Self> {
        use rustix::net::sockopt;
        if sockopt::socket_domain(&socket)? != AddressFamily::UNIX
            || sockopt::socket_type(&socket)? != SocketType::STREAM
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the socket to wake by is of another kind",
            ));
        }
        // Whoever made it has refused them from the beginning, where that can be.
        let refused = descriptors::are_refused(&socket);
        // A byte out of band would hide from a peek what came with it.
        sockopt::set_socket_oobinline(&socket, true)?;
        Ok(Self {
            socket: ManuallyDrop::new(socket),
            refused,
        })
    }

    /// Takes what the other has signalled; never waits.
    ///
    /// What comes later is another event (an edge), also if this did not take
    /// all: only the other's own signals can be in the way of that.
    pub fn drain(&self) {
        let mut bytes = [0; DRAIN];
        let most = if self.refused {
            DRAIN
        } else {
            // With a descriptor in it, it stays there.
            descriptors::peek(self, &mut bytes).unwrap_or(0)
        };
        if most > 0 {
            // Whether there was something is no matter.
            let _ = rustix::net::recv(self, &mut bytes[..most], RecvFlags::DONTWAIT);
        }
    }
}

impl AsFd for End {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: the value is being dropped, so that nobody uses the field after this.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        // Otherwise there are no descriptors in it.
        if !self.refused {
            // The other side is told at once, whenever it is closed.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
            closer::close(socket);
        }
    }
}

/// Wakes whoever waits for the other end; never waits.
pub fn signal(end: impl AsFd) {
    // It fails if there is no room, and then there is something to wake the
    // other; or if the other is gone.
    let _ = rustix::net::send(end, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::tests::{assert_told, lingering, NOTICED};
    use rustix::event::{poll, PollFd, PollFlags, Timespec};
    use rustix::fs::OFlags;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    fn ends() -> [End; 2] {
        pair().unwrap().map(|end| End::adopt(end).unwrap())
    }

    fn is_readable(end: &End) -> bool {
        let mut fds = [PollFd::new(end, PollFlags::IN)];
        let now = Timespec::default();
        poll(&mut fds, Some(&now)).unwrap();
        fds[0].revents().contains(PollFlags::IN)
    }

    #[test]
    fn a_signal_is_seen_until_it_is_taken() {
        let [a, b] = ends();
        assert!(!is_readable(&b));
        signal(&a);
        signal(&a);
        assert!(is_readable(&b));
        assert!(!is_readable(&a));
        b.drain();
        assert!(!is_readable(&b));
        // Nothing to take.
        b.drain();
        signal(&b);
        assert!(is_readable(&a));
    }

    #[test]
    fn nothing_that_the_other_does_makes_a_call_wait() {
        let [a, b] = ends();
        // As if the other process had this very file, which it has not.
        for end in [&a, &b] {
            rustix::fs::fcntl_setfl(end, OFlags::empty()).unwrap();
        }
        let (done, finished) = mpsc::channel();
        std::thread::spawn(move || {
            // Nobody takes them; there is room for some hundred.
            for _ in 0..10_000 {
                signal(&a);
            }
            a.drain();
            assert!(is_readable(&b));
            drop(b);
            // The other is gone: no error that ends the process.
            signal(&a);
            a.drain();
            done.send(()).unwrap();
        });
        let patience = Duration::from_secs(120);
        finished.recv_timeout(patience).expect("a call waits");
    }

    #[test]
    fn descriptors_are_refused_where_the_kernel_can() {
        let [a, b] = pair().unwrap();
        let (a, b) = (UnixStream::from(a), End::adopt(b).unwrap());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(descriptors::send(&a, b"x", &[file]).is_err(), b.refused);
        b.drain();
    }

    #[test]
    fn one_that_takes_long_to_close_makes_nobody_wait() {
        // As of a kernel that cannot refuse them.
        let (a, b) = UnixStream::pair().unwrap();
        let b = End::adopt(b.into()).unwrap();
        assert!(!b.refused);
        let (socket, _silent) = lingering();
        signal(&a);
        let start = Instant::now();
        descriptors::send(&a, b"x", &[socket]).unwrap();
        b.drain();
        assert!(is_readable(&b));
        drop(b);
        assert!(start.elapsed() < NOTICED, "{:?}", start.elapsed());
        assert_told(&a);
    }

    #[test]
    fn an_end_is_a_socket_of_the_right_kind() {
        let local = "127.0.0.1:0";
        for other in [
            OwnedFd::from(std::fs::File::open("/dev/null").unwrap()),
            std::net::UdpSocket::bind(local).unwrap().into(),
            std::os::unix::net::UnixDatagram::unbound().unwrap().into(),
            std::net::TcpListener::bind(local).unwrap().into(),
        ] {
            assert!(End::adopt(other).is_err());
        }
    }
}
