// SPDX-License-Identifier: GPL-2.0

#include <linux/nsproxy.h>
#include <linux/sched.h>
#include <linux/sched/signal.h>

__rust_helper bool rust_helper_need_resched(void)
{
	return need_resched();
}

__rust_helper int rust_helper_cond_resched(void)
{
	return cond_resched();
}

__rust_helper int rust_helper_fatal_signal_pending(struct task_struct *p)
{
	return fatal_signal_pending(p);
}

__rust_helper struct net *rust_helper_current_net(void)
{
	/* Gone once the task ends; its files are closed after that. */
	return current->nsproxy ? current->nsproxy->net_ns : NULL;
}
