// SPDX-License-Identifier: GPL-2.0

//! Tests of the table, for every layout.

use super::layout::LAYOUTS;
use super::*;

#[kunit_tests(ferrite_vector_map)]
mod suite {
    use super::*;

    /// Event queues and vectors of sends and receives, by column.
    type Expected = [&'static [(u16, u16)]; 2];

    fn named(name: &str) -> Result<Layout> {
        Layout::parse(name.as_bytes()).ok_or(ENOENT)
    }

    /// A table for a device that has one, with enough of everything.
    fn table(name: &str, processors: u32) -> Result<VectorTable> {
        let layout = named(name)?;
        let vectors = layout.vectors(processors) as u16;
        VectorTable::new(layout, true, processors, u32::MAX, vectors)
    }

    fn check(name: &str, table: &VectorTable, expected: &Expected) {
        for (part, row) in expected.iter().enumerate() {
            if usize::from(table.columns()) != row.len() {
                pr_err!("{}: {} columns\n", name, table.columns());
            }
            assert_eq!(usize::from(table.columns()), row.len());
            for (column, entry) in row.iter().enumerate() {
                let found = table.at(part, column as u16);
                if found != *entry {
                    pr_err!("{}: {} {}: {:?}\n", name, part, column, found);
                }
                assert_eq!(found, *entry);
            }
        }
    }

    #[test]
    fn each_layout_has_what_its_name_says() -> Result {
        let layouts: [(&str, u32, Expected); 18] = [
            ("one/intx", 1, [&[(2, 0), (2, 0)], &[(2, 0), (2, 0)]]),
            ("cpu/intx", 1, [&[(2, 0), (3, 0)], &[(2, 0), (3, 0)]]),
            ("function/intx", 1, [&[(2, 0), (2, 0)], &[(3, 0), (3, 0)]]),
            (
                "function-cpu/intx",
                1,
                [&[(2, 0), (3, 0)], &[(4, 0), (5, 0)]],
            ),
            ("one/one", 3, [&[(2, 2), (2, 2)], &[(2, 2), (2, 2)]]),
            ("one/cpu", 4, [&[(2, 2), (2, 3)], &[(2, 2), (2, 3)]]),
            ("cpu/one", 3, [&[(2, 2), (3, 2)], &[(2, 2), (3, 2)]]),
            ("cpu/cpu", 4, [&[(2, 2), (3, 3)], &[(2, 2), (3, 3)]]),
            ("cpu/several", 6, [&[(2, 2), (3, 3)], &[(2, 4), (3, 5)]]),
            (
                "several/several",
                6,
                [
                    &[(2, 2), (3, 3), (4, 4), (5, 5)],
                    &[(2, 2), (3, 3), (4, 4), (5, 5)],
                ],
            ),
            (
                "several/cpu",
                4,
                [
                    &[(2, 2), (3, 3), (4, 2), (5, 3)],
                    &[(2, 2), (3, 3), (4, 2), (5, 3)],
                ],
            ),
            ("function/one", 3, [&[(2, 2), (2, 2)], &[(3, 2), (3, 2)]]),
            ("function/cpu", 4, [&[(2, 2), (2, 3)], &[(3, 2), (3, 3)]]),
            (
                "function/function",
                4,
                [&[(2, 2), (2, 2)], &[(3, 3), (3, 3)]],
            ),
            (
                "function-cpu/one",
                3,
                [&[(2, 2), (3, 2)], &[(4, 2), (5, 2)]],
            ),
            (
                "function-cpu/cpu",
                4,
                [&[(2, 2), (3, 3)], &[(4, 2), (5, 3)]],
            ),
            (
                "function-cpu/function",
                4,
                [&[(2, 2), (3, 2)], &[(4, 3), (5, 3)]],
            ),
            (
                "function-cpu/function-cpu",
                6,
                [&[(2, 2), (3, 3)], &[(4, 4), (5, 5)]],
            ),
        ];
        for ((name, vectors, expected), layout) in layouts.iter().zip(&LAYOUTS) {
            assert_eq!(layout.name.to_bytes(), name.as_bytes());
            assert_eq!(layout.vectors(2), *vectors);
            assert_eq!(layout.wants_pin(), name.ends_with("/intx"));
            let table = table(name, 2)?;
            check(name, &table, expected);
            assert_eq!(table.used_vectors(), *vectors);
        }
        Ok(())
    }

    #[test]
    fn what_an_event_queue_can_say_by_itself_is_not_looked_up() -> Result {
        let direct = |eqn| Destination { eqn, processor: 0 };
        let mapped = |processor| Destination {
            eqn: abi::EQ_MAPPED,
            processor,
        };
        for (name, expected) in [
            ("one/intx", [direct(2), direct(2)]),
            ("cpu/intx", [direct(2), direct(3)]),
            ("function/intx", [mapped(0), mapped(1)]),
            ("one/one", [direct(2), direct(2)]),
            // The first column is by the vector of the queue itself.
            ("one/cpu", [direct(2), mapped(1)]),
            ("cpu/one", [direct(2), direct(3)]),
            ("cpu/cpu", [direct(2), direct(3)]),
            ("cpu/several", [mapped(0), mapped(1)]),
            ("function/cpu", [mapped(0), mapped(1)]),
            ("function-cpu/function-cpu", [mapped(0), mapped(1)]),
        ] {
            let table = table(name, 2)?;
            for (column, expected) in expected.iter().enumerate() {
                assert_eq!(table.destination(column as u16), *expected);
            }
        }
        Ok(())
    }

    #[test]
    fn every_layout_works_with_any_number_of_anything() -> Result {
        for layout in &LAYOUTS {
            for processors in [0, 1, 2, 3, 64, u32::MAX] {
                for queues in [0, 1, 2, 3, 64, u32::MAX] {
                    for vectors in [0, 1, 2, 3, 4, 64, 512] {
                        let table = VectorTable::new(*layout, true, processors, queues, vectors)?;
                        assert!(u32::from(table.queues()) <= queues.min(MOST_QUEUES));
                        assert!(u32::from(table.columns()) <= MOST_COLUMNS);
                        assert_eq!((table.columns() == 0), (queues == 0));
                        // There is no event queue that nothing goes to.
                        assert!(table.own.iter().all(|own| *own != abi::MESSAGE_OF_QUEUE));
                        let served = table.served_by_vector()?;
                        let last = table.columns().saturating_sub(1);
                        for column in [0, last / 2, last] {
                            if column >= table.columns() {
                                continue;
                            }
                            for part in 0..PARTS.len() {
                                let (eqn, vector) = table.at(part, column);
                                assert!((2..2 + table.queues()).contains(&eqn));
                                assert!(vector < vectors.max(1));
                                assert!(u32::from(vector) < table.used_vectors());
                                // Nobody waits for an interrupt that nobody handles.
                                assert!(served[usize::from(vector)].contains(&eqn));
                                let entry = table.entry(part, column);
                                let own = table.vector_of_queue(eqn);
                                let is_own = entry.message == abi::MESSAGE_OF_QUEUE;
                                assert_eq!(is_own, (own == vector));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn there_are_as_many_handlers_as_processors_and_the_device_has_room_for() -> Result {
        let columns = |name, processors, queues| -> Result<(u16, u16)> {
            let table = VectorTable::new(named(name)?, true, processors, queues, 512)?;
            Ok((table.columns(), table.queues()))
        };
        assert_eq!(columns("cpu/cpu", 4, 64)?, (4, 4));
        assert_eq!(columns("cpu/cpu", 4, 2)?, (2, 2));
        assert_eq!(columns("cpu/cpu", 0, 64)?, (1, 1));
        assert_eq!(columns("cpu/cpu", u32::MAX, u32::MAX)?, (510, 510));
        assert_eq!(columns("several/cpu", 4, 64)?, (8, 8));
        assert_eq!(columns("several/cpu", 4, 5)?, (5, 5));
        assert_eq!(columns("one/cpu", 4, 64)?, (4, 1));
        assert_eq!(columns("one/cpu", u32::MAX, 64)?, (512, 1));
        assert_eq!(columns("function/cpu", 4, 1)?, (4, 1));
        assert_eq!(columns("function-cpu/cpu", 4, 64)?, (4, 8));
        assert_eq!(columns("function-cpu/cpu", 4, 3)?, (4, 3));
        Ok(())
    }

    #[test]
    fn fewer_vectors_are_shared_and_more_are_left_alone() -> Result {
        let with = |name, processors, vectors| -> Result<VectorTable> {
            VectorTable::new(named(name)?, true, processors, 64, vectors)
        };
        // Two for completions of four processors.
        check(
            "one/cpu of 4",
            &with("one/cpu", 4, 4)?,
            &[&[(2, 2), (2, 3), (2, 2), (2, 3)]; 2],
        );
        check(
            "cpu/cpu of 4",
            &with("cpu/cpu", 4, 4)?,
            &[&[(2, 2), (3, 3), (4, 2), (5, 3)]; 2],
        );
        // More than processors.
        check(
            "one/cpu of 9",
            &with("one/cpu", 2, 9)?,
            &[&[(2, 2), (2, 3)]; 2],
        );
        check(
            "several/cpu of 9",
            &with("several/cpu", 2, 9)?,
            &[&[(2, 2), (3, 3), (4, 2), (5, 3)]; 2],
        );
        // One for all.
        check(
            "function/function of 1",
            &with("function/function", 1, 1)?,
            &[&[(2, 0)], &[(3, 0)]],
        );
        // All event queues in one.
        let one = VectorTable::new(named("function-cpu/function-cpu")?, true, 2, 1, 6)?;
        check("1 queue", &one, &[&[(2, 2), (2, 3)], &[(2, 4), (2, 5)]]);
        Ok(())
    }

    #[test]
    fn all_vectors_of_a_column_are_at_home_at_one_processor() -> Result {
        let check = |name, processors, queues, vectors, expected: &[u32]| -> Result {
            let table = VectorTable::new(named(name)?, true, processors, queues, vectors)?;
            let homes = table.homes()?;
            // Those of commands and asynchronous events have none.
            assert!(homes.iter().take(2).all(Option::is_none));
            let homes = homes.iter().skip(2).copied();
            assert!(homes.eq(expected.iter().copied().map(Some)));
            Ok(())
        };
        check("cpu/cpu", 3, 64, 5, &[0, 1, 2])?;
        // Fewer vectors, and fewer event queues.
        check("cpu/cpu", 3, 64, 4, &[0, 1])?;
        check("cpu/cpu", 3, 2, 5, &[0, 1])?;
        check("several/cpu", 2, 64, 4, &[0, 1])?;
        check("several/several", 2, 64, 6, &[0, 1, 2, 3])?;
        check("cpu/several", 3, 64, 8, &[0, 1, 2, 0, 1, 2])?;
        check("cpu/several", 6, 2, 14, &[0, 1, 0, 1])?;
        check("function-cpu/function-cpu", 3, 64, 8, &[0, 1, 2, 0, 1, 2])?;
        check("function-cpu/function-cpu", 4, 64, 7, &[0, 1, 2, 3, 0])?;
        // For no column alone.
        check("function/function", 3, 64, 4, &[0, 1])?;
        check("one/one", 3, 64, 3, &[0])?;
        check("one/intx", 3, 64, 1, &[])
    }

    #[test]
    fn all_vectors_that_a_queue_interrupts_by_serve_it() -> Result {
        let by = |name, eqn, expected: [bool; 6]| -> Result {
            let served = table(name, 2)?.served_by_vector()?;
            for (vector, expected) in expected.iter().enumerate() {
                let served = served.get(vector);
                let times = served.map_or(0, |served| {
                    let same = served.iter().filter(|served| **served == eqn);
                    same.count()
                });
                assert_eq!(times, usize::from(*expected));
            }
            Ok(())
        };
        by("cpu/cpu", 0, [true, false, false, false, false, false])?;
        by("cpu/cpu", 1, [false, true, false, false, false, false])?;
        by("cpu/cpu", 3, [false, false, false, true, false, false])?;
        by("one/cpu", 2, [false, false, true, true, false, false])?;
        by("cpu/several", 3, [false, false, false, true, false, true])?;
        by("function/cpu", 3, [false, false, true, true, false, false])?;
        by("one/intx", 1, [true, false, false, false, false, false])?;
        by("one/intx", 2, [true, false, false, false, false, false])
    }

    #[test]
    fn columns_share_event_queues_crosswise_where_there_are_few() -> Result {
        // Six are wanted: sends of three processors, then receives.
        let table = VectorTable::new(named("function-cpu/one")?, true, 3, 4, 3)?;
        let of = [0, 1, 2].map(|column| table.queues_of(column));
        assert_eq!(of, [[2, 5], [3, 2], [4, 3]]);
        let uses = |eqn| [0, 1, 2].map(|column| table.uses(column, eqn));
        assert_eq!(uses(2), [true, true, false]);
        assert_eq!(uses(3), [false, true, true]);
        assert_eq!(uses(5), [true, false, false]);
        assert_eq!(uses(6), [false; 3]);
        Ok(())
    }

    #[test]
    fn a_device_is_told_of_a_table_only_where_it_has_to_look_something_up() -> Result {
        for (name, told) in [
            ("cpu/cpu", false),
            ("one/one", false),
            ("cpu/one", false),
            ("several/cpu", false),
            ("one/intx", false),
            ("one/cpu", true),
            ("cpu/several", true),
            ("function/one", true),
        ] {
            let commands = table(name, 2)?.commands(false, |_| Err(EIO));
            assert_eq!(commands, if told { Err(EIO) } else { Ok(()) });
        }
        Ok(())
    }

    #[test]
    fn a_device_without_a_table_has_a_queue_and_a_vector_for_each_processor() -> Result {
        for layout in &LAYOUTS {
            let table = VectorTable::new(*layout, false, 2, 64, 4)?;
            check("no table", &table, &[&[(2, 2), (3, 3)]; 2]);
            assert_eq!(table.destination(1).eqn, 3);
            table.commands(false, |_| Err(EIO))?;
        }
        Ok(())
    }

    #[test]
    fn the_device_is_told_of_all_entries_and_that_there_are_none() -> Result {
        // More columns than one command has entries for.
        let table = table("one/cpu", 100)?;
        for clear in [false, true] {
            let mut commands = KVec::new();
            table.commands(clear, |command| {
                let rest = command.entries.iter().skip(command.count.into());
                let unused = VectorMapEntry { eqn: 0, message: 0 };
                assert!(rest.clone().all(|entry| *entry == unused));
                let entries = command.entries.iter().take(command.count.into());
                for (entry, column) in entries.zip(command.first..) {
                    let expected = if clear {
                        (abi::EQ_NONE, abi::MESSAGE_OF_QUEUE)
                    } else if column == 0 {
                        (2, abi::MESSAGE_OF_QUEUE)
                    } else {
                        (2, 2 + column)
                    };
                    assert_eq!((entry.eqn, entry.message), expected);
                }
                commands.push(
                    (command.sub_function, command.first, command.count),
                    GFP_KERNEL,
                )?;
                Ok(())
            })?;
            let (send, receive) = (
                SubFunction::SendCompletions.number(),
                SubFunction::ReceiveCompletions.number(),
            );
            let expected = [
                (send, 0, 52),
                (send, 52, 48),
                (receive, 0, 52),
                (receive, 52, 48),
            ];
            assert_eq!(commands.as_slice(), expected.as_slice());
        }
        assert_eq!(table.commands(false, |_| Err(EIO)), Err(EIO));
        Ok(())
    }

    #[test]
    fn each_queue_has_its_own_vector_where_there_are_enough() {
        for eqn in 0..6 {
            assert_eq!(vector_of(eqn, 6), eqn);
        }
    }

    #[test]
    fn handlers_share_before_the_fixed_queues_do() {
        assert_eq!(vector_of(0, 3), 0);
        assert_eq!(vector_of(1, 3), 1);
        for eqn in 2..10 {
            assert_eq!(vector_of(eqn, 3), 2);
        }
        assert_eq!(vector_of(4, 4), 2);
        assert_eq!(vector_of(5, 4), 3);
    }

    #[test]
    fn one_vector_serves_everything() {
        for eqn in 0..10 {
            assert_eq!(vector_of(eqn, 1), 0);
        }
        assert!((0..10).all(|eqn| vector_of(eqn, 2) < 2));
    }
}
