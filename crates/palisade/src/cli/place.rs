//! Which sandbox a command is about.

use std::path::{Path, PathBuf};

use anyhow::Result;
use control::client::Client;
use policy::id::SandboxId;
use sandbox::contract::SandboxError;
use sandbox::git::home::Home;
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
    /// The commit its branch began at.
    pub base: Option<String>,
    /// When it was made.
    pub created_at: Option<String>,
    /// What is weaker in it than it could be.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// Every sandbox.
pub async fn all(gate: &Client) -> Result<Vec<Place>> {
    Ok(serde_json::from_value(gate.get("/v1/sandboxes").await?)?)
}

/// The repository we stand in.
pub fn here() -> Option<Home> {
    let directory = std::env::current_dir().ok()?;
    Home::discover(&directory).ok()
}

/// The sandbox of that name: the one of the repository we stand in, else the only one there
/// is, or by its id.
pub async fn find(gate: &Client, name: &str) -> Result<Place> {
    let root = here().map(|home| home.root().to_owned());
    choose(all(gate).await?, name, root.as_deref())
}

fn choose(places: Vec<Place>, name: &str, here: Option<&Path>) -> Result<Place> {
    if let Some(place) = places.iter().find(|place| place.id.as_str() == name) {
        return Ok(place.clone());
    }
    let slug =
        Slug::from_name(name).map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
    let named: Vec<Place> = places
        .into_iter()
        .filter(|place| place.name == slug)
        .collect();
    let of_here = named
        .iter()
        .find(|place| here.is_some() && place.repository.as_deref() == here);
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
            base: None,
            created_at: None,
            warnings: Vec::new(),
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
            choose(places.clone(), name, here.map(Path::new))
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
