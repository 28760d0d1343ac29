//! `palisade gate …` and `palisade health`.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;
use control::client::ControlClientError;
use control::health::{HealthReport, HealthStatus, TaskState};
use serde_json::json;

use crate::cli::{Global, block_on};
use crate::exit::{CliError, CliExit};
use crate::gate::{Start, background, lock, watchdog};
use crate::output;
use crate::paths::Paths;

#[derive(Debug, Subcommand)]
pub enum GateCommand {
    /// Run the gate in the foreground; prints 'ready' on stderr when it serves
    Run {
        /// Started by a watchdog: log to gate.log, write 'ready' to stdout
        #[arg(long, hide = true)]
        detached: bool,
        /// How the previous gate died
        #[arg(long, hide = true, requires = "detached")]
        after_death: Option<String>,
    },
    /// Start a gate in the background, which is restarted if it dies
    Start,
    /// Stop the gate and wait for it to exit
    Stop {
        /// Kill the gate if it does not stop in time
        #[arg(long, short)]
        force: bool,
    },
    /// Restart the gate, for example after an update
    Restart,
    /// Show whether the gate is running, and its health
    Status,
    /// Show the log of a gate in the background
    Logs {
        /// Follow the log
        #[arg(long, short)]
        follow: bool,
        /// Number of lines to show from the end
        #[arg(long, short = 'n', default_value_t = 100)]
        lines: usize,
    },
}

pub fn run(command: GateCommand, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    match command {
        GateCommand::Run {
            detached,
            after_death,
        } => {
            let start = if detached {
                Start::Detached { after_death }
            } else {
                Start::Foreground
            };
            crate::gate::run(&paths, global.verbose, start)
        }
        GateCommand::Start => block_on(start(&paths, global)),
        GateCommand::Stop { force } => block_on(stop(&paths, force, global)),
        GateCommand::Restart => block_on(async {
            stop(&paths, false, global).await?;
            start(&paths, global).await
        }),
        GateCommand::Status => block_on(status(&paths, global)),
        GateCommand::Logs { follow, lines } => logs(&paths.log(), lines, follow),
    }
}

async fn start(paths: &Paths, global: &Global) -> Result<CliExit> {
    let started = background::start(paths, global.verbose).await?;
    let status = if started.was_running {
        "already running"
    } else {
        "started"
    };
    if global.json {
        let shown = json!({ "status": status, "pid": started.pid, "control": paths.control });
        output::print_json(&shown)?;
    } else {
        let socket = paths.control.display();
        output::print_line(&format!(
            "gate {status} (pid {}), control socket {socket}",
            started.pid
        ))?;
    }
    Ok(CliExit::Ok)
}

async fn stop(paths: &Paths, force: bool, global: &Global) -> Result<CliExit> {
    let stopped = background::stop(paths, force).await?;
    let status = if stopped { "stopped" } else { "not running" };
    if global.json {
        output::print_json(&json!({ "status": status }))?;
    } else {
        output::print_line(&format!("gate {status}"))?;
    }
    Ok(CliExit::Ok)
}

async fn status(paths: &Paths, global: &Global) -> Result<CliExit> {
    let report = match background::report(paths).await {
        Ok(report) => report,
        Err(ControlClientError::Unreachable { .. }) => return not_answering(paths, global),
        Err(other) => return Err(other.into()),
    };
    if global.json {
        let shown = json!({
            "running": true,
            "control": paths.control,
            "state_dir": paths.state_dir,
            "config": report.config,
            "status": report.status,
            "pid": report.pid,
            "version": report.version,
            "checks": report.checks,
            "errors": report.errors,
            "tasks": report.tasks,
            "listeners": report.listeners,
            "notes": report.notes,
        });
        output::print_json(&shown)?;
    } else {
        output::print_line(&describe(&report, paths))?;
    }
    Ok(CliExit::Ok)
}

fn not_answering(paths: &Paths, global: &Global) -> Result<CliExit> {
    if global.json {
        let holder = lock::find_holder(&paths.lock())?;
        output::print_json(&json!({
            "running": false,
            "pid": holder.and_then(|held| held.pid),
            "restarting": holder.is_none() && lock::find_holder(&paths.watchdog_lock())?.is_some(),
            "failure": watchdog::failure(&paths.state_dir),
            "control": paths.control,
            "state_dir": paths.state_dir,
        }))?;
        return Ok(CliExit::GateUnreachable);
    }
    Err(CliError::new(CliExit::GateUnreachable, why_unreachable(paths)?).into())
}

/// Why the gate does not answer.
fn why_unreachable(paths: &Paths) -> Result<String> {
    let state_dir = paths.state_dir.display();
    if let Some(held) = lock::find_holder(&paths.lock())? {
        return Ok(format!(
            "the gate{} of {state_dir} does not answer on {}: it may be starting, or listen on \
             another --control socket; see: palisade gate logs",
            held.pid
                .map_or_else(String::new, |pid| format!(" (pid {pid})")),
            paths.control.display()
        ));
    }
    if lock::find_holder(&paths.watchdog_lock())?.is_some() {
        return Ok(format!(
            "the gate in {state_dir} is being started or restarted; see: palisade gate logs"
        ));
    }
    Ok(match watchdog::failure(&paths.state_dir) {
        Some(why) => format!(
            "the gate is not running in {state_dir}: {why}; see: palisade gate logs; start it \
             again: palisade gate start"
        ),
        None => format!("the gate is not running in {state_dir}; start it: palisade gate start"),
    })
}

fn describe(report: &HealthReport, paths: &Paths) -> String {
    let status = match report.status {
        HealthStatus::Healthy => "healthy",
        HealthStatus::Degraded => "degraded",
    };
    let config = report.config.as_ref().map_or_else(
        || "none, all defaults".to_owned(),
        |path| output::safe(&path.display().to_string()),
    );
    let mut lines = vec![
        format!(
            "gate        {status}, pid {}, version {}",
            report.pid, report.version
        ),
        format!("state       {}", paths.state_dir.display()),
        format!("config      {config}"),
    ];
    for (name, address) in &report.listeners {
        lines.push(format!("listening   {name}: {}", output::safe(address)));
    }
    for (name, is_ok) in &report.checks {
        let detail = report
            .errors
            .get(name)
            .map_or("ok".into(), |error| output::safe(error));
        let mark = if *is_ok { "check " } else { "FAILED" };
        lines.push(format!("{mark}      {name}: {detail}"));
    }
    for (name, task) in &report.tasks {
        let state = match task.state {
            TaskState::Running => "running",
            TaskState::Waiting => "waiting for its restart",
            TaskState::Stopped => "stopped",
        };
        let past = match (&task.last_error, task.restarts) {
            (Some(error), n) => format!(", {n} restarts, last: {}", output::safe(error)),
            (None, _) => String::new(),
        };
        lines.push(format!("task        {name}: {state}{past}"));
    }
    for (name, note) in &report.notes {
        lines.push(format!("note        {name}: {}", output::safe(note)));
    }
    lines.join("\n")
}

/// `palisade health`.
pub fn health(global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    let report = match block_on(async { Ok(background::report(&paths).await) })? {
        Err(ControlClientError::Unreachable { .. }) => {
            return Err(CliError::new(CliExit::GateUnreachable, why_unreachable(&paths)?).into());
        }
        other => other?,
    };
    if global.json {
        output::print_json(&report)?;
    } else {
        output::print_line(&describe(&report, &paths))?;
    }
    Ok(match report.status {
        HealthStatus::Healthy => CliExit::Ok,
        HealthStatus::Degraded => CliExit::Failed,
    })
}

fn logs(path: &Path, lines: usize, follow: bool) -> Result<CliExit> {
    let file = std::fs::File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => anyhow::Error::from(CliError::new(
            CliExit::NotFound,
            format!(
                "{} does not exist: no gate has run in the background yet, and a gate in the \
                 foreground logs to stderr",
                path.display()
            ),
        )),
        _ => error.into(),
    })?;
    let mut reader = BufReader::new(file);
    let mut last = std::collections::VecDeque::new();
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        last.push_back(std::mem::take(&mut line));
        if last.len() > lines {
            last.pop_front();
        }
    }
    for line in last {
        output::write_out(&line)?;
    }
    if follow {
        block_on(follow_log(path, reader.stream_position()?))?;
    }
    Ok(CliExit::Ok)
}

/// Prints what is appended to the log, also after a rotation.
async fn follow_log(path: &Path, mut position: u64) -> Result<()> {
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let Ok(mut file) = std::fs::File::open(path) else {
            continue;
        };
        let length = file.metadata()?.len();
        if length < position {
            position = 0;
        }
        if length > position {
            file.seek(SeekFrom::Start(position))?;
            let mut fresh = Vec::new();
            file.take(1024 * 1024)
                .read_to_end(&mut fresh)
                .context("cannot read the log")?;
            position += fresh.len() as u64;
            output::write_out(&fresh)?;
        }
    }
}
