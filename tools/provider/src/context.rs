// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! An open device.

use core::ffi::{c_char, c_int, c_void};
use core::fmt::Write;
use core::mem::{offset_of, size_of};
use core::ptr;

use ferrite_abi::{
    Plain, UverbsContextRequest, UverbsContextResponse, DOORBELL_PAGE_SIZE, MAX_INLINE,
    MAX_MESSAGE, MAX_SGE, UVERBS_ABI_VERSION, UVERBS_CONTEXT_QUERY_CLOCK,
    UVERBS_CONTEXT_QUERY_CLOCK_NOW, UVERBS_CONTEXT_QUERY_RESPONSE,
};

use crate::clock::Clock;
use crate::ioctl::{self, Command};
use crate::memory::Doorbells;
use crate::private::*;
use crate::sys::*;
use crate::table::NumberTable;
use crate::{ah, cq, cq_ex, device_memory, fail, post, protection, qp, raw, srq, window, xrc};

/// What an opened device is to this provider. libibverbs allocates it, with its own part first.
#[repr(C)]
pub struct Context {
    verbs: verbs_context,
    /// The doorbell page.
    pub doorbells: Doorbells,
    /// Limits and features, as the driver told.
    pub limits: UverbsContextResponse,
    /// The queue pairs by number.
    pub queue_pairs: Box<NumberTable<qp::Qp>>,
    /// The SRQs of XRC by number.
    pub xrc_srqs: Box<NumberTable<srq::Srq>>,
    /// What the device's clock is to the wall clock.
    pub clock: Clock,
}

impl Context {
    /// The context around libibverbs' part of it.
    ///
    /// # Safety
    ///
    /// `context` came from [`alloc_context`] and is not freed while the result is in use.
    pub unsafe fn of<'a>(context: *mut ibv_context) -> &'a Context {
        // SAFETY: `alloc_context` made the `verbs_context` around every `ibv_context` of ours the
        // first field of a `Context`.
        unsafe {
            &*context
                .byte_sub(offset_of!(verbs_context, context))
                .cast::<Context>()
        }
    }
}

const OPS: verbs_context_ops = verbs_context_ops {
    advise_mr: Some(ibv_cmd_advise_mr),
    alloc_dm: Some(device_memory::alloc_dm),
    alloc_mw: Some(window::alloc_mw),
    alloc_parent_domain: Some(protection::alloc_parent_domain),
    alloc_pd: Some(protection::alloc_pd),
    alloc_td: Some(protection::alloc_td),
    attach_mcast: Some(ibv_cmd_attach_mcast),
    bind_mw: Some(window::bind_mw),
    close_xrcd: Some(xrc::close_xrcd),
    cq_event: Some(cq::cq_event),
    create_ah: Some(ah::create_ah),
    create_cq: Some(cq::create_cq),
    create_cq_ex: Some(cq_ex::create_cq_ex),
    create_flow: Some(raw::create_flow),
    create_qp: Some(qp::create_qp),
    create_qp_ex: Some(qp::create_qp_ex),
    create_rwq_ind_table: Some(raw::create_rwq_ind_table),
    create_srq: Some(srq::create_srq),
    create_srq_ex: Some(srq::create_srq_ex),
    create_wq: Some(raw::create_wq),
    dealloc_mw: Some(window::dealloc_mw),
    dealloc_pd: Some(protection::dealloc_pd),
    dealloc_td: Some(protection::dealloc_td),
    dereg_mr: Some(protection::dereg_mr),
    destroy_ah: Some(ah::destroy_ah),
    destroy_cq: Some(cq::destroy_cq),
    destroy_flow: Some(raw::destroy_flow),
    destroy_qp: Some(qp::destroy_qp),
    destroy_rwq_ind_table: Some(raw::destroy_rwq_ind_table),
    destroy_srq: Some(srq::destroy_srq),
    destroy_wq: Some(raw::destroy_wq),
    detach_mcast: Some(ibv_cmd_detach_mcast),
    free_context: Some(free_context),
    free_dm: Some(device_memory::free_dm),
    get_srq_num: Some(srq::get_srq_num),
    import_dm: Some(device_memory::import_dm),
    import_mr: Some(protection::import_mr),
    import_pd: Some(protection::import_pd),
    modify_cq: Some(cq::modify_cq),
    modify_qp: Some(qp::modify_qp),
    modify_srq: Some(srq::modify_srq),
    modify_wq: Some(raw::modify_wq),
    open_qp: Some(xrc::open_qp),
    open_xrcd: Some(xrc::open_xrcd),
    poll_cq: Some(cq::poll_cq),
    post_recv: Some(post::post_recv),
    post_send: Some(post::post_send),
    post_srq_recv: Some(srq::post_srq_recv),
    query_device_ex: Some(query_device_ex),
    query_port: Some(query_port),
    query_qp: Some(qp::query_qp),
    query_rt_values: Some(query_rt_values),
    query_srq: Some(srq::query_srq),
    reg_dm_mr: Some(device_memory::reg_dm_mr),
    reg_dmabuf_mr: Some(protection::reg_dmabuf_mr),
    reg_mr: Some(protection::reg_mr),
    req_notify_cq: Some(cq::req_notify_cq),
    rereg_mr: Some(protection::rereg_mr),
    resize_cq: Some(cq::resize_cq),
    unimport_dm: Some(device_memory::unimport_dm),
    unimport_mr: Some(protection::unimport_mr),
    unimport_pd: Some(protection::unimport_pd),
    ..verbs_context_ops::NONE
};

/// Opens a device.
///
/// # Safety
///
/// Called by libibverbs, with a device of this provider and an open command file.
pub unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut verbs_context {
    // SAFETY: the arguments are those of libibverbs, by the caller.
    unsafe { make_context(device, cmd_fd, get_context) }
}

/// Opens a device through the command file of another process that has it open.
///
/// # Safety
///
/// Called by libibverbs, with a device of this provider and its command file.
pub unsafe extern "C" fn import_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
) -> *mut verbs_context {
    // SAFETY: the arguments are those of libibverbs, by the caller.
    unsafe { make_context(device, cmd_fd, query_context) }
}

/// Makes a context of what `ask` gets from the kernel.
///
/// # Safety
///
/// The arguments are those libibverbs gave.
unsafe fn make_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    ask: unsafe fn(*mut verbs_context) -> Result<UverbsContextResponse, c_int>,
) -> *mut verbs_context {
    // SAFETY: the arguments are libibverbs' own; the `verbs_context` is at offset 0 of `Context`.
    let context: *mut Context = unsafe {
        _verbs_init_and_alloc_context(
            device,
            cmd_fd,
            size_of::<Context>(),
            ptr::null_mut(),
            RDMA_DRIVER_UNKNOWN,
        )
        .cast()
    };
    if context.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: `context` was just allocated with the size of a `Context`, and its `verbs` is
    // initialised.
    match unsafe { ask(context.cast()).and_then(|limits| fill_in(context, limits)) } {
        Ok(()) => context.cast(),
        Err(errno) => {
            // SAFETY: there is nothing yet but what `_verbs_init_and_alloc_context` made.
            unsafe {
                verbs_uninit_context(context.cast());
                libc::free(context.cast());
            }
            fail(errno)
        }
    }
}

/// Asks the kernel for a context.
///
/// # Safety
///
/// `context` is initialised.
unsafe fn get_context(context: *mut verbs_context) -> Result<UverbsContextResponse, c_int> {
    let mut request = Request::<ib_uverbs_get_context, _>::with(UverbsContextRequest {
        abi_version: UVERBS_ABI_VERSION,
        reserved: 0,
    });
    let mut response =
        Response::<ib_uverbs_get_context_resp, _>::with(UverbsContextResponse::zeroed());
    // SAFETY: the context is initialised, by the caller; request and response have the layout that the
    // command has in libibverbs (`private`).
    let result = unsafe { command!(ibv_cmd_get_context(context), request, response) };
    match result {
        0 => Ok(response.private),
        errno => Err(errno),
    }
}

/// Asks the kernel about the context that a command file has already.
///
/// # Safety
///
/// `context` is initialised.
unsafe fn query_context(context: *mut verbs_context) -> Result<UverbsContextResponse, c_int> {
    let mut response = UverbsContextResponse::zeroed();
    let (mut vectors, mut support) = (0u32, 0u64);
    let mut command = Command::new(
        UVERBS_OBJECT_DEVICE,
        UVERBS_METHOD_QUERY_CONTEXT,
        [
            ioctl::answer(UVERBS_ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, &mut vectors),
            ioctl::answer(UVERBS_ATTR_QUERY_CONTEXT_CORE_SUPPORT, &mut support),
            ioctl::answer(UVERBS_CONTEXT_QUERY_RESPONSE, &mut response),
        ],
    );
    // SAFETY: by the caller; the answers are local variables. The device around the context's is
    // libibverbs' own, with the `ibv_device` first.
    unsafe {
        let context = &mut (*context).context;
        command.execute(context.cmd_fd)?;
        context.num_comp_vectors = vectors as c_int;
        (*context.device.cast::<verbs_device>()).core_support = support;
    }
    Ok(response)
}

/// How the device is asked for the time of its clock.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum ClockQuery {
    /// However long that takes.
    Patient = UVERBS_CONTEXT_QUERY_CLOCK,
    /// Not (`EAGAIN`) where it has so much to do that it cannot be asked at once.
    Now = UVERBS_CONTEXT_QUERY_CLOCK_NOW,
}

/// Asks the device for the time of its clock.
///
/// # Safety
///
/// `context` is open.
pub(crate) unsafe fn query_clock(context: *mut ibv_context, way: ClockQuery) -> Result<u64, c_int> {
    let mut response = UverbsContextResponse::zeroed();
    let mut ticks = 0u64;
    let mut command = Command::new(
        UVERBS_OBJECT_DEVICE,
        UVERBS_METHOD_QUERY_CONTEXT,
        [
            ioctl::answer(UVERBS_CONTEXT_QUERY_RESPONSE, &mut response),
            ioctl::answer(way as u32, &mut ticks),
        ],
    );
    // SAFETY: by the caller; the answers are local variables.
    unsafe { command.execute((*context).cmd_fd) }?;
    Ok(ticks)
}

/// Tells the time of the device's clock, in ticks, where others put them too: all in `tv_nsec`.
unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: libibverbs passes the consumer's structure.
    let values = unsafe { &mut *values };
    let asked = core::mem::take(&mut values.comp_mask);
    if asked & IBV_VALUES_MASK_RAW_CLOCK == 0 {
        return 0;
    }
    // SAFETY: libibverbs passes an open context.
    match unsafe { query_clock(context, ClockQuery::Patient) } {
        Ok(ticks) => {
            values.raw_clock.tv_sec = 0;
            values.raw_clock.tv_nsec = ticks as _;
            values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
            0
        }
        Err(errno) => errno,
    }
}

/// What of the driver's limits this provider can make use of.
fn usable(mut limits: UverbsContextResponse) -> Result<UverbsContextResponse, c_int> {
    if (limits.doorbell_size as usize) < DOORBELL_PAGE_SIZE {
        return Err(libc::EPROTO);
    }
    if limits.max_message == 0 || (limits.clock_khz != 0) != (limits.clock_bits != 0) {
        return Err(libc::EPROTO);
    }
    // A device may take more than this provider knows how to write.
    limits.max_sge = limits.max_sge.min(MAX_SGE as u32);
    limits.max_inline = limits.max_inline.min(MAX_INLINE as u32);
    limits.max_message = limits.max_message.min(MAX_MESSAGE);
    limits.clock_bits = limits.clock_bits.min(64);
    Ok(limits)
}

/// Maps the doorbell page and fills in our part of `context`.
///
/// # Safety
///
/// `context` is allocated for a `Context` and only its `verbs` is initialised; `limits` are the
/// kernel's.
unsafe fn fill_in(context: *mut Context, limits: UverbsContextResponse) -> Result<(), c_int> {
    let limits = usable(limits)?;
    let (queue_pairs, xrc_srqs) = (NumberTable::new()?, NumberTable::new()?);
    // SAFETY: `verbs` is initialised; a fresh mapping touches no memory in use.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            limits.doorbell_size as usize,
            libc::PROT_WRITE,
            libc::MAP_SHARED,
            (*context).verbs.context.cmd_fd,
            limits.doorbell_offset as i64,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error()
            .raw_os_error()
            .unwrap_or(libc::EIO));
    }
    // SAFETY: the fields are inside the allocation and not yet initialised, so that nothing is
    // dropped; the page stays mapped until `free_context`, after all queues.
    unsafe {
        (&raw mut (*context).doorbells).write(Doorbells::new(page.cast()));
        (&raw mut (*context).limits).write(limits);
        (&raw mut (*context).queue_pairs).write(queue_pairs);
        (&raw mut (*context).xrc_srqs).write(xrc_srqs);
        (&raw mut (*context).clock).write(Clock::new(limits.clock_khz, limits.clock_bits));
        verbs_set_ops(context.cast(), &OPS);
    }
    Ok(())
}

unsafe extern "C" fn free_context(context: *mut ibv_context) {
    // SAFETY: libibverbs closes a context once, when nothing of it is in use. The tables are the
    // only fields that own memory.
    unsafe {
        let context = context
            .byte_sub(offset_of!(verbs_context, context))
            .cast::<Context>();
        let doorbells = (*context).doorbells.page().cast();
        libc::munmap(doorbells, (*context).limits.doorbell_size as usize);
        ptr::drop_in_place(&raw mut (*context).queue_pairs);
        ptr::drop_in_place(&raw mut (*context).xrc_srqs);
        verbs_uninit_context(context.cast());
        libc::free(context.cast());
    }
}

unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    let mut response = ib_uverbs_ex_query_device_resp::default();
    let mut response_size = size_of_val(&response);
    // SAFETY: the arguments are those libibverbs gave; the response is ours.
    let result = unsafe {
        ibv_cmd_query_device_any(
            context,
            input,
            attr,
            attr_size,
            &mut response,
            &mut response_size,
        )
    };
    if result != 0 {
        return result;
    }
    let version = response.base.fw_ver;
    // SAFETY: `attr` is at least an `ibv_device_attr`, as the call above has checked.
    let target = unsafe { &mut (*attr).orig_attr.fw_ver };
    // The field is zeroed and longer than three 16-bit numbers, so that writing does not fail.
    let _ = write!(
        Text(target.iter_mut()),
        "{}.{}.{}",
        (version >> 32) & 0xffff,
        (version >> 16) & 0xffff,
        version & 0xffff
    );
    0
}

/// A place for characters.
struct Text<'a>(core::slice::IterMut<'a, c_char>);

impl Write for Text<'_> {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        for byte in text.bytes() {
            *self.0.next().ok_or(core::fmt::Error)? = byte as c_char;
        }
        Ok(())
    }
}

unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    let mut request = Request::<ib_uverbs_query_port, Nothing>::default();
    // SAFETY: libibverbs passes an open context and room for the answer; the request has the layout that
    // the command has in libibverbs (`private`).
    unsafe { command!(ibv_cmd_query_port(context, port, attr), request) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_beyond_what_the_interface_has_room_for_are_not_used() {
        let told = UverbsContextResponse {
            doorbell_size: 1 << 16,
            max_sge: 100,
            max_inline: 4096,
            cq_max_log_entries: 20,
            max_message: u32::MAX,
            clock_khz: 1000,
            clock_bits: 65,
            ..UverbsContextResponse::zeroed()
        };
        let expected = UverbsContextResponse {
            max_sge: MAX_SGE as u32,
            max_inline: MAX_INLINE as u32,
            max_message: MAX_MESSAGE,
            clock_bits: 64,
            ..told
        };
        assert_eq!(usable(told), Ok(expected));
        let less = UverbsContextResponse {
            max_sge: 2,
            max_inline: 0,
            max_message: 4096,
            clock_bits: 32,
            doorbell_size: DOORBELL_PAGE_SIZE as u32,
            ..told
        };
        assert_eq!(usable(less), Ok(less));
        let without_clock = UverbsContextResponse {
            clock_khz: 0,
            clock_bits: 0,
            ..less
        };
        assert_eq!(usable(without_clock), Ok(without_clock));
        let refused: [fn(&mut UverbsContextResponse); 4] = [
            |told| told.doorbell_size = DOORBELL_PAGE_SIZE as u32 - 1,
            |told| told.max_message = 0,
            |told| told.clock_bits = 0,
            |told| told.clock_khz = 0,
        ];
        for change in refused {
            let mut bad = told;
            change(&mut bad);
            assert_eq!(usable(bad), Err(libc::EPROTO));
        }
    }
}
