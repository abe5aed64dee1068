// SPDX-License-Identifier: GPL-2.0

//! The device's attributes and its port, which follows the network interface that it shares the
//! link with.

use crate::{
    abi,
    abi::{
        CommandOpcode,
        SetGid,
        SetPort, //
    },
    bindings,
    device::Ferrite,
    dma_types::Counters,
    hardware::Hardware,
    mr,
    rdma::{
        Device,
        DeviceAttr,
        DeviceCaps,
        GidAttr,
        GidType,
        Mtu,
        Netdev,
        OdpCaps,
        OnDemandAttr,
        PortAttr,
        PortImmutable, //
    },
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Atomic,
            Relaxed, //
        },
        Arc, //
    },
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// The only port.
pub(crate) const PORT: u32 = 1;

/// The only partition key: full member of the default partition.
const DEFAULT_PARTITION: u16 = 0xffff;

/// The EUI-64 made from a MAC address, as in RFC 4291 appendix A.
pub(crate) fn eui64(mac: &[u8; 6]) -> u64 {
    u64::from_be_bytes([
        mac[0] ^ 2,
        mac[1],
        mac[2],
        0xff,
        0xfe,
        mac[3],
        mac[4],
        mac[5],
    ])
}

/// What the device is and can do.
pub(crate) fn device_attributes(dev: &Device<Ferrite>) -> DeviceAttr {
    let caps = &dev.caps;
    let (major, minor, patch) = dev.identity.firmware;
    let mut flags =
        DeviceCaps::PORT_ACTIVE_EVENT | DeviceCaps::SYS_IMAGE_GUID | DeviceCaps::RC_RNR_NAK_GEN;
    if dev.has(abi::FEATURE_SEND_QUEUE_REGISTRATION) {
        flags = flags | DeviceCaps::MEM_MGT_EXTENSIONS;
    }
    if dev.has(abi::FEATURE_WINDOWS) {
        flags = flags | DeviceCaps::MEM_WINDOW | DeviceCaps::MEM_WINDOW_TYPE_2B;
    }
    if dev.has(abi::FEATURE_EXTENDED_CONNECTED) {
        flags = flags | DeviceCaps::XRC;
    }
    if dev.has(abi::FEATURE_ATOMIC_WRITE) {
        flags = flags | DeviceCaps::ATOMIC_WRITE;
    }
    if dev.has(abi::FEATURE_RESIZE_SRQ) {
        flags = flags | DeviceCaps::SRQ_RESIZE;
    }
    if dev.has(abi::FEATURE_FLUSH) {
        // Not for persistence: the device does not know what becomes of memory without power.
        flags = flags | DeviceCaps::FLUSH_GLOBAL;
    }
    let offered = |feature, number: u32| if dev.has(feature) { number } else { 0 };
    // So many of the largest work requests fit a send queue.
    let max_send_wr =
        (1u32 << caps.sq_max_log_blocks) / (abi::MAX_BLOCKS as u32).next_power_of_two();
    let max_wr = max_send_wr.min(1 << caps.rq_max_log_entries);
    DeviceAttr {
        fw_ver: u64::from(major) << 32 | u64::from(minor) << 16 | u64::from(patch),
        sys_image_guid: dev.guid(),
        max_mr_size: caps.max_region,
        page_size_cap: caps.page_sizes,
        vendor_id: abi::PCI_VENDOR_ID.into(),
        vendor_part_id: abi::PCI_DEVICE_ID.into(),
        hw_ver: abi::PCI_REVISION.into(),
        max_qp: dev.qpns.occupancy().1,
        max_qp_wr: max_wr,
        caps: flags,
        local_dma_lkey: true,
        max_send_sge: caps.max_sge.into(),
        max_recv_sge: caps.max_sge.into(),
        max_sge_rd: caps.max_sge.into(),
        max_cq: caps.max_cq,
        max_cqe: 1 << caps.cq_max_log_entries,
        max_mr: caps.max_tags.saturating_sub(1),
        max_pd: caps.max_qp,
        max_qp_rd_atom: caps.max_read.into(),
        max_qp_init_rd_atom: caps.max_read.into(),
        max_res_rd_atom: u32::from(caps.max_read) * caps.max_qp.min(1 << 16),
        atomic_hca: dev.has(abi::FEATURE_ATOMICS),
        max_fast_reg_page_list_len: if dev.has(abi::FEATURE_SEND_QUEUE_REGISTRATION) {
            mr::MAX_FAST_PAGES
        } else {
            0
        },
        max_ah: offered(abi::FEATURE_DATAGRAM, i32::MAX as u32),
        max_srq: offered(abi::FEATURE_SHARED_RECEIVE, caps.max_srq),
        max_srq_wr: offered(abi::FEATURE_SHARED_RECEIVE, 1 << caps.rq_max_log_entries),
        max_srq_sge: offered(abi::FEATURE_SHARED_RECEIVE, caps.max_sge.into()),
        max_mw: offered(abi::FEATURE_WINDOWS, caps.max_tags.saturating_sub(1)),
        max_mcast_grp: offered(abi::FEATURE_MULTICAST, caps.max_multicast),
        max_mcast_qp_attach: offered(abi::FEATURE_MULTICAST, caps.max_multicast),
        max_total_mcast_qp_attach: offered(
            abi::FEATURE_MULTICAST,
            caps.max_multicast
                .saturating_mul(caps.max_multicast)
                .min(i32::MAX as u32),
        ),
        max_dm_size: if dev.has(abi::FEATURE_DEVICE_MEMORY) {
            caps.device_memory
        } else {
            0
        },
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        timestamp_mask: if caps.clock_khz == 0 { 0 } else { u64::MAX },
        core_clock: caps.clock_khz.into(),
        max_cq_moderation_count: u16::MAX,
        max_cq_moderation_period: u16::MAX,
        on_demand: dev.has(abi::FEATURE_ON_DEMAND).then(|| on_demand(dev)),
        ..DeviceAttr::default()
    }
}

/// What services can do with on-demand memory: all that they can do at all.
fn on_demand(dev: &Device<Ferrite>) -> OnDemandAttr {
    let offered = |feature, caps| {
        if dev.has(feature) {
            caps
        } else {
            OdpCaps::default()
        }
    };
    let shared = offered(abi::FEATURE_SHARED_RECEIVE, OdpCaps::SRQ_RECV);
    let messages = OdpCaps::SEND | OdpCaps::RECV;
    let connected = messages
        | OdpCaps::WRITE
        | OdpCaps::READ
        | offered(abi::FEATURE_ATOMICS, OdpCaps::ATOMIC)
        | shared;
    OnDemandAttr {
        implicit: true,
        // Extended connections have neither of these.
        rc: connected
            | offered(abi::FEATURE_ATOMIC_WRITE, OdpCaps::ATOMIC_WRITE)
            | offered(abi::FEATURE_FLUSH, OdpCaps::FLUSH),
        uc: offered(abi::FEATURE_UNRELIABLE_CONNECTED, messages | OdpCaps::WRITE),
        ud: offered(abi::FEATURE_DATAGRAM, messages | shared),
        xrc: offered(abi::FEATURE_EXTENDED_CONNECTED, connected),
    }
}

fn max_mtu(dev: &Device<Ferrite>) -> Mtu {
    match dev.caps.max_log_mtu {
        0..=8 => Mtu::Bytes256,
        9 => Mtu::Bytes512,
        10 => Mtu::Bytes1024,
        11 => Mtu::Bytes2048,
        _ => Mtu::Bytes4096,
    }
}

/// Tells the device how long datagrams may be: by a work item, since whoever changes the interface
/// holds RTNL, and a device that does not answer must not stop all network configuration.
#[pin_data]
pub(crate) struct MtuFollower {
    hw: Arc<Hardware>,
    /// What to tell next.
    log_mtu: Atomic<u32>,
    #[pin]
    work: Work<MtuFollower>,
}

impl_has_work! {
    impl HasWork<Self> for MtuFollower { self.work }
}

impl MtuFollower {
    pub(crate) fn new(hw: &Arc<Hardware>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                log_mtu: Atomic::new(0),
                work <- new_work!("ferrite_mtu"),
            }),
            GFP_KERNEL,
        )
    }
}

impl WorkItem for MtuFollower {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let told = this.hw.execute(&SetPort {
            log_mtu: this.log_mtu.load(Relaxed) as u8,
            reserved: [0; 7],
        });
        // A device that does not answer is dealt with elsewhere, and has no port any more.
        if told.is_err() && !this.hw.is_dead() {
            pr_warn!("ferrite: the device does not take the MTU of its interface\n");
        }
    }
}

/// Has the device told how long datagrams may be, as its interface says. Does not wait for it.
pub(crate) fn follow_mtu(dev: &Device<Ferrite>, netdev: &Netdev) {
    if !dev.has(abi::FEATURE_PORT_MTU) {
        return;
    }
    let mtu = Mtu::from_netdev(netdev.mtu()).unwrap_or(Mtu::Bytes256);
    let log_mtu = mtu
        .bytes()
        .trailing_zeros()
        .min(dev.caps.max_log_mtu.into());
    dev.mtu.log_mtu.store(log_mtu, Relaxed);
    // Where it is queued already, it has yet to look; the queue orders the two.
    drop(dev.hw.work.enqueue(dev.mtu.clone()));
}

/// The state of the port: that of the network interface, and of the device's own link.
pub(crate) fn attributes(dev: &Device<Ferrite>, port: u32) -> Result<PortAttr> {
    if port != PORT {
        return Err(EINVAL);
    }
    let ethernet = dev.ethernet_port(port);
    let mut attr = PortAttr::ethernet(&ethernet, max_mtu(dev), dev.caps.max_gid.into());
    attr.active = ethernet.up && dev.hw.link_up() && !dev.hw.is_dead();
    attr.max_msg_size = u32::try_from(dev.caps.max_message).unwrap_or(abi::MAX_MESSAGE);
    Ok(attr)
}

/// What never changes about the port.
pub(crate) fn immutable(dev: &Device<Ferrite>, port: u32) -> Result<PortImmutable> {
    if port != PORT {
        return Err(EINVAL);
    }
    let mut immutable = PortImmutable::roce_v2(dev.caps.max_gid.into());
    if !dev.has(abi::FEATURE_DATAGRAM) {
        // Without queue pair 1 there is no management, and no communication manager on top of it;
        // saying so keeps both from failing the registration.
        immutable.core_cap_flags &=
            !(bindings::RDMA_CORE_CAP_IB_MAD | bindings::RDMA_CORE_CAP_IB_CM);
        immutable.max_mad_size = 0;
    }
    Ok(immutable)
}

/// The partition key at `index`.
pub(crate) fn partition_key(index: u16) -> Result<u16> {
    if index != 0 {
        return Err(EINVAL);
    }
    Ok(DEFAULT_PARTITION)
}

/// Has the device told of a GID.
pub(crate) fn add_gid(dev: &Device<Ferrite>, attr: &GidAttr) -> Result {
    if attr.gid_type() != Some(GidType::RoceV2) {
        // The table holds only what the port's protocol is.
        return Err(EINVAL);
    }
    let (vlan, mac) = attr.l2()?;
    dev.gids.set(SetGid {
        gid: attr.gid().0,
        index: attr.index(),
        vlan: vlan.unwrap_or(abi::VLAN_NONE),
        mac,
        reserved: [0; 3],
    })
}

/// Has the device forget a GID.
pub(crate) fn del_gid(dev: &Device<Ferrite>, attr: &GidAttr) -> Result {
    dev.gids.clear(attr.index())
}

/// Reads the device's counters.
pub(crate) fn read_counters(dev: &Device<Ferrite>, values: &mut [u64]) -> Result {
    let counters: Counters = dev.hw.query(CommandOpcode::QueryCounters, 0)?;
    for (value, counter) in values.iter_mut().zip(counters.0) {
        *value = counter;
    }
    Ok(())
}

#[kunit_tests(ferrite_port)]
mod tests {
    use super::*;

    #[test]
    fn the_guid_is_the_eui64_of_the_mac() {
        let guid = eui64(&[0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
        assert_eq!(guid, 0x5054_00ff_fe12_3456);
    }

    #[test]
    fn there_is_one_partition() {
        assert_eq!(partition_key(0), Ok(0xffff));
        assert!(partition_key(1).is_err());
    }
}
