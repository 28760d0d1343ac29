mod examples;

use std::path::Path;
use std::sync::Mutex;

use async_trait::async_trait;
use config::bundle::BundleReadError;
use policy::id::SandboxId;
use policy::reason::Reason;
use serde_json::{Value, json};

use super::*;

/// Keeps what is recorded.
#[derive(Debug, Default)]
pub(crate) struct Book(pub(crate) Mutex<Vec<AuditEvent>>);

#[async_trait]
impl AuditSink for Book {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.lock().unwrap().push(*event);
        Ok(())
    }

    async fn keep(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.0.lock().unwrap().push(*event);
    }
}

impl Book {
    pub(crate) fn take(&self) -> Vec<AuditEvent> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// Rules of bundles, each with its entrypoint, its further settings and its policy.
pub(crate) fn rules(section: &str, bundles: &[(&str, &str, &str)]) -> PolicySnapshot {
    let place = tempfile::tempdir().unwrap();
    load(place.path(), section, bundles).unwrap()
}

fn load(
    place: &Path,
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
        let dir = place.join(format!("b{number}"));
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
    let path = place.join("palisade.yaml");
    std::fs::write(&path, file).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    PolicySnapshot::load(Arc::new(settings))
}

pub(crate) fn governance(rules: PolicySnapshot) -> (Governance, Arc<Book>) {
    attended(rules, Questions::default())
}

/// The same, with answers to questions.
pub(crate) fn attended(rules: PolicySnapshot, questions: Questions) -> (Governance, Arc<Book>) {
    let book = Arc::new(Book::default());
    let metrics = Metrics::default();
    let contexts = Contexts::new(&metrics);
    let audit = Arc::clone(&book) as Arc<dyn AuditSink>;
    let policy = Arc::new(CurrentPolicy::new(rules));
    let governance = Governance::new(policy, audit, metrics, contexts, questions);
    (governance, book)
}

/// Puts other rules in force, as a reload does.
pub(crate) fn replace(governance: &Governance, rules: PolicySnapshot) {
    let governed = !governance.is_idle();
    governance.0.policy.replace(Arc::new(rules));
    governance.follow(governed);
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

async fn judge(governance: &Governance, message: &Message) -> Ruling {
    let raw = |text: &Option<String>| {
        text.clone()
            .map(|text| RawValue::from_string(text).unwrap())
    };
    let (params, result, error) = (
        raw(&message.params),
        raw(&message.result),
        raw(&message.error),
    );
    let caller = Caller {
        agent: "anna".to_owned(),
        session: "s1".to_owned(),
        sandbox: Some(SandboxId::parse("box").unwrap()),
    };
    let asked = Asked {
        moment: message.moment,
        request: RequestId::new(1, 2),
        caller: &caller,
        tool: "fs",
        method: message.method,
        params: params.as_deref(),
        result: result.as_deref(),
        error: error.as_deref(),
        before: None,
        execution: None,
    };
    governance.judge(&asked, &HoldTerms::default()).await
}

/// What one bundle with `policy` makes of a message.
async fn ruled(policy: &str, message: &Message) -> Ruling {
    let (governance, _) = governance(rules("", &[("mcp/authz", "", policy)]));
    judge(&governance, message).await
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
async fn without_a_bundle_everything_passes_and_is_on_record() {
    let (governance, book) = governance(rules("", &[]));
    assert!(governance.is_idle());
    // Not even what no policy could read is looked at.
    let ruling = judge(&governance, &call(r#"{"a":1,"a":2}"#)).await;
    assert!(matches!(ruling, Ruling::Pass), "{ruling:?}");
    let events = book.take();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].kind, Kind::Mcp);
    assert_eq!(events[0].verdict, Some(Word::Allow));
    assert_eq!(events[0].host.as_deref(), Some("fs"));
    assert_eq!(events[0].stage.as_deref(), Some("before"));
}

#[tokio::test]
async fn a_policy_finds_every_field_under_input() {
    let policy = r#"
decision := {"action": "block", "reason": json.marshal(input)}"#;
    let message = call(r#"{"name":"gh__search","arguments":{"q":"x"},"_meta":{"k":1}}"#);
    let denial = blocked(ruled(policy, &message).await, Reason::RegoDenied);
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
        let denial = blocked(ruled(policy, &call(params)).await, Reason::RegoDenied);
        let found: Value = serde_json::from_str(&denial.message).unwrap();
        assert_eq!(found, wanted, "{params}");
    }
}

#[tokio::test]
async fn a_wrapped_call_is_judged_by_what_is_in_it() {
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
        let ruling = ruled(policy, &call(&params)).await;
        let denial = blocked(ruling, Reason::RegoDenied);
        assert_eq!(denial.message, outer, "{params}");
    }
    let fine =
        json!({"name": "mcp-exec", "arguments": {"name": "delete", "arguments": {"path": "/tmp"}}});
    assert!(matches!(ruled(policy, &call(fine)).await, Ruling::Pass));
}

#[tokio::test]
async fn what_can_be_read_in_two_ways_does_not_pass() {
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(200), "]".repeat(200));
    let wrapped = |inner: Value| json!({"name": "mcp-exec", "arguments": inner}).to_string();
    let mut often = json!({"name": "t"});
    for _ in 0..6 {
        often = json!({"name": "mcp-exec", "arguments": often});
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
        &often.to_string(),
    ] {
        let ruling = ruled("allow := true", &call(params)).await;
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
        let ruling = ruled(policy, &call(json!({"name": "t"}))).await;
        let denial = blocked(ruling, reason);
        assert_eq!(denial.rule.as_str(), "rego:b0", "{policy}");
    }
}

#[tokio::test]
async fn a_policy_that_takes_too_long_blocks() {
    let slow = "allow if { some a in numbers.range(1, 3000); some b in numbers.range(1, 3000); a * b == 7919 * 7919 }";
    let rules = rules("  timeout: 20ms\n", &[("mcp/authz", "", slow)]);
    let (governance, _) = governance(rules);
    let denial = blocked(
        judge(&governance, &call(json!({"name": "t"}))).await,
        Reason::RegoError,
    );
    assert!(denial.evidence.unwrap().contains("took"));
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
async fn failures_pass_where_the_operator_chose_so_and_refusals_do_not() {
    let (open, book) = governance(rules(
        "  fail_open: true\n",
        &[("mcp/authz", "", "decision := 1")],
    ));
    assert!(matches!(
        judge(&open, &call(json!({"name": "t"}))).await,
        Ruling::Pass
    ));
    let logged = book.take();
    assert_eq!(logged[0].event.as_deref(), Some("policy_logged"));
    assert_eq!(logged[0].reason, Some(Reason::RegoError));
    for policy in ["allow := true if input.no", "action := \"redact\""] {
        let (open, _) = governance(rules("  fail_open: true\n", &[("mcp/authz", "", policy)]));
        let ruling = judge(&open, &call(json!({"name": "t"}))).await;
        blocked(ruling, Reason::RegoDenied);
    }
    // An agent must not be able to choose that a policy fails.
    let (open, _) = governance(rules(
        "  fail_open: true\n",
        &[("mcp/authz", "", "allow := false")],
    ));
    blocked(
        judge(&open, &call(r#"{"a":1,"a":2}"#)).await,
        Reason::RegoError,
    );
}

#[tokio::test]
async fn a_bundle_that_only_logs_changes_nothing() {
    let redact =
        "decision := {\"action\": \"redact\", \"outputs\": {\"modified_data\": {\"x\": 1}}}";
    let (governance, book) = governance(rules(
        "",
        &[
            ("mcp/authz", ", mode: log", "allow := false"),
            ("mcp/authz", ", mode: log", redact),
            ("mcp/authz", "", "allow := true"),
        ],
    ));
    let ruling = judge(&governance, &call(json!({"name": "t"}))).await;
    assert!(matches!(ruling, Ruling::Pass), "{ruling:?}");
    let events = book.take();
    let said: Vec<_> = events
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
        said,
        [
            (Some("policy_logged"), "b0", Word::Deny),
            (Some("policy_logged"), "b1", Word::Modify),
            (None, "b2", Word::Allow),
        ]
    );
}

#[tokio::test]
async fn each_bundle_sees_what_those_before_it_made_of_the_message() {
    let redact = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["arguments.key"]}}}"#;
    let look = r#"default allow := false
allow if input.params.arguments.key == "[redacted]""#;
    let bundles = [("mcp/authz", "", redact), ("mcp/authz", "", look)];
    let (governance, book) = governance(rules("", &bundles));
    let message =
        call(r#"{ "name":"t", "arguments":{"key":"k","n":123456789012345678901234567890} }"#);
    assert_eq!(
        modified(judge(&governance, &message).await),
        r#"{ "name":"t", "arguments":{"key":"[redacted]","n":123456789012345678901234567890} }"#
    );
    let events = book.take();
    assert_eq!(events[0].verdict, Some(Word::Modify));
    assert!(
        !serde_json::to_string(&events)
            .unwrap()
            .contains("[redacted]")
    );
}

#[tokio::test]
async fn a_redaction_without_effect_is_a_pass() {
    let redact = |from: &str, to: &str| {
        format!(
            r#"decision := {{"action": "redact", "outputs": {{"redaction_rules": {{"replacements": {{"{from}": "{to}"}}}}}}}}"#
        )
    };
    let (there, back) = (redact("one", "two"), redact("two", "one"));
    let as_it_is =
        r#"decision := {"action": "redact", "outputs": {"modified_data": input.params}}"#;
    let message = call(r#"{ "name":"t", "arguments":{"x":"one"} }"#);
    for bundles in [
        &[("mcp/authz", "", redact("three", "four"))][..],
        &[("mcp/authz", "", as_it_is.to_owned())],
        // The second bundle takes back what the first has changed.
        &[("mcp/authz", "", there.clone()), ("mcp/authz", "", back)],
        &[
            ("mcp/authz", ", mode: log", redact("three", "four")),
            ("mcp/authz", "", "allow := true".to_owned()),
        ],
    ] {
        let bundles: Vec<_> = bundles
            .iter()
            .map(|(entrypoint, settings, text)| (*entrypoint, *settings, text.as_str()))
            .collect();
        let (governance, book) = governance(rules("", &bundles));
        let ruling = judge(&governance, &message).await;
        assert!(matches!(ruling, Ruling::Pass), "{bundles:?}: {ruling:?}");
        let events = book.take();
        assert_eq!(events.len(), 1, "{bundles:?}: {events:?}");
        assert_eq!(events[0].verdict, Some(Word::Allow));
    }
    let changed = modified(ruled(&there, &message).await);
    assert_eq!(changed, r#"{ "name":"t", "arguments":{"x":"two"} }"#);
}

#[tokio::test]
async fn arguments_of_a_wrapped_call_are_redacted_where_they_are() {
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
        assert_eq!(modified(ruled(policy, &call(params)).await), wanted);
    }
}

#[tokio::test]
async fn answers_and_errors_are_redacted_too() {
    let policy = r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"replacements": {"[a-z]+@example\\.com": "<mail>"}}}}"#;
    let result = r#"{"content":[{"type":"text","text":"anna@example.com"}],"big":1e3}"#;
    let wanted = r#"{"content":[{"type":"text","text":"<mail>"}],"big":1e3}"#;
    assert_eq!(modified(ruled(policy, &answer(result)).await), wanted);
    let error = Message {
        result: None,
        error: Some(r#"{"code":-1,"message":"no anna@example.com"}"#.to_owned()),
        ..answer("null")
    };
    let wanted = r#"{"code":-1,"message":"no <mail>"}"#;
    assert_eq!(modified(ruled(policy, &error).await), wanted);
    // Large ones, elsewhere.
    let large = format!(r#"{{"text":"{} anna@example.com"}}"#, "x".repeat(200_000));
    let wanted = large.replace("anna@example.com", "<mail>");
    assert_eq!(modified(ruled(policy, &answer(large)).await), wanted);
}

#[tokio::test]
async fn questions_to_the_client_have_an_entrypoint_of_their_own() {
    let ask = Message {
        moment: Moment::Elicitation,
        method: "elicitation/create",
        ..call(json!({"message": "your password?"}))
    };
    let no = "allow := false";
    let (calls, _) = governance(rules("", &[("mcp/authz", "", no)]));
    assert!(matches!(judge(&calls, &ask).await, Ruling::Pass));
    let (questions, _) = governance(rules("", &[("mcp/elicitation", "", no)]));
    blocked(judge(&questions, &ask).await, Reason::RegoDenied);
    assert!(matches!(judge(&questions, &call("{}")).await, Ruling::Pass));
    assert!(!questions.is_idle());
}

#[tokio::test]
async fn new_rules_count_at_once_and_whole() {
    let (governance, _) = governance(rules("", &[("mcp/authz", "", "allow := true")]));
    assert!(matches!(
        judge(&governance, &call("{}")).await,
        Ruling::Pass
    ));
    replace(
        &governance,
        rules("", &[("mcp/authz", "", "allow := false")]),
    );
    blocked(judge(&governance, &call("{}")).await, Reason::RegoDenied);
    replace(&governance, rules("", &[]));
    assert!(governance.is_idle());
}

#[test]
fn a_missing_bundle_is_left_out_unless_it_is_required_and_a_broken_one_is_an_error() {
    let place = tempfile::tempdir().unwrap();
    let broken = [("mcp/authz", "", "allow := http.send({})")];
    assert!(matches!(
        load(place.path(), "", &broken),
        Err(BundleReadError::Wrong { .. })
    ));
    for (required, is_fine) in [("false", true), ("true", false)] {
        let path = place.path().join("palisade.yaml");
        let text = format!(
            "version: '1.0'\npolicies:\n  bundles:\n  - {{id: b, path: nowhere, entrypoint: mcp/authz, required: {required}}}\n"
        );
        std::fs::write(&path, text).unwrap();
        let settings = config::load(Some(&path), &|_| None).unwrap();
        let loaded = PolicySnapshot::load(Arc::new(settings));
        assert_eq!(loaded.is_ok(), is_fine);
    }
}
