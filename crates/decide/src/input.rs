//! The `input` document of the operator's policies. Every field is always present and always of the
//! same type; otherwise an agent could make a policy fail with a type error.

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

/// The input of a policy about a request, or about a TLS connection that is relayed without
/// decryption.
#[derive(Clone, Copy, Debug)]
pub struct RequestInput<'a> {
    /// The sandbox that sends the request.
    pub sandbox: &'a SandboxId,
    /// The host.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
    /// Whether the request uses TLS.
    pub tls: bool,
    /// The program that sends the request, where it is certain.
    pub program: Option<&'a str>,
    /// The request; none for a TLS connection that is relayed without decryption.
    pub request: Option<PolicyRequest<'a>>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
    /// The rule of the allowlist that allows the request.
    pub rule: &'a RuleName,
}

/// The parts of a request that a policy reads.
#[derive(Clone, Copy, Debug)]
pub struct PolicyRequest<'a> {
    /// The method.
    pub method: &'a Method,
    /// The path.
    pub path: &'a CleanPath,
    /// The headers as they will be sent.
    pub headers: &'a HeaderMap,
}

impl<'a> RequestInput<'a> {
    /// The input for a request to `target`.
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
            request: Some(PolicyRequest {
                method: &target.method,
                path: &target.path,
                headers,
            }),
            registration,
            rule,
        }
    }

    /// Renders the `input` document.
    pub fn document(&self) -> Value {
        // A connection without decryption has an empty path, so rules about paths do not allow it.
        let (method, path, raw_path, segments, headers) = match &self.request {
            Some(request) => (
                request.method.as_str(),
                request.path.text(),
                request.path.wire(),
                request.path.segments().collect(),
                headers_document(request.headers),
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
            "registration": registration_document(self.registration),
            "rule": self.rule.as_str(),
        })
    }
}

/// Renders the `input` document of a policy about a push.
pub(crate) fn push_document(facts: &PushFacts<'_>, findings: Option<&Findings>) -> Value {
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
    let updates: Vec<Value> = facts.context.updates.iter().map(update).collect();
    let option = |option: &Vec<u8>| String::from_utf8_lossy(option).into_owned();
    let options: Vec<String> = facts.context.options.iter().map(option).collect();
    let restricted = match findings.map(|findings| findings.restricted) {
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
        "objects": findings.map_or(0, |findings| findings.objects),
        "secrets": findings.map_or(0, |findings| findings.secrets.len()),
        "restricted": restricted,
        "registration": registration_document(Some(facts.registration)),
    })
}

fn registration_document(registration: Option<&Registration>) -> Value {
    registration.map_or_else(
        || json!({"repos": [], "auth_mode": "user", "metadata": {}}),
        |registration| {
            let repos: Vec<&str> = registration
                .repos
                .iter()
                .map(|repo| repo.name.as_str())
                .collect();
            json!({
                "repos": repos,
                "auth_mode": registration.auth_mode.as_str(),
                "metadata": registration.metadata,
            })
        },
    )
}

/// Headers by name, in lower case; repeated headers are joined to one list (RFC 9110, 5.3). The
/// values of credentials are redacted.
fn headers_document(headers: &HeaderMap) -> Map<String, Value> {
    let mut document = Map::with_capacity(headers.keys_len());
    for name in headers.keys() {
        let value = if is_secret_header(name.as_str()) {
            "redacted".to_owned()
        } else {
            let values = headers.get_all(name).iter();
            let texts: Vec<_> = values
                .map(|value| String::from_utf8_lossy(value.as_bytes()))
                .collect();
            texts.join(", ")
        };
        document.insert(name.as_str().to_owned(), Value::String(value));
    }
    document
}

fn is_secret_header(name: &str) -> bool {
    ["authorization", "cookie", "secret", "password"]
        .iter()
        .any(|word| name.contains(word))
        || ["token", "api-key", "apikey"]
            .iter()
            .any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests;
