/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What Ferrite devices can do beyond the verbs. Link with -lferrite.
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

#ifdef __cplusplus
}
#endif

#endif /* FERRITEDV_H */
