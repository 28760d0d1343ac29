//! Compares machine and interpreter: for a plain policy and a run of the machine without errors,
//! both must return the same.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::{Budget, Bundle, Decision, Module, value, watch};

mod generated;

const BUDGET: Budget = Budget::with_time_limit(Duration::from_secs(5));

fn compile(text: &str, data: &Value) -> Option<Bundle> {
    let module = Module {
        name: "policy.rego".to_owned(),
        text: format!("package http.authz\n{text}"),
    };
    Bundle::compile("b", "http/authz", &[module], data).ok()
}

/// The outcome of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// The machine's result needs confirmation.
    NeedsConfirmation,
    /// The machine's result needs no confirmation, and denies.
    Denied,
    /// The machine's result needs no confirmation, and does not deny.
    Allowed,
}

/// Evaluates with both and compares the results.
#[track_caller]
fn compare(bundle: &Bundle, input: &Value, label: &str) -> Comparison {
    let read = value::from_json(input).unwrap();
    let mut engine = bundle.interpreter.clone();
    engine.set_input(read.clone());
    let interpreted = engine.eval_rule(bundle.rule().to_owned());

    let mut machine = bundle.new_machine().unwrap();
    machine.set_input(read);
    machine.set_max_instructions(BUDGET.steps);
    let (answer, is_sound) = watch::run(|| machine.execute_entry_point_by_index(0));

    let decided = bundle.decide(input, BUDGET);
    let is_allowed = !decided.is_refusal();
    if is_allowed {
        // Whatever is not refused, the interpreter must have returned as well.
        let interpreted = interpreted.as_ref().unwrap_or_else(|error| {
            panic!("{label}\n{input}\nallowed, but the interpreter failed: {error}")
        });
        assert_eq!(answer.as_ref().ok(), Some(interpreted), "{label}\n{input}");
    }
    if !bundle.is_plain || !is_sound {
        return Comparison::NeedsConfirmation;
    }
    match (answer, interpreted) {
        (Ok(answer), Ok(interpreted)) => assert_eq!(answer, interpreted, "{label}\n{input}"),
        // Definitions that disagree.
        (Ok(regorus::Value::Undefined), Err(_)) => {}
        (answer, interpreted) => panic!("{label}\n{input}\n{answer:?}, but {interpreted:?}"),
    }
    if is_allowed {
        Comparison::Allowed
    } else {
        Comparison::Denied
    }
}

#[test]
fn common_policies_are_plain() {
    for policy in [
        "default allow := false\nallow if input.method == \"GET\"",
        "allow if input.host in data.hosts\nallow if startswith(input.path, \"/v1\")",
        "allow if { some repo in input.repos; contains(input.path, sprintf(\"/%s/\", [repo])) }",
        "allow if { some k, v in input.headers; k == \"x\"; v != \"y\" }",
        "allow if not denied\ndenied if glob.match(\"*.evil\", [\".\"], input.host)",
        "allow if count(bad) == 0\nbad contains name if { some name in input.names; name != \"ok\" }",
        "allow if f(input.x)\nf(x) if { y := x + 1; y > 2 }\nf(x) if x == 0",
        "allow if g(input.x) > -1\ng(x) := x * 2",
        "decision := {\"action\": \"allow\", \"reason\": why} if { why := lower(input.why) }",
        "decision := \"allow\" if input.a\ndecision := \"deny\" if input.b",
        "allow if input.parts[0] == \"a\"\nunused := [x | some x in input.xs]",
        "import rego.v1\nallow if input.x",
        "allow if input.x\nreason := \"a\" if input.y else := concat(\"\", [x | some x in input.xs])",
    ] {
        let bundle = compile(policy, &json!({"hosts": []})).unwrap();
        assert!(bundle.is_plain, "{policy}");
    }
}

#[test]
fn policy_with_differing_construct_is_not_plain() {
    for policy in [
        "allow if input.a\nelse := false if input.b",
        "allow if count([x | some x in input.xs; x > 1]) == 0",
        "allow if {x | some x in input.xs} == set()",
        "allow if {x: 1 | some x in input.xs} == {}",
        "allow if every x in input.xs { x == 1 }",
        "allow if input.xs[_] == 1",
        "allow if { some i; input.xs[i] == 1 }",
        "allow if input.xs[input.i] == 1",
        "allow if { x = input.x; x == 1 }",
        "allow if { [a, b] := input.xs; a == b }",
        "allow if { some [a, b] in input.xs; a == b }",
        "allow if { some \"a\" in input.xs }",
        "allow if \"k\", \"v\" in input.xs",
        "allow if f(1)\nf(_) if input.x",
        "allow if f([1])\nf([x]) if x == 1",
        "allow if f(1)\nf(1) if input.x",
        "allow if f(1)\ndefault f(_) := false\nf(x) if x == 1",
        "allow if { f(1, y); y == 2 }\nf(x) := x + 1",
        "allow if { split(input.x, \"/\", parts); parts == [] }",
        "allow if split(input.x, \"/\")[0] == \"a\"",
        "decision := x if { some x in input.xs }",
        "allow if x == 1\nx := 1 if input.a\nx := 2 if input.b",
        "allow if m.a == 1\nm.a := 1",
        "allow if m.a == 1\nm[x] := 1 if { some x in input.xs }",
        "allow if s\ns contains input.x",
        "allow if input.xs | {1} == {1}",
        "allow if {\"a\": 1, \"a\": input.x} == {\"a\": 1}",
        "allow if {input.x: 1} == {\"a\": 1}",
        "allow if { count := 1; count == 1 }",
        "allow if { input := 1; input == 1 }",
        "allow if { x := 1; x == 1 }\nx := 2",
        "allow if data.http.authz == {}",
        "allow if data.list[0] == 1",
        "import data.list\nallow if list == 1",
        "import input.x\nallow if x == 1",
        "allow if contains(1, 2)\ncontains(a, b) if a == b",
    ] {
        // Some of these do not compile for the machine.
        if let Some(bundle) = compile(policy, &json!({"list": [1]})) {
            assert!(!bundle.is_plain, "{policy}");
        }
    }
}

/// Policies with errors, which the machine alone would ignore and allow.
const POLICIES_WITH_ERRORS: [&str; 18] = [
    "default allow := true\nallow := false if startswith(input.x, \"/admin\")",
    "default allow := true\nallow := false if { some x in input.x; x == \"bad\" }",
    "default allow := true\nallow := false if { some x in input.xs; some y in x; y == 1 }",
    "default allow := true\nallow := false if input.x + 1 > 2",
    "default allow := true\nallow := false if input.n / input.zero > 2",
    "default allow := true\nallow := false if input.n % 1.5 > 2",
    "default allow := true\nallow := false if input.x - {1} == set()",
    "allow if not bad\nbad if to_number(input.x) > 2",
    "allow if not f(input.x)\nf(x) if upper(x) == \"A\"\nf(x) if lower(x[0]) == \"b\"",
    "allow if count(bad) == 0\nbad contains name if { some name in input.xs; startswith(name, \"x\") }",
    "allow if true\nallow if startswith(input.n, \"a\")",
    "allow if { some x in input.xs; x }\nallow if regex.match(\"(\", \"a\")",
    "allow if { x := input.none; true }",
    "allow if { x := f(1); true }\nf(x) if x == 2",
    "allow if count(s) == 0\ns contains x if { x := input.none }",
    "allow if input.x < 3\nallow if input.n",
    "allow := true if input.x\nallow := false if input.n",
    "default decision := \"allow\"\ndecision := {\"action\": w} if w := lower(input.x)\ndecision := \"ask\" if input.n",
];

#[test]
fn policy_with_error_is_never_allowed() {
    let inputs = [
        json!({"x": ["/admin"], "xs": [true, 1, "x"], "n": 1, "zero": 0}),
        json!({"x": "bad", "xs": "bad", "n": "1", "zero": 0}),
        json!({"x": {"a": 1}, "xs": [[1], 2], "n": 7, "zero": 1}),
        json!({"x": 7, "xs": {"k": ["v"]}, "n": 1e300, "zero": 1e-300}),
        json!({}),
    ];
    for policy in POLICIES_WITH_ERRORS {
        let bundle = compile(policy, &json!({})).unwrap();
        assert!(bundle.is_plain, "{policy}");
        for input in &inputs {
            compare(&bundle, input, policy);
        }
    }
}

#[test]
fn outputs_with_error_fail_the_decision() {
    // The machine alone would redact only the fields before the error, or none.
    for (fields, is_plain) in [
        ("[x | some x in input.xs; startswith(x, \"a\")]", false),
        ("f", true),
    ] {
        let policy = format!(
            "action := \"redact\"\noutputs := {{\"redaction_rules\": {{\"fields\": {fields}}}}}\n\
             f contains x if {{ some x in input.xs; startswith(x, \"a\") }}"
        );
        let bundle = compile(&policy, &json!({})).unwrap();
        assert_eq!(bundle.is_plain, is_plain, "{policy}");
        let decided = bundle.decide(&json!({"xs": ["a", "b"]}), BUDGET);
        let Decision::Modify { outputs, .. } = decided else {
            panic!("{policy}: {decided:?}");
        };
        assert_eq!(outputs, json!({"redaction_rules": {"fields": ["a"]}}));
        let decided = bundle.decide(&json!({"xs": ["a", 1]}), BUDGET);
        assert!(
            matches!(decided, Decision::Failed(_)),
            "{policy}: {decided:?}"
        );
    }
}

/// The bundles of this repository.
#[test]
fn shipped_bundle_allows_only_what_interpreter_allows() {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies"));
    let texts = [
        "",
        "read_file",
        "delete_file",
        "rm -rf /",
        "a.example",
        "tools/call",
        "password",
    ];
    let (mut plain, mut compared) = (Vec::new(), 0);
    for (name, entrypoint) in [
        ("http-authz", "http/authz"),
        ("mcp-agent-tools", "mcp/authz"),
        ("mcp-deny-destructive", "mcp/authz"),
        ("mcp-elicitation", "mcp/elicitation"),
        ("mcp-redact-personal-data", "mcp/authz"),
    ] {
        let read = |file: &str| std::fs::read_to_string(root.join(name).join(file)).unwrap();
        let module = Module {
            name: "policy.rego".to_owned(),
            text: read("policy.rego"),
        };
        let data = serde_json::from_str(&read("data.json")).unwrap();
        let bundle = Bundle::compile(name, entrypoint, &[module], &data).unwrap();
        if bundle.is_plain {
            plain.push(name);
        }
        let methods = [
            "GET",
            "POST",
            "tools/call",
            "tools/list",
            "elicitation/create",
            "roots/list",
        ];
        for method in methods {
            for moment in ["before", "after", "elicitation"] {
                for text in texts {
                    for odd in [
                        json!(text),
                        json!([text]),
                        json!(1),
                        json!({"name": text}),
                        Value::Null,
                    ] {
                        let input = json!({
                            "kind": "mcp", "moment": moment, "method": method, "name": odd,
                            "host": text, "tool_id": "fs", "agent_id": text, "sandbox": "",
                            "params": {"name": text, "arguments": odd, "message": text},
                            "result": {"tools": [odd]},
                        });
                        compare(&bundle, &input, name);
                        compared += 1;
                    }
                }
            }
        }
    }
    assert_eq!(plain, ["http-authz", "mcp-deny-destructive"]);
    assert_eq!(compared, 5 * 6 * 3 * 7 * 5);
}

#[test]
fn run_with_error_needs_confirmation() {
    let policy = POLICIES_WITH_ERRORS.first().unwrap();
    let bundle = compile(policy, &json!({})).unwrap();
    let decided = bundle.decide(&json!({"x": 1}), BUDGET);
    assert!(matches!(decided, Decision::Failed(_)), "{decided:?}");
    let bundle = compile("allow if input.x < 3\nallow if input.n", &json!({})).unwrap();
    let input = json!({"x": "a", "n": true});
    assert_eq!(compare(&bundle, &input, ""), Comparison::NeedsConfirmation);
    assert_eq!(compare(&bundle, &json!({"x": 1}), ""), Comparison::Allowed);
    assert_eq!(compare(&bundle, &json!({"x": 9}), ""), Comparison::Denied);
}
