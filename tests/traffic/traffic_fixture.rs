//! Fixture: a gate with its configuration files, sandboxes, and a certificate authority for fake
//! origins.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use testkit::ca::Ca;
use testkit::gate::GateDir;
use testkit::http::{self, HttpResponse};
use testkit::inside::NetNamespace;
use testkit::operator::Operator;
use testkit::origin::{OriginOptions, OriginReply, OriginRequest, OriginServer};
use testkit::{output, wait};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// The operator's configuration files.
#[derive(Clone, Default)]
pub(crate) struct Rules {
    domains: Vec<String>,
    resolve: Vec<String>,
    egress: String,
    sections: String,
    policy: String,
}

impl Rules {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Allows a host: a name, or a rule in YAML's flow form.
    pub(crate) fn allow(mut self, rule: &str) -> Self {
        self.domains.push(rule.to_owned());
        self
    }

    /// Makes the gate connect to `address` for requests to `authority`.
    pub(crate) fn at(mut self, authority: &str, address: SocketAddr) -> Self {
        self.resolve.push(format!("\"{authority}\": \"{address}\""));
        self
    }

    /// Adds a line to the section `egress`.
    pub(crate) fn egress(mut self, line: &str) -> Self {
        self.egress.push_str(&format!("  {line}\n"));
        self
    }

    /// Adds other sections of the file.
    pub(crate) fn section(mut self, text: &str) -> Self {
        self.sections.push_str(&format!("{text}\n"));
        self
    }

    /// Sets the content of policy.yaml.
    pub(crate) fn policy(mut self, text: &str) -> Self {
        self.policy = text.to_owned();
        self
    }
}

/// A gate directory, and the certificate authority of the fake origins.
pub(crate) struct TrafficFixture {
    pub(crate) gate_dir: GateDir,
    pub(crate) ca: Ca,
}

impl TrafficFixture {
    pub(crate) fn new() -> Self {
        Self::of(Operator::CurrentUser)
    }

    pub(crate) fn of(operator: Operator) -> Self {
        let gate_dir = GateDir::with_operator(operator, PALISADE);
        let ca = Ca::new("root of the fake origins");
        ca.write(gate_dir.path());
        Self { gate_dir, ca }
    }

    /// Writes the operator's files.
    pub(crate) fn write(&self, rules: &Rules) {
        let policy = self.gate_dir.path().join("policy.yaml");
        let limits = if rules.policy.is_empty() {
            "{}\n"
        } else {
            &rules.policy
        };
        std::fs::write(policy, limits).unwrap();
        let list = |items: &[String]| items.join(", ");
        self.gate_dir.write_config(&format!(
            "version: \"1.0\"\negress:\n  extra_roots: [root.pem]\n  policy: policy.yaml\n  \
             domains: [{}]\n  resolve: {{{}}}\n{}{}",
            list(&rules.domains),
            list(&rules.resolve),
            rules.egress,
            rules.sections
        ));
    }

    /// Writes the operator's files, and reloads the gate.
    pub(crate) fn reload(&self, rules: &Rules) {
        self.write(rules);
        self.ok(&["config", "reload"]);
    }

    /// A `palisade` command in the gate directory.
    pub(crate) fn palisade(&self, args: &[&str]) -> Command {
        let mut command = self.gate_dir.palisade(args);
        command.current_dir(self.gate_dir.path());
        command
    }

    /// Runs `palisade`, which may fail.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.palisade(args).output().unwrap()
    }

    /// Runs `palisade`, which must succeed.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        output::stdout(&output)
    }

    /// Runs `palisade` and parses its output as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let printed = self.ok(&[args, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
    }

    /// Creates a sandbox that trusts the gate's root.
    pub(crate) fn create(&self, name: &str) -> Agent<'_> {
        self.create_with(name, &[])
    }

    /// Creates a sandbox with more options of `palisade create`.
    pub(crate) fn create_with(&self, name: &str, options: &[&str]) -> Agent<'_> {
        let created = self.json(&[&["create", name, "--no-repo"], options].concat());
        let agent = Agent {
            fixture: self,
            name: name.to_owned(),
            id: text(&created["id"]),
        };
        agent.trust();
        agent
    }

    /// Sends a request to the control socket.
    pub(crate) fn control(&self, method: &str, path: &str) -> HttpResponse {
        http::send(&self.gate_dir.control(), method, path, b"").unwrap()
    }

    /// The gate's metrics.
    pub(crate) fn metrics(&self) -> String {
        self.control("GET", "/internal/metrics").text()
    }

    /// The process id of the gate.
    pub(crate) fn gate(&self) -> i64 {
        self.json(&["gate", "status"])["pid"].as_i64().unwrap()
    }

    /// The gate's peak memory, in KiB.
    pub(crate) fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.gate())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.unwrap().trim().trim_end_matches(" kB");
        kib.parse().unwrap()
    }

    /// Every record of the audit log.
    pub(crate) fn records(&self) -> Vec<Value> {
        let lines = self.ok(&["audit", "export"]);
        let lines = lines.lines().map(serde_json::from_str);
        lines.map(Result::unwrap).collect()
    }

    /// The record of a request, once it is written.
    pub(crate) fn record(&self, request: &str) -> Value {
        let find = || {
            let mut records = self.records().into_iter();
            records.find(|record| record["request_id"] == request)
        };
        wait::until_or(find, || format!("a record of {request}"))
    }

    /// Starts an origin with TLS for `names`.
    pub(crate) fn https(
        &self,
        names: &[&str],
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> OriginServer {
        OriginServer::https(self.ca.identity(names), answer)
    }

    /// Starts an origin with TLS and without HTTP/2 for `names`.
    pub(crate) fn https_http1(
        &self,
        names: &[&str],
        answer: impl Fn(&OriginRequest) -> OriginReply + Send + Sync + 'static,
    ) -> OriginServer {
        let kind = OriginOptions {
            tls: Some(self.ca.identity(names)),
            ..OriginOptions::default()
        };
        OriginServer::start(kind, answer)
    }
}

/// A sandbox, and commands in it.
pub(crate) struct Agent<'a> {
    pub(crate) fixture: &'a TrafficFixture,
    pub(crate) name: String,
    pub(crate) id: String,
}

impl Agent<'_> {
    /// Writes the gate's root to the path in [`TRUSTING`].
    fn trust(&self) {
        let root = self.fixture.ok(&["ca", "export"]);
        let mut child = self
            .fixture
            .palisade(&["exec", &self.name, "--", "sh", "-c", "cat >~/gate.pem"])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(root.as_bytes()).unwrap();
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }

    /// Runs a line of bash in the sandbox, which may fail.
    pub(crate) fn bash(&self, line: &str) -> Output {
        let line = format!("{TRUSTING}{line}");
        self.fixture
            .run(&["exec", &self.name, "--", "bash", "-c", &line])
    }

    /// Runs a line of bash in the sandbox, which must succeed, and returns its output.
    pub(crate) fn stdout_of(&self, line: &str) -> String {
        let output = self.bash(line);
        assert!(output.status.success(), "{line}: {}", describe(&output));
        output::stdout(&output).trim_end().to_owned()
    }

    /// Runs curl in the sandbox, which must get a response.
    pub(crate) fn curl(&self, args: &str) -> CurlResponse {
        let line = format!("curl -sS --max-time 25 -w '\\n%{{http_code}}' {args}");
        let printed = self.stdout_of(&line);
        let (body, status) = printed.rsplit_once('\n').unwrap_or(("", &printed));
        CurlResponse {
            status: status.parse().unwrap(),
            body: body.to_owned(),
        }
    }

    /// The sandbox's network namespace.
    pub(crate) fn namespace(&self) -> NetNamespace {
        NetNamespace::of_sandbox(&self.fixture.gate_dir, &self.id)
    }
}

/// Variables that make programs trust the gate's root.
const TRUSTING: &str = "export CURL_CA_BUNDLE=$HOME/gate.pem SSL_CERT_FILE=$HOME/gate.pem \
    GIT_SSL_CAINFO=$HOME/gate.pem REQUESTS_CA_BUNDLE=$HOME/gate.pem \
    NODE_EXTRA_CA_CERTS=$HOME/gate.pem; ";

/// The response of curl.
#[derive(Debug)]
pub(crate) struct CurlResponse {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl CurlResponse {
    /// The body as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Asserts a refusal with this status and reason. Returns the request id.
    #[track_caller]
    pub(crate) fn refused(&self, status: u16, reason: &str) -> String {
        refused(self.status, &self.json(), status, reason)
    }
}

/// Asserts a refusal with this status and reason. Returns the request id.
#[track_caller]
pub(crate) fn refusal(answer: &HttpResponse, status: u16, reason: &str) -> String {
    let body = answer.json();
    assert!(body.is_object(), "{answer:?} {}", answer.text());
    refused(answer.status, &body, status, reason)
}

#[track_caller]
fn refused(found: u16, body: &Value, status: u16, reason: &str) -> String {
    assert_eq!((found, &body["reason"]), (status, &reason.into()), "{body}");
    let id = text(&body["request_id"]);
    assert_eq!(id.len(), 26, "{body}");
    id
}

/// Sends `bytes` and reads one response.
#[track_caller]
pub(crate) fn exchange(mut stream: impl Read + Write, bytes: impl AsRef<[u8]>) -> HttpResponse {
    // A gate that refuses early may close before it has read all bytes.
    let _cut = stream
        .write_all(bytes.as_ref())
        .and_then(|()| stream.flush());
    http::read_response(stream).unwrap()
}

/// A request without a body, as most clients send it.
pub(crate) fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n")
}

/// Status and output of a command, for messages.
pub(crate) fn describe(output: &Output) -> String {
    let (out, err) = (output::stdout(output), output::stderr(output));
    format!("{}\nstdout: {out}\nstderr: {err}", output.status)
}

/// A JSON string.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Whether the test may enter a sandbox's network namespace.
pub(crate) fn may_enter() -> bool {
    testkit::require_root("entering a sandbox's network namespace")
}
