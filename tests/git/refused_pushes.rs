//! Refused pushes: git prints the gate's message and fails, and upstream receives nothing.

use testkit::output;

use crate::git_fixture::{GitFixture, describe, gits};

const TARGET: &str = "https://forge.example/acme/app/git-receive-pack";

#[test]
fn every_ref_rule_refuses_with_a_message_git_prints() {
    let mut fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap().to_owned();
    for name in ["refs/heads/theirs", "refs/tags/v1", "refs/heads/release/1"] {
        let spec = format!("HEAD:{name}");
        fixture.git_in(&dir, &["push", "-q", &path, &spec]);
    }
    fixture.commit(&dir, "a", "a\n");
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 2] {
            let fixture = fixture.use_git(git, version);
            if at + usize::from(version) > 0 {
                // The rate limit allows ten pushes at once, then one per second. A restart of the
                // gate resets the limit.
                fixture.ok(&["gate", "restart"]);
            }
            for (specs, reason, sentence) in [
                (
                    &["HEAD:refs/heads/main"][..],
                    "git_protected",
                    "refs/heads/main is protected",
                ),
                (
                    &["HEAD:refs/heads/Main"],
                    "git_protected",
                    "refs/heads/Main is protected",
                ),
                (
                    &["+HEAD:refs/heads/release/1"],
                    "git_protected",
                    "refs/heads/release/1 is protected",
                ),
                (
                    &["HEAD:refs/heads/theirs"],
                    "git_protected",
                    "was not made by this sandbox",
                ),
                (
                    &["+HEAD:refs/tags/v1"],
                    "git_protected",
                    "existing tags are not moved",
                ),
                (
                    &[":refs/heads/theirs"],
                    "git_delete",
                    "Deleting refs/heads/theirs is not allowed",
                ),
                (
                    &["HEAD:refs/heads/fine", ":refs/heads/theirs"],
                    "git_delete",
                    "another ref of this push was refused",
                ),
                (
                    &["HEAD:refs/notes/x"],
                    "git_namespace",
                    "only branches and tags may be pushed",
                ),
                (
                    &["HEAD:refs/replace/x"],
                    "git_namespace",
                    "only branches and tags may be pushed",
                ),
                (
                    &["HEAD:refs/pull/1/head"],
                    "git_namespace",
                    "only branches and tags may be pushed",
                ),
            ] {
                let args = [&["push", "origin"], specs].concat();
                fixture.assert_refused(&dir, &args, reason, sentence);
            }
        }
    }
    fixture.ok(&["gate", "restart"]);
    let args = [
        "push",
        "--atomic",
        "origin",
        "HEAD:refs/heads/fine",
        "HEAD:refs/heads/main",
    ];
    fixture.assert_refused(&dir, &args, "git_protected", "refs/heads/main is protected");
    let metrics = fixture.metrics();
    assert!(
        metrics.contains("proxy_git_push_blocked_total{reason=\"git_protected\"} 1"),
        "{metrics}"
    );
}

#[test]
fn push_to_a_host_outside_git_hosts_is_refused() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let url = "https://elsewhere.example/acme/app.git";
    let before = fixture.forge.requests().len();
    let output = fixture.try_git(&dir, &["push", url, "HEAD:refs/heads/feature"]);
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{}", describe(&output));
    assert!(
        printed.contains("remote: Pushes to elsewhere.example are not allowed"),
        "{printed}"
    );
    let (status, body) = fixture.post(&format!("{url}/git-receive-pack"), b"0000", &[]);
    assert_eq!(status, 403, "{body}");
    assert!(body.contains("\"rule\":\"git.hosts\""), "{body}");
    assert_eq!(fixture.forge.requests().len(), before);
    // Reads from that host are allowed by the allowlist.
    fixture.git_in(&dir, &["ls-remote", url]);
}

#[test]
fn ref_name_that_is_not_utf8_is_refused() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let mut command = fixture.command(&dir, &["push", "origin"]);
    command
        .arg(std::os::unix::ffi::OsStrExt::from_bytes(b"HEAD:refs/heads/\xff") as &std::ffi::OsStr);
    let output = command.output().unwrap();
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{}", describe(&output));
    assert!(
        printed.contains("The name of a ref is not UTF-8"),
        "{printed}"
    );
    assert!(printed.contains("git_malformed"), "{printed}");
    assert_eq!(fixture.forge.pushed_bytes(), 0);
}

#[test]
fn pushes_beyond_the_rate_limit_are_refused() {
    let fixture = GitFixture::new();
    let file = fixture.path("push");
    std::fs::write(&file, push_body()).unwrap();
    let data = format!("@{}", file.display());
    let kind = "content-type: application/x-git-receive-pack-request";
    let mut args = vec!["-H", kind, "--data-binary", &data];
    args.extend([TARGET; 40]);
    // curl sends the requests one after the other on one connection.
    let (_, reply) = fixture.curl(&args);
    let count = |word: &str| reply.matches(word).count();
    let (decided, rate) = (
        count("ng refs/heads/main palisade: git_protected"),
        count("palisade: git_rate"),
    );
    assert_eq!(decided + rate, 40, "{reply}");
    assert!(
        decided >= 10 && rate > 0,
        "{decided} decided, {rate} over the limit"
    );
    assert!(reply.contains("Too many pushes in too short a time: wait 1 s."));
    assert_eq!(fixture.forge.pushed_bytes(), 0);
}

/// The request body of a push to a protected branch.
fn push_body() -> Vec<u8> {
    let (zero, new) = ("0".repeat(40), "1".repeat(40));
    let command = format!("{zero} {new} refs/heads/main\0report-status side-band-64k");
    let mut body = format!("{:04x}{command}0000", command.len() + 4).into_bytes();
    body.extend_from_slice(b"PACK\0\0\0\x02\0\0\0\0");
    body.extend_from_slice(&[7; 20]);
    body
}
