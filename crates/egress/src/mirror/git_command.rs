//! Runs the system's git without the operator's configuration and environment.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::upstream::MirrorUpstream;

/// Maximum size of a command's standard output.
const MAX_STDOUT_BYTES: u64 = 64 * 1024 * 1024;

/// Number of bytes that are kept from the end of a command's standard error.
const MAX_STDERR_BYTES: u64 = 4096;

/// Timeout for listing upstream's refs.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout for a fetch from upstream.
const FETCH_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Timeout for repacking a mirror.
const REPACK_TIMEOUT: Duration = Duration::from_secs(60 * 60);

/// Timeout for commands without network access.
const LOCAL_TIMEOUT: Duration = Duration::from_secs(60);

/// Git settings that override the repository's own configuration.
const FIXED_CONFIG: [&str; 7] = [
    "core.hooksPath=/dev/null",
    "gc.auto=0",
    "maintenance.auto=false",
    "receive.autogc=false",
    "safe.directory=*",
    "uploadpack.allowFilter=true",
    // Protocol version 2 serves any object by its id. Versions 0 and 1 need this setting to
    // complete a partial clone.
    "uploadpack.allowAnySHA1InWant=true",
];

/// Beginnings of final lines of git that do not name the cause of a failure.
const UNSPECIFIC_LINES: [&str; 4] = [
    "Please make sure you have the correct",
    "and the repository exists.",
    "fatal: Could not read from remote repository.",
    "fatal: the remote end hung up unexpectedly",
];

/// Why a git or ssh command failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GitCommandError {
    /// The program is not installed or did not start.
    #[error("{program} cannot be run: {error}")]
    NotStarted {
        /// Program name.
        program: &'static str,
        /// Error of the operating system.
        error: String,
    },
    /// The command exited with an error.
    #[error("{action} failed: {message}")]
    Failed {
        /// The purpose of the command.
        action: &'static str,
        /// Last line of standard error that names a cause.
        message: String,
    },
    /// The command did not end in time.
    #[error("{action} took longer than {} s", after.as_secs())]
    TimedOut {
        /// The purpose of the command.
        action: &'static str,
        /// The timeout.
        after: Duration,
    },
}

/// A bare repository, managed with git commands.
#[derive(Clone, Debug)]
pub struct BareRepository {
    directory: PathBuf,
}

impl BareRepository {
    /// The repository at `directory`, which need not exist yet.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// Path of the repository.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A git command with a clean environment, which is killed on drop.
    fn command(&self) -> Command {
        self.with_fixed_config(clean_command("git"))
    }

    fn with_fixed_config(&self, mut command: Command) -> Command {
        for setting in FIXED_CONFIG {
            command.arg("-c").arg(setting);
        }
        command
    }

    /// A git command in the repository.
    fn command_in_repository(&self) -> Command {
        let mut command = self.command();
        command.arg("--git-dir").arg(&self.directory);
        command
    }

    /// Lists upstream's refs.
    pub async fn list_upstream(
        &self,
        upstream: &MirrorUpstream,
    ) -> Result<Vec<u8>, GitCommandError> {
        let mut command = self.command();
        upstream.configure_git(&mut command);
        command.args(["ls-remote", "--symref", "--", upstream.url()]);
        command.args(["HEAD", "refs/heads/*", "refs/tags/*"]);
        run("listing the refs of the upstream", command, LIST_TIMEOUT).await
    }

    /// Whether the repository exists.
    pub async fn exists(&self) -> bool {
        tokio::fs::try_exists(self.directory.join("HEAD"))
            .await
            .unwrap_or(false)
    }

    /// Creates the repository.
    pub async fn init(&self, format: &str) -> Result<(), GitCommandError> {
        let mut command = self.command();
        command.args(["init", "--quiet", "--bare", "--template="]);
        command.arg(format!("--object-format={format}"));
        command.arg(&self.directory);
        run("creating the mirror", command, LOCAL_TIMEOUT)
            .await
            .map(drop)
    }

    /// Lists the mirror's refs.
    pub async fn refs(&self) -> Result<Vec<u8>, GitCommandError> {
        let mut command = self.command_in_repository();
        command.args(["for-each-ref", "--format=%(objectname) %(refname)"]);
        run("listing the refs of the mirror", command, LOCAL_TIMEOUT).await
    }

    /// Removes lock files and temporary packs that a killed git command left, because the locks
    /// would block later commands. While the mirror is repacked, temporary packs stay: they belong
    /// to the only other command that writes here.
    pub async fn remove_leftovers(&self, is_repacking: bool) {
        let directory = self.directory.clone();
        let removed = spawn_blocking(move || {
            remove_files(&directory, false, |name| name.ends_with(".lock"))?;
            remove_files(&directory.join("refs"), true, |name| {
                name.ends_with(".lock")
            })?;
            if is_repacking {
                return Ok(());
            }
            remove_files(&directory.join("objects/pack"), false, |name| {
                name.starts_with("tmp_") || name.starts_with(".tmp-")
            })
        });
        if let Err(error) = removed.await.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "removing leftover files of a git mirror failed");
        }
    }

    /// Fetches these refs from upstream, with deletions and forced updates.
    pub async fn fetch(
        &self,
        upstream: &MirrorUpstream,
        refs: &[&str],
    ) -> Result<(), GitCommandError> {
        let mut command = self.command_in_repository();
        upstream.configure_git(&mut command);
        command.args(["fetch", "--quiet", "--prune", "--force", "--no-tags"]);
        command.args(["--no-write-fetch-head", "--", upstream.url()]);
        command.args(refs.iter().map(|refs| format!("+{refs}:{refs}")));
        run("fetching from the upstream", command, FETCH_TIMEOUT)
            .await
            .map(drop)
    }

    /// Packs all refs into one file.
    pub async fn pack_refs(&self) -> Result<(), GitCommandError> {
        let mut command = self.command_in_repository();
        command.args(["pack-refs", "--all"]);
        run("packing the refs of the mirror", command, LOCAL_TIMEOUT)
            .await
            .map(drop)
    }

    /// Packs all objects into one pack, at low priority. Unreachable objects are kept, because a
    /// client may be fetching them.
    pub async fn repack(&self) -> Result<(), GitCommandError> {
        let has_nice = spawn_blocking(|| is_installed("nice")).await;
        let mut command = if has_nice.unwrap_or(false) {
            let mut command = clean_command("nice");
            command.args(["-n", "19", "git"]);
            self.with_fixed_config(command)
        } else {
            self.command()
        };
        command.args(["-c", "pack.threads=1"]);
        command.arg("--git-dir").arg(&self.directory);
        command.args(["repack", "-a", "-d", "-l", "-n", "-q", "--keep-unreachable"]);
        run("repacking the mirror", command, REPACK_TIMEOUT)
            .await
            .map(drop)
    }

    /// Points HEAD to the branch that upstream's HEAD points to.
    pub async fn set_head(&self, target: &str) -> Result<(), GitCommandError> {
        let mut command = self.command_in_repository();
        command.args(["symbolic-ref", "HEAD", target]);
        run("setting HEAD of the mirror", command, LOCAL_TIMEOUT)
            .await
            .map(drop)
    }

    /// Starts `git upload-pack` on standard input and output, without access to the key.
    pub fn upload_pack(
        &self,
        arguments: &[&str],
        protocol: Option<&'static str>,
    ) -> Result<Child, GitCommandError> {
        let mut command = self.command();
        command.args(["upload-pack", "--strict"]).args(arguments);
        command.arg(&self.directory);
        if let Some(protocol) = protocol {
            command.env("GIT_PROTOCOL", protocol);
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command.spawn().map_err(|error| not_started("git", &error))
    }
}

/// Removes the files of a directory whose names match `is_leftover`.
fn remove_files(
    directory: &Path,
    recursive: bool,
    is_leftover: fn(&str) -> bool,
) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if recursive {
                remove_files(&entry.path(), recursive, is_leftover)?;
            }
        } else if entry.file_name().to_str().is_some_and(is_leftover) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A command with a clean environment, which is killed on drop.
pub fn clean_command(program: &'static str) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LC_ALL", "C")
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_TERMINAL_PROMPT", "0")
        .current_dir("/")
        .kill_on_drop(true);
    command
}

/// The error of a program that did not start.
pub fn not_started(program: &'static str, error: &io::Error) -> GitCommandError {
    GitCommandError::NotStarted {
        program,
        error: error.to_string(),
    }
}

/// Runs a command to its end and returns its standard output.
async fn run(
    action: &'static str,
    mut command: Command,
    after: Duration,
) -> Result<Vec<u8>, GitCommandError> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| not_started("git", &error))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let ran = async {
        let (stdout, stderr, status) = tokio::join!(
            read_up_to(stdout, MAX_STDOUT_BYTES),
            read_tail(stderr),
            child.wait()
        );
        (stdout, stderr, status)
    };
    let (stdout, stderr, status) = timeout(after, ran)
        .await
        .map_err(|_| GitCommandError::TimedOut { action, after })?;
    if status.as_ref().is_ok_and(ExitStatus::success) {
        return Ok(stdout);
    }
    Err(GitCommandError::Failed {
        action,
        message: last_line(&stderr),
    })
}

/// Reads at most `limit` bytes and then closes the pipe.
async fn read_up_to(pipe: Option<impl AsyncRead + Unpin>, limit: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(limit).read_to_end(&mut bytes).await;
    }
    bytes
}

/// Reads a pipe to its end, so that the program is not blocked, and returns the last bytes.
pub async fn read_tail(pipe: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut tail = Vec::new();
    let Some(mut pipe) = pipe else { return tail };
    let limit = usize::try_from(MAX_STDERR_BYTES).unwrap_or(usize::MAX);
    while matches!(pipe.read_buf(&mut tail).await, Ok(read) if read > 0) {
        let excess = tail.len().saturating_sub(limit);
        tail.drain(..excess);
    }
    tail
}

/// The last line of `text` that names a cause, without control characters.
pub fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut specific =
        lines.filter(|line| !UNSPECIFIC_LINES.iter().any(|start| line.starts_with(start)));
    let line = specific.next_back().unwrap_or("no error message");
    line.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .take(300)
        .collect()
}

/// Whether a program is installed in `PATH`.
pub fn is_installed(program: impl AsRef<OsStr>) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program.as_ref()).is_file())
}
