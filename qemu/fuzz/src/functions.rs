// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Two functions, of one adapter or of two processes that share rings, each with a machine of its own that writes to the
//! other and reads from it. They let go of what the other may be reading just then: they release tags, destroy queue
//! pairs, are reset, lose their memory. The first becomes dishonest, too, and writes what it likes into its queues,
//! registers, frames and rings.
//!
//! What was let go of is read by nobody; what was not given keeps its bytes, and they get nowhere; the other goes on.

use crate::channels::frame;
use crate::secret::Secret;
use crate::shortcuts::poke;
use crate::Input;
use ferrite_abi::*;
use ferrite_conformance::host::{
    region_of, Host, CONTROL_LOG_ENTRIES, OWN_GID, OWN_GID6, PEER_GID, PEER_GID6, USER_PAGE,
};
use ferrite_conformance::memory::{BASE, PAGE};
use ferrite_conformance::rings::{Cq, Qp, Region};
use ferrite_conformance::transport::Device;
use ferrite_conformance::work::Work;
use ferrite_device::adapter::Adapter;
use ferrite_device::function::{Frontend, Function};
use ferrite_device::interrupts::Kinds;
use ferrite_device::mapping::{Mapping, Row, Vlans};
use ferrite_device::vfio_user;
use ferrite_engine::Config;
use ferrite_fabric::framing::{Reader, Writer, MAX_FRAME, MIN_FRAME};
use ferrite_fabric::ring;
use ferrite_fabric::shortcut::Message;
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake;
use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Steps of one input.
const STEPS: usize = 40;
/// Bytes of what is lent, and of the place for it: some packets of any MTU, and more than is copied at once.
const LENGTH: u32 = 96 << 10;
/// Work requests that are under way at most.
const MOST: usize = 8;
/// What there is to read (in whose place is the secret when it is nobody's business any more), and what a place is full of.
const OPEN: u8 = 0x11;
const EMPTY: u8 = 0;
const MESSAGES: u16 = 8;
const SHORTCUT: u32 = 7;
const SWITCH: [u8; 6] = [2, 0, 0, 0, 0, 9];
/// How long the last writes may take: none of their packets is lost.
const PATIENCE: Duration = Duration::from_secs(20);

fn mac(function: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0xfe, 0, 1 + function as u8]
}

fn gids(function: usize) -> [[u8; 16]; 2] {
    [[OWN_GID, OWN_GID6], [PEER_GID, PEER_GID6]][function]
}

/// What a machine has for the other one.
struct End {
    qp: Qp,
    cq: Cq,
    /// Is read by the other, and written from.
    source: Region,
    /// Is written by the other, and read into.
    place: Region,
    under_way: usize,
    /// The tag of the source is there.
    lends: bool,
    /// The other has been honest as long as the place was there.
    clean: bool,
}

/// A machine.
struct Guest<'a> {
    host: Host<'a>,
    number: usize,
    secret: Secret,
    /// Pages of nobody, full of that.
    guards: Vec<u64>,
    end: End,
    honest: bool,
    /// The other was honest all the time.
    was_told_nothing: bool,
    /// What comes by the rings is what the other has sent.
    trusts: bool,
    is_mapped: bool,
}

fn guard(host: &mut Host<'_>, secret: &Secret, guards: &mut Vec<u64>) {
    let at = host.memory.allocate(PAGE);
    host.memory.write(at, &secret.fill(PAGE as usize));
    guards.push(at);
}

fn begin(host: &mut Host<'_>, number: usize, secret: &Secret, guards: &mut Vec<u64>) -> End {
    host.start().expect("a device that starts");
    for (index, gid) in [(0, gids(number)[0]), (1, gids(number)[1])] {
        host.set_gid(index, gid, VLAN_NONE).expect("an address");
    }
    guard(host, secret, guards);
    let cq = host.create_cq().expect("a completion queue");
    guard(host, secret, guards);
    let qp = host.create_qp(Service::Rc, &cq).expect("a queue pair");
    let mut region = |access| {
        guard(host, secret, guards);
        host.region(access, LENGTH.into()).expect("a region")
    };
    let source = region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ);
    let place = region(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE);
    guard(host, secret, guards);
    End {
        qp,
        cq,
        source,
        place,
        under_way: 0,
        lends: true,
        clean: true,
    }
}

impl<'a> Guest<'a> {
    fn new(device: &'a mut Device, number: usize, secret: Secret) -> Self {
        let mut host = Host::new(device, None, None).expect("a device");
        let mut guards = Vec::new();
        let end = begin(&mut host, number, &secret, &mut guards);
        Self {
            host,
            number,
            secret,
            guards,
            end,
            honest: true,
            was_told_nothing: true,
            trusts: true,
            is_mapped: true,
        }
    }

    fn fill(&self, region: Region, byte: u8) {
        self.host.memory.fill(region.dma, region.length, byte);
    }

    /// Nobody has a right to the source any more: something else is there now.
    fn hide(&self) {
        let source = self.end.source;
        let bytes = self.secret.fill(source.length as usize);
        self.host.memory.write(source.dma, &bytes);
    }

    fn take_completions(&mut self) {
        if self.honest {
            while let Some(entry) = self.end.cq.take(&self.host.memory) {
                let is_own = entry.qpn == self.end.qp.qpn;
                self.end.under_way -= usize::from(is_own && self.end.under_way > 0);
            }
        }
    }

    fn post(&mut self, work: &Work) {
        let posted = self.host.post(&mut self.end.qp, work);
        posted.expect("an honest machine's device");
        self.end.under_way += 1;
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.end.lends) {
            let released = self
                .host
                .destroy(CommandOpcode::ReleaseTag, self.end.source.tag);
            released.expect("a tag that is there");
            self.hide();
        }
    }

    /// Registers the source again, where it is not, for whoever asks from now on.
    fn lend(&mut self) {
        if !self.end.lends {
            let mut command = self
                .host
                .region_command(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ, 1);
            let old = self.end.source;
            command.buffer = Buffer::contiguous(old.dma, old.length);
            self.fill(old, OPEN);
            self.host.execute(&command).expect("a region");
            self.end.source = region_of(&command);
            self.end.lends = true;
        }
    }

    /// Gives up the queue pair for another, and the place if somebody may have written what he liked there.
    fn renew(&mut self, peer_is_honest: bool) {
        let old = self.end.qp.qpn;
        let destroyed = self.host.destroy(CommandOpcode::DestroyQueuePair, old);
        destroyed.expect("a queue pair that is there");
        self.hide();
        while self.end.cq.take(&self.host.memory).is_some() {}
        self.end.under_way = 0;
        let qp = self.host.create_qp(Service::Rc, &self.end.cq);
        self.end.qp = qp.expect("a queue pair");
        if !self.end.clean && peer_is_honest && self.trusts {
            let tag = self.end.place.tag;
            let released = self.host.destroy(CommandOpcode::ReleaseTag, tag);
            released.expect("a tag that is there");
            let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE;
            let place = self.host.region(access, LENGTH.into());
            self.end.place = place.expect("a region");
            self.end.clean = true;
        }
    }

    fn join(&mut self, other: usize, peer: u32, log_mtu: u8) {
        let (mac, gid) = (mac(other), gids(other)[0]);
        let to_peer = self.host.to_device(mac, gid, peer, log_mtu);
        let rts = QueuePairStateCode::Rts;
        let joined = self.host.bring(Service::Rc, &self.end.qp, rts, &to_peer);
        joined.expect("a new queue pair");
    }

    /// Ends all that there is by a reset, or takes the device's memory away before that, and begins anew with other
    /// memory.
    fn restart(&mut self, how: u8) {
        let device = &mut self.host.device;
        let gone = match how % 5 {
            3 if self.is_mapped => {
                self.is_mapped = false;
                device.unmap(&self.host.memory)
            }
            4 => device.set_bus_master(false),
            _ => Ok(()),
        };
        gone.expect("memory that it had");
        if how % 5 > 2 {
            self.hide();
        }
        if !self.is_mapped {
            let mapped = self.host.device.map(&self.host.memory);
            mapped.expect("memory that was mapped before");
            self.is_mapped = true;
        }
        let device = &mut self.host.device;
        // Whoever wrote what he liked may have written to configuration space.
        let done = match how % 5 {
            0 if self.honest => device.control_reset(),
            1 if self.honest => device.function_level_reset(),
            _ => device.reset(),
        };
        done.expect("a reset");
        self.hide();
        self.check();
        if !self.honest {
            // Its own device may have written anywhere for it.
            self.guards.clear();
        }
        let enabled = self.host.device.set_bus_master(true);
        enabled.expect("configuration space");
        self.end = begin(&mut self.host, self.number, &self.secret, &mut self.guards);
        self.end.clean = self.trusts;
        self.fill(self.end.source, OPEN);
        self.honest = true;
    }

    /// What is not the other's has not changed, and what it is to have is what it was given.
    fn check(&self) {
        if !self.honest {
            return;
        }
        for &at in &self.guards {
            let bytes = self.host.memory.bytes(at, PAGE);
            assert!(self.secret.is_whole(&bytes), "memory of nobody has changed");
        }
        if self.end.clean {
            let place = self.end.place;
            let bytes = self.host.memory.bytes(place.dma, place.length);
            let known = |byte: &u8| [OPEN, EMPTY].contains(byte);
            assert!(
                bytes.iter().all(known),
                "what was let go of has been read by the other"
            );
        }
    }

    /// A machine that does what it likes: the next step of an input.
    fn misbehave(&mut self, function: &Function, input: &mut Input<'_>) {
        let choice = input.u8();
        let end = &self.end;
        let memory = &self.host.memory;
        match choice % 8 {
            0..=2 => {
                let into = [
                    end.qp.record,
                    end.qp.send_ring,
                    end.qp.receive_ring,
                    end.cq.record,
                    end.cq.ring,
                    self.host.control_record() - control_record_offset(CONTROL_LOG_ENTRIES),
                ];
                let at = input.pick(&into) + u64::from(input.u8() & !7);
                memory.write(at, input.bytes(usize::from(choice >> 2)));
                let word = send_doorbell(end.qp.qpn, input.u32());
                // Whatever comes of it, the device may have stopped.
                let _ = self.host.device.doorbell(USER_PAGE, DOORBELL_SEND, word);
                let word = input.number();
                let _ = self.host.device.doorbell(0, DOORBELL_CONTROL, word);
            }
            3 | 4 => {
                let bar = [BAR_REGISTERS, BAR_DOORBELLS, vfio_user::REGION_CONFIG];
                let region = input.pick(&bar);
                let size = 1 << (choice >> 6);
                let most = self.host.device.region_size(region).max(size);
                let offset = (input.number() % most) & !(size - 1);
                let bytes = input.u64().to_le_bytes();
                let _ = self
                    .host
                    .device
                    .write(region, offset, &bytes[..size as usize]);
            }
            5 if self.is_mapped => {
                let _ = self.host.device.unmap(memory);
                self.is_mapped = false;
            }
            _ => {
                let mut frame = frame(input, mac(1 - self.number));
                if let (Some(source), true) = (frame.get_mut(6..12), choice & 0x80 == 0) {
                    source.copy_from_slice(&mac(self.number));
                }
                let mut core = function.lock();
                core.frame_from_vm(&frame);
                core.pump();
            }
        }
    }
}

/// Both are connected anew.
fn connect(guests: &mut [Guest<'_>; 2], log_mtu: u8) {
    let honest = [0, 1].map(|number: usize| guests[number].honest);
    for number in [0, 1] {
        guests[number].renew(honest[1 - number]);
        guests[number].lend();
        guests[number].fill(guests[number].end.source, OPEN);
    }
    for number in [0, 1] {
        let peer = guests[1 - number].end.qp.qpn;
        guests[number].join(1 - number, peer, log_mtu);
    }
}

/// One of them writes to the other, or reads from it, what and where it may, or a little beside that.
fn exchange(guests: &mut [Guest<'_>; 2], from: usize, input: &mut Input<'_>) {
    let choice = input.u8();
    let (peer_source, peer_place) = {
        let end = &guests[1 - from].end;
        (end.source, end.place)
    };
    let guest = &mut guests[from];
    guest.take_completions();
    guest.lend();
    for _ in 0..=choice & 3 {
        let length = match choice >> 6 {
            0 => (input.number() as u32) % LENGTH,
            1 => LENGTH,
            _ => (1 << (input.u8() % 18)).min(LENGTH),
        };
        let shift = u64::from(input.u8()).min(u64::from(LENGTH - length));
        // What an input says does not depend on what was completed by now.
        if guest.end.under_way >= MOST {
            continue;
        }
        let (opcode, own, there) = if choice & 4 == 0 {
            (SendOpcode::Write, guest.end.source, peer_place)
        } else {
            (SendOpcode::Read, guest.end.place, peer_source)
        };
        // An end that is beyond the region's, now and then.
        let beyond = if choice & 0x38 == 0x38 {
            u64::from(LENGTH)
        } else {
            0
        };
        let parts = u32::from((choice >> 3) & 1) + 1;
        let first = length / parts;
        let list = [
            own.sge(shift, first),
            own.sge(shift + u64::from(first), length - first),
        ];
        let list = &list[..parts as usize];
        let address = there.address + beyond;
        guest.post(&Work::remote(opcode, list, address, there.tag));
    }
}

/// Ends what runs beside, also where this ends by a panic.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// What the functions have between them.
enum Between {
    /// The process that both are of.
    Adapter(Adapter),
    /// Rings that two processes share, and what these are woken by.
    Rings(Box<[Function; 2]>, OwnedFd),
}

fn config(function: usize) -> Config {
    Config {
        number: function as u8,
        ..Config::new(mac(function), MESSAGES)
    }
}

impl Between {
    fn adapter() -> (Self, Vec<UnixStream>) {
        let row = |function| Row {
            mac: Mac(mac(function)),
            any_source: false,
            vlans: Vlans::all(),
        };
        let mapping = Mapping::new(vec![row(0), row(1)]).expect("a table");
        let configs = vec![config(0), config(1)];
        let adapter = Adapter::new(mapping, configs, Kinds::all(MESSAGES), true);
        let adapter = adapter.expect("an adapter");
        let (wire, uplink) = uplink();
        adapter.set_uplink(Some(uplink));
        (Self::Adapter(adapter), vec![wire])
    }

    fn rings() -> (Self, Vec<UnixStream>) {
        let memory = ring::create().expect("rings");
        let mut ends = wake::pair().expect("sockets").into_iter();
        let mut wires = Vec::new();
        let functions = [0, 1].map(|number: usize| {
            let config = Config::new(mac(number), MESSAGES);
            let function = Function::new(config, Kinds::all(MESSAGES)).expect("a function");
            let (wire, uplink) = uplink();
            wires.push(wire);
            function.lock().set_uplink(Some(uplink));
            let grant = Message::Grant {
                shortcut: SHORTCUT,
                side: number as u8,
                peer: Mac(mac(1 - number)),
            };
            let memory = memory.try_clone().expect("a descriptor");
            let mut fds = [memory].into_iter().chain(ends.next()).collect();
            for message in [grant, Message::Open(SHORTCUT)] {
                let mut reader = reader_of(&message.to_frame(Mac(SWITCH)));
                let read = function.read_uplink(&mut reader, &mut fds, &mut |_| true);
                assert!(read.is_ok(), "a message is a frame");
            }
            function
        });
        (Self::Rings(Box::new(functions), memory), wires)
    }

    fn function(&self, number: usize) -> &Function {
        match self {
            Self::Adapter(adapter) => &adapter.functions()[number],
            Self::Rings(functions, _) => &functions[number],
        }
    }

    /// A frame from the wire, to a function where each has one of its own.
    fn deliver(&self, number: usize, frame: &[u8]) {
        let mut reader = reader_of(frame);
        let read = match self {
            Self::Adapter(adapter) => adapter.port().deliver(&mut reader),
            Self::Rings(functions, _) => {
                let function = &functions[number];
                function.read_uplink(&mut reader, &mut VecDeque::new(), &mut |_| true)
            }
        };
        assert!(read.is_ok(), "a frame of a length that there is");
    }

    /// Does what the threads do that have no guest.
    fn go_on(&self, held: &[AtomicBool; 2]) {
        for (number, held) in held.iter().enumerate() {
            let function = self.function(number);
            if held.load(Ordering::Acquire) {
                function.lock().pump();
            } else {
                function.read_shortcuts(&mut |_| true).pump();
            }
            function.port().flush();
        }
    }
}

fn uplink() -> (UnixStream, UnixStream) {
    let (wire, uplink) = UnixStream::pair().expect("a socket");
    for end in [&wire, &uplink] {
        end.set_nonblocking(true).expect("a socket");
    }
    (wire, uplink)
}

/// Reads this frame, if it is of a length that one may have.
fn reader_of(frame: &[u8]) -> Reader {
    let mut reader = Reader::new();
    let mut writer = Writer::new(1 << 20);
    if (MIN_FRAME..=MAX_FRAME).contains(&frame.len()) && writer.push(frame) {
        let mut bytes = Vec::new();
        let flushed = writer.flush(&mut bytes);
        assert!(flushed.is_ok_and(|all| all), "a vector has room");
        let filled = reader.fill(&mut &bytes[..]);
        assert!(filled.is_ok_and(|count| count > 0), "a frame has bytes");
    }
    reader
}

/// Serves a function at a socket, to whoever comes first, and connects to that.
fn device<'scope>(function: &'scope Function, scope: &'scope thread::Scope<'scope, '_>) -> Device {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("ferrite-fuzz-{}-{count}", std::process::id());
    let path = std::env::temp_dir().join(name);
    // One of a process that had this number may be there still.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).expect("a socket");
    scope.spawn(move || {
        let (stream, _) = listener.accept().expect("a monitor");
        let mut connection = vfio_user::Connection::new(stream);
        let _ = connection.serve(&mut Frontend::new(function, None));
    });
    let device = Device::connect(&path).expect("a device");
    let _ = std::fs::remove_file(&path);
    device
}

/// Does the steps of an input.
fn steps(
    guests: &mut [Guest<'_>; 2],
    between: &Between,
    held: &[AtomicBool; 2],
    input: &mut Input<'_>,
) {
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        let choice = input.u8();
        let who = usize::from(choice >> 7);
        let both_honest = guests[0].honest && guests[1].honest;
        match choice & 15 {
            0..=4 if guests[who].honest => exchange(guests, who, input),
            5 | 6 => {
                let holds = choice & 0x40 != 0;
                held[who].store(holds, Ordering::Release);
            }
            7 => thread::sleep(Duration::from_micros(u64::from(input.u8()) * 4)),
            8 if guests[who].honest => guests[who].release(),
            9 if both_honest => connect(guests, 8 + ((choice >> 4) & 7).min(4)),
            10 if guests[who].honest => {
                // Nothing is read for a queue pair that is not there, nor by its peer.
                let guest = &mut guests[who];
                let qpn = guest.end.qp.qpn;
                let reset = guest.host.move_qp(qpn, QueuePairStateCode::Reset);
                reset.expect("a queue pair that is there");
                guest.hide();
                guest.end.under_way = 0;
                connect_if(guests, both_honest, input.u8());
            }
            11 => {
                guests[who].restart(choice >> 4);
                connect_if(guests, guests[1 - who].honest, input.u8());
            }
            12 | 13 => {
                guests[0].honest = false;
                guests[1].end.clean = false;
                guests[1].was_told_nothing = false;
                match between {
                    Between::Rings(_, memory) if choice & 0x40 != 0 => {
                        poke(memory, input);
                        for guest in guests.iter_mut() {
                            (guest.trusts, guest.end.clean) = (false, false);
                        }
                    }
                    _ => guests[0].misbehave(between.function(0), input),
                }
            }
            14 => between.deliver(who, &frame(input, mac(who))),
            15 => {
                // Who has a cable of his own loses the rings with it.
                if let Between::Adapter(adapter) = between {
                    adapter.set_cable(choice & 0x40 != 0);
                }
            }
            _ => {}
        }
        guests.iter_mut().for_each(Guest::take_completions);
    }
}

fn connect_if(guests: &mut [Guest<'_>; 2], both: bool, log_mtu: u8) {
    if both {
        connect(guests, 8 + (log_mtu % 5));
    }
}

/// The target.
pub fn functions(data: &[u8]) {
    let mut input = Input::new(data);
    let (between, mut wires) = match input.u8() & 1 {
        0 => Between::adapter(),
        _ => Between::rings(),
    };
    let held = [const { AtomicBool::new(false) }; 2];
    let over = AtomicBool::new(false);
    let secrets = [0, 1].map(|number| Secret::of(&[data, &[number]].concat()));
    thread::scope(|scope| {
        let _over = Over(&over);
        let mut devices = [0, 1].map(|number| device(between.function(number), scope));
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                between.go_on(&held);
                thread::sleep(Duration::from_micros(30));
            }
        });
        let [one, other] = &mut devices;
        let mut guests = [
            Guest::new(one, 0, secrets[0]),
            Guest::new(other, 1, secrets[1]),
        ];
        connect(&mut guests, 10);
        steps(&mut guests, &between, &held, &mut input);

        // All goes on, whatever was.
        held.iter()
            .for_each(|held| held.store(false, Ordering::Release));
        if let Between::Adapter(adapter) = &between {
            adapter.set_cable(true);
        }
        guests[1].check();
        if !guests[0].honest {
            guests[0].restart(2);
        }
        connect(&mut guests, 12);
        for from in [0, 1] {
            // Rings that were spoilt are given up.
            if guests[from].trusts {
                last_write(&mut guests, from);
            }
        }
        for guest in &mut guests {
            guest.host.is_alive().expect("a device that goes on");
            guest.check();
        }
        for (number, guest) in guests.iter_mut().enumerate() {
            let used = guest.host.memory.allocate(PAGE) - BASE;
            let bytes = guest.host.memory.bytes(BASE, used);
            let others = &secrets[1 - number];
            // One that does what it likes may have told its own.
            let may_be = number == 1 && !guest.was_told_nothing;
            assert!(
                may_be || !others.is_in(&bytes),
                "a secret of the other is here"
            );
        }
    });
    let mut frames = Vec::new();
    for wire in &mut wires {
        let _ = wire.read_to_end(&mut frames);
    }
    assert!(!secrets[1].is_in(&frames), "a secret is on the wire");
}

/// One more write, of which nothing is lost on the way.
fn last_write(guests: &mut [Guest<'_>; 2], from: usize) {
    let place = guests[1 - from].end.place;
    let source = guests[from].end.source;
    let list = [source.sge(0, LENGTH)];
    let write = SendOpcode::Write;
    guests[from].post(&Work::remote(write, &list, place.address, place.tag));
    let begun = Instant::now();
    let entry = loop {
        let guest = &mut guests[from];
        match guest.end.cq.take(&guest.host.memory) {
            Some(entry) => break entry,
            None => thread::sleep(Duration::from_micros(30)),
        }
        assert!(begun.elapsed() < PATIENCE, "function {from} is stuck");
    };
    assert_eq!(entry.status, CompletionStatus::Success as u8);
    let got = guests[1 - from].host.memory.bytes(place.dma, place.length);
    assert!(got.iter().all(|byte| *byte == OPEN), "another write");
}
