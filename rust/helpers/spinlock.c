// SPDX-License-Identifier: GPL-2.0

#include <linux/irqflags.h>
#include <linux/percpu.h>
#include <linux/preempt.h>
#include <linux/spinlock.h>

/*
 * Guards in Rust can be dropped in any order: what the first lock found is
 * restored by who gives the last one back. For as long as the kernel has no
 * local_interrupt_disable() that counts, and no spin_lock_irq_disable() with
 * that.
 */
#ifdef CONFIG_PREEMPT_RT
/* Nothing runs in an interrupt, and locks leave it on. */
static inline void interrupts_disable(void) { }
static inline void interrupts_enable(void) { }
#else
struct interrupts_off {
	unsigned long flags;
	unsigned int depth;
};

static DEFINE_PER_CPU(struct interrupts_off, interrupts_off);

static inline void interrupts_disable(void)
{
	unsigned long flags;

	/* Outermost, so that who was woken meanwhile runs as soon as he may. */
	preempt_disable();
	local_irq_save(flags);
	if (__this_cpu_inc_return(interrupts_off.depth) == 1)
		__this_cpu_write(interrupts_off.flags, flags);
}

static inline void interrupts_enable(void)
{
	unsigned long flags = __this_cpu_read(interrupts_off.flags);

	if (!__this_cpu_dec_return(interrupts_off.depth))
		local_irq_restore(flags);
	preempt_enable();
}
#endif

__rust_helper bool rust_helper_irqs_disabled(void)
{
	return irqs_disabled();
}

__rust_helper void rust_helper_spin_lock_irq_disable(spinlock_t *lock)
	__acquires(lock)
{
	interrupts_disable();
	spin_lock(lock);
}

__rust_helper void rust_helper_spin_unlock_irq_enable(spinlock_t *lock)
	__releases(lock)
{
	spin_unlock(lock);
	interrupts_enable();
}

__rust_helper bool rust_helper_spin_trylock_irq_disable(spinlock_t *lock)
{
	interrupts_disable();
	if (spin_trylock(lock))
		return true;
	interrupts_enable();
	return false;
}
