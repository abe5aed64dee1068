// SPDX-License-Identifier: Apache-2.0 OR MIT

//! The packet that the specification takes apart is one that the engine takes.

use ferrite_engine::roce::{gid_from_ipv4, Bth, Frame, Packet};

const CHAPTER: &str = include_str!("../../../Documentation/device/18-examples.md");

/// The bytes of the packet: each line has an offset, bytes from column 6 to column 30, and words.
fn packet() -> Vec<u8> {
    let start = "<!-- bytes: packet -->\n```\n";
    let block = CHAPTER.split_once(start).expect("there is a packet").1;
    let block = block.split_once("```").expect("the block ends").0;
    block
        .lines()
        .flat_map(|line| line[6..line.len().min(30)].split_whitespace())
        .map(|byte| u8::from_str_radix(byte, 16).expect("a byte"))
        .collect()
}

#[test]
fn the_packet_of_the_specification_is_taken() {
    let mut bytes = packet();
    let frame = Frame::parse(&bytes).expect("it is RoCEv2");
    assert!(frame.icrc_ok());
    assert_eq!(frame.source, gid_from_ipv4([10, 0, 0, 1]));
    assert_eq!(frame.destination, gid_from_ipv4([10, 0, 0, 2]));
    let packet = Packet::parse(frame.transport).expect("it is well-formed");
    let Bth {
        opcode,
        solicited,
        ack_request,
        qpn,
        psn,
        ..
    } = packet.bth;
    assert_eq!((opcode, solicited, ack_request), (0x05, true, true));
    assert_eq!((qpn, psn), (18, 0x64));
    assert_eq!(packet.immediate, Some([0xde, 0xad, 0xbe, 0xef]));
    assert_eq!(packet.payload.bytes(), Some(&b"hello"[..]));
    // Not one bit of the payload may change.
    let last = bytes.len() - 12;
    bytes[last] ^= 1;
    let frame = Frame::parse(&bytes).expect("it is still RoCEv2");
    assert!(!frame.icrc_ok());
}
