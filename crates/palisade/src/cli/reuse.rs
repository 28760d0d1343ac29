//! The sandbox of `run`: an existing sandbox with the name, or a new sandbox.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use config::presets::Preset;
use control::client::{ControlClient, ControlClientError};
use sandbox::name::Slug;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::cli::enter::{RunArgs, name_from_command};
use crate::cli::sandbox_lookup::{self, CurrentRepository, SandboxInfo};
use crate::cli::sandboxes::{CreateOptions, create_sandbox, route, subroute};
use crate::cli::{ports, repo_limit};
use crate::exit::{CliError, CliExit, exit_of};
use crate::output::{self, Spinner};

/// How long to wait for another command that creates the same sandbox.
const CREATE_TIMEOUT: Duration = Duration::from_secs(60);

/// Interval between two checks for the sandbox.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The sandbox to run in, and whether it is new.
pub async fn make_or_reuse(
    gate: &ControlClient,
    args: &RunArgs,
    for_script: bool,
) -> Result<(SandboxInfo, bool)> {
    let create = with_agent_preset(args);
    let Some(name) = &args.name else {
        let name = name_from_command(&args.command)?;
        return Ok((
            create_and_announce(gate, &create, name, for_script).await?,
            true,
        ));
    };
    let slug =
        Slug::from_name(name).map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?;
    let current = CurrentRepository::find().filter(|_| !args.create.no_repo);
    let until = Instant::now() + CREATE_TIMEOUT;
    let mut announced = false;
    loop {
        if let Some(sandbox) =
            sandbox_lookup::find_in_repository(gate, &slug, current.as_ref()).await?
        {
            let sandbox = reuse(gate, sandbox, &args.create).await?;
            note_missing_preset(gate, &sandbox, args).await?;
            return Ok((sandbox, false));
        }
        match create_and_announce(gate, &create, name.clone(), for_script).await {
            // Another command is creating the sandbox; this command waits to use it.
            Err(error) if name_exists(&error) => {
                if !announced && !for_script && Spinner::is_visible() {
                    output::print_message(&format!(
                        "palisade: another command is creating sandbox {slug}; waiting for it"
                    ));
                }
                announced = true;
            }
            made => return Ok((made?, true)),
        }
        if Instant::now() > until {
            let message = format!(
                "another command has been creating sandbox '{slug}' for {} s; try again when it \
                 is done, or use another name",
                CREATE_TIMEOUT.as_secs()
            );
            return Err(CliError::new(CliExit::Exists, message).into());
        }
        sleep(CHECK_INTERVAL).await;
    }
}

/// Prints a note if the command starts an agent whose provider an existing sandbox may not reach:
/// presets are chosen when a sandbox is created.
async fn note_missing_preset(
    gate: &ControlClient,
    sandbox: &SandboxInfo,
    args: &RunArgs,
) -> Result<()> {
    let program = args.command.first().map(Path::new);
    let Some(agent) = program.and_then(Preset::for_program) else {
        return Ok(());
    };
    if sandbox.presets.iter().any(|preset| preset == agent) {
        return Ok(());
    }
    let Some(rule) = Preset::find(agent)?.domains.into_iter().next() else {
        return Ok(());
    };
    let url = format!("https://{}/", rule.host);
    let body = json!({ "url": url, "sandbox": sandbox.id });
    let answer = gate.post("/v1/policy/try", &body).await?;
    if answer.get("reason").and_then(Value::as_str) == Some("host_denied") {
        let (name, program) = (&sandbox.name, output::program_name());
        output::print_message(&format!(
            "palisade: sandbox {name} was created without the preset {agent} and may not reach {}; \
             to allow it: {program} allow {} --for {name}",
            rule.host, rule.host
        ));
    }
    Ok(())
}

/// The options of a new sandbox, with the preset of the agent that the command starts.
fn with_agent_preset(args: &RunArgs) -> CreateOptions {
    let mut options = args.create.clone();
    let program = args.command.first().map(Path::new);
    if let Some(agent) = program.and_then(Preset::for_program) {
        options.presets.insert(0, agent.to_owned());
    }
    options
}

async fn create_and_announce(
    gate: &ControlClient,
    options: &CreateOptions,
    name: String,
    for_script: bool,
) -> Result<SandboxInfo> {
    let sandbox = create_sandbox(gate, options, name, for_script).await?;
    let branch = sandbox.branch_name.as_ref();
    output::print_message(&format!(
        "palisade: sandbox {}{}",
        sandbox.name,
        branch.map_or_else(String::new, |branch| format!(", branch {branch}"))
    ));
    Ok(sandbox)
}

fn name_exists(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref::<ControlClientError>(),
        Some(ControlClientError::Refused { code, .. }) if code == "exists"
    )
}

/// Resumes an existing sandbox and publishes its ports; fails if the options do not match it.
async fn reuse(
    gate: &ControlClient,
    sandbox: SandboxInfo,
    options: &CreateOptions,
) -> Result<SandboxInfo> {
    let registered = if options.repos.is_empty() && options.auth_mode.is_none() {
        Value::Null
    } else {
        gate.get(&format!("/v1/registrations/{}", sandbox.id))
            .await?
    };
    let differences = differences(&sandbox, options, &registered);
    if !differences.is_empty() {
        let name = &sandbox.name;
        let message = format!(
            "sandbox '{name}' already exists and does not match these options:\n  {}\nomit them to \
             use it, or delete it first: palisade delete {name}",
            differences.join("\n  ")
        );
        return Err(CliError::new(CliExit::Exists, message).into());
    }
    resume(gate, &sandbox).await?;
    let now: SandboxInfo = serde_json::from_value(gate.get(&route(&sandbox)).await?)?;
    for note in &now.notes {
        output::print_message(&format!("palisade: {}", output::safe(note)));
    }
    if !options.credentials.is_empty() {
        let body = json!({ "grant": options.credentials });
        gate.post(
            &format!("/v1/registrations/{}/credentials", sandbox.id),
            &body,
        )
        .await?;
    }
    for wanted in &options.publish {
        if !sandbox.published.contains(wanted) {
            ports::publish(gate, &sandbox, *wanted).await?;
        }
    }
    Ok(sandbox)
}

/// The options that do not match the existing sandbox.
fn differences(sandbox: &SandboxInfo, options: &CreateOptions, registered: &Value) -> Vec<String> {
    let mut all = Vec::new();
    if options.dirty {
        all.push("--dirty: applies only to a new sandbox".to_owned());
    }
    if options.depth.is_some() {
        all.push("--depth: applies only to a new sandbox".to_owned());
    }
    if options.setup_command.is_some() {
        all.push("--setup-command: applies only to a new sandbox".to_owned());
    }
    for (flag, wanted, existing) in [
        ("--root", options.root, sandbox.root),
        ("--nested", options.nested, sandbox.nested),
    ] {
        if wanted && !existing {
            all.push(format!(
                "{flag}: the sandbox was created without this option"
            ));
        }
    }
    if let Some(backend) = &options.backend
        && *backend != sandbox.backend
    {
        all.push(format!(
            "--backend {backend}: the sandbox has the backend {}",
            sandbox.backend
        ));
    }
    if let Some(tier) = &options.tier
        && sandbox.tier.as_ref() != Some(tier)
    {
        let has = sandbox.tier.as_deref().unwrap_or("not set");
        all.push(format!("--tier {tier}: its tier is {}", output::safe(has)));
    }
    for preset in &options.presets {
        if !sandbox.presets.contains(preset) {
            all.push(format!("--preset {preset}: it was created without"));
        }
    }
    let text = |value: &Value| output::safe(value.as_str().unwrap_or_default());
    if !options.repos.is_empty() {
        let repos = registered.get("repos").and_then(Value::as_array);
        let registered = repos.into_iter().flatten();
        let registered = registered.filter_map(|repo| serde_json::from_value(repo.clone()).ok());
        let mut existing: Vec<String> = registered.map(|repo| repo_limit::show(&repo)).collect();
        let mut wanted: Vec<String> = options.repos.iter().map(repo_limit::show).collect();
        for list in [&mut existing, &mut wanted] {
            list.sort();
            list.dedup();
        }
        if existing != wanted {
            let existing = if existing.is_empty() {
                "no repository".to_owned()
            } else {
                existing.join(", ")
            };
            all.push(format!(
                "--repo {}: the sandbox may use {existing}",
                wanted.join(", ")
            ));
        }
    }
    if let Some(mode) = &options.auth_mode {
        let existing = registered.get("auth_mode").map(text).unwrap_or_default();
        if existing != *mode {
            all.push(format!(
                "--auth-mode {mode}: the sandbox has the mode {existing}"
            ));
        }
    }
    all
}

/// Resumes a paused sandbox, and restarts one whose processes have ended.
async fn resume(gate: &ControlClient, sandbox: &SandboxInfo) -> Result<()> {
    if sandbox.status == "active" {
        return Ok(());
    }
    let resumed = gate.post(&subroute(sandbox, "resume"), &json!({})).await;
    let name = &sandbox.name;
    let why = output::safe(sandbox.reason.as_deref().unwrap_or(&sandbox.status));
    match resumed {
        Ok(_) if sandbox.status == "paused" => Ok(()),
        Ok(_) => {
            output::print_message(&format!("palisade: sandbox {name} was restarted: {why}"));
            Ok(())
        }
        Err(error) => {
            let error = anyhow::Error::from(error);
            let exit = match exit_of(&error) {
                // The sandbox exists: palisade list shows it with its error.
                CliExit::NotFound => CliExit::Exists,
                other => other,
            };
            let message = format!(
                "sandbox '{name}' cannot be used: {why} ({error:#}); to remove it: palisade delete \
                 {name}"
            );
            Err(CliError::new(exit, message).into())
        }
    }
}
