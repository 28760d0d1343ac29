//! The user that runs a gate in a test: the current user, or an unprivileged user.

use std::path::Path;
use std::process::Command;

use std::os::unix::process::CommandExt;

/// User and group id of `nobody`.
const UNPRIVILEGED_ID: u32 = 65534;

/// The user that owns the files and processes of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    /// The user that runs the tests; in CI that is root.
    CurrentUser,
    /// An unprivileged user without groups. Only root can switch to it.
    Unprivileged,
    /// An unprivileged user with entries in `/etc/subuid` and `/etc/subgid`. Only commands of
    /// [`Operator::command_with_subids`] see the account and these entries.
    SubidUser,
}

/// User and group id of [`Operator::SubidUser`]; the machine has no account with this id.
const SUBID_USER_ID: u32 = 64_999;

/// A supplementary group of [`Operator::SubidUser`], which no process in a sandbox may have.
const EXTRA_GROUP_ID: u32 = 64_998;

/// Files in `/etc` that are replaced for [`Operator::SubidUser`]. Each test process uses other
/// subordinate ids, because test processes run at the same time.
const ACCOUNT_FILES: &[&str] = &["passwd", "subuid", "subgid"];

impl Operator {
    fn id(self) -> Option<u32> {
        match self {
            Operator::CurrentUser => None,
            Operator::Unprivileged => Some(UNPRIVILEGED_ID),
            Operator::SubidUser => Some(SUBID_USER_ID),
        }
    }

    /// A command that this operator runs.
    pub fn command(self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        if let Some(id) = self.id() {
            // std also clears the supplementary groups when root switches to another user.
            command.uid(id).gid(id);
        }
        command
    }

    /// Makes this operator the owner of `path`.
    #[expect(
        clippy::expect_used,
        reason = "a test without its files cannot continue"
    )]
    pub fn chown(self, path: &Path) {
        if let Some(id) = self.id() {
            std::os::unix::fs::lchown(path, Some(id), Some(id)).expect("a new owner");
        }
    }

    /// A command of the user with subordinate ids, in a new mount namespace where files of
    /// `directory` are bind-mounted over those of `/etc`. Its child processes see the same files;
    /// the rest of the machine does not.
    pub fn command_with_subids(program: &Path, directory: &Path) -> Command {
        let line = "for name in $1; do mount --bind \"$0/etc/$name\" \"/etc/$name\" || exit; done; \
                    shift; exec setpriv --reuid \"$1\" --regid \"$1\" --groups \"$2\" \"${@:3}\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "bash", "-c", line])
            .arg(directory)
            .args([
                ACCOUNT_FILES.join(" "),
                SUBID_USER_ID.to_string(),
                EXTRA_GROUP_ID.to_string(),
            ])
            .arg(program);
        command
    }

    /// Writes the account files for [`Operator::command_with_subids`] below `directory`.
    #[expect(
        clippy::expect_used,
        reason = "a test without its files cannot continue"
    )]
    pub fn write_subid_files(directory: &Path) {
        let etc = directory.join("etc");
        std::fs::create_dir(&etc).expect("a directory");
        let accounts = std::fs::read_to_string("/etc/passwd").expect("accounts");
        // The ids are below the range that sandboxes of root use.
        let first = 700_000_000 + std::process::id() % 4096 * 65536;
        let lines = [
            format!("{accounts}borrower:x:{SUBID_USER_ID}:{SUBID_USER_ID}::/:/bin/sh\n"),
            format!("borrower:{first}:65536\n"),
            // The group entry names the user by number and has another range than the user entry.
            format!("{SUBID_USER_ID}:{}:65536\n", first + 4096),
        ];
        for (name, text) in ACCOUNT_FILES.iter().zip(lines) {
            std::fs::write(etc.join(name), text).expect("a file");
        }
    }
}
