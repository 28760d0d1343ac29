//! What tests of the built binary share: a place for a gate, the gate itself as a real
//! process, its operator with a repository and a terminal, a socket to ask, a sink to look
//! into, what may not be left behind, and a way to wait.
//!
//! **Never here:** a stand-in for anything of ours. A fake plays only what lives on the
//! internet, and speaks its protocol.

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
pub mod port;
pub mod pty;
pub mod repo;
pub mod resolver;
pub mod said;
pub mod sshd;
pub mod wait;

/// Whether this test may do what only root can. Elsewhere it says so and is skipped; in
/// CI a skip is a failure.
pub fn require_root(what: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    let root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    require(root, &format!("needs root: {what}"))
}

/// Whether something a test needs is there; if not, it says what is missing.
#[expect(clippy::panic, reason = "in CI a skip is a failure")]
fn require(is_there: bool, missing: &str) -> bool {
    if !is_there {
        if std::env::var("CI").is_ok_and(|ci| ci == "true") {
            panic!("{missing}");
        }
        println!("skipped: {missing}");
    }
    is_there
}
