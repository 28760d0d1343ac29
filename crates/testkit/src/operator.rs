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
    /// Another one, to whom `/etc/subuid` and `/etc/subgid` lend ids. Only what
    /// [`Operator::borrow`] runs sees these lines, and that the user exists.
    Borrower,
}

/// A number that nobody has.
const BORROWER: u32 = 64_999;

/// A group that the borrower is in as well, and nothing of theirs inside may be.
const GROUP: u32 = 64_998;

/// What is seen instead of the machine's own: the user, and what is lent. Each test process
/// lends other ids, for they run at the same time.
const BORROWED: &[&str] = &["passwd", "subuid", "subgid"];

impl Operator {
    fn id(self) -> Option<u32> {
        match self {
            Operator::Oneself => None,
            Operator::Nobody => Some(NOBODY),
            Operator::Borrower => Some(BORROWER),
        }
    }

    /// A command that this operator runs.
    pub fn command(self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        if let Some(id) = self.id() {
            // Supplementary groups go as well: std clears them when root becomes another.
            command.uid(id).gid(id);
        }
        command
    }

    /// Makes something this operator's own.
    #[expect(clippy::expect_used, reason = "a test without its files cannot go on")]
    pub fn own(self, path: &Path) {
        if let Some(id) = self.id() {
            std::os::unix::fs::lchown(path, Some(id), Some(id)).expect("a new owner");
        }
    }

    /// The same command, of a borrower, in a mount namespace of its own where files of
    /// `place` are seen as those of `/etc`. What it starts sees them as well; the machine
    /// does not.
    pub fn borrow(program: &Path, place: &Path) -> Command {
        let line = "for name in $1; do mount --bind \"$0/etc/$name\" \"/etc/$name\" || exit; done; \
                    shift; exec setpriv --reuid \"$1\" --regid \"$1\" --groups \"$2\" \"${@:3}\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "bash", "-c", line])
            .arg(place)
            .args([BORROWED.join(" "), BORROWER.to_string(), GROUP.to_string()])
            .arg(program);
        command
    }

    /// Writes what a borrower sees, in `place`.
    #[expect(clippy::expect_used, reason = "a test without its files cannot go on")]
    pub fn lend(place: &Path) {
        let etc = place.join("etc");
        std::fs::create_dir(&etc).expect("a directory");
        let accounts = std::fs::read_to_string("/etc/passwd").expect("accounts");
        // Below those that sandboxes of root have.
        let first = 700_000_000 + std::process::id() % 4096 * 65536;
        let lines = [
            format!("{accounts}borrower:x:{BORROWER}:{BORROWER}::/:/bin/sh\n"),
            format!("borrower:{first}:65536\n"),
            // By number, and elsewhere than the users.
            format!("{BORROWER}:{}:65536\n", first + 4096),
        ];
        for (name, text) in BORROWED.iter().zip(lines) {
            std::fs::write(etc.join(name), text).expect("a file");
        }
    }
}
