//! Corrupt databases, and recovery from them.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use store::audit::query::AuditFilter;
use store::error::StoreError;
use store::registry::RegistryLookup;
use store::{Store, StoreOptions};

use crate::fixture::{at, copy_dir, database, id, names, open, registered, row, tamper};

const MARKER: &str = "registry.unavailable";

async fn one_row(dir: &Path) {
    let store = open(dir);
    store
        .register(row("a", Some("10.0.0.1")), registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
}

/// A read found corruption, and the store is unavailable.
async fn assert_damage_found(store: &Store, error: &StoreError) {
    assert!(matches!(error, StoreError::Read { .. }), "{error}");
    // Commands are handled in order: after this answer, the corruption has been handled.
    let answer = store.audit().record_durable(registered("a"), at(2)).await;
    assert!(
        matches!(answer, Err(StoreError::Unavailable { .. })),
        "{answer:?}"
    );
    assert_unavailable(store).await;
}

async fn assert_unavailable(store: &Store) {
    let health = store.health();
    assert!(
        !health.registry_accessible && !health.audit_writing,
        "{health:?}"
    );
    let registry = store.registry();
    assert_eq!(
        registry.by_ip("10.0.0.1".parse().unwrap()),
        RegistryLookup::Unavailable
    );
    assert_eq!(registry.by_id(&id("a")), RegistryLookup::Unavailable);
    let refused = |e: StoreError| assert!(matches!(e, StoreError::Unavailable { .. }), "{e}");
    refused(registry.list().unwrap_err());
    let event = || registered("a");
    refused(
        store
            .register(row("a", None), event(), at(2))
            .await
            .unwrap_err(),
    );
    refused(
        store
            .unregister(&id("a"), event(), at(2))
            .await
            .unwrap_err(),
    );
    refused(store.prune_expired(at(2)).await.unwrap_err());
    refused(store.audit().record(event(), at(2)).await.unwrap_err());
    refused(
        store
            .audit()
            .record_durable(event(), at(2))
            .await
            .unwrap_err(),
    );
    refused(
        store
            .audit()
            .query(AuditFilter::default())
            .await
            .unwrap_err(),
    );
    refused(store.audit().verify_blocking().unwrap_err());
    let dir = tempfile::tempdir().unwrap();
    refused(store.backup(dir.path().join("b"), at(2)).await.unwrap_err());
}

fn tamper_sql(path: &Path, sql: &str) {
    tamper(path.parent().unwrap()).execute_batch(sql).unwrap();
}

type Damage = fn(&Path);

/// Kinds of corruption that opening must detect.
fn breakages() -> Vec<(&'static str, Damage)> {
    fn overwrite(path: &Path, at: usize, with: &[u8]) {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[at..at + with.len()].copy_from_slice(with);
        std::fs::write(path, bytes).unwrap();
    }
    vec![
        ("garbage in the header", |p| {
            overwrite(p, 0, b"not a database!!");
        }),
        ("garbage after the header", |p| {
            overwrite(p, 100, &[0xff; 300]);
        }),
        ("all garbage", |p| {
            std::fs::write(p, vec![0x5a; 8192]).unwrap();
        }),
        ("emptied", |p| std::fs::write(p, b"").unwrap()),
        ("cut short", |p| {
            let bytes = std::fs::read(p).unwrap();
            std::fs::write(p, &bytes[..4096]).unwrap();
        }),
        ("an invalid row", |p| {
            tamper_sql(p, "UPDATE registrations SET body = '{}'");
        }),
        ("a row with another id", |p| {
            tamper_sql(p, "UPDATE registrations SET id = 'b'");
        }),
        ("a missing table", |p| {
            tamper_sql(p, "DROP TABLE registrations");
        }),
        ("only the WAL is left", |p| {
            std::fs::remove_file(p).unwrap();
            std::fs::write(p.with_file_name("palisade.db-wal"), [1; 100]).unwrap();
        }),
    ]
}

#[tokio::test]
async fn corrupt_file_is_moved_aside_and_never_treated_as_empty() {
    for (what, damage) in breakages() {
        let dir = tempfile::tempdir().unwrap();
        one_row(dir.path()).await;
        damage(&database(dir.path()));
        let store = open(dir.path());
        assert_unavailable(&store).await;
        drop(store);
        assert!(
            !names(dir.path(), "palisade.db.corrupt-20231114T221320Z").is_empty(),
            "{what}"
        );
        assert!(!database(dir.path()).exists(), "{what}");

        // A restart changes nothing.
        let store = open(dir.path());
        assert_unavailable(&store).await;

        store.reset(at(9)).await.unwrap();
        assert!(
            store.health().registry_accessible,
            "{what}: {:?}",
            store.health()
        );
        assert!(store.registry().is_empty());
        store
            .register(row("b", None), registered("b"), at(10))
            .await
            .unwrap();
        drop(store);
        assert!(!dir.path().join(MARKER).exists());
        assert_eq!(open(dir.path()).registry().len(), 1);
    }
}

#[tokio::test]
async fn second_corrupt_file_does_not_overwrite_the_first() {
    let dir = tempfile::tempdir().unwrap();
    for round in 1..=3 {
        std::fs::write(database(dir.path()), format!("broken {round}")).unwrap();
        drop(open(dir.path()));
        std::fs::remove_file(dir.path().join(MARKER)).unwrap();
        let aside = names(dir.path(), "palisade.db.corrupt-");
        assert_eq!(aside.len(), round, "{aside:?}");
    }
}

#[tokio::test]
async fn corruption_at_run_time_makes_the_registry_unavailable() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for n in 0..400 {
        let mut event = registered("a");
        event.path = Some("x".repeat(2000));
        store.audit().record_durable(event, at(n)).await.unwrap();
    }
    store
        .register(row("a", Some("10.0.0.1")), registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
    // Beyond the small tables, in the middle of the records.
    let path = database(dir.path());
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 8192 * 4096;
    bytes[middle..middle + 65536].fill(0xee);
    std::fs::write(&path, bytes).unwrap();

    let store = open(dir.path());
    assert!(store.health().registry_accessible);
    let filter = AuditFilter {
        limit: Some(1000),
        ..AuditFilter::default()
    };
    let error = store.audit().query(filter).await.unwrap_err();
    assert_damage_found(&store, &error).await;
    // Numbers in use before are not used again.
    store.reset(at(9)).await.unwrap();
    assert_eq!(
        store
            .audit()
            .record_durable(registered("a"), at(3))
            .await
            .unwrap(),
        404
    );
    assert!(store.audit().verify_blocking().unwrap().is_intact());
}

/// The writer's own connection still has the intact pages in memory.
#[tokio::test]
async fn corruption_under_an_idle_store_is_found_by_the_check() {
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    let store = open(dir.path());
    store.check_registry().await.unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(database(dir.path()));
    let file = file.unwrap();
    let length = usize::try_from(file.metadata().unwrap().len()).unwrap();
    file.write_all_at(&vec![0xee; length], 0).unwrap();

    assert!(
        store.health().registry_accessible,
        "nothing has read the file"
    );
    let error = store.check_registry().await.unwrap_err();
    assert_damage_found(&store, &error).await;
}

#[tokio::test]
async fn deleted_database_under_an_idle_store_fails_the_check() {
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    let store = open(dir.path());
    std::fs::remove_file(database(dir.path())).unwrap();
    let error = store.check_registry().await.unwrap_err();
    assert!(matches!(error, StoreError::Read { .. }), "{error}");
}

#[tokio::test]
async fn a_backup_can_be_taken_while_running_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let away = tempfile::tempdir().unwrap();
    let backup = away.path().join("backup.db");
    let store = open(dir.path());
    store
        .register(row("a", Some("10.0.0.1")), registered("a"), at(1))
        .await
        .unwrap();
    store.backup(backup.clone(), at(2)).await.unwrap();
    let mode = std::fs::metadata(&backup).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(names(away.path(), ""), ["backup.db"]);
    let again = store.backup(backup.clone(), at(2)).await;
    assert_eq!(
        again,
        Err(StoreError::Exists {
            path: backup.clone()
        })
    );
    let before = std::fs::read(&backup).unwrap();

    store
        .register(row("b", None), registered("b"), at(3))
        .await
        .unwrap();
    store.restore(backup.clone(), at(4)).await.unwrap();
    assert_eq!(store.registry().list().unwrap().len(), 1);
    assert!(matches!(
        store.registry().by_id(&id("a")),
        RegistryLookup::Found(_)
    ));
    assert_eq!(std::fs::read(&backup).unwrap(), before);
    assert_eq!(names(dir.path(), "palisade.db.replaced-").len(), 1);
    assert!(names(dir.path(), "palisade.db.staged-").is_empty());

    let records = store.audit().query(AuditFilter::default()).await.unwrap();
    let events: Vec<_> = records
        .iter()
        .map(|r| (r.seq, r.event.event.clone().unwrap()))
        .collect();
    // 1 is in the backup; 2 and 3 were used by the database that was replaced.
    assert_eq!(
        events,
        [
            (1, "registered".to_owned()),
            (4, "registry_restored".to_owned())
        ]
    );
    assert!(store.audit().verify_blocking().unwrap().is_intact());
    store.close().await.unwrap();
    let store = open(dir.path());
    assert_eq!(store.registry().len(), 1);
    assert!(store.audit().verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn a_backup_restores_a_broken_registry() {
    let dir = tempfile::tempdir().unwrap();
    let away = tempfile::tempdir().unwrap();
    let backup = away.path().join("backup.db");
    one_row(dir.path()).await;
    let store = open(dir.path());
    store.backup(backup.clone(), at(2)).await.unwrap();
    store.close().await.unwrap();
    std::fs::write(database(dir.path()), b"broken").unwrap();
    let store = open(dir.path());
    assert_unavailable(&store).await;
    store.restore(backup, at(3)).await.unwrap();
    assert!(matches!(
        store.registry().by_id(&id("a")),
        RegistryLookup::Found(_)
    ));
    assert!(!dir.path().join(MARKER).exists());
    assert!(store.health().registry_accessible);
}

#[tokio::test]
async fn a_copy_of_a_running_database_with_its_wal_can_be_restored() {
    let from = tempfile::tempdir().unwrap();
    let other = open(from.path());
    other
        .register(row("z", None), registered("z"), at(1))
        .await
        .unwrap();
    let copy = copy_dir(from.path());
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.restore(database(copy.path()), at(2)).await.unwrap();
    assert!(matches!(
        store.registry().by_id(&id("z")),
        RegistryLookup::Found(_)
    ));
}

#[tokio::test]
async fn invalid_backup_changes_nothing() {
    let away = tempfile::tempdir().unwrap();
    let damages: [(&str, Damage); 5] = [
        ("garbage", |p| std::fs::write(p, b"garbage").unwrap()),
        ("empty", |p| std::fs::write(p, b"").unwrap()),
        ("newer", |p| tamper_sql(p, "PRAGMA user_version = 99")),
        ("tampered", |p| {
            tamper_sql(p, "DELETE FROM audit WHERE seq = 1");
        }),
        ("invalid row", |p| {
            tamper_sql(p, "UPDATE registrations SET body = '{}'");
        }),
    ];
    let mut candidates = vec![away.path().join("missing")];
    for (name, damage) in damages {
        let source = tempfile::tempdir().unwrap();
        one_row(source.path()).await;
        damage(&database(source.path()));
        let path = away.path().join(name);
        std::fs::rename(database(source.path()), &path).unwrap();
        candidates.push(path);
    }
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store
        .register(row("b", None), registered("b"), at(1))
        .await
        .unwrap();
    let own = database(dir.path());
    for path in candidates.into_iter().chain([own]) {
        let answer = store.restore(path.clone(), at(2)).await;
        assert!(
            matches!(answer, Err(StoreError::InvalidBackup { .. })),
            "{path:?}: {answer:?}"
        );
        assert!(matches!(
            store.registry().by_id(&id("b")),
            RegistryLookup::Found(_)
        ));
        let rest = names(dir.path(), "palisade.db.");
        assert!(rest.is_empty(), "{rest:?}");
        assert!(!dir.path().join(MARKER).exists());
    }
    store
        .audit()
        .record_durable(registered("b"), at(3))
        .await
        .unwrap();
}

#[tokio::test]
async fn reset_keeps_the_old_database_and_records_it() {
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    let store = open(dir.path());
    store.reset(at(5)).await.unwrap();
    assert!(store.registry().is_empty());
    let records = store.audit().query(AuditFilter::default()).await.unwrap();
    assert_eq!(records.len(), 1);
    assert_eq!(records[0].event.event.as_deref(), Some("registry_reset"));
    let aside = names(dir.path(), "palisade.db.replaced-");
    let kept = rusqlite::Connection::open(dir.path().join(&aside[0])).unwrap();
    let count: i64 = kept
        .query_row("SELECT count(*) FROM registrations", [], |r| r.get(0))
        .unwrap();
    assert_eq!(count, 1);
}

#[tokio::test]
async fn interrupted_restore_is_unavailable_after_restart() {
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    // The moment after the old database was moved and before the new one is in place.
    std::fs::write(
        dir.path().join(MARKER),
        r#"{"reason":"interrupted","last_seq":7}"#,
    )
    .unwrap();
    std::fs::rename(
        database(dir.path()),
        dir.path().join("palisade.db.replaced-x"),
    )
    .unwrap();
    std::fs::write(dir.path().join("palisade.db.staged-x"), "half a copy").unwrap();
    let store = open(dir.path());
    assert!(names(dir.path(), "palisade.db.staged-").is_empty());
    assert_unavailable(&store).await;
    store.reset(at(5)).await.unwrap();
    assert_eq!(
        store
            .audit()
            .record_durable(registered("a"), at(6))
            .await
            .unwrap(),
        9
    );
}

#[test]
fn a_newer_schema_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    tamper(dir.path())
        .execute_batch("PRAGMA user_version = 7")
        .unwrap();
    let before = std::fs::read(database(dir.path())).unwrap();
    let opened = Store::open(StoreOptions {
        dir: dir.path().to_owned(),
        audit: store::audit::AuditOptions::default(),
        now: at(1),
    });
    let error = opened.unwrap_err();
    assert!(matches!(
        error,
        StoreError::NewerSchema {
            found: 7,
            known: 1,
            ..
        }
    ));
    assert!(error.to_string().contains("nothing was changed"), "{error}");
    assert_eq!(std::fs::read(database(dir.path())).unwrap(), before);
    assert!(!dir.path().join(MARKER).exists());
}

#[tokio::test]
async fn corrupt_file_is_not_moved_without_a_marker() {
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    std::fs::write(database(dir.path()), b"broken").unwrap();
    // As with a full disk: the marker's temporary file cannot be written.
    let blocking_directory = dir.path().join(".registry.unavailable.new");
    std::fs::create_dir(&blocking_directory).unwrap();
    for _ in 0..2 {
        let store = open(dir.path());
        assert_unavailable(&store).await;
        let error = store.health().error.unwrap();
        assert!(error.contains("could not be moved aside"), "{error}");
        drop(store);
        assert_eq!(std::fs::read(database(dir.path())).unwrap(), b"broken");
        assert!(!dir.path().join(MARKER).exists());
    }
    // Once the marker can be written, the corrupt file is found again, and never an empty registry.
    std::fs::remove_dir(&blocking_directory).unwrap();
    let store = open(dir.path());
    assert_unavailable(&store).await;
    assert!(dir.path().join(MARKER).exists());
    store.reset(at(9)).await.unwrap();
    assert!(store.health().registry_accessible);
}

#[tokio::test]
async fn deleted_database_is_not_an_empty_registry() {
    let gone: [(&str, Damage); 3] = [
        ("deleted", |p| std::fs::remove_file(p).unwrap()),
        (
            "deleted with the created marker, a corrupt database moved aside",
            |p| {
                std::fs::rename(p, p.with_file_name("palisade.db.corrupt-x")).unwrap();
                std::fs::remove_file(p.with_file_name("registry.made")).unwrap();
            },
        ),
        ("replaced once, then deleted with the created marker", |p| {
            std::fs::rename(p, p.with_file_name("palisade.db.replaced-x")).unwrap();
            std::fs::remove_file(p.with_file_name("registry.made")).unwrap();
        }),
    ];
    for (what, damage) in gone {
        let dir = tempfile::tempdir().unwrap();
        one_row(dir.path()).await;
        let kept = dir.path().join("kept");
        std::fs::copy(database(dir.path()), &kept).unwrap();
        damage(&database(dir.path()));
        for _ in 0..2 {
            let store = open(dir.path());
            assert_unavailable(&store).await;
            let error = store.health().error.unwrap();
            assert!(error.contains("palisade.db is missing"), "{what}: {error}");
        }
        // Putting the file back recovers the registry.
        std::fs::copy(&kept, database(dir.path())).unwrap();
        let store = open(dir.path());
        assert_eq!(store.registry().len(), 1, "{what}");
        drop(store);
        // A restore and a reset recover the registry, too.
        std::fs::remove_file(database(dir.path())).unwrap();
        let store = open(dir.path());
        store.restore(kept.clone(), at(9)).await.unwrap();
        assert_eq!(store.registry().len(), 1, "{what}");
        drop(store);
        std::fs::remove_file(database(dir.path())).unwrap();
        let store = open(dir.path());
        store.reset(at(9)).await.unwrap();
        assert!(store.registry().is_empty());
        store.close().await.unwrap();
        assert!(open(dir.path()).health().registry_accessible, "{what}");
    }
}

#[tokio::test]
async fn a_first_start_that_was_interrupted_starts_empty() {
    let dir = tempfile::tempdir().unwrap();
    // Partly created, never put in place.
    std::fs::write(dir.path().join("palisade.db.staged-x"), b"half").unwrap();
    std::fs::write(dir.path().join("gate.log"), b"").unwrap();
    assert!(open(dir.path()).health().registry_accessible);
}

#[tokio::test]
async fn implausible_numbers_are_corruption_and_no_panic() {
    let cases = [
        "UPDATE ledger SET last_seq = 1",
        "UPDATE ledger SET last_seq = -1",
        "UPDATE ledger SET last_seq = 9223372036854775807",
        "UPDATE ledger SET last_seq = 9223372036854775807, absent = 9223372036854775804",
        "UPDATE ledger SET absent = -5",
        "UPDATE ledger SET absent = 9223372036854775807",
        "UPDATE ledger SET stated_seq = 100",
        "UPDATE ledger SET stated_seq = -1",
        "UPDATE audit SET seq = 100 WHERE seq = 2",
        "UPDATE audit SET seq = -2 WHERE seq = 2",
        "UPDATE chains SET head_seq = 100 WHERE name = 'a'",
        "UPDATE chains SET base_seq = 100 WHERE name = 'a'",
        "UPDATE chains SET records = 100 WHERE name = 'a'",
        "UPDATE chains SET bytes = 9223372036854775807",
        "UPDATE chains SET bytes = -1 WHERE name = 'a'",
        "UPDATE chains SET open_records = 100 WHERE name = 'a'",
        "UPDATE chains SET open_bytes = 9223372036854775807 WHERE name = 'a'",
    ];
    let away = tempfile::tempdir().unwrap();
    let backup = away.path().join("backup.db");
    one_row(away.path()).await;
    let store = open(away.path());
    store.backup(backup.clone(), at(2)).await.unwrap();
    drop(store);
    for sql in cases {
        let dir = tempfile::tempdir().unwrap();
        one_row(dir.path()).await;
        tamper_sql(&database(dir.path()), sql);
        let store = open(dir.path());
        assert!(!store.health().registry_accessible, "{sql}");
        assert_unavailable(&store).await;
        store.reset(at(3)).await.unwrap();
        store
            .audit()
            .record_durable(registered("a"), at(4))
            .await
            .unwrap();
        assert!(store.audit().verify_blocking().unwrap().is_intact());
        store.restore(backup.clone(), at(5)).await.unwrap();
        assert!(matches!(
            store.registry().by_id(&id("a")),
            RegistryLookup::Found(_)
        ));
        assert!(store.audit().verify_blocking().unwrap().is_intact());
    }
}

#[tokio::test]
async fn second_writer_is_detected_before_its_records_are_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let other = open(dir.path());
    let mine = store.audit().record_durable(registered("a"), at(1)).await;
    assert_eq!(mine, Ok(1));
    let theirs = other.audit().record_durable(registered("b"), at(1)).await;
    assert!(
        matches!(&theirs, Err(StoreError::Unavailable { reason }) if reason.contains("another process")),
        "{theirs:?}"
    );
    assert_unavailable(&other).await;
}

#[tokio::test]
async fn numbers_are_not_reused_after_corruption_at_start() {
    // The ledger can be read although a row cannot: numbers continue.
    let next = |dir: std::path::PathBuf| async move {
        let store = open(&dir);
        assert_unavailable(&store).await;
        store.reset(at(9)).await.unwrap();
        let event = registered("a");
        store.audit().record_durable(event, at(9)).await.unwrap()
    };
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    tamper_sql(
        &database(dir.path()),
        "UPDATE registrations SET body = '{}'",
    );
    // The records 1 to 3: the registration, the checkpoint at closing, the reset.
    assert_eq!(next(dir.path().to_owned()).await, 4);

    // The ledger has an old number; the records have newer numbers.
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    tamper_sql(&database(dir.path()), "UPDATE ledger SET last_seq = 1");
    assert_eq!(next(dir.path().to_owned()).await, 4);

    // Nothing can be read: numbers continue far ahead, and even further after the next corruption.
    let dir = tempfile::tempdir().unwrap();
    one_row(dir.path()).await;
    std::fs::write(database(dir.path()), b"broken").unwrap();
    let first = next(dir.path().to_owned()).await;
    assert_eq!(first, 1_700_000_000_000_000 + 2);
    std::fs::write(database(dir.path()), b"broken").unwrap();
    let later = Store::open(StoreOptions {
        dir: dir.path().to_owned(),
        audit: store::audit::AuditOptions::default(),
        now: at(1_700_000_000_001),
    })
    .unwrap();
    later.reset(at(9)).await.unwrap();
    let second = later.audit().record_durable(registered("a"), at(9)).await;
    assert!(second.unwrap() > first);
    drop(later);

    // A marker without a number, or with an invalid number.
    for marker in [
        "a note",
        r#"{"reason":"x","last_seq":18446744073709551615}"#,
    ] {
        let dir = tempfile::tempdir().unwrap();
        one_row(dir.path()).await;
        std::fs::remove_file(database(dir.path())).unwrap();
        std::fs::write(dir.path().join(MARKER), marker).unwrap();
        assert_eq!(next(dir.path().to_owned()).await, first);
    }
}

#[tokio::test]
async fn last_jsonl_line_counts_if_the_clock_went_back() {
    use store::audit::{AuditOptions, JsonlOptions};
    let dir = tempfile::tempdir().unwrap();
    let options = |now| StoreOptions {
        dir: dir.path().to_owned(),
        audit: AuditOptions {
            jsonl: Some(JsonlOptions::at(dir.path().join("audit.jsonl"))),
            ..AuditOptions::default()
        },
        now: at(now),
    };
    let store = Store::open(options(1)).unwrap();
    for n in 0..2000 {
        let event = crate::fixture::request("a", &format!("h{n}"));
        store.audit().record(event, at(n)).await.unwrap();
    }
    store.close().await.unwrap();
    std::fs::write(database(dir.path()), b"broken").unwrap();
    // The clock gives a lower number than the records that were written before.
    let store = Store::open(options(1)).unwrap();
    store.reset(at(9)).await.unwrap();
    let next = store.audit().record_durable(registered("a"), at(9)).await;
    assert!(next.clone().unwrap() > 2000, "{next:?}");
}
