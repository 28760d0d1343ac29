//! Pushes with the installed git: to a host, to a mirror over HTTP, and to a mirror over the git
//! protocol.

use std::path::PathBuf;
use std::process::Output;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use testkit::wait;

use crate::client::Connection;
use crate::repository::{Entry, Repository, assert_git_failed, assert_git_succeeded};

/// Limits the size of a push.
const POLICY: &str = "git: {push_limits: {warning_bytes: 32768, hard_limit_bytes: 65536}}\n";

/// Interval at which a test uses up refilled push tokens.
const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// A text that the scanner reports as a secret.
const SECRET: &str = "AKIAQ3EGRTUVWXYZ4MNP";

/// A repository with a working copy. The policy bundle allows branches below `ok`.
pub(crate) struct Pushes {
    repository: Repository,
    dir: PathBuf,
}

impl Pushes {
    pub(crate) fn start(entry: Entry) -> Option<Self> {
        let repository = Repository::start(entry, POLICY)?;
        let dir = repository.working_copy();
        Some(Self { repository, dir })
    }

    /// Commits a file on top of upstream's branch `main`.
    fn commit(&self, file: &str, text: &str) {
        let git_fixture = &self.repository.git_fixture;
        git_fixture.git_in(&self.dir, &["reset", "-q", "--hard", "origin/main"]);
        git_fixture.commit(&self.dir, file, text);
    }

    fn push(&self, branch: &str) -> Output {
        self.repository.audit.mark();
        let (remote, target) = (
            self.repository.remote("app"),
            format!("HEAD:refs/heads/{branch}"),
        );
        let args = ["push", &remote, &target];
        self.repository.git(&self.dir, &args)
    }

    #[track_caller]
    fn assert_allowed(&self, branch: &str) {
        assert_git_succeeded(&self.push(branch));
        let audit = &self.repository.audit;
        audit.wait_for_allowed(&[("kind", "git"), ("operation", "push")]);
    }

    /// Pushes to a branch, which must be refused and must not change upstream.
    #[track_caller]
    fn assert_denied(&self, branch: &str, reason: &str, rule: &str, printed: &str) {
        let before = self.repository.git_fixture.refs("acme/app");
        let output = self.push(branch);
        assert_git_failed(&output, printed);
        let fields = [("kind", "git"), ("operation", "push")];
        self.repository.audit.wait_for_denied(reason, rule, &fields);
        assert_eq!(self.repository.git_fixture.refs("acme/app"), before);
    }

    /// Runs `work` while the client has no push token. One token is refilled every second, so a
    /// thread uses up each new token.
    fn without_push_tokens<T>(&self, work: impl FnOnce() -> T) -> T {
        let (authority, path) = match self.repository.entry() {
            Entry::Host => ("forge.example", "/acme/app/git-receive-pack"),
            Entry::Mirror | Entry::GitProtocol => {
                ("palisade.internal", "/git/app/git-receive-pack")
            }
        };
        let client = self.repository.client();
        let ((drained_tx, drained_rx), (done_tx, done_rx)) =
            (mpsc::channel(), mpsc::channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut connection = client.open(authority);
                // The loop ends when `done_tx` is dropped.
                while let Err(RecvTimeoutError::Timeout) = done_rx.recv_timeout(DRAIN_INTERVAL) {
                    wait::until("the push tokens to be used up", || {
                        let answer = push_deletion(&mut connection, path);
                        answer.contains("git_rate").then_some(())
                    });
                    let _ = drained_tx.send(());
                }
            });
            drained_rx.recv().unwrap();
            let result = work();
            drop(done_tx);
            result
        })
    }
}

/// Pushes the deletion of a ref, which is always refused, and returns the response. It takes a push
/// token.
fn push_deletion(connection: &mut Connection, path: &str) -> String {
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let line = format!("{one} {zero} refs/heads/ok/gone\0report-status");
    let body = format!("{:04x}{line}0000", line.len() + 4);
    let headers = format!(
        "Content-Type: application/x-git-receive-pack-request\r\nContent-Length: {}\r\n",
        body.len()
    );
    connection.send_head("POST", path, &headers).unwrap();
    connection.write(body.as_bytes()).unwrap();
    let answer = connection.read().unwrap().text();
    assert!(answer.contains("ng refs/heads/ok/gone"), "{answer}");
    answer
}

pub(crate) fn refs(pushes: &Pushes) {
    pushes.commit("refs", "work\n");
    pushes.assert_allowed("ok/refs");
    let rule = "git:protected:ok/protected";
    pushes.assert_denied("ok/protected", "git_protected", rule, "git_protected");
}

pub(crate) fn size(pushes: &Pushes) {
    pushes.commit("small", "work\n");
    pushes.assert_allowed("ok/small");
    pushes.commit("large", &"0123456789abcdef".repeat(8192));
    // Over HTTP git prints only the status.
    let printed = match pushes.repository.entry() {
        Entry::Host | Entry::Mirror => "413",
        Entry::GitProtocol => "git_size",
    };
    pushes.assert_denied("ok/large", "git_size", "git:size", printed);
}

pub(crate) fn objects(pushes: &Pushes) {
    pushes.commit("clean", "work\n");
    pushes.assert_allowed("ok/clean");
    pushes.commit("secret", &format!("{SECRET}\n"));
    let rule = "secret:aws-access-key-id";
    pushes.assert_denied("ok/secret", "secret_found", rule, "secret_found");
}

pub(crate) fn bundles(pushes: &Pushes) {
    pushes.commit("bundles", "work\n");
    pushes.assert_allowed("ok/bundles");
    pushes.assert_denied("other", "rego_denied", "rego:mine", "Only below ok.");
}

pub(crate) fn rate(pushes: &Pushes) {
    pushes.commit("rate", "work\n");
    pushes.assert_allowed("ok/rate");
    let mut branches = (0..).map(|number| format!("ok/rate-{number}"));
    let (branch, output) = wait::until("a push without a token", || {
        let branch = branches.next()?;
        let output = pushes.without_push_tokens(|| pushes.push(&branch));
        (!output.status.success()).then_some((branch, output))
    });
    assert_git_failed(&output, "git_rate");
    let name = format!("refs/heads/{branch}");
    let audit = &pushes.repository.audit;
    audit.wait_for_denied("git_rate", "git:rate", &[("refs", &name)]);
}
