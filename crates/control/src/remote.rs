//! A container of `sandbox.remote`, as a sandbox: the backend's needs, met by the client of
//! the workbench in it.

use std::ops::ControlFlow;
use std::time::Duration;

use config::section::sandbox::RemoteContainer;
use policy::id::{BadId, SandboxId};
use sandbox::remote::{CommandEnd, OutputStream, RemoteBackend, RemoteTools};
use tokio::runtime::Runtime;
use workbench::client::{WorkbenchClient, WorkbenchClientError};
use workbench::request::{BashRequest, WriteRequest};
use workbench::tools::bash::{CommandEvent, CommandStream, OutputChunk};

/// Why a container cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The client.
    #[error(transparent)]
    WorkbenchClient(#[from] WorkbenchClientError),
    /// The runtime it needs.
    #[error("cannot start the runtime: {0}")]
    Runtime(#[from] std::io::Error),
    /// Its name.
    #[error("the name of the container is not valid: {0}")]
    Name(#[from] BadId),
}

/// A client that blocks, for a backend.
#[derive(Debug)]
pub struct BlockingWorkbenchClient {
    client: WorkbenchClient,
    runtime: Runtime,
}

/// The sandbox of a configured container. Nothing is asked of it yet. For threads that may
/// block.
pub fn open(
    container: &RemoteContainer,
) -> Result<RemoteBackend<BlockingWorkbenchClient>, RemoteError> {
    let tools = BlockingWorkbenchClient::over(WorkbenchClient::of(container)?)?;
    Ok(RemoteBackend::new(
        SandboxId::parse(&container.name)?,
        tools,
    ))
}

impl BlockingWorkbenchClient {
    /// A client, made to block.
    pub fn over(client: WorkbenchClient) -> std::io::Result<Self> {
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
        hear: &mut dyn FnMut(OutputStream, &[u8]) -> ControlFlow<()>,
    ) -> Result<CommandEnd, String> {
        let request = BashRequest {
            command: line.to_owned(),
            timeout_seconds: Some(timeout.as_secs_f64()),
        };
        let said = async {
            let mut output = self.client.bash(&request).await?;
            loop {
                match output.next().await? {
                    CommandEvent::Output(stream, said) => {
                        let way = match stream {
                            CommandStream::Stdout => OutputStream::Stdout,
                            CommandStream::Stderr => OutputStream::Stderr,
                        };
                        let bytes = match &said {
                            OutputChunk::Text(text) => text.as_bytes(),
                            OutputChunk::Bytes(bytes) => bytes,
                        };
                        if hear(way, bytes) == ControlFlow::Break(()) {
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
        let said = self.runtime.block_on(said);
        said.map_err(|error| error.to_string())
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
