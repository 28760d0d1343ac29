//! The request that the gate sends for a push, to learn what upstream has. Each push waits with
//! its body until the check is made to deny, so that the push itself has passed it by then.

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

/// The event of the gate's own requests.
const OWN_REQUEST: (&str, &str) = ("event", "asked_for_push");

/// Limits that decide the same however long a test takes. A push is three requests: its own, and
/// two of the gate's.
const POLICY: &str = "rate_limits:
  per_upstream:
    limited.forge.example: {requests_per_second: 0.0001, burst_size: 4}
circuit_breakers:
  upstreams:
    broken.forge.example: {failure_threshold: 2, recovery_timeout: 86400, success_threshold: 1}
";

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
    /// The commit that is pushed, and its pack.
    commit: String,
    pack: Vec<u8>,
    containers: Cell<u8>,
    branches: Cell<u8>,
    _resolver: Resolver,
    _closed: Port,
    _bundle: tempfile::TempDir,
}

impl OwnRequests {
    pub(crate) fn start() -> Option<Self> {
        let (resolver, closed) = (Resolver::start(), Port::take());
        let odd = data_like_names("forge.example").next().unwrap();
        for name in ["public.forge.example", "private.forge.example", &odd] {
            let records = vec![record(name, RecordData::A(Ipv4Addr::LOCALHOST))];
            resolver.set_reply(name, 1, resolver::DnsReply::Records(records));
        }
        let bundle = tempfile::tempdir().unwrap();
        std::fs::write(bundle.path().join("policy.rego"), BUNDLE).unwrap();
        let git_fixture = GitFixture::with(FixtureOptions {
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
                 paths.forge.example, public.forge.example, private.forge.example, {odd}"
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
                 - {{host: {odd}, cidr: 127.0.0.1/32}}\n",
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
            containers: Cell::new(2),
            branches: Cell::new(0),
            _resolver: resolver,
            _closed: closed,
            _bundle: bundle,
        })
    }

    /// `host` with the port of the forge, for a host that is resolved by DNS.
    fn direct(&self, host: &str) -> String {
        format!("{host}:{}", self.git_fixture.forge.address().port())
    }

    /// A container of its own, which may push to a repository: a sandbox has ten pushes at once.
    fn container(&self) -> Container<'_> {
        let number = self.containers.get();
        self.containers.set(number + 1);
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
    /// Registers it for one repository, again where it is registered already.
    fn register(&self, repository: &str) {
        let body = json!({
            "container_id": self.id, "container_ip": self.ip,
            "repos": [{"name": repository}], "metadata": {"trusts_ca": true},
        });
        self.control("POST", "/internal/containers", &body);
    }

    fn unregister(&self) {
        let path = format!("/internal/containers/{}", self.id);
        self.control("DELETE", &path, &json!({}));
    }

    fn control(&self, method: &str, path: &str, body: &Value) {
        let control = self.fixture.git_fixture.control_socket();
        // The gate takes ten writes of the registry a second.
        let answer = wait::until("a write of the registry", || {
            let body = body.to_string();
            let answer = http::send(&control, method, path, body.as_bytes()).unwrap();
            (answer.status != 429).then_some(answer)
        });
        assert!(matches!(answer.status, 200 | 201), "{}", answer.text());
    }

    fn client(&self) -> Client {
        Client::Tunnel(self.ip, self.fixture.git_fixture.proxy())
    }

    /// Begins a push to a new branch. It has passed every check of its head when this returns: the
    /// gate asks for the body then.
    fn begin_push(&self, authority: &str) -> HeldPush<'_> {
        let fixture = self.fixture;
        let branch = fixture.branches.get();
        fixture.branches.set(branch + 1);
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
        connection.begin("POST", path, &headers).unwrap();
        let answer = connection.read().unwrap();
        assert_eq!(answer.status, 100, "{answer:?} {}", answer.text());
        fixture.audit.mark();
        HeldPush {
            fixture,
            connection,
            body,
        }
    }

    /// Pushes, with the gate's own requests allowed.
    #[track_caller]
    fn pushes(&self, authority: &str) {
        let push = self.begin_push(authority);
        let audit = &push.fixture.audit;
        passed(&push.finish());
        audit.allowed(&[OWN_REQUEST, ("host", host(authority))]);
    }
}

/// A push whose body waits.
struct HeldPush<'a> {
    fixture: &'a OwnRequests,
    connection: Connection,
    body: Vec<u8>,
}

impl HeldPush<'_> {
    /// Sends the body, and reads the answer to the push.
    fn finish(mut self) -> HttpResponse {
        self.connection.write(&self.body).unwrap();
        self.connection.read().unwrap()
    }

    /// Sends the body; the gate's own request must be refused. The outcome of the push is for its
    /// own checks: without the refs of upstream its objects are read alone.
    #[track_caller]
    fn denies(self, authority: &str, reason: &str, rule: &str) -> HttpResponse {
        let OwnRequests {
            audit, git_fixture, ..
        } = self.fixture;
        let before = count_own_requests(git_fixture);
        let answer = self.finish();
        audit.denied(reason, rule, &[OWN_REQUEST, ("host", host(authority))]);
        assert_eq!(
            count_own_requests(git_fixture),
            before,
            "requests of the gate at the forge"
        );
        answer
    }
}

/// How many requests of the gate's own arrived at the forge.
fn count_own_requests(git_fixture: &GitFixture) -> usize {
    let requests = git_fixture.forge.requests().into_iter();
    requests
        .filter(|one| one.target.ends_with("/git-upload-pack"))
        .count()
}

fn host(authority: &str) -> &str {
    authority.split(':').next().unwrap_or_default()
}

/// What a push that passed is answered with.
#[track_caller]
fn passed(answer: &HttpResponse) {
    let text = answer.text();
    assert!(text.contains("ok refs/heads/"), "{answer:?} {text}");
}

pub(crate) fn identity(fixture: &OwnRequests) {
    let container = fixture.container();
    container.pushes("forge.example");
    let push = container.begin_push("forge.example");
    container.unregister();
    push.denies("forge.example", "identity_unknown", "identity");
}

pub(crate) fn rate(fixture: &OwnRequests) {
    let (container, host) = (fixture.container(), "limited.forge.example");
    container.pushes(host);
    let push = container.begin_push(host);
    passed(&push.denies(host, "rate_limited", "rate_limits"));
}

pub(crate) fn breaker(fixture: &OwnRequests) {
    let (container, host) = (fixture.container(), "broken.forge.example");
    container.pushes(host);
    let push = container.begin_push(host);
    for _ in 0..2 {
        let path = "/acme/app/info/refs?service=git-upload-pack";
        let answer = container.client().get(&format!("{host}:8443"), path);
        assert_eq!(answer.status, 502, "{}", answer.text());
    }
    passed(&push.denies(host, "circuit_open", "circuit_breakers"));
}

pub(crate) fn labels(fixture: &OwnRequests) {
    let container = fixture.container();
    let mut names = data_like_names("forge.example");
    let authority = fixture.direct(&names.next().unwrap());
    container.pushes(&authority);
    let push = container.begin_push(&authority);
    // The budget of a container that is registered anew is whole, also for a name that the push
    // has paid for.
    container.unregister();
    container.register("acme/app");
    for name in names {
        let answer = container.client().get(&fixture.direct(&name), "/");
        assert_eq!(answer.status, 502, "{}", answer.text());
    }
    push.denies(&authority, "rate_limited", "dns:labels");
}

pub(crate) fn allowlist(fixture: &OwnRequests) {
    let (container, host) = (fixture.container(), "paths.forge.example");
    container.pushes("forge.example");
    let push = container.begin_push(host);
    passed(&push.denies(host, "path_denied", "allowlist:paths.forge.example"));
}

pub(crate) fn bundles(fixture: &OwnRequests) {
    let (container, host) = (fixture.container(), "bundled.forge.example");
    container.pushes("forge.example");
    let push = container.begin_push(host);
    passed(&push.denies(host, "rego_denied", "rego:authz"));
}

pub(crate) fn repository(fixture: &OwnRequests) {
    let container = fixture.container();
    container.pushes("forge.example");
    let push = container.begin_push("forge.example");
    container.register("acme/other");
    passed(&push.denies("forge.example", "git_repo", "git:repositories"));
}

pub(crate) fn address(fixture: &OwnRequests) {
    let container = fixture.container();
    container.pushes(&fixture.direct("public.forge.example"));
    let authority = fixture.direct("private.forge.example");
    let push = container.begin_push(&authority);
    push.denies(&authority, "address_class", "dialer");
}
