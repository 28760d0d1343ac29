//! Gate in the background: starts, finds and stops a gate and its watchdog.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use control::client::{ControlClient, ControlClientError};
use control::health::HealthReport;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::exit::{CliError, CliExit, exit_of};
use crate::gate::lock::{self, Holder};
use crate::gate::watchdog::{self, START_LIMIT, WATCHDOG_ARGUMENT};
use crate::output;
use crate::paths::{ConfigPath, Paths};

/// How long to wait for the watchdog's report. The watchdog ends a gate that is not ready after
/// [`START_LIMIT`]; a watchdog without a report at this later time is stuck.
const WATCHDOG_START_TIMEOUT: Duration = Duration::from_secs(35);

/// How long `gate stop` waits: longer than any sensible `shutdown_timeout`.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout of a health query; a gate that takes longer is stuck.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long `--force` waits before it kills: a little more than the usual shutdown.
const FORCE_STOP_TIMEOUT: Duration = Duration::from_secs(12);

/// Poll interval for locks, which send no event.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The route that shows whether a gate runs, without its health checks, which take time.
const HEALTH_WITHOUT_CHECKS: &str = "/v1/health?checks=false";

/// The outcome of [`start`].
#[derive(Debug)]
pub struct StartedGate {
    /// The gate's process.
    pub pid: u32,
    /// Whether the gate was already running.
    pub was_running: bool,
}

/// A client of the running gate, which is started if necessary.
pub async fn client(paths: &Paths, verbose: u8) -> Result<ControlClient> {
    let client = ControlClient::new(&paths.control);
    let query = client_with_timeout(paths);
    match query
        .send(http::Method::GET, HEALTH_WITHOUT_CHECKS, None)
        .await
    {
        Ok(answer) => {
            warn_about_version_mismatch(answer.version());
            Ok(client)
        }
        // A gate that closes the connection is shutting down.
        Err(ControlClientError::Unreachable { .. } | ControlClientError::Broken(_)) => {
            start(paths, verbose).await?;
            Ok(client)
        }
        Err(other @ ControlClientError::Refused { .. }) => Err(other.into()),
    }
}

fn warn_about_version_mismatch(gate: Option<&str>) {
    let own = env!("CARGO_PKG_VERSION");
    if let Some(gate) = gate
        && gate != own
    {
        output::print_message(&format!(
            "palisade: the gate has version {}, this command {own}; to update the gate: palisade gate \
             restart",
            output::safe(gate)
        ));
    }
}

fn client_with_timeout(paths: &Paths) -> ControlClient {
    ControlClient::new(&paths.control).with_timeout(HEALTH_TIMEOUT)
}

/// The gate's health report, with checks that run now. A degraded gate also returns a report.
pub async fn report(paths: &Paths) -> Result<HealthReport, ControlClientError> {
    report_at(paths, "/v1/health").await
}

async fn report_at(paths: &Paths, path: &str) -> Result<HealthReport, ControlClientError> {
    let answer = match client_with_timeout(paths).get(path).await {
        Err(ControlClientError::Refused { body, .. }) if body.get("checks").is_some() => body,
        other => other?,
    };
    serde_json::from_value(answer).map_err(|error| ControlClientError::Broken(error.to_string()))
}

/// Starts a gate unless one answers, and returns when it is ready.
pub async fn start(paths: &Paths, verbose: u8) -> Result<StartedGate> {
    let until = Instant::now() + START_LIMIT;
    loop {
        if let Ok(report) = report_at(paths, HEALTH_WITHOUT_CHECKS).await {
            return Ok(StartedGate {
                pid: report.pid,
                was_running: true,
            });
        }
        let conflict = match lock::find_holder(&paths.watchdog_lock())? {
            Some(_) => CliError::new(
                CliExit::Exists,
                "a gate is being started or stopped; try again",
            )
            .into(),
            None => match start_once(paths, verbose).await {
                Err(error) if exit_of(&error) == CliExit::Exists => error,
                other => return other,
            },
        };
        // Another command has started the gate; or the gate died and its watchdog restarts it;
        // or a gate that is shutting down releases the lock in a moment.
        match wait_for_other_gate(paths, until).await? {
            Some(other) => return Ok(other),
            None if Instant::now() < until => sleep(POLL_INTERVAL).await,
            None => return Err(conflict),
        }
    }
}

async fn start_once(paths: &Paths, verbose: u8) -> Result<StartedGate> {
    paths.prepare()?;
    if let Some(why) = watchdog::failure(&paths.state_dir) {
        output::print_message(&format!(
            "palisade: the gate was down: {why}; restarting it"
        ));
    }
    let log_from = std::fs::metadata(paths.log()).map_or(0, |found| found.len());
    let mut child = spawn(paths, verbose)?;
    let timeout_error =
        || CliError::new(CliExit::TimedOut, "the gate was not ready within 30 s").into();
    let error = match timeout(WATCHDOG_START_TIMEOUT, wait_until_ready(&mut child)).await {
        Ok(Ok(pid)) => {
            return Ok(StartedGate {
                pid,
                was_running: false,
            });
        }
        Ok(Err(error)) if exit_of(&error) == CliExit::TimedOut => timeout_error(),
        Ok(Err(error)) => error,
        Err(_) => {
            // SIGTERM and not SIGKILL: the watchdog must end its gate first.
            if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                send_signal(pid, Signal::SIGTERM)?;
            }
            timeout_error()
        }
    };
    Err(add_log_tail(error, &paths.log(), log_from))
}

/// Starts a watchdog, which starts the gate.
fn spawn(paths: &Paths, verbose: u8) -> Result<Child> {
    let log = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(paths.log())?;
    // An update may have replaced the file of this process.
    let own = std::env::current_exe().ok().filter(|path| path.exists());
    let mut command = Command::new(own.as_deref().unwrap_or(Path::new("/proc/self/exe")));
    command.arg(WATCHDOG_ARGUMENT).arg(&paths.state_dir);
    command.args(["gate", "run", "--detached"]);
    command
        .arg("--state-dir")
        .arg(&paths.state_dir)
        .arg("--control")
        .arg(&paths.control);
    match &paths.config {
        ConfigPath::Named(config) => command.arg("--config").arg(config),
        ConfigPath::Default(_) | ConfigPath::None => command.env_remove("PALISADE_CONFIG"),
    };
    command.args(vec!["-v"; usize::from(verbose)]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .current_dir("/");
    command.spawn().context("cannot start the gate")
}

/// Waits until the watchdog reports the gate's pid. A gate that ends first has written the
/// reason to its log, and its watchdog exits with its code.
async fn wait_until_ready(child: &mut Child) -> Result<u32> {
    let stdout = child.stdout.take().context("the watchdog has no stdout")?;
    let mut lines = BufReader::new(stdout).lines();
    while let Some(line) = lines.next_line().await? {
        if let Some(pid) = watchdog::read_announcement(&line) {
            return Ok(pid);
        }
    }
    let status = child.wait().await?;
    let exit = match status.code() {
        Some(2) => CliExit::Usage,
        Some(4) => CliExit::Exists,
        Some(124) => CliExit::TimedOut,
        _ => CliExit::Failed,
    };
    Err(CliError::new(exit, format!("the gate did not start ({status})")).into())
}

/// Waits until a gate that runs or is being started answers; `None` if it has ended.
async fn wait_for_other_gate(paths: &Paths, until: Instant) -> Result<Option<StartedGate>> {
    while Instant::now() < until && !is_free(paths)? {
        if let Ok(report) = report_at(paths, HEALTH_WITHOUT_CHECKS).await {
            return Ok(Some(StartedGate {
                pid: report.pid,
                was_running: true,
            }));
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(None)
}

/// Adds the last lines of the gate's log to an error.
fn add_log_tail(error: anyhow::Error, log: &Path, from: u64) -> anyhow::Error {
    let exit = exit_of(&error);
    let written = std::fs::read(log).unwrap_or_default();
    let fresh = usize::try_from(from)
        .ok()
        .and_then(|from| written.get(from..))
        .unwrap_or(&written);
    let fresh = String::from_utf8_lossy(fresh);
    let last: Vec<&str> = fresh.lines().rev().take(20).collect();
    let tail: String = last
        .into_iter()
        .rev()
        .map(|line| format!("\n  {line}"))
        .collect();
    CliError::new(exit, format!("{error}{tail}")).into()
}

/// Stops the gate and its watchdog and waits until their locks are free. `false` if neither was
/// running.
pub async fn stop(paths: &Paths, force: bool) -> Result<bool> {
    let holder = lock::find_holder(&paths.lock())?;
    // The watchdog is stopped first, or it would restart a gate that is killed. The watchdog
    // also stops its gate.
    let watched = stop_watchdog(paths).await?;
    match client_with_timeout(paths)
        .post("/v1/shutdown", &json!({}))
        .await
    {
        Ok(_) | Err(ControlClientError::Broken(_)) => {}
        Err(ControlClientError::Unreachable { .. }) => match holder {
            _ if watched => {}
            None => return Ok(false),
            Some(Holder { pid: Some(pid) }) => send_signal(pid, Signal::SIGTERM)?,
            Some(Holder { pid: None }) => {}
        },
        Err(other) => return Err(other.into()),
    }
    let timeout = if force {
        FORCE_STOP_TIMEOUT
    } else {
        STOP_TIMEOUT
    };
    if wait_until_free(paths, timeout).await? {
        return Ok(true);
    }
    let mut left = Vec::new();
    for lock in [paths.watchdog_lock(), paths.lock()] {
        left.extend(lock::find_holder(&lock)?.and_then(|holder| holder.pid));
    }
    let Some(pid) = left.last() else {
        return Ok(true);
    };
    if force {
        for pid in left {
            send_signal(pid, Signal::SIGKILL)?;
        }
        return wait_until_free(paths, STOP_TIMEOUT).await;
    }
    Err(CliError::new(
        CliExit::TimedOut,
        format!(
            "the gate (pid {pid}) did not stop in 30 s; kill it with: palisade gate stop --force"
        ),
    )
    .into())
}

/// Signals the watchdog to stop its gate and end. `false` if there is no watchdog.
async fn stop_watchdog(paths: &Paths) -> Result<bool> {
    let until = Instant::now() + HEALTH_TIMEOUT;
    while let Some(holder) = lock::find_holder(&paths.watchdog_lock())? {
        if let Some(pid) = holder.pid {
            send_signal(pid, Signal::SIGTERM)?;
            return Ok(true);
        }
        if Instant::now() >= until {
            break;
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(false)
}

/// Whether neither a gate nor a watchdog holds the state directory.
fn is_free(paths: &Paths) -> Result<bool> {
    let watchdog = lock::find_holder(&paths.watchdog_lock())?;
    Ok(watchdog.is_none() && lock::find_holder(&paths.lock())?.is_none())
}

async fn wait_until_free(paths: &Paths, limit: Duration) -> Result<bool> {
    let until = Instant::now() + limit;
    while !is_free(paths)? {
        if Instant::now() >= until {
            return Ok(false);
        }
        sleep(POLL_INTERVAL).await;
    }
    Ok(true)
}

/// Signals a process; a process that has already ended is not an error.
fn send_signal(pid: i32, signal: Signal) -> Result<()> {
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot signal the gate (pid {pid})")),
    }
}
