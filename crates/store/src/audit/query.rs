//! Queries of the audit log.

use std::io::Write;

use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::VerdictKind;
use rusqlite::Connection;
use rusqlite::types::Value;

use super::chain::{Digest256, RecordHeader, write_line};
use super::ledger::{digest, invalid_cell, to_i64, to_u64};
use crate::error::StoreError;

/// Default limit of a query, and page size of an export.
const PAGE: usize = 1000;

/// Selects records. Every field that is set must match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    /// Records about this sandbox.
    pub sandbox: Option<SandboxId>,
    /// Records of this kind.
    pub kind: Option<Kind>,
    /// Records with this verdict.
    pub verdict: Option<VerdictKind>,
    /// Records of requests that were refused for this reason.
    pub reason: Option<Reason>,
    /// Records about this request.
    pub request_id: Option<RequestId>,
    /// Records about exactly this host.
    pub host: Option<String>,
    /// Records at or after this time.
    pub since: Option<UnixMillis>,
    /// Records before this time.
    pub until: Option<UnixMillis>,
    /// Records with a higher number.
    pub after_seq: Option<u64>,
    /// Records with a lower number.
    pub before_seq: Option<u64>,
    /// Maximum number of records. Without it a query returns 1 000 and an export everything.
    pub limit: Option<usize>,
    /// Whether the newest records come first.
    pub newest_first: bool,
}

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditRecord {
    /// The record's number. Numbers only grow, over all chains.
    pub seq: u64,
    /// When the event happened.
    pub ts: UnixMillis,
    /// The event.
    pub event: AuditEvent,
    /// The canonical JSON that was hashed.
    pub body: String,
    /// The hash of the previous record of the chain.
    pub prev: Digest256,
    /// The record's own hash.
    pub hash: Digest256,
}

impl AuditRecord {
    /// The record as one line of JSON, without a newline.
    pub fn line(&self) -> String {
        let mut line = Vec::new();
        write_line(&mut line, self.body.as_bytes(), &self.prev, &self.hash);
        String::from_utf8(line).unwrap_or_default()
    }
}

/// One record as a line with its newline, and its number.
pub(crate) struct Line {
    pub(crate) seq: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The records that match `filter`.
pub(crate) fn select(
    conn: &Connection,
    filter: &AuditFilter,
) -> Result<Vec<AuditRecord>, rusqlite::Error> {
    query_rows(conn, filter, |row| {
        let body: String = row.get(1)?;
        let header =
            RecordHeader::parse(body.as_bytes()).ok_or_else(|| invalid_cell(1, "not a record"))?;
        Ok(AuditRecord {
            seq: to_u64(row.get(0)?),
            ts: UnixMillis::new(header.ts),
            event: serde_json::from_str(&body).map_err(|e| invalid_cell(1, e))?,
            body,
            prev: digest(row, 2)?,
            hash: digest(row, 3)?,
        })
    })
}

/// The lines of the records that match `filter`.
pub(crate) fn select_lines(
    conn: &Connection,
    filter: &AuditFilter,
) -> Result<Vec<Line>, rusqlite::Error> {
    query_rows(conn, filter, |row| {
        let body = row.get_ref(1)?.as_bytes().map_err(|e| invalid_cell(1, e))?;
        let (prev, hash) = (digest(row, 2)?, digest(row, 3)?);
        let mut bytes = Vec::with_capacity(body.len() + 160);
        write_line(&mut bytes, body, &prev, &hash);
        bytes.push(b'\n');
        Ok(Line {
            seq: to_u64(row.get(0)?),
            bytes,
        })
    })
}

/// Writes the lines that match `filter`, a page at a time, and returns their number.
pub(crate) fn export(
    read: impl Fn(&AuditFilter) -> Result<Vec<Line>, StoreError>,
    filter: &AuditFilter,
    out: &mut impl Write,
) -> Result<u64, StoreError> {
    let failed = |e: std::io::Error| StoreError::Export {
        reason: e.to_string(),
    };
    let mut left = filter.limit.unwrap_or(usize::MAX);
    let mut page = filter.clone();
    let mut written = 0;
    while left > 0 {
        let size = left.min(PAGE);
        page.limit = Some(size);
        let lines = read(&page)?;
        for line in &lines {
            out.write_all(&line.bytes).map_err(failed)?;
            written += 1;
        }
        let Some(last) = lines.last() else { break };
        match filter.newest_first {
            true => page.before_seq = Some(last.seq),
            false => page.after_seq = Some(last.seq),
        }
        if lines.len() < size {
            break;
        }
        left -= lines.len();
    }
    out.flush().map_err(failed)?;
    Ok(written)
}

fn query_rows<T>(
    conn: &Connection,
    filter: &AuditFilter,
    read: impl Fn(&rusqlite::Row<'_>) -> Result<T, rusqlite::Error>,
) -> Result<Vec<T>, rusqlite::Error> {
    let (sql, values) = build_statement(filter);
    let mut statement = conn.prepare(&sql)?;
    let rows = statement.query_map(rusqlite::params_from_iter(values), read)?;
    rows.collect()
}

/// The query in SQL. Every value is bound; the text consists of constants only.
fn build_statement(filter: &AuditFilter) -> (String, Vec<Value>) {
    // Destructured by name, so that a new field cannot be forgotten here.
    let AuditFilter {
        sandbox,
        kind,
        verdict,
        reason,
        request_id,
        host,
        since,
        until,
        after_seq,
        before_seq,
        limit,
        newest_first,
    } = filter;
    let text = |text: &str| Value::Text(text.to_owned());
    let conditions = [
        ("chain = ?", sandbox.as_ref().map(|s| text(s.as_str()))),
        ("kind = ?", kind.map(|k| text(k.as_str()))),
        ("verdict = ?", verdict.map(|v| text(v.as_str()))),
        ("reason = ?", reason.map(|r| text(r.code()))),
        ("request_id = ?", request_id.map(|r| text(&r.to_string()))),
        ("host = ?", host.as_deref().map(text)),
        ("ts >= ?", since.map(|t| Value::Integer(t.get()))),
        ("ts < ?", until.map(|t| Value::Integer(t.get()))),
        ("seq > ?", after_seq.map(|s| Value::Integer(to_i64(s)))),
        ("seq < ?", before_seq.map(|s| Value::Integer(to_i64(s)))),
    ];
    let mut sql = String::from("SELECT seq, body, prev, hash FROM audit WHERE true");
    let mut values = Vec::new();
    for (condition, value) in conditions {
        if let Some(value) = value {
            sql.push_str(" AND ");
            sql.push_str(condition);
            values.push(value);
        }
    }
    sql.push_str(if *newest_first {
        " ORDER BY seq DESC LIMIT ?"
    } else {
        " ORDER BY seq LIMIT ?"
    });
    let limit = i64::try_from(limit.unwrap_or(PAGE)).unwrap_or(i64::MAX);
    values.push(Value::Integer(limit));
    (sql, values)
}
