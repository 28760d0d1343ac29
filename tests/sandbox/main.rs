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

/// Makes tests of functions that take a [`bench::Bench`]: one as oneself, one as nobody.
macro_rules! for_every_operator {
    ($($name:ident),+ $(,)?) => {
        mod as_oneself {
            $(#[test]
            fn $name() {
                super::$name(&$crate::bench::Bench::new(testkit::operator::Operator::Oneself));
            })+
        }
        mod unprivileged {
            $(#[test]
            fn $name() {
                if testkit::require_root("being an unprivileged user") {
                    super::$name(&$crate::bench::Bench::new(testkit::operator::Operator::Nobody));
                }
            })+
        }
    };
}

mod bench;
mod crash;
mod crowd;
mod home;
mod hostile;
mod lifecycle;
mod scripts;
mod terminal;
mod walls;
