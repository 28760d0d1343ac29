//! `sandbox`: where agents run.

use std::path::PathBuf;
use std::time::Duration;

use policy::host::Host;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, EnvName, Image, SandboxName, Text};
use crate::secret::Secret;

/// Where agents run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxSection {
    /// What keeps them in.
    pub backend: Backend,
    /// Names of variables that are passed on from the operator's environment.
    #[schemars(with = "Vec<Text<EnvName>>")]
    pub env: Vec<String>,
    /// Directories of the host that are there inside, too. Changes stay inside.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub host_paths: Vec<PathBuf>,
    /// A directory tree to use as root file system instead of the host's.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub rootfs: Option<PathBuf>,
    /// The image of Docker sandboxes.
    #[schemars(with = "Text<Image>")]
    pub image: String,
    /// A command that runs once in a new sandbox: a line for the shell, or a list of a program
    /// and its arguments. One that fails leaves no sandbox.
    pub setup_command: Option<SetupCommand>,
    /// How long the set-up command may take.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub setup_timeout: Duration,
    /// What one sandbox may use.
    pub limits: SandboxLimits,
    /// How much of a workspace comes to its branch.
    pub snapshot: SnapshotLimits,
    /// Running containers that are connected to: a list, or one mapping for one container.
    pub remote: RemoteContainers,
}

impl Default for SandboxSection {
    fn default() -> Self {
        Self {
            backend: Backend::Namespace,
            env: Vec::new(),
            host_paths: Vec::new(),
            rootfs: None,
            image: "busybox:latest".to_owned(),
            setup_command: None,
            setup_timeout: Duration::from_secs(30 * 60),
            limits: SandboxLimits::default(),
            snapshot: SnapshotLimits::default(),
            remote: RemoteContainers::default(),
        }
    }
}

/// A command that runs once in a new sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum SetupCommand {
    /// A line for the shell.
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

/// What keeps agents in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Linux namespaces, without a daemon or root.
    Namespace,
    /// Docker.
    Docker,
    /// A container that somebody else manages.
    Remote,
}

impl Backend {
    /// The word in files, rows and on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Backend::Namespace => "namespace",
            Backend::Docker => "docker",
            Backend::Remote => "remote",
        }
    }
}

/// What one sandbox may use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SandboxLimits {
    /// Memory.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub memory: u64,
    /// Processes and threads.
    #[schemars(range(min = 1, max = 4_194_304))]
    pub pids: u32,
    /// Processors, in parts if need be; all when not set. Where no cgroup of the cpu
    /// controller may be written, a sandbox with this limit is not made.
    #[schemars(range(min = 0.01))]
    pub cpus: Option<f64>,
    /// Disk.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub disk: u64,
}

impl Default for SandboxLimits {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            pids: 1024,
            cpus: None,
            disk: 20 << 30,
        }
    }
}

/// How much of a workspace comes to its branch. What is over stays in the workspace and is
/// named.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SnapshotLimits {
    /// The largest file; at most 1GiB.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub file: u64,
    /// All changed files of one snapshot together, and all new commits; at most 4GiB.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub total: u64,
}

impl SnapshotLimits {
    /// A worker reads a file into memory, and has two minutes of processor time for all.
    pub(crate) const LARGEST_FILE: u64 = 1 << 30;
    pub(crate) const LARGEST_TOTAL: u64 = 4 << 30;
}

impl Default for SnapshotLimits {
    fn default() -> Self {
        Self {
            file: 64 << 20,
            total: 512 << 20,
        }
    }
}

/// The most containers of `sandbox.remote`: each is asked for its health by `palisade list`.
const MAX_CONTAINERS: usize = 64;

/// The containers of `sandbox.remote`, in the form they were written in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum RemoteContainers {
    /// A list. The first form, because a list would otherwise be read as the fields of one.
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
            Self::One(one) => std::slice::from_ref(one),
        }
    }

    /// The container of that name.
    pub fn named(&self, name: &str) -> Option<&RemoteContainer> {
        self.all().iter().find(|container| container.name == name)
    }

    pub(crate) fn all_mut(&mut self) -> &mut [RemoteContainer] {
        match self {
            Self::Many(list) => list,
            Self::One(one) => std::slice::from_mut(one),
        }
    }

    /// Every container with its pointer in the file.
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

/// An externally managed container with a workbench in it. Exactly one of `socket_path` and `tcp`
/// is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RemoteContainer {
    /// Its name on the command line; unique among them.
    #[schemars(with = "Text<SandboxName>")]
    pub name: String,
    /// The Unix socket of its workbench.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub socket_path: Option<PathBuf>,
    /// The TCP address of its workbench.
    pub tcp: Option<RemoteTcp>,
    /// How long to wait for it, in milliseconds.
    #[schemars(range(max = 86_400_000))]
    pub wait_for_ready_ms: u64,
    /// What it wants to see.
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
    /// The host.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Host>")]
    pub host: Host,
    /// The port.
    #[schemars(range(min = 1))]
    pub port: u16,
}

/// How a workbench knows us.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RemoteAuth {
    /// The bearer token.
    pub token: Option<Secret>,
    /// Whether to refuse to connect without one.
    pub required: bool,
}
