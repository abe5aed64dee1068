// SPDX-License-Identifier: GPL-2.0

#include <linux/irqflags.h>
#include <linux/spinlock.h>

#include "../interrupts.h"

__rust_helper bool rust_helper_irqs_disabled(void)
{
	return irqs_disabled();
}

/*
 * Guards in Rust can be dropped in any order, other than what
 * spin_lock_irqsave() demands. For as long as the kernel has no
 * spin_lock_irq_disable().
 */
__rust_helper void rust_helper_spin_lock_irq_disable(spinlock_t *lock)
	__acquires(lock)
{
	rust_interrupts_disable();
	spin_lock(lock);
}

__rust_helper void rust_helper_spin_unlock_irq_enable(spinlock_t *lock)
	__releases(lock)
{
	spin_unlock(lock);
	rust_interrupts_enable();
}

__rust_helper bool rust_helper_spin_trylock_irq_disable(spinlock_t *lock)
{
	rust_interrupts_disable();
	if (spin_trylock(lock))
		return true;
	rust_interrupts_enable();
	return false;
}
