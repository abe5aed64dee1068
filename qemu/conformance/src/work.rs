// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Work requests.

use ferrite_abi::{
    DatagramPart, Plain, RemotePart, SendHeader, SendOpcode, SendPart, Sge, BLOCK_SIZE,
    SEND_INLINE, SEND_SIGNALED,
};

/// A work request of a send queue, every part of which a check may spoil.
#[derive(Clone, Debug)]
pub struct Work {
    /// Its header; blocks, entries and inline length are set by [`Self::encode`] unless they were
    /// changed.
    pub header: SendHeader,
    /// The part of its opcode.
    pub part: Vec<u8>,
    /// Scatter/gather entries.
    pub sges: Vec<Sge>,
    /// Inline data instead.
    pub inline: Option<Vec<u8>>,
}

impl Work {
    fn new<P: Plain>(opcode: SendOpcode, part: &P, sges: &[Sge]) -> Self {
        Self {
            header: SendHeader {
                opcode: opcode.number(),
                flags: SEND_SIGNALED,
                ..SendHeader::zeroed()
            },
            part: part.as_bytes().to_vec(),
            sges: sges.to_vec(),
            inline: None,
        }
    }

    /// A send of a connected queue pair.
    pub fn send(sges: &[Sge]) -> Self {
        Self::new(SendOpcode::Send, &SendPart::zeroed(), sges)
    }

    /// A send with immediate data, as they are on the wire.
    pub fn send_immediate(sges: &[Sge], immediate: u64) -> Self {
        let part = SendPart {
            immediate,
            ..SendPart::zeroed()
        };
        Self::new(SendOpcode::SendImmediate, &part, sges)
    }

    /// A send, or a local operation, that invalidates a tag.
    pub fn invalidate(opcode: SendOpcode, tag: u32) -> Self {
        let part = SendPart {
            tag,
            ..SendPart::zeroed()
        };
        Self::new(opcode, &part, &[])
    }

    /// A read or write.
    pub fn remote(opcode: SendOpcode, sges: &[Sge], address: u64, rkey: u32) -> Self {
        let part = RemotePart {
            address,
            rkey,
            ..RemotePart::zeroed()
        };
        Self::new(opcode, &part, sges)
    }

    /// Any opcode with its part.
    pub fn with_part<P: Plain>(opcode: SendOpcode, part: &P, sges: &[Sge]) -> Self {
        Self::new(opcode, part, sges)
    }

    /// A datagram.
    pub fn datagram(part: &DatagramPart, sges: &[Sge]) -> Self {
        Self::new(SendOpcode::Send, part, sges)
    }

    /// The same with these flags.
    pub fn flags(mut self, flags: u16) -> Self {
        self.header.flags = flags;
        self
    }

    /// The same with inline data.
    pub fn inline(mut self, data: &[u8]) -> Self {
        self.header.flags |= SEND_INLINE;
        self.inline = Some(data.to_vec());
        self.sges.clear();
        self
    }

    /// The blocks to post.
    pub fn encode(&self) -> Vec<u8> {
        let mut header = self.header;
        let payload = match &self.inline {
            Some(data) => data.clone(),
            None => self
                .sges
                .iter()
                .flat_map(|s| s.as_bytes().to_vec())
                .collect(),
        };
        if header.sge_count == 0 && self.inline.is_none() {
            header.sge_count = self.sges.len() as u8;
        }
        if let (0, Some(data)) = (header.inline_length, &self.inline) {
            header.inline_length = data.len() as u16;
        }
        let bytes = size_of::<SendHeader>() + self.part.len() + payload.len();
        if header.blocks == 0 {
            header.blocks = bytes.div_ceil(BLOCK_SIZE) as u8;
        }
        let mut all = header.as_bytes().to_vec();
        all.extend(&self.part);
        all.extend(payload);
        all.resize(all.len().next_multiple_of(BLOCK_SIZE), 0);
        all
    }
}
