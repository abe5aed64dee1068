// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A small process beside the device's, which hangs up for it where it cannot do so itself.
//!
//! A Unix socket that is closed with something unread in it is a connection reset to the peer, and
//! QEMU up to 11.1 at least ends on an assertion (`vfio_user_recv_hdr` sets an error twice) when it
//! reads one: the guest would vanish with its device. A process that is told to go sees to that
//! ([`Device::hang_up`](crate::function::Function::hang_up)); one that is killed, for lack of memory or
//! by whoever may, cannot. So another one has the same sockets, and reads nothing of them before
//! the first is gone. It has nothing that a guest or the wire could make it grow by.

use ferrite_fabric::connection::Connection;
use ferrite_fabric::descriptors::{self, Receiver};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What the program is started with as a keeper, and nothing else.
pub const OPTION: &str = "--keep";

/// For how long a keeper may take until it is one.
const BEGINNING: Duration = Duration::from_secs(10);

/// What a socket is that is given to the keeper: a byte beside it.
const DOOR: u8 = 0;
const CONNECTION: u8 = 1;

/// The keeper, as the device process sees it.
pub struct Keeper {
    /// It reads the end of this when this is dropped, as nobody is served any more, or when the process is gone.
    channel: UnixStream,
    /// It takes signals for what they are.
    has_begun: OnceLock<()>,
    /// Nobody waits for it: it goes after this process.
    _child: Child,
}

impl Keeper {
    /// Starts a keeper of this process, which has to be of this program.
    pub fn start() -> io::Result<Self> {
        let (channel, theirs) = UnixStream::pair()?;
        let child = Command::new("/proc/self/exe")
            .arg(OPTION)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // What is done to the device's group, by a terminal too, is not to be done to both.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            channel,
            has_begun: OnceLock::new(),
            _child: child,
        })
    }

    /// Keeps the socket on which monitors connect. From when this has succeeded on, a signal that tells all that
    /// is left of a device to go does not end the keeper before it has hung up.
    pub fn keep_door(&self, door: &UnixListener) -> io::Result<()> {
        // Once, for the first door of several.
        if self.has_begun.get().is_none() {
            self.wait_begun()?;
            let _ = self.has_begun.set(());
        }
        descriptors::send(&self.channel, &[DOOR], &[door]).map(drop)
    }

    /// Waits until the keeper has said that it takes such signals for what they are.
    fn wait_begun(&self) -> io::Result<()> {
        self.channel.set_read_timeout(Some(BEGINNING))?;
        (&self.channel).read_exact(&mut [0])
    }

    /// Keeps a connection that was accepted.
    pub fn keep(&self, connection: &UnixStream) -> io::Result<()> {
        descriptors::send(&self.channel, &[CONNECTION], &[connection]).map(drop)
    }
}

/// The sockets that are kept.
#[derive(Default)]
struct Kept {
    connections: Vec<UnixStream>,
    doors: Vec<UnixListener>,
}

impl Kept {
    /// Takes what comes by `channel` until it ends.
    fn take_from(&mut self, channel: &UnixStream) -> io::Result<()> {
        let mut received = VecDeque::new();
        let mut kind = [0];
        loop {
            match Receiver::new(channel, &mut received).read(&mut kind) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            // Where there are several functions, one may have had many monitors by now.
            self.connections.retain(|connection| !is_over(connection));
            for socket in received.drain(..) {
                match kind[0] {
                    DOOR => self.doors.push(socket.into()),
                    _ => self.connections.push(socket.into()),
                }
            }
        }
    }

    fn hang_up(self) {
        // All of them read the end before anything is taken off, which may take long.
        for connection in &self.connections {
            let _ = connection.shutdown(Shutdown::Both);
        }
        for door in &self.doors {
            let _ = close(door);
        }
        for door in self.doors {
            turn_away(&door);
        }
        for mut connection in self.connections {
            // Nothing more can arrive, so this ends; later than it should where a descriptor of the monitor's is in it whose
            // end takes long. Nobody waits for this.
            let _ = io::copy(&mut connection, &mut io::sink());
        }
    }
}

/// Whether both ends of a connection have hung up.
fn is_over(connection: &UnixStream) -> bool {
    use rustix::event::{poll, PollFd, PollFlags, Timespec};
    let mut polled = [PollFd::new(connection, PollFlags::empty())];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut polled, Some(&now)).is_ok() && polled[0].revents().contains(PollFlags::HUP)
}

/// Keeps the sockets of the process that has started this one, until it is gone, and hangs up.
pub fn run() -> io::Result<()> {
    // Whoever ends all that is left of a device, as service managers do, may come before it has hung up.
    let told = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&told))?;
    }
    let mut channel = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    channel.write_all(&[0])?;
    let mut kept = Kept::default();
    let result = kept.take_from(&channel);
    kept.hang_up();
    result
}

/// Nobody connects here any more, and who waits for somebody to does not.
pub fn close(door: &UnixListener) -> io::Result<()> {
    rustix::net::shutdown(door, rustix::net::Shutdown::Both)?;
    Ok(())
}

/// Hangs up on those that have connected and were not accepted. `door` is closed.
pub fn turn_away(door: &UnixListener) {
    if door.set_nonblocking(true).is_err() {
        return;
    }
    for (stream, _) in std::iter::from_fn(|| door.accept().ok()) {
        let _ = stream.shutdown(Shutdown::Both);
        // Whoever sent a descriptor is no monitor: that sends them when it is answered. It is not
        // waited for.
        if let Ok(mut stranger) = Connection::new(stream) {
            let _ = io::copy(&mut stranger, &mut io::sink());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_keeper_that_could_be_ended_by_a_signal_has_no_socket_yet() {
        let (channel, mut theirs) = UnixStream::pair().unwrap();
        let (door, _other) = UnixStream::pair().unwrap();
        let door = UnixListener::from(OwnedFd::from(door));
        let keeper = Keeper {
            channel,
            has_begun: OnceLock::new(),
            _child: Command::new("true").spawn().unwrap(),
        };
        let (done, finished) = mpsc::channel();
        let (gone, is_gone) = mpsc::channel();
        let keep = std::thread::spawn(move || {
            done.send(keeper.keep_door(&door).is_ok()).unwrap();
            // One that is gone is none.
            is_gone.recv().unwrap();
            keeper.keep_door(&door).is_err()
        });
        let early = finished.recv_timeout(Duration::from_millis(200));
        assert!(early.is_err(), "nobody was waited for");
        theirs.write_all(&[0]).unwrap();
        assert_eq!(finished.recv(), Ok(true));
        assert_eq!(theirs.read(&mut [0; 8]).unwrap(), 1);
        drop(theirs);
        gone.send(()).unwrap();
        assert!(keep.join().unwrap());
    }

    #[test]
    fn what_is_kept_ends_in_order_and_not_before() {
        let (mut monitor, connection) = UnixStream::pair().unwrap();
        let (channel, theirs) = UnixStream::pair().unwrap();
        monitor.write_all(&[1; 100_000]).unwrap();
        descriptors::send(&channel, &[CONNECTION], &[&connection]).unwrap();
        // The process that had it is gone, and with it what it had.
        drop(connection);
        let keeper = std::thread::spawn(move || {
            let mut kept = Kept::default();
            let result = kept.take_from(&theirs);
            kept.hang_up();
            result
        });
        monitor.write_all(&[1]).expect("nobody has hung up");
        drop(channel);
        keeper.join().unwrap().unwrap();
        assert_eq!(monitor.read(&mut [0; 1]).expect("the end"), 0);
    }
}
