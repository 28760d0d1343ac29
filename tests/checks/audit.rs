//! The audit log of a gate, read while a cell is driven.

use std::cell::Cell;
use std::path::PathBuf;

use serde_json::{Value, json};
use testkit::{http, wait};

/// The records of a gate after a mark.
pub(crate) struct Audit {
    control: PathBuf,
    /// The sequence number of the last record before the mark.
    mark: Cell<u64>,
}

impl Audit {
    /// The log of the gate behind `control`.
    pub(crate) fn new(control: PathBuf) -> Self {
        let mark = Cell::new(0);
        Self { control, mark }
    }

    /// Leaves out every record that is written by now.
    pub(crate) fn mark(&self) {
        if let Some(last) = self.records().last() {
            self.mark.set(last["seq"].as_u64().unwrap());
        }
    }

    /// Waits for a record after the mark with all these fields and values, and returns it. The
    /// value of a list is that of its only item.
    #[track_caller]
    pub(crate) fn find(&self, fields: &[(&str, &str)]) -> Value {
        let has = |record: &Value| {
            let mut fields = fields.iter();
            fields.all(|(name, value)| record[*name] == *value || record[*name] == json!([value]))
        };
        wait::until_or(
            || self.records().into_iter().find(has),
            || format!("a record with {fields:?} among {:#?}", self.records()),
        )
    }

    /// Waits for the record of a denial with this reason and this rule, and these fields.
    #[track_caller]
    pub(crate) fn denied(&self, reason: &str, rule: &str, fields: &[(&str, &str)]) -> Value {
        let decision = [("verdict", "deny"), ("reason", reason), ("rule", rule)];
        self.find(&[&decision, fields].concat())
    }

    /// Waits for the record of something that was allowed, with these fields.
    #[track_caller]
    pub(crate) fn allowed(&self, fields: &[(&str, &str)]) -> Value {
        self.find(&[&[("verdict", "allow")], fields].concat())
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

    /// The first records after a sequence number.
    fn page(&self, after: u64) -> Vec<Value> {
        let path = format!("/v1/audit?after={after}&limit=1000");
        let answer = http::send(&self.control, "GET", &path, b"").unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        answer.json()["records"].as_array().unwrap().clone()
    }
}
