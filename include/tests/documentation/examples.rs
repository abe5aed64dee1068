// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The bytes of `Documentation/device/18-examples.md` are those that the definitions make.

use ferrite_abi::*;
use std::fmt::Write;
use std::path::{Path, PathBuf};

const IMMEDIATE: [u8; 4] = [0xde, 0xad, 0xbe, 0xef];
const DATA: &[u8] = b"hello";
const SENDER: u32 = 17;
const RECEIVER: u32 = 18;

/// Lines of an example: offset, bytes, field, value.
#[derive(Default)]
struct Lines {
    text: String,
    at: usize,
}

impl Lines {
    /// A field of these bytes, with what they mean.
    fn field(&mut self, bytes: &[u8], name: &str, value: &str) {
        let is_padding = bytes.len() > 8 && bytes.iter().all(|&byte| byte == 0);
        if is_padding {
            let count = format!("00 * {}", bytes.len());
            let _ = writeln!(self.text, "{:>4}  {count:<24} {name}", self.at);
        } else {
            for (line, bytes) in bytes.chunks(8).enumerate() {
                let hex: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                let words = match (line, value) {
                    (0, "") => name.to_string(),
                    (0, value) => format!("{name} = {value}"),
                    _ => String::new(),
                };
                let offset = self.at + 8 * line;
                let row = format!("{offset:>4}  {:<24} {words}", hex.join(" "));
                let _ = writeln!(self.text, "{}", row.trim_end());
            }
        }
        self.at += bytes.len();
    }

    /// The fields of a layout.
    fn layout<L: Layout>(&mut self, value: &L) {
        self.fields(L::FIELDS, value.as_bytes(), "");
    }

    fn fields(&mut self, fields: &[Field], bytes: &[u8], of: &str) {
        for (place, field) in fields.iter().enumerate() {
            let end = fields
                .get(place + 1)
                .map_or(bytes.len(), |next| next.offset);
            let bytes = &bytes[field.offset..end];
            let name = format!("{of}{}", field.name);
            match field.ty {
                "Buffer" => self.fields(Buffer::FIELDS, bytes, &format!("{name}.")),
                "u8" | "u16" | "u32" | "u64" => {
                    let mut number = [0; 8];
                    number[..bytes.len()].copy_from_slice(bytes);
                    let number = u64::from_le_bytes(number);
                    self.field(bytes, &name, &show(number));
                }
                _ => self.field(bytes, &name, ""),
            }
        }
    }
}

fn show(number: u64) -> String {
    if number < 10 {
        number.to_string()
    } else {
        format!("{number:#x}")
    }
}

fn command() -> Lines {
    let page = 0x40000;
    let log_entries = 4;
    let record_offset = (size_of::<CompletionEntry>() as u32) << log_entries;
    let create = CreateCompletionQueue {
        cqn: 3,
        eqn: EQ_FIRST_HANDLER,
        log_entries,
        reserved0: 0,
        doorbell_page: 0,
        record_offset,
        buffer: Buffer::contiguous(
            page,
            u64::from(record_offset) + size_of::<CompletionRecord>() as u64,
        ),
        processor: 0,
        reserved1: [0; 3],
    };
    let opcode = CommandOpcode::CreateCompletionQueue;
    let entry = CommandEntry::new(opcode, 0x2a, (0, 0), &create);
    let mut lines = Lines::default();
    let (payload, header) = CommandEntry::FIELDS.split_last().expect("it has fields");
    lines.fields(header, &entry.as_bytes()[..payload.offset], "");
    lines.layout(&create);
    let rest = &entry.payload[size_of::<CreateCompletionQueue>()..];
    lines.field(rest, "(rest of the payload)", "");
    assert_eq!(lines.at, size_of::<CommandEntry>());
    lines
}

fn work_request() -> Lines {
    let header = SendHeader {
        opcode: SendOpcode::SendImmediate.number(),
        blocks: blocks_for(SendOpcode::SendImmediate, false, size_of::<Sge>()) as u8,
        sge_count: 1,
        reserved: 0,
        flags: SEND_SIGNALED | SEND_SOLICITED,
        inline_length: 0,
        reserved_channel: 0,
        srqn: 0,
    };
    let part = SendPart {
        immediate: u64::from(u32::from_ne_bytes(IMMEDIATE)),
        tag: 0,
        reserved: 0,
    };
    let sge = Sge {
        address: 0x7f00_0000_1000,
        length: DATA.len() as u32,
        lkey: Tag::new(5, 1).0,
    };
    let mut lines = Lines::default();
    lines.layout(&header);
    lines.layout(&part);
    lines.layout(&sge);
    lines.field(&[0; BLOCK_SIZE][lines.at..], "(anything)", "");
    lines
}

fn doorbell(word: u64) -> Lines {
    let mut lines = Lines::default();
    lines.field(&word.to_le_bytes(), "word", &show(word));
    lines
}

fn send_doorbell_word() -> Lines {
    doorbell(send_doorbell(SENDER, 1))
}

fn completion_doorbell() -> Lines {
    doorbell(
        CompletionDoorbell {
            cqn: 3,
            seen: 0,
            sequence: 1,
            solicited: false,
        }
        .encode(),
    )
}

fn event_doorbell() -> Lines {
    doorbell(
        EventDoorbell {
            eqn: EQ_FIRST_HANDLER,
            read_index: 7,
            relative: false,
            valid: true,
            arm: true,
            quiet: false,
            disarm: false,
        }
        .encode(),
    )
}

/// The CRC of Ethernet, one bit at a time.
fn crc32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            let carry = crc & 1;
            crc >>= 1;
            if carry != 0 {
                crc ^= 0xedb8_8320;
            }
        }
    }
    !crc
}

fn packet() -> Lines {
    let pad = DATA.len().wrapping_neg() % 4;
    let transport = 12 + IMMEDIATE.len() + DATA.len() + pad + 4;
    let mut ip = vec![0x45, 0x00];
    ip.extend((20 + 8 + transport as u16).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    ip.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    let sum: u32 = ip
        .chunks(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    let checksum = !((sum & 0xffff) as u16 + (sum >> 16) as u16);
    ip[10..12].copy_from_slice(&checksum.to_be_bytes());
    let udp = [
        0xc011u16.to_be_bytes(),
        4791u16.to_be_bytes(),
        (8 + transport as u16).to_be_bytes(),
        [0, 0],
    ]
    .concat();
    // Opcode; solicited, migration, pad count; partition key.
    let mut bth = vec![0x05, 0x80 | 0x40 | ((pad as u8) << 4), 0xff, 0xff];
    bth.extend(RECEIVER.to_be_bytes());
    // Acknowledge request, packet sequence number.
    bth.extend((0x8000_0000u32 | 0x64).to_be_bytes());
    let padding = vec![0; pad];
    let covered = [&ip, &udp, &bth, &IMMEDIATE[..], DATA, &padding].concat();
    let mut masked = covered.clone();
    for at in [1, 8, 10, 11, 26, 27, 32] {
        masked[at] = 0xff;
    }
    let icrc = crc32([0xff; 8].into_iter().chain(masked));

    let mut lines = Lines::default();
    lines.field(&[2, 0, 0, 0, 0, 0x0b], "Ethernet destination", "");
    lines.field(&[2, 0, 0, 0, 0, 0x0a], "Ethernet source", "");
    lines.field(&[0x08, 0x00], "type", "IPv4");
    lines.field(&ip[..1], "version, header length", "4, 5 words");
    lines.field(&ip[1..2], "TOS", "0");
    lines.field(&ip[2..4], "total length", &(20 + 8 + transport).to_string());
    lines.field(&ip[4..8], "identification, don't fragment", "");
    lines.field(&ip[8..9], "TTL", "64");
    lines.field(&ip[9..10], "protocol", "17, UDP");
    lines.field(&ip[10..12], "header checksum", "");
    lines.field(&ip[12..16], "source", "10.0.0.1");
    lines.field(&ip[16..20], "destination", "10.0.0.2");
    lines.field(&udp[..2], "UDP source port", "0xc011");
    lines.field(&udp[2..4], "destination port", "4791");
    lines.field(&udp[4..6], "length", &(8 + transport).to_string());
    lines.field(&udp[6..], "checksum", "none");
    lines.field(&bth[..1], "BTH opcode", "RC SEND only with immediate");
    lines.field(
        &bth[1..2],
        "solicited, migration, pad, version",
        "1, 1, 3, 0",
    );
    lines.field(&bth[2..4], "P_Key", "0xffff");
    lines.field(&bth[4..8], "reserved, destination queue pair", "18");
    lines.field(&bth[8..12], "acknowledge request, PSN", "1, 0x64");
    lines.field(&IMMEDIATE, "immediate", "");
    lines.field(DATA, "payload", "\"hello\"");
    lines.field(&padding, "pad", "");
    lines.field(&icrc.to_le_bytes(), "ICRC", &format!("{icrc:#010x}"));
    assert_eq!(lines.at, 14 + covered.len() + 4);
    lines
}

fn completion() -> Lines {
    let mut lines = Lines::default();
    lines.layout(&CompletionEntry {
        qpn: RECEIVER,
        index: 0,
        byte_count: DATA.len() as u32,
        tag: 0,
        immediate: u64::from(u32::from_ne_bytes(IMMEDIATE)),
        timestamp: 0x1234_5678,
        source_qpn: 0,
        source_mac: [0; 6],
        vlan: VLAN_NONE,
        srqn: 0,
        reserved_channel: 0,
        pkey_index: 0,
        flags: COMPLETION_RECEIVE | COMPLETION_IMMEDIATE | COMPLETION_SOLICITED,
        vendor_syndrome: 0,
        status: CompletionStatus::Success.number(),
        opcode: CompletionOpcode::Receive.number(),
        port: 0,
        phase: phase_of(0, 4),
    });
    lines
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../Documentation/device/18-examples.md")
}

#[test]
fn the_bytes_of_the_examples_are_those_of_the_definitions() {
    assert_eq!(crc32(*b"123456789"), 0xcbf4_3926);
    let written = std::fs::read_to_string(path()).expect("the chapter is there");
    let mut rendered = written.clone();
    let examples = [
        ("command", command()),
        ("work request", work_request()),
        ("send doorbell", send_doorbell_word()),
        ("completion doorbell", completion_doorbell()),
        ("event doorbell", event_doorbell()),
        ("packet", packet()),
        ("completion", completion()),
    ];
    let marks = written.matches("<!-- bytes: ").count();
    assert_eq!(marks, examples.len());
    for (name, lines) in examples {
        let mark = format!("<!-- bytes: {name} -->\n```\n");
        let start = rendered.find(&mark).expect("the example has a place") + mark.len();
        let end = start + rendered[start..].find("```").expect("the block ends");
        rendered.replace_range(start..end, &lines.text);
    }
    if std::env::var_os("FERRITE_UPDATE").is_some() {
        std::fs::write(path(), &rendered).expect("18-examples.md can be written");
        return;
    }
    assert!(
        rendered == written,
        "Documentation/device/18-examples.md is out of date: run \
         FERRITE_UPDATE=1 cargo test -p ferrite-abi --test documentation"
    );
}
