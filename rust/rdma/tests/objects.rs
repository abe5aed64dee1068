// SPDX-License-Identifier: GPL-2.0

//! Tests of objects: what of a driver is in the table of operations, and how long its data live.

use super::*;
use crate::kernel_ext::spinlock::{new_irq_spinlock, IrqSpinLock};
use crate::kernel_ext::table::{new_irq_xarray, IrqXArray};
use crate::kernel_ext::workqueue::OwnedQueue;
use crate::rdma::wq::named_cq;
use kernel::new_spinlock;

#[kunit_tests(rust_rdma_objects)]
mod suite {
    use super::*;

    #[test]
    fn mandatory_operations_are_in_the_table_and_absent_ones_are_not() {
        let ops = &Ops::<Minimal>::of().raw;
        assert!(ops.query_device.is_some());
        assert!(ops.query_port.is_some());
        assert!(ops.alloc_pd.is_some() && ops.dealloc_pd.is_some());
        assert!(ops.create_qp.is_some() && ops.modify_qp.is_some() && ops.destroy_qp.is_some());
        assert!(ops.post_send.is_some() && ops.post_recv.is_some());
        assert!(ops.create_cq.is_some() && ops.destroy_cq.is_some());
        assert!(ops.pre_destroy_cq.is_some() && ops.post_destroy_cq.is_some());
        assert!(ops.poll_cq.is_some() && ops.req_notify_cq.is_some());
        assert!(ops.get_dma_mr.is_some() && ops.reg_user_mr.is_some() && ops.dereg_mr.is_some());
        assert!(ops.get_port_immutable.is_some());
        assert!(ops.alloc_ucontext.is_none() && ops.mmap.is_none());
        assert!(ops.create_user_cq.is_none() && ops.modify_cq.is_none());
        assert!(ops.query_qp.is_none() && ops.drain_sq.is_none());
        assert!(ops.alloc_mr.is_none() && ops.map_mr_sg.is_none() && ops.alloc_mw.is_none());
        assert!(ops.create_ah.is_none() && ops.create_srq.is_none() && ops.add_gid.is_none());
        assert!(ops.size_ib_pd > core::mem::size_of::<bindings::ib_pd>());
    }

    #[test]
    fn what_is_implemented_is_offered_only_where_the_driver_says_so() {
        let without = &Ops::<Minimal>::of().raw;
        assert!(without.create_srq.is_none() && without.destroy_srq.is_none());
        assert!(without.post_srq_recv.is_none() && without.query_srq.is_none());
        assert!(without.create_ah.is_none() && without.destroy_ah.is_none());
        assert_eq!(without.size_ib_srq, 0);

        let srq = &const { Ops::<Minimal>::new().with_srq() }.raw;
        assert!(srq.create_srq.is_some() && srq.destroy_srq.is_some());
        assert!(srq.post_srq_recv.is_some() && srq.query_srq.is_some());
        assert!(srq.size_ib_srq > core::mem::size_of::<bindings::ib_srq>());
        // Not overridden in it.
        assert!(srq.modify_srq.is_none() && srq.fill_res_srq_entry.is_none());
        // Of another trait.
        assert!(srq.create_ah.is_none() && srq.alloc_xrcd.is_none());
        assert!(srq.alloc_pd.is_some());

        let ah = &const { Ops::<Minimal>::new().with_ah() }.raw;
        assert!(ah.create_ah.is_some() && ah.create_user_ah.is_some());
        assert!(ah.destroy_ah.is_some() && ah.create_srq.is_none());
    }

    #[test]
    fn driver_data_lives_from_create_to_destroy() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        let raw = memory.raw();
        let alloc = Ops::<Minimal>::of().raw.alloc_pd.ok_or(EINVAL)?;
        let dealloc = Ops::<Minimal>::of().raw.dealloc_pd.ok_or(EINVAL)?;
        // SAFETY: The memory is as the core's; the operation does not look at the device.
        assert_eq!(unsafe { alloc(raw, core::ptr::null_mut()) }, 0);
        assert_eq!(LIVE.load(Relaxed), before + 1);
        // SAFETY: `alloc` has initialised it, and it is not ended before `dealloc` below.
        let pd = unsafe { Object::<kind::Pd, Minimal>::from_raw(raw) };
        assert_eq!(pd.0, 7);
        // SAFETY: `alloc` has initialised it, nobody else has it, and it is not used afterwards.
        assert_eq!(unsafe { dealloc(raw, core::ptr::null_mut()) }, 0);
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn a_set_of_counters_lives_from_its_first_queue_pair_on_until_the_core_ends_it() -> Result {
        let before = LIVE.load(Relaxed);
        let ops = &const { Ops::<Minimal>::new().with_qp_counters() }.raw;
        assert!(ops.counter_init.is_some() && ops.counter_alloc_stats.is_some());
        assert!(ops.size_rdma_counter > core::mem::size_of::<bindings::rdma_counter>());
        let bind = ops.counter_bind_qp.ok_or(EINVAL)?;
        let unbind = ops.counter_unbind_qp.ok_or(EINVAL)?;
        let update = ops.counter_update_stats.ok_or(EINVAL)?;
        let dealloc = ops.counter_dealloc.ok_or(EINVAL)?;
        let (mut refused, mut memory) = (
            Memory::<kind::Counter>::new()?,
            Memory::<kind::Counter>::new()?,
        );
        let mut qps = [Memory::<kind::Qp>::new()?, Memory::<kind::Qp>::new()?];
        let [one, other] = qps.each_mut().map(Memory::raw);
        for qp in [one, other] {
            // SAFETY: The memory is as the core's, and nobody else's.
            unsafe { Object::<kind::Qp, Minimal>::prepare(qp) }.init(())?;
        }
        let (none, counter) = (refused.raw(), memory.raw());
        // SAFETY: Both are initialised here, and nobody else has them.
        let set_of = |qp: *mut bindings::ib_qp| unsafe { (*qp).counter };

        // The driver refuses queue pair 0: the core frees the set without another word.
        // SAFETY: The memory is as the core's; `one` was initialised above.
        assert_eq!(unsafe { bind(none, one, 1) }, EBUSY.to_errno());
        assert_eq!(LIVE.load(Relaxed), before);
        assert!(set_of(one).is_null());

        for (qp, number) in [(one, 5), (other, 6)] {
            // SAFETY: `prepare` has initialised it, and nobody else has it: no driver keeps it, no core lists it.
            unsafe { (*qp).qp_num = number };
            // SAFETY: The memory is as the core's: a set that was zeroed or bound before, and a queue pair that was
            // initialised. The driver makes the set with the first of them.
            assert_eq!(unsafe { bind(counter, qp, 1) }, 0);
            assert_eq!(set_of(qp), counter);
            assert_eq!(LIVE.load(Relaxed), before + 1);
        }
        // SAFETY: `bind` has made it, and nobody else writes to it.
        assert_eq!(unsafe { (*counter).id }, 3);

        let names = counters::Descriptions::new(&["some", "others"])?;
        let stats = names.alloc_stats();
        assert!(!stats.is_null());
        // SAFETY: Nobody else has the set.
        unsafe { (*counter).stats = stats };
        // SAFETY: `bind` has made the set, to which queue pairs are bound.
        assert_eq!(unsafe { update(counter) }, 0);
        // SAFETY: The values are freed below.
        assert_eq!(unsafe { counters::values(stats) }, [70, 70]);
        // SAFETY: `alloc_stats` has allocated the values, which nobody uses any more.
        unsafe { bindings::rdma_free_hw_stats_struct(stats) };

        for qp in [one, other] {
            // SAFETY: It is bound.
            assert_eq!(unsafe { unbind(qp, 1) }, 0);
            assert!(set_of(qp).is_null());
            // What it counted is asked for once more.
            assert_eq!(LIVE.load(Relaxed), before + 1);
        }
        // SAFETY: `bind` has made it; it is not used afterwards.
        assert_eq!(unsafe { dealloc(counter) }, 0);
        assert_eq!(LIVE.load(Relaxed), before);
        for qp in [one, other] {
            // SAFETY: It was prepared above, and is not used afterwards.
            unsafe { Object::<kind::Qp, Minimal>::finish(qp) };
        }
        Ok(())
    }

    #[test]
    fn data_initialised_by_a_failing_operation_is_dropped() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let result = unsafe {
            Object::<kind::Pd, Minimal>::create(memory.raw(), |new| {
                new.init(Tracked::new(1))?;
                Err(EBUSY)
            })
        };
        assert_eq!(result, Err(EBUSY));
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn a_work_queue_needs_a_completion_queue_that_was_named() {
        let mut cq: bindings::ib_cq = pin_init::zeroed();
        let there = &raw mut cq;
        assert_eq!(named_cq(there).map(|cq| cq.as_ptr()), Ok(there));
        // What the core has of an attribute that is not there, and of one whose object is not.
        for error in [ENOENT, EINVAL, EBUSY] {
            assert_eq!(named_cq(error.to_ptr()).err(), Some(EINVAL));
        }
        assert_eq!(named_cq(core::ptr::null_mut()).err(), Some(EINVAL));
    }

    #[test]
    fn a_work_queue_has_no_events_before_the_core_has_finished_it() -> Result {
        let told = Atomic::<i32>::new(0);
        let mut memory = Memory::<kind::Wq>::new()?;
        let raw = memory.raw();
        // SAFETY: The memory is as the core's, and outlives what is in it.
        let wq = unsafe { Object::<kind::Wq, Minimal>::prepare(raw) }.init(())?;
        // SAFETY: Nobody else has it.
        unsafe {
            (*raw).event_handler = Some(count_event);
            (*raw).wq_context = (&raw const told).cast_mut().cast();
        }
        wq.report_fatal();
        assert_eq!(told.load(Relaxed), 0);
        let modify = const { Ops::<Minimal>::new().with_wqs() }.raw.modify_wq;
        let modify = modify.ok_or(EINVAL)?;
        let (state, current) = (
            bindings::ib_wq_attr_mask_IB_WQ_STATE,
            bindings::ib_wq_attr_mask_IB_WQ_CUR_STATE,
        );
        let mut attr: bindings::ib_wq_attr = pin_init::zeroed();
        attr.wq_state = bindings::ib_wq_state_IB_WQS_RDY;
        // What the core takes the state for counts only where the process said so.
        for (mask, expected) in [
            (state, 0),
            (state | current, EBUSY.to_errno()),
            (current, EBUSY.to_errno()),
        ] {
            // SAFETY: The queue is there, and the attributes are a local; there is no part of a driver's.
            let said = unsafe { modify(raw, &mut attr, mask, core::ptr::null_mut()) };
            assert_eq!(said, expected);
        }
        wq.report_fatal();
        assert_eq!(told.load(Relaxed), 1);
        // SAFETY: It was prepared above, and is not used afterwards.
        unsafe { Object::<kind::Wq, Minimal>::finish(raw) };
        Ok(())
    }

    #[test]
    fn an_object_returned_for_another_is_refused() -> Result {
        let before = LIVE.load(Relaxed);
        let (mut one, mut other) = (Memory::<kind::Pd>::new()?, Memory::<kind::Pd>::new()?);
        // SAFETY: `one` is as the core allocates it: zeroed, of the size of the object, and nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(one.raw()) };
        let first = new.init(Tracked::new(1))?;
        // SAFETY: `other` is as the core allocates it: zeroed, of the size of the object, and nobody else's.
        let result = unsafe { Object::<kind::Pd, Minimal>::create(other.raw(), |_new| Ok(first)) };
        assert_eq!(result, Err(EINVAL));
        // SAFETY: It was prepared above, and `first` is not used afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(one.raw()) };
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn table_holds_counted_references() -> Result {
        let before = LIVE.load(Relaxed);
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(memory.raw()) };
        let pd = new.init(Tracked::new(3))?;
        let table: Pin<KBox<IrqXArray<PdRef<Minimal>>>> =
            KBox::pin_init(new_irq_xarray!("rust_rdma_table"), GFP_KERNEL)?;
        assert!(table.is_empty());
        table.insert(5, pd.get_ref().ok_or(EINVAL)?)?;
        let second = pd.get_ref().ok_or(EINVAL)?;
        assert_eq!(table.insert(5, second), Err(EBUSY));
        assert!(table.get(4).is_none());
        assert_eq!(table.get(5).map(|pd| pd.0), Some(3));
        let mut seen = 0;
        table.for_each(|index, pd| {
            assert_eq!((index, pd.0), (5, 3));
            seen += 1;
        });
        assert_eq!(seen, 1);
        assert!(table.remove(5).is_some());
        assert!(table.remove(5).is_none());

        // What is reserved is nobody else's, and nothing until it is filled.
        let room = table.reserve(5)?;
        let third = pd.get_ref().ok_or(EINVAL)?;
        assert_eq!(table.insert(5, third), Err(EBUSY));
        assert!(table.reserve(5).is_err() && table.get(5).is_none() && table.is_empty());
        drop(room);
        let room = table.reserve(5)?;
        room.fill(pd.get_ref().ok_or(EINVAL)?);
        assert_eq!(table.get(5).map(|pd| pd.0), Some(3));
        assert!(table.reserve(5).is_err());
        assert!(table.remove(5).is_some() && table.is_empty());
        // The references are gone, else this would wait for ever.
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(memory.raw()) };
        assert_eq!(LIVE.load(Relaxed), before);
        Ok(())
    }

    #[test]
    fn the_core_cancels_work_of_a_completion_queue_only_when_no_event_is_handled() -> Result {
        let mut memory = Memory::<kind::Cq>::new()?;
        let raw = memory.raw();
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let cq = unsafe { Object::<kind::Cq, Minimal>::prepare(raw) }.init(())?;
        let event = Arc::pin_init(
            pin_init!(SlowEvent {
                cq <- new_spinlock!(cq.get_ref()),
                started <- Completion::new(),
                never <- Completion::new(),
                handled: Atomic::new(0),
                work <- new_work!("SlowEvent"),
            }),
            GFP_KERNEL,
        )?;
        let queue = OwnedQueue::unbound(c"slow_event")?;
        drop(queue.enqueue(event.clone()));
        event.started.wait();
        let ops = &Ops::<Minimal>::of().raw;
        let (before, after) = (ops.pre_destroy_cq, ops.post_destroy_cq);
        // SAFETY: The queue was made above, and is no longer used but by the event.
        assert_eq!(unsafe { before.ok_or(EINVAL)?(raw) }, 0);
        assert_eq!(event.handled.load(Relaxed), 1);
        // It lives on: the core polls it a last time.
        drop(cq.get_ref().ok_or(EINVAL)?);
        // SAFETY: `pre_destroy_cq` was called above, and the queue is not used afterwards.
        unsafe { after.ok_or(EINVAL)?(raw) };
        Ok(())
    }

    #[test]
    fn an_object_that_gave_up_its_own_count_gives_no_other() {
        let refs = Refcount::new(1);
        assert!(object::inc_not_zero(&refs));
        assert!(!refs.dec_and_test());
        assert!(refs.dec_and_test());
        assert!(!object::inc_not_zero(&refs));
        // As after `quiesce`.
        refs.set(1);
        assert!(object::inc_not_zero(&refs));
    }

    #[test]
    fn a_handler_is_called_when_what_it_needs_is_there() -> Result {
        for set_before in [true, false] {
            let mut memory = Memory::<kind::Cq>::new()?;
            let raw = memory.raw();
            let set = || {
                // SAFETY: The memory is as the core's, and nobody else looks at it.
                unsafe { (*raw).comp_handler = Some(count_call) };
            };
            if set_before {
                set();
            }
            // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
            // nobody else's.
            let new = unsafe { Object::<kind::Cq, Minimal>::prepare(raw) };
            new.open_where_ready();
            let cq = new.init(())?;
            // As `__ib_alloc_cq`, for which what the handler needs comes even later.
            set();
            let before = CALLS.load(Relaxed);
            cq.complete();
            assert_eq!(CALLS.load(Relaxed) - before, i32::from(set_before));
            // Now somebody uses it, who is told what was kept.
            cq.open();
            assert_eq!(CALLS.load(Relaxed) - before, 1);
            // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
            // afterwards.
            unsafe { Object::<kind::Cq, Minimal>::finish(raw) };
        }
        Ok(())
    }

    #[test]
    fn a_queue_that_is_polled_directly_is_never_completed() -> Result {
        let mut memory = Memory::<kind::Cq>::new()?;
        let raw = memory.raw();
        // SAFETY: The memory is as the core's, and nobody else looks at it.
        let cq = unsafe {
            (*raw).comp_handler = Some(count_call);
            (*raw).poll_ctx = bindings::ib_poll_context_IB_POLL_DIRECT;
            Object::<kind::Cq, Minimal>::prepare(raw).init(())?
        };
        cq.open();
        let before = CALLS.load(Relaxed);
        cq.complete();
        assert_eq!(CALLS.load(Relaxed), before);
        // SAFETY: Nobody else looks at the queue.
        unsafe { (*raw).poll_ctx = bindings::ib_poll_context_IB_POLL_WORKQUEUE };
        cq.complete();
        assert_eq!(CALLS.load(Relaxed), before + 1);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Cq, Minimal>::finish(raw) };
        Ok(())
    }

    #[test]
    fn table_drops_what_is_left_in_it() -> Result {
        let mut memory = Memory::<kind::Pd>::new()?;
        // SAFETY: `memory` is as the core allocates it: zeroed, of the size of the object, and
        // nobody else's.
        let new = unsafe { Object::<kind::Pd, Minimal>::prepare(memory.raw()) };
        let pd = new.init(Tracked::new(3))?;
        let table: Pin<KBox<IrqXArray<PdRef<Minimal>>>> =
            KBox::pin_init(new_irq_xarray!("rust_rdma_table"), GFP_KERNEL)?;
        for index in [0, 1, 1 << 20, u32::MAX as usize] {
            table.insert(index, pd.get_ref().ok_or(EINVAL)?)?;
        }
        drop(table);
        // SAFETY: The object was prepared above, nobody has a reference to it, and it is not used
        // afterwards.
        unsafe { Object::<kind::Pd, Minimal>::finish(memory.raw()) };
        Ok(())
    }

    #[test]
    fn completion_times_out_and_is_reusable() -> Result {
        let completion = KBox::pin_init(Completion::new(), GFP_KERNEL)?;
        assert!(!completion.wait_timeout(1));
        completion.complete();
        assert!(completion.wait_timeout(1));
        assert!(!completion.try_wait());
        completion.complete_all();
        assert!(completion.try_wait() && completion.try_wait());
        completion.reinit();
        assert!(!completion.try_wait());
        Ok(())
    }

    #[test]
    fn irq_spinlock_excludes_and_releases() -> Result {
        let lock: Arc<IrqSpinLock<u32>> =
            Arc::pin_init(new_irq_spinlock!(1, "rust_rdma_test"), GFP_KERNEL)?;
        {
            let mut guard = lock.lock();
            *guard += 1;
            assert!(lock.try_lock().is_none());
        }
        assert_eq!(lock.try_lock().map(|guard| *guard), Some(2));
        Ok(())
    }
}
