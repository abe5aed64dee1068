// SPDX-License-Identifier: GPL-2.0

#include <linux/dim.h>

__rust_helper void rust_helper_dim_update_sample(u16 event_ctr, u64 packets, u64 bytes,
						 struct dim_sample *s)
{
	dim_update_sample(event_ctr, packets, bytes, s);
}
