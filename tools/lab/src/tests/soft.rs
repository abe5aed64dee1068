// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sample of a driver: another one than Ferrite's on the same abstractions.

use std::time::Duration;

use anyhow::{ensure, Result};

use super::driver::{bind, unbind};
use super::VmTest;
use crate::cluster::Cluster;
use crate::pyverbs;
use crate::traffic::{pingpong, DEVICE_AND_GID};
use crate::vm::Vm;

/// With all checkers of the test kernel.
pub const TESTS: &[VmTest] = &[
    VmTest::new(
        "a kernel user passes its tests on the sample of a driver",
        kernel_user,
    ),
    VmTest::new(
        "rdma and sysfs show the sample's device, whose port follows its interface",
        shown,
    ),
    VmTest::new(
        "processes exchange messages through the sample, by polling and by events",
        messages,
    ),
    VmTest::new(
        "rdma-core's own tests pass on the sample, as far as a device of reliable connections goes",
        suite,
    ),
    VmTest::new(
        "a process that posts what is not its own to the sample is refused",
        refused,
    ),
];

const TIME: Duration = Duration::from_secs(180);

/// What every device does, of the tests of the kernel user.
const DONE: &[&str] = &[
    "sends_arrive",
    "immediate_data_arrives",
    "many_requests_complete",
    "writes_land_where_they_should",
    "writes_with_immediate_consume_a_receive",
    "reads_fetch_the_peers_memory",
    "atomics_are_done_once_and_return_what_was_there",
    "send_with_invalidate_ends_the_peers_region",
    "a_region_may_be_registered_again_under_another_key",
    "what_is_not_allowed_is_refused",
    "beyond_the_region_is_refused",
    "a_message_longer_than_the_receive_fails_at_both_ends",
    "a_region_is_used_before_its_registration_is_complete",
    "sends_and_receives_have_room_of_their_own",
    "rings_may_be_large",
    "regions_may_have_large_pages",
    "regions_of_other_domains_are_not_posted",
    "regions_may_have_many_pages",
    "regions_may_have_room_for_more_pages",
];

/// Runs `check` with the sample loaded, in a machine without another device.
fn with_sample(vm: &Vm, check: impl FnOnce() -> Result<()>) -> Result<()> {
    unbind(vm)?;
    let checked = vm
        .sh_in(
            "insmod /ferrite/modules/rust_rdma_soft.ko && cp /ferrite/lib/soft.driver /etc/libibverbs.d/",
            Duration::from_secs(60),
        )
        .and_then(|_| {
            vm.wait_for(
                "rdma link | grep 'rust_soft0/1' | grep 'state ACTIVE' | grep -q 'netdev eth0'",
                Duration::from_secs(60),
            )
        })
        .and_then(|()| check());
    let removed = vm.sh_in(
        "rm -f /etc/libibverbs.d/soft.driver; rmmod rust_rdma_soft",
        Duration::from_secs(60),
    );
    bind(vm)?;
    checked?;
    removed.map(drop)
}

fn kernel_user(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        one.sh_in(
            "dmesg -C; insmod /ferrite/modules/rust_rdma_loop.ko; s=$?; rmmod rust_rdma_loop; exit $s",
            TIME,
        )?;
        let said = one.sh("dmesg | grep rust_rdma_loop")?;
        for test in DONE {
            ensure!(
                said.contains(&format!("rust_soft0: rust_rdma_loop: ok {test}\n")),
                "not done: {test}\n{said}"
            );
        }
        ensure!(!said.contains("not ok"), "{said}");
        Ok(())
    })
}

fn shown(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        one.sh(
            "set -e
             rdma dev show rust_soft0 | grep -q 'node_type ca' || { rdma dev; exit 1; }
             grep -q 'RDMA device of software' /sys/class/infiniband/rust_soft0/node_desc
             grep -q RoCE /sys/class/infiniband/rust_soft0/ports/1/gid_attrs/types/0
             rdma resource show | grep -q 'rust_soft0: .*qp 0' || { rdma resource show; exit 1; }
             grep -qx 1 /sys/class/infiniband_verbs/uverbs*/abi_version
             rdma dev set rust_soft0 name other0; rdma link | grep -q other0/1; rdma dev set other0 name rust_soft0",
        )?;
        one.sh("ip link set eth0 down")?;
        let down = one.wait_for(
            "rdma link | grep 'rust_soft0/1' | grep -q 'state DOWN'",
            Duration::from_secs(60),
        );
        one.sh(&format!(
            "ip link set eth0 up; ip addr replace {}/24 dev eth0",
            one.ip()
        ))?;
        down?;
        one.wait_for(
            "rdma link | grep 'rust_soft0/1' | grep -q 'state ACTIVE'",
            Duration::from_secs(60),
        )
    })
}

fn messages(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        for (size, events) in [(4096, false), (100_000, true)] {
            pingpong(one, one, size, 100, events)?;
        }
        Ok(())
    })
}

/// Modules of rdma-core's tests in which there is something for a device that has reliable connections (RC), and neither
/// datagrams nor windows, shared queues, or extended ways to post and poll.
const MODULES: &[&str] = &[
    "test_atomic",
    "test_cq",
    "test_cq_events",
    "test_mr",
    "test_pd",
    "test_qp",
];

/// How many of their tests pass, and how many have to be skipped.
const PASSED: usize = 21;
const SKIPPED: usize = 56;

fn suite(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        let [passed, skipped] = pyverbs::with_suite(one, |_| pyverbs::of_modules(one, MODULES))?;
        ensure!(
            (passed.len(), skipped.len()) == (PASSED, SKIPPED),
            "{} passed, not {PASSED}, and {} were skipped, not {SKIPPED}\npassed: {passed:#?}\nskipped: {skipped:#?}",
            passed.len(),
            skipped.len()
        );
        Ok(())
    })
}

/// Posts sends, each with queue pairs of its own, of which none may succeed: memory of the kernel's by the key that
/// kernel users have, that of another domain, beyond a region, and with a key that no region has; then what cannot even
/// be posted.
const HOSTILE: &str = r#"
import errno, sys, types
place, gid = sys.argv[1], int(sys.argv[2])
sys.path[:0] = [place, place + '/tests']
package = types.ModuleType('tests')
package.__path__ = [place + '/tests']
sys.modules['tests'] = package
import pyverbs.enums as e
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.cq import CQ
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.wr import SGE, SendWR, RecvWR
from tests.base import RCResources
from tests import utils

def pair():
    ends = [RCResources(dev_name='rust_soft0', ib_port=1, gid_index=gid) for _ in range(2)]
    ends[0].pre_run(ends[1].psns, ends[1].qps_num)
    ends[1].pre_run(ends[0].psns, ends[0].qps_num)
    return ends

def completion(end):
    for _ in range(1000000):
        count, wcs = end.cq.poll(1)
        if count:
            return wcs[0].status
    raise SystemExit('no completion')

def post(end, sge, send=True, flags=e.IBV_SEND_SIGNALED):
    if send:
        end.qp.post_send(SendWR(1, e.IBV_WR_SEND, num_sge=len(sge), sg=sge, send_flags=flags))
    else:
        end.qp.post_recv(RecvWR(1, num_sge=len(sge), sg=sge))

kernel = 0xffff888000001000
wrong = {
    'kernel': lambda end: (kernel, 8, 0),
    'user address': lambda end: (end.mr.buf, 8, 0),
    'no region': lambda end: (end.mr.buf, 8, end.mr.lkey + 1),
    'no number': lambda end: (end.mr.buf, 8, 0xffffff00),
    'before': lambda end: (end.mr.buf - 1, 8, end.mr.lkey),
    'beyond': lambda end: (end.mr.buf + end.msg_size - 4, 8, end.mr.lkey),
    'long': lambda end: (end.mr.buf, 0x7fffffff, end.mr.lkey),
    'last': lambda end: (2 ** 64 - 4, 8, end.mr.lkey),
}
for name, sge in wrong.items():
    near, far = pair()
    post(far, [SGE(far.mr.buf, far.msg_size, far.mr.lkey)], send=False)
    post(near, [SGE(*sge(near))])
    status = completion(near)
    assert status == e.IBV_WC_LOC_PROT_ERR, (name, status)
    # To be written to. A receive may be longer than its region, where the message is not.
    near, far = pair()
    post(far, [SGE(*sge(far))], send=False)
    post(near, [SGE(near.mr.buf, 8, near.mr.lkey)])
    status = completion(near), completion(far)
    fits = (e.IBV_WC_SUCCESS, e.IBV_WC_SUCCESS)
    assert status == (fits if name == 'long' else (e.IBV_WC_REM_OP_ERR, e.IBV_WC_LOC_PROT_ERR)), (name, status)

# What names no byte may name anything.
near, far = pair()
post(far, [SGE(kernel, 0, 0), SGE(far.mr.buf, 8, far.mr.lkey)], send=False)
post(near, [SGE(near.mr.buf, 8, near.mr.lkey), SGE(kernel, 0, 0xffffff00)])
assert completion(near) == e.IBV_WC_SUCCESS and completion(far) == e.IBV_WC_SUCCESS

# Ends that begin with other sequence numbers than they were told are not connected.
for wrong in range(2):
    near, far = [RCResources(dev_name='rust_soft0', ib_port=1, gid_index=gid) for _ in range(2)]
    said = [far.psns, near.psns]
    said[wrong] = [(psn + 1) % 2 ** 24 for psn in said[wrong]]
    near.pre_run(said[0], far.qps_num)
    far.pre_run(said[1], near.qps_num)
    post(far, [SGE(far.mr.buf, 8, far.mr.lkey)], send=False)
    post(near, [SGE(near.mr.buf, 8, near.mr.lkey)])
    assert completion(near) == e.IBV_WC_RETRY_EXC_ERR, wrong

# A list of requests that is larger than a command may be; one more has no room.
near, far = pair()
qps = [QP(near.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=CQ(near.ctx, 8192), rcq=CQ(near.ctx, 8192), cap=QPCap(max_recv_wr=8192)))]
qps[0].to_init(QPAttr(port_num=1))
requests = [None]
for number in range(8192):
    requests.append(RecvWR(number, num_sge=1, sg=[SGE(near.mr.buf, 8, near.mr.lkey)], next_wr=requests[-1]))
qps[0].post_recv(requests[-1])
try:
    post(types.SimpleNamespace(qp=qps[0]), [SGE(near.mr.buf, 8, near.mr.lkey)], send=False)
except PyverbsRDMAError as ex:
    assert ex.error_code == errno.ENOMEM, ex
else:
    raise SystemExit('more was posted than there is room for')

# Rights that are optional may be asked for.
for bit in range(20, 30):
    MR(near.pd, 4096, e.IBV_ACCESS_LOCAL_WRITE | 1 << bit).close()

# A region of another domain, and one that may not be written.
near, far = pair()
other = MR(PD(near.ctx), 4096, e.IBV_ACCESS_LOCAL_WRITE)
post(near, [SGE(other.buf, 8, other.lkey)])
assert completion(near) == e.IBV_WC_LOC_PROT_ERR
near, far = pair()
fixed = MR(far.pd, 4096, 0)
post(far, [SGE(fixed.buf, 4096, fixed.lkey)], send=False)
post(near, [SGE(near.mr.buf, 8, near.mr.lkey)])
assert completion(near) == e.IBV_WC_REM_OP_ERR

# A peer does not end a region of a process, in whichever order the bytes of its key are told.
for order in 'little', 'big':
    near, far = pair()
    post(far, [SGE(far.mr.buf, 8, far.mr.lkey)], send=False)
    key = int.from_bytes(far.mr.rkey.to_bytes(4, 'little'), order)
    sge = SGE(near.mr.buf, 8, near.mr.lkey)
    near.qp.post_send(SendWR(1, e.IBV_WR_SEND_WITH_INV, num_sge=1, sg=[sge], imm_data=key))
    assert completion(near) == e.IBV_WC_REM_OP_ERR, order

# What is not posted at all.
near, far = pair()
sge = SGE(near.mr.buf, 8, near.mr.lkey)
for sges, flags in ([sge], e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE), ([SGE(kernel, 8, 0)], e.IBV_SEND_INLINE), ([sge] * 5, 0):
    try:
        post(near, sges, flags=flags)
    except PyverbsRDMAError as ex:
        assert ex.error_code == errno.EINVAL, ex
    else:
        raise SystemExit('was posted: %d entries, flags %d' % (len(sges), flags))

# More than there is room for in the completion queue is told of once, and harms nobody.
near, far = pair()
for _ in range(200):
    for end in near, far:
        try:
            post(end, [SGE(end.mr.buf, 8, end.mr.lkey)], send=end is near)
        except PyverbsRDMAError:
            pass
del near, far
print('refused')
"#;

fn refused(cluster: &Cluster) -> Result<()> {
    let (one, _) = cluster.two()?;
    with_sample(one, || {
        pyverbs::with_suite(one, |place| {
            let said = one.sh_in(
                &format!(
                    "cat >{place}/hostile.py <<'END'\n{HOSTILE}\nEND\n{DEVICE_AND_GID}\n\
                     python3 {place}/hostile.py {place} $gid"
                ),
                TIME * 2,
            )?;
            ensure!(said.contains("refused"), "{said}");
            Ok(())
        })
    })
}
