//! Control API of the gate: HTTP on a Unix socket, for the operator only.
//!
//! [`action::Action`] is the closed list of operations. [`http_api`] parses a request to an
//! action, [`dispatch`] runs it, [`client`] is the client. The command line and the MCP server use
//! this API, so that the operations and the access to them are each defined in one place.
//!
//! **Never here:** a decision about traffic, SQL, or anything a sandbox can reach.

pub mod action;
mod audit_actions;
pub mod body;
pub mod client;
mod creation_stream;
mod credential_actions;
mod credential_grants;
pub mod dispatch;
pub mod gate;
pub mod health;
pub mod http_api;
pub mod metrics;
pub mod openapi;
mod peer;
pub mod registration_request;
pub mod remote;
mod remote_backend;
pub mod reply;
pub mod sandboxes;
pub mod serve;
mod tools;
pub mod traffic_actions;
pub mod workbench;

use std::time::{SystemTime, UNIX_EPOCH};

use policy::clock::UnixMillis;

/// The current time. A clock set before 1970 counts as 1970.
pub fn wall_now() -> UnixMillis {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    UnixMillis::new(0).plus(elapsed)
}
