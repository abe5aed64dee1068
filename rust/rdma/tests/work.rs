// SPDX-License-Identifier: GPL-2.0

//! Tests of what is posted and polled: requests, attributes and completions as types.

use super::*;

#[kunit_tests(rust_rdma_work)]
mod suite {
    use super::*;

    #[test]
    fn a_specification_that_is_not_known_is_never_left_out() {
        const ETHERNET: usize = size_of::<bindings::ib_flow_spec_eth>();
        let ethernet = |size: usize| {
            let mut bytes = [0; 2 * ETHERNET];
            let kind = bindings::ib_flow_spec_type_IB_FLOW_SPEC_ETH;
            bytes[..4].copy_from_slice(&kind.to_ne_bytes());
            bytes[4..6].copy_from_slice(&(size as u16).to_ne_bytes());
            bytes
        };
        // How many there are, and how many of them are known.
        let found = |bytes: &[u8]| {
            let known = |spec: &FlowSpec| matches!(spec, FlowSpec::Ethernet(_));
            (
                FlowSpecs(bytes).count(),
                FlowSpecs(bytes).filter(known).count(),
            )
        };
        let good = ethernet(ETHERNET);
        assert_eq!(found(&[]), (0, 0));
        assert_eq!(found(&good[..ETHERNET]), (1, 1));
        // Zeroes are one of no size.
        assert_eq!(found(&good), (2, 1));
        // Less than it begins with, less than it says, a piece behind it.
        for length in [1, 5, 6, ETHERNET - 1, ETHERNET + 1, ETHERNET + 7] {
            let (all, known) = found(&good[..length]);
            assert_eq!(all, known + 1);
        }
        // It says that it is shorter than those of its type, longer, or nothing.
        for size in [0, 4, 5, 6, ETHERNET - 4, ETHERNET + 4, 2 * ETHERNET, 0xffff] {
            let bytes = ethernet(size);
            assert_eq!(found(&bytes).1, 0);
            assert!(found(&bytes[..ETHERNET]).0 > 0);
        }
        let mut other = good;
        other[0] ^= 0x80;
        assert_eq!(found(&other[..ETHERNET]), (1, 0));
    }

    #[test]
    fn notify_tells_solicited_from_next() {
        let next = bindings::ib_cq_notify_flags_IB_CQ_NEXT_COMP;
        let solicited = bindings::ib_cq_notify_flags_IB_CQ_SOLICITED;
        let missed = bindings::ib_cq_notify_flags_IB_CQ_REPORT_MISSED_EVENTS;
        assert!(!Notify::from_raw(next).solicited);
        assert!(Notify::from_raw(solicited).solicited);
        assert!(!Notify::from_raw(solicited).report_missed);
        assert!(Notify::from_raw(next | missed).report_missed);
    }

    #[test]
    fn attributes_are_only_those_in_the_mask() {
        let mut raw: bindings::ib_qp_attr = pin_init::zeroed();
        raw.qp_state = QpState::Init.as_raw();
        raw.qkey = 9;
        raw.port_num = 1;
        let mask = bindings::ib_qp_attr_mask_IB_QP_STATE
            | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
            | bindings::ib_qp_attr_mask_IB_QP_PORT
            | bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS;
        let attr = QpAttr::new(&raw, mask);
        assert_eq!(attr.state(), Some(QpState::Init));
        assert_eq!(attr.port(), Some(1));
        assert_eq!(attr.qkey(), None);
        assert!(attr.address().is_none());
        assert!(attr.transition_is_ok(QpState::Reset, QpState::Init, QpType::Rc));
        assert!(!attr.transition_is_ok(QpState::Reset, QpState::Rts, QpType::Rc));
        let mut values = QpValues {
            qkey: 5,
            ..QpValues::default()
        };
        values.merge(&attr);
        assert_eq!((values.qkey, values.port), (5, 1));
    }

    #[test]
    fn send_list_yields_typed_requests_and_remembers_the_last() -> Result {
        let mut write: bindings::ib_rdma_wr = pin_init::zeroed();
        write.wr.opcode = bindings::ib_wr_opcode_IB_WR_RDMA_WRITE;
        write.remote_addr = 0x1000;
        write.rkey = 0x77;
        let mut send: bindings::ib_send_wr = pin_init::zeroed();
        send.opcode = bindings::ib_wr_opcode_IB_WR_SEND_WITH_INV;
        // SAFETY: All views of the union are plain data.
        unsafe { *send.ex.invalidate_rkey.as_mut() = 0x55 };
        send.send_flags = bindings::ib_send_flags_IB_SEND_SIGNALED;
        send.next = &mut write.wr;
        let mut qp = Memory::<kind::Qp>::new()?;
        // SAFETY: The list and what it points to are locals that outlive it.
        let mut list = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) };
        assert!(core::ptr::eq(list.current(), &send));
        let first = list.next().ok_or(EINVAL)?;
        assert!(first.flags().contains(SendFlags::SIGNALED));
        assert!(matches!(first.op()?, SendOp::SendWithInvalidate(0x55)));
        assert!(first.ud().is_none());
        assert!(core::ptr::eq(list.current(), &send));
        let second = list.next().ok_or(EINVAL)?;
        assert!(matches!(
            second.op()?,
            SendOp::RdmaWrite(Remote {
                addr: 0x1000,
                rkey: 0x77
            })
        ));
        assert!(core::ptr::eq(list.current(), &write.wr));
        assert!(list.next().is_none());
        Ok(())
    }

    /// Posts a registration with that opcode, of a region as `change` leaves it, to a queue pair of a
    /// type.
    fn posted_registration<R>(
        opcode: u32,
        qp_type: QpType,
        change: impl FnOnce(&mut bindings::ib_reg_wr, *mut bindings::ib_mr),
        look: impl FnOnce(Result<PostedOp<'_, Minimal>>) -> R,
    ) -> Result<R> {
        let (mut qp, mut mr) = (Memory::<kind::Qp>::new()?, Memory::<kind::Mr>::new()?);
        let (device, pd) = (NonNull::dangling().as_ptr(), NonNull::dangling().as_ptr());
        // SAFETY: The memory is as the core's, all zeroes, and nobody else looks at it.
        let (core_qp, core_mr) = unsafe { (&mut *qp.raw(), &mut *mr.raw()) };
        core_qp.qp_type = qp_type.as_raw();
        (core_qp.device, core_qp.pd) = (device, pd);
        (core_mr.device, core_mr.pd) = (device, pd);
        // SAFETY: The memory is as the core's, of the size of the object, and nobody else looks at it.
        unsafe { Object::<kind::Mr, Minimal>::prepare(mr.raw()) }.init(())?;
        let mut wr: bindings::ib_reg_wr = pin_init::zeroed();
        wr.wr.opcode = opcode;
        wr.mr = mr.raw();
        wr.key = 0x1234;
        wr.access = Access::REMOTE_READ.as_raw() as c_int;
        change(&mut wr, mr.raw());
        // SAFETY: The list and what it points to are locals that outlive it.
        let mut list = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &wr.wr) };
        let seen = look(list.next().ok_or(EINVAL)?.op());
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Mr, Minimal>::finish(mr.raw()) };
        Ok(seen)
    }

    #[test]
    fn registrations_are_told_apart_with_all_they_say() -> Result {
        let register = bindings::ib_wr_opcode_IB_WR_REG_MR;
        let alone = posted_registration(
            register,
            QpType::Rc,
            |_, _| {},
            |op| {
                let Ok(SendOp::RegMr(RegWr { key, access, .. })) = op else {
                    return false;
                };
                key == 0x1234 && access == Access::REMOTE_READ
            },
        )?;
        assert!(alone);
        for said in [0, 0x77] {
            let of_driver = posted_registration(
                OWN_OPCODE,
                QpType::Rc,
                // SAFETY: All views of the union are plain data.
                |wr, _| unsafe { *wr.wr.ex.invalidate_rkey.as_mut() = said },
                |op| {
                    let Ok(SendOp::Driver {
                        opcode,
                        registration: RegWr { key, access, .. },
                        ex,
                    }) = op
                    else {
                        return false;
                    };
                    (opcode, key, access, ex) == (OWN_OPCODE, 0x1234, Access::REMOTE_READ, said)
                },
            )?;
            assert!(of_driver);
        }
        // What it did not say that it knows may be of another form.
        let unknown = |op: Result<PostedOp<'_, Minimal>>| op.err() == Some(eopnotsupp());
        assert!(posted_registration(
            OWN_OPCODE + 1,
            QpType::Rc,
            |_, _| {},
            unknown
        )?);
        Ok(())
    }

    #[test]
    fn a_region_is_registered_in_its_own_domain_and_device_only() -> Result {
        /// Elsewhere.
        fn other<T>() -> *mut T {
            NonNull::<T>::dangling().as_ptr().wrapping_add(1)
        }
        type Change = fn(&mut bindings::ib_reg_wr, *mut bindings::ib_mr);
        let changes: [Change; 3] = [
            |wr, _| wr.mr = core::ptr::null_mut(),
            // SAFETY: The region is the test's own.
            |_, mr| unsafe { (*mr).pd = other() },
            // SAFETY: The region is the test's own.
            |_, mr| unsafe { (*mr).device = other() },
        ];
        let refused =
            |op: Result<PostedOp<'_, Minimal>>| matches!(op, Err(error) if error == EINVAL);
        for opcode in [bindings::ib_wr_opcode_IB_WR_REG_MR, OWN_OPCODE] {
            for change in changes {
                assert!(posted_registration(opcode, QpType::Rc, change, refused)?);
            }
            // A datagram's request has something else in that place.
            assert!(posted_registration(opcode, QpType::Ud, |_, _| {}, refused)?);
        }
        Ok(())
    }

    #[test]
    fn inline_data_is_copied_in_order_and_bounded() -> Result {
        let (one, two) = ([1u8, 2, 3], [4u8, 5]);
        let mut sges: [bindings::ib_sge; 2] = pin_init::zeroed();
        sges[0].addr = one.as_ptr() as u64;
        sges[0].length = 3;
        sges[1].addr = two.as_ptr() as u64;
        sges[1].length = 2;
        let mut send: bindings::ib_send_wr = pin_init::zeroed();
        send.sg_list = sges.as_mut_ptr();
        send.num_sge = 2;
        let mut qp = Memory::<kind::Qp>::new()?;
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        assert!(wr.ok_or(EINVAL)?.copy_inline(&mut [0; 8]).is_err());
        send.send_flags = bindings::ib_send_flags_IB_SEND_INLINE;
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        let wr = wr.ok_or(EINVAL)?;
        assert_eq!(wr.length(), 5);
        let mut data = [0; 5];
        assert_eq!(wr.copy_inline(&mut data)?, 5);
        assert_eq!(data, [1, 2, 3, 4, 5]);
        assert!(wr.copy_inline(&mut [0; 4]).is_err());
        // A process's addresses are none of the kernel's.
        // SAFETY: The memory is as the core's, and nobody else looks at it.
        unsafe { (*qp.raw()).uobject = NonNull::dangling().as_ptr() };
        // SAFETY: The list and what it points to are locals that outlive it.
        let wr = unsafe { SendList::<'_, Minimal>::new(qp.raw(), &send) }.next();
        let mut data = [0; 5];
        assert!(wr.ok_or(EINVAL)?.copy_inline(&mut data).is_err());
        assert_eq!(data, [0; 5]);
        Ok(())
    }

    #[test]
    fn completions_of_a_process_need_no_queue_pair() -> Result {
        let mut wc: bindings::ib_wc = pin_init::zeroed();
        let mut memory = Memory::<kind::Qp>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let mut new = unsafe { Object::<kind::Qp, Minimal>::prepare(memory.raw()) };
        new.set_number(0x123456);
        let qp = new.init(())?;
        // SAFETY: `wc` is a local with room for one, which outlives the list.
        let mut completions = unsafe { Completions::new(&mut wc, 1, true) };
        assert!(completions.push(&Wc::new(qp, 1, WcOpcode::Recv)));
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Qp, Minimal>::finish(memory.raw()) };
        drop(memory);
        // As `copy_wc_to_user` does.
        // SAFETY: The number is within `wc`, as the completion says.
        let number = unsafe { core::ptr::addr_of!((*wc.qp).qp_num).read() };
        assert_eq!((number, wc.wc_flags), (0x123456, 0));
        Ok(())
    }

    #[test]
    fn who_lists_queue_pairs_is_told_nothing_to_take_part_with() {
        let values = QpValues {
            qkey: 1,
            rq_psn: 2,
            sq_psn: 3,
            dest_qp_num: 4,
            ..QpValues::default()
        };
        let told = |mask| {
            let mut attr: bindings::ib_qp_attr = pin_init::zeroed();
            let mut init: bindings::ib_qp_init_attr = pin_init::zeroed();
            let mut query = QpQuery::new(&mut attr, &mut init, mask);
            let is_listing = query.is_listing();
            query.fill(&values);
            assert_eq!(attr.dest_qp_num, 4);
            (is_listing, attr.qkey, attr.rq_psn, attr.sq_psn)
        };
        let (qkey, rq_psn, sq_psn) = (
            bindings::ib_qp_attr_mask_IB_QP_QKEY,
            bindings::ib_qp_attr_mask_IB_QP_RQ_PSN,
            bindings::ib_qp_attr_mask_IB_QP_SQ_PSN,
        );
        assert_eq!(told(0), (true, 0, 0, 0));
        assert_eq!(told(qkey), (false, 1, 0, 0));
        assert_eq!(told(rq_psn), (false, 0, 2, 0));
        assert_eq!(told(sq_psn), (false, 0, 0, 3));
        assert_eq!(told(u32::MAX), (false, 1, 2, 3));
    }

    #[test]
    fn completions_stop_at_the_consumers_room() -> Result {
        let mut memory = Memory::<kind::Qp>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Qp, Minimal>::prepare(memory.raw()) };
        let qp = new.init(())?;
        let mut wcs: [bindings::ib_wc; 2] = pin_init::zeroed();
        // SAFETY: `wcs` is a local with room for two, which outlives the list.
        let mut completions = unsafe { Completions::new(wcs.as_mut_ptr(), 2, false) };
        let mut wc = Wc::new(qp, 0xabc, WcOpcode::Recv);
        wc.imm_data = Some(0x0102_0304);
        assert!(completions.push(&wc));
        wc.imm_data = None;
        wc.status = WcStatus::RemoteAccess;
        assert!(completions.push(&wc));
        assert!(completions.is_full());
        assert!(!completions.push(&wc));
        assert_eq!(completions.len(), 2);
        // SAFETY: All views of the unions are plain data.
        unsafe {
            assert_eq!(*wcs[0].__bindgen_anon_1.wr_id.as_ref(), 0xabc);
            assert_eq!(*wcs[0].ex.imm_data.as_ref(), 0x0102_0304_u32.to_be());
        }
        assert_eq!(wcs[0].wc_flags as u32, bindings::ib_wc_flags_IB_WC_WITH_IMM);
        assert_eq!(wcs[1].status, bindings::ib_wc_status_IB_WC_REM_ACCESS_ERR);
        assert_eq!(wcs[1].wc_flags, 0);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Qp, Minimal>::finish(memory.raw()) };
        Ok(())
    }
}
