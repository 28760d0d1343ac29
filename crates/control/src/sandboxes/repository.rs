//! What a new sandbox takes from the operator's repository beside its files.

use std::path::Path;

use policy::host::Host;
use policy::registration::RepoName;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::remote_url::RemoteUrl;

use super::repository_file::FileState;

/// The operator's repository, as far as registration and settings of a sandbox need it.
#[derive(Debug, Default)]
pub(super) struct RepositoryInfo {
    /// The remotes: names and URLs.
    pub(super) remotes: Vec<(String, String)>,
    /// Its own file.
    pub(super) file: FileState,
}

impl RepositoryInfo {
    /// Reads the repository that holds `path`, and the list of trusted files at `trusted`.
    /// Blocks. What cannot be read here is reported by the manager, which opens the repository
    /// next.
    fn read(path: &Path, trusted: &Path) -> Self {
        let Ok(home) = HostRepository::discover(path) else {
            return Self::default();
        };
        Self {
            remotes: home.remotes().unwrap_or_default(),
            file: FileState::read(home.root(), trusted),
        }
    }

    /// The same, or what is known where there is no repository.
    pub(super) fn of(path: Option<&Path>, trusted: &Path) -> Self {
        path.map(|path| Self::read(path, trusted))
            .unwrap_or_default()
    }

    /// The repository that `origin` points to, by HTTPS or ssh, where that is on a git host.
    pub(super) fn origin(&self, hosts: &[Host]) -> Option<RepoName> {
        let (_, url) = self.remotes.iter().find(|(name, _)| name == "origin")?;
        let url = RemoteUrl::parse(url)?;
        git_host(&url, hosts)?;
        RepoName::parse(url.repository()).ok()
    }
}

/// The host of `git.hosts` that a remote is on.
pub(super) fn git_host<'h>(url: &RemoteUrl<'_>, hosts: &'h [Host]) -> Option<&'h Host> {
    let host = Host::parse(url.host()).ok()?;
    hosts.iter().find(|known| **known == host)
}
