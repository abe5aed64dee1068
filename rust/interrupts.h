/* SPDX-License-Identifier: GPL-2.0 */
#ifndef RUST_INTERRUPTS_H
#define RUST_INTERRUPTS_H

void rust_interrupts_disable(void);
void rust_interrupts_enable(void);

#endif
