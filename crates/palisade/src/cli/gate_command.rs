//! `palisade gate …` and `palisade health`.

use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Subcommand;
use control::client::ClientError;
use control::health::{HealthReport, Status, TaskState};
use serde_json::json;

use crate::cli::{Global, block_on};
use crate::exit::{Exit, Failure};
use crate::gate::background;
use crate::gate::lock::{Holder, StateLock};
use crate::output;
use crate::paths::Paths;

#[derive(Debug, Subcommand)]
pub enum GateCommand {
    /// Serve in the foreground; prints 'ready' on stderr when everything listens
    Run {
        /// Started by `gate start`: log to gate.log, say 'ready' on stdout
        #[arg(long, hide = true)]
        detached: bool,
    },
    /// Start a gate in the background, unless one runs
    Start,
    /// Stop the gate and wait until it is gone
    Stop {
        /// Kill it when it does not stop in time
        #[arg(long, short)]
        force: bool,
    },
    /// Stop the gate and start it again, for instance after an update
    Restart,
    /// Show whether a gate runs, and how it is
    Status,
    /// Show the log of a gate in the background
    Logs {
        /// Go on as lines come
        #[arg(long, short)]
        follow: bool,
        /// How many of the last lines
        #[arg(long, short = 'n', default_value_t = 100)]
        lines: usize,
    },
}

pub fn run(command: GateCommand, global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    match command {
        GateCommand::Run { detached } => crate::gate::run(&paths, global.verbose, detached),
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

async fn start(paths: &Paths, global: &Global) -> Result<Exit> {
    let started = background::start(paths, global.verbose).await?;
    let word = if started.was_running {
        "already running"
    } else {
        "started"
    };
    if global.json {
        let shown = json!({ "status": word, "pid": started.pid, "control": paths.control });
        output::print_json(&shown)?;
    } else {
        let socket = paths.control.display();
        output::print_line(&format!(
            "gate {word} (pid {}), control socket {socket}",
            started.pid
        ))?;
    }
    Ok(Exit::Ok)
}

async fn stop(paths: &Paths, force: bool, global: &Global) -> Result<Exit> {
    let stopped = background::stop(paths, force).await?;
    let word = if stopped { "stopped" } else { "not running" };
    if global.json {
        output::print_json(&json!({ "status": word }))?;
    } else {
        output::print_line(&format!("gate {word}"))?;
    }
    Ok(Exit::Ok)
}

async fn status(paths: &Paths, global: &Global) -> Result<Exit> {
    let report = match background::report(paths).await {
        Ok(report) => report,
        Err(ClientError::Unreachable { .. }) => {
            let holder = StateLock::holder(&paths.lock())?;
            return not_answering(paths, holder, global);
        }
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
    Ok(Exit::Ok)
}

fn not_answering(paths: &Paths, holder: Option<Holder>, global: &Global) -> Result<Exit> {
    if global.json {
        output::print_json(&json!({
            "running": false, "pid": holder.and_then(|held| held.pid), "control": paths.control, "state_dir": paths.state_dir,
        }))?;
        return Ok(Exit::GateUnreachable);
    }
    let message = match holder {
        None => format!(
            "no gate runs in {}; start one: palisade gate start",
            paths.state_dir.display()
        ),
        Some(held) => format!(
            "a gate{} holds {} but does not answer on {}; it may be starting or \
             listening on another --control",
            held.pid
                .map_or_else(String::new, |pid| format!(" (pid {pid})")),
            paths.state_dir.display(),
            paths.control.display()
        ),
    };
    Err(Failure::new(Exit::GateUnreachable, message).into())
}

fn describe(report: &HealthReport, paths: &Paths) -> String {
    let status = match report.status {
        Status::Healthy => "healthy",
        Status::Degraded => "degraded",
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
    for (name, well) in &report.checks {
        let detail = report
            .errors
            .get(name)
            .map_or("ok".into(), |error| output::safe(error));
        let mark = if *well { "check " } else { "FAILED" };
        lines.push(format!("{mark}      {name}: {detail}"));
    }
    for (name, task) in &report.tasks {
        let state = match task.state {
            TaskState::Running => "running",
            TaskState::Waiting => "waiting to be started again",
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
pub fn health(global: &Global) -> Result<Exit> {
    let paths = global.paths()?;
    let report = block_on(async { Ok(background::report(&paths).await?) })?;
    if global.json {
        output::print_json(&report)?;
    } else {
        output::print_line(&describe(&report, &paths))?;
    }
    Ok(match report.status {
        Status::Healthy => Exit::Ok,
        Status::Degraded => Exit::Failed,
    })
}

fn logs(path: &Path, lines: usize, follow: bool) -> Result<Exit> {
    let file = std::fs::File::open(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => anyhow::Error::from(Failure::new(
            Exit::NotFound,
            format!(
                "there is no {}; a gate in the foreground logs to stderr",
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
    Ok(Exit::Ok)
}

/// Prints what is appended, also after the file was set aside for a new one.
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
