// SPDX-License-Identifier: GPL-2.0

//! Work queues, which are queue pairs of raw packets without a send queue in the device, and tables of them
//! (indirection tables of receive side scaling; chapter 21).

use crate::{
    abi,
    abi::{
        CommandOpcode,
        CreateQueuePair,
        CreateReceiveTable,
        ModifyQueuePair,
        Plain,
        QueuePairRecord,
        QueuePairStateCode,
        Service,
        Transport,
        UverbsHashRequest,
        UverbsWqRequest, //
    },
    commands::DeviceObject,
    device::Ferrite,
    flow::RawPackets,
    kernel_ext::errno,
    numbers::Number,
    port::DEVICE_PORT,
    queue::{
        announce,
        Extent,
        QueueMemory, //
    },
    rdma::{
        kind,
        Device,
        New,
        Pd,
        RwqEntries,
        RwqTable,
        Udata,
        Wq,
        WqInitAttr,
        WqOps,
        WqState, //
    },
    shares::Holder,
};
use core::convert::Infallible;
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};

/// How a queue pair receives that has a table in place of a receive queue: its rules have the hash.
#[derive(Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) table: u32,
    pub(crate) types: u16,
    pub(crate) key: [u8; abi::REDIRECTION_KEY_SIZE],
}

impl Spread {
    /// What a process asks for.
    pub(crate) fn new(table: &RwqTable<Ferrite>, request: &UverbsHashRequest) -> Result<Self> {
        if request.types == 0
            || request.types & !u32::from(abi::ALL_HASHES) != 0
            || request.reserved != 0
        {
            return Err(EINVAL);
        }
        Ok(Self {
            table: table.number.get(),
            types: u16::try_from(request.types)?,
            key: request.key,
        })
    }
}

/// The driver's data of a work queue.
///
/// The fields are dropped in order: the device lets go of the queue before its memory goes, and the number is free last.
#[pin_data]
pub(crate) struct FerriteWq {
    object: DeviceObject,
    _memory: QueueMemory<Infallible>,
    number: Number,
    #[pin]
    state: Mutex<WqState>,
}

/// The driver's data of a table, likewise.
pub(crate) struct FerriteRwqTable {
    object: DeviceObject,
    number: Number,
}

/// What a process says its buffer has, if it makes sense.
fn checked(request: &UverbsWqRequest, max_log_entries: u8) -> Result<Extent> {
    if request.rq_log_entries > max_log_entries
        || !(abi::RQ_MIN_LOG_STRIDE..=abi::RQ_MAX_LOG_STRIDE).contains(&request.rq_log_stride)
        || request.reserved != [0; 3]
    {
        return Err(EINVAL);
    }
    let ring = 1u64 << (request.rq_log_entries + request.rq_log_stride);
    let record = core::mem::size_of::<QueuePairRecord>() as u64;
    let parts = [(request.rq_offset, ring), (request.record_offset, record)];
    Extent::new(request.buffer, request.length, &parts)
}

/// The state that a queue is in which was brought to `known`, as far as a process may say so that believes it in `said`: it may have
/// failed by itself since, of which the process was told.
fn believed(known: WqState, said: Option<WqState>) -> Option<WqState> {
    let said = said.unwrap_or(known);
    let failed = known == WqState::Ready && said == WqState::Error;
    (said == known || failed).then_some(said)
}

/// Whether a queue receives nothing in that state.
fn rests_in(state: QueuePairStateCode) -> bool {
    matches!(state, QueuePairStateCode::Reset | QueuePairStateCode::Error)
}

impl FerriteWq {
    fn bring(wq: &Wq<Ferrite>, state: QueuePairStateCode) -> Result {
        let command = ModifyQueuePair {
            qpn: wq.number.get(),
            mask: abi::MODIFY_STATE,
            state: state.number(),
            ..ModifyQueuePair::zeroed()
        };
        let hw = &wq.device().hw;
        match hw.execute(&command) {
            // A failed device takes no more receives, nor completes them.
            Err(_) if hw.is_dead() && rests_in(state) => Ok(()),
            result => result,
        }
    }
}

impl WqOps for Ferrite {
    type Wq = FerriteWq;
    type RwqTable = FerriteRwqTable;

    fn create_wq<'a>(
        pd: &Pd<Self>,
        mut new: New<'a, kind::Wq, Self>,
        attr: &mut WqInitAttr<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Wq<Self>> {
        let dev = pd.device();
        let (true, Some(udata)) = (dev.has(abi::FEATURE_RECEIVE_TABLES), udata) else {
            return Err(errno::eopnotsupp());
        };
        // There is nothing to receive but by rules, which end with the interface that there is then.
        RawPackets::interface(dev)?;
        if attr.max_wr() == 0
            || attr.max_wr() > 1 << dev.caps.rq_max_log_entries
            || attr.max_sge() > dev.caps.max_sge.into()
        {
            return Err(EINVAL);
        }
        let request: UverbsWqRequest = udata.read(core::mem::size_of::<UverbsWqRequest>())?;
        let extent = checked(&request, dev.caps.rq_max_log_entries)?;
        let (memory, place) = QueueMemory::of_process(dev, udata, extent)?;
        let number = dev.qpns.take(Holder::current())?;
        let object = DeviceObject::create(
            &dev.hw,
            &CreateQueuePair {
                qpn: number.get(),
                pd: pd.number(),
                receive_cqn: attr.cq().number(),
                service: Service::Raw.number(),
                transport: Transport::RoceV2.number(),
                flags: abi::QP_FLAG_RECEIVE_ONLY,
                rq_log_entries: request.rq_log_entries,
                rq_log_stride: request.rq_log_stride,
                port: DEVICE_PORT,
                doorbell_page: place.doorbell_page,
                buffer: place.buffer,
                rq_offset: request.rq_offset,
                record_offset: request.record_offset,
                ..CreateQueuePair::zeroed()
            },
            CommandOpcode::DestroyQueuePair,
            number.get(),
        )?;
        attr.set_max_wr(1 << request.rq_log_entries);
        let wqn = number.get();
        new.set_wq_number(wqn);
        let wq = new.init(pin_init!(FerriteWq {
            object,
            _memory: memory,
            number,
            state <- new_mutex!(WqState::Reset, "ferrite_wq"),
        }))?;
        // The process is told its number by the core.
        announce(&dev.hw.wqs, wqn, wq.get_ref().ok_or(ENODEV)?, || Ok(()))?;
        Ok(wq)
    }

    fn modify_wq(wq: &Wq<Self>, from: Option<WqState>, to: Option<WqState>) -> Result {
        let mut state = wq.state.lock();
        let from = believed(*state, from).ok_or(EINVAL)?;
        let to = to.unwrap_or(from);
        match (from, to) {
            (WqState::Reset, WqState::Ready) => {
                FerriteWq::bring(wq, QueuePairStateCode::Init)?;
                let ready = FerriteWq::bring(wq, QueuePairStateCode::Rtr);
                if ready.is_err() {
                    // Where this fails too the device has failed.
                    let _ = FerriteWq::bring(wq, QueuePairStateCode::Reset);
                }
                ready?;
            }
            (_, WqState::Reset) => FerriteWq::bring(wq, QueuePairStateCode::Reset)?,
            (WqState::Ready | WqState::Error, WqState::Error) => {
                FerriteWq::bring(wq, QueuePairStateCode::Error)?;
            }
            (WqState::Ready, WqState::Ready) => {}
            _ => return Err(EINVAL),
        }
        *state = to;
        Ok(())
    }

    /// Ends a work queue: afterwards the device touches neither queue nor buffers.
    fn destroy_wq(wq: &Wq<Self>) -> Result {
        wq.object.destroy();
        drop(wq.device().hw.wqs.remove(wq.number.get() as usize));
        Ok(())
    }

    fn create_rwq_table<'a>(
        dev: &Device<Self>,
        mut new: New<'a, kind::RwqTable, Self>,
        entries: &RwqEntries<'_, Self>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a RwqTable<Self>> {
        if !dev.has(abi::FEATURE_RECEIVE_TABLES) {
            return Err(errno::eopnotsupp());
        }
        RawPackets::interface(dev)?;
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        let wqs = entries.iter();
        if wqs.len() > 1 << dev.caps.receive_table_log_entries {
            return Err(EINVAL);
        }
        let number = dev.receive_tables.take(Holder::current())?;
        let mut command = CreateReceiveTable {
            table: number.get(),
            log_entries: wqs.len().trailing_zeros() as u8,
            ..CreateReceiveTable::zeroed()
        };
        for (qpn, wq) in command.qpns.iter_mut().zip(wqs) {
            *qpn = wq.number.get();
        }
        let object = DeviceObject::create(
            &dev.hw,
            &command,
            CommandOpcode::DestroyReceiveTable,
            number.get(),
        )?;
        new.set_table_number(number.get());
        new.init(Ok::<_, Error>(FerriteRwqTable { object, number }))
    }

    fn destroy_rwq_table(table: &RwqTable<Self>) -> Result {
        table.object.destroy();
        Ok(())
    }
}

#[kunit_tests(ferrite_wq)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_the_state_of_its_queue_or_that_it_has_failed() {
        use WqState::{
            Error,
            Ready,
            Reset, //
        };
        for known in [Reset, Ready, Error] {
            assert_eq!(believed(known, None), Some(known));
            for said in [Reset, Ready, Error] {
                let right = said == known || (known, said) == (Ready, Error);
                assert_eq!(believed(known, Some(said)), right.then_some(said));
            }
        }
    }

    #[test]
    fn the_buffer_of_a_work_queue_has_all_its_parts() {
        let request = |change: &dyn Fn(&mut UverbsWqRequest)| {
            let mut request = UverbsWqRequest {
                buffer: 0x1_0000,
                length: 4096 + 128,
                rq_offset: 0,
                record_offset: 4096,
                rq_log_entries: 6,
                rq_log_stride: 6,
                reserved: [0; 3],
            };
            change(&mut request);
            checked(&request, 10)
        };
        assert!(request(&|_| ()).is_ok());
        for change in [
            &(|r: &mut UverbsWqRequest| r.length -= 1) as &dyn Fn(&mut UverbsWqRequest),
            &|r| r.rq_log_entries = 7,
            &|r| r.rq_log_entries = 11,
            &|r| r.rq_log_stride = abi::RQ_MIN_LOG_STRIDE - 1,
            &|r| r.rq_log_stride = abi::RQ_MAX_LOG_STRIDE + 1,
            &|r| r.record_offset = 4128,
            &|r| r.reserved[1] = 1,
        ] {
            assert_eq!(request(change).err(), Some(EINVAL));
        }
    }
}
