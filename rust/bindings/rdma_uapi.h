/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What drivers here add to the ioctl interface. A process that shares the
 * context of another asks for what the other was told when it made context,
 * protection domain or device memory.
 */
#ifndef RUST_RDMA_UAPI_H
#define RUST_RDMA_UAPI_H

#include <rdma/ib_verbs.h>
#include <rdma/uverbs_ioctl.h>

enum {
	/* Of querying a context: what the driver answers. */
	RDMA_CONTEXT_ATTR_RESPONSE = 1U << UVERBS_ID_NS_SHIFT,
	/* The time of the device's clock, for those who want it. */
	RDMA_CONTEXT_ATTR_CLOCK,
	/* The same, for those who want it at once or not at all. */
	RDMA_CONTEXT_ATTR_CLOCK_NOW,
};

enum {
	/* On a protection domain: finds out whether there is one. */
	RDMA_METHOD_PD_QUERY = 1U << UVERBS_ID_NS_SHIFT,
};

enum {
	RDMA_PD_QUERY_ATTR_HANDLE = 1U << UVERBS_ID_NS_SHIFT,
};

enum {
	/* Of allocating device memory: the offset to map it by. */
	RDMA_DM_ATTR_OFFSET = 1U << UVERBS_ID_NS_SHIFT,
};

enum {
	/* On device memory: what its maker was told. */
	RDMA_METHOD_DM_QUERY = 1U << UVERBS_ID_NS_SHIFT,
};

enum {
	RDMA_DM_QUERY_ATTR_HANDLE = 1U << UVERBS_ID_NS_SHIFT,
	RDMA_DM_QUERY_ATTR_OFFSET,
	RDMA_DM_QUERY_ATTR_LENGTH,
};

/* Device memory, and how a process gets at it. */
struct rdma_dm {
	struct ib_dm dm;
	u64 offset;
	u64 length;
};

#endif /* RUST_RDMA_UAPI_H */
