//! Remotes and `.palisade.yaml` of the operator's repository, for a new sandbox.

use std::path::Path;

use policy::host::Host;
use policy::registration::RepoName;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::languages;
use sandbox::git::remote_url::RemoteUrl;

use super::repository_file::FileState;

/// The properties of the operator's repository that a sandbox's registration and settings need.
#[derive(Debug, Default)]
pub(super) struct RepositoryInfo {
    /// Names and URLs of the remotes.
    pub(super) remotes: Vec<(String, String)>,
    /// State of the repository's `.palisade.yaml`.
    pub(super) file: FileState,
    /// Package registries of the languages in its worktree.
    pub(super) registries: Vec<&'static str>,
}

impl RepositoryInfo {
    /// Reads the repository that holds `path`, and the list of trusted files at `trusted`.
    /// Blocks. Read errors are reported by the manager, which opens the repository next.
    fn read(path: &Path, trusted: &Path) -> Self {
        let Ok(repository) = HostRepository::discover(path) else {
            return Self::default();
        };
        Self {
            remotes: repository.remotes().unwrap_or_default(),
            file: FileState::read(repository.root(), trusted),
            registries: languages::registries(repository.root()),
        }
    }

    /// Reads the repository at `path`; without a path, the result has no remotes and no file.
    pub(super) fn read_optional(path: Option<&Path>, trusted: &Path) -> Self {
        path.map(|path| Self::read(path, trusted))
            .unwrap_or_default()
    }

    /// The repository that `origin` points to, by HTTPS or ssh, if it is on a host of
    /// `git.hosts`.
    pub(super) fn origin(&self, hosts: &[Host]) -> Option<RepoName> {
        let url = self.origin_url()?;
        git_host(&url, hosts)?;
        RepoName::parse(url.repository()).ok()
    }

    /// The host of `git.hosts` that `origin` points to.
    pub(super) fn origin_host<'h>(&self, hosts: &'h [Host]) -> Option<&'h Host> {
        git_host(&self.origin_url()?, hosts)
    }

    fn origin_url(&self) -> Option<RemoteUrl<'_>> {
        let (_, url) = self.remotes.iter().find(|(name, _)| name == "origin")?;
        RemoteUrl::parse(url)
    }
}

/// The host of `git.hosts` that a remote URL names.
pub(super) fn git_host<'h>(url: &RemoteUrl<'_>, hosts: &'h [Host]) -> Option<&'h Host> {
    let host = Host::parse(url.host()).ok()?;
    hosts.iter().find(|known| **known == host)
}
