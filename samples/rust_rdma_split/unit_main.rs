// SPDX-License-Identifier: GPL-2.0

//! The I/O unit of the split driver: lends an interface of its machine to hosts.
//!
//! ```text
//! modprobe rust_rdma_split_unit lan=eth1 key=0x8f1d03a2c1b77e55
//! cat /sys/kernel/debug/rust_rdma_split_unit/hosts
//! ```
//!
//! Each host has an address of its own on the LAN. Frames to it, to its groups, or to all go to the host; its frames
//! go to the LAN, and to other hosts of this I/O unit. The machine keeps its interface: its own frames come and go as
//! before. As with macvlan, machine and hosts do not reach each other by that interface.
//! `Documentation/split.md` has the protocol; `unit/` what is done with frames and requests.

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
pub mod link;
pub mod unit;

use frames::{MAX_MTU, OVERHEAD};
use kernel::debugfs;
use kernel::prelude::*;
use link::{Listener, Options, Totals};
use protocol::{Service, Variant, DEFAULT_PORT};
use unit::{Hosts, Lent, Unit};

module_string!(lan, "Name of the interface that is lent to hosts");

module! {
    type: UnitModule,
    name: "rust_rdma_split_unit",
    authors: ["Ferrite contributors"],
    description: "Lends a network interface to hosts at the far end of RDMA connections",
    license: "GPL",
    params: {
        port: u16 {
            default: 815,
            description: "Where hosts connect to",
        },
        hosts: u32 {
            default: 64,
            description: "Hosts at a time, at most",
        },
        hosts_of_one: u32 {
            default: 4,
            description: "Of these, hosts from one address, at most",
        },
        threshold: u32 {
            default: 256,
            description: "Frames of up to so many bytes travel in messages",
        },
        trust: u8 {
            default: 0,
            description: "1: hosts may take any address that nobody has here, send with others, and have all frames",
        },
        key: u64 {
            default: 0,
            description: "What hosts have to know, which are told the same: 64 random bits",
        },
        insecure: u8 {
            default: 0,
            description: "1: there need not be a key; without one who can connect is a host, any user of their machines too",
        },
        separate_indication: u8 {
            default: 0,
            description: "1: a message tells of each write, in place of immediate data",
        },
    },
}

// What `module!` takes is a number only.
const _: () = assert!(DEFAULT_PORT == 815);

/// The module: one interface, if it was told which.
struct UnitModule {
    _serving: Option<Serving>,
}

struct Serving {
    // In this order: without a listener there is no host, and nobody uses the interface.
    _listener: Listener<Unit>,
    _totals: Pin<KBox<debugfs::File<Totals<Unit>>>>,
    _shown: Pin<KBox<debugfs::File<Hosts>>>,
    _folder: debugfs::Dir,
    _lent: Lent,
}

impl kernel::Module for UnitModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let name = lan.get();
        if name.is_empty() {
            pr_info!("there is nothing to lend: lan=INTERFACE\n");
            return Ok(Self { _serving: None });
        }
        let secret = *module_parameters::key.value();
        if secret == 0 && *module_parameters::insecure.value() == 0 {
            pr_err!("a key that hosts have to know is needed: key=NUMBER (or insecure=1)\n");
            return Err(EINVAL);
        }
        let most = *module_parameters::hosts.value() as usize;
        let lent = Lent::new(name, most, *module_parameters::trust.value() != 0)?;
        let mut options = Options::new(Service::Acknowledged, Variant::Push, MAX_MTU + OVERHEAD);
        options.threshold = *module_parameters::threshold.value();
        options.separate_indication = *module_parameters::separate_indication.value() != 0;
        options.hosts = most;
        options.hosts_of_one = *module_parameters::hosts_of_one.value() as usize;
        options.key = secret;
        let folder = debugfs::Dir::new(c"rust_rdma_split_unit");
        let shown = KBox::pin_init(
            folder.read_only_file(c"hosts", Ok::<_, Error>(lent.hosts())),
            GFP_KERNEL,
        )?;
        let listener = Listener::new(*module_parameters::port.value(), options, lent.unit()?)?;
        let totals = KBox::pin_init(
            folder.read_only_file(c"statistics", Ok::<_, Error>(listener.totals())),
            GFP_KERNEL,
        )?;
        Ok(Self {
            _serving: Some(Serving {
                _listener: listener,
                _totals: totals,
                _shown: shown,
                _folder: folder,
                _lent: lent,
            }),
        })
    }
}
