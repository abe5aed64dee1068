// SPDX-License-Identifier: Apache-2.0 OR MIT
//! PCI identity, BARs, interrupts, power.

use super::checks;
use crate::host::Host;
use crate::memory::PAGE;
use crate::outcome::{not_here, Outcome};
use crate::transport::{
    Mode, CAPABILITY_EXPRESS, CAPABILITY_MSI, CAPABILITY_MSIX, CAPABILITY_POWER, COMMAND_NO_PIN,
    CONFIG, PCI_COMMAND, PCI_PIN, PCI_STATUS, ROM, STATUS_PIN,
};
use crate::{ensure, ensure_eq};
use ferrite_abi::*;

checks! {
    "DEV-1-1" => vendor_and_device,
    "DEV-1-2" => subsystem,
    "DEV-1-3" => class,
    "DEV-1-4" => revision,
    "DEV-1-5" => capabilities,
    "DEV-1-6" => no_io_space_or_rom,
    "DEV-1-7" => bars,
    "DEV-1-8" => doorbell_pages,
    "DEV-1-9" => doorbell_stride,
    "DEV-1-10" => doorbell_offset,
    "DEV-1-11" => device_memory_place,
    "DEV-1-12" => whole_32_bit_registers,
    "DEV-1-13" => whole_64_bit_registers,
    "DEV-1-14" => halves_of_registers,
    "DEV-1-15" => accesses_of_another_size,
    "DEV-1-16" => where_no_register_is,
    "DEV-1-17" => registers_for_reading,
    "DEV-1-18" => registers_for_writing,
    "DEV-1-19" => a_doorbell_is_taken,
    "DEV-1-20" => other_writes_to_doorbell_pages,
    "DEV-1-21" => doorbell_pages_read_as_zero,
    "DEV-1-22" => beyond_a_doorbell_page,
    "DEV-1-23" => device_memory_accesses,
    "DEV-1-24" => messages,
    "DEV-1-25" => msix_table,
    "DEV-1-26" => messages_fold,
    "DEV-1-28" => entry_before_interrupt,
    "DEV-1-29" => pin_follows_doorbells,
    "DEV-1-30" => modes_are_told,
    "DEV-1-31" => nothing_without_bus_mastering,
    "DEV-1-33" => addresses_beyond_dma_bits,
    "DEV-1-34" => power_states_reset_nothing,
    "DEV-1-35" => no_other_power_states,
    "DEV-1-36" => modes_change_without_loss,
}

fn vendor_and_device(host: &mut Host) -> Outcome {
    ensure_eq!(host.device.config16(0)?, PCI_VENDOR_ID, "vendor");
    ensure_eq!(host.device.config16(2)?, PCI_DEVICE_ID, "device");
    Ok(())
}

fn subsystem(host: &mut Host) -> Outcome {
    ensure_eq!(
        host.device.config16(0x2c)?,
        PCI_VENDOR_ID,
        "subsystem vendor"
    );
    ensure_eq!(
        host.device.config16(0x2e)?,
        PCI_DEVICE_ID,
        "subsystem device"
    );
    Ok(())
}

fn class(host: &mut Host) -> Outcome {
    ensure_eq!(host.device.config32(8)? >> 8, PCI_CLASS, "class");
    Ok(())
}

fn revision(host: &mut Host) -> Outcome {
    ensure_eq!(host.device.config32(8)? as u8, PCI_REVISION, "revision");
    Ok(())
}

fn capabilities(host: &mut Host) -> Outcome {
    host.device.capability(CAPABILITY_POWER)?;
    ensure!(
        !host.device.modes()?.is_empty(),
        "there is nothing to interrupt by"
    );
    let express = host.device.capability(CAPABILITY_EXPRESS)?;
    let kind = (host.device.config16(express + 2)? >> 4) & 0xf;
    ensure_eq!(
        kind,
        0,
        "the kind of PCI Express function (0 is an endpoint)"
    );
    let function_reset = host.device.config32(express + 4)? & (1 << 28);
    ensure!(function_reset != 0, "there is no function-level reset");
    Ok(())
}

/// The bits of a BAR that can be written: its size, and what it is.
fn probe_bar(host: &mut Host, bar: u64) -> Outcome<u32> {
    let at = 0x10 + 4 * bar;
    let before = host.device.config32(at)?;
    host.device.set_config32(at, u32::MAX)?;
    let probed = host.device.config32(at)?;
    host.device.set_config32(at, before)?;
    Ok(probed)
}

fn no_io_space_or_rom(host: &mut Host) -> Outcome {
    for bar in 0..6 {
        // Behind a 64-bit BAR comes its upper half, which has no flags.
        if bar % 2 == 0 {
            ensure_eq!(probe_bar(host, bar)? & 1, 0, "BAR {bar} is of I/O space");
        }
    }
    host.device.set_config32(0x30, !0x7ff)?;
    ensure_eq!(host.device.config32(0x30)?, 0, "the expansion ROM's BAR");
    ensure_eq!(host.device.region_size(ROM), 0, "the expansion ROM's size");
    host.device.set_config16(PCI_COMMAND, 0x7)?;
    ensure_eq!(
        host.device.config16(PCI_COMMAND)? & 1,
        0,
        "I/O space enabled"
    );
    Ok(())
}

fn bars(host: &mut Host) -> Outcome {
    for bar in [BAR_REGISTERS, BAR_DOORBELLS, BAR_MSIX] {
        let flags = probe_bar(host, bar.into())? & 0xf;
        ensure_eq!(
            flags,
            0b0100,
            "BAR {bar}, 64-bit memory and not prefetchable"
        );
    }
    for bar in [1, 3, 5] {
        ensure_eq!(host.device.region_size(bar), 0, "the size of BAR {bar}");
    }
    let registers = host.device.region_size(BAR_REGISTERS);
    ensure_eq!(registers, BAR_REGISTERS_SIZE as u64, "the size of BAR 0");
    let msix = host.device.region_size(BAR_MSIX);
    ensure_eq!(msix, BAR_MSIX_SIZE as u64, "the size of BAR 4");
    Ok(())
}

fn doorbell_pages(host: &mut Host) -> Outcome {
    let pages = host.device.register32(REG_DOORBELL_PAGES)?;
    ensure!(pages >= 1, "no doorbell pages");
    // The last of them is one: a queue can be made with it and rung from it.
    host.start()?;
    let mut command = host.cq_command(6);
    command.doorbell_page = pages - 1;
    host.execute(&command)
}

fn doorbell_stride(host: &mut Host) -> Outcome {
    let stride = host.device.register32(REG_DOORBELL_STRIDE)?;
    let range = 12..=u32::from(DOORBELL_MAX_LOG_STRIDE);
    ensure!(range.contains(&stride), "the stride is 2^{stride}");
    Ok(())
}

fn doorbell_offset(host: &mut Host) -> Outcome {
    let offset = host.device.register64(REG_DOORBELL_OFFSET)?;
    let stride = host.device.register32(REG_DOORBELL_STRIDE)?;
    let pages = u64::from(host.device.register32(REG_DOORBELL_PAGES)?);
    ensure_eq!(
        offset % (1 << stride),
        0,
        "the offset beyond a multiple of the stride"
    );
    let size = host.device.region_size(BAR_DOORBELLS);
    ensure!(
        offset + (pages << stride) <= size,
        "pages beyond the end of the BAR"
    );
    Ok(())
}

/// Offset and size of device memory.
fn device_memory(host: &mut Host) -> Outcome<(u64, u64)> {
    let offset = host.device.register64(REG_DEVICE_MEMORY_OFFSET)?;
    Ok((offset, host.device.register64(REG_DEVICE_MEMORY_SIZE)?))
}

fn device_memory_place(host: &mut Host) -> Outcome {
    let (offset, size) = device_memory(host)?;
    if size == 0 {
        return Ok(());
    }
    ensure_eq!(
        offset % (1 << DOORBELL_MAX_LOG_STRIDE),
        0,
        "the offset beyond 64 KiB"
    );
    let bar = host.device.region_size(BAR_DOORBELLS);
    ensure!(
        offset + size <= bar,
        "device memory beyond the end of the BAR"
    );
    let pages = host.device.register64(REG_DOORBELL_OFFSET)?;
    let stride = host.device.register32(REG_DOORBELL_STRIDE)?;
    let end = pages + (u64::from(host.device.register32(REG_DOORBELL_PAGES)?) << stride);
    ensure!(
        offset >= end || offset + size <= pages,
        "device memory among doorbell pages"
    );
    Ok(())
}

fn whole_32_bit_registers(host: &mut Host) -> Outcome {
    ensure_eq!(
        host.device.register32(REG_MAGIC)?,
        MAGIC,
        "a 32-bit register"
    );
    // One that is written: a version that the device does not have is refused.
    let mut boot = host.boot()?;
    boot.version = u32::MAX;
    host.enable_fails(&boot, FatalCode::BadHandshake)
}

fn whole_64_bit_registers(host: &mut Host) -> Outcome {
    let whole = host.device.register64(REG_MAC)?.to_le_bytes();
    ensure_eq!(whole[..6], host.mac, "a 64-bit register");
    // One that is written: the device finds its boot block by it.
    host.start()
}

fn halves_of_registers(host: &mut Host) -> Outcome {
    let whole = host.device.register64(REG_MAC)?;
    let low = u64::from(host.device.register32(REG_MAC)?);
    let high = u64::from(host.device.register32(REG_MAC + 4)?);
    ensure_eq!((high << 32) | low, whole, "the halves of REG_MAC");
    for swapped in [false, true] {
        let boot = host.boot()?;
        host.memory.put(boot.address, &boot.block);
        // What the first half replaces is not what is meant.
        host.device.set_register64(REG_BOOT, u64::MAX)?;
        let mut halves = [(0, boot.address as u32), (4, (boot.address >> 32) as u32)];
        if swapped {
            halves.reverse();
        }
        for (half, value) in halves {
            host.device.set_register32(REG_BOOT + half, value)?;
        }
        host.device
            .set_register32(REG_DRIVER_VERSION, boot.version)?;
        host.device.set_register64(REG_DRIVER_FEATURES, 0)?;
        host.device.set_register32(REG_CONTROL, CONTROL_ENABLE)?;
        let state = host.device.status()?.state();
        ensure_eq!(state, Some(DeviceState::Running), "the state");
        host.device.control_reset()?;
    }
    Ok(())
}

fn accesses_of_another_size(host: &mut Host) -> Outcome {
    let bar = BAR_REGISTERS;
    ensure_eq!(host.device.read::<1>(bar, 0)?, [0], "one byte of REG_MAGIC");
    ensure_eq!(
        host.device.read::<2>(bar, 0)?,
        [0; 2],
        "two bytes of REG_MAGIC"
    );
    ensure_eq!(
        host.device.read::<4>(bar, 2)?,
        [0; 4],
        "a read that is not aligned"
    );
    ensure_eq!(
        host.device.read::<8>(bar, 0)?,
        [0; 8],
        "a 32-bit register with 64 bits"
    );
    ensure_eq!(
        host.device.read::<8>(bar, 0x34)?,
        [0; 8],
        "64 bits that are not aligned"
    );
    // Were it taken, the device would start or be fatal.
    let boot = host.boot()?;
    host.memory.put(boot.address, &boot.block);
    host.device
        .set_register32(REG_DRIVER_VERSION, boot.version)?;
    host.device.set_register64(REG_BOOT, boot.address)?;
    let control = REG_CONTROL as u64;
    let enable = CONTROL_ENABLE.to_le_bytes();
    host.device.write(bar, control, &enable[..1])?;
    host.device.write(bar, control, &enable[..2])?;
    host.device
        .write(bar, control - 2, &[0, 0, CONTROL_ENABLE as u8, 0])?;
    host.device.write(
        bar,
        control - 4,
        &u64::from(CONTROL_ENABLE).rotate_right(32).to_le_bytes(),
    )?;
    ensure_eq!(
        host.device.status()?.state(),
        Some(DeviceState::Ready),
        "the state"
    );
    Ok(())
}

fn where_no_register_is(host: &mut Host) -> Outcome {
    for offset in [0x024, 0x068, 0x100, BAR_REGISTERS_SIZE - 4] {
        ensure_eq!(host.device.register32(offset)?, 0, "what is at {offset:#x}");
        host.device.set_register32(offset, u32::MAX)?;
        ensure_eq!(
            host.device.register32(offset)?,
            0,
            "what was written at {offset:#x}"
        );
    }
    ensure_eq!(host.device.register64(0x200)?, 0, "what is at 0x200");
    ensure_eq!(
        host.device.status()?.state(),
        Some(DeviceState::Ready),
        "the state"
    );
    Ok(())
}

fn registers_for_reading(host: &mut Host) -> Outcome {
    for register in [
        REG_MAGIC,
        REG_ABI_VERSION,
        REG_STATUS,
        REG_MESSAGES,
        REG_FIRMWARE,
        REG_DOORBELL_PAGES,
        REG_DOORBELL_STRIDE,
        REG_FUNCTION,
        REG_RESET_TIMEOUT,
    ] {
        let before = host.device.register32(register)?;
        host.device.set_register32(register, !before)?;
        let after = host.device.register32(register)?;
        ensure_eq!(after, before, "the register at {register:#x} after a write");
    }
    for register in [
        REG_FEATURES,
        REG_MAC,
        REG_DOORBELL_OFFSET,
        REG_DEVICE_MEMORY_OFFSET,
        REG_DEVICE_MEMORY_SIZE,
    ] {
        let before = host.device.register64(register)?;
        host.device.set_register64(register, !before)?;
        let after = host.device.register64(register)?;
        ensure_eq!(after, before, "the register at {register:#x} after a write");
    }
    Ok(())
}

fn registers_for_writing(host: &mut Host) -> Outcome {
    host.device.set_register64(REG_DRIVER_FEATURES, u64::MAX)?;
    host.device.set_register32(REG_DRIVER_VERSION, u32::MAX)?;
    host.device.set_register64(REG_BOOT, u64::MAX)?;
    ensure_eq!(host.device.register32(REG_CONTROL)?, 0, "REG_CONTROL");
    ensure_eq!(
        host.device.register64(REG_DRIVER_FEATURES)?,
        0,
        "REG_DRIVER_FEATURES"
    );
    ensure_eq!(
        host.device.register32(REG_DRIVER_VERSION)?,
        0,
        "REG_DRIVER_VERSION"
    );
    ensure_eq!(host.device.register64(REG_BOOT)?, 0, "REG_BOOT");
    Ok(())
}

fn a_doorbell_is_taken(host: &mut Host) -> Outcome {
    host.start()?;
    host.nop()
}

/// Writes that would give the next command if they were taken.
fn ignored(host: &mut Host, writes: impl Fn(&Host, u64) -> Vec<(u64, Vec<u8>)>) -> Outcome {
    host.start()?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    for (offset, bytes) in writes(host, host.commands.into()) {
        host.device.write(BAR_DOORBELLS, offset, &bytes)?;
    }
    host.no_event(EQ_CONTROL)?;
    host.ring_control()?;
    host.answer(entry.cookie)?;
    Ok(())
}

fn other_writes_to_doorbell_pages(host: &mut Host) -> Outcome {
    ignored(host, |host, producer| {
        let control = host.device.doorbell_offset(0, DOORBELL_CONTROL);
        let other_page = host.device.doorbell_offset(USER, DOORBELL_CONTROL);
        let word = producer.to_le_bytes();
        vec![
            (control, word[..4].to_vec()),
            (control, word[..2].to_vec()),
            (control, word[..1].to_vec()),
            (control + 8, word.to_vec()),
            (control - 4, word.to_vec()),
            (other_page, word.to_vec()),
        ]
    })
}

/// A doorbell page that is not the kernel's.
const USER: u32 = crate::host::USER_PAGE;

fn doorbell_pages_read_as_zero(host: &mut Host) -> Outcome {
    host.start()?;
    for offset in [DOORBELL_SEND, DOORBELL_COMPLETION, DOORBELL_CONTROL, 0xff8] {
        for page in [0, USER] {
            let at = host.device.doorbell_offset(page, offset);
            ensure_eq!(
                host.device.read::<8>(BAR_DOORBELLS, at)?,
                [0; 8],
                "page {page}"
            );
        }
    }
    Ok(())
}

fn beyond_a_doorbell_page(host: &mut Host) -> Outcome {
    if host.device.register32(REG_DOORBELL_STRIDE)? == 12 {
        return not_here("the device's doorbell pages are next to each other");
    }
    ignored(host, |host, producer| {
        let control = host.device.doorbell_offset(0, DOORBELL_CONTROL);
        vec![(
            control + DOORBELL_PAGE_SIZE as u64,
            producer.to_le_bytes().to_vec(),
        )]
    })
}

fn device_memory_accesses(host: &mut Host) -> Outcome {
    let (offset, size) = device_memory(host)?;
    if size == 0 {
        return not_here("the device has no memory");
    }
    let bar = BAR_DOORBELLS;
    let bytes = [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88];
    for at in [offset, offset + 3, offset + size - 8] {
        for length in [1, 2, 4, 8] {
            host.device.write(bar, at, &[0; 8])?;
            host.device.write(bar, at, &bytes[..length])?;
            let mut expected = [0; 8];
            expected[..length].copy_from_slice(&bytes[..length]);
            ensure_eq!(
                host.device.read::<8>(bar, at)?,
                expected,
                "{length} bytes at {at:#x}"
            );
            ensure_eq!(
                host.device.read::<1>(bar, at)?,
                expected[..1],
                "a byte at {at:#x}"
            );
            ensure_eq!(
                host.device.read::<2>(bar, at)?,
                expected[..2],
                "two at {at:#x}"
            );
            ensure_eq!(
                host.device.read::<4>(bar, at)?,
                expected[..4],
                "four at {at:#x}"
            );
        }
    }
    if offset + size < host.device.region_size(bar) {
        let end = offset + size - 4;
        host.device.write(bar, end, &[0xff; 8])?;
        ensure_eq!(
            host.device.read::<4>(bar, end)?,
            bytes[4..],
            "half of what was written"
        );
        ensure_eq!(
            host.device.read::<8>(bar, end)?,
            [0; 8],
            "what is partly outside"
        );
    }
    Ok(())
}

fn messages(host: &mut Host) -> Outcome {
    let messages = host.device.register32(REG_MESSAGES)?;
    let range = 1..=MAX_MESSAGES as u32;
    ensure!(range.contains(&messages), "{messages} messages");
    Ok(())
}

fn msix_table(host: &mut Host) -> Outcome {
    let Some(msix) = host.device.find_capability(CAPABILITY_MSIX)? else {
        return not_here("the device has no MSI-X");
    };
    let entries = u32::from(host.device.config16(msix + 2)? & 0x7ff) + 1;
    let messages = host.device.register32(REG_MESSAGES)?;
    ensure!(
        entries <= messages,
        "{entries} entries for {messages} messages"
    );
    let table = host.device.config32(msix + 4)?;
    ensure_eq!(table, BAR_MSIX, "BAR and offset of the table");
    let pending = host.device.config32(msix + 8)?;
    ensure_eq!(
        pending,
        BAR_MSIX | MSIX_PBA_OFFSET as u32,
        "BAR and offset of the pending bits"
    );
    Ok(())
}

fn messages_fold(host: &mut Host) -> Outcome {
    host.start()?;
    let messages = host.device.register32(REG_MESSAGES)? as u16;
    for mode in host.device.modes()? {
        host.device.set_mode(mode)?;
        for message in [0, messages / 2, messages - 1] {
            let entry = ModifyEventQueue {
                message,
                ..ModifyEventQueue::zeroed()
            };
            host.execute(&entry)?;
            if let Some(ring) = host.queues.get_mut(&EQ_CONTROL) {
                ring.message = message;
            }
            quieten(host)?;
            host.arm_eq(EQ_CONTROL)?;
            host.nop()?;
            let vectors = host.device.vectors();
            let own = host.device.own_messages();
            if fold_message(message, vectors).is_some_and(|vector| vector < own) {
                host.interrupt(EQ_CONTROL)?;
            }
            for other in (0..own).filter(|other| *other != message % vectors) {
                let raised = host.device.interrupts(other);
                ensure_eq!(raised, 0, "{mode:?}: vector {other} for message {message}");
            }
        }
    }
    Ok(())
}

/// Takes every interrupt that was raised so far, so that the next one is seen.
fn quieten(host: &mut Host) -> Outcome {
    // A doorbell that neither arms nor tells: it lets go of the pin alone.
    host.event_doorbell(EventDoorbell {
        eqn: EQ_CONTROL,
        read_index: 0,
        relative: false,
        valid: false,
        arm: false,
        quiet: false,
        disarm: false,
    })?;
    if host.device.mode() == Mode::Pin {
        host.device.unmask_pin()?;
    }
    for message in 0..host.device.own_messages() {
        host.device.interrupts(message);
    }
    Ok(())
}

fn pin_status(host: &mut Host) -> Outcome<bool> {
    Ok(host.device.config16(PCI_STATUS)? & STATUS_PIN != 0)
}

/// Whether the pin is asserted: what tells of its level does so again each time it is let.
fn pin_level(host: &mut Host) -> Outcome<bool> {
    host.device.unmask_pin()?;
    Ok(host.device.interrupts(0) > 0)
}

fn pin_follows_doorbells(host: &mut Host) -> Outcome {
    if !host.device.modes()?.contains(&Mode::Pin) {
        return not_here("the device has no interrupt pin");
    }
    host.start()?;
    host.device.set_mode(Mode::Pin)?;
    quieten(host)?;
    ensure!(!pin_level(host)?, "the pin is asserted for nothing");
    let ring = |host: &mut Host, eqn, valid, arm| {
        host.event_doorbell(EventDoorbell {
            eqn,
            read_index: 0,
            relative: true,
            valid,
            arm,
            quiet: false,
            disarm: false,
        })
    };
    for (valid, arm) in [(false, false), (true, false), (false, true)] {
        host.arm_eq(EQ_CONTROL)?;
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
        host.ring_control()?;
        host.interrupt(EQ_CONTROL)?;
        for _ in 0..3 {
            ensure!(pin_level(host)?, "the pin does not hold its level");
        }
        ensure!(pin_status(host)?, "Interrupt Status is clear");
        ring(host, EQ_ASYNC, true, true)?;
        ensure!(pin_level(host)?, "a doorbell for another queue let it go");
        // Neither Interrupt Disable nor a change of the mode makes it forget.
        let command = host.device.config16(PCI_COMMAND)?;
        host.device
            .set_config16(PCI_COMMAND, command | COMMAND_NO_PIN)?;
        ensure!(!pin_level(host)?, "Interrupt Disable does not disable it");
        ensure!(pin_status(host)?, "Interrupt Status follows the pin");
        host.device.set_config16(PCI_COMMAND, command)?;
        ensure!(pin_level(host)?, "the pin was forgotten meanwhile");
        ring(host, EQ_CONTROL, valid, arm)?;
        // Armed with an entry that was not read, it is raised again at once.
        ensure_eq!(pin_level(host)?, arm, "the pin after a doorbell");
        ensure_eq!(pin_status(host)?, arm, "Interrupt Status after a doorbell");
        host.answer(entry.cookie)?;
        quieten(host)?;
        ensure!(!pin_level(host)?, "the pin after the last doorbell");
    }
    // A device that was reset lets go of it, too.
    host.arm_eq(EQ_CONTROL)?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    host.interrupt(EQ_CONTROL)?;
    host.device.control_reset()?;
    ensure!(!pin_level(host)?, "the pin after a reset");
    ensure!(!pin_status(host)?, "Interrupt Status after a reset");
    Ok(())
}

fn modes_change_without_loss(host: &mut Host) -> Outcome {
    let modes = host.device.modes()?;
    host.start()?;
    for before in &modes {
        for after in &modes {
            host.device.set_mode(*before)?;
            quieten(host)?;
            host.arm_eq(EQ_CONTROL)?;
            let entry = host.bare_entry(CommandOpcode::Nop);
            host.write_command(&entry);
            host.ring_control()?;
            host.interrupt(EQ_CONTROL)?;
            // Nobody has rung since: the host may have lost it with the mode.
            if before != after {
                host.device.set_mode(*after)?;
                host.interrupt(EQ_CONTROL)?;
            }
            host.answer(entry.cookie)?;
        }
    }
    Ok(())
}

fn entry_before_interrupt(host: &mut Host) -> Outcome {
    host.start()?;
    for _ in 0..64 {
        // A pin that has told of its level does not before it is unmasked.
        quieten(host)?;
        host.arm_eq(EQ_CONTROL)?;
        let entry = host.bare_entry(CommandOpcode::Nop);
        host.write_command(&entry);
        host.ring_control()?;
        host.interrupt(EQ_CONTROL)?;
        let found = host.take_event(EQ_CONTROL)?.map(|event| event.id);
        ensure_eq!(
            found,
            Some(entry.cookie),
            "the entry when its interrupt came"
        );
    }
    Ok(())
}

fn modes_are_told(host: &mut Host) -> Outcome {
    let modes = host.device.modes()?;
    let [pin] = host.device.read(CONFIG, PCI_PIN)?;
    ensure!(pin <= 4, "interrupt pin {pin}");
    ensure_eq!(pin != 0, modes.contains(&Mode::Pin), "the pin");
    let mut told = 0;
    if let Some(msi) = host.device.find_capability(CAPABILITY_MSI)? {
        let control = host.device.config16(msi + 2)?;
        ensure!((control >> 1) & 7 <= 5, "MSI with more than 32 messages");
        told = 1 << ((control >> 1) & 7);
    }
    let most = modes.iter().find_map(|mode| match mode {
        Mode::Msi(vectors) => Some(*vectors),
        _ => None,
    });
    ensure_eq!(most.unwrap_or(0), told, "MSI vectors");
    let msix = host.device.find_capability(CAPABILITY_MSIX)?;
    ensure_eq!(msix.is_some(), modes.contains(&Mode::MsiX), "MSI-X");
    Ok(())
}

fn nothing_without_bus_mastering(host: &mut Host) -> Outcome {
    host.device.set_bus_master(false)?;
    let boot = host.boot()?;
    host.enable_fails(&boot, FatalCode::BadBootBlock)?;
    // Nor once it runs: what is due fails.
    host.device.set_bus_master(true)?;
    host.start()?;
    host.arm_eq(EQ_CONTROL)?;
    host.interrupts(EQ_CONTROL);
    host.device.set_bus_master(false)?;
    let entry = host.bare_entry(CommandOpcode::Nop);
    host.write_command(&entry);
    host.ring_control()?;
    host.no_interrupt(EQ_CONTROL)?;
    host.no_event(EQ_CONTROL)?;
    host.is_fatal(FatalCode::HostMemory)
}

fn addresses_beyond_dma_bits(host: &mut Host) -> Outcome {
    host.start()?;
    let bits = host.caps.dma_bits;
    if bits >= 64 {
        return not_here("the device has 64 bits of DMA address");
    }
    // Nothing is taken for the memory at the same address without the upper bits.
    let mut entry = host.query_entry(CommandOpcode::QueryDevice, None, 256);
    entry.reply |= 1 << bits;
    host.memory.fill(host.reply(), PAGE, 0);
    host.submit_for(&entry, CommandStatus::HostMemory)?;
    let reply = host.memory.bytes(host.reply(), PAGE);
    ensure!(
        reply.iter().all(|byte| *byte == 0),
        "the address was cut off"
    );
    Ok(())
}

fn power_states_reset_nothing(host: &mut Host) -> Outcome {
    const CONTROL: u64 = 4;
    const D3_HOT: u16 = 3;
    const NO_SOFT_RESET: u16 = 1 << 3;
    host.start()?;
    let power = host.device.capability(CAPABILITY_POWER)?;
    let control = host.device.config16(power + CONTROL)?;
    ensure!(control & NO_SOFT_RESET != 0, "No_Soft_Reset is not set");
    host.device
        .set_config16(power + CONTROL, control | D3_HOT)?;
    let state = host.device.config16(power + CONTROL)? & 3;
    ensure_eq!(state, D3_HOT, "the power state");
    host.device.set_config16(power + CONTROL, control)?;
    host.is_alive()
}

fn no_other_power_states(host: &mut Host) -> Outcome {
    let power = host.device.capability(CAPABILITY_POWER)?;
    let offered = host.device.config16(power + 2)?;
    ensure_eq!(offered & (3 << 9), 0, "D1 or D2 are offered");
    ensure_eq!(offered >> 11, 0, "PME is offered");
    Ok(())
}
