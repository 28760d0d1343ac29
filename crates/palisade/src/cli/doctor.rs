//! `palisade doctor`: checks what this machine supports, and prints a fix for what is missing.

use std::os::unix::net::UnixStream;
use std::process::Command;

use anyhow::Result;
use clap::Args;
use config::section::sandbox::Backend;
use sandbox::namespace::{Namespace, survey};
use serde::Serialize;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::output;
use crate::paths::Paths;

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Exit 1 also for warnings
    #[arg(long)]
    strict: bool,
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Warning,
    Missing,
}

impl Finding {
    fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self {
            name,
            state: State::Ok,
            found: found.into(),
            fix: None,
        }
    }

    fn bad(
        name: &'static str,
        state: State,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self {
            name,
            state,
            found: found.into(),
            fix: Some(fix.into()),
        }
    }
}

impl From<survey::SurveyFinding> for Finding {
    fn from(finding: survey::SurveyFinding) -> Self {
        Self {
            name: finding.what,
            state: match finding.status {
                survey::SurveyStatus::Ok => State::Ok,
                survey::SurveyStatus::Weaker => State::Warning,
                survey::SurveyStatus::Missing => State::Missing,
            },
            found: finding.text,
            fix: finding.fix,
        }
    }
}

pub fn run(args: &DoctorArgs, global: &Global) -> Result<CliExit> {
    let mut findings = vec![kernel()];
    findings.extend(namespaces(global));
    findings.extend([git(), docker(), state(global), configuration(global)]);
    if global.json {
        output::print_json(&findings)?;
    } else {
        for finding in &findings {
            output::print_line(&describe(finding))?;
        }
    }
    let bad = findings.iter().any(|finding| {
        finding.state == State::Missing || (args.strict && finding.state == State::Warning)
    });
    Ok(if bad { CliExit::Failed } else { CliExit::Ok })
}

/// Checks the requirements of the namespace backend if no gate runs yet and the new sandbox would
/// use that backend. The error lists what is missing, with its fix.
pub fn require_namespaces(global: &Global, backend: Option<&str>) -> Result<()> {
    let paths = global.paths()?;
    let gate_runs = UnixStream::connect(&paths.control).is_ok();
    if gate_runs || !uses_namespaces(&paths, backend) {
        return Ok(());
    }
    let missing: Vec<Finding> = std::iter::once(kernel())
        .chain(namespaces(global))
        .filter(|finding| finding.state == State::Missing)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list: Vec<String> = missing.iter().map(describe).collect();
    let message = format!(
        "this machine cannot run sandboxes yet:\n{}\nall checks: palisade doctor",
        list.join("\n")
    );
    Err(CliError::new(CliExit::BackendUnavailable, message).into())
}

/// Whether a new sandbox uses the namespace backend. False if the configuration is invalid, which
/// the gate reports.
fn uses_namespaces(paths: &Paths, backend: Option<&str>) -> bool {
    match backend {
        Some(name) => name == "namespace",
        None => config::load(
            paths.config.current(),
            &crate::gate::read_environment_variable,
        )
        .is_ok_and(|settings| settings.sandbox.backend == Backend::Namespace),
    }
}

fn describe(finding: &Finding) -> String {
    let mark = match finding.state {
        State::Ok => "ok     ",
        State::Warning => "warning",
        State::Missing => "MISSING",
    };
    let fix = finding.fix.as_ref().map_or_else(String::new, |fix| {
        format!("\n         fix: {}", output::safe(fix))
    });
    format!(
        "{mark}  {}: {}{fix}",
        finding.name,
        output::safe(&finding.found)
    )
}

fn kernel() -> Finding {
    let release = read("/proc/sys/kernel/osrelease");
    let version: Vec<u32> = release
        .split('.')
        .map_while(|part| part.parse().ok())
        .take(2)
        .collect();
    // Linux 5.11 added overlayfs in user namespaces; all other requirements are older.
    if version >= vec![5, 11] {
        Finding::ok("kernel", release)
    } else {
        Finding::bad("kernel", State::Missing, release, "use Linux 5.11 or newer")
    }
}

/// Findings of the namespace backend, which tries each requirement.
fn namespaces(global: &Global) -> Vec<Finding> {
    const NAME: &str = "sandboxes";
    let survey = || -> Result<Vec<survey::SurveyFinding>> {
        let paths = global.paths()?;
        paths.prepare()?;
        let init_arguments = crate::gate::own_program().init;
        let directory = paths.state_dir.join("sandboxes");
        // A fix may have to name the path of the program.
        let program = std::env::current_exe()?;
        Ok(Namespace::new(directory, program, init_arguments).survey()?)
    };
    match survey() {
        Ok(findings) => findings.into_iter().map(Finding::from).collect(),
        Err(error) => {
            let found = format!("the check failed: {error:#}");
            vec![Finding::bad(NAME, State::Missing, found, "see the error")]
        }
    }
}

fn git() -> Finding {
    const NAME: &str = "git";
    match Command::new("git").arg("--version").output() {
        Ok(output) if output.status.success() => {
            Finding::ok(NAME, String::from_utf8_lossy(&output.stdout).trim())
        }
        _ => Finding::bad(
            NAME,
            State::Warning,
            "not found",
            "install git; mirrors and agents need it",
        ),
    }
}

fn docker() -> Finding {
    const NAME: &str = "docker";
    match UnixStream::connect("/var/run/docker.sock") {
        Ok(_) => Finding::ok(NAME, "daemon is running"),
        Err(error) => Finding::ok(
            NAME,
            format!("no daemon ({error}); only the docker backend needs it"),
        ),
    }
}

fn state(global: &Global) -> Finding {
    const NAME: &str = "state directory";
    match global
        .paths()
        .and_then(|paths| paths.prepare().map(|()| paths))
    {
        Ok(Paths { state_dir, .. }) => Finding::ok(NAME, state_dir.display().to_string()),
        Err(error) => Finding::bad(NAME, State::Missing, error.to_string(), "see the error"),
    }
}

fn configuration(global: &Global) -> Finding {
    const NAME: &str = "configuration";
    let paths = match global.paths() {
        Ok(paths) => paths,
        Err(error) => {
            return Finding::bad(NAME, State::Missing, error.to_string(), "see the error");
        }
    };
    let Some(file) = paths.config.current() else {
        return Finding::ok(NAME, "none, all defaults; write one: palisade config init");
    };
    match config::load(Some(file), &crate::gate::read_environment_variable) {
        Ok(_) => Finding::ok(NAME, file.display().to_string()),
        Err(problems) => {
            let count = problems.len();
            Finding::bad(
                NAME,
                State::Missing,
                format!("{count} problems"),
                "palisade config check",
            )
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path)
        .map(|text| text.trim_end().to_owned())
        .unwrap_or_default()
}
