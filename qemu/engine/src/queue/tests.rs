// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of rings of work.

use super::*;
use crate::memory::DmaError;
use crate::testing::{SendWork, SharedMemory, TestMemory};
use ferrite_abi::{AddressVector, Buffer, Field, Layout, ListPart, MAX_PIECES};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const LOG_BLOCKS: u8 = 3;
const RECORD: u64 = 64 << LOG_BLOCKS;

/// A send queue of eight blocks at address 0, with its record behind it.
fn queue<M: HostMemory>(memory: &M) -> SendQueue {
    queue_of(memory, Service::Rc)
}

/// The same of another service.
fn queue_of<M: HostMemory>(memory: &M, service: Service) -> SendQueue {
    let att = Att::new(&Buffer::contiguous(0, RECORD + 128)).unwrap();
    let placement = Placement {
        ring_offset: 0,
        log_entries: LOG_BLOCKS,
        log_stride: 6,
        record_offset: RECORD as u32,
    };
    SendQueue::new(memory, &att, placement, service).unwrap()
}

fn memory() -> TestMemory {
    TestMemory::new(0, 4096)
}

fn put(memory: &TestMemory, index: u32, bytes: &[u8]) {
    for (block, bytes) in (index..).zip(bytes.chunks(BLOCK_SIZE)) {
        let slot = u64::from(block % 8);
        memory.write(slot * 64, bytes).unwrap();
    }
}

fn sge(length: u32) -> Sge {
    Sge {
        address: 0x1234,
        length,
        lkey: 0x100,
    }
}

/// What becomes of a work request posted alone.
fn fetch(bytes: &[u8]) -> Result<SendRequest, QueueError> {
    fetch_by(bytes, Service::Rc)
}

/// The same where the queue pair gives another service.
fn fetch_by(bytes: &[u8], service: Service) -> Result<SendRequest, QueueError> {
    let memory = memory();
    let mut queue = queue_of(&memory, service);
    put(&memory, 0, bytes);
    memory.put(RECORD, &((bytes.len() / BLOCK_SIZE) as u32));
    queue.refresh(&memory).unwrap();
    let mut request = SendRequest::default();
    queue.fetch(&memory, 0, &mut request)?;
    Ok(request)
}

/// The same with one byte of the header changed.
fn fetch_changed(work: &SendWork, at: usize, value: u8) -> QueueError {
    let mut bytes = work.encode();
    bytes[at] = value;
    fetch(&bytes).unwrap_err()
}

#[test]
fn a_work_request_refused_for_its_header_is_called_what_it_is() {
    let work = SendWork::new(SendOpcode::Write, &[sge(8)]).remote(0, 1);
    for (field, value) in [("flags", 0x80), ("reserved", 1), ("srqn", 1)] {
        let at = SendHeader::FIELDS.iter().find(|at| at.name == field);
        let mut bytes = work.encode();
        bytes[at.unwrap().offset] = value;
        let memory = memory();
        let mut queue = queue(&memory);
        put(&memory, 0, &bytes);
        memory.put(RECORD, &((bytes.len() / BLOCK_SIZE) as u32));
        queue.refresh(&memory).unwrap();
        let mut request = SendRequest::default();
        queue.fetch(&memory, 0, &mut request).unwrap_err();
        assert_eq!(request.opcode, SendOpcode::Write, "{field}");
    }
}

#[test]
fn the_length_is_judged_before_the_service_on_every_queue() {
    let too_long = [sge(1 << 31), sge(1 << 31)];
    for opcode in [SendOpcode::Write, SendOpcode::Read] {
        let long = SendWork::new(opcode, &too_long).remote(0, 1).encode();
        let short = SendWork::new(opcode, &[sge(8)]).remote(0, 1).encode();
        let inline = SendWork::new(opcode, &[]).remote(0, 1).inline(&[1]);
        let datagram = |bytes: &[u8]| fetch_by(bytes, Service::Ud).unwrap_err();
        assert_eq!(fetch(&long).unwrap_err(), QueueError::TooLong);
        assert_eq!(datagram(&long), QueueError::TooLong);
        assert_eq!(datagram(&short), QueueError::Opcode);
        if opcode == SendOpcode::Write {
            assert_eq!(datagram(&inline.encode()), QueueError::Opcode);
        }
    }
}

#[test]
fn work_requests_wrap_around_the_end_of_the_ring() {
    let memory = memory();
    let mut queue = queue(&memory);
    let data: Vec<u8> = (0..200).collect();
    let bytes = SendWork::new(SendOpcode::Send, &[]).inline(&data).encode();
    let blocks = (bytes.len() / BLOCK_SIZE) as u32;
    assert_eq!(blocks, 4);
    let mut request = SendRequest::default();
    let mut index = 0u32;
    for _ in 0..20 {
        put(&memory, index, &bytes);
        memory.put(RECORD, &(index + blocks));
        queue.refresh(&memory).unwrap();
        queue.fetch(&memory, index, &mut request).unwrap();
        assert_eq!(request.inline(), Some(&data[..]));
        assert_eq!(request.length, 200);
        index = request.end();
        queue.advance(index);
        queue.retire(index);
        // An odd one, so that every start is met.
        put(
            &memory,
            index,
            &SendWork::new(SendOpcode::Send, &[]).encode(),
        );
        index += 1;
        memory.put(RECORD, &index);
        queue.refresh(&memory).unwrap();
        queue.advance(index);
        queue.retire(index);
    }
}

#[test]
fn a_work_request_may_cross_pages_that_do_not_follow_each_other() {
    const PAGES: [u64; 3] = [0x2000, 0, 0x1000];
    const TABLE: u64 = 0x3000;
    let memory = TestMemory::new(0, 0x4000);
    for (at, page) in (TABLE..).step_by(8).zip(PAGES) {
        memory.put(at, &page);
    }
    // A ring of two pages, and the record in the third.
    let att = Att::new(&Buffer {
        root: TABLE,
        length: 2 * 4096 + 128,
        fbo: 0,
        page_shift: 12,
        order: ferrite_abi::AttOrder::First.number(),
        reserved: 0,
    });
    let placement = Placement {
        ring_offset: 0,
        log_entries: 7,
        log_stride: 6,
        record_offset: 2 * 4096,
    };
    let mut queue = SendQueue::new(&memory, &att.unwrap(), placement, Service::Rc).unwrap();
    let data: Vec<u8> = (0..200).collect();
    let bytes = SendWork::new(SendOpcode::Send, &[]).inline(&data).encode();
    // Two blocks at the end of the first page, the others in the second; and the same where
    // the ring begins again.
    for start in [62u32, 126] {
        for (index, block) in (start..).zip(bytes.chunks(BLOCK_SIZE)) {
            let slot = index % 128;
            let page = PAGES[slot as usize / 64];
            memory
                .write(page + u64::from(slot % 64) * 64, block)
                .unwrap();
        }
        memory.put(PAGES[2], &(start + 4));
        queue.refresh(&memory).unwrap();
        let mut request = SendRequest::default();
        queue.fetch(&memory, start, &mut request).unwrap();
        assert_eq!(request.inline(), Some(&data[..]));
        queue.advance(start + 4);
        queue.retire(start + 4);
    }
}

#[test]
fn the_parts_of_a_work_request_are_found() {
    let request = fetch(
        &SendWork::new(SendOpcode::WriteImmediate, &[sge(10), sge(20)])
            .remote(0xabcd, 0x77)
            .immediate(5)
            .flags(SEND_SOLICITED)
            .encode(),
    )
    .unwrap();
    assert_eq!(request.length, 30);
    assert_eq!(request.sges(), [sge(10), sge(20)]);
    assert_eq!(request.immediate, 5);
    assert!(!request.signaled());
    assert_eq!(request.inline(), None);
    assert!(
        matches!(request.body, SendBody::Remote(part) if part.address == 0xabcd && part.rkey == 0x77)
    );
}

#[test]
fn malformed_work_requests_are_refused_each_with_its_own_error() {
    let send = SendWork::new(SendOpcode::Send, &[sge(1)]);
    let read = SendWork::new(SendOpcode::Read, &[]).remote(0, 0);
    let [opcode, flags, blocks, sges, length] = [
        offset_of!(SendHeader, opcode),
        offset_of!(SendHeader, flags),
        offset_of!(SendHeader, blocks),
        offset_of!(SendHeader, sge_count),
        offset_of!(SendHeader, inline_length),
    ];
    let inlined = SEND_INLINE as u8;
    assert_eq!(fetch_changed(&send, opcode, 0), QueueError::Opcode);
    assert_eq!(fetch_changed(&send, opcode, 200), QueueError::Opcode);
    assert_eq!(fetch_changed(&send, flags, 0x10), QueueError::Flags);
    assert_eq!(fetch_changed(&send, blocks, 0), QueueError::Blocks);
    assert_eq!(fetch_changed(&send, blocks, 2), QueueError::Blocks);
    assert_eq!(fetch_changed(&send, blocks, 255), QueueError::Blocks);
    // Entries beyond the blocks, and beyond any limit.
    assert_eq!(fetch_changed(&send, sges, 3), QueueError::Overrun);
    assert_eq!(fetch_changed(&send, sges, 17), QueueError::SgeCount);
    assert_eq!(fetch_changed(&send, flags, inlined), QueueError::Inline);
    let inline = SendWork::new(SendOpcode::Send, &[]).inline(&[1; 10]);
    assert_eq!(fetch_changed(&inline, length, 33), QueueError::Overrun);
    assert_eq!(fetch_changed(&inline, length + 1, 2), QueueError::Inline);
    assert_eq!(fetch_changed(&read, flags, inlined), QueueError::Inline);
    let local = SendWork::new(SendOpcode::LocalInvalidate, &[sge(1)]);
    assert_eq!(fetch(&local.encode()).unwrap_err(), QueueError::SgeCount);
    let atomic = SendWork::new(SendOpcode::FetchAdd, &[sge(4)]);
    assert_eq!(fetch(&atomic.encode()).unwrap_err(), QueueError::SgeCount);
}

/// Offsets of the bytes of reserved fields in a structure, those of structures in it included.
fn reserved_bytes(fields: &[Field], size: usize) -> Vec<usize> {
    let ends = fields.iter().skip(1).map(|field| field.offset);
    let mut found = Vec::new();
    for (field, end) in fields.iter().zip(ends.chain([size])) {
        let inner = match field.ty {
            _ if field.name.starts_with("reserved") => {
                found.extend(field.offset..end);
                continue;
            }
            "AddressVector" => AddressVector::FIELDS,
            "super::Buffer" => Buffer::FIELDS,
            _ => continue,
        };
        let inner = reserved_bytes(inner, end - field.offset);
        found.extend(inner.into_iter().map(|at| field.offset + at));
    }
    found
}

const SERVICES: [Service; 5] = [
    Service::Rc,
    Service::Uc,
    Service::Ud,
    Service::Gsi,
    Service::XrcIni,
];

/// A good work request of each opcode that a service has, with the fields of its part.
fn good_work(service: Service) -> Vec<(SendWork, &'static [Field])> {
    let datagram = is_datagram(service);
    let opcodes = (0..=u8::MAX).filter_map(SendOpcode::from_number);
    let sent = |opcode| matches!(opcode, SendOpcode::Send | SendOpcode::SendImmediate);
    opcodes
        .filter(|&opcode| !datagram || sent(opcode))
        .filter(|&opcode| service != Service::Uc || !registers(opcode) || is_local(opcode))
        .map(|opcode| {
            let fields = match opcode {
                SendOpcode::Send | SendOpcode::SendImmediate if datagram => DatagramPart::FIELDS,
                SendOpcode::Send
                | SendOpcode::SendImmediate
                | SendOpcode::SendInvalidate
                | SendOpcode::LocalInvalidate => SendPart::FIELDS,
                SendOpcode::Write
                | SendOpcode::WriteImmediate
                | SendOpcode::Read
                | SendOpcode::AtomicWrite => RemotePart::FIELDS,
                SendOpcode::CompareSwap | SendOpcode::FetchAdd => AtomicPart::FIELDS,
                SendOpcode::FastRegister | SendOpcode::RegisterSend => FastRegisterPart::FIELDS,
                SendOpcode::RegisterList | SendOpcode::RegisterListSend => ListPart::FIELDS,
                SendOpcode::Bind => BindPart::FIELDS,
                SendOpcode::Flush => FlushPart::FIELDS,
            };
            let sges = match opcode {
                SendOpcode::AtomicWrite => &[sge(8)][..],
                opcode if ferrite_abi::has_entries(opcode) => &[sge(8)],
                _ => &[],
            };
            let mut work = SendWork::new(opcode, sges);
            if matches!(
                opcode,
                SendOpcode::RegisterList | SendOpcode::RegisterListSend
            ) {
                work = work.part(&ListPart {
                    pieces: 1,
                    ..ListPart::zeroed()
                });
            }
            if datagram {
                work = work.datagram(&DatagramPart::zeroed());
            }
            (work, fields)
        })
        .collect()
}

#[test]
fn reserved_fields_that_are_not_zero_are_refused_in_every_work_request() {
    for service in SERVICES {
        for (work, fields) in good_work(service) {
            let good = work.encode();
            assert!(fetch_by(&good, service).is_ok(), "{service:?} {work:?}");
            let mut part = opcode_part(work.opcode, is_datagram(service));
            if registers(work.opcode) && !is_local(work.opcode) {
                // The second part is looked at below.
                part -= size_of::<SendPart>();
            }
            let header = size_of::<SendHeader>();
            let in_part = reserved_bytes(fields, part);
            let reserved = reserved_bytes(SendHeader::FIELDS, header)
                .into_iter()
                .chain(in_part.into_iter().map(|at| header + at));
            let mut count = 0;
            for at in reserved {
                let mut bytes = good.clone();
                bytes[at] = 0x40;
                let refused = fetch_by(&bytes, service).unwrap_err();
                assert_eq!(refused, QueueError::Reserved, "byte {at} of {work:?}");
                count += 1;
            }
            // Of the header alone there are five.
            assert!(count > 5, "{work:?}");
        }
    }
}

#[test]
fn fields_that_an_opcode_does_not_use_are_zero() {
    const HEADER: usize = size_of::<SendHeader>();
    for service in SERVICES {
        for (work, fields) in good_work(service) {
            let opcode = work.opcode;
            let with_immediate = matches!(
                opcode,
                SendOpcode::SendImmediate | SendOpcode::WriteImmediate
            );
            let with_tag = matches!(
                opcode,
                SendOpcode::SendInvalidate | SendOpcode::LocalInvalidate
            );
            let changed = |at: usize| {
                let mut bytes = work.encode();
                bytes[at] = 1;
                fetch_by(&bytes, service)
                    .map(|request| (request.immediate, request.tag, request.srqn))
            };
            for field in fields {
                let at = HEADER + field.offset;
                let (expected, beyond) = match field.name {
                    "immediate" => (with_immediate.then_some((1, 0, 0)), Some(at + 4)),
                    "tag" if fields.len() == SendPart::FIELDS.len() => {
                        (with_tag.then_some((0, 1, 0)), None)
                    }
                    "compare" => {
                        let compares = opcode == SendOpcode::CompareSwap;
                        (compares.then_some((0, 0, 0)), None)
                    }
                    _ => continue,
                };
                let expected = expected.ok_or(QueueError::Reserved);
                assert_eq!(changed(at), expected, "{} of {opcode:?}", field.name);
                // Eight bytes of immediate data are for later.
                if let Some(at) = beyond {
                    assert_eq!(changed(at), Err(QueueError::Reserved), "{opcode:?}");
                }
            }
            let named = service == Service::XrcIni && !is_local(opcode);
            assert_eq!(
                changed(offset_of!(SendHeader, srqn)),
                named.then_some((0, 0, 1)).ok_or(QueueError::Reserved),
                "{service:?} {opcode:?}"
            );
            assert_eq!(
                changed(offset_of!(SendHeader, inline_length)),
                Err(QueueError::Reserved),
                "{opcode:?}"
            );
        }
    }
}

fn list_part(pieces: u8) -> ListPart {
    ListPart {
        tag: 0x301,
        pieces,
        ..ListPart::zeroed()
    }
}

#[test]
fn pieces_are_counted_among_the_entries_and_not_among_the_data() {
    let sges: Vec<_> = (1..=MAX_SGE as u32).map(sge).collect();
    let both = SendWork::new(SendOpcode::RegisterListSend, &sges).part(&list_part(5));
    let request = fetch(&both.encode()).unwrap();
    assert_eq!(request.pieces(), &sges[..5]);
    assert_eq!(request.sges(), &sges[5..]);
    assert_eq!(request.length, (6..=16).sum::<u32>());
    assert_eq!(request.opcode, SendOpcode::Send);
    assert_eq!(request.posted, SendOpcode::RegisterListSend);
    let all = SendWork::new(SendOpcode::RegisterList, &sges).part(&list_part(16));
    let request = fetch(&all.encode()).unwrap();
    assert_eq!((request.pieces(), request.sges()), (&sges[..], &[][..]));
    assert_eq!(request.length, 0);
    // However long the pieces are, the message is not.
    let long = SendWork::new(SendOpcode::RegisterListSend, &[sge(u32::MAX); MAX_PIECES]);
    let request = fetch(&long.part(&list_part(16)).encode()).unwrap();
    assert_eq!(request.length, 0);
    // A request that has none leaves none behind.
    let mut used = request;
    let memory = memory();
    let mut queue = queue(&memory);
    memory
        .write(0, &SendWork::new(SendOpcode::Send, &[sge(3)]).encode())
        .unwrap();
    memory.put(RECORD, &1u32);
    queue.refresh(&memory).unwrap();
    queue.fetch(&memory, 0, &mut used).unwrap();
    assert_eq!(used.sges().len(), 1);
    assert!(used.pieces().is_empty() && used.registration.is_none());
}

#[test]
fn a_list_has_as_many_pieces_as_it_says_among_its_entries() {
    use SendOpcode::{RegisterList, RegisterListSend};
    for (opcode, entries, pieces, good) in [
        (RegisterList, 1, 1, true),
        (RegisterList, 2, 1, false),
        (RegisterList, 1, 2, false),
        (RegisterList, 0, 0, false),
        (RegisterListSend, 2, 1, true),
        (RegisterListSend, 2, 2, true),
        (RegisterListSend, 2, 3, false),
        (RegisterListSend, 2, 0, false),
        (RegisterListSend, 16, 255, false),
        (RegisterListSend, 17, 16, false),
    ] {
        let work = SendWork::new(opcode, &vec![sge(8); entries]).part(&list_part(pieces));
        let fetched = fetch(&work.encode());
        let expected = good.then_some(()).ok_or(QueueError::SgeCount);
        assert_eq!(
            fetched.map(|_| ()),
            expected,
            "{opcode:?} {entries} {pieces}"
        );
    }
}

#[test]
fn a_registration_that_sends_has_its_data_as_a_send_has_them() {
    let register = SendWork::new(SendOpcode::RegisterSend, &[sge(5), sge(6)]);
    let request = fetch(&register.encode()).unwrap();
    assert_eq!((request.length, request.sges().len()), (11, 2));
    assert_eq!(request.opcode, SendOpcode::Send);
    assert!(matches!(
        request.registration,
        Some(Registration::Region(_))
    ));
    let request = fetch(&register.clone().invalidate(0x907).encode()).unwrap();
    assert_eq!(
        (request.opcode, request.tag),
        (SendOpcode::SendInvalidate, 0x907)
    );
    let inline = SendWork::new(SendOpcode::RegisterSend, &[]).inline(&[7; MAX_INLINE]);
    let request = fetch(&inline.encode()).unwrap();
    assert_eq!(request.inline(), Some(&[7; MAX_INLINE][..]));
    // Nothing else has data in place of entries that are pieces.
    for opcode in [SendOpcode::RegisterList, SendOpcode::RegisterListSend] {
        let inline = SendWork::new(opcode, &[])
            .part(&list_part(1))
            .inline(&[7; 8]);
        let refused = fetch(&inline.encode()).unwrap_err();
        assert!(matches!(refused, QueueError::SgeCount | QueueError::Inline));
    }
    // The part of the send is looked at too.
    let at = size_of::<SendHeader>() + size_of::<FastRegisterPart>();
    for offset in [
        offset_of!(SendPart, immediate),
        offset_of!(SendPart, reserved),
    ] {
        let mut bytes = register.encode();
        bytes[at + offset] = 1;
        assert_eq!(fetch(&bytes).unwrap_err(), QueueError::Reserved);
    }
    // Without blocks enough for it there is none.
    let mut short = SendWork::new(SendOpcode::RegisterSend, &[]).encode();
    short.truncate(BLOCK_SIZE);
    short[offset_of!(SendHeader, blocks)] = 1;
    assert_eq!(fetch(&short).unwrap_err(), QueueError::Overrun);
}

#[test]
fn only_reliable_connections_register_and_send() {
    for (service, good) in [
        (Service::Rc, true),
        (Service::XrcIni, true),
        (Service::Uc, false),
    ] {
        let list = SendWork::new(SendOpcode::RegisterListSend, &[sge(1)]).part(&list_part(1));
        for work in [SendWork::new(SendOpcode::RegisterSend, &[]), list] {
            let fetched = fetch_by(&work.encode(), service).map(|_| ());
            assert_eq!(fetched, good.then_some(()).ok_or(QueueError::Opcode));
        }
        let list = SendWork::new(SendOpcode::RegisterList, &[sge(1)]).part(&list_part(1));
        assert!(fetch_by(&list.encode(), service).is_ok());
    }
}

#[test]
fn the_longest_message_is_2_gib() {
    let send = |sges: &[Sge]| fetch(&SendWork::new(SendOpcode::Send, sges).encode());
    assert_eq!(send(&[sge(MAX_MESSAGE)]).unwrap().length, MAX_MESSAGE);
    for sges in [
        &[sge(MAX_MESSAGE), sge(1)][..],
        &[sge(u32::MAX)],
        &[sge(u32::MAX), sge(2)],
    ] {
        assert_eq!(send(sges).unwrap_err(), QueueError::TooLong);
    }
}

#[test]
fn a_producer_index_neither_overtakes_nor_goes_back() {
    let memory = memory();
    let mut queue = queue(&memory);
    memory.put(RECORD, &8u32);
    assert_eq!(queue.refresh(&memory), Ok(()));
    for producer in [9, 7, u32::MAX] {
        memory.put(RECORD, &producer);
        assert_eq!(queue.refresh(&memory), Err(QueueError::Producer));
    }
    queue.retire(8);
    memory.put(RECORD, &16u32);
    assert_eq!(queue.refresh(&memory), Ok(()));
}

#[test]
fn sleeping_sees_a_post_that_came_just_before() {
    let memory = memory();
    let mut queue = queue(&memory);
    assert_eq!(queue.sleep(&memory), Ok(false));
    assert_eq!(memory.load_u32(RECORD + 64), Ok(1));
    memory.put(RECORD, &1u32);
    queue.wake(&memory).unwrap();
    assert_eq!(memory.load_u32(RECORD + 64), Ok(0));
    queue.advance(1);
    memory.put(RECORD, &2u32);
    assert_eq!(queue.sleep(&memory), Ok(true));
}

#[test]
fn a_post_while_the_device_falls_asleep_is_seen_or_rings() {
    const POSTS: u32 = 100_000;
    let memory = SharedMemory::new(2048);
    let mut queue = queue(&memory);
    // The last post that was rung for, and the last that was taken up.
    let (rung, taken) = (AtomicU32::new(0), AtomicU32::new(0));
    // On a busy machine the two hardly ever run at the same time: fewer will do.
    let end = Instant::now() + Duration::from_secs(3);
    let deadline = end + Duration::from_secs(120);
    std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            let mut posted = 0;
            while posted < POSTS && Instant::now() < end {
                posted += 1;
                memory.store_u32(RECORD, posted).unwrap();
                memory.fence();
                if memory.load_u32(RECORD + 64).unwrap() != 0 {
                    rung.store(posted, Ordering::Release);
                }
                let is_taken = || taken.load(Ordering::Acquire) >= posted;
                if !SharedMemory::spin(deadline, is_taken) {
                    return Err(posted);
                }
            }
            Ok(posted)
        });
        let mut done = 0;
        while !host.is_finished() {
            queue.wake(&memory).unwrap();
            while queue.has_next() {
                done += 1;
                queue.advance(done);
                queue.retire(done);
            }
            taken.store(done, Ordering::Release);
            if !queue.sleep(&memory).unwrap() {
                // Nobody looks any more: the host has to ring.
                let rang = || rung.load(Ordering::Acquire) > done || host.is_finished();
                SharedMemory::spin(deadline, rang);
            }
        }
        let posted = host.join().unwrap();
        assert!(
            posted.is_ok(),
            "post {posted:?} was neither seen nor rung for"
        );
    });
}

#[test]
fn receive_entries_are_checked() {
    let memory = memory();
    let att = Att::new(&Buffer::contiguous(0, 1024)).unwrap();
    let placement = Placement {
        ring_offset: 0,
        log_entries: 2,
        log_stride: 6,
        record_offset: 512,
    };
    let mut queue = ReceiveQueue::new(&memory, &att, placement).unwrap();
    let mut request = ReceiveRequest::default();
    assert_eq!(queue.take(&memory, &mut request), Ok(false));
    let put = |slot: u64, count: u32| {
        memory.put(slot * 64, &count);
        for n in 0..3 {
            memory.put(slot * 64 + 16 + n * 16, &sge(u32::MAX));
        }
    };
    put(0, 3);
    put(1, 4);
    put(2, u32::MAX);
    put(3, 0);
    memory.put(516, &4u32);
    assert_eq!(queue.take(&memory, &mut request), Ok(true));
    assert_eq!(request.sges().len(), 3);
    assert_eq!(request.capacity, 3 * u64::from(u32::MAX));
    for index in 1..3 {
        assert_eq!(queue.take(&memory, &mut request), Err(QueueError::SgeCount));
        assert_eq!(request.index, index);
    }
    assert_eq!(queue.take(&memory, &mut request), Ok(true));
    assert_eq!(request.capacity, 0);
    assert_eq!(queue.take(&memory, &mut request), Ok(false));
    memory.put(516, &5u32);
    assert_eq!(queue.take(&memory, &mut request), Err(QueueError::Producer));
}

#[test]
fn reserved_fields_that_are_not_zero_are_refused_in_every_receive() {
    let att = Att::new(&Buffer::contiguous(0, 1024)).unwrap();
    let placement = Placement {
        ring_offset: 0,
        log_entries: 2,
        log_stride: 6,
        record_offset: 512,
    };
    let id = offset_of!(ReceiveHeader, id);
    for shared in [false, true] {
        for at in 0..size_of::<ReceiveHeader>() {
            let memory = memory();
            let (mut queue, producer) = if shared {
                let queue = ReceiveQueue::shared(&memory, &att, placement);
                (queue.unwrap(), offset_of!(SrqRecord, producer))
            } else {
                let queue = ReceiveQueue::new(&memory, &att, placement);
                (
                    queue.unwrap(),
                    offset_of!(QueuePairRecord, receive_producer),
                )
            };
            memory.write(at as u64, &[1]).unwrap();
            memory.put(512 + producer as u64, &1u32);
            let mut request = ReceiveRequest::default();
            let taken = queue.take(&memory, &mut request);
            let expected = match at {
                // An entry, or very many of them.
                0 => Ok(true),
                _ if at < id => Err(QueueError::SgeCount),
                // A name is what entries of shared queues alone have.
                _ if at < id + 4 && shared => Ok(true),
                _ => Err(QueueError::Reserved),
            };
            assert_eq!(taken, expected, "byte {at}, shared: {shared}");
        }
    }
}

#[test]
fn a_ring_without_memory_is_an_error() {
    let short = TestMemory::new(512, 4096);
    let queue = queue(&short);
    let mut request = SendRequest::default();
    assert_eq!(
        queue.fetch(&short, 0, &mut request),
        Err(QueueError::Memory(AttError::Memory(DmaError {
            address: 0
        })))
    );
}
