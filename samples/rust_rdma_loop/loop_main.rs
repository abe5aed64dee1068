// SPDX-License-Identifier: GPL-2.0

//! A kernel user of RDMA devices: two queue pairs of one port, connected to each other.
//!
//! On loading it takes every device with an active RoCE port through sends, RDMA writes and reads,
//! atomics, fast registration and invalidation, and the errors that go with them, looks at each
//! byte and completion, and logs
//!
//! ```text
//! rust_rdma_loop: N passed, M failed
//! ```
//!
//! Loading fails if there was nothing to test with or anything failed. What a device need not have
//! (Ferrite's `extension.rs`) is skipped where it has not: registration and message in one work
//! request, failed registrations that drain the send queue, regions for one message.

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../drivers/infiniband/hw/ferrite/extension.rs"]
pub mod extension;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/rdma/mod.rs"]
pub mod rdma;

mod pair;
mod regions;
mod registration;
mod transfers;

use self::pair::{with_pair, Pair, PORT};
use self::regions::{
    regions_may_have_large_pages, regions_may_have_many_pages,
    regions_may_have_room_for_more_pages, regions_of_other_domains_are_not_posted,
    rings_may_be_large, MANY_PAGES,
};
use self::registration::{
    a_device_may_fail_while_a_queue_stands_still, a_failed_registration_drains_and_is_tried_again,
    a_key_in_use_ends_the_connection, a_refusal_in_the_middle_of_a_list_leaves_nothing_behind,
    a_region_may_be_for_one_message, a_region_that_was_not_made_is_not_registered,
    an_offer_is_one_request_and_ends_with_the_answer, an_offer_may_answer_an_offer,
    an_offer_that_fails_is_not_sent, no_such_key_ends_the_connection,
    too_many_pages_end_the_connection,
};
use self::transfers::{
    a_message_longer_than_the_receive_fails_at_both_ends,
    a_region_is_used_before_its_registration_is_complete,
    a_region_may_be_registered_again_under_another_key,
    atomics_are_done_once_and_return_what_was_there, beyond_the_region_is_refused,
    immediate_data_arrives, many_requests_complete, reads_fetch_the_peers_memory,
    send_with_invalidate_ends_the_peers_region, sends_and_receives_have_room_of_their_own,
    sends_arrive, what_is_not_allowed_is_refused, writes_land_where_they_should,
    writes_with_immediate_consume_a_receive,
};
use extension::{ONE_TOUCH, REGISTER_DRAINS, REGISTER_SEND};
use kernel::prelude::*;
use kernel::sync::atomic::{Atomic, Relaxed};
use rdma::ulp::{self, Client, Lease};
use rdma::Extension;

static PASSED: Atomic<u32> = Atomic::new(0);

static FAILED: Atomic<u32> = Atomic::new(0);

/// A test on a connected pair.
struct Test {
    name: &'static str,
    run: fn(&Pair) -> Result,
    /// What the device has to have for it.
    needs: &'static [Extension],
    /// What the queue pairs are made with.
    extensions: &'static [Extension],
}

macro_rules! tests {
    ($needs:expr, $extensions:expr; $($test:ident),* $(,)?) => {
        [$(Test {
            name: stringify!($test),
            run: $test,
            needs: $needs,
            extensions: $extensions,
        }),*]
    };
}

/// Of devices and queue pairs that need be nothing special.
const USUAL: &[Extension] = &[];

/// What every device has to do.
const TESTS: [Test; 14] = tests![
    USUAL, USUAL;
    sends_arrive,
    immediate_data_arrives,
    many_requests_complete,
    writes_land_where_they_should,
    writes_with_immediate_consume_a_receive,
    reads_fetch_the_peers_memory,
    atomics_are_done_once_and_return_what_was_there,
    send_with_invalidate_ends_the_peers_region,
    a_region_may_be_registered_again_under_another_key,
    what_is_not_allowed_is_refused,
    beyond_the_region_is_refused,
    a_message_longer_than_the_receive_fails_at_both_ends,
    a_region_is_used_before_its_registration_is_complete,
    sends_and_receives_have_room_of_their_own,
];

/// Registration and message in one.
const OFFERS: [Test; 2] = tests![
    &[REGISTER_SEND], &[REGISTER_SEND];
    an_offer_is_one_request_and_ends_with_the_answer,
    an_offer_may_answer_an_offer,
];

/// Failed registrations that leave the connection.
const DRAINING: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_failed_registration_drains_and_is_tried_again,
];

/// The same on a device that somebody has fail meanwhile: only for who asks for it.
const FAILING: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_device_may_fail_while_a_queue_stands_still,
];

/// The same on a device that somebody has fail some allocations of regions.
const NOT_MADE: [Test; 1] = tests![
    &[REGISTER_DRAINS], &[REGISTER_DRAINS];
    a_region_that_was_not_made_is_not_registered,
];

/// Registrations that are refused and failed ones that end it, on a device that says which fail.
const ENDING: [Test; 4] = tests![
    &[REGISTER_DRAINS], USUAL;
    a_refusal_in_the_middle_of_a_list_leaves_nothing_behind,
    no_such_key_ends_the_connection,
    a_key_in_use_ends_the_connection,
    too_many_pages_end_the_connection,
];

/// Registrations with a message that fail.
const DRAINED_OFFERS: [Test; 1] = tests![
    &[REGISTER_SEND, REGISTER_DRAINS],
    &[REGISTER_SEND, REGISTER_DRAINS];
    an_offer_that_fails_is_not_sent,
];

/// Regions for one message.
const TOUCHED_ONCE: [Test; 1] = tests![
    &[ONE_TOUCH], &[ONE_TOUCH];
    a_region_may_be_for_one_message,
];

/// The tests as a client of the RDMA core.
struct Loop;

impl Client for Loop {
    const NAME: &'static CStr = c"rust_rdma_loop";

    fn add(lease: &Lease) -> Result {
        let device = lease.device();
        if !device.port(PORT)?.active || device.roce_v2_gid(PORT).is_err() {
            ibdev_info!(lease, "rust_rdma_loop: no active RoCE port, left out\n");
            return Err(ENODEV);
        }
        let say = |test: &str, result: Result| match result {
            Ok(()) => {
                PASSED.fetch_add(1, Relaxed);
                ibdev_info!(lease, "rust_rdma_loop: ok {test}\n");
            }
            Err(err) => {
                FAILED.fetch_add(1, Relaxed);
                ibdev_err!(lease, "rust_rdma_loop: not ok {test}: {err:?}\n");
            }
        };
        let asked_for = [
            (*module_parameters::device_fails.value() != 0, &FAILING),
            (*module_parameters::failing_pages.value() != 0, &NOT_MADE),
        ];
        if let Some((_, tests)) = asked_for.into_iter().find(|(asked, _)| *asked) {
            for test in tests {
                say(test.name, with_pair(lease, test.extensions, test.run));
            }
            return Ok(());
        }
        let groups: [&[Test]; 6] = [
            &TESTS,
            &OFFERS,
            &DRAINING,
            &ENDING,
            &DRAINED_OFFERS,
            &TOUCHED_ONCE,
        ];
        for test in groups.into_iter().flatten() {
            if test.needs.iter().all(|needed| device.has(needed)) {
                say(test.name, with_pair(lease, test.extensions, test.run));
            } else {
                ibdev_info!(lease, "rust_rdma_loop: skipped {}\n", test.name);
            }
        }
        say("rings_may_be_large", rings_may_be_large(lease));
        say(
            "regions_may_have_large_pages",
            regions_may_have_large_pages(lease),
        );
        say(
            "regions_of_other_domains_are_not_posted",
            regions_of_other_domains_are_not_posted(lease),
        );
        type Pages = fn(&Lease) -> Result;
        let tests: [(&str, Pages); 2] = [
            ("regions_may_have_many_pages", regions_may_have_many_pages),
            (
                "regions_may_have_room_for_more_pages",
                regions_may_have_room_for_more_pages,
            ),
        ];
        for (test, body) in tests {
            if device.max_registered_pages() as usize >= MANY_PAGES[3] {
                say(test, body(lease));
            } else {
                // Other devices need not have as many.
                ibdev_info!(lease, "rust_rdma_loop: skipped {test}\n");
            }
        }
        Ok(())
    }
}

struct LoopModule {
    _client: Pin<KBox<ulp::Registration<Loop>>>,
}

impl kernel::Module for LoopModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let client = KBox::pin_init(ulp::Registration::new(), GFP_KERNEL)?;
        let (passed, failed) = (PASSED.load(Relaxed), FAILED.load(Relaxed));
        pr_info!("{passed} passed, {failed} failed\n");
        if failed != 0 {
            return Err(EIO);
        }
        if passed == 0 {
            return Err(ENODEV);
        }
        Ok(Self { _client: client })
    }
}

module! {
    type: LoopModule,
    name: "rust_rdma_loop",
    authors: ["Ferrite contributors"],
    description: "Kernel queue pairs of one port, connected to each other",
    license: "GPL",
    params: {
        device_fails: u8 {
            default: 0,
            description: "Not 0: wait, with a queue that stands still, for somebody to have the device fail, and do nothing else",
        },
        failing_pages: u16 {
            default: 0,
            description: "Not 0: see what becomes of a region with room for so many pages, which the device does not make, and do nothing else",
        },
    },
}
