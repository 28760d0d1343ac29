//! Repository checks: crate dependencies, module names and sizes, and documents that name
//! existing files and tests.

mod conformance;
mod words;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{graph, logs};

/// The workspace crates that each crate may depend on. `egress`, `mcp`, `workbench` and
/// `sandbox` never depend on each other.
const ALLOWED_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("policy", &[]),
    ("scan", &[]),
    ("listen", &[]),
    ("config", &["policy", "scan"]),
    ("store", &["policy", "scan"]),
    ("sandbox", &["policy", "scan", "config"]),
    ("credentials", &["policy", "scan", "config"]),
    ("decide", &["policy", "scan", "config", "credentials"]),
    (
        "egress",
        &["policy", "scan", "config", "credentials", "decide"],
    ),
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
            "credentials",
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
            "credentials",
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

/// File names that do not name the subject of a module.
const VAGUE_FILE_NAMES: &[&str] = &[
    "mod.rs",
    "utils.rs",
    "util.rs",
    "common.rs",
    "helpers.rs",
    "misc.rs",
];

/// Scripts that must not change a lock file.
const LOCKED_SCRIPTS: &[&str] = &[
    "test",
    "fuzz/run",
    "justfile",
    ".ci/run",
    ".cargo/config.toml",
];

/// Maximum number of lines of a file.
const MAX_FILE_LINES: usize = 800;

/// The root of the clone that cargo was called in. It is read at run time, because clones that
/// share a target directory also share this program.
pub fn root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| "xtask".into());
    Path::new(&own).join("..")
}

/// Every violation in the repository.
pub fn check(root: &Path) -> Result<Vec<String>> {
    let mut violations = check_dependencies(&packages(root)?);
    let files = tracked_files(root)?;
    violations.extend(graph::check(&graph::read(root, &files)));
    violations.extend(words::check_names(root, &files));
    violations.extend(logs::check(root, &files)?);
    for file in files {
        let text = std::fs::read_to_string(root.join(&file));
        let Ok(text) = text else { continue };
        violations.extend(find_conflict_marker(&file, &text));
        violations.extend(words::check(&file, &text));
        if LOCKED_SCRIPTS.contains(&file.as_str()) {
            violations.extend(find_unlocked_cargo_calls(&file, &text));
        }
        if file.ends_with(".rs") {
            violations.extend(check_source(&file, &text));
        }
        if file.ends_with(".md") {
            violations.extend(check_document(root, &file, &text));
        }
        if file == conformance::FILE {
            violations.extend(conformance::check(root, &text));
        }
    }
    Ok(violations)
}

/// Name, workspace dependencies and manifest text of a crate of this workspace.
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

fn check_dependencies(packages: &[Package]) -> Vec<String> {
    let mut violations = Vec::new();
    for package in packages {
        let name = &package.name;
        let Some((_, allowed)) = ALLOWED_DEPENDENCIES.iter().find(|(known, _)| known == name)
        else {
            violations.push(format!(
                "crate {name} is missing in ALLOWED_DEPENDENCIES of xtask/src/tidy.rs"
            ));
            continue;
        };
        for used in package
            .uses
            .iter()
            .filter(|used| !allowed.contains(&used.as_str()))
        {
            violations.push(format!("crate {name} must not depend on {used}"));
        }
        if !package.manifest.contains("[lints]\nworkspace = true") {
            violations.push(format!(
                "crate {name} does not inherit the workspace's lints"
            ));
        }
    }
    violations
}

fn check_source(file: &str, text: &str) -> Vec<String> {
    let mut violations = Vec::new();
    let name = file.rsplit('/').next().unwrap_or(file);
    if VAGUE_FILE_NAMES.contains(&name) {
        violations.push(format!("{file}: name the module after its subject"));
    }
    let lines = text.lines().count();
    if lines > MAX_FILE_LINES {
        violations.push(format!(
            "{file}: {lines} lines, more than {MAX_FILE_LINES}: split it"
        ));
    }
    // Split in two, so that this file does not match itself.
    if text.contains(concat!("#[", "ignore")) {
        violations.push(format!("{file}: tests must not be ignored"));
    }
    let is_root = file.starts_with("crates/") && file.ends_with("/src/lib.rs");
    if is_root && !text.contains("**Never here:**") {
        violations.push(format!(
            "{file}: the crate's documentation lacks a 'Never here' paragraph"
        ));
    }
    violations
}

/// A violation for the first merge conflict marker.
fn find_conflict_marker(file: &str, text: &str) -> Option<String> {
    let is_marker = |line: &str| {
        let marker = line.split(' ').next().unwrap_or_default();
        marker.len() == 7 && ["<", "=", ">"].iter().any(|sign| marker == sign.repeat(7))
    };
    let number = text.lines().position(is_marker)? + 1;
    Some(format!("{file}:{number}: a merge conflict marker"))
}

/// A violation for each cargo call that may write a lock file. The recipe `fuzz-lock` is allowed
/// to.
fn find_unlocked_cargo_calls(file: &str, text: &str) -> Vec<String> {
    const LOCK_WRITING_COMMANDS: &[&str] = &[
        "bench", "build", "clippy", "deny", "install", "metadata", "nextest", "run", "test",
    ];
    let calls = |line: &str| {
        let words: Vec<&str> = line
            .split([' ', '"', '('])
            .filter(|word| !word.is_empty())
            .collect();
        let named = words.windows(2).any(
            |pair| matches!(pair, [cargo, verb] if *cargo == "cargo" && LOCK_WRITING_COMMANDS.contains(verb)),
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

/// Checks that the targets of relative links and the paths named in ARCHITECTURE.md exist.
fn check_document(root: &Path, file: &str, text: &str) -> Vec<String> {
    let base = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut violations = Vec::new();
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
            violations.push(format!(
                "{file}: the target of the link {target} does not exist"
            ));
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
                violations.push(format!("{file}: {named} does not exist"));
            }
        }
    }
    violations
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
    fn repository_has_no_violations() {
        let root = root();
        assert_eq!(check(&root).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn forbidden_dependency_is_reported() {
        assert_eq!(
            check_dependencies(&[package("policy", &["store"])]),
            ["crate policy must not depend on store"]
        );
        assert_eq!(
            check_dependencies(&[package("egress", &["mcp"])]),
            ["crate egress must not depend on mcp"]
        );
        assert!(check_dependencies(&[package("control", &["store", "policy"])]).is_empty());
        assert_eq!(check_dependencies(&[package("utils", &[])]).len(), 1);
    }

    #[test]
    fn crate_without_workspace_lints_is_reported() {
        let mut bare = package("policy", &[]);
        bare.manifest.clear();
        assert_eq!(
            check_dependencies(&[bare]),
            ["crate policy does not inherit the workspace's lints"]
        );
    }

    #[test]
    fn vague_file_names_and_ignored_tests_are_reported() {
        assert_eq!(check_source("crates/x/src/utils.rs", "").len(), 1);
        assert_eq!(
            check_source("crates/x/src/a.rs", concat!("#[", "ignore]")).len(),
            1
        );
        assert_eq!(
            check_source("crates/x/src/a.rs", &"x\n".repeat(MAX_FILE_LINES + 1)).len(),
            1
        );
        assert_eq!(
            check_source("crates/x/src/lib.rs", "//! Does things.").len(),
            1
        );
        assert!(check_source("crates/x/src/a.rs", "fn a() {}").is_empty());
    }

    #[test]
    fn merge_conflict_marker_is_reported() {
        for sign in ["<", "=", ">"] {
            let text = format!("one\n{}\ntwo\n", sign.repeat(7));
            let found = find_conflict_marker("a.md", &text);
            assert_eq!(found.as_deref(), Some("a.md:2: a merge conflict marker"));
        }
        let text = format!("{} HEAD\n", "<".repeat(7));
        assert!(find_conflict_marker("a.md", &text).is_some());
        assert_eq!(
            find_conflict_marker("a.md", "======\n========\n  =======\n"),
            None
        );
    }

    // Issue 14, number 18.
    #[test]
    fn cargo_call_without_locked_is_reported() {
        let text = "a:\n    X=1 cargo build --quiet\n    cargo fmt --all\n    # cargo test\n    cargo test --locked\n";
        assert_eq!(
            find_unlocked_cargo_calls("justfile", text),
            ["justfile:2: a cargo call without --locked"]
        );
        assert_eq!(
            find_unlocked_cargo_calls(".cargo/config.toml", "xtask = \"run --quiet\"").len(),
            1
        );
        assert_eq!(
            find_unlocked_cargo_calls("test", "    local run=(cargo nextest run)").len(),
            1
        );
    }

    #[test]
    fn missing_link_targets_and_paths_are_reported() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("here.md"), "").unwrap();
        let found = check_document(
            root.path(),
            "ARCHITECTURE.md",
            "[a](here.md) [b](gone.md) `crates/gone` `a b`",
        );
        assert_eq!(
            found,
            [
                "ARCHITECTURE.md: the target of the link gone.md does not exist",
                "ARCHITECTURE.md: crates/gone does not exist"
            ]
        );
    }
}
