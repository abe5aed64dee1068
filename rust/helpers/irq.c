// SPDX-License-Identifier: GPL-2.0

#include <linux/interrupt.h>
#include <linux/irq.h>

__rust_helper int rust_helper_irq_update_affinity_hint(unsigned int irq, const struct cpumask *m)
{
	return irq_update_affinity_hint(irq, m);
}

/* Static inlines without CONFIG_SMP. */
__rust_helper int rust_helper_irq_set_affinity(unsigned int irq, const struct cpumask *cpumask)
{
	return irq_set_affinity(irq, cpumask);
}

__rust_helper int rust_helper_irq_set_affinity_notifier(unsigned int irq,
							struct irq_affinity_notify *notify)
{
	return irq_set_affinity_notifier(irq, notify);
}

__rust_helper const struct cpumask *rust_helper_irq_get_effective_affinity_mask(unsigned int irq)
{
	return irq_get_effective_affinity_mask(irq);
}
