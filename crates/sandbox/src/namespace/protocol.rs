//! Protocol of `init.sock`.
//!
//! ```text
//!   client                                     init
//!     │ ◀────────────── Hello {protocol} ─────── │
//!     │ ──── Listeners ────────────────────────▶ │
//!     │ ◀── Listeners [..] + descriptors ─────── │
//!     │                                          │
//!     │ ──── Exec {argv, ..} ──────────────────▶ │   one command per connection
//!     │ ◀── Started + pipe ends or pty master ── │
//!     │ ──── Signal | Kill ────────────────────▶ │
//!     │ ◀── Failed {step, reason} | Exited {..}  │
//!     │                                          │
//!     │ ──── Upload | Download {path, bounds} ─▶ │   runs this program's code as the agent
//!     │ ◀── Started + three pipe ends ────────── │   archive in, archive out, outcome
//!     │ ◀── Failed {step, reason} | Exited {..}  │
//!     │                                          │
//!     │ ──── Connect {port} ───────────────────▶ │
//!     │ ◀── Connected + socket | Failed {..} ─── │
//!     │ ──── Ports ────────────────────────────▶ │
//!     │ ◀── Ports [..] ───────────────────────── │
//!     │ ──── Trust {root, hash} ───────────────▶ │   effective at the next read; an older init closes the connection
//!     │ ◀── Done | Failed {step, reason} ─────── │
//!     │ ──── Owner {from, to} ─────────────────▶ │
//!     │ ◀── Owner program | none ─────────────── │
//!     │ ──── Workbench {words} ────────────────▶ │   starts this program as the agent
//!     │ ◀── Connected + socket | Failed {..} ─── │
//!     │ ──── Running ──────────────────────────▶ │   an older init closes the connection
//!     │ ◀── Running {total, names} ───────────── │
//! ```
//!
//! Descriptors are sent only from init to the client. Init accepts no descriptors, so init created
//! all descriptors of a process in the sandbox: no terminal or file of the operator's can be
//! reopened for writing through `/proc/self/fd`.
//!
//! Closing a connection kills its command with all descendants.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::file_op::FileOp;
use super::subid_map::SubidMap;
use super::subids::SubidSlice;
use crate::contract::{ListenerTransport, SandboxConfig, TransferBounds, Trust};

/// The protocol version.
pub(crate) const PROTOCOL: u32 = 3;

/// Init's first message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Init's protocol version.
    pub(crate) protocol: u32,
}

/// A client's request.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum Request {
    /// Returns the listener sockets.
    Listeners,
    /// Runs a command.
    Exec(Exec),
    /// Signals the command's process group.
    Signal { number: i32 },
    /// Kills the command with its descendants.
    Kill,
    /// Stops or continues every process except init. Used where no cgroup can freeze processes.
    Freeze { frozen: bool },
    /// Unpacks an archive below a directory.
    Upload { to: Vec<u8>, bounds: TransferBounds },
    /// Packs a file or directory.
    Download {
        from: Vec<u8>,
        bounds: TransferBounds,
    },
    /// Connects to a port on the sandbox's localhost.
    Connect { port: u16 },
    /// Lists the listening ports.
    Ports,
    /// Adds a trusted root certificate.
    Trust(Trust),
    /// Finds the program that owns the socket with these ends.
    Owner { from: SocketAddr, to: SocketAddr },
    /// Connects to the workbench, which is started with these arguments if it does not run.
    Workbench {
        #[serde(rename = "words")]
        arguments: Vec<Vec<u8>>,
    },
    /// Lists the running commands.
    Running,
}

/// A command. Arguments and paths are bytes, because they need not be UTF-8.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exec {
    pub(crate) argv: Vec<Vec<u8>>,
    pub(crate) environment: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) directory: Option<Vec<u8>>,
    /// A terminal instead of three pipes, if set.
    pub(crate) terminal: Option<TerminalSize>,
}

/// A terminal's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// The number of lines.
    pub rows: u16,
    /// The number of characters in a line.
    pub columns: u16,
}

/// Init's answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The listener sockets, with their descriptors in the same order.
    Listeners(Vec<(ListenerTransport, SocketAddr)>),
    /// The command was started. Descriptors: input, output and error output, or the terminal's
    /// master.
    Started,
    /// The request failed.
    Failed { step: String, reason: String },
    /// The command has exited. If all processes were killed, `stopped` is the reason.
    Exited {
        code: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stopped: Option<String>,
    },
    /// The request is done.
    Done,
    /// The connection is established. One descriptor: the socket.
    Connected,
    /// The ports, ascending.
    Ports(Vec<u16>),
    /// The program's path in the sandbox, if it is certain.
    Owner(Option<String>),
    /// The running commands.
    Running(Commands),
}

/// Processes of commands, without init's own and the workbench.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Commands {
    /// The number of processes.
    pub(crate) total: usize,
    /// The names of the first few processes; a process can choose its name.
    pub(crate) names: Vec<String>,
}

impl std::fmt::Display for Commands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = self.names.join(", ");
        match (self.total, self.names.as_slice()) {
            (1, [name]) => write!(f, "{name} is running"),
            (total, []) => write!(f, "{total} processes are running"),
            (total, _) => write!(f, "{total} processes are running ({names})"),
        }
    }
}

/// The gate's request to the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LauncherRequest {
    /// Creates a sandbox.
    Create(Box<LaunchSpec>),
    /// Runs a file operation with subordinate ids.
    RunFileOp {
        subid_map: SubidMap,
        /// The lock of the sandbox that owns the files.
        lock: Option<std::path::PathBuf>,
        op: Box<FileOp>,
    },
    /// Checks the features of this machine, with a temporary directory.
    Survey { directory: std::path::PathBuf },
}

/// The parameters of a launch.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LaunchSpec {
    /// The existing directory of the sandbox.
    pub(crate) directory: std::path::PathBuf,
    /// The configuration.
    pub(crate) config: SandboxConfig,
    /// The ids of the sandbox.
    pub(crate) identity: Identity,
    /// The subid map, if the sandbox has subordinate ids.
    pub(crate) subid_map: Option<SubidMap>,
    /// Environment variables of every process.
    pub(crate) environment: Vec<(String, String)>,
    /// cgroups that init joins first.
    pub(crate) cgroups: Vec<std::path::PathBuf>,
    /// Whether the tree exists already: from a checkpoint or the last start.
    pub(crate) has_tree: bool,
    /// The limits that cgroups enforce; the others use rlimits and priority.
    #[serde(rename = "counted")]
    pub(crate) cgroup_limits: CgroupLimits,
    /// Whether init lowers the CPU weight of each session of the agent.
    #[serde(rename = "weighs_sessions")]
    pub(crate) lowers_session_weights: bool,
}

/// The limits that cgroups enforce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CgroupLimits {
    pub(crate) memory: bool,
    pub(crate) pids: bool,
    /// Whether the sandbox has a CPU weight of its own.
    pub(crate) cpu: bool,
    /// Whether the configured CPU limit is enforced.
    pub(crate) cpus: bool,
}

impl CgroupLimits {
    /// Combines the limits of two cgroups.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            memory: self.memory || other.memory,
            pids: self.pids || other.pids,
            cpu: self.cpu || other.cpu,
            cpus: self.cpus || other.cpus,
        }
    }
}

/// The ids of a sandbox on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Identity {
    /// A range of ids: in the sandbox init has the id 0 and the agent 1000. A gate that runs as
    /// root allocates the range; otherwise the range is a slice of the operator's subordinate ids.
    Range {
        first: u32,
        #[serde(default, rename = "lent")]
        subids: Option<SubidSlice>,
    },
    /// The operator's single id, which is 1000 in the sandbox, for init and the agent.
    Single,
}

/// A message between creator and launcher, or launcher and init.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LaunchMessage {
    /// The id maps are written; init may start.
    Go,
    /// Init is ready.
    Ready,
    /// Init was cloned, with this process id and start time.
    #[serde(rename = "Born")]
    Cloned { pid: i32, started: u64 },
    /// Init is ready and waits for `Detach`.
    Running { warnings: Vec<String> },
    /// Init is recorded, and detaches from the launcher.
    #[serde(rename = "Live")]
    Detach,
    /// A step failed.
    Failed { step: String, reason: String },
    /// A protection is missing.
    #[serde(rename = "Weaker")]
    Warning(String),
}
