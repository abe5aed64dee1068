// SPDX-License-Identifier: GPL-2.0

//! A command that somebody waits for, and one that is posted.

use super::{
    state::State,
    Class,
    Outcome,
    Requests,
    SLOT_BITS, //
};
use crate::{
    abi::CommandEntry,
    kernel_ext::{
        completion::Completion,
        scoped::{
            Scoped,
            ScopedRef, //
        }, //
    }, //
};
use kernel::{
    alloc::Flags,
    prelude::*,
    rbtree::RBTreeNodeReservation,
    sync::{
        Arc,
        LockedBy, //
    }, //
};

/// Where a request is.
pub(super) enum Stage {
    /// With nobody but its owner.
    Apart,
    Queued {
        queue: usize,
    },
    InRing {
        slot: usize,
    },
    Done(Outcome),
}

/// How far a request is, as its owner sees it. What does not change means that nothing is done.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Position {
    /// It waits for a slot; so many commands were answered until now, free-running, and this one is
    /// the oldest of those that are in its way (its place in the ring).
    Queued {
        answers: u32,
        oldest: u32,
    },
    /// The device has it, and so many that were put in the ring before.
    InRing {
        ahead: u32,
    },
    Done,
}

/// How far a command is and how it ended, for who asked for it.
#[pin_data]
pub(crate) struct Ticket {
    pub(super) class: Class,
    pub(super) user: u64,
    pub(super) stage: LockedBy<Stage, State>,
    /// Signalled when it is done, for all who wait for that, now or later.
    #[pin]
    pub(crate) done: Completion,
}

impl Ticket {
    /// Of a command that `user` answers for.
    pub(crate) fn new(requests: &Requests, user: u64, class: Class) -> impl PinInit<Self> + '_ {
        pin_init!(Self {
            class,
            user,
            stage: LockedBy::new(&requests.state, Stage::Apart),
            done <- Completion::new(),
        })
    }

    /// Makes one of which nobody else knows that of another command.
    fn renew(this: Pin<&mut Self>, requests: &Requests, of_user: u64, of_class: Class) {
        let this = this.project();
        *this.class = of_class;
        *this.user = of_user;
        *this.stage = LockedBy::new(&requests.state, Stage::Apart);
        this.done.reinit();
    }
}

/// What posting a command takes. It is made before: nothing can be allocated where an answer is taken.
pub(crate) struct Post {
    pub(super) ticket: Arc<Ticket>,
    pub(super) failure: RBTreeNodeReservation<u64, Outcome>,
}

impl Post {
    /// For a command that `user` answers for. Where one that was posted is done, it is what that took.
    pub(crate) fn new(requests: &Requests, user: u64, class: Class, flags: Flags) -> Result<Self> {
        let Some(Self { ticket, failure }) = requests.take_spare() else {
            return Ok(Self {
                ticket: Arc::pin_init(Ticket::new(requests, user, class), flags)?,
                failure: RBTreeNodeReservation::new(flags)?,
            });
        };
        // Somebody may yet have to see that the last one is done.
        let ticket = match Arc::into_unique_or_drop(ticket) {
            Some(mut ticket) => {
                Ticket::renew(ticket.as_mut(), requests, user, class);
                ticket.into()
            }
            None => Arc::pin_init(Ticket::new(requests, user, class), flags)?,
        };
        Ok(Self { ticket, failure })
    }
}

/// The name of a command that was posted, by which it is asked what became of it until that is forgotten
/// ([`Requests::forget`]).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Posted(pub(super) u64);

impl Posted {
    /// The slot that it was put in.
    pub(super) fn slot(&self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }
}

/// What changes of a request, but for how far it is.
pub(super) struct Progress {
    /// Its neighbours in the queue.
    pub(super) previous: Option<ScopedRef<Request>>,
    pub(super) next: Option<ScopedRef<Request>>,
    /// But for the cookie and the place of the reply, which are those of a slot. When it is done, the
    /// reply stands here: stacks are short where memory is taken back.
    pub(super) entry: CommandEntry,
}

/// A command that somebody asks for, and waits for.
#[pin_data]
pub(crate) struct Request {
    #[pin]
    pub(crate) ticket: Ticket,
    /// Whether it is answered by a reply.
    pub(super) has_reply: bool,
    pub(super) progress: LockedBy<Progress, State>,
}

impl Request {
    /// A request that `user` answers for.
    pub(crate) fn new<'a>(
        requests: &'a Requests,
        user: u64,
        class: Class,
        entry: CommandEntry,
    ) -> impl PinInit<Scoped<Self>> + 'a {
        let progress = Progress {
            previous: None,
            next: None,
            entry,
        };
        Scoped::new(pin_init!(Self {
            ticket <- Ticket::new(requests, user, class),
            has_reply: progress.entry.reply_length != 0,
            progress: LockedBy::new(&requests.state, progress),
        }))
    }
}

/// What is waited for.
#[derive(Clone, Copy)]
pub(crate) enum Asked<'a> {
    /// A command from when it was asked for.
    Request(&'a Request),
    /// One that was posted.
    Posted(&'a Ticket),
}

impl<'a> Asked<'a> {
    /// What tells how far it is.
    pub(crate) fn ticket(self) -> &'a Ticket {
        match self {
            Self::Request(request) => &request.ticket,
            Self::Posted(ticket) => ticket,
        }
    }
}
