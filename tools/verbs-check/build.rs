// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes the bindings of the public verbs header.

use build_support::{bind, Wanted};

fn main() {
    bind(&Wanted {
        types: "(ibv|verbs)_.*",
        constants: "IBV_.*",
        functions: "_?ibv_.*",
        libraries: &["ibverbs"],
    });
}
