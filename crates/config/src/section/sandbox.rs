//! `sandbox`: backend, environment and limits of sandboxes.

use std::path::PathBuf;
use std::time::Duration;

use policy::host::Host;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, EnvName, Image, SandboxName, Text};
use crate::secret::Secret;

/// Backend, environment and limits of sandboxes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSection {
    /// Isolation backend.
    pub backend: Backend,
    /// Which hosts a new sandbox may reach in addition to `egress`.
    pub tier: Tier,
    /// Names of environment variables to pass from the operator's environment into sandboxes.
    #[schemars(with = "Vec<Text<EnvName>>")]
    pub env: Vec<String>,
    /// Host directories that are visible inside sandboxes. Changes stay in the
    /// sandbox.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub host_paths: Vec<PathBuf>,
    /// Directory to use as root file system instead of the host's.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub rootfs: Option<PathBuf>,
    /// Image of Docker sandboxes.
    #[schemars(with = "Text<Image>")]
    pub image: String,
    /// A command that runs once in a new sandbox: a shell command line, or a list of a program and
    /// its arguments. If the command fails, the sandbox is not created.
    pub setup_command: Option<SetupCommand>,
    /// Maximum duration of the set-up command.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub setup_timeout: Duration,
    /// Resource limits of one sandbox.
    pub limits: LimitSettings,
    /// Size limits of what is committed from a workspace to its branch.
    pub snapshot: SnapshotLimits,
    /// Externally managed containers to connect to: a list, or one mapping for a single container.
    pub remote: RemoteContainers,
}

impl Default for SandboxSection {
    fn default() -> Self {
        Self {
            backend: Backend::Namespace,
            tier: Tier::Balanced,
            env: Vec::new(),
            host_paths: Vec::new(),
            rootfs: None,
            image: "busybox:latest".to_owned(),
            setup_command: None,
            setup_timeout: Duration::from_secs(30 * 60),
            limits: LimitSettings::default(),
            snapshot: SnapshotLimits::default(),
            remote: RemoteContainers::default(),
        }
    }
}

/// A command that runs once in a new sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SetupCommand {
    /// A shell command line.
    Shell(String),
    /// A program and its arguments.
    Program(#[schemars(length(min = 1))] Vec<String>),
}

impl SetupCommand {
    /// The program and its arguments.
    pub fn argv(&self) -> Vec<String> {
        match self {
            SetupCommand::Shell(line) => ["/bin/sh", "-c", line]
                .into_iter()
                .map(str::to_owned)
                .collect(),
            SetupCommand::Program(argv) => argv.clone(),
        }
    }
}

/// The isolation backend of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Linux namespaces, without a daemon or root.
    Namespace,
    /// Docker.
    Docker,
    /// An externally managed container.
    Remote,
}

impl Backend {
    /// The value as written in files, in the registry and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Backend::Namespace => "namespace",
            Backend::Docker => "docker",
            Backend::Remote => "remote",
        }
    }
}

/// Which hosts a sandbox may reach in addition to the operator's rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Only the hosts of the agent's own provider.
    Locked,
    /// Also reads of the package registries of the repository's languages and of its git
    /// repository.
    Balanced,
    /// Also reads (GET, HEAD) of every host.
    Open,
}

impl Tier {
    /// The names of all tiers.
    pub const NAMES: [&str; 3] = ["locked", "balanced", "open"];

    /// The tier called `name`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "locked" => Some(Tier::Locked),
            "balanced" => Some(Tier::Balanced),
            "open" => Some(Tier::Open),
            _ => None,
        }
    }

    /// The name of the tier.
    pub const fn as_str(self) -> &'static str {
        match self {
            Tier::Locked => "locked",
            Tier::Balanced => "balanced",
            Tier::Open => "open",
        }
    }
}

/// Resource limits of one sandbox.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitSettings {
    /// Maximum memory.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub memory: u64,
    /// Maximum number of processes and threads.
    #[schemars(range(min = 1, max = 4_194_304))]
    pub pids: u32,
    /// Maximum number of CPUs; fractions are allowed, no limit if not set. A sandbox with this
    /// limit is not created where no cgroup with the cpu controller is writable.
    #[schemars(range(min = 0.01))]
    pub cpus: Option<f64>,
    /// Maximum disk usage.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub disk: u64,
}

impl Default for LimitSettings {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            pids: 1024,
            cpus: None,
            disk: 20 << 30,
        }
    }
}

/// Size limits of what is committed from a workspace to its branch. Larger files stay in the
/// workspace and are reported.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotLimits {
    /// Maximum size of one file; at most 1GiB. Larger files stay in the workspace and are reported.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub file: u64,
    /// Maximum size of all changed files of one snapshot together, and of all new commits; at most
    /// 4GiB.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub total: u64,
}

impl SnapshotLimits {
    /// Maximum of `file`: the worker process reads each file into memory.
    pub(crate) const MAX_FILE: u64 = 1 << 30;
    /// Maximum of `total`: the worker process has two minutes of CPU time for all files.
    pub(crate) const MAX_TOTAL: u64 = 4 << 30;
}

impl Default for SnapshotLimits {
    fn default() -> Self {
        Self {
            file: 64 << 20,
            total: 512 << 20,
        }
    }
}

/// Maximum number of containers in `sandbox.remote`: `palisade list` queries the health of each.
const MAX_CONTAINERS: usize = 64;

/// The containers of `sandbox.remote`, in the form in which the file has them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum RemoteContainers {
    /// A list. This variant comes first, because serde would otherwise read a list as the fields of
    /// one container.
    Many(#[schemars(length(max = MAX_CONTAINERS))] Vec<RemoteContainer>),
    /// One mapping.
    One(RemoteContainer),
}

impl Default for RemoteContainers {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl RemoteContainers {
    /// Every container, in the order of the file.
    pub fn all(&self) -> &[RemoteContainer] {
        match self {
            Self::Many(list) => list,
            Self::One(container) => std::slice::from_ref(container),
        }
    }

    /// The container called `name`.
    pub fn find(&self, name: &str) -> Option<&RemoteContainer> {
        self.all().iter().find(|container| container.name == name)
    }

    pub(crate) fn all_mut(&mut self) -> &mut [RemoteContainer] {
        match self {
            Self::Many(list) => list,
            Self::One(container) => std::slice::from_mut(container),
        }
    }

    /// Every container with the JSON pointer to it in the file.
    pub(crate) fn with_pointers(&self) -> impl Iterator<Item = (String, &RemoteContainer)> {
        let list = self.all().iter().enumerate();
        list.map(|(index, container)| {
            let pointer = match self {
                Self::Many(_) => format!("/sandbox/remote/{index}"),
                Self::One(_) => "/sandbox/remote".to_owned(),
            };
            (pointer, container)
        })
    }
}

/// An externally managed container in which a workbench runs. Exactly one of `socket_path` and
/// `tcp` must be set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RemoteContainer {
    /// Name of the container on the command line; unique among containers.
    #[schemars(with = "Text<SandboxName>")]
    pub name: String,
    /// Unix socket of the container's workbench.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub socket_path: Option<PathBuf>,
    /// TCP address of the container's workbench.
    pub tcp: Option<RemoteTcp>,
    /// How long to wait until the workbench answers, in milliseconds.
    #[schemars(range(max = 86_400_000))]
    pub wait_for_ready_ms: u64,
    /// Authentication to the workbench.
    pub auth: RemoteAuth,
}

impl Default for RemoteContainer {
    fn default() -> Self {
        Self {
            name: "remote".to_owned(),
            socket_path: None,
            tcp: None,
            wait_for_ready_ms: 10_000,
            auth: RemoteAuth::default(),
        }
    }
}

/// The TCP address of a workbench.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoteTcp {
    /// Host name or IP address of the workbench.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Host>")]
    pub host: Host,
    /// Port of the workbench.
    #[schemars(range(min = 1))]
    pub port: u16,
}

/// Authentication to a workbench.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RemoteAuth {
    /// Bearer token to send to the workbench.
    pub token: Option<Secret>,
    /// Refuse to connect if no token is set.
    pub required: bool,
}
