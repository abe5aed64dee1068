// SPDX-License-Identifier: GPL-2.0

#include <linux/netdevice.h>
#include <linux/rtnetlink.h>

__rust_helper void *rust_helper_netdev_priv(const struct net_device *dev)
{
	return netdev_priv(dev);
}

__rust_helper void rust_helper_netif_tx_wake_all_queues(struct net_device *dev)
{
	netif_tx_wake_all_queues(dev);
}

__rust_helper void rust_helper_netif_tx_disable(struct net_device *dev)
{
	netif_tx_disable(dev);
}

__rust_helper void rust_helper_netif_stop_subqueue(struct net_device *dev, u16 queue)
{
	netif_stop_subqueue(dev, queue);
}

__rust_helper void rust_helper_netif_wake_subqueue(struct net_device *dev, u16 queue)
{
	netif_wake_subqueue(dev, queue);
}

__rust_helper bool rust_helper_netif_subqueue_stopped(const struct net_device *dev, u16 queue)
{
	return __netif_subqueue_stopped(dev, queue);
}

__rust_helper int rust_helper_dev_queue_xmit(struct sk_buff *skb)
{
	return dev_queue_xmit(skb);
}

__rust_helper void *rust_helper_rx_handler_data(const struct net_device *dev)
{
	return rcu_dereference(dev->rx_handler_data);
}

/* Of struct net_device the bindings have the name only; these are its fields. */
__rust_helper void rust_helper_netdev_set_ops(struct net_device *dev,
					      const struct net_device_ops *ops,
					      const struct ethtool_ops *ethtool_ops)
{
	dev->netdev_ops = ops;
	dev->ethtool_ops = ethtool_ops;
}

__rust_helper void rust_helper_netdev_set_mtu_range(struct net_device *dev, unsigned int mtu,
						    unsigned int min, unsigned int max)
{
	dev->mtu = mtu;
	dev->min_mtu = min;
	dev->max_mtu = max;
}

__rust_helper void rust_helper_netdev_set_max_mtu(struct net_device *dev, unsigned int max)
{
	WRITE_ONCE(dev->max_mtu, max);
}

__rust_helper void rust_helper_netdev_commit_mtu(struct net_device *dev, unsigned int mtu)
{
	WRITE_ONCE(dev->mtu, mtu);
}

__rust_helper void rust_helper_netdev_set_filters_vlans(struct net_device *dev)
{
	dev->features |= NETIF_F_HW_VLAN_CTAG_FILTER;
}

/* A frame to be sent is the driver's alone, and its address may change while it is up. */
__rust_helper void rust_helper_netdev_set_priv_flags(struct net_device *dev)
{
	dev->priv_flags &= ~IFF_TX_SKB_SHARING;
	dev->priv_flags |= IFF_LIVE_ADDR_CHANGE;
}

/* Offloads that can be turned off, and are on. VLANs above have those that do not mind the tag. */
__rust_helper void rust_helper_netdev_set_offloads(struct net_device *dev,
						   netdev_features_t features,
						   netdev_features_t of_vlans)
{
	dev->hw_features |= features;
	dev->features |= features | NETIF_F_HIGHDMA;
	dev->vlan_features |= of_vlans | NETIF_F_HIGHDMA;
}

__rust_helper netdev_features_t rust_helper_netdev_features(const struct net_device *dev)
{
	return READ_ONCE(dev->features);
}

__rust_helper netdev_features_t rust_helper_netif_f_gso_mask(void)
{
	return NETIF_F_GSO_MASK;
}

__rust_helper bool rust_helper_netdev_xmit_more(void)
{
	return netdev_xmit_more();
}

__rust_helper unsigned int
rust_helper_netdev_real_num_tx_queues(const struct net_device *dev)
{
	return READ_ONCE(dev->real_num_tx_queues);
}

__rust_helper void rust_helper_netdev_set_parent(struct net_device *dev, struct device *parent)
{
	SET_NETDEV_DEV(dev, parent);
}

__rust_helper unsigned int rust_helper_netdev_flags(const struct net_device *dev)
{
	return READ_ONCE(dev->flags);
}

__rust_helper const char *rust_helper_netdev_name_field(const struct net_device *dev)
{
	return dev->name;
}

__rust_helper unsigned int rust_helper_netdev_num_tx_queues(const struct net_device *dev)
{
	return dev->num_tx_queues;
}

__rust_helper bool rust_helper_netdev_has_random_addr(const struct net_device *dev)
{
	return dev->addr_assign_type == NET_ADDR_RANDOM;
}

__rust_helper struct net_device *rust_helper_napi_dev(const struct napi_struct *napi)
{
	return napi->dev;
}
