//! The seed specification's correctness properties 3 and 4, which concern hooks alone.

use proptest::prelude::*;
use tokio::runtime::Runtime;

use super::*;

/// The number of generated cases of each property.
const CASES: u32 = 128;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// A policy that returns the decision in the message.
const OBEDIENT: &str = "decision := object.get(input.params, \"decide\", {\"action\": \"allow\"})";

/// JSON without floating point numbers, which policies read with limited precision.
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
            // A wrapped call must have a name.
            data["name"] = json!("t");
        }
        let decide = json!({"action": action, "reason": reason, "outputs": {"modified_data": data}});
        // The call may be wrapped in another call.
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
    // The policy returns its input as the modified data.
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
