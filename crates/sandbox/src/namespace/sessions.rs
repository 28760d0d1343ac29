//! Lowers the CPU weight of the agent's sessions where no cgroup limits it.
//!
//! The kernel gives each session the weight of one of the operator's sessions (autogroup in
//! sched(7)): nine hundred processes that call `setsid` get nine hundred shares. The weight of a
//! session can be lowered by a write to `/proc/PID/autogroup`, but only after the session exists,
//! and the kernel accepts one such write in 100 ms from all processes together. The call therefore
//! waits for init, which lets one process at a time continue (seccomp_unotify(2)):
//!
//! ```text
//!   setsid ──▶ waiting ──▶ new session ──▶ at nice 19; the next call continues
//!                 │          └───────────▶ exited
//!                 └──▶ EPERM: too many sessions, or the caller leads a process group
//! ```
//!
//! The session of a command that an operator starts keeps its weight, and its call does not wait.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::poll::PollTimeout;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, getsid};

use super::process_tree::{Process, processes};

/// The nice value of the minimum weight: 15, where an operator's session has 1024.
const MIN_NICE_VALUE: &[u8] = b"19";

/// Maximum number of sessions for each processor. Together they weigh half as much as one of the
/// operator's sessions.
const MAX_SESSIONS_PER_PROCESSOR: usize = 32;

/// Minimum of the limit on sessions, for machines with few processors.
const MIN_SESSIONS: usize = 64;

/// Milliseconds between two attempts to change a weight.
const RETRY_MS: u8 = 5;

/// Init's pause after a refused call, because an agent may repeat it.
const REFUSAL_PAUSE: Duration = Duration::from_millis(2);

/// Time after which other calls no longer wait for the session of a continued call. The call may be
/// slow or interrupted, so it is remembered.
const SLOW_CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of remembered calls.
const MAX_SLOW_CALLS: usize = 16;

/// After a scan of all processes, init waits this many times the scan's duration before the next
/// scan.
const PAUSE_FACTOR: u32 = 10;

/// A thread that waits in `setsid`.
struct Call {
    id: u64,
    thread: Pid,
    process: Pid,
}

/// A session whose weight is not changed yet. It may not exist yet.
struct NewSession {
    thread: Pid,
    session: Pid,
    weight: File,
    since: Instant,
}

impl NewSession {
    /// Whether the call is still in progress, or has failed.
    fn is_pending(&self) -> bool {
        getsid(Some(self.session)).is_ok_and(|session| session != self.session)
    }
}

/// The decision about a call.
enum CallDecision {
    /// The call continues, and init lowers the session's weight through this file.
    LowerWeight(File),
    /// The call continues, and the session keeps its weight.
    KeepWeight,
    /// The call fails with EPERM.
    Refuse,
    /// The decision is postponed.
    Wait,
}

/// Handles an agent's calls of `setsid`.
pub(crate) struct Sessions {
    listener: OwnedFd,
    /// Maximum number of sessions.
    max_sessions: usize,
    /// The number of sessions, counted anew when it reaches the maximum.
    session_count: usize,
    /// Subreapers whose command has not created its own session yet.
    expected: Vec<Pid>,
    waiting: VecDeque<Call>,
    new_session: Option<NewSession>,
    /// Continued calls for whose sessions other calls no longer wait.
    slow: Vec<NewSession>,
    /// The session whose weight cannot be changed, because its process is undumpable, such as
    /// ssh-agent. There is at most one.
    full_weight_session: Option<Pid>,
    next_scan: Instant,
    next_decision: Instant,
}

impl Sessions {
    /// Makes every `setsid` of this process and its descendants wait for init, from now on.
    pub(crate) fn listen() -> Result<Self> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Self {
            listener: install_filter()?,
            max_sessions: (processors * MAX_SESSIONS_PER_PROCESSOR).max(MIN_SESSIONS),
            session_count: 0,
            expected: Vec::new(),
            waiting: VecDeque::new(),
            new_session: None,
            slow: Vec::new(),
            full_weight_session: None,
            next_scan: Instant::now(),
            next_decision: Instant::now(),
        })
    }

    /// The descriptor on which calls arrive.
    pub(crate) fn listener(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// The time until the next attempt, if calls wait.
    pub(crate) fn poll_timeout(&self) -> Option<PollTimeout> {
        let waits = self.new_session.is_some() || !self.waiting.is_empty();
        waits.then_some(RETRY_MS.into())
    }

    /// Registers a started command, whose first session keeps its weight.
    pub(crate) fn add_command(&mut self, subreaper: Pid) {
        self.expected.push(subreaper);
    }

    /// Removes an exited subreaper.
    pub(crate) fn remove_subreaper(&mut self, subreaper: Pid) {
        self.expected.retain(|one| *one != subreaper);
    }

    /// Receives one call.
    pub(crate) fn receive(&mut self, proc: &OwnedFd) {
        // The call may have been interrupted, or its process killed.
        let Ok((id, thread)) = receive_call(&self.listener) else {
            return;
        };
        let Some((process, parent)) = thread_process(proc, thread).filter(|_| self.is_valid(id))
        else {
            return;
        };
        if let Some(at) = self
            .expected
            .iter()
            .position(|subreaper| *subreaper == parent)
        {
            self.expected.swap_remove(at);
            let _ = self.reply(id, None);
            return;
        }
        // A thread that calls again was interrupted: its earlier call created no session.
        self.waiting.retain(|one| one.thread != thread);
        let is_repeated =
            |new_session: &NewSession| new_session.thread == thread && new_session.is_pending();
        self.new_session
            .take_if(|new_session| is_repeated(new_session));
        self.slow.retain(|new_session| !is_repeated(new_session));
        self.waiting.push_back(Call {
            id,
            thread,
            process,
        });
    }

    /// Continues waiting calls.
    pub(crate) fn advance(&mut self, proc: &OwnedFd) {
        loop {
            if self.new_session.is_some() && !self.lower_weight(proc) {
                return;
            }
            let finished_slow_call = self
                .slow
                .iter()
                .position(|new_session| !new_session.is_pending());
            self.new_session = finished_slow_call.map(|at| self.slow.swap_remove(at));
            if self.new_session.is_some() {
                continue;
            }
            if Instant::now() < self.next_decision {
                return;
            }
            let Some(call) = self.waiting.pop_front() else {
                return;
            };
            if !self.is_valid(call.id) {
                continue;
            }
            match self.decide(&call, proc) {
                CallDecision::Wait => {
                    self.waiting.push_front(call);
                    return;
                }
                CallDecision::Refuse => {
                    let _ = self.reply(call.id, Some(Errno::EPERM));
                    self.next_decision = Instant::now() + REFUSAL_PAUSE;
                }
                CallDecision::KeepWeight => {
                    self.session_count += 1;
                    if self.reply(call.id, None).is_ok() {
                        self.full_weight_session = Some(call.process);
                    }
                }
                CallDecision::LowerWeight(weight) => {
                    self.session_count += 1;
                    if self.reply(call.id, None).is_ok() {
                        self.new_session = Some(NewSession {
                            thread: call.thread,
                            session: call.process,
                            weight,
                            since: Instant::now(),
                        });
                    }
                }
            }
        }
    }

    /// Decides about the oldest waiting call.
    fn decide(&mut self, call: &Call, proc: &OwnedFd) -> CallDecision {
        // The kernel would refuse the call as well, and no session would follow.
        if killpg(call.process, None) != Err(Errno::ESRCH) {
            return CallDecision::Refuse;
        }
        if self.session_count >= self.max_sessions {
            let Some(all) = self.list_processes(proc) else {
                return CallDecision::Wait;
            };
            self.session_count = count_sessions(&all);
            if self.session_count >= self.max_sessions {
                return CallDecision::Refuse;
            }
        }
        if let Ok(weight) = open_weight(proc, call.process) {
            return CallDecision::LowerWeight(weight);
        }
        match self.full_weight_session {
            None => CallDecision::KeepWeight,
            Some(other) => match self.list_processes(proc) {
                None => CallDecision::Wait,
                Some(all) if find_member(&all, other).is_some() => CallDecision::Refuse,
                Some(_) => CallDecision::KeepWeight,
            },
        }
    }

    /// Lowers the weight of the new session. Returns whether the next call may continue: the
    /// session has the minimum weight, has exited, or is postponed.
    fn lower_weight(&mut self, proc: &OwnedFd) -> bool {
        let Some(new_session) = &mut self.new_session else {
            return true;
        };
        if new_session.is_pending() {
            let slow =
                new_session.since.elapsed() > SLOW_CALL_TIMEOUT && self.slow.len() < MAX_SLOW_CALLS;
            if slow {
                self.slow.extend(self.new_session.take());
            }
            return slow;
        }
        match new_session.weight.write(MIN_NICE_VALUE) {
            Ok(_) => return true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
            // The session's leader has exited, and may have left other processes.
            Err(_) => {}
        }
        let session = new_session.session;
        let Some(all) = self.list_processes(proc) else {
            return false;
        };
        let Some(left) = find_member(&all, session) else {
            return true;
        };
        match (open_weight(proc, left), &mut self.new_session) {
            (Ok(weight), Some(new_session)) => {
                new_session.weight = weight;
                false
            }
            _ if self
                .full_weight_session
                .is_none_or(|one| find_member(&all, one).is_none()) =>
            {
                self.full_weight_session = Some(session);
                true
            }
            // Without this limit the agent could create any number of undumpable sessions with full
            // weight.
            _ => {
                let _ = kill(left, Signal::SIGKILL);
                false
            }
        }
    }

    /// Lists all processes, unless the last scan was too recent.
    fn list_processes(&mut self, proc: &OwnedFd) -> Option<Vec<Process>> {
        let began = Instant::now();
        if began < self.next_scan {
            return None;
        }
        let all = processes(proc);
        self.next_scan = Instant::now() + began.elapsed() * PAUSE_FACTOR;
        Some(all)
    }

    fn is_valid(&self, id: u64) -> bool {
        // SAFETY: the call reads one number, which outlives it.
        let result = unsafe {
            libc::ioctl(
                self.listener.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_ID_VALID,
                &raw const id,
            )
        };
        result == 0
    }

    /// Continues a call, or refuses it.
    fn reply(&self, id: u64, refusal: Option<Errno>) -> Result<()> {
        let mut reply = libc::seccomp_notif_resp {
            id,
            val: 0,
            error: refusal.map_or(0, |errno| -(errno as i32)),
            flags: if refusal.is_some() { 0 } else { CONTINUE },
        };
        // SAFETY: the structure is the one that the call reads, and outlives it.
        let result = unsafe {
            libc::ioctl(
                self.listener.as_raw_fd(),
                libc::SECCOMP_IOCTL_NOTIF_SEND,
                &raw mut reply,
            )
        };
        match result {
            0 => Ok(()),
            _ => Err(Error::last_os_error()),
        }
    }
}

/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`, in the width of the answer's field.
const CONTINUE: u32 = 1;

/// Receives the next call's id and thread. Blocks if there is none.
fn receive_call(listener: &OwnedFd) -> Result<(u64, Pid)> {
    // SAFETY: all-zero is a valid `seccomp_notif`, and the kernel insists on it.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the structure is the one that the call fills in, and outlives it.
    let result = unsafe {
        libc::ioctl(
            listener.as_raw_fd(),
            libc::SECCOMP_IOCTL_NOTIF_RECV,
            &raw mut call,
        )
    };
    if result != 0 {
        return Err(Error::last_os_error());
    }
    let thread = i32::try_from(call.pid).map_err(Error::other)?;
    Ok((call.id, Pid::from_raw(thread)))
}

/// Returns the process of a thread, and its parent.
fn thread_process(proc: &OwnedFd, thread: Pid) -> Option<(Pid, Pid)> {
    let path = format!("{thread}/status");
    let file = openat(proc, path.as_str(), OFlag::O_CLOEXEC, Mode::empty()).ok()?;
    let mut text = Vec::new();
    File::from(file).read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The name comes first and may contain anything but a newline.
    let field = |name: &str| {
        let mut lines = text.lines().skip(1);
        let value = lines.find_map(|line| line.strip_prefix(name))?;
        Some(Pid::from_raw(value.trim().parse().ok()?))
    };
    Some((field("Tgid:")?, field("PPid:")?))
}

/// Opens the file that changes the weight of a process's session.
fn open_weight(proc: &OwnedFd, process: Pid) -> Result<File> {
    let path = format!("{process}/autogroup");
    let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC;
    Ok(openat(proc, path.as_str(), flags, Mode::empty())?.into())
}

/// Counts the sessions.
fn count_sessions(all: &[Process]) -> usize {
    all.iter()
        .map(|one| one.session)
        .collect::<HashSet<_>>()
        .len()
}

/// Finds a process of a session.
fn find_member(all: &[Process], session: Pid) -> Option<Pid> {
    all.iter()
        .find(|one| one.session == session.as_raw())
        .map(|one| Pid::from_raw(one.pid))
}

/// Installs the filter; returns the descriptor on which calls arrive.
fn install_filter() -> Result<OwnedFd> {
    const LOAD: u16 = 0x20;
    const IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let setsid = u32::try_from(libc::SYS_setsid).map_err(Error::other)?;
    let step = |code, k, jt| libc::sock_filter { code, jt, jf: 0, k };
    // The filter compares only the number, because the agent's own filters refuse calls of another
    // architecture.
    let mut program = [
        step(LOAD, 0, 0),
        step(IF_EQUAL, setsid, 1),
        step(RETURN, libc::SECCOMP_RET_ALLOW, 0),
        step(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0),
    ];
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(Error::other)?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the filter and its program outlive the call, which copies them; the result is
    // checked before it is owned.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const filter,
        )
    };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(Error::other)?;
    // SAFETY: the kernel returned a new descriptor, which has no other owner; it is close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
