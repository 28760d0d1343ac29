//! `palisade mcp install`: adds this server to the configuration file of an MCP client.
//!
//! The operator sees the change before it is written. Everything else in the file stays
//! unchanged, including comments, and a file that cannot be parsed is not changed.

mod clients;
mod edit;

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde_json::json;
use similar::TextDiff;

use crate::cli::{Global, confirm, sandbox_lookup};
use crate::exit::{CliError, CliExit};
use crate::output;
use crate::paths::find_program;
use clients::{McpClient, ServerEntry};

/// Maximum size of a client's file.
const MAX_FILE: u64 = 16 << 20;

/// Context lines of the diff.
const CONTEXT: usize = 2;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  palisade mcp install claude                    for you, in every project
  palisade mcp install vscode --scope project    for everyone who works on this repository
  palisade mcp install codex --print             only show what would change
  palisade mcp install zed --yes                 without asking, for a script

You see the change first. Everything else in the file stays as it is, comments too; a file that
cannot be parsed is not changed. Restart the client afterwards, and ask it to make a sandbox.

To uninstall, remove 'palisade' from the file.")]
pub struct InstallArgs {
    /// The client
    #[arg(value_enum)]
    pub client: McpClient,
    /// Scope: your account, or everyone who works on the current repository
    #[arg(long, value_enum, default_value_t = Scope::User)]
    pub scope: Scope,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
    /// Show the change without making it
    #[arg(long, conflicts_with = "yes")]
    pub print: bool,
}

/// Scope of an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scope {
    /// For the operator, in every project.
    User,
    /// For everyone who works on this repository.
    Project,
}

pub fn run(args: &InstallArgs, global: &Global) -> Result<CliExit> {
    install(args, global).context("mcp install failed")
}

fn install(args: &InstallArgs, global: &Global) -> Result<CliExit> {
    let file = client_file(args)?;
    let server = ServerEntry::new(args.client, command_line(args.scope, global)?);
    let before = read(&file)?;
    let old = before.clone().unwrap_or_default();
    let new = args.client.edit(&old, &server).map_err(|why| {
        let message = format!("{}: {why}; nothing was changed", file.display());
        CliError::new(CliExit::Usage, message)
    })?;
    let is_changed = new != old;
    if args.print {
        output::print_line(&unified_diff(&file, &old, &new))?;
        return Ok(CliExit::Ok);
    }
    if is_changed {
        output::print_message(&unified_diff(&file, &old, &new));
        confirm(&format!("Write this to {}?", file.display()), args.yes)?;
        replace(&file, before.as_deref(), &new, args.scope)?;
    }
    let client = args.client.name();
    if global.json {
        output::print_json(&json!({
            "client": client, "file": file, "changed": is_changed,
        }))?;
    } else if is_changed {
        let file = output::safe(&file.display().to_string());
        output::print_line(&format!(
            "Installed for {client} in {file}; restart {client}"
        ))?;
    } else {
        output::print_line(&format!(
            "already installed for {client}; nothing to change"
        ))?;
    }
    Ok(CliExit::Ok)
}

/// The path of the client's file. A file in the repository must not be a symbolic link, whose
/// target the repository could choose.
fn client_file(args: &InstallArgs) -> Result<PathBuf> {
    let env = |name: &str| std::env::var_os(name).map(PathBuf::from);
    if args.scope == Scope::User {
        let file = args.client.user_file(env).ok_or_else(|| {
            CliError::new(
                CliExit::Usage,
                "HOME is not set; set it, or use --scope project",
            )
        })?;
        // Operators may keep such files elsewhere and link to them.
        return Ok(std::fs::canonicalize(&file).unwrap_or(file));
    }
    let repository = sandbox_lookup::current_repository().ok_or_else(|| {
        let message =
            "--scope project needs a git repository, and the current directory is not in one";
        CliError::new(CliExit::Usage, message)
    })?;
    let mut file = repository.root().to_owned();
    for name in args.client.project_file() {
        file.push(name);
        if file.symlink_metadata().is_ok_and(|data| data.is_symlink()) {
            let message = format!("{} is a symbolic link; nothing was changed", file.display());
            return Err(CliError::new(CliExit::Usage, message).into());
        }
    }
    Ok(file)
}

/// The command that the client starts. In project scope it is the plain program name, since
/// other machines have other paths.
fn command_line(scope: Scope, global: &Global) -> Result<Vec<String>> {
    let mut words = vec![match scope {
        Scope::User => to_utf8(program()?.into_os_string())?,
        Scope::Project => "palisade".to_owned(),
    }];
    if scope == Scope::User {
        for (flag, path) in [
            ("--config", &global.config),
            ("--state-dir", &global.state_dir),
            ("--control", &global.control),
        ] {
            if let Some(path) = path {
                words.push(flag.to_owned());
                words.push(to_utf8(std::path::absolute(path)?.into_os_string())?);
            }
        }
    }
    words.push("mcp".to_owned());
    Ok(words)
}

/// The name of this program if PATH finds it, so that an updated program is used; otherwise its
/// path.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let found = find_program(OsStr::new("palisade"));
    let is_own = |file: PathBuf| std::fs::canonicalize(file).is_ok_and(|file| file == own);
    Ok(if found.is_some_and(is_own) {
        PathBuf::from("palisade")
    } else {
        own
    })
}

fn to_utf8(word: OsString) -> Result<String> {
    let not_text = |word: OsString| {
        let message = format!("{} is not valid UTF-8", word.display());
        CliError::new(CliExit::Usage, message)
    };
    Ok(word.into_string().map_err(not_text)?)
}

/// The content of the file; none if it does not exist.
fn read(file: &Path) -> Result<Option<String>> {
    let refuse = |why: String| {
        let message = format!("{}: {why}; nothing was changed", file.display());
        CliError::new(CliExit::Usage, message)
    };
    // Checked before opening: opening a FIFO would block.
    match std::fs::metadata(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(refuse(error.to_string()).into()),
        Ok(data) if !data.is_file() => return Err(refuse("not a regular file".to_owned()).into()),
        Ok(data) if data.len() > MAX_FILE => return Err(refuse("file too large".into()).into()),
        Ok(_) => {}
    }
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(|error| refuse(error.to_string()))?;
    opened
        .take(MAX_FILE)
        .read_to_string(&mut text)
        .map_err(|error| refuse(error.to_string()))?;
    Ok(Some(text))
}

/// Replaces the file atomically.
fn replace(file: &Path, before: Option<&str>, new: &str, scope: Scope) -> Result<()> {
    let directory = file.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let mut fresh = tempfile::Builder::new()
        .prefix(".palisade-")
        .tempfile_in(directory)
        .with_context(|| format!("cannot write in {}", directory.display()))?;
    let mode = match (std::fs::metadata(file), scope) {
        (Ok(data), _) => data.permissions().mode() & 0o777,
        // Such files may contain keys.
        (Err(_), Scope::User) => 0o600,
        (Err(_), Scope::Project) => 0o644,
    };
    fresh.write_all(new.as_bytes())?;
    fresh
        .as_file()
        .set_permissions(std::fs::Permissions::from_mode(mode))?;
    fresh.as_file().sync_all()?;
    // A running client may write its file at any time.
    if read(file)?.as_deref() != before {
        let message = format!(
            "{} was changed by another program meanwhile; try again",
            file.display()
        );
        return Err(CliError::new(CliExit::Failed, message).into());
    }
    fresh
        .persist(file)
        .with_context(|| format!("cannot replace {}", file.display()))?;
    Ok(())
}

/// The change of the file as a unified diff, escaped for a terminal.
fn unified_diff(file: &Path, old: &str, new: &str) -> String {
    let name = file.display().to_string();
    let diff = TextDiff::from_lines(old, new);
    let diff = diff
        .unified_diff()
        .context_radius(CONTEXT)
        .header(&name, &name)
        .to_string();
    let lines: Vec<String> = diff.lines().map(output::safe).collect();
    lines.join("\n")
}
