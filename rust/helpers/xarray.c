// SPDX-License-Identifier: GPL-2.0

#include <linux/xarray.h>

__rust_helper int rust_helper_xa_insert_irq(struct xarray *xa, unsigned long index, void *entry,
					    gfp_t gfp)
{
	return xa_insert_irq(xa, index, entry, gfp);
}

/* A constant with a cast, which bindgen does not take for one. */
__rust_helper gfp_t rust_helper_xa_flags_account(void)
{
	return XA_FLAGS_ACCOUNT;
}
