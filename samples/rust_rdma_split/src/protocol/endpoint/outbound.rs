// SPDX-License-Identifier: GPL-2.0

//! Frames out.

use super::*;

impl<S: DerefMut<Target = [Element]>> Endpoint<S> {
    /// The pool that a frame of this length is sent through.
    pub(super) fn choose(&self, length: u32) -> Result<usize, Unsent> {
        if !self.is_running() || self.closing {
            return Err(Unsent::Closed);
        }
        if length == 0 {
            return Err(Unsent::Empty);
        }
        let mut best = None;
        let mut fits = false;
        for slot in NEAR.chain(FAR).filter(|&slot| self.sends(slot)) {
            let pool = &self.pools[slot];
            let is_usable = pool.state == PoolState::Live && pool.known && !pool.peer_asked;
            if !is_usable || pool.offer.element_size < length {
                continue;
            }
            fits = true;
            if pool.idle == 0 {
                continue;
            }
            // Whichever has a free element will do; rather one of the kind for such frames, and of
            // those the one that wastes least.
            let by_message = pool.offer.kind == PoolKind::Send;
            let is_other = by_message != (length <= self.options.threshold);
            let rank = (is_other, pool.offer.element_size);
            if best.is_none_or(|(before, _)| rank < before) {
                best = Some((rank, slot));
            }
        }
        match best {
            Some((_, slot)) => Ok(slot),
            None if fits => Err(Unsent::NoElement),
            None => Err(Unsent::TooLarge),
        }
    }

    /// Whether a frame of this length could be sent now, or why not. It is worth waiting for
    /// [`Unsent::NoElement`] only: for any other reason it cannot be sent later either.
    pub fn can_send(&self, length: u32) -> Result<(), Unsent> {
        self.choose(length).map(drop)
    }

    /// Asks the peer for more, for who waits until a frame of this length can be sent.
    pub fn want(&mut self, length: u32) {
        self.wanted.get_or_insert(length);
    }

    /// Says how a frame of `length` bytes travels; frames are handed to the data channel in the order
    /// of these calls. What is not sent is counted as dropped, and asked for: a caller that would
    /// rather wait asks [`Endpoint::can_send`] first.
    pub fn send(&mut self, length: u32) -> Result<Transfer, Unsent> {
        let slot = match self.choose(length) {
            Ok(slot) => slot,
            Err(unsent) => {
                match unsent {
                    Unsent::NoElement => {
                        self.counters.dropped_no_element += 1;
                        self.want(length);
                    }
                    Unsent::TooLarge => {
                        self.counters.dropped_too_large += 1;
                        self.want(length);
                    }
                    Unsent::Closed => self.counters.dropped_closed += 1,
                    Unsent::Empty => {}
                }
                return Err(unsent);
            }
        };
        let reference = self.reference(slot);
        if self.pools[slot].is_idle() {
            self.given = self.now;
        }
        let pool = &mut self.pools[slot];
        let generation = pool.generation;
        pool.idle -= 1;
        if pool.offer.kind == PoolKind::Send {
            self.data_sequence = self.data_sequence.wrapping_add(1);
            self.data_sent = self.now;
            let context = Context {
                session: self.session,
                sequence: self.data_sequence,
            };
            let mut header = [0; DATA_HEADER];
            let mut draft = Draft::new(&mut header, Function::SendData, context);
            draft.put(&Data {
                pool: reference,
                size: length,
            });
            self.counters.sent_by_message += 1;
            let handle = Handle {
                slot: slot as u8,
                generation,
                element: u32::MAX,
            };
            return Ok(Transfer::Message { header, handle });
        }
        // As many are idle as are in the list.
        let Some(place) = pool.list.pop(&self.elements) else {
            pool.idle += 1;
            return Err(Unsent::NoElement);
        };
        let offer = pool.offer;
        let (_, number) = self.whose(place);
        let handle = Handle {
            slot: slot as u8,
            generation,
            element: number,
        };
        let element = &mut self.elements[place as usize];
        element.length = length;
        element.state = State::Filling;
        if offer.kind == PoolKind::Read {
            self.counters.sent_by_read += 1;
            return Ok(Transfer::Fill {
                pool: offer.index,
                element: number,
                handle,
            });
        }
        let immediate = Immediate {
            pool: offer.index,
            element: number,
            size: length,
        };
        let immediate = match self.options.separate_indication {
            true => None,
            false => immediate.encode(),
        };
        if immediate.is_some() {
            element.state = State::Told;
            self.counters.told_by_immediate += 1;
        }
        self.counters.sent_by_write += 1;
        Ok(Transfer::Write {
            // The pool's end was checked when it was announced.
            address: offer.address + u64::from(number) * u64::from(offer.element_size),
            key: offer.key,
            immediate,
            handle,
        })
    }

    /// The frame of a write is in the peer's memory, or in that of this side for the peer to read: the
    /// peer is told, which it never is before.
    pub fn written(&mut self, handle: Handle) -> Result<(), Misuse> {
        let Some(place) = self.place_of(handle, true)? else {
            return Ok(());
        };
        let element = &mut self.elements[place as usize];
        match element.state {
            State::Filling => {
                element.state = State::Ready;
                self.ready.push(&mut self.elements, place);
                Ok(())
            }
            State::Told => Ok(()),
            _ => Err(Misuse::NotHeld),
        }
    }

    /// The frame could not be handed to the data channel: as if [`Endpoint::send`] had not been called.
    /// Only before the next frame is sent.
    pub fn unsend(&mut self, transfer: Transfer) -> Result<(), Misuse> {
        let (Transfer::Message { handle, .. }
        | Transfer::Write { handle, .. }
        | Transfer::Fill { handle, .. }) = transfer;
        if let Transfer::Message { header, .. } = transfer {
            let slot = usize::from(handle.slot);
            if self.pools[slot].generation != handle.generation {
                return Ok(());
            }
            let sent = Header::decode(&header).map(|header| Context::from_number(header.context));
            let last = Context {
                session: self.session,
                sequence: self.data_sequence,
            };
            if sent != Some(last) || self.pools[slot].is_idle() {
                return Err(Misuse::NotHeld);
            }
            self.data_sequence = self.data_sequence.wrapping_sub(1);
            self.pools[slot].idle += 1;
            self.counters.sent_by_message -= 1;
            return Ok(());
        }
        let Some(place) = self.place_of(handle, true)? else {
            return Ok(());
        };
        let element = &mut self.elements[place as usize];
        if !matches!(element.state, State::Filling | State::Told) {
            return Err(Misuse::NotHeld);
        }
        match transfer {
            Transfer::Fill { .. } => self.counters.sent_by_read -= 1,
            _ => {
                self.counters.sent_by_write -= 1;
                self.counters.told_by_immediate -= u64::from(element.state == State::Told);
            }
        }
        element.state = State::Idle;
        let pool = &mut self.pools[usize::from(handle.slot)];
        pool.list.push(&mut self.elements, place);
        pool.idle += 1;
        Ok(())
    }
}
