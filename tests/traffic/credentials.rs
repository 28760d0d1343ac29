//! Credentials of the operator: the gate adds them, and no sandbox ever holds one.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testkit::origin::{OriginReply, OriginRequest, OriginServer};
use testkit::{http, output, wait};

use crate::traffic_fixture::{Agent, Rules, TrafficFixture, describe, text};

/// The value of every credential in these tests.
const SECRET: &str = "sk-real-5e9c41d07ab2";

/// A row of the operator: `mine` for api.example, from the variable MINE.
const ROW: &str = "credentials: {rows: [{name: mine, host: api.example, source: 'env:MINE', \
                   variable: MINE_KEY, query: key, body_field: api_key}]}";

/// Creates a gate with an origin that answers with `answer`, and a sandbox with the credential
/// `mine`.
fn with_row(
    section: &str,
    answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    check: impl FnOnce(&OriginServer, &Agent<'_>),
) {
    let fixture = TrafficFixture::new();
    let names = ["api.example", "other.example"];
    let origin = fixture.https(&names, answer);
    let plain = OriginServer::http(|_| OriginReply::text("plain"));
    let rules = Rules::new()
        .allow("api.example")
        .allow("other.example")
        .at("api.example:443", origin.address())
        .at("api.example:80", plain.address())
        .at("other.example", origin.address())
        .section(section);
    fixture.write(&rules);
    start_with(&fixture, "MINE", SECRET);
    let agent = fixture.create_with("fix", &["--credential", "mine"]);
    check(&origin, &agent);
    assert!(
        plain.requests().is_empty(),
        "nothing was sent over plain HTTP"
    );
}

/// Starts the gate with a variable.
fn start_with(fixture: &TrafficFixture, name: &str, value: &str) {
    let started = fixture
        .palisade(&["gate", "start"])
        .env(name, value)
        .output();
    let started = started.unwrap();
    assert!(started.status.success(), "{}", describe(&started));
}

fn ok(_: &OriginRequest) -> OriginReply {
    OriginReply::text("hello")
}

/// The forms in which a value could leak.
fn forms(secret: &str) -> Vec<String> {
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    vec![secret.to_owned(), STANDARD.encode(secret), hex]
}

#[track_caller]
fn assert_absent(what: &str, text: &str) {
    for form in forms(SECRET) {
        assert!(!text.contains(&form), "{what} contains {form}: {text}");
    }
}

#[test]
fn credential_is_added_to_requests_with_and_without_placeholder() {
    with_row(ROW, ok, |origin, agent| {
        let placeholder = agent.stdout_of("echo $MINE_KEY");
        assert!(placeholder.starts_with("PALISADE"), "{placeholder}");
        for args in [
            "",
            "-H \"Authorization: Bearer $MINE_KEY\"",
            "-u user:$MINE_KEY",
        ] {
            let got = agent.curl(&format!("{args} https://api.example/v1"));
            assert_eq!((got.status, got.body.as_str()), (200, "hello"), "{args}");
            let seen = origin.requests().pop().unwrap();
            let expected = format!("Bearer {SECRET}");
            assert_eq!(
                seen.header("authorization"),
                Some(expected.as_str()),
                "{args}"
            );
            assert_eq!(seen.headers.get_all("authorization").iter().count(), 1);
        }
        let got = agent.curl("\"https://api.example/v1?a=1&key=$MINE_KEY\"");
        assert_eq!(got.status, 200);
        let seen = origin.requests().pop().unwrap();
        assert_eq!(seen.uri.query(), Some(format!("a=1&key={SECRET}").as_str()));
        let body = "-H 'content-type: application/json' \
                    -d \"{\\\"api_key\\\":\\\"$MINE_KEY\\\",\\\"q\\\":1}\"";
        assert_eq!(
            agent.curl(&format!("{body} https://api.example/v1")).status,
            200
        );
        let seen = origin.requests().pop().unwrap();
        let expected = format!("{{\"api_key\":\"{SECRET}\",\"q\":1}}");
        assert_eq!(String::from_utf8_lossy(&seen.body), expected);
        let records = agent.fixture.records();
        let named = records
            .iter()
            .filter(|record| record["credential"] == "mine");
        assert_eq!(named.count(), 5);
    });
}

#[test]
fn real_value_is_nowhere_in_the_sandbox_or_in_records() {
    let echo = |request: &OriginRequest| {
        let header = request
            .header("authorization")
            .unwrap_or_default()
            .to_owned();
        let value = header.trim_start_matches("Bearer ").to_owned();
        let text = format!("{header} {}", STANDARD.encode(&value));
        OriginReply::text(text).header("x-echo", &value)
    };
    with_row(ROW, echo, |_, agent| {
        let answer = agent.stdout_of("curl -sS -i --max-time 25 https://api.example/v1");
        assert!(answer.contains("Bearer ****"), "{answer}");
        assert_absent("the response", &answer);
        let state = agent.stdout_of(
            "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; \
             grep -rsl 'sk-real-' / --include='*' --exclude-dir=proc --exclude-dir=sys \
             --exclude-dir=usr --exclude-dir=lib || true",
        );
        assert_absent("the sandbox", &state);
        let fixture = agent.fixture;
        let records = format!("{:?}", fixture.records());
        assert_absent("the audit log", &records);
        assert_absent("metrics", &fixture.metrics());
        let list = fixture.ok(&["credentials", "list", "--json"]);
        assert_absent("the list of credentials", &list);
        let log = std::fs::read(fixture.gate_dir.path().join("state/gate.log"));
        let log = String::from_utf8_lossy(&log.unwrap_or_default()).into_owned();
        assert_absent("the log", &log);
    });
}

#[test]
fn misplaced_placeholders_are_refused_with_an_alert() {
    with_row(ROW, ok, |origin, agent| {
        let other = agent
            .fixture
            .create_with("other", &["--credential", "mine"]);
        let foreign = other.stdout_of("echo $MINE_KEY");
        for args in [
            "-H \"Authorization: Bearer $MINE_KEY\" https://other.example/".to_owned(),
            "-H \"Authorization: Bearer $MINE_KEY\" http://api.example/".to_owned(),
            "-H \"X-Note: $MINE_KEY\" https://api.example/".to_owned(),
            "\"https://api.example/$MINE_KEY\"".to_owned(),
            format!("-H 'Authorization: Bearer {foreign}' https://api.example/"),
        ] {
            let id = agent.curl(&args).refused(403, "placeholder_misused");
            let find = || {
                let mut records = agent.fixture.records().into_iter();
                records.find(|record| record["kind"] == "alert" && record["request_id"] == id)
            };
            let alert = wait::until_or(find, || format!("an alert about {args}"));
            assert_eq!(alert["event"], "placeholder_misused", "{args}");
            assert_eq!(alert["sandbox"], agent.id.as_str());
        }
        assert!(origin.requests().is_empty());
        let metrics = agent.fixture.metrics();
        let counter = "proxy_alerts_total{reason=\"placeholder_misused\"} 5";
        assert!(metrics.contains(counter), "{metrics}");
    });
}

#[test]
fn placeholder_in_a_chat_body_is_redacted_and_passes() {
    with_row(ROW, ok, |origin, agent| {
        let line = "-H 'content-type: application/json' \
                    -d \"{\\\"messages\\\":[\\\"my key is $MINE_KEY.\\\"]}\"";
        for host in ["api.example", "other.example"] {
            let got = agent.curl(&format!("{line} https://{host}/chat"));
            assert_eq!(got.status, 200, "{got:?}");
            let seen = origin.requests().pop().unwrap();
            let body = String::from_utf8_lossy(&seen.body).into_owned();
            assert!(body.contains("my key is REDACTED-BY-GATE"), "{body}");
            assert!(!body.contains("PALISADE"), "{body}");
        }
    });
}

#[test]
fn foreign_credential_is_replaced_and_noted_or_refused() {
    let attack = "-H 'Authorization: Bearer sk-attacker' https://api.example/";
    with_row(ROW, ok, |origin, agent| {
        assert_eq!(agent.curl(attack).status, 200);
        let seen = origin.requests().pop().unwrap();
        assert_eq!(
            seen.header("authorization").unwrap(),
            format!("Bearer {SECRET}")
        );
        let records = agent.fixture.records();
        let noted = |record: &&Value| record["event"] == "foreign_credential_replaced";
        assert_eq!(records.iter().filter(noted).count(), 1);
    });
    let refuse = ROW.replace("{rows:", "{foreign: refuse, rows:");
    with_row(&refuse, ok, |origin, agent| {
        agent.curl(attack).refused(403, "credential_foreign");
        assert!(origin.requests().is_empty());
        assert_eq!(agent.curl("https://api.example/").status, 200);
        // The sandbox's own placeholder is not foreign, wherever it may stand.
        let body = "-H 'content-type: application/json' -d \"{\\\"api_key\\\":\\\"$MINE_KEY\\\"}\"";
        let got = agent.curl(&format!("{body} https://api.example/"));
        assert_eq!(got.status, 200, "{got:?}");
        let sent = origin.requests().pop().unwrap();
        assert_eq!(sent.body, format!("{{\"api_key\":\"{SECRET}\"}}"));
    });
}

#[test]
fn missing_credential_is_a_server_error_with_the_configuring_command() {
    let section = "credentials: {rows: [{name: mine, host: api.example, source: 'env:UNSET_X'}]}";
    with_row(section, ok, |origin, agent| {
        let got = agent.curl("https://api.example/");
        let id = got.refused(500, "credential_missing");
        assert_eq!(
            got.json()["error"],
            "Credential not configured for this provider"
        );
        assert_eq!(got.json()["rule"], "credentials:mine");
        let why = agent.fixture.ok(&["why", &id]);
        assert!(why.contains("palisade credentials test mine"), "{why}");
        assert!(origin.requests().is_empty());
        let tested = agent.fixture.run(&["credentials", "test", "mine"]);
        assert_eq!(tested.status.code(), Some(1));
        let printed = output::stdout(&tested);
        assert!(printed.contains("mine: missing"), "{printed}");
        assert!(
            printed.contains("the environment variable UNSET_X is not set"),
            "{printed}"
        );
    });
}

#[test]
fn refused_value_is_read_again_once_and_the_request_repeated() {
    let fixture = TrafficFixture::new();
    let origin = fixture.https(&["api.example"], |request| {
        match request.header("authorization") {
            Some("Bearer token-1") => OriginReply::status(401),
            Some("Bearer token-2") => OriginReply::text(format!("{} bytes", request.length)),
            other => panic!("{other:?}"),
        }
    });
    let runs = fixture.gate_dir.path().join("runs");
    let line = format!("echo >> {0}; echo token-$(wc -l < {0})", runs.display());
    let rules = Rules::new()
        .allow("api.example")
        .at("api.example", origin.address())
        .section(&format!(
            "credentials: {{rows: [{{name: mine, host: api.example, source: 'command:{line}'}}]}}"
        ));
    fixture.write(&rules);
    let agent = fixture.create_with("fix", &["--credential", "mine"]);
    let many = "for n in $(seq 40); do curl -sS --max-time 25 -d body-$n https://api.example/ \
                -o /tmp/$n & done; wait; cat /tmp/[0-9]*";
    let answers = agent.stdout_of(many);
    assert_eq!(answers.matches("bytes").count(), 40, "{answers}");
    assert_eq!(std::fs::read_to_string(&runs).unwrap().lines().count(), 2);
    let requests = fixture.records().into_iter();
    let requests: Vec<Value> = requests.filter(|record| record["kind"] == "http").collect();
    assert_eq!(requests.len(), 40, "one record a request");
    assert!(requests.iter().all(|record| record["status"] == 200));
}

#[test]
fn endpoints_that_create_credentials_are_refused() {
    let fixture = TrafficFixture::new();
    let origin = fixture.https(&["api.anthropic.com"], ok);
    let rules = Rules::new()
        .allow("api.anthropic.com")
        .at("api.anthropic.com", origin.address());
    fixture.write(&rules);
    start_with(&fixture, "ANTHROPIC_API_KEY", SECRET);
    let agent = fixture.create("fix");
    let url = "https://api.anthropic.com";
    assert_eq!(agent.curl(&format!("-d x {url}/v1/messages")).status, 200);
    let mint = format!("-d x {url}/api/oauth/claude_cli/create_api_key");
    agent.curl(&mint).refused(403, "credential_endpoint");
    assert_eq!(origin.requests().len(), 1);
    assert_eq!(origin.requests()[0].header("x-api-key"), Some(SECRET));
}

#[test]
fn grants_are_changed_at_run_time_and_survive_a_restart() {
    with_row(ROW, ok, |origin, agent| {
        let fixture = agent.fixture;
        let sent = || {
            let got = agent.curl("https://api.example/");
            assert_eq!(got.status, 200);
            let seen = origin.requests().pop().unwrap();
            seen.header("authorization").map(str::to_owned)
        };
        let real = Some(format!("Bearer {SECRET}"));
        assert_eq!(sent(), real);
        fixture.ok(&["credentials", "revoke", "fix", "mine"]);
        assert_eq!(sent(), None);
        assert_eq!(agent.stdout_of("echo \"[$MINE_KEY]\""), "[]");
        let printed = fixture.ok(&["credentials", "grant", "fix", "mine"]);
        assert_eq!(printed.trim(), "credentials of fix: mine");
        let before = agent.stdout_of("echo $MINE_KEY");
        fixture.ok(&["gate", "stop"]);
        start_with(fixture, "MINE", SECRET);
        assert_eq!(sent(), real);
        assert_eq!(agent.stdout_of("echo $MINE_KEY"), before);
        let unknown = fixture.run(&["credentials", "grant", "fix", "nothing"]);
        assert!(output::stderr(&unknown).contains("There is no credential 'nothing'"));
    });
}

#[test]
fn variable_of_a_later_command_wins_over_the_environment_of_the_gate() {
    with_row(ROW, ok, |origin, agent| {
        let listed = agent
            .fixture
            .palisade(&["credentials", "list"])
            .env("MINE", "newer-value")
            .output();
        let listed = output::stdout(&listed.unwrap());
        assert!(
            listed.contains("mine") && listed.contains("ready"),
            "{listed}"
        );
        assert_eq!(agent.curl("https://api.example/").status, 200);
        let seen = origin.requests().pop().unwrap();
        assert_eq!(seen.header("authorization"), Some("Bearer newer-value"));
    });
}

#[test]
fn default_rows_are_granted_only_if_they_have_a_value() {
    let fixture = TrafficFixture::new();
    fixture.write(&Rules::new());
    start_with(&fixture, "ANTHROPIC_API_KEY", SECRET);
    let agent = fixture.create("fix");
    let row = fixture
        .control("GET", &format!("/v1/registrations/{}", agent.id))
        .json();
    assert_eq!(row["credentials"], json!(["anthropic"]));
    let key = agent.stdout_of("echo $ANTHROPIC_API_KEY");
    assert!(key.starts_with("sk-ant-api03-PALISADE"), "{key}");
    assert_eq!(key.len(), 108);
    assert_eq!(agent.stdout_of("echo \"[$OPENAI_API_KEY]\""), "[]");
}

#[test]
fn seed_003_line_05_real_credential_from_sandbox_and_registered_container() {
    let fixture = TrafficFixture::new();
    let api = fixture.https(&["api.anthropic.com"], ok);
    let rules = |rules: Rules| {
        rules
            .allow("api.anthropic.com")
            .at("api.anthropic.com", api.address())
    };
    let net = crate::shared_network::create_net_started_by(fixture, rules, |fixture| {
        start_with(fixture, "ANTHROPIC_API_KEY", SECRET);
    });
    let agent = net.fixture.create("fix");
    assert_eq!(
        agent.curl("https://api.anthropic.com/v1/messages").status,
        200
    );
    // As an existing program registers a container.
    let body = json!({
        "container_ip": "127.0.0.42", "container_id": "c-1", "repos": [],
        "credentials": ["anthropic"],
    });
    let socket = net.fixture.gate_dir.control();
    let made = http::send(
        &socket,
        "POST",
        "/internal/containers",
        body.to_string().as_bytes(),
    );
    let made = made.unwrap();
    assert_eq!(made.status, 201, "{}", made.text());
    let placeholder = text(&made.json()["placeholders"]["ANTHROPIC_API_KEY"]);
    assert!(
        placeholder.starts_with("sk-ant-api03-PALISADE"),
        "{placeholder}"
    );
    let with_placeholder = format!("-H 'x-api-key: {placeholder}' https://api.anthropic.com/");
    for args in ["https://api.anthropic.com/v1/messages", &with_placeholder] {
        assert_eq!(net.curl("127.0.0.42", args).status, 200, "{args}");
    }
    net.register("c-2", "127.0.0.43", &["--credential", "openai"]);
    assert_eq!(
        net.curl("127.0.0.43", "https://api.anthropic.com/").status,
        200
    );
    let keys: Vec<Option<String>> = api
        .requests()
        .iter()
        .map(|request| request.header("x-api-key").map(str::to_owned))
        .collect();
    let real = Some(SECRET.to_owned());
    assert_eq!(keys, [real.clone(), real.clone(), real, None]);
}
