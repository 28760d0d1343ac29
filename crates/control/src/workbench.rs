//! The workbench of a namespace sandbox: the way to it, for its client.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use async_trait::async_trait;
use policy::id::SandboxId;
use sandbox::namespace::Namespace;
use workbench::client::address::{ClientStream, Dial, WorkbenchAddress};
use workbench::client::{WorkbenchClient, WorkbenchClientError};

/// What init starts this program with.
const WORDS: &[&str] = &[
    "palisade",
    "workbench",
    "--inherited",
    "--workspace-root",
    "/workspace",
];

/// How long a workbench may take to start.
const WAIT: Duration = Duration::from_secs(10);

/// A sandbox whose init is asked for a connection.
#[derive(Clone, Debug)]
struct Inside {
    backend: Namespace,
    sandbox: SandboxId,
}

/// A client of the workbench inside a sandbox. It is started by the first call, and runs as
/// the agent: what it answers is the agent's word.
pub fn client(
    backend: &Namespace,
    sandbox: &SandboxId,
) -> Result<WorkbenchClient, WorkbenchClientError> {
    let way = Inside {
        backend: backend.clone(),
        sandbox: sandbox.clone(),
    };
    WorkbenchClient::new(
        WorkbenchAddress::Dialer(std::sync::Arc::new(way)),
        WAIT,
        None,
    )
}

#[async_trait]
impl Dial for Inside {
    async fn dial(&self) -> io::Result<Box<dyn ClientStream>> {
        let Self { backend, sandbox } = self.clone();
        let socket = tokio::task::spawn_blocking(move || backend.workbench(&sandbox, WORDS))
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
