// SPDX-License-Identifier: GPL-2.0

#include <rdma/uverbs_ioctl.h>

__rust_helper int rust_helper_ib_is_udata_in_empty(struct ib_udata *udata)
{
	return ib_is_udata_in_empty(udata);
}

__rust_helper int rust_helper_ib_respond_empty_udata(struct ib_udata *udata)
{
	return ib_respond_empty_udata(udata);
}

__rust_helper struct uverbs_attr_bundle *
rust_helper_rdma_udata_to_uverbs_attr_bundle(struct ib_udata *udata)
{
	return rdma_udata_to_uverbs_attr_bundle(udata);
}

__rust_helper bool rust_helper_uverbs_attr_is_valid(const struct uverbs_attr_bundle *attrs,
						    unsigned int idx)
{
	return uverbs_attr_is_valid(attrs, idx);
}

__rust_helper void *rust_helper_uverbs_attr_get_obj(const struct uverbs_attr_bundle *attrs, u16 idx)
{
	return uverbs_attr_get_obj(attrs, idx);
}

__rust_helper int rust_helper__uverbs_copy_from(void *to, const struct uverbs_attr_bundle *attrs,
						size_t idx, size_t size)
{
	return _uverbs_copy_from(to, attrs, idx, size);
}

__rust_helper struct ib_ucontext *
rust_helper_ib_uverbs_get_ucontext(const struct uverbs_attr_bundle *attrs)
{
	return ib_uverbs_get_ucontext(attrs);
}
