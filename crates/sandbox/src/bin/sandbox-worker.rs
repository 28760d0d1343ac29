//! Test executable with the same entry point as the hidden subcommand `__worker` of the palisade
//! binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::worker::worker_main()
}
