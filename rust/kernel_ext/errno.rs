// SPDX-License-Identifier: GPL-2.0

//! Error codes that `kernel::error::code` does not declare yet.

use crate::bindings;
use kernel::prelude::*;

macro_rules! errno {
    ($($(#[$doc:meta])* $name:ident = $code:ident;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name() -> Error {
            Error::from_errno(-(bindings::$code as c_int))
        }
    )*};
}

errno! {
    /// Operation not supported on this object (`EOPNOTSUPP`).
    eopnotsupp = EOPNOTSUPP;
    /// No buffer space available (`ENOBUFS`).
    enobufs = ENOBUFS;
    /// The device was removed or does not answer any more (`ENOTCONN`).
    enotconn = ENOTCONN;
    /// No route to host (`EHOSTUNREACH`).
    ehostunreach = EHOSTUNREACH;
    /// Quota exceeded (`EDQUOT`).
    edquot = EDQUOT;
    /// Software caused connection abort (`ECONNABORTED`).
    econnaborted = ECONNABORTED;
    /// Connection refused (`ECONNREFUSED`).
    econnrefused = ECONNREFUSED;
    /// Message too long (`EMSGSIZE`).
    emsgsize = EMSGSIZE;
}
