mod examples;

use std::path::Path;
use std::sync::Mutex;

use async_trait::async_trait;
use config::bundle::BundleReadError;
use policy::id::SandboxId;
use policy::reason::Reason;
use serde_json::{Value, json};

use super::*;

/// Audit sink that keeps its records in memory.
#[derive(Debug, Default)]
pub(crate) struct MemoryAudit(pub(crate) Mutex<Vec<AuditEvent>>);

#[async_trait]
impl AuditSink for MemoryAudit {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.lock().unwrap().push(*event);
        Ok(())
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.0.lock().unwrap().push(*event);
    }
}

impl MemoryAudit {
    pub(crate) fn take(&self) -> Vec<AuditEvent> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// A policy snapshot of bundles, each with its entrypoint, its further settings and its policy.
pub(crate) fn policy_snapshot(section: &str, bundles: &[(&str, &str, &str)]) -> PolicySnapshot {
    let dir = tempfile::tempdir().unwrap();
    load(dir.path(), section, bundles).unwrap()
}

fn load(
    root: &Path,
    section: &str,
    bundles: &[(&str, &str, &str)],
) -> Result<PolicySnapshot, BundleReadError> {
    let section = if section.contains("timeout") {
        section.to_owned()
    } else {
        format!("  timeout: 5s\n{section}")
    };
    let mut file = format!(
        "version: '1.0'\ntools:\n- {{name: fs, command: ['true']}}\npolicies:\n{section}  bundles:\n"
    );
    for (number, (entrypoint, settings, text)) in bundles.iter().enumerate() {
        let dir = root.join(format!("b{number}"));
        std::fs::create_dir_all(&dir).unwrap();
        let package = entrypoint.replace('/', ".");
        std::fs::write(
            dir.join("policy.rego"),
            format!("package {package}\n{text}"),
        )
        .unwrap();
        file += &format!(
            "  - {{id: b{number}, path: b{number}, entrypoint: {entrypoint}{settings}}}\n"
        );
    }
    if bundles.is_empty() {
        file += "    []\n";
    }
    let path = root.join("palisade.yaml");
    std::fs::write(&path, file).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    PolicySnapshot::load(Arc::new(settings))
}

pub(crate) fn governance(snapshot: PolicySnapshot) -> (Governance, Arc<MemoryAudit>) {
    governance_with_questions(snapshot, Questions::default())
}

/// A governance whose questions go to `questions`.
pub(crate) fn governance_with_questions(
    snapshot: PolicySnapshot,
    questions: Questions,
) -> (Governance, Arc<MemoryAudit>) {
    let audit_log = Arc::new(MemoryAudit::default());
    let metrics = Metrics::default();
    let contexts = Contexts::new(&metrics);
    let audit = Arc::clone(&audit_log) as Arc<dyn AuditSink>;
    let policy = Arc::new(CurrentPolicy::new(snapshot));
    let governance = Governance::new(policy, audit, metrics, contexts, questions);
    (governance, audit_log)
}

/// Replaces the policy, as a reload does.
pub(crate) fn replace_policy(governance: &Governance, snapshot: PolicySnapshot) {
    let had_bundle = !governance.has_no_policy();
    governance.0.policy.replace(Arc::new(snapshot));
    governance.apply_reload(had_bundle);
}

/// A message for a policy.
struct Message {
    moment: Moment,
    method: &'static str,
    params: Option<String>,
    result: Option<String>,
    error: Option<String>,
}

fn call(params: impl ToString) -> Message {
    Message {
        moment: Moment::Before,
        method: "tools/call",
        params: Some(params.to_string()),
        result: None,
        error: None,
    }
}

fn answer(result: impl ToString) -> Message {
    Message {
        moment: Moment::After,
        result: Some(result.to_string()),
        ..call(json!({"name": "t", "arguments": {}}))
    }
}

async fn ruling_of(governance: &Governance, message: &Message) -> Ruling {
    let raw = |text: &Option<String>| {
        text.clone()
            .map(|text| RawValue::from_string(text).unwrap())
    };
    let (params, result, error) = (
        raw(&message.params),
        raw(&message.result),
        raw(&message.error),
    );
    let caller = McpCaller {
        agent: "anna".to_owned(),
        session: "s1".to_owned(),
        sandbox: Some(SandboxId::parse("box").unwrap()),
    };
    let governed = GovernedMessage {
        moment: message.moment,
        request: RequestId::new(1, 2),
        caller: &caller,
        tool: "fs",
        method: message.method,
        params: params.as_deref(),
        result: result.as_deref(),
        error: error.as_deref(),
        call_decision: None,
        execution: None,
    };
    governance.decide(&governed, &HoldTerms::default()).await
}

/// The ruling of one bundle with `policy` on a message.
async fn ruling_by_policy(policy: &str, message: &Message) -> Ruling {
    let (governance, _) = governance(policy_snapshot("", &[("mcp/authz", "", policy)]));
    ruling_of(&governance, message).await
}

#[track_caller]
fn blocked(ruling: Ruling, reason: Reason) -> Denial {
    match ruling {
        Ruling::Block(denial) => {
            assert_eq!(denial.reason, reason, "{denial:?}");
            denial
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn modified(ruling: Ruling) -> String {
    match ruling {
        Ruling::Modify(new) => new.get().to_owned(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn message_without_bundles_passes_and_is_recorded() {
    let (governance, audit_log) = governance(policy_snapshot("", &[]));
    assert!(governance.has_no_policy());
    // The message is not parsed, so a duplicate key does not matter.
    let ruling = ruling_of(&governance, &call(r#"{"a":1,"a":2}"#)).await;
    assert!(matches!(ruling, Ruling::Pass), "{ruling:?}");
    let events = audit_log.take();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].kind, Kind::Mcp);
    assert_eq!(events[0].verdict, Some(VerdictKind::Allow));
    assert_eq!(events[0].host.as_deref(), Some("fs"));
    assert_eq!(events[0].stage.as_deref(), Some("before"));
}

#[tokio::test]
async fn policy_input_has_every_field() {
    let policy = r#"
decision := {"action": "block", "reason": json.marshal(input)}"#;
    let message = call(r#"{"name":"gh__search","arguments":{"q":"x"},"_meta":{"k":1}}"#);
    let denial = blocked(ruling_by_policy(policy, &message).await, Reason::RegoDenied);
    let input: Value = serde_json::from_str(&denial.message).unwrap();
    assert_eq!(
        input,
        json!({
            "kind": "mcp", "moment": "before", "method": "tools/call",
            "params": {"name": "gh__search", "arguments": {"q": "x"}, "_meta": {"k": 1}},
            "tool_id": "fs", "agent_id": "anna", "session_id": "s1", "sandbox": "box",
            "name": "search", "outer_name": "gh__search", "result": {}, "error": {},
            "before": {}, "execution": {},
        })
    );
    for (params, wanted) in [
        ("[1]", json!({"_array": [1]})),
        ("\"x\"", json!({"_value": "x"})),
        ("null", json!({})),
    ] {
        let policy = "decision := {\"action\": \"block\", \"reason\": json.marshal(input.params)}";
        let denial = blocked(
            ruling_by_policy(policy, &call(params)).await,
            Reason::RegoDenied,
        );
        let found: Value = serde_json::from_str(&denial.message).unwrap();
        assert_eq!(found, wanted, "{params}");
    }
}

#[tokio::test]
async fn wrapped_call_is_evaluated_by_its_inner_call() {
    let policy = r#"
default allow := true
allow := false if { input.name == "delete"; input.params.arguments.path == "/" }
reason := input.outer_name"#;
    let inner = json!({"path": "/"});
    for (params, outer) in [
        (json!({"name": "delete", "arguments": inner}), "delete"),
        (
            json!({"name": "fs__delete", "arguments": inner}),
            "fs__delete",
        ),
        (
            json!({"name": "mcp-exec", "arguments": {"name": "delete", "arguments": inner}}),
            "mcp-exec",
        ),
        (
            json!({"name": "x__mcp-exec", "arguments": {"name": "fs__delete", "arguments": inner.to_string()}}),
            "x__mcp-exec",
        ),
        (
            json!({"name": "mcp-exec", "arguments": {"name": "mcp-exec", "arguments": {"name": "delete", "arguments": inner}}}),
            "mcp-exec",
        ),
    ] {
        let ruling = ruling_by_policy(policy, &call(&params)).await;
        let denial = blocked(ruling, Reason::RegoDenied);
        assert_eq!(denial.message, outer, "{params}");
    }
    let fine =
        json!({"name": "mcp-exec", "arguments": {"name": "delete", "arguments": {"path": "/tmp"}}});
    assert!(matches!(
        ruling_by_policy(policy, &call(fine)).await,
        Ruling::Pass
    ));
}

#[tokio::test]
async fn ambiguous_message_is_refused() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let wrapped = |inner: Value| json!({"name": "mcp-exec", "arguments": inner}).to_string();
    let mut nested = json!({"name": "t"});
    for _ in 0..6 {
        nested = json!({"name": "mcp-exec", "arguments": nested});
    }
    for params in [
        r#"{"name":"safe","name":"delete"}"#,
        r#"{"name":"t","arguments":{"a":{"b":1,"b":2}}}"#,
        r#"{"name":"t","Name":"delete"}"#,
        "{\"name\":\"t\",\"argument\u{17f}\":{}}",
        r#"{"name":"t","arguments":{"x":"\ud800"}}"#,
        r#"{"name":"t","arguments":{"x":1e999}}"#,
        &deep,
        &wrapped(json!({"arguments": {}})),
        &wrapped(json!("text")),
        &wrapped(json!({"name": "t", "arguments": "{\"a\":1,\"a\":2}"})),
        &wrapped(json!({"name": "t", "NAME": "u"})),
        &nested.to_string(),
    ] {
        let ruling = ruling_by_policy("allow := true", &call(params)).await;
        let denial = blocked(ruling, Reason::RegoError);
        assert_eq!(denial.rule.as_str(), "mcp:form", "{params}");
    }
}

#[tokio::test]
async fn undefined_failing_and_asking_policies_block() {
    for (policy, reason) in [
        ("allow := true if input.no", Reason::RegoDenied),
        ("allow := false", Reason::RegoDenied),
        ("decision := {\"action\": \"ask\"}", Reason::AskUnattended),
        ("decision := 1", Reason::RegoError),
        (
            "default allow := true\nallow := false if to_number(input.method) > 1",
            Reason::RegoError,
        ),
        ("action := \"redact\"", Reason::RegoDenied),
        (
            "decision := {\"action\": \"redact\", \"outputs\": {\"redaction_rules\": {\"fields\": [\"params.x\"]}}}",
            Reason::RegoDenied,
        ),
    ] {
        let ruling = ruling_by_policy(policy, &call(json!({"name": "t"}))).await;
        let denial = blocked(ruling, reason);
        assert_eq!(denial.rule.as_str(), "rego:b0", "{policy}");
    }
}

#[tokio::test]
async fn policy_timeout_blocks() {
    let slow = "allow if { some a in numbers.range(1, 3000); some b in numbers.range(1, 3000); a * b == 7919 * 7919 }";
    let snapshot = policy_snapshot("  timeout: 20ms\n", &[("mcp/authz", "", slow)]);
    let (governance, _) = governance(snapshot);
    let denial = blocked(
        ruling_of(&governance, &call(json!({"name": "t"}))).await,
        Reason::RegoError,
    );
    assert!(denial.evidence.unwrap().contains("time limit"));
    let mut registry = prometheus_client::registry::Registry::default();
    governance.metrics().register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    assert!(
        text.contains(r#"polis_sidecar_policy_failures_total{bundle_id="b0",failure="timeout"} 1"#),
        "{text}"
    );
}

#[tokio::test]
async fn fail_open_passes_failures_but_not_refusals() {
    let (open, audit_log) = governance(policy_snapshot(
        "  fail_open: true\n",
        &[("mcp/authz", "", "decision := 1")],
    ));
    assert!(matches!(
        ruling_of(&open, &call(json!({"name": "t"}))).await,
        Ruling::Pass
    ));
    let logged = audit_log.take();
    assert_eq!(logged[0].event.as_deref(), Some("policy_logged"));
    assert_eq!(logged[0].reason, Some(Reason::RegoError));
    for policy in ["allow := true if input.no", "action := \"redact\""] {
        let (open, _) = governance(policy_snapshot(
            "  fail_open: true\n",
            &[("mcp/authz", "", policy)],
        ));
        let ruling = ruling_of(&open, &call(json!({"name": "t"}))).await;
        blocked(ruling, Reason::RegoDenied);
    }
    // An agent must not be able to make a policy fail.
    let (open, _) = governance(policy_snapshot(
        "  fail_open: true\n",
        &[("mcp/authz", "", "allow := false")],
    ));
    blocked(
        ruling_of(&open, &call(r#"{"a":1,"a":2}"#)).await,
        Reason::RegoError,
    );
}

#[tokio::test]
async fn bundle_in_log_mode_changes_nothing() {
    let redact =
        "decision := {\"action\": \"redact\", \"outputs\": {\"modified_data\": {\"x\": 1}}}";
    let (governance, audit_log) = governance(policy_snapshot(
        "",
        &[
            ("mcp/authz", ", mode: log", "allow := false"),
            ("mcp/authz", ", mode: log", redact),
            ("mcp/authz", "", "allow := true"),
        ],
    ));
    let ruling = ruling_of(&governance, &call(json!({"name": "t"}))).await;
    assert!(matches!(ruling, Ruling::Pass), "{ruling:?}");
    let events = audit_log.take();
    let recorded: Vec<_> = events
        .iter()
        .map(|event| {
            (
                event.event.as_deref(),
                event.bundle.as_deref().unwrap(),
                event.verdict.unwrap(),
            )
        })
        .collect();
    assert_eq!(
        recorded,
        [
            (Some("policy_logged"), "b0", VerdictKind::Deny),
            (Some("policy_logged"), "b1", VerdictKind::Modify),
            (None, "b2", VerdictKind::Allow),
        ]
    );
}

#[tokio::test]
async fn each_bundle_evaluates_the_changes_of_earlier_bundles() {
    let redact = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["arguments.key"]}}}"#;
    let look = r#"default allow := false
allow if input.params.arguments.key == "[redacted]""#;
    let bundles = [("mcp/authz", "", redact), ("mcp/authz", "", look)];
    let (governance, audit_log) = governance(policy_snapshot("", &bundles));
    let message =
        call(r#"{ "name":"t", "arguments":{"key":"k","n":123456789012345678901234567890} }"#);
    assert_eq!(
        modified(ruling_of(&governance, &message).await),
        r#"{ "name":"t", "arguments":{"key":"[redacted]","n":123456789012345678901234567890} }"#
    );
    let events = audit_log.take();
    assert_eq!(events[0].verdict, Some(VerdictKind::Modify));
    assert!(
        !serde_json::to_string(&events)
            .unwrap()
            .contains("[redacted]")
    );
}

#[tokio::test]
async fn redaction_without_effect_is_a_pass() {
    let redact = |from: &str, to: &str| {
        format!(
            r#"decision := {{"action": "redact", "outputs": {{"redaction_rules": {{"replacements": {{"{from}": "{to}"}}}}}}}}"#
        )
    };
    let (change, revert) = (redact("one", "two"), redact("two", "one"));
    let unchanged =
        r#"decision := {"action": "redact", "outputs": {"modified_data": input.params}}"#;
    let message = call(r#"{ "name":"t", "arguments":{"x":"one"} }"#);
    for bundles in [
        &[("mcp/authz", "", redact("three", "four"))][..],
        &[("mcp/authz", "", unchanged.to_owned())],
        // The second bundle reverts the change of the first.
        &[("mcp/authz", "", change.clone()), ("mcp/authz", "", revert)],
        &[
            ("mcp/authz", ", mode: log", redact("three", "four")),
            ("mcp/authz", "", "allow := true".to_owned()),
        ],
    ] {
        let bundles: Vec<_> = bundles
            .iter()
            .map(|(entrypoint, settings, text)| (*entrypoint, *settings, text.as_str()))
            .collect();
        let (governance, audit_log) = governance(policy_snapshot("", &bundles));
        let ruling = ruling_of(&governance, &message).await;
        assert!(matches!(ruling, Ruling::Pass), "{bundles:?}: {ruling:?}");
        let events = audit_log.take();
        assert_eq!(events.len(), 1, "{bundles:?}: {events:?}");
        assert_eq!(events[0].verdict, Some(VerdictKind::Allow));
    }
    let changed = modified(ruling_by_policy(&change, &message).await);
    assert_eq!(changed, r#"{ "name":"t", "arguments":{"x":"two"} }"#);
}

#[tokio::test]
async fn arguments_of_a_wrapped_call_are_redacted_in_place() {
    let policy = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["arguments.key"], "replacements": {"s3cret": "*"}}}}"#;
    for (params, wanted) in [
        (
            r#"{"name":"mcp-exec","arguments":{"name":"t", "arguments":{"key":"k","x":"a s3cret"}},"_meta":{"y":"s3cret"}}"#,
            r#"{"name":"mcp-exec","arguments":{"name":"t", "arguments":{"key":"[redacted]","x":"a *"}},"_meta":{"y":"*"}}"#,
        ),
        (
            r#"{"name":"mcp-exec","arguments":{"name":"t", "arguments":"{\"key\":1,\"n\":1.00}"}}"#,
            r#"{"name":"mcp-exec","arguments":{"name":"t", "arguments":"{\"key\":\"[redacted]\",\"n\":1.00}"}}"#,
        ),
    ] {
        assert_eq!(
            modified(ruling_by_policy(policy, &call(params)).await),
            wanted
        );
    }
}

#[tokio::test]
async fn results_and_errors_are_redacted() {
    let policy = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"[a-z]+@example\\.com": "<mail>"}}}}"#;
    let result = r#"{"content":[{"type":"text","text":"anna@example.com"}],"big":1e3}"#;
    let wanted = r#"{"content":[{"type":"text","text":"<mail>"}],"big":1e3}"#;
    assert_eq!(
        modified(ruling_by_policy(policy, &answer(result)).await),
        wanted
    );
    let error = Message {
        result: None,
        error: Some(r#"{"code":-1,"message":"no anna@example.com"}"#.to_owned()),
        ..answer("null")
    };
    let wanted = r#"{"code":-1,"message":"no <mail>"}"#;
    assert_eq!(modified(ruling_by_policy(policy, &error).await), wanted);
    // A large result, on the blocking pool.
    let large = format!(r#"{{"text":"{} anna@example.com"}}"#, "x".repeat(200_000));
    let wanted = large.replace("anna@example.com", "<mail>");
    assert_eq!(
        modified(ruling_by_policy(policy, &answer(large)).await),
        wanted
    );
}

#[tokio::test]
async fn elicitations_have_their_own_entrypoint() {
    let ask = Message {
        moment: Moment::Elicitation,
        method: "elicitation/create",
        ..call(json!({"message": "your password?"}))
    };
    let no = "allow := false";
    let (calls, _) = governance(policy_snapshot("", &[("mcp/authz", "", no)]));
    assert!(matches!(ruling_of(&calls, &ask).await, Ruling::Pass));
    let (questions, _) = governance(policy_snapshot("", &[("mcp/elicitation", "", no)]));
    blocked(ruling_of(&questions, &ask).await, Reason::RegoDenied);
    assert!(matches!(
        ruling_of(&questions, &call("{}")).await,
        Ruling::Pass
    ));
    assert!(!questions.has_no_policy());
}

#[tokio::test]
async fn replaced_policy_applies_at_once() {
    let (governance, _) = governance(policy_snapshot("", &[("mcp/authz", "", "allow := true")]));
    assert!(matches!(
        ruling_of(&governance, &call("{}")).await,
        Ruling::Pass
    ));
    replace_policy(
        &governance,
        policy_snapshot("", &[("mcp/authz", "", "allow := false")]),
    );
    blocked(
        ruling_of(&governance, &call("{}")).await,
        Reason::RegoDenied,
    );
    replace_policy(&governance, policy_snapshot("", &[]));
    assert!(governance.has_no_policy());
}

#[test]
fn missing_optional_bundle_is_skipped_and_invalid_one_fails() {
    let dir = tempfile::tempdir().unwrap();
    let broken = [("mcp/authz", "", "allow := http.send({})")];
    assert!(matches!(
        load(dir.path(), "", &broken),
        Err(BundleReadError::Invalid { .. })
    ));
    for (required, is_fine) in [("false", true), ("true", false)] {
        let path = dir.path().join("palisade.yaml");
        let text = format!(
            "version: '1.0'\npolicies:\n  bundles:\n  - {{id: b, path: nowhere, entrypoint: mcp/authz, required: {required}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        let settings = config::load(Some(&path), &|_| None).unwrap();
        let loaded = PolicySnapshot::load(Arc::new(settings));
        assert_eq!(loaded.is_ok(), is_fine);
    }
}
