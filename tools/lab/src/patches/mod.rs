// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `make patches`: the kernel side as a series of patches to a kernel tree.
//!
//! What goes into which patch is said by [`series`] alone. Here it is made true: the files are put
//! where they are in a kernel tree, each patch is a commit on the few files of the kernel that the
//! series changes, and `git format-patch` writes them. A file of the kernel side that no patch has is
//! an error, so that the series stays whole while the driver grows.

mod series;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, ensure, Context, Result};

use self::series::{
    Edit, Module, Step, BUILT_IN, CHECKPATCH_EXCEPTIONS, CONFIGURED, COVER, COVER_SUBJECT, GROWING,
    OTHER_ROOMS, OUT_OF_TREE, PLACES, REWRITES, ROOMS, STEPS,
};
use crate::kernel::{self, Flavour, Kernel};
use crate::process::tie;
use crate::report::Report;
use crate::step::{log_path, output, outside, run as run_step, shell};
use crate::{OUT, PROJECT};

/// Whose patches they are if nobody is known: such a series is only good for tests.
const NOBODY: &str = "Ferrite contributors <contributors@ferrite.invalid>";

/// Files by their path in the kernel tree.
type Tree = BTreeMap<String, String>;

/// Where the patches are left.
fn folder() -> PathBuf {
    Path::new(OUT).join("patches")
}

/// Makes the series and says where it is.
pub fn run() -> Result<()> {
    let author = author().context(
        "nobody is known as the author of the series: \
         there is no git history; say FERRITE_AUTHOR='name <address>'",
    )?;
    let kernel = kernel::stock()?;
    let patches = write(&kernel, &author)?;
    check_style(&kernel, &patches)?;
    for patch in &patches {
        println!("{}", outside(patch).display());
    }
    println!(
        "\n{} patches and a cover letter for Linux {}: git am --empty=drop {}/*.patch",
        patches.len() - 1,
        kernel.release,
        outside(&folder()).display()
    );
    let commit = std::env::var("FERRITE_COMMIT").unwrap_or_default();
    if let Some(commit) = changed_since(&commit) {
        println!("They have changes that are not committed, and the date of {commit}.");
    }
    Ok(())
}

/// The commit that the project is not as at any more, of what the bootstrap saw (`git describe --dirty`).
fn changed_since(commit: &str) -> Option<&str> {
    commit.strip_suffix(" and changes")
}

/// The author of the project's last commit, as the bootstrap saw it.
fn author() -> Option<String> {
    let author = std::env::var("FERRITE_AUTHOR").ok()?;
    (!author.trim().is_empty()).then_some(author)
}

/// The tests that need no build.
pub fn tests(wanted: impl Fn(&str) -> bool, report: &mut Report) {
    let name = "patches: the series applies with git am and passes checkpatch";
    if wanted(name) {
        report.test(name, || {
            let kernel = kernel::stock()?;
            let author = author().unwrap_or_else(|| NOBODY.to_owned());
            let patches = write(&kernel, &author)?;
            check_style(&kernel, &patches)?;
            check_format(&kernel, &author)?;
            check_documents(&author, &kernel)?;
            check_applies(&kernel, &author, &patches)
        });
    }
}

/// Builds the tree after each patch.
pub fn build_tests(wanted: impl Fn(&str) -> bool, report: &mut Report) -> Result<()> {
    let kernel = kernel::get(Flavour::Test)?;
    let author = author().unwrap_or_else(|| NOBODY.to_owned());
    let trees = trees(&kernel.source, &author)?;
    let mut in_tree = InTree::new(&kernel)?;
    for (at, (step, tree)) in STEPS.iter().zip(&trees[1..]).enumerate() {
        let name = format!("patches: {:02} builds in tree: {}", at + 1, step.subject);
        in_tree.put(tree)?;
        if wanted(&name) {
            report.test(&name, || in_tree.build_changes(tree));
        }
    }
    let name = "patches: the kernel links with what the series has built in";
    if let Some(tree) = trees.last().filter(|_| wanted(name)) {
        report.test(name, || in_tree.build(tree, BUILT_IN));
    }
    Ok(())
}

/// Files of the project that the series must have: all that are in its folders.
fn sources() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(PROJECT)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let known = |rooms: &[&str]| {
            rooms
                .iter()
                .any(|room| room.split('/').next() == Some(&name))
        };
        ensure!(
            !entry.file_type()?.is_dir()
                || name.starts_with('.')
                || known(ROOMS)
                || known(OTHER_ROOMS),
            "{name}/ is neither of the series nor beside it (tools/lab/src/patches/series.rs)"
        );
    }
    for room in ROOMS {
        let path = Path::new(PROJECT).join(room);
        if path.is_file() {
            found.insert((*room).to_owned());
            continue;
        }
        let mut todo = vec![path];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(&dir).with_context(|| format!("reading {}", dir.display()))? {
                let path = entry?.path();
                if path.is_dir() {
                    todo.push(path);
                } else {
                    let name = path.strip_prefix(PROJECT)?.to_string_lossy().into_owned();
                    found.insert(name);
                }
            }
        }
    }
    Ok(found)
}

/// The files of an entry of a patch: itself, or all of a folder (`name/`) that there are.
fn files_of<'a>(entry: &'a str, sources: &'a BTreeSet<String>) -> Vec<&'a str> {
    if !entry.ends_with('/') {
        return vec![entry];
    }
    let all = sources.iter().map(String::as_str);
    all.filter(|name| name.starts_with(entry)).collect()
}

/// Whether a file is one that somebody wrote, by its name. Builds and editors leave others, which a patch that
/// has a whole folder would take in.
fn is_source(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or_default();
    let made = file.starts_with('.') || file.contains("_generated.") || file.ends_with(".mod.c");
    let kinds = [".rs", ".c", ".h", ".rst"];
    let names = ["Kbuild", "Kconfig", "Makefile", "bindgen_parameters"];
    !made
        && (kinds.iter().any(|kind| file.ends_with(kind))
            || names.contains(&file)
            || file.starts_with("Makefile."))
}

/// Options of a Kconfig file that no patch has.
fn unaccounted_options(kconfig: &str, steps: &[Step], out_of_tree: &[(&str, &str)]) -> String {
    let options = kconfig
        .lines()
        .filter_map(|line| line.strip_prefix("config "));
    let listed = |name: &str| {
        let part = format!("Kconfig#{name}");
        let mut files = steps.iter().flat_map(|step| step.files);
        files.any(|file| *file == part) || out_of_tree.iter().any(|(entry, _)| *entry == part)
    };
    let mut wrong = String::new();
    for name in options.filter(|name| !listed(name)) {
        wrong += &format!("Kconfig#{name} is in no patch (tools/lab/src/patches/series.rs)\n");
    }
    wrong
}

/// Errors of the table: files without a patch, with two, that are not there, or that nobody wrote.
fn unaccounted(sources: &BTreeSet<String>, steps: &[Step], out_of_tree: &[(&str, &str)]) -> String {
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    let entries = steps.iter().flat_map(|step| step.files);
    for name in entries.flat_map(|entry| files_of(entry, sources)) {
        *times.entry(name).or_default() += 1;
    }
    // Parts of one file (`Kconfig#NAME`) are listed apart.
    let whole = |name: &str| name.split('#').next().unwrap_or_default().to_owned();
    let mut listed: BTreeSet<String> = times.keys().map(|name| whole(name)).collect();
    let out: BTreeSet<&str> = out_of_tree
        .iter()
        .flat_map(|(entry, _)| files_of(entry, sources))
        .collect();
    listed.extend(out.iter().map(|name| (*name).to_owned()));
    let mut wrong = String::new();
    let left = |name: &&String| !is_source(name) && !out.contains(name.as_str());
    for name in sources.iter().filter(left) {
        wrong += &format!("{name} is no source file: a build or an editor left it\n");
    }
    for entry in steps.iter().flat_map(|step| step.files) {
        if files_of(entry, sources).is_empty() {
            wrong += &format!("{entry} is in a patch, but nothing is in it\n");
        }
    }
    for name in sources.difference(&listed) {
        wrong += &format!("{name} is in no patch (tools/lab/src/patches/series.rs)\n");
    }
    for (name, times) in times {
        if times > 1 || out.contains(name) {
            wrong += &format!("{name} is in a patch, and in another or in none\n");
        }
        if !sources.contains(&whole(name)) {
            wrong += &format!("{name} is in a patch, but not there\n");
        }
    }
    wrong
}

/// The objects of the helpers, as a Makefile lists them.
fn helpers(sources: &BTreeSet<String>) -> String {
    let names: Vec<String> = sources
        .iter()
        .filter_map(|name| name.strip_prefix("rust/")?.strip_suffix(".c"))
        .map(|name| format!("{name}.o"))
        .collect();
    let lines: Vec<String> = names.chunks(3).map(|names| names.join(" ")).collect();
    lines.join(" \\\n\t")
}

/// Where a file of the project is in a kernel tree.
fn place(name: &str) -> Result<String> {
    for (from, to) in PLACES {
        if let Some(rest) = name.strip_prefix(from) {
            return Ok(format!("{to}{rest}"));
        }
    }
    bail!("{name} has no place in a kernel tree")
}

/// One `config` of a Kconfig file, with the licence line before it.
fn config_block(text: &str, name: &str) -> Result<String> {
    let mut lines = text.lines();
    let licence = lines.next().unwrap_or_default();
    let mut block: Vec<&str> = lines
        .skip_while(|line| *line != format!("config {name}"))
        .enumerate()
        .take_while(|(at, line)| *at == 0 || !line.starts_with("config "))
        .map(|(_, line)| line)
        .collect();
    ensure!(!block.is_empty(), "Kconfig has no {name}");
    while block.last().is_some_and(|line| line.is_empty()) {
        block.pop();
    }
    Ok(format!("{licence}\n{}\n", block.join("\n")))
}

/// A file of the project as it is in a kernel tree.
fn in_tree_text(name: &str, sources: &BTreeSet<String>) -> Result<String> {
    let (file, part) = match name.split_once('#') {
        Some((file, part)) => (file, Some(part)),
        None => (name, None),
    };
    let mut text = fs::read_to_string(Path::new(PROJECT).join(file))
        .with_context(|| format!("reading {file}"))?;
    if let Some(part) = part {
        text = config_block(&text, part)?;
    }
    for rewrite in REWRITES.iter().filter(|rewrite| rewrite.file == name) {
        ensure!(
            text.contains(rewrite.from),
            "{name} has no {:?} any more, which is another one in a kernel tree",
            rewrite.from
        );
        text = text.replace(rewrite.from, rewrite.to);
    }
    if name.ends_with(".rs") {
        text = narrowed(&text);
    }
    Ok(text.replace("{helpers}", &helpers(sources)))
}

/// The name of the module that a line declares, uses, or says something of.
fn module_of(line: &str) -> Option<&str> {
    let line = line.strip_prefix("pub ").unwrap_or(line);
    if let Some(name) = line.strip_prefix("mod ") {
        return name.strip_suffix(';');
    }
    line.strip_prefix("use ")?
        .strip_suffix("::*;")
        .filter(|name| !name.contains(':'))
}

/// A file of modules without those that `has` not.
fn grown(text: &str, has: impl Fn(&str) -> bool) -> String {
    let mut kept: Vec<&str> = Vec::new();
    // Attributes, which go with the line that follows.
    let mut attributes: Vec<&str> = Vec::new();
    for line in text.lines() {
        if line.starts_with("#[") {
            attributes.push(line);
            continue;
        }
        if module_of(line).is_none_or(&has) {
            let empty_twice = line.is_empty() && kept.last().is_some_and(|last| last.is_empty());
            if !empty_twice {
                kept.append(&mut attributes);
                kept.push(line);
            }
        }
        attributes.clear();
    }
    while kept.last().is_some_and(|line| line.is_empty()) {
        kept.pop();
    }
    kept.join("\n") + "\n"
}

/// Adds the growing files as they are with the modules that are there.
fn grow(tree: &mut Tree, whole: &Tree) {
    for (path, text) in whole {
        let dir = path.rsplit_once('/').map_or("", |(dir, _)| dir);
        let has = |name: &str| {
            tree.contains_key(&format!("{dir}/{name}.rs"))
                || tree.contains_key(&format!("{dir}/{name}/mod.rs"))
        };
        let text = grown(text, has);
        tree.insert(path.clone(), text);
    }
}

/// Puts what a step adds to a file of the kernel into it.
fn edited(text: &str, edit: &Edit, author: &str) -> Result<String> {
    let at = text
        .find(edit.before)
        .with_context(|| format!("{} has no {:?}", edit.file, edit.before))?;
    let insert = edit.insert.replace("{author}", author);
    Ok(format!("{}{insert}{}", &text[..at], &text[at..]))
}

/// The tree before the first patch and after each one.
fn trees(source: &Path, author: &str) -> Result<Vec<Tree>> {
    let sources = sources()?;
    let kconfig = fs::read_to_string(Path::new(PROJECT).join("Kconfig"))?;
    let wrong = unaccounted(&sources, STEPS, OUT_OF_TREE)
        + &unaccounted_options(&kconfig, STEPS, OUT_OF_TREE);
    ensure!(wrong.is_empty(), "the series is not whole:\n{wrong}");
    let mut tree = Tree::new();
    for edit in STEPS.iter().flat_map(|step| step.edits) {
        let text = fs::read_to_string(source.join(edit.file))
            .with_context(|| format!("reading {} of the kernel", edit.file))?;
        tree.insert(edit.file.to_owned(), text);
    }
    let mut trees = vec![tree.clone()];
    let mut growing = Tree::new();
    for step in STEPS {
        let files = step.files.iter();
        for name in files.flat_map(|entry| files_of(entry, &sources)) {
            let (path, text) = (place(name)?, in_tree_text(name, &sources)?);
            ensure!(
                !source.join(&path).exists(),
                "the kernel has a {path} already"
            );
            if GROWING.contains(&name) {
                growing.insert(path, text);
            } else {
                tree.insert(path, text);
            }
        }
        grow(&mut tree, &growing);
        for edit in step.edits {
            let text = edited(&tree[edit.file], edit, author)?;
            tree.insert(edit.file.to_owned(), text);
        }
        trees.push(tree.clone());
    }
    for (path, text) in &growing {
        ensure!(
            tree[path] == *text,
            "{path} names a module that no patch has"
        );
    }
    Ok(trees)
}

/// Writes what of `tree` is not there yet, and removes nothing: a series only adds.
fn put(tree: &Tree, dir: &Path) -> Result<()> {
    for (path, text) in tree {
        let file = dir.join(path);
        // Who looks at times must not see a change where there is none.
        if fs::read_to_string(&file).is_ok_and(|old| old == *text) {
            continue;
        }
        fs::create_dir_all(file.parent().unwrap_or(dir))?;
        fs::write(&file, text)?;
    }
    Ok(())
}

/// `git` in a folder, as the author of the series and nobody else.
fn git(dir: &Path, author: &str) -> Result<Command> {
    let (name, address) = author
        .strip_suffix('>')
        .and_then(|author| author.split_once(" <"))
        .with_context(|| format!("{author:?} is not 'name <address>'"))?;
    let date = std::env::var("FERRITE_DATE").unwrap_or_default();
    let date = if date.is_empty() {
        "2026-01-01T00:00:00Z"
    } else {
        &date
    };
    let mut git = Command::new("git");
    git.current_dir(dir)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1");
    for who in ["AUTHOR", "COMMITTER"] {
        git.env(format!("GIT_{who}_NAME"), name)
            .env(format!("GIT_{who}_EMAIL"), address)
            .env(format!("GIT_{who}_DATE"), date);
    }
    Ok(git)
}

/// An empty folder with a repository of the files that the series changes.
fn repository(dir: &Path, base: &Tree, author: &str) -> Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir)?;
    }
    fs::create_dir_all(dir)?;
    put(base, dir)?;
    output(git(dir, author)?.args(["init", "-q", "-b", "series"]))?;
    output(git(dir, author)?.args(["add", "-A"]))?;
    output(git(dir, author)?.args(["commit", "-q", "-m", "The kernel of the lab"]))?;
    output(git(dir, author)?.args(["tag", "base"]))?;
    Ok(())
}

/// Makes the patches; gives their files, the cover letter first.
fn write(kernel: &Kernel, author: &str) -> Result<Vec<PathBuf>> {
    let trees = trees(&kernel.source, author)?;
    let dir = Path::new(OUT).join("patches-made");
    repository(&dir, &trees[0], author)?;
    for (step, tree) in STEPS.iter().zip(&trees[1..]) {
        put(tree, &dir)?;
        output(git(&dir, author)?.args(["add", "-A"]))?;
        let message = format!(
            "{}\n\n{}\n\nSigned-off-by: {author}\n",
            step.subject,
            step.body.trim()
        );
        output(git(&dir, author)?.args(["commit", "-q", "-m", &message]))?;
    }
    let patches = folder();
    if patches.exists() {
        fs::remove_dir_all(&patches)?;
    }
    output(
        git(&dir, author)?
            .args(["format-patch", "-q", "--cover-letter", "--stat=72", "-o"])
            .arg(&patches)
            .arg("base"),
    )?;
    let mut files: Vec<PathBuf> = fs::read_dir(&patches)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    files.sort();
    let cover = files.first().context("git wrote no patches")?;
    let text = fs::read_to_string(cover)?
        .replace("*** SUBJECT HERE ***", COVER_SUBJECT)
        .replace("*** BLURB HERE ***", COVER.trim());
    fs::write(cover, text)?;
    Ok(files)
}

/// What checkpatch says to the patches, but for what is not followed with a reason.
fn check_style(kernel: &Kernel, patches: &[PathBuf]) -> Result<()> {
    let mut checkpatch = Command::new(kernel.source.join("scripts/checkpatch.pl"));
    checkpatch
        .current_dir(&kernel.source)
        .args(["--terse", "--no-summary", "--show-types"])
        // The cover letter is no patch.
        .args(&patches[1..]);
    let said = tie(&mut checkpatch)
        .output()
        .context("starting checkpatch")?;
    let code = said.status.code();
    let said =
        String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr);
    ensure!(
        has_looked(code, &said),
        "checkpatch did not come to an end ({code:?}):\n{said}"
    );
    let mut texts = BTreeMap::new();
    for patch in patches {
        texts.insert(
            patch.to_string_lossy().into_owned(),
            fs::read_to_string(patch)?,
        );
    }
    let wrong: Vec<&str> = said
        .lines()
        .filter(|line| !excepted(line, &texts))
        .collect();
    ensure!(wrong.is_empty(), "checkpatch says:\n{}", wrong.join("\n"));
    Ok(())
}

/// Whether checkpatch has looked at all: it ends with 1 where it says something, and with 0 where it does not.
fn has_looked(code: Option<i32>, said: &str) -> bool {
    code == Some(i32::from(!said.is_empty()))
}

/// Whether a line of checkpatch (`file:line: LEVEL:KIND: text`) says what is not followed.
fn excepted(line: &str, texts: &BTreeMap<String, String>) -> bool {
    let mut parts = line.splitn(5, ':');
    let mut part = || parts.next().unwrap_or_default().trim();
    let (file, number, _level, kind) = (part(), part(), part(), part());
    if kind == "LONG_LINE" || kind == "LONG_LINE_STRING" {
        // rustfmt has the say on the width of code, and leaves what it cannot break.
        let at = number.parse::<usize>().unwrap_or_default();
        let text = texts
            .get(file)
            .and_then(|text| text.lines().nth(at.checked_sub(1)?));
        let in_rust = texts.get(file).is_some_and(|text| {
            let before = text.lines().take(at);
            let name = before.filter(|line| line.starts_with("+++ b/")).last();
            name.is_some_and(|name| name.ends_with(".rs"))
        });
        return in_rust && text.is_some_and(|text| !text[1..].trim_start().starts_with("//"));
    }
    CHECKPATCH_EXCEPTIONS
        .iter()
        .any(|(name, of, _)| *name == kind && file.contains(of))
}

/// The width that comments have in the kernel.
const WIDTH: usize = 100;

/// The part of a line that makes it a comment (indentation, slashes, and how far its text is indented),
/// and the text.
fn comment(line: &str) -> Option<(&str, &str)> {
    let trimmed = line.trim_start();
    let slashes = ["///", "//!", "//"]
        .into_iter()
        .find(|slashes| trimmed.starts_with(slashes))?;
    let text = trimmed[slashes.len()..].trim_start();
    Some((&line[..line.len() - text.len()], text))
}

/// Breaks comments that are wider than the kernel has them. What no longer fits goes on in the next line
/// of the same paragraph.
fn narrowed(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // What is left of the line before, and how that began.
    let mut rest: Option<(String, String)> = None;
    let mut in_example = false;
    for line in text.lines() {
        let mut line = line.to_owned();
        if let Some((begin, left)) = rest.take() {
            let goes_on = comment(&line).is_some_and(|(this, text)| {
                let item = ["- ", "* ", "```", "#", "|", "["]
                    .iter()
                    .any(|i| text.starts_with(i));
                this == begin && !text.is_empty() && !item
            });
            if goes_on {
                line = format!("{begin}{left} {}", &line[begin.len()..]);
            } else {
                out += &format!("{begin}{left}\n");
            }
        }
        if comment(&line).is_some_and(|(_, text)| text.starts_with("```")) {
            in_example = !in_example;
        }
        while line.chars().count() > WIDTH && !in_example {
            let Some((begin, _)) = comment(&line) else {
                break;
            };
            // What follows in the paragraph of a list is as far in as its text.
            let item =
                line[begin.len()..].starts_with("- ") || line[begin.len()..].starts_with("* ");
            let begin = format!("{begin}{}", if item { "  " } else { "" });
            let fits = line.char_indices().take(WIDTH + 1);
            let space = fits.filter(|(_, c)| *c == ' ').last();
            let Some((at, _)) = space.filter(|(at, _)| *at > begin.len()) else {
                break;
            };
            let left = line[at + 1..].to_owned();
            line.truncate(at);
            if begin.chars().count() + left.chars().count() > WIDTH {
                out += &line;
                out.push('\n');
                line = format!("{begin}{left}");
            } else {
                rest = Some((begin, left));
            }
        }
        out += &line;
        out.push('\n');
    }
    if let Some((begin, left)) = rest {
        out += &format!("{begin}{left}\n");
    }
    out
}

/// Rust files that are not as in the project are formatted, too.
fn check_format(kernel: &Kernel, author: &str) -> Result<()> {
    let log = log_path("patches-rustfmt");
    let _ = fs::remove_file(&log);
    let dir = Path::new(OUT).join("patches-format");
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    let mut changed: BTreeSet<&str> = GROWING.iter().copied().collect();
    changed.extend(REWRITES.iter().map(|rewrite| rewrite.file));
    changed.retain(|name| name.ends_with(".rs"));
    // Each as it is after any of the patches.
    let mut texts = BTreeSet::new();
    for tree in trees(&kernel.source, author)? {
        for name in &changed {
            texts.extend(tree.get(&place(name)?).cloned());
        }
    }
    for (at, text) in texts.iter().enumerate() {
        fs::write(dir.join(format!("{at}.rs")), text)?;
    }
    // From standard input, for which modules are not followed: their files are the project's.
    // So it succeeds whatever it finds, and what it says decides.
    let script = format!(
        "said=$(for file in {}/*.rs; do rustfmt --check --edition 2021 --config-path {} <$file; done 2>&1); \
         echo \"$said\"; test -z \"$said\"",
        dir.display(),
        kernel.source.join(".rustfmt.toml").display()
    );
    run_step(&mut shell(&script), &log)
}

/// The patches, applied by `git am` to the kernel's files, give what they were made of.
fn check_applies(kernel: &Kernel, author: &str, patches: &[PathBuf]) -> Result<()> {
    let trees = trees(&kernel.source, author)?;
    let dir = Path::new(OUT).join("patches-applied");
    repository(&dir, &trees[0], author)?;
    output(
        git(&dir, author)?
            .args([
                "-c",
                "apply.whitespace=error-all",
                "am",
                "-q",
                "--empty=drop",
            ])
            .args(patches),
    )?;
    let applied = output(git(&dir, author)?.args(["ls-files"]))?;
    let last = trees.last().context("no patches")?;
    let names: BTreeSet<&str> = applied.lines().collect();
    ensure!(
        names == last.keys().map(String::as_str).collect(),
        "the series leaves other files than it was made of"
    );
    for (path, text) in last {
        ensure!(
            fs::read_to_string(dir.join(path))? == *text,
            "{path} is another one after git am"
        );
    }
    let commits = output(git(&dir, author)?.args(["rev-list", "--count", "base..HEAD"]))?;
    ensure!(
        commits.trim() == STEPS.len().to_string(),
        "{} commits of {} patches",
        commits.trim(),
        STEPS.len()
    );
    Ok(())
}

/// The command that looks whether an option for `scripts/config` was kept by `olddefconfig`, which leaves out what
/// does not have all that it depends on.
fn is_set(option: &str) -> Result<String> {
    let (value, name) = match option.split_once(' ') {
        Some(("enable", name)) => ('y', name),
        Some(("module", name)) => ('m', name),
        _ => bail!("{option} is no option"),
    };
    Ok(format!("grep -qx CONFIG_{name}={value} .config"))
}

/// What is wrong with a text in reStructuredText, as far as it can be seen without a parser for it: lines of titles, the
/// columns of simple tables, literals.
fn wrong_markup(text: &str) -> Vec<String> {
    let is_line = |line: &str| {
        let first = line.chars().next();
        line.len() > 3
            && first.is_some_and(|first| "=-~".contains(first))
            && line.chars().all(|other| Some(other) == first)
    };
    let mut wrong = Vec::new();
    // Where the columns of the table begin that a line is in.
    let mut table: Option<Vec<usize>> = None;
    let mut borders = 0;
    let mut above = "";
    for (at, line) in text.lines().enumerate() {
        let mut say = |what: &str| wrong.push(format!("line {}: {what}: {line}", at + 1));
        if line.contains('\t') || line.ends_with(' ') {
            say("tab or space at the end");
        }
        let is_border = line.contains("= =") && line.chars().all(|c| c == '=' || c == ' ');
        if is_border {
            let begins: Vec<usize> = (1..line.len())
                .filter(|at| &line[at - 1..=*at] == " =")
                .collect();
            match &table {
                Some(columns) if *columns != begins => say("other columns than above"),
                _ => {}
            }
            borders += 1;
            // One above, one below, and one below the head where there is one.
            let ends = table.is_some() && text.lines().nth(at + 1).is_none_or(str::is_empty);
            table = (!ends).then_some(begins);
        } else if let Some(columns) = &table {
            for begin in columns {
                if line.as_bytes().get(begin - 1).is_some_and(|c| *c != b' ') {
                    say("text between columns");
                }
            }
        } else if is_line(line) && !is_line(above) && line.chars().count() < above.chars().count() {
            say("shorter than its title");
        }
        above = line;
    }
    if table.is_some() || borders % 2 != 0 && borders % 3 != 0 {
        wrong.push("a table without an end".to_owned());
    }
    for paragraph in text.split("\n\n") {
        if paragraph.matches("``").count() % 2 != 0 {
            wrong.push(format!("a literal without an end: {paragraph}"));
        }
    }
    wrong
}

/// Looks at the documents of the series.
fn check_documents(author: &str, kernel: &Kernel) -> Result<()> {
    let trees = trees(&kernel.source, author)?;
    let last = trees.last().context("no patches")?;
    let mut seen = 0;
    for (path, text) in last {
        // Those of the kernel are its own.
        if !path.ends_with(".rst") || trees[0].contains_key(path) {
            continue;
        }
        seen += 1;
        let wrong = wrong_markup(text);
        ensure!(wrong.is_empty(), "{path}: {}", wrong.join("\n"));
    }
    ensure!(seen > 0, "the series has no documents");
    Ok(())
}

/// Whether a build of `after` does what one of `before` did, which was without an error: it only has documents besides,
/// and new modules. Nothing that was compiled names these, as it did not when they were not there.
fn builds_the_same(before: &Tree, after: &Tree) -> bool {
    let is_read = |path: &str| !path.starts_with("Documentation/") && path != "MAINTAINERS";
    let mut changed = after
        .iter()
        .filter(|(path, text)| is_read(path) && before.get(*path) != Some(text));
    changed.all(|(path, _)| path.ends_with(".rs") && !before.contains_key(path))
}

/// A kernel tree with the series up to a patch, and its build folder: layers over the cached ones,
/// at the same paths, so that only what the series changes is built anew.
struct InTree<'k> {
    kernel: &'k Kernel,
    dir: PathBuf,
    /// The options that are set: who sets them again has much built again.
    options: String,
    /// What was built last without an error.
    built: Option<Tree>,
}

impl<'k> InTree<'k> {
    fn new(kernel: &'k Kernel) -> Result<Self> {
        let dir = Path::new(OUT).join("patches-tree");
        if dir.exists() {
            fs::remove_dir_all(&dir)?;
        }
        for layer in ["source", "source-work", "build", "build-work"] {
            fs::create_dir_all(dir.join(layer))?;
        }
        Ok(Self {
            kernel,
            dir,
            options: String::new(),
            built: None,
        })
    }

    /// Puts a tree of the series over the kernel's.
    fn put(&self, tree: &Tree) -> Result<()> {
        put(tree, &self.dir.join("source"))
    }

    /// Builds what is configured, unless nothing of it changed.
    fn build_changes(&mut self, tree: &Tree) -> Result<()> {
        let built = self.built.take();
        if !built.is_some_and(|built| builds_the_same(&built, tree)) {
            self.build(tree, CONFIGURED)?;
        }
        self.built = Some(tree.clone());
        Ok(())
    }

    /// Builds what the tree has of these, without a warning.
    fn build(&mut self, tree: &Tree, modules: &[Module]) -> Result<()> {
        let there: Vec<_> = modules
            .iter()
            .filter(|module| tree.contains_key(module.makefile))
            .collect();
        ensure!(!there.is_empty(), "nothing of the series is built yet");
        let mut enable = String::new();
        let mut configured = String::from("true");
        for option in there.iter().flat_map(|module| module.options) {
            enable += &format!(" --{option}");
            configured += &format!("; {}", is_set(option)?);
        }
        let configure = if enable == self.options {
            "true"
        } else {
            &format!(
                "{}/scripts/config{enable}; MAKE -s olddefconfig",
                self.kernel.source.display()
            )
        };
        let mut goals = String::new();
        for goal in there.iter().flat_map(|module| module.goals) {
            goals += &format!(" {goal}");
        }
        let (source, build) = (self.kernel.source.display(), self.kernel.build.display());
        let dir = self.dir.display();
        let layer = |of: &str, name: &str| {
            format!("busybox mount -t overlay overlay -o lowerdir={of},upperdir={dir}/{name},workdir={dir}/{name}-work {of}")
        };
        let make = format!("make -C {source} O={build} ARCH=x86 -j{}", kernel::jobs());
        let script = format!(
            "{}; {}; cd {build}; {}; {configured}; {make} -s{goals}; \
             for goal in{goals}; do test -s $goal; echo built $goal; done",
            layer(&source.to_string(), "source"),
            layer(&build.to_string(), "build"),
            configure.replace("MAKE", &make),
        );
        let log = log_path("patches-build");
        let _ = fs::remove_file(&log);
        let mut unshare = Command::new("unshare");
        unshare.args(["--mount", "--"]);
        unshare.args(["/bin/bash", "-euo", "pipefail", "-c", &script]);
        run_step(&mut unshare, &log)?;
        self.options = enable;
        let said = fs::read_to_string(&log)?;
        // objtool does not know all functions of core that never return (`core::cell::panic_...`), and says
        // so of any crate that calls them.
        let known = |line: &str| line.contains("objtool: ") && line.contains(" falls through to ");
        let warnings: Vec<&str> = said
            .lines()
            .filter(|line| !known(line))
            .skip_while(|line| !line.to_lowercase().contains("warning"))
            .take(30)
            .collect();
        ensure!(warnings.is_empty(), "{}", warnings.join("\n"));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(files: &'static [&'static str]) -> Step {
        Step {
            subject: "",
            body: "",
            files,
            edits: &[],
        }
    }

    fn names(of: &[&str]) -> BTreeSet<String> {
        of.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn documents_are_looked_at() {
        let good = "=====\nTitle\n=====\n\nText, ``literal``.\n\nPart\n====\n\n\
                    ====== =====\n``a``  one\n       more\n``bb`` two\n====== =====\n";
        assert_eq!(wrong_markup(good), [""; 0]);
        for (from, to) in [
            ("Part\n", "A longer part\n"),
            ("``a``  one", "``aaa`` one"),
            ("``literal``", "``literal"),
            ("two\n====== =====\n", "two\n"),
            ("two\n====== =====\n", "two\n===== ======\n"),
            ("Text, ", "Text,\t"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good);
            assert_eq!(
                wrong_markup(&bad).len(),
                1,
                "{bad}: {:?}",
                wrong_markup(&bad)
            );
        }
    }

    #[test]
    fn what_nothing_names_changes_no_build() {
        let tree = |files: &[(&str, &str)]| -> Tree {
            let files = files.iter();
            files
                .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
                .collect()
        };
        let root = ("drivers/a/main.rs", "mod b;");
        let before = tree(&[root, ("drivers/a/b.rs", ""), ("MAINTAINERS", "1")]);
        let mut after = before.clone();
        assert!(builds_the_same(&before, &after));
        after.append(&mut tree(&[
            ("drivers/a/c.rs", ""),
            ("Documentation/a.rst", ""),
            ("MAINTAINERS", "2"),
        ]));
        assert!(builds_the_same(&before, &after));
        for changed in [
            ("drivers/a/main.rs", "mod b; mod c;"),
            ("drivers/a/Makefile", "obj-m"),
            ("include/uapi/a.h", ""),
        ] {
            let mut after = after.clone();
            after.append(&mut tree(&[changed]));
            assert!(!builds_the_same(&before, &after), "{changed:?}");
        }
    }

    #[test]
    fn what_olddefconfig_left_out_is_looked_for() -> Result<()> {
        assert_eq!(is_set("enable A_B")?, "grep -qx CONFIG_A_B=y .config");
        assert_eq!(is_set("module C")?, "grep -qx CONFIG_C=m .config");
        assert!(is_set("C").is_err());
        Ok(())
    }

    #[test]
    fn a_file_without_a_patch_is_named() {
        let steps = [step(&["rust/a.rs"]), step(&["Kconfig#A", "Kconfig#B"])];
        let good = names(&["rust/a.rs", "Kconfig", "Kbuild"]);
        assert_eq!(unaccounted(&good, &steps, &[("Kbuild", "why")]), "");
        let wrong = unaccounted(&good, &steps, &[]);
        assert!(wrong.starts_with("Kbuild is in no patch"), "{wrong}");
        let fewer = names(&["rust/a.rs"]);
        assert!(unaccounted(&fewer, &steps, &[]).contains("Kconfig#A is in a patch, but not there"));
        let twice = [step(&["rust/a.rs"]), step(&["rust/a.rs"])];
        let wrong = unaccounted(&fewer, &twice, &[]);
        assert_eq!(
            wrong,
            "rust/a.rs is in a patch, and in another or in none\n"
        );
        // A folder is all that is in it, and of two patches only one may have a file.
        let more = names(&["rust/a.rs", "rust/b/c.rs", "rust/b/d.rs"]);
        assert_eq!(
            unaccounted(&more, &[step(&["rust/a.rs", "rust/b/"])], &[]),
            ""
        );
        let wrong = unaccounted(&more, &[step(&["rust/"]), step(&["rust/b/"])], &[]);
        assert_eq!(wrong.lines().count(), 2, "{wrong}");
        // One with nothing in it is a mistake.
        let wrong = unaccounted(&fewer, &[step(&["rust/", "rust/c/"])], &[]);
        assert_eq!(wrong, "rust/c/ is in a patch, but nothing is in it\n");
        let out = [("rust/b/", "why")];
        assert_eq!(unaccounted(&more, &[step(&["rust/a.rs"])], &out), "");
        let wrong = unaccounted(&more, &[step(&["rust/"])], &out);
        assert_eq!(wrong.lines().count(), 2, "{wrong}");
    }

    #[test]
    fn what_a_build_or_an_editor_leaves_is_in_no_patch() {
        let left = [
            "rust/.a.o.cmd",
            "rust/a.o",
            "rust/a.rs~",
            "rust/a.rs.orig",
            "rust/ferrite.mod.c",
            "rust/bindings/rdma_bindings_generated.rs",
            "rust/modules.order",
            "rust/.a.rs.swp",
        ];
        for left in left {
            let wrong = unaccounted(&names(&["rust/b.rs", left]), &[step(&["rust/"])], &[]);
            assert_eq!(
                wrong,
                format!("{left} is no source file: a build or an editor left it\n")
            );
        }
    }

    #[test]
    fn an_option_without_a_patch_is_named() {
        let steps = [step(&["Kconfig#A"]), step(&["Kconfig#B"])];
        let text = "# licence\nconfig A\n\tbool\n\nconfig B\n\thelp\n\t  config X\n";
        assert_eq!(unaccounted_options(text, &steps, &[]), "");
        let wrong = unaccounted_options(text, &steps[1..], &[]);
        assert!(wrong.starts_with("Kconfig#A is in no patch"), "{wrong}");
        let left_out = [("Kconfig#A", "for a reason")];
        assert_eq!(unaccounted_options(text, &steps[1..], &left_out), "");
    }

    #[test]
    fn a_checkpatch_that_did_not_look_is_no_good_sign() {
        assert!(has_looked(Some(0), "") && has_looked(Some(1), "a.patch:1: ERROR:X: y\n"));
        for (code, said) in [(None, ""), (Some(1), ""), (Some(2), "Died\n"), (None, "x")] {
            assert!(!has_looked(code, said), "{code:?} {said}");
        }
    }

    #[test]
    fn who_has_uncommitted_changes_is_told() {
        assert_eq!(
            changed_since("0123456789ab and changes"),
            Some("0123456789ab")
        );
        assert_eq!(changed_since("0123456789ab"), None);
        assert_eq!(changed_since(""), None);
    }

    #[test]
    fn a_file_of_modules_grows_with_them() {
        let whole =
            "//! Doc.\n\n#[macro_use]\nmod macros;\n\nmod a;\n#[cfg(test)]\nmod b;\npub mod c;\n\n\
                     pub use a::*;\npub use b::*;\n\npub type P = a::Q;\n";
        assert_eq!(grown(whole, |_| true), whole);
        assert_eq!(
            grown(whole, |name| name == "a"),
            "//! Doc.\n\nmod a;\n\npub use a::*;\n\npub type P = a::Q;\n"
        );
        assert_eq!(
            grown(whole, |name| name == "macros" || name == "c"),
            "//! Doc.\n\n#[macro_use]\nmod macros;\n\npub mod c;\n\npub type P = a::Q;\n"
        );
    }

    #[test]
    fn comments_are_broken_where_the_kernel_breaks_them() {
        let long = format!("{} end", "word ".repeat(19).trim_end());
        let text = format!("/// {long} of it\n/// goes on.\n///\n/// Next.\nlet x = \"{long} and more\"; // {long}\n");
        let narrow = narrowed(&text);
        let words = |text: &str| -> Vec<String> {
            text.split_whitespace()
                .filter(|word| *word != "///")
                .map(str::to_owned)
                .collect()
        };
        assert_eq!(words(&narrow), words(&text));
        let mut lines = narrow.lines();
        assert_eq!(lines.next().map(str::len), Some("/// ".len() + 19 * 5 - 1));
        assert_eq!(lines.next(), Some("/// end of it goes on."));
        assert_eq!(lines.next(), Some("///"));
        // Code is left alone.
        assert_eq!(lines.last(), text.lines().last());
        let item = format!("//! - {long}\n//! - next\n");
        assert_eq!(
            narrowed(&item),
            format!(
                "//! - {}\n//!   end\n//! - next\n",
                "word ".repeat(19).trim_end()
            )
        );
        // Wherever the width is reached: within a word of which no letter is one byte, and at its end.
        for before in 0..6 {
            let words = format!("{} {}", "é".repeat(30), "–".repeat(60 + before));
            let text = format!("// {words} ééé ééé\n");
            for line in narrowed(&text).lines() {
                assert!(line.chars().count() <= WIDTH, "{line}");
            }
            assert_eq!(narrowed(&text).replace("\n// ", " "), text);
        }
        let example = format!("/// ```\n/// {long} {long}\n/// ```\n");
        assert_eq!(narrowed(&example), example);
    }

    #[test]
    fn one_option_is_taken_out_of_many() {
        let text =
            "# licence\nconfig A\n\tbool\n\nconfig B\n\ttristate\n\thelp\n\t  Text.\n\n\t  More.\n";
        assert_eq!(
            config_block(text, "A").unwrap(),
            "# licence\nconfig A\n\tbool\n"
        );
        assert_eq!(
            config_block(text, "B").unwrap(),
            "# licence\nconfig B\n\ttristate\n\thelp\n\t  Text.\n\n\t  More.\n"
        );
        assert!(config_block(text, "C").is_err());
    }

    #[test]
    fn subjects_and_texts_have_the_width_that_lists_want() {
        for step in STEPS {
            // "Subject: [PATCH 00/00] " does not count; the line that git log shows does.
            assert!(step.subject.len() <= 72, "{}", step.subject);
            assert!(step.subject.contains(": "), "{}", step.subject);
            for line in step.body.lines().chain(COVER.lines()) {
                assert!(line.len() <= 75, "{line}");
            }
            assert!(!step.body.trim().is_empty(), "{}", step.subject);
        }
    }
}
