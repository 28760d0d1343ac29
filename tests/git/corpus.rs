//! The recorded decisions about git: fetches and pushes over HTTP, mirrors over HTTP and in
//! git's own protocol, and `palisade git check` (`tests/corpus/`).

use std::path::Path;
use std::process::Output;

use serde_json::Value;
use testkit::corpus::Corpus;
use testkit::output;

use crate::git_fixture::{FORGE, FixtureOptions, GitFixture};
use crate::mirror_fixture::{MirrorFixture, MirrorOptions, SECRET};

/// The cases of a push: a name, the preparation of the working copy, and the refspecs.
const PUSHES: &[(&str, Preparation, &[&str])] = &[
    (
        "new branch",
        Preparation::File,
        &["HEAD:refs/heads/sandbox/one"],
    ),
    (
        "same branch again",
        Preparation::File,
        &["HEAD:refs/heads/sandbox/one"],
    ),
    (
        "rewritten branch",
        Preparation::Amend,
        &["+HEAD:refs/heads/sandbox/one"],
    ),
    (
        "branch outside of sandbox",
        Preparation::File,
        &["HEAD:refs/heads/feature"],
    ),
    (
        "protected branch",
        Preparation::File,
        &["HEAD:refs/heads/main"],
    ),
    (
        "protected pattern",
        Preparation::File,
        &["HEAD:refs/heads/release/1"],
    ),
    (
        "deleted branch",
        Preparation::None,
        &[":refs/heads/sandbox/one"],
    ),
    (
        "deleted protected branch",
        Preparation::None,
        &[":refs/heads/main"],
    ),
    ("tag", Preparation::None, &["HEAD:refs/tags/v1"]),
    ("note", Preparation::None, &["HEAD:refs/notes/x"]),
    (
        "pull request head",
        Preparation::None,
        &["HEAD:refs/pull/1/head"],
    ),
    (
        "two branches, one protected",
        Preparation::File,
        &["HEAD:refs/heads/sandbox/two", "HEAD:refs/heads/main"],
    ),
    (
        "branch of another user",
        Preparation::File,
        &["HEAD:refs/heads/theirs"],
    ),
    (
        "workflow",
        Preparation::Workflow,
        &["HEAD:refs/heads/sandbox/three"],
    ),
    (
        "secret",
        Preparation::Secret,
        &["HEAD:refs/heads/sandbox/four"],
    ),
    (
        "large file",
        Preparation::Large,
        &["HEAD:refs/heads/sandbox/five"],
    ),
];

/// The commit that a case makes before its push.
#[derive(Clone, Copy)]
enum Preparation {
    None,
    File,
    Amend,
    Workflow,
    Secret,
    Large,
}

impl Preparation {
    /// Makes the commit in `dir`.
    fn prepare(self, git_fixture: &GitFixture, dir: &Path, case: &str) {
        let file = case.replace(' ', "-");
        match self {
            Preparation::None => {}
            Preparation::File => git_fixture.commit(dir, &format!("{file}.txt"), "work\n"),
            Preparation::Amend => {
                git_fixture.git_in(dir, &["commit", "-q", "--amend", "-m", "rewritten"]);
            }
            Preparation::Workflow => {
                git_fixture.commit(dir, ".github/workflows/ci.yml", "on: push\n");
            }
            Preparation::Secret => git_fixture.commit(dir, "key.txt", &format!("{SECRET}\n")),
            Preparation::Large => {
                git_fixture.commit(dir, "large.bin", &"0123456789abcdef".repeat(8192));
            }
        }
    }
}

fn outcome(output: &Output) -> String {
    let result = if output.status.success() {
        "ok"
    } else {
        "failed"
    };
    // Keeps the lines of the gate's refusal that git prints, without the request ids.
    let printed = output::stderr(output);
    let sentences = printed.lines().filter_map(|line| {
        let (_, sentence) = line.split_once("remote: palisade: ")?;
        let end = sentence.find("request ").unwrap_or(sentence.len());
        Some(sentence.get(..end)?.trim_end().to_owned())
    });
    std::iter::once(result.to_owned())
        .chain(sentences)
        .collect::<Vec<_>>()
        .join("\n")
}

/// Pushes every case of [`PUSHES`] to `remote`.
fn push_all(corpus: &mut Corpus, mode: &str, git_fixture: &GitFixture, dir: &Path, remote: &str) {
    for (at, (name, work, refspecs)) in PUSHES.iter().enumerate() {
        // The rate limit allows ten pushes at once; a restart of the gate resets the limit.
        if at % 4 == 0 {
            git_fixture.restart_gate();
        }
        let start = git_fixture.git_in(dir, &["rev-parse", "HEAD"]);
        work.prepare(git_fixture, dir, name);
        corpus.case(&format!("{mode}: {name}"), || {
            outcome(&git_fixture.try_git(dir, &[&["push", remote], *refspecs].concat()))
        });
        // Only the cases of the first branch build on earlier pushes.
        if !refspecs.contains(&"HEAD:refs/heads/sandbox/one") && !matches!(work, Preparation::Amend)
        {
            git_fixture.git_in(dir, &["reset", "-q", "--hard", &start]);
        }
    }
}

/// Creates an upstream branch past the gate, which the sandbox therefore does not own.
fn create_foreign_branch(git_fixture: &GitFixture, dir: &Path) {
    let upstream = git_fixture.upstream("acme/app");
    let upstream = upstream.to_str().unwrap();
    git_fixture.git_in(dir, &["push", "-q", upstream, "HEAD:refs/heads/theirs"]);
}

#[test]
fn corpus_of_pushes_over_http() {
    for (mode, bot, checked) in [
        ("user", false, false),
        ("bot", true, false),
        ("user, objects read", false, true),
    ] {
        let git_fixture = GitFixture::with_options(FixtureOptions {
            bot,
            checked,
            policy: "git: {push_limits: {warning_bytes: 32768, hard_limit_bytes: 65536}}\n",
            ..FixtureOptions::default()
        });
        let dir = git_fixture.working_copy("work");
        create_foreign_branch(&git_fixture, &dir);
        let mut corpus = Corpus::open(
            &format!("push-{}", mode.replace(", ", "-").replace(' ', "-")),
            &git_fixture.control_socket(),
        );
        push_all(&mut corpus, mode, &git_fixture, &dir, "origin");
        corpus.finish();
    }
}

#[test]
fn corpus_of_pushes_with_a_bundle() {
    let git_fixture = GitFixture::with_options(FixtureOptions {
        top: "policies:\n  bundles:\n    - {id: mine, path: ./mine, entrypoint: git/push}\n",
        ..FixtureOptions::default()
    });
    let dir = git_fixture.working_copy("work");
    let mut corpus = Corpus::open("push-bundle", &git_fixture.control_socket());
    for branch in ["ok/one", "other/one", "main"] {
        git_fixture.commit(&dir, &format!("{}.txt", branch.replace('/', "-")), "work\n");
        corpus.case(&format!("bundle: {branch}"), || {
            outcome(&git_fixture.try_git(
                &dir,
                &["push", "origin", &format!("HEAD:refs/heads/{branch}")],
            ))
        });
    }
    corpus.finish();
}

#[test]
fn corpus_of_fetches_over_http() {
    let mut git_fixture = GitFixture::new();
    git_fixture.working_copy("work");
    git_fixture.create_bare("acme/other", &[]);
    let mut corpus = Corpus::open("fetch", &git_fixture.control_socket());
    for version in [0, 1, 2] {
        let git = crate::git_fixture::gits()[0];
        let git_fixture = git_fixture.use_git(git, version);
        for (name, url) in [
            ("own repository", format!("{FORGE}/acme/app")),
            (
                "own repository with its suffix",
                format!("{FORGE}/acme/app.git"),
            ),
            ("another repository", format!("{FORGE}/acme/other")),
            ("no repository", format!("{FORGE}/acme/nothing")),
            ("name in capitals", format!("{FORGE}/Acme/App")),
            ("path with dots", format!("{FORGE}/acme/other/../app")),
            (
                "host that is no git host",
                "https://elsewhere.example/acme/app".to_owned(),
            ),
            (
                "unlisted host",
                "https://closed.example/acme/app".to_owned(),
            ),
        ] {
            corpus.case(&format!("version {version}: ls-remote of {name}"), || {
                outcome(&git_fixture.try_git(&git_fixture.path(""), &["ls-remote", &url]))
            });
        }
        corpus.case(&format!("version {version}: clone"), || {
            let url = format!("{FORGE}/acme/app");
            let name = format!("clone-{version}");
            outcome(&git_fixture.try_git(&git_fixture.path(""), &["clone", "-q", &url, &name]))
        });
    }
    corpus.finish();
}

#[test]
fn corpus_of_mirrors() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    let git_fixture = &fixture.git_fixture;
    let mut corpus = Corpus::open("mirrors", &git_fixture.control_socket());
    for url in [
        crate::mirror_fixture::APP,
        "http://palisade.internal/git/nothing",
    ] {
        corpus.case(&format!("http: ls-remote {url}"), || {
            outcome(&git_fixture.try_git(&git_fixture.path(""), &["ls-remote", url]))
        });
    }
    let dir = fixture.clone_as("work");
    corpus.case("http: fetch", || {
        outcome(&git_fixture.try_git(&dir, &["fetch", "-q"]))
    });
    push_all(&mut corpus, "http", git_fixture, &dir, "origin");
    corpus.finish();
}

#[test]
fn corpus_of_mirrors_over_the_git_protocol() {
    let fixture = MirrorFixture::new(&MirrorOptions {
        checked: true,
        ..MirrorOptions::default()
    });
    let git_fixture = &fixture.git_fixture;
    git_fixture.ok(&["create", "inside", "--no-repo"]);
    let run = |script: &str| {
        let script = format!(
            "cd ~; git() {{ command git -c user.name=A -c user.email=a@example.com \"$@\"; }}; {script}"
        );
        let args = [
            "exec", "inside", "--", "timeout", "90", "bash", "-c", &script,
        ];
        git_fixture.operator(&args)
    };
    let mut corpus = Corpus::open("mirrors-git-protocol", &git_fixture.control_socket());
    for (name, script) in [
        ("ls-remote", "git ls-remote git://palisade.internal/app"),
        (
            "ls-remote of nothing",
            "git ls-remote git://palisade.internal/nothing",
        ),
        ("clone", "git clone -q git://palisade.internal/app work"),
        (
            "push to a new branch",
            "cd work; echo 1 >1; git add 1; git commit -qm 1; git push origin HEAD:refs/heads/sandbox/one",
        ),
        (
            "push to a tag",
            "cd work; git push origin HEAD:refs/tags/v1",
        ),
        (
            "push to a protected branch",
            "cd work; git push origin HEAD:refs/heads/main",
        ),
        (
            "delete a branch",
            "cd work; git push origin :refs/heads/trunk",
        ),
        (
            "push a secret",
            "cd work; echo {secret} >2; git add 2; git commit -qm 2; git push origin HEAD:refs/heads/sandbox/two",
        ),
    ] {
        corpus.case(&format!("git protocol: {name}"), || {
            outcome(&run(&script.replace("{secret}", SECRET)))
        });
    }
    corpus.finish();
    git_fixture.ok(&["delete", "inside", "--force"]);
}

#[test]
fn corpus_of_git_check() {
    let git_fixture = GitFixture::with_options(FixtureOptions {
        checked: true,
        ..FixtureOptions::default()
    });
    let dir = git_fixture.working_copy("work");
    let mut corpus = Corpus::open("git-check", &git_fixture.control_socket());
    for mode in ["user", "bot"] {
        for (name, work, refspecs) in PUSHES {
            let Some(target) = refspecs.iter().find_map(|spec| spec.strip_prefix("HEAD:")) else {
                continue;
            };
            let start = git_fixture.git_in(&dir, &["rev-parse", "HEAD"]);
            work.prepare(&git_fixture, &dir, name);
            corpus.case(&format!("{mode}: {name}"), || {
                let output = git_fixture.operator_in(
                    &dir,
                    &[
                        "git",
                        "check",
                        "--repo",
                        ".",
                        "--range",
                        "origin/main..HEAD",
                        "--ref",
                        target,
                        "--auth-mode",
                        mode,
                        "--json",
                    ],
                );
                let answer: Value =
                    serde_json::from_str(&output::stdout(&output)).unwrap_or_default();
                let code = output.status.code().unwrap_or(-1);
                let mut seen = vec![format!("exit {code}")];
                let of_push = answer["denials"].as_array().into_iter().flatten();
                let refs = answer["refs"].as_array().into_iter().flatten();
                let refs = refs
                    .map(|update| &update["denial"])
                    .filter(|denial| !denial.is_null());
                for denial in of_push.chain(refs) {
                    seen.push(format!("{} {}", denial["reason"], denial["rule"]));
                }
                seen.join("\n")
            });
            git_fixture.git_in(&dir, &["reset", "-q", "--hard", &start]);
        }
    }
    corpus.finish();
}
