// SPDX-License-Identifier: GPL-2.0

//! Rights of access, as the core and as the device know them.

use crate::{
    abi,
    extension,
    kernel_ext::errno,
    rdma::Access, //
};
use kernel::prelude::*;

/// The rights of a region that the device knows, out of what a consumer asked for.
pub(super) fn device_access(access: Access, features: u64) -> Result<u32> {
    if access.contains(Access::ON_DEMAND) {
        return Err(errno::eopnotsupp());
    }
    region_rights(access, features)
}

/// The same, whether or not pages come and go.
pub(super) fn region_rights(access: Access, features: u64) -> Result<u32> {
    let given = effective(access, features);
    // Flushes are refused as the core does, which does not see all registrations. Atomics are not: the
    // core lets their right pass whatever the device can do, and programs that register memory for any
    // use ask for it. That there are none is for the attributes of the device to say.
    if access.without(given).intersects(FLUSHES) {
        return Err(errno::eopnotsupp());
    }
    Ok(device_rights(given))
}

/// The same of a registration by work request, which may be for one message only.
pub(super) fn registered_access(access: Access, features: u64) -> Result<u32> {
    let rights = device_access(access, features)?;
    if !access.contains(extension::ONE_TOUCH_ACCESS) {
        return Ok(rights);
    }
    if features & abi::FEATURE_ONE_TOUCH == 0 {
        return Err(errno::eopnotsupp());
    }
    Ok(rights | abi::ACCESS_ONE_TOUCH)
}

/// Rights to flush.
const FLUSHES: Access =
    Access::from_raw(Access::FLUSH_GLOBAL.as_raw() | Access::FLUSH_PERSISTENT.as_raw());

/// Rights without those to do what a device with such features cannot, and would refuse.
pub(crate) fn effective(access: Access, features: u64) -> Access {
    let mut absent = Access::FLUSH_PERSISTENT;
    if features & abi::FEATURE_ATOMICS == 0 {
        absent = absent | Access::REMOTE_ATOMIC;
    }
    if features & abi::FEATURE_FLUSH == 0 {
        absent = absent | Access::FLUSH_GLOBAL;
    }
    access.without(absent)
}

/// Rights as the device says them.
pub(crate) fn device_rights(access: Access) -> u32 {
    let rights = [
        (Access::LOCAL_WRITE, abi::ACCESS_LOCAL_WRITE),
        (Access::REMOTE_WRITE, abi::ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, abi::ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, abi::ACCESS_REMOTE_ATOMIC),
        (Access::MW_BIND, abi::ACCESS_WINDOW_BIND),
        (Access::ZERO_BASED, abi::ACCESS_ZERO_BASED),
        (Access::FLUSH_GLOBAL, abi::ACCESS_FLUSH_GLOBAL),
    ];
    rights
        .iter()
        .filter(|(asked, _)| access.contains(*asked))
        .fold(0, |rights, (_, right)| rights | right)
}
