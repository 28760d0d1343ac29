//! Pushes whose objects are checked, with all checks on: secrets in every kind of object,
//! restricted files, and pushes that pass.

use std::path::Path;
use std::process::Stdio;

use testkit::output;

use crate::git_fixture::{FixtureOptions, GitFixture, describe, gits};

const TARGET: &str = "https://forge.example/acme/app/git-receive-pack";

/// A token of the right shape, in two parts, so that scanners do not report this file.
fn token() -> String {
    format!("{}{}", "ghp_", "16C7e42F292c6912E7710c838347Ae178B4a")
}

fn fixture_with_checks() -> GitFixture {
    GitFixture::with(FixtureOptions {
        checked: true,
        ..FixtureOptions::default()
    })
}

/// A push that must be refused for a secret that is not shown. Returns the request id.
#[track_caller]
fn assert_secret_refused(fixture: &GitFixture, dir: &Path, args: &[&str]) -> String {
    let args = [&["push", "origin"], args].concat();
    let before = fixture.forge.pushed();
    let output = fixture.try_git(dir, &args);
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{args:?}: {}", describe(&output));
    assert!(
        printed.contains("The push holds a secret (github-token)"),
        "{printed}"
    );
    assert!(printed.contains("secret_found"), "{printed}");
    let remote_lines: Vec<&str> = printed.lines().filter(|l| l.contains("remote: ")).collect();
    assert!(!remote_lines.concat().contains(&token()), "{printed}");
    assert_eq!(fixture.forge.pushed(), before, "upstream saw bytes of it");
    let (_, rest) = printed.split_once("request ").expect("a request id");
    rest.get(..26).unwrap().to_owned()
}

#[test]
fn secret_is_found_in_every_kind_of_object() {
    let mut fixture = fixture_with_checks();
    let dir = fixture.working_copy("work");
    let main = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    let fresh = |fixture: &GitFixture| {
        fixture.git_in(&dir, &["checkout", "-q", "-B", "try", &main]);
    };
    let secret = format!("TOKEN={}\n", token());
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 2] {
            let fixture = fixture.use_git(git, version);
            if at + usize::from(version) > 0 {
                // Ten pushes at once, then one per second: a restarted gate has a full bucket.
                fixture.ok(&["gate", "restart"]);
            }
            // In a file.
            fresh(fixture);
            fixture.commit(&dir, "settings.env", &secret);
            let id = assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/in-a-file"]);
            // The operator sees the location.
            let why = fixture.ok(&["why", &id]);
            assert!(why.contains("'settings.env' (blob"), "{why}");
            assert!(!why.contains(&token()), "{why}");

            // In a file that a later commit of the same push deletes.
            std::fs::remove_file(dir.join("settings.env")).unwrap();
            fixture.commit(&dir, "other", "x\n");
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/removed"]);

            // On a merge's side parent.
            fresh(fixture);
            fixture.git_in(&dir, &["checkout", "-q", "-B", "side"]);
            fixture.commit(&dir, "settings.env", &secret);
            std::fs::remove_file(dir.join("settings.env")).unwrap();
            fixture.commit(&dir, "side", "x\n");
            fresh(fixture);
            fixture.commit(&dir, "own", "x\n");
            fixture.git_in(&dir, &["merge", "-q", "-m", "merge", "side"]);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/merged"]);

            // In a message, and in an author.
            fresh(fixture);
            let message = format!("use {}", token());
            fixture.git_in(&dir, &["commit", "-q", "--allow-empty", "-m", &message]);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/message"]);
            fresh(fixture);
            let author = format!("--author=A <{}@example.com>", token());
            let args = ["commit", "-q", "--allow-empty", "-m", "x", &author];
            fixture.git_in(&dir, &args);
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/author"]);

            // In a tag, the name of a ref, the name of a file, a push option.
            fresh(fixture);
            fixture.git_in(&dir, &["tag", "-f", "-a", "-m", &token(), "told"]);
            assert_secret_refused(fixture, &dir, &["refs/tags/told"]);
            let named = format!("HEAD:refs/heads/{}", token());
            assert_secret_refused(fixture, &dir, &[&named]);
            fresh(fixture);
            fixture.commit(&dir, &token(), "x\n");
            assert_secret_refused(fixture, &dir, &["HEAD:refs/heads/file-name"]);
            fresh(fixture);
            let option = format!("key={}", token());
            assert_secret_refused(fixture, &dir, &["-o", &option, "HEAD:refs/heads/option"]);
        }
    }
    assert_eq!(fixture.refs("acme/app").lines().count(), 1, "only main");
    let all = serde_json::Value::from(fixture.records()).to_string();
    assert!(all.contains("secret_found"));
    assert!(!all.contains(&token()), "the log holds the secret");
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

    let with = push(&fixture, &dir, &new, &[&reachable[..], &[&blob]].concat());
    let (status, body) = fixture.post(TARGET, &with, &[]);
    assert_eq!(status, 200);
    let refused = "ng refs/heads/by-hand palisade: secret_found";
    assert!(body.contains(refused), "{body}");
    assert_eq!(fixture.forge.pushed(), 0);

    let without = push(&fixture, &dir, &new, &reachable);
    let (status, body) = fixture.post(TARGET, &without, &[]);
    assert_eq!(status, 200);
    assert!(body.contains("ok refs/heads/by-hand"), "{body}");
    assert!(fixture.refs("acme/app").contains(&new));
}

/// The bytes of a push of these objects that creates `by-hand` at `new`.
fn push(fixture: &GitFixture, dir: &Path, new: &str, objects: &[&str]) -> Vec<u8> {
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
    let sentence = "files that only the operator changes";
    for file in [
        ".github/workflows/ci.yml",
        ".github/workflows/new.yml",
        ".GitHub/Workflows/other.yml",
        ".github/actions/x/action.yml",
    ] {
        fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/main"]);
        fixture.commit(&dir, file, "on: pull_request_target\n");
        let args = ["push", "origin", "HEAD:refs/heads/workflow"];
        fixture.refused(&dir, &args, "git_path", sentence);
    }
    // Deleted.
    fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/main"]);
    fixture.git_in(&dir, &["rm", "-q", ".github/workflows/ci.yml"]);
    fixture.git_in(&dir, &["commit", "-q", "-m", "without"]);
    let args = ["push", "origin", "HEAD:refs/heads/workflow"];
    fixture.refused(&dir, &args, "git_path", sentence);
    // Changed and restored; but a branch could be created at the commit in between.
    fixture.git_in(&dir, &["revert", "--no-edit", "HEAD"]);
    let args = ["push", "origin", "HEAD:refs/heads/workflow"];
    fixture.refused(&dir, &args, "git_path", sentence);
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
    let sentence = "files that only the operator changes";
    fixture.refused(&dir, &args, "git_path", sentence);
    // A commit that upstream had and no ref reaches any more.
    fixture.git_in(&upstream, &["branch", "-q", "-D", "develop"]);
    fixture.git_in(&upstream, &["update-ref", "-d", "refs/heads/fine"]);
    fixture.git_in(&upstream, &["update-ref", "-d", "refs/tags/v1"]);
    fixture.git_in(&dir, &["checkout", "-q", "-B", "try", "origin/develop"]);
    fixture.commit(&dir, "src/b", "b\n");
    fixture.refused(&dir, &args, "git_path", sentence);
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
    let there = fixture.refs("acme/app");
    assert!(
        there.contains(&head) && there.contains("refs/tags/v1"),
        "{there}"
    );

    // A new repository with SHA-256 object names.
    fixture.bare("acme/long", &["--object-format=sha256"]);
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
        output::stderr(&output).contains("holds a secret"),
        "{}",
        describe(&output)
    );
}

#[test]
fn force_push_is_refused_if_configured() {
    let fixture = GitFixture::with(FixtureOptions {
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
    fixture.refused(&dir, &args, "git_protected", "Force pushes are not allowed");
}
