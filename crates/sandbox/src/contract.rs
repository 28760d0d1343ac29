//! What every backend is: places that can be made, entered, stopped and removed, whatever
//! keeps the agent in. The command line, the MCP server and the control API know only this.

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
use lifecycle::{Misstep, Phase};
use setup::SetupFailure;

/// A backend. Calls block; a caller with an event loop gives them a thread of their own.
///
/// The git branch, the workspace's content and the set-up command are the manager's work, around
/// `create`: they need a repository, and a gate that serves the sandbox's traffic.
pub trait Sandbox {
    /// Makes a sandbox and starts it. What fails leaves nothing behind.
    fn create(&self, config: &SandboxConfig) -> Result<SandboxMetadata, SandboxError>;

    /// Stops every process where it is. Again is no error.
    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError>;

    /// Lets every process go on. Again is no error.
    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError>;

    /// Ends every process and removes everything the sandbox had. Without force, a sandbox in
    /// which a command runs is refused; a paused one is not.
    fn delete(&self, id: &SandboxId, force: Force) -> Result<(), SandboxError>;

    /// Runs a command to its end.
    fn exec(&self, id: &SandboxId, command: &Command) -> Result<ExecutionResult, SandboxError>;

    /// Unpacks a tar archive below a directory inside, which is made if it is not there. A
    /// relative path is below the workspace. Files that are there are replaced.
    fn upload(
        &self,
        id: &SandboxId,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &Transfer,
    ) -> Result<Moved, SandboxError>;

    /// Writes a tar archive of a file or directory inside. A relative path is below the
    /// workspace. What is in the archive is the agent's: see [`crate::transfer::unpack`].
    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &Transfer,
    ) -> Result<Moved, SandboxError>;

    /// The sockets on which the sandbox's traffic arrives; the same ones each time.
    fn listeners(&self, id: &SandboxId) -> Result<Vec<Listener>, SandboxError>;

    /// How it is.
    fn status(&self, id: &SandboxId) -> SandboxStatus;
}

/// Whether a sandbox in which a command runs is deleted as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    /// It is refused.
    No,
    /// Whatever its state.
    Yes,
}

/// What a new sandbox is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SandboxConfig {
    /// Its id: the name of its directory.
    pub id: SandboxId,
    /// Its name: the branch and the host name inside.
    pub name: Slug,
    /// Variables of every process inside, on top of the sandbox's own.
    pub environment: Vec<(String, String)>,
    /// Ports on which the gate answers for the whole world.
    pub ports: Ports,
    /// What it may use.
    pub limits: Limits,
    /// What it finds as its system, and who it is there.
    #[serde(default)]
    pub system: System,
    /// Whom its programs trust beside those whom the system does.
    #[serde(default)]
    pub trust: Option<Trust>,
    /// A program and its arguments that run once, when the workspace is filled and the traffic
    /// is served ([`setup::run`]).
    #[serde(default)]
    pub setup_command: Option<Vec<String>>,
}

/// The root that signs in place of the world's. Programs inside trust it from the start, and
/// are told of the proxy it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// The certificate, as PEM.
    pub root: String,
    /// The hash of its subject, by which OpenSSL finds it in a directory.
    pub hash: u32,
}

/// What a sandbox finds as its system, and who the agent is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct System {
    /// A tree to be `/`, instead of the host's programs. Absolute.
    pub rootfs: Option<PathBuf>,
    /// Directories of the host that are there inside too, under the same path. Changes stay
    /// inside. Absolute.
    pub host_paths: Vec<PathBuf>,
    /// The agent is root inside, and may change what belongs to root there.
    pub root: bool,
    /// The agent may make user namespaces, as programs that confine themselves do.
    pub nested: bool,
}

/// Ports on which the gate answers for the whole world.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ports {
    /// TCP.
    pub tcp: Vec<u16>,
    /// UDP.
    pub udp: Vec<u16>,
}

impl Default for Ports {
    fn default() -> Self {
        Self {
            tcp: vec![80, 443, 8080, 9418, 53],
            udp: vec![53],
        }
    }
}

/// What a sandbox may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of memory.
    pub memory: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Thousandths of a processor; none for no limit.
    pub millicpus: Option<u32>,
    /// Bytes on disk that the sandbox's own directory may hold.
    pub disk: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: 4 << 30,
            pids: 1024,
            millicpus: None,
            disk: 16 << 30,
        }
    }
}

/// A command to run inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// The program and its arguments. A program without a slash is looked for in PATH.
    pub argv: Vec<OsString>,
    /// Variables on top of the sandbox's own.
    pub environment: Vec<(OsString, OsString)>,
    /// Where it starts; the workspace when not given.
    pub directory: Option<PathBuf>,
    /// What it reads.
    pub stdin: Vec<u8>,
    /// When it is killed, with everything it started.
    pub timeout: Option<Duration>,
}

impl Command {
    /// A line for the sandbox's shell.
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

/// How a command ended, and what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutionResult {
    /// Its code; 128 and the signal's number where a signal ended it, as shells say it.
    pub exit_code: i32,
    /// What it wrote to its output.
    pub stdout: Vec<u8>,
    /// What it wrote to its error output.
    pub stderr: Vec<u8>,
}

/// The most that may be moved in or out at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Bytes of content.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

impl Default for Transfer {
    fn default() -> Self {
        Self {
            bytes: 16 << 30,
            entries: 1_000_000,
        }
    }
}

/// What was moved in or out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Files and links.
    pub files: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// What stayed behind and why, in words; the first hundred.
    pub left_out: Vec<String>,
    /// Of what came to the host, the files that run or steer tools there; the first hundred.
    #[serde(default)]
    pub steering: Vec<String>,
}

/// A socket that answers for every address the agent may mean.
#[derive(Debug)]
pub struct Listener {
    /// What kind of socket it is.
    pub transport: Transport,
    /// The wildcard address and the port it is bound to; 0 for all that have no listener.
    pub address: SocketAddr,
    /// The socket.
    pub socket: OwnedFd,
}

/// Kinds of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A listening stream socket. `getsockname` of what it accepts is the address meant.
    Tcp,
    /// A datagram socket. Its packet information is the address meant.
    Udp,
    /// A raw socket that receives the first packet of each TCP connection to a port without
    /// a listener. Its packet information is the address meant; the kernel has refused the
    /// connection.
    Closed,
}

/// How a sandbox is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SandboxStatus {
    /// Its processes run.
    Active,
    /// Its processes stand still.
    Paused,
    /// It is there and cannot be used, for this reason.
    Error(String),
    /// There is none.
    Missing,
    /// It runs, and speaks a version of the protocol that this program does not know.
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

/// What is shown of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxMetadata {
    /// Its name.
    pub name: Slug,
    /// The branch it works on.
    pub branch_name: String,
    /// What its backend calls it.
    pub container_id: String,
    /// How it is.
    pub status: SandboxStatus,
}

/// Why something could not be done with a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// No name.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// The name is taken.
    #[error("Sandbox '{0}' already exists.")]
    Exists(String),
    /// Nobody has that name.
    #[error("Sandbox '{0}' not found.")]
    NotFound(String),
    /// A command runs in a sandbox that was to be deleted.
    #[error(
        "sandbox '{name}' is not idle: {what}; wait for its end, or stop it with `palisade pause \
         {name}`, and delete the sandbox then"
    )]
    Busy {
        /// The sandbox.
        name: Slug,
        /// What runs in it, or why that is not known.
        what: String,
    },
    /// A paused sandbox runs nothing.
    #[error("sandbox '{0}' is paused; resume it first")]
    Paused(String),
    /// It took more than it may, and nothing runs in it.
    #[error("sandbox '{name}' was stopped: {reason}")]
    Stopped {
        /// Which one.
        name: String,
        /// What it took, and what to do.
        reason: String,
    },
    /// The order of things.
    #[error(transparent)]
    Misstep(#[from] Misstep),
    /// The machine does not allow what the backend needs.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// Which backend.
        backend: &'static str,
        /// What is missing, and what to do.
        reason: String,
    },
    /// The container is somebody else's.
    #[error(
        "the container is managed elsewhere: it is not {0} by palisade, but by whoever runs it; \
         exec, shell, upload and download work"
    )]
    Elsewhere(&'static str),
    /// A step of `create` failed. Everything before it was undone.
    #[error("the sandbox could not be created, and nothing of it is left: {step}: {reason}")]
    Create {
        /// What was being done.
        step: String,
        /// What the system said.
        reason: String,
    },
    /// The command could not be started.
    #[error("'{program}' could not be run: {step}: {reason}")]
    Start {
        /// The program.
        program: String,
        /// What was being done.
        step: String,
        /// What the system said.
        reason: String,
    },
    /// The command took too long. It was killed, with everything it started.
    #[error(
        "the command was killed after {} ms, with everything it had started",
        .after.as_millis()
    )]
    TimedOut {
        /// The time that it had.
        after: Duration,
        /// What it had written by then, to its output and after that to its error output.
        output: Vec<u8>,
    },
    /// The command said too much. It was killed, with everything it started.
    #[error("the command was killed: it wrote more than {0} bytes")]
    TooMuchOutput(usize),
    /// The set-up command failed.
    #[error(transparent)]
    SetUp(#[from] SetupFailure),
    /// Files could not be moved in or out.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The port inside did not take the connection.
    #[error("port {port} inside: {reason}")]
    Connect {
        /// Which port.
        port: u16,
        /// What the system said.
        reason: String,
    },
    /// The sandbox was started by another version of this program.
    #[error("the sandbox speaks protocol {found}, this program {known}; restart it")]
    Protocol {
        /// Its version.
        found: u32,
        /// Ours.
        known: u32,
    },
    /// The sandbox's init does not answer as it should.
    #[error("the sandbox does not answer: {0}")]
    Silent(String),
    /// The system refused something.
    #[error("{step}: {source}")]
    System {
        /// What was being done.
        step: &'static str,
        /// What the system said.
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
    /// What is shown of a sandbox whose record says `phase` and whose processes are there.
    pub fn of(phase: Phase) -> Self {
        match phase {
            Phase::Active => SandboxStatus::Active,
            Phase::Paused => SandboxStatus::Paused,
            Phase::Creating => SandboxStatus::Error("it is being created".to_owned()),
            Phase::Deleting => SandboxStatus::Error("it is being deleted".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_sentences_people_know() {
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
                "sandbox 'fix' is not idle: sleep is running; wait for its end, or stop it with \
                 `palisade pause fix`, and delete the sandbox then",
            ),
        ] {
            assert_eq!(error.to_string(), sentence);
        }
    }

    #[test]
    fn a_record_of_before_can_still_be_read() {
        let old = r#"{"id": "one", "name": "one", "environment": [],
            "ports": {"tcp": [80], "udp": [53]}, "limits": {"memory": 1024, "pids": 7}}"#;
        let config: SandboxConfig = serde_json::from_str(old).unwrap();
        assert_eq!(config.system, System::default());
        assert_eq!((config.limits.pids, config.limits.disk), (7, 16 << 30));
        assert_eq!(config.setup_command, None);
        let unknown = old.replace("\"pids\": 7", "\"pids\": 7, \"disc\": 1");
        serde_json::from_str::<SandboxConfig>(&unknown).unwrap_err();
    }

    #[test]
    fn a_status_is_shown_in_a_word_and_an_error_with_its_reason() {
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
