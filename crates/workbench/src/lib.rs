//! The coding tools (bash, read, write, edit, ls, find, grep), the HTTP service they are served
//! as over a socket, and the client of that service.
//!
//! The agent controls every file in the workspace and every path in a request. Paths are resolved
//! below the root by the kernel (`openat2`), and only regular files are read.
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
