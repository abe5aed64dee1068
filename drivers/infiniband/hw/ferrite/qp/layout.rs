// SPDX-License-Identifier: GPL-2.0

//! What a queue pair is made for, and where its rings are in its buffer.

use crate::{
    abi,
    abi::{
        QueuePairRecord,
        Service,
        UverbsQpRequest,
        BLOCK_SIZE, //
    },
    extension,
    kernel_ext::errno,
    queue::Extent,
    rdma::{
        QpCap,
        QpCreateFlags, //
    },
};
use kernel::prelude::*;

/// Blocks of a record.
const RECORD_BLOCKS: usize = core::mem::size_of::<QueuePairRecord>() / BLOCK_SIZE;

/// What kinds of work requests a send queue has to have room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendUse {
    /// Those of connected queue pairs.
    Connected,
    /// The same, and registrations with a message.
    Registering,
    /// Datagrams (UD, GSI).
    Ud,
}

/// What a queue pair is to be able to do besides, and not all of its service are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Abilities {
    /// A failed registration (FRWR) drains its send queue.
    drains: bool,
    /// Registrations come with messages.
    pub(super) register_send: bool,
    /// Lists of pieces of regions are registered.
    lists: bool,
    /// The peer reaches memory through windows only. Consumers in the kernel have no windows.
    windows_only: bool,
}

impl Abilities {
    /// What the kernel asks of a queue pair on a device with such features.
    pub(super) fn of_kernel(flags: QpCreateFlags, service: Service, features: u64) -> Result<Self> {
        let drains = extension::REGISTER_DRAINS.create_flags();
        let register_send = extension::REGISTER_SEND.create_flags();
        let asked = Self {
            drains: flags.contains(drains),
            register_send: flags.contains(register_send),
            lists: false,
            windows_only: false,
        };
        let mut needed = 0;
        if asked.drains {
            needed |= abi::FEATURE_FAST_REGISTER;
        }
        if asked.register_send {
            needed |= abi::FEATURE_REGISTER_SEND;
        }
        let unknown = flags.without(drains | register_send);
        if unknown != QpCreateFlags::default() || features & needed != needed {
            return Err(errno::eopnotsupp());
        }
        asked.checked(service)
    }

    /// What a process asks: registrations that name memory by key only, and peers that are let in by fewer.
    pub(super) fn of_process(flags: u8, service: Service, features: u64) -> Result<Self> {
        const REGISTERING: u8 = abi::UVERBS_QP_LISTS | abi::UVERBS_QP_REGISTER_DRAINS;
        if flags & !(REGISTERING | abi::UVERBS_QP_WINDOWS_ONLY) != 0 {
            return Err(EINVAL);
        }
        let mut needed = 0;
        if flags & REGISTERING != 0 {
            needed |= abi::FEATURE_LISTS;
        }
        if flags & abi::UVERBS_QP_WINDOWS_ONLY != 0 {
            needed |= abi::FEATURE_WINDOWS_ONLY;
        }
        if features & needed != needed {
            return Err(errno::eopnotsupp());
        }
        let asked = Self {
            drains: flags & abi::UVERBS_QP_REGISTER_DRAINS != 0,
            register_send: false,
            lists: flags & abi::UVERBS_QP_LISTS != 0,
            windows_only: flags & abi::UVERBS_QP_WINDOWS_ONLY != 0,
        };
        asked.checked(service)
    }

    /// Checks that the service has what is asked for.
    fn checked(self, service: Service) -> Result<Self> {
        let possible = match service {
            Service::Rc => true,
            // Its peer asks for nothing.
            Service::XrcIni => !self.windows_only,
            // Its messages invalidate nothing, and are not sent with a registration.
            Service::Uc => !self.register_send,
            Service::Gsi | Service::Ud | Service::XrcTgt | Service::Raw => self == Self::default(),
        };
        if possible {
            Ok(self)
        } else {
            Err(EINVAL)
        }
    }

    /// How the device is told.
    pub(super) fn flags(self) -> u16 {
        let mut flags = 0;
        if self.drains {
            flags |= abi::QP_FLAG_FAST_REGISTER_DRAINS;
        }
        if self.lists {
            flags |= abi::QP_FLAG_LISTS;
        }
        if self.windows_only {
            flags |= abi::QP_FLAG_WINDOWS_ONLY;
        }
        flags
    }

    /// What its send queue has to have room for, where the kernel posts to it.
    pub(super) fn requests(self, service: Service) -> SendUse {
        match service {
            Service::Ud | Service::Gsi => SendUse::Ud,
            _ if self.register_send => SendUse::Registering,
            _ => SendUse::Connected,
        }
    }
}

/// Where the parts of a queue pair's buffer are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingLayout {
    pub(super) sq_offset: u32,
    pub(super) rq_offset: u32,
    pub(super) record_offset: u32,
    pub(super) sq_log_blocks: u8,
    pub(super) rq_log_entries: u8,
    pub(super) rq_log_stride: u8,
}

impl RingLayout {
    fn sq_bytes(&self) -> u64 {
        (BLOCK_SIZE as u64) << self.sq_log_blocks
    }

    fn rq_bytes(&self) -> u64 {
        1 << (self.rq_log_entries + self.rq_log_stride)
    }

    /// The layout of a queue pair that nobody posts to: a record.
    pub(super) const RECORD_ONLY: Self = Self {
        sq_offset: 0,
        rq_offset: 0,
        record_offset: 0,
        sq_log_blocks: 0,
        rq_log_entries: 0,
        rq_log_stride: abi::RQ_MIN_LOG_STRIDE,
    };

    /// The layout for a queue pair of the kernel that can hold `cap` of such requests. Receive entries
    /// are whole blocks.
    pub(super) fn for_kernel(cap: &QpCap, requests: SendUse) -> Self {
        let (sges, inline) = (cap.max_send_sge as usize, cap.max_inline_data as usize);
        let per_request = match requests {
            SendUse::Connected => abi::blocks_per_request(false, sges, inline),
            SendUse::Registering => abi::blocks_per_registering_request(sges, inline),
            SendUse::Ud => abi::blocks_per_request(true, sges, inline),
        } as u32;
        let blocks = (cap.max_send_wr.max(1) * per_request).next_power_of_two();
        let entries = cap.max_recv_wr.max(1).next_power_of_two();
        let stride = core::mem::size_of::<abi::ReceiveHeader>()
            + cap.max_recv_sge as usize * core::mem::size_of::<abi::Sge>();
        let stride = stride.next_power_of_two().max(BLOCK_SIZE);
        let mut layout = Self {
            sq_offset: 0,
            rq_offset: 0,
            record_offset: 0,
            sq_log_blocks: blocks.trailing_zeros() as u8,
            rq_log_entries: entries.trailing_zeros() as u8,
            rq_log_stride: stride.trailing_zeros() as u8,
        };
        layout.rq_offset = layout.sq_bytes() as u32;
        layout.record_offset = layout.rq_offset + layout.rq_bytes() as u32;
        layout
    }

    /// The layout that a process says its buffer has, if it makes sense.
    ///
    /// What it says about a receive queue that is not there does not count.
    pub(super) fn from_request(
        request: &UverbsQpRequest,
        caps: &abi::DeviceCaps,
        receives: bool,
    ) -> Result<(Self, Extent)> {
        let mut layout = Self {
            sq_offset: request.sq_offset,
            rq_offset: request.rq_offset,
            record_offset: request.record_offset,
            sq_log_blocks: request.sq_log_blocks,
            rq_log_entries: request.rq_log_entries,
            rq_log_stride: request.rq_log_stride,
        };
        if !receives {
            layout.rq_offset = layout.record_offset;
            layout.rq_log_entries = 0;
            layout.rq_log_stride = abi::RQ_MIN_LOG_STRIDE;
        }
        if layout.sq_log_blocks > caps.sq_max_log_blocks
            || layout.rq_log_entries > caps.rq_max_log_entries
            || !(abi::RQ_MIN_LOG_STRIDE..=abi::RQ_MAX_LOG_STRIDE).contains(&layout.rq_log_stride)
            || request.reserved != 0
        {
            return Err(EINVAL);
        }
        let record = core::mem::size_of::<QueuePairRecord>() as u64;
        let parts = [
            (layout.sq_offset, layout.sq_bytes()),
            (layout.rq_offset, layout.rq_bytes()),
            (layout.record_offset, record),
        ];
        let extent = Extent::new(request.buffer, request.length, &parts)?;
        Ok((layout, extent))
    }

    /// Blocks of the whole buffer, where the record is last.
    pub(super) fn blocks(&self) -> usize {
        self.record_offset as usize / BLOCK_SIZE + RECORD_BLOCKS
    }
}

#[kunit_tests(ferrite_qp_layout)]
mod tests {
    use super::*;
    use crate::abi::{
        Plain,
        SendOpcode, //
    };

    #[test]
    fn the_kernel_layout_holds_what_was_asked_for() {
        let layout = RingLayout::for_kernel(
            &QpCap {
                max_send_wr: 100,
                max_recv_wr: 33,
                max_send_sge: 3,
                max_recv_sge: 2,
                max_inline_data: 0,
            },
            SendUse::Connected,
        );
        // Three entries take a second block.
        assert_eq!(layout.sq_log_blocks, 8);
        assert_eq!(layout.rq_log_entries, 6);
        assert_eq!(layout.rq_log_stride, 6);
        assert_eq!(layout.rq_offset, 256 * 64);
        assert_eq!(layout.record_offset, 256 * 64 + 64 * 64);
        assert_eq!(layout.blocks(), 256 + 64 + 2);
    }

    #[test]
    fn a_send_queue_has_room_for_the_largest_of_what_it_was_made_for() {
        for (requests, opcode) in [
            (SendUse::Connected, SendOpcode::FetchAdd),
            (SendUse::Registering, SendOpcode::RegisterSend),
            (SendUse::Ud, SendOpcode::Send),
        ] {
            for sges in [0, 1, 3, abi::MAX_SGE as u32] {
                let cap = QpCap {
                    max_send_wr: 100,
                    max_send_sge: sges,
                    ..QpCap::default()
                };
                let layout = RingLayout::for_kernel(&cap, requests);
                let entries = sges as usize * core::mem::size_of::<abi::Sge>();
                let datagram = requests == SendUse::Ud;
                let blocks = 100 * abi::blocks_for(opcode, datagram, entries);
                assert!(blocks <= 1 << layout.sq_log_blocks);
            }
        }
        // Who does not ask for registrations with messages has no room for them, and no larger rings.
        let cap = QpCap {
            max_send_wr: 64,
            max_send_sge: 1,
            ..QpCap::default()
        };
        let blocks = |requests| RingLayout::for_kernel(&cap, requests).sq_log_blocks;
        assert_eq!(blocks(SendUse::Connected), 6);
        assert_eq!(blocks(SendUse::Registering), 7);
    }

    #[test]
    fn the_kernel_gets_what_it_asks_for_where_service_and_device_have_it() -> Result {
        let drains = extension::REGISTER_DRAINS.create_flags();
        let sends = extension::REGISTER_SEND.create_flags();
        let all = abi::FEATURE_FAST_REGISTER | abi::FEATURE_REGISTER_SEND;
        let none = QpCreateFlags::default();
        for service in [Service::Rc, Service::XrcIni] {
            let asked = Abilities::of_kernel(drains | sends, service, all)?;
            assert_eq!(asked.flags(), abi::QP_FLAG_FAST_REGISTER_DRAINS);
            assert_eq!(asked.requests(service), SendUse::Registering);
        }
        let asked = Abilities::of_kernel(none, Service::Rc, all);
        assert_eq!(asked, Ok(Abilities::default()));
        assert!(Abilities::of_kernel(drains, Service::Uc, all).is_ok());
        let refused = |flags, service, features| {
            Abilities::of_kernel(flags, service, features)
                .err()
                .map(|error| error.to_errno())
        };
        let unknown = Some(errno::eopnotsupp().to_errno());
        let impossible = Some(EINVAL.to_errno());
        assert_eq!(refused(sends, Service::Uc, all), impossible);
        for service in [Service::Ud, Service::Gsi, Service::XrcTgt, Service::Raw] {
            assert_eq!(refused(none, service, all), None);
            assert_eq!(refused(drains, service, all), impossible);
            assert_eq!(refused(sends, service, all), impossible);
        }
        let older = abi::FEATURE_FAST_REGISTER;
        assert_eq!(refused(drains, Service::Rc, older), None);
        assert_eq!(refused(sends, Service::Rc, older), unknown);
        assert_eq!(refused(drains, Service::Rc, 0), unknown);
        // Flags of the core, and those of other drivers.
        for flag in (0..32).map(|bit| QpCreateFlags::from_raw(1 << bit)) {
            if !(drains | sends).contains(flag) {
                assert_eq!(refused(flag, Service::Rc, u64::MAX), unknown);
                assert_eq!(refused(flag | drains, Service::Rc, u64::MAX), unknown);
            }
        }
        Ok(())
    }

    #[test]
    fn a_process_gets_lists_and_never_what_names_memory_by_address() {
        let (lists, drains) = (abi::UVERBS_QP_LISTS, abi::UVERBS_QP_REGISTER_DRAINS);
        let windows = abi::UVERBS_QP_WINDOWS_ONLY;
        let features = abi::FEATURE_LISTS;
        for service in [Service::Rc, Service::Uc, Service::XrcIni] {
            for flags in 0..=u8::MAX {
                let Ok(asked) = Abilities::of_process(flags, service, u64::MAX) else {
                    let is_refused = flags & windows != 0 && service == Service::XrcIni;
                    assert!(flags & !(lists | drains | windows) != 0 || is_refused);
                    continue;
                };
                let only = abi::QP_FLAG_WINDOWS_ONLY;
                assert_eq!((asked.flags() & only != 0), (flags & windows != 0));
                let device = abi::QP_FLAG_LISTS | abi::QP_FLAG_FAST_REGISTER_DRAINS | only;
                assert_eq!(asked.flags() & !device, 0);
                assert_eq!(
                    (asked.flags() & abi::QP_FLAG_LISTS != 0),
                    (flags & lists != 0)
                );
                let stops = abi::QP_FLAG_FAST_REGISTER_DRAINS;
                assert_eq!((asked.flags() & stops != 0), (flags & drains != 0));
                assert!(!asked.register_send);
            }
        }
        let refused = |flags, service, features| {
            Abilities::of_process(flags, service, features)
                .err()
                .map(|error| error.to_errno())
        };
        let unknown = Some(errno::eopnotsupp().to_errno());
        let impossible = Some(EINVAL.to_errno());
        for flags in [lists, drains, lists | drains] {
            assert_eq!(refused(flags, Service::Rc, features), None);
            assert_eq!(refused(flags, Service::Rc, !features), unknown);
            for service in [Service::Ud, Service::XrcTgt] {
                assert_eq!(refused(flags, service, features), impossible);
                assert_eq!(refused(0, service, features), None);
            }
        }
        let features = abi::FEATURE_WINDOWS_ONLY;
        for service in [Service::Rc, Service::Uc] {
            assert_eq!(refused(windows, service, features), None);
            assert_eq!(refused(windows, service, !features), unknown);
            assert_eq!(refused(windows | lists, service, features), unknown);
        }
        for service in [Service::Ud, Service::XrcIni, Service::XrcTgt] {
            assert_eq!(refused(windows, service, features), impossible);
        }
        // A provider of before writes zero.
        assert_eq!(refused(0, Service::Rc, 0), None);
        assert_eq!(refused(1 << 7, Service::Rc, 0), impossible);
    }

    #[test]
    fn a_queue_that_is_shared_or_absent_is_not_looked_for() {
        let caps = abi::DeviceCaps {
            sq_max_log_blocks: 17,
            rq_max_log_entries: 15,
            ..abi::DeviceCaps::zeroed()
        };
        let request = UverbsQpRequest {
            buffer: 0x10000,
            length: 4096 + 128,
            record_offset: 4096,
            sq_log_blocks: 6,
            ..UverbsQpRequest::zeroed()
        };
        assert!(RingLayout::from_request(&request, &caps, true).is_err());
        assert!(RingLayout::from_request(&request, &caps, false).is_ok());
    }

    #[test]
    fn a_process_cannot_place_a_ring_outside_its_buffer() {
        let caps = abi::DeviceCaps {
            sq_max_log_blocks: 17,
            rq_max_log_entries: 15,
            ..abi::DeviceCaps::zeroed()
        };
        let good = UverbsQpRequest {
            buffer: 0x10000,
            length: 4096 + 2048 + 128,
            sq_offset: 0,
            rq_offset: 4096,
            record_offset: 4096 + 2048,
            sq_log_blocks: 6,
            rq_log_entries: 6,
            rq_log_stride: 5,
            ..UverbsQpRequest::zeroed()
        };
        assert!(RingLayout::from_request(&good, &caps, true).is_ok());
        let bad = [
            UverbsQpRequest {
                length: good.length - 1,
                ..good
            },
            UverbsQpRequest {
                rq_offset: u32::MAX - 63,
                ..good
            },
            UverbsQpRequest {
                sq_offset: 32,
                ..good
            },
            UverbsQpRequest {
                sq_log_blocks: 18,
                ..good
            },
            UverbsQpRequest {
                rq_log_stride: 4,
                ..good
            },
            UverbsQpRequest {
                rq_log_stride: 200,
                ..good
            },
            UverbsQpRequest {
                record_offset: good.record_offset + 64,
                ..good
            },
        ];
        for request in bad {
            assert!(RingLayout::from_request(&request, &caps, true).is_err());
        }
    }
}
