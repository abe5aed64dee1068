/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Out-of-line copies of inline functions and macros that Rust needs. The
 * prefix rust_helper_ is stripped in the bindings.
 */
#ifndef RUST_RDMA_HELPERS_H
#define RUST_RDMA_HELPERS_H

#include <linux/types.h>

struct completion;
struct cpumask;
struct ratelimit_state;
struct device;
struct devlink;
struct devlink_ops;
struct dim;
struct dim_sample;
struct ib_ah;
struct ib_block_iter;
struct ib_cq;
struct ib_device;
struct ib_gid_attr;
struct ib_mr;
struct ib_pd;
struct ib_port_attr;
struct ib_qp;
struct ib_udata;
struct ib_umem;
struct ib_umem_odp;
struct irq_affinity_notify;
struct mmu_interval_notifier;
struct mmu_interval_notifier_ops;
struct mmu_notifier_range;
struct net_device;
struct notifier_block;
struct pci_dev;
struct rdma_user_mmap_entry;
struct scatterlist;
struct sk_buff;
struct uverbs_attr_bundle;
struct vm_area_struct;
struct work_struct;
struct workqueue_struct;
struct xarray;

/* Barriers against a device. */
void rust_helper_dma_wmb(void);
void rust_helper_dma_rmb(void);
void rust_helper_mb(void);
void rust_helper_wmb(void);

/* devlink. */
struct devlink *rust_helper_rdma_devlink_alloc(const struct devlink_ops *ops,
					       size_t priv_size,
					       struct device *dev);

/* Completion, spinlock, xarray and workqueue. */
bool rust_helper_need_resched(void);
void rust_helper_reinit_completion(struct completion *x);
void rust_helper_ratelimit_default_init(struct ratelimit_state *rs);
unsigned long rust_helper_spin_lock_irqsave(spinlock_t *lock);
void rust_helper_spin_unlock_irqrestore(spinlock_t *lock, unsigned long flags);
bool rust_helper_spin_trylock_irqsave(spinlock_t *lock, unsigned long *flags);
void rust_helper_xa_init_irq(struct xarray *xa);
int rust_helper_xa_insert_irq(struct xarray *xa, unsigned long index,
			      void *entry);
void *rust_helper_xa_erase_irqsave(struct xarray *xa, unsigned long index);
unsigned long rust_helper_xa_lock_irqsave(struct xarray *xa);
void rust_helper_xa_unlock_irqrestore(struct xarray *xa, unsigned long flags);
struct workqueue_struct *rust_helper_rdma_alloc_ordered_workqueue(const char *name);
struct workqueue_struct *rust_helper_rdma_alloc_unbound_workqueue(const char *name);
struct workqueue_struct *rust_helper_rdma_alloc_fault_workqueue(const char *name,
								int max_active);

/* Who pays, and who does not wait for memory. */
unsigned int rust_helper_memalloc_noreclaim_save(void);
void rust_helper_memalloc_noreclaim_restore(unsigned int flags);
void *rust_helper_memcg_get_current(void);
void *rust_helper_memcg_enter(void *memcg);
void rust_helper_memcg_put(void *memcg);
u64 rust_helper_current_accountable_user(void);
bool rust_helper_capable_sys_resource(void);
bool rust_helper_capable_sys_resource_noaudit(void);
bool rust_helper_capable_net_admin(void);
bool rust_helper_capable_net_admin_noaudit(void);
u64 rust_helper_total_memory(void);
bool rust_helper_current_is_kthread(void);
bool rust_helper_current_is_dying(void);

/* BARs and device memory. */
unsigned long rust_helper_pci_bar_flags(struct pci_dev *pdev, int bar);
int rust_helper_rdma_clear_io(u64 address, size_t length);

/* Details of objects. */
void *rust_helper_rdma_nl_driver_start(struct sk_buff *msg);
void rust_helper_rdma_nl_driver_end(struct sk_buff *msg, void *nest);
void rust_helper_rdma_nl_driver_cancel(struct sk_buff *msg, void *nest);
void *rust_helper_rdma_nl_stat_start(struct sk_buff *msg);

/* Processors that come and go. */
void rust_helper_cpus_read_lock(void);
void rust_helper_cpus_read_unlock(void);

/* Interrupt affinity. */
int rust_helper_irq_set_affinity_cpu(unsigned int irq, unsigned int cpu);
void rust_helper_irq_clear_affinity_hint(unsigned int irq);
int rust_helper_irq_set_affinity_notifier(unsigned int irq,
					  struct irq_affinity_notify *notify);
const struct cpumask *
rust_helper_irq_get_effective_affinity_mask(unsigned int irq);

/* Interrupt moderation. */
void rust_helper_dim_init_work(struct dim *dim,
			       void (*func)(struct work_struct *work));
void rust_helper_dim_schedule_work(struct dim *dim);
void rust_helper_dim_update_sample(u16 event_ctr, u64 packets, u64 bytes,
				   struct dim_sample *s);

/* Network devices. */
void rust_helper_rtnl_lock(void);
void rust_helper_rtnl_unlock(void);
bool rust_helper_rdma_netdev_is_hardware(const struct net_device *ndev);
bool rust_helper_rdma_netdev_in_net(const struct net_device *ndev,
				    struct ib_device *ibdev);
bool rust_helper_rdma_netdev_is_above(struct net_device *lower,
				      struct net_device *ndev);
struct net_device *rust_helper_rdma_netdev_first(struct ib_device *ibdev);
struct net_device *rust_helper_rdma_netdev_next(struct net_device *ndev);
void rust_helper_rdma_netdev_put(struct net_device *ndev);
void rust_helper_rdma_netdev_hold(struct net_device *ndev);
bool rust_helper_rdma_netdev_matches(const struct net_device *ndev,
				     const u8 *mac);
bool rust_helper_rdma_netdev_of_function(const struct net_device *ndev,
					 struct ib_device *ibdev, u8 function);
unsigned int rust_helper_rdma_netdev_mtu(const struct net_device *ndev);
bool rust_helper_rdma_netdev_is_up(const struct net_device *ndev);
void rust_helper_rdma_netdev_mac(const struct net_device *ndev, u8 *mac);
struct net_device *rust_helper_rdma_notifier_netdev(void *info);
int rust_helper_rdma_register_netdevice_notifier(struct notifier_block *nb);
int rust_helper_rdma_unregister_netdevice_notifier(struct notifier_block *nb);
int rust_helper_rdma_iboe_get_mtu(int mtu);

/* Devices. */
struct ib_device *rust_helper_rdma_alloc_device(size_t size);
void rust_helper_rdma_device_set_parent(struct ib_device *ibdev,
					struct device *parent);
struct device *rust_helper_rdma_device_parent(struct ib_device *ibdev);
void rust_helper_rdma_format_version(char *text, u16 major, u16 minor,
				     u16 patch);

/* User requests, user memory and user mappings. */
struct uverbs_attr_bundle *
rust_helper_rdma_udata_to_uverbs_attr_bundle(struct ib_udata *udata);
struct ib_udata *
rust_helper_rdma_driver_udata(struct uverbs_attr_bundle *attrs);
void *rust_helper_uverbs_attr_get_obj(const struct uverbs_attr_bundle *attrs,
				      u16 idx);
int rust_helper__uverbs_copy_from(void *to,
				  const struct uverbs_attr_bundle *attrs,
				  size_t idx, size_t size);
int rust_helper_ib_is_udata_in_empty(struct ib_udata *udata);
int rust_helper_ib_respond_empty_udata(struct ib_udata *udata);
struct ib_umem *rust_helper_ib_umem_get_va(struct ib_device *device,
					   unsigned long addr, size_t size,
					   int access);
size_t rust_helper_ib_umem_num_dma_blocks(struct ib_umem *umem,
					  unsigned long pgsz);
int rust_helper_ib_umem_offset(struct ib_umem *umem);
void rust_helper_rdma_umem_block_iter_start(struct ib_block_iter *biter,
					    struct ib_umem *umem,
					    unsigned long pgsz);
bool rust_helper_rdma_umem_block_iter_next(struct ib_block_iter *biter);
dma_addr_t
rust_helper_rdma_block_iter_dma_address(struct ib_block_iter *biter);
u64 rust_helper_rdma_user_mmap_get_offset(const struct rdma_user_mmap_entry *entry);
void rust_helper_rdma_forget_task(struct ib_ucontext *ucontext);
int rust_helper_rdma_user_mmap_bar(struct ib_ucontext *ucontext,
				   struct vm_area_struct *vma, u64 address,
				   bool write_combine,
				   struct rdma_user_mmap_entry *entry);

/* On-demand memory. */
struct ib_umem_odp *rust_helper_rdma_odp_alloc_root(struct ib_device *device,
						    int access);
struct ib_umem_odp *
rust_helper_rdma_odp_alloc_child(struct ib_umem_odp *root, unsigned long addr,
				 size_t size,
				 const struct mmu_interval_notifier_ops *ops);
void rust_helper_rdma_odp_release(struct ib_umem_odp *odp);
void rust_helper_rdma_odp_release_root(struct ib_umem_odp *odp);
void rust_helper_rdma_odp_set_private(struct ib_umem_odp *odp, void *data);
void *rust_helper_rdma_odp_private(struct ib_umem_odp *odp);
unsigned long rust_helper_rdma_odp_start(struct ib_umem_odp *odp);
unsigned long rust_helper_rdma_odp_end(struct ib_umem_odp *odp);
int rust_helper_rdma_odp_bring_in_and_lock(struct ib_umem_odp *odp,
					   unsigned long start,
					   unsigned long *pfns, size_t pages,
					   bool write, bool fault);
int rust_helper_rdma_odp_map_page(struct ib_umem_odp *odp,
				  unsigned long *mapped, size_t index,
				  dma_addr_t *dma);
bool rust_helper_rdma_odp_is_same_page(unsigned long mapped, unsigned long pfn);
bool rust_helper_rdma_odp_writable(struct ib_umem_odp *odp);
void rust_helper_rdma_odp_lock(struct ib_umem_odp *odp);
void rust_helper_rdma_odp_unlock(struct ib_umem_odp *odp);
struct ib_umem_odp *
rust_helper_rdma_odp_begin(struct mmu_interval_notifier *notifier,
			   const struct mmu_notifier_range *range,
			   unsigned long seq, u64 *start, u64 *end);
void rust_helper_rdma_odp_unmap_page(struct ib_umem_odp *odp,
				     unsigned long *mapped, size_t index);
void rust_helper_rdma_odp_keep_page(unsigned long pfn);

/* Methods of the ioctl interface. */
struct ib_ucontext *
rust_helper_ib_uverbs_get_ucontext(struct uverbs_attr_bundle *attrs);
bool rust_helper_uverbs_attr_is_valid(const struct uverbs_attr_bundle *attrs,
				      unsigned int idx);

/* The kernel consumer's side of verbs. */
struct ib_pd *rust_helper_ib_alloc_pd(struct ib_device *device);
void rust_helper_ib_dealloc_pd(struct ib_pd *pd);
struct ib_cq *rust_helper_ib_alloc_cq(struct ib_device *device, int nr_cqe,
				      int comp_vector);
struct ib_qp *rust_helper_ib_create_qp(struct ib_pd *pd,
				       struct ib_qp_init_attr *attr);
void rust_helper_ib_destroy_qp(struct ib_qp *qp);
int rust_helper_ib_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
			     const struct ib_send_wr **bad_wr);
int rust_helper_ib_post_recv(struct ib_qp *qp, const struct ib_recv_wr *wr);
void *rust_helper_ib_dma_alloc_coherent(struct ib_device *dev, size_t size,
					dma_addr_t *handle);
void rust_helper_ib_dma_free_coherent(struct ib_device *dev, size_t size,
				      void *cpu, dma_addr_t handle);
int rust_helper_rdma_map_mr_dma(struct ib_mr *mr, dma_addr_t addr, u32 length,
				u32 page_size);

#endif /* RUST_RDMA_HELPERS_H */
