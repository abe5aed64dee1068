// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds in a kernel log what a clean run must not have.

/// Says that the leak detector found something.
pub const NEW_LEAKS: &str = "new suspected memory leaks";

/// Texts that mean trouble wherever they occur in a line.
const TROUBLE: &[&str] = &[
    "BUG:",
    // What SLUB finds in a freed object begins so, without the colon.
    "] BUG ",
    "kernel BUG at",
    "Oops:",
    "WARNING:",
    "Kernel panic",
    "general protection fault",
    "possible recursive locking",
    "possible circular locking",
    "possible irq lock inversion",
    "inconsistent lock state",
    "suspicious RCU usage",
    "bad unlock balance",
    "held lock freed",
    "lock held when returning to user space",
    "INVALID wait context",
    "non-static key",
    "sleeping function called from invalid context",
    "scheduling while atomic",
    "blocked for more than",
    "soft lockup",
    "hard LOCKUP",
    "detected stalls",
    "detected expedited stalls",
    // A reference to an interface that nobody gives back.
    "unregister_netdevice: waiting for",
    // An interrupt that the driver does not own up to.
    "nobody cared",
    // It finds nothing any more then.
    "Cannot allocate a kmemleak_object",
    "Kernel memory leak detector disabled",
    // A program that crashed: the provider is part of it.
    "segfault at",
    "trap invalid opcode",
    "self-detected stall",
    "unreferenced object",
    NEW_LEAKS,
    "refcount_t:",
    "list_add corruption",
    "list_del corruption",
    "UBSAN:",
    "KASAN:",
    "KCSAN:",
    "rust_kernel: panicked",
    "panicked at",
    "double fault",
    "Bad page state",
    "Unknown symbol",
];

/// Lines that look like trouble and are not ours.
const HARMLESS: &[&str] = &[
    // Processor advice at boot.
    "WARNING: Spectre",
    "MDS: Vulnerable",
    // Its servers crash at their end, on any device: see the test that runs it.
    " qperf[",
];

/// How many lines after a finding are shown with it, unless another begins or it says its end. A data
/// race always says its end.
const CONTEXT: usize = 25;

/// What begins a report of the data-race sanitiser.
const RACE: &str = "BUG: KCSAN:";
/// The line around such a report.
const RACE_END: &str = "==================================================================";

/// Whose data races are findings: the modules of this tree. The kernel has races of its own, some
/// of them on purpose.
const OURS: &[&str] = &[
    "[ferrite]",
    "[rust_rdma_loop]",
    "[rust_rdma_soft]",
    "[rust_rdma_split_host]",
    "[rust_rdma_split_unit]",
];

/// What a kernel log has to say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// What must not be, each with the lines that follow it.
    pub findings: Vec<String>,
    /// Data races in which no code of ours takes part.
    pub other_races: Vec<String>,
}

fn is_trouble(line: &str) -> bool {
    !HARMLESS.iter().any(|text| line.contains(text))
        && TROUBLE.iter().any(|text| line.contains(text))
}

/// How many of these lines belong to what the first one begins, and whether it says its end. It ends
/// where another begins, too: processors write as they like.
fn length(lines: &[&str]) -> (usize, bool) {
    let race = lines[0].contains(RACE);
    let most = if race { lines.len() } else { CONTEXT };
    let rest = &lines[1..lines.len().min(1 + most)];
    let end = rest.iter().position(|line| {
        let last = if race { RACE_END } else { "---[ end trace" };
        line.contains(last) || is_trouble(line)
    });
    (1 + end.unwrap_or(rest.len()), end.is_some())
}

/// Reads a log, or the next part of one.
pub fn read(log: &str) -> Reading {
    let lines: Vec<&str> = log.lines().collect();
    let mut reading = Reading::default();
    let mut at = 0;
    while at < lines.len() {
        if !is_trouble(lines[at]) {
            at += 1;
            continue;
        }
        let end = at + length(&lines[at..]).0;
        let text = lines[at..end].join("\n");
        let race = lines[at].contains(RACE);
        if race && !OURS.iter().any(|ours| text.contains(ours)) {
            reading.other_races.push(text);
        } else {
            reading.findings.push(text);
        }
        at = end;
    }
    reading
}

/// How much of a log that still grows can be read: whole lines, and no data race whose end is still
/// to come, since that may yet tell of our code.
pub fn readable(log: &[u8]) -> usize {
    let whole = log
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    let text = String::from_utf8_lossy(&log[..whole]);
    let lines: Vec<&str> = text.lines().collect();
    let last = lines.iter().rposition(|line| line.contains(RACE));
    match last.filter(|at| !length(&lines[*at..]).1) {
        // The same number of lines, in bytes: what is no text has another length as text.
        Some(race) => {
            let newlines = log.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            let ends = newlines.map(|(at, _)| at + 1);
            std::iter::once(0).chain(ends).nth(race).unwrap_or(whole)
        }
        None => whole,
    }
}

/// What the leak detector reports.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Leaks<'a> {
    /// Nodes of the radix tree of a device's methods that the RDMA core has lost (as of Linux 7.2): where
    /// there is no memory for the next node on the way to an entry, those above stay, and nothing that frees
    /// entries finds them.
    pub of_the_core: usize,
    /// All else.
    pub others: Vec<&'a str>,
}

/// Reads what `/sys/kernel/debug/kmemleak` says.
pub fn leaks(report: &str) -> Leaks<'_> {
    const BEGINS: &str = "unreferenced object";
    const WAY: [&str; 3] = [
        "radix_tree_node_alloc.",
        "radix_tree_insert+",
        "uverbs_alloc_api+",
    ];

    let mut leaks = Leaks::default();
    let mut starts: Vec<usize> = report.match_indices(BEGINS).map(|found| found.0).collect();
    starts.push(report.len());
    for object in starts.windows(2).map(|ends| &report[ends[0]..ends[1]]) {
        if WAY.iter().all(|function| object.contains(function)) {
            leaks.of_the_core += 1;
        } else {
            leaks.others.push(object);
        }
    }
    leaks
}

#[cfg(test)]
mod tests {
    use super::{leaks, read, Leaks};

    fn findings(log: &str) -> Vec<String> {
        read(log).findings
    }

    #[test]
    fn a_clean_log_has_no_findings() {
        let log = "[    0.0] Linux version 7.2\n[    1.0] ferrite: loading out-of-tree module taints kernel.\n";
        assert!(findings(log).is_empty());
    }

    #[test]
    fn leaks_of_the_core_are_told_from_others() {
        let core = "unreferenced object 0xffff88800052b6d0 (size 576):
  backtrace (crc 314b4ee):
    kmem_cache_alloc_noprof+0x23b/0x4d0
    radix_tree_node_alloc.constprop.0+0x44/0xe0
    radix_tree_insert+0xcf/0x1c0
    uapi_merge_def+0x123/0x7f0
    uverbs_alloc_api+0x89/0x750
";
        let others = [
            "unreferenced object 0xffff888003d2a000 (size 512):
    __kmalloc_noprof+0x1/0x2
    uverbs_alloc_api+0x89/0x750
",
            "unreferenced object 0xffff888003d2b000 (size 576):
    radix_tree_node_alloc.constprop.0+0x44/0xe0
    radix_tree_insert+0xcf/0x1c0
    ferrite_probe+0x1/0x2
",
        ];
        let report = [core, others[0], core, others[1]].concat();
        let expected = Leaks {
            of_the_core: 2,
            others: others.to_vec(),
        };
        assert_eq!(leaks(&report), expected);
        assert_eq!(leaks("nothing\n"), Leaks::default());
    }

    #[test]
    fn each_kind_of_report_is_found_once() {
        for report in [
            "[ 1.0] WARNING: CPU: 0 PID: 1 at kernel/locking/lockdep.c:1",
            "[ 1.0] BUG: kernel NULL pointer dereference, address: 0",
            "[ 1.0] WARNING: possible circular locking dependency detected",
            "[ 1.0] INFO: task insmod:12 blocked for more than 120 seconds.",
            "unreferenced object 0xffff888003d2a000 (size 512):",
            "[ 1.0] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)",
            "[ 1.0] BUG: sleeping function called from invalid context at mm/slab.h:1",
            "[ 1.0] BUG kmalloc-96 (Tainted: G O): Poison overwritten",
            "[ 1.0] unregister_netdevice: waiting for eth0 to become free. Usage count = 2",
            "[ 1.0] rping[77]: segfault at 0 ip 0 sp 0 error 4 in libibverbs.so.1",
        ] {
            let log = format!("before\n{report}\n[ 1.0] Call Trace:\n[ 1.0]  f+0x1/0x2\n");
            let found = findings(&log);
            assert_eq!(found.len(), 1, "{report}");
            assert!(found[0].contains("f+0x1/0x2"));
        }
    }

    #[test]
    fn what_begins_within_another_report_is_one_of_its_own() {
        let log = "[ 1.0] WARNING: kernel/irq/proc.c:1 at unregister_irq_proc\n[ 1.0]  f+0x1/0x2\n\
            [ 1.0] BUG: KASAN: slab-use-after-free in g+0x1/0x2\n[ 1.0]  g+0x1/0x2\n";
        let found = findings(log);
        assert_eq!(found.len(), 2);
        assert!(!found[0].contains("KASAN") && found[1].contains("g+0x1"));
        // What follows the end of a report is no part of it.
        let log = "[ 1.0] WARNING: one\n[ 1.0] ---[ end trace 0 ]---\n[ 1.0] later\n";
        assert_eq!(findings(log), ["[ 1.0] WARNING: one"]);
    }

    #[test]
    fn data_races_count_where_our_code_takes_part() {
        let line = super::RACE_END;
        let race = |frame: &str| {
            format!(
                "{line}\n[ 1.0] BUG: KCSAN: data-race in a / b\n{}[ 1.0]  {frame}\n{line}\n",
                "[ 1.0]  deep+0x1/0x2\n".repeat(30)
            )
        };
        let log = race("ferrite_poll+0x1/0x2 [ferrite]") + &race("tick_do_update+0x1/0x2");
        let reading = read(&log);
        assert_eq!(reading.findings.len(), 1);
        assert!(reading.findings[0].contains("[ferrite]"));
        assert_eq!(reading.other_races.len(), 1);
    }

    #[test]
    fn trouble_within_a_race_of_the_kernels_own_is_found() {
        let line = super::RACE_END;
        let log = format!(
            "{line}\n[ 1.0] BUG: KCSAN: data-race in a / b\n[ 1.0] WARNING: at f\n\
             [ 1.0]  g+0x1/0x2 [ferrite]\n{line}\n"
        );
        let reading = read(&log);
        assert_eq!(reading.findings.len(), 1);
        assert!(reading.findings[0].starts_with("[ 1.0] WARNING"));
        assert_eq!(reading.other_races.len(), 1);
    }

    #[test]
    fn a_race_is_read_when_it_is_whole() {
        let line = super::RACE_END;
        let before = format!("\u{fffd}before\n{line}\n");
        let race = "[ 1.0] BUG: KCSAN: data-race in a / b\n[ 1.0]  one+0x1/0x2\n";
        let rest = format!("[ 1.0]  two+0x1/0x2 [ferrite]\n{line}\n");
        let whole = format!("{before}{race}{rest}");
        for cut in before.len()..whole.len() - 1 {
            let readable = super::readable(&whole.as_bytes()[..cut]);
            assert_eq!(readable, before.len(), "{:?}", &whole[..cut]);
        }
        assert_eq!(super::readable(whole.as_bytes()), whole.len());
        assert_eq!(read(&whole).findings.len(), 1);
        // Nothing but lines that are whole.
        assert_eq!(super::readable(b"one\ntwo"), 4);
        assert_eq!(super::readable(b"\xff\xff\ntwo"), 3);
    }

    #[test]
    fn a_crash_that_is_known_is_none_of_ours() {
        assert!(findings("[ 1.0] qperf[9]: segfault at 18 ip 0 sp 0 error 4\n").is_empty());
    }
}
