// SPDX-License-Identifier: GPL-2.0

//! devlink: what an administrator can ask of a device as a whole, of which this has what it is, its health and a
//! parameter (for `rust/kernel/devlink.rs`).
//!
//! C header: [`include/net/devlink.h`](srctree/include/net/devlink.h)

use crate::bindings;
use core::{
    cell::Cell,
    marker::PhantomData,
    ptr::{
        self,
        NonNull, //
    },
};
use kernel::{
    device,
    devres::Devres,
    error::{
        from_err_ptr,
        from_result,
        to_result, //
    },
    fmt,
    prelude::*,
    str::{
        as_char_ptr_in_const_context,
        CString, //
    },
    sync::{
        Arc,
        ArcBorrow, //
    },
};

/// Somebody who knows whether a device works, and can make it work again. `devlink health` shows and
/// asks it by its name.
pub trait HealthReporter: Send + Sync + 'static {
    /// What it is called.
    const NAME: &'static CStr;

    /// Makes the device work again, because somebody wants it now (`devlink health recover`), or says why
    /// that failed. Asked only after a failure was [reported](Devlink::report). Sleeps, with the devlink
    /// instance and a lock of all of generic netlink held: nothing of [`Devlink`] is to be called from here,
    /// nor waited for who does, and nothing that may take for ever.
    fn recover(this: ArcBorrow<'_, Self>) -> Result<(), Refusal>;

    /// Says what there is to know (`devlink health diagnose`), with the devlink instance locked.
    fn diagnose(&self, diagnosis: &mut Object<'_>);

    /// Says all that there is to know, for later: devlink keeps it until somebody clears it
    /// (`devlink health dump clear`), and asks for no other as long as it does. What is said before an error
    /// is not kept.
    ///
    /// Sleeps, with the devlink instance locked: nothing of [`Devlink`] is to be called from here, nor waited
    /// for who does, nor for a device, which may be why this is asked for.
    fn dump(&self, occasion: Occasion, dump: &mut Object<'_>) -> Result;
}

/// Why a reporter is asked for a [dump](HealthReporter::dump).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occasion {
    /// A failure is being [reported](Devlink::report).
    Failure,
    /// Somebody wants to see it (`devlink health dump show`).
    Demand,
}

/// A parameter of a device that its driver has of its own: a word, which counts as soon as it is set
/// (`devlink dev param set ... cmode runtime`).
pub trait Parameter: Send + Sync + 'static {
    /// What it is called.
    const NAME_OF_PARAMETER: &'static CStr;

    /// What it is where nobody has set it, and is again when that is asked for
    /// (`devlink dev param set ... default`).
    fn default_value() -> &'static CStr;

    /// What it is; of a text that is too long for devlink the beginning is shown.
    fn get(&self) -> &'static CStr;

    /// Makes it `value`, or says why not. Sleeps, with the same locks held as for
    /// [`HealthReporter::recover`], and with the same to beware of.
    fn set(this: ArcBorrow<'_, Self>, value: &CStr) -> Result<(), Refusal>;
}

/// Somebody who knows what a device is (`devlink dev info`). The name of its driver is known to devlink.
pub trait Information: Send + Sync + 'static {
    /// Says so, with the devlink instance locked.
    fn inform(&self, info: &mut Info<'_>) -> Result;
}

/// Why what an administrator asks for is not done: an error, and a text for him.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    error: Error,
    why: &'static CStr,
}

impl Refusal {
    /// With this error and text.
    pub const fn new(error: Error, why: &'static CStr) -> Self {
        Self { error, why }
    }

    /// The error.
    pub const fn error(self) -> Error {
        self.error
    }

    /// The text.
    pub const fn why(self) -> &'static CStr {
        self.why
    }

    /// Tells devlink by what a callback returns, and the administrator by `extack`.
    ///
    /// # Safety
    ///
    /// `extack` must be null or valid.
    unsafe fn tell(self, extack: *mut bindings::netlink_ext_ack) -> c_int {
        if let Some(extack) = NonNull::new(extack) {
            // SAFETY: The caller vouches that it is valid where it is not null. The text is static.
            unsafe { (*extack.as_ptr())._msg = self.why.as_char_ptr() };
        }
        self.error.to_errno()
    }
}

/// What there is to say about what a device is.
///
/// # Invariants
///
/// The pointer is a request that is being answered, by nobody else for `'a`.
pub struct Info<'a>(NonNull<bindings::devlink_info_req>, PhantomData<&'a mut ()>);

impl Info<'_> {
    /// The version of what runs in the device.
    pub const FIRMWARE: &'static CStr = generic_name(bindings::DEVLINK_INFO_VERSION_GENERIC_FW);
    /// The version of the interface between that and the driver.
    pub const INTERFACE: &'static CStr =
        generic_name(bindings::DEVLINK_INFO_VERSION_GENERIC_FW_MGMT_API);

    /// Says the serial number.
    pub fn serial_number(&mut self, number: &CStr) -> Result {
        // SAFETY: The request is ours by the type invariant; the text is copied.
        to_result(unsafe {
            bindings::devlink_info_serial_number_put(self.0.as_ptr(), number.as_char_ptr())
        })
    }

    /// Says which version of a component runs.
    pub fn running_version(&mut self, component: &CStr, version: &CStr) -> Result {
        // SAFETY: The request is ours by the type invariant; both texts are copied.
        to_result(unsafe {
            bindings::devlink_info_version_running_put(
                self.0.as_ptr(),
                component.as_char_ptr(),
                version.as_char_ptr(),
            )
        })
    }
}

/// A name that has a meaning for all drivers, as C has it.
const fn generic_name(name: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(name) {
        Ok(name) => name,
        Err(_) => panic!("a string of C ends with a zero"),
    }
}

/// What devlink is to say of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Whether it works.
    pub healthy: bool,
    /// How often it was made to work again since devlink was told last.
    pub recovered: u32,
}

/// What a reporter says about a device.
///
/// What does not fit, or finds no memory, makes devlink drop all of it and tell who asks: an error that devlink
/// has met with is kept in its message, and one that was met with here is what [`Self::write`] gives.
///
/// # Invariants
///
/// `fmsg` is valid, and nobody writes to it but who has an [`Object`] or a [`List`] of this.
struct Message {
    fmsg: NonNull<bindings::devlink_fmsg>,
    result: FirstError,
}

/// The first thing that went wrong, if anything did.
struct FirstError(Cell<Result>);

impl FirstError {
    const fn new() -> Self {
        Self(Cell::new(Ok(())))
    }

    /// Notes what went wrong, unless something did before.
    fn note(&self, error: Error) {
        self.0.set(self.0.get().and(Err(error)));
    }

    fn get(&self) -> Result {
        self.0.get()
    }
}

impl Message {
    /// Has a message that devlink gives a reporter written by `write`, in the object that all of it is.
    ///
    /// # Safety
    ///
    /// `fmsg` must be a message that is valid, and that nobody else writes, until this returns.
    unsafe fn write(
        fmsg: *mut bindings::devlink_fmsg,
        write: impl FnOnce(&mut Object<'_>) -> Result,
    ) -> Result {
        // INVARIANT: The caller vouches for it until this returns, when this value is gone.
        let message = Self {
            fmsg: NonNull::new(fmsg).ok_or(EINVAL)?,
            result: FirstError::new(),
        };
        write(&mut Object(&message))?;
        message.result.get()
    }
}

/// A text for devlink, which keeps the length, with that of the zero that ends it, in 16 bits, and looks at what is left
/// of it only.
fn short_text(text: &CStr) -> Result<*const c_char> {
    match u16::try_from(text.to_bytes_with_nul().len()) {
        Ok(_) => Ok(text.as_char_ptr()),
        Err(_) => Err(EMSGSIZE),
    }
}

/// Names, each with a value, that a reporter says: in a message, or in what is part of one. What is begun in it
/// ends before anything else is said.
pub struct Object<'a>(&'a Message);

impl Object<'_> {
    /// Adds a number.
    pub fn number(&mut self, name: &CStr, value: u32) {
        let fmsg = self.0.fmsg.as_ptr();
        // SAFETY: The message is ours by its type invariant; the name is copied.
        unsafe { bindings::devlink_fmsg_u32_pair_put(fmsg, name.as_char_ptr(), value) }
    }

    /// Adds a number that may be large.
    pub fn large_number(&mut self, name: &CStr, value: u64) {
        let fmsg = self.0.fmsg.as_ptr();
        // SAFETY: The message is ours by its type invariant; the name is copied.
        unsafe { bindings::devlink_fmsg_u64_pair_put(fmsg, name.as_char_ptr(), value) }
    }

    /// Adds whether something is so.
    pub fn flag(&mut self, name: &CStr, value: bool) {
        let fmsg = self.0.fmsg.as_ptr();
        // SAFETY: The message is ours by its type invariant; the name is copied.
        unsafe { bindings::devlink_fmsg_bool_pair_put(fmsg, name.as_char_ptr(), value) }
    }

    /// Adds a text.
    pub fn text(&mut self, name: &CStr, value: &CStr) {
        let fmsg = self.0.fmsg.as_ptr();
        match short_text(value) {
            // SAFETY: The message is ours by its type invariant; both texts are copied.
            Ok(value) => unsafe {
                bindings::devlink_fmsg_string_pair_put(fmsg, name.as_char_ptr(), value)
            },
            Err(error) => self.0.result.note(error),
        }
    }

    /// Adds a text that is made for it (`fmt!`). Sleeps.
    pub fn formatted(&mut self, name: &CStr, value: fmt::Arguments<'_>) {
        match CString::try_from_fmt(value) {
            Ok(value) => self.text(name, &value),
            Err(error) => self.0.result.note(error),
        }
    }

    /// Adds an object, which `fill` fills.
    pub fn object<R>(&mut self, name: &CStr, fill: impl FnOnce(&mut Object<'_>) -> R) -> R {
        let fmsg = self.0.fmsg.as_ptr();
        // SAFETY: The message is ours by its type invariant; the name is copied.
        unsafe { bindings::devlink_fmsg_pair_nest_start(fmsg, name.as_char_ptr()) };
        let result = in_object(self.0, fill);
        // SAFETY: The message is ours by its type invariant. The pair was begun above.
        unsafe { bindings::devlink_fmsg_pair_nest_end(fmsg) };
        result
    }

    /// Adds a list, which `fill` fills.
    pub fn list<R>(&mut self, name: &CStr, fill: impl FnOnce(&mut List<'_>) -> R) -> R {
        let fmsg = self.0.fmsg.as_ptr();
        // SAFETY: The message is ours by its type invariant; the name is copied.
        unsafe { bindings::devlink_fmsg_arr_pair_nest_start(fmsg, name.as_char_ptr()) };
        let result = fill(&mut List(self.0));
        // SAFETY: The message is ours by its type invariant. The list was begun above.
        unsafe { bindings::devlink_fmsg_arr_pair_nest_end(fmsg) };
        result
    }
}

/// Values that a reporter says, one after the other.
pub struct List<'a>(&'a Message);

impl List<'_> {
    /// Adds an object, which `fill` fills.
    pub fn object<R>(&mut self, fill: impl FnOnce(&mut Object<'_>) -> R) -> R {
        in_object(self.0, fill)
    }
}

/// Has an object filled by `fill`, where a value belongs in a message.
fn in_object<R>(message: &Message, fill: impl FnOnce(&mut Object<'_>) -> R) -> R {
    let fmsg = message.fmsg.as_ptr();
    // SAFETY: The message is ours by its type invariant.
    unsafe { bindings::devlink_fmsg_obj_nest_start(fmsg) };
    let result = fill(&mut Object(message));
    // SAFETY: The message is ours by its type invariant. The object was begun above.
    unsafe { bindings::devlink_fmsg_obj_nest_end(fmsg) };
    result
}

/// A text as the value of a parameter.
type Text = [c_char; bindings::__DEVLINK_PARAM_MAX_STRING_VALUE as usize];
const _: () = assert!(size_of::<Text>() <= size_of::<bindings::devlink_param_value>());

/// Makes a text the value of a parameter: as much of it as there is room for.
///
/// # Safety
///
/// `context` must be valid, and nobody else make use of it meanwhile.
unsafe fn put_text(context: *mut bindings::devlink_param_gset_ctx, value: &CStr) {
    // SAFETY: The caller vouches for the context. A value has room for a text, at its beginning, which is any bytes.
    let text = unsafe { &mut *(&raw mut (*context).val).cast::<Text>() };
    text.fill(0);
    // The last one stays zero.
    let room = text.len() - 1;
    for (byte, value) in text.iter_mut().take(room).zip(value.to_bytes()) {
        *byte = *value;
    }
}

/// A devlink instance that is registered until this is dropped, with a reporter of its device's health and a
/// parameter.
///
/// Dropping it waits for callbacks that run; none runs afterwards.
///
/// # Invariants
///
/// - `devlink` is a registered instance that this value owns, with a pointer to what `_health` refers to as its
///   private data, and with [`Self::PARAMETER`] registered.
/// - `reporter` is a reporter of it, with the same as its private data.
pub struct Devlink<H: HealthReporter + Parameter + Information> {
    devlink: NonNull<bindings::devlink>,
    reporter: NonNull<bindings::devlink_health_reporter>,
    _health: Arc<H>,
}

// SAFETY: devlink takes its own locks, whoever calls it; `H` is `Send` and `Sync`.
unsafe impl<H: HealthReporter + Parameter + Information> Send for Devlink<H> {}
// SAFETY: devlink takes its own locks, whoever calls it; `H` is `Send` and `Sync`.
unsafe impl<H: HealthReporter + Parameter + Information> Sync for Devlink<H> {}

impl<H: HealthReporter + Parameter + Information> Devlink<H> {
    /// What else an instance can do is said by what is registered with it.
    const OPS: &'static bindings::devlink_ops = &bindings::devlink_ops {
        info_get: Some(Self::info_callback),
        ..pin_init::zeroed()
    };

    const REPORTER_OPS: &'static bindings::devlink_health_reporter_ops =
        &bindings::devlink_health_reporter_ops {
            // devlink only reads it.
            name: as_char_ptr_in_const_context(H::NAME).cast_mut(),
            recover: Some(Self::recover_callback),
            dump: Some(Self::dump_callback),
            diagnose: Some(Self::diagnose_callback),
            // No grace period unless the administrator wants one: how often is tried is the driver's
            // to say.
            ..pin_init::zeroed()
        };

    const PARAMETER: &'static bindings::devlink_param = &bindings::devlink_param {
        // Numbers of a driver's own begin after those that have a meaning for all.
        id: bindings::devlink_param_generic_id___DEVLINK_PARAM_GENERIC_ID_MAX,
        name: as_char_ptr_in_const_context(H::NAME_OF_PARAMETER),
        generic: false,
        type_: bindings::devlink_param_type_DEVLINK_PARAM_TYPE_STRING,
        supported_cmodes: 1 << bindings::devlink_param_cmode_DEVLINK_PARAM_CMODE_RUNTIME,
        get: Some(Self::get_callback),
        set: Some(Self::set_callback),
        get_default: Some(Self::get_default_callback),
        reset_default: Some(Self::reset_default_callback),
        ..pin_init::zeroed()
    };

    /// Registers an instance for `dev`, with `health` as reporter and for its parameter.
    ///
    /// It is gone before `dev` is unbound, whoever keeps what this gives.
    pub fn register(dev: &device::Device<device::Bound>, health: Arc<H>) -> Result<Devres<Self>> {
        Devres::new(dev, Self::new(dev, health)?)
    }

    fn new(dev: &device::Device<device::Bound>, health: Arc<H>) -> Result<Self> {
        // SAFETY: The operations are static, and `device::Device` is a transparent wrapper of a valid
        // `struct device`, of which the instance takes a reference.
        let devlink = unsafe {
            bindings::devlink_alloc_ns(
                Self::OPS,
                size_of::<*const H>(),
                &raw mut bindings::init_net,
                ptr::from_ref(dev).cast_mut().cast(),
            )
        };
        let devlink = NonNull::new(devlink).ok_or(ENOMEM)?;
        // SAFETY: The instance was made just now.
        let data = unsafe { bindings::devlink_priv(devlink.as_ptr()) };
        // SAFETY: The instance was made with as much private data as this pointer takes, aligned for
        // anything, and nobody else knows it yet.
        unsafe { data.cast::<*const H>().write(Arc::as_ptr(&health)) };
        // SAFETY: The instance was made just now. The operations are static, and the private data is a
        // `H` that `_health` keeps until after the reporter is destroyed.
        let reporter = from_err_ptr(unsafe {
            bindings::devlink_health_reporter_create(
                devlink.as_ptr(),
                Self::REPORTER_OPS,
                Arc::as_ptr(&health).cast_mut().cast(),
            )
        });
        let reporter = match reporter.map(NonNull::new) {
            Ok(Some(reporter)) => reporter,
            failed => {
                // SAFETY: The instance was made above, is not registered, and not used afterwards.
                unsafe { bindings::devlink_free(devlink.as_ptr()) };
                return Err(failed.err().unwrap_or(ENOMEM));
            }
        };
        // SAFETY: The instance was made above and is not registered yet. The parameter is static, and its
        // callbacks find what they need in the private data.
        let registered = to_result(unsafe {
            bindings::devlink_params_register(devlink.as_ptr(), Self::PARAMETER, 1)
        });
        if let Err(error) = registered {
            // SAFETY: It was made above, of an instance that is not registered, and is not used afterwards.
            unsafe { bindings::devlink_health_reporter_destroy(reporter.as_ptr()) };
            // SAFETY: The instance was made above, is not registered, and not used afterwards.
            unsafe { bindings::devlink_free(devlink.as_ptr()) };
            return Err(error);
        }
        // SAFETY: The instance was made above and is not registered yet.
        unsafe { bindings::devlink_register(devlink.as_ptr()) };
        // INVARIANT: Registered just now, with a parameter, and with a reporter; the private data of the instance
        // and of the reporter is `health`.
        Ok(Self {
            devlink,
            reporter,
            _health: health,
        })
    }

    /// Reports that the device failed, and gives whether it is to be made to work again: not so where the
    /// administrator turned that off, or set a grace period that has not passed, nor where devlink knows
    /// already that it failed, or was told meanwhile that it works. Who makes it work says so by
    /// [`Self::update`]. Where devlink has no [dump](HealthReporter::dump) yet it asks for one before. Sleeps.
    pub fn report(&self, why: &CStr) -> bool {
        let wanted = Cell::new(false);
        // SAFETY: The reporter is ours and its instance registered, by the type invariants. The context is
        // a `Cell<bool>`, which is what the callback takes it for, and is used before this returns.
        // What is returned says no more than `wanted`.
        let _ = unsafe {
            bindings::devlink_health_report(
                self.reporter.as_ptr(),
                why.as_char_ptr(),
                (&raw const wanted).cast_mut().cast(),
            )
        };
        wanted.get()
    }

    /// Has devlink say what `standing` gives. That is called when no callback of the reporter runs, and none
    /// does until devlink says so. Sleeps.
    pub fn update(&self, standing: impl FnOnce() -> Standing) {
        // SAFETY: The instance is registered, by the type invariants. The lock is given back below.
        unsafe { bindings::devl_lock(self.devlink.as_ptr()) };
        let standing = standing();
        let state = if standing.healthy {
            bindings::devlink_health_reporter_state_DEVLINK_HEALTH_REPORTER_STATE_HEALTHY
        } else {
            bindings::devlink_health_reporter_state_DEVLINK_HEALTH_REPORTER_STATE_ERROR
        };
        for _ in 0..standing.recovered {
            // SAFETY: The reporter is one of the instance, by the type invariants, whose lock was taken above.
            unsafe { bindings::devlink_health_reporter_recovery_done(self.reporter.as_ptr()) };
        }
        // SAFETY: The reporter is one of the instance, by the type invariants, whose lock was taken above.
        unsafe { bindings::devlink_health_reporter_state_update(self.reporter.as_ptr(), state) };
        // SAFETY: The lock was taken above, by this task.
        unsafe { bindings::devl_unlock(self.devlink.as_ptr()) };
    }

    /// # Safety
    ///
    /// `reporter` must have been made by [`Self::register`], and not be destroyed for `'a`.
    unsafe fn health<'a>(reporter: *mut bindings::devlink_health_reporter) -> ArcBorrow<'a, H> {
        // SAFETY: The caller vouches for a reporter that is not destroyed.
        let health = unsafe { bindings::devlink_health_reporter_priv(reporter) };
        // SAFETY: `register` has made what an `Arc<H>` refers to its private data, which `Devlink::_health` keeps
        // until the reporter is destroyed.
        unsafe { ArcBorrow::from_raw(health.cast::<H>()) }
    }

    /// # Safety
    ///
    /// Only for devlink: `reporter` must have been made by [`Self::register`], and `context` be null or
    /// that of [`Self::report`]; `extack` must be null or valid.
    unsafe extern "C" fn recover_callback(
        reporter: *mut bindings::devlink_health_reporter,
        context: *mut c_void,
        extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        if let Some(wanted) = NonNull::new(context.cast::<Cell<bool>>()) {
            // SAFETY: The caller vouches for the context, which is a local of a function that waits for
            // this to return, in the same task.
            unsafe { wanted.as_ref() }.set(true);
            // Later, and not by devlink, which would keep its instance locked meanwhile.
            return EAGAIN.to_errno();
        }
        // SAFETY: The caller vouches for the reporter, which is not destroyed while it is called.
        let health = unsafe { Self::health(reporter) };
        match H::recover(health) {
            Ok(()) => 0,
            // SAFETY: The caller vouches for `extack`.
            Err(refusal) => unsafe { refusal.tell(extack) },
        }
    }

    /// # Safety
    ///
    /// `devlink` must have been made by [`Self::register`], and not be freed for `'a`.
    unsafe fn of_instance<'a>(devlink: *mut bindings::devlink) -> ArcBorrow<'a, H> {
        // SAFETY: The caller vouches for an instance that is not freed.
        let data = unsafe { bindings::devlink_priv(devlink) }.cast::<*const H>();
        // SAFETY: `register` has written such a pointer there before it registered anything that is called back, and
        // nobody writes to it after that.
        let health = unsafe { data.read() };
        // SAFETY: It points to what an `Arc<H>` refers to, which `Devlink::_health` keeps until the instance is freed.
        unsafe { ArcBorrow::from_raw(health) }
    }

    /// # Safety
    ///
    /// Only for devlink: `devlink` must have been made by [`Self::register`], and `request` be one that nobody
    /// else answers.
    unsafe extern "C" fn info_callback(
        devlink: *mut bindings::devlink,
        request: *mut bindings::devlink_info_req,
        _extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not freed while it is called.
        let this = unsafe { Self::of_instance(devlink) };
        from_result(|| {
            // INVARIANT: The caller vouches for the request.
            let mut info = Info(NonNull::new(request).ok_or(EINVAL)?, PhantomData);
            this.inform(&mut info)?;
            Ok(0)
        })
    }

    /// # Safety
    ///
    /// Only for devlink: `devlink` must have been made by [`Self::register`], and `context` be valid.
    unsafe extern "C" fn get_callback(
        devlink: *mut bindings::devlink,
        _id: u32,
        context: *mut bindings::devlink_param_gset_ctx,
        _extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not freed while it is called.
        let value = unsafe { Self::of_instance(devlink) }.get();
        // SAFETY: The caller vouches for the context, of which nobody else makes use meanwhile.
        unsafe { put_text(context, value) };
        0
    }

    /// # Safety
    ///
    /// Only for devlink: `context` must be valid.
    unsafe extern "C" fn get_default_callback(
        _devlink: *mut bindings::devlink,
        _id: u32,
        context: *mut bindings::devlink_param_gset_ctx,
        _extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the context, of which nobody else makes use meanwhile.
        unsafe { put_text(context, H::default_value()) };
        0
    }

    /// # Safety
    ///
    /// Only for devlink: `devlink` must have been made by [`Self::register`], and `extack` be null or valid.
    unsafe extern "C" fn reset_default_callback(
        devlink: *mut bindings::devlink,
        _id: u32,
        _cmode: bindings::devlink_param_cmode,
        extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not freed while it is called.
        let this = unsafe { Self::of_instance(devlink) };
        match H::set(this, H::default_value()) {
            Ok(()) => 0,
            // SAFETY: The caller vouches for `extack`.
            Err(refusal) => unsafe { refusal.tell(extack) },
        }
    }

    /// # Safety
    ///
    /// Only for devlink: `devlink` must have been made by [`Self::register`], `context` be valid, and `extack` be
    /// null or valid.
    unsafe extern "C" fn set_callback(
        devlink: *mut bindings::devlink,
        _id: u32,
        context: *mut bindings::devlink_param_gset_ctx,
        extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the instance, which is not freed while it is called.
        let this = unsafe { Self::of_instance(devlink) };
        // SAFETY: The caller vouches for the context, which nobody changes meanwhile. A value has room for a text, at
        // its beginning, which is any bytes.
        let text = unsafe { &*(&raw const (*context).val).cast::<Text>() };
        let Ok(value) = CStr::from_bytes_until_nul(text) else {
            // devlink takes none that has no end (`devlink_param_value_get_from_info`).
            return EINVAL.to_errno();
        };
        match H::set(this, value) {
            Ok(()) => 0,
            // SAFETY: The caller vouches for `extack`.
            Err(refusal) => unsafe { refusal.tell(extack) },
        }
    }

    /// # Safety
    ///
    /// Only for devlink: `reporter` must have been made by [`Self::register`], and `fmsg` be a message that
    /// nobody else writes.
    unsafe extern "C" fn diagnose_callback(
        reporter: *mut bindings::devlink_health_reporter,
        fmsg: *mut bindings::devlink_fmsg,
        _extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the reporter, which is not destroyed while it is called.
        let health = unsafe { Self::health(reporter) };
        let write = |diagnosis: &mut Object<'_>| {
            health.diagnose(diagnosis);
            Ok(())
        };
        // SAFETY: The caller vouches for the message, as long as this is called.
        from_result(|| unsafe { Message::write(fmsg, write) }.map(|()| 0))
    }

    /// # Safety
    ///
    /// Only for devlink: `reporter` must have been made by [`Self::register`], and `fmsg` be a message that
    /// nobody else writes; `context` must be null unless this is called by [`Self::report`].
    unsafe extern "C" fn dump_callback(
        reporter: *mut bindings::devlink_health_reporter,
        fmsg: *mut bindings::devlink_fmsg,
        context: *mut c_void,
        _extack: *mut bindings::netlink_ext_ack,
    ) -> c_int {
        // SAFETY: The caller vouches for the reporter, which is not destroyed while it is called.
        let health = unsafe { Self::health(reporter) };
        let occasion = if context.is_null() {
            Occasion::Demand
        } else {
            Occasion::Failure
        };
        let write = |dump: &mut Object<'_>| health.dump(occasion, dump);
        // SAFETY: The caller vouches for the message, as long as this is called.
        from_result(|| unsafe { Message::write(fmsg, write) }.map(|()| 0))
    }
}

impl<H: HealthReporter + Parameter + Information> Drop for Devlink<H> {
    fn drop(&mut self) {
        let devlink = self.devlink.as_ptr();
        // SAFETY: By the type invariants the instance is registered and ours. This takes the lock with which callbacks
        // run.
        unsafe { bindings::devlink_unregister(devlink) };
        // SAFETY: By the type invariants it has that parameter.
        unsafe { bindings::devlink_params_unregister(devlink, Self::PARAMETER, 1) };
        // SAFETY: By the type invariants it is a reporter of the instance. It is not used afterwards.
        unsafe { bindings::devlink_health_reporter_destroy(self.reporter.as_ptr()) };
        // SAFETY: By the type invariants the instance is ours. It was unregistered above, and is not used afterwards.
        unsafe { bindings::devlink_free(devlink) };
    }
}

#[cfg(not(rdma_no_tests))]
#[kernel::prelude::kunit_tests(rust_devlink)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_devlink_would_cut_without_its_end_is_refused() -> Result {
        let longest = CString::try_from_fmt(fmt!("{:>65534}", ""))?;
        assert!(short_text(&longest).is_ok_and(|text| text == longest.as_char_ptr()));
        let longer = CString::try_from_fmt(fmt!("{:>65535}", ""))?;
        assert_eq!(short_text(&longer).err(), Some(EMSGSIZE));
        Ok(())
    }

    #[test]
    fn the_first_thing_that_goes_wrong_is_what_is_told() {
        let result = FirstError::new();
        assert_eq!(result.get(), Ok(()));
        result.note(EMSGSIZE);
        result.note(ENOMEM);
        assert_eq!(result.get(), Err(EMSGSIZE));
    }
}
