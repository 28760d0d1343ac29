//! Integration tests of the crate: files in, settings or problems out.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot continue should stop"
)]

#[path = "files/documents.rs"]
mod documents;
#[path = "files/hidden.rs"]
mod hidden;
#[path = "files/limits.rs"]
mod limits;
#[path = "files/load.rs"]
mod load;
#[path = "files/mistakes.rs"]
mod mistakes;
#[path = "files/properties.rs"]
mod properties;
#[path = "files/repository.rs"]
mod repository;

use std::path::{Path, PathBuf};

use config::{Env, Settings};
use policy::host::Host;

fn no_env(_: &str) -> Option<String> {
    None
}

/// A directory with these files.
fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn load_in(dir: &Path, env: Env<'_>) -> Result<Settings, String> {
    config::load(Some(&dir.join("palisade.yaml")), env).map_err(|problems| {
        let prefix = format!("{}/", dir.display());
        problems.to_string().replace(&prefix, "")
    })
}

fn load(yaml: &str) -> Result<Settings, String> {
    load_in(directory(&[("palisade.yaml", yaml)]).path(), &no_env)
}

/// Loads `yaml`, whose first line is line 2 of the file, and compares the problems.
#[track_caller]
fn check(yaml: &str, expected: &[&str]) {
    let yaml = format!("version: \"1.0\"\n{yaml}");
    let problems = load(&yaml).err().unwrap_or_default();
    let problems: Vec<&str> = problems
        .lines()
        .map(|l| l.trim_start_matches("palisade.yaml:"))
        .collect();
    assert_eq!(problems, expected, "\n{yaml}");
}

/// The path of a file in tests/data.
fn data(name: &str) -> PathBuf {
    Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap())
        .join("tests/data")
        .join(name)
}

fn host(name: &str) -> Host {
    Host::parse(name).unwrap()
}
