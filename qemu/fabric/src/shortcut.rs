// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shortcuts: shared memory between two ports, past the switch.
//!
//! Two ports that can do it are given a pair of [rings](crate::ring) once they
//! exchange RoCEv2 frames, and send those through the rings from then on. They
//! get no rings while the switch has anything to do with frames but forward
//! them (a capture, a fault, a partition), and lose those they have: so whoever
//! looks at the switch sees every frame.
//!
//! Ports and switch talk about this in frames that no switch forwards
//! ([`Message`]), in the same stream as all others. So a message says something
//! about the frames before and after it:
//!
//! | message | from, to | meaning |
//! |---|---|---|
//! | hello | port | this port is a device, with this address, and can use shortcuts; in a stream that begins with the [mark](crate::framing::MARK), which a guest behind a port cannot make |
//! | address | port | this port has this address, too, or alone, and frames to it take no shortcuts; in such a stream as well |
//! | grant | switch | rings to another port, as two descriptors: the memory, and this port's end of the [sockets](crate::wake) by which both wake each other |
//! | ready | port | all frames from here on to that port are in the ring |
//! | open | switch, to the other port | all frames before the ring's first are behind you: begin to read it |
//! | revoke | switch | do not use the ring any more |
//! | released | port | all frames from here on are in the stream again |
//! | close | switch, after both released | nobody writes any more: read what there is and forget the rings |
//! | closed | port | done |
//!
//! A grant and a revocation overtake frames that wait for a port; nothing else does.
//!
//! [`Broker`] is the switch's part in this, without sockets or a clock.

use crate::framing::MIN_FRAME;
use crate::switch::{Mac, PortId};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Where messages go: the group address of the nearest bridge.
const NEAREST_BRIDGE: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0x0e];
/// The first of the Ethernet types for local experiments.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// What tells these messages from other experiments, and their version.
const MAGIC: [u8; 5] = *b"FeSC\x05";
/// All messages have the length of the shortest Ethernet frame.
const LENGTH: usize = 60;
/// Frames between two ports before they get a shortcut.
const THRESHOLD: u32 = 4;
/// Shortcuts of one port at most.
pub const MAX_SHORTCUTS: usize = 64;
/// Of these, those to ports of one other user: so no user keeps the others from
/// having any.
const MAX_PER_USER: usize = MAX_SHORTCUTS / 4;
/// And those to all others but the user who runs the switch: some are left for
/// ports of its own user and of that one, whoever has many numbers.
const MAX_ACROSS: usize = MAX_SHORTCUTS - MAX_SHORTCUTS / 4;
/// A port reads a ring that is full each time that a shortcut ends. So where one
/// ends again and again, there is another after so long, in nanoseconds: to ports of
/// one other user, and to all others. As many as there may be end at once before.
const RENEWAL_PER_USER: u64 = 1_000_000_000;
const RENEWAL_ACROSS: u64 = RENEWAL_PER_USER / 4;
/// Of all, grants that it has not answered: their descriptors are under way,
/// of which the kernel lets a user have so many and no more.
pub const MAX_UNANSWERED: usize = 4;
/// Pairs of ports whose frames are counted at most.
const MAX_PAIRS: usize = 4096;
/// How long all wait for another try where there was no shortcut to be had, in nanoseconds.
const AGAIN: u64 = 1_000_000_000;
/// How long two ports wait for another try when they were refused one, in nanoseconds:
/// each costs the one something whose frame it was.
const REFUSED: u64 = 100_000_000;
/// How long a port may take to answer, in nanoseconds.
const PATIENCE: u64 = 2_000_000_000;
/// How long what is asked of a port may wait to be written while the port reads
/// less than [`STEP`], in nanoseconds.
const STALLED: u64 = 10_000_000_000;
/// Bytes that a port reads in that time at least, if so many wait for it.
const STEP: u64 = 4 * 1024 * 1024;
/// How much longer the switch waits until it comes to the answer in what the port
/// has sent, before it looks for it out of turn.
const READING: u64 = 4 * PATIENCE;
/// Descriptors that come with a grant.
pub const GRANT_FDS: usize = 2;

/// A shortcut's number, never that of two at a time.
pub type ShortcutId = u32;

/// What ports and switch tell each other; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Message {
    Hello {
        /// Frames from other addresses than the device's come as well, and its
        /// own may show up elsewhere (see [`crate::switch`]).
        any_source: bool,
    },
    Grant {
        shortcut: ShortcutId,
        /// Which of the two sides of the rings is this port's: 0 or 1.
        side: u8,
        /// The address behind the other port.
        peer: Mac,
    },
    Ready(ShortcutId),
    Open(ShortcutId),
    Revoke(ShortcutId),
    Released(ShortcutId),
    Close(ShortcutId),
    Closed(ShortcutId),
    Address {
        /// As of a hello.
        any_source: bool,
    },
}

/// Whether a frame is a message about shortcuts, well-formed or not. No such
/// frame is forwarded, nor taken from a guest.
pub fn is_message(frame: &[u8]) -> bool {
    frame.get(..6) == Some(&NEAREST_BRIDGE) && frame.get(12..14) == Some(&ETHERTYPE)
}

impl Message {
    /// The message as a frame from `source`.
    pub fn to_frame(self, source: Mac) -> [u8; LENGTH] {
        let (kind, id, side, peer) = match self {
            Self::Hello { any_source } => (0, 0, any_source.into(), None),
            Self::Grant {
                shortcut,
                side,
                peer,
            } => (1, shortcut, side, Some(peer)),
            Self::Ready(id) => (2, id, 0, None),
            Self::Open(id) => (3, id, 0, None),
            Self::Revoke(id) => (4, id, 0, None),
            Self::Released(id) => (5, id, 0, None),
            Self::Close(id) => (6, id, 0, None),
            Self::Closed(id) => (7, id, 0, None),
            Self::Address { any_source } => (8, 0, any_source.into(), None),
        };
        let mut frame = [0; LENGTH];
        frame[..6].copy_from_slice(&NEAREST_BRIDGE);
        frame[6..12].copy_from_slice(&source.0);
        frame[12..14].copy_from_slice(&ETHERTYPE);
        frame[14..19].copy_from_slice(&MAGIC);
        frame[19] = kind;
        frame[20] = side;
        frame[22..26].copy_from_slice(&id.to_be_bytes());
        frame[26..32].copy_from_slice(&peer.map_or([0; 6], |mac| mac.0));
        frame
    }

    /// Reads a frame for which [`is_message`] holds, with who sent it; `None`
    /// if it makes no sense.
    pub fn parse(frame: &[u8]) -> Option<(Mac, Self)> {
        let body = frame.get(MIN_FRAME..)?.strip_prefix(&MAGIC)?;
        let [kind, side, _, a, b, c, d, rest @ ..] = body else {
            return None;
        };
        let source = Mac(*frame.get(6..)?.first_chunk()?);
        let id = u32::from_be_bytes([*a, *b, *c, *d]);
        let message = match kind {
            0 if *side < 2 => Self::Hello {
                any_source: *side == 1,
            },
            1 if *side < 2 => Self::Grant {
                shortcut: id,
                side: *side,
                peer: Mac(*rest.first_chunk()?),
            },
            2 => Self::Ready(id),
            3 => Self::Open(id),
            4 => Self::Revoke(id),
            5 => Self::Released(id),
            6 => Self::Close(id),
            7 => Self::Closed(id),
            8 if *side < 2 => Self::Address {
                any_source: *side == 1,
            },
            _ => return None,
        };
        Some((source, message))
    }
}

/// What the process around the broker has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make the rings of a new shortcut, and send grants to both ends.
    Grant(ShortcutId),
    /// Send a message to a port.
    Tell(PortId, Message),
    /// Drop the connection of a port that does not answer.
    CutOff(PortId),
    /// The shortcut is gone, and with it its rings.
    Forget(ShortcutId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    InUse,
    /// Until both ends have stopped to write.
    Revoking,
    /// Until both ends have read all.
    Closing,
}

/// One of the two ports of a shortcut.
#[derive(Debug, Clone, Copy)]
struct End {
    port: PortId,
    mac: Mac,
    user: Option<u32>,
    /// It has said that it writes to the ring.
    ready: bool,
    /// It has done what the phase asks of it, or is gone.
    done: bool,
    gone: bool,
    /// What the phase asks of it is written; before, how much of its stream was
    /// when that last moved on.
    told: bool,
    position: Option<u64>,
    /// When it is given up if it is not done.
    deadline: u64,
}

impl End {
    fn new(port: PortId, mac: Mac, user: Option<u32>) -> Self {
        Self {
            port,
            mac,
            user,
            ready: false,
            done: false,
            gone: false,
            told: false,
            position: None,
            deadline: u64::MAX,
        }
    }

    /// It is to be asked for something.
    fn ask(&mut self, now: u64) {
        self.told = false;
        self.position = None;
        self.deadline = now.saturating_add(STALLED);
    }
}

#[derive(Debug)]
struct Shortcut {
    ends: [End; 2],
    phase: Phase,
}

impl Shortcut {
    /// The ports of its ends, the lower number first.
    fn pair(&self) -> (PortId, PortId) {
        let [a, b] = self.ends.map(|end| end.port);
        (a.min(b), a.max(b))
    }

    fn end(&mut self, port: PortId) -> Option<&mut End> {
        self.ends.iter_mut().find(|end| end.port == port)
    }
}

/// A user, and whether the other end of a shortcut is another's.
type Kind = (Option<u32>, bool);

/// Whether two ports are of one user, as far as that is known.
fn are_one(a: Option<u32>, b: Option<u32>) -> bool {
    a.is_some() && a == b
}

/// What a shortcut is for the users at its ends. Those to others are counted
/// apart: nobody uses up what a user has for its own.
fn kinds(ends: &[End; 2]) -> [Kind; 2] {
    let across = !are_one(ends[0].user, ends[1].user);
    ends.map(|end| (end.user, across))
}

/// How often something happens, of what may be some times at once and then at a
/// steady pace.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    /// When that is as if it had never happened.
    even_at: u64,
}

impl Pace {
    /// It happens, and counts for one `step`.
    fn count(&mut self, step: u64, now: u64) {
        self.even_at = self.even_at.max(now).saturating_add(step);
    }

    /// Whether so many count now.
    fn is_reached(&self, times: usize, step: u64, now: u64) -> bool {
        let others = u64::try_from(times.saturating_sub(1)).unwrap_or(u64::MAX);
        self.even_at.saturating_sub(now) > others.saturating_mul(step)
    }
}

/// Shortcuts of a port to those of others that ended, though the switch had
/// nothing against them.
#[derive(Debug, Default)]
struct Ended {
    to_users: BTreeMap<Option<u32>, Pace>,
    across: Pace,
}

impl Ended {
    fn count(&mut self, user: Option<u32>, now: u64) {
        self.to_users.retain(|_, pace| pace.even_at > now);
        let pace = self.to_users.entry(user).or_default();
        pace.count(RENEWAL_PER_USER, now);
        self.across.count(RENEWAL_ACROSS, now);
    }

    /// Whether there is to be no other to ports of a user for now.
    fn are_many(&self, user: Option<u32>, now: u64) -> bool {
        let of_user = self.to_users.get(&user);
        of_user.is_some_and(|pace| pace.is_reached(MAX_PER_USER, RENEWAL_PER_USER, now))
            || self.across.is_reached(MAX_ACROSS, RENEWAL_ACROSS, now)
    }
}

/// What was seen of two ports.
#[derive(Debug, Default)]
struct Seen {
    /// Frames since the last try to make a shortcut.
    frames: u32,
    /// When there may be another.
    again_at: u64,
}

/// Decides who has shortcuts.
#[derive(Default)]
pub struct Broker {
    /// Ports that can use shortcuts, with the address behind each.
    ports: BTreeMap<PortId, Mac>,
    /// Whose they are, where that is known.
    users: HashMap<PortId, u32>,
    shortcuts: BTreeMap<ShortcutId, Shortcut>,
    /// The shortcuts of each port.
    of: HashMap<PortId, BTreeSet<ShortcutId>>,
    /// Ends of shortcuts by users.
    of_users: HashMap<Kind, usize>,
    /// Who may have all that there are, and how many ends of each kind others.
    limit: Option<(u32, usize)>,
    ended: HashMap<PortId, Ended>,
    next: ShortcutId,
    allowed: bool,
    /// Frames seen between ports, the lower number first.
    seen: HashMap<(PortId, PortId), Seen>,
    /// Pairs of which one did not want a shortcut, or could not use it.
    barred: BTreeSet<(PortId, PortId)>,
    /// When there may be shortcuts again, after one could not be made: what
    /// was missing then is missing for all.
    again_at: u64,
    /// Shortcuts whose ends are asked for something, and may not know it yet.
    asked: Vec<ShortcutId>,
    actions: Vec<Action>,
}

impl Broker {
    /// A port is there, of this user if that is known.
    pub fn attach(&mut self, port: PortId, user: Option<u32>) {
        if let Some(user) = user {
            self.users.insert(port, user);
        }
    }

    /// Lets each user but `owner` have `ends` of shortcuts among its own ports,
    /// and as many to those of others.
    pub fn limit(&mut self, owner: u32, ends: usize) {
        self.limit = Some((owner, ends));
    }

    /// Whether there are as many shortcuts of this kind as there may be.
    fn is_used_up(&self, kind: &Kind) -> bool {
        self.limit.is_some_and(|(owner, most)| {
            let count = self.of_users.get(kind).copied().unwrap_or(0);
            kind.0 != Some(owner) && count >= most
        })
    }

    /// Whether a user is another than that of a port, and not who runs the switch.
    fn is_stranger(&self, own: Option<u32>, user: Option<u32>) -> bool {
        let is_owner = self.limit.is_some_and(|(owner, _)| user == Some(owner));
        !are_one(own, user) && !is_owner
    }

    /// Takes all that is to be done.
    pub fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The ends of a shortcut: port and address behind it.
    pub fn ends(&self, id: ShortcutId) -> Option<[(PortId, Mac); 2]> {
        let shortcut = self.shortcuts.get(&id)?;
        Some(shortcut.ends.map(|end| (end.port, end.mac)))
    }

    /// All shortcuts that are in use or on their way out.
    pub fn shortcuts(&self) -> impl Iterator<Item = ShortcutId> + '_ {
        self.shortcuts.keys().copied()
    }

    /// Whether shortcuts may be there at all.
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// Whether every frame passes the switch or may pass it by: nothing is to
    /// be waited for.
    pub fn settled(&self) -> bool {
        self.allowed || self.shortcuts.is_empty()
    }

    /// Allows shortcuts, or takes them all back.
    pub fn allow(&mut self, allowed: bool, now: u64) {
        if self.allowed && !allowed {
            let ids: Vec<ShortcutId> = self.shortcuts.keys().copied().collect();
            for id in ids {
                self.revoke(id, now);
            }
            self.seen.clear();
        }
        self.allowed = allowed;
    }

    /// Whether frames of this port are worth a call of [`Broker::seen`].
    pub fn is_interested(&self, port: PortId) -> bool {
        self.allowed && self.ports.contains_key(&port)
    }

    /// A RoCEv2 frame went from one port to another. `to` is where its
    /// destination is known to be; `behind` tells that of any address.
    pub fn seen(
        &mut self,
        from: PortId,
        to: PortId,
        destination: Mac,
        behind: impl Fn(&Mac) -> Option<PortId>,
        now: u64,
    ) {
        let pair = (from.min(to), from.max(to));
        let (Some(&own), Some(&peer)) = (self.ports.get(&from), self.ports.get(&to)) else {
            return;
        };
        if !self.allowed || from == to || destination != peer || self.barred.contains(&pair) {
            return;
        }
        // A port that only says that it has an address gets nobody's frames.
        if behind(&own) != Some(from) || behind(&peer) != Some(to) {
            return;
        }
        let seen = self.seen_of(pair, now);
        seen.frames += 1;
        if seen.frames < THRESHOLD {
            return;
        }
        seen.frames = 0;
        let again_at = seen.again_at;
        if self.again_at.max(again_at) > now {
            return;
        }
        let of = |port| {
            let ids = self.of.get(&port).into_iter().flatten();
            ids.filter_map(|id| self.shortcuts.get(id))
        };
        let together = of(from).any(|shortcut| shortcut.ends.iter().any(|end| end.port == to));
        let full = |port| {
            let unanswered = |shortcut: &&Shortcut| {
                let mut ends = shortcut.ends.iter();
                ends.any(|end| end.port == port && !end.ready)
            };
            of(port).count() >= MAX_SHORTCUTS
                || of(port).filter(unanswered).count() >= MAX_UNANSWERED
        };
        let user = |port| self.users.get(&port).copied();
        // Whether `port` has as many as it may have to the user of `other`.
        let crowded = |port, other| {
            let (own, peer) = (user(port), user(other));
            let count = |counts: &dyn Fn(Option<u32>) -> bool| {
                let ends = of(port).flat_map(|shortcut| &shortcut.ends);
                let peers = ends.filter(|end| end.port != port);
                peers.filter(|end| counts(end.user)).count()
            };
            let is_stranger = |user| self.is_stranger(own, user);
            let ended = self.ended.get(&port);
            !are_one(own, peer) && count(&|user| user == peer) >= MAX_PER_USER
                || is_stranger(peer) && count(&is_stranger) >= MAX_ACROSS
                || is_stranger(peer) && ended.is_some_and(|ended| ended.are_many(peer, now))
        };
        if together || full(from) || full(to) || crowded(from, to) || crowded(to, from) {
            return;
        }
        let ends = [
            End::new(from, own, user(from)),
            End::new(to, peer, user(to)),
        ];
        let kinds = kinds(&ends);
        if kinds.iter().any(|kind| self.is_used_up(kind)) {
            return;
        }
        for kind in kinds {
            *self.of_users.entry(kind).or_default() += 1;
        }
        // They start over at some time, and some live long.
        while self.shortcuts.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        for port in [from, to] {
            self.of.entry(port).or_default().insert(id);
        }
        self.shortcuts.insert(
            id,
            Shortcut {
                ends,
                phase: Phase::InUse,
            },
        );
        self.actions.push(Action::Grant(id));
    }

    /// What was seen of two ports. Where there are too many, those are forgotten
    /// that do not wait for another try: nobody shortens that by sending to many.
    /// Half of the room is free then, and it is long until there are too many again;
    /// of more that wait, those stay that wait longest.
    fn seen_of(&mut self, pair: (PortId, PortId), now: u64) -> &mut Seen {
        if self.seen.len() >= MAX_PAIRS && !self.seen.contains_key(&pair) {
            self.seen.retain(|_, seen| seen.again_at > now);
            let over = self.seen.len().saturating_sub(MAX_PAIRS / 2);
            if over > 0 {
                let waiting = self.seen.iter();
                let mut waiting: Vec<_> =
                    waiting.map(|(pair, seen)| (seen.again_at, *pair)).collect();
                waiting.sort_unstable();
                for (_, pair) in &waiting[..over] {
                    self.seen.remove(pair);
                }
            }
        }
        self.seen.entry(pair).or_default()
    }

    /// A shortcut could not be made: memory or descriptors are missing.
    pub fn failed(&mut self, id: ShortcutId, now: u64) {
        self.again_at = now.saturating_add(AGAIN);
        self.remove(id);
    }

    /// A shortcut was not made, because of the ports that it is for.
    pub fn refused(&mut self, id: ShortcutId, now: u64) {
        let Some(shortcut) = self.remove(id) else {
            return;
        };
        // One that has left has nothing to wait for. Of others it may be forgotten
        // by now that they were seen.
        if shortcut
            .ends
            .iter()
            .all(|end| self.ports.contains_key(&end.port))
        {
            let seen = self.seen_of(shortcut.pair(), now);
            seen.again_at = now.saturating_add(REFUSED);
        }
    }

    fn remove(&mut self, id: ShortcutId) -> Option<Shortcut> {
        let shortcut = self.shortcuts.remove(&id)?;
        for kind in kinds(&shortcut.ends) {
            if let Some(count) = self.of_users.get_mut(&kind) {
                *count -= 1;
                if *count == 0 {
                    self.of_users.remove(&kind);
                }
            }
        }
        for end in &shortcut.ends {
            if let Some(ids) = self.of.get_mut(&end.port) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.of.remove(&end.port);
                }
            }
        }
        Some(shortcut)
    }

    /// The grant of a shortcut could not be sent to a port, for now. The other
    /// may have its own.
    pub fn not_granted(&mut self, id: ShortcutId, port: PortId, now: u64) {
        self.again_at = now.saturating_add(AGAIN);
        self.leave(id, port, now);
    }

    /// A message came from a port; `device` if it is one.
    pub fn message(&mut self, port: PortId, source: Mac, message: Message, device: bool, now: u64) {
        match message {
            Message::Hello { .. } if device && !source.is_group() => {
                // A port says once what it is.
                self.ports.entry(port).or_insert(source);
            }
            Message::Ready(id) => {
                let Some(shortcut) = self.shortcuts.get_mut(&id) else {
                    return;
                };
                let Some(end) = shortcut.end(port).filter(|end| !end.ready) else {
                    return;
                };
                end.ready = true;
                // Also on its way out: the frames in the ring come before
                // those that follow in the stream.
                for end in &shortcut.ends {
                    if end.port != port && !end.gone {
                        self.actions.push(Action::Tell(end.port, Message::Open(id)));
                    }
                }
            }
            Message::Released(id) => {
                let Some(shortcut) = self.shortcuts.get_mut(&id) else {
                    return;
                };
                let phase = shortcut.phase;
                let Some(end) = shortcut.end(port) else {
                    return;
                };
                match phase {
                    Phase::InUse => {
                        // Something is wrong with it.
                        end.done = true;
                        if let Some(shortcut) = self.shortcuts.remove(&id) {
                            self.bar(&shortcut);
                            self.shortcuts.insert(id, shortcut);
                        }
                        self.end(id, now);
                    }
                    Phase::Revoking => {
                        end.done = true;
                        self.advance(id, now);
                    }
                    Phase::Closing => {}
                }
            }
            Message::Closed(id) => {
                let closing = self
                    .shortcuts
                    .get_mut(&id)
                    .filter(|shortcut| shortcut.phase == Phase::Closing);
                if let Some(end) = closing.and_then(|shortcut| shortcut.end(port)) {
                    end.done = true;
                    self.advance(id, now);
                }
            }
            // Nothing that a port may say.
            _ => {}
        }
    }

    /// A port is gone.
    pub fn detach(&mut self, port: PortId, now: u64) {
        self.ports.remove(&port);
        self.users.remove(&port);
        self.seen.retain(|(a, b), _| *a != port && *b != port);
        self.barred.retain(|(a, b)| *a != port && *b != port);
        let ids: Vec<ShortcutId> = self.of.get(&port).into_iter().flatten().copied().collect();
        for id in ids {
            self.leave(id, port, now);
        }
        self.ended.remove(&port);
    }

    /// A port has no part in a shortcut any more.
    fn leave(&mut self, id: ShortcutId, port: PortId, now: u64) {
        let Some(shortcut) = self.shortcuts.get_mut(&id) else {
            return;
        };
        let Some(end) = shortcut.end(port) else {
            return;
        };
        end.gone = true;
        end.done = true;
        match shortcut.phase {
            Phase::InUse => self.end(id, now),
            Phase::Revoking | Phase::Closing => self.advance(id, now),
        }
    }

    /// Takes back the shortcuts of addresses that are not where they were;
    /// `behind` tells where an address is now.
    pub fn moved(&mut self, behind: impl Fn(&Mac) -> Option<PortId>, now: u64) {
        let stale: Vec<ShortcutId> = self
            .shortcuts
            .iter()
            .filter(|(_, shortcut)| {
                let ends = shortcut.ends.iter();
                ends.clone().any(|end| behind(&end.mac) != Some(end.port))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in stale {
            self.end(id, now);
        }
    }

    /// All that was asked of ports is written, as far as they take it, and the
    /// time of those begins who have it. What the switch did before it wrote is
    /// not their delay, nor is what it has to write to them before.
    ///
    /// `waiting` tells of a request to a port about a shortcut that is not
    /// written how much of the port's stream is; `None` if it is written.
    pub fn told(&mut self, now: u64, waiting: impl Fn(PortId, ShortcutId) -> Option<u64>) {
        let shortcuts = &mut self.shortcuts;
        self.asked.retain(|id| {
            let Some(shortcut) = shortcuts.get_mut(id) else {
                return false;
            };
            let mut again = false;
            for end in &mut shortcut.ends {
                if end.done || end.told {
                    continue;
                }
                let Some(position) = waiting(end.port, *id) else {
                    end.told = true;
                    end.deadline = now.saturating_add(PATIENCE);
                    continue;
                };
                again = true;
                let moved = |last: u64| position >= last.saturating_add(STEP);
                if end.position.is_none_or(moved) {
                    end.position = Some(position);
                    end.deadline = now.saturating_add(STALLED);
                }
            }
            again
        });
    }

    /// Ports that had not answered long before the time `now`. The answer of one
    /// from which not all was read has to be looked for: it came in time, perhaps,
    /// and it is the switch that did not get to it.
    pub fn late(&self, now: u64) -> BTreeSet<PortId> {
        let ends = self.shortcuts.values().flat_map(|shortcut| &shortcut.ends);
        ends.filter(|end| !end.done && end.told && end.deadline.saturating_add(READING) <= now)
            .map(|end| end.port)
            .collect()
    }

    /// Gives up ports that had not answered by the time `now`. All that had
    /// arrived by then must have been read, but from ports of which `unread`
    /// says that there is more: the answer may be in that.
    pub fn poll(&mut self, now: u64, unread: impl Fn(PortId) -> bool) {
        let ends = self.shortcuts.values().flat_map(|shortcut| &shortcut.ends);
        for end in ends.filter(|end| !end.done && end.deadline <= now) {
            if !(end.told && unread(end.port)) {
                self.actions.push(Action::CutOff(end.port));
            }
        }
    }

    /// When [`Broker::poll`] has something to do next.
    pub fn next_timeout(&self) -> Option<u64> {
        self.shortcuts
            .values()
            .flat_map(|shortcut| &shortcut.ends)
            .filter(|end| !end.done && end.deadline != u64::MAX)
            .map(|end| end.deadline)
            .min()
    }

    fn bar(&mut self, shortcut: &Shortcut) {
        self.barred.insert(shortcut.pair());
    }

    /// Takes back a shortcut because of one of its ends.
    fn end(&mut self, id: ShortcutId, now: u64) {
        let in_use = |shortcut: &&Shortcut| shortcut.phase == Phase::InUse;
        let Some(shortcut) = self.shortcuts.get(&id).filter(in_use) else {
            return;
        };
        let [a, b] = shortcut.ends;
        for (end, other) in [(a, b), (b, a)] {
            if !end.gone && self.is_stranger(end.user, other.user) {
                let ended = self.ended.entry(end.port).or_default();
                ended.count(other.user, now);
            }
        }
        self.revoke(id, now);
    }

    fn revoke(&mut self, id: ShortcutId, now: u64) {
        let Some(shortcut) = self.shortcuts.get_mut(&id) else {
            return;
        };
        if shortcut.phase != Phase::InUse {
            return;
        }
        shortcut.phase = Phase::Revoking;
        self.asked.push(id);
        for end in shortcut.ends.iter_mut().filter(|end| !end.gone) {
            end.ask(now);
            self.actions
                .push(Action::Tell(end.port, Message::Revoke(id)));
        }
        self.advance(id, now);
    }

    /// Goes to the next phase if both ends are done with this one.
    fn advance(&mut self, id: ShortcutId, now: u64) {
        let Some(shortcut) = self.shortcuts.get_mut(&id) else {
            return;
        };
        while shortcut.ends.iter().all(|end| end.done) {
            match shortcut.phase {
                Phase::InUse => return,
                Phase::Revoking => {
                    shortcut.phase = Phase::Closing;
                    self.asked.push(id);
                    for end in &mut shortcut.ends {
                        end.done = end.gone;
                        if !end.gone {
                            end.ask(now);
                            self.actions
                                .push(Action::Tell(end.port, Message::Close(id)));
                        }
                    }
                }
                Phase::Closing => {
                    self.remove(id);
                    self.actions.push(Action::Forget(id));
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Message = Message::Hello { any_source: false };

    fn mac(number: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0xfe, 0, number])
    }

    /// Where the addresses are, in most of these tests.
    fn behind(mac: &Mac) -> Option<PortId> {
        Some(mac.0[5].into())
    }

    /// Ports 1 and 2 that can use shortcuts.
    fn broker() -> Broker {
        let mut broker = Broker::default();
        broker.allow(true, 0);
        for port in [1u8, 2] {
            broker.message(port.into(), mac(port), HELLO, true, 0);
        }
        broker
    }

    fn granted() -> Broker {
        let mut broker = broker();
        for _ in 0..THRESHOLD {
            assert!(broker.actions().is_empty());
            broker.seen(1, 2, mac(2), behind, 0);
        }
        assert_eq!(broker.actions(), [Action::Grant(0)]);
        assert_eq!(broker.ends(0), Some([(1, mac(1)), (2, mac(2))]));
        broker
    }

    fn say(broker: &mut Broker, port: PortId, message: Message) -> Vec<Action> {
        broker.message(port, mac(port as u8), message, false, 0);
        broker.actions()
    }

    fn many(broker: &mut Broker) -> Vec<Action> {
        for _ in 0..10 * THRESHOLD {
            broker.seen(1, 2, mac(2), behind, 0);
            broker.seen(2, 1, mac(1), behind, 0);
        }
        broker.actions()
    }

    #[test]
    fn messages_survive_the_wire_and_nonsense_does_not() {
        for message in [
            HELLO,
            Message::Hello { any_source: true },
            Message::Grant {
                shortcut: 0x0102_0304,
                side: 1,
                peer: mac(9),
            },
            Message::Ready(1),
            Message::Open(2),
            Message::Revoke(3),
            Message::Released(4),
            Message::Close(5),
            Message::Closed(u32::MAX),
            Message::Address { any_source: false },
            Message::Address { any_source: true },
        ] {
            let frame = message.to_frame(mac(7));
            assert!(is_message(&frame));
            assert_eq!(Message::parse(&frame), Some((mac(7), message)));
            for length in 0..32 {
                let _ = Message::parse(&frame[..length]);
            }
        }
        let mut frame = HELLO.to_frame(mac(1));
        frame[19] = 9;
        assert_eq!(Message::parse(&frame), None);
        frame[5] = 0;
        assert!(!is_message(&frame));
        assert!(!is_message(&frame[..10]));
    }

    #[test]
    fn two_capable_ports_get_one_shortcut_and_open_it_in_order() {
        let mut broker = granted();
        assert_eq!(many(&mut broker), []);
        assert_eq!(
            say(&mut broker, 1, Message::Ready(0)),
            [Action::Tell(2, Message::Open(0))]
        );
        assert_eq!(say(&mut broker, 1, Message::Ready(0)), []);
        assert_eq!(
            say(&mut broker, 2, Message::Ready(0)),
            [Action::Tell(1, Message::Open(0))]
        );
        assert_eq!(say(&mut broker, 3, Message::Ready(0)), []);
    }

    #[test]
    fn nobody_else_gets_one() {
        let mut broker = broker();
        // A guest cannot begin its stream as a device does.
        broker.message(3, mac(3), HELLO, false, 0);
        for _ in 0..10 * THRESHOLD {
            broker.seen(1, 3, mac(3), behind, 0);
            broker.seen(3, 1, mac(1), behind, 0);
            // An address behind a device that is not its own.
            broker.seen(1, 2, mac(7), behind, 0);
            broker.seen(1, 1, mac(1), behind, 0);
        }
        assert_eq!(broker.actions(), []);
        broker.allow(false, 0);
        assert_eq!(many(&mut broker), []);
        assert!(broker.settled());
    }

    #[test]
    fn who_says_that_it_has_anothers_address_gets_no_frames_for_it() {
        let mut broker = broker();
        // Port 3 calls itself by the address of port 2.
        broker.message(3, mac(2), HELLO, true, 0);
        for _ in 0..10 * THRESHOLD {
            broker.seen(3, 1, mac(1), behind, 0);
        }
        assert_eq!(broker.actions(), []);
    }

    #[test]
    fn a_revoked_shortcut_is_gone_when_both_have_said_so_twice() {
        let mut broker = granted();
        broker.allow(false, 0);
        assert!(!broker.settled());
        let tell = |port, message| Action::Tell(port, message);
        assert_eq!(
            broker.actions(),
            [tell(1, Message::Revoke(0)), tell(2, Message::Revoke(0))]
        );
        // What is in the ring already is read all the same.
        assert_eq!(
            say(&mut broker, 1, Message::Ready(0)),
            [tell(2, Message::Open(0))]
        );
        assert_eq!(say(&mut broker, 1, Message::Closed(0)), []);
        assert_eq!(say(&mut broker, 1, Message::Released(0)), []);
        assert_eq!(say(&mut broker, 1, Message::Released(0)), []);
        assert_eq!(
            say(&mut broker, 2, Message::Released(0)),
            [tell(1, Message::Close(0)), tell(2, Message::Close(0))]
        );
        assert_eq!(say(&mut broker, 2, Message::Closed(0)), []);
        assert!(!broker.settled());
        assert_eq!(say(&mut broker, 1, Message::Closed(0)), [Action::Forget(0)]);
        assert!(broker.settled());
        broker.allow(true, 0);
        assert_eq!(many(&mut broker), [Action::Grant(1)]);
    }

    #[test]
    fn a_port_that_does_not_answer_is_cut_off_and_stops_nobody() {
        let mut broker = granted();
        broker.allow(false, 5);
        broker.actions();
        broker.told(5, |_, _| None);
        say(&mut broker, 1, Message::Released(0));
        let due = broker.next_timeout().unwrap();
        assert_eq!(due, 5 + PATIENCE);
        broker.poll(due - 1, |_| false);
        assert_eq!(broker.actions(), []);
        broker.poll(due, |_| false);
        assert_eq!(broker.actions(), [Action::CutOff(2)]);
        broker.detach(2, due);
        assert_eq!(broker.actions(), [Action::Tell(1, Message::Close(0))]);
        assert_eq!(say(&mut broker, 1, Message::Closed(0)), [Action::Forget(0)]);
        assert!(broker.settled());
    }

    #[test]
    fn a_port_has_its_time_from_when_it_was_told() {
        let mut broker = granted();
        broker.allow(false, 0);
        broker.actions();
        // The switch was busy for longer than anybody may take to answer.
        let told = 5 * PATIENCE;
        broker.told(told, |_, _| None);
        broker.poll(told + PATIENCE - 1, |_| false);
        assert_eq!(broker.actions(), []);
        say(&mut broker, 1, Message::Released(0));
        say(&mut broker, 2, Message::Released(0));
        // It asks for more only once.
        let closing = told + PATIENCE - 1;
        broker.told(closing, |_, _| None);
        broker.told(closing + PATIENCE, |_, _| None);
        broker.poll(closing + PATIENCE, |_| false);
        assert_eq!(broker.actions(), [Action::CutOff(1), Action::CutOff(2)]);
    }

    #[test]
    fn a_port_has_its_time_from_when_the_request_was_written_to_it() {
        let mut broker = granted();
        broker.allow(false, 0);
        broker.actions();
        // Much waits for port 2, which reads it.
        let mut now = 0;
        for step in 0..20 {
            broker.told(now, |port, _| (port == 2).then_some(step * STEP));
            broker.poll(now, |_| false);
            let cut_off: &[Action] = match now {
                PATIENCE.. => &[Action::CutOff(1)],
                _ => &[],
            };
            assert_eq!(broker.actions(), cut_off, "at {now}");
            now += STALLED / 2;
        }
        broker.detach(1, now);
        broker.told(now, |_, _| None);
        broker.poll(now + PATIENCE - 1, |_| false);
        assert_eq!(broker.actions(), []);
        broker.poll(now + PATIENCE, |_| false);
        assert_eq!(broker.actions(), [Action::CutOff(2)]);
        // Who reads nothing, or next to nothing, has no more than that.
        let mut broker = granted();
        broker.allow(false, 0);
        broker.actions();
        for now in 0..10 {
            broker.told(now, |_, _| Some(now * STEP / 10));
        }
        broker.poll(STALLED - 1, |_| true);
        assert_eq!(broker.actions(), []);
        broker.poll(STALLED, |_| true);
        assert_eq!(broker.actions(), [Action::CutOff(1), Action::CutOff(2)]);
    }

    #[test]
    fn an_answer_that_the_switch_has_not_read_yet_is_in_time() {
        let mut broker = granted();
        broker.allow(false, 0);
        broker.told(0, |_, _| None);
        broker.actions();
        broker.poll(PATIENCE, |port| port == 2);
        assert_eq!(broker.actions(), [Action::CutOff(1)]);
        broker.detach(1, PATIENCE);
        assert_eq!(say(&mut broker, 2, Message::Released(0)).len(), 1);
        // But it is looked for after some time.
        broker.told(PATIENCE, |_, _| None);
        assert!(broker.late(2 * PATIENCE + READING - 1).is_empty());
        let late = 2 * PATIENCE + READING;
        assert_eq!(broker.late(late), [2].into());
        broker.poll(late, |_| true);
        assert_eq!(broker.actions(), []);
        broker.poll(late, |_| false);
        assert_eq!(broker.actions(), [Action::CutOff(2)]);
    }

    #[test]
    fn the_peer_of_a_port_that_left_gets_its_frames_back() {
        let mut broker = granted();
        broker.detach(1, 0);
        assert_eq!(broker.actions(), [Action::Tell(2, Message::Revoke(0))]);
        assert_eq!(
            say(&mut broker, 2, Message::Released(0)),
            [Action::Tell(2, Message::Close(0))]
        );
        // It leaves as well.
        broker.detach(2, 0);
        assert_eq!(broker.actions(), [Action::Forget(0)]);
    }

    #[test]
    fn who_cannot_use_a_shortcut_is_not_offered_another() {
        let mut broker = granted();
        assert_eq!(
            say(&mut broker, 2, Message::Released(0)),
            [
                Action::Tell(1, Message::Revoke(0)),
                Action::Tell(2, Message::Revoke(0))
            ]
        );
        assert_eq!(say(&mut broker, 1, Message::Released(0)).len(), 2);
        say(&mut broker, 1, Message::Closed(0));
        assert_eq!(say(&mut broker, 2, Message::Closed(0)), [Action::Forget(0)]);
        assert_eq!(many(&mut broker), []);
        // One that comes anew is somebody else.
        broker.detach(2, 0);
        broker.message(3, mac(2), HELLO, true, 0);
        for _ in 0..THRESHOLD {
            broker.seen(
                1,
                3,
                mac(2),
                |mac| Some(if mac.0[5] == 2 { 3 } else { 1 }),
                0,
            );
        }
        assert_eq!(broker.actions(), [Action::Grant(1)]);
    }

    #[test]
    fn what_could_not_be_granted_is_tried_again_later() {
        let again = |broker: &mut Broker, now| {
            for _ in 0..THRESHOLD {
                broker.seen(1, 2, mac(2), behind, now);
            }
            broker.actions()
        };
        // There was no memory for it.
        let mut broker = granted();
        broker.failed(0, 5);
        assert_eq!(again(&mut broker, 5 + AGAIN - 1), []);
        // Nor is there any for others.
        broker.message(3, mac(3), HELLO, true, 0);
        for _ in 0..THRESHOLD {
            broker.seen(1, 3, mac(3), behind, 5 + AGAIN - 1);
        }
        assert_eq!(broker.actions(), []);
        assert_eq!(again(&mut broker, 5 + AGAIN), [Action::Grant(1)]);
        // One has its grant, and the other did not get it.
        assert_eq!(
            say(&mut broker, 1, Message::Ready(1)),
            [Action::Tell(2, Message::Open(1))]
        );
        broker.not_granted(1, 2, 7);
        assert_eq!(broker.actions(), [Action::Tell(1, Message::Revoke(1))]);
        assert_eq!(
            say(&mut broker, 1, Message::Released(1)),
            [Action::Tell(1, Message::Close(1))]
        );
        assert_eq!(say(&mut broker, 1, Message::Closed(1)), [Action::Forget(1)]);
        assert_eq!(again(&mut broker, 7 + AGAIN - 1), []);
        assert_eq!(again(&mut broker, 7 + AGAIN), [Action::Grant(2)]);
    }

    #[test]
    fn who_is_refused_a_shortcut_does_not_try_with_every_frame() {
        let again = |broker: &mut Broker, to: u8, now| {
            for _ in 0..10 * THRESHOLD {
                broker.seen(1, to.into(), mac(to), behind, now);
            }
            broker.actions()
        };
        let mut broker = granted();
        broker.refused(0, 5);
        assert_eq!(again(&mut broker, 2, 5 + REFUSED - 1), []);
        // It is no matter to others.
        broker.message(3, mac(3), HELLO, true, 0);
        assert_eq!(again(&mut broker, 3, 5), [Action::Grant(1)]);
        assert_eq!(again(&mut broker, 2, 5 + REFUSED), [Action::Grant(2)]);
    }

    /// Pairs of more ports, more than are remembered.
    fn many_pairs(broker: &mut Broker) -> impl Iterator<Item = (u8, u8)> {
        let ports = 3..=100u8;
        for port in ports.clone() {
            broker.message(port.into(), mac(port), HELLO, true, 0);
        }
        let pairs = ports.flat_map(|a| (a + 1..=100).map(move |b| (a, b)));
        assert!(pairs.clone().count() > MAX_PAIRS);
        pairs
    }

    #[test]
    fn who_is_refused_a_shortcut_waits_whoever_else_sends() {
        let tries = |broker: &mut Broker, now| {
            for _ in 0..10 * THRESHOLD {
                broker.seen(1, 2, mac(2), behind, now);
            }
            broker.actions()
        };
        // Others send before it is refused, or after.
        for before in [true, false] {
            let mut broker = granted();
            let pairs = many_pairs(&mut broker);
            if !before {
                broker.refused(0, 5);
            }
            for (a, b) in pairs {
                broker.seen(a.into(), b.into(), mac(b), behind, 5);
                assert!(broker.seen.len() <= MAX_PAIRS);
            }
            if before {
                broker.refused(0, 5);
            }
            assert_eq!(broker.actions(), []);
            assert_eq!(tries(&mut broker, 5 + REFUSED - 1), []);
            assert_eq!(tries(&mut broker, 5 + REFUSED), [Action::Grant(1)]);
        }
    }

    #[test]
    fn of_many_who_were_refused_a_shortcut_the_last_wait() {
        let mut broker = broker();
        let pairs: Vec<(u8, u8)> = many_pairs(&mut broker).collect();
        let tries = |broker: &mut Broker, (a, b): (u8, u8), now| {
            for _ in 0..THRESHOLD {
                broker.seen(a.into(), b.into(), mac(b), behind, now);
            }
            broker.actions()
        };
        for (pair, now) in pairs.iter().zip(0..) {
            let [Action::Grant(id)] = tries(&mut broker, *pair, now)[..] else {
                panic!("no shortcut");
            };
            broker.refused(id, now);
            assert!(broker.seen.len() <= MAX_PAIRS);
        }
        let now = pairs.len() as u64;
        assert!(now < REFUSED);
        for pair in &pairs[pairs.len() - MAX_PAIRS / 2..] {
            assert_eq!(tries(&mut broker, *pair, now), []);
        }
        // One that leaves before it is refused has nothing to wait for.
        let [Action::Grant(id)] = tries(&mut broker, (1, 2), now)[..] else {
            panic!("no shortcut");
        };
        broker.detach(2, now);
        broker.refused(id, now);
        assert!(!broker.seen.contains_key(&(1, 2)));
    }

    #[test]
    fn who_does_not_answer_its_grants_gets_no_more() {
        let mut broker = broker();
        for port in 3..=20u8 {
            broker.message(port.into(), mac(port), HELLO, true, 0);
        }
        // Port 2 answers nothing, the others at once.
        let mut granted = 0;
        for port in (1..=20u8).filter(|port| *port != 2) {
            for _ in 0..THRESHOLD {
                broker.seen(port.into(), 2, mac(2), behind, 0);
            }
            for action in broker.actions() {
                let Action::Grant(id) = action else {
                    panic!("{action:?}")
                };
                granted += 1;
                say(&mut broker, port.into(), Message::Ready(id));
            }
        }
        assert_eq!(granted, MAX_UNANSWERED);
        assert_eq!(say(&mut broker, 2, Message::Ready(0)).len(), 1);
        for _ in 0..THRESHOLD {
            broker.seen(20, 2, mac(2), behind, 0);
        }
        assert_eq!(broker.actions().len(), 1);
    }

    /// A port of this user comes and sends to port 1. Returns how many shortcuts
    /// were made, which both ends take.
    fn attach_and_send(broker: &mut Broker, port: u8, user: Option<u32>) -> usize {
        broker.attach(port.into(), user);
        broker.message(port.into(), mac(port), HELLO, true, 0);
        for _ in 0..THRESHOLD {
            broker.seen(port.into(), 1, mac(1), behind, 0);
        }
        let actions = broker.actions();
        for action in &actions {
            let Action::Grant(id) = *action else {
                panic!("{action:?}")
            };
            say(broker, port.into(), Message::Ready(id));
            say(broker, 1, Message::Ready(id));
        }
        actions.len()
    }

    #[test]
    fn one_user_leaves_shortcuts_for_others() {
        let mut broker = Broker::default();
        broker.allow(true, 0);
        let mut granted = |port, user| attach_and_send(&mut broker, port, Some(user));
        assert_eq!(granted(1, 1000), 0);
        let of_one: usize = (100..200).map(|port| granted(port, 1001)).sum();
        assert_eq!(of_one, MAX_PER_USER);
        assert_eq!(granted(2, 1002), 1);
        // Those of its own user may have all.
        let own: usize = (3..90).map(|port| granted(port, 1000)).sum();
        assert_eq!(own, MAX_SHORTCUTS - MAX_PER_USER - 1);
    }

    /// A port of this user comes, sends to port 1, and has left again when the
    /// shortcut is gone. Returns whether there was one.
    fn cycle(broker: &mut Broker, port: PortId, user: u32, now: u64) -> bool {
        broker.attach(port, Some(user));
        broker.message(port, mac(2), HELLO, true, now);
        let behind = |address: &Mac| Some(if *address == mac(2) { port } else { 1 });
        for _ in 0..THRESHOLD {
            broker.seen(port, 1, mac(1), behind, now);
        }
        let actions = broker.actions();
        broker.detach(port, now);
        if let [Action::Grant(id)] = actions[..] {
            for answer in [Message::Released(id), Message::Closed(id)] {
                broker.message(1, mac(1), answer, true, now);
            }
        }
        broker.actions();
        assert!(broker.shortcuts.is_empty());
        !actions.is_empty()
    }

    #[test]
    fn who_ends_its_shortcuts_again_and_again_has_few() {
        let mut broker = Broker::default();
        broker.allow(true, 0);
        broker.limit(0, 1000);
        broker.attach(1, Some(1000));
        broker.message(1, mac(1), HELLO, true, 0);
        let mut ports = 2..;
        let mut cycles = |user, now| {
            let ports = ports.by_ref().take(100);
            ports
                .filter(|port| cycle(&mut broker, *port, user, now))
                .count()
        };
        assert_eq!(cycles(1001, 0), MAX_PER_USER);
        assert_eq!(cycles(1001, RENEWAL_PER_USER - 1), 0);
        for second in 1..10 {
            assert_eq!(cycles(1001, second * RENEWAL_PER_USER), 1);
        }
        // Nobody has more by many numbers.
        let now = 10 * RENEWAL_PER_USER;
        let many: usize = (2000..2010).map(|user| cycles(user, now)).sum();
        assert_eq!(many, MAX_ACROSS);
        assert_eq!(cycles(1002, now + RENEWAL_ACROSS), 1);
        // It is no matter to the port's own user, nor to who runs the switch.
        assert_eq!(cycles(1000, now), 100);
        assert_eq!(cycles(0, now), 100);
        let later = now + 1000 * RENEWAL_PER_USER;
        assert_eq!(cycles(1003, later), MAX_PER_USER);
        assert_eq!(broker.ended[&1].to_users.len(), 1);
        broker.detach(1, later);
        assert!(broker.ended.is_empty());
    }

    #[test]
    fn what_the_switch_takes_back_is_nobodys_doing() {
        let mut broker = Broker::default();
        broker.limit(0, 1000);
        for (port, user) in [(1u8, 1000), (2, 1001)] {
            broker.attach(port.into(), Some(user));
            broker.message(port.into(), mac(port), HELLO, true, 0);
        }
        for _ in 0..10 * MAX_PER_USER {
            broker.allow(true, 0);
            let [Action::Grant(id)] = many(&mut broker)[..] else {
                panic!("no shortcut");
            };
            broker.allow(false, 0);
            for answer in [Message::Released(id), Message::Closed(id)] {
                say(&mut broker, 1, answer);
                say(&mut broker, 2, answer);
            }
            assert!(broker.settled());
        }
    }

    #[test]
    fn many_users_leave_shortcuts_for_a_ports_own_and_the_owner() {
        let mut broker = Broker::default();
        broker.allow(true, 0);
        broker.limit(0, 1000);
        let mut granted = |port, user| attach_and_send(&mut broker, port, user);
        assert_eq!(granted(1, Some(1000)), 0);
        let others: usize = (100..200)
            .map(|port| granted(port, Some(2000 + u32::from(port))))
            .sum();
        assert_eq!(others, MAX_ACROSS);
        assert_eq!(granted(2, None), 0, "one of whom nobody knows whose it is");
        let owner: usize = (3..11).map(|port| granted(port, Some(0))).sum();
        assert_eq!(owner, 8);
        let own: usize = (11..50).map(|port| granted(port, Some(1000))).sum();
        assert_eq!(own, MAX_SHORTCUTS - MAX_ACROSS - 8);
    }

    #[test]
    fn those_of_whom_nobody_knows_whose_they_are_are_not_one() {
        let mut broker = broker();
        let mut granted = 0;
        for port in 3..=100u8 {
            broker.message(port.into(), mac(port), HELLO, true, 0);
            for _ in 0..THRESHOLD {
                broker.seen(port.into(), 1, mac(1), behind, 0);
            }
            for action in broker.actions() {
                let Action::Grant(id) = action else {
                    panic!("{action:?}")
                };
                granted += 1;
                say(&mut broker, port.into(), Message::Ready(id));
                say(&mut broker, 1, Message::Ready(id));
            }
        }
        assert_eq!(granted, MAX_PER_USER);
    }

    #[test]
    fn one_user_leaves_descriptors_for_others() {
        let mut broker = Broker::default();
        broker.allow(true, 0);
        broker.limit(0, 4);
        for (port, user) in (1..=60u8).zip([1000, 1001, 0].iter().cycle()) {
            broker.attach(port.into(), Some(*user));
            broker.message(port.into(), mac(port), HELLO, true, 0);
        }
        let mut granted = |from: u8, to: u8| {
            for _ in 0..THRESHOLD {
                broker.seen(from.into(), to.into(), mac(to), behind, 0);
            }
            broker.actions().len()
        };
        // Among ports of one user, of which each is an end twice; then to another's.
        let own: usize = (4..=58)
            .step_by(6)
            .map(|port| granted(port, port - 3))
            .sum();
        assert_eq!(own, 2);
        let across: usize = (4..=58)
            .step_by(6)
            .map(|port| granted(port, port + 1))
            .sum();
        assert_eq!(across, 4);
        assert_eq!(granted(5, 8), 1, "the other has what it needs for itself");
        // Who runs the switch has no such limit.
        let owner: usize = (6..=60)
            .step_by(6)
            .map(|port| granted(port, port - 3))
            .sum();
        assert_eq!(owner, 10);
        for port in 1..=60 {
            broker.detach(port, 0);
        }
        assert!(broker.of_users.is_empty());
    }

    #[test]
    fn numbers_start_over_beside_those_in_use() {
        let mut broker = granted();
        broker.next = ShortcutId::MAX;
        for (port, id) in [(3u8, ShortcutId::MAX), (4, 1)] {
            broker.message(port.into(), mac(port), HELLO, true, 0);
            for _ in 0..THRESHOLD {
                broker.seen(port.into(), 1, mac(1), behind, 0);
            }
            assert_eq!(broker.actions(), [Action::Grant(id)]);
        }
        assert_eq!(broker.ends(0), Some([(1, mac(1)), (2, mac(2))]));
        for port in 1..=4 {
            broker.detach(port, 0);
        }
        assert!(broker.shortcuts.is_empty() && broker.of.is_empty());
    }

    #[test]
    fn an_address_that_moves_takes_its_shortcut_away() {
        let mut broker = granted();
        broker.moved(|address| Some(address.0[5].into()), 0);
        assert_eq!(broker.actions(), []);
        broker.moved(|_| Some(1), 0);
        assert_eq!(broker.actions().len(), 2);
    }
}
