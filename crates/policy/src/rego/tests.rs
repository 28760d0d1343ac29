use serde_json::{Value, json};

use super::*;

const TIME_LIMIT: Duration = Duration::from_secs(5);

fn module(text: &str) -> Module {
    Module {
        name: "policy.rego".to_owned(),
        text: text.to_owned(),
    }
}

fn compile(text: &str) -> Result<Bundle, BundleError> {
    Bundle::compile("mine", "http/authz", &[module(text)], &json!({}))
}

#[track_caller]
fn decide(text: &str, input: Value) -> Decision {
    let bundle = compile(&format!("package http.authz\n{text}"));
    bundle
        .unwrap()
        .decide(&input, Budget::with_time_limit(TIME_LIMIT))
}

fn details(message: Option<&str>, rule: Option<&str>) -> DecisionDetails {
    let mut details = DecisionDetails::default();
    details.message = message.map(str::to_owned);
    details.rule = rule.map(str::to_owned);
    details
}

#[test]
fn every_form_of_decision_is_parsed() {
    let why = || details(Some("why"), None);
    for (policy, wanted) in [
        ("allow := true", Decision::Allow(DecisionDetails::default())),
        ("allow := false", Decision::Deny(DecisionDetails::default())),
        ("allow := true if input.no", Decision::Undefined),
        (
            "default allow := false\nreason := \"why\"",
            Decision::Deny(why()),
        ),
        (
            "allow := false\nmessage := \"why\"\nrule := \"r\"",
            Decision::Deny(details(Some("why"), Some("r"))),
        ),
        (
            r#"decision := {"allow": false, "reason": "why", "rule": "r"}"#,
            Decision::Deny(details(Some("why"), Some("r"))),
        ),
        (
            r#"decision := {"allow": true}"#,
            Decision::Allow(DecisionDetails::default()),
        ),
        (
            r#"decision := {"decision": "ask", "message": "why"}"#,
            Decision::Ask(why()),
        ),
        (
            r#"decision := {"decision": "deny", "message": "why"}"#,
            Decision::Deny(why()),
        ),
        (
            r#"decision := {"action": "block", "reason": "why"}"#,
            Decision::Deny(why()),
        ),
        (
            r#"decision := {"action": "allow"}"#,
            Decision::Allow(DecisionDetails::default()),
        ),
        (
            r#"decision := "ask""#,
            Decision::Ask(DecisionDetails::default()),
        ),
        (
            "action := \"block\"\nreason := \"why\"",
            Decision::Deny(why()),
        ),
        (
            r#"decision := {"action": "redact", "outputs": {"redaction_rules": {"fields": ["a"]}}}"#,
            Decision::Modify {
                outputs: json!({"redaction_rules": {"fields": ["a"]}}),
                details: DecisionDetails::default(),
            },
        ),
        (
            "action := \"redact\"\noutputs := {\"modified_data\": {\"a\": 1}}",
            Decision::Modify {
                outputs: json!({"modified_data": {"a": 1}}),
                details: DecisionDetails::default(),
            },
        ),
    ] {
        assert_eq!(decide(policy, json!({})), wanted, "{policy}");
    }
}

#[test]
fn result_that_is_not_a_decision_fails() {
    for policy in [
        "decision := 1",
        "decision := null",
        "decision := [true]",
        "decision contains \"no\"",
        "decision := {}",
        r#"decision := {"allow": "yes"}"#,
        r#"decision := {"action": "perhaps"}"#,
        r#"decision := {"action": true, "allow": false}"#,
        r#"decision := {"action": "allow", "allow": false}"#,
        r#"decision := "ALLOW""#,
        "allow := \"true\"",
    ] {
        let decided = decide(policy, json!({}));
        assert!(
            matches!(decided, Decision::Failed(EvaluationError::Shape(_))),
            "{policy}: {decided:?}"
        );
    }
}

#[test]
fn entrypoint_can_be_a_rule() {
    let text = "package http.authz\nverdict := true if input.method == \"GET\"";
    let bundle = Bundle::compile("b", "http/authz/verdict", &[module(text)], &json!({})).unwrap();
    assert_eq!(bundle.rule(), "data.http.authz.verdict");
    assert_eq!(
        bundle.decide(
            &json!({"method": "GET"}),
            Budget::with_time_limit(TIME_LIMIT)
        ),
        Decision::Allow(DecisionDetails::default())
    );
    assert_eq!(
        bundle.decide(
            &json!({"method": "PUT"}),
            Budget::with_time_limit(TIME_LIMIT)
        ),
        Decision::Undefined
    );
}

#[test]
fn data_and_several_files_work_together() {
    let modules = [
        Module {
            name: "a.rego".to_owned(),
            text: "package http.authz\nimport data.lists\ndefault allow := false\nallow if lists.known(input.host)".to_owned(),
        },
        Module {
            name: "lists/b.rego".to_owned(),
            text: "package lists\nknown(host) if host in data.hosts".to_owned(),
        },
    ];
    let data = json!({"hosts": ["a.example", "b.example"]});
    let bundle = Bundle::compile("b", "http/authz", &modules, &data).unwrap();
    let decide =
        |host: &str| bundle.decide(&json!({"host": host}), Budget::with_time_limit(TIME_LIMIT));
    assert_eq!(
        decide("b.example"),
        Decision::Allow(DecisionDetails::default())
    );
    assert_eq!(
        decide("c.example"),
        Decision::Deny(DecisionDetails::default())
    );
}

#[test]
fn invalid_policy_is_rejected_with_location() {
    let error = compile("package http.authz\nallow if {\n  input.a = = 1\n}").unwrap_err();
    let BundleError::Policy { place, what } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(place.as_deref(), Some("policy.rego:3:13"), "{what}");
    assert!(error.to_string().starts_with("policy.rego:3:13: "));
    assert!(!error.to_string().contains('\n'));

    for (policy, place, expected) in [
        (
            "default allow := true\nallow := false if http.send({\"url\": input.u}).status_code != 200",
            "policy.rego:3:",
            "http.send",
        ),
        (
            "allow if no_such_function(input)",
            "policy.rego:2:",
            "no_such_function",
        ),
        (
            "allow if time.now_ns() > 0",
            "policy.rego:2:",
            "time.now_ns",
        ),
        (
            "allow if opa.runtime().env.X",
            "policy.rego:2:",
            "opa.runtime",
        ),
        (
            "allow if net.lookup_ip_addr(input.host)",
            "policy.rego:2:",
            "net.lookup_ip_addr",
        ),
        (
            "allow if uuid.rfc4122(input.host)",
            "policy.rego:2:",
            "uuid.rfc4122",
        ),
        ("allow if rand.intn(\"a\", 2) == 1", "", "rand.intn"),
        (
            "allow if __builtin_host_await(input, \"x\")",
            "",
            "__builtin_host_await",
        ),
        ("allow if { print(\"a\"); true }", "", "print"),
        ("allow if allow", "", "recursion"),
    ] {
        let error = compile(&format!("package http.authz\n{policy}"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(place) && error.contains(expected),
            "{policy}: {error}"
        );
    }
}

#[test]
fn missing_entrypoint_is_rejected() {
    let other = compile("package http.other\nallow := true").unwrap_err();
    assert_eq!(other, BundleError::NoEntrypoint("http/authz".to_owned()));
    let empty = compile("package http.authz\nallowed := true").unwrap_err();
    assert_eq!(empty, BundleError::NoEntrypoint("http/authz".to_owned()));
    assert_eq!(
        Bundle::compile("b", "http/authz", &[], &json!({})).unwrap_err(),
        BundleError::Empty
    );
    for bad in [
        "",
        "/",
        "http//authz",
        "http/authz/",
        "http.authz",
        "http/a-b",
        "1/a",
    ] {
        let modules = [module("package http.authz\nallow := true")];
        assert_eq!(
            Bundle::compile("b", bad, &modules, &json!({})).unwrap_err(),
            BundleError::BadEntrypoint(bad.to_owned())
        );
    }
}

#[test]
fn entrypoint_that_is_a_function_never_allows() {
    let text = "package http.authz\nallow(x) := true if x == x";
    match compile(text) {
        Err(_) => {}
        Ok(bundle) => {
            let decided = bundle.decide(&json!({}), Budget::with_time_limit(TIME_LIMIT));
            assert!(!matches!(decided, Decision::Allow(_)), "{decided:?}");
        }
    }
}

#[test]
fn data_that_a_rule_also_defines_is_rejected() {
    let modules = [module("package http.authz\nallow := true")];
    let data = json!({"http": {"authz": {"allow": false}}});
    let error = Bundle::compile("b", "http/authz", &modules, &data).unwrap_err();
    assert!(matches!(error, BundleError::Data(_)), "{error:?}");
    let error = Bundle::compile("b", "http/authz", &modules, &json!([])).unwrap_err();
    assert!(matches!(error, BundleError::Data(_)), "{error:?}");
}

#[test]
fn built_in_with_wrong_input_type_does_not_allow() {
    for policy in [
        "default allow := false\nallow if not startswith(input.path, \"/admin\")",
        "default allow := false\nallow if startswith(input.path, \"/public\")",
    ] {
        assert_eq!(
            decide(policy, json!({"path": "/public"})),
            Decision::Allow(DecisionDetails::default())
        );
        assert_eq!(
            decide(policy, json!({"path": ["/public"]})),
            Decision::Deny(DecisionDetails::default())
        );
    }
}

#[test]
fn built_in_error_fails_decision_that_is_not_a_refusal() {
    let odd = || json!({"path": ["/admin"], "port": "443", "sum": {}, "re": "("});
    for policy in [
        "default allow := true\nallow := false if startswith(input.path, \"/admin\")",
        "default allow := true\nallow := false if input.port + 1 > 444",
        "default allow := true\nallow := false if { not startswith(input.path, \"/ok\") }",
        "default allow := true\nallow := false if count(input.port + 1) > 1",
        "default allow := true\nallow := false if is_admin(input.path)\nis_admin(p) if startswith(p, \"/admin\")",
        "allow if not admin\nadmin if startswith(input.path, \"/admin\")",
        "decision := \"ask\" if not startswith(input.path, \"/a\")\ndecision := \"ask\" if true",
        "decision := {\"action\": \"redact\", \"outputs\": {}} if not admin\nadmin if startswith(input.path, \"/admin\")",
    ] {
        let decided = decide(policy, odd());
        let Decision::Failed(EvaluationError::Error(why)) = &decided else {
            panic!("{policy}: {decided:?}");
        };
        assert!(why.starts_with("policy.rego:"), "{policy}: {why}");
        assert!(!why.contains('\n'), "{why}");
    }
    for policy in [
        "allow if count([1 | startswith(input.path, \"/admin\")]) == 0",
        "allow if not regex.match(input.re, \"a\")",
    ] {
        assert_eq!(decide(policy, odd()), Decision::Undefined, "{policy}");
    }
}

#[test]
fn result_that_is_nested_too_deeply_fails() {
    let nested = |depth: usize| {
        let mut input = json!(1);
        for _ in 0..depth {
            input = json!([input]);
        }
        json!({ "deep": input })
    };
    for policy in [
        "decision := {\"action\": \"redact\", \"outputs\": {\"a\": [[input.deep]]}}",
        "action := \"redact\"\noutputs := {\"a\": [[[input.deep]]]}",
        "decision := {\"allow\": true, \"beside\": [[[input.deep]]]}",
    ] {
        let decided = decide(policy, nested(126));
        assert_eq!(
            decided,
            Decision::Failed(EvaluationError::Shape("it is nested too deeply".to_owned())),
            "{policy}"
        );
        let decided = decide(policy, nested(100));
        assert!(!matches!(decided, Decision::Failed(_)), "{decided:?}");
    }
}

#[test]
fn conflicting_rules_do_not_allow() {
    let policy = "default allow := true\nallow := true if input.a\nallow := false if input.b";
    let decided = decide(policy, json!({"a": true, "b": true}));
    assert_eq!(decided, Decision::Undefined);
}

#[test]
fn recursive_rule_is_rejected() {
    for policy in [
        "allow if allow",
        "allow if a\na if b\nb if a",
        "allow if f(1)\nf(x) := f(x + 1)",
        "allow if a\na if data.http[input.x].a",
        "allow if [1 | a]\na contains 1 if { some x in a; x }",
        "allow if f([1])\nf([x]) := y if { y := g(x) }\ng(x) := f([x])",
        "allow if false\nelse if allow",
    ] {
        let error = compile(&format!("package http.authz\n{policy}")).unwrap_err();
        assert!(error.to_string().contains("recursion"), "{policy}: {error}");
    }
}

#[test]
fn call_depth_of_rules_is_limited() {
    let chain = |length: usize| {
        // With nested expressions between one call and the next, which use stack too.
        let rules = (1..length).map(|n| {
            let next = n + 1;
            format!("r{n} if {{ every x in [y | some y in [1]; r{next}] {{ x == 1 }}; r{next} }}\n")
        });
        format!(
            "package http.authz\nallow if r1\n{}r{length} if input.x\n",
            rules.collect::<String>()
        )
    };
    let deep = compile(&chain(15)).unwrap();
    // Half of the smallest stack of the gate's threads.
    let thread = std::thread::Builder::new().stack_size(1024 * 1024);
    let decided =
        thread.spawn(move || deep.decide(&json!({"x": true}), Budget::with_time_limit(TIME_LIMIT)));
    assert_eq!(
        decided.unwrap().join().unwrap(),
        Decision::Allow(DecisionDetails::default())
    );
    let error = compile(&chain(400)).unwrap_err();
    assert!(error.to_string().contains("more than"), "{error}");
}

/// Loops over a million pairs.
const SLOW: &str = "package http.authz\nallow if count([1 | some a in data.many; some b in data.many; a + b == 1]) == 0";

fn slow() -> Bundle {
    let many: Vec<u32> = (0..1000).collect();
    let modules = [module(SLOW)];
    Bundle::compile("slow", "http/authz", &modules, &json!({"many": many})).unwrap()
}

#[test]
fn evaluation_stops_at_time_limit() {
    let bundle = slow();
    let begun = std::time::Instant::now();
    let budget = Budget {
        time: Duration::from_millis(20),
        steps: usize::MAX,
    };
    let decided = bundle.decide(&json!({}), budget);
    assert_eq!(decided, Decision::Failed(EvaluationError::OutOfTime));
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn evaluation_stops_at_step_limit() {
    let budget = Budget {
        time: Duration::from_secs(60),
        steps: 10_000,
    };
    let decided = slow().decide(&json!({}), budget);
    assert_eq!(decided, Decision::Failed(EvaluationError::OutOfSteps));
}

#[test]
fn failing_reason_does_not_change_decision() {
    let policy = "default allow := false\nreason := sprintf(\"%d\", [to_number(input.x)])";
    assert_eq!(
        decide(policy, json!({"x": "none"})),
        Decision::Deny(DecisionDetails::default())
    );
}

#[test]
fn policy_message_is_one_line_of_limited_length() {
    let policy = "allow := false\nreason := input.text";
    let decided = decide(
        policy,
        json!({"text": format!("a\r\nb\u{1b}[31m\u{202e}c {}", "x".repeat(5000))}),
    );
    let Decision::Deny(details) = decided else {
        panic!("{decided:?}");
    };
    let message = details.message.unwrap();
    assert!(message.starts_with("a  b [31mc xxx"), "{message}");
    assert_eq!(message.chars().count(), 400);
}

#[test]
fn input_that_is_nested_too_deeply_fails() {
    let mut input = json!(1);
    for _ in 0..200 {
        input = json!([input]);
    }
    let decided = decide("default allow := true", input);
    assert!(
        matches!(decided, Decision::Failed(EvaluationError::Error(_))),
        "{decided:?}"
    );
}

#[test]
fn json_round_trips_through_values() {
    let input = json!({
        "numbers": [0, -1, i64::MIN, u64::MAX, 1.5, -0.25, 1e100],
        "texts": ["", "a\u{0}b", "\u{1f980}", "\"\\"],
        "rest": [null, true, false, {}, [], {"": {"a": [[]]}}],
    });
    let through = value::to_json(&value::from_json(&input).unwrap());
    assert_eq!(through, input);
}

#[test]
fn policy_with_too_many_brackets_is_rejected() {
    for (open, close) in [("(", ")"), ("[", "]"), ("{1: ", "}"), ("count(", ")")] {
        let text = |times: usize| {
            let (open, close) = (open.repeat(times), close.repeat(times));
            format!("package http.authz\nallow if {open}[1]{close}\n")
        };
        let error = compile(&text(20_000)).unwrap_err().to_string();
        assert!(
            error.starts_with("policy.rego:2: more than 32 brackets"),
            "{error}"
        );
        let deep = text(6);
        let thread = std::thread::Builder::new().stack_size(2 * 1024 * 1024);
        let decided = thread.spawn(move || {
            compile(&deep)
                .map(|bundle| drop(bundle.decide(&json!({}), Budget::with_time_limit(TIME_LIMIT))))
        });
        decided.unwrap().join().unwrap().unwrap();
    }
}

mod properties {
    use proptest::prelude::*;

    use super::*;

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,20}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            let key = prop_oneof![
                prop::sample::select(vec![
                    "method",
                    "path",
                    "host",
                    "headers",
                    "port",
                    "registration",
                    "repos"
                ])
                .prop_map(str::to_owned),
                ".{0,6}".prop_map(|text| text),
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..6)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    /// A policy that uses its input in many ways.
    const BUSY: &str = r#"
package http.authz
default allow := false
allow if input.method in {"GET", "HEAD"}
allow if startswith(input.path, "/v1/")
allow if regex.match(`^/repos/[^/]+$`, input.path)
allow if glob.match("*.example", ["."], input.host)
allow if { some repo in input.registration.repos; contains(input.path, repo) }
allow if { some name, text in input.headers; lower(name) == "x"; to_number(text) > 3 }
allow if input.port + 1 == 444
allow if concat("/", split(input.path, "/")) == sprintf("%v", [input.host])
allow if count(input.headers) > count(input.path)
allow if json.marshal(input) == base64.decode(input.path)
reason := sprintf("%s and %d", [input.path, input.port])
"#;

    proptest! {
        #[test]
        fn arbitrary_input_never_panics(input in any_json()) {
            let bundle = compile(BUSY).unwrap();
            let decided = bundle.decide(&input, Budget::with_time_limit(TIME_LIMIT));
            prop_assert_ne!(
                decided,
                Decision::Failed(EvaluationError::Error("the evaluation panicked".to_owned()))
            );
        }

        #[test]
        fn arbitrary_result_is_allowed_only_if_it_allows(input in any_json()) {
            let bundle = compile("package http.authz\ndecision := input").unwrap();
            let decided = bundle.decide(&input, Budget::with_time_limit(TIME_LIMIT));
            let word = |key: &str| input.get(key).cloned();
            if matches!(decided, Decision::Allow(_)) {
                prop_assert!(
                    input == json!(true)
                        || input == json!("allow")
                        || input == json!("pass")
                        || word("allow") == Some(json!(true))
                        || word("action").is_some()
                        || word("decision").is_some()
                );
            }
        }

        #[test]
        fn arbitrary_policy_text_never_panics(text in "(?s).{0,200}") {
            drop(compile(&text));
            drop(compile(&format!("package http.authz\nallow if {text}")));
        }
    }
}
