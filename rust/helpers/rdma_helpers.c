// SPDX-License-Identifier: GPL-2.0

#include <asm/barrier.h>

#include "rdma_helpers.h"

void rust_helper_dma_wmb(void)
{
	dma_wmb();
}

void rust_helper_dma_rmb(void)
{
	dma_rmb();
}
