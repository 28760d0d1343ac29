//! Starts MCP servers in sandboxes: one sandbox for each tool, without a repository. Their
//! traffic passes the gate like that of any sandbox.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use config::section::tools::BridgedServer;
use control::gate::Gate;
use mcp::caller::McpCaller;
use mcp::launch::{LaunchError, LaunchedProgram, Launcher, ProgramExit, ProgramHandle};
use nix::sys::signal::Signal;
use sandbox::contract::SandboxCommand;
use sandbox::namespace::client::RunningCommand;
use tokio::net::UnixDatagram;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::Mutex;

/// How long a server may take to end after its stdin is closed.
const EXIT_TIMEOUT: Duration = Duration::from_millis(300);

/// Starts MCP servers in sandboxes, once the gate is running.
#[derive(Debug, Default)]
pub struct SandboxLauncher {
    gate: OnceLock<Arc<Gate>>,
    /// Serialises the creation of sandboxes.
    create_lock: Mutex<()>,
}

impl SandboxLauncher {
    /// Sets the gate that creates the sandboxes.
    pub fn set_gate(&self, gate: &Arc<Gate>) {
        // Called once: a process has one gate.
        let _ = self.gate.set(Arc::clone(gate));
    }

    async fn start(&self, tool: &BridgedServer) -> Result<RunningCommand, String> {
        let gate = self.gate.get().ok_or("the gate is still starting")?;
        let name = format!("tool-{}", tool.name);
        let sandbox = {
            let _lock = self.create_lock.lock().await;
            let settings = gate.policy.settings();
            let made = gate
                .sandboxes
                .ensure_tool_sandbox(&gate.store, &settings, &name)
                .await;
            made.map_err(|error| error.to_string())?
        };
        let variables = tool.env.iter();
        let command = SandboxCommand {
            environment: variables
                .map(|entry| (OsString::from(&entry.name), entry.value.expose().into()))
                .collect(),
            directory: tool.work_dir.clone(),
            ..SandboxCommand::new(&tool.command)
        };
        let started = gate.sandboxes.start(&sandbox, command).await;
        started.map_err(|error| error.to_string())
    }
}

#[async_trait::async_trait]
impl Launcher for SandboxLauncher {
    async fn launch(
        &self,
        tool: &BridgedServer,
        _: &McpCaller,
    ) -> Result<LaunchedProgram, LaunchError> {
        let mut running = self.start(tool).await.map_err(LaunchError::Failed)?;
        let failed = |error: std::io::Error| LaunchError::Failed(error.to_string());
        let missing = || LaunchError::Failed("the sandbox returned no pipes".to_owned());
        let [input, output, errors] =
            <[OwnedFd; 3]>::try_from(running.take_stdio()).map_err(|_| missing())?;
        let end = running
            .exit_descriptor()
            .try_clone_to_owned()
            .map_err(failed)?;
        Ok(LaunchedProgram {
            input: Box::pin(Sender::from_owned_fd(input).map_err(failed)?),
            output: Box::pin(Receiver::from_owned_fd(output).map_err(failed)?),
            errors: Box::pin(Receiver::from_owned_fd(errors).map_err(failed)?),
            handle: Box::new(SandboxedProcess {
                running,
                end: watch(end).map_err(failed)?,
            }),
        })
    }
}

/// The socket that reports a command's end. It is a SOCK_SEQPACKET socket, not a datagram
/// socket; waiting for readability works the same way.
fn watch(end: OwnedFd) -> std::io::Result<UnixDatagram> {
    let end = std::os::unix::net::UnixDatagram::from(end);
    end.set_nonblocking(true)?;
    UnixDatagram::from_std(end)
}

/// An MCP server in a sandbox. Dropping it kills the server and its descendants.
struct SandboxedProcess {
    running: RunningCommand,
    end: UnixDatagram,
}

#[async_trait::async_trait]
impl ProgramHandle for SandboxedProcess {
    async fn wait(&mut self) -> ProgramExit {
        // The socket is readable once, with the exit code, so the read does not block.
        self.end.readable().await.ok()?;
        let ended = self.running.wait().ok()?;
        if let Some(why) = &ended.stopped {
            tracing::warn!(%why, "mcp tool ended because its sandbox was stopped");
        }
        Some(ended.code)
    }

    async fn end(&mut self) -> ProgramExit {
        if let Ok(exit) = tokio::time::timeout(EXIT_TIMEOUT, self.wait()).await {
            return exit;
        }
        self.kill().await
    }

    fn terminate(&mut self) {
        if let Err(error) = self.running.signal(Signal::SIGTERM as i32) {
            tracing::warn!(%error, "mcp tool in a sandbox could not be signalled");
        }
    }

    async fn kill(&mut self) -> ProgramExit {
        if let Err(error) = self.running.kill() {
            tracing::warn!(%error, "mcp tool in a sandbox could not be killed");
        }
        self.wait().await
    }
}
