// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Memory of the device itself: allocated by the kernel, mapped here, copied to and from by the
//! processor.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

use ferrite_abi::{
    UVERBS_DM_ALLOC_OFFSET, UVERBS_DM_QUERY, UVERBS_DM_QUERY_HANDLE, UVERBS_DM_QUERY_LENGTH,
    UVERBS_DM_QUERY_OFFSET,
};

use crate::fail;
use crate::heap;
use crate::ioctl::{self, Command};
use crate::object::or_null;
use crate::private::*;
use crate::protection::make_mr;
use crate::sys::*;

/// The page size.
const PAGE: usize = 4096;
/// A piece of device memory.
#[repr(C)]
struct DeviceMemory {
    verbs: verbs_dm,
    base: *mut u8,
    length: usize,
    mapped: usize,
}

/// Allocates in the kernel: the handle and where to map.
///
/// # Safety
///
/// `context` is open.
unsafe fn allocate(
    context: *mut ibv_context,
    wanted: &ibv_alloc_dm_attr,
) -> Result<(u32, u64), c_int> {
    let mut mapping = 0u64;
    let mut command = Command::new(
        UVERBS_OBJECT_DM,
        UVERBS_METHOD_DM_ALLOC,
        [
            ioctl::handle(UVERBS_ATTR_ALLOC_DM_HANDLE, 0),
            ioctl::number(UVERBS_ATTR_ALLOC_DM_LENGTH, 8, wanted.length as u64),
            ioctl::number(
                UVERBS_ATTR_ALLOC_DM_ALIGNMENT,
                4,
                u64::from(wanted.log_align_req),
            ),
            ioctl::answer(UVERBS_DM_ALLOC_OFFSET, &mut mapping),
        ],
    );
    // SAFETY: by the caller; the answer is a local variable.
    unsafe { command.execute((*context).cmd_fd) }?;
    let handle = command.result(0) as u32;
    Ok((handle, mapping))
}

pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    wanted: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: the consumer passes its attributes.
    let wanted = unsafe { &*wanted };
    if wanted.comp_mask != 0 || wanted.length == 0 {
        return fail(libc::EINVAL);
    }
    // SAFETY: libibverbs passes an open context.
    let (handle, mapping) = match unsafe { allocate(context, wanted) } {
        Ok(made) => made,
        Err(errno) => return fail(errno),
    };
    // SAFETY: the kernel has told where it is and that it is this long.
    match unsafe { DeviceMemory::map(context, handle, mapping, wanted.length) } {
        Ok(memory) => Box::into_raw(memory).cast(),
        Err(errno) => {
            let mut made = verbs_dm {
                dm: ibv_dm {
                    context,
                    ..Default::default()
                },
                handle,
            };
            // SAFETY: it was made a moment ago and nobody has it.
            unsafe { ibv_cmd_free_dm(&mut made) };
            fail(errno)
        }
    }
}

pub(crate) unsafe extern "C" fn import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    let (mut mapping, mut length) = (0u64, 0u64);
    let mut command = Command::new(
        UVERBS_OBJECT_DM,
        UVERBS_DM_QUERY,
        [
            ioctl::handle(UVERBS_DM_QUERY_HANDLE, handle),
            ioctl::answer(UVERBS_DM_QUERY_OFFSET, &mut mapping),
            ioctl::answer(UVERBS_DM_QUERY_LENGTH, &mut length),
        ],
    );
    // SAFETY: libibverbs passes an open context; the answers are local variables; what they say is
    // the kernel's word.
    let made = unsafe {
        command
            .execute((*context).cmd_fd)
            .and_then(|()| DeviceMemory::map(context, handle, mapping, length as usize))
    };
    or_null(made.map(Box::into_raw))
}

pub(crate) unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: libibverbs passes memory from `import_dm`, which the consumer does not use any more.
    unsafe { DeviceMemory::unmap(dm.cast()) };
}

pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    let memory = dm.cast::<DeviceMemory>();
    // SAFETY: libibverbs passes memory of ours.
    let result = unsafe { ibv_cmd_free_dm(&raw mut (*memory).verbs) };
    if result == 0 {
        // SAFETY: it came from `alloc_dm`; the consumer does not use it any more.
        unsafe { DeviceMemory::unmap(memory) };
    }
    result
}

pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the consumer passes a live domain and memory of ours.
    make_mr(|mr| unsafe {
        let dm = dm.cast::<DeviceMemory>();
        ibv_cmd_reg_dm_mr(
            pd,
            &raw mut (*dm).verbs,
            offset,
            length,
            access,
            mr,
            ptr::null_mut(),
        )
    })
}

impl DeviceMemory {
    /// Maps a piece of device memory that the kernel has allocated.
    ///
    /// # Safety
    ///
    /// `context` is open, and `mapping` is where the kernel has `length` bytes for it.
    unsafe fn map(
        context: *mut ibv_context,
        handle: u32,
        mapping: u64,
        length: usize,
    ) -> Result<Box<Self>, c_int> {
        let mapped = length.next_multiple_of(PAGE);
        // SAFETY: by the caller; a fresh mapping touches no memory in use.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                (*context).cmd_fd,
                mapping as i64,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO));
        }
        heap::boxed(Self {
            verbs: verbs_dm {
                dm: ibv_dm {
                    context,
                    memcpy_to_dm: Some(memcpy_to_dm),
                    memcpy_from_dm: Some(memcpy_from_dm),
                    comp_mask: IBV_DM_MASK_HANDLE,
                    handle,
                },
                handle,
            },
            base: base.cast(),
            length,
            mapped,
        })
        // SAFETY: the mapping was made above and nothing refers to it.
        .inspect_err(|_| unsafe {
            libc::munmap(base, mapped);
        })
    }

    /// Gives the mapping back.
    ///
    /// # Safety
    ///
    /// `memory` came from [`Self::map`] and is not used any more.
    unsafe fn unmap(memory: *mut Self) {
        // SAFETY: `map` made the mapping and the box; nobody else has them, by the caller.
        unsafe {
            libc::munmap((*memory).base.cast(), (*memory).mapped);
            drop(Box::from_raw(memory));
        }
    }

    /// The place of `length` bytes from `offset` on, if it has them. Programs expect that copies
    /// are of whole groups of four bytes.
    fn range(&self, offset: u64, length: usize) -> Option<*mut u8> {
        if offset % 4 != 0 || length % 4 != 0 {
            return None;
        }
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(length)?;
        (end <= self.length).then(|| self.base.wrapping_add(offset))
    }
}

/// Calls `step` with offset and width of each access: eight bytes where `start` allows, else one.
/// Device memory is not ordinary memory: accesses are of these sizes only, and aligned.
fn accesses(start: usize, length: usize, mut step: impl FnMut(usize, bool)) {
    let mut at = 0;
    while at < length {
        let wide = (start + at) % 8 == 0 && length - at >= 8;
        step(at, wide);
        at += if wide { 8 } else { 1 };
    }
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the consumer passes live memory of ours.
    let Some(to) = (unsafe { &*dm.cast::<DeviceMemory>() }).range(offset, length) else {
        return libc::EFAULT;
    };
    let from = from.cast::<u8>();
    accesses(to as usize, length, |at, wide| {
        // SAFETY: `range` has checked that the device's side is inside the mapping, and the consumer says
        // that `from` may be read; wide accesses to the device are aligned.
        unsafe {
            if wide {
                let word = ptr::read_unaligned(from.add(at).cast::<u64>());
                ptr::write_volatile(to.add(at).cast::<u64>(), word);
            } else {
                ptr::write_volatile(to.add(at), *from.add(at));
            }
        }
    });
    // Write-combined stores, where the mapping has them, are done before what follows.
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
    if length > 0 {
        // Stores to the device are posted, and a device that is awake finds the next work request in memory, without a
        // doorbell behind them. A read comes behind them.
        // SAFETY: `range` has checked that there are so many bytes.
        unsafe { ptr::read_volatile(to) };
    }
    0
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: the consumer passes live memory of ours.
    let Some(from) = (unsafe { &*dm.cast::<DeviceMemory>() }).range(offset, length) else {
        return libc::EFAULT;
    };
    let to = to.cast::<u8>();
    accesses(from as usize, length, |at, wide| {
        // SAFETY: `range` has checked that the device's side is inside the mapping, and the consumer says
        // that there is room at `to`; wide accesses to the device are aligned.
        unsafe {
            if wide {
                let word = ptr::read_volatile(from.add(at).cast::<u64>());
                ptr::write_unaligned(to.add(at).cast::<u64>(), word);
            } else {
                *to.add(at) = ptr::read_volatile(from.add(at));
            }
        }
    });
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_once_and_nothing_beside() {
        for start in (0..12usize).step_by(4) {
            for length in (0..40usize).step_by(4) {
                let mut device = vec![0u64; 8];
                let base = device.as_mut_ptr().cast::<u8>();
                let mut memory = DeviceMemory {
                    verbs: verbs_dm {
                        dm: ibv_dm::default(),
                        handle: 0,
                    },
                    base,
                    length: 64,
                    mapped: 64,
                };
                let dm = ptr::from_mut(&mut memory).cast::<ibv_dm>();
                let from: Vec<u8> = (1..=length as u8).collect();
                let mut back = vec![0u8; length];
                // SAFETY: all ranges are inside their arrays.
                unsafe {
                    assert_eq!(
                        memcpy_to_dm(dm, start as u64, from.as_ptr().cast(), length),
                        0
                    );
                    assert_eq!(
                        memcpy_from_dm(back.as_mut_ptr().cast(), dm, start as u64, length),
                        0
                    );
                }
                assert_eq!(back, from);
                let bytes: Vec<u8> = device.iter().flat_map(|word| word.to_le_bytes()).collect();
                assert!(bytes[..start].iter().all(|&byte| byte == 0));
                assert!(bytes[start + length..].iter().all(|&byte| byte == 0));
            }
        }
    }

    #[test]
    fn copies_stay_inside_and_aligned() {
        let mut memory = DeviceMemory {
            verbs: verbs_dm {
                dm: ibv_dm::default(),
                handle: 0,
            },
            base: ptr::null_mut(),
            length: 64,
            mapped: 4096,
        };
        let dm = ptr::from_mut(&mut memory).cast::<ibv_dm>();
        let mut byte = 0u8;
        let byte = ptr::from_mut(&mut byte).cast::<c_void>();
        for (offset, length) in [
            (64, 4),
            (0, 68),
            (u64::MAX - 3, 4),
            (4, usize::MAX - 3),
            (2, 4),
            (4, 2),
        ] {
            // SAFETY: nothing is copied, because the range is refused.
            unsafe {
                assert_eq!(memcpy_to_dm(dm, offset, byte, length), libc::EFAULT);
                assert_eq!(memcpy_from_dm(byte, dm, offset, length), libc::EFAULT);
            }
        }
    }
}
