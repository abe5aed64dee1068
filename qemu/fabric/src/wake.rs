// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How two processes that do not trust each other wake each other.
//!
//! Each has one end of a pair of sockets. An end is an open file of its own, so
//! that what the other process does to its end (`O_NONBLOCK`, say) is no matter
//! here; and whether a call may wait is said with each call. An eventfd would be
//! one open file for both: whoever has it can make writes wait, and fill it.

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// `SO_PASSRIGHTS` of Linux 6.16, not yet in the libraries.
const SO_PASSRIGHTS: libc::c_int = 83;
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
    refuse_descriptors(&a);
    refuse_descriptors(&b);
    Ok([a, b])
}

/// Has the kernel refuse descriptors that are sent to this end, where it can:
/// one that nobody wants is closed here, and to close it may take long.
pub fn refuse_descriptors(end: impl AsFd) {
    let off: libc::c_int = 0;
    // SAFETY: the pointer and the length are those of `off`, which is read
    // before the call returns. An older kernel does not know the option, and
    // the end then works all the same.
    unsafe {
        libc::setsockopt(
            end.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            std::ptr::from_ref(&off).cast(),
            size_of_val(&off) as libc::socklen_t,
        );
    }
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
        let [a, b] = pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
        let slices = [io::IoSlice::new(&[0])];
        let sent = rustix::net::sendmsg(&a, &slices, &mut control, SendFlags::empty());
        let version = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut parts = version
            .split(['.', '-'])
            .map(|part| part.parse().unwrap_or(0));
        let version = (parts.next().unwrap_or(0u32), parts.next().unwrap_or(0u32));
        if version >= (6, 16) {
            assert_eq!(sent, Err(rustix::io::Errno::PERM));
        }
        drain(&b);
    }
}
