// SPDX-License-Identifier: GPL-2.0

//! Address handles: where datagrams go.
//!
//! The device has no object for them; a datagram carries its address vector in the work request.

use crate::{
    abi,
    abi::{
        AddressVector,
        DatagramPart, //
    },
    device::Ferrite,
    kernel_ext::errno,
    port::{
        DEVICE_PORT,
        PORT, //
    },
    rdma::{
        kind,
        Ah,
        AhAttr,
        AhOps,
        New,
        Pd,
        UdWr,
        Udata, //
    },
};
use kernel::prelude::*;

/// The driver's data of an address handle.
pub(crate) struct FerriteAh {
    address_vector: AddressVector,
}

impl FerriteAh {
    /// What a work request says of where it goes, and the immediate data that it takes there.
    pub(crate) fn part(to: &UdWr<'_, Ferrite>, immediate: u32) -> Result<DatagramPart> {
        if to.remote_qpn > abi::QUEUE_NUMBER_MASK {
            return Err(EINVAL);
        }
        Ok(DatagramPart {
            address_vector: to.ah.address_vector,
            qpn: to.remote_qpn,
            // With its top bit set the device takes that of the queue pair.
            qkey: to.remote_qkey,
            immediate: immediate.into(),
            reserved: 0,
        })
    }
}

impl AhOps for Ferrite {
    type Ah = FerriteAh;

    /// Makes an address handle. Does not sleep unless it is `sleepable`.
    fn create_ah<'a>(
        pd: &Pd<Self>,
        new: New<'a, kind::Ah, Self>,
        attr: &AhAttr,
        sleepable: bool,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Ah<Self>> {
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        if !pd.device().has(abi::FEATURE_UD) {
            return Err(errno::eopnotsupp());
        }
        let address_vector = address_vector(attr)?;
        // Datagrams are posted without regard to what the device was told.
        let gid_index = address_vector.source_gid_index;
        pd.device().gids.settle(gid_index, sleepable)?;
        new.init(Ok::<_, Error>(FerriteAh { address_vector }))
    }

    fn destroy_ah(_ah: &Ah<Self>, _sleepable: bool) -> Result {
        Ok(())
    }
}

/// The device's form of an address: its address vector.
pub(crate) fn address_vector(address: &AhAttr) -> Result<AddressVector> {
    if !address.is_roce() {
        return Err(EINVAL);
    }
    let path = address.path();
    if path.port != PORT {
        return Err(EINVAL);
    }
    let (vlan, _) = address.sgid().ok_or(EINVAL)?.l2()?;
    Ok(AddressVector {
        mac: path.dmac,
        // The service level is the priority of a tagged frame.
        vlan: vlan.map_or(abi::VLAN_NONE, |vlan| vlan | u16::from(path.sl & 7) << 13),
        gid: path.dgid.0,
        source_gid_index: path.sgid_index.into(),
        hop_limit: path.hop_limit,
        traffic_class: path.traffic_class,
        flow_label: path.flow_label & 0xf_ffff,
        udp_source_port: 0,
        port: DEVICE_PORT,
        reserved_priority: 0,
        reserved: 0,
    })
}
