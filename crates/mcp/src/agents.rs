//! The server for agents: sandboxes and their tools over stdio, for a client such as an editor
//! or a coding agent that runs beside the operator's own files.
//!
//! ```text
//!   client ── stdio ──▶ Agents ──▶ Workshop (a port) ──▶ gate, workbench, repository
//!                          └── after what changes: a snapshot on the sandbox's branch
//! ```
//!
//! An agent chooses a name and what happens inside. It chooses no repository, no credential,
//! no backend and no port of the host.

pub mod answers;
pub mod diary;
pub mod parameters;
pub mod tools;
pub mod workshop;

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
    Answer, BashAnswer, Changed, DeleteAnswer, EditAnswer, GlobAnswer, GrepAnswer, Kept,
    ListAnswer, LsAnswer, PatchAnswer, SandboxAnswer, WriteAnswer, read_result, result,
};
use parameters::{
    Bash, Create, Delete, Diff, Edit, Glob, Grep, Ls, Nothing, Patch, Read, Transfer, Which, Write,
};
use workshop::{Sandbox, Workshop, WorkshopError};

/// Calls at the same time.
const MOST_CALLS: usize = 32;

/// How long calls that nobody waits for any more may take to commit what they did.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// The most of a diff that is given to a model.
const LONGEST_DIFF: usize = 256 << 10;

const INSTRUCTIONS: &str = "\
Tools to work on this git repository inside a sandbox. Begin with sandbox-create; then read, \
write, edit, patch, bash, ls, glob and grep work on the sandbox's own copy. Each change is \
committed to the branch palisade/NAME, which the operator reviews and merges; tell them its \
name when you are done. The operator's own files stay as they are. The sandbox's network leads \
through a gate: a request that is refused says why, and the operator can allow it.";

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The client and we did not come together.
    #[error("the conversation did not begin: {0}")]
    Beginning(String),
    /// It broke off.
    #[error("the conversation broke off: {0}")]
    Broken(String),
}

/// The server. What was made in its session is remembered as long as it runs.
#[derive(Clone)]
pub struct Agents {
    workshop: Arc<dyn Workshop>,
    made: Arc<Mutex<Vec<SandboxId>>>,
    tools: Arc<[Tool]>,
    calls: Arc<Semaphore>,
}

impl Agents {
    /// A server for the sandboxes of `workshop`.
    pub fn new(workshop: Arc<dyn Workshop>) -> Self {
        Self {
            workshop,
            made: Arc::default(),
            tools: tools::all().into(),
            calls: Arc::new(Semaphore::new(MOST_CALLS)),
        }
    }

    /// Serves the client that started this process, until it hangs up.
    pub async fn serve_stdio(self) -> Result<(), ServeError> {
        let (input, output) = rmcp::transport::io::stdio_pipes();
        self.serve(input, output).await
    }

    /// Serves one client until it hangs up.
    pub async fn serve<R, W>(self, input: R, output: W) -> Result<(), ServeError>
    where
        R: AsyncRead + Send + Unpin + 'static,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let beginning = |error: rmcp::service::ServerInitializeError| match error {
            rmcp::service::ServerInitializeError::ConnectionClosed(_) => None,
            other => Some(ServeError::Beginning(other.to_string())),
        };
        let calls = Arc::clone(&self.calls);
        let running = match ServiceExt::serve(self, (input, output)).await {
            Ok(running) => running,
            // One who hangs up at once wanted nothing.
            Err(error) => return beginning(error).map_or(Ok(()), Err),
        };
        let ended = running.waiting().await;
        // What was under way has been given up, and commits what it did.
        let all = u32::try_from(MOST_CALLS).unwrap_or(u32::MAX);
        if tokio::time::timeout(LAST_WORDS, calls.acquire_many(all))
            .await
            .is_err()
        {
            tracing::warn!("a call did not end with its client");
        }
        ended.map_err(|error| ServeError::Broken(error.to_string()))?;
        Ok(())
    }

    /// One call, by the tool's name.
    async fn call(
        &self,
        name: &str,
        arguments: JsonObject,
        over: &CancellationToken,
    ) -> Result<CallToolResult, ErrorData> {
        match name {
            "sandbox-create" => result(self.create(parse_json_object(arguments)?).await),
            "sandbox-list" => {
                let Nothing {} = parse_json_object(arguments)?;
                let listed = self.workshop.list().await;
                result(listed.map(|sandboxes| ListAnswer { sandboxes }))
            }
            "sandbox-ports" => result(self.ports(parse_json_object(arguments)?).await),
            "sandbox-pause" => result(self.pause(parse_json_object(arguments)?).await),
            "sandbox-resume" => result(self.resume(parse_json_object(arguments)?).await),
            "sandbox-delete" => result(self.delete(parse_json_object(arguments)?).await),
            "read" => read_result(self.read(parse_json_object(arguments)?, over).await),
            "write" => result(self.write(parse_json_object(arguments)?, over).await),
            "edit" => result(self.edit(parse_json_object(arguments)?, over).await),
            "patch" => result(self.patch(parse_json_object(arguments)?, over).await),
            "bash" => result(self.bash(parse_json_object(arguments)?, over).await),
            "ls" => result(self.ls(parse_json_object(arguments)?, over).await),
            "glob" => result(self.glob(parse_json_object(arguments)?, over).await),
            "grep" => result(self.grep(parse_json_object(arguments)?, over).await),
            "upload" => result(self.upload(parse_json_object(arguments)?).await),
            "download" => result(self.download(parse_json_object(arguments)?).await),
            "diff" => result(self.diff(parse_json_object(arguments)?).await),
            other => Err(ErrorData::invalid_params(
                format!("There is no tool '{}'.", other.escape_debug()),
                None,
            )),
        }
    }

    async fn create(&self, asked: Create) -> Result<SandboxAnswer, WorkshopError> {
        let sandbox = self.workshop.create(&asked.name, asked.dirty).await?;
        self.remember(&sandbox.id);
        Ok(SandboxAnswer { sandbox })
    }

    async fn ports(&self, asked: Which) -> Result<workshop::Ports, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        self.workshop.ports(&at).await
    }

    async fn pause(&self, asked: Which) -> Result<SandboxAnswer, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        self.workshop.pause(&at).await?;
        let sandbox = self.workshop.find(at.as_str()).await?;
        Ok(SandboxAnswer { sandbox })
    }

    async fn resume(&self, asked: Which) -> Result<SandboxAnswer, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        self.workshop.resume(&at).await?;
        let sandbox = self.workshop.find(at.as_str()).await?;
        Ok(SandboxAnswer { sandbox })
    }

    async fn delete(&self, asked: Delete) -> Result<DeleteAnswer, WorkshopError> {
        let sandbox = self.place(asked.sandbox.as_deref()).await?;
        if asked.force && !self.has_made(&sandbox.id) {
            let name = &sandbox.name;
            return Err(WorkshopError::Refused(format!(
                "{name} was not made in this session, so it is not deleted by force; ask the \
                 operator to delete it"
            )));
        }
        let deleted = self.workshop.delete(&sandbox.id, asked.force).await?;
        self.forget(&sandbox.id);
        Ok(DeleteAnswer {
            name: sandbox.name,
            deleted,
        })
    }

    async fn read(
        &self,
        asked: Read,
        over: &CancellationToken,
    ) -> Result<(String, workshop::Content), WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let content = until(over, self.workshop.read(&at, &asked)).await?;
        Ok((asked.path, content))
    }

    async fn write(
        &self,
        asked: Write,
        over: &CancellationToken,
    ) -> Result<Changed<WriteAnswer>, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let done = until(over, self.workshop.write(&at, &asked)).await;
        let entry = diary::entry("write", &asked.path);
        self.keep(&at, done.map(WriteAnswer::from), &entry).await
    }

    async fn edit(
        &self,
        asked: Edit,
        over: &CancellationToken,
    ) -> Result<Changed<EditAnswer>, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let done = until(over, self.workshop.edit(&at, &asked)).await;
        let entry = diary::entry("edit", &asked.path);
        self.keep(&at, done.map(EditAnswer::from), &entry).await
    }

    async fn patch(
        &self,
        asked: Patch,
        over: &CancellationToken,
    ) -> Result<Changed<PatchAnswer>, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let done = until(over, self.workshop.patch(&at, &asked.patch)).await;
        let files = done.as_deref().unwrap_or_default();
        let entry = diary::entry_of_all("patch", files);
        self.keep(&at, done.map(|files| PatchAnswer { files }), &entry)
            .await
    }

    async fn bash(
        &self,
        asked: Bash,
        over: &CancellationToken,
    ) -> Result<Changed<BashAnswer>, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let done = until(over, self.workshop.bash(&at, &asked)).await;
        let entry = diary::entry("bash", &asked.command);
        self.keep(&at, done.map(BashAnswer::from), &entry).await
    }

    async fn ls(&self, asked: Ls, over: &CancellationToken) -> Result<LsAnswer, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let listed = until(over, self.workshop.ls(&at, &asked)).await?;
        Ok(listed.into())
    }

    async fn glob(
        &self,
        asked: Glob,
        over: &CancellationToken,
    ) -> Result<GlobAnswer, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let found = until(over, self.workshop.glob(&at, &asked)).await?;
        Ok(found.into())
    }

    async fn grep(
        &self,
        asked: Grep,
        over: &CancellationToken,
    ) -> Result<GrepAnswer, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let found = until(over, self.workshop.grep(&at, &asked)).await?;
        Ok(found.into())
    }

    async fn upload(&self, asked: Transfer) -> Result<Changed<workshop::Moved>, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let to = asked.to.as_deref().unwrap_or(".");
        let done = self.workshop.upload(&at, &asked.source, to).await;
        let entry = diary::entry("upload", &asked.source);
        self.keep(&at, done, &entry).await
    }

    async fn download(&self, asked: Transfer) -> Result<workshop::Moved, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        let to = asked.to.as_deref().unwrap_or(".");
        self.workshop.download(&at, &asked.source, to).await
    }

    async fn diff(&self, asked: Diff) -> Result<workshop::Changes, WorkshopError> {
        let at = self.place(asked.sandbox.as_deref()).await?.id;
        // What a process in the background did since is part of it.
        self.workshop.snapshot(&at, "snapshot").await?;
        let most = if asked.stat { 0 } else { LONGEST_DIFF };
        self.workshop.diff(&at, most).await
    }

    /// Commits what a call has changed; also one that failed or was given up may have.
    async fn keep<T: Answer>(
        &self,
        at: &SandboxId,
        done: Result<T, WorkshopError>,
        entry: &str,
    ) -> Result<Changed<T>, WorkshopError> {
        // Nothing was touched.
        if let Err(error @ WorkshopError::Invalid(_)) = done {
            return Err(error);
        }
        let kept = Kept::of(self.workshop.snapshot(at, entry).await);
        Ok(Changed { done: done?, kept })
    }

    /// The sandbox that is meant.
    async fn place(&self, name: Option<&str>) -> Result<Sandbox, WorkshopError> {
        if let Some(name) = name {
            return self.workshop.find(name).await;
        }
        let made = self.made();
        match made.as_slice() {
            [only] => self.workshop.find(only.as_str()).await,
            [] => Err(WorkshopError::Invalid(
                "Say which sandbox: none was made in this session. See sandbox-list, or make \
                 one with sandbox-create."
                    .to_owned(),
            )),
            several => Err(WorkshopError::Invalid(format!(
                "Say which sandbox: {} were made in this session. See sandbox-list.",
                several.len()
            ))),
        }
    }

    fn made(&self) -> Vec<SandboxId> {
        let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.clone()
    }

    fn has_made(&self, id: &SandboxId) -> bool {
        self.made().contains(id)
    }

    fn remember(&self, id: &SandboxId) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.push(id.clone());
    }

    fn forget(&self, id: &SandboxId) {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|one| one != id);
    }
}

/// Does something until it is done or nobody waits for it any more.
async fn until<T>(
    over: &CancellationToken,
    work: impl Future<Output = Result<T, WorkshopError>>,
) -> Result<T, WorkshopError> {
    tokio::select! {
        done = work => done,
        () = over.cancelled() => Err(WorkshopError::Refused("The call was cancelled.".to_owned())),
    }
}

impl ServerHandler for Agents {
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
        let Ok(_place) = self.calls.try_acquire() else {
            let why = format!("More than {MOST_CALLS} calls at the same time; wait for one.");
            return Err(ErrorData::internal_error(why, None));
        };
        let arguments = request.arguments.unwrap_or_default();
        let done = self.call(&request.name, arguments, &context.ct).await;
        match &done {
            Ok(_) => tracing::debug!(tool = %request.name, "a tool was called"),
            Err(error) => tracing::debug!(tool = %request.name, %error, "a call failed"),
        }
        done.map(CallToolResponse::from)
    }
}
