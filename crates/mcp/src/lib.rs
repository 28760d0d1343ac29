//! Tool calls.

pub mod context;
pub mod governance;
pub mod interceptor;
pub mod metrics;
pub mod ports;
pub mod redaction;
