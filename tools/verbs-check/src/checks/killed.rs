// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Processes that are killed with many queue pairs and regions, or while they make them: what they had is gone
//! afterwards, again and again.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::objects::{made, to_init, Rig};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::Options;

/// Bytes of each region.
const PART: usize = 64;

/// Makes so many of both, says so, and waits for its end.
fn holds(options: &Options, count: usize, mut parent: UnixStream) -> Check {
    let rig = Rig::new(options)?;
    let cq = rig.cq(256)?;
    for number in 0..count {
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ibv_qp_cap {
                max_send_wr: 2,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: if number % 2 == 0 {
                IBV_QPT_RC
            } else {
                IBV_QPT_UD
            },
            ..Default::default()
        };
        // SAFETY: the domain and the queue live.
        let qp = made(unsafe { ibv_create_qp(rig.pd, &mut attr) }, "ibv_create_qp")?;
        to_init(&rig, qp)?;
        let address = rig.buffer.address() + (PART * (number % 64)) as u64;
        let rights = (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ) as i32;
        // SAFETY: the domain lives; the memory is the rig's, which has as much.
        let mr = unsafe { ibv_reg_mr(rig.pd, address as *mut _, PART, rights) };
        made(mr, "ibv_reg_mr")?;
    }
    parent.write_all(b"!").map_err(|error| error.to_string())?;
    let _ = parent.read(&mut [0]);
    Err("nobody killed it".into())
}

/// A process with so many of both is killed: when it has all, or after `early`.
fn killed(options: &Options, count: usize, early: Option<Duration>) -> Check {
    let (mut here, there) = UnixStream::pair().map_err(|error| error.to_string())?;
    // SAFETY: this process has one thread; the child ends by `_exit` or is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(here);
        if let Err(outcome) = holds(options, count, there) {
            eprintln!("{outcome:?}");
        }
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(1) };
    }
    if child < 0 {
        return Err("no process".into());
    }
    drop(there);
    match early {
        Some(time) => {
            let time = time.max(Duration::from_millis(1));
            let timed = here.set_read_timeout(Some(time));
            timed.map_err(|error| error.to_string())?;
            let _ = here.read(&mut [0]);
        }
        // At the end of the stream it has ended by itself, which is seen below.
        None => drop(here.read(&mut [0])),
    }
    let mut status = 0;
    // SAFETY: a child of this process that was not waited for; the status is a number here.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &mut status, 0);
    }
    let by_signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    expect!(by_signal, Some(libc::SIGKILL), "the signal that ended it");
    Ok(())
}

fn rounds(options: &Options, rounds: u32, count: usize) -> Check {
    let start = Instant::now();
    let mut whole = Duration::ZERO;
    for round in 0..rounds {
        let begun = Instant::now();
        // Every other one on the way, at another place each time.
        let early = (round % 2 == 1).then(|| whole * (round * 7 % 20) / 20);
        killed(options, count, early).map_err(|outcome| format!("round {round}: {outcome:?}"))?;
        if early.is_none() {
            whole = begun.elapsed();
        }
        if round % 100 == 99 {
            println!("{} killed in {} s", round + 1, start.elapsed().as_secs());
        }
    }
    println!("{rounds} killed in {} s", start.elapsed().as_secs());
    Ok(())
}

/// Kills so many processes, each with so many queue pairs and regions.
pub fn run(options: &Options, report: &mut Report, times: u32, count: usize) {
    report.enter(
        &format!("killed: {times} processes with {count} queue pairs and regions each"),
        rounds(options, times, count),
    );
}
