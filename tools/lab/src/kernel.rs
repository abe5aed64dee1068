// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The kernels: Debian's own, unmodified, and those built here, each with checkers of its kind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::cache::artifact;
use crate::step::{output, run, shell};
use crate::PROJECT;

/// The kernel series the driver is written for.
const SERIES: &str = "7.2";

/// Which kernel a guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The distribution's kernel as it is.
    Stock,
    /// Built here: KUnit, lockdep, kmemleak and the like.
    Test,
    /// Built here with the address sanitiser, by clang: gcc's and Rust's do not go together.
    Kasan,
    /// Built here with the data-race sanitiser.
    Kcsan,
}

impl Flavour {
    /// All there are.
    pub const ALL: [Flavour; 4] = [
        Flavour::Stock,
        Flavour::Test,
        Flavour::Kasan,
        Flavour::Kcsan,
    ];

    /// Short name for paths and messages.
    pub fn name(self) -> &'static str {
        match self {
            Flavour::Stock => "stock",
            Flavour::Test => "test",
            Flavour::Kasan => "kasan",
            Flavour::Kcsan => "kcsan",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|flavour| flavour.name() == name)
            .with_context(|| {
                let names = Self::ALL.map(Flavour::name).join(", ");
                format!("no kernel {name}; there are: {names}")
            })
    }

    /// Whether the kernel is built here, and so has KUnit and fault injection.
    pub fn built_here(self) -> bool {
        self != Flavour::Stock
    }

    /// Whether the kernel can be asked for leaked memory.
    pub fn finds_leaks(self) -> bool {
        self.built_here()
    }

    /// How many times longer than usual things may take.
    pub fn slowness(self) -> u32 {
        match self {
            Flavour::Stock | Flavour::Test => 1,
            Flavour::Kasan | Flavour::Kcsan => 4,
        }
    }

    /// The configuration that is added to `tinyconfig`, in order: later files override earlier ones.
    fn fragments(self) -> &'static [&'static str] {
        match self {
            Flavour::Stock => &[],
            Flavour::Test => &["test-kernel.config"],
            Flavour::Kasan => &["test-kernel.config", "kernel-users.config", "kasan.config"],
            Flavour::Kcsan => &["test-kernel.config", "kernel-users.config", "kcsan.config"],
        }
    }
}

/// A kernel that guests can boot and modules can be built for.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Which one.
    pub flavour: Flavour,
    /// `uname -r`.
    pub release: String,
    /// The bootable image.
    pub image: PathBuf,
    /// An ext4 image of /lib/modules.
    pub modules_image: PathBuf,
    /// The folder the image was made of.
    pub modules: PathBuf,
    /// The source tree.
    pub source: PathBuf,
    /// The build folder (`O=`).
    pub build: PathBuf,
}

impl Kernel {
    /// `make` for this kernel's build folder, with what it was configured with.
    pub fn make(&self) -> Command {
        make(self.flavour, &self.source, &self.build, &self.release)
    }
}

fn make(flavour: Flavour, source: &Path, build: &Path, release: &str) -> Command {
    let mut command = Command::new("make");
    command.arg("-C").arg(source);
    command.arg(format!("O={}", build.display()));
    command.arg("ARCH=x86");
    match flavour {
        Flavour::Stock => {
            // What Debian's kernel was built with; the release name must be the same too.
            command.arg("CROSS_COMPILE=x86_64-linux-gnu-");
            command.arg("CC=x86_64-linux-gnu-gcc-14");
            command.arg(format!("KERNELRELEASE={release}"));
        }
        Flavour::Test => {}
        Flavour::Kasan | Flavour::Kcsan => {
            command.arg("LLVM=1");
        }
    }
    command.arg(format!("-j{}", jobs()));
    command
}

/// How many jobs to build with.
pub fn jobs() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get())
}

/// Versions of a package the archive offers, newest first.
fn versions(package: &str) -> Vec<String> {
    let mut command = Command::new("apt-cache");
    command.args(["madison", package]);
    let Ok(text) = output(&mut command) else {
        return Vec::new();
    };
    text.lines()
        .filter_map(|line| Some(line.split('|').nth(1)?.trim().to_owned()))
        .collect()
}

/// The number after `7.2.` in a kernel package's name.
fn patch_level(name: &str) -> Option<u32> {
    let rest = name.split_once(&format!("-{SERIES}."))?.1;
    rest.split(|c: char| !c.is_ascii_digit())
        .next()?
        .parse()
        .ok()
}

/// The newest release of the series of which all needed packages exist, and its version.
fn resolve() -> Result<(String, String)> {
    let mut search = Command::new("apt-cache");
    search.args([
        "search",
        "--names-only",
        &format!(
            "^linux-binary-{}\\.[0-9]+.*-amd64$",
            SERIES.replace('.', "\\.")
        ),
    ]);
    let mut releases: Vec<String> = output(&mut search)?
        .lines()
        .filter_map(|line| {
            line.split_whitespace()
                .next()?
                .strip_prefix("linux-binary-")
        })
        .filter(|release| !release.contains("-cloud-") && !release.contains("-rt-"))
        .map(str::to_owned)
        .collect();
    releases.sort_by_key(|release| std::cmp::Reverse(patch_level(&format!("-{release}"))));
    let sources = versions(&format!("linux-source-{SERIES}"));
    for release in &releases {
        for version in versions(&format!("linux-binary-{release}")) {
            let whole = sources.contains(&version)
                && ["modules", "headers"]
                    .iter()
                    .all(|part| versions(&format!("linux-{part}-{release}")).contains(&version));
            if whole {
                return Ok((release.clone(), version));
            }
        }
    }
    bail!(
        "the Debian archive (trixie-backports) has no complete Linux {SERIES}.y any more\n\
         (looked for linux-binary, linux-modules, linux-headers and linux-source of one version;\n\
         kernels seen: {}; sources seen: {}).\n\
         Ferrite's driver is written for {SERIES}; point FERRITE_MIRROR at a snapshot of the\n\
         archive that still has it, or bring a cache from another machine.",
        if releases.is_empty() {
            "none".into()
        } else {
            releases.join(", ")
        },
        if sources.is_empty() {
            "none".into()
        } else {
            sources.join(", ")
        },
    )
}

/// Debian's kernel packages, unpacked; fetched once and kept.
fn packages() -> Result<(PathBuf, String)> {
    let dir = artifact(
        "kernel-packages",
        &format!("fetching Debian's Linux {SERIES} packages"),
        &[SERIES, "1"],
        |dir, log| {
            run(Command::new("apt-get").arg("update"), log)?;
            let (release, version) = resolve()?;
            println!("      Linux {release} ({version})");
            let mut get = Command::new("apt-get");
            get.current_dir(dir)
                .args(["-o", "APT::Sandbox::User=root", "download"]);
            for part in ["binary", "modules", "headers"] {
                get.arg(format!("linux-{part}-{release}={version}"));
            }
            get.arg(format!("linux-source-{SERIES}={version}"));
            run(&mut get, log)?;
            run(
                shell("mkdir unpacked; for d in *.deb; do dpkg-deb -x $d unpacked; done; rm *.deb")
                    .current_dir(dir),
                log,
            )?;
            fs::write(dir.join("release"), &release)?;
            Ok(())
        },
    )?;
    let release = fs::read_to_string(dir.join("release"))?;
    Ok((dir.join("unpacked"), release))
}

/// The kernel's source tree.
fn source() -> Result<(PathBuf, PathBuf, String)> {
    let (unpacked, release) = packages()?;
    let dir = artifact(
        "kernel-source",
        "unpacking the kernel source",
        &[&release, "1"],
        |dir, log| {
            let archive = unpacked.join(format!("usr/src/linux-source-{SERIES}.tar.xz"));
            let mut tar = Command::new("tar");
            tar.arg("-C").arg(dir).args(["--strip-components=1", "-xf"]);
            run(tar.arg(&archive), log)
        },
    )?;
    Ok((dir, unpacked, release))
}

/// Makes an ext4 image of a folder.
pub fn ext4_image(folder: &Path, image: &Path, spare_mib: u64, log: &Path) -> Result<()> {
    let size = output(
        Command::new("du")
            .args(["-sm", "--apparent-size"])
            .arg(folder),
    )?;
    let files = output(&mut shell(&format!("find {} | wc -l", folder.display())))?;
    let mib: u64 = size.split_whitespace().next().unwrap_or("0").parse()?;
    let files: u64 = files.trim().parse()?;
    // Small files round up to a block each, and inodes and journal take their share.
    let mib = mib + mib / 10 + files * 6 / 1024 + 24 + spare_mib;
    let _ = fs::remove_file(image);
    let mut mke2fs = Command::new("mke2fs");
    mke2fs
        .args([
            "-q",
            "-t",
            "ext4",
            "-O",
            "^has_journal",
            "-m",
            "0",
            "-L",
            "ferrite",
            "-d",
        ])
        .arg(folder)
        .arg(image)
        .arg(format!("{mib}M"));
    run(&mut mke2fs, log)
}

/// Debian's kernel and a build folder for modules that load into it.
pub fn stock() -> Result<Kernel> {
    let (source, unpacked, release) = source()?;
    let headers = unpacked.join(format!("usr/src/linux-headers-{release}"));
    let shipped = unpacked.join(format!("usr/lib/modules/{release}"));
    let modules_dir = artifact(
        "stock-modules",
        "imaging the Debian kernel's modules",
        &[&release, "1"],
        |dir, log| {
            let tree = dir.join("tree");
            fs::create_dir_all(tree.join("lib/modules"))?;
            run(
                shell(&format!(
                    "cp -a {0} {1}/lib/modules/; rm -f {1}/lib/modules/*/build {1}/lib/modules/*/source \
                     {1}/lib/modules/*/vmlinuz; depmod -b {1} {release}",
                    shipped.display(),
                    tree.display()
                ))
                .current_dir(dir),
                log,
            )?;
            ext4_image(&tree.join("lib/modules"), &dir.join("modules.img"), 0, log)
        },
    )?;
    let build = artifact(
        "stock-build",
        "preparing a module build tree for the Debian kernel (2 minutes, once)",
        &[&release, &source.to_string_lossy(), "1"],
        |dir, log| {
            for file in [".config", "Module.symvers"] {
                fs::copy(headers.join(file), dir.join(file))
                    .with_context(|| format!("the headers package has no {file}"))?;
            }
            let make = || make(Flavour::Stock, &source, dir, &release);
            run(make().arg("olddefconfig"), log)?;
            run(make().arg("modules_prepare"), log)?;
            let config = fs::read_to_string(dir.join(".config"))?;
            if !config.contains("\nCONFIG_RUST=y") {
                bail!("CONFIG_RUST is off: the root's rustc or bindgen does not suit this kernel");
            }
            // For the modules' BTF.
            fs::copy(headers.join("vmlinux"), dir.join("vmlinux"))?;
            // Dropped by modules_prepare's own housekeeping on some versions.
            fs::copy(headers.join("Module.symvers"), dir.join("Module.symvers"))?;
            Ok(())
        },
    )?;
    Ok(Kernel {
        flavour: Flavour::Stock,
        image: shipped.join("vmlinuz"),
        modules_image: modules_dir.join("modules.img"),
        modules: modules_dir.join("tree/lib/modules").join(&release),
        release,
        source,
        build,
    })
}

/// A kernel built here, from `tools/lab/test-kernel.config` and what its checker adds.
fn built(flavour: Flavour) -> Result<Kernel> {
    let (source, _, debian_release) = source()?;
    let fragments: Vec<PathBuf> = flavour
        .fragments()
        .iter()
        .map(|file| Path::new(PROJECT).join("tools/lab").join(file))
        .collect();
    let mut wanted = String::new();
    for fragment in &fragments {
        wanted += &fs::read_to_string(fragment)
            .with_context(|| format!("reading {}", fragment.display()))?;
    }
    let name = match flavour {
        Flavour::Test => "test-kernel".to_owned(),
        other => format!("test-kernel-{}", other.name()),
    };
    let build = artifact(
        &name,
        &format!(
            "building the {} kernel (about {} minutes on two cores, once)",
            flavour.name(),
            if flavour == Flavour::Test { 10 } else { 20 }
        ),
        &[&debian_release, &source.to_string_lossy(), &wanted, "1"],
        |dir, log| {
            let make = || make(flavour, &source, dir, "");
            run(make().arg("tinyconfig"), log)?;
            let mut merge = Command::new(source.join("scripts/kconfig/merge_config.sh"));
            merge.current_dir(dir).args(["-m", "-O"]).arg(dir);
            run(merge.arg(dir.join(".config")).args(&fragments), log)?;
            run(make().arg("olddefconfig"), log)?;
            let config = fs::read_to_string(dir.join(".config"))?;
            let lost = lost_options(&wanted, &config);
            if !lost.is_empty() {
                bail!("the kernel's configuration refused: {}", lost.join(", "));
            }
            run(&mut make(), log)?;
            let tree = dir.join("tree");
            let mut install = make();
            install.arg(format!("INSTALL_MOD_PATH={}", tree.display()));
            run(install.arg("modules_install"), log)?;
            run(
                &mut shell(&format!(
                    "rm -f {0}/lib/modules/*/build {0}/lib/modules/*/source",
                    tree.display()
                )),
                log,
            )?;
            ext4_image(&tree.join("lib/modules"), &dir.join("modules.img"), 0, log)
        },
    )?;
    let release = fs::read_to_string(build.join("include/config/kernel.release"))?
        .trim()
        .to_owned();
    Ok(Kernel {
        flavour,
        image: build.join("arch/x86/boot/bzImage"),
        modules_image: build.join("modules.img"),
        modules: build.join("tree/lib/modules").join(&release),
        release,
        source,
        build,
    })
}

/// The kernel of the given flavour, made if need be.
pub fn get(flavour: Flavour) -> Result<Kernel> {
    match flavour {
        Flavour::Stock => stock(),
        _ => built(flavour),
    }
}

/// Options of the fragments that did not survive configuration; the last word on an option counts.
fn lost_options(wanted: &str, config: &str) -> Vec<String> {
    let options: Vec<(&str, &str)> = wanted
        .lines()
        .filter(|line| line.starts_with("CONFIG_"))
        .filter_map(|line| line.split_once('='))
        .collect();
    options
        .iter()
        .enumerate()
        .filter(|(at, (name, _))| options[at + 1..].iter().all(|(later, _)| later != name))
        .filter_map(|(_, (name, value))| {
            let got = config
                .lines()
                .find_map(|have| have.strip_prefix(name)?.strip_prefix('='))
                .unwrap_or("n");
            // A module may come out built in.
            let fine = got == *value || (*value == "m" && got == "y");
            (!fine).then(|| format!("{name} (wanted {value}, got {got})"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{lost_options, patch_level, Flavour};

    #[test]
    fn releases_are_ordered_by_number_not_by_text() {
        assert_eq!(patch_level("-7.2.12+deb13-amd64"), Some(12));
        assert_eq!(patch_level("-7.2.9+deb13-amd64"), Some(9));
        assert_eq!(patch_level("-7.3.1+deb13-amd64"), None);
    }

    #[test]
    fn an_option_that_did_not_survive_is_named() {
        let wanted = "# note\nCONFIG_A=y\nCONFIG_B=m\nCONFIG_C=n\nCONFIG_D=y\n";
        let config = "CONFIG_A=y\nCONFIG_B=y\n# CONFIG_C is not set\n# CONFIG_D is not set\n";
        assert_eq!(
            lost_options(wanted, config),
            ["CONFIG_D (wanted y, got n)".to_owned()]
        );
    }

    #[test]
    fn a_later_fragment_has_the_last_word() {
        let wanted = "CONFIG_A=y\nCONFIG_B=y\nCONFIG_A=n\n";
        assert!(lost_options(wanted, "# CONFIG_A is not set\nCONFIG_B=y\n").is_empty());
        assert_eq!(
            lost_options(wanted, "CONFIG_A=y\nCONFIG_B=y\n"),
            ["CONFIG_A (wanted n, got y)".to_owned()]
        );
    }

    #[test]
    fn kernels_are_known_by_name() {
        for flavour in Flavour::ALL {
            assert_eq!(Flavour::named(flavour.name()).ok(), Some(flavour));
        }
        assert!(Flavour::named("fast").is_err());
    }
}
