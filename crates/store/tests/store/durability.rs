//! The content on disk after a kill at any moment.

use std::fs::OpenOptions;

use store::audit::query::AuditFilter;

use crate::fixture::{at, copy_dir, database, id, open, registered, request, row, tamper};

#[tokio::test]
async fn dropping_every_handle_writes_what_was_queued() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let log = store.audit();
    for n in 0..50 {
        log.record(request("a", &format!("h{n}")), at(n))
            .await
            .unwrap();
    }
    drop(store);
    drop(log);
    let store = open(dir.path());
    let filter = AuditFilter {
        sandbox: Some(id("a")),
        ..AuditFilter::default()
    };
    assert_eq!(store.audit().query_blocking(&filter).unwrap().len(), 50);
    assert!(store.audit().verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn traffic_is_on_disk_soon_without_a_flush() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let mut newest = store.audit().follow();
    store
        .audit()
        .record(request("a", "h"), at(1))
        .await
        .unwrap();
    newest.wait_for(|seq| *seq == 1).await.unwrap();
    let copy = copy_dir(dir.path());
    let killed = open(copy.path());
    assert_eq!(
        killed
            .audit()
            .query_blocking(&AuditFilter::default())
            .unwrap()
            .len(),
        1
    );
}

#[tokio::test]
async fn a_wal_cut_anywhere_leaves_an_earlier_state_that_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for n in 0..20 {
        let name = format!("s{n}");
        store
            .register(row(&name, None), registered(&name), at(n))
            .await
            .unwrap();
    }
    let killed = copy_dir(dir.path());
    let wal = killed.path().join("palisade.db-wal");
    let whole = std::fs::read(&wal).unwrap();
    let mut seen = Vec::new();
    for part in 0..=16 {
        let length = whole.len() * part / 16;
        let copy = copy_dir(killed.path());
        let wal = copy.path().join("palisade.db-wal");
        std::fs::write(&wal, &whole[..length]).unwrap();
        let store = open(copy.path());
        let report = store.audit().verify_blocking().unwrap();
        assert!(report.is_intact(), "{report:?}");
        // Each registration is present with its record, or neither is.
        let rows = store.registry().len();
        assert_eq!(u64::try_from(rows).unwrap(), report.records);
        seen.push(rows);
    }
    assert!(seen.is_sorted(), "{seen:?}");
    assert_eq!((seen[0], seen[16]), (0, 20));
}

#[tokio::test]
async fn record_numbers_continue_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..3 {
        let store = open(dir.path());
        let seq = store
            .audit()
            .record_durable(registered("a"), at(round))
            .await
            .unwrap();
        assert!(seq > last);
        last = seq;
        store.close().await.unwrap();
    }
    assert!(
        open(dir.path())
            .audit()
            .verify_blocking()
            .unwrap()
            .is_intact()
    );
}

#[tokio::test]
async fn close_checkpoints_the_wal() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store
        .audit()
        .record_durable(registered("a"), at(1))
        .await
        .unwrap();
    store.close().await.unwrap();
    assert!(!dir.path().join("palisade.db-wal").exists());
    assert_eq!(
        tamper(dir.path())
            .query_row("SELECT count(*) FROM audit", [], |r| r.get::<_, i64>(0))
            .unwrap(),
        2
    );
    // No process has the file open any more.
    OpenOptions::new()
        .write(true)
        .open(database(dir.path()))
        .unwrap();
}
