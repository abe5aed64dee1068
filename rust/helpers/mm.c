// SPDX-License-Identifier: GPL-2.0

#include <linux/hmm.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/pgtable.h>
#include <linux/sched/mm.h>

__rust_helper unsigned int rust_helper_memalloc_noio_save(void)
{
	return memalloc_noio_save();
}

__rust_helper void rust_helper_memalloc_noio_restore(unsigned int flags)
{
	memalloc_noio_restore(flags);
}

__rust_helper unsigned int rust_helper_memalloc_noreclaim_save(void)
{
	return memalloc_noreclaim_save();
}

__rust_helper void rust_helper_memalloc_noreclaim_restore(unsigned int flags)
{
	memalloc_noreclaim_restore(flags);
}

__rust_helper unsigned long rust_helper_totalram_pages(void)
{
	return totalram_pages();
}

__rust_helper struct page *rust_helper_hmm_pfn_to_page(unsigned long hmm_pfn)
{
	return hmm_pfn_to_page(hmm_pfn);
}

__rust_helper bool rust_helper_is_pci_p2pdma_page(const struct page *page)
{
	return is_pci_p2pdma_page(page);
}

__rust_helper void rust_helper_get_page(struct page *page)
{
	get_page(page);
}

__rust_helper void *rust_helper_page_address(struct page *page)
{
	return page_address(page);
}

__rust_helper pgprot_t rust_helper_pgprot_noncached(pgprot_t prot)
{
	return pgprot_noncached(prot);
}

/* A macro on some architectures. */
__rust_helper pgprot_t rust_helper_pgprot_writecombine(pgprot_t prot)
{
	return pgprot_writecombine(prot);
}

/* Inlines where the kernel has no lockdep. */
__rust_helper void rust_helper_fs_reclaim_acquire(gfp_t gfp_mask)
{
	fs_reclaim_acquire(gfp_mask);
}

__rust_helper void rust_helper_fs_reclaim_release(gfp_t gfp_mask)
{
	fs_reclaim_release(gfp_mask);
}
