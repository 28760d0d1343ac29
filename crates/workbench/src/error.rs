//! Errors of the tools. The messages are part of the protocol: agents read them.

use nix::errno::Errno;

/// An error of a tool, with the message that the client receives.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolError {
    /// A required field is missing, or a field has the wrong type.
    #[error("Missing or invalid {0}")]
    InvalidField(&'static str),
    /// The path is outside the workspace, by name or by symbolic link.
    #[error("Invalid path: access outside workspace is not allowed")]
    OutsideWorkspace,
    /// The file does not exist.
    #[error("No such file or directory: {0}")]
    NotFound(String),
    /// The path is a directory, and a file is required.
    #[error("Path is a directory: {0}")]
    IsDirectory(String),
    /// The path is not a directory, and a directory is required.
    #[error("Path is not a directory: {0}")]
    NotADirectory(String),
    /// The path is a FIFO, a socket or a device.
    #[error("Not a regular file: {0}")]
    NotAFile(String),
    /// The file is larger than the tool loads into memory.
    #[error("{path} is too large: {size} bytes; the limit is {most} bytes")]
    TooLarge {
        /// The file.
        path: String,
        /// The size of the file in bytes.
        size: u64,
        /// The limit in bytes.
        most: u64,
    },
    /// The offset is below 1, the first line.
    #[error("Offset must be >= 1")]
    InvalidOffset,
    /// The offset is after the last line.
    #[error("Offset {offset} is beyond end of file ({total} lines total)")]
    OffsetBeyondEnd {
        /// The requested line.
        offset: u64,
        /// The number of lines in the file.
        total: u64,
    },
    /// The old text of an edit is not in the file.
    #[error(
        "Could not find the exact text in {0}. The old text must match exactly including all \
         whitespace and newlines."
    )]
    NoMatch(String),
    /// The old text of an edit is in the file more than once.
    #[error(
        "Found {count} occurrences of the text in {path}. The text must be unique. Please provide \
         more context to make it unique."
    )]
    Ambiguous {
        /// The file.
        path: String,
        /// The number of occurrences.
        count: usize,
    },
    /// The old and the new text of an edit are the same.
    #[error("No changes made to {0}.")]
    NoChange(String),
    /// Another program changed the file during an edit.
    #[error("{0} was changed by another program at the same time. Read it again and retry.")]
    Changed(String),
    /// The directory of the file stays locked, or the file is a mount point.
    #[error("{0} is in use by another program. Retry.")]
    Busy(String),
    /// A glob or a regular expression is invalid.
    #[error("Invalid {what}: {why}")]
    InvalidPattern {
        /// The name of the field.
        what: &'static str,
        /// The parse error.
        why: String,
    },
    /// A system call failed.
    #[error("{path}: {}", .errno.desc())]
    System {
        /// The path that the system call failed for.
        path: String,
        /// The error number.
        errno: Errno,
    },
    /// A command could not be started.
    #[error("the command could not be started: {0}")]
    StartFailed(String),
    /// The tool panicked. The client receives no details.
    #[error("Internal server error")]
    Internal,
}

impl ToolError {
    /// The error for a failed system call on `path`.
    pub(crate) fn from_errno(path: &str, errno: Errno) -> Self {
        let path = path.to_owned();
        match errno {
            Errno::EXDEV => Self::OutsideWorkspace,
            Errno::ENOENT => Self::NotFound(path),
            Errno::EISDIR => Self::IsDirectory(path),
            Errno::ENOTDIR => Self::NotADirectory(path),
            Errno::EBUSY => Self::Busy(path),
            errno => Self::System { path, errno },
        }
    }

    pub(crate) fn from_io(path: &str, error: &std::io::Error) -> Self {
        let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        Self::from_errno(path, errno)
    }
}
