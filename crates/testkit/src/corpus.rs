//! Recorded decisions: a table of requests, each with the client's result and its audit
//! records, compared with a file in `tests/corpus/`.
//!
//! After a refactoring of the decision core, the comparison shows which decisions it changed.
//! `UPDATE_CORPUS=1` writes the files from the current binary.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a test without its corpus cannot continue"
)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{http, wait};

/// The kinds of records that are compared. Lifecycle and configuration records belong to the
/// fixture.
const KINDS: [&str; 4] = ["http", "dns", "git", "mcp"];

/// The fields of a record that a decision determines. Ids, times and byte counts are left out.
const FIELDS: [&str; 17] = [
    "event",
    "verdict",
    "reason",
    "rule",
    "bundle",
    "stage",
    "status",
    "method",
    "host",
    "port",
    "path",
    "repo",
    "operation",
    "agent",
    "unread",
    "credential",
    "count",
];

/// How long to wait for records that the recorded file has and the log lacks.
const RECORD_TIMEOUT: Duration = Duration::from_secs(20);

/// How long the log must stay unchanged while a file is written.
const SETTLE_TIME: Duration = Duration::from_millis(300);

/// One table of requests, replayed against one gate.
#[derive(Debug)]
pub struct Corpus {
    control: PathBuf,
    file: PathBuf,
    /// The recorded cases; none while the file is being written.
    recorded: Option<BTreeMap<String, Vec<String>>>,
    /// The sequence number of the last record that belongs to a case.
    last: u64,
    seen: Vec<(String, Vec<String>)>,
}

impl Corpus {
    /// The table of that name, for the gate behind `control`.
    pub fn open(name: &str, control: &Path) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus");
        let file = root.join(format!("{name}.txt"));
        let recorded = std::env::var_os("UPDATE_CORPUS").is_none().then(|| {
            let text = std::fs::read_to_string(&file);
            parse(&text.unwrap_or_else(|error| panic!("{}: {error}", file.display())))
        });
        let mut corpus = Self {
            control: control.to_owned(),
            file,
            recorded,
            last: 0,
            seen: Vec::new(),
        };
        corpus.last = corpus
            .wait_until_settled()
            .last()
            .map_or(0, |(number, _)| *number);
        corpus
    }

    /// Sends one request: `client` returns a short description of the client's result.
    pub fn case(&mut self, name: &str, client: impl FnOnce() -> String) {
        assert!(
            self.seen.iter().all(|(known, _)| known != name),
            "two cases are named '{name}'"
        );
        let mut lines: Vec<String> = client()
            .lines()
            .map(|line| format!("client {line}"))
            .collect();
        let expected = self.recorded.as_ref().map(|recorded| {
            let lines = recorded.get(name).into_iter().flatten();
            lines.filter(|line| !line.starts_with("client ")).count()
        });
        let records = match expected {
            Some(count) => self.wait_for_records(count),
            None => self.wait_until_settled(),
        };
        if let Some((number, _)) = records.last() {
            self.last = *number;
        }
        lines.extend(records.into_iter().map(|(_, line)| line));
        self.seen.push((name.to_owned(), lines));
    }

    /// Compares all cases with the recorded file, or writes it.
    pub fn finish(self) {
        let Some(recorded) = &self.recorded else {
            let directory = self.file.parent().expect("a directory");
            std::fs::create_dir_all(directory).expect("a directory");
            std::fs::write(&self.file, render(&self.seen)).expect("a file");
            return;
        };
        let mut difference = String::new();
        for (name, lines) in &self.seen {
            let before = recorded.get(name).map(Vec::as_slice).unwrap_or_default();
            if before != lines.as_slice() {
                writeln!(difference, "{name}").expect("memory");
                for line in before {
                    writeln!(difference, "  - {line}").expect("memory");
                }
                for line in lines {
                    writeln!(difference, "  + {line}").expect("memory");
                }
            }
        }
        let known = |name: &&String| self.seen.iter().all(|(seen, _)| seen != *name);
        for name in recorded.keys().filter(known) {
            writeln!(difference, "{name}\n  - (not replayed)").expect("memory");
        }
        assert!(
            difference.is_empty(),
            "decisions differ from {}; UPDATE_CORPUS=1 records the new ones:\n{difference}",
            self.file.display()
        );
    }

    /// The records after the last case, once there are `count` of them.
    fn wait_for_records(&self, count: usize) -> Vec<(u64, String)> {
        let begun = Instant::now();
        wait::until("records of a case", || {
            let records = self.records();
            let enough = records.len() >= count || begun.elapsed() > RECORD_TIMEOUT;
            enough.then_some(records)
        })
    }

    /// The records after the last case, once the log has stayed unchanged for a while.
    fn wait_until_settled(&self) -> Vec<(u64, String)> {
        let mut records = self.records();
        let mut since = Instant::now();
        wait::until("the log to stay unchanged", || {
            let now = self.records();
            if now.len() != records.len() {
                records = now;
                since = Instant::now();
            }
            (since.elapsed() > SETTLE_TIME).then(|| std::mem::take(&mut records))
        })
    }

    fn records(&self) -> Vec<(u64, String)> {
        let path = format!("/v1/audit?after={}&limit=1000", self.last);
        let answer = http::send(&self.control, "GET", &path, b"").expect("the gate answers");
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        let records = answer["records"].as_array().expect("records");
        let is_compared = |record: &&Value| KINDS.iter().any(|kind| record["kind"] == *kind);
        records
            .iter()
            .filter(is_compared)
            .map(|record| (record["seq"].as_u64().expect("a number"), line(record)))
            .collect()
    }
}

/// One record as a line: its kind, then the fields it has.
fn line(record: &Value) -> String {
    let mut line = record["kind"].as_str().unwrap_or_default().to_owned();
    for field in FIELDS {
        match &record[field] {
            Value::Null => {}
            Value::String(text) => write!(line, " {field}={text}").expect("memory"),
            other => write!(line, " {field}={other}").expect("memory"),
        }
    }
    line
}

fn render(cases: &[(String, Vec<String>)]) -> String {
    let mut text = String::new();
    for (name, lines) in cases {
        text.push_str(name);
        text.push('\n');
        for line in lines {
            writeln!(text, "  {line}").expect("memory");
        }
    }
    text
}

fn parse(text: &str) -> BTreeMap<String, Vec<String>> {
    let mut cases = BTreeMap::new();
    let mut name = String::new();
    for line in text.lines() {
        match line.strip_prefix("  ") {
            Some(line) => {
                let lines: &mut Vec<String> = cases.entry(name.clone()).or_default();
                lines.push(line.to_owned());
            }
            None => name = line.to_owned(),
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rendered_cases_parse_to_the_same_cases() {
        let cases = vec![
            (
                "GET /one".to_owned(),
                vec!["client 200".to_owned(), "http verdict=allow".to_owned()],
            ),
            ("GET /two".to_owned(), vec!["client 403".to_owned()]),
        ];
        let parsed = parse(&render(&cases));
        assert_eq!(parsed.into_iter().collect::<Vec<_>>(), cases);
    }
}
