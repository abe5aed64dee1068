/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What build.rs gives to bindgen: the public verbs and the connection manager. */
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
