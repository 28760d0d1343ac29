//! What the palisade binary's hidden subcommand `__judge-push` is, for this crate's tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::judge::judge_main()
}
