//! Mirrors over HTTP, of upstreams that the gate accesses over SSH or HTTPS.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use testkit::gate::GateDir;
use testkit::sshd::Sshd;
use testkit::{output, wait};

use crate::git_fixture::{describe, gits, relay};
use crate::mirror_fixture::{APP, MirrorFixture, MirrorOptions, SECRET};

#[test]
fn clone_fetch_and_push_work_with_every_git_version() {
    let mut fixture = MirrorFixture::new(&MirrorOptions::default());
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 1, 2] {
            fixture.git_fixture.use_git(git, version);
            let name = |what: &str| format!("{what}-{at}-{version}");
            let dir = fixture.clone_as(&name("work"));
            let git_fixture = &fixture.git_fixture;
            let head = git_fixture.git_in(&dir, &["symbolic-ref", "--short", "HEAD"]);
            assert_eq!(head, "trunk", "HEAD is the upstream's HEAD");
            git_fixture.git_in(&dir, &["fsck", "--strict"]);

            let (branch, tag) = (name("branch"), name("v"));
            let spec = format!("HEAD:refs/heads/{branch}");
            git_fixture.commit(&dir, "one", "one\n");
            git_fixture.git_in(&dir, &["push", "-q", "origin", &spec]);
            git_fixture.git_in(&dir, &["commit", "-q", "--amend", "-m", "again"]);
            let forced = format!("+{spec}");
            git_fixture.git_in(&dir, &["tag", "-a", "-m", "a tag", &tag]);
            let args = ["push", "-q", "--atomic", "-o", "ci.skip", "origin"];
            git_fixture.git_in(&dir, &[&args[..], &[&forced, &tag]].concat());
            let pushed = git_fixture.git_in(&dir, &["rev-parse", "HEAD"]);
            let refs = fixture.refs();
            assert!(refs.contains(&format!("refs/heads/{branch} {pushed}")));
            assert!(refs.contains(&tag), "{tag} in {refs}");

            let upstream_commit = fixture.commit_upstream(&name("there"), "refs/heads/trunk");
            let git_fixture = &fixture.git_fixture;
            git_fixture.git_in(&dir, &["fetch", "-q", "origin"]);
            let seen = git_fixture.git_in(&dir, &["rev-parse", "origin/trunk"]);
            assert_eq!(
                seen, upstream_commit,
                "a new upstream commit is fetched immediately"
            );
        }
    }
    let record = || {
        let mut records = fixture.git_fixture.records().into_iter();
        records.find(|record| record["operation"] == "push" && record["repo"] == "app")
    };
    let record = wait::until("a record of a push", record);
    assert_eq!(
        (&record["kind"], &record["verdict"], &record["rule"]),
        (&"git".into(), &"allow".into(), &"git.mirrors".into())
    );
    let metrics = fixture.git_fixture.metrics();
    let counted =
        "proxy_git_operations_total{operation=\"fetch\",verdict=\"allow\",outcome=\"ok\"}";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn shallow_and_partial_clones_work() {
    let mut fixture = MirrorFixture::new(&MirrorOptions::default());
    fixture.commit_upstream("two", "refs/heads/trunk");
    for version in [0, 2] {
        fixture.git_fixture.use_git(gits()[0], version);
        let (git_fixture, top) = (&fixture.git_fixture, fixture.git_fixture.path(""));
        let (shallow, partial) = (format!("shallow-{version}"), format!("partial-{version}"));
        git_fixture.git_in(&top, &["clone", "-q", "--depth=1", APP, &shallow]);
        let count = git_fixture.git_in(&top.join(&shallow), &["rev-list", "--count", "HEAD"]);
        assert_eq!(count, "1");
        git_fixture.git_in(&top.join(&shallow), &["fetch", "-q", "--unshallow"]);
        let count = git_fixture.git_in(&top.join(&shallow), &["rev-list", "--count", "HEAD"]);
        assert_eq!(count, "2");
        git_fixture.git_in(&top, &["clone", "-q", "--filter=blob:none", APP, &partial]);
        assert!(top.join(partial).join("two").exists());
    }
}

#[test]
fn mirror_head_follows_upstream_head() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    fixture.clone_as("before");
    fixture.commit_upstream("next", "refs/heads/next");
    let args = ["symbolic-ref", "HEAD", "refs/heads/next"];
    fixture.git_fixture.git_in(&fixture.bare(), &args);
    let dir = fixture.clone_as("after");
    let head = fixture
        .git_fixture
        .git_in(&dir, &["symbolic-ref", "--short", "HEAD"]);
    assert_eq!(head, "next");
    fixture
        .git_fixture
        .git_in(&fixture.bare(), &["update-ref", "-d", "refs/heads/trunk"]);
    let listed = fixture
        .git_fixture
        .git_in(&dir, &["ls-remote", "--heads", APP]);
    assert!(
        !listed.contains("trunk"),
        "a deleted branch is still listed: {listed}"
    );
}

#[test]
fn unreachable_upstream_is_reported_and_no_stale_data_served() {
    let mut fixture = MirrorFixture::new(&MirrorOptions::default());
    let dir = fixture.clone_as("work");
    fixture.git_fixture.commit(&dir, "a", "a\n");
    fixture.sshd.stop();
    let started = Instant::now();
    let sentence = "The upstream of mirror 'app' cannot be used: it refuses the connection.";
    let top = fixture.git_fixture.path("");
    for args in [
        &["clone", "-q", APP, "again"][..],
        &["-C", "work", "fetch", "origin"],
        &["-C", "work", "push", "origin", "HEAD:refs/heads/new"],
    ] {
        let output = fixture.assert_refused(&top, args, sentence);
        let printed = output::stderr(&output);
        let port = fixture.sshd.address().port().to_string();
        assert!(
            !printed.contains(&port),
            "the message contains the upstream's port: {printed}"
        );
    }
    assert!(started.elapsed() < Duration::from_secs(90));
    fixture.sshd.run();
    fixture.git_fixture.git_in(&dir, &["fetch", "-q", "origin"]);
}

#[test]
fn silent_upstream_times_out() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let fixture = MirrorFixture::new(&MirrorOptions {
        address: Some(silent.local_addr().unwrap()),
        ..MirrorOptions::default()
    });
    let top = fixture.git_fixture.path("");
    let started = Instant::now();
    let sentence = "The upstream of mirror 'app' cannot be used: it did not answer in time.";
    fixture.assert_refused(&top, &["clone", "-q", APP, "work"], sentence);
    assert!(started.elapsed() < Duration::from_secs(90));
}

#[test]
fn stale_locks_of_a_killed_git_do_not_block_fetches() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    let dir = fixture.clone_as("work");
    let mut mirrors = std::fs::read_dir(fixture.git_fixture.state().join("mirrors")).unwrap();
    let mirror = mirrors.next().unwrap().unwrap().path();
    for name in ["HEAD.lock", "packed-refs.lock", "refs/heads/trunk.lock"] {
        std::fs::write(mirror.join(name), "").unwrap();
    }
    let upstream_commit = fixture.commit_upstream("more", "refs/heads/trunk");
    fixture.git_fixture.git_in(&dir, &["fetch", "-q", "origin"]);
    let seen = fixture
        .git_fixture
        .git_in(&dir, &["rev-parse", "origin/trunk"]);
    assert_eq!(seen, upstream_commit);
}

#[test]
fn upstream_with_wrong_host_key_is_refused() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        wrong_host_key: true,
        ..MirrorOptions::default()
    });
    let top = fixture.git_fixture.path("");
    let sentence = "its host key is not the one that was configured";
    fixture.assert_refused(&top, &["clone", "-q", APP, "work"], sentence);
    let seed = fixture.git_fixture.path("seed");
    let push = ["push", APP, "HEAD:refs/heads/new"];
    fixture.assert_refused(&seed, &push, sentence);
    assert!(
        !fixture.sshd.log().contains("Accepted"),
        "the client authenticated to the wrong host"
    );
}

#[test]
fn pushes_to_a_mirror_are_checked() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    let dir = fixture.clone_as("work");
    let git_fixture = &fixture.git_fixture;
    git_fixture.commit(&dir, "a", "a\n");
    git_fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/mine"]);
    for (spec, sentence) in [
        ("HEAD:refs/heads/main", "git_protected"),
        ("HEAD:refs/heads/trunk", "was not made by this sandbox"),
        (":refs/heads/mine", "git_delete"),
        ("HEAD:refs/notes/commits", "git_namespace"),
    ] {
        let output = fixture.assert_refused(&dir, &["push", "origin", spec], sentence);
        assert!(output::stderr(&output).contains("remote: palisade: "));
    }
    git_fixture.commit(&dir, "b", &format!("key = \"{SECRET}\"\n"));
    let output = fixture.assert_refused(
        &dir,
        &["push", "origin", "HEAD:refs/heads/mine"],
        "secret_found",
    );
    assert!(!output::stderr(&output).contains(SECRET));
    git_fixture.git_in(&dir, &["reset", "-q", "--hard", "HEAD~"]);
    git_fixture.commit(&dir, ".github/workflows/ci.yaml", "on: push\n");
    let push = ["push", "origin", "HEAD:refs/heads/mine"];
    fixture.assert_refused(&dir, &push, "git_path");
    git_fixture.git_in(&dir, &["reset", "-q", "--hard", "HEAD~"]);
    git_fixture.commit(&dir, "c", "c\n");
    git_fixture.git_in(&dir, &push);
    let blocked = || {
        let mut records = git_fixture.records().into_iter();
        records.find(|record| record["reason"] == "secret_found" && record["repo"] == "app")
    };
    let record = wait::until("a record of the refusal", blocked);
    assert_eq!(record["operation"], "push");
}

#[test]
fn restricted_paths_that_upstream_has_are_no_change() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    fixture.commit_upstream(".github/workflows/ci.yaml", "refs/heads/trunk");
    let dir = fixture.clone_as("work");
    let git_fixture = &fixture.git_fixture;
    git_fixture.commit(&dir, "a", "a\n");
    git_fixture.git_in(&dir, &["push", "-q", "origin", "HEAD:refs/heads/mine"]);
    assert!(fixture.refs().contains("refs/heads/mine"));
}

#[test]
fn bot_pushes_only_to_its_own_namespaces() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        bot: true,
        ..MirrorOptions::default()
    });
    let dir = fixture.clone_as("work");
    fixture.git_fixture.commit(&dir, "a", "a\n");
    let push = ["push", "origin", "HEAD:refs/heads/feature"];
    fixture.assert_refused(&dir, &push, "git_namespace");
    let push = ["push", "-q", "origin", "HEAD:refs/heads/sandbox/feature"];
    fixture.git_fixture.git_in(&dir, &push);
}

#[test]
fn unknown_mirror_is_refused_with_a_message_git_prints() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    let top = fixture.git_fixture.path("");
    let other = "http://palisade.internal/git/other";
    let sentence = "There is no mirror 'other' here.";
    fixture.assert_refused(&top, &["clone", "-q", other, "work"], sentence);
    for spelling in ["app.git", "APP", "%61pp"] {
        let url = format!("http://palisade.internal/git/{spelling}");
        fixture.git_fixture.git_in(&top, &["ls-remote", "-q", &url]);
    }
    for closed in ["", "/HEAD", "/objects/info/packs", "/info/refs", "/../../x"] {
        let (status, reply) = fixture
            .git_fixture
            .curl(&["--path-as-is", &format!("{APP}{closed}")]);
        assert!(
            matches!(status, 400 | 403 | 404),
            "{closed}: {status} {reply}"
        );
    }
}

#[test]
fn https_upstream_is_mirrored_without_a_key() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        https: true,
        ..MirrorOptions::default()
    });
    let head = ["symbolic-ref", "HEAD", "refs/heads/trunk"];
    fixture.git_fixture.git_in(&fixture.bare(), &head);
    let dir = fixture.clone_as("work");
    fixture.git_fixture.commit(&dir, "a", "a\n");
    let push = ["push", "-q", "origin", "HEAD:refs/heads/mine"];
    fixture.git_fixture.git_in(&dir, &push);
    assert!(fixture.refs().contains("refs/heads/mine"));
    let push = ["push", "origin", "HEAD:refs/heads/main"];
    fixture.assert_refused(&dir, &push, "git_protected");
}

#[test]
fn ssh_key_appears_in_no_sandbox_or_state_file() {
    for key_from_command in [false, true] {
        assert_key_not_found(&MirrorFixture::new(&MirrorOptions {
            key_from_command,
            ..MirrorOptions::default()
        }));
    }
}

fn assert_key_not_found(fixture: &MirrorFixture) {
    let dir = fixture.clone_as("work");
    fixture.git_fixture.commit(&dir, "a", "a\n");
    let mut command = fixture
        .git_fixture
        .command(&dir, &["push", "-v", "origin", "HEAD:refs/heads/mine"]);
    command
        .env("GIT_TRACE_PACKET", "1")
        .env("GIT_CURL_VERBOSE", "1");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", describe(&output));
    let key = std::fs::read_to_string(fixture.sshd.key()).unwrap();
    let line = key.lines().nth(1).unwrap();
    let path = fixture.sshd.key().display().to_string();
    let received = describe(&output);
    assert!(
        !received.contains(line) && !received.contains(&path),
        "{received}"
    );
    for file in files(&fixture.git_fixture.state()) {
        let bytes = std::fs::read(&file).unwrap_or_default();
        let found = bytes
            .windows(line.len())
            .any(|part| part == line.as_bytes());
        assert!(!found, "the key is in {}", file.display());
    }
}

/// Every file below a directory.
fn files(below: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![below.to_owned()];
    while let Some(dir) = left.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                left.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found
}

#[test]
fn sandbox_uses_the_mirror_at_the_upstream_url() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    let git_fixture = &fixture.git_fixture;
    git_fixture.ok(&["create", "inside", "--no-repo"]);
    let at = fixture.bare();
    let line = format!(
        "cd ~ && git clone -q ssh://git.example{} work && cd work && echo a > a && git add a && \
         git -c user.name=A -c user.email=a@example.com commit -qm a && \
         git push -q origin HEAD:refs/heads/from-inside && ! env | grep -i 'private key' && \
         ! git push -q origin HEAD:refs/heads/main",
        at.display()
    );
    let printed = git_fixture.ok(&["exec", "inside", "--", "sh", "-c", &line]);
    assert_eq!(printed, "", "git prints nothing");
    let refs = fixture.refs();
    assert!(refs.contains("refs/heads/from-inside"), "{refs}");
    assert!(!refs.contains("refs/heads/main"), "{refs}");
    git_fixture.ok(&["delete", "inside", "--force"]);
}

#[test]
fn concurrent_pushes_of_two_sandboxes_lose_nothing() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    let body = serde_json::json!({
        "container_id": "second", "container_ip": "127.0.0.2", "repos": [],
        "auth_mode": "user",
    });
    fixture
        .git_fixture
        .control("POST", "/internal/containers", &body);
    let relay = relay(
        Ipv4Addr::new(127, 0, 0, 2).into(),
        fixture.git_fixture.proxy(),
    );
    let dirs = [fixture.clone_as("one"), fixture.clone_as("two")];
    let pushed_refs: Vec<String> = std::thread::scope(|scope| {
        let push = |who: usize, dir: &Path| {
            let mut pushed = Vec::new();
            for n in 0..4 {
                fixture
                    .git_fixture
                    .commit(dir, &format!("{who}-{n}"), "text\n");
                let name = format!("refs/heads/own-{who}-{n}");
                let spec = format!("HEAD:{name}");
                let mut command = fixture
                    .git_fixture
                    .command(dir, &["push", "-q", "origin", &spec]);
                if who == 1 {
                    command.env("http_proxy", format!("http://{relay}"));
                }
                let output = command.output().unwrap();
                assert!(output.status.success(), "{}", describe(&output));
                let head = fixture.git_fixture.git_in(dir, &["rev-parse", "HEAD"]);
                pushed.push(format!("{name} {head}"));
            }
            pushed
        };
        let threads: Vec<_> = dirs
            .iter()
            .enumerate()
            .map(|(who, dir)| scope.spawn(move || push(who, dir)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.flatten().collect()
    });
    let refs = fixture.refs();
    for pushed in pushed_refs {
        assert!(refs.contains(&pushed), "{pushed} in {refs}");
    }
    fixture
        .git_fixture
        .git_in(&fixture.bare(), &["fsck", "--strict"]);
    let both_recorded = || {
        let records = fixture.git_fixture.records();
        let pushed = |who: &str| {
            let mut all = records.iter();
            all.any(|record| record["sandbox"] == who && record["operation"] == "push")
        };
        (pushed("agent") && pushed("second")).then_some(())
    };
    wait::until("records of both sandboxes", both_recorded);
}

#[test]
fn mirror_removed_from_the_configuration_is_deleted() {
    let fixture = MirrorFixture::new(&MirrorOptions::default());
    fixture.clone_as("work");
    let mirrors = fixture.git_fixture.state().join("mirrors");
    let count = || std::fs::read_dir(&mirrors).unwrap().count();
    assert_eq!(count(), 1);
    let config = fixture.git_fixture.path("palisade.yaml");
    let text = std::fs::read_to_string(&config).unwrap();
    let (rest, _) = text.split_once("  mirrors:").unwrap();
    std::fs::write(&config, rest).unwrap();
    wait::until("the mirror to be deleted", || (count() == 0).then_some(()));
    // The mirror is created again when it is configured again.
    std::fs::write(&config, text).unwrap();
    wait::until("a clone", || {
        let top = fixture.git_fixture.path("");
        let cloned = fixture
            .git_fixture
            .try_git(&top, &["clone", "-q", APP, "again"]);
        cloned.status.success().then_some(())
    });
    assert_eq!(count(), 1);
}

#[test]
fn health_names_the_program_that_mirrors_need() {
    let gate_dir = GateDir::new(env!("CARGO_BIN_EXE_palisade"));
    let programs = tempfile::tempdir().unwrap();
    let configured = |mirror: &str| {
        gate_dir.write_config(&format!("version: \"1.0\"\ngit:\n  mirrors: [{mirror}]\n"));
    };
    configured("{name: app, upstream: 'https://forge.example/acme/app'}");
    let gate = gate_dir.start_with(|command| command.env("PATH", programs.path()));
    let error = |wanted: &str| {
        wait::until(wanted, || {
            let answer = gate.get("/internal/health");
            let error = answer.json()["errors"]["git_mirrors"].clone();
            let matches = error.as_str().is_some_and(|error| error.contains(wanted));
            matches.then_some(answer.status)
        })
    };
    assert_eq!(
        error("git mirrors are unavailable: git is not installed"),
        503
    );

    std::fs::write(programs.path().join("git"), "").unwrap();
    let sshd = Sshd::start();
    configured(&format!(
        "{{name: app, upstream: 'ssh://git@git.example/app', identity: 'file:{}', host_key: '{}'}}",
        sshd.key().display(),
        sshd.host_key()
    ));
    assert_eq!(error("reached by ssh are unavailable: ssh is not"), 503);

    configured("");
    wait::until("health without mirrors", || {
        let answer = gate.get("/internal/health");
        let unlisted = answer.json()["checks"].get("git_mirrors").is_none();
        (answer.status == 200 && unlisted).then_some(())
    });
}
