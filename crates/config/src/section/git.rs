//! `git`: hosts, protected refs, mirrors.

use std::collections::BTreeSet;

use policy::host::{Authority, Host};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, GitUrl, SecretSource, Slug, Text, TreePath};
use crate::section::scan::GitAction;

/// Git through the gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GitSection {
    /// Hosts that are spoken to as git servers.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<Host>>")]
    pub hosts: Vec<Host>,
    /// Let anonymous reads of other public repositories through.
    pub read_public: bool,
    /// Refuse force pushes where the old history is known.
    pub deny_force_push: bool,
    /// Branches nobody may push to; `*` stands for part of a name.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<policy::refs::RefPattern>>")]
    pub protected: Vec<policy::refs::RefPattern>,
    /// Existing branches that a sandbox may push to although it did not make them; `*`
    /// stands for part of a name.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<policy::refs::RefPattern>>")]
    pub pushable: Vec<policy::refs::RefPattern>,
    /// Paths a push may not change.
    #[schemars(with = "Vec<Text<TreePath>>")]
    pub restricted_paths: Vec<String>,
    /// What happens when a push holds a secret.
    pub scan: GitAction,
    /// Upstreams that are served as mirrors, with a key the sandbox never sees.
    pub mirrors: Vec<MirrorSettings>,
}

impl Default for GitSection {
    fn default() -> Self {
        let known = |text: &str| leaf::Leaf::read(text).ok();
        Self {
            hosts: Host::parse("github.com").into_iter().collect(),
            read_public: false,
            deny_force_push: false,
            protected: ["main", "master", "release/*", "production"]
                .into_iter()
                .filter_map(known)
                .collect(),
            pushable: Vec::new(),
            restricted_paths: [".github/workflows", ".github/actions"]
                .map(str::to_owned)
                .into(),
            scan: GitAction::Deny,
            mirrors: Vec::new(),
        }
    }
}

/// One mirrored upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MirrorSettings {
    /// Its name in the sandbox's URL.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// The upstream repository.
    #[schemars(with = "Text<GitUrl>")]
    pub upstream: String,
    /// The ssh key: `file:PATH`, `env:NAME` or `command:LINE`.
    #[serde(default, with = "leaf::maybe")]
    #[schemars(with = "Option<Text<SecretSource>>")]
    pub identity: Option<SecretSource>,
    /// The host's public key, as in known_hosts without the name. Required with ssh.
    #[serde(default)]
    #[schemars(with = "Option<Text<leaf::HostKey>>")]
    pub host_key: Option<String>,
}

/// How an upstream is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorTransport {
    /// Through ssh, with a key.
    Ssh,
    /// Over TLS.
    Https,
    /// In the clear.
    Http,
    /// Git's own protocol, in the clear.
    Git,
}

/// Where a mirror's upstream is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamAddress<'a> {
    /// How it is spoken to.
    pub transport: MirrorTransport,
    /// As whom.
    pub user: Option<&'a str>,
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// The repository, as the host is told.
    pub path: String,
}

impl MirrorSettings {
    /// Whether the upstream is reached by ssh.
    pub fn is_ssh(&self) -> bool {
        GitUrl::is_ssh(&self.upstream)
    }

    /// How people write the upstream's address. Who is meant does not matter, since the gate
    /// decides as whom it goes there; a `.git` that follows is understood.
    pub fn spellings(&self) -> Vec<String> {
        let mut all = BTreeSet::from([self.upstream.clone()]);
        if let Some(place) = self.place()
            && place.transport == MirrorTransport::Ssh
        {
            let UpstreamAddress {
                user, host, port, ..
            } = &place;
            let path = place.path.trim_start_matches('/');
            let path = path.strip_suffix(".git").unwrap_or(path);
            let named = user.map(|user| format!("{user}@"));
            for who in named.iter().map(String::as_str).chain([""]) {
                all.insert(format!("ssh://{who}{host}:{port}/{path}"));
                if *port == 22 {
                    all.insert(format!("ssh://{who}{host}/{path}"));
                    all.insert(format!("{who}{host}:{path}"));
                    all.insert(format!("{who}{host}:/{path}"));
                }
            }
        }
        all.into_iter().collect()
    }

    /// Where the upstream is. None for what [`GitUrl`] would not take.
    pub fn place(&self) -> Option<UpstreamAddress<'_>> {
        let (_, user, authority, path) = GitUrl::split(&self.upstream)?;
        let (transport, port, path) = match self.upstream.split_once("://") {
            // `host:path` is relative to the user's home.
            None => (MirrorTransport::Ssh, 22, path.to_owned()),
            Some((scheme, _)) => {
                let (transport, port) = match scheme {
                    "ssh" => (MirrorTransport::Ssh, 22),
                    "https" => (MirrorTransport::Https, 443),
                    "http" => (MirrorTransport::Http, 80),
                    "git" => (MirrorTransport::Git, 9418),
                    _ => return None,
                };
                (transport, port, format!("/{path}"))
            }
        };
        let authority = Authority::parse(authority).ok()?;
        Some(UpstreamAddress {
            transport,
            user,
            host: authority.host,
            port: authority.port.unwrap_or(port),
            path,
        })
    }
}
