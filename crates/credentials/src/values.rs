//! The values of credentials, read from their sources and kept for a while.
//!
//! Concurrent readers of one source share one read. A value is kept by its source, so that a reload
//! that changes a row's source never uses the value of the old one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use config::Secret;
use config::leaf::SecretSource;
use tokio::time::Instant;

use crate::source::{self, SourceError};
use crate::table::TableRow;

/// How long the value of a file is used without reading the file again.
const FILE_LIFETIME: Duration = Duration::from_secs(5);

/// Receives the name of a row and a new value before the value is first used: the log redactor.
pub type SecretObserver = Box<dyn Fn(&str, &Secret) + Send + Sync>;

/// A value, and which of the row's sources it is from.
#[derive(Clone, Debug)]
pub struct CurrentValue {
    /// The index in [`TableRow::uses`].
    pub use_index: usize,
    /// The value.
    pub value: Arc<Secret>,
}

/// Why a row has no value. The messages are for the operator and contain no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ValueError {
    /// No source of the row has a value.
    #[error("no value is configured: {0}")]
    NotConfigured(String),
    /// A source exists and cannot be read.
    #[error(transparent)]
    Source(SourceError),
}

/// Reads and keeps the values of all rows.
pub struct CredentialValues {
    /// Variables that a client of the control socket passed on. They win over the gate's own.
    offered: Mutex<HashMap<String, Arc<Secret>>>,
    entries: Mutex<HashMap<String, Arc<Entry>>>,
    observer: SecretObserver,
}

/// The value of one source.
#[derive(Default)]
struct Entry {
    current: Mutex<Option<ReadValue>>,
    /// Held while the source is read.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Clone)]
struct ReadValue {
    value: Arc<Secret>,
    at: Instant,
}

impl std::fmt::Debug for CredentialValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CredentialValues")
    }
}

impl CredentialValues {
    /// No values yet. `observer` receives every new one.
    pub fn new(observer: SecretObserver) -> Self {
        Self {
            offered: Mutex::default(),
            entries: Mutex::default(),
            observer,
        }
    }

    /// Keeps variables of the operator's current environment, which may be newer than the
    /// environment that the gate was started with.
    pub fn offer_variables(&self, variables: impl IntoIterator<Item = (String, Secret)>) {
        for (name, value) in variables {
            if let Ok(value) = source::check(&name, value.expose().as_bytes()) {
                (self.observer)(&name, &value);
                let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
                offered.insert(name, Arc::new(value));
            }
        }
    }

    /// Whether a source of `row` is set. Reads neither files nor commands.
    pub fn is_configured(&self, row: &TableRow) -> bool {
        self.configured_use(row).is_some()
    }

    /// The index of the first source of `row` that is set. Reads neither files nor commands.
    pub fn configured_use(&self, row: &TableRow) -> Option<usize> {
        row.uses.iter().position(|one| match &one.source {
            SecretSource::Env(name) => self.variable(&row.name, name).is_some(),
            SecretSource::File(path) => path.exists(),
            SecretSource::Command(_) => true,
        })
    }

    /// The value of `row`, from its first source that has one. The output of a command is used for
    /// `command_lifetime`.
    pub async fn read(
        &self,
        row: &TableRow,
        command_lifetime: Duration,
    ) -> Result<CurrentValue, ValueError> {
        let mut missing = Vec::new();
        for (use_index, one) in row.uses.iter().enumerate() {
            let read = match &one.source {
                SecretSource::Env(name) => self
                    .variable(&row.name, name)
                    .ok_or_else(|| SourceError::Missing(source::describe(&one.source))),
                SecretSource::File(_) => self.read_entry(row, &one.source, FILE_LIFETIME).await,
                SecretSource::Command(_) => {
                    self.read_entry(row, &one.source, command_lifetime).await
                }
            };
            match read {
                Ok(value) => return Ok(CurrentValue { use_index, value }),
                Err(SourceError::Missing(origin)) => missing.push(format!("{origin} is not set")),
                Err(error) => return Err(ValueError::Source(error)),
            }
        }
        Err(ValueError::NotConfigured(missing.join("; ")))
    }

    /// A newer value after an upstream has refused `refused`; `None` if there is none.
    pub async fn read_after_refusal(
        &self,
        row: &TableRow,
        refused: &CurrentValue,
    ) -> Result<Option<CurrentValue>, ValueError> {
        let Some(one) = row.uses.get(refused.use_index) else {
            return Ok(None);
        };
        let newer = match &one.source {
            SecretSource::Env(name) => self.variable(&row.name, name),
            SecretSource::File(_) | SecretSource::Command(_) => {
                let entry = self.entry(&one.source);
                let _reading = entry.reading.lock().await;
                match entry.current() {
                    Some(read) if read.value != refused.value => Some(read.value),
                    _ => Some(self.read_now(row, &one.source, &entry).await?),
                }
            }
        };
        let newer = newer.filter(|value| *value != refused.value);
        Ok(newer.map(|value| CurrentValue {
            use_index: refused.use_index,
            value,
        }))
    }

    /// A variable of a client's, or of the gate's own environment.
    fn variable(&self, row: &str, name: &str) -> Option<Arc<Secret>> {
        let mut offered = self.offered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = offered.get(name) {
            return Some(Arc::clone(value));
        }
        let value = std::env::var(name).ok()?;
        let value = Arc::new(source::check(name, value.as_bytes()).ok()?);
        (self.observer)(row, &value);
        offered.insert(name.to_owned(), Arc::clone(&value));
        Some(value)
    }

    async fn read_entry(
        &self,
        row: &TableRow,
        source: &SecretSource,
        lifetime: Duration,
    ) -> Result<Arc<Secret>, SourceError> {
        let entry = self.entry(source);
        if let Some(value) = entry.fresh(lifetime) {
            return Ok(value);
        }
        let _reading = entry.reading.lock().await;
        match entry.fresh(lifetime) {
            Some(value) => Ok(value),
            None => match self.read_now(row, source, &entry).await {
                Ok(value) => Ok(value),
                Err(ValueError::Source(error)) => Err(error),
                Err(ValueError::NotConfigured(origin)) => Err(SourceError::Missing(origin)),
            },
        }
    }

    /// Reads a source. The caller holds `entry.reading`.
    async fn read_now(
        &self,
        row: &TableRow,
        source: &SecretSource,
        entry: &Entry,
    ) -> Result<Arc<Secret>, ValueError> {
        let read = match source {
            SecretSource::File(path) => source::read_file(source, path).await,
            SecretSource::Command(line) => source::run_command(source, line).await,
            SecretSource::Env(name) => Err(SourceError::Missing(name.clone())),
        };
        let value = Arc::new(read.map_err(ValueError::Source)?);
        (self.observer)(&row.name, &value);
        let mut current = entry.current.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Some(ReadValue {
            value: Arc::clone(&value),
            at: Instant::now(),
        });
        Ok(value)
    }

    fn entry(&self, source: &SecretSource) -> Arc<Entry> {
        let key = match source {
            SecretSource::Env(name) => format!("env:{name}"),
            SecretSource::File(path) => format!("file:{}", path.display()),
            SecretSource::Command(line) => format!("command:{line}"),
        };
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(entries.entry(key).or_default())
    }
}

impl Entry {
    fn current(&self) -> Option<ReadValue> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.clone()
    }

    fn fresh(&self, lifetime: Duration) -> Option<Arc<Secret>> {
        let current = self.current()?;
        (current.at.elapsed() < lifetime).then_some(current.value)
    }
}

#[cfg(test)]
mod tests {
    use config::section::credentials::CredentialsSection;

    use super::*;
    use crate::table::CredentialTable;

    const LIFETIME: Duration = Duration::from_secs(60);

    fn row(source: &str) -> TableRow {
        let text = format!(
            r#"{{"rows": [{{"name": "mine", "host": "a.example", "source": "{source}"}}]}}"#
        );
        let section: CredentialsSection = serde_json::from_str(&text).unwrap();
        CredentialTable::new(&section)
            .row("mine")
            .unwrap()
            .as_ref()
            .clone()
    }

    fn observed() -> (CredentialValues, Arc<Mutex<Vec<String>>>) {
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let list = Arc::clone(&seen);
        let values = CredentialValues::new(Box::new(move |name, value| {
            let text = format!("{name}={}", value.expose());
            list.lock().unwrap().push(text);
        }));
        (values, seen)
    }

    async fn text(values: &CredentialValues, row: &TableRow) -> String {
        let read = values.read(row, LIFETIME).await.unwrap();
        read.value.expose().to_owned()
    }

    #[tokio::test]
    async fn offered_variable_replaces_the_earlier_one() {
        let (values, seen) = observed();
        let row = row("env:PALISADE_TEST_UNSET");
        assert!(!values.is_configured(&row));
        let error = values.read(&row, LIFETIME).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "no value is configured: the environment variable PALISADE_TEST_UNSET is not set"
        );
        for value in ["one", "two"] {
            let offered = ("PALISADE_TEST_UNSET".to_owned(), Secret::new(value));
            values.offer_variables([offered]);
            assert_eq!(text(&values, &row).await, value);
        }
        assert!(values.is_configured(&row));
        let seen = seen.lock().unwrap().clone();
        assert_eq!(seen, ["PALISADE_TEST_UNSET=one", "PALISADE_TEST_UNSET=two"]);
    }

    #[tokio::test]
    async fn concurrent_readers_of_a_command_run_it_once() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("runs");
        let (values, seen) = observed();
        let row = row(&format!(
            "command:echo run >> {0}; wc -l < {0}",
            log.display()
        ));
        let readers = (0..20).map(|_| text(&values, &row));
        let all = futures_util::future::join_all(readers).await;
        assert!(all.iter().all(|value| value == "1"), "{all:?}");
        assert_eq!(seen.lock().unwrap().len(), 1);
        let first = values.read(&row, LIFETIME).await.unwrap();
        let again = (0..20).map(|_| values.read_after_refusal(&row, &first));
        for newer in futures_util::future::join_all(again).await {
            assert_eq!(newer.unwrap().unwrap().value.expose(), "2");
        }
    }

    #[tokio::test]
    async fn unchanged_value_after_a_refusal_is_no_newer_value() {
        let (values, _) = observed();
        let row = row("command:echo same");
        let first = values.read(&row, LIFETIME).await.unwrap();
        let newer = values.read_after_refusal(&row, &first).await.unwrap();
        assert!(newer.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn changed_file_is_read_after_its_lifetime() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        std::fs::write(&path, "first").unwrap();
        let (values, _) = observed();
        let row = row(&format!("file:{}", path.display()));
        assert_eq!(text(&values, &row).await, "first");
        std::fs::write(&path, "second").unwrap();
        assert_eq!(text(&values, &row).await, "first");
        tokio::time::advance(FILE_LIFETIME).await;
        assert_eq!(text(&values, &row).await, "second");
    }

    #[tokio::test]
    async fn failing_command_is_not_a_missing_value() {
        let (values, _) = observed();
        let row = row("command:exit 7");
        let error = values.read(&row, LIFETIME).await.unwrap_err();
        assert!(matches!(error, ValueError::Source(_)), "{error}");
    }
}
