//! `palisade trust`: a repository's own wishes count only as the operator saw them.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use config::{RepoFile, TrustStore};
use serde_json::json;

use crate::cli::{Global, confirm};
use crate::exit::{Exit, Failure};
use crate::output;

#[derive(Debug, Args)]
pub struct TrustArgs {
    /// The repository
    #[arg(default_value = ".")]
    repository: PathBuf,
    /// Do not ask
    #[arg(long, short)]
    yes: bool,
    /// Take the trust back
    #[arg(long, conflicts_with = "list")]
    revoke: bool,
    /// Show what is trusted
    #[arg(long)]
    list: bool,
}

pub fn run(args: TrustArgs, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    paths.prepare()?;
    let mut store = TrustStore::load(&paths.trust())?;
    if args.list {
        return list(&store, global);
    }
    let repository = args
        .repository
        .canonicalize()
        .with_context(|| format!("cannot find {}", args.repository.display()))?;
    let shown = repository.display();
    if args.revoke {
        if !store.revoke(&repository)? {
            return Err(Failure::new(Exit::NotFound, format!("{shown} was not trusted")).into());
        }
        output::print_line(&format!("no longer trusted: {shown}"))?;
        return Ok(Exit::Ok);
    }
    let file = RepoFile::load(&repository)
        .map_err(|problems| Failure::new(Exit::Usage, problems.to_string()))?
        .ok_or_else(|| Failure::new(Exit::NotFound, format!("{shown} has no .palisade.yaml")))?;
    if file.trusted(&store).is_some() {
        output::print_line(&format!("already trusted as it is: {shown}"))?;
        return Ok(Exit::Ok);
    }
    // What is shown is what is hashed: the text was read once.
    let digest: String = file
        .digest()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    eprintln!("{shown}/.palisade.yaml (sha256 {digest}):\n");
    for line in file.text().lines() {
        eprintln!("  {}", output::safe(line));
    }
    eprintln!();
    confirm(
        "Trust exactly this content? Any change to it will have to be trusted again.",
        args.yes,
    )?;
    store.trust(&file)?;
    output::print_line(&format!("trusted: {shown}"))?;
    Ok(Exit::Ok)
}

fn list(store: &TrustStore, global: &Global) -> Result<Exit> {
    let entries: Vec<(String, String)> = store
        .list()
        .into_iter()
        .map(|entry| (entry.directory.display().to_string(), entry.sha256))
        .collect();
    if global.json {
        let shown: Vec<_> = entries
            .iter()
            .map(|(path, hash)| json!({ "repository": path, "sha256": hash }))
            .collect();
        output::print_json(&shown)?;
    } else if entries.is_empty() {
        output::print_line("nothing is trusted")?;
    } else {
        let rows: Vec<Vec<String>> = entries
            .into_iter()
            .map(|(path, hash)| vec![path, hash])
            .collect();
        output::print_line(&output::table(&["REPOSITORY", "SHA256"], &rows))?;
    }
    Ok(Exit::Ok)
}
