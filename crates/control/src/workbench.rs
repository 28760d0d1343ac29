//! Connects a workbench client to the workbench in a namespace sandbox.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use async_trait::async_trait;
use policy::id::SandboxId;
use sandbox::namespace::Namespace;
use workbench::client::address::{ClientStream, Dial, WorkbenchAddress};
use workbench::client::{WorkbenchClient, WorkbenchClientError};

/// The command line with which init starts the workbench.
const WORKBENCH_COMMAND: &[&str] = &[
    "palisade",
    "workbench",
    "--inherited",
    "--workspace-root",
    "/workspace",
];

/// How long a workbench may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Connects through the init of a sandbox.
#[derive(Clone, Debug)]
struct SandboxDialer {
    backend: Namespace,
    sandbox: SandboxId,
}

/// A client of the workbench in a sandbox. The first call starts the workbench, which runs as
/// the agent: its responses are untrusted.
pub fn client(
    backend: &Namespace,
    sandbox: &SandboxId,
) -> Result<WorkbenchClient, WorkbenchClientError> {
    let dialer = SandboxDialer {
        backend: backend.clone(),
        sandbox: sandbox.clone(),
    };
    WorkbenchClient::new(
        WorkbenchAddress::Dialer(std::sync::Arc::new(dialer)),
        START_TIMEOUT,
        None,
    )
}

#[async_trait]
impl Dial for SandboxDialer {
    async fn dial(&self) -> io::Result<Box<dyn ClientStream>> {
        let Self { backend, sandbox } = self.clone();
        let socket =
            tokio::task::spawn_blocking(move || backend.workbench(&sandbox, WORKBENCH_COMMAND))
                .await
                .map_err(io::Error::other)?
                .map_err(io::Error::other)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        Ok(Box::new(tokio::net::UnixStream::from_std(stream)?))
    }

    fn address(&self) -> String {
        format!("sandbox:{}", self.sandbox)
    }
}
