// SPDX-License-Identifier: GPL-2.0

//! Frames in.

use super::*;

impl<S: DerefMut<Target = [Element]>> Endpoint<S> {
    /// An element was filled.
    pub(super) fn arrive(
        &mut self,
        slot: usize,
        number: u32,
        length: u32,
    ) -> Result<(), Violation> {
        if self.sends(slot) || self.pools[slot].offer.kind == PoolKind::Send {
            return Err(Violation::PoolMisused);
        }
        let places = self.places(slot);
        if number >= places.end - places.start {
            return Err(Violation::ElementBeyond);
        }
        let place = places.start + number;
        let element = &mut self.elements[place as usize];
        if element.state != State::Idle {
            return Err(Violation::ElementTaken);
        }
        let pool = &mut self.pools[slot];
        if length == 0 {
            return Err(Violation::FrameEmpty);
        }
        if length > pool.offer.element_size {
            return Err(Violation::FrameBeyond);
        }
        element.state = State::Arrived;
        element.length = length;
        pool.idle -= 1;
        pool.held += 1;
        self.arrived.push(&mut self.elements, place);
        self.counters.received += 1;
        Ok(())
    }

    /// Immediate data have arrived, with a write of `length` bytes.
    pub fn receive_immediate(
        &mut self,
        bits: u32,
        length: u32,
    ) -> Result<Event<'static>, Violation> {
        self.check()?;
        let immediate = Immediate::decode(bits);
        let result = self
            .refer(immediate.pool | REFERENCE_YOURS)
            .and_then(|slot| match length == immediate.size {
                true => self.arrive(slot, immediate.element, length),
                false => Err(Violation::FrameTorn),
            });
        match result {
            Ok(()) => Ok(Event::Frames),
            Err(violation) => Err(self.fail(violation)),
        }
    }

    /// A message has arrived on the data channel: a frame, unless it comes too late.
    pub fn receive_data<'m>(&mut self, bytes: &'m [u8]) -> Result<Option<Delivery<'m>>, Violation> {
        self.check()?;
        self.take_data(bytes)
            .map_err(|violation| self.fail(violation))
    }

    pub(super) fn take_data<'m>(
        &mut self,
        bytes: &'m [u8],
    ) -> Result<Option<Delivery<'m>>, Violation> {
        let (context, message) = Message::parse(bytes)?;
        let Message::SendData(reference, frame) = message else {
            return Err(Violation::WrongChannel);
        };
        if context.session != self.peer_session {
            return Err(Violation::OtherSession);
        }
        let ahead = context.sequence.wrapping_sub(self.peer_data_sequence);
        let is_lossy = self.options.service == Service::Unacknowledged;
        if ahead == 0 || ahead >= HALF {
            if is_lossy {
                self.counters.late += 1;
                return Ok(None);
            }
            return Err(Violation::Replayed);
        }
        if ahead > 1 && !is_lossy {
            return Err(Violation::Skipped);
        }
        let slot = self.refer(reference)?;
        if self.sends(slot) || self.pools[slot].offer.kind != PoolKind::Send {
            return Err(Violation::PoolMisused);
        }
        if frame.len() > self.pools[slot].offer.element_size as usize {
            return Err(Violation::FrameBeyond);
        }
        self.take_for_lost(slot, ahead - 1)?;
        let pool = &mut self.pools[slot];
        pool.idle = pool.idle.checked_sub(1).ok_or(Violation::CreditExceeded)?;
        pool.held += 1;
        self.peer_data_sequence = context.sequence;
        self.counters.received += 1;
        let handle = Handle {
            slot: slot as u8,
            generation: pool.generation,
            element: u32::MAX,
        };
        Ok(Some(Delivery { frame, handle }))
    }

    /// So many messages that the peer has sent will not come any more: their buffers are still there.
    pub(super) fn take_for_lost(&mut self, slot: usize, lost: u32) -> Result<(), Violation> {
        let pool = &mut self.pools[slot];
        pool.idle = pool
            .idle
            .checked_sub(lost)
            .ok_or(Violation::CreditExceeded)?;
        pool.owed += lost;
        self.peer_data_sequence = self.peer_data_sequence.wrapping_add(lost);
        self.counters.lost += u64::from(lost);
        Ok(())
    }

    /// A frame that has arrived in an element. It is the caller's until [`Endpoint::release`].
    pub fn next_arrival(&mut self) -> Option<Arrival> {
        let place = self.arrived.pop(&self.elements)?;
        let (slot, number) = self.whose(place);
        let element = &mut self.elements[place as usize];
        element.state = State::Held;
        let pool = &self.pools[slot];
        Some(Arrival {
            pool: pool.offer,
            element: number,
            length: element.length,
            handle: Handle {
                slot: slot as u8,
                generation: pool.generation,
                element: number,
            },
        })
    }

    /// Gives an element back whose frame is not needed any more, or a message's buffer that is posted
    /// again.
    pub fn release(&mut self, handle: Handle) -> Result<(), Misuse> {
        let slot = usize::from(handle.slot);
        if handle.element == u32::MAX {
            let pool = &self.pools[slot];
            if pool.generation != handle.generation {
                return Ok(());
            }
            if self.sends(slot) || pool.offer.kind != PoolKind::Send || pool.held == 0 {
                return Err(Misuse::NotHeld);
            }
            self.let_go(slot, None);
            return Ok(());
        }
        let Some(place) = self.place_of(handle, false)? else {
            return Ok(());
        };
        if self.elements[place as usize].state != State::Held {
            return Err(Misuse::NotHeld);
        }
        self.let_go(slot, Some(place));
        Ok(())
    }

    /// A frame is not needed any more: its place is owed to the peer, if that knows it.
    pub(super) fn let_go(&mut self, slot: usize, place: Option<u32>) {
        let pool = &mut self.pools[slot];
        pool.held -= 1;
        let state = match pool.known {
            true => State::Owed,
            false => State::Idle,
        };
        if pool.known {
            pool.owed += 1;
        } else {
            pool.idle += 1;
        }
        if let Some(place) = place {
            self.elements[place as usize].state = state;
            if pool.known {
                pool.list.push(&mut self.elements, place);
            }
        }
        self.settle(slot);
    }
}
