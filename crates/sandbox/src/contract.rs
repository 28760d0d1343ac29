//! The contract of all backends: sandboxes that can be created, entered, paused and deleted,
//! whatever the isolation mechanism. The command line, the MCP server and the control API depend
//! only on this.

pub mod lifecycle;
pub mod setup;

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use policy::id::SandboxId;
use serde::{Deserialize, Serialize};

use crate::name::{InvalidName, Slug};
use crate::transfer::TransferError;
use lifecycle::{InvalidTransition, Phase};
use setup::SetupFailure;

/// A sandbox backend. Calls block; an async caller runs them on a blocking thread.
///
/// The git branch, the workspace's content and the set-up command are handled by the manager around
/// `create`: they need a repository, and a running gate for the sandbox's traffic.
pub trait SandboxBackend {
    /// Creates a sandbox and starts it. A failure leaves nothing behind.
    fn create(&self, config: &SandboxConfig) -> Result<SandboxMetadata, SandboxError>;

    /// Freezes every process. A paused sandbox may be paused again.
    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError>;

    /// Thaws every process. An active sandbox may be resumed again.
    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError>;

    /// Kills every process and removes the sandbox's files. Without force, fails if a command is
    /// running; a paused sandbox is not refused.
    fn delete(&self, id: &SandboxId, force: Force) -> Result<(), SandboxError>;

    /// Runs a command and waits for its exit.
    fn exec(
        &self,
        id: &SandboxId,
        command: &SandboxCommand,
    ) -> Result<ExecutionResult, SandboxError>;

    /// Unpacks a tar archive below a directory in the sandbox, which is created if it does not
    /// exist. A relative path is below the workspace. Existing files are replaced.
    fn upload(
        &self,
        id: &SandboxId,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError>;

    /// Writes a tar archive of a file or directory in the sandbox. A relative path is below the
    /// workspace. The archive's content is untrusted: see [`crate::transfer::unpack`].
    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError>;

    /// Returns the sockets on which the sandbox's traffic arrives; every call returns the same
    /// sockets.
    fn listeners(&self, id: &SandboxId) -> Result<Vec<SandboxListener>, SandboxError>;

    /// Returns the sandbox's status.
    fn status(&self, id: &SandboxId) -> SandboxStatus;
}

/// Whether to delete a sandbox in which a command is running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// Refuse.
    No,
    /// Delete in any state.
    Yes,
}

/// The configuration of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxConfig {
    /// The id, which names the sandbox's directory.
    pub id: SandboxId,
    /// The name, from which the branch and the host name are derived.
    pub name: Slug,
    /// Environment variables of every process in the sandbox, in addition to the default ones.
    pub environment: Vec<(String, String)>,
    /// Ports on which the gate accepts connections to every address.
    pub ports: GatePorts,
    /// The resource limits.
    pub limits: SandboxLimits,
    /// The file system and the agent's account.
    #[serde(default)]
    pub system: SystemConfig,
    /// An additional root certificate that the sandbox's programs trust.
    #[serde(default)]
    pub trust: Option<Trust>,
    /// A program and its arguments that run once, after the workspace is filled and while the
    /// traffic is served ([`setup::run`]).
    #[serde(default)]
    pub setup_command: Option<Vec<String>>,
}

/// The gate's root certificate. The sandbox's programs trust it from the start, and their
/// environment names the gate's proxy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// The certificate in PEM.
    pub root: String,
    /// The subject hash, which names the certificate in OpenSSL's directory.
    pub hash: u32,
}

/// The file system that a sandbox sees, and the agent's rights there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SystemConfig {
    /// A directory to use as `/` instead of the host's system directories. Absolute.
    pub rootfs: Option<PathBuf>,
    /// Directories of the host that are visible under the same path. Changes stay in the sandbox.
    /// Absolute.
    pub host_paths: Vec<PathBuf>,
    /// Whether the agent is root in the sandbox and may change files of root there.
    pub root: bool,
    /// Whether the agent may create user namespaces, as programs with their own sandbox do.
    pub nested: bool,
}

/// Ports on which the gate accepts connections to every address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatePorts {
    /// TCP ports.
    pub tcp: Vec<u16>,
    /// UDP ports.
    pub udp: Vec<u16>,
}

impl Default for GatePorts {
    fn default() -> Self {
        Self {
            tcp: vec![80, 443, 8080, 9418, 53],
            udp: vec![53],
        }
    }
}

/// The resource limits of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxLimits {
    /// Bytes of memory.
    pub memory: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Thousandths of a processor; `None` for no limit.
    pub millicpus: Option<u32>,
    /// Bytes on disk of the sandbox's own directory.
    pub disk: u64,
}

impl Default for SandboxLimits {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            pids: 1024,
            millicpus: None,
            disk: 16 << 30,
        }
    }
}

/// A command to run in a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxCommand {
    /// The program and its arguments. A program without a slash is searched in PATH.
    pub argv: Vec<OsString>,
    /// Environment variables in addition to the sandbox's.
    pub environment: Vec<(OsString, OsString)>,
    /// The working directory; the workspace by default.
    pub directory: Option<PathBuf>,
    /// The content of standard input.
    pub stdin: Vec<u8>,
    /// The time after which the command is killed, with its descendants.
    pub timeout: Option<Duration>,
}

impl SandboxCommand {
    /// A command line for the sandbox's shell.
    pub fn shell(line: &str) -> Self {
        Self::new(["/bin/sh", "-c", line])
    }

    /// A program with its arguments.
    pub fn new<I: IntoIterator<Item = S>, S: Into<OsString>>(argv: I) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            environment: Vec::new(),
            directory: None,
            stdin: Vec::new(),
            timeout: None,
        }
    }
}

/// The exit code and the output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutionResult {
    /// The exit code; 128 plus the signal's number if a signal killed the command, as in shells.
    pub exit_code: i32,
    /// The standard output.
    pub stdout: Vec<u8>,
    /// The standard error.
    pub stderr: Vec<u8>,
}

/// Limits of one upload or download.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferBounds {
    /// Bytes of content.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for TransferBounds {
    fn default() -> Self {
        Self {
            bytes: 16 << 30,
            entries: 1_000_000,
        }
    }
}

/// The result of an upload or download.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferSummary {
    /// Files and links.
    pub files: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// Skipped paths and the reasons; the first hundred.
    pub left_out: Vec<String>,
    /// Downloaded files that run programs or configure tools on the host; the first hundred.
    #[serde(default, rename = "steering")]
    pub sensitive: Vec<String>,
}

/// A socket of the gate that accepts traffic for every destination address.
#[derive(Debug)]
pub struct SandboxListener {
    /// The kind of socket.
    pub transport: ListenerTransport,
    /// The wildcard address and the port; port 0 stands for all ports that have no listener.
    pub address: SocketAddr,
    /// The socket.
    pub socket: OwnedFd,
}

/// The kind of a listener socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerTransport {
    /// A listening stream socket. `getsockname` of an accepted connection is the destination
    /// address.
    Tcp,
    /// A datagram socket. Its packet information is the destination address.
    Udp,
    /// A raw socket that receives the first packet of each TCP connection to a port without a
    /// listener. Its packet information is the destination address; the kernel has refused the
    /// connection.
    Closed,
}

/// The status of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxStatus {
    /// The sandbox's processes run.
    Active,
    /// The sandbox's processes are frozen.
    Paused,
    /// The sandbox exists and cannot be used, for this reason.
    Error(String),
    /// The sandbox does not exist.
    Missing,
    /// The sandbox runs with an unknown protocol version.
    Unknown,
}

impl std::fmt::Display for SandboxStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SandboxStatus::Active => f.write_str("active"),
            SandboxStatus::Paused => f.write_str("paused"),
            SandboxStatus::Error(reason) => write!(f, "error: {reason}"),
            SandboxStatus::Missing => f.write_str("missing"),
            SandboxStatus::Unknown => f.write_str("unknown"),
        }
    }
}

/// The description of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxMetadata {
    /// The sandbox's name.
    pub name: Slug,
    /// The sandbox's branch.
    pub branch_name: String,
    /// The backend's id of the sandbox.
    pub container_id: String,
    /// The status.
    pub status: SandboxStatus,
}

/// An error of a backend operation.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The name is in use.
    #[error("Sandbox '{0}' already exists.")]
    Exists(String),
    /// No sandbox has that name.
    #[error("Sandbox '{0}' not found.")]
    NotFound(String),
    /// A command is running in a sandbox to delete.
    #[error(
        "sandbox '{name}' is not idle: {what}; wait until it ends, or run `palisade pause {name}`, \
         and then delete the sandbox"
    )]
    Busy {
        /// The sandbox.
        name: Slug,
        /// The running command, or why that is not known.
        what: String,
    },
    /// The sandbox is paused.
    #[error("sandbox '{0}' is paused; resume it first")]
    Paused(String),
    /// The sandbox exceeded its disk limit and was stopped.
    #[error("sandbox '{name}' was stopped: {reason}")]
    Stopped {
        /// The sandbox.
        name: String,
        /// The cause and the remedy.
        reason: String,
    },
    /// The operation is not allowed in the sandbox's phase.
    #[error(transparent)]
    InvalidTransition(#[from] InvalidTransition),
    /// The machine lacks something that the backend needs.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// The cause and the remedy.
        reason: String,
    },
    /// The container is not managed by palisade.
    #[error(
        "the container is managed elsewhere and cannot be {0} by palisade; exec, shell, upload and \
         download work"
    )]
    ManagedExternally(&'static str),
    /// A step of `create` failed; it was rolled back.
    #[error("the sandbox could not be created and was removed: {step}: {reason}")]
    Create {
        /// The failed step.
        step: String,
        /// The error of the system.
        reason: String,
    },
    /// The command could not be started.
    #[error("'{program}' could not be run: {step}: {reason}")]
    Start {
        /// The program.
        program: String,
        /// The failed step.
        step: String,
        /// The error of the system.
        reason: String,
    },
    /// The command timed out and was killed, with its descendants.
    #[error(
        "the command timed out after {} ms and was killed, with its child processes",
        .after.as_millis()
    )]
    TimedOut {
        /// The timeout.
        after: Duration,
        /// The standard output followed by the standard error so far.
        output: Vec<u8>,
    },
    /// The command exceeded the output limit and was killed, with its descendants.
    #[error("the command was killed: it wrote more than {0} bytes")]
    TooMuchOutput(usize),
    /// The set-up command failed.
    #[error(transparent)]
    SetUp(#[from] SetupFailure),
    /// An upload or download failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The connection to a port in the sandbox failed.
    #[error("port {port} in the sandbox: {reason}")]
    Connect {
        /// The port.
        port: u16,
        /// The error of the system.
        reason: String,
    },
    /// The sandbox was started by another version of this program.
    #[error("the sandbox uses protocol {found}, this program {known}; restart the sandbox")]
    Protocol {
        /// The sandbox's version.
        found: u32,
        /// This program's version.
        known: u32,
    },
    /// The sandbox's init does not respond, or not as expected.
    #[error("the sandbox does not respond: {0}")]
    NotResponding(String),
    /// A system call failed.
    #[error("{step}: {source}")]
    System {
        /// The failed step.
        step: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
}

impl SandboxError {
    pub(crate) fn system<E: Into<std::io::Error>>(step: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::System {
            step,
            source: source.into(),
        }
    }
}

impl SandboxStatus {
    /// Returns the status for the recorded phase of a sandbox whose processes exist.
    pub fn from_phase(phase: Phase) -> Self {
        match phase {
            Phase::Active => SandboxStatus::Active,
            Phase::Paused => SandboxStatus::Paused,
            Phase::Creating => SandboxStatus::Error("the sandbox is being created".to_owned()),
            Phase::Deleting => SandboxStatus::Error("the sandbox is being deleted".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_texts_are_complete_sentences() {
        for (error, sentence) in [
            (
                SandboxError::Exists("fix".into()),
                "Sandbox 'fix' already exists.",
            ),
            (
                SandboxError::NotFound("fix".into()),
                "Sandbox 'fix' not found.",
            ),
            (
                SandboxError::Busy {
                    name: Slug::from_name("fix").unwrap(),
                    what: "sleep is running".into(),
                },
                "sandbox 'fix' is not idle: sleep is running; wait until it ends, or run `palisade \
                 pause fix`, and then delete the sandbox",
            ),
        ] {
            assert_eq!(error.to_string(), sentence);
        }
    }

    #[test]
    fn record_of_an_older_version_is_read() {
        let old = r#"{"id": "one", "name": "one", "environment": [],
            "ports": {"tcp": [80], "udp": [53]}, "limits": {"memory": 1024, "pids": 7}}"#;
        let config: SandboxConfig = serde_json::from_str(old).unwrap();
        assert_eq!(config.system, SystemConfig::default());
        assert_eq!((config.limits.pids, config.limits.disk), (7, 16 << 30));
        assert_eq!(config.setup_command, None);
        let unknown = old.replace("\"pids\": 7", "\"pids\": 7, \"disc\": 1");
        serde_json::from_str::<SandboxConfig>(&unknown).unwrap_err();
    }

    #[test]
    fn status_is_displayed_as_a_word() {
        for (status, shown) in [
            (SandboxStatus::Active, "active"),
            (SandboxStatus::Paused, "paused"),
            (SandboxStatus::Missing, "missing"),
            (SandboxStatus::Unknown, "unknown"),
            (SandboxStatus::Error("gone".into()), "error: gone"),
        ] {
            assert_eq!(status.to_string(), shown);
        }
    }
}
