//! PID 1 of a sandbox: builds it, then serves `init.sock` until it is killed.
//!
//! Init has one thread, one event loop and no signal handler: the kernel ignores signals from
//! inside that PID 1 does not handle, and SIGCHLD arrives by descriptor. Init cannot be traced or
//! dumped, and never reads data that the agent wrote, except file names.

use std::fs::File;
use std::io::{Error, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{Backlog, SockFlag, accept4, listen};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Gid, Pid, Uid, sethostname, setresgid, setresuid};

use super::agent_task::AgentTask;
use super::disk::{DiskWatch, SandboxProcesses};
use super::exec_args::ExecArgs;
use super::identity::Account;
use super::layer::Layers;
use super::network::{self, GateSocket};
use super::port_dial::{self, DialState, PortDial};
use super::process::{self, Job, JobEnd, Work};
use super::protocol::{
    Answer, Hello, Identity, LaunchMessage, LaunchSpec, PROTOCOL, Request, TerminalSize,
};
use super::seccomp::Filters;
use super::sessions::Sessions;
use super::stdio::{self, redirect_to_null};
use super::step::{Step, StepError};
use super::trust::renewal::TrustFiles;
use super::workbench::{Workbench, WorkbenchStart};
use super::{
    environment, hardening, landlock_domain, listening_ports, packet, process_tree, root,
    socket_owner,
};

/// Maximum number of connections; more are closed at once.
const MAX_CONNECTIONS: usize = 256;

/// Backlog of `init.sock`.
const BACKLOG: i32 = 64;
/// The resources that init inherits from the launcher.
pub(crate) struct InitResources {
    pub(crate) layers: Layers,
    /// `init.sock`.
    pub(crate) listener: OwnedFd,
    pub(crate) watch: DiskWatch,
    /// The `tasks` files of the cgroups of version 1 that init joins.
    pub(crate) cgroups: Vec<File>,
}

/// Runs init in the child that the launcher cloned.
pub(crate) fn run_init(spec: LaunchSpec, resources: InitResources, launcher: OwnedFd) -> ! {
    let code = match set_up(spec, resources, launcher.as_fd()) {
        Ok(mut init) => {
            drop(launcher);
            init.serve()
        }
        Err(StepError { step, source }) => {
            let reason = source.to_string();
            let _ = packet::send(
                launcher.as_fd(),
                &LaunchMessage::Failed { step, reason },
                &[],
            );
            1
        }
    };
    std::process::exit(code);
}

/// Sets the sandbox up, in order, between the clone and the first connection.
fn set_up(
    mut spec: LaunchSpec,
    resources: InitResources,
    launcher: BorrowedFd<'_>,
) -> Result<Init, StepError> {
    redirect_to_null(&[0, 1]).step("closing the creator's channel")?;
    match packet::receive::<LaunchMessage>(launcher).step("waiting for the launcher")? {
        Some((LaunchMessage::Go, _)) => {}
        _ => return Err(Error::other("the launcher has exited")).step("waiting for the launcher"),
    }
    for mut tasks in resources.cgroups {
        // 0 means the writing process.
        tasks.write_all(b"0").step("joining a cgroup")?;
    }
    if let Identity::Range { .. } = spec.identity {
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        setresgid(gid, gid, gid).step("taking the group id")?;
        setresuid(uid, uid, uid).step("taking the user id")?;
    }
    // The signal is set after the change of ids, which clears the setting.
    prctl::set_pdeathsig(Signal::SIGKILL).step("setting the parent-death signal")?;
    umask(Mode::from_bits_truncate(0o022));
    sethostname(spec.config.name.as_str()).step("setting the host name")?;
    let gate_sockets = network::configure(&spec.config.ports).step("building the network")?;
    let root = root::enter(&spec, resources.layers)?;
    if root.has_java {
        environment::add_java(&mut spec.environment);
    }
    // The root of the cgroup namespace is the cgroup that init joined above.
    unshare(CloneFlags::CLONE_NEWCGROUP).step("creating a cgroup namespace")?;
    for what in root.warnings {
        packet::send(launcher, &LaunchMessage::Warning(what), &[]).step("reporting")?;
    }
    redirect_to_null(&[0, 1, 2]).step("closing the host's descriptors")?;
    let filters = Filters::compile(spec.config.system.nested)
        .map_err(Error::other)
        .step("compiling the system call filters")?;
    hardening::set_limits(spec.config.limits, spec.cgroup_limits).step("setting limits")?;
    let agent = spec.agent();
    hardening::empty_bounding_set(agent.capabilities).step("emptying the bounding set")?;
    let init_capabilities = match spec.identity {
        Identity::Range { .. } => hardening::INIT_CAPABILITIES,
        Identity::Single => hardening::INIT_CAPABILITIES_SINGLE_ID,
    };
    let weight_capabilities: &[u32] = match spec.identity {
        Identity::Range { .. } if spec.lowers_session_weights => {
            hardening::SESSION_WEIGHT_CAPABILITIES
        }
        Identity::Range { .. } | Identity::Single => &[],
    };
    // Init must have the capabilities that the agent's processes get.
    let kept = [init_capabilities, agent.capabilities, weight_capabilities].concat();
    hardening::keep_capabilities(&kept).step("dropping capabilities")?;
    hardening::set_undumpable_and_no_new_privs().step("making init undumpable")?;
    let init_directories = landlock_domain::InitDirectories {
        processes: root.proc.as_fd(),
        measured: resources.watch.directory(),
        trusted: root.trust.as_ref().map(TrustFiles::directory),
    };
    let warning = landlock_domain::enter(
        spec.config.system.nested,
        spec.lowers_session_weights,
        &init_directories,
    )
    .step("entering a Landlock domain")?;
    if let Some(what) = warning {
        packet::send(launcher, &LaunchMessage::Warning(what.to_owned()), &[]).step("reporting")?;
    }
    let sessions = match spec
        .lowers_session_weights
        .then(Sessions::listen)
        .transpose()
    {
        Ok(sessions) => sessions,
        // The kernel is older than 5.5, or a seccomp filter outside the sandbox has a listener
        // already.
        Err(error) => {
            let what = format!("cpu: each session of the agent has a full weight ({error})");
            packet::send(launcher, &LaunchMessage::Warning(what), &[]).step("reporting")?;
            None
        }
    };
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.thread_block().step("blocking signals")?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .step("listening to signals")?;

    packet::send(launcher, &LaunchMessage::Ready, &[]).step("reporting")?;
    match packet::receive::<LaunchMessage>(launcher).step("waiting to be released")? {
        Some((LaunchMessage::Detach, _)) => {}
        _ => return Err(Error::other("the launcher has exited")).step("waiting to be released"),
    }
    // Init calls `listen` again, because clients see the credentials of the last caller of
    // `listen`.
    listen(
        &resources.listener,
        Backlog::new(BACKLOG).step("listening")?,
    )
    .step("listening")?;
    prctl::set_pdeathsig(None).step("detaching from the launcher")?;
    packet::send(launcher, &LaunchMessage::Detach, &[]).step("detaching from the launcher")?;
    Ok(Init {
        listener: resources.listener,
        watch: resources.watch,
        signals,
        gate_sockets,
        filters,
        proc: root.proc,
        trust: root.trust,
        sessions,
        agent,
        environment: spec.environment,
        connections: Vec::new(),
        workbench: Workbench::default(),
        subreapers: Vec::new(),
        frozen: false,
    })
}

struct Init {
    listener: OwnedFd,
    watch: DiskWatch,
    signals: SignalFd,
    gate_sockets: Vec<GateSocket>,
    filters: Filters,
    proc: OwnedFd,
    /// The files with additional trusted certificates.
    trust: Option<TrustFiles>,
    /// Handles `setsid` calls if init lowers the weights of the agent's sessions.
    sessions: Option<Sessions>,
    agent: Account,
    environment: Vec<(String, String)>,
    connections: Vec<Connection>,
    workbench: Workbench,
    /// The running subreapers, also of commands that have exited and left processes.
    subreapers: Vec<Pid>,
    /// Whether init has stopped all processes.
    frozen: bool,
}

/// A ready event. The indices refer to connections, which are removed only between two rounds.
enum Event {
    ChildExited,
    Connection,
    SetsidCall,
    Request(usize),
    JobStatus(usize),
    DialReady(usize),
}

struct Connection {
    socket: OwnedFd,
    /// The running command or agent task.
    job: Option<Job>,
    /// The requested port connection, while it is in progress.
    dial: Option<PortDial>,
    /// Whether a command or connection was requested: each connection allows one.
    used: bool,
    /// Whether the job is a download that started in a stopped sandbox.
    is_download_after_stop: bool,
    /// Why the command was killed with all others. The reason is stored, because it may no longer
    /// hold when the exit is reported.
    stopped: Option<String>,
    open: bool,
}

impl Init {
    /// Serves requests until init is killed.
    fn serve(&mut self) -> i32 {
        loop {
            let Ok(ready) = self.wait() else { return 1 };
            for event in ready {
                match event {
                    Event::Connection => self.accept(),
                    Event::ChildExited => self.reap(),
                    Event::SetsidCall => {
                        if let Some(sessions) = &mut self.sessions {
                            sessions.receive(&self.proc);
                        }
                    }
                    Event::Request(index) => self.handle_request(index),
                    Event::JobStatus(index) => self.report_job(index),
                    Event::DialReady(index) => self.continue_dial(index),
                }
            }
            self.connections.retain(|one| one.open);
            if let Some(sessions) = &mut self.sessions {
                sessions.advance(&self.proc);
            }
            self.watch_disk();
        }
    }

    /// Kills all processes while the sandbox exceeds its disk limit.
    fn watch_disk(&mut self) {
        let all_processes = Pid::from_raw(-1);
        let was_stopped = self.watch.stopped().is_some();
        // The call fails with ESRCH if there is no other process.
        let has_processes = kill(all_processes, None).is_ok();
        let processes = SandboxProcesses {
            proc: &self.proc,
            subreapers: &self.subreapers,
        };
        self.watch.check(has_processes, Some(&processes));
        // A download that started after the sandbox was stopped is its only process and only reads.
        let is_download_after_stop =
            |one: &Connection| one.is_download_after_stop && one.job.is_some();
        if was_stopped && self.connections.iter().any(is_download_after_stop) {
            return;
        }
        if let Some(reason) = self.watch.stopped() {
            let _ = kill(all_processes, Signal::SIGKILL);
            for connection in self.connections.iter_mut().filter(|one| one.job.is_some()) {
                connection.stopped.get_or_insert_with(|| reason.to_owned());
            }
        }
    }

    fn wait(&self) -> nix::Result<Vec<Event>> {
        let poll_in = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut all = vec![
            (Event::ChildExited, poll_in(self.signals.as_fd())),
            (Event::Connection, poll_in(self.listener.as_fd())),
        ];
        if let Some(calls) = self.sessions.as_ref().map(Sessions::listener) {
            all.push((Event::SetsidCall, poll_in(calls)));
        }
        for (index, one) in self.connections.iter().enumerate() {
            all.push((Event::Request(index), poll_in(one.socket.as_fd())));
            if let Some(job) = &one.job {
                all.push((Event::JobStatus(index), poll_in(job.status_pipe())));
            }
            if let Some(dial) = &one.dial {
                let poll_fd = PollFd::new(dial.socket(), PollFlags::POLLOUT);
                all.push((Event::DialReady(index), poll_fd));
            }
        }
        let (events, mut ends): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let poll_timeout = self.sessions.as_ref().and_then(Sessions::poll_timeout);
        let poll_timeout = poll_timeout
            .into_iter()
            .chain([self.watch.poll_timeout()])
            .min();
        match poll(&mut ends, poll_timeout) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Vec::new()),
            Err(errno) => return Err(errno),
        }
        let ready = events.into_iter().zip(ends);
        Ok(ready
            .filter(|(_, end)| end.any().unwrap_or(false))
            .map(|(event, _)| event)
            .collect())
    }

    fn accept(&mut self) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let Ok(fd) = accept4(self.listener.as_raw_fd(), flags) else {
            return;
        };
        // SAFETY: `accept4` returned a new descriptor, which has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let hello = Hello { protocol: PROTOCOL };
        if self.connections.len() < MAX_CONNECTIONS
            && packet::send(socket.as_fd(), &hello, &[]).is_ok()
        {
            self.connections.push(Connection {
                socket,
                job: None,
                dial: None,
                used: false,
                is_download_after_stop: false,
                stopped: None,
                open: true,
            });
        }
    }

    /// Handles one request of a connection; a protocol error closes the connection.
    fn handle_request(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        let request = match packet::receive::<Request>(connection.socket.as_fd()) {
            // Received descriptors are closed.
            Ok(Some((request, _))) => request,
            Ok(None) | Err(_) => return connection.close(&self.proc),
        };
        if !connection.open {
            return;
        }
        let done = match (request, &mut connection.job) {
            (Request::Listeners, _) => {
                let what = self
                    .gate_sockets
                    .iter()
                    .map(|socket| (socket.0, socket.1))
                    .collect();
                let sockets: Vec<_> = self
                    .gate_sockets
                    .iter()
                    .map(|socket| socket.2.as_fd())
                    .collect();
                packet::send(
                    connection.socket.as_fd(),
                    &Answer::Listeners(what),
                    &sockets,
                )
            }
            (
                Request::Exec(_)
                | Request::Upload { .. }
                | Request::Download { .. }
                | Request::Connect { .. }
                | Request::Workbench { .. },
                _,
            ) if connection.used => Err(Error::other("one command per connection")),
            (Request::Exec(_) | Request::Upload { .. } | Request::Workbench { .. }, _)
                if self.watch.stopped().is_some() =>
            {
                let reason = self.watch.stopped().unwrap_or_default().to_owned();
                let step = "the sandbox was stopped".to_owned();
                connection.answer(&Answer::Failed { step, reason })
            }
            (Request::Exec(exec), _) => {
                self.watch.wake();
                let work = ExecArgs::read(&exec, &self.environment).map(Work::Command);
                self.start(index, work, exec.terminal)
            }
            (Request::Upload { to, bounds }, _) => {
                self.watch.wake();
                let task = AgentTask::upload(to, bounds);
                self.start(index, Ok(Work::AgentTask(task)), None)
            }
            (Request::Download { from, bounds }, _) => {
                connection.is_download_after_stop = self.watch.stopped().is_some();
                let task = AgentTask::download(from, bounds);
                self.start(index, Ok(Work::AgentTask(task)), None)
            }
            (Request::Connect { port }, _) => {
                connection.used = true;
                connection.handle_dial_state(port_dial::begin(port))
            }
            (Request::Workbench { arguments }, _) => {
                connection.used = true;
                self.watch.wake();
                self.connect_workbench(index, arguments)
            }
            (Request::Ports, _) => match listening_ports::list_listening_ports(&self.proc) {
                Ok(ports) => connection.answer(&Answer::Ports(ports)),
                Err(error) => connection.answer(&Answer::Failed {
                    step: "listing ports".to_owned(),
                    reason: error.to_string(),
                }),
            },
            (Request::Trust(new), _) => {
                let added = self.trust.as_ref().map_or(Ok(()), |files| files.add(&new));
                connection.answer(&match added {
                    Ok(()) => Answer::Done,
                    Err(error) => Answer::Failed {
                        step: "adding a trusted root".to_owned(),
                        reason: error.to_string(),
                    },
                })
            }
            (Request::Owner { from, to }, _) => return self.handle_owner_request(index, from, to),
            (Request::Running, _) => {
                let server = self.workbench.server();
                let commands = process_tree::commands(&self.proc, &self.subreapers, server);
                connection.answer(&Answer::Running(commands))
            }
            (Request::Signal { number }, Some(job)) => {
                job.signal(number);
                Ok(())
            }
            (Request::Kill, Some(job)) => {
                process_tree::kill_tree(&self.proc, job.subreaper());
                Ok(())
            }
            (Request::Freeze { frozen }, _) => {
                self.frozen = frozen;
                if process_tree::freeze_all(&self.proc, frozen) {
                    connection.answer(&Answer::Done)
                } else {
                    let step = "stopping every process".to_owned();
                    let reason = "new processes kept appearing".to_owned();
                    connection.answer(&Answer::Failed { step, reason })
                }
            }
            // The command has just exited; its exit is about to be reported.
            (Request::Signal { .. } | Request::Kill, None) => Ok(()),
        };
        if done.is_err()
            && let Some(connection) = self.connections.get_mut(index)
        {
            connection.close(&self.proc);
        }
    }

    /// Replies with the program that owns a connection of the agent.
    fn handle_owner_request(&mut self, index: usize, from: SocketAddr, to: SocketAddr) {
        let (mut started, mut unreported) = (Vec::new(), Vec::new());
        let jobs = self.connections.iter_mut().flat_map(|one| &mut one.job);
        for job in jobs.chain(self.workbench.job_mut()) {
            match job.command() {
                Some(command) => started.push(command),
                None => unreported.push(job.subreaper()),
            }
        }
        let processes = socket_owner::ProcessView {
            proc: &self.proc,
            subreapers: &self.subreapers,
            started: &started,
            unreported: &unreported,
        };
        let program = socket_owner::find_program(&processes, from, to);
        if let Some(connection) = self.connections.get_mut(index)
            && connection.answer(&Answer::Owner(program)).is_err()
        {
            connection.close(&self.proc);
        }
    }

    /// Starts the command or task of a connection.
    fn start(
        &mut self,
        index: usize,
        work: Result<Work, StepError>,
        terminal: Option<TerminalSize>,
    ) -> std::io::Result<()> {
        let Some(connection) = self.connections.get_mut(index) else {
            return Ok(());
        };
        connection.used = true;
        let started = work.and_then(|work| {
            let ends = stdio::create_stdio(terminal, self.agent)?;
            process::spawn(&work, ends, self.agent, &self.filters)
        });
        match started {
            Ok((job, handed_out)) => {
                let handed_out: Vec<_> = handed_out.iter().map(AsFd::as_fd).collect();
                self.subreapers.push(job.subreaper());
                if let Some(sessions) = &mut self.sessions {
                    sessions.add_command(job.subreaper());
                }
                connection.job = Some(job);
                packet::send(connection.socket.as_fd(), &Answer::Started, &handed_out)
            }
            Err(StepError { step, source }) => {
                let reason = source.to_string();
                connection.answer(&Answer::Failed { step, reason })
            }
        }
    }

    /// Sends a connection to the workbench, which is started at the first request and outlives the
    /// connection.
    fn connect_workbench(&mut self, index: usize, arguments: Vec<Vec<u8>>) -> std::io::Result<()> {
        let connected = self.workbench.connect(
            arguments,
            &WorkbenchStart {
                environment: &self.environment,
                agent: self.agent,
                filters: &self.filters,
            },
        );
        let Some(connection) = self.connections.get(index) else {
            return Ok(());
        };
        match connected {
            Ok((socket, subreaper)) => {
                self.subreapers.extend(subreaper);
                if let (Some(sessions), Some(subreaper)) = (&mut self.sessions, subreaper) {
                    sessions.add_command(subreaper);
                }
                packet::send(
                    connection.socket.as_fd(),
                    &Answer::Connected,
                    &[socket.as_fd()],
                )
            }
            Err(StepError { step, source }) => {
                let reason = source.to_string();
                connection.answer(&Answer::Failed { step, reason })
            }
        }
    }

    /// Continues a connection attempt to a port.
    fn continue_dial(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        if let Some(dial) = connection.dial.take()
            && connection.handle_dial_state(dial.resume()).is_err()
        {
            connection.open = false;
        }
    }

    /// Reports the status that a subreaper sent.
    fn report_job(&mut self, index: usize) {
        let Some(connection) = self.connections.get_mut(index) else {
            return;
        };
        let Some(end) = connection.job.as_mut().and_then(Job::read_status) else {
            return;
        };
        connection.job = None;
        let answer = match end {
            JobEnd::Failed { step, reason } => Answer::Failed { step, reason },
            JobEnd::Exited(code) => {
                let stopped = connection.stopped.take();
                let stopped = stopped.filter(|_| code == 128 + Signal::SIGKILL as i32);
                Answer::Exited { code, stopped }
            }
        };
        if connection.answer(&answer).is_err() {
            connection.open = false;
        }
    }

    /// Reaps every exited process: subreapers, and orphans of dead subreapers.
    ///
    /// A subreaper outlives its descendants unless it is killed: by init together with them, or by
    /// an agent with init's id. Then the orphans become children of init. Their command is unknown,
    /// so init kills them.
    fn reap(&mut self) {
        while let Ok(Some(_)) = self.signals.read_signal() {}
        let any_child = Pid::from_raw(-1);
        let mut has_orphans = false;
        loop {
            let flags = WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED;
            let (exited, exited_normally) = match waitpid(any_child, Some(flags)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid, code == 0),
                Ok(WaitStatus::Signaled(pid, ..)) => (pid, false),
                // An agent with init's id has stopped the subreaper, which would then never report
                // an exit.
                Ok(WaitStatus::Stopped(pid, _)) => {
                    if !self.frozen && self.subreapers.contains(&pid) {
                        let _ = kill(pid, Signal::SIGCONT);
                    }
                    continue;
                }
                Ok(WaitStatus::StillAlive) | Err(_) => break,
                Ok(_) => continue,
            };
            if let Some(at) = self
                .subreapers
                .iter()
                .position(|&subreaper| subreaper == exited)
            {
                self.subreapers.swap_remove(at);
                if let Some(sessions) = &mut self.sessions {
                    sessions.remove_subreaper(exited);
                }
                has_orphans |= !exited_normally;
            }
        }
        if has_orphans {
            process_tree::kill_orphans(&self.proc, &self.subreapers);
        }
    }
}

impl Connection {
    fn answer(&self, answer: &Answer) -> std::io::Result<()> {
        packet::send(self.socket.as_fd(), answer, &[])
    }

    /// Replies with the result of a connection attempt, or stores the attempt if it is in progress.
    fn handle_dial_state(&mut self, state: DialState) -> std::io::Result<()> {
        match state {
            DialState::Connected(socket) => {
                packet::send(self.socket.as_fd(), &Answer::Connected, &[socket.as_fd()])
            }
            DialState::Waiting(dial) => {
                self.dial = Some(dial);
                Ok(())
            }
            DialState::Refused(error) => self.answer(&Answer::Failed {
                step: "connecting".to_owned(),
                reason: error.to_string(),
            }),
        }
    }

    /// Closes the connection. A running command is killed with its descendants; processes that an
    /// exited command left continue.
    fn close(&mut self, proc: &OwnedFd) {
        self.open = false;
        if let Some(job) = self.job.take() {
            process_tree::kill_tree(proc, job.subreaper());
        }
    }
}
