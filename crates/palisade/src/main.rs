//! The `palisade` command: parse, run, report.
//!
//! This crate wires the others together: command line, gate process, supervisor, reload,
//! telemetry. **Never here:** a decision, a query, a protocol; each has a crate.

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
            eprintln!("palisade: {error:#}");
            exit::exit_of(&error).into()
        }
    }
}
