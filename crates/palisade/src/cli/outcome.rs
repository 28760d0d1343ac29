//! The result of a run, as `run --json` prints it.

use std::collections::BTreeMap;

use anyhow::Result;
use control::client::Client;
use sandbox::git::host_repository::HostRepository;
use sandbox::worker::SnapshotReport;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup::Place;
use crate::cli::summary::{letter, lines_of};

/// What came of a run.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub id: String,
    pub name: String,
    pub branch_name: Option<String>,
    /// Whether this run made the sandbox.
    pub created: bool,
    /// Whether it is still there.
    pub kept: bool,
    /// What the run exits with: the command's own code, or 1 where that is 0 and something
    /// else failed; none where the command could not be run.
    pub exit_code: Option<u8>,
    /// What went wrong beside the command.
    pub error: Option<String>,
    /// Where the branch is.
    pub tip: Option<String>,
    /// Commits that the operator's branch does not have.
    pub commits: usize,
    pub files: Vec<File>,
    /// Lines that came.
    pub added: usize,
    /// Lines that went.
    pub removed: usize,
    /// What the snapshot could not take along, and why.
    pub skipped: Value,
    #[serde(flatten)]
    pub connections: Connections,
}

/// Where connections of a run went, or were to go.
#[derive(Debug, Default, Serialize)]
pub struct Connections {
    /// Allowed by the rules, and answered.
    pub reached: Vec<Reached>,
    /// Refused by the gate.
    pub refused: Vec<Reached>,
    /// Allowed by the rules, and then the upstream failed.
    pub failed: Vec<Reached>,
}

/// A file that differs.
#[derive(Debug, Serialize)]
pub struct File {
    pub kind: char,
    pub path: String,
}

/// Where a connection went, or was to go.
#[derive(Debug, Serialize)]
pub struct Reached {
    pub host: String,
    pub port: Option<u64>,
    pub count: u64,
}

impl Outcome {
    /// Of a sandbox of which nothing else is known yet.
    pub fn new(place: &Place, created: bool) -> Self {
        Self {
            id: place.id.to_string(),
            name: place.name.to_string(),
            branch_name: place.branch_name.clone(),
            created,
            kept: true,
            exit_code: None,
            error: None,
            tip: None,
            commits: 0,
            files: Vec::new(),
            added: 0,
            removed: 0,
            skipped: Value::Array(Vec::new()),
            connections: Connections::default(),
        }
    }

    /// Looks at the branch and at the audit log.
    pub async fn gather(
        &mut self,
        gate: &Client,
        place: &Place,
        report: Option<&SnapshotReport>,
        since: jiff::Timestamp,
    ) -> Result<()> {
        if let Some(report) = report {
            self.skipped = json!(report.skipped);
        }
        if let (Some(repository), Some(_)) = (&place.repository, report) {
            let home = HostRepository::discover(repository)?;
            let changes = home.diff(&place.name, 0)?;
            self.commits = home.log(&place.name, usize::MAX)?.len();
            self.tip = Some(changes.tip.to_string());
            if self.commits > 0 {
                (self.added, self.removed) = lines_of(&changes);
                let files = changes.files.iter().map(|file| File {
                    kind: letter(file.kind),
                    path: String::from_utf8_lossy(&file.path).into_owned(),
                });
                self.files = files.collect();
            }
        }
        self.connections = Connections::read(gate, place, since).await?;
        Ok(())
    }
}

impl Connections {
    /// Reads them from the audit log: the newest thousand records of each verdict.
    pub async fn read(gate: &Client, place: &Place, since: jiff::Timestamp) -> Result<Self> {
        let allowed = records(gate, place, "allow", since).await?;
        let denied = records(gate, place, "deny", since).await?;
        // What was allowed has a reason only where the upstream failed.
        let is_failed = |record: &&Value| record.get("reason").is_some_and(Value::is_string);
        let (failed, reached): (Vec<&Value>, Vec<&Value>) = allowed.iter().partition(is_failed);
        Ok(Self {
            reached: by_host(reached),
            refused: by_host(&denied),
            failed: by_host(failed),
        })
    }
}

async fn records(
    gate: &Client,
    place: &Place,
    verdict: &str,
    since: jiff::Timestamp,
) -> Result<Vec<Value>> {
    let query = format!(
        "/v1/audit?sandbox={}&verdict={verdict}&since={}&limit=1000&newest_first=true",
        place.id,
        since.as_millisecond()
    );
    let answer = gate.get(&query).await?;
    let records = answer.get("records").and_then(Value::as_array);
    Ok(records.cloned().unwrap_or_default())
}

fn by_host<'a>(records: impl IntoIterator<Item = &'a Value>) -> Vec<Reached> {
    let mut hosts: BTreeMap<(String, Option<u64>), u64> = BTreeMap::new();
    for record in records {
        let number = |name: &str| record.get(name).and_then(Value::as_u64);
        if let Some(host) = record.get("host").and_then(Value::as_str) {
            let times = hosts.entry((host.to_owned(), number("port"))).or_default();
            *times += number("count").unwrap_or(1);
        }
    }
    let reached = hosts
        .into_iter()
        .map(|((host, port), count)| Reached { host, port, count });
    reached.collect()
}
