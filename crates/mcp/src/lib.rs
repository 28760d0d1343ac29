//! Tool calls: stdio servers of the Model Context Protocol served over HTTP, the hooks that
//! a gateway calls, and one judgement for both.
//!
//! [`ingress`] listens; [`server`] authenticates; [`interceptor`] answers hooks; [`bridge`] knows the
//! tools. A client of the revisions with sessions has a [`session`], over [`streamable`]
//! HTTP or the [`one_stream`] of old; one of 2026-07-28 has none ([`modern`], [`pool`]).
//! Every call passes [`relay`], which asks [`governance`]; a [`process`] is a running server,
//! started by a [`launch`]er. Messages are relayed as they were written ([`rpc`]).
//!
//! **Never here:** a call that was not judged, a message to more than one client, a typed
//! copy of what passes, SQL, or the sandboxes themselves.

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
pub mod incoming;
pub mod ingress;
pub mod interceptor;
pub mod launch;
pub mod metrics;
pub mod modern;
pub mod one_stream;
pub mod pool;
pub mod process;
pub mod redaction;
pub mod relay;
pub mod room;
pub mod rpc;
pub mod server;
pub mod session;
mod session_state;
pub mod shared;
pub mod shutdown;
pub mod sse;
pub mod streamable;
pub mod tools;
pub mod trace;
