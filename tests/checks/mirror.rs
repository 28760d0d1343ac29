//! Requests to a mirror, over HTTP and over the git protocol.

use std::process::Output;

use crate::repository::{Entry, Repository, assert_git_failed, assert_git_succeeded};

/// Limits each client to [`BURST`] requests to the gate's own host.
pub(crate) const POLICY: &str = "rate_limits:
  per_upstream:
    palisade.internal: {requests_per_second: 0.0001, burst_size: 20}
";

/// `burst_size` of [`POLICY`].
const BURST: usize = 20;

/// Lists the refs of a mirror.
fn list_refs(repository: &Repository, mirror: &str) -> Output {
    repository.audit.mark();
    let dir = repository.git_fixture.path("");
    repository.git(&dir, &["ls-remote", &repository.remote(mirror)])
}

#[track_caller]
fn assert_allowed(repository: &Repository, mirror: &str) {
    assert_git_succeeded(&list_refs(repository, mirror));
    let fields = [("kind", "git"), ("repo", mirror), ("rule", "git.mirrors")];
    repository.audit.wait_for_allowed(&fields);
}

/// Lists the refs of a mirror, which must be refused: git prints `printed`, and the audit record
/// has these fields.
#[track_caller]
fn assert_denied(
    repository: &Repository,
    mirror: &str,
    (reason, rule, printed): (&str, &str, &str),
    fields: &[(&str, &str)],
) {
    let before = repository.git_fixture.forge.requests().len();
    assert_git_failed(&list_refs(repository, mirror), printed);
    repository.audit.wait_for_denied(reason, rule, fields);
    let after = repository.git_fixture.forge.requests().len();
    assert_eq!(after, before, "requests at the forge");
}

pub(crate) fn mirror(repository: &Repository) {
    assert_allowed(repository, "app");
    let denial = ("git_repo", "git.mirrors", "git_repo");
    assert_denied(repository, "nothing", denial, &[("repo", "nothing")]);
}

pub(crate) fn address(repository: &Repository) {
    assert_allowed(repository, "public");
    let denial = ("address_class", "git.mirrors", "address_class");
    assert_denied(repository, "private", denial, &[("repo", "private")]);
}

pub(crate) fn rate(repository: &Repository) {
    assert_allowed(repository, "app");
    let client = repository.client();
    for _ in 0..BURST {
        client.get("palisade.internal", "/health");
    }
    let denial = ("rate_limited", "rate_limits", "rate_limited");
    assert_denied(repository, "app", denial, &[("kind", "git")]);
}

pub(crate) fn identity(repository: &Repository) {
    assert_allowed(repository, "app");
    repository.unregister();
    // Over HTTP the gate identifies the client before it reads the destination, so the refusal and
    // the record are those of an ordinary request.
    let (printed, kind) = match repository.entry() {
        Entry::Host | Entry::Mirror => ("403", "http"),
        Entry::GitProtocol => ("identity_unknown", "git"),
    };
    let denial = ("identity_unknown", "identity", printed);
    assert_denied(repository, "app", denial, &[("kind", kind)]);
}
