//! Test executable with the same entry point as the hidden subcommand `__judge-push` of the
//! palisade binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    sandbox::pack_reader::pack_reader_main()
}
