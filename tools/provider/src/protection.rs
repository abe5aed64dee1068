// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Protection domains and memory regions: the kernel's work; here only the structures.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering};

use ferrite_abi::{Plain, UverbsPdResponse, UVERBS_PD_QUERY, UVERBS_PD_QUERY_HANDLE};

use crate::fail;
use crate::heap;
use crate::ioctl::{self, Command};
use crate::memory::{Allocator, Buffer};
use crate::object::{self, or_null};
use crate::private::*;
use crate::sys::*;

/// A protection domain, or a parent domain, which stands for one and brings an allocator along.
#[repr(C)]
pub(crate) struct Pd {
    verbs: ibv_pd,
    /// Parent domains that stand for it and queues made with it; and [`ORPHAN`].
    users: AtomicU32,
    parent: Option<Parent>,
}

/// `Pd::users`: the program has given it up. Its last user frees it.
const ORPHAN: u32 = 1 << 31;

struct Parent {
    /// The domain it stands for.
    _pd: PdUse,
    td: *mut ibv_td,
    allocator: Option<Allocator>,
}

/// Keeps a domain: the kernel does not know of a parent domain, and an imported one cannot be kept
/// by refusing to give it up.
pub struct PdUse(*const Pd);

// SAFETY: it stands for a count that any thread may change.
unsafe impl Send for PdUse {}
// SAFETY: `&PdUse` gives nothing.
unsafe impl Sync for PdUse {}

impl PdUse {
    fn new(pd: &Pd) -> Self {
        pd.users.fetch_add(1, Ordering::Relaxed);
        Self(pd)
    }
}

impl Drop for PdUse {
    fn drop(&mut self) {
        // SAFETY: the domain lives as long as it has users. Where it is an orphan and this the last
        // of them, nobody else has it; it came from `Pd::boxed`.
        unsafe {
            if (*self.0).users.fetch_sub(1, Ordering::AcqRel) == ORPHAN | 1 {
                drop(Box::from_raw(self.0.cast_mut()));
            }
        }
    }
}

/// Makes a region that `fill` has the kernel make, which fills it in or tells an errno value.
pub(crate) fn make_mr(fill: impl FnOnce(*mut verbs_mr) -> c_int) -> *mut ibv_mr {
    let mr = heap::boxed(verbs_mr {
        ibv_mr: ibv_mr::default(),
        mr_type: 0,
        access: 0,
    });
    or_null(mr.and_then(|mr| object::make(mr, fill)))
}

/// Has the kernel register memory, as its driver is told by a private request.
///
/// # Safety
///
/// `pd` is a domain of this provider.
pub(crate) unsafe fn register<Private>(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
    private: Private,
) -> *mut ibv_mr {
    let mut request = Request::<ib_uverbs_reg_mr, _>::with(private);
    let mut response = Response::<ib_uverbs_reg_mr_resp, Nothing>::default();
    make_mr(|mr| {
        // SAFETY: the domain is live, by the caller, and `make_mr` passes a region that nobody else has;
        // request and response have the layout that the command has in libibverbs (`private`). The memory
        // itself is for the kernel to look at.
        unsafe {
            command!(
                ibv_cmd_reg_mr(pd, address, length, hca_va, access, mr),
                request,
                response
            )
        }
    })
}

/// A thread domain: a promise to use some objects from one thread at a time. Queue pairs that are made with
/// it do without a lock.
#[repr(C)]
struct Td {
    #[allow(dead_code)]
    verbs: ibv_td,
    /// Parent domains that name it.
    parents: AtomicU32,
}

impl Pd {
    fn boxed(parent: Option<Parent>) -> Result<Box<Self>, c_int> {
        heap::boxed(Self {
            verbs: ibv_pd::default(),
            users: AtomicU32::new(0),
            parent,
        })
    }

    /// Frees it, or leaves that to its last user.
    ///
    /// # Safety
    ///
    /// `pd` came from [`Pd::boxed`], and is not used any more but by its users.
    unsafe fn give_up(pd: *mut Self) {
        // SAFETY: by the caller; without a user nobody else has it.
        unsafe {
            if (*pd).users.fetch_or(ORPHAN, Ordering::AcqRel) == 0 {
                drop(Box::from_raw(pd));
            }
        }
    }

    /// Whether it is a parent domain.
    ///
    /// # Safety
    ///
    /// `pd` is null or a live domain of this provider.
    pub(crate) unsafe fn is_parent(pd: *mut ibv_pd) -> bool {
        // SAFETY: by the caller; the `ibv_pd` is at the start of a `Pd`.
        unsafe { pd.cast::<Pd>().as_ref() }.is_some_and(|pd| pd.parent.is_some())
    }

    /// Whether it stands for a promise to use what is made with it from one thread at a time.
    ///
    /// # Safety
    ///
    /// `pd` is null or a live domain of this provider.
    pub(crate) unsafe fn is_of_one_thread(pd: *mut ibv_pd) -> bool {
        // SAFETY: by the caller; the `ibv_pd` is at the start of a `Pd`.
        let parent = unsafe { pd.cast::<Pd>().as_ref() }.and_then(|pd| pd.parent.as_ref());
        parent.is_some_and(|parent| !parent.td.is_null())
    }

    /// Memory for a queue: the program's own, where the domain has a way to get it.
    ///
    /// # Safety
    ///
    /// `pd` is null or a live domain of this provider. It lives as long as the buffer.
    pub(crate) unsafe fn buffer(pd: *mut ibv_pd, length: usize) -> Result<Buffer, c_int> {
        // SAFETY: by the caller; the `ibv_pd` is at the start of a `Pd`.
        let Some(pd) = (unsafe { pd.cast::<Pd>().as_ref() }) else {
            return Buffer::new(length);
        };
        let mut buffer = match pd.parent.as_ref().and_then(|parent| parent.allocator) {
            Some(allocator) => Buffer::from_allocator(length, allocator),
            None => Buffer::new(length),
        }?;
        buffer.keep(PdUse::new(pd));
        Ok(buffer)
    }
}

pub(crate) unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let mut request = Request::<ib_uverbs_alloc_pd, Nothing>::default();
    let mut response = Response::<ib_uverbs_alloc_pd_resp, _>::with(UverbsPdResponse::zeroed());
    or_null(Pd::boxed(None).and_then(|pd| {
        object::make(pd, |pd| {
            // SAFETY: libibverbs passes an open context, `make` a domain that nobody else has and that
            // has the `ibv_pd` at its start; request and response have the layout that the command has
            // in libibverbs (`private`).
            unsafe { command!(ibv_cmd_alloc_pd(context, pd.cast()), request, response) }
        })
    }))
}

pub(crate) unsafe extern "C" fn alloc_parent_domain(
    _context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the consumer passes its attributes.
    let attr = unsafe { &*attr };
    let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    if attr.pd.is_null() || attr.comp_mask & !known != 0 {
        return fail(libc::EINVAL);
    }
    // SAFETY: the consumer passes a live domain, and a live thread domain or none.
    let (of, td) = unsafe { (&*attr.pd.cast::<Pd>(), attr.td.cast::<Td>().as_ref()) };
    if of.parent.is_some() {
        return fail(libc::EINVAL);
    }
    let with = |flag| attr.comp_mask & flag != 0;
    let functions = match (attr.alloc, attr.free) {
        _ if !with(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) => None,
        (Some(alloc), Some(free)) => Some((alloc, free)),
        (None, None) => None,
        _ => return fail(libc::EINVAL),
    };
    let pd = match Pd::boxed(Some(Parent {
        _pd: PdUse::new(of),
        td: attr.td,
        allocator: None,
    })) {
        Ok(pd) => Box::into_raw(pd),
        Err(errno) => return fail(errno),
    };
    // SAFETY: nobody else has `pd` yet.
    let this = unsafe { &mut *pd };
    // For libibverbs and the kernel it is the domain it stands for.
    this.verbs.context = of.verbs.context;
    this.verbs.handle = of.verbs.handle;
    if let (Some((alloc, free)), Some(parent)) = (functions, &mut this.parent) {
        parent.allocator = Some(Allocator {
            pd: pd.cast(),
            context: if with(IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT) {
                attr.pd_context
            } else {
                ptr::null_mut()
            },
            alloc,
            free,
        });
    }
    if let Some(td) = td {
        td.parents.fetch_add(1, Ordering::Relaxed);
    }
    pd.cast()
}

pub(crate) unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: libibverbs passes a domain of ours.
    let this = unsafe { &*pd.cast::<Pd>() };
    if this.users.load(Ordering::Acquire) != 0 {
        return libc::EBUSY;
    }
    let result = match &this.parent {
        Some(parent) => {
            // SAFETY: it lives as long as it is named here.
            if let Some(td) = unsafe { parent.td.cast::<Td>().as_ref() } {
                td.parents.fetch_sub(1, Ordering::Relaxed);
            }
            0
        }
        // SAFETY: the domain is one of ours that the kernel knows, as it has no parent.
        None => unsafe { ibv_cmd_dealloc_pd(pd) },
    };
    if result == 0 {
        // SAFETY: it came from `Pd::boxed` and is gone for the kernel too.
        unsafe { Pd::give_up(pd.cast()) };
    }
    result
}

pub(crate) unsafe extern "C" fn import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    let mut command = Command::new(
        UVERBS_OBJECT_PD,
        UVERBS_PD_QUERY,
        [ioctl::handle(UVERBS_PD_QUERY_HANDLE, handle)],
    );
    // SAFETY: libibverbs passes an open context; no attribute points anywhere.
    if let Err(errno) = unsafe { command.execute((*context).cmd_fd) } {
        return fail(errno);
    }
    or_null(Pd::boxed(None).map(|mut pd| {
        pd.verbs.context = context;
        pd.verbs.handle = handle;
        Box::into_raw(pd)
    }))
}

pub(crate) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: libibverbs passes a domain from `import_pd`, which the consumer does not use any
    // more, other than through what was made with it; for the kernel it goes on being that of its
    // maker.
    unsafe { Pd::give_up(pd.cast()) };
}

pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: the consumer passes its attributes.
    if unsafe { (*attr).comp_mask } != 0 {
        return fail(libc::EINVAL);
    }
    let td = heap::boxed(Td {
        verbs: ibv_td { context },
        parents: AtomicU32::new(0),
    });
    or_null(td.map(Box::into_raw))
}

pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    let td = td.cast::<Td>();
    // SAFETY: libibverbs passes a thread domain of ours, which goes only if nobody names it.
    unsafe {
        if (*td).parents.load(Ordering::Relaxed) != 0 {
            return libc::EBUSY;
        }
        drop(Box::from_raw(td));
    }
    0
}

pub(crate) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    hca_va: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a domain of ours.
    unsafe { register(pd, address, length, hca_va, access, Nothing::default()) }
}

pub(crate) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a domain of ours; the region is filled in by the call.
    make_mr(|mr| unsafe {
        ibv_cmd_reg_dmabuf_mr(pd, offset, length, iova, fd, access, mr, ptr::null_mut())
    })
}

pub(crate) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: libibverbs passes a domain of ours; the region is filled in by the call.
    make_mr(|mr| unsafe { ibv_cmd_query_mr(pd, mr, handle) })
}

pub(crate) unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: libibverbs passes a region from `import_mr`, which the consumer does not use any
    // more.
    drop(unsafe { Box::from_raw(mr.cast::<verbs_mr>()) });
}

pub(crate) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let mut request = Request::<ib_uverbs_rereg_mr, Nothing>::default();
    let mut response = Response::<ib_uverbs_rereg_mr_resp, Nothing>::default();
    // SAFETY: the consumer passes a live region, and a live domain where it changes that; request and
    // response have the layout that the command has in libibverbs (`private`).
    unsafe {
        command!(
            ibv_cmd_rereg_mr(
                mr,
                flags as u32,
                address,
                length,
                address as u64,
                access,
                pd
            ),
            request,
            response
        )
    }
}

pub(crate) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: libibverbs passes a region from `make_mr`, which its consumer does not use any more.
    unsafe { object::destroy(mr, || ibv_cmd_dereg_mr(mr), |_| {}) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a domain lives, as its users see it: the count of the one it stands for.
    fn users(pd: *mut Pd) -> u32 {
        // SAFETY: the tests look only at domains that live.
        unsafe { (*pd).users.load(Ordering::Relaxed) }
    }

    #[test]
    fn an_imported_domain_lives_as_long_as_it_is_used() {
        let real = Box::into_raw(Pd::boxed(None).unwrap());
        // SAFETY: it was made just now, and lives to the end of the test.
        let kept = PdUse::new(unsafe { &*real });
        let imported = Box::into_raw(
            Pd::boxed(Some(Parent {
                _pd: kept,
                td: ptr::null_mut(),
                allocator: None,
            }))
            .unwrap(),
        );
        assert_eq!(users(real), 1);
        // SAFETY: the domain lives, and goes on doing so for its buffers.
        let (one, two) = unsafe {
            let one = Pd::buffer(imported.cast(), 100).unwrap();
            let two = Pd::buffer(imported.cast(), 100).unwrap();
            unimport_pd(imported.cast());
            (one, two)
        };
        // What would have gone with it is still there.
        assert_eq!(users(real), 1);
        drop(one);
        assert_eq!(users(real), 1);
        drop(two);
        assert_eq!(users(real), 0);
        // SAFETY: it has no users.
        unsafe { unimport_pd(real.cast()) };
    }

    #[test]
    fn a_domain_in_use_is_not_given_up() {
        let pd = Box::into_raw(Pd::boxed(None).unwrap());
        // SAFETY: the domain lives; the kernel is not asked where there are users.
        unsafe {
            let buffer = Pd::buffer(pd.cast(), 100).unwrap();
            assert_eq!(dealloc_pd(pd.cast()), libc::EBUSY);
            drop(buffer);
            unimport_pd(pd.cast());
        }
    }

    #[test]
    fn without_memory_no_domain_is_made() {
        let make = || {
            Pd::boxed(None).map(|pd| {
                // SAFETY: nobody else has it.
                unsafe { Pd::give_up(Box::into_raw(pd)) }
            })
        };
        assert_eq!(heap::tests::with_little_memory(make), 1);
    }

    #[test]
    fn a_region_that_is_not_made_leaves_nothing_behind() {
        // SAFETY: the location of the calling thread's `errno` is always valid.
        let errno = || unsafe { *libc::__errno_location() };
        assert!(make_mr(|_| libc::EPERM).is_null());
        assert_eq!(errno(), libc::EPERM);
        let mr = make_mr(|mr| {
            // SAFETY: it is there, and nobody else has it.
            unsafe { (*mr).ibv_mr.lkey = 7 };
            0
        });
        // SAFETY: it was made just now; `unimport_mr` gives back what the kernel does not know.
        unsafe {
            assert_eq!((*mr).lkey, 7);
            unimport_mr(mr);
        }
        let make = || {
            let mut asked = false;
            let mr = make_mr(|_| {
                asked = true;
                libc::EPERM
            });
            assert!(mr.is_null());
            // Without memory the kernel is not asked.
            if asked {
                Ok(())
            } else {
                Err(errno())
            }
        };
        assert_eq!(heap::tests::with_little_memory(make), 1);
    }
}
