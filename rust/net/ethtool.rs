// SPDX-License-Identifier: GPL-2.0

//! What `ethtool` shows of a device.
//!
//! C header: [`include/linux/ethtool.h`](srctree/include/linux/ethtool.h)

use super::{Device, Driver, Ops};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use kernel::error::from_result;
use kernel::prelude::*;

/// A driver that `ethtool` can ask.
pub trait EthtoolOps: Driver {
    /// The driver's name.
    const NAME: &'static str;

    /// How many numbers [`Self::ethtool_statistics`] gives.
    const STATISTICS: usize;

    /// The version of the firmware, or of what there is in place of it, and where the device is.
    fn driver_info(_dev: &Device<Self>) -> DriverInfo {
        DriverInfo::default()
    }

    /// Names them, in their order.
    fn ethtool_names(names: &mut StatisticsNames<'_>);

    /// What was counted; there are [`Self::STATISTICS`] values. RTNL is held; may sleep.
    fn ethtool_statistics(dev: &Device<Self>, values: &mut [u64]);

    /// What the link is like.
    fn link_settings(_dev: &Device<Self>) -> Result<LinkSettings> {
        Err(eopnotsupp())
    }

    /// Frames of up to how many bytes are copied rather than mapped (`tx-copybreak`).
    fn tx_copybreak(_dev: &Device<Self>) -> Result<u32> {
        Err(eopnotsupp())
    }

    /// Changes that.
    fn set_tx_copybreak(_dev: &Device<Self>, _bytes: u32) -> Result {
        Err(eopnotsupp())
    }
}

/// See [`EthtoolOps::driver_info`]. Longer texts than 31 bytes are cut.
#[derive(Clone, Copy, Default)]
pub struct DriverInfo {
    /// The version of the firmware.
    pub firmware: &'static str,
    /// Where the device is.
    pub bus: &'static str,
}

/// What a link is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkSettings {
    /// In Mbit/s; `None` if it is not known.
    pub speed: Option<u32>,
    /// Whether it is used in both directions at a time.
    pub full_duplex: bool,
}

impl LinkSettings {
    pub(super) fn from_raw(raw: &bindings::ethtool_link_ksettings) -> Self {
        let speed = raw.base.speed;
        Self {
            speed: (speed != bindings::SPEED_UNKNOWN as u32 && speed != 0).then_some(speed),
            full_duplex: u32::from(raw.base.duplex) == bindings::DUPLEX_FULL,
        }
    }
}

impl<D: EthtoolOps> Ops<D> {
    /// Has `ethtool` told what the driver says.
    pub const fn with_ethtool(mut self) -> Self {
        self.ethtool.get_drvinfo = Some(get_drvinfo::<D>);
        self.ethtool.get_link = Some(bindings::ethtool_op_get_link);
        self.ethtool.get_sset_count = Some(get_sset_count::<D>);
        self.ethtool.get_strings = Some(get_strings::<D>);
        self.ethtool.get_ethtool_stats = Some(get_ethtool_stats::<D>);
        self.ethtool.get_link_ksettings = Some(get_link_ksettings::<D>);
        self.ethtool.get_tunable = Some(get_tunable::<D>);
        self.ethtool.set_tunable = Some(set_tunable::<D>);
        self
    }
}

const NAME_LENGTH: usize = bindings::ETH_GSTRING_LEN as usize;

/// Room for the names of statistics.
pub struct StatisticsNames<'a> {
    rest: &'a mut [[c_char; NAME_LENGTH]],
}

impl StatisticsNames<'_> {
    /// Names the next number; the name is that of all parts, cut to 31 bytes. Without effect where all have one.
    pub fn push(&mut self, parts: &[&str]) {
        let Some((name, rest)) = core::mem::take(&mut self.rest).split_first_mut() else {
            return;
        };
        let bytes = parts.iter().flat_map(|part| part.bytes());
        for (to, from) in name[..NAME_LENGTH - 1].iter_mut().zip(bytes) {
            *to = from as c_char;
        }
        self.rest = rest;
    }
}

/// Writes a text to a field that is all zeroes; the last byte stays.
fn write_text<const N: usize>(text: &str, field: &mut [c_char; N]) {
    for (to, from) in field[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

// All of these: the core calls them with a device of the table's driver that is registered, and stays until they
// return.

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with information to be filled in.
unsafe extern "C" fn get_drvinfo<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    info: *mut bindings::ethtool_drvinfo,
) {
    // SAFETY: The caller vouches for both.
    let (device, info) = unsafe { (Device::<D>::from_raw(dev), &mut *info) };
    let said = D::driver_info(device);
    info.driver = [0; 32];
    write_text(D::NAME, &mut info.driver);
    write_text(said.firmware, &mut info.fw_version);
    write_text(said.bus, &mut info.bus_info);
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`.
unsafe extern "C" fn get_sset_count<D: EthtoolOps>(
    _dev: *mut bindings::net_device,
    set: c_int,
) -> c_int {
    if set as u32 == bindings::ethtool_stringset_ETH_SS_STATS {
        D::STATISTICS as c_int
    } else {
        eopnotsupp().to_errno()
    }
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with room for as many names as `get_sset_count` says.
unsafe extern "C" fn get_strings<D: EthtoolOps>(
    _dev: *mut bindings::net_device,
    set: u32,
    names: *mut u8,
) {
    if set != bindings::ethtool_stringset_ETH_SS_STATS {
        return;
    }
    // SAFETY: The caller vouches for the room; any bytes are characters.
    let names = unsafe {
        core::slice::from_raw_parts_mut(names.cast::<[c_char; NAME_LENGTH]>(), D::STATISTICS)
    };
    names.fill([0; NAME_LENGTH]);
    D::ethtool_names(&mut StatisticsNames { rest: names });
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with room for `n_stats` values.
unsafe extern "C" fn get_ethtool_stats<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    stats: *mut bindings::ethtool_stats,
    values: *mut u64,
) {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    let count = D::STATISTICS;
    // SAFETY: The caller vouches for what it says of the room.
    if unsafe { (*stats).n_stats } as usize != count {
        return;
    }
    // SAFETY: There is room for so many, which the core has zeroed.
    let values = unsafe { core::slice::from_raw_parts_mut(values, count) };
    D::ethtool_statistics(device, values);
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with settings to be filled in, which are zeroed.
unsafe extern "C" fn get_link_ksettings<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    settings: *mut bindings::ethtool_link_ksettings,
) -> c_int {
    // SAFETY: The caller vouches for both.
    let (device, settings) = unsafe { (Device::<D>::from_raw(dev), &mut *settings) };
    from_result(|| {
        let said = D::link_settings(device)?;
        settings.base.speed = said.speed.unwrap_or(bindings::SPEED_UNKNOWN as u32);
        settings.base.duplex = match (said.speed, said.full_duplex) {
            (_, true) => bindings::DUPLEX_FULL,
            (None, false) => bindings::DUPLEX_UNKNOWN,
            (Some(_), false) => bindings::DUPLEX_HALF,
        } as u8;
        settings.base.port = bindings::PORT_OTHER as u8;
        settings.base.autoneg = bindings::AUTONEG_DISABLE as u8;
        Ok(0)
    })
}

/// Whether it is that of [`EthtoolOps::tx_copybreak`], the only one there is.
///
/// # Safety
///
/// `tunable` must be valid.
unsafe fn is_tx_copybreak(tunable: *const bindings::ethtool_tunable) -> bool {
    // SAFETY: The caller vouches for it.
    let (id, kind, len) = unsafe { ((*tunable).id, (*tunable).type_id, (*tunable).len) };
    id == bindings::tunable_id_ETHTOOL_TX_COPYBREAK
        && kind == bindings::tunable_type_id_ETHTOOL_TUNABLE_U32
        && len as usize == size_of::<u32>()
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with room for a value of that kind.
unsafe extern "C" fn get_tunable<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    tunable: *const bindings::ethtool_tunable,
    value: *mut c_void,
) -> c_int {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    from_result(|| {
        // SAFETY: The caller vouches for it.
        if !unsafe { is_tx_copybreak(tunable) } {
            return Err(eopnotsupp());
        }
        let bytes = D::tx_copybreak(device)?;
        // SAFETY: The caller vouches for the room, which for this kind is that of a `u32`.
        unsafe { value.cast::<u32>().write_unaligned(bytes) };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core as an operation of a device of `D`, with a value of that kind.
unsafe extern "C" fn set_tunable<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    tunable: *const bindings::ethtool_tunable,
    value: *const c_void,
) -> c_int {
    // SAFETY: The caller vouches for the device.
    let device = unsafe { Device::<D>::from_raw(dev) };
    from_result(|| {
        // SAFETY: The caller vouches for it.
        if !unsafe { is_tx_copybreak(tunable) } {
            return Err(eopnotsupp());
        }
        // SAFETY: The caller vouches for the value, which for this kind is a `u32`.
        let bytes = unsafe { value.cast::<u32>().read_unaligned() };
        D::set_tx_copybreak(device, bytes).map(|()| 0)
    })
}
