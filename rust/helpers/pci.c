// SPDX-License-Identifier: GPL-2.0

#include <linux/pci.h>

__rust_helper int rust_helper_pci_domain_nr(struct pci_bus *bus)
{
	return pci_domain_nr(bus);
}

__rust_helper bool rust_helper_pci_ari_enabled(struct pci_bus *bus)
{
	return pci_ari_enabled(bus);
}
