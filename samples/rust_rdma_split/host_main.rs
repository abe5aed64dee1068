// SPDX-License-Identifier: GPL-2.0

//! The host of the split driver: a network interface whose network is at the far end of an RDMA connection.
//!
//! ```text
//! modprobe rust_rdma_split_host server=192.168.1.1 key=0x8f1d03a2c1b77e55
//! ip link set split0 up
//! ```
//!
//! The interface is there while the module is, and has a carrier while the I/O unit is connected and its own
//! interface has one. `Documentation/split.md` has the protocol; `host/` the interface.

#[path = "../../rust/bindings/mod.rs"]
pub mod bindings;
#[path = "../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../rust/net/mod.rs"]
pub mod net;
#[path = "src/protocol/mod.rs"]
pub mod protocol;
#[path = "../../rust/rdma/mod.rs"]
pub mod rdma;
#[path = "../../rust/rdma_cm/mod.rs"]
pub mod rdma_cm;

pub mod frames;
pub mod host;
pub mod link;

use core::net::{IpAddr, SocketAddr};
use frames::{MAX_MTU, OVERHEAD};
use host::Interface;
use kernel::prelude::*;
use link::Options;
use protocol::{Service, Variant, DEFAULT_PORT};

module_string!(server, "Address of the I/O unit: ADDRESS[:PORT]");

module! {
    type: HostModule,
    name: "rust_rdma_split_host",
    authors: ["Ferrite contributors"],
    description: "Network interface at the far end of an RDMA connection",
    license: "GPL",
    params: {
        threshold: u32 {
            default: 256,
            description: "Frames of up to so many bytes travel in messages; ethtool's tx-copybreak changes it",
        },
        service: u8 {
            default: 1,
            description: "1: acknowledged, 2: unacknowledged",
        },
        variant: u8 {
            default: 1,
            description: "1: the sender writes frames (push), 2: the receiver reads them (pull)",
        },
        key: u64 {
            default: 0,
            description: "What the I/O unit wants its hosts to know",
        },
        separate_indication: u8 {
            default: 0,
            description: "1: a message tells of each write, in place of immediate data",
        },
    },
}

/// The module: one interface, if it was told where its I/O unit is.
struct HostModule {
    _interface: Option<Interface>,
}

impl kernel::Module for HostModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let given = server.get().to_str().map_err(|_| EINVAL)?;
        if given.is_empty() {
            pr_info!("there is no interface without an I/O unit: server=ADDRESS[:PORT]\n");
            return Ok(Self { _interface: None });
        }
        let Some(address) = parse(given) else {
            pr_err!(
                "server={}: not an address with all that it takes to reach it\n",
                given
            );
            return Err(EINVAL);
        };
        let parameters = module_parameters::service.value();
        let known = Service::from_number(*parameters).ok_or(EINVAL)?;
        let mover = Variant::from_number(*module_parameters::variant.value()).ok_or(EINVAL)?;
        let mut options = Options::new(known, mover, MAX_MTU + OVERHEAD);
        options.key = *module_parameters::key.value();
        if options.key == 0 {
            pr_info!("no key: this is a host only for an I/O unit that has none (insecure=1)\n");
        }
        options.threshold = *module_parameters::threshold.value();
        options.separate_indication = *module_parameters::separate_indication.value() != 0;
        Ok(Self {
            _interface: Some(Interface::new(given, address, options)?),
        })
    }
}

/// An address, with a port or without. One of a link needs the number of the interface that leads there, and with it the
/// port: `[fe80::7%2]:815`.
fn parse(text: &str) -> Option<SocketAddr> {
    let whole = text.parse::<SocketAddr>().ok();
    let whole = whole.or_else(|| {
        let address = text.parse::<IpAddr>().ok()?;
        Some(SocketAddr::new(address, DEFAULT_PORT))
    });
    whole.filter(|address| match address {
        SocketAddr::V4(_) => true,
        SocketAddr::V6(v6) => !v6.ip().is_unicast_link_local() || v6.scope_id() != 0,
    })
}

#[kunit_tests(rust_rdma_split_host)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    #[test]
    fn addresses_are_read_with_a_port_and_without() {
        let v4 = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7));
        let v6 = IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 7));
        assert_eq!(parse("10.0.0.7"), Some(SocketAddr::new(v4, DEFAULT_PORT)));
        assert_eq!(parse("10.0.0.7:99"), Some(SocketAddr::new(v4, 99)));
        assert_eq!(parse("fd00::7"), Some(SocketAddr::new(v6, DEFAULT_PORT)));
        assert_eq!(parse("[fd00::7]:99"), Some(SocketAddr::new(v6, 99)));
        let local = parse("[fe80::7%2]:99").map(|address| address.port());
        assert_eq!(local, Some(99));
        for wrong in [
            "",
            "fe80::7",
            "[fe80::7]:99",
            "10.0.0",
            "10.0.0.7:",
            "10.0.0.7:70000",
            "host",
            "10.0.0.7 ",
        ] {
            assert_eq!(parse(wrong), None);
        }
    }
}
