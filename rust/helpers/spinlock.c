// SPDX-License-Identifier: GPL-2.0

#include <linux/irqflags.h>

__rust_helper bool rust_helper_irqs_disabled(void)
{
	return irqs_disabled();
}
