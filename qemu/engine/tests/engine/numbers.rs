// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Numbers and doorbell pages are what the device says they are (chapters 2, 3 and 10).

use crate::wire::statuses;
use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use ferrite_engine::Numbers;
use CommandStatus::{BadNumber, NotFound};

/// Firsts and counts of queue pairs, completion queues, shared receive queues and tags.
const RANGES: [[Numbers; 4]; 3] = {
    const fn numbers(first: u32, count: u32) -> Numbers {
        Numbers { first, count }
    }
    [
        [numbers(2, 4), numbers(0, 2), numbers(0, 2), numbers(1, 2)],
        [
            numbers(0x1234, 3),
            numbers(0x77, 2),
            numbers(0x4242, 1),
            numbers(0x5000, 3),
        ],
        // The last there can be; the very last queue pair stands for groups.
        [
            numbers(0xff_fffb, 4),
            numbers(0xff_fffe, 2),
            numbers(0xff_ffff, 1),
            numbers(0xff_fffd, 3),
        ],
    ]
};

fn node([qps, cqs, srqs, tags]: [Numbers; 4], log_stride: u8) -> Node {
    let mut node = Node::power_on_with(1, |config| {
        (config.qps, config.cqs, config.srqs, config.tags) = (qps, cqs, srqs, tags);
        config.doorbell_log_stride = log_stride;
    });
    node.boot();
    node.create_eq(EQ_ASYNC, 1);
    node.create_eq(EQ_FIRST_HANDLER, 2);
    node.set_address();
    node
}

/// Two queue pairs of the node, connected to each other, exchange data through a region.
fn exchange(node: &mut Node, [a, b]: [u32; 2], cqn: u32, tag: u32) {
    node.create_cq(cqn, EQ_FIRST_HANDLER, 6);
    for qpn in [a, b] {
        node.create_qp(QpOptions {
            qpn,
            cqn,
            page: 3,
            ..QpOptions::default()
        });
    }
    let (to_a, to_b) = (node.as_peer(a), node.as_peer(b));
    node.connect(a, &to_b);
    node.connect(b, &to_a);
    let region = node.register(tag, 1, ACCESS_LOCAL_WRITE | ACCESS_REMOTE, 8192);
    node.fill(&region, 0, &[0x5a; 3000]);
    node.post_recv(b, &[region.sge(4096, 4096)]);
    node.arm_cq(cqn, 1, false);
    node.post_send(a, &SendWork::new(SendOpcode::Send, &[region.sge(0, 3000)]));
    node.post_send(
        a,
        &SendWork::new(SendOpcode::Read, &[region.sge(4000, 96)]).remote(region.address, tag),
    );
    node.settle();
    let done: Vec<_> = std::iter::from_fn(|| node.poll_cq(cqn)).collect();
    assert_eq!(statuses(&done), [CompletionStatus::Success; 3]);
    assert!(node.contents(&region, 4096, 3000) == [0x5a; 3000]);
    assert_eq!(
        node.event_codes(EQ_FIRST_HANDLER),
        [(EventCode::Completion, cqn)]
    );
}

#[test]
fn objects_have_the_numbers_of_their_range_and_no_others() {
    use CommandOpcode as O;
    for ranges in RANGES {
        let mut node = node(ranges, 12);
        let [qps, cqs, srqs, tags] = ranges;
        let caps: DeviceCaps = node.query(O::QueryDevice, 0).unwrap();
        assert_eq!((caps.qp_first, caps.qp_count), (qps.first, qps.count));
        assert_eq!((caps.cq_first, caps.cq_count), (cqs.first, cqs.count));
        assert_eq!((caps.srq_first, caps.srq_count), (srqs.first, srqs.count));
        assert_eq!((caps.tag_first, caps.tag_count), (tags.first, tags.count));
        let outside = |numbers: Numbers| {
            let before = numbers.first.checked_sub(1);
            let behind = numbers.first + numbers.count;
            before.into_iter().chain([behind, u32::MAX])
        };
        // Of tags there are no more than fit.
        let tag = |index: u32| Tag::new(index & 0xff_ffff, 1).0;
        for qpn in outside(qps).chain([0]).filter(|&qpn| qpn != 1) {
            let create = node.qp_template(QpOptions {
                qpn,
                cqn: cqs.first,
                ..QpOptions::default()
            });
            assert_eq!(node.command(O::CreateQueuePair, &create), BadNumber);
            assert_eq!(node.object_command(O::QueryQueuePair, qpn), BadNumber);
            assert_eq!(node.object_command(O::DestroyQueuePair, qpn), BadNumber);
            let modify = ModifyQueuePair {
                qpn,
                ..ModifyQueuePair::zeroed()
            };
            assert_eq!(node.command(O::ModifyQueuePair, &modify), BadNumber);
        }
        for cqn in outside(cqs) {
            let create = node.cq_template(cqn, EQ_FIRST_HANDLER, 4);
            assert_eq!(node.command(O::CreateCompletionQueue, &create), BadNumber);
            assert_eq!(
                node.object_command(O::DestroyCompletionQueue, cqn),
                BadNumber
            );
        }
        for srqn in outside(srqs) {
            let create = node.srq_template(srqn, 4);
            assert_eq!(node.command(O::CreateSrq, &create), BadNumber);
            for opcode in [O::QuerySrq, O::DestroySrq] {
                assert_eq!(node.object_command(opcode, srqn), BadNumber);
            }
            let modify = ModifySrq { srqn, limit: 0 };
            assert_eq!(node.command(O::ModifySrq, &modify), BadNumber);
        }
        for index in outside(tags).chain([0]) {
            if tags.index(index & 0xff_ffff).is_some() {
                continue;
            }
            let allocate = AllocateTag {
                tag: tag(index),
                pd: 1,
                kind: TagKind::Window1.number(),
                reserved: [0; 3],
                max_pages: 0,
            };
            assert_eq!(node.command(O::AllocateTag, &allocate), BadNumber);
            assert_eq!(node.object_command(O::ReleaseTag, tag(index)), BadNumber);
        }
        let last = |numbers: Numbers| numbers.first + numbers.count - 1;
        for (opcode, number) in [
            (O::DestroyQueuePair, qps.first),
            (O::DestroyQueuePair, last(qps)),
            // Everybody's, and nobody's yet.
            (O::DestroyQueuePair, 1),
            (O::DestroyCompletionQueue, cqs.first),
            (O::DestroyCompletionQueue, last(cqs)),
            (O::DestroySrq, srqs.first),
            (O::DestroySrq, last(srqs)),
            (O::ReleaseTag, tag(tags.first)),
            (O::ReleaseTag, tag(last(tags))),
        ] {
            assert_eq!(node.object_command(opcode, number), NotFound);
        }
        exchange(
            &mut node,
            [qps.first, last(qps)],
            last(cqs),
            tag(last(tags)),
        );
        node.create_srq(last(srqs), 4, None);
        // That of management datagrams is beside the range.
        node.create_qp(QpOptions {
            qpn: 1,
            cqn: last(cqs),
            service: Service::Gsi,
            ..QpOptions::default()
        });
        node.start_datagrams(1, 0);
        let region = node.register(tag(tags.first), 1, ACCESS_LOCAL_WRITE, 4096);
        node.post_recv(1, &[region.sge(0, 1000)]);
        let work = SendWork::new(SendOpcode::Send, &[region.sge(2000, 10)]);
        let to_itself = node.as_peer(1).datagram(0x8001_0000);
        node.post_send(1, &work.datagram(&to_itself));
        node.settle();
        let done: Vec<_> = std::iter::from_fn(|| node.poll_cq(last(cqs))).collect();
        assert_eq!(statuses(&done), [CompletionStatus::Success; 2]);
    }
}

#[test]
fn doorbell_pages_are_as_far_apart_as_the_device_says() {
    for log_stride in [12, 14, 16] {
        for pages in [4, 1024] {
            let mut node = node(RANGES[1], log_stride);
            let mut config = node.engine.config().clone();
            config.doorbell_pages = pages;
            node.engine = ferrite_engine::Engine::new(config.clone());
            node.boot();
            node.create_eq(EQ_ASYNC, 1);
            node.create_eq(EQ_FIRST_HANDLER, 2);
            node.set_address();
            let [qps, cqs, _, tags] = RANGES[1];
            let stride = 1u64 << log_stride;
            assert_eq!(node.read_register(REG_DOORBELL_PAGES, 4), u64::from(pages));
            assert_eq!(
                node.read_register(REG_DOORBELL_STRIDE, 4),
                u64::from(log_stride)
            );
            let memory = node.read_register(REG_DEVICE_MEMORY_OFFSET, 8);
            let size = node.read_register(REG_DEVICE_MEMORY_SIZE, 8);
            assert!(memory >= u64::from(pages) * stride);
            assert_eq!(memory % (1 << DOORBELL_MAX_LOG_STRIDE), 0);
            let bar = config.doorbell_bar_size();
            assert!(bar.is_power_of_two() && bar >= memory + size && bar / 2 < memory + size);
            let tag = Tag::new(tags.first, 1).0;
            exchange(&mut node, [qps.first, qps.first + 1], cqs.first, tag);
            let bad = node.engine.counters().bad_doorbells;
            assert_eq!(bad, 0);
            let ring = |node: &mut Node, at: u64| {
                let word = send_doorbell(qps.first, 0);
                node.engine
                    .mmio_write(BAR_DOORBELLS, at, 8, word, node.now, &mut node.host);
            };
            // Its page is 3: not another one, and nothing between two pages.
            ring(&mut node, 3 * stride);
            assert_eq!(node.engine.counters().bad_doorbells, 0);
            let mut wrong = vec![2 * stride, 3 * stride + stride / 2, memory + size];
            if u64::from(pages) * stride < memory {
                wrong.push(u64::from(pages) * stride);
            }
            if log_stride > 12 {
                wrong.extend([3 * 4096, 3 * stride + 4096]);
            }
            for (n, at) in (1..).zip(wrong) {
                ring(&mut node, at);
                assert_eq!(node.engine.counters().bad_doorbells, n, "{at:#x}");
            }
            // An object is made for a page that there is.
            let create = CreateCompletionQueue {
                doorbell_page: pages,
                ..node.cq_template(cqs.first + 1, EQ_FIRST_HANDLER, 4)
            };
            let opcode = CommandOpcode::CreateCompletionQueue;
            assert_eq!(node.command(opcode, &create), CommandStatus::BadParameter);
            node.execute(&CreateCompletionQueue {
                doorbell_page: pages - 1,
                ..create
            });
            let arm = CompletionDoorbell {
                cqn: cqs.first + 1,
                seen: 0,
                sequence: 0,
                solicited: false,
            };
            let bad = node.engine.counters().bad_doorbells;
            node.doorbell(pages - 1, DOORBELL_COMPLETION, arm.encode());
            assert_eq!(node.engine.counters().bad_doorbells, bad);
        }
    }
}
