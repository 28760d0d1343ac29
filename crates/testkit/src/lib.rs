//! Fixtures for tests of the built binary: a directory for a gate, the gate as a real process,
//! its operator with a repository and a terminal, an HTTP client for Unix sockets, servers of the
//! internet on loopback, a check for leftover resources, and waiting for a condition.
//!
//! **Never here:** a fake of any part of Palisade. Fakes replace only servers of the internet,
//! and implement their protocols.

pub mod ca;
pub mod collector;
pub mod corpus;
pub mod docker;
pub mod forge;
pub mod gate;
pub mod http;
pub mod inside;
pub mod leftovers;
pub mod mcp;
pub mod operator;
pub mod origin;
pub mod output;
pub mod port;
pub mod pty;
pub mod repo;
pub mod resolver;
pub mod sshd;
pub mod wait;

/// Whether the test runs as root, which it needs for `what`. Without root the test prints the
/// reason and is skipped; in CI a skip is a failure.
pub fn require_root(what: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    let root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    require(root, &format!("needs root: {what}"))
}

/// Returns `is_available`; if it is false, prints what is missing, and panics in CI.
#[expect(clippy::panic, reason = "in CI a skip is a failure")]
fn require(is_available: bool, missing: &str) -> bool {
    if !is_available {
        if std::env::var("CI").is_ok_and(|ci| ci == "true") {
            panic!("{missing}");
        }
        println!("skipped: {missing}");
    }
    is_available
}
