// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Tests of tags and regions.

use super::*;
use crate::testing::TestMemory;
use ferrite_abi::{Buffer, Plain};

const PD: u32 = 7;
const DOMAIN: Domain = Domain {
    pd: PD,
    privileged: false,
};
const HOLDER: Holder = Holder {
    pd: PD,
    qpn: 2,
    windows_only: false,
};
const ADDRESS: u64 = 0x7000_0000;
const LENGTH: u64 = 8192;
const TAG: Tag = Tag::new(3, 9);

fn empty() -> Tpt {
    Tpt::new(Numbers {
        first: 1,
        count: MAX_TAGS,
    })
}

fn command(tag: Tag, access: u32) -> RegisterRegion {
    RegisterRegion {
        tag: tag.0,
        pd: PD,
        access,
        flags: 0,
        address: ADDRESS,
        buffer: Buffer::contiguous(0x1_0000, LENGTH),
    }
}

fn table(access: u32) -> Tpt {
    let mut tpt = empty();
    tpt.register(&command(TAG, access)).unwrap();
    tpt
}

fn allocated(max_pages: u32) -> Tpt {
    let mut tpt = empty();
    tpt.allocate(&AllocateTag {
        tag: TAG.0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages,
    })
    .unwrap();
    tpt
}

fn part(tag: Tag) -> FastRegisterPart {
    FastRegisterPart {
        tag: tag.0,
        access: ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ,
        address: ADDRESS,
        buffer: Buffer::contiguous(0x1_0000, LENGTH),
        reserved: 0,
    }
}

#[test]
fn local_checks_are_refused_each_with_its_own_error() {
    let tpt = table(0);
    let check = |tag: Tag, domain, address, length, access| {
        tpt.check_local(tag.0, address, length, domain, access)
            .map(|span| span.length())
    };
    let read = LocalAccess::Read;
    assert_eq!(check(TAG, DOMAIN, ADDRESS, LENGTH, read), Ok(LENGTH));
    assert_eq!(
        check(Tag::new(4, 9), DOMAIN, ADDRESS, 1, read),
        Err(TptError::NoEntry)
    );
    assert_eq!(
        check(Tag::new(0xff_ffff, 9), DOMAIN, ADDRESS, 1, read),
        Err(TptError::NoEntry)
    );
    let foreign = Domain { pd: 8, ..DOMAIN };
    assert_eq!(
        check(TAG, foreign, ADDRESS, 1, read),
        Err(TptError::WrongDomain)
    );
    assert_eq!(
        check(Tag::new(3, 10), DOMAIN, ADDRESS, 1, read),
        Err(TptError::WrongInstance)
    );
    assert_eq!(
        check(TAG, DOMAIN, ADDRESS, 1, LocalAccess::Write),
        Err(TptError::AccessDenied)
    );
    assert_eq!(
        allocated(4)
            .check_local(TAG.0, ADDRESS, 1, DOMAIN, read)
            .unwrap_err(),
        TptError::NotValid
    );
}

/// Of local accesses, of peers to a region, and of peers to a window that begins and ends inside it.
#[test]
fn bounds_are_exact_and_do_not_wrap() {
    let region = table(ACCESS_REMOTE_WRITE);
    let mut windowed = with_window(TagKind::Window1);
    windowed.bind(&bind_part(1), HOLDER).unwrap();
    let part = bind_part(1);
    let bound = Tag::new(5, 2);
    type Checked<'a> = &'a dyn Fn(u64, u64) -> Result<(), TptError>;
    let checks: [(u64, u64, Checked<'_>); 3] = [
        (ADDRESS, LENGTH, &|address, length| {
            region
                .check_local(TAG.0, address, length, DOMAIN, LocalAccess::Read)
                .map(|_| ())
        }),
        (ADDRESS, LENGTH, &|address, length| {
            remote(&region, TAG, address, length, 2).map(|_| ())
        }),
        (part.address, part.length, &|address, length| {
            remote(&windowed, bound, address, length, 2).map(|_| ())
        }),
    ];
    for (first, total, check) in checks {
        assert_eq!(check(first, total), Ok(()));
        assert_eq!(check(first + total - 1, 1), Ok(()));
        for (address, length) in [
            (first - 1, 1),
            (first - 1, total),
            (first, total + 1),
            (first + total, 1),
            (first + 1, u64::MAX),
            (first, u64::MAX),
            (u64::MAX, 1),
            (u64::MAX, 2),
            (0, 1),
        ] {
            assert_eq!(
                check(address, length),
                Err(TptError::OutOfBounds),
                "{address:#x} {length:#x}"
            );
        }
        // Nothing has no place, and needs none.
        for address in [0, first - 1, first, first + total, u64::MAX] {
            assert_eq!(check(address, 0), Ok(()));
        }
    }
}

#[test]
fn remote_checks_need_the_very_right() {
    let rights = [
        (RemoteAccess::Write, ACCESS_REMOTE_WRITE),
        (RemoteAccess::Read, ACCESS_REMOTE_READ),
        (RemoteAccess::Atomic, ACCESS_REMOTE_ATOMIC),
    ];
    for (access, right) in rights {
        let check = |tpt: &Tpt| {
            tpt.check_remote(TAG.0, ADDRESS, 8, HOLDER, access)
                .map(|span| span.length())
        };
        assert_eq!(check(&table(right)), Ok(8));
        assert_eq!(
            check(&table(ACCESS_ALL & !ACCESS_ZERO_BASED & !right)),
            Err(TptError::AccessDenied)
        );
    }
    let tpt = table(ACCESS_REMOTE_WRITE);
    let check = |tag: Tag, address, pd| {
        tpt.check_remote(
            tag.0,
            address,
            1,
            Holder { pd, ..HOLDER },
            RemoteAccess::Write,
        )
        .unwrap_err()
    };
    assert_eq!(check(Tag::new(9, 0), ADDRESS, PD), TptError::NoEntry);
    assert_eq!(check(TAG, ADDRESS, 1), TptError::WrongDomain);
    assert_eq!(check(Tag::new(3, 0), ADDRESS, PD), TptError::WrongInstance);
    assert_eq!(check(TAG, ADDRESS + LENGTH, PD), TptError::OutOfBounds);
}

#[test]
fn the_tag_of_all_memory_is_for_privileged_queue_pairs_and_never_for_a_peer() {
    let tpt = empty();
    let privileged = Domain {
        privileged: true,
        ..DOMAIN
    };
    let local =
        |domain, address| tpt.check_local(TAG_ALL_MEMORY, address, 16, domain, LocalAccess::Write);
    assert_eq!(local(DOMAIN, 0x1000), Err(TptError::NotPrivileged));
    assert_eq!(local(privileged, u64::MAX), Err(TptError::OutOfBounds));
    assert_eq!(
        tpt.check_remote(TAG_ALL_MEMORY, 0x1000, 16, HOLDER, RemoteAccess::Write),
        Err(TptError::NotPrivileged)
    );
    let memory = TestMemory::new(0, 0x2000);
    let span = local(privileged, 0x1000).unwrap();
    tpt.write(&memory, &span, 4, &[1, 2]).unwrap();
    assert_eq!(memory.load_u64(0x1000).unwrap(), 0x0201_0000_0000);
}

#[test]
fn zero_bytes_need_no_key() {
    let tpt = empty();
    let span = tpt
        .check_remote(0xdead_beef, 0, 0, HOLDER, RemoteAccess::Write)
        .unwrap();
    let memory = TestMemory::new(0, 0);
    assert_eq!(tpt.write(&memory, &span, 0, &[]), Ok(()));
    assert_eq!(
        tpt.write(&memory, &span, 0, &[1]),
        Err(TptError::OutOfBounds)
    );
}

#[test]
fn zero_based_addresses_count_from_the_start() {
    let tpt = table(ACCESS_ZERO_BASED);
    let check = |address| {
        tpt.check_local(TAG.0, address, 1, DOMAIN, LocalAccess::Read)
            .map(|_| ())
    };
    assert_eq!(check(0), Ok(()));
    assert_eq!(check(LENGTH), Err(TptError::OutOfBounds));
    assert_eq!(check(ADDRESS), Err(TptError::OutOfBounds));
}

#[test]
fn a_span_dies_with_the_registration_it_was_checked_against() {
    let memory = TestMemory::new(0, 0x10_0000);
    let mut tpt = table(ACCESS_REMOTE_WRITE);
    let span = tpt
        .check_remote(TAG.0, ADDRESS, 100, HOLDER, RemoteAccess::Write)
        .unwrap();
    assert_eq!(tpt.write(&memory, &span, 50, &[1; 50]), Ok(()));
    assert_eq!(
        tpt.write(&memory, &span, 51, &[1; 50]),
        Err(TptError::OutOfBounds)
    );
    // The same tag, other rights and memory.
    tpt.register(&RegisterRegion {
        flags: REGION_REPLACE,
        ..command(TAG, 0)
    })
    .unwrap();
    assert_eq!(
        tpt.write(&memory, &span, 0, &[1; 50]),
        Err(TptError::NotValid)
    );
    tpt.register(&RegisterRegion {
        flags: REGION_REPLACE,
        ..command(Tag::new(3, 10), 0)
    })
    .unwrap();
    assert_eq!(
        tpt.write(&memory, &span, 0, &[1; 50]),
        Err(TptError::WrongInstance)
    );
    tpt.release(Tag::new(3, 10)).unwrap();
    assert_eq!(
        tpt.read(&memory, &span, 0, &mut [0; 50]),
        Err(TptError::NoEntry)
    );
}

#[test]
fn commands_on_tags_are_checked() {
    let mut tpt = table(0);
    let register = |tpt: &mut Tpt, command: RegisterRegion| tpt.register(&command);
    let good = command(Tag::new(4, 0), 0);
    assert_eq!(
        register(&mut tpt, command(TAG, 0)),
        Err(CommandStatus::Exists)
    );
    for index in [0, 1 + MAX_TAGS, 0xff_ffff] {
        assert_eq!(
            register(&mut tpt, command(Tag::new(index, 1), 0)),
            Err(CommandStatus::BadNumber)
        );
        assert_eq!(
            tpt.release(Tag::new(index, 1)),
            Err(CommandStatus::BadNumber)
        );
    }
    assert_eq!(
        register(
            &mut tpt,
            RegisterRegion {
                flags: REGION_REPLACE,
                ..good
            }
        ),
        Err(CommandStatus::NotFound)
    );
    assert_eq!(
        register(
            &mut tpt,
            RegisterRegion {
                access: ACCESS_ALL + 1,
                ..good
            }
        ),
        Err(CommandStatus::BadParameter)
    );
    assert_eq!(
        register(
            &mut tpt,
            RegisterRegion {
                address: u64::MAX - 10,
                ..good
            }
        ),
        Err(CommandStatus::BadParameter)
    );
    assert_eq!(
        register(
            &mut tpt,
            RegisterRegion {
                buffer: Buffer::contiguous(0, MAX_REGION + 1),
                ..good
            }
        ),
        Err(CommandStatus::BadParameter)
    );
    assert_eq!(tpt.release(Tag::new(3, 8)), Err(CommandStatus::NotFound));
    assert_eq!(tpt.release(TAG), Ok(()));
    assert_eq!(tpt.release(TAG), Err(CommandStatus::NotFound));
}

#[test]
fn a_queue_registers_an_allocated_tag_and_invalidates_it() {
    let mut tpt = allocated(2);
    let tag = Tag::new(3, 77);
    let read = |tpt: &Tpt| {
        tpt.check_remote(tag.0, ADDRESS, 1, HOLDER, RemoteAccess::Read)
            .map(|_| ())
    };
    assert_eq!(
        tpt.register_from_queue(&part(tag), PD + 1),
        Err(TptError::WrongDomain)
    );
    assert_eq!(tpt.register_from_queue(&part(tag), PD), Ok(()));
    assert_eq!(read(&tpt), Ok(()));
    assert_eq!(
        tpt.register_from_queue(&part(tag), PD),
        Err(TptError::AlreadyValid)
    );
    assert_eq!(tpt.invalidate(TAG.0, HOLDER), Err(TptError::WrongInstance));
    assert_eq!(
        tpt.invalidate(
            tag.0,
            Holder {
                pd: PD + 1,
                ..HOLDER
            }
        ),
        Err(TptError::WrongDomain)
    );
    assert_eq!(tpt.invalidate(tag.0, HOLDER), Ok(()));
    assert_eq!(read(&tpt), Err(TptError::NotValid));
    assert_eq!(tpt.invalidate(tag.0, HOLDER), Err(TptError::NotValid));
    assert_eq!(tpt.release(TAG), Ok(()));
}

#[test]
fn a_queue_cannot_register_more_pages_or_invalidate_a_region_by_command() {
    let mut tpt = allocated(1);
    assert_eq!(
        tpt.register_from_queue(&part(TAG), PD),
        Err(TptError::NotRegistrable)
    );
    let mut tpt = table(0);
    assert_eq!(
        tpt.register_from_queue(&part(TAG), PD),
        Err(TptError::NotRegistrable)
    );
    assert_eq!(tpt.invalidate(TAG.0, HOLDER), Err(TptError::WrongKind));
}

const WINDOW: Tag = Tag::new(5, 1);
const RIGHTS: u32 = ACCESS_LOCAL_WRITE | ACCESS_WINDOW_BIND;

/// A table with a region of all rights and a window that is not bound.
fn with_window(kind: TagKind) -> Tpt {
    let mut tpt = table(RIGHTS);
    tpt.allocate(&AllocateTag {
        tag: WINDOW.0,
        pd: PD,
        kind: kind.number(),
        reserved: [0; 3],
        max_pages: 0,
    })
    .unwrap();
    tpt
}

/// A bind of bytes 100 to 200 of the region, from one instance to the next.
fn bind_part(instance: u8) -> BindPart {
    BindPart {
        window: Tag::new(5, instance).0,
        new_window: Tag::new(5, instance + 1).0,
        region: TAG.0,
        access: ACCESS_REMOTE,
        address: ADDRESS + 100,
        length: 100,
        reserved: [0; 2],
    }
}

fn remote(tpt: &Tpt, tag: Tag, address: u64, length: u64, qpn: u32) -> Result<Span, TptError> {
    let holder = Holder { qpn, ..HOLDER };
    tpt.check_remote(tag.0, address, length, holder, RemoteAccess::Write)
}

#[test]
fn a_window_gives_its_own_bounds_and_rights_to_peers_only() {
    let memory = TestMemory::new(0, 0x10_0000);
    let mut tpt = with_window(TagKind::Window1);
    let bound = Tag::new(5, 2);
    assert_eq!(
        remote(&tpt, WINDOW, ADDRESS + 100, 1, 2),
        Err(TptError::NotValid)
    );
    assert_eq!(tpt.bind(&bind_part(1), HOLDER), Ok(()));
    // On any queue pair of the domain.
    for qpn in [2, 9] {
        let span = remote(&tpt, bound, ADDRESS + 110, 90, qpn).unwrap();
        tpt.write(&memory, &span, 1, &[qpn as u8]).unwrap();
        let mut byte = [0];
        memory.read(0x1_0000 + 111, &mut byte).unwrap();
        assert_eq!(byte, [qpn as u8]);
    }
    for (address, length) in [(99, 1), (99, 102), (100, 101), (200, 1)] {
        assert_eq!(
            remote(&tpt, bound, ADDRESS + address, length, 2),
            Err(TptError::OutOfBounds)
        );
    }
    assert_eq!(
        remote(&tpt, WINDOW, ADDRESS + 100, 1, 2),
        Err(TptError::WrongInstance)
    );
    let foreign = Holder { pd: 8, ..HOLDER };
    let write = RemoteAccess::Write;
    assert_eq!(
        tpt.check_remote(bound.0, ADDRESS + 100, 1, foreign, write),
        Err(TptError::WrongDomain)
    );
    assert_eq!(
        tpt.check_local(bound.0, ADDRESS + 100, 1, DOMAIN, LocalAccess::Read),
        Err(TptError::WrongKind)
    );
    // The region itself gives peers nothing.
    assert_eq!(
        remote(&tpt, TAG, ADDRESS + 100, 1, 2),
        Err(TptError::WrongKind)
    );
    // Bound again, it gives what it is given then.
    let read_only = BindPart {
        access: ACCESS_REMOTE_READ,
        ..bind_part(2)
    };
    let old = remote(&tpt, bound, ADDRESS + 100, 1, 2).unwrap();
    assert_eq!(tpt.bind(&read_only, HOLDER), Ok(()));
    assert_eq!(
        remote(&tpt, Tag::new(5, 3), ADDRESS + 100, 1, 2),
        Err(TptError::AccessDenied)
    );
    assert_eq!(
        tpt.write(&memory, &old, 0, &[1]),
        Err(TptError::WrongInstance)
    );
}

/// Neither a refused bind nor one that never reached the device keeps the host from the window,
/// whichever of its keys it believes to be in force.
#[test]
fn a_window_is_bound_again_after_binds_that_were_not_carried_out() {
    for kind in [TagKind::Window1, TagKind::Window2B] {
        let mut tpt = with_window(kind);
        let refused = BindPart {
            length: LENGTH,
            ..bind_part(1)
        };
        assert_eq!(tpt.bind(&refused, HOLDER), Err(TptError::OutOfBounds));
        assert_eq!(tpt.bind(&bind_part(7), HOLDER), Ok(()));
        let bound = Tag::new(5, 8);
        assert!(remote(&tpt, bound, ADDRESS + 100, 1, HOLDER.qpn).is_ok());
        assert_eq!(
            remote(&tpt, WINDOW, ADDRESS + 100, 1, HOLDER.qpn),
            Err(TptError::WrongInstance)
        );
    }
}

#[test]
fn a_zero_based_window_counts_from_its_own_start() {
    let memory = TestMemory::new(0, 0x10_0000);
    for region_access in [RIGHTS, RIGHTS | ACCESS_ZERO_BASED] {
        let mut tpt = with_window(TagKind::Window1);
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(TAG, region_access)
        })
        .unwrap();
        let address = if region_access & ACCESS_ZERO_BASED != 0 {
            100
        } else {
            ADDRESS + 100
        };
        let part = BindPart {
            access: ACCESS_REMOTE | ACCESS_ZERO_BASED,
            address,
            ..bind_part(1)
        };
        assert_eq!(tpt.bind(&part, HOLDER), Ok(()));
        let bound = Tag::new(5, 2);
        let span = remote(&tpt, bound, 99, 1, 2).unwrap();
        tpt.write(&memory, &span, 0, &[0x5a]).unwrap();
        let mut byte = [0];
        memory.read(0x1_0000 + 199, &mut byte).unwrap();
        assert_eq!(byte, [0x5a]);
        assert_eq!(remote(&tpt, bound, 100, 1, 2), Err(TptError::OutOfBounds));
        memory.write(0x1_0000 + 199, &[0]).unwrap();
    }
}

#[test]
fn binds_are_refused_each_with_its_own_error_and_change_nothing() {
    let mut tpt = with_window(TagKind::Window1);
    let good = bind_part(1);
    let plain = Tag::new(7, 0);
    tpt.register(&command(plain, ACCESS_LOCAL_WRITE)).unwrap();
    let read_only = Tag::new(8, 0);
    tpt.register(&command(read_only, ACCESS_WINDOW_BIND))
        .unwrap();
    let foreign = Tag::new(9, 0);
    tpt.register(&RegisterRegion {
        pd: 8,
        ..command(foreign, RIGHTS)
    })
    .unwrap();
    tpt.allocate(&AllocateTag {
        tag: Tag::new(10, 0).0,
        pd: PD,
        kind: TagKind::Region.number(),
        reserved: [0; 3],
        max_pages: 1,
    })
    .unwrap();
    let with_region = |region: Tag| BindPart {
        region: region.0,
        ..good
    };
    let with_access = |access| BindPart { access, ..good };
    let cases = [
        (
            BindPart {
                window: Tag::new(6, 1).0,
                ..good
            },
            TptError::NoEntry,
        ),
        (
            BindPart {
                window: TAG.0,
                new_window: TAG.0,
                ..good
            },
            TptError::WrongKind,
        ),
        (
            BindPart {
                new_window: Tag::new(6, 2).0,
                ..good
            },
            TptError::WrongInstance,
        ),
        (with_region(Tag::new(0, 0)), TptError::NoEntry),
        (with_region(Tag::new(10, 0)), TptError::NotValid),
        (with_region(WINDOW), TptError::NotValid),
        (with_region(foreign), TptError::WrongDomain),
        (with_region(Tag::new(3, 8)), TptError::WrongInstance),
        (with_region(plain), TptError::AccessDenied),
        (with_region(read_only), TptError::AccessDenied),
        (with_access(ACCESS_LOCAL_WRITE), TptError::AccessDenied),
        (with_access(ACCESS_WINDOW_BIND), TptError::AccessDenied),
        (with_access(1 << 31), TptError::AccessDenied),
        (
            BindPart {
                length: LENGTH - 99,
                ..good
            },
            TptError::OutOfBounds,
        ),
        (
            BindPart {
                length: u64::MAX,
                ..good
            },
            TptError::OutOfBounds,
        ),
        (
            BindPart {
                address: ADDRESS - 1,
                ..good
            },
            TptError::OutOfBounds,
        ),
    ];
    for (part, error) in cases {
        assert_eq!(tpt.bind(&part, HOLDER), Err(error), "{part:?}");
    }
    let other = Holder { pd: 8, ..HOLDER };
    assert_eq!(tpt.bind(&good, other), Err(TptError::WrongDomain));
    // A region that may not be written to may be read through a window.
    let part = BindPart {
        access: ACCESS_REMOTE_READ,
        ..with_region(read_only)
    };
    assert_eq!(tpt.bind(&part, HOLDER), Ok(()));
    // A window is no region to bind to.
    tpt.allocate(&AllocateTag {
        tag: Tag::new(11, 1).0,
        pd: PD,
        kind: TagKind::Window1.number(),
        reserved: [0; 3],
        max_pages: 0,
    })
    .unwrap();
    let part = BindPart {
        window: Tag::new(11, 1).0,
        new_window: Tag::new(11, 2).0,
        ..with_region(Tag::new(5, 2))
    };
    assert_eq!(tpt.bind(&part, HOLDER), Err(TptError::WrongKind));
    assert_eq!(tpt.release(TAG), Ok(()));
    assert_eq!(tpt.release(read_only), Err(CommandStatus::Busy));
}

#[test]
fn a_region_stays_while_windows_are_bound_to_it() {
    let mut tpt = allocated(2);
    let mut region = part(TAG);
    region.access = RIGHTS;
    tpt.register_from_queue(&region, PD).unwrap();
    for index in [5, 6] {
        tpt.allocate(&AllocateTag {
            tag: Tag::new(index, 1).0,
            pd: PD,
            kind: TagKind::Window1.number(),
            reserved: [0; 3],
            max_pages: 0,
        })
        .unwrap();
    }
    let second = BindPart {
        window: Tag::new(6, 1).0,
        new_window: Tag::new(6, 2).0,
        ..bind_part(1)
    };
    // Bound twice, it still is one.
    for instance in [1, 2] {
        assert_eq!(tpt.bind(&bind_part(instance), HOLDER), Ok(()));
    }
    assert_eq!(tpt.bind(&second, HOLDER), Ok(()));
    let busy = |tpt: &mut Tpt| {
        assert_eq!(tpt.release(TAG), Err(CommandStatus::Busy));
        let replace = RegisterRegion {
            flags: REGION_REPLACE,
            ..command(TAG, 0)
        };
        assert_eq!(tpt.register(&replace), Err(CommandStatus::Busy));
        assert_eq!(tpt.invalidate(TAG.0, HOLDER), Err(TptError::HasWindows));
    };
    busy(&mut tpt);
    // Unbound by a bind of nothing, whatever it says of a region.
    let unbind = BindPart {
        length: 0,
        region: 0,
        ..bind_part(3)
    };
    assert_eq!(tpt.bind(&unbind, HOLDER), Ok(()));
    assert_eq!(
        remote(&tpt, Tag::new(5, 4), ADDRESS + 100, 1, 2),
        Err(TptError::NotValid)
    );
    busy(&mut tpt);
    // Released under any instance.
    assert_eq!(tpt.release(Tag::new(6, 77)), Ok(()));
    assert_eq!(tpt.invalidate(TAG.0, HOLDER), Ok(()));
    assert_eq!(tpt.bind(&bind_part(4), HOLDER), Err(TptError::NotValid));
    assert_eq!(tpt.release(TAG), Ok(()));
}

#[test]
fn a_type_2_window_belongs_to_its_queue_pair() {
    let mut tpt = with_window(TagKind::Window2B);
    let bound = Tag::new(5, 2);
    let other = Holder { qpn: 3, ..HOLDER };
    let nothing = BindPart {
        length: 0,
        ..bind_part(1)
    };
    assert_eq!(tpt.bind(&nothing, HOLDER), Err(TptError::OutOfBounds));
    assert_eq!(tpt.bind(&bind_part(1), HOLDER), Ok(()));
    assert!(remote(&tpt, bound, ADDRESS + 100, 1, 2).is_ok());
    assert_eq!(
        remote(&tpt, bound, ADDRESS + 100, 1, 3),
        Err(TptError::WrongQueuePair)
    );
    for holder in [HOLDER, other] {
        assert_eq!(tpt.bind(&bind_part(2), holder), Err(TptError::AlreadyValid));
    }
    assert_eq!(
        tpt.invalidate(bound.0, other),
        Err(TptError::WrongQueuePair)
    );
    assert_eq!(
        tpt.invalidate(WINDOW.0, HOLDER),
        Err(TptError::WrongInstance)
    );
    assert_eq!(tpt.invalidate(bound.0, HOLDER), Ok(()));
    assert_eq!(tpt.invalidate(bound.0, HOLDER), Err(TptError::NotValid));
    assert_eq!(
        remote(&tpt, bound, ADDRESS + 100, 1, 2),
        Err(TptError::NotValid)
    );
    // Free again, for any queue pair of the domain.
    assert_eq!(tpt.bind(&bind_part(2), other), Ok(()));
    tpt.invalidate_windows(2, u32::MAX);
    let bound = Tag::new(5, 3);
    assert!(remote(&tpt, bound, ADDRESS + 100, 1, 3).is_ok());
    assert_eq!(tpt.release(TAG), Err(CommandStatus::Busy));
    tpt.invalidate_windows(3, u32::MAX);
    assert_eq!(
        remote(&tpt, bound, ADDRESS + 100, 1, 3),
        Err(TptError::NotValid)
    );
    assert_eq!(tpt.release(TAG), Ok(()));
    assert!(tpt.bound.is_empty());
}

#[test]
fn a_window_with_a_command_under_way_is_unbound_with_its_queue_pair() {
    let mut tpt = with_window(TagKind::Window2B);
    let bound = Tag::new(5, 2);
    assert_eq!(tpt.bind(&bind_part(1), HOLDER), Ok(()));
    // One that will be refused, and leave what is there.
    assert!(tpt.take_up_registration(WINDOW, true));
    tpt.invalidate_windows(HOLDER.qpn, u32::MAX);
    assert!(tpt.bound.is_empty());
    tpt.enter(WINDOW);
    tpt.finish(WINDOW);
    assert_eq!(
        remote(&tpt, bound, ADDRESS + 100, 1, HOLDER.qpn),
        Err(TptError::NotValid)
    );
    assert_eq!(tpt.release(TAG), Ok(()));
}

#[test]
fn a_region_with_windows_leaves_when_they_do() {
    let mut tpt = with_window(TagKind::Window2B);
    let bound = Tag::new(5, 2);
    assert_eq!(tpt.bind(&bind_part(1), HOLDER), Ok(()));
    let window = |tpt: &Tpt| remote(tpt, bound, ADDRESS + 100, 1, HOLDER.qpn);
    // It will be found busy, and so do peers find it meanwhile.
    assert!(!tpt.take_up_release(TAG));
    assert!(window(&tpt).is_ok());
    assert_eq!(tpt.release(TAG), Err(CommandStatus::Busy));
    // The window's own release stands before it.
    assert!(tpt.take_up_release(bound));
    assert!(tpt.take_up_release(TAG));
    assert_eq!(window(&tpt).err(), Some(TptError::NotValid));
    for tag in [bound, TAG] {
        tpt.enter(tag);
        assert_eq!(tpt.release(tag), Ok(()));
        tpt.finish(tag);
    }
    assert!(tpt.in_flight.is_empty() && tpt.bound.is_empty());
}

#[test]
fn windows_of_type_1_and_impossible_ones_are_refused() {
    let mut tpt = with_window(TagKind::Window1);
    assert_eq!(tpt.bind(&bind_part(1), HOLDER), Ok(()));
    assert_eq!(
        tpt.invalidate(Tag::new(5, 2).0, HOLDER),
        Err(TptError::WrongKind)
    );
    let allocate = |tpt: &mut Tpt, index, kind, max_pages| {
        tpt.allocate(&AllocateTag {
            tag: Tag::new(index, 0).0,
            pd: PD,
            kind,
            reserved: [0; 3],
            max_pages,
        })
    };
    let window = TagKind::Window2B.number();
    let bad = Err(CommandStatus::BadParameter);
    assert_eq!(allocate(&mut tpt, 6, window, 1), bad);
    assert_eq!(allocate(&mut tpt, 6, 4, 0), bad);
    assert_eq!(allocate(&mut tpt, 6, TagKind::Region.number(), 0), bad);
    assert_eq!(allocate(&mut tpt, 5, window, 0), Err(CommandStatus::Exists));
    assert_eq!(
        allocate(&mut tpt, 1 + MAX_TAGS, window, 0),
        Err(CommandStatus::BadNumber)
    );
    // A window is not made a region, by command or by a queue.
    let replace = RegisterRegion {
        flags: REGION_REPLACE,
        ..command(Tag::new(5, 2), 0)
    };
    assert_eq!(tpt.register(&replace), bad);
    assert_eq!(
        tpt.register_from_queue(&part(Tag::new(5, 2)), PD),
        Err(TptError::NotRegistrable)
    );
}

#[test]
fn what_a_guest_can_make_the_table_take_is_bounded() {
    // Documentation/device/14-limits.md says how much that is in all.
    assert!(size_of::<Entry>() <= 136, "{}", size_of::<Entry>());
    assert_eq!(size_of::<Option<Box<Entry>>>(), 8);
    let mut tpt = empty();
    for index in [1, 1_000_000, MAX_TAGS] {
        tpt.register(&command(Tag::new(index, 1), 0)).unwrap();
    }
    assert_eq!(tpt.entries.len(), MAX_TAGS as usize);
    assert_eq!(
        tpt.register(&command(Tag::new(1 + MAX_TAGS, 1), 0)),
        Err(CommandStatus::BadNumber)
    );
    assert_eq!(tpt.entries.len(), MAX_TAGS as usize);
    assert!(tpt.entry(Tag::new(1_000_000, 1)).is_ok());
}

#[test]
fn regions_of_device_memory_reach_it_and_stay_inside() {
    let host = TestMemory::new(0, 0);
    let mut tpt = empty();
    let size = DEVICE_MEMORY_SIZE as u64;
    let device = |offset, length| RegisterRegion {
        flags: REGION_DEVICE_MEMORY,
        buffer: Buffer::contiguous(offset, length),
        ..command(TAG, ACCESS_LOCAL_WRITE | ACCESS_REMOTE)
    };
    for (offset, length) in [(0, size + 1), (size, 1), (size + 4096, 0), (1 << 63, 1)] {
        assert_eq!(
            tpt.register(&device(offset, length)),
            Err(CommandStatus::BadParameter)
        );
    }
    let mut scattered = device(0, 8192);
    scattered.buffer.order = AttOrder::First.number();
    assert_eq!(tpt.register(&scattered), Err(CommandStatus::BadParameter));
    assert_eq!(tpt.register(&device(size - 200, 200)), Ok(()));
    let check =
        |address, length| tpt.check_local(TAG.0, address, length, DOMAIN, LocalAccess::Write);
    assert_eq!(check(ADDRESS, 201), Err(TptError::OutOfBounds));
    let span = check(ADDRESS, 200).unwrap();
    tpt.write(&host, &span, 100, &[7; 100]).unwrap();
    assert_eq!(tpt.device.load(size - 101, 2), 0x0700);
    let mut back = [0; 101];
    tpt.read(&host, &span, 99, &mut back).unwrap();
    assert_eq!(back[..2], [0, 7]);
    let word = tpt
        .check_remote(TAG.0, ADDRESS, 8, HOLDER, RemoteAccess::Atomic)
        .unwrap();
    let swap = |compare| AtomicOperation::CompareSwap { compare, new: 50 };
    for (operation, original) in [
        (AtomicOperation::FetchAdd(3), 0),
        (swap(4), 3),
        (swap(3), 3),
        (AtomicOperation::FetchAdd(u64::MAX), 50),
    ] {
        assert_eq!(tpt.atomic(&host, &word, operation), Ok(original));
    }
    assert_eq!(tpt.device.load(size - 200, 8), 49);
    tpt.release(TAG).unwrap();
    assert_eq!(tpt.write(&host, &span, 0, &[1]), Err(TptError::NoEntry));
}

/// A table with a one-touch region, and a span of it.
fn one_touch() -> (Tpt, Span) {
    let tpt = table(ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_ONE_TOUCH);
    let span = remote(&tpt, TAG, ADDRESS, 100, 2).unwrap();
    (tpt, span)
}

fn is_valid(tpt: &Tpt) -> bool {
    remote(tpt, TAG, ADDRESS, 100, 2).is_ok()
}

#[test]
fn packets_before_the_last_and_entries_of_many_touches_are_not_touched() {
    let arrivals = [Arrival::InOrder, Arrival::Ahead(7), Arrival::Outside];
    // Case 1.
    let (mut tpt, span) = one_touch();
    for arrival in arrivals {
        assert_eq!(tpt.touch(&span, false, arrival), Ok(Touch::Place));
    }
    assert!(is_valid(&tpt));
    assert_eq!(
        tpt.touch(&span, true, Arrival::InOrder),
        Ok(Touch::Place),
        "it was not touched so far"
    );
    // Case 2.
    let mut tpt = table(ACCESS_REMOTE_WRITE);
    let span = remote(&tpt, TAG, ADDRESS, 100, 2).unwrap();
    for arrival in arrivals {
        assert_eq!(tpt.touch(&span, true, arrival), Ok(Touch::Place));
    }
    assert!(is_valid(&tpt));
    assert!(!tpt.caught_up(TAG, 100));
    // Nor does a message without bytes touch anything.
    assert_eq!(
        tpt.touch(&Span::EMPTY, true, Arrival::InOrder),
        Ok(Touch::Place)
    );
}

#[test]
fn the_last_packet_in_order_ends_a_one_touch_entry() {
    // Case 4.
    let (mut tpt, span) = one_touch();
    let other = remote(&tpt, TAG, ADDRESS + 500, 10, 3).unwrap();
    assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
    assert!(!is_valid(&tpt));
    // A second message that was under way finds nothing any more.
    for last in [false, true] {
        assert_eq!(
            tpt.touch(&other, last, Arrival::InOrder),
            Err(TptError::NotValid)
        );
    }
    assert_eq!(
        tpt.write(&TestMemory::new(0, 0), &other, 0, &[1]),
        Err(TptError::NotValid)
    );
    // It can still be replaced and released.
    tpt.register(&RegisterRegion {
        flags: REGION_REPLACE,
        ..command(TAG, ACCESS_REMOTE_WRITE | ACCESS_ONE_TOUCH)
    })
    .unwrap();
    assert!(is_valid(&tpt));
    assert_eq!(tpt.release(TAG), Ok(()));
}

#[test]
fn the_last_packet_out_of_order_ends_it_when_the_stream_catches_up() {
    // Case 5, around the end of the numbers too.
    for end in [1000, u32::MAX, 0] {
        let (mut tpt, span) = one_touch();
        assert_eq!(
            tpt.touch(&span, true, Arrival::Ahead(end)),
            Ok(Touch::Place)
        );
        assert!(is_valid(&tpt));
        // What was missing comes, a piece at a time.
        assert!(!tpt.caught_up(TAG, end.wrapping_sub(20)));
        assert_eq!(tpt.touch(&span, false, Arrival::InOrder), Ok(Touch::Place));
        assert!(!tpt.caught_up(TAG, end.wrapping_sub(1)));
        assert!(!tpt.caught_up(Tag::new(3, 8), end));
        assert!(is_valid(&tpt));
        assert!(tpt.caught_up(TAG, end));
        assert!(!is_valid(&tpt));
        assert!(!tpt.caught_up(TAG, end));
    }
}

#[test]
fn a_second_message_to_a_touched_entry_is_an_error() {
    // Case 3.
    for arrival in [Arrival::InOrder, Arrival::Ahead(9), Arrival::Outside] {
        let (mut tpt, span) = one_touch();
        tpt.touch(&span, true, Arrival::Ahead(1000)).unwrap();
        assert_eq!(tpt.touch(&span, true, arrival), Err(TptError::Touched));
        assert!(!is_valid(&tpt));
    }
}

#[test]
fn what_may_not_be_received_now_is_dropped() {
    // Case 6.
    let (mut tpt, span) = one_touch();
    assert_eq!(tpt.touch(&span, true, Arrival::Outside), Ok(Touch::Drop));
    assert!(is_valid(&tpt));
    assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
}

#[test]
fn a_message_through_a_window_touches_its_region() {
    let bind = |tpt: &mut Tpt, access: u32| {
        let part = BindPart {
            access: ACCESS_REMOTE_WRITE | access,
            ..bind_part(1)
        };
        tpt.bind(&part, HOLDER).unwrap();
        remote(tpt, Tag::new(5, 2), ADDRESS + 100, 1, HOLDER.qpn).unwrap()
    };
    let is_there = |tpt: &Tpt| tpt.stands(TAG.0).is_ok();
    let bound = |region: u32, window: u32| {
        let mut tpt = with_window(TagKind::Window2B);
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(TAG, FULL | region)
        })
        .unwrap();
        let span = bind(&mut tpt, window);
        (tpt, span)
    };
    let memory = TestMemory::new(0, 0);
    for once in [0, ACCESS_ONE_TOUCH] {
        // A region that takes many, whatever the window takes.
        let (mut tpt, span) = bound(0, once);
        assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
        assert!(is_there(&tpt));
        // One that takes one: in order; ahead of its time; outside; a second time.
        let (mut tpt, span) = bound(ACCESS_ONE_TOUCH, once);
        for arrival in [Arrival::InOrder, Arrival::Ahead(7), Arrival::Outside] {
            assert_eq!(tpt.touch(&span, false, arrival), Ok(Touch::Place));
        }
        assert_eq!(tpt.touch(&span, true, Arrival::Outside), Ok(Touch::Drop));
        assert!(is_there(&tpt));
        assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
        assert!(!is_there(&tpt));
        assert_eq!(tpt.write(&memory, &span, 0, &[1]), Err(TptError::NotValid));
        assert_eq!(
            tpt.touch(&span, true, Arrival::InOrder),
            Err(TptError::NotValid)
        );
        let (mut tpt, span) = bound(ACCESS_ONE_TOUCH, once);
        assert_eq!(tpt.touch(&span, true, Arrival::Ahead(7)), Ok(Touch::Place));
        assert!(!tpt.caught_up(span.tag, 6) && is_there(&tpt));
        assert!(tpt.caught_up(span.tag, 7) && !is_there(&tpt));
        assert_eq!(
            remote(&tpt, span.tag, ADDRESS + 100, 1, HOLDER.qpn).is_ok(),
            once == 0
        );
        let (mut tpt, span) = bound(ACCESS_ONE_TOUCH, once);
        tpt.touch(&span, true, Arrival::Ahead(7)).unwrap();
        let region = remote(&tpt, TAG, ADDRESS, 1, HOLDER.qpn).unwrap();
        assert_eq!(
            tpt.touch(&region, true, Arrival::InOrder),
            Err(TptError::Touched)
        );
        // Used up by others it is out of reach.
        let (mut tpt, span) = bound(ACCESS_ONE_TOUCH, once);
        let region = remote(&tpt, TAG, ADDRESS, 1, HOLDER.qpn).unwrap();
        tpt.touch(&region, true, Arrival::InOrder).unwrap();
        assert_eq!(
            tpt.touch(&span, true, Arrival::InOrder),
            Err(TptError::NotValid)
        );
    }
}

#[test]
fn a_touched_window_is_unbound_and_a_new_registration_untouched() {
    let mut tpt = with_window(TagKind::Window2B);
    let part = BindPart {
        access: ACCESS_REMOTE_WRITE | ACCESS_ONE_TOUCH,
        ..bind_part(1)
    };
    tpt.bind(&part, HOLDER).unwrap();
    let span = remote(&tpt, Tag::new(5, 2), ADDRESS + 100, 1, 2).unwrap();
    tpt.touch(&span, true, Arrival::Ahead(5)).unwrap();
    tpt.invalidate(Tag::new(5, 2).0, HOLDER).unwrap();
    let part = BindPart {
        access: ACCESS_REMOTE_WRITE | ACCESS_ONE_TOUCH,
        ..bind_part(2)
    };
    tpt.bind(&part, HOLDER).unwrap();
    let span = remote(&tpt, Tag::new(5, 3), ADDRESS + 100, 1, 2).unwrap();
    assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
    assert_eq!(
        remote(&tpt, Tag::new(5, 3), ADDRESS + 100, 1, 2),
        Err(TptError::NotValid)
    );
    assert!(tpt.bound.is_empty());
    assert_eq!(tpt.release(TAG), Ok(()));
    // The answer to a read touches what it is placed in, if it may be touched once.
    let mut tpt = table(ACCESS_LOCAL_WRITE | ACCESS_ONE_TOUCH);
    let check = |tpt: &Tpt| {
        tpt.check_local(TAG.0, ADDRESS, 1, DOMAIN, LocalAccess::Write)
            .map(|_| ())
    };
    tpt.touch_local(&[sge(Tag::new(3, 8), ADDRESS, 1)], DOMAIN);
    tpt.touch_local(&[sge(Tag::new(4, 9), ADDRESS, 1)], DOMAIN);
    assert_eq!(check(&tpt), Ok(()));
    tpt.touch_local(&[sge(TAG, ADDRESS, 0)], DOMAIN);
    assert_eq!(check(&tpt), Ok(()));
    tpt.touch_local(&[sge(TAG, ADDRESS, 1)], DOMAIN);
    assert_eq!(check(&tpt), Err(TptError::NotValid));
    let mut tpt = table(ACCESS_LOCAL_WRITE);
    tpt.touch_local(&[sge(TAG, ADDRESS, 1)], DOMAIN);
    assert_eq!(check(&tpt), Ok(()));
}

fn sge(tag: Tag, address: u64, length: u32) -> Sge {
    Sge {
        address,
        length,
        lkey: tag.0,
    }
}

/// All rights that a piece can give, and that windows may be bound.
const FULL: u32 = RIGHTS | ACCESS_REMOTE | ACCESS_FLUSH_GLOBAL;
/// The tags of a list and of the regions that it has pieces of.
const LIST: Tag = Tag::new(7, 1);
const OTHER: Tag = Tag::new(8, 5);
const LIST_ADDRESS: u64 = 0x9000_0000;

fn list_part(tag: Tag) -> ListPart {
    ListPart {
        tag: tag.0,
        access: FULL & !ACCESS_WINDOW_BIND,
        address: LIST_ADDRESS,
        pieces: 0,
        reserved0: [0; 7],
        reserved1: 0,
    }
}

/// Two regions, and a list that is not registered.
fn with_list() -> Tpt {
    let mut tpt = table(FULL);
    tpt.register(&RegisterRegion {
        buffer: Buffer::contiguous(0x2_0000, LENGTH),
        address: ADDRESS * 2,
        ..command(OTHER, FULL)
    })
    .unwrap();
    assert_eq!(allocate_list(&mut tpt, LIST, 3), Ok(()));
    tpt
}

fn allocate_list(tpt: &mut Tpt, tag: Tag, max_pages: u32) -> Result<(), CommandStatus> {
    tpt.allocate(&AllocateTag {
        tag: tag.0,
        pd: PD,
        kind: TagKind::List.number(),
        reserved: [0; 3],
        max_pages,
    })
}

/// 100 bytes of the first region, 50 of the second, 30 of the first.
fn pieces() -> [Sge; 3] {
    [
        sge(TAG, ADDRESS + 4000, 100),
        sge(OTHER, ADDRESS * 2 + LENGTH - 50, 50),
        sge(TAG, ADDRESS, 30),
    ]
}

fn listed() -> Tpt {
    let mut tpt = with_list();
    tpt.register_list(&list_part(LIST), &pieces(), PD).unwrap();
    tpt
}

fn local_write(tpt: &Tpt, tag: Tag, address: u64, length: u64) -> Result<Span, TptError> {
    tpt.check_local(tag.0, address, length, DOMAIN, LocalAccess::Write)
}

#[test]
fn a_list_is_its_pieces_one_after_another() {
    let memory = TestMemory::new(0x1_0000, 0x2_0000);
    let tpt = listed();
    let span = local_write(&tpt, LIST, LIST_ADDRESS, 180).unwrap();
    let data: Vec<u8> = (1..=180).collect();
    tpt.write(&memory, &span, 0, &data).unwrap();
    let at = |address: u64, length: usize| {
        let mut bytes = vec![0; length];
        memory.read(address, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(at(0x1_0000 + 4000, 100), data[..100]);
    assert_eq!(at(0x2_0000 + LENGTH - 50, 50), data[100..150]);
    assert_eq!(at(0x1_0000, 30), data[150..]);
    // And nothing else.
    assert_eq!(at(0x1_0000 + 4100, 1), [0]);
    assert_eq!(at(0x2_0000 + LENGTH - 51, 1), [0]);
    assert_eq!(at(0x1_0000 + 30, 1), [0]);
    // From any byte to any byte, the borders among them.
    for start in [0, 1, 98, 99, 100, 101, 149, 150, 179] {
        for end in [1, 99, 100, 101, 149, 150, 151, 180] {
            if start >= end {
                continue;
            }
            let (address, length) = (LIST_ADDRESS + start, end - start);
            let mut read = vec![0; length as usize];
            let span = local_write(&tpt, LIST, address, length).unwrap();
            tpt.read(&memory, &span, 0, &mut read).unwrap();
            assert_eq!(read, data[start as usize..end as usize]);
            // The same byte by byte within one span.
            for (n, expected) in read.iter().enumerate() {
                let mut byte = [0];
                tpt.read(&memory, &span, n as u64, &mut byte).unwrap();
                assert_eq!(byte[0], *expected);
            }
        }
    }
}

#[test]
fn a_list_ends_with_its_last_byte() {
    let tpt = listed();
    for (address, length, good) in [
        (LIST_ADDRESS, 180, true),
        (LIST_ADDRESS, 181, false),
        (LIST_ADDRESS + 179, 1, true),
        (LIST_ADDRESS + 180, 1, false),
        (LIST_ADDRESS - 1, 1, false),
        (LIST_ADDRESS - 1, 2, false),
        (u64::MAX, 2, false),
        (0, u64::MAX, false),
        (LIST_ADDRESS, u64::MAX, false),
    ] {
        let checked = local_write(&tpt, LIST, address, length).map(|_| ());
        let expected = good.then_some(()).ok_or(TptError::OutOfBounds);
        assert_eq!(checked, expected, "{address:#x} {length}");
        let checked = remote(&tpt, LIST, address, length, 2).map(|_| ());
        assert_eq!(checked, expected, "{address:#x} {length}");
    }
    // Addresses may be such that it ends just below 2^64, or count from zero.
    let mut tpt = with_list();
    for (address, expected) in [
        (u64::MAX - 179, Err(TptError::OutOfBounds)),
        (u64::MAX - 180, Ok(())),
    ] {
        let part = ListPart {
            address,
            ..list_part(LIST)
        };
        assert_eq!(tpt.register_list(&part, &pieces(), PD), expected);
    }
    assert!(local_write(&tpt, LIST, u64::MAX - 1, 1).is_ok());
    assert_eq!(
        local_write(&tpt, LIST, u64::MAX, 1),
        Err(TptError::OutOfBounds)
    );
    tpt.invalidate(LIST.0, HOLDER).unwrap();
    let part = ListPart {
        access: list_part(LIST).access | ACCESS_ZERO_BASED,
        ..list_part(LIST)
    };
    tpt.register_list(&part, &pieces(), PD).unwrap();
    assert!(local_write(&tpt, LIST, 0, 180).is_ok());
    assert_eq!(
        local_write(&tpt, LIST, LIST_ADDRESS, 1),
        Err(TptError::OutOfBounds)
    );
}

#[test]
fn a_list_that_may_not_be_is_refused_and_changes_nothing() {
    let mut tpt = with_list();
    let right = list_part(LIST);
    let region = |access| RegisterRegion {
        address: 0,
        ..command(Tag::new(9, 0), access)
    };
    tpt.register(&RegisterRegion {
        pd: PD + 1,
        ..command(Tag::new(10, 0), FULL)
    })
    .unwrap();
    tpt.register(&region(FULL)).unwrap();
    tpt.register(&command(Tag::new(11, 0), ACCESS_REMOTE))
        .unwrap();
    assert_eq!(allocate_list(&mut tpt, Tag::new(12, 0), 1), Ok(()));
    tpt.register_list(&list_part(Tag::new(12, 0)), &pieces()[..1], PD)
        .unwrap();
    let window = AllocateTag {
        tag: Tag::new(13, 0).0,
        pd: PD,
        kind: TagKind::Window1.number(),
        reserved: [0; 3],
        max_pages: 0,
    };
    tpt.allocate(&window).unwrap();
    let bind = BindPart {
        window: window.tag,
        new_window: window.tag,
        ..bind_part(0)
    };
    tpt.bind(&bind, HOLDER).unwrap();
    let one = |lkey: Tag, address, length| vec![sge(lkey, address, length)];
    let whole = (ADDRESS, LENGTH as u32);
    let weak = Tag::new(11, 0);
    let with = |access| ListPart { access, ..right };
    let cases = [
        // The list itself.
        (
            TptError::NoEntry,
            list_part(Tag::new(99, 0)),
            pieces().to_vec(),
        ),
        (TptError::NotRegistrable, list_part(TAG), pieces().to_vec()),
        (TptError::NotRegistrable, right, vec![pieces()[0]; 4]),
        (TptError::NotRegistrable, right, vec![]),
        (
            TptError::AccessDenied,
            with(ACCESS_WINDOW_BIND),
            pieces().to_vec(),
        ),
        (TptError::AccessDenied, with(1 << 20), pieces().to_vec()),
        (
            TptError::AlreadyValid,
            list_part(Tag::new(12, 0)),
            one(TAG, ADDRESS, 1),
        ),
        // A piece.
        (TptError::PieceEmpty, right, one(TAG, ADDRESS, 0)),
        (
            TptError::PieceKind,
            right,
            one(Tag(TAG_ALL_MEMORY), ADDRESS, 1),
        ),
        (
            TptError::PieceKind,
            right,
            one(Tag::new(12, 0), LIST_ADDRESS, 1),
        ),
        (
            TptError::PieceKind,
            right,
            one(Tag(window.tag), ADDRESS + 100, 1),
        ),
        (
            TptError::PieceRefused,
            right,
            one(Tag::new(98, 0), ADDRESS, 1),
        ),
        (TptError::PieceRefused, right, one(LIST, LIST_ADDRESS, 1)),
        (
            TptError::PieceRefused,
            right,
            one(Tag::new(10, 0), ADDRESS, 1),
        ),
        (
            TptError::PieceRefused,
            right,
            one(Tag::new(3, 8), ADDRESS, 1),
        ),
        (TptError::PieceRefused, right, one(TAG, ADDRESS - 1, 1)),
        (
            TptError::PieceRefused,
            right,
            one(TAG, ADDRESS + 1, whole.1),
        ),
        (TptError::PieceRefused, right, one(TAG, ADDRESS + LENGTH, 1)),
        (TptError::PieceRefused, right, one(TAG, u64::MAX, 2)),
        (
            TptError::PieceRefused,
            right,
            one(Tag::new(9, 0), u64::MAX, u32::MAX),
        ),
        // Whichever piece it is.
        (
            TptError::PieceEmpty,
            right,
            vec![pieces()[0], sge(TAG, ADDRESS, 0)],
        ),
        // One that gives less: each right, and what writing needs.
        (
            TptError::PieceRights,
            with(ACCESS_LOCAL_WRITE),
            one(weak, ADDRESS, 1),
        ),
        (
            TptError::PieceRights,
            with(ACCESS_REMOTE_WRITE),
            one(weak, ADDRESS, 1),
        ),
        (
            TptError::PieceRights,
            with(ACCESS_REMOTE_ATOMIC),
            one(weak, ADDRESS, 1),
        ),
        (
            TptError::PieceRights,
            with(ACCESS_FLUSH_GLOBAL),
            one(weak, ADDRESS, 1),
        ),
    ];
    for (error, part, sges) in cases {
        assert_eq!(tpt.register_list(&part, &sges, PD), Err(error), "{sges:x?}");
        assert_eq!(
            local_write(&tpt, LIST, LIST_ADDRESS, 1),
            Err(TptError::NotValid)
        );
    }
    assert_eq!(
        tpt.register_list(&right, &pieces(), PD + 1),
        Err(TptError::WrongDomain)
    );
    // What the weak one has, it gives: and a whole region is a piece like any other.
    let read = with(ACCESS_REMOTE_READ | ACCESS_ZERO_BASED | ACCESS_ONE_TOUCH);
    let sges = [sge(weak, ADDRESS, whole.1), sge(TAG, whole.0, whole.1)];
    assert_eq!(tpt.register_list(&read, &sges, PD), Ok(()));
    assert_eq!(
        local_write(&tpt, LIST, 0, 1),
        Err(TptError::AccessDenied),
        "the list gives less than its pieces"
    );
    // Each tells itself apart.
    let syndromes = [
        TptError::PieceRefused,
        TptError::PieceRights,
        TptError::PieceKind,
        TptError::PieceEmpty,
    ];
    assert_eq!(syndromes.map(TptError::vendor_syndrome), [15, 16, 17, 18]);
}

#[test]
fn each_right_of_a_list_is_asked_of_each_piece() {
    let rights = [
        ACCESS_LOCAL_WRITE,
        ACCESS_REMOTE_WRITE,
        ACCESS_REMOTE_READ,
        ACCESS_REMOTE_ATOMIC,
        ACCESS_FLUSH_GLOBAL,
    ];
    let all = rights.iter().fold(0, |all, right| all | right);
    for right in rights {
        let mut tpt = with_list();
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            address: ADDRESS * 2,
            ..command(OTHER, all & !right)
        })
        .unwrap();
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(TAG, all)
        })
        .unwrap();
        let part = ListPart {
            access: right,
            ..list_part(LIST)
        };
        assert_eq!(
            tpt.register_list(&part, &pieces(), PD),
            Err(TptError::PieceRights),
            "{right:#x}"
        );
        assert_eq!(tpt.register_list(&part, &pieces()[..1], PD), Ok(()));
    }
}

#[test]
fn a_list_that_lost_a_piece_is_not_valid() {
    let memory = TestMemory::new(0x1_0000, 0x2_0000);
    let again = RegisterRegion {
        buffer: Buffer::contiguous(0x2_0000, LENGTH),
        address: ADDRESS * 2,
        ..command(OTHER, FULL)
    };
    let replaced = RegisterRegion {
        flags: REGION_REPLACE,
        ..again
    };
    let losses: [&dyn Fn(&mut Tpt); 3] = [
        &|tpt| tpt.release(OTHER).unwrap(),
        // The same memory under the same tag is another registration all the same.
        &|tpt| {
            tpt.release(OTHER).unwrap();
            tpt.register(&again).unwrap();
        },
        &|tpt| tpt.register(&replaced).unwrap(),
    ];
    for lose in losses {
        let mut tpt = listed();
        // Of a piece that is there, and checked before.
        let span = remote(&tpt, LIST, LIST_ADDRESS, 10, 2).unwrap();
        tpt.write(&memory, &span, 0, &[1]).unwrap();
        lose(&mut tpt);
        assert_eq!(
            tpt.write(&memory, &span, 1, &[1]),
            Err(TptError::NotValid),
            "the next packet"
        );
        assert_eq!(
            tpt.touch(&span, true, Arrival::InOrder).map(|_| ()),
            Err(TptError::NotValid)
        );
        let refused = Err(TptError::NotValid);
        assert_eq!(remote(&tpt, LIST, LIST_ADDRESS, 1, 2), refused);
        assert_eq!(local_write(&tpt, LIST, LIST_ADDRESS, 1), refused);
        assert_eq!(
            tpt.check_flush(LIST.0, None, HOLDER).unwrap_err(),
            TptError::NotValid
        );
        // It may be invalidated, or registered again without.
        let mut other = listed();
        lose(&mut other);
        assert_eq!(other.invalidate(LIST.0, HOLDER), Ok(()));
        let next = list_part(Tag::new(7, 2));
        assert_eq!(tpt.register_list(&next, &pieces()[..1], PD), Ok(()));
        assert!(remote(&tpt, Tag::new(7, 2), LIST_ADDRESS, 100, 2).is_ok());
        assert_eq!(
            remote(&tpt, LIST, LIST_ADDRESS, 1, 2),
            Err(TptError::WrongInstance)
        );
    }
}

#[test]
fn a_piece_that_is_invalidated_or_used_up_is_lost() {
    let memory = TestMemory::new(0x1_0000, 0x2_0000);
    for used_up in [false, true] {
        let mut tpt = with_list();
        let fast = Tag::new(20, 0);
        tpt.allocate(&AllocateTag {
            tag: fast.0,
            pd: PD,
            kind: TagKind::Region.number(),
            reserved: [0; 3],
            max_pages: 4,
        })
        .unwrap();
        let one_touch = if used_up { ACCESS_ONE_TOUCH } else { 0 };
        let register = FastRegisterPart {
            access: FULL | one_touch,
            ..part(fast)
        };
        tpt.register_from_queue(&register, PD).unwrap();
        let sges = [pieces()[0], sge(fast, register.address, 10)];
        tpt.register_list(&list_part(LIST), &sges, PD).unwrap();
        assert!(remote(&tpt, LIST, LIST_ADDRESS, 110, 2).is_ok());
        if used_up {
            // A message to the other piece leaves it; one that reaches it through the list does
            // not, even with its first byte.
            let span = remote(&tpt, LIST, LIST_ADDRESS, 100, 2).unwrap();
            tpt.touch(&span, true, Arrival::InOrder).unwrap();
            assert!(remote(&tpt, LIST, LIST_ADDRESS, 110, 2).is_ok());
            let span = remote(&tpt, LIST, LIST_ADDRESS + 50, 51, 2).unwrap();
            tpt.touch(&span, false, Arrival::InOrder).unwrap();
            assert!(remote(&tpt, LIST, LIST_ADDRESS, 110, 2).is_ok());
            tpt.write(&memory, &span, 0, &[1; 51]).unwrap();
            tpt.touch(&span, true, Arrival::InOrder).unwrap();
        } else {
            tpt.invalidate(fast.0, HOLDER).unwrap();
        }
        list_is_over(&tpt);
        // Registered again under the same tag it is not what the list was made of.
        tpt.register_from_queue(&register, PD).unwrap();
        list_is_over(&tpt);
    }
}

/// What the list stood for is not there any more.
#[track_caller]
fn list_is_over(tpt: &Tpt) {
    let found = remote(tpt, LIST, LIST_ADDRESS, 1, 2);
    assert_eq!(found, Err(TptError::NotValid));
}

#[test]
fn an_instance_that_comes_round_again_is_another_registration() {
    let mut tpt = listed();
    let span = remote(&tpt, LIST, LIST_ADDRESS, 180, 2).unwrap();
    let memory = TestMemory::new(0x1_0000, 0x2_0000);
    for round in 1..=256u32 {
        tpt.invalidate(Tag::new(7, round as u8).0, HOLDER).unwrap();
        let next = list_part(Tag::new(7, (round + 1) as u8));
        tpt.register_list(&next, &pieces(), PD).unwrap();
    }
    // The same tag, and the same pieces.
    assert!(remote(&tpt, LIST, LIST_ADDRESS, 180, 2).is_ok());
    assert_eq!(tpt.write(&memory, &span, 0, &[1]), Err(TptError::NotValid));
    // Likewise where it is a piece's instance that came round.
    let span = remote(&tpt, LIST, LIST_ADDRESS, 180, 2).unwrap();
    for round in 1..=256u32 {
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            ..command(Tag::new(3, (9 + round) as u8), FULL)
        })
        .unwrap();
    }
    assert!(local_write(&tpt, TAG, ADDRESS, 1).is_ok());
    assert_eq!(tpt.write(&memory, &span, 0, &[1]), Err(TptError::NotValid));
    list_is_over(&tpt);
}

#[test]
fn lists_are_of_their_own_kind() {
    let mut tpt = listed();
    // Neither registered like a region nor replaced by one, nor a place for windows.
    let fast = FastRegisterPart { ..part(LIST) };
    assert_eq!(
        tpt.register_from_queue(&fast, PD),
        Err(TptError::NotRegistrable)
    );
    let replace = RegisterRegion {
        flags: REGION_REPLACE,
        ..command(LIST, 0)
    };
    assert_eq!(tpt.register(&replace), Err(CommandStatus::BadParameter));
    assert_eq!(tpt.register(&command(LIST, 0)), Err(CommandStatus::Exists));
    let mut other = with_window(TagKind::Window1);
    assert_eq!(allocate_list(&mut other, LIST, 1), Ok(()));
    let weak = ListPart {
        access: ACCESS_LOCAL_WRITE,
        ..list_part(LIST)
    };
    other
        .register_list(&weak, &[sge(TAG, ADDRESS, 100)], PD)
        .unwrap();
    let bind = BindPart {
        region: LIST.0,
        address: LIST_ADDRESS,
        length: 10,
        ..bind_part(0)
    };
    assert_eq!(other.bind(&bind, HOLDER), Err(TptError::WrongKind));
    // Its domain, its instance.
    let stranger = Domain {
        pd: PD + 1,
        privileged: true,
    };
    let check = |tpt: &Tpt, tag: Tag, domain| {
        tpt.check_local(tag.0, LIST_ADDRESS, 1, domain, LocalAccess::Read)
            .map(|_| ())
    };
    assert_eq!(check(&tpt, LIST, stranger), Err(TptError::WrongDomain));
    let old = Tag::new(7, 0);
    assert_eq!(check(&tpt, old, DOMAIN), Err(TptError::WrongInstance));
    assert_eq!(tpt.invalidate(old.0, HOLDER), Err(TptError::WrongInstance));
    let other_domain = Holder {
        pd: PD + 1,
        ..HOLDER
    };
    assert_eq!(
        tpt.invalidate(LIST.0, other_domain),
        Err(TptError::WrongDomain)
    );
    assert_eq!(tpt.invalidate(LIST.0, HOLDER), Ok(()));
    assert_eq!(check(&tpt, LIST, DOMAIN), Err(TptError::NotValid));
    assert_eq!(tpt.invalidate(LIST.0, HOLDER), Err(TptError::NotValid));
    // Released under any instance.
    assert_eq!(tpt.release(Tag::new(7, 77)), Ok(()));
    assert_eq!(check(&tpt, LIST, DOMAIN), Err(TptError::NoEntry));
}

#[test]
fn an_atomic_of_a_list_lies_in_one_piece() {
    let memory = TestMemory::new(0x1_0000, 0x2_0000);
    let mut tpt = with_list();
    let sges = [sge(TAG, ADDRESS, 12), sge(OTHER, ADDRESS * 2 + 8, 12)];
    tpt.register_list(&list_part(LIST), &sges, PD).unwrap();
    let mut add = |offset: u64| {
        let span = tpt.check_remote(
            LIST.0,
            LIST_ADDRESS + offset,
            8,
            HOLDER,
            RemoteAccess::Atomic,
        )?;
        tpt.atomic(&memory, &span, AtomicOperation::FetchAdd(5))
    };
    assert_eq!(add(0), Ok(0));
    assert_eq!(add(0), Ok(5));
    assert_eq!(add(8), Err(TptError::OutOfBounds));
    // In one piece, but not at one multiple of eight in memory.
    assert!(matches!(add(16), Err(TptError::Translation(_))));
    assert_eq!(memory.get::<u64>(0x1_0000), 10);
    assert_eq!(memory.get::<u64>(0x1_0008), 0);
    assert_eq!(memory.get::<u64>(0x2_0008), 0);
}

#[test]
fn a_list_may_be_used_once() {
    let mut tpt = with_list();
    let part = ListPart {
        access: list_part(LIST).access | ACCESS_ONE_TOUCH,
        ..list_part(LIST)
    };
    tpt.register_list(&part, &pieces(), PD).unwrap();
    let span = remote(&tpt, LIST, LIST_ADDRESS, 180, 2).unwrap();
    assert_eq!(tpt.touch(&span, false, Arrival::InOrder), Ok(Touch::Place));
    assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
    list_is_over(&tpt);
    // Its pieces are as they were, and it can be registered again.
    assert!(remote(&tpt, TAG, ADDRESS, 1, 2).is_ok());
    tpt.register_list(&part, &pieces(), PD).unwrap();
    // So too by the answer to a read.
    let elsewhere = sge(LIST, LIST_ADDRESS + 180, 1);
    tpt.touch_local(&[elsewhere], DOMAIN);
    assert!(remote(&tpt, LIST, LIST_ADDRESS, 1, 2).is_ok());
    tpt.touch_local(&[sge(LIST, LIST_ADDRESS + 100, 1)], DOMAIN);
    list_is_over(&tpt);
    // Ahead of its time: when the stream has come so far.
    tpt.register_list(&part, &pieces(), PD).unwrap();
    let span = remote(&tpt, LIST, LIST_ADDRESS, 180, 2).unwrap();
    assert_eq!(tpt.touch(&span, true, Arrival::Ahead(7)), Ok(Touch::Place));
    assert!(!tpt.caught_up(LIST, 6));
    assert!(remote(&tpt, LIST, LIST_ADDRESS, 1, 2).is_ok());
    assert!(tpt.caught_up(LIST, 7));
    list_is_over(&tpt);
}

#[test]
fn a_region_that_takes_one_message_takes_no_more_through_a_list() {
    let mut tpt = with_list();
    tpt.register(&RegisterRegion {
        flags: REGION_REPLACE,
        ..command(TAG, FULL | ACCESS_ONE_TOUCH)
    })
    .unwrap();
    // The first and the third piece are of it.
    tpt.register_list(&list_part(LIST), &pieces(), PD).unwrap();
    let span = remote(&tpt, LIST, LIST_ADDRESS + 100, 50, 2).unwrap();
    assert_eq!(tpt.touch(&span, true, Arrival::InOrder), Ok(Touch::Place));
    assert!(remote(&tpt, TAG, ADDRESS, 1, 2).is_ok());
    // Ahead of its time a message that has bytes of both touches it once.
    let span = remote(&tpt, LIST, LIST_ADDRESS, 180, 2).unwrap();
    assert_eq!(tpt.touch(&span, true, Arrival::Ahead(3)), Ok(Touch::Place));
    assert!(remote(&tpt, TAG, ADDRESS, 1, 2).is_ok());
    // And a second one is too many.
    let span = remote(&tpt, LIST, LIST_ADDRESS + 179, 1, 2).unwrap();
    assert_eq!(
        tpt.touch(&span, true, Arrival::InOrder),
        Err(TptError::Touched)
    );
    assert_eq!(remote(&tpt, TAG, ADDRESS, 1, 2), Err(TptError::NotValid));
    list_is_over(&tpt);
}

#[test]
fn what_lists_take_is_bounded_and_pieces_last_as_long_as_tags() {
    // Documentation/device/14-limits.md says how much that is in all.
    assert_eq!((size_of::<List>(), size_of::<Piece>()), (32, 24));
    let mut tpt = empty();
    for max_pages in [0, 17, u32::MAX] {
        assert_eq!(
            allocate_list(&mut tpt, LIST, max_pages),
            Err(CommandStatus::BadParameter)
        );
    }
    for max_pages in 1..=16 {
        let tag = Tag::new(100 + max_pages, 0);
        assert_eq!(allocate_list(&mut tpt, tag, max_pages), Ok(()));
        let list = tpt.entry(tag).unwrap().list.as_ref().unwrap();
        assert_eq!(list.pieces.capacity(), max_pages as usize);
    }
    // More pieces than there are tags.
    let tags = 1000..1001 + MAX_TAGS / 16;
    for index in tags.clone() {
        assert_eq!(allocate_list(&mut tpt, Tag::new(index, 0), 16), Ok(()));
    }
    let first = Tag::new(tags.start, 0);
    assert_eq!(
        allocate_list(&mut tpt, first, 1),
        Err(CommandStatus::Exists)
    );
    assert_eq!(tpt.release(first), Ok(()));
    assert_eq!(allocate_list(&mut tpt, first, 16), Ok(()));
}

#[test]
fn what_a_read_fills_touches_what_is_of_its_domain() {
    let stranger = Domain {
        pd: PD + 1,
        privileged: true,
    };
    let mut tpt = with_list();
    for tag in [TAG, OTHER] {
        tpt.register(&RegisterRegion {
            flags: REGION_REPLACE,
            address: if tag == TAG { ADDRESS } else { ADDRESS * 2 },
            ..command(tag, FULL | ACCESS_ONE_TOUCH)
        })
        .unwrap();
    }
    tpt.register_list(&list_part(LIST), &pieces(), PD).unwrap();
    let fills = [
        sge(LIST, LIST_ADDRESS, 180),
        sge(TAG, ADDRESS, 1),
        sge(OTHER, ADDRESS * 2, 1),
    ];
    // Nor does an entry without bytes, whatever it names.
    tpt.touch_local(&fills, stranger);
    tpt.touch_local(&fills.map(|fill| Sge { length: 0, ..fill }), DOMAIN);
    for (tag, address) in [(LIST, LIST_ADDRESS), (TAG, ADDRESS), (OTHER, ADDRESS * 2)] {
        assert!(remote(&tpt, tag, address, 1, 2).is_ok());
    }
    // What the first entry ends is found by the others.
    tpt.touch_local(&[fills[1], sge(LIST, LIST_ADDRESS + 100, 1)], DOMAIN);
    for (tag, address) in [(LIST, LIST_ADDRESS), (TAG, ADDRESS), (OTHER, ADDRESS * 2)] {
        assert_eq!(
            remote(&tpt, tag, address, 1, 2),
            Err(TptError::NotValid),
            "{tag:?}"
        );
    }
}

#[test]
fn a_use_is_early_until_what_was_open_before_the_registration_is_not() {
    let mut tpt = listed();
    assert!(!tpt.is_early(LIST.0));
    let generation = tpt.unsettled(LIST.0);
    assert!(tpt.is_early(LIST.0) && !tpt.is_early(TAG.0));
    // Another registration is not what is waited for.
    tpt.invalidate(LIST.0, HOLDER).unwrap();
    tpt.register_list(&list_part(LIST), &pieces(), PD).unwrap();
    assert!(!tpt.is_early(LIST.0));
    let second = tpt.unsettled(LIST.0);
    tpt.settled(LIST.0, generation);
    assert!(tpt.is_early(LIST.0));
    tpt.settled(LIST.0, second);
    assert!(!tpt.has_early());
    // What is used through the list is used.
    let generation = tpt.unsettled(TAG.0);
    assert!(tpt.is_early(LIST.0) && tpt.is_early(TAG.0) && !tpt.is_early(OTHER.0));
    tpt.settled(TAG.0, generation);
    // Whatever became of the tag.
    let generation = tpt.unsettled(OTHER.0);
    tpt.release(OTHER).unwrap();
    assert!(!tpt.is_early(OTHER.0));
    tpt.settled(OTHER.0, generation);
    assert!(!tpt.has_early());
}

/// What the table says of itself must agree: the windows of each region, those of each queue
/// pair, and that a bound window has the region it was bound to.
fn assert_consistent(tpt: &Tpt) {
    let indices = 0..=tpt.entries.len() as u32;
    let mut windows = vec![0; tpt.entries.len() + 1];
    let mut bound = BTreeSet::new();
    for index in indices.clone() {
        let Some(Entry {
            kind,
            target: Some(target),
            ..
        }) = tpt.entries.get(index)
        else {
            continue;
        };
        let binding = match target {
            Target::Window(binding) => binding,
            Target::List => {
                assert_eq!(*kind, TagKind::List);
                continue;
            }
            _ => {
                assert_eq!(*kind, TagKind::Region);
                continue;
            }
        };
        assert_eq!(binding.qpn.is_some(), *kind == TagKind::Window2B);
        windows[binding.region.index() as usize] += 1;
        bound.extend(binding.qpn.map(|qpn| (qpn, index)));
        let region = tpt.entry(binding.region).unwrap();
        assert_eq!(region.kind, TagKind::Region);
        // Only a one-touch region may go while it is bound, and then stays invalid for it.
        if region.generation == binding.generation && region.target.is_some() {
            assert!(binding.offset + binding.length <= region.length());
        } else {
            assert!(tpt.target(binding.region, binding.generation).is_err());
        }
    }
    for (index, windows) in indices.zip(windows) {
        let entry = tpt.entries.get(index);
        assert_eq!(entry.map_or(0, |entry| entry.windows), windows);
        let Some(entry) = entry else {
            continue;
        };
        assert_eq!(entry.list.is_some(), entry.kind == TagKind::List);
        let Some(list) = &entry.list else {
            continue;
        };
        let total: u64 = list.pieces.iter().map(|p| u64::from(p.length)).sum();
        assert_eq!(list.length, total);
        assert!(list.pieces.len() <= entry.max_pages as usize);
        // What is still there of them has their bytes, and all the rights of the list.
        for piece in &list.pieces {
            if tpt.target(piece.region, piece.generation).is_ok() {
                let region = tpt.entry(piece.region).unwrap();
                assert_eq!((region.kind, region.pd), (TagKind::Region, entry.pd));
                assert!(piece.offset + u64::from(piece.length) <= region.length());
                assert_eq!(entry.access & ACCESS_REMOTE & !region.access, 0);
            }
        }
    }
    assert_eq!(tpt.bound, bound);
}

#[test]
fn no_order_of_operations_makes_the_table_contradict_itself() {
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) % below
    };
    let mut tpt = empty();
    let mut done = [0; 9];
    let mut spans = Vec::new();
    for _ in 0..50_000 {
        let tag = Tag::new(1 + random(6) as u32, random(2) as u8);
        let holder = Holder {
            qpn: random(3) as u32,
            ..HOLDER
        };
        let operation = random(9) as usize;
        let succeeded = match operation {
            0 => tpt
                .register(&RegisterRegion {
                    flags: random(2) as u32,
                    ..command(tag, FULL | ((random(2) as u32) * ACCESS_ONE_TOUCH))
                })
                .is_ok(),
            1 => {
                let kind = [1, 2, 3, 5][random(4) as usize];
                tpt.allocate(&AllocateTag {
                    tag: tag.0,
                    pd: PD,
                    kind,
                    reserved: [0; 3],
                    max_pages: u32::from(matches!(kind, 1 | 5)) * 4,
                })
                .is_ok()
            }
            2 => random(4) == 0 && tpt.release(tag).is_ok(),
            3 => {
                let access = FULL | ((random(2) as u32) * ACCESS_ONE_TOUCH);
                tpt.register_from_queue(
                    &FastRegisterPart {
                        access,
                        ..part(tag)
                    },
                    PD,
                )
                .is_ok()
            }
            4 => tpt.invalidate(tag.0, holder).is_ok(),
            5 => {
                let part = BindPart {
                    window: tag.0,
                    new_window: Tag::new(tag.index(), random(2) as u8).0,
                    region: Tag::new(1 + random(6) as u32, random(2) as u8).0,
                    length: random(4) * 50,
                    access: ACCESS_REMOTE_WRITE | ((random(2) as u32) * ACCESS_ONE_TOUCH),
                    ..bind_part(0)
                };
                tpt.bind(&part, holder).is_ok()
            }
            6 => {
                if random(20) == 0 {
                    tpt.invalidate_windows(holder.qpn, 1 + random(3) as u32);
                }
                true
            }
            7 => {
                let pieces: Vec<_> = (0..1 + random(3))
                    .map(|_| {
                        let region = Tag::new(1 + random(6) as u32, random(2) as u8);
                        sge(region, ADDRESS + 100 * random(3), 50)
                    })
                    .collect();
                let access = ACCESS_REMOTE_WRITE | ((random(2) as u32) * ACCESS_ONE_TOUCH);
                let part = ListPart {
                    access,
                    address: ADDRESS + 100,
                    ..list_part(tag)
                };
                tpt.register_list(&part, &pieces, PD).is_ok()
            }
            _ => {
                // The newest first.
                if let Ok(span) = remote(&tpt, tag, ADDRESS + 100, 50, holder.qpn) {
                    spans.insert(0, span);
                    spans.truncate(2);
                }
                let arrival = match random(3) {
                    0 => Arrival::Ahead(random(10) as u32),
                    _ => Arrival::InOrder,
                };
                if random(4) == 0 {
                    let entries = [
                        sge(tag, ADDRESS + 100, 50),
                        sge(
                            Tag::new(1 + random(6) as u32, random(2) as u8),
                            ADDRESS + 100,
                            50,
                        ),
                    ];
                    tpt.touch_local(&entries, DOMAIN);
                    tpt.caught_up(tag, random(10) as u32);
                }
                spans
                    .get(random(2) as usize)
                    .is_some_and(|span| tpt.touch(span, true, arrival).is_ok())
            }
        };
        done[operation] += u32::from(succeeded);
        assert_consistent(&tpt);
    }
    // Each of them did happen.
    assert!(done.iter().all(|&count| count > 20), "{done:?}");
}

#[test]
fn a_leaving_window_lets_go_of_its_region_when_its_queue_pair_goes() {
    let mut tpt = table(ACCESS_WINDOW_BIND);
    let window = Tag::new(8, 0);
    tpt.allocate(&AllocateTag {
        tag: window.0,
        pd: PD,
        kind: TagKind::Window2B.number(),
        reserved: [0; 3],
        max_pages: 0,
    })
    .unwrap();
    let part = BindPart {
        window: window.0,
        new_window: window.0,
        region: TAG.0,
        access: ACCESS_REMOTE_READ,
        address: ADDRESS,
        length: 8,
        ..BindPart::zeroed()
    };
    tpt.bind(&part, HOLDER).unwrap();
    assert!(tpt.take_up_release(window));
    tpt.invalidate_windows(HOLDER.qpn, u32::MAX);
    tpt.enter(window);
    assert_eq!(tpt.release(window), Ok(()));
    tpt.finish(window);
    assert_eq!(tpt.release(TAG), Ok(()));
    assert_eq!(tpt.in_flight(), 0);
}

/// A command on a tag.
#[derive(Clone, Copy, Debug)]
enum Posted {
    Register(RegisterRegion),
    Allocate(AllocateTag),
    Release(Tag),
}

impl Posted {
    fn tag(&self) -> Tag {
        match self {
            Self::Register(command) => Tag(command.tag),
            Self::Allocate(command) => Tag(command.tag),
            Self::Release(tag) => *tag,
        }
    }

    fn take_up(&self, tpt: &mut Tpt) -> bool {
        match self {
            Self::Register(_) => tpt.take_up_registration(self.tag(), false),
            Self::Allocate(_) => tpt.take_up_registration(self.tag(), true),
            Self::Release(_) => tpt.take_up_release(self.tag()),
        }
    }

    fn carry_out(&self, tpt: &mut Tpt) -> Result<(), CommandStatus> {
        match self {
            Self::Register(command) => tpt.register(command),
            Self::Allocate(command) => tpt.allocate(command),
            Self::Release(tag) => tpt.release(*tag),
        }
    }
}

/// The same commands, taken up and carried out later, or carried out alone by a table that knows
/// nothing of that: in the end both are the same, and on the way nothing is reached that should
/// not be.
#[test]
fn commands_that_are_taken_up_come_to_what_they_would_have_come_to() {
    const WINDOW: u32 = 8;
    let mut seen = [0; 6];
    for seed in 1..=200u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = |end: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) % end
        };
        let (mut tpt, mut plain) = (empty(), empty());
        let window = AllocateTag {
            tag: Tag::new(WINDOW, 0).0,
            pd: PD,
            kind: TagKind::Window2B.number(),
            reserved: [0; 3],
            max_pages: 0,
        };
        tpt.allocate(&window).unwrap();
        plain.allocate(&window).unwrap();
        let mut posted = std::collections::VecDeque::new();
        for _ in 0..200 {
            let tag = Tag::new(1 + next(3) as u32, next(3) as u8);
            match next(12) {
                0..=2 => {
                    let mut region = command(tag, ACCESS_WINDOW_BIND | ACCESS_LOCAL_WRITE);
                    region.flags = if next(3) == 0 { REGION_REPLACE } else { 0 };
                    region.access |= if next(4) == 0 { 1 << 31 } else { 0 };
                    let command = match next(4) {
                        0 => Posted::Allocate(AllocateTag {
                            tag: tag.0,
                            pd: PD,
                            kind: TagKind::Region.number(),
                            reserved: [0; 3],
                            max_pages: 4 * next(2) as u32,
                        }),
                        1 => Posted::Release(tag),
                        _ => Posted::Register(region),
                    };
                    let told = command.take_up(&mut tpt);
                    posted.push_back((command, told));
                    if matches!(command, Posted::Release(_)) {
                        let use_of_it =
                            tpt.check_local(tag.0, ADDRESS, 1, DOMAIN, LocalAccess::Read);
                        let windows = tpt.entries.get(tag.index()).map(|entry| entry.windows);
                        // One that is bound stays until the release finds otherwise.
                        let stays = !told && windows.is_some_and(|windows| windows != 0);
                        assert!(
                            match use_of_it {
                                Ok(_) => stays,
                                Err(error) => !matches!(error, TptError::Pending(_)),
                            },
                            "{use_of_it:?}"
                        );
                        seen[0] += 1;
                        seen[5] += u64::from(stays);
                    } else {
                        let index = tag.index();
                        assert_eq!(tpt.ready(tag.0), Err(TptError::Pending(index)));
                        assert!(tpt
                            .check_local(tag.0, ADDRESS, 1, DOMAIN, LocalAccess::Read)
                            .is_err());
                        seen[1] += 1;
                    }
                }
                3..=6 => {
                    let Some((command, told)) = posted.pop_front() else {
                        continue;
                    };
                    let tag: Tag = command.tag();
                    let expected = command.carry_out(&mut plain);
                    tpt.enter(tag);
                    let failed = tpt
                        .entries
                        .get(tag.index())
                        .is_some_and(|entry| entry.failed);
                    let result = command.carry_out(&mut tpt);
                    let forgotten = failed && matches!(command, Posted::Release(_));
                    assert!(
                        result == expected || forgotten,
                        "{command:?}: {result:?} {expected:?}"
                    );
                    if told {
                        if result.is_err() && !matches!(command, Posted::Release(_)) {
                            let any = matches!(command, Posted::Allocate(_));
                            tpt.registration_failed(tag, any);
                        }
                        tpt.finish(tag);
                    } else {
                        tpt.leave(tag);
                    }
                    seen[2] += 1;
                }
                7 | 8 => {
                    let part = BindPart {
                        window: Tag::new(WINDOW, 0).0,
                        new_window: Tag::new(WINDOW, 1).0,
                        region: tag.0,
                        access: ACCESS_REMOTE_READ,
                        address: ADDRESS,
                        length: 8,
                        ..BindPart::zeroed()
                    };
                    // What is refused is not done by the other either.
                    if tpt.bind(&part, HOLDER).is_ok() {
                        plain.bind(&part, HOLDER).unwrap();
                        seen[3] += 1;
                    }
                }
                9 | 10 => {
                    if tpt.register_from_queue(&part(tag), PD).is_ok() {
                        plain.register_from_queue(&part(tag), PD).unwrap();
                        seen[4] += 1;
                    }
                }
                _ => {
                    tpt.invalidate_windows(HOLDER.qpn, u32::MAX);
                    plain.invalidate_windows(HOLDER.qpn, u32::MAX);
                }
            }
            for index in (1..4).chain([WINDOW]) {
                let windows = |tpt: &Tpt| tpt.entries.get(index).map_or(0, |entry| entry.windows);
                assert_eq!(windows(&tpt), windows(&plain), "seed {seed}");
                for instance in 0..3 {
                    let tag = Tag::new(index, instance);
                    let check =
                        |tpt: &Tpt| tpt.check_local(tag.0, ADDRESS, 1, DOMAIN, LocalAccess::Read);
                    match check(&tpt) {
                        Ok(_) => assert!(check(&plain).is_ok(), "seed {seed}"),
                        Err(_) if tpt.in_flight.contains_key(&index) => {}
                        Err(TptError::Pending(_)) => panic!("nothing is waited for"),
                        Err(_) => assert!(check(&plain).is_err(), "seed {seed}"),
                    }
                }
            }
        }
    }
    assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
}
