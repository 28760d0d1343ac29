//! Why a tool did not do what it was asked. The sentences are part of the wire: agents read them.

use nix::errno::Errno;

/// A refusal or a failure, in the words a client gets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// A field that must be there, and be of its kind.
    #[error("Missing or invalid {0}")]
    Field(&'static str),
    /// The path leads out of the workspace, by name or by link.
    #[error("Invalid path: access outside workspace is not allowed")]
    Outside,
    /// Nothing is there.
    #[error("No such file or directory: {0}")]
    Absent(String),
    /// A directory where a file was asked for.
    #[error("Path is a directory: {0}")]
    IsDirectory(String),
    /// A file where a directory was asked for.
    #[error("Path is not a directory: {0}")]
    NotADirectory(String),
    /// A FIFO, a socket, a device.
    #[error("Not a regular file: {0}")]
    NotAFile(String),
    /// More than a tool takes into memory.
    #[error("{path} is too large: {size} bytes, and {most} is the most")]
    TooLarge {
        /// Which file.
        path: String,
        /// Its size.
        size: u64,
        /// The most.
        most: u64,
    },
    /// Lines are counted from 1.
    #[error("Offset must be >= 1")]
    Offset,
    /// There are not so many lines.
    #[error("Offset {offset} is beyond end of file ({total} lines total)")]
    BeyondEnd {
        /// The line asked for.
        offset: u64,
        /// How many there are.
        total: u64,
    },
    /// An edit's old text is not there.
    #[error(
        "Could not find the exact text in {0}. The old text must match exactly including all \
         whitespace and newlines."
    )]
    NoMatch(String),
    /// An edit's old text is there more than once.
    #[error(
        "Found {count} occurrences of the text in {path}. The text must be unique. Please provide \
         more context to make it unique."
    )]
    Ambiguous {
        /// Which file.
        path: String,
        /// How often.
        count: usize,
    },
    /// An edit that changes nothing.
    #[error("No changes made to {0}.")]
    NoChange(String),
    /// Somebody else changed the file during an edit.
    #[error("{0} was changed by somebody else at the same time. Read it again and retry.")]
    Changed(String),
    /// Its directory stays locked, or it is a mount.
    #[error("{0} is in use by another program. Retry.")]
    Busy(String),
    /// A glob or a regular expression that is none.
    #[error("Invalid {what}: {why}")]
    Pattern {
        /// Which field.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The system refused.
    #[error("{path}: {}", .errno.desc())]
    System {
        /// What it was about.
        path: String,
        /// What the system said.
        errno: Errno,
    },
    /// A command could not be started.
    #[error("the command could not be started: {0}")]
    Start(String),
    /// The tool broke. Not the caller's fault, so it is told nothing else.
    #[error("Internal server error")]
    Internal,
}

impl ToolError {
    /// What the system said about `path`, in a sentence.
    pub(crate) fn of(path: &str, errno: Errno) -> Self {
        let path = path.to_owned();
        match errno {
            Errno::EXDEV => Self::Outside,
            Errno::ENOENT => Self::Absent(path),
            Errno::EISDIR => Self::IsDirectory(path),
            Errno::ENOTDIR => Self::NotADirectory(path),
            Errno::EBUSY => Self::Busy(path),
            errno => Self::System { path, errno },
        }
    }

    pub(crate) fn of_io(path: &str, error: &std::io::Error) -> Self {
        let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        Self::of(path, errno)
    }
}
