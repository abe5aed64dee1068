// SPDX-License-Identifier: Apache-2.0 OR MIT
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ferrite_fuzz::fuzz("commands", data));
