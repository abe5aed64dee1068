// SPDX-License-Identifier: GPL-2.0

#include <linux/cpu.h>
#include <linux/cpumask.h>

/* Static inlines without CONFIG_HOTPLUG_CPU. */
__rust_helper void rust_helper_cpus_read_lock(void)
{
	cpus_read_lock();
}

__rust_helper void rust_helper_cpus_read_unlock(void)
{
	cpus_read_unlock();
}

__rust_helper const struct cpumask *rust_helper_cpumask_of(unsigned int cpu)
{
	return cpumask_of(cpu);
}
