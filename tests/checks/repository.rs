//! A gate with a forge as upstream. A client reaches the repository of the forge in one of three
//! ways.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use testkit::http;
use testkit::inside::NetNamespace;
use testkit::output;
use testkit::resolver::{self, RecordData, Resolver, record};

use crate::audit::Audit;
use crate::client::Client;
use crate::git_fixture::{FixtureOptions, GitFixture, describe};
use crate::traffic_fixture::may_enter;

/// The IP address of the container that [`GitFixture`] registers.
const CONTAINER_IP: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// How a client reaches the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// At the forge's host, through the proxy.
    Host,
    /// At the gate's mirror over HTTP, through the proxy.
    Mirror,
    /// At the gate's mirror over the git protocol, from a sandbox.
    GitProtocol,
}

/// A gate, its forge and a client.
pub(crate) struct Repository {
    pub(crate) git_fixture: GitFixture,
    pub(crate) audit: Audit,
    entry: Entry,
    /// The network namespace of the sandbox, if the client is a sandbox.
    namespace: Option<NetNamespace>,
    /// The id of the sandbox or the container.
    id: String,
    _resolver: Resolver,
}

impl Repository {
    /// Starts a gate with this policy.yaml. Returns `None` if the test may not enter a sandbox. The
    /// gate has three mirrors: `app` has an upstream with a fixed address; `public` and `private`
    /// have an upstream that DNS resolves to a private address, which is allowed for `public` only.
    pub(crate) fn start(entry: Entry, policy: &str) -> Option<Self> {
        if entry == Entry::GitProtocol && !may_enter() {
            return None;
        }
        let resolver = Resolver::start();
        for name in ["public.forge.example", "private.forge.example"] {
            let records = vec![record(name, RecordData::A(Ipv4Addr::LOCALHOST))];
            resolver.set_reply(name, 1, resolver::DnsReply::Records(records));
        }
        let git_fixture = GitFixture::with_options(FixtureOptions {
            checked: true,
            policy,
            git: "  protected: [ok/protected]\n  mirrors:\n    \
                 - {name: app, upstream: \"https://forge.example/acme/app\"}\n    \
                 - {name: public, upstream: \"https://public.forge.example:{port}/acme/app\"}\n    \
                 - {name: private, upstream: \"https://private.forge.example:{port}/acme/app\"}\n",
            top: "policies:\n  bundles:\n    - {id: mine, path: ./mine, entrypoint: git/push}\n",
            egress: &format!(
                "  dns: {{upstreams: [\"{}\"]}}\n  allow_private: \
                 [{{host: public.forge.example, cidr: 127.0.0.1/32}}]\n",
                resolver.address()
            ),
            ..FixtureOptions::default()
        });
        let mut repository = Self {
            audit: Audit::new(git_fixture.control_socket()),
            git_fixture,
            entry,
            namespace: None,
            id: "agent".to_owned(),
            _resolver: resolver,
        };
        if entry == Entry::GitProtocol {
            repository.create_sandbox();
        }
        Some(repository)
    }

    fn create_sandbox(&mut self) {
        let output = self
            .git_fixture
            .ok(&["create", "box", "--no-repo", "--json"]);
        let sandbox: Value = serde_json::from_str(&output).unwrap();
        self.id = sandbox["id"].as_str().unwrap().to_owned();
        self.namespace = Some(NetNamespace::of_sandbox(
            &self.git_fixture.gate_dir,
            &self.id,
        ));
    }

    /// How clients reach the repository.
    pub(crate) fn entry(&self) -> Entry {
        self.entry
    }

    /// The URL of a mirror, or of the repository at the forge's host.
    pub(crate) fn remote(&self, mirror: &str) -> String {
        match self.entry {
            Entry::Host => "https://forge.example/acme/app".to_owned(),
            Entry::Mirror => format!("http://palisade.internal/git/{mirror}"),
            // In a sandbox every address leads to the gate.
            Entry::GitProtocol => format!("git://192.0.2.7/{mirror}"),
        }
    }

    /// Creates a working copy of the upstream repository.
    pub(crate) fn working_copy(&self) -> PathBuf {
        self.git_fixture.working_copy("work")
    }

    /// Runs git as the client does.
    pub(crate) fn git(&self, dir: &Path, args: &[&str]) -> Output {
        let mut command = self.git_fixture.command(dir, args);
        match &self.namespace {
            None => command.output().unwrap(),
            Some(namespace) => namespace.within(|| command.output().unwrap()),
        }
    }

    /// A client for HTTP requests with the same identity and limits as the client's git.
    pub(crate) fn client(&self) -> Client {
        let proxy = self.git_fixture.proxy();
        match (&self.namespace, self.entry) {
            (Some(namespace), _) => Client::Sandbox(namespace.clone()),
            (None, Entry::Host) => Client::Tunnel(CONTAINER_IP, proxy),
            (None, _) => Client::Proxy(CONTAINER_IP, proxy),
        }
    }

    /// Ends the registration of the client.
    pub(crate) fn unregister(&self) {
        let path = format!("/internal/containers/{}", self.id);
        let control = self.git_fixture.control_socket();
        let answer = http::send(&control, "DELETE", &path, b"").unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
}

/// Requires that git succeeded.
#[track_caller]
pub(crate) fn assert_git_succeeded(output: &Output) {
    assert!(output.status.success(), "{}", describe(output));
}

/// Requires that git failed and printed this text.
#[track_caller]
pub(crate) fn assert_git_failed(output: &Output, printed: &str) {
    assert!(!output.status.success(), "{}", describe(output));
    let error = output::stderr(output);
    assert!(error.contains(printed), "no '{printed}' in: {error}");
}
