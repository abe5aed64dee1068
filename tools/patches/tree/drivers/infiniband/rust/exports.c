// SPDX-License-Identifier: GPL-2.0
/*
 * Exports what is C, so that all modules in Rust share it.
 */
#include <linux/export.h>
#include <linux/module.h>

#define EXPORT_RUST_HELPER(sym) extern int sym; EXPORT_SYMBOL_GPL(sym)

#include "exports_generated.h"

MODULE_DESCRIPTION("Helpers of the Rust abstractions of RDMA");
MODULE_LICENSE("GPL");
