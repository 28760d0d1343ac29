//! The seed's correctness properties that concern hooks, under their numbers.

use proptest::prelude::*;
use tokio::runtime::Runtime;

use super::*;
use crate::context::Execution;

const CASES: u32 = 128;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// A policy that does what the message says, so that the message can be anything.
const OBEDIENT: &str = "decision := object.get(input.params, \"decide\", {\"action\": \"allow\"})";

/// JSON without floating point numbers, of which a policy knows less than all digits.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        "[ -~é😀]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,6}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<Value>()),
        ]
    })
}

fn object() -> impl Strategy<Value = Value> {
    prop::collection::btree_map("[b-z]{1,8}", json_value(), 0..5)
        .prop_map(|map| map.into_iter().collect::<Value>())
}

fn word() -> impl Strategy<Value = String> {
    "[a-zA-Z0-9._/-]{1,24}"
}

// **Feature: unified-sidecar, Property 2: Context Sharing Lifecycle**
#[test]
fn property_02_context_sharing_lifecycle() {
    let runtime = runtime();
    let (interceptor, _) = interceptor(OBEDIENT);
    let contexts = interceptor.governance.contexts().clone();
    let strategy = (word(), word(), word(), any::<bool>(), any::<i32>());
    proptest!(ProptestConfig::with_cases(CASES), |((id, agent, session, blocks, code) in strategy, rest in prop::collection::hash_set(word(), 0..6))| {
        runtime.block_on(async {
            let action = if blocks { "block" } else { "allow" };
            let mut body = request(&id, json!({"name": "t", "decide": {"action": action}}));
            body["agent_id"] = json!(agent);
            body["session_id"] = json!(session);
            before(&interceptor, &body).await;
            // The bridge finds what the interceptor stored.
            let known = contexts.get(&id).unwrap();
            prop_assert_eq!((&*known.agent, &*known.session), (&*agent, &*session));
            let verdict = if blocks { Word::Deny } else { Word::Allow };
            prop_assert_eq!(known.decision.as_ref().unwrap().verdict, verdict);
            prop_assert!(known.execution.is_none());
            // What came of it is there for the after hook, beside the decision.
            let execution = Execution {
                failed: code != 0,
                exit_code: code,
                duration: Duration::from_millis(1),
            };
            contexts.set_result(&id, execution).unwrap();
            let known = contexts.get(&id).unwrap();
            prop_assert_eq!(known.execution, Some(execution));
            prop_assert!(known.decision.is_some());
            // With the exchange it goes.
            let mut body = response(&id, json!({"content": []}));
            body["agent_id"] = json!(agent);
            body["session_id"] = json!(session);
            after(&interceptor, &body).await;
            prop_assert!(contexts.find(&id).is_none());
            // With the session goes whatever has no after hook.
            for other in &rest {
                let mut body = request(other, json!({"name": "t"}));
                body["session_id"] = json!(session);
                before(&interceptor, &body).await;
            }
            prop_assert_eq!(contexts.len(), rest.len());
            contexts.delete_session(&session);
            prop_assert!(contexts.is_empty());
            Ok(())
        })?;
    });
}

// **Feature: unified-sidecar, Property 3: Policy Decision Mapping**
#[test]
fn property_03_policy_decision_mapping() {
    let runtime = runtime();
    let (interceptor, _) = interceptor(OBEDIENT);
    let reason = "[a-zA-Z0-9,.]([ -~é😀]{0,60}[a-zA-Z0-9,.])?";
    proptest!(ProptestConfig::with_cases(CASES), |(action in 0..3_u8, reason in reason, data in object(), arguments in object(), wrapped: bool)| {
        let action = ["allow", "block", "redact"][usize::from(action)];
        let mut data = data;
        if wrapped {
            // Without a name it would be no call any more.
            data["name"] = json!("t");
        }
        let decide = json!({"action": action, "reason": reason, "outputs": {"modified_data": data}});
        // Also where another call is around it.
        let call = json!({"name": "t", "arguments": arguments, "decide": decide});
        let params = if wrapped { json!({"name": "mcp-exec", "arguments": call}) } else { call };
        let answer = runtime.block_on(before(&interceptor, request("r", params)));
        let answer = answer.value();
        match action {
            "allow" => {
                prop_assert_eq!(&answer["action"], "pass");
                prop_assert!(answer.get("modified_data").is_none());
            }
            "block" => {
                prop_assert_eq!(&answer["action"], "block");
                prop_assert_eq!(&answer["reason"], &json!(reason));
            }
            _ if wrapped => {
                prop_assert_eq!(&answer["action"], "modify");
                prop_assert_eq!(&answer["modified_data"]["arguments"], &data);
            }
            _ => {
                prop_assert_eq!(&answer["action"], "modify");
                prop_assert_eq!(&answer["modified_data"], &data);
            }
        }
    });
}

// **Feature: unified-sidecar, Property 4: Intercept Request Evaluation**
#[test]
fn property_04_intercept_request_evaluation() {
    // What the policy was asked comes back as what it wants the data to be.
    let policy =
        r#"decision := {"action": "redact", "outputs": {"modified_data": {"seen": input}}}"#;
    let runtime = runtime();
    let (interceptor, _) = interceptor(policy);
    proptest!(ProptestConfig::with_cases(CASES), |(method in "[a-z]{1,8}/[a-z]{1,8}", payload in json_value(), tool in word(), agent in word(), is_after: bool)| {
        let shown = match &payload {
            Value::Object(_) => payload.clone(),
            Value::Null => json!({}),
            Value::Array(_) => json!({"_array": payload}),
            other => json!({"_value": other}),
        };
        let mut body = if is_after { response("r", payload.clone()) } else { request("r", payload.clone()) };
        body["tool_id"] = json!(tool);
        body["agent_id"] = json!(agent);
        if !is_after {
            body["method"] = json!(method);
        }
        let hook = async {
            if is_after { after(&interceptor, &body).await } else { before(&interceptor, &body).await }
        };
        let answer = runtime.block_on(hook).value();
        let seen = &answer["modified_data"]["seen"];
        prop_assert_eq!(&seen["tool_id"], &json!(tool));
        prop_assert_eq!(&seen["agent_id"], &json!(agent));
        prop_assert_eq!(&seen["session_id"], "s1");
        prop_assert_eq!(&seen["kind"], "mcp");
        if is_after {
            prop_assert_eq!(&seen["moment"], "after");
            prop_assert_eq!(&seen["result"], &shown);
        } else {
            prop_assert_eq!(&seen["moment"], "before");
            prop_assert_eq!(&seen["method"], &json!(method));
            prop_assert_eq!(&seen["params"], &shown);
        }
    });
}

// **Feature: unified-sidecar, Property 10: Metrics Emission Consistency**
#[test]
fn property_10_metrics_emission_consistency() {
    use config::section::tools::RuntimeKind;

    use crate::metrics::Status;

    let runtime = runtime();
    let runtimes = prop::sample::select(vec![
        RuntimeKind::Local,
        RuntimeKind::Sandbox,
        RuntimeKind::E2b,
    ]);
    let statuses = prop::sample::select(vec![
        Status::Success,
        Status::Error,
        Status::Timeout,
        Status::Cancelled,
    ]);
    let (interceptor, _) = interceptor(OBEDIENT);
    let metrics = interceptor.governance.metrics().clone();
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    let read = |line: &str| {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let found = text
            .lines()
            .find_map(|found| found.strip_prefix(line)?.trim().parse::<u64>().ok());
        found.unwrap_or(0)
    };
    proptest!(ProptestConfig::with_cases(CASES), |(action in 0..3_u8, is_known: bool, is_after: bool, kind in runtimes, status in statuses, micros in 1..10_000_u64, code in 0..256_i32)| {
        let word = ["allow", "block", "redact"][usize::from(action)];
        let answered = ["pass", "block", "modify"][usize::from(action)];
        // A gateway's own tool has its name as a label of these; tools of the bridge do not.
        let (tool, label, executed) = if is_known { ("fs", "fs", "fs") } else { ("made-up", "made-up", "unknown") };
        let moment = if is_after { "after" } else { "before" };
        let decide = json!({"action": word, "outputs": {"modified_data": {"x": 1}}});
        let (counted, decided) = if is_after { ("pass", "allow") } else { (answered, word) };
        let lines = [
            format!("polis_sidecar_intercept_total{{type=\"{moment}\",action=\"{counted}\",tool_id=\"{label}\"}}"),
            format!("polis_sidecar_intercept_duration_seconds_count{{type=\"{moment}\",tool_id=\"{label}\"}}"),
            format!("polis_sidecar_policy_decisions_total{{action=\"{decided}\",bundle_id=\"b0\"}}"),
            "polis_sidecar_policy_decision_duration_seconds_count{bundle_id=\"b0\"}".to_owned(),
            format!("polis_sidecar_tool_executions_total{{tool_id=\"{executed}\",runtime_type=\"{}\",status=\"{}\"}}", kind.as_str(), status.as_str()),
            format!("polis_sidecar_tool_execution_duration_seconds_count{{tool_id=\"{executed}\",runtime_type=\"{}\"}}", kind.as_str()),
            format!("polis_sidecar_tool_exits_total{{tool_id=\"{executed}\",runtime_type=\"{}\",exit_code=\"{code}\"}}", kind.as_str()),
        ];
        let earlier = lines.each_ref().map(|line| read(line));
        let mut body = if is_after { response("r", json!({})) } else { request("r", json!({"decide": decide})) };
        body["tool_id"] = json!(tool);
        let hook = async {
            if is_after { after(&interceptor, &body).await } else { before(&interceptor, &body).await }
        };
        runtime.block_on(hook);
        metrics.tool_executed(tool, kind, status, Duration::from_micros(micros), Some(code));
        for (line, earlier) in lines.iter().zip(earlier) {
            prop_assert_eq!(read(line), earlier + 1, "{}", line);
        }
    });
}
