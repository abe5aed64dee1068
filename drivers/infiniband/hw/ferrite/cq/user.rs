// SPDX-License-Identifier: GPL-2.0

//! Completion queues of processes, whose rings are in their memory.

use super::FerriteCq;
use crate::{
    abi,
    abi::{
        Plain,
        ResizeCompletionQueue,
        UverbsCqRequest, //
    },
    binding::Who,
    device::Ferrite,
    handler::Choice,
    kernel_ext::errno,
    queue::{
        Extent,
        QueueMemory, //
    },
    rdma::{
        kind,
        Cq,
        CqInitAttr,
        Device,
        Handle,
        In,
        Method,
        New,
        Out,
        Ucontext,
        Udata,
        UserCqOps, //
    }, //
};
use kernel::prelude::*;

#[vtable]
impl UserCqOps for Ferrite {
    /// Makes a queue in memory of a process.
    fn create_user_cq<'a>(
        dev: &Device<Self>,
        new: New<'a, kind::Cq, Self>,
        attr: &CqInitAttr,
        udata: &Udata<'_, Self>,
    ) -> Result<&'a Cq<Self>> {
        if attr.flags != 0 {
            return Err(errno::eopnotsupp());
        }
        let (size, extent) = checked_request(dev, udata, attr.entries)?;
        let memory = QueueMemory::of_process(dev, udata, extent)?;
        FerriteCq::create(dev, new, attr, size, memory, Some(udata))
    }

    /// Gives a queue of a process another ring. Completions that were not consumed are moved to
    /// it by the device. Returns its entries.
    fn resize_user_cq(cq: &Cq<Self>, entries: u32, udata: &Udata<'_, Self>) -> Result {
        let dev = cq.device();
        if !dev.has(abi::FEATURE_RESIZE_CQ) {
            return Err(errno::eopnotsupp());
        }
        let (size, extent) = checked_request(dev, udata, entries)?;
        cq.memory.resize(dev, extent, |buffer| {
            dev.hw.make_long(&ResizeCompletionQueue {
                cqn: cq.number(),
                log_entries: size.log_entries,
                record_offset: size.record_offset,
                buffer,
                ..ResizeCompletionQueue::zeroed()
            })?;
            cq.set_entries(1 << size.log_entries);
            Ok(())
        })
    }
}

/// A process moves a completion queue of its own.
pub(crate) struct MoveCq;

impl Method<Ferrite> for MoveCq {
    type Kind = kind::Cq;
    const ID: u32 = abi::UVERBS_CQ_MOVE;
    type Attributes<'a> = (
        Handle<'a, kind::Cq, Ferrite, { abi::UVERBS_CQ_MOVE_HANDLE }>,
        In<u32, { abi::UVERBS_CQ_MOVE_VECTOR }>,
    );

    fn call(_: &Ucontext<Ferrite>, (cq, vector): Self::Attributes<'_>) -> Result {
        FerriteCq::move_to(&cq, Choice::from_raw(*vector), Who::Process)
    }
}

/// A process asks at which handler a completion queue of its own is.
pub(crate) struct QueryCq;

impl Method<Ferrite> for QueryCq {
    type Kind = kind::Cq;
    const ID: u32 = abi::UVERBS_CQ_QUERY;
    type Attributes<'a> = (
        Handle<'a, kind::Cq, Ferrite, { abi::UVERBS_CQ_QUERY_HANDLE }>,
        Out<'a, u32, { abi::UVERBS_CQ_QUERY_VECTOR }>,
    );

    fn call(_: &Ucontext<Ferrite>, (cq, vector): Self::Attributes<'_>) -> Result {
        let found = cq.handler().map(u32::from);
        vector.write(&found.unwrap_or(abi::UVERBS_CQ_VECTOR_NONE))
    }
}

/// How large a queue is, and where its record; the ring is first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) log_entries: u8,
    pub(super) record_offset: u32,
}

impl Size {
    /// What a process says its buffer has, if it makes sense and is enough for those it `asked` for.
    fn of_process(
        request: &UverbsCqRequest,
        asked: u32,
        max_log_entries: u8,
    ) -> Result<(Self, Extent)> {
        if request.log_entries > max_log_entries.into() {
            return Err(EINVAL);
        }
        let ring = (abi::BLOCK_SIZE as u64) << request.log_entries;
        if asked > 1 << request.log_entries || u64::from(request.record_offset) < ring {
            return Err(EINVAL);
        }
        let record = core::mem::size_of::<abi::CompletionRecord>() as u64;
        let parts = [(0, ring), (request.record_offset, record)];
        let extent = Extent::new(request.buffer, request.length, &parts)?;
        let size = Self {
            log_entries: request.log_entries as u8,
            record_offset: request.record_offset,
        };
        Ok((size, extent))
    }
}

/// What a process asks for, if it makes sense.
fn checked_request(
    dev: &Device<Ferrite>,
    udata: &Udata<'_, Ferrite>,
    asked: u32,
) -> Result<(Size, Extent)> {
    let request: UverbsCqRequest = udata.read(core::mem::size_of::<UverbsCqRequest>())?;
    Size::of_process(&request, asked, dev.caps.cq_max_log_entries)
}

#[kunit_tests(ferrite_cq_user)]
mod tests {
    use super::*;

    #[test]
    fn a_process_cannot_place_its_ring_or_record_outside_its_buffer() {
        let check = |change: &dyn Fn(&mut UverbsCqRequest)| {
            let mut request = UverbsCqRequest::zeroed();
            request.buffer = 0x1_0000;
            request.length = 16 * 64 + 64;
            request.record_offset = 16 * 64;
            request.log_entries = 4;
            change(&mut request);
            Size::of_process(&request, 16, 5).map(|(size, _)| size)
        };
        let good = Size {
            log_entries: 4,
            record_offset: 16 * 64,
        };
        assert_eq!(check(&|_| {}), Ok(good));
        let bad: [&dyn Fn(&mut UverbsCqRequest); 8] = [
            &|request| request.length -= 1,
            &|request| request.record_offset += 64,
            &|request| request.record_offset -= 64,
            &|request| request.record_offset += 8,
            &|request| request.buffer += 8,
            // Fewer than were asked for, more than there is room for, more than the device has.
            &|request| request.log_entries = 3,
            &|request| request.log_entries = 5,
            &|request| request.log_entries = u32::MAX,
        ];
        for change in bad {
            assert_eq!(check(change), Err(EINVAL));
        }
    }
}
