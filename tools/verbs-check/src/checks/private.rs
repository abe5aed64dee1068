// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The private part of requests, which a provider adds for its driver: what a process could say there
//! without a provider. Too little and too much of it, flags and kinds that there are not: each has its
//! errno, and nothing is left of what was begun.

use std::rc::Rc;
use std::time::Instant;

use ferrite_abi::{
    Plain, QueuePairRecord, UverbsMrRequest, UverbsQpRequest, MAX_PIECES, UVERBS_MR_LIST,
    UVERBS_MR_SHARED, UVERBS_QP_LISTS, UVERBS_QP_REGISTER_DRAINS, UVERBS_QP_WINDOWS_ONLY,
};

use super::objects::{each_on_its_own, errno, Rig, LENGTH, PATIENCE};
use crate::expect;
use crate::report::{Check, Report};
use crate::sys::*;
use crate::verbs::{Buffer, BufferKind, Change, Errno, Options};

pub fn run(options: &Options, report: &mut Report) {
    each_on_its_own(
        options,
        report,
        "private: ",
        &[
            ("queue pairs: as long as it is to be, and else", qp_lengths),
            ("queue pairs: flags, and fields that are zero", qp_fields),
            ("queue pairs: flags on services without them", qp_services),
            ("queue pairs: rings that are not there", qp_rings),
            ("regions: as long as it is to be, and else", mr_lengths),
            ("regions: kinds, and fields that are zero", mr_fields),
            ("an answer that cannot be written", unanswerable),
        ],
    );
}

/// Whatever was refused, the context is as good as before.
pub(super) fn still_good(rig: &Rig) -> Check {
    let pair = rig.pair()?;
    rig.write(pair.a, 100)?;
    rig.ends(pair.cq, IBV_WC_SUCCESS, "a write afterwards")?;
    Ok(())
}

/// `enum ib_uverbs_write_cmds`.
mod command {
    pub const REG_MR: u32 = 9;
    pub const DEREG_MR: u32 = 13;
    pub const CREATE_QP: u32 = 24;
    pub const DESTROY_QP: u32 = 27;
}

/// `struct ib_uverbs_create_qp` without what comes before and after it.
#[derive(Clone, Copy)]
struct Qp {
    pd: u32,
    cq: u32,
    /// `enum ib_qp_type`.
    kind: u8,
}

/// Where the kernel is to write an answer, and how many words of it: of none it is not told.
type Answer = (u64, usize);

fn room(words: &mut [u32]) -> Answer {
    (words.as_mut_ptr() as u64, words.len())
}

/// A command as the kernel takes it by `write`: its words, the private part among them, after the place
/// of the answer.
fn write(rig: &Rig, number: u32, words: &[u32], answer: Answer) -> Result<(), i32> {
    let mut all = vec![number, 0];
    if answer.1 != 0 {
        all.extend([answer.0 as u32, (answer.0 >> 32) as u32]);
    }
    all.extend_from_slice(words);
    all[1] = all.len() as u32 | ((answer.1 as u32) << 16);
    // SAFETY: the context is open; the words are as many as said, and where the answer goes is room for
    // it, or nothing, which the kernel finds out.
    let written = unsafe { libc::write((*rig.raw()).cmd_fd, all.as_ptr().cast(), all.len() * 4) };
    if written == (all.len() * 4) as isize {
        Ok(())
    } else {
        Err(errno())
    }
}

/// Bytes as words; what is missing of the last is zero.
fn words(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks(4)
        .map(|chunk| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            u32::from_ne_bytes(word)
        })
        .collect()
}

/// Makes a queue pair with a private part, and ends it again: an errno value.
fn qp(rig: &Rig, qp: Qp, private: &[u8]) -> Result<(), i32> {
    let mut answer = [0; 10];
    create_qp(rig, qp, private, room(&mut answer))?;
    // A handle in, how many events were told out.
    let mut events = [0];
    let handle = [answer[0], 0];
    write(rig, command::DESTROY_QP, &handle, room(&mut events))
}

fn create_qp(rig: &Rig, qp: Qp, private: &[u8], answer: Answer) -> Result<(), i32> {
    let mut request = vec![
        // user_handle
        0, 0, qp.pd, qp.cq,
        qp.cq, // srq_handle, most of work requests and of entries, inline data
        0, 4, 4, 1, 1, 0,
    ];
    request.push(u32::from_ne_bytes([0, qp.kind, 0, 0]));
    request.extend(words(private));
    write(rig, command::CREATE_QP, &request, answer)
}

/// Registers memory with a private part, and ends that again.
fn mr(rig: &Rig, memory: (u64, u64), access: u32, private: &[u8]) -> Result<(), i32> {
    let mut answer = [0; 3];
    let half = |value: u64| [value as u32, (value >> 32) as u32];
    // SAFETY: the domain lives.
    let domain = unsafe { (*rig.pd).handle };
    let mut request = Vec::new();
    for value in [memory.0, memory.1, memory.0] {
        request.extend(half(value));
    }
    request.extend([domain, access]);
    request.extend(words(private));
    write(rig, command::REG_MR, &request, room(&mut answer))?;
    write(rig, command::DEREG_MR, &[answer[0]], (0, 0))
}

/// What the driver counts of its objects, and the pages that it has pinned of this process: what must be
/// as before when something was refused.
fn left(rig: &Rig) -> Check<(String, String)> {
    let tables = format!("/sys/kernel/debug/{}/tables", rig.context.name());
    let tables = std::fs::read_to_string(&tables).map_err(|error| format!("{tables}: {error}"))?;
    let counts = tables
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            Some(format!("{} {}", words.next()?, words.next()?))
        })
        .collect::<Vec<_>>()
        .join(", ");
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let pinned = status.lines().find(|line| line.starts_with("VmPin"));
    let pinned = pinned.ok_or("the kernel does not tell how much is pinned")?;
    Ok((counts, pinned.to_owned()))
}

/// A request ends as it should, and leaves nothing behind.
pub(super) fn ends(
    rig: &Rig,
    what: &str,
    expected: i32,
    request: impl Fn() -> Result<(), i32>,
) -> Check {
    let before = left(rig)?;
    // More than once: what is given back late would show.
    for _ in 0..4 {
        let got = request().err().unwrap_or(0);
        if got != expected {
            return Err(format!("{what}: {} instead of {}", Errno(got), Errno(expected)).into());
        }
    }
    // What was made ends in its own time.
    let deadline = Instant::now() + PATIENCE;
    while left(rig)? != before && Instant::now() < deadline {}
    expect!(left(rig)?, before, "objects and pages after {what}");
    Ok(())
}

/// Memory for rings, a request that has them there, and what it is for.
fn good_qp(rig: &Rig) -> Check<(Rc<Buffer>, Qp, UverbsQpRequest)> {
    let buffer = Buffer::new(LENGTH, BufferKind::Plain).map_err(|errno| errno.to_string())?;
    let cq = rig.cq(64)?;
    // SAFETY: both live.
    let (pd, cq) = unsafe { ((*rig.pd).handle, (*cq).handle) };
    let kind = IBV_QPT_RC as u8;
    let request = UverbsQpRequest {
        buffer: buffer.address(),
        length: 16384,
        sq_offset: 0,
        rq_offset: 4096,
        record_offset: 8192,
        sq_log_blocks: 5,
        rq_log_entries: 3,
        rq_log_stride: 6,
        flags: 0,
        reserved: 0,
    };
    Ok((buffer, Qp { pd, cq, kind }, request))
}

/// With so many bytes behind it, the last of which is this.
fn longer(request: &[u8], by: usize, last: u8) -> Vec<u8> {
    let mut bytes = request.to_vec();
    bytes.resize(request.len() + by, 0);
    if let Some(byte) = bytes.last_mut() {
        *byte = last;
    }
    bytes
}

/// More than a page, which the kernel looks through all the same.
const TAILS: [usize; 4] = [4, 8, 64, 5000];

/// A request that is longer than the driver knows: it is carried out where the rest is zero.
fn with_tails(
    rig: &Rig,
    what: &str,
    bytes: &[u8],
    request: impl Fn(&[u8]) -> Result<(), i32>,
) -> Check {
    for by in TAILS {
        for (last, how, expected) in [(0, "zero", 0), (1, "not zero", libc::EOPNOTSUPP)] {
            let bytes = longer(bytes, by, last);
            ends(
                rig,
                &format!("{what}: {by} bytes more, {how}"),
                expected,
                || request(&bytes),
            )?;
        }
    }
    Ok(())
}

fn qp_lengths(rig: &Rig) -> Check {
    let (_buffer, made, request) = good_qp(rig)?;
    let bytes = request.as_bytes();
    for length in (0..bytes.len()).step_by(4) {
        ends(rig, &format!("{length} bytes"), libc::EINVAL, || {
            qp(rig, made, &bytes[..length])
        })?;
    }
    ends(rig, "all of it", 0, || qp(rig, made, bytes))?;
    with_tails(rig, "a queue pair", bytes, |bytes| qp(rig, made, bytes))?;
    still_good(rig)
}

fn qp_fields(rig: &Rig) -> Check {
    let (_buffer, made, good) = good_qp(rig)?;
    const KNOWN: u8 = UVERBS_QP_LISTS | UVERBS_QP_REGISTER_DRAINS | UVERBS_QP_WINDOWS_ONLY;
    for flags in 0..=u8::MAX {
        let request = UverbsQpRequest { flags, ..good };
        let expected = if flags & !KNOWN == 0 { 0 } else { libc::EINVAL };
        ends(rig, &format!("flags {flags:#x}"), expected, || {
            qp(rig, made, request.as_bytes())
        })?;
    }
    for reserved in [1, 1 << 63] {
        let request = UverbsQpRequest { reserved, ..good };
        ends(
            rig,
            &format!("{reserved:#x} reserved"),
            libc::EINVAL,
            || qp(rig, made, request.as_bytes()),
        )?;
    }
    still_good(rig)
}

fn qp_services(rig: &Rig) -> Check {
    let (_buffer, made, good) = good_qp(rig)?;
    for (kind, has_lists) in [(IBV_QPT_RC, true), (IBV_QPT_UC, true), (IBV_QPT_UD, false)] {
        let made = Qp {
            kind: kind as u8,
            ..made
        };
        for flags in [
            0,
            UVERBS_QP_LISTS,
            UVERBS_QP_REGISTER_DRAINS,
            UVERBS_QP_LISTS | UVERBS_QP_REGISTER_DRAINS,
            UVERBS_QP_WINDOWS_ONLY,
        ] {
            let request = UverbsQpRequest { flags, ..good };
            let possible = has_lists || flags == 0;
            let expected = if possible { 0 } else { libc::EINVAL };
            ends(
                rig,
                &format!("type {kind}, flags {flags}"),
                expected,
                || qp(rig, made, request.as_bytes()),
            )?;
        }
    }
    still_good(rig)
}

fn qp_rings(rig: &Rig) -> Check {
    let (_buffer, made, good) = good_qp(rig)?;
    let record = size_of::<QueuePairRecord>() as u64;
    let change = |change: fn(&mut UverbsQpRequest)| {
        let mut request = good;
        change(&mut request);
        request
    };
    let bad = [
        ("no memory", libc::EINVAL, change(|r| r.length = 0)),
        (
            "an offset beyond it",
            libc::EINVAL,
            change(|r| r.sq_offset = 16384),
        ),
        (
            "an offset without its place",
            libc::EINVAL,
            change(|r| r.rq_offset = 4096 + 32),
        ),
        (
            "a record over the end",
            libc::EINVAL,
            UverbsQpRequest {
                record_offset: (16384 - record + 64) as u32,
                ..good
            },
        ),
        (
            "more blocks than fit",
            libc::EINVAL,
            change(|r| r.sq_log_blocks = 9),
        ),
        (
            "more blocks than there can be",
            libc::EINVAL,
            change(|r| r.sq_log_blocks = 255),
        ),
        (
            "more receives than there can be",
            libc::EINVAL,
            change(|r| r.rq_log_entries = 255),
        ),
        (
            "a stride that is none",
            libc::EINVAL,
            change(|r| r.rq_log_stride = 4),
        ),
        (
            "memory around the end of all",
            libc::EINVAL,
            change(|r| (r.buffer, r.length) = (u64::MAX - 4095, 16384)),
        ),
        (
            "memory that nobody has",
            libc::EFAULT,
            change(|r| r.buffer = 0x1000),
        ),
    ];
    for (what, errno, request) in bad {
        ends(rig, what, errno, || qp(rig, made, request.as_bytes()))?;
    }
    still_good(rig)
}

/// Of a region that a provider of before would make, and of a key for lists.
fn good_mr(rig: &Rig) -> [(&'static str, (u64, u64), u32, UverbsMrRequest); 2] {
    let request = |kind, max_pieces| UverbsMrRequest {
        kind,
        max_pieces,
        key: 0,
        reserved: 0,
    };
    let memory = (rig.buffer.address(), 8192);
    [
        ("a region", memory, IBV_ACCESS_LOCAL_WRITE, request(0, 0)),
        ("a list", (0, 0), 0, request(UVERBS_MR_LIST, 4)),
    ]
}

fn mr_lengths(rig: &Rig) -> Check {
    for (what, memory, access, request) in good_mr(rig) {
        let bytes = request.as_bytes();
        let made = |bytes: &[u8]| mr(rig, memory, access, bytes);
        for length in (0..=bytes.len()).step_by(4) {
            // What is not there is zero: no list without its pieces, and of nothing no region.
            let is_list = request.kind == UVERBS_MR_LIST;
            let expected = if is_list && length < 8 {
                libc::EINVAL
            } else {
                0
            };
            ends(rig, &format!("{what}: {length} bytes"), expected, || {
                made(&bytes[..length])
            })?;
        }
        with_tails(rig, what, bytes, made)?;
    }
    still_good(rig)
}

fn mr_fields(rig: &Rig) -> Check {
    let [(_, memory, access, region), (_, nothing, _, list)] = good_mr(rig);
    let says = |what: &str, errno, memory, access, request: UverbsMrRequest| {
        ends(rig, what, errno, || {
            mr(rig, memory, access, request.as_bytes())
        })
    };
    for kind in [3, 4, 0x100, 0x0100_0001, u32::MAX] {
        let bad = UverbsMrRequest { kind, ..list };
        let what = format!("kind {kind:#x}");
        says(&what, libc::EOPNOTSUPP, nothing, 0, bad)?;
        says(&what, libc::EOPNOTSUPP, memory, access, bad)?;
    }
    for max_pieces in [0, MAX_PIECES as u32 + 1, 1 << 31, u32::MAX] {
        let bad = UverbsMrRequest { max_pieces, ..list };
        let what = format!("a list of {max_pieces} pieces");
        says(&what, libc::EINVAL, nothing, 0, bad)?;
    }
    for max_pieces in [1, MAX_PIECES as u32] {
        let good = UverbsMrRequest { max_pieces, ..list };
        says(
            &format!("a list of {max_pieces} pieces"),
            0,
            nothing,
            0,
            good,
        )?;
        let bad = UverbsMrRequest {
            max_pieces,
            ..region
        };
        says("a region of pieces", libc::EINVAL, memory, access, bad)?;
    }
    for reserved in [1, 1 << 31] {
        let bad = UverbsMrRequest { reserved, ..list };
        says("a list, reserved", libc::EINVAL, nothing, 0, bad)?;
        let bad = UverbsMrRequest { reserved, ..region };
        says("a region, reserved", libc::EINVAL, memory, access, bad)?;
    }
    let shared = UverbsMrRequest {
        kind: UVERBS_MR_SHARED,
        ..list
    };
    says("a share with pieces", libc::EINVAL, memory, access, shared)?;
    for (what, place, rights, request) in [
        ("a list of another region", nothing, 0, list),
        ("a region of another region", memory, access, region),
    ] {
        let bad = UverbsMrRequest { key: 1, ..request };
        says(what, libc::EINVAL, place, rights, bad)?;
    }
    // It has neither memory nor rights of its own.
    says("a list with memory", libc::EINVAL, memory, 0, list)?;
    says("a list with bytes", libc::EINVAL, (0, 1), 0, list)?;
    says("a list with a place", libc::EINVAL, (memory.0, 0), 0, list)?;
    says(
        "a list with rights",
        libc::EINVAL,
        nothing,
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ,
        list,
    )?;
    still_good(rig)
}

/// The kernel makes what was asked for, cannot say so, and takes it back.
fn unanswerable(rig: &Rig) -> Check {
    let (_buffer, made, request) = good_qp(rig)?;
    const NOWHERE: Answer = (4096, 10);
    ends(rig, "a queue pair", libc::EFAULT, || {
        create_qp(rig, made, request.as_bytes(), NOWHERE)
    })?;
    // The driver's part has a place, what the core says before it has none: the queue pair is there by then.
    const PAGE: usize = 4096;
    const CORE: u64 = 32;
    let pages = Buffer::new(2 * PAGE, BufferKind::Plain).map_err(|errno| errno.to_string())?;
    pages
        .change(Change::Unmap, 0, PAGE)
        .map_err(|errno| errno.to_string())?;
    let half = (pages.address() + PAGE as u64 - CORE, NOWHERE.1);
    ends(rig, "a queue pair that is there", libc::EFAULT, || {
        create_qp(rig, made, request.as_bytes(), half)
    })?;
    still_good(rig)
}
