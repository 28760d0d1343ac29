//! Which sandbox a command is about.

use std::path::PathBuf;

use anyhow::Result;
use control::client::Client;
use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::manager::row::PublishedPort;
use sandbox::name::Slug;
use serde::Deserialize;

use crate::exit::{Exit, Failure};

/// A sandbox as the gate tells of it.
#[derive(Clone, Debug, Deserialize)]
pub struct Place {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: Slug,
    /// Its branch, where it has one.
    pub branch_name: Option<String>,
    /// How it is, in a word.
    pub status: String,
    /// Why it is so, where that is not well.
    pub reason: Option<String>,
    /// The operator's repository.
    pub repository: Option<PathBuf>,
    /// What all worktrees of that repository share.
    #[serde(default)]
    pub common: Option<PathBuf>,
    /// The commit its branch began at.
    pub base: Option<String>,
    /// When it was made.
    pub created_at: Option<String>,
    /// What keeps it in.
    #[serde(default)]
    pub backend: String,
    /// Whether the agent is root inside.
    #[serde(default)]
    pub root: bool,
    /// Whether programs inside may make user namespaces.
    #[serde(default)]
    pub nested: bool,
    /// Ports of this machine that lead inside.
    #[serde(default)]
    pub published: Vec<PublishedPort>,
    /// What is weaker in it than it could be.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// What the repository's own file adds to it, or why it does not.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// Where an operator stands: a worktree, and the repository behind it.
#[derive(Clone, Debug)]
pub struct Here {
    root: PathBuf,
    common: PathBuf,
}

impl Here {
    /// The repository we stand in.
    pub fn find() -> Option<Self> {
        let home = here()?;
        Some(Self {
            root: home.root().components().collect(),
            common: home.common(),
        })
    }
}

impl Place {
    /// Whether it is a connect-only container.
    pub fn is_elsewhere(&self) -> bool {
        self.backend == "remote"
    }

    /// Whether it works on this repository, in whichever worktree.
    pub fn is_of(&self, here: &Here) -> bool {
        match &self.common {
            // A link may be where it was.
            Some(common) => {
                *common == here.common
                    || std::fs::canonicalize(common).is_ok_and(|now| now == here.common)
            }
            None => self.repository.as_ref() == Some(&here.root),
        }
    }

    /// Its repository; a worktree that is gone has left the repository where it is.
    pub fn home(&self) -> Result<Option<HostRepository>> {
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

/// Every sandbox that these words may mean, by name or by id. The gate asks no other how it is.
async fn named(gate: &Client, words: &str) -> Result<Vec<Place>> {
    // Either is free of what would have to be escaped.
    let word = match SandboxId::parse(words) {
        Ok(id) => id.to_string(),
        Err(_) => slug(words)?.to_string(),
    };
    let path = format!("/v1/sandboxes?name={word}");
    Ok(serde_json::from_value(gate.get(&path).await?)?)
}

fn slug(name: &str) -> Result<Slug> {
    Ok(Slug::from_name(name).map_err(|error| Failure::new(Exit::Usage, error.to_string()))?)
}

/// The sandbox of that name in the repository we stand in, or in none.
pub async fn in_repository(
    gate: &Client,
    name: &Slug,
    here: Option<&Here>,
) -> Result<Option<Place>> {
    let is_wanted = |place: &Place| match here {
        Some(here) => place.is_of(here),
        None => place.repository.is_none(),
    };
    let mut places = named(gate, name.as_str()).await?.into_iter();
    Ok(places.find(|place| place.name == *name && !place.is_elsewhere() && is_wanted(place)))
}

/// The repository we stand in.
pub fn here() -> Option<HostRepository> {
    let directory = std::env::current_dir().ok()?;
    HostRepository::discover(&directory).ok()
}

/// The sandbox of that name: the one of the repository we stand in, else the only one there
/// is, or by its id.
pub async fn find(gate: &Client, name: &str) -> Result<Place> {
    choose(named(gate, name).await?, name, Here::find().as_ref())
}

fn choose(places: Vec<Place>, name: &str, here: Option<&Here>) -> Result<Place> {
    if let Some(place) = places.iter().find(|place| place.id.as_str() == name) {
        return Ok(place.clone());
    }
    let slug = slug(name)?;
    let named: Vec<Place> = places
        .into_iter()
        .filter(|place| place.name == slug)
        .collect();
    let of_here = named
        .iter()
        .find(|place| here.is_some_and(|here| place.is_of(here)));
    match (of_here, named.as_slice()) {
        (Some(place), _) => Ok(place.clone()),
        (None, [only]) => Ok(only.clone()),
        (None, []) => {
            let message = SandboxError::NotFound(name.to_owned()).to_string();
            Err(Failure::new(Exit::NotFound, message).into())
        }
        (None, several) => {
            let ids: Vec<&str> = several.iter().map(|place| place.id.as_str()).collect();
            let message = format!(
                "several repositories have a sandbox '{slug}'; say which by its id: {}",
                ids.join(", ")
            );
            Err(Failure::new(Exit::Usage, message).into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(id: &str, name: &str, repository: &str) -> Place {
        Place {
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
        }
    }

    #[test]
    fn a_name_is_first_that_of_this_repository_then_the_only_one() {
        let places = vec![
            place("fix-1", "fix", "/a"),
            place("fix-2", "fix", "/b"),
            place("docs-3", "docs", "/b"),
        ];
        let found = |name: &str, here: Option<&str>| {
            let here = here.map(|root| Here {
                root: format!("{root}-linked").into(),
                common: format!("{root}/.git").into(),
            });
            choose(places.clone(), name, here.as_ref())
                .map(|place| place.id.to_string())
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
