//! What is said on `init.sock`.
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
//!     │ ──── Upload | Download {path, bounds} ─▶ │   as a command, with code of ours
//!     │ ◀── Started + three pipe ends ────────── │   archive in, archive out, outcome
//!     │ ◀── Failed {step, reason} | Exited {..}  │
//!     │                                          │
//!     │ ──── Connect {port} ───────────────────▶ │
//!     │ ◀── Connected + socket | Failed {..} ─── │
//!     │ ──── Ports ────────────────────────────▶ │
//!     │ ◀── Ports [..] ───────────────────────── │
//!     │ ──── Trust {root, hash} ───────────────▶ │   from the next read on; an older init hangs up
//!     │ ◀── Done | Failed {step, reason} ─────── │
//!     │ ──── Owner {from, to} ─────────────────▶ │
//!     │ ◀── Owner program | none ─────────────── │
//!     │ ──── Workbench {words} ────────────────▶ │   this program again, as the agent
//!     │ ◀── Connected + socket | Failed {..} ─── │
//!     │ ──── Running ──────────────────────────▶ │   an older init hangs up
//!     │ ◀── Running {total, names} ───────────── │
//! ```
//!
//! Descriptors only ever travel outwards. Init reads none from a client, so what a process
//! inside holds was made inside, by init: no terminal or file of the operator's can be
//! reopened for writing through `/proc/self/fd`.
//!
//! A connection that closes takes its command along, with everything that one started.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::file_op::FileOp;
use super::subid_map::SubidMap;
use super::subids::Slice;
use crate::contract::{ListenerTransport, SandboxConfig, TransferBounds, Trust};

/// The version of everything in this file.
pub(crate) const PROTOCOL: u32 = 3;

/// Init's first words.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Its version.
    pub(crate) protocol: u32,
}

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) enum Request {
    /// For the sockets.
    Listeners,
    /// To run a command.
    Exec(Exec),
    /// To signal the command's process group.
    Signal { number: i32 },
    /// To kill the command and everything it started.
    Kill,
    /// To stop every process but init, or let them go on: where no cgroup can.
    Freeze { frozen: bool },
    /// To unpack an archive below a directory.
    Upload { to: Vec<u8>, bounds: TransferBounds },
    /// To pack a file or directory.
    Download {
        from: Vec<u8>,
        bounds: TransferBounds,
    },
    /// For a connection to a port of the agent's localhost.
    Connect { port: u16 },
    /// Which ports of the agent's somebody listens on.
    Ports,
    /// To trust this root as well.
    Trust(Trust),
    /// Which program has the socket with these ends.
    Owner { from: SocketAddr, to: SocketAddr },
    /// For a connection to the workbench, which is started with these arguments if it does
    /// not run.
    Workbench { words: Vec<Vec<u8>> },
    /// Which commands run.
    Running,
}

/// A command. Bytes, because neither arguments nor paths need be text.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Exec {
    pub(crate) argv: Vec<Vec<u8>>,
    pub(crate) environment: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) directory: Option<Vec<u8>>,
    /// A terminal instead of three pipes.
    pub(crate) terminal: Option<TerminalSize>,
}

/// A terminal's size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub columns: u16,
}

/// What init answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// The sockets; their descriptors in the same order.
    Listeners(Vec<(ListenerTransport, SocketAddr)>),
    /// The command has a process. Descriptors: input, output and error output, or the
    /// terminal's master.
    Started,
    /// The command never came to run.
    Failed { step: String, reason: String },
    /// The command has ended; with everybody else, if it is told why.
    Exited {
        code: i32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stopped: Option<String>,
    },
    /// Every process stands still, or goes on; or the root is trusted.
    Done,
    /// The port, or the workbench, took the connection. One descriptor: the socket.
    Connected,
    /// The ports, ascending.
    Ports(Vec<u16>),
    /// The program's path inside, if it is certain.
    Owner(Option<String>),
    /// The commands that run.
    Running(Commands),
}

/// Processes of commands: neither init's own nor the workbench, which waits for calls.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Commands {
    /// How many there are.
    pub(crate) total: usize,
    /// The names of the first few, as the processes have chosen them.
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

/// What the launcher is for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LauncherRequest {
    /// To make a sandbox.
    Create(Box<LaunchSpec>),
    /// To do something to files of lent ids.
    RunFileOp {
        subid_map: SubidMap,
        /// The lock of the sandbox whose files they are.
        lock: Option<std::path::PathBuf>,
        op: Box<FileOp>,
    },
    /// To try what this machine allows, with a directory to try it in.
    Survey { directory: std::path::PathBuf },
}

/// What the creator gives the launcher.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LaunchSpec {
    /// The sandbox's directory; it exists.
    pub(crate) directory: std::path::PathBuf,
    /// What it is to be.
    pub(crate) config: SandboxConfig,
    /// Who it is inside and outside.
    pub(crate) identity: Identity,
    /// Leave to act as the sandbox's ids, where they are lent.
    pub(crate) subid_map: Option<SubidMap>,
    /// Variables of every process inside.
    pub(crate) environment: Vec<(String, String)>,
    /// cgroups that init joins before it does anything.
    pub(crate) cgroups: Vec<std::path::PathBuf>,
    /// Whether its tree is there already: of a checkpoint, or of its last start.
    pub(crate) has_tree: bool,
    /// What the kernel counts by cgroup; else by rlimit and by priority.
    pub(crate) counted: CgroupLimits,
    /// Whether each session that the agent makes has a share of processor time, which init
    /// keeps small.
    pub(crate) weighs_sessions: bool,
}

/// What a cgroup counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CgroupLimits {
    pub(crate) memory: bool,
    pub(crate) pids: bool,
    /// Whether the sandbox has a share of processor time of its own.
    pub(crate) cpu: bool,
    /// Whether that has the limit that was asked for.
    pub(crate) cpus: bool,
}

impl CgroupLimits {
    /// What one cgroup counts or another.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            memory: self.memory || other.memory,
            pids: self.pids || other.pids,
            cpu: self.cpu || other.cpu,
            cpus: self.cpus || other.cpus,
        }
    }
}

/// Whose ids the sandbox has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Identity {
    /// A range of its own: init is 0 and the agent 1000 inside. Root has them to give; for
    /// others they are a slice of what `/etc/subuid` and `/etc/subgid` lend.
    Range {
        first: u32,
        #[serde(default)]
        lent: Option<Slice>,
    },
    /// The operator's one id, 1000 inside, for init and agent alike.
    Single,
}

/// What launcher and creator, and init and launcher, tell each other.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum LaunchMessage {
    /// Maps are set; begin.
    Go,
    /// Everything stands.
    Ready,
    /// There is an init: its process id and when it started.
    Born { pid: i32, started: u64 },
    /// It is ready, and waits for `Live`.
    Running { warnings: Vec<String> },
    /// It is on record; live.
    Live,
    /// It went wrong.
    Failed { step: String, reason: String },
    /// Something is weaker than it could be.
    Weaker(String),
}
