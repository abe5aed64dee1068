// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One end of a check: verbs objects by number, and what can be done with them.
//!
//! The program that runs the checks has an agent of its own and commands another: in the same
//! process (loopback) or over TCP. Requests and answers are lists of 64-bit words.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::time::Duration;

use crate::direct::ListWork;
use crate::pattern;
use crate::sys::{IBV_MW_TYPE_1, IBV_WC_SUCCESS};
use crate::verbs::{
    pinned, BindWork, Buffer, BufferKind, Change, Channel, Completion, Context, Cq, Errno, Mr, Mw,
    Options, Pd, Qp, QpOptions, SendWork,
};

/// Stands for "none" where a number is expected.
pub const NONE: u64 = u64::MAX;

macro_rules! operations {
    ($($name:ident,)*) => {
        /// What an agent can be told to do.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u64)]
        pub enum Operation { $( #[allow(missing_docs)] $name, )* }

        impl Operation {
            fn from_number(number: u64) -> Option<Self> {
                [$( Operation::$name, )*].into_iter().find(|op| *op as u64 == number)
            }
        }
    };
}

operations! {
    Hello,
    Reset,
    MakePd,
    MakeChannel,
    MakeCq,
    MakeQp,
    MakeBuffer,
    MakeMr,
    ChangeMr,
    MoveMr,
    MakeList,
    MakeShared,
    ShareByKey,
    Pinned,
    MakeWindow,
    MakeForeign,
    ChangeMemory,
    Destroy,
    ToState,
    ToInit,
    ToRtr,
    ToRts,
    State,
    Fill,
    Check,
    Set,
    PostSend,
    PostRecv,
    PostList,
    Bind,
    Poll,
    Arm,
    Moderate,
    ResizeCq,
    ChannelEvent,
    AsyncEvent,
    Counter,
    Refused,
}

/// What the device counts (chapter 3 of its specification).
#[derive(Clone, Copy, Debug)]
pub enum Counter {
    /// Registrations by work request.
    Registrations,
    /// Uses of what had been registered so, and whose registration had not completed.
    EarlyUses,
}

impl Counter {
    /// What it is called in sysfs.
    fn name(self) -> &'static str {
        match self {
            Self::Registrations => "sq_registrations",
            Self::EarlyUses => "early_uses",
        }
    }
}

enum Object {
    Pd(Rc<Pd>),
    Channel(Rc<Channel>),
    Cq(Rc<Cq>),
    Qp(Qp),
    Buffer(Rc<Buffer>),
    /// With its type, `ibv_mw_type`.
    Window(Mw, u32),
    Mr(Mr),
    Foreign(#[allow(dead_code, reason = "held for its destructor")] Foreign),
}

/// Another process that has the device open and memory registered.
struct Foreign(std::process::Child);

impl Foreign {
    /// Starts it; also gives its local key and the address of its memory.
    fn new(device: &str) -> std::io::Result<(Self, u64, u64)> {
        use std::io::BufRead;
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .args(["hold", "--device", device])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()?;
        let out = child.stdout.take();
        let this = Self(child);
        let mut line = String::new();
        if let Some(out) = out {
            std::io::BufReader::new(out).read_line(&mut line)?;
        }
        let mut words = line.split_whitespace().map(str::parse);
        match (words.next(), words.next()) {
            (Some(Ok(key)), Some(Ok(address))) => Ok((this, key, address)),
            _ => Err(std::io::ErrorKind::InvalidData.into()),
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // It ends when its input does.
        drop(self.0.stdin.take());
        match self.0.wait() {
            Ok(status) if status.success() => {}
            ended => crate::report::complaint(format!("the other process: {ended:?}")),
        }
    }
}

/// The other process: registers memory, says its key and address, and stays until its input ends.
pub fn hold(options: &Options, shares: Option<usize>) -> Result<(), String> {
    let say = |errno: Errno| errno.to_string();
    let context = Context::open(options)?;
    let pd = Pd::new(&context).map_err(say)?;
    let buffer = Buffer::new(16 << 10, BufferKind::Plain).map_err(say)?;
    let mr = Mr::new(&pd, &buffer, 0, 16 << 10, crate::bench::ALL_ACCESS).map_err(say)?;
    let mut others = Vec::new();
    if let Some(shares) = shares {
        others.push(Mr::new(&pd, &buffer, 0, 16 << 10, 0).map_err(say)?);
        for _ in 0..shares {
            let domain = Pd::new(&context).map_err(say)?;
            others.push(Mr::shared(&domain, &mr, 0).map_err(say)?);
        }
    }
    println!("{} {}", mr.lkey(), buffer.address());
    let waited = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    waited.map(drop).map_err(|error| error.to_string())
}

/// One end.
pub struct Agent {
    // Before the context, and emptied from the newest to the oldest.
    objects: Vec<Option<Object>>,
    context: Rc<Context>,
}

/// Words of a request, taken one by one.
struct Words<'a>(std::slice::Iter<'a, u64>);

impl Words<'_> {
    fn next(&mut self) -> Result<u64, Errno> {
        self.0.next().copied().ok_or(Errno(libc::EPROTO))
    }

    fn u32(&mut self) -> Result<u32, Errno> {
        u32::try_from(self.next()?).map_err(|_| Errno(libc::EPROTO))
    }

    fn u16(&mut self) -> Result<u16, Errno> {
        u16::try_from(self.next()?).map_err(|_| Errno(libc::EPROTO))
    }

    fn u8(&mut self) -> Result<u8, Errno> {
        u8::try_from(self.next()?).map_err(|_| Errno(libc::EPROTO))
    }

    fn milliseconds(&mut self) -> Result<Duration, Errno> {
        Ok(Duration::from_millis(self.next()?))
    }

    fn entries(&mut self) -> Result<Vec<(u64, u32, u32)>, Errno> {
        let count = self.next()?;
        (0..count)
            .map(|_| Ok((self.next()?, self.u32()?, self.u32()?)))
            .collect()
    }
}

impl Agent {
    /// Opens a device.
    pub fn new(options: &Options) -> Result<Self, String> {
        Ok(Self {
            context: Context::open(options)?,
            objects: Vec::new(),
        })
    }

    fn clear(&mut self) {
        while self.objects.pop().is_some() {}
    }

    fn add(&mut self, object: Object) -> u64 {
        self.objects.push(Some(object));
        self.objects.len() as u64 - 1
    }

    fn object(&self, number: u64) -> Result<&Object, Errno> {
        self.objects
            .get(number as usize)
            .and_then(Option::as_ref)
            .ok_or(Errno(libc::ENOENT))
    }

    fn pd(&self, number: u64) -> Result<&Rc<Pd>, Errno> {
        match self.object(number)? {
            Object::Pd(pd) => Ok(pd),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    fn channel(&self, number: u64) -> Result<&Rc<Channel>, Errno> {
        match self.object(number)? {
            Object::Channel(channel) => Ok(channel),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    fn cq(&self, number: u64) -> Result<&Rc<Cq>, Errno> {
        match self.object(number)? {
            Object::Cq(cq) => Ok(cq),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    fn qp(&self, number: u64) -> Result<&Qp, Errno> {
        match self.object(number)? {
            Object::Qp(qp) => Ok(qp),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    fn buffer(&self, number: u64) -> Result<&Rc<Buffer>, Errno> {
        match self.object(number)? {
            Object::Buffer(buffer) => Ok(buffer),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    fn mr(&self, number: u64) -> Result<&Mr, Errno> {
        match self.object(number)? {
            Object::Mr(mr) => Ok(mr),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Adds a region: number and keys.
    fn add_mr(&mut self, mr: Mr) -> Vec<u64> {
        let (lkey, rkey) = (u64::from(mr.lkey()), u64::from(mr.rkey()));
        vec![self.add(Object::Mr(mr)), lkey, rkey]
    }

    /// Whether lists can be made: another answer than that there are none is told when one is wanted.
    fn has_lists(&self) -> Result<bool, Errno> {
        let list = Mr::list(&Pd::new(&self.context)?, 1);
        Ok(!matches!(list, Err(Errno(libc::EOPNOTSUPP))))
    }

    /// Whether regions can share memory, as above.
    fn has_sharing(&self) -> Result<bool, Errno> {
        let (pd, buffer) = (
            Pd::new(&self.context)?,
            Buffer::new(4096, BufferKind::Plain)?,
        );
        let shared = Mr::shared(&pd, &Mr::new(&pd, &buffer, 0, 4096, 0)?, 0);
        Ok(!matches!(shared, Err(Errno(libc::EOPNOTSUPP))))
    }

    fn counter(&self, counter: Counter) -> Result<u64, Errno> {
        let path = format!(
            "/sys/class/infiniband/{}/ports/{}/hw_counters/{}",
            self.context.name(),
            self.context.port,
            counter.name()
        );
        let text = std::fs::read_to_string(path)
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        text.trim().parse().map_err(|_| Errno(libc::EPROTO))
    }

    /// What the driver shows of the last access that the device refused to the peer of a queue pair.
    fn refused(&self, qpn: u32) -> Result<u32, Errno> {
        let path = format!("/sys/kernel/debug/{}/qps", self.context.name());
        let text = std::fs::read_to_string(path)
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let mut lines = text.lines().map(|line| line.split(' '));
        let mut names = lines.next().ok_or(Errno(libc::EPROTO))?;
        let column = names.position(|name| name == "refused");
        let mut line = lines
            .find(|line| line.clone().next() == Some(&qpn.to_string()))
            .ok_or(Errno(libc::ENOENT))?;
        let why = column.and_then(|column| line.nth(column));
        why.and_then(|why| why.parse().ok())
            .ok_or(Errno(libc::EPROTO))
    }

    /// Does what a request says.
    pub fn serve(&mut self, operation: u64, words: &[u64]) -> Result<Vec<u64>, Errno> {
        let mut words = Words(words.iter());
        let w = &mut words;
        match Operation::from_number(operation).ok_or(Errno(libc::EPROTO))? {
            Operation::Hello => {
                let port = self.context.port_attr()?;
                let device = self.context.device_attr()?;
                // SAFETY: all members of the union are plain bytes.
                let gid = unsafe { self.context.gid.raw };
                let (high, low) = gid.split_at(8);
                Ok(vec![
                    u64::from_be_bytes(high.try_into().map_err(|_| Errno(libc::EPROTO))?),
                    u64::from_be_bytes(low.try_into().map_err(|_| Errno(libc::EPROTO))?),
                    u64::from(port.active_mtu),
                    u64::from(port.max_msg_sz),
                    u64::from(self.context.comp_vectors()),
                    device.max_sge as u64,
                    u64::from(port.state),
                    u64::from(device.vendor_id),
                    u64::from(device.vendor_part_id),
                    u64::from(device.atomic_cap),
                    u64::from(self.has_lists()?),
                    u64::from(self.has_sharing()?),
                ])
            }
            Operation::Reset => {
                self.clear();
                while self.context.async_event(Duration::ZERO)?.is_some() {}
                // What a destructor found is the other side's to report.
                let complaints = crate::report::complaints();
                for complaint in &complaints {
                    eprintln!("verbs-check: {complaint}");
                }
                Ok(vec![complaints.len() as u64])
            }
            Operation::MakePd => {
                let pd = Pd::new(&self.context)?;
                Ok(vec![self.add(Object::Pd(pd))])
            }
            Operation::MakeChannel => {
                let channel = Channel::new(&self.context)?;
                Ok(vec![self.add(Object::Channel(channel))])
            }
            Operation::MakeCq => {
                let entries = w.u32()?;
                let channel = match w.next()? {
                    NONE => None,
                    number => Some(self.channel(number)?.clone()),
                };
                let (vector, extended) = (w.u32()?, w.next()? != 0);
                let cq = Cq::new(&self.context, entries, channel, vector, extended)?;
                Ok(vec![self.add(Object::Cq(cq))])
            }
            Operation::MakeQp => {
                let pd = self.pd(w.next()?)?;
                let (send, recv) = (self.cq(w.next()?)?, self.cq(w.next()?)?);
                let options = QpOptions {
                    send_wr: w.u32()?,
                    recv_wr: w.u32()?,
                    send_sge: w.u32()?,
                    recv_sge: w.u32()?,
                    inline: w.u32()?,
                    signal_all: w.next()? != 0,
                    extended: w.next()? != 0,
                    direct: w.u32()?,
                };
                let (qp, cap) = Qp::new(pd, send, recv, &options)?;
                let number = u64::from(qp.number());
                Ok(vec![
                    self.add(Object::Qp(qp)),
                    number,
                    u64::from(cap.max_send_wr),
                    u64::from(cap.max_recv_wr),
                    u64::from(cap.max_send_sge),
                    u64::from(cap.max_recv_sge),
                    u64::from(cap.max_inline_data),
                ])
            }
            Operation::MakeBuffer => {
                let length = w.next()? as usize;
                let kind = match w.next()? {
                    0 => BufferKind::Plain,
                    1 => BufferKind::Huge,
                    _ => BufferKind::Repeated,
                };
                let buffer = Buffer::new(length, kind)?;
                let address = buffer.address();
                Ok(vec![self.add(Object::Buffer(buffer)), address])
            }
            Operation::MakeMr => {
                let (pd, buffer) = (self.pd(w.next()?)?, self.buffer(w.next()?)?);
                let (offset, length) = (w.next()? as usize, w.next()? as usize);
                let mr = Mr::new(pd, buffer, offset, length, w.u32()?)?;
                Ok(self.add_mr(mr))
            }
            Operation::ChangeMr => {
                let mr = self.mr(w.next()?)?;
                mr.change_access(w.u32()?)?;
                Ok(vec![u64::from(mr.lkey())])
            }
            Operation::MoveMr => {
                let (mr, buffer) = (self.mr(w.next()?)?, self.buffer(w.next()?)?);
                mr.change_memory(buffer, w.next()? as usize)?;
                Ok(vec![u64::from(mr.rkey())])
            }
            Operation::MakeList => {
                let mr = Mr::list(self.pd(w.next()?)?, w.u32()?)?;
                Ok(self.add_mr(mr))
            }
            Operation::MakeShared => {
                let (pd, of) = (self.pd(w.next()?)?, self.mr(w.next()?)?);
                let mr = Mr::shared(pd, of, w.u32()?)?;
                Ok(self.add_mr(mr))
            }
            Operation::ShareByKey => {
                let pd = self.pd(w.next()?)?;
                let (key, address, length) = (w.u32()?, w.next()?, w.next()?);
                pd.share_by_key(key, address, length, w.u32()?)?;
                Ok(Vec::new())
            }
            Operation::Pinned => Ok(vec![pinned()?]),
            Operation::MakeWindow => {
                let (pd, kind) = (self.pd(w.next()?)?, w.u32()?);
                let mw = Mw::new(pd, kind)?;
                let rkey = u64::from(mw.rkey());
                Ok(vec![self.add(Object::Window(mw, kind)), rkey])
            }
            Operation::MakeForeign => {
                let (foreign, key, address) = Foreign::new(&self.context.name())
                    .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
                Ok(vec![self.add(Object::Foreign(foreign)), key, address])
            }
            Operation::ChangeMemory => {
                let buffer = self.buffer(w.next()?)?;
                let change = match w.next()? {
                    0 => Change::Discard,
                    1 => Change::Unmap,
                    2 => Change::Replace,
                    3 => Change::ReadOnly,
                    4 => Change::Move,
                    _ => Change::Fork,
                };
                let (offset, length) = (w.next()? as usize, w.next()? as usize);
                buffer.change(change, offset, length)?;
                Ok(Vec::new())
            }
            Operation::Destroy => {
                let number = w.next()?;
                self.object(number)?;
                self.objects[number as usize] = None;
                Ok(Vec::new())
            }
            Operation::ToState => {
                self.qp(w.next()?)?.to_state(w.u32()?)?;
                Ok(Vec::new())
            }
            Operation::ToInit => {
                self.qp(w.next()?)?.to_init(w.u32()?)?;
                Ok(Vec::new())
            }
            Operation::ToRtr => {
                let qp = self.qp(w.next()?)?;
                let peer = w.u32()?;
                let mut gid = [0; 16];
                gid[..8].copy_from_slice(&w.next()?.to_be_bytes());
                gid[8..].copy_from_slice(&w.next()?.to_be_bytes());
                qp.to_rtr(peer, gid, w.u32()?, w.u32()?, w.u8()?)?;
                Ok(Vec::new())
            }
            Operation::ToRts => {
                let qp = self.qp(w.next()?)?;
                qp.to_rts(w.u32()?, w.u8()?, w.u8()?, w.u8()?)?;
                Ok(Vec::new())
            }
            Operation::State => Ok(vec![u64::from(self.qp(w.next()?)?.state()?)]),
            Operation::Fill => {
                let buffer = self.buffer(w.next()?)?;
                let (offset, length) = (w.next()? as usize, w.next()? as usize);
                let (seed, start) = (w.next()?, w.next()?);
                let mut bytes = vec![0; length];
                pattern::fill(&mut bytes, seed, start);
                buffer.write(offset, &bytes)?;
                Ok(Vec::new())
            }
            Operation::Check => {
                let buffer = self.buffer(w.next()?)?;
                let (offset, length) = (w.next()? as usize, w.next()? as usize);
                let (seed, start) = (w.next()?, w.next()?);
                let mut bytes = vec![0; length];
                buffer.read(offset, &mut bytes)?;
                let wrong = if seed == NONE {
                    bytes.iter().position(|&byte| u64::from(byte) != start)
                } else {
                    pattern::mismatch(&bytes, seed, start)
                };
                Ok(vec![wrong.map_or(NONE, |at| at as u64)])
            }
            Operation::Set => {
                let buffer = self.buffer(w.next()?)?;
                let (offset, length) = (w.next()? as usize, w.next()? as usize);
                buffer.write(offset, &vec![w.u8()?; length])?;
                Ok(Vec::new())
            }
            Operation::PostSend => {
                let qp = self.qp(w.next()?)?;
                let work = SendWork {
                    wr_id: w.next()?,
                    opcode: w.u32()?,
                    flags: w.u32()?,
                    immediate: w.u32()?,
                    remote_address: w.next()?,
                    rkey: w.u32()?,
                    operands: (w.next()?, w.next()?),
                    entries: w.entries()?,
                };
                qp.post_send(&work)?;
                Ok(Vec::new())
            }
            Operation::PostRecv => {
                let qp = self.qp(w.next()?)?;
                let wr_id = w.next()?;
                qp.post_recv(wr_id, &w.entries()?)?;
                Ok(Vec::new())
            }
            Operation::PostList => {
                let (qp, mr) = (self.qp(w.next()?)?, self.mr(w.next()?)?);
                let mut work = ListWork {
                    wr_id: w.next()?,
                    flags: w.u32()?,
                    key: w.u32()?,
                    access: w.u32()?,
                    address: w.next()?,
                    pieces: w.entries()?,
                    ..ListWork::default()
                };
                if w.next()? != 0 {
                    let invalidate_rkey = w.u32()?;
                    work.message = Some((w.entries()?, invalidate_rkey));
                }
                qp.post_list(mr, &work)?;
                Ok(Vec::new())
            }
            Operation::Bind => {
                let qp = self.qp(w.next()?)?;
                let window = w.next()?;
                let Object::Window(mw, kind) = self.object(window)? else {
                    return Err(Errno(libc::EPROTO));
                };
                let mr = self.mr(w.next()?)?;
                let work = BindWork {
                    wr_id: w.next()?,
                    rkey: w.u32()?,
                    address: w.next()?,
                    length: w.next()?,
                    access: w.u32()?,
                };
                let rkey = if *kind == IBV_MW_TYPE_1 {
                    qp.bind1(mw, mr, &work)
                } else {
                    qp.bind2(mw, mr, &work)
                };
                Ok(vec![u64::from(rkey?)])
            }
            Operation::Poll => {
                let cq = self.cq(w.next()?)?;
                Ok(match cq.wait(w.milliseconds()?)? {
                    None => Vec::new(),
                    Some(c) => vec![
                        c.wr_id,
                        u64::from(c.status),
                        u64::from(c.opcode),
                        u64::from(c.byte_len),
                        u64::from(c.immediate),
                        u64::from(c.qpn),
                        u64::from(c.flags),
                        u64::from(c.vendor_err),
                    ],
                })
            }
            Operation::Arm => {
                self.cq(w.next()?)?.arm(w.next()? != 0)?;
                Ok(Vec::new())
            }
            Operation::Moderate => {
                let cq = self.cq(w.next()?)?;
                cq.moderate(w.u16()?, w.u16()?)?;
                Ok(Vec::new())
            }
            Operation::ResizeCq => {
                self.cq(w.next()?)?.resize(w.u32()?)?;
                Ok(Vec::new())
            }
            Operation::ChannelEvent => {
                let channel = self.channel(w.next()?)?;
                let Some(raw) = channel.event(w.milliseconds()?)? else {
                    return Ok(Vec::new());
                };
                let number = self
                    .objects
                    .iter()
                    .position(|object| matches!(object, Some(Object::Cq(cq)) if cq.raw() == raw));
                Ok(vec![number.map_or(NONE, |number| number as u64)])
            }
            Operation::AsyncEvent => Ok(match self.context.async_event(w.milliseconds()?)? {
                None => Vec::new(),
                Some((event, qpn)) => vec![u64::from(event), u64::from(qpn)],
            }),
            Operation::Refused => Ok(vec![self.refused(w.u32()?)?.into()]),
            Operation::Counter => {
                let counter = match w.next()? {
                    0 => Counter::Registrations,
                    _ => Counter::EarlyUses,
                };
                Ok(vec![self.counter(counter)?])
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.clear();
    }
}

fn send_words(stream: &mut TcpStream, words: &[u64]) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(8 + 8 * words.len());
    bytes.extend((words.len() as u64).to_le_bytes());
    for word in words {
        bytes.extend(word.to_le_bytes());
    }
    stream.write_all(&bytes)
}

fn receive_words(stream: &mut TcpStream) -> std::io::Result<Vec<u64>> {
    let mut word = [0; 8];
    stream.read_exact(&mut word)?;
    let count = u64::from_le_bytes(word);
    if count > 1 << 16 {
        return Err(std::io::ErrorKind::InvalidData.into());
    }
    (0..count)
        .map(|_| {
            stream.read_exact(&mut word)?;
            Ok(u64::from_le_bytes(word))
        })
        .collect()
}

/// Serves one commanding program until it goes away.
pub fn serve(mut stream: TcpStream, options: &Options) -> Result<(), String> {
    stream
        .set_nodelay(true)
        .map_err(|error| error.to_string())?;
    let mut agent = Agent::new(options)?;
    while let Ok(request) = receive_words(&mut stream) {
        let answer = match request.split_first() {
            None => Err(Errno(libc::EPROTO)),
            Some((&operation, words)) => agent.serve(operation, words),
        };
        let answer = match answer {
            Ok(mut words) => {
                words.insert(0, 0);
                words
            }
            Err(Errno(errno)) => vec![errno as u64],
        };
        send_words(&mut stream, &answer).map_err(|error| error.to_string())?;
    }
    Ok(())
}

enum Link {
    Local(Box<Agent>),
    Tcp(TcpStream),
}

/// An end as the checks see it.
pub struct Side {
    link: Link,
    /// "here" or "there", for messages.
    pub name: &'static str,
}

/// What an end says of itself.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    /// GID in two halves.
    pub gid: [u64; 2],
    /// `ibv_mtu`.
    pub mtu: u32,
    /// Longest message.
    pub max_message: u64,
    /// Completion vectors.
    pub vectors: u32,
    /// Most scatter/gather entries.
    pub max_sge: u32,
    /// `ibv_port_state`.
    pub port_state: u32,
    /// Whether atomic operations are offered.
    pub atomics: bool,
    /// Whether lists can be registered (`ferritedv.h`).
    pub lists: bool,
    /// Whether regions can share memory (`ferritedv.h`).
    pub sharing: bool,
    /// Whether it is a Ferrite device, whose `vendor_err` is known.
    pub ferrite: bool,
}

/// Vendor and device of a Ferrite device.
const FERRITE: [u64; 2] = [0x1af4, 0x10f0];

/// What a queue pair turned out to be.
#[derive(Clone, Copy, Debug)]
pub struct QpMade {
    /// Object number.
    pub qp: u64,
    /// Queue pair number.
    pub qpn: u32,
    /// Work requests its send queue takes.
    pub send_wr: u32,
    /// Entries of a send.
    pub send_sge: u32,
    /// Bytes of inline data.
    pub inline: u32,
}

impl Side {
    /// An agent in this process.
    pub fn local(options: &Options, name: &'static str) -> Result<Self, String> {
        Ok(Self {
            link: Link::Local(Box::new(Agent::new(options)?)),
            name,
        })
    }

    /// An agent at the other end of a connection.
    pub fn remote(stream: TcpStream, name: &'static str) -> Self {
        Self {
            link: Link::Tcp(stream),
            name,
        }
    }

    /// Has an operation done.
    pub fn call(&mut self, operation: Operation, words: &[u64]) -> Result<Vec<u64>, Errno> {
        match &mut self.link {
            Link::Local(agent) => agent.serve(operation as u64, words),
            Link::Tcp(stream) => {
                let mut request = vec![operation as u64];
                request.extend_from_slice(words);
                let exchange = |stream: &mut TcpStream| {
                    send_words(stream, &request)?;
                    receive_words(stream)
                };
                let mut answer = exchange(stream)
                    .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::ECONNRESET)))?;
                if answer.is_empty() {
                    return Err(Errno(libc::EPROTO));
                }
                match answer.remove(0) {
                    0 => Ok(answer),
                    errno => Err(Errno(errno as i32)),
                }
            }
        }
    }

    fn number(&mut self, operation: Operation, words: &[u64]) -> Result<u64, Errno> {
        self.call(operation, words)?
            .first()
            .copied()
            .ok_or(Errno(libc::EPROTO))
    }

    /// Asks who it is.
    pub fn hello(&mut self) -> Result<Hello, Errno> {
        let words = self.call(Operation::Hello, &[])?;
        if words.len() < 12 {
            return Err(Errno(libc::EPROTO));
        }
        Ok(Hello {
            gid: [words[0], words[1]],
            mtu: words[2] as u32,
            max_message: words[3],
            vectors: words[4] as u32,
            max_sge: words[5] as u32,
            port_state: words[6] as u32,
            atomics: words[9] != u64::from(crate::sys::IBV_ATOMIC_NONE),
            lists: words[10] != 0,
            sharing: words[11] != 0,
            ferrite: words[7..9] == FERRITE,
        })
    }

    /// Destroys everything, forgets events; how many destroys failed.
    pub fn reset(&mut self) -> Result<u64, Errno> {
        self.number(Operation::Reset, &[])
    }

    /// Makes a protection domain.
    pub fn pd(&mut self) -> Result<u64, Errno> {
        self.number(Operation::MakePd, &[])
    }

    /// Makes a completion channel.
    pub fn channel(&mut self) -> Result<u64, Errno> {
        self.number(Operation::MakeChannel, &[])
    }

    /// Makes a completion queue.
    pub fn cq(&mut self, entries: u32, channel: u64, vector: u32, ex: bool) -> Result<u64, Errno> {
        let words = [
            u64::from(entries),
            channel,
            u64::from(vector),
            u64::from(ex),
        ];
        self.number(Operation::MakeCq, &words)
    }

    /// Makes a queue pair.
    pub fn qp(&mut self, pd: u64, send: u64, recv: u64, o: &QpOptions) -> Result<QpMade, Errno> {
        let words = self.call(
            Operation::MakeQp,
            &[
                pd,
                send,
                recv,
                u64::from(o.send_wr),
                u64::from(o.recv_wr),
                u64::from(o.send_sge),
                u64::from(o.recv_sge),
                u64::from(o.inline),
                u64::from(o.signal_all),
                u64::from(o.extended),
                u64::from(o.direct),
            ],
        )?;
        if words.len() < 7 {
            return Err(Errno(libc::EPROTO));
        }
        Ok(QpMade {
            qp: words[0],
            qpn: words[1] as u32,
            send_wr: words[2] as u32,
            send_sge: words[4] as u32,
            inline: words[6] as u32,
        })
    }

    /// Maps a buffer: number and address.
    pub fn buffer(&mut self, length: usize, kind: BufferKind) -> Result<(u64, u64), Errno> {
        let words = self.call(Operation::MakeBuffer, &[length as u64, kind as u64])?;
        match words[..] {
            [number, address] => Ok((number, address)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Registers memory: number, lkey, rkey.
    pub fn mr(
        &mut self,
        pd: u64,
        buffer: u64,
        offset: usize,
        length: usize,
        access: u32,
    ) -> Result<(u64, u32, u32), Errno> {
        let words = [pd, buffer, offset as u64, length as u64, u64::from(access)];
        let words = self.call(Operation::MakeMr, &words)?;
        match words[..] {
            [number, lkey, rkey] => Ok((number, lkey as u32, rkey as u32)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Registers the same memory anew, with other rights: the key.
    pub fn change_mr(&mut self, mr: u64, access: u32) -> Result<u32, Errno> {
        Ok(self.number(Operation::ChangeMr, &[mr, u64::from(access)])? as u32)
    }

    /// Registers other memory under the same number, from its start on: the remote key.
    pub fn move_mr(&mut self, mr: u64, buffer: u64, length: usize) -> Result<u32, Errno> {
        Ok(self.number(Operation::MoveMr, &[mr, buffer, length as u64])? as u32)
    }

    /// Registers the memory of a region once more: number, lkey, rkey.
    pub fn shared(&mut self, pd: u64, mr: u64, access: u32) -> Result<(u64, u32, u32), Errno> {
        let words = self.call(Operation::MakeShared, &[pd, mr, u64::from(access)])?;
        match words[..] {
            [number, lkey, rkey] => Ok((number, lkey as u32, rkey as u32)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// The same of a region that is named to the kernel by its key alone; ended at once.
    pub fn share_by_key(
        &mut self,
        pd: u64,
        key: u32,
        at: (u64, usize),
        access: u32,
    ) -> Result<(), Errno> {
        let words = [pd, u64::from(key), at.0, at.1 as u64, u64::from(access)];
        self.call(Operation::ShareByKey, &words).map(drop)
    }

    /// How many bytes of memory are pinned.
    pub fn pinned(&mut self) -> Result<u64, Errno> {
        self.number(Operation::Pinned, &[])
    }

    /// Makes a key for lists: number and key.
    pub fn list(&mut self, pd: u64, max_pieces: usize) -> Result<(u64, u32), Errno> {
        let words = self.call(Operation::MakeList, &[pd, max_pieces as u64])?;
        match words[..] {
            // They are one and the same.
            [number, lkey, rkey] if lkey == rkey => Ok((number, lkey as u32)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Makes a window: number and key.
    pub fn window(&mut self, pd: u64, kind: u32) -> Result<(u64, u32), Errno> {
        let words = self.call(Operation::MakeWindow, &[pd, u64::from(kind)])?;
        match words[..] {
            [number, rkey] => Ok((number, rkey as u32)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Has another process register memory: number, key and address.
    pub fn foreign(&mut self) -> Result<(u64, u32, u64), Errno> {
        let words = self.call(Operation::MakeForeign, &[])?;
        match words[..] {
            [number, key, address] => Ok((number, key as u32, address)),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Posts the registration of a list.
    pub fn post_list(&mut self, qp: u64, list: u64, work: &ListWork) -> Result<(), Errno> {
        let mut words = vec![
            qp,
            list,
            work.wr_id,
            u64::from(work.flags),
            u64::from(work.key),
            u64::from(work.access),
            work.address,
        ];
        push_entries(&mut words, &work.pieces);
        match &work.message {
            None => words.push(0),
            Some((entries, invalidate_rkey)) => {
                words.extend([1, u64::from(*invalidate_rkey)]);
                push_entries(&mut words, entries);
            }
        }
        self.call(Operation::PostList, &words).map(drop)
    }

    /// Posts the bind of a window to a part of a region: its key afterwards.
    pub fn bind(&mut self, qp: u64, window: u64, mr: u64, work: &BindWork) -> Result<u32, Errno> {
        let words = [
            qp,
            window,
            mr,
            work.wr_id,
            u64::from(work.rkey),
            work.address,
            work.length,
            u64::from(work.access),
        ];
        Ok(self.number(Operation::Bind, &words)? as u32)
    }

    /// What the device has counted.
    pub fn counter(&mut self, counter: Counter) -> Result<u64, Errno> {
        self.number(Operation::Counter, &[counter as u64])
    }

    /// Changes what is behind a part of a buffer, in whole pages.
    pub fn change(
        &mut self,
        buffer: u64,
        change: Change,
        offset: usize,
        length: usize,
    ) -> Result<(), Errno> {
        let words = [buffer, change as u64, offset as u64, length as u64];
        self.call(Operation::ChangeMemory, &words).map(drop)
    }

    /// Destroys an object.
    pub fn destroy(&mut self, object: u64) -> Result<(), Errno> {
        self.call(Operation::Destroy, &[object]).map(drop)
    }

    /// Writes the pattern.
    pub fn fill(&mut self, buffer: u64, at: usize, length: usize, seed: u64) -> Result<(), Errno> {
        self.fill_part(buffer, at, length, seed, 0)
    }

    /// Writes a part of the pattern.
    pub fn fill_part(
        &mut self,
        buffer: u64,
        at: usize,
        length: usize,
        seed: u64,
        start: u64,
    ) -> Result<(), Errno> {
        let words = [buffer, at as u64, length as u64, seed, start];
        self.call(Operation::Fill, &words).map(drop)
    }

    /// Where the pattern is broken.
    pub fn check_part(
        &mut self,
        buffer: u64,
        at: usize,
        length: usize,
        seed: u64,
        start: u64,
    ) -> Result<Option<u64>, Errno> {
        let words = [buffer, at as u64, length as u64, seed, start];
        Ok(match self.number(Operation::Check, &words)? {
            NONE => None,
            at => Some(at),
        })
    }

    /// Where a byte is not `value`.
    pub fn check_set(
        &mut self,
        buffer: u64,
        at: usize,
        length: usize,
        value: u8,
    ) -> Result<Option<u64>, Errno> {
        self.check_part(buffer, at, length, NONE, u64::from(value))
    }

    /// Sets all bytes.
    pub fn set(&mut self, buffer: u64, at: usize, length: usize, value: u8) -> Result<(), Errno> {
        let words = [buffer, at as u64, length as u64, u64::from(value)];
        self.call(Operation::Set, &words).map(drop)
    }

    /// Posts a send work request.
    pub fn post_send(&mut self, qp: u64, work: &SendWork) -> Result<(), Errno> {
        let mut words = vec![
            qp,
            work.wr_id,
            u64::from(work.opcode),
            u64::from(work.flags),
            u64::from(work.immediate),
            work.remote_address,
            u64::from(work.rkey),
            work.operands.0,
            work.operands.1,
        ];
        push_entries(&mut words, &work.entries);
        self.call(Operation::PostSend, &words).map(drop)
    }

    /// Posts a receive.
    pub fn post_recv(
        &mut self,
        qp: u64,
        wr_id: u64,
        entries: &[(u64, u32, u32)],
    ) -> Result<(), Errno> {
        let mut words = vec![qp, wr_id];
        push_entries(&mut words, entries);
        self.call(Operation::PostRecv, &words).map(drop)
    }

    /// Waits for a completion.
    pub fn poll(&mut self, cq: u64, timeout: Duration) -> Result<Option<Completion>, Errno> {
        let words = self.call(Operation::Poll, &[cq, timeout.as_millis() as u64])?;
        match words[..] {
            [] => Ok(None),
            [wr_id, status, opcode, byte_len, immediate, qpn, flags, vendor_err] => {
                let success = status as u32 == IBV_WC_SUCCESS;
                Ok(Some(Completion {
                    wr_id,
                    status: status as u32,
                    // With an error the verbs leave these undefined.
                    opcode: if success { opcode as u32 } else { 0 },
                    byte_len: if success { byte_len as u32 } else { 0 },
                    immediate: if success { immediate as u32 } else { 0 },
                    qpn: qpn as u32,
                    flags: if success { flags as u32 } else { 0 },
                    vendor_err: if success { 0 } else { vendor_err as u32 },
                }))
            }
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Asks for an event.
    pub fn arm(&mut self, cq: u64, solicited: bool) -> Result<(), Errno> {
        self.call(Operation::Arm, &[cq, u64::from(solicited)])
            .map(drop)
    }

    /// Has events of a queue wait for so many completions, or so long from the first of them.
    pub fn moderate(&mut self, cq: u64, count: u16, microseconds: u16) -> Result<(), Errno> {
        self.call(
            Operation::Moderate,
            &[cq, count.into(), microseconds.into()],
        )
        .map(drop)
    }

    /// Waits for an event of a channel: the queue it is about.
    pub fn channel_event(&mut self, channel: u64, timeout: Duration) -> Result<Option<u64>, Errno> {
        let words = [channel, timeout.as_millis() as u64];
        Ok(self.call(Operation::ChannelEvent, &words)?.first().copied())
    }

    /// Waits for an asynchronous event: type and queue pair number.
    pub fn async_event(&mut self, timeout: Duration) -> Result<Option<(u32, u32)>, Errno> {
        let words = self.call(Operation::AsyncEvent, &[timeout.as_millis() as u64])?;
        match words[..] {
            [] => Ok(None),
            [event, qpn] => Ok(Some((event as u32, qpn as u32))),
            _ => Err(Errno(libc::EPROTO)),
        }
    }

    /// Why the device refused an access of the peer of a queue pair the last time (`ferritectl.md`).
    pub fn refused(&mut self, qpn: u32) -> Result<u32, Errno> {
        self.number(Operation::Refused, &[u64::from(qpn)])
            .map(|why| why as u32)
    }

    /// Asks for a state without any attribute.
    pub fn set_state(&mut self, qp: u64, state: u32) -> Result<(), Errno> {
        self.call(Operation::ToState, &[qp, u64::from(state)])
            .map(drop)
    }

    /// The present state of a queue pair.
    pub fn state(&mut self, qp: u64) -> Result<u32, Errno> {
        Ok(self.number(Operation::State, &[qp])? as u32)
    }
}

fn push_entries(words: &mut Vec<u64>, entries: &[(u64, u32, u32)]) {
    words.push(entries.len() as u64);
    for &(address, length, key) in entries {
        words.extend([address, u64::from(length), u64::from(key)]);
    }
}
