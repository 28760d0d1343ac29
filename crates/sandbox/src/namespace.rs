//! The default backend: Linux namespaces. It needs no daemon and no root.
//!
//! ```text
//!   sandboxes/
//!     .lock               held while a directory is reserved or leftovers are removed
//!     <id>/
//!       record.json       phase, init's process, ids, cgroups
//!       lock              held by an operation that changes this sandbox
//!       launcher.lock     held by the launcher while it runs
//!       stopped           why init stopped all processes; empty otherwise
//!       init.sock         init's control socket
//!       fs/               owned by the sandbox's ids: root, upper, work
//! ```
//!
//! The gate has threads and therefore never clones: it spawns its own executable, whose hidden
//! subcommand calls [`launch::init_main`].

mod agent_task;
mod allowlist;
mod cgroup;
mod cleanup;
pub mod client;
mod closed_ports;
mod cpu_budget;
mod disk;
mod environment;
mod exec_args;
mod file_op;
mod file_ops;
pub mod hardening;
mod hidden_paths;
mod identity;
mod idle;
mod init;
mod landlock_domain;
pub mod launch;
mod launch_parent;
mod layer;
mod listening_ports;
mod lock;
mod netlink;
mod network;
pub(crate) mod packet;
mod port_dial;
mod process;
mod process_tree;
pub mod protocol;
mod record;
pub mod removal;
mod restart;
mod reuse;
mod root;
mod scheduling;
mod seccomp;
mod sessions;
mod sock_diag;
mod socket_owner;
pub(crate) mod stdio;
mod step;
pub mod subid_map;
mod subids;
pub mod survey;
mod tcp_sockets;
mod trust;
mod workbench;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::fcntl::Flock;
use nix::unistd::Uid;
use policy::id::SandboxId;

use crate::contract::lifecycle::{LifecycleEvent, Phase};
use crate::contract::{
    ExecutionResult, Force, SandboxBackend, SandboxCommand, SandboxConfig, SandboxError,
    SandboxListener, SandboxMetadata, SandboxStatus, TransferBounds, TransferSummary, Trust,
};
use client::{InitConnection, RunningCommand};
use lock::{lock, open_lock};
use protocol::{Identity, LaunchSpec, LauncherRequest, TerminalSize};
use record::{Process, Record};

/// The namespace backend.
#[derive(Clone, Debug)]
pub struct Namespace {
    directory: PathBuf,
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Namespace {
    /// A backend that keeps its sandboxes in `directory` and starts `program arguments…`, which
    /// must call [`launch::init_main`] before anything else.
    pub fn new(directory: PathBuf, program: PathBuf, arguments: Vec<OsString>) -> Self {
        Self {
            directory,
            program,
            arguments,
        }
    }

    /// Describes the protections that are missing in this sandbox.
    pub fn warnings(&self, id: &SandboxId) -> Result<Vec<String>, SandboxError> {
        Ok(self.read(id)?.warnings)
    }

    /// The path of the sandbox's workspace on the host. Its content is untrusted: open it component
    /// by component, and follow no link.
    pub fn workspace(&self, id: &SandboxId) -> PathBuf {
        self.sandbox_dir(id).join("fs/root/workspace")
    }

    /// The owner of the agent's files on the host, if it is not the operator.
    pub fn owner(&self, id: &SandboxId) -> Result<Option<(u32, u32)>, SandboxError> {
        let record = self.read(id)?;
        let root = record.config.system.root;
        Ok(identity::agent_on_host(record.identity, root))
    }

    /// Returns ids on the host for the agent of a later sandbox, so that its files can be prepared.
    /// `None` if every agent has the operator's ids. Ids in `reserved` are excluded.
    pub fn free_owner(&self, reserved: &[(u32, u32)]) -> Option<(u32, u32)> {
        let mut taken = self.taken_ranges();
        let reserved = reserved.iter().map(|(user, _)| *user);
        taken.extend(reserved.filter_map(identity::range_of_agent));
        let seed = self.directory.to_string_lossy();
        let root = Uid::effective().is_root();
        identity::agent_on_host(identity::choose(root, &seed, &taken, None)?, false)
    }

    /// As `create`; the agent gets the ids `owner` on the host if they are free.
    pub fn create_for(
        &self,
        config: &SandboxConfig,
        owner: Option<(u32, u32)>,
    ) -> Result<SandboxMetadata, SandboxError> {
        self.check_config(config)?;
        let preferred = owner.and_then(|(user, _)| identity::range_of_agent(user));
        let (mut record, _lock) = self.reserve(config, preferred)?;
        match self.build(&mut record, false, LifecycleEvent::Started) {
            Ok(()) => Ok(SandboxMetadata {
                name: config.name.clone(),
                branch_name: config.name.branch(),
                container_id: config.id.to_string(),
                status: SandboxStatus::from_phase(record.phase),
            }),
            Err(error) => {
                // If the rollback fails, the record is unfinished, and the next start removes the
                // sandbox.
                let _ = self.destroy(&config.id, Some(record));
                Err(error)
            }
        }
    }

    /// Reads the configuration of a sandbox.
    pub fn config(&self, id: &SandboxId) -> Result<SandboxConfig, SandboxError> {
        Ok(self.read(id)?.config)
    }

    /// Starts a command whose input and output the caller transfers.
    pub fn start(
        &self,
        id: &SandboxId,
        command: &SandboxCommand,
        terminal: Option<TerminalSize>,
    ) -> Result<RunningCommand, SandboxError> {
        self.init_connection(id)?.start(command, terminal)
    }

    /// Whether a sandbox responds now. A paused one does not.
    pub fn is_responding(&self, id: &SandboxId) -> bool {
        match self.recorded_status(id) {
            SandboxStatus::Active | SandboxStatus::Unknown => !matches!(
                InitConnection::open(&self.sandbox_dir(id)),
                Err(SandboxError::NotResponding(_))
            ),
            SandboxStatus::Paused | SandboxStatus::Missing | SandboxStatus::Error(_) => false,
        }
    }

    /// Connects to a port on the sandbox's localhost, IPv4 first. The socket does not block.
    pub fn connect(&self, id: &SandboxId, port: u16) -> Result<OwnedFd, SandboxError> {
        self.init_connection(id)?.connect(port)
    }

    /// Connects to the sandbox's workbench: this program, which runs as the agent and is started
    /// with `arguments` if it does not run. The socket does not block.
    pub fn workbench(&self, id: &SandboxId, arguments: &[&str]) -> Result<OwnedFd, SandboxError> {
        self.init_connection(id)?.workbench(arguments)
    }

    /// Adds a trusted root certificate to a running sandbox; programs use it as soon as they read
    /// their certificates again.
    pub fn add_trust(&self, id: &SandboxId, trust: &Trust) -> Result<(), SandboxError> {
        self.init_connection(id)?.add_trust(trust)
    }

    /// Lists the listening TCP ports in the sandbox, ascending.
    pub fn open_ports(&self, id: &SandboxId) -> Result<Vec<u16>, SandboxError> {
        self.init_connection(id)?.open_ports()
    }

    /// Returns the path of the program in the sandbox that owns a connection, if that is certain.
    /// Fails after two seconds without a reply.
    pub fn socket_owner(
        &self,
        id: &SandboxId,
        from: SocketAddr,
        to: SocketAddr,
    ) -> Result<Option<String>, SandboxError> {
        client::find_socket_owner(&self.sandbox_dir(id), from, to)
    }

    fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    fn cgroup_name(&self, id: &SandboxId) -> String {
        format!("palisade-{id}-{}", path_hash(&self.sandbox_dir(id)))
    }

    /// Takes the lock under which directories of sandboxes are reserved and removed.
    fn lock_all(&self) -> Result<Flock<File>, SandboxError> {
        lock(&self.directory.join(".lock"))
    }

    /// Takes the lock of a sandbox, which every change needs.
    fn lock_sandbox(&self, id: &SandboxId) -> Result<Flock<File>, SandboxError> {
        lock(&self.sandbox_dir(id).join("lock")).map_err(|error| match error {
            SandboxError::System { source, .. } if source.kind() == ErrorKind::NotFound => {
                SandboxError::NotFound(id.to_string())
            }
            other => other,
        })
    }

    /// Why init has stopped a sandbox, if it has.
    pub fn stopped(&self, id: &SandboxId) -> Option<String> {
        fs::read_to_string(self.sandbox_dir(id).join("stopped"))
            .ok()
            .filter(|reason| !reason.is_empty())
    }

    /// Connects to the init of an active sandbox.
    fn init_connection(&self, id: &SandboxId) -> Result<InitConnection, SandboxError> {
        if let (Some(reason), SandboxStatus::Error(_)) =
            (self.stopped(id), self.recorded_status(id))
        {
            let name = id.to_string();
            return Err(SandboxError::Stopped { name, reason });
        }
        match self.recorded_status(id) {
            SandboxStatus::Active | SandboxStatus::Unknown => {
                InitConnection::open(&self.sandbox_dir(id))
            }
            SandboxStatus::Paused => Err(SandboxError::Paused(id.to_string())),
            SandboxStatus::Missing => Err(SandboxError::NotFound(id.to_string())),
            SandboxStatus::Error(reason) => Err(SandboxError::NotResponding(reason)),
        }
    }

    /// Connects for read-only requests, which init also answers in a stopped sandbox.
    fn reading_connection(&self, id: &SandboxId) -> Result<InitConnection, SandboxError> {
        match self.init_connection(id) {
            Err(SandboxError::Stopped { .. }) => InitConnection::open(&self.sandbox_dir(id)),
            other => other,
        }
    }

    /// The status as far as it is known without querying init.
    fn recorded_status(&self, id: &SandboxId) -> SandboxStatus {
        let record = match self.read(id) {
            Ok(record) => record,
            Err(SandboxError::NotFound(_)) => return SandboxStatus::Missing,
            Err(error) => return SandboxStatus::Error(error.to_string()),
        };
        if record.phase.is_unfinished() {
            return SandboxStatus::from_phase(record.phase);
        }
        if !record.init.is_some_and(Process::is_running) {
            return SandboxStatus::Error("its processes are gone; resume the sandbox".to_owned());
        }
        if let Some(reason) = self.stopped(id) {
            return SandboxStatus::Error(reason);
        }
        match cgroup::is_frozen(&record.cgroups) {
            Some(true) => SandboxStatus::Paused,
            Some(false) => SandboxStatus::Active,
            None => SandboxStatus::from_phase(record.phase),
        }
    }

    /// Rejects impossible configurations before anything is created.
    fn check_config(&self, config: &SandboxConfig) -> Result<(), SandboxError> {
        let refused = |step: String, reason| SandboxError::Create { step, reason };
        Self::check_root(config)?;
        if config.system.nested && !Uid::effective().is_root() && cgroup::is_delegated() {
            let reason =
                "the gate's cgroup is writable by its user, whose id the agent has too: with \
                          user namespaces the agent could raise its own limits. Start the gate \
                          as root, or where no cgroup is delegated"
                    .to_owned();
            return Err(refused("--nested".to_owned(), reason));
        }
        layer::check(&config.system, &self.directory)
            .map_err(|(path, reason)| refused(path.display().to_string(), reason))
    }

    /// Reserves a directory and ids for a new sandbox; its lock is held.
    fn reserve(
        &self,
        config: &SandboxConfig,
        preferred: Option<u32>,
    ) -> Result<(Record, Flock<File>), SandboxError> {
        let system = || SandboxError::system("making the sandbox's directory");
        let private = |path: &Path| DirBuilder::new().mode(0o700).recursive(false).create(path);
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&self.directory)
            .map_err(system())?;
        let _claims = self.lock_all()?;
        let top: OwnedFd = File::open(&self.directory).map_err(system())?.into();
        if let Some(reason) = disk::check_free_space(&top).map_err(system())? {
            let step = "checking disk space".to_owned();
            return Err(SandboxError::Create { step, reason });
        }
        let sandbox_dir = self.sandbox_dir(&config.id);
        private(&sandbox_dir).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => SandboxError::Exists(config.id.to_string()),
            _ => system()(error),
        })?;
        let lock_guard = lock(&sandbox_dir.join("lock"))?;
        open_lock(&sandbox_dir.join("launcher.lock")).map_err(system())?;
        let taken = self.taken_ranges();
        let seed = sandbox_dir.to_string_lossy();
        let root = Uid::effective().is_root();
        let identity = if config.system.root && !root {
            self.allocate_subids(&seed, &taken)?
        } else {
            identity::choose(root, &seed, &taken, preferred).ok_or(SandboxError::Unavailable {
                backend: "namespace",
                reason: "every range of ids is in use; delete a sandbox".to_owned(),
            })?
        };
        let record = Record {
            phase: Phase::Creating,
            config: config.clone(),
            identity,
            // The cgroups are recorded before they are created, so that clean-up after a crash
            // finds them.
            cgroups: cgroup::plan(&self.cgroup_name(&config.id)),
            init: None,
            creator: Process::current().map_err(system())?,
            warnings: Vec::new(),
        };
        self.write(&record)?;
        Ok((record, lock_guard))
    }

    fn taken_ranges(&self) -> Vec<u32> {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter_map(|entry| {
                let id = SandboxId::parse(entry.file_name().to_str()?).ok()?;
                match self.read(&id).ok()?.identity {
                    Identity::Range { first, .. } => Some(first),
                    Identity::Single => None,
                }
            })
            .collect()
    }

    /// Starts a reserved sandbox, with the cgroups and the launcher. `has_tree` means that the
    /// files exist already.
    fn build(
        &self,
        record: &mut Record,
        has_tree: bool,
        event: LifecycleEvent,
    ) -> Result<(), SandboxError> {
        let limits = record.config.limits;
        let planned = cgroup::plan(&self.cgroup_name(&record.config.id));
        if record.cgroups != planned {
            record.cgroups = planned;
            self.write(record)?;
        }
        let (cgroups, cgroup_limits) = cgroup::create_planned(&record.cgroups, limits);
        record.cgroups.clone_from(&cgroups);
        for (limited, what) in [
            (cgroup_limits.memory, "memory"),
            (cgroup_limits.pids, "processes"),
        ] {
            if !limited {
                record.warnings.push(format!(
                    "{what}: limit applies per process and user: no writable cgroup"
                ));
            }
        }
        if !cgroup_limits.cpu {
            let warning = "cpu: the agent runs at idle priority: no writable cgroup";
            record.warnings.push(warning.to_owned());
        }
        let lowers_session_weights = !cgroup_limits.cpu && scheduling::sessions_have_weight();
        if lowers_session_weights && record.config.system.nested {
            let warning = "cpu: with --nested the agent can raise the weight of its sessions";
            record.warnings.push(warning.to_owned());
        }
        if let (Some(millicpus), false) = (limits.millicpus, cgroup_limits.cpus) {
            return Err(SandboxError::Create {
                step: "sandbox.limits.cpus".to_owned(),
                reason: format!(
                    "a limit of {} cannot be enforced: no writable cgroup has the cpu controller. Start \
                     the gate as root or in its own scope (systemd-run --user --scope -p \
                     Delegate=yes palisade …), or remove the setting",
                    f64::from(millicpus) / 1000.0
                ),
            });
        }
        let spec = LaunchSpec {
            directory: self.sandbox_dir(&record.config.id),
            config: record.config.clone(),
            identity: record.identity,
            subid_map: file_ops::subid_map_for(record.identity)?,
            environment: environment::environment(std::env::vars(), &record.config),
            cgroups,
            has_tree,
            cgroup_limits,
            lowers_session_weights,
        };
        let (channel, child_end) =
            packet::socket_pair().map_err(SandboxError::system("creating a socket pair"))?;
        packet::enlarge_buffers(&channel)
            .map_err(SandboxError::system("creating a socket pair"))?;
        let mut launcher = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .stdin(Stdio::from(child_end))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| SandboxError::Unavailable {
                backend: "namespace",
                reason: format!("starting {}: {error}", self.program.display()),
            })?;
        let result = self.supervise_launch(
            record,
            &channel,
            &LauncherRequest::Create(Box::new(spec)),
            event,
        );
        // Closing the channel ends the launcher, and with it an init that was not released.
        drop(channel);
        let _ = launcher.wait();
        if result.is_ok() {
            tracing::debug!(sandbox = %record.config.id, "sandbox init started");
        }
        result
    }

    fn set_frozen(&self, id: &SandboxId, event: LifecycleEvent) -> Result<(), SandboxError> {
        let _lock = self.lock_sandbox(id)?;
        let mut record = self.read(id)?;
        let next = record.phase.after(event)?;
        if !record.init.is_some_and(Process::is_running) {
            return Err(SandboxError::NotResponding(
                "its processes are gone".to_owned(),
            ));
        }
        let frozen = next == Phase::Paused;
        let done = cgroup::freeze(&record.cgroups, frozen)
            .map_err(SandboxError::system("freezing the sandbox"))?;
        if !done {
            InitConnection::open(&self.sandbox_dir(id))?.freeze(frozen)?;
        }
        if next != record.phase {
            record.phase = next;
            self.write(&record)?;
        }
        Ok(())
    }
}

impl SandboxBackend for Namespace {
    fn create(&self, config: &SandboxConfig) -> Result<SandboxMetadata, SandboxError> {
        self.create_for(config, None)
    }

    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError> {
        self.set_frozen(id, LifecycleEvent::Pause)
    }

    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError> {
        self.set_frozen(id, LifecycleEvent::Resume)
    }

    fn delete(&self, id: &SandboxId, force: Force) -> Result<(), SandboxError> {
        let _lock = self.lock_sandbox(id)?;
        let record = match self.read(id) {
            // With force, the directory is removed even if the record is unreadable.
            Err(_) if force == Force::Yes => return self.destroy(id, None),
            other => other?,
        };
        if force == Force::No {
            self.refuse_if_busy(id)?;
        }
        self.destroy(id, Some(record))
    }

    fn exec(
        &self,
        id: &SandboxId,
        command: &SandboxCommand,
    ) -> Result<ExecutionResult, SandboxError> {
        let running = self.start(id, command, None)?;
        let (result, stopped) = running.finish(&command.stdin, command.timeout)?;
        match stopped {
            Some(reason) => Err(SandboxError::Stopped {
                name: id.to_string(),
                reason,
            }),
            None => Ok(result),
        }
    }

    fn upload(
        &self,
        id: &SandboxId,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.init_connection(id)?.upload(to, archive, bounds)
    }

    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.reading_connection(id)?.download(from, archive, bounds)
    }

    fn listeners(&self, id: &SandboxId) -> Result<Vec<SandboxListener>, SandboxError> {
        self.reading_connection(id)?.listeners()
    }

    fn status(&self, id: &SandboxId) -> SandboxStatus {
        match self.recorded_status(id) {
            SandboxStatus::Active => match InitConnection::open(&self.sandbox_dir(id)) {
                Ok(_) => SandboxStatus::Active,
                Err(SandboxError::Protocol { .. }) => SandboxStatus::Unknown,
                // The sandbox may have been paused or deleted since. Otherwise init should have
                // responded.
                Err(error) => match self.recorded_status(id) {
                    SandboxStatus::Active => SandboxStatus::Error(error.to_string()),
                    other => other,
                },
            },
            other => other,
        }
    }
}

/// Hashes a path for a cgroup's name, because two gates may have sandboxes with the same id.
fn path_hash(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let hash = path
        .as_os_str()
        .as_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("{hash:016x}")
}
