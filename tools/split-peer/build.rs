// SPDX-License-Identifier: GPL-2.0
//! Makes the bindings of the connection manager's header.

use build_support::{bind, Wanted};

fn main() {
    bind(&Wanted {
        types: "(ibv|rdma)_.*",
        constants: "(IBV|RDMA)_.*",
        functions: "(ibv|rdma)_.*",
        libraries: &["rdmacm", "ibverbs"],
    });
}
