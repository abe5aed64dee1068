/* SPDX-License-Identifier: GPL-2.0 */
/* What build.rs gives to bindgen: the connection manager, and the public verbs. */
#include <rdma/rdma_cma.h>
