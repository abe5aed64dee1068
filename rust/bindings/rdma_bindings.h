/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers the RDMA bindings are generated from.
 */
#include <linux/hrtimer_types.h>

#include <linux/etherdevice.h>
#include <linux/ethtool.h>
#include <linux/hmm.h>
#include <linux/hmm-dma.h>
#include <linux/if_arp.h>
#include <linux/if_link.h>
#include <linux/if_vlan.h>
#include <linux/irq_poll.h>
#include <linux/netdevice.h>
#include <linux/pci.h>
#include <linux/rtnetlink.h>
#include <linux/skbuff.h>
#include <net/devlink.h>
#include <net/gso.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_umem_odp.h>
#include <rdma/ib_verbs.h>
#include <rdma/iter.h>
#include <rdma/iw_cm.h>
#include <rdma/rdma_cm.h>
#include <rdma/rdma_netlink.h>
#include <rdma/uverbs_ioctl.h>
#include <rdma/uverbs_types.h>

#include "../interrupts.h"
