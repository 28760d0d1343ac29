//! The shape of the house: who may know whom, and documents that tell the truth.

mod conformance;
mod words;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{graph, logs};

/// Which crates of ours each may depend on. The four planes never know each other.
const DIRECTIONS: &[(&str, &[&str])] = &[
    ("policy", &[]),
    ("scan", &[]),
    ("listen", &[]),
    ("config", &["policy", "scan"]),
    ("store", &["policy", "scan"]),
    ("sandbox", &["policy", "scan", "config"]),
    ("decide", &["policy", "scan", "config"]),
    ("egress", &["policy", "scan", "config", "decide"]),
    ("mcp", &["policy", "scan", "config", "listen", "decide"]),
    ("workbench", &["policy", "scan", "config", "listen"]),
    (
        "control",
        &[
            "policy",
            "scan",
            "config",
            "listen",
            "store",
            "decide",
            "sandbox",
            "egress",
            "mcp",
            "workbench",
        ],
    ),
    (
        "palisade",
        &[
            "policy",
            "scan",
            "config",
            "listen",
            "store",
            "decide",
            "sandbox",
            "egress",
            "mcp",
            "workbench",
            "control",
        ],
    ),
    ("testkit", &[]),
    ("benches", &[]),
    ("xtask", &[]),
];

/// Rooms that have no subject.
const NO_SUBJECT: &[&str] = &[
    "mod.rs",
    "utils.rs",
    "util.rs",
    "common.rs",
    "helpers.rs",
    "misc.rs",
];

/// Scripts that must not change a lock file.
const SCRIPTS: &[&str] = &[
    "test",
    "fuzz/run",
    "justfile",
    ".ci/run",
    ".cargo/config.toml",
];

/// Lines after which a file is two files.
const LONGEST_FILE: usize = 800;

/// The clone that cargo was called in. Asked when it runs: clones that share a target directory
/// share this program, too.
pub fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| "xtask".into());
    Path::new(&own).join("..")
}

/// Every complaint; none when the house is tidy.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut complaints = directions(&packages(root)?);
    let files = tracked_files(root)?;
    complaints.extend(graph::check(&graph::read(root, &files)));
    complaints.extend(words::check_names(root, &files));
    complaints.extend(logs::check(root, &files)?);
    for file in files {
        let text = std::fs::read_to_string(root.join(&file));
        let Ok(text) = text else { continue };
        complaints.extend(unmerged(&file, &text));
        complaints.extend(words::check(&file, &text));
        if SCRIPTS.contains(&file.as_str()) {
            complaints.extend(unlocked(&file, &text));
        }
        if file.ends_with(".rs") {
            complaints.extend(source(&file, &text));
        }
        if file.ends_with(".md") {
            complaints.extend(document(root, &file, &text));
        }
        if file == conformance::FILE {
            complaints.extend(conformance::check(root, &text));
        }
    }
    Ok(complaints)
}

/// Name, path dependencies, manifest text and root module of one of our crates.
struct Package {
    name: String,
    uses: Vec<String>,
    manifest: String,
}

fn packages(root: &Path) -> Result<Vec<Package>> {
    let output = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()))
        .args([
            "metadata",
            "--format-version",
            "1",
            "--no-deps",
            "--offline",
            "--locked",
        ])
        .current_dir(root)
        .output()
        .context("cannot run cargo metadata")?;
    if !output.status.success() {
        bail!(
            "cargo metadata: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let list = |value: &Value, name: &str| {
        value
            .get(name)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    let text = |value: &Value, name: &str| {
        value
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    list(&metadata, "packages")
        .iter()
        .map(|package| {
            let uses = list(package, "dependencies")
                .iter()
                .filter(|used| used.get("path").is_some_and(Value::is_string))
                .filter(|used| text(used, "kind") != "dev")
                .map(|used| text(used, "name"))
                .collect();
            let manifest = std::fs::read_to_string(text(package, "manifest_path"))?;
            Ok(Package {
                name: text(package, "name"),
                uses,
                manifest,
            })
        })
        .collect()
}

fn directions(packages: &[Package]) -> Vec<String> {
    let mut complaints = Vec::new();
    for package in packages {
        let name = &package.name;
        let Some((_, allowed)) = DIRECTIONS.iter().find(|(known, _)| known == name) else {
            complaints.push(format!(
                "crate {name} has no place in the directions of xtask/src/tidy.rs"
            ));
            continue;
        };
        for used in package
            .uses
            .iter()
            .filter(|used| !allowed.contains(&used.as_str()))
        {
            complaints.push(format!("crate {name} must not depend on {used}"));
        }
        if !package.manifest.contains("[lints]\nworkspace = true") {
            complaints.push(format!("crate {name} does not take the workspace's lints"));
        }
    }
    complaints
}

fn source(file: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let name = file.rsplit('/').next().unwrap_or(file);
    if NO_SUBJECT.contains(&name) {
        complaints.push(format!("{file}: a module is named after its subject"));
    }
    let lines = text.lines().count();
    if lines > LONGEST_FILE {
        complaints.push(format!("{file}: {lines} lines; move a wall"));
    }
    // Spelt apart, or this file would complain about itself.
    if text.contains(concat!("#[", "ignore")) {
        complaints.push(format!("{file}: an ignored test is not a test"));
    }
    let is_root = file.starts_with("crates/") && file.ends_with("/src/lib.rs");
    if is_root && !text.contains("**Never here:**") {
        complaints.push(format!("{file}: a crate's root says what it must never do"));
    }
    complaints
}

/// A merge that was given up half way.
fn unmerged(file: &str, text: &str) -> Option<String> {
    let is_mark = |line: &str| {
        let mark = line.split(' ').next().unwrap_or_default();
        mark.len() == 7 && ["<", "=", ">"].iter().any(|sign| mark == sign.repeat(7))
    };
    let place = text.lines().position(is_mark)? + 1;
    Some(format!("{file}:{place}: a mark of a merge was left"))
}

/// Cargo calls that may write a lock file. `fuzz-lock` is the recipe that is meant to.
fn unlocked(file: &str, text: &str) -> Vec<String> {
    const RESOLVING: &[&str] = &[
        "bench", "build", "clippy", "deny", "install", "metadata", "nextest", "run", "test",
    ];
    let calls = |line: &str| {
        let words: Vec<&str> = line
            .split([' ', '"', '('])
            .filter(|word| !word.is_empty())
            .collect();
        let named = words.windows(2).any(
            |pair| matches!(pair, [cargo, verb] if *cargo == "cargo" && RESOLVING.contains(verb)),
        );
        let alias = line.starts_with("xtask = ");
        !line.trim_start().starts_with('#') && (named || alias)
    };
    let allowed = |line: &str| {
        line.contains("--locked") || line.contains("--manifest-path fuzz/Cargo.toml >/dev/null")
    };
    text.lines()
        .enumerate()
        .filter(|(_, line)| calls(line) && !allowed(line))
        .map(|(number, _)| format!("{file}:{}: a cargo call without --locked", number + 1))
        .collect()
}

/// Relative links lead somewhere, and paths that ARCHITECTURE.md names exist.
fn document(root: &Path, file: &str, text: &str) -> Vec<String> {
    let base = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut complaints = Vec::new();
    for target in text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
    {
        let path = target.split('#').next().unwrap_or_default();
        if path.is_empty() || path.contains("://") {
            continue;
        }
        if !root.join(base).join(path).exists() {
            complaints.push(format!("{file}: the link to {target} leads nowhere"));
        }
    }
    if file == "ARCHITECTURE.md" {
        for named in text
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|word| is_path(word))
        {
            if !root.join(named).exists() {
                complaints.push(format!("{file}: {named} does not exist"));
            }
        }
    }
    complaints
}

fn is_path(word: &str) -> bool {
    ["crates/", "docs/", "tests/", "xtask/", ".ci/", "policies/"]
        .iter()
        .any(|top| word.starts_with(top))
        && !word.contains([' ', '*', '<', '{'])
}

/// Every file of the clone that git tracks or would track.
pub fn tracked_files(root: &Path) -> Result<Vec<String>> {
    let output = Command::new("git")
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(root)
        .output()
        .context("cannot run git")?;
    let names = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(names
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, uses: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            uses: uses.iter().map(|&used| used.to_owned()).collect(),
            manifest: "[lints]\nworkspace = true\n".to_owned(),
        }
    }

    #[test]
    fn the_house_is_tidy() {
        let root = root();
        assert_eq!(check(&root).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_wrong_direction_is_named() {
        assert_eq!(
            directions(&[package("policy", &["store"])]),
            ["crate policy must not depend on store"]
        );
        assert_eq!(
            directions(&[package("egress", &["mcp"])]),
            ["crate egress must not depend on mcp"]
        );
        assert!(directions(&[package("control", &["store", "policy"])]).is_empty());
        assert_eq!(directions(&[package("utils", &[])]).len(), 1);
    }

    #[test]
    fn a_crate_without_the_lints_is_named() {
        let mut bare = package("policy", &[]);
        bare.manifest.clear();
        assert_eq!(
            directions(&[bare]),
            ["crate policy does not take the workspace's lints"]
        );
    }

    #[test]
    fn rooms_without_subject_and_ignored_tests_are_named() {
        assert_eq!(source("crates/x/src/utils.rs", "").len(), 1);
        assert_eq!(
            source("crates/x/src/a.rs", concat!("#[", "ignore]")).len(),
            1
        );
        assert_eq!(
            source("crates/x/src/a.rs", &"x\n".repeat(LONGEST_FILE + 1)).len(),
            1
        );
        assert_eq!(source("crates/x/src/lib.rs", "//! Does things.").len(), 1);
        assert!(source("crates/x/src/a.rs", "fn a() {}").is_empty());
    }

    #[test]
    fn marks_of_a_merge_are_named() {
        for sign in ["<", "=", ">"] {
            let text = format!("one\n{}\ntwo\n", sign.repeat(7));
            let found = unmerged("a.md", &text);
            assert_eq!(found.as_deref(), Some("a.md:2: a mark of a merge was left"));
        }
        let text = format!("{} HEAD\n", "<".repeat(7));
        assert!(unmerged("a.md", &text).is_some());
        assert_eq!(unmerged("a.md", "======\n========\n  =======\n"), None);
    }

    // Issue 14, number 18.
    #[test]
    fn cargo_calls_without_locked_are_named() {
        let text = "a:\n    X=1 cargo build --quiet\n    cargo fmt --all\n    # cargo test\n    cargo test --locked\n";
        assert_eq!(
            unlocked("justfile", text),
            ["justfile:2: a cargo call without --locked"]
        );
        assert_eq!(
            unlocked(".cargo/config.toml", "xtask = \"run --quiet\"").len(),
            1
        );
        assert_eq!(
            unlocked("test", "    local run=(cargo nextest run)").len(),
            1
        );
    }

    #[test]
    fn a_document_that_names_what_is_not_there_is_caught() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("here.md"), "").unwrap();
        let found = document(
            root.path(),
            "ARCHITECTURE.md",
            "[a](here.md) [b](gone.md) `crates/gone` `a b`",
        );
        assert_eq!(
            found,
            [
                "ARCHITECTURE.md: the link to gone.md leads nowhere",
                "ARCHITECTURE.md: crates/gone does not exist"
            ]
        );
    }
}
