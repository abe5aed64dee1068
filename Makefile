# SPDX-License-Identifier: Apache-2.0 OR MIT
#
# The commands a person types. All work is done by tools/lab; see 'make help'.
#
# (The kernel modules are built by Kbuild, not by this file: see Kbuild and Documentation/.)

LAB := tools/lab/bootstrap

.PHONY: help demo test test-long fuzz mutants soak pyverbs bench patches shell prepare clean distclean

help:
	@echo 'Ferrite: an RDMA device, its Linux driver and everything to try them in VMs.'
	@echo
	@echo '  make demo            two VMs on the stock Debian kernel, RDMA between them'
	@echo '  make test            all checks and tests; ends "N passed, N failed"'
	@echo '       STAGE=name      ... only one stage: lint, abi, unit, conformance, kunit, vm'
	@echo '       FILTER=text     ... only tests whose names contain it, those of the long run among them;'
	@echo '                       several: "one|another"'
	@echo '       REPEAT=n        ... each test in VMs so often, to find one that fails at times'
	@echo '       LANES=n         ... so many pairs of VMs at a time; else one for every two cores, and one more'
	@echo '       KERNEL=name     ... all that runs in VMs on that kernel: stock, test, kasan, kcsan'
	@echo '  make test-long       what takes hours: many seeds, 200 boots, the long tests in VMs, and everything'
	@echo '                       in VMs on kernels with KASAN and with KCSAN; STAGE=seeds, fuzz, boots, patches,'
	@echo '                       long, kasan, kcsan, FILTER=text, SEEDS=n instead of 2000, LANES=n'
	@echo '  make fuzz            what guests, peers and neighbours can say to the device, by libFuzzer;'
	@echo '                       MINUTES=n for all targets together, TARGET=name for one of them'
	@echo '  make mutants         the code is changed in small places, one after the other, and tests are to notice;'
	@echo '                       MINUTES=n, FILE=name for some files: "one.rs|another.rs"'
	@echo '  make soak            traffic, kernel users, faults, life-cycle events, little memory and processors that'
	@echo '                       come and go, all at once; MINUTES=n, SEED=n for what happened there, VMS=n, KERNEL=name'
	@echo '  make pyverbs         rdma-core'"'"'s own tests on the device in a VM; FILTER=part of a name'
	@echo '  make bench           Ferrite beside rxe and siw, measured in the same VMs: bench/report.html;'
	@echo '                       ROUNDS=n, QUICK=1 for a short run, PROFILE=1 for what the time goes into,'
	@echo '                       ONLY=part for some: time, rates, moderation, count, control, storage, scale, split, handlers;'
	@echo '                       PAGE=1 makes the page of what was measured before, and measures nothing'
	@echo '  make patches         the kernel side as patches for a kernel tree, as they would be sent'
	@echo '  make shell           VMs up, a prompt in each; VM=2 starts in the second,'
	@echo '                       KERNEL=test boots the kernel with the checkers, CARDS=2 gives each'
	@echo '                       a virtio-net card beside the device'
	@echo '  make prepare         fetch and build what is cached, and nothing else; KERNEL=name'
	@echo '  make clean           remove this tree'"'"'s build output'
	@echo '  make distclean       remove the whole cache as well'
	@echo
	@echo 'Needs root or sudo on a Debian or Ubuntu x86_64 machine, a network the first time,'
	@echo 'and about 14 GB (18 for test-long) in $${FERRITE_CACHE:-~/.cache/ferrite}.'

demo:
	@$(LAB) demo

test:
	@$(LAB) test $(if $(STAGE),--stage '$(STAGE)') $(if $(FILTER),--filter '$(FILTER)') $(if $(KERNEL),--kernel '$(KERNEL)') \
		$(if $(REPEAT),--repeat $(REPEAT)) $(if $(LANES),--lanes $(LANES))

test-long:
	@$(LAB) test --long $(if $(STAGE),--stage '$(STAGE)') $(if $(FILTER),--filter '$(FILTER)') $(if $(SEEDS),--seeds '$(SEEDS)') \
		$(if $(LANES),--lanes $(LANES))

fuzz:
	@$(LAB) fuzz $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(TARGET),--target '$(TARGET)')

mutants:
	@$(LAB) mutants $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(FILE),--file '$(FILE)')

soak:
	@$(LAB) soak $(if $(MINUTES),--minutes '$(MINUTES)') $(if $(SEED),--seed '$(SEED)') $(if $(VMS),--vms '$(VMS)') \
		$(if $(KERNEL),--kernel '$(KERNEL)')

pyverbs:
	@$(LAB) pyverbs $(if $(FILTER),--filter '$(FILTER)')

bench:
	@$(LAB) bench $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(QUICK),--quick) $(if $(PROFILE),--profile) $(if $(PAGE),--page) $(if $(ONLY),--only '$(ONLY)')

patches:
	@$(LAB) patches

shell:
	@$(LAB) shell $(if $(VM),--vm $(VM)) $(if $(KERNEL),--kernel '$(KERNEL)') $(if $(filter 2,$(CARDS)),--two-cards)

prepare:
	@$(LAB) prepare $(if $(KERNEL),--kernel '$(KERNEL)')

clean:
	@$(LAB) clean

distclean:
	@$(LAB) clean --all
