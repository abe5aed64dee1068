// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of on-demand paging.

use super::*;

/// A doorbell page.
const OWNER: u32 = 1;

#[test]
fn who_waits_for_a_tag_is_woken_once_for_each_time_that_something_becomes_of_it() {
    let mut paging = Paging::default();
    paging.wake(7);
    assert!(!paging.has_woken());
    for qpn in [1, 2, 3] {
        paging.wait_for_tag(qpn, Side::Requester, 7);
    }
    paging.wait_for_tag(4, Side::Responder, 8);
    paging.wait_for_tag(3, Side::Requester, 8);
    paging.wake(7);
    paging.wake(7);
    assert_eq!(paging.next_woken(), Some((1, Side::Requester)));
    assert!(!paging.is_waiting(1, Side::Requester));
    assert!(paging.is_waiting(2, Side::Requester));
    // Who waits on, for whatever else is to become of it, is not woken before that.
    paging.wait_for_tag(1, Side::Requester, 7);
    paging.wait_for_tag(2, Side::Requester, 7);
    assert_eq!(paging.next_woken(), Some((2, Side::Requester)));
    assert_eq!(paging.next_woken(), None);
    assert!(!paging.has_woken());
    paging.wake(7);
    paging.wake(8);
    paging.forget(4);
    assert_eq!(paging.next_woken(), Some((1, Side::Requester)));
    assert_eq!(paging.next_woken(), Some((3, Side::Requester)));
    assert_eq!(paging.next_woken(), None);
    assert!(paging.tags.is_empty() && paging.waiting.is_empty() && paging.later.is_empty());
}

#[test]
fn parked_frames_are_bounded_for_each_queue_pair_and_for_all() {
    let mut paging = Paging::default();
    let mut parked = 0;
    let last = Place::Last(None);
    for qpn in 1..=100 {
        let kept = (0..100)
            .filter(|_| paging.park(qpn, OWNER, &[0; 64], None, last))
            .count();
        assert!(kept <= MAX_PARKED);
        parked += kept;
    }
    assert_eq!(parked, MAX_PARKED_ALL);
    assert_eq!(paging.parked_frames, [0, MAX_PARKED_ALL, 0]);
    // Room for others comes from those who are done with waiting, however they are.
    let frames = std::iter::from_fn(|| paging.unpark(1)).count();
    assert_eq!(frames, MAX_PARKED);
    assert!(!paging.has_parked(1));
    assert!(paging.park(100, OWNER, &[0; 64], None, last));
    paging.forget(2);
    paging.forget(100);
    let left = MAX_PARKED_ALL - 2 * MAX_PARKED;
    assert_eq!(paging.parked_frames, [0, left, 0]);
    let first = paging.unpark(3).unwrap();
    paging.park_again(3, first);
    assert_eq!(paging.parked_frames, [0, left, 0]);
    for qpn in 1..=100 {
        paging.forget(qpn);
    }
    assert_eq!(paging.parked_frames, [0; LOTS]);
    assert!(paging.parked.is_empty());
}

/// A page that a queue pair waits for.
fn wait_for_page(paging: &mut Paging, qpn: u32) {
    let fault = Fault {
        tag: 1,
        offset: 0,
        length: 1,
        write: true,
    };
    let (outcome, _) = paging.raise(qpn, Side::Responder, fault);
    assert_eq!(outcome, Outcome::Wait);
}

#[test]
fn who_waits_for_pages_leaves_room_for_others_and_for_those_who_wait_for_tags() {
    let mut paging = Paging::default();
    let fill = |paging: &mut Paging, qpns: std::ops::Range<u32>, owner| {
        let each = |qpn| std::iter::repeat_n(qpn, MAX_PARKED);
        let kept = qpns
            .flat_map(each)
            .filter(|qpn| paging.park(*qpn, owner, &[0; 64], None, Place::Last(None)));
        kept.count()
    };
    for qpn in 0..300 {
        wait_for_page(&mut paging, qpn);
    }
    // Each has as many as are left then.
    assert_eq!(fill(&mut paging, 0..100, 1), 1024);
    assert_eq!(fill(&mut paging, 100..200, 2), 512);
    assert_eq!(fill(&mut paging, 200..300, 3), 256);
    assert_eq!(fill(&mut paging, 0..100, 1), 0);
    assert_eq!(paging.parked_frames, [1024 + 512 + 256, 0, 0]);
    assert_eq!(fill(&mut paging, 300..400, 1), MAX_PARKED_ALL);
    for qpn in 0..400 {
        paging.forget(qpn);
    }
    assert_eq!(paging.parked_frames, [0; LOTS]);
    assert!(paging.of_owners.is_empty());
}

#[test]
fn frames_that_wait_for_a_page_after_a_tag_are_counted_there() {
    let mut paging = Paging::default();
    let last = Place::Last(None);
    for qpn in 0..32 {
        wait_for_page(&mut paging, qpn);
        for _ in 0..MAX_PARKED {
            paging.park(qpn, 1, &[0; 64], None, last);
        }
    }
    let pages = MAX_PARKED_ALL / 2;
    // One who has what he may have by that, and another.
    for (qpn, owner, kept) in [(100, 1, 0), (101, 2, 10)] {
        paging.wait_for_tag(qpn, Side::Responder, 7);
        for n in 0..10 {
            assert!(paging.park(qpn, owner, &[n; 64], None, last));
        }
        assert_eq!(paging.parked_frames, [pages, 10, 0]);
        let first = paging.unpark(qpn).unwrap();
        wait_for_page(&mut paging, qpn);
        assert_eq!(paging.park_again(qpn, first), 10 - kept);
        assert_eq!(paging.parked_frames, [pages + kept as usize, 0, 0]);
    }
    // In order; and back to a tag when the page is there.
    paging.open.clear();
    for n in 0..10 {
        let first = paging.unpark(101).unwrap();
        assert_eq!(first.frame, [n; 64]);
        assert_eq!(paging.park_again(101, first), 0);
        assert_eq!(paging.parked_frames, [pages, 10 - usize::from(n), 0]);
        paging.unpark(101);
    }
    assert!(paging.unpark(101).is_none() && !paging.has_parked(100));
}

#[test]
fn those_in_the_order_of_arrival_leave_room_for_requests_in_sequence() {
    let mut paging = Paging::default();
    let fill = |paging: &mut Paging, qpns: std::ops::Range<u32>, place: fn(u32) -> Place| {
        let each = |qpn| (0..MAX_PARKED as u32).map(move |n| (qpn, place(n)));
        let frames = qpns.flat_map(each);
        let kept = frames.filter(|&(qpn, place)| paging.park(qpn, OWNER, &[0; 64], None, place));
        kept.count()
    };
    let most = MAX_PARKED_ALL;
    assert_eq!(fill(&mut paging, 1..100, |_| Place::Last(None)), most);
    assert_eq!(fill(&mut paging, 100..200, Place::Psn), most);
    assert_eq!(paging.parked_frames, [0, most, most]);
    for qpn in 1..200 {
        paging.forget(qpn);
    }
    assert_eq!(paging.parked_frames, [0; LOTS]);
}

#[test]
fn requests_wait_in_the_order_of_their_sequence_numbers_each_once() {
    let mut paging = Paging::default();
    // Through the end of the numbers, in any order, some of them twice.
    for (psn, kept) in [
        (0xff_fffe, true),
        (2, true),
        (0, true),
        (0xff_fffe, false),
        (0xff_ffff, true),
        (2, false),
        (1, true),
        (0, false),
    ] {
        assert_eq!(
            paging.park(7, OWNER, &[0; 64], None, Place::Psn(psn)),
            kept,
            "{psn:#x}"
        );
    }
    for (psn, behind) in [(0xff_fffd, false), (0xff_fffe, true), (0, true), (3, true)] {
        assert_eq!(paging.stands_behind(7, psn), behind, "{psn:#x}");
        assert!(!paging.stands_behind(8, psn));
    }
    let places = std::iter::from_fn(|| paging.unpark(7)).map(|parked| parked.place);
    let expected = [0xff_fffe, 0xff_ffff, 0, 1, 2].map(Place::Psn);
    assert!(places.eq(expected));
}

#[test]
fn what_is_lost_behind_those_that_wait_is_known_when_they_are_gone() {
    let mut paging = Paging::default();
    let full = MAX_PARKED as u32;
    for psn in 0..full + 3 {
        let kept = paging.park(7, OWNER, &[0; 64], None, Place::Psn(psn));
        assert_eq!(kept, psn < full, "{psn}");
    }
    assert!(
        !paging.park(7, OWNER, &[0; 64], None, Place::Psn(full)),
        "once more"
    );
    for psn in 0..full {
        assert_eq!(paging.take_lost(7), None);
        assert_eq!(paging.unpark(7).unwrap().place, Place::Psn(psn));
    }
    assert!(!paging.has_parked(7) && !paging.stands_behind(7, full));
    // They are due until somebody has asked.
    paging.deliver(7);
    assert_eq!(paging.next_due(), Some(7));
    assert!(paging.unpark(7).is_none());
    assert_eq!(paging.take_lost(7), Some(full + 2));
    assert_eq!(paging.take_lost(7), None);
    assert!(paging.parked.is_empty());
    // One that was there before is not lost when it comes again, nor is one without a number.
    for place in [Place::Psn(1), Place::Last(None)] {
        for _ in 0..2 * MAX_PARKED {
            paging.park(8, OWNER, &[0; 64], None, place);
        }
        while paging.unpark(8).is_some() {}
        assert_eq!(paging.take_lost(8), None);
    }
    assert!(paging.parked.is_empty());
}

#[test]
fn the_earliest_are_kept_in_whatever_order_they_come() {
    let mut paging = Paging::default();
    let full = MAX_PARKED as u32;
    assert!(paging.park(7, OWNER, &[0; 64], None, Place::Psn(0)));
    // Those furthest ahead come first; each of the next ones is kept and one of those lost.
    for psn in (1..2 * full).rev() {
        let kept = paging.park(7, OWNER, &[0; 64], None, Place::Psn(psn));
        assert_eq!(kept, psn > full, "{psn}");
    }
    assert_eq!(paging.parked_frames, [0, 0, MAX_PARKED]);
    let places = std::iter::from_fn(|| paging.unpark(7)).map(|parked| parked.place);
    assert!(places.eq((0..full).map(Place::Psn)));
    assert_eq!(paging.take_lost(7), Some(2 * full - 1));
    assert_eq!(paging.parked_frames, [0; LOTS]);
}

#[test]
fn requests_stand_behind_one_that_waits_and_found_no_room() {
    let mut paging = Paging::default();
    let mut others = 100;
    while paging.park(others, OWNER, &[0; 64], None, Place::Psn(others)) {
        others += 1;
    }
    paging.wait_for_tag(7, Side::Responder, 1);
    assert!(!paging.park(7, OWNER, &[0; 64], None, Place::Psn(5)));
    assert!(!paging.has_parked(7));
    assert!(paging.stands_behind(7, 6), "and is not missed");
    paging.wake(1);
    assert_eq!(paging.next_woken(), Some((7, Side::Responder)));
    paging.deliver(7);
    assert_eq!(paging.next_due(), Some(7));
    assert!(!paging.stands_behind(7, 5));
    assert_eq!(paging.take_lost(7), Some(5));
}

#[test]
fn frames_are_due_once_and_not_when_they_are_gone() {
    let mut paging = Paging::default();
    paging.deliver(1);
    assert!(!paging.has_due(), "there is nothing to look at");
    for qpn in [1, 2] {
        assert!(paging.park(qpn, OWNER, &[0; 64], None, Place::Last(None)));
        paging.deliver(qpn);
        paging.deliver(qpn);
    }
    paging.forget(1);
    assert_eq!(paging.next_due(), Some(1));
    assert!(paging.unpark(1).is_none());
    assert_eq!(paging.next_due(), Some(2));
    assert_eq!(paging.next_due(), None);
    // Not all of them were: the rest has another turn.
    paging.deliver(2);
    assert_eq!(paging.next_due(), Some(2));
}
