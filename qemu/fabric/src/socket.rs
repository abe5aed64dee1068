// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening unix sockets with errors that say what to do.

use crate::connection::Connection;
use crate::descriptors;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A listening socket that removes its file when dropped.
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
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
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path)
                        .map_err(|error| named(error, "cannot remove the stale socket"))?;
                }
                Err(error) => return Err(named(error, "cannot tell whether the socket is in use")),
                Ok(_) => {
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
        // Nothing can be done about a failure, and the next run copes with it.
        let _ = fs::remove_file(&self.path);
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
    fn a_file_that_is_no_socket_is_left_alone() {
        let path = scratch("file");
        fs::write(&path, b"precious").unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        fs::remove_file(&path).unwrap();
    }
}
