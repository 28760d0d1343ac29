//! `palisade git check`, as an operator uses it before a push.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot continue has failed"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A gate directory, an upstream with a workflow, and a clone of it.
struct CheckFixture {
    gate_dir: GateDir,
    clone: PathBuf,
}

fn git(dir: &Path, args: &[&str]) -> String {
    let output = Command::new("git")
        .args(args)
        .current_dir(dir)
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_AUTHOR_NAME", "A")
        .env("GIT_AUTHOR_EMAIL", "a@example.com")
        .env("GIT_COMMITTER_NAME", "A")
        .env("GIT_COMMITTER_EMAIL", "a@example.com")
        .output()
        .unwrap();
    assert!(output.status.success(), "git {args:?}: {}", stderr(&output));
    stdout(&output).trim_end().to_owned()
}

fn write(dir: &Path, path: &str, text: &str) {
    let path = dir.join(path);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

/// A token that no forge has issued. It is assembled, so that scanners do not find it in this file.
fn token() -> String {
    format!("{}_{}", "ghp", "q7Rk2VbX9sLm4ZtYc1WdNf8HgJpA3uE5oTi6")
}

impl CheckFixture {
    fn new() -> Self {
        let gate_dir = GateDir::new(PALISADE);
        let upstream = gate_dir.path().join("upstream");
        std::fs::create_dir(&upstream).unwrap();
        git(&upstream, &["init", "-q", "-b", "main"]);
        write(&upstream, ".github/workflows/ci.yml", "on: push\n");
        write(&upstream, "README.md", &"words and words\n".repeat(200));
        git(&upstream, &["add", "-A"]);
        git(&upstream, &["commit", "-q", "-m", "first"]);
        git(gate_dir.path(), &["clone", "-q", "upstream", "clone"]);
        let clone = gate_dir.path().join("clone");
        git(&clone, &["checkout", "-q", "-b", "palisade/fix"]);
        Self { gate_dir, clone }
    }

    fn commit(&self, path: &str, text: &str) {
        write(&self.clone, path, text);
        git(&self.clone, &["add", "-A"]);
        git(&self.clone, &["commit", "-q", "-m", "work"]);
    }

    fn check(&self, args: &[&str]) -> Output {
        let mut all = vec!["git", "check", "--repo", self.clone.to_str().unwrap()];
        all.extend(args);
        self.gate_dir.run(&all)
    }

    /// The response as JSON, and the exit code.
    fn check_json(&self, args: &[&str]) -> (Value, i32) {
        let output = self.check(&[args, &["--json"]].concat());
        let answer = serde_json::from_slice(&output.stdout);
        let answer = answer.unwrap_or_else(|_| panic!("{}{}", stdout(&output), stderr(&output)));
        (answer, output.status.code().unwrap())
    }

    /// The reasons of every refusal.
    fn reasons(&self, args: &[&str]) -> Vec<String> {
        let (answer, code) = self.check_json(args);
        let of_push = answer["denials"].as_array().unwrap().iter();
        let refs = answer["refs"].as_array().unwrap().iter();
        let refs = refs
            .map(|update| &update["denial"])
            .filter(|denial| !denial.is_null());
        let reasons: Vec<_> = of_push
            .chain(refs)
            .map(|denial| denial["reason"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(code, if reasons.is_empty() { 0 } else { 7 }, "{answer}");
        reasons
    }
}

/// The arguments that select the commits since the clone.
const RANGE: &[&str] = &["--range", "origin/main..HEAD"];

/// The arguments of `RANGE`, and more.
fn with_range<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [RANGE, more].concat()
}

#[test]
fn git_check_reports_refusals_before_a_push() {
    let fixture = CheckFixture::new();
    fixture.commit("src/work.rs", "fn main() {}\n");
    let output = fixture.check(RANGE);
    assert!(
        output.status.success(),
        "{}{}",
        stdout(&output),
        stderr(&output)
    );
    let printed = stdout(&output);
    assert!(printed.starts_with("allowed: "), "{printed}");
    assert!(printed.contains("refs/heads/palisade/fix"), "{printed}");
    // The same commits, pushed to other names and by a bot.
    assert_eq!(
        fixture.reasons(&with_range(&["--ref", "main"])),
        ["git_protected"]
    );
    assert_eq!(
        fixture.reasons(&with_range(&["--ref", "refs/notes/x"])),
        ["git_namespace"]
    );
    assert_eq!(
        fixture.reasons(&with_range(&["--auth-mode", "bot"])),
        [""; 0]
    );
    let bot = with_range(&["--auth-mode", "bot", "--ref", "fix"]);
    assert_eq!(fixture.reasons(&bot), ["git_namespace"]);
    // A branch that exists upstream, created by this sandbox or not.
    git(
        &fixture.clone,
        &[
            "update-ref",
            "refs/remotes/origin/palisade/fix",
            "origin/main",
        ],
    );
    assert_eq!(fixture.reasons(RANGE), ["git_protected"]);
    assert_eq!(fixture.reasons(&with_range(&["--own"])), [""; 0]);
}

#[test]
fn secret_is_reported_by_rule_and_location_only() {
    let fixture = CheckFixture::new();
    fixture.commit("src/settings.env", &format!("TOKEN={}\n", token()));
    std::fs::remove_file(fixture.clone.join("src/settings.env")).unwrap();
    fixture.commit("other", "x\n");
    let output = fixture.check(RANGE);
    assert_eq!(output.status.code(), Some(7));
    let printed = stdout(&output);
    for part in [
        "refused",
        "secret_found",
        "github-token",
        "'src/settings.env'",
    ] {
        assert!(printed.contains(part), "{part} is not in {printed}");
    }
    assert!(!printed.contains(&token()), "{printed}");
    let option = format!("note={}", token());
    fixture.commit("third", "x\n");
    let last_commit = [
        "--range",
        "HEAD~1..HEAD",
        "--ref",
        "palisade/x",
        "-o",
        &option,
    ];
    assert_eq!(fixture.reasons(&last_commit), ["secret_found"]);
    // With `scan: note`, a secret is reported but not refused.
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\ngit: { scan: note }\n");
    let (answer, code) = fixture.check_json(RANGE);
    assert_eq!((code, answer["secrets"].as_array().unwrap().len()), (0, 1));
    assert!(
        answer["notes"][0]
            .as_str()
            .unwrap()
            .contains("github-token")
    );
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\ngit: { scan: off }\n");
    assert_eq!(
        fixture.check_json(RANGE).0["secrets"]
            .as_array()
            .unwrap()
            .len(),
        0
    );
}

#[test]
fn git_check_uses_the_gates_rules() {
    let fixture = CheckFixture::new();
    fixture.commit("noise", &"0123456789abcdef".repeat(64));
    // A branch that exists upstream may be pushed to if the operator lists it.
    let update_ref = [
        "update-ref",
        "refs/remotes/origin/palisade/fix",
        "origin/main",
    ];
    git(&fixture.clone, &update_ref);
    assert_eq!(fixture.reasons(RANGE), ["git_protected"]);
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\ngit: { pushable: [\"palisade/*\"] }\n");
    assert_eq!(fixture.reasons(RANGE), [""; 0]);
    // The operator's own limits.
    let limits = "git: { push_limits: { warning_bytes: 1, hard_limit_bytes: 100 } }\n";
    std::fs::write(fixture.gate_dir.path().join("policy.yaml"), limits).unwrap();
    fixture.gate_dir.write_config(
        "version: \"1.0\"\negress: { policy: policy.yaml }\ngit: { pushable: [\"palisade/*\"] }\n",
    );
    assert_eq!(fixture.reasons(RANGE), ["git_size"]);
}

#[test]
fn changed_workflow_is_reported() {
    let fixture = CheckFixture::new();
    fixture.commit("README.md", "words\n");
    assert_eq!(fixture.reasons(RANGE), [""; 0]);
    fixture.commit(".github/workflows/ci.yml", "on: pull_request_target\n");
    assert_eq!(fixture.reasons(RANGE), ["git_path"]);
    let (answer, _) = fixture.check_json(RANGE);
    let message = answer["denials"][0]["told"].as_str().unwrap();
    assert!(!message.contains(".github"), "{message}");
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\ngit: { restricted_paths: [Makefile] }\n");
    assert_eq!(fixture.reasons(RANGE), [""; 0]);
}

#[test]
fn rewritten_history_is_reported_if_refused() {
    let fixture = CheckFixture::new();
    fixture.commit("a", "1");
    git(
        &fixture.clone,
        &["update-ref", "refs/remotes/origin/palisade/fix", "HEAD"],
    );
    git(&fixture.clone, &["commit", "-q", "--amend", "-m", "other"]);
    assert_eq!(fixture.reasons(&with_range(&["--own"])), [""; 0]);
    fixture
        .gate_dir
        .write_config("version: \"1.0\"\ngit: { deny_force_push: true }\n");
    assert_eq!(fixture.reasons(&with_range(&["--own"])), ["git_protected"]);
}

#[test]
fn bundle_is_checked_together_with_its_prerequisites() {
    let fixture = CheckFixture::new();
    let file = fixture.gate_dir.path().join("work.bundle");
    let file = file.to_str().unwrap();
    // A small change of a long file, which git stores as a delta in the bundle.
    let text = "words and words\n".repeat(200);
    fixture.commit("README.md", &format!("{text}{}\n", "new"));
    git(
        &fixture.clone,
        &["bundle", "create", "-q", file, "origin/main..palisade/fix"],
    );
    assert_eq!(fixture.reasons(&["--bundle", file]), [""; 0]);
    assert_eq!(
        fixture.reasons(&["--bundle", file, "--ref", "main"]),
        ["git_protected"]
    );
    let outside = fixture.gate_dir.path().to_str().unwrap();
    let without_clone = fixture
        .gate_dir
        .run(&["git", "check", "--bundle", file, "--repo", outside]);
    assert_eq!(without_clone.status.code(), Some(3));
    assert!(
        stderr(&without_clone).contains("--repo"),
        "{}",
        stderr(&without_clone)
    );
    fixture.commit("README.md", &format!("{text}{}\n", token()));
    git(
        &fixture.clone,
        &["bundle", "create", "-q", file, "origin/main..palisade/fix"],
    );
    assert_eq!(fixture.reasons(&["--bundle", file]), ["secret_found"]);
    // A bundle that was tampered with is refused.
    let mut bytes = std::fs::read(file).unwrap();
    let middle = bytes.len() - 40;
    bytes[middle] ^= 0xff;
    std::fs::write(file, bytes).unwrap();
    assert_eq!(fixture.reasons(&["--bundle", file]), ["git_malformed"]);
}

#[test]
fn bundle_of_a_sha256_repository_is_checked() {
    let fixture = CheckFixture::new();
    let other = fixture.gate_dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    git(
        &other,
        &["init", "-q", "-b", "palisade/fix", "--object-format=sha256"],
    );
    write(&other, "file", "x\n");
    git(&other, &["add", "-A"]);
    git(&other, &["commit", "-q", "-m", "x"]);
    let file = other.join("all.bundle");
    let file = file.to_str().unwrap();
    git(&other, &["bundle", "create", "-q", file, "palisade/fix"]);
    assert_eq!(fixture.reasons(&["--bundle", file]), [""; 0]);
}

#[test]
fn invalid_arguments_are_refused_with_a_remedy() {
    let fixture = CheckFixture::new();
    fixture.commit("a", "1");
    git(&fixture.clone, &["checkout", "-q", "--detach"]);
    for (args, code, printed) in [
        (&[][..], 2, "--range"),
        (RANGE, 2, "--ref"),
        (&["--range", "nowhere..HEAD"], 3, "nowhere"),
        (&["--bundle", "/nonexistent"], 3, "cannot open"),
        (&["--bundle", "/etc/passwd"], 2, "not a valid git bundle"),
        (
            &["--range", "origin/main..HEAD", "--ref", "a..b"],
            2,
            "--ref",
        ),
    ] {
        let output = fixture.check(args);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(
            stderr(&output).contains(printed),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}
