//! A gate in front of a forge, whose repository clients reach in three ways.

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

/// The address of the container that [`GitFixture`] registers.
const CONTAINER: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// How a client reaches the repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// At its host, through the proxy.
    Host,
    /// At the gate's mirror over HTTP, through the proxy.
    Mirror,
    /// At the gate's mirror in git's own protocol, from a sandbox.
    GitProtocol,
}

/// See the module.
pub(crate) struct Repository {
    pub(crate) git_fixture: GitFixture,
    pub(crate) audit: Audit,
    entry: Entry,
    /// The network of the sandbox.
    inside: Option<NetNamespace>,
    /// The id of the sandbox or the container.
    id: String,
    _resolver: Resolver,
}

impl Repository {
    /// Starts a gate with this policy.yaml; none where the test may not enter a sandbox. It has
    /// mirrors at a fixed address (`app`), at one that is resolved and open to the gate (`public`),
    /// and at one that is not (`private`).
    pub(crate) fn start(entry: Entry, policy: &str) -> Option<Self> {
        if entry == Entry::GitProtocol && !may_enter() {
            return None;
        }
        let resolver = Resolver::start();
        for name in ["public.forge.example", "private.forge.example"] {
            let records = vec![record(name, RecordData::A(Ipv4Addr::LOCALHOST))];
            resolver.set_reply(name, 1, resolver::DnsReply::Records(records));
        }
        let git_fixture = GitFixture::with(FixtureOptions {
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
            inside: None,
            id: "agent".to_owned(),
            _resolver: resolver,
        };
        if entry == Entry::GitProtocol {
            repository.create_sandbox();
        }
        Some(repository)
    }

    fn create_sandbox(&mut self) {
        let made = self
            .git_fixture
            .ok(&["create", "box", "--no-repo", "--json"]);
        let made: Value = serde_json::from_str(&made).unwrap();
        self.id = made["id"].as_str().unwrap().to_owned();
        self.inside = Some(NetNamespace::of(&self.git_fixture.gate_dir, &self.id));
    }

    /// How clients reach the repository.
    pub(crate) fn entry(&self) -> Entry {
        self.entry
    }

    /// The address of a mirror, or of the repository at its host.
    pub(crate) fn remote(&self, mirror: &str) -> String {
        match self.entry {
            Entry::Host => "https://forge.example/acme/app".to_owned(),
            Entry::Mirror => format!("http://palisade.internal/git/{mirror}"),
            // Every address is the gate's.
            Entry::GitProtocol => format!("git://192.0.2.7/{mirror}"),
        }
    }

    /// A working copy with a commit that upstream has.
    pub(crate) fn working_copy(&self) -> PathBuf {
        self.git_fixture.working_copy("work")
    }

    /// Runs git as the client does.
    pub(crate) fn git(&self, dir: &Path, args: &[&str]) -> Output {
        let mut command = self.git_fixture.command(dir, args);
        match &self.inside {
            None => command.output().unwrap(),
            Some(inside) => inside.within(|| command.output().unwrap()),
        }
    }

    /// A client for requests over HTTP, which count as those of git do.
    pub(crate) fn client(&self) -> Client {
        let proxy = self.git_fixture.proxy();
        match (&self.inside, self.entry) {
            (Some(inside), _) => Client::Sandbox(inside.clone()),
            (None, Entry::Host) => Client::Tunnel(CONTAINER, proxy),
            (None, _) => Client::Proxy(CONTAINER, proxy),
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

/// git must have succeeded.
#[track_caller]
pub(crate) fn succeeded(output: &Output) {
    assert!(output.status.success(), "{}", describe(output));
}

/// git must have failed and printed this.
#[track_caller]
pub(crate) fn failed(output: &Output, printed: &str) {
    assert!(!output.status.success(), "{}", describe(output));
    let error = output::stderr(output);
    assert!(error.contains(printed), "no '{printed}' in: {error}");
}
