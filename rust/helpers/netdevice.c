// SPDX-License-Identifier: GPL-2.0

#include <linux/netdevice.h>
#include <linux/rtnetlink.h>

__rust_helper void rust_helper_dev_hold(struct net_device *dev)
{
	dev_hold(dev);
}

__rust_helper void rust_helper_dev_put(struct net_device *dev)
{
	dev_put(dev);
}

__rust_helper struct net *rust_helper_dev_net(const struct net_device *dev)
{
	return dev_net(dev);
}

__rust_helper struct net_device *rust_helper_first_net_device(struct net *net)
{
	return first_net_device(net);
}

__rust_helper struct net_device *rust_helper_next_net_device(struct net_device *dev)
{
	return next_net_device(dev);
}

__rust_helper bool rust_helper_netif_is_failover(const struct net_device *dev)
{
	return netif_is_failover(dev);
}

__rust_helper bool rust_helper_netif_running(const struct net_device *dev)
{
	return netif_running(dev);
}

__rust_helper bool rust_helper_netif_device_present(const struct net_device *dev)
{
	return netif_device_present(dev);
}

__rust_helper bool rust_helper_netif_carrier_ok(const struct net_device *dev)
{
	return netif_carrier_ok(dev);
}

/* Of struct net_device the bindings have the name only; these are its fields. */
__rust_helper bool rust_helper_netdev_is_registered(const struct net_device *dev)
{
	return READ_ONCE(dev->reg_state) == NETREG_REGISTERED;
}

__rust_helper struct device *rust_helper_netdev_parent(const struct net_device *dev)
{
	return dev->dev.parent;
}

__rust_helper unsigned short rust_helper_netdev_type(const struct net_device *dev)
{
	return dev->type;
}

__rust_helper unsigned char rust_helper_netdev_addr_len(const struct net_device *dev)
{
	return dev->addr_len;
}

__rust_helper const u8 *rust_helper_netdev_perm_addr(const struct net_device *dev)
{
	return dev->perm_addr;
}

__rust_helper const u8 *rust_helper_netdev_dev_addr(const struct net_device *dev)
{
	return dev->dev_addr;
}

__rust_helper unsigned int rust_helper_netdev_mtu(const struct net_device *dev)
{
	return READ_ONCE(dev->mtu);
}

/* Somebody holds it, and where lockdep knows, it is this task. */
__rust_helper void rust_helper_assert_rtnl(void)
{
	ASSERT_RTNL();
	WARN_ON_ONCE(!lockdep_rtnl_is_held());
}
