// SPDX-License-Identifier: GPL-2.0

//! Methods that a driver adds to the `ioctl` interface of verbs objects.
//!
//! A [`Method`] names the object that it is of, its number and, as a tuple of types, its attributes.
//! From the types come both the description by which the core checks what a process passes and the
//! values that the driver is called with, so that the two cannot disagree:
//!
//! ```ignore
//! struct SetDepth;
//!
//! impl Method<MyDriver> for SetDepth {
//!     type Kind = kind::Cq;
//!     const ID: u32 = uapi::METHOD_SET_DEPTH;
//!     type Attributes<'a> = (
//!         Handle<'a, kind::Cq, MyDriver, { uapi::ATTR_HANDLE }>,
//!         In<u32, { uapi::ATTR_DEPTH }>,
//!     );
//!
//!     fn call(_: &Ucontext<MyDriver>, (cq, depth): Self::Attributes<'_>) -> Result {
//!         cq.set_depth(*depth)
//!     }
//! }
//! ```
//!
//! and in the driver's [`UserOps`]: `const METHODS: &'static [MethodDef<Self>] =
//! &[MethodDef::new::<SetDepth>()];`.
//!
//! Attributes that a driver adds to a method of the core are such a tuple, too
//! ([`super::QueryContextOps::QueryAttributes`], [`super::DmOps::AllocAttributes`]).
//!
//! C header: [`include/rdma/uverbs_ioctl.h`](srctree/include/rdma/uverbs_ioctl.h).

use super::{kind, CqOps, DmOps, Driver, Kind, Object, Ops, PdOps, Ucontext, UserOps};
use crate::bindings;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ops::Deref;
use core::ptr;
use kernel::error::{from_err_ptr, from_result, to_result};
use kernel::prelude::*;
use kernel::transmute::{AsBytes, FromBytes};

/// A method that driver `D` adds to a kind of object, or to the device.
pub trait Method<D: UserOps>: 'static {
    /// What it is of: a kind of object, or [`OfDevice`].
    type Kind: Owner;
    /// Its number, one of those that are the drivers' (`UVERBS_ID_DRIVER_NS`).
    const ID: u32;
    /// Its attributes: a tuple of [`Handle`], [`In`], [`Out`] and [`OutStruct`].
    type Attributes<'a>: Attributes<'a, D>;

    /// Carries it out for a process with this context. May sleep; the device is registered meanwhile.
    /// `EPROTONOSUPPORT` is what the core says of a method that there is not, and must not be returned.
    fn call(context: &Ucontext<D>, attributes: Self::Attributes<'_>) -> Result;
}

/// What methods can be added to.
pub trait Owner {
    /// The core's number of its type.
    const OBJECT: u16;
}

/// Methods of the device: of no object of a process.
pub enum OfDevice {}

impl Owner for OfDevice {
    const OBJECT: u16 = bindings::uverbs_default_objects_UVERBS_OBJECT_DEVICE as u16;
}

impl Owner for kind::Pd {
    const OBJECT: u16 = bindings::uverbs_default_objects_UVERBS_OBJECT_PD as u16;
}

impl Owner for kind::Cq {
    const OBJECT: u16 = bindings::uverbs_default_objects_UVERBS_OBJECT_CQ as u16;
}

impl Owner for kind::Dm {
    const OBJECT: u16 = bindings::uverbs_default_objects_UVERBS_OBJECT_DM as u16;
}

/// A kind of object that processes have handles of.
///
/// # Safety
///
/// [`Owner::OBJECT`] must be the core's number of a type of object whose handles stand for the `Self::Raw`
/// of an [`Object`] that the driver has created.
pub unsafe trait Handled<D: Driver>: Kind<D> + Owner {}

// SAFETY: `ib_uverbs_alloc_pd` finalizes the handle of a domain after the driver has created it, with
// its `struct ib_pd`.
unsafe impl<D: PdOps> Handled<D> for kind::Pd {}

// SAFETY: The core commits the handle of a completion queue after the driver has created it, with
// its `struct ib_cq`.
unsafe impl<D: CqOps> Handled<D> for kind::Cq {}

// SAFETY: The core commits the handle of device memory after the driver has created it, with the
// `struct ib_dm` that `alloc_dm` returned.
unsafe impl<D: DmOps> Handled<D> for kind::Dm {}

/// An attribute of a method.
///
/// # Safety
///
/// [`Self::SPEC`] must be such that [`Self::get`] is sound for an attribute that the core has found
/// to be so.
pub unsafe trait Attribute<'a, D: Driver>: Sized {
    /// Its description for the core.
    const SPEC: AttributeSpec;

    /// What the process passed.
    ///
    /// # Safety
    ///
    /// `bundle` must be the attributes of a method of a device of `D` that is being carried out for
    /// `'a`, checked by the core against [`Self::SPEC`].
    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self>;
}

/// The description of an attribute.
#[repr(transparent)]
pub struct AttributeSpec(bindings::uverbs_attr_def);

impl AttributeSpec {
    /// How many attributes of one method may be a driver's.
    const COUNT: u32 = (1 << (bindings::uapi_radix_data_UVERBS_API_ATTR_KEY_BITS - 1)) - 1;
    /// Where `mandatory` is among the one-bit fields of `struct uverbs_attr_spec`.
    const MANDATORY_BIT: u32 = 2;

    /// An attribute that need not be there. `words` are the two of the union after the flags.
    const fn optional(id: u32, kind: bindings::uverbs_attr_type, words: [u16; 2]) -> Self {
        let first = bindings::uapi_radix_data_UVERBS_API_NS_FLAG;
        assert!(first <= id && id < first + Self::COUNT);
        let mut def: bindings::uverbs_attr_def = pin_init::zeroed();
        def.id = id as u16;
        def.attr.type_ = kind as u8;
        def.attr.u.bindgen_union_field = words;
        Self(def)
    }

    /// The same, and it has to be there.
    const fn mandatory(self) -> Self {
        let flags = if cfg!(target_endian = "big") {
            0x80 >> Self::MANDATORY_BIT
        } else {
            1 << Self::MANDATORY_BIT
        };
        let Self(mut def) = self;
        def.attr._bitfield_1 = bindings::__BindgenBitfieldUnit::new([flags]);
        Self(def)
    }

    /// A handle of an object of type `object` that others may use meanwhile.
    const fn handle(id: u32, object: u16) -> Self {
        let access = bindings::uverbs_obj_access_UVERBS_ACCESS_READ as u8;
        Self::optional(
            id,
            bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_IDR,
            [object, u16::from_ne_bytes([access, 0])],
        )
        .mandatory()
    }

    /// One of exactly the bytes of a `T`, that need not be there.
    const fn of_size<T>(id: u32, kind: bindings::uverbs_attr_type) -> Self {
        assert!(size_of::<T>() <= u16::MAX as usize);
        let size = size_of::<T>() as u16;
        // The length, and the least length.
        Self::optional(id, kind, [size, size])
    }

    /// Room for any number of bytes but none.
    const fn room(id: u32) -> Self {
        let kind = bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_OUT;
        Self::optional(id, kind, [u16::MAX, 1]).mandatory()
    }
}

/// The handle of an object, to which it dereferences. The object is not destroyed meanwhile; others
/// may use it.
pub struct Handle<'a, K: Handled<D>, D: Driver, const ID: u32>(&'a Object<K, D>);

impl<K: Handled<D>, D: Driver, const ID: u32> Deref for Handle<'_, K, D, ID> {
    type Target = Object<K, D>;

    fn deref(&self) -> &Object<K, D> {
        self.0
    }
}

// SAFETY: The core lets only handles of the kind pass, of objects of the same device, which it holds
// until the method has returned.
unsafe impl<'a, K: Handled<D>, D: Driver, const ID: u32> Attribute<'a, D> for Handle<'a, K, D, ID> {
    const SPEC: AttributeSpec = AttributeSpec::handle(ID, K::OBJECT);

    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        // SAFETY: The caller vouches for the attributes, and `SPEC` says that this one is a handle.
        let object = from_err_ptr(unsafe { bindings::uverbs_attr_get_obj(bundle, ID as u16) })?;
        // SAFETY: `Handled` vouches that the handle stands for an object that the driver created;
        // the core holds it until the method has returned.
        Ok(Self(unsafe { Object::from_raw(object.cast()) }))
    }
}

/// A value that the process passes, to which it dereferences.
pub struct In<T, const ID: u32>(T);

impl<T, const ID: u32> Deref for In<T, ID> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

// SAFETY: The core lets only values of exactly the bytes of a `T` pass, and any bytes make one.
unsafe impl<D: Driver, T: FromBytes, const ID: u32> Attribute<'_, D> for In<T, ID> {
    const SPEC: AttributeSpec =
        AttributeSpec::of_size::<T>(ID, bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_IN)
            .mandatory();

    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        let mut value = MaybeUninit::<T>::zeroed();
        // SAFETY: The caller vouches for the attributes, and `SPEC` says that this one is as many
        // bytes as `value`.
        to_result(unsafe {
            bindings::_uverbs_copy_from(
                value.as_mut_ptr().cast(),
                bundle,
                ID as usize,
                size_of::<T>(),
            )
        })?;
        // SAFETY: All bytes were written, and any bytes make a `T`.
        Ok(Self(unsafe { value.assume_init() }))
    }
}

/// Room of the process for a value.
pub struct Out<'a, T, const ID: u32> {
    bundle: *mut bindings::uverbs_attr_bundle,
    _method: PhantomData<&'a ()>,
    _value: PhantomData<fn(&T)>,
}

impl<T: AsBytes, const ID: u32> Out<'_, T, ID> {
    /// Tells the process the value.
    pub fn write(&self, value: &T) -> Result {
        // SAFETY: `get` was given the attributes of a method that outlives `self`; `value` is as many
        // bytes as announced, all initialised.
        to_result(unsafe {
            bindings::uverbs_copy_to(
                self.bundle,
                ID as usize,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

// SAFETY: The core lets only room for exactly the bytes of a `T` pass.
unsafe impl<'a, D: Driver, T: AsBytes, const ID: u32> Attribute<'a, D> for Out<'a, T, ID> {
    const SPEC: AttributeSpec =
        AttributeSpec::of_size::<T>(ID, bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_OUT)
            .mandatory();

    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        Ok(Self {
            bundle,
            _method: PhantomData,
            _value: PhantomData,
        })
    }
}

// SAFETY: The core lets only room for exactly the bytes of a `T` pass, or nothing, which `get` finds
// out.
unsafe impl<'a, D: Driver, T: AsBytes, const ID: u32> Attribute<'a, D> for Option<Out<'a, T, ID>> {
    const SPEC: AttributeSpec =
        AttributeSpec::of_size::<T>(ID, bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_OUT);

    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        // SAFETY: The caller vouches for the attributes, among which the core has noted the present ones.
        if !unsafe { bindings::uverbs_attr_is_valid(bundle, ID) } {
            return Ok(None);
        }
        // SAFETY: The caller vouches for the attributes, and this one is there.
        unsafe { <Out<'a, T, ID> as Attribute<'a, D>>::get(bundle) }.map(Some)
    }
}

/// Room of the process for a structure, of which a process that is older, or newer, knows another
/// length.
pub struct OutStruct<'a, T, const ID: u32>(Out<'a, T, ID>);

impl<T: AsBytes, const ID: u32> OutStruct<'_, T, ID> {
    /// Tells the process the value, cut or padded with zeroes to what it gave room for.
    pub fn write(&self, value: &T) -> Result {
        // SAFETY: `get` was given the attributes of a method that outlives `self`; `value` is as many
        // bytes as announced, all initialised.
        to_result(unsafe {
            bindings::uverbs_copy_to_struct_or_zero(
                self.0.bundle,
                ID as usize,
                ptr::from_ref(value).cast(),
                size_of::<T>(),
            )
        })
    }
}

// SAFETY: The core lets any room pass, and so does what writes to it.
unsafe impl<'a, D: Driver, T: AsBytes, const ID: u32> Attribute<'a, D> for OutStruct<'a, T, ID> {
    const SPEC: AttributeSpec = AttributeSpec::room(ID);

    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        // SAFETY: The caller vouches for the attributes.
        unsafe { <Out<'a, T, ID> as Attribute<'a, D>>::get(bundle) }.map(Self)
    }
}

/// The attributes of a method: tuples of [`Attribute`]s.
///
/// # Safety
///
/// [`Self::SPECS`] must be such that [`Self::get`] is sound for attributes that the core has found to
/// be so.
pub unsafe trait Attributes<'a, D: Driver>: Sized {
    /// Their descriptions.
    const SPECS: &'static [&'static AttributeSpec];

    /// What the process passed.
    ///
    /// # Safety
    ///
    /// As for [`Attribute::get`], with [`Self::SPECS`].
    unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self>;
}

macro_rules! tuples {
    ($(($($attribute:ident),+);)*) => {$(
        // SAFETY: Each member reads what it describes itself.
        unsafe impl<'a, D: Driver, $($attribute: Attribute<'a, D>),+> Attributes<'a, D>
            for ($($attribute,)+)
        {
            const SPECS: &'static [&'static AttributeSpec] = &[$(&$attribute::SPEC),+];

            unsafe fn get(bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
                // SAFETY: The caller vouches for the attributes, and that the core checked them
                // against all of `SPECS`.
                Ok(($(unsafe { $attribute::get(bundle)? },)+))
            }
        }
    )*};
}

// SAFETY: Nothing is read.
unsafe impl<'a, D: Driver> Attributes<'a, D> for () {
    const SPECS: &'static [&'static AttributeSpec] = &[];

    unsafe fn get(_bundle: *mut bindings::uverbs_attr_bundle) -> Result<Self> {
        Ok(())
    }
}

tuples! {
    (A);
    (A, B);
    (A, B, C);
    (A, B, C, E);
}

/// A method as the core is told of it.
pub struct MethodDef<D: Driver> {
    object: &'static bindings::uverbs_object_def,
    id: u32,
    _p: PhantomData<D>,
}

/// The constants that describe method `M`, one pointing to the next.
struct Tree<D: UserOps, M: Method<D>>(PhantomData<(D, M)>);

/// What a method does.
type Handler = unsafe extern "C" fn(*mut bindings::uverbs_attr_bundle) -> c_int;

/// A method with these attributes; one of the core where there is no handler.
const fn method_def(
    id: u32,
    specs: &'static [&'static AttributeSpec],
    handler: Option<Handler>,
) -> bindings::uverbs_method_def {
    let mut one = 0;
    while one < specs.len() {
        let mut other = 0;
        while other < one {
            // Each attribute has a number of its own.
            assert!(specs[one].0.id != specs[other].0.id);
            other += 1;
        }
        one += 1;
    }
    bindings::uverbs_method_def {
        id: id as u16,
        flags: 0,
        num_attrs: specs.len(),
        attrs: specs.as_ptr().cast(),
        handler,
    }
}

/// An object of the core with one method: trees of the same object are merged.
const fn object_def(
    id: u16,
    methods: &'static [&'static bindings::uverbs_method_def; 1],
) -> bindings::uverbs_object_def {
    bindings::uverbs_object_def {
        id,
        type_attrs: ptr::null(),
        num_methods: methods.len(),
        methods: methods.as_ptr().cast(),
    }
}

/// The constants that describe attributes `A` that a driver adds to method `ID` of the core, of what
/// `O` stands for.
pub(super) struct Addition<D, O, A, const ID: u32>(PhantomData<(D, O, A)>);

impl<D: UserOps, O: Owner, A: Attributes<'static, D>, const ID: u32> Addition<D, O, A, ID> {
    const METHOD: &'static bindings::uverbs_method_def = &method_def(ID, A::SPECS, None);

    const TREE: &'static bindings::uverbs_object_def = &object_def(O::OBJECT, &[Self::METHOD]);

    /// For the core, if there are any.
    pub(super) const OBJECT: Option<&'static bindings::uverbs_object_def> = if A::SPECS.is_empty() {
        None
    } else {
        Some(Self::TREE)
    };
}

impl<D: UserOps, M: Method<D>> Tree<D, M> {
    const METHOD: &'static bindings::uverbs_method_def = &{
        let first = bindings::uapi_radix_data_UVERBS_API_NS_FLAG;
        let count = bindings::uapi_radix_data_UVERBS_API_METHOD_KEY_NUM_DRIVER;
        assert!(first <= M::ID && M::ID < first + count);
        let specs = <M::Attributes<'static> as Attributes<'static, D>>::SPECS;
        method_def(M::ID, specs, Some(Self::handler))
    };

    const OBJECT: &'static bindings::uverbs_object_def =
        &object_def(<M::Kind as Owner>::OBJECT, &[Self::METHOD]);

    /// # Safety
    ///
    /// To be called by the core as the handler of [`Self::METHOD`], for a device of `D`.
    unsafe extern "C" fn handler(bundle: *mut bindings::uverbs_attr_bundle) -> c_int {
        from_result(|| {
            // SAFETY: The core has set the file of those whose method it carries out.
            let context = unsafe { bindings::ib_uverbs_get_ucontext(bundle) };
            // SAFETY: What is no error is the context of the file, of a device of `D`, which stays until
            // this returns.
            let context = unsafe { Ucontext::<D>::from_raw(from_err_ptr(context)?) };
            // SAFETY: The core has checked the attributes against those of `METHOD`, which are their
            // `SPECS`, and keeps them until this returns.
            let attributes = unsafe { <M::Attributes<'_> as Attributes<'_, D>>::get(bundle)? };
            M::call(context, attributes)?;
            Ok(0)
        })
    }
}

impl<D: Driver> MethodDef<D> {
    /// Describes `M`.
    pub const fn new<M: Method<D>>() -> Self
    where
        D: UserOps,
    {
        Self {
            object: Tree::<D, M>::OBJECT,
            id: M::ID,
            _p: PhantomData,
        }
    }

    /// Whether the core can make use of all of them: each object's methods have numbers of their own.
    pub(super) const fn are_distinct(methods: &[Self]) -> bool {
        let mut one = 0;
        while one < methods.len() {
            let mut other = 0;
            while other < one {
                if methods[one].object.id == methods[other].object.id
                    && methods[one].id == methods[other].id
                {
                    return false;
                }
                other += 1;
            }
            one += 1;
        }
        true
    }
}

/// All that a device's driver adds to the interface.
pub(super) struct Definitions(KVec<bindings::uapi_definition>);

/// What a line of the definitions says.
type Line = bindings::uapi_definition__bindgen_ty_2;

impl Definitions {
    fn line(kind: bindings::uapi_definition_kind, line: Line) -> bindings::uapi_definition {
        bindings::uapi_definition {
            kind: kind as u8,
            __bindgen_anon_2: line,
            ..pin_init::zeroed()
        }
    }

    /// The line of an object with a method.
    fn tree(object: &'static bindings::uverbs_object_def) -> bindings::uapi_definition {
        let mut line = Self::line(
            bindings::uapi_definition_kind_UAPI_DEF_CHAIN_OBJ_TREE,
            Line {
                chain_obj_tree: object,
            },
        );
        // The object's number is first in either view of the union.
        line.__bindgen_anon_1.bindgen_union_field[0] = object.id;
        line
    }

    /// What the driver says that it offers.
    pub(super) fn new<D: Driver>(ops: &Ops<D>) -> Result<Self> {
        let additions = ops.additions.iter().flatten().copied();
        let methods = ops.methods.iter().map(|method| method.object);
        let mut lines = KVec::new();
        for object in Iterator::chain(additions, methods) {
            lines.push(Self::tree(object), GFP_KERNEL)?;
        }
        let end = bindings::uapi_definition_kind_UAPI_DEF_END;
        lines.push(Self::line(end, pin_init::zeroed()), GFP_KERNEL)?;
        Ok(Self(lines))
    }

    /// For the core, which reads them for as long as the device is registered.
    pub(super) fn as_ptr(&self) -> *const bindings::uapi_definition {
        self.0.as_ptr()
    }
}

#[cfg(not(rdma_no_tests))]
#[kunit_tests(rust_rdma_method)]
mod tests {
    use super::*;

    const FIRST: u32 = bindings::uapi_radix_data_UVERBS_API_NS_FLAG;

    #[test]
    fn a_value_is_mandatory_and_of_exactly_its_size() {
        let spec = AttributeSpec::of_size::<u32>(
            FIRST + 1,
            bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_IN,
        )
        .mandatory();
        assert_eq!(u32::from(spec.0.id), FIRST + 1);
        let attr = &spec.0.attr;
        assert_eq!(
            u32::from(attr.type_),
            bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_IN
        );
        assert_eq!(attr.mandatory(), 1);
        assert_eq!(attr.zero_trailing(), 0);
        assert_eq!(attr.alloc_and_copy(), 0);
        assert_eq!(attr.is_udata(), 0);
        // SAFETY: All views of the union are plain numbers.
        let (len, min_len) = unsafe { (attr.u.ptr.as_ref().len, attr.u.ptr.as_ref().min_len) };
        assert_eq!((len, min_len), (4, 4));
    }

    #[test]
    fn a_handle_is_mandatory_and_of_one_kind_of_object() {
        let spec = AttributeSpec::handle(FIRST, 3);
        let attr = &spec.0.attr;
        assert_eq!(
            u32::from(attr.type_),
            bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_IDR
        );
        assert_eq!(attr.mandatory(), 1);
        // SAFETY: All views of the union are plain numbers.
        let (kind, access) = unsafe { (attr.u.obj.as_ref().obj_type, attr.u.obj.as_ref().access) };
        assert_eq!(kind, 3);
        assert_eq!(
            u32::from(access),
            bindings::uverbs_obj_access_UVERBS_ACCESS_READ
        );
    }

    #[test]
    fn a_value_that_need_not_be_there_is_not_mandatory() {
        let kind = bindings::uverbs_attr_type_UVERBS_ATTR_TYPE_PTR_OUT;
        let spec = AttributeSpec::of_size::<u64>(FIRST, kind);
        assert_eq!(u32::from(spec.0.attr.type_), kind);
        assert_eq!(spec.0.attr.mandatory(), 0);
        // SAFETY: All views of the union are plain numbers.
        let room = unsafe { spec.0.attr.u.ptr.as_ref() };
        assert_eq!((room.len, room.min_len), (8, 8));
    }

    #[test]
    fn room_for_a_structure_is_of_any_length() {
        let spec = AttributeSpec::room(FIRST + 2);
        assert_eq!(spec.0.attr.mandatory(), 1);
        // SAFETY: All views of the union are plain numbers.
        let room = unsafe { spec.0.attr.u.ptr.as_ref() };
        assert_eq!((room.len, room.min_len), (u16::MAX, 1));
    }
}
