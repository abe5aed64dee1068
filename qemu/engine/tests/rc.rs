// SPDX-License-Identifier: Apache-2.0 OR MIT

//! Reliable connections between two engines over a good wire: every operation, with its data.

mod wire;

use ferrite_abi::*;
use ferrite_engine::testing::{Node, QpOptions, SendWork};
use wire::*;

const SIZES: [u32; 14] = [
    0,
    1,
    3,
    63,
    1023,
    1024,
    1025,
    4032,
    4095,
    4096,
    4097,
    8192,
    3 * 1024,
    40 * 1024 + 7,
];

#[test]
fn sends_of_every_size_arrive_with_their_data() {
    for log_mtu in [8, 10, 12] {
        let mut pair = Pair::new(Setup {
            log_mtu,
            ..Setup::default()
        });
        let from = pair.a.register(0x101, PD, ALL, 64 << 10);
        let to = pair.b.register(0x201, PD, ALL, 64 << 10);
        for (n, length) in SIZES.into_iter().enumerate() {
            let data = pattern(n as u64, length as usize);
            pair.a.fill(&from, 0, &data);
            pair.b.fill(&to, 0, &vec![0xee; length as usize + 1]);
            let receive = pair.b.post_recv(QPN_B, &[to.sge(0, length)]);
            let index = pair.a.post_send(QPN_A, &send(&from, length));
            pair.exchange();
            let sent = pair.completions_a();
            assert_eq!(statuses(&sent), [CompletionStatus::Success]);
            assert_eq!((sent[0].qpn, sent[0].index), (QPN_A, index));
            assert_eq!(sent[0].opcode, CompletionOpcode::Send.number());
            let received = pair.completions_b();
            assert_eq!(statuses(&received), [CompletionStatus::Success]);
            assert_eq!((received[0].qpn, received[0].index), (QPN_B, receive));
            assert_eq!(received[0].byte_count, length);
            assert_eq!(received[0].opcode, CompletionOpcode::Receive.number());
            assert_eq!(received[0].flags, COMPLETION_RECEIVE);
            let mut got = pair.b.contents(&to, 0, length as usize + 1);
            assert_eq!(got.pop(), Some(0xee), "a byte too many");
            assert_eq!(got, data);
        }
        assert_eq!(pair.a.engine.counters().retransmissions, 0);
    }
}
