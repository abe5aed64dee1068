// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server side of the vfio-user protocol, version 0.
//!
//! Only this file knows the protocol; the rest of the device sees [`Backend`].
//! Requests are read in batches: the doorbells that a busy guest posts arrive
//! many to one system call.
//!
//! The peer is the virtual machine monitor, which owns the guest's memory
//! anyway. It is still not trusted to send well-formed messages: a malformed
//! one is answered with an error, or ends the connection where the stream can
//! no longer be followed.

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use serde_json::json;
use std::collections::VecDeque;
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// File descriptors that one message may carry.
const MAX_FDS: usize = 16;
/// Largest data of one region access.
const MAX_TRANSFER: usize = 64 * 1024;
/// Largest message: a header, the fixed fields and the data.
const MAX_MESSAGE: usize = MAX_TRANSFER + 256;
/// Receive buffer: room for some thousand posted writes.
const BUFFER: usize = 2 * MAX_MESSAGE;

const HEADER: usize = 16;
const FLAG_REPLY: u32 = 1;
const TYPE_MASK: u32 = 0xf;
const FLAG_NO_REPLY: u32 = 1 << 4;
const FLAG_ERROR: u32 = 1 << 5;

/// PCI regions as vfio numbers them: six BARs, the ROM, configuration space, VGA.
const REGIONS: u32 = 9;
/// The region of configuration space.
pub const REGION_CONFIG: u32 = 7;
/// Interrupt kinds as vfio numbers them: INTx, MSI, MSI-X, error, request.
const IRQS: u32 = 5;
const IRQ_INTX: u32 = 0;
const IRQ_MSI: u32 = 1;
const IRQ_MSIX: u32 = 2;
/// The interrupt kind of uncorrected errors. The device never raises it (the
/// monitor would stop the machine), but QEMU warns where it is missing.
const IRQ_ERROR: u32 = 3;

const DEVICE_FLAG_RESET: u32 = 1 << 0;
const DEVICE_FLAG_PCI: u32 = 1 << 1;
const REGION_FLAG_READ: u32 = 1 << 0;
const REGION_FLAG_WRITE: u32 = 1 << 1;
const IRQ_FLAG_EVENTFD: u32 = 1 << 0;
const IRQ_FLAG_MASKABLE: u32 = 1 << 1;
const IRQ_FLAG_AUTOMASKED: u32 = 1 << 2;
const IRQ_FLAG_NORESIZE: u32 = 1 << 3;
const SET_DATA_NONE: u32 = 1 << 0;
const SET_DATA_EVENTFD: u32 = 1 << 2;
const SET_ACTION_MASK: u32 = 1 << 3;
const SET_ACTION_UNMASK: u32 = 1 << 4;
const SET_ACTION_TRIGGER: u32 = 1 << 5;
const MAP_FLAG_READ: u32 = 1 << 0;
const MAP_FLAG_WRITE: u32 = 1 << 1;
const UNMAP_FLAG_DIRTY_BITMAP: u32 = 1 << 0;
const UNMAP_FLAG_ALL: u32 = 1 << 1;

/// Stretches of guest memory at most, as the protocol has it by default.
pub const MAX_DMA_MAPS: usize = 65_535;

/// Requests that are understood.
mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const GET_INFO: u16 = 4;
    pub const GET_REGION_INFO: u16 = 5;
    pub const GET_IRQ_INFO: u16 = 7;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;
}

/// A stretch of guest memory that the device may access from now on.
#[derive(Debug)]
pub struct DmaMap {
    /// First guest-physical address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Where in `fd` it begins.
    pub offset: u64,
    /// The device may read it.
    pub readable: bool,
    /// The device may write it.
    pub writable: bool,
    /// The memory itself; absent where it can only be accessed by messages.
    pub fd: Option<OwnedFd>,
}

/// A kind of interrupts that the device raises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The interrupt pin: one vector.
    Pin,
    /// MSI vectors.
    Msi,
    /// MSI-X vectors.
    MsiX,
}

/// What is done to the mask of the interrupt pin.
#[derive(Debug)]
pub enum PinChange {
    /// It tells of nothing.
    Mask,
    /// It tells of its level, now and when that rises.
    Unmask,
    /// It is unmasked by each event of this, or of nothing more.
    UnmaskBy(Option<OwnedFd>),
}

/// What is done to a range of vectors.
#[derive(Debug)]
pub enum VectorChange {
    /// One eventfd for each vector from `start` on.
    Assign {
        /// The first vector.
        start: usize,
        /// The eventfds.
        fds: Vec<OwnedFd>,
    },
    /// These vectors have no eventfd any more.
    Remove {
        /// The first vector.
        start: usize,
        /// How many.
        count: usize,
    },
    /// All vectors lose their eventfds.
    RemoveAll,
    /// Raise these vectors, for a test.
    Raise {
        /// The first vector.
        start: usize,
        /// How many.
        count: usize,
    },
}

/// The device behind the protocol.
pub trait Backend {
    /// Size of a region, zero if it does not exist.
    fn region_size(&self, region: u32) -> u64;
    /// Number of vectors of a kind.
    fn vectors(&self, kind: Kind) -> usize;
    /// Reads from a region; the range is inside it.
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]);
    /// Writes to a region; the range is inside it.
    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]);
    /// Guest memory appears.
    fn dma_map(&mut self, map: DmaMap) -> io::Result<()>;
    /// Guest memory goes away; returns how much. When this returns it is not
    /// accessed any more.
    fn dma_unmap(&mut self, address: u64, size: u64) -> io::Result<u64>;
    /// All guest memory goes away; returns how much.
    fn dma_unmap_all(&mut self) -> u64;
    /// Vectors change.
    fn change_vectors(&mut self, kind: Kind, change: VectorChange) -> io::Result<()>;
    /// The mask of the pin changes; there is one.
    fn mask_pin(&mut self, change: PinChange) -> io::Result<()>;
    /// The device returns to its state after power-on.
    fn reset(&mut self);
    /// All requests that have arrived are handled; more are waited for.
    fn batch_done(&mut self);
    /// Whether the device leaves: what is read from now on may lack something.
    fn is_over(&self) -> bool {
        false
    }
}

/// A connection to a virtual machine monitor.
pub struct Connection {
    stream: UnixStream,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Position in the stream of the byte at `buffer[start]`.
    position: u64,
    /// Descriptors received, each set with the stream position of the last
    /// byte that came with it. Every request is sent by one system call, and
    /// the kernel ends a read behind the bytes that carry descriptors; so that
    /// byte lies in the request they belong to.
    fds: VecDeque<(u64, Vec<OwnedFd>)>,
}

/// A request cut out of the stream.
struct Request {
    id: u16,
    command: u16,
    flags: u32,
    /// Where its body lies in the buffer.
    body: std::ops::Range<usize>,
    fds: Vec<OwnedFd>,
}

/// The body of a reply, or why the request failed.
type Answer = Result<Vec<u8>, Errno>;

impl Connection {
    /// A connection over an accepted socket.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
            position: 0,
            fds: VecDeque::new(),
        }
    }

    /// Serves requests until the peer hangs up (`Ok`) or cannot be followed any more.
    pub fn serve(&mut self, backend: &mut dyn Backend) -> io::Result<()> {
        loop {
            while let Some(request) = self.next_request()? {
                self.handle(request, backend)?;
            }
            backend.batch_done();
            // Asked behind the read: what came by it may be the rest of something.
            if !self.fill()? || backend.is_over() {
                return Ok(());
            }
        }
    }

    /// Reads once from the socket; `false` at its end.
    fn fill(&mut self) -> io::Result<bool> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let message = loop {
            let mut slices = [IoSliceMut::new(&mut self.buffer[self.end..])];
            match rustix::net::recvmsg(
                &self.stream,
                &mut slices,
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(message) => break message,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        };
        if message.bytes == 0 {
            return Ok(false);
        }
        self.end += message.bytes;
        // The kernel drops those for which there is no room here, or no number left
        // in the process. A request without one that it came with means something else.
        if message.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "vfio-user: more descriptors than can be taken",
            ));
        }
        let mut received = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                received.extend(fds);
            }
        }
        if !received.is_empty() {
            // All whole requests are handled: what is kept is of one request.
            let kept: usize = self.fds.iter().map(|(_, fds)| fds.len()).sum();
            if kept + received.len() > MAX_FDS {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("vfio-user: a message with more than {MAX_FDS} descriptors"),
                ));
            }
            let last = self.position + (self.end - self.start) as u64 - 1;
            self.fds.push_back((last, received));
        }
        Ok(true)
    }

    fn next_request(&mut self) -> io::Result<Option<Request>> {
        let have = &self.buffer[self.start..self.end];
        let Some(header) = have.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let id = u16_at(header, 0);
        let command = u16_at(header, 2);
        let size = u32_at(header, 4) as usize;
        let flags = u32_at(header, 8);
        if !(HEADER..=MAX_MESSAGE).contains(&size) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("vfio-user: a message of {size} bytes is not possible"),
            ));
        }
        if have.len() < size {
            return Ok(None);
        }
        let body = self.start + HEADER..self.start + size;
        self.start += size;
        self.position += size as u64;
        let mut fds = Vec::new();
        while self
            .fds
            .front()
            .is_some_and(|(last, _)| *last < self.position)
        {
            if let Some((_, received)) = self.fds.pop_front() {
                fds.extend(received);
            }
        }
        Ok(Some(Request {
            id,
            command,
            flags,
            body,
            fds,
        }))
    }

    fn handle(&mut self, request: Request, backend: &mut dyn Backend) -> io::Result<()> {
        if request.flags & TYPE_MASK != 0 {
            // A reply, but nothing was asked.
            return Ok(());
        }
        let (id, number, flags) = (request.id, request.command, request.flags);
        let body = &self.buffer[request.body.clone()];
        let answer = dispatch(number, body, request.fds, backend);
        if flags & FLAG_NO_REPLY != 0 {
            return Ok(());
        }
        let (data, flags, error) = match answer {
            Ok(data) => (data, FLAG_REPLY, 0),
            Err(error) => (Vec::new(), FLAG_REPLY | FLAG_ERROR, error.raw_os_error()),
        };
        let mut reply = Vec::with_capacity(HEADER + data.len());
        reply.extend_from_slice(&id.to_ne_bytes());
        reply.extend_from_slice(&number.to_ne_bytes());
        reply.extend_from_slice(&((HEADER + data.len()) as u32).to_ne_bytes());
        reply.extend_from_slice(&flags.to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(&data);
        // In one piece: the peer takes half a header for an error.
        match self.stream.write_all(&reply) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

fn dispatch(number: u16, body: &[u8], fds: Vec<OwnedFd>, backend: &mut dyn Backend) -> Answer {
    match number {
        command::VERSION => version(body),
        command::DMA_MAP => dma_map(body, fds, backend),
        command::DMA_UNMAP => dma_unmap(body, backend),
        command::GET_INFO => {
            expect_argsz(body, 16)?;
            Ok(words(&[
                16,
                DEVICE_FLAG_RESET | DEVICE_FLAG_PCI,
                REGIONS,
                IRQS,
            ]))
        }
        command::GET_REGION_INFO => region_info(body, backend),
        command::GET_IRQ_INFO => irq_info(body, backend),
        command::SET_IRQS => set_irqs(body, fds, backend).map(|()| Vec::new()),
        command::REGION_READ => region_read(body, backend),
        command::REGION_WRITE => region_write(body, backend),
        command::REGION_WRITE_MULTI => region_write_multi(body, backend),
        command::RESET => {
            backend.reset();
            Ok(Vec::new())
        }
        _ => Err(Errno::NOSYS),
    }
}

fn version(body: &[u8]) -> Answer {
    expect(body, 4)?;
    if u16_at(body, 0) != 0 {
        return Err(Errno::INVAL);
    }
    let capabilities = json!({"capabilities": {
        "max_msg_fds": MAX_FDS,
        "max_data_xfer_size": MAX_TRANSFER,
        "max_dma_maps": MAX_DMA_MAPS,
        "write_multiple": true,
    }});
    let mut reply = vec![0; 4];
    reply.extend_from_slice(capabilities.to_string().as_bytes());
    reply.push(0);
    Ok(reply)
}

fn dma_map(body: &[u8], mut fds: Vec<OwnedFd>, backend: &mut dyn Backend) -> Answer {
    expect_argsz(body, 32)?;
    let flags = u32_at(body, 4);
    if fds.len() > 1 || flags & !(MAP_FLAG_READ | MAP_FLAG_WRITE) != 0 {
        return Err(Errno::INVAL);
    }
    let map = DmaMap {
        offset: u64_at(body, 8),
        address: u64_at(body, 16),
        size: u64_at(body, 24),
        readable: flags & MAP_FLAG_READ != 0,
        writable: flags & MAP_FLAG_WRITE != 0,
        fd: fds.pop(),
    };
    backend.dma_map(map).map_err(errno)?;
    Ok(Vec::new())
}

fn dma_unmap(body: &[u8], backend: &mut dyn Backend) -> Answer {
    expect_argsz(body, 24)?;
    let (address, size) = (u64_at(body, 8), u64_at(body, 16));
    let unmapped = match u32_at(body, 4) {
        0 => backend.dma_unmap(address, size).map_err(errno)?,
        // As for the kernel's own interface: all is all, not a part of it.
        UNMAP_FLAG_ALL if address == 0 && size == 0 => backend.dma_unmap_all(),
        // Nobody keeps track of which pages were written.
        UNMAP_FLAG_DIRTY_BITMAP => return Err(Errno::OPNOTSUPP),
        _ => return Err(Errno::INVAL),
    };
    let mut reply = body[..16].to_vec();
    reply.extend_from_slice(&unmapped.to_ne_bytes());
    Ok(reply)
}

fn region_info(body: &[u8], backend: &dyn Backend) -> Answer {
    expect_argsz(body, 32)?;
    let index = u32_at(body, 8);
    if index >= REGIONS {
        return Err(Errno::INVAL);
    }
    let size = backend.region_size(index);
    // No region can be mapped: the peer posts writes only while none can.
    let flags = if size > 0 {
        REGION_FLAG_READ | REGION_FLAG_WRITE
    } else {
        0
    };
    let mut reply = words(&[32, flags, index, 0]);
    reply.extend_from_slice(&size.to_ne_bytes());
    reply.extend_from_slice(&0u64.to_ne_bytes());
    Ok(reply)
}

fn irq_info(body: &[u8], backend: &dyn Backend) -> Answer {
    expect_argsz(body, 16)?;
    let index = u32_at(body, 8);
    if index >= IRQS {
        return Err(Errno::INVAL);
    }
    let (flags, count) = match (index, kind_of(index)) {
        (IRQ_ERROR, _) => (IRQ_FLAG_EVENTFD | IRQ_FLAG_NORESIZE, 1),
        (_, Some(kind)) => match (kind, backend.vectors(kind)) {
            (_, 0) => (0, 0),
            (Kind::Pin, _) => {
                let level = IRQ_FLAG_MASKABLE | IRQ_FLAG_AUTOMASKED;
                (IRQ_FLAG_EVENTFD | level, 1)
            }
            (_, count) => (IRQ_FLAG_EVENTFD | IRQ_FLAG_NORESIZE, count as u32),
        },
        _ => (0, 0),
    };
    Ok(words(&[16, flags, index, count]))
}

/// The kind of interrupts of this index, of those that are raised.
fn kind_of(index: u32) -> Option<Kind> {
    match index {
        IRQ_INTX => Some(Kind::Pin),
        IRQ_MSI => Some(Kind::Msi),
        IRQ_MSIX => Some(Kind::MsiX),
        _ => None,
    }
}

fn set_irqs(body: &[u8], mut fds: Vec<OwnedFd>, backend: &mut dyn Backend) -> Result<(), Errno> {
    expect_argsz(body, 20)?;
    let flags = u32_at(body, 4);
    let index = u32_at(body, 8);
    let start = u32_at(body, 12) as usize;
    let count = u32_at(body, 16) as usize;
    let Some(kind) = kind_of(index) else {
        // The others have nothing to raise, and so nothing to keep.
        let most = usize::from(index == IRQ_ERROR);
        return if index < IRQS && start == 0 && count <= most {
            Ok(())
        } else {
            Err(Errno::INVAL)
        };
    };
    let inside = start
        .checked_add(count)
        .is_some_and(|end| end <= backend.vectors(kind));
    if !inside {
        return Err(Errno::INVAL);
    }
    // One kind of data and one action, and nothing that is not known.
    const NONE: u32 = SET_ACTION_TRIGGER | SET_DATA_NONE;
    const EVENTFD: u32 = SET_ACTION_TRIGGER | SET_DATA_EVENTFD;
    const MASK: u32 = SET_ACTION_MASK | SET_DATA_NONE;
    const UNMASK: u32 = SET_ACTION_UNMASK | SET_DATA_NONE;
    const UNMASK_BY: u32 = SET_ACTION_UNMASK | SET_DATA_EVENTFD;
    let is_pin = kind == Kind::Pin && count == 1;
    let masked = match (flags, fds.len()) {
        (MASK, 0) if is_pin => Some(PinChange::Mask),
        (UNMASK, 0) if is_pin => Some(PinChange::Unmask),
        (UNMASK_BY, 0 | 1) if is_pin => Some(PinChange::UnmaskBy(fds.pop())),
        _ => None,
    };
    if let Some(change) = masked {
        return backend.mask_pin(change).map_err(errno);
    }
    let change = match (flags, fds.len()) {
        (EVENTFD, 0) => VectorChange::Remove { start, count },
        (EVENTFD, given) if given == count => VectorChange::Assign { start, fds },
        (NONE, 0) if count == 0 => VectorChange::RemoveAll,
        (NONE, 0) => VectorChange::Raise { start, count },
        _ => return Err(Errno::INVAL),
    };
    backend.change_vectors(kind, change).map_err(errno)
}

/// Checks that there are `count` bytes, at least one, from `offset` on in the region.
fn check_range(backend: &dyn Backend, region: u32, offset: u64, count: usize) -> Result<(), Errno> {
    let inside = region < REGIONS
        && count > 0
        && offset
            .checked_add(count as u64)
            .is_some_and(|end| end <= backend.region_size(region));
    if inside {
        Ok(())
    } else {
        Err(Errno::INVAL)
    }
}

fn region_read(body: &[u8], backend: &mut dyn Backend) -> Answer {
    expect(body, 16)?;
    let offset = u64_at(body, 0);
    let region = u32_at(body, 8);
    let count = u32_at(body, 12) as usize;
    if count > MAX_TRANSFER {
        return Err(Errno::INVAL);
    }
    check_range(backend, region, offset, count)?;
    let mut reply = body[..16].to_vec();
    reply.resize(16 + count, 0);
    backend.region_read(region, offset, &mut reply[16..]);
    Ok(reply)
}

fn region_write(body: &[u8], backend: &mut dyn Backend) -> Answer {
    expect(body, 16)?;
    let offset = u64_at(body, 0);
    let region = u32_at(body, 8);
    let count = u32_at(body, 12) as usize;
    let data = body[16..].get(..count).ok_or(Errno::INVAL)?;
    check_range(backend, region, offset, count)?;
    backend.region_write(region, offset, data);
    Ok(body[..16].to_vec())
}

/// Several small writes in one message.
fn region_write_multi(body: &[u8], backend: &mut dyn Backend) -> Answer {
    const ONE: usize = 24;
    expect(body, 8)?;
    let count = u64_at(body, 0);
    let writes = body[8..].chunks_exact(ONE);
    if writes.len() as u64 != count {
        return Err(Errno::INVAL);
    }
    for write in writes {
        let offset = u64_at(write, 0);
        let region = u32_at(write, 8);
        let size = u32_at(write, 12) as usize;
        let data = write[16..].get(..size).ok_or(Errno::INVAL)?;
        check_range(backend, region, offset, size)?;
        backend.region_write(region, offset, data);
    }
    Ok(count.to_ne_bytes().to_vec())
}

/// Refuses a body that is shorter than its fixed fields.
fn expect(body: &[u8], size: usize) -> Result<(), Errno> {
    if body.len() < size {
        Err(Errno::INVAL)
    } else {
        Ok(())
    }
}

/// The same for a body that begins with the size that the peer takes it for.
fn expect_argsz(body: &[u8], size: usize) -> Result<(), Errno> {
    expect(body, size)?;
    if (u32_at(body, 0) as usize) < size {
        Err(Errno::INVAL)
    } else {
        Ok(())
    }
}

fn errno(error: io::Error) -> Errno {
    error
        .raw_os_error()
        .map_or(Errno::INVAL, Errno::from_raw_os_error)
}

fn words(values: &[u32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_ne_bytes())
        .collect()
}

// The callers have checked the length of what they pass.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | (u32::from(u16_at(bytes, at + 2)) << 16)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::thread;
    use vfio_bindings::bindings::vfio::*;

    #[derive(Default)]
    struct Recorder {
        writes: Vec<(u32, u64, Vec<u8>)>,
        maps: Vec<(u64, bool)>,
        unmapped_all: usize,
        changes: usize,
        masks: Vec<String>,
        batches: usize,
        resets: usize,
        /// How many batches there are before the device leaves.
        last: Option<usize>,
    }

    impl Backend for Recorder {
        fn region_size(&self, region: u32) -> u64 {
            if region == 0 {
                4096
            } else {
                0
            }
        }
        fn vectors(&self, kind: Kind) -> usize {
            match kind {
                Kind::Pin => 1,
                Kind::Msi => 2,
                Kind::MsiX => 4,
            }
        }
        fn region_read(&mut self, _region: u32, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) {
            self.writes.push((region, offset, data.to_vec()));
        }
        fn dma_map(&mut self, map: DmaMap) -> io::Result<()> {
            self.maps.push((map.address, map.fd.is_some()));
            Ok(())
        }
        fn dma_unmap(&mut self, _address: u64, _size: u64) -> io::Result<u64> {
            Err(Errno::NOENT.into())
        }
        fn dma_unmap_all(&mut self) -> u64 {
            self.unmapped_all += 1;
            0x5000
        }
        fn change_vectors(&mut self, _kind: Kind, _change: VectorChange) -> io::Result<()> {
            self.changes += 1;
            Ok(())
        }
        fn mask_pin(&mut self, change: PinChange) -> io::Result<()> {
            self.masks.push(format!("{change:?}"));
            Ok(())
        }
        fn reset(&mut self) {
            self.resets += 1;
        }
        fn batch_done(&mut self) {
            self.batches += 1;
        }
        fn is_over(&self) -> bool {
            self.last.is_some_and(|last| self.batches > last)
        }
    }

    fn message(id: u16, number: u16, flags: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&id.to_ne_bytes());
        bytes.extend_from_slice(&number.to_ne_bytes());
        bytes.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(body);
        bytes
    }

    fn write_body(region: u32, offset: u64, count: u32, data: &[u8]) -> Vec<u8> {
        let mut body = offset.to_ne_bytes().to_vec();
        body.extend_from_slice(&region.to_ne_bytes());
        body.extend_from_slice(&count.to_ne_bytes());
        body.extend_from_slice(data);
        body
    }

    /// Sends `bytes`, hangs up, and returns all replies.
    fn exchange(bytes: &[u8]) -> (Recorder, io::Result<()>, Vec<u8>) {
        let (server, mut client) = UnixStream::pair().unwrap();
        let worker = thread::spawn(move || {
            let mut recorder = Recorder::default();
            let result = Connection::new(server).serve(&mut recorder);
            (recorder, result)
        });
        client.write_all(bytes).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let mut replies = Vec::new();
        client.read_to_end(&mut replies).unwrap();
        let (recorder, result) = worker.join().unwrap();
        (recorder, result, replies)
    }

    #[test]
    fn nothing_is_done_for_who_is_left() {
        let (server, mut client) = UnixStream::pair().unwrap();
        let body = write_body(0, 8, 8, &[1; 8]);
        client
            .write_all(&message(1, command::REGION_WRITE, FLAG_NO_REPLY, &body))
            .unwrap();
        // It leaves while it waits for the first request.
        let mut recorder = Recorder {
            last: Some(0),
            ..Recorder::default()
        };
        Connection::new(server).serve(&mut recorder).unwrap();
        assert!(recorder.writes.is_empty());
    }

    #[test]
    fn posted_writes_are_taken_in_order_and_not_answered() {
        let mut bytes = Vec::new();
        for n in 0..1000u64 {
            let body = write_body(0, (n % 512) * 8, 8, &n.to_ne_bytes());
            bytes.extend(message(
                n as u16,
                command::REGION_WRITE,
                FLAG_NO_REPLY,
                &body,
            ));
        }
        let (recorder, result, replies) = exchange(&bytes);
        result.unwrap();
        assert!(replies.is_empty());
        assert_eq!(recorder.writes.len(), 1000);
        for (n, write) in recorder.writes.iter().enumerate() {
            assert_eq!(write.2, (n as u64).to_ne_bytes());
        }
        assert!(recorder.batches < 1000);
    }

    #[test]
    fn several_writes_in_one_message() {
        let mut body = 2u64.to_ne_bytes().to_vec();
        body.extend(write_body(0, 8, 8, &[1; 8]));
        body.extend(write_body(0, 16, 4, &[2; 8]));
        let bytes = message(1, command::REGION_WRITE_MULTI, FLAG_NO_REPLY, &body);
        let (recorder, _, _) = exchange(&bytes);
        assert_eq!(recorder.writes, [(0, 8, vec![1; 8]), (0, 16, vec![2; 4])]);
    }

    #[test]
    fn impossible_requests_get_an_error_and_the_next_one_is_served() {
        let bad: &[(u16, Vec<u8>)] = &[
            (command::REGION_READ, write_body(0, 4090, 8, &[])),
            (command::REGION_READ, write_body(0, u64::MAX, 8, &[])),
            (command::REGION_READ, write_body(99, 0, 4, &[])),
            (command::REGION_READ, write_body(0, 0, u32::MAX, &[])),
            (command::REGION_WRITE, write_body(0, 0, 8, &[0; 4])),
            (command::REGION_WRITE_MULTI, u64::MAX.to_ne_bytes().to_vec()),
            (command::GET_REGION_INFO, words(&[32, 0, 9, 0, 0, 0, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x24, 2, 3, 2])),
            (command::SET_IRQS, words(&[20, 0x24, 2, u32::MAX, u32::MAX])),
            // Two kinds of data, two actions, none, and bits that mean nothing.
            (command::SET_IRQS, words(&[20, 0x25, 2, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x31, 2, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x20, 2, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x01, 2, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x61, 2, 0, 0])),
            (command::SET_IRQS, words(&[20, 0x21, 5, 0, 0])),
            // More vectors than there are, and masks of what is no pin or by what is no
            // eventfd.
            (command::SET_IRQS, words(&[20, 0x21, 0, 0, 2])),
            (command::SET_IRQS, words(&[20, 0x21, 0, 1, 1])),
            (command::SET_IRQS, words(&[20, 0x21, 1, 2, 1])),
            (command::SET_IRQS, words(&[20, 0x11, 1, 0, 1])),
            (command::SET_IRQS, words(&[20, 0x09, 2, 0, 1])),
            (command::SET_IRQS, words(&[20, 0x0c, 0, 0, 1])),
            (command::SET_IRQS, words(&[20, 0x19, 0, 0, 1])),
            (command::SET_IRQS, words(&[20, 0x12, 0, 0, 1])),
            (command::SET_IRQS, words(&[20, 0x11, 0, 0, 0])),
            // Sizes that the peer gives and that are too small.
            (command::GET_INFO, words(&[15, 0, 0, 0])),
            (command::GET_REGION_INFO, words(&[31, 0, 0, 0, 0, 0, 0, 0])),
            (command::GET_IRQ_INFO, words(&[15, 0, 2, 0])),
            (command::SET_IRQS, words(&[19, 0x21, 2, 0, 0])),
            (command::DMA_MAP, words(&[31, 3, 0, 0, 0, 0, 0x1000, 0])),
            (command::DMA_UNMAP, words(&[23, 2, 0, 0, 0, 0])),
            // Not mapped; a new address for old memory; which pages are dirty;
            // all, but only a part of it.
            (command::DMA_UNMAP, words(&[24, 0, 0, 0, 0x1000, 0])),
            (command::DMA_MAP, words(&[32, 7, 0, 0, 0, 0, 0x1000, 0])),
            (command::DMA_UNMAP, words(&[24, 1, 0, 0, 0x1000, 0])),
            (command::DMA_UNMAP, words(&[24, 3, 0, 0, 0, 0])),
            (command::DMA_UNMAP, words(&[24, 4, 0, 0, 0x1000, 0])),
            (command::DMA_UNMAP, words(&[24, 6, 0, 0, 0, 0])),
            (command::DMA_UNMAP, words(&[24, 2, 0, 0, 0x1000, 0])),
            (command::DMA_UNMAP, words(&[24, 2, 0x1000, 0, 0, 0])),
            (command::DMA_UNMAP, vec![0; 24]),
            (command::DMA_MAP, vec![0; 5]),
            (14, vec![0; 40]),
            (4711, vec![]),
        ];
        for (number, body) in bad {
            let mut bytes = message(7, *number, 0, body);
            bytes.extend(message(8, command::RESET, 0, &[]));
            let (recorder, result, replies) = exchange(&bytes);
            result.unwrap();
            assert_eq!(replies.len(), 2 * HEADER, "command {number}");
            assert_eq!(u32_at(&replies, 8), FLAG_REPLY | FLAG_ERROR);
            assert_ne!(u32_at(&replies, 12), 0);
            assert_eq!(u16_at(&replies, HEADER), 8);
            assert_eq!(u32_at(&replies, HEADER + 8), FLAG_REPLY);
            assert_eq!(recorder.resets, 1);
            assert!(recorder.writes.is_empty());
            let changed = (recorder.maps.len(), recorder.unmapped_all, recorder.changes);
            assert_eq!(changed, (0, 0, 0), "command {number}");
            assert!(recorder.masks.is_empty(), "command {number}");
        }
    }

    #[test]
    fn each_kind_of_interrupts_is_told_of_as_it_is() {
        for (index, flags, count) in [(0, 7, 1), (1, 9, 2), (2, 9, 4), (3, 9, 1), (4, 0, 0)] {
            let info = words(&[16, 0, index, 0]);
            let (_, _, replies) = exchange(&message(3, command::GET_IRQ_INFO, 0, &info));
            assert_eq!(replies[HEADER..], words(&[16, flags, index, count]));
        }
        for (flags, name) in [(0x09, "Mask"), (0x11, "Unmask"), (0x14, "UnmaskBy(None)")] {
            let request = words(&[20, flags, 0, 0, 1]);
            let (recorder, _, replies) = exchange(&message(3, command::SET_IRQS, 0, &request));
            assert_eq!(u32_at(&replies, 8), FLAG_REPLY);
            assert_eq!(recorder.masks, [name]);
        }
    }

    #[test]
    fn all_memory_is_unmapped_by_one_request() {
        let all = words(&[24, VFIO_DMA_UNMAP_FLAG_ALL, 0, 0, 0, 0]);
        let (recorder, _, replies) = exchange(&message(3, command::DMA_UNMAP, 0, &all));
        assert_eq!(u32_at(&replies, 8), FLAG_REPLY);
        assert_eq!(u64_at(&replies, HEADER + 16), 0x5000);
        assert_eq!(recorder.unmapped_all, 1);
    }

    /// The numbers that the protocol takes from the kernel's interface, against
    /// those that were generated from the kernel's header.
    #[test]
    fn numbers_are_the_kernels() {
        for (own, kernel) in [
            (REGIONS, VFIO_PCI_NUM_REGIONS),
            (REGION_CONFIG, VFIO_PCI_CONFIG_REGION_INDEX),
            (IRQS, VFIO_PCI_NUM_IRQS),
            (IRQ_INTX, VFIO_PCI_INTX_IRQ_INDEX),
            (IRQ_MSI, VFIO_PCI_MSI_IRQ_INDEX),
            (IRQ_MSIX, VFIO_PCI_MSIX_IRQ_INDEX),
            (IRQ_ERROR, VFIO_PCI_ERR_IRQ_INDEX),
            (DEVICE_FLAG_RESET, VFIO_DEVICE_FLAGS_RESET),
            (DEVICE_FLAG_PCI, VFIO_DEVICE_FLAGS_PCI),
            (REGION_FLAG_READ, VFIO_REGION_INFO_FLAG_READ),
            (REGION_FLAG_WRITE, VFIO_REGION_INFO_FLAG_WRITE),
            (IRQ_FLAG_EVENTFD, VFIO_IRQ_INFO_EVENTFD),
            (IRQ_FLAG_MASKABLE, VFIO_IRQ_INFO_MASKABLE),
            (IRQ_FLAG_AUTOMASKED, VFIO_IRQ_INFO_AUTOMASKED),
            (IRQ_FLAG_NORESIZE, VFIO_IRQ_INFO_NORESIZE),
            (SET_DATA_NONE, VFIO_IRQ_SET_DATA_NONE),
            (SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_EVENTFD),
            (SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_MASK),
            (SET_ACTION_UNMASK, VFIO_IRQ_SET_ACTION_UNMASK),
            (SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_TRIGGER),
            (MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_READ),
            (MAP_FLAG_WRITE, VFIO_DMA_MAP_FLAG_WRITE),
            (
                UNMAP_FLAG_DIRTY_BITMAP,
                VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP,
            ),
            (UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_ALL),
        ] {
            assert_eq!(own, kernel);
        }
        // Where each field of a request is, of those with the kernel's layout.
        use std::mem::offset_of;
        assert_eq!(size_of::<vfio_iommu_type1_dma_unmap>(), 24);
        assert_eq!(offset_of!(vfio_iommu_type1_dma_unmap, flags), 4);
        assert_eq!(offset_of!(vfio_iommu_type1_dma_unmap, iova), 8);
        assert_eq!(offset_of!(vfio_iommu_type1_dma_unmap, size), 16);
        assert_eq!(size_of::<vfio_iommu_type1_dma_map>(), 32);
        assert_eq!(offset_of!(vfio_iommu_type1_dma_map, iova), 16);
        assert_eq!(offset_of!(vfio_iommu_type1_dma_map, size), 24);
        assert_eq!(size_of::<vfio_region_info>(), 32);
        assert_eq!(offset_of!(vfio_region_info, index), 8);
        assert_eq!(offset_of!(vfio_region_info, size), 16);
        assert_eq!(size_of::<vfio_irq_info>(), 16);
        assert_eq!(offset_of!(vfio_irq_info, count), 12);
        assert_eq!(size_of::<vfio_irq_set>(), 20);
        assert_eq!(offset_of!(vfio_irq_set, start), 12);
        assert_eq!(offset_of!(vfio_irq_set, count), 16);
    }

    /// The same against the header of the machine that the test runs on, which
    /// is newer than any crate.
    #[test]
    fn the_header_of_this_machine_says_the_same() {
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/vfio.h") else {
            eprintln!("skipped: no /usr/include/linux/vfio.h");
            return;
        };
        for (name, own) in [
            (
                "VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP",
                UNMAP_FLAG_DIRTY_BITMAP,
            ),
            ("VFIO_DMA_UNMAP_FLAG_ALL", UNMAP_FLAG_ALL),
            ("VFIO_DMA_MAP_FLAG_READ", MAP_FLAG_READ),
            ("VFIO_DMA_MAP_FLAG_WRITE", MAP_FLAG_WRITE),
            ("VFIO_IRQ_SET_DATA_NONE", SET_DATA_NONE),
            ("VFIO_IRQ_SET_DATA_EVENTFD", SET_DATA_EVENTFD),
            ("VFIO_IRQ_SET_ACTION_MASK", SET_ACTION_MASK),
            ("VFIO_IRQ_SET_ACTION_UNMASK", SET_ACTION_UNMASK),
            ("VFIO_IRQ_SET_ACTION_TRIGGER", SET_ACTION_TRIGGER),
            ("VFIO_IRQ_INFO_EVENTFD", IRQ_FLAG_EVENTFD),
            ("VFIO_IRQ_INFO_MASKABLE", IRQ_FLAG_MASKABLE),
            ("VFIO_IRQ_INFO_AUTOMASKED", IRQ_FLAG_AUTOMASKED),
            ("VFIO_IRQ_INFO_NORESIZE", IRQ_FLAG_NORESIZE),
        ] {
            // #define NAME (1 << N)
            let shift = header.lines().find_map(|line| {
                let rest = line.strip_prefix("#define ")?.strip_prefix(name)?;
                let value = rest.trim_start().strip_prefix("(1 <<")?;
                value.split(')').next()?.trim().parse::<u32>().ok()
            });
            assert_eq!(shift.map(|shift| 1 << shift), Some(own), "{name}");
        }
    }

    #[test]
    fn descriptors_of_one_request_are_counted() {
        let (server, client) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // The first bytes of a long request, each with as many as fit.
        let request = message(1, command::REGION_WRITE, 0, &[0; 1000]);
        for byte in &request[..3] {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            let fds = [file.as_fd(); 16];
            control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
            let slices = [io::IoSlice::new(std::slice::from_ref(byte))];
            let flags = rustix::net::SendFlags::empty();
            rustix::net::sendmsg(&client, &slices, &mut control, flags).unwrap();
        }
        let mut connection = Connection::new(server);
        assert!(connection.serve(&mut Recorder::default()).is_err());
        assert_eq!(connection.fds.len(), 1);
    }

    #[test]
    fn no_body_of_any_request_does_harm() {
        let mut recorder = Recorder::default();
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as usize
        };
        for _ in 0..200_000 {
            let number = (random() % 17) as u16;
            let mut body = Vec::new();
            for _ in 0..random() % 20 {
                // Mostly numbers that pass the first checks or just fail them.
                let word = match random() % 10 {
                    0 => u32::MAX,
                    1 => random() as u32,
                    2 => 4090 + random() as u32 % 10,
                    3..=5 => random() as u32 % 10,
                    _ => 0,
                };
                body.extend_from_slice(&word.to_ne_bytes());
            }
            // Whatever the answer is, it comes.
            let _ = dispatch(number, &body, Vec::new(), &mut recorder);
        }
        assert!(!recorder.writes.is_empty());
        for (region, offset, data) in recorder.writes {
            assert_eq!(region, 0);
            assert!(offset + data.len() as u64 <= 4096);
        }
    }

    #[test]
    fn an_impossible_size_ends_the_connection() {
        for size in [0u32, 15, u32::MAX] {
            let mut bytes = message(1, command::RESET, 0, &[]);
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            let (_, result, _) = exchange(&bytes);
            assert!(result.is_err());
        }
    }

    #[test]
    fn descriptors_stay_with_their_request() {
        let (server, client) = UnixStream::pair().unwrap();
        let map = |address: u64| {
            let mut body = words(&[32, 3]);
            body.extend_from_slice(&0u64.to_ne_bytes());
            body.extend_from_slice(&address.to_ne_bytes());
            body.extend_from_slice(&4096u64.to_ne_bytes());
            message(address as u16, command::DMA_MAP, FLAG_NO_REPLY, &body)
        };
        let file = std::fs::File::open("/dev/null").unwrap();
        for address in 0..20u64 {
            let bytes = map(address);
            let slices = [io::IoSlice::new(&bytes)];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
            let fds = [file.as_fd()];
            if address % 3 == 1 {
                control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds));
            }
            rustix::net::sendmsg(
                &client,
                &slices,
                &mut control,
                rustix::net::SendFlags::empty(),
            )
            .unwrap();
        }
        drop(client);
        let mut recorder = Recorder::default();
        Connection::new(server).serve(&mut recorder).unwrap();
        let expected: Vec<(u64, bool)> = (0..20).map(|n| (n, n % 3 == 1)).collect();
        assert_eq!(recorder.maps, expected);
    }
}
