// SPDX-License-Identifier: GPL-2.0

//! Work requests of kernel consumers, as the device reads them.

use crate::{
    abi,
    abi::{
        AtomicPart,
        DatagramPart,
        FastRegisterPart,
        Plain,
        ReceiveHeader,
        RemotePart,
        SendHeader,
        SendOpcode,
        SendPart,
        Sge,
        BLOCK_SIZE,
        MAX_BLOCKS, //
    },
    ah::FerriteAh,
    device::Ferrite,
    dma_types::Block,
    extension,
    mr::FerriteMr,
    rdma::{
        PostedOp,
        SendFlags,
        SendOp,
        SendWr,
        WcOpcode, //
    },
};
use kernel::prelude::*;

/// A work request of a send queue while it is put together.
pub(crate) struct SendWqe {
    bytes: [u8; MAX_BLOCKS * BLOCK_SIZE],
    header: SendHeader,
    length: usize,
}

impl SendWqe {
    fn with_part(opcode: SendOpcode, flags: u16, part: &impl Plain) -> Self {
        let mut wqe = Self {
            bytes: [0; MAX_BLOCKS * BLOCK_SIZE],
            header: SendHeader {
                opcode: opcode.number(),
                flags,
                ..SendHeader::zeroed()
            },
            length: core::mem::size_of::<SendHeader>(),
        };
        wqe.append(part.as_bytes());
        wqe
    }

    /// A message, with immediate data or zero.
    pub(crate) fn send(opcode: SendOpcode, flags: u16, immediate: u32) -> Self {
        let part = SendPart {
            immediate: immediate.into(),
            ..SendPart::zeroed()
        };
        Self::with_part(opcode, flags, &part)
    }

    /// An invalidation of a tag, here or with a message at the peer.
    pub(crate) fn invalidate(opcode: SendOpcode, flags: u16, tag: u32) -> Self {
        let part = SendPart {
            tag,
            ..SendPart::zeroed()
        };
        Self::with_part(opcode, flags, &part)
    }

    /// A datagram.
    pub(crate) fn datagram(opcode: SendOpcode, flags: u16, part: &DatagramPart) -> Self {
        Self::with_part(opcode, flags, part)
    }

    /// A read or write of the peer's memory, with immediate data or zero.
    pub(crate) fn remote(
        opcode: SendOpcode,
        flags: u16,
        immediate: u32,
        address: u64,
        rkey: u32,
    ) -> Self {
        let part = RemotePart {
            address,
            rkey,
            immediate: immediate.into(),
            ..RemotePart::zeroed()
        };
        Self::with_part(opcode, flags, &part)
    }

    /// An atomic operation.
    pub(crate) fn atomic(opcode: SendOpcode, flags: u16, part: &AtomicPart) -> Self {
        Self::with_part(opcode, flags, part)
    }

    /// A registration.
    pub(crate) fn register(flags: u16, part: &FastRegisterPart) -> Self {
        Self::with_part(SendOpcode::FastRegister, flags, part)
    }

    /// A registration, then a message that invalidates a tag of the peer, if one is given.
    pub(crate) fn register_send(
        flags: u16,
        part: &FastRegisterPart,
        invalidate: Option<u32>,
    ) -> Self {
        let message = SendPart {
            tag: invalidate.unwrap_or(0),
            ..SendPart::zeroed()
        };
        let mut wqe = Self::with_part(SendOpcode::RegisterSend, flags, part);
        wqe.append(message.as_bytes());
        wqe
    }

    /// Where the next bytes go.
    fn room(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.length..).unwrap_or_default()
    }

    /// Appends bytes; returns whether there was room.
    fn append(&mut self, bytes: &[u8]) -> bool {
        let Some(room) = self.room().get_mut(..bytes.len()) else {
            return false;
        };
        room.copy_from_slice(bytes);
        self.length += bytes.len();
        true
    }

    /// Adds a scatter/gather entry.
    pub(crate) fn push_sge(&mut self, sge: &Sge) -> Result {
        if usize::from(self.header.sge_count) == abi::MAX_SGE || !self.append(sge.as_bytes()) {
            return Err(EINVAL);
        }
        self.header.sge_count += 1;
        Ok(())
    }

    /// Makes the data part of the request; `copy` copies them and returns how many bytes.
    pub(crate) fn set_inline(&mut self, copy: impl FnOnce(&mut [u8]) -> Result<usize>) -> Result {
        let room = self.room();
        let most = room.len().min(abi::MAX_INLINE);
        let length = copy(room.get_mut(..most).ok_or(EINVAL)?)?;
        self.header.flags |= abi::SEND_INLINE;
        self.header.inline_length = u16::try_from(length)?;
        self.length += length;
        Ok(())
    }

    /// How many blocks the request takes.
    pub(crate) fn blocks(&self) -> usize {
        self.length.div_ceil(BLOCK_SIZE)
    }

    /// Gives each block to `put`, with its index.
    pub(crate) fn write(mut self, mut put: impl FnMut(usize, Block) -> Result) -> Result {
        let blocks = self.blocks();
        self.header.blocks = blocks as u8;
        let header = self.header;
        let header = header.as_bytes();
        self.bytes[..header.len()].copy_from_slice(header);
        for (index, bytes) in self.bytes.chunks_exact(BLOCK_SIZE).take(blocks).enumerate() {
            put(index, block(bytes))?;
        }
        Ok(())
    }
}

/// The block with these contents.
fn block(bytes: &[u8]) -> Block {
    let mut block = Block::ZERO;
    for (word, bytes) in block.words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    block
}

/// The device's form of a consumer's scatter/gather entry.
pub(crate) fn device_sge(sge: &crate::rdma::Sge) -> Sge {
    Sge {
        address: sge.addr(),
        length: sge.length(),
        lkey: sge.lkey(),
    }
}

/// Gives each block of a receive entry to `put`, with its index. `id` is for entries of shared
/// receive queues.
pub(crate) fn write_receive(
    id: u32,
    sges: impl ExactSizeIterator<Item = Sge>,
    mut put: impl FnMut(usize, Block) -> Result,
) -> Result {
    const BYTES: usize = 1 << abi::RQ_MAX_LOG_STRIDE;
    let header = ReceiveHeader {
        sge_count: sges.len() as u32,
        id,
        reserved: [0; 2],
    };
    let mut bytes = [0; BYTES];
    let mut length = core::mem::size_of::<ReceiveHeader>();
    bytes[..length].copy_from_slice(header.as_bytes());
    for sge in sges {
        let sge = sge.as_bytes();
        let room = bytes.get_mut(length..length + sge.len()).ok_or(EINVAL)?;
        room.copy_from_slice(sge);
        length += sge.len();
    }
    let used = length.div_ceil(BLOCK_SIZE);
    for (index, bytes) in bytes.chunks_exact(BLOCK_SIZE).take(used).enumerate() {
        put(index, block(bytes))?;
    }
    Ok(())
}

/// What a send queue was made for, as far as its work requests depend on it.
pub(crate) struct SendTerms {
    /// All of them have completions.
    pub(crate) signal_all: bool,
    /// There is room for registrations with messages.
    pub(crate) register_send: bool,
    /// Of the device, as agreed on.
    pub(crate) features: u64,
}

/// The device's form of a send work request, and how its completion is called.
pub(crate) fn build_send(
    wr: &SendWr<'_, Ferrite>,
    terms: &SendTerms,
) -> Result<(SendWqe, WcOpcode)> {
    let asked = wr.flags();
    let mut flags = 0;
    if terms.signal_all || asked.contains(SendFlags::SIGNALED) {
        flags |= abi::SEND_SIGNALED;
    }
    if asked.contains(SendFlags::SOLICITED) {
        flags |= abi::SEND_SOLICITED;
    }
    if asked.contains(SendFlags::FENCE) {
        flags |= abi::SEND_FENCE;
    }
    if let Some(to) = wr.ud() {
        let (opcode, immediate) = match wr.op()? {
            SendOp::Send => (SendOpcode::Send, 0),
            SendOp::SendWithImm(immediate) => (SendOpcode::SendImmediate, immediate.to_be()),
            _ => return Err(EINVAL),
        };
        let part = FerriteAh::part(&to, immediate)?;
        let mut request = SendWqe::datagram(opcode, flags, &part);
        add_data(&mut request, wr)?;
        return Ok((request, WcOpcode::Send));
    }
    let op = wr.op()?;
    if !is_agreed_on(&op, terms.features) {
        return Err(EINVAL);
    }
    let (mut request, opcode) = match op {
        SendOp::Send => (SendWqe::send(SendOpcode::Send, flags, 0), WcOpcode::Send),
        SendOp::SendWithImm(immediate) => (
            SendWqe::send(SendOpcode::SendImmediate, flags, immediate.to_be()),
            WcOpcode::Send,
        ),
        SendOp::SendWithInvalidate(tag) => (
            SendWqe::invalidate(SendOpcode::SendInvalidate, flags, tag),
            WcOpcode::Send,
        ),
        SendOp::RdmaWrite(to) => (
            SendWqe::remote(SendOpcode::Write, flags, 0, to.addr, to.rkey),
            WcOpcode::RdmaWrite,
        ),
        SendOp::RdmaWriteWithImm(to, immediate) => (
            SendWqe::remote(
                SendOpcode::WriteImmediate,
                flags,
                immediate.to_be(),
                to.addr,
                to.rkey,
            ),
            WcOpcode::RdmaWrite,
        ),
        SendOp::RdmaRead(from) => (
            SendWqe::remote(SendOpcode::Read, flags, 0, from.addr, from.rkey),
            WcOpcode::RdmaRead,
        ),
        SendOp::CompareSwap {
            remote,
            compare,
            swap,
        } => {
            let part = AtomicPart {
                address: remote.addr,
                rkey: remote.rkey,
                reserved: 0,
                operand: swap,
                compare,
            };
            (
                SendWqe::atomic(SendOpcode::CompareSwap, flags, &part),
                WcOpcode::CompareSwap,
            )
        }
        SendOp::FetchAdd { remote, add } => {
            let part = AtomicPart {
                address: remote.addr,
                rkey: remote.rkey,
                reserved: 0,
                operand: add,
                compare: 0,
            };
            (
                SendWqe::atomic(SendOpcode::FetchAdd, flags, &part),
                WcOpcode::FetchAdd,
            )
        }
        SendOp::LocalInvalidate(tag) => {
            let request = SendWqe::invalidate(SendOpcode::LocalInvalidate, flags, tag);
            return Ok((request, WcOpcode::LocalInvalidate));
        }
        SendOp::RegMr(registration) => {
            let part = FerriteMr::register_part(&registration)?;
            return Ok((SendWqe::register(flags, &part), WcOpcode::RegMr));
        }
        SendOp::Driver {
            opcode: extension::REGISTER_SEND_OPCODE,
            registration,
            ex,
        } if terms.register_send => {
            let part = FerriteMr::register_part(&registration)?;
            let invalidate = extension::invalidated_by(ex);
            let request = SendWqe::register_send(flags, &part, invalidate);
            (request, WcOpcode::Send)
        }
        SendOp::Driver { .. } => return Err(EINVAL),
    };
    add_data(&mut request, wr)?;
    Ok((request, opcode))
}

/// Whether the device has what an operation needs. One that it does not know would end the queue pair.
fn is_agreed_on(op: &PostedOp<'_, Ferrite>, features: u64) -> bool {
    // Any of these will do.
    let needed = match op {
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => abi::FEATURE_ATOMICS,
        // The peer may have a list.
        SendOp::SendWithInvalidate(_) => {
            abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS | abi::FEATURE_LISTS
        }
        // The kernel has none, nor queue pairs that are made for them.
        SendOp::LocalInvalidate(_) => abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS,
        SendOp::Driver { .. } => abi::FEATURE_REGISTER_SEND,
        // Without the feature there are no regions to register.
        SendOp::RegMr(_) => return true,
        SendOp::Send
        | SendOp::SendWithImm(_)
        | SendOp::RdmaWrite(_)
        | SendOp::RdmaWriteWithImm(..)
        | SendOp::RdmaRead(_) => return true,
    };
    features & needed != 0
}

/// Adds the data of a work request, or where they are.
fn add_data(request: &mut SendWqe, wr: &SendWr<'_, Ferrite>) -> Result {
    if wr.flags().contains(SendFlags::INLINE) {
        return request.set_inline(|room| wr.copy_inline(room));
    }
    for sge in wr.sges() {
        request.push_sge(&device_sge(sge))?;
    }
    Ok(())
}

#[kunit_tests(ferrite_wqe)]
mod tests {
    use super::*;
    use crate::{
        abi::{
            blocks_per_registering_request,
            blocks_per_request,
            Reserved, //
        },
        rdma::Remote,
    };

    /// What the device sees.
    fn bytes_of(wqe: SendWqe) -> Result<KVec<u8>> {
        let mut bytes = KVec::new();
        wqe.write(|index, block| {
            assert_eq!(index * BLOCK_SIZE, bytes.len());
            for word in block.words {
                bytes.extend_from_slice(&word.to_le_bytes(), GFP_KERNEL)?;
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    fn sge(number: u32) -> Sge {
        Sge {
            address: 0x1000 + u64::from(number),
            length: number,
            lkey: 7,
        }
    }

    #[test]
    fn a_send_is_header_part_and_entries() -> Result {
        let mut wqe = SendWqe::send(SendOpcode::SendImmediate, abi::SEND_SIGNALED, 0x8403_0201);
        wqe.push_sge(&sge(1))?;
        wqe.push_sge(&sge(2))?;
        let bytes = bytes_of(wqe)?;
        assert_eq!(bytes.len(), BLOCK_SIZE);
        let header = SendHeader::from_prefix(&bytes).ok_or(EINVAL)?;
        assert_eq!(header.opcode, SendOpcode::SendImmediate.number());
        assert_eq!(header.flags, abi::SEND_SIGNALED);
        assert_eq!(header.blocks, 1);
        assert_eq!(header.sge_count, 2);
        assert!(header.reserved_is_zero() && header.srqn == 0);
        let part = SendPart::from_prefix(&bytes[16..]).ok_or(EINVAL)?;
        // Four bytes in the lower half.
        assert_eq!(
            (part.immediate, part.tag, part.reserved),
            (0x8403_0201, 0, 0)
        );
        assert_eq!(Sge::from_prefix(&bytes[32..]), Some(sge(1)));
        assert_eq!(Sge::from_prefix(&bytes[48..]), Some(sge(2)));
        Ok(())
    }

    #[test]
    fn entries_run_on_in_the_next_block() -> Result {
        let mut wqe = SendWqe::remote(SendOpcode::WriteImmediate, 0, u32::MAX, 0xaabb, 9);
        for number in 0..3 {
            wqe.push_sge(&sge(number))?;
        }
        assert_eq!(wqe.blocks(), 2);
        let bytes = bytes_of(wqe)?;
        let remote = RemotePart::from_prefix(&bytes[16..]).ok_or(EINVAL)?;
        assert_eq!((remote.address, remote.rkey), (0xaabb, 9));
        assert_eq!(remote.immediate, u32::MAX.into());
        assert!(remote.reserved_is_zero());
        assert_eq!(Sge::from_prefix(&bytes[64..]), Some(sge(1)));
        assert_eq!(Sge::from_prefix(&bytes[80..]), Some(sge(2)));
        Ok(())
    }

    #[test]
    fn the_tag_to_invalidate_has_a_place_of_its_own() -> Result {
        for opcode in [SendOpcode::SendInvalidate, SendOpcode::LocalInvalidate] {
            let bytes = bytes_of(SendWqe::invalidate(opcode, 0, 0x1234))?;
            let part = SendPart::from_prefix(&bytes[16..]).ok_or(EINVAL)?;
            assert_eq!((part.tag, part.immediate), (0x1234, 0));
        }
        Ok(())
    }

    #[test]
    fn the_largest_request_fits_and_no_larger_one() -> Result {
        let mut wqe = SendWqe::remote(SendOpcode::Read, 0, 0, 0, 0);
        for number in 0..abi::MAX_SGE as u32 {
            wqe.push_sge(&sge(number))?;
        }
        assert!(wqe.push_sge(&sge(0)).is_err());
        assert!(wqe.blocks() <= MAX_BLOCKS);
        assert_eq!(wqe.blocks(), blocks_per_request(false, abi::MAX_SGE, 0));
        Ok(())
    }

    #[test]
    fn inline_data_follow_the_part() -> Result {
        let mut wqe = SendWqe::send(SendOpcode::Send, 0, 0);
        wqe.set_inline(|room| {
            assert!(room.len() <= abi::MAX_INLINE);
            room[..40].fill(0x5a);
            Ok(40)
        })?;
        let bytes = bytes_of(wqe)?;
        let header = SendHeader::from_prefix(&bytes).ok_or(EINVAL)?;
        assert_eq!(header.flags, abi::SEND_INLINE);
        assert_eq!(
            (header.inline_length, header.sge_count, header.blocks),
            (40, 0, 2)
        );
        assert!(bytes[32..72].iter().all(|byte| *byte == 0x5a));
        assert!(bytes[72..].iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn a_datagram_says_where_it_goes_before_its_entries() -> Result {
        let mut part = DatagramPart::zeroed();
        part.address_vector.mac = [2, 0, 0, 0, 0, 9];
        part.address_vector.source_gid_index = 3;
        part.qpn = 0x1234;
        part.qkey = 0x8001_0000;
        part.immediate = 0x1122_3344;
        let mut wqe = SendWqe::datagram(SendOpcode::SendImmediate, abi::SEND_SIGNALED, &part);
        wqe.push_sge(&sge(1))?;
        wqe.push_sge(&sge(2))?;
        assert_eq!(wqe.blocks(), blocks_per_request(true, 2, 0));
        let bytes = bytes_of(wqe)?;
        let header = SendHeader::from_prefix(&bytes).ok_or(EINVAL)?;
        assert_eq!((header.blocks, header.sge_count), (2, 2));
        assert_eq!(DatagramPart::from_prefix(&bytes[16..]), Some(part));
        assert_eq!(Sge::from_prefix(&bytes[80..]), Some(sge(1)));
        assert_eq!(Sge::from_prefix(&bytes[96..]), Some(sge(2)));
        Ok(())
    }

    #[test]
    fn the_largest_datagram_fits() -> Result {
        let part = DatagramPart::zeroed();
        let mut wqe = SendWqe::datagram(SendOpcode::Send, 0, &part);
        for number in 0..abi::MAX_SGE as u32 {
            wqe.push_sge(&sge(number))?;
        }
        assert_eq!(wqe.blocks(), MAX_BLOCKS);
        assert_eq!(blocks_per_request(true, abi::MAX_SGE, 0), MAX_BLOCKS);
        Ok(())
    }

    #[test]
    fn every_request_takes_no_more_blocks_than_are_reckoned_for_it() -> Result {
        for sges in 0..=abi::MAX_SGE {
            for inline in [0, 1, 32, 33, 96, 97, abi::MAX_INLINE] {
                let most = blocks_per_request(false, sges, inline);
                let remote = SendWqe::remote(SendOpcode::Read, 0, 0, 0, 0);
                let atomic = SendWqe::atomic(SendOpcode::FetchAdd, 0, &AtomicPart::zeroed());
                for mut wqe in [SendWqe::send(SendOpcode::Send, 0, 0), remote, atomic] {
                    for number in 0..sges as u32 {
                        wqe.push_sge(&sge(number))?;
                    }
                    assert!(wqe.blocks() <= most);
                }
                let remote = SendWqe::remote(SendOpcode::Write, 0, 0, 0, 0);
                for mut wqe in [SendWqe::send(SendOpcode::Send, 0, 0), remote] {
                    wqe.set_inline(|_| Ok(inline))?;
                    assert!(wqe.blocks() <= most);
                }
                assert!(SendWqe::register(0, &FastRegisterPart::zeroed()).blocks() <= most);
                let most = blocks_per_request(true, sges, inline);
                let mut wqe = SendWqe::datagram(SendOpcode::Send, 0, &DatagramPart::zeroed());
                for number in 0..sges as u32 {
                    wqe.push_sge(&sge(number))?;
                }
                assert!(wqe.blocks() <= most);
            }
        }
        Ok(())
    }

    #[test]
    fn a_registration_fills_one_block() -> Result {
        let part = FastRegisterPart {
            tag: 0x123,
            ..FastRegisterPart::zeroed()
        };
        let bytes = bytes_of(SendWqe::register(0, &part))?;
        assert_eq!(bytes.len(), BLOCK_SIZE);
        assert_eq!(FastRegisterPart::from_prefix(&bytes[16..]), Some(part));
        Ok(())
    }

    #[test]
    fn a_registration_with_a_message_has_both_parts_and_then_entries() -> Result {
        let part = FastRegisterPart {
            tag: 0x1234_5601,
            access: abi::ACCESS_REMOTE_READ,
            address: 0xaabb,
            ..FastRegisterPart::zeroed()
        };
        for (invalidate, tag) in [(None, 0), (Some(0x77), 0x77)] {
            let mut wqe = SendWqe::register_send(abi::SEND_SIGNALED, &part, invalidate);
            wqe.push_sge(&sge(1))?;
            wqe.push_sge(&sge(2))?;
            assert_eq!(wqe.blocks(), 2);
            let bytes = bytes_of(wqe)?;
            let header = SendHeader::from_prefix(&bytes).ok_or(EINVAL)?;
            assert_eq!(header.opcode, SendOpcode::RegisterSend.number());
            assert_eq!(header.flags, abi::SEND_SIGNALED);
            assert_eq!((header.blocks, header.sge_count), (2, 2));
            assert!(header.reserved_is_zero() && header.srqn == 0);
            assert_eq!(FastRegisterPart::from_prefix(&bytes[16..]), Some(part));
            let message = SendPart::from_prefix(&bytes[64..]).ok_or(EINVAL)?;
            assert_eq!(
                (message.tag, message.immediate, message.reserved),
                (tag, 0, 0)
            );
            assert_eq!(Sge::from_prefix(&bytes[80..]), Some(sge(1)));
            assert_eq!(Sge::from_prefix(&bytes[96..]), Some(sge(2)));
            assert!(bytes[112..].iter().all(|byte| *byte == 0));
        }
        Ok(())
    }

    #[test]
    fn a_registration_with_a_message_fits_where_it_was_reckoned_with_and_only_there() -> Result {
        let part = FastRegisterPart::zeroed();
        for sges in 0..=abi::MAX_SGE {
            for inline in [0, 1, 48, 49, 176, 177, abi::MAX_INLINE] {
                let most = blocks_per_registering_request(sges, inline);
                assert!((blocks_per_request(false, sges, inline)..=MAX_BLOCKS).contains(&most));
                // As many of them are offered as of the largest datagrams.
                assert!(most <= blocks_per_request(true, sges, inline));
                let mut wqe = SendWqe::register_send(0, &part, None);
                for number in 0..sges as u32 {
                    wqe.push_sge(&sge(number))?;
                }
                assert!(wqe.blocks() <= most);
                let mut wqe = SendWqe::register_send(0, &part, None);
                wqe.set_inline(|room| {
                    assert_eq!(room.len(), abi::MAX_INLINE);
                    Ok(inline)
                })?;
                assert!(wqe.blocks() <= most);
            }
        }
        // A queue pair that did not ask for them has no room.
        let mut wqe = SendWqe::register_send(0, &part, None);
        wqe.push_sge(&sge(1))?;
        assert!(wqe.blocks() > blocks_per_request(false, 1, 0));
        Ok(())
    }

    #[test]
    fn a_receive_is_header_and_entries() -> Result {
        let mut bytes = KVec::new();
        write_receive(
            0,
            [sge(1), sge(2), sge(3), sge(4)].into_iter(),
            |_, block| {
                for word in block.words {
                    bytes.extend_from_slice(&word.to_le_bytes(), GFP_KERNEL)?;
                }
                Ok(())
            },
        )?;
        assert_eq!(bytes.len(), 2 * BLOCK_SIZE);
        let header = ReceiveHeader::from_prefix(&bytes).ok_or(EINVAL)?;
        assert_eq!(header.sge_count, 4);
        assert_eq!(Sge::from_prefix(&bytes[64..]), Some(sge(4)));
        Ok(())
    }

    #[test]
    fn operations_that_the_device_does_not_have_are_not_posted() {
        let remote = Remote { addr: 0, rkey: 0 };
        let (compare, swap, add) = (0, 0, 0);
        let atomics = [
            SendOp::CompareSwap {
                remote,
                compare,
                swap,
            },
            SendOp::FetchAdd { remote, add },
        ];
        for op in &atomics {
            assert!(is_agreed_on(op, abi::FEATURE_ATOMICS));
            assert!(!is_agreed_on(op, !abi::FEATURE_ATOMICS));
        }
        let own = abi::FEATURE_FAST_REGISTER | abi::FEATURE_WINDOWS;
        for (op, features) in [
            (SendOp::SendWithInvalidate(1), own | abi::FEATURE_LISTS),
            (SendOp::LocalInvalidate(1), own),
        ] {
            for bit in 0..u64::BITS {
                let feature = 1 << bit;
                assert_eq!(is_agreed_on(&op, feature), features & feature != 0);
            }
            assert!(!is_agreed_on(&op, !features));
        }
        for op in [SendOp::Send, SendOp::RdmaRead(remote)] {
            assert!(is_agreed_on(&op, 0));
        }
    }
}
