// SPDX-License-Identifier: GPL-2.0
//! What a peer may do wrong.

use std::net::Ipv4Addr;

use ferrite_split::*;

use crate::channel::{Channel, Done};
use crate::{bytes, join, message, words, Peer, SESSION, WISH};

const YOURS: u32 = REFERENCE_YOURS;

/// The first pool that a peer has only because it was asked for it: behind one of messages and three of other frames.
const FIRST_MORE: u32 = 4;
/// How many of those it has, at the most.
const MORE_POOLS: usize = 3;

/// Something wrong.
pub struct Attack {
    /// What the other counts it as.
    pub counter: &'static str,
    /// What it is.
    pub name: &'static str,
    /// Who does it, if not both.
    role: Option<Role>,
    /// It begins with a wish for more pools before there is a data channel.
    pub is_early: bool,
    /// Does it.
    pub run: fn(&mut Peer) -> Result<(), String>,
}

impl Attack {
    const fn new(
        counter: &'static str,
        name: &'static str,
        run: fn(&mut Peer) -> Result<(), String>,
    ) -> Self {
        Self {
            counter,
            name,
            role: None,
            is_early: false,
            run,
        }
    }

    const fn early(mut self) -> Self {
        self.is_early = true;
        self
    }

    const fn by(mut self, role: Role) -> Self {
        self.role = Some(role);
        self
    }

    /// Whether it is done by who has that role.
    pub fn is_by(&self, role: Role) -> bool {
        self.role.is_none_or(|own| own == role)
    }
}

fn immediate(pool: u32, element: u32, size: u32) -> Immediate {
    Immediate {
        pool,
        element,
        size,
    }
}

/// An answer of an I/O unit to the first thing that a host asks: its MTU.
fn answer(peer: &mut Peer, status: u32, data: &[u8]) -> Result<(), String> {
    let sequence = peer.listen_for(Function::CfgUtilRequest)?;
    let operation = u32::from(Operation::GetMtu.number());
    let header = words(&[(operation << 16) | status, data.len() as u32]);
    let body = [header, data.to_vec()].concat();
    let theirs = peer.theirs;
    peer.raw(&message(
        Function::CfgUtilReply.number(),
        theirs,
        sequence,
        &body,
    ))
}

/// Has a pool of the other given up.
fn flush(peer: &mut Peer, index: u32) -> Result<(), String> {
    peer.control(Function::BufferPoolFlushRequest, &words(&[YOURS | index]))?;
    peer.listen_for(Function::BufferPoolFlushReply).map(drop)
}

/// All of them; each on a connection of its own.
pub const ATTACKS: &[Attack] = &[
    Attack::new("truncated", "a message that ends in its header", |peer| {
        peer.raw(&[0, 1, 0, 1, 0])
    }),
    Attack::new("truncated", "more entries than there are", |peer| {
        peer.control(Function::BufferRecvPoolUpdate, &words(&[u32::MAX, 5, 0, 1]))
    }),
    Attack::new("too_long", "bytes behind the last", |peer| {
        peer.control(Function::BufferRecvPoolGet, &words(&[1, 2, 3, 4]))
    }),
    Attack::new("bad_function", "a function that there is not", |peer| {
        peer.number(10, &[])
    }),
    Attack::new("bad_version", "a version that there is not", |peer| {
        let mut bytes = message(2, SESSION, peer.sequence + 1, &words(&[1, 2, 3]));
        bytes[3] = 2;
        peer.raw(&bytes)
    }),
    Attack::new("other_session", "a message of another session", |peer| {
        peer.raw(&message(
            2,
            SESSION ^ 1,
            peer.sequence + 1,
            &words(&[1, 2, 3]),
        ))
    }),
    Attack::new("replayed", "a message again", |peer| {
        peer.raw(&message(2, SESSION, peer.sequence, &words(&[1, 2, 3])))
    }),
    Attack::new("replayed", "a frame again", |peer| {
        let pool = peer.pool(PoolKind::Send)?.pool;
        peer.frame(YOURS | pool, 60)?;
        peer.data_sequence -= 1;
        peer.frame(YOURS | pool, 60)
    }),
    Attack::new("skipped", "a message before which one is missing", |peer| {
        peer.raw(&message(2, SESSION, peer.sequence + 2, &words(&[1, 2, 3])))
    }),
    Attack::new("wrong_channel", "a frame on the control channel", |peer| {
        let pool = peer.pool(PoolKind::Send)?.pool;
        let body = [words(&[YOURS | pool, 1]), vec![0]].concat();
        peer.control(Function::SendData, &body)
    }),
    Attack::new(
        "wrong_channel",
        "a control message with the frames",
        |peer| {
            let bytes = message(2, SESSION, 1, &words(&[1, 2, 3]));
            peer.data.send(&bytes).map(drop)
        },
    ),
    Attack::new("no_entries", "a list of nothing", |peer| {
        peer.control(Function::BufferRecvPoolUpdate, &words(&[0]))
    }),
    Attack::new("reserved", "a reserved field that is not zero", |peer| {
        let mut entry = peer.entry(9, 1, 4, 100);
        entry.reserved = 1;
        peer.announce(&entry)
    }),
    Attack::new("pool_twice", "a pool that is there already", |peer| {
        let entry = peer.entry(5, 1, 4, 100);
        peer.announce(&entry)
    }),
    Attack::new("too_many_pools", "more pools than there may be", |peer| {
        // Two are there; nothing is sent after the first that is too many.
        for index in 0..MAX_POOLS as u32 - 1 {
            let entry = peer.entry(100 + index, 1, 4, 100);
            peer.announce(&entry)?;
        }
        Ok(())
    }),
    Attack::new(
        "pool_shape",
        "a pool of more elements than any may have",
        |peer| {
            let entry = peer.entry(9, 1, u32::MAX, 1);
            peer.announce(&entry)
        },
    ),
    Attack::new("pool_shape", "a pool whose end has no address", |peer| {
        let mut entry = peer.entry(9, 1, 4, 100);
        entry.address = u64::MAX - 398;
        peer.announce(&entry)
    }),
    Attack::new(
        "pool_kind",
        "a pool to be read, where frames are pushed",
        |peer| {
            let entry = peer.entry(9, PoolKind::Read.number(), 4, 100);
            peer.announce(&entry)
        },
    ),
    Attack::new("no_such_pool", "an element of no pool", |peer| {
        peer.control(Function::BufferRecvPoolUpdate, &words(&[1, 77, 0, 1]))
    }),
    Attack::new(
        "no_such_pool",
        "a frame in a pool that was given up",
        |peer| {
            let pool = peer.pool(PoolKind::Send)?.pool;
            flush(peer, pool)?;
            peer.frame(YOURS | pool, 60)
        },
    ),
    Attack::new(
        "pool_misused",
        "a frame told of in a pool of messages",
        |peer| {
            let pool = peer.pool(PoolKind::Send)?.pool;
            peer.control(
                Function::BufferRDMAIndicate,
                &words(&[1, YOURS | pool, 0, 60]),
            )
        },
    ),
    Attack::new("element_beyond", "immediate data beyond the pool", |peer| {
        let pool = peer.pool(PoolKind::Write)?;
        peer.write(60, immediate(pool.pool, pool.elements, 60))
    }),
    Attack::new(
        "element_beyond",
        "elements beyond the pool given back",
        |peer| peer.control(Function::BufferRecvPoolUpdate, &words(&[1, 5, 3, u32::MAX])),
    ),
    Attack::new(
        "element_idle",
        "elements given back that were not filled",
        |peer| {
            // Those of a pool that nothing was sent through yet.
            let entry = peer.entry(9, 1, 4, 14);
            peer.announce(&entry)?;
            peer.control(Function::BufferRecvPoolUpdate, &words(&[1, 9, 0, 1]))
        },
    ),
    Attack::new("frame_empty", "a frame without bytes", |peer| {
        let pool = peer.pool(PoolKind::Write)?.pool;
        peer.control(
            Function::BufferRDMAIndicate,
            &words(&[1, YOURS | pool, 0, 0]),
        )
    }),
    Attack::new("frame_beyond", "a frame larger than its element", |peer| {
        let pool = peer.pool(PoolKind::Write)?;
        let size = pool.element_size + 1;
        peer.write(size as usize, immediate(pool.pool, 0, size))
    }),
    Attack::new(
        "frame_torn",
        "a frame of another size than is told",
        |peer| {
            let pool = peer.pool(PoolKind::Write)?;
            peer.write(59, immediate(pool.pool, 0, 60))
        },
    ),
    Attack::new(
        "no_such_request",
        "an answer that nobody asked for",
        |peer| {
            let theirs = peer.theirs;
            peer.raw(&message(
                Function::BufferPoolFlushReply.number(),
                theirs,
                1,
                &[],
            ))
        },
    ),
    Attack::new("bad_operation", "an operation that there is not", |peer| {
        peer.control(Function::CfgUtilRequest, &words(&[99 << 16, 0]))
    }),
    Attack::new("bad_data", "an MTU that nobody has", |peer| {
        let operation = u32::from(Operation::SetMtu.number());
        peer.control(
            Function::CfgUtilRequest,
            &words(&[operation << 16, 4, u32::MAX]),
        )
    })
    .by(Role::Host),
    Attack::new("bad_data", "a link of an MTU that nobody has", |peer| {
        let operation = u32::from(Operation::LinkChanged.number());
        peer.control(
            Function::CfgUtilRequest,
            &words(&[operation << 16, 12, LINK_UP, 0, u32::MAX]),
        )
    })
    .by(Role::Unit),
    Attack::new("bad_data", "an answer that makes no sense", |peer| {
        answer(peer, 0, &words(&[u32::MAX]))
    })
    .by(Role::Unit),
    Attack::new("bad_status", "a status that there is not", |peer| {
        answer(peer, 9, &[])
    })
    .by(Role::Unit),
    Attack::new(
        "replayed",
        "more pools, wanted too early, in time, and then a message again",
        |peer| {
            // What was wanted too early has come to nothing; it is wanted again, as often as there may be more.
            let is_more = |pool: &PoolEntry| pool.pool >= FIRST_MORE;
            if peer.pools.iter().any(is_more) {
                return Err("a pool that was wanted before there was a data channel".into());
            }
            for count in 1..=MORE_POOLS {
                peer.control(Function::BufferRecvPoolGet, &words(&WISH))?;
                while peer.pools.iter().filter(|pool| is_more(pool)).count() < count {
                    peer.listen()?;
                }
            }
            peer.raw(&message(2, SESSION, peer.sequence, &words(&WISH)))
        },
    )
    .by(Role::Unit)
    .early(),
    // What the other's adapter refuses, so that it is as if the wire had gone.
    Attack::new("disconnected", "a write beyond the pool", |peer| {
        let pool = peer.pool(PoolKind::Write)?;
        let end = pool.address + u64::from(pool.elements) * u64::from(pool.element_size);
        match peer.data.write(end - 30, pool.key, &[0xee; 60], None)? {
            Done::Failed => Ok(()),
            other => Err(format!("it was written: {other:?}")),
        }
    }),
    Attack::new(
        "disconnected",
        "a write to a pool that was given up",
        |peer| {
            let pool = peer.pool(PoolKind::Write)?;
            flush(peer, pool.pool)?;
            // Its key is made invalid after the answer.
            for _ in 0..2000 {
                match peer.data.write(pool.address, pool.key, &[0xee; 60], None)? {
                    Done::Failed => return Ok(()),
                    _ => std::thread::sleep(std::time::Duration::from_millis(5)),
                }
            }
            Err("it can still be written".into())
        },
    ),
];

/// Something wrong with how an I/O unit answers a host that connects.
pub struct WrongAnswer {
    /// What the host counts it as.
    pub counter: &'static str,
    /// What it is.
    pub name: &'static str,
    /// Makes it of the right answer.
    pub change: fn(&mut Join),
}

/// All of them.
pub const ANSWERS: &[WrongAnswer] = &[
    WrongAnswer {
        counter: "bad_key",
        name: "an I/O unit that knows another key",
        change: |join| join.key ^= 1 << 20,
    },
    WrongAnswer {
        counter: "bad_version",
        name: "an answer in a version that there is not",
        change: |join| join.version += 1,
    },
    WrongAnswer {
        counter: "bad_join",
        name: "an answer to nobody",
        change: |join| join.peer_session = 0,
    },
    WrongAnswer {
        counter: "other_session",
        name: "an answer to somebody else",
        change: |join| join.peer_session ^= 1,
    },
];

/// Something wrong with how a host connects.
pub struct WrongJoin {
    /// What the I/O unit counts it as.
    pub counter: &'static str,
    /// What it is.
    pub name: &'static str,
    /// Does it, and sees that it is refused.
    pub run: fn(Ipv4Addr) -> Result<(), String>,
}

fn refused(unit: Ipv4Addr, join: &Join) -> Result<(), String> {
    match Channel::connect(unit, DEFAULT_PORT, &bytes(join)) {
        Ok(_) => Err("it is connected".into()),
        Err(_) => Ok(()),
    }
}

/// All of them.
pub const JOINS: &[WrongJoin] = &[
    WrongJoin {
        counter: "bad_join",
        name: "something else than a host",
        run: |unit| {
            let mut join = join(Role::Host, ferrite_split::Channel::Control, 0);
            join.magic ^= 1;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "bad_join",
        name: "a service that there is not",
        run: |unit| {
            let mut join = join(Role::Host, ferrite_split::Channel::Control, 0);
            join.service = 9;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "bad_join",
        name: "an I/O unit that comes to one",
        run: |unit| refused(unit, &join(Role::Unit, ferrite_split::Channel::Control, 0)),
    },
    WrongJoin {
        counter: "bad_version",
        name: "a version that there is not",
        run: |unit| {
            let mut join = join(Role::Host, ferrite_split::Channel::Control, 0);
            join.version += 1;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "bad_key",
        name: "another key",
        run: |unit| {
            let mut join = join(Role::Host, ferrite_split::Channel::Control, 0);
            join.key ^= 1 << 40;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "bad_key",
        name: "another key, with frames for somebody",
        run: |unit| {
            let peer = Peer::connect(unit)?;
            let mut join = join(Role::Host, ferrite_split::Channel::Data, peer.theirs);
            join.key ^= 1;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "bad_key",
        name: "another key, with frames for nobody",
        run: |unit| {
            let mut join = join(Role::Host, ferrite_split::Channel::Data, 77);
            join.key ^= 1;
            refused(unit, &join)
        },
    },
    WrongJoin {
        counter: "other_session",
        name: "frames for nobody",
        run: |unit| refused(unit, &join(Role::Host, ferrite_split::Channel::Data, 77)),
    },
    WrongJoin {
        // The connection ends in an orderly way then.
        counter: "disconnected",
        name: "a data channel twice",
        run: |unit| {
            let mut peer = Peer::connect(unit)?;
            let again = join(Role::Host, ferrite_split::Channel::Data, peer.theirs);
            refused(unit, &again)?;
            // The first is as it was.
            let pool = peer.pool(PoolKind::Send)?.pool;
            peer.frame(YOURS | pool, 60)?;
            peer.listen_for(Function::BufferRecvPoolUpdate).map(drop)
        },
    },
];
