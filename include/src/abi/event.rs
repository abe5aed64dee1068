// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Event queue entries.

/// The queue for command completions, global and management events.
pub const EQ_CONTROL: u16 = 0;
/// The queue for asynchronous RDMA events.
pub const EQ_ASYNC: u16 = 1;
/// The first queue of a completion handler; handler `h` has queue `EQ_FIRST_HANDLER + h`.
pub const EQ_FIRST_HANDLER: u16 = 2;
/// In place of an event queue's number: a completion queue without a handler, which is polled only.
/// Its arming is kept, and fires when the queue is bound to a handler.
pub const EQ_NONE: u16 = 0xffff;
/// In place of an event queue's number: a completion queue whose events go where the vector map says
/// for its processor.
pub const EQ_MAPPED: u16 = 0xfffe;
/// In place of a message number in the vector map: the message that the event queue has itself.
pub const MESSAGE_OF_QUEUE: u16 = 0xffff;
/// The first bit of the number, in `param1` of an error of memory, of earlier ones that are not told
/// for want of room.
pub const MEMORY_ERRORS_UNTOLD: u32 = 32;
/// Fewest and most entries, base-2 logarithm.
pub const EQ_MIN_LOG_ENTRIES: u8 = 4;
/// Most entries, base-2 logarithm.
pub const EQ_MAX_LOG_ENTRIES: u8 = 20;

numbers! {
    /// What happened: `EventEntry::code`.
    pub enum EventCode: u32 {
        /// A command is done: `id` is its cookie, `param0` its [`super::CommandStatus`],
        /// `param1` its result: for a query, the bytes that the whole reply has.
        CommandDone = 0x01,
        /// A completion queue that was armed has a completion: `id` its number, `param0` the
        /// sequence of the arming.
        Completion = 0x10,
        /// A completion queue overflowed or its memory failed: `id` its number.
        CompletionQueueError = 0x11,
        /// A queue pair failed and its consumer cannot learn that from a completion: `id`.
        QueuePairFatal = 0x20,
        /// A queue pair refused an invalid request of its peer: `id`.
        QueuePairRequestError = 0x21,
        /// A queue pair refused an access violation of its peer: `id`.
        QueuePairAccessError = 0x22,
        /// The first packet arrived on a queue pair in state RTR: `id`.
        CommunicationEstablished = 0x23,
        /// A queue pair told to drain its send queue has done so: `id`.
        SendQueueDrained = 0x24,
        /// A queue pair in error took its last entry from its shared receive queue: `id`.
        LastWqeReached = 0x25,
        /// A shared receive queue fell below its limit: `id`.
        SrqLimit = 0x30,
        /// A shared receive queue failed: `id`.
        SrqError = 0x31,
        /// There are page faults to take, where there were none.
        PageFaults = 0x32,
        /// The Ethernet link of port `id` changed: `param0` is 1 for up, 0 for down.
        LinkChange = 0x40,
        /// The device stops: `param0` is the [`super::FatalCode`].
        DeviceFatal = 0x41,
        /// Another event queue is out of room: `id` its number.
        EventQueueOverflow = 0x42,
        /// The device's own memory failed somewhere, and what it held was corrected (`param1` 0) or
        /// given up (1): `param0` is where, a number for people. From [`MEMORY_ERRORS_UNTOLD`] on
        /// `param1` counts others.
        MemoryErrorInternal = 0x43,
        /// Host memory that the device read was poisoned: `param0` is its DMA address. From
        /// [`MEMORY_ERRORS_UNTOLD`] on `param1` counts others.
        MemoryErrorExternal = 0x44,
        /// Packets came on channel `id`.
        ChannelPackets = 0x50,
        /// Descriptors were returned on channel `id`.
        ChannelDescriptors = 0x51,
        /// The pool of channel `id` has fewer buffers than its threshold.
        ChannelPoolLow = 0x52,
        /// The host posted buffers to the pool of channel `id` that it may not post.
        ChannelBadBuffers = 0x53,
        /// Somebody changed the device from outside, by its management: `id` is what was done, see
        /// [`Management`].
        ManagementAction = 0x70,
    }
}

numbers! {
    /// What was done by the device's management: `id` of [`EventCode::ManagementAction`].
    pub enum Management: u32 {
        /// The cable was pulled or plugged in.
        Cable = 1,
        /// Faults were set or cleared, for tests.
        Faults = 2,
    }
}

layout! {
    /// An entry of an event queue. The device writes `code` and `id` last, together; a zero code
    /// is an empty entry. The driver zeroes `code` when it has consumed the entry.
    pub struct EventEntry: 32 {
        /// See [`EventCode`].
        0 => code: u32,
        /// Number of what the event is about.
        4 => id: u32,
        /// By code.
        8 => param0: u64,
        /// By code.
        16 => param1: u64,
        /// Zero.
        24 => reserved: u64,
    }
}
