// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two processes that do not trust each other wake each other.
//!
//! Each has one end of a pair of sockets. An end is an open file of its own, so
//! that what the other process does to its end (`O_NONBLOCK`, say) is no matter
//! here; and whether a call may wait is said with each call. An eventfd would be
//! one open file for both: whoever has it can make writes wait, and fill it.

use crate::descriptors;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

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
    adopt(&a)?;
    adopt(&b)?;
    Ok([a, b])
}

/// Makes an end that was received ready: refuses what cannot be one, and has the
/// kernel refuse descriptors that are sent to it, where it can. One that nobody
/// wants would be closed here, and to close it may take long.
pub fn adopt(end: impl AsFd) -> io::Result<()> {
    use rustix::net::sockopt;
    if sockopt::socket_domain(&end)? != AddressFamily::UNIX
        || sockopt::socket_type(&end)? != SocketType::STREAM
    {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "the socket to wake by is of another kind",
        ));
    }
    // An older kernel does not know how, and the end then works all the same.
    descriptors::refuse(&end);
    Ok(())
}

/// Wakes whoever waits for the other end; never waits.
pub fn signal(end: impl AsFd) {
    // It fails if there is no room, and then there is something to wake the
    // other; or if the other is gone.
    let _ = rustix::net::send(end, &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

/// Takes what the other has signalled; never waits.
///
/// What comes later is another event (an edge), also if this did not take all:
/// only the other's own signals can be in the way of that.
pub fn drain(end: impl AsFd) {
    let mut bytes = [0; DRAIN];
    // Whether there was something is no matter.
    let _ = rustix::net::recv(end, &mut bytes, RecvFlags::DONTWAIT);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{poll, PollFd, PollFlags, Timespec};
    use rustix::fs::OFlags;
    use std::sync::mpsc;
    use std::time::Duration;

    fn is_readable(end: &OwnedFd) -> bool {
        let mut fds = [PollFd::new(end, PollFlags::IN)];
        let now = Timespec::default();
        poll(&mut fds, Some(&now)).unwrap();
        fds[0].revents().contains(PollFlags::IN)
    }

    #[test]
    fn a_signal_is_seen_until_it_is_taken() {
        let [a, b] = pair().unwrap();
        assert!(!is_readable(&b));
        signal(&a);
        signal(&a);
        assert!(is_readable(&b));
        assert!(!is_readable(&a));
        drain(&b);
        assert!(!is_readable(&b));
        // Nothing to take.
        drain(&b);
        signal(&b);
        assert!(is_readable(&a));
    }

    #[test]
    fn nothing_that_the_other_does_makes_a_call_wait() {
        let [a, b] = pair().unwrap();
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
            drain(&a);
            assert!(is_readable(&b));
            drop(b);
            // The other is gone: no error that ends the process.
            signal(&a);
            drain(&a);
            done.send(()).unwrap();
        });
        let patience = Duration::from_secs(20);
        finished.recv_timeout(patience).expect("a call waits");
    }

    #[test]
    fn descriptors_are_refused_where_the_kernel_can() {
        let [a, b] = pair().unwrap().map(std::os::unix::net::UnixStream::from);
        let can = descriptors::are_refused(&b);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(descriptors::send(&a, b"x", &[file]).is_err(), can);
        drain(&b);
    }

    #[test]
    fn an_end_is_a_socket_of_the_right_kind() {
        assert!(adopt(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(adopt(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
        assert!(adopt(std::os::unix::net::UnixDatagram::unbound().unwrap()).is_err());
        assert!(adopt(std::net::TcpListener::bind("127.0.0.1:0").unwrap()).is_err());
    }
}
