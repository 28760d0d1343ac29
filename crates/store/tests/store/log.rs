//! The audit log: queries, following, rotation.

use policy::audit::{AuditEvent, Kind};
use policy::id::RequestId;
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use proptest::prelude::*;
use store::audit::query::AuditFilter;
use store::audit::verify::{ChainFaultKind, verify_blocking, verify_jsonl};
use store::audit::{AuditOptions, FullQueuePolicy};

use crate::fixture::{
    at, copy_dir, database, id, open, open_with, registered, request, row, tamper,
};

fn seqs(store: &store::Store, filter: AuditFilter) -> Vec<u64> {
    let records = store.audit().query_blocking(&filter).unwrap();
    records.iter().map(|r| r.seq).collect()
}

#[tokio::test]
async fn query_returns_records_that_match_every_field() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let log = store.audit();
    for n in 1..=10u16 {
        let mut event = request(if n % 2 == 0 { "even" } else { "odd" }, "h.example");
        event.request_id = Some(RequestId::new(n.into(), 0));
        if n % 5 == 0 {
            event.verdict = Some(VerdictKind::Deny);
            event.reason = Some(Reason::HostDenied);
            event.host = Some("x'; DROP TABLE audit; --\0\u{1F980}".to_owned());
        }
        log.record_durable(event, at(i64::from(n) * 10))
            .await
            .unwrap();
    }
    log.record_durable(AuditEvent::new(Kind::Config), at(500))
        .await
        .unwrap();
    let all = AuditFilter::default;
    let cases: Vec<(AuditFilter, Vec<u64>)> = vec![
        (
            AuditFilter {
                sandbox: Some(id("even")),
                ..all()
            },
            vec![2, 4, 6, 8, 10],
        ),
        (
            AuditFilter {
                kind: Some(Kind::Config),
                ..all()
            },
            vec![11],
        ),
        (
            AuditFilter {
                verdict: Some(VerdictKind::Deny),
                ..all()
            },
            vec![5, 10],
        ),
        (
            AuditFilter {
                reason: Some(Reason::HostDenied),
                sandbox: Some(id("odd")),
                ..all()
            },
            vec![5],
        ),
        (
            AuditFilter {
                reason: Some(Reason::Canary),
                ..all()
            },
            vec![],
        ),
        (
            AuditFilter {
                request_id: Some(RequestId::new(7, 0)),
                ..all()
            },
            vec![7],
        ),
        (
            AuditFilter {
                since: Some(at(80)),
                until: Some(at(100)),
                ..all()
            },
            vec![8, 9],
        ),
        (
            AuditFilter {
                after_seq: Some(9),
                ..all()
            },
            vec![10, 11],
        ),
        (
            AuditFilter {
                before_seq: Some(3),
                ..all()
            },
            vec![1, 2],
        ),
        (
            AuditFilter {
                limit: Some(2),
                ..all()
            },
            vec![1, 2],
        ),
        (
            AuditFilter {
                limit: Some(2),
                newest_first: true,
                ..all()
            },
            vec![11, 10],
        ),
        (
            AuditFilter {
                host: Some("x'; DROP TABLE audit; --\0\u{1F980}".to_owned()),
                ..all()
            },
            vec![5, 10],
        ),
    ];
    for (filter, expect) in cases {
        assert_eq!(seqs(&store, filter.clone()), expect, "{filter:?}");
    }
}

#[tokio::test]
async fn an_export_verifies_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let log = store.audit();
    for n in 0..2500 {
        let name = ["a", "b", "c"][usize::try_from(n % 3).unwrap()];
        log.record(request(name, &format!("h{n}")), at(n))
            .await
            .unwrap();
    }
    log.flush().await.unwrap();
    let export = |filter: AuditFilter| {
        let mut out = Vec::new();
        let count = log.export_blocking(&filter, &mut out).unwrap();
        (count, out)
    };
    let (count, all) = export(AuditFilter::default());
    assert!(count > 2500, "{count}");
    let report = verify_jsonl(&all[..]).unwrap();
    assert!(report.is_intact(), "{report:?}");
    assert_eq!(
        (report.records, report.chains, report.partial),
        (count, 4, 0)
    );
    assert!(report.checkpoints > 0);

    // One sandbox, from the middle on.
    let (count, some) = export(AuditFilter {
        sandbox: Some(id("b")),
        after_seq: Some(1000),
        ..AuditFilter::default()
    });
    let report = verify_jsonl(&some[..]).unwrap();
    assert!(report.is_intact(), "{report:?}");
    assert_eq!((report.records, report.partial), (count, 1));

    // A line that was changed, removed or moved is reported.
    let lines: Vec<&[u8]> = all.split_inclusive(|b| *b == b'\n').collect();
    let mut changed = lines.clone();
    let forged = String::from_utf8(lines[7].to_vec())
        .unwrap()
        .replace("\"h7\"", "\"h8\"");
    changed[7] = forged.as_bytes();
    let mut lost = lines.clone();
    lost.remove(7);
    let mut swapped = lines.clone();
    swapped.swap(7, 10);
    for (broken, seq) in [(changed, 8), (lost, 11), (swapped, 11)] {
        let report = verify_jsonl(&broken.concat()[..]).unwrap();
        assert_eq!(report.first_broken.unwrap().seq, Some(seq));
    }
    assert!(!verify_jsonl(&b"nonsense\n"[..]).unwrap().is_intact());
}

#[tokio::test]
async fn follower_receives_every_record_without_empty_queries() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let log = store.audit();
    let follower = tokio::spawn({
        let log = log.clone();
        async move {
            let mut newest = log.follow();
            let mut seen = Vec::new();
            while seen.len() < 300 {
                let after = seen.last().copied().unwrap_or(0);
                newest.wait_for(|seq| *seq > after).await.unwrap();
                let more = log
                    .query(AuditFilter {
                        after_seq: Some(after),
                        ..AuditFilter::default()
                    })
                    .await
                    .unwrap();
                seen.extend(more.iter().map(|r| r.seq));
            }
            seen
        }
    });
    for n in 0..300 {
        let event = request("a", &format!("h{n}"));
        match n % 10 {
            0 => drop(log.record_durable(event, at(n)).await.unwrap()),
            _ => drop(log.record(event, at(n)).await.unwrap()),
        }
    }
    let seen = follower.await.unwrap();
    assert_eq!(seen, (1..=300).collect::<Vec<_>>());
}

#[tokio::test]
async fn verification_and_queries_work_while_writing() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let log = store.audit();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let reader = std::thread::spawn({
        let log = log.clone();
        let path = database(dir.path());
        move || {
            let mut rounds = 0;
            while stopped.try_recv().is_err() || rounds < 3 {
                let report = log.verify_blocking().unwrap();
                assert!(report.is_intact(), "{report:?}");
                assert!(verify_blocking(&path).unwrap().is_intact());
                log.query_blocking(&AuditFilter::default()).unwrap();
                rounds += 1;
            }
        }
    });
    for n in 0..3000 {
        log.record(request("a", &format!("h{n}")), at(n))
            .await
            .unwrap();
    }
    log.flush().await.unwrap();
    stop.send(()).unwrap();
    reader.join().unwrap();
}

#[tokio::test]
async fn flood_rotates_out_only_its_own_records() {
    let dir = tempfile::tempdir().unwrap();
    let options = AuditOptions {
        max_bytes: 400_000,
        ..AuditOptions::default()
    };
    let store = open_with(dir.path(), options.clone());
    let log = store.audit();
    for n in 0..20 {
        log.record_durable(request("quiet", &format!("h{n}")), at(n))
            .await
            .unwrap();
    }
    for n in 0..20_000 {
        log.record(request("flood", &format!("h{n}")), at(n))
            .await
            .unwrap();
    }
    log.flush().await.unwrap();
    let quiet = AuditFilter {
        sandbox: Some(id("quiet")),
        ..AuditFilter::default()
    };
    assert_eq!(seqs(&store, quiet.clone()).len(), 20);
    let flood = AuditFilter {
        sandbox: Some(id("flood")),
        limit: Some(100_000),
        ..AuditFilter::default()
    };
    let left = seqs(&store, flood.clone());
    assert!(!left.is_empty() && left.len() < 2_000, "{}", left.len());
    assert!(left.is_sorted() && *left.last().unwrap() > 19_000);
    let stats = store.stats();
    assert!(stats.rotated > 18_000, "{stats:?}");
    let report = log.verify_blocking().unwrap();
    assert!(report.is_intact(), "{report:?}");
    assert_eq!(report.partial, 1, "only the flood's own chain");
    let last = *log.follow().borrow();
    store.close().await.unwrap();

    // Numbers continue after closing and a restart.
    assert!(verify_blocking(&database(dir.path())).unwrap().is_intact());
    let store = open_with(dir.path(), options);
    let next = store
        .audit()
        .record_durable(registered("quiet"), at(1))
        .await
        .unwrap();
    assert!(next > last);
    assert!(store.audit().verify_blocking().unwrap().is_intact());
    // The file reuses the freed pages.
    let size = std::fs::metadata(database(dir.path())).unwrap().len();
    assert!(size < 1_500_000, "{size}");

    // A smaller limit takes effect without traffic.
    let mut newest = store.audit().follow();
    newest.mark_unchanged();
    store
        .audit()
        .set_options(AuditOptions {
            max_bytes: 20_000,
            ..AuditOptions::default()
        })
        .unwrap();
    while seqs(&store, flood.clone()).len() > 60 {
        newest.changed().await.unwrap();
    }
    assert!(store.audit().verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn many_small_chains_are_kept_within_the_limit_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = open_with(
        dir.path(),
        AuditOptions {
            // Half of the limit is for the rows of three hundred chains.
            max_bytes: 60_000,
            on_full: FullQueuePolicy::Block,
            jsonl: None,
        },
    );
    for n in 0..300 {
        let name = format!("s{n}");
        store
            .audit()
            .record(request(&name, "h"), at(n))
            .await
            .unwrap();
    }
    store.audit().flush().await.unwrap();
    let newest = AuditFilter {
        sandbox: Some(id("s299")),
        ..AuditFilter::default()
    };
    assert_eq!(seqs(&store, newest).len(), 1);
    let mut committed = store.audit().follow();
    while seqs(&store, AuditFilter::default()).len() > 30_000 / 200 {
        committed.changed().await.unwrap();
    }
    let report = store.audit().verify_blocking().unwrap();
    assert!(report.is_intact(), "{report:?}");
    // An emptied chain continues after its last record.
    store
        .audit()
        .record_durable(request("s100", "h"), at(1))
        .await
        .unwrap();
    assert!(store.audit().verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn chains_of_removed_sandboxes_are_retired_with_a_record() {
    let dir = tempfile::tempdir().unwrap();
    let options = AuditOptions {
        max_bytes: 200_000,
        ..AuditOptions::default()
    };
    let store = open_with(dir.path(), options.clone());
    let log = store.audit();
    store
        .register(row("stays", None), registered("stays"), at(1))
        .await
        .unwrap();
    for n in 0..4000 {
        let mut event = request(&format!("s{n}"), "h");
        // The largest chains are removed first; here the oldest chains are the largest.
        event.path = Some("x".repeat(1000 - n / 4));
        log.record(event, at(1)).await.unwrap();
    }
    store.close().await.unwrap();
    let chains = |filter: &str| -> i64 {
        let sql = format!("SELECT count(*) FROM chains WHERE {filter}");
        tamper(dir.path())
            .query_row(&sql, [], |r| r.get(0))
            .unwrap()
    };
    // About a thousand may wait until the heads are recorded; far fewer than four thousand.
    assert!(chains("true") < 2500, "{}", chains("true"));
    assert_eq!(chains("name = 's0'"), 0);
    assert_eq!(chains("name = 'stays'"), 1);
    let report = verify_blocking(&database(dir.path())).unwrap();
    assert!(report.is_intact(), "{report:?}");

    // The same name starts a new chain.
    let store = open_with(dir.path(), options);
    for name in ["s0", "stays", "s3999"] {
        let event = request(name, "again");
        store.audit().record_durable(event, at(1)).await.unwrap();
    }
    store.close().await.unwrap();
    let report = verify_blocking(&database(dir.path())).unwrap();
    assert!(report.is_intact(), "{report:?}");
    // A chain cannot be removed together with its row: its head was recorded.
    let copy = copy_dir(dir.path());
    tamper(copy.path())
        .execute_batch(
            "DELETE FROM audit WHERE chain = 's3999'; DELETE FROM chains WHERE name = 's3999';",
        )
        .unwrap();
    let found = verify_blocking(&database(copy.path())).unwrap();
    assert_eq!(found.first_broken.unwrap().kind, ChainFaultKind::Missing);
}

#[tokio::test]
async fn crash_between_checkpoints_still_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for n in 0..1500 {
        store
            .audit()
            .record(request("a", &format!("h{n}")), at(n))
            .await
            .unwrap();
        if n % 250 == 0 {
            // A copy of files that change meanwhile does not correspond to any crash.
            store.audit().flush().await.unwrap();
            let killed = copy_dir(dir.path());
            let again = open(killed.path());
            let report = again.audit().verify_blocking().unwrap();
            assert!(report.is_intact(), "{report:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_text_is_stored_and_read_unchanged(texts in proptest::collection::vec(any::<String>(), 1..8)) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let store = open(dir.path());
        let mut sent = Vec::new();
        for text in &texts {
            let mut event = request("a", text);
            event.path = Some(text.clone());
            event.method = Some("GET".to_owned());
            event.rule = Some(text.as_str().into());
            event.event = Some(text.clone());
            runtime.block_on(store.audit().record_durable(event.clone(), at(1))).unwrap();
            sent.push(event);
        }
        for event in &sent {
            let filter = AuditFilter { host: event.host.clone(), ..AuditFilter::default() };
            let found = store.audit().query_blocking(&filter).unwrap();
            prop_assert!(found.iter().all(|r| r.event.host == event.host));
            prop_assert!(found.iter().any(|r| r.event == *event));
        }
        prop_assert!(store.audit().verify_blocking().unwrap().is_intact());
        let mut lines = Vec::new();
        store.audit().export_blocking(&AuditFilter::default(), &mut lines).unwrap();
        prop_assert!(verify_jsonl(&lines[..]).unwrap().is_intact());
    }
}
