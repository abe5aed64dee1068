// SPDX-License-Identifier: GPL-2.0

//! What completion queues, queue pairs and shared receive queues have in common: rings and a record in memory of a
//! process or of the kernel, a page of doorbells, and how a new one gets known.
//!
//! A queue is made in this order: memory and number, the object in the device, the core's object with the driver's
//! data, the answer to the process, the table in which events find it. Each step is undone by dropping what it made:
//! the first three are fields of the driver's data, with the object first, so that the device lets go before its memory
//! and its number do, and the rest is [`announce`]. Initialising the driver's data does not fail any more (`pin_init!`,
//! not `try_pin_init!`), since fields of one that is only half there are dropped in another order. So there is nothing
//! to undo by hand wherever it fails.

use crate::{
    abi::{
        Buffer,
        BLOCK_SIZE, //
    },
    bars::Doorbells,
    device::Ferrite,
    kernel_ext::table::IrqXArray,
    lent::Lent,
    mr::PinnedMemory,
    rdma::{
        Device,
        Udata, //
    },
    ring::KernelBlocks,
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex,
    types::ForeignOwnable, //
};

/// Where a process has the buffer of a queue: all parts of the queue are in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    address: u64,
    length: u64,
}

impl Extent {
    /// Checks what a process says of its buffer; `parts` are the offsets and the bytes of rings and record, which begin
    /// with a block. `EINVAL` where one is not in it.
    pub(crate) fn new(address: u64, length: u64, parts: &[(u32, u64)]) -> Result<Self> {
        let aligned = |at: u64| at % BLOCK_SIZE as u64 == 0;
        let fits = |(offset, bytes): &(u32, u64)| {
            let offset = u64::from(*offset);
            let end = offset.checked_add(*bytes);
            aligned(offset) && end.is_some_and(|end| end <= length)
        };
        if !aligned(address) || !parts.iter().all(fits) {
            return Err(EINVAL);
        }
        Ok(Self { address, length })
    }

    fn pin(self, dev: &Device<Ferrite>) -> Result<PinnedMemory> {
        PinnedMemory::pin_rings(dev, self.address, self.length)
    }
}

/// What the device is told of where a queue is.
#[derive(Clone, Copy)]
pub(crate) struct QueuePlace {
    pub(crate) buffer: Buffer,
    /// The page that its doorbells are rung on.
    pub(crate) doorbell_page: u32,
}

/// Rings and record of a queue, by who posts to it or polls it. The kernel has `K`, of which they are part.
pub(crate) enum QueueMemory<K> {
    /// Of a process; others after the queue was resized.
    Process(Pin<KBox<Mutex<PinnedMemory>>>),
    Kernel(Pin<KBox<K>>),
    /// A record of a queue that nobody posts to. It may outlive the process that made it.
    Nobody {
        _memory: Lent<KernelBlocks>,
    },
    /// None, as the device has no such queue.
    Nothing,
}

impl<K> QueueMemory<K> {
    /// Memory of the process that asks.
    pub(crate) fn of_process(
        dev: &Device<Ferrite>,
        udata: &Udata<'_, Ferrite>,
        extent: Extent,
    ) -> Result<(Self, QueuePlace)> {
        let doorbell_page = udata.context().ok_or(EINVAL)?.doorbell_page();
        let memory = extent.pin(dev)?;
        let buffer = memory.buffer();
        let memory = KBox::pin_init(
            new_mutex!(memory, "ferrite_queue_memory"),
            GFP_KERNEL_ACCOUNT,
        )?;
        let place = QueuePlace {
            buffer,
            doorbell_page,
        };
        Ok((Self::Process(memory), place))
    }

    /// So many blocks of zeroes for the kernel, which `init` makes part of what the kernel has.
    pub(crate) fn of_kernel<I: PinInit<K, Error>>(
        dev: &Device<Ferrite>,
        blocks: usize,
        init: impl FnOnce(Lent<KernelBlocks>) -> I,
    ) -> Result<(Self, QueuePlace)> {
        let (memory, place) = Self::blocks(dev, blocks)?;
        let kernel = KBox::pin_init(init(memory), GFP_KERNEL)?;
        Ok((Self::Kernel(kernel), place))
    }

    /// So many blocks of zeroes that nobody posts to.
    pub(crate) fn of_nobody(dev: &Device<Ferrite>, blocks: usize) -> Result<(Self, QueuePlace)> {
        let (memory, place) = Self::blocks(dev, blocks)?;
        Ok((Self::Nobody { _memory: memory }, place))
    }

    fn blocks(dev: &Device<Ferrite>, blocks: usize) -> Result<(Lent<KernelBlocks>, QueuePlace)> {
        let memory = Lent::new(&dev.hw.reach, KernelBlocks::new(dev.parent(), blocks)?);
        let place = QueuePlace {
            buffer: memory.buffer(),
            doorbell_page: Doorbells::KERNEL_PAGE,
        };
        Ok((memory, place))
    }

    /// What the kernel has, if the queue is its own.
    #[inline]
    pub(crate) fn kernel(&self) -> Option<&K> {
        match self {
            Self::Kernel(kernel) => Some(kernel),
            Self::Process(_) | Self::Nobody { .. } | Self::Nothing => None,
        }
    }

    /// Puts a queue of a process in another buffer, with others who do so kept waiting. `tell` has the device move what
    /// is in it; after that the device has left the old one, which is given back.
    pub(crate) fn resize(
        &self,
        dev: &Device<Ferrite>,
        extent: Extent,
        tell: impl FnOnce(Buffer) -> Result,
    ) -> Result {
        let Self::Process(memory) = self else {
            return Err(EINVAL);
        };
        let other = extent.pin(dev)?;
        let mut current = memory.lock();
        tell(other.buffer())?;
        *current = other;
        Ok(())
    }
}

/// Answers who makes a queue, and then lets events find it by its number.
///
/// In this order: the number can be guessed, and the device made to tell of the queue, before who makes it has it. The core
/// links such an event to its object of the queue; where the queue's making fails after that, it forgets the object and
/// leaves the event to be read, which leads to where the object was. So nothing fails any more once an event finds the
/// queue.
pub(crate) fn announce<R: ForeignOwnable>(
    table: &IrqXArray<R>,
    number: u32,
    queue: R,
    answer: impl FnOnce() -> Result,
) -> Result {
    answer()?;
    table.insert(number as usize, queue)
}

#[kunit_tests(ferrite_queue)]
mod tests {
    use super::*;
    use crate::kernel_ext::table::new_irq_xarray;
    use kernel::sync::Arc;

    #[test]
    fn all_parts_of_a_queue_are_blocks_of_its_buffer() {
        let extent = |address, parts: &[(u32, u64)]| Extent::new(address, 4096, parts);
        assert!(extent(0x1_0000, &[(0, 4032), (4032, 64)]).is_ok());
        // Nothing says that they do not overlap, nor that there is anything between them.
        assert!(extent(64, &[(0, 64), (0, 64), (4096, 0)]).is_ok());
        for (address, part) in [
            (0, (4032, 65)),
            (0, (4096, 1)),
            (0, (32, 64)),
            (8, (0, 64)),
            (0, (u32::MAX - 63, 64)),
            (0, (64, u64::MAX)),
        ] {
            assert_eq!(extent(address, &[(0, 64), part]), Err(EINVAL));
            assert_eq!(extent(address, &[part, (0, 64)]), Err(EINVAL));
        }
    }

    #[test]
    fn a_queue_is_found_by_nobody_before_its_maker_is_answered() -> Result {
        let table: Pin<KBox<IrqXArray<Arc<u32>>>> =
            KBox::pin_init(new_irq_xarray!("ferrite_queue_test"), GFP_KERNEL)?;
        let (one, other) = (Arc::new(1, GFP_KERNEL)?, Arc::new(2, GFP_KERNEL)?);
        let found = |number| table.with(number, |queue| *queue);
        let announce = |queue: &Arc<u32>, answer: &dyn Fn() -> Result| {
            announce(&table, 7, queue.clone(), answer)
        };
        let answers = |answer: Result| {
            move || {
                assert_eq!(found(7), None);
                answer
            }
        };
        assert_eq!(announce(&one, &answers(Err(EFAULT))), Err(EFAULT));
        assert_eq!(found(7), None);
        assert_eq!(announce(&one, &answers(Ok(()))), Ok(()));
        // One that has its number stays.
        assert_eq!(announce(&other, &|| Ok(())), Err(EBUSY));
        assert_eq!(found(7), Some(1));
        Ok(())
    }
}
