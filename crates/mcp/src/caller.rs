//! The caller of a request: an agent, its session and its sandbox.

use policy::id::SandboxId;

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The agent.
    pub agent: String,
    /// The session; empty where there is none.
    pub session: String,
    /// The sandbox, where the agent is in one.
    pub sandbox: Option<SandboxId>,
}

/// Whether two requests come from the same caller.
pub fn same(one: &Caller, other: &Caller) -> bool {
    one.agent == other.agent && one.sandbox == other.sandbox
}
