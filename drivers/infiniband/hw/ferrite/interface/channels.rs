// SPDX-License-Identifier: GPL-2.0

//! The channels of the interface: made when it is opened, and found by the events that tell of them.

use super::{
    counters::ChannelCounters,
    memory::{
        ChannelMemory,
        Layout, //
    },
    receive::Receiver,
    repairs::Repairs,
    transmit::Transmitter,
    Behind,
    Interface, //
};
use crate::{
    abi,
    abi::CommandOpcode,
    commands::DeviceObject,
    hardware::Hardware,
    kernel_ext::spinlock::{
        new_irq_spinlock,
        IrqSpinLock, //
    },
    net::{
        netdev_warn,
        without_bottom_halves,
        Device,
        Hold,
        Napi, //
    },
};
use kernel::{
    new_spinlock,
    prelude::*,
    sync::{
        Arc,
        SpinLock, //
    },
};

/// A queue of the interface, whether it is open or not.
#[pin_data]
pub(crate) struct Queue {
    pub(super) number: u16,
    #[pin]
    pub(super) receiver: SpinLock<Option<Receiver>>,
    #[pin]
    pub(super) transmitter: IrqSpinLock<Option<Transmitter>>,
    pub(super) counters: ChannelCounters,
}

impl Queue {
    pub(super) fn new(number: u16) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            number,
            receiver <- new_spinlock!(None, "ferrite_receiver"),
            transmitter <- new_irq_spinlock!(None, "ferrite_transmitter"),
            counters: ChannelCounters::new(),
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Gives it others than it had, or none; those are dropped. NAPI does not run. Sleeps.
    fn put(&self, transmitter: Option<Transmitter>, receiver: Option<Receiver>) {
        let transmitter = core::mem::replace(&mut *self.transmitter.lock(), transmitter);
        let receiver = self.with_receiver(|ours| core::mem::replace(ours, receiver));
        // Without the locks, as that may sleep.
        drop((transmitter, receiver));
    }

    /// Calls `f` with what receives, by a task.
    fn with_receiver<R>(&self, f: impl FnOnce(&mut Option<Receiver>) -> R) -> R {
        without_bottom_halves(|| f(&mut self.receiver.lock()))
    }
}

/// Who is told of events of a channel.
pub(crate) struct ChannelListener {
    dev: Hold<Interface>,
    number: u16,
}

impl ChannelListener {
    fn napi(&self) -> Option<&Napi<Interface>> {
        self.dev.napis().get(usize::from(self.number))
    }

    /// Something came or was sent. Runs in the interrupt.
    #[inline]
    pub(crate) fn schedule(&self) {
        if let Some(napi) = self.napi() {
            napi.schedule();
        }
    }

    /// The device refuses something that was posted, as `what` says: `BAD_BUFFERS_*`. Runs in the interrupt.
    #[cold]
    pub(crate) fn refused(&self, index: u64, what: u64) {
        let transmit = what & abi::BAD_BUFFERS_TRANSMIT != 0;
        if let Some(napi) = self.napi().filter(|_| transmit) {
            napi.queue().counters.tx_errors.add(1);
        }
        let stopped = what & abi::BAD_BUFFERS_STOPPED != 0;
        if self.dev.prints.allows(c"ferrite channels") {
            netdev_warn!(
                self.dev,
                "channel {}: the device refuses what was {} at {}{}\n",
                self.number,
                if transmit {
                    "sent"
                } else {
                    "posted to receive"
                },
                index,
                if stopped { ", and takes no more" } else { "" }
            );
        }
        if stopped {
            Repairs::restart_soon(&self.dev);
        }
    }
}

/// Channels that the device has. Dropped in order: nobody is told of their events any more, and then they go.
pub(super) struct Opened {
    listed: Listed,
    objects: KVec<DeviceObject>,
    /// Whether the device was told that the interface is up.
    pub(super) channels: u16,
}

/// Channels in the table by which events find them.
struct Listed {
    hw: Arc<Hardware>,
    numbers: KVec<u16>,
}

impl Listed {
    fn add(&mut self, dev: &Device<Interface>, number: u16) -> Result {
        let listener = ChannelListener {
            dev: dev.hold(),
            number,
        };
        self.numbers.reserve(1, GFP_KERNEL)?;
        let listener = Arc::new(listener, GFP_KERNEL)?;
        self.hw.channels.insert(number.into(), listener)?;
        self.numbers.push(number, GFP_KERNEL)?;
        Ok(())
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        for number in &self.numbers {
            drop(self.hw.channels.remove(usize::from(*number)));
        }
    }
}

impl Device<Interface> {
    /// Makes the channels, and has the device receive. Where it fails [`Self::close`] undoes what was done.
    pub(super) fn make_channels(&self, behind: &Behind) -> Result {
        let parent = self.parent().ok_or(ENODEV)?;
        let Behind { hw, handlers, .. } = behind;
        let mut settings = self.settings.lock();
        let layout = Layout {
            transmit_log_blocks: settings.transmit_log_blocks,
            receive_log_entries: settings.receive_log_entries,
        };
        let channels = self.tx_queues().min(behind.channels());
        let mut open = self.open.lock();
        let opened = open.insert(Opened {
            listed: Listed {
                hw: hw.clone(),
                numbers: KVec::new(),
            },
            objects: KVec::with_capacity(channels.into(), GFP_KERNEL)?,
            channels,
        });
        for (number, napi) in (0..channels).zip(self.napis()) {
            let queue = napi.queue();
            let memory = ChannelMemory::new(parent, hw, layout)?;
            let pieces = behind.caps.max_transmit_pieces.into();
            let transmitter = Transmitter::new(parent, hw, &memory, number, pieces)?;
            let mut receiver = Receiver::new(parent, hw, &memory, number)?;
            // While nobody else has it, and memory can be waited for.
            receiver.fill();
            if receiver.is_low() {
                return Err(ENOMEM);
            }
            // Before the device knows the memory, which so is there until the device has let go of it.
            queue.put(Some(transmitter), Some(receiver));
            // Who changes a setting may be killed, and the interface is not his.
            let object = DeviceObject::create_for_others(
                hw,
                &memory.create_command(number, handlers.main_queue(number)),
                CommandOpcode::DestroyChannel,
                number.into(),
            )?;
            opened.objects.push(object, GFP_KERNEL)?;
            opened.listed.add(self, number)?;
        }
        if let Some((microseconds, frames)) = settings.coalescing {
            if let Err(error) = behind.moderate(channels, microseconds, frames) {
                if hw.is_dead() {
                    return Err(error);
                }
                // It receives and sends all the same.
                netdev_warn!(
                    self,
                    "interrupts are not put off for {} us, or {} frames: {:?}\n",
                    microseconds,
                    frames,
                    error
                );
                settings.coalescing = None;
            }
        }
        self.tell_redirection(behind, &settings, channels)?;
        hw.execute(&settings.filter(behind.caps.multicast_addresses()))?;
        self.tell(behind, &settings, true)
    }

    /// Takes the channels down: the device lets go of them, or was stopped, and then their memory goes. Sleeps.
    pub(super) fn close(&self) {
        let opened = self.open.lock().take();
        drop(opened);
        for napi in self.napis() {
            napi.queue().put(None, None);
        }
    }
}
