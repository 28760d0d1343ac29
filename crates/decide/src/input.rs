//! The `input` document of the operator's policies. Every field is always present and of one type;
//! otherwise an agent could make a policy fail by a type error.

use http::HeaderMap;
use policy::allowlist::Target;
use policy::endpoint::Method;
use policy::host::Host;
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::push::{Findings, RestrictedPathChange};
use policy::refs::RefUpdate;
use policy::registration::Registration;
use policy::verdict::RuleName;
use serde_json::{Map, Value, json};

use crate::subject::PushFacts;

/// A request, or a connection that passes unread, as a policy reads it.
#[derive(Clone, Copy, Debug)]
pub struct RequestInput<'a> {
    /// The sandbox that sends it.
    pub sandbox: &'a SandboxId,
    /// The host.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
    /// Whether over TLS.
    pub tls: bool,
    /// The program, where it is certain.
    pub program: Option<&'a str>,
    /// The request; none for a connection that passes unread.
    pub request: Option<ReadRequest<'a>>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
    /// The rule of the allowlist that allows it.
    pub rule: &'a RuleName,
}

/// The parts of a request that a policy reads.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// The path.
    pub path: &'a CleanPath,
    /// The headers as they will be sent.
    pub headers: &'a HeaderMap,
}

impl<'a> RequestInput<'a> {
    /// A request for `target`.
    pub fn request(
        target: &'a Target,
        headers: &'a HeaderMap,
        tls: bool,
        registration: Option<&'a Registration>,
        rule: &'a RuleName,
    ) -> Self {
        Self {
            sandbox: &target.sandbox,
            host: &target.host,
            port: target.port,
            tls,
            program: target.program.as_deref(),
            request: Some(ReadRequest {
                method: &target.method,
                path: &target.path,
                headers,
            }),
            registration,
            rule,
        }
    }

    /// The document.
    pub fn document(&self) -> Value {
        // A connection that passes unread has no path: a rule about paths does not allow it.
        let (method, path, raw_path, segments, headers) = match &self.request {
            Some(read) => (
                read.method.as_str(),
                read.path.text(),
                read.path.wire(),
                read.path.segments().collect(),
                headers(read.headers),
            ),
            None => ("CONNECT", "", "", Vec::new(), Map::new()),
        };
        json!({
            "kind": "http",
            "sandbox": self.sandbox,
            "method": method,
            "scheme": if self.tls { "https" } else { "http" },
            "host": self.host.to_string(),
            "port": self.port,
            "unread": self.request.is_none(),
            "path": path,
            "raw_path": raw_path,
            "segments": segments,
            "headers": headers,
            "program": self.program,
            "registration": registration(self.registration),
            "rule": self.rule.as_str(),
        })
    }
}

/// A push, as a policy reads it.
pub(crate) fn push(facts: &PushFacts<'_>, findings: Option<&Findings>) -> Value {
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
    let updates: Vec<Value> = facts.case.updates.iter().map(update).collect();
    let option = |option: &Vec<u8>| String::from_utf8_lossy(option).into_owned();
    let options: Vec<String> = facts.case.options.iter().map(option).collect();
    let restricted = match findings.map(|found| found.restricted) {
        None => "unread",
        Some(RestrictedPathChange::Untouched) => "untouched",
        Some(RestrictedPathChange::Changed) => "changed",
        Some(RestrictedPathChange::Unknown) => "unknown",
    };
    json!({
        "kind": "git_push",
        "sandbox": facts.registration.id,
        "host": facts.host.to_string(),
        "repo": facts.repo,
        "updates": updates,
        "options": options,
        "atomic": facts.atomic,
        "bytes": facts.bytes,
        "objects": findings.map_or(0, |found| found.objects),
        "secrets": findings.map_or(0, |found| found.secrets.len()),
        "restricted": restricted,
        "registration": registration(Some(facts.registration)),
    })
}

fn registration(registration: Option<&Registration>) -> Value {
    registration.map_or_else(
        || json!({"repos": [], "auth_mode": "user", "metadata": {}}),
        |row| {
            let repos: Vec<&str> = row.repos.iter().map(|repo| repo.name.as_str()).collect();
            json!({
                "repos": repos,
                "auth_mode": row.auth_mode.as_str(),
                "metadata": row.metadata,
            })
        },
    )
}

/// Headers by name, in lower case; repeated headers are joined to one list (RFC 9110, 5.3). The
/// values of credentials are redacted.
fn headers(headers: &HeaderMap) -> Map<String, Value> {
    let mut shown = Map::with_capacity(headers.keys_len());
    for name in headers.keys() {
        let value = if is_secret(name.as_str()) {
            "redacted".to_owned()
        } else {
            let values = headers.get_all(name).iter();
            let texts: Vec<_> = values
                .map(|value| String::from_utf8_lossy(value.as_bytes()))
                .collect();
            texts.join(", ")
        };
        shown.insert(name.as_str().to_owned(), Value::String(value));
    }
    shown
}

fn is_secret(name: &str) -> bool {
    ["authorization", "cookie", "secret", "password"]
        .iter()
        .any(|word| name.contains(word))
        || ["token", "api-key", "apikey"]
            .iter()
            .any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests;
