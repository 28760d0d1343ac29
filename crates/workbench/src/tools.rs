//! The tools: one implementation, whoever asks.

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
    LsRequest, LsResult, ReadRequest, ReadResult, WriteRequest, WriteResult,
};
use crate::root::Root;
use bash::{Leash, Running};
use replace::Locks;

/// The tools of one workspace.
#[derive(Clone, Debug)]
pub struct Tools {
    root: Arc<Root>,
    locks: Arc<Locks>,
    leash: Arc<Leash>,
}

impl Tools {
    /// Tools below `root`, whose commands run on `leash`.
    pub fn new(root: Root, leash: Leash) -> Self {
        Self {
            root: Arc::new(root),
            locks: Arc::default(),
            leash: Arc::new(leash),
        }
    }

    /// Starts a command. What it says comes from what is returned; dropping that ends it, with
    /// everything it started.
    pub fn bash(&self, request: &BashRequest) -> Result<Running, ToolError> {
        bash::start(&self.root, &self.leash, request)
    }

    /// Reads a file.
    pub async fn read(&self, request: ReadRequest) -> Result<ReadResult, ToolError> {
        self.apart(move |tools, over| read::read(&tools.root, &request, over))
            .await
    }

    /// Writes a file, all or nothing.
    pub async fn write(&self, request: WriteRequest) -> Result<WriteResult, ToolError> {
        self.apart(move |tools, _| replace::write(&tools.root, &tools.locks, &request))
            .await
    }

    /// Changes a file, all or nothing.
    pub async fn edit(&self, request: EditRequest) -> Result<EditResult, ToolError> {
        self.apart(move |tools, _| edit::edit(&tools.root, &tools.locks, &request))
            .await
    }

    /// Lists a directory.
    pub async fn ls(&self, request: LsRequest) -> Result<LsResult, ToolError> {
        self.apart(move |tools, over| ls::ls(&tools.root, &request, over))
            .await
    }

    /// Finds files.
    pub async fn find(&self, request: FindRequest) -> Result<FindResult, ToolError> {
        self.apart(move |tools, over| find::find(&tools.root, &request, over))
            .await
    }

    /// Finds lines.
    pub async fn grep(&self, request: GrepRequest) -> Result<GrepResult, ToolError> {
        self.apart(move |tools, over| grep::grep(&tools.root, &request, over))
            .await
    }

    /// Does work that blocks where it blocks nobody. When the caller goes away, the work is
    /// told that it is over.
    async fn apart<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Tools, &Over) -> Result<T, ToolError> + Send + 'static,
    ) -> Result<T, ToolError> {
        let tools = self.clone();
        let over = Over::default();
        let _when_dropped = TellOver(over.clone());
        tokio::task::spawn_blocking(move || work(&tools, &over))
            .await
            .unwrap_or(Err(ToolError::Internal))
    }
}

/// Whether anybody still waits for an answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Over(Arc<AtomicBool>);

impl Over {
    pub(crate) fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

struct TellOver(Over);

impl Drop for TellOver {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}
