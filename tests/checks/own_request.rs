//! The gate's own request for a push, which fetches refs and trees of upstream. Each test sends the
//! body of the push only after it has made the check deny, so that the push itself has passed the
//! check before.

use std::cell::Cell;
use std::net::Ipv4Addr;
use std::process::Stdio;

use serde_json::{Value, json};
use testkit::http::{self, HttpResponse};
use testkit::port::Port;
use testkit::resolver::{self, RecordData, Resolver, record};
use testkit::wait;

use crate::audit::Audit;
use crate::client::{Client, Connection};
use crate::git_fixture::{FixtureOptions, GitFixture};
use crate::network::data_like_names;

/// Field of the audit records of the gate's own requests.
const OWN_REQUEST: (&str, &str) = ("event", "asked_for_push");

/// Limits whose result does not depend on the duration of a test. A push takes three requests: the
/// client's, and two of the gate.
const POLICY: &str = "rate_limits:
  per_upstream:
    limited.forge.example: {requests_per_second: 0.0001, burst_size: 4}
circuit_breakers:
  upstreams:
    broken.forge.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
";

/// Text of the policy bundle.
const BUNDLE: &str = r#"package http.authz

default decision := {"action": "allow"}

decision := {"action": "block", "reason": "Not this path."} if {
	input.host == "bundled.forge.example"
	endswith(input.path, "/git-upload-pack")
}
"#;

/// A gate in front of a forge, with a host for each check.
pub(crate) struct OwnRequests {
    git_fixture: GitFixture,
    audit: Audit,
    /// The id of the commit that every push sends.
    commit: String,
    /// The pack of `commit`.
    pack: Vec<u8>,
    /// Number of the next container, and last byte of its IP address.
    next_container: Cell<u8>,
    /// Number of the next branch.
    next_branch: Cell<u8>,
    _resolver: Resolver,
    _closed: Port,
    _bundle: tempfile::TempDir,
}

impl OwnRequests {
    pub(crate) fn start() -> Option<Self> {
        let (resolver, closed) = (Resolver::start(), Port::take());
        let data_like_name = data_like_names("forge.example").next().unwrap();
        for name in [
            "public.forge.example",
            "private.forge.example",
            &data_like_name,
        ] {
            let records = vec![record(name, RecordData::A(Ipv4Addr::LOCALHOST))];
            resolver.set_reply(name, 1, resolver::DnsReply::Records(records));
        }
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("policy.rego"), BUNDLE).unwrap();
        let git_fixture = GitFixture::with_options(FixtureOptions {
            checked: true,
            policy: POLICY,
            top: &format!(
                "policies:\n  bundles:\n    - {{id: authz, path: {:?}, entrypoint: http/authz}}\n",
                bundle.path()
            ),
            domains: ", limited.forge.example, bundled.forge.example, \
                {host: broken.forge.example, ports: [443, 8443]}, \
                {host: paths.forge.example, paths: [/acme/app/git-receive-pack]}, \
                {host: public.forge.example, ports: [{port}]}, \
                {host: private.forge.example, ports: [{port}]}, \
                {host: \"*.forge.example\", ports: [{port}]}",
            hosts: &format!(
                ", limited.forge.example, bundled.forge.example, broken.forge.example, \
                 paths.forge.example, public.forge.example, private.forge.example, {data_like_name}"
            ),
            resolve: &format!(
                ", \"limited.forge.example\": \"{{forge}}\", \
                 \"bundled.forge.example\": \"{{forge}}\", \
                 \"broken.forge.example:443\": \"{{forge}}\", \
                 \"broken.forge.example:8443\": \"{}\", \
                 \"paths.forge.example\": \"{{forge}}\"",
                closed.address()
            ),
            egress: &format!(
                "  dns: {{upstreams: [\"{}\"]}}\n  allow_private:\n    \
                 - {{host: public.forge.example, cidr: 127.0.0.1/32}}\n    \
                 - {{host: {data_like_name}, cidr: 127.0.0.1/32}}\n",
                resolver.address()
            ),
            ..FixtureOptions::default()
        });
        let dir = git_fixture.working_copy("work");
        git_fixture.commit(&dir, "file", "work\n");
        let commit = git_fixture.git_in(&dir, &["rev-parse", "HEAD"]);
        let mut command = git_fixture.command(&dir, &["pack-objects", "--stdout", "-q", "--revs"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, b"HEAD\n^HEAD~1\n").unwrap();
        drop(stdin);
        let packed = child.wait_with_output().unwrap();
        assert!(packed.status.success());
        Some(Self {
            audit: Audit::new(git_fixture.control_socket()),
            git_fixture,
            commit,
            pack: packed.stdout,
            next_container: Cell::new(2),
            next_branch: Cell::new(0),
            _resolver: resolver,
            _closed: closed,
            _bundle: bundle,
        })
    }

    /// `host` with the port of the forge, for a host that the gate resolves by DNS.
    fn with_forge_port(&self, host: &str) -> String {
        format!("{host}:{}", self.git_fixture.forge.address().port())
    }

    /// A new container that may push to a repository. Each test needs its own: a container has a
    /// burst of ten pushes.
    fn create_container(&self) -> Container<'_> {
        let number = self.next_container.get();
        self.next_container.set(number + 1);
        let container = Container {
            fixture: self,
            id: format!("container-{number}"),
            ip: Ipv4Addr::new(127, 0, 0, number),
        };
        container.register("acme/app");
        container
    }
}

/// A container of the shared network.
struct Container<'a> {
    fixture: &'a OwnRequests,
    id: String,
    ip: Ipv4Addr,
}

impl Container<'_> {
    /// Registers the container for one repository, and replaces an earlier registration.
    fn register(&self, repository: &str) {
        let body = json!({
            "container_id": self.id, "container_ip": self.ip,
            "repos": [{"name": repository}], "metadata": {"trusts_ca": true},
        });
        self.send_to_control("POST", "/internal/containers", &body);
    }

    fn unregister(&self) {
        let path = format!("/internal/containers/{}", self.id);
        self.send_to_control("DELETE", &path, &json!({}));
    }

    fn send_to_control(&self, method: &str, path: &str, body: &Value) {
        let control = self.fixture.git_fixture.control_socket();
        // The gate accepts ten registry changes a second.
        let answer = wait::until("a registry change", || {
            let body = body.to_string();
            let answer = http::send(&control, method, path, body.as_bytes()).unwrap();
            (answer.status != 429).then_some(answer)
        });
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    fn client(&self) -> Client {
        Client::Tunnel(self.ip, self.fixture.git_fixture.proxy())
    }

    /// Sends the head of a push to a new branch and waits for status 100. The push has then passed
    /// every check of its head.
    fn begin_push(&self, authority: &str) -> HeldPush<'_> {
        let fixture = self.fixture;
        let branch = fixture.next_branch.get();
        fixture.next_branch.set(branch + 1);
        let zero = "0".repeat(40);
        let commit = &fixture.commit;
        let line = format!("{zero} {commit} refs/heads/b{branch}\0report-status");
        let mut body = format!("{:04x}{line}0000", line.len() + 4).into_bytes();
        body.extend(&fixture.pack);
        let mut connection = self.client().open(authority);
        let headers = format!(
            "Content-Type: application/x-git-receive-pack-request\r\n\
             Content-Length: {}\r\nExpect: 100-continue\r\n",
            body.len()
        );
        let path = "/acme/app/git-receive-pack";
        connection.send_head("POST", path, &headers).unwrap();
        let answer = connection.read().unwrap();
        assert_eq!(answer.status, 100, "{answer:?} {}", answer.text());
        fixture.audit.mark();
        HeldPush {
            fixture,
            connection,
            body,
        }
    }

    /// Pushes; the push and the gate's own requests must be allowed.
    #[track_caller]
    fn assert_push_allowed(&self, authority: &str) {
        let push = self.begin_push(authority);
        let audit = &push.fixture.audit;
        assert_push_accepted(&push.finish());
        audit.wait_for_allowed(&[OWN_REQUEST, ("host", host_of(authority))]);
    }
}

/// A push whose head was accepted and whose body is not sent yet.
struct HeldPush<'a> {
    fixture: &'a OwnRequests,
    connection: Connection,
    body: Vec<u8>,
}

impl HeldPush<'_> {
    /// Sends the body and reads the response to the push.
    fn finish(mut self) -> HttpResponse {
        self.connection.write(&self.body).unwrap();
        self.connection.read().unwrap()
    }

    /// Sends the body; the gate's own request must be refused. The push itself may still succeed:
    /// without the refs of upstream the gate checks only the pushed objects.
    #[track_caller]
    fn assert_denied(self, authority: &str, reason: &str, rule: &str) -> HttpResponse {
        let OwnRequests {
            audit, git_fixture, ..
        } = self.fixture;
        let before = count_own_requests(git_fixture);
        let answer = self.finish();
        audit.wait_for_denied(reason, rule, &[OWN_REQUEST, ("host", host_of(authority))]);
        assert_eq!(
            count_own_requests(git_fixture),
            before,
            "requests of the gate at the forge"
        );
        answer
    }
}

/// The number of the gate's own requests that reached the forge.
fn count_own_requests(git_fixture: &GitFixture) -> usize {
    let requests = git_fixture.forge.requests().into_iter();
    requests
        .filter(|request| request.target.ends_with("/git-upload-pack"))
        .count()
}

fn host_of(authority: &str) -> &str {
    authority.split(':').next().unwrap_or_default()
}

/// Requires that the response reports an accepted ref.
#[track_caller]
fn assert_push_accepted(answer: &HttpResponse) {
    let text = answer.text();
    assert!(text.contains("ok refs/heads/"), "{answer:?} {text}");
}

pub(crate) fn identity(fixture: &OwnRequests) {
    let container = fixture.create_container();
    container.assert_push_allowed("forge.example");
    let push = container.begin_push("forge.example");
    container.unregister();
    push.assert_denied("forge.example", "identity_unknown", "identity");
}

pub(crate) fn rate(fixture: &OwnRequests) {
    let (container, host) = (fixture.create_container(), "limited.forge.example");
    container.assert_push_allowed(host);
    let push = container.begin_push(host);
    assert_push_accepted(&push.assert_denied(host, "rate_limited", "rate_limits"));
}

pub(crate) fn breaker(fixture: &OwnRequests) {
    let (container, host) = (fixture.create_container(), "broken.forge.example");
    container.assert_push_allowed(host);
    let push = container.begin_push(host);
    for _ in 0..2 {
        let path = "/acme/app/info/refs?service=git-upload-pack";
        let answer = container.client().get(&format!("{host}:8443"), path);
        assert_eq!(answer.status, 502, "{}", answer.text());
    }
    assert_push_accepted(&push.assert_denied(host, "circuit_open", "circuit_breakers"));
}

pub(crate) fn labels(fixture: &OwnRequests) {
    let container = fixture.create_container();
    let mut names = data_like_names("forge.example");
    let authority = fixture.with_forge_port(&names.next().unwrap());
    container.assert_push_allowed(&authority);
    let push = container.begin_push(&authority);
    // A new registration has a full label budget, also for the name that the push has already
    // used.
    container.unregister();
    container.register("acme/app");
    for name in names {
        let answer = container.client().get(&fixture.with_forge_port(&name), "/");
        assert_eq!(answer.status, 502, "{}", answer.text());
    }
    push.assert_denied(&authority, "rate_limited", "dns:labels");
}

pub(crate) fn allowlist(fixture: &OwnRequests) {
    let (container, host) = (fixture.create_container(), "paths.forge.example");
    container.assert_push_allowed("forge.example");
    let push = container.begin_push(host);
    assert_push_accepted(&push.assert_denied(host, "path_denied", "allowlist:paths.forge.example"));
}

pub(crate) fn bundles(fixture: &OwnRequests) {
    let (container, host) = (fixture.create_container(), "bundled.forge.example");
    container.assert_push_allowed("forge.example");
    let push = container.begin_push(host);
    assert_push_accepted(&push.assert_denied(host, "rego_denied", "rego:authz"));
}

pub(crate) fn repository(fixture: &OwnRequests) {
    let container = fixture.create_container();
    container.assert_push_allowed("forge.example");
    let push = container.begin_push("forge.example");
    container.register("acme/other");
    assert_push_accepted(&push.assert_denied("forge.example", "git_repo", "git:repositories"));
}

pub(crate) fn address(fixture: &OwnRequests) {
    let container = fixture.create_container();
    container.assert_push_allowed(&fixture.with_forge_port("public.forge.example"));
    let authority = fixture.with_forge_port("private.forge.example");
    let push = container.begin_push(&authority);
    push.assert_denied(&authority, "address_class", "dialer");
}
