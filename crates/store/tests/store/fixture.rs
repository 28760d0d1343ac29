//! Fixtures of the tests of this crate.

use std::path::{Path, PathBuf};

use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::registration::{AuthMode, Registration};
use rusqlite::Connection;
use store::audit::AuditOptions;
use store::{Store, StoreOptions};

pub(crate) fn at(millis: i64) -> UnixMillis {
    UnixMillis::new(millis)
}

pub(crate) fn id(name: &str) -> SandboxId {
    SandboxId::parse(name).unwrap()
}

pub(crate) fn open(dir: &Path) -> Store {
    open_with(dir, AuditOptions::default())
}

pub(crate) fn open_with(dir: &Path, audit: AuditOptions) -> Store {
    Store::open(StoreOptions {
        dir: dir.to_owned(),
        audit,
        now: at(1_700_000_000_000),
    })
    .unwrap()
}

pub(crate) fn row(name: &str, ip: Option<&str>) -> Registration {
    Registration {
        id: id(name),
        ip: ip.map(|ip| ip.parse().unwrap()),
        repos: Vec::new(),
        auth_mode: AuthMode::User,
        credentials: Vec::new(),
        created: at(0),
        expires: at(i64::MAX),
        metadata: serde_json::Map::new(),
    }
}

pub(crate) fn registered(name: &str) -> AuditEvent {
    AuditEvent::lifecycle("registered", Some(id(name)))
}

pub(crate) fn request(name: &str, host: &str) -> AuditEvent {
    let mut event = AuditEvent::new(Kind::Http);
    event.sandbox = Some(id(name));
    event.host = Some(host.to_owned());
    event
}

/// A copy of the files on disk, as a kill at this moment would leave them.
pub(crate) fn copy_dir(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        // The WAL index is shared memory; it is rebuilt after a crash.
        if !entry.file_name().to_string_lossy().ends_with("-shm") {
            std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
    }
    copy
}

pub(crate) fn database(dir: &Path) -> PathBuf {
    dir.join("palisade.db")
}

/// A connection for tampering with the file.
pub(crate) fn tamper(dir: &Path) -> Connection {
    Connection::open(database(dir)).unwrap()
}

/// The file names in a directory that start with `start`, sorted.
pub(crate) fn names(dir: &Path, start: &str) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with(start))
        .collect();
    names.sort();
    names
}
