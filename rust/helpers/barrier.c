// SPDX-License-Identifier: GPL-2.0

#include <asm/barrier.h>

__rust_helper void rust_helper_dma_wmb(void)
{
	dma_wmb();
}

__rust_helper void rust_helper_dma_rmb(void)
{
	dma_rmb();
}

__rust_helper void rust_helper_mb(void)
{
	/* What is ordered against what is for the caller to say. */
	mb();
}

__rust_helper void rust_helper_wmb(void)
{
	/* What is ordered against what is for the caller to say. */
	wmb();
}
