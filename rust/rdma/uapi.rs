// SPDX-License-Identifier: GPL-2.0

//! What all drivers here add to the `ioctl` interface, besides their own [`super::Method`]s: attributes
//! of methods of the core, and methods by which a process that shares the context of another finds out
//! what the other was told.
//!
//! The numbers are in `rust/bindings/rdma_uapi.h`.
//!
//! C header: [`include/rdma/uverbs_ioctl.h`](srctree/include/rdma/uverbs_ioctl.h).

use crate::bindings;
use core::mem::offset_of;
use core::ptr;
use kernel::error::{from_err_ptr, from_result, to_result};
use kernel::prelude::*;

/// Whether an attribute has to be there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Mandatory,
    Optional,
}

/// An attribute; `words` are the two of the union after the flags.
const fn attribute(
    id: u32,
    kind: bindings::uverbs_attr_type,
    words: [u16; 2],
    presence: Presence,
) -> bindings::uverbs_attr_def {
    /// Where `mandatory` is among the one-bit fields of `struct uverbs_attr_spec`.
    const MANDATORY: u32 = 2;
    let flags = match presence {
        Presence::Optional => 0,
        Presence::Mandatory if cfg!(target_endian = "big") => 0x80 >> MANDATORY,
        Presence::Mandatory => 1 << MANDATORY,
    };
    let mut def: bindings::uverbs_attr_def = pin_init::zeroed();
    def.id = id as u16;
    def.attr.type_ = kind as u8;
    def.attr._bitfield_1 = bindings::__BindgenBitfieldUnit::new([flags]);
    def.attr.u.bindgen_union_field = words;
    def
}

/// Room of the process for at least `least` and at most `most` bytes.
const fn out(id: u32, least: usize, most: usize, presence: Presence) -> bindings::uverbs_attr_def {
    assert!(least <= most && most <= u16::MAX as usize);
    attribute(
        id,
        bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_OUT,
        [most as u16, least as u16],
        presence,
    )
}

/// Room of the process for a number.
const fn out_u64(id: u32, presence: Presence) -> bindings::uverbs_attr_def {
    out(id, size_of::<u64>(), size_of::<u64>(), presence)
}

/// A handle of an object that others may use meanwhile.
const fn handle(id: u32, object: bindings::uverbs_default_objects) -> bindings::uverbs_attr_def {
    let access = bindings::uverbs_obj_access_UVERBS_ACCESS_READ as u8;
    attribute(
        id,
        bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_IDR,
        [object as u16, u16::from_ne_bytes([access, 0])],
        Presence::Mandatory,
    )
}

/// A method with a handler, or attributes of a method of the core without.
const fn method(
    id: u32,
    attributes: &'static [&'static bindings::uverbs_attr_def],
    handler: Option<unsafe extern "C" fn(*mut bindings::uverbs_attr_bundle) -> c_int>,
) -> bindings::uverbs_method_def {
    bindings::uverbs_method_def {
        id: id as u16,
        flags: 0,
        num_attrs: attributes.len(),
        attrs: attributes.as_ptr().cast(),
        handler,
    }
}

/// An object of the core with methods: trees of the same object are merged.
const fn object(
    id: bindings::uverbs_default_objects,
    methods: &'static [&'static bindings::uverbs_method_def],
) -> bindings::uverbs_object_def {
    bindings::uverbs_object_def {
        id: id as u16,
        type_attrs: ptr::null(),
        num_methods: methods.len(),
        methods: methods.as_ptr().cast(),
    }
}

const CONTEXT: &bindings::uverbs_object_def = &object(
    bindings::uverbs_default_objects_UVERBS_OBJECT_DEVICE,
    &[&method(
        bindings::uverbs_methods_device_UVERBS_METHOD_QUERY_CONTEXT,
        &[
            &out(
                bindings::RDMA_CONTEXT_ATTR_RESPONSE,
                1,
                u16::MAX as usize,
                Presence::Mandatory,
            ),
            &out_u64(bindings::RDMA_CONTEXT_ATTR_CLOCK, Presence::Optional),
            &out_u64(bindings::RDMA_CONTEXT_ATTR_CLOCK_NOW, Presence::Optional),
        ],
        None,
    )],
);

const PD: &bindings::uverbs_object_def = &object(
    bindings::uverbs_default_objects_UVERBS_OBJECT_PD,
    &[&method(
        bindings::RDMA_METHOD_PD_QUERY,
        &[&handle(
            bindings::RDMA_PD_QUERY_ATTR_HANDLE,
            bindings::uverbs_default_objects_UVERBS_OBJECT_PD,
        )],
        Some(query_pd),
    )],
);

const DM: &bindings::uverbs_object_def = &object(
    bindings::uverbs_default_objects_UVERBS_OBJECT_DM,
    &[
        &method(
            bindings::uverbs_methods_dm_UVERBS_METHOD_DM_ALLOC,
            &[&out_u64(bindings::RDMA_DM_ATTR_OFFSET, Presence::Optional)],
            None,
        ),
        &method(
            bindings::RDMA_METHOD_DM_QUERY,
            &[
                &handle(
                    bindings::RDMA_DM_QUERY_ATTR_HANDLE,
                    bindings::uverbs_default_objects_UVERBS_OBJECT_DM,
                ),
                &out_u64(bindings::RDMA_DM_QUERY_ATTR_OFFSET, Presence::Mandatory),
                &out_u64(bindings::RDMA_DM_QUERY_ATTR_LENGTH, Presence::Mandatory),
            ],
            Some(query_dm),
        ),
    ],
);

/// What a line of the definitions says.
type Line = bindings::uapi_definition__bindgen_ty_2;

const fn tree(object: &'static bindings::uverbs_object_def) -> bindings::uapi_definition {
    let mut line: bindings::uapi_definition = pin_init::zeroed();
    line.kind = bindings::uapi_definition_kind_UAPI_DEF_CHAIN_OBJ_TREE as u8;
    // The object's number is first in either view of the union.
    line.__bindgen_anon_1.bindgen_union_field[0] = object.id;
    line.__bindgen_anon_2 = Line {
        chain_obj_tree: object,
    };
    line
}

const DEFINITIONS: &[bindings::uapi_definition; 4] = &[
    tree(CONTEXT),
    tree(PD),
    tree(DM),
    // The end of the list is a line of zeroes.
    pin_init::zeroed(),
];
const _: () = assert!(bindings::uapi_definition_kind_UAPI_DEF_END == 0);

/// All of it, for the core.
pub(super) fn definitions() -> *const bindings::uapi_definition {
    DEFINITIONS.as_ptr()
}

/// # Safety
///
/// To be called by the core as the handler of the method.
unsafe extern "C" fn query_pd(_attrs: *mut bindings::uverbs_attr_bundle) -> c_int {
    // The handle was looked up before, and that is all there is to it.
    0
}

/// # Safety
///
/// To be called by the core as the handler of the method, for a device whose `alloc_dm` makes
/// `rdma_dm`s.
unsafe extern "C" fn query_dm(attrs: *mut bindings::uverbs_attr_bundle) -> c_int {
    const { assert!(offset_of!(bindings::rdma_dm, dm) == 0) };
    from_result(|| {
        let handle = bindings::RDMA_DM_QUERY_ATTR_HANDLE as u16;
        // SAFETY: `ib_uverbs_cmd_verbs` has checked the attributes against those of the method, by
        // which this is a handle, before it called the handler.
        let dm = from_err_ptr(unsafe { bindings::uverbs_attr_get_obj(attrs, handle) })?;
        let dm = dm.cast::<bindings::rdma_dm>();
        // SAFETY: The caller vouches that device memory is the first member of an `rdma_dm`, which is
        // not changed after it was made. The core holds the object that the handle stands for until
        // the handler has returned.
        let (offset, length) = unsafe { ((*dm).offset, (*dm).length) };
        for (attribute, value) in [
            (bindings::RDMA_DM_QUERY_ATTR_OFFSET, offset),
            (bindings::RDMA_DM_QUERY_ATTR_LENGTH, length),
        ] {
            // SAFETY: By the checked attributes there is room for as many bytes as `value` has, which
            // is a local.
            to_result(unsafe {
                bindings::uverbs_copy_to(
                    attrs,
                    attribute as usize,
                    ptr::from_ref(&value).cast(),
                    size_of::<u64>(),
                )
            })?;
        }
        Ok(0)
    })
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_uapi)]
mod tests {
    use super::*;

    /// Whether an attribute is mandatory, its least length and its length.
    fn room(def: &bindings::uverbs_attr_def) -> (u8, u16, u16) {
        // SAFETY: All views of the union are plain numbers.
        let room = unsafe { def.attr.u.ptr.as_ref() };
        (def.attr.mandatory(), room.min_len, room.len)
    }

    #[test]
    fn attributes_are_as_the_core_reads_them() {
        let optional = out_u64(bindings::RDMA_DM_ATTR_OFFSET, Presence::Optional);
        assert_eq!(u32::from(optional.id), bindings::RDMA_DM_ATTR_OFFSET);
        assert_eq!(room(&optional), (0, 8, 8));
        let mandatory = out(
            bindings::RDMA_CONTEXT_ATTR_RESPONSE,
            1,
            0xffff,
            Presence::Mandatory,
        );
        assert_eq!(room(&mandatory), (1, 1, 0xffff));
        let object = bindings::uverbs_default_objects_UVERBS_OBJECT_PD;
        let handle = handle(bindings::RDMA_PD_QUERY_ATTR_HANDLE, object);
        assert_eq!(handle.attr.mandatory(), 1);
        // SAFETY: All views of the union are plain numbers.
        let handle = unsafe { handle.attr.u.obj.as_ref() };
        assert_eq!(u32::from(handle.obj_type), object);
        assert_eq!(
            u32::from(handle.access),
            bindings::uverbs_obj_access_UVERBS_ACCESS_READ
        );
    }
}
