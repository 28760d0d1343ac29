//! A stdio MCP server for tests: everything that `@modelcontextprotocol/conformance` requires of a
//! server, and tools that misbehave on purpose.
//!
//! The server is written without an SDK, so that tests control every byte. It supports the
//! revisions that begin with `initialize` (2024-11-05 to 2025-11-25). Its options are
//! arguments, or words in `MCP_FIXTURE`; see [`options::Options`].

mod conformance;
mod content;
mod listing;
mod options;
mod prompts;
mod resources;
mod server;
mod tools;
mod wire;

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;

use nix::sys::signal::{SigSet, Signal};

use crate::options::Options;
use crate::server::Server;

fn main() -> ExitCode {
    let options = match Options::read() {
        Ok(options) => options,
        Err(unknown) => {
            eprintln!("mcp-fixture: unknown option {unknown}");
            return ExitCode::from(2);
        }
    };
    if options.dies() {
        eprintln!("mcp-fixture: exits at start because of --die");
        return ExitCode::from(3);
    }
    if options.stubborn {
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGTERM);
        signals.add(Signal::SIGINT);
        signals.add(Signal::SIGHUP);
        // Threads inherit the signal mask, so the whole process ignores these signals.
        if signals.thread_block().is_err() {
            return ExitCode::FAILURE;
        }
    }
    if options.junk_first {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(b"Starting server...\n{\"not\":\"json-rpc\"}\n\xff\xfe\n\n[1,2\n");
        let _ = out.flush();
    }
    let stubborn = options.stubborn;
    let deaf = options.deaf;
    let server = Arc::new(Server::new(options));
    let mut input = std::io::stdin().lock();
    let mut line = Vec::new();
    loop {
        line.clear();
        match input.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) if stubborn => loop {
                std::thread::park();
            },
            Ok(0) | Err(_) => {
                server.wait_for_cancelled_calls();
                return ExitCode::SUCCESS;
            }
            Ok(_) if deaf => {}
            Ok(_) => server.handle_line(&line),
        }
    }
}
