//! Remote backend: a container of `sandbox.remote` as a sandbox, through the client of its
//! workbench.

use std::ops::ControlFlow;
use std::time::Duration;

use config::section::sandbox::RemoteContainer;
use policy::id::{BadId, SandboxId};
use sandbox::remote::{CommandEnd, OutputStream, RemoteBackend, RemoteTools};
use tokio::runtime::Runtime;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::{BashRequest, WriteRequest};
use workbench::tools::bash::{CommandEvent, CommandStream, OutputChunk};

/// Why a remote container cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The workbench client failed.
    #[error(transparent)]
    WorkbenchClient(#[from] WorkbenchClientError),
    /// The runtime of the client did not start.
    #[error("cannot start the runtime: {0}")]
    Runtime(#[from] std::io::Error),
    /// The container's name is invalid.
    #[error("invalid container name in sandbox.remote: {0}")]
    Name(#[from] BadId),
}

/// A blocking workbench client.
#[derive(Debug)]
pub struct BlockingWorkbenchClient {
    client: WorkbenchClient,
    runtime: Runtime,
}

/// The backend of a configured container, for use on threads that may block. No connection is
/// opened yet.
pub fn open(
    container: &RemoteContainer,
) -> Result<RemoteBackend<BlockingWorkbenchClient>, RemoteError> {
    let tools = BlockingWorkbenchClient::new(WorkbenchClient::for_container(container)?)?;
    Ok(RemoteBackend::new(
        SandboxId::parse(&container.name)?,
        tools,
    ))
}

impl BlockingWorkbenchClient {
    /// Wraps an asynchronous client.
    pub fn new(client: WorkbenchClient) -> std::io::Result<Self> {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build()?;
        Ok(Self { client, runtime })
    }
}

impl RemoteTools for BlockingWorkbenchClient {
    fn health(&self) -> Result<(), String> {
        let health = self.runtime.block_on(self.client.health());
        health.map_err(|error| error.to_string())
    }

    fn run(
        &self,
        line: &str,
        timeout: Duration,
        on_output: &mut dyn FnMut(OutputStream, &[u8]) -> ControlFlow<()>,
    ) -> Result<CommandEnd, String> {
        let request = BashRequest {
            command: line.to_owned(),
            timeout_seconds: Some(timeout.as_secs_f64()),
        };
        let run = async {
            let mut output = self.client.bash(&request).await?;
            loop {
                match output.next().await? {
                    CommandEvent::Output(stream, chunk) => {
                        let stream = match stream {
                            CommandStream::Stdout => OutputStream::Stdout,
                            CommandStream::Stderr => OutputStream::Stderr,
                        };
                        let bytes = match &chunk {
                            OutputChunk::Text(text) => text.as_bytes(),
                            OutputChunk::Bytes(bytes) => bytes,
                        };
                        if on_output(stream, bytes) == ControlFlow::Break(()) {
                            return Ok(CommandEnd::Stopped);
                        }
                    }
                    CommandEvent::Done {
                        timed_out: true, ..
                    } => return Ok(CommandEnd::TimedOut),
                    CommandEvent::Done { exit_code, .. } => return Ok(CommandEnd::Code(exit_code)),
                    CommandEvent::Failed(why) => return Err(WorkbenchClientError::Refused(why)),
                }
            }
        };
        let end = self.runtime.block_on(run);
        end.map_err(|error| error.to_string())
    }

    fn write(&self, path: &str, content: &str) -> Result<(), String> {
        let request = WriteRequest {
            path: path.to_owned(),
            content: content.to_owned(),
        };
        let written = self.runtime.block_on(self.client.write(&request));
        written.map(|_| ()).map_err(|error| error.to_string())
    }
}
