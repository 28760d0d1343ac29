//! `palisade audit …`.

use std::io::{BufReader, Read, Seek, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use http::Method;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use store::audit::verify::{VerifyReport, verify_blocking, verify_jsonl};

use crate::cli::{Global, block_on};
use crate::exit::{CliError, CliExit};
use crate::gate::background;
use crate::output;

#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Show records, newest first
    List {
        #[command(flatten)]
        filter: RecordFilter,
        /// Maximum number of records
        #[arg(long, short = 'n', default_value_t = 50)]
        limit: u32,
    },
    /// Show records as they are written
    Tail {
        #[command(flatten)]
        filter: RecordFilter,
    },
    /// Verify that no record was changed, removed or inserted
    ///
    /// Works on the running gate's database, on a database file, and on exported lines.
    /// Reports the first record that fails.
    Verify {
        /// A database or an export (*.jsonl) instead of the running gate's database
        file: Option<PathBuf>,
    },
    /// Write records as JSON lines
    Export {
        #[command(flatten)]
        filter: RecordFilter,
        /// Output file; must not exist [default: stdout]
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
}

/// A filter for records.
#[derive(Debug, Args)]
pub struct RecordFilter {
    /// Only records of this sandbox or container
    #[arg(long, value_name = "ID")]
    sandbox: Option<String>,
    /// Only records of this kind: http, dns, git, mcp, approval, lifecycle, config
    #[arg(long)]
    kind: Option<String>,
    /// Only records with this verdict: allow, deny, modify, ask
    #[arg(long)]
    verdict: Option<String>,
    /// Only records with this reason code, such as host_denied
    #[arg(long)]
    reason: Option<String>,
    /// Only records of this request
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    /// Only records since a time like 2026-12-31T00:00:00Z, or an age like 15m, 2h, 3d
    #[arg(long, value_name = "WHEN")]
    since: Option<String>,
    /// Only records before that time or age
    #[arg(long, value_name = "WHEN")]
    until: Option<String>,
}

impl RecordFilter {
    /// The query string of the filter.
    fn query(&self, more: &[(&str, String)]) -> Result<String> {
        let now = Timestamp::now();
        let moment = |text: &Option<String>| {
            text.as_deref()
                .map(|text| parse_time(text, now))
                .transpose()
        };
        let mut pairs: Vec<(&str, String)> = Vec::new();
        for (name, value) in [
            ("sandbox", &self.sandbox),
            ("kind", &self.kind),
            ("verdict", &self.verdict),
            ("reason", &self.reason),
            ("request_id", &self.request),
        ] {
            pairs.extend(value.clone().map(|value| (name, value)));
        }
        pairs.extend(moment(&self.since)?.map(|at| ("since", at.to_string())));
        pairs.extend(moment(&self.until)?.map(|at| ("until", at.to_string())));
        pairs.extend(more.iter().cloned());
        let encoded: Vec<String> = pairs
            .iter()
            .map(|(name, value)| format!("{name}={}", encode(value)))
            .collect();
        Ok(encoded.join("&"))
    }
}

/// Milliseconds since 1970 for a time or an age.
fn parse_time(text: &str, now: Timestamp) -> Result<i64> {
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(at.as_millisecond());
    }
    let bad = || {
        CliError::new(
            CliExit::Usage,
            format!(
                "'{}' is neither a time like 2026-12-31T00:00:00Z nor an age like 15m, 2h, 3d",
                output::safe(text)
            ),
        )
    };
    let unit = text.chars().last().ok_or_else(bad)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 60 * 60,
        'd' => 24 * 60 * 60,
        _ => return Err(bad().into()),
    };
    let count: i64 = text
        .strip_suffix(unit)
        .and_then(|n| n.parse().ok())
        .ok_or_else(bad)?;
    let age = SignedDuration::from_secs(count.checked_mul(seconds).ok_or_else(bad)?);
    Ok(now.checked_sub(age).map_err(|_| bad())?.as_millisecond())
}

/// Percent-encodes a value for a query string.
fn encode(text: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    text.bytes()
        .map(|b| {
            if keep(b) {
                char::from(b).to_string()
            } else {
                format!("%{b:02X}")
            }
        })
        .collect()
}

pub fn run(command: AuditCommand, global: &Global) -> Result<CliExit> {
    match command {
        AuditCommand::List { filter, limit } => list(&filter, limit, global),
        AuditCommand::Tail { filter } => tail(&filter, global),
        AuditCommand::Verify { file } => verify(file, global),
        AuditCommand::Export { filter, output } => export(&filter, output, global),
    }
}

fn list(filter: &RecordFilter, limit: u32, global: &Global) -> Result<CliExit> {
    let query = filter.query(&[
        ("limit", limit.to_string()),
        ("newest_first", "true".into()),
    ])?;
    let paths = global.paths()?;
    let answer = block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        Ok(gate.get(&format!("/v1/audit?{query}")).await?)
    })?;
    let records = answer
        .get("records")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    if global.json {
        output::print_json(&records)?;
    } else if records.is_empty() {
        output::print_line("no records")?;
    } else {
        let rows: Vec<Vec<String>> = records.iter().map(cells).collect();
        output::print_line(&output::table(&HEADING, &rows))?;
    }
    Ok(CliExit::Ok)
}

const HEADING: [&str; 7] = [
    "TIME", "SANDBOX", "VERDICT", "TARGET", "REQUEST", "RULE", "ID",
];

/// A record as a row: when, which sandbox, the verdict, the host or tool, the method and path
/// or the event, the rule with the reason code, and the id for `palisade why`.
fn cells(record: &Value) -> Vec<String> {
    let text = |name: &str| match record.get(name) {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    };
    let time = record
        .get("ts")
        .and_then(Value::as_i64)
        .and_then(|ms| Timestamp::from_second(ms.div_euclid(1000)).ok())
        .map_or_else(String::new, |at| at.to_string());
    let count = record
        .get("count")
        .and_then(Value::as_u64)
        .map_or_else(String::new, |n| format!(" (×{n})"));
    let kind = text("kind");
    let target = match (text("host"), record.get("port").and_then(Value::as_u64)) {
        (host, _) if host.is_empty() => kind.clone(),
        (host, Some(port)) if kind == "http" && !matches!(port, 80 | 443) => {
            format!("{host}:{port}")
        }
        (host, _) => host,
    };
    // In the record of a tool call, `host` is the server and `operation` the tool.
    let called = match kind.as_str() {
        "mcp" => text("operation"),
        _ => String::new(),
    };
    let request: Vec<String> = [text("event"), text("method"), text("path"), called]
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect();
    let rule = match (text("rule"), text("reason")) {
        (rule, reason) if reason.is_empty() => rule,
        (rule, reason) if rule.is_empty() => reason,
        (rule, reason) => format!("{rule} ({reason})"),
    };
    vec![
        time,
        text("sandbox"),
        text("verdict"),
        target,
        format!("{}{count}", request.join(" ")),
        rule,
        text("request_id"),
    ]
}

fn tail(filter: &RecordFilter, global: &Global) -> Result<CliExit> {
    let query = filter.query(&[])?;
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let answer = gate
            .send(Method::GET, &format!("/v1/audit/tail?{query}"), None)
            .await?;
        let mut pending = Vec::new();
        let mut problem = None;
        let shown = answer.stream(|piece| {
            pending.extend_from_slice(piece);
            while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                if let Err(error) = show_line(&line, global.json) {
                    problem = Some(error);
                    return false;
                }
            }
            true
        });
        // Ctrl-C is the usual end and not a failure.
        tokio::select! {
            ended = shown => ended?,
            stopped = tokio::signal::ctrl_c() => stopped?,
        }
        match problem {
            Some(error) => Err(error),
            None => Ok(CliExit::Ok),
        }
    })
}

fn show_line(line: &[u8], as_json: bool) -> Result<()> {
    if as_json {
        return output::print_hashed(line);
    }
    let record: Value = serde_json::from_slice(line)?;
    let shown: Vec<String> = cells(&record)
        .iter()
        .filter(|c| !c.is_empty())
        .map(|c| output::safe(c))
        .collect();
    output::print_line(&shown.join("  "))
}

fn verify(file: Option<PathBuf>, global: &Global) -> Result<CliExit> {
    let report = match file {
        Some(file) => verify_file(&file)?,
        None => {
            let paths = global.paths()?;
            let answer = block_on(async {
                let gate = background::client(&paths, global.verbose).await?;
                Ok(gate.post("/v1/audit/verify", &json!({})).await?)
            })?;
            return print_report(&answer, global);
        }
    };
    let answer = json!({
        "intact": report.is_intact(),
        "records": report.records,
        "chains": report.chains,
        "checkpoints": report.checkpoints,
        "broken": report.first_broken.map(|broken| json!({
            "seq": broken.seq, "sandbox": broken.chain, "what": broken.to_string(),
        })),
    });
    print_report(&answer, global)
}

/// The first bytes of every SQLite file.
const SQLITE_HEADER: &[u8; 16] = b"SQLite format 3\0";

fn verify_file(file: &Path) -> Result<VerifyReport> {
    if !file.exists() {
        let message = format!("{} does not exist", file.display());
        return Err(CliError::new(CliExit::NotFound, message).into());
    }
    let mut opened =
        std::fs::File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut start = [0; SQLITE_HEADER.len()];
    let is_database = opened.read_exact(&mut start).is_ok() && &start == SQLITE_HEADER;
    if !is_database {
        opened.rewind()?;
        return Ok(verify_jsonl(BufReader::new(opened))?);
    }
    Ok(verify_blocking(file)?)
}

fn print_report(answer: &Value, global: &Global) -> Result<CliExit> {
    let intact = answer
        .get("intact")
        .and_then(Value::as_bool)
        .unwrap_or(false);
    let number = |name: &str| answer.get(name).and_then(Value::as_u64).unwrap_or_default();
    if global.json {
        output::print_json(answer)?;
    } else if intact {
        output::print_line(&format!(
            "intact: {} records in {} chains, {} checkpoints",
            number("records"),
            number("chains"),
            number("checkpoints")
        ))?;
    } else {
        let what = answer
            .pointer("/broken/what")
            .and_then(Value::as_str)
            .unwrap_or("unknown");
        output::print_line(&format!("BROKEN: {}", output::safe(what)))?;
    }
    Ok(if intact { CliExit::Ok } else { CliExit::Failed })
}

fn export(filter: &RecordFilter, to: Option<PathBuf>, global: &Global) -> Result<CliExit> {
    let query = filter.query(&[])?;
    let paths = global.paths()?;
    block_on(async {
        let gate = background::client(&paths, global.verbose).await?;
        let answer = gate
            .send(Method::GET, &format!("/v1/audit/export?{query}"), None)
            .await?;
        let mut out = Destination::open(to)?;
        let mut written = Ok(());
        let mut pending = Vec::new();
        let lines = answer.stream(|piece| {
            pending.extend_from_slice(piece);
            let whole = pending.iter().rposition(|byte| *byte == b'\n');
            let lines: Vec<u8> = pending.drain(..whole.map_or(0, |end| end + 1)).collect();
            written = out.write(&lines);
            written.is_ok()
        });
        tokio::select! {
            ended = lines => ended?,
            stopped = tokio::signal::ctrl_c() => {
                stopped?;
                bail!("interrupted; nothing was written");
            }
        }
        written?;
        out.write(&pending)?;
        out.finish()
    })
}

/// Where an export goes. A file gets its name when it is complete, so that an interrupted
/// export leaves no file.
enum Destination {
    Stdout,
    File {
        part: tempfile::NamedTempFile,
        path: PathBuf,
    },
}

impl Destination {
    fn open(to: Option<PathBuf>) -> Result<Self> {
        let Some(path) = to else {
            return Ok(Self::Stdout);
        };
        if path.symlink_metadata().is_ok() {
            return Err(already_exists(&path));
        }
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let part = tempfile::Builder::new()
            .prefix(".palisade-export-")
            .tempfile_in(parent.unwrap_or(Path::new(".")))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self::File { part, path })
    }

    fn write(&mut self, piece: &[u8]) -> Result<()> {
        match self {
            Self::Stdout => output::print_hashed(piece),
            Self::File { part, path } => part
                .write_all(piece)
                .with_context(|| format!("cannot write {}", path.display())),
        }
    }

    fn finish(self) -> Result<CliExit> {
        if let Self::File { part, path } = self {
            part.as_file().sync_all()?;
            part.persist_noclobber(&path)
                .map_err(|error| match error.error.kind() {
                    std::io::ErrorKind::AlreadyExists => already_exists(&path),
                    _ => anyhow::Error::from(error.error)
                        .context(format!("cannot write {}", path.display())),
                })?;
        }
        Ok(CliExit::Ok)
    }
}

fn already_exists(path: &Path) -> anyhow::Error {
    let message = format!("{} already exists; name another file", path.display());
    CliError::new(CliExit::Exists, message).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_absolute_or_an_age() {
        let now: Timestamp = "2026-11-15T12:00:00Z".parse().unwrap();
        let at = |text: &str| parse_time(text, now).ok();
        assert_eq!(at("2026-11-15T12:00:00Z"), Some(now.as_millisecond()));
        assert_eq!(at("15m"), Some(now.as_millisecond() - 15 * 60 * 1000));
        assert_eq!(at("2d"), Some(now.as_millisecond() - 2 * 86_400_000));
        for bad in [
            "",
            "m",
            "15",
            "15w",
            "yesterday",
            "9999999999999999999d",
            "-",
        ] {
            assert_eq!(at(bad), None, "{bad}");
        }
    }

    #[test]
    fn query_values_are_percent_encoded() {
        assert_eq!(encode("a&limit=9 \n%"), "a%26limit%3D9%20%0A%25");
    }
}
