//! Verification of the chains, which reports the first record that does not match.
//!
//! Records are read in the order of their numbers, over all chains at once: each record must match
//! its hash, follow the previous one in its chain, and agree with every checkpoint. At the end,
//! the last record of each chain must be the head in the chain's row of the table `chains`, and
//! every record number ever used must be in the table `audit` or be counted as rotated out.
//!
//! Verification cannot detect that the whole file was rewritten with new hashes. Only a copy
//! elsewhere can, which is the purpose of the JSONL file.

use std::collections::HashMap;
use std::io::BufRead;
use std::path::Path;

use policy::id::SandboxId;
use rusqlite::Connection;
use rusqlite::types::ValueRef;

use super::chain::{ChainHead, ChainName, Digest256, RecordHeader, split_line};
use super::ledger::{Ledger, RETIRED, digest, to_u64};
use crate::connection;
use crate::error::StoreError;
use crate::schema::{self, DatabaseOpenError};

/// Maximum length of a line that is read into memory, in bytes; records are far shorter.
const MAX_LINE: u64 = 4 * 1024 * 1024;

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Number of records that were checked.
    pub records: u64,
    /// Number of chains that the records belong to.
    pub chains: u64,
    /// Number of segment ends and recorded heads that the records were compared with.
    pub checkpoints: u64,
    /// Number of chains whose first records are missing, because they were rotated out or because
    /// the export started later; their remaining records were checked. A last line that is still
    /// being written is counted as well.
    pub partial: u64,
    /// The first fault.
    pub first_broken: Option<ChainFault>,
}

impl VerifyReport {
    /// Whether there is no fault.
    pub fn is_intact(&self) -> bool {
        self.first_broken.is_none()
    }
}

/// The first record at which verification failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainFault {
    /// The number of the record, if the fault concerns a record.
    pub seq: Option<u64>,
    /// The chain of the record: a sandbox's, or none for the gate's own or for the whole file.
    pub chain: Option<SandboxId>,
    /// The kind of the fault.
    pub kind: ChainFaultKind,
}

impl std::fmt::Display for ChainFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(seq) = self.seq {
            write!(f, "record {seq}")?;
            match &self.chain {
                Some(sandbox) => write!(f, " of {sandbox}: ")?,
                None => write!(f, ": ")?,
            }
        }
        write!(f, "{}", self.kind)
    }
}

/// The kinds of faults that verification finds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFaultKind {
    /// Body, prev and hash do not match.
    #[error("its content does not match its hash")]
    Changed,
    /// `prev` is not the hash of the previous record.
    #[error("the record before it is missing or was replaced")]
    Gap,
    /// The record is stored under another number than its own.
    #[error("it is stored under another number")]
    Moved,
    /// A head or a checkpoint names the record, but it is missing.
    #[error("it is missing, or its chain was truncated before it")]
    Missing,
    /// The chain of the record is not in the table `chains`.
    #[error("its chain is unknown")]
    UnknownChain,
    /// Some record numbers are not in the table `audit` and are not counted as rotated out.
    #[error("{0} records are missing or too many")]
    Count(u64),
    /// A line of an export that is not a record.
    #[error("line {0} is not a record")]
    Line(u64),
    /// The file itself is damaged.
    #[error("the file is damaged: {0}")]
    File(String),
}

/// Checks the database at `path`. Reads only; the gate may be running. Blocks.
pub fn verify_blocking(path: &Path) -> Result<VerifyReport, StoreError> {
    if !path.is_file() {
        return Err(StoreError::file(path, "there is no such file"));
    }
    let conn = connection::connect_for_inspection(path).map_err(|e| StoreError::file(path, e))?;
    match schema::identify(&conn, path, schema::MIGRATIONS) {
        Ok(_) => {}
        Err(DatabaseOpenError::Corrupt(reason)) => {
            return Ok(damaged(VerifyReport::default(), reason));
        }
        Err(DatabaseOpenError::Refused(error)) => return Err(error),
    }
    Ok(verify_connection(&conn))
}

/// Verifies an export or a JSONL file. Chains may be interleaved and may start anywhere, but must
/// have no gap: a filter by anything but sandbox and time leaves gaps. A last line without a
/// newline is not an error, because the file may be written at the moment.
pub fn verify_jsonl(reader: impl BufRead) -> Result<VerifyReport, StoreError> {
    let mut reader = reader;
    let mut verification = Verification::default();
    let mut line = Vec::new();
    let mut number = 0;
    loop {
        line.clear();
        let read = std::io::Read::take(&mut reader, MAX_LINE).read_until(b'\n', &mut line);
        if read.map_err(|e| StoreError::Read {
            reason: e.to_string(),
        })? == 0
        {
            break;
        }
        number += 1;
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let broken = match split_line(text) {
            Some((body, prev, hash)) => verification.check_record(None, &body, prev, hash),
            None if is_torn(&line) => {
                verification.report.partial += 1;
                break;
            }
            None => Err(ChainFault::in_file(ChainFaultKind::Line(number))),
        };
        if let Err(broken) = broken {
            verification.report.first_broken = Some(broken);
            break;
        }
    }
    Ok(verification.report)
}

/// Whether `line` is the beginning of a record at the end of a file.
fn is_torn(line: &[u8]) -> bool {
    let is_whole = line.ends_with(b"\n") || u64::try_from(line.len()).is_ok_and(|n| n >= MAX_LINE);
    let begins = line.starts_with(b"{\"") || line == b"{";
    begins && !is_whole && serde_json::from_slice::<serde::de::IgnoredAny>(line).is_err()
}

/// Verifies everything that a connection reads, as one snapshot.
pub(crate) fn verify_connection(conn: &Connection) -> VerifyReport {
    let mut verification = Verification::default();
    let outcome = (|| -> Result<(), rusqlite::Error> {
        conn.execute_batch("BEGIN")?;
        verification.load(conn)?;
        verification.check_rows(conn)?;
        if verification.report.first_broken.is_none() {
            verification.report.first_broken = verification.check_end().err();
        }
        if verification.lacks_a_record() {
            verification.find_moved(conn)?;
        }
        if verification.report.first_broken.is_none()
            && let Some(found) =
                connection::first_integrity_error(conn, "PRAGMA integrity_check(1)")?
        {
            verification.report.first_broken =
                Some(ChainFault::in_file(ChainFaultKind::File(found)));
        }
        Ok(())
    })();
    match outcome {
        Ok(()) => verification.report,
        // A fault that was found before the file became unreadable is more exact.
        Err(_) if verification.report.first_broken.is_some() => verification.report,
        Err(error) => damaged(verification.report, error.to_string()),
    }
}

fn damaged(mut report: VerifyReport, reason: String) -> VerifyReport {
    report.first_broken = Some(ChainFault::in_file(ChainFaultKind::File(reason)));
    report
}

impl ChainFault {
    fn in_file(kind: ChainFaultKind) -> Self {
        Self {
            seq: None,
            chain: None,
            kind,
        }
    }

    fn in_record(seq: u64, chain: &ChainName, kind: ChainFaultKind) -> Self {
        Self {
            seq: Some(seq),
            chain: chain.clone(),
            kind,
        }
    }
}

/// The state of a verification.
#[derive(Default)]
struct Verification {
    report: VerifyReport,
    /// The last record of each chain so far.
    last: HashMap<ChainName, (u64, Digest256)>,
    /// The start and end of every chain; only for a database, not for an export.
    ledger: Option<Ledger>,
    /// The segment ends that have not been reached yet.
    segments: HashMap<u64, (String, Digest256)>,
    /// Recorded heads whose records are all gone, until a later record states that their chain was
    /// retired.
    unexplained: HashMap<ChainName, (u64, Digest256)>,
}

impl Verification {
    fn load(&mut self, conn: &Connection) -> Result<(), rusqlite::Error> {
        self.ledger = Some(Ledger::load(conn)?);
        let mut rows = conn.prepare("SELECT chain, seq, hash FROM checkpoints")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let end = (row.get(0)?, digest(row, 2)?);
            self.segments.insert(to_u64(row.get(1)?), end);
        }
        Ok(())
    }

    /// Checks every row until a fault is found. Uses no generated column: a body that is no longer
    /// JSON must be reported, and must not fail the statement.
    fn check_rows(&mut self, conn: &Connection) -> Result<(), rusqlite::Error> {
        let mut rows = conn.prepare("SELECT seq, body, prev, hash FROM audit ORDER BY seq")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let row_seq = to_u64(row.get(0)?);
            if let Err(broken) = match cells(row)? {
                Some((body, prev, hash)) => self.check_record(Some(row_seq), body, prev, hash),
                None => Err(ChainFault::in_record(
                    row_seq,
                    &None,
                    ChainFaultKind::Changed,
                )),
            } {
                self.report.first_broken = Some(broken);
                break;
            }
        }
        Ok(())
    }

    /// Checks one record, which has the number `row_seq` if it comes from a table.
    fn check_record(
        &mut self,
        row_seq: Option<u64>,
        body: &[u8],
        prev: Digest256,
        hash: Digest256,
    ) -> Result<(), ChainFault> {
        let header = RecordHeader::parse(body);
        let claimed = header.as_ref().map(|o| o.seq);
        let chain = header.as_ref().and_then(|o| o.sandbox.clone());
        let Some(header) = header.filter(|_| Digest256::of_record(&prev, body) == hash) else {
            // The content of the record cannot be trusted, so the number of its row identifies it.
            return Err(ChainFault {
                seq: row_seq.or(claimed),
                chain,
                kind: ChainFaultKind::Changed,
            });
        };
        let seq = header.seq;
        if row_seq.is_some_and(|row_seq| row_seq != seq) {
            return Err(ChainFault::in_record(seq, &chain, ChainFaultKind::Moved));
        }
        match (self.last.get(&chain), &self.ledger) {
            (Some((last_seq, last_hash)), _) => {
                if prev != *last_hash || seq <= *last_seq {
                    return Err(ChainFault::in_record(seq, &chain, ChainFaultKind::Gap));
                }
            }
            (None, Some(ledger)) => {
                let known = ledger.chains.get(&chain).ok_or_else(|| {
                    ChainFault::in_record(seq, &chain, ChainFaultKind::UnknownChain)
                })?;
                if prev != known.base_hash || seq <= known.base_seq {
                    return Err(ChainFault::in_record(seq, &chain, ChainFaultKind::Gap));
                }
                self.count_chain(&prev);
            }
            (None, None) => self.count_chain(&prev),
        }
        let is_final = chain.is_none() && header.event.as_deref() == Some(RETIRED);
        for head in &header.heads {
            self.check_head(head)?;
            if is_final {
                self.retire(head)?;
            }
        }
        if let Some((name, end)) = self.segments.remove(&seq) {
            if name != super::chain::chain_text(&chain) || end != hash {
                return Err(ChainFault::in_record(seq, &chain, ChainFaultKind::Missing));
            }
            self.report.checkpoints += 1;
        }
        self.report.records += 1;
        self.last.insert(chain, (seq, hash));
        Ok(())
    }

    /// Counts a chain; it is partial if its first records are missing.
    fn count_chain(&mut self, prev: &Digest256) {
        self.report.chains += 1;
        self.report.partial += u64::from(*prev != Digest256::ZERO);
    }

    /// Checks a recorded head: it must be the last record of its chain so far, unless that record
    /// was rotated out, or the export starts after it. If the chain is unknown, a later record must
    /// state that the chain was retired.
    fn check_head(&mut self, head: &ChainHead) -> Result<(), ChainFault> {
        let chain = SandboxId::parse(&head.chain).ok();
        let missing = || {
            Err(ChainFault::in_record(
                head.seq,
                &chain,
                ChainFaultKind::Missing,
            ))
        };
        self.report.checkpoints += 1;
        if let Some(last) = self.last.get(&chain) {
            return match *last == (head.seq, head.hash) {
                true => Ok(()),
                false => missing(),
            };
        }
        let Some(ledger) = &self.ledger else {
            return Ok(());
        };
        match ledger.chains.get(&chain) {
            Some(known) if known.base_seq > head.seq => Ok(()),
            Some(known) if (known.base_seq, known.base_hash) == (head.seq, head.hash) => Ok(()),
            _ => {
                let stated = (head.seq, head.hash);
                let kept = self.unexplained.entry(chain).or_insert(stated);
                if kept.0 < head.seq {
                    *kept = stated;
                }
                Ok(())
            }
        }
    }

    /// Ends a retired chain at its final head. Later records with the same name belong to a new
    /// chain.
    fn retire(&mut self, head: &ChainHead) -> Result<(), ChainFault> {
        let chain = SandboxId::parse(&head.chain).ok();
        self.last.remove(&chain);
        match self.unexplained.remove(&chain) {
            Some(stated) if stated != (head.seq, head.hash) && stated.0 >= head.seq => Err(
                ChainFault::in_record(stated.0, &chain, ChainFaultKind::Missing),
            ),
            _ => Ok(()),
        }
    }

    /// The checks after every row has been read.
    fn check_end(&self) -> Result<(), ChainFault> {
        let Some(ledger) = &self.ledger else {
            return Ok(());
        };
        if let Some((name, (seq, _))) = self.unexplained.iter().min_by_key(|(_, (seq, _))| *seq) {
            return Err(ChainFault::in_record(*seq, name, ChainFaultKind::Missing));
        }
        let mut heads: Vec<_> = ledger.chains.iter().collect();
        heads.sort_by_key(|(_, chain)| chain.head_seq);
        for (name, chain) in heads {
            let base = (chain.base_seq, chain.base_hash);
            let reached = self.last.get(name).copied().unwrap_or(base);
            if reached != (chain.head_seq, chain.head_hash) {
                return Err(ChainFault::in_record(
                    chain.head_seq,
                    name,
                    ChainFaultKind::Missing,
                ));
            }
        }
        if let Some((seq, (name, _))) = self.segments.iter().min_by_key(|(seq, _)| **seq) {
            let chain = SandboxId::parse(name).ok();
            return Err(ChainFault::in_record(*seq, &chain, ChainFaultKind::Missing));
        }
        let accounted = self.report.records + ledger.absent;
        match ledger.last_seq.abs_diff(accounted) {
            0 => Ok(()),
            difference => Err(ChainFault::in_file(ChainFaultKind::Count(difference))),
        }
    }

    fn lacks_a_record(&self) -> bool {
        let kind = self.report.first_broken.as_ref().map(|b| &b.kind);
        matches!(
            kind,
            Some(ChainFaultKind::Gap | ChainFaultKind::Missing | ChainFaultKind::Count(_))
        )
    }

    /// Reports a record that is stored under another number than its own: this often explains why a
    /// record seems to be missing.
    fn find_moved(&mut self, conn: &Connection) -> Result<(), rusqlite::Error> {
        let mut rows = conn.prepare("SELECT seq, body, prev, hash FROM audit")?;
        let mut rows = rows.query([])?;
        while let Some(row) = rows.next()? {
            let row_seq = to_u64(row.get(0)?);
            if let Some((body, prev, hash)) = cells(row)?
                && Digest256::of_record(&prev, body) == hash
                && let Some(header) = RecordHeader::parse(body)
                && header.seq != row_seq
            {
                let moved =
                    ChainFault::in_record(header.seq, &header.sandbox, ChainFaultKind::Moved);
                self.report.first_broken = Some(moved);
                break;
            }
        }
        Ok(())
    }
}

type Cells<'a> = (&'a [u8], Digest256, Digest256);

/// Body, prev and hash, if the cells have the right types.
fn cells<'a>(row: &'a rusqlite::Row<'_>) -> Result<Option<Cells<'a>>, rusqlite::Error> {
    let (body, prev, hash) = (row.get_ref(1)?, row.get_ref(2)?, row.get_ref(3)?);
    Ok(match (body, prev, hash) {
        (ValueRef::Text(body), ValueRef::Blob(prev), ValueRef::Blob(hash)) => {
            Digest256::from_bytes(prev)
                .zip(Digest256::from_bytes(hash))
                .map(|(prev, hash)| (body, prev, hash))
        }
        _ => None,
    })
}
