//! Fixture: a mirror of a repository behind a real sshd on loopback.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;

use testkit::output;
use testkit::sshd::Sshd;

use crate::git_fixture::{FixtureOptions, GitFixture, describe};

/// The URL of the mirror inside the sandbox.
pub(crate) const APP: &str = "http://palisade.internal/git/app";

/// A secret that the gate's scanner finds: the format of an AWS access key id.
pub(crate) const SECRET: &str = "AKIAQ3EGRTUVWXYZ4MNP";

/// A gate with a mirror of a repository behind sshd.
pub(crate) struct MirrorFixture {
    pub(crate) git_fixture: GitFixture,
    pub(crate) sshd: Sshd,
    upstream: tempfile::TempDir,
}

/// Options of the fixture.
#[derive(Default)]
pub(crate) struct MirrorOptions {
    /// Whether the configured host key differs from the upstream's key.
    pub(crate) wrong_host_key: bool,
    /// Whether the gate checks the objects of a push.
    pub(crate) checked: bool,
    /// Whether the container is registered with the auth mode `bot`.
    pub(crate) bot: bool,
    /// Whether the SSH key is the output of a command instead of a file.
    pub(crate) key_from_command: bool,
    /// Another address for the upstream.
    pub(crate) address: Option<SocketAddr>,
    /// Whether the upstream is the forge, over HTTPS.
    pub(crate) https: bool,
    /// The content of policy.yaml.
    pub(crate) policy: &'static str,
    /// Additional top-level lines of palisade.yaml.
    pub(crate) top: &'static str,
    /// Whether the upstream uses SHA-256 object names.
    pub(crate) sha256: bool,
}

impl MirrorFixture {
    pub(crate) fn new(options: &MirrorOptions) -> Self {
        let sshd = Sshd::start();
        let upstream = tempfile::tempdir().unwrap();
        let at = upstream.path().join("app.git");
        let host_key = if options.wrong_host_key {
            sshd.other_key()
        } else {
            sshd.host_key()
        };
        let source = if options.key_from_command {
            "command:cat "
        } else {
            "file:"
        };
        let mirror = if options.https {
            "upstream: \"https://forge.example/acme/app\"".to_owned()
        } else {
            format!(
                "upstream: \"ssh://{}@git.example{}\"\n      identity: \"{source}{}\"\n      \
                 host_key: \"{host_key}\"",
                sshd.user(),
                at.display(),
                sshd.key().display(),
            )
        };
        let address = options.address.unwrap_or(sshd.address());
        let git_fixture = GitFixture::with_options(FixtureOptions {
            git: &format!("  mirrors:\n    - name: app\n      {mirror}\n"),
            resolve: &format!(", \"git.example\": \"{address}\""),
            checked: options.checked,
            bot: options.bot,
            policy: options.policy,
            top: options.top,
            ..FixtureOptions::default()
        });
        let fixture = Self {
            git_fixture,
            sshd,
            upstream,
        };
        let format = if options.sha256 { "sha256" } else { "sha1" };
        let format = format!("--object-format={format}");
        if !options.https {
            std::fs::create_dir(&at).unwrap();
            let git_fixture = &fixture.git_fixture;
            git_fixture.git_in(&at, &["init", "-q", "--bare", "-b", "trunk", &format]);
            git_fixture.git_in(&at, &["config", "receive.advertisePushOptions", "true"]);
        }
        fixture.push_first_commit(&format);
        fixture
    }

    /// The bare repository of the upstream.
    pub(crate) fn bare(&self) -> PathBuf {
        let behind_sshd = self.upstream.path().join("app.git");
        if behind_sshd.exists() {
            behind_sshd
        } else {
            self.git_fixture.upstream("acme/app")
        }
    }

    /// Pushes the first commit, as the operator.
    fn push_first_commit(&self, format: &str) {
        let dir = self.git_fixture.path("seed");
        std::fs::create_dir(&dir).unwrap();
        self.git_fixture
            .git_in(&dir, &["init", "-q", "-b", "trunk", format]);
        self.commit_upstream("README.md", "refs/heads/trunk");
    }

    /// Pushes a commit directly to upstream, past the gate, and returns its id.
    pub(crate) fn commit_upstream(&self, file: &str, name: &str) -> String {
        let dir = self.git_fixture.path("seed");
        self.git_fixture.commit(&dir, file, "hello\n");
        let bare = self.bare();
        let spec = format!("HEAD:{name}");
        self.git_fixture
            .git_in(&dir, &["push", "-q", bare.to_str().unwrap(), &spec]);
        self.git_fixture.git_in(&dir, &["rev-parse", "HEAD"])
    }

    pub(crate) fn refs(&self) -> String {
        let format = "--format=%(refname) %(objectname)";
        self.git_fixture
            .git_in(&self.bare(), &["for-each-ref", format])
    }

    pub(crate) fn clone_as(&self, name: &str) -> PathBuf {
        let top = self.git_fixture.path("");
        self.git_fixture.git_in(&top, &["clone", "-q", APP, name]);
        self.git_fixture.path(name)
    }

    /// Runs git, which must fail with this sentence; upstream must not change.
    #[track_caller]
    pub(crate) fn assert_refused(&self, dir: &Path, args: &[&str], sentence: &str) -> Output {
        let before = self.refs();
        let output = self.git_fixture.try_git(dir, args);
        assert!(
            !output.status.success(),
            "git {args:?}: {}",
            describe(&output)
        );
        let printed = output::stderr(&output);
        assert!(printed.contains(sentence), "no '{sentence}' in: {printed}");
        assert_eq!(self.refs(), before);
        output
    }
}
