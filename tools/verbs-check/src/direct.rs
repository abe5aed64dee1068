// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What Ferrite's provider has beyond the verbs (`ferritedv.h`), found at run time: on machines
//! without it the checks of it are skipped, and the others run.

use std::ffi::CStr;

use crate::sys::*;
use crate::verbs::{check, last_errno, not_null, Entry, Errno};

/// `FERRITEDV_QP_LISTS`.
pub const LISTS: u32 = 1 << 0;
/// `FERRITEDV_QP_REGISTER_DRAINS`.
pub const DRAINS: u32 = 1 << 1;
/// `FERRITEDV_QP_WINDOWS_ONLY`.
pub const WINDOWS_ONLY: u32 = 1 << 2;
/// `FERRITEDV_ACCESS_ONE_TOUCH`.
pub const ONE_TOUCH: u32 = 1 << 30;
/// `FERRITEDV_MAX_PIECES`.
pub const MAX_PIECES: usize = 16;
/// `FERRITEDV_WC_REGISTER_LIST`.
pub const WC_REGISTER_LIST: u32 = IBV_WC_DRIVER1;

/// Finds a function in the library that libibverbs has loaded already; null without the library, or
/// without the function.
pub fn symbol(name: &CStr) -> Option<*mut libc::c_void> {
    // SAFETY: the names are C strings. The library is never closed.
    unsafe {
        let library = libc::dlopen(c"libferrite.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return None;
        }
        Some(libc::dlsym(library, name.as_ptr()))
    }
}

/// The same; that it is not there is what the function would say of another provider's device.
fn function(name: &CStr) -> Result<*mut libc::c_void, Errno> {
    symbol(name)
        .filter(|symbol| !symbol.is_null())
        .ok_or(Errno(libc::EOPNOTSUPP))
}

/// `struct ferritedv_qp_init_attr`.
#[repr(C)]
struct QpInitAttr {
    comp_mask: u64,
    flags: u32,
    reserved: u32,
}

/// `struct ferritedv_list`.
#[repr(C)]
struct List {
    mr: *mut ibv_mr,
    key: u32,
    access: u32,
    address: u64,
    pieces: *const ibv_sge,
    num_pieces: i32,
    comp_mask: u32,
}

/// `struct ferritedv_message`.
#[repr(C)]
struct Message {
    sg_list: *const ibv_sge,
    num_sge: i32,
    invalidate_rkey: u32,
    remote_srqn: u32,
    comp_mask: u32,
}

type CreateQp = unsafe extern "C" fn(
    *mut ibv_context,
    *mut ibv_qp_init_attr_ex,
    *const QpInitAttr,
) -> *mut ibv_qp;
type AllocList = unsafe extern "C" fn(*mut ibv_pd, u32) -> *mut ibv_mr;
type RegShared = unsafe extern "C" fn(*mut ibv_pd, *mut ibv_mr, i32) -> *mut ibv_mr;
type PostList = unsafe extern "C" fn(*mut ibv_qp, u64, u32, *const List) -> i32;
type PostListSend = unsafe extern "C" fn(*mut ibv_qp, u64, u32, *const List, *const Message) -> i32;
type WriteList = unsafe extern "C" fn(*mut ibv_qp_ex, *const List);
type WriteListSend = unsafe extern "C" fn(*mut ibv_qp_ex, *const List, u32);

/// Makes a queue pair that can do more.
///
/// # Safety
///
/// As for `ibv_create_qp_ex`.
pub unsafe fn create_qp(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
    flags: u32,
) -> Result<*mut ibv_qp, Errno> {
    let more = QpInitAttr {
        comp_mask: 0,
        flags,
        reserved: 0,
    };
    let create = function(c"ferritedv_create_qp")?;
    // SAFETY: a symbol of that name is the function that ferritedv.h declares; context and
    // attributes are as it demands, by the caller.
    unsafe {
        let create = std::mem::transmute::<*mut libc::c_void, CreateQp>(create);
        not_null(create(context, attr, &more))
    }
}

/// Makes a key for lists.
///
/// # Safety
///
/// `pd` lives.
pub unsafe fn alloc_list(pd: *mut ibv_pd, max_pieces: u32) -> Result<*mut ibv_mr, Errno> {
    let alloc = function(c"ferritedv_alloc_list")?;
    // SAFETY: a symbol of that name is the function that ferritedv.h declares; the domain lives, by
    // the caller.
    unsafe {
        let alloc = std::mem::transmute::<*mut libc::c_void, AllocList>(alloc);
        not_null(alloc(pd, max_pieces))
    }
}

/// Registers the memory of a region once more.
///
/// # Safety
///
/// `pd` and `mr` live.
pub unsafe fn reg_shared_mr(
    pd: *mut ibv_pd,
    mr: *mut ibv_mr,
    access: u32,
) -> Result<*mut ibv_mr, Errno> {
    let register = function(c"ferritedv_reg_shared_mr")?;
    // SAFETY: a symbol of that name is the function that ferritedv.h declares; domain and region live,
    // by the caller.
    unsafe {
        let register = std::mem::transmute::<*mut libc::c_void, RegShared>(register);
        not_null(register(pd, mr, access as i32))
    }
}

/// `UverbsMrRequest::kind`: a region of the memory of another.
const MR_SHARED: u32 = 2;

/// A command of the kernel's to register memory of another region, which is named by its key alone: as a
/// program may send it that does not ask the provider.
#[repr(C)]
struct ShareByKey {
    command: u32,
    in_words: u16,
    out_words: u16,
    response: u64,
    start: u64,
    length: u64,
    hca_va: u64,
    pd_handle: u32,
    access_flags: u32,
    // What is the driver's: `UverbsMrRequest`.
    kind: u32,
    max_pieces: u32,
    key: u32,
    reserved: u32,
}

/// A command of the kernel's to end a region.
#[repr(C)]
struct Deregister {
    command: u32,
    in_words: u16,
    out_words: u16,
    mr_handle: u32,
}

/// `IB_USER_VERBS_CMD_REG_MR`, `IB_USER_VERBS_CMD_DEREG_MR`.
const COMMANDS: [u32; 2] = [9, 13];

/// Sends a command.
///
/// # Safety
///
/// The context of `pd` is open, and `command` is laid out as the kernel expects.
unsafe fn send<T>(pd: *mut ibv_pd, command: &T) -> Result<(), Errno> {
    let length = size_of::<T>();
    // SAFETY: the context is open, by the caller; the command may be read for its own size.
    let sent = unsafe {
        let fd = (*(*pd).context).cmd_fd;
        libc::write(fd, std::ptr::from_ref(command).cast(), length)
    };
    match usize::try_from(sent) {
        Ok(sent) if sent == length => Ok(()),
        Ok(_) => Err(Errno(libc::EIO)),
        Err(_) => Err(last_errno()),
    }
}

/// Shares the memory of the region with this key, at this address and of this length, and ends that at
/// once.
///
/// # Safety
///
/// `pd` lives.
pub unsafe fn share_by_key(
    pd: *mut ibv_pd,
    key: u32,
    address: u64,
    length: u64,
    access: u32,
) -> Result<(), Errno> {
    // Handle, local and remote key.
    let mut response = [0u32; 3];
    let share = ShareByKey {
        command: COMMANDS[0],
        in_words: (size_of::<ShareByKey>() / 4) as u16,
        out_words: 3,
        response: response.as_mut_ptr() as u64,
        start: address,
        length,
        hca_va: address,
        // SAFETY: the domain lives, by the caller.
        pd_handle: unsafe { (*pd).handle },
        access_flags: access,
        kind: MR_SHARED,
        max_pieces: 0,
        key,
        reserved: 0,
    };
    // SAFETY: the domain lives, by the caller; the command is the kernel's for a registration, and the
    // response as long as it says.
    unsafe { send(pd, &share)? };
    let end = Deregister {
        command: COMMANDS[1],
        in_words: (size_of::<Deregister>() / 4) as u16,
        out_words: 0,
        mr_handle: response[0],
    };
    // SAFETY: the domain lives, by the caller; the command is the kernel's, and has no response.
    unsafe { send(pd, &end) }
}

/// A registration of a list.
#[derive(Clone, Debug, Default)]
pub struct ListWork {
    /// Returned in the completion.
    pub wr_id: u64,
    /// `ibv_send_flags`.
    pub flags: u32,
    /// The key that the list has afterwards.
    pub key: u32,
    /// `ibv_access_flags` and [`ONE_TOUCH`].
    pub access: u32,
    /// Address of the first byte.
    pub address: u64,
    /// The pieces.
    pub pieces: Vec<Entry>,
    /// The message that goes with it: its entries, and the peer's key that it invalidates or 0.
    pub message: Option<(Vec<Entry>, u32)>,
    /// The shared receive queue at the peer that the message goes to, on `IBV_QPT_XRC_SEND`.
    pub remote_srqn: u32,
}

/// Posts a registration, in the extended way if the queue pair was made for it.
///
/// # Safety
///
/// Queue pair and key live.
pub unsafe fn post_list(
    qp: *mut ibv_qp,
    extended: bool,
    mr: *mut ibv_mr,
    work: &ListWork,
) -> Result<(), Errno> {
    let pieces = crate::verbs::sges(&work.pieces);
    let list = List {
        mr,
        key: work.key,
        access: work.access,
        address: work.address,
        pieces: pieces.as_ptr(),
        num_pieces: pieces.len() as i32,
        comp_mask: 0,
    };
    if extended {
        // SAFETY: queue pair and key live, by the caller; who says `extended` has that interface.
        return unsafe { write_list(qp.cast(), &list, work) };
    }
    // SAFETY: symbols of these names are the functions that ferritedv.h declares; queue pair and key live,
    // by the caller, and lists are as long as they say.
    check(unsafe {
        match &work.message {
            None => {
                let post = function(c"ferritedv_post_register_list")?;
                let post = std::mem::transmute::<*mut libc::c_void, PostList>(post);
                post(qp, work.wr_id, work.flags, &list)
            }
            Some((entries, invalidate_rkey)) => {
                let entries = crate::verbs::sges(entries);
                let message = Message {
                    sg_list: entries.as_ptr(),
                    num_sge: entries.len() as i32,
                    invalidate_rkey: *invalidate_rkey,
                    remote_srqn: work.remote_srqn,
                    comp_mask: 0,
                };
                let post = function(c"ferritedv_post_register_list_and_send")?;
                let post = std::mem::transmute::<*mut libc::c_void, PostListSend>(post);
                post(qp, work.wr_id, work.flags, &list, &message)
            }
        }
    })
}

/// The same between start and completion.
///
/// # Safety
///
/// The queue pair lives and has the extended interface, and the key lives.
unsafe fn write_list(qp: *mut ibv_qp_ex, list: &List, work: &ListWork) -> Result<(), Errno> {
    let plain = function(c"ferritedv_wr_register_list")?;
    let with_message = function(c"ferritedv_wr_register_list_and_send")?;
    let missing = Errno(libc::ENOSYS);
    // SAFETY: the functions are those that ferritedv.h declares, called in their order; queue pair and key
    // live, by the caller.
    unsafe {
        let operations = std::ptr::read(qp);
        operations.wr_start.ok_or(missing)?(qp);
        (*qp).wr_id = work.wr_id;
        (*qp).wr_flags = work.flags;
        match &work.message {
            None => {
                let write = std::mem::transmute::<*mut libc::c_void, WriteList>(plain);
                write(qp, list);
            }
            Some((entries, invalidate_rkey)) => {
                let write = std::mem::transmute::<*mut libc::c_void, WriteListSend>(with_message);
                write(qp, list, *invalidate_rkey);
                let entries = crate::verbs::sges(entries);
                operations.wr_set_sge_list.ok_or(missing)?(qp, entries.len(), entries.as_ptr());
            }
        }
        check(operations.wr_complete.ok_or(missing)?(qp))
    }
}
