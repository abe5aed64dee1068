// SPDX-License-Identifier: GPL-2.0

//! The transmit ring of a channel.
//!
//! A frame is a request of a few blocks: where its pieces are, and what the device is to do to it. Indices count blocks
//! and never stop counting. What is between `done` and `producer` is the device's; it says in the record how far it is,
//! which is believed as far as it makes sense.

use super::memory::{
    ChannelMemory,
    RecordWord, //
};
use crate::{
    abi,
    abi::{
        Plain,
        TransmitHeader,
        TransmitPiece,
        TRANSMIT_CHECKSUM,
        TRANSMIT_SEGMENT,
        TRANSMIT_VLAN, //
    },
    dma_types::Block,
    hardware::Hardware,
    kernel_ext::barrier::{
        dma_rmb,
        dma_wmb,
        mb, //
    },
    lent::Lent,
    net::{
        DropReason,
        EthernetHeader,
        Piece,
        SentFrames,
        Skb,
        MOST_PIECES, //
    },
};
use kernel::{
    device::{
        Bound,
        Device, //
    },
    prelude::*,
    sync::Arc, //
};

/// Blocks of the longest request.
pub(super) const MOST_BLOCKS: u32 = abi::transmit_blocks(MOST_PIECES as u8);
const _: () = assert!(MOST_PIECES == abi::TRANSMIT_MAX_PIECES);

/// Units of a block: header or piece.
const UNITS: usize = abi::BLOCK_SIZE / size_of::<TransmitPiece>();
const UNIT_WORDS: usize = size_of::<TransmitPiece>() / size_of::<u32>();

/// What the device is to do to a frame.
pub(super) fn header(
    pieces: usize,
    checksum: Option<(u16, u16)>,
    segment_size: Option<u16>,
    vlan: Option<u16>,
) -> TransmitHeader {
    let mut header = TransmitHeader {
        pieces: pieces as u8,
        ..TransmitHeader::zeroed()
    };
    if let Some((start, offset)) = checksum {
        header.flags |= TRANSMIT_CHECKSUM;
        header.checksum_start = start;
        header.checksum_offset = offset;
    }
    if let Some(size) = segment_size {
        header.flags |= TRANSMIT_SEGMENT;
        header.segment_size = size;
    }
    if let Some(vlan) = vlan {
        header.flags |= TRANSMIT_VLAN;
        header.vlan = vlan;
    }
    header
}

fn unit(bytes: &[u8]) -> [u32; UNIT_WORDS] {
    let mut words = [0; UNIT_WORDS];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(size_of::<u32>())) {
        *word = bytes
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u32::from(*byte));
    }
    words
}

/// The blocks of a request, in order.
pub(super) fn blocks<'a>(
    header: &'a TransmitHeader,
    pieces: &'a [Piece],
) -> impl Iterator<Item = Block> + 'a {
    let count = abi::transmit_blocks(pieces.len() as u8) as usize;
    (0..count).map(move |number| {
        let mut block = Block::ZERO;
        let units = block.words.chunks_exact_mut(UNIT_WORDS);
        for (at, place) in units.enumerate() {
            let words = match (number * UNITS + at).checked_sub(1) {
                None => unit(header.as_bytes()),
                Some(piece) => match pieces.get(piece) {
                    Some(piece) => unit(
                        TransmitPiece {
                            address: piece.address,
                            length: piece.length,
                            reserved: 0,
                        }
                        .as_bytes(),
                    ),
                    None => [0; UNIT_WORDS],
                },
            };
            place.copy_from_slice(&words);
        }
        block
    })
}

/// How far a device can be that said `consumer`, which had said `done` and was given what is before `producer`; nothing
/// where that makes no sense.
pub(super) fn believable(done: u32, consumer: u32, producer: u32) -> Option<u32> {
    (consumer.wrapping_sub(done) <= producer.wrapping_sub(done)).then_some(consumer)
}

/// The block whose end is to be told of where requests up to `done` are done and those before `published` were posted.
pub(super) fn arm_at(done: u32, published: u32) -> u32 {
    if done == published {
        published
    } else {
        published.wrapping_sub(1)
    }
}

/// Whether a device that is at `consumer`, and was at `done`, has done block `arm`.
pub(super) fn is_beyond(consumer: u32, arm: u32, done: u32) -> bool {
    abi::is_due(arm, done, consumer)
}

/// Why a frame was not posted.
pub(super) enum Refused {
    /// There is no room, now.
    Full(Skb),
    /// It cannot be sent.
    Bad(Skb, DropReason),
}

/// The transmit ring of a channel that is open.
pub(super) struct Transmitter {
    hw: Arc<Hardware>,
    memory: Arc<ChannelMemory>,
    /// By the first block of their request.
    sent: Lent<SentFrames>,
    /// Blocks of the request that begins with each, zero where none does.
    lengths: KVVec<u8>,
    channel: u16,
    most_pieces: usize,
    /// Blocks written, and those of them that the device was told of.
    producer: u32,
    published: u32,
    /// Blocks whose requests are done.
    done: u32,
    /// The device has said what cannot be: nothing is sent any more.
    broken: bool,
    /// That, until it was told of.
    said: Option<u32>,
}

/// A device has said what cannot be.
pub(super) struct Impossible {
    hw: Arc<Hardware>,
    channel: u16,
    said: u32,
}

impl Impossible {
    /// Says so, and gives the device up. Not with the lock of the transmit side held.
    #[cold]
    pub(super) fn tell(self) {
        dev_err!(
            self.hw.pdev,
            "channel {}: block {} is done before it was posted\n",
            self.channel,
            self.said
        );
        self.hw.fail();
    }
}

/// Free blocks at which a ring of so many is sent by again that was full.
const fn wake_at(size: u32) -> u32 {
    let quarter = size / 4;
    if quarter > MOST_BLOCKS {
        quarter
    } else {
        MOST_BLOCKS
    }
}

impl Transmitter {
    pub(super) fn new(
        dev: &Device<Bound>,
        hw: &Arc<Hardware>,
        memory: &Arc<ChannelMemory>,
        channel: u16,
        most_pieces: usize,
    ) -> Result<Self> {
        let blocks = 1usize << memory.layout().transmit_log_blocks;
        let mut lengths = KVVec::with_capacity(blocks, GFP_KERNEL)?;
        for _ in 0..blocks {
            lengths.push(0, GFP_KERNEL)?;
        }
        Ok(Self {
            hw: hw.clone(),
            memory: memory.clone(),
            sent: Lent::new(&hw.reach, SentFrames::new(dev, blocks)?),
            lengths,
            channel,
            most_pieces,
            producer: 0,
            published: 0,
            done: 0,
            broken: false,
            said: None,
        })
    }

    fn size(&self) -> u32 {
        1 << self.memory.layout().transmit_log_blocks
    }

    fn slot(&self, index: u32) -> usize {
        (index & (self.size() - 1)) as usize
    }

    /// Blocks that are free.
    pub(super) fn room(&self) -> u32 {
        self.size() - self.producer.wrapping_sub(self.done)
    }

    /// Whether there is room for any frame.
    pub(super) fn has_room(&self) -> bool {
        self.room() >= MOST_BLOCKS
    }

    /// Whether there is room for many.
    pub(super) fn has_much_room(&self) -> bool {
        self.room() >= wake_at(self.size())
    }

    /// Puts a frame in the ring. The device is told by [`Self::publish`].
    pub(super) fn post(&mut self, skb: Skb) -> Result<(), Refused> {
        if skb.len() < EthernetHeader::SIZE {
            return Err(Refused::Bad(skb, DropReason::BadHeader));
        }
        if self.broken || self.hw.is_dead() {
            return Err(Refused::Bad(skb, DropReason::NotReady));
        }
        if !self.has_room() {
            return Err(Refused::Full(skb));
        }
        let (checksum, size, vlan) = (skb.checksum_to_finish(), skb.segment_size(), skb.vlan());
        let slot = self.slot(self.producer);
        let pieces = match self.sent.put(slot, skb, self.most_pieces) {
            Ok(pieces) => pieces,
            // There is no memory to put it in one piece, or no room to map it.
            Err(skb) => return Err(Refused::Bad(skb, DropReason::NoMemory)),
        };
        let header = header(pieces.len(), checksum, size, vlan);
        let mut count = 0;
        for block in blocks(&header, pieces) {
            self.memory
                .put_block(self.producer.wrapping_add(count), block);
            count += 1;
        }
        if let Some(length) = self.lengths.get_mut(slot) {
            *length = count as u8;
        }
        self.producer = self.producer.wrapping_add(count);
        Ok(())
    }

    /// Tells the device of what was posted.
    pub(super) fn publish(&mut self) {
        if self.published == self.producer {
            return;
        }
        self.published = self.producer;
        // Blocks before the index that says that they are there.
        dma_wmb();
        self.memory
            .store(RecordWord::TRANSMIT_PRODUCER, self.producer);
        // The index before the look whether the device has gone to sleep, which looks for it after saying so.
        mb();
        if self.memory.load(RecordWord::TRANSMIT_WAKE) != 0 {
            self.hw.doorbells.channel(self.channel);
        }
    }

    /// How far the device says that it is. Where that cannot be it is [to be told of](Self::impossible).
    fn consumer(&mut self) -> u32 {
        let said = self.memory.load(RecordWord::TRANSMIT_CONSUMER);
        match believable(self.done, said, self.published) {
            Some(consumer) => consumer,
            None => {
                if !core::mem::replace(&mut self.broken, true) {
                    self.said = Some(said);
                }
                self.done
            }
        }
    }

    /// What the device has said that cannot be, once: to be told of.
    pub(super) fn impossible(&mut self) -> Option<Impossible> {
        self.said.take().map(|said| Impossible {
            hw: self.hw.clone(),
            channel: self.channel,
            said,
        })
    }

    /// Takes frames out that were sent, as many as there is room for in `frames`; returns how many.
    pub(super) fn reclaim(&mut self, frames: &mut [Option<Skb>]) -> usize {
        let consumer = self.consumer();
        // What the device has said it has done it has done: frames are freed after that.
        dma_rmb();
        let mut taken = 0;
        while taken < frames.len() && self.done != consumer {
            let slot = self.slot(self.done);
            let Some(length) = self.lengths.get_mut(slot) else {
                break;
            };
            let blocks = u32::from(*length);
            if blocks == 0 || blocks > consumer.wrapping_sub(self.done) {
                // Requests are done as a whole.
                break;
            }
            *length = 0;
            self.done = self.done.wrapping_add(blocks);
            if let Some(skb) = self.sent.take(slot) {
                frames[taken] = Some(skb);
                taken += 1;
            }
        }
        taken
    }

    /// Has the device tell when what was posted is done, or where all is, the next that is posted. Whether that was so
    /// before it could know: then it may not tell.
    pub(super) fn arm(&mut self) -> bool {
        let arm = arm_at(self.done, self.published);
        self.memory.store(RecordWord::TRANSMIT_ARM, arm);
        // The arming before the look: the device looks at it after it has said how far it is.
        mb();
        is_beyond(self.consumer(), arm, self.done)
    }
}

#[kunit_tests(ferrite_transmit)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_is_sent_by_again_has_room_for_any_frame() {
        for log in super::super::LEAST_TRANSMIT_LOG_BLOCKS..=abi::TRANSMIT_MAX_LOG_BLOCKS {
            let size = 1 << log;
            assert!(wake_at(size) >= MOST_BLOCKS && wake_at(size) < size);
        }
        assert_eq!((wake_at(16), wake_at(512)), (MOST_BLOCKS, 128));
    }

    fn pieces(count: usize) -> [Piece; MOST_PIECES] {
        let mut pieces = [Piece::default(); MOST_PIECES];
        for (number, piece) in pieces.iter_mut().take(count).enumerate() {
            piece.address = 0x1_2345_6000 + number as u64;
            piece.length = 100 + number as u32;
        }
        pieces
    }

    #[test]
    fn a_request_has_its_pieces_behind_its_header() {
        for count in 1..=MOST_PIECES {
            let all = pieces(count);
            let given = &all[..count];
            let header = header(count, None, None, None);
            let mut number = 0;
            for block in blocks(&header, given) {
                for unit in block.words.chunks_exact(UNIT_WORDS) {
                    let expected = match number {
                        0 => [count as u32, 0, 0, 0],
                        at if at <= count => {
                            let piece = given[at - 1];
                            [piece.address as u32, 1, piece.length, 0]
                        }
                        _ => [0; 4],
                    };
                    assert_eq!(unit, expected);
                    number += 1;
                }
            }
            assert_eq!(number, 4 * abi::transmit_blocks(count as u8) as usize);
            assert!(number > count);
        }
    }

    #[test]
    fn a_field_is_set_with_its_flag_and_not_else() {
        let plain = header(2, None, None, None);
        assert!(
            plain
                == TransmitHeader {
                    pieces: 2,
                    ..TransmitHeader::zeroed()
                }
        );
        let all = header(3, Some((34, 16)), Some(1448), Some(0x2007));
        assert_eq!(
            all.flags,
            TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT | TRANSMIT_VLAN
        );
        assert_eq!((all.checksum_start, all.checksum_offset), (34, 16));
        assert_eq!((all.segment_size, all.vlan), (1448, 0x2007));
        // A tag of VLAN 0 is one.
        assert_eq!(header(1, None, None, Some(0)).flags, TRANSMIT_VLAN);
    }

    #[test]
    fn the_last_that_was_posted_is_waited_for_or_the_next() {
        for base in [0, 9, u32::MAX - 2, u32::MAX] {
            let at = |ahead: u32| base.wrapping_add(ahead);
            assert_eq!(arm_at(base, base), base);
            assert_eq!(arm_at(base, at(5)), at(4));
            // It is done when the device is behind it.
            assert!(is_beyond(at(5), at(4), base));
            for consumer in 0..=4 {
                assert!(!is_beyond(at(consumer), at(4), base));
            }
            assert!(!is_beyond(base, base, base));
        }
    }

    #[test]
    fn an_index_is_believed_only_between_what_is_done_and_what_was_posted() {
        for base in [0, 7, u32::MAX - 3, u32::MAX] {
            let at = |ahead: u32| base.wrapping_add(ahead);
            for ahead in 0..=10 {
                assert_eq!(believable(base, at(ahead), at(10)), Some(at(ahead)));
            }
            for said in [at(11), base.wrapping_sub(1), at(1 << 31)] {
                assert_eq!(believable(base, said, at(10)), None);
            }
            assert_eq!(believable(base, base, base), Some(base));
            assert_eq!(believable(base, at(1), base), None);
        }
    }
}
