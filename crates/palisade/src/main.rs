//! The `palisade` command: parse, run, report.
//!
//! This crate wires the others together: command line, gate process, supervisor, reload,
//! telemetry. **Never here:** a decision, a query, a protocol; each has a crate.

#![warn(clippy::print_stderr, clippy::print_stdout)]
#![expect(
    unreachable_pub,
    reason = "a binary exports nothing; pub says what a module offers"
)]

mod cli;
mod exit;
mod gate;
mod output;
mod paths;
mod telemetry;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = cli::Cli::parse();
    match cli::run(cli) {
        Ok(exit) => exit.into(),
        Err(error) => {
            // A message may quote what somebody else chose; its lines stay lines.
            let message = format!("palisade: {error:#}");
            for line in message.lines() {
                output::say(&output::safe(line));
            }
            exit::exit_of(&error).into()
        }
    }
}
