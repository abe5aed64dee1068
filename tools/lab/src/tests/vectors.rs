// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How often the vectors of a machine's device were taken, and by which processor.

use anyhow::{Context, Result};

use crate::vm::Vm;

/// Shell text that says it, to be read by [`read`]. It runs no other program: in an emulator that is what
/// takes time, and who is looked at needs it.
pub const TAKEN: &str = r#"
dev=(/sys/class/infiniband/*); irqs=($dev/device/msi_irqs/*)
if [ -e $irqs ]; then echo ${irqs[@]##*/}; else read -r irq <$dev/device/irq; echo $irq; fi
echo "$(</proc/interrupts)"
echo .
"#;

/// For each vector in the order of the device's table, or for the pin: how often each processor took it.
pub type Taken = Vec<Vec<u64>>;

/// Reads what [`TAKEN`] said, up to its end.
pub fn read<'t>(lines: &mut impl Iterator<Item = &'t str>) -> Result<Taken> {
    let irqs = lines.next().context("no interrupts of the device")?;
    let mut irqs: Vec<u32> = irqs
        .split_whitespace()
        .map(|word| word.parse().context("no number of an interrupt"))
        .collect::<Result<_>>()?;
    irqs.sort_unstable();
    // Only those that are online have a column.
    let cpus: Vec<usize> = lines
        .next()
        .context("no processors")?
        .split_whitespace()
        .map(|word| {
            let number = word.strip_prefix("CPU").context("no processor")?;
            Ok(number.parse()?)
        })
        .collect::<Result<_>>()?;
    let all = cpus.last().map_or(0, |last| last + 1);
    let mut taken = vec![vec![0; all]; irqs.len()];
    for line in lines.take_while(|line| *line != ".") {
        let Some((irq, counts)) = line.split_once(':') else {
            continue;
        };
        let irq = irq.trim().parse::<u32>().ok();
        let Some(vector) = irq.and_then(|irq| irqs.iter().position(|of_us| *of_us == irq)) else {
            continue;
        };
        for (cpu, count) in cpus.iter().zip(counts.split_whitespace()) {
            taken[vector][*cpu] = count.parse().with_context(|| line.to_owned())?;
        }
    }
    Ok(taken)
}

/// How often each vector was taken by each processor.
pub fn taken(vm: &Vm) -> Result<Taken> {
    read(&mut vm.sh(TAKEN)?.lines())
}

/// Shell text that does a thing twice, a while after what was done before: what was on its way then has
/// arrived. The two are told apart by [`halves`].
pub fn twice(look: &str) -> String {
    format!(
        "exec {{never}}<> <(:)
         look() {{
             {look}
         }}
         read -rt 0.2 -u $never
         look || exit
         echo ...
         read -rt 0.4 -u $never
         look"
    )
}

/// What was said the first and the second time.
pub fn halves(text: &str) -> Result<(&str, &str)> {
    text.split_once("\n...\n").context("it was looked once")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_in_order_and_processors_that_are_offline_have_taken_none() {
        let text =
            "101 99\n           CPU0       CPU2\n  8:   1 0  rtc0\n 99:   5   0  MSI  ferrite\n\
                    101:  0   7  MSI  ferrite\nNMI:  3  4  Non-maskable interrupts\n.\nmore";
        let mut lines = text.lines();
        assert_eq!(read(&mut lines).unwrap(), [[5, 0, 0], [0, 0, 7]]);
        assert_eq!(lines.next(), Some("more"));
    }

    #[test]
    fn a_look_is_told_from_the_next() {
        assert_eq!(halves("one\n...\ntwo\n").unwrap(), ("one", "two\n"));
        assert!(halves("one\n").is_err());
    }
}
