// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening unix sockets with errors that say what to do.

use crate::connection::Connection;
use crate::descriptors;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// For how long a socket may be listened on by those that are about to end.
const PARTING: Duration = Duration::from_secs(1);

/// A listening socket that removes its file when dropped.
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Which file that was.
    file: Option<(u64, u64)>,
}

/// Device and number of the file at a path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// Connects; never waits. `WouldBlock` if somebody listens and has not accepted
/// others yet.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Connects to who listens, unless he hangs up at once: of a device that was killed its keeper may still have the
/// socket, and does that.
fn connect_to_who_stays(path: &Path) -> io::Result<OwnedFd> {
    let socket = connect(path)?;
    let mut waits = [PollFd::new(&socket, PollFlags::IN)];
    let patience = Timespec::try_from(PARTING).ok();
    rustix::event::poll(&mut waits, patience.as_ref())?;
    if waits[0].revents().contains(PollFlags::HUP) {
        return connect(path);
    }
    Ok(socket)
}

impl Listener {
    /// Listens on `path`.
    ///
    /// A socket file on which nobody listens is left from an earlier run and
    /// is replaced. One that somebody listens on, and anything that is not a
    /// socket, is an error that names the path.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error, what: &str| {
            io::Error::new(error.kind(), format!("{}: {what}: {error}", path.display()))
        };
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!("{}: exists and is not a socket", path.display()),
                ));
            }
            Ok(_) => match connect_to_who_stays(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path)
                        .map_err(|error| named(error, "cannot remove the stale socket"))?;
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(named(error, "cannot tell whether the socket is in use"));
                }
                _ => {
                    return Err(io::Error::new(
                        io::ErrorKind::AddrInUse,
                        format!("{}: another process listens on this socket", path.display()),
                    ));
                }
            },
            Err(_) => {}
        }
        let listener =
            UnixListener::bind(path).map_err(|error| named(error, "cannot listen here"))?;
        Ok(Self {
            listener,
            path: path.to_path_buf(),
            file: identity(path),
        })
    }

    /// For connections on which no descriptors come (see [`Connection`]).
    pub fn without_descriptors(self) -> io::Result<Self> {
        // Where the kernel cannot refuse them, each connection does.
        descriptors::refuse(&self.listener);
        self.listener.set_nonblocking(true)?;
        Ok(self)
    }

    /// Accepts such a connection; never waits.
    pub fn accept(&self) -> io::Result<Connection> {
        let (stream, _) = self.listener.accept()?;
        Connection::new(stream)
    }

    /// The listening socket itself.
    pub fn get(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another may listen there by now.
        if self.file.is_some() && identity(&self.path) == self.file {
            // Nothing can be done about a failure, and the next run copes with it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ferrite-{}-{name}", std::process::id()));
        let _ = fs::remove_file(&path);
        path
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_taken_one_is_not() {
        let path = scratch("stale");
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&path).unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("another process"));
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_of_another_is_left_alone() {
        let path = scratch("another");
        let first = Listener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn one_who_accepts_nobody_makes_nobody_wait() {
        let path = scratch("busy");
        let busy = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&busy, 0).unwrap();
        let _first = connect(&path).unwrap();
        let error = connect(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let (done, finished) = std::sync::mpsc::channel();
        let of = path.clone();
        std::thread::spawn(move || done.send(Listener::bind(&of).err().unwrap().kind()));
        let patience = std::time::Duration::from_secs(120);
        let kind = finished.recv_timeout(patience).expect("it waits");
        assert_eq!(kind, io::ErrorKind::AddrInUse);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_left_alone() {
        let path = scratch("file");
        fs::write(&path, b"precious").unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        fs::remove_file(&path).unwrap();
    }
}
