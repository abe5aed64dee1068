// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Shortcuts: a neighbour that writes what it likes into rings, a switch that says what it likes
//! to a device, and ports that say what they like to a switch.

use crate::secret::Secret;
use crate::Input;
use ferrite_device::function::Function;
use ferrite_device::guest_memory::Passing;
use ferrite_device::interrupts::Kinds;
use ferrite_engine::{Config, Loan};
use ferrite_fabric::framing::{Reader, MAX_FRAME, MIN_FRAME};
use ferrite_fabric::ring::{self, Consumer, Producer, Record, DATA, MAX_HEAD, MAX_TRAIN};
use ferrite_fabric::shortcut::{is_message, Action, Broker, Message, MAX_SHORTCUTS};
use ferrite_fabric::switch::{Mac, PortId};
use ferrite_fabric::wake;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

const STEPS: usize = 128;
const MAC: Mac = Mac([2, 0xfe, 0, 0, 0, 1]);
/// Bytes of a ring in front of the frames.
const CONTROL: u64 = 4096;
/// Where the other side's index of what it has written is, and of what it has read.
const TAIL: u64 = 0;
const HEAD: u64 = 64;
const RING: u64 = CONTROL + DATA as u64;

/// Writes into the memory of two rings what the input says: indices, lengths, anything.
pub(crate) fn poke(memory: &OwnedFd, input: &mut Input<'_>) {
    let ring = u64::from(input.u8() & 1) * RING;
    let (at, bytes) = match input.u8() % 6 {
        0 | 1 => (TAIL, (input.number() as u32).to_ne_bytes().to_vec()),
        2 => (
            TAIL,
            (input.number() as u32)
                .wrapping_mul(64)
                .to_ne_bytes()
                .to_vec(),
        ),
        3 => (
            HEAD,
            (input.number() as u32)
                .wrapping_mul(64)
                .to_ne_bytes()
                .to_vec(),
        ),
        4 => {
            // A frame, behind its length.
            let place = CONTROL + input.number() % (DATA as u64 / 64) * 64;
            let mut bytes = (input.number() as u32).to_ne_bytes().to_vec();
            let length = usize::from(input.u8());
            bytes.extend(input.bytes(length));
            (place.min(RING - bytes.len() as u64), bytes)
        }
        _ => (
            input.number() % 4096 / 4 * 4,
            input.u32().to_ne_bytes().to_vec(),
        ),
    };
    rustix::io::pwrite(memory, &bytes, ring + at).expect("the rings");
}

/// A ring whose other side is not to be trusted.
fn rings(input: &mut Input<'_>, secret: &Secret) {
    let memory = ring::create().expect("rings");
    let (mut producer, mut consumer): (Producer, Consumer) =
        ring::attach(&memory, 0).expect("rings");
    let mut buffer = secret.fill(MAX_FRAME + 64);
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        match input.u8() & 7 {
            0..=2 => poke(&memory, input),
            3 => {
                let _ = consumer.look();
            }
            4 => match consumer.next(&mut buffer) {
                Ok(Some(record)) => {
                    let length = record.copied();
                    assert!((MIN_FRAME..=MAX_FRAME).contains(&length), "{length}");
                    if let Record::Train(head, log_mtu, span) = record {
                        assert!(head <= MAX_HEAD && (8..=12).contains(&log_mtu));
                        assert!((1..=MAX_TRAIN).contains(&span.len()));
                        let payload = Arc::new(Passing(span));
                        let loan = Loan::passing(log_mtu, &payload, payload.0.len());
                        let held = loan.hold().expect("no lease");
                        assert_eq!(
                            held.data().bytes().map(|bytes| bytes.len()),
                            Some(loan.len())
                        );
                    }
                    // What is behind it stays what it was.
                    let whole = secret.fill(MAX_FRAME + 64);
                    assert_eq!(buffer[length..], whole[length..]);
                    buffer = whole;
                }
                Ok(None) => assert!(consumer.is_drained()),
                Err(ring::Broken) => return,
            },
            5 => {
                let length = input.number() as usize % (MAX_FRAME + 10);
                let pushed = if length % 2 == 0 {
                    producer.push(&vec![0x5a; length])
                } else {
                    let (head, log_mtu) = (length % 130, (length % 16) as u8);
                    producer.push_train(&vec![0x5a; head], log_mtu, length * 5, |_| length % 7 != 0)
                };
                if pushed.is_err() {
                    return;
                }
                producer.must_wake();
            }
            6 => match producer.room(input.number() as usize % (2 * DATA)) {
                Ok(room) => assert!(room <= DATA),
                Err(ring::Broken) => return,
            },
            _ => {
                consumer.release();
                if !consumer.sleep() {
                    consumer.wake();
                }
                if producer.wait_for_room().is_err() {
                    return;
                }
            }
        }
    }
}

fn any_message(input: &mut Input<'_>) -> Message {
    let id = u32::from(input.u8() % 6);
    match input.u8() & 7 {
        0 => Message::Hello {
            any_source: id & 1 != 0,
        },
        1 => Message::Grant {
            shortcut: id,
            side: input.u8() & 1,
            peer: Mac([2, 0xfe, 0, 0, 0, input.u8()]),
        },
        2 => Message::Ready(id),
        3 => Message::Open(id),
        4 => Message::Revoke(id),
        5 => Message::Released(id),
        6 => Message::Close(id),
        _ => Message::Closed(id),
    }
}

/// A device whose switch and neighbours are not to be trusted.
fn device(input: &mut Input<'_>) {
    let device = Function::new(Config::new(MAC.0, 4), Kinds::all(4)).expect("a device");
    let (mut wire, uplink) = UnixStream::pair().expect("a socket");
    wire.set_nonblocking(true).expect("a socket");
    uplink.set_nonblocking(true).expect("a socket");
    device.lock().set_uplink(Some(uplink));
    let mut reader = Reader::new();
    let mut fds = VecDeque::new();
    let mut memories: Vec<OwnedFd> = Vec::new();
    let mut ends: Vec<OwnedFd> = Vec::new();
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let mut stream = Vec::new();
        let mut append = |frame: &[u8]| {
            stream.extend((frame.len() as u32).to_be_bytes());
            stream.extend(frame);
        };
        match input.u8() & 7 {
            0 => {
                // A grant as it should be, and then what the neighbour makes of it.
                let memory = ring::create().expect("rings");
                let [own, theirs] = wake::pair().expect("a socket");
                fds.push_back(memory.try_clone().expect("a descriptor"));
                fds.push_back(theirs);
                memories.push(memory);
                ends.push(own);
                let id = memories.len() as u32;
                let side = input.u8() & 1;
                let peer = Mac([2, 0xfe, 0, 0, 0, 0x40 + id as u8]);
                let grant = Message::Grant {
                    shortcut: id,
                    side,
                    peer,
                };
                append(&grant.to_frame(peer));
                append(&Message::Open(id).to_frame(peer));
            }
            1 | 2 => append(&any_message(input).to_frame(MAC)),
            3 => {
                let mut frame = any_message(input).to_frame(MAC);
                let at = usize::from(input.u8()) % frame.len();
                frame[at] ^= input.u8();
                append(&frame);
            }
            4 => {
                let length = MIN_FRAME + usize::from(input.u8());
                let mut frame = vec![0; length];
                let bytes = input.bytes(length);
                frame[..bytes.len()].copy_from_slice(bytes);
                append(&frame);
            }
            5 => {
                let count = usize::from(input.u8());
                stream.extend(input.bytes(count));
            }
            6 => {
                // Descriptors that are none of a grant's.
                let socket = UnixStream::pair().expect("a socket");
                fds.push_back(OwnedFd::from(socket.0));
            }
            _ => {
                if let Some(memory) = memories.last() {
                    poke(memory, input);
                }
            }
        }
        let mut source = stream.as_slice();
        while !source.is_empty() {
            reader.fill(&mut source).expect("bytes");
            if device
                .read_uplink(&mut reader, &mut fds, &mut |_| true)
                .is_err()
            {
                return;
            }
        }
        drop(device.read_shortcuts(&mut |_| true));
        device.lock().pump();
        let mut said = Vec::new();
        let _ = wire.read_to_end(&mut said);
    }
}

/// A switch whose ports are not to be trusted.
fn broker(input: &mut Input<'_>) {
    let mut broker = Broker::default();
    let mut now = 0u64;
    let mut ports: BTreeMap<PortId, Mac> = BTreeMap::new();
    let mut open = BTreeSet::new();
    let mac = |port: PortId| Mac([2, 0xfe, 0, 0, 1, port as u8]);
    broker.allow(true, now);
    for step in 0..STEPS {
        if input.is_empty() && step > 0 {
            break;
        }
        let choice = input.u8();
        let port = PortId::from(input.u8() & 7);
        match choice & 7 {
            0 => {
                ports.insert(port, mac(port));
                broker.attach(port, Some(u32::from(choice >> 6)));
                let hello = Message::Hello { any_source: false };
                broker.message(port, mac(port), hello, true, now);
            }
            1 => {
                let message = any_message(input);
                // Whatever it is, it is read as it was written.
                let frame = message.to_frame(mac(port));
                assert!(is_message(&frame));
                let read = Message::parse(&frame);
                assert_eq!(read, Some((mac(port), message)));
                broker.message(port, mac(port), message, choice & 8 != 0, now);
            }
            2 | 3 => {
                let to = PortId::from(input.u8() & 7);
                for _ in 0..4 {
                    broker.seen(port, to, mac(to), |mac| behind(&ports, mac), now);
                }
            }
            4 => {
                ports.remove(&port);
                broker.detach(port, now);
            }
            5 => {
                now = now.saturating_add(input.number().saturating_mul(10_000_000));
                broker.told(now, |_, _| None);
                broker.poll(now, |_| choice & 8 != 0);
            }
            6 => broker.allow(choice & 8 == 0, now),
            _ => {
                let mut frame = input.bytes(80).to_vec();
                frame.resize(frame.len().max(60), 0);
                if let Some((_, message)) = Message::parse(&frame) {
                    broker.message(port, mac(port), message, true, now);
                }
            }
        }
        follow(&mut broker, &mut open, &mut ports, now, choice & 16 != 0);
        for &port in ports.keys() {
            let own = broker.shortcuts().filter(|&id| {
                let ends = broker.ends(id).expect("a shortcut has ends");
                ends.iter().any(|(end, _)| *end == port)
            });
            assert!(own.count() <= MAX_SHORTCUTS);
        }
    }
    // When all are gone nothing is left.
    for port in 0..8 {
        broker.detach(port, now);
    }
    follow(&mut broker, &mut open, &mut ports, now, false);
    assert_eq!(broker.shortcuts().count(), 0);
    assert!(open.is_empty(), "rings of {open:?} are kept for ever");
}

fn behind(ports: &BTreeMap<PortId, Mac>, mac: &Mac) -> Option<PortId> {
    let mut all = ports.iter();
    all.find(|(_, other)| *other == mac).map(|(port, _)| *port)
}

/// Does what the process around a broker does.
fn follow(
    broker: &mut Broker,
    open: &mut BTreeSet<u32>,
    ports: &mut BTreeMap<PortId, Mac>,
    now: u64,
    fails: bool,
) {
    for _ in 0..64 {
        let actions = broker.actions();
        if actions.is_empty() {
            return;
        }
        for action in actions {
            match action {
                Action::Grant(id) if fails => {
                    // One whose ports have gone by now is also forgotten, as the others are.
                    if broker.ends(id).is_none() {
                        open.insert(id);
                    }
                    broker.failed(id, now);
                }
                Action::Grant(id) => assert!(open.insert(id), "{id} is granted twice"),
                Action::Tell(..) => {}
                Action::CutOff(port) => {
                    ports.remove(&port);
                    broker.detach(port, now);
                }
                Action::Forget(id) => assert!(open.remove(&id), "{id} is forgotten twice"),
            }
        }
    }
    panic!("there is always something to be done");
}

/// The target.
pub fn shortcuts(data: &[u8]) {
    let mut input = Input::new(data);
    match input.u8() % 3 {
        0 => rings(&mut input, &Secret::of(data)),
        1 => device(&mut input),
        _ => broker(&mut input),
    }
}
