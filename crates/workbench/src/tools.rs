//! The coding tools, shared by the HTTP service and direct callers.

pub mod bash;
mod diff;
mod edit;
mod find;
mod grep;
mod ls;
mod read;
mod replace;
mod walk;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::ToolError;
use crate::request::{
    BashRequest, EditRequest, EditResult, FindRequest, FindResult, GrepRequest, GrepResult,
    LsRequest, LsResult, ReadFileRequest, ReadResult, WriteRequest, WriteResult,
};
use crate::root::WorkspaceRoot;
use bash::{GuardProgram, RunningShell};
use replace::Locks;

/// The tools of one workspace.
#[derive(Clone, Debug)]
pub struct WorkspaceTools {
    root: Arc<WorkspaceRoot>,
    locks: Arc<Locks>,
    guard: Arc<GuardProgram>,
}

impl WorkspaceTools {
    /// Tools below `root`, whose commands run under `guard`.
    pub fn new(root: WorkspaceRoot, guard: GuardProgram) -> Self {
        Self {
            root: Arc::new(root),
            locks: Arc::default(),
            guard: Arc::new(guard),
        }
    }

    /// Starts a command. Dropping the returned value ends the command and its child processes.
    pub fn bash(&self, request: &BashRequest) -> Result<RunningShell, ToolError> {
        bash::start(&self.root, &self.guard, request)
    }

    /// Reads a file.
    pub async fn read(&self, request: ReadFileRequest) -> Result<ReadResult, ToolError> {
        self.run_blocking(move |tools, cancelled| read::read(&tools.root, &request, cancelled))
            .await
    }

    /// Writes a file atomically.
    pub async fn write(&self, request: WriteRequest) -> Result<WriteResult, ToolError> {
        self.run_blocking(move |tools, _| replace::write(&tools.root, &tools.locks, &request))
            .await
    }

    /// Edits a file atomically.
    pub async fn edit(&self, request: EditRequest) -> Result<EditResult, ToolError> {
        self.run_blocking(move |tools, _| edit::edit(&tools.root, &tools.locks, &request))
            .await
    }

    /// Lists a directory.
    pub async fn ls(&self, request: LsRequest) -> Result<LsResult, ToolError> {
        self.run_blocking(move |tools, cancelled| ls::ls(&tools.root, &request, cancelled))
            .await
    }

    /// Finds files.
    pub async fn find(&self, request: FindRequest) -> Result<FindResult, ToolError> {
        self.run_blocking(move |tools, cancelled| find::find(&tools.root, &request, cancelled))
            .await
    }

    /// Searches lines.
    pub async fn grep(&self, request: GrepRequest) -> Result<GrepResult, ToolError> {
        self.run_blocking(move |tools, cancelled| grep::grep(&tools.root, &request, cancelled))
            .await
    }

    /// Runs blocking work on the blocking pool. Dropping the future sets the flag `cancelled`.
    async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&WorkspaceTools, &Cancelled) -> Result<T, ToolError> + Send + 'static,
    ) -> Result<T, ToolError> {
        let tools = self.clone();
        let cancelled = Cancelled::default();
        let _cancel_on_drop = CancelOnDrop(cancelled.clone());
        tokio::task::spawn_blocking(move || work(&tools, &cancelled))
            .await
            .unwrap_or(Err(ToolError::Internal))
    }
}

/// Set when the caller no longer waits for the result.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancelled(Arc<AtomicBool>);

impl Cancelled {
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

struct CancelOnDrop(Cancelled);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
