// SPDX-License-Identifier: GPL-2.0

//! Address handles: where datagrams go.
//!
//! The device has no object for them; a datagram carries its path in the work request.

use crate::{
    abi,
    abi::{
        DatagramPart,
        Path, //
    },
    device::Ferrite,
    kernel_ext::errno,
    rdma::{
        kind,
        Ah,
        AhAttr,
        Datagram,
        New,
        Pd, //
    },
};
use kernel::prelude::*;

/// The driver's data of an address handle.
pub(crate) struct FerriteAh {
    path: Path,
}

impl FerriteAh {
    /// Makes an address handle. Does not sleep unless it is `sleepable`.
    pub(crate) fn create<'a>(
        pd: &Pd<Ferrite>,
        new: New<'a, kind::Ah, Ferrite>,
        attr: &AhAttr,
        sleepable: bool,
    ) -> Result<&'a Ah<Ferrite>> {
        if !pd.device().has(abi::FEATURE_DATAGRAM) {
            return Err(errno::eopnotsupp());
        }
        let path = device_path(attr)?;
        // Datagrams are posted without regard to what the device was told.
        pd.device().gids.settle(path.source_gid_index, sleepable)?;
        new.init(Ok::<_, Error>(Self { path }))
    }

    /// What a work request says of where it goes.
    pub(crate) fn part(to: &Datagram<'_, Ferrite>) -> Result<DatagramPart> {
        if to.remote_qpn > abi::QUEUE_NUMBER_MASK {
            return Err(EINVAL);
        }
        Ok(DatagramPart {
            path: to.ah.path,
            qpn: to.remote_qpn,
            // With its top bit set the device takes that of the queue pair.
            qkey: to.remote_qkey,
        })
    }
}

/// The device's form of a path.
pub(crate) fn device_path(address: &AhAttr) -> Result<Path> {
    if !address.is_roce() {
        return Err(EINVAL);
    }
    let path = address.path();
    let (vlan, _) = address.sgid().ok_or(EINVAL)?.l2()?;
    Ok(Path {
        mac: path.dmac,
        // The service level is the priority of a tagged frame.
        vlan: vlan.map_or(abi::VLAN_NONE, |vlan| vlan | u16::from(path.sl & 7) << 13),
        gid: path.dgid.0,
        source_gid_index: path.sgid_index.into(),
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label & 0xf_ffff,
        udp_source_port: 0,
        reserved: [0; 3],
    })
}
