// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The series: which file is in which patch, where it is in a kernel tree, and what the patches say.
//!
//! The order is that of reading: nothing is used before it is there. Modules of `kernel_ext` are
//! compiled from the patch on that adds them. Those of `rdma` refer to each other (an object to the
//! trait of its driver, that trait to the objects), and so do those of the driver: they are compiled
//! from the patch on that adds the file which names them, as new drivers in C are wired up by their
//! last patch.

/// One patch.
pub(super) struct Step {
    /// The first line of its message.
    pub subject: &'static str,
    /// Why it is there.
    pub body: &'static str,
    /// Files of the project that it adds; `name/` is a folder with all that is in it, and
    /// `Kconfig#NAME` one option of that file.
    pub files: &'static [&'static str],
    /// What it adds to files of the kernel.
    pub edits: &'static [Edit],
}

/// Lines that are added to a file of the kernel.
pub(super) struct Edit {
    /// The file.
    pub file: &'static str,
    /// The lines before which they come.
    pub before: &'static str,
    /// The lines; `{author}` is the author of the series.
    pub insert: &'static str,
}

/// Text that is another one in a kernel tree.
pub(super) struct Rewrite {
    pub file: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// What is configured and built once its Makefile is there.
pub(super) struct Module {
    pub makefile: &'static str,
    /// For `scripts/config`.
    pub options: &'static [&'static str],
    pub goals: &'static [&'static str],
}

/// Folders and files of the project of which each file is in a patch or [`OUT_OF_TREE`].
pub(super) const ROOMS: &[&str] = &[
    "Kbuild",
    "Kconfig",
    "drivers",
    "include/src/abi",
    "include/uapi",
    "rust",
    "samples",
    "tools/patches/tree",
];

/// Folders of the project that a kernel tree has nothing of, and what is built in it.
pub(super) const OTHER_ROOMS: &[&str] =
    &["Documentation", "bench", "out", "qemu", "target", "tests"];

/// Files that a kernel tree does not need, and why; `name/` is a folder with all that is in it.
pub(super) const OUT_OF_TREE: &[(&str, &str)] = &[
    ("Kbuild", "in a kernel tree each folder has a Makefile"),
    (
        "samples/rust_rdma_split/Cargo.toml",
        "the protocol as a crate of user space, for its tests",
    ),
    ("samples/rust_rdma_split/src/lib.rs", "the root of that"),
    ("samples/rust_rdma_split/tests/", "its tests"),
];

/// Where files are in a kernel tree; the first that fits counts.
pub(super) const PLACES: &[(&str, &str)] = &[
    (
        "Kconfig#INFINIBAND_FERRITE",
        "drivers/infiniband/hw/ferrite/Kconfig",
    ),
    (
        "Kconfig#SAMPLE_RUST_RDMA_LOOP",
        "samples/rust/rdma_loop/Kconfig",
    ),
    (
        "Kconfig#SAMPLE_RUST_RDMA_SOFT",
        "samples/rust/rdma_soft/Kconfig",
    ),
    (
        "Kconfig#SAMPLE_RUST_RDMA_SPLIT",
        "samples/rust/rdma_split/Kconfig",
    ),
    ("drivers/", "drivers/"),
    ("include/src/abi/", "drivers/infiniband/hw/ferrite/abi/"),
    ("include/uapi/", "include/uapi/"),
    ("rust/", "drivers/infiniband/rust/"),
    ("samples/rust_rdma_loop/", "samples/rust/rdma_loop/"),
    ("samples/rust_rdma_soft/", "samples/rust/rdma_soft/"),
    (
        "samples/rust_rdma_split/src/protocol/",
        "samples/rust/rdma_split/protocol/",
    ),
    ("samples/rust_rdma_split/", "samples/rust/rdma_split/"),
    ("tools/patches/tree/", ""),
];

/// Files that name modules of which some come with later patches.
pub(super) const GROWING: &[&str] = &[
    "rust/kernel_ext/mod.rs",
    "rust/rdma/mod.rs",
    "tools/patches/tree/drivers/infiniband/rust/rdma_kunit.rs",
];

pub(super) const REWRITES: &[Rewrite] = &[
    Rewrite {
        file: "Kconfig#INFINIBAND_FERRITE",
        from: "\tselect NET_DEVLINK\n",
        to: "\tselect INFINIBAND_RUST\n",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_LOOP",
        from: "\tselect NET_DEVLINK\n",
        to: "",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_LOOP",
        from: "\tdepends on RUST && PCI && INFINIBAND && INFINIBAND_ADDR_TRANS && m\n",
        to: "\tdepends on INFINIBAND_ADDR_TRANS && PCI && m\n\tselect INFINIBAND_RUST\n",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_SOFT",
        from: "\tselect NET_DEVLINK\n",
        to: "",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_SOFT",
        from: "\tdepends on RUST && PCI && INFINIBAND && INFINIBAND_ADDR_TRANS && m\n",
        to: "\tdepends on INFINIBAND_ADDR_TRANS && PCI && m\n\tselect INFINIBAND_RUST\n",
    },
    Rewrite {
        file: "samples/rust_rdma_soft/soft_main.rs",
        from: "#[path = \"../../rust/",
        to: "#[path = \"../../../drivers/infiniband/rust/",
    },
    Rewrite {
        file: "samples/rust_rdma_soft/soft_main.rs",
        from: "Documentation/rust-rdma-driver.md",
        to: "Documentation/infiniband/rust.rst",
    },
    Rewrite {
        file: "rust/bindings/Makefile.bindgen",
        from: "$(src)/rust/bindings/",
        to: "$(rdma-rust)/bindings/",
    },
    Rewrite {
        file: "drivers/infiniband/hw/ferrite/ferrite_main.rs",
        from: "#[path = \"../../../../include/src/abi/mod.rs\"]\n",
        to: "",
    },
    Rewrite {
        file: "drivers/infiniband/hw/ferrite/ferrite_main.rs",
        from: "../../../../rust/",
        to: "../../rust/",
    },
    Rewrite {
        file: "samples/rust_rdma_loop/loop_main.rs",
        from: "#[path = \"../../rust/",
        to: "#[path = \"../../../drivers/infiniband/rust/",
    },
    Rewrite {
        file: "samples/rust_rdma_loop/loop_main.rs",
        from: "#[path = \"../../drivers/",
        to: "#[path = \"../../../drivers/",
    },
    Rewrite {
        file: "rust/bindings/Makefile.bindgen",
        from: "$(addprefix $(src)/, $(rdma-helpers",
        to: "$(addprefix $(rdma-rust)/, $(rdma-helpers",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_SPLIT",
        from: "\tselect NET_DEVLINK\n",
        to: "",
    },
    Rewrite {
        file: "Kconfig#SAMPLE_RUST_RDMA_SPLIT",
        from: "\tdepends on RUST && PCI && INFINIBAND && INFINIBAND_ADDR_TRANS && m\n",
        to: "\tdepends on INFINIBAND_ADDR_TRANS && PCI && m\n\tselect INFINIBAND_RUST\n",
    },
    Rewrite {
        file: "samples/rust_rdma_split/host_main.rs",
        from: "#[path = \"../../rust/",
        to: "#[path = \"../../../drivers/infiniband/rust/",
    },
    Rewrite {
        file: "samples/rust_rdma_split/host_main.rs",
        from: "#[path = \"src/protocol/mod.rs\"]\n",
        to: "",
    },
    Rewrite {
        file: "samples/rust_rdma_split/host_main.rs",
        from: "Documentation/split.md",
        to: "Documentation/infiniband/rdma_split.rst",
    },
    Rewrite {
        file: "samples/rust_rdma_split/unit_main.rs",
        from: "#[path = \"../../rust/",
        to: "#[path = \"../../../drivers/infiniband/rust/",
    },
    Rewrite {
        file: "samples/rust_rdma_split/unit_main.rs",
        from: "#[path = \"src/protocol/mod.rs\"]\n",
        to: "",
    },
    Rewrite {
        file: "samples/rust_rdma_split/unit_main.rs",
        from: "Documentation/split.md",
        to: "Documentation/infiniband/rdma_split.rst",
    },
    Rewrite {
        file: "samples/rust_rdma_split/src/protocol/mod.rs",
        from: "Documentation/split.md",
        to: "Documentation/infiniband/rdma_split.rst",
    },
];

pub(super) const CONFIGURED: &[Module] = &[
    Module {
        makefile: "drivers/infiniband/rust/Makefile",
        options: &["module INFINIBAND_RUST_KUNIT_TEST"],
        goals: &[
            "drivers/infiniband/rust/rdma_rust.ko",
            "drivers/infiniband/rust/rdma_rust_kunit.ko",
        ],
    },
    Module {
        makefile: "drivers/infiniband/hw/ferrite/Makefile",
        options: &["module INFINIBAND_FERRITE"],
        goals: &["drivers/infiniband/hw/ferrite/ferrite.ko"],
    },
    Module {
        makefile: "samples/rust/rdma_loop/Makefile",
        options: &[
            "enable SAMPLES",
            "enable SAMPLES_RUST",
            "module SAMPLE_RUST_RDMA_LOOP",
        ],
        goals: &["samples/rust/rdma_loop/rust_rdma_loop.ko"],
    },
    Module {
        makefile: "samples/rust/rdma_soft/Makefile",
        options: &["module SAMPLE_RUST_RDMA_SOFT"],
        goals: &["samples/rust/rdma_soft/rust_rdma_soft.ko"],
    },
    Module {
        makefile: "samples/rust/rdma_split/Makefile",
        options: &["module SAMPLE_RUST_RDMA_SPLIT"],
        goals: &[
            "samples/rust/rdma_split/rust_rdma_split_host.ko",
            "samples/rust/rdma_split/rust_rdma_split_unit.ko",
        ],
    },
];

/// What is configured and built in addition after the last patch: the kernel itself, with what can be built in. The
/// samples are modules only.
pub(super) const BUILT_IN: &[Module] = &[Module {
    makefile: "drivers/infiniband/hw/ferrite/Makefile",
    options: &[
        "enable INFINIBAND_RUST_KUNIT_TEST",
        "enable INFINIBAND_FERRITE",
    ],
    goals: &["vmlinux"],
}];

/// What checkpatch says and is not followed: the kind, what the patch's name has, and why.
pub(super) const CHECKPATCH_EXCEPTIONS: &[(&str, &str, &str)] = &[
    (
        "FILE_PATH_CHANGES",
        "",
        "asks at each new file whether MAINTAINERS knows it: the first patch with a folder names it there",
    ),
    (
        "EMBEDDED_FILENAME",
        "bindings-and-helpers",
        "Makefile.rdma is included by its name",
    ),
    (
        "EXPORT_SYMBOL",
        "bindings-and-helpers",
        "exports are generated, as those of rust/exports.c are",
    ),
    (
        "TYPO_SPELLING",
        "",
        "the list of words knows one of two spellings, as of acknowledgement",
    ),
];

pub(super) const COVER_SUBJECT: &str =
    "RDMA: Rust abstractions, and a driver for the Ferrite adapter";

pub(super) const COVER: &str = "\
This series lets drivers of RDMA devices, and kernel users of them, be
written in Rust, and adds a driver that is.

Ferrite is a RoCEv2 adapter that exists in software: a process that
stock QEMU attaches to a guest as a PCI function (vfio-user). Its
interface is specified for others to make drivers or devices against. A
provider for rdma-core, the device and the tests are kept outside of the
kernel.

The abstractions turn the table of operations that the RDMA core calls
into traits. A verbs object is the core's structure and the driver's
data in one allocation, created by the core, with a lifetime and
references that the compiler checks; what belongs to a process is
pinned, mapped and given back by types. The driver is written on them
and has a handful of unsafe blocks.

Where the abstractions are: in drivers/infiniband/rust, as modules that
each user makes part of its crate, and not in rust/kernel. The kernel
crate is always built in, and can call only what is built in, too: DRM,
USB and I2C have Rust abstractions only if they are =y. INFINIBAND is a
module in about every configuration, so that abstractions in rust/kernel
would be there for nobody. When Kbuild can build a library crate as a
module, they become one without a change of their own; their paths are
crate::rdma already. The same holds for the bindings: they come from a
bindgen run of their own, and take each type that the kernel crate has
from there. Helpers for static inlines are a module that exports them.

kernel_ext has what rust/kernel lacks today and this series needs. Each
of its files names the file of rust/kernel that it is meant for, and can
go there on its own, through the tree it belongs to, whenever that
suits.

Patches are in the order of reading, and the kernel builds after each.
The abstractions are compiled and tested by a KUnit module that grows
with them. Modules of rdma, and those of the driver, refer to each
other; they are compiled from the patch on that adds the last of them.

The last patches, behind the documentation, need none of the driver:
connections, network devices, and a sample that uses both, a network
interface at the far end of an RDMA connection. They can be a series of
their own.
";

pub(super) const STEPS: &[Step] = &[
    Step {
        subject: "RDMA/rust: Add bindings and helpers for the RDMA core",
        body: "\
The kernel crate binds nothing of the RDMA core, and cannot, as it is
built in while the core is a module mostly. Run bindgen for the headers
of the core alone, and take types that the kernel crate binds from
there: a device or a pci_dev is one type everywhere.

Static inlines and macros get helpers, as in rust/helpers. These are a
module that exports them, so that all users share one copy.

The KUnit module compiles what following patches add. For now this is
the bindings, whose layouts bindgen asserts at compile time.
",
        files: &[
            "rust/bindings/",
            "rust/helpers/",
            "rust/interrupts.c",
            "rust/interrupts.h",
            "tools/patches/tree/drivers/infiniband/rust/Kconfig",
            "tools/patches/tree/drivers/infiniband/rust/Makefile",
            "tools/patches/tree/drivers/infiniband/rust/Makefile.rdma",
            "tools/patches/tree/drivers/infiniband/rust/exports.c",
            "tools/patches/tree/drivers/infiniband/rust/rdma_kunit.rs",
        ],
        edits: &[
            Edit {
                file: "MAINTAINERS",
                before: "INGENIC JZ4780 NAND DRIVER\n",
                insert: "\
INFINIBAND SUBSYSTEM [RUST]
M:	{author}
L:	linux-rdma@vger.kernel.org
L:	rust-for-linux@vger.kernel.org
S:	Maintained
F:	Documentation/infiniband/rdma_split.rst
F:	Documentation/infiniband/rust.rst
F:	drivers/infiniband/rust/
F:	samples/rust/rdma_*/

",
            },
            Edit {
                file: "drivers/infiniband/Kconfig",
                before: "if INFINIBAND_USER_ACCESS || !INFINIBAND_USER_ACCESS\n",
                insert: "source \"drivers/infiniband/rust/Kconfig\"\n\n",
            },
            Edit {
                file: "drivers/infiniband/Makefile",
                before: "obj-$(CONFIG_INFINIBAND)\t\t+= hw/\n",
                insert: "obj-$(CONFIG_INFINIBAND_RUST)\t\t+= rust/\n",
            },
        ],
    },
    Step {
        subject: "RDMA/rust: Add synchronisation that the kernel crate lacks",
        body: "\
Completions with a timeout, spinlocks that keep interrupts off,
workqueues of one's own, work that is done while a device is bound,
tables that interrupt handlers may look into, barriers against devices,
waiting for readers of RCU, and values on a stack that others refer to
for a while.

Each file names the one of rust/kernel that it is meant for.
",
        files: &[
            "rust/kernel_ext/barrier.rs",
            "rust/kernel_ext/bound_work.rs",
            "rust/kernel_ext/completion.rs",
            "rust/kernel_ext/errno.rs",
            "rust/kernel_ext/mod.rs",
            "rust/kernel_ext/rcu.rs",
            "rust/kernel_ext/scoped.rs",
            "rust/kernel_ext/spinlock.rs",
            "rust/kernel_ext/table.rs",
            "rust/kernel_ext/workqueue.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add what drivers need of the machine",
        body: "\
Processors and their coming and going, memory and whom it is charged to,
who the current process works for, random numbers, and how often
something may be said.

Each file names the one of rust/kernel that it is meant for.
",
        files: &[
            "rust/kernel_ext/cpu.rs",
            "rust/kernel_ext/cpu_hotplug.rs",
            "rust/kernel_ext/memcg.rs",
            "rust/kernel_ext/memory.rs",
            "rust/kernel_ext/module_string.rs",
            "rust/kernel_ext/print.rs",
            "rust/kernel_ext/random.rs",
            "rust/kernel_ext/ratelimit.rs",
            "rust/kernel_ext/user.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add PCI, interrupts, moderation and devlink",
        body: "\
All vectors of a PCI function with a handler and a processor each,
resets by the driver and by others, errors of the bus, ranges of BARs,
dynamic interrupt moderation, and the health and parameters of devlink.

Each file names the one of rust/kernel that it is meant for.
",
        files: &[
            "rust/kernel_ext/devlink.rs",
            "rust/kernel_ext/dim.rs",
            "rust/kernel_ext/io.rs",
            "rust/kernel_ext/irq.rs",
            "rust/kernel_ext/pci.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add typed views of what verbs are called with",
        body: "\
The core's enumerations and flag words as types that hold known values
only, addresses, and the part of a request that only driver and provider
know.

It is compiled together with the traits of drivers, to which all of it
refers.
",
        files: &[
            "rust/rdma/address.rs",
            "rust/rdma/counters.rs",
            "rust/rdma/macros.rs",
            "rust/rdma/port.rs",
            "rust/rdma/print.rs",
            "rust/rdma/udata.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add verbs objects and protection domains",
        body: "\
A verbs object is the core's structure with the driver's data behind it,
in the one allocation that the core makes. The driver gets it
uninitialised and has to initialise it, or give it back; afterwards it
is only seen by reference, or by a counted one. Protection domains are
the first kind and have little else to them.

Like what follows, it is compiled together with the traits of drivers.
",
        files: &["rust/rdma/object.rs", "rust/rdma/pd.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add completion queues",
        body: "\
Made, polled and armed by the driver's trait; completions as types that
are turned into those of the core. The end of a queue waits for events
of it that are being handled, before the core takes away what a handler
needs.
",
        files: &["rust/rdma/cq.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add queue pairs",
        body: "\
Their attributes by name instead of by mask, which transitions the core
allows, and what the driver tells when it is asked.
",
        files: &["rust/rdma/qp.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add work requests",
        body: "\
What is posted, as typed requests that a driver takes one by one. The
one it took last is the bad one where posting fails. Requests of a
process, for which the core posts, are told from those of the kernel.
",
        files: &["rust/rdma/work.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add memory regions and windows",
        body: "\
Regions of processes and of DMA buffers, fast registration (FRWR), and
windows. Regions are allocated here, as the core leaves that to drivers.
",
        files: &["rust/rdma/memory.rs", "rust/rdma/mw.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add shared receive queues and XRC",
        body: "\
Shared receive queues, those of extended reliable connections among
them, and the domains of these.
",
        files: &["rust/rdma/srq.rs", "rust/rdma/xrc.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add address handles",
        body: "\
Where datagrams go. They are made and ended where nobody may sleep, too.
",
        files: &["rust/rdma/ah.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add rules of flows and work queues",
        body: "\
For raw packets: rules that say who gets which frames, and work queues in
tables that frames are spread over by a hash.
",
        files: &["rust/rdma/flow.rs", "rust/rdma/wq.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add pinned memory of processes",
        body: "\
Memory of a process, or of a DMA buffer, that is pinned and mapped for a
device until the value that stands for it is dropped. Who frees the
device waits for that.
",
        files: &["rust/rdma/hold.rs", "rust/rdma/umem.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add on-demand paging",
        body: "\
Memory of processes that is not pinned, whose pages come and go (ODP).
The driver is told before they go, and asks for them when its device
needs them.
",
        files: &["rust/rdma/odp.rs", "rust/rdma/odp/"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add user contexts",
        body: "\
A process that has opened a device, and what of the device it may map.
A mapping keeps what it shows.
",
        files: &["rust/rdma/user.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add device memory",
        body: "\
Memory of the device that processes allocate, map and register.
",
        files: &["rust/rdma/dm.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add methods of drivers for processes",
        body: "\
Methods that a driver adds to those of uverbs, and attributes that it
adds to those of the core, as types of which the core's tables are made
at compile time.
",
        files: &["rust/rdma/method.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add network interfaces of ports",
        body: "\
A port that shares its link with a network interface follows it: its
addresses, its state, and its coming and going. What needs RTNL is
called with a token of it, which is meant for rust/kernel/net.
",
        files: &["rust/kernel_ext/rtnl.rs", "rust/rdma/netdev.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add events, counters and dumps",
        body: "\
Events of the device as a whole, counters of queue pairs, and what
nldev tells of an object in the driver's words or in the device's.
",
        files: &[
            "rust/rdma/event.rs",
            "rust/rdma/qp_counters.rs",
            "rust/rdma/raw_dump.rs",
            "rust/rdma/restrack.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add devices and the traits of their drivers",
        body: "\
A driver implements traits for the type of its per-device data; from
these the table of operations is made at compile time. The device is
registered by a value whose drop unregisters it, so that no operation
outlives the data.

With it all of the abstractions for drivers is compiled.
",
        files: &[
            "rust/rdma/device.rs",
            "rust/rdma/device/",
            "rust/rdma/driver.rs",
            "rust/rdma/mod.rs",
            "rust/rdma/ops.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add abstractions for kernel users of RDMA devices",
        body: "\
The other side of verbs: a client that is told of devices, protection
domains, completion and receive queues, queue pairs and regions that
keep each other alive for as long as the device may use them. Users that
stay with a device hold leases of it, for which its removal waits.

What a driver does for them in numbers that the core leaves to drivers
they ask for by a value that the driver describes. None of the numbers
is here.
",
        files: &[
            "rust/rdma/consumer/",
            "rust/rdma/extension.rs",
            "rust/rdma/ulp.rs",
            "rust/rdma/ulp/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add KUnit tests",
        body: "\
Tests of what needs no device: the table of operations of drivers with
more and with fewer capabilities, conversions both ways, references and
drops.
",
        files: &["rust/rdma/tests.rs", "rust/rdma/tests/"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add socket buffers and Ethernet headers",
        body: "\
A socket buffer has one owner, who looks at its bytes, cuts it into
frames, passes it on or drops it for a reason. Headers are read from
bytes that were copied.

It is compiled together with network devices, to which it refers. All of
this is meant for rust/kernel/net, and can go there on its own, through
the tree of networking.
",
        files: &["rust/net/ethernet.rs", "rust/net/skb.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add network devices, NAPI and ethtool",
        body: "\
A driver of an Ethernet device implements a trait for its data of one
device, and traits of what the device can do besides: the tables of
operations have what is implemented. A device is registered with a NAPI
instance for each of its queues. Frames that hardware sends, and pages
that it receives in, are mapped for as long as they are in their place,
while its driver is bound.
",
        files: &[
            "rust/net/device.rs",
            "rust/net/device/",
            "rust/net/dma.rs",
            "rust/net/ethtool.rs",
            "rust/net/napi.rs",
            "rust/net/ops.rs",
            "rust/net/print.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/rust: Add attachments to interfaces of others",
        body: "\
Who wants the frames of another interface of the machine, as a bridge or
macvlan does, attaches to it: a receive handler, addresses and VLANs that
are wanted, frames to be sent, and what becomes of the interface. It ends
with the interface, and is over when it is dropped.

With it all of net is compiled, and its tests are.
",
        files: &[
            "rust/net/attachment.rs",
            "rust/net/mod.rs",
            "rust/net/tests.rs",
            "rust/net/tests/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the device interface",
        body: "\
Registers, doorbells, queue entries, commands and the uverbs ABI: each
layout and each constant is written here and nowhere else, with its size
and offsets asserted. Device, provider and tests are compiled from the
same files, which is why they may be used under the MIT licence as well.
",
        files: &["include/src/abi/"],
        edits: &[Edit {
            file: "MAINTAINERS",
            before: "FILE LOCKING (flock() and fcntl()/lockf())\n",
            insert: "\
FERRITE RDMA DRIVER
M:	{author}
L:	linux-rdma@vger.kernel.org
L:	rust-for-linux@vger.kernel.org
S:	Maintained
F:	Documentation/infiniband/ferrite.rst
F:	drivers/infiniband/hw/ferrite/
F:	include/uapi/rdma/ferrite-abi.h

",
        }],
    },
    Step {
        subject: "RDMA/ferrite: Add the uAPI header",
        body: "\
What the provider and the driver say to each other through uverbs, for
providers in C. It is generated from the interface in Rust.
",
        files: &["include/uapi/rdma/ferrite-abi.h"],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add registers, doorbells and capabilities",
        body: "\
What a device says it can do is checked against what the interface has
room for, once, so that nothing is reckoned with other numbers. Doorbell
pages are given to user contexts.

What the device can do for kernel users that the core has no names for
is said in numbers that the core leaves to drivers. They have their
meaning in one file, which such users compile as well.
",
        files: &[
            "drivers/infiniband/hw/ferrite/bars.rs",
            "drivers/infiniband/hw/ferrite/caps.rs",
            "drivers/infiniband/hw/ferrite/dma_types.rs",
            "drivers/infiniband/hw/ferrite/doorbell_bar.rs",
            "drivers/infiniband/hw/ferrite/doorbell_pages.rs",
            "drivers/infiniband/hw/ferrite/extension.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add numbers, shares and memory that is lent",
        body: "\
Numbers of objects rest before they are used again, each process has its
share of what there is little of, and memory that a device may still
write to is not freed.
",
        files: &[
            "drivers/infiniband/hw/ferrite/lent.rs",
            "drivers/infiniband/hw/ferrite/named.rs",
            "drivers/infiniband/hw/ferrite/numbers.rs",
            "drivers/infiniband/hw/ferrite/ring.rs",
            "drivers/infiniband/hw/ferrite/shares.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add requests to the device",
        body: "\
Commands that wait for their turn, are under way, or wait for their
answer. Many are under way at once, each process has its share of the
ring, and a device that does not answer is given up.
",
        files: &[
            "drivers/infiniband/hw/ferrite/requests.rs",
            "drivers/infiniband/hw/ferrite/requests/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the control queue",
        body: "\
The ring of commands, which are types that know their reply.
",
        files: &[
            "drivers/infiniband/hw/ferrite/cqp.rs",
            "drivers/infiniband/hw/ferrite/cqp/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add what all objects need of the device",
        body: "\
Objects that a command makes are ended by another one when they are
dropped, on a device that has failed, too. Events find their object
here.
",
        files: &[
            "drivers/infiniband/hw/ferrite/commands.rs",
            "drivers/infiniband/hw/ferrite/hardware.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add event queues",
        body: "\
Interrupts read events, dispatch and drain them, and re-arm with one
write; no register is read. Queues grow with what may happen at once.
",
        files: &[
            "drivers/infiniband/hw/ferrite/eq.rs",
            "drivers/infiniband/hw/ferrite/eq/",
            "drivers/infiniband/hw/ferrite/event_class.rs",
            "drivers/infiniband/hw/ferrite/event_log.rs",
            "drivers/infiniband/hw/ferrite/growth.rs",
            "drivers/infiniband/hw/ferrite/qp_event.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add completion handlers",
        body: "\
Completion queues are bound to handlers, which have a vector, a
processor, moderation and a priority, and can be moved while they are
used.
",
        files: &[
            "drivers/infiniband/hw/ferrite/binding.rs",
            "drivers/infiniband/hw/ferrite/handler.rs",
            "drivers/infiniband/hw/ferrite/handler/",
            "drivers/infiniband/hw/ferrite/moderation.rs",
            "drivers/infiniband/hw/ferrite/priority.rs",
            "drivers/infiniband/hw/ferrite/service.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the map of vectors",
        body: "\
Which handler a completion vector stands for, as processors come and go.
",
        files: &[
            "drivers/infiniband/hw/ferrite/steering.rs",
            "drivers/infiniband/hw/ferrite/vector_map.rs",
            "drivers/infiniband/hw/ferrite/vector_map/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add memory regions",
        body: "\
The translation and protection table: regions of pinned memory, of DMA
buffers and of memory of the device, and fast registration.
",
        files: &[
            "drivers/infiniband/hw/ferrite/mr.rs",
            "drivers/infiniband/hw/ferrite/mr/",
            "drivers/infiniband/hw/ferrite/tpt.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add windows and device memory",
        body: "\
Windows of both types, and memory of the device that processes map.
",
        files: &[
            "drivers/infiniband/hw/ferrite/dm.rs",
            "drivers/infiniband/hw/ferrite/mw.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add on-demand paging",
        body: "\
Regions whose pages need not be there (ODP): the device says which it
lacks, and is told before they go.
",
        files: &[
            "drivers/infiniband/hw/ferrite/odp.rs",
            "drivers/infiniband/hw/ferrite/odp/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add completion queues",
        body: "\
Rings of processes are in their memory and never looked at by the
kernel; what all queues have in common is here as well.
",
        files: &[
            "drivers/infiniband/hw/ferrite/cq.rs",
            "drivers/infiniband/hw/ferrite/cq/",
            "drivers/infiniband/hw/ferrite/queue.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add queue pairs",
        body: "\
RC, UC, UD, XRC and GSI: what they take, how large that makes them, and
their attributes.
",
        files: &[
            "drivers/infiniband/hw/ferrite/qp.rs",
            "drivers/infiniband/hw/ferrite/qp/attributes.rs",
            "drivers/infiniband/hw/ferrite/qp/create.rs",
            "drivers/infiniband/hw/ferrite/qp/layout.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add posting of work requests",
        body: "\
Work requests of kernel users as the device sees them. They are posted
without a lock that others want.
",
        files: &[
            "drivers/infiniband/hw/ferrite/qp/posting.rs",
            "drivers/infiniband/hw/ferrite/wqe.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add shared receive queues and XRC",
        body: "\
Shared receive queues, and the domains and queues of extended reliable
connections.
",
        files: &[
            "drivers/infiniband/hw/ferrite/srq.rs",
            "drivers/infiniband/hw/ferrite/xrc.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add raw packets",
        body: "\
Rules of flows, and work queues that frames are spread over.
",
        files: &[
            "drivers/infiniband/hw/ferrite/flow.rs",
            "drivers/infiniband/hw/ferrite/wq.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add domains, address handles and user contexts",
        body: "\
What processes have of the device: a context with a doorbell page of its
own, protection domains and address handles.
",
        files: &[
            "drivers/infiniband/hw/ferrite/ah.rs",
            "drivers/infiniband/hw/ferrite/pd.rs",
            "drivers/infiniband/hw/ferrite/ucontext.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the port and its GIDs",
        body: "\
The port follows the network interface beside it, and the device's table
of GIDs the core's.
",
        files: &[
            "drivers/infiniband/hw/ferrite/gids.rs",
            "drivers/infiniband/hw/ferrite/port.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the device, counters and dumps",
        body: "\
What the operations of all objects share, and those of the device as a
whole; counters of queue pairs, and what the device has of an object.
",
        files: &[
            "drivers/infiniband/hw/ferrite/device.rs",
            "drivers/infiniband/hw/ferrite/qp_counters.rs",
            "drivers/infiniband/hw/ferrite/qp_counters/",
            "drivers/infiniband/hw/ferrite/raw_dump.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the network interface",
        body: "\
A function may have an Ethernet interface of its own, with a channel for
each completion handler: rings in host memory, a NAPI instance, and the
vector and processor of the handler. The interface outlives a device
that fails and comes back. Its RDMA ports are paired with it.
",
        files: &[
            "drivers/infiniband/hw/ferrite/interface.rs",
            "drivers/infiniband/hw/ferrite/interface/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add recovery",
        body: "\
A device that failed, was reset, or slept is set up again, and devlink
tells of it, and keeps what there was to know of it. Those who had objects
of it are told, and end them.
",
        files: &[
            "drivers/infiniband/hw/ferrite/occupancy.rs",
            "drivers/infiniband/hw/ferrite/parting.rs",
            "drivers/infiniband/hw/ferrite/recovery.rs",
            "drivers/infiniband/hw/ferrite/recovery/",
        ],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add what debugfs shows",
        body: "\
Queues, commands that are under way, and counts.
",
        files: &["drivers/infiniband/hw/ferrite/debugfs.rs"],
        edits: &[],
    },
    Step {
        subject: "RDMA/ferrite: Add the PCI driver and build it",
        body: "\
Binding to the PCI function, and the entries of Kconfig and Makefile,
with which all of the driver is compiled.
",
        files: &[
            "Kconfig#INFINIBAND_FERRITE",
            "drivers/infiniband/hw/ferrite/ferrite_main.rs",
            "drivers/infiniband/hw/ferrite/pci.rs",
            "tools/patches/tree/drivers/infiniband/hw/ferrite/Makefile",
        ],
        edits: &[
            Edit {
                file: "drivers/infiniband/Kconfig",
                before: "source \"drivers/infiniband/hw/hfi1/Kconfig\"\n",
                insert: "source \"drivers/infiniband/hw/ferrite/Kconfig\"\n",
            },
            Edit {
                file: "drivers/infiniband/hw/Makefile",
                before: "obj-$(CONFIG_INFINIBAND_IONIC)\t\t+= ionic/\n",
                insert: "obj-$(CONFIG_INFINIBAND_FERRITE)\t+= ferrite/\n",
            },
        ],
    },
    Step {
        subject: "samples: rust: Add a kernel user of RDMA devices",
        body: "\
A module that connects two queue pairs of each RoCE port with each
other, takes them through sends, writes, reads, atomics, fast
registration and the errors that go with them, and says how many tests
passed. It shows how the abstractions for kernel users are used, and
tests any RoCE device.
",
        files: &[
            "Kconfig#SAMPLE_RUST_RDMA_LOOP",
            "samples/rust_rdma_loop/",
            "tools/patches/tree/samples/rust/rdma_loop/Makefile",
        ],
        edits: &[
            Edit {
                file: "samples/rust/Kconfig",
                before: "config SAMPLE_RUST_HOSTPROGS\n",
                insert: "source \"samples/rust/rdma_loop/Kconfig\"\n\n",
            },
            Edit {
                file: "samples/rust/Makefile",
                before: "\nrust_print-y := ",
                insert: "obj-$(CONFIG_SAMPLE_RUST_RDMA_LOOP)\t\t+= rdma_loop/\n",
            },
        ],
    },
    Step {
        subject: "samples: rust: Add an RDMA device made of software",
        body: "\
The smallest driver on the abstractions: protection domains, completion
queues, reliable connections within the device, fast registration, memory
of processes, and a port beside a network interface. It has no hardware to
know, so that what is left is what a driver has to say to the RDMA core.

Processes post and poll through the kernel. The other sample passes its
tests on it, and of rdma-core's tests those of domains, regions,
completion queues and reliable connections do.
",
        files: &[
            "Kconfig#SAMPLE_RUST_RDMA_SOFT",
            "samples/rust_rdma_soft/driver.rs",
            "samples/rust_rdma_soft/engine.rs",
            "samples/rust_rdma_soft/memory.rs",
            "samples/rust_rdma_soft/queue.rs",
            "samples/rust_rdma_soft/soft_main.rs",
            "samples/rust_rdma_soft/tests.rs",
            "tools/patches/tree/samples/rust/rdma_soft/Makefile",
        ],
        edits: &[
            Edit {
                file: "samples/rust/Kconfig",
                before: "config SAMPLE_RUST_HOSTPROGS\n",
                insert: "source \"samples/rust/rdma_soft/Kconfig\"\n\n",
            },
            Edit {
                file: "samples/rust/Makefile",
                before: "\nrust_print-y := ",
                insert: "obj-$(CONFIG_SAMPLE_RUST_RDMA_SOFT)\t\t+= rdma_soft/\n",
            },
        ],
    },
    Step {
        subject: "Documentation: infiniband: Describe drivers in Rust, and ferrite",
        body: "\
How drivers and users of RDMA devices are written in Rust, and what
there is to know of the Ferrite adapter and its driver.
",
        files: &[
            "tools/patches/tree/Documentation/infiniband/ferrite.rst",
            "tools/patches/tree/Documentation/infiniband/rust.rst",
        ],
        edits: &[
            Edit {
                file: "Documentation/infiniband/index.rst",
                before: "   ipoib\n",
                insert: "   ferrite\n",
            },
            Edit {
                file: "Documentation/infiniband/index.rst",
                before: "   sysfs\n",
                insert: "   rust\n",
            },
        ],
    },
    Step {
        subject: "RDMA/rust: Add connections by IP address",
        body: "\
Identifiers of the connection manager, for kernel users of RDMA devices:
resolving, connecting, listening, and queue pairs that go through their
states with the connection. What happens is told to a handler. What is
made on a device has a lease of it, for which the end of the identifier
waits, and so does the removal of the device.

It is a module apart from rdma, so that only who connects needs
rdma_cm.ko.
",
        files: &["rust/rdma_cm/"],
        edits: &[],
    },
    Step {
        subject: "samples: rust: rdma_split: Add the protocol",
        body: "\
What the two halves of a network driver say to each other over RDMA:
layouts, messages, pools of buffers, and the state machine of either
side, which does no I/O and knows no time of its own. It is compiled from
the last patch of the sample on, and tested outside of the kernel as
well, both sides against each other over a channel that loses messages.
",
        files: &["samples/rust_rdma_split/src/protocol/"],
        edits: &[],
    },
    Step {
        subject: "samples: rust: rdma_split: Add the link",
        body: "\
The two connections between a host and its I/O unit around that state
machine: memory, regions, queue pairs, connecting again, and the end,
after which nothing is left.
",
        files: &[
            "samples/rust_rdma_split/frames.rs",
            "samples/rust_rdma_split/link/",
        ],
        edits: &[],
    },
    Step {
        subject: "samples: rust: rdma_split: Add the interface of a host",
        body: "\
A network interface without hardware of its own. Addresses, MTU, groups
and VLANs that are wanted of it are told to the I/O unit by a work queue:
nobody waits for a peer with RTNL held.
",
        files: &[
            "samples/rust_rdma_split/host/",
            "samples/rust_rdma_split/host_main.rs",
        ],
        edits: &[],
    },
    Step {
        subject: "samples: rust: rdma_split: Add the I/O unit and build both",
        body: "\
Lends an interface of its machine to hosts, each with an address of its
own, and passes frames between them and the LAN.

With it both modules are compiled. They show kernel users of RDMA devices
with connections and removal, and network devices, without unsafe code.
",
        files: &[
            "Kconfig#SAMPLE_RUST_RDMA_SPLIT",
            "samples/rust_rdma_split/unit/",
            "samples/rust_rdma_split/unit_main.rs",
            "tools/patches/tree/Documentation/infiniband/rdma_split.rst",
            "tools/patches/tree/samples/rust/rdma_split/Makefile",
        ],
        edits: &[
            Edit {
                file: "Documentation/infiniband/index.rst",
                before: "   rust\n",
                insert: "   rdma_split\n",
            },
            Edit {
                file: "samples/rust/Kconfig",
                before: "config SAMPLE_RUST_HOSTPROGS\n",
                insert: "source \"samples/rust/rdma_split/Kconfig\"\n\n",
            },
            Edit {
                file: "samples/rust/Makefile",
                before: "\nrust_print-y := ",
                insert: "obj-$(CONFIG_SAMPLE_RUST_RDMA_SPLIT)\t\t+= rdma_split/\n",
            },
        ],
    },
];
