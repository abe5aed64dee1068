// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two ends, connected queue pairs between them, and messages that are verified.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use crate::agent::{Hello, Operation, QpMade, Side, NONE};
use crate::expect;
use crate::report::{Check, Outcome, Report};
use crate::sys::*;
use crate::verbs::{BufferKind, Completion, Errno, QpOptions, SendWork};

/// How long anything may take that is expected to happen. Guests without hardware virtualisation
/// on a busy machine are slow.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// How long to wait for what is expected not to happen.
pub const SHORT: Duration = Duration::from_millis(300);

/// Bytes around every target that must stay as they are.
const GUARD: usize = 64;
/// What they hold.
const GUARD_BYTE: u8 = 0xa5;

/// Every right.
pub const ALL_ACCESS: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
/// And the right of atomic operations, which not every device has.
pub const ATOMIC_ACCESS: u32 = ALL_ACCESS | IBV_ACCESS_REMOTE_ATOMIC;

/// Says what went wrong with an errno.
pub trait At<T> {
    /// Adds `what` was being done.
    fn at(self, what: &str) -> Check<T>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, what: &str) -> Check<T> {
        self.map_err(|errno| Outcome::Failed(format!("{what}: {errno}")))
    }
}

/// Both ends.
pub struct Bench {
    /// This end.
    pub here: Side,
    /// The other end.
    pub there: Side,
    /// What this end said of itself.
    pub hello_here: Hello,
    /// What the other end said of itself.
    pub hello_there: Hello,
    /// `ibv_mtu` of all paths.
    pub mtu: u32,
    seed: u64,
}

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// This one.
    Here,
    /// The other one.
    There,
}

/// ACK timeout code of pairs that do not care.
pub static ACK_TIMEOUT: AtomicU8 = AtomicU8::new(16);

/// How a connected pair is made.
#[derive(Clone, Copy, Debug)]
pub struct PairOptions {
    /// Bytes of each end's buffer.
    pub size: usize,
    /// Rights of the regions.
    pub mr_access: u32,
    /// Rights of the queue pairs.
    pub qp_access: u32,
    /// Queue pair.
    pub qp: QpOptions,
    /// Entries of a completion queue.
    pub cq_entries: u32,
    /// Extended polling.
    pub cq_extended: bool,
    /// ACK timeout code.
    pub timeout: u8,
    /// Retries.
    pub retry: u8,
    /// Retries while not ready.
    pub rnr_retry: u8,
    /// Timer code told to a peer while not ready.
    pub rnr_timer: u8,
    /// Completions raise events on a channel of their own.
    pub events: bool,
    /// They raise them on this channel instead.
    pub channel: Option<u64>,
    /// Completion vector.
    pub vector: u32,
}

impl Default for PairOptions {
    fn default() -> Self {
        Self {
            size: 128 << 10,
            mr_access: ALL_ACCESS,
            qp_access: ALL_ACCESS,
            qp: QpOptions {
                send_wr: 16,
                recv_wr: 16,
                send_sge: 1,
                recv_sge: 1,
                inline: 0,
                signal_all: false,
                extended: false,
                direct: 0,
            },
            cq_entries: 64,
            cq_extended: false,
            timeout: ACK_TIMEOUT.load(Ordering::Relaxed),
            retry: 7,
            rnr_retry: 7,
            rnr_timer: 12,
            events: false,
            channel: None,
            vector: 0,
        }
    }
}

/// What one end of a pair has.
#[derive(Clone, Copy, Debug)]
pub struct PairEnd {
    /// Protection domain.
    pub pd: u64,
    /// Channel, or [`NONE`].
    pub channel: u64,
    /// Completion queue of sends.
    pub send_cq: u64,
    /// Completion queue of receives.
    pub recv_cq: u64,
    /// Queue pair.
    pub qp: QpMade,
    /// Buffer.
    pub buffer: u64,
    /// Its address.
    pub address: u64,
    /// Region over all of it.
    pub mr: u64,
    /// Its local key.
    pub lkey: u32,
    /// Its remote key.
    pub rkey: u32,
}

/// Two connected queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// This end.
    pub here: PairEnd,
    /// The other end.
    pub there: PairEnd,
}

/// Where the parts of a message are in a buffer: offset and length.
pub type Pieces = Vec<(usize, usize)>;

/// A verified message.
pub struct Message {
    /// `ibv_wr_opcode`.
    pub opcode: u32,
    /// Flags beyond signalled.
    pub flags: u32,
    /// Pieces of the end that posts.
    pub local: Pieces,
    /// Pieces of the other end; one for reads and writes.
    pub remote: Pieces,
}

impl Message {
    /// A message in one piece each, at odd addresses.
    pub fn simple(opcode: u32, length: usize) -> Self {
        Self {
            opcode,
            flags: 0,
            local: vec![(4096 + 13, length)],
            remote: vec![(4096 + 29, length)],
        }
    }

    fn length(&self) -> usize {
        self.local.iter().map(|piece| piece.1).sum()
    }

    fn receives(&self) -> bool {
        matches!(
            self.opcode,
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM
        )
    }

    fn immediate(&self) -> bool {
        matches!(
            self.opcode,
            IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM
        )
    }
}

impl Bench {
    /// Greets both ends.
    pub fn new(mut here: Side, mut there: Side, mtu: Option<u32>) -> Result<Self, String> {
        let greet = |side: &mut Side| {
            let name = side.name;
            side.hello().map_err(|errno| format!("{name}: {errno}"))
        };
        let (hello_here, hello_there) = (greet(&mut here)?, greet(&mut there)?);
        for hello in [&hello_here, &hello_there] {
            if hello.port_state != IBV_PORT_ACTIVE {
                return Err(format!("port state is {}, not active", hello.port_state));
            }
        }
        Ok(Self {
            mtu: mtu.unwrap_or(hello_here.mtu.min(hello_there.mtu)),
            here,
            there,
            hello_here,
            hello_there,
            seed: 1,
        })
    }

    /// Bytes of the path MTU.
    pub fn mtu_bytes(&self) -> usize {
        128 << self.mtu
    }

    /// A seed not used before.
    pub fn seed(&mut self) -> u64 {
        self.seed += 1;
        self.seed
    }

    /// An end.
    pub fn side(&mut self, end: End) -> &mut Side {
        match end {
            End::Here => &mut self.here,
            End::There => &mut self.there,
        }
    }

    /// Destroys everything at both ends.
    pub fn reset(&mut self) -> Check {
        let mut result = Ok(());
        for end in [End::Here, End::There] {
            let side = self.side(end);
            let name = side.name;
            let reset = match side.reset().at("reset") {
                Ok(0) => Ok(()),
                Ok(failed) => Err(format!("{name}: {failed} destroys failed").into()),
                Err(outcome) => Err(outcome),
            };
            result = result.and(reset);
        }
        result
    }

    /// Enters the result of a check and gives back all that it made, which has to go well too.
    pub fn conclude(&mut self, report: &mut Report, name: &str, result: Check) {
        let reset = self.reset();
        report.enter(name, result.and(reset));
    }

    /// Makes one end of a pair, its queue pair in RESET.
    pub fn end(&mut self, end: End, options: &PairOptions) -> Check<PairEnd> {
        let side = self.side(end);
        let pd = side.pd().at("ibv_alloc_pd")?;
        let channel = match options.channel {
            Some(channel) => channel,
            None if options.events => side.channel().at("ibv_create_comp_channel")?,
            None => NONE,
        };
        let mut cq = || {
            side.cq(
                options.cq_entries,
                channel,
                options.vector,
                options.cq_extended,
            )
            .at("ibv_create_cq")
        };
        let (send_cq, recv_cq) = (cq()?, cq()?);
        let qp = side
            .qp(pd, send_cq, recv_cq, &options.qp)
            .at("ibv_create_qp")?;
        let (buffer, address) = side.buffer(options.size, BufferKind::Plain).at("mmap")?;
        let (mr, lkey, rkey) = side
            .mr(pd, buffer, 0, options.size, options.mr_access)
            .at("ibv_reg_mr")?;
        Ok(PairEnd {
            pd,
            channel,
            send_cq,
            recv_cq,
            qp,
            buffer,
            address,
            mr,
            lkey,
            rkey,
        })
    }

    /// Makes a connected pair.
    pub fn pair(&mut self, options: &PairOptions) -> Check<Pair> {
        let pair = Pair {
            here: self.end(End::Here, options)?,
            there: self.end(End::There, options)?,
        };
        self.connect(&pair, options)?;
        Ok(pair)
    }

    /// Takes both queue pairs from RESET to RTS.
    pub fn connect(&mut self, pair: &Pair, options: &PairOptions) -> Check {
        let psn = (self.seed() as u32).wrapping_mul(0x9e37) & 0xff_ffff;
        let mtu = self.mtu;
        let gids = [self.hello_here.gid, self.hello_there.gid];
        let ends = [
            (End::Here, pair.here, pair.there, gids[1]),
            (End::There, pair.there, pair.here, gids[0]),
        ];
        for (end, own, peer, gid) in ends {
            let side = self.side(end);
            side.call(
                Operation::ToInit,
                &[own.qp.qp, u64::from(options.qp_access)],
            )
            .at("to INIT")?;
            side.call(
                Operation::ToRtr,
                &[
                    own.qp.qp,
                    u64::from(peer.qp.qpn),
                    gid[0],
                    gid[1],
                    u64::from(psn),
                    u64::from(mtu),
                    u64::from(options.rnr_timer),
                ],
            )
            .at("to RTR")?;
        }
        for (end, own, ..) in ends {
            self.side(end)
                .call(
                    Operation::ToRts,
                    &[
                        own.qp.qp,
                        u64::from(psn),
                        u64::from(options.timeout),
                        u64::from(options.retry),
                        u64::from(options.rnr_retry),
                    ],
                )
                .at("to RTS")?;
        }
        Ok(())
    }

    /// Destroys what a pair is made of.
    pub fn destroy(&mut self, pair: &Pair) -> Check {
        for (end, own) in [(End::Here, pair.here), (End::There, pair.there)] {
            let side = self.side(end);
            for object in [own.qp.qp, own.mr, own.buffer, own.send_cq, own.recv_cq] {
                // A check may have destroyed it already.
                let _ = side.destroy(object);
            }
            if own.channel != NONE {
                side.destroy(own.channel).at("destroy")?;
            }
            side.destroy(own.pd).at("destroy")?;
        }
        Ok(())
    }

    /// Waits for a completion that must come.
    pub fn completion(&mut self, end: End, cq: u64) -> Check<Completion> {
        let side = self.side(end);
        let name = side.name;
        side.poll(cq, PATIENCE)
            .at("ibv_poll_cq")?
            .ok_or_else(|| Outcome::Failed(format!("{name}: no completion within {PATIENCE:?}")))
    }

    /// Waits for a completion and compares its status.
    pub fn status(&mut self, end: End, cq: u64, expected: u32, what: &str) -> Check<Completion> {
        let completion = self.completion(end, cq)?;
        expect!(
            status_name(completion.status),
            status_name(expected),
            "{what}"
        );
        Ok(completion)
    }

    /// Sends a message from here and verifies every byte and every field of its completions.
    pub fn transfer(&mut self, pair: &Pair, message: &Message) -> Check {
        let seed = self.prepare(pair, message)?;
        self.post(pair, message, seed)?;
        self.finish(pair, message, seed)
    }

    /// Fills source and target, posts the receive; gives the message's seed.
    pub fn prepare(&mut self, pair: &Pair, message: &Message) -> Check<u64> {
        let seed = self.seed();
        let ends = [
            (End::Here, pair.here.buffer, &message.local),
            (End::There, pair.there.buffer, &message.remote),
        ];
        let read = message.opcode == IBV_WR_RDMA_READ;
        let [source, target] = if read { [ends[1], ends[0]] } else { ends };
        let mut start = 0;
        for &(offset, length) in source.2 {
            self.side(source.0)
                .fill_part(source.1, offset, length, seed, start)
                .at("fill")?;
            start += length as u64;
        }
        let (first, end) = span(target.2);
        self.side(target.0)
            .set(
                target.1,
                first - GUARD,
                end + GUARD - (first - GUARD),
                GUARD_BYTE,
            )
            .at("set")?;
        if message.receives() {
            let write = message.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
            let entries = if write {
                Vec::new()
            } else {
                entries(&pair.there, &message.remote)
            };
            self.there
                .post_recv(pair.there.qp.qp, seed, &entries)
                .at("ibv_post_recv")?;
        }
        Ok(seed)
    }

    /// Posts a prepared message.
    pub fn post(&mut self, pair: &Pair, message: &Message, seed: u64) -> Check {
        let remote = message.remote.first().map_or(0, |piece| piece.0);
        let mut local = entries(&pair.here, &message.local);
        let inline = message.flags & IBV_SEND_INLINE != 0;
        if inline {
            // Inline data need no key.
            for entry in &mut local {
                entry.2 = 0xdead_beef;
            }
        }
        let work = SendWork {
            wr_id: !seed,
            opcode: message.opcode,
            flags: message.flags | IBV_SEND_SIGNALED,
            immediate: immediate(seed),
            remote_address: pair.there.address + remote as u64,
            rkey: pair.there.rkey,
            operands: (0, 0),
            entries: local,
        };
        self.here
            .post_send(pair.here.qp.qp, &work)
            .at("ibv_post_send")?;
        if inline {
            // They may be overwritten as soon as they are posted.
            for &(offset, length) in &message.local {
                self.here
                    .set(pair.here.buffer, offset, length, 0xee)
                    .at("set")?;
            }
        }
        Ok(())
    }

    /// Waits for a posted message's completions and verifies them and the data.
    pub fn finish(&mut self, pair: &Pair, message: &Message, seed: u64) -> Check {
        let length = message.length();
        let sent = self.status(End::Here, pair.here.send_cq, IBV_WC_SUCCESS, "send status")?;
        expect!(sent.wr_id, !seed, "wr_id of the send");
        expect!(sent.qpn, pair.here.qp.qpn, "queue pair of the send");
        let opcode = match message.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => IBV_WC_SEND,
            IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
            _ => IBV_WC_RDMA_WRITE,
        };
        expect!(sent.opcode, opcode, "opcode of the send");
        if message.receives() {
            self.finish_receive(pair, message, seed)?;
        }
        let ends = [
            (End::Here, pair.here.buffer, &message.local),
            (End::There, pair.there.buffer, &message.remote),
        ];
        let read = message.opcode == IBV_WR_RDMA_READ;
        let (end, buffer, pieces) = if read { ends[0] } else { ends[1] };
        self.verify(end, buffer, pieces, length, seed)
    }

    fn finish_receive(&mut self, pair: &Pair, message: &Message, seed: u64) -> Check {
        let received = self.status(
            End::There,
            pair.there.recv_cq,
            IBV_WC_SUCCESS,
            "receive status",
        )?;
        let opcode = match message.opcode {
            IBV_WR_RDMA_WRITE_WITH_IMM => IBV_WC_RECV_RDMA_WITH_IMM,
            _ => IBV_WC_RECV,
        };
        expect!(received.opcode, opcode, "opcode of the receive");
        expect!(received.wr_id, seed, "wr_id of the receive");
        expect!(received.qpn, pair.there.qp.qpn, "queue pair of the receive");
        expect!(
            received.byte_len as usize,
            message.length(),
            "length of the receive"
        );
        let flag = received.flags & IBV_WC_WITH_IMM != 0;
        expect!(flag, message.immediate(), "immediate flag");
        if flag {
            expect!(received.immediate, immediate(seed), "immediate data");
        }
        Ok(())
    }

    /// Verifies the target of a message, and that nothing around it was touched.
    fn verify(
        &mut self,
        end: End,
        buffer: u64,
        pieces: &Pieces,
        length: usize,
        seed: u64,
    ) -> Check {
        let (first, last) = span(pieces);
        let side = self.side(end);
        let mut start = 0;
        let mut gap = first - GUARD;
        for &(offset, piece) in pieces {
            // A receive may be larger than the message.
            let piece = piece.min(length - start);
            let wrong = side
                .check_part(buffer, offset, piece, seed, start as u64)
                .at("check")?;
            expect!(wrong, None, "first wrong byte of the piece at {offset:#x}");
            let wrong = side
                .check_set(buffer, gap, offset - gap, GUARD_BYTE)
                .at("check")?;
            expect!(wrong, None, "first touched byte before {offset:#x}");
            gap = offset + piece;
            start += piece;
        }
        let wrong = side
            .check_set(buffer, gap, last + GUARD - gap, GUARD_BYTE)
            .at("check")?;
        expect!(wrong, None, "first touched byte behind the target");
        expect!(start, length, "bytes verified");
        Ok(())
    }

    /// A few messages both ways over a pair that must work.
    pub fn exchange(&mut self, pair: &Pair) -> Check {
        for opcode in [IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ] {
            self.transfer(pair, &Message::simple(opcode, 5000))?;
        }
        self.turn();
        let back = Pair {
            here: pair.there,
            there: pair.here,
        };
        let result = self.transfer(&back, &Message::simple(IBV_WR_SEND_WITH_IMM, 700));
        self.turn();
        result
    }

    /// Swaps the ends, for messages that go the other way.
    pub fn turn(&mut self) {
        std::mem::swap(&mut self.here, &mut self.there);
        std::mem::swap(&mut self.hello_here, &mut self.hello_there);
    }
}

/// From the first to behind the last byte of pieces in rising order.
fn span(pieces: &Pieces) -> (usize, usize) {
    let first = pieces.first().map_or(GUARD, |piece| piece.0);
    let end = pieces.last().map_or(GUARD, |piece| piece.0 + piece.1);
    (first, end)
}

/// Scatter/gather entries of an end's buffer.
pub fn entries(end: &PairEnd, pieces: &Pieces) -> Vec<(u64, u32, u32)> {
    pieces
        .iter()
        .map(|&(offset, length)| (end.address + offset as u64, length as u32, end.lkey))
        .collect()
}

/// Immediate data of a message.
fn immediate(seed: u64) -> u32 {
    (seed as u32).wrapping_mul(0x0101_0107).to_be()
}

/// The name of a status, as the verbs spell it.
pub fn status_name(status: u32) -> String {
    // SAFETY: the function gives a static string for any number.
    let name = unsafe { std::ffi::CStr::from_ptr(ibv_wc_status_str(status)) };
    format!("{} ({status})", name.to_string_lossy())
}
