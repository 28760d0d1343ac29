//! Pushes that pass.

use testkit::{output, wait};

use crate::git_fixture::{FixtureOptions, GitFixture, describe, gits};

#[test]
fn pushes_pass_in_every_form() {
    let mut fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 1, 2] {
            let fixture = fixture.use_git(git, version);
            if at + usize::from(version) > 0 {
                // The rate limit allows ten pushes at once, then one per second. A restart of the
                // gate resets the limit.
                fixture.ok(&["gate", "restart"]);
            }
            let name = |what: &str| format!("{what}-{at}-{version}");
            let branch = name("branch");
            fixture.restart_gate();
            fixture.commit(&dir, &name("file"), "one\n");
            fixture.git_in(
                &dir,
                &["push", "-q", "origin", &format!("HEAD:refs/heads/{branch}")],
            );
            // The sandbox's own branch is fast-forwarded, and rewritten.
            fixture.commit(&dir, &name("file"), "two\n");
            fixture.git_in(
                &dir,
                &["push", "-q", "origin", &format!("HEAD:refs/heads/{branch}")],
            );
            fixture.git_in(&dir, &["commit", "-q", "--amend", "-m", "again"]);
            let forced = format!("+HEAD:refs/heads/{branch}");
            fixture.git_in(&dir, &["push", "-q", "origin", &forced]);
            // An atomic push of several branches and a tag, with a push option.
            fixture.git_in(&dir, &["tag", "-a", "-m", "a tag", &name("v")]);
            let (tag, more, third) = (name("v"), name("more"), name("third"));
            let refs = [
                format!("HEAD:refs/heads/{more}"),
                format!("refs/tags/{tag}"),
                format!("HEAD:refs/heads/{third}"),
            ];
            let args = ["push", "-q", "--atomic", "-o", "ci.skip", "origin"];
            let refs: Vec<&str> = refs.iter().map(String::as_str).collect();
            fixture.git_in(&dir, &[&args[..], &refs].concat());
            let refs_after = fixture.refs("acme/app");
            for name in [branch, more, tag, third] {
                assert!(refs_after.contains(&name), "{name} in {refs_after}");
            }
            let head = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
            assert!(refs_after.contains(&head));
            // A push without changes.
            let forced = format!("HEAD:refs/heads/{}", name("more"));
            let output = fixture.try_git(&dir, &["push", "origin", &forced]);
            assert!(output.status.success());
            assert!(
                output::stderr(&output).contains("up-to-date"),
                "{}",
                describe(&output)
            );
        }
    }
    let metrics = fixture.metrics();
    assert!(
        metrics.contains(
            "proxy_git_operations_total{operation=\"push\",verdict=\"allow\",outcome=\"ok\"}"
        ),
        "{metrics}"
    );
    let pushes = || {
        let records = fixture.records();
        let push = records
            .into_iter()
            .find(|record| record["operation"] == "push");
        push.filter(|record| record["repo"] == "acme/app" && record["refs"][0].is_string())
    };
    let record = wait::until("a record of a push", pushes);
    assert_eq!(record["verdict"], "allow");
}

#[test]
fn branch_ownership_survives_a_restart_of_the_gate() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let upstream = fixture.upstream("acme/app");
    let upstream = upstream.to_str().unwrap().to_owned();
    fixture.git_in(&dir, &["push", "-q", &upstream, "HEAD:refs/heads/theirs"]);
    fixture.commit(&dir, "a", "a\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/mine"]);
    let recorded = || {
        let mut records = fixture.records().into_iter();
        records.find(|record| record["event"] == "branch_made")
    };
    let record = wait::until("a record of the branch", recorded);
    assert_eq!(record["refs"], serde_json::json!(["refs/heads/mine"]));
    fixture.ok(&["gate", "restart"]);
    fixture.commit(&dir, "b", "b\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/mine"]);
    let args = ["push", "origin", "HEAD:refs/heads/theirs"];
    fixture.assert_refused(&dir, &args, "git_protected", "was not made by this sandbox");
}

#[test]
fn advertisement_disables_thin_packs() {
    let mut fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    for version in [0, 1] {
        let fixture = fixture.use_git(gits()[0], version);
        fixture.commit(&dir, &format!("file-{version}"), "text\n");
        let spec = format!("HEAD:refs/heads/new-{version}");
        let mut command = fixture.command(&dir, &["push", "-q", "origin", &spec]);
        let output = command.env("GIT_TRACE_PACKET", "1").output().unwrap();
        let printed = output::stderr(&output);
        assert!(output.status.success(), "{printed}");
        let advertised = printed.lines().find(|line| line.contains("report-status"));
        assert!(advertised.unwrap().contains(" no-thin"), "{printed}");
    }
}

#[test]
fn branch_that_upstream_refused_has_no_owner() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let upstream = fixture.upstream("acme/app");
    std::fs::write(
        upstream.join("hooks/update"),
        "#!/bin/sh\necho never; exit 1\n",
    )
    .unwrap();
    let hook = upstream.join("hooks/update");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&hook, mode).unwrap();
    let output = fixture.try_git(&dir, &["push", "origin", "HEAD:refs/heads/new"]);
    // Upstream's own refusal is passed on unchanged.
    assert!(!output.status.success());
    let printed = output::stderr(&output);
    assert!(
        printed.contains("remote: never") && printed.contains("hook declined"),
        "{printed}"
    );
    std::fs::remove_file(hook).unwrap();
    let path = upstream.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/new"]);
    fixture.commit(&dir, "a", "a\n");
    let args = ["push", "origin", "HEAD:refs/heads/new"];
    fixture.assert_refused(&dir, &args, "git_protected", "was not made by this sandbox");
}

#[test]
fn listed_branches_are_open_to_pushes() {
    let fixture = GitFixture::with_options(FixtureOptions {
        git: "  pushable: [\"team/*\"]\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/team/a"]);
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/other"]);
    fixture.commit(&dir, "a", "a\n");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/team/a"]);
    let args = ["push", "origin", "HEAD:refs/heads/other"];
    fixture.assert_refused(&dir, &args, "git_protected", "was not made by this sandbox");
}

#[test]
fn bot_pushes_only_to_its_own_namespaces() {
    let fixture = GitFixture::with_options(FixtureOptions {
        bot: true,
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    for branch in ["sandbox/one", "palisade/two"] {
        let spec = format!("HEAD:refs/heads/{branch}");
        fixture.git_in(&dir, &["push", "-q", "origin", &spec]);
    }
    for branch in ["main", "feature", "sandboxed"] {
        let spec = format!("HEAD:refs/heads/{branch}");
        fixture.commit(&dir, branch, "x\n");
        let args = ["push", "origin", &spec];
        fixture.assert_refused(
            &dir,
            &args,
            "git_namespace",
            "sandbox/* and palisade/* only",
        );
    }
}

#[test]
fn branch_deletion_passes_only_if_configured() {
    let fixture = GitFixture::with_options(FixtureOptions {
        policy: "policy: {allow_branch_deletion: true}\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/mine"]);
    fixture.git_in(&dir, &["push", "-q", "origin", "--delete", "mine"]);
    assert!(!fixture.refs("acme/app").contains("mine"));
    let args = ["push", "origin", "--delete", "main"];
    fixture.assert_refused(&dir, &args, "git_protected", "refs/heads/main is protected");
}

#[test]
fn ten_thousand_commits_pass_in_one_push() {
    let fixture = GitFixture::new();
    let dir = fixture.working_copy("work");
    let mut stream = String::new();
    for n in 0..10_000 {
        let data = format!("text {n}\n");
        stream.push_str(&format!(
            "commit refs/heads/long\nmark :{}\ncommitter A <a@example.com> {n} +0000\ndata 1\nx\n{}\
             M 100644 inline file-{}\ndata {}\n{data}\n",
            n + 1,
            if n == 0 {
                "from refs/heads/main^0\n".to_owned()
            } else {
                String::new()
            },
            n % 100,
            data.len(),
        ));
    }
    let mut child = fixture
        .command(&dir, &["fast-import", "--quiet"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, stream.as_bytes()).unwrap();
    drop(stdin);
    assert!(child.wait().unwrap().success());
    fixture.git_in(&dir, &["push", "-q", "origin", "long"]);
    let count = fixture.git_in(
        &fixture.upstream("acme/app"),
        &["rev-list", "--count", "long"],
    );
    assert_eq!(count, "10001");
}

#[test]
fn operators_policy_bundle_allows_and_denies_pushes() {
    let fixture = GitFixture::with_options(FixtureOptions {
        top: "policies: {timeout: 10s, bundles: [{id: mine, path: mine, entrypoint: git/push}]}\n",
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/ok/one"]);
    fixture.commit(&dir, "a", "a\n");
    let args = ["push", "origin", "HEAD:refs/heads/other"];
    fixture.assert_refused(&dir, &args, "rego_denied", "Only below ok.");
}
