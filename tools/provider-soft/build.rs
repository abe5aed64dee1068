// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//! Makes the bindings of the public verbs headers.

use build_support::{bind, Wanted};

fn main() {
    bind(&Wanted {
        types: "(ibv|verbs|ib_uverbs|uverbs)_.*",
        constants: "(IBV|IB|UVERBS)_.*",
        functions: "ibv_query_qp_data_in_order",
        libraries: &["ibverbs"],
    });
}
