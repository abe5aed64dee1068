/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * Private part of the uverbs commands of Ferrite devices.
 *
 * Generated from include/src/abi/uverbs.rs, which tells what the fields mean. Do not edit.
 */
#ifndef FERRITE_ABI_H
#define FERRITE_ABI_H

#include <linux/types.h>

#define FERRITE_UVERBS_ABI_VERSION 2
#define FERRITE_CONTEXT_QUERY_RESPONSE 4096
#define FERRITE_CONTEXT_QUERY_CLOCK 4097
#define FERRITE_CONTEXT_QUERY_CLOCK_NOW 4098
#define FERRITE_PD_QUERY 4096
#define FERRITE_PD_QUERY_HANDLE 4096
#define FERRITE_DM_ALLOC_OFFSET 4096
#define FERRITE_DM_QUERY 4096
#define FERRITE_DM_QUERY_HANDLE 4096
#define FERRITE_DM_QUERY_OFFSET 4097
#define FERRITE_DM_QUERY_LENGTH 4098
#define FERRITE_CQ_MOVE 4096
#define FERRITE_CQ_MOVE_HANDLE 4096
#define FERRITE_CQ_MOVE_VECTOR 4097
#define FERRITE_CQ_QUERY 4097
#define FERRITE_CQ_QUERY_HANDLE 4096
#define FERRITE_CQ_QUERY_VECTOR 4097
#define FERRITE_VECTOR_MODIFY 4096
#define FERRITE_VECTOR_MODIFY_VECTOR 4096
#define FERRITE_VECTOR_MODIFY_PRIORITY 4097
#define FERRITE_VECTOR_QUERY 4097
#define FERRITE_VECTOR_QUERY_VECTOR 4096
#define FERRITE_VECTOR_QUERY_PRIORITY 4097
#define FERRITE_CQ_VECTOR_LOCAL 0xfffffffeU
#define FERRITE_CQ_VECTOR_NONE 0xffffffffU
#define FERRITE_QP_LISTS 1
#define FERRITE_QP_REGISTER_DRAINS 2
#define FERRITE_QP_WINDOWS_ONLY 4
#define FERRITE_MR_LIST 1
#define FERRITE_MR_SHARED 2

struct ferrite_context_request {
	__u32 abi_version;
	__u32 reserved;
};

struct ferrite_context_response {
	__aligned_u64 doorbell_offset;
	__u32 doorbell_size;
	__u32 max_sge;
	__u32 max_inline;
	__u8 sq_max_log_blocks;
	__u8 rq_max_log_entries;
	__u8 cq_max_log_entries;
	__u8 clock_bits;
	__aligned_u64 features;
	__u32 clock_khz;
	__u32 max_message;
	__aligned_u64 reserved[3];
};

struct ferrite_pd_response {
	__u32 pdn;
	__u32 reserved;
};

struct ferrite_cq_request {
	__aligned_u64 buffer;
	__aligned_u64 length;
	__u32 record_offset;
	__u32 log_entries;
};

struct ferrite_cq_response {
	__u32 cqn;
	__u32 entries;
};

struct ferrite_qp_request {
	__aligned_u64 buffer;
	__aligned_u64 length;
	__u32 sq_offset;
	__u32 rq_offset;
	__u32 record_offset;
	__u8 sq_log_blocks;
	__u8 rq_log_entries;
	__u8 rq_log_stride;
	__u8 flags;
	__aligned_u64 reserved;
};

struct ferrite_hash_request {
	__u32 types;
	__u32 reserved;
	__u8 key[40];
};

struct ferrite_wq_request {
	__aligned_u64 buffer;
	__aligned_u64 length;
	__u32 rq_offset;
	__u32 record_offset;
	__u8 rq_log_entries;
	__u8 rq_log_stride;
	__u16 reserved[3];
};

struct ferrite_qp_response {
	__u32 qpn;
	__u32 reserved;
};

struct ferrite_mr_request {
	__u32 kind;
	__u32 max_pieces;
	__u32 key;
	__u32 reserved;
};

struct ferrite_srq_request {
	__aligned_u64 buffer;
	__aligned_u64 length;
	__u32 ring_offset;
	__u32 record_offset;
	__u8 log_entries;
	__u8 log_stride;
	__u16 reserved[3];
};

struct ferrite_srq_response {
	__u32 srqn;
	__u32 reserved;
};

#endif /* FERRITE_ABI_H */
