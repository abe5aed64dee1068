// SPDX-License-Identifier: GPL-2.0

#include <linux/netdevice.h>

__rust_helper void rust_helper_netif_napi_add(struct net_device *dev, struct napi_struct *napi,
					      int (*poll)(struct napi_struct *, int))
{
	netif_napi_add(dev, napi, poll);
}

__rust_helper void rust_helper___netif_napi_del(struct napi_struct *napi)
{
	__netif_napi_del(napi);
}

__rust_helper bool rust_helper_napi_schedule(struct napi_struct *napi)
{
	return napi_schedule(napi);
}

__rust_helper gro_result_t rust_helper_napi_gro_receive(struct napi_struct *napi,
							struct sk_buff *skb)
{
	return napi_gro_receive(napi, skb);
}

__rust_helper void rust_helper_local_bh_disable(void)
{
	local_bh_disable();
}

__rust_helper void rust_helper_local_bh_enable(void)
{
	local_bh_enable();
}
