//! The system's git, run with nothing of the operator's around it.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::upstream::Upstream;

/// A list of refs that is longer is nobody's.
const MOST_LISTED: u64 = 64 * 1024 * 1024;

/// What is kept of what a program complains about.
const MOST_SAID: u64 = 4096;

/// How long upstream may take to say what it has.
pub const LIST_WITHIN: Duration = Duration::from_secs(30);

/// How long it may take to give it.
const FETCH_WITHIN: Duration = Duration::from_secs(15 * 60);

/// How long a mirror may be packed anew.
const REPACK_WITHIN: Duration = Duration::from_secs(60 * 60);

/// What needs nobody else.
const ALONE_WITHIN: Duration = Duration::from_secs(60);

/// Settings that hold whatever a repository says of itself.
const ALWAYS: [&str; 7] = [
    "core.hooksPath=/dev/null",
    "gc.auto=0",
    "maintenance.auto=false",
    "receive.autogc=false",
    "safe.directory=*",
    "uploadpack.allowFilter=true",
    // The second version of the protocol gives any object by its id; without this the first
    // could not complete a partial clone.
    "uploadpack.allowAnySHA1InWant=true",
];

/// What git says last, which tells nobody why.
const ADVICE: [&str; 4] = [
    "Please make sure you have the correct",
    "and the repository exists.",
    "fatal: Could not read from remote repository.",
    "fatal: the remote end hung up unexpectedly",
];

/// Why a program did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GitCommandError {
    /// It is not there, or did not start.
    #[error("{program} cannot be run: {why}")]
    NotStarted {
        /// Its name.
        program: &'static str,
        /// What the system said.
        why: String,
    },
    /// It ended badly.
    #[error("{what} failed: {said}")]
    Failed {
        /// What it was asked for.
        what: &'static str,
        /// The last line it said.
        said: String,
    },
    /// It did not end.
    #[error("{what} took longer than {} s", after.as_secs())]
    TimedOut {
        /// What it was asked for.
        what: &'static str,
        /// The time.
        after: Duration,
    },
}

/// Git, in one bare repository.
#[derive(Clone, Debug)]
pub struct Git {
    directory: PathBuf,
}

impl Git {
    /// Git in the repository at `directory`, which need not be there yet.
    pub fn new(directory: &Path) -> Self {
        Self {
            directory: directory.to_owned(),
        }
    }

    /// Where the repository is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A command with a clean environment. It ends when whoever waits for it goes.
    fn command(&self) -> Command {
        self.settled(clean("git"))
    }

    fn settled(&self, mut command: Command) -> Command {
        for setting in ALWAYS {
            command.arg("-c").arg(setting);
        }
        command
    }

    /// A command in the repository.
    fn inside(&self) -> Command {
        let mut command = self.command();
        command.arg("--git-dir").arg(&self.directory);
        command
    }

    /// What upstream has.
    pub async fn list(&self, upstream: &Upstream) -> Result<Vec<u8>, GitCommandError> {
        let mut command = self.command();
        upstream.prepare(&mut command);
        command.args(["ls-remote", "--symref", "--", upstream.url()]);
        command.args(["HEAD", "refs/heads/*", "refs/tags/*"]);
        run("asking the upstream what it has", command, LIST_WITHIN).await
    }

    /// Whether the repository is there.
    pub async fn exists(&self) -> bool {
        tokio::fs::try_exists(self.directory.join("HEAD"))
            .await
            .unwrap_or(false)
    }

    /// Makes the repository.
    pub async fn init(&self, format: &str) -> Result<(), GitCommandError> {
        let mut command = self.command();
        command.args(["init", "--quiet", "--bare", "--template="]);
        command.arg(format!("--object-format={format}"));
        command.arg(&self.directory);
        run("making the mirror", command, ALONE_WITHIN)
            .await
            .map(drop)
    }

    /// What the mirror has.
    pub async fn refs(&self) -> Result<Vec<u8>, GitCommandError> {
        let mut command = self.inside();
        command.args(["for-each-ref", "--format=%(objectname) %(refname)"]);
        run("reading the mirror", command, ALONE_WITHIN).await
    }

    /// Removes what a git that was ended in the middle left behind: its locks would keep every
    /// later one out. Nobody else writes here, but whoever packs it anew: their packs in the
    /// making stay.
    pub async fn tidy(&self, is_repacked: bool) {
        let directory = self.directory.clone();
        let tidied = spawn_blocking(move || {
            remove(&directory, false, |name| name.ends_with(".lock"))?;
            remove(&directory.join("refs"), true, |name| {
                name.ends_with(".lock")
            })?;
            if is_repacked {
                return Ok(());
            }
            remove(&directory.join("objects/pack"), false, |name| {
                name.starts_with("tmp_") || name.starts_with(".tmp-")
            })
        });
        if let Err(error) = tidied.await.map_err(io::Error::other).flatten() {
            tracing::warn!(%error, "a mirror could not be tidied");
        }
    }

    /// Makes these refs what they are upstream.
    pub async fn fetch(&self, upstream: &Upstream, refs: &[&str]) -> Result<(), GitCommandError> {
        let mut command = self.inside();
        upstream.prepare(&mut command);
        command.args(["fetch", "--quiet", "--prune", "--force", "--no-tags"]);
        command.args(["--no-write-fetch-head", "--", upstream.url()]);
        command.args(refs.iter().map(|refs| format!("+{refs}:{refs}")));
        run("fetching from the upstream", command, FETCH_WITHIN)
            .await
            .map(drop)
    }

    /// Puts all refs into one file.
    pub async fn pack_refs(&self) -> Result<(), GitCommandError> {
        let mut command = self.inside();
        command.args(["pack-refs", "--all"]);
        run("packing refs", command, ALONE_WITHIN).await.map(drop)
    }

    /// Puts all objects into one pack, also those that no ref reaches any more: somebody may be
    /// in the middle of fetching them. Everybody else comes first.
    pub async fn repack(&self) -> Result<(), GitCommandError> {
        let has_nice = spawn_blocking(|| is_there("nice")).await;
        let mut command = if has_nice.unwrap_or(false) {
            let mut command = clean("nice");
            command.args(["-n", "19", "git"]);
            self.settled(command)
        } else {
            self.command()
        };
        command.args(["-c", "pack.threads=1"]);
        command.arg("--git-dir").arg(&self.directory);
        command.args(["repack", "-a", "-d", "-l", "-n", "-q", "--keep-unreachable"]);
        run("packing the mirror anew", command, REPACK_WITHIN)
            .await
            .map(drop)
    }

    /// Points HEAD where upstream's does.
    pub async fn point_head(&self, target: &str) -> Result<(), GitCommandError> {
        let mut command = self.inside();
        command.args(["symbolic-ref", "HEAD", target]);
        run("pointing HEAD", command, ALONE_WITHIN).await.map(drop)
    }

    /// Serves a fetch over standard input and output, with no key and no way out.
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

/// Removes the files of a directory that `is_left` knows by their names.
fn remove(directory: &Path, below: bool, is_left: fn(&str) -> bool) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if below {
                remove(&entry.path(), below, is_left)?;
            }
        } else if entry.file_name().to_str().is_some_and(is_left) {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// A program with a clean environment. It ends when whoever waits for it goes.
pub fn clean(program: &'static str) -> Command {
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

/// A program did not start.
pub fn not_started(program: &'static str, error: &io::Error) -> GitCommandError {
    GitCommandError::NotStarted {
        program,
        why: error.to_string(),
    }
}

/// Runs a command to its end, and gives what it printed.
async fn run(
    what: &'static str,
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
        let (printed, said, status) =
            tokio::join!(read(stdout, MOST_LISTED), tail(stderr), child.wait());
        (printed, said, status)
    };
    let (printed, said, status) = timeout(after, ran)
        .await
        .map_err(|_| GitCommandError::TimedOut { what, after })?;
    if status.as_ref().is_ok_and(ExitStatus::success) {
        return Ok(printed);
    }
    Err(GitCommandError::Failed {
        what,
        said: last_line(&said),
    })
}

/// What a program printed, as far as anybody wants it. One that prints more than that hangs
/// up on itself.
async fn read(pipe: Option<impl AsyncRead + Unpin>, most: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(most).read_to_end(&mut bytes).await;
    }
    bytes
}

/// The end of what a program said. All of it is read, so that it can go on saying it.
pub async fn tail(pipe: Option<impl AsyncRead + Unpin>) -> Vec<u8> {
    let mut kept = Vec::new();
    let Some(mut pipe) = pipe else { return kept };
    let most = usize::try_from(MOST_SAID).unwrap_or(usize::MAX);
    while matches!(pipe.read_buf(&mut kept).await, Ok(read) if read > 0) {
        let spare = kept.len().saturating_sub(most);
        kept.drain(..spare);
    }
    kept
}

/// The last line of text, without what a terminal would obey.
pub fn last_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut telling = lines.filter(|line| !ADVICE.iter().any(|advice| line.starts_with(advice)));
    let line = telling.next_back().unwrap_or("it did not say why");
    line.chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .take(300)
        .collect()
}

/// Whether a program of that name can be run.
pub fn is_there(program: impl AsRef<OsStr>) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(program.as_ref()).is_file())
}
