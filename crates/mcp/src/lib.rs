//! Tool calls.
