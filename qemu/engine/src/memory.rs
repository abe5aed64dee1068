// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What the engine needs from the machine around it: host memory, a wire, interrupts.

use crate::loan::{Data, Loan};
use crate::roce::{Mac, Medium};
use std::fmt;
use std::sync::Arc;

/// Host memory could not be accessed: nothing is mapped there, or bus mastering is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaError {
    /// The first address of the access that failed.
    pub address: u64,
}

impl fmt::Display for DmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no host memory at {:#x}", self.address)
    }
}

impl std::error::Error for DmaError {}

/// Host memory by DMA address.
///
/// Plain reads and writes have no order among themselves and may tear. The `load` and `store`
/// operations are single accesses of naturally aligned words; a misaligned address is an error.
/// All take `&self`: the host's processors change the memory at the same time anyway.
pub trait HostMemory {
    /// Copies from host memory.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), DmaError>;
    /// Copies to host memory.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), DmaError>;
    /// Loads a word; later accesses are not done before it (acquire).
    fn load_u32(&self, address: u64) -> Result<u32, DmaError>;
    /// Loads a word; later accesses are not done before it (acquire).
    fn load_u64(&self, address: u64) -> Result<u64, DmaError>;
    /// Stores a word; earlier accesses are done before it (release).
    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaError>;
    /// Stores a word; earlier accesses are done before it (release).
    fn store_u64(&self, address: u64, value: u64) -> Result<(), DmaError>;
    /// Stores `new` if the word is `compare`; returns what it was.
    fn compare_exchange_u64(&self, address: u64, compare: u64, new: u64) -> Result<u64, DmaError>;
    /// Adds to the word, wrapping; returns what it was.
    fn fetch_add_u64(&self, address: u64, addend: u64) -> Result<u64, DmaError>;
    /// A full barrier (sequentially consistent), stores before it against loads after it.
    fn fence(&self);
    /// Adds memory to what is lent; false where memory is not lent.
    fn lend(&self, address: u64, length: usize, loan: &mut Loan) -> Result<bool, DmaError> {
        let _ = (address, length, loan);
        Ok(false)
    }
    /// Copies to host memory what may be lent.
    fn place(&self, address: u64, data: Data<'_>) -> Result<(), DmaError> {
        match data.bytes() {
            Some(bytes) => self.write(address, &bytes),
            None => Err(DmaError { address }),
        }
    }
}

/// What a frame leaves by. Each way has a queue of its own, so that one that is full holds up
/// nobody who uses another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// It stays in the device.
    Loopback,
    /// The wire.
    Wire,
    /// Memory that is shared with a neighbour; the number is the host's.
    Memory(u32),
}

impl Way {
    /// What carries the frame.
    pub fn medium(self) -> Medium {
        match self {
            Self::Wire => Medium::Wire,
            Self::Loopback | Self::Memory(_) => Medium::Memory,
        }
    }
}

/// What a way takes now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// So many bytes, of which a frame takes its length and [`FRAME_OVERHEAD`].
    Bytes(usize),
    /// Nothing, and that for so long that it may be for ever. What is sent all the same is lost.
    Stuck,
}

/// Bytes of [`Room`] that a frame takes beside its own.
pub const FRAME_OVERHEAD: usize = 128;
/// With so much room nobody has to wait: the host need not tell of more.
pub const ENOUGH_ROOM: usize = 256 << 10;

/// How much payload goes to somebody without being copied into frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lending {
    /// Bytes at once: a multiple of every MTU, and [`MAX_LENT`] at most.
    pub at_once: u32,
    /// Bytes of a connection on their way.
    pub under_way: u32,
}

impl Lending {
    /// To another engine of this process, which copies it from where it lies: it takes no memory on its way,
    /// and as much keeps a peer busy that has to be woken.
    pub const INSIDE: Self = Self {
        at_once: MAX_LENT,
        under_way: 4 << 20,
    };
}

/// Bytes that are lent at once at most: packets in a row that go as one, with the headers of the first
/// and the last as if they were one packet.
pub const MAX_LENT: u32 = 256 << 10;

/// The machine around an engine.
///
/// Functions that only touch memory take `&M` where `M: HostMemory + ?Sized`; `dyn Host` is such
/// an `M`.
pub trait Host: HostMemory {
    /// Puts a whole Ethernet frame (without frame check sequence) on the way to its destination.
    fn transmit(&mut self, frame: &[u8]);
    /// Puts a frame of the Ethernet interface on the wire, the same way as every other such frame.
    fn transmit_ordinary(&mut self, frame: &[u8]) {
        self.transmit(frame);
    }
    /// Whether payload may be lent to whoever has this Ethernet address, and how much: an engine that takes
    /// it from where it lies, or from memory that the host copies it to at once.
    fn lends(&self, destination: &Mac) -> Option<Lending> {
        let _ = destination;
        None
    }
    /// Sends a frame without its payload, which is lent. Only to whom the host [lends](Self::lends), and no
    /// more than that.
    fn transmit_lent(&mut self, head: &[u8], loan: Arc<Loan>) {
        // A host that does not lend is not asked to.
        let _ = (head, loan);
    }
    /// What the next frame to this Ethernet address leaves by: not [`Way::Loopback`].
    fn way(&self, destination: &Mac) -> Way {
        let _ = destination;
        Way::Wire
    }
    /// What may be sent by a way without loss. A way that is not there any more has room.
    ///
    /// After it has said less than [`ENOUGH_ROOM`], the host calls [`crate::Engine::room_again`]
    /// when there is more, when it begins to say [`Room::Stuck`], and when the way is gone.
    fn room(&mut self, way: Way) -> Room {
        let _ = way;
        Room::Bytes(usize::MAX)
    }
    /// Raises a message; it is always less than [`crate::Config::messages`].
    fn raise(&mut self, message: u16);
}
