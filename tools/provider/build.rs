// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Makes the bindings of the public verbs headers.

use build_support::{bind, Wanted};

fn main() {
    bind(&Wanted {
        types: "(ibv|verbs|ib_uverbs|uverbs)_.*",
        constants: "(IBV|IB|UVERBS)_.*",
        functions: "ibv_resolve_eth_l2_from_gid|_ibv_query_gid_ex|ibv_query_qp_data_in_order",
        libraries: &["ibverbs"],
    });
    // Programs that call what is in ferritedv.h are linked with it by this name.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libferrite.so.1");
}
