// SPDX-License-Identifier: GPL-2.0

#include <linux/if_vlan.h>

__rust_helper __be16 rust_helper_skb_vlan_proto(const struct sk_buff *skb)
{
	return skb->vlan_proto;
}

/* Inlines where the kernel has no VLANs. */
__rust_helper struct net_device *
rust_helper___vlan_find_dev_deep_rcu(struct net_device *dev, __be16 proto, u16 vid)
{
	return __vlan_find_dev_deep_rcu(dev, proto, vid);
}

__rust_helper int rust_helper_vlan_vid_add(struct net_device *dev, __be16 proto, u16 vid)
{
	return vlan_vid_add(dev, proto, vid);
}

__rust_helper void rust_helper_vlan_vid_del(struct net_device *dev, __be16 proto, u16 vid)
{
	vlan_vid_del(dev, proto, vid);
}
