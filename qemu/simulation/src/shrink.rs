// SPDX-License-Identifier: Apache-2.0 OR MIT

//! A short plan that still goes wrong.

use crate::{Plan, Step};
use ferrite_fabric::fault::Faults;

/// Finds a plan with fewer and smaller steps for which `fails` is still true, as it is for `plan`.
/// Tries no more than `tries` plans.
pub fn shrink(plan: &Plan, mut tries: usize, mut fails: impl FnMut(&Plan) -> bool) -> Plan {
    let mut best = plan.clone();
    let mut attempt = |candidate: Plan, best: &mut Plan| {
        if tries == 0 || candidate == *best {
            return false;
        }
        tries -= 1;
        let good = fails(&candidate);
        if good {
            *best = candidate;
        }
        good
    };
    loop {
        let before = best.clone();
        // Long pieces first, then single steps.
        let mut piece = best.steps.len().div_ceil(2).max(1);
        loop {
            let mut at = 0;
            while at < best.steps.len() {
                let mut candidate = best.clone();
                let end = (at + piece).min(candidate.steps.len());
                candidate.steps.drain(at..end);
                if !attempt(candidate, &mut best) {
                    at += piece;
                }
            }
            if piece == 1 {
                break;
            }
            piece = piece.div_ceil(2);
        }
        for index in 0..best.steps.len() {
            for simpler in simpler(&best.steps[index]) {
                let mut candidate = best.clone();
                candidate.steps[index] = simpler;
                if attempt(candidate, &mut best) {
                    break;
                }
            }
        }
        if best == before {
            return best;
        }
    }
}

/// Steps that do less.
fn simpler(step: &Step) -> Vec<Step> {
    let lengths = |length: u32| {
        let mut shorter = vec![0, 1, length / 2, length.saturating_sub(1)];
        shorter.retain(|other| *other < length);
        shorter.dedup();
        shorter
    };
    match *step {
        Step::Send {
            end,
            length,
            immediate,
        } => {
            let step = |length, immediate| Step::Send {
                end,
                length,
                immediate,
            };
            let mut steps: Vec<Step> = lengths(length)
                .into_iter()
                .map(|length| step(length, immediate))
                .collect();
            if immediate {
                steps.push(step(length, false));
            }
            steps
        }
        Step::Write {
            end,
            length,
            immediate,
        } => {
            let step = |length, immediate| Step::Write {
                end,
                length,
                immediate,
            };
            let mut steps: Vec<Step> = lengths(length)
                .into_iter()
                .map(|length| step(length, immediate))
                .collect();
            if immediate {
                steps.push(step(length, false));
            }
            steps
        }
        Step::Read { end, length } => lengths(length)
            .into_iter()
            .map(|length| Step::Read { end, length })
            .collect(),
        Step::Receive { end, count } if count > 1 => vec![Step::Receive { end, count: 1 }],
        Step::Wait(time) if time > 1 => vec![Step::Wait(1), Step::Wait(time / 10)],
        Step::Network(faults) if !faults.none() => {
            let without: [fn(&mut Faults); 6] = [
                |faults| faults.loss = 0.0,
                |faults| faults.duplicate = 0.0,
                |faults| faults.corrupt = 0.0,
                |faults| faults.reorder = 0.0,
                |faults| faults.delay = 0.0,
                |faults| faults.rate = 0,
            ];
            without
                .iter()
                .map(|change| {
                    let mut fewer = faults;
                    change(&mut fewer);
                    Step::Network(fewer)
                })
                .filter(|other| other != step)
                .collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::End;

    #[test]
    fn what_does_not_matter_goes() {
        let plan = Plan::from_seed(7);
        let matters = |step: &Step| matches!(step, Step::Send { length, .. } if *length > 10);
        let count = |plan: &Plan| plan.steps.iter().filter(|step| matters(step)).count();
        assert!(count(&plan) >= 2 && plan.steps.len() > 20);
        let short = shrink(&plan, 10_000, |plan| count(plan) >= 2);
        let lengths: Vec<u32> = short
            .steps
            .iter()
            .map(|step| match step {
                Step::Send { length, .. } => *length,
                other => panic!("{other}"),
            })
            .collect();
        assert_eq!(lengths, [11, 11]);
        assert!(short.to_string().contains("sends 11 bytes"));
    }

    #[test]
    fn it_gives_up_after_so_many_tries() {
        let plan = Plan::from_seed(3);
        let mut tried = 0;
        shrink(&plan, 5, |_| {
            tried += 1;
            false
        });
        assert_eq!(tried, 5);
        let end = End {
            connection: 0,
            side: 0,
        };
        let sent = Step::Send {
            end,
            length: 0,
            immediate: false,
        };
        assert!(simpler(&sent).is_empty());
    }
}
