//! What an operator may ask of the gate, and the door it is asked through.
//!
//! [`action::Action`] is the closed list. [`door`] turns HTTP on a Unix socket into an
//! action, [`dispatch`] carries it out, [`client`] is the other end. The CLI, the MCP
//! server and the dashboard all come through here, so there is one place that says what
//! can be asked and one that says who may ask.
//!
//! **Never here:** a decision about traffic, SQL, or anything a sandbox can reach.

pub mod action;
mod audit_actions;
pub mod body;
pub mod client;
mod creation_stream;
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

/// The wall clock. A machine set before 1970 counts as 1970.
pub fn wall_now() -> UnixMillis {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    UnixMillis::new(0).plus(since)
}
