// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What limits each figure, in a sentence for the page. `Documentation/benchmark.md` has the reasons.

/// What is measured and has a goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Figure {
    /// Streams of large messages.
    Bandwidth,
    /// 1 MiB writes beside memcpy.
    Share,
    /// Small messages a second.
    Rate,
    /// One small message, polled for.
    Latency,
    /// The same within one machine.
    Loopback,
    /// One small message, waited for by events.
    Events,
    /// Of the sender's guest, over many queue pairs.
    Instructions,
    /// Processor time of the devices over many queue pairs.
    DeviceQps,
    /// The same over many regions.
    DeviceRegions,
    /// Large messages over many queue pairs at once.
    Streams,
    /// What a queue pair takes that does nothing.
    Memory,
    /// Regions made and taken back.
    Registrations,
    /// Connections made and ended.
    Connections,
    /// A disk.
    Nvme,
    /// Files.
    Nfs,
    /// Between functions of one adapter.
    Adapter,
    /// The interface.
    Interface,
}

/// A figure, its name, and what limits it.
type Row = (Figure, &'static str, &'static str);

/// All figures, in the order of the page.
pub const FIGURES: [Row; 17] = [
    (
        Figure::Bandwidth,
        "bandwidth, 64 KiB and more",
        "the copies: each byte is copied into the ring by one device and out of it by the other, and these two share two \
         cores with the guest that polls; from 1 MiB on what is copied is in no core's own cache",
    ),
    (
        Figure::Share,
        "share of memcpy",
        "two copies where memcpy makes one, by two processes that have less than two cores; through many MiB the memory \
         itself, besides",
    ),
    (
        Figure::Rate,
        "64 B rate",
        "over one queue pair the poster; over many the doorbells, each a message to a device process that the poster \
         waits for, and then the processor time of both devices",
    ),
    (
        Figure::Latency,
        "64 B latency, polled",
        "waking two device processes one after the other, on cores that the polling guests have taken",
    ),
    (
        Figure::Loopback,
        "64 B latency within one machine",
        "the doorbell: an emulated write to a register, a message to the device process, and its waking",
    ),
    (
        Figure::Events,
        "64 B latency by events",
        "an interrupt and the waking of a thread in each guest, beside the waking of two device processes",
    ),
    (
        Figure::Instructions,
        "guest instructions of a message",
        "the provider and the measuring program themselves; what differs between numbers of queue pairs is the \
         kernel's part, which no message goes through",
    ),
    (
        Figure::DeviceQps,
        "device time over queue pairs",
        "batches: a queue pair with many messages is looked at once for all of them, many queue pairs with one each \
         once for every message",
    ),
    (
        Figure::DeviceRegions,
        "device time over regions",
        "memory of the host's that is in no cache: an entry of a region is 110 bytes",
    ),
    (
        Figure::Streams,
        "bulk streams over many queue pairs",
        "the order in which the device takes queue pairs, and the processor time of the guest that posts for all of them",
    ),
    (
        Figure::Memory,
        "memory of a queue pair",
        "its ring of 4 KiB. The guest's part is by what its kernel calls available, and has shown the kernel's own \
         only; a test of the provider's counts that of the process",
    ),
    (
        Figure::Registrations,
        "registrations",
        "two system calls, and pinning and releasing pages, which all drivers have",
    ),
    (
        Figure::Connections,
        "connections",
        "rdma_cm in both guests: its messages, and the threads that take them, which all drivers have",
    ),
    (
        Figure::Nvme,
        "disks over NVMe-oF",
        "small requests: the waking of four processes on two cores, one after the other; large ones: the guests' own \
         block layer",
    ),
    (
        Figure::Nfs,
        "files over NFS",
        "the guests' own work on pages, and TCP, which is the best of the others, over the same kind of card",
    ),
    (
        Figure::Adapter,
        "between functions of one adapter",
        "one copy by one process, whose two threads have one core, as the guest that polls has the other",
    ),
    (
        Figure::Interface,
        "the interface",
        "each frame wakes two devices and a switch, one after the other, where one of virtio-net's passes a socket",
    ),
];

impl Figure {
    fn row(self) -> Option<&'static Row> {
        FIGURES.iter().find(|row| row.0 == self)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.row().map_or("", |row| row.1)
    }

    /// What limits it.
    pub fn limit(self) -> &'static str {
        self.row().map_or("", |row| row.2)
    }

    /// What a plot or a test is about, by its name.
    pub fn of(test: &str) -> Option<Self> {
        let starts = |prefix: &str| test.starts_with(prefix);
        Some(match test {
            _ if starts("scale_qps_counts") || starts("scale_qps_instructions") => {
                Self::Instructions
            }
            _ if starts("scale_qps") => Self::DeviceQps,
            _ if starts("scale_regions") => Self::DeviceRegions,
            _ if starts("stream_") => Self::Streams,
            _ if starts("loopback_") => Self::Loopback,
            _ if starts("memory") => Self::Memory,
            _ if starts("disk_") || starts("nvme_") => Self::Nvme,
            _ if starts("nfs_") => Self::Nfs,
            _ if starts("registrations") => Self::Registrations,
            _ if starts("connections") => Self::Connections,
            _ if starts("adapter_") => Self::Adapter,
            _ if starts("interface_") => Self::Interface,
            _ if starts("scale_handlers") || starts("moderation_") => Self::Events,
            _ if test.ends_with("_event") => Self::Events,
            _ if test.ends_with("_bw") => Self::Bandwidth,
            _ if test.ends_with("_rate") => Self::Rate,
            _ if test.ends_with("_lat") && !starts("split_") => Self::Latency,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_figure_has_a_limit_and_the_guide_a_reason() {
        let guide = include_str!("../../../../Documentation/benchmark.md");
        let reasons = guide
            .split("\n## ")
            .find(|section| section.starts_with("What limits each figure"))
            .expect("the section");
        for (number, (figure, name, limit)) in FIGURES.into_iter().enumerate() {
            assert_eq!((figure.name(), figure.limit()), (name, limit));
            assert_eq!(figure as usize, number, "{name}");
            assert!(limit.len() > 20, "{name}");
            assert!(reasons.contains(&format!("\n| {name} |")), "{name}");
        }
    }

    #[test]
    fn a_plot_is_about_a_figure() {
        let of = |test| Figure::of(test).map(Figure::name);
        assert_eq!(of("scale_qps"), of("scale_qps_device"));
        assert_ne!(of("scale_qps"), of("scale_qps_counts"));
        assert_eq!(of("send_event"), of("moderation_late"));
        assert_eq!(of("write_bw"), Some(Figure::Bandwidth.name()));
        assert_eq!((of("split_lat"), of("idle_device_cpu")), (None, None));
    }
}
