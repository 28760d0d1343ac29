//! Refusal responses: JSON, plain text for git, or a push report.
//!
//! Every form has the same reason code and request id. The JSON keeps the keys of Palisade's
//! predecessor, because clients read them.

use http::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{HeaderName, Response, StatusCode};
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::verdict::{Denial, Detail};
use serde_json::{Map, Value, json};

use crate::body::{self, MessageBody};
use crate::git_protocol::push::PushCapabilities;
use crate::git_protocol::{pkt_line, report, size};
use crate::stage::Stage;

/// Marks a response as a refusal of the gate.
pub const BLOCKED: HeaderName = HeaderName::from_static("x-palisade-blocked");

/// The request id, for `palisade why`.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-palisade-request-id");

/// A refused request.
#[derive(Debug)]
pub struct RequestRefusal {
    /// The decision.
    pub denial: Denial,
    /// The stage that refused.
    pub stage: Stage,
    /// The form of the response.
    pub form: Form,
}

/// The form in which a client reads a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// JSON.
    Json,
    /// Plain text, the only form that git shows to its user.
    Text,
    /// Git's report-status, ref by ref.
    Push(Box<RejectedPush>),
}

/// A push that was rejected as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedPush {
    /// The capabilities of the client, which determine the form of the report.
    pub capabilities: PushCapabilities,
    /// Each ref, and why it was rejected.
    pub refs: Vec<(Vec<u8>, String)>,
    /// Messages besides the first reason.
    pub further_messages: Vec<String>,
}

impl RequestRefusal {
    /// A refusal in JSON.
    pub fn new(stage: Stage, denial: Denial) -> Self {
        Self {
            denial,
            stage,
            form: Form::Json,
        }
    }

    /// Changes the form to plain text.
    #[must_use]
    pub fn as_plain_text(mut self) -> Self {
        self.form = Form::Text;
        self
    }

    /// Changes the form to a push report.
    #[must_use]
    pub fn as_push_report(mut self, rejected: RejectedPush) -> Self {
        self.form = Form::Push(Box::new(rejected));
        self
    }

    /// Whether the connection must be closed.
    fn closes_connection(&self) -> bool {
        matches!(self.denial.reason, Reason::NameMismatch | Reason::Framing)
    }

    /// Builds the HTTP response.
    pub fn answer(&self, sandbox: Option<&SandboxId>, id: RequestId) -> Response<MessageBody> {
        let json = || {
            let text = self.body(sandbox, id).to_string() + "\n";
            ("application/json", text.into_bytes(), self.status())
        };
        let (kind, bytes, status) = match &self.form {
            Form::Text => {
                let text = self.text(id).into_bytes();
                ("text/plain; charset=utf-8", text, self.status())
            }
            Form::Push(rejected) => match self.report(rejected, id) {
                // With any other status, git reports that everything is up to date.
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
        if self.closes_connection() {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }

    /// The response in the git protocol: a report if the client expects one, otherwise an ERR
    /// line, which git shows before it exits (gitprotocol-pack).
    pub fn to_git_protocol(&self, id: RequestId) -> Vec<u8> {
        if let Form::Push(rejected) = &self.form
            && let Some(report) = self.report(rejected, id)
        {
            return report;
        }
        let mut out = Vec::new();
        let text = self.text(id);
        pkt_line::write(&mut out, format!("ERR {}", text.trim_end()).as_bytes());
        out
    }

    /// The HTTP status of every form but the push report.
    fn status(&self) -> StatusCode {
        status_of(self.denial.reason)
    }

    /// The response as a push report; `None` if the client does not support reports.
    fn report(&self, rejected: &RejectedPush, id: RequestId) -> Option<Vec<u8>> {
        let Denial {
            reason,
            rule,
            message,
            ..
        } = &self.denial;
        let mut sentences = vec![message.clone()];
        let further = rejected
            .further_messages
            .iter()
            .filter(|other| *other != message);
        sentences.extend(further.cloned());
        sentences.push(format!(
            "nothing was pushed: {}, rule {rule}, request {id}",
            reason.code()
        ));
        sentences.push(hint(*reason).to_owned());
        let refs = rejected.refs.iter();
        let refs = refs.map(|(name, why)| (name.as_slice(), why.as_str()));
        report::write_rejection(rejected.capabilities, &sentences, refs)
    }

    /// The response as plain text.
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

    /// The response as JSON.
    pub fn body(&self, sandbox: Option<&SandboxId>, id: RequestId) -> Value {
        let Denial {
            reason,
            rule,
            message,
            ..
        } = &self.denial;
        let mut body = Map::new();
        let mut insert = |key: &str, value: Value| {
            body.insert(key.to_owned(), value);
        };
        match (self.denial.detail.as_deref(), reason) {
            (Some(Detail::Retry { upstream, after }), Reason::RateLimited) => {
                insert("error", json!("Rate limit exceeded"));
                insert("container_id", json!(sandbox));
                insert("upstream", json!(upstream));
                insert("retry_after", json!(after));
                insert("reason", json!(reason.code()));
            }
            (Some(Detail::Retry { upstream, after }), Reason::CircuitOpen) => {
                insert("error", json!("Service temporarily unavailable"));
                // The predecessor's reason; Palisade's own is in `code`.
                insert("reason", json!("circuit_breaker_open"));
                insert("code", json!(reason.code()));
                insert("upstream", json!(upstream));
                insert("retry_after", json!(after));
            }
            (Some(Detail::Size { bytes, limit }), _) => {
                insert("error", json!("Push size exceeds limit"));
                for (key, value) in size::details(*bytes, *limit) {
                    insert(key, value);
                }
                insert("reason", json!(reason.code()));
            }
            (Some(Detail::Retry { .. } | Detail::Refs(_)) | None, _) => {
                insert("error", json!(message));
                insert("reason", json!(reason.code()));
            }
        }
        if matches!(reason, Reason::GithubRule | Reason::GitRepo) {
            // Clients of the forges' APIs and git-lfs read errors only from `message`.
            insert("message", json!(message));
        }
        insert("rule", json!(rule.as_str()));
        if let Some(sandbox) = sandbox {
            insert("sandbox", json!(sandbox));
        }
        insert("request_id", json!(id));
        insert("hint", json!(hint(*reason)));
        body.into()
    }
}

/// The HTTP status of a reason, the same for every listener.
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

/// A hint about what the agent or its user can do.
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
        Reason::NameMismatch => "Use the same host in CONNECT, the TLS SNI and the Host header.",
        Reason::Framing | Reason::BadName => "Send a standard request with an unambiguous form.",
        Reason::ConnectFailed | Reason::TlsUpstream | Reason::UpstreamTimeout => {
            "The rules allow this request, but the upstream failed. Try again later."
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

    async fn read(refusal: &RequestRefusal) -> (StatusCode, http::HeaderMap, Value) {
        let sandbox = SandboxId::parse("fix-1").unwrap();
        let (head, body) = refusal.answer(Some(&sandbox), id()).into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let value = serde_json::from_slice(&bytes).unwrap();
        (head.status, head.headers, value)
    }

    #[tokio::test]
    async fn denial_has_reason_rule_and_request_id() {
        let denial = Denial::new(Reason::HostDenied, "allowlist").with_evidence("for the operator");
        let (status, headers, body) = read(&RequestRefusal::new(Stage::Policy, denial)).await;
        assert_eq!(status, 403);
        assert_eq!(headers[BLOCKED], "true");
        assert_eq!(headers[REQUEST_ID], id().to_string());
        assert_eq!(body["reason"], "host_denied");
        assert_eq!(body["rule"], "allowlist");
        assert_eq!(body["request_id"], id().to_string());
        assert!(!body.to_string().contains("for the operator"));
    }

    #[tokio::test]
    async fn git_refusal_is_plain_text() {
        let denial = Denial::new(Reason::GitRepo, "git:repositories")
            .with_message("Repo not authorized: o/r")
            .with_evidence("for the operator");
        let refusal = RequestRefusal::new(Stage::Git, denial).as_plain_text();
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
    async fn oversized_push_keeps_the_keys_that_clients_read() {
        let (bytes, limit) = (250_000_000, 209_715_200);
        let denial = size::denial(bytes, limit).with_detail(Detail::Size { bytes, limit });
        let (status, _, body) = read(&RequestRefusal::new(Stage::Git, denial)).await;
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
    async fn push_refusal_is_a_report_or_json_by_capability() {
        let refusal = |report| {
            let denial = Denial::new(Reason::GitProtected, "git:protected:main")
                .with_message("refs/heads/main is protected.")
                .with_evidence("for the operator");
            RequestRefusal::new(Stage::Git, denial).as_push_report(RejectedPush {
                capabilities: PushCapabilities {
                    report,
                    side_band: true,
                    ..PushCapabilities::default()
                },
                refs: vec![(
                    b"refs/heads/main".to_vec(),
                    "palisade: git_protected".to_owned(),
                )],
                further_messages: Vec::new(),
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
    async fn github_refusal_has_its_reason_in_message() {
        let denial = Denial::new(Reason::GithubRule, "github:merge").with_message("Not so.");
        let (_, _, body) = read(&RequestRefusal::new(Stage::Policy, denial)).await;
        assert_eq!(
            (&body["message"], &body["error"]),
            (&json!("Not so."), &json!("Not so."))
        );
        let denial = Denial::new(Reason::HostDenied, "allowlist");
        let (_, _, body) = read(&RequestRefusal::new(Stage::Policy, denial)).await;
        assert_eq!(body.get("message"), None);
    }

    #[tokio::test]
    async fn rate_limit_and_breaker_bodies_keep_the_predecessors_keys() {
        let denial = Denial::new(Reason::RateLimited, "rate_limits");
        let retry = |after| Detail::Retry {
            upstream: "x.example".to_owned(),
            after,
        };
        let refusal = RequestRefusal::new(Stage::Rate, denial.with_detail(retry(1)));
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
        let refusal = RequestRefusal::new(Stage::Breaker, denial.with_detail(retry(17)));
        let (status, _, body) = read(&refusal).await;
        assert_eq!(status, 503);
        assert_eq!(body["error"], "Service temporarily unavailable");
        assert_eq!(body["reason"], "circuit_breaker_open");
        assert_eq!(body["retry_after"], 17);
    }
}
