// SPDX-License-Identifier: GPL-2.0

/*
 * Interrupts that are off for as long as somebody wants it: who wants it last
 * restores what the first one found, in whichever order they are.
 *
 * For as long as the kernel has no local_interrupt_disable() that counts. In C,
 * as Rust has no variables per processor yet that a module can define.
 */

#include <linux/irqflags.h>
#include <linux/percpu.h>
#include <linux/preempt.h>

#include "interrupts.h"

#ifdef CONFIG_PREEMPT_RT
/*
 * Handlers of interrupts are threads, which sleep where a lock is taken. What
 * is not, such as irq_work that says so, must not take these locks.
 */
void rust_interrupts_disable(void) { }
void rust_interrupts_enable(void) { }
#else
struct interrupts_off {
	unsigned long flags;
	unsigned int depth;
};

static DEFINE_PER_CPU(struct interrupts_off, interrupts_off);

void rust_interrupts_disable(void)
{
	unsigned long flags;

	/* Outermost, so that who was woken meanwhile runs as soon as he may. */
	preempt_disable();
	local_irq_save(flags);
	if (__this_cpu_inc_return(interrupts_off.depth) == 1)
		__this_cpu_write(interrupts_off.flags, flags);
}

void rust_interrupts_enable(void)
{
	unsigned long flags = __this_cpu_read(interrupts_off.flags);

	if (!__this_cpu_dec_return(interrupts_off.depth))
		local_irq_restore(flags);
	preempt_enable();
}
#endif
