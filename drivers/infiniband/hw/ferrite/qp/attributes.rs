// SPDX-License-Identifier: GPL-2.0

//! States and attributes of a queue pair: how they are changed and asked for.

use super::FerriteQp;
use crate::{
    abi,
    abi::{
        ModifyQueuePair,
        Plain, //
    },
    ah, bindings,
    device::Ferrite,
    kernel_ext::errno,
    mr::{
        device_rights,
        effective, //
    },
    port::PORT,
    rdma::{
        ibdev_warn,
        Access,
        Mtu,
        Qp,
        QpAttr,
        QpEvent,
        QpState,
        QpType, //
    },
};
use kernel::{
    prelude::*,
    sync::atomic::Relaxed, //
};

impl FerriteQp {
    /// Changes state and attributes.
    pub(super) fn modify(qp: &Qp<Ferrite>, attr: &QpAttr<'_>) -> Result {
        let dev = qp.device();
        if qp.spread.is_some() {
            // Its work queues have states, and it has none.
            return Err(errno::eopnotsupp());
        }
        let features = dev.features();
        let mut command = translate(attr, &dev.caps, features)?;
        if command.mask & abi::MODIFY_ADDRESS_VECTOR != 0 {
            // Before the lock: the device may take its time.
            dev.gids
                .settle(command.address_vector.source_gid_index, true)?;
        }
        let mut values = qp.values.lock();
        let rests = matches!(attr.state(), Some(QpState::Reset | QpState::Err));
        if let Some(interface) = qp.interface.filter(|_| !rests) {
            // Where it is lost from now on, `lost_interface` finds the queue pair in its new state.
            dev.raw_packets.still(interface)?;
        }
        let current = attr.current_state().unwrap_or(values.state);
        let next = attr.state().unwrap_or(current);
        let qp_type = qp.qp_type().ok_or(EINVAL)?;
        if !attr.transition_is_ok(current, next, qp_type) {
            return Err(EINVAL);
        }
        command.qpn = qp.number();
        complete_xrc(&mut command, qp_type, current, next);
        let told_later = tell_rights_once(
            &mut command,
            peer_rights(values.access, features),
            qp_type,
            (current, next),
        );
        if command.mask != 0 && (!told_later || dev.hw.is_dead()) {
            // What a send queue that had stopped still holds is flushed before it goes on.
            let flushes = next == QpState::Rts && current != QpState::Rtr;
            let done = if flushes {
                dev.hw.execute_long(&command)
            } else {
                dev.hw.execute(&command)
            };
            match done {
                // A failed device has stopped all its queue pairs: that much can be said.
                Err(_) if dev.hw.is_dead() && next == QpState::Err => Self::stopped(qp),
                Err(_) if dev.hw.is_dead() && next == QpState::Reset => {}
                result => result?,
            }
        }
        values.merge(attr);
        values.access = effective(values.access, features);
        if told_later {
            // The device was not asked, and may have found an error meanwhile: the state is what it is.
            return Ok(());
        }
        values.state = next;
        qp.state.store(next.as_raw(), Relaxed);
        if next == QpState::Reset {
            qp.last_receive.store(0, Relaxed);
            if let Ok(rings) = qp.rings() {
                Self::forget_completions(qp);
                rings.reset()?;
            }
        }
        Ok(())
    }
}

impl FerriteQp {
    /// The interface whose raw packets it has went away: it does not get out of the error state any more, but to end. Sleeps.
    pub(crate) fn lost_interface(qp: &Qp<Ferrite>) {
        let hw = &qp.device().hw;
        let mut values = qp.values.lock();
        let own_queues = qp.spread.is_none();
        if values.state == QpState::Err || (values.state == QpState::Reset && own_queues) {
            return;
        }
        if own_queues {
            let command = ModifyQueuePair {
                qpn: qp.number(),
                mask: abi::MODIFY_STATE,
                state: QpState::Err.as_raw() as u8,
                ..ModifyQueuePair::zeroed()
            };
            match hw.execute(&command) {
                // It ends meanwhile.
                Err(error) if error == ENOENT => return,
                Err(error) if !hw.is_dead() => {
                    ibdev_warn!(
                        qp.device(),
                        "a queue pair keeps the raw packets of its interface: {:?}\n",
                        error
                    );
                }
                _ => {}
            }
        }
        values.state = QpState::Err;
        qp.state.store(QpState::Err.as_raw(), Relaxed);
        drop(values);
        Self::raise(qp, QpEvent::Fatal);
    }
}

/// The device's form of a change of attributes. The number is left to the caller.
fn translate(attr: &QpAttr<'_>, caps: &abi::DeviceCaps, features: u64) -> Result<ModifyQueuePair> {
    /// What the device has no notion of.
    const REFUSED: u32 = bindings::ib_qp_attr_mask_IB_QP_ALT_PATH
        | bindings::ib_qp_attr_mask_IB_QP_CAP
        | bindings::ib_qp_attr_mask_IB_QP_RATE_LIMIT;
    if attr.mask() & REFUSED != 0 {
        return Err(errno::eopnotsupp());
    }
    let mut command = ModifyQueuePair::zeroed();
    let mask = &mut command.mask;
    /// Takes over an attribute that was given, if `$ok` says that its value is possible.
    macro_rules! take {
        ($value:expr => $field:ident, $bit:ident, $ok:expr) => {
            if let Some(value) = $value {
                #[allow(clippy::redundant_closure_call)]
                if !$ok(value) {
                    return Err(EINVAL);
                }
                command.$field = value;
                *mask |= abi::$bit;
            }
        };
    }
    let psn = |psn: u32| psn & 0xff_ffff;
    take!(attr.state().map(|state| state.as_raw() as u8) => state, MODIFY_STATE, |_| true);
    take!(
        attr.current_state().map(|state| state.as_raw() as u8) => current_state,
        MODIFY_CURRENT_STATE,
        |_| true
    );
    take!(attr.pkey_index() => pkey_index, MODIFY_PKEY, |index| index == 0);
    take!(attr.qkey() => qkey, MODIFY_QKEY, |_| true);
    take!(attr.path_mtu().map(log_mtu) => log_mtu, MODIFY_MTU, |mtu| mtu <= caps.max_log_mtu);
    take!(attr.timeout() => timeout, MODIFY_TIMEOUT, |timeout| timeout < 32);
    take!(attr.retry_count() => retry_count, MODIFY_RETRY, |count| count < 8);
    take!(attr.rnr_retry() => rnr_retry, MODIFY_RNR_RETRY, |count| count < 8);
    take!(attr.min_rnr_timer() => min_rnr_timer, MODIFY_MIN_RNR_TIMER, |timer| timer < 32);
    take!(attr.rq_psn().map(psn) => receive_psn, MODIFY_RECEIVE_PSN, |_| true);
    take!(attr.sq_psn().map(psn) => send_psn, MODIFY_SEND_PSN, |_| true);
    take!(attr.max_rd_atomic() => ord, MODIFY_ORD, |reads| reads <= caps.max_ord);
    take!(attr.max_dest_rd_atomic() => ird, MODIFY_IRD, |reads| reads <= caps.max_ird);
    take!(
        attr.dest_qp_num() => destination_qpn,
        MODIFY_DESTINATION,
        |qpn| qpn <= abi::QUEUE_NUMBER_MASK
    );
    if let Some(access) = attr.access() {
        // What the device cannot do is left out, not refused: the connection manager gives a queue pair
        // every right there is.
        command.access = peer_rights(access, features);
        *mask |= abi::MODIFY_ACCESS;
    }
    if let Some(address) = attr.address() {
        command.address_vector = ah::address_vector(address)?;
        *mask |= abi::MODIFY_ADDRESS_VECTOR;
    }
    if attr.port().is_some_and(|port| port != PORT) {
        return Err(EINVAL);
    }
    Ok(command)
}

/// The rights that a peer has by a queue pair, as the device says them.
fn peer_rights(access: Access, features: u64) -> u32 {
    device_rights(effective(access, features)) & (abi::ACCESS_REMOTE | abi::ACCESS_FLUSH_GLOBAL)
}

/// Rights of peers do not count before packets are taken. The connection manager changes them between state INIT and
/// RTR each time (`cma_modify_qp_rtr`): returns whether that is all there is to a change, so that the device need not
/// be told now. It is told with the next change, to which the `rights` in force are added that way.
fn tell_rights_once(
    command: &mut ModifyQueuePair,
    rights: u32,
    qp_type: QpType,
    change: (QpState, QpState),
) -> bool {
    /// There is one partition, and the state is the same.
    const SAYS_NOTHING: u32 = abi::MODIFY_STATE | abi::MODIFY_PKEY;
    // Those of datagrams have none, and other changes with side effects.
    let connected = !matches!(qp_type, QpType::Ud | QpType::Gsi | QpType::RawPacket);
    match change {
        _ if !connected => false,
        (QpState::Init, QpState::Init) => command.mask & !(SAYS_NOTHING | abi::MODIFY_ACCESS) == 0,
        (QpState::Init, QpState::Rtr) => {
            if command.mask & abi::MODIFY_ACCESS == 0 {
                command.access = rights;
                command.mask |= abi::MODIFY_ACCESS;
            }
            false
        }
        _ => false,
    }
}

/// Adds what the device wants of a transition of a reliable connection, and the verbs do not ask of
/// one half of an extended one (XRC), which has no use for it.
fn complete_xrc(command: &mut ModifyQueuePair, qp_type: QpType, current: QpState, next: QpState) {
    command.mask |= match (qp_type, current, next) {
        // An initiator does not answer.
        (QpType::XrcInitiator, QpState::Init, QpState::Rtr) => {
            abi::MODIFY_IRD | abi::MODIFY_MIN_RNR_TIMER
        }
        // A target does not ask.
        (QpType::XrcTarget, QpState::Rtr, QpState::Rts) => {
            abi::MODIFY_ORD | abi::MODIFY_RETRY | abi::MODIFY_RNR_RETRY
        }
        _ => 0,
    };
}

/// Base-2 logarithm of an MTU's bytes.
fn log_mtu(mtu: Mtu) -> u8 {
    mtu.bytes().trailing_zeros() as u8
}

#[kunit_tests(ferrite_qp_attributes)]
mod tests {
    use super::*;

    fn attr(
        mask: bindings::ib_qp_attr_mask,
        change: impl FnOnce(&mut bindings::ib_qp_attr),
    ) -> Result<ModifyQueuePair> {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        change(&mut raw);
        translate(&QpAttr::new(&raw, mask as u32), &caps(), u64::MAX)
    }

    fn caps() -> abi::DeviceCaps {
        abi::DeviceCaps {
            max_ord: 16,
            max_ird: 32,
            max_log_mtu: 12,
            ..abi::DeviceCaps::zeroed()
        }
    }

    #[test]
    fn rights_that_the_device_does_not_have_are_left_out() -> Result {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        let asked = Access::REMOTE_READ | Access::REMOTE_ATOMIC | Access::FLUSH_GLOBAL;
        raw.qp_access_flags = asked.as_raw() as c_int;
        let mask = bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS as u32;
        let (read, atomic) = (abi::ACCESS_REMOTE_READ, abi::ACCESS_REMOTE_ATOMIC);
        for (features, access) in [
            (0, read),
            (abi::FEATURE_ATOMICS, read | atomic),
            (abi::FEATURE_FLUSH, read | abi::ACCESS_FLUSH_GLOBAL),
        ] {
            let command = translate(&QpAttr::new(&raw, mask), &caps(), features)?;
            assert_eq!(command.access, access);
            assert_eq!(command.mask, abi::MODIFY_ACCESS);
        }
        Ok(())
    }

    #[test]
    fn only_what_was_given_is_passed_on() -> Result {
        let command = attr(bindings::ib_qp_attr_mask_IB_QP_TIMEOUT, |raw| {
            raw.timeout = 14;
            raw.retry_cnt = 7;
        })?;
        assert_eq!(command.mask, abi::MODIFY_TIMEOUT);
        assert_eq!(command.timeout, 14);
        assert_eq!(command.retry_count, 0);
        Ok(())
    }

    #[test]
    fn states_and_mtu_keep_their_meaning() -> Result {
        let command = attr(
            bindings::ib_qp_attr_mask_IB_QP_STATE | bindings::ib_qp_attr_mask_IB_QP_PATH_MTU,
            |raw| {
                raw.qp_state = bindings::ib_qp_state_IB_QPS_RTR;
                raw.path_mtu = bindings::ib_mtu_IB_MTU_1024;
            },
        )?;
        assert_eq!(command.state, abi::QueuePairStateCode::Rtr.number());
        assert_eq!(command.log_mtu, 10);
        assert_eq!(command.mask, abi::MODIFY_STATE | abi::MODIFY_MTU);
        Ok(())
    }

    #[test]
    fn halves_of_xrc_connections_get_what_the_verbs_do_not_give() {
        let mut command = ModifyQueuePair::zeroed();
        let (init, rtr, rts) = (QpState::Init, QpState::Rtr, QpState::Rts);
        complete_xrc(&mut command, QpType::Rc, rtr, rts);
        complete_xrc(&mut command, QpType::XrcInitiator, rtr, rts);
        complete_xrc(&mut command, QpType::XrcTarget, init, rtr);
        assert_eq!(command.mask, 0);
        complete_xrc(&mut command, QpType::XrcInitiator, init, rtr);
        assert_eq!(command.mask, abi::MODIFY_IRD | abi::MODIFY_MIN_RNR_TIMER);
        command.mask = 0;
        complete_xrc(&mut command, QpType::XrcTarget, rtr, rts);
        assert_eq!(
            command.mask,
            abi::MODIFY_ORD | abi::MODIFY_RETRY | abi::MODIFY_RNR_RETRY
        );
    }

    #[test]
    fn rights_that_change_before_they_count_are_told_once() {
        let (init, rtr, rts) = (QpState::Init, QpState::Rtr, QpState::Rts);
        let change = |mask: u32, qp_type, change| {
            let mut command = ModifyQueuePair::zeroed();
            command.mask = mask;
            command.access = abi::ACCESS_REMOTE_WRITE;
            let later = tell_rights_once(&mut command, abi::ACCESS_REMOTE_READ, qp_type, change);
            (later, command.mask, command.access)
        };
        let (state, access) = (abi::MODIFY_STATE, abi::MODIFY_ACCESS);
        let (read, write) = (abi::ACCESS_REMOTE_READ, abi::ACCESS_REMOTE_WRITE);
        for mask in [state | abi::MODIFY_PKEY | access, access] {
            let later = change(mask, QpType::Rc, (init, init));
            assert_eq!(later, (true, mask, write));
        }
        // What was not told is told then, unless there are others.
        let told = change(state, QpType::Uc, (init, rtr));
        assert_eq!(told, (false, state | access, read));
        let told = change(state | access, QpType::Rc, (init, rtr));
        assert_eq!(told, (false, state | access, write));
        // All else is told at once: also that the consumer thinks it is in a state.
        for (mask, qp_type, states) in [
            (state | abi::MODIFY_CURRENT_STATE, QpType::Rc, (init, init)),
            (state | abi::MODIFY_QKEY, QpType::Ud, (init, init)),
            (state | abi::MODIFY_PKEY, QpType::Ud, (init, init)),
            (state, QpType::Ud, (init, rtr)),
            (state | access, QpType::Rc, (rts, rts)),
            (state | access, QpType::Rc, (QpState::Reset, init)),
            (state, QpType::Rc, (rtr, rts)),
        ] {
            assert_eq!(change(mask, qp_type, states), (false, mask, write));
        }
    }

    #[test]
    fn a_peer_gets_remote_rights_only() -> Result {
        let command = attr(bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS, |raw| {
            raw.qp_access_flags = (bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE
                | bindings::ib_access_flags_IB_ACCESS_REMOTE_READ)
                as _;
        })?;
        assert_eq!(command.access, abi::ACCESS_REMOTE_READ);
        Ok(())
    }

    #[test]
    fn what_the_device_cannot_do_is_refused() {
        let too_many = attr(bindings::ib_qp_attr_mask_IB_QP_MAX_QP_RD_ATOMIC, |raw| {
            raw.max_rd_atomic = 17;
        });
        assert!(too_many.is_err());
        // As responder it may do more than as requester.
        let serve = |reads| {
            attr(bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC, |raw| {
                raw.max_dest_rd_atomic = reads
            })
        };
        assert!(serve(32).is_ok_and(|command| command.ird == 32));
        assert!(serve(33).is_err());
        let other_port = attr(bindings::ib_qp_attr_mask_IB_QP_PORT, |raw| raw.port_num = 2);
        assert!(other_port.is_err());
        let migration = attr(bindings::ib_qp_attr_mask_IB_QP_ALT_PATH, |_| {});
        assert!(migration.is_err());
        let partition = attr(bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX, |raw| {
            raw.pkey_index = 1;
        });
        assert!(partition.is_err());
    }
}
