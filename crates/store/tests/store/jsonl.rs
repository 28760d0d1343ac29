//! The JSONL file follows the database through failures, rotation and replacement.

use std::fs;
use std::path::{Path, PathBuf};

use policy::audit::{AuditEvent, Kind};
use store::Store;
use store::audit::query::AuditFilter;
use store::audit::verify::verify_jsonl;
use store::audit::{AuditOptions, JsonlOptions};

use crate::fixture::{at, names, open_with, registered, request};

fn options(path: &Path) -> AuditOptions {
    AuditOptions {
        jsonl: Some(JsonlOptions::at(path.to_owned())),
        ..AuditOptions::default()
    }
}

async fn write(store: &Store, count: usize) {
    for n in 0..count {
        let event = request("a", &format!("h{n}"));
        store.audit().record(event, at(1)).await.unwrap();
    }
    store.audit().flush().await.unwrap();
    wait_until_exported(store).await;
}

async fn wait_until_exported(store: &Store) {
    let newest = *store.audit().follow().borrow();
    let mut exported = store.audit().follow_jsonl();
    exported.wait_for(|seq| *seq >= newest).await.unwrap();
}

fn records(path: &Path) -> u64 {
    let report = verify_jsonl(&fs::read(path).unwrap()[..]).unwrap();
    assert!(report.is_intact(), "{report:?}");
    report.records
}

fn setup() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("audit.jsonl");
    (dir, path)
}

#[tokio::test]
async fn every_record_becomes_a_line_including_earlier_records() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), AuditOptions::default());
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    store.audit().set_options(options(&path)).unwrap();
    write(&store, 700).await;
    assert_eq!(records(&path), 701);
    store.close().await.unwrap();
    assert_eq!(records(&path), 702, "with the checkpoint record of closing");

    // While no JSONL file was configured, records were written to the database.
    let store = open_with(dir.path(), AuditOptions::default());
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
    let store = open_with(dir.path(), options(&path));
    wait_until_exported(&store).await;
    assert_eq!(records(&path), 704);
    assert!(store.health().jsonl_writing);
}

#[tokio::test]
async fn incomplete_line_is_truncated_and_written_again() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    store.close().await.unwrap();
    let whole = fs::read(&path).unwrap();
    for cut in [1, 40, 300, whole.len() - 5, whole.len()] {
        fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let store = open_with(dir.path(), options(&path));
        wait_until_exported(&store).await;
        drop(store);
        assert_eq!(fs::read(&path).unwrap(), whole, "{cut} bytes lost");
    }
}

async fn wait_until_refused(store: &Store) -> String {
    let wait = async {
        while store.health().jsonl_writing {
            tokio::task::yield_now().await;
        }
    };
    let limit = std::time::Duration::from_secs(20);
    tokio::time::timeout(limit, wait).await.unwrap();
    store.health().error.unwrap()
}

#[tokio::test]
async fn foreign_file_is_refused_and_not_changed() {
    for foreign in [
        &b"dear diary\n"[..],
        b"dear diary",
        b"{\"count\":1}",
        b"{\"host\":\"mine\",",
        &[0; 5000],
    ] {
        let (dir, path) = setup();
        fs::write(&path, foreign).unwrap();
        let store = open_with(dir.path(), options(&path));
        let event = AuditEvent::new(Kind::Dns);
        store.audit().record_durable(event, at(1)).await.unwrap();
        let error = wait_until_refused(&store).await;
        assert!(error.contains("not an audit log"), "{error}");
        drop(store);
        assert_eq!(fs::read(&path).unwrap(), foreign);
        assert_eq!(names(dir.path(), "audit.jsonl"), ["audit.jsonl"]);
        // After its owner moves the file away, a new one is started.
        fs::remove_file(&path).unwrap();
        let store = open_with(dir.path(), options(&path));
        write(&store, 3).await;
        assert!(records(&path) >= 4);
    }
}

#[tokio::test]
async fn the_stores_own_files_are_never_written_to_as_jsonl() {
    for name in [
        "palisade.db",
        "palisade.db-wal",
        "palisade.db-shm",
        "palisade.db.corrupt-x",
        "registry.made",
        "registry.unavailable",
        "lock",
    ] {
        let (dir, _) = setup();
        drop(open_with(dir.path(), AuditOptions::default()));
        fs::write(dir.path().join("lock"), "").unwrap();
        let before = names(dir.path(), "");
        let store = open_with(dir.path(), options(&dir.path().join(name)));
        let error = wait_until_refused(&store).await;
        assert!(error.contains("of the store itself"), "{name}: {error}");
        store
            .audit()
            .record_durable(registered("a"), at(1))
            .await
            .unwrap();
        assert!(store.audit().verify_blocking().unwrap().is_intact());
        store.close().await.unwrap();
        assert_eq!(names(dir.path(), ""), before, "{name}");

        // The files are also refused under another name.
        let alias = dir.path().join("alias");
        if dir.path().join(name).exists() {
            std::os::unix::fs::symlink(dir.path().join(name), &alias).unwrap();
            let store = open_with(dir.path(), options(&alias));
            let error = wait_until_refused(&store).await;
            assert!(error.contains("of the store itself"), "{name}: {error}");
        }
    }
}

#[tokio::test]
async fn file_of_another_database_is_rotated() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 3).await;
    store.close().await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let store = open_with(other.path(), options(&path));
    write(&store, 1).await;
    assert_eq!(records(&path), 1);
    assert_eq!(records(&dir.path().join("audit.jsonl.1")), 4);
}

#[tokio::test]
async fn empty_file_continues_after_the_rotated_one() {
    let (dir, path) = setup();
    let first = dir.path().join("audit.jsonl.1");
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    store.close().await.unwrap();
    // A power failure after the file was renamed: before the new file is created, before its first
    // line, and in the middle of that line.
    fs::rename(&path, &first).unwrap();
    let mut all = fs::read(&first).unwrap();
    for torn in [None, Some(0), Some(30)] {
        let store = open_with(dir.path(), AuditOptions::default());
        let event = request("a", "later");
        store.audit().record_durable(event, at(1)).await.unwrap();
        let mut later = Vec::new();
        let filter = AuditFilter {
            after_seq: Some(6),
            ..AuditFilter::default()
        };
        store.audit().export_blocking(&filter, &mut later).unwrap();
        drop(store);
        let _ = fs::remove_file(&path);
        if let Some(length) = torn {
            fs::write(&path, &later[..length]).unwrap();
        }
        let store = open_with(dir.path(), options(&path));
        wait_until_exported(&store).await;
        drop(store);
        assert!(fs::read(&path).unwrap().starts_with(&later), "{torn:?}");
    }
    all.extend(fs::read(&path).unwrap());
    let report = verify_jsonl(&all[..]).unwrap();
    assert!(report.is_intact() && report.partial == 0, "{report:?}");

    // A rotated file of another log is ignored.
    fs::write(&first, "dear diary\n").unwrap();
    fs::write(&path, "").unwrap();
    let store = open_with(dir.path(), options(&path));
    wait_until_exported(&store).await;
    drop(store);
    assert_eq!(fs::read(&path).unwrap(), all);
    assert_eq!(fs::read_to_string(&first).unwrap(), "dear diary\n");
}

#[tokio::test]
async fn removed_file_is_replaced_at_run_time() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    // Moved, as log rotation programs do.
    let moved = dir.path().join("moved");
    fs::rename(&path, &moved).unwrap();
    write(&store, 3).await;
    assert_eq!(records(&moved), 5);
    assert_eq!(records(&path), 3);
    // Deleted.
    fs::remove_file(&path).unwrap();
    write(&store, 2).await;
    assert_eq!(records(&path), 2);
    // Truncated in place.
    fs::write(&path, "").unwrap();
    write(&store, 4).await;
    assert_eq!(records(&path), 4);
    // Replaced by another program's file.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "dear diary\n").unwrap();
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    let error = wait_until_refused(&store).await;
    assert!(error.contains("not an audit log"), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "dear diary\n");
}

#[tokio::test]
async fn rotated_files_are_bounded_and_verify_together() {
    let (dir, path) = setup();
    let mut options = options(&path);
    options.jsonl = Some(JsonlOptions {
        path: path.clone(),
        max_bytes: 20_000,
        keep: 100,
    });
    let store = open_with(dir.path(), options);
    for _ in 0..60 {
        write(&store, 20).await;
    }
    let files = names(dir.path(), "audit.jsonl");
    assert!(files.len() > 5, "{files:?}");
    let mut all = Vec::new();
    for n in (1..files.len()).rev() {
        let bytes = fs::read(dir.path().join(format!("audit.jsonl.{n}"))).unwrap();
        assert!(bytes.len() <= 20_000);
        all.extend(bytes);
    }
    all.extend(fs::read(&path).unwrap());
    let report = verify_jsonl(&all[..]).unwrap();
    assert!(report.is_intact() && report.records >= 1200, "{report:?}");
    assert_eq!(report.partial, 0);
}

#[tokio::test]
async fn unwritable_file_shows_in_health_and_delays_nothing() {
    let (dir, path) = setup();
    fs::create_dir(&path).unwrap();
    let store = open_with(dir.path(), options(&path));
    for n in 0..10 {
        let event = request("a", &format!("h{n}"));
        store.audit().record_durable(event, at(n)).await.unwrap();
    }
    while store.health().jsonl_writing {
        tokio::task::yield_now().await;
    }
    let health = store.health();
    assert!(
        health.registry_accessible && health.audit_writing,
        "{health:?}"
    );
    assert!(health.error.unwrap().contains("audit.jsonl"));
    assert!(store.stats().jsonl_errors > 0);
    // The write is retried without a new record.
    fs::remove_dir(&path).unwrap();
    wait_until_exported(&store).await;
    assert_eq!(records(&path), 10);
    while !store.health().jsonl_writing {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn new_path_receives_all_later_records() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    let second = dir.path().join("second.jsonl");
    store.audit().set_options(options(&second)).unwrap();
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
    assert_eq!(records(&path), 5);
    assert_eq!(records(&second), 7);
}

// Issue 14, number 10.
#[tokio::test]
async fn options_are_checked_before_they_are_set_and_nothing_is_left_behind() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), AuditOptions::default());
    let names = || {
        let entries = fs::read_dir(dir.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    let check = |path: &Path| store.audit().check_options(&options(path));
    check(&path).unwrap();
    check(&dir.path().join("nowhere/audit.jsonl")).unwrap_err();
    let error = check(dir.path()).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    assert_eq!(names(), before);
    // A current file that cannot be written is no reason to refuse the next change.
    store.audit().set_options(options(&path)).unwrap();
    write(&store, 1).await;
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    check(&path).unwrap();
    fs::remove_dir(&path).unwrap();
    store.close().await.unwrap();
    store
        .audit()
        .check_options(&AuditOptions::default())
        .unwrap_err();
}

#[tokio::test]
async fn reset_and_restore_start_a_new_file_that_verifies() {
    let (dir, path) = setup();
    let backup = dir.path().join("backup");
    let first = dir.path().join("audit.jsonl.1");
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    store.backup(backup.clone(), at(8)).await.unwrap();
    write(&store, 2).await;
    store.reset(at(9)).await.unwrap();
    write(&store, 2).await;
    assert_eq!(records(&first), 8);
    assert_eq!(records(&path), 3);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("registry_reset"));

    store.restore(backup, at(10)).await.unwrap();
    write(&store, 2).await;
    assert_eq!(records(&first), 3);
    assert_eq!(
        records(&path),
        8,
        "the records of the backup, and later records"
    );
    store.close().await.unwrap();

    // The same if the gate was killed before the file was rotated.
    let store = open_with(dir.path(), AuditOptions::default());
    store.reset(at(11)).await.unwrap();
    store.close().await.unwrap();
    let store = open_with(dir.path(), options(&path));
    write(&store, 1).await;
    assert_eq!(records(&first), 9);
    assert_eq!(records(&path), 2);
}

#[tokio::test]
async fn incomplete_last_line_is_partial_and_not_a_fault() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 3).await;
    drop(store);
    let whole = fs::read(&path).unwrap();
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|b| *b == b'\n')
        .unwrap();
    for end in last + 2..whole.len() - 1 {
        let report = verify_jsonl(&whole[..end]).unwrap();
        assert!(report.is_intact(), "{end}: {report:?}");
        assert_eq!((report.records, report.partial), (3, 1), "{end}");
    }
    // Without its newline the line is still a record.
    assert_eq!(verify_jsonl(&whole[..whole.len() - 1]).unwrap().records, 4);
    for broken in [&b"nonsense"[..], b"{\"a\":1}", b"{\"kind\":\n"] {
        let text = [&whole[..], broken].concat();
        assert!(!verify_jsonl(&text[..]).unwrap().is_intact());
    }
}
