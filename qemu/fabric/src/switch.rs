// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The learning switch.
//!
//! A port of a device says which address it has ([`Switch::claim`]), and that
//! address is then the device's as long as the port is there: nobody else's
//! frames may come from it, and the device's from no other. So no guest can
//! take another's address, and with it another's frames. A device that was told
//! to can leave this (`any_source`): frames of bridges and virtual interfaces
//! in its guest come from other addresses, and those are learned as they are
//! behind a plain port, if they are no device's. Its own address is then learned
//! too: an interface that takes over for another sends from it elsewhere.

use crate::fault::{FaultCounters, Faults, Line, LINE_LIMIT};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::str::FromStr;

/// Addresses remembered at most; beyond that frames are flooded.
const TABLE_LIMIT: usize = 4096;
/// Addresses learned behind one port at most, so that none uses up the table.
const PORT_LIMIT: usize = 256;
/// Addresses learned behind each port, though others have filled the table.
const PORT_MINIMUM: usize = 4;
/// Addresses that one port says it has at most: an adapter has no more functions.
pub const PORT_CLAIMS: usize = 16;
/// How long the address of a device that has left is kept for its user, in
/// nanoseconds: whoever can have it cut off does not get its frames.
const KEPT: u64 = 5_000_000_000;
/// How long it is kept at most, though its user waits in line all that time.
const KEPT_LONGEST: u64 = 60_000_000_000;
/// Addresses that are kept for one user at most.
const KEPT_LIMIT: usize = 256;
/// Addresses that are kept in all, for each port that there may be. A user of whom
/// some are kept has a port or a place: there are no more users than ports, and of
/// too many addresses one user has more than this.
const KEPT_PER_PORT: usize = 4;

/// Bytes that may wait for a port although all ports together have too many.
pub const PORT_SHARE: usize = 256 * 1024;

/// Bytes that may wait for one port, of a memory of which so much is used: half
/// of what is left, as in switches whose ports share memory. So many slow ports
/// have little each, and leave something for others.
pub fn share(memory: usize, used: usize) -> usize {
    (memory.saturating_sub(used) / 2).max(PORT_SHARE)
}

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Whether it is the address of a group.
    pub fn is_group(&self) -> bool {
        self.0[0] & 1 == 1
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}' is not an Ethernet address such as 52:54:00:fe:00:01");
        let mut bytes = [0u8; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or_else(bad)?;
            if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(bad());
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
        }
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self(bytes))
    }
}

/// A port's number: the order in which it came.
pub type PortId = u64;

/// One side of a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Side {
    /// A port by its number.
    Port(PortId),
    /// The port behind which this address was seen last.
    Mac(String),
}

/// What passed through one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PortCounters {
    /// Frames that came in from the port.
    pub rx_frames: u64,
    /// Bytes that came in from the port.
    pub rx_bytes: u64,
    /// Frames that left by the port.
    pub tx_frames: u64,
    /// Bytes that left by the port.
    pub tx_bytes: u64,
    /// Frames lost because the port was too slow to take them.
    pub queue_drops: u64,
    /// Frames that a partition kept from leaving by the port.
    pub partition_drops: u64,
    /// Frames that came in from an address that is not the port's.
    pub source_drops: u64,
}

/// What the device behind a port says of itself.
#[derive(Debug, Clone, Copy)]
struct Claim {
    address: Mac,
    any_source: bool,
}

struct Port {
    line: Line,
    counters: PortCounters,
    claims: Vec<Claim>,
    /// Whose it is, where that is known.
    user: Option<u32>,
    /// Addresses learned behind it, its own not counted.
    learned: usize,
}

/// Where frames go that leave the switch.
pub trait Output {
    /// A frame leaves by `port`; `false` if the port could not take it.
    fn send(&mut self, port: PortId, frame: &[u8]) -> bool;
    /// A frame has passed the faults and is about to be forwarded.
    fn capture(&mut self, frame: &[u8]);
    /// What all that was forwarded has cost so far.
    fn work(&self) -> u64 {
        0
    }
    /// How much of that is forwarded for each of so many before the next turn.
    fn share(&self, _turns: usize) -> u64 {
        u64::MAX
    }
    /// How much is for all together, but for who runs the switch. The last of them
    /// may have gone beyond it.
    fn most(&self) -> u64 {
        u64::MAX
    }
}

/// Who has a turn: a user, or a port of who runs the switch.
type Turn = (Option<u32>, Option<PortId>);

/// What was done for somebody beyond its turn: one frame may be copied to all
/// ports, whatever is left of the turn. It is taken off the turns that follow.
#[derive(Debug)]
pub struct Debts<K>(BTreeMap<K, u64>);

impl<K: Ord> Default for Debts<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Debts<K> {
    /// What is left for somebody of a turn with so much.
    pub fn left(&self, who: &K, share: u64) -> u64 {
        share.saturating_sub(self.0.get(who).copied().unwrap_or(0))
    }

    /// A turn of so much passes for all, also for those who have nothing to do in it.
    pub fn pass(&mut self, share: u64) {
        self.0.retain(|_, debt| {
            *debt = debt.saturating_sub(share);
            *debt > 0
        });
    }

    /// So much was done beyond what was left.
    pub fn add(&mut self, who: K, work: u64) {
        if work > 0 {
            let debt = self.0.entry(who).or_default();
            *debt = debt.saturating_add(work);
        }
    }
}

/// An address whose device has left.
struct Kept {
    user: u32,
    until: u64,
    /// It is not kept longer than this.
    latest: u64,
}

/// What is kept for a user who is to come back.
#[derive(Debug, Clone, Copy, Default)]
struct Return {
    addresses: usize,
    /// Ports that it had, no more than there are addresses to come back for.
    places: usize,
}

/// A learning switch without sockets or a clock.
pub struct Switch {
    seed: u64,
    faults: Faults,
    next_port: PortId,
    ports: BTreeMap<PortId, Port>,
    table: HashMap<Mac, PortId>,
    /// Addresses of devices, and which port has them: the first that said so.
    holders: HashMap<Mac, PortId>,
    /// Addresses that no other user can have for now.
    kept: HashMap<Mac, Kept>,
    kept_limit: usize,
    /// What of these is whose.
    returns: BTreeMap<u32, Return>,
    /// The port of each whose frames were last released.
    polled: BTreeMap<Turn, PortId>,
    debts: Debts<Turn>,
    /// Who is next, where not all had their turn.
    next: Option<Turn>,
    /// Who runs the switch, if that is known.
    owner: Option<u32>,
    /// All ports may send from all addresses.
    any_source: bool,
    partitions: Vec<(Side, Option<Side>)>,
    moved: bool,
    /// Bytes that all lines hold back together, and how many they may.
    held: usize,
    memory: usize,
}

/// What a port looks like from outside.
#[derive(Debug, Serialize)]
pub struct PortReport {
    /// The port's number.
    pub port: PortId,
    /// Addresses seen behind it.
    pub addresses: Vec<String>,
    /// The address that is this port's alone.
    pub own_address: Option<String>,
    /// The address that its device says it has, and does not get.
    pub wanted_address: Option<String>,
    /// Its traffic.
    #[serde(flatten)]
    pub counters: PortCounters,
    /// What the faults did to its frames.
    pub faults: FaultCounters,
}

impl Switch {
    /// An empty switch whose faults follow `seed`.
    pub fn new(seed: u64, faults: Faults) -> Self {
        Self {
            seed,
            faults,
            next_port: 0,
            ports: BTreeMap::new(),
            table: HashMap::new(),
            holders: HashMap::new(),
            kept: HashMap::new(),
            kept_limit: usize::MAX,
            returns: BTreeMap::new(),
            polled: BTreeMap::new(),
            debts: Debts::default(),
            next: None,
            owner: None,
            any_source: false,
            partitions: Vec::new(),
            moved: false,
            held: 0,
            memory: usize::MAX,
        }
    }

    /// Lets all ports send from all addresses, as a switch without port
    /// security does.
    pub fn allow_any_source(&mut self) {
        self.any_source = true;
    }

    /// Holds back no more than so many bytes of all ports together, for delay,
    /// reordering and rate, and [`PORT_SHARE`] of each.
    pub fn limit_memory(&mut self, bytes: usize) {
        self.memory = bytes;
    }

    /// There are no more ports than so many, with the [places](Switch::places), and
    /// no more addresses are kept than `KEPT_PER_PORT` for each.
    pub fn limit_ports(&mut self, ports: usize) {
        self.kept_limit = ports.saturating_mul(KEPT_PER_PORT);
    }

    /// Adds a port.
    pub fn attach(&mut self) -> PortId {
        let id = self.next_port;
        self.next_port += 1;
        self.ports.insert(
            id,
            Port {
                line: Line::new(self.seed, id),
                counters: PortCounters::default(),
                claims: Vec::new(),
                user: None,
                learned: 0,
            },
        );
        id
    }

    /// This user runs the switch: each of its ports has turns as another user has
    /// for all.
    pub fn set_owner(&mut self, user: u32) {
        self.owner = Some(user);
    }

    /// A port is of this user, and takes a place that was kept for it.
    pub fn set_user(&mut self, port: PortId, user: u32) {
        if let Some(port) = self.ports.get_mut(&port) {
            port.user = Some(user);
            if let Some(of_user) = self.returns.get_mut(&user) {
                of_user.places = of_user.places.saturating_sub(1);
            }
        }
    }

    /// A port of this user is [gone](Switch::detach), and nothing is left of its
    /// connection. While there are addresses to come back for its place is kept,
    /// also if it was none of theirs: who has come for one may have left again
    /// before it said so.
    pub fn vacate(&mut self, user: u32) {
        if let Some(of_user) = self.returns.get_mut(&user) {
            of_user.places = of_user.addresses.min(of_user.places + 1);
        }
    }

    /// Ports that are to be left for users of whom addresses are kept: else others
    /// would only have to take the places of those whose addresses they want. Each
    /// is one that the user had, and no other has come for it.
    pub fn places(&self) -> BTreeMap<u32, usize> {
        let users = self.returns.iter();
        users.map(|(user, kept)| (*user, kept.places)).collect()
    }

    /// Keeps an address for its user.
    fn keep(&mut self, address: Mac, user: u32, now: u64) {
        let of_user = self.returns.entry(user).or_default();
        if of_user.addresses >= KEPT_LIMIT {
            return;
        }
        of_user.addresses += 1;
        let kept = Kept {
            user,
            until: now.saturating_add(KEPT),
            latest: now.saturating_add(KEPT_LONGEST),
        };
        self.kept.insert(address, kept);
    }

    /// Lets go of an address if too many are kept: the oldest of the user who has
    /// most of them beyond its places. So nobody has others lose theirs by coming
    /// and going with ever new ones.
    fn keep_fewer(&mut self) {
        if self.kept.len() <= self.kept_limit {
            return;
        }
        let users = self.returns.iter();
        let most = users.max_by_key(|(_, of_user)| of_user.addresses - of_user.places);
        let Some((&user, _)) = most else {
            return;
        };
        let of_user = self.kept.iter().filter(|(_, kept)| kept.user == user);
        let oldest = of_user.min_by_key(|(_, kept)| kept.latest);
        if let Some((&address, _)) = oldest {
            self.let_go(&address);
            self.give(address);
        }
    }

    /// An address is not kept any more, nor a place for who comes for it.
    fn let_go(&mut self, address: &Mac) {
        let Some(Kept { user, .. }) = self.kept.remove(address) else {
            return;
        };
        if let Some(of_user) = self.returns.get_mut(&user) {
            of_user.addresses -= 1;
            of_user.places = of_user.places.min(of_user.addresses);
            if of_user.addresses == 0 {
                self.returns.remove(&user);
            }
        }
    }

    /// A device behind `port` has this address. If another has it already it
    /// comes next, when that is gone. A port says this once: `false` if this is
    /// not the first time, or no address that a device can have.
    pub fn claim(&mut self, port: PortId, address: Mac, any_source: bool) -> bool {
        let first = |of: &Port| of.claims.is_empty();
        self.ports.get(&port).is_some_and(first) && self.claim_also(port, address, any_source)
    }

    /// The same where there may be more: an adapter has an address for each of its functions.
    /// `false` if the port has said that before, or has said too much.
    pub fn claim_also(&mut self, port: PortId, address: Mac, any_source: bool) -> bool {
        let Some(of) = self.ports.get_mut(&port) else {
            return false;
        };
        let known = of.claims.iter().any(|claim| claim.address == address);
        if known || of.claims.len() >= PORT_CLAIMS || address.is_group() {
            return false;
        }
        of.claims.push(Claim {
            address,
            any_source,
        });
        self.give(address);
        true
    }

    /// The port of the device that has an address.
    pub fn holder(&self, address: &Mac) -> Option<PortId> {
        self.holders.get(address).copied()
    }

    /// Gives an address that nobody holds to the first port that wants it.
    fn give(&mut self, address: Mac) {
        if self.holders.contains_key(&address) {
            return;
        }
        let kept = self.kept.get(&address).map(|kept| kept.user);
        let wants = |port: &Port| {
            port.claims.iter().any(|claim| claim.address == address)
                && (kept.is_none() || port.user == kept)
        };
        let Some((&holder, _)) = self.ports.iter().find(|(_, port)| wants(port)) else {
            return;
        };
        self.let_go(&address);
        self.hand(address, holder);
    }

    /// An address that nobody holds is a port's from now on.
    fn hand(&mut self, address: Mac, holder: PortId) {
        self.unlearn(&address);
        self.holders.insert(address, holder);
        self.table.insert(address, holder);
        self.moved = true;
    }

    /// Whether frames from `source` may come in by `port`.
    fn admits(&self, port: PortId, source: &Mac) -> bool {
        let claims = |port: PortId| self.ports.get(&port).map(|port| &port.claims[..]);
        let own = claims(port).unwrap_or_default();
        let free = own.is_empty() || own.iter().any(|claim| claim.any_source);
        let may_move = |claim: &Claim| claim.address == *source && claim.any_source;
        let of = |port: PortId| self.ports.get(&port)?.user;
        let is_kept = |kept: &Kept| of(port) != Some(kept.user);
        match self.holders.get(source) {
            _ if self.any_source => true,
            Some(&holder) if holder == port => true,
            Some(&holder) => free && claims(holder).unwrap_or_default().iter().any(may_move),
            None => free && !self.kept.get(source).is_some_and(is_kept),
        }
    }

    /// An address is behind `port` now.
    fn learn(&mut self, address: Mac, port: PortId) {
        let known = self.table.get(&address).copied();
        if known == Some(port) {
            return;
        }
        self.moved |= known.is_some();
        self.unlearn(&address);
        let Some(of) = self.ports.get_mut(&port) else {
            return;
        };
        if self.holders.get(&address) == Some(&port) {
            self.table.insert(address, port);
        } else if of.learned < PORT_MINIMUM
            || of.learned < PORT_LIMIT && self.table.len() < TABLE_LIMIT
        {
            of.learned += 1;
            self.table.insert(address, port);
        }
    }

    fn unlearn(&mut self, address: &Mac) {
        let Some(old) = self.table.remove(address) else {
            return;
        };
        if self.holders.get(address) != Some(&old) {
            if let Some(old) = self.ports.get_mut(&old) {
                old.learned = old.learned.saturating_sub(1);
            }
        }
    }

    /// Removes a port with the addresses behind it and what it had under way. Its
    /// user may have its place when that is [free](Switch::vacate).
    pub fn detach(&mut self, port: PortId, now: u64) {
        let Some(left) = self.ports.remove(&port) else {
            return;
        };
        self.held -= left.line.held();
        self.table.retain(|_, behind| *behind != port);
        for claim in &left.claims {
            if self.holders.get(&claim.address) != Some(&port) {
                continue;
            }
            self.holders.remove(&claim.address);
            // One that may show up elsewhere is not kept from there.
            if let Some(user) = left.user.filter(|_| !claim.any_source) {
                self.keep(claim.address, user, now);
            }
            self.give(claim.address);
            self.keep_fewer();
        }
    }

    /// Gives addresses to others that have been kept for long enough.
    pub fn expire(&mut self, now: u64) {
        let over = self.kept.iter().filter(|(_, kept)| kept.until <= now);
        let over: HashSet<Mac> = over.map(|(address, _)| *address).collect();
        if over.is_empty() {
            return;
        }
        for address in &over {
            self.let_go(address);
        }
        // Each to the first that wants it, and all in one go: there may be many.
        let claims = self
            .ports
            .iter()
            .flat_map(|(id, port)| port.claims.iter().map(|claim| (*id, claim.address)));
        let wanted: Vec<(PortId, Mac)> = claims
            .filter(|(_, address)| over.contains(address))
            .collect();
        for (port, address) in wanted {
            if !self.holders.contains_key(&address) {
                self.hand(address, port);
            }
        }
    }

    /// Keeps all of them for so much longer, in which their users could not come
    /// back. Where those who wait for that move on, a minute is enough: a user who
    /// waits in line is there by then, and others want the address too. A line
    /// that stands is nobody's to wait in, and that time does not count.
    pub fn keep_longer(&mut self, time: u64, moves: bool) {
        for kept in self.kept.values_mut() {
            if !moves {
                kept.latest = kept.latest.saturating_add(time);
            }
            kept.until = kept.until.saturating_add(time).min(kept.latest);
        }
    }

    /// When [`Switch::expire`] has something to do next.
    pub fn next_expiry(&self) -> Option<u64> {
        self.kept.values().map(|kept| kept.until).min()
    }

    /// The port behind which an address was seen last.
    pub fn port_of(&self, address: &Mac) -> Option<PortId> {
        self.table.get(address).copied()
    }

    /// Whether an address was seen behind another port than before, since the
    /// last call.
    pub fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    /// Whether the switch only forwards: no frame is lost, changed, held back
    /// or kept from a port.
    pub fn is_plain(&self) -> bool {
        self.faults.none() && self.partitions.is_empty() && self.next_timeout().is_none()
    }

    /// The faults in force.
    pub fn faults(&self) -> Faults {
        self.faults
    }

    /// Changes the faults; frames already held back keep their times.
    pub fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Cuts `a` off from `b`, or from every other port.
    pub fn partition(&mut self, a: Side, b: Option<Side>) {
        let cut = (a, b);
        if !self.partitions.contains(&cut) {
            self.partitions.push(cut);
        }
    }

    /// Takes back the partitions between `a` and `b`, all of `a`'s, or all.
    pub fn heal(&mut self, a: Option<&Side>, b: Option<&Side>) {
        self.partitions.retain(|(x, y)| match (a, b) {
            (None, _) => false,
            (Some(a), None) => x != a && y.as_ref() != Some(a),
            (Some(a), Some(b)) => {
                !(x == a && y.as_ref() == Some(b) || x == b && y.as_ref() == Some(a))
            }
        });
    }

    /// Takes a frame from `port` at time `now`.
    pub fn receive(&mut self, port: PortId, frame: &[u8], now: u64, output: &mut dyn Output) {
        let Some(from) = self.ports.get_mut(&port) else {
            return;
        };
        let Some(source) = frame.get(6..12) else {
            return;
        };
        from.counters.rx_frames += 1;
        from.counters.rx_bytes += frame.len() as u64;
        let mut address = [0; 6];
        address.copy_from_slice(source);
        let source = Mac(address);
        if !self.admits(port, &source) {
            if let Some(from) = self.ports.get_mut(&port) {
                from.counters.source_drops += 1;
            }
            return;
        }
        if !source.is_group() {
            self.learn(source, port);
        }
        let Some(from) = self.ports.get_mut(&port) else {
            return;
        };
        if self.faults.none() && from.line.next_timeout().is_none() {
            self.forward(port, frame, output);
            return;
        }
        let mut arrived = Vec::new();
        let faults = self.faults;
        from.line
            .set_limit(share(self.memory, self.held).min(LINE_LIMIT));
        let before = from.line.held();
        from.line.send(&faults, frame, now, &mut |frame| {
            arrived.push(frame.to_vec())
        });
        self.held = self.held + from.line.held() - before;
        for frame in &arrived {
            self.forward(port, frame, output);
        }
    }

    /// Forwards what delay or reordering held back until `now`: one frame of
    /// each user in turn, of its ports in turn, until each has had its
    /// [share](Output::share) or all have had [enough](Output::most). The next
    /// time those users and ports are first that are next, and who has had more
    /// has less. The ports of [one](Switch::set_owner) have a turn each.
    pub fn poll(&mut self, now: u64, output: &mut dyn Output) {
        let faults = self.faults;
        let mut due: BTreeMap<Turn, VecDeque<PortId>> = BTreeMap::new();
        for (id, port) in &self.ports {
            if port.line.next_timeout().is_some_and(|due| due <= now) {
                let own = port.user.is_some() && port.user == self.owner;
                let turn = (port.user, own.then_some(*id));
                due.entry(turn).or_default().push_back(*id);
            }
        }
        self.polled.retain(|turn, _| due.contains_key(turn));
        let share = output.share(due.len());
        let mut turns: VecDeque<_> = due
            .into_iter()
            .map(|(turn, mut ports)| {
                // They are in the order of their numbers.
                if let Some(last) = self.polled.get(&turn) {
                    ports.rotate_left(ports.partition_point(|id| id <= last));
                }
                (turn, ports, self.debts.left(&turn, share))
            })
            .collect();
        if let Some(next) = self.next.take() {
            turns.rotate_left(turns.partition_point(|(turn, ..)| *turn < next));
        }
        turns.retain(|(_, _, left)| *left > 0);
        self.debts.pass(share);
        let (most, mut of_others) = (output.most(), 0);
        let mut arrived = Vec::new();
        while let Some((turn, mut ports, left)) = turns.pop_front() {
            let others = turn.1.is_none();
            if others && of_others >= most {
                self.next.get_or_insert(turn);
                continue;
            }
            let Some(id) = ports.pop_front() else {
                continue;
            };
            let Some(port) = self.ports.get_mut(&id) else {
                continue;
            };
            self.polled.insert(turn, id);
            let (before, start) = (port.line.held(), output.work());
            let more = port
                .line
                .poll(&faults, now, &mut |frame| arrived.push(frame.to_vec()));
            self.held = self.held + port.line.held() - before;
            for frame in arrived.drain(..) {
                self.forward(id, &frame, output);
            }
            if more {
                ports.push_back(id);
            }
            let work = output.work() - start;
            if others {
                of_others += work;
            }
            if work < left {
                turns.push_back((turn, ports, left - work));
            } else {
                self.debts.add(turn, work - left);
            }
        }
    }

    /// When [`Switch::poll`] has something to do next.
    pub fn next_timeout(&self) -> Option<u64> {
        self.ports
            .values()
            .filter_map(|port| port.line.next_timeout())
            .min()
    }

    /// All ports with their counters.
    pub fn report(&self) -> Vec<PortReport> {
        self.ports
            .iter()
            .map(|(id, port)| {
                let mut addresses: Vec<Mac> = self
                    .table
                    .iter()
                    .filter(|(_, behind)| *behind == id)
                    .map(|(mac, _)| *mac)
                    .collect();
                addresses.sort_unstable();
                let claimed = port.claims.iter().map(|claim| claim.address);
                let (own, wanted): (Vec<Mac>, Vec<Mac>) =
                    claimed.partition(|address| self.holders.get(address) == Some(id));
                // The first of several; all are among `addresses`.
                let (own, wanted) = (own.first().copied(), wanted.first().copied());
                PortReport {
                    port: *id,
                    addresses: addresses.iter().map(Mac::to_string).collect(),
                    own_address: own.map(|address| address.to_string()),
                    wanted_address: wanted.map(|address| address.to_string()),
                    counters: port.counters,
                    faults: port.line.counters,
                }
            })
            .collect()
    }

    fn forward(&mut self, from: PortId, frame: &[u8], output: &mut dyn Output) {
        let Some(destination) = frame.first_chunk::<6>() else {
            return;
        };
        output.capture(frame);
        let destination = Mac(*destination);
        let known = if destination.is_group() {
            None
        } else {
            self.table.get(&destination).copied()
        };
        match known {
            Some(to) if to == from => {}
            Some(to) => self.leave(from, to, frame, output),
            None => {
                let others: Vec<PortId> = self
                    .ports
                    .keys()
                    .copied()
                    .filter(|to| *to != from)
                    .collect();
                for to in others {
                    self.leave(from, to, frame, output);
                }
            }
        }
    }

    fn leave(&mut self, from: PortId, to: PortId, frame: &[u8], output: &mut dyn Output) {
        let cut = self.is_cut(from, to);
        let Some(port) = self.ports.get_mut(&to) else {
            return;
        };
        if cut {
            port.counters.partition_drops += 1;
        } else if output.send(to, frame) {
            port.counters.tx_frames += 1;
            port.counters.tx_bytes += frame.len() as u64;
        } else {
            port.counters.queue_drops += 1;
        }
    }

    fn is_cut(&self, from: PortId, to: PortId) -> bool {
        self.partitions.iter().any(|(a, b)| {
            let Some(a) = self.resolve(a) else {
                return false;
            };
            match b {
                None => a == from || a == to,
                Some(b) => self
                    .resolve(b)
                    .is_some_and(|b| (a, b) == (from, to) || (a, b) == (to, from)),
            }
        })
    }

    fn resolve(&self, side: &Side) -> Option<PortId> {
        match side {
            Side::Port(port) => Some(*port),
            Side::Mac(text) => self.table.get(&text.parse().ok()?).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Sink {
        sent: Vec<(PortId, Vec<u8>)>,
        captured: usize,
        full: Option<PortId>,
        /// So many are sent for each in a turn, and for all.
        enough: Option<u64>,
        most: Option<u64>,
    }

    impl Output for Sink {
        fn send(&mut self, port: PortId, frame: &[u8]) -> bool {
            if self.full == Some(port) {
                return false;
            }
            self.sent.push((port, frame.to_vec()));
            true
        }
        fn capture(&mut self, _frame: &[u8]) {
            self.captured += 1;
        }
        fn work(&self) -> u64 {
            self.sent.len() as u64
        }
        fn share(&self, _turns: usize) -> u64 {
            self.enough.unwrap_or(u64::MAX)
        }
        fn most(&self) -> u64 {
            self.most.unwrap_or(u64::MAX)
        }
    }

    impl Sink {
        fn ports(&mut self) -> Vec<PortId> {
            self.sent.drain(..).map(|(port, _)| port).collect()
        }
    }

    fn frame(to: u8, from: u8) -> Vec<u8> {
        let mut frame = vec![0u8; 60];
        frame[..6].copy_from_slice(&[0x52, 0x54, 0, 0, 0, to]);
        frame[6..12].copy_from_slice(&[0x52, 0x54, 0, 0, 0, from]);
        frame
    }

    fn three() -> (Switch, Sink) {
        let mut switch = Switch::new(1, Faults::default());
        for expected in 0..3 {
            assert_eq!(switch.attach(), expected);
        }
        (switch, Sink::default())
    }

    #[test]
    fn the_switch_floods_what_it_does_not_know_and_learns() {
        let (mut switch, mut sink) = three();
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [1, 2]);
        switch.receive(2, &frame(1, 2), 0, &mut sink);
        assert_eq!(sink.ports(), [0]);
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [2]);
        // Not back to where it came from.
        switch.receive(0, &frame(1, 1), 0, &mut sink);
        assert!(sink.ports().is_empty());
        assert_eq!(sink.captured, 4);
    }

    #[test]
    fn group_addresses_are_flooded_and_not_learned() {
        let (mut switch, mut sink) = three();
        let mut broadcast = frame(0, 1);
        broadcast[..6].fill(0xff);
        switch.receive(1, &broadcast, 0, &mut sink);
        assert_eq!(sink.ports(), [0, 2]);
        let mut bad = frame(1, 0);
        bad[6..12].fill(0xff);
        switch.receive(0, &bad, 0, &mut sink);
        switch.receive(1, &broadcast, 0, &mut sink);
        sink.ports();
        assert_eq!(switch.table.len(), 1);
    }

    #[test]
    fn a_port_that_leaves_takes_its_addresses_along() {
        let (mut switch, mut sink) = three();
        switch.receive(2, &frame(1, 9), 0, &mut sink);
        sink.ports();
        switch.detach(2, 0);
        switch.receive(0, &frame(9, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [1]);
        switch.receive(2, &frame(1, 9), 0, &mut sink);
        assert!(sink.ports().is_empty());
    }

    #[test]
    fn an_address_that_moves_is_followed() {
        let (mut switch, mut sink) = three();
        switch.receive(1, &frame(7, 9), 0, &mut sink);
        switch.receive(2, &frame(7, 9), 0, &mut sink);
        sink.ports();
        switch.receive(0, &frame(9, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [2]);
    }

    #[test]
    fn the_table_is_bounded() {
        let (mut switch, mut sink) = three();
        // By more ports than there is room for what each may have.
        let ports = (TABLE_LIMIT / PORT_LIMIT) as u32 + 2;
        for port in 3..ports {
            assert_eq!(switch.attach(), PortId::from(port));
        }
        for n in 0..ports * PORT_LIMIT as u32 {
            let mut spoof = frame(1, 0);
            spoof[8..12].copy_from_slice(&n.to_be_bytes());
            switch.receive(PortId::from(n % ports), &spoof, 0, &mut sink);
        }
        assert_eq!(switch.table.len(), TABLE_LIMIT);
    }

    #[test]
    fn a_full_port_is_counted_and_the_others_go_on() {
        let (mut switch, mut sink) = three();
        sink.full = Some(1);
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [2]);
        assert_eq!(switch.report()[1].counters.queue_drops, 1);
        assert_eq!(switch.report()[2].counters.tx_frames, 1);
    }

    fn mac(number: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0, 0, number])
    }

    #[test]
    fn nobody_sends_from_the_address_of_a_device() {
        let (mut switch, mut sink) = three();
        // Port 2 was first to use the address; it is port 0's all the same.
        switch.receive(2, &frame(9, 1), 0, &mut sink);
        switch.claim(0, mac(1), false);
        switch.claim(1, mac(2), false);
        assert!(switch.take_moved());
        sink.ports();
        for thief in [1, 2] {
            switch.receive(thief, &frame(9, 1), 0, &mut sink);
            assert!(sink.ports().is_empty());
            assert_eq!(switch.port_of(&mac(1)), Some(0));
        }
        assert!(!switch.take_moved());
        assert_eq!(switch.report()[1].counters.source_drops, 1);
        assert_eq!(switch.report()[2].counters.source_drops, 1);
        // Nor does a device send from an address that is nobody's, or a group's.
        let mut group = frame(1, 9);
        group[6] |= 1;
        switch.receive(1, &frame(1, 9), 0, &mut sink);
        switch.receive(1, &group, 0, &mut sink);
        assert!(sink.ports().is_empty());
        switch.receive(2, &frame(1, 9), 0, &mut sink);
        switch.receive(1, &frame(1, 2), 0, &mut sink);
        assert_eq!(sink.ports(), [0, 0]);
    }

    #[test]
    fn an_adapter_has_the_addresses_of_all_its_functions() {
        let (mut switch, mut sink) = three();
        for number in 1..=2 {
            assert!(switch.claim_also(0, mac(number), false));
            assert!(!switch.claim_also(0, mac(number), false), "twice");
        }
        for number in 1..=2 {
            switch.receive(1, &frame(77, number), 0, &mut sink);
            assert!(sink.ports().is_empty(), "stolen");
            switch.receive(0, &frame(77, number), 0, &mut sink);
            assert_eq!(sink.ports(), [1, 2]);
            switch.receive(1, &frame(number, 9), 0, &mut sink);
            assert_eq!(sink.ports(), [0]);
        }
        switch.receive(0, &frame(77, 3), 0, &mut sink);
        assert!(sink.ports().is_empty(), "an address that is not its");
        // One that may move does not let the others do so.
        assert!(switch.claim_also(0, mac(4), true));
        switch.receive(1, &frame(77, 4), 0, &mut sink);
        assert_eq!(sink.ports(), [0, 2]);
        switch.receive(1, &frame(77, 1), 0, &mut sink);
        assert!(sink.ports().is_empty(), "stolen");
        // There is an end to it.
        for number in 5..=PORT_CLAIMS as u8 + 1 {
            assert!(switch.claim_also(0, mac(number), false));
        }
        assert!(!switch.claim_also(0, mac(200), false));
        // All are free when it leaves.
        switch.detach(0, 0);
        assert!(switch.claim(1, mac(2), false));
        assert_eq!(switch.holder(&mac(2)), Some(1));
        assert_eq!(switch.holder(&mac(1)), None);
    }

    #[test]
    fn an_address_is_of_the_first_that_has_it_until_it_leaves() {
        let (mut switch, _) = three();
        switch.claim(1, mac(1), false);
        // A lower number is no right, nor is a second thought.
        switch.claim(0, mac(1), false);
        switch.claim(0, mac(2), false);
        switch.claim(2, mac(1), true);
        assert_eq!(switch.port_of(&mac(1)), Some(1));
        assert_eq!(switch.port_of(&mac(2)), None);
        let own = |switch: &Switch, port: usize| switch.report()[port].own_address.clone();
        assert_eq!(own(&switch, 0), None);
        assert_eq!(own(&switch, 1).as_deref(), Some("52:54:00:00:00:01"));
        switch.detach(1, 0);
        assert_eq!(switch.port_of(&mac(1)), Some(0));
        switch.detach(0, 0);
        assert_eq!(switch.port_of(&mac(1)), Some(2));
        switch.detach(2, 0);
        assert_eq!(switch.port_of(&mac(1)), None);
    }

    #[test]
    fn an_address_is_kept_for_its_user_for_some_time() {
        let (mut switch, mut sink) = three();
        for (port, user) in [(0, 1000), (1, 1001), (2, 1001)] {
            switch.set_user(port, user);
        }
        switch.claim(0, mac(1), false);
        switch.claim(1, mac(1), false);
        switch.detach(0, 100);
        assert_eq!(switch.holder(&mac(1)), None);
        // Nor is it to be had by sending from it.
        switch.receive(2, &frame(9, 1), 100, &mut sink);
        assert_eq!(switch.port_of(&mac(1)), None);
        assert_eq!(switch.next_expiry(), Some(100 + KEPT));
        switch.expire(100 + KEPT - 1);
        assert_eq!(switch.holder(&mac(1)), None);
        let report = &switch.report()[0];
        assert_eq!(report.own_address, None);
        assert_eq!(report.wanted_address, Some(mac(1).to_string()));
        // Its own user comes back in time.
        let back = switch.attach();
        switch.set_user(back, 1000);
        switch.claim(back, mac(1), false);
        assert_eq!(switch.holder(&mac(1)), Some(back));
        assert_eq!(switch.next_expiry(), None);
        // Or does not.
        switch.detach(back, 200);
        switch.expire(200 + KEPT);
        assert_eq!(switch.port_of(&mac(1)), Some(1));
        assert_eq!(switch.next_expiry(), None);
    }

    #[test]
    fn who_leaves_it_may_send_from_addresses_that_are_no_devices() {
        let (mut switch, mut sink) = three();
        switch.claim(0, mac(1), true);
        switch.claim(1, mac(2), false);
        switch.claim(2, mac(3), true);
        // A bridge in the guest.
        switch.receive(0, &frame(2, 77), 0, &mut sink);
        assert_eq!(sink.ports(), [1]);
        assert_eq!(switch.port_of(&mac(77)), Some(0));
        switch.receive(0, &frame(2, 2), 0, &mut sink);
        assert!(sink.ports().is_empty());
        // A bond that goes over to its other card.
        switch.receive(2, &frame(2, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [1]);
        assert_eq!(switch.port_of(&mac(1)), Some(2));
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert_eq!(switch.port_of(&mac(1)), Some(0));
        // One that keeps to the rule cannot take it.
        switch.receive(1, &frame(9, 1), 0, &mut sink);
        assert_eq!(switch.port_of(&mac(1)), Some(0));
    }

    #[test]
    fn one_port_does_not_use_up_the_table() {
        let (mut switch, mut sink) = three();
        let from = |number: u16| {
            let mut frame = frame(9, 0);
            frame[10..12].copy_from_slice(&number.to_be_bytes());
            frame[8] = 7;
            frame
        };
        for number in 0..2000 {
            switch.receive(0, &from(number), 0, &mut sink);
        }
        assert_eq!(switch.report()[0].addresses.len(), PORT_LIMIT);
        // Those that move count where they are.
        for number in 0..10 {
            switch.receive(1, &from(number), 0, &mut sink);
        }
        for number in 1000..2000 {
            switch.receive(0, &from(number), 0, &mut sink);
        }
        assert_eq!(switch.report()[0].addresses.len(), PORT_LIMIT);
        assert_eq!(switch.report()[1].addresses.len(), 10);
        switch.claim(0, mac(1), true);
        assert_eq!(switch.port_of(&mac(1)), Some(0));
    }

    #[test]
    fn partitions_cut_both_ways_and_heal() {
        let (mut switch, mut sink) = three();
        switch.receive(0, &frame(9, 1), 0, &mut sink);
        switch.receive(1, &frame(9, 2), 0, &mut sink);
        sink.ports();
        let a = Side::Mac("52:54:00:00:00:01".into());
        let b = Side::Port(1);
        switch.partition(a.clone(), Some(b.clone()));
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        switch.receive(1, &frame(1, 2), 0, &mut sink);
        assert!(sink.ports().is_empty());
        switch.receive(2, &frame(1, 3), 0, &mut sink);
        assert_eq!(sink.ports(), [0]);
        assert_eq!(switch.report()[1].counters.partition_drops, 1);
        switch.heal(Some(&b), Some(&a));
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert_eq!(sink.ports(), [1]);
        switch.partition(b, None);
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        switch.receive(1, &frame(3, 2), 0, &mut sink);
        assert!(sink.ports().is_empty());
        switch.heal(None, None);
        switch.receive(1, &frame(3, 2), 0, &mut sink);
        assert_eq!(sink.ports(), [2]);
    }

    #[test]
    fn what_all_ports_hold_back_together_is_bounded() {
        let faults = Faults {
            delay: 1000.0,
            ..Faults::default()
        };
        let mut switch = Switch::new(1, faults);
        switch.limit_memory(4 << 20);
        let ports: Vec<PortId> = (0..50).map(|_| switch.attach()).collect();
        let mut output = Sink::default();
        let big = vec![0; 16 * 1024];
        for port in &ports {
            for _ in 0..500 {
                switch.receive(*port, &big, 0, &mut output);
            }
        }
        let held: usize = switch.ports.values().map(|port| port.line.held()).sum();
        assert_eq!(held, switch.held);
        assert!(held <= (4 << 20) + 50 * PORT_SHARE, "{held}");
        for port in ports {
            assert!(switch.ports[&port].line.held() >= PORT_SHARE - big.len());
            switch.detach(port, 0);
        }
        assert_eq!(switch.held, 0);
    }

    #[test]
    fn delayed_frames_leave_when_due() {
        let (mut switch, mut sink) = three();
        switch.set_faults(Faults {
            delay: 1.0,
            ..Faults::default()
        });
        switch.receive(0, &frame(2, 1), 0, &mut sink);
        assert!(sink.ports().is_empty());
        // Order is kept when the delay is taken away.
        switch.set_faults(Faults::default());
        switch.receive(0, &frame(3, 1), 10, &mut sink);
        switch.poll(999_999, &mut sink);
        assert!(sink.ports().is_empty());
        switch.poll(switch.next_timeout().unwrap(), &mut sink);
        assert_eq!(sink.ports(), [1, 2, 1, 2]);
        assert_eq!(switch.next_timeout(), None);
    }

    #[test]
    fn what_is_due_is_released_in_turns() {
        let (mut switch, mut sink) = three();
        switch.set_faults(Faults {
            delay: 1.0,
            ..Faults::default()
        });
        for _ in 0..1000 {
            switch.receive(1, &frame(9, 2), 0, &mut sink);
        }
        for port in [0, 2] {
            switch.receive(port, &frame(9, 1 + port as u8), 0, &mut sink);
        }
        sink.enough = Some(10);
        let due = switch.next_timeout().unwrap();
        switch.poll(due, &mut sink);
        // Each goes to two ports, and those of all three are among them.
        assert_eq!(sink.sent.len(), 10);
        let from = |sink: &Sink, number: u8| sink.sent.iter().any(|(_, f)| f[11] == number);
        assert!([1, 2, 3].iter().all(|number| from(&sink, *number)));
        assert_eq!(switch.next_timeout(), Some(due), "there is more");
        sink.enough = None;
        switch.poll(due, &mut sink);
        assert_eq!(sink.sent.len(), 2 * 1002);
        assert_eq!(switch.next_timeout(), None);
        // With one frame a turn the turn goes round.
        sink.sent.clear();
        for port in [0, 1, 2] {
            for _ in 0..3 {
                switch.receive(port, &frame(9, 1 + port as u8), due, &mut sink);
            }
        }
        let due = switch.next_timeout().unwrap();
        sink.enough = Some(2);
        for _ in 0..3 {
            switch.poll(due, &mut sink);
        }
        assert_eq!(sink.sent.len(), 6);
        assert!([1, 2, 3].iter().all(|number| from(&sink, *number)));
    }

    #[test]
    fn what_is_due_is_released_for_users_in_turn() {
        let mut switch = Switch::new(
            1,
            Faults {
                delay: 1.0,
                ..Faults::default()
            },
        );
        let mut sink = Sink::default();
        // One has a port, and another has twenty.
        for port in 0..21 {
            assert_eq!(switch.attach(), port);
            switch.set_user(port, if port == 20 { 1001 } else { 1000 });
        }
        for port in 0..21 {
            for _ in 0..100 {
                switch.receive(port, &frame(0xee, 1 + port as u8), 0, &mut sink);
            }
        }
        let due = switch.next_timeout().unwrap();
        sink.enough = Some(50 * 20);
        switch.poll(due, &mut sink);
        let of = |sink: &Sink, number: u8| {
            let copies = sink.sent.iter().filter(|(_, f)| f[11] == number);
            copies.count() / 20
        };
        assert_eq!(of(&sink, 21), 50);
        assert_eq!(sink.sent.len(), 2 * 50 * 20);
        assert_eq!(sink.sent[20].1[11], 21, "it is the second already");
        // Those of the other go on where they were.
        switch.poll(due, &mut sink);
        assert_eq!(of(&sink, 21), 100);
        for port in 0..20 {
            assert_eq!(of(&sink, 1 + port), 5);
        }
        // Who runs the switch has as much for each of its ports.
        sink.sent.clear();
        switch.set_owner(1000);
        sink.enough = Some(10 * 20);
        for _ in 0..100 {
            switch.receive(20, &frame(0xee, 21), due, &mut sink);
        }
        switch.poll(switch.ports[&20].line.next_timeout().unwrap(), &mut sink);
        for port in 0..21 {
            assert_eq!(of(&sink, 1 + port), 10);
        }
    }

    /// Ports of users 1000 and up, each of which has so many frames due, which go
    /// to all others, and when they are.
    fn delayed(users: u32, frames: usize) -> (Switch, Sink, u64) {
        let delay = Faults {
            delay: 1.0,
            ..Faults::default()
        };
        let (mut switch, mut sink) = (Switch::new(1, delay), Sink::default());
        for user in 0..users {
            let port = switch.attach();
            switch.set_user(port, 1000 + user);
            for _ in 0..frames {
                switch.receive(port, &frame(0xee, 1 + user as u8), 0, &mut sink);
            }
        }
        let due = switch.next_timeout().unwrap();
        (switch, sink, due)
    }

    /// How many frames of each user went to others, of whom there are `copies`.
    fn of_users(sink: &Sink, users: u8, copies: usize) -> Vec<usize> {
        let of = |user| sink.sent.iter().filter(|(_, f)| f[11] == 1 + user).count();
        (0..users).map(|user| of(user) / copies).collect()
    }

    #[test]
    fn what_is_beyond_a_turn_is_taken_off_the_next() {
        let (mut switch, mut sink, due) = delayed(11, 100);
        // A frame is ten copies.
        sink.enough = Some(4);
        for expected in [1, 1, 2, 2, 2, 3, 3, 4] {
            switch.poll(due, &mut sink);
            assert_eq!(of_users(&sink, 11, 10), [expected; 11]);
        }
        // Turns pass in which nothing is due.
        assert_eq!(switch.debts.0.len(), 11);
        for _ in 0..2 {
            switch.poll(0, &mut sink);
        }
        assert!(switch.debts.0.is_empty());
        assert_eq!(of_users(&sink, 11, 10), [4; 11]);
    }

    #[test]
    fn many_users_have_no_more_than_one_poll_takes() {
        let users = 21;
        let (mut switch, mut sink, due) = delayed(users.into(), 100);
        switch.set_owner(1020);
        // A frame is twenty copies, which is more than a turn.
        (sink.enough, sink.most) = (Some(1), Some(100));
        let mut expected = vec![0; users.into()];
        for first in [0, 5, 10, 15] {
            switch.poll(due, &mut sink);
            expected[first..first + 5].fill(1);
            // Who runs the switch does not wait for them.
            expected[20] = 1;
            assert_eq!(of_users(&sink, users, 20), expected);
        }
        // Each has had as much as twenty turns are.
        for _ in 4..20 {
            switch.poll(due, &mut sink);
        }
        assert_eq!(of_users(&sink, users, 20), expected);
        switch.poll(due, &mut sink);
        expected[..5].fill(2);
        expected[20] = 2;
        assert_eq!(of_users(&sink, users, 20), expected);
    }

    /// A device of a user with an address comes.
    fn come(switch: &mut Switch, user: u32, address: Mac) -> PortId {
        let port = switch.attach();
        switch.set_user(port, user);
        assert!(switch.claim(port, address, false));
        port
    }

    /// It leaves, and nothing is left of its connection.
    fn leave(switch: &mut Switch, user: u32, port: PortId, now: u64) {
        switch.detach(port, now);
        switch.vacate(user);
    }

    fn places(switch: &Switch, user: u32) -> usize {
        switch.places().get(&user).copied().unwrap_or(0)
    }

    #[test]
    fn a_place_is_kept_with_an_address_and_none_beyond_those_a_user_had() {
        let (mut switch, _) = three();
        let ports = [1, 2, 3].map(|number| come(&mut switch, 1000, mac(number)));
        assert_eq!(places(&switch, 1000), 0);
        for port in ports {
            switch.detach(port, 0);
        }
        // They have their places as long as something is left of them.
        assert_eq!(places(&switch, 1000), 0);
        for count in [1, 2, 3, 3] {
            switch.vacate(1000);
            assert_eq!(places(&switch, 1000), count);
        }
        // Whichever comes back, it takes one.
        come(&mut switch, 1000, mac(2));
        assert_eq!(places(&switch, 1000), 2);
        for number in [4, 5, 6] {
            come(&mut switch, 1000, mac(number));
        }
        assert_eq!(places(&switch, 1000), 0);
        switch.vacate(1001);
        switch.expire(KEPT);
        assert!(switch.places().is_empty());
        // There is nothing to come back for.
        switch.vacate(1000);
        assert!(switch.places().is_empty());
    }

    #[test]
    fn who_leaves_before_it_has_said_its_address_uses_up_no_place() {
        let (mut switch, _) = three();
        let port = come(&mut switch, 1000, mac(1));
        leave(&mut switch, 1000, port, 0);
        for _ in 0..3 {
            assert_eq!(places(&switch, 1000), 1);
            let port = switch.attach();
            switch.set_user(port, 1000);
            assert_eq!(places(&switch, 1000), 0);
            leave(&mut switch, 1000, port, 0);
        }
        let port = come(&mut switch, 1000, mac(1));
        assert_eq!(switch.holder(&mac(1)), Some(port));
        assert!(switch.places().is_empty());
    }

    fn one_of_many(number: u32) -> Mac {
        let [a, b, c, d] = number.to_be_bytes();
        Mac([0x52, 0x54, a, b, c, d])
    }

    #[test]
    fn who_comes_with_ever_new_addresses_has_others_lose_none() {
        let (mut switch, _) = three();
        switch.limit_ports(16);
        let limit = 16 * KEPT_PER_PORT;
        // One has four ports, and one a port which it had for another address before.
        let four = [1, 2, 3, 4].map(|number| come(&mut switch, 1000, mac(number)));
        for port in four {
            leave(&mut switch, 1000, port, 0);
        }
        for number in [5, 6] {
            let port = come(&mut switch, 1001, mac(number));
            leave(&mut switch, 1001, port, 0);
        }
        let mut numbers = 1 << 16..;
        for round in 0..50 {
            for user in 2000..2010 {
                let address = one_of_many(numbers.next().unwrap());
                let port = come(&mut switch, user, address);
                leave(&mut switch, user, port, round);
                assert!(switch.kept.len() <= limit);
                // The last is kept, and not the first.
                assert!(switch.kept.contains_key(&address), "round {round}");
            }
        }
        assert_eq!(switch.kept.len(), limit);
        assert_eq!(places(&switch, 1000), 4);
        for number in 1..=6 {
            assert!(switch.kept.contains_key(&mac(number)), "{number}");
        }
        // Who wants one that is not kept any more has it.
        let number = numbers.start;
        let port = come(&mut switch, 3000, one_of_many(number));
        come(&mut switch, 3001, one_of_many(number));
        leave(&mut switch, 3000, port, 50);
        assert_eq!(switch.holder(&one_of_many(number)), None);
        switch.expire(50 + KEPT);
        assert!(switch.holder(&one_of_many(number)).is_some());
        assert!(switch.returns.is_empty() && switch.kept.is_empty());
    }

    /// Hundredths of a second that this thread has computed.
    fn computed() -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let (_, fields) = stat.rsplit_once(") ").unwrap();
        let fields: Vec<&str> = fields.split(' ').collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    #[test]
    fn many_addresses_that_are_kept_no_longer_cost_little() {
        let (mut switch, _) = three();
        let each = KEPT_LIMIT as u32;
        for number in 0..160 * each {
            let user = 2000 + number / each;
            let port = come(&mut switch, user, one_of_many(number));
            leave(&mut switch, user, port, 0);
        }
        // Some are wanted, by the first of two, and others are not.
        let wants = |number| [3000, 3001].map(|user| (user, one_of_many(number)));
        for (user, address) in (0..2000).map(|number| number * 16).flat_map(wants) {
            come(&mut switch, user, address);
        }
        let before = computed();
        switch.expire(KEPT);
        let busy = computed() - before;
        assert!(busy < 50, "{busy} hundredths of a second");
        assert!(switch.kept.is_empty());
        let holder = |number| switch.holder(&one_of_many(number)).unwrap();
        assert_eq!(holder(16), holder(0) + 2);
    }

    #[test]
    fn an_address_is_not_kept_for_ever() {
        const SECOND: u64 = 1_000_000_000;
        let (mut switch, _) = three();
        for (port, user) in [(0, 1000), (1, 1001)] {
            switch.set_user(port, user);
            switch.claim(port, mac(1), false);
        }
        switch.detach(0, 0);
        for second in 1..60 {
            switch.keep_longer(SECOND, true);
            switch.expire(second * SECOND);
            assert_eq!(switch.holder(&mac(1)), None, "after {second} s");
        }
        switch.keep_longer(SECOND, true);
        switch.expire(KEPT_LONGEST);
        assert_eq!(switch.holder(&mac(1)), Some(1));
    }

    #[test]
    fn a_full_table_has_room_for_a_few_of_each_port() {
        let (mut switch, mut sink) = three();
        for _ in 0..TABLE_LIMIT / PORT_LIMIT {
            let port = switch.attach();
            for number in 0..PORT_LIMIT as u16 {
                let mut spoof = frame(9, 0);
                spoof[7] = port as u8;
                spoof[8..10].copy_from_slice(&number.to_be_bytes());
                switch.receive(port, &spoof, 0, &mut sink);
            }
        }
        assert_eq!(switch.table.len(), TABLE_LIMIT);
        for number in 1..=PORT_MINIMUM as u8 + 1 {
            switch.receive(0, &frame(9, number), 0, &mut sink);
        }
        assert_eq!(switch.port_of(&mac(1)), Some(0));
        assert_eq!(switch.report()[0].addresses.len(), PORT_MINIMUM);
    }

    #[test]
    fn addresses_are_parsed_strictly() {
        assert_eq!(
            "52:54:00:fe:00:01".parse(),
            Ok(Mac([0x52, 0x54, 0, 0xfe, 0, 1]))
        );
        for bad in [
            "",
            "52:54",
            "52:54:00:fe:00:01:02",
            "g2:54:00:fe:00:01",
            "+2:54:00:fe:00:01",
        ] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
    }
}
