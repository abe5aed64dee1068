// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Messages of the vfio-user protocol, with descriptors, to the whole device: a monitor that says
//! what it likes. It maps a part of a file as the guest's memory; the rest of that file keeps its
//! bytes, and none of them is in any answer or on the wire.

use crate::secret::Secret;
use crate::Input;
use ferrite_abi::*;
use ferrite_device::function::{Frontend, Function};
use ferrite_device::interrupts::Kinds;
use ferrite_device::vfio_user::{Connection, REGION_CONFIG};
use ferrite_engine::Config;
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

const MESSAGES: usize = 96;
/// Bytes of all messages of an input: the socket takes them before anybody reads.
const MOST_BYTES: usize = 64 << 10;
const PAGE: u64 = 4096;
/// The file: secret, the guest's memory, secret.
const GUARD: u64 = 4 * PAGE;
const MEMORY: u64 = 64 * PAGE;
/// Where the guest has its memory mostly.
const BASE: u64 = 0x10_0000;
/// Where in it the boot block is, the control ring and event queue 0.
const BOOT: u64 = 0;
const RING: u64 = PAGE;
const EVENTS: u64 = 8 * PAGE;
const HEADER: usize = 16;
const FLAG_REPLY: u32 = 1;
const FLAG_NO_REPLY: u32 = 1 << 4;
const MAC: [u8; 6] = [2, 0xfe, 0, 0, 0, 1];

fn memory(secret: &Secret, input: &mut Input<'_>) -> OwnedFd {
    let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a file");
    rustix::fs::ftruncate(&file, 2 * GUARD + MEMORY).expect("a size");
    let guard = secret.fill(GUARD as usize);
    let write = |at: u64, bytes: &[u8]| {
        let written = rustix::io::pwrite(&file, bytes, at).expect("room");
        assert_eq!(written, bytes.len());
    };
    write(0, &guard);
    write(GUARD + MEMORY, &guard);
    let block = BootBlock {
        cqp_ring: BASE + RING,
        eq0_ring: BASE + EVENTS,
        cqp_log_entries: 4,
        eq0_log_entries: 5,
        ..BootBlock::zeroed()
    };
    write(GUARD + BOOT, block.as_bytes());
    // A few commands are there from the beginning.
    for slot in 0..u64::from(input.u8() % 4) {
        let mut entry = CommandEntry::zeroed();
        entry.opcode = u16::from(input.u8() % 64);
        entry.request_length = u32::from(input.u8());
        entry.reply = BASE + u64::from(input.u8()) * 64;
        entry.reply_length = input.number() as u32;
        let length = usize::from(input.u8());
        let bytes = input.bytes(length.min(entry.payload.len()));
        entry.payload[..bytes.len()].copy_from_slice(bytes);
        let at = RING + slot * size_of::<CommandEntry>() as u64;
        write(GUARD + at, entry.as_bytes());
    }
    file
}

/// One message: its bytes, and which descriptors go with it.
struct Message {
    bytes: Vec<u8>,
    fds: u8,
}

fn message(number: u16, flags: u32, body: &[u8], fds: u8) -> Message {
    let mut bytes = Vec::new();
    bytes.extend(7u16.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    bytes.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(0u32.to_ne_bytes());
    bytes.extend(body);
    Message { bytes, fds }
}

fn words32(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn write_region(region: u32, offset: u64, data: &[u8], flags: u32) -> Message {
    let mut body = offset.to_ne_bytes().to_vec();
    body.extend(region.to_ne_bytes());
    body.extend((data.len() as u32).to_ne_bytes());
    body.extend(data);
    message(10, flags, &body, 0)
}

/// Maps `pages` of the guest's memory from `first` on at `address`.
fn map(flags: u32, first: u64, pages: u64, address: u64, fds: u8) -> Message {
    let first = first % (MEMORY / PAGE);
    let pages = pages.min(MEMORY / PAGE - first);
    let mut body = words32(&[32, flags]);
    body.extend((GUARD + first * PAGE).to_ne_bytes());
    body.extend(address.to_ne_bytes());
    body.extend((pages * PAGE).to_ne_bytes());
    message(2, 0, &body, fds)
}

/// The next messages of an input.
fn messages(input: &mut Input<'_>) -> Vec<Message> {
    let choice = input.u8();
    let flags = if choice & 0x80 != 0 { FLAG_NO_REPLY } else { 0 };
    let number = u32::from(input.u8());
    match choice & 31 {
        0 => vec![message(1, flags, &words32(&[number >> 4]), 0)],
        1 => vec![map(3, 0, MEMORY / PAGE, BASE, 1)],
        2 => {
            let first = input.number();
            vec![map(
                number & 7,
                first,
                input.number(),
                BASE + input.little() * PAGE,
                1,
            )]
        }
        3 => {
            // Of another file, and without one: anything.
            let mut body = words32(&[32, number & 7]);
            for _ in 0..3 {
                body.extend(input.number().to_ne_bytes());
            }
            vec![message(2, flags, &body, 2 << (number >> 7))]
        }
        4 => {
            let mut body = words32(&[24, number & 3]);
            body.extend(input.number().wrapping_mul(PAGE).to_ne_bytes());
            body.extend(input.number().wrapping_mul(PAGE).to_ne_bytes());
            vec![message(3, flags, &body, 0)]
        }
        5 => vec![message(4, flags, &words32(&[16, 0, 0, 0]), 0)],
        6 => vec![message(
            5,
            flags,
            &words32(&[32, 0, number, 0, 0, 0, 0, 0]),
            0,
        )],
        7 => vec![message(7, flags, &words32(&[16, 0, number & 7, 0]), 0)],
        8..=10 => {
            let body = words32(&[
                20,
                number & 63,
                number >> 6,
                input.number() as u32,
                input.number() as u32,
            ]);
            // Not the guest's memory, which would be written to as if it were an event.
            vec![message(8, flags, &body, input.u8() & !0x11)]
        }
        11..=13 => {
            let mut body = input.number().to_ne_bytes().to_vec();
            body.extend(words32(&[number % 10, input.number() as u32]));
            vec![message(9, flags, &body, 0)]
        }
        14..=17 => {
            let offset = input.number();
            let count = usize::from(input.u8() % 17);
            vec![write_region(number % 10, offset, input.bytes(count), flags)]
        }
        18 | 19 => {
            // Several writes in one.
            let count = u64::from(number % 5);
            let mut body = count.to_ne_bytes().to_vec();
            for _ in 0..count {
                body.extend(input.number().to_ne_bytes());
                body.extend(words32(&[input.u8().into(), input.u8().into()]));
                body.extend(input.number().to_ne_bytes());
            }
            vec![message(15, flags, &body, 0)]
        }
        20 => vec![message(13, flags, &[], 0)],
        21 => vec![write_region(REGION_CONFIG, 4, &[number as u8, 0], flags)],
        22 | 23 => {
            // The device is brought up.
            let version = (u32::from(ABI_MAJOR) << 16) | u32::from(ABI_MINOR);
            let mut all = vec![write_region(REGION_CONFIG, 4, &[6, 0], 0)];
            for (offset, value, size) in [
                (REG_DRIVER_VERSION, u64::from(version), 4),
                (REG_BOOT, BASE + BOOT, 8),
                (REG_CONTROL, u64::from(CONTROL_ENABLE), 4),
            ] {
                let value = value.to_le_bytes();
                all.push(write_region(
                    BAR_REGISTERS,
                    offset as u64,
                    &value[..size],
                    FLAG_NO_REPLY,
                ));
            }
            let producer = u64::from(number % 5).to_le_bytes();
            let doorbell = DOORBELL_CONTROL as u64;
            all.push(write_region(BAR_DOORBELLS, doorbell, &producer, flags));
            all
        }
        24 | 25 => {
            let offset = input.pick(&[
                DOORBELL_SEND,
                DOORBELL_COMPLETION,
                DOORBELL_EVENT_QUEUE,
                DOORBELL_CONTROL,
                DOORBELL_CHANNEL,
            ]);
            let at = (u64::from(number & 3) << 12) + offset as u64;
            let word = (input.number() | (input.number() << 32)).to_le_bytes();
            vec![write_region(BAR_DOORBELLS, at, &word, flags)]
        }
        26 => {
            let count = input.u8();
            let body = input.bytes(count.into());
            vec![message(number as u16, flags, body, input.u8() & !0x11)]
        }
        _ => {
            // No message at all.
            let bytes = input.bytes(usize::from(choice >> 3)).to_vec();
            vec![Message { bytes, fds: 0 }]
        }
    }
}

fn send(stream: &UnixStream, message: &Message, files: &[BorrowedFd<'_>]) -> bool {
    let fds: Vec<BorrowedFd<'_>> = (0..8)
        .filter(|bit| (message.fds >> bit) & 1 != 0)
        .map(|bit| files[bit % files.len()])
        .collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let bytes = [IoSlice::new(&message.bytes)];
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(stream, &bytes, &mut control, flags);
    sent.is_ok_and(|count| count == message.bytes.len())
}

/// The target.
pub fn vfio(data: &[u8]) {
    let mut input = Input::new(data);
    let secret = Secret::of(data);
    let file = memory(&secret, &mut input);
    let other = rustix::fs::memfd_create("other", MemfdFlags::CLOEXEC).expect("a file");
    rustix::fs::ftruncate(&other, 3 * PAGE).expect("a size");
    let event = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
        .expect("an event");
    let files = [file.as_fd(), other.as_fd(), event.as_fd(), event.as_fd()];
    let (monitor, server) = UnixStream::pair().expect("a socket");
    let device = Function::new(Config::new(MAC, 8), Kinds::all(8)).expect("a device");
    let (mut wire, uplink) = UnixStream::pair().expect("a socket");
    wire.set_nonblocking(true).expect("a socket");
    uplink.set_nonblocking(true).expect("a socket");
    device.lock().set_uplink(Some(uplink));

    let mut total = 0;
    'all: for _ in 0..MESSAGES {
        if input.is_empty() {
            break;
        }
        for message in messages(&mut input) {
            total += message.bytes.len();
            if message.bytes.is_empty() {
                continue;
            }
            if total > MOST_BYTES || !send(&monitor, &message, &files) {
                break 'all;
            }
        }
    }
    monitor.shutdown(Shutdown::Write).expect("a socket");
    let reader = std::thread::spawn(move || {
        let mut answers = Vec::new();
        let mut monitor = monitor;
        let _ = monitor.read_to_end(&mut answers);
        answers
    });
    let mut connection = Connection::new(server);
    let _ = connection.serve(&mut Frontend::new(&device, None));
    device.lock().pump();
    drop(connection);
    let answers = reader.join().expect("a reader");

    // Answers can be followed.
    let mut rest = answers.as_slice();
    while !rest.is_empty() {
        let header = rest.first_chunk::<HEADER>().expect("a header");
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let size = word(4) as usize;
        assert!(size >= HEADER && size <= rest.len(), "half an answer");
        assert_eq!(word(8) & 15, FLAG_REPLY, "an answer that is none");
        rest = &rest[size..];
    }
    assert!(!secret.is_in(&answers), "a secret is in an answer");
    let mut frames = Vec::new();
    let _ = wire.read_to_end(&mut frames);
    assert!(!secret.is_in(&frames), "a secret is on the wire");
    let mut guard = vec![0; GUARD as usize];
    for at in [0, GUARD + MEMORY] {
        let read = rustix::io::pread(&file, &mut guard, at).expect("the file");
        assert_eq!(read, guard.len());
        assert!(
            secret.is_whole(&guard),
            "memory that was not mapped has changed"
        );
    }
}
