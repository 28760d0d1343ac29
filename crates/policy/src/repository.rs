//! Which repositories of a forge a sandbox may speak to, and as whom.

use crate::reason::Reason;
use crate::registration::{Repo, RepoName};
use crate::verdict::Denial;

/// What is asked of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Errand {
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

impl Errand {
    /// Every errand.
    pub const ALL: [Errand; 6] = [
        Errand::AdvertiseFetch,
        Errand::AdvertisePush,
        Errand::Fetch,
        Errand::Push,
        Errand::Lfs,
        Errand::Download,
    ];

    /// The word in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Errand::AdvertiseFetch => "advertise_fetch",
            Errand::AdvertisePush => "advertise_push",
            Errand::Fetch => "fetch",
            Errand::Push => "push",
            Errand::Lfs => "lfs",
            Errand::Download => "download",
        }
    }

    /// Whether everybody may do it with a public repository.
    const fn is_public_reading(self) -> bool {
        match self {
            Errand::AdvertiseFetch | Errand::Fetch | Errand::Download => true,
            Errand::AdvertisePush | Errand::Push | Errand::Lfs => false,
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

/// Decides about one errand. `name` is none where what was asked for is no `owner/name`;
/// `shown` is what it is called then.
pub fn authorise<'a>(
    repos: &'a [Repo],
    name: Option<&RepoName>,
    shown: &str,
    errand: Errand,
    read_public: bool,
) -> Result<Access<'a>, Denial> {
    let registered = repos.iter().find(|repo| Some(&repo.name) == name);
    match (registered, errand) {
        // An archive is no part of what a registration speaks of.
        (Some(repo), _) if errand != Errand::Download => Ok(Access::Registered(repo)),
        _ if read_public && errand.is_public_reading() => Ok(Access::Anonymous),
        (_, Errand::Download) => Err(Denial::new(Reason::PathDenied, "git.read_public").saying(
            "Archives and releases are not open: use git, or ask the operator to set \
             git.read_public.",
        )),
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

    fn judge(name: &str, errand: Errand, read_public: bool) -> Result<bool, Reason> {
        let parsed = RepoName::parse(name).ok();
        let repos = repos();
        let access = authorise(&repos, parsed.as_ref(), name, errand, read_public);
        access
            .map(|access| matches!(access, Access::Registered(_)))
            .map_err(|denial| denial.reason)
    }

    #[test]
    fn a_registered_repository_is_open_and_no_other() {
        for errand in Errand::ALL {
            let open = errand != Errand::Download;
            let registered = judge("O/R.git", errand, false);
            assert_eq!(registered.is_ok(), open, "{errand:?}");
            for other in ["o/x", "x/r", "o/r.wiki", "o", "o/r/x", ""] {
                assert!(judge(other, errand, false).is_err(), "{other} {errand:?}");
            }
        }
        let denial = authorise(&repos(), None, "gist", Errand::Fetch, false).unwrap_err();
        assert_eq!(denial.reason, Reason::GitRepo);
        assert_eq!(denial.message, "Repo not authorized: gist");
    }

    #[test]
    fn reading_what_is_public_is_never_done_as_anybody() {
        for errand in Errand::ALL {
            let public = judge("x/y", errand, true);
            match errand {
                Errand::AdvertiseFetch | Errand::Fetch | Errand::Download => {
                    assert_eq!(public, Ok(false));
                }
                Errand::AdvertisePush | Errand::Push | Errand::Lfs => {
                    assert_eq!(public, Err(Reason::GitRepo));
                }
            }
        }
        assert_eq!(judge("o/r", Errand::Fetch, true), Ok(true));
        assert_eq!(judge("o/r", Errand::Download, true), Ok(false));
    }
}
