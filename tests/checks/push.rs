//! A push with the git of the machine: to a host, to a mirror over HTTP, and to a mirror in git's
//! own protocol.

use std::path::PathBuf;
use std::process::Output;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use testkit::wait;

use crate::client::Connection;
use crate::repository::{Entry, Repository, failed, succeeded};

/// A push of more bytes is refused.
const POLICY: &str = "git: {push_limits: {warning_bytes: 32768, hard_limit_bytes: 65536}}\n";

/// How often a push that came back is used up.
const REPEAT: Duration = Duration::from_millis(20);

/// What the scanner takes for a secret.
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

    /// Commits a file on top of what upstream has.
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
    fn allows(&self, branch: &str) {
        succeeded(&self.push(branch));
        let audit = &self.repository.audit;
        audit.allowed(&[("kind", "git"), ("operation", "push")]);
    }

    /// A push that must be refused; upstream stays as it is.
    #[track_caller]
    fn denies(&self, branch: &str, reason: &str, rule: &str, printed: &str) {
        let before = self.repository.git_fixture.refs("acme/app");
        let output = self.push(branch);
        failed(&output, printed);
        let fields = [("kind", "git"), ("operation", "push")];
        self.repository.audit.denied(reason, rule, &fields);
        assert_eq!(self.repository.git_fixture.refs("acme/app"), before);
    }

    /// Keeps the client without a push to spare while `work` runs: one comes back every second.
    fn without_pushes<T>(&self, work: impl FnOnce() -> T) -> T {
        let (authority, path) = match self.repository.entry() {
            Entry::Host => ("forge.example", "/acme/app/git-receive-pack"),
            Entry::Mirror | Entry::GitProtocol => {
                ("palisade.internal", "/git/app/git-receive-pack")
            }
        };
        let client = self.repository.client();
        let ((used_up, is_used_up), (done, is_done)) = (mpsc::channel(), mpsc::channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut connection = client.open(authority);
                // It ends when the other side of the channel is dropped.
                while let Err(RecvTimeoutError::Timeout) = is_done.recv_timeout(REPEAT) {
                    wait::until("no push to be left", || {
                        let answer = delete(&mut connection, path);
                        answer.contains("git_rate").then_some(())
                    });
                    let _ = used_up.send(());
                }
            });
            is_used_up.recv().unwrap();
            let result = work();
            drop(done);
            result
        })
    }
}

/// Pushes a deletion, which the rules for refs refuse, and returns the answer.
fn delete(connection: &mut Connection, path: &str) -> String {
    let (zero, one) = ("0".repeat(40), "1".repeat(40));
    let line = format!("{one} {zero} refs/heads/ok/gone\0report-status");
    let body = format!("{:04x}{line}0000", line.len() + 4);
    let headers = format!(
        "Content-Type: application/x-git-receive-pack-request\r\nContent-Length: {}\r\n",
        body.len()
    );
    connection.begin("POST", path, &headers).unwrap();
    connection.write(body.as_bytes()).unwrap();
    let answer = connection.read().unwrap().text();
    assert!(answer.contains("ng refs/heads/ok/gone"), "{answer}");
    answer
}

pub(crate) fn refs(pushes: &Pushes) {
    pushes.commit("refs", "work\n");
    pushes.allows("ok/refs");
    let rule = "git:protected:ok/protected";
    pushes.denies("ok/protected", "git_protected", rule, "git_protected");
}

pub(crate) fn size(pushes: &Pushes) {
    pushes.commit("small", "work\n");
    pushes.allows("ok/small");
    pushes.commit("large", &"0123456789abcdef".repeat(8192));
    // Over HTTP git prints the status alone.
    let printed = match pushes.repository.entry() {
        Entry::Host | Entry::Mirror => "413",
        Entry::GitProtocol => "git_size",
    };
    pushes.denies("ok/large", "git_size", "git:size", printed);
}

pub(crate) fn objects(pushes: &Pushes) {
    pushes.commit("clean", "work\n");
    pushes.allows("ok/clean");
    pushes.commit("secret", &format!("{SECRET}\n"));
    let rule = "secret:aws-access-key-id";
    pushes.denies("ok/secret", "secret_found", rule, "secret_found");
}

pub(crate) fn bundles(pushes: &Pushes) {
    pushes.commit("bundles", "work\n");
    pushes.allows("ok/bundles");
    pushes.denies("other", "rego_denied", "rego:mine", "Only below ok.");
}

pub(crate) fn rate(pushes: &Pushes) {
    pushes.commit("rate", "work\n");
    pushes.allows("ok/rate");
    let mut branches = (0..).map(|number| format!("ok/rate-{number}"));
    let (branch, output) = wait::until("a push without one to spare", || {
        let branch = branches.next()?;
        let output = pushes.without_pushes(|| pushes.push(&branch));
        (!output.status.success()).then_some((branch, output))
    });
    failed(&output, "git_rate");
    let name = format!("refs/heads/{branch}");
    let audit = &pushes.repository.audit;
    audit.denied("git_rate", "git:rate", &[("refs", &name)]);
}
