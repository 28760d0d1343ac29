//! Size limits of a push, and its memory in the gate.

use serde_json::json;
use testkit::output;

use crate::git_fixture::{FixtureOptions, GitFixture, describe};

const TARGET: &str = "https://forge.example/acme/app.git/git-receive-pack";

/// The body of a push with exactly this length.
fn body(length: usize) -> Vec<u8> {
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let command = format!("{zero} {one} refs/heads/main\0report-status");
    let mut body = format!("{:04x}{command}0000", command.len() + 4).into_bytes();
    body.extend_from_slice(b"PACK\0\0\0\x02");
    body.resize(length, 7);
    body
}

#[test]
fn seed_003_push_over_the_limit_is_413_with_the_guidance() {
    let guidance = json!({
        "message": "Your push exceeds the size limit. Alternatives:",
        "options": [
            "Split into smaller commits and push incrementally",
            "Use Git LFS for large binary files",
            "Request per-repository limit increase"
        ],
        "example": [
            "git push origin HEAD~50:refs/heads/branch",
            "git push origin HEAD:refs/heads/branch"
        ]
    });
    for (options, limit) in [
        (
            FixtureOptions {
                policy: "git: {push_limits: {warning_bytes: 500, hard_limit_bytes: 1000}}\n",
                ..FixtureOptions::default()
            },
            1000,
        ),
        (
            FixtureOptions {
                policy: "git: {push_limits: {warning_bytes: 500, hard_limit_bytes: 1000}}\n",
                limit: Some(3000),
                ..FixtureOptions::default()
            },
            3000,
        ),
    ] {
        let fixture = GitFixture::with_options(options);
        let (status, reply) = fixture.post(TARGET, &body(limit), &[]);
        assert_eq!(status, 200, "{reply}");
        assert!(
            reply.contains("git_protected"),
            "the push was not parsed: {reply}"
        );
        let (status, reply) = fixture.post(TARGET, &body(limit + 1), &[]);
        assert_eq!(status, 413, "{reply}");
        let reply: serde_json::Value = serde_json::from_str(&reply).unwrap();
        assert_eq!(reply["error"], "Push size exceeds limit");
        assert_eq!(reply["details"]["push_size_bytes"], limit + 1);
        assert_eq!(reply["details"]["limit_bytes"], limit);
        assert_eq!(reply["reason"], "git_size");
        assert_eq!(reply["guidance"], guidance);
        assert_eq!(fixture.forge.requests().len(), 0);
    }
}

/// Bytes that do not compress.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[test]
fn push_of_ninety_megabytes_is_spooled_to_disk() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    std::fs::write(dir.join("large"), noise(90 << 20)).unwrap();
    fixture.git_in(&dir, &["add", "-A"]);
    fixture.git_in(&dir, &["commit", "-q", "-m", "large"]);
    let (_, idle) = fixture.memory();
    let output = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/large"]);
    assert!(output.status.success(), "{}", describe(&output));
    let printed = output::stderr(&output);
    assert!(
        printed.contains("remote: palisade: this push has 90"),
        "{printed}"
    );
    let (most, _) = fixture.memory();
    assert!(
        most - idle < 64 * 1024,
        "{idle} KiB idle, {most} KiB at most"
    );
    assert!(fixture.refs("acme/app").contains("refs/heads/large"));
    let left = std::fs::read_dir(fixture.path("state/spool"))
        .unwrap()
        .count();
    assert_eq!(left, 0);
}

#[test]
fn git_prints_the_refusal_of_an_oversized_push() {
    let fixture = GitFixture::with_options(FixtureOptions {
        policy: "git: {push_limits: {warning_bytes: 500, hard_limit_bytes: 3000000}}\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    std::fs::write(dir.join("large"), noise(4 << 20)).unwrap();
    fixture.git_in(&dir, &["add", "-A"]);
    fixture.git_in(&dir, &["commit", "-q", "-m", "large"]);
    let before = fixture.refs("acme/app");
    let output = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/large"]);
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{printed}");
    assert!(printed.contains("413"), "{printed}");
    assert_eq!(fixture.refs("acme/app"), before);
    assert_eq!(
        fixture.forge.pushed_bytes(),
        0,
        "upstream received data of the push"
    );
}
