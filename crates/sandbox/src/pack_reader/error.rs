//! Errors of reading a pack.

/// Why the child could not read a push to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum PackError {
    /// The pack ends too early.
    #[error("the pack is truncated")]
    Truncated,
    /// The file is no pack, or a pack of another object format.
    #[error("the pack is malformed: {0}")]
    Malformed(&'static str),
    /// An object does not have the form of its type.
    #[error("the pack holds a malformed {kind}: {what}")]
    Object {
        /// The type.
        kind: &'static str,
        /// The fault.
        what: &'static str,
    },
    /// A delta whose base is in no pack.
    #[error("the pack is thin and its bases are missing; push with --no-thin")]
    MissingBase,
    /// The pack exceeds a limit.
    #[error("{what} exceeds the limit of {bound}")]
    TooMuch {
        /// The limited quantity.
        what: &'static str,
        /// The limit.
        bound: u64,
    },
    /// The file cannot be read.
    #[error("the pack cannot be read: {0}")]
    Io(#[from] std::io::Error),
}
