// SPDX-License-Identifier: GPL-2.0

//! Two endpoints, their memory, and the channels between them, as an adapter has them: each queue is
//! in order, nothing else is; software looks at what has arrived when it likes.

use ferrite_split::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Elements that each pool of a test may have.
pub const CAPACITY: usize = 300;

pub type Tables = Vec<Element>;

pub fn tables() -> Tables {
    vec![Element::default(); CAPACITY * 2 * MAX_POOLS]
}

pub fn options(role: Role, service: Service, variant: Variant) -> Options {
    Options {
        role,
        service,
        variant,
        separate_indication: false,
        threshold: 128,
        retry: 10,
        patience: 100_000,
    }
}

/// What is on its way on the data channel.
enum Data {
    Message(Vec<u8>),
    Write {
        key: u32,
        address: u64,
        frame: Vec<u8>,
        /// Bytes that are in the peer's memory.
        done: usize,
        immediate: Option<u32>,
        handle: Handle,
    },
}

/// What has arrived on the data channel and nobody has looked at.
enum Arrived {
    Message(Vec<u8>),
    Immediate(u32, u32),
}

/// A frame that somebody uses.
struct Held {
    handle: Handle,
    /// Where it is read from, of a pool of the peer.
    read: Option<(u32, u64, u32)>,
}

/// One end.
pub struct End {
    pub endpoint: Endpoint<Tables>,
    /// Memory that is registered: key, address, bytes.
    memory: BTreeMap<u32, (u64, Vec<u8>)>,
    control_out: VecDeque<(Vec<u8>, Token)>,
    control_in: VecDeque<Vec<u8>>,
    data_out: VecDeque<Data>,
    data_in: VecDeque<Arrived>,
    /// Writes that are complete.
    complete: VecDeque<Handle>,
    /// Frames that are copied to elements of this side, for the peer to read.
    filling: VecDeque<(u32, u64, Vec<u8>, Handle)>,
    held: Vec<Held>,
    /// Frames that were sent and have not arrived.
    pub under_way: BTreeMap<u32, usize>,
    pub seen: BTreeSet<u32>,
    pub sent: u64,
    /// Pools that were announced and not freed.
    pub pools: BTreeMap<u32, PoolOffer>,
    /// Elements of pools this end sends through that it has not got back: whose pool, its index.
    outstanding: BTreeMap<(bool, u32), u32>,
    pub asked: Option<Operation>,
    pub answers: u32,
}

impl End {
    fn new(options: Options) -> Self {
        Self {
            endpoint: Endpoint::new(options, tables()),
            memory: BTreeMap::new(),
            control_out: VecDeque::new(),
            control_in: VecDeque::new(),
            data_out: VecDeque::new(),
            data_in: VecDeque::new(),
            complete: VecDeque::new(),
            filling: VecDeque::new(),
            held: Vec::new(),
            under_way: BTreeMap::new(),
            seen: BTreeSet::new(),
            sent: 0,
            pools: BTreeMap::new(),
            outstanding: BTreeMap::new(),
            asked: None,
            answers: 0,
        }
    }
}

pub struct World {
    pub ends: [End; 2],
    pub options: Options,
    /// How many of 256 messages are lost.
    pub loss: u8,
    /// What was sent, by whom: of the control channel, then of the data channel.
    pub said: [Vec<(usize, Vec<u8>)>; 2],
    /// Whether pools have come and gone, so that nothing can be said about which elements are free.
    pub is_shaken: bool,
    pub now: u64,
    next_frame: u32,
    next_key: u32,
    session: u32,
    random: u64,
}

/// The bytes of a frame.
fn contents(number: u32, length: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..length)
        .map(|at| (at as u32 * 7 + number * 13) as u8)
        .collect();
    frame[..4].copy_from_slice(&number.to_le_bytes());
    frame
}

/// The smallest frame that has a number.
pub const SMALLEST: u32 = 4;

impl World {
    pub fn new(options: Options, seed: u64) -> Self {
        let other = Options {
            role: Role::Unit,
            ..options
        };
        let mut world = Self {
            ends: [End::new(options), End::new(other)],
            options,
            loss: 0,
            said: [Vec::new(), Vec::new()],
            is_shaken: false,
            now: 0,
            next_frame: 1,
            next_key: 1,
            session: 0,
            random: seed | 1,
        };
        world.restart();
        world
    }

    pub fn random(&mut self, below: u64) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.random >> 33) % below
    }

    /// How often it was.
    pub fn restarts(&self) -> u32 {
        self.session - 1
    }

    /// The connection is lost and made anew.
    pub fn restart(&mut self) {
        self.session += 1;
        for end in &mut self.ends {
            // What was posted to queue pairs that are gone never completes.
            end.control_out.clear();
            end.control_in.clear();
            end.data_out.clear();
            end.complete.clear();
            end.filling.clear();
            end.data_in.clear();
            end.under_way.clear();
            end.outstanding.clear();
            end.asked = None;
            end.held.retain(|held| held.read.is_none());
        }
        let (a, b) = (self.session * 2, self.session * 2 + 1);
        self.ends[0].endpoint.start(a, b);
        self.ends[1].endpoint.start(b, a);
    }

    /// Announces a pool, unless there is one.
    pub fn announce(
        &mut self,
        who: usize,
        index: u32,
        elements: u32,
        element_size: u32,
        kind: PoolKind,
    ) {
        let is_send = kind == PoolKind::Send;
        let key = self.next_key;
        self.next_key += 1;
        let offer = PoolOffer {
            index,
            kind,
            elements,
            element_size,
            address: if is_send { 0 } else { u64::from(key) << 32 },
            key: if is_send { 0 } else { key },
            // All of its bits count.
            context: !(u64::from(key) << 24),
        };
        let offer = match self.options.service {
            Service::Acknowledged => offer,
            // Each has another index.
            Service::Unacknowledged => PoolOffer {
                index: key,
                ..offer
            },
        };
        let end = &mut self.ends[who];
        if end.endpoint.announce(offer).is_ok() {
            assert!(end.pools.insert(offer.index, offer).is_none());
            let memory = vec![0; elements as usize * element_size as usize];
            end.memory.insert(offer.key, (offer.address, memory));
        }
    }

    /// Sends a frame; whether it is under way.
    pub fn send(&mut self, who: usize, length: u32) -> Result<(), Unsent> {
        let end = &mut self.ends[who];
        let transfer = match end.endpoint.send(length) {
            Ok(transfer) => transfer,
            Err(unsent) => {
                if unsent == Unsent::NoElement && !self.is_shaken {
                    self.check_none_free(who, length);
                }
                return Err(unsent);
            }
        };
        let number = self.next_frame;
        self.next_frame += 1;
        let frame = contents(number, length as usize);
        let pools = [&self.ends[0].pools, &self.ends[1].pools];
        let (is_near, pool) = match transfer {
            Transfer::Fill { pool, .. } => (true, pool),
            Transfer::Message { header, .. } => {
                let pool = u32::from_be_bytes(header[12..16].try_into().unwrap());
                assert_ne!(pool & REFERENCE_YOURS, 0);
                (false, pool & !REFERENCE_YOURS)
            }
            Transfer::Write { key, .. } => {
                let pool = pools[1 - who].values().find(|pool| pool.key == key);
                (false, pool.unwrap().index)
            }
        };
        let end = &mut self.ends[who];
        *end.outstanding.entry((is_near, pool)).or_default() += 1;
        end.under_way.insert(number, length as usize);
        end.sent += 1;
        match transfer {
            Transfer::Message { header, .. } => {
                let mut message = header.to_vec();
                message.extend(&frame);
                self.said[1].push((who, message.clone()));
                if !self.is_lost() {
                    self.ends[who].data_out.push_back(Data::Message(message));
                }
            }
            Transfer::Write {
                address,
                key,
                immediate,
                handle,
            } => end.data_out.push_back(Data::Write {
                key,
                address,
                frame,
                done: 0,
                immediate,
                handle,
            }),
            Transfer::Fill {
                pool,
                element,
                handle,
            } => {
                let offer = end.pools[&pool];
                let address = offer.address + u64::from(element) * u64::from(offer.element_size);
                end.filling.push_back((offer.key, address, frame, handle));
            }
        }
        Ok(())
    }

    /// No frame is refused while there is an element for it.
    fn check_none_free(&self, who: usize, length: u32) {
        let sending = |kind: PoolKind, is_near: bool| (kind == PoolKind::Read) == is_near;
        for (is_near, owner) in [(true, who), (false, 1 - who)] {
            for pool in self.ends[owner].pools.values() {
                if sending(pool.kind, is_near) && pool.element_size >= length {
                    let used = self.ends[who].outstanding.get(&(is_near, pool.index));
                    // Or it is not announced yet.
                    let used = used.copied().unwrap_or(0);
                    assert!(used == 0 || used == pool.elements, "{used} of {pool:?}");
                }
            }
        }
    }

    fn is_lost(&mut self) -> bool {
        let loss = self.loss;
        self.options.service == Service::Unacknowledged && self.random(256) < u64::from(loss)
    }

    /// Writes to registered memory: no honest peer ever uses a key that is not there, nor an address.
    fn memory(&mut self, who: usize, key: u32, address: u64, length: usize) -> &mut [u8] {
        let (base, memory) = self.ends[who]
            .memory
            .get_mut(&key)
            .expect("a key that is gone");
        &mut memory[(address - *base) as usize..][..length]
    }

    /// One thing happens at one end; whether anything did.
    pub fn step(&mut self, who: usize, what: u32) -> bool {
        match what % 9 {
            0 => self.make_control(who),
            1 => self.carry_control(who),
            2 => self.take_control(who),
            3 => self.carry_data(who),
            4 => self.take_data(who),
            5 => self.take_completion(who),
            6 => self.take_arrival(who),
            7 => self.fill(who),
            _ => self.release(who),
        }
    }

    fn make_control(&mut self, who: usize) -> bool {
        let mut bytes = [0; CONTROL_MAX];
        let Some(outgoing) = self.ends[who].endpoint.poll_control(&mut bytes) else {
            return false;
        };
        self.collect(who);
        let message = bytes[..outgoing.length].to_vec();
        Message::parse(&message).expect("what is sent makes sense");
        self.said[0].push((who, message.clone()));
        if self.options.service == Service::Unacknowledged {
            self.ends[who].endpoint.control_done(outgoing.token);
            if self.is_lost() {
                return true;
            }
        }
        self.ends[who]
            .control_out
            .push_back((message, outgoing.token));
        true
    }

    /// The adapters carry a control message.
    fn carry_control(&mut self, who: usize) -> bool {
        let Some((message, token)) = self.ends[who].control_out.pop_front() else {
            return false;
        };
        self.ends[1 - who].control_in.push_back(message);
        if self.options.service == Service::Acknowledged {
            self.ends[who].endpoint.control_done(token);
        }
        true
    }

    fn take_control(&mut self, who: usize) -> bool {
        let Some(message) = self.ends[who].control_in.pop_front() else {
            return false;
        };
        let end = &mut self.ends[who];
        if let (_, Message::Update(entries)) = Message::parse(&message).unwrap() {
            if !self.is_shaken && self.options.service == Service::Acknowledged {
                for entry in entries.iter() {
                    let is_near = entry.pool & REFERENCE_YOURS != 0;
                    let key = (is_near, entry.pool & !REFERENCE_YOURS);
                    let out = end
                        .outstanding
                        .get_mut(&key)
                        .expect("an element that is out");
                    *out = out.checked_sub(entry.count).expect("no more than are out");
                }
            }
        }
        let event = end.endpoint.receive_control(&message);
        match event.expect("an honest peer") {
            Event::Request(operation, _) => {
                let mac = [2, 0, 0, 0, 0, 7];
                let mut data = vec![0; operation.data_sizes().1];
                match operation {
                    Operation::GetMac => MacAddress { mac, reserved: 0 }.encode(&mut data).unwrap(),
                    Operation::GetMtu => Mtu { mtu: 1500 }.encode(&mut data).unwrap(),
                    _ => {}
                }
                end.endpoint.reply(Status::Done, &data).unwrap();
            }
            Event::Reply(operation, status, data) => {
                assert_eq!(end.asked.take(), Some(operation));
                assert_eq!(status, Status::Done);
                if operation == Operation::GetMtu {
                    assert_eq!(Mtu::decode(data), Some(Mtu { mtu: 1500 }));
                }
                end.answers += 1;
            }
            Event::Wanted { element_size, .. } => assert!(element_size != 0),
            Event::Nothing | Event::Elements | Event::Frames | Event::Flush => {}
        }
        self.collect(who);
        true
    }

    /// Memory of pools that are gone is gone.
    pub fn collect(&mut self, who: usize) {
        let end = &mut self.ends[who];
        while let Some(offer) = end.endpoint.next_freed() {
            assert_eq!(end.pools.remove(&offer.index), Some(offer));
            end.memory.remove(&offer.key);
        }
    }

    /// The adapters carry a part of what is first on the data channel.
    fn carry_data(&mut self, who: usize) -> bool {
        let Some(first) = self.ends[who].data_out.pop_front() else {
            return false;
        };
        match first {
            Data::Message(message) => {
                self.ends[1 - who]
                    .data_in
                    .push_back(Arrived::Message(message));
            }
            Data::Write {
                key,
                address,
                frame,
                done,
                immediate,
                handle,
            } => {
                let until = (done + frame.len() / 2 + 1).min(frame.len());
                let piece = &frame[done..until];
                self.memory(1 - who, key, address + done as u64, piece.len())
                    .copy_from_slice(piece);
                if until < frame.len() {
                    self.ends[who].data_out.push_front(Data::Write {
                        key,
                        address,
                        frame,
                        done: until,
                        immediate,
                        handle,
                    });
                    return true;
                }
                match immediate {
                    Some(immediate) => {
                        let arrived = Arrived::Immediate(immediate, frame.len() as u32);
                        self.ends[1 - who].data_in.push_back(arrived);
                    }
                    None => self.ends[who].complete.push_back(handle),
                }
            }
        }
        true
    }

    fn take_data(&mut self, who: usize) -> bool {
        let Some(arrived) = self.ends[who].data_in.pop_front() else {
            return false;
        };
        match arrived {
            Arrived::Message(message) => {
                let delivery = self.ends[who].endpoint.receive_data(&message);
                if let Some(delivery) = delivery.expect("an honest peer") {
                    let frame = delivery.frame.to_vec();
                    let handle = delivery.handle;
                    self.ends[who].held.push(Held { handle, read: None });
                    self.look_at(who, &frame);
                } else {
                    // It is counted as lost already.
                    let number =
                        u32::from_le_bytes(message[DATA_HEADER..][..4].try_into().unwrap());
                    assert!(self.ends[1 - who].under_way.contains_key(&number));
                }
            }
            Arrived::Immediate(bits, length) => {
                let event = self.ends[who].endpoint.receive_immediate(bits, length);
                assert_eq!(event, Ok(Event::Frames));
            }
        }
        true
    }

    fn take_completion(&mut self, who: usize) -> bool {
        let Some(handle) = self.ends[who].complete.pop_front() else {
            return false;
        };
        self.ends[who].endpoint.written(handle).unwrap();
        true
    }

    /// A frame is copied for the peer to read.
    fn fill(&mut self, who: usize) -> bool {
        let Some((key, address, frame, handle)) = self.ends[who].filling.pop_front() else {
            return false;
        };
        self.memory(who, key, address, frame.len())
            .copy_from_slice(&frame);
        self.ends[who].endpoint.written(handle).unwrap();
        true
    }

    fn take_arrival(&mut self, who: usize) -> bool {
        let Some(arrival) = self.ends[who].endpoint.next_arrival() else {
            return false;
        };
        let address = arrival.pool.address + arrival.offset();
        let length = arrival.length;
        // As it was announced, with the context that its owner gave it.
        let owner = match arrival.pool.kind {
            PoolKind::Read => 1 - who,
            _ => who,
        };
        assert_eq!(self.ends[owner].pools[&arrival.pool.index], arrival.pool);
        let handle = arrival.handle;
        if arrival.pool.kind == PoolKind::Read {
            let read = Some((arrival.pool.key, address, length));
            self.ends[who].held.push(Held { handle, read });
            return true;
        }
        let frame = self
            .memory(who, arrival.pool.key, address, length as usize)
            .to_vec();
        self.ends[who].held.push(Held { handle, read: None });
        self.look_at(who, &frame);
        true
    }

    /// A frame has arrived: whole, once, and from the peer.
    fn look_at(&mut self, who: usize, frame: &[u8]) {
        let number = u32::from_le_bytes(frame[..4].try_into().unwrap());
        assert_eq!(frame, contents(number, frame.len()), "torn");
        // After a new connection, what had arrived before is still there.
        if let Some(length) = self.ends[1 - who].under_way.remove(&number) {
            assert_eq!(length, frame.len());
        }
        assert!(self.ends[who].seen.insert(number), "twice");
    }

    fn release(&mut self, who: usize) -> bool {
        let count = self.ends[who].held.len() as u64;
        if count == 0 {
            return false;
        }
        let which = self.random(count) as usize;
        // Mostly in order, as frames are taken out.
        let which = if self.random(4) == 0 { which } else { 0 };
        let held = self.ends[who].held.remove(which);
        if let Some((key, address, length)) = held.read {
            let frame = self.memory(1 - who, key, address, length as usize).to_vec();
            self.look_at(who, &frame);
        }
        self.ends[who].endpoint.release(held.handle).unwrap();
        self.collect(who);
        true
    }

    pub fn tick(&mut self, by: u64) {
        self.now += by;
        for end in &mut self.ends {
            end.endpoint.tick(self.now).expect("a peer that answers");
        }
    }

    /// Until nothing more happens, and for long enough that what was lost is sent again.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 6 {
            let mut any = false;
            for who in 0..2 {
                for what in 0..9 {
                    while self.step(who, what) {
                        any = true;
                    }
                }
            }
            self.tick(self.options.retry);
            quiet = if any { 0 } else { quiet + 1 };
            assert!(self.now < 50_000, "it never comes to rest");
        }
    }
}
