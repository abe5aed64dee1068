// SPDX-License-Identifier: GPL-2.0

//! What there is to know of a device that failed, or that somebody wonders about: devlink keeps it.
//!
//! All of it is in host memory, and what is locked is locked for moments only: the device may be dead, silent or gone,
//! or about to come back meanwhile, and is not asked. So no register is read, no command is given, and no lock is taken
//! that somebody holds while the device is waited for: those of the lives, of the device that begins one, of the settings
//! of an event queue. The device that is looked at is referred to meanwhile, and so is what it has in memory.
//!
//! What is said has an end ([`MOST_QUEUES`], [`MOST_HANDLERS`], the commands that a ring has, the entries of a log), and
//! has nothing that is secret: no keys, indices of keys, addresses or contents of anybody's memory.

use crate::{
    abi,
    cqp::Cqp,
    eq::EventQueue,
    event_class::EventClass,
    event_log::{
        EventLog,
        Opcode, //
    },
    handler::Arrangement,
    hardware::{
        Cause,
        Hardware, //
    },
    kernel_ext::devlink::Object,
    lent::Reach,
    requests::PostedFor, //
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed, //
};

/// Event queues that are described: of a host with more processors, the first ones.
const MOST_QUEUES: usize = 128;

/// Completion handlers that are.
const MOST_HANDLERS: u16 = 128;

/// Says why a device failed.
pub(super) fn say_cause(cause: Cause, to: &mut Object<'_>) {
    to.text(c"last failure", cause.text());
    if let Cause::Stopped(Some(code)) = cause {
        to.number(c"fatal code", code as u32);
    }
}

/// Says what there is to know of a device. Sleeps.
pub(super) fn say_hardware(hw: &Hardware, to: &mut Object<'_>) -> Result {
    to.object(c"this life", |to| {
        to.flag(c"given up", hw.is_dead());
        if let Some(cause) = hw.cause() {
            say_cause(cause, to);
        }
        to.text(
            c"reach",
            match hw.reach.get() {
                Reach::Working => c"its memory",
                Reach::Stopped => c"nothing",
                Reach::Unstoppable => c"what it was told of",
            },
        );
        to.flag(c"link up", hw.link_up());
        to.object(c"events of no queue", |to| {
            for (class, name) in EventClass::ALL {
                to.large_number(name, hw.event_counts.get(class));
            }
        });
    });
    to.object(c"tables", |to| {
        let Some(tables) = hw.tables.as_ref() else {
            return;
        };
        tables.for_each(|name, used, entries| {
            to.object(name, |to| {
                to.number(c"used", used);
                to.number(c"entries", entries);
            });
        });
    });
    to.object(c"control ring", |to| say_control_ring(&hw.cqp, to))?;
    say_event_queues(hw, to);
    if let Some(arrangement) = hw.arrangement.as_ref() {
        to.object(c"interrupts", |to| say_interrupts(arrangement, to));
    }
    Ok(())
}

fn say_control_ring(cqp: &Cqp, to: &mut Object<'_>) -> Result {
    let view = cqp.look()?;
    to.flag(c"closed", view.closed);
    to.number(c"given", view.producer);
    to.number(c"told by doorbell", view.told);
    to.number(c"answered", view.answers);
    to.number(c"free places", view.free);
    to.number(c"waiting for a place", view.waiting);
    to.number(c"pending registrations", view.registrations() as u32);
    to.list(c"commands", |list| {
        for command in &view.commands {
            list.object(|to| {
                to.formatted(c"opcode", fmt!("{}", Opcode(command.opcode)));
                to.large_number(c"age ms", command.age);
                to.text(
                    c"asked by",
                    match command.posted {
                        None => c"one who waits",
                        Some(PostedFor::Making) => c"a registration",
                        Some(PostedFor::Release) => c"a release",
                    },
                );
                to.flag(c"answer expected", command.expected);
            });
        }
    });
    Ok(())
}

fn say_event_queue(queue: &EventQueue, to: &mut Object<'_>) {
    let view = queue.look();
    to.number(c"number", queue.number().into());
    to.number(c"vector", queue.message().into());
    to.number(c"entries", 1 << view.log_entries);
    to.number(c"read index", view.index);
    to.number(c"told index", view.told);
    to.flag(c"armed", view.armed);
    to.flag(c"unread", view.unread);
    to.flag(c"moving", view.moving);
    to.flag(c"low latency", queue.is_low_latency());
    to.large_number(c"events", queue.events());
    to.large_number(c"interrupts", queue.interrupts());
    to.large_number(c"overflows", queue.overflows());
}

fn say_event_queues(hw: &Hardware, to: &mut Object<'_>) {
    let mut left_out = 0;
    to.list(c"event queues", |list| {
        let mut next = hw.event_queues.next_index(0);
        let mut count = 0;
        if next != Some(abi::EQ_CONTROL.into()) {
            // It is not in the table before there are others, and not any more when they are gone.
            list.object(|to| say_event_queue(hw.cqp.events(), to));
        }
        while let Some(index) = next {
            if count == MOST_QUEUES {
                left_out += 1;
            } else if let Some(queue) = hw.event_queues.get(index) {
                list.object(|to| say_event_queue(&queue, to));
                count += 1;
            }
            next = hw.event_queues.next_index(index + 1);
        }
    });
    to.number(c"event queues left out", left_out);
}

fn say_interrupts(arrangement: &Arrangement, to: &mut Object<'_>) {
    let table = &arrangement.table;
    to.formatted(c"by", fmt!("{}", arrangement.kind.name()));
    to.number(c"vectors", arrangement.vectors);
    to.large_number(c"not ours", arrangement.unhandled.load(Relaxed));
    to.number(c"handlers", table.columns().into());
    to.list(c"first handlers", |list| {
        for handler in 0..table.columns().min(MOST_HANDLERS) {
            let (eqn, vector) = table.main(handler);
            list.object(|to| {
                to.number(c"event queue", eqn.into());
                to.number(c"vector", vector.into());
            });
        }
    });
}

/// Says what happened last. Sleeps.
pub(super) fn say_log(log: &EventLog, to: &mut Object<'_>) -> Result {
    let last = log.last()?;
    to.list(c"last events", |list| {
        for (age, what) in &last {
            list.object(|to| {
                to.large_number(c"us ago", *age);
                to.formatted(c"what", fmt!("{}", what));
            });
        }
    });
    to.number(c"events lost", log.lost());
    Ok(())
}
