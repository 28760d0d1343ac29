//! Errors of the store, with messages that an operator can act on.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use policy::id::SandboxId;

/// Why an operation of the store failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The database was corrupt and was moved aside; no sandbox can be looked up.
    #[error(
        "the registry is unavailable: {reason}. \
         Run `palisade registry restore FILE` or `palisade registry reset`"
    )]
    Unavailable {
        /// The corruption, and when the file was moved aside.
        reason: String,
    },
    /// The address belongs to another sandbox that is still live.
    #[error(
        "{ip} is registered to {holder}, which has not expired; end that registration \
         (palisade registry remove {holder}), or register with replace: true \
         (palisade registry add --replace)"
    )]
    IpTaken {
        /// The requested address.
        ip: IpAddr,
        /// The sandbox that has the address.
        holder: SandboxId,
    },
    /// No such registration exists.
    #[error("{id} is not registered")]
    NotFound {
        /// The requested id.
        id: SandboxId,
    },
    /// The file was written by a later version. Nothing was changed.
    #[error(
        "{path} has schema version {found}, this program knows up to {known}; \
         nothing was changed. Use the newer version of palisade",
        path = path.display()
    )]
    NewerSchema {
        /// The file.
        path: PathBuf,
        /// The version of the file.
        found: u32,
        /// The latest version that this program supports.
        known: u32,
    },
    /// A file exists that would have to be overwritten.
    #[error("{path} exists and is not overwritten; choose another name", path = path.display())]
    Exists {
        /// The existing file.
        path: PathBuf,
    },
    /// A file or directory cannot be used.
    #[error("{path} cannot be used: {reason}", path = path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        reason: String,
    },
    /// A file that was to be restored is not valid. Nothing was changed.
    #[error("{path} was not restored and nothing was changed: {reason}", path = path.display())]
    InvalidBackup {
        /// The backup file.
        path: PathBuf,
        /// Why the file is not valid.
        reason: String,
    },
    /// A write failed; no part of it was applied.
    #[error("the database could not be written and nothing was changed: {reason}. {advice}",
        advice = if *full { "Free some space and try again" } else { "Check the disk and try again" })]
    Write {
        /// SQLite's error.
        reason: String,
        /// Whether the disk is full.
        full: bool,
    },
    /// A read failed.
    #[error("the database could not be read: {reason}")]
    Read {
        /// SQLite's error.
        reason: String,
    },
    /// Writing an export to the caller's output failed.
    #[error("the export could not be written: {reason}")]
    Export {
        /// The system's error.
        reason: String,
    },
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
}

impl StoreError {
    pub(crate) fn file(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::File {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn invalid_backup(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::InvalidBackup {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn write(error: &rusqlite::Error) -> Self {
        Self::Write {
            reason: error.to_string(),
            full: error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull),
        }
    }

    pub(crate) fn read(error: &rusqlite::Error) -> Self {
        Self::Read {
            reason: error.to_string(),
        }
    }
}

/// Whether `error` means that the file itself is corrupt, as opposed to a failure of the disk, a
/// lock or the statement.
pub(crate) fn is_corruption(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
    )
}
