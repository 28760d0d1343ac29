//! Paths of the MCP programs that tests use: our stdio server `mcp-fixture`, and third-party
//! clients and servers.

use std::path::{Path, PathBuf};

/// The built `mcp-fixture`, in the directory of the test binaries or the one above.
#[expect(clippy::panic, reason = "a test without the server cannot continue")]
pub fn fixture() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let found = own.ancestors().skip(1).take(2);
    let mut found = found.map(|directory| directory.join("mcp-fixture"));
    found
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("mcp-fixture is not built: cargo build --package testkit"))
}

/// The directory into which `tests/mcp/install` installs third-party clients and servers.
#[expect(
    clippy::panic,
    reason = "a test without these programs cannot continue"
)]
pub fn peers() -> PathBuf {
    let cache = std::env::var_os("PALISADE_CACHE").map_or_else(
        || Path::new(&std::env::var_os("HOME").unwrap_or_default()).join(".cache/palisade"),
        PathBuf::from,
    );
    let peers = cache.join("mcp");
    if !peers.join(".installed").exists() {
        panic!("the MCP clients are not installed; run tests/mcp/install");
    }
    peers
}
