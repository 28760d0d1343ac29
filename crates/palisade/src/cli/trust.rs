//! `palisade trust`: trusts the exact content of a repository's `.palisade.yaml`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use config::{RepoFile, TrustStore};
use serde_json::json;

use crate::cli::{Global, confirm};
use crate::exit::{CliError, CliExit};
use crate::output;

#[derive(Debug, Args)]
pub struct TrustArgs {
    /// The repository
    #[arg(default_value = ".")]
    repository: PathBuf,
    /// Do not ask for confirmation
    #[arg(long, short)]
    yes: bool,
    /// Withdraw trust
    #[arg(long, conflicts_with = "list")]
    revoke: bool,
    /// List trusted repositories
    #[arg(long)]
    list: bool,
}

pub fn run(args: TrustArgs, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    paths.prepare()?;
    let mut store = TrustStore::load(&paths.trust())?;
    if args.list {
        return list(&store, global);
    }
    if args.revoke {
        // The trust of a removed repository can be revoked, too.
        let repository = args
            .repository
            .canonicalize()
            .or_else(|_| std::path::absolute(&args.repository))?;
        if !store.revoke(&repository)? {
            let message = format!(
                "{} is not trusted; to list trusted repositories: palisade trust --list",
                repository.display()
            );
            return Err(CliError::new(CliExit::NotFound, message).into());
        }
        return report("no longer trusted", &repository, None, global);
    }
    let repository = args.repository.canonicalize().map_err(|error| {
        let message = format!("cannot find {}: {error}", args.repository.display());
        CliError::new(CliExit::NotFound, message)
    })?;
    let shown = output::safe(&repository.display().to_string());
    let file = RepoFile::load(&repository)
        .map_err(|problems| CliError::new(CliExit::Usage, problems.to_string()))?
        .ok_or_else(|| {
            CliError::new(CliExit::NotFound, format!("{shown} has no .palisade.yaml"))
        })?;
    let digest = file.sha256();
    if file.trusted_content(&store).is_some() {
        return report(
            "already trusted as it is",
            &repository,
            Some(&digest),
            global,
        );
    }
    // The text was read once, so the shown text is the hashed text. Empty lines are omitted, so
    // that a file cannot scroll its content off the screen.
    output::print_message(&format!("{shown}/.palisade.yaml (sha256 {digest}):\n"));
    for (number, line) in file.text().lines().enumerate() {
        if !line.trim().is_empty() {
            output::print_message(&format!("{:>5}  {}", number + 1, output::safe(line)));
        }
    }
    output::print_message("");
    confirm(
        "Trust exactly this content? Any change to it will have to be trusted again.",
        args.yes,
    )?;
    store.trust(&file)?;
    report("trusted", &repository, Some(&digest), global)
}

fn report(
    status: &str,
    repository: &Path,
    sha256: Option<&str>,
    global: &Global,
) -> Result<CliExit> {
    if global.json {
        let answer = json!({ "status": status, "repository": repository, "sha256": sha256 });
        output::print_json(&answer)?;
    } else {
        let shown = output::safe(&repository.display().to_string());
        output::print_line(&format!("{status}: {shown}"))?;
    }
    Ok(CliExit::Ok)
}

fn list(store: &TrustStore, global: &Global) -> Result<CliExit> {
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
        output::print_line("no trusted repositories")?;
    } else {
        let rows: Vec<Vec<String>> = entries
            .into_iter()
            .map(|(path, hash)| vec![path, hash])
            .collect();
        output::print_line(&output::table(&["REPOSITORY", "SHA256"], &rows))?;
    }
    Ok(CliExit::Ok)
}
