// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening unix sockets with errors that say what to do.

use crate::connection::Connection;
use crate::descriptors;
use rustix::fs::FlockOperation;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// A listening socket that removes its file when dropped.
pub struct Listener {
    listener: UnixListener,
    path: PathBuf,
    /// Which file that was.
    file: Option<String>,
    /// Given back last: nobody else listens at the path before.
    _lock: Lock,
}

/// Which file is at a path. A number may be that of another file later, which is not of the same time.
fn identity(path: &Path) -> Option<String> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some(format!(
        "{}{} {} {} {}\n",
        Lock::MARK,
        metadata.dev(),
        metadata.ino(),
        metadata.mtime(),
        metadata.mtime_nsec()
    ))
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

/// The right to listen at a path, and to replace what another who had it has left there: a file beside the socket that is
/// locked. Whoever wants to know whether somebody has it asks for the lock and not at the socket, where he would be
/// taken for one of those that the socket is for. The kernel gives the lock back however a process ends, and no other
/// process has it: a child's copy of the descriptor is closed as it begins.
struct Lock {
    file: File,
    path: PathBuf,
    /// What the last one who had it listened on ([`identity`]), if that is known.
    last: String,
}

impl Lock {
    /// What is in such a file, if there is anything, begins so.
    const MARK: &'static str = "ferrite socket ";
    /// And is no longer than this.
    const MOST: u64 = 200;

    /// The file of the socket at `path`.
    fn beside(path: &Path) -> PathBuf {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        name.into()
    }

    /// `WouldBlock` if another has it.
    fn take(path: PathBuf) -> io::Result<Self> {
        loop {
            let Some(file) = Self::open(&path)? else {
                continue;
            };
            Self::check(&file)?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            let Some(last) = Self::content(&file)? else {
                // What it is is not known, and it may be dear to somebody.
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "exists and is not the lock of a socket",
                ));
            };
            // Who had it may have removed it before it was locked here, and another may have made one since.
            if Self::is_at(&file, &path) {
                return Ok(Self { file, path, last });
            }
        }
    }

    /// The file, which is made where there is none; `None` where it came or went meanwhile.
    fn open(path: &Path) -> io::Result<Option<File>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        // Nobody waits for who has a pipe there, nor follows a link to another's file.
        options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        // One that is there is opened without a word of making it: in a folder for all, the kernel lets nobody have what is
        // another user's by that, not even root.
        match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => return result.map(Some),
        }
        // Who can open it can have the lock: whoever may not replace the socket has no use for it.
        match options.create_new(true).mode(0o600).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            result => result.map(Some),
        }
    }

    /// What is in the file is believed, and a socket removed by it: so nobody else may have written it, nor
    /// may it be that of another socket under one more name. In a folder for all anybody can make one.
    fn check(file: &File) -> io::Result<()> {
        const OTHERS_WRITE: u32 = 0o022;
        let metadata = file.metadata()?;
        // Of what is no file it is said that it is no lock.
        if !metadata.is_file() {
            return Ok(());
        }
        let own = [0, rustix::process::geteuid().as_raw()];
        let wrong = if !own.contains(&metadata.uid()) {
            format!(
                "belongs to user {}, not to this one or root",
                metadata.uid()
            )
        } else if metadata.mode() & OTHERS_WRITE != 0 {
            "may be written by others than its owner".into()
        // It has none where it was removed just now.
        } else if metadata.nlink() > 1 {
            format!("has {} names", metadata.nlink())
        } else {
            return Ok(());
        };
        let what = format!("it {wrong}: remove it, if nobody listens");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
    }

    /// What is in a file, if that is such a one.
    fn content(file: &File) -> io::Result<Option<String>> {
        if !file.metadata()?.is_file() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        file.take(Self::MOST).read_to_end(&mut bytes)?;
        let text = String::from_utf8(bytes).ok();
        Ok(text.filter(|text| text.is_empty() || text.starts_with(Self::MARK)))
    }

    /// Whether an open file is the one at a path.
    fn is_at(file: &File, path: &Path) -> bool {
        let of = |metadata: io::Result<fs::Metadata>| {
            metadata.map(|metadata| (metadata.dev(), metadata.ino()))
        };
        matches!(
            (of(file.metadata()), of(fs::symlink_metadata(path))),
            (Ok(one), Ok(other)) if one == other
        )
    }

    /// Notes what is listened on now.
    fn note(&self, socket: &str) {
        // Where this fails it is not known, as where somebody was killed just now, and is asked at the socket.
        let _ = self.file.set_len(0);
        let _ = self.file.write_all_at(socket.as_bytes(), 0);
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if Self::is_at(&self.file, &self.path) {
            // While it is locked: who has opened it meanwhile sees that it is gone. One that stays is no harm.
            let _ = fs::remove_file(&self.path);
        }
        // Not only by closing it: a process that is about to begin may still have the descriptor.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Listener {
    /// Listens on `path`, and has a file `path.lock` locked meanwhile.
    ///
    /// A socket file on which nobody listens is left from an earlier run and
    /// is replaced. One that somebody listens on, and anything that is not a
    /// socket, is an error that names the path.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let named = |error: io::Error, what: &str| {
            io::Error::new(error.kind(), format!("{}: {what}: {error}", path.display()))
        };
        let in_use = || {
            io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("{}: another process listens on this socket", path.display()),
            )
        };
        let beside = Lock::beside(path);
        let lock = Lock::take(beside.clone()).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => in_use(),
            _ => named(error, &format!("cannot lock {}", beside.display())),
        })?;
        match fs::symlink_metadata(path) {
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!("{}: exists and is not a socket", path.display()),
                ));
            }
            Ok(_) => {
                // What the last one made who had the lock is left, also where a process has it open that was to
                // outlive him. Of any other only who listens there can tell, and he knows nothing of the lock.
                let left = identity(path).is_some_and(|found| found == lock.last);
                if !left {
                    match connect(path).map_err(|error| (error.kind(), error)) {
                        Err((io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound, _)) => {}
                        Ok(_) | Err((io::ErrorKind::WouldBlock, _)) => return Err(in_use()),
                        Err((_, error)) => {
                            return Err(named(error, "cannot tell whether the socket is in use"))
                        }
                    }
                }
                match fs::remove_file(path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(named(error, "cannot remove the stale socket"));
                    }
                    _ => {}
                }
            }
            Err(_) => {}
        }
        let listener =
            UnixListener::bind(path).map_err(|error| named(error, "cannot listen here"))?;
        let file = identity(path);
        lock.note(file.as_deref().unwrap_or_default());
        Ok(Self {
            listener,
            path: path.to_path_buf(),
            file,
            _lock: lock,
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
#[path = "../tests/users/mod.rs"]
mod users;

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ferrite-{}-{name}", std::process::id()));
        let _ = fs::remove_file(&path);
        let _ = fs::remove_file(Lock::beside(&path));
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
    fn nothing_is_left_of_one_who_ends_and_nobody_is_asked_meanwhile() {
        let path = scratch("lock");
        let first = Listener::bind(&path).unwrap();
        first.get().set_nonblocking(true).unwrap();
        for _ in 0..3 {
            let error = Listener::bind(&path).err().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        }
        let visitor = first.get().accept().unwrap_err();
        assert_eq!(visitor.kind(), io::ErrorKind::WouldBlock);
        // Whoever has the socket, too, does not have the lock.
        let kept = first.get().try_clone().unwrap();
        drop(first);
        assert!(!path.exists() && !Lock::beside(&path).exists());
        drop(Listener::bind(&path).unwrap());
        drop(kept);
    }

    /// What a process leaves behind that was killed: the files as they are, and nothing locked. Its socket, which
    /// another still has.
    fn killed(path: &Path) -> UnixListener {
        let listener = Listener::bind(path).unwrap();
        let kept = listener.get().try_clone().unwrap();
        rustix::fs::flock(&listener._lock.file, FlockOperation::Unlock).unwrap();
        std::mem::forget(listener);
        kept
    }

    #[test]
    fn what_one_has_left_who_was_killed_is_replaced_whoever_still_has_it() {
        let path = scratch("killed");
        let kept = killed(&path);
        kept.set_nonblocking(true).unwrap();
        let listener = Listener::bind(&path).unwrap();
        assert!(kept.accept().is_err(), "it was asked");
        let _visitor = connect(&path).unwrap();
        listener.get().accept().unwrap();
        drop(listener);
        assert!(!path.exists() && !Lock::beside(&path).exists());
    }

    #[test]
    fn a_socket_of_others_is_not_taken_for_one_that_was_left() {
        let path = scratch("others");
        drop(killed(&path));
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists());
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_socket_of_another_is_left_alone() {
        let path = scratch("another");
        let first = Listener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        // He is still there.
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        fs::remove_file(Lock::beside(&path)).unwrap();
        let second = Listener::bind(&path).unwrap();
        drop(first);
        assert!(path.exists() && Lock::beside(&path).exists());
        drop(second);
        assert!(!path.exists() && !Lock::beside(&path).exists());
    }

    #[test]
    fn of_many_that_start_at_once_one_listens() {
        let path = scratch("race");
        for _ in 0..50 {
            let all: Vec<_> = std::thread::scope(|scope| {
                let start = || Listener::bind(&path);
                let started: Vec<_> = (0..8).map(|_| scope.spawn(start)).collect();
                started.into_iter().map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(all.iter().flatten().count(), 1);
            for refused in all.iter().filter_map(|one| one.as_ref().err()) {
                assert_eq!(refused.kind(), io::ErrorKind::AddrInUse, "{refused}");
            }
            // The one that is there can be reached.
            connect(&path).unwrap();
        }
    }

    #[test]
    fn one_who_goes_while_others_come_makes_none_of_them_fail() {
        let path = scratch("coming");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..300 {
                        if let Err(error) = Listener::bind(&path) {
                            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
                        }
                    }
                });
            }
        });
        assert!(!path.exists() && !Lock::beside(&path).exists());
    }

    #[test]
    fn a_file_that_is_no_lock_is_left_alone() {
        let path = scratch("precious");
        let lock = Lock::beside(&path);
        fs::write(&lock, b"precious").unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert!(
            error.to_string().contains(lock.to_str().unwrap()),
            "{error}"
        );
        assert_eq!(fs::read(&lock).unwrap(), b"precious");
        fs::remove_file(&lock).unwrap();
        // Nor is a link followed, or a folder or a pipe taken for one.
        std::os::unix::fs::symlink("/nonexistent/file", &lock).unwrap();
        assert!(Listener::bind(&path).is_err());
        fs::remove_file(&lock).unwrap();
        fs::create_dir(&lock).unwrap();
        assert!(Listener::bind(&path).is_err());
        fs::remove_dir(&lock).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, &lock, rustix::fs::Mode::RWXU).unwrap();
        assert!(Listener::bind(&path).is_err());
        fs::remove_file(&lock).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_where_nothing_can_be_made_is_named() {
        let path = Path::new("/nonexistent/socket");
        let error = Listener::bind(path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().starts_with("/nonexistent/socket: "));
    }

    #[test]
    fn the_socket_of_another_user_is_left_to_him_and_so_is_what_he_has_left() {
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: u32 = 65534;
        if !users::are_needed() {
            return;
        }
        let folder = scratch("users");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
        let path = folder.join("socket");
        let own = Listener::bind(&path).unwrap();
        let error = users::as_user(NOBODY, || Listener::bind(&path).err().unwrap());
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("socket.lock"), "{error}");
        own.get().set_nonblocking(true).unwrap();
        assert!(own.get().accept().is_err(), "it was asked");
        drop(own);
        // Of what he has left nobody else knows that it is true, but that he may remove it himself.
        drop(users::as_user(NOBODY, || killed(&path)));
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(error.to_string().contains("socket.lock"), "{error}");
        drop(users::as_user(NOBODY, || Listener::bind(&path).unwrap()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn a_lock_that_another_made_of_a_socket_is_not_believed() {
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: u32 = 65534;
        let folder = scratch("forged");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
        let path = folder.join("socket");
        let lock = Lock::beside(&path);
        // Somebody listens there who has no lock any more, and nobody is to take him for one that was left.
        let live = UnixListener::bind(&path).unwrap();
        let forge = || {
            fs::write(&lock, identity(&path).unwrap()).unwrap();
            fs::set_permissions(&lock, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let refused = |what: &str| {
            let error = Listener::bind(&path).err().expect(what);
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
            assert!(error.to_string().contains("socket.lock"), "{error}");
            assert!(error.to_string().contains(what), "{error}");
            assert!(path.exists() && lock.exists());
        };
        forge();
        for mode in [0o620, 0o602] {
            fs::set_permissions(&lock, fs::Permissions::from_mode(mode)).unwrap();
            refused("others");
        }
        fs::set_permissions(&lock, fs::Permissions::from_mode(0o600)).unwrap();
        let second = folder.join("second");
        fs::hard_link(&lock, &second).unwrap();
        refused("names");
        fs::remove_file(&second).unwrap();
        fs::remove_file(&lock).unwrap();
        if users::are_needed() {
            users::as_user(NOBODY, forge);
            refused("user 65534");
            fs::remove_file(&lock).unwrap();
        }
        drop(live);
        drop(Listener::bind(&path).unwrap());
        fs::remove_dir(&folder).unwrap();
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
