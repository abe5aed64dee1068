/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What build.rs gives to bindgen: the public verbs and the kernel's uverbs commands. */
#include <infiniband/verbs.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_cmds.h>
