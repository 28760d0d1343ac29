//! The `palisade` command: parses the command line, runs the command and reports errors.
//!
//! This crate connects the other crates: command line, gate process, supervisor, reload,
//! telemetry. **Never here:** decisions, queries, protocols; each has a crate of its own.

#![warn(clippy::print_stderr, clippy::print_stdout)]
#![expect(
    unreachable_pub,
    reason = "a binary exports nothing; pub marks the interface of a module"
)]

mod child_reaper;
mod cli;
mod exit;
mod gate;
mod output;
mod paths;
mod process_guard;
mod relay;
mod telemetry;

use std::ffi::OsStr;
use std::process::ExitCode;

/// With mimalloc a request takes a fifth less CPU time than with the system's allocator, and
/// memory that parsing a large configuration needed is returned.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // These modes come before anything else: they clone, sandbox themselves or must be cheap, and
    // need no threads and no argument parser.
    match std::env::args_os()
        .nth(1)
        .as_deref()
        .and_then(OsStr::to_str)
    {
        Some(gate::INIT_ARGUMENT) => return sandbox::namespace::launch::init_main(),
        Some(gate::WORKER_ARGUMENT) => return sandbox::worker::worker_main(),
        Some(gate::PACK_READER_ARGUMENT) => return sandbox::pack_reader::pack_reader_main(),
        Some(process_guard::GUARD_ARGUMENT) => return process_guard::process_guard_main(),
        Some(gate::watchdog::WATCHDOG_ARGUMENT) => return gate::watchdog::watchdog_main(),
        _ => {}
    }
    match cli::parse_and_run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A message may quote untrusted text; it stays on its own lines.
            let message = format!("palisade: {error:#}");
            for line in message.lines() {
                output::print_message(&output::safe(line));
            }
            exit::exit_of(&error).into()
        }
    }
}
