//! A mirror, over HTTP and in git's own protocol.

use std::process::Output;

use crate::repository::{Entry, Repository, failed, succeeded};

/// A client of a fixture with these limits has so many requests of the gate itself.
pub(crate) const POLICY: &str = "rate_limits:
  per_upstream:
    palisade.internal: {requests_per_second: 0.0001, burst_size: 20}
";

const BURST: usize = 20;

/// Lists the refs of a mirror.
fn list(repository: &Repository, mirror: &str) -> Output {
    repository.audit.mark();
    let dir = repository.git_fixture.path("");
    repository.git(&dir, &["ls-remote", &repository.remote(mirror)])
}

#[track_caller]
fn allows(repository: &Repository, mirror: &str) {
    succeeded(&list(repository, mirror));
    let fields = [("kind", "git"), ("repo", mirror), ("rule", "git.mirrors")];
    repository.audit.allowed(&fields);
}

/// Lists the refs of a mirror, which must be refused: git prints `printed`, and the record has
/// these fields.
#[track_caller]
fn denies(
    repository: &Repository,
    mirror: &str,
    (reason, rule, printed): (&str, &str, &str),
    fields: &[(&str, &str)],
) {
    let before = repository.git_fixture.forge.requests().len();
    failed(&list(repository, mirror), printed);
    repository.audit.denied(reason, rule, fields);
    let after = repository.git_fixture.forge.requests().len();
    assert_eq!(after, before, "requests at the forge");
}

pub(crate) fn mirror(repository: &Repository) {
    allows(repository, "app");
    let denial = ("git_repo", "git.mirrors", "git_repo");
    denies(repository, "nothing", denial, &[("repo", "nothing")]);
}

pub(crate) fn address(repository: &Repository) {
    allows(repository, "public");
    let denial = ("address_class", "git.mirrors", "address_class");
    denies(repository, "private", denial, &[("repo", "private")]);
}

pub(crate) fn rate(repository: &Repository) {
    allows(repository, "app");
    let client = repository.client();
    for _ in 0..BURST {
        client.get("palisade.internal", "/health");
    }
    let denial = ("rate_limited", "rate_limits", "rate_limited");
    denies(repository, "app", denial, &[("kind", "git")]);
}

pub(crate) fn identity(repository: &Repository) {
    allows(repository, "app");
    repository.unregister();
    // Over HTTP the sender is identified before the destination is read: neither the answer nor
    // the record is one of git.
    let (printed, kind) = match repository.entry() {
        Entry::Host | Entry::Mirror => ("403", "http"),
        Entry::GitProtocol => ("identity_unknown", "git"),
    };
    let denial = ("identity_unknown", "identity", printed);
    denies(repository, "app", denial, &[("kind", kind)]);
}
