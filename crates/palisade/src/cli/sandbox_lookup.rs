//! Finds the sandbox that a command names.

use std::path::PathBuf;

use anyhow::Result;
use control::client::ControlClient;
use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::manager::row::PublishedPort;
use sandbox::name::Slug;
use serde::Deserialize;

use crate::exit::{CliError, CliExit};

/// A sandbox as the gate's API describes it.
#[derive(Clone, Debug, Deserialize)]
pub struct SandboxInfo {
    /// The sandbox's id.
    pub id: SandboxId,
    /// The sandbox's name.
    pub name: Slug,
    /// The sandbox's branch, if it has one.
    pub branch_name: Option<String>,
    /// The status: active, paused, error, missing or unknown.
    pub status: String,
    /// The reason of the status error.
    pub reason: Option<String>,
    /// The operator's repository.
    pub repository: Option<PathBuf>,
    /// The git directory that all worktrees of that repository share.
    #[serde(default)]
    pub common: Option<PathBuf>,
    /// The commit at which the branch starts.
    pub base: Option<String>,
    /// The time of creation.
    pub created_at: Option<String>,
    /// The isolation backend.
    #[serde(default)]
    pub backend: String,
    /// Whether the agent is root in the sandbox.
    #[serde(default)]
    pub root: bool,
    /// Whether programs in the sandbox may create user namespaces.
    #[serde(default)]
    pub nested: bool,
    /// Published ports.
    #[serde(default)]
    pub published: Vec<PublishedPort>,
    /// Warnings about weaker isolation or limits.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Notes about the repository's `.palisade.yaml`.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The tier; none for containers and for sandboxes of earlier versions.
    #[serde(default)]
    pub tier: Option<String>,
    /// Names of the presets that were added when the sandbox was created.
    #[serde(default)]
    pub presets: Vec<String>,
    /// What tier and presets add, in one line; none if they add nothing.
    #[serde(default)]
    pub egress: Option<String>,
}

/// The worktree of the current directory, and the git directory of its repository.
#[derive(Clone, Debug)]
pub struct CurrentRepository {
    root: PathBuf,
    common: PathBuf,
}

impl CurrentRepository {
    /// Finds the repository of the current directory.
    pub fn find() -> Option<Self> {
        let repository = current_repository()?;
        Some(Self {
            root: repository.root().components().collect(),
            common: repository.common_dir(),
        })
    }
}

impl SandboxInfo {
    /// Whether the sandbox is a container of `sandbox.remote`.
    pub fn is_remote(&self) -> bool {
        self.backend == "remote"
    }

    /// Whether the sandbox belongs to the repository `current`, in any of its worktrees.
    pub fn belongs_to(&self, current: &CurrentRepository) -> bool {
        match &self.common {
            // The recorded path may be a symbolic link.
            Some(common) => {
                *common == current.common
                    || std::fs::canonicalize(common).is_ok_and(|now| now == current.common)
            }
            None => self.repository.as_ref() == Some(&current.root),
        }
    }

    /// The sandbox's repository, also if its worktree was removed.
    pub fn host_repository(&self) -> Result<Option<HostRepository>> {
        let Some(repository) = &self.repository else {
            return Ok(None);
        };
        match (HostRepository::discover(repository), &self.common) {
            (Err(GitError::NotARepository(_)), Some(common)) => {
                Ok(Some(HostRepository::discover(common)?))
            }
            (found, _) => Ok(Some(found?)),
        }
    }
}

/// Every sandbox with that name or id. The gate queries the status of these sandboxes only.
async fn query_by_name(gate: &ControlClient, name: &str) -> Result<Vec<SandboxInfo>> {
    // Neither an id nor a slug needs escaping.
    let query = match SandboxId::parse(name) {
        Ok(id) => id.to_string(),
        Err(_) => slug(name)?.to_string(),
    };
    let path = format!("/v1/sandboxes?name={query}");
    Ok(serde_json::from_value(gate.get(&path).await?)?)
}

fn slug(name: &str) -> Result<Slug> {
    Ok(Slug::from_name(name).map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?)
}

/// The sandbox of that name in the repository `current`, or, if `current` is none, without a
/// repository.
pub async fn find_in_repository(
    gate: &ControlClient,
    name: &Slug,
    current: Option<&CurrentRepository>,
) -> Result<Option<SandboxInfo>> {
    let is_match = |sandbox: &SandboxInfo| match current {
        Some(current) => sandbox.belongs_to(current),
        None => sandbox.repository.is_none(),
    };
    let mut sandboxes = query_by_name(gate, name.as_str()).await?.into_iter();
    Ok(
        sandboxes
            .find(|sandbox| sandbox.name == *name && !sandbox.is_remote() && is_match(sandbox)),
    )
}

/// The repository of the current directory.
pub fn current_repository() -> Option<HostRepository> {
    let directory = std::env::current_dir().ok()?;
    HostRepository::discover(&directory).ok()
}

/// The sandbox with that id or name. If several sandboxes have the name, the sandbox of the
/// current repository is found.
pub async fn find(gate: &ControlClient, name: &str) -> Result<SandboxInfo> {
    choose(
        query_by_name(gate, name).await?,
        name,
        CurrentRepository::find().as_ref(),
    )
}

fn choose(
    sandboxes: Vec<SandboxInfo>,
    name: &str,
    current: Option<&CurrentRepository>,
) -> Result<SandboxInfo> {
    if let Some(sandbox) = sandboxes.iter().find(|sandbox| sandbox.id.as_str() == name) {
        return Ok(sandbox.clone());
    }
    let slug = slug(name)?;
    let named: Vec<SandboxInfo> = sandboxes
        .into_iter()
        .filter(|sandbox| sandbox.name == slug)
        .collect();
    let in_current = named
        .iter()
        .find(|sandbox| current.is_some_and(|current| sandbox.belongs_to(current)));
    match (in_current, named.as_slice()) {
        (Some(sandbox), _) => Ok(sandbox.clone()),
        (None, [only]) => Ok(only.clone()),
        (None, []) => {
            let message = SandboxError::NotFound(name.to_owned()).to_string();
            Err(CliError::new(CliExit::NotFound, message).into())
        }
        (None, several) => {
            let ids: Vec<&str> = several.iter().map(|sandbox| sandbox.id.as_str()).collect();
            let message = format!(
                "several repositories have a sandbox '{slug}'; use one of these ids instead: {}",
                ids.join(", ")
            );
            Err(CliError::new(CliExit::Usage, message).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox_info(id: &str, name: &str, repository: &str) -> SandboxInfo {
        SandboxInfo {
            id: SandboxId::parse(id).unwrap(),
            name: Slug::from_name(name).unwrap(),
            branch_name: None,
            status: "active".to_owned(),
            reason: None,
            repository: Some(repository.into()),
            common: Some(format!("{repository}/.git").into()),
            base: None,
            created_at: None,
            backend: "namespace".to_owned(),
            root: false,
            nested: false,
            published: Vec::new(),
            warnings: Vec::new(),
            notes: Vec::new(),
            tier: None,
            presets: Vec::new(),
            egress: None,
        }
    }

    #[test]
    fn name_prefers_the_current_repository_then_the_only_match() {
        let sandboxes = vec![
            sandbox_info("fix-1", "fix", "/a"),
            sandbox_info("fix-2", "fix", "/b"),
            sandbox_info("docs-3", "docs", "/b"),
        ];
        let found = |name: &str, current: Option<&str>| {
            let current = current.map(|root| CurrentRepository {
                root: format!("{root}-linked").into(),
                common: format!("{root}/.git").into(),
            });
            choose(sandboxes.clone(), name, current.as_ref())
                .map(|sandbox| sandbox.id.to_string())
                .map_err(|error| error.to_string())
        };
        assert_eq!(found("fix", Some("/a")).unwrap(), "fix-1");
        assert_eq!(found("Fix!", Some("/b")).unwrap(), "fix-2");
        assert_eq!(found("docs", Some("/a")).unwrap(), "docs-3");
        assert_eq!(found("fix-2", Some("/a")).unwrap(), "fix-2", "an id");
        assert!(found("fix", None).unwrap_err().contains("fix-1, fix-2"));
        assert_eq!(
            found("nothing", None).unwrap_err(),
            "Sandbox 'nothing' not found."
        );
        assert!(
            found("///", None)
                .unwrap_err()
                .starts_with("Invalid sandbox name")
        );
    }
}
