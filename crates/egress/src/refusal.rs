//! A refusal, in the words that a client reads.
//!
//! The same denial reads the same everywhere: one reason code, one request id. What the
//! program before us answered keeps its keys, because clients look for them.

use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::{Denial, Detail};
use serde_json::{Map, Value, json};

use crate::body::{self, Content};
use crate::git_protocol::push::Capabilities;
use crate::git_protocol::{line, report, size};
use crate::stage::Stage;

/// Says that it was the gate that answered, and no.
pub const BLOCKED: HeaderName = HeaderName::from_static("x-palisade-blocked");

/// Names the request, for `palisade why`.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-palisade-request-id");

/// The end of a request's way.
#[derive(Debug)]
pub struct Refusal {
    /// What was decided.
    pub denial: Denial,
    /// Where.
    pub stage: Stage,
    /// The form of the answer.
    pub form: Form,
}

/// The form in which a client reads a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON.
    Json,
    /// Plain text, the only form that git shows a person.
    Text,
    /// Git's own report, ref by ref.
    Push(Box<RejectedPush>),
}

/// A push of which nothing was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedPush {
    /// What the client can be told.
    pub capabilities: Capabilities,
    /// Each ref, and why it did not move.
    pub refs: Vec<(Vec<u8>, String)>,
    /// What else there is to say than the first reason.
    pub others: Vec<String>,
}

impl Refusal {
    /// A refusal that says its reason.
    pub fn new(stage: Stage, denial: Denial) -> Self {
        Self {
            denial,
            stage,
            form: Form::Json,
        }
    }

    /// The same, in plain text.
    #[must_use]
    pub fn in_text(mut self) -> Self {
        self.form = Form::Text;
        self
    }

    /// The same, of a push.
    #[must_use]
    pub fn of_push(mut self, unmoved: RejectedPush) -> Self {
        self.form = Form::Push(Box::new(unmoved));
        self
    }

    /// Whether the connection is of no more use.
    fn closes(&self) -> bool {
        matches!(self.denial.reason, Reason::NameMismatch | Reason::Framing)
    }

    /// The answer.
    pub fn answer(&self, sandbox: Option<&SandboxId>, id: RequestId) -> Response<Content> {
        let json = || {
            let text = self.body(sandbox, id).to_string() + "\n";
            ("application/json", text.into_bytes(), self.status())
        };
        let (kind, bytes, status) = match &self.form {
            Form::Text => {
                let text = self.text(id).into_bytes();
                ("text/plain; charset=utf-8", text, self.status())
            }
            Form::Push(unmoved) => match self.report(unmoved, id) {
                // Anything but 200 makes git say that everything is up to date.
                Some(report) => (report::CONTENT_TYPE, report, StatusCode::OK),
                None => json(),
            },
            Form::Json => json(),
        };
        let mut response = Response::new(body::full(bytes));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(BLOCKED, HeaderValue::from_static("true"));
        if let Ok(id) = HeaderValue::try_from(id.to_string()) {
            headers.insert(REQUEST_ID, id);
        }
        if let Some(Detail::Retry { after, .. }) = self.denial.detail.as_deref() {
            headers.insert(RETRY_AFTER, HeaderValue::from(*after));
        }
        if self.closes() {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The answer to a client that speaks git's own protocol: a report where it waits for one,
    /// and otherwise a line that git shows and ends with (gitprotocol-pack, 'ERR').
    pub fn spoken(&self, id: RequestId) -> Vec<u8> {
        if let Form::Push(unmoved) = &self.form
            && let Some(report) = self.report(unmoved, id)
        {
            return report;
        }
        let mut out = Vec::new();
        let text = self.text(id);
        line::write(&mut out, format!("ERR {}", text.trim_end()).as_bytes());
        out
    }

    /// The status that says it where the form does not say it by itself.
    fn status(&self) -> StatusCode {
        status_of(self.denial.reason)
    }

    /// The answer in git's own form; none where the client does not read it.
    fn report(&self, unmoved: &RejectedPush, id: RequestId) -> Option<Vec<u8>> {
        let Denial {
            reason,
            rule,
            message,
            ..
        } = &self.denial;
        let mut sentences = vec![message.clone()];
        let others = unmoved.others.iter().filter(|other| *other != message);
        sentences.extend(others.cloned());
        sentences.push(format!(
            "nothing was pushed: {}, rule {rule}, request {id}",
            reason.code()
        ));
        sentences.push(hint(*reason).to_owned());
        let refs = unmoved.refs.iter();
        let refs = refs.map(|(name, why)| (name.as_slice(), why.as_str()));
        report::refuse(unmoved.capabilities, &sentences, refs)
    }

    /// The answer in sentences.
    fn text(&self, id: RequestId) -> String {
        let Denial {
            reason,
            rule,
            message,
            ..
        } = &self.denial;
        format!(
            "{message}\npalisade: {}, rule {rule}, request {id}\npalisade: {}\n",
            reason.code(),
            hint(*reason)
        )
    }

    /// The answer as JSON.
    pub fn body(&self, sandbox: Option<&SandboxId>, id: RequestId) -> Value {
        let Denial {
            reason,
            rule,
            message,
            ..
        } = &self.denial;
        let mut body = Map::new();
        let mut say = |key: &str, value: Value| {
            body.insert(key.to_owned(), value);
        };
        match (self.denial.detail.as_deref(), reason) {
            (Some(Detail::Retry { upstream, after }), Reason::RateLimited) => {
                say("error", json!("Rate limit exceeded"));
                say("container_id", json!(sandbox));
                say("upstream", json!(upstream));
                say("retry_after", json!(after));
                say("reason", json!(reason.code()));
            }
            (Some(Detail::Retry { upstream, after }), Reason::CircuitOpen) => {
                say("error", json!("Service temporarily unavailable"));
                // The word of the program before us; ours is in `code`.
                say("reason", json!("circuit_breaker_open"));
                say("code", json!(reason.code()));
                say("upstream", json!(upstream));
                say("retry_after", json!(after));
            }
            (Some(Detail::Size { bytes, limit }), _) => {
                say("error", json!("Push size exceeds limit"));
                for (key, value) in size::details(*bytes, *limit) {
                    say(key, value);
                }
                say("reason", json!(reason.code()));
            }
            (Some(Detail::Retry { .. } | Detail::Refs(_)) | None, _) => {
                say("error", json!(message));
                say("reason", json!(reason.code()));
            }
        }
        if matches!(reason, Reason::GithubRule | Reason::GitRepo) {
            // Clients of the forges' APIs and git-lfs look for errors here, and show nothing else.
            say("message", json!(message));
        }
        say("rule", json!(rule.as_str()));
        if let Some(sandbox) = sandbox {
            say("sandbox", json!(sandbox));
        }
        say("request_id", json!(id));
        say("hint", json!(hint(*reason)));
        body.into()
    }
}

/// One mapping for every door.
pub fn status_of(reason: Reason) -> StatusCode {
    match reason {
        Reason::RegistryUnavailable | Reason::CircuitOpen => StatusCode::SERVICE_UNAVAILABLE,
        Reason::RateLimited | Reason::GitRate => StatusCode::TOO_MANY_REQUESTS,
        Reason::NameMismatch => StatusCode::MISDIRECTED_REQUEST,
        Reason::Framing | Reason::BadName | Reason::GitMalformed => StatusCode::BAD_REQUEST,
        Reason::TooLarge | Reason::GitSize => StatusCode::PAYLOAD_TOO_LARGE,
        Reason::TlsUpstream | Reason::ConnectFailed => StatusCode::BAD_GATEWAY,
        Reason::UpstreamTimeout => StatusCode::GATEWAY_TIMEOUT,
        Reason::ClientTimeout => StatusCode::REQUEST_TIMEOUT,
        Reason::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        Reason::IdentityUnknown
        | Reason::IdentityMismatch
        | Reason::IdentityExpired
        | Reason::HostDenied
        | Reason::PortDenied
        | Reason::MethodDenied
        | Reason::PathDenied
        | Reason::ProgramDenied
        | Reason::GithubRule
        | Reason::RegoDenied
        | Reason::RegoError
        | Reason::AskDenied
        | Reason::AskTimeout
        | Reason::AskUnattended
        | Reason::IpLiteral
        | Reason::AddressClass
        | Reason::TlsClient
        | Reason::TlsDistrusted
        | Reason::NotTls
        | Reason::ClientLeft
        | Reason::GitRepo
        | Reason::GitDelete
        | Reason::GitProtected
        | Reason::GitNamespace
        | Reason::GitPath
        | Reason::SecretFound
        | Reason::Canary
        | Reason::ScanBudget
        | Reason::Injection
        | Reason::PlaceholderMisused
        | Reason::CredentialMissing
        | Reason::DnsType
        | Reason::ToolDenied
        | Reason::ToolChanged => StatusCode::FORBIDDEN,
    }
}

/// What to do about it, for the agent and whoever reads over its shoulder.
fn hint(reason: Reason) -> &'static str {
    match reason {
        Reason::RateLimited | Reason::CircuitOpen | Reason::GitRate => {
            "Wait for retry_after seconds before the next request."
        }
        Reason::IdentityUnknown
        | Reason::IdentityExpired
        | Reason::IdentityMismatch
        | Reason::RegistryUnavailable => "Only the operator can change this.",
        Reason::GitSize => "Split the push, use Git LFS, or ask the operator for a larger limit.",
        Reason::NameMismatch => {
            "Ask for one name in the tunnel, the TLS hello and the request's host."
        }
        Reason::Framing | Reason::BadName => "Send the request in one plain, standard form.",
        Reason::ConnectFailed | Reason::TlsUpstream | Reason::UpstreamTimeout => {
            "The rules allow this request; the other side failed. It may be worth another try."
        }
        _ => "The operator can see it with 'palisade why' and this request_id.",
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn id() -> RequestId {
        RequestId::new(1, 2)
    }

    async fn read(refusal: &Refusal) -> (StatusCode, http::HeaderMap, Value) {
        let sandbox = SandboxId::parse("fix-1").unwrap();
        let (head, body) = refusal.answer(Some(&sandbox), id()).into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let value = serde_json::from_slice(&bytes).unwrap();
        (head.status, head.headers, value)
    }

    #[tokio::test]
    async fn a_denial_says_reason_rule_and_request() {
        let denial = Denial::new(Reason::HostDenied, "allowlist").because("for the operator");
        let (status, headers, body) = read(&Refusal::new(Stage::Policy, denial)).await;
        assert_eq!(status, 403);
        assert_eq!(headers[BLOCKED], "true");
        assert_eq!(headers[REQUEST_ID], id().to_string());
        assert_eq!(body["reason"], "host_denied");
        assert_eq!(body["rule"], "allowlist");
        assert_eq!(body["request_id"], id().to_string());
        assert!(!body.to_string().contains("for the operator"));
    }

    #[tokio::test]
    async fn what_git_shows_a_person_is_text() {
        let denial = Denial::new(Reason::GitRepo, "git:repositories")
            .saying("Repo not authorized: o/r")
            .because("for the operator");
        let refusal = Refusal::new(Stage::Git, denial).in_text();
        let (head, body) = refusal.answer(None, id()).into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = str::from_utf8(&bytes).unwrap();
        assert_eq!(head.status, 403);
        assert_eq!(head.headers[CONTENT_TYPE], "text/plain; charset=utf-8");
        assert!(text.starts_with("Repo not authorized: o/r\n"), "{text}");
        assert!(text.contains("git_repo") && text.contains(&id().to_string()));
        assert!(!text.contains("for the operator"));
    }

    #[tokio::test]
    async fn a_push_that_is_too_large_keeps_the_keys_clients_look_for() {
        let (bytes, limit) = (250_000_000, 209_715_200);
        let denial = size::denial(bytes, limit).with(Detail::Size { bytes, limit });
        let (status, _, body) = read(&Refusal::new(Stage::Git, denial)).await;
        assert_eq!(status, 413);
        assert_eq!(body["error"], "Push size exceeds limit");
        assert_eq!(
            body["details"],
            json!({
                "push_size_bytes": 250_000_000,
                "push_size_human": "238.4 MB",
                "limit_bytes": 209_715_200,
                "limit_human": "200 MB",
            })
        );
        assert_eq!(body["guidance"]["options"].as_array().unwrap().len(), 3);
        assert_eq!(
            (&body["reason"], &body["rule"]),
            (&json!("git_size"), &json!("git:size"))
        );
        assert_eq!(body["request_id"], id().to_string());
    }

    #[tokio::test]
    async fn a_push_is_refused_where_git_looks_and_as_json_where_it_does_not() {
        let refusal = |report| {
            let denial = Denial::new(Reason::GitProtected, "git:protected:main")
                .saying("refs/heads/main is protected.")
                .because("for the operator");
            Refusal::new(Stage::Git, denial).of_push(RejectedPush {
                capabilities: Capabilities {
                    report,
                    side_band: true,
                    ..Capabilities::default()
                },
                refs: vec![(
                    b"refs/heads/main".to_vec(),
                    "palisade: git_protected".to_owned(),
                )],
                others: Vec::new(),
            })
        };
        let (head, body) = refusal(true).answer(None, id()).into_parts();
        assert_eq!(head.status, 200);
        assert_eq!(head.headers[CONTENT_TYPE], report::CONTENT_TYPE);
        assert_eq!(head.headers[BLOCKED], "true");
        let bytes = body.collect().await.unwrap().to_bytes();
        let text = String::from_utf8_lossy(&bytes);
        for part in [
            "\u{2}palisade: refs/heads/main is protected.\n",
            "git_protected, rule git:protected:main, request ",
            &id().to_string(),
            "ng refs/heads/main palisade: git_protected\n",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("for the operator"));
        let (status, _, body) = read(&refusal(false)).await;
        assert_eq!(status, 403);
        assert_eq!(body["reason"], "git_protected");
    }

    #[tokio::test]
    async fn a_client_of_the_github_api_finds_the_reason_where_it_looks() {
        let denial = Denial::new(Reason::GithubRule, "github:merge").saying("Not so.");
        let (_, _, body) = read(&Refusal::new(Stage::Policy, denial)).await;
        assert_eq!(
            (&body["message"], &body["error"]),
            (&json!("Not so."), &json!("Not so."))
        );
        let denial = Denial::new(Reason::HostDenied, "allowlist");
        let (_, _, body) = read(&Refusal::new(Stage::Policy, denial)).await;
        assert_eq!(body.get("message"), None);
    }

    #[tokio::test]
    async fn the_bodies_of_the_program_before_us_keep_their_keys() {
        let denial = Denial::new(Reason::RateLimited, "rate_limits");
        let retry = |after| Detail::Retry {
            upstream: "x.example".to_owned(),
            after,
        };
        let refusal = Refusal::new(Stage::Rate, denial.with(retry(1)));
        let (status, headers, body) = read(&refusal).await;
        assert_eq!(
            (status.as_u16(), &headers[RETRY_AFTER]),
            (429, &HeaderValue::from(1))
        );
        for (key, value) in [
            ("error", json!("Rate limit exceeded")),
            ("container_id", json!("fix-1")),
            ("upstream", json!("x.example")),
            ("retry_after", json!(1)),
        ] {
            assert_eq!(body[key], value);
        }

        let denial = Denial::new(Reason::CircuitOpen, "circuit_breakers");
        let refusal = Refusal::new(Stage::Breaker, denial.with(retry(17)));
        let (status, _, body) = read(&refusal).await;
        assert_eq!(status, 503);
        assert_eq!(body["error"], "Service temporarily unavailable");
        assert_eq!(body["reason"], "circuit_breaker_open");
        assert_eq!(body["retry_after"], 17);
    }
}
