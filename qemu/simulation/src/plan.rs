// SPDX-License-Identifier: Apache-2.0 OR MIT

//! What happens in a simulation: made from a seed, printed for people, made shorter by others.

use crate::Random;
use ferrite_fabric::fault::Faults;
use std::fmt;

/// The longest message of a plan.
pub const MAX_LENGTH: u32 = 6000;
/// Words that atomics work on, of each device.
pub const COUNTERS: u8 = 2;

/// The service of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Datagrams between two queue pairs.
    Ud,
    /// Extended reliable connection: the first end is the initiator.
    Xrc,
}

impl Kind {
    /// Whether everything arrives, or the sender is told that it may not have.
    pub fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::Xrc)
    }
}

/// Two queue pairs that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The devices; they may be the same.
    pub devices: [u8; 2],
    /// The service.
    pub kind: Kind,
    /// Base-2 logarithm of the path MTU.
    pub log_mtu: u8,
    /// Local ACK timeout.
    pub timeout: u8,
    /// Retries.
    pub retry_count: u8,
    /// What is waited at least where a receive is not there.
    pub min_rnr_timer: u8,
    /// Reads and atomics in flight, each way.
    pub depth: u8,
    /// Receives are taken from the shared queue of the device.
    pub shared: bool,
}

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct End {
    /// Index in [`Plan::connections`].
    pub connection: usize,
    /// 0 or 1.
    pub side: usize,
}

impl End {
    /// The other end.
    pub fn peer(self) -> Self {
        Self {
            side: 1 - self.side,
            ..self
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "c{}.{}", self.connection, self.side)
    }
}

/// One thing that happens. What cannot be done when its turn comes (a device is off, a queue is
/// full) is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Posts a send.
    Send {
        /// By whom.
        end: End,
        /// Bytes.
        length: u32,
        /// With immediate data; unreliable ones always have them.
        immediate: bool,
    },
    /// Posts a write into memory of the peer that nothing else is written to.
    Write {
        /// By whom.
        end: End,
        /// Bytes.
        length: u32,
        /// With immediate data.
        immediate: bool,
    },
    /// Posts a read.
    Read {
        /// By whom.
        end: End,
        /// Bytes.
        length: u32,
    },
    /// Posts an atomic on a word that all connections to its device share.
    FetchAdd {
        /// By whom.
        end: End,
        /// Which word.
        counter: u8,
        /// What is added.
        operand: u64,
    },
    /// The same; it compares with what the word is when this is posted.
    CompareSwap {
        /// By whom.
        end: End,
        /// Which word.
        counter: u8,
        /// What is to be there.
        operand: u64,
    },
    /// Posts a write by a key that there is not.
    BadKey {
        /// By whom.
        end: End,
    },
    /// Posts receives.
    Receive {
        /// Where.
        end: End,
        /// How many.
        count: u8,
    },
    /// The network is like this from now on.
    Network(Faults),
    /// Cuts two devices off from each other.
    Cut(u8, u8),
    /// Takes all cuts back.
    Heal,
    /// A device goes, with all it holds.
    Stop(u8),
    /// It comes back, without any of it.
    Start(u8),
    /// Both ends are connected anew, if their devices are on.
    Reconnect(usize),
    /// Microseconds pass.
    Wait(u32),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with = |immediate: bool| if immediate { " with immediate" } else { "" };
        match *self {
            Self::Send {
                end,
                length,
                immediate,
            } => write!(f, "{end} sends {length} bytes{}", with(immediate)),
            Self::Write {
                end,
                length,
                immediate,
            } => write!(f, "{end} writes {length} bytes{}", with(immediate)),
            Self::Read { end, length } => write!(f, "{end} reads {length} bytes"),
            Self::FetchAdd {
                end,
                counter,
                operand,
            } => write!(f, "{end} adds {operand:#x} to word {counter}"),
            Self::CompareSwap {
                end,
                counter,
                operand,
            } => write!(
                f,
                "{end} compares and swaps word {counter} for {operand:#x}"
            ),
            Self::BadKey { end } => write!(f, "{end} writes by a key that there is not"),
            Self::Receive { end, count } => write!(f, "{end} posts {count} receives"),
            Self::Network(faults) if faults.none() => write!(f, "the network is well"),
            Self::Network(faults) => {
                write!(f, "the network:")?;
                for (name, value) in [
                    ("loss", faults.loss),
                    ("duplicate", faults.duplicate),
                    ("corrupt", faults.corrupt),
                    ("reorder", faults.reorder),
                    ("delay (ms)", faults.delay),
                    ("rate (bit/s)", faults.rate as f64),
                ] {
                    if value != 0.0 {
                        write!(f, " {name} {value:.3}")?;
                    }
                }
                Ok(())
            }
            Self::Cut(a, b) => write!(f, "devices {a} and {b} are cut off from each other"),
            Self::Heal => write!(f, "all cuts are healed"),
            Self::Stop(device) => write!(f, "device {device} goes"),
            Self::Start(device) => write!(f, "device {device} comes back"),
            Self::Reconnect(connection) => write!(f, "c{connection} is connected anew"),
            Self::Wait(microseconds) => write!(f, "{microseconds} us pass"),
        }
    }
}

/// All that happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Of the network's faults and of the data.
    pub seed: u64,
    /// How many.
    pub devices: u8,
    /// The connections; those that no step uses are not made.
    pub connections: Vec<Connection>,
    /// What happens, in this order. When it is over the network is made well, devices come back,
    /// and all has to end well.
    pub steps: Vec<Step>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, {} devices", self.seed, self.devices)?;
        for (index, connection) in self.connections.iter().enumerate() {
            if !self.uses(index) {
                continue;
            }
            let Connection {
                devices: [a, b],
                kind,
                ..
            } = connection;
            let shared = if connection.shared {
                ", shared receives"
            } else {
                ""
            };
            writeln!(
                f,
                "  c{index}: {kind:?} from device {a} to {b}, MTU {}, timeout {}, {} retries, \
                 depth {}{shared}",
                1u32 << connection.log_mtu,
                connection.timeout,
                connection.retry_count,
                connection.depth,
            )?;
        }
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(f, "  {number:3}. {step}")?;
        }
        Ok(())
    }
}

impl Plan {
    /// Whether a step uses a connection.
    pub fn uses(&self, connection: usize) -> bool {
        self.steps
            .iter()
            .any(|step| step.connection() == Some(connection))
    }

    /// The plan of a seed.
    pub fn from_seed(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let random = &mut random;
        let devices = random.pick(&[2, 2, 3, 3, 4, 5, 6]);
        let connections: Vec<Connection> = (0..1 + random.below(2 + u64::from(devices)))
            .map(|_| connection(random, devices))
            .collect();
        let mut steps = Vec::new();
        if !random.one_in(4) {
            steps.push(Step::Network(faults(random)));
        }
        let mut off = None;
        for _ in 0..20 + random.below(100) {
            steps.extend(step(random, &connections, devices, &mut off));
        }
        Self {
            seed,
            devices,
            connections,
            steps,
        }
    }
}

impl Step {
    /// The connection that it concerns.
    pub fn connection(&self) -> Option<usize> {
        match *self {
            Self::Send { end, .. }
            | Self::Write { end, .. }
            | Self::Read { end, .. }
            | Self::FetchAdd { end, .. }
            | Self::CompareSwap { end, .. }
            | Self::BadKey { end }
            | Self::Receive { end, .. } => Some(end.connection),
            Self::Reconnect(connection) => Some(connection),
            _ => None,
        }
    }
}

fn connection(random: &mut Random, devices: u8) -> Connection {
    let a = random.below(devices.into()) as u8;
    let b = if random.one_in(8) {
        a
    } else {
        let others = u64::from(devices) - 1;
        (a + 1 + random.below(others) as u8) % devices
    };
    let kind = random.pick(&[Kind::Rc, Kind::Rc, Kind::Rc, Kind::Xrc, Kind::Uc, Kind::Ud]);
    Connection {
        devices: [a, b],
        kind,
        log_mtu: random.pick(&[8, 9, 10, 12]),
        // 4 to 67 ms, more than a frame and its answer are ever delayed.
        timeout: random.pick(&[10, 11, 12, 14]),
        retry_count: random.pick(&[3, 5, 7, 7, 7]),
        // 60 us to 2.6 ms.
        min_rnr_timer: random.pick(&[5, 12, 16]),
        depth: random.pick(&[1, 2, 16]),
        shared: kind == Kind::Rc && random.one_in(3),
    }
}

fn length(random: &mut Random, connection: &Connection) -> u32 {
    let mtu = 1u32 << connection.log_mtu;
    let length = match random.below(8) {
        0 => 0,
        1 => 1,
        2 => mtu - 1 + random.below(3) as u32,
        3 => 2 * mtu - 1 + random.below(3) as u32,
        4 | 5 => random.below(200) as u32,
        _ => random.below(MAX_LENGTH.into()) as u32,
    };
    match connection.kind {
        Kind::Ud => length.min(mtu),
        _ => length.min(MAX_LENGTH),
    }
}

fn faults(random: &mut Random) -> Faults {
    let mut part = |most: f64| {
        if random.one_in(2) {
            0.0
        } else {
            random.below(1000) as f64 / 1000.0 * most
        }
    };
    Faults {
        loss: part(0.3),
        duplicate: part(0.2),
        corrupt: part(0.1),
        reorder: part(0.3),
        delay: part(1.5),
        rate: random.pick(&[0, 0, 2_000_000_000, 10_000_000_000]),
        ..Faults::default()
    }
}

/// The next step, or two that belong together; `off` is the device that is off.
fn step(
    random: &mut Random,
    connections: &[Connection],
    devices: u8,
    off: &mut Option<u8>,
) -> Vec<Step> {
    let index = random.below(connections.len() as u64) as usize;
    let connection = &connections[index];
    let side = match connection.kind {
        Kind::Xrc => 0,
        _ => random.below(2) as usize,
    };
    let end = End {
        connection: index,
        side,
    };
    let step = match random.below(40) {
        0..=8 => {
            let send = Step::Send {
                end,
                length: length(random, connection),
                immediate: random.one_in(2),
            };
            // Most find a receive; others wait for one.
            let receive = Step::Receive {
                end: end.peer(),
                count: 1,
            };
            return match random.below(4) {
                0 => vec![send],
                1 => vec![send, receive],
                _ => vec![receive, send],
            };
        }
        9..=14 if connection.kind != Kind::Ud => Step::Write {
            end,
            length: length(random, connection),
            immediate: random.one_in(3),
        },
        15..=18 if connection.kind.is_reliable() => Step::Read {
            end,
            length: length(random, connection),
        },
        19..=21 if connection.kind.is_reliable() => Step::FetchAdd {
            end,
            counter: random.below(COUNTERS.into()) as u8,
            operand: random.next(),
        },
        22..=23 if connection.kind.is_reliable() => Step::CompareSwap {
            end,
            counter: random.below(COUNTERS.into()) as u8,
            operand: random.next(),
        },
        24 if connection.kind.is_reliable() && random.one_in(8) => Step::BadKey { end },
        25..=27 => Step::Receive {
            end: End {
                connection: index,
                side: match connection.kind {
                    Kind::Xrc => 1,
                    _ => side,
                },
            },
            count: 1 + random.below(4) as u8,
        },
        28..=30 => Step::Network(faults(random)),
        24 => Step::Network(Faults::default()),
        31 => {
            let a = random.below(devices.into()) as u8;
            let b = (a + 1 + random.below(u64::from(devices) - 1) as u8) % devices;
            Step::Cut(a, b)
        }
        32 | 33 => Step::Heal,
        34 if random.one_in(2) => match off.take() {
            Some(device) => Step::Start(device),
            None => {
                let device = random.below(devices.into()) as u8;
                *off = Some(device);
                Step::Stop(device)
            }
        },
        35 if random.one_in(2) => Step::Reconnect(index),
        _ => Step::Wait(random.pick(&[1, 10, 100, 1000, 5000, 40_000])),
    };
    vec![step]
}
