//! The operator's own policies about pushes: bundles with entrypoint `git/push`.

use std::sync::Arc;

use policy::push::{Findings, Restricted};
use policy::refs::RefUpdate;
use policy::verdict::Denial;
use serde_json::{Value, json};

use super::receive::Pushed;
use crate::rego;
use crate::traffic::{Rules, Traffic};
use crate::trail::Trail;

/// Puts a push that every other rule allows to the bundles that judge pushes.
pub(super) async fn check(
    traffic: &Traffic,
    rules: &Rules,
    pushed: &Pushed<'_>,
    findings: Option<&Findings>,
    trail: &mut Trail,
) -> Result<(), Denial> {
    if rules.pushes.is_empty() {
        return Ok(());
    }
    let input = Arc::new(input(pushed, findings));
    let judgements = rules.pushes.judge(&input).await;
    rego::conclude(traffic, judgements, trail).await
}

/// What a policy finds under `input`. Every field is always there and of one type.
fn input(pushed: &Pushed<'_>, findings: Option<&Findings>) -> Value {
    let update = |update: &RefUpdate| {
        let action = match (update.old.is_zero(), update.is_deletion()) {
            (_, true) => "delete",
            (true, false) => "create",
            (false, false) => "update",
        };
        json!({
            "ref": update.name.to_string(),
            "old": update.old.to_string(),
            "new": update.new.to_string(),
            "action": action,
        })
    };
    let updates: Vec<Value> = pushed.case.updates.iter().map(update).collect();
    let option = |option: &Vec<u8>| String::from_utf8_lossy(option).into_owned();
    let options: Vec<String> = pushed.case.options.iter().map(option).collect();
    let restricted = match findings.map(|found| found.restricted) {
        None => "unread",
        Some(Restricted::Untouched) => "untouched",
        Some(Restricted::Changed) => "changed",
        Some(Restricted::Unknown) => "unknown",
    };
    json!({
        "kind": "git_push",
        "sandbox": pushed.registration.id,
        "host": pushed.host.to_string(),
        "repo": pushed.repo,
        "updates": updates,
        "options": options,
        "atomic": pushed.head.capabilities.atomic,
        "bytes": pushed.bytes,
        "objects": findings.map_or(0, |found| found.objects),
        "secrets": findings.map_or(0, |found| found.secrets.len()),
        "restricted": restricted,
        "registration": rego::told_registration(Some(pushed.registration)),
    })
}
