//! Where every chain stands, and the writing of records inside a transaction.
//!
//! One chain per sandbox and one for the gate, because retention is per sandbox: with a
//! single chain nothing of one sandbox could be removed without breaking the evidence
//! about another. A chain is cut into segments by checkpoints; only whole segments are
//! removed, and the hash they ended with becomes the base of what is left.

use std::collections::HashMap;

use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use rusqlite::{Connection, OptionalExtension, params};

use super::chain::{ChainName, Digest256, Head, chain_text, compose};

/// A segment ends after this many records or bytes, whichever comes first.
const SEGMENT_RECORDS: u64 = 1024;
const SEGMENT_BYTES: u64 = 1024 * 1024;

/// The heads of all chains are stated at least this often, in records.
pub(crate) const STATE_EVERY: u64 = 1024;

/// How many heads one checkpoint record lists; more make several records.
const HEADS_PER_RECORD: usize = 256;

/// What a record costs on disk beside its body: two hashes, its number and its entries
/// in the indexes, measured on a database full of refusals.
const ROW_OVERHEAD: u64 = 192;

/// The highest number a record may bear, and the most bytes a log may have: what every
/// reader of JSON can hold exactly. No log comes near; a table that says more lies.
pub(crate) const MAX_SEQ: u64 = (1 << 53) - 1;

/// The event of a record that states heads.
pub(crate) const CHECKPOINT: &str = "checkpoint";

/// Where one chain stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// The last record that was rotated out, and its hash; zero at the beginning.
    pub(crate) base_seq: u64,
    pub(crate) base_hash: Digest256,
    /// The last record.
    pub(crate) head_seq: u64,
    pub(crate) head_hash: Digest256,
    /// What is there.
    records: u64,
    bytes: u64,
    /// What of it came after the last checkpoint.
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

/// Where all chains stand, as committed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) last_seq: u64,
    /// How many of the numbers up to `last_seq` no row bears: rotated out, or skipped
    /// when an older database was restored. Numbers are never given out twice.
    pub(crate) absent: u64,
    pub(crate) stated_seq: u64,
    pub(crate) bytes: u64,
    pub(crate) chains: HashMap<ChainName, Chain>,
}

impl Ledger {
    /// Reads where everything stands.
    pub(crate) fn load(conn: &Connection) -> Result<Self, rusqlite::Error> {
        let (last_seq, absent, stated_seq) = numbers(conn)?;
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
            ledger.bytes = ledger.bytes.saturating_add(chain.bytes);
            let name = match name.as_str() {
                "" => None,
                text => Some(policy::id::SandboxId::parse(text).map_err(|e| unreadable(0, e))?),
            };
            ledger.chains.insert(name, chain);
        }
        Ok(ledger)
    }

    /// What cannot be, if anything of this is so. A file that says it was written by
    /// somebody else or is damaged, and going on would give numbers out twice.
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
        let is_senseless = |chain: &Chain| {
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
            "its counters are beyond all measure".to_owned()
        } else if lowest < 1 || highest > signed(last) {
            format!("it holds records {lowest} to {highest} and says that {last} is the last")
        } else if self.stated_seq > last {
            format!("it states heads up to {} of {last}", self.stated_seq)
        } else if let Some((name, _)) = self.chains.iter().find(|(_, c)| is_senseless(c)) {
            format!("the row of the chain {:?} makes no sense", chain_text(name))
        } else if records.saturating_add(self.absent) != last {
            format!(
                "of {last} numbers {records} are in its chains and {} absent",
                self.absent
            )
        } else {
            return Ok(None);
        };
        Ok(Some(found))
    }

    /// Fails as damage does when the row in the database is not what was read or written
    /// here last: somebody else writes, and what either knows of the chains is wrong.
    pub(crate) fn check_unchanged(&self, conn: &Connection) -> Result<(), rusqlite::Error> {
        if numbers(conn)? == (self.last_seq, self.absent, self.stated_seq) {
            return Ok(());
        }
        Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT),
            Some("somebody else has written into it".to_owned()),
        ))
    }

    /// Whether anything was written since the heads were last stated.
    pub(crate) fn is_unstated(&self) -> bool {
        self.last_seq > self.stated_seq
    }

    /// Takes over what a committed turn changed.
    pub(crate) fn accept(&mut self, changes: Changes) {
        self.last_seq = changes.last_seq;
        self.absent = changes.absent;
        self.stated_seq = changes.stated_seq;
        self.bytes = changes.bytes;
        self.chains.extend(changes.chains);
    }
}

/// What a turn changed, to be taken over after its commit.
#[derive(Debug)]
pub(crate) struct Changes {
    last_seq: u64,
    absent: u64,
    stated_seq: u64,
    bytes: u64,
    chains: HashMap<ChainName, Chain>,
    /// Records written, by kind.
    pub(crate) written: HashMap<Kind, u64>,
    /// Records rotated out.
    pub(crate) rotated: u64,
}

/// The writing of one transaction. What it changes is kept beside the ledger until the
/// commit, so a failed one leaves no trace in memory either.
pub(crate) struct Turn<'a> {
    conn: &'a Connection,
    ledger: &'a Ledger,
    changes: Changes,
    max_bytes: u64,
}

impl<'a> Turn<'a> {
    pub(crate) fn new(conn: &'a Connection, ledger: &'a Ledger, max_bytes: u64) -> Self {
        Self {
            conn,
            ledger,
            changes: Changes {
                last_seq: ledger.last_seq,
                absent: ledger.absent,
                stated_seq: ledger.stated_seq,
                bytes: ledger.bytes,
                chains: HashMap::new(),
                written: HashMap::new(),
                rotated: 0,
            },
            max_bytes,
        }
    }

    /// The transaction's connection.
    pub(crate) fn conn(&self) -> &'a Connection {
        self.conn
    }

    /// Writes one record at the end of its chain and gives its number.
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
        heads: &[Head],
    ) -> Result<u64, rusqlite::Error> {
        let seq = self.changes.last_seq + 1;
        let body = compose(event, seq, ts, heads);
        let mut chain = self.chain(&event.sandbox);
        let prev = chain.head_hash;
        let hash = Digest256::of(&prev, body.as_bytes());
        self.conn
            .prepare_cached("INSERT INTO audit (seq, body, prev, hash) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![signed(seq), body, prev.as_bytes(), hash.as_bytes()])?;

        let size = u64::try_from(body.len()).unwrap_or(u64::MAX) + ROW_OVERHEAD;
        chain.head_seq = seq;
        chain.head_hash = hash;
        chain.records += 1;
        chain.bytes += size;
        chain.open_records += 1;
        chain.open_bytes += size;
        // A small log has small segments, or there would be nothing to rotate but all.
        let segment = SEGMENT_BYTES.min(self.max_bytes / 16);
        if chain.open_records >= SEGMENT_RECORDS || chain.open_bytes >= segment {
            self.close_segment(&event.sandbox, &mut chain)?;
        }
        self.changes.last_seq = seq;
        self.changes.bytes += size;
        *self.changes.written.entry(event.kind).or_default() += 1;
        self.changes.chains.insert(event.sandbox.clone(), chain);
        Ok(seq)
    }

    /// Writes a record into the gate's chain that lists the head of every other chain
    /// changed since the last one. Without it, a chain could be removed together with
    /// its row, or cut back to an earlier head, and what is left would still add up.
    pub(crate) fn state_heads(&mut self, ts: UnixMillis) -> Result<(), rusqlite::Error> {
        let stated = self.changes.stated_seq;
        let mut heads: Vec<Head> = self
            .all_chains()
            .filter(|(name, chain)| name.is_some() && chain.head_seq > stated)
            .map(|(name, chain)| Head {
                chain: chain_text(name).to_owned(),
                hash: chain.head_hash,
                seq: chain.head_seq,
            })
            .collect();
        heads.sort_by(|a, b| a.chain.cmp(&b.chain));
        for some in heads.chunks(HEADS_PER_RECORD) {
            self.append_with(&AuditEvent::lifecycle(CHECKPOINT, None), ts, some)?;
        }
        self.changes.stated_seq = self.changes.last_seq;
        Ok(())
    }

    /// Whether so much was written since the heads were stated that they should be again.
    pub(crate) fn should_state_heads(&self) -> bool {
        let unstated = self
            .changes
            .last_seq
            .saturating_sub(self.changes.stated_seq);
        unstated >= STATE_EVERY
    }

    /// How many records this turn has written.
    pub(crate) fn written(&self) -> u64 {
        self.changes.written.values().sum()
    }

    /// How many records this turn has rotated out.
    pub(crate) fn rotated(&self) -> u64 {
        self.changes.rotated
    }

    /// Whether the log is larger than it may be.
    pub(crate) fn is_over(&self) -> bool {
        self.changes.bytes > self.max_bytes
    }

    /// Removes the oldest segment of the largest chain. The largest pays, so that a flood
    /// by one sandbox pushes out its own past and nobody else's.
    pub(crate) fn rotate_one(&mut self) -> Result<(), rusqlite::Error> {
        let largest = self
            .all_chains()
            .filter(|(_, chain)| chain.records > 0)
            // Among equals the one that has been silent for longest.
            .max_by_key(|(_, chain)| (chain.bytes, u64::MAX - chain.head_seq))
            .map(|(name, chain)| (name.clone(), chain.clone()));
        // None would mean that the sizes are wrong; trying for ever would not mend them.
        let (name, mut chain) = largest.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
        if chain.records == chain.open_records {
            // Many small chains, none with a closed segment: this one goes as a whole.
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
            return Err(unreadable(2, "a segment is larger than its chain"));
        }
        for delete in [
            "DELETE FROM audit WHERE chain = ?1 AND seq <= ?2",
            "DELETE FROM checkpoints WHERE chain = ?1 AND seq <= ?2",
        ] {
            self.conn
                .prepare_cached(delete)?
                .execute(params![chain_text(&name), seq])?;
        }
        chain.base_seq = unsigned(seq);
        chain.base_hash = hash;
        chain.records = chain.records.saturating_sub(records);
        chain.bytes = chain.bytes.saturating_sub(bytes);
        self.changes.bytes = self.changes.bytes.saturating_sub(bytes);
        self.changes.absent += records;
        self.changes.rotated += records;
        self.changes.chains.insert(name, chain);
        Ok(())
    }

    /// Never gives out a number up to `seq` again.
    pub(crate) fn skip_to(&mut self, seq: u64) {
        let skipped = seq.saturating_sub(self.changes.last_seq);
        self.changes.last_seq += skipped;
        self.changes.absent += skipped;
    }

    /// Writes where the chains stand now, as the last act before the commit.
    pub(crate) fn finish(self) -> Result<Changes, rusqlite::Error> {
        let mut put = self.conn.prepare_cached(
            "INSERT OR REPLACE INTO chains VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
        )?;
        for (name, chain) in &self.changes.chains {
            put.execute(params![
                chain_text(name),
                signed(chain.base_seq),
                chain.base_hash.as_bytes(),
                signed(chain.head_seq),
                chain.head_hash.as_bytes(),
                signed(chain.records),
                signed(chain.bytes),
                signed(chain.open_records),
                signed(chain.open_bytes),
            ])?;
        }
        self.conn
            .prepare_cached("UPDATE ledger SET last_seq = ?1, absent = ?2, stated_seq = ?3")?
            .execute(params![
                signed(self.changes.last_seq),
                signed(self.changes.absent),
                signed(self.changes.stated_seq),
            ])?;
        Ok(self.changes)
    }

    fn chain(&self, name: &ChainName) -> Chain {
        self.changes
            .chains
            .get(name)
            .or_else(|| self.ledger.chains.get(name))
            .cloned()
            .unwrap_or(Chain::EMPTY)
    }

    fn all_chains(&self) -> impl Iterator<Item = (&ChainName, &Chain)> {
        let unchanged = self
            .ledger
            .chains
            .iter()
            .filter(|(name, _)| !self.changes.chains.contains_key(*name));
        self.changes.chains.iter().chain(unchanged)
    }

    fn close_segment(&self, name: &ChainName, chain: &mut Chain) -> Result<(), rusqlite::Error> {
        self.conn
            .prepare_cached("INSERT INTO checkpoints VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![
                chain_text(name),
                signed(chain.head_seq),
                chain.head_hash.as_bytes(),
                signed(chain.open_records),
                signed(chain.open_bytes),
            ])?;
        chain.open_records = 0;
        chain.open_bytes = 0;
        Ok(())
    }
}

/// SQLite's integers are signed; ours count and stay far below the difference.
pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// The other way round.
pub(crate) fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or_default()
}

/// A column that counts. A negative one is not taken for zero: it is damage.
fn count(row: &rusqlite::Row<'_>, at: usize) -> Result<u64, rusqlite::Error> {
    u64::try_from(row.get::<_, i64>(at)?).map_err(|e| unreadable(at, e))
}

/// The one row of the ledger: last number, absent numbers, last stated.
fn numbers(conn: &Connection) -> Result<(u64, u64, u64), rusqlite::Error> {
    conn.prepare_cached("SELECT last_seq, absent, stated_seq FROM ledger")?
        .query_row([], |row| {
            Ok((count(row, 0)?, count(row, 1)?, count(row, 2)?))
        })
}

/// A column of 32 bytes.
pub(crate) fn digest(row: &rusqlite::Row<'_>, at: usize) -> Result<Digest256, rusqlite::Error> {
    let bytes = row.get_ref(at)?.as_blob().map_err(|e| unreadable(at, e))?;
    Digest256::from_bytes(bytes).ok_or_else(|| unreadable(at, "not 32 bytes"))
}

/// An error for a cell that does not hold what it should.
pub(crate) fn unreadable(
    at: usize,
    why: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(at, rusqlite::types::Type::Blob, why.into())
}
