//! What keeps a push from being judged.

/// Why the child could not read a push to its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum PackError {
    /// It ends too early.
    #[error("the pack is cut short")]
    Short,
    /// It is no pack, or not one of this repository.
    #[error("the pack is malformed: {0}")]
    Malformed(&'static str),
    /// An object is not what its type says.
    #[error("the pack holds a malformed {kind}: {what}")]
    Object {
        /// The type.
        kind: &'static str,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A difference to something that did not come with it.
    #[error("the pack leaves out objects that it builds on; push with --no-thin")]
    Thin,
    /// It is larger than what is read of one push.
    #[error("{what} is over the bound of {bound}")]
    TooMuch {
        /// What there is too much of.
        what: &'static str,
        /// How much there may be.
        bound: u64,
    },
    /// It cannot be read.
    #[error("the pack cannot be read: {0}")]
    Io(#[from] std::io::Error),
}
