//! What the palisade binary's hidden subcommand is, for this crate's tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::namespace::launch::init_main()
}
