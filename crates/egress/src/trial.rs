//! Trial decision: evaluates the rules for a request without sending it.

use std::sync::Arc;

use decide::decision::{Cx, decide};
use decide::snapshot::PolicySnapshot;
use decide::subject::{HeadFacts, Mode, PassthroughFacts, RequestFacts, Subject};
use http::HeaderMap;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::clock::Tick;
use policy::endpoint::Method;
use policy::host::{Authority, Host};
use policy::id::SandboxId;
use policy::path::CleanPath;
use policy::reason::Reason;
use policy::registration::Registration;
use policy::verdict::{Denial, RuleName};

/// A request to evaluate.
#[derive(Clone, Debug)]
pub struct TrialRequest {
    /// The sandbox that would send the request.
    pub sandbox: SandboxId,
    /// The method.
    pub method: String,
    /// The whole URL.
    pub url: String,
    /// The program that would send the request.
    pub program: Option<String>,
    /// The sandbox's registration, if any.
    pub registration: Option<Arc<Registration>>,
}

/// Result of a trial decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrialResult {
    /// The parsed host.
    pub host: Option<Host>,
    /// The port.
    pub port: Option<u16>,
    /// The path as it would be sent.
    pub path: Option<String>,
    /// The rule that allows the request, or the denial.
    pub verdict: Result<RuleName, Denial>,
    /// Whether the connection would be a TLS passthrough, where only host and port count.
    pub unread: bool,
}

/// Decides about a request as the gate would, without side effects.
pub async fn decide_trial(snapshot: &PolicySnapshot, request: &TrialRequest) -> TrialResult {
    let mut trial = TrialResult {
        host: None,
        port: None,
        path: None,
        verdict: Err(Denial::new(Reason::BadName, "names")),
        unread: false,
    };
    trial.verdict = run(snapshot, request, &mut trial).await;
    trial
}

async fn run(
    snapshot: &PolicySnapshot,
    request: &TrialRequest,
    trial: &mut TrialResult,
) -> Result<RuleName, Denial> {
    let bad = |message: String| Denial::new(Reason::BadName, "names").with_message(message);
    let url = &request.url;
    let (tls, rest) = if let Some(rest) = url.strip_prefix("https://") {
        (true, rest)
    } else if let Some(rest) = url.strip_prefix("http://") {
        (false, rest)
    } else {
        return Err(bad(
            "The URL must begin with http:// or https://.".to_owned()
        ));
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    // Clients do not send the fragment.
    let path = path.split('#').next().unwrap_or_default();
    let path = if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/{path}")
    };
    let authority = Authority::parse(authority).map_err(|error| bad(format!("{error}.")))?;
    let port = authority.port.unwrap_or(if tls { 443 } else { 80 });
    trial.host = Some(authority.host.clone());
    trial.port = Some(port);
    let path = CleanPath::parse(&path).map_err(|error| bad(format!("{error}.")))?;
    trial.path = Some(path.wire().to_owned());
    let method = Method::parse(&request.method).map_err(|error| {
        Denial::new(Reason::MethodDenied, "names").with_message(format!("{error}."))
    })?;
    trial.unread = tls && snapshot.passes_unread(&authority.host);
    let answers = ApprovalAnswers::default();
    let cx = Cx {
        snapshot,
        answers: &answers,
        grants: None,
        now: Tick::default(),
    };
    let registration = request.registration.as_deref();
    let (headers, host) = (HeaderMap::new(), authority.host);
    let subject = if trial.unread {
        Subject::Passthrough(PassthroughFacts {
            sandbox: &request.sandbox,
            host: &host,
            port,
            program: request.program.as_deref(),
            registration,
            recorded: None,
        })
    } else {
        Subject::Request(RequestFacts {
            target: Target {
                sandbox: request.sandbox.clone(),
                method,
                host: host.clone(),
                port,
                path,
                program: request.program.clone(),
            },
            tls,
            head: HeadFacts::Headers {
                received: &headers,
                sent: None,
            },
            registration,
        })
    };
    decide(subject, Mode::Trial, cx).wait().await.refusal()
}
