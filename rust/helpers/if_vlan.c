// SPDX-License-Identifier: GPL-2.0

#include <linux/if_vlan.h>

/* Inlines where the kernel has no VLANs. */
__rust_helper int rust_helper_vlan_vid_add(struct net_device *dev, __be16 proto, u16 vid)
{
	return vlan_vid_add(dev, proto, vid);
}

__rust_helper void rust_helper_vlan_vid_del(struct net_device *dev, __be16 proto, u16 vid)
{
	vlan_vid_del(dev, proto, vid);
}
