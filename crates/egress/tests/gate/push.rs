//! Pushes whose objects have to be read: a gate, a real `git http-backend` behind it, and
//! somebody in the place of the reader who says what the test wants.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use config::Settings;
use decide::hold::Questions;
use egress::services::{Parts, Services};
use policy::ports::{Pack, PackReader};
use policy::push::{self, Case, Findings, Place as Whereabouts, Restricted, Sighting};
use policy::reason::Reason;
use policy::refs::ObjectId;
use policy::verdict::Denial;
use testkit::forge::Forge;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::stand_ins::{Records, connect, parts};

/// What the reader was given.
pub(crate) struct Given {
    pub(crate) case: Case,
    pub(crate) pack: Option<Vec<u8>>,
    bases: Vec<File>,
}

type Say = dyn Fn(&Given) -> Result<Findings, Denial> + Send + Sync;

/// Somebody in the place of the reader.
pub(crate) struct Reader {
    say: Box<Say>,
    pub(crate) given: Mutex<Vec<Given>>,
}

#[async_trait::async_trait]
impl PackReader for Reader {
    async fn read(
        &self,
        case: &Case,
        pack: Option<Pack>,
        bases: Vec<File>,
    ) -> Result<Findings, Denial> {
        let pack = pack.map(|mut pack| {
            let mut bytes = Vec::new();
            pack.file.seek(SeekFrom::Start(pack.at)).unwrap();
            std::io::Read::read_to_end(&mut pack.file, &mut bytes).unwrap();
            bytes
        });
        let given = Given {
            case: case.clone(),
            pack,
            bases,
        };
        let said = (self.say)(&given);
        self.given.lock().unwrap().push(given);
        said
    }
}

pub(crate) struct Place {
    directory: tempfile::TempDir,
    pub(crate) forge: Forge,
    pub(crate) traffic: Arc<Services>,
    pub(crate) records: Arc<Records>,
    pub(crate) reader: Arc<Reader>,
}

impl Place {
    pub(crate) fn new(
        git: &str,
        say: impl Fn(&Given) -> Result<Findings, Denial> + Send + Sync + 'static,
    ) -> Self {
        Self::attended(Questions::default(), git, |_| {}, say)
    }

    /// The same where questions are answered, with settings that `change` makes of those that an
    /// operator can write.
    pub(crate) fn attended(
        questions: Questions,
        git: &str,
        change: impl FnOnce(&mut Settings),
        say: impl Fn(&Given) -> Result<Findings, Denial> + Send + Sync + 'static,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("forge");
        let forge = Forge::start(None, &root, "git");
        let mut settings = settings(directory.path(), &forge, git);
        change(&mut settings);
        let records = Arc::<Records>::default();
        let reader = Arc::new(Reader {
            say: Box::new(say),
            given: Mutex::default(),
        });
        let traffic = Services::new(Parts {
            questions,
            pack_reader: Some(Arc::clone(&reader) as _),
            ..parts(directory.path(), settings, &records)
        });
        let place = Self {
            directory,
            forge,
            traffic,
            records,
            reader,
        };
        place.seed();
        place
    }

    /// The settings with `git` below `git:`.
    pub(crate) fn settings(&self, git: &str) -> Settings {
        settings(self.directory.path(), &self.forge, git)
    }

    /// Puts other settings in force.
    pub(crate) async fn reload(&self, settings: Settings) {
        let traffic = Arc::clone(&self.traffic);
        let reloading = move || crate::stand_ins::reload(&traffic, Arc::new(settings));
        let reloaded = tokio::task::spawn_blocking(reloading).await;
        reloaded.unwrap().unwrap();
    }

    /// A repository with a workflow on its default branch, and a commit upon it that is not
    /// there yet.
    fn seed(&self) {
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

    /// The body of a push of the second commit to a new branch, as git makes it.
    pub(crate) fn body(&self, name: &str) -> Vec<u8> {
        let work = self.path("work");
        let new = git(&work, &["rev-parse", "HEAD"]);
        let zero = "0".repeat(new.len());
        let command = format!("{zero} {new} {name}\0 report-status side-band-64k agent=git/2");
        let mut body = format!("{:04x}{command}0000", command.len() + 4).into_bytes();
        body.extend(self.pack());
        body
    }

    pub(crate) fn pack(&self) -> Vec<u8> {
        let mut child = command(
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

    /// Pushes, and says what the client hears.
    pub(crate) async fn push(&self, body: &[u8]) -> String {
        self.push_to("forge.example/acme/app.git", body).await
    }

    /// Pushes to the repository at `address`, and says what the client hears.
    pub(crate) async fn push_to(&self, address: &str, body: &[u8]) -> String {
        let mut client = connect(&self.traffic, None);
        client.write_all(&head(address, body)).await.unwrap();
        client.write_all(body).await.unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer).into_owned()
    }

    pub(crate) fn refs(&self) -> String {
        git(&self.path("forge/acme/app.git"), &["for-each-ref"])
    }
}

/// The head of a push of `body` to the repository at `address`.
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

fn settings(directory: &Path, forge: &Forge, git: &str) -> Settings {
    let path = directory.join("palisade.yaml");
    let text = format!(
        "version: \"1.0\"\negress:\n  domains: [{{host: forge.example, ports: [80]}}]\n  \
         resolve: {{forge.example: '{}'}}\ngit:\n  hosts: [forge.example]\n{git}",
        forge.address()
    );
    std::fs::write(&path, text).unwrap();
    config::load(Some(&path), &|_| None).unwrap_or_else(|bad| panic!("{bad:?}"))
}

fn command(dir: &Path, args: &[&str]) -> Command {
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

pub(crate) fn git(dir: &Path, args: &[&str]) -> String {
    let output = command(dir, args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "git {args:?}: {said}");
    String::from_utf8(output.stdout)
        .unwrap()
        .trim_end()
        .to_owned()
}

pub(crate) fn unknown_without_bases(given: &Given) -> Result<Findings, Denial> {
    Ok(Findings {
        restricted: if given.bases.is_empty() {
            Restricted::Unknown
        } else {
            Restricted::Untouched
        },
        ..Findings::default()
    })
}

pub(crate) const FEATURE: &str = "refs/heads/feature";

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_the_reader_finds_clean_goes_upstream_whole() {
    let place = Place::new("  restricted_paths: []\n", |_| Ok(Findings::default()));
    let said = place.push(&place.body(FEATURE)).await;
    assert!(said.contains("ok refs/heads/feature"), "{said}");
    assert!(place.refs().contains(FEATURE));
    let given = place.reader.given.lock().unwrap();
    assert_eq!(given.len(), 1);
    assert_eq!(given[0].pack.as_deref(), Some(&place.pack()[..]));
    assert!(given[0].case.scan && given[0].bases.is_empty());
    assert_eq!(
        place.forge.requests().len(),
        1,
        "nothing had to be compared"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_upstream_has_is_fetched_without_files_where_it_must_be_compared() {
    let place = Place::new("", unknown_without_bases);
    let said = place.push(&place.body(FEATURE)).await;
    assert!(said.contains("ok refs/heads/feature"), "{said}");
    let mut given = std::mem::take(&mut *place.reader.given.lock().unwrap());
    assert_eq!(given.len(), 1);
    let second = given.pop().unwrap();
    assert_eq!(second.case.restricted.len(), 2);
    let main = git(&place.path("forge/acme/app.git"), &["rev-parse", "main"]);
    let tip = second.case.default_tip.map(|tip| tip.to_string());
    assert_eq!(tip, Some(main.clone()));

    // The pack holds the commit and its trees, and no file.
    let scratch = place.path("scratch");
    std::fs::create_dir(&scratch).unwrap();
    git(&scratch, &["init", "-q", "--bare"]);
    let mut base = second.bases.into_iter().next().unwrap();
    base.seek(SeekFrom::Start(0)).unwrap();
    let status = command(&scratch, &["index-pack", "--stdin"])
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
    let of = |kind: &str| types.lines().filter(|line| *line == kind).count();
    assert_eq!((of("commit"), of("tree"), of("blob")), (1, 3, 0), "{types}");
    git(&scratch, &["cat-file", "-e", &main]);

    // The gate asked with what the client sent, and what it asked is on record.
    let asked = place.forge.requests();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(
        asked
            .iter()
            .all(|one| one.headers["authorization"] == "Basic stub")
    );
    let records = place.records.0.lock().unwrap().clone();
    let own = records
        .iter()
        .filter(|one| one.event.as_deref() == Some("asked_for_push"));
    assert_eq!(own.count(), 2);

    // A tag may stand on a branch that the sandbox made: its trees are among them then.
    let said = place.push(&place.body("refs/tags/v1")).await;
    assert!(said.contains("ok refs/tags/v1"), "{said}");
    let mut given = std::mem::take(&mut *place.reader.given.lock().unwrap());
    let mut base = given.pop().unwrap().bases.pop().unwrap();
    base.seek(SeekFrom::Start(0)).unwrap();
    git(&scratch, &["init", "-q", "--bare", "again"]);
    let again = scratch.join("again");
    let status = command(&again, &["index-pack", "--stdin"])
        .stdin(base)
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let feature = git(&place.path("work"), &["rev-parse", "HEAD"]);
    git(&again, &["cat-file", "-e", &feature]);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_upstream_does_not_say_what_it_has_a_restricted_path_is_refused() {
    let place = Place::new("", unknown_without_bases);
    let upstream = place.path("forge/acme/app.git");
    git(&upstream, &["config", "uploadpack.allowFilter", "false"]);
    let said = place.push(&place.body(FEATURE)).await;
    assert!(
        said.contains("ng refs/heads/feature palisade: git_path"),
        "{said}"
    );
    assert!(said.contains("cannot be told"), "{said}");
    assert!(!place.refs().contains(FEATURE));
    assert_eq!(place.forge.pushed(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_reader_finds_refuses_the_push() {
    let secret = || Sighting {
        rule: "some-key".to_owned(),
        place: Whereabouts::Commit(ObjectId::Sha1([7; 20])),
    };
    type Case = (&'static str, Result<Findings, Denial>);
    let cases: [Case; 4] = [
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
                restricted: Restricted::Changed,
                ..Findings::default()
            }),
        ),
        ("internal", Err(push::unread("the reader fell over"))),
        (
            "git_malformed",
            Err(Denial::new(Reason::GitMalformed, "git:form").saying("No pack.")),
        ),
    ];
    for (reason, said) in cases {
        let place = Place::new("", move |_| said.clone());
        let heard = place.push(&place.body(FEATURE)).await;
        let line = format!("ng refs/heads/feature palisade: {reason}\n");
        assert!(heard.contains(&line), "{reason}: {heard}");
        assert!(!heard.contains("fell over"), "that is for the operator");
        assert!(!place.refs().contains(FEATURE));
        assert_eq!(place.forge.pushed(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refs_are_judged_before_anybody_reads() {
    let place = Place::new("", |_| Ok(Findings::default()));
    let said = place.push(&place.body("refs/heads/main")).await;
    assert!(
        said.contains("ng refs/heads/main palisade: git_protected"),
        "{said}"
    );
    assert!(place.reader.given.lock().unwrap().is_empty());
    assert!(place.forge.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewrite_is_refused_where_the_operator_says_so() {
    let forward = |known| {
        move |_: &Given| {
            Ok(Findings {
                fast_forward: vec![known],
                ..Findings::default()
            })
        }
    };
    for (known, expected) in [
        (Some(true), "ok refs/heads/feature"),
        (Some(false), "ng refs/heads/feature palisade: git_protected"),
        (None, "ng refs/heads/feature palisade: git_protected"),
    ] {
        let git_section = "  deny_force_push: true\n  pushable: [feature]\n";
        let place = Place::new(git_section, forward(known));
        let upstream = place.path("forge/acme/app.git");
        git(&upstream, &["update-ref", FEATURE, "main"]);
        let old = git(&upstream, &["rev-parse", "main"]);
        let mut bytes = place.body(FEATURE);
        // After the length of the line.
        bytes[4..4 + old.len()].copy_from_slice(old.as_bytes());
        let said = place.push(&bytes).await;
        assert!(said.contains(expected), "{known:?}: {said}");
    }
}
