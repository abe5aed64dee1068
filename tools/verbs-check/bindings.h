/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* What build.rs gives to bindgen: the public verbs. */
#include <infiniband/verbs.h>
