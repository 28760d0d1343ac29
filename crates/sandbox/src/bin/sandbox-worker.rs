//! What the palisade binary's hidden subcommand `__worker` is, for this crate's tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::worker::worker_main()
}
