//! The operator's own policies at the gate: bundles with entrypoint `http/authz`, and
//! `git/push` for pushes.
//!
//! A request that every other rule allows is put to each bundle, in the order of the
//! settings; the first that does not allow it decides. A bundle in mode `log` is asked
//! and written down, and decides nothing.

use std::sync::Arc;

use config::Settings;
use config::bundle::{self, BadBundle, Found};
use http::HeaderMap;
use policy::allowlist::Target;
use policy::audit::{AuditEvent, Times};
use policy::endpoint::Method;
use policy::host::Host;
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::proof::Permitted;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::rego::judge::Judge;
use policy::rego::{Decision, Failure};
use policy::verdict::{Denial, RuleName, Word};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;

use crate::headers;
use crate::pipeline::Message;
use crate::traffic::{Rules, Traffic};
use crate::trail::Trail;

/// Slow decisions that are made at the same time.
const MOST_SLOW: usize = 4;

/// Bundles that judge requests.
#[derive(Debug)]
pub struct Policies {
    judges: Vec<Arc<Judge>>,
    slow: Semaphore,
}

/// What one bundle makes of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The bundle.
    pub bundle: String,
    /// Its name among rules.
    pub rule: RuleName,
    /// Whether it decides: it is not there to log, nor did it fail where the operator lets
    /// failures pass.
    pub counts: bool,
    /// Why not.
    pub denial: Option<Denial>,
}

impl Policies {
    /// Reads the bundles of `settings` for `entrypoint`. Blocks. One that is not there is left out, with a
    /// warning, unless it is required; one that cannot be used is an error.
    pub fn load(settings: &Settings, entrypoint: &str) -> Result<Self, BadBundle> {
        let Found { judges, missing } = bundle::judges(&settings.policies, entrypoint)?;
        for problem in missing {
            tracing::warn!(%problem, "a policy bundle is missing and judges nothing");
        }
        Ok(Self {
            judges,
            slow: Semaphore::new(MOST_SLOW),
        })
    }

    /// Whether there is nobody to ask.
    pub fn is_empty(&self) -> bool {
        self.judges.is_empty()
    }

    /// Whether some bundle decides, and does not only log.
    pub fn decide(&self) -> bool {
        self.judges.iter().any(|judge| judge.counts())
    }

    /// What each bundle says, up to the first that decides against it.
    pub async fn judge(&self, input: &Arc<Value>) -> Vec<Judgement> {
        let mut said = Vec::with_capacity(self.judges.len());
        for judge in &self.judges {
            let decision = self.ask(judge, input).await;
            let judgement = understand(judge, decision);
            let ends = judgement.counts && judgement.denial.is_some();
            said.push(judgement);
            if ends {
                break;
            }
        }
        said
    }

    /// Whether every bundle that counts allows it. Blocks for as long as they may take.
    pub fn allows(&self, input: &Value) -> bool {
        let mut counting = self.judges.iter().filter(|judge| judge.counts());
        counting.all(|judge| {
            let judgement = understand(judge, judge.at_length(input));
            judgement.denial.is_none() || !judgement.counts
        })
    }

    async fn ask(&self, judge: &Arc<Judge>, input: &Arc<Value>) -> Decision {
        if let Some(decision) = judge.at_once(input) {
            return decision;
        }
        // The semaphore is never closed.
        let place = self.slow.acquire().await;
        let (judge, input) = (Arc::clone(judge), Arc::clone(input));
        let decided = tokio::task::spawn_blocking(move || judge.at_length(&input)).await;
        drop(place);
        decided.unwrap_or_else(|error| Decision::Failed(Failure::Error(error.to_string())))
    }
}

fn understand(judge: &Judge, decision: Decision) -> Judgement {
    if let Decision::Failed(failure) = &decision
        && let Some(failures) = judge.count_failure()
    {
        let bundle = judge.id();
        tracing::error!(bundle, %failure, failures, "a policy bundle could not decide");
    }
    let outcome = judge.understand(decision);
    let (rule, counts) = (judge.rule_name(), judge.decides(&outcome));
    let denial = outcome.map_or_else(Some, |change| {
        let because = "the policy wants the request changed, which the gate cannot do";
        let denial = Denial::new(Reason::RegoDenied, rule.clone());
        change.map(|change| change.said.told(denial).because(because))
    });
    Judgement {
        bundle: judge.id().to_owned(),
        rule,
        counts,
        denial,
    }
}

/// Puts a request to the bundles that judge requests.
pub async fn check(
    traffic: &Traffic,
    rules: &Rules,
    request: &mut Permitted<Message>,
    trail: &mut Trail,
) -> Result<(), Denial> {
    if rules.policies.is_empty() {
        return Ok(());
    }
    let (permit, message) = (request.permit(), request.request());
    let mut sent = message.head.headers.clone();
    headers::strip_request(&mut sent);
    let asked = Asked::request(
        permit.target(),
        &sent,
        message.destination.tls,
        Some(request.identity().registration()),
        permit.rule(),
    );
    let input = Arc::new(asked.input());
    request.request_mut().judged.policies = Some(Arc::clone(&input));
    let judgements = rules.policies.judge(&input).await;
    conclude(traffic, judgements, trail).await
}

/// Puts a connection that nobody reads to the bundles that judge requests: they are told of
/// a CONNECT, and that there is no more to know.
pub async fn check_unread(
    traffic: &Traffic,
    rules: &Rules,
    asked: &Asked<'_>,
    trail: &mut Trail,
) -> Result<Arc<Value>, Denial> {
    let input = Arc::new(asked.input());
    let judgements = rules.policies.judge(&input).await;
    conclude(traffic, judgements, trail).await?;
    Ok(input)
}

/// What follows from what the bundles say. One that only logs has a record of its own.
pub async fn conclude(
    traffic: &Traffic,
    judgements: Vec<Judgement>,
    trail: &mut Trail,
) -> Result<(), Denial> {
    for Judgement {
        bundle,
        rule,
        counts,
        denial,
    } in judgements
    {
        let failed = denial.as_ref().map(|denial| denial.reason) == Some(Reason::RegoError);
        if failed {
            traffic.numbers().undecided();
        }
        if counts {
            trail.event.bundle = Some(bundle);
            denial.map_or(Ok(()), Err)?;
        } else if let Some(denial) = denial {
            let event = AuditEvent {
                bundle: Some(bundle),
                event: Some("policy_logged".to_owned()),
                ms: Times::default(),
                reason: Some(denial.reason),
                rule: Some(rule),
                verdict: Some(Word::Deny),
                ..(*trail.event).clone()
            };
            traffic.ledger().record(Box::new(event)).await;
        }
    }
    Ok(())
}

/// What a policy is told about.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// Whose it is.
    pub sandbox: &'a SandboxId,
    /// The host.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
    /// Whether over TLS.
    pub tls: bool,
    /// The program, where it is certain.
    pub program: Option<&'a str>,
    /// The request; none for a connection that nobody reads.
    pub request: Option<Read<'a>>,
    /// Who asks, where it is known.
    pub registration: Option<&'a Registration>,
    /// The rule of the allowlist that allows it.
    pub rule: &'a RuleName,
}

/// What is read of a request.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// The method.
    pub method: &'a Method,
    /// The path.
    pub path: &'a CleanPath,
    /// The headers as they will be sent.
    pub headers: &'a HeaderMap,
}

impl<'a> Asked<'a> {
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
            request: Some(Read {
                method: &target.method,
                path: &target.path,
                headers,
            }),
            registration,
            rule,
        }
    }

    /// What a policy finds under `input`. Every field is always there and of one type: a
    /// policy that trips over a type is one that an agent can trip.
    pub fn input(&self) -> Value {
        // A connection that nobody reads has no path: a rule about paths does not allow it.
        let (method, path, raw_path, segments, headers) = match &self.request {
            Some(read) => (
                read.method.as_str(),
                read.path.text(),
                read.path.wire(),
                read.path.segments().collect(),
                told_headers(read.headers),
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
            "registration": told_registration(self.registration),
            "rule": self.rule.as_str(),
        })
    }
}

/// What a policy is told of whoever asks.
pub fn told_registration(registration: Option<&Registration>) -> Value {
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

/// Headers by name, in lower case; what comes more than once is one list, as HTTP has it
/// (RFC 9110, 5.3). What lets somebody in is there, and not what it is.
fn told_headers(headers: &HeaderMap) -> Map<String, Value> {
    let mut told = Map::with_capacity(headers.keys_len());
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
        told.insert(name.as_str().to_owned(), Value::String(value));
    }
    told
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
