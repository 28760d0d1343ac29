//! Sandboxes from the command line: the built binary, real git, a real terminal.
//!
//! Most tests run twice: as the user that runs the tests, which in CI is root, and as
//! an unprivileged user.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

/// Defines tests for an unprivileged user whose sandboxes have ids of `/etc/subuid`.
macro_rules! for_subid_user {
    ($($name:ident),+ $(,)?) => {
        mod with_subids {
            $(#[test]
            fn $name() {
                if testkit::require_root("lending ids to a user") {
                    super::$name(&$crate::sandbox_fixture::SandboxFixture::new(testkit::operator::Operator::SubidUser));
                }
            })+
        }
    };
}

/// Defines two tests per function with a [`sandbox_fixture::SandboxFixture`]: as the current user
/// and as an unprivileged one.
macro_rules! for_every_operator {
    ($($name:ident),+ $(,)?) => {
        mod as_current_user {
            $(#[test]
            fn $name() {
                super::$name(&$crate::sandbox_fixture::SandboxFixture::new(testkit::operator::Operator::CurrentUser));
            })+
        }
        mod unprivileged {
            $(#[test]
            fn $name() {
                if testkit::require_root("being an unprivileged user") {
                    super::$name(&$crate::sandbox_fixture::SandboxFixture::new(testkit::operator::Operator::Unprivileged));
                }
            })+
        }
    };
}

mod agents;
mod checkpoints;
mod cpu;
mod crash;
mod deletion;
mod files;
mod first_run;
mod grants;
mod hostile;
mod import;
mod isolation;
mod lifecycle;
mod many_sandboxes;
mod ports;
mod presets;
mod programs;
mod progress;
mod repositories;
mod repository_file;
mod reuse;
mod sandbox_fixture;
mod scripts;
mod setup;
mod subids;
mod terminal;
mod tools;
mod trust;
mod upload;
