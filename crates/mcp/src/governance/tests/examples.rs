//! The bundles of `policies/` as the gate uses them. Their own tests are run by the interpreter
//! alone; here the machine decides, too.

use std::path::PathBuf;

use super::*;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies")
}

fn example(name: &str, entrypoint: &str) -> Governance {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("palisade.yaml");
    let bundle = examples().join(name);
    let bundle = bundle.canonicalize().unwrap();
    let text = format!(
        "version: '1.0'\npolicies:\n  timeout: 5s\n  bundles:\n  - {{id: b, path: '{}', entrypoint: {entrypoint}}}\n",
        bundle.display()
    );
    std::fs::write(&path, text).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    governance(PolicySnapshot::load(Arc::new(settings)).unwrap()).0
}

#[test]
fn every_example_passes_its_own_tests() {
    use policy::rego::trial::{Outcome, run_tests};

    let mut count = 0;
    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        let contents = config::bundle::open("b", &path).unwrap();
        let all = [contents.modules, contents.tests].concat();
        let limit = Duration::from_secs(10);
        let tested = run_tests(&all, &contents.data, limit).unwrap();
        assert!(tested.len() >= 4, "{} has few tests", path.display());
        let failed: Vec<_> = tested
            .iter()
            .filter(|test| test.outcome != Outcome::Passed)
            .collect();
        assert!(failed.is_empty(), "{}: {failed:#?}", path.display());
        count += 1;
    }
    assert!(count >= 5);
}

#[tokio::test]
async fn destructive_calls_are_denied() {
    let governance = example("mcp-deny-destructive", "mcp/authz");
    let named = |name: &str| call(json!({"name": name, "arguments": {"path": "x"}}));
    assert!(matches!(
        judge(&governance, &named("read_file")).await,
        Ruling::Pass
    ));
    for name in ["delete_file", "dropTable", "fs__purge"] {
        let denial = blocked(judge(&governance, &named(name)).await, Reason::RegoDenied);
        assert!(denial.message.contains("not allowed"), "{denial:?}");
    }
    let wrapped = json!({"name": "mcp-exec", "arguments": {"name": "sh", "arguments": "{\"c\":\"rm -rf /\"}"}});
    blocked(judge(&governance, &call(wrapped)).await, Reason::RegoDenied);
    // What is odd is no way round it.
    for odd in [json!({"name": 7}), json!({}), json!([1])] {
        let ruling = judge(&governance, &call(&odd)).await;
        assert!(matches!(ruling, Ruling::Pass), "{odd}: {ruling:?}");
    }
    assert!(matches!(
        judge(&governance, &answer("{}")).await,
        Ruling::Pass
    ));
}

#[tokio::test]
async fn addresses_and_keys_leave_answers() {
    let governance = example("mcp-redact-personal-data", "mcp/authz");
    let text = concat!("ask anna@example.com, AK", "IAABCDEFGHIJKLMNOP");
    let result = format!(r#"{{"content":[{{"type":"text","text":"{text}"}}],"n":1.0}}"#);
    assert_eq!(
        modified(judge(&governance, &answer(result)).await),
        r#"{"content":[{"type":"text","text":"ask [e-mail], [aws key]"}],"n":1.0}"#
    );
    blocked(
        judge(
            &governance,
            &call(json!({"name": "t", "arguments": {"x": text}})),
        )
        .await,
        Reason::RegoDenied,
    );
    let fine = json!({"name": "t", "arguments": {"to": "anna@example.com"}});
    assert!(matches!(
        judge(&governance, &call(fine)).await,
        Ruling::Pass
    ));
}

#[tokio::test]
async fn agents_see_and_call_their_own_tools() {
    let governance = example("mcp-agent-tools", "mcp/authz");
    // The caller of these tests is in the sandbox `box`, which has the default.
    let named = |name: &str| call(json!({"name": name}));
    assert!(matches!(
        judge(&governance, &named("read_file")).await,
        Ruling::Pass
    ));
    let denial = blocked(
        judge(&governance, &named("write_file")).await,
        Reason::RegoDenied,
    );
    assert_eq!(denial.message, "box may not use fs/write_file.");
    let listing = Message {
        method: "tools/list",
        params: Some("{}".to_owned()),
        ..answer(
            r#"{"tools":[ {"name":"read_file","inputSchema":{"max":1e30}}, {"name":"write_file"} ],"nextCursor":"c"}"#,
        )
    };
    assert_eq!(
        modified(judge(&governance, &listing).await),
        r#"{"tools":[{"name":"read_file","inputSchema":{"max":1e30}}],"nextCursor":"c"}"#
    );
}

#[tokio::test]
async fn servers_may_not_ask_for_secrets() {
    let governance = example("mcp-elicitation", "mcp/elicitation");
    let ask = |method: &'static str, params: Value| Message {
        moment: Moment::Elicitation,
        method,
        ..call(params)
    };
    let fine = ask("elicitation/create", json!({"message": "Which branch?"}));
    assert!(matches!(judge(&governance, &fine).await, Ruling::Pass));
    for bad in [
        ask("elicitation/create", json!({"message": "Your password?"})),
        ask("sampling/createMessage", json!({"maxTokens": 1})),
        ask("roots/list", json!({})),
        ask("other", json!({})),
    ] {
        blocked(judge(&governance, &bad).await, Reason::RegoDenied);
    }
}
