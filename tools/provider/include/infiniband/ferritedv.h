/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What Ferrite devices can do beyond the verbs. Link with -lferrite.
 *
 * Completion queues that move, priorities of vectors; further down, regions
 * that share memory and its translation, and memory that is registered through
 * a send queue.
 *
 * A completion queue belongs to a completion vector: a handler in the kernel,
 * with an interrupt of its own, that wakes who waits for the events of the
 * queue. ibv_create_cq() is told the first one; the functions here change it
 * while the queue is in use, by any number of threads. No completion and no
 * event is lost, none comes twice, and moderation (ibv_modify_cq()) stays.
 * Vectors have priorities.
 */
#ifndef FERRITEDV_H
#define FERRITEDV_H

#include <stdint.h>
#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * No vector: the queue is polled only. ibv_req_notify_cq() may be called; its
 * event comes when the queue has a vector again.
 */
#define FERRITEDV_NO_VECTOR 0xffffffffU

/*
 * The vector whose interrupt arrives at the processor that the calling thread
 * runs on, as /proc/irq has it; where none arrives there, the vectors are dealt
 * out to processors in turn. The queue stays with that processor: where
 * interrupts are steered elsewhere it goes to a vector that arrives there.
 * Nothing follows when the thread goes elsewhere: call again. A new queue with
 * vector 0 is treated the same way.
 */
#define FERRITEDV_LOCAL_VECTOR 0xfffffffeU

/*
 * Moves a completion queue to a vector, less than num_comp_vectors of its
 * context, or one of the above.
 *
 * Returns 0, or an errno value: EINVAL where there is no such vector, EPERM
 * where it is named and of low latency (below) and the caller has not
 * CAP_NET_ADMIN: by FERRITEDV_LOCAL_VECTOR that one gets another then,
 * EOPNOTSUPP where the queue is of another provider or the kernel's driver
 * is too old, EIO where the device does not answer any more. ibv_destroy_cq()
 * says EBUSY while another thread is in one of these functions with the same
 * queue, as it does with ibv_modify_cq().
 */
int ferritedv_modify_cq_vector(struct ibv_cq *cq, uint32_t vector);

/*
 * Tells the vector that a completion queue is at, FERRITEDV_NO_VECTOR for
 * none. Returns 0 or an errno value, as above.
 */
int ferritedv_query_cq_vector(struct ibv_cq *cq, uint32_t *vector);

/*
 * Priorities of a vector. One of low latency comes before all bulk ones: queue
 * pairs whose completion queues are there have their turn first in the device
 * (others have one turn in eight at the least), its interrupt is raised first
 * and not moderated, and it is served first where several vectors arrive at
 * one processor. All are bulk at first.
 */
#define FERRITEDV_BULK 0U
#define FERRITEDV_LOW_LATENCY 1U

/*
 * Sets the priority of a vector, for all who use it and until it is set again,
 * or the driver lets go of the device or recovers it.
 *
 * What one vector gains others lose, so that this needs CAP_NET_ADMIN (not only
 * in a user namespace), and so does putting completion queues there: without it
 * ibv_create_cq() with a vector of low latency gets the next bulk one. Those
 * that are there already stay.
 *
 * Returns 0, or an errno value: EPERM, EINVAL where there is no such vector or
 * priority, EOPNOTSUPP where the context is of another provider, the device
 * has no priorities or the kernel's driver is too old, EIO where the device
 * does not answer any more.
 */
int ferritedv_modify_vector_priority(struct ibv_context *context,
				     uint32_t vector, uint32_t priority);

/*
 * Tells the priority of a vector, to anybody. Returns 0 or an errno value, as
 * above.
 */
int ferritedv_query_vector_priority(struct ibv_context *context,
				    uint32_t vector, uint32_t *priority);

/*
 * Shared translation
 *
 * Registers the memory of mr once more: the same bytes at the same addresses,
 * with keys of its own, in any protection domain of the same context and with
 * the rights of access (as of ibv_reg_mr()), which may be fewer or more than mr
 * has. Nothing is pinned: both regions have the same pages and one table of
 * them in the device, however large they are, so that this takes neither the
 * time nor the memory (RLIMIT_MEMLOCK) of another ibv_reg_mr().
 *
 * Each is a region like any other, and knows nothing of the other one: it is
 * given back by ibv_dereg_mr(), in any order, and changed by ibv_rereg_mr();
 * what happens to one does not change the other. The memory stays pinned until
 * the last one is gone. Regions that share can be shared again.
 *
 * mr is of ibv_reg_mr(), ibv_reg_mr_iova(), ibv_reg_dmabuf_mr(),
 * ibv_import_mr() or this function. Returns NULL and sets errno: EACCES where
 * access would let anybody write to memory that was registered for reading
 * only; EINVAL where mr is of another context, or is a list or of device
 * memory, or a right needs another (as of ibv_reg_mr()); EBUSY while another
 * thread is in ibv_rereg_mr() with mr; EOPNOTSUPP where pd is of another
 * provider, mr or access is of on-demand memory, or the kernel's driver is too
 * old; ENOMEM; EDQUOT and ENOSPC where a user, or all of them, have as many
 * keys as there may be, EAGAIN where the rdma cgroup has; EIO where the device
 * does not answer any more.
 */
struct ibv_mr *ferritedv_reg_shared_mr(struct ibv_pd *pd, struct ibv_mr *mr,
				       int access);

/*
 * Lists: registration through a send queue
 *
 * A list is a key that stands for pieces of regions, one after another, as if
 * they lay in one piece. ferritedv_alloc_list() makes the key, once;
 * a work request says what it stands for, as often as wanted, without the
 * kernel and without pinning anything: the pieces are of regions that the
 * program has registered already. The key can be used, here and by the peer,
 * by whatever comes behind that work request on the same queue pair: nobody
 * waits for its completion.
 *
 * A list gives no right that its pieces do not have. It ends with
 * IBV_WR_LOCAL_INV, with a message of the peer that invalidates it
 * (IBV_WR_SEND_WITH_INV), and with any of its regions: what was deregistered,
 * or registered anew (ibv_rereg_mr()), is out of reach through the list too.
 * Then another one can be registered under the same key, or better under the
 * next of its 256 (ibv_inc_rkey()), so that who still has the old one is
 * refused.
 */

/*
 * Among the rights of a list, and of a memory window that is bound
 * (ibv_mw_bind_info.mw_access_flags): one-touch. The list or window is gone
 * when the first message that writes to it is complete: a peer's write or
 * atomic, or the answer to a read of one's own that is placed there. A second
 * message is refused, so that no message of its own is needed to end it. What
 * a peer reads does not count. ibv_reg_mr() does not take it: register a list
 * of one piece.
 *
 * EOPNOTSUPP where the device has no such entries.
 */
#define FERRITEDV_ACCESS_ONE_TOUCH (1U << 30)

/* ibv_wc.opcode of ferritedv_post_register_list(). */
#define FERRITEDV_WC_REGISTER_LIST IBV_WC_DRIVER1

/* Most pieces of a list. */
#define FERRITEDV_MAX_PIECES 16

/* Lists can be registered. */
#define FERRITEDV_QP_LISTS (1U << 0)
/*
 * What happens when a registration fails its checks. Without this the queue
 * pair goes to the error state, and the connection has ended (IBV_QPT_UC: to
 * IBV_QPS_SQE, where receives go on). With it the send
 * queue is drained: what was posted before is finished, the registration
 * completes with its error, what was posted behind it is flushed (and so is
 * what is posted later), the queue pair is in state SQD and
 * IBV_EVENT_SQ_DRAINED is told. Receives and the peer's requests go on. The
 * program mends what was wrong, takes the queue pair to RTS (ibv_modify_qp(),
 * IBV_QP_STATE, and IBV_QP_CUR_STATE with IBV_QPS_SQD where another thread may
 * have done so already: that is refused then) and posts again.
 *
 * What is flushed has its completion, signaled or not: the completion queue
 * needs room for max_send_wr entries beside those of other queues, or it
 * overflows and the connection ends all the same.
 *
 * Of no effect on work requests that fail in other ways.
 */
#define FERRITEDV_QP_REGISTER_DRAINS (1U << 1)
/*
 * The peer reaches memory through bound windows only. What it reads, writes or
 * changes by the rkey of a region or a list is refused as without the right,
 * whatever rights that has, so that memory which others may reach is shown to
 * this peer piece by piece, and taken back at once. IBV_QPT_RC and IBV_QPT_UC.
 */
#define FERRITEDV_QP_WINDOWS_ONLY (1U << 2)

struct ferritedv_qp_init_attr {
	uint64_t comp_mask;	/* 0 */
	uint32_t flags;		/* FERRITEDV_QP_* */
	uint32_t reserved;	/* 0 */
};

/*
 * As ibv_create_qp_ex(), of a queue pair that can do more. With
 * FERRITEDV_QP_LISTS there is room for cap.max_send_wr work requests that are
 * registrations too, pieces and entries of a message being at most
 * cap.max_send_sge together; such a queue takes more memory.
 *
 * Returns NULL and sets errno, as ibv_create_qp_ex() does; EOPNOTSUPP where
 * the context is of another provider, or the device or the kernel's driver has
 * not what a flag asks for, EINVAL with any flag for another type than
 * IBV_QPT_RC, IBV_QPT_UC and, but for FERRITEDV_QP_WINDOWS_ONLY,
 * IBV_QPT_XRC_SEND.
 */
struct ibv_qp *ferritedv_create_qp(struct ibv_context *context,
				   struct ibv_qp_init_attr_ex *attr,
				   const struct ferritedv_qp_init_attr *more);

/*
 * Makes a key for lists of up to max_pieces pieces, 1 to FERRITEDV_MAX_PIECES.
 * It stands for nothing yet. Its first key is in lkey and rkey; these stay as
 * they are, whatever is registered: the program keeps account of the present
 * one. ibv_dereg_mr() gives it back, in use or not. It cannot be changed by
 * ibv_rereg_mr(), nor have windows.
 *
 * Returns NULL and sets errno: EOPNOTSUPP as above, EINVAL, ENOMEM; EDQUOT,
 * ENOSPC, EAGAIN and EIO as of ferritedv_reg_shared_mr().
 */
struct ibv_mr *ferritedv_alloc_list(struct ibv_pd *pd, uint32_t max_pieces);

struct ferritedv_list {
	struct ibv_mr *mr;		/* of ferritedv_alloc_list() */
	uint32_t key;			/* what its key is to be: ibv_inc_rkey() */
	uint32_t access;		/* IBV_ACCESS_*, FERRITEDV_ACCESS_ONE_TOUCH */
	uint64_t address;		/* of the first byte, to all who use it */
	const struct ibv_sge *pieces;	/* of regions: not of lists or windows */
	int num_pieces;			/* 1 to max_pieces */
	uint32_t comp_mask;		/* 0 */
};

struct ferritedv_message {
	const struct ibv_sge *sg_list;
	int num_sge;
	uint32_t invalidate_rkey;	/* a key of the peer's, as of IBV_WR_SEND_WITH_INV, or 0 */
	uint32_t remote_srqn;		/* of IBV_QPT_XRC_SEND */
	uint32_t comp_mask;		/* 0 */
};

/*
 * Registers a list, in the order of the send queue. access may be of
 * IBV_ACCESS_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ, _REMOTE_ATOMIC,
 * _FLUSH_GLOBAL, _ZERO_BASED (addresses are then from 0 on) and the one above;
 * each piece needs the same rights, and IBV_ACCESS_LOCAL_WRITE where the peer
 * may write or run atomics. send_flags are of IBV_SEND_SIGNALED and
 * IBV_SEND_FENCE.
 *
 * Returns 0, or an errno value, and then nothing was posted: EOPNOTSUPP where
 * the queue pair is of another provider or the device has no lists, EINVAL
 * where the queue pair was not made for them or is not in a state to send, the
 * key is not of this list, a right has no meaning, or there are no pieces or
 * too many; ENOMEM where the queue is full.
 *
 * What only the device can know is told by the completion: IBV_WC_LOC_PROT_ERR
 * where a piece does not pass its checks, gives less than is asked for or is of
 * another protection domain, or the list is still registered; vendor_err says
 * which (chapter 4 of the device specification). Nothing has changed then.
 */
int ferritedv_post_register_list(struct ibv_qp *qp, uint64_t wr_id,
				 unsigned int send_flags,
				 const struct ferritedv_list *list);

/*
 * Registers a list and sends a message, as one work request with one
 * completion (IBV_WC_SEND): the message tells the peer the key. Where the
 * registration fails, nothing is sent. Where the message fails, it fails as
 * any send does, and the list is registered. Not on IBV_QPT_UC. send_flags are
 * those of a send, without IBV_SEND_INLINE. Returns as above.
 */
int ferritedv_post_register_list_and_send(struct ibv_qp *qp, uint64_t wr_id,
					  unsigned int send_flags,
					  const struct ferritedv_list *list,
					  const struct ferritedv_message *message);

/*
 * The same between ibv_wr_start() and ibv_wr_complete(), which tells the
 * error, of a queue pair of ferritedv_create_qp() with send_ops_flags; wr_id
 * and wr_flags are set before. The message of the second is told by
 * ibv_wr_set_sge() or ibv_wr_set_sge_list(), its shared receive queue by
 * ibv_wr_set_xrc_srqn().
 */
void ferritedv_wr_register_list(struct ibv_qp_ex *qp,
				const struct ferritedv_list *list);
void ferritedv_wr_register_list_and_send(struct ibv_qp_ex *qp,
					 const struct ferritedv_list *list,
					 uint32_t invalidate_rkey);

#ifdef __cplusplus
}
#endif

#endif /* FERRITEDV_H */
