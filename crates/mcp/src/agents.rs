//! MCP server for agents: manages sandboxes and runs tools in them over stdio, for a client such
//! as an editor or a coding agent on the operator's machine.
//!
//! ```text
//!   client ── stdio ──▶ AgentServer ──▶ SandboxService (a port) ──▶ gate, workbench, repository
//!                          └── after each changing tool: a snapshot on the sandbox's branch
//! ```
//!
//! An agent chooses a sandbox's name and the work in it. An agent cannot choose the repository,
//! the credentials, the backend or the published ports.

pub mod answers;
pub mod commit_message;
pub mod parameters;
pub mod sandbox_service;
pub mod tools;

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use policy::id::SandboxId;
use rmcp::handler::server::tool::parse_json_object;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ErrorData, Implementation, JsonObject,
    ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::{RequestContext, RoleServer};
use rmcp::{ServerHandler, ServiceExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use answers::{
    BashAnswer, CommitNote, DeleteAnswer, EditAnswer, GlobAnswer, GrepAnswer, ListAnswer, LsAnswer,
    PatchAnswer, SandboxAnswer, ToolAnswer, WithCommit, WriteAnswer, read_result, tool_result,
};
use parameters::{
    Bash, Create, Delete, Diff, Edit, Glob, Grep, Ls, NoParameters, Patch, Read, SandboxOnly,
    Transfer, Write,
};
use sandbox_service::{AgentSandbox, SandboxService, SandboxServiceError};

/// Calls in flight at a time.
const MAX_CALLS: usize = 32;

/// How long the calls in flight may take to commit their changes after the client disconnected.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes of a diff in an answer.
const MAX_DIFF_BYTES: usize = 256 << 10;

/// Instructions for the model, in the answer to `initialize`.
const INSTRUCTIONS: &str = "\
Tools to work on this git repository inside a sandbox. Begin with sandbox-create; then read, \
write, edit, patch, bash, ls, glob and grep work on the sandbox's own copy. Each change is \
committed to the branch palisade/NAME, which the operator reviews and merges; report its name \
to the operator when you are done. The operator's own files are not changed. Network requests \
from the sandbox pass through a gate: a refused request contains the reason, and the operator can \
allow it.";

/// Why serving a client failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The `initialize` handshake with the client failed.
    #[error("the MCP handshake with the client failed: {0}")]
    Handshake(String),
    /// The task that serves the client failed.
    #[error("serving the MCP client failed: {0}")]
    Service(String),
}

/// The MCP server. The server stores which sandboxes were created in its session.
#[derive(Clone)]
pub struct AgentServer {
    service: Arc<dyn SandboxService>,
    created_sandboxes: Arc<Mutex<Vec<SandboxId>>>,
    tools: Arc<[Tool]>,
    calls: Arc<Semaphore>,
}

impl AgentServer {
    /// A server for the sandboxes of `service`.
    pub fn new(service: Arc<dyn SandboxService>) -> Self {
        Self {
            service,
            created_sandboxes: Arc::default(),
            tools: tools::all_tools().into(),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        }
    }

    /// Serves the client that started this process, over stdio, until the client disconnects.
    pub async fn serve_stdio(self) -> Result<(), ServeError> {
        let (input, output) = rmcp::transport::io::stdio_pipes();
        self.serve(input, output).await
    }

    /// Serves one client until it disconnects.
    pub async fn serve<R, W>(self, input: R, output: W) -> Result<(), ServeError>
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let handshake_error = |error: rmcp::service::ServerInitializeError| match error {
            rmcp::service::ServerInitializeError::ConnectionClosed(_) => None,
            other => Some(ServeError::Handshake(other.to_string())),
        };
        let calls = Arc::clone(&self.calls);
        let running = match ServiceExt::serve(self, (input, output)).await {
            Ok(running) => running,
            // A client that disconnects before the handshake is no error.
            Err(error) => return handshake_error(error).map_or(Ok(()), Err),
        };
        let ended = running.waiting().await;
        // The calls in flight are cancelled and commit their changes.
        let all = u32::try_from(MAX_CALLS).unwrap_or(u32::MAX);
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, calls.acquire_many(all))
            .await
            .is_err()
        {
            tracing::warn!("mcp call still running after its client disconnected");
        }
        ended.map_err(|error| ServeError::Service(error.to_string()))?;
        Ok(())
    }

    /// Runs the tool of that name.
    async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        cancelled: &CancellationToken,
    ) -> Result<CallToolResult, ErrorData> {
        match name {
            "sandbox-create" => tool_result(self.create(parse_json_object(arguments)?).await),
            "sandbox-list" => {
                let NoParameters {} = parse_json_object(arguments)?;
                let listed = self.service.list().await;
                tool_result(listed.map(|sandboxes| ListAnswer { sandboxes }))
            }
            "sandbox-ports" => tool_result(self.ports(parse_json_object(arguments)?).await),
            "sandbox-pause" => tool_result(self.pause(parse_json_object(arguments)?).await),
            "sandbox-resume" => tool_result(self.resume(parse_json_object(arguments)?).await),
            "sandbox-delete" => tool_result(self.delete(parse_json_object(arguments)?).await),
            "read" => read_result(self.read(parse_json_object(arguments)?, cancelled).await),
            "write" => tool_result(self.write(parse_json_object(arguments)?, cancelled).await),
            "edit" => tool_result(self.edit(parse_json_object(arguments)?, cancelled).await),
            "patch" => tool_result(self.patch(parse_json_object(arguments)?, cancelled).await),
            "bash" => tool_result(self.bash(parse_json_object(arguments)?, cancelled).await),
            "ls" => tool_result(self.ls(parse_json_object(arguments)?, cancelled).await),
            "glob" => tool_result(self.glob(parse_json_object(arguments)?, cancelled).await),
            "grep" => tool_result(self.grep(parse_json_object(arguments)?, cancelled).await),
            "upload" => tool_result(self.upload(parse_json_object(arguments)?).await),
            "download" => tool_result(self.download(parse_json_object(arguments)?).await),
            "diff" => tool_result(self.diff(parse_json_object(arguments)?).await),
            other => Err(ErrorData::invalid_params(
                format!("Unknown tool '{}'.", other.escape_debug()),
                None,
            )),
        }
    }

    async fn create(&self, parameters: Create) -> Result<SandboxAnswer, SandboxServiceError> {
        let sandbox = self
            .service
            .create(&parameters.name, parameters.dirty)
            .await?;
        self.add_created(&sandbox.id);
        Ok(SandboxAnswer { sandbox })
    }

    async fn ports(
        &self,
        parameters: SandboxOnly,
    ) -> Result<sandbox_service::Ports, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        self.service.ports(&id).await
    }

    async fn pause(&self, parameters: SandboxOnly) -> Result<SandboxAnswer, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        self.service.pause(&id).await?;
        let sandbox = self.service.find(id.as_str()).await?;
        Ok(SandboxAnswer { sandbox })
    }

    async fn resume(&self, parameters: SandboxOnly) -> Result<SandboxAnswer, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        self.service.resume(&id).await?;
        let sandbox = self.service.find(id.as_str()).await?;
        Ok(SandboxAnswer { sandbox })
    }

    async fn delete(&self, parameters: Delete) -> Result<DeleteAnswer, SandboxServiceError> {
        let sandbox = self.find_sandbox(parameters.sandbox.as_deref()).await?;
        if parameters.force && !self.has_created(&sandbox.id) {
            let name = &sandbox.name;
            return Err(SandboxServiceError::Refused(format!(
                "{name} was not made in this session, so force is not allowed; ask the operator to \
                 delete it"
            )));
        }
        let deleted = self.service.delete(&sandbox.id, parameters.force).await?;
        self.remove_created(&sandbox.id);
        Ok(DeleteAnswer {
            name: sandbox.name,
            deleted,
        })
    }

    async fn read(
        &self,
        parameters: Read,
        cancelled: &CancellationToken,
    ) -> Result<(String, sandbox_service::FileContent), SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let content = or_cancelled(cancelled, self.service.read(&id, &parameters)).await?;
        Ok((parameters.path, content))
    }

    async fn write(
        &self,
        parameters: Write,
        cancelled: &CancellationToken,
    ) -> Result<WithCommit<WriteAnswer>, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let done = or_cancelled(cancelled, self.service.write(&id, &parameters)).await;
        let message = commit_message::for_tool("write", &parameters.path);
        self.commit(&id, done.map(WriteAnswer::from), &message)
            .await
    }

    async fn edit(
        &self,
        parameters: Edit,
        cancelled: &CancellationToken,
    ) -> Result<WithCommit<EditAnswer>, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let done = or_cancelled(cancelled, self.service.edit(&id, &parameters)).await;
        let message = commit_message::for_tool("edit", &parameters.path);
        self.commit(&id, done.map(EditAnswer::from), &message).await
    }

    async fn patch(
        &self,
        parameters: Patch,
        cancelled: &CancellationToken,
    ) -> Result<WithCommit<PatchAnswer>, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let done = or_cancelled(cancelled, self.service.patch(&id, &parameters.patch)).await;
        let files = done.as_deref().unwrap_or_default();
        let message = commit_message::for_files("patch", files);
        self.commit(&id, done.map(|files| PatchAnswer { files }), &message)
            .await
    }

    async fn bash(
        &self,
        parameters: Bash,
        cancelled: &CancellationToken,
    ) -> Result<WithCommit<BashAnswer>, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let done = or_cancelled(cancelled, self.service.bash(&id, &parameters)).await;
        let message = commit_message::for_tool("bash", &parameters.command);
        self.commit(&id, done.map(BashAnswer::from), &message).await
    }

    async fn ls(
        &self,
        parameters: Ls,
        cancelled: &CancellationToken,
    ) -> Result<LsAnswer, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let listed = or_cancelled(cancelled, self.service.ls(&id, &parameters)).await?;
        Ok(listed.into())
    }

    async fn glob(
        &self,
        parameters: Glob,
        cancelled: &CancellationToken,
    ) -> Result<GlobAnswer, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let found = or_cancelled(cancelled, self.service.glob(&id, &parameters)).await?;
        Ok(found.into())
    }

    async fn grep(
        &self,
        parameters: Grep,
        cancelled: &CancellationToken,
    ) -> Result<GrepAnswer, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let found = or_cancelled(cancelled, self.service.grep(&id, &parameters)).await?;
        Ok(found.into())
    }

    async fn upload(
        &self,
        parameters: Transfer,
    ) -> Result<WithCommit<sandbox_service::CopiedFiles>, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let to = parameters.to.as_deref().unwrap_or(".");
        let done = self.service.upload(&id, &parameters.source, to).await;
        let message = commit_message::for_tool("upload", &parameters.source);
        self.commit(&id, done, &message).await
    }

    async fn download(
        &self,
        parameters: Transfer,
    ) -> Result<sandbox_service::CopiedFiles, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        let to = parameters.to.as_deref().unwrap_or(".");
        self.service.download(&id, &parameters.source, to).await
    }

    async fn diff(
        &self,
        parameters: Diff,
    ) -> Result<sandbox_service::Changes, SandboxServiceError> {
        let id = self.find_sandbox(parameters.sandbox.as_deref()).await?.id;
        // The diff includes the changes of background processes.
        self.service.snapshot(&id, "snapshot").await?;
        let max_bytes = if parameters.stat { 0 } else { MAX_DIFF_BYTES };
        self.service.diff(&id, max_bytes).await
    }

    /// Commits the changes of a call to the sandbox's branch. A call that failed or was cancelled
    /// may have changed files, too.
    async fn commit<T: ToolAnswer>(
        &self,
        id: &SandboxId,
        done: Result<T, SandboxServiceError>,
        message: &str,
    ) -> Result<WithCommit<T>, SandboxServiceError> {
        // The call was rejected before it could change a file.
        if let Err(error @ SandboxServiceError::Invalid(_)) = done {
            return Err(error);
        }
        let commit = CommitNote::from_snapshot(self.service.snapshot(id, message).await);
        let answer = done?;
        Ok(WithCommit { answer, commit })
    }

    /// The sandbox called `name`; without a name the only one of this session.
    async fn find_sandbox(&self, name: Option<&str>) -> Result<AgentSandbox, SandboxServiceError> {
        if let Some(name) = name {
            return self.service.find(name).await;
        }
        let created = self.created_sandboxes();
        match created.as_slice() {
            [only] => self.service.find(only.as_str()).await,
            [] => Err(SandboxServiceError::Invalid(
                "Name a sandbox: none was made in this session. List them with sandbox-list, or \
                 create one with sandbox-create."
                    .to_owned(),
            )),
            several => Err(SandboxServiceError::Invalid(format!(
                "Name a sandbox: {} were made in this session. List them with sandbox-list.",
                several.len()
            ))),
        }
    }

    fn created_sandboxes(&self) -> Vec<SandboxId> {
        let created = self
            .created_sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        created.clone()
    }

    fn has_created(&self, id: &SandboxId) -> bool {
        self.created_sandboxes().contains(id)
    }

    fn add_created(&self, id: &SandboxId) {
        let mut created = self
            .created_sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        created.push(id.clone());
    }

    fn remove_created(&self, id: &SandboxId) {
        let mut created = self
            .created_sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        created.retain(|one| one != id);
    }
}

/// Awaits `work`, unless the client cancels the call first.
async fn or_cancelled<T>(
    cancelled: &CancellationToken,
    work: impl Future<Output = Result<T, SandboxServiceError>>,
) -> Result<T, SandboxServiceError> {
    tokio::select! {
        done = work => done,
        () = cancelled.cancelled() => {
            Err(SandboxServiceError::Refused("The call was cancelled.".to_owned()))
        }
    }
}

impl ServerHandler for AgentServer {
    fn get_info(&self) -> ServerConfig {
        let own = Implementation::new("palisade", env!("CARGO_PKG_VERSION")).with_title("Palisade");
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(own)
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.tools.to_vec()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        self.tools.iter().find(|tool| tool.name == name).cloned()
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let Ok(_permit) = self.calls.try_acquire() else {
            let why = format!("More than {MAX_CALLS} calls in flight; wait until one has ended.");
            return Err(ErrorData::internal_error(why, None));
        };
        let arguments = request.arguments.unwrap_or_default();
        let done = self.call(&request.name, arguments, &context.ct).await;
        match &done {
            Ok(_) => tracing::debug!(tool = %request.name, "mcp tool call completed"),
            Err(error) => tracing::debug!(tool = %request.name, %error, "mcp tool call failed"),
        }
        done.map(CallToolResponse::from)
    }
}
