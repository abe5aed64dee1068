// SPDX-License-Identifier: GPL-2.0

//! All counters of a device, by their numbers.

use super::{
    add,
    set::{
        Next,
        Reader,
        Set, //
    },
    Values,
    NOTHING, //
};
use crate::kernel_ext::memory;
use kernel::{
    new_mutex,
    prelude::*,
    rbtree::{
        RBTree,
        RBTreeNode, //
    },
    sync::{
        Arc,
        Mutex, //
    }, //
};

/// How far somebody has come who reads all sets.
struct Summing {
    /// Sets of lesser numbers were read.
    next: u32,
    /// What they had counted, and those that were no more when they would have been.
    sum: Values,
}

/// The sets of a device.
pub(super) struct State {
    pub(super) sets: RBTree<u32, Set>,
    /// The set of each queue pair that is bound to one.
    bound: RBTree<u32, u32>,
    /// What those had counted that are no more: the core keeps that of a port for ever.
    ended: Values,
    summing: Option<Summing>,
}

impl State {
    /// Binds a queue pair to a set: `EBUSY` where it is in one. What is not needed of the nodes is freed by the caller.
    pub(super) fn bind(
        &mut self,
        number: u32,
        qpn: u32,
        member: &mut Option<RBTreeNode<u32, Values>>,
        bound: &mut Option<RBTreeNode<u32, u32>>,
    ) -> Result {
        if self.bound.get(&qpn).is_some() {
            return Err(EBUSY);
        }
        let set = self.sets.get_mut(&number).ok_or(ENOENT)?;
        if let (Some(member), Some(bound)) = (member.take(), bound.take()) {
            set.bind(member);
            self.bound.insert(bound);
        }
        Ok(())
    }

    /// Has it leave the set, if it is in that.
    pub(super) fn unbind(&mut self, number: u32, qpn: u32, so_far: Option<Values>) {
        if self.bound.get(&qpn) != Some(&number) {
            return;
        }
        self.bound.remove(&qpn);
        if let Some(set) = self.sets.get_mut(&number) {
            set.unbind(qpn, so_far);
        }
    }

    /// Begins to read all sets.
    fn begin(&mut self) {
        self.summing = Some(Summing {
            next: 0,
            sum: self.ended,
        });
    }

    /// The set that is to be read next, if one is left.
    fn next(&self) -> Option<u32> {
        let next = self.summing.as_ref()?.next;
        let set = self.sets.cursor_lower_bound(&next)?;
        Some(*set.current().0)
    }

    /// All sets were read: what they have counted.
    fn finish(&mut self) -> Values {
        let summing = self.summing.take();
        summing.map_or(self.ended, |summing| summing.sum)
    }

    /// A set was read. What it cannot say now is no reason to say nothing of the port.
    fn was_read(&mut self, number: u32, counted: Result<Values>) {
        let Some(summing) = &mut self.summing else {
            return;
        };
        // Of one that has ended meanwhile all is in the sum.
        if let Some(set) = self.sets.get(&number) {
            add(&mut summing.sum, &counted.unwrap_or(set.seen));
        }
        summing.next = number + 1;
    }

    /// A set ends, which has no members any more.
    pub(super) fn end(&mut self, number: u32) {
        let Some(set) = self.sets.remove(&number) else {
            return;
        };
        for qpn in set.members.keys() {
            self.bound.remove(qpn);
        }
        add(&mut self.ended, &set.kept);
        if let Some(summing) = &mut self.summing {
            if number >= summing.next {
                add(&mut summing.sum, &set.kept);
            }
        }
    }
}

/// The sets of a device, as all who use them share them. What the device is asked, and memory, are waited for
/// with nothing locked that others need who bind queue pairs or destroy them. (The core has a lock for each set, too.)
///
/// `ask` is called with as many queue pairs at a time as a query has room for, and says what they have counted
/// together.
#[pin_data]
pub(super) struct Registry {
    #[pin]
    pub(super) state: Mutex<State>,
    /// Held by who reads all sets, until he has.
    #[pin]
    port: Mutex<()>,
}

impl Registry {
    pub(super) fn new() -> Result<Arc<Self>> {
        let registry = pin_init!(Self {
            state <- new_mutex!(
                State {
                    sets: RBTree::new(),
                    bound: RBTree::new(),
                    ended: NOTHING,
                    summing: None,
                },
                "ferrite_qp_counters"
            ),
            port <- new_mutex!((), "ferrite_port_counters"),
        });
        let registry = Arc::pin_init(registry, GFP_KERNEL)?;
        // Queue pairs of kernel users that disks hang on end, and leave their sets.
        memory::taken_in_reclaim(|| drop(registry.state.lock()));
        Ok(registry)
    }

    /// Makes a set. Sleeps.
    pub(super) fn create(&self, number: u32) -> Result {
        let set = RBTreeNode::new(number, Set::new(), GFP_KERNEL_ACCOUNT)?;
        let replaced = self.state.lock().sets.insert(set);
        drop(replaced);
        Ok(())
    }

    /// Ends it. Sleeps.
    pub(super) fn end(&self, number: u32) {
        self.state.lock().end(number);
    }

    /// Calls `f` with a set; nobody looks at any set meanwhile.
    pub(super) fn with_set<T>(&self, number: u32, f: impl FnOnce(&mut Set) -> T) -> Result<T> {
        let mut state = self.state.lock();
        state.sets.get_mut(&number).map(f).ok_or(ENOENT)
    }

    /// Binds a queue pair to a set, by what it has counted when this is called: `EBUSY` where it is in one. Sleeps.
    pub(super) fn bind(
        &self,
        number: u32,
        qpn: u32,
        ask: impl FnOnce(&[u32]) -> Result<Values>,
    ) -> Result {
        let mut member = Some(RBTreeNode::new(qpn, ask(&[qpn])?, GFP_KERNEL_ACCOUNT)?);
        let mut bound = Some(RBTreeNode::new(qpn, number, GFP_KERNEL_ACCOUNT)?);
        self.state.lock().bind(number, qpn, &mut member, &mut bound)
    }

    /// Has it leave the set. Sleeps.
    pub(super) fn unbind(&self, number: u32, qpn: u32, ask: impl FnOnce(&[u32]) -> Result<Values>) {
        let so_far = ask(&[qpn]).ok();
        self.state.lock().unbind(number, qpn, so_far);
    }

    /// What a set has counted. Sleeps.
    pub(super) fn read(
        &self,
        number: u32,
        reader: Reader,
        ask: &mut dyn FnMut(&[u32]) -> Result<Values>,
    ) -> Result<Values> {
        if let Some(seen) = self.with_set(number, |set| set.begin(reader))? {
            return Ok(seen);
        }
        // Ends, as there are so many members, and they are asked for again so often at the most.
        loop {
            let asked = match self.with_set(number, |set| set.next(reader))?? {
                Next::Ask(asked) => asked,
                Next::Done(counted) => return Ok(counted),
            };
            match ask(asked.qpns()) {
                Ok(counted) => {
                    let ended =
                        self.with_set(number, |set| set.answered(reader, &asked, counted))?;
                    if let Some(seen) = ended {
                        return Ok(seen);
                    }
                }
                Err(error) => {
                    self.with_set(number, |set| set.leave(reader))?;
                    return Err(error);
                }
            }
        }
    }

    /// What all sets have counted, those that are no more too. Sleeps.
    pub(super) fn read_all(&self, ask: &mut dyn FnMut(&[u32]) -> Result<Values>) -> Values {
        let _turn = self.port.lock();
        self.state.lock().begin();
        loop {
            let number = {
                let mut state = self.state.lock();
                match state.next() {
                    Some(number) => number,
                    None => return state.finish(),
                }
            };
            let counted = self.read(number, Reader::OfPort, ask);
            self.state.lock().was_read(number, counted);
        }
    }
}
