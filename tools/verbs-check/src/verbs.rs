// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Verbs objects that are destroyed when the last user drops them, and in the right order.

use std::cell::RefCell;
use std::ffi::CStr;
use std::os::fd::RawFd;
use std::ptr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::direct::{self, ListWork};
use crate::sys::*;

/// An `errno` value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", std::io::Error::from_raw_os_error(self.0))
    }
}

pub(crate) fn last_errno() -> Errno {
    Errno(
        std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO),
    )
}

/// Turns the result of most verbs into a `Result`: 0, -1 with `errno`, or an errno value.
pub(crate) fn check(result: i32) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        -1 => Err(last_errno()),
        errno => Err(Errno(errno.abs())),
    }
}

/// Turns the object that a verb made, or null with `errno`, into a `Result`.
pub(crate) fn not_null<T>(pointer: *mut T) -> Result<*mut T, Errno> {
    if pointer.is_null() {
        Err(last_errno())
    } else {
        Ok(pointer)
    }
}

/// An open device and the port that is used.
pub struct Context {
    raw: *mut ibv_context,
    /// Port number.
    pub port: u8,
    /// Index of the GID used.
    pub gid_index: u32,
    /// That GID.
    pub gid: ibv_gid,
}

/// What a context is opened with.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Name of the device; the first one if none is given.
    pub device: Option<String>,
    /// GID index; that of the first RoCEv2 IPv4 address if none is given.
    pub gid_index: Option<u32>,
}

impl Context {
    /// Opens a device.
    pub fn open(options: &Options) -> Result<Rc<Self>, String> {
        let mut count = 0;
        // SAFETY: `count` is a place for the number.
        let list = unsafe { ibv_get_device_list(&mut count) };
        if list.is_null() {
            return Err(format!("no list of devices: {}", last_errno()));
        }
        let mut raw: *mut ibv_context = ptr::null_mut();
        for index in 0..count as usize {
            // SAFETY: the list has `count` devices, whose names are C strings.
            let (device, name) = unsafe {
                let device = *list.add(index);
                (device, CStr::from_ptr(ibv_get_device_name(device)))
            };
            let wanted = match &options.device {
                Some(wanted) => name.to_string_lossy() == *wanted,
                None => true,
            };
            if wanted && raw.is_null() {
                // SAFETY: the device is from the list.
                raw = unsafe { ibv_open_device(device) };
            }
        }
        // SAFETY: the list came from `ibv_get_device_list`.
        unsafe { ibv_free_device_list(list) };
        if raw.is_null() {
            return Err(format!("no device could be opened ({count} found)"));
        }
        let mut context = Self {
            raw,
            port: 1,
            gid_index: 0,
            gid: ibv_gid::default(),
        };
        context.choose_gid(options.gid_index)?;
        Ok(Rc::new(context))
    }

    fn choose_gid(&mut self, wanted: Option<u32>) -> Result<(), String> {
        for index in 0..256 {
            let mut entry = ibv_gid_entry::default();
            // SAFETY: the context is open and `entry` has the size that is said.
            let result = unsafe {
                _ibv_query_gid_ex(
                    self.raw,
                    u32::from(self.port),
                    index,
                    &mut entry,
                    0,
                    size_of::<ibv_gid_entry>(),
                )
            };
            if result != 0 {
                continue;
            }
            // SAFETY: all members of the union are plain bytes.
            let raw = unsafe { entry.gid.raw };
            let ipv4 = raw[..10] == [0; 10] && raw[10..12] == [0xff; 2];
            let fits = match wanted {
                Some(wanted) => wanted == index,
                None => entry.gid_type == IBV_GID_TYPE_ROCE_V2 && ipv4,
            };
            if fits {
                self.gid_index = index;
                self.gid = entry.gid;
                return Ok(());
            }
        }
        Err("the port has no such GID (RoCEv2 with an IPv4 address)".into())
    }

    /// The device's attributes.
    pub fn device_attr(&self) -> Result<ibv_device_attr, Errno> {
        let mut attr = ibv_device_attr::default();
        // SAFETY: the context is open.
        check(unsafe { ibv_query_device(self.raw, &mut attr) })?;
        Ok(attr)
    }

    /// The port's attributes.
    pub fn port_attr(&self) -> Result<ibv_port_attr, Errno> {
        let mut attr = ibv_port_attr::default();
        let verbs = self.extended();
        // SAFETY: the context is open, and `attr` has the size that is said.
        check(unsafe {
            match (*verbs).query_port {
                Some(query) => query(self.raw, self.port, &mut attr, size_of_val(&attr)),
                None => libc::ENOSYS,
            }
        })?;
        Ok(attr)
    }

    /// What the device is called.
    pub fn name(&self) -> String {
        // SAFETY: the context is open, and the names of devices are C strings.
        let name = unsafe { CStr::from_ptr(ibv_get_device_name((*self.raw).device)) };
        name.to_string_lossy().into_owned()
    }

    /// Completion vectors.
    pub fn comp_vectors(&self) -> u32 {
        // SAFETY: the context is open.
        unsafe { (*self.raw).num_comp_vectors as u32 }
    }

    /// The context itself, for calls that have no function here.
    pub fn raw(&self) -> *mut ibv_context {
        self.raw
    }

    /// The structure around the plain context that has the newer operations.
    pub fn extended(&self) -> *mut verbs_context {
        // SAFETY: every context of this libibverbs is the last field of a `verbs_context`.
        unsafe {
            self.raw
                .byte_sub(std::mem::offset_of!(verbs_context, context))
                .cast()
        }
    }

    /// The path to this very port.
    pub fn own_path(&self) -> ibv_ah_attr {
        let mut path = ibv_ah_attr {
            is_global: 1,
            port_num: self.port,
            ..Default::default()
        };
        path.grh.dgid = self.gid;
        path.grh.sgid_index = self.gid_index as u8;
        path.grh.hop_limit = 64;
        path
    }

    /// Waits for an asynchronous event: its type, and the number of its queue pair (0 without).
    pub fn async_event(&self, timeout: Duration) -> Result<Option<(u32, u32)>, Errno> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.raw).async_fd };
        if !readable(fd, timeout)? {
            return Ok(None);
        }
        let mut event = ibv_async_event {
            // SAFETY: zero is a valid value of the union of pointers and numbers.
            element: unsafe { std::mem::zeroed() },
            event_type: 0,
        };
        // SAFETY: the context is open, and an event that was got is acknowledged once.
        unsafe {
            check(ibv_get_async_event(self.raw, &mut event))?;
            let qpn = match event.event_type {
                IBV_EVENT_QP_FATAL
                | IBV_EVENT_QP_REQ_ERR
                | IBV_EVENT_QP_ACCESS_ERR
                | IBV_EVENT_COMM_EST
                | IBV_EVENT_SQ_DRAINED
                | IBV_EVENT_PATH_MIG
                | IBV_EVENT_PATH_MIG_ERR
                | IBV_EVENT_QP_LAST_WQE_REACHED => (*event.element.qp).qp_num,
                _ => 0,
            };
            ibv_ack_async_event(&mut event);
            Ok(Some((event.event_type, qpn)))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything made with the context holds it and is gone.
        unsafe { ibv_close_device(self.raw) };
    }
}

fn readable(fd: RawFd, timeout: Duration) -> Result<bool, Errno> {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one `pollfd` is passed.
    match unsafe { libc::poll(&mut poll, 1, timeout.as_millis() as i32) } {
        -1 => Err(last_errno()),
        ready => Ok(ready > 0),
    }
}

/// A protection domain.
pub struct Pd {
    raw: *mut ibv_pd,
    context: Rc<Context>,
}

impl Pd {
    /// Makes one.
    pub fn new(context: &Rc<Context>) -> Result<Rc<Self>, Errno> {
        // SAFETY: the context is open.
        let raw = not_null(unsafe { ibv_alloc_pd(context.raw) })?;
        Ok(Rc::new(Self {
            raw,
            context: context.clone(),
        }))
    }

    /// Shares the memory of the region that has this key; see [`direct::share_by_key`].
    pub fn share_by_key(
        &self,
        key: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> Result<(), Errno> {
        // SAFETY: the domain lives.
        unsafe { direct::share_by_key(self.raw, key, address, length, access) }
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: all users of the domain hold it and are gone.
        let result = unsafe { ibv_dealloc_pd(self.raw) };
        complain("ibv_dealloc_pd", result);
    }
}

/// A destroy that fails is a finding of its own, wherever it happens.
fn complain(what: &str, result: i32) {
    if result != 0 {
        crate::report::complaint(format!("{what}: {}", Errno(result.abs())));
    }
}

/// How a buffer is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferKind {
    /// Ordinary memory.
    Plain,
    /// Huge pages.
    Huge,
    /// The same few megabytes again and again.
    Repeated,
}

/// What can happen to memory while it is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Its pages are given back and read as zero.
    Discard,
    /// It is unmapped.
    Unmap,
    /// Other memory is mapped in its place.
    Replace,
    /// It may not be written any more.
    ReadOnly,
    /// It is moved to another address, and moved back.
    Move,
    /// The process forks; the child writes its copy and ends.
    Fork,
}

/// Bytes that repeat in a [`BufferKind::Repeated`] buffer.
pub const REPEAT: usize = 4 << 20;

/// Memory to register.
pub struct Buffer {
    base: *mut u8,
    length: usize,
    mapped: usize,
}

impl Buffer {
    /// Maps memory.
    pub fn new(length: usize, kind: BufferKind) -> Result<Rc<Self>, Errno> {
        let unit = match kind {
            BufferKind::Plain => 4096,
            BufferKind::Huge => 2 << 20,
            BufferKind::Repeated => REPEAT,
        };
        let mapped = length.max(1).next_multiple_of(unit);
        let flags = match kind {
            BufferKind::Plain => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            BufferKind::Huge => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB,
            BufferKind::Repeated => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
        };
        if kind == BufferKind::Huge {
            // There may be none set aside; that this is not allowed shows below.
            let _ = std::fs::write("/proc/sys/vm/nr_hugepages", "8");
        }
        // SAFETY: a fresh mapping touches no memory in use.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(last_errno());
        }
        let buffer = Self {
            base: base.cast(),
            length,
            mapped,
        };
        if kind == BufferKind::Repeated {
            buffer.repeat()?;
        }
        Ok(Rc::new(buffer))
    }

    /// Maps one file over all of the buffer, piece by piece.
    fn repeat(&self) -> Result<(), Errno> {
        // SAFETY: the name is a C string.
        let fd = unsafe { libc::memfd_create(c"verbs-check".as_ptr(), 0) };
        if fd < 0 {
            return Err(last_errno());
        }
        // SAFETY: the file is ours, and each piece replaces a part of this buffer's own mapping.
        unsafe {
            let mut result = Ok(());
            if libc::ftruncate(fd, REPEAT as i64) != 0 {
                result = Err(last_errno());
            }
            for offset in (0..self.mapped).step_by(REPEAT) {
                if result.is_err() {
                    break;
                }
                let piece = libc::mmap(
                    self.base.add(offset).cast(),
                    REPEAT,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_SHARED | libc::MAP_FIXED,
                    fd,
                    0,
                );
                if piece == libc::MAP_FAILED {
                    result = Err(last_errno());
                }
            }
            libc::close(fd);
            result
        }
    }

    /// Changes what is behind a part of the buffer, in whole pages. Only for regions on demand:
    /// others have their pages pinned.
    pub fn change(&self, change: Change, offset: usize, length: usize) -> Result<(), Errno> {
        self.range(offset, length)?;
        let mapped = |address: *mut libc::c_void| {
            if address == libc::MAP_FAILED {
                Err(last_errno())
            } else {
                Ok(address)
            }
        };
        let done = |result: libc::c_int| match result {
            0 => Ok(()),
            _ => Err(last_errno()),
        };
        let both = libc::PROT_READ | libc::PROT_WRITE;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the range is part of this buffer's own mapping, of which nothing holds a
        // reference; who reads or writes it afterwards where it is unmapped is a broken check.
        unsafe {
            let at: *mut libc::c_void = self.base.add(offset).cast();
            match change {
                Change::Discard => done(libc::madvise(at, length, libc::MADV_DONTNEED)),
                Change::Unmap => done(libc::munmap(at, length)),
                Change::Replace => mapped(libc::mmap(
                    at,
                    length,
                    both,
                    anonymous | libc::MAP_FIXED,
                    -1,
                    0,
                ))
                .map(drop),
                Change::ReadOnly => done(libc::mprotect(at, length, libc::PROT_READ)),
                Change::Move => {
                    let place = mapped(libc::mmap(
                        ptr::null_mut(),
                        length,
                        libc::PROT_NONE,
                        anonymous,
                        -1,
                        0,
                    ))?;
                    let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                    mapped(libc::mremap(at, length, length, moves, place))?;
                    mapped(libc::mremap(place, length, length, moves, at)).map(drop)
                }
                Change::Fork => match libc::fork() {
                    -1 => Err(last_errno()),
                    0 => {
                        // Only what is safe between fork and exit.
                        libc::memset(at, 0x99, length);
                        libc::_exit(0)
                    }
                    child => {
                        let mut status = 0;
                        if libc::waitpid(child, &mut status, 0) != child || status != 0 {
                            return Err(Errno(libc::ECHILD));
                        }
                        Ok(())
                    }
                },
            }
        }
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Copies bytes in.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), Errno> {
        self.range(offset, bytes.len())?;
        // SAFETY: the range is inside the mapping. A device may write there at the same time only
        // if the check itself is wrong, and then the bytes differ, which is what is looked for.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(offset), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), Errno> {
        self.range(offset, bytes.len())?;
        // SAFETY: `range` has checked that so many bytes are in the buffer from `offset` on; a slice that is
        // borrowed to be written is not the buffer.
        unsafe { ptr::copy_nonoverlapping(self.base.add(offset), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn range(&self, offset: usize, length: usize) -> Result<(), Errno> {
        match offset.checked_add(length) {
            Some(end) if end <= self.length => Ok(()),
            _ => Err(Errno(libc::ERANGE)),
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and regions hold their buffer.
        unsafe { libc::munmap(self.base.cast(), self.mapped) };
    }
}

/// How many bytes of this process's memory are pinned.
pub fn pinned() -> Result<u64, Errno> {
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok());
    kibibytes
        .map(|kibibytes: u64| kibibytes << 10)
        .ok_or(Errno(libc::EPROTO))
}

/// A memory region, or a key for lists of pieces of others.
pub struct Mr {
    raw: *mut ibv_mr,
    _pd: Rc<Pd>,
    buffer: RefCell<Option<Rc<Buffer>>>,
}

impl Mr {
    /// Registers a part of a buffer.
    pub fn new(
        pd: &Rc<Pd>,
        buffer: &Rc<Buffer>,
        offset: usize,
        length: usize,
        access: u32,
    ) -> Result<Self, Errno> {
        buffer.range(offset, length)?;
        // SAFETY: the range is mapped, and stays so as long as the region holds the buffer.
        let raw = not_null(unsafe {
            ibv_reg_mr(
                pd.raw,
                buffer.base.add(offset).cast(),
                length,
                access as i32,
            )
        })?;
        Ok(Self {
            raw,
            _pd: pd.clone(),
            buffer: RefCell::new(Some(buffer.clone())),
        })
    }

    /// Makes a key for lists.
    pub fn list(pd: &Rc<Pd>, max_pieces: u32) -> Result<Self, Errno> {
        // SAFETY: the domain lives.
        let raw = unsafe { direct::alloc_list(pd.raw, max_pieces) }?;
        Ok(Self {
            raw,
            _pd: pd.clone(),
            buffer: RefCell::new(None),
        })
    }

    /// Registers the memory of a region once more, with other rights or in another domain.
    pub fn shared(pd: &Rc<Pd>, of: &Mr, access: u32) -> Result<Self, Errno> {
        // SAFETY: the domain lives and the region is registered.
        let raw = unsafe { direct::reg_shared_mr(pd.raw, of.raw, access) }?;
        Ok(Self {
            raw,
            _pd: pd.clone(),
            buffer: RefCell::new(of.buffer.borrow().clone()),
        })
    }

    /// Registers the same memory anew, with other rights.
    pub fn change_access(&self, access: u32) -> Result<(), Errno> {
        let none = ptr::null_mut();
        // SAFETY: memory stays.
        unsafe { self.change(IBV_REREG_MR_CHANGE_ACCESS, none, 0, access) }
    }

    /// Registers other memory, with the same rights.
    pub fn change_memory(&self, buffer: &Rc<Buffer>, length: usize) -> Result<(), Errno> {
        buffer.range(0, length)?;
        // SAFETY: the range is mapped, and stays so as long as the region holds the buffer.
        unsafe { self.change(IBV_REREG_MR_CHANGE_TRANSLATION, buffer.base, length, 0) }?;
        self.buffer.replace(Some(buffer.clone()));
        Ok(())
    }

    /// # Safety
    ///
    /// What memory is named stays mapped.
    unsafe fn change(
        &self,
        flags: u32,
        start: *mut u8,
        length: usize,
        access: u32,
    ) -> Result<(), Errno> {
        // SAFETY: the region is registered; the domain stays, and the rest is by the caller.
        let result = unsafe {
            ibv_rereg_mr(
                self.raw,
                flags as i32,
                ptr::null_mut(),
                start.cast(),
                length,
                access as i32,
            )
        };
        match result {
            0 => Ok(()),
            // Which part of it failed; why is in `errno`.
            _ => Err(last_errno()),
        }
    }

    /// Local key.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.raw).lkey }
    }

    /// Remote key.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is registered.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: the region is registered.
        let result = unsafe { ibv_dereg_mr(self.raw) };
        complain("ibv_dereg_mr", result);
    }
}

/// A memory window.
pub struct Mw {
    raw: *mut ibv_mw,
    context: Rc<Context>,
    _pd: Rc<Pd>,
}

impl Mw {
    /// Makes one of a type (`ibv_mw_type`), bound to nothing.
    pub fn new(pd: &Rc<Pd>, kind: u32) -> Result<Self, Errno> {
        // SAFETY: the domain lives.
        let raw = not_null(unsafe {
            match (*pd.context.raw).ops.alloc_mw {
                Some(alloc) => alloc(pd.raw, kind),
                None => return Err(Errno(libc::ENOSYS)),
            }
        })?;
        Ok(Self {
            raw,
            context: pd.context.clone(),
            _pd: pd.clone(),
        })
    }

    /// The key: of type 1 the present one, of type 2 the first.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window lives.
        unsafe { (*self.raw).rkey }
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: the window lives.
        let result = unsafe {
            match (*self.context.raw).ops.dealloc_mw {
                Some(dealloc) => dealloc(self.raw),
                None => libc::ENOSYS,
            }
        };
        complain("ibv_dealloc_mw", result);
    }
}

/// What a window is bound to.
#[derive(Clone, Copy, Debug)]
pub struct BindWork {
    /// Returned in the completion, which there is in any case.
    pub wr_id: u64,
    /// The key of a window of type 2 afterwards.
    pub rkey: u32,
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
    /// `ibv_access_flags` and [`direct::ONE_TOUCH`].
    pub access: u32,
}

/// A completion channel.
pub struct Channel {
    raw: *mut ibv_comp_channel,
    _context: Rc<Context>,
}

impl Channel {
    /// Makes one.
    pub fn new(context: &Rc<Context>) -> Result<Rc<Self>, Errno> {
        // SAFETY: the context is open.
        let raw = not_null(unsafe { ibv_create_comp_channel(context.raw) })?;
        Ok(Rc::new(Self {
            raw,
            _context: context.clone(),
        }))
    }

    /// Waits for an event; true if one came. It is acknowledged.
    pub fn event(&self, timeout: Duration) -> Result<Option<*mut ibv_cq>, Errno> {
        // SAFETY: the channel is live.
        let fd = unsafe { (*self.raw).fd };
        if !readable(fd, timeout)? {
            return Ok(None);
        }
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live, and an event that was got is acknowledged once.
        unsafe {
            check(ibv_get_cq_event(self.raw, &mut cq, &mut context))?;
            ibv_ack_cq_events(cq, 1);
        }
        Ok(Some(cq))
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: completion queues hold their channel and are gone.
        let result = unsafe { ibv_destroy_comp_channel(self.raw) };
        complain("ibv_destroy_comp_channel", result);
    }
}

/// A completion, whichever way it was polled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completion {
    /// What the work request was posted with.
    pub wr_id: u64,
    /// `ibv_wc_status`.
    pub status: u32,
    /// `ibv_wc_opcode`; counts only with success.
    pub opcode: u32,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data or the key that was invalidated, if the flags say so.
    pub immediate: u32,
    /// Queue pair.
    pub qpn: u32,
    /// `ibv_wc_flags`.
    pub flags: u32,
    /// `vendor_err`; counts only with an error.
    pub vendor_err: u32,
}

/// A completion queue.
pub struct Cq {
    raw: *mut ibv_cq,
    extended: bool,
    _channel: Option<Rc<Channel>>,
    context: Rc<Context>,
}

impl Cq {
    /// Makes one, for the extended way of polling if asked.
    pub fn new(
        context: &Rc<Context>,
        entries: u32,
        channel: Option<Rc<Channel>>,
        vector: u32,
        extended: bool,
    ) -> Result<Rc<Self>, Errno> {
        let raw_channel = channel.as_ref().map_or(ptr::null_mut(), |c| c.raw);
        let raw = if extended {
            let mut attr = ibv_cq_init_attr_ex {
                cqe: entries,
                channel: raw_channel,
                comp_vector: vector,
                wc_flags: u64::from(
                    IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM,
                ),
                ..Default::default()
            };
            // SAFETY: the context is open and the attributes are complete.
            unsafe {
                match (*context.extended()).create_cq_ex {
                    Some(create) => create(context.raw, &mut attr).cast(),
                    None => return Err(Errno(libc::ENOSYS)),
                }
            }
        } else {
            // SAFETY: the context is open.
            unsafe {
                ibv_create_cq(
                    context.raw,
                    entries as i32,
                    ptr::null_mut(),
                    raw_channel,
                    vector as i32,
                )
            }
        };
        Ok(Rc::new(Self {
            raw: not_null(raw)?,
            extended,
            _channel: channel,
            context: context.clone(),
        }))
    }

    /// The structure's address, as events name it.
    pub fn raw(&self) -> *mut ibv_cq {
        self.raw
    }

    /// Takes a completion if there is one.
    pub fn poll(&self) -> Result<Option<Completion>, Errno> {
        if self.extended {
            return self.poll_extended();
        }
        let mut wc = ibv_wc::default();
        // SAFETY: the queue is live and there is room for one completion.
        let count = unsafe {
            match (*(*self.raw).context).ops.poll_cq {
                Some(poll) => poll(self.raw, 1, &mut wc),
                None => return Err(Errno(libc::ENOSYS)),
            }
        };
        match count {
            0 => Ok(None),
            1 => Ok(Some(Completion {
                wr_id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                byte_len: wc.byte_len,
                // SAFETY: both members are 32-bit numbers.
                immediate: unsafe { wc.__bindgen_anon_1.imm_data },
                qpn: wc.qp_num,
                flags: wc.wc_flags,
                vendor_err: wc.vendor_err,
            })),
            _ => Err(Errno(libc::EIO)),
        }
    }

    fn poll_extended(&self) -> Result<Option<Completion>, Errno> {
        let cq: *mut ibv_cq_ex = self.raw.cast();
        let mut attr = ibv_poll_cq_attr::default();
        // SAFETY: the queue was made with the extended interface, so that the operations asked for
        // are there; they are called in the order the verbs demand.
        unsafe {
            let operations = &*cq;
            let (
                Some(start),
                Some(end),
                Some(opcode),
                Some(length),
                Some(immediate),
                Some(qpn),
                Some(flags),
                Some(vendor_err),
            ) = (
                operations.start_poll,
                operations.end_poll,
                operations.read_opcode,
                operations.read_byte_len,
                operations.read_imm_data,
                operations.read_qp_num,
                operations.read_wc_flags,
                operations.read_vendor_err,
            )
            else {
                return Err(Errno(libc::ENOSYS));
            };
            match start(cq, &mut attr) {
                0 => {}
                libc::ENOENT => return Ok(None),
                errno => return Err(Errno(errno)),
            }
            let mut completion = Completion {
                wr_id: (*cq).wr_id,
                status: (*cq).status,
                qpn: qpn(cq),
                ..Default::default()
            };
            if completion.status == IBV_WC_SUCCESS {
                completion.opcode = opcode(cq);
                completion.byte_len = length(cq);
                completion.flags = flags(cq);
                // The key that a peer ended is told in the same place.
                if completion.flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV) != 0 {
                    completion.immediate = immediate(cq);
                }
            } else {
                completion.vendor_err = vendor_err(cq);
            }
            end(cq);
            Ok(Some(completion))
        }
    }

    /// Waits for a completion.
    pub fn wait(&self, timeout: Duration) -> Result<Option<Completion>, Errno> {
        let deadline = Instant::now() + timeout;
        let mut turns = 0u32;
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(Some(completion));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            // Others need the processor as well: the peer in loopback, the guest's network.
            turns += 1;
            if turns < 2000 {
                std::thread::yield_now();
            } else {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// Asks for an event.
    pub fn arm(&self, solicited: bool) -> Result<(), Errno> {
        // SAFETY: the queue is live.
        check(unsafe {
            match (*(*self.raw).context).ops.req_notify_cq {
                Some(arm) => arm(self.raw, i32::from(solicited)),
                None => libc::ENOSYS,
            }
        })
    }

    /// Has events wait for so many completions, or so long from the first of them.
    pub fn moderate(&self, count: u16, microseconds: u16) -> Result<(), Errno> {
        let mut attributes = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq {
                cq_count: count,
                cq_period: microseconds,
            },
        };
        // SAFETY: the context is open and the queue is live.
        check(unsafe {
            match (*self.context.extended()).modify_cq {
                Some(modify) => modify(self.raw, &mut attributes),
                None => libc::ENOSYS,
            }
        })
    }

    /// Changes the number of entries.
    pub fn resize(&self, entries: u32) -> Result<(), Errno> {
        // SAFETY: the queue is live.
        check(unsafe { ibv_resize_cq(self.raw, entries as i32) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their queues and are gone.
        let result = unsafe { ibv_destroy_cq(self.raw) };
        complain("ibv_destroy_cq", result);
    }
}

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions {
    /// Work requests in the send queue.
    pub send_wr: u32,
    /// Work requests in the receive queue.
    pub recv_wr: u32,
    /// Entries of a send.
    pub send_sge: u32,
    /// Entries of a receive.
    pub recv_sge: u32,
    /// Bytes of inline data.
    pub inline: u32,
    /// Every send completes.
    pub signal_all: bool,
    /// Post through the `ibv_wr_*` interface.
    pub extended: bool,
    /// What it can do beyond the verbs: [`direct::LISTS`], [`direct::DRAINS`].
    pub direct: u32,
}

/// A scatter/gather entry: address, length, key.
pub type Entry = (u64, u32, u32);

/// A send work request.
#[derive(Clone, Debug, Default)]
pub struct SendWork {
    /// Returned in the completion.
    pub wr_id: u64,
    /// `ibv_wr_opcode`.
    pub opcode: u32,
    /// `ibv_send_flags`.
    pub flags: u32,
    /// Immediate data, or the key to invalidate.
    pub immediate: u32,
    /// Address at the peer.
    pub remote_address: u64,
    /// Key at the peer.
    pub rkey: u32,
    /// Atomics: the value to compare with or to add, and the value to store.
    pub operands: (u64, u64),
    /// Address, length, key.
    pub entries: Vec<(u64, u32, u32)>,
}

/// A queue pair.
pub struct Qp {
    raw: *mut ibv_qp,
    extended: bool,
    context: Rc<Context>,
    _cqs: [Rc<Cq>; 2],
    _pd: Rc<Pd>,
}

impl Qp {
    /// Makes a reliable connected one; also gives what it can do.
    pub fn new(
        pd: &Rc<Pd>,
        send_cq: &Rc<Cq>,
        recv_cq: &Rc<Cq>,
        options: &QpOptions,
    ) -> Result<(Self, ibv_qp_cap), Errno> {
        let cap = ibv_qp_cap {
            max_send_wr: options.send_wr,
            max_recv_wr: options.recv_wr,
            max_send_sge: options.send_sge,
            max_recv_sge: options.recv_sge,
            max_inline_data: options.inline,
        };
        let mut attr = ibv_qp_init_attr_ex {
            send_cq: send_cq.raw,
            recv_cq: recv_cq.raw,
            cap,
            qp_type: IBV_QPT_RC,
            sq_sig_all: i32::from(options.signal_all),
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: pd.raw,
            ..Default::default()
        };
        if options.extended {
            attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
            attr.send_ops_flags = u64::from(
                IBV_QP_EX_WITH_SEND
                    | IBV_QP_EX_WITH_SEND_WITH_IMM
                    | IBV_QP_EX_WITH_RDMA_WRITE
                    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                    | IBV_QP_EX_WITH_RDMA_READ,
            );
            if options.direct != 0 {
                attr.send_ops_flags |=
                    u64::from(IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV);
            }
        }
        let raw = if options.direct != 0 {
            // SAFETY: the attributes are complete and all objects live.
            unsafe { direct::create_qp(pd.context.raw, &mut attr, options.direct) }?
        } else if options.extended {
            // SAFETY: the attributes are complete and all objects live.
            unsafe {
                match (*pd.context.extended()).create_qp_ex {
                    Some(create) => create(pd.context.raw, &mut attr),
                    None => return Err(Errno(libc::ENOSYS)),
                }
            }
        } else {
            // SAFETY: the attributes are complete and all objects live; the plain attributes are the start
            // of the extended ones.
            unsafe { ibv_create_qp(pd.raw, (&raw mut attr).cast()) }
        };
        Ok((
            Self {
                raw: not_null(raw)?,
                extended: options.extended,
                context: pd.context.clone(),
                _cqs: [send_cq.clone(), recv_cq.clone()],
                _pd: pd.clone(),
            },
            attr.cap,
        ))
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.raw).qp_num }
    }

    fn modify(&self, mut attr: ibv_qp_attr, mask: u32) -> Result<(), Errno> {
        // SAFETY: the queue pair is live.
        check(unsafe { ibv_modify_qp(self.raw, &mut attr, mask as i32) })
    }

    /// Only asks for a state, without any attribute.
    pub fn to_state(&self, state: u32) -> Result<(), Errno> {
        let attr = ibv_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        self.modify(attr, IBV_QP_STATE)
    }

    /// To INIT.
    pub fn to_init(&self, access: u32) -> Result<(), Errno> {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            pkey_index: 0,
            port_num: self.context.port,
            qp_access_flags: access,
            ..Default::default()
        };
        self.modify(
            attr,
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        )
    }

    /// To RTR.
    pub fn to_rtr(
        &self,
        peer: u32,
        gid: [u8; 16],
        psn: u32,
        mtu: u32,
        rnr_timer: u8,
    ) -> Result<(), Errno> {
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: mtu,
            dest_qp_num: peer,
            rq_psn: psn,
            max_dest_rd_atomic: 4,
            min_rnr_timer: rnr_timer,
            ..Default::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = self.context.port;
        attr.ah_attr.grh.dgid.raw = gid;
        attr.ah_attr.grh.sgid_index = self.context.gid_index as u8;
        attr.ah_attr.grh.hop_limit = 64;
        self.modify(
            attr,
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
        )
    }

    /// To RTS.
    pub fn to_rts(&self, psn: u32, timeout: u8, retry: u8, rnr_retry: u8) -> Result<(), Errno> {
        let attr = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: psn,
            timeout,
            retry_cnt: retry,
            rnr_retry,
            max_rd_atomic: 4,
            ..Default::default()
        };
        self.modify(
            attr,
            IBV_QP_STATE
                | IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC,
        )
    }

    /// The present state.
    pub fn state(&self) -> Result<u32, Errno> {
        let mut attr = ibv_qp_attr::default();
        let mut init = ibv_qp_init_attr::default();
        // SAFETY: the queue pair is live and there is room for the answers.
        check(unsafe { ibv_query_qp(self.raw, &mut attr, IBV_QP_STATE as i32, &mut init) })?;
        Ok(attr.qp_state)
    }

    /// Posts a send work request.
    pub fn post_send(&self, work: &SendWork) -> Result<(), Errno> {
        let mut entries: Vec<ibv_sge> = sges(&work.entries);
        if self.extended {
            return self.post_extended(work, &entries);
        }
        let mut wr = ibv_send_wr {
            wr_id: work.wr_id,
            sg_list: entries.as_mut_ptr(),
            num_sge: entries.len() as i32,
            opcode: work.opcode,
            send_flags: work.flags,
            ..Default::default()
        };
        wr.__bindgen_anon_1.imm_data = work.immediate;
        if matches!(
            work.opcode,
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD
        ) {
            wr.wr.atomic.remote_addr = work.remote_address;
            wr.wr.atomic.rkey = work.rkey;
            wr.wr.atomic.compare_add = work.operands.0;
            wr.wr.atomic.swap = work.operands.1;
        } else {
            wr.wr.rdma.remote_addr = work.remote_address;
            wr.wr.rdma.rkey = work.rkey;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live, the work request complete, its list as long as it says.
        let result = check(unsafe {
            match (*(*self.raw).context).ops.post_send {
                Some(post) => post(self.raw, &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        });
        if result.is_err() && bad != &raw mut wr {
            crate::report::complaint("a refused post named no work request".into());
        }
        result
    }

    fn post_extended(&self, work: &SendWork, entries: &[ibv_sge]) -> Result<(), Errno> {
        let qp: *mut ibv_qp_ex = self.raw.cast();
        // SAFETY: the queue pair was made with these operations, which are called in the order the
        // verbs demand.
        unsafe {
            let operations = ptr::read(qp);
            let missing = Errno(libc::ENOSYS);
            operations.wr_start.ok_or(missing)?(qp);
            (*qp).wr_id = work.wr_id;
            (*qp).wr_flags = work.flags & !IBV_SEND_INLINE;
            match work.opcode {
                IBV_WR_SEND => operations.wr_send.ok_or(missing)?(qp),
                IBV_WR_SEND_WITH_IMM => {
                    operations.wr_send_imm.ok_or(missing)?(qp, work.immediate);
                }
                IBV_WR_SEND_WITH_INV => {
                    operations.wr_send_inv.ok_or(missing)?(qp, work.immediate);
                }
                IBV_WR_LOCAL_INV => {
                    operations.wr_local_inv.ok_or(missing)?(qp, work.immediate);
                    return check(operations.wr_complete.ok_or(missing)?(qp));
                }
                IBV_WR_RDMA_WRITE => {
                    operations.wr_rdma_write.ok_or(missing)?(qp, work.rkey, work.remote_address);
                }
                IBV_WR_RDMA_WRITE_WITH_IMM => operations.wr_rdma_write_imm.ok_or(missing)?(
                    qp,
                    work.rkey,
                    work.remote_address,
                    work.immediate,
                ),
                _ => operations.wr_rdma_read.ok_or(missing)?(qp, work.rkey, work.remote_address),
            }
            if work.flags & IBV_SEND_INLINE != 0 {
                let list: Vec<ibv_data_buf> = entries
                    .iter()
                    .map(|entry| ibv_data_buf {
                        addr: entry.addr as *mut _,
                        length: entry.length as usize,
                    })
                    .collect();
                operations.wr_set_inline_data_list.ok_or(missing)?(qp, list.len(), list.as_ptr());
            } else {
                operations.wr_set_sge_list.ok_or(missing)?(qp, entries.len(), entries.as_ptr());
            }
            check(operations.wr_complete.ok_or(missing)?(qp))
        }
    }

    /// Posts the registration of a list under one of its keys.
    pub fn post_list(&self, mr: &Mr, work: &ListWork) -> Result<(), Errno> {
        // SAFETY: queue pair and key live.
        unsafe { direct::post_list(self.raw, self.extended, mr.raw, work) }
    }

    /// Binds a window of type 1; its key afterwards.
    pub fn bind1(&self, mw: &Mw, mr: &Mr, work: &BindWork) -> Result<u32, Errno> {
        let mut bind = ibv_mw_bind {
            wr_id: work.wr_id,
            send_flags: IBV_SEND_SIGNALED,
            bind_info: bind_info(mr, work),
        };
        // SAFETY: queue pair, window and region live.
        check(unsafe {
            match (*(*self.raw).context).ops.bind_mw {
                Some(call) => call(self.raw, mw.raw, &mut bind),
                None => libc::ENOSYS,
            }
        })?;
        Ok(mw.rkey())
    }

    /// Binds a window of type 2, whose next key the program chooses.
    pub fn bind2(&self, mw: &Mw, mr: &Mr, work: &BindWork) -> Result<u32, Errno> {
        let mut wr = ibv_send_wr {
            wr_id: work.wr_id,
            opcode: IBV_WR_BIND_MW,
            send_flags: IBV_SEND_SIGNALED,
            ..Default::default()
        };
        wr.__bindgen_anon_2.bind_mw.mw = mw.raw;
        wr.__bindgen_anon_2.bind_mw.rkey = work.rkey;
        wr.__bindgen_anon_2.bind_mw.bind_info = bind_info(mr, work);
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair, the window and the region live, as they are borrowed, and the work
        // request is complete.
        check(unsafe {
            match (*(*self.raw).context).ops.post_send {
                Some(post) => post(self.raw, &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        })?;
        Ok(work.rkey)
    }

    /// Posts a receive.
    pub fn post_recv(&self, wr_id: u64, entries: &[(u64, u32, u32)]) -> Result<(), Errno> {
        let mut entries = sges(entries);
        let mut wr = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: entries.as_mut_ptr(),
            num_sge: entries.len() as i32,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the list until the call returns.
        check(unsafe {
            match (*(*self.raw).context).ops.post_recv {
                Some(post) => post(self.raw, &mut wr, &mut bad),
                None => libc::ENOSYS,
            }
        })
    }
}

fn bind_info(mr: &Mr, work: &BindWork) -> ibv_mw_bind_info {
    ibv_mw_bind_info {
        mr: mr.raw,
        addr: work.address,
        length: work.length,
        mw_access_flags: work.access,
    }
}

pub(crate) fn sges(entries: &[(u64, u32, u32)]) -> Vec<ibv_sge> {
    entries
        .iter()
        .map(|&(addr, length, lkey)| ibv_sge { addr, length, lkey })
        .collect()
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: the queue pair is live.
        let result = unsafe { ibv_destroy_qp(self.raw) };
        complain("ibv_destroy_qp", result);
    }
}
