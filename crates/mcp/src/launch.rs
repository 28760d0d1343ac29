//! Starting and ending the programs behind the bridge.
//!
//! A program is started under a leash (`palisade __leash`): a small process that ends it and
//! everything that came of it, also what left its process group, when it is told to or when
//! the gate is gone.

use std::ffi::OsString;
use std::pin::Pin;
use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use config::section::tools::BridgedServer;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::process::{Child, Command};

use crate::caller::Caller;

/// How long a program may take to end by itself once its input has ended, as a rule.
pub const PATIENCE: Duration = Duration::from_millis(300);

/// How long a leash may take to end everything.
const LEASH_PATIENCE: Duration = Duration::from_secs(5);

/// What a program may know of the gate's environment. The gate's own variables may hold
/// what is none of a tool's business.
const INHERITED: [&str; 12] = [
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "XDG_RUNTIME_DIR",
];

/// How a program ended: its code, or none where nobody knows.
pub type Exit = Option<i32>;

/// Why a program was not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The place it should run in does not exist yet.
    #[error("the runtime '{0}' is not built yet")]
    NotBuilt(&'static str),
    /// It failed a moment ago, and is given time.
    #[error("it failed {failures} times in a row and is tried again in {} s", wait.as_secs_f32().ceil())]
    Waiting {
        /// How often.
        failures: u32,
        /// For how long.
        wait: Duration,
    },
    /// The system refused.
    #[error("{0}")]
    Failed(String),
}

impl LaunchError {
    /// What it is in HTTP.
    pub fn status(&self) -> http::StatusCode {
        match self {
            LaunchError::NotBuilt(_) => http::StatusCode::NOT_IMPLEMENTED,
            LaunchError::Waiting { .. } | LaunchError::Failed(_) => {
                http::StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

/// A program that runs.
pub struct Launched {
    /// What it reads.
    pub input: Pin<Box<dyn AsyncWrite + Send>>,
    /// What it says.
    pub output: Pin<Box<dyn AsyncRead + Send>>,
    /// What it says beside that.
    pub errors: Pin<Box<dyn AsyncRead + Send>>,
    /// Its end.
    pub life: Box<dyn Life>,
}

impl std::fmt::Debug for Launched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launched").finish_non_exhaustive()
    }
}

/// The life of a program.
#[async_trait]
pub trait Life: Send + 'static {
    /// Waits for its end. May be dropped and called again.
    async fn ended(&mut self) -> Exit;

    /// Ends it and everything that came of it. Its input has been closed.
    async fn end(&mut self) -> Exit;

    /// Sends SIGTERM to its process group.
    fn terminate(&mut self);

    /// Kills it and everything that came of it.
    async fn kill(&mut self) -> Exit;
}

/// Starts programs.
#[async_trait]
pub trait Launcher: Send + Sync + 'static {
    /// Starts the program of `tool`, for `caller`.
    async fn launch(&self, tool: &BridgedServer, caller: &Caller) -> Result<Launched, LaunchError>;
}

/// Starts programs on this machine, as the operator.
#[derive(Clone, Debug)]
pub struct Local {
    /// The words that come before a program and its arguments: the leash.
    pub leash: Vec<OsString>,
    /// How long a program may take to end by itself once its input has ended.
    pub patience: Duration,
}

#[async_trait]
impl Launcher for Local {
    async fn launch(&self, tool: &BridgedServer, _: &Caller) -> Result<Launched, LaunchError> {
        let failed = |error: std::io::Error| {
            let program = tool.command.first().map_or("", String::as_str);
            LaunchError::Failed(format!("'{program}' was not started: {error}"))
        };
        let Some(program) = self.leash.first() else {
            return Err(LaunchError::Failed("there is no leash".to_owned()));
        };
        let mut command = Command::new(program);
        command
            .args(self.leash.iter().skip(1))
            .args(&tool.command)
            .env_clear()
            .envs(
                INHERITED
                    .iter()
                    .filter_map(|name| Some((*name, std::env::var_os(name)?))),
            )
            .envs(
                tool.env
                    .iter()
                    .map(|entry| (&entry.name, entry.value.expose())),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(dir) = &tool.work_dir {
            command.current_dir(dir);
        }
        let mut child = command.spawn().map_err(failed)?;
        let missing = || failed(std::io::Error::other("it has no pipes"));
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        Ok(Launched {
            input: Box::pin(input),
            output: Box::pin(output),
            errors: Box::pin(errors),
            life: Box::new(Leashed {
                child,
                patience: self.patience,
            }),
        })
    }
}

struct Leashed {
    child: Child,
    patience: Duration,
}

impl Leashed {
    /// Signals the leash, whose number is its own until it is waited for.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok())
            && let Err(error) = kill(Pid::from_raw(pid), signal)
        {
            tracing::warn!(%error, %signal, "mcp tool process could not be signalled");
        }
    }
}

#[async_trait]
impl Life for Leashed {
    async fn ended(&mut self) -> Exit {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.wait().await.ok()?;
        status.code().or_else(|| Some(128 + status.signal()?))
    }

    async fn end(&mut self) -> Exit {
        if let Ok(exit) = tokio::time::timeout(self.patience, self.ended()).await {
            return exit;
        }
        self.kill().await
    }

    fn terminate(&mut self) {
        // The leash passes it on as SIGTERM, and kills nothing by itself from then on.
        self.signal(Signal::SIGUSR1);
    }

    async fn kill(&mut self) -> Exit {
        // The leash ends the others: at once if they were terminated before, else SIGTERM first.
        self.signal(Signal::SIGTERM);
        if let Ok(exit) = tokio::time::timeout(LEASH_PATIENCE, self.ended()).await {
            return exit;
        }
        tracing::error!("a leash did not end in time and is killed; what it held may live on");
        if let Err(error) = self.child.start_kill() {
            tracing::warn!(%error, "a leash could not be killed");
        }
        self.ended().await
    }
}
