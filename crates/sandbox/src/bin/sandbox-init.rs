//! Test executable with the same entry point as the hidden subcommand `__init` of the palisade
//! binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::namespace::launch::init_main()
}
