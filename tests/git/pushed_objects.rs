//! Pushes whose objects are checked, with all checks on: secrets in every kind of object,
//! restricted files, and pushes that pass.

use std::path::Path;
use std::process::Stdio;

use testkit::output;

use crate::git_fixture::{FixtureOptions, GitFixture, describe, gits};

const TARGET: &str = "https://forge.example/acme/app/git-receive-pack";

/// A token with the format of a real one, in two parts, so that scanners do not report this file.
fn token() -> String {
    format!("{}{}", "ghp_", "16C7e42F292c6912E7710c838347Ae178B4a")
}

fn fixture_with_checks() -> GitFixture {
    GitFixture::with_options(FixtureOptions {
        checked: true,
        ..FixtureOptions::default()
    })
}

/// Runs a push that must be refused because of a secret, without showing it. Returns the request
/// id.
#[track_caller]
fn assert_secret_refused(fixture: &GitFixture, dir: &Path, args: &[&str]) -> String {
    let args = [&["push", "origin"], args].concat();
    let before = fixture.forge.pushed_bytes();
    let output = fixture.try_git(dir, &args);
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{args:?}: {}", describe(&output));
    assert!(
        printed.contains("The push contains a secret (github-token)"),
        "{printed}"
    );
    assert!(printed.contains("secret_found"), "{printed}");
    let remote_lines: Vec<&str> = printed.lines().filter(|l| l.contains("remote: ")).collect();
    assert!(!remote_lines.concat().contains(&token()), "{printed}");
    assert_eq!(
        fixture.forge.pushed_bytes(),
        before,
        "upstream received data of the push"
    );
    let (_, rest) = printed.split_once("request ").expect("a request id");
    rest.get(..26).unwrap().to_owned()
}

#[test]
fn secret_is_found_in_every_kind_of_object() {
    let mut fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    let main = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    let start_at_main = |fixture: &GitFixture| {
        fixture.git_in(&dir, &["checkout", "-q", "-B", "try", &main]);
    };
    let secret = format!("TOKEN={}\n", token());
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 2] {
            let fixture = fixture.use_git(git, version);
            if at + usize::from(version) > 0 {
                // The rate limit allows ten pushes at once, then one per second. A restart of the
                // gate resets the limit.
                fixture.ok(&["gate", "restart"]);
            }
            // A secret in a file.
            start_at_main(fixture);
            fixture.commit(&dir, "settings.env", &secret);
            let id = assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/in-a-file"]);
            // `palisade why` shows the location to the operator.
            let why = fixture.ok(&["why", &id]);
            assert!(why.contains("'settings.env' (blob"), "{why}");
            assert!(!why.contains(&token()), "{why}");

            // A secret in a file that a later commit of the same push deletes.
            std::fs::remove_file(dir.join("settings.env")).unwrap();
            fixture.commit(&dir, "other", "x\n");
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/removed"]);

            // A secret in a commit that is the second parent of a merge.
            start_at_main(fixture);
            fixture.git_in(&dir, &["checkout", "-q", "-B", "side"]);
            fixture.commit(&dir, "settings.env", &secret);
            std::fs::remove_file(dir.join("settings.env")).unwrap();
            fixture.commit(&dir, "side", "x\n");
            start_at_main(fixture);
            fixture.commit(&dir, "own", "x\n");
            fixture.git_in(&dir, &["merge", "-q", "-m", "merge", "side"]);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/merged"]);

            // A secret in a commit message, and in the author.
            start_at_main(fixture);
            let message = format!("use {}", token());
            fixture.git_in(&dir, &["commit", "-q", "--allow-empty", "-m", &message]);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/message"]);
            start_at_main(fixture);
            let author = format!("--author=A <{}@example.com>", token());
            let args = ["commit", "-q", "--allow-empty", "-m", "x", &author];
            fixture.git_in(&dir, &args);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/author"]);

            // A secret in a tag, in the name of a ref, in the name of a file, in a push option.
            start_at_main(fixture);
            fixture.git_in(&dir, &["tag", "-f", "-a", "-m", &token(), "secret-tag"]);
            assert_secret_refused(fixture, &dir, &["refs/tags/secret-tag"]);
            let branch = format!("HEAD:refs/heads/{}", token());
            assert_secret_refused(fixture, &dir, &[&branch]);
            start_at_main(fixture);
            fixture.commit(&dir, &token(), "x\n");
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/file-name"]);
            start_at_main(fixture);
            let option = format!("key={}", token());
            assert_secret_refused(fixture, &dir, &["-o", &option, "HEAD:refs/heads/option"]);
        }
    }
    assert_eq!(fixture.refs("acme/app").lines().count(), 1, "only main");
    let all = serde_json::Value::from(fixture.records()).to_string();
    assert!(all.contains("secret_found"));
    assert!(!all.contains(&token()), "the audit log contains the secret");
}

#[test]
fn secret_in_an_unreferenced_object_is_found() {
    let fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    fixture.commit(&dir, "file", "clean\n");
    let new = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    std::fs::write(dir.join("loose"), token()).unwrap();
    let blob = fixture.git_in(&dir, &["hash-object", "-w", "loose"]);
    let adds = fixture.git_in(&dir, &["rev-list", "--objects", "HEAD", "^HEAD~1"]);
    let reachable: Vec<&str> = adds.lines().filter_map(|l| l.split(' ').next()).collect();

    let push_with_secret = push_body(&fixture, &dir, &new, &[&reachable[..], &[&blob]].concat());
    let (status, body) = fixture.post(TARGET, &push_with_secret, &[]);
    assert_eq!(status, 200);
    let refused = "ng refs/heads/by-hand palisade: secret_found";
    assert!(body.contains(refused), "{body}");
    assert_eq!(fixture.forge.pushed_bytes(), 0);

    let push_without_secret = push_body(&fixture, &dir, &new, &reachable);
    let (status, body) = fixture.post(TARGET, &push_without_secret, &[]);
    assert_eq!(status, 200);
    assert!(body.contains("ok refs/heads/by-hand"), "{body}");
    assert!(fixture.refs("acme/app").contains(&new));
}

/// The request body of a push of these objects that creates the branch `by-hand` at `new`.
fn push_body(fixture: &GitFixture, dir: &Path, new: &str, objects: &[&str]) -> Vec<u8> {
    let mut child = fixture
        .command(dir, &["pack-objects", "--stdout", "-q"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, objects.join("\n").as_bytes()).unwrap();
    drop(stdin);
    let pack = child.wait_with_output().unwrap();
    assert!(pack.status.success());
    let zero = "0".repeat(40);
    let line = format!("{zero} {new} refs/heads/by-hand\0report-status");
    let mut bytes = format!("{:04x}{line}0000", line.len() + 4).into_bytes();
    bytes.extend(pack.stdout);
    bytes
}

#[test]
fn changed_workflow_is_refused_and_unchanged_one_passes() {
    let fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    // The operator's branch has a workflow.
    fixture.commit(&dir, ".github/workflows/ci.yml", "on: push\n");
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/main"]);
    fixture.git_in(&dir, &["fetch", "-q", "origin"]);

    fixture.commit(&dir, "src/a", "a\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/fine"]);
    let sentence = "files that only the operator may change";
    for file in [
        ".github/workflows/ci.yml",
        ".github/workflows/new.yml",
        ".GitHub/Workflows/other.yml",
        ".github/actions/x/action.yml",
    ] {
        fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/main"]);
        fixture.commit(&dir, file, "on: pull_request_target\n");
        let args = ["push", "origin", "HEAD:refs/heads/workflow"];
        fixture.assert_refused(&dir, &args, "git_path", sentence);
    }
    // A deleted workflow.
    fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/main"]);
    fixture.git_in(&dir, &["rm", "-q", ".github/workflows/ci.yml"]);
    fixture.git_in(&dir, &["commit", "-q", "-m", "without"]);
    let args = ["push", "origin", "HEAD:refs/heads/workflow"];
    fixture.assert_refused(&dir, &args, "git_path", sentence);
    // A workflow that was deleted and restored: a branch could be created at the commit in between.
    fixture.git_in(&dir, &["revert", "--no-edit", "HEAD"]);
    let args = ["push", "origin", "HEAD:refs/heads/workflow"];
    fixture.assert_refused(&dir, &args, "git_path", sentence);
}

#[test]
fn branch_may_start_at_any_upstream_branch_with_workflows() {
    let fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap();
    fixture.commit(&dir, ".github/workflows/ci.yml", "on: push\n");
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/main"]);
    fixture.commit(
        &dir,
        ".github/workflows/ci.yml",
        "on: [push, pull_request]\n",
    );
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/develop"]);
    fixture.git_in(&dir, &["fetch", "-q", "origin"]);

    fixture.commit(&dir, "src/a", "a\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/fine"]);
    fixture.git_in(&dir, &["tag", "v1", "origin/develop"]);
    fixture.git_in(&dir, &["push", "-q", "origin", "v1"]);
    let refs = fixture.refs("acme/app");
    assert!(refs.contains("refs/heads/fine") && refs.contains("refs/tags/v1"));

    fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/develop"]);
    fixture.commit(&dir, ".github/workflows/ci.yml", "on: workflow_dispatch\n");
    let args = ["push", "origin", "HEAD:refs/heads/workflow"];
    let sentence = "files that only the operator may change";
    fixture.assert_refused(&dir, &args, "git_path", sentence);
    // A branch that starts at a commit which no upstream ref reaches any more.
    fixture.git_in(&upstream, &["branch", "-q", "-D", "develop"]);
    fixture.git_in(&upstream, &["update-ref", "-d", "refs/heads/fine"]);
    fixture.git_in(&upstream, &["update-ref", "-d", "refs/tags/v1"]);
    fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/develop"]);
    fixture.commit(&dir, "src/b", "b\n");
    fixture.assert_refused(&dir, &args, "git_path", sentence);
}

#[test]
fn objects_that_upstream_has_are_not_scanned() {
    let fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    fixture.commit(&dir, "old.env", &format!("TOKEN={}\n", token()));
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/main"]);
    fixture.git_in(&dir, &["fetch", "-q", "origin"]);
    fixture.commit(&dir, "new", "clean\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/new"]);
    let head = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    assert!(fixture.refs("acme/app").contains(&head));
}

#[test]
fn clean_pushes_of_every_kind_pass() {
    let fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    fixture.commit(&dir, "a", "a\n");
    fixture.git_in(&dir, &["tag", "-a", "-m", "a tag", "v1"]);
    let args = ["push", "-q", "--atomic", "-o", "ci.skip", "origin"];
    let refs = ["HEAD:refs/heads/one", "refs/tags/v1"];
    fixture.git_in(&dir, &[&args[..], &refs].concat());
    fixture.git_in(&dir, &["commit", "-q", "--amend", "-m", "again"]);
    fixture.git_in(
        &dir,
        &["push", "-q", "--force", "origin", "HEAD:refs/heads/one"],
    );
    let head = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    let upstream_refs = fixture.refs("acme/app");
    assert!(
        upstream_refs.contains(&head) && upstream_refs.contains("refs/tags/v1"),
        "{upstream_refs}"
    );

    // A new repository with SHA-256 object names.
    fixture.create_bare("acme/long", &["--object-format=sha256"]);
    let long = fixture.path("long");
    std::fs::create_dir(&long).unwrap();
    fixture.git_in(&long, &["init", "-q", "--object-format=sha256"]);
    fixture.commit(&long, "a", "a\n");
    let url = "https://forge.example/acme/long";
    fixture.git_in(&long, &["push", "-q", url, "HEAD:refs/heads/one"]);
    let head = fixture.git_in(&long, &["rev-parse", "HEAD"]);
    assert!(fixture.refs("acme/long").contains(&head));
    fixture.commit(&long, "b", &token());
    let output = fixture.try_git(&long, &["push", url, "HEAD:refs/heads/two"]);
    assert!(!output.status.success());
    assert!(
        output::stderr(&output).contains("contains a secret"),
        "{}",
        describe(&output)
    );
}

#[test]
fn force_push_is_refused_if_configured() {
    let fixture = GitFixture::with_options(FixtureOptions {
        git: "  deny_force_push: true\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    let spec = "HEAD:refs/heads/mine";
    for text in ["a\n", "b\n"] {
        fixture.commit(&dir, "a", text);
        fixture.git_in(&dir, &["push", "-q", "origin", spec]);
    }
    fixture.git_in(&dir, &["commit", "-q", "--amend", "-m", "rewritten"]);
    let args = ["push", "--force", "origin", spec];
    fixture.assert_refused(&dir, &args, "git_protected", "Force pushes are not allowed");
}
