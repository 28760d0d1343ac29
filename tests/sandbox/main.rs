//! Sandboxes as a user knows them: the built binary, real git, a real terminal.
//!
//! Every test that can runs twice: as whoever runs the tests, which in CI is root, and as
//! an unprivileged user.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has failed"
)]

/// The same for an unprivileged user whose sandboxes have ids of `/etc/subuid`.
macro_rules! for_a_borrower {
    ($($name:ident),+ $(,)?) => {
        mod with_lent_ids {
            $(#[test]
            fn $name() {
                if testkit::require_root("lending ids to a user") {
                    super::$name(&$crate::sandbox_fixture::SandboxFixture::new(testkit::operator::Operator::SubidUser));
                }
            })+
        }
    };
}

/// Makes tests of functions that take a [`bench::SandboxFixture`]: one as oneself, one as nobody.
macro_rules! for_every_operator {
    ($($name:ident),+ $(,)?) => {
        mod as_oneself {
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
mod crowd;
mod deletion;
mod files;
mod first_run;
mod home;
mod hostile;
mod lent;
mod lifecycle;
mod ports;
mod programs;
mod progress;
mod repositories;
mod repository_file;
mod reuse;
mod sandbox_fixture;
mod scripts;
mod setup;
mod terminal;
mod tools;
mod trust;
mod upload;
mod walls;
