// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Finds in a kernel log what a clean run must not have.

/// Texts that mean trouble wherever they occur in a line.
const TROUBLE: &[&str] = &[
    "BUG:",
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
    "self-detected stall",
    "unreferenced object",
    "new suspected memory leaks",
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
];

/// How many lines after a finding are shown with it.
const CONTEXT: usize = 25;

/// The findings in a log, each with the lines that follow it.
pub fn findings(log: &str) -> Vec<String> {
    let lines: Vec<&str> = log.lines().collect();
    let mut found = Vec::new();
    let mut skip_to = 0;
    for (index, line) in lines.iter().enumerate() {
        if index < skip_to || HARMLESS.iter().any(|text| line.contains(text)) {
            continue;
        }
        if TROUBLE.iter().any(|text| line.contains(text)) {
            let end = (index + CONTEXT).min(lines.len());
            found.push(lines[index..end].join("\n"));
            skip_to = end;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::findings;

    #[test]
    fn a_clean_log_has_no_findings() {
        let log = "[    0.0] Linux version 7.2\n[    1.0] ferrite: loading out-of-tree module taints kernel.\n";
        assert!(findings(log).is_empty());
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
        ] {
            let log = format!("before\n{report}\n[ 1.0] Call Trace:\n[ 1.0]  f+0x1/0x2\n");
            let found = findings(&log);
            assert_eq!(found.len(), 1, "{report}");
            assert!(found[0].contains("f+0x1/0x2"));
        }
    }
}
