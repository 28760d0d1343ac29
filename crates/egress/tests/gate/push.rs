//! Pushes whose objects are read: a gate, a real `git http-backend` as upstream, and a fake pack
//! reader whose findings the test chooses.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use config::Settings;
use decide::hold::Questions;
use egress::services::{ServiceDependencies, Services};
use policy::ports::{Pack, PackReader};
use policy::push::{
    self, Findings, PushContext, RestrictedPathChange, SecretFinding, SecretLocation,
};
use policy::reason::Reason;
use policy::refs::ObjectId;
use policy::verdict::Denial;
use testkit::forge::Forge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::fakes::{MemoryAuditLog, connect, fake_dependencies};

/// Input of the pack reader.
pub(crate) struct ReaderInput {
    pub(crate) context: PushContext,
    pub(crate) pack: Option<Vec<u8>>,
    bases: Vec<File>,
}

/// Returns the findings for an input.
type FindFn = dyn Fn(&ReaderInput) -> Result<Findings, Denial> + Send + Sync;

/// A pack reader with prepared findings.
pub(crate) struct FakePackReader {
    find: Box<FindFn>,
    pub(crate) inputs: Mutex<Vec<ReaderInput>>,
}

#[async_trait::async_trait]
impl PackReader for FakePackReader {
    async fn read(
        &self,
        context: &PushContext,
        pack: Option<Pack>,
        bases: Vec<File>,
    ) -> Result<Findings, Denial> {
        let pack = pack.map(|mut pack| {
            let mut bytes = Vec::new();
            pack.file.seek(SeekFrom::Start(pack.offset)).unwrap();
            std::io::Read::read_to_end(&mut pack.file, &mut bytes).unwrap();
            bytes
        });
        let input = ReaderInput {
            context: context.clone(),
            pack,
            bases,
        };
        let findings = (self.find)(&input);
        self.inputs.lock().unwrap().push(input);
        findings
    }
}

/// A gate, a forge with one repository, and a fake pack reader.
pub(crate) struct PushFixture {
    directory: tempfile::TempDir,
    pub(crate) forge: Forge,
    pub(crate) services: Arc<Services>,
    pub(crate) records: Arc<MemoryAuditLog>,
    pub(crate) reader: Arc<FakePackReader>,
}

impl PushFixture {
    pub(crate) fn new(
        git: &str,
        find: impl Fn(&ReaderInput) -> Result<Findings, Denial> + Send + Sync + 'static,
    ) -> Self {
        Self::with_operator(Questions::default(), git, |_| {}, find)
    }

    /// A fixture with an operator who answers `questions`. `change` makes settings that cannot be
    /// written in a configuration file.
    pub(crate) fn with_operator(
        questions: Questions,
        git: &str,
        change: impl FnOnce(&mut Settings),
        find: impl Fn(&ReaderInput) -> Result<Findings, Denial> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("forge");
        let forge = Forge::start(None, &root, "git");
        let mut settings = load_settings(directory.path(), &forge, git);
        change(&mut settings);
        let records = Arc::<MemoryAuditLog>::default();
        let reader = Arc::new(FakePackReader {
            find: Box::new(find),
            inputs: Mutex::default(),
        });
        let services = Services::new(ServiceDependencies {
            questions,
            pack_reader: Some(Arc::clone(&reader) as _),
            ..fake_dependencies(directory.path(), settings, &records)
        });
        let fixture = Self {
            directory,
            forge,
            services,
            records,
            reader,
        };
        fixture.create_repository();
        fixture
    }

    /// Settings with `git` as lines of the section `git`.
    pub(crate) fn settings(&self, git: &str) -> Settings {
        load_settings(self.directory.path(), &self.forge, git)
    }

    /// Applies other settings.
    pub(crate) async fn reload(&self, settings: Settings) {
        let services = Arc::clone(&self.services);
        let reloading = move || crate::fakes::reload(&services, Arc::new(settings));
        let reloaded = tokio::task::spawn_blocking(reloading).await;
        reloaded.unwrap().unwrap();
    }

    /// Creates the upstream repository with a workflow on its default branch, and a local commit
    /// that is not pushed yet.
    fn create_repository(&self) {
        let work = self.path("work");
        let upstream = self.path("forge/acme/app.git");
        std::fs::create_dir_all(&upstream).unwrap();
        git(&upstream, &["init", "-q", "--bare", "-b", "main"]);
        for key in ["http.receivepack", "uploadpack.allowFilter"] {
            git(&upstream, &["config", key, "true"]);
        }
        std::fs::create_dir_all(work.join(".github/workflows")).unwrap();
        git(&work, &["init", "-q", "-b", "main"]);
        std::fs::write(work.join(".github/workflows/ci.yml"), "on: push\n").unwrap();
        std::fs::write(work.join("README.md"), "hello\n").unwrap();
        git(&work, &["add", "-A"]);
        git(&work, &["commit", "-q", "-m", "first"]);
        git(&work, &["push", "-q", upstream.to_str().unwrap(), "main"]);
        std::fs::write(work.join("README.md"), "hello again\n").unwrap();
        git(&work, &["commit", "-q", "-a", "-m", "second"]);
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// The body of git's push of the second commit to a new branch.
    pub(crate) fn body(&self, name: &str) -> Vec<u8> {
        let work = self.path("work");
        let new = git(&work, &["rev-parse", "HEAD"]);
        let zero = "0".repeat(new.len());
        let command = format!("{zero} {new} {name}\0 report-status side-band-64k agent=git/2");
        let mut body = format!("{:04x}{command}0000", command.len() + 4).into_bytes();
        body.extend(self.pack());
        body
    }

    /// A pack with the objects of the second commit.
    pub(crate) fn pack(&self) -> Vec<u8> {
        let mut child = git_command(
            &self.path("work"),
            &["pack-objects", "-q", "--revs", "--stdout"],
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, b"HEAD\n^HEAD~\n").unwrap();
        drop(stdin);
        child.wait_with_output().unwrap().stdout
    }

    /// Pushes to the forge and returns the response.
    pub(crate) async fn push(&self, body: &[u8]) -> String {
        self.push_to("forge.example/acme/app.git", body).await
    }

    /// Pushes to the repository at `address` and returns the response.
    pub(crate) async fn push_to(&self, address: &str, body: &[u8]) -> String {
        let mut client = connect(&self.services, None);
        client.write_all(&head(address, body)).await.unwrap();
        client.write_all(body).await.unwrap();
        let mut response = Vec::new();
        client.read_to_end(&mut response).await.unwrap();
        String::from_utf8_lossy(&response).into_owned()
    }

    /// The refs of the upstream repository.
    pub(crate) fn refs(&self) -> String {
        git(&self.path("forge/acme/app.git"), &["for-each-ref"])
    }
}

/// The request head of a push of `body` to the repository at `address`.
pub(crate) fn head(address: &str, body: &[u8]) -> Vec<u8> {
    let (host, _) = address.split_once('/').unwrap();
    let length = body.len();
    format!(
        "POST http://{address}/git-receive-pack HTTP/1.1\r\n\
         Host: {host}\r\nContent-Type: application/x-git-receive-pack-request\r\n\
         Authorization: Basic stub\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    )
    .into_bytes()
}

/// Loads settings with `git` as lines of the section `git`.
fn load_settings(directory: &Path, forge: &Forge, git: &str) -> Settings {
    let path = directory.join("palisade.yaml");
    let text = format!(
        "version: \"1.0\"\negress:\n  domains: [{{host: forge.example, ports: [80]}}]\n  \
         resolve: {{forge.example: '{}'}}\ngit:\n  hosts: [forge.example]\n{git}",
        forge.address()
    );
    std::fs::write(&path, text).unwrap();
    config::load(Some(&path), &|_| None).unwrap_or_else(|bad| panic!("{bad:?}"))
}

/// The command `git` with `args`, run in `dir`.
fn git_command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("git");
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", dir)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .args(["-c", "user.name=A", "-c", "user.email=a@example.com"])
        .args(args)
        .current_dir(dir);
    command
}

/// Runs git in `dir` and returns its output.
pub(crate) fn git(dir: &Path, args: &[&str]) -> String {
    let output = git_command(dir, args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "git {args:?}: {stderr}");
    String::from_utf8(output.stdout)
        .unwrap()
        .trim_end()
        .to_owned()
}

/// Findings that are unknown for restricted paths unless the reader has trees of upstream to
/// compare with.
pub(crate) fn findings_unknown_without_upstream_trees(
    input: &ReaderInput,
) -> Result<Findings, Denial> {
    Ok(Findings {
        restricted: if input.bases.is_empty() {
            RestrictedPathChange::Unknown
        } else {
            RestrictedPathChange::Untouched
        },
        ..Findings::default()
    })
}

/// A branch that is not protected.
pub(crate) const FEATURE: &str = "refs/heads/feature";

#[tokio::test(flavor = "multi_thread")]
async fn push_without_findings_reaches_upstream_unchanged() {
    let fixture = PushFixture::new("  restricted_paths: []\n", |_| Ok(Findings::default()));
    let response = fixture.push(&fixture.body(FEATURE)).await;
    assert!(response.contains("ok refs/heads/feature"), "{response}");
    assert!(fixture.refs().contains(FEATURE));
    let inputs = fixture.reader.inputs.lock().unwrap();
    assert_eq!(inputs.len(), 1);
    assert_eq!(inputs[0].pack.as_deref(), Some(&fixture.pack()[..]));
    assert!(inputs[0].context.scan && inputs[0].bases.is_empty());
    assert_eq!(fixture.forge.requests().len(), 1, "no trees were fetched");
}

#[tokio::test(flavor = "multi_thread")]
async fn upstream_trees_are_fetched_without_blobs_for_comparison() {
    let fixture = PushFixture::new("", findings_unknown_without_upstream_trees);
    let response = fixture.push(&fixture.body(FEATURE)).await;
    assert!(response.contains("ok refs/heads/feature"), "{response}");
    let mut inputs = std::mem::take(&mut *fixture.reader.inputs.lock().unwrap());
    assert_eq!(inputs.len(), 1);
    let second = inputs.pop().unwrap();
    assert_eq!(second.context.restricted.len(), 2);
    let main = git(&fixture.path("forge/acme/app.git"), &["rev-parse", "main"]);
    let tip = second.context.default_tip.map(|tip| tip.to_string());
    assert_eq!(tip, Some(main.clone()));

    // The pack has the commit and its trees, and no blob.
    let scratch = fixture.path("scratch");
    std::fs::create_dir(&scratch).unwrap();
    git(&scratch, &["init", "-q", "--bare"]);
    let mut base = second.bases.into_iter().next().unwrap();
    base.seek(SeekFrom::Start(0)).unwrap();
    let status = git_command(&scratch, &["index-pack", "--stdin"])
        .stdin(base)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let args = [
        "cat-file",
        "--batch-all-objects",
        "--batch-check=%(objecttype)",
    ];
    let types = git(&scratch, &args);
    let count = |kind: &str| types.lines().filter(|line| *line == kind).count();
    assert_eq!(
        (count("commit"), count("tree"), count("blob")),
        (1, 3, 0),
        "{types}"
    );
    git(&scratch, &["cat-file", "-e", &main]);

    // The gate's queries have the client's credentials and are in the audit log.
    let requests = fixture.forge.requests();
    assert_eq!(requests.len(), 3, "{requests:?}");
    assert!(
        requests
            .iter()
            .all(|request| request.headers["authorization"] == "Basic stub")
    );
    let records = fixture.records.0.lock().unwrap().clone();
    let gate_queries = records
        .iter()
        .filter(|record| record.event.as_deref() == Some("asked_for_push"));
    assert_eq!(gate_queries.count(), 2);

    // A tag may be based on a branch that the sandbox created, so its trees are fetched too.
    let response = fixture.push(&fixture.body("refs/tags/v1")).await;
    assert!(response.contains("ok refs/tags/v1"), "{response}");
    let mut inputs = std::mem::take(&mut *fixture.reader.inputs.lock().unwrap());
    let mut base = inputs.pop().unwrap().bases.pop().unwrap();
    base.seek(SeekFrom::Start(0)).unwrap();
    git(&scratch, &["init", "-q", "--bare", "again"]);
    let again = scratch.join("again");
    let status = git_command(&again, &["index-pack", "--stdin"])
        .stdin(base)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let feature = git(&fixture.path("work"), &["rev-parse", "HEAD"]);
    git(&again, &["cat-file", "-e", &feature]);
}

#[tokio::test(flavor = "multi_thread")]
async fn restricted_path_without_upstream_trees_is_refused() {
    let fixture = PushFixture::new("", findings_unknown_without_upstream_trees);
    let upstream = fixture.path("forge/acme/app.git");
    git(&upstream, &["config", "uploadpack.allowFilter", "false"]);
    let response = fixture.push(&fixture.body(FEATURE)).await;
    assert!(
        response.contains("ng refs/heads/feature palisade: git_path"),
        "{response}"
    );
    assert!(response.contains("cannot determine"), "{response}");
    assert!(!fixture.refs().contains(FEATURE));
    assert_eq!(fixture.forge.pushed_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn push_with_findings_is_refused() {
    let secret = || SecretFinding {
        rule: "some-key".to_owned(),
        place: SecretLocation::Commit(ObjectId::Sha1([7; 20])),
    };
    type FindingsCase = (&'static str, Result<Findings, Denial>);
    let cases: [FindingsCase; 4] = [
        (
            "secret_found",
            Ok(Findings {
                secrets: vec![secret()],
                ..Findings::default()
            }),
        ),
        (
            "git_path",
            Ok(Findings {
                restricted: RestrictedPathChange::Changed,
                ..Findings::default()
            }),
        ),
        (
            "internal",
            Err(push::refuse_unreadable("the reader crashed")),
        ),
        (
            "git_malformed",
            Err(Denial::new(Reason::GitMalformed, "git:form").with_message("No pack.")),
        ),
    ];
    for (reason, findings) in cases {
        let fixture = PushFixture::new("", move |_| findings.clone());
        let response = fixture.push(&fixture.body(FEATURE)).await;
        let line = format!("ng refs/heads/feature palisade: {reason}\n");
        assert!(response.contains(&line), "{reason}: {response}");
        assert!(
            !response.contains("crashed"),
            "the client must not receive the evidence"
        );
        assert!(!fixture.refs().contains(FEATURE));
        assert_eq!(fixture.forge.pushed_bytes(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refs_are_decided_before_the_pack_is_read() {
    let fixture = PushFixture::new("", |_| Ok(Findings::default()));
    let response = fixture.push(&fixture.body("refs/heads/main")).await;
    assert!(
        response.contains("ng refs/heads/main palisade: git_protected"),
        "{response}"
    );
    assert!(fixture.reader.inputs.lock().unwrap().is_empty());
    assert!(fixture.forge.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn force_push_is_refused_with_deny_force_push() {
    let findings = |is_fast_forward| {
        move |_: &ReaderInput| {
            Ok(Findings {
                fast_forward: vec![is_fast_forward],
                ..Findings::default()
            })
        }
    };
    for (is_fast_forward, expected) in [
        (Some(true), "ok refs/heads/feature"),
        (Some(false), "ng refs/heads/feature palisade: git_protected"),
        (None, "ng refs/heads/feature palisade: git_protected"),
    ] {
        let git_section = "  deny_force_push: true\n  pushable: [feature]\n";
        let fixture = PushFixture::new(git_section, findings(is_fast_forward));
        let upstream = fixture.path("forge/acme/app.git");
        git(&upstream, &["update-ref", FEATURE, "main"]);
        let old = git(&upstream, &["rev-parse", "main"]);
        let mut bytes = fixture.body(FEATURE);
        // The old object id follows the length of the pkt-line.
        bytes[4..4 + old.len()].copy_from_slice(old.as_bytes());
        let response = fixture.push(&bytes).await;
        assert!(
            response.contains(expected),
            "{is_fast_forward:?}: {response}"
        );
    }
}
