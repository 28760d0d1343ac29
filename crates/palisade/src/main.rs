//! The `palisade` command: parse, run, report.
//!
//! This crate wires the others together: command line, gate process, supervisor, reload,
//! telemetry. **Never here:** a decision, a query, a protocol; each has a crate.

#![warn(clippy::print_stderr, clippy::print_stdout)]
#![expect(
    unreachable_pub,
    reason = "a binary exports nothing; pub says what a module offers"
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

/// A request takes a fifth less of the processor with it than with the system's, and what a
/// large configuration needed while it was read goes back.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // Before anything else: these clone, shut themselves in or must be cheap, and want no
    // thread and no argument parser beside them.
    match std::env::args_os()
        .nth(1)
        .as_deref()
        .and_then(OsStr::to_str)
    {
        Some(gate::INIT) => return sandbox::namespace::launch::init_main(),
        Some(gate::WORKER) => return sandbox::worker::worker_main(),
        Some(gate::JUDGE) => return sandbox::pack_reader::pack_reader_main(),
        Some(process_guard::LEASH) => return process_guard::process_guard_main(),
        Some(gate::watchdog::WATCHDOG) => return gate::watchdog::watchdog_main(),
        _ => {}
    }
    match cli::parse_and_run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A message may quote untrusted text; it stays on its own lines.
            let message = format!("palisade: {error:#}");
            for line in message.lines() {
                output::say(&output::safe(line));
            }
            exit::exit_of(&error).into()
        }
    }
}
