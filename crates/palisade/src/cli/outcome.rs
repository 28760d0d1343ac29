//! The result of a run, as `run --json` prints it.

use std::collections::BTreeMap;

use anyhow::Result;
use control::client::ControlClient;
use policy::host::HostPattern;
use sandbox::git::host_repository::HostRepository;
use sandbox::worker::SnapshotReport;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::sandbox_lookup::SandboxInfo;
use crate::cli::summary::{count_lines, letter};
use crate::output;

/// The result of a run.
#[derive(Debug, Serialize)]
pub struct RunOutcome {
    pub id: String,
    pub name: String,
    pub branch_name: Option<String>,
    /// The sandbox's tier.
    pub tier: Option<String>,
    /// The sandbox's presets.
    pub presets: Vec<String>,
    /// Whether this run created the sandbox.
    pub created: bool,
    /// Whether the sandbox still exists.
    pub kept: bool,
    /// Exit code of the run: the command's, or 1 if that is 0 and another step failed; none if
    /// the command could not be run.
    pub exit_code: Option<u8>,
    /// Error of a step other than the command.
    pub error: Option<String>,
    /// Tip of the branch.
    pub tip: Option<String>,
    /// Number of commits that the operator's branch does not have.
    pub commits: usize,
    pub files: Vec<ChangedFile>,
    /// Number of added lines.
    pub added: usize,
    /// Number of removed lines.
    pub removed: usize,
    /// Paths that the snapshot skipped, and why.
    pub skipped: Value,
    #[serde(flatten)]
    pub connections: Connections,
}

/// Hosts of a run's connections, by result.
#[derive(Debug, Default, Serialize)]
pub struct Connections {
    /// Allowed and answered.
    pub reached: Vec<HostCount>,
    /// Refused by the gate.
    pub refused: Vec<HostCount>,
    /// Allowed, but the upstream failed.
    pub failed: Vec<HostCount>,
}

/// A changed file.
#[derive(Debug, Serialize)]
pub struct ChangedFile {
    pub kind: char,
    pub path: String,
}

/// A host and port, with the number of requests.
#[derive(Debug, Serialize)]
pub struct HostCount {
    pub host: String,
    pub port: Option<u64>,
    pub count: u64,
    /// The command that would allow a refused host, where one would.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow: Option<String>,
}

impl RunOutcome {
    /// The result of a run that has just started.
    pub fn new(sandbox: &SandboxInfo, created: bool) -> Self {
        Self {
            id: sandbox.id.to_string(),
            name: sandbox.name.to_string(),
            branch_name: sandbox.branch_name.clone(),
            tier: sandbox.tier.clone(),
            presets: sandbox.presets.clone(),
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

    /// Adds the changes on the branch and the connections in the audit log.
    pub async fn gather(
        &mut self,
        gate: &ControlClient,
        sandbox: &SandboxInfo,
        report: Option<&SnapshotReport>,
        since: jiff::Timestamp,
    ) -> Result<()> {
        if let Some(report) = report {
            self.skipped = json!(report.skipped);
        }
        if let (Some(repository), Some(_)) = (&sandbox.repository, report) {
            let repository = HostRepository::discover(repository)?;
            let changes = repository.diff(&sandbox.name, 0)?;
            self.commits = repository.log(&sandbox.name, usize::MAX)?.len();
            self.tip = Some(changes.tip.to_string());
            if self.commits > 0 {
                (self.added, self.removed) = count_lines(&changes);
                let files = changes.files.iter().map(|file| ChangedFile {
                    kind: letter(file.kind),
                    path: String::from_utf8_lossy(&file.path).into_owned(),
                });
                self.files = files.collect();
            }
        }
        self.connections = Connections::read(gate, sandbox, since).await?;
        Ok(())
    }
}

impl Connections {
    /// Reads the connections from the audit log: the newest thousand records of each verdict.
    pub async fn read(
        gate: &ControlClient,
        sandbox: &SandboxInfo,
        since: jiff::Timestamp,
    ) -> Result<Self> {
        let allowed = records(gate, sandbox, "allow", since).await?;
        let denied = records(gate, sandbox, "deny", since).await?;
        // An allowed request has a reason only if its upstream failed.
        let is_failed = |record: &&Value| record.get("reason").is_some_and(Value::is_string);
        let (failed, reached): (Vec<&Value>, Vec<&Value>) = allowed.iter().partition(is_failed);
        Ok(Self {
            reached: by_host(reached, sandbox),
            refused: by_host(&denied, sandbox),
            failed: by_host(failed, sandbox),
        })
    }
}

async fn records(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    verdict: &str,
    since: jiff::Timestamp,
) -> Result<Vec<Value>> {
    let query = format!(
        "/v1/audit?sandbox={}&verdict={verdict}&since={}&limit=1000&newest_first=true",
        sandbox.id,
        since.as_millisecond()
    );
    let answer = gate.get(&query).await?;
    let records = answer.get("records").and_then(Value::as_array);
    Ok(records.cloned().unwrap_or_default())
}

fn by_host<'a>(
    records: impl IntoIterator<Item = &'a Value>,
    sandbox: &SandboxInfo,
) -> Vec<HostCount> {
    let mut hosts: BTreeMap<(String, Option<u64>), (u64, bool)> = BTreeMap::new();
    for record in records {
        let number = |name: &str| record.get(name).and_then(Value::as_u64);
        if let Some(host) = record.get("host").and_then(Value::as_str) {
            let entry = hosts.entry((host.to_owned(), number("port"))).or_default();
            entry.0 += number("count").unwrap_or(1);
            entry.1 |= is_missing_rule(record);
        }
    }
    let reached = hosts.into_iter().map(|((host, port), (count, missing))| {
        let allow = missing
            .then(|| allow_command(&host, port, sandbox.name.as_str()))
            .flatten();
        HostCount {
            host,
            port,
            count,
            allow,
        }
    });
    reached.collect()
}

/// Whether a request was refused because no rule allows its host or port, or because a preset or
/// the tier allows other requests only. A deny rule needs another change.
fn is_missing_rule(record: &Value) -> bool {
    let text = |name: &str| record.get(name).and_then(Value::as_str).unwrap_or_default();
    let rule = text("rule");
    let of_preset = rule.starts_with("preset:") || rule.starts_with("tier:");
    match text("reason") {
        "host_denied" => rule == "allowlist",
        "ip_literal" | "port_denied" => true,
        "method_denied" | "path_denied" => of_preset,
        _ => false,
    }
}

/// The command that allows a host for one sandbox; none if the host is not one that rules can name.
fn allow_command(host: &str, port: Option<u64>, sandbox: &str) -> Option<String> {
    let parsed = HostPattern::parse(host).ok()?;
    let host = match port {
        None | Some(80 | 443) => parsed.to_string(),
        Some(port) if host.contains(':') => format!("[{parsed}]:{port}"),
        Some(port) => format!("{parsed}:{port}"),
    };
    let program = output::program_name();
    Some(format!("{program} allow {host} --for {sandbox}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_without_a_rule_have_a_command_that_allows_them() {
        for (reason, rule, expected) in [
            ("host_denied", "allowlist", true),
            // A deny rule, and the name above a wildcard.
            ("host_denied", "allowlist:a.example", false),
            ("ip_literal", "allowlist", true),
            ("port_denied", "allowlist:a.example", true),
            ("method_denied", "preset:npm", true),
            ("path_denied", "tier:balanced", true),
            ("path_denied", "allowlist:a.example", false),
            ("git_repo", "git.hosts", false),
        ] {
            let record = json!({"host": "a.example", "reason": reason, "rule": rule});
            assert_eq!(is_missing_rule(&record), expected, "{reason} {rule}");
        }
    }

    #[test]
    fn command_names_the_port_if_it_is_not_a_default_port() {
        for (host, port, expected) in [
            ("a.example", Some(443), "allow a.example --for fix"),
            ("a.example", None, "allow a.example --for fix"),
            ("a.example", Some(8443), "allow a.example:8443 --for fix"),
            (
                "2001:db8::1",
                Some(8443),
                "allow [2001:db8::1]:8443 --for fix",
            ),
        ] {
            let command = allow_command(host, port, "fix").unwrap();
            assert!(command.ends_with(expected), "{command}");
        }
        assert_eq!(allow_command("a b; rm -r x", None, "fix"), None);
    }
}
