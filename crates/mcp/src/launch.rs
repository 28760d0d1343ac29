//! Starts and ends the programs of stdio servers.
//!
//! A program runs under a process guard (`palisade __leash`): a small parent process that ends
//! the program and all of its descendants, also those outside its process group, on a signal or
//! when the gate has exited.

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

use crate::caller::McpCaller;

/// The default time that a program may run on after its stdin was closed.
pub const DEFAULT_EXIT_TIMEOUT: Duration = Duration::from_millis(300);

/// How long a process guard may take to end its program.
const GUARD_TIMEOUT: Duration = Duration::from_secs(5);

/// The environment variables that a program inherits from the gate. The gate's other variables
/// may contain secrets.
const INHERITED_VARIABLES: [&str; 12] = [
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

/// The exit code of a program, 128 plus the signal's number if a signal ended it; none if it is
/// unknown.
pub type ProgramExit = Option<i32>;

/// Why a program was not started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// The runtime is not implemented.
    #[error("the runtime '{0}' is not implemented")]
    NotImplemented(&'static str),
    /// The program failed before, and the backoff is not over.
    #[error("it failed {failures} times in a row; the next start is possible in {} s", wait.as_secs_f32().ceil())]
    Waiting {
        /// The number of failures in a row.
        failures: u32,
        /// The rest of the backoff.
        wait: Duration,
    },
    /// Starting the program failed.
    #[error("{0}")]
    Failed(String),
}

impl LaunchError {
    /// The HTTP status.
    pub fn status(&self) -> http::StatusCode {
        match self {
            LaunchError::NotImplemented(_) => http::StatusCode::NOT_IMPLEMENTED,
            LaunchError::Waiting { .. } | LaunchError::Failed(_) => {
                http::StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

/// A running program.
pub struct LaunchedProgram {
    /// The program's stdin.
    pub input: Pin<Box<dyn AsyncWrite + Send>>,
    /// The program's stdout.
    pub output: Pin<Box<dyn AsyncRead + Send>>,
    /// The program's stderr.
    pub errors: Pin<Box<dyn AsyncRead + Send>>,
    /// Waits for the program's end, or ends it.
    pub handle: Box<dyn ProgramHandle>,
}

impl std::fmt::Debug for LaunchedProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launched").finish_non_exhaustive()
    }
}

/// Waits for the end of a program, signals it, or ends it.
#[async_trait]
pub trait ProgramHandle: Send + 'static {
    /// Waits for the program's end. The future may be dropped and created again.
    async fn wait(&mut self) -> ProgramExit;

    /// Ends the program and its descendants. Its stdin has been closed.
    async fn end(&mut self) -> ProgramExit;

    /// Sends SIGTERM to the program's process group.
    fn terminate(&mut self);

    /// Kills the program and its descendants.
    async fn kill(&mut self) -> ProgramExit;
}

/// Starts programs.
#[async_trait]
pub trait Launcher: Send + Sync + 'static {
    /// Starts the program of `tool`, for `caller`.
    async fn launch(
        &self,
        tool: &BridgedServer,
        caller: &McpCaller,
    ) -> Result<LaunchedProgram, LaunchError>;
}

/// Starts programs on the host, as the operator's user.
#[derive(Clone, Debug)]
pub struct LocalLauncher {
    /// The command and arguments of the process guard, in front of the program and its arguments.
    pub guard_command: Vec<OsString>,
    /// How long a program may run on after its stdin was closed.
    pub exit_timeout: Duration,
}

#[async_trait]
impl Launcher for LocalLauncher {
    async fn launch(
        &self,
        tool: &BridgedServer,
        _: &McpCaller,
    ) -> Result<LaunchedProgram, LaunchError> {
        let failed = |error: std::io::Error| {
            let program = tool.command.first().map_or("", String::as_str);
            LaunchError::Failed(format!("starting '{program}' failed: {error}"))
        };
        let Some(program) = self.guard_command.first() else {
            return Err(LaunchError::Failed(
                "no process guard command is configured".to_owned(),
            ));
        };
        let mut command = Command::new(program);
        command
            .args(self.guard_command.iter().skip(1))
            .args(&tool.command)
            .env_clear()
            .envs(
                INHERITED_VARIABLES
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
        let missing = || failed(std::io::Error::other("its stdio is not piped"));
        let input = child.stdin.take().ok_or_else(missing)?;
        let output = child.stdout.take().ok_or_else(missing)?;
        let errors = child.stderr.take().ok_or_else(missing)?;
        Ok(LaunchedProgram {
            input: Box::pin(input),
            output: Box::pin(output),
            errors: Box::pin(errors),
            handle: Box::new(GuardedProgram {
                child,
                exit_timeout: self.exit_timeout,
            }),
        })
    }
}

/// A program under a process guard.
struct GuardedProgram {
    child: Child,
    exit_timeout: Duration,
}

impl GuardedProgram {
    /// Signals the process guard. Its pid cannot be reused before it is waited for.
    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.child.id().and_then(|pid| i32::try_from(pid).ok())
            && let Err(error) = kill(Pid::from_raw(pid), signal)
        {
            tracing::warn!(%error, %signal, "mcp tool process could not be signalled");
        }
    }
}

#[async_trait]
impl ProgramHandle for GuardedProgram {
    async fn wait(&mut self) -> ProgramExit {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.wait().await.ok()?;
        status.code().or_else(|| Some(128 + status.signal()?))
    }

    async fn end(&mut self) -> ProgramExit {
        if let Ok(exit) = tokio::time::timeout(self.exit_timeout, self.wait()).await {
            return exit;
        }
        self.kill().await
    }

    fn terminate(&mut self) {
        // The guard forwards SIGUSR1 as SIGTERM, and sends no SIGKILL of its own after that.
        self.signal(Signal::SIGUSR1);
    }

    async fn kill(&mut self) -> ProgramExit {
        // The guard kills its program: at once after `terminate`, otherwise with SIGTERM first.
        self.signal(Signal::SIGTERM);
        if let Ok(exit) = tokio::time::timeout(GUARD_TIMEOUT, self.wait()).await {
            return exit;
        }
        tracing::error!(
            "mcp process guard did not exit in time: killed, tool processes may remain"
        );
        if let Err(error) = self.child.start_kill() {
            tracing::warn!(%error, "killing mcp process guard failed");
        }
        self.wait().await
    }
}
