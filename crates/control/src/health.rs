//! Health of the gate: one registry to which every part reports.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where parts post their state and health reads it.
///
/// A part appears once it has posted something: what does not run is not listed, so
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
    /// Posts the outcome of a check: fine, or what is wrong.
    pub fn check(&self, name: &str, outcome: Result<(), String>) {
        self.state().checks.insert(name.to_owned(), outcome.err());
    }

    /// Removes a check that is not made any more.
    pub fn retract(&self, name: &str) {
        self.state().checks.remove(name);
    }

    /// Posts the state of a supervised task.
    pub fn task(&self, name: &str, state: TaskHealth) {
        self.state().tasks.insert(name.to_owned(), state);
    }

    /// Posts every address a part listens on, as it really is (port 0 resolved), instead of
    /// those it posted before. A part without any is not listed.
    pub fn listening(&self, name: &str, addresses: impl IntoIterator<Item = impl Display>) {
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

    /// Posts which configuration file is in force.
    pub fn config(&self, file: Option<&Path>) {
        self.state().config = file.map(Path::to_owned);
    }

    /// Posts something the operator should know that is no fault (`policies.fail_open`).
    /// `None` takes it back.
    pub fn note(&self, name: &str, note: Option<String>) {
        let mut state = self.state();
        match note {
            Some(note) => state.notes.insert(name.to_owned(), note),
            None => state.notes.remove(name),
        };
    }

    /// Everything posted, plus `fresh` checks that are made at the moment of asking.
    pub fn report(
        &self,
        fresh: impl IntoIterator<Item = (&'static str, Result<(), String>)>,
    ) -> HealthReport {
        let state = self.state();
        let mut outcomes = state.checks.clone();
        outcomes.extend(
            fresh
                .into_iter()
                .map(|(name, outcome)| (name.to_owned(), outcome.err())),
        );
        let well = outcomes.values().all(Option::is_none)
            && state
                .tasks
                .values()
                .all(|task| task.state != TaskState::Waiting);
        HealthReport {
            status: if well {
                Status::Healthy
            } else {
                Status::Degraded
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

/// The answer to 'how are you'.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HealthReport {
    /// Healthy when every check holds and no task waits for its restart.
    pub status: Status,
    /// The gate's version.
    pub version: String,
    /// The gate's process id.
    pub pid: u32,
    /// Each check and whether it holds.
    pub checks: BTreeMap<String, bool>,
    /// What is wrong, for each check that does not hold.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub errors: BTreeMap<String, String>,
    /// Every supervised task.
    #[serde(default)]
    pub tasks: BTreeMap<String, TaskHealth>,
    /// Every address that is listened on, by part; several of one part are separated by
    /// commas.
    #[serde(default)]
    pub listeners: BTreeMap<String, String>,
    /// What the operator should know that is no fault.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
    /// The configuration file in force; none when everything has its default.
    #[serde(default)]
    pub config: Option<PathBuf>,
}

/// Whether all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Everything that was checked holds.
    Healthy,
    /// Something does not; `errors` and `tasks` say what.
    Degraded,
}

/// One supervised task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskHealth {
    /// What it is doing.
    pub state: TaskState,
    /// How often it was started again.
    pub restarts: u32,
    /// Why it ended last time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
}

/// What a supervised task is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TaskState {
    /// It runs.
    Running,
    /// It died and waits to be started again.
    Waiting,
    /// It was told to stop and did.
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failing_check_degrades_the_whole_and_says_why() {
        let health_registry = HealthRegistry::default();
        health_registry.check("config_current", Ok(()));
        assert_eq!(health_registry.report([]).status, Status::Healthy);

        let report =
            health_registry.report([("registry_accessible", Err("moved aside".to_owned()))]);
        assert_eq!(report.status, Status::Degraded);
        assert!(report.checks["config_current"]);
        assert!(!report.checks["registry_accessible"]);
        assert_eq!(report.errors["registry_accessible"], "moved aside");
        assert!(!report.errors.contains_key("config_current"));
    }

    #[test]
    fn a_check_that_is_taken_back_is_not_listed() {
        let health_registry = HealthRegistry::default();
        health_registry.check("git_mirrors", Err("there is no git".to_owned()));
        assert_eq!(health_registry.report([]).status, Status::Degraded);
        health_registry.retract("git_mirrors");
        let report = health_registry.report([]);
        assert_eq!(report.status, Status::Healthy);
        assert!(report.checks.is_empty() && report.errors.is_empty());
    }

    // Issue 14, numbers 1 and 10.
    #[test]
    fn a_part_lists_every_address_it_listens_on_and_no_other() {
        let health_registry = HealthRegistry::default();
        health_registry.listening("proxy", ["127.0.0.3:1", "127.0.0.2:1"]);
        health_registry.listening("mcp", ["127.0.0.1:8090"]);
        let listeners = health_registry.report([]).listeners;
        assert_eq!(listeners["proxy"], "127.0.0.2:1, 127.0.0.3:1");
        assert_eq!(listeners["mcp"], "127.0.0.1:8090");
        health_registry.listening("proxy", ["127.0.0.3:1"]);
        health_registry.listening("mcp", [""; 0]);
        let listeners = health_registry.report([]).listeners;
        assert_eq!(listeners["proxy"], "127.0.0.3:1");
        assert!(!listeners.contains_key("mcp"));
    }

    #[test]
    fn a_task_that_waits_for_its_restart_degrades_and_recovers() {
        let health_registry = HealthRegistry::default();
        let task = |state| TaskHealth {
            state,
            restarts: 1,
            last_error: None,
        };
        health_registry.task("reload", task(TaskState::Waiting));
        assert_eq!(health_registry.report([]).status, Status::Degraded);
        health_registry.task("reload", task(TaskState::Running));
        assert_eq!(health_registry.report([]).status, Status::Healthy);
    }

    #[test]
    fn a_note_is_told_without_degrading() {
        let health_registry = HealthRegistry::default();
        health_registry.note("fail_open", Some("policies.fail_open is on".to_owned()));
        let report = health_registry.report([]);
        assert_eq!(report.status, Status::Healthy);
        assert_eq!(report.notes.len(), 1);
        health_registry.note("fail_open", None);
        assert!(health_registry.report([]).notes.is_empty());
    }
}
