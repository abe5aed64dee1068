// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control queue and its commands.

use super::checks;
use super::fixture::*;
use crate::host::{region_of, Host, PEER_GID, RECEIVE_PSN};
use crate::memory::{NOWHERE, PAGE};
use crate::outcome::{not_here, wait_for, Outcome};
use crate::packet::{aeth, rc, syndrome};
use crate::rings::{Cq, Qp, Region, Srq};
use crate::work::Work;
use crate::{ensure, ensure_eq};
use ferrite_abi::CommandOpcode as Op;
use ferrite_abi::CommandStatus::{
    BadNumber, BadOpcode, BadParameter, Busy, Exists, HostMemory, NoResource, NotFound, Ok as Done,
    Unsupported,
};
use ferrite_abi::*;
use std::time::{Duration, Instant};

checks! {
    "DEV-3-1" => commands_in_order_once,
    "DEV-3-2" => |h| bad_index(h, |copied, size| copied + size + 1),
    "DEV-3-3" => |h| bad_index(h, |copied, _| copied - 1),
    "DEV-3-4" => the_same_index,
    "DEV-3-6" => commands_of_one_object,
    "DEV-3-8" => each_command_is_answered_once,
    "DEV-3-9" => what_an_answer_says,
    "DEV-3-10" => control_ring_gone,
    "DEV-3-11" => |h| entry(h, BadOpcode, |e, _| e.opcode = 1000),
    "DEV-3-12" => |h| entry(h, BadParameter, |e, _| e.flags = 2),
    "DEV-3-13" => |h| entry(h, BadParameter, |e, _| e.request_length -= 1),
    "DEV-3-14" => longer_requests,
    "DEV-3-15" => |h| entry(h, BadParameter, |e, _| e.request_length = COMMAND_PAYLOAD as u32 + 1),
    "DEV-3-16" => |h| entry(h, BadParameter, |e, _| e.payload[COMMAND_PAYLOAD - 1] = 1),
    "DEV-3-17" => |h| entry(h, BadParameter, |e, at| e.request = at),
    "DEV-3-18" => misplaced_requests,
    "DEV-3-19" => |h| indirect(h, BadParameter, |e| e.request_length = COMMAND_MAX_REQUEST + 1),
    "DEV-3-20" => |h| indirect(h, BadParameter, |e| e.payload[7] = 1),
    "DEV-3-21" => |h| indirect(h, HostMemory, |e| e.request = NOWHERE),
    "DEV-3-22" => reserved_fields,
    "DEV-3-23" => replies_to_no_query,
    "DEV-3-24" => misplaced_replies,
    "DEV-3-25" => |h| query(h, BadParameter, |e| e.reply_length = 0),
    "DEV-3-26" => |h| query(h, HostMemory, |e| e.reply = NOWHERE),
    "DEV-3-27" => |h| indirect(h, Done, |_| ()),
    "DEV-3-28" => short_and_long_replies,
    "DEV-3-29" => reply_before_answer,
    "DEV-3-30" => reserved_of_replies,
    "DEV-3-31" => refused_commands_change_nothing,
    "DEV-3-32" => several_mistakes,
    "DEV-3-33" => buffers_are_looked_at,
    "DEV-3-35" => ranges,
    "DEV-3-36" => made_out_of_range,
    "DEV-3-37" => named_out_of_range,
    "DEV-3-38" => named_and_not_there,
    "DEV-3-39" => shared_receive_queue_not_there,
    "DEV-3-40" => others_not_there,
    "DEV-3-41" => ports,
    "DEV-3-42" => numbers_are_used_again,
    "DEV-3-43" => nop_waits,
    "DEV-3-44" => caps_do_not_change,
    "DEV-3-45" => |h| caps(h, |c| c.page_sizes & !0x7fff_f000 == 0 && c.page_sizes & 0x1000 != 0),
    "DEV-3-46" => |h| caps(h, sizes_are_right),
    "DEV-3-47" => |h| caps(h, |c| (8..=12).contains(&c.max_log_mtu)),
    "DEV-3-48" => |h| caps(h, |c| {
        let at_least_1 = [c.ports.into(), c.max_gid.into(), c.qp_count, c.cq_count, c.tag_count];
        at_least_1.iter().all(|count| *count >= 1) && c.max_eq >= 3
    }),
    "DEV-3-49" => |h| caps(h, |c| c.transports == 1 << Transport::RoceV2.number()),
    "DEV-3-50" => number_of_counters,
    "DEV-3-51" => |h| caps(h, |c| (32..=64).contains(&c.dma_bits)),
    "DEV-3-52" => |h| caps(h, |c| match c.clock_khz {
        0 => c.clock_bits == 0,
        _ => (32..=64).contains(&c.clock_bits),
    }),
    "DEV-3-53" => |h| caps(h, |c| c.command_timeout != 0),
    "DEV-3-54" => |h| caps(h, |c| (1..=u32::from(c.max_eq) - 2).contains(&c.handlers)),
    "DEV-3-55" => counters_are_written,
    "DEV-3-56" => counters_never_go_back,
    "DEV-3-57" => clock,
    "DEV-3-58" => new_event_queue,
    "DEV-3-59" => |h| event_queues(h, BadNumber, |c, caps| vec![
        CreateEventQueue { eqn: 0, ..c },
        CreateEventQueue { eqn: caps.max_eq, ..c },
        CreateEventQueue { eqn: u16::MAX, ..c },
    ]),
    "DEV-3-60" => |h| event_queues(h, Exists, |c, _| vec![CreateEventQueue { eqn: EQ_ASYNC, ..c }]),
    "DEV-3-61" => event_queue_messages,
    "DEV-3-62" => |h| event_queues(h, BadParameter, |c, caps| vec![
        CreateEventQueue { log_entries: EQ_MIN_LOG_ENTRIES - 1, ..c },
        CreateEventQueue { log_entries: caps.eq_max_log_entries + 1, ..c },
    ]),
    "DEV-3-63" => |h| event_queues(h, BadParameter, |c, _| {
        let (mut short, mut askew) = (c, c);
        short.ring.length -= 1;
        askew.ring.fbo = 16;
        vec![short, askew]
    }),
    "DEV-3-64" => destroyed_event_queue,
    "DEV-3-65" => modified_event_queue,
    "DEV-3-66" => new_completion_queue,
    "DEV-3-67" => |h| made_twice(h, |h| { let c = h.cq_command(6); h.entry(Op::CreateCompletionQueue, &c) }),
    "DEV-3-68" => |h| completion_queues(h, BadParameter, |c, caps| vec![
        CreateCompletionQueue { log_entries: caps.cq_max_log_entries + 1, ..c },
    ]),
    "DEV-3-69" => |h| {
        let pages = h.device.register32(REG_DOORBELL_PAGES)?;
        h.start()?;
        let mut command = h.cq_command(6);
        command.doorbell_page = pages;
        h.refuse(&command, BadParameter)
    },
    "DEV-3-70" => |h| completion_queues(h, BadParameter, |c, _| {
        let mut askew = c;
        askew.buffer.fbo = 32;
        vec![
            CreateCompletionQueue { record_offset: c.record_offset + 8, ..c },
            CreateCompletionQueue { record_offset: c.record_offset - 64, ..c },
            CreateCompletionQueue { record_offset: c.record_offset + 64, ..c },
            CreateCompletionQueue { record_offset: 0, ..c },
            askew,
        ]
    }),
    "DEV-3-71" => completion_queue_handlers,
    "DEV-3-72" => bound_elsewhere,
    "DEV-3-73" => no_event_on_the_old_queue,
    "DEV-3-74" => resizes_that_are_refused,
    "DEV-3-75" => completion_queue_in_use,
    "DEV-3-76" => flush_that_finds_no_room,
    "DEV-3-77" => new_queue_pair,
    "DEV-3-78" => |h| queue_pairs(h, BadNumber, |c, caps| vec![
        CreateQueuePair { qpn: 0, ..c },
        CreateQueuePair { qpn: caps.qp_first - 1, ..c },
        CreateQueuePair { qpn: caps.qp_first + caps.qp_count, ..c },
        CreateQueuePair { qpn: u32::MAX, ..c },
    ]),
    "DEV-3-79" => queue_pair_1,
    "DEV-3-80" => |h| made_twice(h, |h| {
        let cq = Cq::new(&h.cq_command(6));
        let c = h.qp_command(Service::Rc, &Cq { cqn: FIRST_CQ, ..cq });
        h.entry(Op::CreateQueuePair, &c)
    }),
    "DEV-3-81" => |h| queue_pairs(h, BadParameter, |c, _| [0, 5, 7, 11, 255].map(|service| {
        CreateQueuePair { service, ..c }
    }).to_vec()),
    "DEV-3-82" => |h| queue_pairs(h, BadParameter, |c, _| [1 << 7, 1 << 15].map(|flags| {
        CreateQueuePair { flags, ..c }
    }).to_vec()),
    "DEV-3-83" => |h| queue_pairs(h, Unsupported, |c, _| [0, 2, 255].map(|transport| {
        CreateQueuePair { transport, ..c }
    }).to_vec()),
    "DEV-3-84" => services_not_agreed_on,
    "DEV-3-85" => |h| queue_pairs(h, BadNumber, |c, caps| vec![
        CreateQueuePair { port: caps.ports, ..c },
        CreateQueuePair { port: 255, ..c },
    ]),
    "DEV-3-86" => |h| queue_pairs(h, BadParameter, |c, caps| vec![
        CreateQueuePair { sq_log_blocks: caps.sq_max_log_blocks + 1, ..c },
        CreateQueuePair { sq_log_blocks: 255, ..c },
    ]),
    "DEV-3-87" => |h| queue_pairs(h, BadParameter, |c, caps| vec![
        CreateQueuePair { rq_log_entries: caps.rq_max_log_entries + 1, ..c },
        CreateQueuePair { rq_log_stride: RQ_MIN_LOG_STRIDE - 1, ..c },
        CreateQueuePair { rq_log_stride: RQ_MAX_LOG_STRIDE + 1, ..c },
    ]),
    "DEV-3-88" => |h| queue_pairs(h, BadParameter, |c, _| {
        let (mut askew, mut in_page) = (c, c);
        askew.buffer.length += 64;
        in_page.buffer.fbo = 32;
        vec![
            CreateQueuePair { record_offset: c.record_offset + 8, ..askew },
            CreateQueuePair { sq_offset: 8, ..c },
            CreateQueuePair { rq_offset: c.rq_offset - 32, ..c },
            in_page,
        ]
    }),
    "DEV-3-89" => |h| queue_pairs(h, BadParameter, |c, _| vec![
        CreateQueuePair { record_offset: c.record_offset + 64, ..c },
        CreateQueuePair { rq_offset: c.record_offset + 64, ..c },
        CreateQueuePair { sq_offset: !63, ..c },
    ]),
    "DEV-3-90" => |h| queue_pairs(h, BadParameter, |c, _| vec![
        CreateQueuePair { rq_offset: 0, ..c },
        CreateQueuePair { record_offset: 0, ..c },
        CreateQueuePair { record_offset: c.rq_offset, ..c },
    ]),
    "DEV-3-91" => |h| {
        let pages = h.device.register32(REG_DOORBELL_PAGES)?;
        h.start()?;
        let cq = h.create_cq()?;
        let mut command = h.qp_command(Service::Rc, &cq);
        command.doorbell_page = pages;
        h.refuse(&command, BadParameter)
    },
    "DEV-3-92" => |h| queue_pairs(h, NotFound, |c, caps| {
        let none = caps.cq_first + caps.cq_count - 1;
        vec![CreateQueuePair { send_cqn: none, ..c }, CreateQueuePair { receive_cqn: none, ..c }]
    }),
    "DEV-3-93" => shared_receive_queue_of_a_queue_pair,
    "DEV-3-94" => xrc_domains,
    "DEV-3-95" => who_has_no_shared_receive_queue,
    "DEV-3-144" => fields_without_meaning,
    "DEV-3-145" => overflow_and_priority,
    "DEV-3-146" => named_by_the_map,
    "DEV-3-147" => switched,
    "DEV-3-148" => |h| switches(h, BadParameter, |c, caps| vec![
        SwitchEventQueue { log_entries: c.log_entries - 1, ..c },
        SwitchEventQueue { log_entries: caps.eq_max_log_entries + 1, ..c },
        SwitchEventQueue { log_entries: u8::MAX, ..c },
    ]),
    "DEV-3-149" => |h| switches(h, BadParameter, |c, _| {
        let (mut short, mut askew) = (c, c);
        short.ring.length -= 1;
        askew.ring.fbo = 16;
        vec![short, askew]
    }),
    "DEV-3-150" => switched_again,
    "DEV-3-151" => map_in_one_step,
    "DEV-3-152" => |h| maps(h, BadParameter, |c, _| vec![
        SetVectorMap { sub_function: 11, ..c },
        SetVectorMap { sub_function: u8::MAX, ..c },
    ]),
    "DEV-3-153" => |h| maps(h, BadParameter, |c, _| vec![
        SetVectorMap { count: 0, ..c },
        SetVectorMap { count: VECTOR_MAP_ENTRIES as u16 + 1, ..c },
        SetVectorMap { first: VECTOR_MAP_PROCESSORS, ..c },
        SetVectorMap { first: u16::MAX, ..c },
    ]),
    "DEV-3-154" => |h| maps(h, BadParameter, |c, _| {
        let mut longer = c;
        longer.entries[VECTOR_MAP_ENTRIES - 1] = longer.entries[0];
        vec![longer]
    }),
    "DEV-3-155" => |h| maps(h, BadParameter, |c, messages| {
        let mut other = c;
        other.entries[0].message = messages;
        vec![other]
    }),
    "DEV-3-156" => map_of_no_queue,
    "DEV-3-157" => |h| maps(h, BadParameter, |c, _| vec![
        SetVectorMap { sub_function: SubFunction::Commands.number(), ..c },
    ]),
    "DEV-3-158" => map_is_read,
    "DEV-3-159" => processors,
    "DEV-3-160" => |h| {
        h.start_needing(FEATURE_LISTS)?;
        let right = allocation(h, TagKind::List);
        variants(h, right, BadParameter, |c, _| [0, MAX_PIECES as u32 + 1, u32::MAX]
            .map(|max_pages| AllocateTag { max_pages, ..c }).to_vec())
    },
    "DEV-3-161" => registrations_are_counted,
    "DEV-3-162" => early_uses_are_counted,
    "DEV-3-172" => counters_of_queue_pairs_are_added_up,
    "DEV-3-173" => |h| counted(h, |c| vec![
        QueryQueuePairCounters::zeroed(),
        QueryQueuePairCounters { count: COUNTED_QUEUE_PAIRS as u32 + 1, ..c },
        QueryQueuePairCounters { count: u32::MAX, ..c },
    ]),
    "DEV-3-174" => |h| counted(h, |c| {
        let mut longer = c;
        longer.qpns[COUNTED_QUEUE_PAIRS - 1] = c.qpns[0];
        vec![longer]
    }),
    "DEV-3-175" => counters_of_a_queue_pair_over_its_life,
    "DEV-3-176" => queue_pairs_count_what_they_do,
    "DEV-3-177" => queue_pairs_count_what_is_told,
    "DEV-3-178" => |h| caps(h, |c| {
        let offered = c.features & FEATURE_QP_COUNTERS != 0;
        (offered || c.qp_counters == 0) && c.qp_counters.checked_shr(c.counters).unwrap_or(0) == 0
    }),
    "DEV-3-179" => what_a_completion_queue_says,
    "DEV-3-180" => what_a_queue_pair_is_made_of,
    "DEV-3-181" => what_a_tag_says,
    "DEV-3-96" => what_a_queue_pair_says,
    "DEV-3-97" => destroyed_in_every_state,
    "DEV-3-98" => destroyed_queue_pair,
    "DEV-3-99" => taken_entry_is_flushed,
    "DEV-3-100" => replaced_region,
    "DEV-3-101" => replaced_allocation,
    "DEV-3-102" => |h| regions(h, BadNumber, |c, caps| [0, caps.tag_first + caps.tag_count]
        .map(|index| RegisterRegion { tag: Tag::new(index, 1).0, ..c }).to_vec()),
    "DEV-3-103" => |h| made_twice(h, |h| { let c = h.region_command(0, PAGE); h.entry(Op::RegisterRegion, &c) }),
    "DEV-3-104" => |h| regions(h, NotFound, |c, _| vec![RegisterRegion { flags: REGION_REPLACE, ..c }]),
    "DEV-3-105" => replaced_window,
    "DEV-3-106" => replaced_with_windows,
    "DEV-3-107" => |h| regions(h, BadParameter, |c, _| [1 << 8, 1 << 31]
        .map(|access| RegisterRegion { access, ..c }).to_vec()),
    "DEV-3-108" => |h| regions(h, BadParameter, |c, caps| {
        let mut long = c;
        long.buffer.length = caps.max_region + 1;
        vec![long]
    }),
    "DEV-3-109" => |h| regions(h, BadParameter, |c, _| vec![
        RegisterRegion { address: u64::MAX - PAGE + 2, ..c },
    ]),
    "DEV-3-110" => |h| regions(h, BadParameter, |c, _| [1 << 2, 1 << 31]
        .map(|flags| RegisterRegion { flags, ..c }).to_vec()),
    "DEV-3-111" => on_demand_descriptions,
    "DEV-3-112" => device_memory_descriptions,
    "DEV-3-113" => allocated_tag,
    "DEV-3-114" => |h| made_twice(h, |h| {
        let c = allocation(h, TagKind::Region);
        h.entry(Op::AllocateTag, &c)
    }),
    "DEV-3-115" => |h| allocations(h, |c, _| [0, 4, 255].map(|kind| AllocateTag { kind, ..c }).to_vec()),
    "DEV-3-116" => |h| allocations(h, |c, caps| [0, caps.max_fast_register_pages + 1]
        .map(|max_pages| AllocateTag { max_pages, ..c }).to_vec()),
    "DEV-3-117" => |h| allocations(h, |c, _| vec![
        AllocateTag { kind: TagKind::Window2B.number(), max_pages: 1, ..c },
    ]),
    "DEV-3-118" => released_tag,
    "DEV-3-119" => released_by_an_old_tag,
    "DEV-3-120" => released_by_any_instance,
    "DEV-3-121" => released_with_windows,
    "DEV-3-122" => gid_table,
    "DEV-3-123" => gid_of_a_connection,
    "DEV-3-124" => |h| gids(h, BadNumber, |c, caps| vec![SetGid { index: caps.max_gid, ..c }]),
    "DEV-3-125" => |h| gids(h, BadParameter, |c, _| [4096, 0xfffe].map(|vlan| SetGid { vlan, ..c }).to_vec()),
    "DEV-3-126" => port_mtu,
    "DEV-3-127" => groups,
    "DEV-3-128" => |h| members(h, |_, gid| { *gid = PEER_GID; BadParameter }),
    "DEV-3-129" => group_of_a_connection,
    "DEV-3-130" => member_twice,
    "DEV-3-131" => detached_twice,
    "DEV-3-132" => too_many_groups,
    "DEV-3-133" => destroyed_member,
    "DEV-3-134" => faults_are_taken,
    "DEV-3-135" => faults_without_a_reply,
    "DEV-3-136" => next_fault_is_told,
    "DEV-3-137" => resolved_faults,
    "DEV-3-138" => |h| faults(h, ResolveFault { failed: 2, ..ResolveFault::zeroed() }, BadParameter),
    "DEV-3-139" => |h| faults(h, ResolveFault { token: 77, ..ResolveFault::zeroed() }, NotFound),
    "DEV-3-140" => faults_go_with_their_queue_pair,
    "DEV-3-141" => no_access_after_invalidation,
    "DEV-3-142" => |h| {
        invalidations(h, NotFound, |c| c.tag ^= 1)?;
        invalidation_of_a_failed_tag(h)
    },
    "DEV-3-143" => |h| invalidations(h, BadParameter, |c| c.count = 1 << 40),
}

/// The completion queue that [`made_twice`] has made.
const FIRST_CQ: u32 = u32::MAX;

fn commands_in_order_once(host: &mut Host) -> Outcome {
    host.start()?;
    let cookies: Vec<u32> = (0..8)
        .map(|_| {
            let entry = host.bare_entry(Op::Nop);
            host.write_command(&entry);
            entry.cookie
        })
        .collect();
    host.ring_control()?;
    for cookie in cookies {
        let event = host.event(EQ_CONTROL, EventCode::CommandDone, cookie)?;
        ensure_eq!(event.param0, 0, "the status of a Nop");
    }
    host.no_event(EQ_CONTROL)
}

fn bad_index(host: &mut Host, index: fn(u32, u32) -> u32) -> Outcome {
    host.start()?;
    host.nop()?;
    let index = index(host.commands, 32);
    host.device.doorbell(0, DOORBELL_CONTROL, index.into())?;
    host.is_fatal(FatalCode::BadCommandIndex)
}

fn the_same_index(host: &mut Host) -> Outcome {
    host.start()?;
    host.ring_control()?;
    host.ring_control()?;
    host.no_event(EQ_CONTROL)?;
    host.is_alive()
}

fn commands_of_one_object(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(4);
    let number = ObjectNumber {
        number: command.cqn,
        reserved: 0,
    };
    let mut entries = Vec::new();
    for _ in 0..4 {
        entries.push(host.entry(Op::CreateCompletionQueue, &command));
        entries.push(host.entry(Op::DestroyCompletionQueue, &number));
    }
    for entry in &entries {
        host.write_command(entry);
    }
    host.ring_control()?;
    for entry in &entries {
        let answer = host.answer(entry.cookie)?;
        ensure_eq!(answer.param0, 0, "the status of command {}", entry.opcode);
    }
    Ok(())
}

fn each_command_is_answered_once(host: &mut Host) -> Outcome {
    host.start()?;
    let timeout = Duration::from_millis(host.caps.command_timeout.into());
    for round in 0..100 {
        let start = Instant::now();
        host.nop()?;
        ensure!(
            start.elapsed() <= timeout,
            "command {round} took {:?}",
            start.elapsed()
        );
    }
    host.no_event(EQ_CONTROL)
}

fn what_an_answer_says(host: &mut Host) -> Outcome {
    host.start()?;
    let mut entry = host.query_entry(Op::QueryDevice, None, 256);
    entry.cookie = 0xdead_beef;
    let answer = host.submit(&entry)?;
    ensure_eq!(answer, (Done, 256), "status and length of the reply");
    // However short the buffer is.
    let entry = host.query_entry(Op::QueryDevice, None, 8);
    ensure_eq!(
        host.submit(&entry)?,
        (Done, 256),
        "status and length of the reply"
    );
    let entry = host.bare_entry(Op::Nop);
    ensure_eq!(
        host.submit(&entry)?,
        (Done, 0),
        "status and length of no reply"
    );
    let mut entry = host.query_entry(Op::QueryDevice, None, 8);
    entry.flags = 8;
    ensure_eq!(
        host.submit(&entry)?,
        (BadParameter, 0),
        "of a refused query"
    );
    Ok(())
}

fn control_ring_gone(host: &mut Host) -> Outcome {
    let base = 0x1000_0000;
    let map = host.map(base, 4 * PAGE)?;
    let mut boot = host.boot()?;
    boot.block.cqp_ring = base;
    host.enable(&boot)?;
    host.unmap(map)?;
    host.device.doorbell(0, DOORBELL_CONTROL, 1)?;
    host.is_fatal(FatalCode::HostMemory)
}

/// A command that would succeed, with its entry spoiled; the second argument is an address.
fn entry(host: &mut Host, status: CommandStatus, spoil: fn(&mut CommandEntry, u64)) -> Outcome {
    host.start()?;
    let command = host.cq_command(6);
    let mut entry = host.entry(Op::CreateCompletionQueue, &command);
    let at = host.memory.allocate(PAGE);
    spoil(&mut entry, at);
    host.submit_for(&entry, status)?;
    let entry = host.entry(Op::CreateCompletionQueue, &command);
    host.submit_for(&entry, Done)
}

/// The same, indirect.
fn indirect(host: &mut Host, status: CommandStatus, spoil: fn(&mut CommandEntry)) -> Outcome {
    host.start()?;
    let command = host.cq_command(6);
    let at = host.memory.allocate(2 * PAGE);
    host.memory.put(at, &command);
    let mut entry = host.entry(Op::CreateCompletionQueue, &command);
    entry.payload.fill(0);
    (entry.request, entry.flags) = (at, COMMAND_INDIRECT);
    spoil(&mut entry);
    host.submit_for(&entry, status)?;
    let gone = if status == Done { Done } else { NotFound };
    host.object(Op::DestroyCompletionQueue, command.cqn, gone)
}

fn longer_requests(host: &mut Host) -> Outcome {
    host.start()?;
    let command = host.cq_command(6);
    let mut entry = host.entry(Op::CreateCompletionQueue, &command);
    entry.request_length += 16;
    entry.payload[size_of::<CreateCompletionQueue>() + 15] = 1;
    host.submit_for(&entry, BadParameter)?;
    entry.payload[size_of::<CreateCompletionQueue>() + 15] = 0;
    host.submit_for(&entry, Done)
}

fn misplaced_requests(host: &mut Host) -> Outcome {
    indirect(host, BadParameter, |entry| entry.request = 0)?;
    host.device.control_reset()?;
    indirect(host, BadParameter, |entry| entry.request += 32)
}

fn reserved_fields(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let mut queue = host.cq_command(6);
    queue.reserved1 = [1; 3];
    host.refuse(&queue, BadParameter)?;
    queue.reserved1 = [0; 3];
    queue.buffer.reserved = 1;
    host.refuse(&queue, BadParameter)?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.reserved[2] = 1 << 40;
    host.refuse(&command, BadParameter)?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Init, &connection)?;
    let good = Host::modify(Service::Rc, qp.qpn, QueuePairStateCode::Rtr, &connection);
    let mut bad = good;
    bad.address_vector.reserved = 1;
    host.refuse(&bad, BadParameter)?;
    bad = good;
    bad.reserved_migration = 1;
    host.refuse(&bad, BadParameter)?;
    bad = good;
    bad.reserved_alternate.mac[0] = 2;
    host.refuse(&bad, BadParameter)?;
    let object = ObjectNumber {
        number: cq.cqn,
        reserved: 1,
    };
    let entry = host.entry(Op::DestroyCompletionQueue, &object);
    host.submit_for(&entry, BadParameter)?;
    host.execute(&good)
}

fn replies_to_no_query(host: &mut Host) -> Outcome {
    entry(host, BadParameter, |entry, at| entry.reply = at)?;
    host.device.control_reset()?;
    entry(host, BadParameter, |entry, _| entry.reply_length = 64)
}

/// A query with its entry spoiled.
fn query(host: &mut Host, status: CommandStatus, spoil: fn(&mut CommandEntry)) -> Outcome {
    host.start()?;
    let mut entry = host.query_entry(Op::QueryDevice, None, 256);
    spoil(&mut entry);
    host.submit_for(&entry, status)?;
    host.is_alive()
}

fn misplaced_replies(host: &mut Host) -> Outcome {
    query(host, BadParameter, |entry| entry.reply = 0)?;
    host.device.control_reset()?;
    query(host, BadParameter, |entry| entry.reply += 32)
}

fn short_and_long_replies(host: &mut Host) -> Outcome {
    host.start()?;
    let at = host.reply();
    let whole = host.caps.as_bytes().to_vec();
    for length in [8u32, 100, 256, 1024] {
        host.memory.fill(at, PAGE, 0xee);
        let entry = host.query_entry(Op::QueryDevice, None, length);
        host.submit_for(&entry, Done)?;
        let written = whole.len().min(length as usize);
        let found = host.memory.bytes(at, PAGE);
        ensure!(
            found[..written] == whole[..written],
            "the first {written} bytes"
        );
        ensure!(
            found[written..].iter().all(|b| *b == 0xee),
            "bytes beyond {written}"
        );
    }
    Ok(())
}

fn reply_before_answer(host: &mut Host) -> Outcome {
    host.start()?;
    for _ in 0..200 {
        host.memory.fill(host.reply(), 256, 0xee);
        let caps: DeviceCaps = host.query(Op::QueryDevice, None)?;
        ensure!(caps == host.caps, "the reply when its answer came");
    }
    Ok(())
}

fn reserved_of_replies(host: &mut Host) -> Outcome {
    host.start()?;
    ensure!(
        host.caps.reserved_is_zero(),
        "reserved fields of DeviceCaps"
    );
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    host.memory.fill(host.reply(), PAGE, 0xff);
    let state: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    ensure!(
        state.reserved_is_zero(),
        "reserved fields of QueuePairState"
    );
    Ok(())
}

fn refused_commands_change_nothing(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Init, &connection)?;
    let before: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    // Right in all but its last attribute.
    let mut bad = Host::modify(Service::Rc, qp.qpn, QueuePairStateCode::Rtr, &connection);
    bad.min_rnr_timer = 32;
    host.refuse(&bad, BadParameter)?;
    let after: QueuePairState = host.query(Op::QueryQueuePair, Some(qp.qpn))?;
    ensure!(
        after == before,
        "the queue pair after a refused command: {after:x?}"
    );
    Ok(())
}

fn several_mistakes(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    (command.qpn, command.service, command.flags) = (u32::MAX, 99, u16::MAX);
    let entry = host.entry(Op::CreateQueuePair, &command);
    let (status, _) = host.submit(&entry)?;
    Host::ensure_one_of(
        &status,
        &[BadNumber, BadParameter, Unsupported],
        "the status",
    )?;
    host.is_alive()
}

fn buffers_are_looked_at(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.buffer.length -= 1;
    host.refuse(&command, BadParameter)?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.buffer.page_shift = PAGE_SHIFT_MAX + 1;
    host.refuse(&command, BadParameter)?;
    let mut command = host.cq_command(6);
    command.buffer.order = 3;
    host.refuse(&command, BadParameter)
}

fn ranges(host: &mut Host) -> Outcome {
    host.start()?;
    let caps = host.caps;
    ensure!(caps.qp_first > 1, "queue pairs begin at {}", caps.qp_first);
    ensure!(caps.tag_first > 0, "tags begin at 0");
    for (first, count) in [
        (caps.qp_first, caps.qp_count),
        (caps.cq_first, caps.cq_count),
        (caps.srq_first, caps.srq_count),
        (caps.tag_first, caps.tag_count),
    ] {
        let end = u64::from(first) + u64::from(count);
        ensure!(end <= 1 << 24, "a range ends at {end:#x}");
    }
    Ok(())
}

fn made_out_of_range(host: &mut Host) -> Outcome {
    host.start()?;
    let caps = host.caps;
    let cq = host.create_cq()?;
    let mut queue = host.cq_command(4);
    queue.cqn = caps.cq_first + caps.cq_count;
    host.refuse(&queue, BadNumber)?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.qpn = caps.qp_first + caps.qp_count;
    host.refuse(&command, BadNumber)?;
    let mut region = host.region_command(0, PAGE);
    region.tag = Tag::new(caps.tag_first + caps.tag_count, 0).0;
    host.refuse(&region, BadNumber)?;
    let mut eq = host.eq_command(9, 0);
    eq.eqn = caps.max_eq;
    host.refuse(&eq, BadNumber)?;
    if host.features & FEATURE_SRQ != 0 {
        let mut srq = host.srq_command();
        srq.srqn = caps.srq_first + caps.srq_count;
        host.refuse(&srq, BadNumber)?;
    }
    Ok(())
}

/// Commands about objects, and the number for each that lies `beyond` its range or is the last in it.
fn about_objects(caps: &DeviceCaps, beyond: u32) -> [(Op, u32); 6] {
    let last = |first: u32, count: u32| first + count - 1 + beyond;
    let qp = last(caps.qp_first, caps.qp_count);
    let tag = last(caps.tag_first, caps.tag_count) << 8;
    [
        (Op::QueryQueuePair, qp),
        (Op::DestroyQueuePair, qp),
        (Op::ModifyQueuePair, qp),
        (
            Op::DestroyCompletionQueue,
            last(caps.cq_first, caps.cq_count),
        ),
        (Op::DestroyEventQueue, u32::from(caps.max_eq) - 1 + beyond),
        (Op::ReleaseTag, tag),
    ]
}

fn named(host: &mut Host, beyond: u32, status: CommandStatus) -> Outcome {
    host.start()?;
    for (opcode, number) in about_objects(&host.caps.clone(), beyond) {
        let entry = match opcode {
            Op::QueryQueuePair => host.query_entry(opcode, Some(number), 192),
            Op::ModifyQueuePair => {
                let to = QueuePairStateCode::Reset;
                let connection = host.to_neighbour();
                let command = Host::modify(Service::Rc, number, to, &connection);
                host.entry(opcode, &command)
            }
            _ => host.entry(
                opcode,
                &ObjectNumber {
                    number,
                    reserved: 0,
                },
            ),
        };
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn named_out_of_range(host: &mut Host) -> Outcome {
    named(host, 1, BadNumber)
}

fn named_and_not_there(host: &mut Host) -> Outcome {
    named(host, 0, NotFound)
}

fn shared_receive_queue_not_there(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let last = host.caps.srq_first + host.caps.srq_count - 1;
    for (srqn, status) in [(last, NotFound), (last + 1, BadNumber)] {
        host.refuse(&ModifySrq { srqn, limit: 0 }, status)?;
        host.object(Op::DestroySrq, srqn, status)?;
        let entry = host.query_entry(Op::QuerySrq, Some(srqn), 64);
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn others_not_there(host: &mut Host) -> Outcome {
    host.start()?;
    let caps = host.caps;
    let cq = host.create_cq()?;
    for (eqn, status) in [(caps.max_eq - 1, NotFound), (caps.max_eq, BadNumber)] {
        let mut queue = host.cq_command(4);
        queue.eqn = eqn;
        host.refuse(&queue, status)?;
        let command = ModifyCompletionQueue {
            cqn: cq.cqn,
            eqn,
            ..ModifyCompletionQueue::zeroed()
        };
        host.refuse(&command, status)?;
    }
    let end = caps.cq_first + caps.cq_count;
    for (cqn, status) in [(end - 1, NotFound), (end, BadNumber)] {
        let mut command = host.qp_command(Service::Rc, &cq);
        command.send_cqn = cqn;
        host.refuse(&command, status)?;
    }
    Ok(())
}

fn ports(host: &mut Host) -> Outcome {
    host.start()?;
    let port = host.caps.ports;
    let mut command = SetGid {
        gid: PEER_GID,
        index: 3,
        vlan: VLAN_NONE,
        ..SetGid::zeroed()
    };
    command.port = port;
    host.refuse(&command, BadNumber)?;
    let counters = QueryCounters {
        port,
        reserved: [0; 7],
    };
    let mut entry = host.entry(Op::QueryCounters, &counters);
    (entry.reply, entry.reply_length) = (host.reply(), 128);
    host.submit_for(&entry, BadNumber)?;
    if host.features & FEATURE_PORT_MTU != 0 {
        let command = SetPort {
            log_mtu: 10,
            port,
            reserved: [0; 6],
        };
        host.refuse(&command, BadNumber)?;
    }
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.port = port;
    host.refuse(&command, BadNumber)
}

fn numbers_are_used_again(host: &mut Host) -> Outcome {
    host.start()?;
    let queue = host.cq_command(4);
    let region = host.region_command(0, PAGE);
    for _ in 0..3 {
        host.execute(&queue)?;
        let command = host.qp_command(Service::Rc, &Cq::new(&queue));
        host.execute(&command)?;
        host.destroy(Op::DestroyQueuePair, command.qpn)?;
        host.execute(&command)?;
        host.destroy(Op::DestroyQueuePair, command.qpn)?;
        host.destroy(Op::DestroyCompletionQueue, queue.cqn)?;
        host.execute(&region)?;
        host.destroy(Op::ReleaseTag, region.tag)?;
    }
    Ok(())
}

fn nop_waits(host: &mut Host) -> Outcome {
    host.start()?;
    // Something long in front of it: a region with many pages.
    let command = host.region_command(0, 4 << 20);
    let region = host.entry(Op::RegisterRegion, &command);
    let nop = host.bare_entry(Op::Nop);
    host.write_command(&region);
    host.write_command(&nop);
    host.ring_control()?;
    host.event(EQ_CONTROL, EventCode::CommandDone, region.cookie)?;
    host.event(EQ_CONTROL, EventCode::CommandDone, nop.cookie)?;
    Ok(())
}

fn caps_do_not_change(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    host.create_qp(Service::Rc, &cq)?;
    let again: DeviceCaps = host.query(Op::QueryDevice, None)?;
    ensure!(
        again == host.caps,
        "what the device can do has changed: {again:x?}"
    );
    Ok(())
}

fn caps(host: &mut Host, are_right: fn(&DeviceCaps) -> bool) -> Outcome {
    host.start()?;
    ensure!(are_right(&host.caps), "{:x?}", host.caps);
    Ok(())
}

fn sizes_are_right(caps: &DeviceCaps) -> bool {
    (1..=SQ_MAX_LOG_BLOCKS).contains(&caps.sq_max_log_blocks)
        && (1..=RQ_MAX_LOG_ENTRIES).contains(&caps.rq_max_log_entries)
        && (1..=CQ_MAX_LOG_ENTRIES).contains(&caps.cq_max_log_entries)
        && (1..=EQ_MAX_LOG_ENTRIES).contains(&caps.eq_max_log_entries)
        && (1..=MAX_SGE).contains(&caps.max_sge.into())
        && (1..=MAX_INLINE).contains(&(caps.max_inline as usize))
        && (1..=MAX_MESSAGE.into()).contains(&caps.max_message)
}

fn number_of_counters(host: &mut Host) -> Outcome {
    host.start()?;
    let mut entry = host.entry(Op::QueryCounters, &QueryCounters::zeroed());
    (entry.reply, entry.reply_length) = (host.reply(), 4096);
    let answer = host.submit(&entry)?;
    let length = 8 * u64::from(host.caps.counters);
    ensure_eq!(answer, (Done, length), "the length of all counters");
    Ok(())
}

fn counters_are_written(host: &mut Host) -> Outcome {
    host.start()?;
    ensure!(
        host.caps.counters as usize >= COUNTER_NAMES.len(),
        "too few counters"
    );
    let mut cq = host.create_cq()?;
    let (mut a, mut b) = host.pair(Service::Rc, &cq)?;
    let before = host.counters()?;
    host.post_receive(&mut b, &[])?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    host.completion(&mut cq)?;
    let after = host.counters()?;
    let rise = |name: &str| {
        let at = COUNTER_NAMES.iter().position(|other| *other == name);
        at.map_or(0, |at| after[at] - before[at])
    };
    ensure_eq!(rise("completions"), 2, "completions");
    ensure!(
        rise("tx_packets") >= 2,
        "tx_packets: {}",
        rise("tx_packets")
    );
    ensure!(
        rise("rx_packets") >= 2,
        "rx_packets: {}",
        rise("rx_packets")
    );
    ensure_eq!(rise("rx_icrc_errors"), 0, "rx_icrc_errors");
    Ok(())
}

fn counters_never_go_back(host: &mut Host) -> Outcome {
    counters_are_written(host)?;
    let before = host.counters()?;
    host.device.control_reset()?;
    host.start()?;
    let after = host.counters()?;
    let back = before
        .iter()
        .zip(&after)
        .any(|(before, after)| after < before);
    ensure!(
        !back,
        "counters went back by a reset: {before:?}, {after:?}"
    );
    Ok(())
}

/// Asks for counters of queue pairs.
fn of_queue_pairs(qpns: &[u32]) -> QueryQueuePairCounters {
    let mut command = QueryQueuePairCounters::zeroed();
    command.count = qpns.len() as u32;
    command.qpns[..qpns.len()].copy_from_slice(qpns);
    command
}

/// One of the counters, by name.
fn rise_of(counters: &[u64], name: &str) -> u64 {
    let at = COUNTER_NAMES.iter().position(|other| *other == name);
    at.and_then(|at| counters.get(at)).copied().unwrap_or(0)
}

/// Refuses spoiled variants of a query for the counters of a queue pair that is there.
fn counted(
    host: &mut Host,
    variants: fn(QueryQueuePairCounters) -> Vec<QueryQueuePairCounters>,
) -> Outcome {
    host.start_needing(FEATURE_QP_COUNTERS)?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    let right = of_queue_pairs(&[qp.qpn]);
    for command in variants(right) {
        let mut entry = host.entry(Op::QueryQueuePairCounters, &command);
        (entry.reply, entry.reply_length) = (host.reply(), 4096);
        host.submit_for(&entry, BadParameter)?;
    }
    host.qp_counters(&right).map(|_| ())
}

/// Two connections of the device with itself, of which the first has sent a message.
fn counted_traffic(host: &mut Host) -> Outcome<[Qp; 4]> {
    host.start_needing(FEATURE_QP_COUNTERS)?;
    let mut cq = host.create_cq()?;
    let (mut a, mut b) = host.pair(Service::Rc, &cq)?;
    let (c, d) = host.pair(Service::Rc, &cq)?;
    host.post_receive(&mut b, &[])?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    host.completion(&mut cq)?;
    Ok([a, b, c, d])
}

fn counters_of_queue_pairs_are_added_up(host: &mut Host) -> Outcome {
    let [a, b, ..] = counted_traffic(host)?;
    let mut entry = host.entry(Op::QueryQueuePairCounters, &of_queue_pairs(&[a.qpn]));
    (entry.reply, entry.reply_length) = (host.reply(), 4096);
    let length = 8 * u64::from(host.caps.counters);
    ensure_eq!(host.submit(&entry)?, (Done, length), "status and length");
    let of_a = host.qp_counters(&of_queue_pairs(&[a.qpn]))?;
    let of_b = host.qp_counters(&of_queue_pairs(&[b.qpn]))?;
    let sum = |factor: u64| -> Vec<u64> {
        let both = of_a.iter().zip(&of_b);
        both.map(|(a, b)| factor * a + b).collect()
    };
    let both = host.qp_counters(&of_queue_pairs(&[a.qpn, b.qpn]))?;
    ensure_eq!(both, sum(1), "the counters of both");
    let twice = host.qp_counters(&of_queue_pairs(&[a.qpn, b.qpn, a.qpn]))?;
    ensure_eq!(twice, sum(2), "with one of them named twice");
    for (number, status) in [
        (host.caps.qp_first + host.caps.qp_count - 1, NotFound),
        (host.caps.qp_first + host.caps.qp_count, BadNumber),
    ] {
        let command = of_queue_pairs(&[a.qpn, number]);
        let mut entry = host.entry(Op::QueryQueuePairCounters, &command);
        (entry.reply, entry.reply_length) = (host.reply(), 4096);
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn counters_of_a_queue_pair_over_its_life(host: &mut Host) -> Outcome {
    let [a, _, c, _] = counted_traffic(host)?;
    let fresh = host.qp_counters(&of_queue_pairs(&[c.qpn]))?;
    ensure!(
        fresh.iter().all(|counter| *counter == 0),
        "a queue pair that has done nothing: {fresh:?}"
    );
    let asked = of_queue_pairs(&[a.qpn]);
    let before = host.qp_counters(&asked)?;
    let mut reset = ModifyQueuePair::zeroed();
    (reset.qpn, reset.mask) = (a.qpn, MODIFY_STATE);
    reset.state = QueuePairStateCode::Reset.number();
    host.execute(&reset)?;
    let after = host.qp_counters(&asked)?;
    let back = before
        .iter()
        .zip(&after)
        .any(|(before, after)| after < before);
    ensure!(!back, "back by a reset: {before:?}, {after:?}");
    Ok(())
}

fn queue_pairs_count_what_they_do(host: &mut Host) -> Outcome {
    let [a, b, ..] = counted_traffic(host)?;
    let has = |host: &Host, name: &str| {
        let at = COUNTER_NAMES.iter().position(|other| *other == name);
        at.is_some_and(|at| host.caps.qp_counters & (1 << at) != 0)
    };
    for (qp, what) in [(&a, "the sender"), (&b, "the receiver")] {
        let counters = host.qp_counters(&of_queue_pairs(&[qp.qpn]))?;
        for (name, exactly) in [
            ("completions", Some(1)),
            ("tx_packets", None),
            ("rx_packets", None),
        ] {
            let value = rise_of(&counters, name);
            let right = exactly.map_or(value >= 1, |exactly| value == exactly);
            ensure!(
                right || !has(host, name),
                "{name} of {what} of one message: {value}"
            );
        }
    }
    Ok(())
}

fn queue_pairs_count_what_is_told(host: &mut Host) -> Outcome {
    let [a, b, ..] = counted_traffic(host)?;
    let counters = host.qp_counters(&of_queue_pairs(&[a.qpn, b.qpn]))?;
    for (at, counter) in counters.iter().enumerate() {
        ensure!(
            host.caps.qp_counters & (1 << at) != 0 || *counter == 0,
            "counter {at} is {counter}, and queue pairs have none such"
        );
    }
    Ok(())
}

fn what_a_completion_queue_says(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_CONTEXTS)?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    host.execute(&ModifyCompletionQueue {
        cqn: cq.cqn,
        eqn: EQ_NONE,
        moderation_count: 3,
        moderation_microseconds: 40,
        ..ModifyCompletionQueue::zeroed()
    })?;
    let entry = host.query_entry(Op::QueryCompletionQueue, Some(cq.cqn), 4096);
    ensure_eq!(host.submit(&entry)?, (Done, 64), "status and length");
    let state: CompletionQueueState = host.query(Op::QueryCompletionQueue, Some(cq.cqn))?;
    ensure!(state.reserved_is_zero(), "reserved fields");
    ensure_eq!(
        (state.cqn, state.eqn),
        (cq.cqn, EQ_NONE),
        "queue and handler"
    );
    ensure_eq!(state.users, 2, "its users: both queues of a queue pair");
    ensure_eq!((state.producer, state.consumer), (0, 0), "its indices");
    ensure_eq!(
        (state.moderation_count, state.moderation_microseconds),
        (3, 40),
        "moderation"
    );
    host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    let last = host.caps.cq_first + host.caps.cq_count - 1;
    for (number, status) in [(last, NotFound), (last + 1, BadNumber)] {
        let entry = host.query_entry(Op::QueryCompletionQueue, Some(number), 64);
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn what_a_queue_pair_is_made_of(host: &mut Host) -> Outcome {
    host.needs(FEATURE_CONTEXTS)?;
    for agreed in [true, false] {
        match agreed {
            true => host.start()?,
            false => {
                host.device.control_reset()?;
                host.start_with(!FEATURE_CONTEXTS)?;
            }
        }
        let cq = host.create_cq()?;
        let command = host.qp_command(Service::Rc, &cq);
        host.execute(&command)?;
        let state: QueuePairState = host.query(Op::QueryQueuePair, Some(command.qpn))?;
        ensure!(state.reserved_is_zero(), "reserved fields");
        let expected = match agreed {
            true => QueuePairState {
                pd: command.pd,
                send_cqn: command.send_cqn,
                receive_cqn: command.receive_cqn,
                doorbell_page: command.doorbell_page,
                flags: command.flags,
                service: command.service,
                transport: command.transport,
                sq_log_blocks: command.sq_log_blocks,
                rq_log_entries: command.rq_log_entries,
                rq_log_stride: command.rq_log_stride,
                attributes: state.attributes,
                ..QueuePairState::zeroed()
            },
            false => QueuePairState {
                attributes: state.attributes,
                ..QueuePairState::zeroed()
            },
        };
        ensure!(state == expected, "with the feature {agreed}: {state:x?}");
    }
    Ok(())
}

fn what_a_tag_says(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_CONTEXTS)?;
    let command = host.region_command(ACCESS_LOCAL_WRITE, PAGE);
    host.execute(&command)?;
    let tag = Tag(command.tag);
    let entry = host.query_entry(Op::QueryTag, Some(tag.0), 4096);
    ensure_eq!(host.submit(&entry)?, (Done, 64), "status and length");
    for instance in [tag.instance(), tag.instance().wrapping_add(1)] {
        let asked = Tag::new(tag.index(), instance).0;
        let state: TagState = host.query(Op::QueryTag, Some(asked))?;
        let expected = TagState {
            tag: command.tag,
            pd: command.pd,
            access: command.access,
            address: command.address,
            length: command.buffer.length,
            kind: TagKind::Region.number(),
            valid: 1,
            ..TagState::zeroed()
        };
        ensure!(state == expected, "the tag: {state:x?}");
    }
    host.destroy(Op::ReleaseTag, command.tag)?;
    let beyond = Tag::new(host.caps.tag_first + host.caps.tag_count, 0).0;
    for (number, status) in [(command.tag, NotFound), (beyond, BadNumber)] {
        let entry = host.query_entry(Op::QueryTag, Some(number), 64);
        host.submit_for(&entry, status)?;
    }
    Ok(())
}

fn clock(host: &mut Host) -> Outcome {
    host.start()?;
    let entry = host.query_entry(Op::QueryClock, None, 64);
    if host.caps.clock_khz == 0 {
        return host.submit_for(&entry, Unsupported);
    }
    ensure_eq!(
        host.submit(&entry)?,
        (Done, 64),
        "status and length of the reply"
    );
    let first: ClockReading = host.query(Op::QueryClock, None)?;
    wait_for("the clock to go on", || {
        let later: ClockReading = host.query(Op::QueryClock, None)?;
        ensure!(later.ticks >= first.ticks, "the clock went back");
        Ok((later.ticks > first.ticks).then_some(()))
    })
}

fn new_event_queue(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let mut queue = host.cq_command(4);
    queue.eqn = 3;
    host.execute(&queue)?;
    let mut cq = Cq::new(&queue);
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    host.arm_cq(&cq, 1, false)?;
    host.move_qp(a.qpn, QueuePairStateCode::Error)?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    let at = host.queues[&3].slot(0);
    wait_for("the event at index 0", || {
        Ok((host.memory.load32(at) != 0).then_some(()))
    })?;
    // Unarmed: no interrupt.
    host.no_interrupt(3)
}

type Variants<C> = fn(C, &DeviceCaps) -> Vec<C>;

/// Variants of a right command, each of which must be refused; the right one is not.
fn variants<C: Command>(
    host: &mut Host,
    right: C,
    status: CommandStatus,
    of: Variants<C>,
) -> Outcome {
    let caps = host.caps;
    for command in of(right, &caps) {
        host.refuse(&command, status)?;
    }
    host.execute(&right)
}

fn event_queues(host: &mut Host, status: CommandStatus, of: Variants<CreateEventQueue>) -> Outcome {
    host.start()?;
    let right = host.eq_command(5, 0);
    variants(host, right, status, of)
}

fn event_queue_messages(host: &mut Host) -> Outcome {
    host.start()?;
    let messages = host.device.register32(REG_MESSAGES)? as u16;
    for message in [messages, u16::MAX] {
        let command = host.eq_command(5, message);
        host.refuse(&command, BadParameter)?;
    }
    let command = host.eq_command(5, messages - 1);
    host.execute(&command)
}

fn destroyed_event_queue(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let mut queue = host.cq_command(4);
    queue.eqn = 3;
    host.execute(&queue)?;
    let mut cq = Cq::new(&queue);
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    host.arm_eq(3)?;
    host.arm_cq(&cq, 0, false)?;
    let move_away = ModifyCompletionQueue {
        cqn: cq.cqn,
        eqn: EQ_FIRST_HANDLER,
        ..ModifyCompletionQueue::zeroed()
    };
    host.execute(&move_away)?;
    host.destroy(Op::DestroyEventQueue, 3)?;
    host.move_qp(a.qpn, QueuePairStateCode::Error)?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    host.no_event(3)?;
    host.no_interrupt(3)?;
    host.object(Op::DestroyEventQueue, 0, BadNumber)
}

fn modified_event_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let messages = host.device.register32(REG_MESSAGES)? as u16;
    let mut command = ModifyEventQueue {
        eqn: EQ_CONTROL,
        message: messages,
        ..ModifyEventQueue::zeroed()
    };
    host.refuse(&command, BadParameter)?;
    if host.device.own_messages() < 5 {
        return Ok(());
    }
    // Armed, it stays armed, and raises the new message.
    host.arm_eq(EQ_CONTROL)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)?;
    command.message = 4;
    host.execute(&command)?;
    if let Some(ring) = host.queues.get_mut(&EQ_CONTROL) {
        ring.message = 4;
    }
    host.arm_eq(EQ_CONTROL)?;
    host.nop()?;
    host.interrupt(EQ_CONTROL)
}

fn new_completion_queue(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    host.move_qp(a.qpn, QueuePairStateCode::Error)?;
    host.post(&mut a, &Work::send(&[]))?;
    // At index 0, and unarmed.
    host.completion(&mut cq)?;
    host.no_event(EQ_FIRST_HANDLER)
}

/// A right command given twice.
fn made_twice(host: &mut Host, make: fn(&mut Host) -> CommandEntry) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let mut entry = make(host);
    if entry.opcode == Op::CreateQueuePair.number() {
        // Its completion queues.
        let cqn = cq.cqn.to_le_bytes();
        entry.payload[8..12].copy_from_slice(&cqn);
        entry.payload[12..16].copy_from_slice(&cqn);
    }
    host.submit_for(&entry, Done)?;
    host.submit_for(&entry, Exists)
}

fn completion_queues(
    host: &mut Host,
    status: CommandStatus,
    of: Variants<CreateCompletionQueue>,
) -> Outcome {
    host.start()?;
    let right = host.cq_command(6);
    variants(host, right, status, of)
}

fn completion_queue_handlers(host: &mut Host) -> Outcome {
    host.start()?;
    let mut command = host.cq_command(6);
    command.eqn = host.caps.max_eq - 1;
    host.refuse(&command, NotFound)?;
    command.eqn = EQ_NONE;
    host.execute(&command)
}

fn bind_cq(host: &mut Host, cq: &Cq, eqn: u16) -> Outcome {
    host.execute(&ModifyCompletionQueue {
        cqn: cq.cqn,
        eqn,
        ..ModifyCompletionQueue::zeroed()
    })
}

fn bound_elsewhere(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 2, false)?;
    bind_cq(host, &cq, 3)?;
    complete(host, &mut cq, &mut qp)?;
    let event = host.event(3, EventCode::Completion, cq.cqn)?;
    ensure_eq!(event.param0, 2, "the sequence of the arming");
    // Without a handler it is polled only; the arming is kept.
    bind_cq(host, &cq, EQ_NONE)?;
    host.arm_cq(&cq, 3, false)?;
    complete(host, &mut cq, &mut qp)?;
    host.no_event(3)?;
    host.no_event(EQ_FIRST_HANDLER)?;
    bind_cq(host, &cq, EQ_FIRST_HANDLER)?;
    let event = host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    ensure_eq!(event.param0, 3, "the sequence of the arming");
    Ok(())
}

fn no_event_on_the_old_queue(host: &mut Host) -> Outcome {
    host.start()?;
    host.create_eq(3, 3)?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    bind_cq(host, &cq, 3)?;
    for _ in 0..4 {
        host.arm_cq(&cq, 1, false)?;
        complete(host, &mut cq, &mut qp)?;
    }
    host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    host.no_event(EQ_FIRST_HANDLER)
}

fn resizes_that_are_refused(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_RESIZE_CQ)?;
    let cq = host.create_cq()?;
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    host.move_qp(a.qpn, QueuePairStateCode::Error)?;
    for _ in 0..3 {
        host.post(&mut a, &Work::send(&[]))?;
    }
    wait_for("three completions", || Ok(cq.at(&host.memory, 2).map(drop)))?;
    let right = ResizeCompletionQueue {
        cqn: cq.cqn,
        log_entries: 2,
        record_offset: 4 * 64,
        buffer: Buffer::contiguous(host.memory.allocate(PAGE), 4 * 64 + 64),
        ..ResizeCompletionQueue::zeroed()
    };
    let mut bad = right;
    (bad.log_entries, bad.record_offset) = (1, 2 * 64);
    host.refuse(&bad, BadParameter)?;
    bad = right;
    bad.record_offset = 64;
    host.refuse(&bad, BadParameter)?;
    bad = right;
    bad.log_entries = host.caps.cq_max_log_entries + 1;
    host.refuse(&bad, BadParameter)?;
    // A consumer index that is ahead of what was written.
    let record = right.buffer.root + u64::from(right.record_offset);
    host.memory.store32(record, 9);
    host.refuse(&right, BadParameter)?;
    host.memory.store32(record, 0);
    host.execute(&right)
}

fn completion_queue_in_use(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    host.object(Op::DestroyCompletionQueue, cq.cqn, Busy)?;
    host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    host.destroy(Op::DestroyCompletionQueue, cq.cqn)
}

fn new_queue_pair(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let command = host.qp_command(Service::Rc, &cq);
    let record = Qp::new(&command).record;
    host.memory.fill(record + 64, 8, 0x55);
    let qp = host.make_qp(&command)?;
    let record: QueuePairRecord = host.memory.get(record);
    ensure_eq!(
        (record.send_wake, record.receive_wake),
        (1, 0),
        "the wake words"
    );
    ensure_eq!(host.state(qp.qpn)?, QueuePairStateCode::Reset, "the state");
    Ok(())
}

fn queue_pairs(host: &mut Host, status: CommandStatus, of: Variants<CreateQueuePair>) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let right = host.qp_command(Service::Rc, &cq);
    variants(host, right, status, of)
}

fn queue_pair_1(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UD)?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.qpn = 1;
    host.refuse(&command, BadNumber)?;
    let mut command = host.qp_command(Service::Gsi, &cq);
    command.qpn = host.caps.qp_first;
    host.refuse(&command, BadNumber)?;
    command.qpn = 1;
    host.execute(&command)
}

fn services_not_agreed_on(host: &mut Host) -> Outcome {
    host.start_with(0)?;
    let cq = host.create_cq()?;
    for service in [
        Service::Uc,
        Service::Ud,
        Service::Gsi,
        Service::XrcIni,
        Service::XrcTgt,
    ] {
        let command = host.qp_command(service, &cq);
        host.refuse(&command, Unsupported)?;
    }
    for flags in [
        QP_FLAG_SRQ,
        QP_FLAG_FAST_REGISTER,
        QP_FLAG_FAST_REGISTER_DRAINS,
        QP_FLAG_WINDOWS_ONLY,
    ] {
        let mut command = host.qp_command(Service::Rc, &cq);
        command.flags = flags;
        host.refuse(&command, Unsupported)?;
    }
    Ok(())
}

fn shared_receive_queue_of_a_queue_pair(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    (command.flags, command.srqn) = (QP_FLAG_SRQ, host.caps.srq_first + host.caps.srq_count - 1);
    host.refuse(&command, NotFound)?;
    if host.features & FEATURE_XRC != 0 {
        let mut extended = host.srq_command();
        (extended.flags, extended.xrcd, extended.cqn) = (SRQ_FLAG_XRC, 1, cq.cqn);
        host.execute(&extended)?;
        command.srqn = extended.srqn;
        host.refuse(&command, NotFound)?;
    }
    command.srqn = host.create_srq()?.srqn;
    host.execute(&command)
}

fn xrc_domains(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_XRC)?;
    let cq = host.create_cq()?;
    let mut command = host.qp_command(Service::XrcTgt, &cq);
    for xrcd in [0, host.caps.max_xrcd] {
        command.xrcd = xrcd;
        host.refuse(&command, BadNumber)?;
    }
    command.xrcd = host.caps.max_xrcd - 1;
    host.execute(&command)
}

fn who_has_no_shared_receive_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    let cq = host.create_cq()?;
    let srq = host.create_srq()?;
    let services = [
        (Service::Uc, FEATURE_UC),
        (Service::XrcIni, FEATURE_XRC),
        (Service::XrcTgt, FEATURE_XRC),
    ];
    for (service, feature) in services {
        if host.features & feature == 0 {
            continue;
        }
        let mut command = host.qp_command(service, &cq);
        (command.flags, command.srqn) = (QP_FLAG_SRQ, srq.srqn);
        command.xrcd = u32::from(service == Service::XrcTgt);
        host.refuse(&command, BadParameter)?;
    }
    Ok(())
}

fn fields_without_meaning(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let right = host.qp_command(Service::Rc, &cq);
    host.refuse(&CreateQueuePair { srqn: 1, ..right }, BadParameter)?;
    host.refuse(&CreateQueuePair { xrcd: 1, ..right }, BadParameter)?;
    host.execute(&right)
}

fn what_a_queue_pair_says(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut a, mut b) = host.pair(Service::Rc, &cq)?;
    let connection = host.to_self(b.qpn);
    let before: QueuePairState = host.query(Op::QueryQueuePair, Some(a.qpn))?;
    let found = before.attributes;
    ensure_eq!(found.state, QueuePairStateCode::Rts.number(), "the state");
    ensure_eq!(found.destination_qpn, b.qpn, "the destination");
    ensure_eq!(
        found.address_vector,
        connection.address_vector,
        "the address vector"
    );
    ensure_eq!(found.log_mtu, connection.log_mtu, "the MTU");
    ensure_eq!(found.timeout, connection.timeout, "the timeout");
    ensure_eq!(found.retry_count, connection.retry_count, "the retries");
    ensure_eq!(found.rnr_retry, connection.rnr_retry, "the RNR retries");
    ensure_eq!(
        (found.ord, found.ird),
        (connection.depth, connection.depth),
        "ORD and IRD"
    );
    ensure_eq!(found.access, connection.access, "the rights");
    ensure_eq!(before.send_psn, connection.send_psn, "the next PSN");
    ensure_eq!(before.draining, 0, "draining");
    host.post_receive(&mut b, &[])?;
    host.post(&mut a, &Work::send(&[]))?;
    host.completion(&mut cq)?;
    host.completion(&mut cq)?;
    let sender: QueuePairState = host.query(Op::QueryQueuePair, Some(a.qpn))?;
    let receiver: QueuePairState = host.query(Op::QueryQueuePair, Some(b.qpn))?;
    ensure_eq!(
        sender.send_psn,
        connection.send_psn + 1,
        "the next PSN after a packet"
    );
    ensure_eq!(
        receiver.receive_psn,
        connection.send_psn + 1,
        "the PSN to expect"
    );
    Ok(())
}

fn destroyed_in_every_state(host: &mut Host) -> Outcome {
    use QueuePairStateCode::{Error, Init, Reset, Rtr, Rts, Sqd};
    host.start()?;
    let cq = host.create_cq()?;
    for state in [Reset, Init, Rtr, Rts, Sqd, Error] {
        let qp = host.create_qp(Service::Rc, &cq)?;
        let connection = host.to_neighbour();
        host.bring(Service::Rc, &qp, state.min(Rts), &connection)?;
        if state > Rts {
            host.move_qp(qp.qpn, state)?;
        }
        host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    }
    Ok(())
}

fn destroyed_queue_pair(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let region = host.region(ACCESS_LOCAL_WRITE, PAGE)?;
    host.post_receive(&mut qp, &[region.sge(0, 64)])?;
    host.post(&mut qp, &Work::send(&[]))?;
    host.wire()?.packet()?;
    host.destroy(Op::DestroyQueuePair, qp.qpn)?;
    host.wire()?.drain()?;
    let packet = neighbour.packet(rc::SEND_ONLY, RECEIVE_PSN, vec![0xff; 64]);
    host.wire()?.send(&packet.encode())?;
    host.device
        .doorbell(qp.page, DOORBELL_SEND, send_doorbell(qp.qpn, 5))?;
    host.wire()?.silence()?;
    host.no_completion(&mut cq)?;
    host.no_event(EQ_ASYNC)?;
    ensure_eq!(host.memory.load64(region.dma), 0, "the memory of a receive");
    Ok(())
}

fn taken_entry_is_flushed(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SRQ)?;
    for reset in [false, true] {
        let mut cq = host.create_cq()?;
        let srq_command = host.srq_command();
        host.execute(&srq_command)?;
        let mut srq = Srq::new(&srq_command);
        let mut command = host.qp_command(Service::Rc, &cq);
        (command.flags, command.srqn) = (QP_FLAG_SRQ, srq.srqn);
        let qp = host.make_qp(&command)?;
        let connection = host.to_neighbour();
        host.wire()?;
        host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
        let region = host.region(ACCESS_LOCAL_WRITE, 2 * PAGE)?;
        srq.post(&host.memory, 42, &[region.sge(0, 2 * PAGE as u32)]);
        let neighbour = host.neighbour(&qp);
        let body = vec![1; 1 << connection.log_mtu];
        let packet = neighbour.packet(rc::SEND_FIRST, RECEIVE_PSN, body);
        host.wire()?.send(&packet.encode())?;
        wait_for("the bytes of the message", || {
            Ok((host.memory.load64(region.dma) != 0).then_some(()))
        })?;
        if reset {
            host.move_qp(qp.qpn, QueuePairStateCode::Reset)?;
        } else {
            host.destroy(Op::DestroyQueuePair, qp.qpn)?;
        }
        let entry = host.completes(&mut cq, (qp.qpn, 42), CompletionStatus::Flushed)?;
        ensure!(
            entry.flags & COMPLETION_SRQ != 0,
            "COMPLETION_SRQ is not set"
        );
    }
    Ok(())
}

/// Sends 64 bytes of a region to itself; says how that ended.
fn try_lkey(host: &mut Host, region: &Region) -> Outcome<CompletionStatus> {
    let cq = host.create_cq()?;
    let (mut a, mut b) = host.pair(Service::Rc, &cq)?;
    let mut cq = cq;
    let sink = host.region(ACCESS_LOCAL_WRITE, 64)?;
    host.post_receive(&mut b, &[sink.sge(0, 64)])?;
    host.post(&mut a, &Work::send(&[region.sge(0, 64)]))?;
    loop {
        let entry = host.completion(&mut cq)?;
        if entry.qpn == a.qpn {
            let status = CompletionStatus::from_number(entry.status);
            return Ok(status.unwrap_or(CompletionStatus::General));
        }
    }
}

fn replaced_region(host: &mut Host) -> Outcome {
    host.start()?;
    let first = host.region_command(0, PAGE);
    host.execute(&first)?;
    let other = host.memory.allocate(PAGE);
    let second = RegisterRegion {
        tag: first.tag + 1,
        flags: REGION_REPLACE,
        address: first.address + (1 << 30),
        buffer: Buffer::contiguous(other, PAGE),
        ..first
    };
    host.execute(&second)?;
    let old = try_lkey(host, &region_of(&first))?;
    ensure_eq!(
        old,
        CompletionStatus::LocalProtection,
        "a send by the old tag"
    );
    let new = try_lkey(host, &region_of(&second))?;
    ensure_eq!(new, CompletionStatus::Success, "a send by the new tag");
    Ok(())
}

fn replaced_allocation(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let allocated = allocation(host, TagKind::Region);
    host.execute(&allocated)?;
    let mut command = host.region_command(0, PAGE);
    (command.tag, command.flags) = (allocated.tag + 1, REGION_REPLACE);
    host.execute(&command)?;
    let status = try_lkey(host, &region_of(&command))?;
    ensure_eq!(status, CompletionStatus::Success, "a send from it");
    host.object(Op::ReleaseTag, allocated.tag, NotFound)?;
    host.destroy(Op::ReleaseTag, command.tag)
}

fn regions(host: &mut Host, status: CommandStatus, of: Variants<RegisterRegion>) -> Outcome {
    host.start()?;
    let right = host.region_command(0, PAGE);
    variants(host, right, status, of)
}

fn replaced_window(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_WINDOWS)?;
    let window = allocation(host, TagKind::Window1);
    host.execute(&window)?;
    let mut command = host.region_command(0, PAGE);
    (command.tag, command.flags) = (window.tag, REGION_REPLACE);
    host.refuse(&command, BadParameter)
}

/// A region with a type 1 window bound to it, and what unbinds it.
fn bound_window(host: &mut Host) -> Outcome<(RegisterRegion, Cq, Qp, Work)> {
    host.start_needing(FEATURE_WINDOWS)?;
    let command = host.region_command(ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND, PAGE);
    host.execute(&command)?;
    let window = allocation(host, TagKind::Window1);
    host.execute(&window)?;
    let mut cq = host.create_cq()?;
    let (mut a, _b) = host.pair(Service::Rc, &cq)?;
    let part = BindPart {
        window: window.tag,
        new_window: window.tag + 1,
        region: command.tag,
        access: ACCESS_REMOTE_WRITE,
        address: command.address,
        length: PAGE,
        reserved: [0; 2],
    };
    let bind = Work::with_part(SendOpcode::Bind, &part, &[]);
    host.post_for(&mut a, &mut cq, &bind, CompletionStatus::Success)?;
    let unbind = BindPart {
        window: part.new_window,
        new_window: part.new_window + 1,
        length: 0,
        ..part
    };
    Ok((
        command,
        cq,
        a,
        Work::with_part(SendOpcode::Bind, &unbind, &[]),
    ))
}

fn replaced_with_windows(host: &mut Host) -> Outcome {
    let (mut command, mut cq, mut qp, unbind) = bound_window(host)?;
    command.flags = REGION_REPLACE;
    host.refuse(&command, Busy)?;
    host.post_for(&mut qp, &mut cq, &unbind, CompletionStatus::Success)?;
    host.execute(&command)
}

fn on_demand_descriptions(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let mut right = host.region_command(0, PAGE);
    right.flags = REGION_ON_DEMAND;
    right.buffer.order = 1;
    variants(host, right, BadParameter, |right, _| {
        let (mut levels, mut pages) = (right, right);
        levels.buffer.order = 2;
        pages.buffer.page_shift = 21;
        let flags = REGION_ON_DEMAND | REGION_DEVICE_MEMORY;
        vec![levels, pages, RegisterRegion { flags, ..right }]
    })
}

fn device_memory_descriptions(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_DEVICE_MEMORY)?;
    let size = host.device.register64(REG_DEVICE_MEMORY_SIZE)?;
    let mut right = host.region_command(0, PAGE);
    right.flags = REGION_DEVICE_MEMORY;
    right.buffer = Buffer::contiguous(0, size);
    let (mut long, mut far, mut tables) = (right, right, right);
    long.buffer.length = size + 1;
    far.buffer = Buffer::contiguous(size, 1);
    tables.buffer.order = 1;
    for bad in [long, far, tables] {
        host.refuse(&bad, BadParameter)?;
    }
    host.execute(&right)
}

fn registrations_are_counted(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER | FEATURE_LISTS)?;
    let mut pair = Pair::flagged(host, QP_FLAG_FAST_REGISTER | QP_FLAG_LISTS)?;
    let before = host.counter("sq_registrations")?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, 0);
    pair.ends(host, &work, CompletionStatus::Success)?;
    let list = List {
        part: ListPart {
            tag: allocate(host, TagKind::List)?,
            address: LIST_ADDRESS,
            ..ListPart::zeroed()
        },
        pieces: vec![region.sge(0, 8)],
    };
    let mut bad = region.sge(0, 8);
    bad.lkey ^= 1;
    let status = CompletionStatus::LocalProtection;
    // One that is made though its send fails; then one that is not.
    let work = and_send(list.work(SendOpcode::RegisterList), &[bad]);
    pair.ends(host, &work, status)?;
    let mut pair = Pair::flagged(host, QP_FLAG_LISTS)?;
    pair.ends(host, &list.work(SendOpcode::RegisterList), status)?;
    let after = host.counter("sq_registrations")?;
    ensure_eq!(after - before, 2, "sq_registrations");
    Ok(())
}

fn early_uses_are_counted(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let mut cq = host.create_cq()?;
    let mut command = host.qp_command(Service::Rc, &cq);
    command.flags = QP_FLAG_FAST_REGISTER;
    host.wire()?;
    let mut qp = host.make_qp(&command)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Rts, &connection)?;
    let tag = allocate(host, TagKind::Region)?;
    let (work, region) = fast_register(host, tag, 0);
    // The first is not acknowledged, so that the registration is not complete.
    let before = host.counter("early_uses")?;
    let first = host.post(&mut qp, &Work::send(&[]))?;
    let second = host.post(&mut qp, &work)?;
    let third = host.post(&mut qp, &Work::send(&[region.sge(0, 8)]))?;
    host.wire()?.packet()?;
    let last = host.wire()?.packet()?;
    host.no_completion(&mut cq)?;
    ensure_eq!(host.counter("early_uses")? - before, 1, "early_uses");
    let neighbour = host.neighbour(&qp);
    let ack = neighbour.packet(rc::ACKNOWLEDGE, last.psn, aeth(syndrome::ACK, 2));
    host.wire()?.send(&ack.encode())?;
    for index in [first, second, third] {
        host.completes(&mut cq, (qp.qpn, index), CompletionStatus::Success)?;
    }
    host.post(&mut qp, &Work::send(&[region.sge(0, 8)]))?;
    host.wire()?.packet()?;
    ensure_eq!(host.counter("early_uses")? - before, 1, "early_uses");
    Ok(())
}

fn allocated_tag(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let allocated = allocation(host, TagKind::Region);
    host.execute(&allocated)?;
    let region = Region {
        tag: allocated.tag,
        address: 0,
        dma: 0,
        length: 64,
    };
    let status = try_lkey(host, &region)?;
    ensure_eq!(
        status,
        CompletionStatus::LocalProtection,
        "a use before it is registered"
    );
    Ok(())
}

fn allocations(host: &mut Host, of: Variants<AllocateTag>) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER | FEATURE_WINDOWS)?;
    let right = allocation(host, TagKind::Region);
    variants(host, right, BadParameter, of)
}

fn released_tag(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(0, PAGE)?;
    host.destroy(Op::ReleaseTag, region.tag)?;
    let status = try_lkey(host, &region)?;
    ensure_eq!(status, CompletionStatus::LocalProtection, "a use of it");
    host.object(Op::ReleaseTag, region.tag, NotFound)
}

fn released_by_an_old_tag(host: &mut Host) -> Outcome {
    host.start()?;
    let region = host.region(0, PAGE)?;
    host.object(Op::ReleaseTag, region.tag ^ 1, NotFound)?;
    host.destroy(Op::ReleaseTag, region.tag)
}

fn released_by_any_instance(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_FAST_REGISTER)?;
    let allocated = allocation(host, TagKind::Region);
    host.execute(&allocated)?;
    host.destroy(Op::ReleaseTag, allocated.tag ^ 0x55)
}

fn released_with_windows(host: &mut Host) -> Outcome {
    let (command, mut cq, mut qp, unbind) = bound_window(host)?;
    host.object(Op::ReleaseTag, command.tag, Busy)?;
    host.post_for(&mut qp, &mut cq, &unbind, CompletionStatus::Success)?;
    host.destroy(Op::ReleaseTag, command.tag)
}

fn gid_table(host: &mut Host) -> Outcome {
    host.start()?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Rc, &qp, QueuePairStateCode::Init, &connection)?;
    let mut path = Host::modify(Service::Rc, qp.qpn, QueuePairStateCode::Rtr, &connection);
    path.address_vector.source_gid_index = 5;
    host.refuse(&path, NotFound)?;
    host.set_gid(5, crate::host::OWN_GID, VLAN_NONE)?;
    host.execute(&path)?;
    // It can be cleared.
    host.set_gid(5, [0; 16], VLAN_NONE)?;
    let other = host.create_qp(Service::Rc, &cq)?;
    host.bring(Service::Rc, &other, QueuePairStateCode::Init, &connection)?;
    path.qpn = other.qpn;
    host.refuse(&path, NotFound)
}

fn gid_of_a_connection(host: &mut Host) -> Outcome {
    host.start()?;
    let mut cq = host.create_cq()?;
    let (mut qp, neighbour) = host.wired(Service::Rc, &cq)?;
    let other = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 9];
    host.set_gid(0, other, VLAN_NONE)?;
    host.post(&mut qp, &Work::send(&[]).flags(0))?;
    let packet = host.wire()?.packet()?;
    ensure_eq!(packet.from, crate::host::OWN_GID, "the source address");
    // What comes for the old address is not its own any more.
    host.post_receive(&mut qp, &[])?;
    let message = neighbour.packet(rc::SEND_ONLY, RECEIVE_PSN, vec![]);
    host.wire()?.send(&message.encode())?;
    host.no_completion(&mut cq)
}

fn gids(host: &mut Host, status: CommandStatus, of: Variants<SetGid>) -> Outcome {
    host.start()?;
    let right = SetGid {
        gid: PEER_GID,
        index: 2,
        vlan: 4095,
        mac: host.mac,
        ..SetGid::zeroed()
    };
    variants(host, right, status, of)
}

fn port_mtu(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_PORT_MTU | FEATURE_UD)?;
    let set = |log_mtu| SetPort {
        log_mtu,
        ..SetPort::zeroed()
    };
    for bad in [7, host.caps.max_log_mtu + 1] {
        host.refuse(&set(bad), BadParameter)?;
    }
    let mut cq = host.create_cq()?;
    let data = host.region(0, 8192)?;
    let (mut qp, part) = datagrams(host, &cq)?;
    let most = 1 << host.caps.max_log_mtu;
    let longest = Work::datagram(&part, &[data.sge(0, most)]);
    host.post_for(&mut qp, &mut cq, &longest, CompletionStatus::Success)?;
    host.execute(&set(8))?;
    let too_long = Work::datagram(&part, &[data.sge(0, 257)]);
    host.post_for(&mut qp, &mut cq, &too_long, CompletionStatus::LocalLength)?;
    Ok(())
}

/// A group.
const GROUP: [u8; 16] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x12, 0x34];

fn member(host: &mut Host, opcode: Op, qpn: u32, gid: [u8; 16], status: CommandStatus) -> Outcome {
    let member = MulticastMember {
        gid,
        qpn,
        reserved: 0,
    };
    let entry = host.entry(opcode, &member);
    host.submit_for(&entry, status)
}

fn groups(host: &mut Host) -> Outcome {
    members(host, |_, _| Done)
}

/// Attaches a datagram queue pair to a group, one that `change` may have changed.
fn members(host: &mut Host, change: fn(&mut u32, &mut [u8; 16]) -> CommandStatus) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    let cq = host.create_cq()?;
    let (qp, _) = datagrams(host, &cq)?;
    let (mut qpn, mut gid) = (qp.qpn, GROUP);
    let status = change(&mut qpn, &mut gid);
    member(host, Op::AttachMulticast, qpn, gid, status)?;
    let end = if status == Done { Done } else { NotFound };
    member(host, Op::DetachMulticast, qp.qpn, GROUP, end)
}

fn group_of_a_connection(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    let cq = host.create_cq()?;
    let qp = host.create_qp(Service::Rc, &cq)?;
    member(host, Op::AttachMulticast, qp.qpn, GROUP, BadParameter)
}

fn member_twice(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    let cq = host.create_cq()?;
    let (qp, _) = datagrams(host, &cq)?;
    member(host, Op::AttachMulticast, qp.qpn, GROUP, Done)?;
    member(host, Op::AttachMulticast, qp.qpn, GROUP, Exists)
}

fn detached_twice(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    let cq = host.create_cq()?;
    let (qp, _) = datagrams(host, &cq)?;
    member(host, Op::DetachMulticast, qp.qpn, GROUP, NotFound)?;
    member(host, Op::AttachMulticast, qp.qpn, GROUP, Done)?;
    member(host, Op::DetachMulticast, qp.qpn, GROUP, Done)?;
    member(host, Op::DetachMulticast, qp.qpn, GROUP, NotFound)
}

fn too_many_groups(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    if host.caps.max_multicast > 4096 {
        return not_here("the device takes too many groups to try");
    }
    let cq = host.create_cq()?;
    let (qp, _) = datagrams(host, &cq)?;
    let group = |number: u32| {
        let mut gid = GROUP;
        gid[12..].copy_from_slice(&number.to_be_bytes());
        gid
    };
    for number in 0..host.caps.max_multicast {
        member(host, Op::AttachMulticast, qp.qpn, group(number), Done)?;
    }
    let one_more = group(host.caps.max_multicast);
    member(host, Op::AttachMulticast, qp.qpn, one_more, NoResource)?;
    host.is_alive()
}

fn destroyed_member(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_MULTICAST)?;
    let cq = host.create_cq()?;
    let command = host.qp_command(Service::Ud, &cq);
    host.execute(&command)?;
    member(host, Op::AttachMulticast, command.qpn, GROUP, Done)?;
    host.destroy(Op::DestroyQueuePair, command.qpn)?;
    host.execute(&command)?;
    member(host, Op::DetachMulticast, command.qpn, GROUP, NotFound)
}

fn faults(host: &mut Host, command: ResolveFault, status: CommandStatus) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    host.refuse(&command, status)
}

fn invalidations(
    host: &mut Host,
    status: CommandStatus,
    spoil: fn(&mut InvalidatePages),
) -> Outcome {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let mut region = host.region_command(0, PAGE);
    region.flags = REGION_ON_DEMAND;
    region.buffer.order = 1;
    host.execute(&region)?;
    let right = InvalidatePages {
        tag: region.tag,
        reserved: 0,
        first: 0,
        count: 1,
    };
    let mut bad = right;
    spoil(&mut bad);
    host.refuse(&bad, status)?;
    host.execute(&right)?;
    // Nor is a region whose pages stay one of these.
    let other = host.region(0, PAGE)?;
    let bad = InvalidatePages {
        tag: other.tag,
        ..right
    };
    host.refuse(&bad, BadParameter)
}

fn invalidation_of_a_failed_tag(host: &mut Host) -> Outcome {
    let command = host.region_command(0, PAGE);
    let bad = RegisterRegion {
        access: u32::MAX,
        ..command
    };
    host.refuse(&bad, BadParameter)?;
    let invalidate = InvalidatePages {
        tag: command.tag,
        reserved: 0,
        first: 0,
        count: 1,
    };
    host.refuse(&invalidate, NotFound)
}

fn flush_that_finds_no_room(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_UC)?;
    let command = host.cq_command(0);
    host.execute(&command)?;
    let cq = Cq::new(&command);
    let mut qp = host.create_qp(Service::Uc, &cq)?;
    let connection = host.to_neighbour();
    host.bring(Service::Uc, &qp, QueuePairStateCode::Rts, &connection)?;
    let bad = Sge {
        address: 0,
        length: 8,
        lkey: 0xdead_be00,
    };
    host.post(&mut qp, &Work::send(&[bad]))?;
    host.comes_to(qp.qpn, QueuePairStateCode::Sqe)?;
    // The one entry there is stays; what is posted now is flushed by the command.
    qp.write_send(&host.memory, &Work::send(&[]).encode());
    host.memory.store32(qp.record, qp.send_producer);
    let back = ModifyQueuePair {
        qpn: qp.qpn,
        mask: MODIFY_STATE,
        state: QueuePairStateCode::Rts.number(),
        ..ModifyQueuePair::zeroed()
    };
    host.refuse(&back, CommandStatus::BadState)?;
    host.event(EQ_ASYNC, EventCode::CompletionQueueError, cq.cqn)?;
    host.event(EQ_ASYNC, EventCode::QueuePairFatal, qp.qpn)?;
    ensure_eq!(host.state(qp.qpn)?, QueuePairStateCode::Error, "the state");
    Ok(())
}

/// So many queue pairs that each wait for a page of a region of which none is there.
fn waiting(host: &mut Host, count: u64) -> Outcome<(OnDemand, Vec<Pair>)> {
    host.start_needing(FEATURE_ON_DEMAND)?;
    let memory = OnDemand::new(host, 0, count)?;
    let mut pairs = Vec::new();
    for page in 0..count {
        let mut pair = Pair::new(host)?;
        let sge = memory.region.sge(page * PAGE, 8);
        host.post(&mut pair.a, &Work::send(&[sge]))?;
        pairs.push(pair);
    }
    host.event(EQ_ASYNC, EventCode::PageFaults, 0)?;
    Ok((memory, pairs))
}

fn faults_are_taken(host: &mut Host) -> Outcome {
    let (memory, pairs) = waiting(host, 10)?;
    // No more than fit whole.
    let entry = host.query_entry(Op::TakeFaults, None, 32 + 2 * 32 + 31);
    host.submit_for(&entry, Done)?;
    let reply: PageFaults = host.memory.get(host.reply());
    ensure_eq!(reply.count, 2, "the faults that fit in the reply");
    let mut taken: Vec<PageFault> = reply.faults[..2].to_vec();
    for expected in [7, 1, 0] {
        let faults = take_faults(host)?;
        ensure_eq!(faults.len(), expected, "the faults taken");
        taken.extend(faults);
    }
    for fault in &taken {
        ensure_eq!(fault.tag, memory.region.tag, "the tag of a fault");
    }
    let mut offsets: Vec<u64> = taken.iter().map(|fault| fault.offset / PAGE).collect();
    offsets.sort_unstable();
    ensure_eq!(
        offsets,
        (0..pairs.len() as u64).collect::<Vec<_>>(),
        "the pages"
    );
    Ok(())
}

fn faults_without_a_reply(host: &mut Host) -> Outcome {
    waiting(host, 1)?;
    let mut entry = host.query_entry(Op::TakeFaults, None, 256);
    entry.reply = NOWHERE;
    host.submit_for(&entry, HostMemory)?;
    ensure_eq!(
        take_faults(host)?.len(),
        1,
        "the faults that are still there"
    );
    Ok(())
}

fn next_fault_is_told(host: &mut Host) -> Outcome {
    waiting(host, 1)?;
    ensure_eq!(take_faults(host)?.len(), 1, "the faults");
    let memory = OnDemand::new(host, 0, 1)?;
    let mut pair = Pair::new(host)?;
    host.post(&mut pair.a, &Work::send(&[memory.region.sge(0, 8)]))?;
    host.event(EQ_ASYNC, EventCode::PageFaults, 0)?;
    Ok(())
}

fn resolved_faults(host: &mut Host) -> Outcome {
    for (present, failed, status) in [
        (true, false, CompletionStatus::Success),
        (true, true, CompletionStatus::Success),
        (false, true, CompletionStatus::LocalProtection),
    ] {
        host.device.control_reset()?;
        let (memory, mut pairs) = waiting(host, 1)?;
        let faults = take_faults(host)?;
        if present {
            memory.set(host, 0, ON_DEMAND_PRESENT);
        }
        host.post_receive(&mut pairs[0].b, &[])?;
        let sink = host.region(ACCESS_LOCAL_WRITE, 64)?;
        // The receive is long enough for the message.
        let mut entry = crate::rings::receive_entry(0, &[sink.sge(0, 64)]);
        entry.resize(64, 0);
        host.memory.write(pairs[0].b.receive_ring, &entry);
        resolve(host, &faults[0], failed)?;
        let entry = pairs[0].of_a(host, 0)?;
        ensure_eq!(
            entry.status,
            status.number(),
            "present {present}, failed {failed}"
        );
    }
    Ok(())
}

fn faults_go_with_their_queue_pair(host: &mut Host) -> Outcome {
    use QueuePairStateCode::{Error, Reset};
    let mut tokens = Vec::new();
    for to in [Some(Reset), Some(Error), None] {
        host.device.control_reset()?;
        let (_, pairs) = waiting(host, 1)?;
        let fault = take_faults(host)?[0];
        match to {
            Some(state) => host.move_qp(pairs[0].a.qpn, state)?,
            None => host.destroy(Op::DestroyQueuePair, pairs[0].a.qpn)?,
        }
        let command = ResolveFault {
            token: fault.token,
            failed: 0,
            reserved: 0,
        };
        host.refuse(&command, NotFound)?;
        ensure!(
            !tokens.contains(&fault.token),
            "token {:#x} twice",
            fault.token
        );
        tokens.push(fault.token);
    }
    Ok(())
}

fn overflow_and_priority(host: &mut Host) -> Outcome {
    // Without the feature they are reserved.
    host.start_with(!FEATURE_EQ_CONTROL)?;
    for (overflow, priority) in [(1, 0), (2, 0), (0, 1)] {
        let mut create = host.eq_command(3, 0);
        (create.overflow, create.priority) = (overflow, priority);
        host.refuse(&create, BadParameter)?;
        let modify = ModifyEventQueue {
            eqn: EQ_ASYNC,
            overflow,
            priority,
            ..ModifyEventQueue::zeroed()
        };
        host.refuse(&modify, BadParameter)?;
    }
    host.device.control_reset()?;
    host.start_needing(FEATURE_EQ_CONTROL)?;
    for (overflow, priority) in [(3, 0), (u8::MAX, 0), (0, 2), (0, u8::MAX)] {
        let mut create = host.eq_command(3, 0);
        (create.overflow, create.priority) = (overflow, priority);
        host.refuse(&create, BadParameter)?;
    }
    let mut modify = ModifyEventQueue {
        eqn: EQ_CONTROL,
        overflow: EventOverflow::Undefine.number(),
        ..ModifyEventQueue::zeroed()
    };
    host.refuse(&modify, BadParameter)?;
    modify.overflow = EventOverflow::Stop.number();
    host.execute(&modify)?;
    let mut create = host.eq_command(3, 0);
    create.overflow = EventOverflow::Undefine.number();
    create.priority = EventPriority::LowLatency.number();
    host.execute(&create)
}

/// An entry of the map for completions, of processor 0, to event queue 2.
fn map_of_completions() -> SetVectorMap {
    let entry = (EQ_FIRST_HANDLER, MESSAGE_OF_QUEUE);
    map_command(SubFunction::SendCompletions, 0, &[entry])
}

fn maps(
    host: &mut Host,
    status: CommandStatus,
    wrong: fn(SetVectorMap, u16) -> Vec<SetVectorMap>,
) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    let messages = host.device.register32(REG_MESSAGES)? as u16;
    let right = map_of_completions();
    for command in wrong(right, messages) {
        host.refuse(&command, status)?;
    }
    host.execute(&right)
}

fn switches(
    host: &mut Host,
    status: CommandStatus,
    wrong: fn(SwitchEventQueue, &DeviceCaps) -> Vec<SwitchEventQueue>,
) -> Outcome {
    host.start_needing(FEATURE_SWITCH_EQ)?;
    let log_entries = host.queues[&EQ_FIRST_HANDLER].log_entries;
    let right = switch_command(host, EQ_FIRST_HANDLER, log_entries);
    let caps = host.caps;
    for command in wrong(right, &caps) {
        host.refuse(&command, status)?;
    }
    host.execute(&right)
}

fn switched(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SWITCH_EQ)?;
    let (mut cq, mut qp) = with_queue(host)?;
    for round in 0..3 {
        let log_entries = host.queues[&EQ_FIRST_HANDLER].log_entries;
        let new = switch(host, EQ_FIRST_HANDLER, log_entries + round)?;
        host.queues.insert(EQ_FIRST_HANDLER, new);
        host.arm_cq(&cq, 0, false)?;
        complete(host, &mut cq, &mut qp)?;
        host.event(EQ_FIRST_HANDLER, EventCode::Completion, cq.cqn)?;
    }
    let mut command = switch_command(host, 9, 4);
    host.refuse(&command, NotFound)?;
    command.eqn = host.caps.max_eq;
    host.refuse(&command, BadNumber)
}

fn switched_again(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_SWITCH_EQ)?;
    let (mut cq, mut qp) = with_queue(host)?;
    host.arm_cq(&cq, 0, false)?;
    complete(host, &mut cq, &mut qp)?;
    let mut old = host.queues[&EQ_FIRST_HANDLER].clone();
    wait_for("the event", || Ok(old.peek(&host.memory)))?;
    let mut new = switch(host, EQ_FIRST_HANDLER, old.log_entries)?;
    let third = switch_command(host, EQ_FIRST_HANDLER, old.log_entries);
    host.refuse(&third, Busy)?;
    // Consumed is not told.
    old.take(&host.memory);
    host.refuse(&third, Busy)?;
    host.tell_read(EQ_FIRST_HANDLER, old.read)?;
    // What is in the present ring may be unread.
    host.arm_cq(&cq, 1, false)?;
    complete(host, &mut cq, &mut qp)?;
    new.read = old.read;
    wait_for("the event in the new ring", || Ok(new.peek(&host.memory)))?;
    host.execute(&third)
}

fn named_by_the_map(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    host.create_eq(3, 3)?;
    let map = |eqn| map_command(SubFunction::Receive, 511, &[(eqn, MESSAGE_OF_QUEUE)]);
    host.execute(&map(3))?;
    host.object(Op::DestroyEventQueue, 3, Busy)?;
    host.execute(&map(EQ_NONE))?;
    host.destroy(Op::DestroyEventQueue, 3)
}

/// Reads entries of the map.
fn read_map(host: &mut Host, row: SubFunction, first: u16, count: u16) -> Outcome<Vec<(u16, u16)>> {
    let query = QueryVectorMap {
        sub_function: row.number(),
        first,
        count,
        ..QueryVectorMap::zeroed()
    };
    let mut entry = host.entry(Op::QueryVectorMap, &query);
    (entry.reply, entry.reply_length) = (host.reply(), 256);
    let (status, length) = host.submit(&entry)?;
    ensure_eq!((status, length), (Done, u64::from(count) * 4), "the answer");
    let at = |index| host.reply() + 4 * u64::from(index);
    let entries = (0..count).map(|index| host.memory.get::<VectorMapEntry>(at(index)));
    Ok(entries.map(|entry| (entry.eqn, entry.message)).collect())
}

fn map_in_one_step(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    let row = SubFunction::SendCompletions;
    let two = |second| map_command(row, 7, &[(EQ_FIRST_HANDLER, 0), (second, 0)]);
    // One that cannot be: none is set.
    host.refuse(&two(9), NotFound)?;
    let absent = (EQ_NONE, MESSAGE_OF_QUEUE);
    ensure_eq!(read_map(host, row, 7, 2)?, [absent; 2], "the map");
    host.execute(&two(EQ_ASYNC))?;
    let set = [(EQ_FIRST_HANDLER, 0), (EQ_ASYNC, 0)];
    ensure_eq!(read_map(host, row, 7, 2)?, set, "the map");
    host.device.control_reset()?;
    host.start()?;
    ensure_eq!(read_map(host, row, 7, 2)?, [absent; 2], "after a reset");
    Ok(())
}

fn map_of_no_queue(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    let map = |eqn| map_command(SubFunction::Any, 0, &[(eqn, MESSAGE_OF_QUEUE)]);
    host.refuse(&map(9), NotFound)?;
    host.refuse(&map(host.caps.max_eq), BadNumber)?;
    host.refuse(&map(EQ_MAPPED), BadNumber)?;
    host.execute(&map(EQ_NONE))
}

fn map_is_read(host: &mut Host) -> Outcome {
    host.start_needing(FEATURE_VECTOR_MAP)?;
    let absent = (EQ_NONE, MESSAGE_OF_QUEUE);
    let row = SubFunction::Transmit;
    let here = (EQ_FIRST_HANDLER, 0);
    host.execute(&map_command(row, 510, &[absent, here]))?;
    ensure_eq!(
        read_map(host, row, 509, 3)?,
        [absent, absent, here],
        "the row"
    );
    let other = read_map(host, SubFunction::Receive, 509, 3)?;
    ensure_eq!(other, [absent; 3], "another row");
    let all = VECTOR_MAP_ENTRIES as u16;
    let count = read_map(host, row, 0, all)?.len();
    ensure_eq!(count, VECTOR_MAP_ENTRIES, "entries");
    for (sub_function, first, count) in [(11, 0, 1), (0, 0, 0), (0, 0, all + 1), (0, 512, 1)] {
        let query = QueryVectorMap {
            sub_function,
            first,
            count,
            ..QueryVectorMap::zeroed()
        };
        let mut entry = host.entry(Op::QueryVectorMap, &query);
        (entry.reply, entry.reply_length) = (host.reply(), 256);
        host.submit_for(&entry, BadParameter)?;
    }
    Ok(())
}

fn processors(host: &mut Host) -> Outcome {
    host.start_with(!FEATURE_VECTOR_MAP)?;
    let mut command = host.cq_command(6);
    command.processor = 1;
    host.refuse(&command, BadParameter)?;
    (command.eqn, command.processor) = (EQ_MAPPED, 0);
    host.refuse(&command, BadNumber)?;
    host.device.control_reset()?;
    host.start_needing(FEATURE_VECTOR_MAP)?;
    let mut command = host.cq_command(6);
    command.processor = 1;
    host.refuse(&command, BadParameter)?;
    command.eqn = EQ_MAPPED;
    command.processor = VECTOR_MAP_PROCESSORS;
    host.refuse(&command, BadParameter)?;
    command.processor -= 1;
    host.execute(&command)?;
    let mut modify = ModifyCompletionQueue {
        cqn: command.cqn,
        eqn: EQ_NONE,
        processor: 1,
        ..ModifyCompletionQueue::zeroed()
    };
    host.refuse(&modify, BadParameter)?;
    modify.eqn = EQ_MAPPED;
    host.execute(&modify)
}
