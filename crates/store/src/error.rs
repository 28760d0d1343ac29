//! Everything that can go wrong here, in words an operator can act on.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use policy::id::SandboxId;

/// Why the store could not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The database was broken and set aside; nothing is known about anybody.
    #[error(
        "the registry is unavailable: {reason}. \
         Run `palisade registry restore FILE` or `palisade registry reset`"
    )]
    Unavailable {
        /// What was found, and when it was set aside.
        reason: String,
    },
    /// The address belongs to somebody else who is still live.
    #[error(
        "{ip} is registered to {holder}, which has not expired; end that registration \
         (palisade registry remove {holder}), or register with replace: true \
         (palisade registry add --replace)"
    )]
    IpTaken {
        /// The address that was asked for.
        ip: IpAddr,
        /// Whose it is.
        holder: SandboxId,
    },
    /// There is no such registration.
    #[error("{id} is not registered")]
    NotFound {
        /// The id that was asked for.
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
        /// Its version.
        found: u32,
        /// The latest version known here.
        known: u32,
    },
    /// A file is in the way of one that is never overwritten.
    #[error("{path} exists and is not overwritten; choose another name", path = path.display())]
    Exists {
        /// The file that is there.
        path: PathBuf,
    },
    /// A file or directory cannot be used.
    #[error("{path} cannot be used: {reason}", path = path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// A file that was to be restored is not fit for it. Nothing was changed.
    #[error("{path} was not restored and nothing was changed: {reason}", path = path.display())]
    Unfit {
        /// The candidate.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A write failed; nothing of it was applied.
    #[error("the database could not be written and nothing was changed: {reason}. {advice}",
        advice = if *full { "Free some space and try again" } else { "Check the disk and try again" })]
    Write {
        /// What SQLite said.
        reason: String,
        /// Whether the disk is full.
        full: bool,
    },
    /// A read failed.
    #[error("the database could not be read: {reason}")]
    Read {
        /// What SQLite said.
        reason: String,
    },
    /// Writing an export to where the caller wanted it failed.
    #[error("the export could not be written: {reason}")]
    Export {
        /// What the system said.
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

    pub(crate) fn unfit(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Unfit {
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

/// Whether `error` says that the file itself is broken, as opposed to the disk, a lock
/// or the statement.
pub(crate) fn is_corruption(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase)
    )
}
