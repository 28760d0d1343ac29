//! Which repositories of a forge a sandbox may speak to, and as whom.

use crate::reason::Reason;
use crate::registration::{Repo, RepoName};
use crate::verdict::Denial;

/// What is asked of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RepositoryOperation {
    /// To be told its refs, before objects are fetched.
    AdvertiseFetch,
    /// To be told its refs, before something is pushed.
    AdvertisePush,
    /// Its objects.
    Fetch,
    /// To take objects and move refs.
    Push,
    /// To keep or give large files.
    Lfs,
    /// One of its archives or a file of a release.
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

    /// The word in records and metrics.
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

    /// Whether everybody may do it with a public repository.
    const fn is_public_reading(self) -> bool {
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

/// As whom a sandbox may speak to a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access<'a> {
    /// As the one it was registered for.
    Registered(&'a Repo),
    /// As nobody: no credential goes with it, neither the client's nor ours.
    Anonymous,
}

/// Decides about one operation. `name` is none where what was asked for is no `owner/name`;
/// `shown` is what it is called then.
pub fn authorise<'a>(
    repos: &'a [Repo],
    name: Option<&RepoName>,
    shown: &str,
    operation: RepositoryOperation,
    read_public: bool,
) -> Result<Access<'a>, Denial> {
    let registered = repos.iter().find(|repo| Some(&repo.name) == name);
    match (registered, operation) {
        // An archive is no part of what a registration speaks of.
        (Some(repo), _) if operation != RepositoryOperation::Download => {
            Ok(Access::Registered(repo))
        }
        _ if read_public && operation.is_public_reading() => Ok(Access::Anonymous),
        (_, RepositoryOperation::Download) => {
            Err(Denial::new(Reason::PathDenied, "git.read_public").saying(
                "Archives and releases are not open: use git, or ask the operator to set \
             git.read_public.",
            ))
        }
        _ => Err(Denial::new(Reason::GitRepo, "git:repositories")
            .saying(format!("Repo not authorized: {shown}"))),
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
            .map(|access| matches!(access, Access::Registered(_)))
            .map_err(|denial| denial.reason)
    }

    #[test]
    fn a_registered_repository_is_open_and_no_other() {
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
    fn reading_what_is_public_is_never_done_as_anybody() {
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
