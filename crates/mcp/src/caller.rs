//! The caller of a request: an agent, its session and its sandbox.

use policy::id::SandboxId;

/// The caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct McpCaller {
    /// The agent.
    pub agent: String,
    /// The session; empty where there is none.
    pub session: String,
    /// The sandbox, if the agent runs in one.
    pub sandbox: Option<SandboxId>,
}

/// Whether two callers are the same agent in the same sandbox, in any session.
pub fn is_same_caller(one: &McpCaller, other: &McpCaller) -> bool {
    one.agent == other.agent && one.sandbox == other.sandbox
}
