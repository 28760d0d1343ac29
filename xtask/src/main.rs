//! `cargo xtask tidy` runs the repository checks; `cargo xtask logs` writes the table of log
//! messages.

#![expect(
    unreachable_pub,
    reason = "a binary has no public API; `pub` marks what other modules use"
)]

mod graph;
mod logs;
mod source_text;
mod tidy;

use std::process::ExitCode;

fn main() -> ExitCode {
    let root = tidy::root();
    match std::env::args().nth(1).as_deref() {
        Some("tidy") if std::env::args().nth(2).as_deref() == Some("--graph") => {
            match tidy::tracked_files(&root) {
                Ok(files) => {
                    print!("{}", graph::render(&graph::read(&root, &files)));
                    ExitCode::SUCCESS
                }
                Err(error) => {
                    eprintln!("tidy: {error:#}");
                    ExitCode::FAILURE
                }
            }
        }
        Some("tidy") => match tidy::check(&root) {
            Ok(violations) if violations.is_empty() => ExitCode::SUCCESS,
            Ok(violations) => {
                violations
                    .iter()
                    .for_each(|violation| eprintln!("tidy: {violation}"));
                ExitCode::FAILURE
            }
            Err(error) => {
                eprintln!("tidy: {error:#}");
                ExitCode::FAILURE
            }
        },
        Some("logs") => {
            let written = tidy::tracked_files(&root).and_then(|files| logs::write(&root, &files));
            match written {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("logs: {error:#}");
                    ExitCode::FAILURE
                }
            }
        }
        _ => {
            eprintln!("usage: cargo xtask tidy [--graph] | logs");
            ExitCode::from(2)
        }
    }
}
