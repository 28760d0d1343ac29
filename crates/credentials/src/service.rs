//! The gate's credential service: values, placeholders and the state that all requests share.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use policy::id::SandboxId;

use crate::placeholder::{PlaceholderFinder, PlaceholderKey};
use crate::table::{CredentialTable, TableRow};
use crate::values::{CredentialValues, SecretObserver};

/// File of the placeholder key in the state directory.
const KEY_FILE: &str = "placeholders.key";

/// Values and placeholders of all credentials.
#[derive(Debug)]
pub struct CredentialService {
    key: PlaceholderKey,
    finder: PlaceholderFinder,
    values: CredentialValues,
    /// Whether some sandbox has had a placeholder.
    has_placeholders: AtomicBool,
}

impl CredentialService {
    /// Opens the service in a state directory. Blocks.
    pub fn open(state_dir: &Path, observer: SecretObserver) -> io::Result<Self> {
        let path = state_dir.join(KEY_FILE);
        let has_placeholders = path.exists();
        Ok(Self {
            key: PlaceholderKey::open(&path)?,
            finder: PlaceholderFinder::default(),
            values: CredentialValues::new(observer),
            has_placeholders: AtomicBool::new(has_placeholders),
        })
    }

    /// The values of all rows.
    pub fn values(&self) -> &CredentialValues {
        &self.values
    }

    /// Finds placeholders of any sandbox.
    pub fn finder(&self) -> &PlaceholderFinder {
        &self.finder
    }

    /// Whether placeholders may exist, so that requests have to be searched for them.
    pub fn has_placeholders(&self) -> bool {
        self.has_placeholders.load(Ordering::Relaxed)
    }

    /// The placeholders of `sandbox` for `row`, one for each of the row's sources.
    pub fn placeholders(&self, sandbox: &SandboxId, row: &TableRow) -> Vec<String> {
        self.has_placeholders.store(true, Ordering::Relaxed);
        let uses = row.uses.iter().enumerate();
        let made =
            uses.map(|(index, one)| self.key.placeholder(sandbox, &row.name, index, one.shape));
        made.collect()
    }

    /// The variables of a sandbox that has the credentials `granted`: names and placeholders. Of
    /// each row the first source that is configured counts, because some tools prefer one
    /// variable over another.
    pub fn variables(
        &self,
        sandbox: &SandboxId,
        table: &CredentialTable,
        granted: &[String],
    ) -> BTreeMap<String, String> {
        let mut variables = BTreeMap::new();
        for row in granted.iter().filter_map(|name| table.row(name)) {
            let placeholders = self.placeholders(sandbox, row);
            let index = self.values.configured_use(row).unwrap_or_default();
            let Some((one, placeholder)) = row.uses.get(index).zip(placeholders.get(index)) else {
                continue;
            };
            for name in &one.variables {
                variables.insert(name.clone(), placeholder.clone());
            }
        }
        variables
    }
}

#[cfg(test)]
mod tests {
    use config::Secret;
    use config::section::credentials::CredentialsSection;

    use super::*;

    #[test]
    fn variables_hold_the_placeholder_of_the_configured_source() {
        let directory = tempfile::tempdir().unwrap();
        let service = CredentialService::open(directory.path(), Box::new(|_, _| ())).unwrap();
        let section = r#"{"rows": [{
            "name": "mine", "host": "a.example", "source": "env:PALISADE_TEST_A", "variable": "MINE"
        }]}"#;
        let section: CredentialsSection = serde_json::from_str(section).unwrap();
        let table = CredentialTable::new(&section);
        let sandbox = SandboxId::parse("a").unwrap();
        let granted = ["anthropic", "mine", "gone"].map(str::to_owned);
        let offered = ("CLAUDE_CODE_OAUTH_TOKEN".to_owned(), Secret::new("real"));
        service.values().offer_variables([offered]);
        let variables = service.variables(&sandbox, &table, &granted);
        let names: Vec<&str> = variables.keys().map(String::as_str).collect();
        assert_eq!(names, ["CLAUDE_CODE_OAUTH_TOKEN", "MINE"]);
        let token = &variables["CLAUDE_CODE_OAUTH_TOKEN"];
        assert!(token.starts_with("sk-ant-oat01-PALISADE"), "{token}");
    }
}
