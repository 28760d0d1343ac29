//! Servers that run in a sandbox: one sandbox for each tool, without a repository, whose
//! traffic passes the gate as any other's does.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use config::section::tools::BridgedServer;
use control::gate::Gate;
use mcp::caller::Caller;
use mcp::launch::{Exit, LaunchError, Launched, Launcher, Life};
use nix::sys::signal::Signal;
use sandbox::contract::SandboxCommand;
use sandbox::namespace::client::RunningCommand;
use tokio::net::UnixDatagram;
use tokio::net::unix::pipe::{Receiver, Sender};
use tokio::sync::Mutex;

/// How long a server may take to end by itself once its input has ended.
const PATIENCE: Duration = Duration::from_millis(300);

/// Starts servers in sandboxes, once there is a gate that has some.
#[derive(Debug, Default)]
pub struct Sandboxed {
    gate: OnceLock<Arc<Gate>>,
    /// One sandbox is made at a time.
    making: Mutex<()>,
}

impl Sandboxed {
    /// From now on sandboxes can be had.
    pub fn open(&self, gate: &Arc<Gate>) {
        // There is one gate.
        let _ = self.gate.set(Arc::clone(gate));
    }

    async fn start(&self, tool: &BridgedServer) -> Result<RunningCommand, String> {
        let gate = self.gate.get().ok_or("the gate is not up yet")?;
        let name = format!("tool-{}", tool.name);
        let place = {
            let _one = self.making.lock().await;
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
        let started = gate.sandboxes.start(&place, command).await;
        started.map_err(|error| error.to_string())
    }
}

#[async_trait::async_trait]
impl Launcher for Sandboxed {
    async fn launch(&self, tool: &BridgedServer, _: &Caller) -> Result<Launched, LaunchError> {
        let mut running = self.start(tool).await.map_err(LaunchError::Failed)?;
        let failed = |error: std::io::Error| LaunchError::Failed(error.to_string());
        let missing = || LaunchError::Failed("the sandbox gave no pipes".to_owned());
        let [input, output, errors] =
            <[OwnedFd; 3]>::try_from(running.take_ends()).map_err(|_| missing())?;
        let end = running.end().try_clone_to_owned().map_err(failed)?;
        Ok(Launched {
            input: Box::pin(Sender::from_owned_fd(input).map_err(failed)?),
            output: Box::pin(Receiver::from_owned_fd(output).map_err(failed)?),
            errors: Box::pin(Receiver::from_owned_fd(errors).map_err(failed)?),
            life: Box::new(Inside {
                running,
                end: watch(end).map_err(failed)?,
            }),
        })
    }
}

/// The socket that reports a command's end. It is no datagram's socket
/// but one of packets; waiting is the same.
fn watch(end: OwnedFd) -> std::io::Result<UnixDatagram> {
    let end = std::os::unix::net::UnixDatagram::from(end);
    end.set_nonblocking(true)?;
    UnixDatagram::from_std(end)
}

/// A command in a sandbox. Dropping it kills it, with everything it started.
struct Inside {
    running: RunningCommand,
    end: UnixDatagram,
}

#[async_trait::async_trait]
impl Life for Inside {
    async fn ended(&mut self) -> Exit {
        // It is readable once, with the code: reading it then does not wait.
        self.end.readable().await.ok()?;
        let ended = self.running.wait().ok()?;
        if let Some(why) = &ended.stopped {
            tracing::warn!(%why, "a tool ended with its sandbox");
        }
        Some(ended.code)
    }

    async fn end(&mut self) -> Exit {
        if let Ok(exit) = tokio::time::timeout(PATIENCE, self.ended()).await {
            return exit;
        }
        self.kill().await
    }

    fn terminate(&mut self) {
        if let Err(error) = self.running.signal(Signal::SIGTERM as i32) {
            tracing::warn!(%error, "mcp tool in a sandbox could not be signalled");
        }
    }

    async fn kill(&mut self) -> Exit {
        if let Err(error) = self.running.kill() {
            tracing::warn!(%error, "mcp tool in a sandbox could not be killed");
        }
        self.ended().await
    }
}
