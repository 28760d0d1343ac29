//! The state of every chain, and the writing of records inside a transaction.
//!
//! One chain per sandbox and one for the gate, because retention is per sandbox: with a single
//! chain no record of one sandbox could be removed without breaking the evidence about another.
//! Checkpoints divide a chain into segments; only whole segments are removed, and the last hash of
//! a removed segment becomes the base of the rest.
//!
//! A chain that has no records left and whose sandbox is no longer registered is retired: a record
//! in the gate's chain lists its final head, and its row is removed. If the name is used again, a
//! new chain starts. Checkpoints in the gate's chain may list a head of a chain that was retired
//! later. They are rotated out before the record of the retirement, so that verification, as long as
//! it reads such a checkpoint, also finds the record that says why the head is missing.

use std::collections::{BTreeSet, HashMap};

use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use rusqlite::{Connection, OptionalExtension, params};

use super::chain::{ChainHead, ChainName, Digest256, chain_text, compose};

/// Maximum number of records in a segment.
const SEGMENT_RECORDS: u64 = 1024;

/// Maximum size of a segment in bytes.
const SEGMENT_BYTES: u64 = 1024 * 1024;

/// Maximum number of records between two records of the chain heads.
pub(crate) const HEADS_INTERVAL: u64 = 1024;

/// Maximum number of heads in one checkpoint record; more heads need several records.
const HEADS_PER_RECORD: usize = 256;

/// The size of a record on disk in addition to its body: two hashes, its number and its entries in
/// the indexes, measured on a database full of refusals.
const ROW_OVERHEAD: u64 = 192;

/// The size of a chain on disk in addition to its records: its row, with two hashes.
const CHAIN_OVERHEAD: u64 = 256;

/// Maximum record number, and maximum size of a log in bytes: the largest integer that every JSON
/// parser represents exactly. No log reaches it; a table with a larger value is corrupt.
pub(crate) const MAX_SEQ: u64 = (1 << 53) - 1;

/// The event of a record that lists heads.
pub(crate) const CHECKPOINT: &str = "checkpoint";

/// The event of a record that lists the final heads of retired chains.
pub(crate) const RETIRED: &str = "chains_retired";

/// The state of one chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// Number and hash of the last record that was rotated out; zero if there is none.
    pub(crate) base_seq: u64,
    pub(crate) base_hash: Digest256,
    /// Number and hash of the last record.
    pub(crate) head_seq: u64,
    pub(crate) head_hash: Digest256,
    /// The records and bytes of the chain.
    records: u64,
    bytes: u64,
    /// The records and bytes of the chain after its last checkpoint.
    open_records: u64,
    open_bytes: u64,
}

impl Chain {
    const EMPTY: Self = Self {
        base_seq: 0,
        base_hash: Digest256::ZERO,
        head_seq: 0,
        head_hash: Digest256::ZERO,
        records: 0,
        bytes: 0,
        open_records: 0,
        open_bytes: 0,
    };
}

/// The state of all chains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// The number of the last record of all chains.
    pub(crate) last_seq: u64,
    /// How many of the numbers up to `last_seq` have no row: rotated out, or skipped when an older
    /// database was restored. Numbers are never reused.
    pub(crate) absent: u64,
    /// The number of the last record when the heads of the chains were last recorded.
    pub(crate) stated_seq: u64,
    bytes: u64,
    pub(crate) chains: HashMap<ChainName, Chain>,
    /// The chains with records by size, and among equal sizes by the age of their last record: the
    /// last entry is rotated next. There may be thousands of chains.
    by_size: BTreeSet<(u64, u64, ChainName)>,
    /// The chains without records.
    empty: BTreeSet<ChainName>,
}

impl Ledger {
    /// Loads the state of all chains.
    pub(crate) fn load(conn: &Connection) -> Result<Self, rusqlite::Error> {
        let (last_seq, absent, stated_seq) = read_counters(conn)?;
        let mut ledger = Self {
            last_seq,
            absent,
            stated_seq,
            ..Self::default()
        };
        let mut rows = conn.prepare(
            "SELECT name, base_seq, base_hash, head_seq, head_hash, records, bytes, \
                    open_records, open_bytes FROM chains",
        )?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let name: String = row.get(0)?;
            let chain = Chain {
                base_seq: count(row, 1)?,
                base_hash: digest(row, 2)?,
                head_seq: count(row, 3)?,
                head_hash: digest(row, 4)?,
                records: count(row, 5)?,
                bytes: count(row, 6)?,
                open_records: count(row, 7)?,
                open_bytes: count(row, 8)?,
            };
            let name = match name.as_str() {
                "" => None,
                text => Some(SandboxId::parse(text).map_err(|e| invalid_cell(0, e))?),
            };
            ledger.put(name, Some(chain));
        }
        Ok(ledger)
    }

    /// A contradiction in the state, if there is any. A file with one was written by another
    /// program or is corrupt, and continuing would reuse numbers.
    pub(crate) fn contradiction(
        &self,
        conn: &Connection,
    ) -> Result<Option<String>, rusqlite::Error> {
        let (lowest, highest): (i64, i64) = conn.query_row(
            "SELECT coalesce((SELECT min(seq) FROM audit), 1), \
                    coalesce((SELECT max(seq) FROM audit), 0)",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        let last = self.last_seq;
        let is_contradictory = |chain: &Chain| {
            chain.base_seq > chain.head_seq
                || chain.head_seq > last
                || chain.open_records > chain.records
                || chain.open_bytes > chain.bytes
        };
        let records = self
            .chains
            .values()
            .fold(0, |sum: u64, chain| sum.saturating_add(chain.records));
        let found = if last > MAX_SEQ || self.bytes > MAX_SEQ {
            "its counters are implausibly large".to_owned()
        } else if lowest < 1 || highest > to_i64(last) {
            format!("it contains the records {lowest} to {highest}, but its last number is {last}")
        } else if self.stated_seq > last {
            format!(
                "its heads were recorded at number {}, but its last number is {last}",
                self.stated_seq
            )
        } else if let Some((name, _)) = self.chains.iter().find(|(_, c)| is_contradictory(c)) {
            format!(
                "the row of the chain {:?} is contradictory",
                chain_text(name)
            )
        } else if records.saturating_add(self.absent) != last {
            format!(
                "its last number is {last}, but its chains have {records} records and {} numbers are absent",
                self.absent
            )
        } else {
            return Ok(None);
        };
        Ok(Some(found))
    }

    /// Returns a corruption error if the ledger's row differs from the state in memory: another
    /// process has written to the database, and the state of the chains in memory is invalid.
    pub(crate) fn check_unchanged(&self, conn: &Connection) -> Result<(), rusqlite::Error> {
        if read_counters(conn)? == (self.last_seq, self.absent, self.stated_seq) {
            return Ok(());
        }
        Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT),
            Some("another process has written to the database".to_owned()),
        ))
    }

    /// Whether records were written since the heads were last recorded.
    pub(crate) fn has_unrecorded_heads(&self) -> bool {
        self.last_seq > self.stated_seq
    }

    /// Whether the log is larger than its limit. The size of the chains themselves counts, but only
    /// up to half of the limit: with thousands of registrations there must still be space for
    /// records.
    pub(crate) fn is_over(&self, max_bytes: u64) -> bool {
        let chains = u64::try_from(self.chains.len()).unwrap_or(u64::MAX);
        let overhead = chains.saturating_mul(CHAIN_OVERHEAD).min(max_bytes / 2);
        self.bytes.saturating_add(overhead) > max_bytes
    }

    /// Inserts, replaces or removes a chain.
    fn put(&mut self, name: ChainName, chain: Option<Chain>) -> Option<Chain> {
        let old = self.chains.remove(&name);
        if let Some(old) = &old {
            self.bytes = self.bytes.saturating_sub(old.bytes);
            self.by_size.remove(&rotation_rank(&name, old));
            self.empty.remove(&name);
        }
        if let Some(chain) = chain {
            self.bytes = self.bytes.saturating_add(chain.bytes);
            match chain.records {
                0 => self.empty.insert(name.clone()),
                _ => self.by_size.insert(rotation_rank(&name, &chain)),
            };
            self.chains.insert(name, chain);
        }
        old
    }

    /// Reverts the changes of a failed transaction.
    pub(crate) fn undo(&mut self, changes: Changes) {
        self.last_seq = changes.last_seq;
        self.absent = changes.absent;
        self.stated_seq = changes.stated_seq;
        for (name, chain) in changes.chains {
            self.put(name, chain);
        }
    }
}

/// The sort key of `Ledger::by_size`.
fn rotation_rank(name: &ChainName, chain: &Chain) -> (u64, u64, ChainName) {
    (chain.bytes, u64::MAX - chain.head_seq, name.clone())
}

/// The changes of a transaction: the previous state, and counts.
#[derive(Debug)]
pub(crate) struct Changes {
    last_seq: u64,
    absent: u64,
    stated_seq: u64,
    chains: HashMap<ChainName, Option<Chain>>,
    /// Records written, by kind.
    pub(crate) written: HashMap<Kind, u64>,
    /// Records rotated out.
    pub(crate) rotated: u64,
}

/// The writes of one transaction. Each write also changes the ledger in memory and saves the
/// previous state, so that a failed transaction can be reverted in memory too.
pub(crate) struct LedgerTransaction<'a> {
    conn: &'a Connection,
    ledger: &'a mut Ledger,
    changes: Changes,
    max_bytes: u64,
}

impl<'a> LedgerTransaction<'a> {
    pub(crate) fn new(conn: &'a Connection, ledger: &'a mut Ledger, max_bytes: u64) -> Self {
        Self {
            conn,
            changes: Changes {
                last_seq: ledger.last_seq,
                absent: ledger.absent,
                stated_seq: ledger.stated_seq,
                chains: HashMap::new(),
                written: HashMap::new(),
                rotated: 0,
            },
            ledger,
            max_bytes,
        }
    }

    /// The transaction's connection.
    pub(crate) fn conn(&self) -> &'a Connection {
        self.conn
    }

    /// Writes one record at the end of its chain and returns its number.
    pub(crate) fn append(
        &mut self,
        event: &AuditEvent,
        ts: UnixMillis,
    ) -> Result<u64, rusqlite::Error> {
        self.append_with(event, ts, &[])
    }

    fn append_with(
        &mut self,
        event: &AuditEvent,
        ts: UnixMillis,
        heads: &[ChainHead],
    ) -> Result<u64, rusqlite::Error> {
        let seq = self.ledger.last_seq + 1;
        let body = compose(event, seq, ts, heads);
        let known = self.ledger.chains.get(&event.sandbox);
        let mut chain = known.cloned().unwrap_or(Chain::EMPTY);
        let prev = chain.head_hash;
        let hash = Digest256::of_record(&prev, body.as_bytes());
        self.conn
            .prepare_cached("INSERT INTO audit (seq, body, prev, hash) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![to_i64(seq), body, prev.as_bytes(), hash.as_bytes()])?;

        let size = u64::try_from(body.len()).unwrap_or(u64::MAX) + ROW_OVERHEAD;
        chain.head_seq = seq;
        chain.head_hash = hash;
        chain.records += 1;
        chain.bytes += size;
        chain.open_records += 1;
        chain.open_bytes += size;
        // A small log has small segments, otherwise rotation would have to remove everything.
        let segment = SEGMENT_BYTES.min(self.max_bytes / 16);
        if chain.open_records >= SEGMENT_RECORDS || chain.open_bytes >= segment {
            self.close_segment(&event.sandbox, &mut chain)?;
        }
        self.ledger.last_seq = seq;
        *self.changes.written.entry(event.kind).or_default() += 1;
        self.put(event.sandbox.clone(), Some(chain));
        Ok(seq)
    }

    /// Writes a record into the gate's chain that lists the head of every other chain that changed
    /// since the last such record. Without this record, verification could not detect that a chain
    /// was removed together with its row, or cut back to an earlier head.
    pub(crate) fn record_heads(&mut self, ts: UnixMillis) -> Result<(), rusqlite::Error> {
        let stated = self.ledger.stated_seq;
        let chains = self.ledger.chains.iter();
        let mut heads: Vec<ChainHead> = chains
            .filter(|(name, chain)| name.is_some() && chain.head_seq > stated)
            .map(|(name, chain)| head(name, chain))
            .collect();
        heads.sort_by(|a, b| a.chain.cmp(&b.chain));
        for chunk in heads.chunks(HEADS_PER_RECORD) {
            self.append_with(&AuditEvent::lifecycle(CHECKPOINT, None), ts, chunk)?;
        }
        self.ledger.stated_seq = self.ledger.last_seq;
        Ok(())
    }

    /// Retires the chains that have no records and whose sandbox is not registered, after their
    /// final heads are written into the gate's chain.
    pub(crate) fn retire(
        &mut self,
        ts: UnixMillis,
        is_registered: impl Fn(&SandboxId) -> bool,
    ) -> Result<(), rusqlite::Error> {
        let is_gone = |name: &&ChainName| name.as_ref().is_some_and(|id| !is_registered(id));
        let names: Vec<ChainName> = self.ledger.empty.iter().filter(is_gone).cloned().collect();
        for chunk in names.chunks(HEADS_PER_RECORD) {
            let heads: Vec<ChainHead> = chunk
                .iter()
                .filter_map(|name| Some(head(name, self.ledger.chains.get(name)?)))
                .collect();
            self.append_with(&AuditEvent::lifecycle(RETIRED, None), ts, &heads)?;
            for name in chunk {
                self.put(name.clone(), None);
            }
        }
        Ok(())
    }

    /// Whether enough records were written since the heads were recorded to record them again.
    pub(crate) fn should_record_heads(&self) -> bool {
        let unstated = self.ledger.last_seq.saturating_sub(self.ledger.stated_seq);
        unstated >= HEADS_INTERVAL
    }

    /// How many records this transaction has written.
    pub(crate) fn written(&self) -> u64 {
        self.changes.written.values().sum()
    }

    /// How many records this transaction has rotated out.
    pub(crate) fn rotated(&self) -> u64 {
        self.changes.rotated
    }

    /// Whether the log is larger than its limit.
    pub(crate) fn is_over(&self) -> bool {
        self.ledger.is_over(self.max_bytes)
    }

    /// Removes the oldest segment of the largest chain, so that a flood by one sandbox displaces
    /// its own records and no other sandbox's.
    pub(crate) fn rotate_one(&mut self) -> Result<(), rusqlite::Error> {
        let largest = self.ledger.by_size.last().and_then(|(_, _, name)| {
            let chain = self.ledger.chains.get(name)?;
            Some((name.clone(), chain.clone()))
        });
        // None would mean that the sizes are wrong; retrying would not correct them.
        let (name, mut chain) = largest.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        if chain.records == chain.open_records {
            // The largest chain has no closed segment: all of it is removed.
            self.close_segment(&name, &mut chain)?;
        }
        let (seq, hash, records, bytes) = self
            .conn
            .prepare_cached(
                "SELECT seq, hash, records, bytes FROM checkpoints \
                 WHERE chain = ?1 ORDER BY seq LIMIT 1",
            )?
            .query_row([chain_text(&name)], |row| {
                Ok((
                    row.get::<_, i64>(0)?,
                    digest(row, 1)?,
                    count(row, 2)?,
                    count(row, 3)?,
                ))
            })
            .optional()?
            .ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        if records > chain.records || bytes > chain.bytes {
            return Err(invalid_cell(2, "a segment is larger than its chain"));
        }
        for delete in [
            "DELETE FROM audit WHERE chain = ?1 AND seq <= ?2",
            "DELETE FROM checkpoints WHERE chain = ?1 AND seq <= ?2",
        ] {
            self.conn
                .prepare_cached(delete)?
                .execute(params![chain_text(&name), seq])?;
        }
        chain.base_seq = to_u64(seq);
        chain.base_hash = hash;
        chain.records = chain.records.saturating_sub(records);
        chain.bytes = chain.bytes.saturating_sub(bytes);
        self.ledger.absent += records;
        self.changes.rotated += records;
        self.put(name, Some(chain));
        Ok(())
    }

    /// Ensures that no number up to `seq` is used again.
    pub(crate) fn skip_to(&mut self, seq: u64) {
        let skipped = seq.saturating_sub(self.ledger.last_seq);
        self.ledger.last_seq += skipped;
        self.ledger.absent += skipped;
    }

    /// Writes the state of the chains, as the last statement before the commit.
    pub(crate) fn save(&mut self) -> Result<(), rusqlite::Error> {
        let mut put = self.conn.prepare_cached(
            "INSERT OR REPLACE INTO chains VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )?;
        let mut delete = self
            .conn
            .prepare_cached("DELETE FROM chains WHERE name = ?1")?;
        for name in self.changes.chains.keys() {
            match self.ledger.chains.get(name) {
                None => delete.execute([chain_text(name)])?,
                Some(chain) => put.execute(params![
                    chain_text(name),
                    to_i64(chain.base_seq),
                    chain.base_hash.as_bytes(),
                    to_i64(chain.head_seq),
                    chain.head_hash.as_bytes(),
                    to_i64(chain.records),
                    to_i64(chain.bytes),
                    to_i64(chain.open_records),
                    to_i64(chain.open_bytes),
                ])?,
            };
        }
        self.conn
            .prepare_cached("UPDATE ledger SET last_seq = ?1, absent = ?2, stated_seq = ?3")?
            .execute(params![
                to_i64(self.ledger.last_seq),
                to_i64(self.ledger.absent),
                to_i64(self.ledger.stated_seq),
            ])
            .map(drop)
    }

    /// The changes of this transaction.
    pub(crate) fn finish(self) -> Changes {
        self.changes
    }

    /// Inserts, replaces or removes a chain, and saves its previous state.
    fn put(&mut self, name: ChainName, chain: Option<Chain>) {
        let old = self.ledger.put(name.clone(), chain);
        // Only the first saved state of a chain is the state before the transaction.
        self.changes.chains.entry(name).or_insert(old);
    }

    fn close_segment(&self, name: &ChainName, chain: &mut Chain) -> Result<(), rusqlite::Error> {
        self.conn
            .prepare_cached("INSERT INTO checkpoints VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![
                chain_text(name),
                to_i64(chain.head_seq),
                chain.head_hash.as_bytes(),
                to_i64(chain.open_records),
                to_i64(chain.open_bytes),
            ])?;
        chain.open_records = 0;
        chain.open_bytes = 0;
        Ok(())
    }
}

fn head(name: &ChainName, chain: &Chain) -> ChainHead {
    ChainHead {
        chain: chain_text(name).to_owned(),
        hash: chain.head_hash,
        seq: chain.head_seq,
    }
}

/// Converts to SQLite's to_i64 integers; the values stay far below the limit.
pub(crate) fn to_i64(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Converts from SQLite's to_i64 integers.
pub(crate) fn to_u64(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

/// A column with a count. A negative count is corruption, and does not become zero.
fn count(row: &rusqlite::Row<'_>, at: usize) -> Result<u64, rusqlite::Error> {
    u64::try_from(row.get::<_, i64>(at)?).map_err(|e| invalid_cell(at, e))
}

/// The only row of the table `ledger`: the last record number, the count of absent numbers, and the
/// last number when the heads were recorded.
fn read_counters(conn: &Connection) -> Result<(u64, u64, u64), rusqlite::Error> {
    conn.prepare_cached("SELECT last_seq, absent, stated_seq FROM ledger")?
        .query_row([], |row| {
            Ok((count(row, 0)?, count(row, 1)?, count(row, 2)?))
        })
}

/// A column of 32 bytes.
pub(crate) fn digest(row: &rusqlite::Row<'_>, at: usize) -> Result<Digest256, rusqlite::Error> {
    let bytes = row
        .get_ref(at)?
        .as_blob()
        .map_err(|e| invalid_cell(at, e))?;
    Digest256::from_bytes(bytes).ok_or_else(|| invalid_cell(at, "not 32 bytes"))
}

/// An error for a cell with invalid content.
pub(crate) fn invalid_cell(
    at: usize,
    why: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(at, rusqlite::types::Type::Blob, why.into())
}

#[cfg(test)]
mod tests {
    use super::super::query::{AuditFilter, select_lines};
    use super::super::verify::{verify_connection, verify_jsonl};
    use super::*;
    use crate::database::Database;
    use crate::{files, schema};

    fn id(n: usize) -> SandboxId {
        SandboxId::parse(&format!("s{n}")).unwrap()
    }

    #[test]
    fn ledger_in_memory_equals_the_tables_after_failures() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.db");
        files::create_private(&path).unwrap();
        schema::create_tables(&path, schema::MIGRATIONS).unwrap();
        let (mut db, _) = Database::open(&path).unwrap();
        let ts = UnixMillis::new(1);
        let mut lines = Vec::new();
        let mut exported = 0;
        for round in 0..60 {
            for rotates in [false, true] {
                let fails = round % 3 == 2;
                let outcome = db.transact(12_000, |ledger_tx| {
                    for n in 0..if rotates { 0 } else { 20 } {
                        let name = id((round * 7 + n * n) % 97);
                        ledger_tx.append(&AuditEvent::lifecycle("x", Some(name)), ts)?;
                    }
                    while rotates && ledger_tx.is_over() {
                        ledger_tx.rotate_one()?;
                    }
                    if rotates && round % 4 == 0 {
                        ledger_tx.retire(ts, |name| name.as_str().ends_with('3'))?;
                        ledger_tx.record_heads(ts)?;
                    }
                    match fails {
                        true => Err(rusqlite::Error::InvalidQuery),
                        false => Ok(()),
                    }
                });
                assert_eq!(outcome.is_err(), fails);
                assert_eq!(db.ledger, Ledger::load(&db.conn).unwrap(), "round {round}");
                assert_eq!(db.ledger.contradiction(&db.conn).unwrap(), None);
                // Exports the lines before they can be rotated out, as the JSONL thread does.
                let after = AuditFilter {
                    after_seq: Some(exported),
                    ..AuditFilter::default()
                };
                for line in select_lines(&db.conn, &after).unwrap() {
                    exported = line.seq;
                    lines.extend(line.bytes);
                }
            }
        }
        assert!(db.ledger.chains.contains_key(&Some(id(3))));
        let text = String::from_utf8(lines).unwrap();
        assert!(text.matches(RETIRED).count() > 5);
        for report in [
            verify_connection(&db.conn),
            verify_jsonl(text.as_bytes()).unwrap(),
        ] {
            assert!(report.is_intact(), "{report:?}");
        }
        // A name that is used again although its chain was not retired is a gap.
        let kept = text.lines().filter(|line| !line.contains(RETIRED));
        let forged: String = kept.map(|line| format!("{line}\n")).collect();
        assert!(!verify_jsonl(forged.as_bytes()).unwrap().is_intact());
    }

    #[test]
    fn size_of_chains_counts_up_to_half_of_the_limit() {
        let mut ledger = Ledger::default();
        let chain = Chain {
            records: 1,
            bytes: 1000,
            ..Chain::EMPTY
        };
        for n in 0..100 {
            ledger.put(Some(id(n)), Some(chain.clone()));
        }
        assert!(ledger.is_over(100_000 + 100 * CHAIN_OVERHEAD - 1));
        assert!(!ledger.is_over(100_000 + 100 * CHAIN_OVERHEAD));
        for n in 0..100 {
            ledger.put(Some(id(n)), Some(Chain::EMPTY));
        }
        assert!(!ledger.is_over(1000), "there is nothing left to rotate");
    }
}
