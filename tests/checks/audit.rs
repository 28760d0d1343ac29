//! Reads the audit log of the gate under test.

use std::cell::Cell;
use std::path::PathBuf;

use serde_json::{Value, json};
use testkit::{http, wait};

/// The audit log of a gate, without the records before the last call of [`Audit::mark`].
pub(crate) struct Audit {
    control: PathBuf,
    /// The sequence number of the last record before the mark.
    mark: Cell<u64>,
}

impl Audit {
    /// The audit log of the gate with the control socket `control`.
    pub(crate) fn new(control: PathBuf) -> Self {
        let mark = Cell::new(0);
        Self { control, mark }
    }

    /// Skips every record that exists now.
    pub(crate) fn mark(&self) {
        if let Some(last) = self.records().last() {
            self.mark.set(last["seq"].as_u64().unwrap());
        }
    }

    /// Waits for a record after the mark with all these fields and values, and returns it. A list
    /// field matches if its only item has the value.
    #[track_caller]
    pub(crate) fn wait_for(&self, fields: &[(&str, &str)]) -> Value {
        let matches = |record: &Value| {
            let mut fields = fields.iter();
            fields.all(|(name, value)| record[*name] == *value || record[*name] == json!([value]))
        };
        wait::until_or(
            || self.records().into_iter().find(matches),
            || format!("a record with {fields:?} among {:#?}", self.records()),
        )
    }

    /// Waits for the record of a denial with this reason, this rule and these fields.
    #[track_caller]
    pub(crate) fn wait_for_denied(
        &self,
        reason: &str,
        rule: &str,
        fields: &[(&str, &str)],
    ) -> Value {
        let decision = [("verdict", "deny"), ("reason", reason), ("rule", rule)];
        self.wait_for(&[&decision, fields].concat())
    }

    /// Waits for the record of an allowed subject with these fields.
    #[track_caller]
    pub(crate) fn wait_for_allowed(&self, fields: &[(&str, &str)]) -> Value {
        self.wait_for(&[&[("verdict", "allow")], fields].concat())
    }

    fn records(&self) -> Vec<Value> {
        let mut records = Vec::new();
        let mut after = self.mark.get();
        loop {
            let page = self.page(after);
            let Some(last) = page.last() else {
                return records;
            };
            after = last["seq"].as_u64().unwrap();
            records.extend(page);
        }
    }

    /// Up to 1000 records after a sequence number.
    fn page(&self, after: u64) -> Vec<Value> {
        let path = format!("/v1/audit?after={after}&limit=1000");
        let answer = http::send(&self.control, "GET", &path, b"").unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["records"].as_array().unwrap().clone()
    }
}
