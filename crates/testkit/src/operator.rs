//! Who an operator is: the one who runs the tests, or somebody without any power.

use std::path::Path;
use std::process::Command;

use std::os::unix::process::CommandExt;

/// The user that owns nothing.
const NOBODY: u32 = 65534;

/// Whose processes and files they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// Whoever runs the tests; in CI that is root.
    Oneself,
    /// An unprivileged user without groups. Only root can be somebody else.
    Nobody,
}

impl Operator {
    /// A command that this operator runs.
    pub fn command(self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        if self == Operator::Nobody {
            // Supplementary groups go as well: std clears them when root becomes another.
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    /// Makes something this operator's own.
    #[expect(clippy::expect_used, reason = "a test without its files cannot go on")]
    pub fn own(self, path: &Path) {
        if self == Operator::Nobody {
            std::os::unix::fs::lchown(path, Some(NOBODY), Some(NOBODY)).expect("a new owner");
        }
    }
}
