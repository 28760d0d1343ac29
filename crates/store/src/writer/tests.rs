//! Behaviour while the writer is blocked, or its disk refuses writes.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use policy::audit::Kind;
use policy::id::SandboxId;
use policy::registration::{AuthMode, Registration};

use super::*;
use crate::Store;
use crate::audit::FullQueuePolicy;
use crate::audit::query::AuditFilter;
use crate::audit::queue::QUEUE_CAPACITY;
use crate::audit_log::QueueOutcome;
use crate::registry::RegistryLookup;

fn open(dir: &Path, on_full: FullQueuePolicy) -> Store {
    Store::open(StoreOptions {
        dir: dir.to_owned(),
        audit: AuditOptions {
            on_full,
            ..AuditOptions::default()
        },
        now: at(1),
    })
    .unwrap()
}

fn at(millis: i64) -> UnixMillis {
    UnixMillis::new(millis)
}

fn id(name: &str) -> SandboxId {
    SandboxId::parse(name).unwrap()
}

fn request(name: &str, n: usize) -> AuditEvent {
    let mut event = AuditEvent::new(Kind::Http);
    event.sandbox = Some(id(name));
    event.host = Some(format!("h{n}"));
    event
}

fn row(name: &str) -> Registration {
    Registration {
        id: id(name),
        ip: None,
        repos: Vec::new(),
        auth_mode: AuthMode::User,
        credentials: Vec::new(),
        created: at(0),
        expires: at(i64::MAX),
        metadata: serde_json::Map::from_iter([("pad".to_owned(), "x".repeat(64 * 1024).into())]),
    }
}

/// Blocks the writer until the sender is dropped.
fn block_writer(store: &Store) -> mpsc::Sender<()> {
    let (release, released) = mpsc::channel::<()>();
    let (blocked_sender, blocked) = mpsc::channel();
    run_on_writer(store, move |_| {
        blocked_sender.send(()).unwrap();
        let _ = released.recv();
    });
    blocked.recv().unwrap();
    release
}

fn run_on_writer(store: &Store, act: impl FnOnce(&mut Writer) + Send + 'static) {
    store.link.send(Command::Test(Box::new(act))).unwrap();
}

fn events_of(store: &Store, name: &str) -> Vec<AuditEvent> {
    let filter = AuditFilter {
        sandbox: Some(id(name)),
        limit: Some(10_000),
        ..AuditFilter::default()
    };
    let records = store.audit().query_blocking(&filter).unwrap();
    records.into_iter().map(|r| r.event).collect()
}

#[tokio::test]
async fn a_full_queue_blocks_its_own_sandbox_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    let log = store.audit();
    let release = block_writer(&store);
    for n in 0..QUEUE_CAPACITY {
        log.record(request("flood", n), at(1)).await.unwrap();
    }
    assert_eq!(store.health().queued, QUEUE_CAPACITY);
    let mut late = tokio::spawn({
        let log = log.clone();
        async move { log.record(request("flood", QUEUE_CAPACITY), at(1)).await }
    });
    let waited = tokio::time::timeout(Duration::from_millis(30), &mut late).await;
    assert!(waited.is_err(), "the full queue did not block");
    // Another sandbox is not affected.
    log.record(request("calm", 0), at(1)).await.unwrap();

    drop(release);
    assert_eq!(late.await.unwrap(), Ok(QueueOutcome::Queued));
    log.flush().await.unwrap();
    let total: u32 = events_of(&store, "flood").iter().map(|e| e.count).sum();
    assert_eq!(usize::try_from(total).unwrap(), QUEUE_CAPACITY + 1);
    assert_eq!(events_of(&store, "calm").len(), 1);
    assert_eq!(store.health().queued, 0);
    // No caller waits, so every queue was removed.
    assert_eq!(store.link.state.queues.len(), 0);
}

#[tokio::test]
async fn full_batch_is_written_without_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    // The pause is longer than the timeout of the test.
    run_on_writer(&store, |writer| writer.linger = Duration::from_secs(3600));
    let log = store.audit();
    let flood = async {
        for n in 0..4 * QUEUE_CAPACITY {
            log.record(request("flood", n), at(1)).await.unwrap();
        }
    };
    let taken = tokio::time::timeout(Duration::from_secs(60), flood).await;
    assert!(taken.is_ok(), "the full batch was not written");
    log.flush().await.unwrap();
    let total: u32 = events_of(&store, "flood").iter().map(|e| e.count).sum();
    assert_eq!(usize::try_from(total).unwrap(), 4 * QUEUE_CAPACITY);
}

#[tokio::test]
async fn returned_event_that_is_written_later_is_not_counted_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    let log = store.audit();
    let release = block_writer(&store);
    for n in 0..QUEUE_CAPACITY {
        let event = Box::new(request("flood", n));
        assert_eq!(log.try_record(event, at(1)), Ok(QueueOutcome::Queued));
    }
    let late = log.try_record(Box::new(request("flood", QUEUE_CAPACITY)), at(1));
    let late = late.unwrap_err();
    drop(release);
    log.record(*late, at(1)).await.unwrap();
    log.flush().await.unwrap();
    let events = events_of(&store, "flood");
    let lifecycle_events = events.iter().filter(|event| event.event.is_some());
    assert_eq!(
        lifecycle_events.count(),
        0,
        "an event was counted as dropped"
    );
    let total: u32 = events.iter().map(|event| event.count).sum();
    assert_eq!(usize::try_from(total).unwrap(), QUEUE_CAPACITY + 1);
}

#[tokio::test]
async fn full_queue_drops_events_and_records_their_number() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Drop);
    let log = store.audit();
    let release = block_writer(&store);
    for n in 0..QUEUE_CAPACITY + 7 {
        let expect = match n < QUEUE_CAPACITY {
            true => QueueOutcome::Queued,
            false => QueueOutcome::Dropped,
        };
        assert_eq!(log.record(request("flood", n), at(1)).await, Ok(expect));
    }
    assert_eq!(
        log.record(request("calm", 0), at(1)).await,
        Ok(QueueOutcome::Queued)
    );
    drop(release);
    log.flush().await.unwrap();
    assert_eq!(store.stats().dropped, 7);
    let dropped: u32 = events_of(&store, "flood")
        .iter()
        .filter(|e| e.event.as_deref() == Some("audit_dropped"))
        .map(|e| e.count)
        .sum();
    assert_eq!(dropped, 7);
    assert_eq!(events_of(&store, "calm").len(), 1);
}

#[tokio::test]
async fn full_disk_fails_waiting_callers_and_keeps_queued_events() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    let log = store.audit();
    store
        .register(row("before"), AuditEvent::new(Kind::Lifecycle), at(1))
        .await
        .unwrap();
    run_on_writer(&store, |writer| {
        let conn = &writer.db.as_ref().unwrap().conn;
        let pages: i64 = conn
            .query_row("PRAGMA page_count", [], |r| r.get(0))
            .unwrap();
        let sql = format!("PRAGMA max_page_count = {pages}");
        conn.query_row(&sql, [], |_| Ok(())).unwrap();
    });
    let refused = store
        .register(row("after"), AuditEvent::new(Kind::Lifecycle), at(1))
        .await;
    assert!(
        matches!(refused, Err(StoreError::Write { full: true, .. })),
        "{refused:?}"
    );
    assert_eq!(
        store.registry().by_id(&id("after")),
        RegistryLookup::Unknown
    );
    assert!(matches!(
        store.registry().by_id(&id("before")),
        RegistryLookup::Found(_)
    ));
    for n in 0..50 {
        let mut event = request("a", n);
        event.path = Some("x".repeat(4000));
        log.record(event, at(1)).await.unwrap();
    }
    assert!(log.flush().await.is_err());
    let health = store.health();
    assert!(
        health.registry_accessible && !health.audit_writing,
        "{health:?}"
    );
    assert_eq!(health.queued, 50);
    assert!(health.error.unwrap().contains("full"));
    assert_eq!(store.stats().lost, 0);
    // Committed records can still be read and verified.
    assert!(log.verify_blocking().unwrap().is_intact());

    run_on_writer(&store, |writer| {
        let conn = &writer.db.as_ref().unwrap().conn;
        conn.query_row("PRAGMA max_page_count = 1000000", [], |_| Ok(()))
            .unwrap();
    });
    // The write is retried without a new command.
    log.follow().wait_for(|seq| *seq >= 51).await.unwrap();
    assert_eq!(events_of(&store, "a").len(), 50);
    store
        .register(row("after"), AuditEvent::new(Kind::Lifecycle), at(1))
        .await
        .unwrap();
    assert_eq!(store.health().queued, 0);
    assert!(store.health().audit_writing);
    assert!(log.verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn failure_without_new_events_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    run_on_writer(&store, |writer| {
        let conn = &writer.db.as_ref().unwrap().conn;
        conn.execute_batch("PRAGMA query_only = true").unwrap();
    });
    let refused = store.audit().record_durable(request("a", 1), at(1)).await;
    assert!(
        matches!(refused, Err(StoreError::Write { full: false, .. })),
        "{refused:?}"
    );
    assert!(!store.health().audit_writing);
    let mut newest = store.audit().follow();
    newest.mark_unchanged();
    run_on_writer(&store, |writer| {
        let conn = &writer.db.as_ref().unwrap().conn;
        conn.execute_batch("PRAGMA query_only = false").unwrap();
    });
    // The retry writes no record, but notifies followers.
    newest.changed().await.unwrap();
    assert!(store.health().audit_writing);
}

#[tokio::test]
async fn traffic_events_alone_wait_for_a_batch() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), FullQueuePolicy::Block);
    let release = block_writer(&store);
    for n in 0..40 {
        store.audit().record(request("a", n), at(1)).await.unwrap();
    }
    drop(release);
    store.audit().flush().await.unwrap();
    assert_eq!(store.stats().batches, 1);
    assert_eq!(events_of(&store, "a").len(), 40);
}
