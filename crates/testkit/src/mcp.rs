//! The stdio MCP server of ours that tests and benchmarks put behind the bridge.

use std::path::PathBuf;

/// Where the built `mcp-fixture` is: beside the tests, one directory up from theirs.
#[expect(clippy::panic, reason = "a test without the server cannot go on")]
pub fn fixture() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    let found = own.ancestors().skip(1).take(2);
    let mut found = found.map(|directory| directory.join("mcp-fixture"));
    found
        .find(|file| file.is_file())
        .unwrap_or_else(|| panic!("mcp-fixture is not built: cargo build --package testkit"))
}
