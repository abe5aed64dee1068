// SPDX-License-Identifier: GPL-2.0

//! Rules of flows (flow steering): which frames a queue pair of raw packets gets (chapter 21). Who may make one is seen to by the core.

use crate::{
    abi,
    abi::{
        CommandOpcode,
        CreateFlow,
        FlowFields,
        Plain, //
    },
    bindings,
    commands::DeviceObject,
    device::Ferrite,
    hardware::Hardware,
    kernel_ext::errno,
    numbers::Number,
    port::{
        DEVICE_PORT,
        PORT, //
    },
    qp::FerriteQp,
    rdma::{
        kind,
        Device,
        Flow,
        FlowAttr,
        FlowOps,
        FlowSpec,
        FlowType,
        New,
        Qp,
        QpType,
        Udata, //
    },
    shares::Holder,
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            Acquire,
            Atomic,
            Full, //
        },
        Arc, //
    },
    types::ScopeGuard,
    workqueue::{
        impl_has_work,
        new_work,
        Work,
        WorkItem, //
    },
};

/// The priority of a rule for all that no other is for.
const ALL_DEFAULT: u16 = u16::MAX;
/// The same of what goes to groups, which comes before that.
const MULTICAST_DEFAULT: u16 = ALL_DEFAULT - 1;

/// Raw packets are those of the interface that the port is paired with. With that rules end, and queue pairs of raw packets go to
/// the error state for good: whether who made them may have another's is asked when they are made.
///
/// By a work item, as for the MTU: RTNL is held when an interface goes.
#[pin_data]
pub(crate) struct RawPackets {
    hw: Arc<Hardware>,
    /// How many interfaces the port has lost.
    lost: Atomic<u32>,
    #[pin]
    work: Work<RawPackets>,
}

impl_has_work! {
    impl HasWork<Self> for RawPackets { self.work }
}

/// An interface that the port has, or has had: it is asked for before anything else is about what is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortInterface(u32);

impl RawPackets {
    pub(crate) fn new(hw: &Arc<Hardware>) -> Result<Arc<Self>> {
        Arc::pin_init(
            pin_init!(Self {
                hw: hw.clone(),
                lost: Atomic::new(0),
                work <- new_work!("ferrite_raw_packets"),
            }),
            GFP_KERNEL,
        )
    }

    /// The interface of the port, if the current process may have its packets: of `ENODEV` and `EPERM`
    /// [`Device::check_raw_port`] tells.
    pub(crate) fn interface(dev: &Device<Ferrite>) -> Result<PortInterface> {
        let interface = PortInterface(dev.raw_packets.lost.load(Acquire));
        dev.check_raw_port(PORT)?;
        Ok(interface)
    }

    /// `ENODEV` where the port has lost that interface since. Where it has not, what was put into tables by whoever asks is found
    /// there when it is lost.
    pub(crate) fn still(&self, interface: PortInterface) -> Result {
        // A full barrier: tables are looked at without a lock (`IrqXArray::next_index`).
        match PortInterface(self.lost.fetch_add(0, Full)) == interface {
            true => Ok(()),
            false => Err(ENODEV),
        }
    }

    /// The port has lost its interface. Does not wait for the device.
    pub(crate) fn lose_interface(self: &Arc<Self>) {
        self.lost.fetch_add(1, Full);
        // Where it is queued already, it has yet to look.
        drop(self.hw.work.enqueue(self.clone()));
    }
}

impl WorkItem for RawPackets {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let mut next = this.hw.flows.next_index(0);
        while let Some(index) = next {
            let flow = this.hw.flows.get(index);
            if let Some(flow) = flow.filter(|flow| this.still(flow.interface).is_err()) {
                // Its owner may end it meanwhile, which waits for this.
                flow.object.destroy();
            }
            next = this.hw.flows.next_index(index + 1);
        }
        let mut next = this.hw.qps.next_index(0);
        while let Some(index) = next {
            if let Some(qp) = this.hw.qps.get(index) {
                if qp.interface().is_some_and(|of| this.still(of).is_err()) {
                    FerriteQp::lost_interface(&qp);
                }
            }
            next = this.hw.qps.next_index(index + 1);
        }
    }
}

/// The driver's data of a rule. The fields are dropped in order: the device lets go of it before the number is free.
pub(crate) struct FerriteFlow {
    object: DeviceObject,
    number: Number,
    interface: PortInterface,
}

impl FlowOps for Ferrite {
    type Flow = FerriteFlow;

    fn create_flow<'a>(
        qp: &Qp<Self>,
        new: New<'a, kind::Flow, Self>,
        attr: &FlowAttr<'_>,
        udata: Option<&Udata<'_, Self>>,
    ) -> Result<&'a Flow<Self>> {
        let dev = qp.device();
        if let Some(udata) = udata {
            udata.expect_empty()?;
        }
        if !dev.has(abi::FEATURE_RAW_PACKETS)
            || qp.qp_type() != Some(QpType::RawPacket)
            || attr.has_flags()
        {
            return Err(errno::eopnotsupp());
        }
        if attr.port() != PORT {
            return Err(EINVAL);
        }
        let flow_type = attr.flow_type();
        let is_default = matches!(
            flow_type,
            Some(FlowType::AllDefault | FlowType::MulticastDefault)
        );
        // What a default rule is for is said by its name. A rule that is for more than was asked for is none.
        if is_default && attr.specs().next().is_some() {
            return Err(EINVAL);
        }
        let interface = qp.interface().ok_or(EINVAL)?;
        // Not only who made the queue pair may make rules for it.
        RawPackets::interface(dev)?;
        dev.raw_packets.still(interface)?;
        let mut asked = Match::default();
        let priority = match flow_type {
            Some(FlowType::Normal) => {
                for spec in attr.specs() {
                    asked.add(&spec)?;
                }
                if attr.priority() >= MULTICAST_DEFAULT {
                    return Err(EINVAL);
                }
                attr.priority()
            }
            Some(FlowType::AllDefault) => ALL_DEFAULT,
            // Broadcast is one of the groups, as to mlx5.
            Some(FlowType::MulticastDefault) => {
                asked.value.destination_mac[0] = 1;
                asked.mask.destination_mac[0] = 1;
                MULTICAST_DEFAULT
            }
            // Nobody gets copies of what others have, nor of what is encrypted for queue pairs.
            Some(FlowType::Sniffer) | None => return Err(errno::eopnotsupp()),
        };
        let number = dev.flows.take(Holder::current())?;
        let mut command = CreateFlow {
            flow: number.get(),
            target: qp.number(),
            priority,
            layers: asked.layers,
            port: DEVICE_PORT,
            value: asked.value,
            mask: asked.mask,
            ..CreateFlow::zeroed()
        };
        if let Some(spread) = qp.spread() {
            command.flags = abi::FLOW_TO_TABLE;
            command.target = spread.table;
            command.hash_types = spread.types;
            command.key = spread.key;
        }
        let object =
            DeviceObject::create(&dev.hw, &command, CommandOpcode::DestroyFlow, number.get())?;
        let index = number.get();
        let flow = new.init(Ok::<_, Error>(FerriteFlow {
            object,
            number,
            interface,
        }))?;
        let flows = &dev.hw.flows;
        flows.insert(index as usize, flow.get_ref().ok_or(ENODEV)?)?;
        let listed = ScopeGuard::new(|| drop(flows.remove(index as usize)));
        // Who ends those of an interface that goes may have looked for them before this one was there. (Of rules there
        // are no events that could have found it.)
        dev.raw_packets.still(interface)?;
        listed.dismiss();
        Ok(flow)
    }

    /// Ends a rule: afterwards no frame is taken by it.
    fn destroy_flow(flow: &Flow<Self>) -> Result {
        flow.object.destroy();
        drop(flow.device().hw.flows.remove(flow.number.get() as usize));
        Ok(())
    }
}

/// What a frame has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Match {
    layers: u8,
    value: FlowFields,
    mask: FlowFields,
    /// The layers that something was said of.
    said: u8,
}

impl Default for Match {
    fn default() -> Self {
        Self {
            layers: 0,
            value: FlowFields::zeroed(),
            mask: FlowFields::zeroed(),
            said: 0,
        }
    }
}

/// The flags of IPv4 that rules know, by the numbers of the core as well as the device's.
const IPV4_FLAGS: u8 = abi::FRAGMENT_NONE | abi::FRAGMENT_MORE;
const _: () = assert!(
    bindings::ib_ipv4_flags_IB_IPV4_DONT_FRAG == abi::FRAGMENT_NONE as u32
        && bindings::ib_ipv4_flags_IB_IPV4_MORE_FRAG == abi::FRAGMENT_MORE as u32
);

/// Of Ethernet, of IP, and of what is in that.
const ETHERNET: u8 = 1 << 0;
const NETWORK: u8 = 1 << 1;
const TRANSPORT: u8 = 1 << 2;

impl Match {
    /// Adds what is asked of one part of the frame; each is asked for once.
    fn add(&mut self, spec: &FlowSpec) -> Result {
        /// Takes over fields: the bits that count of the value, and the mask.
        macro_rules! take {
            ($masked:ident: $($field:ident = $part:ident => $get:expr;)*) => {$({
                let $part = &$masked.mask;
                let mask = $get;
                let $part = &$masked.value;
                let value = $get;
                fill(&mut self.mask.$field, &mask, &mask);
                fill(&mut self.value.$field, &mask, &value);
            })*};
        }
        let (said, layers) = match spec {
            FlowSpec::Ethernet(masked) => {
                take! { masked:
                    destination_mac = part => part.dst_mac;
                    source_mac = part => part.src_mac;
                    ether_type = part => part.ether_type.to_ne_bytes();
                    vlan = part => part.vlan_tag.to_ne_bytes();
                }
                let tagged = masked.mask.vlan_tag != 0;
                (ETHERNET, if tagged { abi::FLOW_LAYER_VLAN } else { 0 })
            }
            // Of the flags there may be more than those that the device looks at.
            FlowSpec::Ipv4(masked) if masked.mask.flags & !IPV4_FLAGS != 0 => {
                return Err(errno::eopnotsupp());
            }
            FlowSpec::Ipv4(masked) => {
                take! { masked:
                    source = part => widened(part.src_ip.to_ne_bytes());
                    destination = part => widened(part.dst_ip.to_ne_bytes());
                }
                let (value, mask) = (&masked.value, &masked.mask);
                self.set_bytes(
                    [value.proto, value.tos, value.ttl, value.flags],
                    [mask.proto, mask.tos, mask.ttl, mask.flags],
                );
                (NETWORK, abi::FLOW_LAYER_IPV4)
            }
            FlowSpec::Ipv6(masked) => {
                take! { masked:
                    source = part => part.src_ip;
                    destination = part => part.dst_ip;
                    flow_label = part => { part.flow_label }.to_ne_bytes();
                }
                let (value, mask) = (&masked.value, &masked.mask);
                self.set_bytes(
                    [value.next_hdr, value.traffic_class, value.hop_limit, 0],
                    [mask.next_hdr, mask.traffic_class, mask.hop_limit, 0],
                );
                (NETWORK, abi::FLOW_LAYER_IPV6)
            }
            FlowSpec::Tcp(masked) | FlowSpec::Udp(masked) => {
                take! { masked:
                    source_port = part => part.src_port.to_ne_bytes();
                    destination_port = part => part.dst_port.to_ne_bytes();
                }
                let layer = match spec {
                    FlowSpec::Tcp(_) => abi::FLOW_LAYER_TCP,
                    _ => abi::FLOW_LAYER_UDP,
                };
                (TRANSPORT, layer)
            }
            FlowSpec::Other => return Err(errno::eopnotsupp()),
        };
        if self.said & said != 0 {
            return Err(EINVAL);
        }
        self.said |= said;
        self.layers |= layers;
        Ok(())
    }

    /// Protocol, traffic class, hop limit and fragments.
    fn set_bytes(&mut self, value: [u8; 4], mask: [u8; 4]) {
        for (to, [protocol, class, hops, fragment]) in [
            (&mut self.mask, mask),
            (
                &mut self.value,
                core::array::from_fn(|at| value[at] & mask[at]),
            ),
        ] {
            to.protocol = protocol;
            to.traffic_class = class;
            to.hop_limit = hops;
            to.fragment = fragment;
        }
    }
}

fn fill(to: &mut [u8], mask: &[u8], value: &[u8]) {
    for (to, (mask, value)) in to.iter_mut().zip(mask.iter().zip(value)) {
        *to = mask & value;
    }
}

/// An IPv4 address where one of IPv6 would be.
fn widened(address: [u8; 4]) -> [u8; 16] {
    let mut wide = [0; 16];
    wide[..4].copy_from_slice(&address);
    wide
}

#[kunit_tests(ferrite_flow)]
mod tests {
    use super::*;
    use crate::{
        bindings::{
            ib_flow_eth_filter as Ethernet,
            ib_flow_ipv4_filter as Ipv4,
            ib_flow_tcp_udp_filter as Ports, //
        },
        rdma::Masked, //
    };

    #[test]
    fn a_rule_has_the_bits_that_count_as_they_are_in_the_frame() -> Result {
        let mut asked = Match::default();
        asked.add(&FlowSpec::Ethernet(Masked {
            value: Ethernet {
                dst_mac: [1, 2, 3, 4, 5, 6],
                src_mac: [9; 6],
                ether_type: 0x0800_u16.to_be(),
                vlan_tag: 0x0fff_u16.to_be(),
            },
            mask: Ethernet {
                dst_mac: [0xff, 0xff, 0, 0, 0, 0],
                src_mac: [0; 6],
                ether_type: 0xffff,
                vlan_tag: 0x0ff0_u16.to_be(),
            },
        }))?;
        asked.add(&FlowSpec::Ipv4(Masked {
            value: Ipv4 {
                src_ip: 0x0102_0304_u32.to_be(),
                dst_ip: 0,
                proto: 17,
                tos: 5,
                ttl: 64,
                flags: 2,
            },
            mask: Ipv4 {
                src_ip: 0xffff_ff00_u32.to_be(),
                dst_ip: 0,
                proto: 0xff,
                tos: 0,
                ttl: 0x40,
                flags: 2,
            },
        }))?;
        let ports = || Masked {
            value: Ports {
                dst_port: 5678_u16.to_be(),
                src_port: 1234_u16.to_be(),
            },
            mask: Ports {
                dst_port: 0xffff,
                src_port: 0,
            },
        };
        asked.add(&FlowSpec::Udp(ports()))?;
        let layers = abi::FLOW_LAYER_VLAN | abi::FLOW_LAYER_IPV4 | abi::FLOW_LAYER_UDP;
        assert_eq!(asked.layers, layers);
        let (value, mask) = (&asked.value, &asked.mask);
        assert_eq!(value.destination_mac, [1, 2, 0, 0, 0, 0]);
        assert_eq!(mask.destination_mac, [0xff, 0xff, 0, 0, 0, 0]);
        assert_eq!((value.source_mac, mask.source_mac), ([0; 6], [0; 6]));
        assert_eq!((value.ether_type, value.vlan), ([8, 0], [0x0f, 0xf0]));
        assert_eq!(value.source[..5], [1, 2, 3, 0, 0]);
        assert_eq!(mask.source[..5], [0xff, 0xff, 0xff, 0, 0]);
        assert_eq!((value.protocol, value.traffic_class), (17, 0));
        assert_eq!((value.hop_limit, value.fragment), (64, 2));
        assert_eq!(value.destination_port, [0x16, 0x2e]);
        assert_eq!((value.source_port, mask.source_port), ([0; 2], [0; 2]));
        // Each part once, and none that the device does not look at.
        assert_eq!(asked.add(&FlowSpec::Tcp(ports())), Err(EINVAL));
        let other = asked.add(&FlowSpec::Other);
        assert_eq!(other, Err(errno::eopnotsupp()));
        Ok(())
    }

    #[test]
    fn a_rule_about_flags_that_the_device_does_not_look_at_is_refused() {
        let filter = |flags| Ipv4 {
            src_ip: 0,
            dst_ip: 0,
            proto: 0,
            tos: 0,
            ttl: 0,
            flags,
        };
        for (flags, mask) in [(0, 1), (1, 1), (8, 8), (2, 0x42), (0, 0xff)] {
            let (value, mask) = (filter(flags), filter(mask));
            let refused = Match::default().add(&FlowSpec::Ipv4(Masked { value, mask }));
            assert_eq!(refused, Err(errno::eopnotsupp()));
        }
        // Those that do not count may be anything.
        let (value, mask) = (filter(0xff), filter(abi::FRAGMENT_MORE));
        let mut asked = Match::default();
        let taken = asked.add(&FlowSpec::Ipv4(Masked { value, mask }));
        assert_eq!((taken, asked.value.fragment), (Ok(()), abi::FRAGMENT_MORE));
    }
}
