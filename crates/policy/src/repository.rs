//! Access to repositories of a git host: which ones, and with which identity.

use crate::reason::Reason;
use crate::registration::{Repo, RepoName};
use crate::verdict::Denial;

/// An operation on a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RepositoryOperation {
    /// List refs before a fetch.
    AdvertiseFetch,
    /// List refs before a push.
    AdvertisePush,
    /// Fetch objects.
    Fetch,
    /// Push objects and update refs.
    Push,
    /// Upload or download LFS files.
    Lfs,
    /// Download an archive or a release file.
    Download,
}

impl RepositoryOperation {
    /// Every operation.
    pub const ALL: [RepositoryOperation; 6] = [
        RepositoryOperation::AdvertiseFetch,
        RepositoryOperation::AdvertisePush,
        RepositoryOperation::Fetch,
        RepositoryOperation::Push,
        RepositoryOperation::Lfs,
        RepositoryOperation::Download,
    ];

    /// The name in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            RepositoryOperation::AdvertiseFetch => "advertise_fetch",
            RepositoryOperation::AdvertisePush => "advertise_push",
            RepositoryOperation::Fetch => "fetch",
            RepositoryOperation::Push => "push",
            RepositoryOperation::Lfs => "lfs",
            RepositoryOperation::Download => "download",
        }
    }

    /// Whether the operation works on public repositories without a credential.
    const fn is_public_read(self) -> bool {
        match self {
            RepositoryOperation::AdvertiseFetch
            | RepositoryOperation::Fetch
            | RepositoryOperation::Download => true,
            RepositoryOperation::AdvertisePush
            | RepositoryOperation::Push
            | RepositoryOperation::Lfs => false,
        }
    }
}

/// The identity with which a sandbox may access a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RepositoryPermission<'a> {
    /// The credentials for a repository of the sandbox's registration.
    Registered(&'a Repo),
    /// No credentials, neither the client's nor the gate's.
    Anonymous,
}

/// Decides about one operation. `name` is none if the requested repository is not `owner/name`;
/// `shown` is its name in messages.
pub fn authorise<'a>(
    repos: &'a [Repo],
    name: Option<&RepoName>,
    shown: &str,
    operation: RepositoryOperation,
    read_public: bool,
) -> Result<RepositoryPermission<'a>, Denial> {
    let registered = repos.iter().find(|repo| Some(&repo.name) == name);
    match (registered, operation) {
        // A registration does not include archives.
        (Some(repo), _) if operation != RepositoryOperation::Download => {
            Ok(RepositoryPermission::Registered(repo))
        }
        _ if read_public && operation.is_public_read() => Ok(RepositoryPermission::Anonymous),
        (_, RepositoryOperation::Download) => {
            Err(
                Denial::new(Reason::PathDenied, "git.read_public").with_message(
                    "Downloads of archives and releases are not allowed. Use git, or ask the \
                 operator to set git.read_public.",
                ),
            )
        }
        _ => Err(Denial::new(Reason::GitRepo, "git:repositories")
            .with_message(format!("Repo not authorized: {shown}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repos() -> Vec<Repo> {
        let repo = |name: &str| Repo {
            name: RepoName::parse(name).unwrap(),
            max_receive_pack_bytes: None,
        };
        vec![repo("o/r"), repo("o/two")]
    }

    fn judge(
        name: &str,
        operation: RepositoryOperation,
        read_public: bool,
    ) -> Result<bool, Reason> {
        let parsed = RepoName::parse(name).ok();
        let repos = repos();
        let access = authorise(&repos, parsed.as_ref(), name, operation, read_public);
        access
            .map(|access| matches!(access, RepositoryPermission::Registered(_)))
            .map_err(|denial| denial.reason)
    }

    #[test]
    fn only_registered_repositories_are_allowed() {
        for operation in RepositoryOperation::ALL {
            let open = operation != RepositoryOperation::Download;
            let registered = judge("O/R.git", operation, false);
            assert_eq!(registered.is_ok(), open, "{operation:?}");
            for other in ["o/x", "x/r", "o/r.wiki", "o", "o/r/x", ""] {
                assert!(
                    judge(other, operation, false).is_err(),
                    "{other} {operation:?}"
                );
            }
        }
        let denial =
            authorise(&repos(), None, "gist", RepositoryOperation::Fetch, false).unwrap_err();
        assert_eq!(denial.reason, Reason::GitRepo);
        assert_eq!(denial.message, "Repo not authorized: gist");
    }

    #[test]
    fn public_read_is_anonymous_and_writes_are_refused() {
        for operation in RepositoryOperation::ALL {
            let public = judge("x/y", operation, true);
            match operation {
                RepositoryOperation::AdvertiseFetch
                | RepositoryOperation::Fetch
                | RepositoryOperation::Download => {
                    assert_eq!(public, Ok(false));
                }
                RepositoryOperation::AdvertisePush
                | RepositoryOperation::Push
                | RepositoryOperation::Lfs => {
                    assert_eq!(public, Err(Reason::GitRepo));
                }
            }
        }
        assert_eq!(judge("o/r", RepositoryOperation::Fetch, true), Ok(true));
        assert_eq!(judge("o/r", RepositoryOperation::Download, true), Ok(false));
    }
}
