// SPDX-License-Identifier: GPL-2.0

#include <linux/capability.h>
#include <linux/completion.h>
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/cred.h>
#include <linux/dim.h>
#include <linux/dma-mapping.h>
#include <linux/etherdevice.h>
#include <linux/hmm.h>
#include <linux/hmm-dma.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/memcontrol.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/netdevice.h>
#include <linux/pci-p2pdma.h>
#include <linux/pid.h>
#include <linux/ratelimit.h>
#include <linux/rtnetlink.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/sched/mm.h>
#include <linux/sched/task.h>
#include <linux/spinlock.h>
#include <linux/user_namespace.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <net/devlink.h>
#include <net/netlink.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_umem_odp.h>
#include <rdma/ib_verbs.h>
#include <rdma/iter.h>
#include <rdma/rdma_netlink.h>
#include <rdma/uverbs_ioctl.h>

#include <asm/barrier.h>

#include "rdma_helpers.h"

void rust_helper_dma_wmb(void)
{
	dma_wmb();
}

void rust_helper_dma_rmb(void)
{
	dma_rmb();
}

void rust_helper_mb(void)
{
	/* What is ordered against what is for the caller to say. */
	mb();
}

void rust_helper_wmb(void)
{
	/* What is ordered against what is for the caller to say. */
	wmb();
}

bool rust_helper_need_resched(void)
{
	return need_resched();
}

void rust_helper_reinit_completion(struct completion *x)
{
	reinit_completion(x);
}

unsigned int rust_helper_memalloc_noreclaim_save(void)
{
	return memalloc_noreclaim_save();
}

void rust_helper_memalloc_noreclaim_restore(unsigned int flags)
{
	memalloc_noreclaim_restore(flags);
}

void rust_helper_ratelimit_default_init(struct ratelimit_state *rs)
{
	ratelimit_default_init(rs);
}

void *rust_helper_memcg_get_current(void)
{
	return get_mem_cgroup_from_mm(current->mm);
}

void *rust_helper_memcg_enter(void *memcg)
{
	return set_active_memcg(memcg);
}

void rust_helper_memcg_put(void *memcg)
{
	mem_cgroup_put(memcg);
}

/*
 * In a user namespace, who made the outermost one answers for its users. Root
 * makes them for others, containers for example: each of those answers for
 * itself, by a number beyond those of users.
 */
u64 rust_helper_current_accountable_user(void)
{
	struct user_namespace *ns = current_user_ns(), *outermost = NULL;

	for (; ns->parent; ns = ns->parent)
		outermost = ns;
	if (!outermost)
		return from_kuid(&init_user_ns, current_uid());
	if (uid_eq(outermost->owner, GLOBAL_ROOT_UID))
		return BIT_ULL(32) | outermost->ns.inum;
	return from_kuid(&init_user_ns, outermost->owner);
}

bool rust_helper_current_is_kthread(void)
{
	return current->flags & PF_KTHREAD;
}

bool rust_helper_current_is_dying(void)
{
	return fatal_signal_pending(current);
}

bool rust_helper_capable_sys_resource(void)
{
	return capable(CAP_SYS_RESOURCE);
}

bool rust_helper_capable_sys_resource_noaudit(void)
{
	return ns_capable_noaudit(&init_user_ns, CAP_SYS_RESOURCE);
}

bool rust_helper_capable_net_admin(void)
{
	return capable(CAP_NET_ADMIN);
}

bool rust_helper_capable_net_admin_noaudit(void)
{
	return ns_capable_noaudit(&init_user_ns, CAP_NET_ADMIN);
}

u64 rust_helper_total_memory(void)
{
	return (u64)totalram_pages() << PAGE_SHIFT;
}

unsigned long rust_helper_spin_lock_irqsave(spinlock_t *lock)
	__acquires(lock)
{
	unsigned long flags;

	spin_lock_irqsave(lock, flags);
	return flags;
}

void rust_helper_spin_unlock_irqrestore(spinlock_t *lock, unsigned long flags)
	__releases(lock)
{
	spin_unlock_irqrestore(lock, flags);
}

bool rust_helper_spin_trylock_irqsave(spinlock_t *lock, unsigned long *flags)
{
	return spin_trylock_irqsave(lock, *flags);
}

void rust_helper_xa_init_irq(struct xarray *xa)
{
	xa_init_flags(xa, XA_FLAGS_LOCK_IRQ);
}

int rust_helper_xa_insert_irq(struct xarray *xa, unsigned long index,
			      void *entry)
{
	return xa_insert_irq(xa, index, entry, GFP_KERNEL);
}

void *rust_helper_xa_erase_irqsave(struct xarray *xa, unsigned long index)
{
	unsigned long flags;
	void *entry;

	xa_lock_irqsave(xa, flags);
	entry = __xa_erase(xa, index);
	xa_unlock_irqrestore(xa, flags);
	return entry;
}

unsigned long rust_helper_xa_lock_irqsave(struct xarray *xa)
	__acquires(&xa->xa_lock)
{
	unsigned long flags;

	xa_lock_irqsave(xa, flags);
	return flags;
}

void rust_helper_xa_unlock_irqrestore(struct xarray *xa, unsigned long flags)
	__releases(&xa->xa_lock)
{
	xa_unlock_irqrestore(xa, flags);
}

struct devlink *rust_helper_rdma_devlink_alloc(const struct devlink_ops *ops,
					       size_t priv_size,
					       struct device *dev)
{
	return devlink_alloc(ops, priv_size, dev);
}

struct workqueue_struct *rust_helper_rdma_alloc_ordered_workqueue(const char *name)
{
	return alloc_ordered_workqueue("%s", WQ_MEM_RECLAIM, name);
}

struct workqueue_struct *rust_helper_rdma_alloc_unbound_workqueue(const char *name)
{
	return alloc_workqueue("%s", WQ_UNBOUND | WQ_MEM_RECLAIM, 0, name);
}

struct workqueue_struct *rust_helper_rdma_alloc_fault_workqueue(const char *name,
								int max_active)
{
	/* Bringing pages in needs memory: no part of giving memory back. */
	return alloc_workqueue("%s", WQ_UNBOUND, max_active, name);
}

unsigned long rust_helper_pci_bar_flags(struct pci_dev *pdev, int bar)
{
	return pci_resource_flags(pdev, bar);
}

int rust_helper_rdma_clear_io(u64 address, size_t length)
{
	void __iomem *io = ioremap(address, length);

	if (!io)
		return -ENOMEM;
	memset_io(io, 0, length);
	iounmap(io);
	return 0;
}

/* Static inlines without CONFIG_HOTPLUG_CPU. */
void rust_helper_cpus_read_lock(void)
{
	cpus_read_lock();
}

void rust_helper_cpus_read_unlock(void)
{
	cpus_read_unlock();
}

int rust_helper_irq_set_affinity_cpu(unsigned int irq, unsigned int cpu)
{
	int err;

	if (cpu >= nr_cpu_ids || !cpu_online(cpu))
		return -EINVAL;
	/* irq_set_affinity_and_hint() does not tell whether the first worked. */
	err = irq_set_affinity(irq, cpumask_of(cpu));
	return err ?: irq_update_affinity_hint(irq, cpumask_of(cpu));
}

void rust_helper_irq_clear_affinity_hint(unsigned int irq)
{
	irq_update_affinity_hint(irq, NULL);
}

/* A static inline without CONFIG_SMP. */
int rust_helper_irq_set_affinity_notifier(unsigned int irq,
					  struct irq_affinity_notify *notify)
{
	return irq_set_affinity_notifier(irq, notify);
}

const struct cpumask *
rust_helper_irq_get_effective_affinity_mask(unsigned int irq)
{
	return irq_get_effective_affinity_mask(irq);
}

void rust_helper_dim_init_work(struct dim *dim,
			       void (*func)(struct work_struct *work))
{
	INIT_WORK(&dim->work, func);
}

void rust_helper_dim_schedule_work(struct dim *dim)
{
	schedule_work(&dim->work);
}

void rust_helper_dim_update_sample(u16 event_ctr, u64 packets, u64 bytes,
				   struct dim_sample *s)
{
	dim_update_sample(event_ctr, packets, bytes, s);
}

void rust_helper_rtnl_lock(void)
{
	rtnl_lock();
}

void rust_helper_rtnl_unlock(void)
{
	rtnl_unlock();
}

/*
 * An interface of a device on some bus. Anybody may make the others, of any
 * address: ipvlan, macvlan and MACsec take even the permanent one of what they
 * are stacked on. A failover interface has the parent of the interface it
 * hides, and is made before it.
 */
bool rust_helper_rdma_netdev_is_hardware(const struct net_device *ndev)
{
	return ndev->dev.parent && !netif_is_failover(ndev);
}

bool rust_helper_rdma_netdev_matches(const struct net_device *ndev,
				     const u8 *mac)
{
	return ndev->type == ARPHRD_ETHER && ndev->addr_len == ETH_ALEN &&
	       ether_addr_equal_unaligned(ndev->perm_addr, mac);
}

/* Whether the interface is that of PCI function @function of the slot @ibdev is in. */
bool rust_helper_rdma_netdev_of_function(const struct net_device *ndev,
					 struct ib_device *ibdev, u8 function)
{
	const struct device *dev = ndev->dev.parent;
	struct pci_dev *own, *other;
	unsigned int devfn;
	bool same;

	if (!dev || !dev_is_pci(ibdev->dev.parent))
		return false;
	own = to_pci_dev(ibdev->dev.parent);
	if (pci_ari_enabled(own->bus))
		devfn = function;
	else if (function < 8)
		devfn = PCI_DEVFN(PCI_SLOT(own->devfn), function);
	else
		return false;
	/* Not pci_get_slot(): error recovery takes RTNL with pci_bus_sem held. */
	other = pci_get_domain_bus_and_slot(pci_domain_nr(own->bus),
					    own->bus->number, devfn);
	if (!other)
		return false;
	/*
	 * There may be a bus of the function's own in between, as virtio's. The
	 * interface keeps its parent, and nothing above that: pointers are
	 * compared, not followed.
	 */
	same = dev == &other->dev || dev->parent == &other->dev;
	pci_dev_put(other);
	return ndev->type == ARPHRD_ETHER && same;
}

bool rust_helper_rdma_netdev_in_net(const struct net_device *ndev,
				    struct ib_device *ibdev)
{
	return net_eq(dev_net(ndev), rdma_dev_net(ibdev));
}

bool rust_helper_rdma_netdev_is_above(struct net_device *lower,
				      struct net_device *ndev)
{
	bool above;

	rcu_read_lock();
	above = netdev_has_upper_dev_all_rcu(lower, ndev);
	rcu_read_unlock();
	return above;
}

struct net_device *rust_helper_rdma_netdev_first(struct ib_device *ibdev)
{
	return first_net_device(rdma_dev_net(ibdev));
}

struct net_device *rust_helper_rdma_netdev_next(struct net_device *ndev)
{
	return next_net_device(ndev);
}

void rust_helper_rdma_netdev_hold(struct net_device *ndev)
{
	dev_hold(ndev);
}

void rust_helper_rdma_netdev_put(struct net_device *ndev)
{
	dev_put(ndev);
}

unsigned int rust_helper_rdma_netdev_mtu(const struct net_device *ndev)
{
	return READ_ONCE(ndev->mtu);
}

bool rust_helper_rdma_netdev_is_up(const struct net_device *ndev)
{
	return netif_running(ndev) && netif_carrier_ok(ndev);
}

void rust_helper_rdma_netdev_mac(const struct net_device *ndev, u8 *mac)
{
	ether_addr_copy(mac, ndev->dev_addr);
}

struct net_device *rust_helper_rdma_notifier_netdev(void *info)
{
	return netdev_notifier_info_to_dev(info);
}

int rust_helper_rdma_register_netdevice_notifier(struct notifier_block *nb)
{
	return register_netdevice_notifier(nb);
}

int rust_helper_rdma_unregister_netdevice_notifier(struct notifier_block *nb)
{
	return unregister_netdevice_notifier(nb);
}

int rust_helper_rdma_iboe_get_mtu(int mtu)
{
	return iboe_get_mtu(mtu);
}

struct ib_device *rust_helper_rdma_alloc_device(size_t size)
{
	return _ib_alloc_device(size, &init_net);
}

void rust_helper_rdma_device_set_parent(struct ib_device *ibdev,
					struct device *parent)
{
	ibdev->dev.parent = parent;
}

struct device *rust_helper_rdma_device_parent(struct ib_device *ibdev)
{
	return ibdev->dev.parent;
}

void rust_helper_rdma_format_version(char *text, u16 major, u16 minor,
				     u16 patch)
{
	snprintf(text, IB_FW_VERSION_NAME_MAX, "%u.%u.%u", major, minor, patch);
}

struct uverbs_attr_bundle *
rust_helper_rdma_udata_to_uverbs_attr_bundle(struct ib_udata *udata)
{
	return rdma_udata_to_uverbs_attr_bundle(udata);
}

struct ib_udata *
rust_helper_rdma_driver_udata(struct uverbs_attr_bundle *attrs)
{
	return &attrs->driver_udata;
}

void *rust_helper_uverbs_attr_get_obj(const struct uverbs_attr_bundle *attrs,
				      u16 idx)
{
	return uverbs_attr_get_obj(attrs, idx);
}

int rust_helper__uverbs_copy_from(void *to,
				  const struct uverbs_attr_bundle *attrs,
				  size_t idx, size_t size)
{
	return _uverbs_copy_from(to, attrs, idx, size);
}

int rust_helper_ib_is_udata_in_empty(struct ib_udata *udata)
{
	return ib_is_udata_in_empty(udata);
}

int rust_helper_ib_respond_empty_udata(struct ib_udata *udata)
{
	return ib_respond_empty_udata(udata);
}

struct ib_umem *rust_helper_ib_umem_get_va(struct ib_device *device,
					   unsigned long addr, size_t size,
					   int access)
{
	return ib_umem_get_va(device, addr, size, access);
}

size_t rust_helper_ib_umem_num_dma_blocks(struct ib_umem *umem,
					  unsigned long pgsz)
{
	return ib_umem_num_dma_blocks(umem, pgsz);
}

int rust_helper_ib_umem_offset(struct ib_umem *umem)
{
	return ib_umem_offset(umem);
}

void rust_helper_rdma_umem_block_iter_start(struct ib_block_iter *biter,
					    struct ib_umem *umem,
					    unsigned long pgsz)
{
	__rdma_umem_block_iter_start(biter, umem, pgsz);
}

bool rust_helper_rdma_umem_block_iter_next(struct ib_block_iter *biter)
{
	return __rdma_umem_block_iter_next(biter);
}

dma_addr_t
rust_helper_rdma_block_iter_dma_address(struct ib_block_iter *biter)
{
	return rdma_block_iter_dma_address(biter);
}

u64 rust_helper_rdma_user_mmap_get_offset(const struct rdma_user_mmap_entry *entry)
{
	return rdma_user_mmap_get_offset(entry);
}

/*
 * For a context that is refused, which nobody sees yet. Where it was asked for
 * by ioctl(), the core (as of 7.2) frees it without giving back its reference
 * to the task, so that whoever is refused stays in memory for good. Where it
 * was asked for by write(), the core gives back what is there.
 */
void rust_helper_rdma_forget_task(struct ib_ucontext *ucontext)
{
	struct task_struct *task = ucontext->res.task;

	ucontext->res.task = NULL;
	if (task)
		put_task_struct(task);
}

int rust_helper_rdma_user_mmap_bar(struct ib_ucontext *ucontext,
				   struct vm_area_struct *vma, u64 address,
				   bool write_combine,
				   struct rdma_user_mmap_entry *entry)
{
	pgprot_t prot = write_combine ? pgprot_writecombine(vma->vm_page_prot) :
					pgprot_noncached(vma->vm_page_prot);

	return rdma_user_mmap_io(ucontext, vma, PHYS_PFN(address),
				 entry->npages * PAGE_SIZE, prot, entry);
}

struct ib_ucontext *
rust_helper_ib_uverbs_get_ucontext(struct uverbs_attr_bundle *attrs)
{
	return ib_uverbs_get_ucontext(attrs);
}

bool rust_helper_uverbs_attr_is_valid(const struct uverbs_attr_bundle *attrs,
				      unsigned int idx)
{
	return uverbs_attr_is_valid(attrs, idx);
}

void *rust_helper_rdma_nl_driver_start(struct sk_buff *msg)
{
	return nla_nest_start(msg, RDMA_NLDEV_ATTR_DRIVER);
}

void rust_helper_rdma_nl_driver_end(struct sk_buff *msg, void *nest)
{
	nla_nest_end(msg, nest);
}

void rust_helper_rdma_nl_driver_cancel(struct sk_buff *msg, void *nest)
{
	nla_nest_cancel(msg, nest);
}

void *rust_helper_rdma_nl_stat_start(struct sk_buff *msg)
{
	return nla_nest_start(msg, RDMA_NLDEV_ATTR_STAT_HWCOUNTERS);
}

/* A page is taken back before another takes its place. */
bool rust_helper_rdma_odp_is_same_page(unsigned long mapped, unsigned long pfn)
{
	return !WARN_ON_ONCE((mapped ^ pfn) & ~HMM_PFN_FLAGS);
}

#ifdef CONFIG_INFINIBAND_ON_DEMAND_PAGING

struct ib_umem_odp *rust_helper_rdma_odp_alloc_root(struct ib_device *device,
						    int access)
{
	struct ib_umem_odp *odp = ib_umem_odp_alloc_implicit(device, access);

	/* A root has no notifier that would keep the mm. */
	if (!IS_ERR(odp))
		mmgrab(odp->umem.owning_mm);
	return odp;
}

struct ib_umem_odp *
rust_helper_rdma_odp_alloc_child(struct ib_umem_odp *root, unsigned long addr,
				 size_t size,
				 const struct mmu_interval_notifier_ops *ops)
{
	return ib_umem_odp_alloc_child(root, addr, size, ops);
}

void rust_helper_rdma_odp_release(struct ib_umem_odp *odp)
{
	ib_umem_odp_release(odp);
}

void rust_helper_rdma_odp_release_root(struct ib_umem_odp *odp)
{
	struct mm_struct *mm = odp->umem.owning_mm;

	ib_umem_odp_release(odp);
	mmdrop(mm);
}

/*
 * Tries to bring in the pages of a range, and takes the lock: what @pfns says
 * of them holds as long as that is held. -EBUSY where some were taken back
 * meanwhile: then try again. As ib_umem_odp_map_dma_and_lock(), but with a list
 * of the caller's own. hmm_range_fault() writes it without the lock, so that
 * those who bring pages in at the same time would spoil a list for all of them,
 * or wait for each other's pages.
 */
int rust_helper_rdma_odp_bring_in_and_lock(struct ib_umem_odp *odp,
					   unsigned long start,
					   unsigned long *pfns, size_t pages,
					   bool write, bool fault)
{
	struct mm_struct *mm = odp->umem.owning_mm;
	struct hmm_range range = {
		.notifier = &odp->notifier,
		.start = start,
		.end = start + pages * PAGE_SIZE,
		.hmm_pfns = pfns,
	};
	struct task_struct *task;
	int ret;

	if (start < ib_umem_start(odp) || range.end > ib_umem_end(odp))
		return -EFAULT;
	if (fault)
		range.default_flags = HMM_PFN_REQ_FAULT |
				      (write ? HMM_PFN_REQ_WRITE : 0);
	task = get_pid_task(odp->tgid, PIDTYPE_PID);
	if (!task)
		return -EINVAL;
	if (!mmget_not_zero(mm)) {
		ret = -EINVAL;
		goto put_task;
	}

	range.notifier_seq = mmu_interval_read_begin(&odp->notifier);
	mmap_read_lock(mm);
	ret = hmm_range_fault(&range);
	mmap_read_unlock(mm);
	if (ret)
		goto put_mm;
	mutex_lock(&odp->umem_mutex);
	if (mmu_interval_read_retry(&odp->notifier, range.notifier_seq)) {
		mutex_unlock(&odp->umem_mutex);
		ret = -EBUSY;
	}

put_mm:
	mmput_async(mm);
put_task:
	put_task_struct(task);
	return ret;
}

/*
 * The mappings of on-demand memory, with a list of pages of the caller's own,
 * of which zero is a page that is not mapped. The memory's own list is never
 * written: releasing the memory finds nothing to unmap.
 */
static struct hmm_dma_map odp_mappings(struct ib_umem_odp *odp,
				       unsigned long *mapped)
{
	struct hmm_dma_map map = odp->map;

	map.pfn_list = mapped;
	return map;
}

/*
 * Under the lock: the address of a page that is noted in @mapped, whether it is
 * mapped already or not. One that cannot be mapped is noted no more.
 */
int rust_helper_rdma_odp_map_page(struct ib_umem_odp *odp,
				  unsigned long *mapped, size_t index,
				  dma_addr_t *dma)
{
	struct device *dev = odp->umem.ibdev->dma_device;
	struct hmm_dma_map map = odp_mappings(odp, mapped);
	struct pci_p2pdma_map_state p2pdma = {};

	*dma = hmm_dma_map_pfn(dev, &map, index, &p2pdma);
	odp->map.state = map.state;
	if (dma_mapping_error(dev, *dma)) {
		if (!(mapped[index] & HMM_PFN_DMA_MAPPED))
			mapped[index] = 0;
		return -EFAULT;
	}
	return 0;
}

bool rust_helper_rdma_odp_writable(struct ib_umem_odp *odp)
{
	return odp->umem.writable;
}

/* Under the lock: gives a page back, if it is mapped. */
void rust_helper_rdma_odp_unmap_page(struct ib_umem_odp *odp,
				     unsigned long *mapped, size_t index)
{
	struct device *dev = odp->umem.ibdev->dma_device;
	struct hmm_dma_map map = odp_mappings(odp, mapped);
	unsigned long pfn = mapped[index];

	if (hmm_dma_unmap_pfn(dev, &map, index) && (pfn & HMM_PFN_WRITE))
		set_page_dirty(compound_head(hmm_pfn_to_page(pfn)));
	mapped[index] = 0;
}

/*
 * Under the lock: a page that is mapped never goes back to the system. It is
 * taken from the process only after this.
 */
void rust_helper_rdma_odp_keep_page(unsigned long pfn)
{
	if ((pfn & HMM_PFN_VALID) && !is_pci_p2pdma_page(hmm_pfn_to_page(pfn)))
		get_page(hmm_pfn_to_page(pfn));
}

#else

struct ib_umem_odp *rust_helper_rdma_odp_alloc_root(struct ib_device *device,
						    int access)
{
	return ERR_PTR(-EOPNOTSUPP);
}

struct ib_umem_odp *
rust_helper_rdma_odp_alloc_child(struct ib_umem_odp *root, unsigned long addr,
				 size_t size,
				 const struct mmu_interval_notifier_ops *ops)
{
	return ERR_PTR(-EOPNOTSUPP);
}

void rust_helper_rdma_odp_release(struct ib_umem_odp *odp) { }
void rust_helper_rdma_odp_release_root(struct ib_umem_odp *odp) { }

int rust_helper_rdma_odp_bring_in_and_lock(struct ib_umem_odp *odp,
					   unsigned long start,
					   unsigned long *pfns, size_t pages,
					   bool write, bool fault)
{
	return -EOPNOTSUPP;
}

int rust_helper_rdma_odp_map_page(struct ib_umem_odp *odp,
				  unsigned long *mapped, size_t index,
				  dma_addr_t *dma)
{
	return -EOPNOTSUPP;
}

bool rust_helper_rdma_odp_writable(struct ib_umem_odp *odp)
{
	return false;
}

void rust_helper_rdma_odp_unmap_page(struct ib_umem_odp *odp,
				     unsigned long *mapped, size_t index)
{
}

void rust_helper_rdma_odp_keep_page(unsigned long pfn) { }

#endif /* CONFIG_INFINIBAND_ON_DEMAND_PAGING */

void rust_helper_rdma_odp_set_private(struct ib_umem_odp *odp, void *data)
{
	/* Invalidations may come since the memory was made. */
	mutex_lock(&odp->umem_mutex);
	odp->private = data;
	mutex_unlock(&odp->umem_mutex);
}

void *rust_helper_rdma_odp_private(struct ib_umem_odp *odp)
{
	return odp->private;
}

unsigned long rust_helper_rdma_odp_start(struct ib_umem_odp *odp)
{
	return ib_umem_start(odp);
}

unsigned long rust_helper_rdma_odp_end(struct ib_umem_odp *odp)
{
	return ib_umem_end(odp);
}

void rust_helper_rdma_odp_lock(struct ib_umem_odp *odp)
{
	mutex_lock(&odp->umem_mutex);
}

void rust_helper_rdma_odp_unlock(struct ib_umem_odp *odp)
{
	mutex_unlock(&odp->umem_mutex);
}

/*
 * Begins an invalidation: NULL where it would have to sleep and may not; else
 * the memory is locked. The range is empty until the private pointer is set.
 */
struct ib_umem_odp *
rust_helper_rdma_odp_begin(struct mmu_interval_notifier *notifier,
			   const struct mmu_notifier_range *range,
			   unsigned long seq, u64 *start, u64 *end)
{
	struct ib_umem_odp *odp =
		container_of(notifier, struct ib_umem_odp, notifier);

	if (!mmu_notifier_range_blockable(range))
		return NULL;
	mutex_lock(&odp->umem_mutex);
	mmu_interval_set_seq(notifier, seq);
	*start = 0;
	*end = 0;
	if (odp->private) {
		*start = max_t(u64, ib_umem_start(odp), range->start);
		*end = min_t(u64, ib_umem_end(odp), range->end);
	}
	return odp;
}

struct ib_pd *rust_helper_ib_alloc_pd(struct ib_device *device)
{
	return ib_alloc_pd(device, 0);
}

void rust_helper_ib_dealloc_pd(struct ib_pd *pd)
{
	ib_dealloc_pd(pd);
}

struct ib_cq *rust_helper_ib_alloc_cq(struct ib_device *device, int nr_cqe,
				      int comp_vector)
{
	return ib_alloc_cq(device, NULL, nr_cqe, comp_vector, IB_POLL_WORKQUEUE);
}

struct ib_qp *rust_helper_ib_create_qp(struct ib_pd *pd,
				       struct ib_qp_init_attr *attr)
{
	return ib_create_qp(pd, attr);
}

void rust_helper_ib_destroy_qp(struct ib_qp *qp)
{
	ib_destroy_qp(qp);
}

int rust_helper_ib_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
			     const struct ib_send_wr **bad_wr)
{
	return ib_post_send(qp, wr, bad_wr);
}

int rust_helper_ib_post_recv(struct ib_qp *qp, const struct ib_recv_wr *wr)
{
	return ib_post_recv(qp, wr, NULL);
}

/* Software devices take kernel addresses for DMA addresses. */
void *rust_helper_ib_dma_alloc_coherent(struct ib_device *dev, size_t size,
					dma_addr_t *handle)
{
	void *cpu;

	if (!ib_uses_virt_dma(dev))
		return dma_alloc_coherent(dev->dma_device, size, handle,
					  GFP_KERNEL);
	cpu = kzalloc(size, GFP_KERNEL);
	*handle = (uintptr_t)cpu;
	return cpu;
}

void rust_helper_ib_dma_free_coherent(struct ib_device *dev, size_t size,
				      void *cpu, dma_addr_t handle)
{
	if (ib_uses_virt_dma(dev))
		kfree(cpu);
	else
		dma_free_coherent(dev->dma_device, size, cpu, handle);
}

/* Maps a region to memory that is mapped for DMA already. */
int rust_helper_rdma_map_mr_dma(struct ib_mr *mr, dma_addr_t addr, u32 length,
				u32 page_size)
{
	struct scatterlist sg;
	int ret;

	sg_init_table(&sg, 1);
	sg_dma_address(&sg) = addr;
	sg_dma_len(&sg) = length;
	ret = ib_map_mr_sg(mr, &sg, 1, NULL, page_size);
	if (ret < 0)
		return ret;
	return ret == 1 ? 0 : -EINVAL;
}
