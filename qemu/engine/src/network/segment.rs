// SPDX-License-Identifier: Apache-2.0 OR MIT

//! From a transmit request to frames: tag, checksum, TCP segments.

use super::headers::{checksum, Headers, Packet, Protocol, ADDRESSES, ETHERNET, TAG, TAG_TYPE};
use crate::memory::FRAME_OVERHEAD;
use ferrite_abi::{
    TransmitHeader, TRANSMIT_CHECKSUM, TRANSMIT_MIN_SEGMENT, TRANSMIT_SEGMENT, TRANSMIT_VLAN,
};

/// A request that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BadRequest;

/// Flags of TCP that are in the first segment, or in the last, alone.
const TCP_FIN: u8 = 1 << 0;
const TCP_PSH: u8 = 1 << 3;
const TCP_CWR: u8 = 1 << 7;

/// Bytes of headers that each segment has at most: Ethernet's, a tag that was there and one that is
/// inserted, IPv4's and TCP's with all of their options. (IPv6's is shorter.)
const MAX_HEADERS: usize = ETHERNET + 2 * TAG + 60 + 60;

/// Most bytes of [`Room`](crate::memory::Room) that the frames take which a request of `length` bytes
/// becomes, from number `first` on.
pub(super) fn room(header: &TransmitHeader, length: usize, first: usize) -> usize {
    let (mut frames, mut bytes) = (1, length);
    if header.flags & TRANSMIT_SEGMENT != 0 {
        let size = usize::from(header.segment_size.max(TRANSMIT_MIN_SEGMENT));
        bytes = length.saturating_sub(first.saturating_mul(size));
        frames = bytes.div_ceil(size).max(1);
    }
    let overhead = frames.saturating_mul(FRAME_OVERHEAD + MAX_HEADERS);
    overhead.saturating_add(bytes)
}

fn put16(bytes: &mut [u8], at: usize, value: u16) -> Result<(), BadRequest> {
    let place = bytes.get_mut(at..at + 2).ok_or(BadRequest)?;
    place.copy_from_slice(&value.to_be_bytes());
    Ok(())
}

/// Makes frames of what was gathered, from number `first` on, none longer than an MTU allows; `frame` is
/// left as it may be. Nothing is sent of a request that makes no sense.
///
/// `send` tells whether it took the frame: with `Some` the one with this number was not, and it is to be
/// gone on with there.
pub(super) fn make(
    header: &TransmitHeader,
    frame: &mut Vec<u8>,
    mtu: usize,
    first: usize,
    scratch: &mut Vec<u8>,
    send: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<Option<usize>, BadRequest> {
    let flags = header.flags;
    let known = TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT | TRANSMIT_VLAN;
    let unused = |flag, fields: &[u16]| flags & flag != 0 || fields.iter().all(|field| *field == 0);
    if flags & !known != 0
        || frame.len() < ETHERNET
        || !unused(TRANSMIT_VLAN, &[header.vlan])
        || !unused(TRANSMIT_SEGMENT, &[header.segment_size])
        || !unused(
            TRANSMIT_CHECKSUM,
            &[header.checksum_start, header.checksum_offset],
        )
    {
        return Err(BadRequest);
    }
    let headers = Headers::parse(frame);
    let tag = if headers.vlan.is_some() { TAG } else { 0 };
    let longest = ETHERNET + tag + mtu;
    let inserted = if flags & TRANSMIT_VLAN != 0 { TAG } else { 0 };
    if flags & TRANSMIT_SEGMENT != 0 {
        let segments = Segments::new(header, frame, headers.packet, longest)?;
        insert_tag(header, frame);
        return segments.make(frame, inserted, first, scratch, send);
    }
    if frame.len() > longest {
        return Err(BadRequest);
    }
    if flags & TRANSMIT_CHECKSUM != 0 {
        let start = usize::from(header.checksum_start);
        let offset = usize::from(header.checksum_offset);
        let summed = frame.get_mut(start..).ok_or(BadRequest)?;
        if offset + 2 > summed.len() {
            return Err(BadRequest);
        }
        let sum = !checksum(summed);
        // Zero means none to UDP, and to the others both are the same.
        put16(summed, offset, if sum == 0 { 0xffff } else { sum })?;
    }
    insert_tag(header, frame);
    Ok((!send(frame)).then_some(0))
}

fn insert_tag(header: &TransmitHeader, frame: &mut Vec<u8>) {
    if header.flags & TRANSMIT_VLAN != 0 {
        let [high, low] = header.vlan.to_be_bytes();
        let tag = [TAG_TYPE[0], TAG_TYPE[1], high, low];
        frame.splice(ADDRESSES..ADDRESSES, tag);
    }
}

/// How a frame is cut.
struct Segments {
    packet: Packet,
    /// Where the TCP header begins, and where it ends.
    tcp: usize,
    data: usize,
    size: usize,
}

impl Segments {
    fn new(
        header: &TransmitHeader,
        frame: &[u8],
        packet: Option<Packet>,
        longest: usize,
    ) -> Result<Self, BadRequest> {
        let packet = packet.ok_or(BadRequest)?;
        let Some((Protocol::Tcp, tcp)) = packet.transport else {
            return Err(BadRequest);
        };
        let offset = frame.get(tcp + 12).ok_or(BadRequest)? >> 4;
        let data = tcp + usize::from(offset) * 4;
        let size = usize::from(header.segment_size);
        if header.flags & TRANSMIT_CHECKSUM == 0
            || usize::from(header.checksum_start) != tcp
            || header.checksum_offset != 16
            || header.segment_size < TRANSMIT_MIN_SEGMENT
            || offset < 5
            || data > frame.len()
            || data + size.min(frame.len() - data) > longest
        {
            return Err(BadRequest);
        }
        Ok(Self {
            packet,
            tcp,
            data,
            size,
        })
    }

    /// Makes the segments of a frame into which `inserted` bytes were put before the packet, as [`make`].
    fn make(
        mut self,
        frame: &[u8],
        inserted: usize,
        first: usize,
        segment: &mut Vec<u8>,
        send: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Option<usize>, BadRequest> {
        self.packet.start += inserted;
        self.tcp += inserted;
        self.data += inserted;
        let (start, tcp) = (self.packet.start, self.tcp);
        let (head, data) = frame.split_at_checked(self.data).ok_or(BadRequest)?;
        let word = |at: usize| -> Option<[u8; 4]> { head.get(at..at + 4)?.try_into().ok() };
        let sequence = u32::from_be_bytes(word(tcp + 4).ok_or(BadRequest)?);
        let id = super::headers::be16(head, start + 4).ok_or(BadRequest)?;
        let flags = *head.get(tcp + 13).ok_or(BadRequest)?;
        let count = data.len().div_ceil(self.size).max(1);
        for number in first..count {
            let from = number * self.size;
            let piece = data.get(from..data.len().min(from + self.size));
            let piece = piece.ok_or(BadRequest)?;
            segment.clear();
            segment.extend_from_slice(head);
            segment.extend_from_slice(piece);
            // No packet is longer than an MTU, which has 16 bits.
            if self.packet.is_v6 {
                let length = segment.len() - start - 40;
                put16(segment, start + 4, length as u16)?;
            } else {
                let length = segment.len() - start;
                put16(segment, start + 2, length as u16)?;
                put16(segment, start + 4, id.wrapping_add(number as u16))?;
                put16(segment, start + 10, 0)?;
                let sum = !checksum(segment.get(start..tcp).ok_or(BadRequest)?);
                put16(segment, start + 10, sum)?;
            }
            let place = segment.get_mut(tcp + 4..tcp + 8).ok_or(BadRequest)?;
            place.copy_from_slice(&sequence.wrapping_add(from as u32).to_be_bytes());
            let mut flags = flags;
            if number + 1 != count {
                flags &= !(TCP_FIN | TCP_PSH);
            }
            if number != 0 {
                flags &= !TCP_CWR;
            }
            *segment.get_mut(tcp + 13).ok_or(BadRequest)? = flags;
            put16(segment, tcp + 16, 0)?;
            let length = segment.len() - tcp;
            let pseudo = self.packet.pseudo(segment, Protocol::Tcp, length);
            let sum = super::headers::sum_from(pseudo, &segment[tcp..]);
            put16(segment, tcp + 16, !sum)?;
            if !send(segment) {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_abi::Plain;

    #[test]
    fn no_segments_take_more_room_than_was_counted() {
        // A tag that is there and another, and all the options that IPv4 and TCP can have.
        let mut frame = vec![0; MAX_HEADERS - TAG + 60_000];
        let ip = ETHERNET + TAG;
        let length = frame.len() - ip;
        frame[ADDRESSES..ADDRESSES + 2].copy_from_slice(&TAG_TYPE);
        frame[ip - 2..ip + 4].copy_from_slice(&[8, 0, 0x4f, 0, (length >> 8) as u8, length as u8]);
        frame[ip + 9] = 6;
        frame[ip + 60 + 12] = 0xf0;
        let header = TransmitHeader {
            flags: TRANSMIT_CHECKSUM | TRANSMIT_SEGMENT | TRANSMIT_VLAN,
            vlan: 7,
            segment_size: TRANSMIT_MIN_SEGMENT,
            checksum_start: (ip + 60) as u16,
            checksum_offset: 16,
            ..TransmitHeader::zeroed()
        };
        let count = 60_000 / usize::from(TRANSMIT_MIN_SEGMENT);
        for first in [0, 1, count / 2, count - 1] {
            let (mut frames, mut bytes) = (0, 0);
            let made = make(
                &header,
                &mut frame.clone(),
                1500,
                first,
                &mut Vec::new(),
                &mut |sent| {
                    frames += 1;
                    bytes += sent.len() + FRAME_OVERHEAD;
                    true
                },
            );
            assert_eq!((made, frames), (Ok(None), count - first));
            assert!(bytes <= room(&header, frame.len(), first), "{first}");
        }
    }
}
