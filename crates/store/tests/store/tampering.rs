//! Verification detects and locates every kind of tampering with the file.

use std::path::Path;

use policy::id::RequestId;
use rusqlite::params;
use store::audit::verify::{ChainFault, ChainFaultKind, verify_blocking};

use crate::fixture::{at, copy_dir, database, id, open, request, tamper};

/// Five records of `a` (odd numbers), four of `b`, and a checkpoint record, 10.
async fn small_log(dir: &Path) {
    let store = open(dir);
    for n in 1..=9u8 {
        let name = if n % 2 == 1 { "a" } else { "b" };
        let mut event = request(name, "host.example");
        event.request_id = Some(RequestId::new(n.into(), 0));
        store
            .audit()
            .record_durable(event, at(n.into()))
            .await
            .unwrap();
    }
    store.close().await.unwrap();
    let report = verify_blocking(&database(dir)).unwrap();
    assert!(report.is_intact() && report.records == 10, "{report:?}");
}

/// The result of verification after `sql` was run on a copy.
fn after(dir: &Path, sql: &str) -> Option<ChainFault> {
    let copy = copy_dir(dir);
    tamper(copy.path()).execute_batch(sql).unwrap();
    verify_blocking(&database(copy.path()))
        .unwrap()
        .first_broken
}

fn broken(seq: u64, chain: &str, kind: ChainFaultKind) -> Option<ChainFault> {
    Some(ChainFault {
        seq: Some(seq),
        chain: Some(id(chain)),
        kind,
    })
}

#[tokio::test]
async fn deleted_moved_and_swapped_records_are_named() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path()).await;
    let head = "UPDATE chains SET (head_seq, head_hash) = \
                (SELECT seq, hash FROM audit WHERE seq = 7) WHERE name = 'a';";
    let cases = [
        // A row in the middle: the next record does not follow its predecessor.
        (
            "DELETE FROM audit WHERE seq = 3",
            broken(5, "a", ChainFaultKind::Gap),
        ),
        // The first row.
        (
            "DELETE FROM audit WHERE seq = 1",
            broken(3, "a", ChainFaultKind::Gap),
        ),
        // The tail: detected by the checkpoint record, with or without the head.
        (
            "DELETE FROM audit WHERE seq = 9",
            broken(9, "a", ChainFaultKind::Missing),
        ),
        (
            &format!("DELETE FROM audit WHERE seq = 9; {head}"),
            broken(9, "a", ChainFaultKind::Missing),
        ),
        // A whole chain, with and without its row.
        (
            "DELETE FROM audit WHERE chain = 'b'",
            broken(8, "b", ChainFaultKind::Missing),
        ),
        (
            "DELETE FROM audit WHERE chain = 'b'; DELETE FROM chains WHERE name = 'b'",
            broken(8, "b", ChainFaultKind::Missing),
        ),
        // Only the row of the chain.
        (
            "DELETE FROM chains WHERE name = 'b'",
            broken(2, "b", ChainFaultKind::UnknownChain),
        ),
        // A record under another number.
        (
            "UPDATE audit SET seq = 500 WHERE seq = 5",
            broken(5, "a", ChainFaultKind::Moved),
        ),
        (
            "UPDATE audit SET seq = 500 WHERE seq = 9",
            broken(9, "a", ChainFaultKind::Moved),
        ),
        // Two records that were swapped.
        (
            "UPDATE audit SET seq = 99 WHERE seq = 3; UPDATE audit SET seq = 3 WHERE seq = 5; \
             UPDATE audit SET seq = 5 WHERE seq = 99;",
            broken(5, "a", ChainFaultKind::Moved),
        ),
        // A record assigned to another sandbox.
        (
            "UPDATE audit SET body = replace(body, '\"sandbox\":\"a\"', '\"sandbox\":\"b\"') \
             WHERE seq = 3",
            broken(3, "b", ChainFaultKind::Changed),
        ),
        // A head that was set back alone.
        (head, broken(7, "a", ChainFaultKind::Missing)),
    ];
    for (sql, expect) in cases {
        assert_eq!(after(dir.path(), sql), expect, "{sql}");
    }
    // The gate's own last record, with its head, its number and the heads it listed.
    let gate = "DELETE FROM audit WHERE seq = 10; DELETE FROM chains WHERE name = '';";
    let found = after(dir.path(), gate).unwrap();
    assert_eq!(found.kind, ChainFaultKind::Count(1));
}

#[tokio::test]
async fn any_byte_of_a_row_changed_by_sql_names_that_row() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path()).await;
    let copy = copy_dir(dir.path());
    let conn = tamper(copy.path());
    // The generated columns would refuse a body that is not JSON; an attacker can drop them.
    conn.execute_batch(
        "CREATE TABLE bare (seq INTEGER PRIMARY KEY, body, prev, hash);
         INSERT INTO bare SELECT seq, body, prev, hash FROM audit;
         DROP TABLE audit;
         ALTER TABLE bare RENAME TO audit;
         PRAGMA journal_mode = delete;",
    )
    .unwrap();
    assert!(verify_blocking(&database(copy.path())).unwrap().is_intact());
    for column in ["body", "prev", "hash"] {
        let sql = format!("SELECT CAST({column} AS BLOB) FROM audit WHERE seq = 5");
        let whole: Vec<u8> = conn.query_row(&sql, [], |r| r.get(0)).unwrap();
        let kind = if column == "body" { "TEXT" } else { "BLOB" };
        let put = format!("UPDATE audit SET {column} = CAST(?1 AS {kind}) WHERE seq = 5");
        for at in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[at] ^= 0x01;
            conn.execute(&put, params![flipped]).unwrap();
            let report = verify_blocking(&database(copy.path())).unwrap();
            let found = report.first_broken.expect("a flipped byte went unnoticed");
            assert_eq!(
                (found.seq, found.kind),
                (Some(5), ChainFaultKind::Changed),
                "{column} {at}"
            );
        }
        conn.execute(&put, params![whole]).unwrap();
    }
    assert!(verify_blocking(&database(copy.path())).unwrap().is_intact());
}

#[tokio::test]
async fn any_byte_of_a_row_changed_in_the_file_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path()).await;
    let path = database(dir.path());
    let conn = tamper(dir.path());
    let (body, hash): (String, Vec<u8>) = conn
        .query_row("SELECT body, hash FROM audit WHERE seq = 5", [], |r| {
            Ok((r.get(0)?, r.get(1)?))
        })
        .unwrap();
    drop(conn);
    let whole = std::fs::read(&path).unwrap();
    let find = |needle: &[u8]| {
        whole
            .windows(needle.len())
            .position(|w| w == needle)
            .expect("not in the file")
    };
    // The cell: payload length, row id, header with the types, then body, prev and hash.
    let start = find(body.as_bytes()) - 9;
    let end = start + 9 + body.len() + 32 + 32;
    assert!(whole[..end].ends_with(&hash));
    assert!((150..400).contains(&(end - start)), "{start} {end}");
    let mut named = 0;
    for at in start..end {
        for flip in [0x01, 0x80] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            std::fs::write(&path, &bytes).unwrap();
            let report = verify_blocking(&path).unwrap();
            let found = report
                .first_broken
                .unwrap_or_else(|| panic!("byte {at} went unnoticed"));
            match found.seq {
                Some(5) => named += 1,
                Some(other) => assert!(at < start + 9, "byte {at} was blamed on {other}"),
                None => assert!(matches!(found.kind, ChainFaultKind::File(_)), "{found:?}"),
            }
        }
    }
    assert!(named > (end - start - 9) * 2 - 10, "{named}");
}

#[tokio::test]
async fn tables_other_than_records_are_verified_too() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path()).await;
    for sql in [
        "UPDATE chains SET head_hash = zeroblob(32) WHERE name = 'a'",
        "UPDATE chains SET head_hash = zeroblob(31) WHERE name = 'a'",
        "UPDATE chains SET base_seq = 4 WHERE name = 'a'",
        "UPDATE chains SET base_hash = randomblob(32) WHERE name = 'a'",
        "UPDATE ledger SET last_seq = 11",
        "UPDATE ledger SET absent = 1",
        "DELETE FROM ledger",
        "INSERT INTO checkpoints VALUES ('a', 5, zeroblob(32), 1, 1)",
        "INSERT INTO checkpoints VALUES ('a', 500, zeroblob(32), 1, 1)",
        "DROP TABLE audit",
    ] {
        assert!(after(dir.path(), sql).is_some(), "{sql}");
    }
}

#[test]
fn file_that_is_not_a_database_is_not_verified() {
    let dir = tempfile::tempdir().unwrap();
    assert!(verify_blocking(&database(dir.path())).is_err());
    std::fs::write(database(dir.path()), "x".repeat(5000)).unwrap();
    let report = verify_blocking(&database(dir.path())).unwrap();
    assert!(matches!(
        report.first_broken.unwrap().kind,
        ChainFaultKind::File(_)
    ));
}

#[tokio::test]
async fn verification_leaves_no_files_behind() {
    let dir = tempfile::tempdir().unwrap();
    small_log(dir.path()).await;
    let before = crate::fixture::names(dir.path(), "");
    assert!(verify_blocking(&database(dir.path())).unwrap().is_intact());
    assert_eq!(crate::fixture::names(dir.path(), ""), before);
}
