// SPDX-License-Identifier: GPL-2.0

//! Control messages in.

use super::*;

impl<S: DerefMut<Target = [Element]>> Endpoint<S> {
    /// A message has arrived on the control channel.
    pub fn receive_control<'m>(&mut self, bytes: &'m [u8]) -> Result<Event<'m>, Violation> {
        self.check()?;
        self.heard = self.now;
        self.take_control(bytes)
            .map_err(|violation| self.fail(violation))
    }

    pub(super) fn take_control<'m>(&mut self, bytes: &'m [u8]) -> Result<Event<'m>, Violation> {
        let (context, message) = Message::parse(bytes)?;
        match message {
            Message::SendData(..) => return Err(Violation::WrongChannel),
            Message::FlushReply | Message::Reply(..) => return self.take_reply(context, message),
            _ => {}
        }
        if context.session != self.peer_session {
            return Err(Violation::OtherSession);
        }
        let is_lossy = self.options.service == Service::Unacknowledged;
        let ahead = context.sequence.wrapping_sub(self.peer_sequence);
        if ahead == 0 || ahead >= HALF {
            if !is_lossy {
                return Err(Violation::Replayed);
            }
            self.counters.repeated += 1;
            self.repeat_answer(context, message);
            return Ok(Event::Nothing);
        }
        if ahead > 1 {
            // It comes again, after the one that is missing.
            if !is_lossy {
                return Err(Violation::Skipped);
            }
            self.counters.early += 1;
            return Ok(Event::Nothing);
        }
        if is_lossy && self.comes_too_early(&message) {
            self.counters.early += 1;
            return Ok(Event::Nothing);
        }
        self.peer_sequence = context.sequence;
        let has_reply = matches!(message, Message::FlushRequest(_) | Message::Request(..));
        if is_lossy && !has_reply {
            self.confirm = Some(context);
        }
        match message {
            Message::Pools(entries) => {
                for entry in entries.iter() {
                    let offer = PoolOffer::from_entry(&entry, self.capacity)?;
                    let slot = self.admits(FAR, &offer)?;
                    if !self.is_fresh(&offer, self.peer_last_index) {
                        return Err(Violation::PoolTwice);
                    }
                    self.peer_last_index = Some(offer.index);
                    let state = match self.closing {
                        true => PoolState::Draining,
                        false => PoolState::Live,
                    };
                    self.install(slot, offer, state);
                }
                self.has_asked = false;
                Ok(Event::Elements)
            }
            Message::Get(get) => self.take_get(get),
            Message::Update(entries) => {
                for entry in entries.iter() {
                    self.take_update(entry)?;
                }
                self.has_asked = false;
                Ok(Event::Elements)
            }
            Message::Indicate(entries) => {
                for entry in entries.iter() {
                    let slot = self.refer(entry.pool)?;
                    self.arrive(slot, entry.element, entry.size)?;
                }
                Ok(Event::Frames)
            }
            Message::FlushRequest(entries) => {
                if self.flush_asked.is_some() {
                    return Err(Violation::RequestTwice);
                }
                for entry in entries.iter() {
                    let slot = match self.refer(entry.pool) {
                        // It was given up as this side asked, before the peer's own request got through.
                        Err(_) if is_lossy => continue,
                        found => found?,
                    };
                    if self.pools[slot].peer_asked {
                        return Err(Violation::PoolMisused);
                    }
                    self.pools[slot].peer_asked = true;
                }
                self.flush_asked = Some(context);
                Ok(Event::Flush)
            }
            Message::Request(operation, data) => {
                if operation.asked_by() == Some(self.options.role) {
                    return Err(Violation::BadOperation);
                }
                // One that was answered stays, to be answered again where the answer may be lost.
                let is_open = |asked: Asked| asked.length.is_none() || (asked.pending && !is_lossy);
                if self.asked.is_some_and(is_open) {
                    return Err(Violation::RequestTwice);
                }
                self.asked = Some(Asked {
                    context,
                    operation,
                    length: None,
                    pending: false,
                });
                Ok(Event::Request(operation, data))
            }
            // Dealt with above.
            Message::SendData(..) | Message::FlushReply | Message::Reply(..) => Ok(Event::Nothing),
        }
    }

    /// Unacknowledged service: whether this announces a pool in the place of one whose end the peer has
    /// told of by a message that was lost. That is sent again, and so is this.
    pub(super) fn comes_too_early(&self, message: &Message<'_>) -> bool {
        let Message::Pools(entries) = message else {
            return false;
        };
        let is_send = PoolKind::Send.number();
        entries.iter().any(|entry| {
            self.pools[FAR].iter().any(|pool| {
                let same = pool.offer.index == entry.pool
                    || (pool.offer.kind == PoolKind::Send && entry.kind == is_send);
                pool.state == PoolState::Asked && same
            })
        })
    }

    /// Unacknowledged service: answers once more, where that is done already.
    pub(super) fn repeat_answer(&mut self, context: Context, message: Message<'_>) {
        match message {
            Message::FlushRequest(_) => {
                if let Some((answered, again)) = &mut self.flush_answered {
                    *again |= *answered == context;
                }
            }
            Message::Request(..) => {
                if let Some(asked) = &mut self.asked {
                    asked.pending |= asked.context == context && asked.length.is_some();
                }
            }
            _ => self.confirm = Some(context),
        }
    }

    pub(super) fn take_reply<'m>(
        &mut self,
        context: Context,
        message: Message<'m>,
    ) -> Result<Event<'m>, Violation> {
        let is_lossy = self.options.service == Service::Unacknowledged;
        if context.session != self.session {
            return Err(Violation::OtherSession);
        }
        // Where requests come twice, so do replies: but only to what was sent.
        let is_sent = self.sequence.wrapping_sub(context.sequence) < HALF;
        let slot = match message {
            Message::Reply(Operation::Received, ..) if is_lossy => &mut self.one_way,
            Message::Reply(operation, ..) if self.request_operation == Some(operation) => {
                &mut self.request
            }
            Message::FlushReply => &mut self.flush,
            Message::Reply(..) if is_lossy && is_sent => {
                self.counters.repeated += 1;
                return Ok(Event::Nothing);
            }
            _ => return Err(Violation::NoSuchRequest),
        };
        if !slot.awaits(context.sequence) {
            if is_lossy && is_sent {
                self.counters.repeated += 1;
                return Ok(Event::Nothing);
            }
            return Err(Violation::NoSuchRequest);
        }
        slot.state = SlotState::Idle;
        match message {
            Message::FlushReply => {
                for slot in NEAR.chain(FAR) {
                    let pool = &mut self.pools[slot];
                    if pool.state != PoolState::Asked {
                        continue;
                    }
                    if !pool.is_idle() {
                        return Err(Violation::FlushedEarly);
                    }
                    self.end(slot);
                }
                Ok(Event::Flush)
            }
            Message::Reply(operation, status, data) if operation != Operation::Received => {
                self.request_operation = None;
                Ok(Event::Reply(operation, status, data))
            }
            _ => Ok(Event::Nothing),
        }
    }

    pub(super) fn take_get(&mut self, get: Get) -> Result<Event<'static>, Violation> {
        if self.options.service == Service::Unacknowledged {
            let missing = get.sent.wrapping_sub(self.peer_data_sequence);
            let is_messages = |pool: &Pool| pool.known && pool.offer.kind == PoolKind::Send;
            let messages = self.pools[NEAR].iter().position(is_messages);
            // Those that came before what they were sent before are no fewer.
            if missing != 0 && missing < HALF {
                let slot = messages.ok_or(Violation::CreditExceeded)?;
                self.take_for_lost(slot, missing)?;
            }
        }
        if get.elements == 0 {
            return Ok(Event::Nothing);
        }
        Ok(Event::Wanted {
            elements: get.elements,
            element_size: get.element_size,
        })
    }

    pub(super) fn take_update(&mut self, entry: UpdateEntry) -> Result<(), Violation> {
        let slot = self.refer(entry.pool)?;
        if !self.sends(slot) {
            return Err(Violation::PoolMisused);
        }
        self.given = self.now;
        let UpdateEntry { first, count, .. } = entry;
        let pool = &mut self.pools[slot];
        let end = first
            .checked_add(count)
            .filter(|&end| count != 0 && end <= pool.offer.elements)
            .ok_or(Violation::ElementBeyond)?;
        if pool.offer.kind == PoolKind::Send {
            if first != 0 || count > pool.offer.elements - pool.idle {
                return Err(Violation::ElementIdle);
            }
            pool.idle += count;
            return Ok(());
        }
        let base = slot as u32 * self.capacity;
        for place in base + first..base + end {
            let element = &mut self.elements[place as usize];
            if element.state != State::Told {
                return Err(Violation::ElementIdle);
            }
            element.state = State::Idle;
            pool.list.push(&mut self.elements, place);
            pool.idle += 1;
        }
        Ok(())
    }
}
