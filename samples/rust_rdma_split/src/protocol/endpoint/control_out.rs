// SPDX-License-Identifier: GPL-2.0

//! Control messages out.

use super::*;

impl<S: DerefMut<Target = [Element]>> Endpoint<S> {
    /// Asks the peer something. One at a time; the answer is an [`Event::Reply`].
    pub fn request(&mut self, operation: Operation, data: &[u8]) -> Result<(), Misuse> {
        if operation.asked_by() != Some(self.options.role)
            || check_data(operation, data, operation.data_sizes().0).is_err()
        {
            return Err(Misuse::BadRequest);
        }
        if !self.is_running() || self.request.state != SlotState::Idle {
            return Err(Misuse::Busy);
        }
        // It gets its number when it is sent.
        let context = Context {
            session: self.session,
            sequence: 0,
        };
        let mut draft = Draft::new(&mut self.request.bytes, Function::CfgUtilRequest, context);
        draft.put(&Request {
            operation: operation.number(),
            reserved: 0,
            size: data.len() as u32,
        });
        draft.put_bytes(data);
        self.request.length = draft.finish();
        self.request.state = SlotState::Queued;
        self.request_operation = Some(operation);
        Ok(())
    }

    /// Answers what the peer asked; with data only where it is `Done`.
    pub fn reply(&mut self, status: Status, data: &[u8]) -> Result<(), Misuse> {
        let asked = self
            .asked
            .as_mut()
            .filter(|asked| asked.length.is_none())
            .ok_or(Misuse::Busy)?;
        let size = match status {
            Status::Done => asked.operation.data_sizes().1,
            _ => 0,
        };
        check_data(asked.operation, data, size).map_err(|_| Misuse::BadRequest)?;
        let mut draft = Draft::new(&mut self.answer, Function::CfgUtilReply, asked.context);
        draft.put(&Reply {
            operation: asked.operation.number(),
            status: status.number(),
            size: data.len() as u32,
        });
        draft.put_bytes(data);
        asked.length = Some(draft.finish());
        asked.pending = true;
        Ok(())
    }

    /// The next control message that is to be sent, if there is one.
    pub fn poll_control(&mut self, out: &mut [u8; CONTROL_MAX]) -> Option<Outgoing> {
        if !self.is_running() {
            return None;
        }
        if let Some(length) = self.poll_reply(out) {
            return Some(Outgoing {
                length,
                token: Token::Reply,
            });
        }
        for token in [Token::OneWay, Token::Flush, Token::Request] {
            if let Some(length) = self.poll_slot(token, out) {
                return Some(Outgoing { length, token });
            }
        }
        None
    }

    pub(super) fn poll_reply(&mut self, out: &mut [u8; CONTROL_MAX]) -> Option<usize> {
        let is_done = |pool: &Pool| !pool.peer_asked || pool.is_idle();
        if let Some(context) = self.flush_asked.filter(|_| self.pools.iter().all(is_done)) {
            for slot in NEAR.chain(FAR) {
                if self.pools[slot].peer_asked {
                    self.end(slot);
                }
            }
            self.flush_asked = None;
            self.flush_answered = Some((context, true));
        }
        if let Some((context, again @ true)) = &mut self.flush_answered {
            *again = false;
            return Some(Draft::new(out, Function::BufferPoolFlushReply, *context).finish());
        }
        if let Some(asked) = self.asked.as_mut().filter(|asked| asked.pending) {
            asked.pending = false;
            let length = asked.length?;
            out[..length].copy_from_slice(&self.answer[..length]);
            return Some(length);
        }
        let context = self.confirm.take()?;
        let mut draft = Draft::new(out, Function::CfgUtilReply, context);
        draft.put(&Reply {
            operation: Operation::Received.number(),
            status: Status::Done.number(),
            size: 0,
        });
        Some(draft.finish())
    }

    pub(super) fn poll_slot(&mut self, token: Token, out: &mut [u8; CONTROL_MAX]) -> Option<usize> {
        let now = self.now;
        let state = self.slot(token)?.state;
        match state {
            SlotState::Sent => return None,
            SlotState::Resend => {
                self.counters.resent += 1;
                let slot = self.slot(token)?;
                slot.state = SlotState::Sent;
                slot.sent = now;
                out[..slot.length].copy_from_slice(&slot.bytes[..slot.length]);
                return Some(slot.length);
            }
            SlotState::Queued | SlotState::Idle => {}
        }
        let context = Context {
            session: self.session,
            sequence: self.sequence.wrapping_add(1),
        };
        let length = match token {
            Token::OneWay => self.draft_one_way(out, context)?,
            Token::Flush => self.draft_flush(out, context)?,
            Token::Request if state == SlotState::Queued => {
                // Written over the header without a number.
                let length = self.request.length;
                out[..length].copy_from_slice(&self.request.bytes[..length]);
                let _ = Draft::new(out, Function::CfgUtilRequest, context).finish();
                length
            }
            Token::Request | Token::Reply => return None,
        };
        self.sequence = context.sequence;
        let slot = self.slot(token)?;
        slot.state = SlotState::Sent;
        slot.sequence = context.sequence;
        (slot.began, slot.sent) = (now, now);
        slot.length = length;
        slot.bytes[..length].copy_from_slice(&out[..length]);
        Some(length)
    }

    pub(super) fn draft_one_way(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        if let Some(length) = self.draft_pools(out, context) {
            return Some(length);
        }
        // In turn, so that neither direction waits for the other to have nothing to say.
        self.updates_first = !self.updates_first;
        let first = match self.updates_first {
            true => self.draft_updates(out, context),
            false => self.draft_indicates(out, context),
        };
        let length = first.or_else(|| match self.updates_first {
            true => self.draft_indicates(out, context),
            false => self.draft_updates(out, context),
        });
        length.or_else(|| self.draft_get(out, context))
    }

    pub(super) fn draft_pools(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRecvPool, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        for pool in &mut self.pools[NEAR] {
            // What is announced is idle, all of it.
            if pool.state != PoolState::Offered || !pool.is_idle() {
                continue;
            }
            if !draft.put(&pool.offer.entry()) {
                break;
            }
            pool.state = PoolState::Live;
            pool.known = true;
            self.counters.elements_announced += u64::from(pool.offer.elements);
            self.last_index = self.last_index.max(Some(pool.offer.index));
            count += 1;
        }
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    pub(super) fn draft_updates(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRecvPoolUpdate, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        'full: for slot in NEAR.chain(FAR) {
            let reference = self.reference(slot);
            let base = slot as u32 * self.capacity;
            let pool = &mut self.pools[slot];
            let mut run: Option<UpdateEntry> = None;
            while pool.owed != 0 {
                // Messages are all the same.
                let (first, step) = match pool.list.first() {
                    Some(place) => (place - base, 1),
                    None => (0, pool.owed),
                };
                match &mut run {
                    Some(run) if run.first + run.count == first => run.count += step,
                    _ => {
                        if let Some(run) = run.take() {
                            draft.put(&run);
                            count += 1;
                        }
                        if !draft.has_room(UpdateEntry::SIZE) {
                            break 'full;
                        }
                        run = Some(UpdateEntry {
                            pool: reference,
                            first,
                            count: step,
                        });
                    }
                }
                if let Some(place) = pool.list.pop(&self.elements) {
                    self.elements[place as usize].state = State::Idle;
                }
                pool.owed -= step;
                pool.idle += step;
            }
            if let Some(run) = run {
                draft.put(&run);
                count += 1;
            }
        }
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    pub(super) fn draft_indicates(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferRDMAIndicate, context);
        draft.put(&EntryCount { count: 0 });
        let mut count = 0;
        while !self.ready.is_empty() && draft.has_room(IndicateEntry::SIZE) {
            let Some(place) = self.ready.pop(&self.elements) else {
                break;
            };
            let (slot, number) = self.whose(place);
            let pool = self.reference(slot);
            let element = &mut self.elements[place as usize];
            element.state = State::Told;
            draft.put(&IndicateEntry {
                pool,
                element: number,
                size: element.length,
            });
            count += 1;
        }
        self.counters.told_by_indicate += u64::from(count);
        draft.count(count);
        (count != 0).then(|| draft.finish())
    }

    pub(super) fn draft_get(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        let wanted = self.wanted.filter(|_| !self.has_asked);
        if wanted.is_none() && !self.reconcile {
            return None;
        }
        let mut draft = Draft::new(out, Function::BufferRecvPoolGet, context);
        draft.put(&Get {
            elements: u32::from(wanted.is_some()),
            element_size: wanted.unwrap_or(0),
            sent: self.data_sequence,
        });
        if wanted.is_some() {
            self.wanted = None;
            self.has_asked = true;
        }
        self.reconcile = false;
        Some(draft.finish())
    }

    pub(super) fn draft_flush(
        &mut self,
        out: &mut [u8; CONTROL_MAX],
        context: Context,
    ) -> Option<usize> {
        let mut draft = Draft::new(out, Function::BufferPoolFlushRequest, context);
        let mut any = false;
        for slot in NEAR.chain(FAR) {
            let reference = PoolReference {
                pool: self.reference(slot),
            };
            let sends = self.sends(slot);
            let pool = &mut self.pools[slot];
            // The sending side asks when it is done, the receiving side for the other to be.
            if pool.state == PoolState::Draining && pool.known && (!sends || pool.is_idle()) {
                any |= draft.put(&reference);
                pool.state = PoolState::Asked;
            }
        }
        any.then(|| draft.finish())
    }

    /// A control message was sent: acknowledged by the peer's adapter, on the acknowledged service.
    pub fn control_done(&mut self, token: Token) {
        let is_lossy = self.options.service == Service::Unacknowledged;
        if token == Token::OneWay && !is_lossy && self.one_way.state == SlotState::Sent {
            self.one_way.state = SlotState::Idle;
        }
    }
}
