// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Many seeds, known and fresh ones. A failing one is printed, with the shortest list of steps
//! that was found to fail as well; `FERRITE_SEED=n` repeats it.

use ferrite_engine::roce::icrc;
use ferrite_simulation::shrink::shrink;
use ferrite_simulation::{run, Plan, Seen};
use std::panic::{set_hook, take_hook};
use std::time::SystemTime;

/// Seeds that every run tries, and fresh ones.
const KNOWN: u64 = 100;
const FRESH: u64 = 100;
/// A seed here takes as long as a fifth of one elsewhere: so many for each of `FERRITE_SEEDS`.
const FOR_EACH: u64 = 5;
/// Plans tried to find a short one.
const SHRINKING: usize = 1500;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

fn seeds() -> Vec<u64> {
    if let Some(seed) = number("FERRITE_SEED") {
        return vec![seed];
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let base = now.map_or(0, |since| since.as_micros() as u64);
    let fresh = number("FERRITE_SEEDS").map_or(FRESH, |count| count * FOR_EACH);
    (0..KNOWN).chain((0..fresh).map(|n| base + n)).collect()
}

/// The shortest plan found that fails as this one does, and how.
fn shortest(plan: &Plan) -> String {
    // Each failure would print where it panicked, if it did.
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let short = shrink(plan, SHRINKING, |plan| run(plan, None).is_err());
    set_hook(hook);
    match run(&short, None) {
        Err(failure) => format!("{failure}\nin the end of this:\n{short}"),
        Ok(_) => format!("nothing the second time\n{short}"),
    }
}

#[test]
fn every_seed_ends_well() {
    let seeds = seeds();
    let (mut seen, mut of_known) = (Seen::default(), Seen::default());
    for &seed in &seeds {
        let plan = Plan::from_seed(seed);
        match run(&plan, None) {
            Ok(more) => {
                seen += more;
                if seed < KNOWN {
                    of_known += more;
                }
            }
            Err(failure) => panic!(
                "FERRITE_SEED={seed}: {failure}\n\nmade short: {}",
                shortest(&plan)
            ),
        }
    }
    let steps = ferrite_engine::testing::steps();
    println!("{} seeds, {steps} steps of engines: {seen:?}", seeds.len());
    // The known ones have everything in them, each time; how much fresh ones have is chance.
    if seeds.len() >= KNOWN as usize {
        let Seen {
            posted,
            successes,
            errors,
            received,
            atomics,
            frames,
            lost,
            duplicated,
            reordered,
            corrupted,
            cut,
            retransmissions,
            not_ready,
            stops,
            reconnections,
            given_up,
            refused,
            accesses,
        } = of_known;
        let each = [
            posted,
            successes,
            errors,
            received,
            atomics,
            frames,
            lost,
            duplicated,
            reordered,
            corrupted,
            cut,
            retransmissions,
            not_ready,
            stops,
            reconnections,
            given_up,
            refused,
            accesses,
        ];
        assert!(each.iter().all(|&count| count > 4), "{of_known:?}");
    }
}

#[test]
fn a_seed_goes_the_same_way_each_time() {
    for seed in [3, 14, 15] {
        let plan = Plan::from_seed(seed);
        assert_eq!(plan, Plan::from_seed(seed));
        assert_eq!(run(&plan, None), run(&plan, None));
    }
}

/// Changes the last byte of data in a frame and makes its check right again, as no wire does.
fn forge(frame: &mut [u8]) {
    let total = frame.len();
    if total < 14 + 20 + 8 + 12 + 64 {
        return;
    }
    frame[total - 9] ^= 0x80;
    if let Some(crc) = icrc(&frame[14..total - 4]) {
        frame[total - 4..].copy_from_slice(&crc.to_le_bytes());
    }
}

#[test]
fn a_byte_that_is_changed_on_its_way_is_found_and_the_plan_made_short() {
    let mut found = 0;
    for seed in 0..8 {
        let plan = Plan::from_seed(seed);
        let fails = |plan: &Plan| {
            let mut count = 0u64;
            let mut sabotage = |frame: &mut Vec<u8>| {
                count += 1;
                if count % 3 == 0 {
                    forge(frame);
                }
            };
            run(plan, Some(&mut sabotage)).is_err()
        };
        if !fails(&plan) {
            continue;
        }
        found += 1;
        if found == 1 {
            let short = shrink(&plan, 400, fails);
            println!("{short}");
            assert!(
                short.steps.len() <= 4 && short.steps.len() < plan.steps.len(),
                "{short}"
            );
        }
    }
    assert!(found >= 7, "{found} of 8");
}
