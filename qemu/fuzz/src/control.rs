// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Lines on the control sockets of a device and of a fabric: any, with pieces that mean something.

use crate::Input;
use ferrite_abi::*;
use ferrite_device::control::{handle, After};
use ferrite_device::function::{Frontend, Function};
use ferrite_device::interrupts::Kinds;
use ferrite_device::vfio_user::Backend;
use ferrite_engine::Config;
use ferrite_fabric::control::Request;
use ferrite_fabric::fault::Faults;
use ferrite_fabric::switch::{Mac, Output, PortId, Switch};

const LINES: usize = 32;
const MAC: [u8; 6] = [2, 0xfe, 0, 0, 0, 1];

/// What lines are made of.
const WORDS: [&str; 64] = [
    "{\"cmd\":\"",
    "\"}",
    "\",\"",
    "\":",
    ",\"",
    "}",
    "{",
    "[",
    "]",
    "\"",
    ",",
    ":",
    "counters",
    "fatal",
    "link",
    "misbehave",
    "memory-error",
    "channel",
    "die",
    "faults",
    "partition",
    "heal",
    "pcap-stop",
    "shortcuts",
    "stats",
    "up",
    "true",
    "false",
    "null",
    "where",
    "internal",
    "external",
    "address",
    "contained",
    "event",
    "packets",
    "pool-low",
    "seed",
    "answers",
    "delay",
    "loss",
    "duplicate",
    "corrupt",
    "reorder",
    "rate",
    "only",
    "roce",
    "all",
    "reset",
    "slow",
    "never",
    "nonsense",
    "replies",
    "hold_tags",
    "hold_control",
    "events",
    "1",
    "0.5",
    "1e308",
    "-1",
    "18446744073709551615",
    "a",
    "b",
    "02:fe:00:00:00:01",
];

/// A line of words and bytes.
fn line(input: &mut Input<'_>) -> Vec<u8> {
    let mut line = Vec::new();
    for _ in 0..=input.u8() % 32 {
        match input.u8() {
            word @ 0..=191 => line.extend(WORDS[usize::from(word) % WORDS.len()].bytes()),
            _ => line.extend(input.bytes(2)),
        }
    }
    line
}

#[derive(Default)]
struct Count(u64);

impl Output for Count {
    fn send(&mut self, _port: PortId, _frame: &[u8]) -> bool {
        self.0 += 1;
        true
    }

    fn capture(&mut self, _frame: &[u8]) {}
}

/// The target.
pub fn control(data: &[u8]) {
    let mut input = Input::new(data);
    let device = Function::new(Config::new(MAC, 4), Kinds::all(4)).expect("a device");
    let mut switch = Switch::new(1, Faults::default());
    let ports = [switch.attach(), switch.attach()];
    switch.claim(ports[0], Mac(MAC), false);
    let mut now = 0u64;
    for _ in 0..LINES {
        if input.is_empty() {
            break;
        }
        let line = line(&mut input);
        let (answer, after) = handle(&line, &mut device.lock());
        assert!(answer.is_object(), "an answer is an object: {answer}");
        let text = answer.to_string();
        assert!(!text.contains('\n'), "an answer is a line");
        let dies = serde_json::from_slice::<serde_json::Value>(&line)
            .is_ok_and(|value| value["cmd"] == "die");
        assert!(
            after == After::GoOn || dies,
            "only a device that is told to dies"
        );

        // It still is a device.
        let mut frontend = Frontend::new(&device, None);
        let mut magic = [0; 4];
        frontend.region_read(BAR_REGISTERS, REG_MAGIC as u64, &mut magic);
        let word = u32::from(input.u8()).to_le_bytes();
        frontend.region_write(BAR_REGISTERS, REG_CONTROL as u64, &word);
        frontend.batch_done();

        match serde_json::from_slice::<Request>(&line) {
            Ok(Request::Faults(change)) => {
                if let Ok(faults) = change.apply(switch.faults()) {
                    assert_eq!(faults.check(), Ok(()));
                    switch.set_faults(faults);
                }
            }
            Ok(Request::Partition { a, b }) => switch.partition(a, b),
            Ok(Request::Heal { a, b }) => switch.heal(a.as_ref(), b.as_ref()),
            // The others are the process's.
            _ => {}
        }
        let mut frame = [0x5a; 60];
        frame[6..12].copy_from_slice(&MAC);
        let mut count = Count::default();
        switch.receive(ports[0], &frame, now, &mut count);
        now = now.saturating_add(input.number().saturating_mul(1_000_000));
        switch.poll(now, &mut count);
        assert!(count.0 <= 256, "{} frames of a few", count.0);
    }
}
