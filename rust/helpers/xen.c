// SPDX-License-Identifier: GPL-2.0

#include <xen/xen.h>

__rust_helper bool rust_helper_xen_pv_domain(void)
{
	return xen_pv_domain();
}

__rust_helper bool rust_helper_xen_initial_domain(void)
{
	return xen_initial_domain();
}
