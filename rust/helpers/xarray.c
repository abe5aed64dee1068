// SPDX-License-Identifier: GPL-2.0

#include <linux/xarray.h>

__rust_helper int rust_helper_xa_insert_irq(struct xarray *xa, unsigned long index, void *entry,
					    gfp_t gfp)
{
	return xa_insert_irq(xa, index, entry, gfp);
}

__rust_helper unsigned long rust_helper_xa_lock_irqsave(struct xarray *xa)
	__acquires(&xa->xa_lock)
{
	unsigned long flags;

	xa_lock_irqsave(xa, flags);
	return flags;
}

__rust_helper void rust_helper_xa_unlock_irqrestore(struct xarray *xa, unsigned long flags)
	__releases(&xa->xa_lock)
{
	xa_unlock_irqrestore(xa, flags);
}
