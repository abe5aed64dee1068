// SPDX-License-Identifier: GPL-2.0

//! Driver for the Ferrite RDMA adapter.

#[path = "../../../../include/src/abi/mod.rs"]
pub mod abi;
#[path = "../../../../rust/bindings/mod.rs"]
pub mod bindings;
pub mod extension;
#[path = "../../../../rust/kernel_ext/mod.rs"]
pub mod kernel_ext;
#[path = "../../../../rust/net/mod.rs"]
pub mod net;
#[path = "../../../../rust/rdma/mod.rs"]
pub mod rdma;

mod ah;
mod bars;
mod binding;
mod caps;
mod commands;
mod cq;
mod cqp;
mod debugfs;
mod device;
mod dm;
mod dma_types;
mod doorbell_bar;
mod doorbell_pages;
mod eq;
mod event_class;
mod event_log;
mod flow;
mod gids;
mod growth;
mod handler;
mod hardware;
mod interface;
mod lent;
mod moderation;
mod mr;
mod mw;
mod named;
mod numbers;
mod occupancy;
mod odp;
mod parting;
mod pci;
mod pd;
mod port;
mod priority;
mod qp;
mod qp_counters;
mod qp_event;
mod queue;
mod raw_dump;
mod recovery;
mod requests;
mod ring;
mod service;
mod shares;
mod srq;
mod steering;
mod tpt;
mod ucontext;
mod vector_map;
mod wq;
mod wqe;
mod xrc;

// As `module_pci_driver!`, for a driver that wants to know of resets.
kernel::module_driver!(<T>, kernel_ext::pci::Adapter<T>, {
    type: pci::FerriteDriver,
    name: "ferrite",
    authors: ["Ferrite contributors"],
    description: "Ferrite RDMA adapter driver",
    license: "GPL",
    params: {
        command_timeout_ms: u32 {
            default: 0,
            description: "Milliseconds after which a device that does not answer a command is given up; 0 (default): as long as the device says",
        },
        eq_log_entries: u8 {
            default: 0,
            description: "Base-2 logarithm of the entries that event queues begin with but for the first, at least 4; 0 (default): room for what the device can raise",
        },
    },
});
