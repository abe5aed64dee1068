// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's init and agent: sets up the bare minimum, then runs what the host asks for over
//! a virtio-serial port, many things at a time, each with a deadline.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ferrite_lab::protocol::{Answer, Outcome, Request, OUTPUT_LIMIT, PORT};

/// How long what a script leaves in the background may go on to write for it.
const LATECOMERS: Duration = Duration::from_millis(500);

fn mount(kind: &str, target: &str, options: &str) {
    let _ = fs::create_dir_all(target);
    let (Ok(kind), Ok(target), Ok(options)) = (
        CString::new(kind),
        CString::new(target),
        CString::new(options),
    ) else {
        return;
    };
    // SAFETY: all pointers are to live, NUL-terminated strings.
    unsafe {
        libc::mount(
            kind.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            0,
            options.as_ptr().cast(),
        );
    }
}

fn quietly(script: &str) {
    let _ = Command::new("/bin/bash")
        .args(["-c", script])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .status();
}

fn set_up() {
    mount("proc", "/proc", "");
    mount("sysfs", "/sys", "");
    mount("devtmpfs", "/dev", "");
    mount("devpts", "/dev/pts", "ptmxmode=0666,mode=0620");
    mount("tmpfs", "/dev/shm", "");
    mount("tmpfs", "/run", "");
    mount("tmpfs", "/tmp", "mode=1777");
    mount("debugfs", "/sys/kernel/debug", "");
    mount("configfs", "/sys/kernel/config", "");
    quietly(
        "ln -sf /proc/self/fd /dev/fd; ln -sf fd/0 /dev/stdin; ln -sf fd/1 /dev/stdout; ln -sf fd/2 /dev/stderr
         ip link set lo up
         for m in virtio_console virtio_net; do modprobe -q $m; done
         ulimit -l unlimited
         # A program that uses verbs loads every provider that is configured, which takes longer here than
         # what it does then: those of cards that no machine has are left out.
         for driver in /etc/libibverbs.d/*.driver; do
             case $driver in */rxe.driver | */siw.driver) ;; *) rm -f $driver;; esac
         done
         p=/ferrite/lib/libferrite-rdmav34.so
         if [ -e $p ]; then
             mkdir -p /etc/libibverbs.d
             cp $p /usr/lib/x86_64-linux-gnu/libibverbs/
             ln -sf libibverbs/libferrite-rdmav34.so /usr/lib/x86_64-linux-gnu/libferrite.so.1
             cp /ferrite/lib/ferrite.driver /etc/libibverbs.d/
         fi
         # The sample's is configured by those who load the sample.
         p=/ferrite/lib/libsoft-rdmav34.so
         [ -e $p ] && cp $p /usr/lib/x86_64-linux-gnu/libibverbs/",
    );
}

/// Starts the processors that were left out at boot.
fn start_processors() {
    for number in 1.. {
        let online = format!("/sys/devices/system/cpu/cpu{number}/online");
        let Ok(state) = fs::read_to_string(&online) else {
            return;
        };
        if state.trim() != "0" {
            continue;
        }
        // One that is not given a processor of the machine in time is tried again.
        for _ in 0..5 {
            match fs::write(&online, "1") {
                Ok(()) => break,
                Err(error) => eprintln!("init: processor {number} does not start: {error}"),
            }
        }
    }
}

/// The device node of the agent's port, once the driver has made it.
fn port() -> Option<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports").ok()?.flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        if name.trim() == PORT {
            return Some(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    None
}

type Writer = Arc<Mutex<File>>;
/// The process groups of scripts under way; a signal may come before there is one.
type Running = Arc<Mutex<HashMap<u64, Result<i32, Vec<i32>>>>>;

fn answer(writer: &Writer, answer: &Answer) {
    let Ok(mut line) = serde_json::to_vec(answer) else {
        return;
    };
    line.push(b'\n');
    if let Ok(mut file) = writer.lock() {
        let _ = file.write_all(&line);
    }
}

/// What a child writes to a pipe, as far as it is kept.
struct Output<P> {
    /// None after its end.
    pipe: Option<P>,
    kept: Vec<u8>,
}

impl<P: Read + AsRawFd + Send + 'static> Output<P> {
    fn new(pipe: P) -> Self {
        wait_for_data(&pipe, false);
        Self {
            pipe: Some(pipe),
            kept: Vec::new(),
        }
    }

    /// What to wait for: nothing after the end.
    fn poll(&self) -> libc::pollfd {
        libc::pollfd {
            fd: self.pipe.as_ref().map_or(-1, AsRawFd::as_raw_fd),
            events: libc::POLLIN,
            revents: 0,
        }
    }

    /// Reads all that is there.
    fn read(&mut self) {
        let mut chunk = [0; 16 << 10];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut chunk) {
                Ok(n) if n > 0 => {
                    let room = OUTPUT_LIMIT.saturating_sub(self.kept.len());
                    self.kept.extend_from_slice(&chunk[..n.min(room)]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => self.pipe = None,
            }
        }
    }

    /// What was kept. Whoever still writes is listened to, and would end otherwise.
    fn text(self) -> String {
        if let Some(mut pipe) = self.pipe {
            wait_for_data(&pipe, true);
            thread::spawn(move || std::io::copy(&mut pipe, &mut std::io::sink()));
        }
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// Whether who reads from a pipe waits until there is something.
fn wait_for_data(pipe: &impl AsRawFd, wait: bool) {
    // SAFETY: no memory is involved; the descriptor is open as long as `pipe` is.
    unsafe {
        let flags = libc::fcntl(pipe.as_raw_fd(), libc::F_GETFL) & !libc::O_NONBLOCK;
        let more = if wait { 0 } else { libc::O_NONBLOCK };
        libc::fcntl(pipe.as_raw_fd(), libc::F_SETFL, flags | more);
    }
}

/// Reads what a child writes until it ends, for so long at most, and then all that it has written; false where it goes
/// on. It is not looked for again and again: a guest under a checker would have little time for anything else.
fn ends_within(
    child: &Child,
    (out, err): (&mut Output<ChildStdout>, &mut Output<ChildStderr>),
    timeout: Duration,
) -> bool {
    // SAFETY: no memory is involved.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id() as libc::pid_t, 0) };
    if pidfd < 0 {
        return false;
    }
    // SAFETY: the descriptor is new, and nobody else's.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd as i32) };
    let mut deadline = Instant::now() + timeout;
    let mut ended = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let of_child = libc::pollfd {
            fd: if ended { -1 } else { pidfd.as_raw_fd() },
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polls = [of_child, out.poll(), err.poll()];
        // Rounded up, so that what is left of the last millisecond is not spun away.
        let wait = left.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
        // SAFETY: `polls` are live entries.
        unsafe { libc::poll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, wait) };
        // What it wrote before its end is in the pipes by then.
        let ends = !ended && polls[0].revents != 0;
        out.read();
        err.read();
        if ends {
            ended = true;
            // A background process of the script may hold the pipes open; they are waited for only a little.
            deadline = Instant::now() + LATECOMERS;
        }
        if ended && out.pipe.is_none() && err.pipe.is_none() {
            return true;
        }
        if left.is_zero() && !ends {
            return ended;
        }
    }
}

fn run(id: u64, script: &str, timeout: Duration, running: &Running) -> Outcome {
    let failed = |why: String| Outcome {
        code: 126,
        out: String::new(),
        err: why,
        timed_out: false,
    };
    let mut command = Command::new("/bin/bash");
    command
        .args(["-c", script])
        .env("HOME", "/root")
        .env("PATH", "/ferrite/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C.UTF-8")
        .current_dir("/root")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            if let Ok(mut running) = running.lock() {
                running.remove(&id);
            }
            return failed(format!("cannot start: {error}"));
        }
    };
    let group = child.id() as i32;
    if let Ok(mut running) = running.lock() {
        if let Some(Err(early)) = running.insert(id, Ok(group)) {
            for signal in early {
                // SAFETY: no memory is involved; the group is this child's own.
                unsafe { libc::kill(-group, signal) };
            }
        }
    }
    let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return failed("no pipes".into());
    };
    let (mut out, mut err) = (Output::new(out), Output::new(err));
    let timed_out = !ends_within(&child, (&mut out, &mut err), timeout);
    if timed_out {
        // SAFETY: no memory is involved; the group is this child's own, which was not waited for yet.
        unsafe { libc::kill(-group, libc::SIGKILL) };
    }
    let status = child.wait().ok();
    if let Ok(mut running) = running.lock() {
        running.remove(&id);
    }
    if timed_out {
        out.read();
        err.read();
    }
    let code = match status {
        Some(status) => status
            .code()
            .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
        None => 127,
    };
    Outcome {
        code,
        out: out.text(),
        err: err.text(),
        timed_out,
    }
}

fn serve() -> std::io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let path = loop {
        if let Some(path) = port().filter(|p| p.exists()) {
            break path;
        }
        if Instant::now() >= deadline {
            return Err(std::io::Error::other("no agent port"));
        }
        thread::sleep(Duration::from_millis(10));
    };
    let file = OpenOptions::new().read(true).write(true).open(&path)?;
    let writer: Writer = Arc::new(Mutex::new(file.try_clone()?));
    let running = Running::default();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    answer(
        &writer,
        &Answer::Hello {
            release: release.trim().to_owned(),
        },
    );
    let mut reader = BufReader::new(file);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            // The host is not connected; it may come back.
            thread::sleep(Duration::from_millis(50));
            continue;
        }
        match serde_json::from_str::<Request>(&line) {
            Ok(Request::Run {
                id,
                script,
                timeout_ms,
            }) => {
                let (writer, running) = (Arc::clone(&writer), Arc::clone(&running));
                if let Ok(mut running) = running.lock() {
                    running.insert(id, Err(Vec::new()));
                }
                thread::spawn(move || {
                    let outcome = run(id, &script, Duration::from_millis(timeout_ms), &running);
                    answer(&writer, &Answer::Done { id, outcome });
                });
            }
            Ok(Request::Signal { id, signal }) => {
                let mut running = running.lock();
                match running.as_mut().ok().and_then(|r| r.get_mut(&id)) {
                    // SAFETY: no memory is involved; the group is a running script's own.
                    Some(Ok(group)) => unsafe {
                        libc::kill(-*group, signal);
                    },
                    Some(Err(early)) => early.push(signal),
                    None => {}
                }
            }
            Err(error) => eprintln!("agent: bad request: {error}"),
        }
    }
}

/// A login shell on the console port, for `make shell`, as often as it is left.
fn console() {
    if !PathBuf::from("/dev/hvc0").exists() {
        return;
    }
    loop {
        quietly(
            "cd /root; export HOME=/root TERM=${FERRITE_TERM:-xterm} PATH=/ferrite/bin:/usr/sbin:/usr/bin:/sbin:/bin
             # Asked for at each prompt: the name is given to the machine later than this.
             export PS1='$(hostname)# '
             exec setsid -c bash --norc -i </dev/hvc0 >/dev/hvc0 2>&1",
        );
        thread::sleep(Duration::from_millis(200));
    }
}

fn main() {
    if std::process::id() != 1 {
        if let Err(error) = serve() {
            eprintln!("agent: {error}");
        }
        return;
    }
    set_up();
    start_processors();
    thread::spawn(console);
    // The agent proper is a child: init's only work is to reap, which would steal the agent's
    // own children from it.
    loop {
        let agent = Command::new("/proc/self/exe").spawn();
        let Ok(agent) = agent else {
            eprintln!("init: cannot start the agent");
            thread::sleep(Duration::from_secs(1));
            continue;
        };
        let agent = agent.id() as i32;
        loop {
            let mut status = 0;
            // SAFETY: `status` is a live local.
            let pid = unsafe { libc::waitpid(-1, &mut status, 0) };
            if pid == agent {
                break;
            }
            if pid < 0 {
                thread::sleep(Duration::from_millis(50));
            }
        }
        eprintln!("init: the agent ended; starting it again");
    }
}
