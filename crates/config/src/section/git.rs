//! `git`: hosts, protected refs, mirrors.

use policy::host::Host;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, GitUrl, Slug, Source, Text, TreePath};
use crate::section::scan::GitAction;

/// Git through the gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Git {
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
    pub mirrors: Vec<Mirror>,
}

impl Default for Git {
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
pub struct Mirror {
    /// Its name in the sandbox's URL.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// The upstream repository.
    #[schemars(with = "Text<GitUrl>")]
    pub upstream: String,
    /// The ssh key: `file:PATH`, `env:NAME` or `command:LINE`.
    #[serde(default, with = "leaf::maybe")]
    #[schemars(with = "Option<Text<Source>>")]
    pub identity: Option<Source>,
    /// The host's public key, as in known_hosts without the name. Required with ssh.
    #[serde(default)]
    #[schemars(with = "Option<Text<leaf::HostKey>>")]
    pub host_key: Option<String>,
}

impl Mirror {
    /// Whether the upstream is reached by ssh.
    pub fn is_ssh(&self) -> bool {
        GitUrl::is_ssh(&self.upstream)
    }
}
