// SPDX-License-Identifier: GPL-2.0

//! The device's attributes and its port, which follows the network interface that it shares the
//! link with.

use crate::{
    abi,
    abi::{
        QueryCounters,
        SetGid,
        SetPort, //
    },
    bars::Identity,
    bindings, caps,
    device::Ferrite,
    dma_types::Counters,
    extension,
    hardware::Hardware,
    kernel_ext::pci as pci_ext,
    qp_counters,
    rdma::{
        Device,
        DeviceAttr,
        DeviceCaps,
        GidAttr,
        GidOps,
        GidType,
        Mtu,
        Netdev,
        NetdevEvent,
        NetdevOps,
        OdpCaps,
        OnDemandAttr,
        PortAttr,
        PortImmutable,
        Rtnl, //
    },
};
use kernel::{
    page::PAGE_SIZE,
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

/// The only port that is made use of, as the verbs number them: from 1. The device says the address
/// of one interface.
pub(crate) const PORT: u32 = 1;
/// The same as the device numbers them: from 0.
pub(crate) const DEVICE_PORT: u8 = match device_port(PORT) {
    Ok(port) => port,
    Err(_) => panic!(),
};

/// The device's number of a port.
const fn device_port(port: u32) -> Result<u8> {
    match port {
        1..=256 => Ok((port - 1) as u8),
        _ => Err(EINVAL),
    }
}

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

/// How many of the largest work requests fit a send queue, and a receive queue.
fn max_qp_wr(caps: &abi::DeviceCaps) -> u32 {
    let blocks = abi::blocks_per_request(true, caps.max_sge.into(), caps.max_inline as usize);
    let sends = (1u32 << caps.sq_max_log_blocks) / (blocks as u32).next_power_of_two();
    // There is a queue pair for one of the smaller ones, if nothing else.
    sends.clamp(1, 1 << caps.rq_max_log_entries)
}

/// The bytes of device memory that can be had, which is given out by the page of the host.
fn whole_pages(length: u64) -> u64 {
    length - length % PAGE_SIZE as u64
}

/// What the device is and can do.
pub(crate) fn device_attributes(dev: &Device<Ferrite>) -> DeviceAttr {
    let caps = &dev.caps;
    let (major, minor, patch) = dev.identity.firmware;
    let mut flags =
        DeviceCaps::PORT_ACTIVE_EVENT | DeviceCaps::SYS_IMAGE_GUID | DeviceCaps::RC_RNR_NAK_GEN;
    if dev.has(abi::FEATURE_FAST_REGISTER) {
        flags = flags | DeviceCaps::MEM_MGT_EXTENSIONS;
    }
    if dev.has(abi::FEATURE_WINDOWS) {
        flags = flags | DeviceCaps::MEM_WINDOW | DeviceCaps::MEM_WINDOW_TYPE_2B;
    }
    if dev.has(abi::FEATURE_XRC) {
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
    if dev.has(abi::FEATURE_RAW_PACKETS) {
        // Not `IB_RAW_PACKET_CAP_IP_CSUM`, which is for checksums of what is sent, too: those are the program's.
        flags = flags | DeviceCaps::MANAGED_FLOW_STEERING;
    }
    let offered = |feature, number: u32| if dev.has(feature) { number } else { 0 };
    DeviceAttr {
        fw_ver: u64::from(major) << 32 | u64::from(minor) << 16 | u64::from(patch),
        sys_image_guid: dev.guid(),
        max_mr_size: caps.max_region,
        page_size_cap: caps.page_sizes,
        vendor_id: abi::PCI_VENDOR_ID.into(),
        vendor_part_id: abi::PCI_DEVICE_ID.into(),
        hw_ver: abi::PCI_REVISION.into(),
        max_qp: dev.qpns.occupancy().1,
        max_qp_wr: max_qp_wr(caps),
        caps: flags,
        local_dma_lkey: true,
        max_send_sge: caps.max_sge.into(),
        max_recv_sge: caps.max_sge.into(),
        max_sge_rd: caps.max_sge.into(),
        max_cq: caps.cq_count,
        max_cqe: 1 << caps.cq_max_log_entries,
        max_mr: caps.tag_count,
        max_pd: dev.pds.occupancy().1,
        max_qp_rd_atom: caps.max_ird.into(),
        max_qp_init_rd_atom: caps.max_ord.into(),
        max_res_rd_atom: u32::from(caps.max_ird) * caps.qp_count.min(1 << 16),
        atomic_hca: dev.has(abi::FEATURE_ATOMICS),
        max_fast_reg_page_list_len: offered(
            abi::FEATURE_FAST_REGISTER,
            caps.max_fast_register_pages,
        ),
        max_ah: offered(abi::FEATURE_UD, i32::MAX as u32),
        max_srq: offered(abi::FEATURE_SRQ, caps.srq_count),
        max_srq_wr: offered(abi::FEATURE_SRQ, 1 << caps.rq_max_log_entries),
        max_srq_sge: offered(abi::FEATURE_SRQ, caps.max_sge.into()),
        max_mw: offered(abi::FEATURE_WINDOWS, caps.tag_count),
        max_mcast_grp: offered(abi::FEATURE_MULTICAST, caps.max_multicast),
        max_mcast_qp_attach: offered(abi::FEATURE_MULTICAST, caps.max_multicast),
        max_total_mcast_qp_attach: offered(
            abi::FEATURE_MULTICAST,
            caps.max_multicast
                .saturating_mul(caps.max_multicast)
                .min(i32::MAX as u32),
        ),
        max_dm_size: if dev.has(abi::FEATURE_DEVICE_MEMORY) {
            whole_pages(dev.hw.doorbells.layout().memory().length)
        } else {
            0
        },
        max_wq: offered(abi::FEATURE_RECEIVE_TABLES, dev.qpns.occupancy().1),
        max_rwq_tables: offered(abi::FEATURE_RECEIVE_TABLES, caps.max_receive_tables.into()),
        max_rwq_table_entries: offered(
            abi::FEATURE_RECEIVE_TABLES,
            1 << caps.receive_table_log_entries,
        ),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        timestamp_mask: caps::clock_mask(caps),
        core_clock: caps.clock_khz.into(),
        max_cq_moderation_count: u16::MAX,
        max_cq_moderation_period: u16::MAX,
        on_demand: dev.has(abi::FEATURE_ON_DEMAND).then(|| on_demand(dev)),
        driver_caps: extensions(dev.features()),
        ..DeviceAttr::default()
    }
}

/// What a device with such features can do for kernel users beyond what the core has names for.
fn extensions(features: u64) -> u64 {
    // One-touch is a way to register by work request here.
    let one_touch = abi::FEATURE_ONE_TOUCH | abi::FEATURE_FAST_REGISTER;
    [
        (abi::FEATURE_FAST_REGISTER, extension::REGISTER_DRAINS),
        (abi::FEATURE_REGISTER_SEND, extension::REGISTER_SEND),
        (one_touch, extension::ONE_TOUCH),
    ]
    .into_iter()
    .filter(|(needed, _)| features & needed == *needed)
    .fold(0, |all, (_, extension)| all | extension.capability())
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
    let shared = offered(abi::FEATURE_SRQ, OdpCaps::SRQ_RECV);
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
        uc: offered(abi::FEATURE_UC, messages | OdpCaps::WRITE),
        ud: offered(abi::FEATURE_UD, messages | shared),
        xrc: offered(abi::FEATURE_XRC, connected),
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
            port: DEVICE_PORT,
            reserved: [0; 6],
        });
        // A device that does not answer is dealt with elsewhere, and has no port any more.
        if told.is_err() && !this.hw.is_dead() {
            dev_warn!(
                this.hw.pdev,
                "device does not take the MTU of its interface\n"
            );
        }
    }
}

/// Has the device told how long datagrams may be, as its interface says. Does not wait for it.
fn follow_mtu(dev: &Device<Ferrite>, netdev: &Netdev) {
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
    if !dev.has(abi::FEATURE_UD) {
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

/// Names of the counters that the device has, of those that there are names for.
pub(crate) fn counter_names(caps: &abi::DeviceCaps) -> &'static [&'static str] {
    let names = &abi::COUNTER_NAMES;
    names.get(..caps.counters as usize).unwrap_or(names)
}

/// Reads the device's counters.
pub(crate) fn read_counters(dev: &Device<Ferrite>, port: u32, values: &mut [u64]) -> Result {
    let request = QueryCounters {
        port: device_port(port)?,
        reserved: [0; 7],
    };
    let length = core::mem::size_of_val(values);
    // First, so that it is no more than what all have counted.
    let of_sets = dev.qp_counters.read_all();
    let mut counters: Counters = dev.hw.query_start(&request, length)?;
    qp_counters::take_away(&mut counters.0, &of_sets);
    for (value, counter) in values.iter_mut().zip(counters.0) {
        *value = counter;
    }
    Ok(())
}

/// How the network interface is found that the port shares its link with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    /// By its permanent address.
    Mac([u8; 6]),
    /// It is that of another PCI function.
    Function(u8),
    /// It is the function's own.
    Own,
}

/// The network interface that shares the link of the port: that of the function itself if it has one, that of the
/// partner, or of the address where there is none.
fn beside(identity: &Identity) -> Beside {
    if identity.features & abi::FEATURE_ETHERNET != 0 {
        return Beside::Own;
    }
    match identity.function.partner() {
        Some(function) => Beside::Function(function),
        None => Beside::Mac(identity.mac),
    }
}

impl GidOps for Ferrite {
    /// Has the device told of a GID.
    fn add_gid(dev: &Device<Self>, attr: &GidAttr) -> Result {
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
            port: device_port(attr.port())?,
            reserved: [0; 5],
        })
    }

    /// Has the device forget a GID.
    fn del_gid(dev: &Device<Self>, attr: &GidAttr) -> Result {
        dev.gids.clear(attr.index())
    }
}

impl NetdevOps for Ferrite {
    /// Whether an interface is the one that shares the link of the port, of which there is one.
    fn shares_link(dev: &Device<Self>, rtnl: &Rtnl, _port: u32, netdev: &Netdev) -> bool {
        // A function is looked for among all: last, as anybody's interfaces come here.
        netdev.is_hardware()
            && match beside(&dev.identity) {
                Beside::Own => netdev.is_of(rtnl, dev.parent()),
                Beside::Mac(mac) => netdev.has_permanent_mac(&mac),
                Beside::Function(function) => {
                    netdev.is_ethernet()
                        && pci_ext::beside(&dev.hw.pdev, function)
                            .is_some_and(|other| netdev.is_of(rtnl, other.as_ref()))
                }
            }
    }

    fn netdev_event(dev: &Device<Self>, _port: u32, netdev: &Netdev, event: NetdevEvent) {
        if matches!(
            event,
            NetdevEvent::Register | NetdevEvent::Up | NetdevEvent::ChangeMtu
        ) {
            follow_mtu(dev, netdev);
        }
        if event == NetdevEvent::Unregister {
            dev.raw_packets.lose_interface();
        }
    }
}

#[kunit_tests(ferrite_port)]
mod tests {
    use super::*;
    use crate::{
        abi::{
            Function,
            Plain, //
        },
        rdma::Extension,
    };

    #[test]
    fn the_guid_is_the_eui64_of_the_mac() {
        let guid = eui64(&[0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);
        assert_eq!(guid, 0x5054_00ff_fe12_3456);
    }

    #[test]
    fn the_verbs_count_ports_from_1_and_the_device_from_0() {
        assert_eq!((PORT, DEVICE_PORT), (1, 0));
        assert_eq!((device_port(2), device_port(256)), (Ok(1), Ok(255)));
        for port in [0, 257, 1 << 31, u32::MAX] {
            assert_eq!(device_port(port), Err(EINVAL));
        }
    }

    #[test]
    fn as_many_work_requests_are_offered_as_fit_and_never_none() {
        let with = |blocks, entries, max_sge, max_inline| {
            max_qp_wr(&abi::DeviceCaps {
                sq_max_log_blocks: blocks,
                rq_max_log_entries: entries,
                max_sge,
                max_inline,
                ..abi::DeviceCaps::zeroed()
            })
        };
        assert_eq!(
            with(17, 15, abi::MAX_SGE as u8, abi::MAX_INLINE as u32),
            1 << 14
        );
        assert_eq!(
            with(17, 10, abi::MAX_SGE as u8, abi::MAX_INLINE as u32),
            1 << 10
        );
        // Smaller ones need less room.
        assert_eq!(with(17, 20, 1, 0), 1 << 16);
        for blocks in 0..3 {
            assert_eq!(with(blocks, 15, abi::MAX_SGE as u8, 0), 1);
        }
        assert_eq!(with(17, 0, 1, 0), 1);
    }

    #[test]
    fn device_memory_is_offered_in_whole_pages() {
        let page = PAGE_SIZE as u64;
        for (length, whole) in [
            (0, 0),
            (page - 1, 0),
            (page, page),
            (3 * page + 5, 3 * page),
        ] {
            assert_eq!(whole_pages(length), whole);
        }
    }

    #[test]
    fn only_counters_that_the_device_has_are_named() {
        let with = |counters| abi::DeviceCaps {
            counters,
            ..abi::DeviceCaps::zeroed()
        };
        assert_eq!(counter_names(&with(0)).len(), 0);
        assert_eq!(counter_names(&with(3)), &abi::COUNTER_NAMES[..3]);
        assert_eq!(counter_names(&with(u32::MAX)), &abi::COUNTER_NAMES[..]);
        // A device of interface 1.1 has none of those of 1.2.
        let newer = ["sq_registrations", "early_uses", "pending_waits"];
        assert!(counter_names(&with(19)).ends_with(&newer));
        let older = counter_names(&with(16));
        assert!(older.len() == 16 && !newer.iter().any(|name| older.contains(name)));
    }

    #[test]
    fn kernel_users_are_offered_what_the_device_has() {
        let (register, send) = (abi::FEATURE_FAST_REGISTER, abi::FEATURE_REGISTER_SEND);
        let (drains, both, touch) = (1 << 62, 1 << 63, 1 << 61);
        for (features, expected) in [
            (0, 0),
            (abi::FEATURE_ONE_TOUCH, 0),
            // Lists are for processes.
            (abi::FEATURE_LISTS, 0),
            (register, drains),
            (register | send, drains | both),
            (register | abi::FEATURE_ONE_TOUCH, drains | touch),
            (u64::MAX, drains | both | touch),
        ] {
            assert_eq!(extensions(features), expected);
        }
        // Users in C have the numbers from the documentation.
        let flags = |extension: Extension| extension.create_flags().as_raw();
        assert_eq!(flags(extension::REGISTER_DRAINS), 1 << 26);
        assert_eq!(flags(extension::REGISTER_SEND), 1 << 27);
        assert_eq!(extension::REGISTER_SEND.opcode(), Some(0xf0));
        assert_eq!(extension::ONE_TOUCH.access().as_raw(), 1 << 30);
    }

    #[test]
    fn there_is_one_partition() {
        assert_eq!(partition_key(0), Ok(0xffff));
        assert!(partition_key(1).is_err());
    }

    #[test]
    fn a_function_with_a_partner_is_paired_by_it_and_not_by_an_address() {
        let mac = [2, 0, 0, 0, 0, 1];
        let with = |partner| Identity {
            mac,
            function: Function::new(abi::FUNCTION_RDMA, 1, partner),
            messages: 1,
            interface: (0, 0),
            firmware: (0, 0, 0),
            offered: 0,
            features: 0,
            link_up: true,
        };
        assert_eq!(beside(&with(None)), Beside::Mac(mac));
        assert_eq!(beside(&with(Some(0))), Beside::Function(0));
        assert_eq!(beside(&with(Some(7))), Beside::Function(7));
        // Its own comes first.
        let own = Identity {
            features: abi::FEATURE_ETHERNET,
            ..with(Some(7))
        };
        assert_eq!(beside(&own), Beside::Own);
    }
}
