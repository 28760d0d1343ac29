//! The coding tools (bash, read, write, edit, ls, find, grep), the HTTP service they are served
//! as over a socket, and the client of that service.
//!
//! Whatever lies in the workspace is the agent's, and so is every path in a request: a name is
//! opened below the root by the kernel's own check, and what is no regular file is not read.
//!
//! **Never here:** a decision about policy, a sandbox, a branch.

pub mod client;
pub mod error;
pub mod http_service;
pub mod request;
pub mod root;
pub mod serve;
pub mod tools;
pub mod truncation;
