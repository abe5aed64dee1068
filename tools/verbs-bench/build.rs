// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the bindings of the public verbs and rdma_cm headers.

use build_support::{bind, Wanted};

fn main() {
    bind(&Wanted {
        types: "(ibv|rdma)_.*|verbs_context",
        constants: "(IBV|RDMA)_.*",
        functions: "(ibv|rdma)_.*",
        libraries: &["ibverbs", "rdmacm"],
    });
}
