// SPDX-License-Identifier: GPL-2.0
/*
 * A module of its own needs its own copy of the helpers: they are not
 * exported.
 */
#include "../../rust/helpers/rdma_helpers.c"
