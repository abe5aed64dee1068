// SPDX-License-Identifier: GPL-2.0

//! Messages, from bytes and to bytes. What is checked here needs no state.

use super::layout::Layout;
use super::violation::Violation;
use super::wire::*;
use core::marker::PhantomData;

/// Entries of a message, all of them whole and with zero in what is reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries<'m, T> {
    bytes: &'m [u8],
    _p: PhantomData<T>,
}

impl<'m, T: Layout> Entries<'m, T> {
    /// Entries that fill `bytes`.
    fn filling(bytes: &'m [u8]) -> Result<Self, Violation> {
        if bytes.is_empty() {
            return Err(Violation::NoEntries);
        }
        if bytes.len() % T::SIZE != 0 {
            return Err(Violation::Truncated);
        }
        let entries = Self {
            bytes,
            _p: PhantomData,
        };
        if !entries.iter().all(|entry| entry.reserved_is_zero()) {
            return Err(Violation::Reserved);
        }
        Ok(entries)
    }

    /// Entries behind their number.
    fn counted(bytes: &'m [u8]) -> Result<Self, Violation> {
        let (EntryCount { count }, bytes) = take(bytes)?;
        let size = (count as usize)
            .checked_mul(T::SIZE)
            .ok_or(Violation::Truncated)?;
        Self::filling(exactly(bytes, size)?)
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = T> + 'm {
        self.bytes.chunks_exact(T::SIZE).filter_map(T::decode)
    }
}

/// A message, apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'m> {
    /// `BufferRecvPool`.
    Pools(Entries<'m, PoolEntry>),
    /// `BufferRecvPoolGet`.
    Get(Get),
    /// `BufferRecvPoolUpdate`.
    Update(Entries<'m, UpdateEntry>),
    /// `BufferPoolFlushRequest`.
    FlushRequest(Entries<'m, PoolReference>),
    /// `BufferPoolFlushReply`.
    FlushReply,
    /// `SendData`: the reference of the pool, and the frame.
    SendData(u32, &'m [u8]),
    /// `BufferRDMAIndicate`.
    Indicate(Entries<'m, IndicateEntry>),
    /// `CfgUtilRequest`, with its data, which make sense.
    Request(Operation, &'m [u8]),
    /// `CfgUtilReply`, with its data, which make sense.
    Reply(Operation, Status, &'m [u8]),
}

/// Takes a layout from the front of `bytes`; gives what is behind it.
fn take<T: Layout>(bytes: &[u8]) -> Result<(T, &[u8]), Violation> {
    let value = T::decode(bytes).ok_or(Violation::Truncated)?;
    if !value.reserved_is_zero() {
        return Err(Violation::Reserved);
    }
    Ok((value, &bytes[T::SIZE..]))
}

/// `bytes`, if they are `size`.
fn exactly(bytes: &[u8], size: usize) -> Result<&[u8], Violation> {
    match bytes.len() {
        length if length < size => Err(Violation::Truncated),
        length if length > size => Err(Violation::TooLong),
        _ => Ok(bytes),
    }
}

/// Whether `value` is what data may be.
fn sensible(operation: Operation, data: &[u8]) -> bool {
    match operation {
        Operation::GetMac | Operation::SetMac => MacAddress::decode(data)
            .is_some_and(|it| it.reserved_is_zero() && it.mac[0] & 1 == 0 && it.mac != [0; 6]),
        Operation::AddMulticast | Operation::RemoveMulticast => {
            MacAddress::decode(data).is_some_and(|it| it.reserved_is_zero() && it.mac[0] & 1 == 1)
        }
        Operation::GetMtu | Operation::SetMtu => {
            Mtu::decode(data).is_some_and(|it| (1..=MTU_MAX).contains(&it.mtu))
        }
        Operation::AddVlan | Operation::RemoveVlan => Vlan::decode(data)
            .is_some_and(|it| it.reserved_is_zero() && (1..4095).contains(&it.vlan)),
        Operation::SetFilter => FilterFlags::decode(data)
            .is_some_and(|it| it.flags & !(FILTER_PROMISCUOUS | FILTER_ALL_MULTICAST) == 0),
        // An interface that is gone has an MTU of 0.
        Operation::GetLink | Operation::LinkChanged => Link::decode(data)
            .is_some_and(|it| it.flags & !(LINK_UP | LINK_FULL_DUPLEX) == 0 && it.mtu <= MTU_MAX),
        Operation::GetStatistics | Operation::Received => true,
    }
}

/// The data of an operation: as many as there should be, and sensible.
pub(super) fn check_data(operation: Operation, data: &[u8], size: usize) -> Result<(), Violation> {
    if data.len() != size || (size != 0 && !sensible(operation, data)) {
        return Err(Violation::BadData);
    }
    Ok(())
}

impl<'m> Message<'m> {
    /// Takes a message apart.
    pub fn parse(bytes: &'m [u8]) -> Result<(Context, Self), Violation> {
        let (header, body) = take::<Header>(bytes)?;
        if header.version != VERSION {
            return Err(Violation::BadVersion);
        }
        let function = Function::from_number(header.function).ok_or(Violation::BadFunction)?;
        if function != Function::SendData && bytes.len() > CONTROL_MAX {
            return Err(Violation::TooLong);
        }
        let message = match function {
            Function::BufferRecvPool => Self::Pools(Entries::counted(body)?),
            Function::BufferRecvPoolGet => {
                let (get, rest) = take(body)?;
                exactly(rest, 0)?;
                Self::Get(get)
            }
            Function::BufferRecvPoolUpdate => Self::Update(Entries::counted(body)?),
            Function::BufferPoolFlushRequest => Self::FlushRequest(Entries::filling(body)?),
            Function::BufferPoolFlushReply => {
                exactly(body, 0)?;
                Self::FlushReply
            }
            Function::SendData => {
                let (Data { pool, size }, frame) = take(body)?;
                if size == 0 {
                    return Err(Violation::FrameEmpty);
                }
                Self::SendData(pool, exactly(frame, size as usize)?)
            }
            Function::BufferRDMAIndicate => Self::Indicate(Entries::counted(body)?),
            Function::CfgUtilRequest => {
                let (request, data) = take::<Request>(body)?;
                let operation = Operation::from_number(request.operation)
                    .filter(|operation| operation.asked_by().is_some())
                    .ok_or(Violation::BadOperation)?;
                let data = exactly(data, request.size as usize)?;
                check_data(operation, data, operation.data_sizes().0)?;
                Self::Request(operation, data)
            }
            Function::CfgUtilReply => {
                let (reply, data) = take::<Reply>(body)?;
                let operation =
                    Operation::from_number(reply.operation).ok_or(Violation::BadOperation)?;
                let status = Status::from_number(reply.status).ok_or(Violation::BadStatus)?;
                let data = exactly(data, reply.size as usize)?;
                let size = match status {
                    Status::Done => operation.data_sizes().1,
                    _ => 0,
                };
                check_data(operation, data, size)?;
                Self::Reply(operation, status, data)
            }
        };
        Ok((Context::from_number(header.context), message))
    }
}

/// A message that is being made.
pub(super) struct Draft<'b> {
    bytes: &'b mut [u8],
    length: usize,
}

impl<'b> Draft<'b> {
    /// Begins one in `bytes`, which have room for it.
    pub(super) fn new(bytes: &'b mut [u8], function: Function, context: Context) -> Self {
        let mut draft = Self { bytes, length: 0 };
        draft.put(&Header {
            function: function.number(),
            version: VERSION,
            context: context.number(),
        });
        draft
    }

    /// Whether there is room for that much more.
    pub(super) fn has_room(&self, size: usize) -> bool {
        self.bytes.len() - self.length >= size
    }

    /// Adds a layout; whether there was room for it.
    pub(super) fn put<T: Layout>(&mut self, value: &T) -> bool {
        let done = value.encode(&mut self.bytes[self.length..]).is_some();
        if done {
            self.length += T::SIZE;
        }
        done
    }

    /// Adds bytes; whether there was room for them.
    pub(super) fn put_bytes(&mut self, bytes: &[u8]) -> bool {
        let Some(to) = self.bytes[self.length..].get_mut(..bytes.len()) else {
            return false;
        };
        to.copy_from_slice(bytes);
        self.length += bytes.len();
        true
    }

    /// Says how many entries there are, where that was left open behind the header.
    pub(super) fn count(&mut self, count: u32) {
        let _ = EntryCount { count }.encode(&mut self.bytes[Header::SIZE..]);
    }

    /// Its length.
    pub(super) fn finish(self) -> usize {
        self.length
    }
}

impl Join {
    /// Checks the private data of a peer against what this side would say to it.
    ///
    /// `own` is this side's, with the peer's session once that is known (the data channel, and the
    /// control channel's request that is answered); 0 where the peer's is to be learned.
    pub fn check(own: &Self, bytes: &[u8]) -> Result<Self, Violation> {
        let (theirs, _) = take::<Self>(bytes).map_err(|_| Violation::BadJoin)?;
        if theirs.magic != JOIN_MAGIC {
            return Err(Violation::BadJoin);
        }
        if theirs.version != VERSION {
            return Err(Violation::BadVersion);
        }
        let fits = theirs.channel == own.channel
            && Role::from_number(theirs.role).is_some()
            && theirs.role != own.role
            && theirs.service == own.service
            && theirs.variant == own.variant
            && theirs.session != 0;
        if !fits {
            return Err(Violation::BadJoin);
        }
        if theirs.key != own.key {
            return Err(Violation::BadKey);
        }
        // Whoever names a session names the right one.
        let knows = theirs.peer_session == own.session || theirs.peer_session == 0;
        let known = own.peer_session == theirs.session || own.peer_session == 0;
        // On the data channel both are known to both.
        let needed = theirs.channel == Channel::Data.number();
        if !knows || !known || (needed && (theirs.peer_session == 0 || own.peer_session == 0)) {
            return Err(Violation::OtherSession);
        }
        Ok(theirs)
    }
}
