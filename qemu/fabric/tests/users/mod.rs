// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that are several users at a time.

use rustix::process::Uid;
use std::io::Write;
use std::sync::OnceLock;

/// Set by who cannot be several users, and wants the other tests alone.
const LEAVE_OUT: &str = "FERRITE_ONE_USER";

/// Makes this thread another user's, and no other thread.
fn become_user(uid: u32) -> rustix::io::Result<()> {
    let uid = Uid::from_raw(uid);
    rustix::thread::set_thread_res_uid(uid, uid, uid)
}

/// Whether this process can be other users. Root cannot where it has no
/// `CAP_SETUID`, or is in a user namespace without them.
pub fn are_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| {
        let one = |uid| std::thread::spawn(move || become_user(uid)).join();
        [20_000, 65_534]
            .into_iter()
            .all(|uid| matches!(one(uid), Ok(Ok(()))))
    })
}

/// Whether a test runs that has to be other users. It fails if it cannot, unless
/// it is to be left out, which is said where no test can hide it.
pub fn are_needed() -> bool {
    if are_there() {
        return true;
    }
    assert!(
        std::env::var_os(LEAVE_OUT).is_some(),
        "this test has to be several users: run it as root, with CAP_SETUID and with the users \
         20000 to 65534 in its user namespace, or leave all such tests out with {LEAVE_OUT}=1"
    );
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Not by the macro, whose output of tests that pass is not shown.
    let _ = writeln!(
        std::io::stderr(),
        "{name}: LEFT OUT, it has to be several users ({LEAVE_OUT})"
    );
    false
}

/// Does something as another user.
pub fn as_user<T: Send>(uid: u32, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            become_user(uid).unwrap_or_else(|error| panic!("cannot be user {uid}: {error}"));
            work()
        });
        other.join().unwrap()
    })
}
