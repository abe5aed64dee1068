// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A function: an engine and everything that is its guest's, under one lock.

use crate::config_space::{self, ConfigSpace, Effect};
use crate::counters::{LinkCounters, MmioCounters};
use crate::guest_memory::{GuestMemory, Passing};
use crate::inbox::{self, Given, Inbox, Parcel};
use crate::interrupts::{prepare_pin, prepare_vectors, Interrupts, Kinds};
use crate::keeper;
use crate::mapping::{Mapping, Refusal, Row, Vlans};
use crate::port::{Port, UPLINK_ROOM};
use crate::share;
use crate::shortcuts::{self, Congestion, Inbound, Inbounds, Outbounds};
use crate::vfio_user::{
    Backend, DmaMap, Kind, PinChange, VectorChange, MAX_DMA_MAPS, REGION_CONFIG,
};
use ferrite_abi as abi;
use ferrite_abi::Management;
use ferrite_engine::loan::{Data, Loan};
use ferrite_engine::memory::{DmaError, Host, HostMemory, Lending, Room, Way};
use ferrite_engine::roce::{seal, Medium};
use ferrite_engine::{ChannelEvent, Config, Disposition, Engine, Misbehaviour};
use ferrite_fabric::framing::{BadLength, Reader, MAX_FRAME};
use ferrite_fabric::ring::{Broken, Record};
use ferrite_fabric::shortcut::{is_message, Message, ShortcutId};
use ferrite_fabric::switch::Mac;
use ferrite_fabric::wake::End;
use rustix::process::Pid;
use serde_json::{json, Value};
use std::collections::VecDeque;
use std::io;
use std::net::{Ipv6Addr, Shutdown};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{mpsc, Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Times that the engine is polled, and nanoseconds after which it is not polled
/// again, before others may take the lock.
const PUMP_ROUNDS: usize = 16;
const PUMP_TIME: u64 = 1_000_000;
/// Frames from each shortcut before others may take the lock.
const FRAMES_PER_TURN: usize = 64;
/// Times that so many frames are taken from what others have sent, before others may take the lock.
const INBOX_TURNS: usize = 4;
/// What frames of one read may cost beside themselves before others may take the lock: copies for members
/// of a group, entries that are flushed ([`Engine::work`]).
const WORK_PER_TURN: u64 = 1024;
/// As many turns has a shortcut that is to be closed: the switch waits for it.
const LAST_TURNS: usize = 16;
/// How long the end of the process waits for others, at each step.
const LEAVE: Duration = Duration::from_secs(1);
/// On every machine that has it, this guest-physical address is memory.
const ALWAYS_MEMORY: u64 = 0x10_0000;

/// What the engine sees of the machine.
struct HostSide {
    memory: GuestMemory,
    interrupts: Interrupts,
    /// What it shares with other functions, and its number among them.
    port: Arc<Port>,
    number: usize,
    uplink_counters: LinkCounters,
    uplink_congestion: Congestion,
    /// Ways past the switch, and what went and came by them.
    outbound: Outbounds,
    shortcut_counters: LinkCounters,
    /// What went to the other functions and came from them; the ways to each, and who is to be
    /// woken, bit by bit.
    inside_counters: LinkCounters,
    inside_congestion: Vec<Congestion>,
    wakes: u64,
    link_up: bool,
    mac: Mac,
    /// The guest may send from other addresses than `mac`.
    any_source: bool,
}

impl HostSide {
    /// Whether a frame comes from the device's own address.
    fn is_own(&self, frame: &[u8]) -> bool {
        frame.get(6..12) == Some(&self.mac.0)
    }

    fn send(&mut self, frame: &[u8]) {
        let taken = self.port.send(self.number, frame);
        self.uplink_counters.sent(frame.len(), taken);
    }

    /// Counts a frame that the table has refused.
    fn count_refusal(&mut self, refusal: Refusal) {
        match refusal {
            Refusal::Source => self.uplink_counters.source_drops += 1,
            Refusal::Vlan => self.uplink_counters.vlan_drops += 1,
            Refusal::Kind => {}
        }
    }

    /// Sends a frame of a function that is not alone to where the table says. `by_wire` is how it
    /// leaves by the uplink.
    fn forward(&mut self, frame: &[u8], medium: Medium, by_wire: fn(&mut Self, &[u8])) {
        let targets = match self.port.mapping().from_function(self.number, frame) {
            Ok(targets) => targets,
            Err(refusal) => return self.count_refusal(refusal),
        };
        for other in targets.functions() {
            let inbox = self.port.inbox(other).filter(|_| self.link_up);
            let given = inbox.map(|inbox| inbox.give(Some(self.number), medium, frame));
            let taken = matches!(given, Some(Given::First | Given::Behind));
            self.inside_counters.sent(frame.len(), taken);
            if given == Some(Given::First) {
                self.wakes |= 1 << other;
            }
        }
        if targets.wire && self.port.has_uplink() {
            by_wire(self, frame);
        }
    }

    /// Sends a frame of a channel by the uplink.
    fn send_ordinary(&mut self, frame: &[u8]) {
        if self.uplink_congestion.is_stuck() {
            // Also where there is a little room: channels would take it before there is enough again
            // for the answers of queue pairs, and the socket would be stuck for good.
            self.uplink_counters.sent(frame.len(), false);
        } else {
            self.send_by_uplink(frame);
        }
    }

    /// The other function that has an address.
    fn inside(&self, destination: &[u8; 6]) -> Option<usize> {
        self.port.mapping().other(self.number, destination)
    }

    /// Sends a frame of the engine's; it is lost behind a socket that is stuck.
    fn send_by_uplink(&mut self, frame: &[u8]) {
        let taken = self.port.send_within_room(self.number, frame);
        self.uplink_counters.sent(frame.len(), taken);
    }
}

impl HostMemory for HostSide {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError> {
        self.memory.read(address, bytes)
    }
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError> {
        self.memory.write(address, bytes)
    }
    fn load_u32(&self, address: u64) -> Result<u32, DmaError> {
        self.memory.load_u32(address)
    }
    fn load_u64(&self, address: u64) -> Result<u64, DmaError> {
        self.memory.load_u64(address)
    }
    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError> {
        self.memory.store_u32(address, value)
    }
    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError> {
        self.memory.store_u64(address, value)
    }
    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError> {
        self.memory.compare_exchange_u64(address, compare, new)
    }
    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError> {
        self.memory.fetch_add_u64(address, addend)
    }
    fn fence(&self) {
        self.memory.fence();
    }
    fn lend(&self, address: u64, length: usize, loan: &mut Loan) -> Result<bool, DmaError> {
        self.memory.lend(address, length, loan)
    }
    fn place(&self, address: u64, data: Data<'_>) -> Result<(), DmaError> {
        self.memory.place(address, data)
    }
}

impl Host for HostSide {
    fn transmit(&mut self, frame: &[u8]) {
        if !self.port.is_alone() {
            let destination = frame.first_chunk();
            let inside = destination.is_some_and(|to| self.inside(to).is_some());
            if self.is_own(frame) {
                let medium = if inside { Medium::Memory } else { Medium::Wire };
                self.forward(frame, medium, Self::send_by_uplink);
            } else {
                let mut frame = frame.to_vec();
                seal(&mut frame);
                self.forward(&frame, Medium::Wire, Self::send_by_uplink);
            }
            return;
        }
        // The source is what the driver has put into the table of GIDs.
        if !self.is_own(frame) {
            if !self.any_source {
                self.uplink_counters.source_drops += 1;
                return;
            }
            // Neighbours take nothing else from a ring than what is its
            // owner's: it goes by the switch, which knows who may send it.
            let mut frame = frame.to_vec();
            seal(&mut frame);
            self.send_by_uplink(&frame);
            return;
        }
        match self.outbound.push(frame) {
            Some(taken) => self.shortcut_counters.sent(frame.len(), taken),
            None => self.send_by_uplink(frame),
        }
    }

    fn transmit_ordinary(&mut self, frame: &[u8]) {
        // What the device and the switch say to each other is not the guest's.
        if is_message(frame) {
            return;
        }
        if !self.port.is_alone() {
            self.forward(frame, Medium::Wire, Self::send_ordinary);
        } else if !self.any_source && !self.is_own(frame) {
            self.uplink_counters.source_drops += 1;
        } else {
            self.send_ordinary(frame);
        }
    }

    fn lends(&self, destination: &[u8; 6]) -> Option<Lending> {
        if self.port.is_alone() {
            self.outbound.to(destination).map(|_| shortcuts::LENDING)
        } else {
            let other = self.inside(destination).filter(|_| self.link_up);
            other.map(|_| Lending::INSIDE)
        }
    }

    fn transmit_lent(&mut self, head: &[u8], loan: Arc<Loan>) {
        let length = head.len() + loan.len();
        if self.port.is_alone() {
            let taken = self.outbound.push_lent(head, &loan);
            self.shortcut_counters.sent(length, taken);
            return;
        }
        let targets = match self.port.mapping().from_function(self.number, head) {
            Ok(targets) => targets,
            Err(refusal) => return self.count_refusal(refusal),
        };
        // It is from its own address to another function's ([`Host::lends`]), which may not be in the VLAN.
        let Some(other) = targets.functions().next() else {
            self.inside_counters.sent(length, false);
            return;
        };
        let inbox = self.port.inbox(other).filter(|_| self.link_up);
        let given = inbox.map(|inbox| inbox.lend(self.number, head, loan));
        let taken = matches!(given, Some(Given::First | Given::Behind));
        self.inside_counters.sent(length, taken);
        if given == Some(Given::First) {
            self.wakes |= 1 << other;
        }
    }

    fn way(&self, destination: &[u8; 6]) -> Way {
        if !self.port.is_alone() {
            // There are no shortcuts, of which this could be the number.
            let other = self.inside(destination);
            return other.map_or(Way::Wire, |other| Way::Memory(other as u32));
        }
        match self.outbound.to(destination) {
            Some(id) => Way::Memory(id),
            None => Way::Wire,
        }
    }

    fn room(&mut self, way: Way) -> Room {
        match way {
            Way::Memory(other) if !self.port.is_alone() => {
                let other = other as usize;
                let inbox = self.port.inbox(other);
                let room = inbox.map_or(usize::MAX, |inbox| inbox.room(self.number));
                match self.inside_congestion.get_mut(other) {
                    Some(congestion) => congestion.ask(room),
                    None => Room::Bytes(room),
                }
            }
            Way::Memory(id) => self.outbound.room(id),
            _ => {
                let room = self.port.room(self.number);
                self.uplink_congestion.ask(room)
            }
        }
    }

    fn raise(&mut self, message: u16) {
        self.interrupts.raise(message);
    }
}

/// The state of the device.
pub struct Core {
    engine: Engine,
    host: HostSide,
    config: ConfigSpace,
    mmio: MmioCounters,
    vm_counters: LinkCounters,
    function_resets: u64,
    device_resets: u64,
    start: Instant,
    /// Until when the I/O thread sleeps; `None` for ever.
    io_sleeps_until: Option<u64>,
    inbound: Inbounds,
    /// The pin is to be unmasked when the monitor's requests are dealt with.
    unmask_due: bool,
    /// The frame just taken from a ring.
    frame: Vec<u8>,
    /// What was taken out of what others have sent, and is not dealt with.
    mail: VecDeque<Parcel>,
}

impl Core {
    fn new(port: Arc<Port>, number: usize, config: Config, kinds: Kinds) -> Self {
        let mac = Mac(config.mac);
        let any_source = config.any_source;
        let functions = port.mapping().rows().len();
        let link_up = port.is_up();
        Self {
            host: HostSide {
                // The kernel has an end of mappings for the process, which is for all.
                memory: GuestMemory::with_room_for(if port.is_alone() {
                    MAX_DMA_MAPS
                } else {
                    MAX_DMA_MAPS / 2 / functions
                }),
                interrupts: Interrupts::new(kinds),
                port,
                number,
                uplink_counters: LinkCounters::default(),
                uplink_congestion: Congestion::default(),
                outbound: Outbounds::default(),
                shortcut_counters: LinkCounters::default(),
                inside_counters: LinkCounters::default(),
                inside_congestion: (0..functions).map(|_| Congestion::default()).collect(),
                wakes: 0,
                link_up,
                mac,
                any_source,
            },
            config: ConfigSpace::new(&config, kinds),
            engine: Engine::new(config),
            mmio: MmioCounters::default(),
            vm_counters: LinkCounters::default(),
            function_resets: 0,
            device_resets: 0,
            start: Instant::now(),
            io_sleeps_until: Some(0),
            inbound: Inbounds::default(),
            unmask_due: false,
            frame: vec![0; MAX_FRAME],
            mail: VecDeque::new(),
        }
        .told_of_link()
    }

    /// A link that is up from the start is nothing that changes.
    fn told_of_link(mut self) -> Self {
        let up = self.host.link_up;
        self.engine.set_link(up, 0, &mut self.host);
        self
    }

    /// Nanoseconds since the process began: the engine's clock.
    pub fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// A frame came from the wire; `true` if it is for the VM's own interface.
    pub fn frame_from_uplink(&mut self, frame: &[u8]) -> bool {
        self.host.uplink_counters.received(frame.len());
        let now = self.now();
        self.receive(frame, Medium::Wire, now)
    }

    fn receive(&mut self, frame: &[u8], medium: Medium, now: u64) -> bool {
        if !self.host.link_up {
            return false;
        }
        match self
            .engine
            .receive_frame(frame, medium, now, &mut self.host)
        {
            Disposition::Consumed => false,
            Disposition::PassToHost => true,
        }
    }

    fn receive_lent(&mut self, head: &[u8], loan: &Arc<Loan>, now: u64) {
        if self.host.link_up {
            self.engine.receive_lent(head, loan, now, &mut self.host);
        }
    }

    /// A frame came from the VM's own interface: it goes to the wire.
    pub fn frame_from_vm(&mut self, frame: &[u8]) {
        self.vm_counters.received(frame.len());
        // What the device and the switch say to each other is not the guest's.
        if is_message(frame) {
            return;
        }
        if !self.host.port.is_alone() {
            self.host.forward(frame, Medium::Wire, HostSide::send);
        } else if self.host.any_source || self.host.is_own(frame) {
            self.host.send(frame);
        } else {
            self.vm_counters.source_drops += 1;
        }
    }

    /// Takes some of the frames that other functions have sent, and that came by the uplink. `to_vm`
    /// as for [`Core::read_rings`].
    fn read_inbox(&mut self, to_vm: &mut dyn FnMut(&[u8]) -> bool) {
        if self.host.port.is_alone() {
            return;
        }
        let now = self.now();
        let mut mail = std::mem::take(&mut self.mail);
        self.engine.begin_turn(&mut self.host);
        let end = self.engine.work().wrapping_add(WORK_PER_TURN);
        'turns: for _ in 0..INBOX_TURNS {
            if mail.is_empty() {
                if let Some(inbox) = self.host.port.inbox(self.host.number) {
                    let wake = inbox.take(&mut mail, FRAMES_PER_TURN);
                    self.host.port.wake_functions(wake);
                }
            }
            while let Some(mut parcel) = mail.pop_front() {
                self.take_parcel(&mut parcel, now, to_vm);
                if self.is_over(end) {
                    break 'turns;
                }
            }
        }
        self.engine.end_turn(&mut self.host);
        self.mail = mail;
    }

    fn take_parcel(&mut self, parcel: &mut Parcel, now: u64, to_vm: &mut dyn FnMut(&[u8]) -> bool) {
        let length = parcel.length();
        let counters = match parcel.from {
            Some(_) => &mut self.host.inside_counters,
            None => &mut self.host.uplink_counters,
        };
        counters.received(length);
        let frame = &mut parcel.frame[..];
        if let Some(loan) = &parcel.loan {
            self.receive_lent(frame, loan, now);
        } else if self.receive(frame, parcel.medium, now) {
            if parcel.medium == Medium::Memory {
                seal(frame);
            }
            let taken = to_vm(frame);
            self.vm_counters.sent(frame.len(), taken);
        }
    }

    /// Whether something waits that others have sent.
    fn has_mail(&self) -> bool {
        let inbox = self.host.port.inbox(self.host.number);
        !self.mail.is_empty() || inbox.is_some_and(|inbox| !inbox.is_empty())
    }

    /// Follows a message of the switch about shortcuts.
    fn shortcut_message(&mut self, message: Message, fds: &mut VecDeque<OwnedFd>) {
        let (outbound, inbound) = (&mut self.host.outbound, &mut self.inbound);
        let answer = shortcuts::follow(message, fds, outbound, inbound);
        // Who waited for a shortcut that is gone has another way now.
        self.engine.room_again();
        if let Some(answer) = answer {
            self.say(answer);
        }
    }

    fn say(&mut self, message: Message) {
        self.host.port.say(message, self.host.mac);
    }

    fn forget_shortcut(&mut self, id: ShortcutId) {
        shortcuts::forget(id, &mut self.host.outbound, &mut self.inbound);
        self.engine.room_again();
    }

    /// The other side of a shortcut does not keep to the rules.
    fn shortcut_broke(&mut self, id: ShortcutId) {
        log::warn!("shortcut {id} is broken");
        self.forget_shortcut(id);
        self.say(Message::Released(id));
    }

    /// The ring that is to be read before a frame from the uplink.
    #[inline]
    fn ring_before(&self, frame: &[u8]) -> Option<ShortcutId> {
        // What is for many does not go by rings.
        let ring = self.inbound.before(frame);
        ring.filter(|_| frame.starts_with(&self.host.mac.0))
    }

    /// Takes some frames from each of the rings that are `wanted`: of all that
    /// have been written by now with `look`, without it of what had been the
    /// last time. `to_vm` gets those for the VM's own interface and tells
    /// whether they were taken. Where frames are much work the turn is over
    /// before all rings had theirs; the next begins with those.
    fn read_rings(
        &mut self,
        look: bool,
        wanted: impl Fn(&Inbound) -> bool,
        to_vm: &mut dyn FnMut(&[u8]) -> bool,
    ) {
        if self.inbound.is_empty() {
            return;
        }
        let now = self.now();
        let mut inbound = std::mem::take(&mut self.inbound);
        let mut over = Vec::new();
        // One turn of the engine for all frames.
        self.engine.begin_turn(&mut self.host);
        let end = self.engine.work().wrapping_add(WORK_PER_TURN);
        let (mut left_out, mut is_first) = (None, true);
        for ring in inbound.open().filter(|ring| wanted(ring)) {
            if self.is_over(end) {
                left_out = Some(ring.id());
                break;
            }
            let read = self.read_ring(ring, look, now, end, to_vm);
            if let Some(answer) = ring.answer(read) {
                over.push((ring.id(), answer));
            }
            // Who had what others have left of the turn did not have his.
            if !std::mem::take(&mut is_first) && self.is_over(end) {
                left_out = Some(ring.id());
                break;
            }
        }
        self.engine.end_turn(&mut self.host);
        if let Some(id) = left_out {
            inbound.begin_with(id);
        }
        self.inbound = inbound;
        for (id, answer) in over {
            if answer == Message::Released(id) {
                self.shortcut_broke(id);
            } else {
                self.forget_shortcut(id);
                self.say(answer);
            }
        }
    }

    /// Whether the engine has done the work of a turn that ends there.
    fn is_over(&self, end: u64) -> bool {
        end.wrapping_sub(self.engine.work()) as i64 <= 0
    }

    fn read_ring(
        &mut self,
        inbound: &mut Inbound,
        look: bool,
        now: u64,
        end: u64,
        to_vm: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Broken> {
        if look && !inbound.is_last() {
            inbound.ring.wake();
            inbound.ring.look()?;
        }
        // The engine gets a copy that nobody else can change.
        let mut buffer = std::mem::take(&mut self.frame);
        let mut result = Ok(());
        for _ in 0..FRAMES_PER_TURN {
            if self.is_over(end) {
                break;
            }
            let record = match inbound.ring.next(&mut buffer) {
                Ok(Some(record)) => record,
                Ok(None) => break,
                Err(broken) => {
                    result = Err(broken);
                    break;
                }
            };
            let (Record::Frame(length) | Record::Train(length, ..)) = record;
            let frame = &mut buffer[..length];
            // It is for the two devices at its ends alone.
            if frame[..6] != self.host.mac.0 || frame[6..12] != inbound.peer().0 {
                result = Err(Broken);
                break;
            }
            if let Record::Train(_, log_mtu, payload) = record {
                let length = payload.len();
                self.host.shortcut_counters.received(frame.len() + length);
                let loan = Loan::passing(log_mtu, &Arc::new(Passing(payload)), length);
                self.receive_lent(frame, &Arc::new(loan), now);
                // The neighbour may go on while the rest is read.
                inbound.release();
                continue;
            }
            self.host.shortcut_counters.received(length);
            if self.receive(frame, Medium::Memory, now) {
                seal(frame);
                let taken = to_vm(frame);
                self.vm_counters.sent(length, taken);
            }
        }
        self.frame = buffer;
        inbound.release();
        result
    }

    /// What wakes the device by shortcuts, if that has changed since
    /// `generation`.
    pub fn shortcut_events(&self, generation: &mut u64) -> Option<Vec<(ShortcutId, Arc<End>)>> {
        self.inbound.events(generation)
    }

    /// Counts frames to and from the VM's own interface.
    pub fn vm_counters(&mut self) -> &mut LinkCounters {
        &mut self.vm_counters
    }

    /// The uplink is connected (with the socket to write to) or gone, of a function that is alone.
    pub fn set_uplink(&mut self, stream: Option<UnixStream>) {
        let connected = stream.is_some();
        self.host.port.set_uplink(stream);
        self.uplink_changed(connected);
    }

    /// The port has another uplink, or none any more.
    pub fn uplink_changed(&mut self, connected: bool) {
        // Whoever granted them is gone.
        self.host.outbound.clear();
        self.inbound.clear();
        self.engine.room_again();
        if connected {
            self.host.uplink_counters.connects += 1;
        }
        self.update_link();
    }

    /// Pulls the cable, or plugs it in, of a function that is alone.
    pub fn set_cable(&mut self, plugged: bool) {
        if self.host.port.set_cable(plugged) {
            self.cable_changed(plugged);
        }
    }

    /// The port's cable was pulled, or plugged in.
    pub fn cable_changed(&mut self, plugged: bool) {
        self.tell_of_management(Management::Cable, plugged);
        self.update_link();
    }

    /// Tells the driver that the device was changed from outside.
    fn tell_of_management(&mut self, what: Management, on: bool) {
        let now = self.now();
        self.engine.managed(what, on, now, &mut self.host);
    }

    /// The device's own memory fails.
    pub fn internal_memory_error(&mut self, place: u64, corrected: bool) {
        let now = self.now();
        self.engine
            .internal_memory_error(place, corrected, now, &mut self.host);
    }

    /// Host memory turns out to be poisoned.
    pub fn external_memory_error(&mut self, address: u64) {
        let now = self.now();
        self.engine
            .external_memory_error(address, now, &mut self.host);
    }

    /// Something happens on a channel.
    pub fn channel_event(&mut self, event: ChannelEvent, channel: u16) {
        let now = self.now();
        self.engine
            .channel_event(event, channel, now, &mut self.host);
    }

    fn update_link(&mut self) {
        let up = self.host.port.is_up();
        if up != self.host.link_up {
            self.host.link_up = up;
            let now = self.now();
            self.engine.set_link(up, now, &mut self.host);
        }
    }

    /// Stops the device with a fatal error.
    pub fn inject_fatal(&mut self) {
        self.engine.inject_fatal(&mut self.host);
    }

    /// Sets what the device does wrong from now on.
    pub fn misbehave(&mut self, rules: Misbehaviour) -> Result<(), String> {
        rules.check()?;
        let good = rules.is_good();
        let before = self.engine.core().misdeeds().map(|(rules, _)| *rules);
        let is_news = before != (!good).then_some(rules);
        if is_news && !good {
            // While it can still be relied on.
            self.tell_of_management(Management::Faults, true);
        }
        let now = self.now();
        self.engine.misbehave(rules, now, &mut self.host);
        if is_news && good {
            self.tell_of_management(Management::Faults, false);
        }
        self.follow_pin();
        Ok(())
    }

    /// Lets the engine do what is due and sends what it has to say, up to a
    /// limit. What is left is due at [`Core::wake_at`].
    pub fn pump(&mut self) {
        let start = self.now();
        let mut now = start;
        self.engine.look_around(now, &mut self.host);
        for _ in 0..PUMP_ROUNDS {
            self.flush(now);
            if self.wake_at().is_none_or(|due| due > now) || now - start > PUMP_TIME {
                return;
            }
            self.engine.poll(now, &mut self.host);
            self.follow_pin();
            now = self.now();
        }
        self.flush(now);
    }

    /// When [`Core::pump`] is to be called next, `None` if nothing is to be done.
    pub fn wake_at(&self) -> Option<u64> {
        [
            self.engine.next_timeout(),
            self.host.outbound.deadline(),
            self.host.uplink_congestion.deadline(),
        ]
        .into_iter()
        .chain(self.host.inside_congestion.iter().map(Congestion::deadline))
        .flatten()
        .min()
    }

    /// Passes on what waits for the uplink, wakes the readers of shortcuts, and
    /// tells the engine where there is room again.
    fn flush(&mut self, now: u64) {
        let mut room_again = false;
        if !self.host.outbound.is_empty() {
            let flushed = self.host.outbound.flush(now);
            room_again |= flushed.room_again;
            for id in flushed.broken {
                self.shortcut_broke(id);
            }
        }
        self.host.port.flush();
        self.host
            .port
            .wake_functions(std::mem::take(&mut self.host.wakes));
        for (other, congestion) in self.host.inside_congestion.iter_mut().enumerate() {
            if congestion.is_wanted() {
                let inbox = self.host.port.inbox(other);
                let room = inbox.map_or(usize::MAX, |inbox| inbox.room(self.host.number));
                room_again |= congestion.look(room > inbox::ROOM / 2, now);
            }
        }
        if self.host.uplink_congestion.is_wanted() {
            let room = self.host.port.room(self.host.number) > UPLINK_ROOM / 2;
            room_again |= self.host.uplink_congestion.look(room, now);
        }
        if room_again {
            self.engine.room_again();
        }
    }

    /// The I/O thread is about to sleep; returns until when.
    pub fn io_sleeps(&mut self) -> Option<u64> {
        self.io_sleeps_until = if self.inbound.sleep() && !self.has_mail() {
            self.wake_at()
        } else {
            // A ring has something by now.
            Some(0)
        };
        self.io_sleeps_until
    }

    /// Whether the I/O thread sleeps too long now.
    fn io_must_wake(&self) -> bool {
        match (self.wake_at(), self.io_sleeps_until) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(due), Some(until)) => due < until,
        }
    }

    /// Follows what the guest has set in configuration space.
    fn follow_config(&mut self) {
        let on = self.config.bus_master();
        self.host.memory.set_bus_master(on);
        if self.host.interrupts.follow(on, self.config.mode()) {
            // In the mode before nobody may have been told.
            self.engine.raise_again(&mut self.host);
        }
    }

    /// Follows the pin bits down: who sets one raises a message.
    fn follow_pin(&mut self) {
        self.host.interrupts.set_pin(self.engine.pin());
    }

    /// The monitor unmasks the pin.
    pub fn unmask_pin(&mut self) {
        self.unmask_due = false;
        self.host.interrupts.unmask_pin();
    }

    /// The monitor unmasks the pin once the requests that came before are dealt
    /// with.
    pub fn unmask_pin_later(&mut self) {
        self.unmask_due = true;
    }

    /// What the monitor unmasks the pin by, if that has changed since
    /// `generation`.
    pub fn unmask_event(&self, generation: &mut u64) -> Option<Option<Arc<OwnedFd>>> {
        self.host.interrupts.unmask_event(generation)
    }

    fn reset(&mut self) {
        self.engine.reset();
        self.reset_function();
    }

    /// The monitor is gone, and with it the guest: nothing is left of them, and what comes next is
    /// as after power-on.
    pub fn power_off(&mut self) {
        // First: what is lent to it is given back whatever becomes of the rest.
        self.mail.clear();
        self.engine.power_off();
        self.host.memory.unmap_all();
        self.host.interrupts.release();
        self.config = ConfigSpace::new(self.engine.config(), self.host.interrupts.kinds());
        self.unmask_due = false;
        self.follow_config();
        if let Some(inbox) = self.host.port.inbox(self.host.number) {
            let wake = inbox.clear();
            self.host.port.wake_functions(wake);
        }
    }

    /// Resets what is around the engine.
    fn reset_function(&mut self) {
        self.host.interrupts.reset();
        self.config.reset();
        self.follow_config();
    }

    /// All counters as one document.
    pub fn report(&self) -> Value {
        json!({
            "ok": true,
            "uptime_ns": self.now(),
            "link_up": self.host.link_up,
            "bus_master": self.config.bus_master(),
            "mmio": self.mmio,
            "interrupts": self.host.interrupts.counters(),
            "dma": self.host.memory.counters(),
            "guest_memory_bytes": self.host.memory.mapped_bytes(),
            "heap_bytes": crate::heap::in_use(),
            "uplink": self.host.uplink_counters,
            "shortcuts": {
                "in_use": self.host.outbound.len(),
                "granted": self.inbound.granted,
                "rx_frames": self.host.shortcut_counters.rx_frames,
                "rx_bytes": self.host.shortcut_counters.rx_bytes,
                "tx_frames": self.host.shortcut_counters.tx_frames,
                "tx_bytes": self.host.shortcut_counters.tx_bytes,
                "tx_drops": self.host.shortcut_counters.tx_drops,
                "wakes": self.host.outbound.wakes,
            },
            "inside": self.host.inside_counters,
            "inbox_drops": self.host.port.inbox(self.host.number).map(Inbox::drops),
            "vm": self.vm_counters,
            "resets": {
                "function": self.function_resets,
                "device": self.device_resets,
            },
            "gids": self.engine.core().gids.iter().map(|entry| {
                Ipv6Addr::from(entry.gid).to_string()
            }).collect::<Vec<_>>(),
            "engine": self.engine.counters(),
            "interface": self.engine.interface_counters(),
            "misbehaviour": self.engine.core().misdeeds().map(|(rules, done)| {
                json!({"rules": rules, "done": done})
            }),
        })
    }
}

/// Who is at the other end of vfio-user.
enum Monitor {
    Nobody,
    /// A thread accepts somebody.
    Awaited,
    Here(UnixStream),
}

/// The function as the threads share it.
pub struct Function {
    core: Mutex<Core>,
    /// Held by the thread that waits for `core`, so that the one that had it
    /// last does not get it again before.
    turn: Mutex<()>,
    port: Arc<Port>,
    number: usize,
    /// The connection to the virtual machine monitor.
    monitor: Mutex<Monitor>,
    /// There is one, or will be none.
    arrival: Condvar,
    /// Where monitors connect.
    door: Mutex<Option<UnixListener>>,
    /// Nothing more is done for the monitor.
    leaving: AtomicBool,
}

impl Function {
    /// A function that is made so and interrupts in these ways, alone behind a port of its own.
    pub fn new(config: Config, kinds: Kinds) -> io::Result<Self> {
        let row = Row {
            mac: Mac(config.mac),
            any_source: config.any_source,
            vlans: Vlans::all(),
        };
        let mapping = Mapping::new(vec![row]).map_err(io::Error::other)?;
        let port = Arc::new(Port::new(mapping, true)?);
        Ok(Self::behind(port, 0, config, kinds))
    }

    /// The function of this number behind a port, whose table has a row for it.
    pub fn behind(port: Arc<Port>, number: usize, config: Config, kinds: Kinds) -> Self {
        Self {
            core: Mutex::new(Core::new(Arc::clone(&port), number, config, kinds)),
            turn: Mutex::new(()),
            port,
            number,
            monitor: Mutex::new(Monitor::Nobody),
            arrival: Condvar::new(),
            door: Mutex::new(None),
            leaving: AtomicBool::new(false),
        }
    }

    /// What it is behind.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The state.
    pub fn lock(&self) -> MutexGuard<'_, Core> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nobody takes what others send to it any more.
    pub fn close_inbox(&self) {
        if let Some(inbox) = self.port.inbox(self.number) {
            self.port.wake_functions(inbox.close());
        }
    }

    /// Gives others the lock, if they wait for it.
    fn give_way<'a>(&'a self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        // What was said so far is on its way meanwhile.
        core.pump();
        drop(core);
        self.lock()
    }

    /// Takes frames from shortcuts, as many of each as it has a turn. `to_vm`
    /// gets those for the VM's own interface and tells whether they were taken.
    pub fn read_shortcuts(&self, to_vm: &mut dyn FnMut(&[u8]) -> bool) -> MutexGuard<'_, Core> {
        let mut core = self.lock();
        core.read_inbox(to_vm);
        core.read_rings(true, |_| true, to_vm);
        for _ in 1..LAST_TURNS {
            if !core.inbound.is_closing() {
                break;
            }
            core = self.give_way(core);
            core.read_rings(false, Inbound::is_last, to_vm);
        }
        core
    }

    /// Takes the frames that came by the uplink, and what came with them, each
    /// in its order with those of shortcuts. `to_vm` as for
    /// [`Function::read_shortcuts`].
    pub fn read_uplink(
        &self,
        reader: &mut Reader,
        fds: &mut VecDeque<OwnedFd>,
        to_vm: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), BadLength> {
        let mut core = self.read_shortcuts(to_vm);
        let mut work = core.engine.work();
        while let Some(frame) = reader.next_frame()? {
            if is_message(frame) {
                if let Some((_, message)) = Message::parse(frame) {
                    core.shortcut_message(message, fds);
                }
                continue;
            }
            // What a peer sent by a shortcut before it sent by the switch again
            // is there by now, and goes first.
            while let Some(id) = core.ring_before(frame) {
                core.read_rings(true, |ring| ring.id() == id, to_vm);
                while !core.inbound.is_drained(id) {
                    core = self.give_way(core);
                    core.read_rings(false, |ring| ring.id() == id, to_vm);
                }
                core.inbound.went_first(id);
            }
            if core.frame_from_uplink(frame) {
                let taken = to_vm(frame);
                core.vm_counters.sent(frame.len(), taken);
            }
            if core.engine.work().wrapping_sub(work) >= WORK_PER_TURN {
                core = self.give_way(core);
                work = core.engine.work();
            }
        }
        core.pump();
        Ok(())
    }

    /// Has an event (an edge) for each call of [`Function::wake`].
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.port.function_wake_fd(self.number)
    }

    /// Wakes the I/O thread.
    pub fn wake(&self) {
        self.port.wake_function(self.number);
    }

    /// Ends the process: in order, or for the given reason. Where there are other functions, who is
    /// connected to this one loses it, and nobody else anything.
    pub fn finish(&self, result: Result<(), String>) {
        if self.port.is_alone() {
            self.port.finish(result);
            return;
        }
        if let Err(reason) = result {
            log::error!("function {}: {reason}", self.number);
        }
        if let Monitor::Here(stream) = &*self.monitor() {
            // Fails only where the peer has hung up before.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Parts with the monitor, which reads the end of the connection, and is ready for another.
    pub fn power_off(&self) {
        let known = std::mem::replace(&mut *self.monitor(), Monitor::Awaited);
        self.lock().power_off();
        // What unmasks the pin is gone.
        self.wake();
        if let Some(finished) = part(known) {
            // However long it takes: who comes again and again has one such thread.
            while finished.recv_timeout(LEAVE) == Err(mpsc::RecvTimeoutError::Timeout)
                && !self.is_leaving()
            {}
        }
    }

    /// Whether the process ends, and nobody is served any more.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::SeqCst)
    }

    /// The virtual machine monitor is at the other end of this connection;
    /// `None` if there is nobody, and nobody is accepted any more.
    pub fn attach(&self, monitor: Option<UnixStream>) {
        *self.monitor() = monitor.map_or(Monitor::Nobody, Monitor::Here);
        self.arrival.notify_all();
    }

    /// Who has connected is gone again, and another is accepted.
    pub fn attach_another(&self) {
        *self.monitor() = Monitor::Awaited;
    }

    fn monitor(&self) -> MutexGuard<'_, Monitor> {
        self.monitor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Virtual machine monitors connect here, and a thread accepts one, of which
    /// it tells by [`Function::attach`].
    pub fn listen(&self, door: UnixListener) {
        *self.monitor() = Monitor::Awaited;
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = Some(door);
    }

    /// An event of what the monitor unmasks the pin by.
    ///
    /// It comes by another way than the doorbells before it: unmasked before they
    /// are dealt with, the pin would tell of a level that the guest has seen to.
    pub fn unmask_pin(&self) {
        // Locked before it is asked: whoever reads what is unread now comes here
        // when it is dealt with ([`Backend::batch_done`]), and finds what is due.
        let mut core = self.lock();
        let unread = match &*self.monitor() {
            Monitor::Here(stream) => {
                rustix::io::ioctl_fionread(stream).is_ok_and(|bytes| bytes > 0)
            }
            _ => false,
        };
        if unread {
            core.unmask_pin_later();
        } else {
            core.unmask_pin();
        }
    }

    /// Leaves the virtual machine monitor, and those that have connected and are
    /// not accepted: it reads the end of the connection,
    /// and what it has sent is taken off, for the reason told in [`keeper`].
    pub fn hang_up(&self) {
        // What is taken off here is missing in what the other thread reads: it
        // must not take the rest for requests.
        self.leaving.store(true, Ordering::SeqCst);
        let door = self.door.lock();
        let door = door.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(door) = &door {
            let _ = keeper::close(door);
        }
        // One may be accepted by the other thread and not be known yet.
        let is_awaited = |monitor: &mut Monitor| matches!(monitor, Monitor::Awaited);
        let (mut monitor, _) = self
            .arrival
            .wait_timeout_while(self.monitor(), LEAVE, is_awaited)
            .unwrap_or_else(PoisonError::into_inner);
        let known = std::mem::replace(&mut *monitor, Monitor::Nobody);
        drop(monitor);
        let finished = part(known);
        if let Some(door) = &door {
            keeper::turn_away(door);
        }
        if let Some(finished) = finished {
            let _ = finished.recv_timeout(LEAVE);
        }
    }
}

/// Hangs up on a monitor, and takes off what it has sent; the channel tells when that is done.
fn part(monitor: Monitor) -> Option<mpsc::Receiver<()>> {
    let Monitor::Here(mut stream) = monitor else {
        return None;
    };
    let (done, finished) = mpsc::channel();
    // Fails only where the peer has hung up before.
    let _ = stream.shutdown(Shutdown::Both);
    // A descriptor that it has sent is closed with that, and it is not
    // for this process to say how long that takes.
    let drain = move || {
        // Nothing more can arrive, so this ends.
        let _ = io::copy(&mut stream, &mut io::sink());
        // Nobody may wait for it any more.
        let _ = done.send(());
    };
    let drains = thread::Builder::new().spawn(drain).is_ok();
    drains.then_some(finished)
}

/// The device as the virtual machine monitor sees it.
pub struct Frontend<'a> {
    device: &'a Function,
    /// The monitor's process, if known.
    peer: Option<Pid>,
    kinds: Kinds,
    doorbell_bar_size: u64,
}

impl<'a> Frontend<'a> {
    /// The face of `device` toward the monitor `peer`.
    pub fn new(device: &'a Function, peer: Option<Pid>) -> Self {
        let core = device.lock();
        let kinds = core.host.interrupts.kinds();
        let doorbell_bar_size = core.engine.config().doorbell_bar_size();
        drop(core);
        Self {
            device,
            peer,
            kinds,
            doorbell_bar_size,
        }
    }
}

impl Backend for Frontend<'_> {
    fn is_over(&self) -> bool {
        self.device.leaving.load(Ordering::SeqCst)
    }

    fn region_size(&self, region: u32) -> u64 {
        match region {
            abi::BAR_REGISTERS => abi::BAR_REGISTERS_SIZE as u64,
            abi::BAR_DOORBELLS => self.doorbell_bar_size,
            abi::BAR_MSIX => abi::BAR_MSIX_SIZE as u64,
            REGION_CONFIG => config_space::SIZE as u64,
            _ => 0,
        }
    }

    fn vectors(&self, kind: Kind) -> usize {
        match kind {
            Kind::Pin => self.kinds.pin.into(),
            Kind::Msi => self.kinds.msi.into(),
            Kind::MsiX => self.kinds.msix.into(),
        }
    }

    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) {
        let mut core = self.device.lock();
        let core = &mut *core;
        if region == REGION_CONFIG {
            core.config.set_interrupt_status(core.engine.pin());
            core.config.read(offset, data);
            return;
        }
        let class = core.mmio.class(region, offset, core.engine.config());
        class.reads += 1;
        // The monitor answers for the MSI-X table; other sizes do not exist on the bus.
        data.fill(0);
        if region != abi::BAR_MSIX && matches!(data.len(), 1 | 2 | 4 | 8) {
            let value = core.engine.mmio_read(region, offset, data.len());
            data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        }
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let mut core = self.device.lock();
        let core = &mut *core;
        if region == REGION_CONFIG {
            let was = core.config.bus_master();
            if core.config.write(offset, data) == Effect::FunctionReset {
                log::info!("function-level reset");
                core.function_resets += 1;
                if core.engine.function_reset() {
                    core.reset_function();
                }
            }
            core.follow_config();
            if !was && core.config.bus_master() && core.host.memory.is_unreachable() {
                self.device.finish(Err(share::ADVICE.into()));
            }
            return;
        }
        let class = core.mmio.class(region, offset, core.engine.config());
        class.writes += 1;
        if region != abi::BAR_MSIX && matches!(data.len(), 1 | 2 | 4 | 8) {
            let mut value = [0; 8];
            value[..data.len()].copy_from_slice(data);
            let now = core.now();
            core.engine.mmio_write(
                region,
                offset,
                data.len(),
                u64::from_le_bytes(value),
                now,
                &mut core.host,
            );
            core.follow_pin();
        }
    }

    fn dma_map(&mut self, map: DmaMap) -> io::Result<()> {
        log::debug!("map {map:x?}");
        let covers_memory = map.address <= ALWAYS_MEMORY
            && ALWAYS_MEMORY - map.address < map.size
            && map.readable
            && map.writable;
        let private = match (&map.fd, self.peer) {
            (None, _) => covers_memory,
            (Some(fd), Some(peer)) => share::is_private(peer, fd),
            (Some(_), None) => false,
        };
        if private {
            self.device.finish(Err(share::ADVICE.into()));
            return Err(rustix::io::Errno::INVAL.into());
        }
        if !self.device.port.is_alone() && map.fd.as_ref().is_some_and(|fd| !share::is_sealed(fd)) {
            self.device.finish(Err(share::SEAL_ADVICE.into()));
            return Err(rustix::io::Errno::PERM.into());
        }
        let result = self.device.lock().host.memory.map(&map);
        if let Err(error) = &result {
            log::warn!(
                "guest memory at {:#x}, {:#x} bytes, cannot be mapped: {error}",
                map.address,
                map.size
            );
        }
        result
    }

    fn dma_unmap(&mut self, address: u64, size: u64) -> io::Result<u64> {
        log::debug!("unmap {address:#x}, {size:#x} bytes");
        self.device.lock().host.memory.unmap(address, size)
    }

    fn dma_unmap_all(&mut self) -> u64 {
        log::debug!("unmap all");
        self.device.lock().host.memory.unmap_all()
    }

    fn change_vectors(&mut self, kind: Kind, change: VectorChange) -> io::Result<()> {
        log::debug!("{kind:?} vectors: {change:?}");
        prepare_vectors(&change)?;
        self.device.lock().host.interrupts.change(kind, change);
        if kind == Kind::Pin {
            // What unmasks it may be gone.
            self.device.wake();
        }
        Ok(())
    }

    fn mask_pin(&mut self, change: PinChange) -> io::Result<()> {
        log::debug!("pin: {change:?}");
        let watched = matches!(change, PinChange::UnmaskBy(_));
        prepare_pin(&change)?;
        self.device.lock().host.interrupts.mask_pin(change);
        if watched {
            self.device.wake();
        }
        Ok(())
    }

    fn reset(&mut self) {
        log::info!("device reset");
        let mut core = self.device.lock();
        core.device_resets += 1;
        core.reset();
    }

    fn batch_done(&mut self) {
        let mut core = self.device.lock();
        core.pump();
        if core.unmask_due {
            core.unmask_pin();
        }
        let wake = core.io_must_wake();
        drop(core);
        if wake {
            self.device.wake();
        }
        if self.device.port.must_wake() {
            self.device.port.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::{MESSAGES_QUEUE, UPLINK_QUEUE};
    use ferrite_engine::testing::{Node, MEMORY_BASE, MEMORY_SIZE};
    use ferrite_fabric::framing::Writer;
    use ferrite_fabric::shortcut::MAX_SHORTCUTS;
    use ferrite_fabric::{ring, wake};
    use std::collections::BTreeSet;
    use std::io::{Read, Write};

    fn listener(name: &str) -> (UnixListener, std::path::PathBuf) {
        let path = std::env::temp_dir().join(format!("ferrite-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        (UnixListener::bind(&path).unwrap(), path)
    }

    #[test]
    fn a_monitor_that_was_just_accepted_reads_the_end() {
        let device = Function::new(Config::new([2; 6], 1), Kinds::all(1)).unwrap();
        let (listener, path) = listener("accepted");
        let mut peer = UnixStream::connect(&path).unwrap();
        device.listen(listener.try_clone().unwrap());
        peer.write_all(&[0; 64]).unwrap();
        let (stream, _) = listener.accept().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !device.leaving.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
                device.attach(Some(stream));
            });
            device.hang_up();
        });
        drop(device);
        assert_eq!(peer.read(&mut [0; 1]).expect("the end"), 0);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn who_connects_all_the_time_does_not_keep_the_device() {
        let device = Arc::new(Function::new(Config::new([2; 6], 1), Kinds::all(1)).unwrap());
        let (listener, path) = listener("again");
        device.listen(listener.try_clone().unwrap());
        device.attach(None);
        let over = AtomicBool::new(false);
        let (done, finished) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !over.load(Ordering::SeqCst) {
                        let _ = ferrite_fabric::socket::connect(&path);
                    }
                });
            }
            while listener.accept().is_err() {}
            let leaving = Arc::clone(&device);
            thread::spawn(move || {
                leaving.hang_up();
                let _ = done.send(());
            });
            let ended = finished.recv_timeout(Duration::from_secs(120));
            over.store(true, Ordering::SeqCst);
            assert!(ended.is_ok(), "it accepts for ever");
        });
        // Nobody could in the meantime, though the socket is open.
        let error = ferrite_fabric::socket::connect(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        std::fs::remove_file(path).unwrap();
    }

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0xfe, 0, 1];

    fn neighbour(number: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0xfe, 1, number])
    }

    /// A frame from a neighbour, of RoCEv2 if that is wanted; as short as can be.
    fn frame(from: Mac, roce: bool, number: u32) -> [u8; 60] {
        let mut frame = [0; 60];
        frame[..6].copy_from_slice(&MAC);
        frame[6..12].copy_from_slice(&from.0);
        frame[12..15].copy_from_slice(&[0x08, 0x00, 0x45]);
        frame[23] = 17;
        let port = if roce { 4791u16 } else { 53 };
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame[44..48].copy_from_slice(&number.to_le_bytes());
        frame
    }

    fn number(frame: &[u8]) -> u32 {
        u32::from_le_bytes(*frame[44..].first_chunk().unwrap())
    }

    /// A device with a switch, which is the test.
    struct Wired {
        device: Function,
        switch: UnixStream,
        reader: Reader,
    }

    impl Wired {
        fn new() -> Self {
            let device = Function::new(Config::new(MAC, 1), Kinds::all(1)).unwrap();
            let (uplink, switch) = UnixStream::pair().unwrap();
            uplink.set_nonblocking(true).unwrap();
            switch.set_nonblocking(true).unwrap();
            let mut core = device.lock();
            core.set_uplink(Some(uplink));
            core.pump();
            drop(core);
            let mut reader = Reader::new();
            reader.fill(&mut &switch).unwrap();
            assert_eq!(reader.take_mark(), Some(true));
            reader.next_frame().unwrap().expect("its hello");
            Self {
                device,
                switch,
                reader,
            }
        }

        /// Grants a shortcut to `peer` and returns what is answered.
        fn granted(&mut self, id: u8, peer: u8) -> Vec<Message> {
            self.grant(id, peer);
            self.said()
        }

        /// Grants a shortcut to `peer`. The other end of its memory is returned.
        fn grant(&mut self, id: u8, peer: u8) -> ring::Producer {
            let memory = ring::create().unwrap();
            let [_end, of_device] = wake::pair().unwrap();
            let (producer, _) = ring::attach(&memory, 0).unwrap();
            let mut fds = VecDeque::from([memory, of_device]);
            let grant = Message::Grant {
                shortcut: id.into(),
                side: 1,
                peer: neighbour(peer),
            };
            let mut core = self.device.lock();
            core.shortcut_message(grant, &mut fds);
            core.pump();
            producer
        }

        /// Opens a ring from a neighbour with so many frames in it.
        fn ring(&mut self, id: u8, frames: u32) -> ring::Producer {
            let mut producer = self.grant(id, id);
            let mut core = self.device.lock();
            core.shortcut_message(Message::Open(id.into()), &mut VecDeque::new());
            core.pump();
            drop(core);
            assert_eq!(self.said(), [Message::Ready(id.into())]);
            push(&mut producer, id, 0..frames);
            producer
        }

        /// These come by the uplink at once. Returns the numbers of the frames in
        /// the order in which the VM gets them.
        fn receive(&self, frames: &[[u8; 60]]) -> Vec<u32> {
            let mut writer = Writer::new(1 << 20);
            for frame in frames {
                assert!(writer.push(frame));
            }
            let mut bytes = Vec::new();
            writer.flush(&mut bytes).unwrap();
            let mut reader = Reader::new();
            assert_eq!(reader.fill(&mut &bytes[..]).unwrap(), bytes.len());
            let mut numbers = Vec::new();
            let mut to_vm = |frame: &[u8]| {
                numbers.push(number(frame));
                true
            };
            let read = self
                .device
                .read_uplink(&mut reader, &mut VecDeque::new(), &mut to_vm);
            assert_eq!(read, Ok(()));
            numbers
        }

        /// What the device has said since the last time.
        fn said(&mut self) -> Vec<Message> {
            while self.reader.fill(&mut &self.switch).is_ok() {}
            let mut said = Vec::new();
            while let Some(frame) = self.reader.next_frame().unwrap() {
                said.extend(Message::parse(frame).map(|(_, message)| message));
            }
            said
        }

        fn frames_by_rings(&self) -> usize {
            self.device.lock().host.shortcut_counters.rx_frames as usize
        }
    }

    fn push(producer: &mut ring::Producer, id: u8, numbers: std::ops::Range<u32>) {
        for number in numbers {
            let frame = frame(neighbour(id), true, number);
            assert!(producer.push(&frame).unwrap());
        }
        producer.must_wake();
    }

    fn message(message: Message) -> [u8; 60] {
        message.to_frame(neighbour(0))
    }

    const MEMBERS: u64 = 256;

    /// Gives a device an engine with a group of many members, none of whom receives, and the memory of its
    /// driver. Returns a frame to them that says to be for the device alone.
    fn crowd(device: &Function) -> Vec<u8> {
        let mut node = Node::new(1);
        let mut frame = node.crowd(MEMBERS as usize);
        frame[..6].copy_from_slice(&MAC);
        frame[6..12].copy_from_slice(&neighbour(1).0);
        let mut bytes = vec![0; MEMORY_SIZE];
        node.host.memory.read(MEMORY_BASE, &mut bytes).unwrap();
        let fd = rustix::fs::memfd_create("driver", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        std::fs::File::from(fd.try_clone().unwrap())
            .write_all(&bytes)
            .unwrap();
        let map = DmaMap {
            address: MEMORY_BASE,
            size: MEMORY_SIZE as u64,
            offset: 0,
            readable: true,
            writable: true,
            fd: Some(fd),
        };
        let mut core = device.lock();
        core.host.memory.map(&map).unwrap();
        core.host.memory.set_bus_master(true);
        core.engine = node.engine;
        frame
    }

    #[test]
    fn a_socket_that_is_stuck_takes_no_frames_of_channels() {
        let wired = Wired::new();
        let mut core = wired.device.lock();
        let host = &mut core.host;
        let mut frame = [0; 60];
        frame[6..12].copy_from_slice(&MAC);
        host.transmit_ordinary(&frame);
        let one = host.port.queued();
        assert_ne!(one, 0);
        host.uplink_congestion.ask(0);
        assert!(!host.uplink_congestion.look(false, 0));
        host.transmit_ordinary(&frame);
        assert_eq!(host.port.queued(), 2 * one, "it was not stuck yet");
        assert!(host.uplink_congestion.look(false, u64::MAX));
        host.transmit_ordinary(&frame);
        assert_eq!(host.port.queued(), 2 * one);
        assert!(host.uplink_congestion.look(true, u64::MAX));
        host.transmit_ordinary(&frame);
        assert_eq!(host.port.queued(), 3 * one);
    }

    #[test]
    fn a_switch_that_asks_and_never_listens_is_left() {
        let wired = Wired::new();
        let mut fds = VecDeque::new();
        let mut core = wired.device.lock();
        let message = Message::Revoke(7).to_frame(Mac(MAC)).len();
        for _ in 0..2 * UPLINK_QUEUE / message {
            core.shortcut_message(Message::Revoke(7), &mut fds);
        }
        assert!(core.host.port.queued() <= UPLINK_QUEUE + MESSAGES_QUEUE + 2 * message);
        let mut stream = core.host.port.uplink().unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "its end is there");
    }

    #[test]
    fn no_more_shortcuts_than_a_switch_has_are_taken() {
        let mut wired = Wired::new();
        for id in 0..MAX_SHORTCUTS as u8 {
            wired.ring(id, 0);
        }
        let more = MAX_SHORTCUTS as u8;
        assert_eq!(wired.granted(more, more), [Message::Released(more.into())]);
        let mut core = wired.device.lock();
        core.shortcut_message(Message::Close(1), &mut VecDeque::new());
        core.pump();
        drop(core);
        assert_eq!(wired.said(), [Message::Closed(1)]);
        // Nor is one number that of two.
        assert_eq!(wired.granted(2, 1), [Message::Released(2)]);
        assert_eq!(wired.granted(1, 1), [Message::Ready(1)]);
    }

    #[test]
    fn others_have_the_lock_between_frames_that_are_much_work() {
        let mut wired = Wired::new();
        let mut frame = crowd(&wired.device);
        // By rings: all of them have one turn.
        const RINGS: u8 = 16;
        let mut producers = Vec::new();
        for id in 1..=RINGS {
            let mut producer = wired.ring(id, 0);
            frame[6..12].copy_from_slice(&neighbour(id).0);
            for _ in 0..FRAMES_PER_TURN {
                assert!(producer.push(&frame).unwrap());
            }
            producer.must_wake();
            producers.push(producer);
        }
        frame[6..12].copy_from_slice(&neighbour(1).0);
        let mut first = BTreeSet::new();
        let all = u64::from(RINGS) * FRAMES_PER_TURN as u64 * MEMBERS;
        let begin = wired.device.lock().engine.work();
        loop {
            let mut core = wired.device.lock();
            let work = core.engine.work();
            core.read_rings(true, |_| true, &mut |_| true);
            let done = core.engine.work() - work;
            assert!(done < WORK_PER_TURN + MEMBERS, "{done} copies in a turn");
            if done == 0 {
                break;
            }
            first.extend(core.inbound.open().next().map(|ring| ring.id()));
        }
        assert_eq!(
            first.len(),
            usize::from(RINGS),
            "not each of them was the first"
        );
        assert_eq!(wired.device.lock().engine.work() - begin, all);
        // By the switch.
        const FRAMES: u64 = 3000;
        let mut writer = Writer::new(1 << 20);
        for _ in 0..FRAMES {
            assert!(writer.push(&frame));
        }
        let mut bytes = Vec::new();
        writer.flush(&mut bytes).unwrap();
        let mut reader = Reader::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            reader.fill(&mut rest).unwrap();
        }
        let (over, between) = (AtomicBool::new(false), AtomicBool::new(false));
        let start = wired.device.lock().engine.work();
        let end = start + FRAMES * MEMBERS;
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    let work = wired.device.lock().engine.work();
                    if work > start && work < end {
                        between.store(true, Ordering::SeqCst);
                    }
                }
            });
            let read = wired
                .device
                .read_uplink(&mut reader, &mut VecDeque::new(), &mut |_| true);
            assert!(read.is_ok());
            over.store(true, Ordering::SeqCst);
        });
        assert_eq!(wired.device.lock().engine.work(), end);
        assert!(between.load(Ordering::SeqCst), "nobody had the lock");
    }

    #[test]
    fn full_rings_hold_up_no_revocation() {
        let mut wired = Wired::new();
        let _rings: Vec<_> = (1..=16).map(|id| wired.ring(id, 16000)).collect();
        let other = frame(neighbour(17), true, 7);
        let numbers = wired.receive(&[message(Message::Revoke(1)), other]);
        assert_eq!(wired.said(), [Message::Released(1)]);
        // Nor what comes from others.
        assert_eq!(numbers.last(), Some(&7));
        assert_eq!(wired.frames_by_rings(), 16 * FRAMES_PER_TURN);
    }

    #[test]
    fn what_was_sent_by_a_ring_comes_before_what_is_sent_by_the_switch_after_it() {
        for close in [false, true] {
            let mut wired = Wired::new();
            let mut producer = wired.ring(1, 1000);
            let _other = wired.ring(2, 1000);
            // It has not stopped by now: this is of the VM's own interface.
            let own = frame(neighbour(1), true, 5000);
            let turn = 2 * FRAMES_PER_TURN;
            assert_eq!(wired.receive(&[own])[turn..], [5000]);
            let mut frames = vec![message(Message::Revoke(1))];
            if close {
                frames.push(message(Message::Close(1)));
            }
            frames.push(frame(neighbour(1), false, 5001));
            let mut to_many = frame(neighbour(1), true, 5005);
            to_many[..6].copy_from_slice(&[0x33, 0x33, 0, 0, 0, 1]);
            frames.push(to_many);
            frames.push(frame(neighbour(1), true, 5002));
            frames.push(frame(neighbour(1), true, 5003));
            let numbers = wired.receive(&frames);
            // Frames that do not go by rings wait for nothing.
            assert_eq!(numbers[turn..turn + 2], [5001, 5005]);
            let rest = (turn as u32..1000).chain([5002, 5003]);
            assert!(numbers[turn + 2..].iter().copied().eq(rest));
            let mut answers = vec![Message::Released(1)];
            if close {
                answers.push(Message::Closed(1));
            }
            assert_eq!(wired.said(), answers);
            // Who goes on writing is not waited for again, nor read once it is closed.
            push(&mut producer, 1, 1000..2000);
            let before = wired.frames_by_rings();
            wired.receive(&[own]);
            let rings = if close { 1 } else { 2 };
            assert_eq!(wired.frames_by_rings() - before, rings * FRAMES_PER_TURN);
        }
    }

    #[test]
    fn the_rest_of_a_ring_that_is_closed_goes_first_though_it_did_before() {
        let mut wired = Wired::new();
        let mut producer = wired.ring(1, 100);
        // The writer has not been told yet: this is of its VM's own interface.
        let own = frame(neighbour(1), true, 5000);
        let numbers = wired.receive(&[message(Message::Revoke(1)), own]);
        assert!(numbers.into_iter().eq((0..100).chain([5000])));
        // It writes on, and then stops.
        push(&mut producer, 1, 100..2000);
        let by_switch = [5001, 5002].map(|number| frame(neighbour(1), true, number));
        let numbers = wired.receive(&[message(Message::Close(1)), by_switch[0], by_switch[1]]);
        assert!(numbers.into_iter().eq((100..2000).chain([5001, 5002])));
        assert_eq!(wired.said(), [Message::Released(1), Message::Closed(1)]);
        assert_eq!(wired.device.lock().ring_before(&own), None);
    }

    #[test]
    fn others_have_the_device_while_shortcuts_are_closed() {
        let mut wired = Wired::new();
        let mut rings: Vec<_> = (1..=16).map(|id| wired.ring(id, 2000)).collect();
        let closes: Vec<_> = (1..=16).map(|id| message(Message::Close(id))).collect();
        wired.receive(&closes);
        assert_eq!(wired.said(), []);
        let before = wired.frames_by_rings();
        assert_eq!(before, 16 * FRAMES_PER_TURN);
        // What is written now is nobody's.
        for (id, ring) in (1..).zip(&mut rings) {
            push(ring, id, 2000..2500);
        }
        assert!(!wired.device.lock().inbound.sleep());
        let (start, started) = mpsc::channel();
        thread::scope(|scope| {
            let device = &wired.device;
            let other = scope.spawn(move || {
                started.recv().unwrap();
                device.lock().host.shortcut_counters.rx_frames as usize
            });
            let mut first = true;
            let mut to_vm = |_: &[u8]| {
                if std::mem::take(&mut first) {
                    start.send(()).unwrap();
                    // Until it waits for the lock.
                    while device.turn.try_lock().is_ok() {
                        thread::yield_now();
                    }
                }
                true
            };
            device.read_shortcuts(&mut to_vm).pump();
            let read = other.join().unwrap() - before;
            assert!(read <= 16 * FRAMES_PER_TURN, "after {read} frames");
        });
        let mut rounds = 1;
        while wired.device.lock().inbound.is_closing() {
            wired.device.read_shortcuts(&mut |_| true).pump();
            rounds += 1;
            assert!(rounds < 4, "the switch waits");
        }
        assert!(wired.said().into_iter().eq((1..=16).map(Message::Closed)));
        assert_eq!(wired.frames_by_rings(), 16 * 2000);
        assert!(wired.device.lock().inbound.sleep());
    }

    #[test]
    fn a_ring_that_breaks_the_rules_is_closed_all_the_same() {
        let mut wired = Wired::new();
        let mut producer = wired.ring(1, 500);
        let forged = frame(neighbour(2), true, 0);
        assert!(producer.push(&forged).unwrap());
        wired.receive(&[message(Message::Revoke(1)), message(Message::Close(1))]);
        assert_eq!(wired.said(), [Message::Released(1)]);
        wired.device.read_shortcuts(&mut |_| true).pump();
        assert_eq!(wired.said(), [Message::Closed(1)]);
        assert_eq!(wired.frames_by_rings(), 500);
        assert!(wired.device.lock().inbound.is_empty());
    }
}
