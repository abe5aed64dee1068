/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Out-of-line copies of inline functions and macros that Rust needs. The
 * prefix rust_helper_ is stripped in the bindings.
 */
#ifndef RUST_RDMA_HELPERS_H
#define RUST_RDMA_HELPERS_H

#include <linux/types.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>

struct device;
struct net_device;
struct pci_dev;
struct work_struct;
struct workqueue_struct;

/* Barriers against a device. */
void rust_helper_dma_wmb(void);
void rust_helper_dma_rmb(void);

#endif /* RUST_RDMA_HELPERS_H */
