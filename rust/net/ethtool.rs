// SPDX-License-Identifier: GPL-2.0

//! What `ethtool` shows of a device.
//!
//! C header: [`include/linux/ethtool.h`](srctree/include/linux/ethtool.h)

use super::{Device, Driver, Ops, Rtnl};
use crate::bindings;
use crate::kernel_ext::errno::eopnotsupp;
use kernel::error::from_result;
use kernel::prelude::*;

/// A driver that `ethtool` can ask.
pub trait EthtoolOps: Driver {
    /// The driver's name.
    const NAME: &'static str;

    /// How many numbers [`Self::ethtool_statistics`] gives. Of one device it is asked once, and that counts.
    fn ethtool_count(dev: &Device<Self>, rtnl: &Rtnl) -> usize;

    /// The version of the firmware, or of what there is in place of it, and where the device is.
    fn driver_info(_dev: &Device<Self>, _rtnl: &Rtnl) -> DriverInfo {
        DriverInfo::default()
    }

    /// Names them, in their order.
    fn ethtool_names(dev: &Device<Self>, rtnl: &Rtnl, names: &mut StatisticsNames<'_>);

    /// What was counted; there are [`Self::ethtool_count`] values. May sleep.
    fn ethtool_statistics(dev: &Device<Self>, rtnl: &Rtnl, values: &mut [u64]);

    /// What the link is like.
    fn link_settings(_dev: &Device<Self>, _rtnl: &Rtnl) -> Result<LinkSettings> {
        Err(eopnotsupp())
    }

    /// Frames of up to how many bytes are copied rather than mapped (`tx-copybreak`).
    fn tx_copybreak(_dev: &Device<Self>, _rtnl: &Rtnl) -> Result<u32> {
        Err(eopnotsupp())
    }

    /// Changes that.
    fn set_tx_copybreak(_dev: &Device<Self>, _rtnl: &Rtnl, _bytes: u32) -> Result {
        Err(eopnotsupp())
    }
}

/// See [`EthtoolOps::driver_info`]. Longer texts than 31 bytes are cut.
#[derive(Clone, Copy, Default)]
pub struct DriverInfo {
    /// The version of the firmware.
    pub firmware: &'static str,
    /// The same in numbers, where it is known in no other way.
    pub version: Option<[u16; 3]>,
    /// Where the device is. Empty: where its parent is.
    pub bus: &'static str,
}

/// The sizes of rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingSizes {
    /// Entries of those that frames are received by.
    pub rx: u32,
    /// Entries of those that frames are sent by.
    pub tx: u32,
}

/// A device with rings whose sizes can be changed (`ethtool -g`, `-G`).
pub trait RingOps: Driver {
    /// The sizes now, and the largest that there are.
    fn ring_sizes(dev: &Device<Self>, rtnl: &Rtnl) -> (RingSizes, RingSizes);

    /// Others, which are not larger than the largest. May sleep.
    fn set_ring_sizes(dev: &Device<Self>, rtnl: &Rtnl, sizes: RingSizes) -> Result;
}

/// How interrupts are put off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coalescing {
    /// For up to so many microseconds.
    pub microseconds: u32,
    /// But not where so many frames have arrived; zero: however many.
    pub frames: u32,
}

/// A device that puts interrupts off (`ethtool -c`, `-C`).
pub trait CoalesceOps: Driver {
    /// How it does now. May sleep.
    fn coalescing(dev: &Device<Self>, rtnl: &Rtnl) -> Result<Coalescing>;

    /// Has it do so. May sleep.
    fn set_coalescing(dev: &Device<Self>, rtnl: &Rtnl, coalescing: Coalescing) -> Result;
}

/// A device whose number of queues can be changed (`ethtool -l`, `-L`), each of which both sends and receives.
pub trait ChannelsOps: Driver {
    /// The most that there can be.
    fn most_channels(dev: &Device<Self>, rtnl: &Rtnl) -> u16;

    /// Another number, from one to that. May sleep.
    fn set_channels(dev: &Device<Self>, rtnl: &Rtnl, channels: u16) -> Result;
}

/// A device that spreads what it receives over its queues by a hash, of Toeplitz (`ethtool -x`, `-X`).
pub trait RssOps: Driver {
    /// Bytes of the key.
    const KEY: usize;

    /// Entries of the table. Of one device it is asked once, and that counts.
    fn rss_entries(dev: &Device<Self>, rtnl: &Rtnl) -> usize;

    /// Writes the table, the number of a queue for each value of the hash, and the key. May sleep.
    fn rss(dev: &Device<Self>, rtnl: &Rtnl, table: Option<&mut [u32]>, key: Option<&mut [u8]>);

    /// Sets those of them that are there; all entries of the table are numbers of queues that it receives by. RTNL is
    /// held; may sleep.
    fn set_rss(
        dev: &Device<Self>,
        rtnl: &Rtnl,
        table: Option<&[u32]>,
        key: Option<&[u8]>,
    ) -> Result;
}

/// Fills a key for [`RssOps`] with random bytes, the same for all devices of the machine. The core has so many; of a
/// longer key they are repeated.
pub fn fill_rss_key(key: &mut [u8]) {
    for part in key.chunks_mut(bindings::NETDEV_RSS_KEY_LEN as usize) {
        // SAFETY: There is room for so many bytes, which are no more than the core has.
        unsafe { bindings::netdev_rss_key_fill(part.as_mut_ptr().cast(), part.len()) };
    }
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
        // Of what `Skb::tx_timestamp` notes.
        self.ethtool.get_ts_info = Some(bindings::ethtool_op_get_ts_info);
        self.ethtool.get_sset_count = Some(get_sset_count::<D>);
        self.ethtool.get_strings = Some(get_strings::<D>);
        self.ethtool.get_ethtool_stats = Some(get_ethtool_stats::<D>);
        self.ethtool.get_link_ksettings = Some(get_link_ksettings::<D>);
        self.ethtool.get_tunable = Some(get_tunable::<D>);
        self.ethtool.set_tunable = Some(set_tunable::<D>);
        self
    }
}

impl<D: RingOps> Ops<D> {
    /// Has `ethtool` show and change the sizes of rings.
    pub const fn with_rings(mut self) -> Self {
        self.ethtool.get_ringparam = Some(get_ringparam::<D>);
        self.ethtool.set_ringparam = Some(set_ringparam::<D>);
        self
    }
}

/// `ETHTOOL_COALESCE_RX_USECS` and `ETHTOOL_COALESCE_RX_MAX_FRAMES`, which are made by a macro in C.
const COALESCE_RX: u32 = 1 << 0 | 1 << 1;

impl<D: CoalesceOps> Ops<D> {
    /// Has `ethtool` show and change how interrupts are put off.
    pub const fn with_coalescing(mut self) -> Self {
        self.ethtool.supported_coalesce_params = COALESCE_RX;
        self.ethtool.get_coalesce = Some(get_coalesce::<D>);
        self.ethtool.set_coalesce = Some(set_coalesce::<D>);
        self
    }
}

impl<D: ChannelsOps> Ops<D> {
    /// Has `ethtool` show and change the number of queues.
    pub const fn with_channels(mut self) -> Self {
        self.ethtool.get_channels = Some(get_channels::<D>);
        self.ethtool.set_channels = Some(set_channels::<D>);
        self
    }
}

impl<D: RssOps> Device<D> {
    /// Says that the device has no place for the table that a user chose, and another one is there now: by `ethtool`'s
    /// notification and in the log. By who holds no lock that [`RssOps::rss`] takes.
    pub fn table_is_lost(&self, _rtnl: &Rtnl) {
        // SAFETY: The reference keeps the device, which has operations for `ethtool`, these among them; RTNL is held.
        unsafe { bindings::ethtool_rxfh_indir_lost(self.as_raw()) }
    }
}

impl<D: RssOps> Ops<D> {
    /// Has `ethtool` show and change how what is received is spread.
    pub const fn with_rss(mut self) -> Self {
        self.ethtool.get_rx_ring_count = Some(get_rx_ring_count::<D>);
        self.ethtool.get_rxfh_key_size = Some(get_rxfh_key_size::<D>);
        self.ethtool.get_rxfh_indir_size = Some(get_rxfh_indir_size::<D>);
        self.ethtool.get_rxfh = Some(get_rxfh::<D>);
        self.ethtool.set_rxfh = Some(set_rxfh::<D>);
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
// return; and with RTNL held.

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with information to be filled in.
unsafe extern "C" fn get_drvinfo<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    info: *mut bindings::ethtool_drvinfo,
) {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the information.
    let info = unsafe { &mut *info };
    let said = D::driver_info(device, &rtnl);
    info.driver = [0; 32];
    write_text(D::NAME, &mut info.driver);
    write_text(said.firmware, &mut info.fw_version);
    if let Some([major, minor, patch]) = said.version {
        // SAFETY: There is room for as many bytes as are written; the format takes three numbers of that type.
        unsafe {
            bindings::snprintf(
                info.fw_version.as_mut_ptr(),
                info.fw_version.len(),
                c"%u.%u.%u".as_char_ptr(),
                c_uint::from(major),
                c_uint::from(minor),
                c_uint::from(patch),
            );
        }
    }
    write_text(said.bus, &mut info.bus_info);
}

fn ethtool_count<D: EthtoolOps>(device: &Device<D>, rtnl: &Rtnl) -> u32 {
    device
        .private()
        .ethtool_count
        .get(|| D::ethtool_count(device, rtnl))
}

fn rss_entries<D: RssOps>(device: &Device<D>, rtnl: &Rtnl) -> u32 {
    device
        .private()
        .rss_entries
        .get(|| D::rss_entries(device, rtnl))
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`.
unsafe extern "C" fn get_sset_count<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    set: c_int,
) -> c_int {
    if set as u32 == bindings::ethtool_stringset_ETH_SS_STATS {
        // SAFETY: The caller vouches for the device, and that RTNL is held.
        let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
        ethtool_count(device, &rtnl) as c_int
    } else {
        eopnotsupp().to_errno()
    }
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with room for as many names as
/// `get_sset_count` says.
unsafe extern "C" fn get_strings<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    set: u32,
    names: *mut u8,
) {
    if set != bindings::ethtool_stringset_ETH_SS_STATS {
        return;
    }
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    let count = ethtool_count(device, &rtnl) as usize;
    // SAFETY: The caller vouches for the room, as the count is what it was told; any bytes are characters.
    let names =
        unsafe { core::slice::from_raw_parts_mut(names.cast::<[c_char; NAME_LENGTH]>(), count) };
    names.fill([0; NAME_LENGTH]);
    D::ethtool_names(device, &rtnl, &mut StatisticsNames { rest: names });
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with room for `n_stats` values.
unsafe extern "C" fn get_ethtool_stats<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    stats: *mut bindings::ethtool_stats,
    values: *mut u64,
) {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    let count = ethtool_count(device, &rtnl) as usize;
    // SAFETY: The caller vouches for what it says of the room.
    if unsafe { (*stats).n_stats } as usize != count {
        return;
    }
    // SAFETY: There is room for so many, which the core has zeroed.
    let values = unsafe { core::slice::from_raw_parts_mut(values, count) };
    D::ethtool_statistics(device, &rtnl, values);
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with settings to be filled in, which
/// are zeroed.
unsafe extern "C" fn get_link_ksettings<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    settings: *mut bindings::ethtool_link_ksettings,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the settings.
    let settings = unsafe { &mut *settings };
    from_result(|| {
        let said = D::link_settings(device, &rtnl)?;
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
    // SAFETY: The caller vouches for `tunable`, of which three fields are copied.
    let (id, kind, len) = unsafe { ((*tunable).id, (*tunable).type_id, (*tunable).len) };
    id == bindings::tunable_id_ETHTOOL_TX_COPYBREAK
        && kind == bindings::tunable_type_id_ETHTOOL_TUNABLE_U32
        && len as usize == size_of::<u32>()
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with room for a value of that kind.
unsafe extern "C" fn get_tunable<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    tunable: *const bindings::ethtool_tunable,
    value: *mut c_void,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| {
        // SAFETY: The core gives operations a tunable that is valid while they run.
        if !unsafe { is_tx_copybreak(tunable) } {
            return Err(eopnotsupp());
        }
        let bytes = D::tx_copybreak(device, &rtnl)?;
        // SAFETY: The caller vouches for the room, which for this kind is that of a `u32`.
        unsafe { value.cast::<u32>().write_unaligned(bytes) };
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with a value of that kind.
unsafe extern "C" fn set_tunable<D: EthtoolOps>(
    dev: *mut bindings::net_device,
    tunable: *const bindings::ethtool_tunable,
    value: *const c_void,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    from_result(|| {
        // SAFETY: The core gives operations a tunable that is valid while they run.
        if !unsafe { is_tx_copybreak(tunable) } {
            return Err(eopnotsupp());
        }
        // SAFETY: The caller vouches for the value, which for this kind is a `u32`.
        let bytes = unsafe { value.cast::<u32>().read_unaligned() };
        D::set_tx_copybreak(device, &rtnl, bytes).map(|()| 0)
    })
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with parameters to be filled in.
unsafe extern "C" fn get_ringparam<D: RingOps>(
    dev: *mut bindings::net_device,
    param: *mut bindings::ethtool_ringparam,
    _kernel: *mut bindings::kernel_ethtool_ringparam,
    _extack: *mut bindings::netlink_ext_ack,
) {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let param = unsafe { &mut *param };
    let (now, most) = D::ring_sizes(device, &rtnl);
    param.rx_max_pending = most.rx;
    param.tx_max_pending = most.tx;
    param.rx_pending = now.rx;
    param.tx_pending = now.tx;
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with parameters within the limits
/// that
/// [`get_ringparam`] gives.
unsafe extern "C" fn set_ringparam<D: RingOps>(
    dev: *mut bindings::net_device,
    param: *mut bindings::ethtool_ringparam,
    _kernel: *mut bindings::kernel_ethtool_ringparam,
    _extack: *mut bindings::netlink_ext_ack,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let param = unsafe { &*param };
    let sizes = RingSizes {
        rx: param.rx_pending,
        tx: param.tx_pending,
    };
    from_result(|| D::set_ring_sizes(device, &rtnl, sizes).map(|()| 0))
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with parameters to be filled in.
unsafe extern "C" fn get_coalesce<D: CoalesceOps>(
    dev: *mut bindings::net_device,
    coalesce: *mut bindings::ethtool_coalesce,
    _kernel: *mut bindings::kernel_ethtool_coalesce,
    _extack: *mut bindings::netlink_ext_ack,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let coalesce = unsafe { &mut *coalesce };
    from_result(|| {
        let said = D::coalescing(device, &rtnl)?;
        coalesce.rx_coalesce_usecs = said.microseconds;
        coalesce.rx_max_coalesced_frames = said.frames;
        Ok(0)
    })
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`.
unsafe extern "C" fn set_coalesce<D: CoalesceOps>(
    dev: *mut bindings::net_device,
    coalesce: *mut bindings::ethtool_coalesce,
    _kernel: *mut bindings::kernel_ethtool_coalesce,
    _extack: *mut bindings::netlink_ext_ack,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let coalesce = unsafe { &*coalesce };
    let wanted = Coalescing {
        microseconds: coalesce.rx_coalesce_usecs,
        frames: coalesce.rx_max_coalesced_frames,
    };
    from_result(|| D::set_coalescing(device, &rtnl, wanted).map(|()| 0))
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with numbers to be filled in.
unsafe extern "C" fn get_channels<D: ChannelsOps>(
    dev: *mut bindings::net_device,
    channels: *mut bindings::ethtool_channels,
) {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the numbers.
    let channels = unsafe { &mut *channels };
    channels.max_combined = D::most_channels(device, &rtnl).into();
    channels.combined_count = device.tx_queues().into();
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with numbers within the limits that
/// [`get_channels`] gives.
unsafe extern "C" fn set_channels<D: ChannelsOps>(
    dev: *mut bindings::net_device,
    channels: *mut bindings::ethtool_channels,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the numbers.
    let channels = unsafe { &*channels };
    from_result(|| {
        let count = u16::try_from(channels.combined_count).map_err(|_| EINVAL)?;
        if count == 0 || count > D::most_channels(device, &rtnl) {
            return Err(EINVAL);
        }
        D::set_channels(device, &rtnl, count).map(|()| 0)
    })
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`.
unsafe extern "C" fn get_rx_ring_count<D: RssOps>(dev: *mut bindings::net_device) -> u32 {
    // SAFETY: The caller vouches for the device.
    unsafe { Device::<D>::from_raw(dev) }.tx_queues().into()
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`.
unsafe extern "C" fn get_rxfh_key_size<D: RssOps>(_dev: *mut bindings::net_device) -> u32 {
    D::KEY as u32
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`.
unsafe extern "C" fn get_rxfh_indir_size<D: RssOps>(dev: *mut bindings::net_device) -> u32 {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    rss_entries(device, &rtnl)
}

/// `ETH_RSS_HASH_TOP`, which is made by a macro in C.
const HASH_TOEPLITZ: u8 = 1 << bindings::ETH_RSS_HASH_TOP_BIT;

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with room for as many entries and
/// bytes as it was told that there are, or none.
unsafe extern "C" fn get_rxfh<D: RssOps>(
    dev: *mut bindings::net_device,
    param: *mut bindings::ethtool_rxfh_param,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let param = unsafe { &mut *param };
    param.hfunc = HASH_TOEPLITZ;
    let table = (!param.indir.is_null()).then(|| {
        let entries = rss_entries(device, &rtnl) as usize;
        // SAFETY: The caller vouches for the room, which is for as many entries as it was told that there are.
        unsafe { core::slice::from_raw_parts_mut(param.indir, entries) }
    });
    let key = (!param.key.is_null()).then(|| {
        // SAFETY: The caller vouches for the room, which is for as many bytes as there are.
        unsafe { core::slice::from_raw_parts_mut(param.key, D::KEY) }
    });
    D::rss(device, &rtnl, table, key);
    0
}

/// # Safety
///
/// To be called by the core, with RTNL held, as an operation of a device of `D`, with as many entries and bytes as it
/// was told that there are, or none.
unsafe extern "C" fn set_rxfh<D: RssOps>(
    dev: *mut bindings::net_device,
    param: *mut bindings::ethtool_rxfh_param,
    _extack: *mut bindings::netlink_ext_ack,
) -> c_int {
    // SAFETY: The caller vouches for the device, and that RTNL is held.
    let (device, rtnl) = unsafe { Device::<D>::under_rtnl(dev) };
    // SAFETY: The caller vouches for the parameters.
    let param = unsafe { &*param };
    from_result(|| {
        // Zero: as it is.
        if param.hfunc != 0 && param.hfunc != HASH_TOEPLITZ {
            return Err(eopnotsupp());
        }
        let table = (!param.indir.is_null()).then(|| {
            let entries = rss_entries(device, &rtnl) as usize;
            // SAFETY: The caller vouches for as many entries as it was told that there are.
            unsafe { core::slice::from_raw_parts(param.indir, entries) }
        });
        let key = (!param.key.is_null()).then(|| {
            // SAFETY: The caller vouches for as many bytes as there are.
            unsafe { core::slice::from_raw_parts(param.key, D::KEY) }
        });
        D::set_rss(device, &rtnl, table, key).map(|()| 0)
    })
}
