// SPDX-License-Identifier: GPL-2.0

//! A device that answers what it is told to, and users none of whose threads ever runs: for tests.

use super::*;
use crate::{
    abi::CommandOpcode,
    cqp::object, //
};
use core::{
    cell::{
        Cell,
        RefCell, //
    },
    ops::Range, //
};

/// What was put in the ring: who asked, and how the answer is called.
pub(crate) struct Memory {
    pub(crate) given: RefCell<KVec<(usize, u32)>>,
    answered: Cell<usize>,
    /// What the record says.
    pub(crate) stored: Cell<u32>,
    pub(crate) told: Cell<u32>,
    pub(crate) doorbells: Cell<u32>,
    pub(crate) reply: Cell<u8>,
}

impl CommandRing for Memory {
    fn write(&self, at: usize, entry: &CommandEntry) -> Result {
        let mut given = self.given.borrow_mut();
        assert_eq!(at, given.len() % ENTRIES);
        let [a, b, c, d, ..] = entry.payload;
        let who = u32::from_le_bytes([a, b, c, d]) as usize;
        given.push((who, entry.cookie), GFP_ATOMIC)?;
        Ok(())
    }

    fn reply_address(&self, slot: usize) -> u64 {
        64 + slot as u64
    }

    fn reply(&self, _: usize, reply: &mut [u8]) -> Result {
        reply.fill(self.reply.get());
        Ok(())
    }

    fn store_producer(&self, producer: u32) {
        // The entries are there, and the device was told of none of those that are new.
        assert_eq!(self.given.borrow().len() as u32, producer);
        assert!(self.told.get() < producer);
        self.stored.set(producer);
    }

    fn ring_doorbell(&self, producer: u32) {
        assert_eq!(self.stored.get(), producer);
        self.told.set(producer);
        self.doorbells.set(self.doorbells.get() + 1);
    }
}

pub(crate) struct Stage {
    pub(crate) requests: Pin<KBox<Requests>>,
    pub(crate) memory: Memory,
    asked: KVec<Pin<KBox<Scoped<Request>>>>,
}

impl Stage {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            requests: KBox::pin_init(Requests::new(), GFP_KERNEL)?,
            memory: Memory {
                given: RefCell::new(KVec::new()),
                answered: Cell::new(0),
                stored: Cell::new(0),
                told: Cell::new(0),
                doorbells: Cell::new(0),
                reply: Cell::new(0),
            },
            asked: KVec::new(),
        })
    }

    /// One with so many short commands of `user`, of which as many are in the ring as there can be.
    pub(crate) fn full_of(user: u64, count: usize) -> Result<Self> {
        let mut stage = Self::new()?;
        for _ in 0..count {
            stage.ask(user, Class::Short)?;
        }
        Ok(stage)
    }

    fn make(&mut self, user: u64, class: Class) -> Result<usize> {
        let who = self.asked.len();
        let (opcode, payload) = (CommandOpcode::QueryQueuePair, object(who as u32));
        let entry = CommandEntry::new(opcode, 0, (0, 8), &payload);
        let request = Request::new(&self.requests, user, class, entry);
        let request = KBox::pin_init(request, GFP_KERNEL)?;
        self.asked.push(request, GFP_KERNEL)?;
        Ok(who)
    }

    /// Asks for a command; returns its number.
    pub(crate) fn ask(&mut self, user: u64, class: Class) -> Result<usize> {
        let who = self.make(user, class)?;
        let in_ring = self
            .requests
            .submit(self.asked[who].as_ref(), &self.memory)?;
        assert_eq!(in_ring, self.is_in_ring(who));
        Ok(who)
    }

    /// Asks for one if it can be given at once.
    pub(crate) fn ask_now(&mut self, user: u64, class: Class) -> Result<usize> {
        let who = self.make(user, class)?;
        let request = self.asked[who].as_ref();
        self.requests.submit_now(request, &self.memory)?;
        Ok(who)
    }

    pub(crate) fn request(&self, who: usize) -> &Request {
        &self.asked[who]
    }

    /// Posts a command; its number is `who` to the ring.
    pub(crate) fn post(&self, user: u64, who: u32) -> Result<Posted> {
        self.post_for(user, (PostedFor::Making, who), Telling::Doorbell)
    }

    /// Posts a command for something; the number is that of who asks.
    pub(crate) fn post_for(
        &self,
        user: u64,
        about: (PostedFor, u32),
        telling: Telling,
    ) -> Result<Posted> {
        let post = Post::new(&self.requests, user, Class::Short, GFP_KERNEL)?;
        let (opcode, payload) = (CommandOpcode::RegisterRegion, object(about.1));
        let mut entry = CommandEntry::new(opcode, 0, (0, 0), &payload);
        self.requests
            .post(post, about, &mut entry, telling, &self.memory)
    }

    /// What to wait for a posted command by that is in flight.
    pub(crate) fn ticket(&self, posted: &Posted) -> Result<Arc<Ticket>> {
        self.requests.ticket(posted).ok_or(ENOENT)
    }

    pub(crate) fn position(&self, who: usize) -> Position {
        self.requests.position(&self.request(who).ticket)
    }

    pub(crate) fn is_in_ring(&self, who: usize) -> bool {
        matches!(self.position(who), Position::InRing { .. })
    }

    pub(crate) fn is_queued(&self, who: usize) -> bool {
        matches!(self.position(who), Position::Queued { .. })
    }

    /// Answers what was put in the ring as number `at`; returns whether that was waited for.
    pub(crate) fn answer(&self, at: usize) -> bool {
        self.answer_some(at..at + 1, 8)
    }

    /// Answers several at once, each with so many bytes; returns whether all were waited for.
    pub(crate) fn answer_some(&self, mut which: Range<usize>, bytes: u64) -> bool {
        let all = which.all(|at| {
            let (_, cookie) = self.memory.given.borrow()[at];
            let answered = self.requests.finish(cookie, 0, bytes, &self.memory);
            answered.is_some()
        });
        self.requests.put_waiting(&self.memory);
        all
    }

    /// Takes an answer; nobody who waits is given its slot yet. Returns whether it was to a command.
    pub(crate) fn finish(&self, cookie: u32) -> bool {
        let answered = self.requests.finish(cookie, 0, 8, &self.memory);
        answered.is_some()
    }

    /// Answers the oldest command.
    pub(crate) fn answer_next(&self) {
        let at = self.memory.answered.get();
        self.memory.answered.set(at + 1);
        assert!(self.answer(at));
    }

    /// Who asked for what is put in the ring by the next `count` answers.
    pub(crate) fn next(&self, count: usize) -> Result<KVec<usize>> {
        let mut next = KVec::new();
        for _ in 0..count {
            let before = self.memory.given.borrow().len();
            self.answer_next();
            for (who, _) in &self.memory.given.borrow()[before..] {
                next.push(*who, GFP_KERNEL)?;
            }
        }
        Ok(next)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Those who ask go next.
        self.requests.close();
    }
}
