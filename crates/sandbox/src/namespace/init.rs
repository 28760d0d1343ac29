//! PID 1 of a sandbox: builds it, then serves `init.sock` until it is killed.
//!
//! One thread, one loop, no signal handler: signals from inside that PID 1 does not handle
//! are ignored by the kernel, and SIGCHLD comes by descriptor. It cannot be traced or dumped,
//! and never reads a byte that the agent wrote.

use std::io::Error;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{SockFlag, accept4};
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Gid, Pid, Uid, sethostname, setresgid, setresuid};

use super::network::{self, Door};
use super::process::{self, End, Job};
use super::protocol::{Answer, Hello, Identity, PROTOCOL, Report, Request, Spec};
use super::seccomp::Filters;
use super::step::{Step, Stumble};
use super::{hardening, packet, root};

/// The most connections at a time; more are closed at once.
const MOST_CONNECTIONS: usize = 256;

/// The child's side of the launcher's clone.
pub(crate) fn begin(spec: Spec, launcher: OwnedFd, listener: OwnedFd) -> ! {
    let code = match build(spec, launcher.as_fd(), listener) {
        Ok(mut init) => {
            drop(launcher);
            init.serve()
        }
        Err(Stumble { step, source }) => {
            let reason = source.to_string();
            let _ = packet::send(launcher.as_fd(), &Report::Failed { step, reason }, &[]);
            1
        }
    };
    std::process::exit(code);
}

/// Everything between the clone and the first connection, in order.
fn build(spec: Spec, launcher: BorrowedFd<'_>, listener: OwnedFd) -> Result<Init, Stumble> {
    process::silence(&[0, 1]).step("closing the creator's line")?;
    match packet::receive::<Report>(launcher).step("waiting for the launcher")? {
        Some((Report::Go, _)) => {}
        _ => return Err(Error::other("it went away")).step("waiting for the launcher"),
    }
    if let Identity::Range { .. } = spec.identity {
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        setresgid(gid, gid, gid).step("taking the group id")?;
        setresuid(uid, uid, uid).step("taking the user id")?;
    }
    // After the change of ids, which clears it.
    prctl::set_pdeathsig(Signal::SIGKILL).step("tying init to the launcher")?;
    umask(Mode::from_bits_truncate(0o022));
    // Only now is the cgroup the one that shall look like the root.
    unshare(CloneFlags::CLONE_NEWCGROUP).step("making a cgroup namespace")?;
    sethostname(spec.config.name.as_str()).step("setting the host name")?;
    let doors = network::build(&spec.config.ports).step("building the network")?;
    let root = root::enter(spec.identity, spec.config.name.as_str())?;
    for what in root.warnings {
        packet::send(launcher, &Report::Weaker(what), &[]).step("reporting")?;
    }
    process::silence(&[0, 1, 2]).step("closing the host's descriptors")?;
    let filters = Filters::compile()
        .map_err(Error::other)
        .step("compiling the system call filters")?;
    hardening::limit(spec.config.limits, spec.counted).step("setting limits")?;
    hardening::empty_bounding_set().step("emptying the bounding set")?;
    let kept = match spec.identity {
        Identity::Range { .. } => hardening::OF_INIT,
        Identity::Single => &[],
    };
    hardening::keep_capabilities(kept).step("dropping capabilities")?;
    hardening::close_up().step("closing init up")?;
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.thread_block().step("blocking signals")?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .step("listening to signals")?;

    packet::send(launcher, &Report::Ready, &[]).step("reporting")?;
    match packet::receive::<Report>(launcher).step("waiting to be let go")? {
        Some((Report::Live, _)) => {}
        _ => return Err(Error::other("the launcher went away")).step("waiting to be let go"),
    }
    prctl::set_pdeathsig(None).step("letting go of the launcher")?;
    packet::send(launcher, &Report::Live, &[]).step("letting go of the launcher")?;
    Ok(Init {
        listener,
        signals,
        doors,
        filters,
        proc: root.proc,
        identity: spec.identity,
        environment: spec.environment,
        connections: Vec::new(),
    })
}

struct Init {
    listener: OwnedFd,
    signals: SignalFd,
    doors: Vec<Door>,
    filters: Filters,
    proc: OwnedFd,
    identity: Identity,
    environment: Vec<(String, String)>,
    connections: Vec<Connection>,
}

/// What woke init up; places are those of connections, which only go between two rounds.
enum Event {
    Child,
    Knock,
    Request(usize),
    Told(usize),
}

struct Connection {
    socket: OwnedFd,
    /// Its command, while that runs.
    job: Option<Job>,
    /// Whether it had one: a connection is for one command.
    used: bool,
    open: bool,
}

impl Init {
    /// Answers until somebody kills it.
    fn serve(&mut self) -> i32 {
        loop {
            let Ok(ready) = self.wait() else { return 1 };
            for event in ready {
                match event {
                    Event::Knock => self.welcome(),
                    Event::Child => self.reap(),
                    Event::Request(place) => self.hear(place),
                    Event::Told(place) => self.report(place),
                }
            }
            self.connections.retain(|one| one.open);
        }
    }

    fn wait(&self) -> nix::Result<Vec<Event>> {
        let on = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let mut all = vec![
            (Event::Child, on(self.signals.as_fd())),
            (Event::Knock, on(self.listener.as_fd())),
        ];
        for (place, one) in self.connections.iter().enumerate() {
            all.push((Event::Request(place), on(one.socket.as_fd())));
            if let Some(job) = &one.job {
                all.push((Event::Told(place), on(job.tells())));
            }
        }
        let (events, mut ends): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        match poll(&mut ends, PollTimeout::NONE) {
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

    fn welcome(&mut self) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let Ok(fd) = accept4(self.listener.as_raw_fd(), flags) else {
            return;
        };
        // SAFETY: `accept4` has just made it, for us alone.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let hello = Hello { protocol: PROTOCOL };
        if self.connections.len() < MOST_CONNECTIONS
            && packet::send(socket.as_fd(), &hello, &[]).is_ok()
        {
            self.connections.push(Connection {
                socket,
                job: None,
                used: false,
                open: true,
            });
        }
    }

    /// Takes one request from a connection; whoever breaks the protocol is hung up on.
    fn hear(&mut self, place: usize) {
        let Some(connection) = self.connections.get_mut(place) else {
            return;
        };
        let request = match packet::receive::<Request>(connection.socket.as_fd()) {
            // Descriptors from outside, if there are any, are closed unseen.
            Ok(Some((request, _))) => request,
            Ok(None) | Err(_) => return connection.hang_up(&self.proc),
        };
        if !connection.open {
            return;
        }
        let done = match (request, &mut connection.job) {
            (Request::Listeners, _) => {
                let what = self.doors.iter().map(|door| (door.0, door.1)).collect();
                let sockets: Vec<_> = self.doors.iter().map(|door| door.2.as_fd()).collect();
                packet::send(
                    connection.socket.as_fd(),
                    &Answer::Listeners(what),
                    &sockets,
                )
            }
            (Request::Exec(exec), None) if !connection.used => {
                connection.used = true;
                match process::spawn(&exec, &self.environment, self.identity, &self.filters) {
                    Ok((job, handed_out)) => {
                        let handed_out: Vec<_> = handed_out.iter().map(AsFd::as_fd).collect();
                        connection.job = Some(job);
                        packet::send(connection.socket.as_fd(), &Answer::Started, &handed_out)
                    }
                    Err(Stumble { step, source }) => {
                        let reason = source.to_string();
                        connection.answer(&Answer::Failed { step, reason })
                    }
                }
            }
            (Request::Signal { number }, Some(job)) => {
                job.signal(number);
                Ok(())
            }
            (Request::Kill, Some(job)) => {
                job.kill_tree(&self.proc);
                Ok(())
            }
            (Request::Freeze { frozen }, _) => {
                if process::freeze_all(&self.proc, frozen) {
                    connection.answer(&Answer::Done)
                } else {
                    let step = "stopping every process".to_owned();
                    let reason = "new ones kept coming".to_owned();
                    connection.answer(&Answer::Failed { step, reason })
                }
            }
            (Request::Exec(_), _) => Err(Error::other("out of turn")),
            // It has just ended; its end is on the way.
            (Request::Signal { .. } | Request::Kill, None) => Ok(()),
        };
        if done.is_err() {
            connection.hang_up(&self.proc);
        }
    }

    /// Passes on what a keeper tells.
    fn report(&mut self, place: usize) {
        let Some(connection) = self.connections.get_mut(place) else {
            return;
        };
        let Some(end) = connection.job.as_mut().and_then(Job::hear) else {
            return;
        };
        connection.job = None;
        let answer = match end {
            End::Failed { step, reason } => Answer::Failed { step, reason },
            End::Exited(code) => Answer::Exited { code },
        };
        if connection.answer(&answer).is_err() {
            connection.open = false;
        }
    }

    /// Takes in every process that has ended: keepers, and orphans of dead keepers.
    fn reap(&mut self) {
        while let Ok(Some(_)) = self.signals.read_signal() {}
        let anybody = Pid::from_raw(-1);
        while let Ok(ended) = waitpid(anybody, Some(WaitPidFlag::WNOHANG)) {
            if ended == WaitStatus::StillAlive {
                return;
            }
        }
    }
}

impl Connection {
    fn answer(&self, answer: &Answer) -> std::io::Result<()> {
        packet::send(self.socket.as_fd(), answer, &[])
    }

    /// Ends the connection. A command that still runs ends too, with all it started; one
    /// that has ended may have left something running on purpose.
    fn hang_up(&mut self, proc: &OwnedFd) {
        self.open = false;
        if let Some(job) = self.job.take() {
            job.kill_tree(proc);
        }
    }
}
