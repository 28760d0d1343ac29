//! The items about git of the verification list in specification (seed) 003, with the machine's
//! git.

use std::net::SocketAddr;
use std::process::Output;

use serde_json::{Value, json};
use testkit::{output, wait};

use crate::git_fixture::{APP, FORGE, FixtureOptions, GitFixture, describe, relay};

#[test]
fn seed_003_line_01_authorized_repository_is_cloned() {
    let fixture = GitFixture::new();
    fixture.working_copy("first");
    let home = fixture.path("");
    fixture.git_in(&home, &["clone", "-q", APP, "again"]);
    let text = std::fs::read_to_string(home.join("again/README.md")).unwrap();
    assert_eq!(text, "hello\n");
}

#[test]
fn seed_003_line_02_other_repository_is_refused_with_403() {
    let fixture = GitFixture::new();
    fixture.create_bare("acme/other", &[]);
    let url = format!("{FORGE}/acme/other");
    let output = fixture.try_git(&fixture.path(""), &["clone", &url, "other"]);
    let printed = output::stderr(&output);
    assert!(!output.status.success(), "{}", describe(&output));
    assert!(
        printed.contains("Repo not authorized: acme/other"),
        "{printed}"
    );
    assert!(printed.contains("error: 403"), "{printed}");
    assert!(!fixture.path("other").exists());
    assert!(
        fixture.forge.requests().is_empty(),
        "{:?}",
        fixture.forge.requests()
    );
}

#[test]
fn seed_003_line_03_branch_deletion_is_refused() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:feature-branch"]);
    let args = ["push", "origin", "--delete", "feature-branch"];
    let sentence = "Deleting refs/heads/feature-branch is not allowed";
    fixture.assert_refused(&dir, &args, "git_delete", sentence);
    assert!(
        fixture
            .refs("acme/app")
            .contains("refs/heads/feature-branch")
    );
    // A client that does not read the report is refused by the status.
    let (old, zero) = ("1".repeat(40), "0".repeat(40));
    let command = format!("{old} {zero} refs/heads/feature-branch\0");
    let body = format!("{:04x}{command}0000", command.len() + 4);
    let (status, reply) = fixture.post(&format!("{APP}/git-receive-pack"), body.as_bytes(), &[]);
    assert_eq!(status, 403, "{reply}");
    assert!(reply.contains("\"reason\":\"git_delete\""), "{reply}");
}

#[test]
fn seed_003_containers_use_their_own_repositories_only() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let other = fixture.create_bare("acme/other", &[]);
    let other = other.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", other, "HEAD:refs/heads/main"]);
    let second = json!({
        "container_id": "second", "container_ip": "127.0.0.2", "repos": ["acme/other"],
        "metadata": {"trusts_ca": true},
    });
    let registered = fixture.control("POST", "/internal/containers", &second);
    assert_eq!(registered["status"], "registered", "{registered}");

    let git = |proxy: SocketAddr, args: &[&str]| -> Output {
        let mut command = fixture.command(&dir, args);
        command.env("https_proxy", format!("http://{proxy}"));
        command.output().unwrap()
    };
    let (first, second) = (
        fixture.proxy(),
        relay("127.0.0.2".parse().unwrap(), fixture.proxy()),
    );
    for (proxy, own, foreign) in [
        (first, "acme/app", "acme/other"),
        (second, "acme/other", "acme/app"),
    ] {
        let (own, foreign_url) = (format!("{FORGE}/{own}"), format!("{FORGE}/{foreign}"));
        let listed = git(proxy, &["ls-remote", &own]);
        assert!(listed.status.success(), "{}", describe(&listed));
        assert!(output::stdout(&listed).contains("refs/heads/main"));
        let pushed = git(proxy, &["push", &own, "HEAD:refs/heads/feature"]);
        assert!(pushed.status.success(), "{}", describe(&pushed));
        let sentence = format!("Repo not authorized: {foreign}");
        for args in [
            &["ls-remote", &foreign_url][..],
            &["push", &foreign_url, "HEAD:refs/heads/stolen"],
        ] {
            let refused = git(proxy, args);
            assert!(!refused.status.success(), "{}", describe(&refused));
            let printed = output::stderr(&refused);
            assert!(printed.contains(&sentence), "{printed}");
        }
    }
    for name in ["acme/app", "acme/other"] {
        let refs = fixture.refs(name);
        assert!(refs.contains("refs/heads/feature") && !refs.contains("stolen"));
    }
}

#[test]
fn seed_003_push_above_the_warning_size_is_allowed_and_recorded() {
    let fixture = GitFixture::with_options(FixtureOptions {
        policy: "git: {push_limits: {warning_bytes: 1000, hard_limit_bytes: 1000000}}\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    fixture.commit(&dir, "small", "few bytes\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/small"]);
    fixture.commit(&dir, "large", &"more than a thousand bytes\n".repeat(100));
    let output = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/large"]);
    assert!(output.status.success(), "{}", describe(&output));
    let printed = output::stderr(&output);
    assert!(
        printed.contains("remote: palisade: this push has"),
        "{printed}"
    );
    assert!(fixture.refs("acme/app").contains("refs/heads/large"));

    let pushes = || -> Option<Vec<Value>> {
        let records = fixture.records().into_iter();
        let pushes: Vec<Value> = records
            .filter(|record| record["operation"] == "push")
            .collect();
        (pushes.len() == 2).then_some(pushes)
    };
    let pushes = wait::until("records of both pushes", pushes);
    assert_eq!(pushes[0]["event"], Value::Null, "{}", pushes[0]);
    let large = &pushes[1];
    assert_eq!(large["event"], "large_push", "{large}");
    assert_eq!(
        (&large["verdict"], &large["repo"]),
        (&json!("allow"), &json!("acme/app"))
    );
    assert_eq!(large["refs"], json!(["refs/heads/large"]));

    let log = fixture.ok(&["gate", "logs"]);
    let lines = log.lines();
    let warned: Vec<&str> = lines
        .filter(|line| line.contains("git push is above the warning size"))
        .collect();
    assert_eq!(warned.len(), 1, "{log}");
    for part in ["WARN", "sandbox=agent", "repo=\"acme/app\"", "bytes="] {
        assert!(warned[0].contains(part), "no {part} in {}", warned[0]);
    }
}

#[test]
fn git_operations_are_counted_by_outcome() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let hook = fixture.upstream("acme/app").join("hooks/update");
    std::fs::create_dir_all(hook.parent().unwrap()).unwrap();
    std::fs::write(&hook, "#!/bin/sh\ncase $1 in */hooked) exit 1;; esac\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&hook, mode).unwrap();
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/fine"]);
    let rejected = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/hooked"]);
    assert!(!rejected.status.success(), "{}", describe(&rejected));
    fixture.commit(&dir, "new", "new\n");
    let refused = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/main"]);
    assert!(!refused.status.success(), "{}", describe(&refused));
    for (verdict, outcome) in [("allow", "ok"), ("allow", "rejected"), ("deny", "refused")] {
        let series = format!(
            "proxy_git_operations_total{{operation=\"push\",verdict=\"{verdict}\",outcome=\"{outcome}\"}} 1"
        );
        wait::until_or(
            || fixture.metrics().contains(&series).then_some(()),
            || format!("{series} in\n{}", fixture.metrics()),
        );
    }
}
