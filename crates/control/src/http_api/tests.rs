//! Tests of request parsing: routes, parameters and bodies.

use proptest::prelude::*;

use super::*;
use crate::openapi::RequestContent;

const NOW: UnixMillis = UnixMillis::new(1_790_000_000_000);
const ROW: &str = r#"{"container_ip":"10.0.0.1","container_id":"abc","repos":[]}"#;

fn request(method: &str, target: &str, body: &str) -> Result<ApiRequest, ControlError> {
    let (path, query) = target
        .split_once('?')
        .map_or((target, None), |(p, q)| (p, Some(q)));
    ApiRequest::new(
        method.parse().unwrap(),
        path,
        query,
        Bytes::from(body.to_owned()),
    )
}

fn read(method: &str, target: &str, body: &str) -> Result<Action, ControlError> {
    read_action(&request(method, target, body)?, NOW)
}

fn status(result: Result<Action, ControlError>) -> u16 {
    result.unwrap_err().respond().0.as_u16()
}

#[test]
fn every_documented_route_parses_to_its_action() {
    for route in ROUTES {
        let path = route
            .path
            .replace("{id}", "abc")
            .replace("{name}", "github");
        let path = path.replace("{request}", "01M7H3RARVNE2837QB27MYVE9K");
        let body = match route.request {
            RequestContent::File => r#"{"path":"/b"}"#,
            RequestContent::CreateSandbox => r#"{"name":"fix"}"#,
            RequestContent::Session => r#"{"purpose":"exec"}"#,
            RequestContent::Snapshot => r#"{"message":"bash: make"}"#,
            RequestContent::Label | RequestContent::Restore => r#"{"label":"before"}"#,
            RequestContent::Fork => r#"{"name":"other"}"#,
            RequestContent::Port => r#"{"host":"127.0.0.1:8080","port":80}"#,
            RequestContent::Accept => r#"{"server": "calc"}"#,
            RequestContent::Grant => r#"{"grant": ["github"]}"#,
            RequestContent::Variables => r#"{"GH_TOKEN": "x"}"#,
            RequestContent::Try => r#"{"url":"https://x.example/"}"#,
            RequestContent::Registration | RequestContent::Container => ROW,
            RequestContent::Nothing
            | RequestContent::AuditQuery
            | RequestContent::Force
            | RequestContent::HealthDepth
            | RequestContent::Named => "",
        };
        let action = read(route.method, &path, body).unwrap();
        assert_eq!(
            action.name(),
            route.action,
            "{} {}",
            route.method,
            route.path
        );
    }
}

#[test]
fn known_path_with_wrong_method_lists_the_allowed_methods() {
    match read("PUT", "/internal/containers", "") {
        Err(ControlError::Method(allowed)) => assert_eq!(allowed, "POST, GET"),
        other => panic!("{other:?}"),
    }
    assert_eq!(status(read("PUT", "/internal/containers", "")), 405);
    for path in [
        "/",
        "",
        "/v1",
        "/v1/",
        "/v1/health/",
        "//v1/health",
        "/v2/health",
        "/internal/../v1/health",
    ] {
        assert_eq!(status(read("GET", path, "")), 404, "{path}");
    }
}

#[test]
fn id_in_the_path_is_decoded_once_and_validated() {
    let id = |text: &str| SandboxId::parse(text).unwrap();
    assert_eq!(
        read("DELETE", "/internal/containers/a%62c", "").unwrap(),
        Action::Unregister(id("abc"))
    );
    for path in [
        "/internal/containers/a%2Fb",
        "/internal/containers/%2e%2e",
        "/internal/containers/a%2562",
    ] {
        assert_eq!(status(read("GET", path, "")), 404, "{path}");
    }
    for path in [
        "/internal/containers/%zz",
        "/internal/containers/%f",
        "/internal/containers/%ff",
    ] {
        assert_eq!(status(read("GET", path, "")), 400, "{path}");
    }
}

#[test]
fn unknown_fields_are_ignored_for_existing_programs_only() {
    let row = ROW.replace('{', r#"{"colour":"red","#);
    assert_eq!(status(read("POST", "/v1/registrations", &row)), 400);
    match read("POST", "/internal/containers", &row).unwrap() {
        Action::Register(request) => {
            assert_eq!(request.warnings, ["Ignored unknown fields: ['colour']"]);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn health_runs_its_checks_unless_the_query_disables_them() {
    for (target, depth) in [
        ("/internal/health", HealthDepth::Checked),
        ("/v1/health?checks=true", HealthDepth::Checked),
        ("/v1/health?checks=false", HealthDepth::Known),
    ] {
        assert_eq!(read("GET", target, "").unwrap(), Action::Health(depth));
    }
    for wrong in ["/v1/health?checks=no", "/v1/health?x=1"] {
        assert_eq!(status(read("GET", wrong, "")), 400);
    }
}

#[test]
fn audit_query_refuses_unknown_parameters_and_values() {
    let target = "/v1/audit?sandbox=abc&kind=http&verdict=deny&reason=host_denied&after=7&limit=5&newest_first=true";
    let Action::QueryAudit(query) = read("GET", target, "").unwrap() else {
        panic!()
    };
    assert_eq!(query.sandbox.unwrap().as_str(), "abc");
    assert_eq!(query.kind, Some(policy::audit::Kind::Http));
    assert_eq!(
        (query.after, query.limit, query.newest_first),
        (Some(7), Some(5), true)
    );
    for bad in [
        "colour=red",
        "kind=ftp",
        "limit=-1",
        "sandbox=..",
        "since=x",
        "request_id=1",
        "limit=1%00",
    ] {
        assert_eq!(
            status(read("GET", &format!("/v1/audit?{bad}"), "")),
            400,
            "{bad}"
        );
    }
}

#[test]
fn relative_file_path_is_refused() {
    assert_eq!(
        status(read("POST", "/v1/registry/backup", r#"{"path":"b.db"}"#)),
        400
    );
    assert_eq!(
        status(read(
            "POST",
            "/v1/registry/backup",
            r#"{"path":"/b.db","mode":"x"}"#
        )),
        400
    );
    assert_eq!(status(read("POST", "/v1/registry/backup", "")), 400);
}

#[test]
fn only_registry_writes_count_against_the_rate_limit() {
    for (method, path, counts) in [
        ("POST", "/internal/containers", true),
        ("DELETE", "/internal/containers/a", true),
        ("POST", "/v1/registrations", true),
        ("GET", "/internal/containers", false),
        ("POST", "/v1/config/reload", false),
    ] {
        assert_eq!(
            request(method, path, "").unwrap().is_registry_write(),
            counts,
            "{method} {path}"
        );
    }
}

#[test]
fn docs_openapi_json_is_up_to_date() {
    let path = std::path::Path::new(&std::env::var_os("CARGO_MANIFEST_DIR").unwrap())
        .join("../../docs/openapi.json");
    let document = format!("{:#}\n", crate::openapi::document());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &document).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == document,
        "docs/openapi.json is out of date; run: just docs"
    );
}

proptest! {
    #[test]
    fn arbitrary_requests_never_panic(path in "(/[ -~]{0,12}){0,5}", query in "[ -~]{0,30}", body in ".{0,60}") {
        for method in ["GET", "POST", "DELETE"] {
            if let Err(error) = read(method, &format!("{path}?{query}"), &body) {
                prop_assert!(error.respond().0.is_client_error());
            }
        }
    }
}
