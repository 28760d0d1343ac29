//! The JSONL file follows the database, whatever happens to it.

use std::fs;
use std::path::{Path, PathBuf};

use store::Store;
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
    caught_up(store).await;
}

async fn caught_up(store: &Store) {
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
async fn every_record_becomes_a_line_also_those_from_before() {
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
    assert_eq!(records(&path), 702, "and the checkpoint of closing");

    // While there was no JSONL, the database went on.
    let store = open_with(dir.path(), AuditOptions::default());
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
    let store = open_with(dir.path(), options(&path));
    caught_up(&store).await;
    assert_eq!(records(&path), 704);
    assert!(store.health().jsonl_writing);
}

#[tokio::test]
async fn a_torn_line_is_cut_off_and_written_again() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    store.close().await.unwrap();
    let whole = fs::read(&path).unwrap();
    for cut in [1, 40, 300, whole.len() - 5, whole.len()] {
        fs::write(&path, &whole[..whole.len() - cut]).unwrap();
        let store = open_with(dir.path(), options(&path));
        caught_up(&store).await;
        drop(store);
        assert_eq!(fs::read(&path).unwrap(), whole, "{cut} bytes lost");
    }
}

#[tokio::test]
async fn a_file_that_is_not_ours_is_moved_not_cut() {
    let (dir, path) = setup();
    fs::write(&path, "dear diary\n").unwrap();
    let store = open_with(dir.path(), options(&path));
    write(&store, 3).await;
    assert_eq!(records(&path), 3);
    let moved = fs::read_to_string(dir.path().join("audit.jsonl.1")).unwrap();
    assert_eq!(moved, "dear diary\n");
    // Nor are the lines of another database.
    store.close().await.unwrap();
    let other = tempfile::tempdir().unwrap();
    let store = open_with(other.path(), options(&path));
    write(&store, 1).await;
    assert_eq!(records(&path), 1);
}

#[tokio::test]
async fn files_are_bounded_and_together_still_a_chain() {
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
async fn a_file_that_cannot_be_written_shows_in_health_and_holds_nobody_up() {
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
    // It is tried again by itself.
    fs::remove_dir(&path).unwrap();
    caught_up(&store).await;
    assert_eq!(records(&path), 10);
    while !store.health().jsonl_writing {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn another_path_gets_everything_from_then_on() {
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

#[tokio::test]
async fn after_a_reset_the_lines_go_on() {
    let (dir, path) = setup();
    let store = open_with(dir.path(), options(&path));
    write(&store, 5).await;
    store.reset(at(9)).await.unwrap();
    write(&store, 2).await;
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 8);
    assert!(text.contains("registry_reset"));
}
