// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A QEMU plugin that counts what a guest executes between two markers.
//!
//! A program in the guest brackets what it wants counted with two instructions that do nothing
//! anywhere else ([`BEGIN`] and [`END`], see `tools/verbs-bench`). From one to the other the plugin
//! counts instructions, of user space, of the kernel and of its modules apart, and writes to the
//! registers of devices. The sums are in a file that is mapped, so that the host may read them at any time.
//!
//! Use: `-plugin libferrite_count_plugin.so,counts=FILE[,registers=off][,blocks=FILE]`. Without registers the
//! guest is hardly slower than without the plugin. `blocks` is where the instructions of the last span are
//! written, by the address of the block that they are in.
//!
//! The interface of plugins is declared here by hand, as far as it is used: it is version 7, the
//! only one that QEMU 11.1 loads. The `qemu-plugin` crate (10.1.0-v2) ends at version 5 and wants a
//! newer compiler than this project is built with.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString, OsStr};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};

/// All bytes of both markers but the last: a long `nop` with a displacement.
const MARKER: [u8; 6] = [0x0f, 0x1f, 0x80, 0x46, 0x52, 0x42];
/// Last byte of the marker that starts counting.
const BEGIN: u8 = 0x31;
/// Last byte of the marker that ends it.
const END: u8 = 0x32;

/// The page of the local interrupt controllers. Every interrupt is acknowledged there, which is
/// no access to a device that a guest with hardware virtualisation would leave its processor for.
const LOCAL_APIC: u64 = 0xfee0_0000;

/// Where Linux loads modules: above its own image, which ends here at the latest, and below the
/// fixed mappings (Documentation/arch/x86/x86_64/mm.rst).
const MODULES: std::ops::Range<u64> = 0xffff_ffff_c000_0000..0xffff_ffff_ff00_0000;

/// Words of the mapped file.
#[derive(Clone, Copy)]
#[repr(usize)]
enum Word {
    /// Markers that started counting.
    Begun,
    /// Markers that ended it.
    Ended,
    /// Instructions of user space.
    User,
    /// Instructions of the kernel.
    Kernel,
    /// Writes to registers of devices.
    Writes,
    /// Reads of registers of devices.
    Reads,
    /// Instructions of the kernel's modules, which are among those of the kernel.
    Modules,
}

/// What QEMU counts by itself, for each virtual processor, and the sums of it.
const INLINE: [Word; 3] = [Word::User, Word::Kernel, Word::Modules];

/// Bytes of the mapped file.
const FILE_SIZE: usize = 4096;

#[repr(C)]
struct Info {
    target_name: *const c_char,
    version_min: c_int,
    version_cur: c_int,
    system_emulation: bool,
    smp_vcpus: c_int,
    max_vcpus: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    score: *mut c_void,
    offset: usize,
}

type TranslateCallback = extern "C" fn(block: *mut c_void, userdata: *mut c_void);
type ExecuteCallback = extern "C" fn(vcpu: c_uint, userdata: *mut c_void);
type MemoryCallback = extern "C" fn(vcpu: c_uint, info: u32, address: u64, userdata: *mut c_void);

/// `QEMU_PLUGIN_CB_NO_REGS`.
const NO_REGISTERS: c_int = 0;
/// `QEMU_PLUGIN_INLINE_ADD_U64`.
const INLINE_ADD: c_int = 0;
/// `QEMU_PLUGIN_MEM_RW`.
const MEMORY_BOTH: c_int = 3;

extern "C" {
    fn qemu_plugin_register_vcpu_tb_trans_cb(
        id: u64,
        callback: TranslateCallback,
        userdata: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
        block: *mut c_void,
        operation: c_int,
        entry: Entry,
        immediate: u64,
    );
    fn qemu_plugin_register_vcpu_tb_exec_cb(
        block: *mut c_void,
        callback: ExecuteCallback,
        flags: c_int,
        userdata: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        instruction: *mut c_void,
        callback: ExecuteCallback,
        flags: c_int,
        userdata: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_mem_cb(
        instruction: *mut c_void,
        callback: MemoryCallback,
        flags: c_int,
        which: c_int,
        userdata: *mut c_void,
    );
    fn qemu_plugin_tb_n_insns(block: *const c_void) -> usize;
    fn qemu_plugin_tb_vaddr(block: *const c_void) -> u64;
    fn qemu_plugin_tb_get_insn(block: *const c_void, index: usize) -> *mut c_void;
    fn qemu_plugin_insn_data(instruction: *const c_void, to: *mut c_void, length: usize) -> usize;
    fn qemu_plugin_scoreboard_new(element_size: usize) -> *mut c_void;
    fn qemu_plugin_u64_sum(entry: Entry) -> u64;
    fn qemu_plugin_get_hwaddr(info: u32, address: u64) -> *mut c_void;
    fn qemu_plugin_hwaddr_is_io(address: *const c_void) -> bool;
    fn qemu_plugin_hwaddr_phys_addr(address: *const c_void) -> u64;
    fn qemu_plugin_mem_is_store(info: u32) -> bool;
}

/// The version of the interface that is spoken.
#[no_mangle]
pub static qemu_plugin_version: c_int = 7;

/// QEMU's counters, one set for each virtual processor: those of [`INLINE`].
static SCORE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
/// The mapped file.
static FILE: AtomicUsize = AtomicUsize::new(0);
/// Accesses to registers are counted too.
static REGISTERS: AtomicBool = AtomicBool::new(true);
/// Between the markers.
static COUNTING: AtomicBool = AtomicBool::new(false);
/// What the counters said at the last [`BEGIN`].
static AT_BEGIN: [AtomicU64; INLINE.len()] = [const { AtomicU64::new(0) }; INLINE.len()];

/// Where the blocks of a span are written, if that is wanted.
static BLOCKS_FILE: OnceLock<PathBuf> = OnceLock::new();
/// How often each block was executed in this span, by its address and its length. QEMU knows of them for as
/// long as it runs.
static BLOCKS: LazyLock<Mutex<HashMap<(u64, usize), &'static AtomicU64>>> =
    LazyLock::new(Mutex::default);

/// Counts a block; the counter lives as long as QEMU.
extern "C" fn executed(_vcpu: c_uint, counter: *mut c_void) {
    if COUNTING.load(Ordering::Relaxed) {
        // SAFETY: `counter_of` has leaked it.
        unsafe { &*counter.cast::<AtomicU64>() }.fetch_add(1, Ordering::Relaxed);
    }
}

/// The counter of a block.
fn counter_of(address: u64, length: usize) -> &'static AtomicU64 {
    let mut blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    blocks
        .entry((address, length))
        .or_insert_with(|| Box::leak(Box::default()))
}

/// Sets all of them to zero.
fn forget_blocks() {
    let blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    for counter in blocks.values() {
        counter.store(0, Ordering::Relaxed);
    }
}

/// Writes a line for each block that was executed: its address, and the instructions.
fn write_blocks(path: &Path) {
    let mut text = String::new();
    let blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    for ((address, length), counter) in blocks.iter() {
        let count = counter.load(Ordering::Relaxed);
        if count > 0 {
            let _ = writeln!(text, "{address:x} {}", count * *length as u64);
        }
    }
    if let Err(error) = std::fs::write(path, text) {
        eprintln!("ferrite-count-plugin: {}: {error}", path.display());
    }
}

/// The counter that has a place among [`INLINE`].
fn entry(place: usize) -> Entry {
    Entry {
        score: SCORE.load(Ordering::Relaxed),
        offset: place * size_of::<u64>(),
    }
}

/// The counters, by their place, that an instruction at an address belongs to.
fn counters(address: u64) -> &'static [usize] {
    match address {
        address if MODULES.contains(&address) => &[1, 2],
        address if address >> 63 == 1 => &[1],
        _ => &[0],
    }
}

fn word(word: Word) -> &'static AtomicU64 {
    // SAFETY: the mapping is made before any callback is registered, is never removed, and is
    // aligned and large enough for all words.
    unsafe { &*(FILE.load(Ordering::Relaxed) as *const AtomicU64).add(word as usize) }
}

extern "C" fn begin(_vcpu: c_uint, _userdata: *mut c_void) {
    for (place, at) in AT_BEGIN.iter().enumerate() {
        // SAFETY: the scoreboard lives as long as QEMU.
        let now = unsafe { qemu_plugin_u64_sum(entry(place)) };
        at.store(now, Ordering::Relaxed);
    }
    if BLOCKS_FILE.get().is_some() {
        forget_blocks();
    }
    word(Word::Begun).fetch_add(1, Ordering::Relaxed);
    COUNTING.store(true, Ordering::Release);
}

extern "C" fn end(_vcpu: c_uint, _userdata: *mut c_void) {
    if !COUNTING.swap(false, Ordering::Acquire) {
        return;
    }
    for (place, sum) in INLINE.into_iter().enumerate() {
        // SAFETY: the scoreboard lives as long as QEMU.
        let now = unsafe { qemu_plugin_u64_sum(entry(place)) };
        word(sum).fetch_add(
            now.wrapping_sub(AT_BEGIN[place].load(Ordering::Relaxed)),
            Ordering::Relaxed,
        );
    }
    if let Some(path) = BLOCKS_FILE.get() {
        write_blocks(path);
    }
    word(Word::Ended).fetch_add(1, Ordering::Release);
}

extern "C" fn access(_vcpu: c_uint, info: u32, address: u64, _userdata: *mut c_void) {
    if !COUNTING.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: the handle is used only within this callback, as the interface demands; it may be
    // null, which is checked.
    let (physical, store) = unsafe {
        let place = qemu_plugin_get_hwaddr(info, address);
        if place.is_null() || !qemu_plugin_hwaddr_is_io(place) {
            return;
        }
        (
            qemu_plugin_hwaddr_phys_addr(place),
            qemu_plugin_mem_is_store(info),
        )
    };
    if physical & !0xfff != LOCAL_APIC {
        let which = if store { Word::Writes } else { Word::Reads };
        word(which).fetch_add(1, Ordering::Relaxed);
    }
}

extern "C" fn translate(block: *mut c_void, _userdata: *mut c_void) {
    // SAFETY: the block and its instructions are valid during this callback; indices are below
    // the number of instructions.
    unsafe {
        let count = qemu_plugin_tb_n_insns(block);
        let address = qemu_plugin_tb_vaddr(block);
        if BLOCKS_FILE.get().is_some() {
            let counter = ptr::from_ref(counter_of(address, count));
            qemu_plugin_register_vcpu_tb_exec_cb(
                block,
                executed,
                NO_REGISTERS,
                counter.cast_mut().cast(),
            );
        }
        for &place in counters(address) {
            qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
                block,
                INLINE_ADD,
                entry(place),
                count as u64,
            );
        }
        for index in 0..count {
            let instruction = qemu_plugin_tb_get_insn(block, index);
            let mut bytes = [0; MARKER.len() + 1];
            let length = qemu_plugin_insn_data(instruction, bytes.as_mut_ptr().cast(), bytes.len());
            if length == bytes.len() && bytes[..MARKER.len()] == MARKER {
                let callback = match bytes[MARKER.len()] {
                    BEGIN => begin,
                    END => end,
                    _ => continue,
                };
                qemu_plugin_register_vcpu_insn_exec_cb(
                    instruction,
                    callback,
                    NO_REGISTERS,
                    ptr::null_mut(),
                );
                continue;
            }
            if !REGISTERS.load(Ordering::Relaxed) {
                continue;
            }
            qemu_plugin_register_vcpu_mem_cb(
                instruction,
                access,
                NO_REGISTERS,
                MEMORY_BOTH,
                ptr::null_mut(),
            );
        }
    }
}

/// Maps the file; its address, or 0.
fn map(path: &CStr) -> usize {
    // SAFETY: the path is a C string; the descriptor is closed after the mapping has its own
    // reference to the file.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CREAT, 0o644);
        if fd < 0 {
            return 0;
        }
        let mut address = libc::MAP_FAILED;
        if libc::ftruncate(fd, FILE_SIZE as i64) == 0 {
            address = libc::mmap(
                ptr::null_mut(),
                FILE_SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            );
        }
        libc::close(fd);
        if address == libc::MAP_FAILED {
            return 0;
        }
        address as usize
    }
}

/// Called by QEMU once, when it has loaded the plugin.
///
/// # Safety
///
/// `argv` must hold `argc` C strings, `info` be null or point to QEMU's description of itself.
#[no_mangle]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    info: *const c_void,
    argc: c_int,
    argv: *const *const c_char,
) -> c_int {
    // SAFETY: the caller's obligation; the fields that are read are the same in all versions.
    let system = unsafe { info.cast::<Info>().as_ref() }.is_some_and(|info| info.system_emulation);
    if !system {
        eprintln!("ferrite-count-plugin: whole machines only");
        return 1;
    }
    let mut path = None;
    for index in 0..usize::try_from(argc).unwrap_or(0) {
        // SAFETY: the caller's obligation.
        let argument = unsafe { CStr::from_ptr(*argv.add(index)) };
        if let Some(value) = argument.to_bytes().strip_prefix(b"counts=") {
            path = CString::new(value).ok();
        }
        if let Some(value) = argument.to_bytes().strip_prefix(b"blocks=") {
            let _ = BLOCKS_FILE.set(OsStr::from_bytes(value).into());
        }
        if argument.to_bytes() == b"registers=off" {
            REGISTERS.store(false, Ordering::Relaxed);
        }
    }
    let Some(path) = path else {
        eprintln!("ferrite-count-plugin: counts=FILE is needed");
        return 1;
    };
    let file = map(&path);
    if file == 0 {
        eprintln!("ferrite-count-plugin: cannot map {path:?}");
        return 1;
    }
    FILE.store(file, Ordering::Relaxed);
    // SAFETY: QEMU is ready for registrations when it calls this function.
    unsafe {
        SCORE.store(
            qemu_plugin_scoreboard_new(INLINE.len() * size_of::<u64>()),
            Ordering::Relaxed,
        );
        qemu_plugin_register_vcpu_tb_trans_cb(id, translate, ptr::null_mut());
    }
    0
}
