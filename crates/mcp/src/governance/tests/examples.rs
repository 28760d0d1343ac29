//! The example bundles of `policies/`, evaluated as in the gate. Their own Rego tests run in the
//! interpreter only.

use std::path::PathBuf;

use super::*;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies")
}

fn example(name: &str, entrypoint: &str) -> Governance {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("palisade.yaml");
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
fn every_example_bundle_passes_its_own_tests() {
    use policy::rego::trial::{TestOutcome, run_tests};

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
            .filter(|test| test.outcome != TestOutcome::Passed)
            .collect();
        assert!(failed.is_empty(), "{}: {failed:#?}", path.display());
        count += 1;
    }
    assert!(count >= 5);
}

#[tokio::test]
async fn deny_destructive_example_blocks_destructive_calls() {
    let governance = example("mcp-deny-destructive", "mcp/authz");
    let named = |name: &str| call(json!({"name": name, "arguments": {"path": "x"}}));
    assert!(matches!(
        ruling_of(&governance, &named("read_file")).await,
        Ruling::Pass
    ));
    for name in ["delete_file", "dropTable", "fs__purge"] {
        let denial = blocked(
            ruling_of(&governance, &named(name)).await,
            Reason::RegoDenied,
        );
        assert!(denial.message.contains("not allowed"), "{denial:?}");
    }
    let wrapped = json!({"name": "mcp-exec", "arguments": {"name": "sh", "arguments": "{\"c\":\"rm -rf /\"}"}});
    blocked(
        ruling_of(&governance, &call(wrapped)).await,
        Reason::RegoDenied,
    );
    // Calls without a valid name call no tool.
    for odd in [json!({"name": 7}), json!({}), json!([1])] {
        let ruling = ruling_of(&governance, &call(&odd)).await;
        assert!(matches!(ruling, Ruling::Pass), "{odd}: {ruling:?}");
    }
    assert!(matches!(
        ruling_of(&governance, &answer("{}")).await,
        Ruling::Pass
    ));
}

#[tokio::test]
async fn redact_example_removes_addresses_and_keys() {
    let governance = example("mcp-redact-personal-data", "mcp/authz");
    let text = concat!("ask anna@example.com, AK", "IAABCDEFGHIJKLMNOP");
    let result = format!(r#"{{"content":[{{"type":"text","text":"{text}"}}],"n":1.0}}"#);
    assert_eq!(
        modified(ruling_of(&governance, &answer(result)).await),
        r#"{"content":[{"type":"text","text":"ask [e-mail], [aws key]"}],"n":1.0}"#
    );
    blocked(
        ruling_of(
            &governance,
            &call(json!({"name": "t", "arguments": {"x": text}})),
        )
        .await,
        Reason::RegoDenied,
    );
    let fine = json!({"name": "t", "arguments": {"to": "anna@example.com"}});
    assert!(matches!(
        ruling_of(&governance, &call(fine)).await,
        Ruling::Pass
    ));
}

#[tokio::test]
async fn agent_tools_example_limits_listing_and_calls() {
    let governance = example("mcp-agent-tools", "mcp/authz");
    // The caller of these tests is in the sandbox `box`, which has the default.
    let named = |name: &str| call(json!({"name": name}));
    assert!(matches!(
        ruling_of(&governance, &named("read_file")).await,
        Ruling::Pass
    ));
    let denial = blocked(
        ruling_of(&governance, &named("write_file")).await,
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
        modified(ruling_of(&governance, &listing).await),
        r#"{"tools":[{"name":"read_file","inputSchema":{"max":1e30}}],"nextCursor":"c"}"#
    );
}

#[tokio::test]
async fn elicitation_example_blocks_requests_for_secrets() {
    let governance = example("mcp-elicitation", "mcp/elicitation");
    let ask = |method: &'static str, params: Value| Message {
        moment: Moment::Elicitation,
        method,
        ..call(params)
    };
    let fine = ask("elicitation/create", json!({"message": "Which branch?"}));
    assert!(matches!(ruling_of(&governance, &fine).await, Ruling::Pass));
    for bad in [
        ask("elicitation/create", json!({"message": "Your password?"})),
        ask("sampling/createMessage", json!({"maxTokens": 1})),
        ask("roots/list", json!({})),
        ask("other", json!({})),
    ] {
        blocked(ruling_of(&governance, &bad).await, Reason::RegoDenied);
    }
}
