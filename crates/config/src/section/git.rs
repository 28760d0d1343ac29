//! `git`: git hosts, protected branches and mirrors.

use std::collections::BTreeSet;

use policy::host::{Authority, Host};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, GitUrl, SecretSource, Slug, Text, TreePath};
use crate::section::scan::GitAction;

/// Git hosts, protected branches and mirrors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GitSection {
    /// Hosts that the gate treats as git servers.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<Host>>")]
    pub hosts: Vec<Host>,
    /// Allow anonymous reads of other public repositories.
    pub read_public: bool,
    /// Refuse force pushes if the old history is known.
    pub deny_force_push: bool,
    /// Branches that may not be pushed to; `*` matches part of a name.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<policy::refs::RefPattern>>")]
    pub protected: Vec<policy::refs::RefPattern>,
    /// Existing branches that a sandbox may push to although it did not create them; `*` matches
    /// part of a name.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<policy::refs::RefPattern>>")]
    pub pushable: Vec<policy::refs::RefPattern>,
    /// Paths that a push may not change.
    #[schemars(with = "Vec<Text<TreePath>>")]
    pub restricted_paths: Vec<String>,
    /// What happens to a push that contains a secret.
    pub scan: GitAction,
    /// Upstream repositories that the gate serves as mirrors, with a key that the sandbox never
    /// sees.
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

/// One mirrored upstream repository.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MirrorSettings {
    /// Name of the mirror in the sandbox's URL.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// URL of the upstream repository.
    #[schemars(with = "Text<GitUrl>")]
    pub upstream: String,
    /// SSH key: `file:PATH`, `env:NAME` or `command:LINE`.
    #[serde(default, with = "leaf::optional")]
    #[schemars(with = "Option<Text<SecretSource>>")]
    pub identity: Option<SecretSource>,
    /// The host's public key, as in known_hosts without the host name. Required with SSH.
    #[serde(default)]
    #[schemars(with = "Option<Text<leaf::HostKey>>")]
    pub host_key: Option<String>,
}

/// The protocol of a mirror's upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorTransport {
    /// SSH, with a key.
    Ssh,
    /// HTTPS.
    Https,
    /// HTTP without TLS.
    Http,
    /// Git's own protocol, without encryption.
    Git,
}

/// The parts of a mirror's upstream URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamAddress<'a> {
    /// The protocol.
    pub transport: MirrorTransport,
    /// The user name in the URL.
    pub user: Option<&'a str>,
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
    /// Path of the repository on the host.
    pub path: String,
}

impl MirrorSettings {
    /// Whether the upstream is reached over SSH.
    pub fn is_ssh(&self) -> bool {
        GitUrl::is_ssh(&self.upstream)
    }

    /// Every URL that means the same upstream: with and without the user name, which the gate
    /// ignores because it uses its own identity, and in both notations of SSH. A trailing `.git` is
    /// left out.
    pub fn equivalent_urls(&self) -> Vec<String> {
        let mut all = BTreeSet::from([self.upstream.clone()]);
        if let Some(address) = self.address()
            && address.transport == MirrorTransport::Ssh
        {
            let UpstreamAddress {
                user, host, port, ..
            } = &address;
            let path = address.path.trim_start_matches('/');
            let path = path.strip_suffix(".git").unwrap_or(path);
            let with_user = user.map(|user| format!("{user}@"));
            for prefix in with_user.iter().map(String::as_str).chain([""]) {
                all.insert(format!("ssh://{prefix}{host}:{port}/{path}"));
                if *port == 22 {
                    all.insert(format!("ssh://{prefix}{host}/{path}"));
                    all.insert(format!("{prefix}{host}:{path}"));
                    all.insert(format!("{prefix}{host}:/{path}"));
                }
            }
        }
        all.into_iter().collect()
    }

    /// The parts of the upstream URL. None if [`GitUrl`] would reject the URL.
    pub fn address(&self) -> Option<UpstreamAddress<'_>> {
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
