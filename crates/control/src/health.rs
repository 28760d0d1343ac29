//! Health of the gate: one registry to which every part reports its state.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Collects the state that each part of the gate reports.
///
/// A part is listed once it has reported something: a part that does not run is not listed, so
/// that nothing is reported healthy without a check.
#[derive(Debug, Default)]
pub struct HealthRegistry {
    state: Mutex<HealthState>,
}

#[derive(Debug, Default)]
struct HealthState {
    checks: BTreeMap<String, Option<String>>,
    tasks: BTreeMap<String, TaskHealth>,
    listeners: BTreeMap<String, String>,
    notes: BTreeMap<String, String>,
    config: Option<PathBuf>,
}

impl HealthRegistry {
    /// Reports the outcome of a check; the error describes the failure.
    pub fn set_check(&self, name: &str, outcome: Result<(), String>) {
        self.state().checks.insert(name.to_owned(), outcome.err());
    }

    /// Removes a check that no longer applies.
    pub fn remove_check(&self, name: &str) {
        self.state().checks.remove(name);
    }

    /// Reports the state of a supervised task.
    pub fn set_task(&self, name: &str, state: TaskHealth) {
        self.state().tasks.insert(name.to_owned(), state);
    }

    /// Reports every bound address of a part (port 0 resolved); replaces earlier reports of the
    /// part. A part without addresses is not listed.
    pub fn set_listeners(&self, name: &str, addresses: impl IntoIterator<Item = impl Display>) {
        let mut addresses: Vec<String> = addresses
            .into_iter()
            .map(|address| address.to_string())
            .collect();
        addresses.sort_unstable();
        let listeners = &mut self.state().listeners;
        if addresses.is_empty() {
            listeners.remove(name);
        } else {
            listeners.insert(name.to_owned(), addresses.join(", "));
        }
    }

    /// Reports the configuration file in force.
    pub fn set_config(&self, file: Option<&Path>) {
        self.state().config = file.map(Path::to_owned);
    }

    /// Reports a note for the operator that is not a fault (such as `policies.fail_open`).
    /// `None` removes the note.
    pub fn set_note(&self, name: &str, note: Option<String>) {
        let mut state = self.state();
        match note {
            Some(note) => state.notes.insert(name.to_owned(), note),
            None => state.notes.remove(name),
        };
    }

    /// The report: everything reported so far, plus `new_results` of checks that ran just now.
    pub fn report(
        &self,
        new_results: impl IntoIterator<Item = (&'static str, Result<(), String>)>,
    ) -> HealthReport {
        let state = self.state();
        let mut outcomes = state.checks.clone();
        outcomes.extend(
            new_results
                .into_iter()
                .map(|(name, outcome)| (name.to_owned(), outcome.err())),
        );
        let is_healthy = outcomes.values().all(Option::is_none)
            && state
                .tasks
                .values()
                .all(|task| task.state != TaskState::Waiting);
        HealthReport {
            status: if is_healthy {
                HealthStatus::Healthy
            } else {
                HealthStatus::Degraded
            },
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            checks: outcomes
                .iter()
                .map(|(name, error)| (name.clone(), error.is_none()))
                .collect(),
            errors: outcomes
                .into_iter()
                .filter_map(|(name, e)| Some((name, e?)))
                .collect(),
            tasks: state.tasks.clone(),
            listeners: state.listeners.clone(),
            notes: state.notes.clone(),
            config: state.config.clone(),
        }
    }

    fn state(&self) -> MutexGuard<'_, HealthState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A health report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealthReport {
    /// Healthy when every check passes and no task waits for its restart.
    pub status: HealthStatus,
    /// The gate's version.
    pub version: String,
    /// The gate's process id.
    pub pid: u32,
    /// Each check and whether it passes.
    pub checks: BTreeMap<String, bool>,
    /// The error of each check that fails.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub errors: BTreeMap<String, String>,
    /// Every supervised task.
    #[serde(default)]
    pub tasks: BTreeMap<String, TaskHealth>,
    /// Every bound address, by part; the addresses of one part are separated by commas.
    #[serde(default)]
    pub listeners: BTreeMap<String, String>,
    /// Notes for the operator that are not faults.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
    /// The configuration file in force; none if all settings are defaults.
    #[serde(default)]
    pub config: Option<PathBuf>,
}

/// The overall status of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthStatus {
    /// Every check passes.
    Healthy,
    /// A check fails or a task waits; see `errors` and `tasks`.
    Degraded,
}

/// One supervised task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskHealth {
    /// The state of the task.
    pub state: TaskState,
    /// Number of restarts.
    pub restarts: u32,
    /// The error of the last run that ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// State of a supervised task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// The task runs.
    Running,
    /// The task failed and waits for its restart.
    Waiting,
    /// The task was stopped.
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_check_degrades_the_report_and_lists_its_error() {
        let health_registry = HealthRegistry::default();
        health_registry.set_check("config_current", Ok(()));
        assert_eq!(health_registry.report([]).status, HealthStatus::Healthy);

        let report =
            health_registry.report([("registry_accessible", Err("moved aside".to_owned()))]);
        assert_eq!(report.status, HealthStatus::Degraded);
        assert!(report.checks["config_current"]);
        assert!(!report.checks["registry_accessible"]);
        assert_eq!(report.errors["registry_accessible"], "moved aside");
        assert!(!report.errors.contains_key("config_current"));
    }

    #[test]
    fn removed_check_is_not_listed() {
        let health_registry = HealthRegistry::default();
        health_registry.set_check("git_mirrors", Err("there is no git".to_owned()));
        assert_eq!(health_registry.report([]).status, HealthStatus::Degraded);
        health_registry.remove_check("git_mirrors");
        let report = health_registry.report([]);
        assert_eq!(report.status, HealthStatus::Healthy);
        assert!(report.checks.is_empty() && report.errors.is_empty());
    }

    // Issue 14, numbers 1 and 10.
    #[test]
    fn listeners_list_exactly_the_bound_addresses() {
        let health_registry = HealthRegistry::default();
        health_registry.set_listeners("proxy", ["127.0.0.3:1", "127.0.0.2:1"]);
        health_registry.set_listeners("mcp", ["127.0.0.1:8090"]);
        let listeners = health_registry.report([]).listeners;
        assert_eq!(listeners["proxy"], "127.0.0.2:1, 127.0.0.3:1");
        assert_eq!(listeners["mcp"], "127.0.0.1:8090");
        health_registry.set_listeners("proxy", ["127.0.0.3:1"]);
        health_registry.set_listeners("mcp", [""; 0]);
        let listeners = health_registry.report([]).listeners;
        assert_eq!(listeners["proxy"], "127.0.0.3:1");
        assert!(!listeners.contains_key("mcp"));
    }

    #[test]
    fn waiting_task_degrades_until_it_runs_again() {
        let health_registry = HealthRegistry::default();
        let task = |state| TaskHealth {
            state,
            restarts: 1,
            last_error: None,
        };
        health_registry.set_task("reload", task(TaskState::Waiting));
        assert_eq!(health_registry.report([]).status, HealthStatus::Degraded);
        health_registry.set_task("reload", task(TaskState::Running));
        assert_eq!(health_registry.report([]).status, HealthStatus::Healthy);
    }

    #[test]
    fn note_is_reported_without_degrading() {
        let health_registry = HealthRegistry::default();
        health_registry.set_note("fail_open", Some("policies.fail_open is on".to_owned()));
        let report = health_registry.report([]);
        assert_eq!(report.status, HealthStatus::Healthy);
        assert_eq!(report.notes.len(), 1);
        health_registry.set_note("fail_open", None);
        assert!(health_registry.report([]).notes.is_empty());
    }
}
