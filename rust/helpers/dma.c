// SPDX-License-Identifier: GPL-2.0

#include <linux/dma-mapping.h>

__rust_helper int rust_helper_dma_mapping_error(struct device *dev, dma_addr_t dma_addr)
{
	return dma_mapping_error(dev, dma_addr);
}

__rust_helper dma_addr_t rust_helper_dma_map_single(struct device *dev, void *ptr, size_t size,
						    enum dma_data_direction dir)
{
	return dma_map_single(dev, ptr, size, dir);
}

__rust_helper void rust_helper_dma_unmap_single(struct device *dev, dma_addr_t addr, size_t size,
						enum dma_data_direction dir)
{
	dma_unmap_single(dev, addr, size, dir);
}

__rust_helper dma_addr_t rust_helper_dma_map_page(struct device *dev, struct page *page,
						  size_t offset, size_t size,
						  enum dma_data_direction dir)
{
	return dma_map_page(dev, page, offset, size, dir);
}

__rust_helper void rust_helper_dma_unmap_page(struct device *dev, dma_addr_t addr, size_t size,
					      enum dma_data_direction dir)
{
	dma_unmap_page(dev, addr, size, dir);
}

__rust_helper void rust_helper_dma_sync_single_for_cpu(struct device *dev, dma_addr_t addr,
						       size_t size, enum dma_data_direction dir)
{
	dma_sync_single_for_cpu(dev, addr, size, dir);
}

__rust_helper void rust_helper_dma_sync_single_for_device(struct device *dev, dma_addr_t addr,
							  size_t size,
							  enum dma_data_direction dir)
{
	dma_sync_single_for_device(dev, addr, size, dir);
}
