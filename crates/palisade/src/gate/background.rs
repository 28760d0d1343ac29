//! A gate in the background: starting it with its watchdog, finding it, stopping both.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use control::client::{Client, ClientError};
use control::health::HealthReport;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::exit::{Exit, Failure, exit_of};
use crate::gate::lock::{self, Holder};
use crate::gate::watchdog::{self, START_LIMIT, WATCHDOG};
use crate::output;
use crate::paths::{ConfigPath, Paths};

/// A watchdog ends a gate that is not ready after [`START_LIMIT`]; one that has not by then is
/// itself stuck.
const WATCHDOG_LIMIT: Duration = Duration::from_secs(35);

/// Longer than any sensible `shutdown_timeout`.
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// A gate that has not answered a short question by then is stuck.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How long `--force` waits before it kills: a little more than the usual shutdown.
const FORCE_LIMIT: Duration = Duration::from_secs(12);

/// Between two looks at something that sends no event.
const STEP: Duration = Duration::from_millis(20);

/// Whether a gate runs, without checks: a listener that does not answer takes time to find out.
const KNOWN_HEALTH: &str = "/v1/health?checks=false";

/// The outcome of [`start`].
#[derive(Debug)]
pub struct Started {
    /// The gate's process.
    pub pid: u32,
    /// Whether it ran before.
    pub was_running: bool,
}

/// A client for a gate that runs, started if need be.
pub async fn client(paths: &Paths, verbose: u8) -> Result<Client> {
    let client = Client::new(&paths.control);
    let asked = client_in_haste(paths);
    match asked.send(http::Method::GET, KNOWN_HEALTH, None).await {
        Ok(answer) => {
            warn_of_other_version(answer.version());
            Ok(client)
        }
        // One that hangs up on such a question is on its way out.
        Err(ClientError::Unreachable { .. } | ClientError::Broken(_)) => {
            start(paths, verbose).await?;
            Ok(client)
        }
        Err(other @ ClientError::Refused { .. }) => Err(other.into()),
    }
}

fn warn_of_other_version(gate: Option<&str>) {
    let own = env!("CARGO_PKG_VERSION");
    if let Some(gate) = gate
        && gate != own
    {
        output::say(&format!(
            "palisade: the gate runs version {}, this is {own}; to change it: palisade gate restart",
            output::safe(gate)
        ));
    }
}

fn client_in_haste(paths: &Paths) -> Client {
    Client::new(&paths.control).within(ANSWER_LIMIT)
}

/// Asks the gate how it is, with checks that are made now. A degraded gate answers too.
pub async fn report(paths: &Paths) -> Result<HealthReport, ClientError> {
    report_at(paths, "/v1/health").await
}

async fn report_at(paths: &Paths, path: &str) -> Result<HealthReport, ClientError> {
    let answer = match client_in_haste(paths).get(path).await {
        Err(ClientError::Refused { body, .. }) if body.get("checks").is_some() => body,
        other => other?,
    };
    serde_json::from_value(answer).map_err(|error| ClientError::Broken(error.to_string()))
}

/// Starts a gate unless one answers, and returns when it is ready.
pub async fn start(paths: &Paths, verbose: u8) -> Result<Started> {
    let until = Instant::now() + START_LIMIT;
    loop {
        if let Ok(report) = report_at(paths, KNOWN_HEALTH).await {
            return Ok(Started {
                pid: report.pid,
                was_running: true,
            });
        }
        let taken = match lock::holder(&paths.watchdog_lock())? {
            Some(_) => Failure::new(Exit::Exists, "a gate is being started or stopped").into(),
            None => match start_once(paths, verbose).await {
                Err(error) if exit_of(&error) == Exit::Exists => error,
                other => return other,
            },
        };
        // Another command was quicker, and its gate is as good; or the gate died and its
        // watchdog restarts it; or the place was taken by a gate that is on its way out, and is
        // free in a moment.
        match wait_for_other(paths, until).await? {
            Some(other) => return Ok(other),
            None if Instant::now() < until => sleep(STEP).await,
            None => return Err(taken),
        }
    }
}

async fn start_once(paths: &Paths, verbose: u8) -> Result<Started> {
    paths.prepare()?;
    if let Some(why) = watchdog::failure(&paths.state_dir) {
        output::say(&format!(
            "palisade: the gate was down: {why}; starting it again"
        ));
    }
    let log_from = std::fs::metadata(paths.log()).map_or(0, |found| found.len());
    let mut child = spawn(paths, verbose)?;
    let late = || Failure::new(Exit::TimedOut, "the gate was not ready in 30 s").into();
    let error = match timeout(WATCHDOG_LIMIT, ready(&mut child)).await {
        Ok(Ok(pid)) => {
            return Ok(Started {
                pid,
                was_running: false,
            });
        }
        Ok(Err(error)) if exit_of(&error) == Exit::TimedOut => late(),
        Ok(Err(error)) => error,
        Err(_) => {
            // Not a kill: the watchdog has to end its gate first.
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                signal(pid, Signal::SIGTERM)?;
            }
            late()
        }
    };
    Err(with_log(error, &paths.log(), log_from))
}

/// Starts a watchdog, which starts the gate.
fn spawn(paths: &Paths, verbose: u8) -> Result<Child> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(paths.log())?;
    // The file this process was started from may have been replaced by an update since.
    let own = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(own.as_deref().unwrap_or(Path::new("/proc/self/exe")));
    command.arg(WATCHDOG).arg(&paths.state_dir);
    command.args(["gate", "run", "--detached"]);
    command
        .arg("--state-dir")
        .arg(&paths.state_dir)
        .arg("--control")
        .arg(&paths.control);
    match &paths.config {
        ConfigPath::Named(config) => command.arg("--config").arg(config),
        ConfigPath::Usual(_) | ConfigPath::Nowhere => command.env_remove("PALISADE_CONFIG"),
    };
    command.args(vec!["-v"; usize::from(verbose)]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .current_dir("/");
    command.spawn().context("cannot start the gate")
}

/// Waits until the watchdog reports the gate's process; a gate that ends first has written why
/// into its log, and its watchdog ends with its code.
async fn ready(child: &mut Child) -> Result<u32> {
    let stdout = child.stdout.take().context("the watchdog has no stdout")?;
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        if let Some(pid) = watchdog::read_announcement(&line) {
            return Ok(pid);
        }
    }
    let status = child.wait().await?;
    let exit = match status.code() {
        Some(2) => Exit::Usage,
        Some(4) => Exit::Exists,
        Some(124) => Exit::TimedOut,
        _ => Exit::Failed,
    };
    Err(Failure::new(exit, format!("the gate did not start ({status})")).into())
}

/// Waits until the gate that runs or is being started answers; `None` when there is none any
/// more.
async fn wait_for_other(paths: &Paths, until: Instant) -> Result<Option<Started>> {
    while Instant::now() < until && !is_free(paths)? {
        if let Ok(report) = report_at(paths, KNOWN_HEALTH).await {
            return Ok(Some(Started {
                pid: report.pid,
                was_running: true,
            }));
        }
        sleep(STEP).await;
    }
    Ok(None)
}

/// The error, with what the gate wrote before it ended.
fn with_log(error: anyhow::Error, log: &Path, from: u64) -> anyhow::Error {
    let exit = exit_of(&error);
    let written = std::fs::read(log).unwrap_or_default();
    let fresh = usize::try_from(from)
        .ok()
        .and_then(|from| written.get(from..))
        .unwrap_or(&written);
    let fresh = String::from_utf8_lossy(fresh);
    let last: Vec<&str> = fresh.lines().rev().take(20).collect();
    let said: String = last
        .into_iter()
        .rev()
        .map(|line| format!("\n  {line}"))
        .collect();
    Failure::new(exit, format!("{error}{said}")).into()
}

/// Stops the gate and its watchdog and waits until their locks are free. `false` when there was
/// neither.
pub async fn stop(paths: &Paths, force: bool) -> Result<bool> {
    let holder = lock::holder(&paths.lock())?;
    // The watchdog first, or it would take a forced end for a death. It stops the gate, too.
    let watched = stop_watchdog(paths).await?;
    match client_in_haste(paths)
        .post("/v1/shutdown", &json!({}))
        .await
    {
        Ok(_) | Err(ClientError::Broken(_)) => {}
        Err(ClientError::Unreachable { .. }) => match holder {
            _ if watched => {}
            None => return Ok(false),
            Some(Holder { pid: Some(pid) }) => signal(pid, Signal::SIGTERM)?,
            Some(Holder { pid: None }) => {}
        },
        Err(other) => return Err(other.into()),
    }
    let patience = if force { FORCE_LIMIT } else { STOP_LIMIT };
    if wait_until_free(paths, patience).await? {
        return Ok(true);
    }
    let mut left = Vec::new();
    for lock in [paths.watchdog_lock(), paths.lock()] {
        left.extend(lock::holder(&lock)?.and_then(|holder| holder.pid));
    }
    let Some(pid) = left.last() else {
        return Ok(true);
    };
    if force {
        for pid in left {
            signal(pid, Signal::SIGKILL)?;
        }
        return wait_until_free(paths, STOP_LIMIT).await;
    }
    Err(Failure::new(
        Exit::TimedOut,
        format!(
            "the gate (pid {pid}) did not stop in 30 s; kill it with: palisade gate stop --force"
        ),
    )
    .into())
}

/// Makes the watchdog stop its gate and end. `false` when there is no watchdog.
async fn stop_watchdog(paths: &Paths) -> Result<bool> {
    let until = Instant::now() + ANSWER_LIMIT;
    while let Some(holder) = lock::holder(&paths.watchdog_lock())? {
        if let Some(pid) = holder.pid {
            signal(pid, Signal::SIGTERM)?;
            return Ok(true);
        }
        if Instant::now() >= until {
            break;
        }
        sleep(STEP).await;
    }
    Ok(false)
}

/// Whether neither a gate nor a watchdog holds the state directory.
fn is_free(paths: &Paths) -> Result<bool> {
    let watchdog = lock::holder(&paths.watchdog_lock())?;
    Ok(watchdog.is_none() && lock::holder(&paths.lock())?.is_none())
}

async fn wait_until_free(paths: &Paths, limit: Duration) -> Result<bool> {
    let until = Instant::now() + limit;
    while !is_free(paths)? {
        if Instant::now() >= until {
            return Ok(false);
        }
        sleep(STEP).await;
    }
    Ok(true)
}

/// Signals a process; one that has ended meanwhile needs no signal.
fn signal(pid: i32, signal: Signal) -> Result<()> {
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot signal the gate (pid {pid})")),
    }
}
