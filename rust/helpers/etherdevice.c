// SPDX-License-Identifier: GPL-2.0

#include <linux/etherdevice.h>

__rust_helper bool rust_helper_is_valid_ether_addr(const u8 *addr)
{
	return is_valid_ether_addr(addr);
}

__rust_helper void rust_helper_eth_random_addr(u8 *addr)
{
	eth_random_addr(addr);
}

__rust_helper void rust_helper_eth_hw_addr_random(struct net_device *dev)
{
	eth_hw_addr_random(dev);
}

__rust_helper void rust_helper_eth_hw_addr_set(struct net_device *dev, const u8 *addr)
{
	eth_hw_addr_set(dev, addr);
}
