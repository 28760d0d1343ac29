//! MCP (Model Context Protocol): serves stdio servers over HTTP, answers the hooks of an MCP
//! gateway, and applies one set of policies to both. [`agents`] is a separate MCP server, for
//! agents.
//!
//! [`ingress`] accepts connections; [`server`] authenticates; [`interceptor`] answers hooks;
//! [`bridge`] holds the configured tools and the sessions. Clients of the revisions with sessions
//! have a [`session`], over [`streamable`] HTTP or HTTP with SSE ([`http_sse`]); clients of
//! revision 2026-07-28 have none ([`sessionless`], [`pool`]). Every call passes through [`relay`],
//! which queries [`governance`]; a [`process`] is a running stdio server, started by a
//! [`launch::Launcher`]. JSON-RPC messages are relayed as raw text, without serialising them again
//! ([`rpc`]).
//!
//! **Never here:** relaying a call without a policy check, sending a message to more than one
//! client, a typed copy of a relayed message, SQL, or managing the sandboxes themselves.

pub mod agents;
pub mod answer;
pub mod bridge;
pub mod call_headers;
pub mod caller;
pub mod context;
pub mod event_buffer;
pub mod fingerprint;
pub mod governance;
pub mod handshake;
pub mod hold_terms;
pub mod http_sse;
pub mod incoming;
pub mod ingress;
pub mod interceptor;
pub mod launch;
pub mod metrics;
pub mod pool;
pub mod process;
pub mod redaction;
pub mod relay;
pub mod request_body;
pub mod rpc;
pub mod server;
pub mod session;
mod session_state;
pub mod sessionless;
pub mod shared;
pub mod shutdown;
pub mod sse;
pub mod streamable;
pub mod tools;
pub mod trace;
