//! Mirrors over the git protocol, used from a sandbox.

use std::fmt::Write as _;
use std::process::Output;

use testkit::{output, wait};

use crate::git_fixture::{describe, gits};
use crate::mirror_fixture::{MirrorFixture, MirrorOptions, SECRET};

/// The URL of the mirror inside the sandbox.
const APP: &str = "git://palisade.internal/app";

/// Options of every git command in the sandbox.
const GIT_OPTIONS: &str = "-c user.name=Agent -c user.email=agent@example.com \
                        -c init.defaultBranch=main -c gc.auto=0";

/// A sandbox with a mirror.
struct MirrorSandbox {
    fixture: MirrorFixture,
    git: String,
}

impl MirrorSandbox {
    fn new(options: &MirrorOptions) -> Self {
        let fixture = MirrorFixture::new(options);
        fixture.git_fixture.ok(&["create", "inside", "--no-repo"]);
        Self {
            fixture,
            git: format!("{} {GIT_OPTIONS}", gits()[0]),
        }
    }

    fn use_git(&mut self, git: &str, version: u8) {
        self.git = format!("{git} {GIT_OPTIONS} -c protocol.version={version}");
    }

    /// Runs shell lines, which may fail. `$git` is the git program with its options.
    fn run(&self, lines: &str) -> Output {
        let script = format!("set -e; cd ~; git='{}'; {lines}", self.git);
        let args = ["exec", "inside", "--", "timeout", "90", "bash", "-c"];
        self.fixture
            .git_fixture
            .operator(&[&args[..], &[&script]].concat())
    }

    /// Runs shell lines, which must succeed.
    #[track_caller]
    fn ok(&self, lines: &str) -> String {
        let output = self.run(lines);
        assert!(output.status.success(), "{lines}: {}", describe(&output));
        output::stdout(&output).trim_end().to_owned()
    }

    /// Runs shell lines that must fail with this sentence; upstream must not change.
    #[track_caller]
    fn assert_refused(&self, lines: &str, sentence: &str) -> String {
        let before = self.fixture.refs();
        let output = self.run(lines);
        assert!(!output.status.success(), "{lines}: {}", describe(&output));
        assert_ne!(output.status.code(), Some(124), "the command did not end");
        let printed = output::stderr(&output);
        assert!(printed.contains(sentence), "no '{sentence}' in: {printed}");
        assert_eq!(self.fixture.refs(), before);
        printed
    }

    /// The response to these bytes, up to the end of the connection.
    fn send_raw(&self, bytes: &[u8]) -> String {
        let mut octal = String::new();
        for byte in bytes {
            let _ = write!(octal, "\\{byte:03o}");
        }
        // Every address on port 9418 leads to the gate.
        let connect = "exec 3<>/dev/tcp/192.0.2.7/9418";
        let output = self.run(&format!("{connect}; printf '{octal}' >&3; cat <&3"));
        assert!(output.status.success(), "{}", describe(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    #[track_caller]
    fn wait_for_record(&self, operation: &str, verdict: &str) -> serde_json::Value {
        wait::until("a record", || {
            let mut records = self.fixture.git_fixture.records().into_iter();
            records.find(|record| record["operation"] == operation && record["verdict"] == verdict)
        })
    }
}

impl Drop for MirrorSandbox {
    fn drop(&mut self) {
        let _ = self
            .fixture
            .git_fixture
            .operator(&["delete", "inside", "--force"]);
    }
}

fn pkt(data: &[u8]) -> Vec<u8> {
    [format!("{:04x}", data.len() + 4).as_bytes(), data].concat()
}

#[test]
fn clone_fetch_and_push_work_with_every_git_version() {
    let mut sandbox = MirrorSandbox::new(&MirrorOptions::default());
    for (at, git) in gits().into_iter().enumerate() {
        for version in [0, 1, 2] {
            sandbox.use_git(git, version);
            let name = format!("{at}-{version}");
            let pushed = sandbox.ok(&format!(
                "$git clone -q {APP} work-{name}; cd work-{name}
                 test $($git symbolic-ref --short HEAD) = trunk; $git fsck --strict
                 echo one > one; $git add one; $git commit -qm one
                 $git push -q origin HEAD:refs/heads/branch-{name}
                 $git commit -q --amend -m again; $git tag -a -m 'a tag' v-{name}
                 $git push -q --atomic -o ci.skip origin +HEAD:refs/heads/branch-{name} v-{name}
                 $git push -q origin HEAD:refs/heads/branch-{name}
                 $git ls-remote -q origin refs/heads/branch-{name} | cut -f1"
            ));
            let refs = sandbox.fixture.refs();
            assert!(refs.contains(&format!("refs/heads/branch-{name} {pushed}")));
            assert!(refs.contains(&format!("refs/tags/v-{name}")), "{refs}");
            let file = format!("there-{name}");
            let upstream_commit = sandbox.fixture.commit_upstream(&file, "refs/heads/trunk");
            let seen = sandbox.ok(&format!(
                "cd work-{name}; $git fetch -q origin; $git rev-parse origin/trunk"
            ));
            assert_eq!(
                seen, upstream_commit,
                "a new upstream commit is fetched immediately"
            );
        }
    }
    let record = sandbox.wait_for_record("push", "allow");
    assert_eq!(
        (
            &record["kind"],
            &record["repo"],
            &record["rule"],
            &record["host"],
            &record["port"]
        ),
        (
            &"git".into(),
            &"app".into(),
            &"git.mirrors".into(),
            &"palisade.internal".into(),
            &9418.into()
        )
    );
    assert!(
        record["refs"][0]
            .as_str()
            .unwrap()
            .starts_with("refs/heads/branch-")
    );
    assert!(record["bytes_in"].as_u64().unwrap() > 100, "{record}");
    // A push without new commits only reads the advertisement.
    sandbox.wait_for_record("advertise_push", "allow");
    let record = sandbox.wait_for_record("fetch", "allow");
    assert!(record["bytes_in"].as_u64() > Some(0) && record["bytes_out"].as_u64() > Some(0));
    let metrics = sandbox.fixture.git_fixture.metrics();
    let counted = "proxy_git_operations_total{operation=\"push\",verdict=\"allow\",outcome=\"ok\"}";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn shallow_and_partial_clones_work_under_every_name() {
    let mut sandbox = MirrorSandbox::new(&MirrorOptions::default());
    sandbox.fixture.commit_upstream("two", "refs/heads/trunk");
    for version in [0, 2] {
        sandbox.use_git(gits()[0], version);
        let counts = sandbox.ok(&format!(
            "$git clone -q --depth=1 {APP}.git shallow-{version}; cd shallow-{version}
             $git rev-list --count HEAD; $git fetch -q --unshallow; $git rev-list --count HEAD
             $git clone -q --filter=blob:none git://192.0.2.7/git/app ../partial-{version}
             ls ../partial-{version}"
        ));
        assert_eq!(counts, "1\n2\nREADME.md\ntwo");
    }
}

#[test]
fn pushes_to_a_mirror_are_checked() {
    let sandbox = MirrorSandbox::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    sandbox.ok(&format!(
        "$git clone -q {APP} work; cd work; echo a > a; $git add a; $git commit -qm a
         $git push -q origin HEAD:refs/heads/mine"
    ));
    for (spec, sentence) in [
        ("HEAD:refs/heads/main", "git_protected"),
        ("HEAD:refs/heads/trunk", "was not made by this sandbox"),
        (":refs/heads/mine", "git_delete"),
        ("HEAD:refs/notes/commits", "git_namespace"),
    ] {
        let printed =
            sandbox.assert_refused(&format!("cd work; $git push origin {spec}"), sentence);
        assert!(printed.contains("remote: palisade: "), "{printed}");
        assert!(printed.contains("[remote rejected]"), "{printed}");
    }
    let add = |file: &str, text: &str| {
        format!(
            "cd work; mkdir -p $(dirname {file}); echo '{text}' > {file}; $git add -A; \
             $git commit -qm more; $git push origin HEAD:refs/heads/mine"
        )
    };
    let printed = sandbox.assert_refused(&add("b", SECRET), "secret_found");
    assert!(!printed.contains(SECRET), "{printed}");
    sandbox.ok("cd work; $git reset -q --hard HEAD~");
    sandbox.assert_refused(&add(".github/workflows/ci.yaml", "on: push"), "git_path");
    sandbox.ok("cd work; $git reset -q --hard HEAD~");
    sandbox.ok(&add("c", "fine"));
    let record = sandbox.wait_for_record("push", "deny");
    let id = record["request_id"].as_str().unwrap();
    let why = sandbox.fixture.git_fixture.ok(&["why", id, "--json"]);
    assert!(why.contains("git_protected"), "{why}");
}

#[test]
fn unknown_mirror_is_refused_with_a_message_git_prints() {
    let sandbox = MirrorSandbox::new(&MirrorOptions::default());
    for (path, sentence) in [
        ("other", "There is no mirror 'other' here."),
        ("acme/app", "This path is not a mirror"),
        ("git/../app", "This path is not a mirror"),
    ] {
        for line in [
            format!("$git clone -q git://palisade.internal/{path} work"),
            format!("$git init -q x; cd x; $git push git://palisade.internal/{path} :refs/heads/a"),
        ] {
            let printed = sandbox.assert_refused(&line, sentence);
            assert!(printed.contains("remote error: "), "{printed}");
            assert!(
                printed.contains("git_repo, rule git.mirrors, request "),
                "{printed}"
            );
        }
    }
    let line = format!("$git archive --remote={APP} HEAD");
    sandbox.assert_refused(&line, "The git request could not be parsed.");
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"0000",
        b"0001",
        b"zzzz",
        b"0010git-upload-p",
    ] {
        let printed = sandbox.send_raw(bytes);
        assert!(
            printed.contains("ERR The git request could not be parsed."),
            "{printed}"
        );
    }
}

#[test]
fn unreachable_upstream_is_reported() {
    let mut sandbox = MirrorSandbox::new(&MirrorOptions::default());
    sandbox.ok(&format!("$git clone -q {APP} work"));
    sandbox.fixture.sshd.stop();
    let sentence = "The upstream of mirror 'app' cannot be used: it refuses the connection.";
    for line in [
        format!("$git clone -q {APP} again"),
        "cd work; $git fetch origin".to_owned(),
        "cd work; $git push origin HEAD:refs/heads/new".to_owned(),
    ] {
        sandbox.assert_refused(&line, sentence);
    }
}

#[test]
fn push_with_malformed_or_trailing_pack_is_refused() {
    let sandbox = MirrorSandbox::new(&MirrorOptions::default());
    let (zero, new) = ("0".repeat(40), "1".repeat(40));
    let command = format!("{zero} {new} refs/heads/x\0 report-status side-band-64k");
    let begin = [
        pkt(b"git-receive-pack /app\0host=x\0"),
        pkt(command.as_bytes()),
        b"0000".to_vec(),
    ]
    .concat();
    let pack = |count: u8, rest: &[u8]| [&b"PACK\0\0\0\x02\0\0\0"[..], &[count], rest].concat();
    let empty = pack(
        0,
        b"\x02\x9d\x08\x82\x3b\xd8\xa8\xea\xb5\x10\xad\x6a\xc7\x5c\x82\x3c\xfd\x3e\xd3\x1e",
    );
    // An object of five bytes whose header has the size zero.
    let larger = b"\x30\x78\x01\x01\x05\x00\xfa\xffhello";
    for (pack, sentence) in [
        (
            [empty.clone(), b"x".to_vec()].concat(),
            "there are bytes after its end",
        ),
        (
            [empty.clone(), empty].concat(),
            "there are bytes after its end",
        ),
        (pack(1, &[0x7f; 30]), "an object cannot be unpacked"),
        (pack(1, larger), "an object cannot be unpacked"),
        (pack(1, &[0x50]), "an object cannot be read"),
        (pack(0, &[0; 20]), "its checksum is wrong"),
        (
            b"GIF89a".to_vec(),
            "the bytes after the commands are not a pack",
        ),
    ] {
        let reply = sandbox.send_raw(&[begin.as_slice(), &pack].concat());
        assert!(reply.contains(sentence), "no '{sentence}' in: {reply}");
        assert!(
            reply.contains("ng refs/heads/x palisade: git_malformed"),
            "{reply}"
        );
    }
    let reply = sandbox.send_raw(&[pkt(b"git-receive-pack /app\0"), pkt(b"nonsense")].concat());
    assert!(reply.contains("ERR The push could not be read"), "{reply}");
    assert!(!sandbox.fixture.refs().contains("refs/heads/x"));
}

#[test]
fn oversized_push_is_read_to_its_end_and_refused() {
    let sandbox = MirrorSandbox::new(&MirrorOptions {
        policy: "git: {push_limits: {warning_bytes: 1048576, hard_limit_bytes: 3145728}}\n",
        ..MirrorOptions::default()
    });
    let commit = |mib: u8| {
        format!(
            "cd work; $git reset -q --hard origin/trunk; head -c {mib}M /dev/urandom > noise; \
             $git add noise; $git commit -qm noise"
        )
    };
    sandbox.ok(&format!("$git clone -q {APP} work"));
    sandbox.ok(&commit(2));
    let printed = sandbox.ok("cd work; $git push origin HEAD:refs/heads/fits 2>&1");
    assert!(
        printed.contains("remote: palisade: this push has 2 MB"),
        "{printed}"
    );
    sandbox.ok(&commit(8));
    let printed = sandbox.assert_refused(
        "cd work; $git push origin HEAD:refs/heads/large",
        "This push has 8 MB; pushes above 3 MB are refused.",
    );
    assert!(printed.contains("git_size"), "{printed}");
}

#[test]
fn deletion_is_processed_without_waiting_for_a_pack() {
    let sandbox = MirrorSandbox::new(&MirrorOptions {
        policy: "policy: {allow_branch_deletion: true}\n",
        ..MirrorOptions::default()
    });
    sandbox.ok(&format!(
        "$git clone -q {APP} work; cd work; $git push -q origin HEAD:refs/heads/mine"
    ));
    assert!(sandbox.fixture.refs().contains("refs/heads/mine"));
    sandbox.ok("cd work; $git push -q origin :refs/heads/mine");
    assert!(!sandbox.fixture.refs().contains("refs/heads/mine"));
}

#[test]
fn sha256_repository_is_cloned_and_pushed() {
    let mut sandbox = MirrorSandbox::new(&MirrorOptions {
        checked: true,
        sha256: true,
        ..MirrorOptions::default()
    });
    for version in [0, 2] {
        sandbox.use_git(gits()[0], version);
        let pushed_commit = sandbox.ok(&format!(
            "$git clone -q {APP} work-{version}; cd work-{version}
             test $($git rev-parse --show-object-format) = sha256; $git fsck --strict
             echo one > one; $git add one; $git commit -qm one
             $git push -q origin HEAD:refs/heads/branch-{version}; $git rev-parse HEAD"
        ));
        assert_eq!(pushed_commit.len(), 64, "{pushed_commit}");
        let refs = sandbox.fixture.refs();
        let pushed = format!("refs/heads/branch-{version} {pushed_commit}");
        assert!(refs.contains(&pushed), "{refs}");
        let printed = sandbox.assert_refused(
            &format!(
                "cd work-{version}; echo {SECRET} > two; $git add two; $git commit -qm two
                 $git push origin HEAD:refs/heads/branch-{version}"
            ),
            "secret_found",
        );
        assert!(!printed.contains(SECRET), "{printed}");
    }
}

#[test]
fn operators_policy_bundle_decides_about_pushes() {
    let sandbox = MirrorSandbox::new(&MirrorOptions {
        top: "policies: {timeout: 10s, bundles: [{id: mine, path: mine, entrypoint: git/push}]}\n",
        ..MirrorOptions::default()
    });
    sandbox.ok(&format!(
        "$git clone -q {APP} work; cd work; $git push -q origin HEAD:refs/heads/ok/one"
    ));
    assert!(sandbox.fixture.refs().contains("refs/heads/ok/one"));
    let printed = sandbox.assert_refused(
        "cd work; $git push origin HEAD:refs/heads/two",
        "Only below ok.",
    );
    assert!(printed.contains("rego_denied"), "{printed}");
}

#[test]
fn push_of_ninety_megabytes_is_spooled_to_disk() {
    let sandbox = MirrorSandbox::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    sandbox.ok(&format!(
        "$git clone -q {APP} work; cd work; $git config core.compression 0
         for n in 1 2 3; do head -c 31457280 /dev/urandom > large-$n; done
         $git add -A; $git commit -qm large"
    ));
    let (_, idle) = sandbox.fixture.git_fixture.memory();
    let output = sandbox.run("cd work; $git push origin HEAD:refs/heads/large");
    assert!(output.status.success(), "{}", describe(&output));
    let printed = output::stderr(&output);
    assert!(
        printed.contains("remote: palisade: this push has 90"),
        "{printed}"
    );
    let (most, _) = sandbox.fixture.git_fixture.memory();
    assert!(
        most - idle < 64 * 1024,
        "{idle} KiB idle, {most} KiB at most"
    );
    assert!(sandbox.fixture.refs().contains("refs/heads/large"));
    let spool = sandbox.fixture.git_fixture.path("state/spool");
    assert_eq!(std::fs::read_dir(spool).unwrap().count(), 0);
}
